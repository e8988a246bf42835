"""Clipping expectations against mpmath, closed forms, and Monte Carlo of real clipped gradients."""

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from noisecast.theory import (
    clipping_expectations,
    gradient_noise_std,
    phase_1_noise_std,
    phase_2_noise_std,
    privacy_noise_std,
    sign_scale_mixture,
    student_scale_factor,
    zero_gradient_clipping_expectations,
)

mp.mp.dps = 30


def mp_expectations(g, d, sigma, nu, c):
    """(h, m2, clip fraction) by mp.quad over log(S/2), split at the kink."""
    g, c, spread, a = mp.mpf(g), mp.mpf(c), mp.mpf(d) * mp.mpf(sigma) ** 2, mp.mpf(nu) / 2
    density = lambda y: mp.exp(a * y - mp.exp(y)) / mp.gamma(a)  # noqa: E731
    radius = lambda y: mp.sqrt(g**2 + spread * nu / (2 * mp.exp(y)))  # noqa: E731
    width, mode = 1 / mp.sqrt(a), mp.log(a)
    points = [mode - k * width for k in (100, 30, 10, 3, 1, 0)] + [mode + min(k * width, k) for k in (1, 2, 4, 6)]
    if c > g:
        points.append(mp.log(nu * spread / (2 * (c**2 - g**2))))
    expect = lambda f: float(mp.quad(lambda y: density(y) * f(radius(y)), sorted(points)))  # noqa: E731
    return expect(lambda r: min(1, c / r)), expect(lambda r: min(r, c) ** 2), expect(lambda r: r > c)


@pytest.mark.parametrize(
    "g, d, sigma, nu, c",
    [
        (0.0, 1, 1.0, 1, 1.0),
        (0.5, 2, 0.3, 3, 1.0),
        (0.5, 1024, 0.03, 1, 5.0),
        (2.0, 10, 0.1, 3, 1.0),
        (0.9999, 100, 1e-3, 2, 1.0),
        (0.5, 100, 0.1, 2.00005, 1.0),
        (0.5, 10, 0.1, 1.5, 1.0),
        (0.5, 10**6, 1e-3, 3, 1.0),
        (0.5, 100, 0.1, 300, 1.01),
    ],
)
def test_expectations_against_mpmath(g, d, sigma, nu, c):
    ours = clipping_expectations(g, num_params=d, example_noise_std=sigma, degrees_of_freedom=nu, l2_clip_norm=c)
    h, m2, fraction = mp_expectations(g, d, sigma, nu, c)
    assert ours.shrink_factor == pytest.approx(h, rel=1e-10)
    assert ours.second_moment == pytest.approx(m2, rel=1e-10)
    assert ours.clip_fraction == pytest.approx(fraction, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("nu", [0.5, 1, 2, 3, 50])
@pytest.mark.parametrize("c", [0.01, 1.0, 30.0])
def test_quadrature_meets_the_closed_form_without_gradient(nu, c):
    model = dict(num_params=16, example_noise_std=0.25, degrees_of_freedom=nu, l2_clip_norm=c)
    ours, exact = clipping_expectations(0.0, **model), zero_gradient_clipping_expectations(**model)
    assert ours.shrink_factor == pytest.approx(float(exact.shrink_factor), rel=1e-11)
    assert ours.second_moment == pytest.approx(float(exact.second_moment), rel=1e-11)


@pytest.mark.parametrize(
    "change", [{"degrees_of_freedom": math.inf}, {"example_noise_std": 0.0}, {"l2_clip_norm": math.inf}]
)
def test_zero_gradient_expectations_have_their_limits(change):
    law = dict(num_params=4, example_noise_std=0.7, degrees_of_freedom=5.0, l2_clip_norm=1.0) | change
    found, expected = zero_gradient_clipping_expectations(**law), clipping_expectations(0.0, **law)
    assert (found.shrink_factor, found.second_moment) == (expected.shrink_factor, expected.second_moment)
    assert np.isfinite(found.shrink_factor) and np.isfinite(found.second_moment)


def test_zero_gradient_expectations_refuse_negative_noise():
    with pytest.raises(ValueError, match=r"Expected example_noise_std >= 0, got -0\.7"):
        zero_gradient_clipping_expectations(
            num_params=4, example_noise_std=-0.7, degrees_of_freedom=5.0, l2_clip_norm=1.0
        )


def test_heavy_tails_have_no_phase_2():
    """nu = 1, C = 5, sigma sqrt d = 1: m2 = 7.03 sigma^2 d, and 15.9 % of the examples clipped for ever."""
    e = clipping_expectations(0.0, num_params=1024, example_noise_std=1 / 32, degrees_of_freedom=1, l2_clip_norm=5.0)
    assert e.second_moment == pytest.approx(7.03, abs=0.01)
    assert e.clip_fraction == pytest.approx(0.159, abs=0.001)


def test_large_nu_is_gaussian_and_special_cases_are_exact():
    g, model = np.array([0.0, 1.0, 3.0]), dict(num_params=100, example_noise_std=0.1, l2_clip_norm=2.0)
    gaussian = clipping_expectations(g, degrees_of_freedom=math.inf, **model)
    nearly = clipping_expectations(g, degrees_of_freedom=1e7, **model)
    for field in ("shrink_factor", "second_moment", "clip_fraction"):
        assert getattr(nearly, field) == pytest.approx(getattr(gaussian, field), rel=1e-6, abs=1e-9)
    free = clipping_expectations(g, num_params=4, example_noise_std=0.5, degrees_of_freedom=4, l2_clip_norm=math.inf)
    assert free.shrink_factor == pytest.approx(1.0)
    assert free.second_moment == pytest.approx(g**2 + 2)
    still = clipping_expectations(g, num_params=4, example_noise_std=0.0, degrees_of_freedom=1, l2_clip_norm=2.0)
    assert still.shrink_factor == pytest.approx([1, 1, 2 / 3])
    assert gradient_noise_std(
        g,
        shrink_factor=still.shrink_factor,
        second_moment=still.second_moment,
        num_params=4,
        batch_size=1,
        mean_noise_std=0.0,
    ) == pytest.approx(0.0, abs=0)


def test_the_two_phases_are_limits():
    model = dict(num_params=10_000, example_noise_std=0.01, degrees_of_freedom=3)
    for c, h, s in [
        (
            1e-4,
            1e-4 * student_scale_factor(3),
            phase_1_noise_std(num_params=10_000, l2_clip_norm=1e-4, batch_size=8, mean_noise_std=1e-6),
        ),
        (1e6, 1.0, phase_2_noise_std(example_noise_std=0.01 * math.sqrt(3), batch_size=8, mean_noise_std=1e-6)),
    ]:
        e = clipping_expectations(0.0, l2_clip_norm=c, **model)
        std = gradient_noise_std(
            0.0,
            shrink_factor=e.shrink_factor,
            second_moment=e.second_moment,
            num_params=10_000,
            batch_size=8,
            mean_noise_std=1e-6,
        )
        assert (e.shrink_factor, std) == pytest.approx((h, s), rel=1e-4)


@given(st.floats(0, 10), st.floats(1e-3, 10), st.floats(0.2, 50), st.floats(1e-2, 100), st.floats(1.01, 10))
def test_shrink_and_clipping_are_monotone_in_the_clip_norm(g, sigma, nu, c, more):
    model = dict(num_params=7, example_noise_std=sigma, degrees_of_freedom=nu)
    tight = clipping_expectations(g, l2_clip_norm=c, **model)
    loose = clipping_expectations(g, l2_clip_norm=c * more, **model)
    assert 0 <= tight.shrink_factor <= loose.shrink_factor * (1 + 1e-12) <= 1 + 1e-10
    assert tight.second_moment <= loose.second_moment * (1 + 1e-10)
    assert loose.clip_fraction <= tight.clip_fraction + 1e-12
    assert (tight.shrink_factor * g) ** 2 <= tight.second_moment * (1 + 1e-10)  # a variance is not negative


def draw_clipped(rng, n, gradient, sigma, nu, c):
    x = gradient + sigma * rng.standard_normal((n, len(gradient))) / np.sqrt(rng.chisquare(nu, (n, 1)) / nu)
    return x * np.minimum(1, c / np.linalg.norm(x, axis=1, keepdims=True))


def test_real_clipped_gradients_have_these_moments():
    rng, n, d, g, sigma, nu, c = np.random.default_rng(1), 40_000, 200, 3.0, 0.1, 1, 2.0
    x = draw_clipped(rng, n, g * np.eye(d)[0], sigma, nu, c)
    e = clipping_expectations(g, num_params=d, example_noise_std=sigma, degrees_of_freedom=nu, l2_clip_norm=c)
    for samples, expected, model_error in [
        (x[:, 0] / g, e.shrink_factor, 0.002 * e.shrink_factor),  # the norm concentrates to 1/(2 d) = 0.25 %
        (np.sum(x**2, axis=1), e.second_moment, 0.002 * e.second_moment),
    ]:
        bound = 5 * samples.std() / math.sqrt(n) + model_error
        assert bound < 0.03 * expected  # sees 3 %
        assert abs(samples.mean() - expected) < bound < abs(samples.mean() - 1.04 * expected)


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_sign_scale_mixture_slope_and_saturation(batch_size):
    """nu = 1: E sign of the private mean gradient, from real signs, at low and high signal."""
    d, sigma, c, z, n = 1024, 1 / 32, 5.0, 0.03, 200_000
    model = dict(num_params=d, example_noise_std=sigma, degrees_of_freedom=1.0, l2_clip_norm=c)
    noise = privacy_noise_std(noise_multiplier=z, l2_clip_norm=c, expected_batch_size=batch_size)
    e = clipping_expectations(0.0, **model)
    s = gradient_noise_std(
        0.0,
        shrink_factor=e.shrink_factor,
        second_moment=e.second_moment,
        num_params=d,
        batch_size=batch_size,
        mean_noise_std=noise,
    )
    factors, weights = sign_scale_mixture(0.0, batch_size=batch_size, mean_noise_std=noise, **model)
    assert weights.sum() == pytest.approx(1.0)

    rng = np.random.default_rng(batch_size)
    kappa = []
    for _ in range(batch_size):  # examples one at a time to spare memory; G = 0 in the norm, as in the mixture
        tau2 = sigma**2 / rng.chisquare(1, n)
        shrink2 = np.minimum(1, c**2 / (d * tau2))
        kappa.append((np.sqrt(shrink2), shrink2 * tau2))
    shrink, power = np.mean(kappa, axis=0)
    kappa = shrink / np.sqrt(power / batch_size + noise**2)

    slope = factors @ weights * e.shrink_factor / s
    assert abs(slope - kappa.mean()) < 5 * kappa.std() / math.sqrt(n) + 0.003 * kappa.mean()
    for snr in (1.0, 3.0):
        x = snr * s / e.shrink_factor  # a partial derivative
        truth = special.erf(kappa * x / math.sqrt(2)).mean()
        mixture = weights @ special.erf(factors * snr / math.sqrt(2))
        single = special.erf(snr / math.sqrt(2))
        # 5 standard errors (erf varies by less than 0.4), and what four nodes leave.
        assert abs(mixture - truth) < 5 * 0.4 / math.sqrt(n) + 0.006
        if batch_size < 64:
            assert abs(mixture - truth) < 0.4 * abs(single - truth)


def test_mixture_of_one_example_is_that_of_real_signs():
    """The whole chain without the theory's own kappa: noise, clip, privacy noise, sign."""
    rng, d, g, sigma, c, z, n = np.random.default_rng(3), 100, 0.2, 0.1, 2.0, 0.02, 40_000
    model = dict(num_params=d, example_noise_std=sigma, degrees_of_freedom=1.0, l2_clip_norm=c)
    private = draw_clipped(rng, n, np.full(d, g / 10), sigma, 1, c) + c * z * rng.standard_normal((n, d))
    signs = np.sign(private).mean(axis=1)
    e = clipping_expectations(g, **model)
    s = gradient_noise_std(
        g,
        shrink_factor=e.shrink_factor,
        second_moment=e.second_moment,
        num_params=d,
        batch_size=1,
        mean_noise_std=c * z,
    )
    factors, weights = sign_scale_mixture(g, batch_size=1, mean_noise_std=c * z, **model)
    snr = e.shrink_factor * g / 10 / s
    mixture, single = weights @ special.erf(factors * snr / math.sqrt(2)), special.erf(snr / math.sqrt(2))
    bound = 5 * signs.std() / math.sqrt(n) + 0.0025 * mixture  # d = 100: the norm concentrates to 0.25 %
    assert abs(signs.mean() - mixture) < bound
    assert abs(signs.mean() - single) > bound  # the power: one Gaussian is seen to be wrong


def test_gaussian_noise_is_one_component_and_infinite_noise_is_refused():
    model = dict(num_params=10, example_noise_std=1.0, batch_size=4, mean_noise_std=0.1)
    factors, weights = sign_scale_mixture(np.zeros(3), degrees_of_freedom=math.inf, l2_clip_norm=1.0, **model)
    assert factors.shape == weights.shape == (3, 4)
    assert (factors == 1).all()
    assert (weights == [1, 0, 0, 0]).all()
    with pytest.raises(ValueError, match="Expected a finite gradient noise"):
        sign_scale_mixture(0.0, degrees_of_freedom=1, l2_clip_norm=math.inf, **model)


def test_refuses_a_clip_norm_out_of_range():
    with pytest.raises(ValueError, match="Expected l2_clip_norm > 0, got 0"):
        clipping_expectations(0.0, num_params=1, example_noise_std=1.0, degrees_of_freedom=1, l2_clip_norm=0.0)
