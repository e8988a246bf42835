"""One delta where none is named: 1e-5, or a power of ten below 1 / n; a larger one of the user's own is warned of."""

import json

import pytest
from cli_inputs import TRAIN, rows

from noisecast.cli import main
from noisecast.cli.advise_numbers import read_numbers
from noisecast.scenario_file import read_scenario_file

SCENARIO = """
num_steps = 2
runners = ["training"]
[problem]
kind = "file"
path = "data.csv"
label = "answer"
[mechanism]
noise_multiplier = 1
batch_size = 32
[[optimizer]]
name = "dp-sgd"
learning_rate = 0.1
"""
NUMBERS = """
num_params = 3
num_examples = {n}
batch_size = 32
num_steps = 10
target_epsilon = 1.0
tuned_at_noise_multiplier = 1.0
[[optimizer]]
name = "dp-sgd"
learning_rate = 0.1
l2_clip_norm = 1.0
"""


@pytest.mark.parametrize("count, delta", [(300, 1e-5), (100_000, 1e-6)])
def test_a_file_a_scenario_and_numbers_have_the_same_delta(folder, capsys, count, delta):
    (folder / "data.csv").write_text(rows(count), encoding="utf-8")
    (folder / "scenario.toml").write_text(SCENARIO, encoding="utf-8")
    (folder / "numbers.toml").write_text(NUMBERS.format(n=count), encoding="utf-8")
    assert main([*TRAIN, "--json"]) == 0
    printed = capsys.readouterr()
    assert "target_delta" not in printed.err
    assert json.loads(printed.out)["privacy"]["target_delta"] == delta < 1 / count
    assert read_scenario_file("scenario.toml").scenarios[0].target_delta == delta
    assert read_numbers("numbers.toml")[0].target_delta == delta
    account = ["account", "--num-examples", str(count), "--batch-size", "32", "--num-steps", "2", "--json"]
    assert main([*account, "--noise-multiplier", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["target_delta"] == delta


@pytest.mark.parametrize(
    "command", [["sweep", "--store", "s", "--workers", "0"], ["protocol", "b", "--store", "p", "--workers", "0"],
                ["answer"], ["advise", "--numbers"]],
    ids=lambda command: command[0],
)  # fmt: skip
def test_a_delta_that_is_not_below_one_over_n_is_warned_of(folder, capsys, command):
    text = NUMBERS.format(n=300) if "--numbers" in command else SCENARIO
    (folder / "asked.toml").write_text("target_delta = 0.01\n" + text, encoding="utf-8")
    assert main([*command, "asked.toml"]) == 0
    assert capsys.readouterr().err.count("Expected target_delta < 1 / num_examples = 0.00333, got 0.01") == 1
