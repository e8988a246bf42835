"""What tuning would have cost: never less than what dp_accounting says of the same runs."""

import dp_accounting as dp
import pytest
from dp_accounting.rdp import RdpAccountant

from noisecast.advice.tuning_price import NUM_RUNS, tuning_price
from noisecast.privacy.accounting import epsilon_spent
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.sampling import FixedSize, Poisson, Shuffled
from noisecast.privacy.tuning import TrialDistribution, TrialKind, repeat_select_epsilon

DELTA = 1e-5


def mechanism(sampler, **others) -> SampledGaussian:
    return SampledGaussian(noise_multiplier=4.0, l2_clip_norm=1.0, sampler=sampler, **others)


@pytest.mark.parametrize("num_steps", [50, 100, 150])
def test_shuffled_runs_are_counted_by_their_own_epochs(num_steps):
    """49 runs of half an epoch use a record 49 times, one run as long as all of them 25 times."""
    epochs = -(-num_steps // 100)
    price = tuning_price(mechanism(Shuffled(64, 6400)), num_steps=num_steps, target_delta=DELTA)
    exact = dp.get_epsilon_gaussian(4.0 / (NUM_RUNS * epochs) ** 0.5, DELTA)
    assert exact <= price.all_counted <= 1.001 * exact


@pytest.mark.parametrize(
    "ours",
    [mechanism(Poisson.for_batch_size(64, 6400)), mechanism(FixedSize(64, 6400), adjacency=Adjacency.REPLACE_ONE)],
    ids=["poisson", "fixed_size"],
)
def test_sampled_runs_cost_at_least_what_as_many_steps_do(ours):
    price = tuning_price(ours, num_steps=50, target_delta=DELTA)
    every = epsilon_spent(ours, num_steps=NUM_RUNS * 50, target_delta=DELTA).epsilon
    assert price.all_counted >= every


def test_poisson_runs_cost_what_dp_accounting_says():
    price = tuning_price(mechanism(Poisson.for_batch_size(64, 6400)), num_steps=50, target_delta=DELTA)
    event = dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(4.0))
    accountant = RdpAccountant().compose(event, NUM_RUNS * 50)
    assert price.all_counted == pytest.approx(accountant.get_epsilon(DELTA), rel=0.02)


def test_one_run_and_the_best_of_trials_are_those_of_the_library():
    ours = mechanism(Poisson.for_batch_size(64, 6400))
    price = tuning_price(ours, num_steps=50, target_delta=DELTA)
    trials = TrialDistribution(TrialKind.GEOMETRIC, NUM_RUNS)
    assert price.num_runs == NUM_RUNS
    assert price.one_run == epsilon_spent(ours, num_steps=50, target_delta=DELTA).epsilon
    assert price.best_of == repeat_select_epsilon([(ours, 50)], trials=trials, target_delta=DELTA).epsilon
