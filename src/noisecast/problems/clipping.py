"""By how much a gradient is clipped: min(1, C / |g|), never a rounding error too little."""

import jax
import jax.numpy as jnp

Array = jax.Array

# Norms are taken this much longer (float32 rounds by 2^-24 a step), so that no clipped gradient is longer than C.
NORM_SLACK = 1 + 2.0**-20


def clip_factor(norm: Array, l2_clip_norm: Array) -> Array:
    """min(1, C / |g|), at most; float32, elementwise.

    >>> [round(float(factor), 5) for factor in clip_factor(jnp.array([0.0, 0.5, 4.0]), jnp.array(1.0))]
    [1.0, 1.0, 0.25]
    """
    return jnp.minimum(1.0, (l2_clip_norm / NORM_SLACK) / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))


def widened(gradient: Array) -> Array:
    """Its numbers in float32 at least, as those of its own kind that they are.

    A compiler may leave out roundings to half precision where what follows is wider, of the norm and not of the sum:
    then one would be of other numbers than the other. The rounding here it must not leave out.

    >>> widened(jnp.asarray([1.0, 0.1], jnp.bfloat16)).tolist()
    [1.0, 0.10009765625]
    """
    wide = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
    if wide.dtype == gradient.dtype:
        return wide
    # With the exponents of float32: those of float16 would make its smallest numbers 0.
    return jax.lax.reduce_precision(wide, jnp.finfo(wide.dtype).nexp, jnp.finfo(gradient.dtype).nmant)
