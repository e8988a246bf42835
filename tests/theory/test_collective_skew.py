"""Outputs that few directions make are skew: as of weights that are drawn."""

from typing import NamedTuple

import numpy as np
import pytest

from noisecast.theory.collective_skew import CollectiveSkew, Past, Span
from noisecast.theory.output_law import GaussianLaw, GridLaw, SkewLaw

SEED = 610_301


def bends_and_slopes(side, mean, std, gamma):
    """E[rho (x^2 - x E x^3 - 1)]/Var z and Cov(z, rho)/Var z of residuals, by skew laws; (n,) each."""
    law = SkewLaw(GaussianLaw(mean, std**2), gamma)
    residual = -side / (1 + np.exp(side * law.outputs(np.ones(len(mean)))))
    third = (law.shares * law.places**3).sum(axis=0)
    of_square = (law.shares * residual * (law.places**2 - third * law.places - 1)).sum(axis=0)
    return of_square / std**2, law.hermite_means(residual, 2)[1] / std


class Drawn(NamedTuple):
    """Of drawn weights, and what `CollectiveSkew` makes of what they have been through."""

    rows: np.ndarray
    outputs: np.ndarray
    found: CollectiveSkew
    past: Past

    @property
    def skews(self):
        centred = self.outputs - self.outputs.mean(axis=0)
        return (centred**3).mean(axis=0) / centred.std(axis=0) ** 3


def drawn(rows, side, *, rate, noise, ends, runs, bent=True) -> Drawn:
    """Runs in spans with these ends, half-way through which a field is seen."""
    rng, weights = np.random.default_rng(SEED), np.zeros((runs, rows.shape[1]))
    gain, own, past, found = np.full(rows.shape[1], rate), np.ones(len(rows)), Past(), CollectiveSkew.none()
    covariance, start = np.zeros((rows.shape[1], rows.shape[1])), 0
    for end in ends:
        half = (start + end) // 2
        for step in range(start, end):
            if step == half:
                outputs = weights @ rows.T
                std = outputs.std(axis=0)
                gamma = found.gamma_of_few(std) if found.is_any else np.zeros(len(rows))
                bends, slopes = bends_and_slopes(side, outputs.mean(axis=0), np.maximum(std, 1e-3), gamma)
            residual = -side / (1 + np.exp(side * (weights @ rows.T)))
            weights += -rate * residual @ rows / len(rows) + noise * rng.normal(size=weights.shape)
        jacobian, now = (rows * slopes[:, None]).T @ rows / len(rows), np.cov(weights.T)
        past = past.then(Span(start, end, gain, jacobian, (covariance, now)), (half,), (bends * bent,))
        outputs = weights @ rows.T
        found = CollectiveSkew.of(rows, outputs.std(axis=0), own, past, len(rows))
        covariance, start = now, end
    return Drawn(rows, outputs, found, past)


ENDS = (1, 3, 7, 15, 30, 60, 100, 140, 180, 220, 260, 300)


@pytest.fixture(scope="module")
def of_few_directions():
    """120 examples in three dimensions."""
    rng = np.random.default_rng(SEED)
    rows = rng.normal(size=(120, 3)) * [1.0, 0.7, 0.4]
    side = np.sign(rows @ [1.5, -1.0, 0.5] + 0.3 * rng.normal(size=120))
    return rows, side


def test_the_skew_of_outputs_is_that_of_drawn_weights(of_few_directions):
    drawn_now = drawn(*of_few_directions, rate=0.3, noise=0.16, ends=ENDS, runs=15_000)
    std, skews = drawn_now.outputs.std(axis=0), drawn_now.skews
    gammas = drawn_now.found.gamma_of_few(std)
    # Where examples count once in what they do to themselves, rows like them have their skew.
    np.testing.assert_allclose(gammas, drawn_now.found.gamma(drawn_now.rows, std), rtol=1e-4, atol=1e-6)
    times = float(6 * gammas @ skews / (skews @ skews))
    print(f"\nskews {np.abs(skews).mean():.3f} on average, found times {times:.3f}")
    assert np.corrcoef(gammas, skews)[0, 1] > 0.97
    assert 0.85 < times < 1.15


def test_outputs_of_a_straight_force_are_no_skew_ones(of_few_directions):
    assert not drawn(*of_few_directions, rate=0.3, noise=0.16, ends=ENDS, runs=2_000, bent=False).found.is_any
    assert not CollectiveSkew.none().is_any


@pytest.mark.parametrize("num_steps, noise", [(60, 0.03), (300, 0.03), (300, 0.1)])
def test_the_skew_of_an_example_that_is_alone_is_that_of_drawn_weights(num_steps, noise):
    """Each of 8 examples has a column to itself, as rare categories have. Skewness of the other side comes first."""
    ends = tuple(step for step in ENDS if step <= num_steps)
    drawn_now = drawn(2.0 * np.eye(8), np.ones(8), rate=0.3, noise=noise, ends=ends, runs=20_000)
    skew = drawn_now.skews.mean()
    found = 6 * drawn_now.found.gamma_of_few(drawn_now.outputs.std(axis=0)).mean()
    print(f"\n{skew:.3f}, found {found:.3f}")
    assert found == pytest.approx(skew, rel=0.12, abs=0.02)


def settled(rows, bends, own, num_examples):
    """After 300 steps of the same field."""
    size = rows.shape[1]
    past = Past().then(Span(0, 300, np.full(size, 0.3), np.eye(size), (np.eye(size),) * 2), (0,), (bends,))
    return CollectiveSkew.of(rows, np.full(len(rows), 0.5), own, past, num_examples)


def test_examples_that_share_nothing_have_no_skew_but_of_themselves():
    bends = np.full(3, 5.0)
    assert not settled(np.eye(3), bends, np.zeros(3), 3).is_any
    assert settled(np.eye(3), bends, np.ones(3), 3).is_any
    assert not settled(np.eye(3), bends, np.ones(3), 3000).is_any
    assert settled(np.ones((3, 3)), bends, np.zeros(3), 3).is_any


def test_examples_for_which_others_stand_skew_themselves_alike():
    rows, std = np.eye(8), np.full(8, 2.0)
    half = settled(rows[::2], np.full(4, 5.0), np.ones(4), 8)
    gammas = half.gamma_of_all(rows, std, np.arange(4) * 2, np.arange(8) // 2)
    assert 0 < abs(gammas[0]) < 0.15
    others = half.gamma_of_all(rows, np.full(8, 0.5), np.arange(4) * 2, np.arange(8) // 2)[1::2]
    assert others == pytest.approx(half.gamma_of_few(np.full(4, 0.5)))


def test_what_has_been_pushed_is_left_by_all_spans_since():
    """Of two spans of other rates, as by hand."""
    gains, slopes = (np.array([0.1, 0.2]), np.array([0.3, 0.1])), (np.diag([1.0, 0.5]), np.diag([0.2, 2.0]))
    before, between, now = np.diag([0.0, 1.0]), np.diag([2.0, 3.0]), np.diag([4.0, 5.0])
    past = Past().then(Span(0, 10, gains[0], slopes[0], (before, between)), (0, 5), (np.zeros(1), np.ones(1)))
    past = past.then(Span(10, 20, gains[1], slopes[1], (between, now)), (10, 15), (np.full(1, 3.0), np.full(1, 5.0)))
    (late, late_answer), (early, early_answer) = past.left(np.array([16.0, 4.0]))
    left_late = np.exp(-4 * gains[1] * np.diag(slopes[1]))
    left_early = np.exp(-6 * gains[0] * np.diag(slopes[0]) - 10 * gains[1] * np.diag(slopes[1]))
    np.testing.assert_allclose(late_answer, np.diag(left_late * gains[1]))
    np.testing.assert_allclose(early_answer, np.diag(left_early * gains[0]))
    np.testing.assert_allclose(late, np.diag(left_late * [3.2, 4.2]))
    np.testing.assert_allclose(early, np.diag(left_early * [0.8, 1.8]))
    np.testing.assert_allclose(past.bends_at(np.array([20.0, 12.0, 2.5])).ravel(), [5.0, 3.8, 0.5])


@pytest.mark.parametrize("gamma", [-0.1, -0.02, 0.0, 0.05, 0.12])
def test_a_skew_law_is_standardised_and_knows_its_shares(gamma):
    rng = np.random.default_rng(SEED)
    drawn = rng.normal(size=400_000)
    drawn = (drawn + gamma * (drawn**2 - 1)) / np.sqrt(1 + 2 * gamma**2)
    places = np.linspace(-6, 6, 161)[:, None] * np.ones(2)
    grid = GridLaw(np.zeros(2), places, np.exp(-(places**2) / 2) / np.exp(-(places**2) / 2).sum(axis=0))
    for law in (GaussianLaw(np.zeros(2), np.ones(2)), grid):
        skew = SkewLaw(law, np.full(2, gamma))
        moments = [(skew.shares * skew.places**k).sum(axis=0)[0] for k in (1, 2, 3)]
        np.testing.assert_allclose(moments, [0, 1, (drawn**3).mean()], atol=0.02)
        for threshold in (-2.0, -0.5, 0.0, 1.5):
            assert skew.below(np.full(2, threshold))[0] == pytest.approx((drawn < threshold).mean(), abs=0.004)
