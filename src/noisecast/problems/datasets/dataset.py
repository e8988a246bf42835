"""What every reader returns: features and labels as arrays, and the one error that a bad input meets."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import scipy.sparse as sp

# A NumPy array or a scipy.sparse.csr_array; SciPy ships no types, so a checker would refuse the union.
Features: TypeAlias = Any

MAX_CLASSES = 10_000
MOST_LISTED = 12  # names in a sentence


class DataError(ValueError):
    """A bad input, in one sentence on one line: what was expected, what was got and where, and the way out."""

    def __init__(self, sentence: str):
        # Cells and column names are quoted from the file and may hold line breaks.
        super().__init__(re.sub(r"\s*[\r\n]\s*", " ", sentence))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples as arrays: row i of `features` and `labels[i]` are one example, the unit of privacy.

    Args:
      name: what to call it in tables and messages.
      features: (n, p) float32, a NumPy array or a `scipy.sparse.csr_array` without duplicate entries.
      labels: (n,) int32 in 0 .. len(label_names) - 1; or sets of labels, (n, k) int32, each row padded with -1,
        kept in increasing order, each label once, in as few columns as hold them; an empty set is a set.
      label_names: what each label was called in the file. Names read from a private file are themselves private.

    Raises: DataError if the shapes disagree, a label has no name or a feature is not finite.

    >>> data = Dataset("toy", np.eye(3), np.array([0, 1, 1]), ("no", "yes"))
    >>> data.num_examples, data.num_features, data.num_classes, data.content_hash[:8]
    (3, 3, 2, '...')
    >>> data.rows([2, 0]).labels
    array([1, 0], dtype=int32)
    >>> Dataset("toy", np.eye(3), np.array([[1, 0, 1], [-1, 1, -1], [-1, -1, -1]]), ("php", "sql")).labels
    array([[ 0,  1],
           [ 1, -1],
           [-1, -1]], dtype=int32)
    """

    name: str
    features: Features = field(repr=False)
    labels: np.ndarray = field(repr=False)
    label_names: tuple[str, ...]

    def __post_init__(self):
        features = as_float32(self.features, self.name)
        labels = np.asarray(self.labels)
        shapes_agree = features.ndim == 2 and labels.ndim in (1, 2) and labels.shape[:1] == features.shape[:1]
        if not shapes_agree or not np.issubdtype(labels.dtype, np.integer):
            raise DataError(
                f"Expected features (n, p) and integer labels (n,), or sets of labels (n, k), in {self.name}, "
                f"got {features.shape} and {labels.shape} of {labels.dtype}."
            )
        lowest = 0 if labels.ndim == 1 else -1
        if labels.size and not lowest <= labels.min() <= labels.max() < len(self.label_names):
            raise DataError(
                f"Expected labels in {lowest} .. {len(self.label_names) - 1} in {self.name}, "
                f"got {labels.min()} .. {labels.max()}."
            )
        if labels.ndim == 2:
            labels = _canonical(labels)
        object.__setattr__(self, "features", features)
        object.__setattr__(self, "labels", labels.astype(np.int32, copy=False))
        object.__setattr__(self, "label_names", tuple(self.label_names))

    @property
    def num_examples(self) -> int:
        return self.features.shape[0]

    @property
    def num_features(self) -> int:
        return self.features.shape[1]

    @property
    def num_classes(self) -> int:
        return len(self.label_names)

    @property
    def has_label_sets(self) -> bool:
        """Whether a row carries any number of labels, not exactly one."""
        return self.labels.ndim == 2

    @cached_property
    def content_hash(self) -> str:
        """sha256 of the features, labels and label names (not of `name`): the same in every process."""
        return hash_arrays(*parts_of(self.features), self.labels, names=self.label_names)

    def rows(self, indices) -> "Dataset":
        """The examples at `indices` (integers, a mask or a slice), under the same name."""
        if not isinstance(indices, slice):
            indices = np.asarray(indices, dtype=None if np.size(indices) else np.int64)  # [] alone would be float
        return Dataset(self.name, self.features[indices], self.labels[indices], self.label_names)


def label_sets(sets: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """Sets of labels as (n, k) int32: increasing, each once, padded with -1 to the largest set.

    >>> label_sets([[2, 0, 2], []])
    array([[ 0,  2],
           [-1, -1]], dtype=int32)
    """
    sizes = np.array([len(labels) for labels in sets], dtype=np.int64)
    padded = np.full((len(sets), sizes.max(initial=1)), -1, np.int32)
    row = np.repeat(np.arange(len(sets)), sizes)
    slot = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    padded[row, slot] = [label for labels in sets for label in labels]
    return _canonical(padded)


def _canonical(labels: np.ndarray) -> np.ndarray:
    """The one way to write sets of labels (n, k): increasing, each once, then -1; no column without a label but one."""
    none = np.iinfo(np.int32).max  # sorts behind every label
    ordered = np.sort(np.where(labels < 0, none, labels), axis=1)
    ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]] = none
    ordered = np.sort(ordered, axis=1)
    longest = int((ordered != none).sum(axis=1).max(initial=0))
    padded = np.pad(ordered, ((0, 0), (0, 1)), constant_values=none)[:, : max(longest, 1)]
    return np.where(padded == none, -1, padded).astype(np.int32)


def as_float32(features: Any, source: str = "the features", columns: Sequence[str] | None = None) -> Features:
    """Features as float32, sparse ones as a canonical CSR array.

    Args:
      source, columns: what messages call the features and their columns.

    Raises: DataError names the place of a value that is not finite.

    >>> as_float32([[1, 2]])
    array([[1., 2.]], dtype=float32)
    """
    with np.errstate(over="ignore"):  # What overflows float32 is reported below, with its row.
        if sp.issparse(features):
            _check_indices(features, source)
            matrix = sp.csr_array(features, dtype=np.float32)
            if not matrix.has_canonical_format:
                matrix = matrix.copy()
                matrix.sum_duplicates()
            values, features = matrix.data, matrix
        else:
            features = np.asarray(features, dtype=np.float32)
            values = features
    _check_values(values, features, source, columns)
    return features


def _check_values(values: np.ndarray, features: Features, source: str, columns: Sequence[str] | None) -> None:
    # The sum of finite numbers rarely overflows, and then costs one more look.
    if np.isfinite(values.sum(dtype=np.float64)) or (finite := np.isfinite(values)).all():
        return
    bad = np.argwhere(~finite)[0]
    if sp.issparse(features):
        row, column = np.searchsorted(features.indptr, bad[0], side="right") - 1, features.indices[bad[0]]
    else:
        row, column = bad[0], bad[-1]
    name = repr(columns[column]) if columns else column + 1
    raise DataError(
        f"Expected values finite in float32, got {values[tuple(bad)]} in row {row + 1} of {source}, column {name}; "
        "mend or drop that row."
    )


def _check_indices(features: Any, source: str) -> None:
    """SciPy looks at indices only when asked to, and compiled code would read and write wherever they point."""
    if not hasattr(features, "check_format"):  # of other formats SciPy has checked them
        return
    try:
        type(features)(features).check_format(full_check=True)  # a view: the check may trim arrays
    except ValueError as error:
        raise DataError(
            f"Expected a sparse matrix whose indices fit its shape {features.shape} in {source}: {error}."
        ) from error


def parts_of(features: Features) -> tuple[np.ndarray, ...]:
    """The arrays that say what a feature matrix holds, for hashing."""
    if sp.issparse(features):
        return (np.array(features.shape), features.indptr, features.indices, features.data)
    return (features,)


def hash_arrays(*arrays: np.ndarray, names: Sequence[str] = ()) -> str:
    """sha256 over shapes, values (little-endian, integers as 64 bit) and names: independent of machine and process.

    >>> hash_arrays(np.array([1, 2])) == hash_arrays(np.array([1, 2], dtype=np.int32))
    True
    """
    digest = hashlib.sha256()
    for array in arrays:
        wide = "<i8" if np.issubdtype(array.dtype, np.integer) else "<f4"
        digest.update(f"{array.shape}{wide};".encode())
        digest.update(np.ascontiguousarray(array, dtype=wide).data)
    digest.update(repr(tuple(names)).encode())
    return digest.hexdigest()


def encode_labels(
    cells, *, source: str, label_names: Sequence[str] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as integers, and their names: sorted (numbers by size), or those of the training file.

    Args:
      cells: (n,) strings or numbers; 1, 1.0 and "1" are one name.
      source: the file, for messages.
      label_names: impose these names (public ones, or those of the training file); otherwise they are found, and there
        must be two or more.

    Returns: labels (n,) int32, label names.
    Raises: DataError for a missing cell, a label not in `label_names`, one class only, or too many to be a label.

    >>> encode_labels(["10", "9", "10"], source="a.csv")
    (array([1, 0, 1], dtype=int32), ('9', '10'))
    """
    codes, distinct = _distinct(cells)  # one name a class, not a row
    names = [label_name(cell) for cell in distinct]

    def first_row(of) -> int:
        return int(np.isin(codes, [code for code, name in enumerate(names) if name in of]).argmax())

    if "" in names:
        raise DataError(f"Row {first_row({''}) + 1} of {source} has no label; fill it in or leave the row out.")
    found = set(names)
    if label_names is None:
        label_names = sorted(found, key=_by_size_then_alphabet)
        _check_class_count(label_names, len(codes), source)
    index = {name: i for i, name in enumerate(label_names)}
    if unknown := found - set(index):
        row = first_row(unknown)
        raise _unknown_label(row, names[codes[row]], source, label_names)
    return np.array([index[name] for name in names], dtype=np.int32)[codes], tuple(label_names)


def _distinct(cells) -> tuple[np.ndarray, Any]:
    """The distinct cells, and for each cell its number among them."""
    given = cells if isinstance(cells, np.ndarray | pd.Series) else np.fromiter(cells, dtype=object)
    try:
        return pd.factorize(given, use_na_sentinel=False)
    except TypeError:  # a list, another kind of Parquet cell
        return pd.factorize(np.array([str(cell) for cell in given], dtype=object))


def encode_label_sets(
    cells: Sequence[str], separator: str, *, source: str, label_names: Sequence[str] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Sets of labels as integers, and the labels' names: sorted, or those imposed.

    Args:
      cells: (n,) texts, each with any number of labels and the separator between them. Blanks around a label and
        repetitions do not count. A cell without labels is an empty set: the example says "none of them".
      separator: one character or more.
      source, label_names: see `encode_labels`; one name is enough, since it can be present or absent.

    Returns: labels (n, k) int32, padded with -1, k the size of the largest set; label names.
    Raises: DataError for a label not in `label_names`, no label at all, or too many to be labels.

    >>> encode_label_sets(["sql|php", "", "php"], "|", source="a.csv")
    (array([[ 0,  1],
           [-1, -1],
           [ 0, -1]], dtype=int32), ('php', 'sql'))
    """
    if not separator:
        raise DataError("Expected a label separator of one character or more, got an empty one.")
    sets = [set(filter(None, map(label_name, cell.split(separator)))) for cell in cells]
    if label_names is None:
        label_names = sorted(set().union(*sets), key=_by_size_then_alphabet)
        _check_label_count(len(label_names), sets, source)
    index = {name: i for i, name in enumerate(label_names)}
    for row, names in enumerate(sets):
        if unknown := names - index.keys():
            raise _unknown_label(row, min(unknown), source, label_names)
    return label_sets([[index[name] for name in names] for names in sets]), tuple(label_names)


def _unknown_label(row: int, name: str, source: str, label_names: Sequence[str]) -> DataError:
    return DataError(
        f"Row {row + 1} of {source} has the label '{name[:40]}', which is not one of those expected: "
        f"{listed(label_names)}."
    )


def label_name(cell) -> str:
    """A label cell as a name: stripped, 1.0 as "1", missing as ""."""
    name = "" if cell is None else str(cell).strip()
    if name.lower() in {"nan", "<na>"}:
        return ""
    return re.sub(r"^\+?(-?\d+)(\.0*)?$", r"\1", name)


def _by_size_then_alphabet(name: str) -> tuple[float, str]:
    try:
        number = float(name)
    except ValueError:
        return (math.inf, name)
    return (math.inf if math.isnan(number) else number, name)


def _check_class_count(names: Sequence[str], num_rows: int, source: str) -> None:
    if len(names) == 1:
        raise DataError(f"Expected two or more classes in {source}, got only '{names[0][:40]}'; nothing can be learnt.")
    # A file of two rows may well hold two classes.
    if len(names) > MAX_CLASSES or (num_rows > 2 and len(names) > 0.9 * num_rows):
        raise DataError(
            f"Expected a label with at most {MAX_CLASSES:,} classes, most of them repeated, got {len(names):,} in the "
            f"{num_rows:,} rows of {source}; this is probably an id or a measured value, name another label column."
        )


def _check_label_count(num_labels: int, sets: Sequence[set[str]], source: str) -> None:
    given = sum(map(len, sets))
    if not given:
        raise DataError(f"Expected a label in {source}, got only rows without one; nothing can be learnt.")
    if num_labels > MAX_CLASSES or (given > 2 and num_labels > 0.9 * given):
        raise DataError(
            f"Expected at most {MAX_CLASSES:,} labels, most of them repeated, got {num_labels:,} different ones of "
            f"{given:,} in {source}; name another label column or separator."
        )


def listed(names: Sequence[str], most: int = MOST_LISTED) -> str:
    """Names for a sentence, cut where they would flood it.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(str(name)[:40] for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def first_repeated(names: Sequence[str]) -> str | None:
    """The first name that occurs twice, or None."""
    return next((name for name, count in Counter(names).items() if count > 1), None)
