"""DP-Adam of runs whose rows are wide: its steps wait, tile by tile, and are taken as if they had not.

Laws of the draws themselves are in `tests/privacy`; of DP-Adam's steps, in `tests/contracts`.
"""

from typing import Any

import numba
import numpy as np
import pytest
import scipy.sparse

from noisecast import DPSGD, DPAdam, Poisson, SampledGaussian, Scenario, linear_model, matrix_factorization
from noisecast.compiled import FAST
from noisecast.engines import _wide_adam_kernels as kernels
from noisecast.engines._noise_kernels import normal_tile
from noisecast.engines.dense import DenseRun
from noisecast.engines.row_sparse import ALONE, RowSparseRun
from noisecast.privacy.counter_noise import STEP_NOISE
from noisecast.privacy.mechanism import RANGES
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.datasets import Dataset, Ratings

ROOT = RandomRoot.from_insecure_seed(20261127)
SECURE = RandomRoot(b"\x07" * 32, None, secure_noise=True)  # a test may know its secret
STEPS = 12
b1, b2 = 0.9, 0.999


def ratings() -> Ratings:
    """Of which a batch touches few rows, and some rows none ever."""
    rng = np.random.default_rng(5)
    user, item = rng.integers(0, 30, 60), rng.integers(0, 40, 60)
    rating = rng.integers(1, 6, 60).astype(np.float32)
    return Ratings(user.astype(np.int32), item.astype(np.int32), rating, num_users=60, num_items=45)


def factorisation(dim: int = 101):
    return matrix_factorization(ratings(), dim=dim, public_init_seed=1, init_std=0.3)


def softmax(classes: int = 70):
    rng = np.random.default_rng(6)
    features = scipy.sparse.random_array((40, 300), density=0.05, dtype=np.float32, rng=rng, format="csr")
    names = tuple(map(str, range(classes)))
    return linear_model(Dataset("classes", features, (np.arange(40) % classes).astype(np.int32), names))


def scenario(problem, *, z: float = 0.7, rate: float = 0.01, eps: float = 1e-8, optimizer=DPAdam) -> Scenario:
    mechanism = SampledGaussian(
        noise_multiplier=z, l2_clip_norm=0.6, sampler=Poisson.for_batch_size(4, problem.num_examples)
    )
    own = {"eps": eps} if optimizer is DPAdam else {}
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer(learning_rate=rate, **own), num_steps=40)


PROBLEMS = {"factorisation": factorisation, "softmax": softmax}


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return PROBLEMS[request.param]()


def run_of(*scenarios: Scenario, root: RandomRoot = ROOT, stops: tuple[int, ...] = (STEPS,)) -> RowSparseRun:
    run = RowSparseRun(scenarios, repeats=[0], root=root)
    assert all(block._steps.__name__ == "_wide_adam_steps" for block in run._blocks)
    for stop in stops:
        run.advance(stop)
    return run


@pytest.mark.parametrize("root", [ROOT, SECURE], ids=["fast", "secure"])
def test_steps_that_waited_are_those_that_did_not_bit_for_bit(problem, root):
    """A call leaves nothing waiting, so calls of one step each never wait."""
    waiting = run_of(scenario(problem), root=root)
    at_once = run_of(scenario(problem), root=root, stops=tuple(range(1, STEPS + 1)))
    np.testing.assert_array_equal(waiting.params, at_once.params)
    assert len(np.unique(waiting.params)) > 0.99 * waiting.params.size  # and they are not all alike


def test_some_tiles_wait_for_long_and_some_for_none():
    """Of the tests' problems: else they would show nothing about waiting."""
    data, dim = ratings(), 101
    tiles = [{row * dim // kernels.NUMBERS, ((row + 1) * dim - 1) // kernels.NUMBERS} for row in range(60 + 45)]
    touched = set().union(*(tiles[row] for row in (*data.user, *(60 + data.item))))
    assert 0 < len(touched) < -(-(60 + 45) * dim // kernels.NUMBERS)
    assert ((60 + 45) * dim) % kernels.NUMBERS % kernels.GROUP  # and the last one is not a whole group


def test_the_run_is_the_same_among_others_and_apart(problem):
    group = [scenario(problem, z=0.5 + 0.1 * i, rate=0.01 + 0.002 * i) for i in range(3)]
    together = run_of(*group).params[0]
    for own, params in zip(group, together, strict=True):
        np.testing.assert_array_equal(run_of(own).params[0, 0], params)
    assert np.abs(np.corrcoef(together - np.asarray(problem.initial_params()))[np.triu_indices(3, 1)]).max() < 0.05


def test_almost_without_noise_it_steps_as_the_dense_engine():
    for problem in (factorisation(), softmax()):
        group = [scenario(problem, z=1e-7, rate=rate, eps=1e-2) for rate in (0.01, 0.02)]
        ours, dense = run_of(*group), DenseRun(group, repeats=[0], root=ROOT)
        dense.advance(STEPS)
        assert np.abs(dense.params - np.asarray(problem.initial_params())).max() > 0.01
        np.testing.assert_allclose(ours.params, dense.params, rtol=1e-3, atol=2e-6)


@numba.njit(**FAST | {"cache": False})
def _draw(lanes, scratch, step, found):
    tile = len(scratch.normals)
    for start in range(0, len(found), tile):
        size = min(tile, len(found) - start)
        normal_tile(start, size, lanes, np.uint32(step), STEP_NOISE, scratch)
        found[start : start + size] = scratch.normals[:size, 0]


@pytest.mark.parametrize("root", [ROOT, SECURE], ids=["fast", "secure"])
def test_a_number_that_nothing_touches_takes_every_step_of_its_own_draws(root):
    """Against DP-Adam in float64, written out here, of the draws of one lane in which a number is a row."""
    problem = factorisation()
    own = scenario(problem)
    run = run_of(own, root=root)
    one_lane: Any = run._blocks[0]._one_lane
    lanes, scratch = one_lane
    noise_std = own.mechanism.mean_noise_std
    w = np.asarray(problem.initial_params(), np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    drawn = np.empty((STEPS, len(w)), np.float32)
    for k in range(STEPS):
        _draw(lanes, scratch, k, drawn[k])
        g = noise_std * drawn[k].astype(np.float64)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        w -= 0.01 * (m / (1 - b1 ** (k + 1))) / (np.sqrt(v / (1 - b2 ** (k + 1))) + 1e-8)
    never = np.ones((60 + 45, 101), bool)
    data = ratings()
    never[data.user], never[60 + data.item] = False, False
    never = never.ravel()
    assert never.sum() > 1_000
    np.testing.assert_allclose(run.params[0, 0][never], w[never], rtol=1e-4, atol=2e-6)
    assert np.abs(run.params[0, 0][~never] - w[~never]).max() > 1e-3  # control: those that are touched do not
    # No draw is used twice. Of so many float32 normals 112 are expected to equal another by rounding (NumPy's do),
    # with a spread of 11; of pairs of neighbours none.
    assert drawn.size - len(np.unique(drawn)) < 112 + 4 * 11
    assert len(np.unique(drawn.ravel().view("u8"))) == drawn.size // 2


def test_it_goes_on_where_it_was_stopped_bit_for_bit(problem):
    whole = run_of(scenario(problem))
    begun = run_of(scenario(problem), stops=(5,))
    resumed = RowSparseRun([scenario(problem)], repeats=[0], root=ROOT)
    resumed.restore(begun.state())
    resumed.advance(STEPS)
    np.testing.assert_array_equal(resumed.params, whole.params)


def test_averages_of_another_version_are_refused():
    """They were kept in other units under another name."""
    run = run_of(scenario(factorisation()), stops=(5,))
    old = {name.replace("average", "memory"): array for name, array in run.state().items()}
    with pytest.raises(ValueError, match=r"average_0.*delete the checkpoint"):
        run.restore(old)


def test_only_dp_adam_of_wide_rows_waits_so():
    for problem, optimizer in ((factorisation(ALONE - 1), DPAdam), (factorisation(), DPSGD)):
        run = RowSparseRun([scenario(problem, optimizer=optimizer)], repeats=[0], root=ROOT)
        assert run._blocks[0]._one_lane == ()


def test_the_least_noise_of_all_leaves_float32s_room():
    """Gradients are in units of their noise, and squared."""
    run = run_of(scenario(factorisation(), z=RANGES["noise_multiplier"][0]))
    assert np.isfinite(run.params).all()
