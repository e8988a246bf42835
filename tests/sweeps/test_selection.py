"""Selection: the right cell, both epsilons, and every way in which a price must refuse."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

import noisecast as nc
from noisecast.cli.select import NON_PRIVATE
from noisecast.cli.select import select as select_command
from noisecast.privacy.accounting import epsilon_spent
from noisecast.privacy.tuning import Run, TrialDistribution, TrialKind, composed_epsilon, repeat_select_epsilon
from noisecast.problems.datasets import Dataset
from noisecast.question import Question
from noisecast.runners import Moments, Sde, Training
from noisecast.sweeps import run_sweep
from noisecast.sweeps.ledger import draw_trials, ledger_of
from noisecast.sweeps.selection import Compose, Public, RepeatSelect, select
from noisecast.table import DIVERGED

TRIALS = TrialDistribution(TrialKind.GEOMETRIC, 5)
STEPS = 20


def toy_problem(name="toy", seed=0):
    rng = np.random.default_rng(seed)
    features = rng.uniform(-1, 1, (80, 2)).astype(np.float32)
    labels = (features @ [2.0, -1.0] > 0).astype(np.int32)
    train, test = (Dataset(name, features[rows], labels[rows], ("no", "yes")) for rows in (slice(0, 60), slice(60, 80)))
    return nc.linear_model(train, test)


PROBLEM = toy_problem()


def scenario(rate=0.1, noise_multiplier=2.0, optimizer=nc.DPSGD, problem=PROBLEM):
    mechanism = nc.SampledGaussian(
        noise_multiplier=noise_multiplier, l2_clip_norm=1.0, sampler=nc.Poisson.for_batch_size(6, 60)
    )
    return nc.Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer(learning_rate=rate), num_steps=STEPS)


GRID = tuple(scenario(rate) for rate in (0.1, 0.2, 0.4))
QUESTION = Question(scenarios=GRID, runners=(Training(),), record_at=(0, 10), num_seeds=3)


@pytest.fixture(scope="module")
def trained():
    return nc.answer(GRID, runners=[Training()], num_seeds=3, record_at=[0, 10])


def scored(table, values, metric="test_loss", step=STEPS):
    """The table with a metric's values at a step replaced: by scenario, one a seed."""
    table = table.copy()
    for which, numbers in values.items():
        for seed, number in enumerate(numbers):
            at = (
                (table["scenario"] == GRID[which].id)
                & (table["seed"] == seed)
                & (table["step"] == step)
                & (table["metric"] == metric)
            )
            assert at.sum() == 1
            table.loc[at, "value"] = number
            table.loc[at, "status"] = "ok" if math.isfinite(number) else DIVERGED
    return table


PLAIN = {0: [3, 3, 3], 1: [1, 2, 3], 2: [2.5, 2.5, 2.5]}
PUBLIC = Public("a simulation")


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_best_mean_over_seeds_wins(trained):
    found = select(scored(trained, PLAIN), metric="test_loss", price=PUBLIC)
    assert (found.scenario, found.value, found.num_seeds) == (GRID[1].id, 2.0, 3)
    assert found.standard_error == pytest.approx(1 / math.sqrt(3))
    assert found.settings["learning_rate"] == 0.2
    assert found.runners_up["scenario"].tolist() == [GRID[2].id, GRID[0].id]
    assert found.seed is None


def test_more_is_better_of_accuracies(trained):
    table = scored(trained, PLAIN, "test_accuracy")
    assert select(table, metric="test_accuracy", price=PUBLIC).scenario == GRID[0].id


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_cell_with_one_diverged_run_never_wins(trained, bad):
    table = scored(trained, PLAIN | {1: [-9, -9, bad]})
    found = select(table, metric="test_loss", price=PUBLIC)
    assert found.scenario == GRID[2].id and GRID[1].id not in set(found.ranking["scenario"])
    with pytest.raises(ValueError, match="has not diverged"):
        select(scored(trained, dict.fromkeys(range(3), [bad] * 3)), metric="test_loss", price=PUBLIC)


def test_parameters_that_are_not_numbers_have_diverged_whatever_the_accuracy(trained):
    table = scored(scored(trained, {2: [9, 9, 9]}, "test_accuracy"), {2: [1, 1, math.nan]}, "test_loss")
    assert select(table, metric="test_accuracy", price=PUBLIC).scenario != GRID[2].id


def test_the_training_loss_has_no_say_in_a_private_choice(trained):
    table = scored(scored(trained, PLAIN), {1: [1, 1, math.inf]}, "loss")
    assert select(table, metric="test_loss", price=Compose(), ledger=ledger_of([QUESTION])).scenario == GRID[1].id


def test_ties_are_broken_by_name_whatever_the_order_of_rows(trained):
    table = scored(trained, dict.fromkeys(range(3), [1.0] * 3))
    winners = {
        select(table.sample(frac=1, random_state=seed), metric="test_loss", price=PUBLIC).scenario for seed in range(5)
    }
    assert winners == {min(each.id for each in GRID)}


def test_the_mean_of_the_last_epochs(trained):
    """An epoch is 10 steps here: the last one begins after step 10, the last two after step 0."""
    table = scored(scored(trained, PLAIN), {0: [-9] * 3, 1: [9] * 3, 2: [9] * 3}, step=10)
    assert select(table, metric="test_loss", price=PUBLIC, last_epochs=1).scenario == GRID[1].id
    two = select(table, metric="test_loss", price=PUBLIC, last_epochs=2)
    assert (two.scenario, two.value) == (GRID[0].id, -3.0)


def test_an_epoch_is_as_many_steps_as_scenario_files_count(trained):
    """floor(n / B): the end of the last epoch but two, 20 steps before the last, is not of the last two."""
    table = scored(scored(trained, PLAIN), {0: [-9] * 3, 1: [9] * 3, 2: [9] * 3}, step=10)
    table["sampling_probability"] = 1 / 5.9  # five steps: those of two epochs are 11 to 20
    assert select(table, metric="test_loss", price=PUBLIC, last_epochs=2).scenario == GRID[1].id


def test_a_run_without_its_last_step_is_not_scored(trained):
    table = scored(trained, PLAIN)
    unfinished = table[(table["scenario"] != GRID[1].id) | (table["step"] < STEPS)]
    assert select(unfinished, metric="test_loss", price=PUBLIC).scenario == GRID[2].id


# --- the price --------------------------------------------------------------------------------------------------------


def test_public_costs_nothing_and_says_why(trained):
    found = select(trained, metric="loss", price=Public("digits of the postal service."))
    one = GRID[0].privacy_spent.epsilon
    assert found.epsilon_of_run == found.epsilon_of_procedure == one
    assert "digits of the postal service)" in found.sentence() and "account for it anew" in found.sentence()


def test_compose_counts_every_run_with_the_batches_that_it_shared(trained):
    ledger = ledger_of([QUESTION])
    found = select(scored(trained, PLAIN), metric="test_loss", price=Compose(), ledger=ledger)
    # Three seeds, and at each of them three runs that share their batches: z / sqrt(3), three times as long.
    less_noise = GRID[0].mechanism.with_noise_multiplier(2.0 / math.sqrt(3))
    wanted = epsilon_spent(less_noise, num_steps=3 * STEPS, target_delta=1e-5).epsilon
    assert found.epsilon_of_procedure == pytest.approx(wanted, rel=1e-3)
    independent = epsilon_spent(GRID[0].mechanism, num_steps=9 * STEPS, target_delta=1e-5).epsilon
    assert wanted > 1.1 * independent  # what forgetting that they are shared would have said
    assert found.epsilon_of_run == GRID[0].privacy_spent.epsilon < found.epsilon_of_procedure
    assert "among 9 runs" in found.sentence() and "share their batches" in found.sentence()
    assert "held-out examples" in found.sentence()


def test_the_ledger_shares_batches_as_the_engines_do():
    noisier, other_rate = scenario(0.1, 3.0), scenario(0.2)
    elsewhere = scenario(0.1, problem=toy_problem("other", 1))
    asked = replace(QUESTION, scenarios=(GRID[0], noisier, other_rate, elsewhere), num_seeds=2)
    runs = ledger_of([asked]).runs
    assert len(runs) == 8
    names = {(s.id, seed): runs[s.id, seed].batches for s in asked.scenarios for seed in (0, 1)}
    for seed in (0, 1):
        assert len({names[s.id, seed] for s in (GRID[0], noisier, other_rate)}) == 1
    assert names[GRID[0].id, 0] != names[GRID[0].id, 1] and names[GRID[0].id, 0] != names[elsewhere.id, 0]


def test_other_runners_make_no_runs_of_the_mechanism():
    assert ledger_of([replace(QUESTION, runners=(Sde(), Moments()))]).runs == {}


@pytest.mark.parametrize("metric", ["loss", "accuracy", "gradient_norm"])
def test_a_choice_by_the_training_examples_has_no_guarantee(trained, metric):
    found = select(trained, metric=metric, price=Compose(), ledger=ledger_of([QUESTION]))
    assert found.epsilon_of_procedure == math.inf
    assert found.epsilon_of_run == GRID[0].privacy_spent.epsilon
    mend = {"accuracy": "test_accuracy"}.get(metric, "test_loss")
    assert "no privacy guarantee" in found.sentence() and f"Select by {mend}" in found.sentence()


def test_a_choice_by_a_forecast_has_no_guarantee(trained):
    table = scored(trained, PLAIN).assign(runner="moments")
    found = select(table, metric="test_loss", price=Compose(), ledger=ledger_of([QUESTION]), runner="moments")
    assert found.epsilon_of_procedure == math.inf and "runner moments" in found.sentence()
    public = select(table, metric="test_loss", price=PUBLIC, runner="moments")
    assert public.epsilon_of_procedure == public.epsilon_of_run < math.inf


def test_noise_from_a_known_seed_has_no_guarantee_not_even_of_one_run(trained):
    ledger = ledger_of([replace(QUESTION, insecure_seeds=(0, 1, 2))])
    found = select(trained, metric="test_loss", price=Compose(), ledger=ledger)
    assert found.epsilon_of_run == found.epsilon_of_procedure == math.inf and "take it away" in found.sentence()


# --- random trials ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trials_and_table():
    """Three trials, whatever is drawn: seeds 0, 1, 2 of the first scenario, given the seeds that were drawn."""
    rng = np.random.default_rng(4)
    questions = ()
    while len(questions) != 3:
        questions = draw_trials([QUESTION], TRIALS, rng)
    runs = list(ledger_of(questions, trials=TRIALS, drawn_from=[QUESTION]).runs)
    table = nc.answer(GRID, runners=[Training()], num_seeds=3, record_at=[0])
    parts = []
    for seed, (name, number) in enumerate(runs):
        part = table[(table["scenario"] == name) & (table["seed"] == seed)].assign(seed=number)
        parts.append(part)
    import pandas as pd

    return questions, pd.concat(parts, ignore_index=True)


def test_repeat_select_takes_the_best_single_trial_and_tells_nothing_else(trials_and_table):
    questions, table = trials_and_table
    ledger = ledger_of(questions, trials=TRIALS, drawn_from=[QUESTION])
    found = select(table, metric="test_loss", price=RepeatSelect(TRIALS), ledger=ledger)
    last = table[(table["metric"] == "test_loss") & (table["step"] == STEPS)]
    best = last.loc[last["value"].idxmin()]
    assert (found.scenario, found.seed, found.value) == (best["scenario"], best["seed"], best["value"])
    assert found.standard_error is None and len(found.runners_up) == 0 and len(found.ranking) == 1
    cells = [(each.mechanism, STEPS) for each in GRID]
    assert found.epsilon_of_procedure == repeat_select_epsilon(cells, trials=TRIALS, target_delta=1e-5).epsilon
    assert "must stay secret" in found.sentence() and "3 trials" not in found.sentence()


def test_repeat_select_counts_a_cell_that_was_not_drawn(trials_and_table):
    questions, table = trials_and_table
    with_risk = replace(QUESTION, scenarios=(*GRID, scenario(0.1, noise_multiplier=0.5)))
    safe, risky = (
        select(
            table,
            metric="test_loss",
            price=RepeatSelect(TRIALS),
            ledger=ledger_of(questions, trials=TRIALS, drawn_from=[asked]),
        ).epsilon_of_procedure
        for asked in (QUESTION, with_risk)
    )
    assert risky > 2 * safe


def test_repeat_select_refuses_what_it_does_not_cover(trials_and_table, trained):
    questions, table = trials_and_table
    ledger = ledger_of(questions, trials=TRIALS, drawn_from=[QUESTION])

    def refused(sentence, *, table=table, ledger=ledger, trials=TRIALS):
        with pytest.raises(ValueError, match=sentence):
            select(table, metric="test_loss", price=RepeatSelect(trials), ledger=ledger)

    refused("fixed grid", table=trained, ledger=ledger_of([QUESTION]))
    refused("trials that the sweep drew", trials=TrialDistribution(TrialKind.GEOMETRIC, 4))
    refused("trials that the sweep drew", trials=TrialDistribution(TrialKind.POISSON, 5))
    first = next(iter(ledger.runs))
    refused("all 3 trials in the table, got 2", table=table[table["seed"] != first[1]])
    refused("number of trials that was drawn is 0", table=table.iloc[:0], ledger=replace(ledger, runs={}))
    same = next(iter(ledger.runs.values())).batches
    shared = {key: Run(run.mechanism, run.num_steps, same) for key, run in ledger.runs.items()}
    refused("batches of their own", ledger=replace(ledger, runs=shared))
    refused("the sweep's ledger", ledger=None)
    by_training = select(table, metric="loss", price=RepeatSelect(TRIALS), ledger=ledger)
    assert by_training.epsilon_of_procedure == math.inf and len(by_training.ranking) == 1


@pytest.mark.parametrize("budget", [1e-9, 1e9])
def test_of_random_trials_no_budget_after_another_tells_which_there_are(trials_and_table, budget):
    questions, table = trials_and_table
    ledger = ledger_of(questions, trials=TRIALS, drawn_from=[QUESTION])
    with pytest.raises(ValueError, match="no budget for a choice from random trials"):
        select(table, metric="test_loss", price=RepeatSelect(TRIALS), ledger=ledger, at_most_epsilon=budget)


def test_trials_are_drawn_uniformly_with_seeds_of_their_own():
    rng, trials = np.random.default_rng(0), TrialDistribution(TrialKind.POISSON, 6_000)
    drawn = draw_trials([QUESTION, replace(QUESTION, scenarios=GRID[:2])], trials, rng)  # two cells asked for twice
    counts = np.array([sum(q.scenarios[0].id == each.id for q in drawn) for each in GRID])
    assert scipy.stats.chisquare(counts).pvalue > 1e-6
    assert scipy.stats.chisquare(counts, counts.sum() * np.array([0.4, 0.4, 0.2])).pvalue < 1e-6  # the control
    assert len({q.first_seed for q in drawn}) == len(drawn)
    assert all(q.num_seeds == 1 and len(q.scenarios) == 1 and q.insecure_seeds is None for q in drawn)
    ledger = ledger_of(drawn, trials=trials, drawn_from=[QUESTION])
    assert len({run.batches for run in ledger.runs.values()}) == len(drawn) and len(ledger.cells) == 3


def test_trials_that_cannot_be_drawn():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="insecure seeds"):
        draw_trials([replace(QUESTION, insecure_seeds=(1,))], TRIALS, rng)
    with pytest.raises(ValueError, match="at least one scenario"):
        draw_trials([], TRIALS, rng)
    with pytest.raises(ValueError, match="or neither"):
        ledger_of([QUESTION], trials=TRIALS)


# --- refusals and the command line ------------------------------------------------------------------------------------


def test_a_price_must_be_named(trained):
    with pytest.raises(TypeError, match="price"):
        select(trained, metric="test_loss")  # pyright: ignore
    for nothing in (None, "public"):
        with pytest.raises(ValueError, match=r"public .* compose .* repeat_select"):
            select(trained, metric="test_loss", price=nothing)
    with pytest.raises(ValueError, match="reason"):
        Public("  ")


@pytest.mark.parametrize("metric", ["clip_fraction", "params_norm", "loss_std", "test_loss_std", "nonsense", "test_"])
def test_a_metric_that_ranks_nothing_is_refused(trained, metric):
    with pytest.raises(ValueError, match="tells the better model"):
        select(trained, metric=metric, price=PUBLIC)


def test_what_is_not_in_the_table_is_refused(trained):
    with pytest.raises(ValueError, match="recorded"):
        select(trained, metric="rmse", price=PUBLIC)
    with pytest.raises(ValueError, match="Expected a runner that the sweep asked, training, got 'sde'"):
        select(trained, metric="loss", price=PUBLIC, runner="sde")
    with pytest.raises(ValueError, match="last_epochs"):
        select(trained, metric="loss", price=PUBLIC, last_epochs=-1)
    with pytest.raises(ValueError, match="one problem"):
        half = np.arange(len(trained)) % 2 == 0
        select(trained.assign(problem=np.where(half, "a", "b")), metric="loss", price=PUBLIC)
    with pytest.raises(ValueError, match="ledger"):
        select(trained, metric="test_loss", price=Compose())
    with pytest.raises(ValueError, match="got others"):
        select(trained, metric="test_loss", price=Compose(), ledger=ledger_of([replace(QUESTION, num_seeds=2)]))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "store"
    quieter = scenario(0.1, 4.0, nc.DPSignSGD)
    run_sweep([replace(QUESTION, scenarios=(*GRID, quieter), num_seeds=2)], folder, workers=0)
    return folder


def test_the_command_prints_both_epsilons(store, capsys):
    select_command(store, metric="test_loss", price="compose")
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "epsilon of one run",
        "epsilon of the procedure",
        "among 8 runs",
        "Runners-up",
        "dp-sign-sgd",
        NON_PRIVATE,
    ):
        assert words.lower() in shown.lower().replace("dp-signsgd", "dp-sign-sgd"), words


def test_scores_of_public_data_are_not_called_non_private(store, capsys):
    select_command(store, metric="test_loss", price="public", reason="simulated")
    assert "non-private" not in capsys.readouterr().out


def test_the_command_prints_json(store, capsys):
    select_command(store, metric="test_loss", price="public", reason="simulated", json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["price"] == "public" and said["epsilon_of_run"] == said["epsilon_of_procedure"]
    assert len(said["best_of_each"]) == 2 and len(said["runners_up"]) == 3
    select_command(store, metric="loss", price="compose", json=True)
    assert json.loads(capsys.readouterr().out)["epsilon_of_procedure"] == "inf"


def test_the_command_agrees_with_composition_by_hand(store, capsys):
    select_command(store, metric="test_loss", price="compose", json=True)
    said = json.loads(capsys.readouterr().out)
    runs = [Run(GRID[0].mechanism, STEPS, seed) for seed in "aaabbb"]
    runs += [Run(GRID[0].mechanism.with_noise_multiplier(4.0), STEPS, seed) for seed in "ab"]
    assert said["epsilon_of_procedure"] == pytest.approx(composed_epsilon(runs, target_delta=1e-5).epsilon, rel=1e-6)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({}, "--price public, compose or repeat-select"),
        ({"price": "public"}, "reason"),
        ({"price": "compose", "reason": "because"}, "leave it out"),
        ({"price": "repeat-select"}, "fixed grid"),
    ],
)
def test_the_command_refuses_in_a_sentence(store, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        select_command(store, metric="test_loss", **options)
