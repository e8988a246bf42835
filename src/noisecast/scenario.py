"""A scenario is a question: this problem, this mechanism, this optimizer, for so many steps."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from noisecast.optimizers import CONSTANT, Optimizer, Schedule
from noisecast.privacy.accounting import PrivacySpent, epsilon_spent, warnings_for
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.problems.problem import Problem, fingerprint_of


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One question, whose answers by every runner stand in one table.

    Args:
      problem: the loss and its examples.
      mechanism: what is released at each step, and what accounting sees.
      optimizer: what is made of each release.
      num_steps: T; >= 1.
      target_delta: delta at which epsilon is stated; in (0, 1).
      schedule: how the optimizer's learning rate changes along the run.
    """

    problem: Problem
    mechanism: SampledGaussian
    optimizer: Optimizer
    num_steps: int
    target_delta: float = 1e-5
    schedule: Schedule = CONSTANT

    def __post_init__(self) -> None:
        if not (isinstance(self.num_steps, int) and self.num_steps >= 1):
            raise ValueError(f"Expected num_steps to be a whole number >= 1, got {self.num_steps}.")
        if not 0 < self.target_delta < 1:
            raise ValueError(f"Expected 0 < target_delta < 1, got {self.target_delta}.")
        if not isinstance(self.schedule, Schedule):
            raise ValueError(
                f"Expected schedule to be a Schedule, got {self.schedule!r}; Schedule.shaped makes one of a shape."
            )
        if self.schedule.starts[-1] >= self.num_steps:
            raise ValueError(
                f"Expected every phase of the schedule to begin before num_steps = {self.num_steps}, got one that "
                f"begins at step {self.schedule.starts[-1]}."
            )

    @cached_property
    def id(self) -> str:
        """Content hash: equal for equal questions, on every machine; 16 hexadecimal digits.

        Of the examples, too: whoever knows all but one can find that one by it. Never part of what is released.
        """
        changes = () if self.schedule == CONSTANT else (repr(self.schedule),)
        return fingerprint_of(
            self.problem.fingerprint, repr(self.mechanism), repr(self.optimizer), self.num_steps,
            self.target_delta, *changes,
        )[:16]  # fmt: skip

    @property
    def privacy_spent(self) -> PrivacySpent:
        """Epsilon of the final model, for exactly this mechanism and number of steps."""
        return _epsilon_spent(self.mechanism, self.num_steps, self.target_delta)

    def columns(self) -> dict:
        """The scenario's own columns of the table."""
        spent = self.privacy_spent
        return {
            "scenario": self.id,
            "problem": self.problem.name,
            "optimizer": self.optimizer.name,
            "learning_rate": self.optimizer.learning_rate,
            "noise_multiplier": self.mechanism.noise_multiplier,
            "l2_clip_norm": self.mechanism.l2_clip_norm,
            "sampling_probability": self.mechanism.sampling_probability,
            "expected_batch_size": self.mechanism.expected_batch_size,
            "num_steps": self.num_steps,
            "epsilon": spent.epsilon,
            "nominal_epsilon": spent.nominal_epsilon,
            "target_delta": self.target_delta,
        }


def warnings_of(scenarios: Iterable[Scenario]) -> list[str]:
    """What belongs beside the epsilons of several scenarios, each sentence once."""
    found = (s for each in scenarios for s in warnings_for(each.mechanism, target_delta=each.target_delta))
    return list(dict.fromkeys(found))


def check_constant_rates(scenarios: Iterable[Scenario], what: str) -> None:
    """Raises: ValueError where a learning rate changes along a run, for what knows constant ones alone."""
    for scenario in scenarios:
        if scenario.schedule != CONSTANT:
            raise ValueError(f"Expected constant learning rates {what}, got a schedule; leave it out.")


@lru_cache(maxsize=4096)
def _epsilon_spent(mechanism: SampledGaussian, num_steps: int, target_delta: float) -> PrivacySpent:
    # A grid asks the same question for every optimizer and learning rate; the accountant need answer it once.
    return epsilon_spent(mechanism, num_steps=num_steps, target_delta=target_delta)
