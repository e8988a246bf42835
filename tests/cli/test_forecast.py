"""`noisecast forecast` and `noisecast accuracy` as a person meets them."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from cli_inputs import SCENARIO

from noisecast.advice.prediction import Prediction
from noisecast.cli import main
from noisecast.cli.accuracy import _chances, what_may_be_chance
from noisecast.cli.accuracy import summary as summary_of
from noisecast.cli.forecast import NON_PRIVATE, loss_text
from noisecast.forecasting.outcome import BAND
from noisecast.privacy.noise import RandomRoot
from noisecast.runners import Moments, Training
from noisecast.scenario_file import read_scenario_file
from noisecast.table import read_table

TWO = SCENARIO.replace("[0.1, 0.05]", "0.1") + '[[optimizer]]\nname = "dp-sign-sgd"\nlearning_rate = 0.01\n'


@pytest.fixture
def run(folder, capsys):
    def run(*arguments, text=SCENARIO, status=0):
        (folder / "scenario.toml").write_text(text, encoding="utf-8")
        assert main([arguments[0], "scenario.toml", *arguments[1:]]) == status
        printed = capsys.readouterr()
        if status:
            assert not printed.out and "Traceback" not in printed.err
            return printed.err.strip()
        return json.loads(printed.out) if "--json" in arguments else " ".join(printed.out.split())

    return run


# --- forecast --------------------------------------------------------------------------------------------------------


def test_the_table_says_what_is_forecast(folder, run):
    printed = run("forecast", "--output", "rows.parquet", "--figure", "picture.png")
    for words in ("50 steps", "quadratic", "DP-SGD *", "nothing was trained", "lowest loss", "rows.parquet"):
        assert words in printed
    assert NON_PRIVATE in printed
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    table = read_table(folder / "rows.parquet")
    assert set(table["runner"]) == {"moments"} and len(set(table["step"])) == 21


IRIS = """
num_steps = 20
[problem]
kind = "bundled"
name = "iris"
[mechanism]
noise_multiplier = 1
batch_size = 12
[[optimizer]]
name = "dp-sgd"
learning_rate = 0.5
"""


def test_the_band_means_what_it_means_in_advice_and_the_caption_says_so(folder, run):
    """It was one standard deviation here and two in `advise`."""
    printed = run("forecast", text=IRIS)
    (scenario,) = read_scenario_file(folder / "scenario.toml").scenarios
    advised = Prediction.of(scenario, "kept", Moments().forecast(scenario, [20]), "loss")
    assert advised.half_width == pytest.approx(
        math.hypot(2 * advised.metrics["loss_std"], 0.03 * advised.metrics["loss"])
    )
    assert loss_text(advised.metrics["loss"], advised.half_width) in printed
    assert BAND in printed and "19 times out of 20" in BAND and "standard deviation of one run" not in printed


def test_the_numbers_are_the_runners(folder, run):
    found = run("forecast", "--json")
    assert found["non_private"] == NON_PRIVATE and found["refusals"] == [] and len(found["forecasts"]) == 4
    question = read_scenario_file(folder / "scenario.toml")
    for row, scenario in zip(found["forecasts"], question.scenarios, strict=True):
        forecast = Moments().forecast(scenario, question.record_at)
        assert row["non_private_metrics"]["loss"] == pytest.approx(forecast.metrics["loss"][-1])
        assert row["learning_rate"] == scenario.optimizer.learning_rate and row["status"] == "ok"
    for level in (0.5, 2.0):
        rows = [row for row in found["forecasts"] if row["noise_multiplier"] == level]
        best = min(rows, key=lambda row: row["non_private_metrics"]["loss"])
        assert [row["is_best"] for row in rows] == [row is best for row in rows]


def test_what_diverges_is_said_and_is_not_the_best(run):
    text = SCENARIO.replace("[0.1, 0.05]", "[1e30, 0.05]").replace("num_steps = 50", "num_steps = 5")
    rows = run("forecast", "--json", text=text)["forecasts"]
    assert [(row["status"], row["is_best"]) for row in rows] == [("diverged", False), ("ok", True)] * 2
    assert "diverged" in run("forecast", text=text)


def test_the_best_cell_is_asked_for(run):
    text = TWO.replace("[0.5, 2.0]", "1")
    found = run("forecast", "--best", "--json", text=text)
    assert [row["optimizer"] for row in found["forecasts"]] == ["DP-SGD", "DP-SignSGD"]
    given = run("forecast", "--json", text=text)["forecasts"]
    for best, other in zip(found["forecasts"], given, strict=True):
        assert best["non_private_metrics"]["loss"] <= other["non_private_metrics"]["loss"] * 1.001
    assert {cell["setting"] for cell in found["tried"]} == {"coarse", "full"}


def test_the_best_cell_is_printed(run):
    text = SCENARIO.replace("[0.5, 2.0]", "1").replace("num_steps = 50", "num_steps = 5")
    assert "Best learning rate and clip norm" in run("forecast", "--best", text=text)


def test_the_crossing_is_asked_for(run):
    text = TWO.replace("[0.5, 2.0]", "[0.02, 20]").replace("num_steps = 50", "num_steps = 300")
    (pair,) = run("forecast", "--crossing", "--json", text=text)["crossings"]
    assert pair["optimizers"] == ["DP-SGD", "DP-SignSGD"] and len(pair["crossings"]) == 1
    crossing = pair["crossings"][0]
    assert (crossing["better_below"], crossing["better_above"]) == ("DP-SGD", "DP-SignSGD")
    assert 0.02 < crossing["noise_multiplier"] < 20 and crossing["epsilon"] > 0
    assert pair["theorem"]["verdict"] in ("always", "above", "outside")
    printed = run("forecast", "--crossing", text=text)
    assert "DP-SGD is better below noise multiplier" in printed and "Theorem, of the losses after" in printed


def test_other_settings_of_the_solver(run):
    settings = ["--record", "2", "--time-steps", "5", "--subsample", "10", "--full-covariance-features", "5"]
    assert run("forecast", *settings, "--json")["forecasts"]


@pytest.mark.parametrize(
    "arguments, text, sentence",
    [
        (["--best", "--crossing"], SCENARIO, "Expected --best or --crossing, got both; ask twice."),
        (["--crossing", "--output", "a.parquet"], TWO, "Expected --crossing without --output"),
        (["--crossing"], SCENARIO, "Expected one learning rate and clip norm for DP-SGD with --crossing, got 2"),
        (["--crossing"], TWO.split('[[optimizer]]\nname = "dp-sign')[0], "Expected two or more optimizers"),
        (["--crossing"], TWO.replace("[0.5, 2.0]", "0"), "Expected noise multipliers > 0 with --crossing, got 0"),
        (["--record", "0"], SCENARIO, "Expected --record >= 1, got 0."),
        (["--subsample", "1"], SCENARIO, "Expected subsample to be a whole number >= 2, got 1."),
        (["--time-steps", "1.5"], SCENARIO, "Expected a whole number, got 1.5."),
        (
            ["--full-covariance-features", "-1"],
            SCENARIO,
            "Expected full_covariance_features to be a whole number >= 0",
        ),
        (["--output", "a.csv"], SCENARIO, "Expected a table that ends in .parquet, got a.csv."),
        ([], SCENARIO.replace("num_steps = 50", "num_steps = 0"), "Expected num_steps >= 1, got 0."),
    ],
)
def test_bad_requests_are_one_sentence(run, arguments, text, sentence):
    error = run("forecast", *arguments, text=text, status=2)
    assert sentence in error and len(error.splitlines()) <= 2  # the second: no noise has no guarantee


def test_a_problem_that_cannot_be_forecast_is_refused(run, monkeypatch):
    monkeypatch.setattr(Moments, "why_unsupported", lambda self, scenario: "moments cannot answer this.")
    for command in (["forecast"], ["forecast", "--best"], ["accuracy", "--seeds", "2"]):
        assert run(*command, status=2) == "moments cannot answer this."


def test_what_is_left_out_is_said(run, monkeypatch):
    def why(self, scenario):
        return "moments cannot answer DP-SignSGD." if scenario.optimizer.name == "DP-SignSGD" else None

    monkeypatch.setattr(Moments, "why_unsupported", why)
    assert "Left out: moments cannot answer DP-SignSGD." in run("forecast", text=TWO)
    assert run("forecast", "--json", text=TWO)["refusals"] == ["moments cannot answer DP-SignSGD."]


# --- accuracy --------------------------------------------------------------------------------------------------------


def test_accuracy_compares_forecast_and_training(folder, run):
    printed = run("accuracy", "--seeds", "6", "--output", "rows.parquet", "--figure", "picture.png")
    for words in ("Forecast against training", "mean of 6 seeds", "95th percentile", "Training here is for study"):
        assert words in printed
    assert "spend more than is accounted" in printed
    assert set(read_table(folder / "rows.parquet")["runner"]) == {"training", "moments"}
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_is_of_the_cells(run):
    text = SCENARIO.replace("num_seeds = 3", "insecure_seeds = [760001, 760002, 760003, 760004]")
    found = run("accuracy", "--json", text=text)
    errors = sorted(abs(cell["error"]) for cell in found["cells"])
    summary = found["summary"]["loss"]
    assert len(errors) == summary["num_cells"] == 4 and summary["num_left_out"] == 0
    assert summary["worst"] == pytest.approx(errors[-1])
    assert summary["median"] == pytest.approx((errors[1] + errors[2]) / 2)
    assert summary["within_5_percent"] == sum(error <= 0.05 for error in errors) / 4
    assert summary["num_beyond_two"] == sum(abs(cell["standard_errors"]) > 2 for cell in found["cells"])
    for cell in found["cells"]:
        assert cell["error"] == pytest.approx(cell["forecast"] / cell["trained_mean"] - 1)
    assert run("accuracy", "--json", text=text)["cells"] == found["cells"]  # insecure seeds repeat


def test_the_worst_of_the_others_leaves_out_what_is_called_extrapolated():
    cells = {"step": 9, "num_steps": 9, "trained_mean": 1.0, "trained_sem": 0.1, "trained_std": 0.2, "num_seeds": 16}
    frame = pd.DataFrame(
        [
            cells | {"error": error, "standard_errors": 0.0, "forecast_std": 0.2, "status": status}
            for error, status in ((0.3, "extrapolated"), (-0.02, "ok"), (0.01, "ok"))
        ]
    )
    found = summary_of(frame)
    assert (found["worst"], found["worst_of_others"], found["num_extrapolated"]) == (0.3, 0.02, 1)


def test_training_goes_on_until_the_mean_is_known(run, monkeypatch):
    """One root for all: by other dice a mean of four is not known to 0.9 of itself once in some hundred tests."""
    root = RandomRoot.from_insecure_seed(20261128)
    monkeypatch.setattr(RandomRoot, "from_os_entropy", lambda: root)
    asked = ("accuracy", "--json", "--seeds", "4", "--standard-error")
    enough, found = run(*asked, "0.9"), run(*asked, "0.005", "--most-seeds", "100")
    few, cells = {cell["num_seeds"] for cell in enough["cells"]}, found["cells"]
    lack = sum(cell["trained_sem"] > 0.005 * cell["trained_mean"] for cell in cells)
    assert enough["not_known"] is None and f"{lack} of {len(cells)} means are known less" in found["not_known"]
    assert few == {4} and {cell["num_seeds"] for cell in cells} <= {4, 8, 16, 32, 64, 100}
    assert max(cell["num_seeds"] for cell in cells) > 4
    for cell in cells:
        assert cell["num_seeds"] == 100 or cell["trained_sem"] <= 0.005 * cell["trained_mean"]


def test_an_interrupted_comparison_keeps_what_is_trained(run, monkeypatch, tmp_path):
    train, output = Training.answer, tmp_path / "rows.parquet"
    asked = ("accuracy", "--seeds", "5", "--standard-error", "0.001")
    left = []

    def interrupted(self, *args, **named):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return train(self, *args, **named)

    def trained() -> int:
        table = read_table(output)
        assert "moments" in set(table["runner"])
        return table[table["runner"] == "training"]["seed"].nunique()

    monkeypatch.setattr("noisecast.cli.trained.os.cpu_count", lambda: 2)
    monkeypatch.setattr(Training, "calls", lambda self, scenarios, repeats: [(scenarios, [each]) for each in repeats])
    monkeypatch.setattr(Training, "answer", interrupted)
    assert "nothing is kept without --output." in run(*asked, status=130)
    for parts, runs in enumerate((0, 3, 5, 8, 10)):  # two rounds: three and two each
        output.unlink(missing_ok=True)
        left.extend([1] * parts)
        said = run(*asked, "--output", str(output), status=130)
        assert f"Interrupted: {output} holds the forecast and {runs} training runs of each cell." in said
        assert trained() == runs


def test_a_cell_that_training_cannot_take_is_left_out(run):
    cells = run("accuracy", "--json", text=SCENARIO.replace("[0.1, 0.05]", "[0.1, 1e-40]"))
    assert len(cells["cells"]) == 2 and any("1e-40" in sentence for sentence in cells["refusals"])


def test_runs_that_diverge_are_counted(run):
    text = SCENARIO.replace("[0.1, 0.05]", "[1e30, 0.05]").replace("num_steps = 50", "num_steps = 5")
    summary = run("accuracy", "--json", text=text)["summary"]["loss"]
    assert (summary["num_cells"], summary["num_left_out"]) == (2, 2) and math.isfinite(summary["median"])
    assert "3/3 diverged" in run("accuracy", text=text)


@pytest.mark.parametrize("said, expected", [("", 8), ("num_seeds = 1\n", 8), ("num_seeds = 5\n", 5)])
def test_a_file_that_says_nothing_of_seeds_is_trained_with_several(run, said, expected):
    cells = run("accuracy", "--json", text=said + SCENARIO.replace("num_seeds = 3\n", ""))["cells"]
    assert {cell["num_seeds"] for cell in cells} == {expected}


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--seeds", "1"], "Expected two or more seeds, for a standard error, got 1; give --seeds."),
        (["--seeds", "3", "--standard-error", "0"], "Expected --standard-error between 0 and 1"),
        (["--seeds", "3", "--standard-error", "0.1", "--most-seeds", "2"], "Expected --most-seeds of at least the 3"),
        (["--seeds", "3", "--most-seeds", "9"], "Expected --standard-error with --most-seeds"),
        (["--seeds", "1.5"], "Expected a whole number, got 1.5."),
        (["--figure", "a.txt"], "Expected a figure that ends in"),
    ],
)
def test_bad_options_of_accuracy(run, arguments, sentence):
    assert sentence in run("accuracy", *arguments, status=2)


def test_answer_may_ask_for_the_forecast(run):
    found = run("answer", "--json", text='runners = ["moments", "closed_form"]\n' + SCENARIO)
    assert {row["runner"] for row in found["loss"]} == {"moments", "closed_form"}


def test_accuracy_says_which_errors_may_be_chance():
    found = {"num_cells": 18, "median": 0.004, "median_standard_error": 0.004}
    found |= {"chance_beyond_two": 0.046, "farthest": 2.9, "chance_of_farthest": 0.1}
    found |= {"std_known_to": 0.1, "median_error_of_std": 0.3}
    assert [s.split(",")[0] for s in what_may_be_chance(found | {"num_beyond_two": 4})] == [
        "4 of 18 cells lie beyond two standard errors",
        "Most other errors may be chance: give more --seeds to see smaller ones.",
    ]
    of_three_seeds = what_may_be_chance(found | {"num_beyond_two": 4, "chance_beyond_two": 0.18})
    assert of_three_seeds[0].startswith("Most of these errors may be chance")
    assert what_may_be_chance(found | {"num_beyond_two": 1})[0].startswith("Most of these errors may be chance")
    assert what_may_be_chance(found | {"num_beyond_two": 1, "median": 0.01}) == []
    far = found | {"num_beyond_two": 1, "farthest": 16.1, "chance_of_farthest": 1e-20}
    assert what_may_be_chance(far)[0] == "One cell lies 16 standard errors off, farther than chance takes any."
    assert what_may_be_chance({"num_cells": 0}) == []
    assert what_may_be_chance(found | {"num_beyond_two": 1, "median": 0.01, "median_error_of_std": 0.15}) == [
        "So many seeds know a standard deviation to 10% at best: most of its errors may be chance."
    ]


def test_errors_are_judged_by_their_seeds_and_by_how_many_cells_there_are():
    cells = pd.DataFrame({"standard_errors": [0.5, -6.0, 3.0], "num_seeds": [64, 3, 64]})
    found = _chances(cells)  # 6 standard errors of three seeds are less than 3 of 64
    assert found["farthest"] == 3.0
    assert found["chance_of_farthest"] == pytest.approx(3 * 2 * scipy.stats.t.sf(3.0, 63))
    assert found["chance_beyond_two"] == pytest.approx(2 * np.mean([scipy.stats.t.sf(2, n) for n in (63, 2, 63)]))
    assert _chances(cells[:0])["farthest"] is None
