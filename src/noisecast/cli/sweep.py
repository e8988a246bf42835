"""`noisecast sweep`: many questions into a store that nothing can tear."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import pandas as pd
from cyclopts import Parameter
from rich.table import Table

from noisecast.cli.output import TABLE_STYLE, Json, Workers, print_json, to_reader, warn
from noisecast.cli.progress import duration, share_progress, sweep_progress
from noisecast.printed import number
from noisecast.privacy.tuning import TrialDistribution
from noisecast.question import Question
from noisecast.runners import refusals
from noisecast.scenario import warnings_of
from noisecast.scenario_file import read_sweep_file
from noisecast.sweeps import estimate_seconds, run_sweep
from noisecast.table import DIVERGED


def sweep(
    file: Annotated[Path, Parameter(help="Sweep file (TOML): a scenario file with lists; see examples/sweep.toml.")],
    /,
    *,
    store: Annotated[Path, Parameter(help="Folder for the results: a new one, or the one that this sweep has begun.")],
    workers: Workers = None,
    ray: Annotated[
        str | None, Parameter(help='Address of a Ray cluster to run on: "auto", "local" or host:port.')
    ] = None,
    estimate: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Say how long it would take, from a short trial.")
    ] = False,
    json: Json = False,
) -> None:
    """Run a grid of scenarios; run it again, and it goes on where it ended."""
    asked = read_sweep_file(file)
    questions, trials = asked.questions, None if asked.tuning is None else asked.tuning.trials
    warn(warnings_of([scenario for question in questions for scenario in question.scenarios]))
    if estimate:
        if ray is not None:
            raise ValueError(
                "Expected --estimate without --ray: a trial tells the pace of this machine, not that of a cluster's."
            )
        _say_estimate(questions, trials, workers, json)
        return
    warn(s for question in questions for s in refusals(question.scenarios, question.runners))
    # How many trials were drawn stays secret: not even its owner's screen shows it before the end.
    what = f"Sweep of {num_runs(questions):,} runs" if trials is None else "Random trials"
    # Ray tells, unasked and on standard output, of a node that is lost: where results go, and nothing else.
    with sweep_progress(what) as progress, redirect_stdout(sys.stderr):
        table = run_sweep(questions, store, workers=workers, ray=ray, trials=trials, progress=progress)
    if trials is not None:
        _say_trials(store, json)
        return
    counts = _counts(table)
    if json:
        print_json({"store": str(store), "runs": counts})
        return
    console = to_reader()
    console.print(_shown(counts, store, "test_loss" if "test_loss" in set(table["metric"]) else "loss"))


def num_runs(questions: tuple[Question, ...]) -> int:
    """Scenarios times repeats of what is drawn, and scenarios of what is not."""
    total = 0
    for question in questions:
        repeats = len(question.insecure_seeds) if question.insecure_seeds else question.num_seeds
        for runner in question.runners:
            calls = runner.calls([s for s in question.scenarios if runner.why_unsupported(s) is None], range(repeats))
            total += sum(len(scenarios) * max(len(some), 1) for scenarios, some in calls)
    return total


def _say_trials(store: Path, json: bool) -> None:
    """That they are done, not how many they were."""
    if json:
        print_json({"store": str(store), "runs": None})
        return
    to_reader().print(
        f"All random trials are in {store}. Their number, and all of them but the best, must stay secret: keep the "
        f"store to yourself.\nChoose: noisecast select {store} --metric test_loss --price repeat-select",
        soft_wrap=True,
    )


def _say_estimate(
    questions: tuple[Question, ...], trials: TrialDistribution | None, workers: int | None, json: bool
) -> None:
    with share_progress("Trials") as progress:
        runs, seconds = num_runs(questions), estimate_seconds(questions, workers=workers, progress=progress)
    if trials is not None:  # cells are drawn alike
        runs, seconds = trials.mean, seconds * trials.mean / runs
    if json:
        print_json({"runs": runs, "seconds": seconds})
        return
    mean = "" if trials is None else " in the mean"
    found = f"{runs:,g} runs{mean}, about {duration(seconds)} on this machine"
    to_reader().print(f"{found} (from a short trial; compiling, the first time, comes on top).")


def _counts(table: pd.DataFrame) -> list[dict]:
    """Scenarios, runs and diverged runs of each problem, optimizer and runner."""
    frame = table.assign(seed=table["seed"].fillna(-1), diverged=table["status"] == DIVERGED)
    kinds = ["problem", "optimizer", "runner"]
    of_runs = frame.groupby([*kinds, "scenario", "seed"], sort=False, as_index=False).agg(diverged=("diverged", "any"))
    grouped = of_runs.groupby(kinds, sort=False, as_index=False)
    found = grouped.agg(scenarios=("scenario", "nunique"), runs=("seed", "size"), diverged=("diverged", "sum"))
    return found.to_dict("records")


def _shown(counts: list[dict], store: Path, metric: str) -> Table:
    table = Table(
        title=f"In {store}",
        caption=f"Read: noisecast results {store}   Choose: noisecast select {store} --metric {metric} --price ...",
        **TABLE_STYLE,
    )
    for column in ("problem", "optimizer", "runner"):
        table.add_column(column, overflow="fold")
    for column in ("scenarios", "runs", "diverged"):
        table.add_column(column, justify="right")
    for row in counts:
        table.add_row(row["problem"], row["optimizer"], row["runner"],
                      *(number(row[name]) for name in ("scenarios", "runs", "diverged")))  # fmt: skip
    return table
