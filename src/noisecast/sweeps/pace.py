"""How far a sweep is, and how long it will take still."""

import math
from collections.abc import Sequence
from statistics import median

from noisecast.sweeps.tasks import Task


class Pace:
    """Learns the seconds a unit of work from finished tasks, kind by kind: the fewest seen, for the first task of a
    kind compiles, too. Kinds not seen yet count as the median.

    Args:
      tasks: still to be done.   at_once: how many are computed side by side.
      share_done: of the sweep that was in the store before.
    """

    def __init__(self, tasks: Sequence[Task], *, at_once: int, share_done: float = 0.0):
        self.num_finished = 0
        self._left = list(tasks)
        self._at_once, self._share_before = at_once, share_done
        self.share = share_done if self._left else 1.0  # of the whole sweep's expected time; it never falls
        self._rates: dict[tuple, float] = {}  # kind: seconds a unit of work
        self._spent = 0.0

    @property
    def seconds_left(self) -> float | None:
        """Of wall time; None before anything is finished."""
        if not self._rates:
            return None
        return self._seconds_of(self._left) / min(self._at_once, max(len(self._left), 1))

    def finished(self, task: Task, seconds: float) -> None:
        """One task less. Where the first of a slow kind makes the rest longer than thought, the share waits for it."""
        self._left.remove(task)
        self.num_finished += 1
        self._rates[task.kind] = min(self._rates.get(task.kind, math.inf), seconds / task.work)
        self._spent += seconds
        now = self._spent / max(self._spent + self._seconds_of(self._left), 1e-300)
        self.share = max(self.share, self._share_before + (1 - self._share_before) * now) if self._left else 1.0

    def _seconds_of(self, tasks: Sequence[Task]) -> float:
        usual = median(self._rates.values())
        return sum(task.work * self._rates.get(task.kind, usual) for task in tasks)
