"""Protocols A and B on tables whose answers are known."""

import itertools

import numpy as np
import pandas as pd
import pytest

from noisecast import DPSGD, DPAdam, DPSignSGD, Poisson, SampledGaussian, Scenario, Stream, quadratic
from noisecast.protocols import (
    Grid,
    Score,
    ask_protocol_a,
    cells,
    check_cells,
    kept_questions,
    protocol_a,
    protocol_b,
    protocol_b_question,
    ranked,
    tuned,
    tuning_questions,
)
from noisecast.question import Question
from noisecast.runners import Moments, Training
from noisecast.sweeps import run_sweep
from noisecast.table import DIVERGED, EXTRAPOLATED, OK, table_from

LEVELS, RATES, CLIPS = (1.0, 2.0, 4.0), (0.1, 0.3, 1.0, 3.0), (0.5, 1.0)


def best_rate(noise_multiplier):
    return 1.0 / noise_multiplier


def row(*, value, **settings):
    defaults = {
        "scenario": "s", "problem": "p", "optimizer": "DP-SGD", "learning_rate": 1.0, "noise_multiplier": 1.0,
        "l2_clip_norm": 1.0, "sampling_probability": 0.1, "expected_batch_size": 10.0, "num_steps": 100,
        "epsilon": 1.0, "nominal_epsilon": 1.0, "target_delta": 1e-5, "runner": "training", "seed": 0, "step": 100,
        "metric": "loss", "status": OK if np.isfinite(value) else DIVERGED,
    }  # fmt: skip
    return defaults | settings | {"value": value}


def grid_rows(value_of, seeds=(0, 1, 2), **settings):
    """A row for every cell and seed; `value_of(noise_multiplier, rate, clip, seed)`."""
    return [
        row(value=value_of(z, rate, clip, seed), noise_multiplier=z, learning_rate=rate, l2_clip_norm=clip,
            epsilon=2 / z, nominal_epsilon=1 / z, seed=seed, **settings)
        for z, rate, clip, seed in itertools.product(LEVELS, RATES, CLIPS, seeds)
    ]  # fmt: skip


def bowl(z, rate, clip, seed):
    return 1 + np.log(rate / best_rate(z)) ** 2 + 0.1 * clip + 0.001 * seed


@pytest.fixture
def table():
    return table_from(grid_rows(bowl))


# --- Protocol B ------------------------------------------------------------------------------------------------------


def test_the_best_cell_at_each_noise_multiplier(table):
    found = protocol_b(table, Score())
    assert found["learning_rate"].tolist() == [1.0, 0.3, 0.3]  # of .1, .3, 1, 3 the nearest to 1, 1/2, 1/4
    assert (found["l2_clip_norm"] == 0.5).all() and (found["num_cells"] == 8).all()
    assert found["epsilon"].tolist() == [2.0, 1.0, 0.5]
    values = [1 + 0.1 * 0.5 + 0.001 * seed for seed in range(3)]
    assert found["value"].iloc[0] == pytest.approx(np.mean(values))
    assert found["standard_error"].iloc[0] == pytest.approx(np.std(values, ddof=1) / np.sqrt(3))
    assert (found["low"] < found["value"]).all() and (found["value"] < found["high"]).all()


def test_an_edge_is_marked_and_only_an_edge():
    found = tuned(table_from(grid_rows(lambda z, rate, clip, seed: rate if z > 1 else abs(rate - 1) - clip)), Score())
    assert found["learning_rate_at_edge"].tolist() == ["", "lowest", "lowest"]
    assert found["l2_clip_norm_at_edge"].tolist() == ["highest", "lowest", "lowest"]


def test_of_one_value_nothing_is_an_edge():
    rows = [each for each in grid_rows(bowl) if each["l2_clip_norm"] == 0.5]
    assert (tuned(table_from(rows), Score())["l2_clip_norm_at_edge"] == "").all()


def test_the_largest_accuracy_wins():
    rows = [each | {"metric": "test_accuracy"} for each in grid_rows(lambda z, rate, clip, seed: -bowl(z, rate, 1, 0))]
    assert tuned(table_from(rows), Score("test_accuracy"))["learning_rate"].tolist() == [1.0, 0.3, 0.3]
    losses = table_from([each | {"metric": "test_loss"} for each in rows])
    assert tuned(losses, Score("test_loss"))["learning_rate"].tolist() == [0.1, 3.0, 3.0]


def test_a_diverged_cell_never_wins():
    def value(z, rate, clip, seed):
        return np.nan if rate == 3.0 and seed == 1 else -rate  # 3.0 has the lowest loss, where it has one

    found = tuned(table_from(grid_rows(value)), Score())
    assert (found["learning_rate"] == 1.0).all() and (found["status"] == OK).all()
    everything = cells(table_from(grid_rows(value)), Score())
    assert (everything.loc[everything["learning_rate"] == 3.0, "status"] == DIVERGED).all()
    assert everything.loc[everything["learning_rate"] == 3.0, "value"].isna().all()


def test_minus_infinity_is_no_loss():
    found = tuned(table_from(grid_rows(lambda z, rate, clip, seed: -np.inf if rate == 3.0 else rate)), Score())
    assert (found["learning_rate"] == 0.1).all()


def test_where_all_diverge_there_is_no_winner():
    found = tuned(table_from(grid_rows(lambda z, rate, clip, seed: np.inf if z == 4 else rate)), Score())
    assert found["status"].tolist() == [OK, OK, DIVERGED]
    assert np.isnan(found["learning_rate"].iloc[-1]) and found["learning_rate_at_edge"].iloc[-1] == ""


def test_what_is_extrapolated_wins_only_over_what_diverged():
    rows = grid_rows(lambda z, rate, clip, seed: rate)
    rows = [each | ({"status": EXTRAPOLATED} if each["learning_rate"] < 1 else {}) for each in rows]
    assert (tuned(table_from(rows), Score())["learning_rate"] == 1.0).all()


def test_each_runner_chooses_its_own_cell(table):
    forecast = grid_rows(lambda z, rate, clip, seed: rate, seeds=(None,), runner="moments")
    both = pd.concat([table, table_from(forecast)], ignore_index=True)
    found = tuned(both, Score()).groupby("runner")["learning_rate"].agg(list)
    assert found["training"] == [1.0, 0.3, 0.3] and found["moments"] == [0.1] * 3


# --- Which cells are as good -----------------------------------------------------------------------------------------


def ranked_with_noise(spread, num_seeds=8):
    rng = np.random.default_rng(0)
    drawn = {(rate, seed): spread * rng.standard_normal() for rate in RATES for seed in range(num_seeds)}
    # One in common at each seed: seeds are compared in pairs, so it hides nothing.
    common = rng.standard_normal(num_seeds)
    rows = grid_rows(
        lambda z, rate, clip, seed: bowl(z, rate, clip, 0) + drawn[rate, seed] + 100 * common[seed],
        seeds=range(num_seeds),
    )
    return ranked(table_from(rows), Score())


@pytest.mark.parametrize("spread, alone", [(0.01, True), (10.0, False)])
def test_contenders_are_what_chance_cannot_tell_apart(spread, alone):
    found = ranked_with_noise(spread)
    at_one = found[(found["noise_multiplier"] == 1) & (found["l2_clip_norm"] == 0.5)]
    assert (at_one["is_contender"].sum() == 1) == alone
    assert found.groupby("noise_multiplier")["place"].apply(lambda places: places.tolist() == [*range(1, 9)]).all()
    assert (found["behind"] >= 0).all()


def test_one_seed_has_one_contender(table):
    found = ranked(table[table["seed"] == 0], Score())
    assert found["is_contender"].sum() == len(LEVELS) and found["standard_error"].isna().all()


# --- Protocol A ------------------------------------------------------------------------------------------------------


def test_what_is_best_at_one_noise_multiplier_is_kept(table):
    found = protocol_a(table, Score(), tuned_at=1.0)
    assert (found["learning_rate"] == 1.0).all() and found["noise_multiplier"].tolist() == [1.0, 2.0, 4.0]
    elsewhere = protocol_a(table, Score(), tuned_at=4.0)
    assert (elsewhere["learning_rate"] == 0.3).all()
    assert (protocol_b(table, Score())["value"].to_numpy() <= found["value"].to_numpy()).all()


def test_protocol_a_needs_its_cells(table):
    with pytest.raises(ValueError, match="one of the noise multipliers 1, 2, 4, got 3"):
        protocol_a(table, Score(), tuned_at=3.0)
    without = table[~((table["noise_multiplier"] == 4) & (table["learning_rate"] == 1))]
    with pytest.raises(ValueError, match="DP-SGD that is best at noise multiplier 1 by training"):
        protocol_a(without, Score(), tuned_at=1.0)


def test_protocol_a_with_an_optimizer_that_diverges_where_it_is_tuned(table):
    lost = grid_rows(lambda z, rate, clip, seed: np.inf if z == 1 else rate, optimizer="DP-Adam")
    both = pd.concat([table, table_from(lost)], ignore_index=True)
    assert set(protocol_a(both, Score(), tuned_at=1.0)["optimizer"]) == {"DP-SGD"}


# --- The score -------------------------------------------------------------------------------------------------------


def test_the_mean_of_the_last_epochs():
    # n / B = 10 steps an epoch: of the steps 60, 70, ..., 100 the values are 0, ..., 4; step 50 is not among them.
    rows = [row(value=v, step=step, seed=s) for s in (0, 1) for v, step in zip([99, 0, 1, 2, 3, 4], range(50, 101, 10))]
    found = cells(table_from(rows), Score("loss", "last epochs"))
    assert found["value"].tolist() == [2.0] and found["num_seeds"].tolist() == [2]
    assert cells(table_from(rows), Score("loss", "final"))["value"].tolist() == [4.0]


def test_too_few_steps_for_the_last_epochs(table):
    with pytest.raises(ValueError, match=r"Expected 5 recorded steps of loss a run .* got 1"):
        cells(table, Score("loss", "last epochs"))


def test_an_unknown_metric(table):
    with pytest.raises(ValueError, match=r"Expected a metric among loss, .* got 'los'"):
        Score("los")
    with pytest.raises(ValueError, match="Expected rows of the metric accuracy, got loss"):
        cells(table, Score("accuracy"))


def scenario(sampler):
    problem = quadratic(np.ones(3), 1.0, example_noise_std=0.1)
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=sampler)
    grids = [(DPSGD(learning_rate=1.0), Grid((0.1,), (1.0,)))]
    asked = protocol_b_question(problem, mechanism, grids, noise_multipliers=[1.0], num_steps=1000, runners=[])
    return asked.scenarios[0]


def test_the_steps_to_record():
    # floor(100 / 30) = 3 steps an epoch.
    assert Score(when="last epochs").record_at(scenario(Poisson.for_batch_size(30, 100))) == (988, 991, 994, 997, 1000)
    assert Score().record_at(scenario(Stream(16))) == (1000,)
    with pytest.raises(ValueError, match='got a stream of examples; use "final"'):
        Score(when="last epochs").record_at(scenario(Stream(16)))


# --- Sweeps ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def question():
    problem = quadratic(np.array([1.0, 0.1]), 1.0, example_noise_std=0.1)
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Stream(16))
    grids = [
        (DPSGD(learning_rate=1.0), Grid((0.01, 0.1, 1.0), (1.0, 5.0))),
        (DPSignSGD(learning_rate=1.0), Grid((0.01, 0.1), (5.0,))),
    ]
    return protocol_b_question(
        problem,
        mechanism,
        grids,
        noise_multipliers=[0.5, 5.0, 50.0],
        num_steps=40,
        runners=(Training(), Moments()),
        num_seeds=3,
    )


def test_a_protocol_b_question_is_the_grid(question):
    assert len(question.scenarios) == 3 * (3 * 2 + 2)
    assert len({each.id for each in question.scenarios}) == 24 and question.record_at == (0, 40)


def test_both_stages_of_protocol_a(question, tmp_path):
    sizes = []

    def ask(questions):
        sizes.append(sum(len(q.scenarios) * len(q.runners) for q in questions))
        return run_sweep(questions, tmp_path / "store", workers=0, among=[question])

    table = ask_protocol_a([question], Score(), tuned_at=5.0, ask=ask)
    # runners x cells, and then runners x optimizers x noise multipliers more: of 48 cells 22 are never asked.
    assert sizes == [2 * 8, 2 * 8 + 2 * 2 * 3]
    assert table.groupby("runner")["scenario"].nunique().tolist() == [8 + 4, 8 + 4]
    found = protocol_a(table, Score(), tuned_at=5.0)
    assert len(found) == 12 and set(found["runner"]) == {"training", "moments"}
    assert found.groupby(["runner", "optimizer"])["learning_rate"].nunique().eq(1).all()


def test_the_kept_questions_are_each_runners_own(question):
    chosen = pd.DataFrame(
        {
            "runner": ["training", "moments"],
            "optimizer": ["DP-SGD", "DP-SGD"],
            "learning_rate": [0.1, 1.0],
            "l2_clip_norm": [5.0, 1.0],
        }
    )
    kept = kept_questions([question], chosen)
    assert [[runner.name for runner in q.runners] for q in kept] == [["training"], ["moments"]]
    assert [{s.optimizer.learning_rate for s in q.scenarios} for q in kept] == [{0.1}, {1.0}]
    assert all(len(q.scenarios) == 3 for q in kept)


def test_tuning_where_nothing_is_asked(question):
    with pytest.raises(ValueError, match=r"noise multipliers 0.5, 5, 50, got 7"):
        tuning_questions([question], 7.0)


def test_scenarios_that_no_column_tells_apart_are_refused_not_averaged(table):
    """Two DP-Adams of one learning rate are two scenarios in one cell: their mean is nobody's loss."""
    both = pd.concat([table, table.assign(scenario="t")])
    with pytest.raises(ValueError, match="keep them in stores of their own"):
        protocol_b(both, Score())
    # What differs in a column is another cell.
    assert len(protocol_b(pd.concat([table, table.assign(scenario="t", optimizer="DP-Adam")]), Score())) == 6


def test_they_are_refused_before_they_are_trained():
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Stream(8))
    problem = quadratic(np.ones(2), 1.0, example_noise_std=0.1)

    def ask(b2, runner) -> Question:
        adam = DPAdam(learning_rate=0.1, b2=b2)
        scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=adam, num_steps=5)
        return Question(scenarios=(scenario,), runners=(runner,), record_at=())

    check_cells([ask(0.5, Training()), ask(0.5, Moments())])
    with pytest.raises(ValueError, match="got several scenarios in one"):
        check_cells([ask(0.5, Training()), ask(0.9, Training())])
