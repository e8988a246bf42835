"""Expectations under Gaussian and Student-t laws that several optimizers share.

Throughout, per-example gradients follow g_i ~ t_nu(grad f, sigma^2 I_d): g = grad f + sigma Z / sqrt(S/nu) with
Z ~ N(0, I_d) and S ~ chi^2_nu. `degrees_of_freedom` = inf is the Gaussian.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from scipy import special

from noisecast.theory.arguments import as_column, checked_degrees_of_freedom, shaped_like

Array = Any


def student_scale_factor(degrees_of_freedom: float) -> float:
    """K(nu) = E[sqrt(S/nu)] = sqrt(2/nu) Gamma((nu+1)/2) / Gamma(nu/2), S ~ chi^2_nu (paper, second lemma of App. A).

    Args:
      degrees_of_freedom: nu; > 0, inf allowed (K = 1).
    Returns: () in (0, 1].
    Raises: ValueError if degrees_of_freedom <= 0.

    >>> round(student_scale_factor(1), 6), student_scale_factor(float("inf"))
    (0.797885, 1.0)
    """
    nu = checked_degrees_of_freedom(degrees_of_freedom)
    if math.isinf(nu):
        return 1.0
    return float(special.poch(nu / 2, 0.5) * math.sqrt(2 / nu))  # poch keeps the digits that a ratio of Gammas loses


def normalised_gradient_factor(
    gradient_norm: Array, *, num_params: int, example_noise_std: float, degrees_of_freedom: float
) -> Array:
    """The a in E[g / ||g||] = a grad f, exactly, for Student-t or Gaussian g (paper, first two lemmas of App. A).

        a = sqrt(2/pi) K(nu)/sigma int_0^1 (1 + w^2 u^2/nu)^(-(nu+1)/2) (1 - u^2)^((d-1)/2) du,   w = G/sigma.

    The integral is Euler's for the 1F1 (Gaussian) and 2F1 (Student) of the paper's proof; unlike those series it
    loses no digits for large d or large G.

    Args:
      gradient_norm: G = ||grad f||; any shape, >= 0 [loss/params].
      num_params: d; >= 1.
      example_noise_std: sigma, the scale of the noise per example and coordinate; > 0 [loss/params].
      degrees_of_freedom: nu; > 0 or inf.
    Returns: a, shape of gradient_norm [params/loss].
    Raises: ValueError for example_noise_std <= 0 or degrees_of_freedom <= 0.

    >>> bool(abs(normalised_gradient_factor(1e-9, num_params=1, example_noise_std=1.0, degrees_of_freedom=math.inf)
    ...          - math.sqrt(2 / math.pi)) < 1e-12)     # d = 1: E sign(x) = erf(G / sqrt 2)
    True
    """
    nu, sigma = checked_degrees_of_freedom(degrees_of_freedom), _checked_noise(example_noise_std)
    y, weights = _geometric_panels(math.acosh(math.exp(48 / (num_params + 1))))
    # u = tanh y turns (1 - u^2)^((d-1)/2) du into sech^(d+1) y dy, smooth at both ends.
    log_sech = -np.log1p(np.sinh(y) ** 2) / 2
    log_w2u2 = 2 * np.log(np.tanh(y)) + 2 * np.log(np.maximum(as_column(gradient_norm) / sigma, 1e-300))
    log_damping = -np.exp(log_w2u2) / 2 if math.isinf(nu) else -(nu + 1) / 2 * np.log1p(np.exp(log_w2u2) / nu)
    integral = np.exp(log_damping + (num_params + 1) * log_sech) @ weights
    return shaped_like(math.sqrt(2 / math.pi) * student_scale_factor(nu) / sigma * integral, gradient_norm)


def normalised_gradient_factor_as_printed(
    *, num_params: int, example_noise_std: float, degrees_of_freedom: float
) -> float:
    """The paper's limit K(nu) / (sigma sqrt d) of `normalised_gradient_factor` (App. A, second lemma).

    Args:
      num_params, example_noise_std, degrees_of_freedom: d, sigma and nu, as `normalised_gradient_factor`.
    Returns: () > 0 [params/loss].
    Raises: as `normalised_gradient_factor`.
    Valid when: G^2 << d sigma^2 and d is large; its relative error is about
    (nu + 1)/nu G^2/(2 d sigma^2) + 1/(4 d). At G = 5 sigma sqrt d it is five times too large.

    >>> normalised_gradient_factor_as_printed(num_params=4, example_noise_std=0.5, degrees_of_freedom=math.inf)
    1.0
    """
    sigma = _checked_noise(example_noise_std)
    return student_scale_factor(degrees_of_freedom) / (sigma * math.sqrt(num_params))


def concentrated_normalised_gradient_factor(
    gradient_norm: Array, *, num_params: int, example_noise_std: float, degrees_of_freedom: float
) -> Array:
    """E_S[1/R], R^2 = G^2 + d sigma^2 nu/S: `normalised_gradient_factor` once the norm of Z concentrates at sqrt d.

    Own derivation. Holds at every G; relative error 2.5 % at d = 10, 0.25 % at d = 100, 0.02 % at d = 1000.

    Args, Returns and Raises: as `normalised_gradient_factor`.

    >>> round(float(concentrated_normalised_gradient_factor(
    ...     3.0, num_params=16, example_noise_std=1.0, degrees_of_freedom=math.inf)), 12)     # 1 / sqrt(9 + 16)
    0.2
    """
    sigma = _checked_noise(example_noise_std)
    spread = num_params * sigma**2
    factor = mean_inverse_radius(as_column(gradient_norm), spread, degrees_of_freedom, smallest_chi2=np.inf)
    return shaped_like(factor, gradient_norm)


def concentrated_direction_variances(
    gradient_norm: float, *, num_params: int, example_noise_std: float, degrees_of_freedom: float
) -> tuple[float, float]:
    """Variances of u = g/||g|| along grad f, and in each direction across it, in many dimensions.

        along = Var_S(r) + E_S[(1 - r^2)^2 (1 - r^2/2)]/d,   r^2 = G^2/(G^2 + d sigma^2 nu/S),
        across = (1 - E_S[r]^2 - along)/(d - 1).

    Own derivation: given S, the noise moves the cosine of u and grad f from r by its part along grad f, times
    (1 - r^2)^(3/2), and by its length, times r (1 - r^2)/sqrt 2, each of variance 1/d. At G = 0 both are 1/d. Relative
    errors of some 2/d.

    Args: as `normalised_gradient_factor`, with one gradient_norm.
    Returns: both; () in [0, 1], no unit.
    Raises: as `normalised_gradient_factor`.

    >>> concentrated_direction_variances(0.0, num_params=10, example_noise_std=1.0, degrees_of_freedom=math.inf)
    (0.1, 0.1)
    """
    nu, spread = checked_degrees_of_freedom(degrees_of_freedom), num_params * _checked_noise(example_noise_std) ** 2
    power = float(gradient_norm) ** 2 / spread  # S/nu of this is r^2/(1 - r^2)

    def mean(of_square: Callable[[np.ndarray], np.ndarray]) -> float:
        if math.isinf(nu):
            return float(of_square(np.asarray(power / (1 + power))))
        odds = 2 * power / nu
        everywhere = np.full((1, 1), np.inf)
        return float(gamma_expectation(nu / 2, everywhere, lambda x: of_square(odds * x / (1 + odds * x)))[0])

    cosine = mean(np.sqrt)
    along = max(mean(lambda r2: r2) - cosine**2, 0.0) + mean(lambda r2: (1 - r2) ** 2 * (1 - r2 / 2)) / num_params
    return along, (1 - cosine**2 - along) / max(num_params - 1, 1)


def mean_inverse_radius(gradient_norm: Array, spread: float, degrees_of_freedom: float, smallest_chi2: Array) -> Array:
    """E[1/R ; S < smallest_chi2] with R^2 = G^2 + spread nu/S, S ~ chi^2_nu: the clipped part of every expectation.

    Args:
      gradient_norm: G; (m, 1).
      spread: d sigma^2; > 0.
      degrees_of_freedom: nu; > 0 or inf.
      smallest_chi2: where clipping stops; (m, 1) or (), inf for "every example".
    Returns: (m,).

    >>> float(mean_inverse_radius(np.array([[3.0]]), 16.0, math.inf, np.inf)[0])       # 1/sqrt(9 + 16)
    0.2
    """
    nu = checked_degrees_of_freedom(degrees_of_freedom)
    if math.isinf(nu):
        return np.where(np.isinf(smallest_chi2), 1 / np.sqrt(gradient_norm**2 + spread), 0.0)[:, 0]
    # With S = 2x: E[1/R] = K(nu)/sqrt(spread) E_{x ~ Gamma((nu+1)/2)}[(1 + 2 x G^2/(nu spread))^(-1/2)].
    ratio = 2 * gradient_norm**2 / (nu * spread)
    limit = np.broadcast_to(np.asarray(smallest_chi2, dtype=float) / 2, ratio.shape)
    integral = gamma_expectation((nu + 1) / 2, limit, lambda x: 1 / np.sqrt(1 + ratio * x))
    return student_scale_factor(nu) / math.sqrt(spread) * integral


def gamma_expectation(shape: float, upper: Array, function: Any) -> Array:
    """E[function(x) ; x < upper] for x ~ Gamma(shape), by Gauss-Legendre panels in log x, split at `upper`.

    Args:
      shape: > 0.
      upper: (m, 1), >= 0, inf allowed.
      function: (m, nodes) -> (m, nodes), smooth and non-negative.
    Returns: (m,), about 1e-12 relative to E[function].

    >>> gamma_expectation(2.0, np.array([[np.inf]]), lambda x: x).round(9)             # the mean of Gamma(2)
    array([2.])
    """
    mass = special.gammainc(shape, upper)
    largest = np.minimum(upper, special.gammainccinv(shape, 1e-20))
    smallest = special.gammaincinv(shape, np.maximum(1e-20 * mass, 1e-290))
    smallest = np.clip(smallest, 1e-290, None)
    low, high = np.log(smallest), np.log(np.maximum(largest, smallest))
    unit_nodes, unit_weights = _uniform_panels()
    log_x = low + (high - low) * unit_nodes
    # The density of log x around its mode, log(shape): written so that large shapes keep their digits.
    step = log_x - math.log(shape)
    density = np.exp(shape * (step - np.expm1(step)) - _log_gamma_excess(shape))
    return np.where(mass[:, 0] > 0, (function(np.exp(log_x)) * density) @ unit_weights * (high - low)[:, 0], 0.0)


def _log_gamma_excess(a: float) -> float:
    """log[Gamma(a) e^a / a^a], from Stirling's series where the plain difference would cancel."""
    if a < 20:
        return float(special.gammaln(a)) + a - a * math.log(a)
    tail = 1 / (12 * a) - 1 / (360 * a**3) + 1 / (1260 * a**5) - 1 / (1680 * a**7)
    return 0.5 * math.log(2 * math.pi / a) + tail


@cache
def _uniform_panels(count: int = 48, order: int = 16) -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.legendre.leggauss(order)
    edges = np.linspace(0, 1, count + 1)
    middle, half = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
    return (middle[:, None] + half[:, None] * nodes).ravel(), (half[:, None] * weights).ravel()


def _geometric_panels(end: float, count: int = 44, order: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre on [0, end] in panels that halve towards 0, where a large gradient concentrates the integrand."""
    nodes, weights = np.polynomial.legendre.leggauss(order)
    edges = np.concatenate([[0.0], end * 2.0 ** np.arange(-count, 1)])
    middle, half = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
    return (middle[:, None] + half[:, None] * nodes).ravel(), (half[:, None] * weights).ravel()


def expected_sign(mean: Array, std: Array) -> Array:
    """E sign(X) = erf(mean / (sqrt2 std)) for X ~ N(mean, std^2); sign(mean) where std = 0. Broadcasts.

    Args:
      mean: any shape.   std: of a shape that broadcasts; >= 0.
    Returns: of the broadcast shape; in [-1, 1].

    >>> expected_sign(np.array([-2.0, 0.0, 3.0]), 0.0)
    array([-1.,  0.,  1.])
    """
    mean, std = np.asarray(mean, dtype=float), np.asarray(std, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        return special.erf(np.where(mean == 0, 0.0, mean / std) / math.sqrt(2))


def expected_erf(mean: Array, variance: Array, slope: Array) -> Array:
    """E erf(a X) = erf(a m / sqrt(1 + 2 a^2 v)), X ~ N(m, v). Broadcasts over m = mean, v = variance, a = slope.

    Args:
      mean: m; any shape.   variance: v; >= 0.   slope: a.   Of shapes that broadcast.
    Returns: of the broadcast shape; in [-1, 1].

    >>> float(expected_erf(0.0, 2.0, 5.0))
    0.0
    """
    return special.erf(slope * mean / np.sqrt(1 + 2 * slope**2 * variance))


def expected_x_erf(mean: Array, variance: Array, slope: Array) -> Array:
    """E[X erf(a X)] = m erf(a m / sqrt w) + 2 a v / sqrt(pi w) e^(-a^2 m^2 / w), w = 1 + 2 a^2 v, X ~ N(m, v).

    Args:
      mean: m; any shape.   variance: v; >= 0.   slope: a.   Of shapes that broadcast.
    Returns: of the broadcast shape [unit of X].

    >>> bool(np.isclose(expected_x_erf(0.0, 1.0, 1e-6), 2e-6 / math.sqrt(math.pi)))
    True
    """
    w = 1 + 2 * slope**2 * variance
    bell = 2 * slope * variance / np.sqrt(math.pi * w) * np.exp(-(slope**2) * mean**2 / w)
    return mean * special.erf(slope * mean / np.sqrt(w)) + bell


def expected_squared_erf(mean: Array, variance: Array, slope: Array) -> Array:
    """E[erf(a X)^2] = 1 - 8 T(sqrt2 a m / sqrt(1 + 2 a^2 v), 1 / sqrt(1 + 4 a^2 v)), T Owen's function, X ~ N(m, v).

    From E Phi(c X)^2 = P(two equicorrelated normals below one threshold), c = sqrt2 a.

    Args:
      mean: m; any shape.   variance: v; >= 0.   slope: a.   Of shapes that broadcast.
    Returns: of the broadcast shape; in [0, 1].

    >>> bool(np.isclose(expected_squared_erf(0.7, 0.0, 1.3), special.erf(0.7 * 1.3) ** 2))
    True
    """
    threshold = math.sqrt(2) * slope * mean / np.sqrt(1 + 2 * slope**2 * variance)
    return 1 - 8 * special.owens_t(threshold, 1 / np.sqrt(1 + 4 * slope**2 * variance))


def _checked_noise(sigma: float) -> float:
    if not sigma > 0:
        raise ValueError(f"Expected example_noise_std > 0, got {sigma}; without noise E[g/||g||] is grad f/||grad f||.")
    return float(sigma)
