"""Who computes tasks: this process, worker processes of this machine, or a Ray cluster. All give the same tables."""

import logging
import math
import pickle
import queue
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from noisecast.sweeps import worker
from noisecast.sweeps.tasks import Task
from noisecast.worker_process import ONE_CORE, WorkerProcess, pickled

MAX_DEATHS = 3  # of workers over one task, before it is taken to be its fault
LONGEST_TO_LEAVE = 10.0  # seconds, for whoever stands between a worker that was killed and the driver
LONGEST_TO_COMPILE = 60.0  # seconds: for longer no task waits for another to compile what both need


@dataclass(frozen=True)
class Done:
    """A task that has been computed, or (table None) the reason why it has not."""

    task: Task
    table: pd.DataFrame | None
    seconds: float
    why: str | None = None


class Killed:
    """Told by a worker's attendant: the worker is gone, its task is still to be done."""


def in_this_process(tasks: Sequence[Task]) -> Iterator[Done]:
    """One after the other, here: for problems that cannot be sent elsewhere, and for tests."""
    for number, task in enumerate(tasks):
        yield _done(task, worker.answer(list(tasks), number))


def in_processes(tasks: Sequence[Task], num_workers: int) -> Iterator[Done]:
    """On worker processes, in the order in which they finish. A worker that is killed is replaced; a warning says so.

    Args:
      tasks: the first is begun first, but for what `Waiting` holds back.
      num_workers: processes; >= 1.
    Raises: ValueError when the problem cannot be sent to another process.
    """
    content = _pickled(tasks)
    waiting = Waiting(tasks)
    finished: queue.SimpleQueue[Done | Killed | BaseException] = queue.SimpleQueue()
    attendants = [_Attendant(tasks, content, waiting, finished) for _ in range(min(num_workers, len(tasks)))]
    for attendant in attendants:
        attendant.start()
    try:
        num_done = num_killed = 0
        while num_done < len(tasks):
            found = finished.get()
            if isinstance(found, BaseException):
                raise found
            if isinstance(found, Killed):
                num_killed += 1
                _say_killed(num_killed)
                continue
            num_done += 1
            yield found
    finally:
        for attendant in attendants:
            attendant.dismiss()
        for attendant in attendants:  # Python ends the process by force where it ends a thread in a library's code
            attendant.join(LONGEST_TO_LEAVE)


def on_ray(tasks: Sequence[Task], address: str) -> Iterator[Done]:
    """On a Ray cluster, one task a core. A task of a node that dies is begun again on another.

    Args:
      tasks: the first is begun first.
      address: of the cluster, or "auto" for the one that this machine belongs to, or "local" for one of its own.
    Raises: ValueError when there is no cluster there.
    """
    import ray
    from ray.exceptions import RayError

    started_here = not ray.is_initialized()
    if started_here:
        try:
            _knock(address)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # Ray's own programs only
                ray.init(
                    address=None if address == "local" else address,
                    runtime_env={"env_vars": ONE_CORE},
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                )
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"Expected a Ray cluster at {address}, found none ({reason}); start it first.") from None
    try:
        shared = ray.put(_pickled(tasks))
        remote = ray.remote(num_cpus=1, max_retries=MAX_DEATHS)(_on_a_node)
        pending = {remote.remote(shared, number): number for number in range(len(tasks))}
        while pending:
            (ready,), _ = ray.wait(list(pending), num_returns=1)
            task = tasks[pending.pop(ready)]
            try:
                yield _done(task, ray.get(ready))
            except RayError as error:
                yield Done(task, None, 0.0, f"The cluster could not run it: {' '.join(str(error).split())[:300]}")
    finally:
        if started_here:
            ray.shutdown()


def _knock(address: str) -> None:
    """Whether anybody listens at host:port; Ray itself would ask for minutes. OSError or ValueError if nobody does."""
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=5).close()


def _say_killed(num_killed: int) -> None:
    """Each time with another number: Python shows a sentence once."""
    killed = "1 worker process was" if num_killed == 1 else f"{num_killed} worker processes were"
    warnings.warn(f"{killed} killed up to now (out of memory?), and replaced.", RuntimeWarning, stacklevel=1)


def _pickled(tasks: Sequence[Task]) -> bytes:
    try:
        return pickled(list(tasks))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"The sweep's problem cannot be sent to worker processes ({error}); run it in this process with workers=0."
        ) from None


_tasks_of_this_node: dict[int, list[Task]] = {}


def _on_a_node(content: bytes, number: int) -> dict[str, Any]:
    """Run by Ray: the tasks are unpickled once a process."""
    key = hash(content)
    if key not in _tasks_of_this_node:
        _tasks_of_this_node.clear()
        _tasks_of_this_node[key] = pickle.loads(content)
    return worker.answer(_tasks_of_this_node[key], number)


def _done(task: Task, answer: dict[str, Any]) -> Done:
    return Done(task, answer.get("table"), answer.get("seconds", 0.0), answer.get("why"))


class Waiting:
    """Tasks that nobody computes yet, in their order, but that two workers do not compile the same kernels at once.

    Where nothing was compiled on this machine before, the first training of an optimizer compiles its kernels, and
    leaves them on disk for the others. Until it is done, or has had the time, other tasks go first if there are any.
    """

    def __init__(self, tasks: Sequence[Task]):
        self._kernels = [_kernels_of(task) for task in tasks]
        self._left = list(range(len(tasks)))
        self._begun: dict[tuple | None, float] = {}  # when the first task with these kernels was; -inf: it is done
        self._lock = threading.Lock()

    def next(self) -> int | None:
        """The number of a task to compute now; None where none is left."""
        with self._lock:
            if not self._left:
                return None
            now = time.monotonic()
            held = {each for each, begun in self._begun.items() if now - begun < LONGEST_TO_COMPILE}
            number = next((each for each in self._left if self._kernels[each] not in held), self._left[0])
            self._left.remove(number)
            if self._kernels[number] is not None:
                self._begun.setdefault(self._kernels[number], now)
            return number

    def done(self, number: int) -> None:
        with self._lock:
            self._begun[self._kernels[number]] = -math.inf


def _kernels_of(task: Task) -> tuple | None:
    """What tasks that share their kernels have in common; None of deterministic runners, which have hardly any."""
    first = task.scenarios[0]
    return (task.runner.name, type(first.problem), first.optimizer.name) if task.repeats else None


def _named(task: Task) -> str:
    """For whoever has to make it smaller."""
    first = task.scenarios[0]
    batch = f"expected batch size {first.mechanism.expected_batch_size:g}"
    return f"{len(task.cells)} runs of {first.optimizer.name} on {first.problem.name}, {batch}"


class _Attendant(threading.Thread):
    """Stands between the driver and one worker process with its successors: hands it tasks, takes its answers."""

    def __init__(self, tasks: Sequence[Task], content: bytes, waiting: Waiting, finished: Any):
        super().__init__(daemon=True)
        self._tasks, self._content, self._waiting, self._finished = tasks, content, waiting, finished
        self._process: WorkerProcess | None = None
        self._dismissed = False

    def run(self) -> None:
        try:
            while not self._dismissed and (number := self._waiting.next()) is not None:
                done = self._computed(number)
                self._waiting.done(number)
                if not self._dismissed:
                    self._finished.put(done)
            self.dismiss()
        except BaseException as error:
            self._finished.put(error)

    def dismiss(self) -> None:
        """No more tasks, and an end to the one in hand."""
        self._dismissed = True
        if self._process is not None:
            self._process.kill()

    def _computed(self, number: int) -> Done:
        task = self._tasks[number]
        for _ in range(MAX_DEATHS):
            if self._process is None or not self._process.is_alive:
                self._process = WorkerProcess("noisecast.sweeps.worker", self._content)
            try:
                if not self._dismissed:
                    return _done(task, self._process.ask(number))
            except (EOFError, OSError):
                pass
            self._process.kill()
            if self._dismissed:
                break
            self._finished.put(Killed())
        why = f"{MAX_DEATHS} workers were killed while they computed {_named(task)} (out of memory?)."
        return Done(task, None, 0.0, why)
