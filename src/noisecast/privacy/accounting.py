"""What a mechanism costs: epsilon spent, and the paper's nominal epsilon.

Every epsilon here except `nominal_epsilon` is a proven upper bound, on dp_accounting. What is ours is the choice of the
worst case that is handed to it. One step is dominated by a pair (P, Q) when H_g(P, Q) = integral (P - g Q)_+ is at
least that of every pair of neighbours for all g > 0; then T adaptive steps are dominated by T independent copies. In
units of l2_clip_norm, with noise N(0, z^2), N_m short for N(m, z^2) and g >= 1 (g < 1 follows with P and Q swapped):

* Poisson, add/remove:  H_g(q N_1 + (1-q) N_0, N_0), and the reverse direction.
* Poisson, replace one: H_g(q N_1 + (1-q) N_0, q N_-1 + (1-q) N_0). Given the other records the sum is a mixture with
  the record at u, at v, or absent. Turn v away from u, its length fixed: H_g grows, because the set A = {P > g Q}
  contains, with every point beyond the line through 0 and v, its mirror image on the side of u. So v = -c u; and on
  that line A is a half line, so H_g grows with both lengths.
* Fixed size, replace one: H_g(q N_2 + (1-q) N_0, N_0). Given the rest of the batch the free place holds the record
  (probability q) or another one at w, so P = q N_u + (1-q) N_w and Q = q N_v + (1-q) N_w with all three in the unit
  ball. Advanced joint convexity (Balle, Barthe and Gaboardi, NeurIPS 2018, Thm 2) bounds H_{1 + q (g - 1)}(P, Q) by q
  max(H_g(N_u, N_w), H_g(N_u, N_v)), at most q H_g(N_2, N_0), and v = w = -u attains it. No smaller shift will do: this
  case is worse than Poisson with replace one.
* Without sampling:     H_g(N_D, N_0), D = 1 or (replace one) 2, exactly: E steps are one step with z / sqrt(E).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.renyi import MACHINE_EPS, ORDERS, SampledPair, smallest_epsilons
from noisecast.privacy.sampling import Sampler

PLD, RDP, EXACT, NONE = "PLD", "RDP", "Gaussian (exact)", "none"
STABLE = 0.005  # a PLD grid is fine enough when it moved the epsilon of one twice as coarse by less than this fraction
MAX_STEP_LOSSES, MAX_TOTAL_LOSSES = 1_000_000, 8_000_000  # most grid points of one step's and of all steps' losses

USUAL_DELTA = 1e-5


@dataclass(frozen=True)
class PrivacySpent:
    """What one run released. Tuning, repeats and whatever else touched the data are not in it.

    epsilon: the smallest proven upper bound, inf when there is none.   target_delta: the delta it holds at.
    accountant: whose number it is.   adjacency: which neighbours.   details: every accountant's epsilon, or why it has
    none.
    nominal_epsilon: the paper's formula, not a guarantee; None where undefined.   note: what the reader must know, or
    None.
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
    step = _Step.of(sampler, z, adjacency, num_steps)
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
        return answer(epsilon, EXACT, {EXACT: epsilon}, _zero_note(epsilon))

    return answer(*_smaller_bound([step], target_delta, deadline))


def _smaller_bound(
    parts: Sequence[_Step], target_delta: float, deadline: float
) -> tuple[float, str, dict[str, float | str], str | None]:
    """The smaller of the PLD and the RDP bound on all parts together: epsilon, accountant, details, note."""
    rdp = rdp_epsilon(parts, target_delta)
    pld = _pld_epsilon(parts, target_delta, rdp, deadline)
    details: dict[str, float | str] = {RDP: rdp, PLD: pld.epsilon if pld.epsilon < math.inf else str(pld.why)}
    epsilon, accountant = min((pld.epsilon, PLD), (rdp, RDP))
    if epsilon == math.inf:
        return epsilon, NONE, details, f"No accountant found a finite epsilon: {pld.why}"
    note = _zero_note(epsilon)
    if pld.why is not None:
        note = f"{pld.why} The epsilon is a valid upper bound ({accountant}), looser than a finished PLD's."
    return epsilon, accountant, details, note


def _zero_note(epsilon: float) -> str | None:
    return None if epsilon > 0 else "Epsilon is 0: the whole run is indistinguishable up to delta itself."


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
    z, sampler, adjacency = mechanism.noise_multiplier, mechanism.sampler, mechanism.adjacency
    each = [_Step.of(sampler, z, adjacency, int(count)) for count in counts]
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

    >>> epsilon_text(2.78901), epsilon_text(0.99996), epsilon_text(3651.2), epsilon_text(0.0), epsilon_text(math.inf)
    ('2.79', '1', '3652', '0', 'inf')
    """
    return _rounded_up(Decimal(epsilon), digits)


def noise_text(noise_multiplier: float, digits: int = 4) -> str:
    """Rounded up as well, so that the epsilon beside it holds at the noise as it is written.

    >>> noise_text(0.61411), noise_text(2.02), noise_text(0.8332, 3)
    ('0.6142', '2.02', '0.834')
    """
    return _rounded_up(Decimal(repr(float(noise_multiplier))), digits)  # as it is typed: 2.02 is 2.02


def _rounded_up(number: Decimal, digits: int) -> str:
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
    if not 0 < target_delta < 1:
        raise ValueError(f"Expected 0 < target_delta < 1, got {target_delta}.")


@dataclass(frozen=True)
class _Step:
    """`count` steps of one worst case: a record enters with `probability`, noise is z times its bound C."""

    noise_multiplier: float
    probability: float
    adjacency: Adjacency
    fixed_size: bool
    count: int

    @classmethod
    def of(cls, sampler: Sampler, z: float, adjacency: Adjacency, num_steps: int) -> _Step:
        """Read from the event, so that an event nobody has thought through is refused rather than guessed at."""
        import dp_accounting as dp

        match sampler.dp_event(z, num_steps):
            case dp.NoOpDpEvent():
                return cls(z, 1.0, adjacency, False, 0)
            case dp.SelfComposedDpEvent(event=dp.GaussianDpEvent(noise_multiplier=z), count=count):
                return cls(z, 1.0, adjacency, False, count)
            case dp.SelfComposedDpEvent(
                event=dp.PoissonSampledDpEvent(sampling_probability=q, event=dp.GaussianDpEvent(noise_multiplier=z)),
                count=count,
            ):
                return cls(z, q, adjacency, False, count)
            case dp.SelfComposedDpEvent(
                event=dp.SampledWithoutReplacementDpEvent(
                    source_dataset_size=n, sample_size=b, event=dp.GaussianDpEvent(noise_multiplier=z)
                ),
                count=count,
            ) if adjacency == Adjacency.REPLACE_ONE:
                return cls(z, b / n, adjacency, True, count)
            case event:
                raise ValueError(f"Expected an event with a known worst case under {adjacency}, got {event}.")

    @property
    def shift(self) -> float:
        """How far apart, in units of C, the sums of neighbours can be when the record is surely in the batch."""
        return 2.0 if self.adjacency == Adjacency.REPLACE_ONE else 1.0

    @property
    def pair(self) -> SampledPair:
        # A record that is surely in the batch moves the sum by its shift and no more: one Gaussian.
        is_replaced = self.adjacency == Adjacency.REPLACE_ONE and self.probability < 1
        return SampledPair(self.probability, self.noise_multiplier / self.shift, is_replaced)

    def exact_epsilon(self, target_delta: float) -> float:
        """Epsilon of `count` unsampled steps: one Gaussian with z / (shift sqrt(count)) (Balle and Wang, 2018)."""
        from dp_accounting import get_epsilon_gaussian

        z = self.noise_multiplier / self.shift / math.sqrt(self.count)
        with np.errstate(divide="ignore"):  # it takes the logarithm of a vanishing delta on its way
            epsilon = float(get_epsilon_gaussian(z, target_delta))
        return epsilon * (1 + 1e-9) + 1e-12 if epsilon > 0 else 0.0  # the root finder stops on either side

    @property
    def largest_loss(self) -> float:
        """About the largest privacy loss of one step, where dp_accounting cuts the tails (10 standard deviations)."""
        z, shift = self.noise_multiplier, self.shift if self.fixed_size or self.probability == 1 else 1.0
        unsampled = shift * (10 * z + shift / 2) / z**2
        if self.probability == 1:
            return unsampled
        return float(np.logaddexp(math.log1p(-self.probability), math.log(self.probability) + unsampled))

    def pld(self, interval: float) -> Any:
        """One step's privacy loss distribution on a grid, rounded to the private side (connect the dots)."""
        from dp_accounting import NeighboringRelation
        from dp_accounting.pld import privacy_loss_distribution as pld

        if self.fixed_size:
            return pld.PrivacyLossDistribution(self._fixed_size_pmf(interval))
        # dp_accounting takes the noise relative to C here, and under REPLACE_ONE shifts by C to either side.
        return pld.from_gaussian_mechanism(
            self.noise_multiplier,
            value_discretization_interval=interval,
            sampling_prob=self.probability,
            neighboring_relation=NeighboringRelation[self.adjacency.name],
        )

    def _fixed_size_pmf(self, interval: float) -> Any:
        """The curve H_g(q N_2 + (1-q) N_0, N_0) for g >= 1 and its swap for g < 1: the pointwise larger of the two."""
        from dp_accounting.pld import pld_pmf
        from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

        directions = [
            GaussianPrivacyLoss(
                self.noise_multiplier, sensitivity=self.shift, sampling_prob=self.probability, adjacency_type=direction
            )
            for direction in (AdjacencyType.REMOVE, AdjacencyType.ADD)
        ]
        last = math.ceil(max(float(d.connect_dots_bounds().epsilon_upper or 0) for d in directions) / interval)
        losses: Any = np.arange(-last, last + 1) * interval
        deltas = np.max([np.asarray(d.get_delta_for_epsilon(losses)) for d in directions], axis=0)
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -last, last, deltas)


@dataclass(frozen=True)
class _PldAnswer:
    """A PLD epsilon (inf if none), and why it is missing or not settled (None if it is)."""

    epsilon: float
    why: str | None


def rdp_epsilon(parts: Sequence[_Step], target_delta: float) -> float:
    """Epsilon of all parts together by Renyi differential privacy."""
    return float(smallest_epsilons([part.pair for part in parts], [[part.count for part in parts]], target_delta)[0])


def _pld_epsilon(parts: Sequence[_Step], target_delta: float, rdp_epsilon: float, deadline: float) -> _PldAnswer:
    """Halve the loss grid's interval until epsilon settles. Each grid's epsilon is an upper bound on its own."""
    # The FFT loses up to about `count` machine epsilons of probability: pay for them, or refuse.
    count = sum(part.count for part in parts)
    rounding = 8 * MACHINE_EPS * count
    if rounding > 0.1 * target_delta:
        return _PldAnswer(
            math.inf, f"PLD was not run: float64 cannot resolve delta {target_delta:g} over {count} steps."
        )
    if rdp_epsilon == 0:
        return _PldAnswer(0.0, None)
    largest = max(part.largest_loss for part in parts)
    interval = min(max(min(rdp_epsilon / 500, largest / 10), largest / 50_000), 50.0)
    known = min(rdp_epsilon, sum(part.count * part.largest_loss for part in parts))
    best, started = math.inf, time.monotonic()
    while True:
        if 2 * largest / interval > MAX_STEP_LOSSES or known / interval > MAX_TOTAL_LOSSES:
            return _PldAnswer(best, _unfinished(best, "the grid that would settle it is too fine"))
        each = [_self_composed(part.pld(interval), part.count) for part in parts]
        composed = reduce(lambda one, other: one.compose(other), each)
        epsilon = _smallest_epsilon(composed, target_delta - rounding, known)
        if best - epsilon < STABLE * epsilon or epsilon == 0:
            return _PldAnswer(min(best, epsilon), None)
        best, known, interval = min(best, epsilon), min(known, epsilon), interval / 2
        now = time.monotonic()
        # A grid costs little more than twice the one before it.
        if now + 3 * (now - started) > deadline:
            return _PldAnswer(best, _unfinished(best, "the time limit was near"))
        started = now


def _self_composed(pld: Any, count: int) -> Any:
    """pld.self_compose(count), sooner.

    dp_accounting works out size^count, a number of up to a million digits, to see whether sparse losses stay few. More
    than ten times two or more of them do not, and what it does then is this.
    """
    each = [pld._pmf_remove] if pld._symmetric else [pld._pmf_remove, pld._pmf_add]
    if count > 10 and all(pmf.size > 1 for pmf in each):
        pld = type(pld)(*(pmf.to_dense_pmf() for pmf in each))
    return pld.self_compose(count)


def _unfinished(best: float, reason: str) -> str:
    return f"PLD was {'stopped before it was stable' if best < math.inf else 'not run'}: {reason}."


def _smallest_epsilon(pld: Any, delta: float, upper: float) -> float:
    """An epsilon <= upper with pld's delta(epsilon) <= delta, at most 1e-5 relative above the smallest; inf if none."""
    if pld.get_delta_for_epsilon(upper) > delta:
        return math.inf
    if pld.get_delta_for_epsilon(0.0) <= delta:
        return 0.0
    low, high = 0.0, upper
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if pld.get_delta_for_epsilon(middle) > delta else (low, middle)
    return high
