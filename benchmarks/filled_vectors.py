"""Groups whose runs fill no whole vector: is a step faster with more lanes, computed for nothing?

  python -m benchmarks.filled_vectors
  python -m benchmarks.filled_vectors --sizes 9,17,33

The shape of IMDB on the row-sparse engine, one thread, in turns. `fewest_filled` and `most_added` of the engine come
from this table; where what they choose was slower by more than 3 % it is marked.
"""

import time
from unittest.mock import patch

import numpy as np
from cyclopts import App
from rich.console import Console
from rich.table import Table

from benchmarks.curves import Shape
from benchmarks.linear_model import ROOT, LinearTask, scenarios_of
from noisecast.cli.output import TABLE_STYLE
from noisecast.engines import row_sparse
from noisecast.optimizers import OPTIMIZERS

SIZES = "3,4,5,6,7,9,10,11,12,17,18,20,33,36"
ROUNDS, SECONDS = 7, 0.2  # for each turn
app = App(help=__doc__, help_format="plaintext")


@app.default
def main(*, sizes: str = SIZES) -> None:
    task = LinearTask(Shape(25_000, 10_000, 148).data(), l2_clip_norm=0.5)
    shown = Table(title="Microseconds a step of a group, as it is and with whole vectors", **TABLE_STYLE)
    for header in ("optimizer", "runs", "as it is", "filled", "filled / as it is", "the engine", ""):
        shown.add_column(header, justify="right")
    for kind in OPTIMIZERS:
        for runs in map(int, sizes.split(",")):
            as_it_is, filled = compared(task, kind, runs)
            is_filled = row_sparse._OPTIMIZERS[kind].are_filled(runs)
            chosen, other = (filled, as_it_is) if is_filled else (as_it_is, filled)
            cells = f"{as_it_is:.0f}", f"{filled:.0f}", f"{filled / as_it_is:.2f}", "fills" if is_filled else "does not"
            shown.add_row(kind.name, str(runs), *cells, "slower" if chosen > 1.03 * other else "")
    Console().print(shown)


def compared(task: LinearTask, kind: type, num_runs: int) -> tuple[float, float]:
    """CPU microseconds a step: the lanes of the runs alone, and whole vectors of lanes."""
    groups = []
    for is_filled in (False, True):
        with patch.object(row_sparse._Kernels, "are_filled", lambda self, runs, answer=is_filled: answer):
            scenarios = scenarios_of(task, kind.name, num_runs, 1.0)
            groups.append(row_sparse.RowSparseRun(scenarios, repeats=[0], root=ROOT))
    steps, times = [0, 0], ([], [])
    for turn in range(ROUNDS + 1):
        for which, group in enumerate(groups):
            began, done = time.thread_time(), 0
            while time.thread_time() - began < SECONDS:
                steps[which], done = steps[which] + 64, done + 64
                group.advance(steps[which])
            if turn:  # the first one compiles
                times[which].append((time.thread_time() - began) / done * 1e6)
    return float(np.median(times[0])), float(np.median(times[1]))


if __name__ == "__main__":
    app()
