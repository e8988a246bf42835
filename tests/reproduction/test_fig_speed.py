"""Early speeds: the fit, how claims are decided, that the picture draws."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pandas as pd
import pytest
from synthetic import toy_problem

from noisecast.reproduction import fig_floors, fig_speed
from noisecast.reproduction.fig_speed import rate_slope, rates
from noisecast.reproduction.tasks import IMDB, MOVIELENS_PAPER_LIKE, late, times
from noisecast.runners import answer
from noisecast.sweeps import cells_of

MULTIPLIERS = np.array([0.8, 1.0, 1.2, 1.6, 4.0, 6.0])
STEPS = np.array(times(10_000), float)
POWERS = {"DP-SGD": 0.0, "DP-SignSGD": -1.0, "DP-Adam": -1.0}


def losses(power: float, *, floor: float = 0.0, seeds: int = 4) -> np.ndarray:
    """0.3 + floor z + exp(-r k) with r = 1e-3 z^power, within 0.2 %; (multipliers, times, seeds)."""
    rng = np.random.default_rng(0)
    left = np.exp(-1e-3 * MULTIPLIERS[:, None, None] ** power * STEPS[None, :, None])
    values = 0.3 + left + floor * MULTIPLIERS[:, None, None] * (1 - left)
    return values * (1 + 0.002 * rng.normal(size=(len(MULTIPLIERS), 1, seeds)))


def frame_of(powers: dict[str, float], *, floor: float = 0.0) -> pd.DataFrame:
    rows = []
    for optimizer, power in powers.items():
        for metric in ("loss", "test_loss"):
            for runner, seeds in (("training", 4), ("moments", 1)):
                values = losses(power, floor=floor, seeds=seeds)
                for i, z in enumerate(MULTIPLIERS):
                    for j, step in enumerate(STEPS):
                        for seed in range(seeds):
                            rows.append(
                                ("logistic on imdb", optimizer, metric, runner, z, 3 / z, 2 / z, seed, int(step),
                                 values[i, j, seed])
                            )  # fmt: skip
    columns = ["problem", "optimizer", "metric", "runner", "noise_multiplier", "epsilon", "nominal_epsilon", "seed"]
    return pd.DataFrame(rows, columns=pd.Index([*columns, "step", "loss"]))


@pytest.mark.parametrize("power", [0.0, -0.5, -1.0])
def test_the_slope_of_the_rates_is_found_and_a_wrong_one_rejected(power):
    found, used = rate_slope(MULTIPLIERS, STEPS, losses(power))
    assert len(used) == 6
    assert found.value == pytest.approx(power, abs=0.03)
    assert not found.contains(power + 0.3) and not found.contains(power - 0.3)


def test_a_floor_that_grows_with_the_noise_slows_the_fall():
    found, _ = rate_slope(MULTIPLIERS, STEPS, losses(0.0, floor=0.1))
    assert found.value < -0.1  # the drift is the same: what is measured is the loss


def test_curves_that_rise_or_diverge_have_no_rate():
    values = losses(0.0).mean(axis=2)
    values[4] = np.linspace(1.3, 2.0, len(STEPS))
    values[5, -1] = np.inf
    found = rates(STEPS, values)
    assert np.isnan(found[4:]).all() and (found[:4] > 0).all()
    assert np.isnan(rates(STEPS, values[5:])).all()


def test_claims_are_decided_both_ways():
    good = fig_speed.claims(frame_of(POWERS))
    assert len(good) == 6 and all(claim.holds for claim in good)
    assert {claim.source.split("Fig. ")[1] for claim in good} == {"speed", "speed_test_loss"}
    assert all("over z = 0.8 to 6" in claim.forecast for claim in good)
    bad = fig_speed.claims(frame_of({"DP-SGD": -1.0, "DP-SignSGD": 0.0, "DP-Adam": -0.5}))
    assert not any(claim.holds for claim in bad)
    assert "a factor of 7.5" in bad[0].corrected and "grows with z^2" in bad[0].corrected


def test_a_claim_about_nothing_that_falls_does_not_hold():
    frame = frame_of(POWERS)
    frame["loss"] = 1.3 + 1e-5 * frame["step"]
    for claim in fig_speed.claims(frame):
        assert (claim.value, claim.low, claim.high, claim.verdict) == (0, 0, 0, "no")
        assert "of 6 noise multipliers" in claim.measure and "loss falls at none of these" in claim.corrected


def test_a_fall_at_two_multipliers_alone_has_no_power_and_is_not_drawn():
    frame = frame_of(POWERS)
    rises = frame["noise_multiplier"] > 1.1
    frame.loc[rises, "loss"] = 1.3 + 1e-5 * frame.loc[rises, "step"]
    for claim in fig_speed.claims(frame):
        assert (claim.value, claim.verdict, claim.wanted) == (2, "no", ">= 3, for a slope")
        assert "falls only at z = 0.8 and 1: elsewhere" in claim.corrected
    rates_of = fig_speed.draw(frame).axes[3]
    assert all(line.get_color() == "black" for line in rates_of.get_lines())


def test_whether_it_falls_at_a_third_multiplier_may_be_chance():
    """Half of the seeds fall there, half rise."""
    frame = frame_of(POWERS)
    rises = frame["noise_multiplier"] > 1.3
    rises |= (frame["noise_multiplier"] == 1.2) & (frame["seed"] < 2)
    frame.loc[rises, "loss"] = 1.3 + 1e-4 * frame.loc[rises, "step"]
    assert {claim.verdict for claim in fig_speed.claims(frame)} == {"open"}


@pytest.mark.parametrize("depth, falls", [(0.9e-3, False), (1.1e-3, True)])
def test_a_fall_of_less_than_a_thousandth_is_none(depth, falls):
    values = np.tile(1.3 * (1 - depth * (1 - np.exp(-1e-3 * STEPS))), (len(MULTIPLIERS), 1))
    assert np.isfinite(rates(STEPS, values)).all() == falls


@pytest.mark.parametrize("task, seeds, last", [(IMDB, 10, 6), (MOVIELENS_PAPER_LIKE, 10, 1)])
def test_paper_scale_asks_for_six_multipliers(task, seeds, last):
    (question,) = fig_speed._questions(replace(task, load=toy_problem), None)
    assert len(question.scenarios) == 3 * 6 and len(question.insecure_seeds or ()) == seeds
    assert max(s.mechanism.noise_multiplier for s in question.scenarios) == last
    assert question.record_at[0] == 0 and question.record_at[-1] == question.scenarios[0].num_steps


@pytest.mark.parametrize("task, is_shared", [(MOVIELENS_PAPER_LIKE, True), (IMDB, False)])
def test_runs_that_fig_floors_has_made_are_its_own(task, is_shared):
    """All of them, where its multipliers are among those: then one figure's runs do for both."""
    task = replace(task, load=lru_cache(toy_problem))
    mine, others = (cells_of(figure(task, None)) for figure in (fig_speed._questions, fig_floors._task_questions))
    assert mine <= others if is_shared else not mine & others


def test_the_picture_shows_each_optimizers_paths_and_the_rates():
    figure = fig_speed.draw(frame_of(POWERS))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles.count("DP-SGD") == 2 and titles.count("early rate / that at the least z") == 2
    assert {axes.get_ylabel() for axes in figure.axes} >= {"logistic on imdb\ntraining loss"}
    assert "95 %" in figure.legends[0].get_title().get_text()


def test_the_frame_has_the_looks_of_this_figure_alone():
    """Runs that fig-floors has made look more often."""
    task = replace(MOVIELENS_PAPER_LIKE, load=lru_cache(toy_problem), epochs=60, num_seeds=2, forecast=None)
    (question,) = fig_speed._questions(task, None)
    table = answer(
        question.scenarios,
        runners=question.runners,
        insecure_seeds=question.insecure_seeds,
        record_at=question.record_at,
    )
    num_steps = question.scenarios[0].num_steps
    assert late(num_steps) in set(table["step"]) - set(times(num_steps))
    frame = fig_speed.data(table)
    assert set(frame["step"]) == set(times(num_steps)) and len(frame) == 3 * 6 * 2 * 2 * len(times(num_steps))
    assert fig_speed.claims(frame)
