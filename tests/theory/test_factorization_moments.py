"""Clipped errors against quadrature, own pushes against the law of Marchenko and Pastur, stabilised steps."""

import itertools

import numpy as np
import pytest
from scipy import integrate, stats

from noisecast.theory.factorization_moments import (
    chebyshev_step,
    clipped_error,
    remaining_share,
    stages_for,
    variance_of_squares,
)

SEED_DESIGN, SEED_SQUARES = 646_201, 646_202


@pytest.mark.parametrize("mean, std, bound", [(0.3, 1.0, 0.5), (-2.0, 0.7, 1.0), (0.1, 0.2, 3.0), (5.0, 3.0, 0.01)])
def test_clipped_errors_are_the_integrals(mean, std, bound):

    def expected(function):
        edges = sorted({mean - 12 * std, -bound, bound, mean + 12 * std})
        pieces = itertools.pairwise(edges)
        return sum(
            integrate.quad(lambda e: function(e) * stats.norm.pdf(e, mean, std), low, high, epsabs=1e-13)[0]
            for low, high in pieces
        )

    found = clipped_error(np.array([mean]), np.array([std**2]), np.array([bound]))
    assert found.push[0] == pytest.approx(expected(lambda e: np.clip(e, -bound, bound)), abs=1e-9)
    assert found.slope[0] == pytest.approx(expected(lambda e: float(abs(e) < bound)), abs=1e-9)
    assert found.square[0] == pytest.approx(expected(lambda e: np.clip(e, -bound, bound) ** 2), abs=1e-9)
    assert found.clip_fraction[0] == pytest.approx(1 - found.slope[0], abs=1e-12)


def test_slope_is_steins():
    bound, variance = np.array([0.8]), np.array([0.5])
    up, down = (clipped_error(np.array([0.4 + step]), variance, bound).push for step in (1e-5, -1e-5))
    assert clipped_error(np.array([0.4]), variance, bound).slope == pytest.approx((up - down) / 2e-5, rel=1e-7)


def test_certain_errors_are_clamped_and_far_bounds_clip_nothing():
    certain = clipped_error(np.array([-3.0, 0.2]), np.zeros(2), np.ones(2))
    np.testing.assert_allclose(certain.push, [-1.0, 0.2])
    np.testing.assert_allclose(certain.square, [1.0, 0.04])
    free = clipped_error(np.array([2.0]), np.array([3.0]), np.array([1e20]))
    assert (free.push[0], free.slope[0], free.square[0]) == pytest.approx((2.0, 1.0, 7.0))


def one_row(num_ratings, dim, end):
    """Noise and pull on one user's row with fixed items: mean variance of errors and of the row, exactly at time `end`.

    x' = -A'A x + noise of variance 1 a unit time, errors A x, |a_i|^2 = 1.
    """
    design = np.random.default_rng(SEED_DESIGN).normal(size=(num_ratings, dim))
    design /= np.linalg.norm(design, axis=1, keepdims=True)
    curvature, basis = np.linalg.eigh(design.T @ design)
    variance = np.where(curvature > 1e-9, -np.expm1(-2 * curvature * end) / (2 * np.maximum(curvature, 1e-9)), end)
    return float(np.mean((design @ basis) ** 2 @ variance)), float(np.mean(variance))


def closed(num_ratings, dim, end, damping_factor=1.0, num_steps=4000):
    """The same by the closure: v' = 1 - 2 v D n/d and D, in small explicit steps."""
    variance, share, length = 0.0, 1.0, end / num_steps
    for _ in range(num_steps):
        half = variance + length / 2 * (1 - 2 * variance * share * num_ratings / dim)
        settings = {"noise": 1.0, "damping": 2.0 * damping_factor}
        middle = float(remaining_share(np.array(share), spread=half, num_steps=length / 2, **settings))
        variance += length * (1 - 2 * half * middle * num_ratings / dim)
        share = float(remaining_share(np.array(share), spread=half, num_steps=length, **settings))
    return share * variance, variance


@pytest.mark.parametrize("num_ratings, dim", [(40, 120), (120, 120), (300, 120)])
@pytest.mark.parametrize("end, tolerance", [(0.02, 0.003), (0.3, 0.03), (3.0, 0.1), (40.0, 0.1)])
def test_own_pushes_are_exact_early_and_close_later(num_ratings, dim, end, tolerance):
    exact, found = one_row(num_ratings, dim, end), closed(num_ratings, dim, end)
    assert found[0] == pytest.approx(exact[0], rel=tolerance)


def test_errors_settle_at_the_share_of_marchenko_and_pastur():
    """n > d: errors keep d/n of 1/2; n < d: all of it. Without own pushes they would not."""
    assert closed(300, 120, 60.0)[0] == pytest.approx(0.5 * 120 / 300, rel=0.01)
    assert closed(40, 120, 300.0, num_steps=30_000)[0] == pytest.approx(0.5, rel=0.01)
    assert closed(40, 120, 300.0, damping_factor=0.0, num_steps=30_000)[0] == pytest.approx(0.5 * 120 / 40, rel=0.01)


def test_a_rating_without_own_pushes_keeps_all():
    assert remaining_share(np.ones(1), spread=np.ones(1), noise=0.0, damping=0.0, num_steps=1e6)[0] == 1.0
    assert remaining_share(np.ones(1), spread=np.ones(1), noise=0.0, damping=1e-3, num_steps=1000.0)[
        0
    ] == pytest.approx(np.exp(-1))


def test_variance_of_squares_is_that_of_samples():
    mean, variance = np.array([0.5, -1.0, 2.0]), np.array([1.0, 0.3, 0.2])
    errors = mean + np.sqrt(variance) * np.random.default_rng(SEED_SQUARES).normal(size=(400_000, 3))
    measured = float(np.var(np.sum(errors**2, axis=1)))
    assert measured == pytest.approx(variance_of_squares(mean, variance, variance), rel=0.02)
    assert measured != pytest.approx(variance_of_squares(mean, 1.05 * variance, variance), rel=0.02)
    assert measured != pytest.approx(variance_of_squares(mean, variance, 0.9 * variance), rel=0.02)


def decay(num_steps, rates, num_stages, end=1.0):
    state = np.ones(len(rates))
    for _ in range(num_steps):
        state = chebyshev_step(lambda y: -rates * y, state, -rates * state, end / num_steps, num_stages)
    return state


@pytest.mark.parametrize("num_stages", [2, 3, 7])
def test_steps_are_of_second_order(num_stages):
    rates = np.array([1.0])
    coarse, fine = (abs(decay(n, rates, num_stages)[0] - np.exp(-1.0)) for n in (20, 40))
    assert 3.5 < coarse / fine < 4.5


def test_stages_are_enough_and_few():
    for stiffness in (1.0, 10.0, 300.0, 1e4):
        rates = np.linspace(0, stiffness, 1000)
        stages = stages_for(stiffness)
        assert np.abs(decay(1, rates, stages)).max() <= 1 + 1e-9
        if stages > 2:
            assert np.abs(decay(1, 1.7 * rates, stages)).max() > 1  # two in three stages' worth would explode


def test_an_infinite_bound_clips_nothing():
    mean, variance = np.array([0.4, -3.0]), np.array([1.0, 0.0])
    found = clipped_error(mean, variance, np.full(2, np.inf))
    np.testing.assert_allclose(found.push, mean)
    np.testing.assert_allclose(found.square, mean**2 + variance, rtol=1e-9)
    assert found.slope.tolist() == [1.0, 1.0] and found.clip_fraction.tolist() == [0.0, 0.0]
