"""What the examples make of Gaussian weights, what the optimizer makes of that, and how both go on changing."""

from typing import Any, NamedTuple

import numpy as np

from noisecast.runners.moments.batch_shape import BatchShape
from noisecast.runners.moments.examples import Rows
from noisecast.runners.moments.logistic_limits import LARGEST_LATTICE_RATIO
from noisecast.runners.moments.logistic_weights import Weights, residual_bound
from noisecast.runners.moments.mean_output import MeanOutput
from noisecast.runners.moments.pushes import Reach, Spreads
from noisecast.scenario import Scenario
from noisecast.theory.closures import GradientLaw, chord
from noisecast.theory.frozen_steps import Drift, bend
from noisecast.theory.logistic_moments import ClippedExpectations, clipped_expectations, residual_given
from noisecast.theory.output_law import OutputLaw
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


class Fields:
    """Finds the field at Gaussian weights, of the rows as a scenario clips and draws them.

    Args:
      common: of the rows.
    """

    def __init__(self, scenario: Scenario, rows: Rows, common: MeanOutput):
        mechanism = scenario.mechanism
        closure: Any = scenario.optimizer.theory.closure
        self.mechanism, self.rows, self.common, self.split = mechanism, rows, common, rows.split
        self.bound, self.privacy = residual_bound(mechanism.l2_clip_norm, rows), mechanism.mean_noise_std**2
        self.fill = mechanism.sampler.batch_fill(scenario.problem.num_examples)
        self.presence = rows.presence(self.fill * mechanism.expected_batch_size, mechanism.sampler.exact_batch_size)
        self.batch_shape = self._batch_shape() if closure.feels_shape else None
        # A sampler's batch noise is a * second moment - b * mean^2; a and b are read off the sampler itself.
        self.second_share = float(mechanism.sampler.batch_noise_variance(0.0, 1.0))
        self.mean_share = self.second_share - float(mechanism.sampler.batch_noise_variance(1.0, 1.0))

    def _batch_shape(self) -> BatchShape | None:
        size = self.mechanism.expected_batch_size
        rate = self.fill * size / self.rows.num_examples
        residual = np.minimum(self.bound, 0.5)
        sampler = self.mechanism.sampler
        drawn: Any = {"probability": sampler.sampling_probability or 0.0, "exactly": sampler.exact_batch_size}
        return BatchShape.of(self.rows, residual, rate=rate, batch_size=size, privacy_variance=self.privacy, **drawn)

    def at(self, at: Weights) -> Field:
        rows, split, privacy = self.rows, self.split, self.privacy
        swings, labels = self.common.swings(rows, at.covariance), rows.labels
        spreads = Spreads.of(rows, swings, at)
        law = at.pushed_law(rows, spreads, self.common)
        variance, few = law.std**2, self.common.chosen
        correlations = self.common.correlations(swings, law.std, at.pushed.swinging_share(spreads.swing))
        found = clipped_expectations(law, labels, self.bound, at.swing.departures(correlations))
        bends = self._bends(law, found.values)
        given = residual_given(law.mean[few], variance[few], labels[few], self.bound[few], correlations[few], at.swing)
        follows = correlations[few] * law.std[few]
        found = ClippedExpectations(*(self.fill * part for part in found))  # of the sum over a batch, over B
        mean = rows.mean_of(found.residual)
        held = self._held(found, at, law, spreads)
        jacobian, jacobian_diag, stiffer = self._jacobian(held, at, follows @ given)
        noise = self.second_share * rows.block_second_moment(found.squared_residual)
        pull = rows.in_block(mean)
        noise = noise - self.mean_share * np.outer(pull, pull) + privacy * np.eye(len(pull))
        rest_noise = self.second_share * rows.rest_second_moment(found.squared_residual)
        rest_noise = rest_noise - self.mean_share * mean[split:] ** 2 + privacy
        noise_along = self.second_share * rows.rest_moment_along(found.squared_residual)
        spread = jacobian @ at.covariance @ jacobian
        noise_shared = (rows.company - 1) * np.maximum(rest_noise - privacy - noise_along, 0.0)
        signal = np.concatenate([np.diag(spread)[:split], jacobian_diag**2 / rows.company * at.variance])
        noise_variance = np.maximum(np.concatenate([np.diag(noise)[:split], rest_noise]), 1e-30)
        gradient = GradientLaw(mean, signal, noise_variance, presence=self.presence, privacy_variance=privacy)
        if self.batch_shape is not None:
            of_one = found.residual / self.fill, found.squared_residual / self.fill
            gradient, felt = self.batch_shape.seen_by_sign(gradient, *of_one, found.slope)
            found, given = found.felt(felt), felt[few, None] * given
            held = self._held(found, at, law, spreads)
            jacobian, jacobian_diag, stiffer = self._jacobian(held, at, follows @ given)
        return Field(
            found.slope, found.squared_residual, mean, spreads, jacobian, jacobian_diag, noise_along, noise_shared,
            held, noise + spread, gradient, stiffer, self.common.stiffness(at, jacobian), self.fill * given, bends,
        )  # fmt: skip

    def _bends(self, law: OutputLaw, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the examples that stand for all, std of their outputs and rho'': E[rho (x^2 - x E x^3 - 1)]/Var z.

        That is E rho'' of a Gaussian, and else what of Cov(z^2, rho) is not of the straight force Cov(z, rho)/Var z.
        """
        few = self.common.chosen
        places, shares = (each if each.shape[1] == 1 else each[:, few] for each in (law.places, law.shares))
        third = (shares * places**3).sum(axis=0)
        found = (shares * values[:, few] * (places**2 - third * places - 1)).sum(axis=0).astype(np.float64)
        return law.std[few], self.fill * found / law.std[few] ** 2

    def _held(self, found: ClippedExpectations, at: Weights, law: OutputLaw, spreads: Spreads) -> Held:
        """Of these residuals, with what the common swing makes of slopes."""
        held = at.pushed.held(*spreads[1:3], law, found.values)
        of_own_law = law.hermite_means(found.values, 2)[1] / law.std
        share = np.where(of_own_law > 1e-12, found.slope / np.maximum(of_own_law, 1e-12), 1.0)
        return held._replace(swing=held.swing * share, slow=held.slow * share)

    def _jacobian(
        self, held: Held, at: Weights, pull: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, tuple[float, np.ndarray]]:
        """J of examples that hold weights so, and of such a pull on the mean output at the places of its swing.

        Returns: J in the block; its diagonal in the rest, as in `Field`; `MeanOutput.stiffer`.
        """
        # Single precision may leave a variance of nothing below nothing.
        of_rest = np.maximum(self.rows.rest_second_moment(held.slow) - self.rows.rest_moment_along(held.slow), 0.0)
        of_rest *= self.rows.company
        within = self.rows.block_second_moment(held.slow)
        within += self.common.secant(at.covariance, np.maximum(held.swing - held.slow, 0.0))
        stiffer, along = self.common.stiffer(at, within, pull)
        return within + stiffer * np.outer(along, along), of_rest, (stiffer, along)


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
