"""What the theory says happens: Euler-Maruyama of the optimizer's SDE, one path a repeat."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from noisecast.engines import dense, simulate
from noisecast.privacy.noise import Purpose, RandomRoot, jax_key, key_for
from noisecast.runners.runner import Call, Progress, chunks, groups_of, rows
from noisecast.scenario import Scenario
from noisecast.table import EXTRAPOLATED, OK


@dataclass(frozen=True)
class Sde:
    """dX = b(X) dt + sqrt(eta) gain(X) Sigma(X)^(1/2) dW in time t = step * eta, by Euler-Maruyama.

    Drift b and gain come from the optimizer's theory, the gradient's mean and covariance Sigma from the problem
    (the unified form: every clipping regime at once). Rows are `extrapolated` where the optimizer's settings are out of
    its theory's depth (`Closure.caveat`).

    Args:
      substeps: Euler-Maruyama steps an optimizer step; >= 1. At 1 (the paper's choice, dt = eta) the scheme shares the
        optimizer's own discretisation error; larger values approach the SDE itself.
    """

    substeps: int = 1
    name: ClassVar[str] = "sde"

    def __post_init__(self) -> None:
        if not (isinstance(self.substeps, int) and self.substeps >= 1):
            raise ValueError(f"Expected substeps to be a whole number >= 1, got {self.substeps}.")

    def why_unsupported(self, scenario: Scenario) -> str | None:
        return dense.why_unsupported(scenario)

    def calls(self, scenarios: Sequence[Scenario], repeats: Sequence[int]) -> list[Call]:
        found = []
        for group in groups_of(scenarios, _group_key):
            side_by_side, at_once = dense.runs_of_a_call(group[0])
            found += [(chunk, some) for some in chunks(repeats, at_once) for chunk in chunks(group, side_by_side)]
        return found

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
        groups = groups_of(scenarios, _group_key)
        for number, group in enumerate(groups):
            paths = _paths_of(group[0])(group, repeats=repeats, root=root, substeps=self.substeps)
            records = []
            for step in [step for step in record_at if step <= group[0].num_steps]:
                paths.advance(step)
                records.append((step, paths.evaluate()))
                progress((number + step / group[0].num_steps) / len(groups))
            table = rows(self.name, group, repeats, records)
            if _caveat(group[0]):
                table.loc[table["status"] == OK, "status"] = EXTRAPOLATED
            tables.append(table)
        return pd.concat(tables, ignore_index=True)


def _group_key(scenario: Scenario) -> tuple:
    return (_paths_of(scenario), *dense.group_key(scenario))


def _caveat(scenario: Scenario) -> str:
    """What puts the optimizer's settings out of its theory's depth, alike in a group; else empty."""
    closure = scenario.optimizer.theory.closure
    return "" if closure is None else closure.caveat


def _paths_of(scenario: Scenario) -> Any:
    """What draws its paths: the simulator where it can, else the general way, for any problem and theory."""
    return simulate.SimulatedPaths if simulate.why_unsupported(scenario) is None else GeneralPaths


class GeneralPaths:
    """Paths of a group of scenarios, [repeat, scenario], in JAX."""

    def __init__(self, scenarios: Sequence[Scenario], *, repeats: Sequence[int], root: RandomRoot, substeps: int):
        first = scenarios[0]
        self.problem, self.substeps, self.step, self.schedule = first.problem, substeps, 0, first.schedule
        self.optimizer = dense.without_learning_rate(first.optimizer)
        self.learning_rate = jnp.array([s.optimizer.learning_rate for s in scenarios], jnp.float32)
        self.l2_clip_norm = jnp.array([s.mechanism.l2_clip_norm for s in scenarios], jnp.float32)
        prepared = [self.problem.prepare_moments(s.mechanism) for s in scenarios]
        self.prepared = jax.tree.map(lambda *leaves: jnp.stack(leaves), *prepared)
        keys = [key_for(Purpose.PATHS, s.id, root=root, repeat=r) for r in repeats for s in scenarios]
        self.keys = jax_key(keys).reshape(len(repeats), len(scenarios))
        start = jnp.asarray(self.problem.initial_params(), jnp.float32)
        self.params = jnp.broadcast_to(start, (len(repeats), len(scenarios), self.problem.num_params))
        self.state = _initial_state(self.problem, self.optimizer, self.params, self.prepared)

    def advance(self, to_step: int) -> None:
        for step, stop, _ in self.schedule.stretches(self.step, to_step):
            rates = self.learning_rate * self.schedule.at(step)
            self.params, self.state = _advance(
                self.problem, self.optimizer, self.substeps, rates, self.prepared, self.keys,
                self.params, self.state, step, stop,
            )  # fmt: skip
        self.step = to_step

    def evaluate(self) -> dict[str, np.ndarray]:
        return dense.evaluate(self.problem, self.params, self.l2_clip_norm)


@partial(jax.jit, static_argnames="optimizer")
def _initial_state(problem, optimizer, params, prepared):
    def one(params, prepared):
        return optimizer.theory.initial_state(problem.gradient_moments(params, prepared))

    return jax.vmap(jax.vmap(one), in_axes=(0, None))(params, prepared)


@partial(jax.jit, static_argnames=("optimizer", "substeps"))
def _advance(problem, optimizer, substeps, learning_rate, prepared, keys, params, state, begin, stop):
    theory = optimizer.theory

    def one_path(learning_rate, prepared, key, params, state, substep):
        moments = problem.gradient_moments(params, prepared)
        noise_key = jax.random.fold_in(key, substep)
        noise = problem.gradient_noise(params, prepared, noise_key)
        time_step = learning_rate / substeps
        state = theory.advance_state(state, moments, substep / substeps, 1 / substeps)
        drift = theory.drift(moments, state) * time_step
        diffusion = jnp.sqrt(learning_rate * time_step) * theory.noise_gain(moments, state) * noise
        return params + drift + diffusion, state

    def one_substep(substep, carry):
        params, state = carry
        scenarios = jax.vmap(one_path, in_axes=(0, 0, 0, 0, 0, None))
        repeats = jax.vmap(scenarios, in_axes=(None, None, 0, 0, 0, None))
        return repeats(learning_rate, prepared, keys, params, state, substep)

    return jax.lax.fori_loop(begin * substeps, stop * substeps, one_substep, (params, state))
