"""`noisecast ledger` and `noisecast train --ledger` as a person meets them."""

import json

import pytest

from noisecast.cli import main

ROWS = "x,label\n" + "".join(f"{i % 7},{'ab'[i % 2]}\n" for i in range(40))
TRAIN = ["train", "rows.csv", "--batch-size", "8", "--noise-multiplier", "4", "--num-steps", "20"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text(ROWS)
    return tmp_path


def test_a_budget_is_set_spent_shown_and_then_refuses(folder, capsys):
    assert main(["ledger", "budget", "l", "rows", "--epsilon", "1.5", "--delta", "0.01"]) == 0
    assert main([*TRAIN, "--output", "one", "--ledger", "l", "--dataset", "rows"]) == 0
    capsys.readouterr()
    assert main(["ledger", "show", "l", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["rows"]
    assert 0 < shown["spent_epsilon"] <= 1.5 and len(shown["entries"]) == 1
    for number in range(20):
        status = main([*TRAIN, "--output", f"more{number}", "--ledger", "l", "--dataset", "rows"])
        if status:
            break
    assert status == 2 and "The budget of 'rows' is ε = 1.5" in capsys.readouterr().err
    assert not (folder / f"more{number}").exists()
    assert main(["ledger", "check", "l"]) == 0
    assert main(["ledger", "show", "l", "rows"]) == 0
    assert "Composed by RDP" in capsys.readouterr().out


def test_a_budget_as_json(folder, capsys):
    assert main(["ledger", "budget", "l", "rows", "--epsilon", "1.5", "--delta", "0.01", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ledger": "l", "dataset": "rows", "epsilon": 1.5, "delta": 0.01}


def test_what_is_shown_begins_with_the_budget_as_entry_1(folder, capsys):
    assert main(["ledger", "budget", "l", "rows", "--epsilon", "1.5", "--delta", "0.01"]) == 0
    assert main([*TRAIN, "--output", "one", "--ledger", "l", "--dataset", "rows"]) == 0
    assert main(["ledger", "budget", "l", "rows", "--epsilon", "2", "--delta", "0.01"]) == 0
    capsys.readouterr()
    assert main(["ledger", "show", "l"]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    told = [(line[0], " ".join(line[3:])) for line in words if line and line[0].isdigit()]
    assert [number for number, _ in told] == ["1", "2", "3"]
    assert [what for _, what in told[::2]] == ["budget at δ = 0.01 1.5", "budget at δ = 0.01 2"]
    assert told[1][1].startswith("DP-SGD on logistic") and float(told[1][1].split()[-1]) > 0
    assert main(["ledger", "show", "l", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["rows"]
    assert [(each["number"], each["epsilon"]) for each in shown["budgets"]] == [(1, 1.5), (3, 2.0)]
    assert [each["number"] for each in shown["entries"]] == [2]


def test_a_run_is_planned_at_the_ledgers_delta_unless_another_is_asked_for(folder, capsys):
    assert main(["ledger", "budget", "l", "rows", "--epsilon", "9", "--delta", "0.001"]) == 0
    for output, more, delta in (("one", [], 0.001), ("two", ["--target-delta", "0.02"], 0.02)):
        capsys.readouterr()
        assert main([*TRAIN, "--output", output, "--ledger", "l", "--dataset", "rows", *more, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["privacy"]["target_delta"] == delta


def test_a_known_seed_is_refused_before_the_file_is_read(folder, capsys):
    assert main(["ledger", "budget", "l", "rows", "--epsilon", "1.5", "--delta", "0.01"]) == 0
    (folder / "rows.csv").unlink()
    capsys.readouterr()
    arguments = [*TRAIN, "--output", "m", "--ledger", "l", "--dataset", "rows", "--insecure-seed", "1"]
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert "Expected --ledger or --insecure-seed, got both" in printed.err and printed.out == ""


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["ledger", "show", "l"], "Expected a ledger at l, found none"),
        (["ledger", "budget", "l", "rows"], "Expected a data set's name, --epsilon and --delta"),
        (["ledger", "budget", "l", "rows", "--epsilon", "-1", "--delta", "0.1"], "Expected 0 < epsilon"),
        (["ledger", "check", "l", "--epsilon", "1"], "Expected --epsilon and --delta with `ledger budget` alone"),
        (["ledger", "check", "l", "people"], "Expected `ledger check` of a whole file"),
        ([*TRAIN, "--output", "m", "--ledger", "l"], "Expected --ledger and --dataset, or neither"),
        ([*TRAIN, "--output", "m", "--ledger", "l", "--dataset", "rows"], "Expected a ledger at l, found none"),
        (["ledger", "show", "rows.csv"], "rows.csv is not a ledger"),
        (["ledger", "budget", "no/l", "rows", "--epsilon", "1", "--delta", "0.1"], "no to exist, so that l can be"),
    ],
)
def test_bad_input_is_one_sentence(folder, capsys, arguments, sentence):
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and len(printed.splitlines()) == 1
    assert not (folder / "m").exists()
