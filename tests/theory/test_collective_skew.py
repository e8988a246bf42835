"""Outputs that few directions make are skew: as of weights that are drawn."""

import numpy as np
import pytest

from noisecast.theory.collective_skew import CollectiveSkew
from noisecast.theory.output_law import GaussianLaw, GridLaw, SkewLaw

SEED = 610_301


@pytest.fixture(scope="module")
def drawn():
    """30,000 runs of 300 steps with three weights: rows, outputs at the end, and what is known of a field."""
    rng = np.random.default_rng(SEED)
    rows = rng.normal(size=(120, 3)) * [1.0, 0.7, 0.4]
    side = np.sign(rows @ [1.5, -1.0, 0.5] + 0.3 * rng.normal(size=120))
    rate, noise, num_steps, weights = 0.3, 0.16, 300, np.zeros((30_000, 3))
    for _ in range(num_steps):
        residual = -1 / (1 + np.exp(side * (weights @ rows.T)))
        weights += -rate * (residual * side) @ rows / len(rows) + noise * rng.normal(size=weights.shape)
    outputs = weights @ rows.T
    mean, std = outputs.mean(axis=0), outputs.std(axis=0)
    nodes, shares = np.polynomial.hermite_e.hermegauss(60)
    residual = -side[:, None] / (1 + np.exp(side[:, None] * (mean[:, None] + std[:, None] * nodes)))
    orders = [
        residual * np.polynomial.hermite_e.hermeval(nodes, np.eye(4)[k]) @ shares / shares.sum() for k in (1, 2, 3)
    ]
    slope, bend, third = orders[0] / std, orders[1] / std**2, orders[2] / std**3
    known = {
        "gain": np.full(3, rate),
        "jacobian": (rows * slope[:, None]).T @ rows / len(rows),
        "covariance": np.cov(weights.T),
        "num_steps": num_steps,
    }
    return rows, outputs, (bend, third), known


def test_the_skew_of_outputs_is_that_of_drawn_weights(drawn):
    rows, outputs, (bend, third), known = drawn
    std = outputs.std(axis=0)
    skews = ((outputs - outputs.mean(axis=0)) ** 3).mean(axis=0) / std**3
    found = first = CollectiveSkew.of(rows, std, bend, **known)
    for _ in range(8):  # as from time step to time step
        found = CollectiveSkew.of(rows, std, bend + 6 * found.gamma(rows, std) * std * third, **known)
    gammas, by_bends = found.gamma(rows, std), first.gamma(rows, std)
    times, times_by_bends = (float(6 * each @ skews / (skews @ skews)) for each in (gammas, by_bends))
    print(
        f"\nskews {np.abs(skews).mean():.3f} on average, found times {times:.3f}, by bends alone {times_by_bends:.3f}"
    )
    assert np.corrcoef(gammas, skews)[0, 1] > 0.97
    assert 0.75 < times < 1.25
    assert times_by_bends > 1.25  # control


def test_outputs_of_a_straight_force_are_no_skew_ones(drawn):
    rows, outputs, (bend, _), known = drawn
    assert not CollectiveSkew.of(rows, outputs.std(axis=0), 0 * bend, **known).is_any
    assert not CollectiveSkew.none().is_any


def test_examples_that_share_nothing_have_no_skew_together():
    settings = {"gain": np.full(3, 0.3), "jacobian": np.eye(3), "covariance": np.eye(3), "num_steps": 300}
    assert not CollectiveSkew.of(np.eye(3), np.full(3, 0.5), np.full(3, 5.0), **settings).is_any
    assert CollectiveSkew.of(np.ones((3, 3)), np.full(3, 0.5), np.full(3, 5.0), **settings).is_any


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
