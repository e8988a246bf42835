"""Coins of touched coordinates are the float64 ones, word by word, beside every threshold."""

import numba
import numpy as np
import pytest
from scipy.special import ndtr

from noisecast.compiled import aligned
from noisecast.engines import _kernels, row_sparse

NOISE_STD = np.float32(0.37)
# G/(z C) where float32's Phi is steep, is flat, is cut off (beyond 5.2), and is 0 or 1 to every word.
RATIOS = np.concatenate([np.linspace(-5.1, 5.1, 409), [-7.0, -6.2, -5.5, -5.2001, 5.2001, 5.5, 6.2, 7.0, 0.0]])


def near_and_far() -> tuple[np.ndarray, np.ndarray]:
    """Sums G and words: for each ratio those nearest to its threshold, some up to 2^14 away, and any."""
    sums = (RATIOS * NOISE_STD).astype(np.float32)
    threshold = ndtr(-np.float64(sums) / np.float64(NOISE_STD)) * 2.0**32
    rng = np.random.default_rng(0)
    away = np.concatenate([np.arange(-4, 4), rng.integers(-(2**14), 2**14, 64)])
    beside = np.clip(np.round(threshold)[:, None] + away, 0, 2**32 - 1).astype(np.uint32)
    anywhere = rng.integers(0, 2**32, (len(sums), 8), dtype=np.uint32)
    words = np.concatenate([beside, anywhere], axis=1)
    return np.repeat(sums, words.shape[1]), words.ravel()


def float64_is_up(sums: np.ndarray, words: np.ndarray) -> np.ndarray:
    return (np.float64(words) + 0.5) * 2.0**-32 < ndtr(-np.float64(sums) / np.float64(NOISE_STD))


def engine_is_up(sums: np.ndarray, words: np.ndarray, num_lanes: int = 1) -> np.ndarray:
    """Where the engine moves weights of 0 with these words in its scratch, dealt out to so many lanes."""
    ones = np.ones(num_lanes, np.float32)
    lanes = _kernels.Lanes(
        clip=ones, noise_std=ones * NOISE_STD, per_noise_std=ones / NOISE_STD, learning_rate=ones, step_size=ones,
        step_noise=ones, lane=np.zeros(num_lanes, np.uint32), keys=np.zeros((11, 4 * num_lanes), np.uint32),
    )  # fmt: skip
    scratch = row_sparse._scratch(4, lanes.lane, 1)
    padded = -(-len(sums) // num_lanes) * num_lanes
    sums, words = (np.resize(values, padded).reshape(-1, num_lanes) for values in (sums, words))
    tile, moved = len(scratch.words), np.zeros(sums.shape, np.float32)
    move = _moves_of_one if num_lanes == 1 else _moves_of_many
    for first in range(0, len(sums), tile):
        part = slice(first, first + tile)
        size = len(sums[part])
        scratch.words[:size] = words[part]
        weights = np.zeros((size, num_lanes), np.float32)
        move(weights, np.arange(size, dtype=np.uint32), aligned(sums[part]), lanes, scratch)
        moved[part] = weights
    assert set(np.unique(moved)) == {-1.0, 1.0}
    return moved.ravel() > 0


def float32_is_up(sums: np.ndarray, words: np.ndarray) -> np.ndarray:
    """What the engine would take without `_is_up`."""
    per_noise_std = np.float32(1) / NOISE_STD
    return _coins(sums, per_noise_std, words) < 0


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
        found[i] = _kernels._coin(sums[i], per_noise_std, words[i])
    return found


@pytest.mark.parametrize("num_lanes", [1, 2, 8, 17])
def test_every_coin_is_the_float64_one(num_lanes):
    sums, words = near_and_far()
    expected = float64_is_up(sums, words)
    assert 0.3 < expected.mean() < 0.7
    wrong = engine_is_up(sums, words, num_lanes)[: len(words)] != expected
    without = float32_is_up(sums, words) != expected
    print(f"{wrong.sum()} of {len(words)} coins wrong; {without.sum()} in float32 alone")
    assert not wrong.any()
    assert without.sum() > 100  # control: near ties do need float64


@pytest.mark.parametrize("num_lanes", [1, 8])
@pytest.mark.parametrize("ratio", [5.5, 6.2])
def test_the_tails_that_float32_cuts_off_are_there(ratio, num_lanes):
    """Phi(-5.5) 2^32 is 82 words and Phi(-6.2) one: a gradient that long is hardly ever turned by noise, not never."""
    words = np.arange(200, dtype=np.uint32)
    sums = np.full(len(words), ratio * NOISE_STD, np.float32)
    assert engine_is_up(sums, words, num_lanes).sum() == float64_is_up(sums, words).sum() == round(ndtr(-ratio) * 2**32)
