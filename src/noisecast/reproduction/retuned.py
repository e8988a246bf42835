"""Best cells, tuned again in every resample of the seeds: intervals that know how much of a choice was chance."""

from typing import Any

import numpy as np
import pandas as pd

from noisecast.reproduction.fits import LOST, Estimate, bootstrap
from noisecast.table import DIVERGED

REACH, FEWEST = np.log(2.9), 5  # rates within that factor of the best make a cubic, if there are so many


class Cube:
    """Scores of one optimizer by one runner, (noise multipliers x clip norms x learning rates, seeds).

    The methods take their means over seeds, whole or of a resample, and tune anew.

    Args:
      rows: of one task, runner and optimizer.   clip: keep only this clip norm.
    """

    def __init__(self, rows: Any, clip: float | None = None):
        if clip is not None:
            rows = rows[rows["l2_clip_norm"] == clip]
        values = rows["value"].where(rows["status"] != DIVERGED, LOST)
        keys = ["noise_multiplier", "l2_clip_norm", "learning_rate", "seed"]
        of_seeds: Any = values.groupby([rows[key].fillna(-1) for key in keys]).mean().unstack("seed")
        levels = of_seeds.index.levels
        self.noise, self.clips, self.rates = (np.array(level, float) for level in levels)
        of_seeds = of_seeds.dropna(axis=1)  # seeds that lack a cell
        self.values = of_seeds.reindex(pd.MultiIndex.from_product(levels)).fillna(LOST).to_numpy(float)
        spread = self.values.std(axis=1)
        smallest = spread[spread > 0].min() if spread.any() else 1.0
        # What weighs a cell in a fit: the same in every resample.
        self.weights = self._by_cell(smallest / np.where(spread > 0, spread, smallest)).max(axis=1)

    def losses(self, means: np.ndarray) -> np.ndarray:
        """The best mean loss at every noise multiplier."""
        return self._by_cell(means).min(axis=(1, 2))

    def rates_of(self, means: np.ndarray) -> np.ndarray:
        """The best learning rate at every noise multiplier: the bottom of a curve in its logarithm.

        Of a cubic through the rates near the best, each weighted by how well its loss is known; where fewer than
        five are near, of a parabola through three.
        """
        losses, x = self._by_cell(means).min(axis=1), np.log(self.rates)
        return np.exp([_bottom(x, row, weights) for row, weights in zip(losses, self.weights, strict=True)])

    def is_inside(self) -> np.ndarray:
        """At which noise multipliers the best learning rate is not at an edge of what was tried."""
        return (self._best() > 0) & (self._best() < len(self.rates) - 1)

    def num_lowest(self) -> int:
        """At how many noise multipliers the best learning rate is the lowest that was tried."""
        return int((self._best() == 0).sum())

    def _best(self) -> np.ndarray:
        return self._by_cell(self.values.mean(axis=1)).min(axis=1).argmin(axis=1)

    def _by_cell(self, means: np.ndarray) -> np.ndarray:
        return means.reshape(len(self.noise), len(self.clips), len(self.rates))


def _bottom(x: np.ndarray, losses: np.ndarray, weights: np.ndarray) -> float:
    """Of one curve; the least itself where it is at an edge, or the fit has no bottom near it."""
    best = int(losses.argmin())
    for _ in range(3):  # the bottom found may be nearer to the next rate
        near = (abs(x - x[best]) <= REACH) & (losses < LOST / 1e6)
        if near.sum() < FEWEST:
            return _vertex(x, losses)
        found = _bottom_of_cubic(x[near] - x[best], losses[near], weights[near])
        if not abs(found) <= REACH:
            return float(x[losses.argmin()])
        found += x[best]
        if (closest := int(abs(x - found).argmin())) == best:
            break
        best = closest
    return found


def _bottom_of_cubic(x: np.ndarray, losses: np.ndarray, weights: np.ndarray) -> float:
    """nan where it has none."""
    cubic, square, linear, _ = np.polyfit(x, losses, 3, w=weights)
    inner = square**2 - 3 * cubic * linear
    return float(-linear / (square + np.sqrt(inner))) if inner >= 0 and square + np.sqrt(inner) > 0 else np.nan


def _vertex(x: np.ndarray, losses: np.ndarray) -> float:
    """Of the parabola through the least and its neighbours; at an edge the least itself."""
    best = int(losses.argmin())
    if not 0 < best < len(x) - 1:
        return float(x[best])
    left, right = x[best - 1] - x[best], x[best + 1] - x[best]
    tilt_left, tilt_right = (losses[best - 1] - losses[best]) / left, (losses[best + 1] - losses[best]) / right
    bend = (tilt_right - tilt_left) / (right - left)
    return float(x[best] - (tilt_right - bend * right) / (2 * bend)) if bend > 0 else float(x[best])


def cubes(rows: Any, runner: str, clip: float | None = None) -> dict[str, Cube]:
    """By optimizer, of one task; empty where the runner was not asked."""
    of_runner = rows[rows["runner"] == runner]
    return {str(name): Cube(part, clip) for name, part in of_runner.groupby("optimizer", sort=False)}


def best_rates(cube: Cube) -> dict[float, Estimate]:
    """By noise multiplier, where the best learning rate is not at an edge."""

    def at(level: Any) -> Estimate:
        found = bootstrap(lambda sample: float(np.log(cube.rates_of(sample.mean(axis=1))[level])), cube.values)
        return Estimate(*np.exp(found))

    return {float(cube.noise[level]): at(level) for level in np.flatnonzero(cube.is_inside())}


def slope(cube: Cube, other: Cube | None = None) -> Estimate:
    """Of log(best learning rate) against log(1 / noise multiplier); less that of `other`, if given.

    Fitted where neither's best rate is at an edge; nan from fewer than two such noise multipliers.
    """
    inside = cube.is_inside() if other is None else cube.is_inside() & other.is_inside()
    if inside.sum() < 2:
        return Estimate(np.nan, np.nan, np.nan)
    x = -np.log(cube.noise[inside])
    weights = (x - x.mean()) / np.square(x - x.mean()).sum()

    def of(means: np.ndarray) -> float:
        own, others = np.split(means, [len(cube.values)])
        found = weights @ np.log(cube.rates_of(own)[inside])
        return float(found if other is None else found - weights @ np.log(other.rates_of(others)[inside]))

    values = cube.values if other is None else np.concatenate([cube.values, other.values])
    return bootstrap(lambda sample: of(sample.mean(axis=1)), values)


def steps(cube: Cube, other: Cube) -> str:
    """What `slope` of both is from each noise multiplier to the next, in words."""
    inside = cube.is_inside() & other.is_inside()
    noise = cube.noise[inside]
    ratios = [np.log(each.rates_of(each.values.mean(axis=1))[inside]) for each in (cube, other)]
    found = -np.diff(ratios[0] - ratios[1]) / np.diff(np.log(noise))
    return ", ".join(f"{step:.2f} from z = {a:g} to {b:g}" for step, a, b in zip(found, noise, noise[1:], strict=False))
