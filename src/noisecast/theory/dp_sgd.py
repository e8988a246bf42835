"""DP-SGD: x <- x - eta g, g the private mean gradient. Its SDE, rates, floors and bounds, one function an equation.

Time is t = step * learning_rate. Losses are excess losses f - f*. Bounds assume f mu-PL and L-smooth.
`_as_printed` is the paper's text where it drops constants or errs; the plain name is the corrected form.
"""

from typing import Any

import numpy as np

from noisecast.theory._namespace import special_and_math
from noisecast.theory.closures import SGD_CLOSURE
from noisecast.theory.gaussian import (
    concentrated_direction_variances,
    concentrated_normalised_gradient_factor,
    normalised_gradient_factor_as_printed,
    student_scale_factor,
)
from noisecast.theory.optimizer_theory import GradientMoments, OptimizerTheory

Array = Any

# --- The SDE, over all phases -------------------------------------------------------------------------------------


def drift(moments: GradientMoments, state: Any = None) -> Array:
    """-E[g] = -h grad f; (d,) [loss/params]. Unified over the paper's phases, own derivation.

    Args:
      moments: of the private mean gradient; mean (d,) [loss/params].   state: none, DP-SGD remembers nothing.
    Returns: (d,) [loss/params].

    >>> drift(GradientMoments(mean=np.array([1.0, -2.0]), noise_std=1.0))
    array([-1.,  2.])
    """
    return -moments.mean


def noise_gain(moments: GradientMoments, state: Any = None) -> Array:
    """1: the step passes the gradient noise on unchanged, so the covariance of the SDE is s^2 I.

    Args: as `drift`.
    Returns: (), no unit.

    >>> float(noise_gain(GradientMoments(mean=np.array([1.0, -2.0]), noise_std=1.0)))
    1.0
    """
    xp, _ = special_and_math(moments.mean, moments.noise_std)
    return xp.ones(())


# --- The SDE in the paper's phases --------------------------------------------------------------------------------


def drift_phase_1(
    gradient: Array, *, example_noise_std: float, degrees_of_freedom: float, l2_clip_norm: float
) -> Array:
    """-C a(G) grad f, a = E[1/R]: every example clipped, at every G (paper's Phase 1 with its exact coefficient).

    Args:
      gradient: grad f, whose norm is G; (d,) [loss/params].
      example_noise_std: sigma, scale of the noise per example and coordinate; > 0 [loss/params].
      degrees_of_freedom: nu; > 0, inf for Gaussian noise.   l2_clip_norm: C; > 0 [loss/params].
    Returns: (d,) [loss/params].
    Raises: ValueError for example_noise_std <= 0 or degrees_of_freedom <= 0.

    >>> g = np.array([3.0] + [0.0] * 15)
    >>> float(drift_phase_1(g, example_noise_std=1.0, degrees_of_freedom=np.inf, l2_clip_norm=2.0)[0].round(9))  # R=5
    -1.2
    """
    gradient = np.asarray(gradient, dtype=float)
    a = concentrated_normalised_gradient_factor(
        np.linalg.norm(gradient),
        num_params=gradient.size,
        example_noise_std=example_noise_std,
        degrees_of_freedom=degrees_of_freedom,
    )
    return -l2_clip_norm * a * gradient


def drift_phase_1_as_printed(
    gradient: Array, *, example_noise_std: float, degrees_of_freedom: float, l2_clip_norm: float
) -> Array:
    """-C K(nu)/(sigma sqrt d) grad f (paper, Thm sdesgd, Phase 1).

    Args, Returns and Raises: as `drift_phase_1`.
    Valid when: every example is clipped and ||grad f||^2 << d sigma^2; else it may exceed C in norm.

    >>> drift_phase_1_as_printed(np.ones(4), example_noise_std=1.0, degrees_of_freedom=np.inf, l2_clip_norm=2.0)
    array([-1., -1., -1., -1.])
    """
    gradient = np.asarray(gradient, dtype=float)
    a = normalised_gradient_factor_as_printed(
        num_params=gradient.size, example_noise_std=example_noise_std, degrees_of_freedom=degrees_of_freedom
    )
    return -l2_clip_norm * a * gradient


def covariance_phase_1(
    gradient: Array,
    *,
    example_noise_std: float,
    degrees_of_freedom: float,
    l2_clip_norm: float,
    batch_size: float,
    mean_noise_std: float,
) -> Array:
    """(C^2/B) Cov(u) + mean_noise_std^2 I of directions u = g/||g||, every example clipped, at every G.

    Cov(u) = v_across I + (v_along - v_across) n n^T, n = grad f/G, by `concentrated_direction_variances`; I/d where
    G << sigma sqrt d. Its trace is 1 - a^2 G^2, a = E[1/R], as that of Thm sdesgd with its exact coefficient.

    Args:
      gradient, example_noise_std, degrees_of_freedom, l2_clip_norm: as `drift_phase_1`.
      batch_size: B; > 0.   mean_noise_std: C z/B; >= 0 [loss/params].
    Returns: (d, d) [loss^2/params^2].
    Raises: as `drift_phase_1`.

    >>> covariance_phase_1(np.zeros(2), example_noise_std=1.0, degrees_of_freedom=3, l2_clip_norm=2.0, batch_size=2,
    ...                    mean_noise_std=0.0)
    array([[1., 0.],
           [0., 1.]])
    """
    directions = _direction_covariance(gradient, example_noise_std, degrees_of_freedom)
    return l2_clip_norm**2 / batch_size * directions + mean_noise_std**2 * np.eye(len(directions))


def covariance_phase_1_as_printed(
    gradient: Array,
    *,
    example_noise_std: float,
    degrees_of_freedom: float,
    l2_clip_norm: float,
    batch_size: float,
    mean_noise_std: float,
) -> Array:
    """(C^2/B) (E[u u^T] - a^2 grad f grad f^T) + mean_noise_std^2 I, a = K(nu)/(sigma sqrt d) (Thm sdesgd, Phase 1).

    E[u u^T] is exact for large d. Valid when: ||grad f||^2 << d sigma^2; else it may be negative along grad f.

    Args, Returns and Raises: as `covariance_phase_1`.

    >>> covariance_phase_1_as_printed(np.zeros(1), example_noise_std=1.0, degrees_of_freedom=3, l2_clip_norm=2.0,
    ...                               batch_size=4, mean_noise_std=1.0)
    array([[2.]])
    """
    shrunk = drift_phase_1_as_printed(
        gradient, example_noise_std=example_noise_std, degrees_of_freedom=degrees_of_freedom, l2_clip_norm=l2_clip_norm
    )
    exact = drift_phase_1(
        gradient, example_noise_std=example_noise_std, degrees_of_freedom=degrees_of_freedom, l2_clip_norm=l2_clip_norm
    )
    directions = l2_clip_norm**2 * _direction_covariance(gradient, example_noise_std, degrees_of_freedom)
    clipped = directions + np.outer(exact, exact) - np.outer(shrunk, shrunk)
    return clipped / batch_size + mean_noise_std**2 * np.eye(len(clipped))


def _direction_covariance(gradient: Array, sigma: float, nu: float) -> np.ndarray:
    """Cov(g/||g||), (d, d)."""
    gradient = np.asarray(gradient, dtype=float)
    norm = float(np.linalg.norm(gradient))
    along, across = concentrated_direction_variances(
        norm, num_params=gradient.size, example_noise_std=sigma, degrees_of_freedom=nu
    )
    unit = gradient / norm if norm > 0 else np.eye(gradient.size)[0]
    return across * np.eye(gradient.size) + (along - across) * np.outer(unit, unit)


def drift_phase_2(gradient: Array) -> Array:
    """-grad f: no example clipped (paper, Thm sdesgd, Phase 2). Its covariance is `phase_2_noise_std`^2 I.

    Args:
      gradient: grad f; (d,) [loss/params].
    Returns: (d,) [loss/params].

    >>> drift_phase_2(np.array([1.0]))
    array([-1.])
    """
    return -np.asarray(gradient, dtype=float)


def drift_mixed_as_printed(
    gradient: Array,
    *,
    clip_fraction: float,
    example_noise_std: float,
    degrees_of_freedom: float,
    l2_clip_norm: float,
) -> Array:
    """-(p a_1 + 1 - p) grad f, a_1 = C K(nu)/(sigma sqrt d) (paper, Thm mixed_phase_L_smooth).

    Wrong as stated, so kept only to be compared: it conditions on being clipped but keeps unconditional means, and a_1
    may exceed 1. Use `drift` with h = `clipping_expectations(...).shrink_factor`.

    Args:
      clip_fraction: p, share of the examples that are clipped; in [0, 1].   The others: as `drift_phase_1`.
    Returns and Raises: as `drift_phase_1`.

    >>> drift_mixed_as_printed(np.ones(1), clip_fraction=0.0, example_noise_std=1.0, degrees_of_freedom=1.0,
    ...                        l2_clip_norm=1.0)
    array([-1.])
    """
    clipped = drift_phase_1_as_printed(
        gradient, example_noise_std=example_noise_std, degrees_of_freedom=degrees_of_freedom, l2_clip_norm=l2_clip_norm
    )
    return clip_fraction * clipped + (1 - clip_fraction) * drift_phase_2(gradient)


def covariance_mixed_as_printed(
    gradient: Array,
    *,
    clip_fraction: float,
    example_noise_std: float,
    degrees_of_freedom: float,
    l2_clip_norm: float,
    batch_size: float,
    mean_noise_std: float,
) -> Array:
    """p Sigma_1 + (1 - p) Sigma_2 (paper, Thm mixed_phase_L_smooth). Wrong as stated; see `drift_mixed_as_printed`.

    Args:
      clip_fraction: p, share of the examples that are clipped; in [0, 1].   The others: as `covariance_phase_1`.
    Returns and Raises: as `covariance_phase_1`.

    >>> covariance_mixed_as_printed(np.zeros(1), clip_fraction=0.5, example_noise_std=1.0, degrees_of_freedom=3,
    ...                             l2_clip_norm=2.0, batch_size=1, mean_noise_std=0.0)
    array([[2.5]])
    """
    clipped = covariance_phase_1_as_printed(
        gradient,
        example_noise_std=example_noise_std,
        degrees_of_freedom=degrees_of_freedom,
        l2_clip_norm=l2_clip_norm,
        batch_size=batch_size,
        mean_noise_std=mean_noise_std,
    )
    unclipped = (example_noise_std**2 / batch_size + mean_noise_std**2) * np.eye(len(clipped))
    return clip_fraction * clipped + (1 - clip_fraction) * unclipped


# --- Rates and floors: E f(t) <= f0 e^(-rate t) + (1 - e^(-rate t)) floor; see linear_sde.loss_bound ----------------


def decay_rate(*, pl_constant: Array, shrink_factor: Array = 1.0) -> Array:
    """2 mu h, per unit time (own derivation; h = 1 is the paper's Phase 2). Does not depend on the privacy noise.

    Args:
      pl_constant: mu; > 0 [loss/params^2].   shrink_factor: h; in [0, 1], of a shape that broadcasts.
    Returns: per unit time [loss/params^2].

    >>> decay_rate(pl_constant=0.5)
    1.0
    """
    return 2 * pl_constant * shrink_factor


def floor_bound(
    *,
    learning_rate: Array,
    num_params: int,
    smoothness: float,
    pl_constant: float,
    gradient_noise_std: Array,
    shrink_factor: Array = 1.0,
) -> Array:
    """eta d L s^2 / (4 mu h) (own derivation): a bound, scaling only. With L = mu it is the floor on any quadratic.

    Args:
      learning_rate: eta; > 0 [params^2/loss].   num_params: d; >= 1.
      smoothness, pl_constant: L >= mu > 0 [loss/params^2].
      gradient_noise_std: s, of the private mean gradient, a coordinate; >= 0 [loss/params].   shrink_factor: h; > 0.
    Returns: of the shape to which eta, s and h broadcast [loss].

    >>> floor_bound(learning_rate=0.1, num_params=40, smoothness=1.0, pl_constant=1.0, gradient_noise_std=1.0)
    1.0
    """
    return learning_rate * num_params * smoothness * gradient_noise_std**2 / (4 * pl_constant * shrink_factor)


def decay_rate_phase_1(
    *,
    pl_constant: float,
    num_params: int,
    example_noise_std: float,
    degrees_of_freedom: float,
    l2_clip_norm: float,
) -> float:
    """2 mu C K(nu)/(sigma sqrt d), every example clipped (paper, proof of Thm lossbound_sgd_formal).

    Args:
      pl_constant: mu; > 0 [loss/params^2].   num_params: d; >= 1.
      example_noise_std, degrees_of_freedom, l2_clip_norm: sigma, nu and C, as `drift_phase_1`.
    Returns: per unit time; () [loss/params^2].
    Raises: as `drift_phase_1`.
    Valid when: G^2 << d sigma^2 and C << sigma sqrt d.

    >>> decay_rate_phase_1(pl_constant=1.0, num_params=4, example_noise_std=1.0, degrees_of_freedom=np.inf,
    ...                    l2_clip_norm=1.0)
    1.0
    """
    shrink = l2_clip_norm * normalised_gradient_factor_as_printed(
        num_params=num_params, example_noise_std=example_noise_std, degrees_of_freedom=degrees_of_freedom
    )
    return decay_rate(pl_constant=pl_constant, shrink_factor=shrink)


def decay_rate_phase_1_as_printed(
    *, pl_constant: float, num_params: int, example_noise_std: float, l2_clip_norm: float
) -> float:
    """mu C/(sigma sqrt d): the printed theorem drops 2 K(nu) (paper, Thm lossbound_sgd, Phase 1).

    Args and Returns: as `decay_rate_phase_1`, sigma > 0.

    >>> decay_rate_phase_1_as_printed(pl_constant=1.0, num_params=4, example_noise_std=1.0, l2_clip_norm=1.0)
    0.5
    """
    return pl_constant * l2_clip_norm / (example_noise_std * num_params**0.5)


def floor_phase_1(
    *,
    learning_rate: Array,
    num_params: int,
    smoothness: float,
    pl_constant: float,
    example_noise_std: float,
    degrees_of_freedom: float,
    l2_clip_norm: float,
    batch_size: float,
    noise_multiplier: Array,
) -> Array:
    """eta d^(3/2) L sigma C/(4 mu K(nu)) (1/(B d) + z^2/B^2): a bound, scaling only (paper, same proof, Phase 1).

    Args:
      learning_rate, num_params, smoothness, pl_constant: as `floor_bound`.
      example_noise_std, degrees_of_freedom, l2_clip_norm: sigma, nu and C, as `drift_phase_1`.
      batch_size: B; > 0.   noise_multiplier: z; >= 0.
    Returns: of the shape to which eta and z broadcast [loss].
    Raises: ValueError for degrees_of_freedom <= 0.

    >>> floor_phase_1(learning_rate=0.1, num_params=1, smoothness=1.0, pl_constant=1.0, example_noise_std=1.0,
    ...               degrees_of_freedom=np.inf, l2_clip_norm=2.0, batch_size=1, noise_multiplier=1.0)
    0.1
    """
    printed = floor_phase_1_as_printed(
        learning_rate=learning_rate,
        num_params=num_params,
        smoothness=smoothness,
        pl_constant=pl_constant,
        example_noise_std=example_noise_std,
        l2_clip_norm=l2_clip_norm,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
    )
    return printed / (4 * student_scale_factor(degrees_of_freedom))


def floor_phase_1_as_printed(
    *,
    learning_rate: Array,
    num_params: int,
    smoothness: float,
    pl_constant: float,
    example_noise_std: float,
    l2_clip_norm: float,
    batch_size: float,
    noise_multiplier: Array,
) -> Array:
    """eta d^(3/2) L C sigma/mu (1/(B d) + z^2/B^2): the printed theorem drops 1/(4 K(nu)) (Thm lossbound_sgd).

    Bound, scaling only. The paper's T Phi^2/epsilon^2 is z^2 here.

    Args and Returns: as `floor_phase_1`.

    >>> floor_phase_1_as_printed(learning_rate=0.1, num_params=1, smoothness=1.0, pl_constant=1.0,
    ...     example_noise_std=1.0, l2_clip_norm=2.0, batch_size=1, noise_multiplier=1.0)
    0.4
    """
    noise = 1 / (batch_size * num_params) + (noise_multiplier / batch_size) ** 2
    scale = learning_rate * num_params**1.5 * smoothness * l2_clip_norm * example_noise_std
    return scale / pl_constant * noise


def decay_rate_phase_2(*, pl_constant: float) -> float:
    """2 mu, no example clipped (paper, proof of Thm lossbound_sgd_formal).

    Args:
      pl_constant: mu; > 0 [loss/params^2].
    Returns: per unit time; () [loss/params^2].

    >>> decay_rate_phase_2(pl_constant=0.5)
    1.0
    """
    return decay_rate(pl_constant=pl_constant)


def decay_rate_phase_2_as_printed(*, pl_constant: float) -> float:
    """mu: the printed theorem drops the 2 (paper, Thm lossbound_sgd, Phase 2).

    Args and Returns: as `decay_rate_phase_2`.

    >>> decay_rate_phase_2_as_printed(pl_constant=0.5)
    0.5
    """
    return pl_constant


def floor_phase_2(
    *, learning_rate: Array, num_params: int, smoothness: float, pl_constant: float, gradient_noise_std: Array
) -> Array:
    """eta d L s^2/(4 mu), s = `phase_2_noise_std`: a bound, scaling only (paper, proof of Thm lossbound_sgd_formal).

    Args and Returns: as `floor_bound`, with h = 1.

    >>> floor_phase_2(learning_rate=0.1, num_params=40, smoothness=1.0, pl_constant=1.0, gradient_noise_std=1.0)
    1.0
    """
    return floor_bound(
        learning_rate=learning_rate,
        num_params=num_params,
        smoothness=smoothness,
        pl_constant=pl_constant,
        gradient_noise_std=gradient_noise_std,
    )


def floor_phase_2_as_printed(
    *, learning_rate: Array, num_params: int, smoothness: float, pl_constant: float, gradient_noise_std: Array
) -> Array:
    """eta d L s^2/mu: the printed theorem drops the 1/4 (paper, Thm lossbound_sgd, Phase 2). Bound, scaling only.

    Args and Returns: as `floor_phase_2`.

    >>> floor_phase_2_as_printed(learning_rate=0.1, num_params=10, smoothness=1.0, pl_constant=1.0,
    ...                          gradient_noise_std=1.0)
    1.0
    """
    return learning_rate * num_params * smoothness * gradient_noise_std**2 / pl_constant


# --- Gradient-norm bound ------------------------------------------------------------------------------------------


def gradient_norm_constants(
    *,
    num_params: int,
    example_noise_std: float,
    degrees_of_freedom: float,
    l2_clip_norm: float,
    batch_size: float,
) -> tuple[float, float]:
    """K_1 = max(1, sigma sqrt d/(C K(nu))), K_2 = max(C^2/(B d), sigma^2/B) (paper, Thm gradbound_sgd_formal).

    Args:
      num_params: d; >= 1.   batch_size: B; > 0.
      example_noise_std, degrees_of_freedom, l2_clip_norm: sigma, nu and C, as `drift_phase_1`.
    Returns: K_1 >= 1 (no unit) and K_2 [loss^2/params^2].
    Raises: ValueError for degrees_of_freedom <= 0.

    >>> gradient_norm_constants(num_params=4, example_noise_std=1.0, degrees_of_freedom=np.inf, l2_clip_norm=1.0,
    ...                         batch_size=2)
    (2.0, 0.5)
    """
    k = student_scale_factor(degrees_of_freedom)
    k1 = max(1.0, example_noise_std * num_params**0.5 / (l2_clip_norm * k))
    return k1, max(l2_clip_norm**2 / num_params, example_noise_std**2) / batch_size


def gradient_norm_bound(
    *,
    initial_loss: float,
    learning_rate: Array,
    num_steps: Array,
    curvature_trace: float,
    k1: float,
    k2: float,
    mean_noise_std: Array,
) -> Array:
    """K_1 (f0/(eta T) + eta d L/2 (K_2 + C^2 z^2/B^2)) >= mean over steps of E||grad f||^2 (Thm gradbound_sgd_formal).

    Bound, scaling only, of the SDE: of the algorithm's mean divide by 1 - eta L/2, as a step of length eta overshoots.
    h K_1 <= 1 (Jensen), so with partial clipping it may fall short by up to that factor.

    Args:
      initial_loss: f0 - f*; >= 0 [loss].   learning_rate: eta; > 0 [params^2/loss].   num_steps: T; > 0.
      curvature_trace: d L as in the paper, or the sharper Tr H [loss/params^2].
      k1, k2: of `gradient_norm_constants`.   mean_noise_std: C z/B; >= 0 [loss/params].
    Returns: of the shape to which eta, T and the noise broadcast [loss^2/params^2].

    >>> gradient_norm_bound(initial_loss=1.0, learning_rate=0.1, num_steps=10, curvature_trace=20.0, k1=1.0, k2=0.5,
    ...                     mean_noise_std=0.0)
    1.5
    """
    noise = learning_rate * curvature_trace / 2 * (k2 + mean_noise_std**2)
    return k1 * (initial_loss / (learning_rate * num_steps) + noise)


def gradient_norm_bound_as_printed(
    *,
    initial_loss: float,
    learning_rate: Array,
    num_steps: Array,
    curvature_trace: float,
    k1: float,
    k2: float,
    mean_noise_std: Array,
) -> Array:
    """K_1 (f0/(eta T) + eta d L (K_2 + C^2 z^2/B^2)): the main text drops the 1/2 (paper, Thm gradbound_sgd).

    Args and Returns: as `gradient_norm_bound`; the main text's K_1 also drops K(nu). Bound, scaling only.

    >>> gradient_norm_bound_as_printed(initial_loss=1.0, learning_rate=0.1, num_steps=10, curvature_trace=20.0,
    ...                                k1=1.0, k2=0.5, mean_noise_std=0.0)
    2.0
    """
    noise = learning_rate * curvature_trace * (k2 + mean_noise_std**2)
    return k1 * (initial_loss / (learning_rate * num_steps) + noise)


DP_SGD = OptimizerTheory(
    name="DP-SGD",
    drift=drift,
    noise_gain=noise_gain,
    effective_learning_rate=lambda learning_rate, noise_std: learning_rate,
    noise_penalty=1.0,
    closure=SGD_CLOSURE,
)
