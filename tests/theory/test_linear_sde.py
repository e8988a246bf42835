"""Moments against direct recursions, the exact lattice chain, their own limits, and simulated optimizers."""

import math
import warnings

import mpmath as mp
import numpy as np
import pytest

from noisecast.theory import (
    local_quadratic_gradient_norm_squared,
    local_quadratic_loss,
    sgd_moments,
    sgd_moments_sde,
    sgd_stationary_variance,
    sign_closure_step,
    sign_covariance,
    sign_lattice_law,
    sign_moments_closure,
    sign_moments_erf_sde,
    sign_moments_linear_sde,
    sign_moments_linear_sde_as_printed,
    sign_second_moment_linear,
    sign_stationary_second_moment,
    spectral_loss,
)

MODEL = dict(shrink_factor=0.7, noise_penalty=1.3, gradient_noise_std=0.4)
SPECTRUM = np.array([3.0, 1.0, 1e-3, 0.0, -0.2])


def quadratic(learning_rate, eigenvalues=SPECTRUM, g2=(1.0, 0.3, 2.0, 0.5, 0.1), n=(1, 5, 100, 20, 2)):
    eigenvalues = np.asarray(eigenvalues)
    return dict(
        signal_eigenvalues=eigenvalues,
        signal_squared_gradients=np.array(g2[: len(eigenvalues)]),
        noise_eigenvalues=eigenvalues,
        noise_multiplicities=np.array(n[: len(eigenvalues)]),
        learning_rate=learning_rate,
        **MODEL,
    )


@pytest.mark.parametrize("learning_rate", [0.01, 0.3, 1 / 2.1, 0.7, 0.95])  # r of lambda = 3: .98, .37, 0, -.47, -.995
def test_local_quadratic_is_the_recursion_of_its_moments(learning_rate):
    p = quadratic(learning_rate)
    g, n = np.sqrt(p["signal_squared_gradients"]), p["noise_multiplicities"]
    step, delta, v = learning_rate * 0.7, np.zeros(5), np.zeros(5)
    for k in range(60):
        loss = 2.0 + np.sum(g * delta + SPECTRUM * delta**2 / 2) + np.sum(n * SPECTRUM * v / 2)
        slope = np.sum((g + SPECTRUM * delta) ** 2) + np.sum(n * SPECTRUM**2 * v)
        assert local_quadratic_loss(k, initial_loss=2.0, **p) == pytest.approx(loss, rel=1e-10)
        assert local_quadratic_gradient_norm_squared(k, **p) == pytest.approx(slope, rel=1e-10)
        delta = delta - step * (g + SPECTRUM * delta)
        v = (1 - step * SPECTRUM) ** 2 * v + 1.3 * (learning_rate * 0.4) ** 2
    steps = np.arange(60).reshape(3, 20)
    assert local_quadratic_loss(steps, initial_loss=2.0, **p).shape == (3, 20)
    assert local_quadratic_loss(steps, initial_loss=2.0, **p)[1, 2] == local_quadratic_loss(22, initial_loss=2.0, **p)


@pytest.mark.parametrize("lam", [1e-14, 1e-9, 1.0, 2 - 1e-9, 2.0, -1e-9])
def test_local_quadratic_keeps_its_digits(lam):
    k, eta, mp.mp.dps = 10**6, 1.0, 50
    p = dict(quadratic(eta, [lam]), shrink_factor=1.0)
    ours = local_quadratic_loss(k, initial_loss=0.0, **p)
    x, phi = mp.mpf(lam), mp.mpf("1.3") * mp.mpf(0.4) ** 2
    a = (1 - (1 - x) ** k) / x
    v = phi * (k if x == 2 else (1 - (1 - x) ** (2 * k)) / (1 - (1 - x) ** 2))
    assert ours == pytest.approx(float(-a + x * a**2 / 2 + x * v / 2), rel=1e-7)


def test_local_quadratic_diverges_quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = quadratic(1.0, [3.0, 1.0, 0.0])  # h eta lambda = 2.1
        loss = local_quadratic_loss(np.array([0, 100, 10**6]), initial_loss=2.0, **p)
        assert loss[0] == 2.0 < 100 < loss[1] < loss[2] == math.inf
        assert local_quadratic_gradient_norm_squared(10**6, **p) == math.inf
        assert local_quadratic_loss(10**7, initial_loss=2.0, **quadratic(1.0, [-1.0])) == -math.inf


def test_spectral_loss_is_the_limit_of_small_steps():
    lam, c = np.array([0.1, 1.0, 2.0]), np.array([5.0, -2.5, 2.0])
    gaps = []
    for eta in (0.04, 0.02, 0.01):
        same = dict(learning_rate=eta, **MODEL)
        exact = local_quadratic_loss(
            round(2.0 / eta),
            initial_loss=np.sum(lam * c**2) / 2,
            signal_eigenvalues=lam,
            signal_squared_gradients=(lam * c) ** 2,
            noise_eigenvalues=lam,
            noise_multiplicities=np.ones(3),
            **same,
        )
        gaps.append(abs(exact - spectral_loss(2.0, eigenvalues=lam, initial_params=c, **same)))
    assert gaps[0] / gaps[1] == pytest.approx(2, abs=0.15)
    assert gaps[1] / gaps[2] == pytest.approx(2, abs=0.15)


PATH = dict(initial_params=np.array([0.01, 0.005]), hessian_diag=np.array([2.0, 1.0]), learning_rate=1e-3)
NOISE = dict(gradient_noise_std=math.sqrt(0.26))  # the paper's setting, B = 1: s^2 = .26


def test_sgd_moments():
    assert sgd_moments(10**6, **PATH, **NOISE)[1] == pytest.approx(
        sgd_stationary_variance(hessian_diag=PATH["hessian_diag"], learning_rate=1e-3, **NOISE)
    )
    (mean, variance), sde = sgd_moments(500, **PATH, **NOISE), sgd_moments_sde(0.5, **PATH, **NOISE)
    assert sde[0] == pytest.approx(mean, rel=2e-3)
    assert variance / sde[1] == pytest.approx(1 + 1e-3 * PATH["hessian_diag"] / 2, rel=1e-3)


@pytest.mark.parametrize("shape", [(), (3, 1), (2,), (3, 1, 2)])
def test_steps_broadcast_against_the_coordinates(shape):
    law = dict(initial_params=np.array([1.0, -2.0]), hessian_diag=np.array([0.5, 2.0]), learning_rate=0.1, **NOISE)
    steps = np.arange(math.prod(shape)).reshape(shape) + 1
    for found in (sgd_moments(steps, **law), sgd_moments_sde(0.1 * steps, **law)):
        assert [np.shape(each) for each in found] == 2 * [np.broadcast_shapes(shape, (2,))]
    at = np.broadcast_to(steps, np.broadcast_shapes(shape, (2,)))
    for index in np.ndindex(at.shape):
        mean, variance = sgd_moments(int(at[index]), **law)
        np.testing.assert_allclose(
            [each[index] for each in sgd_moments(steps, **law)], [mean[index[-1]], variance[index[-1]]]
        )


def test_sign_theories_without_noise_or_curvature_are_their_limits():
    same = dict(initial_params=np.array([0.35, 0.0, -0.2]), learning_rate=0.1)
    flat = dict(hessian_diag=np.zeros(3), gradient_noise_std=0.5)
    assert sign_second_moment_linear(7, **same, **flat) == pytest.approx(same["initial_params"] ** 2 + 7 * 0.01)
    nearly = sign_second_moment_linear(7, **same, hessian_diag=np.full(3, 1e-9), gradient_noise_std=0.5)
    assert nearly == pytest.approx(same["initial_params"] ** 2 + 7 * 0.01, rel=1e-6)
    with pytest.raises(ValueError, match=r"Expected gradient_noise_std > 0, got 0\.0"):
        sign_second_moment_linear(7, **same, hessian_diag=np.ones(3), gradient_noise_std=0.0)
    curved = dict(hessian_diag=np.array([1.0, 1.0, 0.0]))
    for quantity in range(2):
        found = sign_moments_closure(30, **same, **curved, gradient_noise_std=0.0)[quantity]
        limit = sign_moments_closure(30, **same, **curved, gradient_noise_std=1e-12)[quantity]
        np.testing.assert_allclose(found, limit, rtol=1e-6, atol=1e-9)
    mean, second = sign_moments_closure(3, **same, **curved, gradient_noise_std=0.0)
    np.testing.assert_allclose(mean[:, 0], [0.35, 0.25, 0.15, 0.05])  # a straight way down
    np.testing.assert_allclose(second[:, 2], 0.04 + 0.01 * np.arange(4))  # no force, and signs of noise


def test_erf_sde_without_noise_goes_straight_down():
    same = dict(initial_params=np.array([0.5, -0.2]), hessian_diag=np.array([3.0, 1.0]), gradient_noise_std=0.0)
    mean, second = sign_moments_erf_sde(0.1, **same, learning_rate=1e-3)
    assert mean == pytest.approx([0.4, -0.1]) and second == pytest.approx(mean**2)


@pytest.mark.parametrize(
    "time, change, message",
    [
        (np.inf, {}, "Expected 0 <= time < inf, got inf"),
        (-1.0, {}, "Expected 0 <= time < inf, got -1.0"),
        (1.0, {"num_intervals": 0}, "Expected num_intervals >= 1, got 0"),
        (1.0, {"gradient_noise_std": -1.0}, "Expected gradient_noise_std >= 0, got -1.0"),
    ],
)
def test_erf_sde_refuses(time, change, message):
    law = dict(initial_params=np.ones(1), hessian_diag=np.ones(1), gradient_noise_std=1.0, learning_rate=0.1)
    with pytest.raises(ValueError, match=message):
        sign_moments_erf_sde(time, **law | change)


def test_stationary_second_moment_is_infinite_without_curvature():
    law = dict(gradient_noise_std=1.0, learning_rate=0.1)
    found = sign_stationary_second_moment(hessian_diag=np.array([-1.0, 0.0, 1.0]), **law)
    assert found.tolist()[:2] == [np.inf, np.inf] and 0 < found[2] < 1


def test_spectral_loss_at_its_edges():
    law = dict(learning_rate=0.1, noise_penalty=1.3, gradient_noise_std=0.4, initial_params=np.array([2.0, 1.0]))
    flat = spectral_loss(np.inf, eigenvalues=np.array([0.0, 1.0]), shrink_factor=1.0, **law)
    assert flat == pytest.approx(1.3 * 0.1 * 0.16 / 4)
    shut = spectral_loss(5.0, eigenvalues=np.array([0.5, 1.0]), shrink_factor=0.0, **law)
    nearly = spectral_loss(5.0, eigenvalues=np.array([0.5, 1.0]), shrink_factor=1e-9, **law)
    assert shut == pytest.approx(0.5 * 4 / 2 + 1 / 2 + 1.3 * 0.1 * 0.16 / 2 * 1.5 * 5) == pytest.approx(nearly)


def simulate(step, num_steps, runs, seed):
    rng, x = np.random.default_rng(seed), np.tile(PATH["initial_params"], (runs, 1))
    for _ in range(num_steps):
        gradient = PATH["hessian_diag"] * x + NOISE["gradient_noise_std"] * rng.standard_normal(x.shape)
        x = x - PATH["learning_rate"] * step(gradient)
    return x


def test_the_algorithms_have_these_moments():
    """20 000 runs, 800 steps: variances within 5 standard errors (5 %), 10 % seen."""
    closure = sign_moments_closure(800, **PATH, **NOISE)
    predictions = {
        (lambda g: g): sgd_moments(800, **PATH, **NOISE),
        np.sign: (closure[0][-1], closure[1][-1] - closure[0][-1] ** 2),
    }
    for step, (mean, variance) in predictions.items():
        x = simulate(step, 800, 20_000, 0)
        assert np.abs(x.mean(axis=0) - mean) == pytest.approx(0, abs=5 * math.sqrt(variance.max() / 20_000))
        assert x.var(axis=0) == pytest.approx(variance, rel=5 * math.sqrt(2 / 20_000))
        assert x.var(axis=0) != pytest.approx(1.1 * variance, rel=5 * math.sqrt(2 / 20_000))


def test_the_linear_sign_theories_agree_where_the_signal_is_small():
    closure = sign_moments_closure(2000, **PATH, **NOISE)
    mean, variance = sign_moments_linear_sde(2.0, **PATH, **NOISE)
    assert mean == pytest.approx(closure[0][-1], rel=0.01)
    assert variance + mean**2 == pytest.approx(closure[1][-1], rel=5e-3)
    assert sign_second_moment_linear(2000, **PATH, **NOISE) == pytest.approx(closure[1][-1], rel=3e-3)
    printed = sign_moments_linear_sde_as_printed(2.0, **PATH, **NOISE)[1]
    assert printed[1] == variance[1]  # lambda = 1: the misprint does not show
    assert printed[0] != variance[0]


RHO = pytest.mark.parametrize(
    "rho, linear_sde, closure",
    [
        (0.01, -0.71e-2, 2e-5),
        (0.03, -2.1e-2, 5e-5),
        (0.1, -6.8e-2, 2.5e-4),
        (0.3, -18.6e-2, 2e-3),
        (1.0, -0.47, 0.02),
    ],
)


@RHO
def test_stationary_law_against_the_exact_chain(rho, linear_sde, closure):
    """The errors of each theory by rho = eta lambda/s, from the exact birth-death chain."""
    eta, lam = rho, 1.0
    points, law = sign_lattice_law(
        -1,
        initial_param=0.0,
        gradient=lambda x: lam * x,
        gradient_noise_std=1.0,
        learning_rate=eta,
        half_width=math.ceil(8 / math.sqrt(rho)) + 30,
    )
    exact = law @ points**2
    ours = sign_stationary_second_moment(hessian_diag=lam, gradient_noise_std=1.0, learning_rate=eta)
    assert ours == pytest.approx(exact, rel=closure)
    sde = sign_moments_linear_sde(
        np.inf, initial_params=0.0, hessian_diag=lam, gradient_noise_std=1.0, learning_rate=eta
    )[1]
    assert sde / exact - 1 == pytest.approx(linear_sde, rel=0.03)
    recursion = sign_moments_closure(
        3000, initial_params=np.zeros(1), hessian_diag=np.array([lam]), gradient_noise_std=1.0, learning_rate=eta
    )[1][-1, 0]
    assert recursion == pytest.approx(ours, rel=1e-9)


@pytest.mark.parametrize("snr, accuracy", [(0.1, 1e-5), (1.0, 5e-5), (10.0, 1e-4)])
def test_transient_against_the_exact_chain(snr, accuracy):
    """rho = .01: the closure follows the chain from any start; the linear theory loses it."""
    x0, eta = snr, 0.01
    same = dict(gradient_noise_std=1.0, learning_rate=eta)
    path = sign_moments_closure(600, initial_params=np.array([x0]), hessian_diag=np.ones(1), **same)[1][:, 0]
    for k in (10, 300, 600):
        points, law = sign_lattice_law(k, initial_param=x0, gradient=lambda x: x, half_width=1100, **same)
        assert path[k] == pytest.approx(law @ points**2, rel=accuracy)
    if snr == 10:
        linear = sign_second_moment_linear(600, initial_params=x0, hessian_diag=1.0, **same)
        assert linear < 0.01 * path[600]


def test_lattice_law_is_a_law_and_forgets_its_start():
    same = dict(gradient=lambda x: x, gradient_noise_std=1.0, learning_rate=0.5, half_width=20)
    points, stationary = sign_lattice_law(-1, initial_param=0.0, **same)
    late = np.mean([sign_lattice_law(k, initial_param=0.0, **same)[1] for k in (300, 301)], axis=0)
    assert late == pytest.approx(stationary, abs=1e-12)
    assert late.sum() == pytest.approx(1)
    assert len(points) == 41


def test_erf_sde_tends_to_the_algorithm_as_the_learning_rate_falls():
    same = dict(initial_params=np.array([3.0]), hessian_diag=np.ones(1), gradient_noise_std=1.0)
    gaps = []
    for eta in (0.02, 0.01, 0.005):
        algorithm = sign_moments_closure(round(4 / eta), learning_rate=eta, **same)
        sde = sign_moments_erf_sde(4.0, learning_rate=eta, **same)
        gaps.append(abs(sde[1][0] - algorithm[1][-1, 0]))
    assert gaps[0] / gaps[1] > 1.7
    assert gaps[1] / gaps[2] > 1.8


def test_sign_covariance_by_monte_carlo():
    v = np.array([[1.0, 0.6, -0.3], [0.6, 2.0, 0.1], [-0.3, 0.1, 0.5]])
    rng, n = np.random.default_rng(0), 400_000
    for mean, model_error in ((np.zeros(3), 0.0), (np.array([0.3, -0.2, 0.1]), 0.006)):
        signs = np.sign(rng.multivariate_normal(mean, v, n))
        assert np.cov(signs.T) == pytest.approx(sign_covariance(mean, v), abs=5 / math.sqrt(n) + model_error)


def test_closure_of_a_diagonal_hessian_is_the_closure_by_coordinate():
    lam, m, c = np.array([2.0, 0.5]), np.array([0.3, -0.4]), np.diag([0.0, 0.0])
    same = dict(gradient_noise_std=0.5, learning_rate=0.02)
    means, seconds = sign_moments_closure(50, initial_params=m, hessian_diag=lam, **same)
    for _ in range(50):
        m, c = sign_closure_step(m, c, hessian=np.diag(lam), **same)
    assert m == pytest.approx(means[-1], rel=1e-10)
    assert np.diag(c) + m**2 == pytest.approx(seconds[-1], rel=1e-10)
    assert c[0, 1] == 0


def test_closure_of_a_coupled_hessian_by_simulation():
    hessian, s, eta, n = np.array([[2.0, 1.2], [1.2, 1.0]]), 0.5, 0.05, 40_000
    rng, x, m, c = np.random.default_rng(0), np.tile([1.0, 0.5], (n, 1)), np.array([1.0, 0.5]), np.zeros((2, 2))
    for _ in range(150):
        x = x - eta * np.sign(x @ hessian + s * rng.standard_normal(x.shape))
        m, c = sign_closure_step(m, c, hessian=hessian, gradient_noise_std=s, learning_rate=eta)
    se = np.sqrt((np.outer(np.diag(c), np.diag(c)) + c**2) / n)
    assert np.abs(np.cov(x.T) - c).max() < (5 * se + 0.02 * np.abs(c)).max()
    assert np.abs(np.cov(x.T) - 1.1 * c).max() > (5 * se + 0.02 * np.abs(c)).max()
