"""Encoders: frozen recipes that turn a table, texts or a matrix into features, alike for train, test and predict.

Each example is encoded by itself, given the encoder, so an encoder built from public facts (a public vocabulary, public
bounds) costs no privacy. An encoder fitted on private rows (a vocabulary of private text) is itself private: nothing
here adds noise to it, and `vocabulary_is_private` says so.
"""

import json
import re
import sys
import tomllib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias, get_args

import numpy as np
import pandas as pd
import pydantic
import scipy.sparse as sp

from noisecast.problems.datasets.columns import numeric_column, texts_of
from noisecast.problems.datasets.contents import decode, read_bytes
from noisecast.problems.datasets.dataset import DataError, Features, as_float32, first_repeated, listed
from noisecast.problems.datasets.tables import read_table

TextKind = Literal["binary", "count", "term-frequency", "padded-term-frequency"]

# Keras' reserved ids: the first columns of "padded-term-frequency".
PAD, START, OUT_OF_VOCABULARY = 0, 1, 2
NUM_RESERVED = 3
PADDED_LENGTH = 290
ROWS_AT_ONCE = 1024  # what is made on the way to a matrix is made of so many

_TOKEN = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_LINE_BREAK = re.compile(r"<br\s*/?>")


def tokenize(text: str) -> list[str]:
    """Lower-case words: letters and digits, with apostrophes inside; `<br />` and everything else separates.

    >>> tokenize("It's <br />GOOD, isn't it? 'Yes': 10/10")
    ["it's", 'good', "isn't", 'it', 'yes', '10', '10']
    """
    return _TOKEN.findall(_LINE_BREAK.sub(" ", text.lower()))


class _Encoder:
    """What the encoders share: how they are written down, and what they say to rows of another form."""

    name: ClassVar[str]
    takes: ClassVar[str]

    def to_json(self) -> dict:
        """The encoder as a dict that JSON can hold."""
        return {"encoder": self.name, **asdict(self)}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, fields: Mapping) -> Self:
        """The encoder that `to_json` wrote; DataError if a field is missing or of the wrong type."""
        values = {name: value for name, value in fields.items() if name != "encoder"}
        try:
            return pydantic.TypeAdapter(cls).validate_python(values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the fields"
            raise DataError(f"Cannot read the {cls.name} encoder: {where}: {first['msg']}; was it edited?") from None

    def _refuse(self, source: str) -> DataError:
        return DataError(f"Expected {self.takes}, as in training, got {source}; give a file of that form.")


@dataclass(frozen=True)
class TextEncoder(_Encoder):
    """Bag of words over a fixed vocabulary (V words); a text is a row.

    kind, for a text of m tokens with c_j of word j:
      binary                 1 if c_j > 0; V columns.
      count                  c_j; V columns.
      term-frequency         c_j / m, m counting words outside the vocabulary too: rows sum to at most 1; V columns.
      padded-term-frequency  the text is START, its tokens, then PAD, cut or padded "post" to max_tokens = L; counts / L
                             of PAD, START, out-of-vocabulary and the words: rows sum to 1; 3 + V columns. This is the
                             encoding behind the paper's IMDB task (L = 290, 3 + V = 10,000), where the PAD column
                             dominates the norm.

    Args:
      kind: as above.
      vocabulary: words as `tokenize` makes them, each once; their order is the columns' order.
      max_tokens: use the first max_tokens tokens only (START included where padded); >= 1, required where padded.
      column: the column of a table that holds the text.
      unit_rows: divide each row by its own L2 norm. Per example, so it costs no privacy.
      vocabulary_is_private: True where the vocabulary was read from private texts. It then tells which words they
        contain, and no privacy guarantee of the training covers it.

    Raises: DataError for an unknown kind, an empty or repeated vocabulary, or max_tokens < 1.

    >>> encoder = TextEncoder("term-frequency", ("good", "bad"))
    >>> encoder.encode(["Good, good film.", "bad"]).toarray()
    array([[0.6666667, 0.       ],
           [0.       , 1.       ]], dtype=float32)
    >>> TextEncoder.from_json(encoder.to_json()) == encoder
    True
    """

    kind: TextKind
    vocabulary: tuple[str, ...]
    max_tokens: int | None = None
    column: str = "text"
    unit_rows: bool = False
    vocabulary_is_private: bool = True

    name = "text"
    takes = "a table with a text column"

    def __post_init__(self):
        object.__setattr__(self, "vocabulary", tuple(self.vocabulary))
        if self.kind not in get_args(TextKind):
            raise DataError(f"Expected a text encoding among {', '.join(get_args(TextKind))}, got '{self.kind}'.")
        if not self.vocabulary:
            raise DataError("Expected a vocabulary of one word or more, got none; are the texts or the file empty?")
        if repeated := first_repeated(self.vocabulary):
            raise DataError(f"Expected every word of the vocabulary once, got '{repeated}' twice; remove one.")
        if self.kind == "padded-term-frequency" and self.max_tokens is None:
            object.__setattr__(self, "max_tokens", PADDED_LENGTH)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise DataError(f"Expected max_tokens >= 1, got {self.max_tokens}.")

    @classmethod
    def fit(cls, texts: Iterable[str], kind: TextKind, *, vocabulary_size: int = 10_000, **fields) -> "TextEncoder":
        """The encoder of the most frequent words of `texts` in `vocabulary_size` columns; ties go by the alphabet.

        Where padded, 3 of the columns are PAD, START and out-of-vocabulary. The vocabulary is private if the texts are.

        >>> TextEncoder.fit(["b a a", "c b"], "binary", vocabulary_size=2).vocabulary
        ('a', 'b')
        """
        num_words = vocabulary_size - NUM_RESERVED * (kind == "padded-term-frequency")
        if num_words < 1:
            raise DataError(f"Expected a vocabulary_size that leaves one word or more, got {vocabulary_size}.")
        counts = Counter()
        for text in texts:
            counts.update(tokenize(text))
        # One pass sorts by word, the next by count and, being stable, keeps ties in alphabetical order.
        words = sorted(sorted(counts), key=counts.__getitem__, reverse=True)[:num_words]
        return cls(kind, tuple(words), **fields)

    @property
    def num_features(self) -> int:
        return len(self.vocabulary) + NUM_RESERVED * (self.kind == "padded-term-frequency")

    def encode(self, texts, source: str = "the texts") -> Features:
        """Texts, one by one if they are many, or a table with the text column: (n, num_features) float32 CSR."""
        if isinstance(texts, pd.DataFrame):
            texts = texts_of(texts, self.column, source)
        elif not isinstance(texts, Sequence | pd.Series | Iterator) or isinstance(texts, str):
            raise self._refuse(source)
        # One text at a time: the words of all of them are many times the texts.
        tokens = (tokenize(text) for text in texts)
        matrix = self._padded(tokens) if self.kind == "padded-term-frequency" else self._counted(tokens)
        return unit_norm_rows(matrix) if self.unit_rows else matrix

    def _counted(self, tokens: Iterable[list[str]]) -> sp.csr_array:
        index = {word: j for j, word in enumerate(self.vocabulary)}
        lengths = array("q")

        def ids() -> Iterator[list[int]]:
            for words in tokens:
                kept = words[: self.max_tokens]
                lengths.append(len(kept))
                yield [index[word] for word in kept if word in index]

        matrix = count_matrix(ids(), self.num_features)
        if self.kind == "binary":
            matrix.data[:] = 1
        if self.kind == "term-frequency":
            matrix.data /= np.repeat(np.array(lengths, np.float32), np.diff(matrix.indptr))
        return matrix

    def _padded(self, tokens: Iterable[list[str]]) -> sp.csr_array:
        assert self.max_tokens is not None
        most = self.max_tokens
        index = _Columns((word, j) for j, word in enumerate(self.vocabulary, start=NUM_RESERVED))

        def ids() -> Iterator[list[int]]:
            for words in tokens:
                known = [START, *map(index.__getitem__, words[: most - 1])]
                yield known + [PAD] * (most - len(known))

        matrix = count_matrix(ids(), self.num_features)
        matrix.data /= most
        return matrix


class _Columns(dict):
    """Words to columns; mapping through it is several times faster than asking for each word whether it is there."""

    def __missing__(self, word: str) -> int:
        return OUT_OF_VOCABULARY


@dataclass(frozen=True)
class TabularEncoder(_Encoder):
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
            raise self._refuse(source)
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
class MatrixEncoder(_Encoder):
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
            raise self._refuse(source)
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


def read_vocabulary(path) -> tuple[str, ...]:
    """A public vocabulary: one word a line, as `tokenize` makes them, each once; empty lines are skipped.

    Raises: DataError naming the line of a repeated word, of a word that `tokenize` would never make, or an empty file.
    """
    lines = [line.strip() for line in decode(read_bytes(path), path).splitlines()]
    seen: dict[str, int] = {}
    for number, word in enumerate(lines, start=1):
        if not word:
            continue
        if word in seen:
            raise DataError(f"Line {number} of {path} repeats '{word}' of line {seen[word]}; remove one of them.")
        if tokenize(word) != [word]:
            raise DataError(f"Line {number} of {path} is not one lower-case word, got '{word}'; one word a line.")
        seen[word] = number
    if not seen:
        raise DataError(f"Expected one word a line in {path}, got no word.")
    return tuple(seen)


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


def count_matrix(ids: Iterable[list[int]], num_columns: int) -> sp.csr_array:
    """How often each id occurs in each list: (number of lists, num_columns) float32.

    >>> count_matrix([[0, 2, 2], []], 3).toarray()
    array([[1., 0., 2.],
           [0., 0., 0.]], dtype=float32)
    """
    columns, counts, indptr = array("i"), array("f"), array("q", [0])
    lists = iter(ids)
    while rows := list(islice(lists, ROWS_AT_ONCE)):
        starts = np.cumsum([0, *map(len, rows)])
        found = np.fromiter(chain.from_iterable(rows), np.int32, count=starts[-1])
        block = sp.csr_array((np.ones(len(found), np.float32), found, starts), shape=(len(rows), num_columns))
        block.sum_duplicates()
        indptr.extend((block.indptr[1:] + len(columns)).tolist())
        columns.frombytes(block.indices.astype(np.int32).tobytes())
        counts.frombytes(block.data.tobytes())
    parts = (np.frombuffer(counts, np.float32), np.frombuffer(columns, np.int32), np.frombuffer(indptr, np.int64))
    return sp.csr_array(parts, shape=(len(indptr) - 1, num_columns))


def unit_norm_rows(features: Features) -> Features:
    """Each row divided by its own L2 norm; a row of zeros stays."""
    if sp.issparse(features):
        # In float64: the squares of small float32 numbers vanish.
        blocks = [features[i : i + ROWS_AT_ONCE] for i in range(0, features.shape[0], ROWS_AT_ONCE)]
        norms = np.concatenate([np.sqrt(block.astype(np.float64).power(2).sum(axis=1)) for block in blocks])
        data = features.data / np.repeat(norms, np.diff(features.indptr)).clip(min=np.finfo(float).tiny)
        return sp.csr_array((data.astype(np.float32), features.indices, features.indptr), shape=features.shape)
    norms = np.linalg.norm(features.astype(np.float64), axis=1, keepdims=True)
    return (features / np.where(norms > 0, norms, 1)).astype(np.float32)
