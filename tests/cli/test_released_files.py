"""What a model directory tells about the examples: its parameters, and nothing else that noise did not cover."""

import json

import pytest
from cli_inputs import TRAIN, rows, with_option

from noisecast.cli import main

PUBLIC = ["--label-names", "labels.txt", "--num-examples", "300", "--target-delta", "1e-4", "--learning-rate", "0.5"]
OF_ONE_RECORD_MORE = {
    "altered": lambda text: text.replace("yes\n", "no\n", 1),
    "replaced": lambda text: text[: text.rindex("\n", 0, -1) + 1] + "-0.5000,0.2500,yes\n",
    "added": lambda text: text + "-0.5000,0.2500,yes\n",
    "removed": lambda text: text[: text.rindex("\n", 0, -1) + 1],
}


def written(folder, capsys, arguments) -> dict[str, str]:
    """The files of a model that are for release, but for the parameters, and what the command prints of it."""
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for name in ("seconds", "non_private_metrics", "non_private_metrics_of_no_model"):
        del printed[name]
    model = folder / "model"
    assert {each.name for each in model.iterdir()} == {
        "parameters.npz", "model.json", "privacy.json", "PRIVACY.txt", "non_private.json"
    }  # fmt: skip
    found = {name: (model / name).read_text() for name in ("model.json", "privacy.json", "PRIVACY.txt")}
    for each in model.iterdir():
        each.unlink()
    model.rmdir()
    return found | {"printed": json.dumps(printed)}


@pytest.mark.parametrize(
    "optimizer, change",
    [*(("dp-sgd", change) for change in OF_ONE_RECORD_MORE), ("dp-sign-sgd", "altered"), ("dp-adam", "altered")],
)
def test_a_neighbours_model_comes_with_the_same_files(folder, capsys, change, optimizer):
    """All that is read of the file is given as public; then a hash of the rows, say, would be seen here."""
    (folder / "labels.txt").write_text("no\nyes\n")
    arguments = [*with_option(TRAIN, "--optimizer", optimizer), *PUBLIC]
    before = written(folder, capsys, arguments)
    (folder / "data.csv").write_text(OF_ONE_RECORD_MORE[change](rows()))
    assert written(folder, capsys, arguments) == before


def test_a_neighbour_of_texts_comes_with_the_same_files(folder, capsys):
    (folder / "labels.txt").write_text("no\nyes\n")
    (folder / "words.txt").write_text("a\nfine\nfilm\ndull\n")
    lines = ["text,answer", *["a fine film,yes", "a dull film,no"] * 150]
    arguments = [*with_option(TRAIN, "--bounds"), "--text", "text", "--vocabulary", "words.txt", *PUBLIC]
    found = []
    for last in ("a fine film,yes", "something never heard of,no"):
        (folder / "data.csv").write_text("\n".join([*lines[:-1], last]) + "\n")
        found.append(written(folder, capsys, arguments))
    assert found[0] == found[1]


def test_what_the_rows_themselves_are_is_told_under_another_name(folder, capsys):
    (folder / "data.csv").write_text(rows(149))
    assert main([*with_option(TRAIN, "--output", "m"), "--num-examples", "300", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert not any("is far from" in each for each in said["warnings"])
    assert any("is far from the file's number of rows" in each for each in said["non_private_warnings"])


def test_a_row_that_is_replaced_may_not_move_between_training_and_test(folder, capsys):
    """By its content a row is held out: fixed-size batches have a guarantee for replaced rows alone."""
    assert main([*with_option(TRAIN, "--batch-size", "30"), "--sampler", "fixed-size", "--test-fraction", "0.2"]) == 2
    assert "Expected --test with a guarantee for replaced records" in capsys.readouterr().err
