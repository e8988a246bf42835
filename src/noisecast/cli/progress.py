"""Progress on standard error: bars for who watches; of work that takes hours, lines for who reads the log later."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from noisecast.cli.output import to_watcher
from noisecast.printed import number

if TYPE_CHECKING:  # for the names alone: a command that only lists must not wait for JAX
    from noisecast.release import Moment
    from noisecast.scenario import Scenario

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def share_progress(description: str) -> Iterator[Callable[[float], None]]:
    """To be told the share of the work that is done; shown as `sweep_progress` does."""
    with sweep_progress(description) as progress:
        yield lambda share: progress(share, None)


@contextmanager
def sweep_progress(description: str) -> Iterator[Callable[[float, float | None], None]]:
    """To be told the share that is done and the seconds left (None: guessed from the pace so far).

    A bar on a terminal; in a file or a pipe a line now and then, without control characters.
    """
    console = to_watcher()
    if not console.is_terminal:
        yield _Lines(description)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), _TimeLeft())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=1.0, seconds_left=None)
        pace = _Pace()
        yield lambda share, seconds_left: progress.update(
            task, completed=share, seconds_left=pace.seconds_left(share) if seconds_left is None else seconds_left
        )


def duration(seconds: float) -> str:
    """A time for a person who decides whether to wait.

    >>> duration(0.4), duration(48), duration(125), duration(3 * 3600 + 600), duration(3 * 86400)
    ('1 s', '48 s', '2 min', '3.2 h', '3 days')
    """
    if seconds < 90:
        return f"{max(1, math.ceil(seconds))} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.2g} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


class _Pace:
    """Time left from the shares told so far; what was done before the first of them took no time of ours."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def seconds_left(self, share: float) -> float | None:
        now = time.monotonic()
        if self._first is None:
            self._first = share, now
        share_before, began = self._first
        if share <= share_before:
            return None
        return (now - began) * (1 - share) / (share - share_before)


class _Lines:
    """A line when enough time has passed since the last."""

    def __init__(self, description: str) -> None:
        self._description, self._pace, self._last = description, _Pace(), time.monotonic()

    def __call__(self, share: float, seconds_left: float | None) -> None:
        guessed = self._pace.seconds_left(share)
        if time.monotonic() - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = time.monotonic()
        seconds_left = guessed if seconds_left is None else seconds_left
        left = "" if seconds_left is None else f", {duration(seconds_left)} left"
        print(f"{time.strftime('%H:%M')}  {self._description}: {100 * share:.0f} %{left}", file=sys.stderr, flush=True)


class _TimeLeft(ProgressColumn):
    """What the work itself says of the time left: Rich's own guess knows nothing of kinds of work."""

    def render(self, task: Task) -> Text:
        seconds = task.fields["seconds_left"]
        return Text("" if seconds is None else f"{duration(seconds)} left")


@contextmanager
def training_progress(scenario: Scenario) -> Iterator[Callable[[Moment], None]]:
    """A bar with the step, a bound on the epsilon spent so far, the last loss seen, steps a second and time left."""
    from noisecast.privacy.accounting import epsilon_text

    console = to_watcher()
    columns = (
        TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
        BarColumn(bar_width=None),
        TextColumn("ε ≤ {task.fields[epsilon]}  {task.fields[loss]}{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, expand=True) as progress:
        epsilon_at = _epsilon_so_far(scenario) if console.is_terminal else lambda step: 0.0
        task = progress.add_task("", total=scenario.num_steps, epsilon="0", loss="", rate="compiling")
        loss = ""

        def watch(moment: Moment) -> None:
            nonlocal loss
            if "loss" in moment.non_private_metrics:
                loss = f"loss {number(moment.non_private_metrics['loss'], 3)} (non_private)  "
            rate = f"{moment.steps_per_second:,.0f} steps/s" if moment.steps_per_second else "compiling"
            epsilon = epsilon_text(epsilon_at(moment.step), 3)
            progress.update(task, completed=moment.step, epsilon=epsilon, loss=loss, rate=rate)

        yield watch


def _epsilon_so_far(scenario: Scenario) -> Callable[[int], float]:
    """From a table of 101 steps: the next one's epsilon, so that the number stays an upper bound."""
    import numpy as np

    from noisecast.privacy.accounting import epsilon_curve

    steps = np.unique(np.linspace(0, scenario.num_steps, 101).round().astype(int))
    # The last step has the accountant's own, smaller number; before it the cheap bound may not exceed that either.
    curve = epsilon_curve(scenario.mechanism, steps, scenario.target_delta)
    curve = np.minimum(curve, scenario.privacy_spent.epsilon)
    return lambda step: float(curve[np.searchsorted(steps, step)])
