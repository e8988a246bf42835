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
