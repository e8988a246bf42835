"""Counter-based noise for compiled loops: Threefry4x32-20 words, and Gaussians made of them by Box-Muller.

A word is a pure function of (key, counter): nothing is stored, any draw can be repeated or skipped, and no two draws
share one as long as no two share key and counter. Keys (128 bits) come from `noise.key_for`; the counter's words say
what is drawn: (lane, index, step, purpose). Needs Numba, so only engines import it.

Threefry is from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): twenty rounds of additions,
rotations and exclusive ors, which vector units do at full width, unlike Philox's multiplications (measured here: 0.45
against 1.05 ns a word). It is derived from the cipher Threefish but not a cipher itself, and float32 Box-Muller ends at
6.8 standard deviations: research grade, like JAX's generator, which is its sibling. Where a processor computes AES, the
row-sparse engine's words are from `aes_noise`, and only the Gaussians from here.
"""

import math

import numba
import numpy as np

from noisecast.compiled import INLINE, njit

f32, u32, i32 = np.float32, np.uint32, np.int32

# Counter words that keep purposes apart.
STEP_NOISE, FLUSH_NOISE, COIN = u32(0), u32(1), u32(2)
MORE_BITS = u32(16)  # a purpose that needs more than a block counts on in multiples of this

_PARITY = u32(0x1BD11BDA)
_LN_2_HIGH, _LN_2_LOW = f32(0.693359375), f32(-2.12194440e-4)
_TO_UNIT = f32(2.0**-32)
_LOG2_E, _ROUND = f32(1.4426950408889634), f32(12582912.0)


# Two blocks in turns: each operation waits for the one before it in its own block, and a processor does not look far
# enough ahead to find the next block by itself.


@njit(**INLINE)
def _mix(a, b, c, d, bits):
    """a + b, and b rotated by `bits` to the left, exclusive or that sum; and the same of c and d."""
    one, two = u32(a + b), u32(c + d)
    b = u32(u32(b << u32(bits)) | u32(b >> u32(32 - bits)))
    d = u32(u32(d << u32(bits)) | u32(d >> u32(32 - bits)))
    return one, u32(b ^ one), two, u32(d ^ two)


@njit(**INLINE)
def _four_rounds(x0, x1, x2, x3, y0, y1, y2, y3, r0, r1, r2, r3, r4, r5, r6, r7):
    x0, x1, y0, y1 = _mix(x0, x1, y0, y1, r0)
    x2, x3, y2, y3 = _mix(x2, x3, y2, y3, r1)
    x0, x3, y0, y3 = _mix(x0, x3, y0, y3, r2)
    x2, x1, y2, y1 = _mix(x2, x1, y2, y1, r3)
    x0, x1, y0, y1 = _mix(x0, x1, y0, y1, r4)
    x2, x3, y2, y3 = _mix(x2, x3, y2, y3, r5)
    x0, x3, y0, y3 = _mix(x0, x3, y0, y3, r6)
    x2, x1, y2, y1 = _mix(x2, x1, y2, y1, r7)
    return x0, x1, x2, x3, y0, y1, y2, y3


@njit(**INLINE)
def _even_rounds(x0, x1, x2, x3, y0, y1, y2, y3):
    return _four_rounds(x0, x1, x2, x3, y0, y1, y2, y3, 10, 26, 11, 21, 13, 27, 23, 5)


@njit(**INLINE)
def _odd_rounds(x0, x1, x2, x3, y0, y1, y2, y3):
    return _four_rounds(x0, x1, x2, x3, y0, y1, y2, y3, 6, 20, 17, 11, 25, 10, 18, 20)


@njit(**INLINE)
def _inject(x0, x1, x2, x3, y0, y1, y2, y3, k0, k1, k2, k3, times):
    k3 = u32(k3 + u32(times))
    return (
        u32(x0 + k0), u32(x1 + k1), u32(x2 + k2), u32(x3 + k3),
        u32(y0 + k0), u32(y1 + k1), u32(y2 + k2), u32(y3 + k3),
    )  # fmt: skip


@njit(**INLINE)
def _last_key(k0, k1, k2, k3):
    return u32(u32(u32(_PARITY ^ k0) ^ u32(k1 ^ k2)) ^ k3)


# Copied by Numba, not placed by LLVM, as are its like and `normal_pair`: loops along 64 lanes are a tenth faster.
@numba.njit(inline="always")
def threefry_12_twice(c0, c1, d1, c2, c3, k0, k1, k2, k3):
    """Threefry4x32 with twelve rounds, the fewest that pass every test of Salmon et al. (SC 2011), of two blocks.

    For noise that protects nobody, examples' and paths'; privacy noise has its twenty. As `threefry_twice`.

    Args and Returns: as `threefry_twice`.
    """
    k4 = _last_key(k0, k1, k2, k3)
    x0, x1, x2, x3, y0, y1, y2, y3 = _inject(c0, c1, c2, c3, c0, d1, c2, c3, k0, k1, k2, k3, 0)
    x0, x1, x2, x3, y0, y1, y2, y3 = _even_rounds(x0, x1, x2, x3, y0, y1, y2, y3)
    x0, x1, x2, x3, y0, y1, y2, y3 = _inject(x0, x1, x2, x3, y0, y1, y2, y3, k1, k2, k3, k4, 1)
    x0, x1, x2, x3, y0, y1, y2, y3 = _odd_rounds(x0, x1, x2, x3, y0, y1, y2, y3)
    x0, x1, x2, x3, y0, y1, y2, y3 = _inject(x0, x1, x2, x3, y0, y1, y2, y3, k2, k3, k4, k0, 2)
    x0, x1, x2, x3, y0, y1, y2, y3 = _even_rounds(x0, x1, x2, x3, y0, y1, y2, y3)
    return _inject(x0, x1, x2, x3, y0, y1, y2, y3, k3, k4, k0, k1, 3)


@numba.njit(inline="always")
def threefry_twice(c0, c1, d1, c2, c3, k0, k1, k2, k3):
    """The four words of counter (c0, c1, c2, c3), then the four of (c0, d1, c2, c3), under one key of four.

    Twenty rounds each, the key added again after every fourth.

    Args:
      c0, c1, d1, c2, c3: of both counters; uint32.   k0, k1, k2, k3: the key; uint32.
    Returns: eight words, uint32.
    """
    k4 = _last_key(k0, k1, k2, k3)
    x0, x1, x2, x3, y0, y1, y2, y3 = threefry_12_twice(c0, c1, d1, c2, c3, k0, k1, k2, k3)
    x0, x1, x2, x3, y0, y1, y2, y3 = _odd_rounds(x0, x1, x2, x3, y0, y1, y2, y3)
    x0, x1, x2, x3, y0, y1, y2, y3 = _inject(x0, x1, x2, x3, y0, y1, y2, y3, k4, k0, k1, k2, 4)
    x0, x1, x2, x3, y0, y1, y2, y3 = _even_rounds(x0, x1, x2, x3, y0, y1, y2, y3)
    return _inject(x0, x1, x2, x3, y0, y1, y2, y3, k0, k1, k2, k3, 5)


@numba.njit(inline="always")
def threefry(c0, c1, c2, c3, k0, k1, k2, k3):
    """Four words from a counter of four and a key of four. Of two blocks that are one, the compiler computes one.

    Args:
      c0, c1, c2, c3: the counter; uint32.   k0, k1, k2, k3: the key; uint32.
    Returns: four words, uint32.
    """
    a, b, c, d, _, _, _, _ = threefry_twice(c0, c1, c1, c2, c3, k0, k1, k2, k3)
    return a, b, c, d


@numba.njit(inline="always")
def threefry_12(c0, c1, c2, c3, k0, k1, k2, k3):
    """`threefry` with the twelve rounds of `threefry_12_twice`.

    Args and Returns: as `threefry`.
    """
    a, b, c, d, _, _, _, _ = threefry_12_twice(c0, c1, c1, c2, c3, k0, k1, k2, k3)
    return a, b, c, d


@njit(**INLINE)
def _log_of_one_plus(x):
    """ln(1 + x) = x - x^2/2 + x^3 P(x) on [1/sqrt 2 - 1, sqrt 2 - 1], the usual single-precision minimax P."""
    p = f32(7.0376836292e-2)
    p = p * x + f32(-1.1514610310e-1)
    p = p * x + f32(1.1676998740e-1)
    p = p * x + f32(-1.2420140846e-1)
    p = p * x + f32(1.4249322787e-1)
    p = p * x + f32(-1.6668057665e-1)
    p = p * x + f32(2.0000714765e-1)
    p = p * x + f32(-2.4999993993e-1)
    p = p * x + f32(3.3333331174e-1)
    p = p * x + f32(-0.5)
    return p * x * x + x


@njit(**INLINE)
def minus_log_of_unit(word):
    """-ln((word + 1/2) / 2^32) > 0, to float32's precision; no branches, so that loops over it vectorise.

    Args:
      word: uint32.
    Returns: float32 >= 0.
    """
    bits = np.float32((f32(word) + f32(0.5)) * _TO_UNIT).view(np.int32)
    exponent = i32(i32(bits - i32(0x3F3504F3)) >> i32(23))  # which leaves a mantissa in [1/sqrt 2, sqrt 2)
    x = np.int32(bits - i32(exponent << i32(23))).view(np.float32) - f32(1.0)
    return max(-(_log_of_one_plus(x) + f32(exponent) * f32(0.6931471805599453)), f32(0.0))


@numba.njit(inline="always")
def normal_pair(word_0, word_1):
    """Two independent N(0, 1): sqrt(-2 ln u) (cos, sin)(angle) (Box and Muller, 1958).

    The angle is pi v with v in [-1/2, 1/2), and half a turn more by a coin: the lowest bit of v, 2^-32 of its range,
    far below what float32 keeps of it. Polynomials of sin(pi v) / v and cos(pi v) in v^2, fitted here: errors below
    2e-8.

    Args:
      word_0, word_1: independent and uniform; uint32.
    Returns: two numbers, float32.
    """
    length = f32(math.sqrt(f32(2.0) * minus_log_of_unit(word_0)))
    coin = i32(i32(word_1) << i32(31))
    radius = np.int32(np.float32(length).view(np.int32) ^ coin).view(np.float32)
    v = f32(np.uint32(word_1).view(np.int32)) * _TO_UNIT
    t = v * v
    sine = (f32(0.0776594112) * t + f32(-0.598292162)) * t + f32(2.55007766)
    sine = ((sine * t + f32(-5.16771009)) * t + f32(3.14159264)) * v
    cosine = (f32(-0.0243967185) * t + f32(0.234937556)) * t + f32(-1.33521206)
    cosine = ((cosine * t + f32(4.05870916)) * t + f32(-4.93480214)) * t + f32(1.0)
    return radius * cosine, radius * sine


@njit(**INLINE)
def exponential(x):
    """e^x in float32, clamped to [-87, 88]; no branches.

    Args:
      x: float32.
    Returns: float32 > 0.
    """
    x = min(max(x, f32(-87.0)), f32(88.0))
    n = (x * _LOG2_E + _ROUND) - _ROUND  # to the nearest whole number: adding 1.5 * 2^23 leaves no room for a fraction
    r = x - n * _LN_2_HIGH - n * _LN_2_LOW
    p = f32(1.9875691500e-4)
    p = p * r + f32(1.3981999507e-3)
    p = p * r + f32(8.3334519073e-3)
    p = p * r + f32(4.1665795894e-2)
    p = p * r + f32(1.6666665459e-1)
    p = p * r + f32(5.0000001201e-1)
    mantissa = p * r * r + r + f32(1.0)
    return mantissa * np.int32((i32(n) + i32(127)) << i32(23)).view(np.float32)


@njit(**INLINE)
def normal_cdf(x):
    """Phi(x) in float32, absolute error below 4e-7: 1/2 + x P(x^2) / Q(x^2), fitted here; no branches.

    Args:
      x: float32; clamped to [-5.2, 5.2].
    Returns: float32.
    """
    x = min(max(x, f32(-5.2)), f32(5.2))
    z = x * x
    p = f32(-1.616475664e-8) * z + f32(5.374407465e-6)
    p = (p * z + f32(4.118044162e-4)) * z + f32(6.080700085e-3)
    p = (p * z + f32(6.027754396e-2)) * z + f32(3.989417553e-1)
    q = f32(1.383260387e-4) * z + f32(3.253423143e-3)
    q = (q * z + f32(4.321719706e-2)) * z + f32(3.177511692e-1)
    q = q * z + f32(1.0)
    return f32(0.5) + x * p / q
