"""ChaCha20 words for compiled loops: the cryptographic choice beside `counter_noise`, asked for by `secure_noise`.

ChaCha20 (Bernstein, 2008; RFC 8439) is a stream cipher: with a secret key of 256 bits, nobody is known to tell its
words from coin tosses in any feasible time, so seeing parts of the noise says nothing about the rest of it. A block of
sixteen words is a pure function of (key, counter), as Threefry's four are. It takes about twice the time a word.

What it does not mend: float32 Box-Muller still ends at 6.8 standard deviations, and the low bits of a float sum can
still leak (Mironov, CCS 2012). Keys come from `noise.key_for`. Needs Numba, so only engines import it.
"""

from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray

from noisecast.compiled import FAST, INLINE, wide_vectors
from noisecast.privacy.counter_noise import normal_pair
from noisecast.privacy.noise import key_words

u32 = np.uint32

WORDS = 16  # a block's
COLUMNS = 64  # blocks that are computed side by side


@numba.njit(**INLINE)
def _turned(word, bits):
    return u32(u32(word << u32(bits)) | u32(word >> u32(32 - bits)))


@numba.njit(**INLINE)
def _quarter_round(a, b, c, d):
    a = u32(a + b)
    d = _turned(u32(d ^ a), 16)
    c = u32(c + d)
    b = _turned(u32(b ^ c), 12)
    a = u32(a + b)
    d = _turned(u32(d ^ a), 8)
    c = u32(c + d)
    b = _turned(u32(b ^ c), 7)
    return a, b, c, d


@numba.njit(**FAST)
def chacha20(start, words, count):
    """words[:, i] = the block of the state start[:, i], i < count; (16, n) uint32 each.

    Rounds outside and blocks inside: sixteen rows of n words stay in the cache, and the loop vectorises.
    """
    wide_vectors()
    for row in range(WORDS):
        for i in range(count):
            words[row, i] = start[row, i]
    for _ in range(10):
        for i in range(count):
            x0, x4, x8, x12 = _quarter_round(words[0, i], words[4, i], words[8, i], words[12, i])
            x1, x5, x9, x13 = _quarter_round(words[1, i], words[5, i], words[9, i], words[13, i])
            x2, x6, x10, x14 = _quarter_round(words[2, i], words[6, i], words[10, i], words[14, i])
            x3, x7, x11, x15 = _quarter_round(words[3, i], words[7, i], words[11, i], words[15, i])
            words[0, i], words[5, i], words[10, i], words[15, i] = _quarter_round(x0, x5, x10, x15)
            words[1, i], words[6, i], words[11, i], words[12, i] = _quarter_round(x1, x6, x11, x12)
            words[2, i], words[7, i], words[8, i], words[13, i] = _quarter_round(x2, x7, x8, x13)
            words[3, i], words[4, i], words[9, i], words[14, i] = _quarter_round(x3, x4, x9, x14)
    for row in range(WORDS):
        for i in range(count):
            words[row, i] = u32(words[row, i] + start[row, i])


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
    """N(0, 1) numbers of whole steps, from a cipher: (num_steps, len(keys), num_params) float32.

    Args:
      keys: one a run, of its privacy noise alone; 32 bytes each.   first_step: >= 0.

    >>> standard_normals([bytes(32)], 5, 2, 3).shape
    (2, 1, 3)
    """
    states = first_states(np.stack([key_words(key) for key in keys]))
    normals = np.empty((num_steps, len(keys), num_params), np.float32)
    _fill(normals, states, first_step)
    return normals


@numba.njit(**FAST)
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
