"""`noisecast advise` as a person meets it."""

import json
import sys
import types
from pathlib import Path

import pytest

from noisecast.cli import main
from noisecast.cli.advise import NON_PRIVATE, PUBLIC
from noisecast.runners import answer
from noisecast.scenario_file import read_scenario_file, read_sweep_file
from noisecast.table import read_table

TUNED = """
num_steps = 60
num_records = 2
[problem]
kind = "quadratic"
hessian_diag = [2.0, 1.0, 1.0, 0.5]
initial_params = 0.3
example_noise_std = 0.1
[mechanism]
noise_multiplier = 0.6
batch_size = 16
[[optimizer]]
name = "dp-sgd"
learning_rate = 0.05
[[optimizer]]
name = "dp-sign-sgd"
learning_rate = 0.01
[[optimizer]]
name = "dp-adam"
learning_rate = 0.01
"""
SECRET = TUNED.replace("num_steps = 60", "num_steps = 60\ntarget_delta = 1e-12")
DATA = """
num_steps = 40
target_delta = 1e-3
[problem]
kind = "file"
path = "data.csv"
bounds = "bounds.toml"
label = "answer"
test_fraction = 0.2
[mechanism]
target_epsilon = 4.0
l2_clip_norm = 0.5
batch_size = 32
sampler = "poisson"
[[optimizer]]
name = "dp-sgd"
learning_rate = 2.0
[[optimizer]]
name = "dp-sign-sgd"
learning_rate = 0.1
[[optimizer]]
name = "dp-adam"
learning_rate = 0.1
b1 = 0.5
"""


@pytest.fixture
def run(folder, capsys):
    def run(*arguments, text=TUNED, status=0):
        (folder / "tuned.toml").write_text(text, encoding="utf-8")
        assert main(["advise", *arguments]) == status
        printed = capsys.readouterr()
        if status:
            assert not printed.out and "Traceback" not in printed.err
            return printed.err.strip()
        return json.loads(printed.out) if "--json" in arguments else printed.out

    return run


def test_one_screen_says_all_of_it(folder, run):
    printed = run("tuned.toml", "--epsilon", "1,8", "--same-batches", "--output", "rows.parquet")
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 80
    words = " ".join(printed.split())
    for part in ("DP-SGD", "DP-SignSGD", "DP-Adam", "kept", "With the tuned settings kept", "With the settings above"):
        assert part in words
    assert "49 trained runs" in words and NON_PRIVATE in words and "ε = 8: " in words
    assert set(read_table(folder / "rows.parquet")["runner"]) == {"moments"}


def test_budgets_come_in_one_option_or_in_several(run):
    options = ["--same-batches", "--keep", "--json"]
    once = run("tuned.toml", "--epsilon", "1,8", *options)
    twice = run("tuned.toml", "--epsilon", "1", "--epsilon", "8", *options)
    assert once == twice and [each["target_epsilon"] for each in once["recommendations"]] == [1, 8]


def test_what_is_kept_is_kept(run):
    found = run("tuned.toml", "--epsilon", "0.5,8", "--keep", "--json")
    rates = {"DP-SGD": 0.05, "DP-SignSGD": 0.01, "DP-Adam": 0.01}
    for each in found["recommendations"]:
        use = each["use"]
        assert (use["how"], use["learning_rate"]) == ("kept", rates[use["optimizer"]])
        assert (use["expected_batch_size"], use["num_steps"], use["l2_clip_norm"]) == (16, 60, 1.0)
        assert use["epsilon"] <= each["target_epsilon"]
        assert use["value"] == min(one["value"] for one in each["by_optimizer"])
    assert found["thresholds"]["retuned"] == []


def test_public_examples_are_called_so_and_others_are_not(run):
    options = ["tuned.toml", "--epsilon", "1", "--keep"]
    private, public = run(*options, "--json"), run(*options, "--public", "--json")
    assert (private["privacy_of_this_advice"], public["privacy_of_this_advice"]) == (NON_PRIVATE, PUBLIC)
    said = " ".join(run(*options, "--public").split())
    assert PUBLIC in said and "Non-private" not in said and "these public examples add nothing" in said


@pytest.mark.slow
def test_a_folder_of_settings_asks_what_was_advised(folder, run):
    """The files are read by `answer` and `sweep`, from another folder, and are the very scenarios of the advice."""
    found = run("tuned.toml", "--epsilon", "1,4", "--settings", "advised", "--json", text=DATA)
    assert [Path(path).name for path in found["settings"]] == ["epsilon_1.toml", "epsilon_4.toml"]
    for each, path in zip(found["recommendations"], found["settings"], strict=True):
        question = read_scenario_file(path)
        (scenario,) = question.scenarios
        assert scenario.id == each["use"]["scenario"]
        assert scenario.privacy_spent.epsilon == each["use"]["epsilon"] <= each["target_epsilon"]
        assert read_sweep_file(path).questions[0].scenarios[0].id == scenario.id
    table = answer(question.scenarios, runners=question.runners, record_at=())
    last = table[(table["metric"] == "loss") & (table["runner"] == "moments")]["value"].iloc[-1]
    assert last == pytest.approx(found["recommendations"][-1]["use"]["value"])
    assert set(table["runner"]) == {"training", "moments"}


def test_settings_of_an_optimizer_survive(folder, run):
    """b1 is neither forgotten by the search nor by the file."""
    only_adam = DATA[: DATA.index("[[optimizer]]")] + DATA[DATA.rindex("[[optimizer]]") :]
    run("tuned.toml", "--epsilon", "2", "--keep", "--settings", "advised", text=only_adam)
    (scenario,) = read_scenario_file("advised/epsilon_2.toml").scenarios
    assert scenario.optimizer.b1 == 0.5


@pytest.mark.parametrize(
    "arguments, text, message",
    [
        (["nowhere.toml", "--epsilon", "1"], TUNED, "There is no scenario file nowhere.toml"),
        (["--epsilon", "1"], TUNED, "Expected a scenario file with the tuned settings"),
        (["tuned.toml"], TUNED, "Expected --epsilon with one or more budgets"),
        (["tuned.toml", "--epsilon", "1,0"], TUNED, "Expected --epsilon > 0 and finite, got 0"),
        (["tuned.toml", "--epsilon", "-1"], TUNED, "-1"),
        (["tuned.toml", "--epsilon", "nan"], TUNED, "Expected --epsilon > 0 and finite, got nan"),
        (["tuned.toml", "--epsilon", "1;2"], TUNED, "Expected --epsilon as numbers with commas"),
        (["tuned.toml", "--epsilon", "1e9"], TUNED, "Expected a target_epsilon that noise decides"),
        (["tuned.toml", "--epsilon", "1e-12"], SECRET, "Expected a target_epsilon within reach"),
        (["tuned.toml", "--epsilon", "1"], TUNED.replace("= 0.05", "= [0.05, 0.1]"), "got 2 of DP-SGD; keep one"),
        (["tuned.toml", "--epsilon", "1"], TUNED.replace('"dp-sgd"', '"dp-sdg"'), "(meant: 'dp-sgd'?)"),
        (["tuned.toml", "--epsilon", "1", "--settings", "tuned.toml"], TUNED, "Expected a folder for --settings"),
        (["tuned.toml", "--epsilon", "1", "--settings", "no/where"], TUNED, "Expected the folder"),
        (["tuned.toml", "--epsilon", "1", "--output", "rows.csv"], TUNED, "ends in .parquet"),
        (["tuned.toml", "--epsilon", "1", "--private-probe", "0"], TUNED, "Expected a finite --private-probe > 0"),
    ],
)
def test_bad_input_meets_one_sentence(run, arguments, text, message):
    assert message in run(*arguments, text=text, status=2)


def test_settings_written_before_are_not_written_over(folder, run):
    (folder / "advised").mkdir()
    (folder / "advised" / "epsilon_2.toml").write_text("mine")
    message = run("tuned.toml", "--epsilon", "1,2", "--settings", "advised", status=2)
    assert message == "advised/epsilon_2.toml is there already; give --settings another folder, or move it away."
    assert [path.name for path in (folder / "advised").iterdir()] == ["epsilon_2.toml"]


def test_a_problem_without_a_forecast_is_refused(run, monkeypatch):
    from noisecast.runners.moments import Moments

    monkeypatch.setattr(Moments, "why_unsupported", lambda self, scenario: "moments cannot answer this.")
    assert run("tuned.toml", "--epsilon", "1", status=2) == "moments cannot answer this."


def test_other_ways_to_ask_are_handed_on(folder, run, monkeypatch):
    called = []
    numbers = types.SimpleNamespace(advise_numbers=lambda path, json: called.append((path, json)))
    probe = types.SimpleNamespace(
        advise_probe=lambda *given: called.append(given), check_public_shape=lambda file: None
    )
    monkeypatch.setitem(sys.modules, "noisecast.cli.advise_numbers", numbers)
    monkeypatch.setitem(sys.modules, "noisecast.cli.advise_probe", probe)
    run("--numbers", "mine.toml")
    run("tuned.toml", "--epsilon", "1,2", "--private-probe", "0.1")
    assert called[0] == (Path("mine.toml"), False)
    scenarios, budgets, spent, as_json, account = called[1]
    assert [each.optimizer.name for each in scenarios] == ["DP-SGD", "DP-SignSGD", "DP-Adam"]
    assert (budgets, spent, as_json, account) == ([1.0, 2.0], 0.1, False, None)


def test_a_loss_of_exactly_0_is_shown():
    """Data that one column separates: whatever is divided by the loss is left out."""
    from types import SimpleNamespace

    from noisecast.cli.accuracy import _trained
    from noisecast.cli.advise import _banded

    for half in (0.0, 0.1):
        assert _banded(SimpleNamespace(outcome=SimpleNamespace(value=0.0, is_sound=True), half_width=half)).startswith(
            "0"
        )
    assert _trained({"num_diverged": 0, "trained_mean": 0.0, "trained_sem": 0.0, "num_seeds": 3}) == "0"
