"""What `engines.start` takes, and how far a run goes: no steps but those that epsilon counts."""

import dataclasses

import numpy as np
import pytest
import scipy.sparse

from noisecast import DPSGD, DPSignSGD, Poisson, SampledGaussian, Scenario, Stream, engines, linear_model, quadratic
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.datasets import Dataset

ROOT = RandomRoot.from_insecure_seed(20261121)
ROWS = np.eye(12, 5, dtype=np.float32)


def scenario(engine: str) -> Scenario:
    sampler = Stream(4) if engine == "simulate" else Poisson(0.3, 4.0)
    problem = quadratic(np.ones(3), 1.0, example_noise_std=0.1)
    if engine != "simulate":
        rows = scipy.sparse.csr_array(ROWS) if engine == "row_sparse" else ROWS
        problem = linear_model(Dataset("rows", rows, np.arange(12, dtype=np.int32) % 2, ("a", "b")))
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=0.5, sampler=sampler)
    return Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=0.1), num_steps=12)


@pytest.mark.parametrize("engine", ["row_sparse", "dense", "simulate"])
def test_a_run_takes_no_step_that_epsilon_does_not_count(engine):
    asked = scenario(engine)
    assert engines.explain(asked).startswith(f"Computed by the engine {engine}.")
    run = engines.start([asked], repeats=[0], root=ROOT)
    run.advance(12)
    last = run.params.copy()
    with pytest.raises(ValueError, match="up to num_steps, 12"):
        run.advance(13)
    for behind in (11, -3):
        with pytest.raises(ValueError, match="from 12, which is reached"):
            run.advance(behind)
    np.testing.assert_array_equal(run.params, last)


@pytest.mark.parametrize("engine", ["row_sparse", "dense"])
def test_scenarios_of_two_groups_are_not_trained_as_one(engine):
    # Else the second would be trained by the first one's optimizer or sampler, and accounted by its own.
    first = scenario(engine)
    other_sampler = dataclasses.replace(first.mechanism, sampler=Poisson(0.5, 6.0))
    for change in (
        {"optimizer": DPSignSGD(learning_rate=0.1)},
        {"mechanism": other_sampler},
        {"mechanism": dataclasses.replace(first.mechanism, noise_multiplier=0.0)}
        if engine == "row_sparse"
        else {"num_steps": 9},
    ):
        with pytest.raises(ValueError, match="scenarios of one group"):
            engines.start([first, dataclasses.replace(first, **change)], repeats=[0], root=ROOT)


def test_nothing_is_no_group():
    for scenarios, repeats in (([], [0]), ([scenario("dense")], [])):
        with pytest.raises(ValueError, match="a scenario and a repeat at least"):
            engines.start(scenarios, repeats=repeats, root=ROOT)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"scenarios": scenario("dense")}, "put it into a list"),
        ({"scenarios": ["dp-sgd"]}, "a Scenario, got str"),
        ({"repeats": [-1]}, "whole numbers >= 0, got .-1."),
        ({"repeats": [0.5]}, "whole numbers >= 0"),
        ({"repeats": [3, 3]}, "different whole numbers"),
        ({"root": 7}, "root to be a RandomRoot, .* got 7"),
    ],
)
def test_a_wrong_argument_gets_a_sentence(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        engines.start(**{"scenarios": [scenario("dense")], "repeats": [0], "root": ROOT} | change)


def test_what_cannot_be_trained_is_said_first():
    asked = scenario("dense")
    stream = dataclasses.replace(asked, mechanism=dataclasses.replace(asked.mechanism, sampler=Stream(4)))
    assert engines.explain(stream).startswith("No engine can train this: ")
    with pytest.raises(ValueError, match="is a data set, not a stream"):
        engines.start([stream], repeats=[0], root=ROOT)
    with pytest.raises(ValueError, match="Expected a Scenario, got int"):
        engines.explain(3)


@pytest.mark.parametrize(
    "engine, at_once",
    [
        ("row_sparse", {"STEPS_PER_CHUNK": 32}),
        ("row_sparse", {"DRAWS_PER_CHUNK": 999}),
        ("dense", {"DRAWS_PER_CHUNK": 999}),
    ],
)
def test_steps_have_batches_of_their_own_however_many_are_drawn_at_once(engine, at_once, monkeypatch):
    """The law tests see the first hundred of thousands of steps: those behind must not be drawn like the first."""
    asked = dataclasses.replace(scenario(engine), num_steps=200)

    def params():
        run = engines.start([asked], repeats=[0], root=ROOT)
        run.advance(200)
        return run.params

    whole = params()
    for name, few in at_once.items():
        monkeypatch.setattr(getattr(engines, engine), name, few)
    np.testing.assert_allclose(params(), whole, rtol=1e-5)
