"""A question to the runners: scenarios, who answers them, how often, and when they are looked at."""

from dataclasses import dataclass

from noisecast.runners import Runner
from noisecast.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a scenario file asks; a sweep is one or more of them.

    Args:
      scenarios: every optimizer and learning rate at every noise multiplier.   runners: who is asked.
      num_seeds, insecure_seeds: how often the random runners repeat (`noisecast.runners.answer`).
      first_seed: number of the first repeat: those of one number share their batches, others nothing.
      record_at: steps at which metrics are recorded; the last step always is.
    """

    scenarios: tuple[Scenario, ...]
    runners: tuple[Runner, ...]
    record_at: tuple[int, ...]
    num_seeds: int = 1
    insecure_seeds: tuple[int, ...] | None = None
    first_seed: int = 0
