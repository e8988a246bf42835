"""Any JAX loss over a pytree of parameters: Flax, Equinox or a plain function, clipped example by example."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from noisecast.problems import data_moments
from noisecast.problems.clipping import clip_factor, widened
from noisecast.problems.local_quadratic import LocalQuadratic, local_quadratic_of
from noisecast.problems.problem import fingerprint_of

Array = jax.Array
PyTree = Any


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["train", "test", "start"],
    meta_fields=["example_loss", "example_is_correct", "unravel", "microbatch_size", "name", "fingerprint"],
)
@dataclass(frozen=True)
class JaxModel:
    """Mean over examples of loss(params, example). Made by `jax_model`."""

    train: PyTree = field(repr=False)
    test: PyTree | None = field(repr=False)
    start: Array = field(repr=False)
    example_loss: Callable[[PyTree, PyTree], Array]
    example_is_correct: Callable[[PyTree, PyTree], Array] | None
    unravel: Callable[[Array], PyTree]
    microbatch_size: int
    name: str
    fingerprint: str

    is_quadratic = False
    why_no_closed_form = (
        "closed_form cannot answer a general model: its loss is not quadratic and its clipping changes along the path. "
        'Use runner "training" or "sde".'
    )

    @property
    def num_params(self) -> int:
        return self.start.shape[0]

    @property
    def num_examples(self) -> int:
        return jax.tree.leaves(self.train)[0].shape[0]

    def initial_params(self) -> Array:
        return self.start

    def params_tree(self, params: Array) -> PyTree:
        """The flat vector (d,) as the user's own pytree."""
        return self.unravel(jnp.asarray(params))

    def examples(self, draw: Array, mask: Array) -> tuple[PyTree, Array]:
        return jax.tree.map(lambda array: array[draw], self.train), mask

    def clipped_sum(self, params: Array, examples: tuple[PyTree, Array], l2_clip_norm: Array) -> Array:
        batch, mask = examples
        return self._sum(_where_present, params, batch, mask, l2_clip_norm)[0]

    def weighted_clipped_sum(self, params: Array, weights: Array, l2_clip_norm: Array) -> Array:
        return self._sum(lambda g, weight: (weight * g,), params, self.train, weights, l2_clip_norm)[0]

    def clipped_gradient_moments(self, params: Array, l2_clip_norm: Array) -> tuple[Array, Array]:
        def moments(g, present):
            return *_where_present(g, present), *_where_present(g**2, present)

        first, second, _ = self._sum(moments, params, self.train, self._everyone(), l2_clip_norm)
        return first / self.num_examples, second / self.num_examples

    def evaluate(self, params: Array, l2_clip_norm: Array) -> dict[str, Array]:
        """Loss, gradient norm, clip fraction; test loss and accuracies where examples and a rule were given."""
        everyone = self._everyone()
        gradient, norms = self._sum(_where_present, params, self.train, everyone, jnp.asarray(jnp.inf))
        clipped = (~(norms <= l2_clip_norm)).sum()  # one that is no number is clipped to nothing
        metrics = self._fit(params, self.train, "")
        if self.test is not None:
            metrics |= self._fit(params, self.test, "test_")
        n = self.num_examples
        return metrics | {"gradient_norm": jnp.linalg.norm(gradient) / n, "clip_fraction": clipped / n}

    prepare_moments = staticmethod(data_moments.prepare_moments)
    gradient_moments = data_moments.gradient_moments
    gradient_noise = data_moments.gradient_noise
    shrink_factor = data_moments.shrink_factor

    def local_quadratic(self, params: Array) -> LocalQuadratic:
        """Loss, gradient and Hessian at `params`, the Hessian by stochastic Lanczos quadrature."""

        def mean_loss(at: Array) -> Array:
            return self._fit(at, self.train, "")["loss"]

        return local_quadratic_of(mean_loss, params)

    def _fit(self, params: Array, examples: PyTree, prefix: str) -> dict[str, Array]:
        tree = self.unravel(params)
        size = min(1024, jax.tree.leaves(examples)[0].shape[0])
        measures = {"loss": self.example_loss}
        if self.example_is_correct is not None:
            measures["accuracy"] = self.example_is_correct
        return {
            prefix + name: jax.lax.map(partial(measure, tree), examples, batch_size=size).astype(jnp.float32).mean()
            for name, measure in measures.items()
        }

    def _everyone(self) -> Array:
        return jnp.ones(self.num_examples, bool)

    def _sum(self, measure, params: Array, examples: PyTree, weights: Array, l2_clip_norm: Array) -> tuple[Array, ...]:
        """sum_i of what `measure(clip(g_i), weight_i)` gives, elementwise, (d,) each; then all |g_i|, (n,).

        `microbatch_size` per-example gradients are in memory at a time. Microbatches are memory, not mathematics: each
        gradient is clipped on its own and the sum runs over all of them.
        """

        def one(example, weight):
            gradient = jax.grad(self.example_loss)(self.unravel(params), example)
            # Leaf by leaf: one vector an example would be another copy of what fills memory. In float32, whatever the
            # parameters are: a norm of half precision would let a clipped gradient exceed the clip norm.
            gradient = [widened(leaf) for leaf in jax.tree.leaves(gradient)]
            norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in gradient))
            factor = clip_factor(norm, l2_clip_norm)
            # A gradient that is not finite has no direction to clip to: the example contributes nothing.
            clipped = [jnp.where(jnp.isfinite(norm), leaf * factor, 0.0) for leaf in gradient]
            return [measure(leaf, weight) for leaf in clipped], norm

        number = max(1, weights.shape[0])  # of nobody there is one row, which is nobody
        size = min(self.microbatch_size, number)
        missing = number + -number % size - weights.shape[0]
        padded = jax.tree.map(
            lambda array: jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)).reshape(
                -1, size, *array.shape[1:]
            ),
            (examples, weights),
        )

        def add(total, microbatch):
            measured, norms = jax.vmap(one)(*microbatch)
            return jax.tree.map(lambda sum_, values: sum_ + values.sum(axis=0), total, measured), norms

        zero = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(one, *jax.tree.map(lambda array: array[0, 0], padded))[0],
        )
        total, norms = jax.lax.scan(add, zero, padded)
        sums = (jnp.concatenate([leaf.ravel() for leaf in leaves]) for leaves in zip(*total))
        return *sums, norms.ravel()[: weights.shape[0]]


def _where_present(gradient: Array, present: Array) -> tuple[Array]:
    return (jnp.where(present, gradient, 0.0),)


@dataclass(frozen=True)
class _Unravel:
    """The vector (d,) as the user's pytree, each leaf in its own dtype; equal ones share a compilation."""

    in_float32: Callable[[Array], PyTree]
    dtypes: tuple[Any, ...]

    def __call__(self, params: Array) -> PyTree:
        leaves, structure = jax.tree.flatten(self.in_float32(params))
        return jax.tree.unflatten(structure, [leaf.astype(dtype) for leaf, dtype in zip(leaves, self.dtypes)])


def jax_model(
    loss: Callable[[PyTree, PyTree], Array],
    params: PyTree,
    examples: PyTree,
    *,
    test_examples: PyTree | None = None,
    is_correct: Callable[[PyTree, PyTree], Array] | None = None,
    microbatch_size: int = 64,
    name: str = "model",
) -> JaxModel:
    """Train any JAX model privately.

    Args:
      loss: loss(params, example) -> scalar, of one example, with no knowledge of any other (no batch statistics).
      params: pytree of floating-point arrays: where training starts. It must not depend on the private examples. The
        loss sees each in its own dtype, bfloat16 for example; what is trained is a copy in float32.
      examples: pytree of arrays with a common leading axis, one row an example.
      test_examples: the same for the test set.
      is_correct: is_correct(params, example) -> bool, for accuracies.
      microbatch_size: per-example gradients held in memory at once; never changes the result beyond rounding. A GPU
        is quickest with the whole batch at once, where its memory holds that.
      name: as shown.
    Raises:
      ValueError: no examples, unequal numbers of rows, test examples unlike them; parameters, a loss or an is_correct
        of the wrong kind; parameters that are not finite, or float64 (under jax_enable_x64).

    An example contributes nothing to a step where its gradient is not finite, or its squared length is not in float32
    (a gradient longer than 1.8e19).

    >>> def squared_error(params, example):
    ...     x, y = example
    ...     return 0.5 * (params["w"] @ x - y) ** 2
    >>> x, y = np.eye(4, 2, dtype=np.float32), np.ones(4, np.float32)
    >>> problem = jax_model(squared_error, {"w": np.zeros(2, np.float32)}, (x, y))
    >>> problem.num_params, float(problem.evaluate(problem.initial_params(), 1.0)["loss"])
    (2, 0.5)
    """
    train = _checked_examples(examples, "examples")
    test = _checked_examples(test_examples, "test_examples") if test_examples is not None else None
    leaves = _checked_params(params)
    if not isinstance(microbatch_size, int | np.integer) or microbatch_size < 1:
        raise ValueError(f"Expected microbatch_size to be a whole number >= 1, got {microbatch_size!r}.")
    one_example = jax.tree.map(lambda array: array[0], train)
    if test is not None and _form(test) != _form(train):
        raise ValueError(f"Expected test_examples of the form of examples, {_form(train)}, got {_form(test)}.")
    _check_result("loss(params, example)", loss, params, one_example, jnp.floating)
    if is_correct is not None:
        _check_result("is_correct(params, example)", is_correct, params, one_example, jnp.bool_)
    dtypes = tuple(jnp.asarray(leaf).dtype for leaf in leaves)
    start, unravel = ravel_pytree(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params))
    # Derivatives too: a custom one is not seen in the loss.
    computations = [jax.make_jaxpr(jax.value_and_grad(loss))(params, one_example)]
    if is_correct is not None:
        computations.append(jax.make_jaxpr(is_correct)(params, one_example))
    data = [np.asarray(leaf) for leaf in jax.tree.leaves((train, test))]
    return JaxModel(
        train, test, start, loss, is_correct, _Unravel(unravel, dtypes), microbatch_size, name,
        fingerprint_of("jax_model", *chain(*map(_parts_of, computations)), np.asarray(start), *data),
    )  # fmt: skip


def _parts_of(computation: Any) -> Iterator[str | np.ndarray]:
    """Text of a closed jaxpr, and the numbers that the text leaves out: arrays that functions close over."""
    yield str(computation)
    yield from _constants(computation)


def _constants(part: Any) -> Iterator[np.ndarray]:
    """Of a jaxpr, closed or open, and of all that its equations hold."""
    for constant in getattr(part, "consts", ()):
        is_key = jnp.issubdtype(constant.dtype, jax.dtypes.prng_key)
        yield np.asarray(jax.random.key_data(constant) if is_key else constant)
    for equation in part.eqns:
        for literal in equation.invars:
            if hasattr(literal, "val"):
                yield np.asarray(literal.val)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda it: hasattr(it, "eqns")):
            if hasattr(inner, "eqns"):
                yield from _constants(inner)


def _checked_params(params: PyTree) -> list[Any]:
    """Its leaves. Raises: ValueError for one that cannot be trained, and for none."""
    leaves = jax.tree.leaves(params)
    for leaf in leaves:
        if not isinstance(leaf, np.ndarray | np.generic | jax.Array | float) or not jnp.issubdtype(
            jnp.result_type(leaf), jnp.floating
        ):
            raise ValueError(
                f"Expected params to be a pytree of floating-point arrays, got a leaf {str(leaf)[:40]!r} of type "
                f"{type(leaf).__name__}; for an Equinox model pass equinox.partition(model, "
                "equinox.is_inexact_array)[0] and combine inside the loss."
            )
    if any(jnp.asarray(leaf).dtype == jnp.float64 for leaf in leaves):  # as JAX sees them: never without x64
        raise ValueError(
            "Expected params of at most float32, got float64: what is trained is a copy in float32, and float32 noise "
            "cannot hide float64 sums. Cast them to float32, or take jax_enable_x64 off."
        )
    if not sum(np.size(leaf) for leaf in leaves):
        raise ValueError("Expected params to be a pytree of floating-point arrays, got no number at all.")
    if not all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in leaves):
        raise ValueError("Expected params to be finite in float32, got one that is not: training cannot start there.")
    return leaves


def _check_result(what: str, function: Callable, params: PyTree, example: PyTree, dtype: Any) -> None:
    """Raises: ValueError unless it is one number of this kind."""
    found = jax.eval_shape(function, params, example)
    leaves = jax.tree.leaves(found)
    if jax.tree.structure(found) != jax.tree.structure(0) or leaves[0].shape != ():
        shapes = [leaf.shape for leaf in leaves]
        raise ValueError(f"Expected {what} to be a scalar of one example, got shape {', '.join(map(str, shapes))}.")
    if not jnp.issubdtype(leaves[0].dtype, dtype):
        kind = "bool" if dtype is jnp.bool_ else "floating-point number"
        raise ValueError(f"Expected {what} to be a {kind}, got {leaves[0].dtype}.")


def _form(examples: PyTree) -> Any:
    """Structure, and the shape of an example's leaves."""
    leaves, structure = jax.tree.flatten(examples)
    return structure, [leaf.shape[1:] for leaf in leaves]


def _checked_examples(examples: PyTree, what: str) -> PyTree:
    try:
        arrays = jax.tree.map(jnp.asarray, examples)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Expected {what} to be a pytree of numeric arrays: {str(error).splitlines()[0]}") from None
    rows = {leaf.shape[0] if leaf.ndim else None for leaf in jax.tree.leaves(arrays)}
    if len(rows) != 1 or rows & {None, 0}:
        raise ValueError(
            f"Expected {what} to be arrays with a common leading axis of length >= 1, got {rows or 'none'}."
        )
    return arrays
