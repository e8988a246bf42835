"""The rows of a linear model with several outputs as a forecast reads them."""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from noisecast.problems.linear import MULTI_LABEL, MULTI_LABEL_MEAN, SOFTMAX, Labelled, Likelihood, LinearModel
from noisecast.runners.moments.examples import matrix_of, subsample_of
from noisecast.runners.moments.parted_rows import PartedRows, parted
from noisecast.theory.softmax_moments import INDEPENDENT_OUTPUTS, MEAN_OF_OUTPUTS, SOFTMAX_OUTPUTS, Nodes, OutputLaw

LAWS: tuple[tuple[Likelihood, OutputLaw], ...] = (
    (SOFTMAX, SOFTMAX_OUTPUTS),
    (MULTI_LABEL, INDEPENDENT_OUTPUTS),
    (MULTI_LABEL_MEAN, MEAN_OF_OUTPUTS),
)
MOST_IN_PAIRS = 1000  # examples that say how far columns move together
ROUNDING = 1e-5  # of a sum in single precision: a smaller difference of two such is none
ROWS_AT_ONCE = 4_096  # whose products of directions are held at once
MOST_LOGITS = 2_500_000  # examples times outputs; more examples are left out
MOST_BLOCK_WEIGHTS = 500  # weights with covariances: that many, divided by the outputs, are the features in the block
# Unless all fit: then none is left to variances, which know nothing of columns that move together, as pixels do.
MOST_WEIGHTS_OF_ALL, MOST_PRODUCTS = 3000, 1_500_000_000  # examples times outputs times features^2, at every time step


class OutputRows(PartedRows):
    """Rows with targets of m outputs.   targets: (n, m), 0 or 1; the rest is of `PartedRows`."""

    def __init__(self, block: np.ndarray, rest: Any, joint: np.ndarray, targets: np.ndarray, lengths: np.ndarray):
        super().__init__(block, rest, joint, lengths)
        self.targets = targets
        self.rest_t, self.rest_squared_t = (_transposed(part) for part in (rest, self.rest_squared))
        self.nodes = Nodes(*targets.shape)
        self.labels = targets.argmax(axis=1)
        ones = np.ones(rest.shape[1], np.float32)
        norms = np.maximum(self.rest_squared @ ones, 1e-12).astype(np.float64)
        # Share of |x|^4 that different features make: what the variances of single weights do not see.
        self.across = (1 - ((self.rest_squared * self.rest_squared) @ ones) / norms**2).astype(np.float32)

    @cached_property
    def together(self) -> float:
        """1 - sum_j M_jj^2/|M|^2 of the rest beside V, M = E y y': 0 where its columns are uncorrelated, 1 where they
        are one.

        |M|^2 = E (y'z)^2 over pairs of different examples.
        """
        few = self.take(np.arange(0, self.num_examples, -(-self.num_examples // MOST_IN_PAIRS)))
        products, along = few.rest @ few.rest.T, few.block[:, few.split :]
        products = np.asarray(products.toarray() if scipy.sparse.issparse(products) else products, np.float64)
        products -= along @ along.T
        n = len(products)
        whole = (float((products**2).sum()) - float((np.diag(products) ** 2).sum())) / max(n * (n - 1), 1)
        beside = few.rest_second_moment(np.ones((n, 1))) - few.rest_moment_along(np.ones((n, 1)))
        apart = float((beside**2).sum())
        return max(0.0, 1 - apart / whole) if whole > 0 else 0.0

    def block_second_moment(self, coefficients: np.ndarray) -> np.ndarray:
        """(1/n) sum_i c_ia x_i x_i' within the block for every output a, c >= 0; (m, K + 1, K + 1)."""
        roots = np.sqrt(coefficients / self.num_examples).astype(np.float32)
        found = np.empty((roots.shape[1], self.block.shape[1], self.block.shape[1]))
        for a, root in enumerate(roots.T):
            half = self.block * root[:, None]
            found[a] = half.T @ half
        return found

    def rest_moment_along(self, coefficients: np.ndarray) -> np.ndarray:
        """What of it is along V: (1/n) sum_i c_ia (x_ij^2 - y_ij^2), y_i what is left of x_i beside V; (p - K, m)."""
        c = (coefficients / self.num_examples).astype(np.float32)
        if not self.joint.shape[1]:
            return np.zeros((self.rest.shape[1], c.shape[1]))
        squares = _squared_products(self.joint, self.block[:, self.split :], c)
        return (self.crossed_t @ c - squares).astype(np.float64)

    @cached_property
    def crossed(self) -> Any:
        """2 x_ij sum_k V_jk r_ik, of which y_ij^2 = x_ij^2 - that + (sum_k V_jk r_ik)^2; as the rest."""
        along = self.block[:, self.split :]
        if not scipy.sparse.issparse(self.rest):
            return 2 * self.rest * (along @ self.joint.T)
        rows = np.repeat(np.arange(self.num_examples), np.diff(self.rest.indptr))
        shadow = np.zeros(len(rows), np.float32)
        for of_rows, of_columns in zip(along.T, self.joint.T, strict=True):
            shadow += of_rows[rows] * of_columns[self.rest.indices]
        return scipy.sparse.csr_array(
            (2 * self.rest.data * shadow, self.rest.indices, self.rest.indptr), self.rest.shape
        )

    @cached_property
    def crossed_t(self) -> Any:
        return _transposed(self.crossed)

    def block_variance(self, covariance: np.ndarray) -> np.ndarray:
        """x_i' V_a x_i in the block; (n, m)."""
        found = np.empty((self.num_examples, len(covariance)), np.float32)
        for a, spread in enumerate(covariance.astype(np.float32)):
            np.einsum("ij,ij->i", self.block @ spread, self.block, out=found[:, a])
        return np.maximum(found, 0, out=found)

    def rest_variance(self, variance: np.ndarray) -> np.ndarray:
        """Variance of what independent weights of the rest add to a logit, beside V; (n, m) from (p - K, m)."""
        of_rest = variance.astype(np.float32)
        whole = self.rest_squared @ of_rest
        if not self.joint.shape[1]:
            return whole
        found = whole - self.crossed @ of_rest + _squared_products(self.block[:, self.split :], self.joint, of_rest)
        return np.where(found > ROUNDING * whole, found, 0)

    def take(self, chosen: np.ndarray) -> "OutputRows":
        block, rest, targets, lengths = (part[chosen] for part in (self.block, self.rest, self.targets, self.lengths))
        return OutputRows(block, rest, self.joint, targets, lengths)


class OutputExamples(NamedTuple):
    """What a forecast computes with.

    Args:
      train, test: rows.   law: of the outputs.
      num_all, num_tests: of the training and of the test examples, those left out included.
      held_out: other examples, at most as many, which measure what a subsample adds; None without one.
    """

    train: OutputRows
    test: OutputRows | None
    law: OutputLaw
    num_all: int
    num_tests: int = 0
    held_out: OutputRows | None = None

    @classmethod
    def of(cls, problem: LinearModel, num_full: int, subsample: int | None) -> "OutputExamples":
        law = next(law for likelihood, law in LAWS if likelihood is problem.likelihood)
        m, n = problem.num_outputs, problem.num_examples
        chosen, others = subsample_of(problem.train, min(subsample or n, max(MOST_LOGITS // m, 2)))
        features = matrix_of(problem.train, chosen)
        energy = scipy.sparse.csr_array(features).power(2).sum(axis=0)
        order = np.argsort(-np.asarray(energy), kind="stable")
        first = order[: _num_in_block(num_full, len(chosen), m, problem.num_features)]
        train = _split(features, problem.train, chosen, first, None, m)

        def rows(data: Labelled, at: np.ndarray) -> OutputRows:
            return _split(matrix_of(data, at), data, at, first, train.joint, m)

        test = None if problem.test is None else rows(problem.test, subsample_of(problem.test, len(chosen))[0])
        held_out = rows(problem.train, others) if len(others) else None
        num_tests = 0 if problem.test is None else len(problem.test.labels)
        return cls(train, test, law, n, num_tests, held_out)


def _num_in_block(asked: int, num_examples: int, num_outputs: int, num_features: int) -> int:
    weights = num_outputs * num_features
    if weights <= MOST_WEIGHTS_OF_ALL and num_examples * weights * num_features <= MOST_PRODUCTS:
        return num_features
    return min(asked, MOST_BLOCK_WEIGHTS // num_outputs, num_features)


def _split(
    features: Any, data: Labelled, at: np.ndarray, first: np.ndarray, joint: np.ndarray | None, num_outputs: int
) -> OutputRows:
    block, rest, joint = parted(features, first, joint)
    labels = np.asarray(data.labels)[at].reshape(len(at), -1)
    targets = np.zeros((len(at), num_outputs + 1), np.float32)  # padding, -1, falls into the last column
    np.put_along_axis(targets, labels, 1.0, axis=1)
    lengths = np.sqrt(np.asarray(data.rows.squared_norms, np.float64)[at] + 1)
    return OutputRows(block, rest, joint, targets[:, :-1], lengths)


def _squared_products(one: np.ndarray, other: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """sum_j c_ja (one_i . other_j)^2; (n, m) from (n, r), (p, r) and (p, m).

    By the r (r + 1)/2 products of two components that each has: of all outputs at once.
    """
    first, second = np.triu_indices(one.shape[1])

    def products(of: np.ndarray) -> np.ndarray:
        return of[:, first] * of[:, second]

    moments = np.zeros((len(first), coefficients.shape[1]), np.float32)
    for begin in range(0, len(other), ROWS_AT_ONCE):
        chosen = slice(begin, begin + ROWS_AT_ONCE)
        moments += products(other[chosen]).T @ coefficients[chosen]
    moments *= np.where(first == second, 1, 2)[:, None].astype(np.float32)
    parts = [one[begin : begin + ROWS_AT_ONCE] for begin in range(0, len(one), ROWS_AT_ONCE)]
    return np.concatenate([products(part) @ moments for part in parts])


def _transposed(matrix: Any) -> Any:
    return scipy.sparse.csr_array(matrix.T) if scipy.sparse.issparse(matrix) else matrix.T
