"""AES-128 words for compiled loops, on x86 processors that compute AES themselves: their fast generator.

In counter mode (NIST SP 800-38A) a block of four words is a pure function of (key, counter), as Threefry's are; but AES
(FIPS 197) is a cipher, so nobody is known to tell its words from coin tosses without the key. An instruction makes a
round of up to four blocks, so it is the faster of the two. Elsewhere `AES` is False, and `counter_noise` draws: other
words, the same law.

A counter's words say what is drawn, (lane, number, step, purpose), as those of `counter_noise` do. Words and bytes are
least significant first. Needs Numba, so only engines import it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from noisecast.compiled import processor_features

ROUNDS = 10
VECTOR = 16  # words that are enciphered at once, four blocks

_WORD, _INDEX = ir.IntType(32), ir.IntType(64)
_WORDS, _STATE, _BLOCK = ir.VectorType(_WORD, 16), ir.VectorType(_INDEX, 8), ir.VectorType(_WORD, 4)


AES: bool = "+aes" in processor_features()


# --- The key's schedule -----------------------------------------------------------------------------------------------


def _doubled(byte: int) -> int:
    """Twice a number of GF(2^8), x^8 = x^4 + x^3 + x + 1."""
    return (byte << 1) ^ (0x11B if byte & 0x80 else 0)


def _s_box() -> NDArray[np.uint8]:
    """1 / x in GF(2^8), then an affine map of its bits (FIPS 197, section 5.1.1)."""
    powers = [1]  # of x + 1, which are all numbers but 0
    for _ in range(254):
        powers.append(powers[-1] ^ _doubled(powers[-1]))
    inverse = np.zeros(256, np.uint8)
    inverse[powers] = [powers[-i % 255] for i in range(255)]
    turns = [(inverse << i) | (inverse >> (8 - i)) for i in range(1, 5)]
    return np.bitwise_xor.reduce([inverse, *turns]) ^ np.uint8(0x63)


def round_keys(keys: Sequence[bytes]) -> NDArray[np.uint32]:
    """The eleven round keys of each key (FIPS 197, section 5.2), four words a key beside each other.

    Args:
      keys: the first 16 bytes of each are taken.
    Returns: (11, 4 len(keys)) uint32.

    >>> [f"{word:08x}" for word in round_keys([bytes(range(16))])[10]]
    ['7f1d1113', '174a94e3', '8ba707f3', 'c5302b4d']
    """
    box, constant = _s_box(), 1
    words = list(np.stack([np.frombuffer(key[:16], np.uint8).reshape(4, 4) for key in keys], axis=1))
    for i in range(4, 4 * (ROUNDS + 1)):
        word = words[-1]
        if i % 4 == 0:
            word = box[np.roll(word, -1, axis=1)]
            word[:, 0] ^= constant
            constant = _doubled(constant)
        words.append(words[i - 4] ^ word)
    rounds = np.stack(words).reshape(ROUNDS + 1, 4, len(keys), 4).swapaxes(1, 2)  # (round, key, word, byte)
    return np.ascontiguousarray(rounds).view("<u4").reshape(ROUNDS + 1, -1).astype(np.uint32)


# --- The cipher -------------------------------------------------------------------------------------------------------
# What follows writes LLVM's language, because Numba has no word for these instructions.


def _indices(*places: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(_WORD, len(places)), list(places))


def _cut(builder: Any, state: Any, size: int) -> list[Any]:
    """A state in parts of `size` numbers of 64 bits, as wide as the processor's instruction takes."""
    return [builder.shuffle_vector(state, state, _indices(*range(i, i + size))) for i in range(0, 8, size)]


def _joined(builder: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        both = _indices(*range(2 * parts[0].type.count))
        parts = [builder.shuffle_vector(one, two, both) for one, two in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _enciphered(builder: Any, words: Any, keys: list[Any]) -> Any:
    """Four blocks, sixteen words, under the round keys of each; the same numbers at any width of the instruction."""
    can = processor_features()
    width = 512 if {"+vaes", "+avx512f"} <= can else 256 if {"+vaes", "+avx2"} <= can else 128
    part, suffix = ir.VectorType(_INDEX, width // 64), "" if width == 128 else f".{width}"
    kind = ir.FunctionType(part, [part, part])
    names = ("llvm.x86.aesni.aesenc" + suffix, "llvm.x86.aesni.aesenclast" + suffix)
    middle, last = (cgutils.get_or_insert_function(builder.module, kind, name) for name in names)
    parts = _cut(builder, builder.xor(builder.bitcast(words, _STATE), keys[0]), part.count)
    for number, key in enumerate(keys[1:], 1):
        step = last if number == ROUNDS else middle
        cut = zip(parts, _cut(builder, key, part.count), strict=True)
        parts = [builder.call(step, [state, of_part]) for state, of_part in cut]
    return builder.bitcast(_joined(builder, parts), _WORDS)


def _place(builder: Any, data: Any, at: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())


def _load(builder: Any, data: Any, at: Any, kind: Any = _WORDS) -> Any:
    return builder.load(_place(builder, data, at, kind), align=4)


def _four_times(builder: Any, words: Sequence[Any]) -> Any:
    """Four words, a counter's, as those of each of four blocks."""
    one = ir.Constant(_WORDS, [0] * 16)
    for i, word in enumerate(words):
        one = builder.insert_element(one, word, ir.Constant(_WORD, i))
    return builder.shuffle_vector(one, one, _indices(*(4 * [0, 1, 2, 3])))


def _data(context: Any, builder: Any, signature: Any, arguments: Any, *numbers: int) -> list[Any]:
    return [context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in numbers]


def _sixteen_blocks(context: Any, builder: Any, counters: Any, keys: Any, at: Any, stride: Any, add: Any) -> list[Any]:
    """Word 0, 1, 2 and 3 of the blocks of the counters from number `at` on, each under its own key."""
    blocks = []
    for number in range(4):  # sixteen counters are four vectors
        begin = builder.add(at, ir.Constant(_INDEX, VECTOR * number))
        starts = [builder.add(begin, builder.mul(stride, ir.Constant(_INDEX, i))) for i in range(ROUNDS + 1)]
        of_rounds = [_load(builder, keys, start, _STATE) for start in starts]
        blocks.append(_enciphered(builder, builder.add(_load(builder, counters, begin), add), of_rounds))
    return _transposed(builder, blocks)


def _words_of_lanes(typing_context, words, row, counters, keys, lane, c0, c1, c2, c3):
    """words_of_lanes(words, row, counters, keys, lane, c0, c1, c2, c3): words[row : row + 4, lane : lane + 16].

    Word w of the block of a lane goes to row + w. Arrays are contiguous, (rows, lanes) and (rounds, 4 lanes).

    Args:
      counters: four words a lane, (4 lanes,), to which c0, c1, c2, c3 are added.   keys: from `round_keys`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, counters, keys = _data(context, builder, signature, arguments, 0, 2, 3)
        table = context.make_array(signature.args[0])(context, builder, arguments[0])
        _, lanes = cgutils.unpack_tuple(builder, table.shape)
        row, lane, add = arguments[1], arguments[4], _four_times(builder, arguments[5:])
        at, stride = (builder.mul(number, ir.Constant(_INDEX, 4)) for number in (lane, lanes))
        place = builder.add(builder.mul(row, lanes), lane)
        for word in _sixteen_blocks(context, builder, counters, keys, at, stride, add):
            builder.store(word, _place(builder, words, place, _WORDS), align=4)
            place = builder.add(place, lanes)
        return context.get_dummy_value()

    return types.void(words, types.intp, counters, keys, types.intp, *(4 * [types.uint32])), generate


def _words_of_few(typing_context, words, begin, counters, keys, lanes, c0, c1, c2, c3):
    """words_of_few(words, begin, counters, keys, lanes, c0, c1, c2, c3): 16 // lanes blocks of each of a few lanes.

    Word w of block b of a lane goes to words[begin + (4 b + w) lanes + lane]; sixteen words from there on are written,
    of which later ones write over what is too much. words: (numbers,), contiguous.

    Args:
      counters: (64,), to which c0, c1, c2, c3 are added.   keys: (rounds, 64). Block 0 of every lane, then 1, ...
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, counters, keys = _data(context, builder, signature, arguments, 0, 2, 3)
        begin, lanes, add = arguments[1], arguments[4], _four_times(builder, arguments[5:])
        found = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 5 * VECTOR))  # the last one is read beyond, too
        found = builder.bitcast(found, _WORD.as_pointer())
        zero, stride = ir.Constant(_INDEX, 0), ir.Constant(_INDEX, 4 * VECTOR)
        for w, word in enumerate(_sixteen_blocks(context, builder, counters, keys, zero, stride, add)):
            builder.store(word, _place(builder, found, ir.Constant(_INDEX, VECTOR * w), _WORDS), align=4)
        with cgutils.for_range(builder, builder.udiv(ir.Constant(_INDEX, VECTOR), lanes)) as loop:
            own = builder.mul(loop.index, lanes)
            place = builder.add(begin, builder.mul(own, ir.Constant(_INDEX, 4)))
            for w in range(4):
                row = _load(builder, found, builder.add(own, ir.Constant(_INDEX, VECTOR * w)))
                builder.store(row, _place(builder, words, place, _WORDS), align=4)
                place = builder.add(place, lanes)
        return context.get_dummy_value()

    return types.void(words, types.intp, counters, keys, types.intp, *(4 * [types.uint32])), generate


def _transposed(builder: Any, blocks: list[Any]) -> list[Any]:
    """Word 0 of sixteen blocks, then word 1, 2 and 3 of them."""
    rows = []
    for word in (0, 2):
        chosen = _indices(*(4 * i + word for i in range(8)), *(4 * i + word + 1 for i in range(8)))
        low, high = (builder.shuffle_vector(one, two, chosen) for one, two in (blocks[:2], blocks[2:]))
        for begin in (0, 8):
            both = _indices(*range(begin, begin + 8), *range(16 + begin, 24 + begin))
            rows.append(builder.shuffle_vector(low, high, both))
    return rows


def _words_of_key(typing_context, words, counters, vectors, keys, lane, c0, c1, c2, c3):
    """words_of_key(words, counters, vectors, keys, lane, c0, c1, c2, c3): words[: 16 vectors], under the key of a lane.

    words[4 i : 4 i + 4] is the block of the counter counters[4 i : 4 i + 4] + (c0, c1, c2, c3). words, counters:
    (numbers,), contiguous. keys: (rounds, 4 lanes).
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, counters, keys = _data(context, builder, signature, arguments, 0, 1, 3)
        table = context.make_array(signature.args[3])(context, builder, arguments[3])
        _, stride = cgutils.unpack_tuple(builder, table.shape)
        at, of_rounds = builder.mul(arguments[4], ir.Constant(_INDEX, 4)), []
        for _ in range(ROUNDS + 1):
            key = _load(builder, keys, at, _BLOCK)
            four = builder.shuffle_vector(key, key, _indices(*(4 * [0, 1, 2, 3])))
            of_rounds.append(builder.bitcast(four, _STATE))
            at = builder.add(at, stride)
        add = _four_times(builder, arguments[5:])
        with cgutils.for_range(builder, arguments[2]) as loop:
            place = builder.mul(loop.index, ir.Constant(_INDEX, VECTOR))
            block = _enciphered(builder, builder.add(_load(builder, counters, place), add), of_rounds)
            builder.store(block, _place(builder, words, place, _WORDS), align=4)
        return context.get_dummy_value()

    return types.void(words, counters, types.intp, keys, types.intp, *(4 * [types.uint32])), generate


words_of_lanes: Any = intrinsic(_words_of_lanes)
words_of_few: Any = intrinsic(_words_of_few)
words_of_key: Any = intrinsic(_words_of_key)
