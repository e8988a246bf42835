"""Every bad input: exit status 2, one sentence on standard error, no traceback, nothing half-written."""

import errno
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from cli_inputs import ACCOUNT, SCENARIO, TRAIN, rows, with_option

from noisecast import engines
from noisecast.cli import _os_sentence, main
from noisecast.files import written_whole
from noisecast.ledger import PrivacyLedger
from noisecast.scenario_file import OPTIMIZER_NAMES


@pytest.fixture
def refused(folder, capsys):
    """Run a command that must be refused; its one sentence."""

    def refused(arguments, *, lines=1):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        assert len(printed.err.splitlines()) == lines, printed.err
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        return printed.err.strip()

    return refused


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("", "data.csv is empty."),
        ("a,b,answer\n", "has a header (a, b, answer) but no rows"),
        ("a,b,answer\n1,2,yes\n3,4,yes\n", "Expected two or more classes in data.csv, got only 'yes'"),
        ("a,b,answer\n1,nan,yes\n3,4,no\n", "got nan in row 1 of column 'b'"),
        ("a,b,answer\n1,2,yes\n3,inf,no\n", "got inf in row 2 of column 'b'"),
        ("a,b,answer\n1,,yes\n3,4,no\n", "got nothing in row 1 of column 'b'"),
        ("a,b,answer\n1,2,\n3,4,no\n", "Row 1 of data.csv has no label"),
        ("a,b,c\n1,2,3\n", "Expected a column 'answer' in data.csv, got the columns a, b, c."),
        ("weight, kg;b;answer\n1;2;yes\n", "Its cells look separated by ';'"),
        ("a|b|answer\n1|2|yes\n", "Its cells look separated by '|'; put quotes around"),
        ("a,b,answer\n1,2,yes\n3,4\n", "Row 2 of data.csv has 2 cells, expected 3"),
        (rows(20), "Expected 0 < batch_size <= num_examples = 20, got 32"),
    ],
)
def test_bad_training_files(folder, refused, content, sentence):
    (folder / "data.csv").write_text(content, encoding="utf-8")
    assert sentence in refused(TRAIN)


def test_labels_are_shown_as_they_are(folder, capsys):
    """No markup, nothing that moves the terminal, none too long; a label like those ended `train` in a traceback."""
    odd = ["[/]", "[red]ham", "a\x1b[2Jb", "w" * 100]
    lines = [f"0.{number},1,{odd[number % 4]}" for number in range(300)]
    (folder / "data.csv").write_text("\n".join(["a,b,answer", *lines]), encoding="utf-8")
    assert main(TRAIN) == 0
    printed = capsys.readouterr().out
    assert "[/], [red]ham, a?[2Jb, " + "w" * 30 + "…" in " ".join(printed.split())


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("1 1:0.5 2:1\n0 1:0.5 2\n", "Line 2 of data.svm holds '2'"),
        ("1 1:0.5\nyes 1:0.5\n", "Line 2 of data.svm starts with 'yes'"),
        ("1 1:inf\n0 1:1\n", "Line 1 of data.svm holds '1:inf'"),
    ],
)
def test_ragged_svmlight(folder, refused, content, sentence):
    (folder / "data.svm").write_text(content, encoding="utf-8")
    arguments = with_option(["train", "data.svm", *TRAIN[2:]], "--bounds")
    assert sentence in refused(arguments)


@pytest.mark.parametrize(
    "option, values, sentence",
    [
        ("--target-epsilon", ["0"], "Expected a finite --target-epsilon > 0, got 0.0."),
        ("--target-epsilon", ["-1"], "Expected a finite --target-epsilon > 0, got -1.0."),
        ("--target-epsilon", ["nan"], "Expected a finite --target-epsilon > 0, got nan."),
        ("--target-epsilon", [], "Expected --noise-multiplier or --target-epsilon, got neither"),
        ("--noise-multiplier", ["-1"], "Expected a finite --noise-multiplier >= 0, got -1.0."),
        ("--num-steps", ["0"], "Expected --num-steps >= 1, got 0."),
        ("--num-steps", ["1.5"], "Invalid value for --num-steps: Expected a whole number, got 1.5."),
        ("--num-steps", ["many"], "Invalid value for --num-steps: Expected a whole number, got many."),
        ("--num-steps", [], "Expected --num-steps or --epochs, got neither"),
        ("--batch-size", ["0"], "Expected 0 < batch_size <= num_examples = 25000, got 0; choose"),
        ("--batch-size", ["30000"], "Expected 0 < batch_size <= num_examples = 25000, got 30000; choose"),
        ("--target-delta", ["0"], "Expected 0 < target_delta < 1, got 0.0."),
        ("--sampler", ["posson"], "posson"),
        ("--num-exmples", ["3"], "Did you mean --num-examples?"),
        ("--num-examples", ["0"], "Expected --num-examples >= 1, got 0."),
    ],
)
def test_bad_numbers_of_account(refused, option, values, sentence):
    base = ACCOUNT if option in ("--target-epsilon", "--noise-multiplier") else [*ACCOUNT, "--noise-multiplier", "1"]
    assert sentence in refused(with_option(base, option, *values))


def test_a_sampling_probability_above_one(refused):
    arguments = ["account", "--sampling-probability", "1.5", "--num-steps", "10", "--target-delta", "1e-5"]
    assert "Expected 0 < sampling_probability <= 1, got 1.5." in refused([*arguments, "--noise-multiplier", "1"])


@pytest.mark.parametrize(
    "option, values, sentence",
    [
        ("--learning-rate", ["0"], "Expected 0 < learning_rate < inf, got 0.0."),
        ("--l2-clip-norm", ["0"], "Expected a finite l2_clip_norm > 0, got 0.0"),
        ("--num-examples", ["10"], "Expected 0 < batch_size <= num_examples = 10, got 32"),
        ("--num-examples", ["0"], "Expected --num-examples >= 1, got 0."),
        ("--test-fraction", ["1"], "Expected 0 < test_fraction < 1, got 1.0."),
        ("--test", ["nowhere.csv"], "There is no file nowhere.csv"),
        ("--bounds", ["nowhere.toml"], "There is no file nowhere.toml"),
        ("--columns", ["a,z"], "Expected a column 'z'"),
        ("--columns", ["y,a,z"], "Expected columns 'y', 'z' in data.csv, got the columns"),
        ("--optimizer", ["adam"], "adam"),
        ("--output", ["data.csv"], "Expected --output to be a new directory, data.csv exists"),
        ("--output", ["missing/model"], "Expected the folder"),
    ],
)
def test_bad_options_of_train(refused, option, values, sentence):
    assert sentence in refused(with_option(TRAIN, option, *values))


def test_resume_without_a_checkpoint(refused):
    assert "Expected a checkpoint at model.checkpoint, found none" in refused([*TRAIN, "--resume"])


def test_a_garbled_checkpoint(folder, refused):
    (folder / "model.checkpoint").write_bytes(b"PK\x03\x04 half of a file")
    assert "is the checkpoint of an interrupted run" in refused(TRAIN)
    # What will run has been shown by then: the sentence is still the only line on standard error.
    assert "is not a readable checkpoint" in refused([*TRAIN, "--resume"])


def test_a_diverged_run_leaves_no_model(refused, monkeypatch):
    monkeypatch.setattr(engines, "released_params", lambda run, scenario: np.full(3, np.nan, np.float32))
    assert "diverged" in refused(TRAIN)


def test_three_mistakes_in_a_scenario_file_are_three_sentences(folder, refused):
    text = SCENARIO.replace("num_steps = 50", "num_steps = 0").replace("[0.5, 2.0]", "-1").replace("dp-sgd", "sgd")
    (folder / "scenario.toml").write_text(text, encoding="utf-8")
    sentences = refused(["answer", "scenario.toml"], lines=3).splitlines()
    assert all(sentence.startswith("scenario.toml: ") for sentence in sentences)


def test_a_seed_list_with_repeats(folder, refused):
    text = SCENARIO.replace("num_seeds = 3", "insecure_seeds = [1, 2, 1]")
    (folder / "scenario.toml").write_text(text, encoding="utf-8")
    assert "Expected insecure_seeds to be distinct values, got [1, 2, 1]" in refused(["answer", "scenario.toml"])


@pytest.mark.parametrize(
    "option, value, sentence",
    [
        ("--output", "missing/rows.parquet", "Expected the folder"),
        ("--figure", "picture.txt", "Expected a figure that ends in .png or .pdf or .svg, got picture.txt"),
        ("--output", "rows.csv", "Expected a table that ends in .parquet, got rows.csv"),
        ("--output", ".", "Expected a file to write to, got the directory ."),
    ],
)
def test_bad_outputs_of_answer(folder, refused, option, value, sentence):
    (folder / "scenario.toml").write_text(SCENARIO, encoding="utf-8")
    assert sentence in refused(["answer", "scenario.toml", option, value])


def test_bad_models_and_files_of_predict(folder, refused):
    assert "Expected a model directory written by `noisecast train` at nowhere" in refused(
        ["predict", "nowhere", "data.csv"]
    )
    assert main(TRAIN) == 0
    (folder / "other.csv").write_text("a,c\n1,2\n", encoding="utf-8")
    # capsys also holds what training printed on standard output; standard error is the refusal's alone.
    assert "Expected a column 'b' in other.csv" in refused(["predict", "model", "other.csv"])
    assert "Expected the folder" in refused(["predict", "model", "data.csv", "--output", "missing/labels.csv"])
    (folder / "model" / "privacy.json").rename(folder / "kept.json")
    assert "privacy.json: No such file or directory; mend that, or" in refused(["predict", "model", "data.csv"])
    (folder / "kept.json").rename(folder / "model" / "privacy.json")
    (folder / "model" / "parameters.npz").write_bytes(b"half")
    assert "is not a readable model directory" in refused(["predict", "model", "data.csv"])


def test_a_full_disk_is_told_with_the_file_that_it_has_no_room_for(tmp_path):
    with pytest.raises(OSError) as caught, written_whole(tmp_path / "report.html"):
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write to an open file does, without a name
    said = _os_sentence(caught.value)
    assert said.startswith(f"{tmp_path / 'report.html'}: No space left on device; make room there")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(folder, refused):
    locked = folder / "locked"
    locked.mkdir(mode=0o500)
    assert "not permitted" in refused(with_option(TRAIN, "--output", "locked/model"))


def test_a_place_that_takes_no_file_is_refused_before_the_work(refused, monkeypatch):
    """As /proc takes none, or a disk that is mounted read-only, from root too, whom permissions do not stop."""

    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("noisecast.files.tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("noisecast.cli.train.plan_of", None)  # reading the rows would end in a traceback
    assert "but the system says 'Read-only file system'; choose another place." in refused(TRAIN)


@pytest.mark.parametrize("command", ["answer", "forecast"])
def test_no_table_is_written_over_a_file(folder, refused, command):
    """It may be the data: a scenario file names one, and a table has its suffix."""
    (folder / "scenario.toml").write_text(SCENARIO)
    (folder / "mine.parquet").write_bytes(b"years of work")
    said = refused([command, "scenario.toml", "--output", "mine.parquet"])
    assert "Expected --output to be a new file, mine.parquet exists" in said
    assert (folder / "mine.parquet").read_bytes() == b"years of work"


def test_a_closed_output_is_no_traceback(folder):
    done = subprocess.run(
        f"exec >&-; {sys.executable} -m noisecast datasets", shell=True, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == ""


def test_seeds_are_taken_exactly(folder, capsys):
    """As a float the one is the other."""
    found = []
    for seed in (9007199254740992, 9007199254740993):
        assert main([*TRAIN, "--insecure-seed", str(seed), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["non_private_metrics"]["loss"])
        shutil.rmtree(folder / "model")
    assert found[0] != found[1]


def full(*args, **kwargs):
    raise OSError(28, "No space left on device", "model/parameters.npz")


BEYOND = "privacy noise alone would carry the weights beyond 3.4e+38"


@pytest.mark.parametrize(
    "optimizer, rate, more, sentence",
    [
        *(
            (each, "1e39", [], "<= learning_rate <= 3.4e+38, which float32 holds, got 1e+39.")
            for each in OPTIMIZER_NAMES
        ),
        ("dp-sgd", "1e-46", [], "Expected 1.2e-38 <= learning_rate <= 3.4e+38, which float32 holds, got 1e-46."),
        ("dp-adam", "3e-38", ["--schedule", "linear"], "which float32 holds, got 1.5e-40"),
        ("dp-sgd", "0.1", ["--l2-clip-norm", "1e39"], "Expected 1e-12 <= l2_clip_norm <= 1e+20, got 1e+39."),
        ("dp-sign-sgd", "1e38", [], BEYOND),
        ("dp-adam", "1e38", [], BEYOND),
        ("dp-sgd", "1e20", ["--l2-clip-norm", "1e20"], BEYOND),
        ("dp-sgd", "3.4e38", [], BEYOND),  # by one of many weights
    ],
)
def test_what_float32_does_not_hold_is_refused_before_a_ledger_is_charged(refused, optimizer, rate, more, sentence):
    assert main(["ledger", "budget", "l", "rows", "--epsilon", "50", "--delta", "0.001"]) == 0
    arguments = with_option(with_option(TRAIN, "--optimizer", optimizer), "--learning-rate", rate)
    assert sentence in refused([*arguments, "--ledger", "l", "--dataset", "rows", *more])  # the ledger is as it was


def test_a_full_disk_while_writing_leaves_nothing(folder, refused, monkeypatch):
    """Not even a spent budget: the first that is written is a checkpoint."""
    assert main(["ledger", "budget", "l", "rows", "--epsilon", "50", "--delta", "0.001"]) == 0
    monkeypatch.setattr(np, "savez", full)
    said = refused([*TRAIN, "--ledger", "l", "--dataset", "rows"])
    assert "No space left on device" in said and "--resume" not in said
    assert PrivacyLedger(folder / "l").entries("rows") == ()


def test_what_a_full_disk_has_no_room_for_is_resumed(folder, capsys, monkeypatch):
    assert main(["ledger", "budget", "l", "rows", "--epsilon", "50", "--delta", "0.001"]) == 0
    arguments = [*TRAIN, "--ledger", "l", "--dataset", "rows"]
    with monkeypatch.context() as patched:
        patched.setattr("noisecast.cli.train.save_model", full)
        assert main(arguments) == 2
    said = capsys.readouterr().err
    assert (
        "parameters.npz: No space left on device; what was trained up to" in said
        and "model.checkpoint: mend that and go on" in said
    )
    assert main([*arguments, "--resume"]) == 0
    assert len(PrivacyLedger(folder / "l").entries("rows")) == 1 and not (folder / "model.checkpoint").exists()


def test_a_checkpoint_that_was_left_beside_its_model_is_named(folder, refused):
    """As by a kill after the one was written, before the other was deleted."""
    (folder / "model").mkdir()
    (folder / "model.checkpoint").write_bytes(b"the secret of its noise")
    assert "Delete model.checkpoint as well: it holds the secret" in refused(TRAIN)


def test_a_pipe_in_place_of_a_checkpoint_is_not_waited_for(folder, capsys):
    os.mkfifo(folder / "model.checkpoint")
    assert main([*TRAIN, "--resume"]) == 2
    assert "model.checkpoint is not a readable checkpoint" in capsys.readouterr().err


def test_an_unknown_command_names_the_nearest(refused):
    assert "did you mean 'train'?" in refused(["trian"])


def test_the_program_exits_with_status_2_and_one_line(folder):
    result = subprocess.run(
        [sys.executable, "-c", "import sys; from noisecast.cli import main; sys.exit(main())", *ACCOUNT],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


def test_errors_of_our_own_keep_their_traceback(folder, monkeypatch):
    from noisecast.cli import train_plan

    def broken(*args, **kwargs):
        raise TypeError("a bug")

    monkeypatch.setattr(train_plan, "load_file", broken)
    with pytest.raises(TypeError, match="a bug"):
        main(TRAIN)


@pytest.mark.parametrize(
    "error, said",
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "store"),
            "store: No space left on device; make room there or",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; make room on the disk or choose"),
        (OSError(errno.EROFS, "Read-only file system", "store"), "store: Read-only file system; choose another place"),
    ],
)
def test_room_is_asked_for_where_room_is_lacking(error, said):
    assert _os_sentence(error).startswith(said)


def test_a_needed_option_that_is_misspelt_is_named(capsys):
    assert main(["train", "rows.csv", "--batchsize", "8"]) == 2
    assert capsys.readouterr().err.startswith("Expected --batch-size, got --batchsize.")
