"""Forecasts of linear models with several outputs: softmax and multi-label.

The outputs' weights fluctuate independently: full covariance along the columns of a block (`PartedRows`), variances
beside it; every logit is Gaussian. The mean feels how outputs compete. A training example damps its own
logits, which variances of single weights miss (`_own_damping`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from noisecast.problems.linear import LinearModel
from noisecast.runners.moments.averaged_steps import Followed, Frozen, followed, no_averages
from noisecast.runners.moments.batch_shape import BatchShape
from noisecast.runners.moments.examples import why_too_long
from noisecast.runners.moments.forecast import Forecast, collected
from noisecast.runners.moments.lagging import Lagging
from noisecast.runners.moments.multi_output_limits import Limits
from noisecast.runners.moments.output_examples import LAWS, OutputExamples
from noisecast.runners.moments.output_weights import OutputMetrics, Weights
from noisecast.runners.moments.parted_rows import direction_covariance, gain_in_block
from noisecast.runners.moments.time_steps import time_grid
from noisecast.scenario import Scenario
from noisecast.theory.adam_averages import Averages
from noisecast.theory.closures import GradientLaw, Response, chord, sign_response
from noisecast.theory.frozen_steps import (
    SATURATED,
    SMALLEST_GAIN,
    advance_covariance,
    advance_variance,
    bend,
    halvings_of,
    krylov_response,
    power_iteration,
)
from noisecast.theory.softmax_moments import OutputExpectations

LARGEST_GROWTH = 1.2  # of the mean gradient within half a time step: beyond it the step is halved
# Of the examples' slopes, likewise, if time steps are affordable. Twice as strict as for one output: where noise moves
# weights into flat places, and flat places hold them less, the last long steps see too little of it.
LARGEST_BEND = 0.15
MOST_KRYLOV_NUMBERS = 40_000_000  # what the basis of one response may hold, 320 MB
WEIGHT_STEPS = 30_000_000  # weights times time steps; more weights take fewer steps, 6 at least


def handles(problem: Any) -> bool:
    return isinstance(problem, LinearModel) and any(problem.likelihood is likelihood for likelihood, _ in LAWS)


def why_unsupported(scenario: Scenario) -> str | None:
    return why_too_long(scenario.problem)


def prepare(problem: LinearModel, settings: Any) -> OutputExamples:
    return OutputExamples.of(problem, settings.full_covariance_features, settings.subsample)


def forecast(scenario: Scenario, prepared: OutputExamples, record_at: Sequence[int], settings: Any) -> Forecast:
    found = _MultiOutputSolve(scenario, prepared, settings).forecast(record_at)
    if found is None:
        found = _MultiOutputSolve(scenario, prepared, settings, follows_averages=True).forecast(record_at)
        assert found is not None
    return found


# --- Time steps ---------------------------------------------------------------------------------------------------


class _Field(NamedTuple):
    """What the examples make of Gaussian weights, before the optimizer.

    Args:
      expectations: of every example.   mean: of the clipped gradient; (d, m).
      jacobian: each output's J along the block's columns.   jacobian_diag: its diagonal in the rest; (p - K, m).
      noise_along: of the rest's noise what is along the block's columns; (p - K, m).
      covariance: of the private gradient along these, the spread of the weights included.
      law: of the private gradient, coordinate by coordinate; (d, m) each.
      root_felt: sqrt a_ic, where signs feel some examples less than others (`BatchShape`); (n, m).
    """

    expectations: OutputExpectations
    mean: np.ndarray
    jacobian: np.ndarray
    jacobian_diag: np.ndarray
    noise_along: np.ndarray
    covariance: np.ndarray
    law: GradientLaw
    root_felt: np.ndarray | None


class _Taken(NamedTuple):
    """What the optimizer makes of a field, over a time step.

    Args:
      expected: E u; (d, m).   slope: k of its mean; (d, m).   response: half-way.
      noise_share: of its noise, over that of independent directions.   lag: L.
      halfway, memory: of the optimizer, half-way and at the end.
    """

    expected: np.ndarray
    slope: np.ndarray
    response: Response
    noise_share: float
    lag: float
    halfway: Any
    memory: Any


class _MultiOutputSolve:
    """The time steps of one scenario.

    Args:
      follows_averages: whether an optimizer's averages are followed step by step until directions have calmed.
    """

    def __init__(self, scenario: Scenario, examples: OutputExamples, settings: Any, *, follows_averages: bool = False):
        self.mechanism, self.num_steps = scenario.mechanism, scenario.num_steps
        self.learning_rate = np.float64(scenario.optimizer.learning_rate)  # overflows to inf, not to an error
        self.closure: Any = scenario.optimizer.theory.closure
        self.examples, self.rows, self.outputs, self.settings = examples, examples.train, examples.law, settings
        self.split, self.num_outputs = self.rows.split, self.rows.targets.shape[1]
        self.metrics = OutputMetrics(examples, self.mechanism.l2_clip_norm, loss_alone=settings.loss_alone)
        self.gauge = self.outputs.gauge(self.num_outputs)
        self.fill = self.mechanism.sampler.batch_fill(scenario.problem.num_examples)
        batch_size = self.fill * self.mechanism.expected_batch_size
        self.presence = self.rows.presence(batch_size, self.mechanism.sampler.exact_batch_size)[:, None]
        # A sampler's batch noise is a * second moment - b * mean^2; a and b are read off the sampler itself.
        of_second, of_both = (float(self.mechanism.sampler.batch_noise_variance(mean, 1.0)) for mean in (0.0, 1.0))
        self.second_share, self.mean_share = self.fill * of_second, of_second - of_both
        self.limits = Limits(
            num_in_block=self.split - 1,
            used=self.rows.num_examples,
            num_examples=examples.num_all,
            competes=self.outputs.is_coupled and self.num_outputs > 2,
            lagging=Lagging(
                self.closure.lag,
                self.num_steps,
                self.num_outputs * self.rows.num_weights,
                self.num_outputs * self.rows.block.size,
                self.num_outputs * self.rows.block.shape[1] ** 2,
                follows_averages,
            ),
        )
        self.batch_shapes = self._batch_shapes() if self.closure.feels_shape else None
        self.direction, self.halvings = None, 0
        self.passing: set[int] = set()  # steps to record
        self.passed: dict[int, Weights] = {}  # the weights there, between time steps

    def _batch_shapes(self) -> list[BatchShape | None] | None:
        """Of every output."""
        found = self.metrics.expectations(self.rows, self._start())
        size = self.mechanism.expected_batch_size
        rate = self.fill * size / self.rows.num_examples
        sampler = self.mechanism.sampler
        asked: Any = {"rate": rate, "batch_size": size, "num_outputs": self.num_outputs}
        asked |= {"probability": sampler.sampling_probability or 0.0, "exactly": sampler.exact_batch_size}
        privacy = self.mechanism.mean_noise_std**2
        residuals = np.sqrt(found.squared_residual.astype(np.float64)).T
        shapes = [BatchShape.of(self.rows, residual, privacy_variance=privacy, **asked) for residual in residuals]
        return shapes if any(shapes) else None

    def forecast(self, record_at: Sequence[int]) -> Forecast | None:
        """In time steps that do not depend on `record_at`, so that looking on the way does not move the end.

        None where averages have to be followed, and are not.
        """
        affordable = max(6, WEIGHT_STEPS // (self.rows.num_weights * self.num_outputs))
        grid = time_grid(self.num_steps, min(self.settings.time_steps, affordable))
        halvings = halvings_of(self.num_steps) if affordable >= self.settings.time_steps else 0
        stops = self.limits.lagging.stops(grid)
        at, recorded, subsample_error, last = self._start(), {}, 0.0, -1
        self.passing = set(record_at)
        for step, end in zip(stops, [*stops[1:], None], strict=True):
            field = self._field(at)
            beyond = self._out_of_depth(field, at, step)
            if self.closure.averages and self.limits.lagging.should_be_followed(step, self.limits.steepest):
                return None
            for asked in (asked for asked in record_at if last < asked <= step):
                there = self.passed.pop(asked, at)
                expectations = field.expectations if there is at else self._expectations(there)
                metrics = self.metrics.of(there, expectations)
                optimism, subsample_error = self.metrics.subsample_effect(there, expectations)
                metrics |= {"loss": metrics["loss"] + optimism}
                is_loose = self.limits.are_passed_by(
                    metrics["loss"],
                    step=asked,
                    of_noise=self.metrics.of_noise(there, expectations),
                    together=self.metrics.of_columns_together(there),
                )
                recorded[asked] = metrics, beyond or is_loose
            if end is not None and at.is_finite:
                if not self.limits.lagging.are_followed(step, self.limits.steepest):
                    at = at._replace(averages=None)
                self.halvings = 0 if beyond else halvings  # what explodes bends at any length
                at = self._advance(at, field, step, end - step)
            last = step
        return collected(recorded, subsample_error, self.limits.reasons())

    def _start(self) -> Weights:
        width, rest = self.rows.block.shape[1], self.rows.rest.shape[1]
        m, d = self.num_outputs, self.rows.num_weights
        own = np.ones((self.rows.num_examples, m), np.float32)
        mean, covariance, variance = np.zeros((d, m)), np.zeros((m, width, width)), np.zeros((rest, m))
        averages = no_averages(mean, covariance, variance[None]) if self.limits.lagging.is_followed else None
        return Weights(mean, covariance, variance, own, np.zeros(width + rest), None, averages)

    def _advance(self, at: Weights, field: _Field, step: int, num_steps: int, *, depth: int = 0) -> Weights:
        """By the exponential midpoint rule: the field half-way, linear in the mean around it."""
        half = num_steps // 2
        if half == 0:
            return self._frozen(at, field, at, step, num_steps)
        middle = self._frozen(at, field, at, step, half)
        if not middle.is_finite:
            return middle
        around = self._field(middle)
        if half > 1 and at.averages is None and self._is_too_long(field, around, depth):
            middle = self._advance(at, field, step, half, depth=depth + 1)
            return self._advance(middle, self._field(middle), step + half, num_steps - half, depth=depth + 1)
        for asked in (asked for asked in self.passing if step < asked < step + num_steps):
            self.passed[asked] = self._frozen(at, around, middle, step, asked - step)
        return self._frozen(at, around, middle, step, num_steps)

    def _is_too_long(self, field: _Field, around: _Field, depth: int) -> bool:
        """Whether the force has grown, so that it bends more than its slope says, or the slopes themselves bend."""
        if not np.linalg.norm(around.mean) < LARGEST_GROWTH * np.linalg.norm(field.mean):
            return True
        return depth < self.halvings and bend(field.expectations.slope, around.expectations.slope) > LARGEST_BEND

    def _frozen(self, at: Weights, field: _Field, around: Weights, step: int, num_steps: int) -> Weights:
        """num_steps from `at` in the field found at `around`."""
        taken, more = self._taken(at, field, step, num_steps), self._seen_noise(field.law)
        noise = self._rest_noise(field, taken, more)
        if at.averages is None:
            mean = at.mean - self._travelled(field, taken, at.mean - around.mean, num_steps)
            covariance, variance = self._linear(at, field, around, taken, more, noise, num_steps)
            memory, averages = taken.memory, None
        else:
            steps: Any = self.closure.averages
            start, frozen = self._followed(at, at.averages, field, around, more)
            mean, covariance, (variance,), averages = followed(
                start, frozen, steps, self.rows, self.learning_rate, step, num_steps
            )
            memory = steps.memory(averages.second, step + num_steps)
        shared = np.concatenate([np.einsum("aii->i", covariance - at.covariance), (variance - at.variance).sum(axis=1)])
        return Weights(
            mean,
            covariance,
            variance,
            self._own_damping(at, field, taken.slope[self.split :], variance, noise, num_steps),
            at.common + np.maximum(shared, 0) / self.num_outputs,
            memory,
            averages,
        )

    def _taken(self, at: Weights, field: _Field, step: int, num_steps: int) -> "_Taken":
        halfway = self.closure.memory(at.memory, field.law, step, max(1, num_steps // 2))
        gain_share = self.closure.gain_share(field.law, halfway, step, num_steps)
        found = self.closure.response(field.law, halfway)
        expected, slope = gain_share * found.expected, gain_share * found.gain
        return _Taken(
            expected,
            np.maximum(slope, SMALLEST_GAIN * slope.max()),
            found,
            self.closure.noise_share(step, num_steps),
            self.closure.lag_of(step, num_steps),
            halfway,
            self.closure.memory(at.memory, field.law, step, num_steps),
        )

    def _rest_noise(self, field: _Field, taken: "_Taken", more: np.ndarray) -> np.ndarray:
        """Of directions, beside the block's columns; (p - K, m)."""
        rest = slice(self.split, None)
        along = field.law.signal_variance[rest] + field.noise_along
        left = np.maximum(taken.response.variance[rest] - taken.slope[rest] ** 2 * along, 0.0)
        return taken.noise_share * more[rest] * left

    def _linear(
        self, at: Weights, field: _Field, around: Weights, taken: "_Taken", more: np.ndarray, rest_noise: np.ndarray,
        num_steps: int,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Covariances along the block's columns, and variances of the rest, after steps that answer at once or lag."""
        split, slope = self.split, taken.slope
        linear: Any = {"learning_rate": self.learning_rate, "num_steps": num_steps, "lag": taken.lag, "most": SATURATED}
        gain, counted = (gain_in_block(self.rows, each) for each in (slope, np.minimum(slope, taken.response.gain)))
        more = np.sqrt(gain_in_block(self.rows, more))
        of_directions, of_gradient = taken.response.variance[split:], field.law.variance[split:]
        covariances = []
        for a in range(self.num_outputs):
            rest = of_directions[:, a], of_gradient[:, a]
            noise = self._block_noise(field, around, taken.halfway, gain[:, a], counted[:, a], *rest, a)
            noise = taken.noise_share * np.outer(more[:, a], more[:, a]) * noise
            held: Any = {"jacobian": field.jacobian[a], "gain": gain[:, a]}
            covariances.append(advance_covariance(at.covariance[a], noise=noise, **held, **linear))
        variance = advance_variance(
            at.variance, jacobian=field.jacobian_diag, gain=slope[split:], noise=rest_noise, **linear
        )
        return np.stack(covariances), variance

    def _followed(
        self, at: Weights, averages: Averages, field: _Field, around: Weights, more: np.ndarray
    ) -> tuple[Followed, Frozen]:
        """What is followed step by step, and what does not change meanwhile."""
        split, of_block = self.split, np.sqrt(gain_in_block(self.rows, more)).T
        noise = field.covariance - field.jacobian @ around.covariance @ field.jacobian
        rest_noise = np.maximum(field.law.noise_variance[split:] - field.noise_along, 0.0)
        frozen = Frozen(
            pull=lambda mean: field.mean + self._curve(field, mean - around.mean),
            variance=field.law.variance,
            jacobian=field.jacobian,
            noise=of_block[:, :, None] * noise * of_block[:, None, :],
            rest_jacobian=field.jacobian_diag[None],
            rest_noise=(more[split:] * rest_noise)[None],
        )
        return Followed(at.mean, at.covariance, at.variance[None], averages), frozen

    def _seen_noise(self, law: GradientLaw) -> np.ndarray:
        """Noise of differences of outputs, which alone a softmax sees, over that of independent ones; (d, m).

        Residuals of outputs that compete sum to 0: batch noise of two of them is correlated by -1/(m - 1) on average,
        that of their difference m/(m - 1) times as large. Privacy noise is independent.
        """
        if not self.outputs.is_coupled:
            return np.ones_like(law.noise_variance)
        of_batches = np.clip(1 - law.privacy_variance / law.noise_variance, 0, 1)
        return 1 + of_batches / max(self.num_outputs - 1, 1)

    def _block_noise(
        self, field: _Field, around: Weights, memory: Any, gain: np.ndarray, counted: np.ndarray, of_rest: np.ndarray,
        variance: np.ndarray, a: int,
    ) -> np.ndarray:  # fmt: skip
        """Noise of output a's directions along the block's columns, without what the spread of the weights adds.

        Cov u counts that spread; the linear step counts it too, as eta^2 K J V J K. Of a share of the gain above 1 that
        would be more than there is: so `counted`.
        """
        own, covariance = slice(None, self.split), field.covariance[a]
        spread = field.jacobian[a] @ around.covariance[a] @ field.jacobian[a]
        remembered = None if memory is None else memory[own, a]
        among = self.closure.covariance(field.mean[own, a], covariance[own, own], remembered)
        direction = direction_covariance(self.rows, among, covariance, gain, of_rest, variance)
        return direction - counted[:, None] * spread * counted

    def _own_damping(
        self, at: Weights, field: _Field, slope: np.ndarray, variance: np.ndarray, noise: np.ndarray, num_steps: int
    ) -> np.ndarray:
        """How much less a training example's own logits fluctuate than independent weights would make them; (n, m).

        An example pulls all its features together, at the rate eta a_i sum_j k_j x_ij^2/n along x_i, a_i = E dr/dz.
        Single weights feel only the part sum_j x_ij^4 of it. Both equations start from the same variance; their ratio
        is kept. This is the Onsager term of a rare feature; own derivation, first order in 1/n.
        """
        rows = self.rows
        before, after = rows.rest_variance(at.variance), rows.rest_variance(variance)
        gained = rows.rest_variance(slope)
        shared = rows.rest_variance(slope * field.jacobian_diag * variance)
        shared = np.divide(shared, after, out=np.zeros_like(after), where=after > 0)
        pulled = self.fill * self.gauge * rows.across / self.examples.num_all
        itself = field.expectations.slope * gained * pulled[:, None]
        push = {"noise": rows.rest_variance(noise), "learning_rate": self.learning_rate, "num_steps": num_steps}
        alone = advance_variance(at.own * before, jacobian=shared + itself, gain=1.0, **push)
        without = advance_variance(before, jacobian=shared, gain=1.0, **push)
        return np.clip(alone / np.maximum(without, 1e-30), 0.0, 1.0).astype(np.float32)

    def _travelled(self, field: _Field, taken: "_Taken", offset: np.ndarray, num_steps: int) -> np.ndarray:
        """eta sum_i (I - eta D J)^i D (F + J offset), D the `chord` E u/F."""
        stiffness = chord(field.law, taken.expected, taken.slope)
        root, force = np.sqrt(stiffness), taken.expected / stiffness
        if offset.any():
            force = force + self._curve(field, offset)
        eta, shape = self.learning_rate, force.shape

        def operator(v: np.ndarray) -> np.ndarray:
            return eta * (root * self._curve(field, root * v.reshape(shape))).ravel()

        most = int(np.clip(MOST_KRYLOV_NUMBERS // force.size, 4, 48))
        response = krylov_response(
            operator,
            (root * force).ravel(),
            num_steps,
            lag=taken.lag,
            tolerance=5e-3,
            max_iterations=most,
            most=SATURATED,
        )
        return eta * root * response.reshape(shape)

    def _curve(self, field: _Field, weights: np.ndarray) -> np.ndarray:
        """J W; (d, m)."""
        root = 1.0 if field.root_felt is None else field.root_felt
        return self.fill * self.rows.mean_of(root * field.expectations.curve(root * self.rows.dot(weights)))

    def _expectations(self, at: Weights) -> OutputExpectations:
        return self.metrics.expectations(self.rows, at, at.own)

    def _field(self, at: Weights) -> _Field:
        found = self._expectations(at)
        mean = self.fill * self.rows.mean_of(found.residual)
        slope = self.fill * self.gauge * found.slope
        jacobian, jacobian_diag = self._jacobian(slope)
        split, privacy = self.split, self.mechanism.mean_noise_std**2
        block = self.rows.in_block(mean).T
        noise = self.second_share * self.rows.block_second_moment(found.squared_residual)
        noise += privacy * np.eye(block.shape[1]) - self.mean_share * block[:, :, None] * block[:, None, :]
        noise_along = self.second_share * self.rows.rest_moment_along(found.squared_residual)
        rest_noise = self.second_share * self.rows.rest_second_moment(found.squared_residual)
        rest_noise += privacy - self.mean_share * mean[split:] ** 2
        spread = jacobian @ at.covariance @ jacobian
        signal = np.concatenate([np.einsum("aii->ia", spread)[:split], jacobian_diag**2 * at.variance])
        # Single precision may leave a variance of nothing below nothing.
        variance = np.maximum(np.concatenate([np.einsum("aii->ia", noise)[:split], rest_noise]), 1e-30)
        law, root_felt = GradientLaw(mean, signal, variance, presence=self.presence, privacy_variance=privacy), None
        if self.batch_shapes is not None:
            law, felt = self._seen_by_signs(found, law)
            found, root_felt = found._replace(slope=felt * found.slope), np.sqrt(felt)
            jacobian, jacobian_diag = self._jacobian(felt * slope)
        return _Field(found, mean, jacobian, jacobian_diag, noise_along, noise + spread, law, root_felt)

    def _jacobian(self, slope: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """J of examples of these slopes: along the block's columns, and its diagonal in the rest beside them."""
        # Single precision may leave of nothing less than nothing.
        of_rest = np.maximum(self.rows.rest_second_moment(slope) - self.rows.rest_moment_along(slope), 0.0)
        return self.rows.block_second_moment(slope), of_rest

    def _seen_by_signs(self, found: OutputExpectations, law: GradientLaw) -> tuple[GradientLaw, np.ndarray]:
        """The law with E sign and gains, and the share with which example i is felt by output a; (n, m)."""
        sign, felt = np.stack(sign_response(law)), np.ones(found.slope.shape)
        for a, shape in enumerate(self.batch_shapes or ()):
            if shape is not None:
                one = law._replace(
                    mean=law.mean[:, a], signal_variance=law.signal_variance[:, a],
                    noise_variance=law.noise_variance[:, a], presence=self.presence[:, 0],
                )  # fmt: skip
                residuals = found.residual[:, a], found.squared_residual[:, a], found.slope[:, a]
                seen, felt[:, a] = shape.seen_by_sign(one, *(part.astype(np.float64) for part in residuals))
                sign[:, :, a] = seen.sign
        return law._replace(sign=sign), felt

    # --- Where it may be off ---

    def _out_of_depth(self, field: _Field, at: Weights, step: int) -> bool:
        """Whether eta times the largest curvature is too large, by a power iteration that goes on from step to step."""
        self.limits.meet(float(field.expectations.loss.mean()), step)
        if not np.isfinite(field.mean).all():
            return True
        memory = self.closure.memory(at.memory, field.law, step, 1)
        found = self.closure.response(field.law, memory)
        if step == 0:
            moved = self.rows.dot(self.learning_rate * found.expected)
            self.limits.first_move = float(np.sqrt(np.mean(moved**2)))
        root = np.sqrt(found.gain)
        first = self.direction is None
        if first:  # anything that is not an eigenvector of 0; the gradient may be 0
            start = np.random.default_rng(0).standard_normal(field.mean.shape)
            start += 10 * field.mean / max(float(np.sqrt(np.mean(field.mean**2))), 1e-300)
            self.direction = start / np.linalg.norm(start)
        curvature, self.direction = power_iteration(
            lambda v: root * self._curve(field, root * v), self.direction, 4 if first else 1
        )
        self.limits.meet_curvature(self.learning_rate * curvature, step)
        return self.limits.are_passed
