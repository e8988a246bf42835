"""Whole runs without dice: how mean and covariance of Gaussian weights move under a DP optimizer.

Weights x ~ N(m, V) meet a private gradient g whose mean over batch and noise is F(x). Everything below is our own
derivation from two facts about a Gaussian x. Stein's lemma gives Cov(x, F(x)) = V J with J = E[F'(x)], also where F has
kinks (clipping); and what an optimizer makes of a Gaussian g_j ~ N(F_j, s_j^2), a direction u_j, responds by a gain
k_j, Cov(x, u_j) = k_j Cov(x, g_j). So one step is

    m' = m - eta E u,        V' = V - eta V J K - eta K J V + eta^2 Cov u,        K = diag(k).

Frozen for a number of steps these are linear, and their geometric sums are known: `geometric_sum`,
`advance_covariance`, `advance_variance`, `krylov_response`. Nothing here is told of a data set.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from noisecast.theory import dp_adam
from noisecast.theory.clipping import clipping_expectations, low_dimension_clipping_expectations
from noisecast.theory.linear_sde import sign_covariance
from noisecast.theory.optimizer_theory import GradientMoments

Array = Any
SMALLEST_GAIN = 1e-8  # relative to the largest: below it a saturated sign no longer moves with its gradient


# --- What an optimizer makes of a Gaussian gradient -------------------------------------------------------------------


class GradientLaw(NamedTuple):
    """The private gradient under Gaussian weights: g_j = F_j(x) + noise.

    Args:
      mean: E F; (d,) [loss/params].
      signal_variance: Var F_j(x), from the spread of the weights; (d,).
      noise_variance: s_j^2 of batch and privacy noise; () or (d,).
      snr_factors, snr_weights: the noise as a scale mixture (`GradientMoments`); (K,).
    """

    mean: Array
    signal_variance: Array
    noise_variance: Array
    snr_factors: Array = (1.0,)
    snr_weights: Array = (1.0,)

    @property
    def variance(self) -> Array:
        return self.signal_variance + self.noise_variance


@dataclass(frozen=True)
class Closure:
    """An optimizer under Gaussian gradients.

    Args:
      response: (law, memory) -> E u and the gain k; (d,) each.
      covariance: (mean, covariance of g, memory) -> Cov u; (d,), (d, d) -> (d, d).
      variance: (law, memory) -> Var u; (d,).
      memory: (memory, law, step, num_steps) -> what the optimizer remembers after num_steps more; None at the start.
      noise_share: (step, num_steps) -> noise of those steps over that of num_steps independent directions; ().
      lag: steps by which directions lag behind gradients; () >= 0.
    """

    response: Callable[[GradientLaw, Any], tuple[Array, Array]]
    covariance: Callable[[Array, Array, Any], Array]
    variance: Callable[[GradientLaw, Any], Array]
    memory: Callable[[Any, GradientLaw, int, int], Any] = lambda memory, law, step, num_steps: None
    noise_share: Callable[[int, int], float] = lambda step, num_steps: 1.0
    lag: float = 0.0


def sign_response(law: GradientLaw) -> tuple[Array, Array]:
    """E sign(g_j) = sum_k w_k erf(F_j/(sqrt2 s_k)), s_k^2 = Var F_j + s^2/r_k^2, and its derivative in F_j, the gain.

    By Stein's lemma that derivative is the k_j of Cov(x, sign g_j) = k_j Cov(x, g_j). Sign of the mean where s_k = 0.

    >>> mean, gain = sign_response(GradientLaw(np.array([0.0, 9.0]), 0.0, 1.0))
    >>> mean.round(6), gain.round(6)
    (array([0., 1.]), array([0.797885, 0.      ]))
    """
    mean = np.asarray(law.mean, np.float64)
    expected, gain = np.zeros_like(mean), np.zeros_like(mean)
    for factor, weight in zip(law.snr_factors, law.snr_weights, strict=True):
        if weight == 0:
            continue
        variance = np.maximum(law.signal_variance + law.noise_variance / factor**2, 1e-300)
        snr = mean / np.sqrt(variance)
        expected += weight * special.erf(snr / math.sqrt(2))
        gain += weight * np.sqrt(2 / (math.pi * variance)) * np.exp(-(snr**2) / 2)
    return expected, gain


def _sign_variance(law: GradientLaw, memory: None) -> Array:
    return 1 - sign_response(law)[0] ** 2


SGD_CLOSURE = Closure(
    response=lambda law, memory: (law.mean, np.ones_like(law.mean)),
    covariance=lambda mean, covariance, memory: covariance,
    variance=lambda law, memory: law.variance,
)
SIGN_CLOSURE = Closure(
    response=lambda law, memory: sign_response(law),
    covariance=lambda mean, covariance, memory: sign_covariance(mean, covariance),
    variance=_sign_variance,
)


def adam_closure(*, b1: float, b2: float, eps: float) -> Closure:
    """u = g/(sqrt v + eps), v the average of E g^2 so far (`dp_adam.advance_second_moment`): a mean field for v_hat.

    b1 makes the first steps noisier (`momentum_noise`) and lets the mean lag by b1/(1 - b1) steps; to first order in
    the learning rate it changes nothing else. Valid when: b2 >= 0.9, eta h/s < 1 - b1.

    >>> closure = adam_closure(b1=0.9, b2=0.999, eps=0.0)
    >>> law = GradientLaw(np.array([3.0]), 0.0, 16.0)
    >>> closure.response(law, closure.memory(None, law, 0, 1))[0]
    array([0.6])
    """

    def gain(v: Array) -> Array:
        return 1 / (np.sqrt(v) + eps)

    def memory(v: Array | None, law: GradientLaw, step: int, num_steps: int) -> Array:
        moments = GradientMoments(law.mean, np.sqrt(law.variance))
        start = np.zeros_like(law.mean) if v is None else v
        return dp_adam.advance_second_moment(start, moments, step, num_steps, b2=b2)

    def covariance(mean: Array, covariance: Array, v: Array) -> Array:
        k = gain(v[: len(mean)])
        return k[:, None] * covariance * k

    return Closure(
        response=lambda law, v: (gain(v) * law.mean, gain(v)),
        covariance=covariance,
        variance=lambda law, v: gain(v) ** 2 * law.variance,
        memory=memory,
        noise_share=lambda step, num_steps: (
            (momentum_noise(step + num_steps, b1=b1) - momentum_noise(step, b1=b1)) / num_steps
        ),
        lag=b1 / (1 - b1),
    )


def momentum_noise(num_steps: int, *, b1: float) -> float:
    """Var(sum_{k < n} m_hat_k) for white noise g_i of variance 1: n without momentum, more early on, then n + constant.

    sum_k m_hat_k = sum_i w_i g_i, w_i = sum_{k = i}^{n-1} (1 - b1) b1^(k-i)/(1 - b1^(k+1)): the bias correction makes
    the first gradients count several times. Own derivation.

    >>> momentum_noise(1, b1=0.9), momentum_noise(7, b1=0.0)
    (1.0, 7.0)
    >>> round(momentum_noise(10, b1=0.9), 2)
    15.0
    """
    known = _momentum_noises(b1)
    return float(known[min(num_steps, len(known) - 1)] + max(0, num_steps - len(known) + 1))


@cache
def _momentum_noises(b1: float) -> np.ndarray:
    """`momentum_noise` of 0, 1, ... steps, until it grows by one a step."""
    longest = min(math.ceil(16 / (1 - b1)), 2000)
    weights, totals = np.zeros(longest), [0.0]
    powers = b1 ** np.arange(longest, dtype=float)
    for k in range(longest):
        weights[: k + 1] += (1 - b1) * powers[k::-1] / (1 - b1 ** (k + 1))
        totals.append(float(weights @ weights))
    return np.array(totals)


def expected_norm(mean_square: float, variance_of_square: float) -> float:
    """E|X| from E|X|^2 and Var|X|^2, with |X|^2 taken for a Gamma of shape k = (E|X|^2)^2/Var|X|^2.

    sqrt(E|X|^2/k) Gamma(k + 1/2)/Gamma(k): exact for a Gaussian of any number of equal variances and for a fixed X.

    >>> round(expected_norm(1.0, 2.0), 6), expected_norm(4.0, 0.0)      # E|Z| = sqrt(2/pi)
    (0.797885, 2.0)
    """
    if not (mean_square > 0 and variance_of_square > 1e-10 * mean_square**2):
        return float(np.sqrt(mean_square))
    shape = mean_square**2 / variance_of_square
    return math.sqrt(mean_square / shape) * float(special.poch(shape, 0.5))


# --- Quadratics: one step of the algorithm, coordinate by coordinate ------------------------------------------------


def quadratic_step(
    mean: Array,
    variance: Array,
    *,
    curvature: Array,
    law: GradientLaw,
    closure: Closure,
    memory: Any,
    learning_rate: float,
) -> tuple[Array, Array]:
    """m' = m - eta E u, v' = v - 2 eta k j v + eta^2 Var u on f = 1/2 sum_j j_j x_j^2. Exact for DP-SGD.

    Args:
      mean, variance: m, v of x; (d,).   curvature: j = h lambda, what clipping leaves of it; (d,).
      law: of the gradient at (m, v).   memory: the optimizer's, this step included.

    >>> law = GradientLaw(np.array([2.0]), 0.0, 1.0)
    >>> quadratic_step(np.ones(1), np.zeros(1), curvature=2.0, law=law, closure=SGD_CLOSURE, memory=None,
    ...                learning_rate=0.25)
    (array([0.5]), array([0.0625]))
    """
    expected, gain = closure.response(law, memory)
    spread = learning_rate**2 * closure.variance(law, memory)
    return mean - learning_rate * expected, variance * (1 - 2 * learning_rate * gain * curvature) + spread


class AdamMoments(NamedTuple):
    """Means and second moments of weights x and first average mu of DP-Adam, and v_hat in mean field; (d,) each."""

    mean: Array
    variance: Array
    momentum_mean: Array
    momentum_variance: Array
    cross: Array
    v: Array

    @classmethod
    def start(cls, params: Array) -> "AdamMoments":
        return cls(np.array(params, np.float64), *(np.zeros(len(params)) for _ in range(5)))


def adam_quadratic_step(
    at: AdamMoments, step: int, *, curvature: Array, noise_variance: Array, learning_rate: float,
    b1: float, b2: float, eps: float,
) -> AdamMoments:  # fmt: skip
    """One step of DP-Adam on f = 1/2 sum_j j_j x_j^2, with v_hat replaced by the average of E g^2; exact otherwise.

    mu' = b1 mu + (1 - b1)(j x + s xi),   x' = x - c mu',   c = eta/((1 - b1^(k+1)) (sqrt v' + eps)),
    so means and second moments of (x, mu) move linearly. Within 2 % of simulation for b2 >= 0.95.

    Args:
      step: k = 0, 1, ...   curvature: j = h lambda; (d,).   noise_variance: s^2; () or (d,).

    >>> adam_quadratic_step(AdamMoments.start(np.ones(1)), 0, curvature=np.ones(1), noise_variance=0.0,
    ...                     learning_rate=0.5, b1=0.9, b2=0.999, eps=0.0).mean
    array([0.5])
    """
    j = curvature
    law = GradientMoments(j * at.mean, np.sqrt(noise_variance + j**2 * at.variance))
    v = dp_adam.advance_second_moment(at.v, law, step, 1, b2=b2)
    c = learning_rate / ((1 - b1 ** (step + 1)) * (np.sqrt(v) + eps))
    momentum_mean = b1 * at.momentum_mean + (1 - b1) * law.mean
    momentum_variance = (
        b1**2 * at.momentum_variance
        + (1 - b1) ** 2 * (j**2 * at.variance + noise_variance)
        + 2 * b1 * (1 - b1) * j * at.cross
    )
    cross = b1 * at.cross + (1 - b1) * j * at.variance  # of x before the step with mu after it
    return AdamMoments(
        mean=at.mean - c * momentum_mean,
        variance=at.variance - 2 * c * cross + c**2 * momentum_variance,
        momentum_mean=momentum_mean,
        momentum_variance=momentum_variance,
        cross=cross - c * momentum_variance,
        v=v,
    )


@dataclass(frozen=True)
class InjectedNoise:
    """Shrink factor h(G) and variance of one clipped example per coordinate, over the gradient norm G, in float64.

    The variance is (m2 - h^2 G^2)/d of `clipping_expectations`; where nothing is clipped it is sigma^2 nu/(nu - 2),
    since the difference would lose digits: there DP-SGD is forecast exactly.

    >>> noise = InjectedNoise.tabulated(num_params=200, example_noise_std=0.1, degrees_of_freedom=math.inf,
    ...                                 l2_clip_norm=50.0, largest_norm=10.0)
    >>> [float(number) for number in noise.at(3.0)]
    [1.0, 0.010000000000000002]
    """

    log_norms: np.ndarray
    shrink_factors: np.ndarray
    variances: np.ndarray

    @classmethod
    def tabulated(
        cls, *, num_params: int, example_noise_std: float, degrees_of_freedom: float, l2_clip_norm: float,
        largest_norm: float, few_params: int = 100, decades: float = 5.0,
    ) -> "InjectedNoise":  # fmt: skip
        """Tabulate up to largest_norm; with up to `few_params` parameters by quadrature over the noise itself."""
        law = {
            "num_params": num_params,
            "example_noise_std": example_noise_std,
            "degrees_of_freedom": degrees_of_freedom,
        }
        exact = num_params <= few_params and example_noise_std > 0
        expectations = low_dimension_clipping_expectations if exact else clipping_expectations
        norms = np.geomspace(largest_norm * 10**-decades, largest_norm, 96 if exact else 1024)
        clipped = expectations(norms, l2_clip_norm=l2_clip_norm, **law)
        untouched = np.asarray(clipped.clip_fraction) == 0
        h = np.where(untouched, 1.0, clipped.shrink_factor)
        variance = (clipped.second_moment - (h * norms) ** 2) / num_params
        if degrees_of_freedom > 2:
            heavy = 1.0 if math.isinf(degrees_of_freedom) else degrees_of_freedom / (degrees_of_freedom - 2)
            variance = np.where(untouched, example_noise_std**2 * heavy, variance)
        return cls(np.log(norms), h, np.maximum(variance, 0.0))

    def at(self, gradient_norm: float) -> tuple[float, float]:
        log_norm = math.log(max(gradient_norm, 1e-300))
        h = math.exp(np.interp(log_norm, self.log_norms, np.log(self.shrink_factors)))  # a power where all is clipped
        beyond = min(1.0, math.exp(self.log_norms[-1] - log_norm))  # there every example is clipped: h = C/G
        return float(h * beyond), float(np.interp(log_norm, self.log_norms, self.variances))


# --- Binary logistic regression: one example under a Gaussian logit -------------------------------------------------


class LogisticExpectations(NamedTuple):
    """What clipped logistic gradients r(z) [x; 1] are made of, for z ~ N(mean, variance); (n,) each.

    Args:
      residual: E r, the residual clamped to the bound.   slope: E r' = Cov(z, r)/Var z (Stein).
      squared_residual: E r^2.   loss: E softplus.   clip_fraction: P(|residual| > bound).
      full_residual, full_slope: the same without clipping.
      probability_of_right: P(the class is predicted rightly).
    """

    residual: Array
    slope: Array
    squared_residual: Array
    loss: Array
    clip_fraction: Array
    full_residual: Array
    full_slope: Array
    probability_of_right: Array


def logistic_expectations(mean: Array, variance: Array, labels: Array, bound: Array) -> LogisticExpectations:
    """Expectations over the logit z ~ N(mean, variance) of one example's loss, residual and clipped residual.

    By symmetry everything is written for label 1: w = z or -z, loss log(1 + e^-w), residual -1/(1 + e^w), clamped at
    -bound. Gauss-Hermite with 24 nodes; the share of clipped examples and the accuracy are exact.

    Args:
      mean, variance: of the logits; (n,).   labels: 0 or 1; (n,).   bound: C/sqrt(|x|^2 + 1); (n,), > 0.

    >>> e = logistic_expectations(np.zeros(2), np.ones(2), np.array([0, 1]), np.array([9.0, 0.1]))
    >>> e.residual.round(3), e.clip_fraction.round(3)
    (array([ 0.5, -0.1]), array([0.   , 0.986]))
    """
    nodes, weights = _hermite(24)
    side = np.where(labels == 1, 1.0, -1.0)
    std = np.sqrt(np.maximum(variance, 1e-8))  # Stein's quotient needs some spread; 1e-4 of a logit is none
    z = (side * mean)[:, None] + std[:, None] * nodes
    full = -special.expit(-z)
    clamped = np.maximum(full, -bound[:, None])
    # softplus(-z) = -z - log(residual's complement); logaddexp keeps it finite.
    loss = np.logaddexp(0.0, -z) @ weights
    with np.errstate(divide="ignore"):
        threshold = np.where(bound < 1, special.logit(1 - np.minimum(bound, 1.0)), -np.inf)
    return LogisticExpectations(
        residual=side * (clamped @ weights),
        slope=np.maximum(clamped @ (weights * nodes) / std, 0.0),
        squared_residual=clamped**2 @ weights,
        loss=loss,
        clip_fraction=special.ndtr((threshold - side * mean) / std),
        full_residual=side * (full @ weights),
        full_slope=np.maximum(full @ (weights * nodes) / std, 0.0),
        probability_of_right=special.ndtr(side * mean / std),
    )


@cache
def _hermite(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return nodes, weights / weights.sum()


# --- Many frozen steps at once -------------------------------------------------------------------------------------


def geometric_sum(x: Array, num_steps: int) -> Array:
    """sum_{i < n} (1 - x)^i = (1 - (1 - x)^n)/x, also at x = 0 (n) and beyond stability (x > 2: it explodes).

    >>> geometric_sum(np.array([0.0, 0.5, 1.0]), 2)
    array([2. , 1.5, 1. ])
    """
    x = np.asarray(x, np.float64)
    rest = 1 - x
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        log_power = num_steps * np.where(rest > 0, np.log1p(-np.minimum(x, 1.0)), np.log(np.abs(rest)))
        even = np.where((rest < 0) & (num_steps % 2 == 1), -1.0, 1.0)
        total = np.where(even > 0, -np.expm1(log_power), 1 + np.exp(log_power)) / x
    return np.where(np.abs(x) < 1e-14, float(num_steps), total)


def advance_covariance(
    covariance: Array, *, jacobian: Array, gain: Array, noise: Array, learning_rate: float, num_steps: int
) -> Array:
    """V after n steps of V' = R V R^T + eta^2 N, R = I - eta K J, all else frozen; (d, d).

    With y = K^(-1/2) x the operator K^(1/2) J K^(1/2) is symmetric; in its eigenbasis, x_a = eta lambda_a and
    r_ab = (1 - x_a)(1 - x_b), V_ab -> r_ab^n V_ab + eta^2 N_ab (1 - r_ab^n)/(1 - r_ab). No learning rate is too large.

    Args:
      jacobian: J, symmetric; (d, d).   gain: k; (d,) > 0.   noise: N, of one step's direction; (d, d).

    >>> advance_covariance(np.eye(1), jacobian=np.eye(1), gain=np.ones(1), noise=np.eye(1), learning_rate=0.5,
    ...                    num_steps=2)
    array([[0.375]])
    """
    root = np.sqrt(np.maximum(gain, SMALLEST_GAIN * gain.max()))
    eigenvalues, basis = np.linalg.eigh(root[:, None] * jacobian * root)
    into, back = basis.T / root, root[:, None] * basis
    x = learning_rate * eigenvalues
    fading = x[:, None] + x - np.outer(x, x)  # 1 - r_ab
    total = geometric_sum(fading, num_steps)
    moved = (1 - fading * total) * (into @ covariance @ into.T)
    return back @ (moved + learning_rate**2 * total * (into @ noise @ into.T)) @ back.T


def advance_variance(
    variance: Array, *, jacobian: Array, gain: Array, noise: Array, learning_rate: float, num_steps: int
) -> Array:
    """`advance_covariance` of independent coordinates; everything (d,).

    >>> advance_variance(np.ones(1), jacobian=np.ones(1), gain=np.ones(1), noise=np.ones(1), learning_rate=0.5,
    ...                  num_steps=2)
    array([0.375])
    """
    x = learning_rate * gain * jacobian
    fading = 2 * x - x**2
    total = geometric_sum(fading, num_steps)
    return (1 - fading * total) * variance + learning_rate**2 * total * noise


def krylov_response(
    operator: Callable[[Array], Array],
    start: Array,
    num_steps: int,
    *,
    lag: float = 0.0,
    tolerance: float = 1e-3,
    max_iterations: int = 48,
) -> Array:
    """sum_{i < n} (I - A')^i A' A^-1 b for symmetric A >= 0: how far n linear steps travel, by Lanczos.

    A' = A (I + L A): directions that lag by L steps overshoot, so that x shrinks by 1 - a - L a^2 a step (the slow root
    of the heavy ball, to second order; where L a > 1 it oscillates instead and A' = 2 A is kept).

    Args:
      operator: v -> A v.   start: b; (d,).   num_steps: n.   lag: L.
      tolerance: of the answer's length, between one look and the next.

    >>> krylov_response(lambda v: np.array([0.5, 1.0]) * v, np.ones(2), 2).round(12)
    array([1.5, 1. ])
    """
    length = np.linalg.norm(start)
    if (num_steps == 1 and lag == 0) or length == 0 or not np.isfinite(length):
        return num_steps * start
    basis, diagonal, off = [start / length], [], []
    found = None
    for iteration in range(1, max_iterations + 1):
        image = operator(basis[-1])
        diagonal.append(basis[-1] @ image)
        known = np.array(basis)
        for _ in range(2):  # twice is enough to keep the basis orthogonal
            image = image - known.T @ (known @ image)
        off.append(np.linalg.norm(image))
        exhausted = off[-1] <= 1e-10 * max(map(abs, diagonal)) or iteration >= min(len(start), max_iterations)
        if exhausted or iteration % 4 == 0:
            eigenvalues, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(off[:-1], 1) + np.diag(off[:-1], -1))
            faster = 1 + np.minimum(lag * np.maximum(eigenvalues, 0.0), 1.0)
            answer = length * (vectors @ (faster * geometric_sum(faster * eigenvalues, num_steps) * vectors[0]))
            if exhausted or (found is not None and _change(found, answer) <= tolerance):
                return known.T @ answer
            found = answer
        basis.append(image / off[-1])
    raise AssertionError("the last iteration returns")


def _change(before: np.ndarray, after: np.ndarray) -> float:
    padded = np.concatenate([before, np.zeros(len(after) - len(before))])
    return float(np.linalg.norm(after - padded) / max(np.linalg.norm(after), 1e-300))
