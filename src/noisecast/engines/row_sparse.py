"""The row-sparse engine: linear models on sparse rows, in Numba, with lazy noise; the dense engine's law."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from noisecast.engines import _kernels
from noisecast.engines.keys import batch_key, noise_key
from noisecast.optimizers import DPSGD, DPAdam, DPSignSGD
from noisecast.privacy.noise import RandomRoot, key_words
from noisecast.problems.linear import Labelled, LinearModel
from noisecast.problems.rows import SparseRows
from noisecast.scenario import Scenario

STEPS_PER_CHUNK = 4096  # batches drawn at once: small beside the data, long beside a call


def why_unsupported(scenario: Scenario) -> str | None:
    """None, or the sentence that says why another engine computes this scenario."""
    problem, mechanism = scenario.problem, scenario.mechanism
    if not isinstance(problem, LinearModel) or not isinstance(problem.train.rows, SparseRows):
        return f"{problem.name} is not a linear model on sparse rows, so a step touches most of its parameters."
    if type(scenario.optimizer) not in _OPTIMIZERS:
        return f"There is no row-sparse form of {scenario.optimizer.name}."
    if mechanism.noise_multiplier == 0:
        return "Without noise there is nothing to postpone."
    if mechanism.sampling_probability is None:
        return f"{problem.name} is a data set, not a stream; use the sampler Poisson, FixedSize or Shuffled."
    return None


class RowSparseRun:
    """A group of scenarios at several repeats, in training; see `dense.DenseRun`, whose interface this is.

    Each repeat has its own batches and its own copy of everything; its scenarios lie side by side in lanes. Repeats run
    on threads of their own, without the interpreter's lock.
    """

    def __init__(self, scenarios: Sequence[Scenario], *, repeats: Sequence[int], root: RandomRoot):
        self.problem: Any = scenarios[0].problem
        self.step = 0
        train = _examples(self.problem.train)
        test = None if self.problem.test is None else _examples(self.problem.test)
        self._repeats = [_Repeat(scenarios, train, test, root=root, repeat=repeat) for repeat in repeats]

    def advance(self, to_step: int) -> None:
        """Take steps until `to_step` of them have been taken."""
        self._each(lambda repeat: repeat.advance(self.step, to_step))
        self.step = max(self.step, to_step)

    def block_until_ready(self) -> None:
        """Nothing to wait for: `advance` returns when its steps are taken."""

    def evaluate(self) -> dict[str, np.ndarray]:
        """Every metric of the problem at the current parameters; (repeats, scenarios) each. Non-private."""
        found = self._each(lambda repeat: repeat.evaluate(self.step))
        return {name: np.stack([metrics[name] for metrics in found]) for name in found[0]}

    @property
    def params(self) -> np.ndarray:
        """Parameters after `step` steps; (repeats, scenarios, d) float32."""
        return np.stack(self._each(lambda repeat: repeat.params(self.step)))

    def state(self) -> dict[str, np.ndarray]:
        """Everything needed to go on from here, postponed noise included; not for release."""
        arrays = {"step": np.asarray(self.step)}
        for number, repeat in enumerate(self._repeats):
            arrays |= {f"{name}_{number}": array.copy() for name, array in repeat.arrays().items()}
        return arrays

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Continue from a `state()` of a run with the same scenarios, repeats and root."""
        for number, repeat in enumerate(self._repeats):
            for name, array in repeat.arrays().items():
                saved = state.get(f"{name}_{number}")
                fits = saved is not None and saved.shape == array.shape and saved.dtype == array.dtype
                if saved is None or not fits or not np.isfinite(saved).all():
                    raise ValueError(
                        f"Expected a saved state of finite numbers with {name}, {array.dtype} {array.shape}; "
                        "delete the checkpoint to start anew."
                    )
                array[:] = saved
            repeat.forget()
        self.step = int(state["step"])

    def _each(self, work: Callable[["_Repeat"], Any]) -> list[Any]:
        if len(self._repeats) == 1:
            return [work(self._repeats[0])]
        with ThreadPoolExecutor(min(len(self._repeats), os.cpu_count() or 1)) as pool:
            return list(pool.map(work, self._repeats))


@dataclass
class _LazyWeights:
    """Weights whose rows may lack noise. There is no way to them but `flushed`, which gives it first."""

    _weights: np.ndarray  # (rows, lanes) float32
    _last: np.ndarray  # (rows,) steps each row has had
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


class _Repeat:
    """The runs of one group at one repeat."""

    def __init__(self, scenarios: Sequence[Scenario], train, test, *, root: RandomRoot, repeat: int):
        first = scenarios[0]
        self._optimizer, self._mechanism = first.optimizer, first.mechanism
        self._train, self._test = train, test
        problem: Any = first.problem
        self._num_runs, self._outputs = len(scenarios), problem.num_outputs
        self._batch_key = batch_key(first, root=root, repeat=repeat)
        self._lanes = _lanes(scenarios, self._outputs, root, repeat)
        rows, lanes = problem.num_features + 1, len(scenarios) * self._outputs
        self._kernels = _OPTIMIZERS[type(first.optimizer)]
        self._weights = _LazyWeights(np.zeros((rows, lanes), np.float32), np.zeros(rows, np.int32), self._kernels.flush)
        self._memory = [np.zeros((rows, lanes), np.float32) for _ in range(self._kernels.num_moments)]
        self._scratch = _scratch(rows, lanes, int(first.mechanism.expected_batch_size) + 64)

    def advance(self, step: int, to_step: int) -> None:
        sampler: Any = self._mechanism.sampler
        while step < to_step:
            stop = min(to_step, step - step % STEPS_PER_CHUNK + STEPS_PER_CHUNK)
            drawn = sampler.batches(self._batch_key, step, stop, len(self._train.labels))
            batches, sizes = _packed(drawn.indices, drawn.mask)
            if batches.shape[1] > len(self._scratch.coefficients):
                rows, lanes = len(self._scratch.stamp), len(self._lanes.lane)
                self._scratch = _scratch(rows, lanes, batches.shape[1])
            self._weights.steps(
                self._kernels.steps, *self._memory, self._train, batches, sizes, self._lanes, self._outputs,
                *self._kernels.settings(self._optimizer, self._mechanism), step, self._scratch,
            )  # fmt: skip
            step = stop

    def params(self, step: int) -> np.ndarray:
        """(scenarios, d): each run's weights in the problem's own order."""
        weights = self._weights.flushed(step, self._lanes, self._scratch)
        by_run = weights.reshape(len(weights), self._num_runs, self._outputs)
        return np.moveaxis(by_run, 1, 0).reshape(self._num_runs, -1).copy()

    def evaluate(self, step: int) -> dict[str, np.ndarray]:
        weights = self._weights.flushed(step, self._lanes, self._scratch)
        gradient = np.zeros_like(weights)
        loss, correct, clipped = self._sums(weights, self._train, gradient)
        n = len(self._train.labels)
        squares = np.square(gradient, dtype=np.float64).sum(axis=0).reshape(self._num_runs, self._outputs)
        metrics = {
            "loss": loss / n,
            "accuracy": correct / n,
            "gradient_norm": np.sqrt(squares.sum(axis=1)) / n,
            "clip_fraction": clipped / n,
            "params_norm": np.linalg.norm(self.params(step).astype(np.float64), axis=1),
        }
        if self._test is not None:
            loss, correct, _ = self._sums(weights, self._test, gradient[:0])
            metrics |= {
                "test_loss": loss / len(self._test.labels),
                "test_accuracy": correct / len(self._test.labels),
            }
        return metrics

    def forget(self) -> None:
        """Drop what the scratch remembers of steps that, after a restore, may be taken again."""
        self._scratch.stamp[:] = 0

    def arrays(self) -> dict[str, np.ndarray]:
        return self._weights.arrays() | {f"memory_{i}": memory for i, memory in enumerate(self._memory)}

    def _sums(self, weights: np.ndarray, examples, gradient: np.ndarray) -> list[np.ndarray]:
        sums = [np.zeros(self._num_runs) for _ in range(3)]
        _kernels.evaluate(weights, examples, self._lanes, self._outputs, self._scratch, gradient, *sums)
        return sums


@dataclass(frozen=True)
class _Kernels:
    """An optimizer's compiled form: its steps, the flush of what they postpone (None: nothing), its settings."""

    steps: Callable[..., None]
    flush: Callable[..., None] | None
    num_moments: int = 0
    settings: Callable[[Any, Any], tuple] = field(default=lambda optimizer, mechanism: ())


def _adam_steps(weights, last, *arguments) -> None:
    _kernels.adam_steps(weights, *arguments)


_OPTIMIZERS = {
    DPSGD: _Kernels(_kernels.sgd_steps, _kernels.flush_sgd),
    DPSignSGD: _Kernels(_kernels.sign_steps, _kernels.flush_sign),
    DPAdam: _Kernels(
        _adam_steps,
        None,
        num_moments=2,
        settings=lambda adam, mechanism: (float(mechanism.expected_batch_size), adam.b1, adam.b2, adam.eps),
    ),
}


def _examples(data: Labelled) -> _kernels.Examples:
    """The data set's padded rows as CSR, on the host."""
    rows: Any = data.rows
    indices, values = np.asarray(rows.indices), np.asarray(rows.values)
    present = values != 0
    indptr = np.concatenate([[0], np.cumsum(present.sum(axis=1))]).astype(np.int64)
    norms = np.sqrt(np.asarray(rows.squared_norms, np.float64) + 1.0).astype(np.float32)
    upwards = np.nextafter(norms, np.float32(np.inf))
    return _kernels.Examples(indptr, indices[present], values[present], np.asarray(data.labels, np.int32), upwards)


def _lanes(scenarios: Sequence[Scenario], outputs: int, root: RandomRoot, repeat: int) -> _kernels.Lanes:
    def each(values) -> np.ndarray:
        return np.repeat(np.asarray(list(values), np.float32), outputs)

    keys = np.stack([key_words(noise_key(scenario, root=root, repeat=repeat)) for scenario in scenarios])
    return _kernels.Lanes(
        clip=each(s.mechanism.l2_clip_norm for s in scenarios),
        noise_std=each(s.mechanism.noise_std for s in scenarios),
        learning_rate=each(s.optimizer.learning_rate for s in scenarios),
        step_size=each(s.optimizer.learning_rate / s.mechanism.expected_batch_size for s in scenarios),
        step_noise=each(s.optimizer.learning_rate * s.mechanism.mean_noise_std for s in scenarios),
        **{f"key_{i}": np.repeat(keys[:, i], outputs) for i in range(4)},
        # An output of a run, not a place in the group: a run's noise must not depend on its neighbours.
        lane=np.tile(np.arange(outputs, dtype=np.uint32), len(scenarios)),
    )


def _scratch(rows: int, lanes: int, width: int) -> _kernels.Scratch:
    tile = _kernels.TILE if lanes >= _kernels.FEW_LANES else _kernels.TILE_OF_FEW_LANES
    return _kernels.Scratch(
        stamp=np.zeros(rows, np.int32),
        slot=np.zeros(rows, np.int32),
        touched=np.zeros(rows, np.int32),
        coefficients=np.zeros((max(width, 1), lanes), np.float32),
        gradient=np.zeros((rows, lanes), np.float32),
        normals=np.zeros((tile, lanes), np.float32),
        words=np.zeros((tile, lanes), np.uint32),
        normal_column=np.zeros((4, tile // 4), np.float32),
        word_column=np.zeros((4, tile // 4), np.uint32),
        every_row=np.arange(rows, dtype=np.int32),
    )


def _packed(indices: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers with those that are there in front, and how many those are."""
    order = np.argsort(~mask, axis=1, kind="stable")
    return np.take_along_axis(indices, order, axis=1).astype(np.int64), mask.sum(axis=1)
