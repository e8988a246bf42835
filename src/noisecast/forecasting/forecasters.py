"""Forecasts of one problem, and what else takes long, by this process and others beside it, a core each."""

import os
import pickle
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Timer
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

from noisecast.problems.problem import Problem
from noisecast.runners.moments import Moments
from noisecast.runners.moments.forecast import Forecast
from noisecast.scenario import Scenario
from noisecast.worker_process import WorkerProcess, pickled, serve

WORTH_PROCESSES = 2000  # examples: with fewer, hundreds of forecasts take less than a process to start
LONG_READING = 1.0  # [s]: what takes longer is a problem worth processes, most likely
LARGEST_PROBLEM = 2**30  # bytes that are sent to each

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Forecasters:
    """`Moments.forecasts` for hundreds of forecasts of one problem; the same numbers.

    A forecast of few examples is many small pieces of linear algebra, and between them Python lets one thread run at a
    time: two threads are no faster than one, two processes are twice as fast. This one is one of them. The others start
    in the background, and what a killed one owes is computed here. Where the problem is small, or cannot be sent, all
    of it is.

    Args:
      problem: None where it is still to be read: `about` names it, and if that takes long, the processes have started.

    >>> from noisecast import quadratic
    >>> with Forecasters(quadratic([1.0], 1.0, example_noise_std=0.1)) as ask:
    ...     ask.num_processes                                                   # nothing is worth a process here
    0
    """

    def __init__(self, problem: Problem | None = None) -> None:
        self._processes: list[WorkerProcess] = []
        self._idle: queue.SimpleQueue[WorkerProcess | None] = queue.SimpleQueue()  # None: this process
        self._idle.put(None)
        self._start_soon = Timer(LONG_READING, self._start)
        if problem is None:
            self._start_soon.start()
        else:
            self.about(problem)

    def about(self, problem: Problem) -> "Forecasters":
        """What all questions are about. Once."""
        self._settle()
        self._problem, content = problem, b""
        if (problem.num_examples or 0) >= WORTH_PROCESSES:
            with suppress(pickle.PicklingError, AttributeError, TypeError):
                content = pickled(problem)
        if 0 < len(content) <= LARGEST_PROBLEM:
            if not self._processes:
                self._start()
        else:
            self._end()
        for process in self._processes:
            process.first = content
            self._idle.put(process)
        return self

    def _start(self) -> None:
        self._processes = [WorkerProcess(__name__) for _ in range((os.cpu_count() or 1) - 1)]

    def _settle(self) -> None:
        """Afterwards the processes have started, or do not start by themselves."""
        self._start_soon.cancel()
        if self._start_soon.ident is not None:
            self._start_soon.join()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes = []

    @property
    def num_processes(self) -> int:
        """Beside this one."""
        return len(self._processes)

    def __enter__(self) -> "Forecasters":
        return self

    def __exit__(self, *error: object) -> None:
        self._settle()
        self._end()

    def __call__(self, moments: Moments, scenarios: Sequence[Scenario], record_at: Sequence[int]) -> Iterator[Forecast]:
        """In their order, as they are done."""
        if not self._processes:
            yield from moments.forecasts(scenarios, record_at)
            return
        without_problem = [replace(scenario, problem=ELSEWHERE) for scenario in scenarios]
        yield from self.map(partial(_forecast, moments, tuple(record_at)), without_problem)

    def map(self, function: Callable[[Problem, Asked], Answer], asked: Iterable[Asked]) -> Iterator[Answer]:
        """function(problem, each), in their order, as they are done.

        Args:
          function: at the top of its module, or a `partial` of such a one, so that the processes find it.
        """
        if not self._processes:
            yield from (function(self._problem, each) for each in asked)
            return
        with threadpool_limits(1), ThreadPoolExecutor(1 + len(self._processes)) as attendants:
            yield from attendants.map(lambda each: self._one(function, each), asked)

    def _one(self, function: Callable[[Problem, Asked], Answer], asked: Asked) -> Answer:
        process = self._idle.get()
        try:
            found: Any = self._asked(process, function, asked) if process else function(self._problem, asked)
        finally:
            self._idle.put(process)
        if isinstance(found, Exception):
            raise found
        return found

    def _asked(self, process: WorkerProcess, function: Callable[[Problem, Asked], Answer], asked: Asked) -> Any:
        try:
            return process.ask((function, asked))
        except (EOFError, OSError):  # killed
            return function(self._problem, asked)


ELSEWHERE: Any = None  # a scenario's problem is in the process already


def _forecast(moments: Moments, record_at: Sequence[int], problem: Problem, without_problem: Scenario) -> Forecast:
    return next(moments.forecasts([replace(without_problem, problem=problem)], record_at))


def _prepared(problem: Problem) -> Callable[[Any], Any]:
    def answer(question: tuple[Callable[[Problem, Any], Any], Any]) -> Any:
        function, asked = question
        try:
            return function(problem, asked)
        except Exception as error:  # to be raised where it was asked
            return error

    return answer


def main() -> None:
    serve(_prepared, imports=["dp_accounting"])  # for calibrations
