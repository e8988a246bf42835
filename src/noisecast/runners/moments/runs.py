"""Where a closure is rough and examples are few: the optimizer itself, thousands of times at once."""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import count, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from noisecast.compiled import FAST, INLINE, njit, wide_vectors
from noisecast.engines.dense import evaluate, without_learning_rate
from noisecast.optimizers import Optimizer
from noisecast.privacy.counter_noise import exponential
from noisecast.privacy.noise import Purpose, RandomRoot, key_data, key_for
from noisecast.privacy.sampling import FixedSize, Poisson
from noisecast.problems.linear import LOGISTIC, LinearModel
from noisecast.runners.moments.examples import matrix_of
from noisecast.runners.moments.forecast import Forecast
from noisecast.scenario import Scenario

f32 = np.float32

AT_ONCE = 512  # runs: their weights stay in the cache
SIDE_BY_SIDE = 2  # times as many, on as many cores where they are there
A_ROUND = AT_ONCE * SIDE_BY_SIDE  # of runs, after each of which it may be enough
MOST_WORK = 4e9  # about nanoseconds of one core, which each of the following takes
OF_A_STEP, OF_AN_ORDER, OF_A_WEIGHT, OF_AN_EXAMPLE, OF_A_FEATURE, OF_A_LOOK = 2e5, 15.0, 20.0, 10.0, 0.1, 0.5
ROUGH = 0.25  # of a loss, its spread from run to run: of more, closures are up to 6 % off
KNOWN_TO = 0.005, 0.01, 0.02, 0.05  # of itself, the loss (a standard error): no more runs than for the first
KNOWN = KNOWN_TO[-1]  # else the closure's number stays, and is called extrapolated


class _Few(NamedTuple):
    """The examples: rows with a 1 for the bias (n, d), labels 0 or 1 and bounds C/|x| on residuals (n,); float32."""

    rows: np.ndarray
    labels: np.ndarray
    bounds: np.ndarray


class _Seen(NamedTuple):
    """What so many runs are seen to be: metrics by name, (records, runs) each."""

    metrics: dict[str, np.ndarray]

    @property
    def error(self) -> np.ndarray:
        """To how much of itself the mean loss is known, a standard error; (records,)."""
        loss = self.metrics["loss"]
        return loss.std(axis=1) / np.abs(loss.mean(axis=1)) / loss.shape[1] ** 0.5

    @classmethod
    def joined(cls, looks: Iterable["_Seen"]) -> "_Seen":
        every = [one.metrics for one in looks]
        return cls({name: np.concatenate([one[name] for one in every], axis=1) for name in every[0]})


def where_rough(found: Forecast, scenario: Scenario, most_runs: int) -> Forecast:
    """A forecast in which simulated runs take the closure's place where it is rough and they are cheap.

    Rough is a closure that is out of its depth, and one of a loss that differs much from run to run. The runs are
    always the same ones: forecasts are repeatable, and differ between scenarios by no chance of their own.

    Args:
      found: by a closure.   most_runs: at most so many; 0: none.
    """
    loss, spread = found.metrics["loss"], found.metrics.get("loss_std", 0.0)
    rough = np.flatnonzero(found.extrapolated | ~np.isfinite(loss) | (spread > ROUGH * loss))
    record_at = found.steps[rough].tolist()
    rounds = min(most_runs, runs_of(scenario, record_at[-1])) // A_ROUND if record_at else 0
    if not rounds or found.subsample_error:
        return found
    seen = _simulated(scenario, record_at, rounds)
    known = seen.error <= KNOWN  # not where it is no number
    if not known.any():
        return found
    metrics = {name: values.copy() for name, values in found.metrics.items()}
    for name, values in metrics.items():
        of_runs = seen.metrics[name.removesuffix("_std")]
        values[rough[known]] = (of_runs.std(axis=1) if name.endswith("_std") else of_runs.mean(axis=1))[known]
    simulated, extrapolated = np.zeros(len(found.steps), bool), found.extrapolated.copy()
    simulated[rough[known]], extrapolated[rough[known]] = True, False
    last = rough[known][-1]
    sentence = sentence_of(bool(found.extrapolated[last]), float(seen.error[known][-1]))
    reasons = (*(found.reasons if extrapolated.any() else ()), sentence)
    return found._replace(metrics=metrics, extrapolated=extrapolated, simulated=simulated, reasons=reasons)


def sentence_of(is_out_of_depth: bool, error: float) -> str:
    """Of few different ones, so that a grid has few notes.

    >>> sentence_of(True, 0.013)[-70:]
    'by which the mean loss is known to 2 % or better (one standard error).'
    """
    known_to = next(known for known in KNOWN_TO if error <= known)
    differs = "The loss differs much from run to run, and the solver may be some per cent off."
    return (
        f"{'The solver is out of its depth here.' if is_out_of_depth else differs} With so few examples it could be "
        "replaced by a thousand simulated runs of the optimizer and more, by which the mean loss is known to "
        f"{known_to * 100:g} % or better (one standard error)."
    )


def runs_of(scenario: Scenario, num_steps: int) -> int:
    """How many runs of so many steps, seen at their end, are simulated in few seconds; 0 of what is simulated by none.

    By the scenario's numbers alone: not by this machine, and not by what else is looked at.
    """
    problem: Any = scenario.problem
    is_known = isinstance(problem, LinearModel) and problem.likelihood is LOGISTIC
    if not (is_known and isinstance(scenario.mechanism.sampler, Poisson | FixedSize)):
        return 0
    size, width = problem.num_examples, problem.num_params
    tested = 0 if problem.test is None else problem.test.rows.squared_norms.shape[0]
    of_a_step = scenario.mechanism.expected_batch_size * (OF_AN_EXAMPLE + OF_A_FEATURE * width) + OF_A_WEIGHT * width
    of_a_step += (OF_A_STEP + OF_AN_ORDER * size) / AT_ONCE
    of_a_look = (size + tested) * (OF_AN_EXAMPLE + OF_A_LOOK * width)
    return int(MOST_WORK / (num_steps * of_a_step + of_a_look))


def _simulated(scenario: Scenario, record_at: Sequence[int], rounds: int) -> _Seen:
    """Until the loss at the end is known well, and for so many rounds at most."""
    some = partial(_some_runs, scenario, _few(scenario), record_at)
    looks: list[_Seen] = []
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for first in range(0, rounds * SIDE_BY_SIDE, SIDE_BY_SIDE):
            looks += pool.map(some, range(first, first + SIDE_BY_SIDE))
            seen = _Seen.joined(looks)
            if seen.error[-1] <= KNOWN_TO[0]:
                break
    return seen


def _few(scenario: Scenario) -> _Few:
    problem: Any = scenario.problem
    data = problem.train
    features = matrix_of(data, np.arange(len(data.labels)))
    features = features.toarray() if scipy.sparse.issparse(features) else np.asarray(features)
    bounds = scenario.mechanism.l2_clip_norm / np.sqrt(np.asarray(data.rows.squared_norms, np.float64) + 1)
    rows = np.pad(features.astype(f32), ((0, 0), (0, 1)), constant_values=1)
    return _Few(rows, np.asarray(data.labels).astype(f32), bounds.astype(f32))


def _some_runs(scenario: Scenario, few: _Few, record_at: Sequence[int], number: int) -> _Seen:
    """`AT_ONCE` runs, the number-th, seen at such steps. Nobody's privacy rests on noise that stays in a forecast."""
    mechanism, n = scenario.mechanism, len(few.labels)
    key = key_for(Purpose.PATHS, "moments", root=RandomRoot.from_insecure_seed(0), repeat=number)
    random = np.random.default_rng(key_data(key))
    start = np.asarray(scenario.problem.initial_params(), f32)
    weights, sums, noise = (np.empty((AT_ONCE, len(start)), f32) for _ in range(3))
    weights[:] = start
    optimizer, rate = without_learning_rate(scenario.optimizer), f32(scenario.optimizer.learning_rate)
    state, metrics = optimizer.init(jnp.asarray(weights)), []
    clip = jnp.array([mechanism.l2_clip_norm], jnp.float32)
    for begin, end in pairwise([0, *record_at]):
        for step in range(begin, end):
            batches = _batches(mechanism.sampler, n, random)
            _clipped_sums(weights, *few, *batches, sums, np.empty(n, np.int64), np.empty(n, f32))
            random.standard_normal(out=noise, dtype=f32)
            sums += noise * f32(mechanism.noise_std)
            direction, state = _direction(optimizer, sums / f32(mechanism.expected_batch_size), state, step)
            weights -= rate * np.asarray(direction)
        metrics.append(evaluate(scenario.problem, jnp.asarray(weights[:, None]), clip))
    return _Seen({name: np.stack([seen[name][:, 0] for seen in metrics]) for name in metrics[0]})


class _Batches(NamedTuple):
    """Of each run `size` examples of one random order, at the places place + k stride modulo a prime, k = 1, 2, ...

    A random order makes of any places a uniform batch. That each run has places of its own, of which every pair is as
    likely as any other, makes batches of two runs independent as far as pairs of examples tell.

    Args:
      order: (n,).   prime: the first one not below n; places from n on are passed over.
      place, stride, size: (AT_ONCE,) each.
    """

    order: np.ndarray
    prime: int
    place: np.ndarray
    stride: np.ndarray
    size: np.ndarray


def _batches(sampler: Any, num_examples: int, random: np.random.Generator) -> _Batches:
    prime = _prime_from(num_examples)
    if isinstance(sampler, Poisson):
        size = random.binomial(num_examples, sampler.sampling_probability, AT_ONCE)
    else:
        size = np.full(AT_ONCE, sampler.batch_size)
    order, place = random.permutation(num_examples), random.integers(0, prime, AT_ONCE)
    return _Batches(order, prime, place, random.integers(1, prime, AT_ONCE), size)


@cache
def _prime_from(number: int) -> int:
    """The smallest prime that is not smaller.

    >>> [_prime_from(number) for number in (1, 2, 9, 360)]
    [2, 2, 11, 367]
    """
    primes = (one for one in count(max(number, 2)) if all(one % by for by in range(2, math.isqrt(one) + 1)))
    return next(primes)


@partial(jax.jit, static_argnames="optimizer")
def _direction(optimizer: Optimizer, gradient: Any, state: Any, step: Any) -> Any:
    return optimizer.direction(gradient, state, step)


@njit(**INLINE)
def _next(at, stride, prime):
    at += stride
    return at - prime if at >= prime else at


@njit(**FAST | {"fastmath": {*FAST["fastmath"], "reassoc"}})
def _clipped_sums(weights, rows, labels, bounds, order, prime, place, stride, size, sums, batch, residuals):
    """sums[r] = sum_i clip(sigma(x_i w_r) - y_i, +-C/|x_i|) x_i, i in the batch of run r; batch, residuals: scratch."""
    wide_vectors()
    width = rows.shape[1]
    for run in range(len(weights)):
        w, total, at = weights[run], sums[run], place[run]
        for k in range(size[run]):
            at = _next(at, stride[run], prime)
            while at >= len(order):
                at = _next(at, stride[run], prime)
            batch[k] = order[at]
            x, z = rows[batch[k]], f32(0.0)
            for c in range(width):
                z += w[c] * x[c]
            residuals[k] = z
        for k in range(size[run]):
            bound = bounds[batch[k]]
            residual = f32(1.0) / (f32(1.0) + exponential(-residuals[k])) - labels[batch[k]]
            residuals[k] = min(max(residual, -bound), bound)
        for c in range(width):
            total[c] = f32(0.0)
        for k in range(size[run]):
            x, residual = rows[batch[k]], residuals[k]
            for c in range(width):
                total[c] += residual * x[c]
