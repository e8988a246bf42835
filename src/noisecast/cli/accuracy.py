"""`noisecast accuracy`: the forecast against training, over the grid of a scenario file."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from cyclopts import Parameter
from rich.table import Table
from scipy.special import bdtrc, stdtr

from noisecast.cli.answer import changing_rates, schedules_of
from noisecast.cli.forecast import (
    FullCovarianceFeatures,
    MostRuns,
    Subsample,
    TimeSteps,
    able_and_refused,
    moments_with,
)
from noisecast.cli.output import TABLE_STYLE, Json, print_json, print_whole, to_reader, warn, whole_number
from noisecast.cli.places import check_places
from noisecast.cli.progress import share_progress
from noisecast.cli.trained import trained_in_parts, trained_on, what_is_not_known
from noisecast.figures import accuracy_picture, save
from noisecast.files import written_whole
from noisecast.printed import counted, number
from noisecast.runners import Training, repeats_of
from noisecast.runners import answer as ask
from noisecast.scenario import warnings_of
from noisecast.scenario_file import read_scenario_file
from noisecast.table import EXTRAPOLATED, METRICS, OK, SIMULATED, write_table

WHY_EXTRAPOLATED = "Why cells are extrapolated, and need not be right: noisecast forecast {}"
FOR_STUDY = (
    "Training here is for study: every seed is another run on the same examples, ε is the price of one of them, and "
    "all of them together spend more than is accounted. Losses are non-private."
)
COMPARED = ("loss", "test_loss")
NUM_SEEDS, MOST_SEEDS = 8, 400


def accuracy(
    scenario: Annotated[Path, Parameter(help="Scenario file (TOML), as `noisecast answer` reads it.")],
    /,
    *,
    seeds: Annotated[
        int | None,
        Parameter(converter=whole_number, help="Training runs of each cell, >= 2. Default: as the file says, or 8."),
    ] = None,
    standard_error: Annotated[
        float | None,
        Parameter(help="Train on, with more seeds, each cell whose mean loss is known less well than to this share."),
    ] = None,
    most_seeds: Annotated[
        int | None,
        Parameter(
            converter=whole_number,
            help=f"With --standard-error: training runs of a cell at most. Default: {MOST_SEEDS}.",
        ),
    ] = None,
    subsample: Subsample = None,
    time_steps: TimeSteps = None,
    full_covariance_features: FullCovarianceFeatures = None,
    most_runs: MostRuns = None,
    output: Annotated[Path | None, Parameter(help="Parquet file for all rows.")] = None,
    figure: Annotated[Path | None, Parameter(help="Picture of both (.png, .pdf or .svg).")] = None,
    json: Json = False,
) -> None:
    """The forecast against training, over the grid of a scenario file: errors beside the standard error of training."""
    check_places(output, figure)
    moments = moments_with(subsample, time_steps, full_covariance_features, most_runs)
    question = read_scenario_file(scenario)
    able, refused = able_and_refused(question, [Training(), moments])
    insecure = question.insecure_seeds if seeds is None else None
    count = _num_seeds(seeds, question.num_seeds, insecure)
    most = MOST_SEEDS if most_seeds is None else most_seeds
    if standard_error is not None:
        _check_standard_error(standard_error, most, count, insecure)
    elif most_seeds is not None:
        raise ValueError("Expected --standard-error with --most-seeds: without it every cell has the same --seeds.")
    warn(changing_rates(able))
    warn(warnings_of(able))
    with share_progress(f"Forecasting {counted(len(able), 'cell')}") as progress:
        table = ask(able, runners=[moments], record_at=question.record_at, progress=progress)
    repeats, root = repeats_of(count, insecure)
    record_at = sorted({*question.record_at, *(scenario.num_steps for scenario in able)})
    with share_progress(f"Training {counted(len(able), 'cell')} {count} times") as progress:
        parts = trained_in_parts(able, repeats, root, record_at, progress)
        table = _last_of(accumulate(parts, _stacked, initial=table), output)
    if standard_error is not None:
        with share_progress(f"Training until each mean is known to {100 * standard_error:.2g} %") as progress:
            table = _last_of(trained_on(able, table, standard_error, count, most, record_at, progress), output)
    frame = accuracy_picture.data(table)
    if figure is not None:
        with written_whole(figure) as temporary:
            save(accuracy_picture.draw(frame), temporary)
    measured = [metric for metric in COMPARED if metric in set(table["metric"])]
    summaries = {metric: summary(accuracy_picture.data(table, metric)) for metric in measured}
    cells = accuracy_picture.last_steps(frame)
    not_known = what_is_not_known(cells, standard_error) if standard_error is not None else None
    if json:
        content = {"cells": cells.to_dict("records"), "summary": summaries, "refusals": refused, "note": FOR_STUDY}
        content["not_known"] = not_known
        content["schedules"] = schedules_of(able)
        content["reasons"] = WHY_EXTRAPOLATED.format(scenario) if EXTRAPOLATED in set(cells["status"]) else None
        print_json({**content, "output": output and str(output), "figure": figure and str(figure)})
        return
    console = to_reader()
    print_whole(console, _cells_shown(cells))
    console.print(_summary_shown(summaries))
    for sentence in what_may_be_chance(summaries["loss"]):
        console.print(sentence)
    if not_known is not None:
        console.print(not_known)
    if EXTRAPOLATED in set(cells["status"]):
        console.print(WHY_EXTRAPOLATED.format(scenario), soft_wrap=True)
    console.print(FOR_STUDY)
    for sentence in refused:
        console.print(f"Left out: {sentence}")
    for path in (output, figure):
        if path is not None:
            console.print(f"Written: {path}", soft_wrap=True)


def _stacked(*tables: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(tables, ignore_index=True)


def _last_of(tables: Iterable[pd.DataFrame], output: Path | None) -> pd.DataFrame:
    """A growing table, grown. Hours of training: what an interrupted run has by then, the file holds."""
    table = pd.DataFrame()
    try:
        for table in tables:
            if output is not None:
                write_table(table, output)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_what_is_kept(table, output)) from None
    return table


def _what_is_kept(table: pd.DataFrame, output: Path | None) -> str:
    if output is None:
        return "Interrupted: nothing is kept without --output."
    counts: Any = table[table["runner"] == Training.name].groupby("scenario")["seed"].nunique()
    fewest, most = (0, 0) if counts.empty else (int(counts.min()), int(counts.max()))
    runs = counted(most, "training run") if fewest == most else f"{fewest} to {most} training runs"
    return f"Interrupted: {output} holds the forecast and {runs} of each cell."


def _num_seeds(asked: int | None, in_file: int, insecure: Sequence[int] | None) -> int:
    """Of each cell: those asked for, or the file's, or `NUM_SEEDS` where it says nothing of several."""
    count = len(insecure) if insecure else (NUM_SEEDS if in_file == 1 else in_file) if asked is None else asked
    if count < 2:
        raise ValueError(f"Expected two or more seeds, for a standard error, got {count}; give --seeds.")
    return count


def _check_standard_error(share: float, most: int, count: int, insecure: Sequence[int] | None) -> None:
    if not 0 < share < 1:
        raise ValueError(f"Expected --standard-error between 0 and 1, a share of the mean loss, got {share}.")
    if most < count:
        raise ValueError(f"Expected --most-seeds of at least the {count} seeds of every cell, got {most}.")
    if insecure:
        raise ValueError("Expected --seeds with --standard-error: the file's insecure_seeds are as many as they are.")


def summary(frame: pd.DataFrame) -> dict[str, Any]:
    """Errors over the cells that `accuracy_picture.data` compares: shares of the trained mean.

    Returns: by name, of the last step: num_cells; num_left_out, in which a seed or the forecast diverged;
      num_extrapolated and num_simulated among the compared; median, percentile_95 and worst |error|; worst_of_others,
      that are not extrapolated; within_1_percent, within_5_percent, shares of cells; median_standard_error of the
      trained means; num_beyond_two, errors beyond two standard errors, and chance_beyond_two, a cell's to lie there
      were the forecast perfect; farthest, in standard errors, the error least like chance; chance_of_farthest, at most,
      that one cell lies there;
      median_error_of_std, worst_error_of_std, of the standard deviation over runs, and std_known_to, to what share the
      trained seeds know it; and curve_median, of |error| at all recorded steps after the start. None where nothing is
      compared.
    """
    cells: Any = accuracy_picture.last_steps(frame)
    compared = cells[cells["error"].notna()]
    found: dict[str, Any] = {
        "num_cells": len(compared),
        "num_left_out": len(cells) - len(compared),
        "num_extrapolated": int((compared["status"] == EXTRAPOLATED).sum()),
        "num_simulated": int((compared["status"] == SIMULATED).sum()),
    }
    if compared.empty:
        return found
    errors = compared["error"].abs()
    cells_of_curves: Any = frame.loc[frame["step"] > 0]
    spreads = (compared["forecast_std"] / compared["trained_std"] - 1).abs().dropna()
    return found | {
        "median": errors.median(),
        "percentile_95": errors.quantile(0.95),
        "worst": errors.max(),
        "worst_of_others": errors[compared["status"] != EXTRAPOLATED].max(),
        "within_1_percent": (errors <= 0.01).mean(),
        "within_5_percent": (errors <= 0.05).mean(),
        "median_standard_error": (compared["trained_sem"] / compared["trained_mean"].abs()).median(),
        "num_beyond_two": int((compared["standard_errors"].abs() > 2).sum()),
        **_chances(compared),
        "curve_median": cells_of_curves["error"].abs().median(),
        "median_error_of_std": None if spreads.empty else spreads.median(),
        "worst_error_of_std": None if spreads.empty else spreads.max(),
        "std_known_to": _std_known_to(compared["num_seeds"].median()),
    }


def _std_known_to(num_seeds: float) -> float | None:
    """Standard error of a standard deviation of Gaussians, as a share of it: 1/sqrt(2 (m - 1))."""
    return 1 / math.sqrt(2 * (num_seeds - 1)) if num_seeds > 1 else None


def _chances(compared: Any) -> dict[str, float | None]:
    """By Student's t of each cell's seeds; of the farthest of all cells by Bonferroni."""
    known = compared[compared["standard_errors"].notna() & (compared["num_seeds"] > 1)]
    if known.empty:
        return {"chance_beyond_two": None, "farthest": None, "chance_of_farthest": None}
    away, degrees = known["standard_errors"].abs().to_numpy(float), known["num_seeds"].to_numpy(float) - 1
    chances = 2 * stdtr(degrees, -away)
    return {
        "chance_beyond_two": float(2 * stdtr(degrees, -2.0).mean()),
        "farthest": float(away[chances.argmin()]),
        "chance_of_farthest": min(1.0, len(known) * chances.min()),
    }


def what_may_be_chance(found: dict[str, Any]) -> list[str]:
    """What the standard errors say of the errors, in sentences."""
    if not found["num_cells"]:
        return []
    beyond, count, sentences = found["num_beyond_two"], found["num_cells"], []
    if beyond and bdtrc(beyond - 1, count, found["chance_beyond_two"]) < 0.01:
        sentences.append(f"{beyond} of {count} cells lie beyond two standard errors, more than chance puts there.")
    elif found["chance_of_farthest"] is not None and found["chance_of_farthest"] < 0.01:
        sentences.append(f"One cell lies {found['farthest']:.0f} standard errors off, farther than chance takes any.")
    if found["median"] < 2 * found["median_standard_error"]:
        others = "Most other errors" if sentences else "Most of these errors"
        sentences.append(f"{others} may be chance: give more --seeds to see smaller ones.")
    known, of_std = found["std_known_to"], found["median_error_of_std"]
    if None not in (known, of_std) and of_std < 2 * known:
        most = "most of its errors may be chance."
        sentences.append(f"So many seeds know a standard deviation to {known:.0%} at best: {most}")
    return sentences


def _cells_shown(cells: Any) -> Table:
    first = cells.iloc[0]
    count = accuracy_picture.seeds_a_cell(cells)
    table = Table(
        title=f"Forecast against training: loss after {counted(first['num_steps'], 'step')}, {first['problem']}",
        caption=(
            f"trained: mean of {count} seeds ± its standard error, SE. error: of the forecast, and the same in SE: "
            "within 2 it may be chance. std: of the loss over runs, trained and forecast."
        ),
        **TABLE_STYLE,
    )
    clips = {(optimizer, clip) for optimizer, clip in zip(cells["optimizer"], cells["l2_clip_norm"], strict=True)}
    varying = ["l2_clip_norm"] if len(clips) > cells["optimizer"].nunique() else []
    has_status = (cells["status"] != OK).any()
    names = ["noise", "optimizer", "rate", *("clip" for _ in varying), "trained", "forecast", "error", "SE"]
    names += ["std\ntrain.", "std\nfore.", *(["status"] if has_status else [])]
    for name in names:
        table.add_column(name, justify="left" if name in ("optimizer", "status") else "right", no_wrap=True)
    for level, rows in cells.groupby("noise_multiplier", sort=False):
        for place, row in enumerate(rows.to_dict("records")):
            table.add_row(
                number(level, 3) if place == 0 else "",
                row["optimizer"],
                number(row["learning_rate"], 3),
                *(number(row[name], 3) for name in varying),
                _trained(row),
                number(row["forecast"], 4),
                percent(row["error"], sign=True),
                "–" if math.isnan(row["standard_errors"]) else f"{row['standard_errors']:+.1f}",
                number(row["trained_std"], 2),
                number(row["forecast_std"], 2),
                *([row["status"]] if has_status else []),
            )
        table.add_section()
    return table


def _trained(row: dict[str, Any]) -> str:
    if row["num_diverged"]:
        return f"{row['num_diverged']}/{row['num_seeds'] + row['num_diverged']} diverged"
    mean = row["trained_mean"]
    return number(mean, 4) + (f" ±{100 * row['trained_sem'] / abs(mean):.1f}%" if mean else "")


def _summary_shown(summaries: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="Summary", **TABLE_STYLE)
    table.add_column("|error| of the forecast", no_wrap=True)
    for metric in summaries:
        table.add_column(METRICS[metric].label, justify="right", no_wrap=True)
    lines = {
        "median": lambda s: percent(s["median"]),
        "95th percentile": lambda s: percent(s["percentile_95"]),
        "worst": lambda s: percent(s["worst"]),
        "cells within 1 %": lambda s: f"{100 * s['within_1_percent']:.0f} %",
        "cells within 5 %": lambda s: f"{100 * s['within_5_percent']:.0f} %",
        "median over whole curves": lambda s: percent(s["curve_median"]),
        "standard error of training, median": lambda s: percent(s["median_standard_error"]),
        "cells beyond two standard errors": lambda s: f"{s['num_beyond_two']} of {s['num_cells']}",
        "standard deviation of one run, median |error|": lambda s: percent(s["median_error_of_std"]),
        "the same, worst": lambda s: percent(s["worst_error_of_std"]),
    }
    for name, value in lines.items():
        table.add_row(name, *(value(s) if s["num_cells"] else "–" for s in summaries.values()))
    table.add_row("cells compared", *(str(s["num_cells"]) for s in summaries.values()))
    labels = ("of them simulated", "of them extrapolated", "left out, diverged")
    for name, label in zip(("num_simulated", "num_extrapolated", "num_left_out"), labels, strict=True):
        if any(s[name] for s in summaries.values()):
            table.add_row(label, *(str(s[name]) for s in summaries.values()))
    if any(s["num_extrapolated"] for s in summaries.values()):
        table.add_row("worst of the others", *(percent(s.get("worst_of_others")) for s in summaries.values()))
    return table


def percent(share: float | None, *, sign: bool = False) -> str:
    """A share for a table.

    >>> percent(0.0123), percent(0.5, sign=True), percent(None)
    ('1.2 %', '+50.0 %', '–')
    """
    if share is None or not math.isfinite(share):
        return "–"
    return f"{100 * share:{'+' if sign else ''}.1f} %"
