"""Fits find what was put in, and their intervals cover it as often as they say."""

import math

import numpy as np
import pandas as pd
import pytest

from noisecast.reproduction.fits import (
    LOST,
    by_seed,
    each,
    last_crossing,
    log_log_slope,
    mean,
    only,
    power_law,
    smoothed,
)

X = np.geomspace(0.5, 12, 6)


def curves(slope: float, *, seeds: int, spread: float, rng, x=X) -> np.ndarray:
    """x^slope with lognormal errors, part of them common to a seed; (points, seeds)."""
    common = rng.normal(size=seeds)
    own = rng.normal(size=(len(x), seeds))
    return x[:, None] ** slope * np.exp(spread * (0.5 * common + own))


@pytest.mark.parametrize("seeds", [3, 10])
def test_a_slope_interval_covers_the_slope_and_not_a_wrong_one(seeds):
    rng = np.random.default_rng(1)
    found = [log_log_slope(X, curves(2.0, seeds=seeds, spread=0.05, rng=rng)) for _ in range(100)]
    covered = np.mean([estimate.contains(2.0) for estimate in found])
    wrong = np.mean([estimate.contains(1.7) for estimate in found])
    assert 0.88 <= covered <= 1.0  # 95 % within its own chance, of 100
    assert wrong <= 0.1
    assert abs(np.mean([estimate.value for estimate in found]) - 2.0) < 0.01


@pytest.mark.parametrize("points, right_of_4", [(6, 0.1), (24, 0.0)])
def test_a_crossing_interval_covers_the_crossing_and_not_a_wrong_one(points, right_of_4):
    """More points on the same range are more runs: their neighbours smooth each, and the interval gets shorter."""
    rng = np.random.default_rng(2)
    x, found = np.geomspace(0.5, 12, points), []
    for _ in range(100):
        a, b = (np.log(curves(slope, seeds=5, spread=0.05, rng=rng, x=x)) for slope in (2.0, 1.0))
        found.append(last_crossing(x, a - b - np.log(3.0)))  # 2 log x = log x + log 3, lines between the points
    assert 0.87 <= np.mean([estimate.contains(3.0) for estimate in found]) <= 1.0
    assert np.mean([estimate.contains(4.0) for estimate in found]) <= right_of_4


@pytest.mark.parametrize("power, wrong", [(2.0, 1.5), (1.0, 0.5), (0.0, 0.5)])
def test_a_power_above_an_unknown_offset_is_found_and_a_wrong_one_is_not(power, wrong):
    rng = np.random.default_rng(4)
    grown = np.log(X) if power == 0 else X**power / power
    found = power_law(X, (0.7 + 0.1 * grown)[:, None] * np.exp(0.003 * rng.normal(size=(len(X), 5))))
    assert found.contains(power) and not found.contains(wrong)


def test_what_falls_has_no_power():
    assert math.isnan(power_law(X, np.outer(1 + 1 / X, [1.0, 1.001])).value)


def test_a_power_at_a_limit_of_the_search_has_an_open_interval():
    levels_off, explodes = (
        power_law(X, np.outer(grown, [0.999, 1.001, 1.0])) for grown in (1 - 0.01 / X**2, 0.1 + X**6)
    )
    assert (levels_off.value, levels_off.low) == (-1.0, -math.inf) and levels_off.high < 0
    assert (explodes.value, explodes.high) == (4.0, math.inf) and explodes.low > 3


def test_no_crossing_is_not_a_number():
    assert math.isnan(last_crossing(X, -np.outer(X, [1.0, 1.1])).value)


def test_a_crossing_near_the_edge_has_an_open_interval():
    gaps = np.linspace(-1, 0.01, 6)[:, None] + np.array([-0.3, 0.0, 0.3])
    found = last_crossing(X, gaps)
    assert found.high == math.inf and 0 < found.low < found.value


def test_smoothing_takes_noise_away_keeps_parabolas_and_points_far_apart():
    x = np.geomspace(1, 4, 14)
    noise = np.random.default_rng(5).normal(size=(14, 2000))
    parabola = (np.log(x) - 0.3)[:, None] ** 2
    found = smoothed(x, parabola + noise)
    assert found.mean(axis=1) == pytest.approx(parabola[:, 0], abs=0.1)
    assert found[4:10].std() < 0.6  # of 1; nine points and a parabola: sqrt(59 / 231) = 0.51
    assert smoothed(X, noise[: len(X)]) == pytest.approx(noise[: len(X)])


def test_a_lost_run_is_not_smoothed_away_and_spoils_no_other_point():
    x = np.geomspace(1, 4, 14)
    gaps = np.outer(np.log(x / 2), [1.0, 1.1])
    lost = gaps.copy()
    lost[10, 1] = LOST
    found = smoothed(x, lost)
    assert np.delete(found, 10, axis=0) == pytest.approx(np.delete(gaps, 10, axis=0)) and found[10, 1] == LOST


def test_one_seed_has_no_interval():
    found = log_log_slope(X, X[:, None])
    assert found.value == pytest.approx(1.0)
    assert math.isnan(found.low) and not found.contains(1.0) and not found.within(0, 2) and found.leaves_room(3, 4)


def test_an_interval_is_the_same_whenever_it_is_asked_for():
    values = curves(1.0, seeds=4, spread=0.1, rng=np.random.default_rng(3))
    assert log_log_slope(X, values) == log_log_slope(X, values)


def test_the_mean_of_three_has_students_width():
    found = mean(np.array([1.0, 2.0, 3.0]))
    assert found.value == 2.0
    assert found.high - found.low == pytest.approx(2 * 4.303 / np.sqrt(3), rel=1e-3)


def test_rows_by_seed_by_value_and_by_group():
    rows = pd.DataFrame({"noise_multiplier": [2.0, 1.0, 2.0], "seed": [0, 0, 1], "value": [5.0, 4.0, 6.0]})
    x, values = by_seed(rows)
    assert x.tolist() == [1.0, 2.0] and values.tolist() == [[4.0], [5.0]]  # seed 1 lacks a point
    assert only(rows, seed=1)["value"].tolist() == [6.0]
    assert [(z, len(some)) for z, some in each(rows, "noise_multiplier")] == [(2.0, 2), (1.0, 1)]
