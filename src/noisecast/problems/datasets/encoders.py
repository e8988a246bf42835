"""Encoders: frozen recipes that turn a table, texts or a matrix into features, alike for train, test and predict.

Each example is encoded by itself, given the encoder, so an encoder built from public facts (a public vocabulary, public
bounds) costs no privacy. An encoder fitted on private rows (a vocabulary of private text) is itself private: nothing
here adds noise to it, and `vocabulary_is_private` says so.
"""

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import scipy.sparse as sp

from noisecast.problems.datasets.columns import numeric_column
from noisecast.problems.datasets.contents import decode, read_bytes
from noisecast.problems.datasets.dataset import DataError, Features, as_float32, first_repeated, listed
from noisecast.problems.datasets.encoder import BaseEncoder, unit_norm_rows
from noisecast.problems.datasets.tables import read_table
from noisecast.problems.datasets.text_encoder import TextEncoder


@dataclass(frozen=True)
class TabularEncoder(BaseEncoder):
    """Numeric columns as features: with bounds each is clamped to [lower, upper] and scaled to [-1, 1].

    x_j = 2 (clamp(v_j, lower_j, upper_j) - lower_j) / (upper_j - lower_j) - 1

    The bounds must be *public*: known without looking at the data (an age lies in 0 .. 120). The minimum and maximum of
    a private column are private, so they are never computed here. Without bounds values are used as they are.

    Args:
      columns: the columns used, in this order.
      lower, upper: one bound a column, lower < upper, finite; or None for both.
      unit_rows: divide each row by its own L2 norm. Per example, so it costs no privacy.

    >>> TabularEncoder(("age",), (0.0,), (100.0,)).encode(pd.DataFrame({"age": [25, 300]}))
    array([[-0.5],
           [ 1. ]], dtype=float32)
    """

    columns: tuple[str, ...]
    lower: tuple[float, ...] | None = None
    upper: tuple[float, ...] | None = None
    unit_rows: bool = False

    name = "tabular"
    takes = "a table with numeric columns"

    def __post_init__(self):
        object.__setattr__(self, "columns", tuple(self.columns))
        if not self.columns:
            raise DataError("Expected one numeric column or more beside the label, got none.")
        if repeated := first_repeated(self.columns):
            raise DataError(f"Expected every column once, got '{repeated}' twice.")
        if (self.lower is None) != (self.upper is None):
            raise DataError("Expected lower and upper bounds together, got one of them.")
        if self.lower is None or self.upper is None:
            return
        object.__setattr__(self, "lower", tuple(float(bound) for bound in self.lower))
        object.__setattr__(self, "upper", tuple(float(bound) for bound in self.upper))
        if not len(self.lower) == len(self.upper) == len(self.columns):
            raise DataError(
                f"Expected one bound a column, got {len(self.lower)} lower and {len(self.upper)} upper bounds for "
                f"{len(self.columns)} columns."
            )
        for column, low, high in zip(self.columns, self.lower, self.upper):
            _check_bounds(column, low, high)

    @classmethod
    def fit(
        cls, columns: Sequence[str], *, bounds: Mapping[str, Sequence[float]] | None = None, unit_rows: bool = False
    ) -> "TabularEncoder":
        """The encoder of these columns, with the bounds given for them (more bounds than columns are welcome).

        >>> TabularEncoder.fit(["b"], bounds={"a": [0, 1], "b": [-1, 1]}).upper
        (1.0,)
        """
        if bounds is None:
            return cls(tuple(columns), unit_rows=unit_rows)
        if without := [column for column in columns if column not in bounds]:
            raise DataError(f"Expected bounds for every column used, got none for {listed(without)}; add them.")
        lower, upper = zip(*(bounds[column] for column in columns)) if columns else ((), ())
        return cls(tuple(columns), lower, upper, unit_rows)

    @property
    def num_features(self) -> int:
        return len(self.columns)

    def encode(self, frame, source: str = "the table") -> np.ndarray:
        """The table's columns as a (n, num_features) float32 array; other columns are ignored."""
        if not isinstance(frame, pd.DataFrame):
            raise self.refusal(source)
        matrix = np.empty((len(frame), len(self.columns)), np.float32)
        with np.errstate(over="ignore"):  # reported below, with its row
            for j, column in enumerate(self.columns):
                values = numeric_column(frame, column, source)
                if self.lower is not None and self.upper is not None:
                    low, high = self.lower[j], self.upper[j]
                    values = 2 * (np.clip(values, low, high) - low) / (high - low) - 1
                matrix[:, j] = values
        matrix = as_float32(matrix, source)
        return unit_norm_rows(matrix) if self.unit_rows else matrix


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


def read_bounds(path) -> dict[str, tuple[float, float]]:
    """Public bounds: TOML or JSON with `column = [low, high]`, or CSV with the columns column, low, high.

    Raises: DataError naming the file and the column.
    """
    path = Path(path)
    if path.suffix.lower() == ".csv":
        frame = read_table(path)
        if set(frame.columns) != {"column", "low", "high"}:
            raise DataError(f"Expected the columns column, low, high in {path}, got {listed(list(frame.columns))}.")
        low, high = (numeric_column(frame, name, str(path)) for name in ("low", "high"))
        if repeated := first_repeated(frame["column"].tolist()):
            raise DataError(f"Expected every column of {path} once, got '{repeated}' twice.")
        bounds: Any = {str(c): pair for c, *pair in zip(frame["column"], low.tolist(), high.tolist())}
    else:
        bounds = _parse_bounds(path)
    for column, pair in bounds.items():
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(b) in (int, float) for b in pair)):
            raise DataError(f"Expected '{column} = [low, high]' in {path}, got {pair!r}.")
        _check_bounds(column, *pair, where=f" in {path}")
    return {column: (float(low), float(high)) for column, (low, high) in bounds.items()}


def _parse_bounds(path: Path) -> dict:
    parsers = {".toml": tomllib.loads, ".json": json.loads}
    if path.suffix.lower() not in parsers:
        raise DataError(f"Expected bounds as .toml, .json or .csv, got {path}.")
    text = decode(read_bytes(path), path)
    try:
        bounds = parsers[path.suffix.lower()](text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 1,000 brackets
        raise DataError(f"{path} cannot be read as {path.suffix[1:].upper()}: {error}.") from None
    if not isinstance(bounds, dict) or not bounds:
        raise DataError(f"Expected 'column = [low, high]' in {path}, got {type(bounds).__name__} without entries.")
    return bounds


def _check_bounds(column: str, low: float, high: float, where: str = "") -> None:
    # Whole numbers have no largest one, floats have.
    if not (-sys.float_info.max <= low < high and high - low <= sys.float_info.max):
        raise DataError(f"Expected finite bounds low < high for column '{column}'{where}, got [{low}, {high}].")
