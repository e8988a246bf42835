"""The bottom of a curve of losses over learning rates, which lies between the rates."""

import numpy as np

from noisecast.reproduction.fits import LOST

REACH, FEWEST = np.log(2.9), 5  # rates within that factor of the best make a polynomial, if there are so many
LEAST_DEGREE = 3  # a valley is steeper on its right
MISFIT = 4.0  # squared standard errors: two, of all rates together


class Valley:
    """Losses at some learning rates, and how well they are known.

    Its bottom is that of a polynomial through the rates near the best, each weighted by how well its loss is known: of
    one degree more than the first, from the third on, that leaves no more than chance explains, or through all of them.
    (One more, for a misfit that chance hides would bias the bottom by as much as chance moves it, and intervals by
    resamples do not know of it.) Where fewer than five rates are near, of a parabola through three.

    Args:
      x: (rates,) logarithms of the learning rates, increasing.   losses: (rates, seeds).

    >>> x = np.log(2) / 2 * np.arange(9)
    >>> curve = 0.5 + np.cosh(1.5 * (x - 1.3))
    >>> round(Valley(x, curve[:, None]).bottom(curve), 2)
    1.3
    """

    def __init__(self, x: np.ndarray, losses: np.ndarray):
        self._x, self._weights = x, _weights(x, losses)
        self._degree = self._degree_for(losses)
        self._fits: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}  # resamples ask for few, a thousand times

    def bottom(self, losses: np.ndarray) -> float:
        """Of means over seeds, (rates,), of all of them or of a resample; x."""
        x, best = self._x, int(losses.argmin())
        for _ in range(3):  # the bottom found may be nearer to the next rate
            near = self._near(losses, best)
            if near.sum() < FEWEST:
                return vertex(x, losses)
            between, fit = self._fits.get(near.tobytes()) or self._fit(near)
            found = vertex(between, fit @ losses[near])
            if not between[0] < found < between[-1]:
                return float(x[losses.argmin()])
            if (closest := int(abs(x - found).argmin())) == best:
                break
            best = closest
        return found

    def _near(self, losses: np.ndarray, best: int) -> np.ndarray:
        return (abs(self._x - self._x[best]) <= REACH) & (losses < LOST / 1e6)

    def _fit(self, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places between the rates, and the matrix that makes the polynomial's values there of losses near the best."""
        x, weights = self._x[near], self._weights[near]
        between, degree = np.linspace(x[0], x[-1], 401), min(self._degree, len(x) - 1)
        powers, powers_between = (np.vander(places - x.mean(), degree + 1) for places in (x, between))
        found = between, powers_between @ np.linalg.pinv(weights[:, None] * powers) * weights
        self._fits[near.tobytes()] = found
        return found

    def _degree_for(self, losses: np.ndarray) -> int:
        means, seeds = losses.mean(axis=1), losses.shape[1]
        best = int(means.argmin())
        near = self._near(means, best)
        weights = self._weights[near, None]
        values = weights * losses[near]
        for degree in range(LEAST_DEGREE, int(near.sum()) - 1):
            basis, _ = np.linalg.qr(weights * np.vander(self._x[near] - self._x[best], degree + 1))
            left = values - basis @ (basis.T @ values)
            # Seeds have their batches in common at all rates, so only whole seeds tell how much chance leaves.
            by_chance = left.var(axis=1, ddof=1).sum() / seeds if seeds > 1 else 0.0
            if np.square(left.mean(axis=1)).sum() <= MISFIT * by_chance:
                return degree + 1
        return max(int(near.sum()) - 1, LEAST_DEGREE)


def _weights(x: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """1 / (standard deviation over seeds), as a power of the rate: few seeds know each of them badly."""
    spread = losses.std(axis=1)
    known = (spread > 0) & (losses.mean(axis=1) < LOST / 1e6)
    if known.sum() < 3:
        return np.ones(len(x))
    line = np.polyfit(x[known], np.log(spread[known]), 1)
    return np.exp(line[0] * (x[0] - x))


def vertex(x: np.ndarray, losses: np.ndarray) -> float:
    """Of the parabola through the least and its neighbours; at an edge the least itself."""
    best = int(losses.argmin())
    if not 0 < best < len(x) - 1:
        return float(x[best])
    left, right = x[best - 1] - x[best], x[best + 1] - x[best]
    tilt_left, tilt_right = (losses[best - 1] - losses[best]) / left, (losses[best + 1] - losses[best]) / right
    bend = (tilt_right - tilt_left) / (right - left)
    return float(x[best] - (tilt_right - bend * right) / (2 * bend)) if bend > 0 else float(x[best])
