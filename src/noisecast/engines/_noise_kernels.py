"""Words and normals of a tile, (rows, lanes), from the generator of a group: AES, Threefry where the processor has no
AES, or ChaCha20 where secure noise is asked for.

A row's words depend on its number, its lane's key and number in the run, the step and the purpose, and on nothing else:
not on how many lanes lie beside it, nor on which way vectors lie.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.extending import overload

from noisecast.compiled import INLINE, INSIDE, njit, prefetch, wide_vectors
from noisecast.privacy import secure_noise
from noisecast.privacy.aes_noise import AES, VECTOR, words_of_few, words_of_key, words_of_lanes
from noisecast.privacy.counter_noise import normal_pair, threefry, threefry_twice

u32 = np.uint32

# Rows whose noise is drawn at once, and the numbers that they may hold beyond the fewest rows.
TILE, TILE_OF_FEW_LANES, FEWEST_ROWS, MOST_NUMBERS = 256, 2048, 64, 2**15
PAIRED = 16  # rows so far apart in a group of twice as many are a pair of Box and Muller's
ROOM = 8 * VECTOR  # numbers behind a tile's words, for copies of whole vectors
BLOCKS = 16  # of Threefry that lie side by side: four words each make the noise of 64 rows, what a tile is made of


def tile_of(lanes: int) -> int:
    """Rows of a tile: its noise stays in the cache's second level, and what it costs to begin is spread."""
    if lanes < VECTOR:
        return TILE_OF_FEW_LANES
    return min(TILE, max(FEWEST_ROWS, MOST_NUMBERS // lanes // FEWEST_ROWS * FEWEST_ROWS))


# --- Of a cipher ------------------------------------------------------------------------------------------------------


class Cipher(NamedTuple):
    """ChaCha20's working memory, (16, tile / 16 * lanes) uint32 each."""

    start: np.ndarray  # states, of which kernels set the counter
    words: np.ndarray


# A group has a `Cipher` or None, and kernels are compiled for either: few use a cipher, and it takes long to compile.


def ciphers(cipher: Any) -> bool:
    """Whether noise is a cipher's; known when kernels are compiled."""
    raise NotImplementedError("compiled code only")


def _cipher_tile(words, first, count, step, purpose, cipher) -> bool:
    """words[:count]: of the rows number first, first + 1, ..., if there is a cipher; whether there is."""
    raise NotImplementedError("compiled code only")


def _cipher_block(block, number, step, purpose, cipher) -> bool:
    """block[:16]: each lane's block of that number, if there is a cipher; whether there is."""
    raise NotImplementedError("compiled code only")


@overload(ciphers, jit_options=INLINE)
def _(cipher):
    if isinstance(cipher, types.NoneType):
        return lambda cipher: False
    return lambda cipher: True


@overload(_cipher_tile, jit_options=INLINE)
def _(words, first, count, step, purpose, cipher):
    if isinstance(cipher, types.NoneType):
        return lambda words, first, count, step, purpose, cipher: False
    return lambda words, first, count, step, purpose, cipher: _chacha_tile(words, first, count, step, purpose, cipher)


@overload(_cipher_block, jit_options=INLINE)
def _(block, number, step, purpose, cipher):
    if isinstance(cipher, types.NoneType):
        return lambda block, number, step, purpose, cipher: False
    return lambda block, number, step, purpose, cipher: _chacha_block(block, number, step, purpose, cipher)


@njit(**INSIDE)
def _chacha_tile(words, first, count, step, purpose, cipher):
    """Row 16 b + w has word w of block b."""
    size, width = -(-count // (2 * PAIRED)) * 2 * PAIRED, words.shape[1]
    _encipher(first // secure_noise.WORDS, size // secure_noise.WORDS, step, purpose, cipher, width)
    for row in range(size):
        b, w = row // secure_noise.WORDS, row % secure_noise.WORDS
        out, found = words[row], cipher.words[w, b * width : (b + 1) * width]
        for lane in range(width):
            out[lane] = found[lane]
    return True


@njit(**INSIDE)
def _chacha_block(block, number, step, purpose, cipher):
    width = block.shape[1]
    _encipher(np.int64(number), np.int64(1), step, purpose, cipher, width)
    for w in range(secure_noise.WORDS):
        for lane in range(width):
            block[w, lane] = cipher.words[w, lane]
    return True


@njit(**INSIDE)
def _encipher(block, blocks, step, purpose, cipher, width):
    """cipher.words[w, b * width + lane]: word w of each lane's block number block + b, b < blocks."""
    for b in range(blocks):
        for i in range(b * width, (b + 1) * width):
            cipher.start[12, i], cipher.start[14, i], cipher.start[15, i] = u32(block + b), step, purpose
    secure_noise.chacha20(cipher.start, cipher.words, blocks * width)


# --- Words ------------------------------------------------------------------------------------------------------------


# Copied by Numba, as are its like, so that no call need count who holds `lanes` and `scratch`, two dozen arrays.
@numba.njit(inline="always")
def word_tile(first, count, lanes, step, purpose, scratch):
    """scratch.words[:count]: 32 bits of the rows number first, first + 1, ...; a tile's size divides `first`.

    Rows up to the next multiple of 64 may be written, too, for `normal_tile`.
    """
    if not _cipher_tile(scratch.words, first, count, step, purpose, scratch.cipher):
        if AES:
            _aes_tile(
                scratch.words, scratch.roomy, first, count, lanes.keys, lanes.lane,
                scratch.counters, scratch.ramp, step, purpose,
            )  # fmt: skip
        else:
            _threefry_tile(scratch.words, scratch.column, first, count, lanes.keys, lanes.lane, step, purpose)


@njit(**INSIDE)
def _aes_tile(words, roomy, first, count, keys, lane_of, counters, ramp, step, purpose):
    """Row 4 b + w has word w of block b. A vector holds a block of each of 16 lanes, or some blocks of fewer lanes."""
    wide_vectors()
    size, lanes = -(-count // (2 * PAIRED)) * 2 * PAIRED, len(lane_of)
    if lanes == 1:
        words_of_key(roomy, ramp, size // VECTOR, keys, 0, lane_of[0], u32(first // 4), step, purpose)
    elif lanes < VECTOR:
        _aes_blocks_of_few(roomy, size // 4, keys, counters, lanes, u32(first // 4), step, purpose)
    else:
        _aes_blocks(words, size // 4, keys, counters, lanes, u32(first // 4), step, purpose)


@njit(**INSIDE)
def _aes_blocks_of_few(roomy, blocks, keys, counters, lanes, number, step, purpose):
    """roomy[: 4 blocks lanes]: the words of block number + b of each of 2 to 15 lanes, b < blocks."""
    wide_vectors()
    for b in range(0, blocks, VECTOR // lanes):
        words_of_few(roomy, 4 * b * lanes, counters, keys, lanes, u32(0), u32(number + u32(b)), step, purpose)


@njit(**INLINE)
def _aes_blocks(words, blocks, keys, counters, lanes, number, step, purpose):
    """words[4 b : 4 b + 4]: the words of block number + b of each of at least 16 lanes, b < blocks.

    Lanes outside, so that their round keys stay near. Some are drawn twice if 16 does not divide how many there are.
    """
    for lane in range(0, lanes, VECTOR):
        for b in range(blocks):
            at = min(lane, lanes - VECTOR)
            words_of_lanes(words, 4 * b, counters, keys, at, u32(0), u32(number + u32(b)), step, purpose)


@numba.njit(inline="always")
def words_while_fetching(first, count, lanes, step, purpose, scratch, table):
    """`word_tile`, while those rows of a flat table come from memory, where AES draws along lanes."""
    if AES and not ciphers(scratch.cipher) and len(lanes.lane) >= VECTOR:
        _aes_tile_while_fetching(scratch.words, first, count, lanes.keys, scratch.counters, step, purpose, table)
    else:
        word_tile(first, count, lanes, step, purpose, scratch)


@njit(**INSIDE)
def _aes_tile_while_fetching(words, first, count, keys, counters, step, purpose, table):
    """As `_aes_blocks`, four lines of the table for every sixteen blocks: as many numbers as there are words."""
    wide_vectors()
    size, lanes = -(-count // (2 * PAIRED)) * 2 * PAIRED, words.shape[1]
    number, line = u32(first // 4), first * lanes
    for lane in range(0, lanes, VECTOR):
        for b in range(size // 4):
            for place in range(line, line + 4 * VECTOR, VECTOR):
                prefetch(table, place)
            line += 4 * VECTOR
            at = min(lane, lanes - VECTOR)
            words_of_lanes(words, 4 * b, counters, keys, at, u32(0), u32(number + u32(b)), step, purpose)


@njit(**INSIDE)
def _threefry_tile(words, column, first, count, keys, lane_of, step, purpose):
    """Row 64 t + 16 w + i has word w of block 16 t + i, so that blocks of counters fill vectors along rows, too."""
    wide_vectors()
    k0, k1, k2, k3 = keys[0], keys[1], keys[2], keys[3]
    whole = len(lane_of) - len(lane_of) % VECTOR
    for row in range(0, count, 4 * BLOCKS):
        block = (first + row) // 4
        for i in range(0, BLOCKS, 2):
            for lane in range(whole):
                a, b, c, d, e, f, g, h = threefry_twice(
                    lane_of[lane], u32(block + i), u32(block + i + 1), step, purpose,
                    k0[lane], k1[lane], k2[lane], k3[lane],
                )  # fmt: skip
                words[row + i, lane], words[row + BLOCKS + i, lane] = a, b
                words[row + i + 1, lane], words[row + BLOCKS + i + 1, lane] = e, f
                words[row + 2 * BLOCKS + i, lane], words[row + 3 * BLOCKS + i, lane] = c, d
                words[row + 2 * BLOCKS + i + 1, lane], words[row + 3 * BLOCKS + i + 1, lane] = g, h
        for lane in range(whole, len(lane_of)):
            to = words.reshape(-1)[row : row + 4 * BLOCKS] if len(lane_of) == 1 else column
            for i in range(BLOCKS):
                to[i], to[BLOCKS + i], to[2 * BLOCKS + i], to[3 * BLOCKS + i] = threefry(
                    lane_of[lane], u32(block + i), step, purpose, k0[lane], k1[lane], k2[lane], k3[lane]
                )
            if len(lane_of) > 1:
                for i in range(4 * BLOCKS):
                    words[row + i, lane] = column[i]


# --- Normals ----------------------------------------------------------------------------------------------------------


@numba.njit(inline="always")
def normal_tile(first, count, lanes, step, purpose, scratch):
    """scratch.normals[:count]: N(0, 1) of the rows number first, first + 1, ...; as `word_tile`."""
    word_tile(first, count, lanes, step, purpose, scratch)
    _pair(scratch.words, scratch.normals, count)


@njit(**INSIDE)
def _pair(words, normals, count):
    """Rows i and i + PAIRED of a group are the two normals of their two words."""
    wide_vectors()
    all_words, all_normals, size = words.reshape(-1), normals.reshape(-1), PAIRED * words.shape[1]
    for begin in range(0, count * words.shape[1], 2 * size):
        one, two = all_words[begin : begin + size], all_words[begin + size : begin + 2 * size]
        to_one, to_two = all_normals[begin : begin + size], all_normals[begin + size : begin + 2 * size]
        for at in range(size):
            to_one[at], to_two[at] = normal_pair(one[at], two[at])


# --- More words of a few rows -----------------------------------------------------------------------------------------


@njit(**INSIDE)
def word_block(number, keys, lane_of, step, purpose, block, column, counters, ramp, cipher):
    """block[:words]: the block of each lane whose counter ends in (number, step, purpose); how many words."""
    if _cipher_block(block, number, step, purpose, cipher):
        return secure_noise.WORDS
    _fast_block(block, column, number, keys, lane_of, counters, ramp, step, purpose)
    return 4


@njit(**INSIDE)
def _fast_block(block, column, number, keys, lane_of, counters, ramp, step, purpose):
    wide_vectors()
    lanes = len(lane_of)
    if not AES:
        k0, k1, k2, k3 = keys[0], keys[1], keys[2], keys[3]
        for lane in range(lanes):
            block[0, lane], block[1, lane], block[2, lane], block[3, lane] = threefry(
                lane_of[lane], number, step, purpose, k0[lane], k1[lane], k2[lane], k3[lane]
            )
    elif lanes >= VECTOR:
        _aes_blocks(block, np.int64(1), keys, counters, lanes, number, step, purpose)
    elif lanes > 1:
        _aes_blocks_of_few(block.reshape(-1), np.int64(1), keys, counters, lanes, number, step, purpose)
    else:
        words_of_key(column, ramp, 1, keys, 0, lane_of[0], number, step, purpose)
        block[0, 0], block[1, 0], block[2, 0], block[3, 0] = column[0], column[1], column[2], column[3]


@njit(**INSIDE)
def word_blocks_of_one(numbers, count, lanes, step, purpose, scratch):
    """scratch.blocks[4 i : 4 i + 4]: `word_block` of numbers[i], i < count, of the only lane; not from ChaCha20."""
    wide_vectors()
    keys, own, blocks = lanes.keys, lanes.lane[0], scratch.blocks
    if AES:
        numbered = scratch.numbered
        for i in range(count):
            numbered[4 * i + 1] = numbers[i]
        words_of_key(blocks, numbered, -(-4 * count // VECTOR), keys, 0, own, u32(0), step, purpose)
    else:
        k0, k1, k2, k3 = keys[0, 0], keys[1, 0], keys[2, 0], keys[3, 0]
        for i in range(count):
            blocks[4 * i], blocks[4 * i + 1], blocks[4 * i + 2], blocks[4 * i + 3] = threefry(
                own, numbers[i], step, purpose, k0, k1, k2, k3
            )
