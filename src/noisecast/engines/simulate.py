"""The simulation engine: quadratics and quartics with injected example noise, in Numba; the dense engine's law.

It trains (`SimulatedRun`), and it solves the optimizers' SDEs (`SimulatedPaths`); see `_simulate_kernels`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from noisecast.compiled import aligned, aligned_zeros
from noisecast.engines import _simulate_kernels as kernels
from noisecast.engines import dense
from noisecast.engines.keys import example_key, noise_key
from noisecast.optimizers import DPSGD, DPAdam, DPSignSGD
from noisecast.privacy.noise import Purpose, RandomRoot, key_for, key_words
from noisecast.problems.quadratic import Quadratic
from noisecast.problems.quartic import Quartic
from noisecast.scenario import Scenario

VECTOR = 16  # lanes of float32 in the widest registers
CACHED = 2**16  # numbers in one array of a block: three such arrays fit the second-level cache


def why_unsupported(scenario: Scenario) -> str | None:
    """None, or one sentence: why another engine trains this scenario, or another solver draws its paths."""
    if type(scenario.problem) not in (Quadratic, Quartic):
        return f"{scenario.problem.name} is not a quadratic or quartic with injected noise."
    if type(scenario.optimizer) not in _OPTIMIZERS:
        return f"There is no simulated form of {scenario.optimizer.name}."
    return dense.why_unsupported(scenario)


runs_of_a_call = dense.runs_of_a_call


class _Blocks:
    """Runs of a group of scenarios at several repeats, each a lane; lanes in blocks that stay in the cache.

    Threads take blocks without the interpreter's lock. A run's randomness is made of keys of its own, so it depends
    neither on its block nor on how many there are.
    """

    def __init__(self, scenarios: Sequence[Scenario], *, repeats: Sequence[int], memories: int, block: Callable):
        first = scenarios[0]
        self.problem: Any = first.problem
        self.step = 0
        self._first = first
        self._optimizer = first.optimizer
        self._shape = len(repeats), len(scenarios), self.problem.num_params
        self._l2_clip_norm = jnp.array([s.mechanism.l2_clip_norm for s in scenarios], jnp.float32)
        runs = [(scenario, repeat) for repeat in range(len(repeats)) for scenario in range(len(scenarios))]
        width, start = _block_width(len(runs), self.problem.num_params), np.asarray(self.problem.start, np.float32)
        self._blocks = []
        for begin in range(0, len(runs), width):
            chosen = runs[begin : begin + width]
            lanes = chosen + chosen[-1:] * (-len(chosen) % VECTOR)  # whole vectors: the last run is repeated
            params = aligned(np.repeat(start[:, None], len(lanes), axis=1))
            arrays = [params, *(aligned_zeros(params.shape, params.dtype) for _ in range(memories))]
            self._blocks.append(_Block(arrays, len(chosen), block(lanes)))

    def advance(self, to_step: int) -> None:
        """Take steps until `to_step` of them have been taken. Raises: ValueError behind `step`, or beyond num_steps."""
        dense.check_horizon(to_step, self.step, self._first)
        if to_step <= self.step:
            return
        with ThreadPoolExecutor(min(len(self._blocks), os.cpu_count() or 1)) as pool:
            list(pool.map(lambda block: self._advance(block, self.step, to_step), self._blocks))
        self.step = to_step

    def _advance(self, block: "_Block", step: int, to_step: int) -> None:
        raise NotImplementedError

    def _stretches(self, lanes: kernels.Lanes, step: int, to_step: int) -> Iterator[tuple[int, int, kernels.Lanes]]:
        """Steps of one learning rate, and the lanes with that rate."""
        schedule = self._first.schedule
        for begin, stop, _ in schedule.stretches(step, to_step):
            yield begin, stop, lanes._replace(learning_rate=lanes.learning_rate * np.float32(schedule.at(begin)))

    def block_until_ready(self) -> None:
        """Nothing to wait for: `advance` returns when its steps are taken."""

    def evaluate(self) -> dict[str, np.ndarray]:
        """Every metric of the problem at the current parameters; (repeats, scenarios) each. Non-private."""
        return dense.evaluate(self.problem, jnp.asarray(self.params), self._l2_clip_norm)

    @property
    def params(self) -> np.ndarray:
        """Parameters after `step` steps; (repeats, scenarios, d) float32."""
        return self._joined(0).T.reshape(self._shape)

    def state(self) -> dict[str, np.ndarray]:
        """Everything needed to go on from here, as arrays (keys excepted: they are remade from the root)."""
        named = {f"memory_{i}": self._joined(i) for i in range(len(self._blocks[0].arrays))}
        return named | {"step": np.asarray(self.step)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Continue from a `state()` of a run with the same scenarios, repeats and root."""
        for i in range(len(self._blocks[0].arrays)):
            old, new = self._joined(i), state.get(f"memory_{i}", np.zeros(0))
            if old.shape != new.shape or old.dtype != new.dtype or not np.isfinite(new).all():
                raise ValueError(
                    f"Expected a saved state of finite numbers, {old.dtype} {old.shape}, got {new.dtype} {new.shape}; "
                    "delete the checkpoint to start anew."
                )
            begin = 0
            for block in self._blocks:
                block.arrays[i][:, : block.runs] = new[:, begin : begin + block.runs]
                begin += block.runs
        self.step = int(state["step"])

    def _joined(self, number: int) -> np.ndarray:
        return np.concatenate([block.arrays[number][:, : block.runs] for block in self._blocks], axis=1)


class SimulatedRun(_Blocks):
    """A group of scenarios at several repeats, in training; see `dense.DenseRun`, whose interface this is."""

    def __init__(self, scenarios: Sequence[Scenario], *, repeats: Sequence[int], root: RandomRoot):
        if root.secure_noise:
            raise ValueError(
                f"Expected no secure noise for {scenarios[0].problem.name}: it has no data to protect; leave it out."
            )
        compiled = _OPTIMIZERS[type(scenarios[0].optimizer)]
        self._steps, self._settings = compiled.steps, compiled.settings(scenarios[0].optimizer)
        self._batch_size = int(scenarios[0].mechanism.expected_batch_size)
        separable = _separable(scenarios[0].problem)
        # Scenarios at one repeat see the same examples; privacy noise belongs to one scenario and repeat.
        examples = [key_words(example_key(scenarios[0], root=root, repeat=repeat)) for repeat in repeats]

        def block(runs: list[tuple[int, int]]) -> tuple:
            example_keys = [examples[r] for _, r in runs]
            noise_keys = [key_words(noise_key(scenarios[s], root=root, repeat=repeats[r])) for s, r in runs]
            lanes = _lanes(scenarios, np.array([s for s, _ in runs]), example_keys, noise_keys)
            return separable, lanes, _scratch(len(runs), len(separable.hessian_diag), 0)

        super().__init__(scenarios, repeats=repeats, memories=compiled.memories, block=block)

    def _advance(self, block: "_Block", step: int, to_step: int) -> None:
        problem, lanes, scratch = block.fixed
        for begin, stop, at in self._stretches(lanes, step, to_step):
            self._steps(*block.arrays, problem, at, self._batch_size, *self._settings, begin, stop, scratch)


class SimulatedPaths(_Blocks):
    """Paths of the optimizer's SDE by Euler-Maruyama; `substeps` of them an optimizer step (see `runners.sde.Sde`)."""

    def __init__(self, scenarios: Sequence[Scenario], *, repeats: Sequence[int], root: RandomRoot, substeps: int):
        compiled = _OPTIMIZERS[type(scenarios[0].optimizer)]
        self._steps, self._settings = compiled.paths, compiled.path_settings(scenarios[0].optimizer)
        self._substeps = substeps
        separable = _separable(scenarios[0].problem)
        tables = [scenarios[0].problem.prepare_moments(scenario.mechanism) for scenario in scenarios]  # pyright: ignore
        columns = _columns(tables)
        ends = np.array([(table.log_norms[0], table.log_norms[-1]) for table in tables], np.float32)
        points = len(tables[0].log_norms)

        def block(runs: list[tuple[int, int]]) -> tuple:
            keys = [key_words(key_for(Purpose.PATHS, scenarios[s].id, root=root, repeat=repeats[r])) for s, r in runs]
            asked = np.array([s for s, _ in runs], np.int32)
            lanes = _lanes(scenarios, asked, keys, keys)
            table = kernels.Table(columns, asked * np.int32(points), ends[asked, 0], ends[asked, 1], points)
            return separable, lanes, table, _scratch(len(runs), 0, columns.shape[1])

        super().__init__(scenarios, repeats=repeats, memories=compiled.path_memories, block=block)

    def _advance(self, block: "_Block", step: int, to_step: int) -> None:
        problem, lanes, table, scratch = block.fixed
        for begin, stop, at in self._stretches(lanes, step, to_step):
            self._steps(*block.arrays, problem, at, table, *self._settings, self._substeps, begin, stop, scratch)


@dataclass
class _Block:
    """Lanes side by side: what steps change, (d, lanes) each, the parameters first; what they only read or reuse."""

    arrays: list[np.ndarray]
    runs: int  # the lanes after these are there to fill a vector
    fixed: tuple


@dataclass(frozen=True)
class _Compiled:
    """An optimizer's compiled forms, how many numbers a parameter each remembers, and its settings."""

    steps: Callable[..., None]
    paths: Callable[..., None]
    memories: int = 0
    path_memories: int = 0
    settings: Callable[[Any], tuple] = field(default=lambda optimizer: ())
    path_settings: Callable[[Any], tuple] = field(default=lambda optimizer: ())


_OPTIMIZERS = {
    DPSGD: _Compiled(kernels.sgd_steps, kernels.sgd_paths),
    DPSignSGD: _Compiled(kernels.sign_steps, kernels.sign_paths),
    DPAdam: _Compiled(
        kernels.adam_steps,
        kernels.adam_paths,
        memories=2,
        path_memories=1,
        settings=lambda adam: (float(adam.b1), float(adam.b2), float(adam.eps)),
        path_settings=lambda adam: (float(adam.b2), float(adam.eps)),
    ),
}


def _block_width(runs: int, num_params: int) -> int:
    """Lanes a block: whole vectors, few enough for the cache, and a share for every thread."""
    share = -(-runs // (os.cpu_count() or 1))
    width = min(max(CACHED // num_params, VECTOR), 1024, share)
    return -(-width // VECTOR) * VECTOR


def _separable(problem: Any) -> kernels.Separable:
    return kernels.Separable(
        hessian_diag=np.asarray(problem.hessian_diag, np.float32),
        quartic_weight=np.float32(getattr(problem, "quartic_weight", 0.0)),
        cubic_weight=np.float32(getattr(problem, "cubic_weight", 0.0)),
        example_noise_std=np.float32(problem.example_noise_std),
        degrees_of_freedom=float(problem.degrees_of_freedom),
    )


def _lanes(scenarios: Sequence[Scenario], runs: np.ndarray, example_keys: list, noise_keys: list) -> kernels.Lanes:
    """What the kernels read of each run's scenario; `runs` are numbers of scenarios."""

    def each(values) -> np.ndarray:
        return aligned(np.array(list(values), np.float32)[runs])

    return kernels.Lanes(
        learning_rate=each(s.optimizer.learning_rate for s in scenarios),
        clip=each(s.mechanism.l2_clip_norm for s in scenarios),
        noise_std=each(s.mechanism.noise_std for s in scenarios),
        example_key=aligned(np.stack(example_keys, axis=1)),
        noise_key=aligned(np.stack(noise_keys, axis=1)),
    )


def _columns(tables: Sequence[Any]) -> np.ndarray:
    """The tables, one under the other; a mixture that has one component everywhere is written as one."""
    names = ("shrink_factors", "noise_stds", "snr_factors", "snr_weights")
    h, s, r, w = (np.concatenate([np.asarray(getattr(table, name)) for table in tables]) for name in names)
    components = 1 if (w[:, 1:] == 0).all() else w.shape[1]
    return np.asfortranarray(np.column_stack([h, s, r[:, :components], w[:, :components]]), np.float32)


def _scratch(lanes: int, num_params: int, columns: int) -> kernels.Scratch:
    def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
        return aligned_zeros((*shape, lanes), dtype)

    return kernels.Scratch(
        normals=zeros(kernels.TILE), gradient=zeros(num_params), others=zeros(num_params), scale=zeros(),
        factor=zeros(), squares=zeros(), row=zeros(dtype=np.int32), share=zeros(), moments=zeros(columns),
    )  # fmt: skip
