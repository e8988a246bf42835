"""Feature rows of a data set, dense or sparse: the four products that linear models are made of."""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

Array = jax.Array

ROWS_AT_ONCE = 4096

# Accelerators multiply matrices with numbers cut to 11 bits (TF32) or 8 (bfloat16) unless told otherwise: a clipped
# gradient would come out of `weighted_sum` up to 1e-3 (8e-3) longer than the clip norm that epsilon counts on.
_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@partial(jax.tree_util.register_dataclass, data_fields=["values", "squared_norms"], meta_fields=[])
@dataclass(frozen=True)
class DenseRows:
    """Rows x_i as a matrix.

    Args:
      values: (n, p) float32.
      squared_norms: |x_i|^2, rounded up; (n,).
    """

    values: Array = field(repr=False)
    squared_norms: Array = field(repr=False)

    @property
    def num_features(self) -> int:
        return self.values.shape[1]

    def take(self, indices: Array) -> "DenseRows":
        return DenseRows(self.values[indices], self.squared_norms[indices])

    def dot(self, weights: Array) -> Array:
        """x_i . w: (n, m) from (p, m)."""
        return _product("np,pm->nm", self.values, weights)

    def weighted_sum(self, coefficients: Array) -> Array:
        """sum_i x_i c_i': (p, m) from (n, m)."""
        return _product("np,nm->pm", self.values, coefficients)

    def weighted_sum_of_squares(self, coefficients: Array) -> Array:
        """sum_i x_i^2 c_i': (p, m) from (n, m)."""
        return _product("np,nm->pm", self.values**2, coefficients)


@dataclass(frozen=True)
class SparseRows:
    """Rows x_i with few non-zeros, on the host, one behind the other: row i is at starts[i] up to starts[i + 1].

    As a JAX pytree they are their padded form: that is what compiled programs see, and what `jax.tree.map` gives.

    Args:
      starts: (n + 1,) int64.
      indices: column numbers; (number of non-zeros,) int32.
      values: (number of non-zeros,) float32.
      squared_norms: |x_i|^2, rounded up; (n,) float32.
      num_features: p.
    """

    starts: np.ndarray = field(repr=False)
    indices: np.ndarray = field(repr=False)
    values: np.ndarray = field(repr=False)
    squared_norms: np.ndarray = field(repr=False)
    num_features: int

    @cached_property
    def padded(self) -> "PaddedRows":
        counts = np.diff(self.starts)
        shape = len(counts), int(counts.max(initial=1))
        indices, values = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for first in range(0, len(counts), ROWS_AT_ONCE):  # what is needed in between stays small beside the data
            rows = slice(first, first + ROWS_AT_ONCE)
            there = np.arange(shape[1]) < counts[rows, None]
            part = slice(self.starts[first], self.starts[first] + there.sum())
            indices[rows][there], values[rows][there] = self.indices[part], self.values[part]
        with jax.ensure_compile_time_eval():  # it is kept: no part of the program that happens to ask first
            arrays = [jnp.asarray(array) for array in (indices, values, self.squared_norms)]
        return PaddedRows(arrays[0], arrays[1], arrays[2], self.num_features)

    def __getstate__(self) -> dict[str, Any]:
        """Without `padded`: another process makes it again, if it is asked."""
        return {name: value for name, value in vars(self).items() if name != "padded"}

    def take(self, indices: Array) -> "PaddedRows":
        return self.padded.take(indices)

    def dot(self, weights: Array) -> Array:
        return self.padded.dot(weights)

    def weighted_sum(self, coefficients: Array) -> Array:
        return self.padded.weighted_sum(coefficients)

    def weighted_sum_of_squares(self, coefficients: Array) -> Array:
        return self.padded.weighted_sum_of_squares(coefficients)


@partial(
    jax.tree_util.register_dataclass, data_fields=["indices", "values", "squared_norms"], meta_fields=["num_features"]
)
@dataclass(frozen=True)
class PaddedRows:
    """Sparse rows padded to the longest: a shape that compiled programs can take any of them from.

    Args:
      indices: (n, k) int32; padding points at column 0 with value 0.
      values: (n, k) float32.
      squared_norms: |x_i|^2, rounded up; (n,).
      num_features: p.
    """

    indices: Array = field(repr=False)
    values: Array = field(repr=False)
    squared_norms: Array = field(repr=False)
    num_features: int

    def take(self, indices: Array) -> "PaddedRows":
        return PaddedRows(self.indices[indices], self.values[indices], self.squared_norms[indices], self.num_features)

    def dot(self, weights: Array) -> Array:
        return _product("nk,nkm->nm", self.values, weights[self.indices])

    def weighted_sum(self, coefficients: Array) -> Array:
        return self._scatter(self.values, coefficients)

    def weighted_sum_of_squares(self, coefficients: Array) -> Array:
        return self._scatter(self.values**2, coefficients)

    def _scatter(self, values: Array, coefficients: Array) -> Array:
        zero = jnp.zeros((self.num_features, coefficients.shape[1]), coefficients.dtype)
        return zero.at[self.indices].add(values[:, :, None] * coefficients[:, None, :])


def _as_it_is(_: None, children: tuple[PaddedRows]) -> Any:
    return children[0]


jax.tree_util.register_pytree_node(
    SparseRows, flatten_func=lambda rows: ((rows.padded,), None), unflatten_func=_as_it_is
)


def rows_from(features: np.ndarray | scipy.sparse.csr_array, *, sparse: bool | None = None) -> DenseRows | SparseRows:
    """Features, CSR without duplicates or a matrix, as rows; `sparse` None: CSR that is not as full as a matrix."""
    if sparse is None:
        sparse = scipy.sparse.issparse(features) and _is_worth_it(features)
    if sparse:
        return _sparse_rows(scipy.sparse.csr_array(features))
    matrix = scipy.sparse.csr_array(features).toarray() if scipy.sparse.issparse(features) else features
    values, squared_norms = _finite_rows(np.asarray(matrix, dtype=np.float32))
    return DenseRows(jnp.asarray(values), jnp.asarray(squared_norms))


def _is_worth_it(features: Any) -> bool:
    return 2 * np.diff(features.indptr).max(initial=1) < features.shape[1]


def _sparse_rows(csr: Any) -> SparseRows:
    starts = csr.indptr.astype(np.int64)
    values, squared_norms = np.zeros(starts[-1], np.float32), np.zeros(len(starts) - 1, np.float32)
    for first in range(0, len(squared_norms), ROWS_AT_ONCE):
        rows = slice(first, min(first + ROWS_AT_ONCE, len(squared_norms)))
        part = slice(starts[rows.start], starts[rows.stop])
        counts = np.diff(starts[rows.start : rows.stop + 1])
        values[part], squared_norms[rows] = _finite_entries(csr.data[part].astype(np.float32), counts)
    return SparseRows(starts, csr.indices[: starts[-1]].astype(np.int32), values, squared_norms, csr.shape[1])


def _finite_entries(values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`_finite_rows` of rows one behind the other, with so many entries each."""
    row = np.repeat(np.arange(len(counts)), counts)
    squared_norms = np.bincount(row, np.square(values, dtype=np.float64), minlength=len(counts))
    finite = np.isfinite(squared_norms)
    return np.where(finite[row], values, np.float32(0.0)), _float32_above(np.where(finite, squared_norms, np.inf))


def _finite_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and their squared norms. A row that is not finite becomes zeros of infinite norm: clipping takes it out."""
    finite = np.all(np.isfinite(values), axis=1)
    values = np.where(finite[:, None], values, np.float32(0.0))
    return values, _float32_above(np.where(finite, np.square(values, dtype=np.float64).sum(axis=1), np.inf))


def _float32_above(squared_norms: np.ndarray) -> np.ndarray:
    """Towards +inf: a norm that is a rounding error too small would let a clipped gradient exceed the clip norm."""
    with np.errstate(over="ignore"):  # too large for float32 is infinite, and clipped as such
        single = squared_norms.astype(np.float32)
    return np.nextafter(single, np.float32(np.inf))
