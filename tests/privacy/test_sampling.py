"""Batches follow the law they are accounted as, and do not depend on the ranges they are asked in."""

import hashlib

import numpy as np
import pytest
from scipy import stats

from noisecast.privacy.drawing import Batches, generator, uniform_subsets
from noisecast.privacy.mechanism import Adjacency
from noisecast.privacy.sampling import FixedSize, Poisson, Shuffled, Stream

KEY = b"k" * 32
SAMPLERS = [
    (Poisson(0.1, 3), 30),
    (Poisson(0.02, 10), 500),
    (Poisson(0.6, 18), 30),
    (FixedSize(3, 30), 30),
    (FixedSize(20, 30), 30),
    (Shuffled(4, 30), 30),
]


def indicator(batches: Batches, num_rows: int):
    """(steps, num_rows) 1 where a row is in the step's batch; also checks that no row is in it twice."""
    counts = np.zeros((len(batches.mask), num_rows), int)
    steps, columns = np.nonzero(batches.mask)
    np.add.at(counts, (steps, batches.indices[steps, columns]), 1)
    assert counts.max(initial=0) <= 1
    return counts


def chi_square_p(observed, expected):
    return stats.chi2.sf(np.sum((observed - expected) ** 2 / expected), len(observed) - 1)


def sizes_follow_binomial(sizes, n, q):
    edges = stats.binom.ppf(np.linspace(0, 1, 9)[1:-1], n, q)
    cells = np.digitize(sizes, np.unique(edges))
    cdf = np.concatenate([[0], stats.binom.cdf(np.unique(edges) - 1, n, q), [1]])
    observed = np.bincount(cells, minlength=len(cdf) - 1)
    return chi_square_p(observed, len(sizes) * np.diff(cdf)) > 1e-6


@pytest.mark.parametrize("claimed, passes", [(1.0, True), (0.95, False), (1.05, False)])
@pytest.mark.parametrize("n, q", [(2000, 0.01), (40, 0.5)])
def test_poisson_batch_sizes_are_binomial(n, q, claimed, passes):
    batches = Poisson(q, q * n).batches(KEY, 0, 20_000, n)
    assert sizes_follow_binomial(batches.mask.sum(axis=1), n, q * claimed) == passes


def test_a_fixed_size_is_not_poisson():
    batches = FixedSize(20, 40).batches(KEY, 0, 5000, 40)
    assert not sizes_follow_binomial(batches.mask.sum(axis=1), 40, 0.5)


def includes_evenly(drawn, q):
    """Every row's number of inclusions against q steps, all rows together (Poisson rows are independent)."""
    steps = len(drawn)
    statistic = np.sum((drawn.sum(axis=0) - q * steps) ** 2) / (steps * q * (1 - q))
    return min(stats.chi2.sf(statistic, drawn.shape[1]), stats.chi2.cdf(statistic, drawn.shape[1])) > 1e-6


@pytest.mark.parametrize("sampler, n", SAMPLERS[:3])
def test_poisson_rows_are_included_alike(sampler, n):
    drawn = indicator(sampler.batches(KEY, 0, 20_000, n), n)
    q = sampler.sampling_probability
    assert includes_evenly(drawn, q)
    biased = drawn.copy()
    biased[:6000, 0] = 0  # negative control: one row left out for three steps in ten
    assert n > 100 or not includes_evenly(biased, q)


@pytest.mark.parametrize(
    "sampler, n, both",
    [(Poisson(0.1, 3), 30, 0.01), (Poisson(0.6, 18), 30, 0.36), (FixedSize(3, 30), 30, 3 * 2 / (30 * 29))],
)
def test_pairs_of_rows(sampler, n, both):
    """Poisson: independent. Fixed size: B (B - 1) / (n (n - 1)), which tells the two apart."""
    steps = 40_000
    drawn = indicator(sampler.batches(KEY, 0, steps, n), n)
    together = drawn.T @ drawn
    pairs = together[np.triu_indices(n, 1)] / steps
    worst = np.abs(pairs - both).max() / np.sqrt(both * (1 - both) / steps)
    assert worst < 5.5  # 435 pairs
    mean = pairs.mean()
    wrong = 0.01 if isinstance(sampler, FixedSize) else 3 * 2 / (30 * 29) if both == 0.01 else 18 * 17 / (30 * 29)
    # Differences of the means: steps that share a batch size move together, hence the spread over steps.
    per_step = drawn.sum(axis=1)
    sem = stats.sem(per_step * (per_step - 1) / (n * (n - 1)))
    assert abs(mean - both) <= 5 * sem + 1e-12
    assert abs(mean - wrong) > 5 * sem


def test_neighbouring_steps_are_independent():
    drawn = indicator(Poisson(0.1, 3).batches(KEY, 0, 40_000, 30), 30)
    again = (drawn[1:] * drawn[:-1]).mean()
    assert abs(again - 0.01) < 5 * np.sqrt(0.01 * 0.99 / (40_000 * 30))


def test_subsets_are_uniform():
    """All 120 subsets of 2 of 16, by the path that draws duplicates again."""
    rng = np.random.default_rng(1)
    subsets = uniform_subsets(rng, np.full(300_000, 2), 16)
    assert np.all(np.diff(subsets, axis=1) > 0)
    assert subsets.min() >= 0
    assert subsets.max() < 16
    codes = subsets @ np.array([1, 16])
    _, counts = np.unique(codes, return_counts=True)
    assert len(counts) == 120
    assert chi_square_p(counts, 300_000 / len(counts)) > 1e-6
    assert chi_square_p(counts * np.where(np.arange(len(counts)) < 20, 1.05, 1), 300_000 / len(counts)) < 1e-6


@pytest.mark.parametrize("sampler, n", SAMPLERS)
def test_batches_do_not_depend_on_the_range(sampler, n):
    whole = indicator(sampler.batches(KEY, 0, 1000, n), n)
    for start, stop in [(0, 1), (255, 257), (300, 300), (511, 1000), (6, 15), (999, 1000)]:
        part = sampler.batches(KEY, start, stop, n)
        assert part.indices.dtype == np.int32
        assert part.indices.shape == part.mask.shape == (stop - start, part.mask.shape[1])
        assert part.mask.shape[1] % 8 == 0
        assert np.array_equal(indicator(part, n), whole[start:stop])


@pytest.mark.parametrize("sampler, n", SAMPLERS)
def test_keys_and_steps_give_different_batches(sampler, n):
    one = indicator(sampler.batches(KEY, 0, 300, n), n)
    other = indicator(sampler.batches(b"other", 0, 300, n), n)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one[:40], one[256:296])


def test_no_batch_is_truncated():
    narrow = Poisson(0.5, 1)  # a declared batch size far below what is drawn
    batches = narrow.batches(KEY, 0, 500, 300)
    assert batches.mask.sum(axis=1).mean() == pytest.approx(150, abs=2)
    assert batches.mask.shape[1] > narrow.width


def test_empty_data_and_empty_batches():
    assert not Poisson(0.5, 4).batches(KEY, 0, 5, 0).mask.any()
    batches = Poisson(0.01, 0.3).batches(KEY, 0, 1000, 30)
    assert (batches.mask.sum(axis=1) == 0).mean() == pytest.approx(0.99**30, abs=0.07)


def test_an_epoch_uses_every_row_at_most_once():
    sampler = Shuffled(4, 30)
    drawn = indicator(sampler.batches(KEY, 0, 70, 30), 30)
    epochs = drawn.reshape(10, 7, 30).sum(axis=1)
    assert epochs.max() == 1
    assert np.all(epochs.sum(axis=1) == 28)
    assert len({tuple(row) for row in epochs}) > 1  # another remainder is dropped
    assert sampler.num_epochs(70) == 10
    assert sampler.num_epochs(71) == 11


@pytest.mark.parametrize("sampler, n", [(Poisson(0.1, 4), 40), (FixedSize(4, 40), 40), (Shuffled(4, 40), 40)])
def test_batch_noise_variance_is_the_variance(sampler, n):
    values = np.random.default_rng(0).gamma(1.0, size=n) - 0.3
    drawn = indicator(sampler.batches(KEY, 0, 60_000, n), n)
    means = drawn @ values / sampler.expected_batch_size
    predicted = sampler.batch_noise_variance(values.mean(), np.mean(values**2))
    assert np.var(means) == pytest.approx(predicted, rel=0.04)
    assert abs(np.var(means) - Stream(4).batch_noise_variance(values.mean(), np.mean(values**2))) > 0.05 * predicted


def test_stream_batch_noise_variance_works_on_arrays():
    means, moments = np.array([0.0, 1.0]), np.array([1.0, 1.0])
    assert Stream(4).batch_noise_variance(means, moments).tolist() == [0.25, 0.0]
    assert FixedSize(1, 1).batch_noise_variance(means, moments).tolist() == [0.0, 0.0]


def test_sizes_and_ranges_out_of_bounds():
    with pytest.raises(ValueError, match=r"0 < sampling_probability <= 1, got 1\.5"):
        Poisson(1.5, 3)
    with pytest.raises(ValueError, match="expected_batch_size > 0"):
        Poisson(0.5, 0)
    with pytest.raises(ValueError, match="batch_size <= num_examples = 10, got 11"):
        Poisson.for_batch_size(11, 10)
    with pytest.raises(ValueError, match="num_examples = 10"):
        Shuffled(11, 10)
    with pytest.raises(ValueError, match="batch_size to be a whole number >= 1"):
        Stream(0)
    with pytest.raises(ValueError, match="use Poisson"):
        FixedSize(3, 10).batches(KEY, 0, 1, 11)
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        Poisson(0.5, 3).batches(KEY, 2, 1, 10)


@pytest.mark.parametrize("sampler", [Poisson(0.1, 4), FixedSize(4, 40), Shuffled(4, 40), Stream(4)])
def test_every_sampler_says_what_its_number_is(sampler):
    assert sampler.statement().endswith(".")
    assert sampler.why_unsupported(Adjacency.REPLACE_ONE) is None
    assert (sampler.why_unsupported(Adjacency.ADD_OR_REMOVE_ONE) is None) != isinstance(sampler, FixedSize)


def test_the_normaliser_and_width_do_not_depend_on_the_data():
    sampler = Poisson.for_batch_size(32, 64)
    assert sampler.expected_batch_size == 32
    a, b = (sampler.batches(KEY, 0, 100, n).mask.shape[1] for n in (64, 65))
    assert a == b == sampler.width


def test_a_block_is_drawn_from_philox_under_its_own_hash():
    digest = hashlib.sha256(b"key|block" + bytes(7) + b"\x05").digest()
    plain = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))
    np.testing.assert_array_equal(generator(b"key", "block", 5).random(9), plain.random(9))
