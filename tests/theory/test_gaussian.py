"""Expectations against mpmath at 30 digits: the paper's own series, which double precision cannot sum."""

import math

import mpmath as mp
import numpy as np
import pytest

from noisecast.theory import (
    concentrated_normalised_gradient_factor,
    expected_erf,
    expected_squared_erf,
    expected_x_erf,
    normalised_gradient_factor,
    normalised_gradient_factor_as_printed,
    student_scale_factor,
)

mp.mp.dps = 30


def mp_scale_factor(nu):
    nu = mp.mpf(nu)
    return mp.mpf(1) if mp.isinf(nu) else mp.sqrt(2 / nu) * mp.gamma((nu + 1) / 2) / mp.gamma(nu / 2)


def mp_normalised_gradient_factor(w, d, nu):
    """The 1F1 and 2F1 of the paper's lemmas, sigma = 1."""
    d, w, nu = mp.mpf(d), mp.mpf(w), mp.mpf(nu)
    gammas = mp.gamma((d + 1) / 2) / mp.gamma(d / 2 + 1) / mp.sqrt(2)
    if mp.isinf(nu):
        return gammas * mp.hyp1f1(0.5, d / 2 + 1, -(w**2) / 2)
    return mp_scale_factor(nu) * gammas * mp.hyp2f1(0.5, (nu + 1) / 2, d / 2 + 1, -(w**2) / nu)


@pytest.mark.parametrize("nu", [0.3, 1, 2, 3, 5, 100, 1e5, 1e7, math.inf])
def test_student_scale_factor(nu):
    assert student_scale_factor(nu) == pytest.approx(float(mp_scale_factor(nu)), rel=1e-12)


@pytest.mark.parametrize("d", [1, 2, 10, 1024])
@pytest.mark.parametrize("nu", [1, 3, math.inf])
@pytest.mark.parametrize("w", [1e-9, 0.5, 3.0, 277.0])
def test_normalised_gradient_factor_is_the_hypergeometric_of_the_paper(d, nu, w):
    ours = normalised_gradient_factor(2 * w, num_params=d, example_noise_std=2.0, degrees_of_freedom=nu)
    assert ours == pytest.approx(float(mp_normalised_gradient_factor(w, d, nu)) / 2, rel=1e-11)


@pytest.mark.parametrize("nu", [1, 3, math.inf])
def test_a_million_parameters_by_another_quadrature(nu):
    d, w = 10**6, 800.0

    def integrand(u):
        damping = mp.exp(-((w * u) ** 2) / 2) if nu == math.inf else (1 + (w * u) ** 2 / nu) ** (-mp.mpf(nu + 1) / 2)
        return damping * (1 - u * u) ** (mp.mpf(d - 1) / 2)

    points = [0, 0.0003, 0.001, 0.002, 0.004, 0.008, 0.016, 0.05]
    exact = mp.sqrt(2 / mp.pi) * mp_scale_factor(nu) * mp.quad(integrand, points)
    ours = normalised_gradient_factor(w, num_params=d, example_noise_std=1.0, degrees_of_freedom=nu)
    assert ours == pytest.approx(float(exact), rel=1e-11)


def test_normalised_gradient_by_monte_carlo():
    rng, d, n, nu = np.random.default_rng(0), 10, 400_000, 3
    g = rng.standard_normal((n, d)) / np.sqrt(rng.chisquare(nu, (n, 1)) / nu)
    g[:, 0] += 4.0
    samples = g[:, 0] / np.linalg.norm(g, axis=1)
    expected = 4.0 * normalised_gradient_factor(4.0, num_params=d, example_noise_std=1.0, degrees_of_freedom=nu)
    bound = 5 * samples.std() / math.sqrt(n)
    assert bound < 0.005  # sees 1 %
    assert abs(samples.mean() - expected) < bound
    assert abs(samples.mean() - 1.02 * expected) > bound


@pytest.mark.parametrize("d, error", [(10, 0.03), (100, 0.003), (1024, 3e-4)])
@pytest.mark.parametrize("nu", [1, 3, math.inf])
def test_concentrated_norm_at_every_signal(d, nu, error):
    g = np.array([0.0, 0.3, 1.0, 5.0, 277.0]) * math.sqrt(d)
    model = dict(num_params=d, example_noise_std=1.0, degrees_of_freedom=nu)
    exact = normalised_gradient_factor(g, **model)
    assert concentrated_normalised_gradient_factor(g, **model) == pytest.approx(exact, rel=error)


@pytest.mark.parametrize("nu, wrong_at_1", [(1, 1.53), (3, 1.45), (math.inf, 1.41)])
def test_the_printed_lemma_holds_only_at_low_signal(nu, wrong_at_1):
    model = dict(num_params=1024, example_noise_std=1.0, degrees_of_freedom=nu)
    exact = normalised_gradient_factor(np.array([0.01, 1.0]) * 32, **model)
    assert normalised_gradient_factor_as_printed(**model) / exact == pytest.approx([1.0, wrong_at_1], abs=6e-3)


@pytest.mark.parametrize("m, v, a", [(0.0, 1.0, 1.0), (0.7, 0.3, 2.0), (-2.0, 5.0, 0.1), (1.0, 1e-6, 30.0)])
def test_gaussian_expectations_of_erf(m, v, a):
    def expect(f):
        density = lambda z: mp.exp(-z * z / 2) / mp.sqrt(2 * mp.pi)  # noqa: E731
        return float(mp.quad(lambda z: f(m + mp.sqrt(v) * z) * density(z), [-12, -4, -1, 0, 1, 4, 12]))

    assert expected_erf(m, v, a) == pytest.approx(expect(lambda x: mp.erf(a * x)), rel=1e-12, abs=1e-15)
    assert expected_x_erf(m, v, a) == pytest.approx(expect(lambda x: x * mp.erf(a * x)), rel=1e-12)
    assert expected_squared_erf(m, v, a) == pytest.approx(expect(lambda x: mp.erf(a * x) ** 2), rel=1e-10)


@pytest.mark.parametrize("nu", [0, -1, math.nan])
def test_refuses_degrees_of_freedom_out_of_range(nu):
    with pytest.raises(ValueError, match="Expected degrees_of_freedom > 0, got"):
        student_scale_factor(nu)


def test_refuses_a_law_without_noise():
    with pytest.raises(ValueError, match="Expected example_noise_std > 0, got 0"):
        normalised_gradient_factor(1.0, num_params=2, example_noise_std=0.0, degrees_of_freedom=1)
