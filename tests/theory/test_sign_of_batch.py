"""The sign of a sum over few examples against the same law summed over all counts of them. No randomness."""

import itertools

import numpy as np
import pytest
from scipy import special, stats

from noisecast.theory.closures import GradientLaw, sign_response
from noisecast.theory.sign_of_batch import Entries, batch_variance, sign_of_batch

VALUES, MEAN, STD = np.array([1.0, -0.4]), np.array([0.8, 1.5]), np.array([0.1, 0.6])


def by_counting(rate: float, noise_std: float, shift: float = 0.0) -> tuple[float, float]:
    """E sign and 2 p(0) of shift + sum_i b_i x_i r_i + noise: four Poisson counts, two examples on two sides."""
    parts = np.concatenate([VALUES * (MEAN + STD), VALUES * (MEAN - STD)])
    counts = np.array(list(itertools.product(range(20), repeat=4)))
    weights = stats.poisson.pmf(counts, rate / 2).prod(axis=1)
    sums = counts @ parts + shift
    expected = weights @ special.erf(sums / noise_std / np.sqrt(2))
    return expected, 2 * weights @ stats.norm.pdf(sums, scale=noise_std)


def found_by_inversion(rate: float, noise_std: float):
    entries = Entries(np.array([0, 2]), np.array([0, 1]), VALUES)
    return sign_of_batch(entries, MEAN, STD, rate=rate, noise_variance=np.array([noise_std**2]))


def by_counting_coins(probability: float, noise_std: float, copies: int = 1, drawn: int | None = None):
    """The same where each example is drawn at most once, `copies` of each; `drawn`: given that one of that is."""
    expected, gain = 0.0, 0.0
    counts = range(copies + 1)
    for of_each in itertools.product(counts, repeat=2):
        if drawn is not None and of_each[drawn] == 0:
            continue
        others = [(copies - 1, k - 1) if i == drawn else (copies, k) for i, k in enumerate(of_each)]
        weight = np.prod([stats.binom.pmf(k, n, probability) for n, k in others])
        for sides in itertools.product(*(itertools.product((-1, 1), repeat=k) for k in of_each)):
            total = sum(VALUES[i] * (MEAN[i] + side * STD[i]) for i in range(2) for side in sides[i])
            share = weight / 2 ** sum(of_each)
            expected += share * special.erf(total / noise_std / np.sqrt(2))
            gain += share * 2 * stats.norm.pdf(total, scale=noise_std)
    return expected, gain


@pytest.mark.parametrize("probability", [0.01, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("copies", [1, 3])
def test_sign_of_a_batch_that_draws_each_at_most_once(probability, copies):
    noise_std = 0.2
    entries = Entries(np.array([0, 2]), np.array([0, 1]), VALUES)
    asked = {"rate": copies * probability, "noise_variance": np.array([noise_std**2])}
    found = sign_of_batch(entries, MEAN, STD, probability=probability, **asked)
    expected, gain = by_counting_coins(probability, noise_std, copies)
    assert found.expected[0] == pytest.approx(expected, abs=1e-4)
    assert found.gain[0] == pytest.approx(gain, rel=1e-3, abs=1e-4)
    for i in range(2):
        assert found.gain_if_drawn[i] == pytest.approx(
            by_counting_coins(probability, noise_std, copies, drawn=i)[1], rel=1e-3, abs=1e-4
        )
    if probability >= 0.5:  # the control: any number of times is seen to be another law
        assert abs(sign_of_batch(entries, MEAN, STD, **asked).expected[0] - expected) > 0.02


def test_a_mean_beyond_the_spread_has_its_sign():
    """Many small steps to one side: a grid that holds the spread alone would take them for the other side's."""
    many = 400
    entries = Entries(np.array([0, many]), np.arange(many), np.ones(many))
    for probability in (0.1, 0.3, 0.6, 0.8):
        asked = {"rate": probability, "probability": probability, "noise_variance": np.array([0.01])}
        found = sign_of_batch(entries, np.ones(many), np.zeros(many), **asked)
        assert found.expected[0] == pytest.approx(1.0, abs=1e-4) and found.gain[0] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("rate, noise_std", list(itertools.product([0.1, 0.7, 3.0], [0.05, 0.3, 1.0, 20.0])))
def test_sign_of_a_batch_is_what_counting_finds(rate, noise_std):
    """E sign, its gain, and the gain where one more of that example is drawn."""
    found = found_by_inversion(rate, noise_std)
    expected, gain = by_counting(rate, noise_std)
    assert found.expected[0] == pytest.approx(expected, abs=1e-4)
    assert found.gain[0] == pytest.approx(gain, rel=1e-3)
    for i in range(2):
        sides = [VALUES[i] * (MEAN[i] + side * STD[i]) for side in (-1, 1)]
        if_drawn = np.mean([by_counting(rate, noise_std, shift)[1] for shift in sides])
        assert found.gain_if_drawn[i] == pytest.approx(if_drawn, abs=1e-3 * gain)
    second = rate * VALUES**2 @ (MEAN**2 + STD**2)
    law = GradientLaw(np.array([rate * VALUES @ MEAN]), np.zeros(1), np.array([second + noise_std**2]))
    of_two_moments = sign_response(law)[0][0]
    if noise_std <= 0.3 and rate < 1:  # the control: two moments, and one gain for all, are seen to be wrong
        assert abs(of_two_moments - expected) > 0.01
        assert found.gain_if_drawn.max() < 0.7 * gain
    if noise_std == 20.0:
        assert abs(of_two_moments - expected) < 1e-4


def test_the_gain_is_the_slope_of_the_sign():
    """d E sign/d theta, each example adding x_i r_i' more: Mecke's formula against a difference."""
    rate, noise_std, nudge = 0.7, 0.3, 1e-3
    entries = Entries(np.array([0, 2]), np.array([0, 1]), VALUES)
    slopes = np.array([-0.2, -0.7])
    ends = [
        sign_of_batch(entries, MEAN + side * nudge * slopes, STD, rate=rate, noise_variance=np.array([noise_std**2]))
        for side in (-1, 1)
    ]
    difference = (ends[1].expected[0] - ends[0].expected[0]) / (2 * nudge)
    gains = found_by_inversion(rate, noise_std)
    assert rate * gains.gain_if_drawn @ (VALUES * slopes) == pytest.approx(difference, rel=1e-3)
    assert rate * gains.gain[0] * VALUES @ slopes != pytest.approx(difference, rel=0.1)  # the control: one gain for all


def by_all_batches(drawn: int, copies: int, noise_std: float, of: int, including: int | None = None):
    """E sign and 2 p(0) over all sets of exactly `drawn` of `of` examples: copies of two, the others add nothing."""
    examples = [0] * copies + [1] * copies + [None] * (of - 2 * copies)
    totals, found = 0, np.zeros(2)
    for batch in itertools.combinations(range(of), drawn):
        if including is not None and including * copies not in batch:
            continue
        felt = [examples[i] for i in batch if examples[i] is not None]
        totals += 1
        for sides in itertools.product((-1, 1), repeat=len(felt)):
            total = sum(VALUES[i] * (MEAN[i] + side * STD[i]) for i, side in zip(felt, sides, strict=True))
            each = [special.erf(total / noise_std / np.sqrt(2)), 2 * stats.norm.pdf(total, scale=noise_std)]
            found += np.array(each) / 2 ** len(felt)
    return found / totals


@pytest.mark.parametrize(
    "drawn, copies, of", [(1, 1, 2), (1, 1, 5), (2, 1, 2), (2, 1, 4), (2, 2, 6), (4, 2, 7), (6, 3, 6)]
)
def test_sign_of_a_batch_of_exactly_so_many(drawn, copies, of):
    noise_std, q = 0.2, drawn / of
    entries = Entries(np.array([0, 2]), np.array([0, 1]), VALUES)
    asked = {"rate": copies * q, "probability": q, "noise_variance": np.array([noise_std**2])}
    found = sign_of_batch(entries, MEAN, STD, exactly=drawn, **asked)
    expected, gain = by_all_batches(drawn, copies, noise_std, of)
    assert found.expected[0] == pytest.approx(expected, abs=1e-4)
    assert found.gain[0] == pytest.approx(gain, rel=1e-3, abs=1e-4)
    for i in range(2):
        if_drawn = by_all_batches(drawn, copies, noise_std, of, including=i)[1]
        assert found.gain_if_drawn[i] == pytest.approx(if_drawn, rel=1e-3, abs=1e-4)
    if drawn < of:  # the control: as many on average are seen to be another law
        assert abs(sign_of_batch(entries, MEAN, STD, **asked).expected[0] - expected) > 0.002


@pytest.mark.parametrize("drawn, copies, of", [(1, 1, 5), (2, 2, 6), (4, 2, 7), (6, 3, 6)])
def test_variance_of_a_sum_of_exactly_so_many(drawn, copies, of):
    """Of residuals that are fixed, over all batches."""
    examples = np.concatenate([np.repeat(VALUES * MEAN, copies), np.zeros(of - 2 * copies)])
    sums = [examples[list(batch)].sum() for batch in itertools.combinations(range(of), drawn)]
    entries, q = Entries(np.array([0, 2]), np.array([0, 1]), VALUES), drawn / of
    found = batch_variance(entries, MEAN, MEAN**2, rate=copies * q, probability=q, exactly=drawn)
    assert found[0] == pytest.approx(np.var(sums), abs=1e-12)
