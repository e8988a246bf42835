"""Auditors can lie, too: what is said with confidence must hold that often, and see what there is to see."""

from typing import Any

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy import stats

from noisecast.audit import lower_bound_of_guesses, lower_bound_of_scores
from noisecast.audit.bounds import _counts, _epsilons, clopper_pearson


def test_clopper_pearson_is_the_exact_interval():
    for count, trials in ((0, 7), (3, 7), (7, 7), (40, 1000)):
        low, high = clopper_pearson([count], trials, miss=0.005)
        wanted: Any = stats.binomtest(count, trials).proportion_ci(0.99, method="exact")
        np.testing.assert_allclose([low[0], high[0]], wanted, atol=1e-9)


def null_scores(rng, kind: str, runs: int):
    draw = {
        "normal": lambda: rng.normal(size=runs),
        "coins": lambda: rng.binomial(16, 0.5, runs).astype(float),
        "one value": lambda: np.zeros(runs),
    }[kind]
    return draw(), draw()


@pytest.mark.parametrize("kind", ["normal", "coins", "one value"])
def test_of_equal_distributions_nothing_is_proved(kind):
    """Confidence 90 %: at most a tenth of all tries may prove something; by binomial test at 1e-6."""
    rng = np.random.default_rng(31)
    tries = 1000
    proved = sum(
        lower_bound_of_scores(*null_scores(rng, kind, 200), delta=0.0, confidence=0.9).epsilon > 0 for _ in range(tries)
    )
    print(f"{kind}: {proved} of {tries} null audits proved something, {tries // 10} allowed")
    assert stats.binom.sf(proved - 1, tries, 0.1) > 1e-6


@pytest.mark.slow
def test_a_rule_chosen_on_the_runs_that_judge_it_would_lie():
    """The control: the same, without a held-out half, proves what is not there far too often."""
    rng = np.random.default_rng(32)
    lies = 0
    for _ in range(500):
        inside, outside = null_scores(rng, "normal", 1000)
        at = np.sort(np.concatenate([inside, outside]))
        counts = _counts(inside, at), _counts(outside, at)
        lies += max(_epsilons(*counts, 1000, 1000, guess, 0.0, 0.9).max() for guess in (True, False)) > 0
    assert stats.binom.sf(lies - 1, 500, 0.1) < 1e-6


@pytest.mark.parametrize("distance, least", [(0.5, 0.3), (1.0, 1.0), (2.0, 2.5)])
def test_a_gaussian_is_never_overrated_and_seen(distance, least):
    rng = np.random.default_rng(33)
    for delta in (1e-5, 0.1):
        true = get_epsilon_gaussian(1 / distance, delta)
        found = [
            lower_bound_of_scores(
                rng.normal(distance, size=10_000), rng.normal(size=10_000), delta=delta, confidence=0.999
            ).epsilon
            for _ in range(20)
        ]
        assert max(found) <= true
        assert delta == 0.1 or np.mean(found) > least


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_one_run_of_randomised_response_is_not_overrated(epsilon):
    """Each guess right with probability e^eps / (1 + e^eps), exactly: the bound may exceed eps in one try of ten."""
    rng = np.random.default_rng(34)
    right = rng.binomial(200, 1 / (1 + np.exp(-epsilon)), size=300)
    found = np.array([lower_bound_of_guesses(v, 200, 1000, delta=0.0, confidence=0.9).epsilon for v in right])
    above = int((found > epsilon).sum())
    assert stats.binom.sf(above - 1, len(found), 0.1) > 1e-6
    assert epsilon == 0 or np.median(found) > 0.5 * epsilon


def test_delta_costs_and_impossible_guesses_are_refused():
    found = [lower_bound_of_guesses(95, 100, 1000, delta=d, confidence=0.95).epsilon for d in (0.0, 1e-5, 1e-3)]
    assert found[0] >= found[1] > found[2]
    with pytest.raises(ValueError, match="right <= guesses <= canaries"):
        lower_bound_of_guesses(5, 4, 10, delta=0.0, confidence=0.9)
    with pytest.raises(ValueError, match="finite scores"):
        lower_bound_of_scores([1.0, np.nan, 0.0, 2.0], [0.0] * 4, delta=0.0, confidence=0.9)
    with pytest.raises(ValueError, match="confidence < 1"):
        lower_bound_of_scores([0.0] * 4, [0.0] * 4, delta=0.0, confidence=1.0)
