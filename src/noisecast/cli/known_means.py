"""Rounds of further training until the mean final loss of each cell is known as well as was asked for."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd

from noisecast.figures import accuracy_picture
from noisecast.privacy.noise import RandomRoot
from noisecast.runners import Training
from noisecast.scenario import Scenario

MORE_SEEDS = 2**20  # their numbers: none of the first round


def trained_on(
    scenarios: Sequence[Scenario],
    table: pd.DataFrame,
    share: float,
    num_seeds: int,
    most_seeds: int,
    record_at: Sequence[int],
    progress: Callable[[float], None],
) -> Iterator[pd.DataFrame]:
    """The table after each further round, for cells whose mean last loss is known less well than to `share`.

    Each round doubles the seeds of the cells that lack some. A cell in which a run diverged has no mean, and is left.
    """
    root, trained, done = RandomRoot.from_os_entropy(), num_seeds, 0
    while trained < most_seeds and not (lack := _lacking(_cells(table), share)).empty:
        lacking = [scenario for scenario in scenarios if scenario.id in lack.index]
        repeats = list(range(MORE_SEEDS + trained, MORE_SEEDS + min(2 * trained, most_seeds)))
        ahead = sum(_seeds_ahead(worse, trained, most_seeds) for worse in lack)
        now = len(lacking) * len(repeats)

        def report(part: float, done=done, now=now, whole=done + ahead) -> None:
            progress((done + part * now) / whole)

        more = Training().answer(lacking, repeats=repeats, root=root, record_at=record_at, progress=report)
        done, trained = done + now, trained + len(repeats)
        table = pd.concat([table, more], ignore_index=True)
        yield table


def what_is_not_known(cells: Any, share: float) -> str | None:
    """The cells whose means the seeds did not suffice for, in one sentence.

    Args:
      cells: as `accuracy_picture.last_steps`.
    """
    lack = _lacking(cells, share)
    if lack.empty:
        return None
    count = f"{len(lack)} of {len(cells)} means are" if len(lack) > 1 else f"One of {len(cells)} means is"
    asked, worst = (f"{100 * each:.2g} %" for each in (share, share * lack.max()))
    return f"{count} known less well than to {asked}, the worst to {worst}: give more --most-seeds."


def _cells(table: pd.DataFrame) -> Any:
    return accuracy_picture.last_steps(accuracy_picture.data(table)).set_index("scenario")


def _lacking(cells: Any, share: float) -> Any:
    """How many times as large as asked for each standard error is that is larger."""
    times = cells["trained_sem"] / (share * cells["trained_mean"].abs())
    return times[(times > 1) & (cells["num_diverged"] == 0)]


def _seeds_ahead(times: float, trained: int, most: int) -> int:
    """Further seeds of a cell, by doublings, until its error has fallen by so many times.

    >>> _seeds_ahead(1.1, 16, 400), _seeds_ahead(3.0, 16, 400), _seeds_ahead(9.0, 16, 400)
    (16, 240, 384)
    """
    return min(trained * 2 ** math.ceil(2 * math.log2(times)), most) - trained
