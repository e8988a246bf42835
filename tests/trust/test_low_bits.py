"""The last bits of released weights do not tell which rows had examples."""

import itertools

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

import noisecast as nc
from noisecast import engines
from noisecast.optimizers import Schedule
from noisecast.privacy.noise import RandomRoot
from noisecast.privacy.public_grid import FINEST, on_public_grid
from noisecast.problems.datasets import Dataset, Ratings

NUM_STEPS, NUM_FEATURES = 400, 3000
OWN = slice(1, 41)  # columns that all rows have; nobody has one beyond


def problem(dense=False):
    rng = np.random.default_rng(5)
    features = np.zeros((200, NUM_FEATURES), np.float32)
    features[:, OWN] = rng.normal(size=(200, 40)) / 6
    rows = features if dense else scipy.sparse.csr_array(features)
    return nc.linear_model(Dataset("toy", rows, (features[:, 1] > 0).astype(np.int32), ("no", "yes")))


def scenario(optimizer, schedule=None, dense=False):
    mechanism = nc.SampledGaussian(noise_multiplier=2.0, l2_clip_norm=1.0, sampler=nc.Poisson.for_batch_size(20, 200))
    changes = {} if schedule is None else {"schedule": schedule}
    return nc.Scenario(problem=problem(dense), mechanism=mechanism, optimizer=optimizer, num_steps=NUM_STEPS, **changes)


def test_weights_of_dp_sign_sgd_are_whole_steps_touched_or_not():
    """A touched row is a sum of float32 steps, an untouched one a product: by the difference a membership attack on the
    model alone succeeded at epsilon 0.5.
    """
    found = nc.train(scenario(nc.DPSignSGD(learning_rate=0.1)), insecure_seed=3)
    rate = np.float32(0.1)
    np.testing.assert_array_equal(found.params, np.rint(found.params / rate) * rate)
    run = engines.start([found.scenario], repeats=[0], root=RandomRoot.from_insecure_seed(3))
    run.advance(NUM_STEPS)
    raw = run._blocks[0]._weights.flushed(NUM_STEPS, run._blocks[0]._lanes, run._blocks[0]._scratch).ravel()
    assert (raw[OWN] != np.rint(raw[OWN] / rate) * rate).any()  # what is hidden is there
    assert np.abs(raw - found.params).max() < 1e-3 * rate


@pytest.mark.parametrize("stops", [(), (37, 250)])
def test_so_they_are_where_the_rate_changes(stops):
    """Whatever is on the way: phases end alike for every row."""
    half = 200
    schedule = Schedule(starts=(0, half), factors=(1.0, 0.37))
    asked = scenario(nc.DPSignSGD(learning_rate=0.1), schedule)
    run = engines.start([asked], repeats=[0], root=RandomRoot.from_insecure_seed(4))
    for stop in stops:
        run.advance(stop)
        run.evaluate()
        again = engines.start([asked], repeats=[0], root=RandomRoot.from_insecure_seed(4))
        again.restore(run.state())
        run = again
    run.advance(NUM_STEPS)
    rates = np.float32(0.1) * np.float32([1.0, 0.37])
    possible = {a + b for a, b in itertools.product(*(np.arange(-half, half + 1, dtype=np.float32) * r for r in rates))}
    assert possible.issuperset(run.params.ravel())


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("optimizer", [nc.DPSGD(learning_rate=0.5), nc.DPAdam(learning_rate=0.05)])
@pytest.mark.parametrize("num_steps", [1, NUM_STEPS])
def test_others_are_on_a_public_grid(optimizer, dense, num_steps):
    asked = scenario(optimizer, dense=dense)
    params = nc.train(nc.Scenario(**vars(asked) | {"num_steps": num_steps}), insecure_seed=3).params
    each = asked.mechanism.mean_noise_std if isinstance(optimizer, nc.DPSGD) else 1.0
    noise = optimizer.learning_rate * num_steps**0.5 * each
    grid = 2.0 ** np.floor(np.log2(FINEST * noise))
    assert (params != 0).mean() > 0.9
    np.testing.assert_array_equal(params.astype(float) / grid, np.rint(params.astype(float) / grid))


def test_a_chosen_run_is_rounded_as_a_trained_one():
    asked = scenario(nc.DPSGD(learning_rate=0.5))
    run = engines.start([asked], repeats=[0], root=RandomRoot.from_insecure_seed(3))
    run.advance(NUM_STEPS)
    trained = nc.train(asked, insecure_seed=3).params
    np.testing.assert_array_equal(engines.released_params(run, asked), trained)
    assert (run.params[0, 0] != trained).any()


def test_steps_that_float32_loses_are_refused():
    rng = np.random.default_rng(1)
    user, item, stars = (rng.integers(low, high, 200) for low, high in ((0, 30), (0, 20), (1, 6)))
    ratings = Ratings(user, item, stars.astype(np.float32), num_users=30, num_items=20)
    start = nc.matrix_factorization(ratings, dim=4, public_init_seed=1, init_std=1.0)
    asked = scenario(nc.DPSignSGD(learning_rate=1e-7))
    asked = nc.Scenario(**vars(asked) | {"problem": start})
    with pytest.raises(ValueError, match="float32 loses such steps"):
        nc.train(asked)


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20),
    st.floats(1e-6, 1e6),
)
def test_the_grid(values, noise_std):
    weights = np.array(values, np.float32)
    found = on_public_grid(weights, noise_std)
    allowed = np.maximum(FINEST * noise_std, np.abs(weights.astype(float)) * 2.0**-15) / 2
    assert (np.abs(found.astype(float) - weights) <= allowed).all()
    np.testing.assert_array_equal(on_public_grid(found, noise_std), found)


@pytest.mark.parametrize("noise_std", [0.0, -1.0, np.nan, np.inf])
def test_there_is_none_without_noise(noise_std):
    with pytest.raises(ValueError, match="Expected 0 < noise_std"):
        on_public_grid(np.ones(2, np.float32), noise_std)
