"""Forecasts by processes beside this one: the same numbers, whatever becomes of the processes."""

import os
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from noisecast import DPSGD, DPAdam, Poisson, SampledGaussian, Scenario, bundled, linear_model
from noisecast.forecasting import forecasters
from noisecast.forecasting.forecasters import Forecasters
from noisecast.optimizers import with_learning_rate
from noisecast.runners import Moments

FEW = Moments(full_covariance_features=5, time_steps=3)
PROBLEM = linear_model(*bundled("breast_cancer"))


def asked():
    mechanism = SampledGaussian(
        noise_multiplier=1.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(32, PROBLEM.num_examples)
    )
    scenario = Scenario(problem=PROBLEM, mechanism=mechanism, optimizer=DPSGD(learning_rate=1.0), num_steps=50)
    kinds = DPSGD(learning_rate=1.0), DPAdam(learning_rate=0.01)
    return [
        Scenario(**{**vars(scenario), "optimizer": with_learning_rate(kind, rate)})
        for kind in kinds
        for rate in (0.01, 0.1, 1.0)
    ]


def losses(found):
    return np.array([forecast.metrics["loss"] for forecast in found])


@pytest.mark.slow
def test_processes_give_the_same_numbers_in_the_same_order_and_may_be_killed(monkeypatch):
    monkeypatch.setattr(forecasters, "WORTH_PROCESSES", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    scenarios = asked()
    here = losses(FEW.forecasts(scenarios, [10]))
    assert len(set(here[:, -1])) == len(scenarios)
    with Forecasters(PROBLEM) as ask:
        assert ask.num_processes == 2
        assert losses(ask(FEW, scenarios, [10])) == pytest.approx(here, rel=1e-12)
        for process in ask._processes:
            process.kill()
        assert losses(ask(FEW, scenarios, [10])) == pytest.approx(here, rel=1e-12)
        processes = ask._processes
    assert processes and not any(process.is_alive for process in processes)


@pytest.mark.slow
def test_processes_start_while_a_problem_is_read_and_wait_for_it(monkeypatch):
    monkeypatch.setattr(forecasters, "WORTH_PROCESSES", 1)
    monkeypatch.setattr(forecasters, "LONG_READING", 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    with Forecasters() as ask:
        ask._start_soon.join()
        early = list(ask._processes)
        assert losses(ask.about(PROBLEM)(FEW, asked()[:2], [])).shape == (2, 1)
        assert early and ask._processes == early
    assert not any(process.is_alive for process in early)


@pytest.mark.parametrize("becomes", ["small", "nothing"])
def test_processes_that_were_started_for_nothing_end(monkeypatch, becomes):
    monkeypatch.setattr(forecasters, "LONG_READING", 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    with suppress(ValueError), Forecasters() as ask:
        ask._start_soon.join()
        early = list(ask._processes)
        if becomes == "nothing":
            raise ValueError("no file")
        assert ask.about(PROBLEM).num_processes == 0 and losses(ask(FEW, asked()[:1], [])).shape == (1, 1)
        assert not any(process.is_alive for process in early)
    assert early and not any(process.is_alive for process in early)


def test_each_ends_at_its_own_last_step():
    scenarios = [replace(asked()[0], num_steps=num_steps) for num_steps in (50, 20, 10)]
    found = list(Forecasters(PROBLEM)(FEW, scenarios, [15]))
    assert [forecast.steps.tolist() for forecast in found] == [[15, 50], [15, 20], [10]]


def test_what_a_forecast_raises_is_raised_where_it_was_asked(monkeypatch):
    monkeypatch.setattr(forecasters, "WORTH_PROCESSES", 1)
    with Forecasters(PROBLEM) as ask, pytest.raises(AttributeError, match="forecasts"):
        list(ask(None, asked()[:1], []))


def test_few_examples_are_not_worth_a_process():
    assert Forecasters(PROBLEM).num_processes == 0
