"""Feature rows: two forms of the same numbers, and which one a problem takes."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from noisecast import DPSGD, Poisson, SampledGaussian, Scenario, engines, linear_model
from noisecast.privacy.noise import RandomRoot
from noisecast.problems import rows
from noisecast.problems.datasets import Dataset
from noisecast.problems.rows import DenseRows, PaddedRows, SparseRows, rows_from

SEED = 970_001


def sparse_matrix(shape=(50, 40), density=0.1) -> scipy.sparse.csr_array:
    """Some of the rows are empty."""
    rng = np.random.default_rng(SEED)
    filled = rng.normal(size=shape) * (rng.random(shape) < density) * (np.arange(shape[0])[:, None] % 7 > 0)
    return scipy.sparse.csr_array(filled.astype(np.float32))


@pytest.mark.parametrize("at_once", [7, 4096])
@pytest.mark.parametrize("density", [0.1, 0.0])
def test_sparse_rows_multiply_like_the_matrix(density, at_once, monkeypatch):
    monkeypatch.setattr(rows, "ROWS_AT_ONCE", at_once)
    matrix = sparse_matrix(density=density)
    found, plain = rows_from(matrix), matrix.toarray().astype(np.float64)
    assert isinstance(found, SparseRows)
    rng = np.random.default_rng(SEED)
    weights, coefficients = rng.normal(size=(40, 3)), rng.normal(size=(50, 3))
    np.testing.assert_allclose(found.dot(jnp.asarray(weights)), plain @ weights, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.weighted_sum(jnp.asarray(coefficients)), plain.T @ coefficients, atol=1e-4)
    squares = found.weighted_sum_of_squares(jnp.asarray(coefficients))
    np.testing.assert_allclose(squares, (plain**2).T @ coefficients, atol=1e-4)
    chosen = np.array([3, 0, 3, 49])
    taken = found.take(jnp.asarray(chosen)).dot(jnp.asarray(weights))
    np.testing.assert_allclose(taken, plain[chosen] @ weights, rtol=1e-5, atol=1e-5)
    exact = (plain**2).sum(axis=1)
    assert (found.squared_norms >= exact).all()
    np.testing.assert_allclose(found.squared_norms, exact, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_a_row_that_is_not_finite_is_nothing_of_infinite_norm(value):
    """A square that float32 cannot hold makes the norm infinite, and leaves the row as it is."""
    matrix = sparse_matrix()
    matrix.data[matrix.indptr[8]] = value
    for found in (rows_from(matrix), rows_from(matrix.toarray(), sparse=False)):
        assert list(np.flatnonzero(~np.isfinite(found.squared_norms))) == [8]
        assert np.isfinite(np.asarray(found.dot(jnp.ones((40, 1))))).all()


def test_compiled_programs_see_the_padded_form_whoever_asks_first():
    """Also where it is first asked for inside one, it is kept as numbers, not as that program's own."""
    found = rows_from(sparse_matrix())
    inside = jax.jit(lambda weights: found.dot(weights))(jnp.ones((40, 1)))
    np.testing.assert_array_equal(inside, found.dot(jnp.ones((40, 1))))
    seen = []
    jax.jit(lambda given: seen.append(type(given)))(found)
    assert seen == [PaddedRows]


def test_what_jax_makes_of_the_rows_is_not_sent_to_workers():
    found = rows_from(sparse_matrix())
    before = pickle.dumps(found)
    assert "padded" not in vars(found) and found.padded is found.padded
    assert len(pickle.dumps(found)) == len(before)
    again = pickle.loads(before)
    np.testing.assert_array_equal(again.dot(jnp.ones((40, 1))), found.dot(jnp.ones((40, 1))))


def test_one_long_test_row_does_not_change_the_engine():
    train, test = sparse_matrix(), sparse_matrix((10, 40)).toarray()
    test[4] = 1.0
    labels = np.arange(50, dtype=np.int32) % 2
    for features in (scipy.sparse.csr_array(test), test):
        problem = linear_model(
            Dataset("toy", train, labels, ("a", "b")), Dataset("toy", features, labels[:10], ("a", "b"))
        )
        assert isinstance(rows_from(scipy.sparse.csr_array(test)), DenseRows)  # by itself it would be
        mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson.for_batch_size(8, 50))
        asked = Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=0.1), num_steps=3)
        assert engines.explain(asked) == "Computed by the engine row_sparse."
        run = engines.start([asked], repeats=[0], root=RandomRoot.from_insecure_seed(SEED))
        run.advance(3)
        params = jnp.asarray(run.params[0, 0])
        expected = linear_model(Dataset("toy", scipy.sparse.csr_array(test), labels[:10], ("a", "b")))
        loss = float(expected.evaluate(params, 1.0)["loss"])
        np.testing.assert_allclose(run.evaluate()["test_loss"], loss, rtol=1e-5)
