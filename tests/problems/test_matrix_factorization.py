"""Matrix factorisation: its settings, its sensitivity in both engines, what it says about itself."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytest

from noisecast import DPSGD, FixedSize, Poisson, SampledGaussian, Scenario, engines, matrix_factorization
from noisecast.engines import dense, row_sparse, row_sparse_forms
from noisecast.engines._kernels import FAST, clipped_sum, touch
from noisecast.engines.row_sparse_lanes import lanes_of, scratch_of
from noisecast.privacy.mechanism import Adjacency
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.datasets import Ratings
from noisecast.problems.matrix_factorization import paper_like_matrix_factorization
from noisecast.scenario_file import ScenarioFileError, read_scenario_file

N, USERS, ITEMS = 200, 12, 9
ROOT = RandomRoot.from_insecure_seed(900_011)  # written down before any result


def ratings(seed: int = 900_012, n: int = N) -> Ratings:
    rng = np.random.default_rng(seed)
    taste = rng.normal(size=(2, USERS + ITEMS))
    user, item = rng.integers(0, USERS, n), rng.integers(0, ITEMS, n)
    rating = np.clip(np.round(3 + taste[0, user] * taste[1, USERS - 3 + item] + 0.3 * rng.normal(size=n)), 1, 5)
    return Ratings(user, item, rating, USERS, ITEMS)


def scenario(problem, *, z=1.0, clip=0.5, optimizer=None, sampler=None, num_steps=400) -> Scenario:
    mechanism = SampledGaussian(
        noise_multiplier=z, l2_clip_norm=clip, sampler=sampler or FixedSize(20, N), adjacency=Adjacency.REPLACE_ONE
    )
    optimizer = optimizer or DPSGD(learning_rate=1.0)
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps)


# --- Settings ---------------------------------------------------------------------------------------------------------


def test_the_default_is_centred_at_the_middle_of_the_scale_and_starts_small():
    data = ratings()
    problem = matrix_factorization(data, dim=4, public_init_seed=1)
    np.testing.assert_allclose(problem.train.labels, data.rating - 3.0)
    start = np.asarray(matrix_factorization(data, dim=5000, public_init_seed=1).initial_params())
    assert abs(start.mean()) < 5 * 0.1 / np.sqrt(start.size)
    assert abs(start.std() / 0.1 - 1) < 5 / np.sqrt(2 * start.size)
    shifted = matrix_factorization(data, dim=4, public_init_seed=1, rating_scale=(0, 10), center=2.0)
    np.testing.assert_allclose(shifted.train.labels, data.rating - 2.0)


def test_the_paper_like_setting_is_a_truncated_normal_and_raw_ratings():
    data = ratings()
    problem = paper_like_matrix_factorization(data, public_init_seed=1)
    assert problem.num_params == (USERS + ITEMS) * 100 and problem.error_weight == 0.5
    np.testing.assert_array_equal(problem.train.labels, data.rating)
    start = np.asarray(problem.initial_params())
    assert np.abs(start).max() <= 2
    many = np.asarray(
        matrix_factorization(data, dim=5000, init="truncated-normal", init_std=0.8796, public_init_seed=2).start
    )
    assert np.abs(many).max() <= 2.0001 and abs(many.std() / 0.8796 - 1) < 5 * 0.6 / np.sqrt(many.size)


def test_half_halves_the_loss_and_not_the_rmse():
    data = ratings()
    half, whole = (matrix_factorization(data, data, dim=4, public_init_seed=1, half=half) for half in (True, False))
    at = half.initial_params()
    one, two = (problem.evaluate(at, 1.0) for problem in (half, whole))
    for metric in ("loss", "test_loss", "gradient_norm"):
        np.testing.assert_allclose(2 * one[metric], two[metric], rtol=1e-6)
    np.testing.assert_allclose(one["rmse"], two["rmse"])
    np.testing.assert_allclose(one["rmse"], np.sqrt(2 * one["loss"]), rtol=1e-6)


def test_everything_that_decides_the_numbers_is_in_the_fingerprint():
    data, other = ratings(), ratings(900_013)
    base: dict[str, Any] = {"dim": 4, "public_init_seed": 1}
    changes = [
        {}, {"dim": 5}, {"public_init_seed": 2}, {"center": 2.5}, {"half": False}, {"init_std": 0.2},
        {"init": "truncated-normal"},
    ]  # fmt: skip
    prints = [matrix_factorization(data, **base | change).fingerprint for change in changes]
    prints += [matrix_factorization(other, **base).fingerprint, matrix_factorization(data, other, **base).fingerprint]
    assert len(set(prints)) == len(prints)
    assert prints[0] == matrix_factorization(data, **base).fingerprint
    wider = Ratings(data.user, data.item, data.rating, USERS + 1, ITEMS)
    assert matrix_factorization(wider, **base).fingerprint not in prints


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"dim": 0}, "Expected dim to be a whole number >= 1, got 0."),
        ({"init": "uniform"}, "Expected init normal or truncated-normal, got 'uniform'."),
        ({"init_std": 0.0}, "Expected 0 < init_std <= 10^30, got 0.0."),
        ({"rating_scale": (5, 1)}, "Expected a rating_scale (low, high) with -10^6 <= low < high <= 10^6, got (5, 1)."),
        ({"rating_scale": (1, 4)}, "Expected ratings in the public scale 1 .. 4, got 5;"),
        ({"center": 9.0}, "Expected center within the rating_scale 1 .. 5, got 9.0."),
        ({"center": np.nan}, "Expected center within the rating_scale 1 .. 5, got nan."),
        ({"test": Ratings(np.array([0]), np.array([0]), np.array([3.0]), 13, 9)}, "got 13 and 9."),
    ],
)
def test_a_wrong_setting_is_one_sentence(change, sentence):
    with pytest.raises(ValueError) as caught:
        matrix_factorization(ratings(), **{"public_init_seed": 0} | change)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("rating", [np.nan, np.inf])
def test_a_rating_that_is_not_finite_is_refused(rating):
    with pytest.raises(ValueError, match="Expected finite ratings"):
        Ratings(np.array([0]), np.array([0]), np.array([rating]), USERS, ITEMS)


# --- Sensitivity ------------------------------------------------------------------------------------------------------

HOSTILE = [1e-30, 1e-20, 1e-3, 1.0, 1e4, 1e9, 1e15, 1e18, 5e18, 1e25, 3e38, np.inf, np.nan]


def hostile_params(problem, size: float, seed: int = 900_014) -> np.ndarray:
    """All of that size, or some rows of it among rows of size 1."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(problem.num_rows, problem.dim)).astype(np.float32)
    with np.errstate(over="ignore"):
        table[rng.choice(problem.num_rows, 8, replace=False)] *= np.float32(size)
    return table


@numba.njit(**FAST | {"cache": False})
def summed(weights, ratings, batch, lanes, dim, scratch, step):
    count = touch(ratings, batch, step, scratch)
    clipped_sum(weights, ratings, batch, count, lanes, dim, scratch)
    return count


def kernel_sums(problem, table: np.ndarray, clip: float, batches) -> np.ndarray:
    """The compiled clipped sums of batches; (batches, d)."""
    question = scenario(problem, clip=clip)
    ratings = row_sparse_forms.ratings_of(problem.train, problem)
    lanes = lanes_of([question], problem.dim, ROOT, 0)
    scratch = scratch_of(problem.num_rows, lanes.lane, N)
    found = np.zeros((len(batches), *table.shape), np.float32)
    for step, batch in enumerate(batches):
        count = summed(table, ratings, np.asarray(batch, np.int64), lanes, problem.dim, scratch, step)
        found[step, scratch.touched[:count]] = scratch.gradient[:count]
    return found.reshape(len(batches), -1)


def jax_sums(problem, table: np.ndarray, clip: float, batches) -> np.ndarray:
    masks = np.array([np.isin(np.arange(N), batch) for batch in batches])
    return np.asarray(summed_by_jax(problem, jnp.asarray(table.ravel()), clip, masks))


@jax.jit
def summed_by_jax(problem, params, clip, masks):
    return jax.lax.map(lambda mask: problem.clipped_sum(params, problem.examples(jnp.arange(N), mask), clip), masks)


@pytest.mark.parametrize("sums", [kernel_sums, jax_sums])
@pytest.mark.parametrize("dim", [1, 5, 100])
def test_one_rating_alone_is_never_longer_than_the_clip_norm(sums, dim):
    """The clipped gradient itself, whatever the rows; a bound rounded down would be seen at some of these."""
    problem = matrix_factorization(ratings(), dim=dim, public_init_seed=0)
    for size in HOSTILE:
        for clip in (1e-6, 0.7, 1e3):
            found = np.float64(sums(problem, hostile_params(problem, size), clip, [[i] for i in range(0, N, 4)]))
            assert np.isfinite(found).all(), size
            assert np.linalg.norm(found, axis=1).max() <= clip, (size, clip)


def test_a_norm_that_is_not_rounded_up_is_seen(monkeypatch):
    """The control of the test above: without the slack some clipped gradient is longer than the clip norm."""
    problem = matrix_factorization(ratings(), dim=100, public_init_seed=0)
    monkeypatch.setattr(row_sparse_forms, "squared_norm_slack", lambda dim: (np.float32(1), np.float32(0)))
    found = np.float64(kernel_sums(problem, hostile_params(problem, 1.0), 0.7, [[i] for i in range(N)]))
    assert np.linalg.norm(found, axis=1).max() > 0.7


@pytest.mark.parametrize("sums", [kernel_sums, jax_sums])
@pytest.mark.parametrize("size", HOSTILE)
def test_one_rating_moves_a_sum_by_no_more_than_the_clip_norm(sums, size):
    problem = matrix_factorization(ratings(), dim=5, public_init_seed=0)
    everyone = list(range(40))
    batches = [everyone, *([i for i in everyone if i != out] for out in range(10)), []]
    found = np.asarray(sums(problem, hostile_params(problem, size), 0.7, batches), np.float64)
    moved = np.linalg.norm(found[0] - found[1:-1], axis=1)
    assert (moved <= 0.7 * (1 + 4e-7 * len(everyone))).all()
    assert not found[-1].any()


def test_kernel_and_jax_sum_the_same():
    problem = matrix_factorization(ratings(), dim=7, public_init_seed=0, half=False)
    for size in (1.0, 1e4, 5e18, 1e25):
        table = hostile_params(problem, size)
        batches = [list(range(0, N, 3)), list(range(17))]
        for clip in (0.3, 100.0):
            np.testing.assert_allclose(
                kernel_sums(problem, table, clip, batches), jax_sums(problem, table, clip, batches),
                rtol=1e-4, atol=1e-5 * clip,
            )  # fmt: skip


# --- The engine -------------------------------------------------------------------------------------------------------


def test_the_row_sparse_engine_takes_it_and_says_when_not():
    question = scenario(matrix_factorization(ratings(), dim=4, public_init_seed=0))
    assert engines.explain(question) == "Computed by the engine row_sparse."
    assert isinstance(engines.start([question], repeats=[0], root=ROOT), row_sparse.RowSparseRun)
    quiet = scenario(question.problem, z=0.0)
    assert "Without noise there is nothing to postpone." in engines.explain(quiet)


@pytest.mark.parametrize("half", [True, False])
def test_engines_take_the_same_steps_and_measure_the_same(half):
    """Next to no noise; also with a test set, and ratings that are not centred."""
    problem = matrix_factorization(ratings(), ratings(7, 50), dim=4, public_init_seed=0, center=2.0, half=half)
    group = [scenario(problem, z=1e-7, clip=clip) for clip in (0.2, 0.5, 5.0)]
    runs = [Run(group, repeats=[0, 1], root=ROOT) for Run in (row_sparse.RowSparseRun, dense.DenseRun)]
    for step in (0, 1, 60):
        for run in runs:
            run.advance(step)
        np.testing.assert_allclose(runs[0].params, runs[1].params, rtol=1e-4, atol=2e-5)
        ours, theirs = (run.evaluate() for run in runs)
        assert ours.keys() == theirs.keys() >= {"loss", "rmse", "test_loss", "test_rmse", "clip_fraction"}
        for name in ours:
            slack = 1.01 / N if name == "clip_fraction" else 0.0
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=slack, err_msg=name)


def test_the_default_learns_what_the_paper_like_setting_does_not():
    """Weak noise, every rating at every step: the rmse falls well below that of the best constant."""
    data = ratings()
    spread = data.rating.std()
    everyone = Poisson(1.0, N)
    found = {}
    for name, problem in {
        "default": matrix_factorization(data, dim=4, public_init_seed=0),
        "paper": paper_like_matrix_factorization(data, public_init_seed=0),
    }.items():
        mechanism = SampledGaussian(noise_multiplier=0.1, l2_clip_norm=2.0, sampler=everyone)
        question = Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=0.3), num_steps=200)
        run = engines.start([question], repeats=[0], root=ROOT)
        run.advance(200)
        found[name] = run.evaluate()["rmse"].item()
    print(found, "constant:", spread)
    assert found["default"] < 0.7 * spread < found["paper"]


# --- Moments and curvature --------------------------------------------------------------------------------------------


def test_the_local_quadratic_is_the_hessian():
    problem = matrix_factorization(ratings(), dim=2, public_init_seed=0, init_std=0.7)
    params = problem.initial_params()
    quadratic = problem.local_quadratic(params)

    def mean_loss(at):
        return problem.evaluate(at, 1.0)["loss"]

    hessian = np.asarray(jax.jit(jax.hessian(mean_loss))(params), np.float64)
    gradient = np.asarray(jax.grad(mean_loss)(params), np.float64)
    for power in (0, 1, 2):
        expected = gradient @ np.linalg.matrix_power(hessian, power) @ gradient
        got = quadratic.signal_squared_gradients @ quadratic.signal_eigenvalues**power
        np.testing.assert_allclose(got, expected, rtol=2e-3)
    assert np.linalg.eigvalsh(hessian).min() < 0, "a saddle: why the closed form refuses"
    assert problem.why_no_closed_form is not None and 'Use runner "sde"' in problem.why_no_closed_form


# --- A scenario file --------------------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "examples" / "movielens.toml"
FILE = """
num_steps = 50
[problem]
kind = "factorization"
path = "ratings.csv"
num_users = 12
num_items = 9
dim = 4
public_init_seed = 0
test_fraction = 0.2
[mechanism]
noise_multiplier = 1.0
batch_size = 16
[[optimizer]]
name = "dp-sgd"
learning_rate = 0.5
"""


@pytest.fixture
def folder(tmp_path):
    data = ratings()
    lines = [f"{u + 1},{i + 1},{r:g}" for u, i, r in zip(data.user, data.item, data.rating)]
    (tmp_path / "ratings.csv").write_text("\n".join(["user,item,rating", *lines]) + "\n", encoding="utf-8")
    return tmp_path


def problem_of(folder, text: str = FILE):
    (folder / "scenario.toml").write_text(text, encoding="utf-8")
    return read_scenario_file(folder / "scenario.toml").scenarios[0].problem


def test_a_scenario_file_asks_about_a_factorisation(folder):
    problem: Any = problem_of(folder)
    assert (problem.num_users, problem.num_items, problem.dim) == (USERS, ITEMS, 4)
    assert problem.num_examples + len(problem.test.labels) == N and 20 <= len(problem.test.labels) <= 60
    rows = np.concatenate([problem.train.users, problem.test.users])
    assert rows.min() >= 0 and rows.max() < USERS
    # A rating's place does not depend on the others: the guarantee for one rating is one for the training set.
    lines = (folder / "ratings.csv").read_text(encoding="utf-8").splitlines()
    (folder / "ratings.csv").write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    fewer: Any = problem_of(folder)
    assert abs(fewer.num_examples - problem.num_examples) + abs(len(fewer.test.labels) - len(problem.test.labels)) == 1


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        ("num_users = 12", "num_users = 5", "Expected user ids in 1 .. 5"),
        ("num_items = 9\n", "", "Expected [problem] num_items, got nothing; add it."),
        ("public_init_seed = 0\n", "", "Expected [problem] public_init_seed, got nothing; add it."),
        ("dim = 4", "dim = 0", "Expected [problem] dim >= 1, got 0."),
        ("dim = 4", "dim = 4\nrating_scale = [1, 3]", "Expected ratings in the public scale 1 .. 3"),
        ("dim = 4", 'dim = 4\ninit = "uniform"', "Expected [problem] init"),
    ],
)
def test_a_wrong_scenario_file_is_one_sentence(folder, old, new, sentence):
    with pytest.raises(ScenarioFileError) as caught:
        problem_of(folder, FILE.replace(old, new))
    assert sentence in str(caught.value)
    assert len(caught.value.mistakes) == 1


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        ("user,item", "userid,item", "ratings.csv, got userid, item, rating; rename them"),
        ("\n1,", "\nann,", "ratings.csv; ratings and ids are numbers"),
    ],
)
def test_a_wrong_table_of_ratings_is_one_sentence(folder, old, new, sentence):
    text = "user,item,rating\n1,1,3\n2,2,4\n"
    (folder / "ratings.csv").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ScenarioFileError) as caught:
        problem_of(folder)
    assert sentence in str(caught.value)


def test_the_example_is_read_up_to_its_data(tmp_path):
    with pytest.raises(ScenarioFileError, match=r"u\.data"):
        (tmp_path / "movielens.toml").write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
        read_scenario_file(tmp_path / "movielens.toml")
