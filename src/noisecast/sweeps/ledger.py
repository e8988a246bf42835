"""What a sweep does to the data, for the accountant: which runs it makes, and how they were decided on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from noisecast.engines.keys import batch_key
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.noise import RandomRoot
from noisecast.privacy.tuning import Cell, Run, TrialDistribution
from noisecast.question import Question
from noisecast.runners import Training
from noisecast.scenario import Scenario

_ANY_ROOT = RandomRoot.from_insecure_seed(0)  # keys are compared, never drawn from


@dataclass(frozen=True)
class Ledger:
    """All runs of a sweep, whether they have finished or not.

    Args:
      runs: every training run, by scenario id and seed.
      is_private: whether all randomness came from the operating system; a seed that is known undoes the noise.
      trials: the law that the number of runs was drawn from; None: a grid that was fixed beforehand.
      cells: all that a trial could have drawn; empty for a grid.
      has_grown: whether runs were added after others could be looked at: which ones, their metrics may have decided.
      answers: (scenario id, runner) of all that other runners were asked; None: not known, of an older version.
    """

    runs: Mapping[tuple[str, int], Run]
    is_private: bool
    trials: TrialDistribution | None = None
    cells: tuple[Cell, ...] = ()
    has_grown: bool = False
    answers: frozenset[tuple[str, str]] | None = frozenset()

    def after(self, before: Ledger | None) -> Ledger:
        """This ledger of a store where runs have finished under another one; None: nobody knows under which."""
        if before is None:
            return replace(self, has_grown=True)
        added = not self.runs.keys() <= before.runs.keys()
        answers = None
        if self.answers is not None and before.answers is not None:
            answers = self.answers | before.answers
        return replace(self, runs={**before.runs, **self.runs}, has_grown=before.has_grown or added, answers=answers)


def ledger_as_data(ledger: Ledger) -> dict[str, Any]:
    """As JSON has it; `ledger_from` reads it."""
    mechanisms = list(dict.fromkeys([run.mechanism for run in ledger.runs.values()] + [m for m, _ in ledger.cells]))
    number = {mechanism: i for i, mechanism in enumerate(mechanisms)}
    return {
        "mechanisms": [mechanism.as_data() for mechanism in mechanisms],
        "runs": [[*k, number[run.mechanism], run.num_steps, run.batches] for k, run in ledger.runs.items()],
        "cells": [[number[mechanism], num_steps] for mechanism, num_steps in ledger.cells],
        "trials": None if ledger.trials is None else {"kind": str(ledger.trials.kind), "mean": ledger.trials.mean},
        "is_private": ledger.is_private,
        "has_grown": ledger.has_grown,
        "answers": None if ledger.answers is None else sorted(ledger.answers),
    }


def ledger_from(data: dict[str, Any]) -> Ledger:
    """Back from `ledger_as_data`. KeyError, TypeError or ValueError for anything else."""
    mechanisms = [SampledGaussian.from_data(each) for each in data["mechanisms"]]
    return Ledger(
        runs={
            (scenario, seed): Run(mechanisms[m], steps, batches) for scenario, seed, m, steps, batches in data["runs"]
        },
        is_private=data["is_private"],
        has_grown=data["has_grown"],
        trials=None if data["trials"] is None else TrialDistribution(**data["trials"]),
        cells=tuple((mechanisms[m], steps) for m, steps in data["cells"]),
        answers=None if data.get("answers") is None else frozenset((s, runner) for s, runner in data["answers"]),
    )


def ledger_of(
    questions: Sequence[Question],
    *,
    trials: TrialDistribution | None = None,
    drawn_from: Sequence[Question] = (),
) -> Ledger:
    """The ledger of a sweep whose runs all derive from one root, as those of one store do.

    Args:
      questions: as they are run.
      trials, drawn_from: where `draw_trials` made them: its arguments.
    Raises: ValueError when only one of trials and drawn_from is given.
    """
    if (trials is None) != (not drawn_from):
        raise ValueError("Expected both trials and what they were drawn from, or neither; give both for random trials.")
    runs, answers = {}, set()
    for question in questions:
        names = [runner.name for runner in question.runners if runner.name != Training.name]
        answers |= {(scenario.id, name) for scenario in question.scenarios for name in names}
        if any(isinstance(runner, Training) for runner in question.runners):
            for scenario in filter(_is_trained, question.scenarios):
                runs |= {(scenario.id, seed): _run(scenario, seed) for seed in _seeds(question)}
    return Ledger(
        runs=runs,
        is_private=all(question.insecure_seeds is None for question in questions),
        trials=trials,
        cells=tuple((s.mechanism, s.num_steps) for _, s in _cells(drawn_from)),
        answers=frozenset(answers),
    )


def draw_trials(
    questions: Sequence[Question], trials: TrialDistribution, rng: np.random.Generator
) -> tuple[Question, ...]:
    """K trials, each a uniformly random cell of all that the questions ask, with a seed of its own.

    Draw once. What is drawn stays secret, its number above all, and all of it is run (`TrialDistribution`).

    Args:
      questions: whose scenarios are the cells.   trials: the law of K.
      rng: from the operating system's entropy, `numpy.random.default_rng()`.
    Returns: one question a trial; none where K is 0, as a Poisson law allows: then there is no model to release.
    Raises: ValueError: no cell, one that cannot be trained, or insecure seeds.
    """
    cells = _cells(questions)
    if not cells:
        raise ValueError("Expected at least one scenario to draw trials from, got none.")
    if any(question.insecure_seeds is not None for question in questions):
        raise ValueError("Expected trials without insecure seeds: who knows the seeds knows how many there are.")
    for _, scenario in cells:
        if (reason := Training().why_unsupported(scenario)) is not None:
            raise ValueError(f"Expected cells that can be trained: {reason}")
    drawn = []
    for _ in range(trials.draw(rng)):
        question, scenario = cells[int(rng.integers(len(cells)))]
        # A number that says nothing of how many others there are, and that no other trial has.
        seed = {"num_seeds": 1, "first_seed": int(rng.integers(2**62))}
        steps = tuple(step for step in question.record_at if step <= scenario.num_steps)
        drawn.append(replace(question, scenarios=(scenario,), runners=(Training(),), record_at=steps, **seed))
    return tuple(drawn)


def _cells(questions: Sequence[Question]) -> list[tuple[Question, Scenario]]:
    """Each scenario once."""
    return list({s.id: (question, s) for question in questions for s in question.scenarios}.values())


def _is_trained(scenario: Scenario) -> bool:
    return Training().why_unsupported(scenario) is None


def _seeds(question: Question) -> Sequence[int]:
    if question.insecure_seeds is not None:
        return question.insecure_seeds
    return range(question.first_seed, question.first_seed + question.num_seeds)


def _run(scenario: Scenario, seed: int) -> Run:
    # The engines' own name of the batches: what shares them there shares them here.
    batches = batch_key(scenario, root=_ANY_ROOT, repeat=seed).hex()
    return Run(scenario.mechanism, scenario.num_steps, batches)
