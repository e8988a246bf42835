"""ChaCha20 words for compiled loops: the cryptographic choice beside `counter_noise`, asked for by `secure_noise`.

ChaCha20 (Bernstein, 2008; RFC 8439) is a stream cipher: with a secret key of 256 bits, nobody is known to tell its
words from coin tosses in any feasible time, so seeing parts of the noise says nothing about the rest of it. A block of
sixteen words is a pure function of (key, counter), as Threefry's four are. `docs/engines.md` has what that costs.

What it does not mend: float32 Box-Muller still ends at 6.8 standard deviations, and the low bits of a float sum can
still leak (Mironov, CCS 2012). Keys come from `noise.key_for`. Needs Numba, so only engines import it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from noisecast.compiled import FAST, njit, wide_vectors
from noisecast.privacy.counter_noise import normal_pair
from noisecast.privacy.noise import key_words

u32 = np.uint32

WORDS = 16  # a block's
BESIDE = 16  # blocks that are computed side by side
COLUMNS = 64  # blocks that are computed at once for whole arrays of normals


@njit(**FAST)
def chacha20(start, words, count):
    """ChaCha20: words[:, i] = the block of the state start[:, i], i < count.

    Columns beyond `count` may be written, too: sixteen blocks are computed side by side, and so some twice. Not in
    place, therefore.

    Args:
      start: states; (16, n) uint32, contiguous, n >= 16.   words: written to; as start.   count: <= n.
    Raises: ValueError for arrays of other shapes.
    """
    wide_vectors()
    most = start.shape[1] - BESIDE
    if most < 0 or start.shape[0] != WORDS or words.shape != start.shape:
        raise ValueError("Expected states and words of sixteen rows, and of the same sixteen columns or more.")
    for first in range(0, count, BESIDE):
        _blocks(start, words, min(first, most))


# --- The cipher, in LLVM's language: loops over sixteen rows compile slowly, and their state stays in memory ---------

_WORD, _INDEX = ir.IntType(32), ir.IntType(64)
_WORDS = ir.VectorType(_WORD, BESIDE)
_QUARTERS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))  # columns, then diagonals
_QUARTERS += ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
_DOUBLE_ROUNDS = 10


def _sixteen_blocks(typing_context, start, words, at):
    """_blocks(start, words, at): words[:, at : at + 16]; both contiguous."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tables = [context.make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 1)]
        assert all(kind.layout == "C" and kind.dtype == types.uint32 for kind in signature.args[:2])
        _, width = cgutils.unpack_tuple(builder, tables[0].shape)

        def place(table: Any, row: int) -> Any:
            number = builder.add(arguments[2], builder.mul(width, ir.Constant(_INDEX, row)))
            return builder.bitcast(builder.gep(table.data, [number]), _WORDS.as_pointer())

        first = [builder.load(place(tables[0], row), align=4) for row in range(WORDS)]
        state = [cgutils.alloca_once_value(builder, vector) for vector in first]  # which LLVM keeps in registers
        with cgutils.for_range(builder, ir.Constant(_INDEX, _DOUBLE_ROUNDS)):
            found = [builder.load(each) for each in state]
            for quarter in _QUARTERS:
                turned = _quarter_round(builder, *(found[row] for row in quarter))
                for row, vector in zip(quarter, turned, strict=True):
                    found[row] = vector
            for each, vector in zip(state, found, strict=True):
                builder.store(vector, each)
        for row, (each, vector) in enumerate(zip(state, first, strict=True)):
            builder.store(builder.add(builder.load(each), vector), place(tables[1], row), align=4)
        return context.get_dummy_value()

    return types.void(start, words, types.intp), generate


def _quarter_round(builder: Any, a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any, Any, Any]:
    a = builder.add(a, b)
    d = _turned(builder, builder.xor(d, a), 16)
    c = builder.add(c, d)
    b = _turned(builder, builder.xor(b, c), 12)
    a = builder.add(a, b)
    d = _turned(builder, builder.xor(d, a), 8)
    c = builder.add(c, d)
    b = _turned(builder, builder.xor(b, c), 7)
    return a, b, c, d


def _turned(builder: Any, words: Any, bits: int) -> Any:
    left, right = (ir.Constant(_WORDS, [count] * BESIDE) for count in (bits, 32 - bits))
    return builder.or_(builder.shl(words, left), builder.lshr(words, right))


_blocks: Any = intrinsic(_sixteen_blocks)


# --- States and normals -----------------------------------------------------------------------------------------------


def first_states(keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The cipher's state before its first block, a column a key: constants, key, a counter of four words, all 0.

    Args:
      keys: (n, 8) uint32, from `key_words`.
    Returns: (16, n) uint32.

    >>> first_states(np.zeros((2, 8), np.uint32)).shape
    (16, 2)
    """
    constants = np.frombuffer(b"expand 32-byte k", "<u4")
    states = np.zeros((WORDS, len(keys)), np.uint32)
    states[:4], states[4:12] = constants[:, None], keys.T
    return states


def standard_normals(keys: Sequence[bytes], first_step: int, num_steps: int, num_params: int) -> NDArray[np.float32]:
    """N(0, 1) numbers of whole steps, from a cipher.

    Args:
      keys: one a run, of its privacy noise alone; 32 bytes each.   first_step, num_steps: >= 0.
      num_params: d; >= 0.
    Returns: (num_steps, len(keys), num_params) float32.

    >>> standard_normals([bytes(32)], 5, 2, 3).shape
    (2, 1, 3)
    """
    states = first_states(np.stack([key_words(key) for key in keys]))
    normals = np.empty((num_steps, len(keys), num_params), np.float32)
    _fill(normals, states, first_step)
    return normals


@njit(**FAST)
def _fill(normals, states, first_step):
    start, words = np.empty((WORDS, COLUMNS), np.uint32), np.empty((WORDS, COLUMNS), np.uint32)
    steps, runs, size = normals.shape
    for run in range(runs):
        for row in range(WORDS):
            start[row] = states[row, run]
        for step in range(steps):
            start[14] = u32(first_step + step)
            out = normals[step, run]
            for first in range(0, size, WORDS * COLUMNS):
                for i in range(COLUMNS):
                    start[12, i] = u32(first // WORDS + i)
                chacha20(start, words, COLUMNS)
                for row in range(0, WORDS, 2):
                    for i in range(COLUMNS):
                        one, two = normal_pair(words[row, i], words[row + 1, i])
                        at = first + row * COLUMNS + i
                        if at < size:
                            out[at] = one
                        if at + COLUMNS < size:
                            out[at + COLUMNS] = two
