"""Compiled pieces of linear models with sparse rows; `_kernels` makes steps of them.

Parameters are W[row, lane]: a row is a feature (the last one is the bias), a lane one output of one run. An example's
gradient is its residuals times (x, 1), of norm |residuals| sqrt(|x|^2 + 1), so that no gradient of one example is ever
formed: logits, residuals, their clip factors, and the sum of what is left.
"""

import math
from typing import NamedTuple

import numpy as np

from noisecast.compiled import FAST, INSIDE, njit, prefetch, wide_vectors
from noisecast.engines._kernels import ANY_ORDER, LINE, bring
from noisecast.engines._lane_vectors import add_rows, add_to_rows
from noisecast.privacy.counter_noise import exponential

f32, u32 = np.float32, np.uint32

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


@njit(**INSIDE)
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


@njit(**INSIDE)
def _fetch_features(examples, batch):
    """Rows of a data set are far apart in memory, and nothing else would ask for them in time."""
    for example in batch:
        for entry in range(examples.begin[example], examples.end[example], LINE):
            prefetch(examples.indices, entry)
            prefetch(examples.values, entry)


@njit(**INSIDE)
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


@njit(**INSIDE)
def _logits(weights, examples, batch, out):
    wide_vectors()
    lanes, bias = weights.shape[1], weights.shape[0] - 1
    indices, values, begins, ends, column = (
        examples.indices,
        examples.values,
        examples.begin,
        examples.end,
        weights.reshape(-1),
    )
    for b in range(len(batch)):
        begin, end = begins[batch[b]], ends[batch[b]]
        if lanes == 1:  # a sum in registers
            out[b, 0] = column[bias] + _dot(indices, values, begin, end, column)
            continue
        for lane in range(lanes):
            out[b, lane] = weights[bias, lane]
        add_rows(out, b, weights, indices, values, begin, end)


@njit(**INSIDE)
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
@njit(**ANY_ORDER)
def _squared_length(z):
    total = 0.0
    for m in range(len(z)):
        total += np.float64(z[m]) * np.float64(z[m])
    return total


@njit(**INSIDE)
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


@njit(**INSIDE)
def _largest(z):
    """Four maxima at once: one would wait for each comparison."""
    a, b, c, d, m = z[0], z[0], z[0], z[0], 0
    while m + 4 <= len(z):
        a, b, c, d = max(a, z[m]), max(b, z[m + 1]), max(c, z[m + 2]), max(d, z[m + 3])
        m += 4
    while m < len(z):
        a = max(a, z[m])
        m += 1
    return max(max(a, b), max(c, d))


@njit(**ANY_ORDER)
def _sum(z):
    total = f32(0.0)
    for m in range(len(z)):
        total += z[m]
    return total


@njit(**INSIDE)
def _to_probabilities(z):
    """Softmax, in place. Returns the largest logit, and the sum of e^(z - largest)."""
    wide_vectors()
    largest = _largest(z)
    for m in range(len(z)):  # a sum beside it, in order, would keep it from running along vectors
        z[m] = exponential(z[m] - largest)
    total = _sum(z)
    for m in range(len(z)):
        z[m] = z[m] / total
    return largest, total


@njit(**INSIDE)
def _clip_softmax(examples, batch, lanes, outputs, out):
    """Logits to residuals softmax(z) - onehot(y), times the clip factor of their run; `outputs` lanes a run."""
    for b in range(len(batch)):
        label, norm = examples.labels[batch[b], 0], examples.norms[batch[b]]
        for first in range(0, out.shape[1], outputs):
            z = out[b, first : first + outputs]
            _to_probabilities(z)
            z[label] -= f32(1.0)
            _clip_residuals(z, norm, lanes.clip[first])


@njit(**INSIDE)
def _to_residuals(z, labels):
    """Logits of independent outputs to residuals sigma(z) - y, y = 1 for the labels."""
    for m in range(len(z)):
        z[m] = f32(1.0) / (f32(1.0) + exponential(-z[m]))
    for label in labels:
        if label >= 0:
            z[label] -= f32(1.0)


@njit(**INSIDE)
def _clip_multi_label(examples, batch, lanes, outputs, out):
    """Logits to residuals, times one clip factor for all outputs of a run."""
    for b in range(len(batch)):
        labels, norm = examples.labels[batch[b]], examples.norms[batch[b]]
        for first in range(0, out.shape[1], outputs):
            z = out[b, first : first + outputs]
            _to_residuals(z, labels)
            _clip_residuals(z, norm, lanes.clip[first])


@njit(**INSIDE)
def _add_outer(target, at, first, examples, batch, coefficients):
    """target[at[row]] += value * coefficients[b] over the entries of a batch, and target[first] for the bias.

    at: number of each row, or None where rows keep their own.
    """
    wide_vectors()
    lanes, column = target.shape[1], target.reshape(-1)
    indices, values, begins, ends = examples.indices, examples.values, examples.begin, examples.end
    for b in range(len(batch)):
        begin, end = begins[batch[b]], ends[batch[b]]
        if lanes == 1:
            coefficient = coefficients[b, 0]
            column[first] += coefficient
            for entry in range(begin, end):
                row = indices[entry]
                column[row if at is None else at[row]] += values[entry] * coefficient
            continue
        for lane in range(lanes):
            target[first, lane] += coefficients[b, lane]
        add_to_rows(target, at, indices, values, begin, end, coefficients, b)


@njit(**INSIDE)
def _residuals(weights, examples, batch, lanes, outputs, scratch):
    """Clipped residuals of the batch into scratch.coefficients."""
    _logits(weights, examples, batch, scratch.coefficients)
    if examples.likelihood == LOGISTIC:
        _clip_logistic(examples, batch, lanes, scratch.coefficients)
    elif examples.likelihood == SOFTMAX:
        _clip_softmax(examples, batch, lanes, outputs, scratch.coefficients)
    else:
        _clip_multi_label(examples, batch, lanes, outputs, scratch.coefficients)


@njit(**INSIDE)
def _clipped_sum_of_features(weights, examples, batch, count, lanes, outputs, scratch):
    _residuals(weights, examples, batch, lanes, outputs, scratch)
    scratch.gradient[:count] = f32(0.0)
    bias = scratch.slot[weights.shape[0] - 1]
    _add_outer(scratch.gradient, scratch.slot, bias, examples, batch, scratch.coefficients)


@njit(**INSIDE)
def _descend_features(weights, examples, batch, count, lanes, outputs, scratch):
    """Straight into the weights: the gradient is made of residuals and values, so nothing reads what it moves."""
    _residuals(weights, examples, batch, lanes, outputs, scratch)
    coefficients = scratch.coefficients
    for b in range(len(batch)):
        for lane in range(weights.shape[1]):
            coefficients[b, lane] *= -lanes.step_size[lane]
    _add_outer(weights, None, weights.shape[0] - 1, examples, batch, coefficients)


bring(Examples, _touch_features, _clipped_sum_of_features, _descend_features, _fetch_features)


# --- Metrics ----------------------------------------------------------------------------------------------------------


@njit(**INSIDE)
def _evaluate_logistic(z, label, scores):
    """Adds to the score, right or not; the logit to its residual. Returns the loss and residual^2."""
    margin = np.float64(z[0] if label == 1 else -z[0])
    scores[0] += (z[0] > f32(0.0)) == (label == 1)
    z[0] = f32(1.0) / (f32(1.0) + exponential(-z[0])) - f32(label)
    return max(-margin, 0.0) + math.log1p(math.exp(-abs(margin))), z[0] * z[0]


@njit(**INSIDE)
def _evaluate_softmax(z, label, scores):
    """Adds to the score, right or not; logits to residuals. Returns the loss and |residuals|^2."""
    logit, best = z[label], 0
    for m in range(len(z)):
        if z[m] > z[best]:
            best = m
    scores[0] += best == label
    largest, total = _to_probabilities(z)
    z[label] -= f32(1.0)
    return math.log(np.float64(total)) - np.float64(logit - largest), f32(_squared_length(z))


@njit(**INSIDE)
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


@njit(**FAST)
def evaluate(weights, examples, lanes, outputs, gradient, losses, scores, clipped):
    """Sums over all examples, by run: loss, scores, gradients over the clip norm; the gradient (rows, lanes).

    losses, clipped: (runs,) float64, set to 0 by the caller; scores: the likelihood's own, (runs, scores) float64, the
    same; `gradient` float32, the same, or empty to skip.
    """
    one = np.empty(1, np.int64)
    z = np.empty((1, weights.shape[1]), f32)
    bias = weights.shape[0] - 1
    for example in range(len(examples.labels)):
        one[0] = example
        _logits(weights, examples, one, z)
        labels, norm = examples.labels[example], examples.norms[example]
        for run in range(len(losses)):
            at = z[0, run * outputs : (run + 1) * outputs]
            if examples.likelihood == LOGISTIC:
                loss, square = _evaluate_logistic(at, labels[0], scores[run])
            elif examples.likelihood == SOFTMAX:
                loss, square = _evaluate_softmax(at, labels[0], scores[run])
            else:
                loss, square = _evaluate_multi_label(at, labels, scores[run])
            losses[run] += loss
            clipped[run] += f32(math.sqrt(square)) * norm > lanes.clip[run * outputs]
        if len(gradient):
            for lane in range(weights.shape[1]):
                gradient[bias, lane] += z[0, lane]
            begin, end = examples.begin[example], examples.end[example]
            add_to_rows(gradient, None, examples.indices, examples.values, begin, end, z, np.int64(0))
