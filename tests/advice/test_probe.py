"""The paid look at the private data: what one record can change, how much noise there is, what it costs."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from scipy.optimize import brentq

from noisecast.advice import probe as module
from noisecast.advice.probe import calibrate_after, epsilon_after, norm_counts, private_probe, public_edges
from noisecast.privacy.accounting import epsilon_spent
from noisecast.privacy.calibration import calibrate_noise_multiplier
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.noise import RandomRoot
from noisecast.privacy.sampling import FixedSize, Poisson, Shuffled, Stream
from noisecast.problems.jax_model import jax_model
from noisecast.problems.quadratic import quadratic

EDGES = (0.5, 1.0, 2.0, 4.0)
SLOPES = [0.1, 0.4, 0.6, 1.5, 1.6, 1.7, 3.0, 9.0]  # the norms: 2, 1, 3, 1 and 1 of them in the bins of EDGES


def problem_of(slopes):
    """Linear losses in one parameter: the norm of an example's gradient is its |slope|."""
    return jax_model(lambda params, example: params[0] * example, jnp.zeros(1), jnp.asarray(slopes, jnp.float32))


def mechanism_of(*, z: float = 1.0, adjacency=Adjacency.ADD_OR_REMOVE_ONE, sampler=None) -> SampledGaussian:
    sampler = sampler or Poisson.for_batch_size(64, 6_400)
    return SampledGaussian(noise_multiplier=z, l2_clip_norm=1.0, sampler=sampler, adjacency=adjacency)


# --- What one record changes -----------------------------------------------------------------------------------------


def test_counts_are_of_norms_at_the_start():
    assert norm_counts(problem_of(SLOPES), EDGES).tolist() == [2, 1, 3, 1, 1]


@pytest.mark.parametrize(
    "norm, bin_number", [(0.0, 0), (0.5, 0), (0.51, 1), (1e30, 4), (-1e30, 4), (math.inf, 4), (math.nan, 4)]
)
def test_one_more_record_moves_one_count_by_one(norm, bin_number):
    moved = norm_counts(problem_of([*SLOPES, norm]), EDGES) - norm_counts(problem_of(SLOPES), EDGES)
    assert moved.tolist() == np.eye(5, dtype=int)[bin_number].tolist()


def test_counts_are_whole_for_many_records():
    # A share in float32 must still tell 100,003 records from 100,002.
    slopes = np.full(100_003, 0.75, np.float32)
    slopes[0] = 3.0
    assert norm_counts(problem_of(slopes), EDGES).tolist() == [0, 100_002, 0, 1, 0]


def test_a_real_problem_is_counted_as_its_own_metric_counts():
    from noisecast.problems.datasets import bundled
    from noisecast.problems.linear import linear_model

    problem = linear_model(*bundled("breast_cancer"))
    counts = norm_counts(problem, EDGES)
    assert counts.sum() == problem.num_examples
    share = float(problem.evaluate(problem.initial_params(), 1.0)["clip_fraction"])
    assert counts[2:].sum() == round(share * problem.num_examples)


# --- The noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale, passes", [(1.0, True), (0.97, False), (1.03, False)])
def test_noise_has_the_promised_scale(scale, passes):
    noise_std, size = 30.0, 100_000
    counts = np.full(size, 1000)
    noisy = module._with_noise(counts, scale * noise_std, RandomRoot.from_insecure_seed(1))
    # Rounding to whole numbers adds 1/12 to the variance.
    squares = np.sum((np.array(noisy) - counts) ** 2.0) / (noise_std**2 + 1 / 12)
    p_value = 2 * min(scipy.stats.chi2.cdf(squares, size), scipy.stats.chi2.sf(squares, size))
    assert (p_value > 1e-6) == passes


def test_the_released_counts_have_the_stated_noise():
    problem, exact, size = problem_of(SLOPES), np.array([2, 1, 3, 1, 1]), 150
    residuals = []
    for seed in range(size):
        found = private_probe(problem, mechanism_of(), epsilon=0.5, target_delta=1e-5, edges=EDGES, insecure_seed=seed)
        residuals.append((np.array(found.noisy_counts) - exact) / found.noise_std)
    squares = float(np.sum(np.square(residuals)))
    assert 1e-6 < scipy.stats.chi2.cdf(squares, 5 * size) < 1 - 1e-6
    # Counts are noisy on their own: a noise that all bins share would pass the test before.
    assert np.max(np.abs(np.corrcoef(np.array(residuals).T) - np.eye(5))) < 5 / math.sqrt(size)


def test_without_a_seed_no_two_probes_are_alike_and_it_is_private():
    one, two = (private_probe(problem_of(SLOPES), mechanism_of(), epsilon=0.5, target_delta=1e-5) for _ in range(2))
    assert one.noisy_counts != two.noisy_counts and not one.reproducible
    assert "satisfy" in one.sentence()
    seeded = private_probe(problem_of(SLOPES), mechanism_of(), epsilon=0.5, target_delta=1e-5, insecure_seed=3)
    assert seeded.reproducible and seeded.epsilon == math.inf and "NOT private" in seeded.sentence()


# --- What it costs, against closed forms -----------------------------------------------------------------------------


def gaussian_delta(epsilon: float, mu: float) -> float:
    """delta of a Gaussian mechanism whose sensitivity is mu standard deviations (Balle and Wang, ICML 2018, Thm 8)."""
    normal = scipy.stats.norm
    return normal.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal.cdf(-mu / 2 - epsilon / mu)


def gaussian_epsilon(mu: float, delta: float) -> float:
    return brentq(lambda epsilon: gaussian_delta(epsilon, mu) - delta, 0, 200)


@pytest.mark.parametrize(
    "adjacency, sampler, shift",
    [
        (Adjacency.ADD_OR_REMOVE_ONE, None, 1.0),  # one count by one
        (Adjacency.REPLACE_ONE, None, math.sqrt(2.0)),  # two counts by one
        (Adjacency.REPLACE_ONE, FixedSize(64, 6_400), math.sqrt(2.0)),
        (Adjacency.ADD_OR_REMOVE_ONE, Shuffled(64, 6_400), 1.0),
    ],
)
def test_the_probes_epsilon_is_that_of_its_counts(adjacency, sampler, shift):
    found = private_probe(
        problem_of(SLOPES), mechanism_of(adjacency=adjacency, sampler=sampler), epsilon=0.7, target_delta=1e-6,
        edges=EDGES,
    )  # fmt: skip
    exact = gaussian_epsilon(shift / found.noise_std, 1e-6)
    assert exact <= found.epsilon * (1 + 1e-6) and found.epsilon <= 0.7
    assert exact / 0.7 > 0.99  # no noise is wasted: twice the sensitivity would be 0.5 here


def test_composed_with_unsampled_training_it_is_one_gaussian():
    before = mechanism_of(z=4.0, sampler=Poisson(1.0, 1))
    training = mechanism_of(z=30.0, sampler=Poisson(1.0, 64))
    found = epsilon_after(before, training, num_steps=100, target_delta=1e-5).epsilon
    exact = gaussian_epsilon(math.sqrt(1 / 4.0**2 + 100 / 30.0**2), 1e-5)
    assert exact <= found * (1 + 1e-6) and found < 1.001 * exact


@pytest.mark.parametrize("adjacency, count_shift, sum_shift", [
    (Adjacency.ADD_OR_REMOVE_ONE, 1.0, 1.0), (Adjacency.REPLACE_ONE, math.sqrt(2.0), 2.0)])  # fmt: skip
def test_a_probe_and_training_compose_under_either_adjacency(adjacency, count_shift, sum_shift):
    training = mechanism_of(z=30.0, sampler=Poisson(1.0, 64), adjacency=adjacency)
    found = private_probe(problem_of(SLOPES), training, epsilon=0.5, target_delta=1e-5, edges=EDGES, insecure_seed=0)
    both = epsilon_after(found.mechanism, training, num_steps=100, target_delta=1e-5).epsilon
    mu = math.hypot(count_shift / found.noise_std, math.sqrt(100) * sum_shift / 30.0)
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(both, rel=1e-3)


def rdp_of_poisson(q: float, z: float, order: int) -> float:
    """Of whole orders (Mironov, Talwar and Zhang, 2019, Sec. 3.3)."""
    k = np.arange(order + 1)
    terms = scipy.special.gammaln(order + 1) - scipy.special.gammaln(k + 1) - scipy.special.gammaln(order - k + 1)
    terms = terms + (order - k) * math.log1p(-q) + k * math.log(q) + (k * k - k) / (2 * z * z)
    return float(scipy.special.logsumexp(terms)) / (order - 1)


def test_composed_with_sampled_training_it_lies_between_independent_bounds():
    delta, z_probe, z, q, steps = 1e-5, 20.0, 1.5, 0.01, 300
    before, training = mechanism_of(z=z_probe, sampler=Poisson(1.0, 1)), mechanism_of(z=z, sampler=Poisson(q, 64))
    found = epsilon_after(before, training, num_steps=steps, target_delta=delta).epsilon
    orders = np.arange(2, 200)
    rdp = [order / (2 * z_probe**2) + steps * rdp_of_poisson(q, z, order) for order in orders]
    above = min(
        r + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for r, a in zip(rdp, orders, strict=True)
    )  # Canonne, Kamath and Steinke (2020), Prop. 12
    alone = epsilon_spent(training, num_steps=steps, target_delta=delta).epsilon
    naive = alone + epsilon_spent(before, num_steps=1, target_delta=delta).epsilon
    assert alone < found < min(above, naive)


def test_what_is_left_is_calibrated_to_the_whole_budget_and_beats_subtraction():
    before = calibrate_noise_multiplier(
        mechanism_of(sampler=Poisson(1.0, 1)), target_epsilon=0.3, target_delta=1e-5, num_steps=1
    )
    training, asked = mechanism_of(), {"target_delta": 1e-5, "num_steps": 200}
    left = calibrate_after(before, training, target_epsilon=1.0, **asked)
    assert epsilon_after(before, left, **asked).epsilon <= 1.0
    less = left.with_noise_multiplier(0.99 * left.noise_multiplier)
    assert epsilon_after(before, less, **asked).epsilon > 1.0
    whole = calibrate_noise_multiplier(training, target_epsilon=1.0, **asked).noise_multiplier
    subtracted = calibrate_noise_multiplier(training, target_epsilon=0.7, **asked).noise_multiplier
    assert whole < left.noise_multiplier < subtracted


@pytest.mark.parametrize("target_epsilon", [0.3, 0.1, math.inf])
def test_a_probe_that_spends_everything_leaves_nothing(target_epsilon):
    before = mechanism_of(z=10.0, sampler=Poisson(1.0, 1))  # epsilon 0.35 at 1e-5
    with pytest.raises(ValueError, match="Expected a target_epsilon above the"):
        calibrate_after(before, mechanism_of(), target_epsilon=target_epsilon, target_delta=1e-5, num_steps=10)


# --- What is read off the counts -------------------------------------------------------------------------------------


def test_estimates_find_what_is_there():
    rng = np.random.default_rng(0)
    slopes = np.exp(rng.normal(size=6_400))
    found = private_probe(
        problem_of(slopes), mechanism_of(), epsilon=1.0, target_delta=1e-5, l2_clip_norms=[2.0], insecure_seed=5
    )
    for clip in (1.0, 2.0):
        share = found.clipped_share(clip)
        assert abs(share.value - np.mean(slopes > clip)) < 5 * share.standard_error < 0.05
    for quantile in found.quantiles:
        assert quantile.low <= quantile.value <= quantile.high
    for quantile in found.quantiles[1:5]:
        assert quantile.value == pytest.approx(np.quantile(slopes, quantile.probability), rel=0.1)
    second_moment = np.mean(np.minimum(slopes, 1.0) ** 2)
    assert found.example_noise_std(l2_clip_norm=1.0, num_params=25) == pytest.approx(
        math.sqrt(second_moment / 25), rel=0.05
    )


def test_edges_hold_the_clip_norms_and_increase():
    edges = public_edges([0.3, 5.0])
    assert {0.3, 5.0} <= set(edges) and np.all(np.diff(edges) > 0)
    assert edges[0] <= 0.3 / 60 and edges[-1] >= 5.0 * 60


def test_bad_requests_are_refused():
    problem, usual = problem_of(SLOPES), mechanism_of()
    with pytest.raises(ValueError, match="edges"):
        private_probe(problem, usual, epsilon=1.0, target_delta=1e-5, edges=[1.0, 1.0])
    with pytest.raises(ValueError, match="target_epsilon"):
        private_probe(problem, usual, epsilon=math.inf, target_delta=1e-5)
    found = private_probe(problem, usual, epsilon=1.0, target_delta=1e-5, edges=EDGES, insecure_seed=0)
    with pytest.raises(ValueError, match="among the probe's edges"):
        found.clipped_share(3.0)
    stream = mechanism_of(sampler=Stream(4))
    with pytest.raises(ValueError, match="no records"):
        private_probe(quadratic(np.ones(2), 1.0, example_noise_std=0.1), stream, epsilon=1.0, target_delta=1e-5)
