"""A look at the private data that is paid for: how long per-example gradients are, as noisy counts.

Each record is counted once, in the bin of the norm of its gradient at the public start, before clipping. A record that
is added or removed moves one count by 1; a record that is replaced moves two. The counts get Gaussian noise and are
rounded to whole numbers, which is post-processing and leaves no low bits of a float sum to read. Everything else here
is computed from those noisy counts.

Accounting. One Gaussian release without sampling, as a `SampledGaussian` whose sampler takes every record, so that it
composes with training like any run. For added or removed records its bound C is 1. For replaced ones it is 1/sqrt(2):
one-hot vectors lie in a ball of that radius around their public middle (the number of records is public there), and
two of them are sqrt(2) apart, exactly the 2 C that is accounted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from noisecast.privacy.accounting import PrivacySpent, epsilon_spent, epsilon_text
from noisecast.privacy.calibration import LOG_MULTIPLIERS, calibrate_noise_multiplier, rounded_up
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.noise import Purpose, RandomRoot, key_for
from noisecast.privacy.sampling import Poisson, Sampler, Shuffled
from noisecast.privacy.tuning import Run, composed_epsilon
from noisecast.problems.problem import Problem

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
FROM_CLIP, RATIO = 64.0, math.sqrt(2.0)  # edges reach from C/64 to 64 C, each so many times the one before
MOST_EXAMPLES = 2**22  # a share of more examples in float32 no longer tells their number


@dataclass(frozen=True)
class NoisyShare:
    """A share of the records, by noisy counts. value: in [0, 1].   standard_error: of the probe's noise alone."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class NormQuantile:
    """A quantile of the norms [loss/params]; 0 and inf stand for below and above all edges.

    probability: of a norm being at most `value`.   low, high: what two standard errors of the noise allow.
    """

    probability: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ProbeResult:
    """Noisy counts of per-example gradient norms, and what they cost. Everything in it is covered by `epsilon`.

    Args:
      edges: public; norms <= edges[0], then between two edges, then > edges[-1] (and those that are no number).
      noisy_counts: of the len(edges) + 1 bins; whole numbers, negative ones too.
      noise_std: of each count [records].   num_examples: the declared, public size; shares are of it.
      epsilon, target_delta: the guarantee of the probe alone; inf where its noise came from a seed.
      mechanism: the probe as accounting sees it: one step of this.
      reproducible: its noise came from a seed that somebody may know; then there is no guarantee.
    """

    edges: tuple[float, ...]
    noisy_counts: tuple[int, ...]
    noise_std: float
    num_examples: float
    epsilon: float
    target_delta: float
    mechanism: SampledGaussian
    reproducible: bool

    def clipped_share(self, l2_clip_norm: float) -> NoisyShare:
        """Of records whose gradient at the start is longer than a clip norm that is one of the edges.

        Raises: ValueError for another clip norm.
        """
        if l2_clip_norm not in self.edges:
            raise ValueError(f"Expected an l2_clip_norm among the probe's edges, got {l2_clip_norm}; probe with it.")
        above = self.noisy_counts[self.edges.index(l2_clip_norm) + 1 :]
        share = sum(above) / self.num_examples
        error = self.noise_std * math.sqrt(len(above)) / self.num_examples
        return NoisyShare(min(max(share, 0.0), 1.0), error)

    @property
    def quantiles(self) -> tuple[NormQuantile, ...]:
        """At `QUANTILES`, between edges by straight lines in log norm."""
        below = np.cumsum(self.noisy_counts[:-1]) / self.num_examples
        error = self.noise_std * np.sqrt(np.arange(1, len(self.edges) + 1)) / self.num_examples
        curves = [self._increasing(below + k * error) for k in (0, 2, -2)]
        return tuple(NormQuantile(p, *(self._norm_at(curve, p) for curve in curves)) for p in QUANTILES)

    def example_noise_std(self, *, l2_clip_norm: float, num_params: int) -> float:
        """sqrt(E min(|g|, C)^2 / d): no clipped gradient varies more in its coordinates' mean square.

        Bins count by their middle (in log), the outer ones by their edge, at most C.
        """
        edges = np.array(self.edges)
        middles = np.concatenate([edges[:1], np.sqrt(edges[1:] * edges[:-1]), edges[-1:]])
        counts = np.maximum(self.noisy_counts, 0)
        shares = counts / max(counts.sum(), 1)
        return math.sqrt(float(shares @ np.minimum(middles, l2_clip_norm) ** 2) / num_params)

    def sentence(self) -> str:
        """The guarantee, to be read beside the numbers."""
        if self.reproducible:
            return "This probe is NOT private: its noise came from a seed that makes it reproducible."
        neighbours = self.mechanism.sampler.neighbours(self.mechanism.adjacency)
        return (
            f"The probe's counts satisfy ({epsilon_text(self.epsilon)}, {self.target_delta:g})-differential privacy "
            f"with respect to {neighbours} one record. Each further probe costs that again."
        )

    def _increasing(self, shares: NDArray) -> NDArray:
        return np.maximum.accumulate(np.clip(shares, 0.0, 1.0))

    def _norm_at(self, shares: NDArray, probability: float) -> float:
        at = int(np.searchsorted(shares, probability))
        if at == len(shares):
            return math.inf
        if at == 0:
            return 0.0
        weight = (probability - shares[at - 1]) / (shares[at] - shares[at - 1])
        low, high = np.log(self.edges[at - 1]), np.log(self.edges[at])
        return float(np.exp(low + weight * (high - low)))


def private_probe(
    problem: Problem,
    mechanism: SampledGaussian,
    *,
    epsilon: float,
    target_delta: float,
    l2_clip_norms: Sequence[float] = (),
    edges: Sequence[float] | None = None,
    insecure_seed: int | None = None,
) -> ProbeResult:
    """Count the records by the norm of their gradient at the public start, with noise for (epsilon, target_delta).

    Every call spends its epsilon anew; `epsilon_after` and `calibrate_after` add it to that of training.

    Args:
      problem: a data set; its `initial_params` are public.   mechanism: how training will run: its adjacency and its
        sampler's neighbours are the probe's, its declared number of examples is what shares are of.
      epsilon: of the probe alone; > 0, finite.   target_delta: of the probe, and of the training after it; in (0, 1).
      l2_clip_norms: whose shares of clipped records are wanted, beside the mechanism's.
      edges: public, increasing, > 0 [loss/params]; None: from C/64 to 64 C in steps of sqrt(2), the clip norms among
        them.
      insecure_seed: makes the noise reproducible and therefore not private; None draws from the operating system.
    Raises: ValueError for a problem without rows, a number out of range, or edges that do not increase.

    >>> from noisecast.problems.datasets import bundled
    >>> from noisecast.problems.linear import linear_model
    >>> problem = linear_model(bundled("breast_cancer")[0])
    >>> mechanism = SampledGaussian(
    ...     noise_multiplier=1.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, problem.num_examples))
    >>> probe = private_probe(problem, mechanism, epsilon=1.0, target_delta=1e-4)
    >>> 0.8 < probe.clipped_share(0.5).value <= 1, probe.epsilon <= 1.0
    (True, True)
    """
    num_examples = mechanism.sampler.num_examples
    if problem.num_examples is None or num_examples is None:
        raise ValueError(
            f"Expected a data set to probe, got {problem.name}, which has no records; leave the probe out."
        )
    public = _checked_edges(edges, sorted({mechanism.l2_clip_norm, *l2_clip_norms}))
    release, noise_std = _release(mechanism, epsilon, target_delta)
    root = RandomRoot.from_os_entropy() if insecure_seed is None else RandomRoot.from_insecure_seed(insecure_seed)
    counts = norm_counts(problem, public)
    return ProbeResult(
        edges=public,
        noisy_counts=_with_noise(counts, noise_std, root),
        noise_std=noise_std,
        num_examples=num_examples,
        epsilon=epsilon_spent(release, num_steps=1, target_delta=target_delta).epsilon if root.is_private else math.inf,
        target_delta=target_delta,
        mechanism=release,
        reproducible=not root.is_private,
    )


def public_edges(l2_clip_norms: Sequence[float]) -> tuple[float, ...]:
    """From min C/64 to 64 max C in steps of sqrt(2), and the clip norms themselves.

    >>> edges = public_edges([0.5])
    >>> len(edges), edges[0], edges[-1], 0.5 in edges
    (25, 0.0078125, 32.0, True)
    """
    low, high = min(l2_clip_norms) / FROM_CLIP, max(l2_clip_norms) * FROM_CLIP
    steps = math.ceil(math.log(high / low) / math.log(RATIO) - 1e-9)
    grid = low * (high / low) ** (np.arange(steps + 1) / steps)
    # An edge beside a clip norm would make a bin that hardly anything falls in.
    apart = [edge for edge in grid if all(abs(math.log(edge / clip)) > 0.1 for clip in l2_clip_norms)]
    return tuple(sorted({*map(float, apart), *map(float, l2_clip_norms)}))


def norm_counts(problem: Problem, edges: Sequence[float]) -> NDArray[np.int64]:
    """How many records' gradients at the start have a norm in each bin: exact counts, NON-PRIVATE; (len(edges) + 1,).

    A norm that is infinite or no number counts in the last bin. Read off the problem's `clip_fraction`, the share of
    norms above a threshold: above -1 lie all that are numbers.

    Raises: ValueError for 2^22 records or more.
    """
    import jax.numpy as jnp

    num_rows = problem.num_examples or 0
    if num_rows >= MOST_EXAMPLES:
        raise ValueError(f"Expected fewer than {MOST_EXAMPLES:,} records, got {num_rows:,}; probe a part of them.")
    thresholds = jnp.asarray([-1.0, *edges], jnp.float32)
    shares = np.asarray(_shares_above()(problem, problem.initial_params(), thresholds), np.float64)
    above = np.rint(shares * num_rows).astype(np.int64)
    inner = above[:-1] - above[1:]
    return np.append(inner, above[-1] + num_rows - above[0])


@cache
def _shares_above() -> Any:
    import jax

    @jax.jit  # which leaves out losses and whatever else `evaluate` computes
    def shares_above(problem: Any, params: Any, thresholds: Any) -> Any:
        return jax.lax.map(lambda threshold: problem.evaluate(params, threshold)["clip_fraction"], thresholds)

    return shares_above


# --- What the probe and the training cost together --------------------------------------------------------------------


def epsilon_after(
    before: SampledGaussian, mechanism: SampledGaussian, *, num_steps: int, target_delta: float
) -> PrivacySpent:
    """Epsilon of one release `before` and then num_steps steps of `mechanism`: composed, an upper bound.

    >>> before = SampledGaussian(noise_multiplier=5.0, l2_clip_norm=1.0, sampler=Poisson(1.0, 1))
    >>> mechanism = SampledGaussian(noise_multiplier=2.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, 6_400))
    >>> alone = epsilon_spent(mechanism, num_steps=1_000, target_delta=1e-5).epsilon
    >>> both = epsilon_after(before, mechanism, num_steps=1_000, target_delta=1e-5).epsilon
    >>> alone < both < alone + epsilon_spent(before, num_steps=1, target_delta=1e-5).epsilon
    True
    """
    runs = [Run(before, 1, "before"), Run(mechanism, num_steps, "training")]
    return composed_epsilon(runs, target_delta=target_delta)


@cache  # asked before a probe is paid for, and again for the advice
def calibrate_after(
    before: SampledGaussian,
    mechanism: SampledGaussian,
    *,
    target_epsilon: float,
    target_delta: float,
    num_steps: int,
) -> SampledGaussian:
    """The mechanism with the least noise such that it and what was released `before` stay within target_epsilon.

    By composition, not by subtraction: less noise than `target_epsilon` less the epsilon of `before` would ask for. The
    noise multiplier is rounded up to four digits, and its epsilon checked after it is found.

    Args:
      before: one step of it was released (`ProbeResult.mechanism`).   mechanism: its noise multiplier is ignored.
      target_epsilon: of both together; finite.   target_delta, num_steps: of training.
    Raises: ValueError where `before` has spent target_epsilon already, or nearly.
    """
    alone = epsilon_spent(before, num_steps=1, target_delta=target_delta).epsilon
    if not alone < target_epsilon < math.inf:
        raise ValueError(
            f"Expected a target_epsilon above the {epsilon_text(alone)} that was spent before, got "
            f"{target_epsilon:g}; spend less on the probe."
        )
    least = calibrate_noise_multiplier(
        mechanism, target_epsilon=target_epsilon, target_delta=target_delta, num_steps=num_steps
    )

    def excess(log_z: float) -> float:
        candidate = mechanism.with_noise_multiplier(math.exp(log_z))
        spent = epsilon_after(before, candidate, num_steps=num_steps, target_delta=target_delta)
        return math.log(max(spent.epsilon, 1e-12) / target_epsilon)

    low = math.log(least.noise_multiplier)
    high, width = low, 0.05
    while excess(high) > 0:
        low, high, width = high, high + width, 2 * width
        if high > LOG_MULTIPLIERS[1]:
            raise ValueError(
                f"Expected a target_epsilon well above the {epsilon_text(alone)} that was spent before, got "
                f"{target_epsilon:g}; spend less on the probe."
            )
    log_z = high if low == high else float(brentq(excess, low, high, xtol=2e-4))  # pyright: ignore[reportArgumentType]
    z = rounded_up(math.exp(log_z))
    while excess(math.log(z)) > 0:  # the private side, whatever the search did
        z = rounded_up(z * 1.0005)
    return mechanism.with_noise_multiplier(z)


# --- The release ------------------------------------------------------------------------------------------------------


def _release(mechanism: SampledGaussian, epsilon: float, target_delta: float) -> tuple[SampledGaussian, float]:
    """The probe as a mechanism of one step, and the standard deviation of a count."""
    bound = 1.0 if mechanism.adjacency == Adjacency.ADD_OR_REMOVE_ONE else math.sqrt(0.5)
    blank = SampledGaussian(
        noise_multiplier=0.0, l2_clip_norm=bound, sampler=_everybody(mechanism), adjacency=mechanism.adjacency
    )
    release = calibrate_noise_multiplier(blank, target_epsilon=epsilon, target_delta=target_delta, num_steps=1)
    return release, release.noise_std


def _everybody(mechanism: SampledGaussian) -> Sampler:
    """A sampler that takes every record once, whose guarantee speaks of the same neighbours as training's."""
    wanted = mechanism.sampler.neighbours(mechanism.adjacency)
    for sampler in (Poisson(1.0, 1), Shuffled(1, 1)):
        if sampler.neighbours(mechanism.adjacency) == wanted:
            return sampler
    raise ValueError(f"Expected neighbours that a count is known for, got {wanted} one record; leave the probe out.")


def _with_noise(counts: NDArray[np.int64], noise_std: float, root: RandomRoot) -> tuple[int, ...]:
    """counts + N(0, noise_std^2) each, rounded to whole numbers; the normals from a cipher, for they are few."""
    from noisecast.privacy.secure_noise import standard_normals

    key = key_for(Purpose.PRIVACY_NOISE, "probe", root=root, repeat=0)
    normals = standard_normals([key], 0, 1, len(counts))[0, 0].astype(np.float64)
    return tuple(int(count) for count in counts + np.rint(noise_std * normals))


def _checked_edges(edges: Sequence[float] | None, l2_clip_norms: Sequence[float]) -> tuple[float, ...]:
    if edges is None:
        return public_edges(l2_clip_norms)
    # As JAX compares them, so that an edge is what the counts are of.
    values = np.asarray(edges, np.float64)
    if values.size == 0 or not np.all(np.isfinite(values)) or values[0] <= 0 or np.any(np.diff(values) <= 0):
        raise ValueError(f"Expected edges that are finite, > 0 and increasing, got {list(edges)}.")
    return tuple(float(value) for value in values)
