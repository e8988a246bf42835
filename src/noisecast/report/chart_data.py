"""The table that the page's sliders read: every cell of a store, every metric at its end, and the curves that fit."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from noisecast.figures._style import OPTIMIZER_COLOURS, OTHER_COLOUR, RUNNER_LABELS, RUNNER_LINES
from noisecast.privacy.accounting import epsilon_text
from noisecast.protocols import CELL, Score, cells, ranked
from noisecast.report.answers import SHAPE, ordered
from noisecast.table import COLUMNS, DIVERGED, EXTRAPOLATED, METRICS

MOST_CELLS = 12_000
MOST_NUMBERS = 60_000  # of the ends, and again of the curves: some 8 bytes each, so that a page stays below 2 MB
DASHES = {"none": "", "-": "", ":": "1.5 3", "-.": "7 3 1.5 3", "--": "6 4"}
SHAPES = {"DP-SGD": "circle", "DP-SignSGD": "square", "DP-Adam": "triangle"}
_AXES = {column.name: column for column in COLUMNS}
_ONLY_BESIDE = ("loss_std", "test_loss_std", "loss_floor")  # not scores of a run


def chart_data(table: pd.DataFrame, score: Score) -> dict[str, Any]:
    """What the scripts draw from, as JSON has it.

    Returns: problems with their shapes (batch size, steps) and levels; cells as rows [problem, shape, runner,
      optimizer, level, learning rate, clip norm, seeds, diverged, place]; ends: by metric, [value, half of the 95 %
      interval] of each cell; curves: by metric and cell, rows [step, value, half]; names, colours, lines and labels;
      left_out, how many cells were too many for a page; extrapolated, the numbers of cells that are.
    """
    everything: Any = ranked(table, score)
    # Of a store too large for a page the best cells of each contest.
    places = sorted(set(everything["place"]), reverse=True)
    worst = next((place for place in places if (everything["place"] <= place).sum() <= MOST_CELLS), 1)
    found = everything[everything["place"] <= worst].reset_index(drop=True)
    left_out = len(everything) - len(found)
    problems, lookup = _problems(found)
    names = {name: ordered(set(found[name])) for name in ("optimizer",)}
    runners = [runner for runner in RUNNER_LINES if runner in set(found["runner"])]
    number = {tuple(key): i for i, key in enumerate(found[CELL].itertuples(index=False, name=None))}
    metrics = _metrics_that_fit(table, score, len(found))
    rows = [
        [*lookup[(r.problem, r.expected_batch_size, r.num_steps)], runners.index(r.runner),
         names["optimizer"].index(r.optimizer), _level(problems, lookup, r), r.learning_rate, r.l2_clip_norm,
         int(r.num_seeds), int(r.status == DIVERGED), int(r.place)]
        for r in found.itertuples(index=False)
    ]  # fmt: skip
    return {
        "kind": "store",
        "left_out": left_out,
        "metric": score.metric,
        "metrics": {name: _metric(name) for name in metrics},
        "labels": {name: label_of(name) for name in ("noise_multiplier", "epsilon", "learning_rate", "l2_clip_norm",
                                                     "expected_batch_size", "step")},
        "optimizers": [
            {"name": name, "colour": OPTIMIZER_COLOURS.get(name, OTHER_COLOUR), "shape": SHAPES.get(name, "circle")}
            for name in names["optimizer"]
        ],
        "runners": [
            {"name": name, "label": RUNNER_LABELS[name], "dash": DASHES[RUNNER_LINES[name][0]],
             "dots": bool(RUNNER_LINES[name][1])}
            for name in runners
        ],
        "problems": problems,
        "cells": rows,
        "extrapolated": [i for i, status in enumerate(found["status"]) if status == EXTRAPOLATED],
        "ends": {name: _ends(table, name, number) for name in metrics},
        "curves": _curves(table, metrics, found, number),
    }  # fmt: skip


def label_of(name: str) -> str:
    """An axis label from the table's columns, with its unit."""
    column = _AXES[name]
    return f"{column.label} [{column.unit}]" if column.unit and column.unit != column.label else column.label


def _problems(found: Any) -> tuple[list[dict[str, Any]], dict[tuple, tuple[int, int]]]:
    problems, lookup = [], {}
    for p, (problem, of) in enumerate(found.groupby("problem", sort=True)):
        shapes = []
        for s, ((_, batch, steps), part) in enumerate(of.groupby(SHAPE, sort=True)):
            levels = part.drop_duplicates("noise_multiplier").sort_values("noise_multiplier", ascending=False)
            shapes.append(
                {
                    "batch": batch,
                    "steps": steps,
                    "delta": float(levels["target_delta"].iloc[0]),
                    "levels": [
                        {"z": z, "epsilon": e, "nominal": _to_digits(n, 4), "text": epsilon_text(e, 3)}
                        for z, e, n in zip(
                            levels["noise_multiplier"], levels["epsilon"], levels["nominal_epsilon"], strict=True
                        )
                    ],
                }
            )
            lookup[(problem, batch, steps)] = (p, s)
        problems.append({"name": str(problem), "shapes": shapes})
    return problems, lookup


def _level(problems: list[dict[str, Any]], lookup: dict[tuple, tuple[int, int]], row: Any) -> int:
    p, s = lookup[(row.problem, row.expected_batch_size, row.num_steps)]
    levels = problems[p]["shapes"][s]["levels"]
    return next(i for i, level in enumerate(levels) if level["z"] == row.noise_multiplier)


def _metrics_that_fit(table: pd.DataFrame, score: Score, num_cells: int) -> list[str]:
    """The deciding metric first; others while there is room."""
    there = set(table["metric"]) - set(_ONLY_BESIDE)
    names = [score.metric, *(name for name in METRICS if name in there and name != score.metric)]
    return names[: max(1, MOST_NUMBERS // max(1, 2 * num_cells))]


def _metric(name: str) -> dict[str, Any]:
    metric = METRICS[name]
    unit = f" [{metric.unit}]" if metric.unit and metric.unit != "loss" else ""
    return {"label": metric.label + unit, "more": Score(name).larger_is_better}


def _ends(table: pd.DataFrame, metric: str, number: dict[tuple, int]) -> list:
    of: Any = cells(table, Score(metric))
    found: list = [None] * len(number)
    for key, value, high in zip(of[CELL].itertuples(index=False, name=None), of["value"], of["high"], strict=True):
        if key in number:
            found[number[key]] = _number_and_half(value, high - value)
    return found


def _curves(table: pd.DataFrame, metrics: list[str], found: Any, number: dict[tuple, int]) -> dict[str, dict]:
    """Of every cell if there is room, else of the best of each contest; of the deciding metric and the losses."""
    wanted = [name for name in metrics if name in (metrics[0], "loss", "test_loss")]
    steps: Any = table[["num_steps", "step"]].drop_duplicates().groupby("num_steps").size().max()
    room = MOST_NUMBERS // max(1, 3 * int(steps))
    kept: dict[str, dict] = {}
    winners: Any = set(found.index[found["place"] == 1])
    for name in wanted:
        chosen = set(number.values()) if room >= len(number) else winners if room >= len(winners) else set()
        room -= len(chosen)
        if chosen:
            kept[name] = _curves_of(table, name, {k: i for k, i in number.items() if i in chosen})
    return kept


def _curves_of(table: pd.DataFrame, metric: str, number: dict[tuple, int]) -> dict[str, list]:
    rows: Any = table[table["metric"] == metric]
    rows = rows.assign(value=rows["value"].where(rows["status"] != DIVERGED))
    grouped = rows.groupby([*CELL, "step"], sort=True)["value"]
    frame = pd.DataFrame({"value": grouped.mean(), "sem": grouped.sem(), "n": grouped.size(), "ok": grouped.count()})
    half = frame["sem"] * _factor(frame["n"])
    value = frame["value"].where(frame["n"] == frame["ok"])
    curves: dict[str, list] = {}
    for (*cell, step), v, h in zip(frame.index, value, half, strict=True):
        if (i := number.get(tuple(cell))) is not None:
            pair = _number_and_half(v, h)
            curves.setdefault(str(i), []).append([step, *(pair or [None, None])])
    return curves


def _factor(num_seeds: Any) -> Any:
    from scipy.special import stdtrit

    return stdtrit((num_seeds - 1).clip(lower=1), 0.975)


def _number_and_half(value: float, half: float) -> list[float | None] | None:
    if not math.isfinite(value):
        return None
    return [_to_digits(value, 6), _to_digits(half, 3)]


def _to_digits(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")
