"""Best cells, tuned again in every resample of the seeds: intervals that know how much of a choice was chance."""

from typing import Any

import numpy as np
import pandas as pd

from noisecast.reproduction.fits import Estimate, bootstrap
from noisecast.table import DIVERGED

LOST = 1e30  # the loss of a diverged run: worse than any, and still a number that means can be taken of


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

    def losses(self, means: np.ndarray) -> np.ndarray:
        """The best mean loss at every noise multiplier."""
        return self._by_cell(means).min(axis=(1, 2))

    def rates_of(self, means: np.ndarray) -> np.ndarray:
        """The best learning rate at every noise multiplier: the vertex of a parabola in its logarithm."""
        return np.exp(_vertices(np.log(self.rates), self._by_cell(means).min(axis=1)))

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


def _vertices(x: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Of the parabolas through the least of every row and its neighbours; at an edge the least itself."""
    best = losses.argmin(axis=1)
    if len(x) < 3:
        return x[best]
    i, rows = np.clip(best, 1, len(x) - 2), np.arange(len(losses))
    left, right = x[i - 1] - x[i], x[i + 1] - x[i]
    with np.errstate(invalid="ignore", divide="ignore"):
        tilt_left, tilt_right = (
            (losses[rows, i + side] - losses[rows, i]) / width for side, width in ((-1, left), (1, right))
        )
        bend = (tilt_right - tilt_left) / (right - left)
        vertex = x[i] - (tilt_right - bend * right) / (2 * bend)
    is_bowl = (best == i) & np.isfinite(vertex) & (bend > 0)
    return np.where(is_bowl, vertex, x[best])


def cubes(rows: Any, runner: str, clip: float | None = None) -> dict[str, Cube]:
    """By optimizer, of one task; empty where the runner was not asked."""
    of_runner = rows[rows["runner"] == runner]
    return {str(name): Cube(part, clip) for name, part in of_runner.groupby("optimizer", sort=False)}


def slope(cube: Cube, other: Cube | None = None) -> Estimate:
    """Of log(best learning rate) against log(1 / noise multiplier); less that of `other`, if given.

    Fitted where neither's best rate is at an edge; nan from fewer than three such noise multipliers.
    """
    inside = cube.is_inside() if other is None else cube.is_inside() & other.is_inside()
    if inside.sum() < 3:
        return Estimate(np.nan, np.nan, np.nan)
    x = -np.log(cube.noise[inside])
    weights = (x - x.mean()) / np.square(x - x.mean()).sum()

    def of(means: np.ndarray) -> float:
        own, others = np.split(means, [len(cube.values)])
        found = weights @ np.log(cube.rates_of(own)[inside])
        return float(found if other is None else found - weights @ np.log(other.rates_of(others)[inside]))

    values = cube.values if other is None else np.concatenate([cube.values, other.values])
    return bootstrap(lambda sample: of(sample.mean(axis=1)), values)
