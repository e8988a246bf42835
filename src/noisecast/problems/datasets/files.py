"""From a user's file to a `Dataset` and back again: for training, for the test file, and for prediction.

`load_file` fits the encoder; `load_test_file` and `load_features` read other files as the training file was read.
"""

import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp

from noisecast.files import is_bomb, read_arrays
from noisecast.problems.datasets.columns import check_known, column_of, texts_of
from noisecast.problems.datasets.contents import decode, existing_file, file_suffix, opened, read_bytes
from noisecast.problems.datasets.csv_file import DELIMITERS, CsvFile, open_csv
from noisecast.problems.datasets.dataset import (
    DataError,
    Dataset,
    Features,
    encode_label_sets,
    encode_labels,
    first_repeated,
    label_name,
    listed,
)
from noisecast.problems.datasets.encoders import (
    Encoder,
    MatrixEncoder,
    TabularEncoder,
)
from noisecast.problems.datasets.public_columns import PublicColumns, read_public_columns
from noisecast.problems.datasets.tables import read_table
from noisecast.problems.datasets.text_encoder import TextEncoder, TextKind, read_vocabulary

MAX_COLUMNS = 100_000_000
LABEL_ARRAYS = ("label", "labels", "y")  # of an .npz
BYTES_A_COLUMN = 40  # that training takes for each, named in the file or not


@dataclass(frozen=True)
class ReadOptions:
    """How a training file is read.

    Args:
      label: the label's column in a table; svmlight and npz files say by themselves where it is.
      label_separator: stands between the labels of a cell, any number of them, see `encode_label_sets`; None for one.
      label_names: a file with public names of the labels, one a line; None to take them from the rows (then private).
      text: the column of a table that holds texts; all others but the label are then ignored.
      columns: the columns to use; None for all but the label.
      text_kind: how texts become numbers, see `TextEncoder`.
      vocabulary: a file with a public vocabulary; None to take the most frequent words of the texts (then private).
      vocabulary_size: columns at most, where the vocabulary is taken from the texts.
      max_tokens: tokens used of each text.
      bounds: a file with public bounds of the columns, or their public values, see `read_public_columns`.
      unit_rows: divide each row by its own L2 norm.
    """

    label: str = "label"
    label_separator: str | None = None
    label_names: str | Path | None = None
    text: str | None = None
    columns: tuple[str, ...] | None = None
    text_kind: TextKind = "term-frequency"
    vocabulary: str | Path | None = None
    vocabulary_size: int = 10_000
    max_tokens: int | None = None
    bounds: str | Path | None = None
    unit_rows: bool = False


def load_file(path, options: ReadOptions | None = None) -> tuple[Dataset, Encoder]:
    """A training file as a dataset, and the encoder that reads other files like it.

    Args:
      path: .csv, .tsv, .parquet, .svm / .svmlight / .libsvm or .npz, each perhaps with .gz. An .npz holds `features` or
        `X`, or the CSR arrays `indptr`, `indices` and `data` or `counts` (with `num_tokens` counts become term
        frequencies), and `labels`, `label` or `y`. All rows are returned, also where it holds `num_train`.
      options: see `ReadOptions`.

    Raises: DataError, one sentence, for whatever is wrong with the file or the options.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "toy.csv")
    >>> _ = file.write_text("age,label\\n20,no\\n40,yes\\n30,no\\n")
    >>> data, encoder = load_file(file)
    >>> data.features.ravel(), data.labels, data.label_names
    (array([20., 40., 30.], dtype=float32), array([0, 1, 0], dtype=int32), ('no', 'yes'))
    >>> load_features(file, encoder).shape
    (3, 1)
    """
    options = options or ReadOptions()
    # What is not scaled within bounds is float32 in the end.
    dtype = np.float32 if options.bounds is None else np.float64
    public = None if options.bounds is None else read_public_columns(options.bounds)
    raw = _read(path, options.label, options.text, options.columns, dtype, public.values if public else ())
    imposed = None if options.label_names is None else read_label_names(options.label_names)
    labels, label_names = _labels(raw, options.label, options.label_separator, imposed)
    encoder = _fit_encoder(raw, options, public)
    return Dataset(Path(path).name, _encoded(raw, encoder), labels, label_names), encoder


def load_test_file(
    path, encoder: Encoder, label_names: Sequence[str], *, label: str = "label", label_separator: str | None = None
) -> Dataset:
    """A labelled file, read with the encoder and the label names of the training file.

    Raises: DataError, also for a label that is not among the names.
    """
    raw = _read_for(encoder, path, label)
    features = _encoded(raw, encoder)
    labels, names = _labels(raw, label, label_separator, label_names)
    return Dataset(Path(path).name, features, labels, names)


def load_features(path, encoder: Encoder) -> Features:
    """The (n, p) features of a file, whose labels may be missing and are not looked at."""
    return _encoded(_read_for(encoder, path, None), encoder)


def read_label_names(path) -> tuple[str, ...]:
    """Public names of the labels: one a line, each once, in the order of the model's outputs; empty lines are skipped.

    Raises: DataError for a name given twice, or fewer than two.
    """
    names = [name for name in map(label_name, decode(read_bytes(path), path).splitlines()) if name]
    if repeated := first_repeated(names):
        raise DataError(f"Expected every label of {path} once, got '{repeated}' twice; remove one.")
    if len(names) < 2:
        raise DataError(f"Expected two labels or more in {path}, one a line, got {listed(names)}.")
    return tuple(names)


class _RawFile(NamedTuple):
    """A file before encoding: a table (its label is a column) or a matrix with its labels beside it."""

    rows: pd.DataFrame | Features
    labels: np.ndarray | None
    source: str
    texts: Callable[[], Iterator[str]] | None = None  # of the column that is not in the table, as it is long


def _read(
    path,
    label: str | None,
    text: str | None,
    columns: Sequence[str] | None,
    dtype: Any,
    categories: Collection[str] = (),
) -> _RawFile:
    """Of a table its label, and what is asked for: a text column, or columns of numbers; None: all but the label.

    Args:
      label: None if it is not looked at.   text: None if the examples are no texts.   dtype: of numbers in a CSV file.
      categories: columns that are no numbers.
    """
    suffix = file_suffix(existing_file(path))
    if suffix in DELIMITERS:
        return _read_csv(open_csv(path), str(path), label, text, columns, dtype, categories)
    if suffix in _TABLES:
        table = read_table(path)
        check_known(_named(label, text, columns), table.columns, str(path))
        return _RawFile(table, None, str(path))
    if suffix not in _MATRICES:
        known = ", ".join((*_TABLES, *_MATRICES))
        raise DataError(f"Expected a file that ends in {known} (and perhaps .gz), got {path}.")
    rows, labels = _MATRICES[suffix](path)
    return _RawFile(rows, labels, str(path))


def _named(label: str | None, text: str | None, columns: Sequence[str] | None) -> list[str]:
    """The columns that are asked for by name."""
    return [*([] if label is None else [label]), *((columns or ()) if text is None else [text])]


def _read_csv(
    file: CsvFile, source: str, label: str | None, text: str | None, columns: Sequence[str] | None, dtype: Any,
    categories: Collection[str],
) -> _RawFile:  # fmt: skip
    file.check(_named(label, text, columns))
    if text is None:
        used = [name for name in file.columns if name != label] if columns is None else columns
        wanted, numbers = (
            [*used, *([] if label is None else [label])],
            [name for name in used if name not in categories],
        )
        return _RawFile(file.frame(wanted, numbers=numbers, dtype=dtype), None, source)
    others = [name for name in file.columns if name != text]
    if text == label or not others:
        return _RawFile(file.frame(), None, source)
    return _RawFile(file.frame(others if label is None else [label]), None, source, partial(file.texts, text))


def _read_for(encoder: Encoder, path, label: str | None) -> _RawFile:
    """What an encoder that has been fitted takes."""
    text = encoder.column if isinstance(encoder, TextEncoder) else None
    if not isinstance(encoder, TabularEncoder):
        return _read(path, label, text, None, np.float64)
    dtype = np.float32 if encoder.lower is None else np.float64
    return _read(path, label, text, encoder.all_columns, dtype, dict(encoder.categories))


def _encoded(raw: _RawFile, encoder: Encoder) -> Features:
    return encoder.encode(raw.rows if raw.texts is None else raw.texts(), raw.source)


def _labels(
    raw: _RawFile, label: str, separator: str | None, names: Sequence[str] | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    if separator is None:
        return encode_labels(_label_cells(raw, label), source=raw.source, label_names=names)
    if not isinstance(raw.rows, pd.DataFrame):
        raise DataError(f"Expected a table for a label separator, got the matrix {raw.source}.")
    return encode_label_sets(
        list(texts_of(raw.rows, label, raw.source)), separator, source=raw.source, label_names=names
    )


def _label_cells(raw: _RawFile, label: str):
    if isinstance(raw.rows, pd.DataFrame):
        return column_of(raw.rows, label, raw.source)
    if label not in LABEL_ARRAYS:
        raise DataError(
            f"Expected a table for the label column '{label}', got the matrix {raw.source}, which has labels of its "
            "own; name none."
        )
    if raw.labels is None:
        raise DataError(f"Expected an array 'labels', 'label' or 'y' in {raw.source}, got none.")
    return raw.labels


def _fit_encoder(raw: _RawFile, options: ReadOptions, public: PublicColumns | None) -> Encoder:
    if not isinstance(raw.rows, pd.DataFrame):
        if options.text or options.columns or options.bounds or options.vocabulary or options.max_tokens:
            asked = "text, vocabulary, max_tokens, columns or bounds"
            raise DataError(f"Expected a table for {asked}, got the matrix {raw.source}.")
        return _fit_matrix(raw, options)
    if options.text is not None:
        if options.columns or options.bounds:
            raise DataError(f"Expected columns and bounds only without a text column, got them with '{options.text}'.")
        return _fit_text(raw, options)
    if options.vocabulary or options.max_tokens:
        raise DataError(
            f"Expected a vocabulary or max_tokens only with a text column, got none named for {raw.source}."
        )
    return _fit_tabular(raw.rows, options, public, raw.source)


def _fit_matrix(raw: _RawFile, options: ReadOptions) -> MatrixEncoder:
    # Where no line of an svmlight file names feature 0, its features are numbered from 1.
    numbered_from_1 = file_suffix(raw.source) in _SVMLIGHT and not (raw.rows.indices == 0).any()
    return MatrixEncoder.fit(raw.rows, first_column=int(numbered_from_1), unit_rows=options.unit_rows)


def _fit_text(raw: _RawFile, options: ReadOptions) -> TextEncoder:
    column = options.text
    assert column is not None
    if column == options.label:
        raise DataError(f"Expected a text column other than the label, got '{column}' for both.")
    texts = texts_of(raw.rows, column, raw.source) if raw.texts is None else raw.texts()
    fields = {"column": column, "max_tokens": options.max_tokens, "unit_rows": options.unit_rows}
    if options.vocabulary is not None:
        words = read_vocabulary(options.vocabulary)
        return TextEncoder(options.text_kind, words, vocabulary_is_private=False, **fields)
    return TextEncoder.fit(texts, options.text_kind, vocabulary_size=options.vocabulary_size, **fields)


def _fit_tabular(
    frame: pd.DataFrame, options: ReadOptions, public: PublicColumns | None, source: str
) -> TabularEncoder:
    columns = options.columns or tuple(name for name in frame.columns if name != options.label)
    if options.label in columns:
        raise DataError(f"Expected feature columns without the label, got '{options.label}' among them.")
    if "" in columns:
        raise DataError(
            f"Column {list(frame.columns).index('') + 1} of {source} has no name, as a saved row index has; "
            "remove it or name the columns to use."
        )
    known = {} if public is None else public._asdict()
    return TabularEncoder.fit(columns, unit_rows=options.unit_rows, **known)


def _read_svmlight(path) -> tuple[sp.csr_array, np.ndarray]:
    """Features as numbered in the file (so column 0 may be empty) and labels of an svmlight file."""
    try:
        from sklearn.datasets import load_svmlight_file
    except ImportError:
        raise DataError(f"Reading {path} needs scikit-learn; run pip install 'noisecast[train]'.") from None

    stream = opened(path)
    try:
        zero_based: Any = True  # scikit-learn types it as str
        matrix, labels = load_svmlight_file(stream, zero_based=zero_based, dtype=np.float64)[:2]
        is_read = bool(labels.size) and np.isfinite(matrix.data).all()
    except (ValueError, OverflowError):
        is_read = False
    if not is_read:  # The fast reader names no line, so a slow one looks for it.
        stream.seek(0)
        raise DataError(_svmlight_complaint(io.TextIOWrapper(stream, encoding="utf-8", errors="replace"), path))
    _check_width(matrix.shape[1], matrix.nnz, path)
    return sp.csr_array(matrix), labels


def _svmlight_complaint(lines: Iterable[str], path) -> str:
    for number, line in enumerate(lines, start=1):
        cells = line.split("#")[0].split()
        last = -1
        if cells and not _FLOAT.fullmatch(cells[0]):
            return f"Line {number} of {path} starts with '{cells[0][:40]}', expected one number as the label."
        for cell in (cell for cell in cells[1:] if not cell.startswith("qid:")):
            index, _, value = cell.partition(":")
            if not (re.fullmatch(r"\d{1,9}", index) and _FLOAT.fullmatch(value)):
                return (
                    f"Line {number} of {path} holds '{cell[:40]}', expected feature:finite number, as in 3:0.5, the "
                    "feature of nine digits at most."
                )
            if int(index) <= last:
                return f"Line {number} of {path} names feature {index} after {last}, expected increasing numbers."
            last = int(index)
    return f"{path} holds no readable svmlight line, expected lines such as '1 3:0.5 7:1'."


_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?")


def _read_npz(path) -> tuple[Features, np.ndarray | None]:
    arrays = read_npz(path)
    there = [name for name in LABEL_ARRAYS if name in arrays]
    if len(there) > 1:
        raise DataError(f"Expected one array of labels in {path}, got {listed(there)}; leave one in.")
    labels = arrays[there[0]] if there else None
    dense = next((arrays[name] for name in ("features", "X") if name in arrays), None)
    if dense is None and "indptr" not in arrays:
        raise DataError(
            f"Expected the array 'features' or 'X' in {path}, or 'indptr', 'indices' and 'data' or 'counts', "
            f"got {listed(sorted(arrays))}."
        )
    features: Any = csr_from_arrays(arrays, path) if dense is None else dense
    if features.ndim != 2 or features.dtype.kind not in "iufb" or 0 in features.shape:
        raise DataError(f"Expected numeric features (n, p) in {path}, got {features.dtype} {features.shape}.")
    if labels is not None and labels.shape != features.shape[:1]:
        raise DataError(f"Expected {features.shape[0]} labels in {path}, one a row, got the shape {labels.shape}.")
    return features, labels


def read_npz(path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file; DataError if it is garbled or holds pickled objects, which could run code."""
    try:
        return read_arrays(opened(path))
    except ValueError as error:
        raise DataError(f"{path} {error}") from None


def csr_from_arrays(arrays: dict[str, np.ndarray], path) -> Features:
    """The matrix of CSR arrays, checked; `counts` with `num_tokens` (n,) become term frequencies counts / num_tokens.

    >>> arrays = dict(indptr=[0, 2, 3], indices=[0, 1, 1], counts=[1, 3, 2], num_tokens=[4, 4], num_features=2)
    >>> csr_from_arrays({name: np.array(value) for name, value in arrays.items()}, "toy.npz").toarray()
    array([[0.25, 0.75],
           [0.  , 0.5 ]], dtype=float32)
    """
    values_name = "counts" if "counts" in arrays else "data"
    for name in ("indptr", "indices", values_name):
        if name not in arrays or arrays[name].ndim != 1 or arrays[name].dtype.kind not in "iuf":
            raise DataError(f"Expected an array '{name}' (k,) of numbers in {path}, got {listed(sorted(arrays))}.")
    indptr, indices = arrays["indptr"], arrays["indices"]
    values = arrays[values_name].astype(np.float32)
    if not _is_csr(indptr, indices, values):
        raise DataError(
            f"Expected indptr from 0 upwards to {len(indices)} (the length of indices and {values_name}) and "
            f"non-negative integer indices in {path}."
        )
    width = _width(arrays, indices, path)
    _check_width(width, len(indices), path)
    if indices.size and indices.max() >= width:
        raise DataError(f"Expected indices below {width} (the number of features) in {path}, got {indices.max()}.")
    if values_name == "counts":
        values = _counts_or_frequencies(values, indptr, arrays, path)
    return sp.csr_array((values, indices.astype(np.int32), indptr), shape=(len(indptr) - 1, width))


def _is_csr(indptr: np.ndarray, indices: np.ndarray, values: np.ndarray) -> bool:
    if indptr.dtype.kind not in "iu" or indices.dtype.kind not in "iu" or len(indptr) < 2:
        return False
    rising = (np.diff(indptr.astype(np.int64)) >= 0).all()
    lengths_agree = indptr[0] == 0 and indptr[-1] == len(indices) == len(values)
    return bool(rising and lengths_agree and (indices.size == 0 or indices.min() >= 0))


def whole_number(arrays: dict[str, np.ndarray], name: str, path) -> int:
    """The integer that an .npz file holds under a name, or a DataError."""
    value = arrays[name]
    if value.size != 1 or value.dtype.kind not in "iu":
        raise DataError(f"Expected one integer as '{name}' in {path}, got {value.dtype} {value.shape}.")
    return int(value.item())


def _check_width(width: int, num_entries: int, path) -> None:
    """A few bytes may name any column, and training makes numbers for all columns below it."""
    if width > MAX_COLUMNS:
        raise DataError(
            f"Expected at most {MAX_COLUMNS:,} features in {path}, got {width:,}; number or hash them more densely."
        )
    if is_bomb(BYTES_A_COLUMN * width, 8 * num_entries):
        raise DataError(
            f"Expected an entry for every 40 features at least in {path}, got {width:,} features and "
            f"{num_entries:,} entries; number or hash them more densely."
        )


def _width(arrays: dict[str, np.ndarray], indices: np.ndarray, path) -> int:
    if "num_features" in arrays:
        return whole_number(arrays, "num_features", path)
    if "shape" in arrays and arrays["shape"].shape == (2,) and arrays["shape"].dtype.kind in "iu":
        return int(arrays["shape"][1])
    return int(indices.max()) + 1 if indices.size else 0


def _counts_or_frequencies(counts: np.ndarray, indptr: np.ndarray, arrays: dict[str, np.ndarray], path) -> np.ndarray:
    if counts.size and not counts.min() >= 0:
        row = np.searchsorted(indptr, np.flatnonzero(~(counts >= 0))[0], side="right")
        raise DataError(f"Expected counts >= 0 in {path}, got {counts[~(counts >= 0)][0]:g} in row {row}.")
    if "num_tokens" not in arrays:
        return counts
    num_tokens, entries = arrays["num_tokens"], np.diff(indptr)
    if num_tokens.shape != entries.shape or num_tokens.dtype.kind not in "iuf":
        raise DataError(f"Expected num_tokens ({len(entries)},) in {path}, one a row, got {num_tokens.shape}.")
    totals = np.bincount(np.repeat(np.arange(len(entries)), entries), weights=counts, minlength=len(entries))
    enough = (totals <= num_tokens) & ((num_tokens > 0) | (entries == 0))
    if not enough.all():
        row = np.flatnonzero(~enough)[0]
        raise DataError(
            f"Expected num_tokens positive and at least the sum of counts in {path}, got {num_tokens[row]} tokens and "
            f"{totals[row]:g} counts in row {row + 1}."
        )
    return counts / np.repeat(num_tokens, entries).astype(np.float32)


_SVMLIGHT = (".svm", ".svmlight", ".libsvm")
_TABLES = (*DELIMITERS, ".parquet")
_MATRICES: dict[str, Callable] = {**dict.fromkeys(_SVMLIGHT, _read_svmlight), ".npz": _read_npz}
