"""Per-example clipping of a pytree of gradients, and the sum over the batch."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import Poisson
from noisecast.problems.clipping import clip_factor, widened

Array = jax.Array
PyTree = Any


class ClippedSum:
    """A sum of clipped gradients, and the clip norm that says how far one example moves it; `add_noise` takes it.

    Deliberately no pytree and no array. A transformation between `clip_and_sum` and `add_noise` would change how far
    one example moves what is given noise (`optax.trace` by ten times, `optax.scale` by its factor), and the accountant
    would not know: none can reach into this. Nor can it leave a compiled function: what makes it and what takes it
    stand in one.

    Args:
      gradients: the sum, leaves (...), of `clipped_sum` or of several of its results [loss/params].
      l2_clip_norm: C > 0 that every example was clipped to [loss/params].
    """

    def __init__(self, gradients: PyTree, l2_clip_norm: float):
        self.gradients = gradients
        self.l2_clip_norm = l2_clip_norm

    def _refused(self, *_: Any) -> Any:
        raise TypeError(
            "Expected nothing between clip_and_sum and add_noise, got a transformation that computes with the clipped "
            "sum: one example would move it by another length than the clip norm. Put it after add_noise."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refused
    __pow__ = __abs__ = __array__ = _refused


def clip_and_sum(mechanism: SampledGaussian) -> optax.GradientTransformationExtraArgs:
    """sum over the batch's present examples of clip(g_i, C), as a transformation; `add_noise` follows it at once.

    Nothing stands before it in a chain: what looks at all examples together, as `optax.clip_by_global_norm` does, lets
    one example move the others' gradients, and the sum by many times C. That cannot be seen from here.

    Its updates are per-example gradients, every leaf with a leading axis of the batch, as
    `jax.vmap(jax.grad(loss), (None, 0))(params, examples)` makes them. `update` takes the batch's mask as the extra
    argument `example_mask`, (batch,) bool; where batches have a fixed size it may be left out: every row counts.

    Args:
      mechanism: whose l2_clip_norm is C.
    Returns (of `update`): a `ClippedSum`, which nothing but `add_noise` takes.
    Raises (in `update`): ValueError for params that are missing, a mask that is (with Poisson sampling), a part of the
      parameters (`optax.masked`), float64, and leaves without the batch's axis: a gradient that is already summed
      cannot be clipped example by example.

    >>> from noisecast import Poisson, SampledGaussian
    >>> clip = clip_and_sum(SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson(0.1, 2)))
    >>> params = {"w": jnp.zeros(2)}
    >>> gradients = {"w": jnp.array([[3.0, 4.0], [0.25, 0.0], [9.0, 9.0]])}
    >>> mask = jnp.array([True, True, False])
    >>> clipped, _ = clip.update(gradients, clip.init(params), params, example_mask=mask)
    >>> [round(float(g), 5) for g in clipped.gradients["w"]], clipped.l2_clip_norm
    ([0.85, 0.8], 1.0)
    """

    def update(updates, state, params=None, *, example_mask=None, **extra_args) -> Any:
        del extra_args
        _check_per_example(updates, params)
        if example_mask is None and isinstance(mechanism.sampler, Poisson):  # a row that pads would count, many times
            raise ValueError(
                "Expected example_mask, got none: batches of Poisson sampling have no fixed size, so they are padded. "
                "Pass the mask that `private_batches` gives, or jnp.ones(batch, bool) for a batch that is not padded."
            )
        gradients = clipped_sum(updates, mechanism.l2_clip_norm, example_mask=example_mask)
        return ClippedSum(gradients, mechanism.l2_clip_norm), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def clipped_sum(per_example_gradients: PyTree, l2_clip_norm: Any, *, example_mask: Any = None) -> PyTree:
    """sum_i min(1, C / |g_i|) g_i over the examples whose mask is True, |.| over all leaves together.

    One example moves it by at most C (`problems.clipping`). An example whose norm is not a finite float32 number has
    no direction to clip to and contributes nothing, as in noisecast's own engines. Sums of several parts of a batch may
    be added: clipping is example by example.

    Args:
      per_example_gradients: leaves (batch, ...), batch >= 0 [loss/params].
      l2_clip_norm: C > 0 [loss/params].
      example_mask: (batch,) bool, False where a row pads the batch; None: all True.
    Returns: the sum, leaves (...), at least float32 whatever the gradients' dtype [loss/params].

    >>> clipped_sum(jnp.array([[jnp.nan, 1.0], [0.0, 2.0]]), 1.0).round(5).tolist()
    [0.0, 1.0]
    """
    wide = jax.tree.map(widened, per_example_gradients)
    leaves = jax.tree.leaves(wide)
    sizes = {leaf.shape[:1] for leaf in leaves}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(f"Expected per-example gradients with one common leading axis, got {sorted(sizes)}.")
    batch = leaves[0].shape[0]
    if example_mask is None:
        example_mask = jnp.ones(batch, bool)
    elif jnp.shape(example_mask) != (batch,) or jnp.result_type(example_mask) != jnp.bool_:
        # Bool alone: a weight above one would let an example move the sum by more than C.
        raise ValueError(
            f"Expected example_mask to be bool of shape ({batch},), got {jnp.result_type(example_mask)} of shape "
            f"{jnp.shape(example_mask)}."
        )
    norms = jnp.sqrt(sum(jnp.square(leaf).sum(axis=tuple(range(1, leaf.ndim))) for leaf in leaves))
    factors = clip_factor(norms, l2_clip_norm)
    counts = jnp.asarray(example_mask) & jnp.isfinite(norms)

    def total(leaf: Array) -> Array:
        along = (batch,) + (1,) * (leaf.ndim - 1)
        # By `where`, not by a factor of zero: zero times NaN is NaN.
        return jnp.where(counts.reshape(along), leaf * factors.reshape(along).astype(leaf.dtype), 0).sum(axis=0)

    return jax.tree.map(total, wide)


def _check_per_example(gradients: PyTree, params: PyTree) -> None:
    if params is None:
        raise ValueError("Expected update(gradients, state, params), got no params: they tell the batch's axis.")
    refuse_a_part(gradients)
    refuse_float64(gradients)
    if jax.tree.structure(gradients) != jax.tree.structure(params):
        raise ValueError("Expected per-example gradients of the same structure as params, got another structure.")
    for gradient, param in zip(jax.tree.leaves(gradients), jax.tree.leaves(params)):
        if jnp.shape(gradient)[1:] != jnp.shape(param) or jnp.ndim(gradient) != jnp.ndim(param) + 1:
            raise ValueError(
                f"Expected a gradient of shape (batch, *{jnp.shape(param)}) for a parameter of shape "
                f"{jnp.shape(param)}, got {jnp.shape(gradient)}; use jax.vmap(jax.grad(loss), (None, 0))."
            )


def refuse_a_part(tree: PyTree) -> None:
    """Raise when `optax.masked` or `optax.partition` has cut leaves out: each part would be clipped to C on its own."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    if any(isinstance(leaf, optax.MaskedNode) for leaf in leaves):
        raise ValueError(
            "Expected the whole gradient, got a part of it (optax.masked or optax.partition), which would be clipped "
            "and given noise apart from the rest; take gradients of the trained parameters alone."
        )


def refuse_float64(tree: PyTree) -> None:
    """Raise for leaves with more bits than the noise has: those below float32's would be released as they are."""
    if any(jnp.result_type(leaf) == jnp.float64 for leaf in jax.tree.leaves(tree)):
        raise ValueError(
            "Expected gradients of at most float32, got float64: float32 noise cannot hide float64 sums, whose lower "
            "bits would tell who is in the batch. Cast the parameters to float32, or take jax_enable_x64 off."
        )
