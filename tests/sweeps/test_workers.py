from types import SimpleNamespace

from noisecast.sweeps.workers import Waiting


def tasks_of_kinds(*kinds: str) -> list:
    return [SimpleNamespace(kind=("training", kind, size)) for size, kind in enumerate(kinds)]


def test_the_first_task_of_a_kind_is_not_computed_beside_others_of_its_kind():
    waiting = Waiting(tasks_of_kinds("a", "a", "a", "b", "b"))
    assert [waiting.next(), waiting.next()] == [0, 3]  # both compile now, each its own
    waiting.done(3)
    assert waiting.next() == 4  # a's first is still in hand
    waiting.done(0)
    assert [waiting.next(), waiting.next(), waiting.next()] == [1, 2, None]


def test_nobody_idles_where_only_that_kind_is_left():
    waiting = Waiting(tasks_of_kinds("a", "a", "b"))
    assert [waiting.next(), waiting.next(), waiting.next(), waiting.next()] == [0, 2, 1, None]


def test_a_kind_that_was_computed_once_is_given_to_everybody():
    waiting = Waiting(tasks_of_kinds("a", "a", "a"))
    waiting.done(waiting.next())
    assert [waiting.next(), waiting.next()] == [1, 2]
