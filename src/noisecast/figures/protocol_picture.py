"""The protocol picture: the best cells' score and learning rate against epsilon, trained beside forecast."""

from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from noisecast.figures._style import (
    OPTIMIZER_COLOURS,
    OTHER_COLOUR,
    RC,
    RUNNER_LABELS,
    RUNNER_LINES,
    low_ends,
    plain_numbers,
)

AT_EDGE: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 8, "fillstyle": "none"}
BESIDE = 1.02  # the same epsilon, one optimizer beside the other, lest bars hide each other


def draw(frame: pd.DataFrame, label: str) -> Figure:
    """One line a problem and batch size: what the score is, and at which learning rate, by epsilon.

    Args:
      frame: of `protocols.protocol_a` or `protocol_b`.   label: of the score.
    """
    parts = [part for _, part in frame.groupby(["problem", "expected_batch_size"], sort=False)]
    with mpl.rc_context(RC):
        figure = Figure(figsize=(8.2, 0.8 + 2.8 * len(parts)), layout="constrained")
        for panels, part in zip(figure.subplots(len(parts), 2, squeeze=False), parts):
            _draw_line(panels, part, label)
        figure.legend(handles=_handles(frame), loc="outside lower center", ncols=3)
    return figure


def _draw_line(panels: Any, part: Any, label: str) -> None:
    scores, rates = panels
    names = list(part["optimizer"].unique())
    for (optimizer, runner), curve in part.groupby(["optimizer", "runner"], sort=False):
        curve = curve.sort_values("epsilon")
        x = curve["epsilon"] * BESIDE ** (names.index(optimizer) - (len(names) - 1) / 2)
        style, marker = RUNNER_LINES[runner]
        look = {"color": OPTIMIZER_COLOURS.get(optimizer, OTHER_COLOUR), "marker": marker, "markersize": 3.5}
        look |= {"linestyle": style, "linewidth": 1.2}
        value, half = curve["value"].to_numpy(float), (curve["high"] - curve["value"]).to_numpy(float)
        scores.errorbar(x, value, yerr=np.stack([value - low_ends(value, value - half), half]), **look)
        rates.plot(x, curve["learning_rate"], **look)
        is_at_edge = curve["learning_rate_at_edge"] != ""
        rates.plot(x[is_at_edge], curve.loc[is_at_edge, "learning_rate"], color=look["color"], **AT_EDGE)
    scores.set(xscale="log", xlabel="ε of one run, as accounted", ylabel=f"{label} (non-private)")
    rates.set(xscale="log", yscale="log", xlabel="ε of one run, as accounted", ylabel="learning rate")
    values = part["value"][np.isfinite(part["value"])]
    if len(values) and values.min() > 0 and values.max() > 8 * values.min():
        scores.set_yscale("log")
        plain_numbers(scores.yaxis)
    for axis in (scores.xaxis, rates.xaxis, rates.yaxis):
        plain_numbers(axis)
    scores.set_title(f"{part['problem'].iloc[0]}, B = {part['expected_batch_size'].iloc[0]:g}")


def _handles(frame: pd.DataFrame) -> list[Line2D]:
    names = frame["optimizer"].unique()
    handles = [Line2D([], [], color=OPTIMIZER_COLOURS.get(n, OTHER_COLOUR), linewidth=3, label=n) for n in names]
    for runner in frame["runner"].unique():
        style, marker = RUNNER_LINES[runner]
        seeds = int(frame.loc[frame["runner"] == runner, "num_seeds"].max())
        counted = f", {seeds} seeds, bars 95 %" if seeds > 1 else ""
        label = RUNNER_LABELS[runner] + counted
        handles.append(Line2D([], [], color="black", linestyle=style, marker=marker, markersize=3.5, label=label))
    handles.append(Line2D([], [], color="black", label="at an edge of the grid", **AT_EDGE))
    return handles
