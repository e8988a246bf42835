"""Columns in which few examples make a batch: a sign feels the shape of their law there, and not all of them alike."""

from typing import Any, Protocol

import numpy as np
import scipy.sparse

from noisecast.theory.closures import GradientLaw, sign_response
from noisecast.theory.sign_of_batch import Entries, sign_of_batch

HEAVY = 0.1  # excess kurtosis of a private gradient: a Gaussian of its variance has a gain 1 % too small
MOST_ENTRIES = 400_000  # x_ij that are not 0, in what is looked at of all outputs: they cost time
ROUNDS = 3  # of the fit of k_ij by k_j a_i


class SplitRows(Protocol):
    """Rows x_i in two parts, a dense block and the rest; `Rows`, `OutputRows`."""

    block: np.ndarray
    rest: Any

    @property
    def num_examples(self) -> int: ...

    @property
    def split(self) -> int: ...

    def second_moment(self, coefficients: np.ndarray) -> np.ndarray: ...

    def fourth_moment(self, coefficients: np.ndarray) -> np.ndarray: ...

    def squared_dot(self, weights: np.ndarray) -> np.ndarray: ...


class BatchShape:
    """The columns whose private gradients are not Gaussian at the start, for one output, and how signs see them.

    Args:
      rows: what the forecast computes with.   heavy: whether a column is such a one; (d,).   rate: at which an example
        is drawn.   batch_size: B, by which sums are divided.
    """

    def __init__(self, rows: SplitRows, heavy: np.ndarray, *, rate: float, batch_size: float):
        self.rows, self.heavy, self.rate, self.batch_size = rows, heavy, rate, batch_size
        near, far = np.flatnonzero(heavy[: rows.split]), np.flatnonzero(heavy[rows.split :])
        parts = [scipy.sparse.csc_array(rows.block[:, near]), scipy.sparse.csc_array(rows.rest[:, far])]
        columns = scipy.sparse.csc_array(scipy.sparse.hstack(parts))
        columns.eliminate_zeros()
        self.entries = Entries(columns.indptr, columns.indices, columns.data.astype(np.float64) / batch_size)

    @classmethod
    def of(
        cls,
        rows: SplitRows,
        residual: np.ndarray,
        *,
        rate: float,
        batch_size: float,
        privacy_variance: float,
        num_outputs: int = 1,
    ) -> "BatchShape | None":
        """None where all columns are near enough to Gaussians; where too many are not, those that are least.

        Args:
          residual: |r_i| at the start; (n,).   privacy_variance: of every coordinate.
        """
        squared = (residual / batch_size) ** 2
        draws = rate * rows.num_examples
        second, fourth = draws * rows.second_moment(squared), draws * rows.fourth_moment(squared**2)
        excess = fourth / np.maximum((second + privacy_variance) ** 2, 1e-300)
        order = np.argsort(-excess, kind="stable")
        order = order[excess[order] > HEAVY]
        sizes = np.concatenate([np.count_nonzero(rows.block[:, : rows.split], axis=0), _entries(rows.rest)])[order]
        affordable = sizes <= MOST_ENTRIES // num_outputs
        order, sizes = order[affordable], sizes[affordable]
        chosen = order[np.cumsum(sizes) <= MOST_ENTRIES // num_outputs]
        heavy = np.isin(np.arange(len(excess)), chosen)
        return cls(rows, heavy, rate=rate, batch_size=batch_size) if heavy.any() else None

    def seen_by_sign(
        self, law: GradientLaw, mean: np.ndarray, square: np.ndarray, slope: np.ndarray
    ) -> tuple[GradientLaw, np.ndarray]:
        """The law with E sign and gains k_j, and a_i, the share of its gain with which example i is felt; (n,).

        Args:
          law: (d,), of moments alone.   mean, square: E r_i, E r_i^2; (n,).   slope: E r_i', up to a factor; (n,).
        """
        entries, heavy = self.entries, self.heavy
        poisson = self.rate * np.add.reduceat(entries.values**2 * square[entries.examples], entries.starts[:-1])
        gaussian = law.signal_variance[heavy] + law.noise_variance[heavy] - poisson
        floor = (law.signal_variance[heavy] + law.privacy_variance) / 2
        std = np.sqrt(np.maximum(square - mean**2, 0.0))
        signs = sign_of_batch(entries, mean, std, rate=self.rate, noise_variance=np.maximum(gaussian, floor))
        expected, gain = (part.copy() for part in sign_response(law))
        expected[heavy], gain[heavy] = np.clip(signs.expected, -1.0, 1.0), signs.gain
        gain, felt = self._fitted(gain, signs.gain_if_drawn, slope)
        return law._replace(sign=np.stack([expected, gain])), felt

    def _fitted(self, gain: np.ndarray, if_drawn: np.ndarray, slope: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """k_ij, with which coordinate j feels example i, as k_j a_i.

        Such that what each coordinate feels, sum_i k_ij r_i' x_ij^2, is right, and of each example sum_j k_ij x_ij^2.
        The curvature that all feel together is then that of examples of slope a_i r_i', under gains k_j.
        """
        rows, heavy, entries = self.rows, self.heavy, self.entries
        weighted = if_drawn * (self.batch_size * entries.values) ** 2
        by_example = rows.squared_dot(np.where(heavy, 0.0, gain))
        by_example += np.bincount(entries.examples, weighted, rows.num_examples)
        by_coordinate = gain * rows.second_moment(slope)
        of_heavy = np.add.reduceat(weighted * slope[entries.examples], entries.starts[:-1])
        by_coordinate[heavy] = of_heavy / rows.num_examples
        felt = np.ones(rows.num_examples)
        for _ in range(ROUNDS):
            unfelt = rows.second_moment(felt * slope)
            gain = np.where(unfelt > 0, by_coordinate / np.where(unfelt > 0, unfelt, 1.0), gain)
            reached = rows.squared_dot(gain)
            felt = np.where(reached > 0, by_example / np.where(reached > 0, reached, 1.0), 1.0)
        return gain, felt


def _entries(matrix: Any) -> np.ndarray:
    """Not 0, of every column; of a CSR matrix or a dense one."""
    if scipy.sparse.issparse(matrix):
        return np.bincount(matrix.indices, minlength=matrix.shape[1])
    return np.count_nonzero(matrix, axis=0)
