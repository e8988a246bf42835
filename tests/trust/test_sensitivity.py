"""One record, whatever it holds, moves a step's sum by at most C when it comes or goes, and by 2 C when it is replaced.

`tests/contracts/test_problems.py`, `test_engine_bounds.py` and `tests/problems` hold single values against this; here
rows of every hostile kind are mixed by hypothesis, for every problem, and for the compiled kernels as the dense engine.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from noisecast import DPSGD, Poisson, SampledGaussian, Scenario, jax_model, linear_model, matrix_factorization
from noisecast.engines.dense import DenseRun
from noisecast.engines.row_sparse import FINEST, RowSparseRun
from noisecast.optimizers.schedule import Schedule
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.datasets import Dataset, Ratings, label_sets
from noisecast.problems.linear import Labelled
from noisecast.problems.rows import rows_from
from noisecast.release import train

N, P, FILLED, OUTPUTS, USERS, ITEMS, DIM = 14, 24, 5, 4, 5, 6, 3
ROOT = RandomRoot.from_insecure_seed(900_200)
CLIPS = (1e-3, 0.7, 50.0)
ROUNDING = 1e-6 + N * 4e-7  # the promise's, and that of a float32 sum of N gradients

VALUES = {
    "usual": 1.0, "nan": np.nan, "inf": np.inf, "-inf": -np.inf, "1e30": 1e30, "-3e38": -3e38, "1e15": 1e15,
    "denormal": 1e-42, "zero": 0.0,
}  # fmt: skip
ROWS = st.lists(st.sampled_from([*VALUES, "one hostile", "duplicate"]), min_size=N, max_size=N)


def hostile(features: np.ndarray, kinds: list[str]) -> np.ndarray:
    """Rows with the same entries filled, each times what its kind says."""
    found = features.copy()
    with np.errstate(over="ignore"):
        for i, kind in enumerate(kinds):
            if kind == "duplicate":
                found[i] = found[0]
            elif kind == "one hostile":
                found[i, np.flatnonzero(found[i])[0]] = np.nan if i % 2 else 1e25
            else:
                found[i, found[i] != 0] *= np.float32(VALUES[kind])
    return found


def base_rows() -> np.ndarray:
    rng = np.random.default_rng(900_201)
    features = np.zeros((N, P), np.float32)
    for row in features:
        row[rng.choice(P, FILLED, replace=False)] = rng.normal(size=FILLED)
    return features


@cache
def data(kind: str) -> Dataset:
    rng = np.random.default_rng(900_202)
    count = 2 if kind.startswith("logistic") else OUTPUTS
    labels = np.arange(N) % count
    if kind.startswith("multi-label"):
        labels = label_sets([np.flatnonzero(row) for row in rng.random((N, count)) < 0.5])
    features = base_rows()
    return Dataset(
        kind,
        scipy.sparse.csr_array(features) if kind.endswith("csr") else features,
        labels.astype(np.int32),
        tuple(map(str, range(count))),
    )


LINEAR = ("logistic", "logistic-csr", "softmax", "softmax-csr", "multi-label", "multi-label-csr")


@cache
def clean(kind: str):
    if kind in LINEAR:
        return linear_model(data(kind))
    if kind == "factorization":
        rng = np.random.default_rng(900_203)
        ratings = Ratings(rng.integers(0, USERS, N), rng.integers(0, ITEMS, N), rng.integers(1, 6, N), USERS, ITEMS)
        return matrix_factorization(ratings, dim=DIM, public_init_seed=0, init_std=1.0)

    def loss(params, example):
        x, y = example
        return jnp.logaddexp(0.0, jnp.where(y == 1, -1.0, 1.0) * (jnp.tanh(x @ params["w"]) @ params["v"]))

    start = {"w": np.zeros((P, 2), np.float32), "v": np.zeros(2, np.float32)}
    return jax_model(loss, start, (base_rows(), (np.arange(N) % 2).astype(np.int32)), microbatch_size=5)


def problem_with(kind: str, kinds: list[str], removed: int | None = None):
    """Past the loaders, which refuse what is not finite; of the same shape and name, to be compiled once."""
    problem, kept = clean(kind), np.arange(N) != removed
    rows = hostile(base_rows(), kinds)
    if kind in LINEAR:
        if kind.endswith("csr"):
            filled = scipy.sparse.csr_array(base_rows())
            # The same entries, be they 0 or not a number.
            columns, pointers = filled.indices, filled.indptr
            values = rows[np.repeat(np.arange(N), np.diff(pointers)), columns]
            rows = scipy.sparse.csr_array((values, columns, pointers), shape=(N, P))
        return replace(problem, train=Labelled(rows_from(rows[kept]), problem.train.labels[kept]))
    if kind == "factorization":
        with np.errstate(over="ignore"):
            labels = np.asarray(problem.train.labels) + hostile(np.eye(N, P, dtype=np.float32), kinds).sum(axis=1)
        train = replace(problem.train, labels=jnp.asarray(labels, jnp.float32))
    else:
        train = jnp.asarray(rows), problem.train[1]
    return replace(problem, train=jax.tree.map(lambda leaf: leaf[kept], train))


@jax.jit
def sums(problem, params, masks, l2_clip_norm):
    one = lambda mask: problem.clipped_sum(params, problem.examples(jnp.arange(N), mask), l2_clip_norm)  # noqa: E731
    return jax.lax.map(one, masks)


KINDS = (*LINEAR, "factorization", "jax_model")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    kinds=ROWS, clip=st.sampled_from(CLIPS), size=st.sampled_from([0.0, 1.0, 1e4, 1e15]), removed=st.integers(0, N - 1)
)
def test_a_record_moves_the_sum_by_c_and_its_replacement_by_2_c(kind, kinds, clip, size, removed):
    problem = problem_with(kind, kinds)
    params = size * np.random.default_rng(900_204).normal(size=problem.num_params).astype(np.float32)
    everyone, other = np.ones(N, bool), (removed + 1) % N
    without = everyone.copy()
    without[removed] = False
    # D and D' of one size, which differ in one record: each lacks one of two.
    before, after = without.copy(), everyone.copy()
    after[other] = False
    nobody = np.zeros(N, bool)
    masks = jnp.asarray([everyone, without, before, after, nobody, ~without])
    found = np.asarray(sums(problem, jnp.asarray(params), masks, clip), np.float64)
    assert np.isfinite(found).all()
    assert np.linalg.norm(found[0] - found[1]) <= clip * (1 + ROUNDING)
    assert np.linalg.norm(found[2] - found[3]) <= 2 * clip * (1 + ROUNDING)
    assert not found[4].any(), "an empty batch sums to nothing"
    assert np.linalg.norm(found[5]) <= clip * (1 + 1e-6)  # alone, without the rounding of others
    if kinds[removed] == "nan":
        assert not found[5].any(), "a record that is no number contributes nothing"


def test_a_clip_that_is_missing_is_seen():
    """The control: with a clip norm that no gradient reaches, one record moves the sum by more than C."""
    problem = problem_with("softmax", ["1e15"] * N)
    masks = jnp.asarray([np.ones(N, bool), np.arange(N) != 3])
    found = np.asarray(sums(problem, jnp.zeros(problem.num_params), masks, 1e30), np.float64)
    assert np.linalg.norm(found[0] - found[1]) > 2 * max(CLIPS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_is_no_number_is_counted_and_changes_nobody_elses_share(kind):
    """It is counted among the clipped, and the sum is that of the others, bit for bit."""
    kinds = ["usual"] * N
    kinds[2] = kinds[9] = "nan"
    problem, unharmed = problem_with(kind, kinds), clean(kind)
    params = jnp.asarray(np.random.default_rng(900_205).normal(size=problem.num_params), jnp.float32)
    others = jnp.asarray([~np.isin(np.arange(N), (2, 9))])
    everyone = jnp.ones((1, N), bool)
    expected = sums(problem_with(kind, ["usual"] * N), params, others, 0.7)
    np.testing.assert_allclose(sums(problem, params, everyone, 0.7), expected, rtol=1e-6, atol=1e-7)
    huge = 1e30  # which clips nobody else
    assert float(unharmed.evaluate(params, huge)["clip_fraction"]) == 0
    np.testing.assert_allclose(float(problem.evaluate(params, huge)["clip_fraction"]), 2 / N, rtol=1e-6)


def precisions_of_products(jaxpr) -> list:
    """Of every product of matrices in a computation, however deep."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(equation.params["precision"])
        for inner in jaxprs_in_params(equation.params):
            found += precisions_of_products(inner)
    return found


@pytest.mark.parametrize("kind", LINEAR)
def test_products_of_clipped_gradients_keep_every_bit(kind):
    """An accelerator would cut numbers to 11 bits or 8, and a clipped gradient would come out longer than C."""
    problem = clean(kind)
    examples = problem.examples(jnp.arange(N), jnp.ones(N, bool))
    exact, usual = (
        jax.make_jaxpr(summed)(jnp.ones(problem.num_params))
        for summed in (
            lambda params: problem.clipped_sum(params, examples, 0.7),
            lambda params: params[:, None] @ params[None],
        )
    )
    highest = (jax.lax.Precision.HIGHEST,) * 2
    found = precisions_of_products(exact.jaxpr)
    assert found and all(each == highest for each in found)
    assert precisions_of_products(usual.jaxpr) == [None], "the control"


# --- Engines ----------------------------------------------------------------------------------------------------------


def step_of(engine, problem, params: np.ndarray, clip: float) -> np.ndarray:
    """The sum that one step of an engine descends along: everybody in the batch, next to no noise, no division."""
    mechanism = SampledGaussian(noise_multiplier=1e-9, l2_clip_norm=clip, sampler=Poisson(1.0, 1.0))
    asked = Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=1.0), num_steps=2)
    run = engine([asked], repeats=[0], root=ROOT)
    state = run.state()
    name = "weights_0" if engine is RowSparseRun else "leaf_0"
    run.restore(state | {name: params.reshape(state[name].shape)})
    run.advance(1)
    return params.astype(np.float64) - run.params[0, 0]


SPARSE = ("logistic-csr", "softmax-csr", "multi-label-csr", "factorization")


def moved_by(engine, kind: str, kinds: list[str], clip: float, size: float, removed: int) -> tuple[float, float]:
    """How far the engine's sums are apart with and without a record; and what rounding the parameters may add."""
    params = (size * np.random.default_rng(900_206).normal(size=clean(kind).num_params)).astype(np.float32)
    found = [step_of(engine, problem_with(kind, kinds, less), params, clip) for less in (None, removed)]
    assert np.isfinite(found).all()
    rounding = 2.0**-22 * (np.linalg.norm(params.astype(np.float64)) + max(map(np.linalg.norm, found)))
    return float(np.linalg.norm(found[0] - found[1])), float(rounding)


@pytest.mark.parametrize("kind", SPARSE)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(kinds=ROWS, clip=st.sampled_from((0.3, 50.0)), size=st.sampled_from([0.0, 1.0]), removed=st.integers(0, N - 1))
def test_a_step_of_the_row_sparse_engine_moves_by_no_more(kind, kinds, clip, size, removed):
    moved, rounding = moved_by(RowSparseRun, kind, kinds, clip, size, removed)
    assert moved <= clip * (1 + ROUNDING) + rounding


@pytest.mark.parametrize(
    "kind", [kind if kind == "softmax" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_step_of_the_dense_engine_moves_by_no_more(kind):
    """Each removal is compiled anew: every kind of row once, and three of them removed."""
    kinds = [*VALUES, "one hostile", "one hostile", "duplicate", "usual", "nan"]
    for removed in (1, 4, 9):
        moved, rounding = moved_by(DenseRun, kind, kinds, 0.3, 1.0, removed)
        assert moved <= 0.3 * (1 + ROUNDING) + rounding


@pytest.mark.parametrize("engine", [DenseRun, RowSparseRun])
def test_an_engine_without_a_clip_is_seen(engine):
    moved, _ = moved_by(engine, "softmax-csr", ["usual"] * N, 1e15, 1.0, 3)
    assert moved > 0.3  # so that a clip of 0.3 would have been seen to be missing


@pytest.mark.parametrize("engine, kind", [(DenseRun, "softmax"), (RowSparseRun, "softmax-csr")])
def test_an_empty_batch_is_noise_alone(engine, kind):
    """Of 14 records one in a million is drawn: the steps are noise, and there are steps."""
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson(1e-6, 1.0))
    asked = Scenario(problem=clean(kind), mechanism=mechanism, optimizer=DPSGD(learning_rate=1.0), num_steps=40)
    run = engine([asked], repeats=[0], root=ROOT)
    run.advance(40)
    params = run.params[0, 0].astype(np.float64)
    assert 0.6 < params.std() / 40**0.5 < 1.4


def _rated(num_ratings: int, dim: int, init_std: float):
    """So many ratings of one pair, and one of another, so that the pair may have none."""
    places = np.r_[np.zeros(num_ratings, int), 1]
    ratings = Ratings(places, places, np.r_[np.full(num_ratings, 5.0), 3.0], num_users=2, num_items=2)
    return matrix_factorization(ratings, public_init_seed=0, dim=dim, init_std=init_std)


def _fine(problem, spacings: float) -> Scenario:
    """Steps of so many spacings of the largest weight, for each number that a rating moves."""
    largest = np.abs(np.asarray(problem.initial_params())).max()
    step = spacings * float(np.spacing(largest)) * (2 * problem.dim) ** 0.5
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=0.1, sampler=Poisson(1.0, 1000))
    return Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=step * 10_000), num_steps=1)


def _before_noise(problem, spacings: float) -> np.ndarray:
    """Weights after a step whose noise still waits, as the row-sparse engine holds them."""
    run = RowSparseRun([_fine(problem, spacings)], repeats=[0], root=ROOT)
    run.advance(1)
    return run._blocks[0]._weights._weights.astype(float)


def _largest_move(dim: int, spacings: float) -> float:
    """By which one rating more moves the weights, of C eta/B."""
    found = []
    for count in (1, 5, 20, 60, 300):
        for init_std in (0.3, 1.0):
            fewer, more = (_rated(number, dim, init_std) for number in (count, count + 1))
            moved = np.linalg.norm(_before_noise(fewer, spacings) - _before_noise(more, spacings))
            optimizer = _fine(fewer, spacings).optimizer
            found.append(moved / (optimizer.learning_rate * 0.1 / 1000))
    return max(found)


@pytest.mark.parametrize("dim", [2, 16, 100])
def test_steps_as_fine_as_float32_weights_are_not_released(dim):
    """DP-SGD's noise waits, so a step is rounded before it is hidden."""
    assert _largest_move(dim, FINEST) < 1.015
    coarse, fine = (_fine(_rated(5, dim, 1.0), FINEST * share) for share in (1.01, 0.99))
    assert train(coarse).statement.epsilon < np.inf
    with pytest.raises(ValueError, match="float32 rounds such steps before noise hides them"):
        train(fine)
    assert train(fine, insecure_seed=0).statement.epsilon == np.inf


def test_a_schedule_makes_no_finer_steps_than_a_learning_rate_may():
    fine = _fine(_rated(5, 2, 1.0), FINEST * 0.99)
    optimizer = DPSGD(learning_rate=fine.optimizer.learning_rate * 1e4)
    for factors in ((1e-4,), (1.0, 1e-4)):
        schedule = Schedule(tuple(range(len(factors))), factors)
        with pytest.raises(ValueError, match="float32 rounds such steps before noise hides them"):
            train(replace(fine, optimizer=optimizer, num_steps=2, schedule=schedule))


def test_of_finer_steps_a_record_is_seen_to_move_more():
    assert _largest_move(2, FINEST / 10) > 1.1
