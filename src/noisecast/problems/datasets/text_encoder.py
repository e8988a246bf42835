"""Texts as bags of words over a fixed vocabulary."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pandas as pd
import scipy.sparse as sp

from noisecast.problems.datasets.columns import texts_of
from noisecast.problems.datasets.contents import decode, read_bytes
from noisecast.problems.datasets.dataset import DataError, Features, first_repeated
from noisecast.problems.datasets.encoder import MOST_UNKNOWN, BaseEncoder, unit_norm_rows
from noisecast.problems.datasets.words import Places, count_words, tokenize, words_of

TextKind = Literal["binary", "count", "term-frequency", "padded-term-frequency"]

# Keras' reserved ids: the first columns of "padded-term-frequency".
PAD, START, OUT_OF_VOCABULARY = 0, 1, 2
NUM_RESERVED = 3
PADDED_LENGTH = 290


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
        counts = count_words(texts)
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
        blocks = self._padded(texts) if self.kind == "padded-term-frequency" else self._counted(texts)
        matrix = stacked(blocks, self.num_features)
        return unit_norm_rows(matrix) if self.unit_rows else matrix

    def doubts(self, features: Features) -> tuple[str, ...]:
        """One if more than half of the texts have no word of the vocabulary.

        >>> encoder = TextEncoder("binary", ("good", "bad"))
        >>> encoder.doubts(encoder.encode(["Bonne soirée", "gut"]))
        ('2 of 2 texts have no word of the vocabulary: are they in its language, and in this column?',)
        """
        matrix, num_texts = sp.csr_array(features), features.shape[0]
        is_word = matrix.indices >= self.num_features - len(self.vocabulary)
        found = np.unique(np.repeat(np.arange(num_texts), np.diff(matrix.indptr))[is_word])
        if (without := num_texts - len(found)) <= MOST_UNKNOWN * num_texts:
            return ()
        return (
            f"{without:,} of {num_texts:,} texts have no word of the vocabulary: are they in its language, and in this "
            "column?",
        )

    def _counted(self, texts: Iterable[str]) -> Iterator[sp.csr_array]:
        columns = Places(self.vocabulary)
        for words, lengths in words_of(texts, self.max_tokens):
            found = columns.of(words)
            is_known = found >= 0
            ends = np.concatenate([[0], np.cumsum(is_known)])[np.cumsum([0, *lengths])]
            block = self._block(np.ones(ends[-1], np.float32), found[is_known], ends)
            if self.kind == "binary":
                block.data[:] = 1
            if self.kind == "term-frequency":
                block.data /= np.repeat(lengths.astype(np.float32), np.diff(block.indptr))
            yield block

    def _padded(self, texts: Iterable[str]) -> Iterator[sp.csr_array]:
        assert self.max_tokens is not None
        most, columns = self.max_tokens, Places(self.vocabulary)
        for words, lengths in words_of(texts, most - 1):
            found = columns.of(words)
            ids = np.where(found < 0, OUT_OF_VOCABULARY, found + NUM_RESERVED)
            # Each text begins with START and with all its PADs as one entry.
            begins = np.repeat(np.cumsum(lengths) - lengths, 2)
            ids = np.insert(ids, begins, np.tile([START, PAD], len(lengths)))
            starts_and_pads = np.stack([np.ones(len(lengths)), most - 1 - lengths], axis=1)
            counts = np.insert(np.ones(len(found), np.float32), begins, starts_and_pads.ravel())
            block = self._block(counts, ids, np.cumsum([0, *(2 + lengths)]))
            block.eliminate_zeros()
            block.data /= most
            yield block

    def _block(self, counts: np.ndarray, ids: np.ndarray, ends: np.ndarray) -> sp.csr_array:
        """Counts of the same id in one text added up."""
        block = sp.csr_array((counts, ids, ends), shape=(len(ends) - 1, self.num_features))
        block.sum_duplicates()
        return block


def stacked(blocks: Iterable[sp.csr_array], num_columns: int) -> sp.csr_array:
    """All rows in one matrix, float32; in little more memory than it takes.

    >>> stacked([sp.csr_array([[1.0, 2.0]]), sp.csr_array([[0.0, 0.0], [3.0, 0.0]])], 2).toarray()
    array([[1., 2.],
           [0., 0.],
           [3., 0.]], dtype=float32)
    """
    columns, values, ends = array("i"), array("f"), array("q", [0])
    for block in blocks:
        ends.frombytes((block.indptr[1:].astype(np.int64) + len(columns)).tobytes())
        columns.frombytes(block.indices.astype(np.int32).tobytes())
        values.frombytes(block.data.astype(np.float32).tobytes())
    # Of one type with the columns, as far as that holds them: SciPy would copy the columns to the other.
    indptr = np.frombuffer(ends, np.int64).astype(np.int32 if ends[-1] < 2**31 else np.int64)
    parts = (np.frombuffer(values, np.float32), np.frombuffer(columns, np.int32), indptr)
    return sp.csr_array(parts, shape=(len(indptr) - 1, num_columns))


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
