"""An epoch is as many steps whoever asks for it: 300 rows in batches of 64 make 4, not 4.6875."""

import json
from itertools import product

import numpy as np
import pytest
from cli_inputs import TRAIN, with_option

from noisecast.cli import main
from noisecast.cli.advise_numbers import read_numbers
from noisecast.estimators import DPLogisticRegression
from noisecast.privacy.sampling import Shuffled, steps_of_epochs, steps_per_epoch
from noisecast.reproduction import tasks
from noisecast.scenario_file import read_scenario_file

SCENARIO = """
num_epochs = 10
[problem]
kind = "file"
path = "data.csv"
label = "answer"
[mechanism]
noise_multiplier = 1
batch_size = 64
[[optimizer]]
name = "dp-sgd"
learning_rate = 0.1
"""
NUMBERS = """
num_params = 3
num_examples = 300
batch_size = 64
num_epochs = 10
target_epsilon = 1.0
tuned_at_noise_multiplier = 1.0
[[optimizer]]
name = "dp-sgd"
learning_rate = 0.1
l2_clip_norm = 1.0
"""


def test_all_ways_to_ask_for_ten_epochs_take_the_same_steps(folder, capsys):
    (folder / "scenario.toml").write_text(SCENARIO, encoding="utf-8")
    (folder / "numbers.toml").write_text(NUMBERS, encoding="utf-8")
    arguments = with_option(with_option(TRAIN, "--num-steps"), "--batch-size", "64")
    assert main([*arguments, "--epochs", "10", "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)["privacy"]["num_steps"]
    x, y = np.random.default_rng(0).uniform(-1, 1, (300, 2)), np.arange(300) % 2
    estimator = DPLogisticRegression(
        num_epochs=10, expected_batch_size=64, num_examples=300, target_epsilon=8.0, target_delta=1e-4,
        learning_rate=0.1, l2_clip_norm=1.0, data_norm=2.0, classes=[0, 1], insecure_seed=0,
    ).fit(x, y)  # fmt: skip
    asked = read_scenario_file("scenario.toml").scenarios[0].num_steps
    told = read_numbers("numbers.toml")[0].num_steps
    assert trained == asked == told == estimator.n_iter_ == 40


@pytest.mark.parametrize("sampler", ["poisson", "fixed-size", "shuffled"])
def test_account_counts_epochs_alike_for_every_sampler(capsys, sampler):
    arguments = ["--num-examples", "1000", "--batch-size", "64", "--epochs", "2.5", "--target-delta", "1e-4"]
    assert main(["account", *arguments, "--noise-multiplier", "2", "--sampler", sampler, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == round(2.5 * 15)


def test_a_shuffled_epoch_is_the_same_number_of_steps():
    sizes = list(product([1, 2, 3, 999, 1000, 25_000, 9_999_991], [1, 2, 3, 7, 64, 80, 1000, 4999]))
    for n, batch_size in sizes:
        if batch_size <= n:
            sampler = Shuffled(batch_size, n)
            assert int(steps_per_epoch(sampler.sampling_probability)) == sampler.steps_per_epoch == n // batch_size


def test_the_papers_runs_are_as_long_as_ever():
    """39,000 steps of IMDB at 64; the figures' stores hold runs of floor(n / B) * epochs steps."""
    assert tasks.IMDB.num_steps(25_000) == 39_000
    for n, batch_size in product(
        [4_000, 10_000, 24_750, 25_000, 100_000, 246_092], [16, 32, 48, 50, 64, 80, 128, 1024]
    ):
        assert steps_of_epochs(50, batch_size / n) == n // batch_size * 50
