"""What choosing the settings by trained runs on the private data would have cost, in epsilon."""

from dataclasses import dataclass

from noisecast.privacy.accounting import epsilon_curve, epsilon_spent
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import FixedSize, Poisson
from noisecast.privacy.tuning import Run, TrialDistribution, TrialKind, composed_epsilon, repeat_select_epsilon

NUM_RUNS = 7 * 7  # learning rates by clip norms: what a careful person would have trained


@dataclass(frozen=True)
class TuningPrice:
    """Epsilon of choosing one optimizer's settings by training.

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


def tuning_price(mechanism: SampledGaussian, *, num_steps: int, target_delta: float) -> TuningPrice:
    """Both prices are upper bounds, for choices by what the runs release or by examples that need no protection."""
    trials = TrialDistribution(TrialKind.GEOMETRIC, NUM_RUNS)
    return TuningPrice(
        one_run=epsilon_spent(mechanism, num_steps=num_steps, target_delta=target_delta).epsilon,
        num_runs=NUM_RUNS,
        all_counted=_all_counted(mechanism, num_steps, target_delta),
        best_of=repeat_select_epsilon([(mechanism, num_steps)], trials=trials, target_delta=target_delta).epsilon,
    )


def _all_counted(mechanism: SampledGaussian, num_steps: int, target_delta: float) -> float:
    """Epsilon of `NUM_RUNS` such runs, an upper bound."""
    if isinstance(mechanism.sampler, Poisson | FixedSize):
        # Runs with batches of their own are as many steps more. By Renyi alone: loss distributions would take minutes.
        return float(epsilon_curve(mechanism, [NUM_RUNS * num_steps], target_delta)[0])
    # Of other samplers they are not: further epochs of one shuffled run are cheaper than further shuffled runs.
    runs = [Run(mechanism, num_steps, f"run {number}") for number in range(NUM_RUNS)]
    return composed_epsilon(runs, target_delta=target_delta).epsilon
