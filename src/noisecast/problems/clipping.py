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
