"""The rows of a linear model as a forecast reads them."""

from collections import Counter
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from noisecast.privacy.noise import Purpose, RandomRoot, key_data, key_for
from noisecast.problems.linear import Labelled, LinearModel
from noisecast.problems.rows import DenseRows
from noisecast.runners.moments.parted_rows import (
    JOINT_SHARE,
    MUCH_TOGETHER,
    PartedRows,
    company,
    faint_directions,
    joint_directions,
    parted,
    row_dots,
)

# Test examples, above which some stand for all: at most, and as a multiple of the training examples that do.
LARGEST_TEST, TEST_SHARE = 50_000, 4
LONGEST = 1e17  # a row: powers of its features must be numbers in single precision
ALL_TAKEN = 200  # columns beside the block that do much together, and all go into it: no more than directions would
MOST_IN_PAIRS = 1_000  # rows that say how far columns move together
COLUMNS_AT_ONCE, ROWS_AT_ONCE = 75, 1_000  # of the block


class Rows(PartedRows):
    """Labelled rows.   labels: (n,); the rest is of `PartedRows`."""

    def __init__(self, block: np.ndarray, rest: Any, joint: np.ndarray, labels: np.ndarray, lengths: np.ndarray):
        super().__init__(block, rest, joint, lengths)
        self.labels, self.block_squared = labels, block**2

    @cached_property
    def copies(self) -> np.ndarray:
        """How many rows have the same features, labels aside; (n,)."""
        near, far = np.ascontiguousarray(self.block[:, : self.split]), self.rest
        if scipy.sparse.issparse(far):
            parts = far.indices, far.data
            begins, ends = far.indptr[:-1].tolist(), far.indptr[1:].tolist()
            rest = [b"".join(part[a:b].tobytes() for part in parts) for a, b in zip(begins, ends, strict=True)]
        else:
            rest = map(bytes, np.ascontiguousarray(far))
        rows = [blake2b(bytes(row) + more).digest() for row, more in zip(near, rest, strict=True)]
        counted = Counter(rows)
        return np.array([counted[row] for row in rows], np.float64)

    @cached_property
    def company(self) -> np.ndarray:
        """m_j of the rest; (p - K,) >= 1."""
        return company(self.rest, self.joint)

    @cached_property
    def together(self) -> float:
        """1 - sum_j m_j S_jj^2/|S|^2 of the rest beside V, S = E y y': what columns do together that no one knows of.

        0 where all that is left of them is uncorrelated, or in company. By pairs of different rows.
        """
        few = self.take(np.arange(0, self.num_examples, -(-self.num_examples // MOST_IN_PAIRS)))
        along, n = few.block[:, few.split :], few.num_examples
        products = _dense(few.rest @ few.rest.T).astype(np.float64) - along @ along.T
        whole = (products**2).sum() - (np.diag(products) ** 2).sum()
        alike = np.ones(n)
        second = n * (few.rest_second_moment(alike) - few.rest_moment_along(alike))
        squares = np.asarray((few.rest_squared * few.rest_squared).sum(axis=0), np.float64).ravel()  # of each row alone
        apart = np.maximum(second**2 - squares, 0.0)
        return max(0.0, 1 - float(self.company @ apart) / whole) if n > 1 and whole > 0 else 0.0

    def dot(self, weights: np.ndarray) -> np.ndarray:
        return super().dot(weights).astype(np.float64)

    def block_second_moment(self, coefficients: np.ndarray) -> np.ndarray:
        """(1/n) sum_i c_i x_i x_i', c >= 0, within the block; (K + 1 + r, K + 1 + r)."""
        half = self.block * np.sqrt(coefficients / self.num_examples).astype(np.float32)[:, None]
        return (half.T @ half).astype(np.float64)

    def rest_moment_along(self, coefficients: np.ndarray) -> np.ndarray:
        """What of it is along V: (1/n) sum_i c_i (x_ij^2 - y_ij^2), y_i what is left of x_i beside V; (p - K,)."""
        along = self.block[:, self.split :]
        weighted = along * (coefficients / self.num_examples).astype(np.float32)[:, None]
        found = 2 * (self.rest_t @ weighted) - self.joint @ (along.T @ weighted)
        return row_dots(self.joint, found).astype(np.float64)

    def block_spread(self, covariance: np.ndarray) -> np.ndarray:
        """x_i' V x_i in the block; (n,). Each pair of columns once, V being symmetric; of rows what the cache holds."""
        once = (2 * np.triu(covariance, 1) + np.diag(np.diag(covariance))).astype(np.float32)
        edges = np.linspace(0, len(once), max(1, len(once) // COLUMNS_AT_ONCE) + 1).astype(int)
        found = np.zeros(self.num_examples, np.float32)
        for first in range(0, self.num_examples, ROWS_AT_ONCE):
            rows, out = self.block[first : first + ROWS_AT_ONCE], found[first : first + ROWS_AT_ONCE]
            for begin, end in pairwise(edges):
                out += np.einsum("ij,ij->i", rows[:, :end] @ once[:end, begin:end], rows[:, begin:end])
        return np.maximum(found, 0.0).astype(np.float64)  # rounding may leave a spread of nothing below nothing

    def block_squared_dot(self, weights: np.ndarray) -> np.ndarray:
        """sum_j w_j x_ij^2 in the block; (n,)."""
        return (self.block_squared @ weights.astype(np.float32)).astype(np.float64)

    def rest_squared_dot(self, weights: np.ndarray) -> np.ndarray:
        """sum_j w_j x_ij^2 in the rest; (n,)."""
        return (self.rest_squared @ weights.astype(np.float32)).astype(np.float64)

    def rest_spread(self, variance: np.ndarray) -> np.ndarray:
        """Variance of what independent weights of the rest add to a logit, beside V; (n,)."""
        weighted = variance[:, None].astype(np.float32) * self.joint
        along = self.block[:, self.split :]
        shared = 2 * (self.rest @ weighted) - along @ (self.joint.T @ weighted)
        return np.maximum(self.rest_squared_dot(variance) - row_dots(along, shared), 0.0)

    def block_covariance(self, covariance: np.ndarray) -> np.ndarray:
        """x_i' V x_l of all pairs, in the block; (n, n). For a few examples."""
        return self.block @ covariance.astype(np.float32) @ self.block.T

    def logit_covariance(self, covariance: np.ndarray, variance: np.ndarray) -> np.ndarray:
        """x_i' V x_l of all pairs; (n, n). For a few examples."""
        within = self.block_covariance(covariance)
        rest = self.rest * variance.astype(np.float32)
        along, weighted = self.block[:, self.split :], variance[:, None].astype(np.float32) * self.joint
        shared = (self.rest @ weighted - along @ (self.joint.T @ weighted) / 2) @ along.T
        return (within - shared - shared.T).astype(np.float64) + _dense(rest @ self.rest.T)

    def take(self, chosen: np.ndarray) -> "Rows":
        block, rest, labels, lengths = (part[chosen] for part in (self.block, self.rest, self.labels, self.lengths))
        return Rows(block, rest, self.joint, labels, lengths)


def _dense(matrix: Any) -> np.ndarray:
    return matrix.toarray() if scipy.sparse.issparse(matrix) else matrix


class Examples(NamedTuple):
    """The rows of a linear model as a forecast reads them.

    Args:
      train, test: what it computes with.
      held_out: other examples, at most as many, which measure what a subsample adds; None without one.
      left_out: share of the examples that `train` does not hold.
    """

    train: Rows
    test: Rows | None
    held_out: Rows | None = None
    left_out: float = 0.0

    @classmethod
    def of(cls, problem: LinearModel, num_full: int, size: int) -> "Examples":
        """`size` of the examples, and others beside them; the num_full features of most energy in the block."""
        chosen, others = subsample_of(problem.train, size)
        features = matrix_of(problem.train, chosen)
        energy = scipy.sparse.csr_array(features).power(2).sum(axis=0)
        by_energy = np.argsort(-np.asarray(energy), kind="stable")
        order = by_energy[:num_full]
        train = _split(features, problem.train, chosen, order)
        alone, energies = train.company == 1, train.rest_second_moment(np.ones(len(chosen)))
        if energies[~alone].sum() > JOINT_SHARE * energies.sum():
            # Directions held a part of what these columns do, one of many groups each: company knows all of it.
            joint = joint_directions(train.rest * alone.astype(np.float32))
            train = _split(features, problem.train, chosen, order, joint)
        if train.together > MUCH_TOGETHER:
            are_few = train.rest.shape[1] <= ALL_TAKEN
            order, joint = (by_energy, None) if are_few else (order, faint_directions(train.rest))
            train = _split(features, problem.train, chosen, order, joint)
        test = held_out = None
        if len(others):
            held_out = _split(matrix_of(problem.train, others), problem.train, others, order, train.joint)
        if problem.test is not None:
            seen, _ = subsample_of(problem.test, min(LARGEST_TEST, TEST_SHARE * size))
            test = _split(matrix_of(problem.test, seen), problem.test, seen, order, train.joint)
        return cls(train, test, held_out, 1 - len(chosen) / problem.num_examples)


def why_too_long(problem: Any) -> str | None:
    """None, or one sentence: a row of the `LinearModel` is too long for a forecast."""
    for part in (problem.train, problem.test):
        row = int(np.argmax(part.rows.squared_norms)) if part is not None else 0
        if part is not None and not part.rows.squared_norms[row] <= LONGEST**2:
            values = scipy.sparse.csr_array(matrix_of(part, np.array([row]))).toarray().ravel()
            column = int(np.argmax(abs(values)))
            return (
                f"The forecast knows rows up to a length of {LONGEST:g}, and feature {column + 1} of {problem.name} is "
                f"{values[column]:.3g} in one; scale it down."
            )
    return None


def subsample_of(data: Labelled, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of `size` examples and of as many others, where there are so many: the same ones for everybody.

    By systematic sampling from the examples sorted by label and length, so that both are represented as among all.
    """
    labels, lengths = np.asarray(data.labels), np.asarray(data.rows.squared_norms)
    n = len(labels)
    labels = labels.reshape(n, -1)[:, 0]  # of a set the first
    if size >= n:
        return np.arange(n), np.arange(0)
    # A choice of rows that stays inside the forecast is no randomness that anybody's privacy rests on.
    key = key_for(Purpose.DATA, "moments", root=RandomRoot.from_insecure_seed(0), repeat=0)
    shuffled = np.random.default_rng(key_data(key)).permutation(n)
    order = shuffled[np.lexsort((lengths[shuffled], labels[shuffled]))]
    if 2 * size > n:  # the others are what is left
        places = np.arange(size) * n // size
        return np.sort(order[places]), np.sort(np.delete(order, places))
    places = np.arange(2 * size) * n // (2 * size)
    return np.sort(order[places[::2]]), np.sort(order[places[1::2]])


def matrix_of(data: Labelled, chosen: np.ndarray) -> Any:
    """The features of the chosen rows; (m, p), CSR or dense."""
    if isinstance(data.rows, DenseRows):
        return np.asarray(data.rows.values)[chosen]
    rows = data.rows
    # Narrow places, or SciPy widens them all: products with sparse rows cost what they read.
    starts = rows.starts.astype(rows.indices.dtype) if rows.starts[-1] < 2**31 else rows.starts
    shape = (len(rows.squared_norms), rows.num_features)
    return scipy.sparse.csr_array((rows.values, rows.indices, starts), shape=shape)[chosen]


def _split(
    features: Any, data: Labelled, chosen: np.ndarray, first: np.ndarray, joint: np.ndarray | None = None
) -> Rows:
    """Rows with the features `first` in the block, and the joint directions given, or the rest's own."""
    block, rest, joint = parted(features, first, joint)
    lengths = np.sqrt(np.asarray(data.rows.squared_norms, np.float64)[chosen] + 1)
    return Rows(block, rest, joint, np.asarray(data.labels)[chosen], lengths)
