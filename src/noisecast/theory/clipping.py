"""What clipping and noise leave of a gradient: shrink factor h, clip fraction, noise std s, the mixture a sign sees.

One pair of numbers, h and s, carries the paper's Phase 1 (every example clipped), its Phase 2 (none) and everything
between. With the norm of an example's noise concentrated, R^2 = G^2 + d sigma^2 nu/S is its squared gradient norm
and S ~ chi^2_nu its only randomness (own derivation; see `gaussian.py` for the noise model).
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy import special

from noisecast.theory.arguments import as_column, checked_degrees_of_freedom, shaped_like
from noisecast.theory.gaussian import mean_inverse_radius, student_scale_factor

Array = Any


@dataclass(frozen=True)
class ClippingExpectations:
    """What clipping does to one example's gradient, in expectation; every field has the shape of the gradient norm.

    Args:
      shrink_factor: h in E[clip(g_i)] = h grad f; in [0, 1].
      second_moment: m2 = E||clip(g_i)||^2 [loss^2/params^2]; inf if nothing bounds it.
      clip_fraction: P(||g_i|| > C); in [0, 1].

    >>> ClippingExpectations(shrink_factor=1.0, second_moment=0.25, clip_fraction=0.0)     # G = 1/2, and no noise
    ClippingExpectations(shrink_factor=1.0, second_moment=0.25, clip_fraction=0.0)
    """

    shrink_factor: Array
    second_moment: Array
    clip_fraction: Array


def clipping_expectations(
    gradient_norm: Array,
    *,
    num_params: int,
    example_noise_std: float,
    degrees_of_freedom: float,
    l2_clip_norm: float,
) -> ClippingExpectations:
    """h = E min(1, C/R), m2 = E min(R, C)^2 and P(R > C), with R^2 = G^2 + d sigma^2 nu/S, S ~ chi^2_nu.

    Quadrature over S, split where R = C. Limits: h = 1, m2 = G^2 + d sigma^2 nu/(nu-2) if nothing is clipped;
    h = C K(nu)/(sigma sqrt d), m2 = C^2 if everything is and G << sigma sqrt d (the paper's two phases).

    Args:
      gradient_norm: G = ||grad f||; any shape, >= 0 [loss/params].
      num_params: d; >= 1.
      example_noise_std: sigma, scale of the noise per example and coordinate; >= 0 [loss/params].
      degrees_of_freedom: nu; > 0, inf for Gaussian noise.
      l2_clip_norm: C; > 0, inf for no clipping [loss/params].
    Returns: ClippingExpectations, each field shaped like gradient_norm.
    Raises: ValueError for a value outside its range.
    Valid when: d is large enough that the norm of the noise concentrates. Error of h where R is not near C, or nu is
    small: 4 % at d = 10, 0.4 % at 100, 0.04 % at 1000; for Gaussian noise and R = C 11 %, 3.0 %, 0.9 %, twice that of
    m2, and the clip fraction jumps there from 0 to 1. `low_dimension_clipping_expectations` is right at every d.

    >>> e = clipping_expectations(3.0, num_params=16, example_noise_std=1.0, degrees_of_freedom=math.inf,
    ...                           l2_clip_norm=1.0)
    >>> round(float(e.shrink_factor), 12), float(e.second_moment), float(e.clip_fraction)       # R = 5
    (0.2, 1.0, 1.0)
    """
    nu, c2 = checked_degrees_of_freedom(degrees_of_freedom), _checked_clip_norm(l2_clip_norm) ** 2
    if not example_noise_std >= 0:
        raise ValueError(f"Expected example_noise_std >= 0, got {example_noise_std}.")
    g, spread = as_column(gradient_norm), num_params * float(example_noise_std) ** 2
    if spread == 0 or math.isinf(nu):
        h, m2, fraction = _with_known_radius(g**2 + spread, c2)
    elif math.isinf(c2):
        variance_factor = nu / (nu - 2) if nu > 2 else math.inf
        h, m2, fraction = np.ones_like(g), g**2 + spread * variance_factor, np.zeros_like(g)
    else:
        h, m2, fraction = _with_random_radius(g, spread, nu, c2)
    return ClippingExpectations(*(shaped_like(x, gradient_norm) for x in (h, m2, fraction)))


def _with_known_radius(radius_squared: np.ndarray, c2: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    clipped = radius_squared > c2
    h = np.sqrt(c2 / np.where(clipped, radius_squared, c2)) if np.any(clipped) else np.ones_like(radius_squared)
    return h, np.minimum(radius_squared, c2), clipped.astype(float)


def _with_random_radius(g: np.ndarray, spread: float, nu: float, c2: float):
    slack = c2 - g**2
    # An example is clipped if x = S/2 is below this; from G = C on, always.
    limit = np.where(slack > 0, nu * spread / 2 / np.where(slack > 0, slack, 1.0), np.inf)
    fraction, unclipped = special.gammainc(nu / 2, limit), special.gammaincc(nu / 2, limit)
    h = unclipped + math.sqrt(c2) * mean_inverse_radius(g, spread, nu, 2 * limit)[:, None]
    noise_power = spread * nu / 2 * _inverse_moment(nu / 2, limit)
    m2 = c2 * fraction + g**2 * unclipped + noise_power
    return np.minimum(h, 1.0), m2, fraction


def _inverse_moment(a: float, limit: np.ndarray) -> np.ndarray:
    """E[1/x ; x > limit] for x ~ Gamma(a): Gamma(a - 1, limit) / Gamma(a), finite for every a > 0 while limit > 0."""
    if a > 1.5:
        return special.gammaincc(a - 1, limit) / (a - 1)
    if abs(a - 1) > 0.99e-4:  # one step of the recurrence Gamma(a, x) = (a - 1) Gamma(a - 1, x) + x^(a - 1) e^(-x)
        with np.errstate(invalid="ignore"):
            power = np.exp((a - 1) * np.log(limit) - limit - special.gammaln(a))
            return np.where(np.isinf(limit), 0.0, np.maximum((special.gammaincc(a, limit) - power) / (a - 1), 0.0))
    # The recurrence cancels at a = 1, so interpolate through it.
    t = (a - 1) / 1e-4
    below, at, above = _inverse_moment(1 - 1e-4, limit), special.exp1(limit), _inverse_moment(1 + 1e-4, limit)
    return at + t * (above - below) / 2 + t**2 * (above - 2 * at + below) / 2


def zero_gradient_clipping_expectations(
    *, num_params: int, example_noise_std: float, degrees_of_freedom: float, l2_clip_norm: float
) -> ClippingExpectations:
    """`clipping_expectations` at G = 0 in closed form, c = C/(sigma sqrt d), P and Q the regularised incomplete gammas.

        h  = Q(nu/2, nu/(2c^2)) + c K(nu) P((nu+1)/2, nu/(2c^2))
        m2 = C^2 P(nu/2, nu/(2c^2)) + d sigma^2 (nu/2) Gamma(nu/2 - 1, nu/(2c^2)) / Gamma(nu/2)

    Own derivation.

    Args:
      num_params, example_noise_std, degrees_of_freedom, l2_clip_norm: d, sigma, nu and C, as `clipping_expectations`,
        which answers for infinite nu or C and for sigma = 0.
    Returns: ClippingExpectations of () each.
    Raises: ValueError for nu or C out of range.

    >>> e = zero_gradient_clipping_expectations(num_params=100, example_noise_std=1.0, degrees_of_freedom=1.0,
    ...                                         l2_clip_norm=1e-3)
    >>> round(float(e.shrink_factor) / (1e-3 * student_scale_factor(1.0) / 10), 9)       # the paper's Phase 1
    1.0
    """
    nu, c = checked_degrees_of_freedom(degrees_of_freedom), _checked_clip_norm(l2_clip_norm)
    if math.isinf(nu) or math.isinf(c) or not example_noise_std > 0:
        law: dict[str, Any] = {"num_params": num_params, "example_noise_std": example_noise_std}
        return clipping_expectations(0.0, degrees_of_freedom=nu, l2_clip_norm=c, **law)
    spread = num_params * float(example_noise_std) ** 2
    limit = np.asarray(nu * spread / (2 * c**2))
    fraction, unclipped = special.gammainc(nu / 2, limit), special.gammaincc(nu / 2, limit)
    clipped_part = c / math.sqrt(spread) * student_scale_factor(nu) * special.gammainc((nu + 1) / 2, limit)
    m2 = c**2 * fraction + spread * nu / 2 * _inverse_moment(nu / 2, limit)
    return ClippingExpectations(unclipped + clipped_part, m2, fraction)


def privacy_noise_std(*, noise_multiplier: float, l2_clip_norm: float, expected_batch_size: float) -> float:
    """C z / B: std per coordinate of the privacy noise in the mean gradient (paper, Def. of the private gradient).

    Args:
      noise_multiplier: z; >= 0.   l2_clip_norm: C; > 0, inf where z = 0 [loss/params].   expected_batch_size: B; > 0.
    Returns: () >= 0 [loss/params].

    >>> privacy_noise_std(noise_multiplier=2.0, l2_clip_norm=0.5, expected_batch_size=10)
    0.1
    """
    return 0.0 if noise_multiplier == 0 else l2_clip_norm * noise_multiplier / expected_batch_size


def gradient_noise_std(
    gradient_norm: Array,
    *,
    shrink_factor: Array,
    second_moment: Array,
    num_params: int,
    batch_size: float,
    mean_noise_std: float,
) -> Array:
    """s = sqrt((m2 - h^2 G^2)/(d B) + mean_noise_std^2): std per coordinate of the private mean gradient.

    Own derivation; h and m2 may be computed (`clipping_expectations`) or measured on per-example gradients. The
    variance along grad f is spread over all coordinates. For Poisson sampling pass h = 0: the random batch
    size adds the h^2 G^2 back. The factor 1 - q of its batch noise is left out, so that takes few of many examples.

    Args:
      gradient_norm: G; any shape [loss/params].
      shrink_factor, second_moment: h and m2, of the same shape.
      num_params: d.  batch_size: B, (expected) number of examples in a batch.
      mean_noise_std: C z / B, std of the privacy noise in the mean gradient (`privacy_noise_std`) [loss/params].
    Returns: s, shape of gradient_norm [loss/params].

    >>> float(gradient_noise_std(0.0, shrink_factor=1.0, second_moment=8.0, num_params=2, batch_size=1,
    ...                          mean_noise_std=0.0))
    2.0
    """
    m2 = np.asarray(second_moment, dtype=float)
    variance = m2 - (np.asarray(shrink_factor) * np.asarray(gradient_norm)) ** 2
    variance = np.where(variance < 1e-14 * m2, 0.0, variance)  # rounding, not noise
    return np.sqrt(variance / (num_params * batch_size) + mean_noise_std**2)[()]


def phase_1_noise_std(*, num_params: int, l2_clip_norm: float, batch_size: float, mean_noise_std: float) -> float:
    """s while every example is clipped: sqrt(C^2/(d B) + mean_noise_std^2) (paper, Phase 1, G << sigma sqrt d).

    Args:
      num_params: d; >= 1.   l2_clip_norm: C; > 0 [loss/params].   batch_size: B; > 0.
      mean_noise_std: C z/B (`privacy_noise_std`); >= 0 [loss/params].
    Returns: () > 0 [loss/params].

    >>> phase_1_noise_std(num_params=4, l2_clip_norm=2.0, batch_size=1, mean_noise_std=0.0)
    1.0
    """
    return math.sqrt(l2_clip_norm**2 / (num_params * batch_size) + mean_noise_std**2)


def phase_2_noise_std(*, example_noise_std: float, batch_size: float, mean_noise_std: float) -> float:
    """s while no example is clipped: sqrt(sigma^2/B + mean_noise_std^2) (paper, Phase 2).

    Args:
      example_noise_std: sigma; >= 0 [loss/params].   batch_size: B; > 0.
      mean_noise_std: C z/B (`privacy_noise_std`); >= 0 [loss/params].
    Returns: () >= 0 [loss/params].
    Valid when: the noise is Gaussian. Student-t noise has variance sigma^2 nu/(nu-2), infinite for nu <= 2, and then
    some examples are always clipped.

    >>> phase_2_noise_std(example_noise_std=0.6, batch_size=1, mean_noise_std=0.8)
    1.0
    """
    return math.sqrt(example_noise_std**2 / batch_size + mean_noise_std**2)


def sign_scale_mixture(
    gradient_norm: Array,
    *,
    num_params: int,
    example_noise_std: float,
    degrees_of_freedom: float,
    l2_clip_norm: float,
    batch_size: float,
    mean_noise_std: float,
    num_components: int = 4,
) -> tuple[np.ndarray, np.ndarray]:
    """The signal-to-noise ratios that the sign of a private mean gradient sees under heavy-tailed example noise.

    Given the S_b ~ chi^2_nu of a batch, the private mean gradient is Gaussian with mean a grad f and variance
    sum_b s_b^2 tau_b^2 / B^2 + mean_noise_std^2, where s_b = min(1, C/R_b), tau_b = sigma / sqrt(S_b/nu) and
    a = mean_b s_b. So E sign(g_i) = E erf(kappa grad_i f / sqrt2) with the random kappa = a / std. The law of kappa
    (a fixed quasi-random set of batches) is compressed to `num_components` nodes by Gauss quadrature, which keeps its
    first 2 K - 1 moments, the slope E[kappa] among them. Own derivation.

    Args:
      gradient_norm: G; (m,) or (), >= 0 [loss/params].
      num_params, example_noise_std, degrees_of_freedom, l2_clip_norm: as in `clipping_expectations`.
      batch_size: B, rounded to at least 1.
      mean_noise_std: C z / B [loss/params].
      num_components: K.
    Returns: (factors, weights), each (m, K) (or (K,) for scalar G): kappa relative to h/s of `clipping_expectations`
      and `gradient_noise_std`, and its probabilities, so that
      drift_i = -sum_k weights_k erf(factors_k h grad_i f / (sqrt2 s)). Gaussian noise gives one
      factor 1, the rest weight 0.
    Raises: ValueError if s is infinite (no clipping and nu <= 2).

    >>> factors, weights = sign_scale_mixture(0.0, num_params=100, example_noise_std=1.0, degrees_of_freedom=1.0,
    ...                                       l2_clip_norm=20.0, batch_size=1, mean_noise_std=0.0)
    >>> factors.shape, round(float(factors @ weights), 2)     # the slope is 1.5 times that of one Gaussian
    ((4,), 1.51)
    """
    model: dict[str, Any] = {
        "num_params": num_params,
        "example_noise_std": example_noise_std,
        "l2_clip_norm": l2_clip_norm,
    }
    g = np.atleast_1d(np.asarray(gradient_norm, dtype=float))
    shape = (*np.shape(gradient_norm), num_components)
    if math.isinf(degrees_of_freedom) or example_noise_std == 0:
        weights = np.zeros((len(g), num_components))
        weights[:, 0] = 1.0
        return np.ones(shape), weights.reshape(shape)
    e = clipping_expectations(g, degrees_of_freedom=degrees_of_freedom, **model)
    s = gradient_noise_std(
        g,
        shrink_factor=e.shrink_factor,
        second_moment=e.second_moment,
        num_params=num_params,
        batch_size=batch_size,
        mean_noise_std=mean_noise_std,
    )
    if not np.all(np.isfinite(s)):
        raise ValueError(
            f"Expected a finite gradient noise, got degrees_of_freedom = {degrees_of_freedom} <= 2 without clipping;"
            " give a finite l2_clip_norm."
        )
    batches, examples_per_draw = _chi2_batches(float(degrees_of_freedom), max(1, round(float(batch_size))))
    kappa = np.stack(
        [_batch_snr(norm, batches, examples_per_draw, degrees_of_freedom, mean_noise_std, **model) for norm in g]
    )
    factors, weights = _gauss_quadrature(kappa * (s / e.shrink_factor)[:, None], num_components)
    return factors.reshape(shape), weights.reshape(shape)


def _batch_snr(
    gradient_norm: float,
    batches: np.ndarray,
    examples_per_draw: float,
    nu: float,
    mean_noise_std: float,
    *,
    num_params: int,
    example_noise_std: float,
    l2_clip_norm: float,
) -> np.ndarray:
    """kappa of each batch of chi^2 draws; (batches, draws) -> (batches,)."""
    tau2 = example_noise_std**2 * nu / batches
    s2 = np.minimum(1.0, l2_clip_norm**2 / (gradient_norm**2 + num_params * tau2))
    variance = np.mean(s2 * tau2, axis=1) / (batches.shape[1] * examples_per_draw) + mean_noise_std**2
    return np.mean(np.sqrt(s2), axis=1) / np.sqrt(variance)


@cache
def _chi2_batches(nu: float, batch_size: int) -> tuple[np.ndarray, float]:
    """A fixed set of batches of chi^2_nu draws, and how many examples each draw stands for.

    One example: the quantiles. More: Sobol points, moved off the corner at 0. From 1024 examples on a draw stands for
    several, as the mean over the batch no longer feels it.
    """
    draws = min(batch_size, 1024)
    if draws == 1:
        uniform = (np.arange(4096)[:, None] + 0.5) / 4096
    else:
        count = 2 ** int(np.clip(round(math.log2(2**18 / draws)), 8, 12))
        shift = np.modf((np.arange(1, draws + 1)) * (math.sqrt(5) - 1) / 2)[0]
        from scipy.stats import qmc  # half a second to import, for this alone

        points = qmc.Sobol(draws, scramble=False).random(count) + shift
        uniform = np.clip(np.modf(points)[0], 0.25 / count, 1 - 0.25 / count)
    batches = 2 * special.gammaincinv(nu / 2, uniform)
    return np.maximum(batches, 1e-280), batch_size / draws


def _gauss_quadrature(samples: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """K nodes and weights with the first 2K - 1 moments of each row's empirical law; (m, n) -> two (m, K).

    Lanczos on diag(samples), started from equal weights (Golub and Welsch).
    """
    rows, count = samples.shape
    scale = np.max(np.abs(samples), axis=1, keepdims=True)
    x = samples / np.where(scale > 0, scale, 1.0)
    basis = [np.full((rows, count), 1 / math.sqrt(count))]
    jacobi = np.zeros((rows, num_nodes, num_nodes))
    for k in range(num_nodes):
        image = x * basis[k]
        jacobi[:, k, k] = np.sum(image * basis[k], axis=1)
        for vector in basis:  # full orthogonalisation, K is small
            image = image - np.sum(image * vector, axis=1, keepdims=True) * vector
        norm = np.linalg.norm(image, axis=1)
        norm = np.where(norm > 1e-9, norm, 0.0)  # the law has fewer than K points: the rest get weight 0
        if k + 1 < num_nodes:
            jacobi[:, k, k + 1] = jacobi[:, k + 1, k] = norm
            basis.append(image / np.where(norm > 0, norm, np.inf)[:, None])
    nodes, vectors = np.linalg.eigh(jacobi)
    return nodes * scale, vectors[:, 0, :] ** 2


def _checked_clip_norm(clip_norm: float) -> float:
    if not clip_norm > 0:
        raise ValueError(f"Expected l2_clip_norm > 0, got {clip_norm}; use math.inf for no clipping.")
    return float(clip_norm)
