"""Best cells, tuned again in every resample of the seeds: intervals that know how much of a choice was chance."""

from functools import reduce
from typing import Any

import numpy as np
import pandas as pd

from noisecast.reproduction.fits import LOST, Estimate, bootstrap
from noisecast.reproduction.valley import Valley
from noisecast.table import DIVERGED


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
        if of_seeds.empty:
            raise ValueError("Expected a seed that has every cell that others have, got none.")
        self.seeds = of_seeds.columns.to_numpy()
        self.values = of_seeds.reindex(pd.MultiIndex.from_product(levels)).fillna(LOST).to_numpy(float)
        # The same in every resample; at every rate of the clip norm that is best there.
        best = self._by_cell(self.values.mean(axis=1)).argmin(axis=1)[:, None, :, None]
        of_cells = self.values.reshape(len(self.noise), len(self.clips), len(self.rates), -1)
        of_rates = np.take_along_axis(of_cells, best, axis=1)[:, 0]
        self.valleys = [Valley(np.log(self.rates), losses) for losses in of_rates]

    def losses(self, means: np.ndarray) -> np.ndarray:
        """The best mean loss at every noise multiplier."""
        return self._by_cell(means).min(axis=(1, 2))

    def rates_of(self, means: np.ndarray) -> np.ndarray:
        """The best learning rate at every noise multiplier: the bottom of a curve in its logarithm."""
        losses = self._by_cell(means).min(axis=1)
        return np.exp([valley.bottom(row) for valley, row in zip(self.valleys, losses, strict=True)])

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


def stacked(*cubes: Cube) -> np.ndarray:
    """Their values one below another, (cells of all, seeds): of the seeds that all of them have."""
    shared = reduce(np.intersect1d, [cube.seeds for cube in cubes])
    return np.concatenate([cube.values[:, np.isin(cube.seeds, shared)] for cube in cubes])


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

    return bootstrap(lambda sample: of(sample.mean(axis=1)), stacked(cube) if other is None else stacked(cube, other))


def steps(cube: Cube, other: Cube) -> str:
    """What `slope` of both is from each noise multiplier to the next, in words."""
    inside = cube.is_inside() & other.is_inside()
    noise = cube.noise[inside]
    ratios = [np.log(each.rates_of(each.values.mean(axis=1))[inside]) for each in (cube, other)]
    found = -np.diff(ratios[0] - ratios[1]) / np.diff(np.log(noise))
    return ", ".join(f"{step:.2f} from z = {a:g} to {b:g}" for step, a, b in zip(found, noise, noise[1:], strict=False))
