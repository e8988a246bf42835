"""Clipping in few parameters: against draws, noncentral chi squares, integrals over a line and closed forms."""

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, stats

from noisecast.theory import clipping_expectations, low_dimension_clipping_expectations


@pytest.mark.parametrize("num_params, nu", [(1, np.inf), (2, np.inf), (3, 1.0), (10, np.inf), (50, 3.0)])
@pytest.mark.parametrize("gradient_norm", [0.01, 0.3, 2.0])
def test_low_dimension_expectations_are_those_of_drawn_gradients(num_params, nu, gradient_norm):
    """And taking the noise's length for its typical one is seen to be wrong in one dimension."""
    rng, clip, scale, draws = np.random.default_rng(5), 0.3, 0.4, 400_000
    noise = rng.normal(size=(draws, num_params))
    if np.isfinite(nu):
        noise *= np.sqrt(nu / rng.chisquare(nu, size=(draws, 1)))
    gradients = scale * noise
    gradients[:, 0] += gradient_norm
    radii = np.linalg.norm(gradients, axis=1)
    law = {
        "num_params": num_params,
        "example_noise_std": scale,
        "degrees_of_freedom": nu,
        "l2_clip_norm": clip,
    }
    exact = low_dimension_clipping_expectations(np.array([gradient_norm]), **law)
    shares = np.minimum(1, clip / radii) * gradients[:, 0] / gradient_norm
    error = shares.std() / np.sqrt(draws)
    assert abs(shares.mean() - exact.shrink_factor[0]) < 5 * error
    assert np.mean(np.minimum(radii, clip) ** 2) == pytest.approx(exact.second_moment[0], rel=0.004)
    assert np.mean(radii > clip) == pytest.approx(exact.clip_fraction[0], abs=0.012)
    if num_params == 1 and gradient_norm == 0.3:
        assert abs(shares.mean() - clipping_expectations(gradient_norm, **law).shrink_factor) > 20 * error


@pytest.mark.parametrize("num_params, must_see", [(128, 0.015), (1000, 0.005), (1_000_000, 2e-4)])
@pytest.mark.parametrize("nu", [3.0, math.inf])
def test_expectations_in_many_dimensions_are_those_of_drawn_lengths(num_params, must_see, nu):
    """Noise of length C: the typical length errs by `must_see` of h and more, if the noise is Gaussian."""
    rng, draws, gradient_norm, sigma = np.random.default_rng(6), 1_000_000, 0.01, 1 / math.sqrt(num_params)
    stretch = np.sqrt(nu / rng.chisquare(nu, draws)) if nu < math.inf else 1.0
    along = sigma * stretch * rng.standard_normal(draws)
    across = (sigma * stretch) ** 2 * rng.chisquare(num_params - 1, draws)
    factor, of_noise = (1 / np.maximum(np.sqrt(x**2 + across), 1.0) for x in (gradient_norm + along, along))
    # The noise alone, clipped, is symmetric: taken off, it leaves the mean and most of the variance goes.
    samples = (factor * (gradient_norm + along) - of_noise * along) / gradient_norm
    error = samples.std() / math.sqrt(draws)
    assert 5 * error < must_see or nu < math.inf
    law = {"num_params": num_params, "example_noise_std": sigma, "degrees_of_freedom": nu, "l2_clip_norm": 1.0}
    exact = low_dimension_clipping_expectations(np.array([gradient_norm]), **law)
    assert abs(samples.mean() - exact.shrink_factor[0]) < 5 * error
    if math.isinf(nu):
        assert abs(samples.mean() - clipping_expectations(gradient_norm, **law).shrink_factor) > must_see


@pytest.mark.parametrize(
    "num_params, clip, gradient_norm", [(2, 0.1, 1.0), (3, 2.0, 1.0), (10, 0.5, 4.0), (100, 9.0, 3.0)]
)
def test_low_dimension_expectations_are_those_of_a_noncentral_chi_square(num_params, clip, gradient_norm):
    """R^2 of Gaussian noise is one: its tail is the clip fraction, its moments up to C^2 are m2's."""
    law = {"num_params": num_params, "example_noise_std": 1.0, "degrees_of_freedom": np.inf, "l2_clip_norm": clip}
    found = low_dimension_clipping_expectations(np.array([gradient_norm]), **law)
    squared_radius = stats.ncx2(num_params, gradient_norm**2)
    fraction = squared_radius.sf(clip**2)
    below = integrate.quad(lambda x: x * squared_radius.pdf(x), 0, clip**2, epsabs=1e-13)[0]
    assert found.clip_fraction[0] == pytest.approx(fraction, rel=1e-5)
    assert found.second_moment[0] == pytest.approx(below + clip**2 * fraction, rel=1e-6)


@pytest.mark.parametrize(
    "nu, clip, gradient_norm", [(3.0, 20.0, 0.5), (1.0, 1.0, 2.0), (np.inf, 0.5, 1e-3), (2.1, 1e4, 5.0)]
)
def test_expectations_in_one_dimension_are_integrals_over_a_line(nu, clip, gradient_norm):
    """Rare and large examples too: of Student's noise beyond the clip norm, one in ten thousand has a say in m2."""
    noise = stats.norm() if math.isinf(nu) else stats.t(nu)
    law = {"num_params": 1, "example_noise_std": 1.0, "degrees_of_freedom": nu, "l2_clip_norm": clip}
    found = low_dimension_clipping_expectations(np.array([gradient_norm]), **law)
    low, high = noise.cdf(-clip - gradient_norm), noise.sf(clip - gradient_norm)
    ends = [-clip - gradient_norm, *(-gradient_norm + np.array([-1.0, 1.0]) * min(1.0, clip / 2)), clip - gradient_norm]

    def inside(of_gradient):
        return sum(
            integrate.quad(lambda z: of_gradient(gradient_norm + z) * noise.pdf(z), a, b, epsabs=1e-14, limit=400)[0]
            for a, b in itertools.pairwise(ends)
        )

    mean = inside(lambda g: g) + clip * (high - low)
    assert found.shrink_factor[0] == pytest.approx(mean / gradient_norm, rel=1e-6)
    assert found.second_moment[0] == pytest.approx(inside(lambda g: g**2) + clip**2 * (low + high), rel=1e-6)
    assert found.clip_fraction[0] == pytest.approx(low + high, rel=1e-6)


@pytest.mark.parametrize(
    "num_params, scale, nu, clip, gradient_norm, h",
    [
        (100, 1.0, 0.1, 1e9, 1.0, 0.87252),  # so heavy that a seventh of all examples is a billion times as long
        (10, 1.0, 0.2, 1e8, 1e-3, 0.97776),
        (10, 1e6, math.inf, 1e12, 1e-8, 1.0),  # a gradient far below the noise: no digit is lost
        (1, 1e6, 3.0, 1e12, 1e-8, 1.0),
        (10, 1.0, 1e30, 3.0, 1.0, 0.84872),  # as Gaussian noise
        (2, 1e-6, math.inf, 1e-12, 1e-200, 0.5 * math.sqrt(math.pi / 2) * 1e-6),  # C (1 - 1/d) E[1/t]
    ],
)
def test_low_dimension_expectations_at_far_ends(num_params, scale, nu, clip, gradient_norm, h):
    law = {"example_noise_std": scale, "degrees_of_freedom": nu, "l2_clip_norm": clip}
    found = low_dimension_clipping_expectations(np.array([gradient_norm]), num_params=num_params, **law)
    assert found.shrink_factor[0] == pytest.approx(h, rel=1e-5)
    assert 0 <= found.clip_fraction[0] <= 1 and found.second_moment[0] <= clip**2


@pytest.mark.parametrize("num_params, nu", [(1, np.inf), (5, 3.0), (1000, np.inf)])
def test_without_a_gradient_they_are_what_they_tend_to(num_params, nu):
    law = {"num_params": num_params, "example_noise_std": 0.3, "degrees_of_freedom": nu, "l2_clip_norm": 1.0}
    none, little = (low_dimension_clipping_expectations(np.array([g]), **law) for g in (0.0, 1e-4))
    for field in ("shrink_factor", "second_moment", "clip_fraction"):
        assert getattr(none, field) == pytest.approx(getattr(little, field), rel=1e-5)


@pytest.mark.parametrize(
    "gradient_norm, change, message",
    [
        (-1.0, {}, "Expected 0 <= gradient_norm < inf, got -1.0"),
        (1.0, {"num_params": 0}, "Expected num_params >= 1, got 0"),
        (1.0, {"example_noise_std": -0.1}, "Expected example_noise_std >= 0, got -0.1"),
        (1.0, {"degrees_of_freedom": 0.0}, "Expected degrees_of_freedom > 0, got 0.0"),
        (1.0, {"l2_clip_norm": 0.0}, "Expected l2_clip_norm > 0, got 0.0"),
    ],
)
def test_values_out_of_range_are_refused(gradient_norm, change, message):
    law = {"num_params": 3, "example_noise_std": 0.3, "degrees_of_freedom": np.inf, "l2_clip_norm": 1.0} | change
    with pytest.raises(ValueError, match=message):
        low_dimension_clipping_expectations(np.array([gradient_norm]), **law)
