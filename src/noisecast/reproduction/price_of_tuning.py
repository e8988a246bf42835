"""What tuning costs: one level of a sweep, counted in the three ways there are."""

from typing import Any

import numpy as np

from noisecast.privacy.accounting import epsilon_spent
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import Poisson
from noisecast.privacy.tuning import Run, TrialDistribution, TrialKind, composed_epsilon, repeat_select_epsilon
from noisecast.reproduction.claims import Claim
from noisecast.reproduction.which_task import title_of


def price_of_tuning(rows: Any) -> Claim:
    """The claim that the epsilon of one run is that of tuning, at the middle noise multiplier of a task's sweep.

    Args:
      rows: of the table, of one task; the cells of one seed at one noise multiplier are counted.
    """
    trained = rows[rows["runner"] == "training"]
    levels = np.sort(trained["noise_multiplier"].unique())
    level = levels[len(levels) // 2]
    chosen = trained[(trained["noise_multiplier"] == level) & (trained["seed"] == trained["seed"].min())]
    cells = chosen.drop_duplicates(["optimizer", "learning_rate", "l2_clip_norm"])
    at = cells.iloc[0]
    num_steps, delta = int(at["num_steps"]), float(at["target_delta"])
    num_examples = round(at["expected_batch_size"] / at["sampling_probability"])
    mechanism = SampledGaussian(
        noise_multiplier=level,
        l2_clip_norm=1.0,
        sampler=Poisson.for_batch_size(at["expected_batch_size"], num_examples),
    )  # the price does not depend on the clip norm
    one = epsilon_spent(mechanism, num_steps=num_steps, target_delta=delta).epsilon
    # Cells of one seed share their batches, and are counted so.
    every = composed_epsilon([Run(mechanism, num_steps, "seed")] * len(cells), target_delta=delta).epsilon
    trials = TrialDistribution(TrialKind.GEOMETRIC, len(cells))
    best_of = repeat_select_epsilon([(mechanism, num_steps)], trials=trials, target_delta=delta).epsilon
    return Claim(
        source="Protocol B",
        statement=f"{title_of(str(at['problem']))}: the epsilon stated for the best cell is that of one run.",
        measure=f"epsilon of tuning {len(cells)} cells at noise multiplier {level:g}, all counted, over one run's",
        value=every / one,
        low=np.nan,
        high=np.nan,
        wanted="1",
        holds=every <= one,
        theory=f"one run {one:.3g} at delta {delta:g}; exact, so without an interval",
        corrected=(
            f"Tuned on public data {one:.3g}; all {len(cells)} runs counted {every:.3g}; the best of a geometric "
            f"number of trials, {len(cells)} in the mean, {best_of:.3g}; the last two if held-out examples judge."
        ),
    )
