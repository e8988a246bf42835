"""Columns in which few examples make a batch: a sign feels the shape of their law there, and not all of them alike."""

from typing import Any, Protocol

import numpy as np
import scipy.sparse

from noisecast.theory.closures import GradientLaw, sign_response
from noisecast.theory.sign_of_batch import Entries, batch_variance, is_exact, sign_of_batch

HEAVY = 0.1  # excess kurtosis of a private gradient: a Gaussian of its variance has a gain 1 % too small
MOST_ENTRIES = 400_000  # x_ij that are not 0, in what is looked at of all outputs: they cost time
ROUNDS = 3  # of the fit of k_ij by k_j a_i


class SplitRows(Protocol):
    """Rows x_i in two parts, a dense block and the rest, and the squares of the latter; `Rows`, `OutputRows`."""

    block: np.ndarray
    rest: Any
    rest_squared: Any
    rest_squared_t: Any

    @property
    def num_examples(self) -> int: ...

    @property
    def split(self) -> int: ...


class _Squares:
    """x_ij^2 of such rows, and means and sums weighted by them."""

    def __init__(self, rows: SplitRows):
        self.num_examples = rows.num_examples
        self.near, self.far, self.far_t = rows.block[:, : rows.split] ** 2, rows.rest_squared, rows.rest_squared_t

    def mean(self, coefficients: np.ndarray) -> np.ndarray:
        """(1/n) sum_i c_i x_ij^2; (d,)."""
        c = (coefficients / self.num_examples).astype(np.float32)
        return np.concatenate([self.near.T @ c, self.far_t @ c]).astype(np.float64)

    def mean_of_squares(self, coefficients: np.ndarray) -> np.ndarray:
        """(1/n) sum_i c_i x_ij^4; (d,)."""
        c, far = coefficients / self.num_examples, self.far.astype(np.float64)
        far = far.power(2) if scipy.sparse.issparse(far) else far**2
        return np.concatenate([(self.near.astype(np.float64) ** 2).T @ c, far.T @ c])

    def dot(self, weights: np.ndarray) -> np.ndarray:
        """sum_j w_j x_ij^2; (n,)."""
        near, far = np.split(weights.astype(np.float32), [self.near.shape[1]])
        return (self.near @ near + self.far @ far).astype(np.float64)


class BatchShape:
    """The columns whose private gradients are not Gaussian at the start, for one output, and how signs see them.

    Args:
      rows: what the forecast computes with.   heavy: whether a column is such a one; (d,).   rate: at which an example
        is drawn, and those for which it stands.   probability: q, with which each of these is, at most once.
      batch_size: B, by which sums are divided.   exactly: how many all batches hold; None where that is chance.
    """

    def __init__(
        self, rows: SplitRows, heavy: np.ndarray, *, rate: float, probability: float, batch_size: float,
        exactly: int | None,
    ):  # fmt: skip
        self.squares, self.heavy, self.batch_size = _Squares(rows), heavy, batch_size
        self.draws: Any = {"rate": rate, "probability": probability, "exactly": exactly}
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
        probability: float,
        batch_size: float,
        exactly: int | None,
        privacy_variance: float,
        num_outputs: int = 1,
    ) -> "BatchShape | None":
        """None where all columns are near enough to Gaussians; where too many are not, those that are least.

        Args:
          residual: |r_i| at the start; (n,).   privacy_variance: of every coordinate.
        """
        squared = (residual / batch_size) ** 2
        draws, squares = rate * rows.num_examples, _Squares(rows)  # as a Poisson law has them
        second, fourth = draws * squares.mean(squared), draws * squares.mean_of_squares(squared**2)
        excess = fourth / np.maximum((second + privacy_variance) ** 2, 1e-300)
        order = np.argsort(-excess, kind="stable")
        order = order[excess[order] > HEAVY]
        sizes = np.concatenate([np.count_nonzero(rows.block[:, : rows.split], axis=0), _entries(rows.rest)])[order]
        affordable = sizes <= MOST_ENTRIES // num_outputs
        order, sizes = order[affordable], sizes[affordable]
        chosen = order[np.cumsum(sizes) <= MOST_ENTRIES // num_outputs]
        heavy = np.isin(np.arange(len(excess)), chosen)
        drawn: Any = {"rate": rate, "probability": probability, "batch_size": batch_size, "exactly": exactly}
        return cls(rows, heavy, **drawn) if heavy.any() else None

    @property
    def own_reach(self) -> float:
        """Mean of sum_j |x_ij|/B over these columns, where batches are of exactly few: by signs that an example decides
        it moves its own output so far, in learning rates.
        """
        exactly = self.draws["exactly"]
        return float(abs(self.entries.values).sum()) / self.squares.num_examples if is_exact(exactly) else 0.0

    def seen_by_sign(
        self, law: GradientLaw, mean: np.ndarray, square: np.ndarray, slope: np.ndarray
    ) -> tuple[GradientLaw, np.ndarray]:
        """The law with E sign and gains k_j, and a_i, the share of its gain with which example i is felt; (n,).

        Args:
          law: (d,), of moments alone.   mean, square: E r_i, E r_i^2; (n,).   slope: E r_i', up to a factor; (n,).
        """
        entries, heavy = self.entries, self.heavy
        of_batch = batch_variance(entries, mean, square, **self.draws)
        gaussian = law.signal_variance[heavy] + law.noise_variance[heavy] - of_batch
        floor = (law.signal_variance[heavy] + law.privacy_variance) / 2
        std = np.sqrt(np.maximum(square - mean**2, 0.0))
        if not np.isfinite(gaussian).all():  # a run that leaves every bound
            return law, np.ones(len(mean))
        signs = sign_of_batch(entries, mean, std, noise_variance=np.maximum(gaussian, floor), **self.draws)
        expected, gain = (part.copy() for part in sign_response(law))
        expected[heavy], gain[heavy] = np.clip(signs.expected, -1.0, 1.0), signs.gain
        gain, felt = self._fitted(gain, signs.gain_if_drawn, slope)
        return law._replace(sign=np.stack([expected, gain])), felt

    def _fitted(self, gain: np.ndarray, if_drawn: np.ndarray, slope: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """k_ij, with which coordinate j feels example i, as k_j a_i.

        Such that what each coordinate feels, sum_i k_ij r_i' x_ij^2, is right, and of each example sum_j k_ij x_ij^2.
        The curvature that all feel together is then that of examples of slope a_i r_i', under gains k_j.
        """
        squares, heavy, entries = self.squares, self.heavy, self.entries
        weighted = if_drawn * (self.batch_size * entries.values) ** 2
        by_example = squares.dot(np.where(heavy, 0.0, gain))
        by_example += np.bincount(entries.examples, weighted, squares.num_examples)
        by_coordinate = gain * squares.mean(slope)
        of_heavy = np.add.reduceat(weighted * slope[entries.examples], entries.starts[:-1])
        by_coordinate[heavy] = of_heavy / squares.num_examples
        felt = np.ones(squares.num_examples)
        for _ in range(ROUNDS):
            unfelt = squares.mean(felt * slope)
            gain = np.where(unfelt > 0, by_coordinate / np.where(unfelt > 0, unfelt, 1.0), gain)
            reached = squares.dot(gain)
            felt = np.where(reached > 0, by_example / np.where(reached > 0, reached, 1.0), 1.0)
        return gain, felt


def _entries(matrix: Any) -> np.ndarray:
    """Not 0, of every column; of a CSR matrix or a dense one."""
    if scipy.sparse.issparse(matrix):
        return np.bincount(matrix.indices, minlength=matrix.shape[1])
    return np.count_nonzero(matrix, axis=0)
