"""The bottom of a curve: of one that chance blurs, and of one that is known well and is no cubic."""

import numpy as np
import pytest

from noisecast.reproduction.fits import LOST, bootstrap
from noisecast.reproduction.valley import Valley, vertex

X = np.log(2) / 2 * np.arange(12)
BOTTOM, CLOSE = 2.0, 0.02


def steep(x, right=1.2, height=0.05):
    """Rising as 1 on the left and as e^(right x) on the right, as losses do."""
    away = right * (x - BOTTOM)
    return height * (np.exp(away) - away - 1)


def test_many_rates_place_a_flat_bottom_better_than_three():
    rng = np.random.default_rng(7)
    noisy = [steep(X)[:, None] + 0.006 * rng.normal(size=(len(X), 4)) for _ in range(300)]
    many = np.array([Valley(X, losses).bottom(losses.mean(axis=1)) for losses in noisy]) - BOTTOM
    three = np.array([vertex(X, losses.mean(axis=1)) for losses in noisy]) - BOTTOM
    print(f"\nmany {many.mean():+.3f} ± {many.std():.3f}, three {three.mean():+.3f} ± {three.std():.3f}")
    assert abs(many.mean()) < 0.06 and np.hypot(many.mean(), many.std()) < 0.7 * np.hypot(three.mean(), three.std())


@pytest.mark.parametrize("right", [1.2, 2.0, 4.0])
@pytest.mark.parametrize("height", [0.05, 5.0])
@pytest.mark.parametrize("seeds", [1, 3])
def test_a_curve_that_is_known_is_no_cubic(right, height, seeds):
    """Three seeds whose spread is small, and by chance smaller still at one rate: no weight is theirs."""
    curve = 0.7 + steep(X, right, height)
    spread = 1e-4 * height * np.exp(X) * np.random.default_rng(1).normal(size=(seeds, len(X)))
    spread[:, 5] *= 1e-3
    losses = (curve + (seeds > 1) * spread).T
    found = Valley(X, losses).bottom(losses.mean(axis=1))
    assert found == pytest.approx(BOTTOM, abs=CLOSE)
    weights = np.ones(len(X)) if seeds == 1 else 1 / losses.std(axis=1)
    near = abs(X - X[6]) <= np.log(2.9)
    cubic = np.polyfit(X[near], losses.mean(axis=1)[near], 3, w=weights[near])
    between = np.linspace(X[near][0], X[near][-1], 401)
    # The check's own control: a cubic, weighted by each rate's own spread, is seen to miss it.
    assert right < 4 or abs(between[np.polyval(cubic, between).argmin()] - BOTTOM) > CLOSE


def test_what_diverges_has_no_part_in_it():
    curve = 0.7 + steep(X, 2.0)
    curve[9:] = LOST
    assert Valley(X, curve[:, None]).bottom(curve) == pytest.approx(BOTTOM, abs=0.02)


def test_a_best_rate_at_an_edge_stays_there():
    curve = 0.7 + steep(X)
    assert Valley(X[7:], curve[7:, None]).bottom(curve[7:]) == X[7]


def test_intervals_hold_the_bottom_of_a_curve_that_is_known_well():
    """Also where it is no polynomial; the least degree that chance explains is seen to be too low there."""
    rng, held, held_by_less = np.random.default_rng(5), 0, 0
    for _ in range(60):
        losses = steep(X, 1.2)[:, None] + steep(-X + 2 * BOTTOM, 0.6)[:, None] + 0.002 * rng.normal(size=(len(X), 10))
        valley = Valley(X, losses)
        interval = bootstrap(lambda sample, valley=valley: valley.bottom(sample.mean(axis=1)), losses)
        held += interval.contains(BOTTOM)
        less = Valley(X, losses)
        less._degree -= 1
        interval = bootstrap(lambda sample, less=less: less.bottom(sample.mean(axis=1)), losses)
        held_by_less += interval.contains(BOTTOM)
    print(f"\n{held} of 60, by one degree less {held_by_less}")
    assert held >= 51
    assert held_by_less < held
