"""What a run-step of the row-sparse engine costs: curves, not points; peak memory; and how long the paper's grids take.

Curves change one number of W1 and leave the others: the examples n, the features d, the non-zeros a row, the runs a
group. Data are stand-ins, made by the shape asked for. Time is this process's CPU time on one core; where threads are
compared it is the time on the wall, of the same runs on one core and on two, in turns.
"""

import dataclasses
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from benchmarks.linear_model import ROOT, SETTINGS, LinearTask, scenarios_of, stand_in
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.datasets import DataError, Dataset, forum500, imdb

MEASURED = "measured"


@dataclass(frozen=True)
class Shape:
    """Of a stand-in; `num_classes` = 2: one output, else one output a class."""

    num_examples: int
    num_features: int
    mean_words: int
    num_classes: int = 2

    def data(self, name: str = "stand-in") -> Dataset:
        return stand_in(name=name, **dataclasses.asdict(self))


@dataclass(frozen=True)
class Plan:
    """How much is measured. The defaults are for an idle machine; `QUICK` shows that all is in order.

    Args:
      seconds, rounds: of CPU time that each point gets a round.
      groups: runs a group on the curves over n, d and non-zeros, and where generators are compared.
    """

    seconds: float = 0.5
    rounds: int = 3
    imdb: Shape = Shape(25_000, 10_000, 148)
    forum500: Shape = Shape(246_092, 10_000, 41, 500)
    num_examples: tuple[int, ...] = (2_500, 8_000, 25_000, 80_000, 250_000)
    num_features: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000)
    mean_words: tuple[int, ...] = (15, 50, 148, 500, 1_500)
    runs: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    groups: tuple[int, ...] = (1, 64)
    turns: int = 7  # where two are compared, in turns: the machine's other work then falls on both
    memory_steps: int = 4_100  # more than the engine draws batches for at once
    imdb_steps: int = 39_000
    forum500_steps: int = 192_250
    forum500_stretch: int = 10_000


QUICK = Plan(
    seconds=0.01, rounds=2, imdb=Shape(400, 300, 20), forum500=Shape(300, 100, 10, 5), num_examples=(200, 400),
    num_features=(100, 300), mean_words=(5, 20), runs=(1, 4), groups=(1, 4), turns=2, memory_steps=40,
    imdb_steps=40, forum500_steps=100, forum500_stretch=20,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One number.

    Args:
      curve: "examples", "features", "non-zeros", "runs", "secure", "threads", "memory" or "grid".
      nonzeros_per_row: the mean over the data.   runs: of a group, or all of them in a grid.
      low, high: the rounds' smallest and largest, of which `value` is the median.
      how: "measured", or what it was estimated from.
    """

    curve: str
    data: str
    optimizer: str
    num_examples: int
    num_params: int
    nonzeros_per_row: float
    runs: int
    threads: int
    metric: str
    value: float
    low: float | None = None
    high: float | None = None
    how: str = MEASURED


# --- Cost of a run-step -----------------------------------------------------------------------------------------------


def cost_curves(plan: Plan, *, core: int, say: Callable) -> list[Row]:
    """Microseconds of CPU time a run-step on one core."""
    varied = [
        *(("examples", dataclasses.replace(plan.imdb, num_examples=n), plan.groups) for n in plan.num_examples),
        *(("features", dataclasses.replace(plan.imdb, num_features=d), plan.groups) for d in plan.num_features),
        *(("non-zeros", dataclasses.replace(plan.imdb, mean_words=words), plan.groups) for words in plan.mean_words),
        ("runs", plan.imdb, plan.runs),
    ]
    rows = []
    with _on({core}):
        for curve, shape, groups in varied:
            task = imdb_task(shape.data())
            for runs in groups:
                for optimizer in SETTINGS:
                    costs = [1e6 * cost for cost in _seconds_a_step(_start(task, optimizer, runs), plan)]
                    found = _row(curve, task, optimizer, runs, "cpu_us_per_run_step", np.divide(costs, runs))
                    rows.append(found)
                    say(f"{curve}: {runs} x {optimizer}, {found.value:.3g} us a run-step at {_place(found)}")
    return rows


def secure_curve(plan: Plan, *, core: int, say: Callable) -> list[Row]:
    """What secure noise (the extra `[secure]`) costs: CPU time of a run-step over the fast generator's, in turns."""
    task, rows = imdb_task(plan.imdb.data()), []
    with _on({core}):
        for runs in plan.groups:
            for optimizer in SETTINGS:
                fast = _start(task, optimizer, runs)
                secure = _start(task, optimizer, runs, root=RandomRoot.from_os_entropy(secure_noise=True))
                steps = [_steps_of(run, plan) for run in (fast, secure)]
                turns = [
                    [1e6 * _timed(run, n) / (n * runs) for run, n in zip((fast, secure), steps)]
                    for _ in range(plan.turns)
                ]
                costs = np.array(turns).T
                ratios = np.divide(costs[1], costs[0])
                for metric, values in (
                    ("fast_us_per_run_step", costs[0]), ("secure_us_per_run_step", costs[1]), ("secure_to_fast", ratios)
                ):  # fmt: skip
                    rows.append(_row("secure", task, optimizer, runs, metric, values))
                found = rows[-1]
                say(
                    f"secure: {runs} x {optimizer}, {found.value:.2f} times the fast generator "
                    f"({found.low:.2f} - {found.high:.2f} in {len(turns)} turns), {rows[-2].value:.3g} against "
                    f"{rows[-3].value:.3g} us a run-step at {_place(found)}"
                )
    return rows


def thread_curve(plan: Plan, task: LinearTask, *, say: Callable) -> list[Row]:
    """Run-steps a second of wall time: two repeats of a group after each other on one core, and on a thread each."""
    cores = sorted(os.sched_getaffinity(0))[-2:]
    if len(cores) < 2:
        say("threads: left out, this process may use one core only")
        return []
    rows = []
    for optimizer in SETTINGS:
        runs = plan.groups[-1]
        alone = [_start(task, optimizer, runs, repeats=[repeat]) for repeat in (0, 1)]
        both = _start(task, optimizer, runs, repeats=[0, 1])
        steps = 2 * _steps_of(both, plan)  # a second of both: threads wait for each other at the end
        rates: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(plan.turns):
            for threads, members in ((1, alone), (2, [both])):
                with _on(set(cores[-threads:])):
                    spent = sum(_timed(run, steps, time.perf_counter) for run in members)
                rates[threads].append(2 * runs * steps / spent)
        for threads, found in rates.items():
            rows.append(_row("threads", task, optimizer, runs, "run_steps_per_second", found, threads=threads))
        ratios = np.divide(rates[2], rates[1])
        rows.append(_row("threads", task, optimizer, runs, "speedup", ratios, threads=2))
        say(f"threads: {2 * runs} runs of {optimizer}, {rows[-1].value:.2f} times as fast on two")
    return rows


# --- Memory -----------------------------------------------------------------------------------------------------------


def memory(plan: Plan, *, say: Callable, optimizers: Sequence[str] = tuple(SETTINGS)) -> list[Row]:
    """Peak resident memory of processes that train and evaluate one group each: W1's group, and one run of W2's size.

    Once the kernels are compiled: to compile them takes memory of its own, the first time on a machine.
    """
    rows = []
    for name, shape, runs, clip in (("W1", plan.imdb, plan.groups[-1], 0.5), ("W2", plan.forum500, 1, 1.0)):
        task = LinearTask(shape.data(f"{name} stand-in"), l2_clip_norm=clip)
        for optimizer in optimizers:
            for attempt in range(2):  # the first one compiles, if need be
                found = peak_of_a_fresh_process(task, optimizer, runs, steps=plan.memory_steps)
                if attempt:
                    rows += [_row("memory", task, optimizer, runs, name, [value]) for name, value in found.items()]
            say(f"memory, {name}, {runs} runs of {optimizer}: " + ", ".join(f"{k} {v:.0f}" for k, v in found.items()))
    return rows


def peak_of_a_fresh_process(task: LinearTask, optimizer: str, runs: int, *, steps: int) -> dict[str, float]:
    """MiB of the libraries alone, of the data as they are handed over, and the peak with and without the data."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"  # a pipe would hold the data twice
        x: Any = task.data.features
        np.savez(path, values=x.data, indices=x.indices, indptr=x.indptr, labels=task.data.labels)
        names, clip = task.data.label_names, task.l2_clip_norm
        context = multiprocessing.get_context("spawn")  # a fork would begin with this process's memory
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(_peak, path, task.data.num_features, names, clip, optimizer, runs, steps).result()


def _peak(
    path: Path, num_features: int, names: tuple[str, ...], clip: float, optimizer: str, runs: int, steps: int
) -> dict[str, float]:
    from noisecast import engines as _engines  # noqa: F401  # loads JAX and Numba, before the first look

    libraries = status_mib("VmRSS")
    with np.load(path) as file:
        entries, labels = (file["values"], file["indices"], file["indptr"]), file["labels"]
    features = scipy.sparse.csr_array(entries, shape=(len(labels), num_features))
    size = sum(array.nbytes for array in (*entries, labels)) / 2**20
    run = _start(LinearTask(Dataset("stand-in", features, labels, names), clip), optimizer, runs)
    run.advance(steps)
    run.evaluate()
    peak = status_mib("VmHWM")
    return {"libraries_mib": libraries, "data_mib": size, "peak_mib": peak, "peak_less_data_mib": peak - size}


def status_mib(name: str) -> float:
    """Of this process. Not getrusage's ru_maxrss: that one begins with the peak of the process that started it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024


# --- The paper's grids ------------------------------------------------------------------------------------------------

# Protocol B on IMDB: 11 budgets; 10 rates and 4 clip norms each for two optimizers, 13 rates and 3 norms for DP-Adam.
PROTOCOL_B = {"DP-SGD": 440, "DP-SignSGD": 440, "DP-Adam": 429}
EVALUATIONS = 10


def grids(plan: Plan, data_dir: str | None, *, core: int, say: Callable) -> list[Row]:
    """Seconds of whole groups on IMDB; from them the grid of 1,309 runs; 50 epochs of forum500, from a stretch.

    The grid is pro rata of groups of 64 with their evaluations, one seed, over the speed-up of two threads, both as
    measured here.
    """
    train, test = _read(imdb, data_dir, plan.imdb)
    task, runs = imdb_task(train), plan.groups[-1]
    rows, core_seconds = [], {}
    for optimizer in SETTINGS:
        with _on({core}):
            core_seconds[optimizer] = _seconds_with_evaluations(task, test, optimizer, runs, plan.imdb_steps)
        rows.append(_row("grid", task, optimizer, runs, "core_seconds", [core_seconds[optimizer]]))
        say(f"grid: {runs} runs of {optimizer} x {plan.imdb_steps:,} steps, {core_seconds[optimizer]:.1f} core-seconds")
    threads = thread_curve(plan, task, say=say)
    speedups = {row.optimizer: row.value for row in threads if row.metric == "speedup"}
    minutes = sum(core_seconds[o] * count / runs / speedups.get(o, 1.0) for o, count in PROTOCOL_B.items()) / 60
    rows.append(
        dataclasses.replace(
            _row("grid", task, "all three", sum(PROTOCOL_B.values()), "wall_minutes", [minutes]),
            threads=2 if speedups else 1,
            how=f"estimated from the groups of {runs} runs, pro rata, and the speed-up of two threads",
        )
    )
    say(f"grid: {sum(PROTOCOL_B.values()):,} runs, {minutes:.1f} minutes ({rows[-1].how})")
    return [*rows, *threads, _forum500(plan, data_dir, core=core, say=say)]


def _seconds_with_evaluations(task: LinearTask, test: Dataset, optimizer: str, runs: int, steps: int) -> float:
    warm = _start(task, optimizer, runs, test=test)
    warm.advance(3)
    warm.evaluate()
    run = _start(task, optimizer, runs, test=test)
    begin = time.process_time()
    for evaluation in range(1, EVALUATIONS + 1):
        run.advance(steps * evaluation // EVALUATIONS)
        run.evaluate()
    return time.process_time() - begin


def _forum500(plan: Plan, data_dir: str | None, *, core: int, say: Callable) -> Row:
    task = LinearTask(_read(forum500, data_dir, plan.forum500)[0], l2_clip_norm=1.0)
    with _on({core}):
        run = _start(task, "DP-SGD", 1)
        _timed(run, 3)
        spent = _timed(run, plan.forum500_stretch)
    seconds = spent * plan.forum500_steps / plan.forum500_stretch
    found = dataclasses.replace(
        _row("grid", task, "DP-SGD", 1, "core_seconds", [seconds]),
        how=f"estimated from {plan.forum500_stretch:,} of {plan.forum500_steps:,} steps, without evaluations",
    )
    say(f"grid: forum500, DP-SGD, {plan.forum500_steps:,} steps, {seconds:.0f} core-seconds ({found.how})")
    return found


def _read(
    read: Callable[[Any], tuple[Dataset, Dataset]], data_dir: str | None, shape: Shape
) -> tuple[Dataset, Dataset]:
    """Training and test data; where there is no data folder or it lacks them, stand-ins that say so in their name."""
    try:
        return read(data_dir)
    except DataError:
        if data_dir is not None:
            raise
    data = shape.data(f"{read.__name__} (synthetic stand-in)")
    return data, data


# --- Runs and clocks --------------------------------------------------------------------------------------------------


def imdb_task(data: Dataset) -> LinearTask:
    return LinearTask(data, l2_clip_norm=0.5)


def _start(
    task: LinearTask, optimizer: str, runs: int, *, repeats: Sequence[int] = (0,), test: Dataset | None = None,
    root: RandomRoot = ROOT,
) -> Any:  # fmt: skip
    from noisecast import engines
    from noisecast.engines.row_sparse import RowSparseRun
    from noisecast.problems.linear import linear_model

    scenarios = scenarios_of(task, optimizer, runs, 1.0)
    if len(scenarios) != runs:
        raise ValueError(f"Expected at most {len(scenarios)} runs a group, got {runs}; use several groups.")
    if test is not None:
        problem = linear_model(task.data, test)
        scenarios = [dataclasses.replace(scenario, problem=problem) for scenario in scenarios]
    run = engines.start(scenarios, repeats=repeats, root=root)
    assert isinstance(run, RowSparseRun)
    return run


@contextmanager
def _on(cores: set[int]) -> Iterator[None]:
    """This thread, and those that it starts, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _timed(run: Any, steps: int, clock: Callable[[], float] = time.process_time) -> float:
    begin = clock()
    run.advance(run.step + steps)
    _ = run.params  # noise that was postponed is due now
    return clock() - begin


def _steps_of(run: Any, plan: Plan) -> int:
    """How many steps fill a round; compiles what is not compiled yet."""
    _timed(run, 3)
    steps = 1
    while (spent := min(_timed(run, steps), _timed(run, steps))) < 0.2 * plan.seconds:  # one may be slow by accident
        steps *= 2
    return max(2, round(steps * plan.seconds / spent))


def _seconds_a_step(run: Any, plan: Plan) -> list[float]:
    steps = _steps_of(run, plan)
    return [_timed(run, steps) / steps for _ in range(plan.rounds)]


def _row(curve: str, task: LinearTask, optimizer: str, runs: int, metric: str, values: Any, *, threads: int = 1) -> Row:
    data, several = task.data, len(values) > 1
    features: Any = data.features
    return Row(
        curve=curve,
        data=data.name,
        optimizer=optimizer,
        num_examples=data.num_examples,
        num_params=(data.num_features + 1) * task.num_outputs,
        nonzeros_per_row=round(features.nnz / data.num_examples, 1),
        runs=runs,
        threads=threads,
        metric=metric,
        value=round(float(np.median(values)), 4),
        low=round(float(np.min(values)), 4) if several else None,
        high=round(float(np.max(values)), 4) if several else None,
    )


# --- Picture ----------------------------------------------------------------------------------------------------------

_AXES = {
    "examples": ("num_examples", "Examples n"),
    "features": ("num_params", "Parameters of a run d"),
    "non-zeros": ("nonzeros_per_row", "Non-zeros a row"),
    "runs": ("runs", "Runs a group R"),
}


def draw(rows: Sequence[Row]) -> Any:
    """Cost against n, d, non-zeros and R; the speed-up of two threads; peak memory."""
    import matplotlib.pyplot as plt

    from noisecast.figures._style import RC

    with plt.rc_context(RC):
        figure, axes = plt.subplots(2, 3, figsize=(10.5, 6), layout="constrained")
        for ax, curve in zip(axes.flat, _AXES):
            _draw_curve(ax, curve, [row for row in rows if row.curve == curve])
        limits = [axis.get_ylim() for axis in axes.flat[:4]]
        for ax in axes.flat[:4]:  # one scale, so that the curves can be compared
            ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize=8)
        _draw_bars(axes[1, 1], [row for row in rows if row.metric == "speedup"], "Two threads / one, wall time")
        _draw_bars(axes[1, 2], [row for row in rows if row.metric == "peak_mib"], "Peak memory [MiB]")
    return figure


def _place(row: Row) -> str:
    return f"n = {row.num_examples:,}, d = {row.num_params:,}, {row.nonzeros_per_row} non-zeros"


def _draw_curve(ax: Any, curve: str, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import NullLocator

    from noisecast.figures._style import OPTIMIZER_COLOURS

    column, label = _AXES[curve]
    lines = dict.fromkeys((row.optimizer, None if curve == "runs" else row.runs) for row in rows)
    for optimizer, runs in lines:
        line = [row for row in rows if row.optimizer == optimizer and runs in (None, row.runs)]
        name = optimizer if runs is None else f"{optimizer}, R = {runs}"
        x, y = [getattr(row, column) for row in line], [row.value for row in line]
        ax.plot(x, y, "o--" if runs == 1 else "o-", ms=3, color=OPTIMIZER_COLOURS[optimizer], label=name)
        ax.fill_between(x, [row.low for row in line], [row.high for row in line], alpha=0.15, lw=0,
                        color=OPTIMIZER_COLOURS[optimizer])  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel=label, ylabel="CPU time a run-step [µs]")
    ticks = sorted({getattr(row, column) for row in rows})
    ax.set_xticks(ticks, [f"{round(tick):,}" for tick in ticks], fontsize=7)
    ax.xaxis.set_minor_locator(NullLocator())


def _draw_bars(ax: Any, rows: Sequence[Row], title: str) -> None:
    from noisecast.figures._style import OPTIMIZER_COLOURS

    for place, row in enumerate(rows):
        ax.barh(place, row.value, color=OPTIMIZER_COLOURS[row.optimizer])
        ax.text(row.value, place, f" {row.value:.3g}" if row.value < 10 else f" {row.value:,.0f}", va="center")
    ax.set_yticks(range(len(rows)), [f"{row.optimizer}, R = {row.runs},\nd = {row.num_params:,}" for row in rows])
    ax.set(title=title, xlim=(0, 1.25 * max((row.value for row in rows), default=1.0)))
    ax.invert_yaxis()


if __name__ == "__main__":  # `python -m benchmarks.curves`: apart from the others, because it needs the extra [secure]
    secure_curve(Plan(), core=max(os.sched_getaffinity(0)), say=print)
