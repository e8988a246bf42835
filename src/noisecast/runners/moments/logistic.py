"""Forecasts of binary logistic models.

Full covariance among the features of most energy and the bias, variances elsewhere; every logit is Gaussian; time runs
in geometric steps within which the response is linear.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from noisecast.problems.linear import LOGISTIC, LinearModel
from noisecast.runners.moments.examples import Examples, Rows
from noisecast.runners.moments.forecast import Forecast, Metrics, collected
from noisecast.scenario import Scenario
from noisecast.theory.closures import GradientLaw, expected_norm
from noisecast.theory.frozen_steps import SMALLEST_GAIN, advance_covariance, advance_variance, krylov_response
from noisecast.theory.logistic_moments import LogisticExpectations, logistic_expectations

LARGEST_STEP = 2.0  # eta times the largest curvature met on the way: there steps start to explode


def handles(problem: Any) -> bool:
    return isinstance(problem, LinearModel) and problem.likelihood is LOGISTIC


def why_unsupported(scenario: Scenario) -> str | None:
    return None


def prepare(problem: LinearModel, settings: Any) -> Examples:
    return Examples.of(problem, settings.full_covariance_features, settings.subsample)


def forecast(scenario: Scenario, prepared: Examples, record_at: Sequence[int], settings: Any) -> Forecast:
    return _LogisticSolve(scenario, prepared).forecast(record_at, settings.time_steps)


class _Weights(NamedTuple):
    """Gaussian weights in the order [block, rest], and what the optimizer remembers."""

    mean: np.ndarray
    covariance: np.ndarray
    variance: np.ndarray
    memory: Any


class _Field(NamedTuple):
    """What the examples make of Gaussian weights, before the optimizer.

    Args:
      expectations: of every example.   mean: of the clipped gradient, in the block and the rest; (d,).
      jacobian: J in the block.   jacobian_diag: its diagonal in the rest.
      covariance: of the private gradient in the block, the spread of the weights included.
      law: of the private gradient, coordinate by coordinate.
    """

    expectations: LogisticExpectations
    mean: np.ndarray
    jacobian: np.ndarray
    jacobian_diag: np.ndarray
    covariance: np.ndarray
    law: GradientLaw


def _is_finite(at: _Weights) -> bool:
    return math.isfinite(float(at.mean @ at.mean + np.trace(at.covariance) + at.variance.sum()))


def _norm(mean: np.ndarray, covariance: np.ndarray, variance: np.ndarray) -> float:
    """E|X| for X ~ N(mean, [covariance, diag(variance)])."""
    split = len(covariance)
    mean_square = mean @ mean + np.trace(covariance) + variance.sum()
    along = mean[:split] @ covariance @ mean[:split] + mean[split:] ** 2 @ variance
    return expected_norm(mean_square, 2 * (np.sum(covariance**2) + variance @ variance) + 4 * along)


class _LogisticSolve:
    """The time steps of one scenario."""

    def __init__(self, scenario: Scenario, examples: Examples):
        self.optimizer, self.mechanism = scenario.optimizer, scenario.mechanism
        self.learning_rate = float(scenario.optimizer.learning_rate)
        self.num_steps = scenario.num_steps
        self.closure: Any = self.optimizer.theory.closure
        self.examples, self.rows = examples, examples.train
        self.split, self.steepest = self.rows.block.shape[1], 0.0
        # A sampler's batch noise is a * second moment - b * mean^2; a and b are read off the sampler itself.
        self.second_share = float(self.mechanism.sampler.batch_noise_variance(0.0, 1.0))
        self.mean_share = self.second_share - float(self.mechanism.sampler.batch_noise_variance(1.0, 1.0))

    def forecast(self, record_at: Sequence[int], time_steps: int) -> Forecast:
        grid = np.rint(np.geomspace(1, self.num_steps, time_steps)).astype(int).tolist()
        stops = sorted({0, *grid, *record_at})
        num_block, num_rest = self.split, self.rows.rest.shape[1]
        at = _Weights(np.zeros(num_block + num_rest), np.zeros((num_block, num_block)), np.zeros(num_rest), None)
        recorded, subsample_error = {}, 0.0
        for step, end in zip(stops, [*stops[1:], None]):
            field = self._field(at)
            beyond = self._out_of_depth(field, at, step)
            if step in record_at:
                recorded[step] = self._metrics(at, field), beyond
            if end is None:
                subsample_error = self._subsample_error(at, field)
            elif _is_finite(at):
                at = self._advance(at, field, step, end - step)
        return collected(recorded, subsample_error)

    def _advance(self, at: _Weights, field: _Field, step: int, num_steps: int) -> _Weights:
        """By the exponential midpoint rule: the field half-way, linear in the mean around it."""
        half = num_steps // 2
        if half == 0:
            return self._frozen(at, field, at, step, num_steps)
        middle = self._frozen(at, field, at, step, half)
        return self._frozen(at, self._field(middle), middle, step, num_steps) if _is_finite(middle) else middle

    def _frozen(self, at: _Weights, field: _Field, around: _Weights, step: int, num_steps: int) -> _Weights:
        """num_steps from `at` in the field found at `around`."""
        split, eta = self.split, self.learning_rate
        block, rest = slice(None, split), slice(split, None)
        memory = self.closure.memory(at.memory, field.law, step, num_steps)
        halfway = self.closure.memory(at.memory, field.law, step, max(1, num_steps // 2))
        expected, slope = self.closure.response(field.law, halfway)
        slope = np.maximum(slope, SMALLEST_GAIN * slope.max())
        # Cov u counts the spread of the weights; the linear step counts it too, as eta^2 K J V J K.
        spread = field.jacobian @ around.covariance @ field.jacobian
        direction = self.closure.covariance(field.mean[block], field.covariance, halfway)
        noise = direction - slope[block, None] * spread * slope[block]
        law = GradientLaw(*(part[rest] for part in field.law[:3]))
        rest_noise = self.closure.variance(law, None if halfway is None else halfway[rest])
        rest_noise = rest_noise - slope[rest] ** 2 * law.signal_variance
        share = self.closure.noise_share(step, num_steps)
        linear = {"learning_rate": eta, "num_steps": num_steps}
        return _Weights(
            at.mean - self._travelled(field, expected, slope, at.mean - around.mean, num_steps),
            advance_covariance(
                at.covariance, jacobian=field.jacobian, gain=slope[block], noise=share * noise, **linear
            ),
            advance_variance(
                at.variance, jacobian=field.jacobian_diag, gain=slope[rest], noise=share * rest_noise, **linear
            ),
            memory,
        )

    def _travelled(
        self, field: _Field, expected: np.ndarray, slope: np.ndarray, offset: np.ndarray, num_steps: int
    ) -> np.ndarray:
        """eta sum_i (I - eta D J)^i D (F + J offset), D the chord E u/F: it knows how far a saturated sign bends."""
        pushed = np.abs(field.mean) > 1e-12 * np.abs(field.mean).max()
        root = np.sqrt(np.where(pushed, expected / np.where(pushed, field.mean, 1.0), slope))
        force = field.mean if not offset.any() else field.mean + self._curve(field, offset)
        eta, lag = self.learning_rate, self.closure.lag
        response = krylov_response(
            lambda v: eta * root * self._curve(field, root * v), root * force, num_steps, lag=lag
        )
        return eta * root * response

    def _curve(self, field: _Field, vector: np.ndarray) -> np.ndarray:
        """J v."""
        return self.rows.mean_of(field.expectations.slope * self.rows.dot(vector))

    def _field(self, at: _Weights) -> _Field:
        found = self._expectations(self.rows, at)
        mean = self.rows.mean_of(found.residual)
        jacobian = self.rows.block_second_moment(found.slope)
        jacobian_diag = self.rows.rest_second_moment(found.slope)
        split, privacy = self.split, self.mechanism.mean_noise_std**2
        noise = self.second_share * self.rows.block_second_moment(found.squared_residual)
        noise = noise - self.mean_share * np.outer(mean[:split], mean[:split]) + privacy * np.eye(split)
        rest_noise = self.second_share * self.rows.rest_second_moment(found.squared_residual)
        rest_noise = rest_noise - self.mean_share * mean[split:] ** 2 + privacy
        spread = jacobian @ at.covariance @ jacobian
        signal = np.concatenate([np.diag(spread), jacobian_diag**2 * at.variance])
        # Single precision may leave a variance of nothing below nothing.
        law = GradientLaw(mean, signal, np.maximum(np.concatenate([np.diag(noise), rest_noise]), 1e-30))
        return _Field(found, mean, jacobian, jacobian_diag, noise + spread, law)

    def _expectations(self, data: Rows, at: _Weights) -> LogisticExpectations:
        spread = data.logit_variance(at.covariance, at.variance)
        return logistic_expectations(data.dot(at.mean), spread, data.labels, self.mechanism.l2_clip_norm / data.lengths)

    def _metrics(self, at: _Weights, field: _Field) -> Metrics:
        found = field.expectations
        gradient = self.rows.mean_of(found.full_residual)
        jacobian = self.rows.block_second_moment(found.full_slope)
        rest = self.rows.rest_second_moment(found.full_slope)
        metrics = {
            "loss": found.loss.mean(),
            "accuracy": found.probability_of_right.mean(),
            "gradient_norm": _norm(gradient, jacobian @ at.covariance @ jacobian, rest**2 * at.variance),
            "clip_fraction": found.clip_fraction.mean(),
            "params_norm": _norm(at.mean, at.covariance, at.variance),
        }
        if self.examples.test is not None:
            unseen = self._expectations(self.examples.test, at)
            metrics |= {"test_loss": unseen.loss.mean(), "test_accuracy": unseen.probability_of_right.mean()}
        return {name: float(value) for name, value in metrics.items()}

    def _out_of_depth(self, field: _Field, at: _Weights, step: int) -> bool:
        if not np.isfinite(field.mean).all():
            return True
        memory = self.closure.memory(at.memory, field.law, step, 1)
        gain = self.closure.response(field.law, memory)[1]
        curvature = np.concatenate([np.diag(field.jacobian), field.jacobian_diag])
        self.steepest = max(self.steepest, self.learning_rate * float(np.max(gain * curvature)))
        return self.steepest > LARGEST_STEP

    def _subsample_error(self, at: _Weights, field: _Field) -> float:
        """What fewer examples change of the final loss, as a share of it: its standard error, and optimism.

        Weights fitted to m examples are better on them by a/m, and worse on others by a/m: the gap is 2 a/m. With all n
        it would be 2 a/n, so the loss is a (1/m - 1/n) = (1 - m/n) gap/2 too low.
        """
        if self.examples.held_out is None:
            return 0.0
        seen = field.expectations.loss
        unseen = self._expectations(self.examples.held_out, at).loss
        optimism = self.examples.left_out * max(float(unseen.mean() - seen.mean()), 0.0) / 2
        return (optimism + float(seen.std()) / math.sqrt(len(seen))) / float(seen.mean())
