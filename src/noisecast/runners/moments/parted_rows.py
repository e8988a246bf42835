"""Rows in two parts: a dense block of columns that have a full covariance, and the rest, which has variances."""

import math
from typing import Any

import numpy as np
import scipy.sparse

# Directions of the rest with a full covariance: at most, and the share of its energy that each holds. Of IMDB's words
# it is that of their frequencies (0.03 to 0.05; the next has 0.004), of collinear groups one a group.
MOST_JOINT, JOINT_SHARE = 48, 0.0075
# The same where columns do more than so much of what they do together beside these, as overlapping neighbourhoods do;
# but no direction that a few rows of independent columns would have by chance: of more than 2/n of the energy none is,
# and of less those that have a little more than chance makes of what larger ones leave.
MUCH_TOGETHER, MOST_FAINT, FAINT_SHARE, MOST_BY_CHANCE, MORE_THAN_CHANCE = 0.15, 200, 0.0005, 2.0, 1.1
ROWS_OF_JOINT, SUBSPACE_STEPS = 8_000, 6
# Columns beside these directions that have company: of a squared correlation of so much. They are looked for among
# random combinations of so many rows, by which one of `LIKELY` may be; dense columns on so many rows.
COMPANY, LIKELY, SKETCHES, ROWS_OF_COMPANY = 0.5, 0.4, 96, 2_000
COLUMNS_OF_COMPANY, PAIRS_AT_ONCE = 100, 20_000  # what the cache holds
MOST_OF_COMPANY = 20_000  # columns that are looked at, those of most energy: each is compared with each
LEFT_OF_A_COLUMN = 1e-3  # of its energy, beside the directions: less is rounding


class PartedRows:
    """Rows x_i, whose block is [most energetic features, bias, R].

    R = rest . V are the rest's components along a few orthonormal directions, in which features that are each too faint
    for the block fluctuate together, and which they bend together. The rest's own variances are those beside V.

    Args:
      block: (n, K + 1 + r) float32.   rest: (n, p - K), CSR or dense, float32.   joint: V; (p - K, r) float32.
      lengths: sqrt(|x|^2 + 1); (n,).
    """

    def __init__(self, block: np.ndarray, rest: Any, joint: np.ndarray, lengths: np.ndarray):
        self.block, self.rest, self.joint, self.lengths = block, rest, joint, lengths
        self.split = block.shape[1] - joint.shape[1]  # K + 1: the features themselves, and the bias
        self.joint_shares = joint.astype(np.float64) ** 2  # V_jk^2
        self.rest_squared = rest.power(2) if scipy.sparse.issparse(rest) else rest**2
        # Views, but for few examples SciPy takes as long to make one as to multiply by it.
        self.rest_t, self.rest_squared_t = rest.T, self.rest_squared.T

    @property
    def num_examples(self) -> int:
        return len(self.lengths)

    @property
    def num_weights(self) -> int:
        """d, of one output."""
        return self.split + self.rest.shape[1]

    def presence(self, batch_size: float, exactly: int | None) -> np.ndarray:
        """1 - e^(-B f_j), f_j the share of rows in which column j is not 0: of batches that have it; (d,).

        Of batches of exactly B of many 1 - (1 - f_j)^B.
        """
        parts = self.block[:, : self.split], self.rest
        shares = [np.asarray((part != 0).sum(axis=0)).ravel() / self.num_examples for part in parts]
        found = np.concatenate(shares)
        missing = np.exp(-batch_size * found) if exactly is None else (1 - found) ** exactly
        return np.maximum(1 - missing, 1e-12)

    def dot(self, weights: np.ndarray) -> np.ndarray:
        """x_i . w; (n,) from (d,), or (n, m) from (d, m)."""
        weights = weights.astype(np.float32)
        return self.block[:, : self.split] @ weights[: self.split] + self.rest @ weights[self.split :]

    def mean_of(self, coefficients: np.ndarray) -> np.ndarray:
        """(1/n) sum_i c_i x_i; (d,) from (n,), or (d, m) from (n, m)."""
        c = (coefficients / self.num_examples).astype(np.float32)
        return np.concatenate([self.block[:, : self.split].T @ c, self.rest_t @ c]).astype(np.float64)

    def rest_second_moment(self, coefficients: np.ndarray) -> np.ndarray:
        """(1/n) sum_i c_i x_ij^2 in the rest; (p - K,) from (n,), or (p - K, m) from (n, m)."""
        return (self.rest_squared_t @ (coefficients / self.num_examples).astype(np.float32)).astype(np.float64)

    def in_block(self, weights: np.ndarray) -> np.ndarray:
        """Components of weights of all coordinates along the block's columns; (d, ...) -> (K + 1 + r, ...)."""
        return np.concatenate([weights[: self.split], self.joint.T @ weights[self.split :]])

    def from_block(self, components: np.ndarray) -> np.ndarray:
        """Weights of all coordinates, within the block, of these components; (K + 1 + r, ...) -> (d, ...)."""
        return np.concatenate([components[: self.split], self.joint @ components[self.split :]])

    def beside(self, rest: np.ndarray) -> np.ndarray:
        """What is left beside V of weights in the rest; (p - K, ...)."""
        return rest - self.joint @ (self.joint.T @ rest)


def row_dots(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """sum_k a_ik b_ik; (n,), 0 where there is no k.

    By einsum it is twice as fast, but where there is no k NumPy 2.4 multiplies that 0 with a number from beyond the
    array's end, and whether that is finite is chance.
    """
    return np.vecdot(one, other)


def parted(features: Any, first: np.ndarray, joint: np.ndarray | None = None) -> tuple[np.ndarray, Any, np.ndarray]:
    """Block, rest and V of rows with the features `first` in the block, V as given or the rest's own."""
    others = np.setdiff1d(np.arange(features.shape[1]), first)
    block, rest = features[:, first], features[:, others]
    if scipy.sparse.issparse(features):
        block = block.toarray()
    joint = joint_directions(rest) if joint is None else joint
    block = np.hstack([block, np.ones((len(block), 1)), rest @ joint]).astype(np.float32)
    return block, rest, joint


def joint_directions(rest: Any) -> np.ndarray:
    """The right singular vectors of the rest that hold `JOINT_SHARE` of its energy each; (p - K, r)."""
    return _directions(rest, MOST_JOINT, JOINT_SHARE)


def faint_directions(rest: Any) -> np.ndarray:
    """The same of less energy each, where columns do much together beside those of more; (p - K, r)."""
    return _directions(rest, MOST_FAINT, FAINT_SHARE, none_by_chance=True)


def _directions(rest: Any, most: int, share: float, *, none_by_chance: bool = False) -> np.ndarray:
    """By subspace iteration from a fixed start, on some of the rows: a direction need not be exact."""
    rest = rest[:: math.ceil(rest.shape[0] / ROWS_OF_JOINT)]
    size = min(most, *rest.shape)
    largest = abs(rest).max() if size else 0.0
    if largest == 0:
        return np.zeros((rest.shape[1], 0), np.float32)
    rest = _over(rest, largest)  # squares of small numbers are nothing in single precision
    left = np.random.default_rng(0).normal(size=(rest.shape[0], size)).astype(np.float32)
    for _ in range(SUBSPACE_STEPS):
        left = np.linalg.qr(rest @ (rest.T @ left))[0]
    found = (rest.T @ left).astype(np.float64)
    energies, turned = np.linalg.eigh(found.T @ found)
    shares = np.maximum(energies, 0.0) / float((rest * rest).sum(dtype=np.float64))
    kept = shares >= (np.maximum(share, _by_chance(shares, *rest.shape)) if none_by_chance else share)
    return np.ascontiguousarray(found @ turned[:, kept] / np.sqrt(energies[kept]), np.float32)


def _over(rows: Any, largest: float) -> Any:
    """Rows by their largest number, in single precision, as which SciPy does not keep sparse ones."""
    return (rows / largest).astype(np.float32)


def _by_chance(shares: np.ndarray, num_rows: int, num_columns: int) -> np.ndarray:
    """A little more than what the largest direction of n rows of p independent columns has, of what larger ones leave.

    That is (1 + sqrt(n/p))^2/n of the energy (Marchenko and Pastur); 2/n of all of it at most.

    Args:
      shares: of the directions, rising; (r,).
    """
    left = 1 - np.cumsum(shares[::-1])[::-1] + shares
    rows = num_rows - np.arange(len(shares))[::-1]
    return np.minimum(
        MOST_BY_CHANCE / num_rows, MORE_THAN_CHANCE * left * (1 + np.sqrt(rows / num_columns)) ** 2 / rows
    )


def company(rest: Any, joint: np.ndarray) -> np.ndarray:
    """m_j = 1 + sum_l (S_jl^2 - Q_jl)/S_jj^2 over the columns l that nearly always come with column j; (p - K,) >= 1.

    S = sum_i y_i y_i' of what is left of the rows beside V, Q = sum_i y_ij^2 y_il^2 what each row has of S^2 by itself.
    Of m columns that are one but for factors each of them is bent, along their direction, m times as much as alone.
    """
    if not scipy.sparse.issparse(rest):
        rest = rest[:: math.ceil(rest.shape[0] / ROWS_OF_COMPANY)]
    found = np.ones(rest.shape[1])
    largest = abs(rest).max() if min(rest.shape) > 1 else 0.0
    if largest == 0:
        return found
    rest = _over(rest, largest)
    signs = np.random.default_rng(1).choice(np.array([-1, 1], np.float32), (rest.shape[0], SKETCHES))
    sketch = np.asarray(rest.T @ signs)
    sketch -= joint @ (joint.T @ sketch)
    along = rest @ joint
    tilted = rest.T @ along - joint @ (along.T @ along) / 2  # S = X'X - V T' - T V'
    whole = np.asarray((rest * rest).sum(axis=0), np.float64).ravel()
    energy = whole - 2 * row_dots(joint, tilted)
    columns = scipy.sparse.csc_array(rest) if scipy.sparse.issparse(rest) else rest
    may_have = energy > LEFT_OF_A_COLUMN * whole
    if scipy.sparse.issparse(columns):
        may_have &= np.diff(columns.indptr) > 1  # what one row has is its own
    kept = np.flatnonzero(may_have)
    kept = np.sort(kept[np.argsort(energy[kept])[-MOST_OF_COMPANY:]])
    sketch = sketch[kept] / np.maximum(np.linalg.norm(sketch[kept], axis=1, keepdims=True), 1e-30)
    for first in range(0, len(kept), COLUMNS_OF_COMPANY):
        near = sketch[first : first + COLUMNS_OF_COMPANY] @ sketch[first:].T
        one, other = np.divmod(np.flatnonzero(np.abs(near, out=near) > LIKELY), near.shape[1])
        one, other = kept[first + one[one < other]], kept[first + other[one < other]]
        for begin in range(0, len(one), PAIRS_AT_ONCE):
            a, b = one[begin : begin + PAIRS_AT_ONCE], other[begin : begin + PAIRS_AT_ONCE]
            products = columns[:, a] * columns[:, b]
            dots = np.asarray(products.sum(axis=0), np.float64) - row_dots(joint[a], tilted[b])
            squared = (dots - row_dots(tilted[a], joint[b])) ** 2 - np.asarray((products * products).sum(axis=0))
            are_company = squared > COMPANY * energy[a] * energy[b]
            for j in (a, b):
                np.add.at(found, j[are_company], (squared / energy[j] ** 2)[are_company])
    return found


def gain_in_block(rows: PartedRows, gain: np.ndarray) -> np.ndarray:
    """Of the block's columns; along V the mean of the rest's, V' K V without what turns one direction to another.

    The rest's gains are nearly the same where privacy noise makes most of a gradient, and V lies in many of them.
    (d, ...) -> (K + 1 + r, ...).
    """
    return np.concatenate([gain[: rows.split], rows.joint_shares.T @ gain[rows.split :]])


def direction_covariance(
    rows: PartedRows,
    own: np.ndarray,
    covariance: np.ndarray,
    gain: np.ndarray,
    of_rest: np.ndarray,
    variance: np.ndarray,
) -> np.ndarray:
    """Cov u along the block's columns: the closure's of single coordinates; along V u = K g + what is left of it.

    What is left, Var u_j - k^2 Var g_j >= 0, is independent from coordinate to coordinate: the optimizer makes it of
    each by itself (nothing for DP-SGD, which is linear; most of a sign).

    Args:
      own: Cov u among the block's own features; (K + 1, K + 1).   covariance: of the gradient along its columns.
      gain: of the block's columns.   of_rest, variance: of u and of the gradient in the rest; (p - K,).
    """
    split, joint = rows.split, rows.joint.astype(np.float64)
    found = gain[:, None] * covariance * gain
    found[:split, :split] = own
    along = gain[split:]
    left = (joint * of_rest[:, None]).T @ joint - along[:, None] * ((joint * variance[:, None]).T @ joint) * along
    found[split:, split:] += left
    return found
