"""Every data problem: its clipped sum against a plain float64 definition, its sensitivity, its moments."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from noisecast import jax_model, linear_model, matrix_factorization
from noisecast.problems.clipping import widened
from noisecast.problems.datasets import Dataset, Ratings, label_sets
from noisecast.problems.linear import Labelled
from noisecast.problems.rows import rows_from

N, P, WIDTH = 40, 7, 16


def features(seed: int = 0, sparse: bool = False):
    rng = np.random.default_rng(seed)
    dense = rng.normal(size=(N, P)).astype(np.float32) * (rng.random((N, P)) < 0.4)
    wide = np.hstack([dense, np.zeros((N, 3 * P), np.float32)]).astype(np.float32)
    return scipy.sparse.csr_array(wide) if sparse else wide


def dataset(num_classes: int, sparse: bool = False, sets: bool = False) -> Dataset:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, num_classes, N).astype(np.int32)
    labels[:num_classes] = np.arange(num_classes)
    if sets:  # none to all
        labels = label_sets([np.flatnonzero(row) for row in rng.random((N, num_classes)) < rng.random((N, 1))])
    return Dataset("toy", features(sparse=sparse), labels, tuple(str(k) for k in range(num_classes)))


def jax_twin(num_classes: int, microbatch_size: int = 64):
    """The same softmax model as a user would write it."""
    data = dataset(num_classes)

    def loss(params, example):
        x, y = example
        return -jax.nn.log_softmax(x @ params["w"] + params["b"])[y]

    start = {"w": np.zeros((4 * P, num_classes), np.float32), "b": np.zeros(num_classes, np.float32)}
    return jax_model(loss, start, (data.features, data.labels), microbatch_size=microbatch_size)


def naive_gradients(num_classes: int, params: np.ndarray, sets: bool = False) -> np.ndarray:
    """Per-example gradients of the linear model, in float64 and one by one; (N, d)."""
    data = dataset(num_classes, sets=sets)
    outputs = 1 if num_classes == 2 and not sets else num_classes
    weights = params.astype(np.float64).reshape(4 * P + 1, outputs)
    gradients = []
    for x, y in zip(np.asarray(data.features, np.float64), data.labels):
        augmented = np.append(x, 1.0)
        logits = augmented @ weights
        if sets:
            residual = 1 / (1 + np.exp(-logits)) - np.isin(np.arange(outputs), y)
        elif outputs == 1:
            residual = 1 / (1 + np.exp(-logits)) - y
        else:
            residual = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum() - np.eye(outputs)[y]
        gradients.append(np.outer(augmented, residual).ravel())
    return np.array(gradients)


def naive_clipped(gradients: np.ndarray, l2_clip_norm: float) -> np.ndarray:
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    return gradients * np.minimum(1.0, l2_clip_norm / norms)


@dataclass(frozen=True)
class Case:
    name: str
    num_classes: int
    sparse: bool
    sets: bool = False


CASES = [
    Case("logistic", 2, False),
    Case("logistic-sparse", 2, True),
    Case("softmax", 5, False),
    Case("softmax-sparse", 5, True),
    Case("multi-label", 5, False, sets=True),
    Case("multi-label-sparse", 5, True, sets=True),
    Case("two-labels", 2, True, sets=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("l2_clip_norm", [0.3, 1.0, 100.0])
def test_clipped_sum_is_the_sum_of_clipped_gradients(case, l2_clip_norm):
    problem = linear_model(dataset(case.num_classes, case.sparse, case.sets))
    params = np.random.default_rng(2).normal(size=problem.num_params).astype(np.float32)
    rows, mask = np.arange(WIDTH) * 2 % N, np.arange(WIDTH) < 11
    clipped = naive_clipped(naive_gradients(case.num_classes, params, case.sets), l2_clip_norm)
    got = problem.clipped_sum(jnp.asarray(params), problem.examples(rows, mask), l2_clip_norm)
    np.testing.assert_allclose(got, clipped[rows[mask]].sum(axis=0), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_moments_are_those_of_the_clipped_gradients(case):
    problem = linear_model(dataset(case.num_classes, case.sparse, case.sets))
    params = np.random.default_rng(3).normal(size=problem.num_params).astype(np.float32)
    clipped = naive_clipped(naive_gradients(case.num_classes, params, case.sets), 0.8)
    mean, second = problem.clipped_gradient_moments(jnp.asarray(params), 0.8)
    np.testing.assert_allclose(mean, clipped.mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(second, (clipped**2).mean(axis=0), rtol=1e-4, atol=1e-7)


def factorization(**settings):
    rng = np.random.default_rng(8)
    ratings = Ratings(rng.integers(0, 5, N), rng.integers(0, 6, N), rng.integers(1, 6, N), num_users=5, num_items=6)
    problem = matrix_factorization(ratings, dim=3, public_init_seed=0, init_std=0.8, **settings)
    params = np.asarray(problem.initial_params(), np.float64).reshape(11, 3)
    gradients = np.zeros((N, 11, 3))
    for i, (user, item, rating) in enumerate(zip(ratings.user, ratings.item, ratings.rating)):
        slope = (params[user] @ params[5 + item] - (rating - 3.0)) * (1 if problem.error_weight == 0.5 else 2)
        gradients[i, user], gradients[i, 5 + item] = slope * params[5 + item], slope * params[user]
    return problem, gradients.reshape(N, -1)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("l2_clip_norm", [0.3, 1.5, 100.0])
def test_a_factorisation_sums_and_weighs_its_clipped_gradients(half, l2_clip_norm):
    problem, gradients = factorization(half=half)
    clipped, params = naive_clipped(gradients, l2_clip_norm), problem.initial_params()
    rows, mask = np.arange(WIDTH) * 2 % N, np.arange(WIDTH) < 11
    got = problem.clipped_sum(params, problem.examples(rows, mask), l2_clip_norm)
    np.testing.assert_allclose(got, clipped[rows[mask]].sum(axis=0), rtol=2e-5, atol=2e-6 * l2_clip_norm)
    mean, second = problem.clipped_gradient_moments(params, l2_clip_norm)
    np.testing.assert_allclose(mean, clipped.mean(axis=0), rtol=1e-4, atol=1e-6 * l2_clip_norm)
    np.testing.assert_allclose(second, (clipped**2).mean(axis=0), rtol=1e-4, atol=1e-7)
    weights = np.random.default_rng(9).normal(size=N).astype(np.float32)
    weighted = problem.weighted_clipped_sum(params, jnp.asarray(weights), l2_clip_norm)
    np.testing.assert_allclose(weighted, weights @ clipped, rtol=1e-4, atol=1e-5 * l2_clip_norm)
    metrics, norms = problem.evaluate(params, l2_clip_norm), np.linalg.norm(gradients, axis=1)
    np.testing.assert_allclose(metrics["gradient_norm"], np.linalg.norm(gradients.mean(axis=0)), rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction"], (norms > l2_clip_norm).mean())
    nobody = problem.examples(jnp.zeros(8, int), jnp.zeros(8, bool))
    assert not problem.clipped_sum(params, nobody, l2_clip_norm).any()


@pytest.mark.parametrize("biases", ["same", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_in_half_precision_is_clipped_to_the_clip_norm(dtype, biases):
    """Its loss sees its own dtype; the norm, the clip and what is trained are float32."""
    seen, data, l2_clip_norm = set(), dataset(5), 0.7

    def loss(params, example):
        x, y = example
        seen.add((str(params["w"].dtype), str(params["b"].dtype)))
        return -jax.nn.log_softmax(x.astype(dtype) @ params["w"] + params["b"])[y]

    expected = dtype, dtype if biases == "same" else biases
    start = {"w": jnp.ones((4 * P, 5), dtype), "b": jnp.zeros(5, expected[1])}
    problem = jax_model(loss, start, (data.features, data.labels))
    alone = jax.jit(lambda i: problem.clipped_sum(problem.initial_params(), problem.examples(i, i >= 0), l2_clip_norm))
    lengths = [np.linalg.norm(np.asarray(alone(jnp.array([i])), np.float64)) for i in range(N)]
    assert max(lengths) <= l2_clip_norm * (1 + 1e-6)
    assert min(lengths) >= l2_clip_norm * (1 - 1e-4), "all are clipped here: half precision would be off by 1e-3"
    assert seen == {expected}
    assert problem.params_tree(problem.initial_params())["w"].dtype == dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_norm_and_sum_are_of_the_same_rounded_numbers(dtype):
    """A rounding that a compiler must keep follows the one it may leave out; without it the step has none."""
    gradients = jnp.asarray(np.random.default_rng(3).normal(size=(4, 300)) * np.geomspace(1e-7, 1e4, 300), dtype)
    assert np.array_equal(widened(gradients), gradients.astype(jnp.float32)), "it changes no number of that kind"
    bits = {"bfloat16": 7, "float16": 10}[dtype]
    steps = jax.jit(widened).trace(gradients).jaxpr.eqns
    kept = [step.params for step in steps if step.primitive.name == "reduce_precision"]
    assert kept == [{"exponent_bits": 8, "mantissa_bits": bits}]


@pytest.mark.parametrize("microbatch_size", [1, 5, 16, 64])
def test_a_users_model_is_clipped_like_the_closed_form_whatever_its_microbatch(microbatch_size):
    """Parameter order differs (b, w against W, b), so norms and losses are compared, and W itself."""
    twin, problem = jax_twin(5, microbatch_size), linear_model(dataset(5))
    weights = np.random.default_rng(4).normal(size=(4 * P + 1, 5)).astype(np.float32)
    flat_twin = jnp.concatenate([weights[-1], weights[:-1].ravel()])
    rows, mask = np.arange(WIDTH), np.arange(WIDTH) < 13
    ours = problem.clipped_sum(jnp.asarray(weights.ravel()), problem.examples(rows, mask), 0.7)
    with jax.default_matmul_precision("highest"):  # a user's own products are less exact on a GPU, as the user has it
        found = twin.clipped_sum(flat_twin, twin.examples(jnp.asarray(rows), jnp.asarray(mask)), 0.7)
    theirs = twin.params_tree(found)
    np.testing.assert_allclose(theirs["w"], ours.reshape(-1, 5)[:-1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(theirs["b"], ours.reshape(-1, 5)[-1], rtol=1e-4, atol=1e-6)
    metrics, twin_metrics = problem.evaluate(jnp.asarray(weights.ravel()), 0.7), twin.evaluate(flat_twin, 0.7)
    for name in ("loss", "gradient_norm", "clip_fraction"):
        np.testing.assert_allclose(twin_metrics[name], metrics[name], rtol=1e-4)


HOSTILE = {
    "nan": np.nan, "inf": np.inf, "1e30": 1e30, "-1e30": -1e30, "denormal": 1e-42, "zero": 0.0, "1e15": 1e15,
}  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("kind", ["linear", "jax"])
@pytest.mark.parametrize("l2_clip_norm", [0.1, 2.0])
def test_one_example_moves_the_sum_by_at_most_the_clip_norm(hostile, kind, l2_clip_norm):
    data = dataset(5)
    rows = np.asarray(data.features).copy()
    rows[3] = hostile
    rows[4, 0] = hostile
    params = jnp.asarray(np.random.default_rng(5).normal(size=(4 * P + 1) * 5), jnp.float32)
    if kind == "linear":  # past the loaders, which refuse such rows
        problem = linear_model(data)
        problem = replace(problem, train=Labelled(rows_from(rows), problem.train.labels))
    else:
        twin = jax_twin(5)
        problem = jax_model(twin.example_loss, twin.params_tree(twin.start), (rows, data.labels))
    masks = np.arange(WIDTH) != np.arange(-1, 6)[:, None]  # everyone, then without each of six
    sums = jax.jit(
        jax.vmap(lambda mask: problem.clipped_sum(params, problem.examples(jnp.arange(WIDTH), mask), l2_clip_norm))
    )(masks)
    assert np.isfinite(sums).all()
    moved = np.linalg.norm(np.float64(sums[0]) - np.float64(sums[1:]), axis=1)
    # Float32 sums of 16 gradients carry rounding of their own, beside the 1e-6 that the clip factor may.
    assert (moved <= l2_clip_norm * (1 + 1e-6 + 4e-7 * WIDTH)).all()


def test_an_empty_batch_sums_to_zero():
    for problem in (linear_model(dataset(2)), jax_twin(3)):
        params = jnp.ones(problem.num_params)
        nobody = problem.examples(jnp.zeros(8, int), jnp.zeros(8, bool))
        assert not problem.clipped_sum(params, nobody, 1.0).any()


def test_the_local_quadratic_is_the_hessian():
    problem = linear_model(dataset(2))
    params = jnp.asarray(np.random.default_rng(6).normal(size=problem.num_params), jnp.float32)
    quadratic = problem.local_quadratic(params)

    def mean_loss(at):
        return problem.evaluate(at, 1.0)["loss"]

    hessian = np.asarray(jax.jit(jax.hessian(mean_loss))(params), np.float64)
    gradient = np.asarray(jax.jit(jax.grad(mean_loss))(params), np.float64)
    np.testing.assert_allclose(quadratic.signal_squared_gradients.sum(), gradient @ gradient, rtol=1e-4)
    for power in (1, 2):
        expected = gradient @ np.linalg.matrix_power(hessian, power) @ gradient
        got = quadratic.signal_squared_gradients @ quadratic.signal_eigenvalues**power
        np.testing.assert_allclose(got, expected, rtol=1e-3)
    np.testing.assert_allclose(quadratic.noise_multiplicities.sum(), problem.num_params, rtol=1e-6)


@pytest.mark.parametrize("l2_clip_norm", [0.2, 0.9, 50.0])
def test_a_users_model_is_clipped_like_jax_privacy_clips_it(l2_clip_norm):
    """An independent implementation as referee; ours is kept because it is several times faster on small models."""
    clipped_grad = pytest.importorskip("jax_privacy").clipped_grad
    twin = jax_twin(5, microbatch_size=5)
    params = jnp.asarray(np.random.default_rng(7).normal(size=twin.num_params), jnp.float32)
    rows, mask = jnp.arange(WIDTH), jnp.arange(WIDTH) < 13
    batch, _ = twin.examples(rows, mask)
    referee = clipped_grad(twin.example_loss, l2_clip_norm=l2_clip_norm, keep_batch_dim=False)
    expected = referee(twin.params_tree(params), batch, is_padding_example=~mask)
    got = twin.params_tree(twin.clipped_sum(params, twin.examples(rows, mask), l2_clip_norm))
    for name in ("w", "b"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6)
