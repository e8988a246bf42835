"""The tables of a file but its problems: settings, mechanism, optimizers, draws, tuning."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from noisecast.optimizers import OPTIMIZERS, SHAPES, Optimizer, Schedule
from noisecast.privacy.accounting import default_delta
from noisecast.privacy.tuning import TrialDistribution, TrialKind
from noisecast.runners import RUNNERS, Moments
from noisecast.scenario_file.values import (
    LISTED,
    Count,
    NotNegativeValues,
    OneOrMorePositive,
    Positive,
    PositiveValues,
    Table,
    Values,
    one_of,
)

# Each optimizer lives in a file of its own, dp_sign_sgd.py, and is typed by that name: dp-sign-sgd.
OPTIMIZER_NAMES = {each.__module__.rsplit(".", 1)[-1].replace("_", "-"): each for each in OPTIMIZERS}
# Settings that only some of them have.
OWN_SETTINGS = ("b1", "b2", "eps")
SAMPLERS = ("poisson", "fixed-size", "shuffled", "stream")
RUNNER_NAMES = {runner.name: runner for runner in (*RUNNERS, Moments())}


class Settings(Table):
    """What stands above the first table."""

    num_steps: Count | None = None
    num_epochs: Count | None = None
    target_delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    num_seeds: Count = 1
    insecure_seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], *LISTED] | None = None
    num_records: Count = 20
    record_at: Annotated[list[Annotated[int, Field(ge=0)]], *LISTED] | None = None
    record_last_epochs: Count | None = None
    runners: Annotated[list[Annotated[str, one_of(RUNNER_NAMES)]], *LISTED] = Field([runner.name for runner in RUNNERS])
    schedule: Annotated[str, one_of(SHAPES)] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0

    def steps(self, steps_per_epoch: int) -> int:
        """num_steps, or as many as num_epochs are."""
        return self.num_steps or (self.num_epochs or 0) * steps_per_epoch

    def delta(self, num_examples: float | None) -> float:
        """target_delta, or the one that `noisecast train` takes as well."""
        return default_delta(num_examples) if self.target_delta is None else self.target_delta

    def schedule_of(self, num_steps: int) -> Schedule:
        """How the learning rates of all scenarios change."""
        return Schedule.shaped(self.schedule, num_steps, warmup_steps=self.warmup_steps)

    def steps_recorded(self, steps_per_epoch: int) -> tuple[int, ...]:
        """`record_at`, or num_records + 1 evenly spaced steps from 0 to the last; and the ends of the last epochs."""
        num_steps = self.steps(steps_per_epoch)
        steps: Sequence[int] = self.record_at or []
        if self.record_at is None:
            steps = np.linspace(0, num_steps, self.num_records + 1).round().astype(int).tolist()
        elif max(steps) > num_steps:
            raise ValueError(f"Expected record_at <= num_steps = {num_steps}, got {max(steps)}.")
        ends = [num_steps - epoch * steps_per_epoch for epoch in range(self.record_last_epochs or 0)]
        return tuple(sorted({*steps, *ends}))


class MechanismTable(Table):
    noise_multiplier: NotNegativeValues | None = None
    target_epsilon: OneOrMorePositive | None = None  # no range: every value is calibrated, which takes seconds
    l2_clip_norm: PositiveValues = Field([1.0])
    batch_size: OneOrMorePositive
    sampler: Annotated[str, one_of(SAMPLERS)] | None = None
    adjacency: Annotated[str, one_of(("add-or-remove-one", "replace-one"))] | None = None

    @property
    def noise(self) -> Values:
        """Noise multipliers, or the epsilons they are calibrated to."""
        return self.noise_multiplier or self.target_epsilon or []


class OptimizerTable(Table):
    name: Annotated[str, one_of(OPTIMIZER_NAMES)]
    learning_rate: PositiveValues
    l2_clip_norm: PositiveValues | None = None
    b1: Annotated[float, Field(ge=0, lt=1)] | None = None
    b2: Annotated[float, Field(ge=0, lt=1)] | None = None
    eps: Positive | None = None

    def build(self, learning_rate: float) -> Optimizer:
        given = {name: getattr(self, name) for name in OWN_SETTINGS if getattr(self, name) is not None}
        return OPTIMIZER_NAMES[self.name](learning_rate=learning_rate, **given)


class DrawsTable(Table):
    """[draws]: random cells in place of a grid. Which settings are tried is public, and so is the seed."""

    count: Count
    public_seed: Annotated[int, Field(ge=0)]


class TuningTable(Table):
    """[tuning]: the best of a random number of trials is chosen; its price (Papernot and Steinke, 2022).

    Args:
      mean_trials: expected number of trials; >= 1.
      distribution: of the number of trials: "poisson", "geometric" or "logarithmic".

    >>> TuningTable(mean_trials=20, distribution="geometric").trials.mean
    20.0
    """

    mean_trials: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    distribution: Annotated[str, one_of(kind.value for kind in TrialKind)]

    @property
    def trials(self) -> TrialDistribution:
        return TrialDistribution(TrialKind(self.distribution), self.mean_trials)
