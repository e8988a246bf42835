"""Encoders: frozen recipes that turn a table, texts or a matrix into features, alike for train, test and predict.

Each example is encoded by itself, given the encoder, so an encoder built from public facts (a public vocabulary, public
bounds) costs no privacy. An encoder fitted on private rows (a vocabulary of private text) is itself private: nothing
here adds noise to it, and `vocabulary_is_private` says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import scipy.sparse as sp

from noisecast.problems.datasets.columns import numeric_column
from noisecast.problems.datasets.dataset import DataError, Features, as_float32, first_repeated, listed
from noisecast.problems.datasets.encoder import MOST_UNKNOWN, BaseEncoder, unit_norm_rows
from noisecast.problems.datasets.public_columns import ANY_OTHER, category_places, check_bounds, check_values
from noisecast.problems.datasets.text_encoder import TextEncoder


@dataclass(frozen=True)
class TabularEncoder(BaseEncoder):
    """Columns as features. With bounds each number is clamped to [lower, upper] and scaled to [-1, 1].

    x_j = 2 (clamp(v_j, lower_j, upper_j) - lower_j) / (upper_j - lower_j) - 1

    A column of categories becomes one feature for each of its values, 1 in rows that have it and 0 in others.

    Bounds and values must be *public*: known without looking at the data (an age lies in 0 .. 120). The minimum and
    maximum of a private column, and which categories are in it, are private, so they are never computed here. Without
    bounds numbers are used as they are.

    Args:
      columns: the columns of numbers, in this order.
      lower, upper: one bound a column of numbers, lower < upper, finite; or None for both.
      unit_rows: divide each row by its own L2 norm. Per example, so it costs no privacy.
      categories: (column, its values) of each column of categories, features behind those of numbers. A cell that is
        no value is refused, unless "*" is among them, which stands for all others.

    >>> TabularEncoder(("age",), (0.0,), (100.0,)).encode(pd.DataFrame({"age": [25, 300]}))
    array([[-0.5],
           [ 1. ]], dtype=float32)
    >>> encoder = TabularEncoder((), categories=(("city", ("Oslo", "Rome", "*")),))
    >>> encoder.encode(pd.DataFrame({"city": ["Rome", "Bonn"]})).toarray()
    array([[0., 1., 0.],
           [0., 0., 1.]], dtype=float32)
    """

    columns: tuple[str, ...]
    lower: tuple[float, ...] | None = None
    upper: tuple[float, ...] | None = None
    unit_rows: bool = False
    categories: tuple[tuple[str, tuple[str, ...]], ...] = ()

    name = "tabular"
    takes = "a table with columns"

    def __post_init__(self):
        object.__setattr__(self, "columns", tuple(self.columns))
        named = tuple((column, check_values(column, values)) for column, values in self.categories)
        object.__setattr__(self, "categories", named)
        if not self.all_columns:
            raise DataError("Expected one column or more beside the label, got none.")
        if repeated := first_repeated(self.all_columns):
            raise DataError(f"Expected every column once, got '{repeated}' twice.")
        if (self.lower is None) != (self.upper is None):
            raise DataError("Expected lower and upper bounds together, got one of them.")
        if self.lower is None or self.upper is None:
            return
        if not len(self.lower) == len(self.upper) == len(self.columns):
            raise DataError(
                f"Expected one bound a column, got {len(self.lower)} lower and {len(self.upper)} upper bounds for "
                f"{len(self.columns)} columns."
            )
        pairs = [check_bounds(*each) for each in zip(self.columns, self.lower, self.upper)]
        object.__setattr__(self, "lower", tuple(low for low, _ in pairs))
        object.__setattr__(self, "upper", tuple(high for _, high in pairs))

    @classmethod
    def fit(
        cls,
        columns: Sequence[str],
        *,
        bounds: Mapping[str, Sequence[float]] | None = None,
        values: Mapping[str, Sequence[str]] | None = None,
        unit_rows: bool = False,
    ) -> "TabularEncoder":
        """The encoder of these columns, with what is given for them (more of it than columns is welcome).

        >>> TabularEncoder.fit(["b"], bounds={"a": [0, 1], "b": [-1, 1]}).upper
        (1.0,)
        """
        values = values or {}
        categories = tuple((column, tuple(values[column])) for column in columns if column in values)
        numbers = tuple(column for column in columns if column not in values)
        if bounds is None:
            return cls(numbers, unit_rows=unit_rows, categories=categories)
        if without := [column for column in numbers if column not in bounds]:
            raise DataError(
                f"Expected bounds or values for every column used, got none for {listed(without)}; add them."
            )
        lower, upper = zip(*(bounds[column] for column in numbers)) if numbers else ((), ())
        return cls(numbers, lower, upper, unit_rows, categories)

    @property
    def all_columns(self) -> tuple[str, ...]:
        return (*self.columns, *(column for column, _ in self.categories))

    @property
    def num_features(self) -> int:
        return len(self.columns) + sum(len(values) for _, values in self.categories)

    def encode(self, frame, source: str = "the table") -> Features:
        """The table's columns as (n, num_features) float32, CSR if there are categories; other columns are ignored."""
        if not isinstance(frame, pd.DataFrame):
            raise self.refusal(source)
        features: Any = self._numbers(frame, source)
        if self.categories:
            parts = [sp.csr_array(features)] if self.columns else []
            parts += [_one_hot(frame, column, values, source) for column, values in self.categories]
            features = sp.csr_array(sp.hstack(parts, format="csr", dtype=np.float32))
        return unit_norm_rows(features) if self.unit_rows else features

    def doubts(self, features: Features) -> tuple[str, ...]:
        """One for each column of which more than half of the rows have no listed value.

        >>> encoder = TabularEncoder((), categories=(("city", ("oslo", "*")),))
        >>> encoder.doubts(encoder.encode(pd.DataFrame({"city": ["Oslo", "Rome"]})))
        ("2 of 2 rows have none of the values listed for column 'city', and count as '*': are they spelt as here?",)
        """
        sentences, begin, num_rows = [], len(self.columns), features.shape[0]
        for column, values in self.categories:
            if ANY_OTHER in values:
                place = begin + values.index(ANY_OTHER)
                others = sp.csr_array(features[:, [place]]).count_nonzero()
                if others > MOST_UNKNOWN * num_rows:
                    sentences.append(
                        f"{others:,} of {num_rows:,} rows have none of the values listed for column '{column}', and "
                        f"count as '{ANY_OTHER}': are they spelt as here?"
                    )
            begin += len(values)
        return tuple(sentences)

    def _numbers(self, frame: pd.DataFrame, source: str) -> np.ndarray:
        matrix = np.empty((len(frame), len(self.columns)), np.float32)
        with np.errstate(over="ignore"):  # reported below, with its row
            for j, column in enumerate(self.columns):
                values = numeric_column(frame, column, source)
                if self.lower is not None and self.upper is not None:
                    low, high = self.lower[j], self.upper[j]
                    values = 2 * (np.clip(values, low, high) - low) / (high - low) - 1
                matrix[:, j] = values
        return np.asarray(as_float32(matrix, source, self.columns))


def _one_hot(frame: pd.DataFrame, column: str, values: Sequence[str], source: str) -> sp.csr_array:
    """(n, number of values), with one 1 a row."""
    places = category_places(frame, column, values, source)
    return sp.csr_array(
        (np.ones(len(places), np.float32), places, np.arange(len(places) + 1)), shape=(len(places), len(values))
    )


@dataclass(frozen=True)
class MatrixEncoder(BaseEncoder):
    """Features that are already a matrix (svmlight, npz): checks the width and, if asked, scales rows to unit norm.

    Args:
      num_features: p of the training file; a sparse file may have fewer columns, the missing ones are zero. The p of an
        svmlight file is its highest feature number, a fact read from its rows.
      first_column: 1 if the training file numbers its features from 1, else 0. A test file cannot tell by itself.
      unit_rows: divide each row by its own L2 norm. Per example, so it costs no privacy.

    >>> MatrixEncoder(2, unit_rows=True).encode(np.array([[3.0, 4.0]]))
    array([[0.6, 0.8]], dtype=float32)
    """

    num_features: int
    first_column: int = 0
    unit_rows: bool = False

    name = "matrix"
    takes = "a matrix (.svm, .npz)"

    def __post_init__(self):
        if self.num_features < 1 or self.first_column not in (0, 1):
            raise DataError(
                f"Expected num_features >= 1 and first_column 0 or 1, got {self.num_features} and {self.first_column}."
            )

    @classmethod
    def fit(cls, matrix: Features, *, first_column: int = 0, unit_rows: bool = False) -> "MatrixEncoder":
        """The encoder of matrices as wide as this one."""
        if matrix.shape[1] <= first_column:
            raise DataError("Expected one feature or more, got none.")
        return cls(matrix.shape[1] - first_column, first_column, unit_rows)

    def encode(self, matrix, source: str = "the matrix") -> Features:
        """The matrix as (n, num_features) float32, dense or sparse as it came."""
        if not isinstance(matrix, np.ndarray) and not sp.issparse(matrix):
            raise self.refusal(source)
        width = self.first_column + self.num_features
        if matrix.shape[1] > width or (matrix.shape[1] < width and not sp.issparse(matrix)):
            raise DataError(
                f"Expected {self.num_features} features in {source}, as in training, "
                f"got {matrix.shape[1] - self.first_column}."
            )
        features = as_float32(matrix, source)
        if sp.issparse(features) and (features.shape[1] < width or self.first_column):
            if self.first_column and (features.indices == 0).any():
                raise DataError(f"Expected features numbered from 1 in {source}, as in training, got feature 0.")
            features = sp.csr_array(
                (features.data, features.indices - self.first_column, features.indptr),
                shape=(features.shape[0], self.num_features),
            )
        return unit_norm_rows(features) if self.unit_rows else features


Encoder: TypeAlias = TextEncoder | TabularEncoder | MatrixEncoder
_ENCODERS = {encoder.name: encoder for encoder in (TextEncoder, TabularEncoder, MatrixEncoder)}


def encoder_from_json(fields: Mapping) -> Encoder:
    """The encoder that `to_json` wrote.

    >>> encoder_from_json(MatrixEncoder(3).to_json())
    MatrixEncoder(num_features=3, first_column=0, unit_rows=False)
    """
    kind = fields.get("encoder") if isinstance(fields, Mapping) else None
    if kind not in _ENCODERS:
        raise DataError(f"Expected an encoder among {', '.join(_ENCODERS)}, got '{kind}'; was the file changed?")
    return _ENCODERS[kind].from_json(fields)
