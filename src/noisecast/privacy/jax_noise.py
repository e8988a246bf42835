"""Privacy noise inside a JAX program: Gaussians from Threefry2x32-20, a pure function of (key, step, coordinate).

The words are those of `jax.extend.random.threefry_2x32` (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), written out round by round: JAX's own lowering rolls the rounds into a loop that a CPU does not vectorise, and
derives a new key a step. Here a step is half of the counter. Float32 Box-Muller ends at 6.8 standard deviations:
research grade, like `counter_noise`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from noisecast.privacy.noise import key_data

Array = jax.Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
# ln(1 + x) = x - x^2/2 + x^3 P(x) on [1/sqrt 2 - 1, sqrt 2 - 1]: the usual single-precision minimax coefficients of P.
_LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
        2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_LN_2_HIGH, _LN_2_LOW = 0.693359375, -2.12194440e-4


def counter_keys(keys: bytes | Sequence[bytes]) -> Array:
    """Keys of `standard_normal` on the device.

    Args:
      keys: one of at least 8 bytes, or n.
    Returns: (2,) or (n, 2) uint32.

    >>> counter_keys([bytes(32), bytes(32)]).shape
    (2, 2)
    """
    return jnp.asarray(key_data(keys))


def threefry(key: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Two words of a counter of two: the sum of key and counter after twenty rounds of add, rotate, exclusive or.

    Args:
      key: (2,) uint32.   high, low: the counter, uint32 of one shape.
    Returns: uint32 of that shape each.

    >>> [f"{int(word):08x}" for word in threefry(jnp.zeros(2, jnp.uint32), jnp.uint32(0), jnp.uint32(0))]
    ['6b200159', '99ba4efe']
    """
    keys = key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY)
    a, b = high + keys[0], low + keys[1]
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            a = a + b
            b = ((b << jnp.uint32(bits)) | (b >> jnp.uint32(32 - bits))) ^ a
        a, b = a + keys[(group + 1) % 3], b + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return a, b


def standard_normal(key: Array, step: Any, shape: tuple[int, ...]) -> Array:
    """Independent N(0, 1) numbers; float32, the same whenever key, step and shape are.

    Args:
      key: (2,) uint32 from `counter_keys`, of this purpose alone.   step: 0 <= step < 2^31, may be traced.
      shape: less than 2^33 - 2 numbers.
    Returns: shape, float32.

    >>> standard_normal(counter_keys(bytes(32)), 3, (2, 2)).shape
    (2, 2)
    """
    size = math.prod(shape)
    index = jnp.arange((size + 1) // 2, dtype=jnp.uint32)
    step = jnp.asarray(step, jnp.int32)

    pair = lax.platform_dependent(key, step, index, cpu=_word_pairs_on_a_cpu, default=_word_pairs)
    first, second = (lax.bitcast_convert_type(part, jnp.uint32) for part in (pair.real, pair.imag))
    return jnp.concatenate(_box_muller(first, second))[:size].reshape(shape)


def _word_pairs(key: Array, step: Array, index: Array) -> Array:
    """Two words a pair of coordinates. One array out: XLA computes what it fuses anew for each output."""
    low = jnp.broadcast_to(step.astype(jnp.uint32), index.shape)
    return lax.complex(*(lax.bitcast_convert_type(word, jnp.float32) for word in threefry(key, index, low)))


def _word_pairs_on_a_cpu(key: Array, step: Array, index: Array) -> Array:
    """The same in a loop of one turn, of a length that XLA cannot know.

    Else the rounds are fused into whatever uses the words, in a loop that does not vectorise. A GPU has no such need,
    and would wait for the host to count the turn longer than it takes to draw a hundred thousand numbers.
    """
    nothing = jnp.zeros(index.shape, jnp.complex64)
    return lax.fori_loop(0, jnp.minimum(step + 1, 1), lambda turn, _: _word_pairs(key, step + turn, index), nothing)


def derived_key(key: Array, step: Any) -> Array:
    """JAX's typed key for other variates of a step, from a counter that `standard_normal` never reaches.

    Args:
      key: (2,) uint32 from `counter_keys`.   step: 0 <= step < 2^32, may be traced.
    Returns: a typed key; ().

    >>> derived_key(counter_keys(bytes(32)), 3).shape
    ()
    """
    words = threefry(key, jnp.uint32(0xFFFFFFFF), jnp.asarray(step).astype(jnp.uint32))
    return jax.random.wrap_key_data(jnp.stack(words), impl="threefry2x32")


def private_mean(clipped_sum: Any, normals: Array, *, noise_std: Any, expected_batch_size: Any) -> Array:
    """(sum of clipped gradients + N(0, (z C)^2)) / B: the one release of a step (DP-SGD; Abadi et al., CCS 2016).

    Args:
      clipped_sum: sum of the batch's clipped gradients, zero for an empty batch; any shape, float32 [loss/params].
      normals: independent N(0, 1) numbers of this run and step, used for nothing else; the same shape.
      noise_std: z C, of the sum; () >= 0 [loss/params].   expected_batch_size: B, public; () > 0.
    Returns: the private mean gradient, shape and dtype of clipped_sum [loss/params]. Never exactly 0 where there is
      noise: a float32 draw may be (with probability 2^-25), and a sign of 0, which the accounted law does not have,
      would tell that no gradient was there.

    >>> normals = standard_normal(counter_keys(bytes(32)), 0, (2,))
    >>> private_mean(np.zeros(2, "float32"), normals, noise_std=1.0, expected_batch_size=4).shape
    (2,)
    """
    clipped_sum = jnp.asarray(clipped_sum)
    noise = normals.astype(clipped_sum.dtype) * jnp.asarray(noise_std, clipped_sum.dtype)
    # By the expected batch size, not the drawn one: the drawn size is private.
    mean = (clipped_sum + noise) / jnp.asarray(expected_batch_size, clipped_sum.dtype)
    return jnp.where((mean == 0) & (jnp.asarray(noise_std) > 0), jnp.finfo(mean.dtype).tiny, mean)


def _box_muller(first: Array, second: Array) -> tuple[Array, Array]:
    """Two independent N(0, 1): sqrt(-2 ln u) (cos, sin)(2 pi v) (Box and Muller, 1958), of two uniform words."""
    unit = (first.astype(jnp.float32) + 0.5) * np.float32(2.0**-32)
    radius = jnp.sqrt(2.0 * _minus_log(unit))
    quadrant = (second + jnp.uint32(1 << 29)) >> jnp.uint32(30)
    angle = lax.bitcast_convert_type(second - (quadrant << jnp.uint32(30)), jnp.int32).astype(jnp.float32)
    angle = angle * np.float32(math.pi / 2 / 2**30)  # in [-pi/4, pi/4]
    z = angle * angle
    sine = _polynomial(z, _SINE) * z * angle + angle
    cosine = _polynomial(z, _COSINE) * z * z - 0.5 * z + 1.0
    odd = (quadrant & 1) != 0
    real, imaginary = jnp.where(odd, sine, cosine), jnp.where(odd, cosine, sine)
    real = jnp.where(((quadrant + 1) & 2) != 0, -real, real)
    imaginary = jnp.where((quadrant & 2) != 0, -imaginary, imaginary)
    return radius * real, radius * imaginary


def _minus_log(unit: Array) -> Array:
    """-ln u of 0 < u <= 1, to float32's precision."""
    bits = lax.bitcast_convert_type(unit, jnp.int32)
    mantissa = lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F800000, jnp.float32)
    large = mantissa > np.float32(math.sqrt(2))
    x = jnp.where(large, 0.5 * mantissa, mantissa) - 1.0
    exponent = ((bits >> 23) - 127 + large).astype(jnp.float32)
    square = x * x
    return -(x + (square * x * _polynomial(x, _LOG) + exponent * _LN_2_LOW - 0.5 * square) + exponent * _LN_2_HIGH)


def _polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    value = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + np.float32(coefficient)
    return value
