"""The mean output of all examples: what of the weights it is, and how it carries their law along with its own."""

import math
from typing import Any

import numpy as np

from noisecast.runners.moments.examples import Rows
from noisecast.theory.common_swing import GRID, SPACING, Swing, moved_by_spring

EXAMPLES = 400  # whose pulls stand for all
# In standard deviations half-way: a time step that begins further off, or much narrower, does not fit on the grid, nor
# does one that carries the law along faster than its noise spreads it, which jumps between places would blur. The law
# then keeps its shape, and mean and variance go as in linear steps.
FURTHEST, NARROWEST = 3.0, 0.45
SMALLEST = 1e-6  # standard deviation of the mean output that is any


class MeanOutput:
    """u = x . (w - E w), x the mean of the rows within their block; s = u/std u.

    x is the left eigenvector of K J, if anything is, where all features push together: u feels a force of its own.
    Examples `chosen` stand for all, the one at place `standing`[i] of them for example i.
    """

    def __init__(self, rows: Rows):
        n = rows.num_examples
        self.rows, self.direction = rows, rows.in_block(rows.mean_of(np.ones(n)))
        order, size = np.lexsort((rows.lengths, rows.labels)), min(EXAMPLES, n)
        places = np.arange(size) * n // size  # both labels, short and long, as among all
        self.chosen, self.standing = order[places], np.empty(n, int)
        self.standing[order] = np.searchsorted(places, np.arange(n), side="right") - 1
        self.few = rows.block[self.chosen]

    def std(self, covariance: np.ndarray) -> float:
        return math.sqrt(max(float(self.direction @ covariance @ self.direction), 0.0))

    def swings(self, rows: Rows, covariance: np.ndarray) -> np.ndarray:
        """a_i = Cov(z_i, s), of the outputs of these or other rows, own pushes left out; (n,)."""
        along = covariance @ self.direction / max(self.std(covariance), 1e-12)
        return (rows.block @ along.astype(np.float32)).astype(np.float64)

    def correlations(self, swings: np.ndarray, std: np.ndarray, held: Any = 1.0) -> np.ndarray:
        """b_i, of outputs with s; (n,).

        Args:
          swings: a_i.   std: of each output.   held: the share of a_i that the example has not pushed away.
        """
        return np.clip(held * swings / np.maximum(std, 1e-6), -1.0, 1.0)

    def beside(self, covariance: np.ndarray) -> np.ndarray:
        """Variances of the weights along the block's columns, given the mean output; (K + 1 + r,) >= 0."""
        together = covariance @ self.direction
        return np.maximum(np.diag(covariance) - together**2 / max(self.std(covariance), 1e-12) ** 2, 0.0)

    def apart(self, covariance: np.ndarray) -> np.ndarray:
        """What is left of the covariance, given the mean output."""
        together = covariance @ self.direction
        return covariance - np.outer(together, together) / max(self.std(covariance), 1e-12) ** 2

    def noise_of(self, covariance: np.ndarray, swings: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Noise of a step N in the block: what of it outputs feel by the swing, and what beside it; (n,) each.

        z_i = c_i u + what is left: c_i^2 x'N x, and sum_j N_jj (x_ij - c_i x_j)^2.
        """
        c, single = swings / max(self.std(covariance), 1e-12), np.diag(noise)
        within = (self.rows.block @ (single * self.direction).astype(np.float32)).astype(np.float64)
        beside = self.rows.block_squared_dot(single) - 2 * c * within + c**2 * float(single @ self.direction**2)
        return c**2 * float(self.direction @ noise @ self.direction), np.maximum(beside, 0.0)

    def secant(self, covariance: np.ndarray, more: np.ndarray) -> np.ndarray:
        """c q q' with c q q' V x = q: what holds a swing beside J, where examples hold it by so much more; (n,).

        q = (1/n) sum_i more_i (x_i . V x) x_i, by the mean of rows x.
        """
        together = covariance @ self.direction
        swing = (self.rows.block @ together.astype(np.float32)).astype(np.float64) * more / self.rows.num_examples
        found = (self.rows.block.T @ swing.astype(np.float32)).astype(np.float64)
        held = float(found @ together)
        return np.outer(found, found) / held if held > SMALLEST**2 else np.zeros((len(found), len(found)))

    def stiffer(self, at: Any, jacobian: np.ndarray, pull: np.ndarray) -> tuple[float, np.ndarray]:
        """c, t: J + c t t' answers a swing of the mean output as the pull on it does, of which J has the mean slope.

        t = J V x, and c x'V t the pull's `slope_share` less 1.
        """
        along = jacobian @ (at.covariance @ self.direction)
        held = float(self.direction @ at.covariance @ along)
        return ((at.swing.slope_share(pull) - 1) / held if held > SMALLEST**2 else 0.0), along

    def stiffness(self, at: Any, jacobian: np.ndarray) -> float:
        """x'V J V x/(x'V x)^2, of a J that knows of the swing."""
        together = at.covariance @ self.direction
        variance = max(float(self.direction @ together), SMALLEST**2)
        return float(together @ jacobian @ together) / variance / variance

    def pull(self, along: np.ndarray, residuals: np.ndarray) -> np.ndarray:
        """Mean of q . x_i r_i over the examples chosen; (width,), (m, 71) -> (71,)."""
        return (self.few @ along.astype(np.float32)).astype(np.float64) @ residuals / len(self.few)

    def bent(self, at: Any, swing_share: float, residuals: np.ndarray) -> float:
        """How far the pull on s is from a spring's: 1 - corr^2 with a Gaussian s, 0.36 where it is one of two.

        Args:
          swing_share: of the outputs' variance that is the swing's.   residuals: E[r_i | s] - E r_i; (m, 71).
        Returns: that, times the share.
        """
        size, law = self.std(at.covariance), Swing.gaussian()
        if size < SMALLEST:
            return 0.0
        pull = self.pull(self.direction / size, residuals)
        whole, linear = law.variance_of(pull), law.mean_of(GRID * pull) ** 2
        return swing_share * max(0.0, 1 - linear / whole) if whole > 0 else 0.0

    def carried(
        self, before: Any, middle: Any, mean: np.ndarray, covariance: np.ndarray, num_steps: int, *,
        force: np.ndarray, gain: np.ndarray, jacobian: np.ndarray, residuals: np.ndarray, noise: np.ndarray, lag: float,
    ) -> tuple[np.ndarray, np.ndarray, Swing]:  # fmt: skip
        """Mean and covariance that linear steps lead to, by as much else as the law of u goes elsewhere; and that law.

        Linear steps know how u and everything else move each other, the law alone what is not linear: what is added is
        by how much the law ends up elsewhere than it would in a linear pull of the same slope.

        Args:
          before, middle: weights at the start, and where the field was found.   mean: (d,).   covariance: in the block.
          force: eta E u of the optimizer, in the block.   gain: eta k.   jacobian: J.
          residuals: E[r_i | s] - E r_i; (m, 71).   noise: eta^2 N.   lag: L.
        """
        std, size, after = (self.std(each) for each in (before.covariance, middle.covariance, covariance))
        along = self.direction / max(size, 1e-12)
        start = float(along @ self.rows.in_block(before.mean - middle.mean))
        added = float(along @ noise @ along)
        pull = float(along @ force) + self.pull(gain * along, residuals)
        fits = std > NARROWEST * size and abs(start) < FURTHEST and after > SMALLEST
        if not (fits and added > 2 * SPACING * abs(middle.swing.mean_of(pull))):
            return mean, covariance, before.swing
        there = {"mean": start, "std": std / size, "lag": lag}
        swing, place, width = before.swing.moved(pull, added, num_steps, **there)
        together = middle.covariance @ along
        slope = max(float((gain * along) @ jacobian @ together), 0.0)
        end, spread = moved_by_spring(float(along @ force), slope, added, num_steps, **there)
        shared = covariance @ self.direction / after
        wider = ((width / spread) ** 2 - 1) * np.outer(shared, shared)
        return mean + self.rows.from_block((place - end) * together), covariance + wider, swing
