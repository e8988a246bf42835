"""Advice from numbers and from a paid probe, as a person meets it."""

import json
from pathlib import Path

import pytest

from noisecast.cli.advise_numbers import NO_DATA, advise_numbers, read_numbers
from noisecast.cli.advise_probe import advise_probe
from noisecast.scenario_file import ScenarioFileError, read_scenario_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "advise_numbers.toml"

SMALL = """
num_params = 31
num_examples = 6400
batch_size = 64
num_steps = 100
target_epsilon = [1.0]
tuned_at_noise_multiplier = 1.0
[[optimizer]]
name = "dp-sgd"
learning_rate = 2.0
l2_clip_norm = 0.5
[[optimizer]]
name = "dp-sign-sgd"
learning_rate = 0.05
l2_clip_norm = 0.5
"""

SCENARIO = """
num_steps = 100
target_delta = 1e-4
[problem]
kind = "bundled"
name = "breast_cancer"
[mechanism]
noise_multiplier = 2.0
l2_clip_norm = 0.5
batch_size = 64
[[optimizer]]
name = "dp-sgd"
learning_rate = 3.0
[[optimizer]]
name = "dp-adam"
learning_rate = 0.06
"""


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "numbers.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_example_is_the_papers_imdb_task():
    numbers, target_epsilons = read_numbers(EXAMPLE)
    assert (numbers.num_params, numbers.num_steps, target_epsilons) == (10_001, 39_000, (0.2, 1.0, 8.0))
    assert [(each.name, each.learning_rate) for each in numbers.optimizers] == [
        ("DP-SGD", 5.0), ("DP-SignSGD", 0.1), ("DP-Adam", 0.1),
    ]  # fmt: skip


def test_advice_is_printed_with_both_epsilons_and_what_is_not_known(file, capsys):
    advise_numbers(file(SMALL), json=False)
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        NO_DATA,
        "not a guarantee",
        "DP-SignSGD has the lower floor below epsilon",
        "Settings kept:",
        "Re-tuned: learning rates DP-SGD",
        "Price of re-tuning by a 7 x 7 sweep",
        "What the numbers do not tell",
        "was not measured",
    ):
        assert words in printed, words


def test_json_is_for_programs(file, capsys):
    advise_numbers(file(SMALL), json=True)
    found = json.loads(capsys.readouterr().out)
    (at,) = found["epsilons"]
    assert at["keep"] in ("DP-SGD", "DP-SignSGD") and at["price"]["one_run"] <= 1.0
    assert [each["retuned"]["moves"] for each in at["optimizers"]] == [True, False]
    assert found["unknown"] and found["source"] == NO_DATA


@pytest.mark.parametrize(
    "change, sentence",
    [
        (("num_steps = 100", ""), "num_steps or num_epochs"),
        (("num_params = 31", "num_parms = 31"), "did you mean 'num_params'"),
        (("dp-sign-sgd", "dp-singsgd"), "one of"),
        (("learning_rate = 2.0", "learning_rate = -2.0"), "learning_rate > 0"),
        (("batch_size = 64", "batch_size = 64000"), "batch_size <= num_examples"),
        (("num_steps = 100", "num_steps = 100\ninitial_loss = 1.0"), "hessian_trace together"),
        (("num_steps = 100", "num_steps = 100\ntuned_at_epsilon = 1.0"), "tuned_at_noise_multiplier or"),
        (('name = "dp-sign-sgd"', 'name = "dp-sgd"'), "each once"),
    ],
)
def test_mistakes_are_sentences(file, change, sentence):
    text = SMALL.replace(*change)
    assert text != SMALL
    with pytest.raises(ScenarioFileError) as raised:
        read_numbers(file(text))
    assert sentence in str(raised.value) and "numbers.toml" in str(raised.value)


def test_a_missing_file_is_a_sentence(tmp_path):
    with pytest.raises(ScenarioFileError, match="There is no file of numbers"):
        read_numbers(tmp_path / "none.toml")


def test_a_probe_is_paid_for_and_its_price_is_in_every_epsilon(file, capsys):
    question = read_scenario_file(file(SCENARIO))
    advise_probe(question.scenarios, [2.0], 0.2, json=True)
    found = json.loads(capsys.readouterr().out)
    assert 0.19 < found["probe"]["epsilon"] <= 0.2 and "differential privacy" in found["probe"]["statement"]
    (left,) = found["left"]
    assert left["noise_multiplier"] > left["without_probe"]
    assert found["epsilons"][0]["noise_multiplier"] == left["noise_multiplier"]
    assert all(isinstance(count, int) for count in found["probe"]["noisy_counts"])
    (share,) = found["probe"]["clipped_shares"]
    assert 0 <= share["value"] <= 1 and share["standard_error"] > 0


def test_nothing_is_spent_where_nothing_would_be_left(file, monkeypatch):
    question = read_scenario_file(file(SCENARIO))
    monkeypatch.setattr("noisecast.cli.advise_probe.private_probe", lambda *a, **k: pytest.fail("the budget is spent"))
    with pytest.raises(ValueError, match=r"above the probe's 0\.5, got 0\.2, 0\.5; spend less"):
        advise_probe(question.scenarios, [1.0, 0.2, 0.5], 0.5, json=False)
