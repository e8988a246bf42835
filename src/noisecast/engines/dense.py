"""The dense engine: any problem, in JAX. One compiled loop over steps, mapped over scenarios and repeats."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noisecast.engines.keys import batch_key, example_key, noise_key
from noisecast.optimizers import DPSGD, Optimizer, with_learning_rate
from noisecast.privacy.jax_noise import counter_keys, private_mean, standard_normal
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.problem import Problem
from noisecast.scenario import Scenario

Array = jax.Array

NUMBERS_OF_A_CALL = 2**24  # parameters of all runs of a call: 64 MiB an array
DRAWS_PER_CHUNK = 2**22  # row numbers, or numbers of secure noise, held at once: 16 MiB
FARTHEST = 6  # standard deviations
WIDE_VECTORS = {"xla_cpu_prefer_vector_width": 512}  # XLA takes half of AVX-512 otherwise; nothing elsewhere


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["learning_rate", "l2_clip_norm", "noise_std"],
    meta_fields=["optimizer", "expected_batch_size"],
)
@dataclass(frozen=True)
class Group:
    """Scenarios that share one compiled step: one problem, sampler and kind of optimizer; these numbers differ, (R,).

    All of them are read off the scenarios' own frozen mechanisms, the objects that accounting sees.
    """

    learning_rate: Array
    l2_clip_norm: Array
    noise_std: Array
    optimizer: Optimizer
    expected_batch_size: float


def group_key(scenario: Scenario) -> tuple:
    """Scenarios with equal keys may be run in one group."""
    optimizer = scenario.optimizer
    settings = tuple((k, v) for k, v in vars(optimizer).items() if k != "learning_rate")
    how = scenario.mechanism.sampler, scenario.num_steps, scenario.schedule
    return (scenario.problem.fingerprint, type(optimizer), settings, *how)


def why_unsupported(scenario: Scenario) -> str | None:
    """None, or the sentence that says why this scenario cannot be trained."""
    population = scenario.problem.num_examples is None
    stream = scenario.mechanism.sampling_probability is None
    if population and not stream:
        return (
            f"{scenario.problem.name} draws fresh examples at every step and has no rows to sample from; "
            f"use the sampler Stream(batch_size), got {scenario.mechanism.sampler}."
        )
    if stream and not population:
        return f"{scenario.problem.name} is a data set, not a stream; use the sampler Poisson, FixedSize or Shuffled."
    return _why_beyond_float32(scenario)


def _why_beyond_float32(scenario: Scenario) -> str | None:
    """Public numbers alone say that its weights would be no numbers, or never move: before a budget is spent on it."""
    optimizer, mechanism, factors = scenario.optimizer, scenario.mechanism, scenario.schedule.factors
    smallest, largest = (float(each) for each in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    settings = {"learning_rate": [optimizer.learning_rate * factor for factor in (min(factors), max(factors))]}
    if (eps := getattr(optimizer, "eps", None)) is not None:
        settings["eps"] = [eps]
    for name, values in settings.items():
        for value in values:
            if not smallest <= value <= largest:
                return f"Expected {smallest:.2g} <= {name} <= {largest:.2g}, which float32 holds, got {value:.3g}."
    each = mechanism.mean_noise_std if isinstance(optimizer, DPSGD) else 1.0  # others' directions are about 1
    # Of many weights one goes several standard deviations.
    if max(settings["learning_rate"]) * FARTHEST * each * scenario.num_steps**0.5 > largest:
        return (
            f"Expected a learning_rate below {optimizer.learning_rate:.3g}: privacy noise alone would carry the "
            f"weights beyond {largest:.2g}, float32's largest number; use a smaller one, or a smaller l2_clip_norm."
        )
    return None


def check_horizon(to_step: int, step: int, scenario: Scenario) -> None:
    """Raises: ValueError for steps behind the one reached, or beyond those that the scenario's epsilon counts."""
    last = scenario.num_steps
    if to_step != int(to_step) or to_step < step:
        raise ValueError(f"Expected a step from {step}, which is reached, up to num_steps, {last}; got {to_step}.")
    if to_step > last:
        raise ValueError(f"Expected a step up to num_steps, {last}, which epsilon counts; got {to_step}.")


def without_learning_rate(optimizer: Optimizer) -> Optimizer:
    """Its settings alone: the learning rate differs within a group, and must not ask for a new compilation."""
    return with_learning_rate(optimizer, 1.0)


def runs_of_a_call(scenario: Scenario) -> tuple[int, int]:
    """As many as fit: runs lie side by side, whatever their repeat."""
    runs = max(1, NUMBERS_OF_A_CALL // scenario.problem.num_params)
    return min(runs, 64), max(1, runs // 64)


class DenseRun:
    """A group of scenarios at several repeats, in training: `advance` it to a step, then look.

    Runs lie as [repeat, scenario]. Repeats differ in everything random; scenarios at one repeat share their batches and
    nothing else: each has a privacy-noise key of its own, made from its content hash, so a run's noise does not depend
    on the group it is in. The state after step k is a function of the keys, k and the last bits in which programs of
    another shape round: a restored run continues bit for bit, one in another group agrees to float32.
    """

    def __init__(self, scenarios: Sequence[Scenario], *, repeats: Sequence[int], root: RandomRoot):
        first = scenarios[0]
        self.problem: Problem = first.problem
        self.sampler: Any = first.mechanism.sampler  # one with `batches`, unless the problem is a population
        self.step = 0
        self._first = first
        self._group = Group(
            learning_rate=jnp.array([s.optimizer.learning_rate for s in scenarios], jnp.float32),
            l2_clip_norm=jnp.array([s.mechanism.l2_clip_norm for s in scenarios], jnp.float32),
            noise_std=jnp.array([s.mechanism.noise_std for s in scenarios], jnp.float32),
            optimizer=without_learning_rate(first.optimizer),
            expected_batch_size=first.mechanism.expected_batch_size,
        )
        self._batch_keys = [batch_key(first, root=root, repeat=r) for r in repeats]
        self._example_keys = counter_keys([example_key(first, root=root, repeat=r) for r in repeats])
        noise_keys = [noise_key(scenario, root=root, repeat=r) for r in repeats for scenario in scenarios]
        self._noise_keys = counter_keys(noise_keys).reshape(len(repeats), len(scenarios), 2)
        self._secure = _SecureNoise(noise_keys, self.problem.num_params) if root.secure_noise else None
        start = jnp.asarray(self.problem.initial_params(), jnp.float32)
        shape = (len(repeats), len(scenarios), self.problem.num_params)
        self._params = jnp.broadcast_to(start, shape)
        self._state = first.optimizer.init(self._params)
        self._chunk: tuple[int, tuple[Array, Array]] | None = None

    def advance(self, to_step: int) -> None:
        """Take steps until `to_step` of them have been taken. Raises: ValueError behind `step`, or beyond num_steps."""
        check_horizon(to_step, self.step, self._first)
        for step, stop, _ in self._first.schedule.stretches(self.step, to_step):
            rates = self._group.learning_rate * self._first.schedule.at(step)
            self._advance(stop, replace(self._group, learning_rate=rates))

    def _advance(self, to_step: int, group: Group) -> None:
        while self.step < to_step:
            first, stop, batches = self._batches(self.step, to_step)
            normals, normals_from = None, 0
            if self._secure is not None:
                normals_from, stop, normals = self._secure.chunk(self.step, stop)
                normals = normals.reshape(len(normals), *self._params.shape)
            self._params, self._state = _advance(
                self.problem, group, self._params, self._state, self._noise_keys, self._example_keys,
                batches, first, normals, normals_from, self.step, stop,
            )  # fmt: skip
            self.step = stop

    def block_until_ready(self) -> None:
        """Wait until the steps asked for are taken: JAX computes behind the caller's back."""
        jax.block_until_ready(self._params)

    def evaluate(self) -> dict[str, np.ndarray]:
        """Every metric of the problem at the current parameters; (repeats, scenarios) each. Non-private."""
        return evaluate(self.problem, self._params, self._group.l2_clip_norm)

    @property
    def params(self) -> np.ndarray:
        """Parameters after `step` steps; (repeats, scenarios, d) float32."""
        return np.asarray(self._params)

    def state(self) -> dict[str, np.ndarray]:
        """Everything needed to go on from here, as arrays (keys excepted: they are remade from the root)."""
        leaves = jax.tree.leaves((self._params, self._state))
        arrays = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        return arrays | {"step": np.asarray(self.step)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Continue from a `state()` of a run with the same scenarios, repeats and root."""
        leaves, structure = jax.tree.flatten((self._params, self._state))
        arrays = [state.get(f"leaf_{i}", np.zeros(0)) for i in range(len(leaves))]
        for old, new in zip(leaves, arrays, strict=True):
            if old.shape != new.shape or old.dtype != new.dtype or not np.isfinite(new).all():
                raise ValueError(
                    f"Expected a saved state of finite numbers, {old.dtype} {old.shape}, got {new.dtype} {new.shape}; "
                    "delete the checkpoint to start anew."
                )
        self._params, self._state = jax.tree.unflatten(structure, [jnp.asarray(array) for array in arrays])
        self.step = int(state["step"])

    def _batches(self, step: int, to_step: int) -> tuple[int, int, tuple[Array, Array] | None]:
        """A chunk of steps that holds `step`: its first step, where to stop, rows and mask (repeats, steps, width)."""
        if self.problem.num_examples is None:  # a population draws its examples inside the step, from the example keys
            return step, to_step, None
        steps = max(1, DRAWS_PER_CHUNK // (len(self._batch_keys) * (int(self._group.expected_batch_size) + 64)))
        first = step - step % steps
        if self._chunk is None or self._chunk[0] != first:
            drawn = [self.sampler.batches(k, first, first + steps, self.problem.num_examples) for k in self._batch_keys]
            width = max(batches.indices.shape[1] for batches in drawn)
            indices = jnp.asarray(np.stack([_padded(batches.indices, width) for batches in drawn]))
            mask = jnp.asarray(np.stack([_padded(batches.mask, width) for batches in drawn]))
            self._chunk = first, (indices, mask)
        return first, min(to_step, first + steps), self._chunk[1]


class _SecureNoise:
    """Noise from a cipher, drawn outside the compiled loop, a few steps at a time: slower, and in need of memory."""

    def __init__(self, keys: Sequence[bytes], num_params: int):
        self._keys, self._num_params = keys, num_params
        self._steps = max(1, DRAWS_PER_CHUNK // (len(keys) * num_params))
        self._drawn: tuple[int, np.ndarray] | None = None

    def chunk(self, step: int, to_step: int) -> tuple[int, int, np.ndarray]:
        """The chunk that holds `step`: its first step, where to stop, N(0, 1) numbers (steps, runs, d)."""
        from noisecast.privacy.secure_noise import standard_normals

        first = step - step % self._steps
        if self._drawn is None or self._drawn[0] != first:
            self._drawn = first, standard_normals(self._keys, first, self._steps, self._num_params)
        return first, min(to_step, first + self._steps), self._drawn[1]


def _padded(array: np.ndarray, width: int) -> np.ndarray:
    return np.pad(array, ((0, 0), (0, width - array.shape[1])))


@partial(jax.jit, donate_argnames=("params", "state"), compiler_options=WIDE_VECTORS)
def _advance(
    problem, group, params, state, noise_keys, example_keys, batches, first, secure_normals, secure_first, begin, stop
):
    """Steps begin .. stop - 1 of every run; `batches` holds those from `first` on, `secure_normals` their noise."""

    def one_scenario(learning_rate, l2_clip_norm, noise_std, noise_key, drawn, params, state, examples, step):
        clipped_sum = problem.clipped_sum(params, examples, l2_clip_norm)
        normals = standard_normal(noise_key, step, params.shape) if drawn is None else drawn
        gradient = private_mean(
            clipped_sum, normals, noise_std=noise_std, expected_batch_size=group.expected_batch_size
        )
        direction, state = group.optimizer.direction(gradient, state, step)
        return params - learning_rate * direction, state

    def one_repeat(batch, example_key, noise_keys, drawn, params, state, step):
        if batch is None:
            batch = (example_key, step), jnp.ones(int(group.expected_batch_size), bool)
        examples = problem.examples(*batch)
        scenarios = jax.vmap(one_scenario, in_axes=(0, 0, 0, 0, 0, 0, 0, None, None))
        return scenarios(
            group.learning_rate, group.l2_clip_norm, group.noise_std, noise_keys, drawn, params, state, examples, step
        )

    def one_step(step, carry):
        params, state = carry
        batch = jax.tree.map(lambda array: array[:, step - first], batches)
        drawn = None if secure_normals is None else secure_normals[step - secure_first]
        repeats = jax.vmap(one_repeat, in_axes=(0, 0, 0, 0, 0, 0, None))
        return repeats(batch, example_keys, noise_keys, drawn, params, state, step)

    return jax.lax.fori_loop(begin, stop, one_step, (params, state))


def evaluate(problem: Problem, params: Array, l2_clip_norm: Array) -> dict[str, np.ndarray]:
    """Metrics of many runs: params (repeats, scenarios, d), clip norms (scenarios,) -> (repeats, scenarios) each."""
    return {name: np.asarray(value, np.float64) for name, value in _evaluate(problem, params, l2_clip_norm).items()}


@jax.jit
def _evaluate(problem, params, l2_clip_norm):
    def one(run):
        at, clip = run
        return problem.evaluate(at, clip) | {"params_norm": jnp.linalg.norm(at)}

    repeats, scenarios, _ = params.shape
    runs = params.reshape(repeats * scenarios, -1), jnp.tile(l2_clip_norm, repeats)
    # One at a time on a data set, whose rows fill memory; many at a time where a run is a few numbers.
    metrics = jax.lax.map(one, runs, batch_size=1 if problem.num_examples is not None else min(len(runs[1]), 256))
    return jax.tree.map(lambda value: value.reshape(repeats, scenarios), metrics)
