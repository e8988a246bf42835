"""How the rows of batches are drawn, for every sampler: blocks of steps, each from a keyed generator of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from noisecast.privacy.noise import SecureKey

STEPS_PER_BLOCK = 256  # steps drawn from one generator, so that any range of steps can be drawn on its own


class Batches(NamedTuple):
    """Batches of static shape. Padded entries have mask False (and index 0).

    Args:
      indices: (steps, width) int32 rows of the data set.   mask: (steps, width) bool, True where a row was drawn.
    """

    indices: NDArray[np.int32]
    mask: NDArray[np.bool_]


def round_up(width: int) -> int:
    """The next multiple of 8: few shapes, so that few programs are compiled.

    Args:
      width: >= 0.
    Returns: at least width.

    >>> round_up(1), round_up(8)
    (8, 8)
    """
    return -(-width // 8) * 8


def check_range(start: int, stop: int) -> None:
    """Whether this is a range of steps.

    Args:
      start, stop: of steps.
    Raises: ValueError unless 0 <= start <= stop.

    >>> check_range(0, 3)
    """
    if not 0 <= start <= stop:
        raise ValueError(f"Expected 0 <= start <= stop, got start {start} and stop {stop}.")


class _PhiloxKey(ISeedSequence):
    """Philox's key as NumPy asks for seeds; `Philox(key=...)` first asks the system for a seed that it then forgets."""

    def __init__(self, digest: bytes) -> None:
        self._words = np.frombuffer(digest[:16], ">u8")[::-1].astype(np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        assert (n_words, dtype) == (2, np.uint64)
        return self._words


def generator(key: bytes, what: str, number: int) -> np.random.Generator:
    """The generator of a block of steps, or of an epoch, keyed by a SHA-256: Philox, or ChaCha20 for a `SecureKey`.

    Args:
      key: of this run's batches.   what: "block" or "epoch".   number: of it; >= 0.
    Returns: the same generator for the same arguments.

    >>> generator(b"key", "block", 0).bytes(4) == generator(b"key", "block", 0).bytes(4)
    True
    """
    digest = hashlib.sha256(key + b"|" + what.encode() + number.to_bytes(8, "big")).digest()
    if isinstance(key, SecureKey):
        from randomgen import ChaCha

        cipher: Any = ChaCha(key=int.from_bytes(digest, "big"), rounds=20)
        return np.random.Generator(cipher)
    seed: Any = _PhiloxKey(digest)
    return np.random.Generator(np.random.Philox(seed))


def batches_by_block(
    key: bytes,
    start: int,
    stop: int,
    draw_sizes: Callable[[np.random.Generator], NDArray],
    num_rows: int,
    width: int,
) -> Batches:
    """Uniform subsets of the sizes that draw_sizes(generator) gives, drawn a block of steps at a time.

    Args:
      key: of this run's batches.   start, stop: of the steps, 0 <= start <= stop.
      draw_sizes: generator -> sizes of a block's batches; (STEPS_PER_BLOCK,).   num_rows: of the data set.
      width: columns; more where a batch is larger.
    Returns: Batches of stop - start steps.
    Raises: ValueError for a range, or a number of rows, that there is not.

    >>> batches_by_block(b"key", 0, 2, lambda rng: np.full(STEPS_PER_BLOCK, 3), 10, 8).mask.sum(axis=1).tolist()
    [3, 3]
    """
    check_range(start, stop)
    if not 0 <= num_rows < 2**31 - 2**20:
        raise ValueError(f"Expected 0 <= num_rows < 2^31 - 2^20 (rows are int32), got {num_rows}.")
    pieces = []
    for block in range(start // STEPS_PER_BLOCK, -(-stop // STEPS_PER_BLOCK)):
        rng = generator(key, "block", block)
        first = block * STEPS_PER_BLOCK
        subsets = uniform_subsets(rng, draw_sizes(rng), num_rows, stop - first)
        pieces.append(subsets[max(start - first, 0) : stop - first])
    # A subset row holds its members in ascending order, then numbers >= num_rows.
    width = max([width, *(round_up(int((piece < num_rows).sum(axis=1).max(initial=0))) for piece in pieces)])
    indices, mask = np.zeros((stop - start, width), np.int32), np.zeros((stop - start, width), bool)
    step = 0
    for piece in pieces:
        piece = piece[:, :width]
        rows, columns = slice(step, step + len(piece)), slice(0, piece.shape[1])
        mask[rows, columns] = piece < num_rows
        indices[rows, columns] = np.where(mask[rows, columns], piece, 0)
        step += len(piece)
    return Batches(indices, mask)


def uniform_subsets(
    rng: np.random.Generator, sizes: NDArray, num_rows: int, needed: int | None = None
) -> NDArray[np.int32]:
    """Row s: a uniform subset of {0..num_rows-1} of size sizes[s], ascending, padded with numbers >= num_rows.

    Only the first `needed` rows are sure to be drawn; how many are asked for changes none of them.

    Members are drawn with replacement and all but one of each group of equal ones are drawn again until none are equal.
    The procedure treats all rows of the data alike, so every subset of the size is equally likely: the law is exact.

    Args:
      rng: of the block.   sizes: (steps,) integers, 0 <= size <= num_rows.   num_rows: of the data set.
      needed: rows that will be looked at; None: all.
    Returns: (steps, largest size) int32.

    >>> uniform_subsets(np.random.default_rng(0), np.array([2, 0]), 2).tolist()
    [[0, 1], [2, 3]]
    """
    columns = np.arange(int(sizes.max(initial=0)), dtype=np.int32)
    padded = columns >= sizes[:, None]
    if len(columns) > num_rows // 8:  # duplicates would be many: choose each row's subset on its own
        chosen = np.tile(num_rows + columns, (len(sizes), 1))
        for row, size in zip(chosen[:needed], sizes):
            row[:size] = rng.choice(num_rows, size, replace=False, shuffle=False)
        return np.sort(chosen, axis=1)
    subsets = rng.integers(0, max(num_rows, 1), padded.shape, dtype=np.int32)
    subsets = np.sort(np.where(padded, num_rows + columns, subsets), axis=1)
    while True:
        row, column = np.nonzero(subsets[:, 1:] == subsets[:, :-1])
        if len(row) == 0:
            return subsets
        subsets[row, column] = rng.integers(0, num_rows, len(row), dtype=np.int32)
        touched = np.unique(row)
        subsets[touched] = np.sort(subsets[touched], axis=1)
