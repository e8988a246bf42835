"""Why: the expected loss in closed form, from the loss's local quadratic and the law of the private gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd

from noisecast.privacy.noise import RandomRoot
from noisecast.runners.runner import Progress, groups_of, rows
from noisecast.scenario import Scenario
from noisecast.table import EXTRAPOLATED, OK
from noisecast.theory.linear_sde import (
    local_quadratic_curvature_loss,
    local_quadratic_gradient_norm_squared,
    local_quadratic_loss,
)

# Beyond these the neglected orders move the loss by more than a few per cent on logistic and softmax models.
LARGEST_CURVATURE_SHARE = 0.25
LARGEST_DRIFT_ERROR = 0.1


@dataclass(frozen=True)
class ClosedForm:
    """E f and E|grad f|^2 of the linearised optimizer on the loss's quadratic at the start.

    Exact for DP-SGD on a quadratic without clipping; for DP-SignSGD and DP-Adam where the gradient's signal-to-noise
    ratio is small. On any other loss curvature, clipping and noise are those of the first step: its rows are marked
    `extrapolated` from the step at which the curvature's share reaches `LARGEST_CURVATURE_SHARE` of the initial loss.
    """

    name: ClassVar[str] = "closed_form"

    def why_unsupported(self, scenario: Scenario) -> str | None:
        return scenario.problem.why_no_closed_form

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
            for scenario in group:
                steps = np.array([step for step in record_at if step <= scenario.num_steps])
                metrics, beyond = _metrics(scenario, start, quadratic, steps)
                records = [(int(k), {name: v[i : i + 1] for name, v in metrics.items()}) for i, k in enumerate(steps)]
                table = rows(self.name, [scenario], None, records)
                table.loc[table["step"].isin(steps[beyond].tolist()) & (table["status"] == OK), "status"] = EXTRAPOLATED
                tables.append(table)
        progress(1.0)
        return pd.concat(tables, ignore_index=True)


def _metrics(scenario: Scenario, start, quadratic, steps: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The metrics at `steps`, and which of those lie beyond the reach of the local quadratic."""
    problem, theory = scenario.problem, scenario.optimizer.theory
    prepared = problem.prepare_moments(scenario.mechanism)
    moments = problem.gradient_moments(start, prepared)
    shrink_factor = float(problem.shrink_factor(start, prepared))
    noise_std = float(np.sqrt(np.mean(np.square(moments.noise_std, dtype=np.float64))))
    learning_rate = float(theory.effective_learning_rate(scenario.optimizer.learning_rate, noise_std))
    law = {
        "shrink_factor": shrink_factor,
        "learning_rate": learning_rate,
        "noise_penalty": theory.noise_penalty,
        "gradient_noise_std": noise_std,
    }
    spectrum = {
        "signal_eigenvalues": quadratic.signal_eigenvalues,
        "signal_squared_gradients": quadratic.signal_squared_gradients,
        "noise_eigenvalues": quadratic.noise_eigenvalues,
        "noise_multiplicities": quadratic.noise_multiplicities,
    }
    floor = theory.noise_penalty * learning_rate * problem.num_params * noise_std**2 / (4 * shrink_factor)
    beyond = np.zeros(len(steps), bool)
    if not problem.is_quadratic:
        curvature_loss = local_quadratic_curvature_loss(steps, **spectrum, **law)
        beyond |= ~(curvature_loss <= LARGEST_CURVATURE_SHARE * quadratic.loss)
    # How far the optimizer's own drift along the gradient, at the start, is from that of its linearised form.
    mean = np.asarray(moments.mean, np.float64)
    drift = np.asarray(theory.drift(moments, theory.initial_state(moments)), np.float64)
    linear = -learning_rate / scenario.optimizer.learning_rate * mean
    if abs(drift @ mean - linear @ mean) > LARGEST_DRIFT_ERROR * abs(linear @ mean):
        beyond[:] = True
    metrics = {
        "loss": local_quadratic_loss(steps, initial_loss=quadratic.loss, **spectrum, **law),
        "gradient_norm": np.sqrt(local_quadratic_gradient_norm_squared(steps, **spectrum, **law)),
        "loss_floor": np.full(len(steps), floor),
    }
    return metrics, beyond
