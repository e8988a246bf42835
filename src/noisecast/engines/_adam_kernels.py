"""Compiled steps of DP-Adam, beside those of `_kernels`. Its step depends on the noise's whole path, so no noise can be
summed up: every row moves at every step, and what a step costs is noise, two averages and a root for each number.
"""

import math

import numpy as np

from noisecast.compiled import FAST, INLINE, INSIDE, njit, prefetch, processor_features, processor_name, wide_vectors
from noisecast.engines._kernels import LINE, batch_of, clipped_sum, of_rows, touch
from noisecast.engines._lane_vectors import add_product
from noisecast.engines._noise_kernels import PAIRED, normal_tile, words_while_fetching
from noisecast.privacy.counter_noise import STEP_NOISE, normal_pair

f32, u32, u64 = np.float32, np.uint32, np.uint64

FAR = 2**22  # so many weights, with both averages, lie in memory, not in the cache
AT_ONCE = 48  # numbers whose normals are drawn while as many of each of four kinds are on their way
# x86 processors estimate 1 / sqrt(u) and 1 / x, `FAST` lets LLVM use that and refine it by a step of Newton's, and root
# and division would be what a step costs. But Zen 4 takes roots beside its other work: they cost it less than steps of
# Newton's, which take turns with all that it multiplies (a step of wide rows: 6 % less).
ROOTS_ESTIMATED = bool(processor_features()) and processor_name() != "znver4"
LEAST = f32(2.0**-126)  # of float32's normal numbers
MOST = f32(1e37)  # what it divides is nothing; infinity would make no number of it


@njit(**INLINE)
def _root(u):
    if ROOTS_ESTIMATED:
        return u * (f32(1.0) / f32(math.sqrt(u)))
    return f32(math.sqrt(u))


@njit(**INLINE | {"fastmath": {*FAST["fastmath"], "ninf"}})
def _reciprocal(x):
    return f32(1.0) / x


@njit(**INLINE)
def adam_move(g, m, v, keep_1, keep_2, floor):
    """Both averages and the move m / (sqrt(v) + floor), in units in which the noise of a gradient is N(0, 1).

    The averages are sums, m = b1 m + g and v = b2 v + g^2: what makes averages of them is the same for all numbers of a
    step, and lies in `floor` and in the rate that the move is multiplied by (`rate_and_floor`).
    """
    m = keep_1 * m + g
    v = keep_2 * v + g * g
    # The quotient as m (1 / x). Estimates err by 4e-7 at most, and neither at 0, of which 1 / x is infinite.
    return m, v, m * _reciprocal(_root(max(v, LEAST)) + floor)


@njit(**INSIDE)
def rate_and_floor(b1, b2, step):
    """What eta and eps / s are multiplied by, s = z C/B the unit, to be the rate and the floor of `adam_move`.

    Adam's step is eta s (1 - b1) u1 m / (s sqrt((1 - b2) u2 v) + eps), of sums m and v in the unit, unbiased by
    u = 1 / (1 - b^(step + 1)), with b as float32 has it, by which they fade.
    """
    b1, b2 = np.float64(f32(b1)), np.float64(f32(b2))
    root = 1.0 / math.sqrt((1.0 - b2) * _unbias(b2, step))
    return f32((1.0 - b1) * _unbias(b1, step) * root), f32(root)


@njit(**INSIDE)
def _unbias(b, step):
    return -1.0 / math.expm1((step + 1) * math.log(b)) if b > 0 else 1.0


@njit(**INSIDE)
def _scale(learning_rate, eps_in_noise, rate, floor, scale, eps_scale):
    wide_vectors()
    for i in range(len(rate)):
        rate[i] = learning_rate[i] * scale
        floor[i] = min(eps_in_noise[i] * eps_scale, MOST)


@njit(**INSIDE)
def _move_tile(w, m, v, begin, draws, count, rate, floor, keep_1, keep_2):
    """w, m, v: all numbers, flat, of which `count` from `begin` on move by the draws, which are gradients.

    rate, floor: of `adam_move`, of whole rows, as `of_rows` makes them.
    """
    wide_vectors()
    period = u64(len(rate))
    for done in range(u64(0), u64(count), period):
        first = u64(begin) + done
        for i in range(min(period, u64(count) - done)):
            m[first + i], v[first + i], move = adam_move(
                draws[done + i], m[first + i], v[first + i], keep_1, keep_2, floor[i]
            )
            w[first + i] -= rate[i] * move


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
def _adam_moves(weights, first, second, rate, floor, keep_1, keep_2, lanes, step, scratch):
    """Every row, in tiles: noise, both averages and the step while they are in the cache; g = xi + G/(z C).

    Along the whole tile, not row by row: a loop of a few lanes costs more to begin than to run.
    """
    width, tile = weights.shape[1], len(scratch.normals)
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
        _move_tile(w, m, v, start * width, draws, size * width, rate, floor, keep_1, keep_2)


@njit(**FAST)
def adam_steps(
    weights, first, second, examples, batches, sizes, lanes, columns, batch_size, b1, b2, eps, begin, scratch
):
    """Steps begin, begin + 1, ...: as many as there are batches; `first`, `second`: m and v of `adam_move`."""
    learning_rate = of_rows(lanes.learning_rate, len(scratch.normals))
    eps_in_noise = of_rows(f32(eps * batch_size) / lanes.noise_std, len(scratch.normals))
    rate, floor = np.empty_like(learning_rate), np.empty_like(learning_rate)
    for k in range(begin, begin + len(sizes)):
        batch = batch_of(batches, sizes, k - begin, examples)
        # One lane: to clear every row's sum is cheaper than to number the rows that have one.
        count = len(weights) if weights.shape[1] == 1 else touch(examples, batch, k, scratch)
        clipped_sum(weights, examples, batch, count, lanes, columns, scratch)
        _scale(learning_rate, eps_in_noise, rate, floor, *rate_and_floor(b1, b2, k))
        _adam_moves(weights, first, second, rate, floor, f32(b1), f32(b2), lanes, k, scratch)
