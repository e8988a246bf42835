"""Coins of touched coordinates are the float64 ones, word by word, beside every threshold."""

import numba
import numpy as np
import pytest
from scipy.special import ndtr

from noisecast.compiled import aligned
from noisecast.engines import _kernels
from noisecast.engines.row_sparse_lanes import scratch_of

# G/(z C) where float32's Phi is steep, is flat, is cut off (beyond 5.2), and is 0 or 1 to every word.
RATIOS = np.concatenate([np.linspace(-5.1, 5.1, 409), [-7.0, -6.2, -5.5, -5.2001, 5.2001, 5.5, 6.2, 7.0, 0.0]])


def noise_of(num_lanes: int, count: int) -> np.ndarray:
    """z C of so many numbers that are dealt out to lanes whose noise differs."""
    return np.resize(0.37 * np.linspace(1, 2, num_lanes), count).astype(np.float32)


def near_and_far(num_lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums G and words: for each ratio those nearest to its threshold, some up to 2^14 away, and any."""
    rng = np.random.default_rng(0)
    away = np.concatenate([np.arange(-4, 4), rng.integers(-(2**14), 2**14, 64)])
    ratios = np.repeat(RATIOS, len(away) + 8)
    sums = (ratios * noise_of(num_lanes, len(ratios))).astype(np.float32)
    beside = np.round(threshold(sums, num_lanes) * 2.0**32) + np.tile([*away, *(8 * [0])], len(RATIOS))
    anywhere = rng.integers(0, 2**32, len(ratios))
    is_near = np.tile(np.arange(len(away) + 8) < len(away), len(RATIOS))
    return sums, np.clip(np.where(is_near, beside, anywhere), 0, 2**32 - 1).astype(np.uint32)


def threshold(sums: np.ndarray, num_lanes: int) -> np.ndarray:
    return ndtr(-np.float64(sums) / np.float64(noise_of(num_lanes, len(sums))))


def float64_is_up(sums: np.ndarray, words: np.ndarray, num_lanes: int) -> np.ndarray:
    return (np.float64(words) + 0.5) * 2.0**-32 < threshold(sums, num_lanes)


def engine_is_up(sums: np.ndarray, words: np.ndarray, num_lanes: int) -> np.ndarray:
    """Where the engine moves weights of 0 with these words in its scratch, dealt out to lanes."""
    ones, noise_std = np.ones(num_lanes, np.float32), noise_of(num_lanes, num_lanes)
    lanes = _kernels.Lanes(
        clip=ones, noise_std=noise_std, per_noise_std=ones / noise_std, learning_rate=ones, step_size=ones,
        step_noise=ones, lane=np.zeros(num_lanes, np.uint32), keys=np.zeros((11, 4 * num_lanes), np.uint32),
    )  # fmt: skip
    scratch = scratch_of(4, lanes.lane, 1)
    padded = -(-len(sums) // num_lanes) * num_lanes
    in_rows = [np.resize(values, padded).reshape(-1, num_lanes) for values in (sums, words)]
    tile, moved = len(scratch.words), np.zeros(in_rows[0].shape, np.float32)
    move = _moves_of_one if num_lanes == 1 else _moves_of_many
    for first in range(0, len(moved), tile):
        part = slice(first, first + tile)
        size = len(moved[part])
        scratch.words[:size] = in_rows[1][part]
        weights = np.zeros((size, num_lanes), np.float32)
        move(weights, np.arange(size, dtype=np.uint32), aligned(in_rows[0][part]), lanes, scratch)
        moved[part] = weights
    assert set(np.unique(moved)) <= {-1.0, 1.0}
    return moved.ravel()[: len(sums)] > 0


def float32_is_up(sums: np.ndarray, words: np.ndarray, num_lanes: int) -> np.ndarray:
    """What the engine would take without `_is_up`."""
    return _coins(sums, np.float32(1) / noise_of(num_lanes, len(sums)), words) < 0


# Pieces of kernels can be called by compiled code alone.
@numba.njit
def _moves_of_one(weights, rows, sums, lanes, scratch):
    _kernels._sign_moves_of_one(weights, rows, sums, lanes, scratch)


@numba.njit
def _moves_of_many(weights, rows, sums, lanes, scratch):
    per_noise_std = _kernels.of_rows(lanes.per_noise_std, len(scratch.words))
    _kernels._sign_moves_of_many(weights, rows, sums, lanes, per_noise_std, scratch)


@numba.njit
def _coins(sums, per_noise_std, words):
    found = np.empty(len(sums), np.float32)
    for i in range(len(sums)):
        found[i] = _kernels._coin(sums[i], per_noise_std[i], words[i])
    return found


@pytest.mark.parametrize("num_lanes", [1, 2, 8, 17, 700])
def test_every_coin_is_the_float64_one(num_lanes):
    """Lanes differ in noise; several tiles, and of many lanes several stretches of a tile."""
    sums, words = near_and_far(num_lanes)
    expected = float64_is_up(sums, words, num_lanes)
    assert 0.3 < expected.mean() < 0.7
    wrong = engine_is_up(sums, words, num_lanes) != expected
    without = float32_is_up(sums, words, num_lanes) != expected
    print(f"{wrong.sum()} of {len(words)} coins wrong; {without.sum()} in float32 alone")
    assert not wrong.any()
    assert without.sum() > 100  # control: near ties do need float64


@pytest.mark.parametrize("num_lanes", [1, 3, 17])
def test_one_near_tie_is_seen_wherever_it_lies(num_lanes):
    """All others, of words far from their thresholds, take float32's coin."""
    sums, words = near_and_far(1)
    wrong = np.flatnonzero(float32_is_up(sums, words, 1) != float64_is_up(sums, words, 1))[0]
    rows = 2048
    for row in (0, 1, 59, 60, 63, 340, 341, rows - 1):  # on both sides of where stretches and tiles end
        place, count = row * num_lanes, rows * num_lanes  # in the first lane, whose noise is the one lane's
        many_sums, many_words = np.zeros(count, np.float32), np.full(count, 2**30, np.uint32)
        many_sums[place], many_words[place] = sums[wrong], words[wrong]
        expected = float64_is_up(many_sums, many_words, num_lanes)
        assert (float32_is_up(many_sums, many_words, num_lanes) != expected).sum() == 1  # control
        np.testing.assert_array_equal(engine_is_up(many_sums, many_words, num_lanes), expected)


@pytest.mark.parametrize("num_lanes", [1, 8])
@pytest.mark.parametrize("ratio", [5.5, 6.2])
def test_the_tails_that_float32_cuts_off_are_there(ratio, num_lanes):
    """Phi(-5.5) 2^32 is 82 words and Phi(-6.2) one: a gradient that long is hardly ever turned by noise, not never."""
    words = np.repeat(np.arange(200, dtype=np.uint32), num_lanes)
    sums = (ratio * noise_of(num_lanes, len(words))).astype(np.float32)
    expected = float64_is_up(sums, words, num_lanes)
    assert expected.sum() == num_lanes * round(ndtr(-ratio) * 2**32)
    np.testing.assert_array_equal(engine_is_up(sums, words, num_lanes), expected)
