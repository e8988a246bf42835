"""The `noisecast train` at the end of what was found is one that the command line takes, with the settings found."""

import json
import shlex
from pathlib import Path

import pytest

from noisecast.cli import app, main
from noisecast.cli.train_line import INTRODUCTION, train_commands
from noisecast.scenario_file import read_scenario_file

ROWS = """
num_steps = 40
[problem]
kind = "file"
path = "data.csv"
bounds = "bounds.toml"
label = "answer"
test_fraction = 0.2
[mechanism]
target_epsilon = [1.0, 4.0]
l2_clip_norm = 0.5
batch_size = 32
[[optimizer]]
name = "dp-sgd"
learning_rate = 2.0
"""
TEXTS = """
num_steps = 3
[problem]
kind = "file"
path = "my texts.csv"
text = "words"
label = "tags"
label_separator = "-"
features = "term-frequency"
vocabulary = "vocabulary.txt"
max_tokens = 5
unit_rows = true
test = "my texts.csv"
[mechanism]
noise_multiplier = 0.123456789
batch_size = 2
sampler = "shuffled"
adjacency = "replace-one"
[[optimizer]]
name = "dp-adam"
learning_rate = 1e-3
"""


def words_of(command: str) -> list[str]:
    """As a shell takes them, for which a line goes on after a backslash."""
    return shlex.split(command.replace("\\\n", ""))


def printed_commands(printed: str) -> list[list[str]]:
    _, _, pasted = printed.partition(INTRODUCTION + "\n")
    return [words_of("noisecast train" + each) for each in pasted.split("noisecast train")[1:]]


@pytest.mark.parametrize("asked", [["forecast", "--best"], ["advise", "--epsilon", "1,4", "--public", "--keep"]])
def test_what_is_pasted_trains_what_was_found(folder, capsys, asked):
    text = ROWS if asked[0] == "forecast" else ROWS.replace("[1.0, 4.0]", "4.0")
    (folder / "plan.toml").write_text(text, encoding="utf-8")
    assert main([asked[0], "plan.toml", *asked[1:]]) == 0
    commands = printed_commands(capsys.readouterr().out)
    assert main([asked[0], "plan.toml", *asked[1:], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [words_of(each) for each in found["train_commands"]] == commands and len(commands) == 2
    rows = found["forecasts"] if "forecasts" in found else [each["use"] for each in found["recommendations"]]
    for number, (command, row) in enumerate(zip(commands, rows, strict=True)):
        assert main([*command[1:-1], f"model{number}", "--json"]) == 0
        trained = json.loads(capsys.readouterr().out)
        privacy = trained["privacy"]
        assert trained["learning_rate"] == row["learning_rate"] and privacy["num_steps"] == row["num_steps"]
        assert privacy["l2_clip_norm"] == row["l2_clip_norm"]
        assert privacy["noise_multiplier"] == pytest.approx(row["noise_multiplier"], rel=1e-9)
        assert privacy["epsilon"] == pytest.approx(row["epsilon"], rel=1e-9)


def test_every_option_of_a_file_is_one_of_train(folder):
    (folder / "elsewhere").mkdir()
    for name, content in (("my texts.csv", "words,tags\na b,x-y\nb,x\na,\n"), ("vocabulary.txt", "a\nb\n")):
        (folder / "elsewhere" / name).write_text(content, encoding="utf-8")
    file = folder / "elsewhere" / "plan.toml"
    file.write_text(TEXTS, encoding="utf-8")
    (command,) = train_commands(file, [(read_scenario_file(file).scenarios[0], None)])
    assert all(line.endswith(" \\") for line in command.splitlines()[:-1])
    _, bound, _ = app.parse_args(words_of(command)[1:])
    given = bound.arguments
    files, options = given["files"], given["options"]
    place = file.parent
    assert given["file"] == place / "my texts.csv" and files.vocabulary == place / "vocabulary.txt"
    assert (files.text, files.label, files.label_separator, files.max_tokens) == ("words", "tags", "-", 5)
    assert files.unit_rows and files.features == "term-frequency" and files.test == place / "my texts.csv"
    assert (options.noise_multiplier, options.sampler, options.adjacency) == (0.123456789, "shuffled", "replace-one")
    assert (given["optimizer"], given["learning_rate"], given["l2_clip_norm"]) == ("dp-adam", 1e-3, 1.0)
    assert (given["batch_size"], options.num_steps, given["target_delta"]) == (2, 3, 1e-5)
    assert given["output"] == Path("model")


@pytest.mark.parametrize(
    "old, new", [("learning_rate = 1e-3", "learning_rate = 1e-3\nb1 = 0.5"), ('kind = "file"', 'kind = "bundled"')]
)
def test_where_train_cannot_there_is_no_line(folder, old, new):
    for name, content in (("my texts.csv", "words,tags\na b,x-y\nb,x\na,\n"), ("vocabulary.txt", "a\nb\n")):
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "plan.toml").write_text(TEXTS.replace(old, new) if "b1" in new else TEXTS, encoding="utf-8")
    scenario = read_scenario_file("plan.toml").scenarios[0]
    (folder / "plan.toml").write_text(TEXTS.replace(old, new), encoding="utf-8")
    assert train_commands(Path("plan.toml"), [(scenario, None)]) == []
