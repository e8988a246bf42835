"""What choosing from a store costs: epsilon of one run beside epsilon of the procedure, in the three ways there are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd

from noisecast.privacy.tuning import TrialDistribution, TrialKind, composed_epsilon, repeat_select_epsilon
from noisecast.sweeps.ledger import Ledger
from noisecast.sweeps.price import Choice, Compose

MOST_LEVELS = 12  # each takes seconds of accounting


class Level(NamedTuple):
    """One budget at one batch size; epsilon is that of one run."""

    problem: str
    batch_size: float
    noise_multiplier: float
    epsilon: float


@dataclass(frozen=True)
class LevelCost:
    """What a level would have cost, had it alone been swept.

    Args:
      level: which.   num_runs: of it, all optimizers and seeds.   composed: epsilon of all its runs counted.
      best_of_random: epsilon of another sweep: the best of a geometric number of trials, as many in the mean.
    """

    level: Level
    num_runs: int
    composed: float
    best_of_random: float


@dataclass(frozen=True)
class TuningCost:
    """The price of the whole store, and of each of its levels.

    Args:
      num_runs: of its ledger.   is_private: whether all its noise was the operating system's. None where it is lost.
      everything: epsilon of every run counted, inf where no theorem covers the choice; None where it has no price yet.
      meaning: what that says, or why there is none.
      levels: those that were asked for, each hypothetical.
      left_out: a sentence about levels that were not priced; None if all were.
    """

    num_runs: int | None
    is_private: bool | None
    everything: float | None
    meaning: str
    levels: tuple[LevelCost, ...]
    left_out: str | None


def tuning_cost(
    table: pd.DataFrame, ledger: Ledger | None, choice: Choice, levels: list[Level], why_no_ledger: str = ""
) -> TuningCost:
    """Price a choice from a store of a grid.

    Args:
      table: of the whole store.   ledger: of it; None where it is lost: `why_no_ledger` says why.
      choice: by which metric of which runner; epsilon and delta of the least private of its runs.
      levels: which to price one by one.
    """
    if ledger is None:
        return TuningCost(None, None, None, why_no_ledger, (), None)
    trained: Any = table.loc[table["runner"] == "training", ["scenario", "seed"]].drop_duplicates()
    reason = Compose().why_unfit(ledger, set(trained.itertuples(index=False, name=None)))
    if reason is not None:
        everything, meaning = None, f"There is no price yet. {reason}"
    else:
        priced = Compose().priced(choice, ledger)
        everything, meaning = priced.epsilon_of_procedure, priced.meaning
    priceable = [level for level in levels if math.isfinite(level.epsilon)]
    if everything is None or not math.isfinite(everything):
        priceable = []
    shown = priceable[:: max(1, math.ceil(len(priceable) / MOST_LEVELS))]
    left_out = None if len(shown) == len(priceable) else f"{len(shown)} of {len(priceable)} levels are priced here."
    prices = tuple(_level_cost(table, ledger, level, choice.target_delta) for level in shown)
    return TuningCost(len(ledger.runs), ledger.is_private, everything, meaning, prices, left_out)


def _level_cost(table: pd.DataFrame, ledger: Ledger, level: Level, target_delta: float) -> LevelCost:
    at: Any = table[
        (table["problem"] == level.problem)
        & (table["expected_batch_size"] == level.batch_size)
        & (table["noise_multiplier"] == level.noise_multiplier)
    ]
    scenarios = set(at["scenario"])
    runs = [run for (scenario, _), run in ledger.runs.items() if scenario in scenarios]
    # The price does not depend on the clip norm: one cell stands for all that differ in nothing else.
    cells = list({(replace(run.mechanism, l2_clip_norm=1.0), run.num_steps) for run in runs})
    trials = TrialDistribution(TrialKind.GEOMETRIC, float(len(runs)))
    return LevelCost(
        level,
        len(runs),
        composed_epsilon(runs, target_delta=target_delta).epsilon,
        repeat_select_epsilon(cells, trials=trials, target_delta=target_delta).epsilon,
    )
