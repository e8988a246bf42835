"""Texts as words: lower-case letters and digits. Arrow cuts and counts them, thousands of texts at a time."""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

arrow: Any = pyarrow.compute  # its functions are made when it is imported, where no type checker sees them

PIECE = 2**20  # characters of a long text that are looked at at once
TEXTS_AT_ONCE, CHARACTERS_AT_ONCE = 4096, 2**22

_TOKEN = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_LINE_BREAK = re.compile(r"<br\s*/?>")
_LOOSE_APOSTROPHE = re.compile(r"'(?:(?<![^\W_]')|(?![^\W_]))")  # nothing of a word before it, or nothing after
# What is left of a text in Latin letters, to be cut at spaces.
_WORDS_AND_SPACES = bytes(i if chr(i).isalnum() or chr(i) == "'" else ord(" ") for i in range(256))
# Where a text may be cut: tokens and line breaks stay whole.
_CUT = re.compile(r"(?<=\S)(?<!<br)\s", re.IGNORECASE)


def tokenize(text: str) -> list[str]:
    """Lower-case words: letters and digits, with apostrophes inside; `<br />` and everything else separates.

    >>> tokenize("It's <br />GOOD, isn't it? 'Yes': 10/10")
    ["it's", 'good', "isn't", 'it', 'yes', '10', '10']
    """
    return _spaced(text).split()


class Words(NamedTuple):
    """The words of some texts.

    Args:
      words: of one text after the other; Arrow strings.   lengths: how many each text has.
    """

    words: pa.LargeStringArray
    lengths: np.ndarray


def words_of(texts: Iterable[str], most: int | None = None) -> Iterator[Words]:
    """The first `most` words of every text, or all, as `tokenize` makes them, of some texts at a time.

    >>> [(words.to_pylist(), lengths.tolist()) for words, lengths in words_of(["a b c", "", "d"], 2)]
    [(['a', 'b', 'd'], [2, 0, 1])]
    """
    for some in _some(texts):
        spaced = pa.array([_spaced(text, most) for text in some], pa.large_string())
        lists = arrow.ascii_split_whitespace(spaced)
        words, lengths = lists.flatten(), arrow.list_value_length(lists).to_numpy().astype(np.int64)
        is_empty = arrow.equal(spaced, "").to_numpy(zero_copy_only=False)  # cut into one word of no letters
        if is_empty.any():
            words, lengths = words.filter(arrow.not_equal(words, "")), lengths - is_empty
        if most is not None and lengths.max() > most:
            place = np.arange(len(words)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            words, lengths = words.filter(pa.array(place < most)), np.minimum(lengths, most)
        yield Words(words, lengths)


def count_words(texts: Iterable[str]) -> Counter[str]:
    """How often each word occurs in all texts.

    >>> count_words(["b a a", "c b"])
    Counter({'b': 2, 'a': 2, 'c': 1})
    """
    counts = Counter()
    for words, _ in words_of(texts):
        found = arrow.value_counts(words)
        counts.update(dict(zip(found.field("values").to_pylist(), found.field("counts").to_pylist(), strict=True)))
    return counts


class Places:
    """Words to their places in a list of words.

    >>> Places(["b", "a"]).of(pa.array(["a", "x"], pa.large_string()))
    array([ 1, -1], dtype=int32)
    """

    def __init__(self, words: Iterable[str]):
        # What UTF-8 has no bytes for is in no text; "?" is no word.
        self._words = pa.array((word.encode(errors="replace").decode() for word in words), pa.large_string())

    def of(self, words: pa.LargeStringArray) -> np.ndarray:
        """The place of each, -1 for what is not in the list; (n,) int32."""
        return arrow.fill_null(arrow.index_in(words, self._words), -1).to_numpy()


def _some(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts, in their order, none much longer than it has to be."""
    some, characters = [], 0
    for text in texts:
        some.append(text)
        characters += len(text)
        if len(some) == TEXTS_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            yield some
            some, characters = [], 0
    if some:
        yield some


def _spaced(text: str, most: int | None = None) -> str:
    """Its words, all or at least the first `most`, with spaces between and none around."""
    pieces, begin, left = [], 0, sys.maxsize if most is None else most
    while begin < len(text) and left > 0:
        cut = _CUT.search(text, begin + PIECE)
        end = cut.end() if cut else len(text)
        pieces.append(_spaced_piece(text[begin:end]))
        begin, left = end, left - (len(pieces[-1].split()) if cut else 0)
    return " ".join(pieces).strip()


def _spaced_piece(text: str) -> str:
    """For Latin letters in a third of the time that the regular expression takes: reading texts is mostly this."""
    text = _LINE_BREAK.sub(" ", text.lower())
    try:
        spaced = _LOOSE_APOSTROPHE.sub(" ", text) if "'" in text else text
        return spaced.encode("latin-1").translate(_WORDS_AND_SPACES).decode("latin-1")
    except UnicodeEncodeError:
        return " ".join(_TOKEN.findall(text))
