"""The forecast: mean and covariance of the weights as one deterministic solve; no seed, no path."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse

from noisecast.optimizers import DPSGD, DPAdam, DPSignSGD
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.noise import Purpose, RandomRoot, key_data, key_for
from noisecast.problems.linear import LOGISTIC, Labelled, LinearModel
from noisecast.problems.quadratic import Quadratic
from noisecast.problems.rows import DenseRows
from noisecast.runners.runner import Progress, groups_of, rows
from noisecast.scenario import Scenario
from noisecast.table import EXTRAPOLATED, OK
from noisecast.theory.clipping import sign_scale_mixture
from noisecast.theory.moment_closures import (
    SGD_CLOSURE,
    SIGN_CLOSURE,
    SMALLEST_GAIN,
    AdamMoments,
    Closure,
    GradientLaw,
    InjectedNoise,
    LogisticExpectations,
    adam_closure,
    adam_quadratic_step,
    advance_covariance,
    advance_variance,
    expected_norm,
    krylov_response,
    logistic_expectations,
    quadratic_step,
)

CLOSURES: dict[type, Callable[[Any], Closure]] = {
    DPSGD: lambda optimizer: SGD_CLOSURE,
    DPSignSGD: lambda optimizer: SIGN_CLOSURE,
    DPAdam: lambda optimizer: adam_closure(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps),
}
# Beyond these the closures err by more than a few per cent.
LARGEST_LATTICE_RATIO = 1.0  # rho = eta h/s of DP-SignSGD and DP-Adam: the floor's own lattice
LARGEST_STEP = 2.0  # eta times the largest curvature met on the way: there steps start to explode
LARGEST_SUBSAMPLE_ERROR = 0.02  # of the loss

Metrics = dict[str, float]


class Forecast(NamedTuple):
    """What a scenario's run will do. Computed from the examples without noise, therefore non-private.

    Args:
      steps: where the metrics are recorded.   metrics: by name, (number of steps,) each.
      extrapolated: whether the closure is out of its depth there; (number of steps,).
      subsample_error: estimated share of the loss by which a subsample moves it; () >= 0, 0 without one.
    """

    steps: np.ndarray
    metrics: dict[str, np.ndarray]
    extrapolated: np.ndarray
    subsample_error: float


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of the weights, closed by Gaussians (`theory.moment_closures`).

    On a quadratic with injected noise: the algorithm's own recursion, coordinate by coordinate; exact for DP-SGD while
    nothing is clipped. On a binary logistic model: full covariance among the features of most energy and the bias,
    variances elsewhere; every logit is Gaussian; time runs in geometric steps within which the response is linear.
    Metrics are expectations over runs. Everything is computed from the examples
    without noise: non-private. Rows are marked `extrapolated` where the closure is out of its depth, and `diverged`
    where the forecast has no finite number.

    Args:
      full_covariance_features: how many features have a full covariance; >= 0.
      time_steps: of the geometric grid; >= 1.
      subsample: use that many examples instead of all; the same ones for everybody. None: all. What it adds to the
        loss is estimated from as many other examples; beyond `LARGEST_SUBSAMPLE_ERROR` all rows are `extrapolated`.

    Raises: ValueError for a number out of range.

    >>> from noisecast import DPSGD, SampledGaussian, Scenario, Stream, answer, quadratic
    >>> problem = quadratic(np.ones(4), 1.0, example_noise_std=0.1)
    >>> mechanism = SampledGaussian(noise_multiplier=0.01, l2_clip_norm=100.0, sampler=Stream(8))
    >>> asked = Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=0.1), num_steps=20)
    >>> table = answer([asked], runners=[Moments()], record_at=[0])
    >>> table[table["metric"] == "loss"]["value"].round(4).tolist()
    [2.0, 0.0313]
    """

    full_covariance_features: int = 300
    time_steps: int = 40
    subsample: int | None = None
    name: ClassVar[str] = "moments"

    def __post_init__(self) -> None:
        for field, least in (("full_covariance_features", 0), ("time_steps", 1), ("subsample", 2)):
            value = getattr(self, field)
            if value is None and field == "subsample":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Expected {field} to be a whole number >= {least}, got {value}.")

    def why_unsupported(self, scenario: Scenario) -> str | None:
        problem, optimizer = scenario.problem, scenario.optimizer
        if type(optimizer) not in CLOSURES:
            return f'moments cannot answer {optimizer.name}: it has no closure of its step. Use runner "training".'
        if isinstance(problem, Quadratic) and problem.degrees_of_freedom <= 2 and not _clips(scenario.mechanism):
            return (
                f"moments cannot answer {problem.name}: example noise with degrees_of_freedom <= 2 and no clipping has "
                "no variance. Give a finite l2_clip_norm."
            )
        is_logistic = isinstance(problem, LinearModel) and problem.likelihood is LOGISTIC
        if not (isinstance(problem, Quadratic) or is_logistic):
            return (
                f"moments cannot answer {problem.name}: it forecasts quadratics and binary logistic models. "
                'Use runner "training".'
            )
        return None

    def answer(
        self,
        scenarios: Sequence[Scenario],
        *,
        repeats: Sequence[int],
        root: RandomRoot,
        record_at: Sequence[int],
        progress: Progress,
    ) -> pd.DataFrame:
        tables = []
        groups = groups_of(scenarios, lambda scenario: (scenario.problem.fingerprint,))
        for group in groups:
            examples = self._examples(group[0].problem)
            for scenario in group:
                forecast = self._forecast(scenario, examples, record_at)
                tables.append(_table(self.name, scenario, forecast))
                progress(len(tables) / len(scenarios))
        return pd.concat(tables, ignore_index=True)

    def forecast(self, scenario: Scenario, record_at: Sequence[int]) -> Forecast:
        """One scenario's forecast, with the error that a subsample adds to it. Non-private.

        Raises: ValueError with the sentence of `why_unsupported`.
        """
        reason = self.why_unsupported(scenario)
        if reason is not None:
            raise ValueError(reason)
        return self._forecast(scenario, self._examples(scenario.problem), sorted({*record_at, scenario.num_steps}))

    def _examples(self, problem: Any) -> "Examples | None":
        if isinstance(problem, Quadratic):
            return None
        return Examples.of(problem, self.full_covariance_features, self.subsample)

    def _forecast(self, scenario: Scenario, examples: "Examples | None", record_at: Sequence[int]) -> Forecast:
        steps = [step for step in record_at if step <= scenario.num_steps]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # a diverging forecast says so in its rows
            if examples is None:
                return _forecast_quadratic(scenario, steps)
            return _LogisticSolve(scenario, examples).forecast(steps, self.time_steps)


def _clips(mechanism: SampledGaussian) -> bool:
    return mechanism.l2_clip_norm < 1e18


def _table(name: str, scenario: Scenario, forecast: Forecast) -> pd.DataFrame:
    records = [(int(k), {m: v[i : i + 1] for m, v in forecast.metrics.items()}) for i, k in enumerate(forecast.steps)]
    table = rows(name, [scenario], None, records)
    beyond = forecast.steps[forecast.extrapolated | (forecast.subsample_error > LARGEST_SUBSAMPLE_ERROR)]
    table.loc[table["step"].isin(beyond.tolist()) & (table["status"] == OK), "status"] = EXTRAPOLATED
    return table


def _collected(recorded: dict[int, tuple[Metrics, bool]], subsample_error: float = 0.0) -> Forecast:
    steps = np.array(sorted(recorded))
    found = [recorded[step] for step in steps]
    # Training is in single precision: what leaves it there has diverged here.
    metrics = {name: _within_single([one[name] for one, _ in found]) for name in found[0][0]}
    return Forecast(steps, metrics, np.array([beyond for _, beyond in found]), subsample_error)


def _within_single(values: Sequence[float]) -> np.ndarray:
    found = np.array(values, np.float64)
    return np.where(np.abs(found) > np.finfo(np.float32).max, np.inf, found)


# --- Quadratics ---------------------------------------------------------------------------------------------------


def _forecast_quadratic(scenario: Scenario, steps: Sequence[int]) -> Forecast:
    """Step by step; coordinates that share curvature and start share a forecast."""
    problem: Any = scenario.problem
    mechanism, optimizer = scenario.mechanism, scenario.optimizer
    both = np.stack([np.asarray(problem.hessian_diag, np.float64), np.asarray(problem.initial_params(), np.float64)])
    (hessian, start), counts = np.unique(both, axis=1, return_counts=True)
    largest = 100 * max(mechanism.l2_clip_norm, math.sqrt(np.sum(counts * (hessian * start) ** 2)))
    law = {
        "num_params": problem.num_params,
        "example_noise_std": problem.example_noise_std,
        "degrees_of_freedom": problem.degrees_of_freedom,
        "l2_clip_norm": mechanism.l2_clip_norm,
    }
    noise = InjectedNoise.tabulated(**law, largest_norm=largest)
    mixture = _sign_mixture(law, mechanism, noise)
    closure = CLOSURES[type(optimizer)](optimizer)
    state, memory, recorded = AdamMoments.start(start), None, {}
    for step in range(scenario.num_steps + 1):
        gradient_norm = math.sqrt(np.sum(counts * hessian**2 * (state.mean**2 + state.variance)))
        shrink, example_variance = noise.at(gradient_norm) if math.isfinite(gradient_norm) else (math.nan, math.nan)
        batch_variance = float(mechanism.sampler.batch_noise_variance(0.0, example_variance))
        noise_variance = batch_variance + mechanism.mean_noise_std**2
        curvature = shrink * hessian
        if step in steps:
            second = state.mean**2 + state.variance
            metrics = {
                "loss": 0.5 * float(np.sum(counts * hessian * second)),
                "gradient_norm": _norm_of_many(hessian * state.mean, hessian**2 * state.variance, counts),
                "params_norm": _norm_of_many(state.mean, state.variance, counts),
            }
            recorded[step] = metrics, _out_of_depth(optimizer, curvature.max(), math.sqrt(noise_variance))
        if isinstance(optimizer, DPAdam):  # its momentum is part of the recursion, which stays linear
            state = adam_quadratic_step(
                state, step, curvature=curvature, noise_variance=noise_variance,
                learning_rate=optimizer.learning_rate, b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps,
            )  # fmt: skip
            continue
        gradient = GradientLaw(
            curvature * state.mean, curvature**2 * state.variance, noise_variance, *mixture(gradient_norm)
        )
        memory = closure.memory(memory, gradient, step, 1)
        mean, variance = quadratic_step(
            state.mean, state.variance, curvature=curvature, law=gradient, closure=closure, memory=memory,
            learning_rate=optimizer.learning_rate,
        )  # fmt: skip
        state = state._replace(mean=mean, variance=variance)
    return _collected(recorded)


def _norm_of_many(mean: np.ndarray, variance: np.ndarray, counts: np.ndarray) -> float:
    spread = np.sum(counts * (2 * variance**2 + 4 * mean**2 * variance))
    return expected_norm(float(np.sum(counts * (mean**2 + variance))), float(spread))


def _sign_mixture(law: dict, mechanism: SampledGaussian, noise: InjectedNoise) -> Callable[[float], tuple]:
    """The scale mixture at a gradient norm: heavy-tailed example noise makes a sign see many noises."""
    if math.isinf(law["degrees_of_freedom"]) or law["example_noise_std"] == 0:
        return lambda gradient_norm: ((1.0,), (1.0,))
    norms = noise.log_norms[:: max(1, len(noise.log_norms) // 48)]
    factors, weights = sign_scale_mixture(
        np.exp(norms), **law, batch_size=int(mechanism.expected_batch_size), mean_noise_std=mechanism.mean_noise_std
    )

    def at(gradient_norm: float) -> tuple:
        log_norm = math.log(max(gradient_norm, 1e-300))
        return tuple([float(np.interp(log_norm, norms, column)) for column in table.T] for table in (factors, weights))

    return at


def _out_of_depth(optimizer: Any, curvature: float, noise_std: float) -> bool:
    if isinstance(optimizer, DPSGD):
        return False  # its recursion is the algorithm's
    return bool(optimizer.learning_rate * curvature > LARGEST_LATTICE_RATIO * noise_std)


# --- Binary logistic models ---------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Labelled rows, split into a dense block [most energetic features, bias] and the rest.

    Args:
      block: (n, K + 1) float32.   rest, rest_squared: (n, p - K), CSR or dense, float32.
      labels: (n,).   lengths: sqrt(|x|^2 + 1); (n,).
    """

    block: np.ndarray
    rest: Any
    rest_squared: Any
    labels: np.ndarray
    lengths: np.ndarray

    @property
    def num_examples(self) -> int:
        return len(self.labels)

    def dot(self, weights: np.ndarray) -> np.ndarray:
        """x_i . w; (n,)."""
        split = self.block.shape[1]
        weights = weights.astype(np.float32)
        return (self.block @ weights[:split] + self.rest @ weights[split:]).astype(np.float64)

    def mean_of(self, coefficients: np.ndarray) -> np.ndarray:
        """(1/n) sum_i c_i x_i; (d,)."""
        c = (coefficients / self.num_examples).astype(np.float32)
        return np.concatenate([self.block.T @ c, self.rest.T @ c]).astype(np.float64)

    def block_second_moment(self, coefficients: np.ndarray) -> np.ndarray:
        """(1/n) sum_i c_i x_i x_i', c >= 0, within the block; (K + 1, K + 1)."""
        half = self.block * np.sqrt(coefficients / self.num_examples).astype(np.float32)[:, None]
        return (half.T @ half).astype(np.float64)

    def rest_second_moment(self, coefficients: np.ndarray) -> np.ndarray:
        """(1/n) sum_i c_i x_ij^2 in the rest; (p - K,)."""
        return (self.rest_squared.T @ (coefficients / self.num_examples).astype(np.float32)).astype(np.float64)

    def logit_variance(self, covariance: np.ndarray, variance: np.ndarray) -> np.ndarray:
        spread = np.einsum("ij,ij->i", self.block @ covariance.astype(np.float32), self.block)
        return (spread + self.rest_squared @ variance.astype(np.float32)).astype(np.float64)

    def take(self, chosen: np.ndarray) -> "Rows":
        return Rows(*(part[chosen] for part in self))


class Examples(NamedTuple):
    """The rows of a logistic model as a forecast reads them.

    Args:
      train, test: what it computes with.
      held_out: as many other examples, which measure what a subsample adds; None without one.
      left_out: share of the examples that `train` does not hold.
    """

    train: Rows
    test: Rows | None
    held_out: Rows | None = None
    left_out: float = 0.0

    @classmethod
    def of(cls, problem: LinearModel, num_full: int, subsample: int | None) -> "Examples":
        features = _matrix(problem.train)
        energy = scipy.sparse.csr_array(features).power(2).sum(axis=0)
        order = np.argsort(-np.asarray(energy), kind="stable")
        train = _split(features, problem.train, order, num_full)
        test = None if problem.test is None else _split(_matrix(problem.test), problem.test, order, num_full)
        if subsample is None or subsample >= train.num_examples:
            return cls(train, test)
        # The same rows for everybody: a choice of rows is no randomness that anybody's privacy rests on.
        key = key_for(Purpose.DATA, "moments", root=RandomRoot.from_insecure_seed(0), repeat=0)
        shuffled = np.random.default_rng(key_data(key)).permutation(train.num_examples)
        chosen, others = np.sort(shuffled[:subsample]), np.sort(shuffled[subsample : 2 * subsample])
        return cls(train.take(chosen), test, train.take(others), 1 - subsample / train.num_examples)


def _matrix(data: Labelled) -> Any:
    if isinstance(data.rows, DenseRows):
        return np.asarray(data.rows.values)
    values, indices = np.asarray(data.rows.values), np.asarray(data.rows.indices)
    there = values != 0
    ends = np.concatenate([[0], np.cumsum(there.sum(axis=1))])
    shape = (len(values), data.rows.num_features)
    return scipy.sparse.csr_array((values[there], indices[there], ends), shape=shape)


def _split(features: Any, data: Labelled, order: np.ndarray, num_full: int) -> Rows:
    block, rest = features[:, order[:num_full]], features[:, order[num_full:]]
    if scipy.sparse.issparse(features):
        block, squared = block.toarray(), rest.power(2)
    else:
        squared = rest**2
    block = np.hstack([block, np.ones((len(block), 1))]).astype(np.float32)
    lengths = np.sqrt(np.asarray(data.rows.squared_norms, np.float64) + 1)
    return Rows(block, rest, squared, np.asarray(data.labels), lengths)


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
        self.closure = CLOSURES[type(self.optimizer)](self.optimizer)
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
        return _collected(recorded, subsample_error)

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
