"""The mean output of all examples: what of the weights it is, and how it carries their law along with its own."""

import math
from typing import Any

import numpy as np

from noisecast.runners.moments.examples import Rows
from noisecast.theory.common_swing import SPACING, Swing

EXAMPLES = 400  # whose pulls stand for all
# In standard deviations half-way: a time step that begins further off, or much narrower, does not fit on the grid, nor
# does one that carries the law along faster than its noise spreads it, which jumps between places would blur. The law
# then keeps its shape, and mean and variance go as in linear steps.
FURTHEST, NARROWEST = 3.0, 0.45
SMALLEST = 1e-6  # standard deviation of the mean output that is any


class MeanOutput:
    """u = x . (w - E w), x the mean of the rows within their block; s = u/std u.

    x is the left eigenvector of K J, if anything is, where all features push together: u feels a force of its own.
    """

    def __init__(self, rows: Rows):
        n = rows.num_examples
        self.rows, self.direction = rows, rows.in_block(rows.mean_of(np.ones(n)))
        order, size = np.lexsort((rows.lengths, rows.labels)), min(EXAMPLES, n)
        self.chosen = order[np.arange(size) * n // size]  # both labels, short and long, as among all
        self.few = rows.block[self.chosen]

    def std(self, covariance: np.ndarray) -> float:
        return math.sqrt(max(float(self.direction @ covariance @ self.direction), 0.0))

    def correlations(self, rows: Rows, at: Any, block: np.ndarray, variance: np.ndarray) -> np.ndarray:
        """b_i, of the outputs of these or other rows with s; (n,).

        What an example has pushed away of its own fluctuation follows s no more.

        Args:
          at: the weights.   block: variance of each output from the block.   variance: of the output; (n,).
        """
        along = at.covariance @ self.direction / max(self.std(at.covariance), 1e-12)
        held = 1.0 if rows is not self.rows else np.clip(1 + at.pushed.with_block / np.maximum(block, 1e-30), 0.0, 1.0)
        moved = held * (rows.block @ along.astype(np.float32)).astype(np.float64)
        return np.clip(moved / np.sqrt(np.maximum(variance, 1e-12)), -1.0, 1.0)

    def pull(self, along: np.ndarray, residuals: np.ndarray) -> np.ndarray:
        """Mean of q . x_i r_i over the examples chosen; (width,), (m, 71) -> (71,)."""
        return (self.few @ along.astype(np.float32)).astype(np.float64) @ residuals / len(self.few)

    def carried(
        self, before: Any, middle: Any, mean: np.ndarray, covariance: np.ndarray, num_steps: int, *,
        force: np.ndarray, gain: np.ndarray, residuals: np.ndarray, noise: np.ndarray, lag: float,
    ) -> tuple[np.ndarray, np.ndarray, Swing]:  # fmt: skip
        """Mean and covariance that linear steps lead to, with those of u as its own law has them, and that law.

        Args:
          before, middle: weights at the start, and where the field was found.   mean: (d,).   covariance: in the block.
          force: eta E u of the optimizer, in the block.   gain: eta k.   residuals: E[r_i | s] - E r_i; (m, 71).
          noise: eta^2 N.   lag: L.
        """
        std, size, after = (self.std(each) for each in (before.covariance, middle.covariance, covariance))
        along = self.direction / max(size, 1e-12)
        start, end = (float(along @ self.rows.in_block(each - middle.mean)) for each in (before.mean, mean))
        added = float(along @ noise @ along)
        pull = float(along @ force) + self.pull(gain * along, residuals)
        fits = std > NARROWEST * size and abs(start) < FURTHEST and after > SMALLEST
        if not (fits and added > 2 * SPACING * abs(middle.swing.mean_of(pull))):
            return mean, covariance, before.swing
        swing, place, width = before.swing.moved(pull, added, num_steps, mean=start, std=std / size, lag=lag)
        pushed = (place - end) * (middle.covariance @ along)
        mean = mean + self.rows.from_block(pushed)
        shared = covariance @ self.direction / after
        return mean, covariance + ((width * size / after) ** 2 - 1) * np.outer(shared, shared), swing
