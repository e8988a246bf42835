"""Compiled steps of the optimizers, for models whose examples touch few rows of the parameters.

Parameters are W[row, lane]; runs of a group lie side by side in lanes and share their batches, so what is expensive
about a step (finding rows, loading values) is paid once. `docs/engines.md` derives why each step has the law of its
plain form, which is written out in `tests/engines/reference.py`. One step, k = 0, 1, ...:

  touch      number the distinct rows of the batch
  catch up   give each of them the noise that it still lacks
  gradient   the sum of the batch's clipped gradients, of which none is formed by itself
  move       the optimizer's step of the touched rows

How rows are touched and gradients summed, the kind of model brings: `_linear_kernels`, `_factor_kernels`.
Untouched rows only move by noise, so DP-SGD and DP-SignSGD postpone their moves. `last[row]` counts the steps whose
noise a row has: after a touch at step k that is k for DP-SGD, which postpones the touched step's own noise, too, and
k + 1 for DP-SignSGD. `flush_*` gives every row what it still lacks. DP-Adam, which postpones nothing, is in
`_adam_kernels`.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from noisecast.compiled import FAST, INLINE, INSIDE, njit, prefetch, wide_vectors
from noisecast.engines._lane_vectors import add_product
from noisecast.engines._noise_kernels import Cipher, ciphers, normal_tile, word_block, word_blocks_of_one, word_tile
from noisecast.privacy.counter_noise import COIN, FLUSH_NOISE, MORE_BITS, STEP_NOISE, normal_cdf

f32, u32 = np.float32, np.uint32

# Sums in whatever order, so that they run along vectors.
ANY_ORDER: Any = INSIDE | {"fastmath": {*FAST["fastmath"], "reassoc"}}
LINE = 16  # numbers of 32 bits in a line of the cache
NEAR = 1024  # numbers that stay in the cache's first level
NEAR_TIE = f32(1e-6)  # float32 cannot decide a coin that lands this near its threshold


class Lanes(NamedTuple):
    """What differs from lane to lane, (lanes,) each; a lane's noise is made of its key and its number in the run."""

    clip: np.ndarray  # C
    noise_std: np.ndarray  # z C
    per_noise_std: np.ndarray  # 1 / (z C)
    learning_rate: np.ndarray  # eta
    step_size: np.ndarray  # eta / B
    step_noise: np.ndarray  # eta z C / B
    lane: np.ndarray
    keys: np.ndarray  # (11, 4 lanes) round keys of AES, of 16 lanes at least; or (4, lanes) words of Threefry's key


class Scratch(NamedTuple):
    """Working memory of one group."""

    stamp: np.ndarray  # (rows,) int32, step + 1 at which a row was last numbered
    slot: np.ndarray  # (rows,) its number; at first its own, for steps that number no rows
    touched: np.ndarray  # (rows + 1,) rows by number
    due: np.ndarray  # (rows + 1,) those of them that lack steps
    skipped: np.ndarray  # (rows + 1,) int32, how many
    coefficients: np.ndarray  # (width, lanes) logits, then clipped residuals
    gradient: np.ndarray  # (rows, lanes) clipped sums of the touched rows, by number
    # Of a tile. DP-SignSGD draws no normals and keeps its moves and distances there; with one lane a tile's words are
    # counted before `words` and `column` hold the places and numbers of rows that lack more of them.
    normals: np.ndarray  # (tile, lanes) float32
    words: np.ndarray  # (tile, lanes) uint32, the first numbers of:
    roomy: np.ndarray  # (tile * lanes + ROOM,)
    column: np.ndarray  # (tile,) uint32, of a lane that fills no vector
    block: np.ndarray  # (16, lanes) uint32, what one call of a cipher makes; the first of more numbers, as `words`
    blocks: np.ndarray  # (4 * tile,) uint32, of one lane
    counters: np.ndarray  # (4 * lanes,) uint32, AES': lane, 0, 0, 0; of 16 lanes at least
    ramp: np.ndarray  # (tile,) uint32, AES': 0, i, 0, 0
    numbered: np.ndarray  # (4 * tile,) uint32, AES': 0, a row's number, 0, 0
    every_row: np.ndarray  # (rows,) 0, 1, 2, ...
    cipher: Cipher | None  # None: the fast generator


# --- The seam: what a kind of model brings; all else is about noise and shared ----------------------------------------


def touch(examples, batch, step, scratch):
    """Number the distinct rows of a batch in scratch.touched, .slot and .stamp; returns how many they are."""
    raise NotImplementedError("compiled code only")


def clipped_sum(weights, examples, batch, count, lanes, columns, scratch):
    """scratch.gradient[:count]: the batch's sum of clipped gradients, by number of the row."""
    raise NotImplementedError("compiled code only")


def descend(weights, examples, batch, count, lanes, columns, scratch):
    """weights -= (eta / B) * that sum, however is fastest."""
    raise NotImplementedError("compiled code only")


def fetch(examples, batch):
    """Start to load a batch from memory, for the next step."""
    raise NotImplementedError("compiled code only")


def bring(examples_type, touch_rows, clipped_sum_of, descend_along, fetch_batch):
    """Let compiled steps of examples of this named tuple use these four; chosen when they are compiled."""

    def is_mine(examples):
        return getattr(examples, "instance_class", None) is examples_type

    @overload(touch, jit_options=INLINE)
    def _(examples, batch, step, scratch):
        if is_mine(examples):
            return lambda examples, batch, step, scratch: touch_rows(examples, batch, step, scratch)

    @overload(clipped_sum, jit_options=INLINE)
    def _(weights, examples, batch, count, lanes, columns, scratch):
        if is_mine(examples):
            return lambda weights, examples, batch, count, lanes, columns, scratch: clipped_sum_of(
                weights, examples, batch, count, lanes, columns, scratch
            )

    @overload(descend, jit_options=INLINE)
    def _(weights, examples, batch, count, lanes, columns, scratch):
        if is_mine(examples):
            return lambda weights, examples, batch, count, lanes, columns, scratch: descend_along(
                weights, examples, batch, count, lanes, columns, scratch
            )

    @overload(fetch, jit_options=INLINE)
    def _(examples, batch):
        if is_mine(examples):
            return lambda examples, batch: fetch_batch(examples, batch)


@njit(**INSIDE)
def batch_of(batches, sizes, k, examples):
    """Batch number k, while the next one is on its way from memory."""
    if k + 1 < len(sizes):
        fetch(examples, batches[k + 1, : sizes[k + 1]])
    return batches[k, : sizes[k]]


@njit(**INSIDE)
def _fetch_rows(weights, rows, first, count):
    """Rows number first, first + 1, ..., while their noise is being drawn."""
    flat, lanes = weights.reshape(-1), weights.shape[1]
    for number in range(first, first + count):
        begin = np.int64(rows[number]) * lanes
        for at in range(begin, begin + lanes, LINE):
            prefetch(flat, at)


@njit(**INSIDE)
def of_rows(of_lanes, most):
    """What differs from lane to lane, flat, for as many rows as stay near: loops along a tile read it over and over."""
    rows = np.empty((max(1, min(most, NEAR // len(of_lanes))), len(of_lanes)), f32)
    for row in rows:
        for lane in range(len(of_lanes)):
            row[lane] = of_lanes[lane]
    return rows.reshape(-1)


# --- DP-SGD -----------------------------------------------------------------------------------------------------------


@njit(**INSIDE)
def _catch_up_sgd(weights, last, rows, count, lanes, step, purpose, scratch):
    """Noise of the n steps that a row lacks at once: N(0, n (eta z C / B)^2), the sum of n independent ones."""
    wide_vectors()
    normals = scratch.normals
    tile = len(normals)
    for first in range(0, count, tile):
        size = min(tile, count - first)
        _fetch_rows(weights, rows, first, size)
        normal_tile(first, size, lanes, u32(step), purpose, scratch)
        if weights.shape[1] == 1:
            column, moves, scale = weights.reshape(-1), normals.reshape(-1), lanes.step_noise[0]
            for number in range(size):
                row = rows[first + number]
                column[row] += f32(math.sqrt(f32(step - last[row]))) * scale * moves[number]
                last[row] = step
            continue
        for number in range(size):
            row = rows[first + number]
            spread = f32(math.sqrt(f32(step - last[row])))
            last[row] = step
            add_product(weights, row, spread, lanes.step_noise, normals, number)


@njit(**FAST)
def sgd_steps(weights, last, examples, batches, sizes, lanes, columns, begin, scratch):
    """DP-SGD. A touched row's own noise of this step is postponed too: it is the same Gaussian as the skipped ones."""
    for k in range(begin, begin + len(sizes)):
        batch = batch_of(batches, sizes, k - begin, examples)
        count = touch(examples, batch, k, scratch)
        _catch_up_sgd(weights, last, scratch.touched, count, lanes, k, STEP_NOISE, scratch)
        descend(weights, examples, batch, count, lanes, columns, scratch)


@njit(**FAST)
def flush_sgd(weights, last, lanes, step, scratch):
    """Give every row the noise of the steps it has not had, up to `step`."""
    _catch_up_sgd(weights, last, scratch.every_row, len(last), lanes, step, FLUSH_NOISE, scratch)


# --- DP-SignSGD -------------------------------------------------------------------------------------------------------


@njit(**INLINE)
def _bits(word):
    """Number of ones in 32 bits."""
    word = u32(word - u32(u32(word >> u32(1)) & u32(0x55555555)))
    word = u32(u32(word & u32(0x33333333)) + u32(u32(word >> u32(2)) & u32(0x33333333)))
    word = u32(u32(word + u32(word >> u32(4))) & u32(0x0F0F0F0F))
    return u32(u32(word * u32(0x01010101)) >> u32(24))


@njit(**INLINE)
def _first(word, count):
    """The lowest `count` bits of a word, all of them from 32 on, none below 1."""
    if count >= 32:
        return u32(word)
    return u32(word & u32((1 << max(count, 0)) - 1))


@njit(**INLINE)
def _balance(a, b, c, d, coins):
    """Heads less tails of the first `coins` of 128 coins; all of them beyond."""
    heads = _bits(_first(a, coins)) + _bits(_first(b, coins - 32))
    heads += _bits(_first(c, coins - 64)) + _bits(_first(d, coins - 96))
    return f32(2.0) * f32(np.int32(heads)) - f32(min(coins, 128))


# It takes apart what rows need: to count who holds two dozen arrays, at every row, costs three times what coins do.
@njit(**INSIDE)
def _more_coins(weights, due, skipped, first, size, lanes, step, purpose, scratch):
    """The coins of a tile's rows beyond the first 32, 128 of four words."""
    wide_vectors()
    words, column, counters, ramp = scratch.block, scratch.column, scratch.counters, scratch.ramp
    keys, lane_of, learning_rate, cipher = lanes.keys, lanes.lane, lanes.learning_rate, scratch.cipher
    for number in range(first, first + size):
        row, left, block = due[number], skipped[number] - 32, 1
        while left > 0:
            found = word_block(
                u32(number), keys, lane_of, step, u32(purpose + MORE_BITS * u32(block)),
                words, column, counters, ramp, cipher,
            )  # fmt: skip
            for w in range(0, found, 4):
                if left <= 0:
                    break
                for lane in range(weights.shape[1]):
                    balance = _balance(words[w, lane], words[w + 1, lane], words[w + 2, lane], words[w + 3, lane], left)
                    weights[row, lane] += learning_rate[lane] * balance
                left -= 128
            block += 1


@njit(**INSIDE)
def _more_coins_of_one(column, due, skipped, first, long, lanes, step, purpose, scratch):
    """`_more_coins` of the rows of a tile with one lane whose numbers in it are scratch.words[:long], along rows."""
    wide_vectors()
    places, moves, blocks = scratch.words.reshape(-1), scratch.normals.reshape(-1), scratch.blocks
    numbers = scratch.column
    had, block = 32, 1
    while long:
        for i in range(long):
            numbers[i] = u32(first + places[i])
        word_blocks_of_one(numbers, long, lanes, step, u32(purpose + MORE_BITS * u32(block)), scratch)
        for i in range(long):
            a, b, c, d = blocks[4 * i], blocks[4 * i + 1], blocks[4 * i + 2], blocks[4 * i + 3]
            moves[i] = _balance(a, b, c, d, skipped[numbers[i]] - had)
        had, block, still = had + 128, block + 1, np.int64(0)
        for i in range(long):
            column[due[numbers[i]]] += lanes.learning_rate[0] * moves[i]
            places[still] = places[i]
            still += skipped[numbers[i]] > had
        long = still


@njit(**INSIDE)
def _fair_coins_of_one(weights, due, skipped, count, lanes, step, purpose, scratch):
    """`_fair_coins` of one lane, along rows."""
    wide_vectors()
    column, words, moves = weights.reshape(-1), scratch.words.reshape(-1), scratch.normals.reshape(-1)
    tile = len(words)
    for first in range(0, count, tile):
        size, long = min(tile, count - first), np.int64(0)
        _fetch_rows(weights, due, first, size)
        word_tile(first, size, lanes, step, purpose, scratch)
        for i in range(size):
            coins = min(skipped[first + i], 32)
            moves[i] = f32(2.0) * f32(np.int32(_bits(_first(words[i], coins)))) - f32(coins)
        for i in range(size):
            column[due[first + i]] += lanes.learning_rate[0] * moves[i]
            words[long] = i
            long += skipped[first + i] > 32
        _more_coins_of_one(column, due, skipped, first, long, lanes, step, purpose, scratch)


@njit(**INSIDE)
def _fair_coins(weights, due, skipped, count, lanes, step, purpose, scratch):
    """n skipped steps are n fair coins of +- eta: eta (2 Binomial(n, 1/2) - n), one bit a coin."""
    wide_vectors()
    words, learning_rate = scratch.words, lanes.learning_rate
    tile = len(words)
    for first in range(0, count, tile):
        size, lacking = min(tile, count - first), 0
        _fetch_rows(weights, due, first, size)
        word_tile(first, size, lanes, step, purpose, scratch)
        for number in range(size):
            row, coins = due[first + number], min(skipped[first + number], 32)
            mask = u32(0xFFFFFFFF) if coins == 32 else u32((1 << coins) - 1)
            for lane in range(weights.shape[1]):
                heads = f32(np.int32(_bits(u32(words[number, lane] & mask))))
                weights[row, lane] += learning_rate[lane] * (f32(2.0) * heads - f32(coins))
            lacking += skipped[first + number] > 32
        if lacking:
            _more_coins(weights, due, skipped, first, size, lanes, step, purpose, scratch)


@njit(**INSIDE)
def _catch_up_sign(weights, last, rows, count, lanes, step, has_had, purpose, scratch):
    """Give rows the coins of the steps that they lack.

    has_had: how many steps the rows are then counted to have had: `step`, or one more that is about to be made.
    """
    due, skipped, num_due = scratch.due, scratch.skipped, np.int64(0)
    for number in range(count):  # most rows of a batch were in the last one, too
        row = rows[number]
        lacks = step - last[row]
        due[num_due], skipped[num_due], last[row] = row, lacks, has_had
        num_due += lacks > 0
    if weights.shape[1] == 1 and not ciphers(scratch.cipher):
        _fair_coins_of_one(weights, due, skipped, num_due, lanes, u32(step), purpose, scratch)
    else:
        _fair_coins(weights, due, skipped, num_due, lanes, u32(step), purpose, scratch)


@njit(**INSIDE)
def _is_up(gradient, noise_std, word):
    """The coin in float64, for one that float32 cannot decide."""
    threshold = 0.5 * math.erfc(np.float64(gradient) / np.float64(noise_std) / math.sqrt(2.0))
    return (np.float64(word) + 0.5) * 2.0**-32 < threshold


@njit(**INLINE)
def _coin(gradient, per_noise_std, word):
    """u - Phi(-G / (z C)) of the word's uniform number u: below 0 where G + z C xi is, and the coordinate goes up."""
    return (f32(word) + f32(0.5)) * f32(2.0**-32) - normal_cdf(-gradient * per_noise_std)


@njit(**INSIDE)
def _sign_moves_of_one(weights, rows, gradient, lanes, scratch):
    """`_sign_moves` of a tile with one lane, along rows."""
    column, sums = weights.reshape(-1), gradient.reshape(-1)
    words, above = scratch.words.reshape(-1), scratch.normals.reshape(-1)
    noise_std, learning_rate, ties = lanes.noise_std[0], lanes.learning_rate[0], u32(0)
    for number in range(len(rows)):
        above[number] = _coin(sums[number], lanes.per_noise_std[0], words[number])
        ties = u32(ties + u32(abs(above[number]) < NEAR_TIE))
    if ties:
        for number in range(len(rows)):
            if abs(above[number]) < NEAR_TIE:
                above[number] = f32(-1.0) if _is_up(sums[number], noise_std, words[number]) else f32(1.0)
    for number in range(len(rows)):
        column[rows[number]] += learning_rate if above[number] < f32(0.0) else -learning_rate


@njit(**INSIDE)
def _distances(words, sums, per_noise_std, above):
    """above: `_coin` of a tile's numbers, along all of it, as rows may end within a vector. Returns how many are ties.

    per_noise_std: 1 / (z C) of whole rows, as `of_rows` makes them.
    """
    wide_vectors()
    period, ties = len(per_noise_std), u32(0)
    for first in range(0, len(words), period):
        size = min(period, len(words) - first)
        some, own, to = words[first : first + size], sums[first : first + size], above[first : first + size]
        for at in range(size):
            distance = _coin(own[at], per_noise_std[at], some[at])
            to[at] = distance
            ties = u32(ties + u32(abs(distance) < NEAR_TIE))  # as narrow as what is counted
    return ties


@njit(**INSIDE)
def _sign_moves_of_many(weights, rows, gradient, lanes, per_noise_std, scratch):
    """`_sign_moves` of a tile with several lanes."""
    wide_vectors()
    words, above = scratch.words[: len(rows)], scratch.normals
    if _distances(words.reshape(-1), gradient.reshape(-1), per_noise_std, above.reshape(-1)):
        for number in range(len(rows)):
            for lane in range(weights.shape[1]):
                if abs(above[number, lane]) < NEAR_TIE:
                    is_up = _is_up(gradient[number, lane], lanes.noise_std[lane], words[number, lane])
                    above[number, lane] = f32(-1.0) if is_up else f32(1.0)
    moves = above.reshape(-1)[: words.size]
    for at in range(len(moves)):
        moves[at] = f32(1.0) if moves[at] < f32(0.0) else f32(-1.0)
    for number in range(len(rows)):
        add_product(weights, rows[number], f32(1.0), lanes.learning_rate, above, number)


@njit(**INSIDE)
def _sign_moves(weights, rows, count, lanes, per_noise_std, step, scratch):
    """-eta sign(G + z C xi): up with probability Phi(-G / (z C)), one word against that threshold."""
    tile = len(scratch.words)
    for first in range(0, count, tile):
        size = min(tile, count - first)
        word_tile(first, size, lanes, u32(step), COIN, scratch)
        due, gradient = rows[first : first + size], scratch.gradient[first : first + size]
        if weights.shape[1] == 1:
            _sign_moves_of_one(weights, due, gradient, lanes, scratch)
        else:
            _sign_moves_of_many(weights, due, gradient, lanes, per_noise_std, scratch)


@njit(**FAST)
def sign_steps(weights, last, examples, batches, sizes, lanes, columns, begin, scratch):
    """DP-SignSGD: skipped steps are fair coins, a touched row's step is one biased coin. noise_std must be > 0."""
    per_noise_std = of_rows(lanes.per_noise_std, len(scratch.words))
    for k in range(begin, begin + len(sizes)):
        batch = batch_of(batches, sizes, k - begin, examples)
        count = touch(examples, batch, k, scratch)
        _catch_up_sign(weights, last, scratch.touched, count, lanes, k, k + 1, STEP_NOISE, scratch)
        clipped_sum(weights, examples, batch, count, lanes, columns, scratch)
        _sign_moves(weights, scratch.touched, count, lanes, per_noise_std, k, scratch)


@njit(**FAST)
def flush_sign(weights, last, lanes, step, scratch):
    """Give every row the coins of the steps it has not had, up to `step`."""
    _catch_up_sign(weights, last, scratch.every_row, len(last), lanes, step, step, FLUSH_NOISE, scratch)
