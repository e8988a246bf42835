"""Advice: what it recommends on problems whose answer is known, what it never does, and what it says of itself."""

import math
from dataclasses import replace

import numpy as np
import pytest

from noisecast import (
    DPSGD,
    DPAdam,
    DPSignSGD,
    Moments,
    Poisson,
    SampledGaussian,
    Scenario,
    Stream,
    bundled,
    forecast_best,
    linear_model,
    quadratic,
)
from noisecast.advice import advise as advising
from noisecast.advice.advise import advise
from noisecast.advice.batches import better_batches, with_batch_size
from noisecast.advice.prediction import Prediction
from noisecast.advice.recommendation import choice, recommended
from noisecast.advice.search import Found, best_near, carried, carried_on, side_by_side
from noisecast.advice.thresholds import thresholds
from noisecast.forecasting import Outcome
from noisecast.forecasting.forecasters import Forecasters
from noisecast.forecasting.outcome import FORECAST_ERROR, Asker
from noisecast.privacy.sampling import FixedSize, Shuffled
from noisecast.problems.datasets import Dataset
from noisecast.table import DIVERGED, EXTRAPOLATED, OK, read_table, write_table

QUADRATIC = quadratic(np.ones(20), 0.3, example_noise_std=0.0)


def scenario(optimizer, *, noise=1.0, clip=10.0, batch=8, steps=400, problem=QUADRATIC):
    sampler = Stream(batch) if problem.num_examples is None else Poisson.for_batch_size(batch, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=noise, l2_clip_norm=clip, sampler=sampler)
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=steps, target_delta=1e-4)


def small():
    """Two optimizers, about as they would be tuned."""
    return [
        scenario(DPSGD(learning_rate=0.02), clip=1.0, batch=16, steps=60),
        scenario(DPSignSGD(learning_rate=0.005), clip=1.0, batch=16, steps=60),
    ]


@pytest.fixture(scope="module")
def breast_cancer():
    """Advice on real data, for all tests that only read it."""
    problem = linear_model(*bundled("breast_cancer"))
    tuned = [
        scenario(DPSGD(learning_rate=3.0), noise=1.868, clip=0.5, batch=64, steps=300, problem=problem),
        scenario(DPAdam(learning_rate=0.05), noise=1.868, clip=0.5, batch=64, steps=300, problem=problem),
    ]
    return tuned, advise(tuned, target_epsilons=[1.0, 6.0], optimizers=(DPSGD, DPAdam))


# --- What is recommended ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [2.0, 8.0, 32.0])
def test_the_rate_of_dp_sgd_is_the_exact_best_one(noise):
    """On a quadratic without clipping: E f_T = d/2 [x0^2 r^2T + s^2 eta (1 - r^2T)/(2 - eta)], r = 1 - eta, h = 1."""
    asked = scenario(DPSGD(learning_rate=0.01), noise=noise)
    ask = Asker("loss", advising.cheap(Moments(), "loss"), lambda: None)
    (found,) = side_by_side([best_near(asked, clip_too=False)], ask)
    rates = np.geomspace(1e-5, 1, 4000)
    variance = asked.mechanism.mean_noise_std**2
    losses = 10 * (0.09 * (1 - rates) ** 800 + variance * rates / (2 - rates) * (1 - (1 - rates) ** 800))
    assert found.scenario.optimizer.learning_rate == pytest.approx(rates[losses.argmin()], rel=0.1)
    assert found.outcome.value == pytest.approx(losses.min(), rel=0.01)


def test_the_advice_is_at_least_as_good_as_the_exact_best_without_clipping():
    tuned = [scenario(DPSGD(learning_rate=0.01))]
    found = advise(tuned, target_epsilons=[4.0, 0.5], optimizers=[DPSGD], may_change_batches=False).recommendations
    for each in found:
        chosen = each.chosen.scenario
        gradient = 0.3 * math.sqrt(20)  # at the start, so that a clip of this length clips nothing
        variance, rates = (chosen.mechanism.noise_multiplier * gradient / 8) ** 2, np.geomspace(1e-5, 1, 4000)
        losses = 10 * (0.09 * (1 - rates) ** 800 + variance * rates / (2 - rates) * (1 - (1 - rates) ** 800))
        assert each.chosen.outcome.value < 1.01 * losses.min()


@pytest.mark.slow
def test_it_is_as_good_as_the_full_search():
    """Within half a per cent of `forecast_best`, which asks full forecasts from a grid on."""
    problem = linear_model(*bundled("breast_cancer"))
    tuned = [scenario(DPSGD(learning_rate=1.0), noise=4.0, clip=0.5, batch=64, steps=300, problem=problem)]
    (found,) = advise(tuned, target_epsilons=[1.0], optimizers=[DPSGD], may_change_batches=False).recommendations
    best = forecast_best(problem, found.chosen.scenario.mechanism, DPSGD(learning_rate=1.0), num_steps=300)
    assert found.chosen.outcome.value < best.outcome.value * 1.005


def test_without_retuning_no_rate_or_clip_or_batch_changes():
    tuned = small()
    advice = advise(tuned, target_epsilons=[0.5, 4.0], may_retune=False, optimizers=(DPSGD, DPSignSGD))
    before = {
        s.optimizer.name: (s.optimizer, s.mechanism.l2_clip_norm, s.mechanism.sampler, s.num_steps) for s in tuned
    }
    for each in advice.recommendations:
        assert each.chosen.how == "kept" and len(each.by_optimizer) == 2
        for one in each.by_optimizer:
            s = one.scenario
            assert (s.optimizer, s.mechanism.l2_clip_norm, s.mechanism.sampler, s.num_steps) == before[s.optimizer.name]
        assert each.chosen.outcome.value == min(one.outcome.value for one in each.kept)
    assert advice.tried.empty and advice.thresholds_retuned == ()


def test_what_is_best_already_is_kept():
    """Advice about its own advice changes nothing."""
    tuned = [scenario(DPSGD(learning_rate=0.01), clip=1.0)]
    options = {"target_epsilons": [2.0], "optimizers": [DPSGD], "may_change_batches": False}
    first = advise(tuned, **options).recommendations[0].chosen
    again = advise([first.scenario], **options).recommendations[0]
    assert again.chosen.how == "kept" and again.chosen.scenario.id == first.scenario.id
    assert "nothing else gains enough" in again.reason


def test_it_says_where_nothing_is_learnt():
    tuned = [scenario(DPSGD(learning_rate=0.01))]
    options = {"optimizers": [DPSGD], "may_change_batches": False}
    least, enough = advise(tuned, target_epsilons=[0.002, 4.0], **options).recommendations
    assert "Hardly anything is learnt at this budget: the untrained model is at 0.9." in least.reason
    assert "Hardly" not in enough.reason


def test_the_budget_is_kept_by_everything_that_is_shown(breast_cancer):
    _, advice = breast_cancer
    for each in advice.recommendations:
        for one in (*each.by_optimizer, *each.kept):
            assert one.scenario.privacy_spent.epsilon <= each.target_epsilon
            assert one.scenario.privacy_spent.epsilon > 0.95 * each.target_epsilon  # and not wasted


@pytest.mark.slow
def test_other_batches_cost_no_more_gradients_and_gain_what_they_claim():
    """Batch noise alone: at a tiny batch a larger one with fewer steps gains."""
    problem = quadratic(np.ones(20), 0.3, example_noise_std=1.0)
    tuned = [scenario(DPSGD(learning_rate=0.01), clip=10.0, batch=4, steps=4000, problem=problem)]
    advice = advise(tuned, target_epsilons=[1.0], optimizers=[DPSGD])
    same = advise(tuned, target_epsilons=[1.0], optimizers=[DPSGD], may_change_batches=False)
    (free,), (bound,) = advice.recommendations, same.recommendations
    assert free.chosen.how == "re-tuned, other batches" and bound.chosen.how == "re-tuned"
    assert free.chosen.outcome.value < 0.99 * bound.chosen.outcome.value
    assert free.chosen.scenario.mechanism.expected_batch_size * free.chosen.scenario.num_steps <= 4 * 4000
    assert free.chosen.scenario.privacy_spent.epsilon <= 1.0
    assert bound.chosen.scenario.mechanism.expected_batch_size == 4 and bound.chosen.scenario.num_steps == 4000


def test_an_optimizer_that_was_never_tuned_is_advised_too():
    tuned = small()[:1]
    advice = advise(tuned, target_epsilons=[1.0], optimizers=(DPSGD, DPAdam), may_change_batches=False)
    (found,) = advice.recommendations
    assert {one.scenario.optimizer.name for one in found.by_optimizer} == {"DP-SGD", "DP-Adam"}
    assert [one.scenario.optimizer.name for one in found.kept] == ["DP-SGD"]


# --- Guard rails -----------------------------------------------------------------------------------------------------


def prediction(value, status=OK, optimizer=None, how="kept", spread=0.01):
    asked = scenario(optimizer or DPSGD(learning_rate=0.1))
    outcome = Outcome("loss", value, spread, status)
    return Prediction(asked, how, outcome, {"loss": value})


@pytest.mark.slow
def test_a_note_says_that_not_all_of_many_examples_were_used():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(advising.MANY + 1000, 3)).astype(np.float32)
    labels = (rows[:, 0] + rng.logistic(size=len(rows)) > 0).astype(int)
    many = scenario(DPSGD(learning_rate=1.0), problem=linear_model(Dataset("many", rows, labels, ("no", "yes"))))
    asked = {"target_epsilons": [1.0], "optimizers": [DPSGD], "may_retune": False}
    assert any("6,000 or fewer of 7,000 examples" in note for note in advise([many], **asked).notes)
    asked_for = advise([many], **asked, moments=Moments(time_steps=4, subsample=2000)).notes
    assert not any("or fewer of" in note for note in asked_for)


def test_what_is_extrapolated_or_diverged_is_never_preferred_silently():
    asked = scenario(DPSGD(learning_rate=0.1))
    work = advising._Work((asked,), (1.0,), "loss", Moments(), lambda share: None, Forecasters(asked.problem))
    good, tempting = prediction(0.5), prediction(0.3, EXTRAPOLATED, DPAdam(learning_rate=0.1))
    lost = prediction(math.inf, DIVERGED, DPSignSGD(learning_rate=0.1))
    work.price([each.scenario for each in (good, tempting, lost)])
    untrained = prediction(0.7).outcome
    found = recommended(1.0, [tempting, lost, good], work.prices, untrained)
    assert found.chosen is good and "1 better forecast" in found.confidence
    alone = recommended(1.0, [tempting, lost], work.prices, untrained)
    assert alone.chosen is tempting and "extrapolated: check it by training" in alone.confidence
    nothing = recommended(1.0, [lost], work.prices, untrained)
    assert "every forecast diverges" in nothing.confidence


@pytest.mark.parametrize("optimizer", [DPSGD(learning_rate=0.1), DPSignSGD(learning_rate=0.01)])
def test_settings_tuned_without_noise_are_as_good_a_start(optimizer):
    """Tuned with less noise than the examples' own, the rate is not carried to nothing."""
    problem = quadratic(np.ones(8), 0.2, example_noise_std=0.1)

    def best(noise):
        tuned = scenario(optimizer, noise=noise, clip=1.0, batch=16, steps=200, problem=problem)
        advice = advise([tuned], target_epsilons=[1.0], optimizers=[type(optimizer)], may_change_batches=False)
        return advice.recommendations[0].chosen.outcome.value

    assert best(0.0) == pytest.approx(best(0.5), rel=0.05)


def test_new_settings_must_earn_the_change():
    way = "re-tuned", "re-tuned, other batches"
    kept = prediction(1.0)
    assert choice([kept, prediction(0.999, how=way[0])])[0] is kept
    assert choice([kept, retuned := prediction(0.99, how=way[0])])[0] is retuned
    assert choice([kept, retuned, prediction(0.985, how=way[1])])[0] is retuned
    assert choice([kept, retuned, better := prediction(0.97, how=way[1])])[0] is better
    assert choice([prediction(0.5, EXTRAPOLATED), sound := prediction(0.9, how=way[0])])[0] is sound


def test_the_band_is_two_deviations_and_the_error_of_the_forecast():
    assert prediction(1.0, spread=0.05).half_width == pytest.approx(math.hypot(0.1, FORECAST_ERROR))
    assert prediction(1.0, spread=math.nan).half_width == pytest.approx(FORECAST_ERROR)
    assert math.isnan(prediction(math.inf, DIVERGED).half_width)


def test_the_price_of_tuning_is_in_order(breast_cancer):
    for each in breast_cancer[1].recommendations:
        assert each.price.one_run <= each.target_epsilon < each.price.best_of < each.price.all_counted
        assert each.price.num_runs == 49


def test_close_calls_are_called_so(breast_cancer):
    for each in breast_cancer[1].recommendations:
        values = sorted(one.outcome.value for one in each.by_optimizer)
        lead = (values[1] - values[0]) / values[1]
        word = "toss-up" if lead < 0.01 else "likely" if lead < FORECAST_ERROR else "clear"
        assert word in each.confidence
        assert f"{each.chosen.outcome.value:.4g}" in each.reason


# --- Thresholds ------------------------------------------------------------------------------------------------------


def pair(first, second):
    return [
        prediction(first, optimizer=DPSGD(learning_rate=0.1)),
        prediction(second, optimizer=DPAdam(learning_rate=0.1)),
    ]


def test_thresholds_are_where_straight_lines_meet():
    (found,) = thresholds({4.0: pair(1.0, 1.2), 1.0: pair(1.2, 1.0)})
    assert found.epsilon == pytest.approx(2.0) and found.between == (1.0, 4.0)
    assert (found.better_below, found.better_above, found.is_close) == ("DP-Adam", "DP-SGD", False)
    assert thresholds({4.0: pair(1.0, 1.2), 1.0: pair(1.0, 1.01)}) == ()
    twice = thresholds({0.1: pair(1.0, 1.2), 1.0: pair(1.0, 0.995), 10.0: pair(1.0, 1.2)})
    assert [each.better_below for each in twice] == ["DP-SGD", "DP-Adam"] and all(each.is_close for each in twice)


# --- The search ------------------------------------------------------------------------------------------------------


def pretend(value):
    """Answers from a function of the logarithms of rate and clip."""

    def ask(asked):
        points = [(math.log(s.optimizer.learning_rate), math.log(s.mechanism.l2_clip_norm)) for s in asked]
        found = [value(*point) for point in points]
        return [Outcome("loss", *each) if isinstance(each, tuple) else Outcome("loss", each, 0.0, OK) for each in found]

    return ask


@pytest.mark.parametrize("far", [0.0, 1.0, -4.0, 6.0, -10.0, 10.0])  # of the logarithm of the rate
@pytest.mark.parametrize("tilt", [0.0, 0.8, -0.8])
def test_the_bottom_of_a_valley_is_found(far, tilt):
    def valley(rate, clip):
        u, v = rate - far, clip - far / 2
        return 0.5 + 0.05 * (u + tilt * v) ** 2 + 0.02 * v**2 + (0.02 * u**3 if u > 0 else 0.0)

    (found,) = side_by_side([best_near(scenario(DPSGD(learning_rate=1.0), clip=1.0))], pretend(valley))
    assert found.outcome.value < 0.5 * 1.005 and len(found.tried) < (60 if abs(far) < 7 else 100)


def test_the_search_stays_on_this_side_of_what_is_extrapolated():
    def value(rate, clip):
        return 0.5 + 0.05 * rate**2, 0.0, OK if rate < -1 else EXTRAPOLATED

    (found,) = side_by_side([best_near(scenario(DPSGD(learning_rate=0.05), clip=1.0))], pretend(value))
    assert found.outcome.status == OK and found.outcome.value < 0.58


@pytest.mark.parametrize(
    "value, best",
    [
        (lambda r: (0.5 - 0.2 * math.exp(-((r + 2) ** 2) / 0.3), OK if r <= -0.3 else EXTRAPOLATED), 0.3),
        (
            lambda r: (
                (0.45 + 0.2 * (r + 0.5) ** 2, OK) if -0.55 < r < -0.05 else (0.5 + 0.3 * (r + 0.29) ** 2, EXTRAPOLATED)
            ),
            0.45,
        ),
    ],
)
def test_where_a_sound_cell_is_found_among_extrapolated_ones_the_search_goes_on(value, best):
    def answer(rate, clip):
        found, status = value(rate)
        return found, 0.0, status

    (found,) = side_by_side([best_near(scenario(DPSGD(learning_rate=1.0)), clip_too=False)], pretend(answer))
    assert found.outcome.status == OK and found.outcome.value < best * 1.005


def test_searches_side_by_side_get_their_own_answers():
    starts = [scenario(DPSGD(learning_rate=rate), clip=1.0) for rate in (0.5, 1.0, 2.0)]
    together = side_by_side([best_near(each) for each in starts], pretend(lambda r, c: 0.5 + r**2 + c**2))
    alone = [side_by_side([best_near(each)], pretend(lambda r, c: 0.5 + r**2 + c**2))[0].scenario.id for each in starts]
    assert [each.scenario.id for each in together] == alone


@pytest.mark.parametrize("optimizer, expected", [(DPSGD, 0.5), (DPAdam, 1.0), (DPSignSGD, 1.0)])
def test_rates_are_carried_by_the_noise(optimizer, expected):
    """Twice the noise: half the rate of DP-SGD, the rate of the others as it is (`advice.transfer`)."""
    here, there = (scenario(optimizer(learning_rate=0.1), noise=noise) for noise in (1.0, 2.0))
    assert carried(here, there).optimizer.learning_rate == pytest.approx(0.1 * expected)
    shorter = replace(here, num_steps=100)
    assert carried(here, shorter).optimizer.learning_rate == pytest.approx(0.2)


def test_a_third_budget_goes_on_along_the_line_through_two():
    def known(noise, rate):
        return scenario(DPSGD(learning_rate=rate), noise=noise)

    def onwards(*optima, noise=4.0):
        return carried_on(optima, known(noise, 7.0)).optimizer.learning_rate

    assert onwards(known(2.0, 0.5), known(1.0, 1.0)) == pytest.approx(0.25)
    assert onwards(known(2.0, 0.25), known(1.0, 1.0)) == pytest.approx(0.0625)
    assert onwards(known(2.0, 0.01), known(1.0, 1.0)) == pytest.approx(0.0025), "no steeper than -2"
    assert onwards(known(2.0, 3.0), known(1.0, 1.0)) == pytest.approx(3.0), "more noise never means a larger rate"
    for alone in ([known(2.0, 0.5)], [known(2.0, 0.5), known(2.0, 0.1)]):
        assert onwards(*alone) == carried(alone[0], known(4.0, 7.0)).optimizer.learning_rate


def test_cheap_and_full_forecasts_are_both_asked():
    tuned = small()[:1]
    advice = advise(tuned, target_epsilons=[1.0], optimizers=[DPSGD], may_change_batches=False)
    assert len(advice.tried) >= 6
    shown = [*advice.recommendations[0].kept, *advice.recommendations[0].by_optimizer]
    assert {one.scenario.id for one in shown} <= set(advice.rows["scenario"])
    full = Asker("loss", Moments(), lambda: None)([shown[0].scenario])[0]
    assert shown[0].outcome.value == pytest.approx(full.value)


def test_every_row_is_a_row_of_the_table(breast_cancer, tmp_path):
    write_table(breast_cancer[1].rows, tmp_path / "rows.parquet")
    assert set(read_table(tmp_path / "rows.parquet")["runner"]) == {"moments"}


# --- Batches ---------------------------------------------------------------------------------------------------------


def test_samplers_keep_their_kind_and_their_examples():
    assert with_batch_size(Poisson.for_batch_size(64, 25_000), 256) == Poisson.for_batch_size(256, 25_000)
    assert with_batch_size(FixedSize(64, 1000), 16) == FixedSize(16, 1000)
    assert with_batch_size(Shuffled(64, 1000), 2000) is None
    assert with_batch_size(Stream(4), 16) == Stream(16)


@pytest.mark.parametrize("bonus, changes", [(0.02, True), (0.005, False)])
def test_other_batches_must_gain(bonus, changes):
    start = scenario(DPSGD(learning_rate=0.1))
    before = Found(start, Outcome("loss", 1.0, 0.0, OK), ())

    def ask(asked):
        larger = [each.mechanism.expected_batch_size > 8 for each in asked]
        return [Outcome("loss", 1.0 - bonus * here, 0.0, OK) for here in larger]

    (after,) = side_by_side([better_batches(before, lambda each: each, least_gain=0.01)], ask)
    assert (after.scenario.id != start.id) == changes
    assert after.scenario.mechanism.expected_batch_size * after.scenario.num_steps <= 8 * 400
    assert after.outcome.lead_over(before.outcome) == (pytest.approx(bonus / (1 - bonus)) if changes else 0)


def test_larger_batches_that_spare_no_noise_are_not_looked_at():
    """Four times the batch at twice the multiplier: a quarter of the steps, each four times as long, half as noisy."""
    start = scenario(DPSGD(learning_rate=0.1), steps=8000)
    before = Found(start, Outcome("loss", 1.0, 0.0, OK), ())

    def num_asked(noise_multiplier):
        asked = []

        def ask(scenarios):
            asked.extend(scenarios)
            return [Outcome("loss", 2.0, 0.0, OK) for _ in scenarios]

        def calibrate(there):
            return replace(there, mechanism=there.mechanism.with_noise_multiplier(noise_multiplier))

        side_by_side([better_batches(before, calibrate, least_gain=0.01)], ask)
        return len(asked)

    twice = 2 * start.mechanism.noise_multiplier
    assert num_asked(twice) == 0 and num_asked(0.995 * twice) == 0 and num_asked(0.98 * twice) >= 3


# --- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_budgets_are_positive_and_finite(epsilon):
    with pytest.raises(ValueError, match="Expected finite target epsilons > 0"):
        advise([scenario(DPSGD(learning_rate=0.1))], target_epsilons=[epsilon])


def test_bad_questions_are_refused_in_a_sentence():
    one, other = scenario(DPSGD(learning_rate=0.1)), scenario(DPSGD(learning_rate=0.2))
    elsewhere = scenario(DPAdam(learning_rate=0.1), problem=quadratic(np.ones(3), 0.1, example_noise_std=0.0))
    for tuned, message in (
        ([], "at least one tuned scenario"),
        ([one, other], "one tuned setting an optimizer, got 2 of DP-SGD"),
        ([one, elsewhere], "on one problem"),
    ):
        with pytest.raises(ValueError, match=message):
            advise(tuned, target_epsilons=[1.0])
    with pytest.raises(ValueError, match="at least one target epsilon"):
        advise([one], target_epsilons=[])
    with pytest.raises(ValueError, match="of an optimizer that is asked about"):
        advise([one], target_epsilons=[1.0], optimizers=[DPAdam])
