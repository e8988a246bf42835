"""What the examples make of Gaussian weights, what the optimizer makes of that, and how both go on changing."""

from typing import Any, NamedTuple

import numpy as np

from noisecast.runners.moments.examples import Rows
from noisecast.runners.moments.logistic_limits import LARGEST_LATTICE_RATIO
from noisecast.runners.moments.logistic_weights import Weights
from noisecast.runners.moments.pushes import Reach, Spreads
from noisecast.theory.closures import GradientLaw, chord
from noisecast.theory.frozen_steps import Drift, bend
from noisecast.theory.own_push import Held


class Field(NamedTuple):
    """What the examples make of Gaussian weights, before the optimizer.

    Args:
      slope, squared_residual: of every example (`ClippedExpectations`), times n over the declared size; (n,).
      mean: of the clipped gradient, in the block and the rest; (d,).
      spreads: of the logits.
      jacobian: J in the block.   jacobian_diag: its diagonal in the rest, beside the block's columns; of columns in
        company what bends all of them together, m_j times their own.
      noise_along: of the rest's noise what is along the block's columns; (p - K,).
      noise_shared: of batch noise beside it, what columns in company add to each of them; (p - K,).
      held: of the examples' residuals; (n,).
      covariance: of the private gradient in the block, the spread of the weights included.
      law: of the private gradient, coordinate by coordinate.
      stiffer: what the common swing adds to J, c t t' in the block; (), (K + 1 + r,).
      stiffness: of J for a swing of the mean output.
      given: E[residual | s] - E residual of some examples (`MeanOutput.chosen`), s the common swing; (m, 71).
      bends: of these examples, std of their outputs and E residual''; (m,) each.
    """

    slope: np.ndarray
    squared_residual: np.ndarray
    mean: np.ndarray
    spreads: Spreads
    jacobian: np.ndarray
    jacobian_diag: np.ndarray
    noise_along: np.ndarray
    noise_shared: np.ndarray
    held: Held
    covariance: np.ndarray
    law: GradientLaw
    stiffer: tuple[float, np.ndarray]
    stiffness: float
    given: np.ndarray
    bends: tuple[np.ndarray, np.ndarray]

    def bent(self, other: "Field") -> float:
        """Share of the examples' slopes by which they differ, or of what holds the mean output, whichever is more."""
        held = (np.array([each.stiffness]) for each in (self, other))
        return max(bend(self.slope, other.slope), bend(*held))

    def on_lattice(self, learning_rate: float, split: int) -> float:
        """What swings of one column's gradient say that its weight adds to the loss, Var F/(2 J): the most of a column
        of the block whose gradient a step of the learning rate changes by more than noise does.
        """
        bend = np.maximum(np.diag(self.jacobian)[:split], 1e-30)
        steps_are_large = learning_rate * bend > LARGEST_LATTICE_RATIO * np.sqrt(self.law.noise_variance[:split])
        return float(np.max(np.where(steps_are_large, self.law.signal_variance[:split] / bend / 2, 0.0)))

    def curve(self, rows: Rows, vector: np.ndarray) -> np.ndarray:
        """J v."""
        stiffer, along = self.stiffer
        shared = stiffer * float(along @ rows.in_block(vector)) * along
        return rows.mean_of(self.slope * rows.dot(vector)) + rows.from_block(shared)


class Seen(NamedTuple):
    """Weights, and the field that was found there."""

    weights: Weights
    field: Field


class Directions(NamedTuple):
    """What the optimizer makes of a field, over a time step.

    Args:
      expected: E u; (d,).   slope: k of its mean; (d,).   gain: of the block's columns.
      noise: of u in the block, the spread of the weights left out.   rest_noise: of the rest, columns in company along
        what they are together; (p - K,).   noise_apart: across it.
      lag: L, over which directions average.   memory: of the optimizer, after the step.
    """

    expected: np.ndarray
    slope: np.ndarray
    gain: np.ndarray
    noise: np.ndarray
    rest_noise: np.ndarray
    noise_apart: np.ndarray
    lag: float
    memory: Any

    def stiffness(self, field: Field) -> np.ndarray:
        """D, the `chord` E u/F; (d,)."""
        return chord(field.law, self.expected, self.slope)


class Given(NamedTuple):
    """What weights are given, a step.

    Args:
      taken: directions.   reach: of what examples push.   noise, rest_noise: of directions, with what examples push on.
    """

    taken: Directions
    reach: Reach
    noise: np.ndarray
    rest_noise: np.ndarray

    def injected(self, field: Field, covariance: np.ndarray, learning_rate: float) -> np.ndarray:
        """What the block's covariance is given, less what fades of it; (K + 1 + r, K + 1 + r)."""
        gain, lag = self.taken.gain, self.taken.lag
        fading = (learning_rate * gain[:, None] * field.jacobian) @ covariance
        twice = fading @ (learning_rate * field.jacobian * gain)
        return learning_rate**2 * self.noise - fading - fading.T + twice / (1 + 2 * lag)

    def injected_in_rest(self, field: Field, variance: np.ndarray, learning_rate: float) -> np.ndarray:
        """The same of the rest; (p - K,)."""
        slope = self.taken.slope[len(self.taken.slope) - len(variance) :]
        x = learning_rate * slope * field.jacobian_diag
        return learning_rate**2 * self.rest_noise - (2 * x - x**2 / (1 + 2 * self.taken.lag)) * variance


class Change(NamedTuple):
    """By how much more weights are given from one step to the next, after half-way.

    Args:
      force: of D^-1 E u where the mean is half-way; (d,).   block, rest: of the variances.
    """

    force: np.ndarray
    block: Drift
    rest: Drift
