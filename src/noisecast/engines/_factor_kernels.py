"""Compiled pieces of matrix factorisation; `_kernels` makes steps of them.

Parameters are W[row, lane]: rows of users, then of items; a run has `dim` lanes, runs of a group lie side by side. A
rating touches two rows, u and i. With e = <W[u], W[i]> - label, its gradient is 2 w e W[i] in row u and 2 w e W[u] in
row i, of norm 2 w |e| sqrt(|W[u]|^2 + |W[i]|^2).
"""

import math
from typing import NamedTuple

import numpy as np

from noisecast.compiled import FAST, INSIDE, njit, prefetch
from noisecast.engines._kernels import ANY_ORDER, bring
from noisecast.engines._lane_vectors import add_product

f32 = np.float32


class Ratings(NamedTuple):
    """Rows and labels of ratings, and what `squared_norm_bound` needs."""

    users: np.ndarray  # (n,) int32
    items: np.ndarray  # (n,) int32
    labels: np.ndarray  # (n,) float32, rating - center
    slope: np.float32  # 2 w: of the loss w e^2 in e, over e
    norm_slack: np.float32
    norm_vanished: np.float32


@njit(**INSIDE)
def _touch_pairs(ratings, batch, step, scratch):
    """Number the distinct rows of a batch. Returns how many."""
    count = 0
    for example in batch:
        for row in (ratings.users[example], ratings.items[example]):
            if scratch.stamp[row] != step + 1:
                scratch.stamp[row], scratch.slot[row], scratch.touched[count] = step + 1, count, row
                count += 1
    return count


@njit(**ANY_ORDER)
def _products(user, item):
    """<x_u, x_i> and |x_u|^2 + |x_i|^2; `squared_norm_bound` holds for every order of summation."""
    product, squares = f32(0.0), f32(0.0)
    for j in range(len(user)):
        product += user[j] * item[j]
        squares += user[j] * user[j] + item[j] * item[j]
    return product, squares


@njit(**INSIDE)
def _residual_and_length(user, item, label, ratings):
    """2 w e, and sqrt(|x_u|^2 + |x_i|^2), rounded up: their product is the gradient's norm."""
    product, squares = _products(user, item)
    length = f32(math.sqrt((squares + ratings.norm_vanished) * ratings.norm_slack))
    return ratings.slope * (product - label), length


@njit(**INSIDE)
def _clip(residual, length, clip):
    """The residual times min(1, C / (|residual| length)), as a bound on it; 0 for a gradient that is not finite."""
    most = clip / length
    return max(-most, min(residual, most)) if abs(residual) + length < f32(3e38) else f32(0.0)


@njit(**INSIDE)
def _clipped_sum_of_pairs(weights, ratings, batch, count, lanes, dim, scratch):
    """Each rating adds its coefficient times the other's row to its user's and to its item's sum."""
    gradient = scratch.gradient
    gradient[:count] = f32(0.0)
    for b in range(len(batch)):
        u, i = ratings.users[batch[b]], ratings.items[batch[b]]
        to_u, to_i, label = scratch.slot[u], scratch.slot[i], ratings.labels[batch[b]]
        for first in range(0, weights.shape[1], dim):
            user, item = weights[u, first : first + dim], weights[i, first : first + dim]
            residual, length = _residual_and_length(user, item, label, ratings)
            coefficient = _clip(residual, length, lanes.clip[first])
            if coefficient == f32(0.0):  # and a row that is not finite is not multiplied by it
                continue
            of_user, of_item = gradient[to_u, first : first + dim], gradient[to_i, first : first + dim]
            for j in range(dim):
                of_user[j] += coefficient * item[j]
                of_item[j] += coefficient * user[j]


@njit(**INSIDE)
def _descend_pairs(weights, ratings, batch, count, lanes, dim, scratch):
    """By way of the sum: moved at once, a row would be read again by the batch's next rating."""
    _clipped_sum_of_pairs(weights, ratings, batch, count, lanes, dim, scratch)
    for number in range(count):
        add_product(weights, scratch.touched[number], f32(-1.0), lanes.step_size, scratch.gradient, number)


@njit(**INSIDE)
def _fetch_pairs(ratings, batch):
    for example in batch:
        prefetch(ratings.users, example)
        prefetch(ratings.items, example)
        prefetch(ratings.labels, example)


bring(Ratings, _touch_pairs, _clipped_sum_of_pairs, _descend_pairs, _fetch_pairs)


@njit(**FAST)
def evaluate(weights, ratings, lanes, dim, gradient, losses, scores, clipped):
    """Sums over all ratings, by run: loss, e^2, gradients over the clip norm; the gradient (rows, lanes).

    losses, clipped: (runs,) float64, set to 0 by the caller; scores: (runs, 1); `gradient` float32, the same, or empty.
    """
    for example in range(len(ratings.labels)):
        u, i = ratings.users[example], ratings.items[example]
        for run in range(len(losses)):
            first = run * dim
            user, item = weights[u, first : first + dim], weights[i, first : first + dim]
            residual, length = _residual_and_length(user, item, ratings.labels[example], ratings)
            error = np.float64(residual) / np.float64(ratings.slope)
            scores[run, 0] += error * error
            losses[run] += 0.5 * np.float64(ratings.slope) * error * error
            clipped[run] += abs(residual) * length > lanes.clip[first]
            coefficient = _clip(residual, length, f32(np.inf))
            if len(gradient) == 0 or coefficient == f32(0.0):
                continue
            of_user, of_item = gradient[u, first : first + dim], gradient[i, first : first + dim]
            for j in range(dim):
                of_user[j] += coefficient * item[j]
                of_item[j] += coefficient * user[j]
