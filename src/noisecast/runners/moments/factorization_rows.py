"""What Gaussian rows of a factorisation make of its ratings: their errors, and the sums over each row's ratings."""

from typing import Any, NamedTuple

import numpy as np

from noisecast.compiled import INLINE, njit
from noisecast.problems.matrix_factorization import RatedPairs


class Pairs(NamedTuple):
    """Ratings, sorted by user, and how many rows there are."""

    users: np.ndarray
    items: np.ndarray
    labels: np.ndarray
    num_rows: int

    def sum_of(self, of_items: np.ndarray, of_users: np.ndarray) -> np.ndarray:
        """By row: of its user's row sum_i of_items_i, of its item's row sum_i of_users_i; (R,)."""
        return np.bincount(self.users, of_items, self.num_rows) + np.bincount(self.items, of_users, self.num_rows)


def pairs_of(rated: RatedPairs, num_rows: int) -> Pairs:
    users, items, labels = (np.asarray(part) for part in (rated.users, rated.items, rated.labels))
    order = np.argsort(users, kind="stable")
    return Pairs(users[order], items[order], labels[order].astype(np.float64), num_rows)


class Rows(NamedTuple):
    """Gaussian rows in the current basis.

    Args:
      mean, variance: (R, dim) each.   pair: c of every rating; (n,).
    """

    mean: np.ndarray
    variance: np.ndarray
    pair: np.ndarray

    @classmethod
    def of(cls, flat: np.ndarray, shape: tuple[int, int]) -> "Rows":
        size = shape[0] * shape[1]
        return cls(flat[:size].reshape(shape), flat[size : 2 * size].reshape(shape), flat[2 * size :])

    @property
    def flat(self) -> np.ndarray:
        return np.concatenate([self.mean.ravel(), self.variance.ravel(), self.pair])

    @property
    def squared_lengths(self) -> np.ndarray:
        """E|x_r|^2; (R,)."""
        return (self.mean**2 + self.variance).sum(axis=1)


KERNEL: Any = {"fastmath": True, "nogil": True, "cache": True}


@njit(**KERNEL)
def _products(mean, variance, users, items, product, spread):
    """<m_u, m_w> and s^2 of every rating."""
    for i in range(len(users)):
        mu, mw, vu, vw = mean[users[i]], mean[items[i]], variance[users[i]], variance[items[i]]
        of_means, of_spread = np.float32(0.0), np.float32(0.0)
        for j in range(len(mu)):
            of_means += mu[j] * mw[j]
            of_spread += vu[j] * (mw[j] * mw[j] + vw[j]) + vw[j] * mu[j] * mu[j]
        product[i], spread[i] = of_means, of_spread


@njit(**INLINE)
def _add_to_row(force, curvature, own, other, spread, push, slope, held):
    """spread: of the other row."""
    for j in range(len(own)):
        by = held * spread[j]
        force[j] += push * other[j] + by * own[j]
        curvature[j] += slope * other[j] * other[j] + by


@njit(**KERNEL)
def _row_sums(mean, variance, users, items, push, slope, held, force, curvature):
    """By row, over its ratings: E[r x_w] = E r m_w + E r' v_w m_u (Stein), and E r' (m_w^2 + v_w), numberwise.

    Of what moves with v_w only the share that own pushes have left holds: `held` is D E r'.
    """
    for i in range(len(users)):
        u, w = users[i], items[i]
        _add_to_row(force[u], curvature[u], mean[u], mean[w], variance[w], push[i], slope[i], held[i])
        _add_to_row(force[w], curvature[w], mean[w], mean[u], variance[u], push[i], slope[i], held[i])


@njit(**KERNEL)
def mean_squares(force, curvature, variance, of_force, signal):
    """By row, means over its numbers: of force^2, and of curvature^2 v."""
    dim = force.shape[1]
    for r in range(len(force)):
        squares, spread = 0.0, 0.0
        for j in range(dim):
            squares += force[r, j] * force[r, j]
            spread += curvature[r, j] * curvature[r, j] * variance[r, j]
        of_force[r], signal[r] = squares / dim, spread / dim


@njit(**KERNEL)
def variance_change(rate, noise, curvature, variance, change, total, fading):
    """Of every variance, a step: noise - (1 - (1 - x)^2) v, x = rate times curvature; (1 - x)^2 is 0 beyond x = 1,
    where the closure is out of its depth anyway. By row their sum, and the share of it by which x draws it down.
    """
    for r in range(len(variance)):
        all_of_row, pulled = 0.0, 0.0
        for j in range(variance.shape[1]):
            pull = rate[r] * curvature[r, j]
            change[r, j] = noise[r] - pull * (2 - min(pull, 1.0)) * variance[r, j]
            all_of_row += variance[r, j]
            pulled += pull * variance[r, j]
        total[r], fading[r] = all_of_row, pulled / max(all_of_row, 1e-300)


@njit(**KERNEL)
def pair_change(users, items, push, gain, total, fading, pair, change):
    """Of every rating's c, a step: its own push, and what fades with its two rows."""
    for i in range(len(users)):
        u, w = users[i], items[i]
        change[i] = -push[i] * (gain[u] * total[w] + gain[w] * total[u]) - (fading[u] + fading[w]) * pair[i]


def single(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32, copy=False)


def errors_of(pairs: Pairs, mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """<m_u, m_w> - y and s^2; (n,) each."""
    product, spread = np.empty(len(pairs.labels), np.float32), np.empty(len(pairs.labels), np.float32)
    _products(single(mean), single(variance), pairs.users, pairs.items, product, spread)
    return product - pairs.labels, spread.astype(np.float64)


def sums_of(
    pairs: Pairs, mean: np.ndarray, variance: np.ndarray, push: np.ndarray, slope: np.ndarray, share: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean gradient and the diagonal of its Jacobian, of the mean over ratings; (R, dim) each."""
    force, curvature = np.zeros(mean.shape, np.float32), np.zeros(mean.shape, np.float32)
    rows = single(mean), single(variance)
    pushes, slopes, held = (single(each / len(pairs.labels)) for each in (push, slope, share * slope))
    _row_sums(rows[0], rows[1], pairs.users, pairs.items, pushes, slopes, held, force, curvature)
    return force.astype(np.float64), curvature.astype(np.float64)
