"""What a runner is: a way to answer scenarios, always in the same rows."""

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol

import numpy as np
import pandas as pd

from noisecast.optimizers import CONSTANT
from noisecast.privacy.noise import RandomRoot
from noisecast.scenario import Scenario
from noisecast.table import DIVERGED, OK, table_from

Progress = Callable[[float], None]  # told the share of the work that is done


# Scenarios and repeats of one call; no repeats for a deterministic runner.
Call = tuple[list[Scenario], list[int]]


class Runner(Protocol):
    name: ClassVar[str]

    def why_unsupported(self, scenario: Scenario) -> str | None:
        """None, or one sentence: what this runner cannot answer here, why, and what to use instead."""
        ...

    def calls(self, scenarios: Sequence[Scenario], repeats: Sequence[int]) -> list[Call]:
        """The question in parts that may be answered apart, on other machines even, at no loss of speed."""
        ...

    def answer(
        self,
        scenarios: Sequence[Scenario],
        *,
        repeats: Sequence[int],
        root: RandomRoot,
        record_at: Sequence[int],
        progress: Progress,
    ) -> pd.DataFrame:
        """Answer scenarios that it supports; `record_at` is sorted."""
        ...


def why_not_constant(runner: str, scenario: Scenario) -> str | None:
    """None, or the sentence of a runner whose answers are for constant learning rates."""
    if scenario.schedule == CONSTANT:
        return None
    return f'{runner} knows constant learning rates alone, got a schedule; use runner "training", or leave it out.'


# What a runner measured: at a step, each metric as an array over (repeats, scenarios).
Record = tuple[int, dict[str, np.ndarray]]


def rows(
    runner: str, scenarios: Sequence[Scenario], repeats: Sequence[int] | None, records: Iterable[Record]
) -> pd.DataFrame:
    """Records as rows of the table; `repeats` is None for a deterministic runner, whose arrays are (1, scenarios)."""
    columns = pd.DataFrame([scenario.columns() for scenario in scenarios])
    seeds = [None] if repeats is None else list(repeats)
    steps, names, arrays = zip(*((step, *item) for step, metrics in records for item in metrics.items()))
    each = len(seeds) * len(scenarios)  # rows of one metric at one step
    values = np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])
    measured = {
        "runner": runner,
        "step": np.repeat(steps, each),
        "metric": np.repeat(np.array(names, object), each),
        "seed": pd.array([seed for seed in seeds for _ in scenarios] * len(names), dtype="Int64"),
        "value": values,
        "status": np.where(np.isfinite(values), OK, DIVERGED),
    }
    places = np.tile(np.arange(len(scenarios)), len(seeds) * len(names))
    return table_from(columns.iloc[places].reset_index(drop=True).assign(**measured))


def groups_of(scenarios: Sequence[Scenario], key: Callable[[Scenario], tuple]) -> list[list[Scenario]]:
    """Scenarios that share a compiled call, in the order of their first appearance."""
    groups: dict[tuple, list[Scenario]] = {}
    for scenario in scenarios:
        groups.setdefault(key(scenario), []).append(scenario)
    return list(groups.values())


def chunks(sequence: Sequence, size: int) -> list[list]:
    """In pieces of at most `size`, in order.

    >>> chunks("abcde", 2)
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    return [list(sequence[i : i + size]) for i in range(0, len(sequence), size)]


def deterministic_calls(scenarios: Sequence[Scenario], size: int) -> list[Call]:
    """For a runner that prepares a problem once and then takes scenario by scenario, without repeats."""
    groups = groups_of(scenarios, lambda scenario: (scenario.problem.fingerprint,))
    return [(chunk, []) for group in groups for chunk in chunks(group, size)]
