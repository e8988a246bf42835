"""Slopes and crossings of measured curves, each with a 95 % interval by bootstrap over seeds.

Curves are arrays (points, seeds). Whole seeds are resampled, the same at every point, because settings at one seed
share their batches. Few seeds make a bootstrap too narrow, by sqrt((n - 1) / n) and by the normal's 1.96 in place of
Student's t: intervals are widened about the estimate by both, and cover what they promise from three seeds on.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

RESAMPLES = 1000
COVERAGE = 0.95
REACH = 1.6  # of `smoothed`
LOST = 1e30  # the loss of a diverged run: worse than any, also as one of a million; still a number that has means


class Estimate(NamedTuple):
    """A number with its 95 % interval; nan where there is none: of one seed, or of curves without the number."""

    value: float
    low: float
    high: float

    def contains(self, number: float) -> bool:
        return self.low <= number <= self.high

    def within(self, low: float, high: float) -> bool:
        """Whether the whole interval lies there."""
        return low <= self.low and self.high <= high

    def leaves_room(self, low: float, high: float) -> bool:
        """Whether a number from there may be the true one: the interval reaches it, or there is no interval.

        >>> Estimate(1.0, 0.8, 1.2).leaves_room(1.1, math.inf), Estimate(1.0, 0.8, 1.2).leaves_room(2, 2)
        (True, False)
        >>> Estimate(1.0, math.nan, math.nan).leaves_room(2, 2)
        True
        """
        return not (self.high < low or self.low > high)


def only(frame: pd.DataFrame, **equal: Any) -> pd.DataFrame:
    """The rows in which each named column has the given value.

    >>> only(pd.DataFrame({"a": [1, 1, 2], "b": [3, 4, 3]}), a=1, b=3).index.tolist()
    [0]
    """
    chosen = np.ones(len(frame), bool)
    for column, value in equal.items():
        chosen &= np.asarray(frame[column] == value, bool)
    return frame.loc[chosen]


def each(frame: pd.DataFrame, *columns: str) -> Iterator[tuple[Any, pd.DataFrame]]:
    """(values of the columns, their rows), one by one in order of appearance; one column's value stands alone."""
    for name, rows in frame.groupby(list(columns), sort=False):
        yield (name if len(columns) > 1 else name[0]), pd.DataFrame(rows)  # type: ignore[index]


def seed_counts(rows: pd.DataFrame) -> str:
    """How many seeds rows have, in words; where optimizers differ, of each in their order.

    >>> seed_counts(pd.DataFrame({"optimizer": ["DP-SGD", "DP-SGD", "DP-Adam"], "seed": [0, 1, 0]}))
    '2 and 1'
    """
    counts = (str(len(set(some["seed"]))) for _, some in each(rows, "optimizer"))
    return " and ".join(dict.fromkeys(counts))


def by_seed(rows: pd.DataFrame, *, x: str = "noise_multiplier") -> tuple[np.ndarray, np.ndarray]:
    """Rows of one curve as (x (points,), values (points, seeds)); seeds that lack a point are left out.

    >>> rows = pd.DataFrame({"noise_multiplier": [2.0, 1.0, 2.0], "seed": [0, 0, 1], "value": [5.0, 4.0, 6.0]})
    >>> by_seed(rows)
    (array([1., 2.]), array([[4.],
           [5.]]))
    """
    table = rows.pivot(index=x, columns="seed", values="value").dropna(axis=1)
    return table.index.to_numpy(float), table.to_numpy(float)


def mean(values: np.ndarray) -> Estimate:
    """Mean over seeds of one number a seed, (seeds,), with Student's interval.

    >>> [round(number, 2) for number in mean(np.array([1.0, 2.0, 3.0]))]
    [2.0, -0.48, 4.48]
    """
    value, count = float(np.mean(values)), len(values)
    if count < 2 or not math.isfinite(value):
        return Estimate(value, math.nan, math.nan)
    half = float(stats.t.isf((1 - COVERAGE) / 2, count - 1) * np.std(values, ddof=1)) / math.sqrt(count)
    return Estimate(value, value - half, value + half)


def log_log_slope(x: np.ndarray, values: np.ndarray) -> Estimate:
    """Slope of the least-squares line through (log x, log of the mean over seeds).

    Args:
      x: (points,) > 0; two or more.   values: (points, seeds), with positive means.

    >>> x = np.array([1.0, 2.0, 4.0])
    >>> round(log_log_slope(x, np.outer(x**2, [0.9, 1.1])).value, 6)
    2.0
    """
    log_x = np.log(x)
    centred = log_x - log_x.mean()

    def slope(sample: np.ndarray) -> float:
        means = sample.mean(axis=1)
        # A mean that is not positive has no logarithm; such a resample says nothing.
        return float(centred @ np.log(means) / (centred @ centred)) if (means > 0).all() else math.nan

    return bootstrap(slope, values)


def power_law(x: np.ndarray, values: np.ndarray) -> Estimate:
    """p of mean = a + b x^p with b > 0 and the offset a unknown, by least squares of relative errors.

    For losses whose smallest value nobody knows: an offset that is guessed decides the slope of what lies above it. p
    is sought in -1 to 4, and 0 is a logarithm; an interval that reaches a limit of the search is open there. nan where
    the means do not grow.

    Args:
      x: (points,) > 0; four or more.   values: (points, seeds), with positive means.

    >>> x = np.array([0.5, 1.0, 2.0, 4.0, 8.0])
    >>> round(power_law(x, np.outer(0.7 + 0.1 * x**1.5, [0.999, 1.001])).value, 2)
    1.5
    """
    scale = 1 / values.mean(axis=1)
    hats = np.array([_hat(x, scale, power) for power in POWERS])

    def power(sample: np.ndarray) -> float:
        wanted = sample.mean(axis=1) * scale
        best = int(np.argmin(((wanted - hats @ wanted) ** 2).sum(axis=1)))
        return float(POWERS[best]) if offset_fit(x, sample.mean(axis=1), POWERS[best])[1] > 0 else math.nan

    found = bootstrap(power, values)
    low = -math.inf if found.low <= POWERS[0] else found.low
    return found._replace(low=low, high=math.inf if found.high >= POWERS[-1] else found.high)


POWERS = np.linspace(-1, 4, 501)


def offset_fit(x: np.ndarray, means: np.ndarray, power: float) -> tuple[float, float]:
    """(a, b) of means = a + b (x^power - 1) / power by least squares of relative errors; log x at power 0."""
    design = np.stack([np.ones_like(x), _grown(x, power)], axis=1) / means[:, None]
    found = np.linalg.lstsq(design, np.ones_like(x), rcond=None)[0]
    return float(found[0]), float(found[1])


def offset_curve(x: np.ndarray, power: float, coefficients: tuple[float, float]) -> np.ndarray:
    """What `offset_fit` fitted, at x."""
    return coefficients[0] + coefficients[1] * _grown(x, power)


def _grown(x: np.ndarray, power: float) -> np.ndarray:
    return np.log(x) if abs(power) < 1e-9 else (x**power - 1) / power


def _hat(x: np.ndarray, scale: np.ndarray, power: float) -> np.ndarray:
    """The projection onto constants and x^power, of values times scale."""
    basis, _ = np.linalg.qr(np.stack([np.ones_like(x), _grown(x, power)], axis=1) * scale[:, None])
    return basis @ basis.T


def last_crossing(x: np.ndarray, gaps: np.ndarray) -> Estimate:
    """Where the mean gap turns positive for good: between points of the smoothed curve a line in log x.

    The last crossing, for there may be one before. nan where there is none in the range of x. An interval reaches to 0
    or to infinity where more than 2.5 % of the resamples have no crossing. There is one, too, where the means do not
    cross but more than 2.5 % of the resamples do: then chance may have hidden it. It knows of chance alone, not of what
    `smoothed` and lines make of the curve.

    Args:
      x: (points,) > 0, increasing.   gaps: one curve less another, at the same seeds; (points, seeds).

    >>> last_crossing(np.array([1.0, 2.0, 4.0, 8.0]), np.array([[1.0], [-1.0], [-1.0], [1.0]])).value.__round__(4)
    5.6569
    """
    log_x = np.log(x)

    def place(sample: np.ndarray) -> float:
        gap = sample.mean(axis=1)
        below = np.flatnonzero(gap <= 0)
        if not len(below) or below[-1] == len(gap) - 1:
            return math.inf if len(below) else -math.inf
        i = below[-1]
        return float(log_x[i] + (log_x[i + 1] - log_x[i]) * gap[i] / (gap[i] - gap[i + 1]))

    gaps = smoothed(x, gaps)
    found = bootstrap(place, gaps)
    if math.isfinite(found.value):
        return Estimate(*(math.exp(number) for number in found))
    places = resampled(place, gaps)
    if np.isfinite(places).mean() <= (1 - COVERAGE) / 2:
        return Estimate(math.nan, math.nan, math.nan)
    # Without an estimate to widen an interval about, it holds all resamples.
    return Estimate(math.nan, float(np.exp(places.min())), float(np.exp(places.max())))


def smoothed(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Curves with less noise: each point that of a parabola in log x through the points within a factor `REACH` of it.

    Points that lie far apart keep their values: three or fewer make a parabola, a line or a point that goes through
    them. So does one at which a run is `LOST`, and no other sees it.

    Args:
      x: (points,) > 0.   values: (points, seeds).

    >>> x = np.geomspace(1, 4, 9)
    >>> curve = np.log(x)[:, None] ** 2
    >>> bool(np.allclose(smoothed(x, curve), curve))
    True
    """
    log_x, found = np.log(x), values.copy()
    is_known = (abs(values) < LOST / 2).all(axis=1)
    for i in np.flatnonzero(is_known):
        near = is_known & (abs(log_x - log_x[i]) <= np.log(REACH))
        basis = np.vander(log_x[near] - log_x[i], min(3, int(near.sum())), increasing=True)
        found[i] = np.linalg.pinv(basis)[0] @ values[near]
    return found


def resampled(statistic: Callable[[np.ndarray], float], values: np.ndarray) -> np.ndarray:
    """A statistic of values (..., seeds) in each resample of whole seeds; the same whenever it is asked for."""
    count = values.shape[-1]
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    return np.array([statistic(values[..., seeds]) for seeds in drawn])


def bootstrap(statistic: Callable[[np.ndarray], float], values: np.ndarray) -> Estimate:
    """A statistic of values (..., seeds), with its interval.

    Resamples without a number (nan) are left out; no interval where they are more than one in twenty, or of one seed.
    """
    value, count = statistic(values), values.shape[-1]
    if count < 2 or not math.isfinite(value):
        return Estimate(value, math.nan, math.nan)
    found = resampled(statistic, values)
    found = found[~np.isnan(found)]
    if len(found) < COVERAGE * RESAMPLES:
        return Estimate(value, math.nan, math.nan)
    tail = (1 - COVERAGE) / 2
    low, high = np.quantile(found, [tail, 1 - tail], method="inverted_cdf")
    widen = stats.t.isf(tail, count - 1) / stats.norm.isf(tail) * math.sqrt(count / (count - 1))
    return Estimate(value, float(value - widen * (value - low)), float(value + widen * (high - value)))
