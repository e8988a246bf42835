"""Privacy noise as a gradient transformation, and the count of what was released."""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from noisecast.optax.clip import ClippedSum, refuse_a_part, refuse_float64
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
    """key: (2,) uint32, of this noise alone; zeros are no key.   step: how many releases were made; () int32.

    Who has the key takes the noise away: keep a state as you keep the data, or release `without_key(state)`.
    """

    key: jax.Array
    step: jax.Array

    def __repr__(self) -> str:  # not into logs
        return f"NoiseState(key=<hidden>, step={self.step})"


class _Run:
    """Whether the run of one key has begun. It stays where it was made: a copy elsewhere would begin it again."""

    def __init__(self):
        self.has_begun = False

    def begin(self) -> None:
        if self.has_begun:
            raise ValueError(
                "Expected one run from one key, got a second `init`: its noise would be that of the first, and the "
                "two models together would tell the gradients without it. Make the optimizer anew, with a new key."
            )
        self.has_begun = True

    def __reduce__(self) -> Any:
        raise TypeError(
            "Expected an optimizer that stays in its process, got one to be pickled: two workers would draw the same "
            "noise. Make it where it runs, each with a new key."
        )


def add_noise(mechanism: SampledGaussian, key: Any) -> optax.GradientTransformation:
    """(g + N(0, (z C)^2 I)) / B: the private mean gradient, from the sum that `clip_and_sum` made.

    The noise is a function of the key, the number of the step and the coordinate, the same as in noisecast's dense
    engine. The step is counted in the state, so no noise is drawn twice in a run of fewer than 2^31 steps; start a
    second run with a second key, and never step twice from one state. B is the mechanism's expected batch size, a
    public constant, and an empty batch gets its noise too. A second `init` is refused, and so is one within `jax.jit`
    or `jax.vmap`, which could be called again unseen; `jax.eval_shape` is free, and its state has no key.

    Args:
      mechanism: whose noise_std is z C, and whose expected_batch_size is B.
      key: 32 bytes that nobody knows (`os.urandom(32)`, or `key_for` of a `RandomRoot`), or a JAX key; there is no
        default. A key made of a known seed is reproducible and not private.
    Raises: TypeError or ValueError for a key of another kind; ValueError in a second `init`, and in an `update` of
      what is no `ClippedSum` of the mechanism's clip norm, or is float64.

    >>> from noisecast import Poisson, SampledGaussian
    >>> import os
    >>> mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson(0.1, 4))
    >>> noise = add_noise(mechanism, os.urandom(32))
    >>> state = noise.init({"w": jnp.zeros(2)})
    >>> nothing = ClippedSum({"w": jnp.zeros(2)}, 1.0)
    >>> first, state = noise.update(nothing, state)
    >>> second, state = noise.update(nothing, state)
    >>> bool((first["w"] == second["w"]).any()), releases(state)
    (False, 2)
    """
    words, run = _key_words(key), _Run()

    def init(params):
        step = jnp.zeros((), jnp.int32)
        if any(isinstance(leaf, Tracer) for leaf in (step, *jax.tree.leaves(params))):
            _refuse_unless_for_shapes()
            return NoiseState(jnp.zeros_like(words), step)
        run.begin()
        return NoiseState(words, step)

    def update(updates, state, params=None):
        del params
        leaves, structure = jax.tree.flatten(_checked_sum(updates, mechanism))
        if not isinstance(state.key, Tracer) and not np.asarray(state.key).any():
            raise ValueError("Expected a state with the key of its noise, got one without; use what `init` returned.")
        sizes = [leaf.size for leaf in leaves]
        # One draw for the whole vector, then cut: no two leaves can share a number.
        normals = standard_normal(state.key, state.step, (sum(sizes),))
        # A compiled step cannot raise: without a key it releases nothing but NaN.
        normals = jnp.where(jnp.any(state.key != 0), normals, jnp.nan)
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


def without_key(state: Any) -> Any:
    """A copy of an optimizer's state that may be released with the parameters: the key of the noise is zeros.

    What else it holds was made of private gradients after their noise. It cannot be stepped from, only counted.

    >>> from noisecast import Poisson, SampledGaussian
    >>> import os
    >>> mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson(0.1, 4))
    >>> state = add_noise(mechanism, os.urandom(32)).init(jnp.zeros(2))
    >>> without_key(state).key.tolist(), releases(without_key(state))
    ([0, 0], 0)
    """

    def stripped(node):
        return NoiseState(jnp.zeros_like(node.key), node.step) if isinstance(node, NoiseState) else node

    return jax.tree.map(stripped, state, is_leaf=lambda node: isinstance(node, NoiseState))


def releases(state: Any) -> int:
    """How often a private gradient was released: the number of steps to account, counted where the noise is drawn.

    A state that was gone back to says too few: steps that were thrown away were releases all the same. Add them.

    Args:
      state: of an optimizer that holds exactly one `add_noise`, however deep.
    Raises: ValueError when there is none or more than one, it is a batch of states (`jax.vmap`), or it is within a
      wrapper that leaves steps out (`optax.apply_if_finite`, `conditionally_mask`, `conditionally_transform`,
      `MultiSteps`): no number is right then.
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
    shape = jnp.shape(found[0].step)
    if shape != ():
        raise ValueError(
            f"Expected the state of one run, got a batch of shape {shape} (jax.vmap), whose runs may "
            "share their noise; make an optimizer with a key of its own for each run."
        )
    return int(found[0].step)


def _checked_sum(updates: Any, mechanism: SampledGaussian) -> Any:
    """The gradients of a `ClippedSum`. Raises: ValueError for anything of which it is not known what moves it."""
    refuse_a_part(updates)
    if not isinstance(updates, ClippedSum):
        raise ValueError(
            f"Expected what clip_and_sum hands on, got {type(updates).__name__}: how far one example moves it is not "
            "known. Put nothing between clip_and_sum and add_noise; a sum of clipped_sum's own goes into "
            "ClippedSum(total, l2_clip_norm)."
        )
    if updates.l2_clip_norm != mechanism.l2_clip_norm:
        raise ValueError(
            f"Expected a sum clipped to the mechanism's l2_clip_norm {mechanism.l2_clip_norm:g}, got one clipped to "
            f"{updates.l2_clip_norm:g}; give clip_and_sum and add_noise one mechanism."
        )
    refuse_a_part(updates.gradients)
    refuse_float64(updates.gradients)
    return updates.gradients


def _refuse_unless_for_shapes() -> None:
    """Raise in a trace, unless `jax.eval_shape` made it: a trace begins no run, and what it compiles may begin many."""
    frame: Any = sys._getframe(1)
    while frame is not None:  # tracers do not say who traces
        if frame.f_code.co_name == "eval_shape" and str(frame.f_globals.get("__name__")).startswith("jax."):
            return
        frame = frame.f_back
    raise ValueError(
        "Expected `init` outside of jax.jit and jax.vmap, got it traced: called again, it would begin a second run "
        "with the noise of the first, unseen. Call optimizer.init(params) itself; jax.eval_shape may trace it."
    )


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
