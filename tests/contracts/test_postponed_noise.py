"""Postponed noise is never missing, and is in law what it would have been had it been drawn step by step."""

import dataclasses
import itertools
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from engine_cases import (
    CLIP,
    OPTIMIZERS,
    PROBLEMS,
    ROOT,
    THRESHOLD,
    Case,
    N,
    a_run,
    model,
    problem,
    scenario,
)
from scipy import stats

from noisecast import linear_model
from noisecast.engines import dense
from noisecast.engines.row_sparse import RowSparseRun
from noisecast.problems.datasets import Dataset


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("problem_name", PROBLEMS)
def test_looking_gives_what_was_postponed_first(optimizer, problem_name):
    """Metrics and parameters are those of one and the same flushed iterate, in whatever order they are asked for."""
    case = Case("row_sparse", optimizer, "poisson", problem_name)
    one, other = a_run(case), a_run(case)
    one.advance(37)
    other.advance(37)
    metrics, params = one.evaluate(), one.params
    np.testing.assert_array_equal(params, other.params)
    np.testing.assert_array_equal(params, one.params)
    assert all((metrics[name] == other.evaluate()[name]).all() for name in metrics)
    assert (params != 0).mean() > 0.9  # sign's coins may have come out even
    exact = model(problem_name).loss(params.reshape(-1, params.shape[-1]).astype(np.float64))
    np.testing.assert_allclose(metrics["loss"].ravel(), exact, rtol=1e-5)
    plain = dense.evaluate(problem(problem_name), jnp.asarray(params), jnp.full(params.shape[1], CLIP))
    assert plain.keys() == metrics.keys()
    for name in plain:
        # A margin within rounding of the clip norm, or of 0, may fall on either side.
        slack = 1.01 / N if name in ("accuracy", "micro_f1", "clip_fraction") else 0.0
        np.testing.assert_allclose(metrics[name], plain[name], rtol=2e-5, atol=slack, err_msg=name)


@cache
def untouched_problem():
    """Two thousand columns, of which examples only have the first."""
    features = scipy.sparse.csr_array((np.ones(N, np.float32), (np.arange(N), np.zeros(N, int))), shape=(N, 2000))
    return linear_model(Dataset("untouched", features, np.arange(N, dtype=np.int32) % 2, ("a", "b")))


def untouched_params(optimizer: str, looks: tuple[int, ...], kept=slice(None), repeats=range(20)) -> np.ndarray:
    """Rows that nothing ever touches, in units of one step, after each look: (looks, repeats, scenarios, rows)."""
    question = scenario(Case("row_sparse", optimizer, "shuffled", "logistic"))
    group = [
        dataclasses.replace(question, problem=untouched_problem(), num_steps=400, target_delta=1e-5 * (1 + i))
        for i in range(16)
    ]
    run, found = RowSparseRun(group[kept], repeats=repeats, root=ROOT), []
    unit = question.optimizer.learning_rate
    if optimizer == "sgd":
        unit *= question.mechanism.mean_noise_std
    for look in looks:
        run.advance(look)
        found.append(run.params[:, :, 1:-1].astype(np.float64) / unit)
    return np.stack(found)


LOOKS = [(1,), (5,), (31,), (32,), (33,), (64,), (160,), (161,), (300,), (3, 4, 40), (32, 64, 200, 333)]


@pytest.mark.parametrize("looks", LOOKS, ids=str)
def test_rows_never_touched_have_the_variance_of_all_steps(looks):
    """DP-SGD: N(0, k) in units of one step's noise, however often it was flushed on the way; k (1 +- 2 %) is seen."""
    sums = untouched_params("sgd", looks)
    gaps = np.diff(looks, prepend=0)
    pieces = np.diff(sums, axis=0, prepend=0) / np.sqrt(gaps)[:, None, None, None]
    p_values = {}
    for off in (0.98, 1.0, 1.02):
        statistic, count = np.sum(sums[-1] ** 2) / (looks[-1] * off), sums[-1].size
        p_values[off] = 2 * min(stats.chi2.cdf(statistic, count), stats.chi2.sf(statistic, count))
    print(f"looks {looks}: chi-square p of k, and of k 2 % off: {p_values}")
    assert p_values[1.0] > THRESHOLD > max(p_values[0.98], p_values[1.02])
    assert stats.kstest(pieces[-1].ravel()[:200_000], "norm").pvalue > THRESHOLD
    for earlier, later in itertools.pairwise(pieces):
        assert abs(np.mean(earlier * later)) * np.sqrt(later.size) < 5.5


@pytest.mark.parametrize("looks", LOOKS, ids=str)
def test_rows_never_touched_have_had_all_their_coins(looks):
    """DP-SignSGD: 2 Binomial(k, 1/2) - k, by chi-square over its values; beyond 32 coins there are several words."""
    sums = untouched_params("sign", looks)
    values = np.round(sums)
    assert np.abs(sums - values).max() < 0.01
    k = looks[-1]
    heads = (values[-1].ravel() + k) / 2
    assert (heads == np.round(heads)).all() and heads.min() >= 0 and heads.max() <= k

    def p_of(coins: int, law: Any) -> float:
        counts = np.bincount(heads.astype(int), minlength=coins + 1)[: coins + 1]
        expected = law.pmf(np.arange(coins + 1)) * heads.size
        common = expected >= 10
        if common.all():
            return float(stats.chisquare(counts, expected).pvalue)
        rest = [counts[~common].sum()], [expected[~common].sum()]
        return float(
            stats.chisquare([*counts[common], *rest[0]], [*expected[common], *rest[1]], sum_check=False).pvalue
        )

    p, control = p_of(k, stats.binom(k, 0.5)), p_of(k, stats.binom(k, 0.505))
    print(f"looks {looks}: p = {p:.3g} of fair coins, {control:.3g} of coins 0.505")
    assert p > THRESHOLD > control
    for earlier, later in zip(np.diff(values, axis=0, prepend=0), np.diff(values, axis=0)):
        assert abs(np.mean(earlier * later)) * np.sqrt(later.size) / (earlier.std() * later.std()) < 5.5


@pytest.mark.parametrize("looks", LOOKS, ids=str)
def test_one_run_alone_has_the_coins_that_it_has_among_others(looks):
    """One lane counts its coins along rows, many along lanes: the very same ones."""
    together, alone = untouched_params("sign", looks), untouched_params("sign", looks, slice(7, 8), [3])
    np.testing.assert_allclose(alone[:, 0, 0], together[:, 3, 7], rtol=0, atol=1e-2)
    assert np.abs(alone[:, 0, 0] - together[:, 3, 6]).max() > 1
