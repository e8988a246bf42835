"""What happens: the real optimizer, on the examples, with real noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd

from noisecast import engines
from noisecast.privacy.noise import RandomRoot
from noisecast.runners.runner import Call, Progress, chunks, groups_of, rows
from noisecast.scenario import Scenario


@dataclass(frozen=True)
class Training:
    """Train every scenario at every repeat, and look at the recorded steps."""

    name: ClassVar[str] = "training"

    def why_unsupported(self, scenario: Scenario) -> str | None:
        return engines.why_unsupported(scenario)

    def calls(self, scenarios: Sequence[Scenario], repeats: Sequence[int]) -> list[Call]:
        found = []
        for group in groups_of(scenarios, engines.group_key):
            side_by_side, at_once = engines.runs_of_a_call(group[0])
            found += [(chunk, some) for some in chunks(repeats, at_once) for chunk in chunks(group, side_by_side)]
        return found

    def answer(
        self,
        scenarios: Sequence[Scenario],
        *,
        repeats: Sequence[int],
        root: RandomRoot,
        record_at: Sequence[int],
        progress: Progress,
    ) -> pd.DataFrame:
        tables = []
        groups = groups_of(scenarios, engines.group_key)
        for number, group in enumerate(groups):
            run = engines.start(group, repeats=repeats, root=root)
            records = []
            for step in [step for step in record_at if step <= group[0].num_steps]:
                run.advance(step)
                records.append((step, run.evaluate()))
                progress((number + step / group[0].num_steps) / len(groups))
            tables.append(rows(self.name, group, repeats, records))
        return pd.concat(tables, ignore_index=True)
