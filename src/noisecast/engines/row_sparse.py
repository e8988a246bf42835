"""The row-sparse engine: models whose examples touch few rows, in Numba, with lazy noise; the dense engine's law."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from noisecast.compiled import aligned, aligned_zeros
from noisecast.engines import _kernels
from noisecast.engines.dense import DRAWS_PER_CHUNK, check_horizon
from noisecast.engines.keys import batch_key
from noisecast.engines.row_sparse_forms import COMPILED, Form, form_of
from noisecast.engines.row_sparse_lanes import cipher_states, lanes_of, one_lane, scratch_of
from noisecast.optimizers import DPAdam, DPSignSGD
from noisecast.privacy.drawing import STEPS_PER_BLOCK
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.matrix_factorization import MatrixFactorization
from noisecast.scenario import Scenario

FINEST = 10  # spacings of float32 weights in a step of DP-SGD, for each number that a record moves (their root)
STEPS_PER_CHUNK = 4096  # batches drawn at once, if they are small: long beside a call
LANES_OF_A_BLOCK = 64  # many enough to share what a batch costs, few enough for the cache, and for threads to share out
MOST_NUMBERS = 2**34  # a block of four words has a number of 32 bits
ALONE = LANES_OF_A_BLOCK  # columns of a run that shares its block with no other


def why_unsupported(scenario: Scenario) -> str | None:
    """None, or the sentence that says why another engine computes this scenario."""
    problem, mechanism = scenario.problem, scenario.mechanism
    form = form_of(problem)
    if isinstance(form, str):
        return form
    if type(scenario.optimizer) not in COMPILED:
        return f"There is no row-sparse form of {scenario.optimizer.name}."
    if problem.num_params > MOST_NUMBERS:
        return f"{problem.name} has more than 2^34 parameters, whose noise could not be told apart."
    if mechanism.noise_multiplier == 0:
        return "Without noise there is nothing to postpone."
    if mechanism.sampling_probability is None:
        return f"{problem.name} is a data set, not a stream; use the sampler Poisson, FixedSize or Shuffled."
    return None


def why_not_for_release(scenario: Scenario) -> str | None:
    """None, or the sentence that says why the guarantee would not hold. Public numbers decide.

    DP-SGD's clipped gradients are added to float32 weights, and rounded to their spacing, before their noise is, which
    waits. Where steps are hardly longer than the spacing, one record moves the weights by more than is accounted for:
    by up to 1.5 % at FINEST, as measured in `tests/trust/test_sensitivity.py`, by 2 to 15 % at a tenth of that.
    Steps of DP-SignSGD are counted afterwards, and must not be lost among the weights' own spacings.
    """
    problem, mechanism, optimizer = scenario.problem, scenario.mechanism, scenario.optimizer
    if type(optimizer) is DPAdam:  # whose noise is in the sum that is rounded
        return None
    largest = float(np.abs(np.asarray(problem.initial_params(), np.float32)).max())
    if type(optimizer) is DPSignSGD:
        return _why_steps_are_lost(optimizer.learning_rate * min(scenario.schedule.factors), largest)
    moved = 2 * problem.dim if isinstance(problem, MatrixFactorization) else problem.num_params
    finest = FINEST * float(np.spacing(np.float32(largest))) * moved**0.5
    lowest = optimizer.learning_rate * min(scenario.schedule.factors)
    step = lowest * mechanism.l2_clip_norm / mechanism.expected_batch_size
    if step >= finest:
        return None
    return (
        f"Expected learning_rate * l2_clip_norm / batch size >= {finest:.2g} for weights that start as large as "
        f"{largest:.2g}, got {step:.2g}: float32 rounds such steps before noise hides them, so that a record could "
        "move the model by more than epsilon says. Use a larger learning rate or clip norm."
    )


def _why_steps_are_lost(lowest: float, largest: float) -> str | None:
    if lowest >= (finest := FINEST * float(np.spacing(np.float32(largest)))):
        return None
    return (
        f"Expected a learning_rate of DP-SignSGD >= {finest:.2g} for weights that start as large as {largest:.2g}, got "
        f"{lowest:.2g}: float32 loses such steps, and which were lost tells what was touched. Use a larger learning "
        "rate."
    )


def runs_of_a_call(scenario: Scenario) -> tuple[int, int]:
    """One block: scenarios share a repeat's batches, repeats share nothing."""
    form: Any = form_of(scenario.problem)
    return max(1, LANES_OF_A_BLOCK // form.columns), 1


class RowSparseRun:
    """A group of scenarios at several repeats, in training; see `dense.DenseRun`, whose interface this is.

    Each repeat has its own batches; its scenarios lie side by side in lanes, in blocks that the cache holds. Blocks run
    on threads of their own, without the interpreter's lock.
    """

    def __init__(self, scenarios: Sequence[Scenario], *, repeats: Sequence[int], root: RandomRoot):
        self.problem: Any = scenarios[0].problem
        self.step = 0
        self._first = scenarios[0]
        form: Any = form_of(self.problem)
        train, test = (data and form.examples(data) for data in (self.problem.train, self.problem.test))
        self._num_repeats = len(repeats)
        # How many blocks depends on the group alone, not on this machine: a checkpoint may be continued on another.
        count = -(-len(scenarios) * form.columns // LANES_OF_A_BLOCK)
        parts = [part.tolist() for part in np.array_split(np.arange(len(scenarios)), min(count, len(scenarios)))]
        self._blocks = [
            _Block([scenarios[i] for i in part], form, train, test, root=root, repeat=repeat)
            for repeat in repeats
            for part in parts
        ]

    def advance(self, to_step: int) -> None:
        """Take steps until `to_step` of them have been taken. Raises: ValueError behind `step`, or beyond num_steps."""
        check_horizon(to_step, self.step, self._first)
        self._each(lambda block: block.advance(self.step, to_step))
        self.step = to_step

    def block_until_ready(self) -> None:
        """Nothing to wait for: `advance` returns when its steps are taken."""

    def evaluate(self) -> dict[str, np.ndarray]:
        """Every metric of the problem at the current parameters; (repeats, scenarios) each. Non-private."""
        found = self._each(lambda block: block.evaluate(self.step))
        return {name: self._by_repeat([metrics[name] for metrics in found]) for name in found[0]}

    @property
    def params(self) -> np.ndarray:
        """Parameters after `step` steps; (repeats, scenarios, d) float32."""
        return self._by_repeat(self._each(lambda block: block.params(self.step)))

    def state(self) -> dict[str, np.ndarray]:
        """Everything needed to go on from here, postponed noise included; not for release."""
        arrays = {"step": np.asarray(self.step)}
        for number, block in enumerate(self._blocks):
            arrays |= {f"{name}_{number}": array.copy() for name, array in block.arrays().items()}
        return arrays

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Continue from a `state()` of a run with the same scenarios, repeats and root."""
        for number, block in enumerate(self._blocks):
            for name, array in block.arrays().items():
                saved = state.get(f"{name}_{number}")
                fits = saved is not None and saved.shape == array.shape and saved.dtype == array.dtype
                if saved is None or not fits or not np.isfinite(saved).all():
                    raise ValueError(
                        f"Expected a saved state of finite numbers with {name}, {array.dtype} {array.shape}; "
                        "delete the checkpoint to start anew."
                    )
                array[:] = saved
            block.forget()
        self.step = int(state["step"])

    def _each(self, work: Callable[["_Block"], Any]) -> list[Any]:
        if len(self._blocks) == 1:
            return [work(self._blocks[0])]
        with ThreadPoolExecutor(min(len(self._blocks), os.cpu_count() or 1)) as pool:
            return list(pool.map(work, self._blocks))

    def _by_repeat(self, found: list[np.ndarray]) -> np.ndarray:
        """Arrays of blocks, (their scenarios, ...) each, as (repeats, scenarios, ...)."""
        each = len(found) // self._num_repeats
        return np.stack([np.concatenate(found[i : i + each]) for i in range(0, len(found), each)])


@dataclass
class _LazyWeights:
    """Weights whose rows may lack noise. To look, ask `flushed`, which gives it; `arrays` is for checkpoints."""

    _weights: np.ndarray  # (rows, lanes) float32
    _last: np.ndarray  # (rows,) steps whose noise each row has
    _flush: Callable[..., None] | None

    def flushed(self, step: int, lanes: _kernels.Lanes, scratch: _kernels.Scratch) -> np.ndarray:
        """The weights after `step` steps; (rows, lanes)."""
        if self._flush is not None:
            self._flush(self._weights, self._last, lanes, step, scratch)
        return self._weights

    def steps(self, kernel: Callable[..., None], *arguments: Any) -> None:
        kernel(self._weights, self._last, *arguments)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"weights": self._weights, "last": self._last}


class _Block:
    """Runs of one group at one repeat, side by side."""

    def __init__(self, scenarios: Sequence[Scenario], form: Form, train, test, *, root: RandomRoot, repeat: int):
        first = scenarios[0]
        self._optimizer, self._mechanism, self._schedule = first.optimizer, first.mechanism, first.schedule
        self._form, self._train, self._test = form, train, test
        self._kernels = COMPILED[type(first.optimizer)]
        self._num_runs = len(scenarios)
        self._batch_key = batch_key(first, root=root, repeat=repeat)
        self._lanes = lanes_of(scenarios, form.columns, root, repeat)
        self._start = np.asarray(first.problem.initial_params(), np.float32).reshape(-1, form.columns)
        weights = aligned(np.tile(self._start, len(scenarios)))
        # Of a schedule: where the phase began. Of one rate: the start, which the problem tells.
        self._base = weights.copy() if self._counts_steps and len(self._schedule.factors) > 1 else None
        rows, lanes = weights.shape
        self._weights = _LazyWeights(weights, np.zeros(rows, np.int32), self._kernels.flush)
        self._memory = [aligned_zeros((rows, lanes)) for _ in range(self._kernels.num_moments)]
        self._cipher = cipher_states(scenarios, self._lanes, root, repeat)
        self._scratch = scratch_of(rows, self._lanes.lane, int(first.mechanism.expected_batch_size) + 64, self._cipher)
        # The width decides, not how many runs there are: a run's noise must not depend on its neighbours.
        wide = self._kernels.wide_steps if form.columns >= ALONE else None
        self._steps = wide or self._kernels.steps
        assert not wide or len(scenarios) == 1  # two would have the noise of one
        self._one_lane = one_lane(first, self._cipher, root, repeat) if wide else ()

    def advance(self, step: int, to_step: int) -> None:
        for begin, stop, ends_phase in self._schedule.stretches(step, to_step):
            self._advance(begin, stop, self._lanes_at(begin))
            if ends_phase:  # what was postponed is of this phase's rate
                weights = self._weights.flushed(stop, self._lanes_at(begin), self._scratch)
                if self._base is not None:
                    self._base[:] = weights[:] = self._whole_steps(weights, begin)

    def _lanes_at(self, step: int) -> _kernels.Lanes:
        """With the learning rates of that step."""
        changed = np.float32(self._schedule.at(step))
        rates = ("learning_rate", "step_size", "step_noise")
        return self._lanes._replace(**{name: aligned(getattr(self._lanes, name) * changed) for name in rates})

    def _advance(self, step: int, to_step: int, lanes: _kernels.Lanes) -> None:
        sampler: Any = self._mechanism.sampler
        at_once = max(1, min(STEPS_PER_CHUNK, DRAWS_PER_CHUNK // (int(self._mechanism.expected_batch_size) + 64)))
        at_once -= at_once % STEPS_PER_BLOCK if at_once > STEPS_PER_BLOCK else 0  # no block is drawn for two chunks
        while step < to_step:
            stop = min(to_step, step - step % at_once + at_once)
            drawn = sampler.batches(self._batch_key, step, stop, len(self._train.labels))
            batches, sizes = _packed(drawn.indices, drawn.mask)
            if batches.shape[1] > len(self._scratch.coefficients):
                rows, width = len(self._scratch.stamp), batches.shape[1]
                self._scratch = scratch_of(rows, lanes.lane, width, self._cipher)
            self._weights.steps(
                self._steps, *self._memory, self._train, batches, sizes, lanes, self._form.columns,
                *self._kernels.settings(self._optimizer, self._mechanism), *self._one_lane, step, self._scratch,
            )  # fmt: skip
            step = stop

    @property
    def _counts_steps(self) -> bool:
        return isinstance(self._optimizer, DPSignSGD)

    def _whole_steps(self, weights: np.ndarray, step: int) -> np.ndarray:
        """DP-SignSGD's weights as base + a whole number of steps of the phase that `step` is in.

        A row that was touched is a sum of steps, each rounded, and one that was not a product: of their last bits an
        attacker would read which rows had examples. Of the number of steps alone both are made alike.
        """
        rate = self._lanes_at(step).learning_rate
        base = np.tile(self._start, self._num_runs) if self._base is None else self._base
        return base + np.rint((weights - base) / rate) * rate

    def params(self, step: int) -> np.ndarray:
        """(scenarios, d): each run's weights in the problem's own order."""
        weights = self._weights.flushed(step, self._lanes_at(step), self._scratch)
        if self._counts_steps:
            weights = self._whole_steps(weights, step)
        by_run = weights.reshape(len(weights), self._num_runs, self._form.columns)
        return np.moveaxis(by_run, 1, 0).reshape(self._num_runs, -1).copy()

    def evaluate(self, step: int) -> dict[str, np.ndarray]:
        weights = self._weights.flushed(step, self._lanes_at(step), self._scratch)
        gradient = np.zeros_like(weights)
        loss, scores, clipped = self._sums(weights, self._train, gradient)
        n = len(self._train.labels)
        metrics = {
            "loss": loss / n,
            **self._form.metrics(scores.T / n),
            "gradient_norm": self._norms(gradient) / n,
            "clip_fraction": clipped / n,
        }
        if self._test is not None:
            loss, scores, _ = self._sums(weights, self._test, gradient[:0])
            n = len(self._test.labels)
            found = {"loss": loss / n, **self._form.metrics(scores.T / n)}
            metrics |= {f"test_{name}": value for name, value in found.items()}
        return metrics | {"params_norm": self._norms(weights)}

    def _norms(self, table: np.ndarray) -> np.ndarray:
        """Of each run's part of (rows, lanes), summed in float64 without a copy that is as wide."""
        squares = np.einsum("rl,rl->l", table, table, dtype=np.float64)
        return np.sqrt(squares.reshape(self._num_runs, self._form.columns).sum(axis=1))

    def forget(self) -> None:
        """Drop what the scratch remembers of steps that, after a restore, may be taken again."""
        self._scratch.stamp[:] = 0

    def arrays(self) -> dict[str, np.ndarray]:
        found = self._weights.arrays() | {f"average_{i}": memory for i, memory in enumerate(self._memory)}
        return found if self._base is None else found | {"base": self._base}

    def _sums(self, weights: np.ndarray, examples, gradient: np.ndarray) -> list[np.ndarray]:
        runs = self._num_runs
        sums = [np.zeros(runs), np.zeros((runs, self._form.num_scores)), np.zeros(runs)]
        self._form.evaluate(weights, examples, self._lanes, self._form.columns, gradient, *sums)
        return sums


def _packed(indices: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers with those that are there in front, and how many those are."""
    if (mask[:, :-1] >= mask[:, 1:]).all():  # as most samplers have it
        return indices.astype(np.int64), mask.sum(axis=1)
    order = np.argsort(~mask, axis=1, kind="stable")
    return np.take_along_axis(indices, order, axis=1).astype(np.int64), mask.sum(axis=1)
