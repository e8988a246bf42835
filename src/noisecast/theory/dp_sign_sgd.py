"""DP-SignSGD: x <- x - eta sign(g), with g the private mean gradient. Its SDE, rates, floors and bounds.

Time is t = step * learning_rate. Losses are excess losses f - f*. Bounds assume f mu-PL and L-smooth, and the low
signal-to-noise ratio at which erf is linear; erf(z) <= 2 z/sqrt(pi), so elsewhere they are too optimistic.
`_as_printed` is the paper's text where it drops constants or errs; the plain name is the corrected form. The paper's
K_4 (mixed phases) is left out: it ignores the batch noise inside the sign.
"""

import math
from typing import Any

import numpy as np

from noisecast.theory._namespace import special_and_math
from noisecast.theory.clipping import phase_1_noise_std
from noisecast.theory.closures import SIGN_CLOSURE
from noisecast.theory.gaussian import expected_sign, normalised_gradient_factor_as_printed, student_scale_factor
from noisecast.theory.optimizer_theory import GradientMoments, OptimizerTheory

Array = Any
SLOPE = math.sqrt(2 / math.pi)  # d E[sign(m + s Z)] / d(m/s) at m = 0

# --- The SDE, over all phases -------------------------------------------------------------------------------------


def drift(moments: GradientMoments, state: Any = None) -> Array:
    """-E sign(g): drift_i = -sum_k w_k erf(r_k mean_i / (sqrt2 s)); -sign(mean) where s = 0. (d,), no unit.

    Own derivation, unified over the paper's phases; r and w are the scale mixture of `sign_scale_mixture`.

    Args:
      moments: of the private mean gradient; mean (d,), noise_std () or (d,) [loss/params].
      state: none, DP-SignSGD remembers nothing.
    Returns: (d,) in [-1, 1], no unit.

    >>> drift(GradientMoments(mean=np.array([50.0, 0.0]), noise_std=1.0))
    array([-1., -0.])
    """
    xp, sp = special_and_math(moments.mean, moments.noise_std, moments.snr_factors, moments.snr_weights)
    noisy = moments.noise_std > 0
    argument = moments.mean / (math.sqrt(2) * xp.where(noisy, moments.noise_std, 1.0))
    expected = sum(
        weight * sp.erf(factor * argument)
        for factor, weight in zip(moments.snr_factors, moments.snr_weights, strict=True)
    )
    return -xp.where(noisy, expected, xp.sign(moments.mean))


def noise_gain(moments: GradientMoments, state: Any = None) -> Array:
    """sqrt(1 - drift^2)/s: a sign has variance 1 - (E sign)^2; 0 where s = 0. (d,) [params/loss].

    Args: as `drift`.
    Returns: (d,) >= 0 [params/loss].

    >>> noise_gain(GradientMoments(mean=np.zeros(1), noise_std=0.5))
    array([2.])
    """
    xp, _ = special_and_math(moments.mean, moments.noise_std, moments.snr_factors, moments.snr_weights)
    noisy = moments.noise_std > 0
    std = xp.sqrt(xp.maximum(1 - drift(moments) ** 2, 0.0))
    return xp.where(noisy, std / xp.where(noisy, moments.noise_std, 1.0), 0.0)


# --- The SDE in the paper's phases --------------------------------------------------------------------------------


def sign_noise_variance(drift: Array) -> Array:
    """1 - drift^2, the diagonal of Cov sign(g), in every phase; its sum is at most d (paper, Cor. actual_sdes).

    Args:
      drift: of any phase; (d,) in [-1, 1].
    Returns: (d,) in [0, 1].

    >>> sign_noise_variance(np.array([0.0, -1.0]))
    array([1., 0.])
    """
    return 1 - np.asarray(drift) ** 2


def drift_given_batch_gradients(batch_gradients: Array, *, mean_noise_std: float) -> Array:
    """-E_batch erf(G / (sqrt2 mean_noise_std)), exactly, over samples of the clipped mean gradient G.

    Phase 1 (paper, Thm sdesign: G = C u) and the mixed phase (Thm mixed_phase_L_smooth_sign) are both of this form.

    Args:
      batch_gradients: G without privacy noise; (n, d) [loss/params].
      mean_noise_std: C z/B; >= 0 [loss/params].
    Returns: (d,).

    >>> drift_given_batch_gradients(np.array([[1.0], [-1.0], [1.0], [1.0]]), mean_noise_std=0.0)
    array([-0.5])
    """
    return -np.mean(expected_sign(batch_gradients, mean_noise_std), axis=0)


def drift_phase_1(
    gradient: Array,
    *,
    example_noise_std: float,
    degrees_of_freedom: float,
    batch_size: float,
    noise_multiplier: float,
) -> Array:
    """-erf(m/(sqrt2 s_1)), m = K grad f/(sigma sqrt d), s_1^2 = 1/(d B) + z^2/B^2: every example clipped.

    Corrects Cor. actual_sdes of the paper, which drops the batch noise 1/(d B). The clip norm cancels.

    Args:
      gradient: grad f; (d,) [loss/params].
      example_noise_std: sigma, scale of the noise per example and coordinate; > 0 [loss/params].
      degrees_of_freedom: nu; > 0, inf for Gaussian noise.   batch_size: B; > 0.   noise_multiplier: z; >= 0.
    Returns: (d,) in [-1, 1], no unit.
    Raises: ValueError for example_noise_std <= 0 or degrees_of_freedom <= 0.
    Valid when: ||grad f||^2 << d sigma^2.

    >>> drift_phase_1(np.full(100, 1e3), example_noise_std=1.0, degrees_of_freedom=1.0, batch_size=1,
    ...               noise_multiplier=0.1)[:2]
    array([-1., -1.])
    """
    mean, std = _phase_1_snr(gradient, example_noise_std, degrees_of_freedom, batch_size, noise_multiplier)
    return -expected_sign(mean, std)


def drift_phase_1_linear(
    gradient: Array,
    *,
    example_noise_std: float,
    degrees_of_freedom: float,
    batch_size: float,
    noise_multiplier: float,
) -> Array:
    """-sqrt(2/pi) m/s_1: `drift_phase_1` to first order in the signal.

    Args and Raises: as `drift_phase_1`.
    Returns: (d,), no unit; beyond +-1 where the signal is not small.

    >>> drift_phase_1_linear(np.zeros(2), example_noise_std=1.0, degrees_of_freedom=1.0, batch_size=1,
    ...                      noise_multiplier=1.0)
    array([-0., -0.])
    """
    mean, std = _phase_1_snr(gradient, example_noise_std, degrees_of_freedom, batch_size, noise_multiplier)
    return -SLOPE * mean / std


def _phase_1_snr(gradient: Array, sigma: float, nu: float, batch_size: float, noise_multiplier: float):
    gradient = np.asarray(gradient, dtype=float)
    d = gradient.size
    a = normalised_gradient_factor_as_printed(num_params=d, example_noise_std=sigma, degrees_of_freedom=nu)
    std = phase_1_noise_std(
        num_params=d, l2_clip_norm=1.0, batch_size=batch_size, mean_noise_std=noise_multiplier / batch_size
    )
    return a * gradient, std


def drift_phase_1_linear_as_printed(
    gradient: Array,
    *,
    example_noise_std: float,
    degrees_of_freedom: float,
    batch_size: float,
    noise_multiplier: float,
) -> Array:
    """-sqrt(2/(d pi)) B K(nu)/(z sigma) grad f (paper, Cor. actual_sdes, Phase 1).

    Args: as `drift_phase_1`, z > 0.
    Returns: (d,), no unit.
    Raises: ValueError for degrees_of_freedom <= 0.
    Valid when: also B/d << z^2; it diverges as z -> 0, where the batch noise that it drops keeps the truth finite.

    >>> drift_phase_1_linear_as_printed(np.ones(1), example_noise_std=1.0, degrees_of_freedom=np.inf, batch_size=1,
    ...                                 noise_multiplier=1.0).round(6)
    array([-0.797885])
    """
    gradient = np.asarray(gradient, dtype=float)
    k = student_scale_factor(degrees_of_freedom)
    slope = SLOPE / math.sqrt(gradient.size) * batch_size * k / (noise_multiplier * example_noise_std)
    return -slope * gradient


def drift_phase_2(gradient: Array, *, gradient_noise_std: Array) -> Array:
    """-erf(grad f/(sqrt2 s)), s = `phase_2_noise_std`: no example clipped (paper, Thm sdesign, Phase 2).

    Args:
      gradient: grad f; (d,) [loss/params].   gradient_noise_std: s; () or (d,), >= 0 [loss/params].
    Returns: (d,) in [-1, 1], no unit; the sign of -grad f where s = 0.

    >>> drift_phase_2(np.array([0.0, 9.0]), gradient_noise_std=1.0)
    array([-0., -1.])
    """
    return -expected_sign(gradient, gradient_noise_std)


def drift_phase_2_linear(gradient: Array, *, gradient_noise_std: Array) -> Array:
    """-sqrt(2/pi) grad f/s (paper, Cor. actual_sdes, Phase 2). Valid when: |grad_i f| << s.

    Args: as `drift_phase_2`, s > 0.
    Returns: (d,), no unit; beyond +-1 where the signal is not small.

    >>> drift_phase_2_linear(np.array([1.0]), gradient_noise_std=1.0).round(6)
    array([-0.797885])
    """
    return -SLOPE * np.asarray(gradient, dtype=float) / gradient_noise_std


def drift_mixed_linear_as_printed(
    gradient: Array,
    *,
    clip_fraction: float,
    example_noise_std: float,
    degrees_of_freedom: float,
    l2_clip_norm: float,
    batch_size: float,
    noise_multiplier: float,
) -> Array:
    """-(p a_1 + (1 - p) a_2) grad f, a_1 as in Phase 1, a_2 = sqrt(2/pi) B/(C z) (Thm mixed_phase_L_smooth_sign).

    Wrong, kept only to be compared: it ignores the batch noise inside the sign and exceeds the true slope without
    limit as z -> 0. Use `drift`.

    Args:
      clip_fraction: p, share of the examples that are clipped; in [0, 1].   l2_clip_norm: C; > 0 [loss/params].
      noise_multiplier: z; > 0.   The others: as `drift_phase_1`.
    Returns: (d,), no unit.
    Raises: ValueError for degrees_of_freedom <= 0.

    >>> drift_mixed_linear_as_printed(np.ones(1), clip_fraction=0.0, example_noise_std=1.0, degrees_of_freedom=1.0,
    ...     l2_clip_norm=1.0, batch_size=1, noise_multiplier=1.0).round(6)
    array([-0.797885])
    """
    clipped = drift_phase_1_linear_as_printed(
        gradient,
        example_noise_std=example_noise_std,
        degrees_of_freedom=degrees_of_freedom,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
    )
    noise_std = l2_clip_norm * noise_multiplier / batch_size
    unclipped = drift_phase_2_linear(gradient, gradient_noise_std=noise_std)
    return clip_fraction * clipped + (1 - clip_fraction) * unclipped


# --- Rates and floors: E f(t) <= f0 e^(-rate t) + (1 - e^(-rate t)) floor; see linear_sde.loss_bound ----------------


def decay_rate(*, pl_constant: Array, gradient_noise_std: Array, shrink_factor: Array = 1.0) -> Array:
    """2 mu h sqrt(2/pi)/s, per unit time (own derivation; h = 1 is the paper's Phase 2). Falls as the noise grows.

    Args:
      pl_constant: mu; > 0 [loss/params^2].   shrink_factor: h; in [0, 1].
      gradient_noise_std: s, of the private mean gradient per coordinate; > 0 [loss/params].
    Returns: per unit time, of the shape to which they broadcast [1/params].

    >>> round(decay_rate(pl_constant=0.5, gradient_noise_std=1.0), 6)
    0.797885
    """
    return 2 * pl_constant * shrink_factor * SLOPE / gradient_noise_std


def floor_bound(
    *,
    learning_rate: Array,
    num_params: int,
    smoothness: float,
    pl_constant: float,
    gradient_noise_std: Array,
    shrink_factor: Array = 1.0,
) -> Array:
    """sqrt(pi/2) eta d L s/(4 mu h) (own derivation): a bound, scaling only. With L = mu: the floor on any quadratic.

    Args:
      learning_rate: eta; > 0 [params].   num_params: d; >= 1.   smoothness, pl_constant: L >= mu > 0 [loss/params^2].
      gradient_noise_std: s; >= 0 [loss/params].   shrink_factor: h; in (0, 1].
    Returns: of the shape to which eta, s and h broadcast [loss].

    >>> round(floor_bound(learning_rate=0.1, num_params=40, smoothness=1, pl_constant=1, gradient_noise_std=1.0), 6)
    1.253314
    """
    scale = learning_rate * num_params * smoothness * gradient_noise_std
    return math.sqrt(math.pi / 2) * scale / (4 * pl_constant * shrink_factor)


def decay_rate_phase_1(
    *,
    pl_constant: float,
    num_params: int,
    example_noise_std: float,
    degrees_of_freedom: float,
    batch_size: float,
    noise_multiplier: float,
) -> float:
    """2 mu sqrt(2/pi) K/(sigma sqrt d)/s_1, s_1^2 = 1/(d B) + z^2/B^2: every example clipped. The clip norm cancels.

    Corrects Thm lossbound_sign_formal, which drops the batch noise 1/(d B).

    Args:
      pl_constant: mu; > 0 [loss/params^2].   num_params: d; >= 1.
      example_noise_std, degrees_of_freedom, batch_size, noise_multiplier: sigma, nu, B and z, as `drift_phase_1`.
    Returns: per unit time; () [1/params].
    Raises: as `drift_phase_1`.

    >>> round(decay_rate_phase_1(pl_constant=0.5, num_params=1, example_noise_std=1.0, degrees_of_freedom=math.inf,
    ...                          batch_size=1, noise_multiplier=0.0), 6)
    0.797885
    """
    mean, std = _phase_1_unit_snr(num_params, example_noise_std, degrees_of_freedom, batch_size, noise_multiplier)
    return decay_rate(pl_constant=pl_constant, gradient_noise_std=std, shrink_factor=mean)


def _phase_1_unit_snr(d: int, sigma: float, nu: float, batch_size: float, noise_multiplier: float):
    """h/C and s/C in Phase 1."""
    shrink = normalised_gradient_factor_as_printed(num_params=d, example_noise_std=sigma, degrees_of_freedom=nu)
    std = phase_1_noise_std(
        num_params=d, l2_clip_norm=1.0, batch_size=batch_size, mean_noise_std=noise_multiplier / batch_size
    )
    return shrink, std


def floor_phase_1(
    *,
    learning_rate: Array,
    num_params: int,
    smoothness: float,
    pl_constant: float,
    example_noise_std: float,
    degrees_of_freedom: float,
    batch_size: float,
    noise_multiplier: float,
) -> Array:
    """eta d L/(2 rate) with `decay_rate_phase_1`: a bound, scaling only. Corrects Thm lossbound_sign_formal.

    Args:
      learning_rate, num_params, smoothness, pl_constant: as `floor_bound`.
      example_noise_std, degrees_of_freedom, batch_size, noise_multiplier: sigma, nu, B and z, as `drift_phase_1`.
    Returns: shape of eta [loss].
    Raises: as `drift_phase_1`.

    >>> round(floor_phase_1(learning_rate=0.1, num_params=1, smoothness=1.0, pl_constant=1.0, example_noise_std=1.0,
    ...                     degrees_of_freedom=math.inf, batch_size=1, noise_multiplier=0.0), 6)
    0.031333
    """
    rate = decay_rate_phase_1(
        pl_constant=pl_constant,
        num_params=num_params,
        example_noise_std=example_noise_std,
        degrees_of_freedom=degrees_of_freedom,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
    )
    return learning_rate * num_params * smoothness / (2 * rate)


def decay_rate_phase_1_as_printed(
    *, pl_constant: float, num_params: int, example_noise_std: float, batch_size: float, noise_multiplier: Array
) -> Array:
    """mu B/(sigma sqrt d z): the printed theorem drops 2 sqrt(2/pi) K(nu) and the batch noise (Thm lossbound_sign).

    Args and Returns: as `decay_rate_phase_1`, z > 0 of any shape.

    >>> decay_rate_phase_1_as_printed(pl_constant=1.0, num_params=4, example_noise_std=1.0, batch_size=2,
    ...                               noise_multiplier=1.0)
    1.0
    """
    return pl_constant * batch_size / (example_noise_std * math.sqrt(num_params) * noise_multiplier)


def floor_phase_1_as_printed(
    *,
    learning_rate: Array,
    num_params: int,
    smoothness: float,
    pl_constant: float,
    example_noise_std: float,
    batch_size: float,
    noise_multiplier: Array,
) -> Array:
    """eta L d^(3/2) sigma z/(mu B): the printed theorem drops sqrt(pi/2)/(4 K(nu)) and the batch noise.

    Bound, scaling only (paper, Thm lossbound_sign, Phase 1; its sqrt(T) Phi/epsilon is z here).

    Args and Returns: as `floor_phase_1`, z of any shape.

    >>> floor_phase_1_as_printed(learning_rate=0.5, num_params=4, smoothness=1.0, pl_constant=1.0,
    ...                          example_noise_std=1.0, batch_size=4, noise_multiplier=1.0)
    1.0
    """
    scale = learning_rate * smoothness * num_params**1.5 * example_noise_std
    return scale * noise_multiplier / (pl_constant * batch_size)


def decay_rate_phase_2(*, pl_constant: float, gradient_noise_std: Array) -> Array:
    """2 mu sqrt(2/pi)/s, s = `phase_2_noise_std` (paper, proof of Thm lossbound_sign_formal).

    Args and Returns: as `decay_rate`, with h = 1.

    >>> round(decay_rate_phase_2(pl_constant=0.5, gradient_noise_std=1.0), 6)
    0.797885
    """
    return decay_rate(pl_constant=pl_constant, gradient_noise_std=gradient_noise_std)


def decay_rate_phase_2_as_printed(*, pl_constant: float, gradient_noise_std: Array) -> Array:
    """mu/s: the printed theorem drops 2 sqrt(2/pi) (paper, Thm lossbound_sign, Phase 2).

    Args and Returns: as `decay_rate_phase_2`.

    >>> decay_rate_phase_2_as_printed(pl_constant=0.5, gradient_noise_std=1.0)
    0.5
    """
    return pl_constant / gradient_noise_std


def floor_phase_2(
    *, learning_rate: Array, num_params: int, smoothness: float, pl_constant: float, gradient_noise_std: Array
) -> Array:
    """sqrt(pi/2) eta d L s/(4 mu), s = `phase_2_noise_std`: a bound, scaling only (proof of Thm lossbound_sign_formal).

    Args and Returns: as `floor_bound`, with h = 1.

    >>> round(floor_phase_2(learning_rate=0.1, num_params=40, smoothness=1, pl_constant=1, gradient_noise_std=1), 6)
    1.253314
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
    """eta d L s/mu: the printed theorem drops sqrt(pi/2)/4 (paper, Thm lossbound_sign). Bound, scaling only.

    Args and Returns: as `floor_phase_2`.

    >>> floor_phase_2_as_printed(learning_rate=0.1, num_params=10, smoothness=1, pl_constant=1, gradient_noise_std=1)
    1.0
    """
    return learning_rate * num_params * smoothness * gradient_noise_std / pl_constant


# --- Gradient-norm bound ------------------------------------------------------------------------------------------


def gradient_norm_bound(
    *,
    initial_loss: float,
    learning_rate: Array,
    num_steps: Array,
    curvature_trace: float,
    num_params: int,
    example_noise_std: float,
    degrees_of_freedom: float,
    l2_clip_norm: float,
    batch_size: float,
    noise_multiplier: float,
) -> Array:
    """max(s_1/h_1, s_2) sqrt(pi/2) (f0/(eta T) + eta d L/2) >= mean over steps of E||grad f||^2. Bound, scaling only.

    h_1/s_1 and 1/s_2 are the slopes of Phase 1 and 2. Corrects Thm gradbound_sign_formal (its K_3): the batch noise
    is in s_1, and the 1/2 of its proof is kept.

    Args:
      initial_loss: f0 - f*; >= 0 [loss].   learning_rate: eta; > 0 [params].   num_steps: T; > 0.
      curvature_trace: d L as in the paper, or the sharper Tr H [loss/params^2].   num_params: d; >= 1.
      example_noise_std, degrees_of_freedom, batch_size, noise_multiplier: sigma, nu, B and z, as `drift_phase_1`.
      l2_clip_norm: C; > 0 [loss/params].
    Returns: of the shape to which eta and T broadcast [loss^2/params^2].
    Raises: as `drift_phase_1`.

    >>> round(gradient_norm_bound(initial_loss=1.0, learning_rate=0.1, num_steps=10, curvature_trace=20.0,
    ...     num_params=1, example_noise_std=1.0, degrees_of_freedom=math.inf, l2_clip_norm=1.0, batch_size=1,
    ...     noise_multiplier=0.0), 6)
    2.506628
    """
    shrink, std = _phase_1_unit_snr(num_params, example_noise_std, degrees_of_freedom, batch_size, noise_multiplier)
    phase_2 = math.hypot(example_noise_std / math.sqrt(batch_size), l2_clip_norm * noise_multiplier / batch_size)
    path = initial_loss / (learning_rate * num_steps) + learning_rate * curvature_trace / 2
    return max(std / shrink, phase_2) / SLOPE * path


def gradient_norm_bound_as_printed(
    *,
    initial_loss: float,
    learning_rate: Array,
    num_steps: Array,
    curvature_trace: float,
    num_params: int,
    example_noise_std: float,
    degrees_of_freedom: float,
    l2_clip_norm: float,
    batch_size: float,
    noise_multiplier: float,
) -> Array:
    """K_3 (f0/(eta sqrt T) + eta d L sqrt T)/epsilon, z for the paper's q sqrt(T log(1/delta))/epsilon.

    Bound, scaling only (paper, Thm gradbound_sign_formal). K_3 sqrt(T)/epsilon =
    sqrt(pi/2) max(sqrt(d) sigma z/(B K(nu)), s_2).

    Args, Returns and Raises: as `gradient_norm_bound`.

    >>> round(gradient_norm_bound_as_printed(initial_loss=1.0, learning_rate=0.1, num_steps=10, curvature_trace=20.0,
    ...     num_params=1, example_noise_std=1.0, degrees_of_freedom=math.inf, l2_clip_norm=1.0, batch_size=1,
    ...     noise_multiplier=0.0), 6)
    3.759942
    """
    shrink, _ = _phase_1_unit_snr(num_params, example_noise_std, degrees_of_freedom, batch_size, noise_multiplier)
    phase_2 = math.hypot(example_noise_std / math.sqrt(batch_size), l2_clip_norm * noise_multiplier / batch_size)
    path = initial_loss / (learning_rate * num_steps) + learning_rate * curvature_trace
    return max(noise_multiplier / batch_size / shrink, phase_2) / SLOPE * path


DP_SIGN_SGD = OptimizerTheory(
    name="DP-SignSGD",
    drift=drift,
    noise_gain=noise_gain,
    effective_learning_rate=lambda learning_rate, noise_std: learning_rate * SLOPE / noise_std,
    noise_penalty=math.pi / 2,
    closure=SIGN_CLOSURE,
)
