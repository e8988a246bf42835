"""What choosing among runs costs: all of them counted, or the best of a random number of trials.

`epsilon_spent` is the price of one run. Whoever looks at several runs on private data and keeps one has spent more.

All counted. Runs that draw batches of their own compose as their steps do. Runs that share their batches (in a sweep,
those of one seed) do not: a record that is in the batch is in all of them, so being left out of it protects once and
not once a run. In units of each run's noise its sums move by at most (1/z_1, ..., 1/z_k), a vector of length
(sum_i z_i^-2)^(1/2), whatever the clips. Such steps are one step with z = (sum_i z_i^-2)^(-1/2): the worst cases of
`worst_case` bound a sum by its length alone, in any number of dimensions. Without amplification by sampling sharing
makes no difference.

Best of a random number. Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy" (ICLR 2022): K is
drawn, K independent trials are run, the best is released, and neither K nor another trial ever is. With one trial's
Renyi bounds e(a) at the orders a, the best has at order a > 1

* K truncated negative binomial with shape h and stopping probability g (Theorem 2), for any order b >= 1:
    e(a) + (1 + h) (1 - 1/b) e(b) + (1 + h) log(1/g) / b + log(E K) / (a - 1);
* K Poisson with mean m (Theorem 6), for a trial that is (e', d')-DP with exp(e') <= 1 + 1/(a - 1):
    e(a) + m d' + log(m) / (a - 1).

One trial draws its cell among all cells, without looking at the data, and then runs it. Its divergence at an order is
at most that of the worst cell, so e(a) is the largest over the cells: also over those that happened not to be drawn.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import numpy as np

from noisecast.privacy.accounting import PrivacySpent, check_delta
from noisecast.privacy.composition import EXACT, NONE, RDP, smaller_bound
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.renyi import ORDERS, SampledPair
from noisecast.privacy.worst_case import WorstCase

ALL_ORDERS = tuple(order for ladder in ORDERS for order in ladder)
# Where runs turn out other than the first. Ledgers rest on it: after runs were looked at it must not change.
OTHER_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
Cell = tuple[SampledGaussian, int]  # what every step of a run releases, and how many there are


@dataclass(frozen=True)
class Run:
    """One run, as accounting sees it.

    Args:
      mechanism: what every step released.   num_steps: T >= 0.
      batches: a name of the random batches that it drew; runs of one name drew the same, others independently.
    """

    mechanism: SampledGaussian
    num_steps: int
    batches: str


def composed_epsilon(
    runs: Sequence[Run], *, target_delta: float, order: float | None = None, time_limit_s: float = 30.0
) -> PrivacySpent:
    """The (epsilon, delta) of releasing all runs: the smaller of a PLD and an RDP upper bound.

    Args:
      runs: every run that touched the data, each time that it did; at least one.
      target_delta: 0 < delta < 1.   time_limit_s: as for `epsilon_spent` [s].
      order: of Renyi divergences, > 1, settled before the first run (`settled_order`); given where a run's noise or
        number of steps, or whether there is another run at all, may have been decided by what earlier ones released.
        Several runs then add up by their divergences at one order, which hold all the same while a budget that was
        set before is kept (Feldman and Zrnic, NeurIPS 2021; Lecuyer 2021), or as one Gaussian mechanism while none is
        sampled (Smith and Thakurta 2022). Privacy loss distributions need a fixed plan. So does the best of several
        bounds, for whoever chooses runs chooses the bound with them, unless each has its share of delta (a union
        bound): eight tenths the settled order, a tenth the Gaussian mechanism, a tenth fourteen other orders.
    Returns: PrivacySpent.
    Raises: ValueError for runs whose guarantees speak of different neighbours, or that share batches of two samplers,
      or an order out of range.

    >>> from noisecast.privacy.sampling import Poisson
    >>> mechanism = SampledGaussian(noise_multiplier=4.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, 25_000))
    >>> for names in ("a", "ab", "aa"):
    ...     spent = composed_epsilon([Run(mechanism, 5_000, name) for name in names], target_delta=1e-5)
    ...     print(round(spent.epsilon, 2))
    0.15
    0.21
    0.22
    """
    check_delta(target_delta)
    if order is not None and not 1 < order <= ALL_ORDERS[-1]:
        raise ValueError(f"Expected an order between 1 and {ALL_ORDERS[-1]:,}, got {order}; see settled_order.")
    adjacency = _common_adjacency([run.mechanism for run in runs])
    deadline = time.monotonic() + time_limit_s

    def answer(epsilon: float, accountant: str, details: dict[str, float | str], note: str | None) -> PrivacySpent:
        return PrivacySpent(epsilon, target_delta, accountant, adjacency, None, details, note)

    if any(run.mechanism.noise_multiplier == 0 and run.num_steps > 0 for run in runs):
        return answer(math.inf, NONE, {NONE: math.inf}, "A run without noise has no guarantee.")
    parts = _parts(runs, adjacency)
    if not parts:
        return answer(0.0, NONE, {NONE: 0.0}, "No step was taken, so nothing was released.")
    if order is not None and len(runs) > 1:
        found = _epsilons_chosen(order, parts, target_delta)
        accountant = min(found, key=lambda name: found[name])
        return answer(found[accountant], accountant, {**found}, "As runs that may depend on earlier ones.")
    if all(part.probability == 1 for part in parts):
        epsilon = parts[0].exact_epsilon(target_delta)
        return answer(epsilon, EXACT, {EXACT: epsilon}, None)
    return answer(*smaller_bound(parts, target_delta, deadline))


def settled_order(mechanism: SampledGaussian, *, epsilon: float, delta: float) -> float:
    """The Renyi order > 1 at which a budget lasts longest for steps of a mechanism, by no look at what they release.

    Args:
      mechanism: of the first run.   epsilon, delta: the budget, as it was set before; 0 < epsilon < inf, 0 < delta < 1.
    Returns: one of `ALL_ORDERS`; 2 without noise, where no order helps.
    Raises: ValueError: out of range.

    >>> from noisecast.privacy.sampling import Poisson
    >>> mechanism = SampledGaussian(noise_multiplier=4.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, 25_000))
    >>> [round(settled_order(mechanism, epsilon=epsilon, delta=1e-5), 1) for epsilon in (0.5, 1, 8)]
    [32.0, 18.0, 3.9]
    """
    check_delta(delta)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"Expected 0 < epsilon < inf, got {epsilon}.")
    if mechanism.noise_multiplier == 0:
        return 2.0  # no order helps
    orders = np.array(ALL_ORDERS)
    one_step = WorstCase.of(mechanism.sampler, mechanism.noise_multiplier, mechanism.adjacency, 1)
    # The divergence that is epsilon at an order and 0.8 delta (Canonne, Kamath, Steinke 2020, Prop. 12); where an
    # epsilon is too small for any, the order that comes nearest.
    room = epsilon - np.log1p(-1 / orders) + np.log(0.8 * orders * delta) / (orders - 1)
    lasts = np.where(room > 0, room / _at_all_orders(one_step.pair), room)
    return float(orders[np.argmax(lasts)])


@cache  # it takes half a second, and a ledger asks for the same again and again
def _at_all_orders(pair: SampledPair) -> np.ndarray:
    return pair.divergences(ALL_ORDERS)


def _epsilons_chosen(settled: float, parts: Sequence[WorstCase], target_delta: float) -> dict[str, float]:
    """Each bound with its share of delta, by accountant."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    def epsilon(order: float, delta: float) -> float:
        # A bound at the next whole order is one at this order, and may be the smaller.
        orders = sorted({order, math.ceil(order)})
        divergence = sum(part.count * float(part.pair.divergences(orders)[0]) for part in parts)
        return float(compute_epsilon([order], [divergence], delta)[0])

    share = 0.1 * target_delta / len(OTHER_ORDERS)
    found = {RDP: min(epsilon(settled, 0.8 * target_delta), *(epsilon(order, share) for order in OTHER_ORDERS))}
    if all(part.probability == 1 for part in parts):
        found[EXACT] = parts[0].exact_epsilon(0.1 * target_delta)
    return found


def _common_adjacency(mechanisms: Sequence[SampledGaussian]) -> Adjacency:
    if not mechanisms:
        raise ValueError("Expected at least one run, got none.")
    kinds = {(m.adjacency, m.sampler.neighbours(m.adjacency)) for m in mechanisms}
    if len(kinds) > 1:
        said = " and ".join(sorted(f"{neighbours} one record ({adjacency})" for adjacency, neighbours in kinds))
        raise ValueError(
            f"Expected runs whose guarantees have the same neighbours, got {said}; these do not add up: use samplers "
            "of one kind and one adjacency."
        )
    return mechanisms[0].adjacency


def _parts(runs: Sequence[Run], adjacency: Adjacency) -> list[WorstCase]:
    """The runs as independent parts: all unsampled steps in one, and sampled ones with those that share their batch."""
    inverse_squares = []
    sharing: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        mechanism = run.mechanism
        mechanism.dp_event(run.num_steps)  # checks num_steps
        step = WorstCase.of(mechanism.sampler, mechanism.noise_multiplier, adjacency, int(run.num_steps))
        if step.count and step.probability == 1:
            inverse_squares.append(step.count / step.noise_multiplier**2)
        elif step.count:
            sharing[run.batches].append(run)
    counts: Counter = Counter()
    for together in sharing.values():
        counts.update(_shared_steps(together))
    parts = [WorstCase.of(sampler, z, adjacency, count) for (sampler, z), count in counts.items()]
    if inverse_squares:
        parts.insert(0, WorstCase(_combined(inverse_squares), 1.0, adjacency, False, 1))
    return parts


def _shared_steps(runs: Sequence[Run]) -> Counter:
    """How often runs that share their batches take a step of each (sampler, z): the shorter ones drop out."""
    samplers = {run.mechanism.sampler for run in runs}
    if len(samplers) > 1:
        raise ValueError(f"Expected runs that share their batches to share their sampler, got {len(samplers)} of them.")
    sampler, counts, before = samplers.pop(), Counter(), 0
    for last in sorted({run.num_steps for run in runs}):
        multipliers = [run.mechanism.noise_multiplier for run in runs if run.num_steps >= last]
        z = multipliers[0] if len(multipliers) == 1 else _combined([1 / z**2 for z in multipliers])
        counts[sampler, z] += last - before
        before = last
    return counts


def _combined(inverse_squares: Sequence[float]) -> float:
    """(sum_i z_i^-2)^(-1/2), rounded down to the private side."""
    return (1 - 1e-12) / math.sqrt(math.fsum(inverse_squares))


class TrialKind(StrEnum):
    """The law of a random number of trials."""

    GEOMETRIC = "geometric"
    LOGARITHMIC = "logarithmic"
    POISSON = "poisson"


@dataclass(frozen=True)
class TrialDistribution:
    """How many trials are run: K, drawn once, before the first trial and whatever the data are.

    K must stay secret for ever: the guarantee is lost to whoever learns it, or learns how any trial but the best went.
    So must K not be drawn again because it was large, small or 0, and no trial be left out.

      geometric     P(K = k) = g (1 - g)^(k - 1), g = 1 / mean                      shape 1
      logarithmic   P(K = k) = (1 - g)^k / (k log(1/g)), mean (1/g - 1) / log(1/g)  shape 0
      poisson       P(K = k) = mean^k e^(-mean) / k!

    The geometric law has the lighter tail; the logarithmic one costs less epsilon and is often 1. Under a Poisson law K
    may be 0: then nothing is trained or selected, and "no model" is what is released.

    Args:
      kind: of law.   mean: E K; >= 1, finite.
    Raises: ValueError when the mean is out of range.

    >>> TrialDistribution(TrialKind.GEOMETRIC, 49).stopping_probability
    0.02040816326530612
    """

    kind: TrialKind
    mean: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", TrialKind(self.kind))
        if not 1 <= self.mean < math.inf:
            raise ValueError(f"Expected a finite mean number of trials >= 1, got {self.mean}.")

    @property
    def shape(self) -> float:
        """Of the truncated negative binomial law, whose limit the Poisson law is."""
        return {TrialKind.GEOMETRIC: 1.0, TrialKind.LOGARITHMIC: 0.0, TrialKind.POISSON: math.inf}[self.kind]

    @property
    def stopping_probability(self) -> float | None:
        """g of the geometric and the logarithmic law; None for the Poisson law, which has none."""
        if self.kind == TrialKind.POISSON:
            return None
        return 1 / self.mean if self.kind == TrialKind.GEOMETRIC or self.mean == 1 else math.exp(-self._log_inverse())

    def _log_inverse(self) -> float:
        """u = log(1/g) of the logarithmic law, with mean (e^u - 1) / u, rounded so that no more trials are drawn."""
        low, high = 0.0, 2 * math.log(self.mean) + 2
        while True:
            middle = (low + high) / 2
            if middle in (low, high):
                return low * (1 - 1e-12)
            low, high = (middle, high) if math.expm1(middle) <= middle * self.mean else (low, middle)

    def draw(self, rng: np.random.Generator) -> int:
        """K.

        Args:
          rng: from the operating system's entropy, `numpy.random.default_rng()`: a seed that is known tells K.
        """
        if self.kind == TrialKind.POISSON:
            return int(rng.poisson(self.mean))
        if self.kind == TrialKind.GEOMETRIC or self.mean == 1:
            return int(rng.geometric(1 / self.mean))
        return int(rng.logseries(-math.expm1(-self._log_inverse())))


def repeat_select_epsilon(cells: Sequence[Cell], *, trials: TrialDistribution, target_delta: float) -> PrivacySpent:
    """The (epsilon, delta) of releasing the best of a random number of trials, and nothing else of them.

    Args:
      cells: all that a trial may draw, with (mechanism, num_steps) of each; at least one.
      trials: the law that the number of trials was really drawn from.
      target_delta: 0 < delta < 1.
    Returns: PrivacySpent.
    Raises: ValueError for cells whose guarantees speak of different neighbours.

    Valid when: trials are independent (batches too), each draws its cell without looking at the data, and the best is
    told by what the trial itself releases or by data that the guarantee does not cover.

    >>> from noisecast.privacy.sampling import Poisson
    >>> mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, 25_000))
    >>> for kind in TrialKind:
    ...     trials = TrialDistribution(kind, 49)
    ...     spent = repeat_select_epsilon([(mechanism, 39_000)], trials=trials, target_delta=1e-5)
    ...     print(kind, round(spent.epsilon, 2))
    geometric 6.88
    logarithmic 5.62
    poisson 18.65
    """
    from dp_accounting.rdp.rdp_privacy_accountant import _compute_rdp_repeat_and_select, compute_epsilon

    check_delta(target_delta)
    adjacency = _common_adjacency([mechanism for mechanism, _ in cells])
    for mechanism, num_steps in cells:
        mechanism.dp_event(num_steps)  # checks num_steps
    steps = {WorstCase.of(m.sampler, m.noise_multiplier, adjacency, int(num_steps)) for m, num_steps in cells}
    steps = {step for step in steps if step.count}
    if any(step.noise_multiplier == 0 for step in steps):
        note = "A cell without noise has no guarantee, and any trial may draw it."
        return PrivacySpent(math.inf, target_delta, NONE, adjacency, None, {NONE: math.inf}, note)
    if not steps:
        note = "No step is taken, so nothing is released."
        return PrivacySpent(0.0, target_delta, NONE, adjacency, None, {NONE: 0.0}, note)
    one_trial = np.max([step.count * step.pair.divergences(ALL_ORDERS) for step in steps], axis=0)
    # dp_accounting's public event takes only divergences that it computes itself, not those of our worst cases.
    best = _compute_rdp_repeat_and_select(ALL_ORDERS, one_trial, trials.mean, trials.shape)
    epsilon = float(compute_epsilon(list(ALL_ORDERS), list(best), target_delta)[0])
    return PrivacySpent(epsilon, target_delta, RDP, adjacency, None, {RDP: epsilon}, None)
