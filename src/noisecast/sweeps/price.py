"""What choosing from a sweep costs: nothing on public data, every run counted, or the best of random trials.

A price that counts private runs covers a choice by what those runs release, scored on held-out examples, which are then
not protected. A score of the training examples, or a forecast, is computed from private data without noise: no theorem
covers a choice by it, and its epsilon is inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from noisecast.privacy.accounting import epsilon_text
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.tuning import TrialDistribution, composed_epsilon, repeat_select_epsilon
from noisecast.runners import Training
from noisecast.sweeps.ledger import Ledger
from noisecast.table import METRICS

HELD_OUT = "test_"
_NOT_COVERED = (
    "Not covered: the held-out examples that the score is computed from, whatever else was computed without noise "
    "(training losses, forecasts), and runs outside this sweep."
)


class Choice(NamedTuple):
    """A choice as far as its price depends on it: by which metric of which runner; epsilon and delta of one run."""

    metric: str
    runner: str
    epsilon: float
    target_delta: float


class Priced(NamedTuple):
    """Epsilon of one run and of the whole procedure, and both in words."""

    epsilon_of_run: float
    epsilon_of_procedure: float
    meaning: str


class Price(Protocol):
    """One way to pay for a choice."""

    name: ClassVar[str]
    only_best: ClassVar[bool]  # whether the best single run is all that may ever be told

    def why_unfit(self, ledger: Ledger | None, runs: set[tuple[str, int]]) -> str | None:
        """A sentence when this price does not fit the sweep whose table holds these training runs, else None."""
        ...

    def priced(self, choice: Choice, ledger: Ledger | None) -> Priced:
        """What the choice cost."""
        ...


@dataclass(frozen=True)
class Public:
    """The sweep ran on public data, and the model will be trained once on the private data: choosing costs nothing.

    Args:
      reason: why the data of the sweep are public, in the words of whoever answers for it.

    >>> Public("")
    Traceback (most recent call last):
    ValueError: Expected a reason why the data of the sweep are public, got none; say it in words.
    """

    name: ClassVar[str] = "public"
    only_best: ClassVar[bool] = False
    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise ValueError("Expected a reason why the data of the sweep are public, got none; say it in words.")

    def why_unfit(self, ledger: Ledger | None, runs: set[tuple[str, int]]) -> str | None:
        return None

    def priced(self, choice: Choice, ledger: Ledger | None) -> Priced:
        meaning = (
            f"The sweep's data are declared public ({self.reason.strip().rstrip('.')}), so choosing by "
            f"{METRICS[choice.metric].label} cost no privacy: one run on private data with this mechanism and number "
            f"of steps has {_guarantee(choice.epsilon, choice.target_delta)}, and so has the procedure. Where the "
            "private data have another size or batches another, that run's epsilon is another: account for it anew."
        )
        return Priced(choice.epsilon, choice.epsilon, meaning)


@dataclass(frozen=True)
class Compose:
    """Every run of the sweep is counted; all its models may be released."""

    name: ClassVar[str] = "compose"
    only_best: ClassVar[bool] = False

    def why_unfit(self, ledger: Ledger | None, runs: set[tuple[str, int]]) -> str | None:
        if ledger is not None and ledger.trials is not None:
            return (
                "Expected the price repeat-select for a sweep of random trials, got compose: counting the trials tells "
                "how many they were, and a price chosen after looking covers nothing."
            )
        if ledger is not None and runs and len(runs) < len(ledger.runs):
            return (
                f"Expected all {len(ledger.runs):,} runs of the sweep in the table, got {len(runs):,}; run the sweep "
                "again to finish it."
            )
        return _why_not_its_ledger(self.name, ledger, runs)

    def priced(self, choice: Choice, ledger: Ledger | None) -> Priced:
        assert ledger is not None
        if (uncovered := _uncovered(self.name, choice, ledger)) is not None:
            return uncovered
        runs = list(ledger.runs.values())
        spent = composed_epsilon(runs, target_delta=choice.target_delta)
        shared = len({run.batches for run in runs}) < len(runs)
        sharing = " Runs of one seed share their batches, and are counted so." if shared else ""
        meaning = (
            f"Chosen by {METRICS[choice.metric].label} among {len(runs):,} runs on the private data: releasing all "
            f"their models has {_guarantee(spent.epsilon, spent.target_delta)} with respect to "
            f"{_neighbours(runs[0].mechanism)} one training example, by the {spent.accountant} accountant; one run "
            f"alone has ε = {epsilon_text(choice.epsilon, 3)}.{sharing} {_NOT_COVERED}"
        )
        return Priced(choice.epsilon, spent.epsilon, meaning)


@dataclass(frozen=True)
class RepeatSelect:
    """The sweep ran a random number of trials, and only the best of them is ever released (`draw_trials`).

    Args:
      trials: the law that their number was drawn from.
    """

    name: ClassVar[str] = "repeat_select"
    only_best: ClassVar[bool] = True
    trials: TrialDistribution

    def why_unfit(self, ledger: Ledger | None, runs: set[tuple[str, int]]) -> str | None:
        if ledger is None or ledger.trials is None:
            reason = None if ledger is not None else _why_not_its_ledger(self.name, ledger, runs)
            return reason or (
                "Expected a sweep of random trials for repeat_select, got a fixed grid, whose number of runs is no "
                "secret: count every run with compose, or sweep again with random trials."
            )
        if self.trials != ledger.trials:
            return f"Expected the trials that the sweep drew, {ledger.trials}, got {self.trials}."
        if not ledger.runs:
            return (
                "The number of trials that was drawn is 0: no model is what this procedure releases. Drawing again "
                "would be another procedure, with another epsilon."
            )
        if len({run.batches for run in ledger.runs.values()}) < len(ledger.runs):
            return "Expected trials with batches of their own, got some that share a seed; make them with draw_trials."
        if len(runs) < len(ledger.runs):
            return (
                f"Expected all {len(ledger.runs)} trials in the table, got {len(runs)}: leaving some out is not "
                "covered; run the sweep again to finish it, and hand over the whole table."
            )
        return _why_not_its_ledger(self.name, ledger, runs)

    def priced(self, choice: Choice, ledger: Ledger | None) -> Priced:
        assert ledger is not None
        if (uncovered := _uncovered(self.name, choice, ledger)) is not None:
            return uncovered
        spent = repeat_select_epsilon(ledger.cells, trials=self.trials, target_delta=choice.target_delta)
        meaning = (
            f"The best by {METRICS[choice.metric].label} of a random number of trials ({self.trials.kind}, mean "
            f"{self.trials.mean:g}), each of a cell drawn at random: releasing it alone has "
            f"{_guarantee(spent.epsilon, spent.target_delta)} with respect to {_neighbours(ledger.cells[0][0])} one "
            f"training example (Papernot and Steinke, 2022); one run alone has ε = {epsilon_text(choice.epsilon, 3)}. "
            "The number of trials, and all of them but the best, must stay secret: keep the store to yourself. "
            f"{_NOT_COVERED}"
        )
        return Priced(choice.epsilon, spent.epsilon, meaning)


def _why_not_its_ledger(name: str, ledger: Ledger | None, runs: set[tuple[str, int]]) -> str | None:
    if ledger is None:
        return f"Expected the sweep's ledger to price {name}, got none; take it from the store."
    if not runs <= set(ledger.runs):
        return "Expected every training run of the table in the ledger, got others; take both from one store."
    return None


def _uncovered(name: str, choice: Choice, ledger: Ledger) -> Priced | None:
    """The infinite price of a choice that no theorem covers; None if one does."""
    one_run, label = choice.epsilon, METRICS[choice.metric].label
    if not ledger.is_private:
        one_run = math.inf
        reason = (
            "the noise was drawn from seeds that make the runs reproducible, so whoever knows them can take it away. "
            "Sweep without insecure seeds for a guarantee."
        )
    elif ledger.has_grown:
        reason = (
            "runs were added to the sweep after others had finished, and which ones may have been decided by losses of "
            "the private examples. Sweep in a new folder, all at once."
        )
    elif choice.runner != Training.name:
        reason = (
            f"what the runner {choice.runner} says is computed from the private examples without noise, and {name} "
            "does not cover it. Select by the runner training, or forecast from public data."
        )
    elif not choice.metric.startswith(HELD_OUT):
        held_out = HELD_OUT + choice.metric if HELD_OUT + choice.metric in METRICS else HELD_OUT + "loss"
        reason = (
            f"the {label} is computed from the private examples without noise, and {name} does not cover a choice by "
            f"it. Select by {held_out} instead."
        )
    else:
        return None
    meaning = (
        f"The procedure has no privacy guarantee (ε = inf): {reason} One run alone has "
        f"{_guarantee(one_run, choice.target_delta)}."
    )
    return Priced(one_run, math.inf, meaning)


def _guarantee(epsilon: float, target_delta: float) -> str:
    return f"ε = {epsilon_text(epsilon, 3)} at δ = {target_delta:g}"


def _neighbours(mechanism: SampledGaussian) -> str:
    return mechanism.sampler.neighbours(mechanism.adjacency)
