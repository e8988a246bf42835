from types import SimpleNamespace

from noisecast.sweeps import workers
from noisecast.sweeps.workers import Waiting


def tasks(optimizers: str, *, repeats: tuple[int, ...] = (0,)) -> list:
    """One of each letter's optimizer."""
    return [
        SimpleNamespace(
            runner=SimpleNamespace(name="training"),
            repeats=repeats,
            scenarios=[SimpleNamespace(problem=None, optimizer=SimpleNamespace(name=letter))],
        )
        for letter in optimizers
    ]


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
