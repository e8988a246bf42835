"""Where the closure is out of its depth and examples are few: runs of the optimizer in its place, and their law."""

from dataclasses import replace

import numpy as np
import pytest

from noisecast import (
    DPSGD,
    DPAdam,
    DPSignSGD,
    FixedSize,
    Poisson,
    SampledGaussian,
    Scenario,
    Shuffled,
    answer,
    linear_model,
)
from noisecast.forecasting.outcome import Outcome
from noisecast.privacy.sampling import Adjacency
from noisecast.problems.datasets import Dataset
from noisecast.runners import Training
from noisecast.runners.moments import Moments, runs, table_of
from noisecast.table import OK, SIMULATED

CLOSURE = Moments(most_runs=0)
RNG = np.random.default_rng(730)
SIDE = np.where(RNG.random(60) < 0.4, -1.0, 1.0)
ROWS = (RNG.normal(size=(60, 5)) + 0.8 * SIDE[:, None]).astype(np.float32)
TEST = Dataset("test", ROWS[:20] + 0.3, (SIDE[:20] > 0).astype(np.int32), ("no", "yes"))
PROBLEM = linear_model(Dataset("few", ROWS, (SIDE > 0).astype(np.int32), ("no", "yes")), TEST)


def asked(optimizer, sampler=None, *, num_steps=60, noise_multiplier=2.0, problem=PROBLEM):
    sampler = sampler or Poisson.for_batch_size(12, 60)
    adjacency = next(each for each in Adjacency if sampler.why_unsupported(each) is None)
    mechanism = SampledGaussian(
        noise_multiplier=noise_multiplier, l2_clip_norm=0.8, sampler=sampler, adjacency=adjacency
    )
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps)


THROWN = asked(DPSignSGD(learning_rate=2.0))  # every step throws all outputs: no law of a closure


@pytest.mark.parametrize(
    ("optimizer", "sampler"),
    [
        (DPSGD(learning_rate=4.0), None),
        (DPSignSGD(learning_rate=0.3), FixedSize(12, 60)),
        (DPAdam(learning_rate=0.3, b1=0.7), None),
    ],
)
def test_runs_have_the_law_of_trained_ones(optimizer, sampler):
    """Means and spreads of every metric, half-way and at the end, against the engine that trains."""
    scenario = asked(optimizer, sampler)
    seen = runs._simulated(scenario, [20, 60], 3)
    trained = answer([scenario], runners=[Training()], insecure_seeds=range(730_000, 730_600), record_at=[20, 60])
    for place, step in enumerate((20, 60)):
        for name, values in seen.metrics.items():
            ours = values[place]
            theirs = trained[(trained.metric == name) & (trained.step == step)].value.to_numpy(float)
            error = np.hypot(ours.std() / len(ours) ** 0.5, theirs.std() / len(theirs) ** 0.5)
            assert abs(ours.mean() - theirs.mean()) < 4 * error, (name, step)
            assert ours.std() == pytest.approx(theirs.std(), rel=0.25), (name, step)
    assert set(seen.metrics) == set(trained.metric)


def test_a_clipped_sum_is_that_of_its_batch():
    """Places beyond the rows are passed over, none comes twice; the bound holds each residual."""
    few, random = runs._few(THROWN), np.random.default_rng(1)
    order = random.permutation(60)
    weights = random.normal(size=(3, 6)).astype(np.float32)
    sums, place, stride, size = np.empty_like(weights), np.array([0, 55, 30]), np.array([1, 17, 60]), [60, 10, 0]
    batches = runs._Batches(order, 61, place, stride, np.array(size))
    runs._clipped_sums(weights, *few, *batches, sums, np.empty(60, np.int64), np.empty(60, np.float32))
    for run in range(3):
        places = (place[run] + stride[run] * np.arange(1, 62)) % 61
        batch = order[places[places < 60][: size[run]]]
        rows, labels = np.column_stack([ROWS, np.ones(60)])[batch].astype(float), (SIDE > 0)[batch]
        bound = 0.8 / np.linalg.norm(rows, axis=1)
        residuals = np.clip(1 / (1 + np.exp(-rows @ weights[run])) - labels, -bound, bound)
        assert len(set(batch.tolist())) == size[run]
        np.testing.assert_allclose(sums[run], residuals @ rows, atol=1e-5)


def test_runs_know_a_mean_as_well_as_so_many_that_share_nothing():
    """Hardly any noise but that of batches: means of 512 runs differ by what these say of their error."""
    scenario = asked(DPSGD(learning_rate=4.0), noise_multiplier=1e-3)
    few = runs._few(scenario)
    losses = np.stack([runs._some_runs(scenario, few, [60], number).metrics["loss"][0] for number in range(12)])
    assert losses.mean(axis=1).std(ddof=1) == pytest.approx(losses.std() / 512**0.5, rel=0.6)
    sizes = [runs._batches(scenario.mechanism.sampler, 60, np.random.default_rng(i)).size for i in range(8)]
    sizes = np.concatenate(sizes)
    assert abs(sizes.mean() - 12) < 0.2 and sizes.var() == pytest.approx(12 * 0.8, rel=0.1)


def test_runs_take_the_place_of_what_is_extrapolated_alone():
    """Sound rows stay what the closure makes of them; the end does not depend on what else is looked at."""
    swinging = asked(DPAdam(learning_rate=0.03), num_steps=200)
    looks = [0, 10, 20, 100]
    closure, found = (each.forecast(swinging, looks) for each in (CLOSURE, Moments()))
    beyond = closure.extrapolated
    assert beyond.any() and not beyond.all()  # steps at which averages swing past
    assert found.status == [SIMULATED if out else OK for out in beyond.tolist()] and found.steps[-1] == 200
    for name, values in closure.metrics.items():
        np.testing.assert_array_equal(found.metrics[name][~beyond], values[~beyond])
        assert (found.metrics[name][beyond] != values[beyond]).all(), name
    ends = [Moments().forecast(THROWN, some).metrics["loss"][-1] for some in ([], [10, 30])]
    assert ends[0] == ends[1] != CLOSURE.forecast(THROWN, []).metrics["loss"][-1]


def test_a_simulated_row_says_so():
    found = Moments().forecast(THROWN, [])
    [reason] = found.reasons
    assert "simulated runs" in reason and "known to" in reason
    assert set(table_of(THROWN, found)["status"]) == {SIMULATED}
    outcome = Outcome.of(found)
    assert outcome.status == SIMULATED and outcome.is_sound and outcome.order == (0, outcome.value)
    losses = answer([THROWN], runners=[Training()], insecure_seeds=range(730_600, 731_200), record_at=[60])
    losses = losses[(losses.metric == "loss") & (losses.step == 60)].value
    assert outcome.value == pytest.approx(losses.mean(), rel=0.02 + 3 * losses.sem() / losses.mean())
    assert outcome.spread == pytest.approx(losses.std(), rel=0.15)


def test_more_runs_than_seconds_allow_are_none():
    """Nor what is no logistic model of all examples, by batches that any run may draw alone."""
    assert runs.runs_of(THROWN, 60) > 50 * runs.A_ROUND
    assert runs.runs_of(THROWN, 10**6) < runs.A_ROUND
    shuffled = asked(THROWN.optimizer, Shuffled(12, 60))
    three = linear_model(Dataset("three", ROWS, np.arange(60) % 3, tuple("abc")))
    assert runs.runs_of(shuffled, 60) == runs.runs_of(asked(THROWN.optimizer, problem=three), 60) == 0
    for moments in (replace(Moments(), subsample=50), replace(Moments(), most_runs=runs.A_ROUND - 1)):
        assert SIMULATED not in moments.forecast(THROWN, []).status


def test_a_loss_that_runs_do_not_know_stays_the_closures(monkeypatch):
    monkeypatch.setattr(runs, "KNOWN", 1e-4)
    found, closure = Moments().forecast(THROWN, []), CLOSURE.forecast(THROWN, [])
    assert found.status == closure.status == ["extrapolated"] and found.reasons == closure.reasons
    assert found.metrics["loss"][-1] == closure.metrics["loss"][-1]
