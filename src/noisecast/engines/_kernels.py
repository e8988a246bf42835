"""Compiled steps of linear models whose examples touch few rows of the parameters.

Parameters are W[row, lane]: a row is a feature (the last one is the bias), a lane one output of one run. Runs of a
group lie side by side in lanes and share their batches, so what is expensive about a step (finding rows, loading
values) is paid once. `docs/engines.md` derives why each step has the law of its plain form, which is written out in
`tests/engines/reference.py`. One step, k = 0, 1, ...:

  touch      number the distinct rows of the batch
  catch up   give each of them the noise that it still lacks
  gradient   logits, residuals, clip factors: |g| = |residual| sqrt(|x|^2 + 1), no per-example gradient is formed
  move       the optimizer's step of the touched rows

Untouched rows only move by noise, so DP-SGD and DP-SignSGD postpone their moves. `last[row]` counts the steps whose
noise a row has: after a touch at step k that is k for DP-SGD, which postpones the touched step's own noise, too, and
k + 1 for DP-SignSGD. `flush_*` gives every row what it still lacks. DP-Adam postpones nothing and moves every row at
every step.
"""

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.extending import overload

from noisecast.compiled import FAST, INLINE, INSIDE, prefetch, wide_vectors
from noisecast.engines._noise_kernels import normal_tile, word_block, word_blocks_of_one, word_tile
from noisecast.privacy.counter_noise import COIN, FLUSH_NOISE, MORE_BITS, STEP_NOISE, exponential, normal_cdf

f32, u32 = np.float32, np.uint32

# Sums in whatever order, so that they run along vectors.
ANY_ORDER: Any = INSIDE | {"fastmath": {*FAST["fastmath"], "reassoc"}}
LINE = 16  # numbers of 32 bits in a line of the cache
NEAR_TIE = f32(1e-6)  # float32 cannot decide a coin that lands this near its threshold
LOGISTIC, SOFTMAX, MULTI_LABEL = 0, 1, 2  # values of Examples.likelihood


class Examples(NamedTuple):
    """Sparse rows with their labels (n, most labels of a row; -1: none); norms are sqrt(|x|^2 + 1), rounded up.

    Example i has the columns indices[begin[i]:end[i]] and values[begin[i]:end[i]].
    """

    begin: np.ndarray
    end: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    labels: np.ndarray
    norms: np.ndarray
    likelihood: int


class Lanes(NamedTuple):
    """What differs from lane to lane, (lanes,) each; a lane's noise is made of its key and its number in the run."""

    clip: np.ndarray  # C
    noise_std: np.ndarray  # z C
    per_noise_std: np.ndarray  # 1 / (z C)
    learning_rate: np.ndarray  # eta
    step_size: np.ndarray  # eta / B
    step_noise: np.ndarray  # eta z C / B
    lane: np.ndarray
    keys: np.ndarray  # (11, 4 lanes) round keys of AES, or (4, lanes) words of Threefry's key


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
    words: np.ndarray  # (tile, lanes) uint32
    column: np.ndarray  # (tile,) uint32, of a lane that fills no vector
    block: np.ndarray  # (16, lanes) uint32, what one call of a cipher makes
    blocks: np.ndarray  # (4 * tile,) uint32, of one lane
    counters: np.ndarray  # (4 * lanes,) uint32, AES': lane, 0, 0, 0
    ramp: np.ndarray  # (tile,) uint32, AES': 0, i, 0, 0
    numbered: np.ndarray  # (4 * tile,) uint32, AES': 0, a row's number, 0, 0
    every_row: np.ndarray  # (rows,) 0, 1, 2, ...
    cipher_start: np.ndarray  # (16, tile / 16 * lanes) states of the cipher, or none: (16, 0) for the fast generator
    cipher_words: np.ndarray  # (16, tile / 16 * lanes)


# --- Pieces of a step -------------------------------------------------------------------------------------------------


@numba.njit(**INSIDE)
def _touch_features(examples, batch, step, scratch):
    """Number the distinct rows of a batch; the bias is row number 0. Returns how many."""
    stamp, slot, touched = scratch.stamp, scratch.slot, scratch.touched
    bias, now = len(stamp) - 1, np.int32(step + 1)
    stamp[bias], touched[0] = now, bias
    count = u32(1)
    for example in batch:
        for entry in range(examples.begin[example], examples.end[example]):
            row = examples.indices[entry]
            # No branch: whether a row is new is a coin toss, and a wrong guess costs more than the two stores.
            touched[count] = row
            count = u32(count + u32(stamp[row] != now))
            stamp[row] = now
    for number in range(count):
        slot[touched[number]] = number
    return np.int64(count)


@numba.njit(**INSIDE)
def _fetch_features(examples, batch):
    """Rows of a data set are far apart in memory, and nothing else would ask for them in time."""
    for example in batch:
        for entry in range(examples.begin[example], examples.end[example], LINE):
            prefetch(examples.indices, entry)
            prefetch(examples.values, entry)


@numba.njit(**INSIDE)
def _fetch_rows(weights, rows, first, count):
    """Rows number first, first + 1, ..., while their noise is being drawn."""
    flat, lanes = weights.reshape(-1), weights.shape[1]
    for number in range(first, first + count):
        begin = np.int64(rows[number]) * lanes
        for at in range(begin, begin + lanes, LINE):
            prefetch(flat, at)


@numba.njit(**INSIDE)
def _dot(indices, values, begin, end, column):
    """Four sums at once: one would wait for each addition, and gathers along vectors are slower than loads."""
    a, b, c, d = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
    entry = begin
    while entry + 4 <= end:
        a += values[entry] * column[indices[entry]]
        b += values[entry + 1] * column[indices[entry + 1]]
        c += values[entry + 2] * column[indices[entry + 2]]
        d += values[entry + 3] * column[indices[entry + 3]]
        entry += 4
    while entry < end:
        a += values[entry] * column[indices[entry]]
        entry += 1
    return (a + b) + (c + d)


@numba.njit(**INSIDE)
def _logits(weights, examples, batch, out):
    wide_vectors()
    lanes = weights.shape[1]
    bias = weights.shape[0] - 1
    for b in range(len(batch)):
        begin, end = examples.begin[batch[b]], examples.end[batch[b]]
        if lanes == 1:  # a sum in registers
            out[b, 0] = weights[bias, 0] + _dot(examples.indices, examples.values, begin, end, weights.reshape(-1))
            continue
        for lane in range(lanes):
            out[b, lane] = weights[bias, lane]
        for entry in range(begin, end):
            row, value = examples.indices[entry], examples.values[entry]
            for lane in range(lanes):
                out[b, lane] += value * weights[row, lane]


@numba.njit(**INSIDE)
def _clip_logistic(examples, batch, lanes, out):
    """Logits to residuals sigma(z) - y, times their clip factors."""
    wide_vectors()
    for b in range(len(batch)):
        label, norm = f32(examples.labels[batch[b], 0]), examples.norms[batch[b]]
        for lane in range(out.shape[1]):
            residual = f32(1.0) / (f32(1.0) + exponential(-out[b, lane])) - label
            length = abs(residual) * norm
            clipped = residual * min(f32(1.0), lanes.clip[lane] / max(length, f32(1e-38)))
            out[b, lane] = clipped if length < f32(3e38) else f32(0.0)


# The order of the sum is free, so that it runs along vectors; in float64, so that hundreds of outputs round nothing off
# the norm that they are clipped by.
@numba.njit(**ANY_ORDER)
def _squared_length(z):
    total = 0.0
    for m in range(len(z)):
        total += np.float64(z[m]) * np.float64(z[m])
    return total


@numba.njit(**INSIDE)
def _clip_residuals(z, norm, clip):
    """z min(1, C / (|z| norm)): the residuals of one run, by the length of the very numbers that are added.

    A shortcut for that length, |p|^2 - 2 p_y + 1 of softmax, would cancel where p_y is near 1, and let them through.
    """
    length = f32(math.sqrt(_squared_length(z))) * norm
    factor = min(f32(1.0), clip / max(length, f32(1e-38)))
    if not length < f32(3e38):
        factor = f32(0.0)
        z[:] = f32(0.0)
    for m in range(len(z)):
        z[m] *= factor


@numba.njit(**INSIDE)
def _clip_softmax(examples, batch, lanes, outputs, out):
    """Logits to residuals softmax(z) - onehot(y), times the clip factor of their run; `outputs` lanes a run."""
    for b in range(len(batch)):
        label, norm = examples.labels[batch[b], 0], examples.norms[batch[b]]
        for first in range(0, out.shape[1], outputs):
            z = out[b, first : first + outputs]
            largest = z[0]
            for m in range(outputs):
                largest = max(largest, z[m])
            total = f32(0.0)
            for m in range(outputs):
                z[m] = exponential(z[m] - largest)
                total += z[m]
            for m in range(outputs):
                z[m] = z[m] / total
            z[label] -= f32(1.0)
            _clip_residuals(z, norm, lanes.clip[first])


@numba.njit(**INSIDE)
def _to_residuals(z, labels):
    """Logits of independent outputs to residuals sigma(z) - y, y = 1 for the labels."""
    for m in range(len(z)):
        z[m] = f32(1.0) / (f32(1.0) + exponential(-z[m]))
    for label in labels:
        if label >= 0:
            z[label] -= f32(1.0)


@numba.njit(**INSIDE)
def _clip_multi_label(examples, batch, lanes, outputs, out):
    """Logits to residuals, times one clip factor for all outputs of a run."""
    for b in range(len(batch)):
        labels, norm = examples.labels[batch[b]], examples.norms[batch[b]]
        for first in range(0, out.shape[1], outputs):
            z = out[b, first : first + outputs]
            _to_residuals(z, labels)
            _clip_residuals(z, norm, lanes.clip[first])


@numba.njit(**INSIDE)
def _add_outer(target, at, first, examples, batch, coefficients):
    """target[at[row]] += value * coefficients[b] over the entries of a batch, and target[first] for the bias.

    at: number of each row, or None where rows keep their own.
    """
    wide_vectors()
    lanes = target.shape[1]
    for b in range(len(batch)):
        begin, end = examples.begin[batch[b]], examples.end[batch[b]]
        if lanes == 1:
            column, coefficient = target.reshape(-1), coefficients[b, 0]
            column[first] += coefficient
            for entry in range(begin, end):
                row = examples.indices[entry]
                column[row if at is None else at[row]] += examples.values[entry] * coefficient
            continue
        for lane in range(lanes):
            target[first, lane] += coefficients[b, lane]
        for entry in range(begin, end):
            row, value = examples.indices[entry], examples.values[entry]
            to = row if at is None else at[row]
            for lane in range(lanes):
                target[to, lane] += value * coefficients[b, lane]


@numba.njit(**INLINE)
def _bits(word):
    """Number of ones in 32 bits."""
    word = u32(word - u32(u32(word >> u32(1)) & u32(0x55555555)))
    word = u32(u32(word & u32(0x33333333)) + u32(u32(word >> u32(2)) & u32(0x33333333)))
    word = u32(u32(word + u32(word >> u32(4))) & u32(0x0F0F0F0F))
    return u32(u32(word * u32(0x01010101)) >> u32(24))


@numba.njit(**INLINE)
def _first(word, count):
    """The lowest `count` bits of a word, all of them from 32 on, none below 1."""
    if count >= 32:
        return u32(word)
    return u32(word & u32((1 << max(count, 0)) - 1))


@numba.njit(**INLINE)
def _balance(a, b, c, d, coins):
    """Heads less tails of the first `coins` of 128 coins; all of them beyond."""
    heads = _bits(_first(a, coins)) + _bits(_first(b, coins - 32))
    heads += _bits(_first(c, coins - 64)) + _bits(_first(d, coins - 96))
    return f32(2.0) * f32(np.int32(heads)) - f32(min(coins, 128))


@numba.njit(**INSIDE)
def _more_coins(weights, row, skipped, lanes, number, step, purpose, scratch):
    """The coins beyond the first 32, 128 of four words."""
    wide_vectors()
    left, block, words = skipped - 32, 1, scratch.block
    while left > 0:
        found = word_block(number, lanes, step, u32(purpose + MORE_BITS * u32(block)), scratch)
        for w in range(0, found, 4):
            if left <= 0:
                break
            for lane in range(weights.shape[1]):
                balance = _balance(words[w, lane], words[w + 1, lane], words[w + 2, lane], words[w + 3, lane], left)
                weights[row, lane] += lanes.learning_rate[lane] * balance
            left -= 128
        block += 1


@numba.njit(**INSIDE)
def _residuals(weights, examples, batch, lanes, outputs, scratch):
    """Clipped residuals of the batch into scratch.coefficients."""
    _logits(weights, examples, batch, scratch.coefficients)
    if examples.likelihood == LOGISTIC:
        _clip_logistic(examples, batch, lanes, scratch.coefficients)
    elif examples.likelihood == SOFTMAX:
        _clip_softmax(examples, batch, lanes, outputs, scratch.coefficients)
    else:
        _clip_multi_label(examples, batch, lanes, outputs, scratch.coefficients)


@numba.njit(**INSIDE)
def _clipped_sum_of_features(weights, examples, batch, count, lanes, outputs, scratch):
    _residuals(weights, examples, batch, lanes, outputs, scratch)
    scratch.gradient[:count] = f32(0.0)
    bias = scratch.slot[weights.shape[0] - 1]
    _add_outer(scratch.gradient, scratch.slot, bias, examples, batch, scratch.coefficients)


@numba.njit(**INSIDE)
def _descend_features(weights, examples, batch, count, lanes, outputs, scratch):
    """Straight into the weights: the gradient is made of residuals and values, so nothing reads what it moves."""
    _residuals(weights, examples, batch, lanes, outputs, scratch)
    coefficients = scratch.coefficients
    for b in range(len(batch)):
        for lane in range(weights.shape[1]):
            coefficients[b, lane] *= -lanes.step_size[lane]
    _add_outer(weights, None, weights.shape[0] - 1, examples, batch, coefficients)


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


bring(Examples, _touch_features, _clipped_sum_of_features, _descend_features, _fetch_features)


@numba.njit(**INSIDE)
def _batch_of(batches, sizes, k, examples):
    """Batch number k, while the next one is on its way from memory."""
    if k + 1 < len(sizes):
        fetch(examples, batches[k + 1, : sizes[k + 1]])
    return batches[k, : sizes[k]]


# --- DP-SGD -----------------------------------------------------------------------------------------------------------


@numba.njit(**INSIDE)
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
            for lane in range(weights.shape[1]):
                weights[row, lane] += spread * lanes.step_noise[lane] * normals[number, lane]


@numba.njit(**FAST)
def sgd_steps(weights, last, examples, batches, sizes, lanes, columns, begin, scratch):
    """DP-SGD. A touched row's own noise of this step is postponed too: it is the same Gaussian as the skipped ones."""
    for k in range(begin, begin + len(sizes)):
        batch = _batch_of(batches, sizes, k - begin, examples)
        count = touch(examples, batch, k, scratch)
        _catch_up_sgd(weights, last, scratch.touched, count, lanes, k, STEP_NOISE, scratch)
        descend(weights, examples, batch, count, lanes, columns, scratch)


@numba.njit(**FAST)
def flush_sgd(weights, last, lanes, step, scratch):
    """Give every row the noise of the steps it has not had, up to `step`."""
    _catch_up_sgd(weights, last, scratch.every_row, len(last), lanes, step, FLUSH_NOISE, scratch)


# --- DP-SignSGD -------------------------------------------------------------------------------------------------------


@numba.njit(**INSIDE)
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
        had, block, still = had + 128, block + 1, 0
        for i in range(long):
            column[due[numbers[i]]] += lanes.learning_rate[0] * moves[i]
            places[still] = places[i]
            still += skipped[numbers[i]] > had
        long = still


@numba.njit(**INSIDE)
def _fair_coins_of_one(weights, due, skipped, count, lanes, step, purpose, scratch):
    """`_fair_coins` of one lane, along rows."""
    wide_vectors()
    column, words, moves = weights.reshape(-1), scratch.words.reshape(-1), scratch.normals.reshape(-1)
    tile = len(words)
    for first in range(0, count, tile):
        size, long = min(tile, count - first), 0
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


@numba.njit(**INSIDE)
def _fair_coins(weights, due, skipped, count, lanes, step, purpose, scratch):
    """n skipped steps are n fair coins of +- eta: eta (2 Binomial(n, 1/2) - n), one bit a coin."""
    wide_vectors()
    words = scratch.words
    tile = len(words)
    for first in range(0, count, tile):
        size = min(tile, count - first)
        _fetch_rows(weights, due, first, size)
        word_tile(first, size, lanes, step, purpose, scratch)
        for number in range(size):
            row, coins = due[first + number], min(skipped[first + number], 32)
            mask = u32(0xFFFFFFFF) if coins == 32 else u32((1 << coins) - 1)
            for lane in range(weights.shape[1]):
                heads = f32(np.int32(_bits(u32(words[number, lane] & mask))))
                weights[row, lane] += lanes.learning_rate[lane] * (f32(2.0) * heads - f32(coins))
            if skipped[first + number] > 32:
                _more_coins(weights, row, skipped[first + number], lanes, first + number, step, purpose, scratch)


@numba.njit(**INSIDE)
def _catch_up_sign(weights, last, rows, count, lanes, step, has_had, purpose, scratch):
    """Give rows the coins of the steps that they lack.

    has_had: how many steps the rows are then counted to have had: `step`, or one more that is about to be made.
    """
    due, skipped, num_due = scratch.due, scratch.skipped, 0
    for number in range(count):  # most rows of a batch were in the last one, too
        row = rows[number]
        lacks = step - last[row]
        due[num_due], skipped[num_due], last[row] = row, lacks, has_had
        num_due += lacks > 0
    if weights.shape[1] == 1 and not scratch.cipher_start.shape[1]:
        _fair_coins_of_one(weights, due, skipped, num_due, lanes, u32(step), purpose, scratch)
    else:
        _fair_coins(weights, due, skipped, num_due, lanes, u32(step), purpose, scratch)


@numba.njit(**INSIDE)
def _is_up(gradient, noise_std, word):
    """The coin in float64, for one that float32 cannot decide."""
    threshold = 0.5 * math.erfc(np.float64(gradient) / np.float64(noise_std) / math.sqrt(2.0))
    return (np.float64(word) + 0.5) * 2.0**-32 < threshold


@numba.njit(**INLINE)
def _coin(gradient, per_noise_std, word):
    """u - Phi(-G / (z C)) of the word's uniform number u: below 0 where G + z C xi is, and the coordinate goes up."""
    return (f32(word) + f32(0.5)) * f32(2.0**-32) - normal_cdf(-gradient * per_noise_std)


@numba.njit(**INSIDE)
def _sign_moves_of_one(weights, rows, gradient, lanes, scratch):
    """`_sign_moves` of a tile with one lane, along rows."""
    column, sums = weights.reshape(-1), gradient.reshape(-1)
    words, above = scratch.words.reshape(-1), scratch.normals.reshape(-1)
    noise_std, learning_rate, ties = lanes.noise_std[0], lanes.learning_rate[0], 0
    for number in range(len(rows)):
        above[number] = _coin(sums[number], lanes.per_noise_std[0], words[number])
        ties += abs(above[number]) < NEAR_TIE
    if ties:
        for number in range(len(rows)):
            if abs(above[number]) < NEAR_TIE:
                above[number] = f32(-1.0) if _is_up(sums[number], noise_std, words[number]) else f32(1.0)
    for number in range(len(rows)):
        column[rows[number]] += learning_rate if above[number] < f32(0.0) else -learning_rate


@numba.njit(**INSIDE)
def _sign_moves(weights, rows, count, lanes, step, scratch):
    """-eta sign(G + z C xi): up with probability Phi(-G / (z C)), one word against that threshold."""
    wide_vectors()
    words, gradient, above = scratch.words, scratch.gradient, scratch.normals
    tile = len(words)
    for first in range(0, count, tile):
        size = min(tile, count - first)
        word_tile(first, size, lanes, u32(step), COIN, scratch)
        if weights.shape[1] == 1:
            _sign_moves_of_one(weights, rows[first : first + size], gradient[first : first + size], lanes, scratch)
            continue
        for number in range(size):
            row, ties = rows[first + number], 0
            for lane in range(weights.shape[1]):
                distance = _coin(gradient[first + number, lane], lanes.per_noise_std[lane], words[number, lane])
                above[number, lane] = distance
                ties += abs(distance) < NEAR_TIE
            if ties:
                for lane in range(weights.shape[1]):
                    if abs(above[number, lane]) < NEAR_TIE:
                        is_up = _is_up(gradient[first + number, lane], lanes.noise_std[lane], words[number, lane])
                        above[number, lane] = f32(-1.0) if is_up else f32(1.0)
            for lane in range(weights.shape[1]):
                step_up = above[number, lane] < f32(0.0)
                weights[row, lane] += lanes.learning_rate[lane] if step_up else -lanes.learning_rate[lane]


@numba.njit(**FAST)
def sign_steps(weights, last, examples, batches, sizes, lanes, columns, begin, scratch):
    """DP-SignSGD: skipped steps are fair coins, a touched row's step is one biased coin. noise_std must be > 0."""
    for k in range(begin, begin + len(sizes)):
        batch = _batch_of(batches, sizes, k - begin, examples)
        count = touch(examples, batch, k, scratch)
        _catch_up_sign(weights, last, scratch.touched, count, lanes, k, k + 1, STEP_NOISE, scratch)
        clipped_sum(weights, examples, batch, count, lanes, columns, scratch)
        _sign_moves(weights, scratch.touched, count, lanes, k, scratch)


@numba.njit(**FAST)
def flush_sign(weights, last, lanes, step, scratch):
    """Give every row the coins of the steps it has not had, up to `step`."""
    _catch_up_sign(weights, last, scratch.every_row, len(last), lanes, step, step, FLUSH_NOISE, scratch)


# --- DP-Adam ----------------------------------------------------------------------------------------------------------


@numba.njit(**INLINE)
def _adam_move(g, m, v, keep_1, keep_2, unbias_1, unbias_2, eps):
    m = keep_1 * m + (f32(1.0) - keep_1) * g
    v = keep_2 * v + (f32(1.0) - keep_2) * g * g
    return m, v, (m * unbias_1) / (f32(math.sqrt(v * unbias_2)) + eps)


@numba.njit(**INSIDE)
def _adam_moves(weights, first, second, mean_noise_std, learning_rate, lanes, b1, b2, eps, step, scratch):
    """Every row, in tiles: noise, both moments and the step while they are in the cache; g = (xi + G/(z C)) z C/B.

    Along the whole tile, not row by row: a loop of a few lanes costs more to begin than to run.

    Args:
      mean_noise_std, learning_rate: z C/B and eta of every number in a tile; (tile * lanes,).
    """
    wide_vectors()
    unbias_1 = f32(-1.0 / math.expm1((step + 1) * math.log(b1))) if b1 > 0 else f32(1.0)
    unbias_2 = f32(-1.0 / math.expm1((step + 1) * math.log(b2))) if b2 > 0 else f32(1.0)
    keep_1, keep_2, width = f32(b1), f32(b2), weights.shape[1]
    gradient, sums, draws = scratch.gradient, scratch.gradient.reshape(-1), scratch.normals.reshape(-1)
    tile = len(scratch.normals)
    for start in range(0, len(weights), tile):
        size = min(tile, len(weights) - start)
        normal_tile(start, size, lanes, u32(step), STEP_NOISE, scratch)
        if width == 1:  # every row has its own sum
            for number in range(size):
                draws[number] += sums[start + number] * lanes.per_noise_std[0]
        else:
            for number in range(size):
                row = start + number
                if scratch.stamp[row] == step + 1:
                    for lane in range(width):
                        draws[number * width + lane] += gradient[scratch.slot[row], lane] * lanes.per_noise_std[lane]
        w = weights[start : start + size].reshape(-1)
        m, v = first[start : start + size].reshape(-1), second[start : start + size].reshape(-1)
        for at in range(size * width):
            m[at], v[at], move = _adam_move(
                draws[at] * mean_noise_std[at], m[at], v[at], keep_1, keep_2, unbias_1, unbias_2, eps
            )
            w[at] -= learning_rate[at] * move


@numba.njit(**FAST)
def adam_steps(
    weights, first, second, examples, batches, sizes, lanes, columns, batch_size, b1, b2, eps, begin, scratch
):
    """DP-Adam, every row at every step: its step depends on the noise's whole path, so no noise can be summed up."""
    tile = len(scratch.normals)
    of_tile = np.empty((2, tile, len(lanes.lane)), f32)
    of_tile[0], of_tile[1] = lanes.noise_std / f32(batch_size), lanes.learning_rate
    mean_noise_std, learning_rate = of_tile[0].reshape(-1), of_tile[1].reshape(-1)
    for k in range(begin, begin + len(sizes)):
        batch = _batch_of(batches, sizes, k - begin, examples)
        # One lane: to clear every row's sum is cheaper than to number the rows that have one.
        count = len(weights) if weights.shape[1] == 1 else touch(examples, batch, k, scratch)
        clipped_sum(weights, examples, batch, count, lanes, columns, scratch)
        _adam_moves(weights, first, second, mean_noise_std, learning_rate, lanes, b1, b2, f32(eps), k, scratch)


# --- Metrics ----------------------------------------------------------------------------------------------------------


@numba.njit(**INSIDE)
def _evaluate_multi_label(z, labels, scores):
    """Adds to the scores of `problems.linear.MULTI_LABEL`; logits to residuals. Returns the loss and |residuals|^2."""
    loss = 0.0
    for m in range(len(z)):
        loss += max(np.float64(z[m]), 0.0) + math.log1p(math.exp(-abs(np.float64(z[m]))))
        scores[3] += z[m] > f32(0.0)
    for label in labels:
        if label >= 0:
            rank = 0
            for m in range(len(z)):
                rank += z[m] > z[label] or (z[m] == z[label] and m < label)
            loss -= np.float64(z[label])
            scores[0] += rank < 5
            scores[1] += 1
            scores[2] += z[label] > f32(0.0)
    _to_residuals(z, labels)
    return loss, f32(_squared_length(z))


@numba.njit(**FAST)
def evaluate(weights, examples, lanes, outputs, scratch, gradient, losses, scores, clipped):
    """Sums over all examples, by run: loss, scores, gradients over the clip norm; the gradient (rows, lanes).

    losses, clipped: (runs,) float64, set to 0 by the caller; scores: the likelihood's own, (runs, scores) float64, the
    same; `gradient` float32, the same, or empty to skip.
    """
    one = np.empty(1, np.int64)
    z = scratch.coefficients[:1]
    bias = weights.shape[0] - 1
    for example in range(len(examples.labels)):
        one[0] = example
        _logits(weights, examples, one, z)
        label, norm = examples.labels[example, 0], examples.norms[example]
        for run in range(len(losses)):
            at = z[0, run * outputs : (run + 1) * outputs]
            if examples.likelihood == MULTI_LABEL:
                loss, square = _evaluate_multi_label(at, examples.labels[example], scores[run])
                losses[run] += loss
            elif examples.likelihood == LOGISTIC:
                margin = np.float64(at[0] if label == 1 else -at[0])
                losses[run] += max(-margin, 0.0) + math.log1p(math.exp(-abs(margin)))
                scores[run, 0] += (at[0] > f32(0.0)) == (label == 1)
                at[0] = f32(1.0) / (f32(1.0) + exponential(-at[0])) - f32(label)
                square = at[0] * at[0]
            else:
                largest, best = at[0], 0
                for m in range(outputs):
                    if at[m] > largest:
                        largest, best = at[m], m
                shifted = at[label] - largest
                total = f32(0.0)
                for m in range(outputs):
                    at[m] = exponential(at[m] - largest)
                    total += at[m]
                losses[run] += math.log(np.float64(total)) - np.float64(shifted)
                scores[run, 0] += best == label
                square = f32(0.0)
                for m in range(outputs):
                    at[m] /= total
                    if m == label:
                        at[m] -= f32(1.0)
                    square += at[m] * at[m]
            clipped[run] += f32(math.sqrt(square)) * norm > lanes.clip[run * outputs]
        if len(gradient):
            for lane in range(weights.shape[1]):
                gradient[bias, lane] += z[0, lane]
            for entry in range(examples.begin[example], examples.end[example]):
                row, value = examples.indices[entry], examples.values[entry]
                for lane in range(weights.shape[1]):
                    gradient[row, lane] += value * z[0, lane]
