"""Forecasts of linear models with several outputs: softmax and multi-label.

The outputs' weights fluctuate independently: full covariance along the columns of a block (`PartedRows`), variances
beside it; every logit is Gaussian. The mean feels how outputs compete. A training example damps its own
logits, which variances of single weights miss (`_own_damping`).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from noisecast.problems.linear import LinearModel
from noisecast.runners.moments.batch_shape import BatchShape
from noisecast.runners.moments.forecast import Forecast, Metrics, collected, time_grid
from noisecast.runners.moments.multi_output_limits import Limits
from noisecast.runners.moments.output_examples import LAWS, OutputExamples, OutputRows
from noisecast.runners.moments.parted_rows import direction_covariance, gain_in_block
from noisecast.scenario import Scenario
from noisecast.theory.closures import GradientLaw, chord, sign_response
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
from noisecast.theory.loss_spread import std_of_mean
from noisecast.theory.softmax_moments import (
    OutputExpectations,
    expected_labels_in_top,
    output_expectations,
    probability_of_likeliest,
)

LARGEST_GROWTH = 1.2  # of the mean gradient within half a time step: beyond it the step is halved
# Of the examples' slopes, likewise, if time steps are affordable. Twice as strict as for one output: where noise moves
# weights into flat places, and flat places hold them less, the last long steps see too little of it.
LARGEST_BEND = 0.15
NUMBERS_IN_SAMPLES = 8_000_000  # that many, divided by the weights, are the pairs of samples of them, 4 to 64
ROWS_OF_SAMPLES = 4_000  # examples on which those samples' losses are looked at
LOGITS_OF_GRADIENTS = 10_000_000  # that many, divided by examples times outputs, are the pairs that ask for gradients
FEWEST_PAIRS = 16  # that say a standard deviation, to 12 %
MOST_KRYLOV_NUMBERS = 40_000_000  # what the basis of one response may hold, 320 MB
WEIGHT_STEPS = 30_000_000  # weights times time steps; more weights take fewer steps, 6 at least


def handles(problem: Any) -> bool:
    return isinstance(problem, LinearModel) and any(problem.likelihood is likelihood for likelihood, _ in LAWS)


def why_unsupported(scenario: Scenario) -> str | None:
    return None


def prepare(problem: LinearModel, settings: Any) -> OutputExamples:
    return OutputExamples.of(problem, settings.full_covariance_features, settings.subsample)


def forecast(scenario: Scenario, prepared: OutputExamples, record_at: Sequence[int], settings: Any) -> Forecast:
    return _MultiOutputSolve(scenario, prepared, settings).forecast(record_at)


# --- Time steps ---------------------------------------------------------------------------------------------------


class _Weights(NamedTuple):
    """Gaussian weights in the order [block, rest], and what the optimizer remembers.

    Args:
      mean: (d, m).   covariance: along the block's columns; (m, K + 1 + r, K + 1 + r).
      variance: of the rest, beside them; (p - K, m).
      own: variance of the training examples' logits by the rest, over that of independent weights; (n, m).
      common: variance that all outputs share, which no loss sees; of the block's columns, and of the rest.
    """

    mean: np.ndarray
    covariance: np.ndarray
    variance: np.ndarray
    own: np.ndarray
    common: np.ndarray
    memory: Any

    @property
    def is_finite(self) -> bool:
        return math.isfinite(float(np.sum(self.mean**2) + self.covariance.sum() + self.variance.sum()))


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


def _few(rows: OutputRows) -> OutputRows:
    return rows.take(np.arange(0, rows.num_examples, -(-rows.num_examples // ROWS_OF_SAMPLES)))


class _MultiOutputSolve:
    """The time steps of one scenario."""

    def __init__(self, scenario: Scenario, examples: OutputExamples, settings: Any):
        self.mechanism, self.num_steps = scenario.mechanism, scenario.num_steps
        self.learning_rate = np.float64(scenario.optimizer.learning_rate)  # overflows to inf, not to an error
        self.closure: Any = scenario.optimizer.theory.closure
        self.examples, self.rows, self.outputs, self.settings = examples, examples.train, examples.law, settings
        self.split, self.num_outputs = self.rows.split, self.rows.targets.shape[1]
        self.few = _few(examples.train)
        self.few_tests = None if examples.test is None else _few(examples.test)
        self.gauge = self.outputs.gauge(self.num_outputs)
        self.fill = self.mechanism.sampler.batch_fill(scenario.problem.num_examples)
        batch_size = self.fill * self.mechanism.expected_batch_size
        self.presence = self.rows.presence(batch_size, self.mechanism.sampler.exact_batch_size)[:, None]
        # A sampler's batch noise is a * second moment - b * mean^2; a and b are read off the sampler itself.
        of_second, of_both = (float(self.mechanism.sampler.batch_noise_variance(mean, 1.0)) for mean in (0.0, 1.0))
        self.second_share, self.mean_share = self.fill * of_second, of_second - of_both
        self.batch_shapes = self._batch_shapes() if self.closure.feels_shape else None
        self.direction, self.halvings = None, 0
        self.limits = Limits(
            num_in_block=self.split - 1,
            used=self.rows.num_examples,
            num_examples=examples.num_all,
            competes=self.outputs.is_coupled and self.num_outputs > 2,
            lag=self.closure.lag,
            num_steps=self.num_steps,
        )

    def _batch_shapes(self) -> list[BatchShape | None] | None:
        """Of every output."""
        found = self._expectations(self.rows, self._start())
        size = self.mechanism.expected_batch_size
        rate = self.fill * size / self.rows.num_examples
        sampler = self.mechanism.sampler
        asked: Any = {"rate": rate, "batch_size": size, "num_outputs": self.num_outputs}
        asked |= {"probability": sampler.sampling_probability or 0.0, "exactly": sampler.exact_batch_size}
        privacy = self.mechanism.mean_noise_std**2
        residuals = np.sqrt(found.squared_residual.astype(np.float64)).T
        shapes = [BatchShape.of(self.rows, residual, privacy_variance=privacy, **asked) for residual in residuals]
        return shapes if any(shapes) else None

    def forecast(self, record_at: Sequence[int]) -> Forecast:
        affordable = max(6, WEIGHT_STEPS // (self.rows.num_weights * self.num_outputs))
        grid = time_grid(self.num_steps, min(self.settings.time_steps, affordable))
        halvings = halvings_of(self.num_steps) if affordable >= self.settings.time_steps else 0
        stops = sorted({0, *grid, *record_at})
        at, recorded, subsample_error = self._start(), {}, 0.0
        for step, end in zip(stops, [*stops[1:], None], strict=True):
            field = self._field(at)
            beyond = self._out_of_depth(field, at, step)
            if step in record_at:
                metrics = self._metrics(at, field)
                optimism, subsample_error = self._subsample_effect(at, field)
                metrics |= {"loss": metrics["loss"] + optimism}
                is_loose = self.limits.are_passed_by(
                    metrics["loss"],
                    step=step,
                    of_noise=self._share_of_noise(at, field),
                    together=self._share_of_columns_together(at),
                )
                recorded[step] = metrics, beyond or is_loose
            if end is not None and at.is_finite:
                self.halvings = 0 if beyond else halvings  # what explodes bends at any length
                at = self._advance(at, field, step, end - step)
        return collected(recorded, subsample_error, self.limits.reasons())

    def _start(self) -> _Weights:
        width, rest = self.rows.block.shape[1], self.rows.rest.shape[1]
        m, d = self.num_outputs, self.rows.num_weights
        own = np.ones((self.rows.num_examples, m), np.float32)
        return _Weights(
            np.zeros((d, m)), np.zeros((m, width, width)), np.zeros((rest, m)), own, np.zeros(width + rest), None
        )

    def _advance(self, at: _Weights, field: _Field, step: int, num_steps: int, *, depth: int = 0) -> _Weights:
        """By the exponential midpoint rule: the field half-way, linear in the mean around it."""
        half = num_steps // 2
        if half == 0:
            return self._frozen(at, field, at, step, num_steps)
        middle = self._frozen(at, field, at, step, half)
        if not middle.is_finite:
            return middle
        around = self._field(middle)
        if half > 1 and self._is_too_long(field, around, depth):
            middle = self._advance(at, field, step, half, depth=depth + 1)
            return self._advance(middle, self._field(middle), step + half, num_steps - half, depth=depth + 1)
        return self._frozen(at, around, middle, step, num_steps)

    def _is_too_long(self, field: _Field, around: _Field, depth: int) -> bool:
        """Whether the force has grown, so that it bends more than its slope says, or the slopes themselves bend."""
        if not np.linalg.norm(around.mean) < LARGEST_GROWTH * np.linalg.norm(field.mean):
            return True
        return depth < self.halvings and bend(field.expectations.slope, around.expectations.slope) > LARGEST_BEND

    def _frozen(self, at: _Weights, field: _Field, around: _Weights, step: int, num_steps: int) -> _Weights:
        """num_steps from `at` in the field found at `around`."""
        split, eta = self.split, self.learning_rate
        memory = self.closure.memory(at.memory, field.law, step, num_steps)
        halfway = self.closure.memory(at.memory, field.law, step, max(1, num_steps // 2))
        gain_share = self.closure.gain_share(field.law, halfway, step, num_steps)
        found = self.closure.response(field.law, halfway)
        expected, slope = gain_share * found.expected, gain_share * found.gain
        slope = np.maximum(slope, SMALLEST_GAIN * slope.max())
        share = self.closure.noise_share(step, num_steps)
        lag = self.closure.lag_of(step, num_steps)
        gain = gain_in_block(self.rows, slope)
        more = self._seen_noise(field.law)
        along = field.law.signal_variance[split:] + field.noise_along
        noise = share * more[split:] * np.maximum(found.variance[split:] - slope[split:] ** 2 * along, 0.0)
        more, of_gradient = np.sqrt(gain_in_block(self.rows, more)), field.law.variance[split:]
        of_directions = found.variance[split:]
        linear = {"learning_rate": eta, "num_steps": num_steps, "lag": lag, "most": SATURATED}
        covariance = np.stack(
            [
                advance_covariance(
                    at.covariance[a],
                    jacobian=field.jacobian[a],
                    gain=gain[:, a],
                    noise=share
                    * np.outer(more[:, a], more[:, a])
                    * self._block_noise(field, around, halfway, gain[:, a], of_directions[:, a], of_gradient[:, a], a),
                    **linear,
                )
                for a in range(self.num_outputs)
            ]
        )
        variance = advance_variance(
            at.variance, jacobian=field.jacobian_diag, gain=slope[split:], noise=noise, **linear
        )
        shared = np.concatenate([np.einsum("aii->i", covariance - at.covariance), (variance - at.variance).sum(axis=1)])
        return _Weights(
            at.mean - self._travelled(field, expected, slope, at.mean - around.mean, num_steps, lag),
            covariance,
            variance,
            self._own_damping(at, field, slope[split:], variance, noise, num_steps),
            at.common + np.maximum(shared, 0) / self.num_outputs,
            memory,
        )

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
        self, field: _Field, around: _Weights, memory: Any, gain: np.ndarray, of_rest: np.ndarray,
        variance: np.ndarray, a: int,
    ) -> np.ndarray:  # fmt: skip
        """Noise of output a's directions along the block's columns, without what the spread of the weights adds.

        Cov u counts that spread; the linear step counts it too, as eta^2 K J V J K.
        """
        own, covariance = slice(None, self.split), field.covariance[a]
        spread = field.jacobian[a] @ around.covariance[a] @ field.jacobian[a]
        remembered = None if memory is None else memory[own, a]
        among = self.closure.covariance(field.mean[own, a], covariance[own, own], remembered)
        direction = direction_covariance(self.rows, among, covariance, gain, of_rest, variance)
        return direction - gain[:, None] * spread * gain

    def _own_damping(
        self, at: _Weights, field: _Field, slope: np.ndarray, variance: np.ndarray, noise: np.ndarray, num_steps: int
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

    def _travelled(
        self, field: _Field, expected: np.ndarray, slope: np.ndarray, offset: np.ndarray, num_steps: int,
        lag: float,
    ) -> np.ndarray:  # fmt: skip
        """eta sum_i (I - eta D J)^i D (F + J offset), D the `chord` E u/F."""
        stiffness = chord(field.law, expected, slope)
        root, force = np.sqrt(stiffness), expected / stiffness
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
            lag=lag,
            tolerance=5e-3,
            max_iterations=most,
            most=SATURATED,
        )
        return eta * root * response.reshape(shape)

    def _curve(self, field: _Field, weights: np.ndarray) -> np.ndarray:
        """J W; (d, m)."""
        root = 1.0 if field.root_felt is None else field.root_felt
        return self.fill * self.rows.mean_of(root * field.expectations.curve(root * self.rows.dot(weights)))

    def _field(self, at: _Weights) -> _Field:
        found = self._expectations(self.rows, at, at.own)
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

    def _logits(self, rows: OutputRows, at: _Weights, own: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of the logits; (n, m) each."""
        return rows.dot(at.mean), rows.block_variance(at.covariance) + own * rows.rest_variance(at.variance)

    def _expectations(self, rows: OutputRows, at: _Weights, own: Any = 1.0) -> OutputExpectations:
        mean, variance = self._logits(rows, at, own)
        return output_expectations(
            self.outputs, mean, variance, rows.targets, self.mechanism.l2_clip_norm / rows.lengths, rows.nodes
        )

    # --- What is recorded ---

    def _metrics(self, at: _Weights, field: _Field) -> Metrics:
        beside, width = 1 - self.rows.joint_shares.sum(axis=1), self.rows.block.shape[1]
        spread = np.einsum("aii->", at.covariance) + beside @ at.variance.sum(axis=1)
        norm = np.sum(at.mean**2) + spread
        if self.outputs.is_coupled:
            norm += at.common[:width].sum() + beside @ at.common[width:] - spread / self.num_outputs
        metrics = {
            **self._quality(self.rows, at, at.own),
            "loss": field.expectations.loss.mean(),
            "clip_fraction": field.expectations.clip_fraction.mean(),
            "params_norm": math.sqrt(norm),
        }
        if not self.settings.loss_alone:
            metrics |= self._more_metrics(at)
        return {name: float(value) for name, value in metrics.items()}

    def _more_metrics(self, at: _Weights) -> Metrics:
        """What a search for the least loss does without."""
        metrics = self._sampled(at)
        if self.examples.test is not None:
            test = self.examples.test
            found = {
                **self._quality(test, at, 1.0),
                "loss": self._expectations(test, at).loss.mean(),
            }
            metrics |= {f"test_{name}": value for name, value in found.items()}
        return metrics

    def _quality(self, rows: OutputRows, at: _Weights, own: Any) -> Metrics:
        mean, variance = self._logits(rows, at, own)
        if self.outputs.is_coupled:
            return {"accuracy": probability_of_likeliest(mean, variance, rows.labels, rows.nodes).mean()}
        positive = special.ndtr(mean / np.sqrt(np.maximum(variance, 1e-30)))
        positive[(mean == 0) & (variance == 0)] = 0.0  # a logit of 0 is no guess
        labels, guesses = rows.targets.sum(), positive.sum()
        in_top = expected_labels_in_top(mean, variance, rows.targets, rows.nodes, top=5).sum()
        return {
            "recall_at_5": in_top / max(labels, 1.0),
            "micro_f1": 2 * (positive * rows.targets).sum() / max(labels + guesses, 1e-30),
        }

    def _sampled(self, at: _Weights) -> Metrics:
        """E |gradient|, and the standard deviation of the losses over runs, from points of the weights' own law.

        Where logits spread over more than one unit a loss is no parabola in the weights, and formulas that take it for
        one are off by half. Pairs m +- V^(1/2) xi, the same xi for everybody; with too few there is no deviation. The
        variance of what is linear in the weights is known: that of the pairs is put right by it.
        """
        rng = np.random.default_rng(20_240_818)  # points of a quadrature: nothing private is drawn
        parts = {"": (self.few, self.examples.num_all)}
        if self.few_tests is not None:
            parts["test_"] = (self.few_tests, self.examples.num_tests)
        if not at.is_finite:
            return dict.fromkeys(["gradient_norm", *(f"{name}loss_std" for name in parts)], math.nan)
        losses, moved = {name: [] for name in parts}, {name: [] for name in parts}
        linear = {name: self._linear_loss(rows, at) for name, (rows, _) in parts.items()}
        norms, scale = [], self.outputs.scale(self.num_outputs)
        num_pairs = int(np.clip(NUMBERS_IN_SAMPLES // at.mean.size, 4, 64))
        num_gradients = max(4, LOGITS_OF_GRADIENTS // self.rows.targets.size)
        for pair in range(num_pairs):
            offset = self._root_times(at, rng.standard_normal((len(at.common), self.num_outputs)))
            for weights in (at.mean + offset, at.mean - offset):
                for name, (rows, _) in parts.items():
                    logits = rows.dot(weights)
                    _, normaliser = self.outputs.probabilities(logits)
                    losses[name].append(scale * (normaliser - (logits * rows.targets).sum(axis=1)))
                    moved[name].append(np.einsum("ij,ij->", linear[name][0], logits) / rows.num_examples)
                if pair < num_gradients:  # of all examples: the gradient of a few is mostly chance
                    probabilities, _ = self.outputs.probabilities(self.rows.dot(weights))
                    norms.append(scale * float(np.linalg.norm(self.rows.mean_of(probabilities - self.rows.targets))))
        deviations = {
            f"{name}loss_std": std_of_mean(
                np.array(losses[name]), num_examples, more=linear[name][1] - float(np.var(moved[name]))
            )
            for name, (_, num_examples) in parts.items()
        }
        return {"gradient_norm": float(np.mean(norms)), **(deviations if num_pairs >= FEWEST_PAIRS else {})}

    def _linear_loss(self, rows: OutputRows, at: _Weights) -> tuple[np.ndarray, float]:
        """E dl_i/dz_i, (n, m), and the variance over runs of (1/n) sum_i E l_i' . dz_i, the mean loss's linear part."""
        unclipped = np.full(rows.num_examples, np.inf)
        slopes = output_expectations(
            self.outputs, *self._logits(rows, at, 1.0), rows.targets, unclipped, rows.nodes
        ).residual
        gradient = rows.mean_of(slopes)
        of_block = rows.in_block(gradient)
        of_rest = rows.beside(gradient[self.split :])
        variance = np.einsum("ia,aij,ja->", of_block, at.covariance, of_block) + np.sum(of_rest**2 * at.variance)
        return slopes, float(variance)

    def _root_times(self, at: _Weights, vector: np.ndarray) -> np.ndarray:
        """V^(1/2) v, of the block's columns and of the rest beside them."""
        width = self.rows.block.shape[1]
        eigenvalues, basis = np.linalg.eigh(at.covariance)
        inside = np.einsum("aji,ja->ia", basis, vector[:width])
        offset = self.rows.from_block(np.einsum("aij,ja->ia", basis, np.sqrt(np.maximum(eigenvalues, 0.0)).T * inside))
        offset[self.split :] += self.rows.beside(np.sqrt(np.maximum(at.variance, 0.0)) * vector[width:])
        return offset

    # --- Where it may be off ---

    def _out_of_depth(self, field: _Field, at: _Weights, step: int) -> bool:
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

    def _share_of_noise(self, at: _Weights, field: _Field) -> float:
        """Share of the loss that would be gone without fluctuations.

        They are independent here between outputs; two outputs of a softmax are forecast as they are, as only their
        difference counts (`OutputLaw.gauge`).
        """
        if not at.is_finite:
            return 0.0
        logits = self.rows.dot(at.mean)
        _, normaliser = self.outputs.probabilities(logits)
        without = float(normaliser.mean() - np.einsum("ij,ij->i", logits, self.rows.targets).mean())
        loss = float(field.expectations.loss.mean())
        return 1 - self.outputs.scale(self.num_outputs) * without / loss if loss > 0 else 0.0

    def _share_of_columns_together(self, at: _Weights) -> float:
        """Share of the logits' variance that is forecast as of independent weights, and is not."""
        _, variance = self._logits(self.few, at, 1.0)
        rest = self.few.rest_variance(at.variance)
        return self.rows.together * float(rest.mean()) / max(float(variance.mean()), 1e-30)

    def _subsample_effect(self, at: _Weights, field: _Field) -> tuple[float, float]:
        """What fewer examples take from the loss, and the share of it that stays unknown: see `logistic`."""
        if self.examples.held_out is None:
            return 0.0, 0.0
        seen, unseen = field.expectations.loss, self._expectations(self.examples.held_out, at).loss
        left_out = 1 - self.rows.num_examples / self.examples.num_all
        optimism = left_out * float(unseen.mean() - seen.mean()) / 2
        chance = float(seen.std()) * math.sqrt(left_out / (2 * len(seen)))
        return optimism, (abs(optimism) / 4 + chance) / float(seen.mean() + optimism)
