"""Compiled steps of linear models whose examples touch few rows of the parameters.

Parameters are W[row, lane]: a row is a feature (the last one is the bias), a lane one output of one run. Runs of a
group lie side by side in lanes and share their batches, so what is expensive about a step (finding rows, loading
values) is paid once. `docs/engines.md` derives why each step has the law of its plain form, which is written out in
`tests/engines/reference.py`. One step, k = 0, 1, ...:

  touch      number the distinct rows of the batch
  catch up   give each of them the noise of the steps in which nothing touched it
  gradient   logits, residuals, clip factors: |g| = |residual| sqrt(|x|^2 + 1), no per-example gradient is formed
  move       the optimizer's step of the touched rows

Untouched rows only move by noise, so their moves are postponed: `last[row]` counts the steps a row has had, and
`flush_*` gives every row what it still lacks.
"""

import math
from typing import NamedTuple

import numba
import numpy as np

from noisecast.privacy.counter_noise import (
    COIN,
    FLUSH_NOISE,
    MORE_BITS,
    STEP_NOISE,
    exponential,
    normal_cdf,
    normal_pair,
    threefry,
)

f32, u32 = np.float32, np.uint32

# What float rounding is allowed: contraction and signs of zero, never "no infinities": clipping tests for them.
FAST = {"fastmath": {"contract", "nsz", "arcp"}, "error_model": "numpy", "nogil": True, "cache": True}
FEW_LANES = 8
# Rows whose noise is drawn at once: it stays in the first-level cache, and the loop along it is long enough.
TILE, TILE_OF_FEW_LANES = 64, 1024
NEAR_TIE = f32(1e-6)  # float32 cannot decide a coin that lands this near its threshold


class Examples(NamedTuple):
    """CSR rows with their labels; norms are sqrt(|x|^2 + 1), rounded up."""

    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    labels: np.ndarray
    norms: np.ndarray


class Lanes(NamedTuple):
    """What differs from lane to lane, (lanes,) each; a lane's noise is made of its key and its number in the run."""

    clip: np.ndarray  # C
    noise_std: np.ndarray  # z C
    learning_rate: np.ndarray  # eta
    step_size: np.ndarray  # eta / B
    step_noise: np.ndarray  # eta z C / B
    key_0: np.ndarray
    key_1: np.ndarray
    key_2: np.ndarray
    key_3: np.ndarray
    lane: np.ndarray


class Scratch(NamedTuple):
    """Working memory of one group."""

    stamp: np.ndarray  # (rows,) int32, step + 1 at which a row was last numbered
    slot: np.ndarray  # (rows,) its number
    touched: np.ndarray  # (rows,) rows by number
    coefficients: np.ndarray  # (width, lanes) logits, then clipped residuals
    gradient: np.ndarray  # (rows, lanes) clipped sums of the touched rows, by number
    normals: np.ndarray  # (tile, lanes) float32
    words: np.ndarray  # (tile, lanes) uint32
    normal_column: np.ndarray  # (4, tile / 4) float32, where lanes are few
    word_column: np.ndarray  # (4, tile / 4) uint32
    every_row: np.ndarray  # (rows,) 0, 1, 2, ...


# --- Pieces of a step -------------------------------------------------------------------------------------------------


@numba.njit(**FAST)
def _touch(examples, batch, step, scratch):
    """Number the distinct rows of a batch; the bias is row number 0. Returns how many."""
    bias = len(scratch.stamp) - 1
    scratch.stamp[bias], scratch.slot[bias], scratch.touched[0] = step + 1, 0, bias
    count = 1
    for example in batch:
        for entry in range(examples.indptr[example], examples.indptr[example + 1]):
            row = examples.indices[entry]
            if scratch.stamp[row] != step + 1:
                scratch.stamp[row], scratch.slot[row], scratch.touched[count] = step + 1, count, row
                count += 1
    return count


@numba.njit(**FAST)
def _logits(weights, examples, batch, out):
    lanes = weights.shape[1]
    bias = weights.shape[0] - 1
    for b in range(len(batch)):
        begin, end = examples.indptr[batch[b]], examples.indptr[batch[b] + 1]
        if lanes == 1:  # a sum in a register
            total = weights[bias, 0]
            for entry in range(begin, end):
                total += examples.values[entry] * weights[examples.indices[entry], 0]
            out[b, 0] = total
            continue
        for lane in range(lanes):
            out[b, lane] = weights[bias, lane]
        for entry in range(begin, end):
            row, value = examples.indices[entry], examples.values[entry]
            for lane in range(lanes):
                out[b, lane] += value * weights[row, lane]


@numba.njit(**FAST)
def _clip_logistic(examples, batch, lanes, out):
    """Logits to residuals sigma(z) - y, times their clip factors."""
    for b in range(len(batch)):
        label, norm = f32(examples.labels[batch[b]]), examples.norms[batch[b]]
        for lane in range(out.shape[1]):
            residual = f32(1.0) / (f32(1.0) + exponential(-out[b, lane])) - label
            length = abs(residual) * norm
            clipped = residual * min(f32(1.0), lanes.clip[lane] / max(length, f32(1e-38)))
            out[b, lane] = clipped if length < f32(3e38) else f32(0.0)


@numba.njit(**FAST)
def _clip_softmax(examples, batch, lanes, outputs, out):
    """Logits to residuals softmax(z) - onehot(y), times the clip factor of their run; `outputs` lanes a run."""
    for b in range(len(batch)):
        label, norm = examples.labels[batch[b]], examples.norms[batch[b]]
        for first in range(0, out.shape[1], outputs):
            z = out[b, first : first + outputs]
            largest = z[0]
            for m in range(outputs):
                largest = max(largest, z[m])
            total = f32(0.0)
            for m in range(outputs):
                z[m] = exponential(z[m] - largest)
                total += z[m]
            square = f32(0.0)
            for m in range(outputs):
                z[m] = z[m] / total
                square += z[m] * z[m]
            square += f32(1.0) - f32(2.0) * z[label]  # |p - onehot|^2 = |p|^2 - 2 p_y + 1
            z[label] -= f32(1.0)
            length = f32(math.sqrt(max(square, f32(0.0)))) * norm
            factor = min(f32(1.0), lanes.clip[first] / max(length, f32(1e-38)))
            if not length < f32(3e38):
                factor = f32(0.0)
                z[:] = f32(0.0)
            for m in range(outputs):
                z[m] *= factor


@numba.njit(**FAST)
def _add_outer(target, at, first, examples, batch, coefficients):
    """target[at[row]] += value * coefficients[b] over the entries of a batch, and target[first] for the bias."""
    lanes = target.shape[1]
    for b in range(len(batch)):
        begin, end = examples.indptr[batch[b]], examples.indptr[batch[b] + 1]
        if lanes == 1:
            coefficient = coefficients[b, 0]
            target[first, 0] += coefficient
            for entry in range(begin, end):
                target[at[examples.indices[entry]], 0] += examples.values[entry] * coefficient
            continue
        for lane in range(lanes):
            target[first, lane] += coefficients[b, lane]
        for entry in range(begin, end):
            row, value = at[examples.indices[entry]], examples.values[entry]
            for lane in range(lanes):
                target[row, lane] += value * coefficients[b, lane]


@numba.njit(**FAST)
def _normal_tile(first, count, lanes, step, purpose, scratch):
    """scratch.normals[:count]: N(0, 1) of the rows number first, first + 1, ...; one block of counters serves four."""
    out, column = scratch.normals, scratch.normal_column
    lane_of, k0, k1, k2, k3 = lanes.lane, lanes.key_0, lanes.key_1, lanes.key_2, lanes.key_3
    blocks, at = (count + 3) // 4, first // 4
    if len(lane_of) >= FEW_LANES:  # the loop that vectorises is along lanes, else along rows
        for block in range(blocks):
            for lane in range(len(lane_of)):
                a, b, c, d = threefry(
                    lane_of[lane], u32(at + block), step, purpose, k0[lane], k1[lane], k2[lane], k3[lane]
                )
                out[4 * block, lane], out[4 * block + 1, lane] = normal_pair(a, b)
                out[4 * block + 2, lane], out[4 * block + 3, lane] = normal_pair(c, d)
        return
    for lane in range(len(lane_of)):
        own, w0, w1, w2, w3 = lane_of[lane], k0[lane], k1[lane], k2[lane], k3[lane]
        for block in range(blocks):
            a, b, c, d = threefry(own, u32(at + block), step, purpose, w0, w1, w2, w3)
            column[0, block], column[1, block] = normal_pair(a, b)
            column[2, block], column[3, block] = normal_pair(c, d)
        for number in range(count):
            out[number, lane] = column[number & 3, number >> 2]


@numba.njit(**FAST)
def _word_tile(first, count, lanes, step, purpose, scratch):
    """`_normal_tile`, of words of 32 bits: scratch.words[:count]."""
    out, column = scratch.words, scratch.word_column
    lane_of, k0, k1, k2, k3 = lanes.lane, lanes.key_0, lanes.key_1, lanes.key_2, lanes.key_3
    blocks, at = (count + 3) // 4, first // 4
    if len(lane_of) >= FEW_LANES:
        for block in range(blocks):
            for lane in range(len(lane_of)):
                a, b, c, d = threefry(
                    lane_of[lane], u32(at + block), step, purpose, k0[lane], k1[lane], k2[lane], k3[lane]
                )
                out[4 * block, lane], out[4 * block + 1, lane] = a, b
                out[4 * block + 2, lane], out[4 * block + 3, lane] = c, d
        return
    for lane in range(len(lane_of)):
        own, w0, w1, w2, w3 = lane_of[lane], k0[lane], k1[lane], k2[lane], k3[lane]
        for block in range(blocks):
            a, b, c, d = threefry(own, u32(at + block), step, purpose, w0, w1, w2, w3)
            column[0, block], column[1, block], column[2, block], column[3, block] = a, b, c, d
        for number in range(count):
            out[number, lane] = column[number & 3, number >> 2]


@numba.njit(inline="always")
def _bits(word):
    """Number of ones in 32 bits."""
    word = u32(word - u32(u32(word >> u32(1)) & u32(0x55555555)))
    word = u32(u32(word & u32(0x33333333)) + u32(u32(word >> u32(2)) & u32(0x33333333)))
    word = u32(u32(word + u32(word >> u32(4))) & u32(0x0F0F0F0F))
    return u32(u32(word * u32(0x01010101)) >> u32(24))


@numba.njit(inline="always")
def _first(word, count):
    """The lowest `count` bits of a word, all of them from 32 on, none below 1."""
    if count >= 32:
        return u32(word)
    return u32(word & u32((1 << max(count, 0)) - 1))


@numba.njit(**FAST)
def _more_coins(weights, row, skipped, lanes, number, step, purpose):
    """The coins beyond the first 32, 128 a block of counters."""
    left, block = skipped - 32, 1
    while left > 0:
        for lane in range(weights.shape[1]):
            a, b, c, d = threefry(
                lanes.lane[lane], u32(number), step, u32(purpose + MORE_BITS * u32(block)),
                lanes.key_0[lane], lanes.key_1[lane], lanes.key_2[lane], lanes.key_3[lane],
            )  # fmt: skip
            heads = _bits(_first(a, left)) + _bits(_first(b, left - 32))
            heads += _bits(_first(c, left - 64)) + _bits(_first(d, left - 96))
            weights[row, lane] += lanes.learning_rate[lane] * (f32(2.0) * f32(heads) - f32(min(left, 128)))
        left -= 128
        block += 1


@numba.njit(**FAST)
def _residuals(weights, examples, batch, lanes, outputs, scratch):
    """Clipped residuals of the batch into scratch.coefficients."""
    _logits(weights, examples, batch, scratch.coefficients)
    if outputs == 1:
        _clip_logistic(examples, batch, lanes, scratch.coefficients)
    else:
        _clip_softmax(examples, batch, lanes, outputs, scratch.coefficients)


# --- DP-SGD -----------------------------------------------------------------------------------------------------------


@numba.njit(**FAST)
def _catch_up_sgd(weights, last, rows, count, lanes, step, purpose, scratch):
    """Noise of a row's k skipped steps at once: N(0, k (eta z C / B)^2), the sum of k independent ones."""
    normals = scratch.normals
    tile = len(normals)
    for first in range(0, count, tile):
        size = min(tile, count - first)
        _normal_tile(first, size, lanes, u32(step), purpose, scratch)
        if weights.shape[1] == 1:
            scale = lanes.step_noise[0]
            for number in range(size):
                row = rows[first + number]
                weights[row, 0] += f32(math.sqrt(f32(step - last[row]))) * scale * normals[number, 0]
                last[row] = step
            continue
        for number in range(size):
            row = rows[first + number]
            spread = f32(math.sqrt(f32(step - last[row])))
            last[row] = step
            for lane in range(weights.shape[1]):
                weights[row, lane] += spread * lanes.step_noise[lane] * normals[number, lane]


@numba.njit(**FAST)
def sgd_steps(weights, last, examples, batches, sizes, lanes, outputs, begin, scratch):
    """DP-SGD. A touched row's own noise of this step is postponed too: it is the same Gaussian as the skipped ones."""
    bias = weights.shape[0] - 1
    for k in range(begin, begin + len(sizes)):
        batch = batches[k - begin, : sizes[k - begin]]
        count = _touch(examples, batch, k, scratch)
        _catch_up_sgd(weights, last, scratch.touched, count, lanes, k, STEP_NOISE, scratch)
        _residuals(weights, examples, batch, lanes, outputs, scratch)
        coefficients = scratch.coefficients
        for b in range(len(batch)):
            for lane in range(weights.shape[1]):
                coefficients[b, lane] *= -lanes.step_size[lane]
        _add_outer(weights, scratch.every_row, bias, examples, batch, coefficients)


@numba.njit(**FAST)
def flush_sgd(weights, last, lanes, step, scratch):
    """Give every row the noise of the steps it has not had, up to `step`."""
    _catch_up_sgd(weights, last, scratch.every_row, len(last), lanes, step, FLUSH_NOISE, scratch)


# --- DP-SignSGD -------------------------------------------------------------------------------------------------------


@numba.njit(**FAST)
def _catch_up_sign(weights, last, rows, count, lanes, step, purpose, scratch):
    """k skipped steps are k fair coins of +- eta: eta (2 Binomial(k, 1/2) - k), one bit a coin."""
    words = scratch.words
    tile = len(words)
    for first in range(0, count, tile):
        size = min(tile, count - first)
        _word_tile(first, size, lanes, u32(step), purpose, scratch)
        for number in range(size):
            row = rows[first + number]
            skipped = step - last[row]
            last[row] = step
            if skipped <= 0:
                continue
            coins = min(skipped, 32)
            mask = u32(0xFFFFFFFF) if coins == 32 else u32((1 << coins) - 1)
            for lane in range(weights.shape[1]):
                heads = f32(np.int32(_bits(u32(words[number, lane] & mask))))
                weights[row, lane] += lanes.learning_rate[lane] * (f32(2.0) * heads - f32(coins))
            if skipped > 32:
                _more_coins(weights, row, skipped, lanes, first + number, u32(step), purpose)


@numba.njit(**FAST)
def _is_up(gradient, noise_std, word):
    """The coin in float64, for one that float32 cannot decide."""
    threshold = 0.5 * math.erfc(np.float64(gradient) / np.float64(noise_std) / math.sqrt(2.0))
    return (np.float64(word) + 0.5) * 2.0**-32 < threshold


@numba.njit(**FAST)
def _sign_moves(weights, rows, count, lanes, step, scratch):
    """-eta sign(G + z C xi): up with probability Phi(-G / (z C)), one word against that threshold."""
    words, gradient, above = scratch.words, scratch.gradient, scratch.normals
    tile = len(words)
    for first in range(0, count, tile):
        size = min(tile, count - first)
        _word_tile(first, size, lanes, u32(step), COIN, scratch)
        for number in range(size):
            row, ties = rows[first + number], 0
            for lane in range(weights.shape[1]):
                up = normal_cdf(-gradient[first + number, lane] / lanes.noise_std[lane])
                distance = (f32(words[number, lane]) + f32(0.5)) * f32(2.0**-32) - up
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
def sign_steps(weights, last, examples, batches, sizes, lanes, outputs, begin, scratch):
    """DP-SignSGD: skipped steps are fair coins, a touched row's step is one biased coin. noise_std must be > 0."""
    for k in range(begin, begin + len(sizes)):
        batch = batches[k - begin, : sizes[k - begin]]
        count = _touch(examples, batch, k, scratch)
        _catch_up_sign(weights, last, scratch.touched, count, lanes, k, STEP_NOISE, scratch)
        _residuals(weights, examples, batch, lanes, outputs, scratch)
        scratch.gradient[:count] = f32(0.0)
        _add_outer(scratch.gradient, scratch.slot, 0, examples, batch, scratch.coefficients)
        _sign_moves(weights, scratch.touched, count, lanes, k, scratch)
        for number in range(count):
            last[scratch.touched[number]] = k + 1


@numba.njit(**FAST)
def flush_sign(weights, last, lanes, step, scratch):
    """Give every row the coins of the steps it has not had, up to `step`."""
    _catch_up_sign(weights, last, scratch.every_row, len(last), lanes, step, FLUSH_NOISE, scratch)


# --- DP-Adam ----------------------------------------------------------------------------------------------------------


@numba.njit(**FAST)
def _adam_moves(weights, first, second, lanes, per_example, b1, b2, eps, step, scratch):
    """Every row, in tiles: noise, both moments and the step while they are in the cache."""
    unbias_1 = f32(-1.0 / math.expm1((step + 1) * math.log(b1))) if b1 > 0 else f32(1.0)
    unbias_2 = f32(-1.0 / math.expm1((step + 1) * math.log(b2))) if b2 > 0 else f32(1.0)
    keep_1, keep_2 = f32(b1), f32(b2)
    normals, gradient, noise_std, learning_rate = (
        scratch.normals,
        scratch.gradient,
        lanes.noise_std,
        lanes.learning_rate,
    )
    tile = len(normals)
    for start in range(0, len(weights), tile):
        size = min(tile, len(weights) - start)
        _normal_tile(start, size, lanes, u32(step), STEP_NOISE, scratch)
        for number in range(size):
            row = start + number
            seen = scratch.stamp[row] == step + 1
            slot = scratch.slot[row] if seen else 0
            share = f32(1.0) if seen else f32(0.0)
            for lane in range(weights.shape[1]):
                g = (share * gradient[slot, lane] + noise_std[lane] * normals[number, lane]) * per_example
                m = keep_1 * first[row, lane] + (f32(1.0) - keep_1) * g
                v = keep_2 * second[row, lane] + (f32(1.0) - keep_2) * g * g
                first[row, lane] = m
                second[row, lane] = v
                weights[row, lane] -= learning_rate[lane] * (m * unbias_1) / (f32(math.sqrt(v * unbias_2)) + eps)


@numba.njit(**FAST)
def adam_steps(
    weights, first, second, examples, batches, sizes, lanes, outputs, batch_size, b1, b2, eps, begin, scratch
):
    """DP-Adam, every row at every step: its step depends on the noise's whole path, so no noise can be summed up."""
    for k in range(begin, begin + len(sizes)):
        batch = batches[k - begin, : sizes[k - begin]]
        count = _touch(examples, batch, k, scratch)
        _residuals(weights, examples, batch, lanes, outputs, scratch)
        scratch.gradient[:count] = f32(0.0)
        _add_outer(scratch.gradient, scratch.slot, 0, examples, batch, scratch.coefficients)
        _adam_moves(weights, first, second, lanes, f32(1.0 / batch_size), b1, b2, f32(eps), k, scratch)


# --- Metrics ----------------------------------------------------------------------------------------------------------


@numba.njit(**FAST)
def evaluate(weights, examples, lanes, outputs, scratch, gradient, losses, correct, clipped):
    """Sums over all examples, by run: loss, right guesses, gradients over the clip norm; the gradient (rows, lanes).

    losses, correct, clipped: (runs,) float64, set to 0 by the caller; `gradient` float32, the same, or empty to skip.
    """
    one = np.empty(1, np.int64)
    z = scratch.coefficients[:1]
    bias = weights.shape[0] - 1
    for example in range(len(examples.labels)):
        one[0] = example
        _logits(weights, examples, one, z)
        label, norm = examples.labels[example], examples.norms[example]
        for run in range(len(losses)):
            at = z[0, run * outputs : (run + 1) * outputs]
            if outputs == 1:
                margin = np.float64(at[0] if label == 1 else -at[0])
                losses[run] += max(-margin, 0.0) + math.log1p(math.exp(-abs(margin)))
                correct[run] += (at[0] > f32(0.0)) == (label == 1)
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
                correct[run] += best == label
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
            for entry in range(examples.indptr[example], examples.indptr[example + 1]):
                row, value = examples.indices[entry], examples.values[entry]
                for lane in range(weights.shape[1]):
                    gradient[row, lane] += value * z[0, lane]
