"""The tasks carry the paper's numbers."""

import importlib
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from noisecast.optimizers import DPSGD, OPTIMIZERS, DPAdam, DPSignSGD
from noisecast.privacy.accounting import nominal_epsilon
from noisecast.problems.datasets import DataError, Dataset
from noisecast.problems.linear import linear_model
from noisecast.reproduction.tasks import FORUM, IMDB, MOVIELENS_PAPER_LIKE, SCALES, TASKS, Setting, _with_classes

DATA = os.environ.get("NOISECAST_DATA")


def toy_problem(num_examples: int = 640):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(num_examples, 3)).astype(np.float32)
    return linear_model(Dataset("toy", features, rng.integers(2, size=num_examples), ("a", "b")))


@pytest.mark.parametrize(
    "task, num_examples, batch_size, steps",
    [(IMDB, 25_000, 64, 39_000), (IMDB, 25_000, 48, 52_000), (FORUM, 246_092, 64, 192_250),
     (MOVIELENS_PAPER_LIKE, 80_000, 64, 62_500)],
)  # fmt: skip
def test_steps_are_those_of_the_paper(task, num_examples, batch_size, steps):
    assert task.num_steps(num_examples, batch_size) == steps


@pytest.mark.parametrize("noise_multiplier, printed, agrees", [(0.5, 0.848, True), (8, 0.053, True), (4, 0.053, False)])
def test_the_nominal_epsilon_of_stackoverflow_is_the_printed_one(noise_multiplier, printed, agrees):
    nominal = nominal_epsilon(
        noise_multiplier=noise_multiplier,
        sampling_probability=64 / 246_092,
        num_steps=FORUM.num_steps(246_092),
        target_delta=FORUM.target_delta,
    )
    assert (abs(nominal - printed) < 6e-4) == agrees


def test_a_scenario_is_as_tuned_or_as_asked():
    problem = toy_problem()
    tuned = IMDB.scenario(problem, DPSGD, 2.0)
    assert (tuned.optimizer.learning_rate, tuned.mechanism.l2_clip_norm, tuned.num_steps) == (5, 0.5, 1000)
    asked = IMDB.scenario(problem, DPSignSGD, 2.0, batch_size=32, setting=Setting(0.3, 2.0))
    assert (asked.optimizer.learning_rate, asked.mechanism.l2_clip_norm, asked.num_steps) == (0.3, 2.0, 2000)
    assert asked.mechanism.expected_batch_size == 32
    assert [s.optimizer.name for s in IMDB.scenarios(problem, (1.0, 2.0))] == [
        kind.name for kind in OPTIMIZERS for _ in range(2)
    ]


@pytest.mark.parametrize("scale", SCALES)
def test_every_task_is_tuned_for_every_optimizer_at_both_scales(scale):
    assert len(TASKS[scale]) == 4 and len({task.name for task in TASKS[scale]}) == 4
    for task in TASKS[scale]:
        assert set(task.tuned) == set(task.protocol_b) == set(OPTIMIZERS)
        for numbers in (task.floors, task.speed, task.threshold):
            assert list(numbers) == sorted(set(numbers))


def test_the_quick_tasks_ask_for_a_part_of_the_papers():
    for quick, paper in zip(TASKS["quick"], TASKS["paper"]):
        for field in ("floors", "budgets"):  # where slopes need a longer lever, the quick ones have it
            assert set(getattr(quick, field)) <= set(getattr(paper, field)) | {3.0, 5.0, 6.0}
        # A crossing needs points that lie close, inside the paper's range.
        assert paper.threshold[0] <= quick.threshold[0] and quick.threshold[-1] <= paper.threshold[-1]
        assert max(b / a for a, b in pairwise(quick.threshold)) < 1.25


def test_seeds_are_known_and_every_optimizer_has_its_number():
    """Run again, a figure comes out the same."""
    task = replace(IMDB, num_seeds=3, seeds_of={DPAdam: 2})
    scenarios = task.scenarios(toy_problem(), (1.0, 2.0))
    asked = task.questions(scenarios, (0,))
    assert [(len(question.scenarios), question.insecure_seeds) for question in asked] == [(4, (0, 1, 2)), (2, (0, 1))]
    assert {s.optimizer.name for s in asked[1].scenarios} == {"DP-Adam"}
    assert sorted(s.id for q in asked for s in q.scenarios) == sorted(s.id for s in scenarios)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("figure", ["protocol_b_sweeps", "table_tuned"])
def test_all_questions_of_a_tuning_figure_have_known_seeds(figure, scale):
    """A sweep's runs are all from known seeds, or none is: forecasts as well, though they have none."""
    module = importlib.import_module(f"noisecast.reproduction.{figure}")
    for plan in module.PLANS[scale]:
        problem = replace(toy_problem(), name=f"toy {plan.task.key.replace('-', ', ', 1)}")
        task = replace(plan.task, load=lambda _, problem=problem: problem)
        asked = list(module._questions(replace(plan, task=task), None))
        assert asked and all(question.insecure_seeds for question in asked)


def test_classes_are_chosen_by_number():
    data = Dataset("toy", np.eye(4, dtype=np.float32), np.array([2, 0, 1, 0]), ("a", "b", "c"))
    part = _with_classes(data, 2)
    assert part.labels.tolist() == [0, 1, 0] and part.label_names == ("a", "b") and part.num_examples == 3


@pytest.mark.parametrize("figure", ["fig_floors", "fig_speed", "fig_threshold", "fig_protocol_b", "table_tuned"])
@pytest.mark.parametrize(
    "asked, missing",
    [("imdb", "IMDB"), ("forum500", "forum"), ("movielens", "MovieLens"), ("movielens-centred", "MovieLens")],
)
def test_the_data_of_a_task_that_is_not_asked_for_are_not_read(figure, asked, missing, tmp_path):
    module = importlib.import_module(f"noisecast.reproduction.{figure}")
    with pytest.raises(DataError, match=missing):  # of a folder without any
        module.questions("paper", tmp_path, asked)
    assert module.questions("paper", tmp_path, "mnist") == ()


def test_a_data_set_asks_for_all_its_tasks():
    found = [[task.key for task in TASKS["paper"] if task.is_among(asked)] for asked in ("movielens", IMDB.key, None)]
    assert found[:2] == [["movielens-paper-like", "movielens-centred"], ["imdb"]] and len(found[2]) == 4


@pytest.mark.skipif(not DATA, reason="NOISECAST_DATA is not set")
def test_movielens_trains_on_four_fifths_of_the_ratings():
    problem = MOVIELENS_PAPER_LIKE.load(Path(str(DATA)))
    assert problem.num_examples == 80_000 and problem.num_params == 262_500
