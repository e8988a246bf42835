"""Feature rows of a data set on the device, dense or sparse: the four products that linear models are made of."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

Array = jax.Array

ROWS_AT_ONCE = 4096


@partial(jax.tree_util.register_dataclass, data_fields=["values", "squared_norms"], meta_fields=[])
@dataclass(frozen=True)
class DenseRows:
    """Rows x_i as a matrix.

    Args:
      values: (n, p) float32.
      squared_norms: |x_i|^2, rounded up; (n,).
    """

    values: Array
    squared_norms: Array

    @property
    def num_features(self) -> int:
        return self.values.shape[1]

    def take(self, indices: Array) -> "DenseRows":
        return DenseRows(self.values[indices], self.squared_norms[indices])

    def dot(self, weights: Array) -> Array:
        """x_i . w: (n, m) from (p, m)."""
        return self.values @ weights

    def weighted_sum(self, coefficients: Array) -> Array:
        """sum_i x_i c_i': (p, m) from (n, m)."""
        return self.values.T @ coefficients

    def weighted_sum_of_squares(self, coefficients: Array) -> Array:
        """sum_i x_i^2 c_i': (p, m) from (n, m)."""
        return (self.values**2).T @ coefficients


@partial(
    jax.tree_util.register_dataclass, data_fields=["indices", "values", "squared_norms"], meta_fields=["num_features"]
)
@dataclass(frozen=True)
class SparseRows:
    """Rows x_i with few non-zeros, padded to the longest: column numbers and values.

    Args:
      indices: (n, k) int32; padding points at column 0 with value 0.
      values: (n, k) float32.
      squared_norms: |x_i|^2, rounded up; (n,).
      num_features: p.
    """

    indices: Array
    values: Array
    squared_norms: Array
    num_features: int

    def take(self, indices: Array) -> "SparseRows":
        return SparseRows(self.indices[indices], self.values[indices], self.squared_norms[indices], self.num_features)

    def dot(self, weights: Array) -> Array:
        return jnp.einsum("nk,nkm->nm", self.values, weights[self.indices])

    def weighted_sum(self, coefficients: Array) -> Array:
        return self._scatter(self.values, coefficients)

    def weighted_sum_of_squares(self, coefficients: Array) -> Array:
        return self._scatter(self.values**2, coefficients)

    def _scatter(self, values: Array, coefficients: Array) -> Array:
        zero = jnp.zeros((self.num_features, coefficients.shape[1]), coefficients.dtype)
        return zero.at[self.indices].add(values[:, :, None] * coefficients[:, None, :])


def rows_from(features: np.ndarray | scipy.sparse.csr_array) -> DenseRows | SparseRows:
    """Put features on the device: CSR stays sparse unless it is as full as a matrix."""
    if scipy.sparse.issparse(features):
        csr: Any = scipy.sparse.csr_array(features)
        longest = int(np.diff(csr.indptr).max(initial=1))
        if 2 * longest < csr.shape[1]:
            return _sparse_rows(csr, longest)
        features = csr.toarray()
    values, squared_norms = _finite_rows(np.asarray(features, dtype=np.float32))
    return DenseRows(jnp.asarray(values), jnp.asarray(squared_norms))


def _sparse_rows(csr: Any, longest: int) -> SparseRows:
    count = csr.shape[0]
    indices, values = np.zeros((count, longest), np.int32), np.zeros((count, longest), np.float32)
    squared_norms = np.zeros(count, np.float32)
    for first in range(0, count, ROWS_AT_ONCE):  # what is needed in between stays small beside the data
        part = slice(first, min(first + ROWS_AT_ONCE, count))
        begin, end = csr.indptr[first], csr.indptr[part.stop]
        counts = np.diff(csr.indptr[first : part.stop + 1])
        row = first + np.repeat(np.arange(len(counts)), counts)
        slot = np.arange(begin, end) - np.repeat(csr.indptr[part], counts)
        indices[row, slot], values[row, slot] = csr.indices[begin:end], csr.data[begin:end]
        values[part], squared_norms[part] = _finite_rows(values[part])
    return SparseRows(jnp.asarray(indices), jnp.asarray(values), jnp.asarray(squared_norms), csr.shape[1])


def _finite_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and their squared norms. A row that is not finite becomes zeros of infinite norm: clipping takes it out."""
    finite = np.all(np.isfinite(values), axis=1)
    values = np.where(finite[:, None], values, np.float32(0.0))
    squared_norms = np.where(finite, np.square(values, dtype=np.float64).sum(axis=1), np.inf)
    with np.errstate(over="ignore"):  # too large for float32 is infinite, and clipped as such
        single = squared_norms.astype(np.float32)
    # Towards +inf: a norm that is a rounding error too small would let a clipped gradient exceed the clip norm.
    return values, np.nextafter(single, np.float32(np.inf))
