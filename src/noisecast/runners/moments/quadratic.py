"""Forecasts of quadratics with injected noise: the algorithm's own recursion, coordinate by coordinate."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from noisecast.privacy.mechanism import SampledGaussian
from noisecast.problems.quadratic import Quadratic
from noisecast.runners.moments.forecast import Forecast, collected
from noisecast.scenario import Scenario
from noisecast.theory.clipping import sign_scale_mixture
from noisecast.theory.closures import GradientLaw, expected_norm
from noisecast.theory.quadratic_moments import InjectedNoise, recursion_of

LARGEST_LATTICE_RATIO = 1.0  # rho = eta h/s of DP-SignSGD and DP-Adam: beyond it their lattice or lag shows


def handles(problem: Any) -> bool:
    return isinstance(problem, Quadratic)


def why_unsupported(scenario: Scenario) -> str | None:
    problem: Any = scenario.problem
    if problem.degrees_of_freedom <= 2 and scenario.mechanism.l2_clip_norm > 1e18:
        return (
            f"moments cannot answer {problem.name}: example noise with degrees_of_freedom <= 2 and no clipping has "
            "no variance. Give a finite l2_clip_norm."
        )
    return None


def prepare(problem: Quadratic, settings: Any) -> None:
    return None


def forecast(scenario: Scenario, prepared: None, record_at: Sequence[int], settings: Any) -> Forecast:
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
    closure: Any = optimizer.theory.closure
    recursion, recorded = recursion_of(closure), {}
    state = recursion.start(start)
    for step in range(scenario.num_steps + 1):
        gradient_norm = math.sqrt(np.sum(counts * hessian**2 * (state.mean**2 + state.variance)))
        shrink, example_variance = noise.at(gradient_norm) if math.isfinite(gradient_norm) else (math.nan, math.nan)
        batch_variance = float(mechanism.sampler.batch_noise_variance(0.0, example_variance))
        noise_variance = batch_variance + mechanism.mean_noise_std**2
        curvature = shrink * hessian
        if step in record_at:
            ratio = optimizer.learning_rate * curvature.max() / math.sqrt(noise_variance)
            beyond = not closure.is_linear and ratio > LARGEST_LATTICE_RATIO
            recorded[step] = _metrics(hessian, state.mean, state.variance, counts), bool(beyond)
        gradient = GradientLaw(
            curvature * state.mean, curvature**2 * state.variance, noise_variance, *mixture(gradient_norm)
        )
        state = recursion.step(state, step, curvature, gradient, optimizer.learning_rate)
    return collected(recorded)


def _metrics(hessian: np.ndarray, mean: np.ndarray, variance: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    second = mean**2 + variance
    return {
        "loss": 0.5 * float(np.sum(counts * hessian * second)),
        "gradient_norm": _norm_of_many(hessian * mean, hessian**2 * variance, counts),
        "params_norm": _norm_of_many(mean, variance, counts),
    }


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
