"""The commands as a person meets them: what they print, write and refuse."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from cli_inputs import ACCOUNT, SCENARIO, TRAIN, with_option

from noisecast import sweeps
from noisecast.cli import COMMANDS, _plain_warnings, app, main
from noisecast.problems.datasets.archives import IMDB_SOURCE, MOVIELENS_SOURCE

ROOT = Path(__file__).parents[2]

# --- account ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise_multiplier, epsilon, error", [(1, 2.79, 0.02), (0.5, 21.4, 0.2), (12, 0.133, 0.002)])
def test_account_gives_the_known_epsilon(capsys, noise_multiplier, epsilon, error):
    assert main([*ACCOUNT, "--noise-multiplier", str(noise_multiplier), "--json"]) == 0
    spent = json.loads(capsys.readouterr().out)
    assert spent["epsilon"] == pytest.approx(epsilon, abs=error)
    assert spent["nominal_epsilon"] == pytest.approx(1.715 / noise_multiplier, rel=1e-3)
    assert spent["accountant"] == "PLD" and spent["adjacency"] == "add_or_remove_one"
    assert spent["warnings"] == []


def test_account_finds_the_noise_of_a_target(capsys):
    assert main([*ACCOUNT, "--target-epsilon", "1", "--json"]) == 0
    spent = json.loads(capsys.readouterr().out)
    assert spent["noise_multiplier"] == pytest.approx(2.02, abs=0.01)
    assert spent["epsilon"] <= 1


def test_account_says_in_words_what_it_says_in_json(capsys):
    assert main([*ACCOUNT, "--noise-multiplier", "1"]) == 0
    printed = capsys.readouterr().out
    for words in ("2.79", "1.715", "not a guarantee", "add-or-remove-one", "RDP", "Poisson"):
        assert words in printed


def test_account_of_no_noise_is_strict_json(capsys):
    assert main([*ACCOUNT, "--noise-multiplier", "0", "--json"]) == 0
    spent = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    assert spent["epsilon"] == "inf" and float(spent["epsilon"]) == float("inf")
    assert spent["nominal_epsilon"] is None and spent["note"]


@pytest.mark.parametrize(
    "extra, expected",
    [
        (["--sampler", "shuffled"], {"sampler": "shuffled", "adjacency": "add_or_remove_one"}),
        (["--sampler", "fixed-size"], {"sampler": "fixed-size", "adjacency": "replace_one"}),
        (["--adjacency", "replace-one"], {"sampler": "poisson", "adjacency": "replace_one"}),
    ],
)
def test_account_of_other_samplers(capsys, extra, expected):
    small = ["account", "--num-examples", "1000", "--batch-size", "50", "--epochs", "5", "--target-delta", "1e-4"]
    assert main([*small, "--noise-multiplier", "2", *extra, "--json"]) == 0
    spent = json.loads(capsys.readouterr().out)
    assert expected.items() <= spent.items()
    assert spent["num_steps"] == 100


def test_account_of_a_sampling_probability(capsys):
    options = ["--sampling-probability", "0.00256", "--num-steps", "39000", "--target-delta", "1e-5"]
    assert main(["account", *options, "--noise-multiplier", "1", "--json"]) == 0
    spent = json.loads(capsys.readouterr().out)
    assert spent["epsilon"] == pytest.approx(2.79, abs=0.02)
    assert spent["num_examples"] is None and spent["expected_batch_size"] is None


def test_without_noise_nothing_is_said_to_have_accounted_for_it(capsys):
    assert main([*ACCOUNT, "--noise-multiplier", "0"]) == 0
    printed = capsys.readouterr().out
    assert "inf   at delta 1e-05" in printed and "none" not in printed and "no guarantee" in " ".join(printed.split())


def test_a_large_delta_is_warned_of(capsys):
    assert main([*with_option(ACCOUNT, "--target-delta", "1e-3"), "--noise-multiplier", "1"]) == 0
    assert "Warning: Expected target_delta < 1 / num_examples" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [*ACCOUNT, "--noise-multiplier", "12"], ["acount"]])
def test_light_commands_import_nothing_heavy(arguments):
    code = (
        "import sys; from noisecast.cli import main; main(sys.argv[1:]);"
        "print([m for m in ('jax', 'numba', 'matplotlib', 'sklearn', 'pandas') if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert result.stderr.splitlines()[-1] == "[]"


def test_what_only_pictures_need_waits_for_one():
    """Two of the six seconds that a table took to begin."""
    names = ", ".join(f"noisecast.cli.{name}" for name in ("answer", "forecast", "accuracy", "protocol", "demo"))
    code = f"import sys, {names}; print([m for m in ('matplotlib', 'scipy.stats') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    assert main([command, "--help"]) == 0
    assert "Usage: noisecast " + command in capsys.readouterr().out


def test_a_commands_own_help_is_its_whole_docstring_and_the_list_has_a_line_of_it(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert main(["predict", "--help"]) == 0
    assert "A multi-label model gives every label" in " ".join(capsys.readouterr().out.split())
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == listed and "likeliest label" not in listed


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_in_examples_that_can_be_typed(capsys, command):
    assert main([command, "--help"]) == 0
    printed = capsys.readouterr().out
    examples = printed.split("Examples:\n")[1]
    assert all(len(line) <= 80 and line.startswith("  ") for line in examples.splitlines())
    typed = [shlex.split(part) for part in re.split(r"^  noisecast ", examples.replace("\\\n", " "), flags=re.M)[1:]]
    assert typed
    for tokens in typed:
        assert tokens[0] == command
        tokens = tokens[: tokens.index("#")] if "#" in tokens else tokens
        app.parse_args(tokens)  # raises where an option is unknown, or one that is needed is missing
        files = [token for token in tokens if token.startswith("examples/")]
        assert all((ROOT / name).is_file() for name in files)
    assert main(["--help"]) == 0
    assert "Examples:" not in capsys.readouterr().out


def test_version(capsys):
    import noisecast

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == noisecast.__version__


# --- train, predict --------------------------------------------------------------------------------------------------


def test_a_trained_model_predicts(folder, capsys):
    assert main([*TRAIN, "--test-fraction", "0.2"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    train, test = map(int, re.search(r"(\d+) for training, (\d+) for testing", printed.out).groups())
    assert train + test == 300 and 30 < test < 90  # about a fifth: each row's place is decided by its content
    for words in (
        "not tuned",
        "non_private",
        "test accuracy",
        "differential privacy",
    ):
        assert words in " ".join(printed.out.split())
    assert sorted(path.name for path in folder.iterdir()) == ["bounds.toml", "data.csv", "model"]

    assert main(["predict", "model", "data.csv", "--label", "answer", "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert len(predicted["predictions"]) == 300 and predicted["non_private_metrics"]["accuracy"] > 0.7
    assert {row["label"] for row in predicted["predictions"]} == {"yes", "no"}
    assert all(0.5 <= row["probability"] <= 1 for row in predicted["predictions"])

    assert main(["predict", "model", "data.csv", "--output", "labels.csv"]) == 0
    assert (folder / "labels.csv").read_text(encoding="utf-8").startswith("label,probability\n")
    assert capsys.readouterr().out == ""
    assert main(["predict", "model", "data.csv"]) == 0
    assert capsys.readouterr().out == (folder / "labels.csv").read_text(encoding="utf-8")


def test_columns_of_categories_are_learnt_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    cities = rng.choice(["Oslo", "Rome", "Bonn"], 600)
    lines = [f"{city},{rng.integers(100)},{'yes' if city == 'Rome' else 'no'}" for city in cities]
    Path("data.csv").write_text("\n".join(["city,age,label", *lines]))
    Path("public.toml").write_text('city = ["Oslo", "Rome", "*"]\nage = [0, 100]\n')
    arguments = ["train", "data.csv", "--bounds", "public.toml", "--batch-size", "60", "--num-steps", "300"]
    assert main([*arguments, "--target-epsilon", "8", "--test-fraction", "0.3", "--output", "model"]) == 0
    Path("new.csv").write_text("age,city\n20,Paris\n20,Rome\n")
    capsys.readouterr()
    assert main(["predict", "model", "new.csv", "--json"]) == 0
    told = capsys.readouterr()
    assert [row["label"] for row in json.loads(told.out)["predictions"]] == ["no", "yes"]
    assert "Warning" not in told.err  # half of the rows may be of another city

    Path("new.csv").write_text("age,city\n20,ROME\n20,rome\n")
    assert main(["predict", "model", "new.csv"]) == 0
    assert "Warning: 2 of 2 rows have none of the values listed for column 'city'" in capsys.readouterr().err


def test_rows_of_none_of_the_listed_values_are_doubted_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text("city,label\n" + "Oslo,no\nRome,yes\n" * 50)
    Path("public.toml").write_text('city = ["oslo", "rome", "*"]\n')
    arguments = ["train", "data.csv", "--bounds", "public.toml", "--batch-size", "10", "--num-steps", "3"]
    assert main([*arguments, "--target-epsilon", "8", "--output", "model", "--json"]) == 0
    [warning] = json.loads(capsys.readouterr().out)["non_private_warnings"]
    assert warning.startswith("100 of 100 rows have none of the values listed for column 'city'")


@pytest.mark.parametrize("declared, warns", [(400, False), (500, True), (100, True), (100_000, True)])
def test_a_declared_number_far_from_the_files_is_warned_of(folder, capsys, declared, warns):
    """The batches of 300 rows are not those whose size the sums are divided by."""
    arguments = with_option(with_option(TRAIN, "--num-steps", "2"), "--num-examples", str(declared))
    assert main(arguments) == 0
    expected = 32 * 300 / declared
    assert (f"batches hold {expected:.2g} examples on average" in capsys.readouterr().err) == warns


@pytest.mark.parametrize("optimizer", ["dp-sign-sgd", "dp-adam"])
def test_train_prints_json(folder, capsys, optimizer):
    arguments = with_option(with_option(TRAIN, "--optimizer", optimizer), "--noise-multiplier")
    assert main([*arguments, "--target-epsilon", "4", "--learning-rate", "0.05", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["learning_rate"] == 0.05 and result["learning_rate_origin"] == "as given"
    assert result["privacy"]["epsilon"] == pytest.approx(4, rel=0.01) and result["privacy"]["epsilon"] <= 4
    assert result["privacy"]["target_delta"] == 1e-5
    assert "The number of rows, 300, which was treated as public." in result["privacy"]["not_covered"]
    assert 0 < result["non_private_metrics"]["loss"] < 1


def test_results_stand_beside_those_of_no_model(folder, capsys):
    assert main([*TRAIN, "--json"]) == 0
    printed = capsys.readouterr()
    nothing = json.loads(printed.out)["non_private_metrics_of_no_model"]
    answers = pd.read_csv("data.csv")["answer"]
    assert nothing == {
        "loss": pytest.approx(math.log(2)),
        "accuracy": pytest.approx(answers.value_counts(normalize=True).max()),
    }
    assert "worse than it began" not in printed.err


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_model_that_noise_has_made_worse_says_so(folder, capsys, form):
    arguments = with_option(with_option(TRAIN, "--noise-multiplier", "50"), "--learning-rate")
    assert main([*arguments, "--learning-rate", "50", *form]) == 0
    said = capsys.readouterr().err
    assert "The model ended worse than it began (non_private): its training loss is" in said
    assert "and was 0.6931 at the start" in said


def test_a_private_vocabulary_is_confessed(folder, capsys):
    texts = "".join(f"{'good fine' if i % 2 else 'bad poor'} film {i % 7},{i % 2}\n" for i in range(80))
    (folder / "data.csv").write_text("text,answer\n" + texts, encoding="utf-8")
    arguments = [*with_option(TRAIN, "--bounds"), "--text", "text", "--num-examples", "80", "--json"]
    assert main(arguments) == 0
    not_covered = json.loads(capsys.readouterr().out)["privacy"]["not_covered"]
    assert "The vocabulary of 12 words was taken from the training text without noise." in not_covered
    assert not any("number of rows" in sentence for sentence in not_covered)


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_resumes_bit_for_bit(folder, capsys, monkeypatch, number, status):
    arguments = with_option(TRAIN, "--num-steps", "3000")
    assert main([*arguments, "--insecure-seed", "5"]) == 0
    assert "not of this run, whose seed is known" in " ".join(capsys.readouterr().out.split("Result")[0].split())
    whole = np.load(folder / "model" / "parameters.npz")["params"]

    from noisecast.cli import train as command

    run = command.run

    def run_with_ctrl_c(*args, watch, **kwargs):
        def press(moment):
            watch(moment)
            os.kill(os.getpid(), number)

        return run(*args, watch=press, **kwargs)

    again = with_option(arguments, "--output", "again")
    monkeypatch.setattr(command, "run", run_with_ctrl_c)
    capsys.readouterr()
    assert main([*again, "--insecure-seed", "5"]) == status
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("Interrupted after ") and "--resume" in sentence
    assert (folder / "again.checkpoint").exists() and not (folder / "again").exists()

    monkeypatch.setattr(command, "run", run)
    assert main([*again, "--insecure-seed", "5"]) == 2  # the checkpoint is not thrown away by mistake
    assert "--resume" in capsys.readouterr().err
    assert main([*with_option(again, "--batch-size", "16"), "--resume"]) == 2
    assert "checkpoint of another scenario" in capsys.readouterr().err
    assert main([*again, "--resume"]) == 0
    beforehand, result = " ".join(capsys.readouterr().out.split()).split("Result")
    assert "not of this run, whose seed is known" in beforehand and "NOT private" in result
    np.testing.assert_array_equal(np.load(folder / "again" / "parameters.npz")["params"], whole)
    assert not (folder / "again.checkpoint").exists()


# --- answer, datasets ------------------------------------------------------------------------------------------------


def test_answer_prints_and_writes_what_the_runners_say(folder, capsys):
    (folder / "scenario.toml").write_text(SCENARIO, encoding="utf-8")
    assert main(["answer", "scenario.toml", "--output", "rows.parquet", "--figure", "picture.png"]) == 0
    printed = capsys.readouterr().out
    for words in ("training", "sde", "closed form", "rate", "over 3 seeds", "non_private", "rows.parquet"):
        assert words in printed
    from noisecast.table import read_table

    table = read_table(folder / "rows.parquet")
    assert table["scenario"].nunique() == 4 and set(table["runner"]) == {"training", "sde", "closed_form"}
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_on_a_narrow_screen_no_setting_is_cut(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    many = SCENARIO.replace("num_steps = 50", 'num_steps = 50\nrunners = ["training", "sde", "closed_form", "moments"]')
    (folder / "scenario.toml").write_text(many.replace("batch_size", "l2_clip_norm = [0.25, 0.5]\nbatch_size"))
    assert main(["answer", "scenario.toml"]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed and max(map(len, printed.splitlines())) <= 80
    assert printed.count("0.25") == 4 and printed.count("%") > 8


def test_answer_prints_json(folder, capsys):
    text = SCENARIO.replace("[0.5, 2.0]", "0").replace("num_seeds = 3", "num_seeds = 1")
    (folder / "scenario.toml").write_text("runners = ['training', 'closed_form']\n" + text, encoding="utf-8")
    assert main(["answer", "scenario.toml", "--json"]) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert len(answer["loss"]) == 4 and {row["epsilon"] for row in answer["loss"]} == {"inf"}
    assert "Without noise" in printed.err


def test_a_refusal_is_printed(folder, capsys):
    text = SCENARIO.replace('"quadratic"', '"quartic"\nquartic_weight = 0.5')
    (folder / "scenario.toml").write_text(text, encoding="utf-8")
    assert main(["answer", "scenario.toml"]) == 0
    assert "Left out: closed_form cannot answer a quartic" in " ".join(capsys.readouterr().out.split())


def test_no_address_of_data_is_cut_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["datasets"]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert all(f"{address}\n" in printed.replace(" ", "") for address in (IMDB_SOURCE, MOVIELENS_SOURCE))


def test_datasets_lists_what_can_be_read(capsys):
    assert main(["datasets"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("digits", "imdb", "NOISECAST_DATA", ".parquet"))
    assert main(["datasets", "--json"]) == 0
    assert "digits" in {entry["name"] for entry in json.loads(capsys.readouterr().out)["datasets"]}


@pytest.mark.slow
def test_the_demo_is_sensible(tmp_path, capsys):
    assert main(["demo", "--output", str(tmp_path / "demo"), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert len(results) == 15
    for result in results:
        if result["epsilon"] > 4:
            assert result["non_private_test_accuracy"]["training"]["mean"] > 0.8
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["digits.parquet", "digits.png"]


def test_a_missing_extra_is_a_sentence():
    code = "import sys; sys.modules['jax'] = None; from noisecast.cli import main; sys.exit(main(['demo']))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "This command needs jax; run pip install 'noisecast[train]'.\n"


def test_our_warnings_are_a_sentence_and_a_librarys_say_where_they_come_from():
    usual = warnings.formatwarning
    with _plain_warnings():
        ours = warnings.formatwarning("one was killed", RuntimeWarning, sweeps.__file__, 3)
        theirs = warnings.formatwarning("old", FutureWarning, "/lib/pandas/frame.py", 7)
    assert ours == "Warning: one was killed\n"
    assert "/lib/pandas/frame.py:7: FutureWarning: old" in theirs
    assert warnings.formatwarning is usual
