"""What a mechanism costs: epsilon spent, and the paper's nominal epsilon.

Every epsilon here except `nominal_epsilon` is a proven upper bound, on dp_accounting (`composition`). What is ours is
the choice of the worst case that is handed to it (`worst_case`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisecast.privacy.composition import EXACT, NONE, smaller_bound, zero_note
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.renyi import ORDERS, smallest_epsilons
from noisecast.privacy.sampling import Sampler
from noisecast.privacy.worst_case import WorstCase

USUAL_DELTA = 1e-5


@dataclass(frozen=True)
class PrivacySpent:
    """What one run released. Tuning, repeats and whatever else touched the data are not in it.

    Args:
      epsilon: the smallest proven upper bound, inf when there is none.   target_delta: the delta it holds at.
      accountant: whose number it is.   adjacency: which neighbours.
      nominal_epsilon: the paper's formula, not a guarantee; None where undefined.
      details: every accountant's epsilon, or why it has none.   note: what the reader must know, or None.
    """

    epsilon: float
    target_delta: float
    accountant: str
    adjacency: Adjacency
    nominal_epsilon: float | None
    details: dict[str, float | str] = field(default_factory=dict)
    note: str | None = None


def epsilon_spent(
    mechanism: SampledGaussian, *, num_steps: int, target_delta: float, time_limit_s: float = 30.0
) -> PrivacySpent:
    """The (epsilon, delta) that num_steps steps are proven to satisfy: the smaller of a PLD and an RDP upper bound.

    Without sampling the Gaussian mechanism's exact epsilon is returned instead. PLD is refined until its epsilon has
    settled within 0.5 %; it only errs upwards. When it does not fit the time or the grid, `note` and `details` say
    so.

    Args:
      mechanism: what every step released.
      num_steps: T >= 0.
      target_delta: 0 < delta < 1.
      time_limit_s: PLD starts no grid that would end later than this [s].
    Returns: PrivacySpent.
    Raises: ValueError when num_steps or target_delta is out of range.

    >>> from noisecast.privacy.sampling import Poisson
    >>> mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, 25_000))
    >>> spent = epsilon_spent(mechanism, num_steps=39_000, target_delta=1e-5)
    >>> round(spent.epsilon, 2), spent.accountant, round(spent.nominal_epsilon, 3)
    (2.79, 'PLD', 1.715)
    """
    mechanism.dp_event(num_steps)  # checks num_steps
    check_delta(target_delta)
    z, sampler = mechanism.noise_multiplier, mechanism.sampler
    spent = _spent(z, sampler, mechanism.adjacency, int(num_steps), float(target_delta), float(time_limit_s))
    return replace(spent, details=dict(spent.details))


# Two mechanisms that differ only in the clip cost the same, so a grid over the clip asks once.
@lru_cache(maxsize=4096)
def _spent(
    z: float, sampler: Sampler, adjacency: Adjacency, num_steps: int, target_delta: float, time_limit_s: float
) -> PrivacySpent:
    deadline = time.monotonic() + time_limit_s
    step = WorstCase.of(sampler, z, adjacency, num_steps)
    nominal = None
    if z > 0 and sampler.sampling_probability is not None:
        nominal = nominal_epsilon(
            noise_multiplier=z,
            sampling_probability=sampler.sampling_probability,
            num_steps=num_steps,
            target_delta=target_delta,
        )

    def answer(
        epsilon: float, accountant: str, details: dict[str, float | str], note: str | None = None
    ) -> PrivacySpent:
        return PrivacySpent(epsilon, target_delta, accountant, adjacency, nominal, details, note)

    if step.count == 0:
        return answer(0.0, NONE, {NONE: 0.0}, "No step was taken, so nothing was released.")
    if z == 0:
        return answer(math.inf, NONE, {NONE: math.inf}, "Without noise (noise_multiplier 0) there is no guarantee.")
    if step.probability == 1:
        epsilon = step.exact_epsilon(target_delta)
        return answer(epsilon, EXACT, {EXACT: epsilon}, zero_note(epsilon))

    return answer(*smaller_bound([step], target_delta, deadline))


def epsilon_curve(mechanism: SampledGaussian, steps: ArrayLike, target_delta: float) -> NDArray[np.float64]:
    """A cheap upper bound on epsilon after each of `steps` steps: RDP, or exact without sampling. For a progress bar.

    Args:
      mechanism: what every step releases.   steps: (k,) integers >= 0.   target_delta: 0 < delta < 1.
    Returns: (k,) epsilon, at least what `epsilon_spent` says.

    >>> from noisecast.privacy.sampling import Poisson
    >>> mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, 25_000))
    >>> epsilon_curve(mechanism, [0, 390, 39_000], 1e-5).round(2).tolist()
    [0.0, 0.84, 3.03]
    """
    check_delta(target_delta)
    return epsilons_by_rdp(mechanism, np.atleast_1d(np.asarray(steps)), target_delta)


def epsilons_by_rdp(
    mechanism: SampledGaussian, counts: NDArray, target_delta: float, ladder: Sequence[tuple] = ORDERS
) -> NDArray:
    """Epsilon after each number of steps, by Renyi divergences or, without sampling, exactly.

    Args:
      mechanism: what every step releases.   counts: (k,) integers >= 0.   target_delta: 0 < delta < 1.
      ladder: orders > 1, ascending, as `smallest_epsilons` takes them.
    Returns: (k,) epsilon >= 0; inf without noise.

    >>> from noisecast.privacy.sampling import Poisson
    >>> mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, 25_000))
    >>> epsilons_by_rdp(mechanism, np.array([0, 390]), 1e-5).round(2).tolist()
    [0.0, 0.84]
    """
    z, sampler, adjacency = mechanism.noise_multiplier, mechanism.sampler, mechanism.adjacency
    each = [WorstCase.of(sampler, z, adjacency, int(count)) for count in counts]
    if z == 0:
        return np.array([math.inf if step.count else 0.0 for step in each])
    sampled = [step for step in each if step.count and step.probability < 1]
    sampled_counts = [[step.count] for step in sampled]
    bounds = iter(smallest_epsilons([sampled[0].pair], sampled_counts, target_delta, ladder) if sampled else ())
    return np.array(
        [
            0.0
            if step.count == 0
            else float(next(bounds))
            if step.probability < 1
            else step.exact_epsilon(target_delta)
            for step in each
        ]
    )


def epsilon_text(epsilon: float, digits: int = 4) -> str:
    """Rounded up, to the private side: a shown epsilon is never below the proven one.

    Args:
      epsilon: >= 0, inf allowed.   digits: significant ones; >= 1.
    Returns: the text; the number in it is at least epsilon.

    >>> epsilon_text(2.78901), epsilon_text(0.99996), epsilon_text(3651.2), epsilon_text(0.0), epsilon_text(math.inf)
    ('2.79', '1', '3652', '0', 'inf')
    """
    return _text_rounded_up(Decimal(epsilon), digits)


def noise_text(noise_multiplier: float, digits: int = 4) -> str:
    """Rounded up as well, so that the epsilon beside it holds at the noise as it is written.

    Args:
      noise_multiplier: z >= 0.   digits: significant ones; >= 1.
    Returns: the text; the number in it is at least z.

    >>> noise_text(0.61411), noise_text(2.02), noise_text(0.8332, 3)
    ('0.6142', '2.02', '0.834')
    """
    return _text_rounded_up(Decimal(repr(float(noise_multiplier))), digits)  # as it is typed: 2.02 is 2.02


def _text_rounded_up(number: Decimal, digits: int) -> str:
    if number == 0 or not number.is_finite():
        return f"{float(number):g}"
    last_digit = Decimal(1).scaleb(number.adjusted() - digits + 1)
    return f"{float(number.quantize(last_digit, ROUND_CEILING)):.{digits}g}"


def nominal_epsilon(
    *, noise_multiplier: float, sampling_probability: float, num_steps: float, target_delta: float
) -> float:
    """The paper's epsilon, q sqrt(T ln(1/delta)) / z. Not a guarantee.

    Abadi et al. (CCS 2016, Thm 1) with its constant set to 1 and its conditions dropped, as in the paper "Adaptive
    Methods Are Preferable in High Privacy Settings: An SDE Perspective". Below z of about 1 it is too small, by factors
    from 1.5 up; for large z it is somewhat too large. Kept to reproduce the paper's axes.

    Args:
      noise_multiplier: z > 0.   sampling_probability: 0 < q <= 1.   num_steps: T >= 0.   target_delta: 0 < delta < 1.
    Returns: () >= 0.
    Raises: ValueError when a number is out of range.

    >>> setting = {"sampling_probability": 64 / 25_000, "num_steps": 39_000, "target_delta": 1e-5}
    >>> round(nominal_epsilon(noise_multiplier=1.0, **setting), 3)
    1.715
    """
    from noisecast.theory import optimal  # SciPy, which takes a second to import

    if not noise_multiplier > 0:
        raise ValueError(f"Expected noise_multiplier > 0, got {noise_multiplier}.")
    if not 0 < sampling_probability <= 1:
        raise ValueError(f"Expected 0 < sampling_probability <= 1, got {sampling_probability}.")
    check_delta(target_delta)
    return optimal.nominal_epsilon(
        noise_multiplier, sampling_probability=sampling_probability, num_steps=num_steps, target_delta=target_delta
    )


def warnings_for(mechanism: SampledGaussian, *, target_delta: float) -> list[str]:
    """Sentences that belong beside the epsilon: a delta too large for the data, a sampler that earns no amplification.

    Args:
      mechanism: what every step releases.   target_delta: 0 < delta < 1.
    Returns: the sentences; none where all is well.
    Raises: ValueError for a delta out of range.

    >>> from noisecast.privacy.sampling import Poisson
    >>> mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, 25_000))
    >>> warnings_for(mechanism, target_delta=1e-5)
    []
    """
    check_delta(target_delta)
    sentences = []
    n = mechanism.sampler.num_examples
    if n is not None and target_delta >= 1 / n:
        sentences.append(
            f"Expected target_delta < 1 / num_examples = {1 / n:.3g}, got {target_delta:g}: publishing a few records "
            "outright would satisfy it; use a smaller delta."
        )
    if mechanism.noise_multiplier == 0:
        sentences.append("Without noise (noise_multiplier 0) there is no guarantee: epsilon is infinite.")
    return sentences


def default_delta(num_examples: float | None) -> float:
    """The delta of commands and files that name none: 1e-5, or the largest power of ten below 1 / n where that is less.

    Args:
      num_examples: n, as declared and public; None where the examples are a stream.

    >>> default_delta(455), default_delta(99_999), default_delta(100_000), default_delta(None)
    (1e-05, 1e-05, 1e-06, 1e-05)
    """
    # By the digits of n: log10(1000) need not be the integer 3.
    return min(USUAL_DELTA, 1.0 if num_examples is None else float(f"1e-{len(str(int(num_examples)))}"))


def check_delta(target_delta: float) -> None:
    """Whether this is a delta.

    Args:
      target_delta: in (0, 1).
    Raises: ValueError otherwise.

    >>> check_delta(1e-5)
    """
    if not 0 < target_delta < 1:
        raise ValueError(f"Expected 0 < target_delta < 1, got {target_delta}.")
