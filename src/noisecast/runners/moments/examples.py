"""The rows of a linear model as a forecast reads them."""

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from noisecast.privacy.noise import Purpose, RandomRoot, key_data, key_for
from noisecast.problems.linear import Labelled, LinearModel
from noisecast.problems.rows import DenseRows


class Rows(NamedTuple):
    """Labelled rows, split into a dense block [most energetic features, bias] and the rest.

    Args:
      block: (n, K + 1) float32.   rest, rest_squared: (n, p - K), CSR or dense, float32.
      labels: (n,).   lengths: sqrt(|x|^2 + 1); (n,).
    """

    block: np.ndarray
    rest: Any
    rest_squared: Any
    labels: np.ndarray
    lengths: np.ndarray

    @property
    def num_examples(self) -> int:
        return len(self.labels)

    def dot(self, weights: np.ndarray) -> np.ndarray:
        """x_i . w; (n,)."""
        split = self.block.shape[1]
        weights = weights.astype(np.float32)
        return (self.block @ weights[:split] + self.rest @ weights[split:]).astype(np.float64)

    def mean_of(self, coefficients: np.ndarray) -> np.ndarray:
        """(1/n) sum_i c_i x_i; (d,)."""
        c = (coefficients / self.num_examples).astype(np.float32)
        return np.concatenate([self.block.T @ c, self.rest.T @ c]).astype(np.float64)

    def block_second_moment(self, coefficients: np.ndarray) -> np.ndarray:
        """(1/n) sum_i c_i x_i x_i', c >= 0, within the block; (K + 1, K + 1)."""
        half = self.block * np.sqrt(coefficients / self.num_examples).astype(np.float32)[:, None]
        return (half.T @ half).astype(np.float64)

    def rest_second_moment(self, coefficients: np.ndarray) -> np.ndarray:
        """(1/n) sum_i c_i x_ij^2 in the rest; (p - K,)."""
        return (self.rest_squared.T @ (coefficients / self.num_examples).astype(np.float32)).astype(np.float64)

    def logit_variance(self, covariance: np.ndarray, variance: np.ndarray) -> np.ndarray:
        spread = np.einsum("ij,ij->i", self.block @ covariance.astype(np.float32), self.block)
        return (spread + self.rest_squared @ variance.astype(np.float32)).astype(np.float64)

    def take(self, chosen: np.ndarray) -> "Rows":
        return Rows(*(part[chosen] for part in self))


class Examples(NamedTuple):
    """The rows of a logistic model as a forecast reads them.

    Args:
      train, test: what it computes with.
      held_out: as many other examples, which measure what a subsample adds; None without one.
      left_out: share of the examples that `train` does not hold.
    """

    train: Rows
    test: Rows | None
    held_out: Rows | None = None
    left_out: float = 0.0

    @classmethod
    def of(cls, problem: LinearModel, num_full: int, subsample: int | None) -> "Examples":
        features = _matrix(problem.train)
        energy = scipy.sparse.csr_array(features).power(2).sum(axis=0)
        order = np.argsort(-np.asarray(energy), kind="stable")
        train = _split(features, problem.train, order, num_full)
        test = None if problem.test is None else _split(_matrix(problem.test), problem.test, order, num_full)
        if subsample is None or subsample >= train.num_examples:
            return cls(train, test)
        # The same rows for everybody: a choice of rows is no randomness that anybody's privacy rests on.
        key = key_for(Purpose.DATA, "moments", root=RandomRoot.from_insecure_seed(0), repeat=0)
        shuffled = np.random.default_rng(key_data(key)).permutation(train.num_examples)
        chosen, others = np.sort(shuffled[:subsample]), np.sort(shuffled[subsample : 2 * subsample])
        return cls(train.take(chosen), test, train.take(others), 1 - subsample / train.num_examples)


def _matrix(data: Labelled) -> Any:
    if isinstance(data.rows, DenseRows):
        return np.asarray(data.rows.values)
    values, indices = np.asarray(data.rows.values), np.asarray(data.rows.indices)
    there = values != 0
    ends = np.concatenate([[0], np.cumsum(there.sum(axis=1))])
    shape = (len(values), data.rows.num_features)
    return scipy.sparse.csr_array((values[there], indices[there], ends), shape=shape)


def _split(features: Any, data: Labelled, order: np.ndarray, num_full: int) -> Rows:
    block, rest = features[:, order[:num_full]], features[:, order[num_full:]]
    if scipy.sparse.issparse(features):
        block, squared = block.toarray(), rest.power(2)
    else:
        squared = rest**2
    block = np.hstack([block, np.ones((len(block), 1))]).astype(np.float32)
    lengths = np.sqrt(np.asarray(data.rows.squared_norms, np.float64) + 1)
    return Rows(block, rest, squared, np.asarray(data.labels), lengths)
