import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from noisecast.sweeps import workers
from noisecast.sweeps.workers import Waiting, in_processes


def tasks(optimizers: str, *, repeats: tuple[int, ...] = (0,)) -> list:
    """One of each letter's optimizer."""
    return [
        SimpleNamespace(
            runner=SimpleNamespace(name="training"),
            repeats=repeats,
            scenarios=[
                SimpleNamespace(
                    problem=SimpleNamespace(name="digits"),
                    optimizer=SimpleNamespace(name=letter),
                    mechanism=SimpleNamespace(expected_batch_size=64.0),
                )
            ],
        )
        for letter in optimizers
    ]


class Fatal(SimpleNamespace):
    """A task that kills the process that computes it, so many times, as a system does that is out of memory."""

    def run(self) -> pd.DataFrame:
        before = len(list(self.folder.iterdir()))
        if before < self.deaths:
            (self.folder / str(before)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return pd.DataFrame({"deaths": [before]})


def fatal(folder: Path, deaths: int) -> Any:
    return Fatal(folder=folder, deaths=deaths, cells="123", **vars(tasks("a", repeats=())[0]))


def test_two_do_not_compile_the_same():
    waiting = Waiting(tasks("aaabb"))
    assert [waiting.next(), waiting.next()] == [0, 3]  # both compile now, each its own
    waiting.done(3)
    assert waiting.next() == 4  # the first of a is still in hand
    waiting.done(0)
    assert [waiting.next(), waiting.next(), waiting.next()] == [1, 2, None]


def test_nobody_idles_where_nothing_else_is_left():
    waiting = Waiting(tasks("aab"))
    assert [waiting.next(), waiting.next(), waiting.next(), waiting.next()] == [0, 2, 1, None]


def test_what_is_compiled_is_given_to_everybody():
    waiting = Waiting(tasks("aaab"))
    number = waiting.next()
    waiting.done(number)
    assert [waiting.next(), waiting.next()] == [1, 2]


def test_a_long_task_holds_others_back_no_longer_than_compiling_takes(monkeypatch):
    now = 0.0
    monkeypatch.setattr(workers.time, "monotonic", lambda: now)
    waiting = Waiting(tasks("aaabb"))
    assert [waiting.next(), waiting.next()] == [0, 3]
    now = workers.LONGEST_TO_COMPILE
    assert [waiting.next(), waiting.next()] == [1, 2]


def test_what_compiles_nothing_keeps_its_order():
    waiting = Waiting(tasks("aab", repeats=()))
    assert [waiting.next(), waiting.next(), waiting.next()] == [0, 1, 2]


@pytest.fixture
def found_by_workers(monkeypatch):
    """What pickles a task of this file names this file."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


def test_a_task_whose_worker_is_killed_is_begun_again_and_says_so(tmp_path, found_by_workers):
    with pytest.warns(RuntimeWarning, match="^1 worker process was killed up to now"):
        (done,) = in_processes([fatal(tmp_path, deaths=1)], 1)
    assert done.table is not None and done.table["deaths"].tolist() == [1]


def test_a_task_that_kills_every_worker_fails_alone_by_name(tmp_path, found_by_workers, monkeypatch):
    monkeypatch.setattr(workers, "MAX_DEATHS", 2)
    with pytest.warns(RuntimeWarning) as told:
        done = {each.task.deaths: each for each in in_processes([fatal(tmp_path, 99), fatal(tmp_path, 0)], 1)}
    assert [str(each.message).partition(" killed")[0] for each in told] == [
        "1 worker process was",
        "2 worker processes were",
    ]
    assert done[99].table is None
    assert done[99].why == (
        "2 workers were killed while they computed 3 runs of a on digits, expected batch size 64 (out of memory?)."
    )
    assert done[0].table is not None
