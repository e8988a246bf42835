"""The benchmarks behind the documentation's tables do what they say, on tiny settings."""

import dataclasses
import importlib.util
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

sys.path.append(str(Path(__file__).parents[1]))
from benchmarks import advice_data, forecast_generated, forecast_trained, networks, stand_in, transfer
from benchmarks.transfer import Loss, Quadratic, search
from noisecast import DPSGD, DPAdam, DPSignSGD, Poisson, SampledGaussian, Scenario, linear_model
from noisecast.estimators import DPLogisticRegression
from noisecast.problems.datasets import bundled
from noisecast.reproduction.tasks import IMDB, Setting
from noisecast.scenario_file import read_scenario_file

# --- transfer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", [0.003, 1.0, 700.0])
def test_the_search_grows_until_the_best_is_inside(best):
    asked = []

    def losses(rates):
        asked.append(len(rates))
        assert len(set(rates)) == len(rates)
        return {rate: Loss(1 + math.log(rate / best) ** 2) for rate in rates}

    found, tried = search(losses, 1.0, halvings=3)
    assert min(tried) < found < max(tried)
    assert abs(math.log(found / best)) <= math.log(2) / 8  # half of the last spacing, 2^(1/4), and what rounding leaves
    assert asked == sorted(asked)


def test_a_diverging_rate_is_never_the_best():
    def losses(rates):
        return {rate: Loss(math.inf if rate > 1 else 2 - rate) for rate in rates}

    assert search(losses, 1.0, halvings=2)[0] == 1.0


def test_the_rule_is_good_on_the_curvatures_that_it_is_for():
    equal = np.ones(20)
    right = Quadratic("", equal, 1_000, knows_curvature=True)
    wrong = Quadratic("", equal, 1_000)
    kept, carried = right.regrets(DPSGD, 1.0, 16.0)
    assert kept > 0.5 and carried < 0.01
    assert wrong.regrets(DPSGD, 1.0, 16.0)[1] > 5


def test_a_quadratic_ends_where_its_recursion_does():
    """DP-SGD: x <- (1 - eta h) x + eta s N, in the mean, against the formula with e^(-2 h eta T)."""
    each = Quadratic("", np.geomspace(0.01, 1, 5), 500)
    rate, noise, mean_square = 1e-3, each.noise_std(64.0), np.ones(5)  # half of the loss is noise
    for _ in range(each.num_steps):
        mean_square = (1 - rate * each.hessian_diag) ** 2 * mean_square + (rate * noise) ** 2
    expected = 0.5 * np.sum(each.hessian_diag * mean_square)
    assert each.loss(DPSGD(learning_rate=1.0), rate, noise) == pytest.approx(expected, rel=2e-3)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Breast cancer, ten epochs."""
    task = dataclasses.replace(transfer.TASKS["breast_cancer"], epochs=10, num_seeds=8)
    store = tmp_path_factory.mktemp("transfer") / "store"
    return transfer._Asked(task.load(None), task, transfer.Training(), store)


@pytest.fixture(scope="module")
def answers(asked):
    """Of two optimizers, asked twice."""
    return [[asked.answer(kind, 8.0, 0.5) for kind in (DPSGD, DPSignSGD)] for _ in range(2)]


@pytest.mark.slow
def test_answers_are_kept_in_the_store(answers):
    assert answers[0] == answers[1]  # noise is from the operating system: without the store no two would be


@pytest.mark.slow
def test_fewer_seeds_are_the_first_of_those_in_the_store(asked, answers):
    few = dataclasses.replace(asked, task=dataclasses.replace(asked.task, num_seeds=2))
    rate = answers[0][0].tuned
    of_all, of_few = (each._losses(each._calibrated(DPSGD, 8.0))([rate])[rate] for each in (asked, few))
    assert of_all.mean != of_few.mean and of_few.mean == pytest.approx(of_all.mean, rel=0.3)


@pytest.mark.slow
def test_sgd_follows_the_noise_and_sign_stays(answers):
    sgd, sign = answers[0]
    assert sgd.transferred < sgd.tuned / 4 and sign.transferred == sign.tuned
    assert sgd.carried.mean < sgd.kept.mean and sign.carried == sign.kept
    for each in (sgd, sign):
        assert each.best.mean <= min(each.kept.mean, each.carried.mean)
        assert 0 < each.best.error < 0.2


# --- stand_in ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.asarray, sp.csr_array])
def test_rows_are_scaled_as_the_estimators_do(kind):
    rng = np.random.default_rng(0)
    rows, labels = rng.exponential(size=(50, 6)), rng.integers(2, size=50)  # norms on both sides of 2
    expected = DPLogisticRegression(data_norm=2.0)._dataset(kind(rows), labels, np.array([0, 1])).features
    assert abs(stand_in._scaled(kind(rows), 2.0) - expected).max() < 1e-6


@pytest.mark.slow
def test_the_plan_is_the_estimators_own():
    task = stand_in.TASKS["breast_cancer"](None)
    train, _ = bundled("breast_cancer")
    model = DPLogisticRegression(optimizer="DP-SGD", data_norm=4.0, target_epsilon=8.0, classes=[0, 1])
    model.fit(train.features, train.labels)
    planned = stand_in.planned(task, "DP-SGD", 8.0)
    assert planned.optimizer == model.optimizer_ and planned.mechanism == model.mechanism_
    assert planned.num_steps == model.n_iter_
    table = stand_in._trained(task, planned, num_runs=4)
    assert len(table) == len(stand_in.FACTORS)
    assert table["score"].iloc[len(table) // 2] > 0.9
    assert (table["error"] > 0).all() and table["loss"].idxmin() not in (0, len(table) - 1)


# --- opacus_digits ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_opacus_trains_the_example_and_repeats_itself():
    for library in ("torch", "opacus"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    from benchmarks import opacus_digits

    train, _ = opacus_digits.EXAMPLE["digits"]()
    mechanism = opacus_digits._mechanism(train, 8.0, 300)
    contestant = opacus_digits.CONTESTANTS[0]
    short, long, again = (
        opacus_digits._trained(train, contestant, 1.0, mechanism, num_steps, seed=0) for num_steps in (12, 48, 12)
    )
    assert short == again and long < 0.7 * short < math.log(10)


# --- advice -----------------------------------------------------------------------------------------------------------


def test_the_data_behind_the_regrets_can_be_asked_about(tmp_path, capsys):
    posts = tmp_path / "posts.csv"
    lines = [f"how to do {i},{'c#|net' if i % 2 else 'javascript'}\n" for i in range(200)]
    posts.write_text("title,tags\n" + "".join(lines) + "a snake,python\n", encoding="utf-8")
    advice_data.titles(tmp_path, posts=posts)
    advice_data.heavy_tails(tmp_path)
    assert "200 rows" in capsys.readouterr().out
    for name, rows in (("titles", 200), ("heavy", 9000)):
        tuned = read_scenario_file(tmp_path / f"{name}.toml").scenarios
        assert [s.optimizer.name for s in tuned] == ["DP-SGD", "DP-SignSGD", "DP-Adam"]
        assert tuned[0].problem.num_examples == rows and 7.9 < tuned[0].privacy_spent.epsilon <= 8


# --- forecast_trained -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_task():
    """Breast cancer, with a rate of DP-SGD's so large that more noise is worse for it than for DP-SignSGD."""
    problem = linear_model(*bundled("breast_cancer"))
    tuned = {DPSGD: Setting(4.0, 0.5), DPSignSGD: Setting(0.02, 0.5), DPAdam: Setting(0.02, 0.5)}
    return dataclasses.replace(IMDB, tuned=tuned, epochs=20), problem


@pytest.mark.slow
def test_a_named_setting_is_compared_with_the_best_of_its_sweep(small_task, tmp_path, monkeypatch):
    monkeypatch.setattr(forecast_trained, "OPTIMIZERS", (DPSGD, DPSignSGD))
    monkeypatch.setattr(forecast_trained, "RATES", {kind: (1e-4, 0.1) for kind in forecast_trained.RATES})
    monkeypatch.setattr(forecast_trained, "CLIPS", (0.5,))
    monkeypatch.setattr(forecast_trained, "NOISE_MULTIPLIERS", (1.0,))
    table = forecast_trained.regrets(*small_task, tmp_path, 16, 64, 128)
    assert list(table["learning_rate_best"]) == [0.1] * 2  # and not the rate with which nothing is learnt
    assert set(table["num_seeds"]) | set(table["num_seeds_best"]) <= {64, 128}
    np.testing.assert_allclose(table["regret"], table["value"] / table["value_best"] - 1)
    gaps = abs(table["forecast"] / table["value"] - 1)
    assert (gaps < 4 * table["standard_error"] / table["value"] + 0.03).all()


@pytest.mark.slow
def test_a_crossing_is_trained_where_it_is_forecast(small_task, tmp_path):
    found = forecast_trained.crossing(*small_task, 32, tmp_path, 64)
    trained, forecast = found["trained"], found["forecast"]
    assert trained.low < trained.value < trained.high
    assert trained.value == pytest.approx(forecast.noise_multiplier, rel=0.3)
    assert found["trained_epsilon"] == pytest.approx(forecast.epsilon, rel=0.5)


# --- forecast_generated -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", forecast_generated.KINDS)
def test_generated_data_are_what_they_are_called(name):
    problem = forecast_generated.problem_of(name)
    again = forecast_generated.problem_of(name)
    assert problem.fingerprint == again.fingerprint and problem.test is not None
    low, high = (0.1, 0.2) if name in forecast_generated.OFFSETS else (0.2, 0.8)
    low, high = (0.02, 0.03) if name in ("rare-label", "rare-events") else (low, high)
    assert low < float(np.mean(problem.train.labels)) < high
    assert (problem.num_examples < problem.num_features) == (name in ("wide", "wide-dense", "expression"))


def test_cells_are_trained_until_they_are_known(monkeypatch):
    monkeypatch.setattr(forecast_generated, "NUM_STEPS", 30)
    monkeypatch.setattr(forecast_generated, "RECORD_AT", (10, 30))
    train, test = bundled("breast_cancer")
    problem = linear_model(train, test)
    mechanism = SampledGaussian(noise_multiplier=2.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, 455))
    asked = Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=0.5), num_steps=30)
    found = forecast_generated.compared(problem, [asked], share=0.02, most_seeds=1024)
    last = found[found["step"] == 30].iloc[0]
    assert last["trained_sem"] <= 0.02 * last["trained_mean"] and abs(last["error"]) < 0.1
    row = forecast_generated._row(found)
    assert row[:3] == ["1", "0", "1"] and row[3] == row[5] == row[6]
    known = found.assign(data="breast_cancer", forecast=1.0, forecast_std=1.0, status="diverged", error=9.0)
    again = forecast_generated.forecast_again(problem, known, 64)
    pd.testing.assert_frame_equal(again, found, check_dtype=False)
    with pytest.raises(SystemExit, match="with batches of 32, got others"):
        forecast_generated.forecast_again(problem, known, 32)


# --- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_networks_are_timed_and_another_step_is_refused(monkeypatch):
    """Two of ours and JAX Privacy, where it is installed, agree and are timed; another clip norm makes other steps."""
    monkeypatch.setattr(networks, "NUM_EXAMPLES", 64)
    small = dataclasses.replace(networks.NETWORKS[0], shapes=((5, 784), (10, 5)))
    entered = {str(runs): (runs, partial(networks.Ours, small, "DP-Adam", 8, runs)) for runs in (1, 2)}
    entered["JAX Privacy"] = 1, partial(networks.jax_privacy, small, "DP-Adam", 8)
    rates = networks.race(entered, rounds=2, seconds=0.01)
    assert entered.keys() - rates.keys() <= {"JAX Privacy"} and all(len(each) == 2 for each in rates.values())
    assert all(rate > 0 for each in rates.values() for rate in each)
    other = dataclasses.replace(small, l2_clip_norm=0.5)
    entered["other"] = 1, partial(networks.Ours, other, "DP-Adam", 8, 1)
    with pytest.raises(RuntimeError, match="Expected other to take the steps that we take"):
        networks.race(entered, rounds=1, seconds=0.01)
