"""The loss of every optimizer on a quadratic in closed form, eigenvalue by eigenvalue: of its steps and in the limit.

An optimizer enters by its effective learning rate eta_e, its shrink factor h and its noise penalty phi alone. NumPy,
float64.
"""

from typing import Any

import numpy as np

Array = Any


def local_quadratic_loss(
    num_steps: Array,
    *,
    initial_loss: float,
    signal_eigenvalues: Array,
    signal_squared_gradients: Array,
    noise_eigenvalues: Array,
    noise_multiplicities: Array,
    shrink_factor: float,
    learning_rate: float,
    noise_penalty: float,
    gradient_noise_std: float,
) -> Array:
    """E f after k steps on the quadratic that osculates f at x0, each optimizer through eta_e and phi (own derivation).

        E f(k) = f0 + sum_i g_i^2 (-a_i + lambda_i a_i^2/2) + sum_j n_j lambda_j v_j/2,   r = 1 - eta_e h lambda,
        a_i = (1 - r_i^k)/lambda_i,   v_j = phi eta_e^2 s^2 (1 - r_j^(2k))/(1 - r_j^2).

    Exact for DP-SGD without clipping, low signal-to-noise ratio for the others. With Sigma_k(r) = sum_{l<k} r^(2l) it
    is f0 - eta_e h/2 sum g^2 (1 + r) Sigma_k + phi eta_e^2 s^2/2 sum n lambda Sigma_k, which no limit upsets.

    Args:
      num_steps: k, whole numbers; any shape.
      initial_loss: f(x0) [loss].
      signal_eigenvalues: lambda_i; (m,), any sign [loss/params^2].
      signal_squared_gradients: g_i^2, squared components of grad f(x0) in the eigenbasis; (m,) [loss^2/params^2].
      noise_eigenvalues, noise_multiplicities: lambda_j and n_j, the spectrum of H with sum n = d; (p,).
      shrink_factor: h; in [0, 1].   learning_rate: eta_e, effective; >= 0 [params^2/loss].   noise_penalty: phi; > 0.
      gradient_noise_std: s, of the private mean gradient per coordinate; >= 0 [loss/params].
    Returns: shape of num_steps [loss]; inf where it diverges, -inf where f has no minimum.

    >>> float(local_quadratic_loss(10**6, initial_loss=0.5, signal_eigenvalues=[1.0], signal_squared_gradients=[1.0],
    ...     noise_eigenvalues=[1.0], noise_multiplicities=[4], shrink_factor=1.0, learning_rate=1e-3,
    ...     noise_penalty=1.0, gradient_noise_std=2.0).round(6))                     # eta d s^2/4 (1 + eta lambda/2)
    0.004002
    """
    g2 = np.asarray(signal_squared_gradients, dtype=float)
    x = learning_rate * shrink_factor * np.asarray(signal_eigenvalues, dtype=float)
    noise_eigenvalues = np.asarray(noise_eigenvalues, dtype=float)
    curvature = np.asarray(noise_multiplicities) * noise_eigenvalues
    with np.errstate(over="ignore", invalid="ignore"):
        signal = _weighted_sum(g2 * (2 - x), sum_of_squared_powers(num_steps, x))
        noise = _weighted_sum(
            curvature, sum_of_squared_powers(num_steps, learning_rate * shrink_factor * noise_eigenvalues)
        )
        loss = (
            initial_loss
            - learning_rate * shrink_factor / 2 * signal
            + noise_penalty * (learning_rate * gradient_noise_std) ** 2 / 2 * noise
        )
    return np.where(np.isnan(loss), np.inf, loss)[()]


def local_quadratic_gradient_norm_squared(
    num_steps: Array,
    *,
    signal_eigenvalues: Array,
    signal_squared_gradients: Array,
    noise_eigenvalues: Array,
    noise_multiplicities: Array,
    shrink_factor: float,
    learning_rate: float,
    noise_penalty: float,
    gradient_noise_std: float,
) -> Array:
    """E||grad f||^2 after k steps, sum_i g_i^2 r_i^(2k) + sum_j n_j lambda_j^2 v_j; see `local_quadratic_loss`.

    Args: as `local_quadratic_loss`.
    Returns: shape of num_steps [loss^2/params^2]; inf where it overflows.

    >>> float(local_quadratic_gradient_norm_squared(0, signal_eigenvalues=[1.0], signal_squared_gradients=[3.0],
    ...     noise_eigenvalues=[1.0], noise_multiplicities=[4], shrink_factor=1.0, learning_rate=1e-3,
    ...     noise_penalty=1.0, gradient_noise_std=2.0))
    3.0
    """
    g2, rate = np.asarray(signal_squared_gradients, dtype=float), learning_rate * shrink_factor
    noise_eigenvalues = np.asarray(noise_eigenvalues, dtype=float)
    curvature = np.asarray(noise_multiplicities) * noise_eigenvalues**2
    with np.errstate(over="ignore", invalid="ignore"):
        exponent = _log_power(num_steps, rate * np.asarray(signal_eigenvalues, dtype=float))
        signal = _weighted_sum(g2, np.exp(exponent))
        noise = _weighted_sum(curvature, sum_of_squared_powers(num_steps, rate * noise_eigenvalues))
        return (signal + noise_penalty * (learning_rate * gradient_noise_std) ** 2 * noise)[()]


def local_quadratic_curvature_loss(
    num_steps: Array,
    *,
    signal_eigenvalues: Array,
    signal_squared_gradients: Array,
    noise_eigenvalues: Array,
    noise_multiplicities: Array,
    shrink_factor: float,
    learning_rate: float,
    noise_penalty: float,
    gradient_noise_std: float,
) -> Array:
    """1/2 E u'|H|u after k steps, u = x - x0: how much of `local_quadratic_loss` leans on the curvature at x0.

    sum_i g_i^2 |lambda_i| a_i^2/2 + sum_j n_j |lambda_j| v_j/2. Where the loss is not itself quadratic, its third order
    is small only while this is a small part of f0.

    Args: as `local_quadratic_loss`.
    Returns: shape of num_steps [loss], >= 0; inf where it overflows.

    >>> float(local_quadratic_curvature_loss(1, signal_eigenvalues=[1.0], signal_squared_gradients=[4.0],
    ...     noise_eigenvalues=[1.0], noise_multiplicities=[1], shrink_factor=1.0, learning_rate=0.5,
    ...     noise_penalty=1.0, gradient_noise_std=0.0))                                        # u = -1
    0.5
    """
    lam, rate = np.asarray(signal_eigenvalues, dtype=float), learning_rate * shrink_factor
    noise_eigenvalues = np.asarray(noise_eigenvalues, dtype=float)
    k = np.asarray(num_steps, dtype=float)[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        travelled = 1 - (1 - rate * lam) ** k
        safe = np.where(lam == 0, 1.0, np.abs(lam))
        signal = _weighted_sum(
            np.asarray(signal_squared_gradients, dtype=float), np.where(lam == 0, 0.0, travelled**2 / safe)
        )
        curvature = np.asarray(noise_multiplicities) * np.abs(noise_eigenvalues)
        noise = _weighted_sum(curvature, sum_of_squared_powers(num_steps, rate * noise_eigenvalues))
        return (signal + noise_penalty * (learning_rate * gradient_noise_std) ** 2 * noise)[()] / 2


def _weighted_sum(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """sum over the last axis, where 0 * inf is 0."""
    return np.sum(np.where(weights == 0, 0.0, weights * values), axis=-1)


def _log_power(num_steps: Array, x: np.ndarray) -> np.ndarray:
    """log (1 - x)^(2k); shape of num_steps + shape of x."""
    k = np.asarray(num_steps, dtype=float)[..., None]
    return np.where(k == 0, 0.0, 2 * np.maximum(k, 1.0) * _log_abs(x))


def _log_abs(x: np.ndarray) -> np.ndarray:
    """log|1 - x|, accurate near x = 0 and x = 2, where |1 - x| = 1."""
    with np.errstate(divide="ignore"):
        return np.where(x < 1, np.log1p(-np.minimum(x, 1.0)), np.log1p(np.maximum(x, 1.0) - 2))


def sum_of_squared_powers(num_steps: Array, x: np.ndarray) -> np.ndarray:
    """sum_{l<k} (1 - x)^(2l) = (1 - r^(2k))/(1 - r^2), k where |r| = 1.

    Args:
      num_steps: k; any shape, >= 0.   x: (m,), or of a shape to whose last axis that of num_steps broadcasts.
    Returns: of the shape of num_steps with one axis more, broadcast against x.

    >>> sum_of_squared_powers(2, np.array([0.0, 0.5, 2.0]))
    array([2.  , 1.25, 2.  ])
    """
    log_r2 = 2 * _log_abs(x)
    k = np.asarray(num_steps, dtype=float)[..., None]
    still = log_r2 == 0
    total = np.expm1(_log_power(num_steps, x)) / np.expm1(np.where(still, 1.0, log_r2))
    return np.where(still, k, total)


def spectral_loss(
    time: Array,
    *,
    eigenvalues: Array,
    initial_params: Array,
    shrink_factor: float,
    learning_rate: float,
    noise_penalty: float,
    gradient_noise_std: float,
) -> Array:
    """sum_i [lambda_i c_i^2/2 e^(-2 h lambda_i s) + phi eta_e S^2/(4h) (1 - e^(-2 h lambda_i s))], the linear E f.

    Own derivation; s = eta_e k is the effective time, c the distance from the minimum in the eigenbasis. The SDE limit
    of `local_quadratic_loss`, relative error eta_e h lambda/2.

    Args:
      time: effective time eta_e * k; any shape.
      eigenvalues, initial_params: lambda and c; (d,).
      shrink_factor, learning_rate (eta_e), noise_penalty, gradient_noise_std: as in `local_quadratic_loss`.

    Returns: shape of time [loss]; at lambda = 0 and h = 0 the limits, 0 and phi eta_e S^2 lambda s/2 of noise.

    >>> float(spectral_loss(np.inf, eigenvalues=np.ones(4), initial_params=np.ones(4), shrink_factor=1.0,
    ...     learning_rate=0.1, noise_penalty=1.0, gradient_noise_std=1.0))                      # eta d s^2/4
    0.1
    """
    lam, t = np.asarray(eigenvalues, dtype=float), np.asarray(time, dtype=float)[..., None]
    rate = 2 * shrink_factor * lam
    with np.errstate(over="ignore", invalid="ignore"):  # 0 * inf, at lambda = 0 or h = 0 and t = inf
        exponent = np.where(rate == 0, 0.0, -rate * t)
        elapsed = np.where(rate == 0, t, np.expm1(exponent) / np.where(rate == 0, 1.0, -rate))
        signal = _weighted_sum(lam * np.asarray(initial_params) ** 2 / 2, np.exp(exponent))
        return signal + noise_penalty * learning_rate * gradient_noise_std**2 / 2 * _weighted_sum(lam, elapsed)
