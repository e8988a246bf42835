"""A race: contestants in processes of their own take turns on one core, timed by their own CPU time.

CPU time, because a machine is rarely ours alone; turns, so that what the machine does meanwhile hits all alike.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np

CHECKED_STEPS = 3
ALMOST_NO_NOISE = 1e-8  # 0 would send a scenario to another engine than the one that is timed

# Read when a library is loaded, so set before a contestant's process begins.
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")} | {
    "NUMBA_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
}


class Trainee(Protocol):
    """A model in training, or a group of them."""

    def advance(self, num_steps: int) -> None:
        """Take so many further steps, all their noise included, and wait for them."""
        ...

    def params(self) -> np.ndarray:
        """Parameters of the first run; (d,), in our problem's order."""
        ...


@dataclass(frozen=True)
class Contestant:
    """Who runs.

    Args:
      name: e.g. "row_sparse", "Opacus ghost".
      peer: whose best this competes to be, e.g. "Opacus"; None for one of our engines.
      optimizer: e.g. "DP-SGD".
      runs: how many runs one step advances.
      start: noise_multiplier -> a `Trainee`, made in the contestant's process; it must pickle. ImportError: absent.
    """

    name: str
    peer: str | None
    optimizer: str
    runs: int
    start: Callable[[float], Trainee]


@dataclass(frozen=True)
class Result:
    """Run-steps per second of CPU and of wall time, one number a round; `absent` says what is not installed."""

    contestant: Contestant
    cpu_rates: list[float]
    wall_rates: list[float]
    absent: str | None = None

    @property
    def rate(self) -> float:
        return float(np.median(self.cpu_rates))


def race(contestants: Sequence[Contestant], *, rounds: int, seconds: float, core: int, say: Callable) -> list[Result]:
    """Check that all contestants of an optimizer take the same steps, then time them, `seconds` of CPU a round each.

    Raises: RuntimeError when two contestants disagree: then a ratio of their rates would mean nothing.
    """
    os.environ.update(_ONE_THREAD)
    runners = []
    try:
        for contestant in contestants:
            runners.append(_Runner(contestant, core, seconds))
            say(f"{contestant.name}, {contestant.optimizer}: {runners[-1].absent or 'ready'}")
        present = [runner for runner in runners if not runner.absent]
        _check_that_all_agree(present, say)
        for runner in present:
            runner.ask("warm_up")
        for number in range(rounds):
            for runner in present:
                cpu_rate, wall_rate = runner.ask("take_turn")
                runner.cpu_rates.append(cpu_rate)
                runner.wall_rates.append(wall_rate)
            say(f"round {number + 1} of {rounds}")
        return [Result(r.contestant, r.cpu_rates, r.wall_rates, r.absent) for r in runners]
    finally:
        for runner in runners:
            runner.stop()


def _check_that_all_agree(runners: Sequence["_Runner"], say: Callable) -> None:
    """The first of ours is the measure; relative to the largest update, since Adam's and SGD's differ in size."""
    for optimizer in dict.fromkeys(runner.contestant.optimizer for runner in runners):
        first, *others = [runner for runner in runners if runner.contestant.optimizer == optimizer]
        expected = first.ask("noiseless_params")
        for other in others:
            found = other.ask("noiseless_params")
            error = float(np.abs(found - expected).max() / np.abs(expected).max())
            say(f"{other.contestant.name}, {optimizer}: noiseless steps differ from ours by {error:.1e}")
            if not error <= 1e-5:
                raise RuntimeError(
                    f"Expected {other.contestant.name} to take the steps that {first.contestant.name} takes for "
                    f"{optimizer}, got a relative difference of {error:.2g} after {CHECKED_STEPS}; mend its step."
                )


class _Runner:
    """The parent's end of one contestant's process."""

    def __init__(self, contestant: Contestant, core: int, seconds: float):
        self.contestant = contestant
        self.cpu_rates: list[float] = []
        self.wall_rates: list[float] = []
        context = multiprocessing.get_context("spawn")  # a fork would inherit threads and libraries already loaded
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, contestant, core, seconds), daemon=True)
        self._process.start()
        theirs.close()
        self.absent: str | None = self._connection.recv()

    def ask(self, what: str):
        self._connection.send(what)
        return self._connection.recv()

    def stop(self) -> None:
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, contestant: Contestant, core: int, seconds: float) -> None:
    os.sched_setaffinity(0, {core})
    try:
        turns = _Turns(contestant, seconds)
    except ImportError as error:
        connection.send(f"{error.name} is not installed")
        return
    connection.send(None)
    try:
        while True:
            connection.send(getattr(turns, connection.recv())())
    except EOFError:  # the race is over
        pass


class _Turns:
    """One contestant in its own process: what the parent may ask it for."""

    def __init__(self, contestant: Contestant, seconds: float):
        self._contestant, self._seconds = contestant, seconds
        self._steps = 1
        self._trainee = contestant.start(1.0)

    def noiseless_params(self) -> np.ndarray:
        trainee = self._contestant.start(ALMOST_NO_NOISE)
        trainee.advance(CHECKED_STEPS)
        return trainee.params()

    def warm_up(self) -> None:
        """Compile, then find how many steps a turn takes."""
        self._trainee.advance(CHECKED_STEPS)
        while (spent := self._timed(self._steps)[0]) < 0.2 * self._seconds:
            self._steps *= 2
        self._steps = max(2, round(self._steps * self._seconds / spent))

    def take_turn(self) -> tuple[float, float]:
        """Run-steps per second of this process's CPU time, and of wall time."""
        cpu, wall = self._timed(self._steps)
        run_steps = self._steps * self._contestant.runs
        return run_steps / cpu, run_steps / wall

    def _timed(self, num_steps: int) -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        self._trainee.advance(num_steps)
        return time.process_time() - cpu, time.perf_counter() - wall
