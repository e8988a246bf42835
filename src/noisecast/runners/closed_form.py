"""Why: the expected loss in closed form, from the loss's local quadratic and the law of the private gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd

from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.local_quadratic import LocalQuadratic
from noisecast.runners.runner import Call, Progress, deterministic_calls, groups_of, rows, why_not_constant
from noisecast.scenario import Scenario
from noisecast.table import EXTRAPOLATED, OK
from noisecast.theory.closures import GradientLaw
from noisecast.theory.local_quadratic import (
    local_quadratic_curvature_loss,
    local_quadratic_gradient_norm_squared,
    local_quadratic_loss,
)
from noisecast.theory.optimizer_theory import GradientMoments

# Beyond these the neglected orders move the loss by more than a few per cent on logistic and softmax models.
LARGEST_CURVATURE_SHARE = 0.25
LARGEST_LINEARISATION_GAP = 0.1
LARGEST_REMEMBERED_SIGNAL = 0.2
# Of the loss: by how much steps that are large beside the noise they step in may move it (`step_gap`).
LARGEST_STEP_GAP = 0.05
# Of the gradient's share that clipping leaves, and of the noise, between the start of a quadratic and its minimum.
LARGEST_CLIPPING_CHANGE = 0.02


@dataclass(frozen=True)
class ClosedForm:
    """E f and E|grad f|^2 of the linearised optimizer on the loss's quadratic at the start.

    Exact for DP-SGD on a quadratic without clipping. Rows where the formula is out of its depth are marked
    `extrapolated`: on a loss that is not quadratic, once the curvature at the start makes up more than
    `LARGEST_CURVATURE_SHARE` of the initial loss; for DP-SignSGD and DP-Adam, while the linearised drift could move the
    loss by more than `LARGEST_LINEARISATION_GAP`, or the size of their steps by more than `LARGEST_STEP_GAP`; for
    DP-Adam, while it remembers more signal than `LARGEST_REMEMBERED_SIGNAL` of the noise, and always where its settings
    are out of its theory's depth (`Closure.caveat`); everywhere after the start, where clipping differs between the
    start of a quadratic and its minimum by more than `LARGEST_CLIPPING_CHANGE`. Clipping and noise are those of the
    first step.
    """

    name: ClassVar[str] = "closed_form"

    def why_unsupported(self, scenario: Scenario) -> str | None:
        return scenario.problem.why_no_closed_form or why_not_constant(self.name, scenario)

    def calls(self, scenarios: Sequence[Scenario], repeats: Sequence[int]) -> list[Call]:
        return deterministic_calls(scenarios, size=64)

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
        for group in groups_of(scenarios, lambda scenario: (scenario.problem.fingerprint,)):
            problem = group[0].problem
            start = problem.initial_params()
            quadratic = problem.local_quadratic(start)
            clipped_by = cache(partial(clipped_at, problem, start))  # learning rates share a mechanism
            for scenario in group:
                steps = np.array([step for step in record_at if step <= scenario.num_steps])
                metrics, beyond = local_metrics(scenario, quadratic, steps, clipped_by(scenario.mechanism))
                records = [(int(k), {name: v[i : i + 1] for name, v in metrics.items()}) for i, k in enumerate(steps)]
                table = rows(self.name, [scenario], None, records)
                table.loc[table["step"].isin(steps[beyond].tolist()) & (table["status"] == OK), "status"] = EXTRAPOLATED
                tables.append(table)
        progress(1.0)
        return pd.concat(tables, ignore_index=True)


class Clipped(NamedTuple):
    """What a mechanism makes of the gradient at a point.

    Args:
      prepared: of `problem.prepare_moments`.   moments, shrink_factor: there.
      changes: whether clipping is another at the minimum; False where the problem is not quadratic.
    """

    prepared: Any
    moments: GradientMoments
    shrink_factor: float
    changes: bool


def clipped_at(problem: Any, start: Any, mechanism: SampledGaussian) -> Clipped:
    prepared = problem.prepare_moments(mechanism)
    moments, shrink = problem.gradient_moments(start, prepared), float(problem.shrink_factor(start, prepared))
    noise_std = moments.noise_std
    return Clipped(
        prepared,
        moments,
        shrink,
        problem.is_quadratic and _clipping_changes(problem, start, prepared, noise_std, shrink),
    )


def local_metrics(
    scenario: Scenario, quadratic: LocalQuadratic, steps: np.ndarray, clipped: Clipped
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The metrics at `steps`, and which of those lie where the formula is out of its depth."""
    problem, theory, moments = scenario.problem, scenario.optimizer.theory, clipped.moments
    law = local_law(scenario, quadratic, moments.noise_std, clipped.shrink_factor)
    noise_std, learning_rate = law["gradient_noise_std"], law["learning_rate"]
    loss = local_quadratic_loss(steps, initial_loss=quadratic.loss, **law)
    beyond = linearisation_gap(scenario, moments, quadratic.loss, steps, law) > LARGEST_LINEARISATION_GAP * loss
    beyond |= step_gap(scenario, steps, law) > LARGEST_STEP_GAP * np.abs(loss)
    beyond |= theory.closure is not None and bool(theory.closure.caveat)
    if problem.is_quadratic:
        beyond |= (steps > 0) & clipped.changes
    else:
        beyond |= ~(local_quadratic_curvature_loss(steps, **law) <= LARGEST_CURVATURE_SHARE * quadratic.loss)
    if theory.initial_state(moments) is not None:
        beyond |= _remembered_signal(steps, law) > LARGEST_REMEMBERED_SIGNAL * problem.num_params * noise_std**2
    floor = theory.noise_penalty * learning_rate * problem.num_params * noise_std**2 / (4 * law["shrink_factor"])
    metrics = {
        "loss": loss,
        "gradient_norm": np.sqrt(local_quadratic_gradient_norm_squared(steps, **law)),
        "loss_floor": np.full(len(steps), floor),
    }
    return metrics, beyond


def local_law(scenario: Scenario, quadratic: LocalQuadratic, noise_stds: Any, shrink_factor: Any) -> dict[str, Any]:
    """The arguments of `local_quadratic_loss`: a spectrum, and clipping and noise at a point."""
    theory = scenario.optimizer.theory
    noise_std = float(np.sqrt(np.mean(np.square(noise_stds, dtype=np.float64))))
    return {
        "signal_eigenvalues": quadratic.signal_eigenvalues,
        "signal_squared_gradients": quadratic.signal_squared_gradients,
        "noise_eigenvalues": quadratic.noise_eigenvalues,
        "noise_multiplicities": quadratic.noise_multiplicities,
        "shrink_factor": float(shrink_factor),
        "learning_rate": _effective_learning_rate(scenario, noise_std),
        "noise_penalty": theory.noise_penalty,
        "gradient_noise_std": noise_std,
    }


def _effective_learning_rate(scenario: Scenario, noise_std: float) -> float:
    """eta_e at no signal: eta times the closure's gain, as Adam's eps is in that, 1/(s + eps)."""
    theory, learning_rate = scenario.optimizer.theory, scenario.optimizer.learning_rate
    if theory.closure is None:
        return float(theory.effective_learning_rate(learning_rate, noise_std))
    noise = GradientLaw(np.zeros(1), 0.0, noise_std**2)
    return learning_rate * float(theory.closure.response(noise, theory.closure.memory(None, noise, 0, 1)).gain[0])


def _clipping_changes(problem: Any, start: Any, prepared: Any, noise_std: Any, shrink_factor: float) -> bool:
    """Whether clipping leaves another share of the gradient, or other noise, at the minimum (0) than at the start."""
    minimum = np.zeros_like(start)
    share, noise = problem.shrink_factor(minimum, prepared), problem.gradient_moments(minimum, prepared).noise_std
    changes = (float(share) / shrink_factor, float(noise) / float(noise_std))
    return any(abs(change - 1) > LARGEST_CLIPPING_CHANGE for change in changes)


def linearisation_gap(scenario: Scenario, moments, initial_loss: float, steps: np.ndarray, law: dict) -> np.ndarray:
    """Most that linearising the optimizer can move the loss: its drift is weakest, next to the linear one, at first."""
    theory = scenario.optimizer.theory
    mean = np.asarray(moments.mean, np.float64)
    drift = np.asarray(theory.drift(moments, theory.initial_state(moments)), np.float64)
    linear = -law["learning_rate"] / scenario.optimizer.learning_rate * mean
    if linear @ mean == 0:
        return np.zeros(len(steps))
    quiet = law | {"noise_multiplicities": 0 * law["noise_multiplicities"], "initial_loss": initial_loss}
    slowed = quiet | {"shrink_factor": law["shrink_factor"] * min(1.0, (drift @ mean) / (linear @ mean))}
    return np.abs(local_quadratic_loss(steps, **slowed) - local_quadratic_loss(steps, **quiet))


def step_gap(scenario: Scenario, steps: np.ndarray, law: dict) -> np.ndarray:
    """About what the loss moves by because a sign or Adam's direction has a bounded square: 0 for linear optimizers.

    Their second moments fall by 1 - 2 x a step, x = eta_e h lambda, or as v_hat grows with the weights', not by the
    (1 - x)^2 of the linear step: x of what the noise adds, k x^2 of what is left of the signal after k steps.
    """
    closure = scenario.optimizer.theory.closure
    if closure is not None and closure.is_linear:
        return np.zeros(len(steps))
    rate, nothing = law["learning_rate"] * law["shrink_factor"], 0 * law["signal_squared_gradients"]
    bent = law["noise_multiplicities"] * rate * np.abs(law["noise_eigenvalues"])
    noise = local_quadratic_loss(
        steps, initial_loss=0.0, **law | {"noise_multiplicities": bent, "signal_squared_gradients": nothing}
    )
    curved = law["signal_squared_gradients"] * np.abs(law["signal_eigenvalues"])
    quiet = law | {"noise_multiplicities": 0 * law["noise_multiplicities"], "signal_squared_gradients": curved}
    left = local_quadratic_gradient_norm_squared(np.maximum(steps - 1, 0), **quiet)
    return np.abs(noise) + rate**2 / 2 * steps * left


def _remembered_signal(steps: np.ndarray, law: dict) -> np.ndarray:
    """|grad f|^2 without noise, averaged over the path so far: what an optimizer's memory holds beside the noise."""
    quiet = law | {"noise_multiplicities": 0 * law["noise_multiplicities"]}
    return np.array([local_quadratic_gradient_norm_squared(np.linspace(0, k, 65), **quiet).mean() for k in steps])
