"""Privacy noise as a gradient transformation, and the count of what was released."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from noisecast.optax.clip import refuse_a_part
from noisecast.privacy.jax_noise import counter_keys, private_mean, standard_normal
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.noise import SecureKey

# Folded into a JAX key before noise is drawn from it, so that the caller's other uses of the key share nothing with it.
_NOISE_STREAM = 0x6E6F6973

# Of wrappers that call what they hold at some steps only; the other steps hand on a sum without noise, or none.
_AT_SOME_STEPS = (
    optax.ApplyIfFiniteState,
    optax.ConditionallyMaskState,
    optax.ConditionallyTransformState,
    optax.MultiStepsState,
)


class NoiseState(NamedTuple):
    """key: (2,) uint32, of this noise alone.   step: how many releases were made; () int32."""

    key: jax.Array
    step: jax.Array


def add_noise(mechanism: SampledGaussian, key: Any) -> optax.GradientTransformation:
    """(g + N(0, (z C)^2 I)) / B: the private mean gradient, from the sum that `clip_and_sum` made.

    The noise is a function of the key, the number of the step and the coordinate, the same as in noisecast's dense
    engine. The step is counted in the state, so no noise is drawn twice in a run of fewer than 2^31 steps; start a
    second run with a second key, and never step twice from one state. B is the mechanism's expected batch size, a
    public constant, and an empty batch gets its noise too. A second `init` is refused, unless it only asks for shapes
    (`jax.eval_shape`).

    Args:
      mechanism: whose noise_std is z C, and whose expected_batch_size is B.
      key: 32 bytes that nobody knows (`os.urandom(32)`, or `key_for` of a `RandomRoot`), or a JAX key; there is no
        default. A key made of a known seed is reproducible and not private.
    Raises: TypeError or ValueError for a key of another kind; ValueError in a second `init`.

    >>> from noisecast import Poisson, SampledGaussian
    >>> import os
    >>> mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson(0.1, 4))
    >>> noise = add_noise(mechanism, os.urandom(32))
    >>> state = noise.init({"w": jnp.zeros(2)})
    >>> first, state = noise.update({"w": jnp.zeros(2)}, state)
    >>> second, state = noise.update({"w": jnp.zeros(2)}, state)
    >>> bool((first["w"] == second["w"]).any()), releases(state)
    (False, 2)
    """
    words, begun = _key_words(key), False

    def init(params):
        nonlocal begun
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params)):  # which begins no run
            if begun:
                raise ValueError(
                    "Expected one run from one key, got a second `init`: its noise would be that of the first, and the "
                    "two models together would tell the gradients without it. Make the optimizer anew, with a new key."
                )
            begun = True
        return NoiseState(words, jnp.zeros((), jnp.int32))

    def update(updates, state, params=None):
        del params
        refuse_a_part(updates)
        leaves, structure = jax.tree.flatten(updates)
        sizes = [leaf.size for leaf in leaves]
        # One draw for the whole vector, then cut: no two leaves can share a number.
        normals = standard_normal(state.key, state.step, (sum(sizes),))
        cuts = jnp.split(normals, np.cumsum(sizes)[:-1]) if leaves else []
        noisy = [
            private_mean(
                leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)),
                part.reshape(leaf.shape),
                noise_std=mechanism.noise_std,
                expected_batch_size=mechanism.expected_batch_size,
            )
            for leaf, part in zip(leaves, cuts)
        ]
        return jax.tree.unflatten(structure, noisy), NoiseState(state.key, state.step + 1)

    return optax.GradientTransformation(init, update)


def releases(state: Any) -> int:
    """How often a private gradient was released: the number of steps to account, counted where the noise is drawn.

    Args:
      state: of an optimizer that holds exactly one `add_noise`, however deep.
    Raises: ValueError when there is none or more than one, or it is within a wrapper that leaves steps out
      (`optax.apply_if_finite`, `conditionally_mask`, `conditionally_transform`, `MultiSteps`): no number is right then.
    """
    found = _all_of(NoiseState, state)
    if len(found) != 1:
        raise ValueError(f"Expected a state with one add_noise in it, got {len(found)}.")
    for wrapper in _all_of(_AT_SOME_STEPS, state):
        if _all_of(NoiseState, wrapper):
            raise ValueError(
                f"Expected add_noise outside of any wrapper that leaves steps out, got it within a "
                f"{type(wrapper).__name__}: what it leaves out had no noise or was not counted. Put the wrapper around "
                "what follows add_noise."
            )
    return int(found[0].step)


def _all_of(kinds: Any, state: Any) -> list[Any]:
    """The outermost nodes of these types."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    return [node for node in nodes if isinstance(node, kinds)]


def _key_words(key: Any) -> jax.Array:
    if isinstance(key, SecureKey):
        raise TypeError(
            "Expected a key without secure_noise, got one whose noise must come from a cipher, which JAX has not; "
            "use noisecast.train for secure noise."
        )
    if isinstance(key, bytes):
        if len(key) != 32:
            raise ValueError(f"Expected a key of 32 bytes, got {len(key)}; use os.urandom(32).")
        return counter_keys(key)
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
        return jax.random.bits(jax.random.fold_in(key, _NOISE_STREAM), (2,), jnp.uint32)
    raise TypeError(
        f"Expected key to be 32 bytes or one JAX key (jax.random.key), got {type(key).__name__}; there is no default, "
        "use os.urandom(32)."
    )
