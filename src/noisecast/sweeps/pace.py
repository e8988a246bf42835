"""How far a sweep is, and how long it will take still."""

from collections.abc import Sequence
from statistics import median

from noisecast.sweeps.tasks import Task


class Pace:
    """Learns the seconds a unit of work from finished tasks, kind by kind. The first ones of a kind, as many as are
    computed side by side, compile, too: they count only while there are no others. Kinds not seen yet count as the
    median.

    Args:
      tasks: still to be done.   at_once: how many are computed side by side.
      share_done: of the sweep that was in the store before.
    """

    def __init__(self, tasks: Sequence[Task], *, at_once: int, share_done: float = 0.0):
        self._left = list(tasks)
        self._at_once, self._share_before = at_once, share_done
        self.share = share_done if self._left else 1.0  # of the whole sweep's expected time; it never falls
        self._seen: dict[tuple, list[tuple[float, float]]] = {}  # kind: (work, seconds) of each task
        self._spent = 0.0

    @property
    def seconds_left(self) -> float | None:
        """Of wall time; None before anything is finished."""
        if not self._seen:
            return None
        return self._seconds_of(self._left) / min(self._at_once, max(len(self._left), 1))

    def finished(self, task: Task, seconds: float) -> None:
        """One task less. Where the first of a slow kind makes the rest longer than thought, the share waits for it.

        seconds: that it took; 0 for one that failed, of which nothing is learnt.
        """
        self._left.remove(task)
        if seconds:
            self._seen.setdefault(task.kind, []).append((task.work, seconds))
            self._spent += seconds
        if not self._left:
            self.share = 1.0
        elif self._seen:
            now = self._spent / max(self._spent + self._seconds_of(self._left), 1e-300)
            self.share = max(self.share, self._share_before + (1 - self._share_before) * now)

    def _seconds_of(self, tasks: Sequence[Task]) -> float:
        rates = {kind: self._rate(seen) for kind, seen in self._seen.items()}
        usual = median(rates.values())
        return sum(task.work * rates.get(task.kind, usual) for task in tasks)

    def _rate(self, seen: Sequence[tuple[float, float]]) -> float:
        """Seconds a unit of work."""
        if len(seen) <= self._at_once:
            return min(seconds / work for work, seconds in seen)
        work, seconds = map(sum, zip(*seen[self._at_once :], strict=True))
        return seconds / work
