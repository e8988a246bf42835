"""Compiled steps of DP-Adam, beside those of `_kernels`. Its step depends on the noise's whole path, so no noise can be
summed up: every row moves at every step, and what a step costs is noise, two averages and a root for each number.
"""

import math

import numpy as np

from noisecast.compiled import FAST, INLINE, INSIDE, njit, prefetch, wide_vectors
from noisecast.engines._kernels import LINE, batch_of, clipped_sum, of_rows, touch
from noisecast.engines._lane_vectors import add_product
from noisecast.engines._noise_kernels import PAIRED, normal_tile, words_while_fetching
from noisecast.privacy.counter_noise import STEP_NOISE, normal_pair

f32, u32, u64 = np.float32, np.uint32, np.uint64

FAR = 2**22  # so many weights, with both averages, lie in memory, not in the cache
AT_ONCE = 48  # numbers whose normals are drawn while as many of each of four kinds are on their way
LEAST = f32(2.0**-126)  # of float32's normal numbers


@njit(**INLINE)
def _adam_move(g, m, v, keep_1, keep_2, unbias_1, unbias_2, eps):
    m = keep_1 * m + (f32(1.0) - keep_1) * g
    v = keep_2 * v + (f32(1.0) - keep_2) * g * g
    # The root as u / sqrt(u): x86 processors estimate 1 / sqrt(u), `FAST` lets LLVM use it and refine it by a step of
    # Newton's, and root and division would be what a step costs. It errs by 3e-7 of the root at most, and not at u = 0.
    u = max(v * unbias_2, LEAST)
    return m, v, (m * unbias_1) / (u * (f32(1.0) / f32(math.sqrt(u))) + eps)


@njit(**INSIDE)
def _move_tile(w, m, v, begin, draws, count, mean_noise_std, learning_rate, keep_1, keep_2, unbias_1, unbias_2, eps):
    """w, m, v: all numbers, flat, of which `count` from `begin` on move by the draws; g = draw z C/B.

    mean_noise_std, learning_rate: z C/B and eta of whole rows, as `of_rows` makes them.
    """
    wide_vectors()
    period = u64(len(learning_rate))
    for done in range(u64(0), u64(count), period):
        first = u64(begin) + done
        for i in range(min(period, u64(count) - done)):
            g = draws[done + i] * mean_noise_std[i]
            m[first + i], v[first + i], move = _adam_move(
                g, m[first + i], v[first + i], keep_1, keep_2, unbias_1, unbias_2, eps
            )
            w[first + i] -= learning_rate[i] * move


@njit(**INSIDE)
def _add_sums(draws, start, size, now, sums, stamp, slot, per_noise_std):
    """xi + G/(z C) of the rows `start` and on; sums: G by number of the row, or of every row if there is one lane."""
    wide_vectors()
    if draws.shape[1] == 1:
        column, own = draws.reshape(-1), sums.reshape(-1)
        for number in range(size):
            column[number] += own[start + number] * per_noise_std[0]
        return
    for number in range(size):
        if stamp[start + number] == now:
            add_product(draws, number, f32(1.0), per_noise_std, sums, slot[start + number])


@njit(**INSIDE)
def _normals_while_fetching(words, normals, half, m, v, begin):
    """`normal_tile` of words that are drawn, while both averages of its numbers come from memory.

    Some at a time: a processor waits for about fifty lines, and computes meanwhile.

    Args:
      words, normals: of whole pairs of rows, half a group apart; flat, as m, v.
      begin: place of the tile's first number in m and v.
    """
    wide_vectors()
    for group in range(0, len(words), 2 * half):
        for first in range(group, group + half, AT_ONCE):
            size = min(AT_ONCE, group + half - first)
            one, two = words[first : first + size], words[first + half : first + half + size]
            to_one, to_two = normals[first : first + size], normals[first + half : first + half + size]
            for at in range(begin + first, begin + first + size, LINE):
                for place in (at, at + half):
                    prefetch(m, place)
                    prefetch(v, place)
            for at in range(size):
                to_one[at], to_two[at] = normal_pair(one[at], two[at])


# It takes apart what tiles need once: to count who holds an array, at every tile, costs as much as a tenth of it.
@njit(**INSIDE)
def _adam_moves(weights, first, second, mean_noise_std, learning_rate, lanes, b1, b2, eps, step, scratch):
    """Every row, in tiles: noise, both moments and the step while they are in the cache; g = (xi + G/(z C)) z C/B.

    Along the whole tile, not row by row: a loop of a few lanes costs more to begin than to run.
    """
    unbias_1 = f32(-1.0 / math.expm1((step + 1) * math.log(b1))) if b1 > 0 else f32(1.0)
    unbias_2 = f32(-1.0 / math.expm1((step + 1) * math.log(b2))) if b2 > 0 else f32(1.0)
    keep_1, keep_2, width, tile = f32(b1), f32(b2), weights.shape[1], len(scratch.normals)
    w, m, v = weights.reshape(-1), first.reshape(-1), second.reshape(-1)
    words, draws, normals = scratch.words.reshape(-1), scratch.normals.reshape(-1), scratch.normals
    sums, stamp, slot, per_noise_std = scratch.gradient, scratch.stamp, scratch.slot, lanes.per_noise_std
    for start in range(0, len(weights), tile):
        size = min(tile, len(weights) - start)
        if len(w) < FAR:
            normal_tile(start, size, lanes, u32(step), STEP_NOISE, scratch)
        else:
            words_while_fetching(start, size, lanes, u32(step), STEP_NOISE, scratch, w)
            pairs = -(-size // (2 * PAIRED)) * 2 * PAIRED * width
            _normals_while_fetching(words[:pairs], draws, PAIRED * width, m, v, start * width)
        _add_sums(normals, start, size, step + 1, sums, stamp, slot, per_noise_std)
        _move_tile(
            w, m, v, start * width, draws, size * width, mean_noise_std, learning_rate,
            keep_1, keep_2, unbias_1, unbias_2, eps,
        )  # fmt: skip


@njit(**FAST)
def adam_steps(
    weights, first, second, examples, batches, sizes, lanes, columns, batch_size, b1, b2, eps, begin, scratch
):
    """Steps begin, begin + 1, ...: as many as there are batches; `first`, `second`: the averages m and v."""
    mean_noise_std = of_rows(lanes.noise_std / f32(batch_size), len(scratch.normals))
    learning_rate = of_rows(lanes.learning_rate, len(scratch.normals))
    for k in range(begin, begin + len(sizes)):
        batch = batch_of(batches, sizes, k - begin, examples)
        # One lane: to clear every row's sum is cheaper than to number the rows that have one.
        count = len(weights) if weights.shape[1] == 1 else touch(examples, batch, k, scratch)
        clipped_sum(weights, examples, batch, count, lanes, columns, scratch)
        _adam_moves(weights, first, second, mean_noise_std, learning_rate, lanes, b1, b2, f32(eps), k, scratch)
