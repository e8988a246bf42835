"""Run the workloads, print the ratios, write them to benchmarks/results/latest.json."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import cyclopts
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import curves, w1_imdb, w2_forum500, w3_movielens, w4_simulation, w5_stationary
from benchmarks.race import Result, race

WORKLOADS: tuple[ModuleType, ...] = (w1_imdb, w2_forum500, w3_movielens, w4_simulation, w5_stationary)
RESULTS = Path(__file__).parent / "results" / "latest.json"
CURVES = RESULTS.with_name("curves.json")
VERSIONS_OF = ("noisecast", "numba", "numpy", "jax", "jax-privacy", "torch", "opacus", "torchsde", "diffrax")

console = Console()
app = cyclopts.App(help="Noisecast side by side with its peers, one core each, in turns.")


@dataclass(frozen=True)
class Row:
    """One of our engines against one peer; rates are run-steps per second of CPU time, medians over the rounds.

    Args:
      peer: e.g. "Opacus".   peer_best: the fastest of it, e.g. "Opacus ghost", or why it is absent.
      peer_optimizer: DP-SGD against our DP-SignSGD.
      ratio: median over rounds of ours / theirs in that round.   spread: its smallest and largest.
    """

    workload: str
    data: str
    optimizer: str
    engine: str
    runs_per_group: int
    steps_per_second: float
    peer: str
    peer_best: str
    peer_optimizer: str
    peer_steps_per_second: float | None
    ratio: float | None
    spread: tuple[float, float] | None
    rounds: int
    machine: str


@app.default
def main(
    *,
    quick: bool = False,
    only: str | None = None,
    data_dir: str | None = None,
    rounds: int = 3,
    core: int | None = None,
) -> None:
    """Run every workload.

    Args:
      quick: three short rounds: shows that all is in order; the ratios are rough and not written down.
      only: one workload, e.g. W1; in the file it replaces its own rows alone.
      data_dir: folder with the data sets; else NOISECAST_DATA. Without it, synthetic stand-ins of the same shape.
      rounds: how often each contestant has its turn.
      core: where all of them run; default the last one this process may use.
    """
    chosen = [workload for workload in WORKLOADS if only in (None, workload.NAME)]
    if not chosen:
        raise SystemExit(f"Expected --only {' or '.join(w.NAME for w in WORKLOADS)}, got {only}.")
    rounds, seconds = (3, 0.2) if quick else (rounds, 1.0)
    core = max(os.sched_getaffinity(0)) if core is None else core
    for workload in chosen:
        data, contestants = workload.contestants(data_dir)
        console.rule(f"{workload.NAME}: {data}")
        found = race(contestants, rounds=rounds, seconds=seconds, core=core, say=console.print)
        rows = rows_of(workload.NAME, data, found)
        console.print(table_of(rows))
        if quick:
            console.print("A quick look: the ratios are rough, and nothing is written down.")
        else:
            write(workload.NAME, rows, found)


@app.command(name="curves")
def cost_curves(
    *, quick: bool = False, grid: bool = False, data_dir: str | None = None, core: int | None = None
) -> None:
    """What a run-step costs against n, d, non-zeros, runs and threads, and peak memory: a table and a picture.

    Args:
      quick: tiny data, to show that all is in order; nothing is written down.
      grid: instead, how long the paper's grids take; --data-dir for the real data. Replaces these rows alone.
      data_dir: folder with the data sets; else NOISECAST_DATA. Only the grids use it: curves are of stand-ins.
      core: where everything runs that needs one; default the last one this process may use.
    """
    plan = curves.QUICK if quick else curves.Plan()
    core = max(os.sched_getaffinity(0)) if core is None else core
    if grid:
        rows = curves.grids(plan, data_dir, core=core, say=console.print)
    else:
        task = curves.imdb_task(plan.imdb.data())
        rows = [
            *curves.cost_curves(plan, core=core, say=console.print),
            *curves.thread_curve(plan, task, say=console.print),
            *curves.memory(plan, say=console.print),
        ]
    if not quick:
        write_curves(rows, grid=grid)


def write_curves(rows: list[curves.Row], *, grid: bool) -> None:
    """The new rows beside the other half's old ones; each row says on which machine it was found."""
    found = [asdict(row) | {"part": "grid" if grid else "curves", "machine": machine()} for row in rows]
    old = json.loads(CURVES.read_text(encoding="utf-8"))["rows"] if CURVES.exists() else []
    found += [row for row in old if (row["part"] == "grid") != grid]
    versions = {name: version_of(name) for name in ("noisecast", "numba", "numpy")}
    load = round(os.getloadavg()[0], 2)
    CURVES.write_text(json.dumps({"load_average": load, "versions": versions, "rows": found}, indent=1) + "\n")
    if not grid:
        curves.draw(rows).savefig(CURVES.with_suffix(".png"))
    console.print(f"Written to {CURVES}; load average {load:.1f}.")


def rows_of(workload: str, data: str, results: list[Result]) -> list[Row]:
    """Each of ours against the best of each peer."""
    rows = []
    for our in (result for result in results if result.contestant.peer is None):
        # No peer has a sign optimizer: its SGD step does the same work but for one sign a coordinate.
        optimizer = our.contestant.optimizer.replace("DP-SignSGD", "DP-SGD")
        rivals = [r for r in results if r.contestant.peer and r.contestant.optimizer == optimizer]
        for peer in dict.fromkeys(rival.contestant.peer for rival in rivals if rival.contestant.peer):
            same_peer = [rival for rival in rivals if rival.contestant.peer == peer]
            best = max(same_peer, key=lambda rival: -1.0 if rival.absent else rival.rate)
            ratios = None if best.absent else np.divide(our.cpu_rates, best.cpu_rates)
            rows.append(
                Row(
                    workload=workload,
                    data=data,
                    optimizer=our.contestant.optimizer,
                    engine=our.contestant.name,
                    runs_per_group=our.contestant.runs,
                    steps_per_second=round(our.rate, 1),
                    peer=peer,
                    peer_best=best.absent or best.contestant.name,
                    peer_optimizer=optimizer,
                    peer_steps_per_second=None if ratios is None else round(best.rate, 3),
                    ratio=None if ratios is None else round(float(np.median(ratios)), 2),
                    spread=None if ratios is None else (round(float(ratios.min()), 2), round(float(ratios.max()), 2)),
                    rounds=len(our.cpu_rates),
                    machine=machine(),
                )
            )
    return rows


def table_of(rows: list[Row]) -> Table:
    """Of one workload: a line for each of our groups and each peer's best."""
    title = f"{rows[0].workload}, {rows[0].data}: run-steps per second of CPU time on one core"
    caption = "times: median over rounds. No peer has a sign optimizer: its SGD stands in."
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("optimizer", "engine", "runs", "ours", "best of a peer", "theirs", "times", "range"):
        is_text = name in ("optimizer", "engine", "best of a peer")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    last = None
    for row in rows:
        ours = (row.optimizer, row.engine, str(row.runs_per_group), _short(row.steps_per_second))
        theirs = [row.peer_best, "", "", ""]
        if row.ratio is not None and row.spread is not None:
            theirs[1:] = [*map(_short, (row.peer_steps_per_second, row.ratio)), " - ".join(map(_short, row.spread))]
        table.add_row(*(ours if ours != last else [""] * len(ours)), *theirs)
        last = ours
    return table


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if 100 <= value < 1e7 else f"{value:.3g}"


def write(workload: str, rows: list[Row], results: list[Result]) -> None:
    """The rows, and every contestant's rates by round, by the clock on the wall too; the other workloads' old ones stay
    if the same machine and versions found them.
    """
    contestants = [
        {
            "workload": workload,
            "name": result.contestant.name,
            "optimizer": result.contestant.optimizer,
            "runs_per_group": result.contestant.runs,
            "steps_per_cpu_second": [round(rate, 3) for rate in result.cpu_rates],
            "steps_per_wall_second": [round(rate, 3) for rate in result.wall_rates],
            "absent": result.absent,
        }
        for result in results
    ]
    here: dict[str, Any] = {"machine": machine(), "versions": {name: version_of(name) for name in VERSIONS_OF}}
    old = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if any(old.get(name) != value for name, value in here.items()):
        old = {"load_average": {}, "rows": [], "contestants": []}
    load = os.getloadavg()[0]
    found = here | {
        "load_average": old["load_average"] | {workload: round(load, 2)},
        "rows": _with(old["rows"], workload, [asdict(row) for row in rows]),
        "contestants": _with(old["contestants"], workload, contestants),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console.print(f"Written to {RESULTS}; load average {load:.1f}.")


def _with(old: list[dict], workload: str, new: list[dict]) -> list[dict]:
    """All rows in the order of the workloads, those of one of them anew."""
    names = [each.NAME for each in WORKLOADS]
    return sorted(
        [row for row in old if row["workload"] != workload] + new, key=lambda row: names.index(row["workload"])
    )


def machine() -> str:
    """Model of the processor and how many of it, e.g. "AMD EPYC (family 25, model 17), 2 cores"."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    model = about.get("model name", platform.machine())
    return f"{model} (family {about.get('cpu family', '?')}, model {about.get('model', '?')}), {os.cpu_count()} cores"


def version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    app()
