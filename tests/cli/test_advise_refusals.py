"""`noisecast advise`: options that would be ignored, and probes that one record could upset, are refused."""

import json
import re
from pathlib import Path

import pytest

from noisecast.cli import main
from noisecast.ledger import PrivacyLedger
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import Poisson
from noisecast.scenario_file import read_scenario_file

SCENARIO = """
num_steps = 20
target_delta = 1e-4
[problem]
kind = "file"
path = "rows.csv"
text = "text"
{more}
[mechanism]
noise_multiplier = 2.0
l2_clip_norm = 0.5
batch_size = 8
[[optimizer]]
name = "dp-sgd"
learning_rate = 1.0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{'good fine' if i % 2 else 'bad dull'} film,{'pos' if i % 2 else 'neg'}" for i in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    (tmp_path / "words.txt").write_text("good\nbad\nfilm\n")
    (tmp_path / "labels.txt").write_text("neg\npos\n")
    return tmp_path


def ask(folder, more, *options, epsilon="2"):
    (folder / "asked.toml").write_text(SCENARIO.format(more=more))
    return main(["advise", "asked.toml", "--epsilon", epsilon, *options])


@pytest.mark.parametrize(
    "more, missing",
    [
        ("", "a public label_names and a public vocabulary"),
        ('label_names = "labels.txt"', "a public vocabulary"),
        ('vocabulary = "words.txt"', "a public label_names"),
    ],
)
def test_a_probe_of_a_file_needs_public_labels_and_words(folder, capsys, more, missing):
    """A record with a new label would make another model of all records, and move every count."""
    assert ask(folder, more, "--private-probe", "0.5") == 2
    printed = capsys.readouterr()
    assert f"Expected {missing} in [problem]" in printed.err and printed.out == ""


def test_a_problem_in_double_brackets_is_looked_at_too(folder, capsys, monkeypatch):
    monkeypatch.setitem(globals(), "SCENARIO", SCENARIO.replace("[problem]", "[[problem]]"))
    assert ask(folder, 'vocabulary = "words.txt"', "--private-probe", "0.5") == 2
    assert "Expected a public label_names in [[problem]] for a private probe" in capsys.readouterr().err


@pytest.mark.parametrize("epsilon, is_drowned", [pytest.param("1.5", False, marks=pytest.mark.slow), ("0.5", True)])
def test_with_them_it_says_what_is_not_covered_and_whether_noise_is_all_there_is(folder, capsys, epsilon, is_drowned):
    assert ask(folder, 'label_names = "labels.txt"\nvocabulary = "words.txt"', "--private-probe", epsilon) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Not covered: the number of records" in said and ("tell next to nothing" in said) == is_drowned


PUBLIC_SHAPE = 'label_names = "labels.txt"\nvocabulary = "words.txt"'
IN_LEDGER = ["--private-probe", "0.5", "--ledger", "l", "--dataset", "films"]


@pytest.fixture
def ledger(folder):
    assert main(["ledger", "budget", "l", "films", "--epsilon", "0.8", "--delta", "1e-4"]) == 0
    return PrivacyLedger(folder / "l")


def test_a_probe_is_written_down_before_it_answers(folder, ledger, capsys, monkeypatch):
    """Killed in the middle of the answer, it is spent."""
    seen = []

    def shown(*_):
        seen.append(len(ledger.entries("films")))
        raise KeyboardInterrupt

    monkeypatch.setattr("noisecast.cli.advise_probe._print_probe", shown)
    capsys.readouterr()
    assert ask(folder, PUBLIC_SHAPE, *IN_LEDGER) == 130
    assert seen == [1] and capsys.readouterr().out == ""
    [entry] = ledger.entries("films")
    assert entry.num_steps == 1 and entry.mechanism.sampling_probability == 1 and "probe" in entry.what
    assert 0.49 < ledger.spent("films").epsilon <= 0.5


def test_what_the_ledger_will_count_stands_beside_what_was_planned(folder, ledger, capsys):
    """A plan adds up by loss distributions, the ledger by Renyi divergences: it may refuse who follows the advice."""
    capsys.readouterr()
    assert ask(folder, PUBLIC_SHAPE, *IN_LEDGER, "--json") == 0
    [left] = json.loads(capsys.readouterr().out)["left"]
    [scenario] = read_scenario_file(folder / "asked.toml").scenarios
    training = scenario.mechanism.with_noise_multiplier(left["noise_multiplier"])
    assert left["spent_in_ledger"] == ledger.spent_with("films", training, 20).epsilon
    assert left["target_epsilon"] == 2 < left["spent_in_ledger"] < 3.4 and len(ledger.entries("films")) == 1
    assert main(["ledger", "budget", "l", "films", "--epsilon", "2", "--delta", "1e-4"]) == 0
    capsys.readouterr()
    assert ask(folder, PUBLIC_SHAPE, *IN_LEDGER) == 0
    told = capsys.readouterr().out
    spent = ledger.spent_with("films", training, 20).epsilon
    assert "in the ledger" in told and spent > left["spent_in_ledger"] and re.search(r"3\.\d+, refused", told)


@pytest.mark.parametrize("budget, is_begun", [(3, False), (5, True)])
def test_from_which_noise_on_the_ledger_allows_the_training_is_said(folder, capsys, budget, is_begun):
    """As the ledger itself decides then: with a hair less it would refuse. Of a new ledger, and of one with a run."""
    assert main(["ledger", "budget", "l", "films", "--epsilon", str(budget), "--delta", "1e-4"]) == 0
    ledger = PrivacyLedger(folder / "l")
    if is_begun:
        sampler = Poisson.for_batch_size(8, 400)
        before = SampledGaussian(noise_multiplier=2.0, l2_clip_norm=0.5, sampler=sampler)
        ledger.spend("films", before, 20, what="a model", run="before")
    capsys.readouterr()
    assert ask(folder, PUBLIC_SHAPE, *IN_LEDGER, "--json") == 0
    least = json.loads(capsys.readouterr().out)["least_noise_multiplier_in_ledger"]
    [scenario] = read_scenario_file(folder / "asked.toml").scenarios
    for noise_multiplier, fits in ((least, True), (0.998 * least, False)):
        spent = ledger.spent_with("films", scenario.mechanism.with_noise_multiplier(noise_multiplier), 20).epsilon
        assert (spent <= budget) == fits, (noise_multiplier, spent)


def test_a_probe_that_leaves_no_room_for_a_training_is_not_paid(folder, capsys):
    assert main(["ledger", "budget", "l", "films", "--epsilon", "0.51", "--delta", "1e-4"]) == 0
    capsys.readouterr()
    assert ask(folder, PUBLIC_SHAPE, *IN_LEDGER) == 2
    printed = capsys.readouterr()
    assert "room for the training after the probe" in printed.err and "ε = 0.51" in printed.err
    assert printed.out == "" and PrivacyLedger(folder / "l").entries("films") == ()


def test_each_probe_costs_again_until_the_budget_refuses(folder, ledger, capsys):
    assert main(["ledger", "budget", "l", "films", "--epsilon", "0.9", "--delta", "1e-4"]) == 0
    assert ask(folder, PUBLIC_SHAPE, *IN_LEDGER) == 0
    capsys.readouterr()
    assert ask(folder, PUBLIC_SHAPE, *IN_LEDGER, "--json") == 0  # two of 0.5, of which the whole is not 1
    assert 0.7 < ledger.spent("films").epsilon <= 0.9
    capsys.readouterr()
    assert ask(folder, PUBLIC_SHAPE, *IN_LEDGER) == 2
    printed = capsys.readouterr()
    assert "room for the training after the probe" in printed.err and printed.out == ""
    assert len(ledger.entries("films")) == 2


def test_a_probe_that_is_wrong_otherwise_spends_nothing(folder, ledger, capsys):
    assert ask(folder, PUBLIC_SHAPE, *IN_LEDGER[2:], "--private-probe", "3") == 2
    assert ask(folder, "", *IN_LEDGER) == 2
    assert ask(folder, PUBLIC_SHAPE, *IN_LEDGER, epsilon="1e10") == 2  # no noise is as little as that
    assert ledger.entries("films") == ()
    assert ask(folder, PUBLIC_SHAPE, "--private-probe", "0.5", "--ledger", "l") == 2
    assert ask(folder, PUBLIC_SHAPE, "--private-probe", "0.5", "--ledger", "l", "--dataset", "books") == 2
    said = capsys.readouterr().err.splitlines()
    assert "Expected --ledger and --dataset, or neither" in said[-2] and "got 'books'" in said[-1]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (
            ["--numbers", "forecast.toml"],
            "forecast.toml is a scenario file, not a file of numbers; ask `noisecast advise",
        ),
        (
            ["advise_numbers.toml", "--epsilon", "1"],
            "is a file of numbers, not of scenarios; ask `noisecast advise --num",
        ),
    ],
)
def test_the_other_kind_of_file_is_one_sentence(capsys, arguments, sentence):
    examples = Path(__file__).parents[2] / "examples"
    assert main(["advise", *(str(examples / each) if each.endswith("toml") else each for each in arguments)]) == 2
    said = capsys.readouterr().err
    assert sentence in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["asked.toml", "--epsilon", "2", "--ledger", "l", "--dataset", "films"], "with --private-probe alone"),
        (["--numbers", "n.toml", "--ledger", "l", "--dataset", "films"], "Expected --numbers alone"),
        (["asked.toml", "--epsilon", "2", "--private-probe", "0.5", "--public"], "Expected --private-probe with"),
        (
            ["asked.toml", "--epsilon", "2", "--private-probe", "0.5", "--output", "o.parquet"],
            "Expected --private-probe",
        ),
        (["asked.toml", "--numbers", "n.toml"], "Expected --numbers alone"),
        (["--numbers", "n.toml", "--epsilon", "2"], "Expected --numbers alone"),
        (["--numbers", "n.toml", "--private-probe", "2"], "Expected --numbers alone"),
    ],
)
def test_what_would_be_ignored_is_refused(folder, capsys, arguments, sentence):
    assert main(["advise", *arguments]) == 2
    assert sentence in capsys.readouterr().err
