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

NOTICEABLE_CLIPPING = 0.99  # of the gradient's share that clipping leaves: below it coordinates are coupled
# Of learning rate times curvature: above it swings are held by clipping, if that leaves at least such a share of the
# gradient, and is met by one that is so many times as long as usual.
EDGE, LEAST_LEFT, LONGEST_SWING = 1.95, 0.5, 5.0
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
    both = np.stack([np.asarray(problem.hessian_diag, np.float64), np.asarray(problem.initial_params(), np.float64)])
    (hessian, start), counts = np.unique(both, axis=1, return_counts=True)
    weights = counts * hessian**2
    noise_at = private_noise(scenario, math.sqrt(np.sum(counts * (hessian * start) ** 2)))
    closure: Any = scenario.optimizer.theory.closure
    recursion, recorded = recursion_of(closure), {}
    state, ratio, smallest_shrink, edge = recursion.start(start), 0.0, 1.0, 0.0
    learning_rate = np.float64(scenario.optimizer.learning_rate)  # overflows to inf, not to an error
    for step in range(scenario.num_steps + 1):
        gradient_norm = math.sqrt(weights @ (state.mean**2 + state.variance))
        shrink, law = noise_at(gradient_norm)
        curvature, smallest_shrink = shrink * hessian, min(smallest_shrink, shrink)
        if step and shrink > LEAST_LEFT and LONGEST_SWING * gradient_norm > scenario.mechanism.l2_clip_norm:
            edge = max(edge, learning_rate * scenario.schedule.at(step - 1) * float(np.max(curvature)))
        if not closure.is_linear:  # at the rate of the step that led here
            ratio = max(ratio, lattice_ratio(scenario, curvature, law) * scenario.schedule.at(max(step - 1, 0)))
        if step in record_at:
            metrics = _metrics(hessian, state.mean, state.variance, counts)
            recorded[step] = metrics, ratio > LARGEST_LATTICE_RATIO or (closure.is_linear and edge > EDGE)
        law = law._replace(mean=curvature * state.mean, signal_variance=curvature**2 * state.variance)
        state = recursion.step(state, step, curvature, law, learning_rate * scenario.schedule.at(step))
    return collected(recorded, reasons=reasons(ratio, smallest_shrink, edge if closure.is_linear else 0.0))


def private_noise(scenario: Scenario, gradient_norm_at_start: float) -> Callable[[float], tuple[float, GradientLaw]]:
    """The private gradient of a population problem over |grad f|: what clipping leaves, and the noise.

    Returns: |grad f| -> (h, law whose mean and signal are 0); nan where |grad f| is not finite.
    """
    problem: Any = scenario.problem
    mechanism = scenario.mechanism
    law = {
        "num_params": problem.num_params,
        "example_noise_std": problem.example_noise_std,
        "degrees_of_freedom": problem.degrees_of_freedom,
        "l2_clip_norm": mechanism.l2_clip_norm,
    }
    noise = InjectedNoise.tabulated(**law, largest_norm=100 * max(mechanism.l2_clip_norm, gradient_norm_at_start))
    mixture = _sign_mixture(law, mechanism, noise)

    def at(gradient_norm: float) -> tuple[float, GradientLaw]:
        shrink, example_variance = math.nan, math.nan
        if math.isfinite(gradient_norm):
            shrink, example_variance = noise.at(max(gradient_norm, 1e-250))  # at 0 its ratio to the largest overflows
        batch_variance = float(mechanism.sampler.batch_noise_variance(0.0, example_variance))
        noise_variance = batch_variance + mechanism.mean_noise_std**2
        return shrink, GradientLaw(0.0, 0.0, noise_variance, *mixture(gradient_norm))

    return at


def lattice_ratio(scenario: Scenario, curvature: np.ndarray, law: GradientLaw) -> float:
    """rho = eta h/s at the largest curvature; inf without noise."""
    steepest = scenario.optimizer.learning_rate * float(np.max(curvature))
    return steepest / math.sqrt(law.noise_variance) if law.noise_variance > 0 else math.inf


def reasons(largest_ratio: float, smallest_shrink: float, edge: float = 0.0) -> list[str]:
    """Why a forecast may be off: rho along the path, how much of the gradient clipping leaves at least, and
    DP-SGD's learning rate times curvature where clipping leaves some of it.
    """
    found = []
    if largest_ratio > LARGEST_LATTICE_RATIO:
        found.append(
            f"A step is large next to the noise: learning_rate * curvature / gradient noise reaches {largest_ratio:.3g}"
            f", and beyond {LARGEST_LATTICE_RATIO:g} the Gaussian closure of DP-SignSGD errs by 2 to 17 % of the loss "
            "at its floor, as the lag of DP-Adam does, and before it by more: a third and beyond."
        )
    if edge > EDGE:
        found.append(
            f"Learning rate times curvature reaches {edge:.3g}, the edge of stability, where clipping holds the "
            "swings. How much it holds differs from run to run, and the closure knows the mean: the loss is likely "
            "lower, by up to a half."
        )
    if smallest_shrink < NOTICEABLE_CLIPPING:
        found.append(
            "loss_std counts coordinates as independent, but clipping couples them through the gradient norm: it may "
            "be several times too high or too low."
        )
    return found


def _metrics(hessian: np.ndarray, mean: np.ndarray, variance: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    second = mean**2 + variance
    # Var x^2 = 2 v^2 + 4 m^2 v, and coordinates are independent.
    loss_variance = np.sum(counts * hessian**2 / 4 * (2 * variance**2 + 4 * mean**2 * variance))
    return {
        "loss": 0.5 * float(np.sum(counts * hessian * second)),
        "loss_std": math.sqrt(loss_variance),
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
