"""Scenario files: what they ask, and every mistake at once."""

import math
from pathlib import Path

import numpy as np
import pytest

from noisecast.optimizers import CONSTANT, Schedule
from noisecast.privacy.mechanism import Adjacency
from noisecast.privacy.sampling import FixedSize, Poisson, Stream
from noisecast.scenario_file import OPTIMIZER_NAMES, ScenarioFileError, read_scenario_file

EXAMPLES = Path(__file__).parents[2] / "examples"

SETTINGS = "num_steps = 100\n"
PROBLEM = """
[problem]
kind = "quadratic"
hessian_diag = [2.0, 1.0]
initial_params = 0.1
example_noise_std = 0.1
"""
MECHANISM = """
[mechanism]
noise_multiplier = [0.5, 1.0]
l2_clip_norm = 1.0
batch_size = 64
"""
OPTIMIZERS = """
[[optimizer]]
name = "dp-sgd"
learning_rate = [0.1, 0.2]

[[optimizer]]
name = "dp-adam"
learning_rate = 0.01
l2_clip_norm = 0.5
b1 = 0.5
"""
WHOLE = SETTINGS + PROBLEM + MECHANISM + OPTIMIZERS


@pytest.fixture
def ask(tmp_path):
    def ask(text):
        path = tmp_path / "scenario.toml"
        path.write_text(text, encoding="utf-8")
        return read_scenario_file(path)

    return ask


def mistakes_in(ask, text):
    with pytest.raises(ScenarioFileError) as caught:
        ask(text)
    assert str(caught.value).splitlines() == list(caught.value.mistakes)
    return caught.value.mistakes


def test_a_file_asks_every_optimizer_and_rate_at_every_noise_level(ask):
    question = ask(WHOLE)
    asked = [
        (s.mechanism.noise_multiplier, s.optimizer.name, s.optimizer.learning_rate, s.mechanism.l2_clip_norm)
        for s in question.scenarios
    ]
    assert asked == [
        (z, *rest) for z in (0.5, 1.0) for rest in (("DP-SGD", 0.1, 1.0), ("DP-SGD", 0.2, 1.0), ("DP-Adam", 0.01, 0.5))
    ]
    assert question.scenarios[2].optimizer.b1 == 0.5
    assert question.scenarios[0].mechanism.sampler == Stream(64)
    assert [runner.name for runner in question.runners] == ["training", "sde", "closed_form"]
    assert question.num_seeds == 1 and question.insecure_seeds is None
    assert question.record_at[0] == 0 and question.record_at[-1] == 100 and len(question.record_at) == 21


def test_a_file_asks_every_clip_norm_of_its_lists(ask):
    text = WHOLE.replace("l2_clip_norm = 1.0", "l2_clip_norm = [1.0, 2.0]").replace("[0.5, 1.0]", "0.5")
    asked = [(s.optimizer.learning_rate, s.mechanism.l2_clip_norm) for s in ask(text).scenarios]
    assert asked == [(0.1, 1.0), (0.2, 1.0), (0.1, 2.0), (0.2, 2.0), (0.01, 0.5)]
    asked = ask(text.replace("l2_clip_norm = 0.5", "l2_clip_norm = [0.25, 0.5]")).scenarios
    assert [s.mechanism.l2_clip_norm for s in asked if s.optimizer.name == "DP-Adam"] == [0.25, 0.5]


def test_seeds_and_recorded_steps_can_be_named(ask):
    question = ask("insecure_seeds = [3, 1]\nrecord_at = [10, 0]\nrunners = ['sde']\n" + WHOLE)
    assert question.insecure_seeds == (3, 1)
    assert question.record_at == (0, 10)
    assert [runner.name for runner in question.runners] == ["sde"]


def test_a_wide_quadratic_starts_from_a_reproducible_draw(ask):
    problem = PROBLEM.replace("hessian_diag = [2.0, 1.0]", "num_params = 1000\nhessian_value = 0.1").replace(
        "initial_params = 0.1", "initial_params = {normal_std = 1.5, insecure_seed = 7}"
    )
    text = SETTINGS + problem + "degrees_of_freedom = inf\n" + MECHANISM + OPTIMIZERS
    first, again = (ask(text).scenarios[0].problem for _ in range(2))
    assert first.num_params == 1000 and first.fingerprint == again.fingerprint
    assert np.std(first.initial_params()) == pytest.approx(1.5, rel=0.1)
    assert math.isinf(first.degrees_of_freedom)


def test_a_quartic_can_be_asked(ask):
    problem = (
        PROBLEM.replace('"quadratic"', '"quartic"').replace("[2.0, 1.0]", "[-2.0, 1.0]") + "quartic_weight = 0.5\n"
    )
    assert ask(SETTINGS + problem + MECHANISM + OPTIMIZERS).scenarios[0].problem.name == "quartic (d = 2)"


@pytest.mark.parametrize(
    "line, sampler, adjacency",
    [
        ("", Poisson.for_batch_size(4, 20), Adjacency.ADD_OR_REMOVE_ONE),
        ('sampler = "fixed-size"\n', FixedSize(4, 20), Adjacency.REPLACE_ONE),
        ('adjacency = "replace-one"\n', Poisson.for_batch_size(4, 20), Adjacency.REPLACE_ONE),
    ],
)
def test_a_file_beside_the_scenario_is_read(ask, tmp_path, line, sampler, adjacency):
    rows = "".join(f"{i},{'yes' if i % 3 else 'no'}\n" for i in range(20))
    (tmp_path / "data.csv").write_text("x,answer\n" + rows, encoding="utf-8")
    problem = '[problem]\nkind = "file"\npath = "data.csv"\nlabel = "answer"\nunit_rows = true\n'
    scenario = ask(SETTINGS + problem + MECHANISM.replace("64", "4") + line + OPTIMIZERS).scenarios[0]
    assert scenario.problem.num_examples == 20
    assert scenario.mechanism.sampler == sampler
    assert scenario.mechanism.adjacency == adjacency


@pytest.mark.parametrize("line", ['sampler = "fixed-size"\n', 'adjacency = "replace-one"\n'])
@pytest.mark.parametrize(
    "of_kind",
    [
        'kind = "file"\npath = "data.csv"\nlabel = "answer"\n',
        'kind = "factorization"\npath = "ratings.csv"\nnum_users = 5\nnum_items = 5\npublic_init_seed = 0\n',
    ],
)
def test_rows_held_out_by_their_content_cannot_be_replaced(ask, line, of_kind):
    problem = f"[problem]\n{of_kind}test_fraction = 0.2\n"
    [mistake] = mistakes_in(ask, SETTINGS + problem + MECHANISM + line + OPTIMIZERS)
    assert "Expected [problem] test with a guarantee for replaced records, got test_fraction" in mistake


@pytest.mark.parametrize("key", ["label_names", "vocabulary", "bounds", "test"])
def test_what_stands_in_a_file_is_not_taken_from_a_list(ask, key):
    problem = f'[problem]\nkind = "file"\npath = "data.csv"\n{key} = ["no", "yes"]\n'
    [mistake] = mistakes_in(ask, SETTINGS + problem + MECHANISM + OPTIMIZERS)
    assert mistake.endswith(f"Expected [problem] {key} to be the name of a file, got ['no', 'yes'].")


def test_a_target_epsilon_is_calibrated(ask):
    scenario = ask(WHOLE.replace("noise_multiplier = [0.5, 1.0]", "target_epsilon = 2")).scenarios[0]
    assert scenario.privacy_spent.epsilon == pytest.approx(2, rel=0.01) and scenario.privacy_spent.epsilon <= 2


def test_three_mistakes_are_reported_at_once(ask):
    text = (
        WHOLE.replace("num_steps = 100", "num_steps = 0")
        .replace("[0.1, 0.2]", "-0.1")
        .replace("l2_clip_norm = 1.0", "l2_clip = 1")
    )
    steps, clip, rate = mistakes_in(ask, text)
    assert steps.endswith("Expected num_steps >= 1, got 0.")
    assert "has no key 'l2_clip'; did you mean 'l2_clip_norm'?" in clip
    assert "[[optimizer]] number 1: learning_rate > 0, got -0.1." in rate


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        ("num_steps = 100", "steps = 100", "has no key 'steps'; did you mean 'num_steps'?"),
        ("learning_rate", "lr", "has no key 'lr'; did you mean 'learning_rate'?"),
        ("num_steps = 100", "num_steps = 100\nlr = 1", "'lr'; did you mean 'learning_rate' of [[optimizer]]?"),
        ("num_steps = 100", "num_steps = 100\ntarget_epsilon = 1", "did you mean 'target_epsilon' of [mechanism]?"),
        ("num_steps = 100", "num_steps = 100\ninsecure_seeds = [1, -1]", "Expected insecure_seeds[1] >= 0, got -1."),
        ("num_steps = 100", f"num_steps = 100\ninsecure_seeds = [{2**63}]", "insecure_seeds[0] < 9.22337e+18, got 92"),
        ("initial_params = 0.1", "initial_params = 0.1\nlabel = 'y'", "has no key 'label'; there are hessian_diag, "),
        ("batch_size = 64", "batch_size = 64\ntarget_delta = 0.1", "did you mean 'target_delta' above all tables?"),
        ("num_steps = 100", "num_steps = 100\nsecure_mode = true", "has no key 'secure_mode'; there are "),
        ("l2_clip_norm", "max_grad_norm", "has no key 'max_grad_norm'; did you mean 'l2_clip_norm'?"),
        ("num_steps = 100", "num_stps = 100", "has no key 'num_stps'; did you mean 'num_steps'?"),
        ("num_steps = 100", "", "Expected num_steps, got nothing"),
        ("num_steps = 100", "num_steps = 1.5", "Expected num_steps to be a whole number, got 1.5."),
        ("num_steps = 100", 'num_steps = "100"', "to be a whole number, got '100'; leave out the quotes."),
        ("num_steps = 100", 'num_steps = "many"', "Expected num_steps to be a whole number, got 'many'."),
        ("num_steps = 100", "num_steps = 100\ninsecure_seeds = [1, 2, 1]", "distinct values, got [1, 2, 1]"),
        ("num_steps = 100", "num_steps = 100\ninsecure_seeds = []", "Expected at least one value in insecure_seeds"),
        ("num_steps = 100", "num_steps = 100\nnum_seeds = 2\ninsecure_seeds = [1]", "insecure_seeds, got both"),
        ("num_steps = 100", "num_steps = 100\nrecord_at = [101]", "Expected record_at <= num_steps = 100, got 101."),
        ("num_steps = 100", "num_steps = 100\nrunners = ['sed']", "got 'sed' (meant: 'sde'?)"),
        ("num_steps = 100", "num_steps = 100\ntarget_delta = 1", "Expected target_delta < 1, got 1"),
        ('"quadratic"', '"quadritic"', "did you mean 'quadratic'?"),
        ("hessian_diag = [2.0, 1.0]", "", "got no num_params and no hessian_value"),
        ("hessian_diag = [2.0, 1.0]", "hessian_diag = [2.0, nan]", "hessian_diag[1]"),
        ("initial_params = 0.1", "initial_params = 0.1\nnum_params = 7", "num_params = 2, as many as hessian_diag has"),
        ("initial_params = 0.1", "initial_params = [1, 2, 3]", "initial_params with 2 numbers"),
        ("initial_params = 0.1", 'initial_params = "a"', "a finite number, a list of them"),
        ("[0.5, 1.0]", "[0.5, 0.5]", "distinct values"),
        ("noise_multiplier = [0.5, 1.0]", "", "noise_multiplier or target_epsilon, got neither"),
        ("[0.5, 1.0]", "1\ntarget_epsilon = 1", "noise_multiplier or target_epsilon, got both"),
        ("noise_multiplier = [0.5, 1.0]", "target_epsilon = 0", "target_epsilon > 0, got 0"),
        ("batch_size = 64", "batch_size = -1", "[mechanism] batch_size > 0, got -1"),
        ("batch_size = 64", "batch_size = 64.5", "whole number of fresh examples, got 64.5."),
        ("num_steps = 100", "num_epochs = 100", "a quadratic problem are fresh at every step and make no epochs"),
        ("batch_size = 64", 'batch_size = 64\nsampler = "poisson"', "fresh examples at every step, got poisson"),
        ('"dp-sgd"', '"dp-sdg"', "(meant: 'dp-sgd'?)"),
        ("learning_rate = [0.1, 0.2]", "learning_rate = 0.1\nb1 = 0.5", "without b1, which dp-sgd does not have"),
        (OPTIMIZERS, "", "Expected one or more tables [[optimizer]], got none"),
        (MECHANISM, "", "Expected a table [mechanism], got none"),
        (PROBLEM, "", "Expected a table [problem], got none"),
        ("num_steps = 100", "num_steps = ", "is not a TOML file"),
        ("l2_clip_norm = 1.0", "l2_clip_norm = {min = 0.1, max = 1.0}", "a range {log_uniform = [low, high]}"),
    ],
)  # fmt: skip
def test_one_mistake_is_one_sentence(ask, old, new, sentence):
    assert old in WHOLE
    text = WHOLE.replace(old, new, 1)
    mistakes = mistakes_in(ask, text)
    assert len(mistakes) == 1 and sentence in mistakes[0], mistakes


def test_mistakes_in_the_data_are_sentences_too(ask):
    problem = '[problem]\nkind = "file"\npath = "nowhere.csv"\n'
    (mistake,) = mistakes_in(ask, SETTINGS + problem + MECHANISM + OPTIMIZERS)
    assert "There is no file" in mistake
    (mistake,) = mistakes_in(
        ask, SETTINGS + '[problem]\nkind = "bundled"\nname = "iris"\n' + MECHANISM.replace("64", "640") + OPTIMIZERS
    )
    assert "Expected 0 < batch_size <= num_examples = 120, got 640" in mistake


def test_a_missing_file_is_a_sentence(tmp_path):
    with pytest.raises(ScenarioFileError, match="There is no scenario file"):
        read_scenario_file(tmp_path / "no.toml")


def test_a_file_of_bytes_is_a_sentence(tmp_path):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ScenarioFileError, match="is not UTF-8 text"):
        read_scenario_file(tmp_path / "bytes.toml")


def test_every_optimizer_has_a_name_to_type():
    assert list(OPTIMIZER_NAMES) == ["dp-sgd", "dp-sign-sgd", "dp-adam"]


def test_the_quadratic_example_is_read():
    question = read_scenario_file(EXAMPLES / "quadratic.toml")
    assert len(question.scenarios) == 9 and question.num_seeds == 100


@pytest.mark.slow
def test_the_digits_example_is_read():
    assert len(read_scenario_file(EXAMPLES / "digits.toml").scenarios) == 6


def test_a_schedule_holds_for_every_scenario(ask):
    question = ask(WHOLE.replace(SETTINGS, SETTINGS + 'schedule = "cosine"\nwarmup_steps = 10\n'))
    assert {scenario.schedule for scenario in question.scenarios} == {Schedule.shaped("cosine", 100, warmup_steps=10)}
    assert {scenario.schedule for scenario in ask(WHOLE).scenarios} == {CONSTANT}


def test_a_schedule_that_cannot_be_is_one_sentence(ask):
    (mistake,) = mistakes_in(ask, WHOLE.replace(SETTINGS, SETTINGS + 'schedule = "cosin"\n'))
    assert "one of constant, linear, cosine, got 'cosin' (meant: 'cosine'?)" in mistake
    (mistake,) = mistakes_in(ask, WHOLE.replace(SETTINGS, SETTINGS + "warmup_steps = 100\n"))
    assert "Expected 0 <= warmup_steps < num_steps = 100, got 100." in mistake
