"""Training for a comparison: in parts that an interruption leaves whole, and on until each mean is known."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from noisecast.figures import accuracy_picture
from noisecast.privacy.noise import RandomRoot
from noisecast.runners import Training
from noisecast.scenario import Scenario

MORE_SEEDS = 2**20  # their numbers: none of the first round


def trained_in_parts(
    scenarios: Sequence[Scenario],
    repeats: Sequence[int],
    root: RandomRoot,
    record_at: Sequence[int],
    progress: Callable[[float], None],
) -> Iterator[pd.DataFrame]:
    """The rows of training, some repeats of every scenario at a time, as soon as they are done.

    At least as many repeats as one call takes side by side, and one for each core: no slower than all at once.
    """
    training, done = Training(), 0
    at_once = max(os.cpu_count() or 1, *(len(some) for _, some in training.calls(scenarios, repeats)))
    for part in np.array_split(repeats, max(1, len(repeats) // at_once)):
        now = len(part)

        def report(share: float, done=done, now=now) -> None:
            progress((done + share * now) / len(repeats))

        yield training.answer(scenarios, repeats=part.tolist(), root=root, record_at=record_at, progress=report)
        done += now


def trained_on(
    scenarios: Sequence[Scenario],
    table: pd.DataFrame,
    share: float,
    num_seeds: int,
    most_seeds: int,
    record_at: Sequence[int],
    progress: Callable[[float], None],
) -> Iterator[pd.DataFrame]:
    """The table, then as it grows, for cells whose mean last loss is known less well than to `share`.

    Each round doubles the seeds of the cells that lack some. A cell in which a run diverged has no mean, and is left.
    """
    yield table
    root, trained, done = RandomRoot.from_os_entropy(), num_seeds, 0
    while trained < most_seeds and not (lack := _lacking(_cells(table), share)).empty:
        lacking = [scenario for scenario in scenarios if scenario.id in lack.index]
        repeats = list(range(MORE_SEEDS + trained, MORE_SEEDS + min(2 * trained, most_seeds)))
        ahead = sum(_seeds_ahead(worse, trained, most_seeds) for worse in lack)
        now = len(lacking) * len(repeats)

        def report(part: float, done=done, now=now, whole=done + ahead) -> None:
            progress((done + part * now) / whole)

        for more in trained_in_parts(lacking, repeats, root, record_at, report):
            table = pd.concat([table, more], ignore_index=True)
            yield table
        done, trained = done + now, trained + len(repeats)


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
