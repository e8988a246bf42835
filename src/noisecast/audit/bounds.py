"""From an attacker's scores to a lower bound on epsilon that holds with a stated confidence.

Two ways. Many runs of two data sets: an (epsilon, delta)-private mechanism obeys, for every set of outputs,
P(D) <= e^epsilon P(D') + delta and the same with D and D' changed (`lower_bound_of_scores`). One run with many
canaries: how many right guesses such a mechanism can let through (`lower_bound_of_guesses`).

Nothing here is a point estimate: of two equal distributions the bound is 0, but in a share 1 - confidence of tries.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

MOST_THRESHOLDS = 60  # that are tried on the first half: of many, luck would choose the best


@dataclass(frozen=True)
class LowerBound:
    """What an attack proves.

    Args:
      epsilon: the mechanism is not (less than epsilon, delta)-private; 0 where nothing is proved.
      delta, confidence: that it is said at, and with.
      rule: the attacker's rule, in words.
    """

    epsilon: float
    delta: float
    confidence: float
    rule: str


def lower_bound_of_scores(
    with_canary: ArrayLike, without_canary: ArrayLike, *, delta: float, confidence: float
) -> LowerBound:
    """Clopper-Pearson: epsilon >= ln((P - delta) / P'), P a lower bound on one rate and P' an upper one on the other.

    The rule (which data set is guessed, from which score on) is the best on the first half of the runs; the second half
    alone gives the bound, with (1 - confidence) / 2 for each of the two rates.

    Args:
      with_canary, without_canary: an attacker's scores of independent runs on D and on D', high for D; (runs,) each.
      delta: 0 <= delta < 1.   confidence: in (0, 1), of the bound.
    Raises: ValueError: fewer than 4 runs, or scores that are not finite.

    >>> rng = np.random.default_rng(0)
    >>> with_it, without = rng.normal(1.0, size=20_000), rng.normal(size=20_000)
    >>> found = lower_bound_of_scores(with_it, without, delta=1e-5, confidence=0.999)
    >>> 1.6 < found.epsilon < 4.38                                    # a Gaussian mechanism of noise multiplier 1
    True
    >>> lower_bound_of_scores(rng.normal(size=999), rng.normal(size=999), delta=1e-5, confidence=0.999).epsilon
    0.0
    """
    _check(delta, confidence)
    inside, outside = _checked_scores(with_canary), _checked_scores(without_canary)
    chosen = _best_rule(inside[: len(inside) // 2], outside[: len(outside) // 2], delta, confidence)
    if chosen is None:
        return LowerBound(0.0, delta, confidence, "no rule promised anything on the first half")
    threshold, guesses_canary = chosen
    held_inside, held_outside = inside[len(inside) // 2 :], outside[len(outside) // 2 :]
    rates = _counts(held_inside, np.array([threshold])), _counts(held_outside, np.array([threshold]))
    epsilon = _epsilons(*rates, len(held_inside), len(held_outside), guesses_canary, delta, confidence)[0]
    rule = f"score {'>=' if guesses_canary else '<'} {threshold:.4g} means {'with' if guesses_canary else 'without'}"
    return LowerBound(max(0.0, float(epsilon)), delta, confidence, rule)


def lower_bound_of_guesses(
    num_right: int, num_guesses: int, num_canaries: int, *, delta: float, confidence: float
) -> LowerBound:
    """The smallest epsilon that the right guesses of one run do not refute (Steinke, Nasr, Jagielski, NeurIPS 2023).

    Each of m canaries was in the data with probability 1/2; the attacker guessed r of them and v guesses were right.
    For an (epsilon, delta)-private algorithm, with W ~ Binomial(r, e^epsilon / (1 + e^epsilon)),

      P(right >= v) <= P(W >= v) + 2 m delta max_{i = 1 ... v} P(v > W >= v - i) / i.

    Args:
      num_right: v.   num_guesses: r.   num_canaries: m; 0 <= v <= r <= m.
      delta: 0 <= delta < 1.   confidence: in (0, 1).
    Returns: the `LowerBound`: where that probability passes 1 - confidence.

    >>> lower_bound_of_guesses(100, 100, 1000, delta=1e-5, confidence=0.95).epsilon > 2
    True
    >>> lower_bound_of_guesses(55, 100, 1000, delta=1e-5, confidence=0.95).epsilon
    0.0
    """
    _check(delta, confidence)
    if not 0 <= num_right <= num_guesses <= num_canaries:
        raise ValueError(f"Expected 0 <= right <= guesses <= canaries, got {num_right}, {num_guesses}, {num_canaries}.")

    def refuted(epsilon: float) -> bool:
        return _p_of_guesses(num_right, num_guesses, num_canaries, epsilon, delta) < 1 - confidence

    low, high = 0.0, 50.0
    if not refuted(low):
        high = 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return LowerBound(low, delta, confidence, f"{num_right} of {num_guesses} guesses right")


def _p_of_guesses(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    chance = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(right - 1, guesses, chance))
    below = np.cumsum(stats.binom.pmf(right - np.arange(1, right + 1), guesses, chance))
    alpha = float(np.max(below / np.arange(1, right + 1), initial=0.0))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def clopper_pearson(counts: ArrayLike, trials: int, *, miss: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bounds on the probability behind each count: each of the two is wrong with probability at most `miss`.

    >>> low, high = clopper_pearson([0, 5], 10, miss=0.025)
    >>> low.round(3).tolist(), high.round(3).tolist()
    ([0.0, 0.187], [0.308, 0.813])
    """
    counts = np.asarray(counts, float)
    with np.errstate(invalid="ignore"):
        low = np.where(counts > 0, stats.beta.ppf(miss, counts, trials - counts + 1), 0.0)
        high = np.where(counts < trials, stats.beta.ppf(1 - miss, counts + 1, trials - counts), 1.0)
    return low, high


def _best_rule(inside: NDArray, outside: NDArray, delta: float, confidence: float) -> tuple[float, bool] | None:
    """The threshold, and whether scores from there on (or those below) are the event; None if no rule proves any."""
    values = np.unique(np.concatenate([inside, outside]))
    if len(values) > MOST_THRESHOLDS:  # tails and middle alike: the best rule is often a rare event
        shares = stats.norm.cdf(np.linspace(-3.2, 3.2, MOST_THRESHOLDS))
        values = np.unique(np.quantile(values, shares))
    counts = _counts(inside, values), _counts(outside, values)
    best: tuple[float, float, bool] = 0.0, 0.0, True
    for guesses_canary in (True, False):
        found = _epsilons(*counts, len(inside), len(outside), guesses_canary, delta, confidence)
        at = int(np.argmax(found))
        best = max(best, (float(found[at]), float(values[at]), guesses_canary), key=lambda rule: rule[0])
    return None if best[0] <= 0 else best[1:]


def _counts(scores: NDArray, thresholds: NDArray) -> NDArray:
    """How many scores are at each threshold or above."""
    return len(scores) - np.searchsorted(np.sort(scores), thresholds, side="left")


def _epsilons(
    inside: NDArray, outside: NDArray, n_inside: int, n_outside: int, guesses_canary: bool, delta: float,
    confidence: float,
) -> NDArray[np.float64]:  # fmt: skip
    """ln((P - delta) / P') at each threshold: of the event {score >= t} on D, or of {score < t} on D'."""
    likely, rare, n_likely, n_rare = inside, outside, n_inside, n_outside
    if not guesses_canary:
        likely, rare, n_likely, n_rare = n_outside - outside, n_inside - inside, n_outside, n_inside
    miss = (1 - confidence) / 2
    low, _ = clopper_pearson(likely, n_likely, miss=miss)
    _, high = clopper_pearson(rare, n_rare, miss=miss)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(low > delta, np.log((low - delta) / high), -np.inf)


def _checked_scores(scores: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(scores, np.float64)
    if array.ndim != 1 or len(array) < 4 or not np.isfinite(array).all():
        raise ValueError(f"Expected finite scores of at least 4 runs, got shape {array.shape}; run more of them.")
    return array


def _check(delta: float, confidence: float) -> None:
    if not 0 <= delta < 1:
        raise ValueError(f"Expected 0 <= delta < 1, got {delta}.")
    if not 0 < confidence < 1:
        raise ValueError(f"Expected 0 < confidence < 1, got {confidence}.")
