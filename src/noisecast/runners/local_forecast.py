"""The forecast of a model that has no closure of its law: its loss's quadratic around a point, with error bars."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from noisecast.privacy.noise import RandomRoot
from noisecast.problems.local_quadratic import NUM_PROBES, LocalQuadratic
from noisecast.runners import closed_form
from noisecast.runners.runner import Call, Progress, deterministic_calls, rows, why_not_constant
from noisecast.scenario import Scenario
from noisecast.table import EXTRAPOLATED, OK
from noisecast.theory.frozen_steps import krylov_response
from noisecast.theory.local_quadratic import local_quadratic_loss

LARGEST_ERROR = 0.1  # of the loss: rows with wider error bars are `extrapolated`


class LocalAnswer(NamedTuple):
    """What the loss will do, as far as its quadratic knows. Computed without noise, therefore non-private.

    Args:
      steps: where it is recorded; (n,).   metrics: by name, (n,) each.
      error: half the width of the loss's error bar, the sum of the four below; (n,).
      probe_error: two standard errors of the spectrum's random probes.
      clipping_error: what the loss moves by if clipping and noise are those at the forecast's end, not at its start.
      bend_error: what the loss is at the forecast's mean weights, less what its quadratic says it is there.
      response_error: what the loss moves by if the optimizer's drift is as weak, next to its linear response, as it is
        at the start, and by steps that are large beside their noise (`closed_form.step_gap`); 0 for DP-SGD.
      extrapolated: where the quadratic is out of its depth; (n,).
    """

    steps: np.ndarray
    metrics: dict[str, np.ndarray]
    error: np.ndarray
    probe_error: np.ndarray
    clipping_error: np.ndarray
    bend_error: np.ndarray
    response_error: np.ndarray
    extrapolated: np.ndarray


@dataclass(frozen=True, eq=False)
class LocalForecast:
    """E f on the loss's quadratic at a point: spectrum by Lanczos, clipping and noise as they are there.

    The loss f0 + g'u + u'Hu/2 with the drift h (g + Hu) that clipping leaves and isotropic noise of standard deviation
    S (`local_quadratic_loss`). DP-SignSGD and DP-Adam act on coordinates, of which the spectrum knows
    nothing: they enter by their linear response to noise that is the same in all of them. The error bars count the
    spectrum's probes, how clipping and noise change until the step in question, how the loss bends away from its
    quadratic on the way to the mean weights, how far the optimizer is from its linear response at the start, and how
    large its steps are beside their noise. They do not count how the loss bends where noise alone carries the weights.
    Rows are `extrapolated` by the rules of `ClosedForm`, and where the bar is wider than `LARGEST_ERROR` of the loss.

    Args:
      at: the point; (d,). None: the initial parameters.

    Raises: ValueError for a point of another shape than the problem's parameters.

    >>> from noisecast import DPSGD, SampledGaussian, Stream, quadratic
    >>> problem = quadratic(np.ones(4), 1.0, example_noise_std=0.1)
    >>> mechanism = SampledGaussian(noise_multiplier=0.01, l2_clip_norm=100.0, sampler=Stream(8))
    >>> asked = Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=0.1), num_steps=20)
    >>> found = LocalForecast().forecast(asked, [0, 20])
    >>> found.metrics["loss"].round(3), bool(np.all(found.error < 1e-4))
    (array([2.   , 0.031]), True)
    """

    at: Any = None
    name: ClassVar[str] = "local_quadratic"

    def why_unsupported(self, scenario: Scenario) -> str | None:
        d = scenario.problem.num_params
        if self.at is not None and np.shape(self.at) != (d,):
            return (
                f"local_quadratic cannot answer {scenario.problem.name}: expected a point of shape ({d},), got "
                f"{np.shape(self.at)}. Leave `at` out for the initial parameters."
            )
        return why_not_constant(self.name, scenario)

    def calls(self, scenarios: Sequence[Scenario], repeats: Sequence[int]) -> list[Call]:
        return deterministic_calls(scenarios, size=4)

    def answer(
        self,
        scenarios: Sequence[Scenario],
        *,
        repeats: Sequence[int],
        root: RandomRoot,
        record_at: Sequence[int],
        progress: Progress,
    ) -> pd.DataFrame:
        tables, spectra = [], {}
        for scenario in scenarios:
            found = self._forecast(scenario, record_at, spectra)
            by_step = [(int(k), {m: v[i : i + 1] for m, v in found.metrics.items()}) for i, k in enumerate(found.steps)]
            table = rows(self.name, [scenario], None, by_step)
            beyond = table["step"].isin(found.steps[found.extrapolated].tolist())
            table.loc[beyond & (table["status"] == OK), "status"] = EXTRAPOLATED
            tables.append(table)
            progress(len(tables) / len(scenarios))
        return pd.concat(tables, ignore_index=True)

    def forecast(self, scenario: Scenario, record_at: Sequence[int]) -> LocalAnswer:
        """One scenario's forecast with its error bars. Non-private.

        Raises: ValueError with the sentence of `why_unsupported`.
        """
        reason = self.why_unsupported(scenario)
        if reason is not None:
            raise ValueError(reason)
        return self._forecast(scenario, sorted({*record_at, scenario.num_steps}), {})

    def _forecast(
        self, scenario: Scenario, record_at: Sequence[int], spectra: dict[str, LocalQuadratic]
    ) -> LocalAnswer:
        problem = scenario.problem
        start = jnp.asarray(problem.initial_params() if self.at is None else self.at, jnp.float32)
        if problem.fingerprint not in spectra:
            spectra[problem.fingerprint] = problem.local_quadratic(start)
        quadratic = spectra[problem.fingerprint]
        steps = np.array([step for step in record_at if step <= scenario.num_steps])
        here = closed_form.clipped_at(problem, start, scenario.mechanism)
        metrics, beyond = closed_form.local_metrics(scenario, quadratic, steps, here)
        law = closed_form.local_law(scenario, quadratic, here.moments.noise_std, here.shrink_factor)
        path = _MeanPath(scenario, start, law["learning_rate"] * law["shrink_factor"])
        ends = [path.after(int(step)) for step in steps]
        moved = [_moved(scenario, quadratic, here.prepared, step, end) for step, end in zip(steps, ends)]
        parts = (
            2 * _probe_error(steps, law),
            np.abs(np.array(moved) - metrics["loss"]),
            np.array([path.bend(end) for end in ends]),
            closed_form.linearisation_gap(scenario, here.moments, quadratic.loss, steps, law)
            + closed_form.step_gap(scenario, steps, law),
        )
        error = np.sum(parts, axis=0)
        beyond = beyond | ~(error <= LARGEST_ERROR * np.abs(metrics["loss"]))
        return LocalAnswer(steps, metrics, error, *parts, beyond)


@jax.jit
def _clipped(problem: Any, at: jax.Array, prepared: Any) -> tuple[jax.Array, jax.Array]:
    return problem.gradient_moments(at, prepared).noise_std, problem.shrink_factor(at, prepared)


@jax.jit
def _loss(problem: Any, at: jax.Array, l2_clip_norm: float) -> jax.Array:
    return problem.evaluate(at, l2_clip_norm)["loss"]


@jax.jit
def _curve(problem: Any, at: jax.Array, vector: jax.Array, l2_clip_norm: float) -> tuple[jax.Array, jax.Array]:
    """Gradient of the loss, and its Hessian times a vector."""
    return jax.jvp(lambda x: jax.grad(_loss, argnums=1)(problem, x, l2_clip_norm), (at,), (vector,))


def _law(scenario: Scenario, at: jax.Array, quadratic: LocalQuadratic, prepared: Any) -> dict[str, Any]:
    """The arguments of `local_quadratic_loss`: a spectrum, and clipping and noise at a point."""
    noise_stds, shrink_factor = _clipped(scenario.problem, at, prepared)
    return closed_form.local_law(scenario, quadratic, noise_stds, shrink_factor)


def _moved(scenario: Scenario, quadratic: LocalQuadratic, prepared: Any, step: int, end: np.ndarray) -> float:
    """The loss if clipping and noise are those at the mean weights that the forecast ends in."""
    law = _law(scenario, jnp.asarray(end, jnp.float32), quadratic, prepared)
    return float(local_quadratic_loss(step, initial_loss=quadratic.loss, **law))


def _probe_error(steps: np.ndarray, law: dict[str, Any]) -> np.ndarray:
    """Standard error of the noise's loss tr A, A = phi(H), over P Rademacher probes: at most sqrt(2 tr A^2/P).

    An exact spectrum, which has every eigenvalue once, has none.
    """
    if np.all(law["noise_multiplicities"] == 1):
        return np.zeros(len(steps))
    quiet = law | {"signal_squared_gradients": 0 * law["signal_squared_gradients"], "initial_loss": 0.0}
    each = [
        local_quadratic_loss(steps, **quiet | {"noise_eigenvalues": node, "noise_multiplicities": np.ones(1)})
        for node in law["noise_eigenvalues"][:, None]
    ]
    return np.sqrt(2 / NUM_PROBES * (law["noise_multiplicities"] @ np.square(each)))


class _MeanPath:
    """The mean weights of the forecast, x0 - eta_e h sum_i (1 - eta_e h H)^i g, and the loss there."""

    def __init__(self, scenario: Scenario, start: jax.Array, rate: float):
        self.problem, self.l2_clip_norm = scenario.problem, scenario.mechanism.l2_clip_norm
        self.start, self.rate = start, rate
        self.gradient = self.curve(np.zeros(len(start)))[0]

    def curve(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gradient at the start, and the Hessian there times a vector."""
        both = _curve(self.problem, self.start, jnp.asarray(vector, jnp.float32), self.l2_clip_norm)
        return np.asarray(both[0], np.float64), np.asarray(both[1], np.float64)

    def loss(self, at: Any) -> float:
        return float(_loss(self.problem, jnp.asarray(at, jnp.float32), self.l2_clip_norm))

    def after(self, num_steps: int) -> np.ndarray:
        travelled = krylov_response(lambda v: self.rate * self.curve(v)[1], self.rate * self.gradient, num_steps)
        return np.asarray(self.start, np.float64) - travelled

    def bend(self, end: np.ndarray) -> float:
        """|f - its quadratic| at the mean weights."""
        way = end - np.asarray(self.start, np.float64)
        quadratic = self.loss(self.start) + self.gradient @ way + way @ self.curve(way)[1] / 2
        return abs(self.loss(end) - float(quadratic))
