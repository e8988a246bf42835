"""Sweep files: the cells they ask, one question a problem and batch size, and every mistake at once."""

import itertools
import math
import os
import tomllib
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noisecast.privacy.sampling import Poisson
from noisecast.privacy.tuning import TrialDistribution, TrialKind
from noisecast.scenario_file import ScenarioFileError, SweepFile, TuningTable, read_scenario_file, read_sweep_file
from noisecast.scenario_file.document import read_document
from noisecast.scenario_file.rules import beyond_a_scenario

EXAMPLES = Path(__file__).parents[2] / "examples"

# iris holds 120 rows to train on.
SETTINGS = "num_epochs = 5\nnum_records = 2\n"
IRIS = '[problem]\nkind = "bundled"\nname = "iris"\n'
MECHANISM = """
[mechanism]
noise_multiplier = [0.5, 2.0]
l2_clip_norm = [0.5, 1.0]
batch_size = [50, 12]
"""
SGD = '\n[[optimizer]]\nname = "dp-sgd"\nlearning_rate = [0.1, 0.2, 0.3]\n'
ADAM = '\n[[optimizer]]\nname = "dp-adam"\nlearning_rate = 0.01\nl2_clip_norm = [0.1, 0.2, 0.4]\n'
WHOLE = SETTINGS + IRIS + MECHANISM + SGD + ADAM

QUADRATIC = """
kind = "quadratic"
hessian_diag = [2.0, 1.0]
initial_params = 0.1
example_noise_std = 0.1
"""
DRAWS = "\n[draws]\ncount = 6\npublic_seed = 7\n"
TUNING = '\n[tuning]\nmean_trials = 20\ndistribution = "geometric"\n'
DRAWN = WHOLE.replace("[0.1, 0.2, 0.3]", "{log_uniform = [0.01, 1.0]}").replace(
    "[0.1, 0.2, 0.4]", "{log_uniform = [0.1, 10]}"
) + DRAWS  # fmt: skip


@pytest.fixture
def sweep(tmp_path):
    def sweep(text, read=read_sweep_file):
        path = tmp_path / "sweep.toml"
        path.write_text(text, encoding="utf-8")
        return read(path)

    return sweep


def mistakes_in(sweep, text, read=read_sweep_file):
    with pytest.raises(ScenarioFileError) as caught:
        sweep(text, read)
    return [mistake.split("sweep.toml: ", 1)[1] for mistake in caught.value.mistakes]


def settings_of(question):
    return [
        (s.mechanism.noise_multiplier, s.optimizer.name, s.mechanism.l2_clip_norm, s.optimizer.learning_rate)
        for s in question.scenarios
    ]


# --- The grid --------------------------------------------------------------------------------------------------------


def test_the_cells_are_exactly_the_product(sweep):
    found = sweep(WHOLE)
    assert isinstance(found, SweepFile) and found.text == WHOLE and found.tuning is None
    sgd = [("DP-SGD", clip, rate) for clip, rate in itertools.product((0.5, 1.0), (0.1, 0.2, 0.3))]
    adam = [("DP-Adam", clip, 0.01) for clip in (0.1, 0.2, 0.4)]
    assert [settings_of(question) for question in found.questions] == [
        [(z, *rest) for z in (0.5, 2.0) for rest in sgd + adam] for _ in (50, 12)
    ]
    for question, size in zip(found.questions, (50, 12), strict=True):
        assert {s.mechanism.sampler for s in question.scenarios} == {Poisson.for_batch_size(size, 120)}
    assert len({s.id for question in found.questions for s in question.scenarios}) == 36


def test_epochs_are_whole_numbers_of_steps_and_records_fit_them(sweep):
    large, small = sweep(WHOLE).questions
    assert {s.num_steps for s in large.scenarios} == {2 * 5} and {s.num_steps for s in small.scenarios} == {10 * 5}
    assert large.record_at == (0, 5, 10) and small.record_at == (0, 25, 50)
    large, small = sweep("record_last_epochs = 3\n" + WHOLE).questions
    assert large.record_at == (0, 5, 6, 8, 10) and small.record_at == (0, 25, 30, 40, 50)
    named = "record_last_epochs = 2\n" + WHOLE.replace("num_records = 2", "record_at = [3]")
    assert [question.record_at for question in sweep(named).questions] == [(3, 8, 10), (3, 40, 50)]


def test_the_imdb_convention():
    from noisecast.scenario_file.tables import Settings

    assert [Settings(num_epochs=100).steps(25_000 // size) for size in (48, 64, 80)] == [52_000, 39_000, 31_200]


def test_several_problems_are_several_questions(sweep):
    problems = f'[[problem]]{QUADRATIC}\n[[problem]]\nkind = "bundled"\nname = "iris"\n'
    text = WHOLE.replace("num_epochs = 5", "num_steps = 20").replace(IRIS, problems)
    found = sweep(text)
    assert [q.scenarios[0].problem.num_examples for q in found.questions] == [None, None, 120, 120]
    assert [q.scenarios[0].mechanism.expected_batch_size for q in found.questions] == [50, 12, 50, 12]
    assert {s.num_steps for q in found.questions for s in q.scenarios} == {20}


def test_noise_is_calibrated_for_each_batch_size(sweep):
    found = sweep(WHOLE.replace("noise_multiplier = [0.5, 2.0]", "target_epsilon = 2"))
    for question in found.questions:
        (spent,) = {s.privacy_spent.epsilon for s in question.scenarios}
        assert spent == pytest.approx(2, rel=0.01) and spent <= 2
    of_each = [question.scenarios[0].mechanism.noise_multiplier for question in found.questions]
    assert of_each[0] > 1.2 * of_each[1]  # larger batches need more noise: one calibration for both would show


def test_overlapping_lists_ask_a_cell_once(sweep):
    again = '\n[[optimizer]]\nname = "dp-sgd"\nlearning_rate = [0.3, 0.4]\n'
    before, after = (len(sweep(text).questions[0].scenarios) for text in (WHOLE, WHOLE + again))
    assert after - before == 4  # 0.4 at two clips and two noise multipliers


def test_the_tuning_table_is_handed_on(sweep):
    found = sweep(WHOLE + TUNING)
    assert found.tuning == TuningTable(mean_trials=20.0, distribution="geometric")
    assert found.tuning.trials == TrialDistribution(TrialKind.GEOMETRIC, 20.0)


def test_a_scenario_file_is_a_sweep_file(sweep):
    text = WHOLE.replace("[50, 12]", "[12]").replace("[0.5, 1.0]", "1.0").replace("[0.1, 0.2, 0.4]", "0.1")
    (question,) = sweep(text).questions
    alone = sweep(text, read_scenario_file)
    assert [s.id for s in question.scenarios] == [s.id for s in alone.scenarios]
    assert question.record_at == alone.record_at and alone.scenarios[0].num_steps == 50


# --- Mistakes --------------------------------------------------------------------------------------------------------


def test_five_mistakes_are_reported_at_once(sweep):
    text = (
        WHOLE.replace("num_epochs = 5", "num_epochs = 5\nnum_steps = 100")
        .replace("[0.5, 2.0]", "[0.5, 2.0]\ntarget_epsilon = 1")
        .replace("[0.1, 0.2, 0.4]", "[0.1, -0.2]")
        .replace("[0.1, 0.2, 0.3]", "{log_uniform = [0.01, 1.0]}")
        + '\n[tuning]\nmean_trials = 20.0\ndistribution = "poison"\n'
    )
    assert sorted(mistakes_in(sweep, text)) == [
        "Expected [[optimizer]] number 2: l2_clip_norm[1] > 0, got -0.2.",
        "Expected [mechanism] noise_multiplier or target_epsilon, got both; leave one out.",
        "Expected [tuning] distribution to be one of geometric, logarithmic, poisson, got 'poison' "
        "(meant: 'poisson'?).",
        "Expected a number or a list for [[optimizer]] number 1: learning_rate, got a range; "
        "add [draws] with count and public_seed.",
        "Expected num_steps or num_epochs, got both; leave one out.",
    ]


RATES = "learning_rate = [0.1, 0.2, 0.3]"
CLIPS = "l2_clip_norm = [0.5, 1.0]"
EPOCHS = "num_epochs = 5"


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        (EPOCHS, "", "Expected num_steps, got nothing; add it, or num_epochs for a data set."),
        (EPOCHS, "num_epoch = 5", "has no key 'num_epoch'; did you mean 'num_epochs'?"),
        (EPOCHS, "num_epochs = 0", "Expected num_epochs >= 1, got 0."),
        (EPOCHS, "num_epochs = 5\nnum_steps = 5", "Expected num_steps or num_epochs, got both; leave one out."),
        (EPOCHS, "num_epochs = 5\nrecord_last_epochs = 6", "Expected record_last_epochs <= num_epochs = 5, got 6."),
        (EPOCHS, "num_steps = 5\nrecord_last_epochs = 2", "Expected num_epochs beside record_last_epochs, got none"),
        ("num_records = 2", "record_at = [20]", "Expected record_at <= num_steps = 10, got 20."),
        ("[50, 12]", "[50, 50]", "Expected [mechanism] batch_size to be distinct values"),
        ("[50, 12]", "[]", "Expected at least one value in [mechanism] batch_size, got none."),
        ("[50, 12]", "{log_uniform = [5, 50]}", "Expected [mechanism] batch_size to be a number, got {"),
        ("[50, 12]", "[500, 12]", "Expected 0 < batch_size <= num_examples = 120, got 500"),
        ("[50, 12]", '[50.5, 12]\nsampler = "shuffled"', "whole number for shuffled batches, got 50.5."),
        ("[50, 12]", '12\nsampler = "stream"', "the rows of a data set, got stream"),
        (CLIPS, "l2_clip_norm = [0.5, 0]", "Expected [mechanism] l2_clip_norm[1] > 0, got 0"),
        (CLIPS, "l2_clip_norm = 0", "Expected [mechanism] l2_clip_norm > 0, got 0"),
        ("[0.1, 0.2, 0.4]", "[0.1, 0.1]", "Expected [[optimizer]] number 2: l2_clip_norm to be distinct values"),
        (RATES, "learning_rate = {log_uniform = [0.1, 1]}", "learning_rate, got a range; add [draws]"),
        ("[0.5, 2.0]", "{log_uniform = [0.5, 2]}", "[mechanism] noise_multiplier, got a range; add [draws]"),
        ("noise_multiplier = [0.5, 2.0]", "target_epsilon = {log_uniform = [0.5, 2]}", "target_epsilon to be"),
        (MECHANISM, MECHANISM.replace("[mechanism]", "[[mechanism]]"), "table [mechanism], got a list; write one."),
        (MECHANISM, MECHANISM.replace("[mechanism]", "[mechanisms]"), "no table 'mechanisms'; did you mean"),
        (IRIS, IRIS.replace("[problem]", "[[problem]]") * 2, "got [[problem]] number 2 twice; leave one out."),
        (IRIS, f"[[problem]]{QUADRATIC}[[problem]]\nkind = 'bundled'\nname = 'iris'\n", "no epochs, got num_epochs"),
        (IRIS, IRIS.replace('"iris"', '"irs"'), "(meant: 'iris'?)"),
        (ADAM, ADAM * 2, "Expected distinct optimizers, got [[optimizer]] number 3 twice; leave one out."),
        (SGD + ADAM, SGD.replace("[[optimizer]]", "[optimizer]"), "[[optimizer]], got one in single brackets; double"),
        (ADAM, ADAM.replace("optimizer", "optimiser"), "has no table 'optimiser'; did you mean 'optimizer'?"),
        (WHOLE, "num_seeds = 2\n" + WHOLE + TUNING, "no num_seeds beside [tuning]"),
        (WHOLE, "insecure_seeds = [2]\n" + WHOLE + TUNING, "no insecure_seeds"),
        (ADAM, ADAM + "[tuning]\nmean_trials = 20.0", "Expected [tuning] distribution, got nothing; add it."),
        (ADAM, ADAM + "[tuning]\nmean_trials = 0.5\ndistribution = 'poisson'", "[tuning] mean_trials >= 1, got 0.5"),
        (ADAM, ADAM + "[tuning]\nmean_trials = inf\ndistribution = 'poisson'", "mean_trials to be a finite number"),
    ],
)  # fmt: skip
def test_one_mistake_in_a_grid_is_one_sentence(sweep, old, new, sentence):
    assert old in WHOLE
    mistakes = mistakes_in(sweep, WHOLE.replace(old, new, 1))
    assert len(mistakes) == 1 and sentence in mistakes[0], mistakes


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        ("count = 6\n", "", "Expected [draws] count, got nothing; add it."),
        ("count = 6", "count = 0", "Expected [draws] count >= 1, got 0."),
        ("public_seed = 7", "", "Expected [draws] public_seed, got nothing; add it."),
        ("public_seed = 7", "public_sed = 7", "has no key 'public_sed'; did you mean 'public_seed'?"),
        ("[draws]", "[draw]", "has no table 'draw'; did you mean 'draws'?"),
        ("{log_uniform = [0.01, 1.0]}", "0.1", "range {log_uniform = [low, high]} in [[optimizer]] number 1"),
        ("[0.01, 1.0]", "[1.0, 0.01]", "with 0 < low < high, got {'log_uniform': [1.0, 0.01]}."),
        ("[0.01, 1.0]", "[0.0, 1.0]", "with 0 < low < high"),
        ("[0.01, 1.0]", "[0.01, inf]", "with 0 < low < high"),
        ("[0.01, 1.0]", "[0.1]", "with 0 < low < high"),
        ("{log_uniform = [0.01, 1.0]}", "{uniform = [0.01, 1.0]}", "a range {log_uniform = [low, high]} with"),
    ],
)  # fmt: skip
def test_one_mistake_in_draws_is_one_sentence(sweep, old, new, sentence):
    assert old in DRAWN
    mistakes = mistakes_in(sweep, DRAWN.replace(old, new, 1))
    assert len(mistakes) == 1 and sentence in mistakes[0], mistakes


def test_a_range_of_the_mechanism_is_a_range_of_each_optimizer_without_its_own_clip(sweep):
    text = WHOLE.replace(CLIPS, "l2_clip_norm = {log_uniform = [0.5, 1.0]}") + DRAWS
    (mistake,) = mistakes_in(sweep, text)
    assert "in [[optimizer]] number 2 to draw from, got numbers and lists alone" in mistake


junk = st.recursive(
    st.integers(-2, 3) | st.sampled_from([0.5, math.nan, math.inf, "poisson", "dp-sgd", "quadratic", "", True]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["log_uniform", "name", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)
PLACES = [
    (section, key)
    for section, table in tomllib.loads(DRAWN).items()
    for key in [None, *(table if isinstance(table, dict) else {})]
] + [("optimizer", 0), ("record_at", None), ("record_last_epochs", None), ("tuning", None), ("num_steps", None)]


@settings(max_examples=300, deadline=None)
@given(places=st.lists(st.sampled_from(PLACES), min_size=1, max_size=3), values=st.lists(junk, min_size=3, max_size=3))
def test_junk_is_refused_or_read_and_never_a_traceback(places, values):
    tables = tomllib.loads(DRAWN)
    for (section, key), value in zip(places, values):
        if key is None:
            tables[section] = value
        elif isinstance(tables[section], dict | list) and tables[section]:
            tables[section][key if isinstance(tables[section], dict) else 0] = value
    with mock.patch("noisecast.scenario_file.document._read_toml", return_value=("", tables)):
        try:
            assert read_document("sweep.toml", beyond_a_scenario).optimizers
        except ScenarioFileError as error:
            assert all(mistake.startswith("sweep.toml: ") for mistake in error.mistakes)


def test_mistakes_in_all_data_are_reported_at_once(sweep):
    problems = "".join(f'[[problem]]\nkind = "file"\npath = "{name}.csv"\n' for name in ("here", "there"))
    problems += '[[problem]]\nkind = "bundled"\nname = "iris"\n'
    mistakes = mistakes_in(sweep, WHOLE.replace(IRIS, problems).replace("[50, 12]", "[500, 50, 5000]"))
    assert len(mistakes) == 4
    for mistake, words in zip(mistakes, ("here.csv", "there.csv", "got 500", "got 5000"), strict=True):
        assert words in mistake


ONE = WHOLE.replace("[50, 12]", "12").replace("[0.5, 1.0]", "1.0").replace("[0.1, 0.2, 0.4]", "0.1")


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        (IRIS, f"{IRIS.replace('[problem]', '[[problem]]')}[[problem]]\nkind = 'bundled'\nname = 'digits'\n",
         "Expected one [problem] in a scenario file, got 2; use noisecast sweep."),
        ("batch_size = 12", "batch_size = [12, 24]",
         "Expected one number for [mechanism] batch_size in a scenario file, got [12, 24]; use noisecast sweep."),
        (ONE, DRAWN.replace("[50, 12]", "12").replace("[0.5, 1.0]", "1.0"),
         "Expected no table [draws] in a scenario file, got one; use noisecast sweep."),
        (ONE, ONE + "[tuning]\nmean_trials = 2\ndistribution = 'poisson'\n",
         "Expected no table [tuning] in a scenario file, got one; use noisecast sweep."),
    ],
)  # fmt: skip
def test_a_scenario_file_refuses_what_is_a_sweep(sweep, old, new, sentence):
    text = ONE.replace(old, new)
    (mistake,) = mistakes_in(sweep, text, read_scenario_file)
    assert sentence in mistake
    assert len(sweep(text).questions) >= 1


# --- Examples --------------------------------------------------------------------------------------------------------


def test_the_example_is_a_sweep_of_three_optimizers():
    found = read_sweep_file(EXAMPLES / "sweep.toml")
    names = [{s.optimizer.name for s in question.scenarios} for question in found.questions]
    assert names == [{"DP-SGD", "DP-SignSGD", "DP-Adam"}] * len(names)


def test_protocol_b_is_the_papers_grid(tmp_path):
    """L1885-1891 of the paper: 11 noise multipliers, 13 x 3 cells for DP-SGD and 10 x 4 for each of the others."""
    text = (EXAMPLES / "imdb_protocol_b.toml").read_text(encoding="utf-8")
    raw = tomllib.loads(text)
    cells = [len(table["learning_rate"]) * len(table["l2_clip_norm"]) for table in raw["optimizer"]]
    assert len(raw["mechanism"]["noise_multiplier"]) == 11 and cells == [39, 40, 40]
    rows = "".join(f"a word of {i},{i % 2}\n" for i in range(64))
    for name in ("imdb_train.csv.gz", "imdb_test.csv.gz"):
        text = text.replace(name, name.removesuffix(".gz"))
        (tmp_path / name.removesuffix(".gz")).write_text("text,label\n" + rows, encoding="utf-8")
    (tmp_path / "protocol.toml").write_text(text, encoding="utf-8")
    (question,) = read_sweep_file(tmp_path / "protocol.toml").questions
    assert len(question.scenarios) == 1309
    assert question.record_at[-5:] == (96, 97, 98, 99, 100)  # one step an epoch here


@pytest.mark.slow
def test_protocol_b_on_imdb(tmp_path):
    data = Path(os.environ.get("NOISECAST_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not (data / "imdb_train.csv.gz").exists():
        pytest.skip("needs imdb_train.csv.gz in the folder that NOISECAST_DATA names")
    text = (EXAMPLES / "imdb_protocol_b.toml").read_text(encoding="utf-8").replace("imdb_t", f"{data}/imdb_t")
    (tmp_path / "protocol.toml").write_text(text, encoding="utf-8")
    (question,) = read_sweep_file(tmp_path / "protocol.toml").questions
    assert len(question.scenarios) == 1309 and {s.num_steps for s in question.scenarios} == {39_000}
    assert question.record_at[-5:] == tuple(39_000 - 390 * epoch for epoch in (4, 3, 2, 1, 0))
