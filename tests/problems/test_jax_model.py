"""A user's own model: what cannot be trained is refused at once, by one sentence, and not after the training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noisecast import jax_model

X, Y = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32), np.arange(12, dtype=np.float32)
PARAMS = {"w": np.zeros(3, np.float32)}


def loss(params, example):
    x, y = example
    return 0.5 * (params["w"] @ x - y) ** 2


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"params": {"w": np.zeros(3, int)}}, "got a leaf '[0 0 0]' of type ndarray"),
        ({"params": {"w": np.zeros(3), "f": jnp.sin}}, "equinox.partition"),
        ({"params": {"w": jax.random.key(0)}}, "floating-point arrays, got a leaf"),
        ({"params": {}}, "got no number at all"),
        ({"params": {"w": np.zeros(0)}, "loss": lambda p, e: 1.0}, "got no number at all"),
        ({"params": {"w": np.array([0.0, np.nan, 0.0])}}, "Expected params to be finite in float32"),
        ({"params": {"w": np.full(3, 1e300)}}, "Expected params to be finite in float32"),
        ({"loss": lambda p, e: (loss(p, e), 1.0)}, r"Expected loss\(params, example\) to be a scalar .* \(\), \(\)"),
        ({"loss": lambda p, e: p["w"]}, r"to be a scalar of one example, got shape \(3,\)"),
        ({"loss": lambda p, e: jnp.argmax(e[0])}, "to be a floating-point number, got int32"),
        ({"loss": lambda p, e: None}, "to be a scalar of one example"),
        ({"is_correct": lambda p, e: e[0] > 0}, r"Expected is_correct\(params, example\) to be a scalar"),
        ({"is_correct": lambda p, e: e[1]}, "to be a bool, got float32"),
        ({"examples": (X, Y[:5])}, "a common leading axis"),
        ({"examples": (X, np.array(["a"] * 12))}, "Expected examples to be a pytree of numeric arrays"),
        ({"test_examples": (X[:, :2], Y)}, "Expected test_examples of the form of examples"),
        ({"test_examples": [X]}, "Expected test_examples of the form of examples"),
        ({"microbatch_size": 2.5}, "microbatch_size to be a whole number >= 1, got 2.5"),
        ({"microbatch_size": "8"}, "microbatch_size to be a whole number >= 1, got '8'"),
        ({"microbatch_size": 0}, "microbatch_size to be a whole number >= 1, got 0"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_once(changes, words):
    asked = {"loss": loss, "params": PARAMS, "examples": (X, Y)} | changes
    with pytest.raises(ValueError, match=words.replace("[0 0 0]", r"\[0 0 0\]")):
        jax_model(asked.pop("loss"), asked.pop("params"), asked.pop("examples"), **asked)


def test_float64_is_refused_at_once_where_it_is_one():
    """Training would end in a TypeError of JAX, after a ledger was charged. Without x64 JAX makes it float32."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), PARAMS)
    with jax.enable_x64(True):
        for params in (wide, 0.5):
            with pytest.raises(ValueError, match="Expected params of at most float32, got float64"):
                jax_model(lambda p, e: 0.0 * jax.tree.leaves(p)[0].sum(), params, (X, Y))
    assert jax_model(loss, wide, (X, Y)).start.dtype == np.float32


def test_a_batch_of_nobody_sums_to_nothing():
    problem = jax_model(loss, PARAMS, (X, Y))
    nobody = problem.examples(jnp.zeros(0, int), jnp.zeros(0, bool))
    np.testing.assert_array_equal(problem.clipped_sum(problem.initial_params(), nobody, 1.0), np.zeros(3))


def test_python_numbers_and_other_numbers_of_test_examples_will_do():
    problem = jax_model(
        lambda p, e: (p["w"] * e[0].sum() + p["b"] - e[1]) ** 2, {"w": 0.0, "b": np.float32(1)}, (X, Y),
        test_examples=(X[:5], Y[:5]), is_correct=lambda p, e: e[1] > 3,
    )  # fmt: skip
    assert problem.num_params == 2
    assert "test_accuracy" in problem.evaluate(problem.initial_params(), 1.0)


def _closing_over(kind: str, array: np.ndarray):
    """A loss in which an array lies that is neither parameter nor example, the deeper the later its kind is named."""
    held = jnp.asarray(array, jnp.float32)

    @jax.custom_jvp
    def bent(x):
        return jnp.sum(x)

    bent.defjvp(lambda primals, tangents: (bent(*primals), held @ tangents[0]))

    @jax.custom_vjp
    def turned(x):
        return jnp.sum(x)

    turned.defvjp(lambda x: (turned(x), None), lambda _, cotangent: (cotangent * held,))
    inner = {
        "plain": lambda params: held @ params,
        "jit": lambda params: jax.jit(lambda p: held @ p)(params),
        "scan": lambda params: jax.lax.scan(lambda total, _: (total + held @ params, None), 0.0, length=2)[0],
        "cond": lambda params: jax.lax.cond(params[0] > 0, lambda: held @ params, lambda: 0.0),
        "key": lambda params: params @ jax.random.normal(jax.random.key(int(array[0])), (2,)),
        "held key": _with_key(jax.random.key(int(array[0]))),
        "derivative": bent,
        "reverse derivative": turned,
    }[kind]
    return lambda params, example: 0.5 * (inner(params) - example) ** 2


def _with_key(key):
    return lambda params: params @ jax.random.normal(key, (2,))


@pytest.mark.parametrize(
    "kind", ["plain", "jit", "scan", "cond", "key", "held key", "derivative", "reverse derivative"]
)
def test_what_a_loss_closes_over_is_in_the_fingerprint(kind):
    """Else two problems share one noise: what is released of one, less what is of the other, has none."""

    def fingerprint(array):
        loss = _closing_over(kind, np.asarray(array))
        return jax_model(loss, np.zeros(2, np.float32), np.ones(4, np.float32)).fingerprint

    assert fingerprint([1, 2]) == fingerprint([1, 2])
    assert fingerprint([1, 2]) != fingerprint([3, -7])


def test_what_decides_correctness_is_in_the_fingerprint():
    def fingerprint(at):
        return jax_model(
            lambda params, example: 0.5 * (params @ jnp.ones(2) - example) ** 2, np.zeros(2, np.float32),
            np.ones(4, np.float32), is_correct=lambda params, example: params[0] > jnp.asarray([at])[0],
        ).fingerprint  # fmt: skip

    assert fingerprint(0.5) == fingerprint(0.5) != fingerprint(0.7)
