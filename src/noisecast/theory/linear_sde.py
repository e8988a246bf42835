"""Moments that close: linear SDEs, DP-SGD's algorithm itself, and Gaussian closures of DP-SignSGD, on quadratics.

Quadratic here means f = x^T H x/2 with H = diag(hessian_diag), unless said otherwise; the private mean gradient is
H x + s Z, Z ~ N(0, I). `steps` count updates, `time` is steps * learning_rate. NumPy, float64.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

from noisecast.theory.gaussian import expected_erf, expected_squared_erf, expected_x_erf
from noisecast.theory.local_quadratic import sum_of_squared_powers

Array = Any
SIGN_SLOPE = math.sqrt(2 / math.pi)
STEEPEST = 1e100  # its square is a number


def loss_bound(time: Array, *, initial_loss: Array, decay_rate: Array, floor: Array) -> Array:
    """f0 e^(-rate t) + (1 - e^(-rate t)) floor (paper, all loss theorems): a bound, scaling only, on E f(X_t) - f*.

    An equality of the linearised SDE when H = lambda I (L = mu = lambda).

    Args:
      time: t = step * learning_rate; any shape, >= 0.
      initial_loss: f0 - f*.  decay_rate, floor: of one optimizer and phase (`dp_sgd`, `dp_sign_sgd`, `dp_adam`).
    Returns: of the shape to which all broadcast [loss].

    >>> loss_bound(np.array([0.0, np.inf]), initial_loss=3.0, decay_rate=1.0, floor=2.0)
    array([3., 2.])
    """
    left = np.exp(-np.asarray(decay_rate) * time)
    return initial_loss * left + (1 - left) * floor


# --- DP-SGD -------------------------------------------------------------------------------------------------------


def sgd_moments_sde(
    time: Array, *, initial_params: Array, hessian_diag: Array, gradient_noise_std: float, learning_rate: float
) -> tuple[Array, Array]:
    """x0 e^(-lambda t) and eta s^2/(2 lambda) (1 - e^(-2 lambda t)): the SDE (Thm statdistr_sgd_formal).

    Args:
      time: t = step * learning_rate; >= 0, broadcasts against the coordinates.
      initial_params, hessian_diag: x0 [params] and lambda > 0 [loss/params^2]; (d,).
      gradient_noise_std: s; >= 0 [loss/params].   learning_rate: eta; > 0 [params^2/loss].
    Returns: mean [params], variance [params^2]; of the broadcast shape of time and coordinates.

    >>> sgd_moments_sde(np.inf, initial_params=np.ones(1), hessian_diag=np.ones(1), gradient_noise_std=1.0,
    ...                 learning_rate=0.5)
    (array([0.]), array([0.25]))
    """
    lam = np.asarray(hessian_diag, dtype=float)
    variance = learning_rate * gradient_noise_std**2 / (2 * lam) * -np.expm1(-2 * lam * time)
    return initial_params * np.exp(-lam * time), variance


def sgd_moments(
    steps: Array, *, initial_params: Array, hessian_diag: Array, gradient_noise_std: float, learning_rate: float
) -> tuple[Array, Array]:
    """x0 r^k and eta^2 s^2 (1 - r^(2k))/(1 - r^2), r = 1 - eta lambda: mean and variance of the algorithm, exactly.

    Own derivation; the SDE's variance is smaller by eta lambda/2 relative.

    Args: as `sgd_moments_sde`, steps k for time.
    Returns: mean, variance; of the broadcast shape of steps and coordinates.

    >>> sgd_moments(1, initial_params=np.ones(1), hessian_diag=np.ones(1), gradient_noise_std=1.0, learning_rate=0.5)
    (array([0.5]), array([0.25]))
    """
    k, x = np.asarray(steps), learning_rate * np.asarray(hessian_diag, dtype=float)
    # The sum runs over x's last axis for each number of steps; with one x there it is taken element by element.
    total = sum_of_squared_powers(np.broadcast_to(k, np.broadcast_shapes(k.shape, x.shape)), x[..., None])[..., 0]
    return initial_params * (1 - x) ** steps, (learning_rate * gradient_noise_std) ** 2 * total


def sgd_stationary_variance(*, hessian_diag: Array, gradient_noise_std: float, learning_rate: float) -> Array:
    """eta s^2/(2 lambda - eta lambda^2), exact; inf unless 0 < eta lambda < 2 (the SDE: eta s^2/(2 lambda)).

    Args:
      hessian_diag: lambda; any shape [loss/params^2].   gradient_noise_std: s; >= 0 [loss/params].
      learning_rate: eta; > 0 [params^2/loss].
    Returns: shape of hessian_diag [params^2].

    >>> sgd_stationary_variance(hessian_diag=np.array([1.0, 5.0]), gradient_noise_std=1.0, learning_rate=0.5)
    array([0.33333333,        inf])
    """
    lam = np.asarray(hessian_diag, dtype=float)
    stiffness = 2 * lam - learning_rate * lam**2
    stable = (stiffness > 0) & (lam > 0)
    return np.where(stable, learning_rate * gradient_noise_std**2 / np.where(stable, stiffness, 1.0), np.inf)


# --- DP-SignSGD: mean E x and second moment E x^2 per coordinate -----------------------------------------------------


def sign_moments_linear_sde(
    time: Array, *, initial_params: Array, hessian_diag: Array, gradient_noise_std: float, learning_rate: float
) -> tuple[Array, Array]:
    """E x and Var x of the linearised sign SDE; kappa = sqrt(2/pi)/s and D = 2 kappa lambda + eta kappa^2 lambda^2.

        E x = x0 e^(-kappa lambda t),
        Var x = x0^2 e^(-2 kappa lambda t) (e^(-eta kappa^2 lambda^2 t) - 1) + eta (1 - e^(-D t))/D.

    Corrects Thm statdistr_sign_formal, whose statement has lambda for lambda^2 in one exponent (its proof is right).

    Args: as `sgd_moments_sde`, with s > 0 and eta [params].
    Returns: as `sgd_moments_sde`.
    Valid when: |lambda x| << s; the variance may be negative beyond.

    >>> mean, variance = sign_moments_linear_sde(np.inf, initial_params=np.ones(1), hessian_diag=np.ones(1),
    ...                                          gradient_noise_std=1.0, learning_rate=1e-6)
    >>> bool(np.isclose(variance[0], math.sqrt(math.pi / 2) * 1e-6 / 2))
    True
    """
    lam = np.asarray(hessian_diag, dtype=float)
    kl = SIGN_SLOPE / gradient_noise_std * lam
    return _sign_moments(time, initial_params, kl, learning_rate, learning_rate * kl**2)


def sign_moments_linear_sde_as_printed(
    time: Array, *, initial_params: Array, hessian_diag: Array, gradient_noise_std: float, learning_rate: float
) -> tuple[Array, Array]:
    """`sign_moments_linear_sde` with e^(-eta kappa^2 lambda t) in the variance (paper, Thm statdistr_sign_formal).

    Args: as `sgd_moments_sde`, with s > 0 and eta [params].
    Returns: as `sgd_moments_sde`.

    >>> same = dict(initial_params=np.ones(1), hessian_diag=np.ones(1), gradient_noise_std=1.0, learning_rate=0.1)
    >>> sign_moments_linear_sde_as_printed(1.0, **same) == sign_moments_linear_sde(1.0, **same)     # lambda = 1
    True
    """
    lam = np.asarray(hessian_diag, dtype=float)
    kappa = SIGN_SLOPE / gradient_noise_std
    return _sign_moments(time, initial_params, kappa * lam, learning_rate, learning_rate * kappa**2 * lam)


def _sign_moments(time: Array, x0: Array, kl: np.ndarray, eta: float, shrinking: np.ndarray) -> tuple[Array, Array]:
    mean = x0 * np.exp(-kl * time)
    d = 2 * kl + eta * kl**2
    return mean, mean**2 * np.expm1(-shrinking * time) - eta * np.expm1(-d * time) / d


def sign_second_moment_linear(
    steps: Array, *, initial_params: Array, hessian_diag: Array, gradient_noise_std: float, learning_rate: float
) -> Array:
    """E x^2 of the linearised algorithm: E x^2 <- (1 - 2 eta kappa lambda) E x^2 + eta^2, as sign^2 = 1.

    Own derivation; stationary eta/(2 kappa lambda), kappa = sqrt(2/pi)/s; x0^2 + k eta^2 at lambda = 0.

    Args: as `sgd_moments`, with s > 0 and eta [params].
    Returns: of the broadcast shape of steps and coordinates [params^2].
    Raises: ValueError for s <= 0, where nothing linear is left.
    Valid when: |lambda x| << s.

    >>> sign_second_moment_linear(1, initial_params=np.zeros(1), hessian_diag=np.ones(1), gradient_noise_std=1.0,
    ...                           learning_rate=0.5)
    array([0.25])
    """
    if not np.all(np.asarray(gradient_noise_std) > 0):
        raise ValueError(
            f"Expected gradient_noise_std > 0, got {gradient_noise_std}; without noise use sign_moments_closure."
        )
    rate = 2 * learning_rate * SIGN_SLOPE / gradient_noise_std * np.asarray(hessian_diag, dtype=float)
    left = (1 - rate) ** steps
    noisy_steps = np.where(rate == 0, steps, (1 - left) / np.where(rate == 0, 1.0, rate))
    return np.asarray(initial_params) ** 2 * left + learning_rate**2 * noisy_steps


def _erf_slope(hessian_diag: Array, gradient_noise_std: Array) -> np.ndarray:
    """a = lambda/(sqrt2 s), at most `STEEPEST`: an erf so steep is the sign that it is without noise."""
    lam, s = np.asarray(hessian_diag, dtype=float), np.asarray(gradient_noise_std, dtype=float)
    if not np.all(s >= 0):
        raise ValueError(f"Expected gradient_noise_std >= 0, got {gradient_noise_std}.")
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.clip(np.where(lam == 0, 0.0, lam / (math.sqrt(2) * s)), -STEEPEST, STEEPEST)


def sign_moments_closure(
    num_steps: int, *, initial_params: Array, hessian_diag: Array, gradient_noise_std: Array, learning_rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """E x and E x^2 of DP-SignSGD at every step, with x taken Gaussian: E sign = E erf(a x), a = lambda/(sqrt2 s).

        m <- m - eta E erf(a x),     E x^2 <- E x^2 - 2 eta E[x erf(a x)] + eta^2.

    Own derivation. Error of the floor by rho = eta lambda/s: 0.002 % at 0.03, 0.02 % at 0.1, 0.2 % at 0.3, 2 % at 1.

    Args:
      num_steps: k; >= 0.
      initial_params, hessian_diag: x0 [params] and lambda [loss/params^2]; (d,).
      gradient_noise_std: s; () or (d,), >= 0, where 0 is the limit, E sign(x) [loss/params].
      learning_rate: eta; > 0 [params].
    Returns: mean and second moment, (k + 1, d) each.
    Raises: ValueError for s < 0.

    >>> mean, second = sign_moments_closure(1, initial_params=np.zeros(1), hessian_diag=np.ones(1),
    ...                                     gradient_noise_std=1.0, learning_rate=0.5)
    >>> second.ravel()
    array([0.  , 0.25])
    """
    a = _erf_slope(hessian_diag, gradient_noise_std)
    mean, second = np.array(initial_params, dtype=float), np.array(initial_params, dtype=float) ** 2
    path = [(mean, second)]
    for _ in range(num_steps):
        v = np.maximum(second - mean**2, 0.0)
        pull = expected_x_erf(mean, v, a)
        mean = mean - learning_rate * expected_erf(mean, v, a)
        second = second - 2 * learning_rate * pull + learning_rate**2
        path.append((mean, second))
    means, seconds = zip(*path, strict=True)
    return np.array(means), np.array(seconds)


def sign_moments_erf_sde(
    time: float,
    *,
    initial_params: Array,
    hessian_diag: Array,
    gradient_noise_std: float,
    learning_rate: float,
    num_intervals: int = 1000,
) -> tuple[np.ndarray, np.ndarray]:
    """E x and E x^2 of the erf SDE (paper, Thm sdesign, Phase 2) at time t, with x taken Gaussian.

        dm/dt = -E erf(a x),     d E x^2/dt = -2 E[x erf(a x)] + eta (1 - E erf(a x)^2),   a = lambda/(sqrt2 s).

    Own derivation, integrated by Runge-Kutta 4.

    Args:
      time: t; () >= 0, finite.  num_intervals: steps of the integrator; >= 1.
      initial_params, hessian_diag, gradient_noise_std, learning_rate: as `sign_moments_closure`.
    Returns: mean, second moment; (d,) each.
    Raises: ValueError for time, num_intervals or s out of range.

    >>> mean, second = sign_moments_erf_sde(1e-3, initial_params=np.zeros(1), hessian_diag=np.ones(1),
    ...                                     gradient_noise_std=1.0, learning_rate=0.1, num_intervals=10)
    >>> float(mean[0]), bool(np.isclose(second[0], 1e-4, rtol=1e-2))
    (0.0, True)
    """
    if not 0 <= time < math.inf:
        raise ValueError(f"Expected 0 <= time < inf, got {time}; for the stationary law use a long time.")
    if not num_intervals >= 1:
        raise ValueError(f"Expected num_intervals >= 1, got {num_intervals}.")
    a = _erf_slope(hessian_diag, gradient_noise_std)

    def velocity(state: np.ndarray) -> np.ndarray:
        mean, second = state
        v = np.maximum(second - mean**2, 0.0)
        diffusion = learning_rate * (1 - expected_squared_erf(mean, v, a))
        return np.stack([-expected_erf(mean, v, a), -2 * expected_x_erf(mean, v, a) + diffusion])

    x0 = np.asarray(initial_params, dtype=float)
    state, dt = np.stack([x0, x0**2]), time / num_intervals
    for _ in range(num_intervals):
        k1 = velocity(state)
        k2 = velocity(state + dt / 2 * k1)
        k3 = velocity(state + dt / 2 * k2)
        k4 = velocity(state + dt * k3)
        state = state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return state[0], state[1]


def sign_stationary_second_moment(*, hessian_diag: Array, gradient_noise_std: Array, learning_rate: float) -> Array:
    """pi eta/16 (eta + sqrt(eta^2 + 32 s^2/(pi lambda^2))): the fixed point of `sign_moments_closure`.

    Own derivation. -> sqrt(pi/2) eta s/(2 lambda) for small eta lambda/s, pi eta^2/8 for large, where the truth of one
    coordinate is eta^2/3 on average over starts; inf where lambda <= 0.

    Args:
      hessian_diag: lambda; any shape [loss/params^2].   gradient_noise_std: s; >= 0, broadcasts [loss/params].
      learning_rate: eta; > 0 [params].
    Returns: of the broadcast shape [params^2].

    >>> float(sign_stationary_second_moment(hessian_diag=1.0, gradient_noise_std=0.0, learning_rate=4.0) / math.pi)
    2.0
    """
    lam = np.asarray(hessian_diag, dtype=float)
    curved = lam > 0
    snr = 32 * np.square(gradient_noise_std) / (math.pi * np.square(np.where(curved, lam, 1.0)))
    fixed_point = math.pi * learning_rate / 16 * (learning_rate + np.sqrt(learning_rate**2 + snr))
    return np.where(curved, fixed_point, np.inf)[()]


def sign_covariance(gradient_mean: Array, gradient_covariance: Array) -> np.ndarray:
    """Cov sign(g) for g ~ N(m, V): diagonal 1 - (E sign)^2; off it the arcsine law (2/pi) asin(rho_ij) at m = 0.

    For m != 0 the arcsine law is scaled by the two slopes, exp(-(m_i^2/V_ii + m_j^2/V_jj)/2): right at m = 0 and to
    first order in rho_ij.

    Args:
      gradient_mean: m; (d,) [loss/params].   gradient_covariance: V; (d, d), positive diagonal.
    Returns: (d, d), no unit.

    >>> sign_covariance(np.zeros(2), np.array([[1.0, 1.0], [1.0, 1.0]])).round(12)
    array([[1., 1.],
           [1., 1.]])
    """
    std = np.sqrt(np.diag(gradient_covariance))
    snr = np.asarray(gradient_mean) / std
    rho = np.clip(gradient_covariance / np.outer(std, std), -1, 1)
    bell = np.exp(-(snr**2) / 2)
    covariance = 2 / math.pi * np.arcsin(rho) * np.outer(bell, bell)
    np.fill_diagonal(covariance, 1 - special.erf(snr / math.sqrt(2)) ** 2)
    return covariance


def sign_closure_step(
    mean: Array, covariance: Array, *, hessian: Array, gradient_noise_std: float, learning_rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """One step of DP-SignSGD on f = x^T H x/2 for any H, x taken Gaussian: (m, Sigma) -> (m', Sigma').

    g = H x + s Z is Gaussian with V = H Sigma H + s^2 I, and by Stein's lemma Cov(x, sign g_i) = k_i Sigma H e_i with
    k_i = sqrt(2/(pi V_ii)) e^(-m_i^2/(2 V_ii)). Own derivation; `sign_covariance` supplies the rest.

    Args:
      mean, covariance: m (d,) [params] and Sigma (d, d) [params^2].   hessian: H, symmetric; (d, d) [loss/params^2].
      gradient_noise_std: s; > 0 [loss/params].   learning_rate: eta; > 0 [params].
    Returns: m' and Sigma'.

    >>> m, c = sign_closure_step(np.zeros(1), np.zeros((1, 1)), hessian=np.eye(1), gradient_noise_std=1.0,
    ...                          learning_rate=0.5)
    >>> float(c[0, 0])
    0.25
    """
    hessian, covariance = np.asarray(hessian, dtype=float), np.asarray(covariance, dtype=float)
    gradient_mean = hessian @ mean
    v = hessian @ covariance @ hessian + gradient_noise_std**2 * np.eye(len(hessian))
    variance = np.diag(v)
    slope = np.sqrt(2 / (math.pi * variance)) * np.exp(-(gradient_mean**2) / (2 * variance))
    pull = learning_rate * (covariance @ hessian) * slope
    new_mean = mean - learning_rate * special.erf(gradient_mean / np.sqrt(2 * variance))
    return new_mean, covariance - pull - pull.T + learning_rate**2 * sign_covariance(gradient_mean, v)


def sign_lattice_law(
    num_steps: int,
    *,
    initial_param: float,
    gradient: Callable[[np.ndarray], np.ndarray],
    gradient_noise_std: float,
    learning_rate: float,
    half_width: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The exact law of one coordinate of DP-SignSGD on a separable f, as a birth-death chain on x0 + eta Z.

    P(x -> x + eta) = Phi(-f'(x)/s). The chain is cut at `half_width` lattice points on either side, where mass stays.
    A reference for the closures; costs num_steps * half_width.

    Args:
      num_steps: k; -1 for the stationary law (detailed balance, averaged over even and odd steps).
      initial_param: x0 [params].   gradient: f', vectorised [loss/params].   gradient_noise_std: s; > 0 [loss/params].
      learning_rate: eta, the lattice's spacing; > 0 [params].   half_width: points on either side; >= 1.
    Returns: points, probabilities; (2 half_width + 1,) each.

    >>> points, law = sign_lattice_law(1, initial_param=0.0, gradient=lambda x: x, gradient_noise_std=1.0,
    ...                                learning_rate=0.5, half_width=1)
    >>> points, law
    (array([-0.5,  0. ,  0.5]), array([0.5, 0. , 0.5]))
    """
    points = initial_param + learning_rate * np.arange(-half_width, half_width + 1)
    snr = gradient(points) / gradient_noise_std
    up, down = special.ndtr(-snr), special.ndtr(snr)
    if num_steps < 0:
        log_law = np.concatenate([[0.0], np.cumsum(special.log_ndtr(-snr[:-1]) - special.log_ndtr(snr[1:]))])
        law = np.exp(log_law - special.logsumexp(log_law))
        return points, law
    law = np.zeros(len(points))
    law[half_width] = 1.0
    for _ in range(num_steps):
        rises, falls = law * up, law * down
        law = np.zeros_like(law)
        law[1:] += rises[:-1]
        law[:-1] += falls[1:]
        law[-1] += rises[-1]
        law[0] += falls[0]
    return points, law
