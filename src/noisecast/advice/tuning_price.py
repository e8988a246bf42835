"""What choosing the settings by trained runs on the private data would have cost, in epsilon."""

from dataclasses import dataclass

from noisecast.privacy.accounting import epsilon_curve
from noisecast.privacy.sampling import FixedSize, Poisson
from noisecast.privacy.tuning import Run, TrialDistribution, TrialKind, composed_epsilon, repeat_select_epsilon
from noisecast.scenario import Scenario

GRID = 7, 7  # learning rates by clip norms: what a careful person would have trained


@dataclass(frozen=True)
class TuningPrice:
    """Epsilon of choosing one optimizer's settings by training, at the scenario's delta.

    Args:
      one_run: epsilon of the run that is kept.   num_runs: how many a grid of 7 by 7 has.
      all_counted: epsilon of releasing them all, each with batches of its own (`composed_epsilon`).
      best_of: epsilon of releasing only the best of a geometric number of random trials, as many in the mean
        (`repeat_select_epsilon`).
    """

    one_run: float
    num_runs: int
    all_counted: float
    best_of: float


def tuning_price(scenario: Scenario) -> TuningPrice:
    """Both prices are upper bounds, for choices by what the runs release or by examples that need no protection."""
    num_runs, mechanism, delta = GRID[0] * GRID[1], scenario.mechanism, scenario.target_delta
    trials = TrialDistribution(TrialKind.GEOMETRIC, num_runs)
    return TuningPrice(
        one_run=scenario.privacy_spent.epsilon,
        num_runs=num_runs,
        all_counted=_all_counted(scenario, num_runs),
        best_of=repeat_select_epsilon([(mechanism, scenario.num_steps)], trials=trials, target_delta=delta).epsilon,
    )


def _all_counted(scenario: Scenario, num_runs: int) -> float:
    """Epsilon of num_runs such runs, an upper bound."""
    mechanism, delta = scenario.mechanism, scenario.target_delta
    if isinstance(mechanism.sampler, Poisson | FixedSize):
        # Runs with batches of their own are as many steps more. By Renyi alone: loss distributions would take minutes.
        return float(epsilon_curve(mechanism, [num_runs * scenario.num_steps], delta)[0])
    runs = [Run(mechanism, scenario.num_steps, f"run {number}") for number in range(num_runs)]
    return composed_epsilon(runs, target_delta=delta).epsilon
