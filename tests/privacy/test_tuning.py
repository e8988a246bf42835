"""The price of tuning against direct integration, an independent implementation of the theorems, and known values."""

import math
from functools import cache

import numpy as np
import pytest
import scipy.stats
from scipy.optimize import minimize_scalar

from noisecast.privacy.accounting import epsilon_spent
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.sampling import FixedSize, Poisson, Shuffled, Stream
from noisecast.privacy.tuning import (
    ALL_ORDERS,
    Run,
    TrialDistribution,
    TrialKind,
    composed_epsilon,
    repeat_select_epsilon,
)

ADD, REPLACE = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE
IMDB = Poisson.for_batch_size(64, 25_000)
GEOMETRIC, LOGARITHMIC, POISSON = TrialKind


def gaussian(noise_multiplier, sampler=IMDB, adjacency=ADD, l2_clip_norm=0.5):
    return SampledGaussian(
        noise_multiplier=noise_multiplier, l2_clip_norm=l2_clip_norm, sampler=sampler, adjacency=adjacency
    )


def composed(runs, delta=1e-5):
    return composed_epsilon([Run(*run) for run in runs], target_delta=delta).epsilon


def spent(mechanism, num_steps, delta=1e-5):
    return epsilon_spent(mechanism, num_steps=num_steps, target_delta=delta).epsilon


# --- all runs counted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency, sampler", [(ADD, IMDB), (REPLACE, IMDB), (REPLACE, FixedSize(64, 25_000))])
def test_runs_with_batches_of_their_own_are_as_many_steps(adjacency, sampler):
    mechanism = gaussian(2.0, sampler, adjacency)
    three = composed([(mechanism, 1_000, name) for name in "abc"])
    assert three == spent(mechanism, 3_000)
    assert three > 1.01 * spent(mechanism, 2_000)  # a run too few would be seen


def test_one_run_costs_what_it_costs_whatever_its_clip():
    assert composed([(gaussian(2.0, l2_clip_norm=9.0), 1_000, "a")]) == spent(gaussian(2.0), 1_000)


def test_runs_that_share_their_batches_are_one_run_with_less_noise():
    shared = composed([(gaussian(3.0), 2_000, "a"), (gaussian(4.0), 2_000, "a")])
    assert shared == pytest.approx(spent(gaussian(2.4), 2_000), rel=1e-4)  # 1/9 + 1/16 = 1/2.4^2
    assert shared > 1.02 * composed([(gaussian(3.0), 2_000, "a"), (gaussian(4.0), 2_000, "b")])


def test_a_shorter_run_shares_only_its_own_steps():
    runs = [(gaussian(3.0), 2_000, "a"), (gaussian(4.0), 500, "a")]
    pieces = [(gaussian(2.4), 500, "x"), (gaussian(3.0), 1_500, "y")]
    assert composed(runs) == pytest.approx(composed(pieces), rel=1e-4)
    assert composed(runs[:1]) < composed(runs) < composed([runs[0], (gaussian(4.0), 2_000, "a")])


def true_epsilon_of_two(q, z, *, shared, delta):
    """Epsilon of one step of each of two runs, integrated on the plane; q and z of either."""
    axes = [np.linspace(-8 * s, 1 + 8 * s, 1_201) for s in z]
    off, on = (
        [np.exp(-0.5 * ((x - shift) / s) ** 2) / np.exp(-0.5 * (x / s) ** 2).sum() for x, s in zip(axes, z)]
        for shift in (0.0, 1.0)
    )
    if shared:
        with_record = (1 - q[0]) * np.outer(*off) + q[0] * np.outer(*on)
    else:
        with_record = np.outer(*((1 - p) * a + p * b for p, a, b in zip(q, off, on)))
    pairs = [(with_record, np.outer(*off)), (np.outer(*off), with_record)]

    def reaches(epsilon):
        return max(np.maximum(one - math.exp(epsilon) * other, 0).sum() for one, other in pairs) <= delta

    low, high = 0.0, 50.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


@pytest.mark.parametrize(
    "q, z, shared",
    [
        ((0.1, 0.1), (1.0, 1.0), True),
        ((0.1, 0.1), (0.7, 1.5), True),
        ((0.1, 0.1), (1.0, 1.0), False),
        ((0.1, 0.4), (0.8, 2.0), False),
        ((0.1, 1.0), (1.0, 3.0), False),
    ],
)
def test_two_runs_are_the_joint_pair_from_above(q, z, shared):
    names = "aa" if shared else "ab"
    found = composed([(gaussian(each, Poisson(p, 8)), 1, name) for p, each, name in zip(q, z, names)], delta=1e-3)
    truth = true_epsilon_of_two(q, z, shared=shared, delta=1e-3)
    assert truth - 2e-4 <= found <= 1.01 * truth + 2e-4


def test_the_referee_sees_shared_batches_counted_as_independent_ones():
    truth = true_epsilon_of_two((0.1, 0.1), (1.0, 1.0), shared=True, delta=1e-3)
    wrong = composed([(gaussian(1.0, Poisson(0.1, 8)), 1, name) for name in "ab"], delta=1e-3)
    assert wrong < 0.95 * truth


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
@pytest.mark.parametrize("sampler", [Shuffled(100, 1_000), Stream(8), Poisson(1.0, 8)])
def test_without_amplification_sharing_makes_no_difference(sampler, adjacency):
    mechanism = gaussian(5.0, sampler, adjacency)
    steps = [(mechanism, 20, name) for name in "aab"]
    unsampled = 1 if isinstance(sampler, Stream) else 2 if isinstance(sampler, Shuffled) else 20
    three = spent(gaussian(5.0, Poisson(1.0, 8), adjacency), 3 * unsampled)
    assert composed(steps) == pytest.approx(three, rel=1e-6)
    assert composed(steps) > 1.1 * spent(mechanism, 20)


@pytest.mark.parametrize("sampler", [Shuffled(100, 1_000), Poisson(1.0, 8)])
def test_the_best_of_unsampled_trials_under_replacement_is_that_of_half_the_noise(sampler):
    """A replaced record moves the sum twice as far: the Gaussian of half the noise, at every Renyi order."""
    trials = TrialDistribution(TrialKind.GEOMETRIC, 10)
    replaced, added = (
        repeat_select_epsilon([(gaussian(z, sampler, adjacency), 20)], trials=trials, target_delta=1e-5).epsilon
        for z, adjacency in ((8.0, REPLACE), (4.0, ADD))
    )
    assert replaced == pytest.approx(added, rel=1e-9)


def test_unsampled_steps_beside_sampled_ones_under_replacement():
    sampled, whole = gaussian(1.0, Poisson(0.1, 8), REPLACE), gaussian(4.0, Poisson(1.0, 8), REPLACE)
    both = composed([(sampled, 5, "a"), (whole, 3, "a")])
    assert max(spent(sampled, 5), spent(whole, 3)) < both < spent(sampled, 5) + spent(whole, 3) + 0.5
    assert both > composed([(sampled, 5, "a"), (whole, 2, "b")])


def test_more_runs_cost_more_and_their_order_nothing():
    runs = [(gaussian(z, Poisson(q, 8)), 200, str(z)) for z, q in ((2.0, 0.01), (3.0, 0.02), (4.0, 0.05))]
    costs = [composed(runs[:k]) for k in (1, 2, 3)]
    assert costs == sorted(costs) and costs[2] > 1.02 * costs[1] > 1.02**2 * costs[0]
    assert composed(runs[::-1]) == pytest.approx(costs[2], rel=1e-3)


def test_a_run_without_noise_or_steps():
    assert composed([(gaussian(1.0), 10, "a"), (gaussian(0.0), 1, "b")]) == math.inf
    assert composed([(gaussian(1.0), 10, "a"), (gaussian(0.0), 0, "b")]) == composed([(gaussian(1.0), 10, "a")])
    assert composed([(gaussian(1.0), 0, "a")]) == 0


@pytest.mark.parametrize(
    "runs, sentence",
    [
        ([], "at least one run"),
        ([(gaussian(1.0), 1, "a"), (gaussian(1.0, IMDB, REPLACE), 1, "b")], "same neighbours"),
        ([(gaussian(1.0), 1, "a"), (gaussian(1.0, Shuffled(64, 25_000)), 1, "b")], "zeroing out"),
        ([(gaussian(1.0), 1, "a"), (gaussian(1.0, Poisson(0.1, 8)), 1, "a")], "share their sampler"),
        ([(gaussian(1.0), 1.5, "a")], "num_steps"),
    ],
)
def test_what_does_not_add_up_is_refused(runs, sentence):
    with pytest.raises(ValueError, match=sentence):
        composed(runs)


# --- the best of a random number --------------------------------------------------------------------------------------


def law(trials, count=4_000):
    """P(K = 0), P(K = 1), ..., written down from the definitions."""
    k = np.arange(count)
    if trials.kind == POISSON:
        return scipy.stats.poisson(trials.mean).pmf(k)
    g = trials.stopping_probability
    with np.errstate(divide="ignore"):
        mass = g * (1 - g) ** (k - 1.0) if trials.kind == GEOMETRIC else (1 - g) ** k / (k * math.log(1 / g))
    return np.where(k > 0, mass, 0.0)


@pytest.mark.parametrize("kind", TrialKind)
@pytest.mark.parametrize("mean", [1.5, 10, 49])
def test_the_law_has_its_mean(kind, mean):
    mass = law(TrialDistribution(kind, mean), 40_000)
    assert mass.sum() == pytest.approx(1, abs=1e-9)
    assert mass @ np.arange(len(mass)) == pytest.approx(mean, rel=1e-9)


def chi_square_p(draws, mass):
    cells = np.minimum(draws, len(mass) - 1)
    mass = np.append(mass[:-1], max(1 - mass[:-1].sum(), 0))
    observed, expected = np.bincount(cells, minlength=len(mass)), len(draws) * mass
    enough = expected >= 10
    observed = np.append(observed[enough], observed[~enough].sum())
    expected = np.append(expected[enough], expected[~enough].sum())
    return scipy.stats.chi2.sf(((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum(), len(observed) - 1)


@pytest.mark.parametrize("kind", TrialKind)
@pytest.mark.parametrize("mean", [1.5, 10])
def test_trials_are_drawn_from_their_law(kind, mean):
    trials, rng = TrialDistribution(kind, mean), np.random.default_rng(1)
    draws = np.array([trials.draw(rng) for _ in range(40_000)])
    assert chi_square_p(draws, law(trials, 60)) > 1e-6
    assert chi_square_p(draws + 1, law(trials, 60)) < 1e-6  # one trial more than was drawn
    assert chi_square_p(draws, law(TrialDistribution(kind, 1.1 * mean), 60)) < 1e-6


@pytest.mark.parametrize("kind, sometimes", [(GEOMETRIC, {1}), (LOGARITHMIC, {1}), (POISSON, {0, 1, 2})])
def test_a_mean_of_one_trial(kind, sometimes):
    rng = np.random.default_rng(2)
    drawn = {TrialDistribution(kind, 1).draw(rng) for _ in range(200)}
    assert drawn >= sometimes and (kind == POISSON or drawn == sometimes)


def reference_epsilon(rdp, trials, delta, mean=None):
    """Theorems 2 and 6 of Papernot and Steinke with the orders searched continuously; rdp(a) of one trial."""
    mean = trials.mean if mean is None else mean

    def smallest(f):
        grid = np.geomspace(1e-2, 1e4, 2_000)
        at = grid[np.argmin([f(1 + x) for x in grid])]
        return minimize_scalar(lambda u: f(1 + math.exp(u)), bounds=(math.log(at) - 0.1, math.log(at) + 0.1),
                               method="bounded", options={"xatol": 1e-9}).fun  # fmt: skip

    def to_epsilon(a, r):
        return r + math.log1p(-1 / a) - math.log(delta * a) / (a - 1)

    if trials.kind != POISSON:
        shape = 1 if trials.kind == GEOMETRIC else 0
        g = TrialDistribution(trials.kind, mean).stopping_probability
        extra = (1 + shape) * smallest(lambda b: (1 - 1 / b) * rdp(b) + math.log(1 / g) / b)
        return smallest(lambda a: to_epsilon(a, rdp(a) + extra + math.log(mean) / (a - 1)))

    def failure(e):  # delta of one trial at epsilon e
        orders = 1 + np.geomspace(1e-2, 1e4, 2_000)
        r = np.array([rdp(b) for b in orders])
        return math.exp(min(0, np.min((orders - 1) * (r - e + np.log1p(-1 / orders)) - np.log(orders))))

    grid = np.array([rdp_order for rdp_order in 1 + np.geomspace(1e-2, 1e3, 400)])
    return min(to_epsilon(a, rdp(a) + mean * failure(math.log1p(1 / (a - 1))) + math.log(mean) / (a - 1)) for a in grid)


@pytest.mark.parametrize("kind, mean", [(GEOMETRIC, 3), (GEOMETRIC, 49), (LOGARITHMIC, 10), (POISSON, 5)])
def test_the_theorems_as_somebody_else_would_write_them(kind, mean):
    trials, steps = TrialDistribution(kind, mean), 30
    mechanism = gaussian(20.0, Poisson(1.0, 8))
    found = repeat_select_epsilon([(mechanism, steps)], trials=trials, target_delta=1e-6).epsilon
    rdp = lambda a: steps * a / (2 * 20.0**2)  # noqa: E731
    wanted = reference_epsilon(rdp, trials, 1e-6)
    assert wanted * (1 - 1e-6) <= found <= 1.01 * wanted
    one_fewer = TrialDistribution(kind, mean - 1)  # control: a trial left out of the count would be seen
    assert repeat_select_epsilon([(mechanism, steps)], trials=one_fewer, target_delta=1e-6).epsilon < 0.999 * wanted
    assert found > 1.2 * spent(mechanism, steps, 1e-6)


@pytest.mark.parametrize("kind", TrialKind)
def test_dp_accountings_own_event_agrees(kind):
    """Where its event applies as it stands (add/remove, Poisson batches); ours is rounded up a little."""
    import dp_accounting as dp
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    trials = TrialDistribution(kind, 20)
    event = RepeatAndSelectDpEvent(gaussian(1.0).dp_event(1_000), trials.mean, trials.shape)
    theirs = dp.rdp.RdpAccountant(list(ALL_ORDERS)).compose(event).get_epsilon(1e-5)
    ours = repeat_select_epsilon([(gaussian(1.0), 1_000)], trials=trials, target_delta=1e-5).epsilon
    assert theirs * (1 - 1e-9) <= ours <= theirs * 1.001


def true_epsilon_of_best(trials, z, delta):
    """Of the largest of K draws of N(m, z^2), m = 0 or 1, by integration: its law is G(F(x)), G the law's generator."""
    x = np.linspace(-12 * z, 1 + 12 * z, 400_001)
    none = math.exp(-trials.mean) if trials.kind == POISSON else 0.0

    def masses(shift):
        below = scipy.stats.norm.cdf(x, shift, z)
        if trials.kind == POISSON:
            best = np.exp(-trials.mean * scipy.stats.norm.sf(x, shift, z))
        else:
            g = trials.stopping_probability
            rest = g + (1 - g) * scipy.stats.norm.sf(x, shift, z)  # 1 - (1 - g) F
            best = g * below / rest if trials.kind == GEOMETRIC else np.log(rest) / np.log(g)
        return np.append(np.diff(best), none)

    one, other = masses(0.0), masses(1.0)

    def reaches(epsilon):
        return all(np.maximum(p - math.exp(epsilon) * r, 0).sum() <= delta for p, r in ((one, other), (other, one)))

    low, high = 0.0, 60.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


@pytest.mark.parametrize("kind", TrialKind)
@pytest.mark.parametrize("mean", [2, 20])
@pytest.mark.parametrize("z, adjacency", [(1.0, ADD), (4.0, ADD), (4.0, REPLACE)])
def test_no_real_selection_is_worse_than_its_price(kind, mean, z, adjacency):
    """The best of K Gaussians, exactly; and it does cost more than one of them, so the referee sees something."""
    trials, mechanism = TrialDistribution(kind, mean), gaussian(z, Poisson(1.0, 8), adjacency)
    truth = true_epsilon_of_best(trials, z if adjacency == ADD else z / 2, 1e-5)
    assert truth <= repeat_select_epsilon([(mechanism, 1)], trials=trials, target_delta=1e-5).epsilon
    assert truth > 1.02 * spent(mechanism, 1)


def test_it_costs_as_much_as_the_worst_cell_that_could_be_drawn():
    trials = TrialDistribution(GEOMETRIC, 10)
    price = cache(lambda *cells: repeat_select_epsilon(cells, trials=trials, target_delta=1e-5).epsilon)
    mild, harsh, other = (gaussian(4.0), 1_000), (gaussian(1.0), 1_000), (gaussian(2.0, Poisson(0.01, 8)), 100)
    assert price(mild) < price(harsh) == price(mild, harsh) == price(harsh, mild, mild)
    assert price(mild, (gaussian(1.0, l2_clip_norm=3.0), 1_000)) == price(harsh)
    assert price(mild, other) >= max(price(mild), price(other))
    assert price(mild, (gaussian(0.0), 1)) == math.inf
    assert price((gaussian(1.0), 0)) == 0


def test_it_costs_more_with_more_trials_and_less_noise():
    @cache
    def price(kind, mean, z=1.0):
        trials = TrialDistribution(kind, mean)
        return repeat_select_epsilon([(gaussian(z), 1_000)], trials=trials, target_delta=1e-5).epsilon

    for kind in TrialKind:
        assert spent(gaussian(1.0), 1_000) < price(kind, 2) < price(kind, 20) < price(kind, 200)
        assert price(kind, 20) > price(kind, 20, 2.0)


def test_trials_that_cannot_be_are_refused():
    for mean in (0.5, math.inf, math.nan):
        with pytest.raises(ValueError, match="mean number of trials >= 1"):
            TrialDistribution(GEOMETRIC, mean)
    cells = [(gaussian(1.0), 1), (gaussian(1.0, IMDB, REPLACE), 1)]
    with pytest.raises(ValueError, match="same neighbours"):
        repeat_select_epsilon(cells, trials=TrialDistribution(GEOMETRIC, 2), target_delta=1e-5)
    with pytest.raises(ValueError, match="at least one run"):
        repeat_select_epsilon([], trials=TrialDistribution(GEOMETRIC, 2), target_delta=1e-5)
    with pytest.raises(ValueError, match="target_delta"):
        repeat_select_epsilon(cells[:1], trials=TrialDistribution(GEOMETRIC, 2), target_delta=1.0)
