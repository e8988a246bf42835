"""Compiled steps of DP-Adam, of a run whose rows are wide: it is alone, and a batch touches few of its numbers.

Every number moves at every step, as in `_adam_kernels`. But nothing reads a number until a batch touches its row, so
its steps may wait, and be taken one after the other while it is in the cache: a tile at a time, from where it stands to
the step that touches it. The same draws in the same arithmetic, so the same bits as without waiting.

Numbers are drawn one after the other in one lane, as if each were a row: words of a block lie side by side.
"""

from typing import NamedTuple

import numpy as np

from noisecast.compiled import FAST, INSIDE, njit, wide_vectors
from noisecast.engines._adam_kernels import MOST, adam_move, rate_and_floor
from noisecast.engines._kernels import batch_of, clipped_sum, touch
from noisecast.engines._noise_kernels import PAIRED, ciphers, word_tile
from noisecast.privacy.aes_noise import AES, VECTOR, words_of_key
from noisecast.privacy.counter_noise import STEP_NOISE, normal_pair

f32, u32, u64 = np.float32, np.uint32, np.uint64

NUMBERS = 1024  # of a tile: to begin it is little beside its steps, and it stays in the nearest cache
GROUP = 2 * PAIRED


class Table(NamedTuple):
    """A run's numbers, flat, and how they move."""

    w: np.ndarray
    m: np.ndarray  # of `adam_move`, as v
    v: np.ndarray
    taken: np.ndarray  # (tiles,) steps that each tile has taken
    rates: np.ndarray  # of `adam_move`, one a step of this call
    floors: np.ndarray
    begin: int  # the first of these steps
    keep_1: np.float32
    keep_2: np.float32


@njit(**INSIDE)
def _normals(words, normals, groups):
    """words, normals: (groups, GROUP): pairs of vectors side by side."""
    wide_vectors()
    for group in range(groups):
        for i in range(PAIRED):
            normals[group, i], normals[group, PAIRED + i] = normal_pair(words[group, i], words[group, PAIRED + i])


@njit(**INSIDE)
def _move(w, m, v, begin, draws, count, rate, floor, keep_1, keep_2):
    wide_vectors()
    for i in range(u64(count)):
        at = u64(begin) + i
        m[at], v[at], move = adam_move(draws[i], m[at], v[at], keep_1, keep_2, floor)
        w[at] -= rate * move


@njit(**INSIDE)
def _add_sums(draws, start, size, now, sums, columns, stamp, slot, per_noise_std):
    """xi + G/(z C) of the tile's numbers; sums: G by number of the row, flat."""
    wide_vectors()
    for row in range(start // columns, (start + size - 1) // columns + 1):
        if stamp[row] == now:
            at = row * columns - start  # where the row begins: in the tile, before it or in it
            first, count = max(0, at), min(columns, size - at) - max(0, -at)
            own = np.int64(slot[row]) * columns + max(0, -at)  # the same in sums
            for i in range(u64(count)):  # an index that might be negative would be looked at each time
                draws[u64(first) + i] += sums[u64(own) + i] * per_noise_std


@njit(**INSIDE)
def _tiles_of(rows, columns, now, seen, tiles):
    """The tiles in which those rows have numbers, in `tiles`; how many. seen: `now` where one has been counted."""
    count = 0
    for row in rows:
        for tile in range(np.int64(row) * columns // NUMBERS, ((np.int64(row) + 1) * columns - 1) // NUMBERS + 1):
            if seen[tile] != now:
                seen[tile] = now
                tiles[count] = tile
                count += 1
    return count


@njit(**INSIDE)
def _take_steps(tiles, stop, has_sums, table, lanes, scratch, one_lane, one_scratch):
    """Steps of those tiles, each from where it stands up to `stop`; with the batch's sums, where one step is left."""
    words, draws = one_scratch.words.reshape(-1), one_scratch.normals.reshape(-1)
    word_groups, groups = words.reshape(-1, GROUP), draws.reshape(-1, GROUP)
    keys, lane, ramp = one_lane.keys, one_lane.lane, one_scratch.ramp
    sums, stamp, slot = scratch.gradient.reshape(-1), scratch.stamp, scratch.slot
    columns, per_noise_std = scratch.gradient.shape[1], lanes.per_noise_std[0]
    w, m, v, taken, rates, floors, begin, keep_1, keep_2 = table
    for tile in tiles:
        start = tile * NUMBERS
        size = min(NUMBERS, len(w) - start)
        count = -(-size // GROUP)
        for k in range(taken[tile], stop):
            if AES and not ciphers(one_scratch.cipher):
                vectors = count * GROUP // VECTOR
                words_of_key(words, ramp, vectors, keys, 0, lane[0], u32(start // 4), u32(k), STEP_NOISE)
            else:
                word_tile(start, size, one_lane, u32(k), STEP_NOISE, one_scratch)
            _normals(word_groups, groups, count)
            if has_sums:
                _add_sums(draws, start, size, k + 1, sums, columns, stamp, slot, per_noise_std)
            _move(w, m, v, start, draws, size, rates[k - begin], floors[k - begin], keep_1, keep_2)
        taken[tile] = stop


@njit(**INSIDE)
def _table(weights, first, second, begin, steps, lanes, batch_size, b1, b2, eps):
    rates, floors, tiles = np.empty(steps, f32), np.empty(steps, f32), -(-weights.size // NUMBERS)
    eps_in_noise = f32(eps * batch_size) / lanes.noise_std[0]
    for k in range(steps):
        scale, eps_scale = rate_and_floor(b1, b2, begin + k)
        rates[k], floors[k] = lanes.learning_rate[0] * scale, min(eps_in_noise * eps_scale, MOST)
    w, m, v = weights.reshape(-1), first.reshape(-1), second.reshape(-1)
    return Table(w, m, v, np.full(tiles, begin), rates, floors, begin, f32(b1), f32(b2))


@njit(**FAST)
def wide_adam_steps(
    weights, first, second, examples, batches, sizes, lanes, columns, batch_size, b1, b2, eps, one_lane, one_scratch,
    begin, scratch
):  # fmt: skip
    """As `adam_steps`, which says what is what; weights: (rows, columns) of the only run.

    Args:
      one_lane, one_scratch: `Lanes` and `Scratch` of one lane, of which the numbers' noise is drawn.
    """
    table = _table(weights, first, second, begin, len(sizes), lanes, batch_size, b1, b2, eps)
    every = np.arange(len(table.taken))
    touched, seen = np.empty_like(every), np.zeros_like(every)
    for k in range(begin, begin + len(sizes)):
        batch = batch_of(batches, sizes, k - begin, examples)
        rows = touch(examples, batch, k, scratch)
        tiles = touched[: _tiles_of(scratch.touched[:rows], weights.shape[1], k + 1, seen, touched)]
        _take_steps(tiles, k, False, table, lanes, scratch, one_lane, one_scratch)  # what has waited
        clipped_sum(weights, examples, batch, rows, lanes, columns, scratch)
        _take_steps(tiles, k + 1, True, table, lanes, scratch, one_lane, one_scratch)
    _take_steps(every, begin + len(sizes), False, table, lanes, scratch, one_lane, one_scratch)
