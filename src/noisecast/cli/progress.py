"""Progress bars on standard error: none where nobody watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from noisecast.cli.output import number, to_watcher
from noisecast.privacy.accounting import epsilon_curve, epsilon_text
from noisecast.release import Moment
from noisecast.scenario import Scenario


@contextmanager
def share_progress(description: str) -> Iterator[Callable[[float], None]]:
    """A bar to be told the share of the work that is done."""
    console = to_watcher()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=1.0)
        yield lambda share: progress.update(task, completed=share)


@contextmanager
def training_progress(scenario: Scenario) -> Iterator[Callable[[Moment], None]]:
    """A bar with the step, a bound on the epsilon spent so far, the last loss seen, steps a second and time left."""
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
    steps = np.unique(np.linspace(0, scenario.num_steps, 101).round().astype(int))
    # The last step has the accountant's own, smaller number; before it the cheap bound may not exceed that either.
    curve = epsilon_curve(scenario.mechanism, steps, scenario.target_delta)
    curve = np.minimum(curve, scenario.privacy_spent.epsilon)
    return lambda step: float(curve[np.searchsorted(steps, step)])
