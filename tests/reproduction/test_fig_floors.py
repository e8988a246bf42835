"""Slopes of the final loss: what is asked, how claims are decided, that the picture draws."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from synthetic import toy_problem

from noisecast.reproduction import fig_floors
from noisecast.reproduction.fits import only
from noisecast.reproduction.tasks import IMDB, IMDB_QUICK
from noisecast.runners import answer

POWERS = {"DP-SGD": 2.0, "DP-SignSGD": 1.0, "DP-Adam": 1.0}


def frame_of(powers: dict[str, float], *, panels=("logistic on imdb",), seeds: int = 4) -> pd.DataFrame:
    """A frame whose loss is 0.5 + 0.1 z^power (on quadratics without the 0.5), within 0.1 %."""
    rng = np.random.default_rng(0)
    rows = []
    for panel in panels:
        for optimizer, power in powers.items():
            for metric in ("loss", "test_loss"):
                for z in (0.5, 1.0, 2.0, 4.0, 8.0):
                    loss = (0.0 if panel.startswith("quadratic") else 0.5) + 0.1 * z**power
                    for seed in range(seeds):
                        value = loss * (1 + 0.001 * rng.normal())
                        rows.append((panel, optimizer, metric, "training", z, seed, 3 / z, 2 / z, value))
                    rows.append((panel, optimizer, metric, "moments", z, 0, 3 / z, 2 / z, loss))
    columns = [*fig_floors.KEYS, "seed", "epsilon", "nominal_epsilon", "loss"]
    return pd.DataFrame(rows, columns=pd.Index(columns)).assign(late_change=0.01, status="ok")


def test_paper_scale_asks_for_the_papers_runs():
    (question,) = fig_floors._task_questions(replace(IMDB, load=toy_problem), None)
    assert len(question.scenarios) == 3 * 8 and len(question.insecure_seeds or ()) == 10
    assert {s.mechanism.noise_multiplier for s in question.scenarios} == {0.5, 1, 2, 4, 6, 8, 10, 12}
    of_dp_sgd, others = fig_floors._task_questions(replace(IMDB_QUICK, load=toy_problem), None)
    assert {s.optimizer.name for s in of_dp_sgd.scenarios} == {"DP-SGD"} and len(of_dp_sgd.insecure_seeds or ()) == 12
    assert {s.optimizer.name for s in others.scenarios} == {"DP-SignSGD", "DP-Adam"}
    assert len(others.insecure_seeds or ()) == 5
    quadratic = fig_floors._quadratic_question("paper", 4)
    assert len(quadratic.scenarios) == 3 * 8 and quadratic.scenarios[0].num_steps == 50_000


def test_claims_hold_where_the_slopes_are_the_papers():
    claims = fig_floors.claims(frame_of(POWERS))
    assert len(claims) == 6 and all(claim.holds for claim in claims)
    for claim in claims:
        wanted = 2 if "DP-SGD" in claim.statement else 1
        assert claim.value == pytest.approx(wanted, abs=0.05) and claim.low <= claim.value <= claim.high
        assert claim.forecast == f"{wanted:.2f}" and claim.corrected == ""


def test_claims_fail_where_they_are_not_and_say_what_holds():
    claims = fig_floors.claims(frame_of({"DP-SGD": 3.0, "DP-SignSGD": 0.5, "DP-Adam": 2.0}))
    assert not any(claim.holds for claim in claims)
    assert claims[0].value == pytest.approx(3, abs=0.05)
    assert "Power" in claims[0].corrected and "+0%" in claims[0].corrected
    assert {claim.source.split("Fig. ")[1] for claim in claims} == {"nm_scaling", "nm_scaling_test"}


def test_multipliers_that_diverge_are_left_out_and_counted():
    frame = frame_of(POWERS)
    frame.loc[frame["noise_multiplier"] == 8, "loss"] = np.inf
    first = fig_floors.claims(frame)[0]
    assert first.holds and "z = 0.5 to 4" in first.measure and "1 of 5 left out" in first.measure
    frame.loc[frame["noise_multiplier"] > 1, "loss"] = np.nan
    assert not fig_floors.claims(frame)[0].holds


def test_the_frame_is_the_last_loss_and_its_late_change():
    task = replace(IMDB, load=toy_problem, epochs=8, num_seeds=2, floors=(0.5, 1.0), forecast=None)
    (question,) = fig_floors._task_questions(task, None)
    assert question.insecure_seeds is not None
    table = answer(
        question.scenarios,
        runners=question.runners,
        insecure_seeds=question.insecure_seeds,
        record_at=question.record_at,
    )
    frame = fig_floors.data(table)
    assert len(frame) == 3 * 2 * 2 * 2
    one = {"optimizer": "DP-SGD", "metric": "test_loss", "seed": 1, "noise_multiplier": 1.0}
    losses = only(table, **one).set_index("step")["value"]
    row = only(frame, **one).iloc[0]
    assert row["loss"] == losses[16] and row["late_change"] == pytest.approx(losses[16] - losses[12])
    assert fig_floors.draw(frame).axes


def test_the_picture_counts_seeds_that_differ():
    more = frame_of({"DP-SGD": 2.0}, seeds=8)
    title = fig_floors.draw(pd.concat([more, frame_of({"DP-Adam": 1.0}, seeds=3)])).legends[0].get_title().get_text()
    assert "over 8 and 3 seeds" in title


def test_the_picture_has_a_column_a_panel_and_says_what_it_shows():
    panels = ("quadratic (d = 1024), B = 4", "logistic on imdb")
    figure = fig_floors.draw(frame_of(POWERS, panels=panels))
    titles = [axes.get_title() for axes in figure.axes]
    assert "quadratic, B = 4" in titles and "logistic on imdb" in titles
    labels = {axes.get_xlabel() for axes in figure.axes}
    assert {"noise multiplier", "epsilon (accounted)"} <= labels
    assert any("power 2.0" in text.get_text() for axes in figure.axes for text in axes.texts)
    assert "non-private" in figure.legends[0].get_title().get_text()
