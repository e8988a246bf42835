"""Texts as bags of words over a fixed vocabulary."""

import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

import numpy as np
import pandas as pd
import scipy.sparse as sp

from noisecast.problems.datasets.columns import texts_of
from noisecast.problems.datasets.contents import decode, read_bytes
from noisecast.problems.datasets.dataset import DataError, Features, first_repeated
from noisecast.problems.datasets.encoder import ROWS_AT_ONCE, BaseEncoder, unit_norm_rows

TextKind = Literal["binary", "count", "term-frequency", "padded-term-frequency"]

# Keras' reserved ids: the first columns of "padded-term-frequency".
PAD, START, OUT_OF_VOCABULARY = 0, 1, 2
NUM_RESERVED = 3
PADDED_LENGTH = 290
PIECE = 2**20  # characters of a long text whose words are made at once

_TOKEN = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_LINE_BREAK = re.compile(r"<br\s*/?>")
_LOOSE_APOSTROPHE = re.compile(r"'(?:(?<![^\W_]')|(?![^\W_]))")  # nothing of a word before it, or nothing after
# What is left of a text in Latin letters, for `split` to cut at spaces.
_WORDS_AND_SPACES = bytes(i if chr(i).isalnum() or chr(i) == "'" else ord(" ") for i in range(256))
# Where a text may be cut: tokens and line breaks stay whole.
_CUT = re.compile(r"(?<=\S)(?<!<br)\s", re.IGNORECASE)


def tokenize(text: str) -> list[str]:
    """Lower-case words: letters and digits, with apostrophes inside; `<br />` and everything else separates.

    >>> tokenize("It's <br />GOOD, isn't it? 'Yes': 10/10")
    ["it's", 'good', "isn't", 'it', 'yes', '10', '10']
    """
    text = _LINE_BREAK.sub(" ", text.lower())
    try:
        return _latin_words(text)
    except UnicodeEncodeError:
        return _TOKEN.findall(text)


def _latin_words(text: str) -> list[str]:
    """What `_TOKEN` finds, in a third of the time: most of what reading texts takes is this.

    Raises: UnicodeEncodeError where the text has other letters than Latin-1's.
    """
    if "'" in text:
        text = _LOOSE_APOSTROPHE.sub(" ", text)
    return text.encode("latin-1").translate(_WORDS_AND_SPACES).decode("latin-1").split()


def first_words(text: str, most: int | None = None) -> Iterator[list[str]]:
    """The first `most` words of a text, or all, as `tokenize` makes them: a list a piece, for they are many times it.

    >>> list(first_words("a b c d", 2))
    [['a', 'b']]
    """
    begin, left = 0, sys.maxsize if most is None else most
    while begin < len(text) and left:
        cut = _CUT.search(text, begin + PIECE)
        end = cut.end() if cut else len(text)
        words = tokenize(text[begin:end])[:left]
        yield words
        begin, left = end, left - len(words)


@dataclass(frozen=True)
class TextEncoder(BaseEncoder):
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
            for words in first_words(text):
                counts.update(words)
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
            raise self.refusal(source)
        matrix = self._padded(texts) if self.kind == "padded-term-frequency" else self._counted(texts)
        return unit_norm_rows(matrix) if self.unit_rows else matrix

    def _counted(self, texts: Iterable[str]) -> sp.csr_array:
        index = {word: j for j, word in enumerate(self.vocabulary)}
        lengths = array("q")

        def ids() -> Iterator[Sequence[int]]:
            for text in texts:
                known, length = array("i"), 0
                for words in first_words(text, self.max_tokens):
                    length += len(words)
                    known.extend([index[word] for word in words if word in index])
                lengths.append(length)
                yield known

        matrix = count_matrix(ids(), self.num_features)
        if self.kind == "binary":
            matrix.data[:] = 1
        if self.kind == "term-frequency":
            for begin in range(0, len(lengths), ROWS_AT_ONCE):
                ends = matrix.indptr[begin : begin + ROWS_AT_ONCE + 1]
                of_rows = np.array(lengths[begin : begin + ROWS_AT_ONCE], np.float32)
                matrix.data[ends[0] : ends[-1]] /= np.repeat(of_rows, np.diff(ends))
        return matrix

    def _padded(self, texts: Iterable[str]) -> sp.csr_array:
        assert self.max_tokens is not None
        most = self.max_tokens
        index = _Columns((word, j) for j, word in enumerate(self.vocabulary, start=NUM_RESERVED))

        def ids() -> Iterator[Sequence[int]]:
            for text in texts:
                known = [START]
                for words in first_words(text, most - 1):
                    known += map(index.__getitem__, words)
                yield known + [PAD] * (most - len(known))

        matrix = count_matrix(ids(), self.num_features)
        matrix.data /= most
        return matrix


class _Columns(dict):
    """Words to columns; mapping through it is several times faster than asking for each word whether it is there."""

    def __missing__(self, word: str) -> int:
        return OUT_OF_VOCABULARY


def count_matrix(ids: Iterable[Sequence[int]], num_columns: int) -> sp.csr_array:
    """How often each id occurs in each list: (number of lists, num_columns) float32.

    >>> count_matrix([[0, 2, 2], []], 3).toarray()
    array([[1., 0., 2.],
           [0., 0., 0.]], dtype=float32)
    """
    columns, counts, indptr = array("i"), array("f"), array("q", [0])
    lists = iter(ids)
    while rows := list(islice(lists, ROWS_AT_ONCE)):
        starts = np.cumsum([0, *map(len, rows)])
        found = np.concatenate([np.asarray(row, np.int32) for row in rows])
        block = sp.csr_array((np.ones(len(found), np.float32), found, starts), shape=(len(starts) - 1, num_columns))
        block.sum_duplicates()
        indptr.extend((block.indptr[1:] + len(columns)).tolist())
        columns.frombytes(block.indices.astype(np.int32).tobytes())
        counts.frombytes(block.data.tobytes())
    # Of one type with the columns, as far as that holds them: SciPy would copy the columns to the other.
    ends = np.frombuffer(indptr, np.int64).astype(np.int32 if indptr[-1] < 2**31 else np.int64)
    parts = (np.frombuffer(counts, np.float32), np.frombuffer(columns, np.int32), ends)
    return sp.csr_array(parts, shape=(len(ends) - 1, num_columns))


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
