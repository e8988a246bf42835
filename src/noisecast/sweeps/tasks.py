"""A sweep in tasks: what one worker computes in one call, and the names by which a run is known to be done."""

import hashlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from noisecast import __version__, engines
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.problem import fingerprint_of
from noisecast.question import Question
from noisecast.runners import Runner, repeats_of
from noisecast.scenario import Scenario

# The parts that decide numbers; what only prints, draws or stores may change while a sweep is resumed.
_PARTS_THAT_COUNT = ("theory", "privacy", "problems", "optimizers", "engines", "runners")
STEPS_WORTH_A_FORECAST = 100_000  # until its own pace is seen
_LIBRARIES_THAT_COUNT = ("numpy", "scipy", "jax", "numba", "dp-accounting")


@dataclass(frozen=True, kw_only=True, eq=False)  # one is another only if it is the same: arrays do not compare
class Task:
    """One call of one runner.

    Args:
      runner: who is asked.   scenarios: what.   repeats: how often; none for a deterministic runner.
      record_at: steps at which metrics are recorded, sorted.   root: where the randomness comes from.
    """

    runner: Runner
    scenarios: tuple[Scenario, ...]
    repeats: tuple[int, ...]
    record_at: tuple[int, ...]
    root: RandomRoot

    @property
    def cells(self) -> tuple[str, ...]:
        """One id for each run: for each scenario and repeat."""
        repeats = self.repeats or (None,)
        return tuple(cell_id(self, scenario, repeat) for scenario in self.scenarios for repeat in repeats)

    @property
    def runs(self) -> tuple[tuple[str, str, int | None], ...]:
        """(scenario, runner, seed) of each, as the table has them, in the order of `cells`."""
        repeats = self.repeats or (None,)
        return tuple((scenario.id, self.runner.name, repeat) for scenario in self.scenarios for repeat in repeats)

    @property
    def origin(self) -> str:
        """`origin_of` the secret of its noise; empty where it has none, or one that everybody knows."""
        return origin_of(self.root) if self.repeats and self.root.is_private else ""

    @property
    def kind(self) -> tuple:
        """Tasks of one kind take a time in proportion to their steps and runs."""
        first = self.scenarios[0]
        return (self.runner.name, first.problem.fingerprint, first.optimizer.name, min(len(self.scenarios), 8))

    @property
    def work(self) -> int:
        """Run-steps; of a deterministic runner, whose cost does not depend on their number, a guess at their worth."""
        if not self.repeats:
            return STEPS_WORTH_A_FORECAST * len(self.scenarios)
        return self.scenarios[0].num_steps * len(self.scenarios) * len(self.repeats)

    def without(self, done: AbstractSet[str]) -> "Task | None":
        """What is left of it: None if nothing. Scenarios of which every repeat is done are left out."""
        left = []
        for scenario in self.scenarios:
            cells = [cell_id(self, scenario, repeat) for repeat in self.repeats or (None,)]
            if not done >= set(cells):
                left.append(scenario)
        return replace(self, scenarios=tuple(left)) if left else None

    def run(self) -> pd.DataFrame:
        """Rows of the table."""
        return self.runner.answer(
            self.scenarios,
            repeats=self.repeats,
            root=self.root,
            record_at=self.record_at,
            progress=lambda share: None,
        )


def tasks_of(questions: Sequence[Question], root: RandomRoot) -> list[Task]:
    """Every question cut into the calls that its runners like to be asked in.

    Args:
      questions: of the sweep; scenarios that a runner cannot answer are left out (`noisecast.runners.refusals`).
      root: where the randomness of questions without insecure seeds comes from.
    Raises: ValueError: record_at out of range, or impossible seeds.
    """
    tasks = []
    for question in questions:
        repeats, of_question = repeats_of(question.num_seeds, question.insecure_seeds, root, question.first_seed)
        last = max((scenario.num_steps for scenario in question.scenarios), default=0)
        if question.record_at and not 0 <= min(question.record_at) <= max(question.record_at) <= last:
            raise ValueError(
                f"Expected 0 <= record_at <= num_steps = {last}, got {min(question.record_at)} to "
                f"{max(question.record_at)}."
            )
        for runner in question.runners:
            able = [scenario for scenario in question.scenarios if runner.why_unsupported(scenario) is None]
            for scenarios, some in runner.calls(able, repeats):
                steps = sorted({*question.record_at, *(scenario.num_steps for scenario in scenarios)})
                tasks.append(
                    Task(
                        runner=runner,
                        scenarios=tuple(scenarios),
                        repeats=tuple(some),
                        record_at=tuple(steps),
                        root=of_question,
                    )
                )
    return _without_repetition(tasks)


def cell_id(task: Task, scenario: Scenario, repeat: int | None) -> str:
    """Name of one run: equal where code, data, settings, seed and recorded steps are; 16 hexadecimal digits."""
    steps = tuple(step for step in task.record_at if step <= scenario.num_steps)
    source = None if repeat is None else origin_of(task.root)
    parts = (code_fingerprint(), task.runner.name, repr(task.runner), scenario.id, str(repeat), str(source), str(steps))
    return fingerprint_of(*parts)[:16]


def origin_of(root: RandomRoot) -> str:
    """Hash by which runs of one secret are known, and from which the secret is not."""
    return hashlib.sha256(b"which root " + root.secret).hexdigest()


@cache
def code_fingerprint() -> str:
    """Hash of what decides numbers: our code, the libraries, what noise is drawn by; 16 hexadecimal digits."""
    package = Path(__file__).parents[1]
    files = sorted(path for part in _PARTS_THAT_COUNT for path in (package / part).rglob("*.py"))
    files += [package / name for name in ("compiled.py", "scenario.py", "table.py")]
    sources = [path.read_text(encoding="utf-8") for path in files]
    versions = (version(name) for name in _LIBRARIES_THAT_COUNT)
    return fingerprint_of(__version__, engines.noise_source(), *versions, *sources)[:16]


def _without_repetition(tasks: Sequence[Task]) -> list[Task]:
    """Questions may share runs: each is computed once."""
    found, seen = [], set()
    for task in tasks:
        left = task.without(seen)
        if left is not None:
            found.append(left)
            seen.update(left.cells)
    return found
