"""The scenario picture: a metric against steps, what happened next to what theory said, one panel a privacy level."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.optimize import isotonic_regression
from scipy.special import stdtrit

from noisecast.figures._style import (
    OPTIMIZER_COLOURS,
    OTHER_COLOUR,
    RC,
    RUNNER_LABELS,
    RUNNER_LINES,
    low_ends,
    plain_numbers,
)
from noisecast.privacy.accounting import epsilon_text
from noisecast.table import METRICS, SOUND

if TYPE_CHECKING:  # where one is drawn it is imported: `data` is asked for by tables too, and Matplotlib takes a second
    from matplotlib.figure import Figure

CURVE = [
    "problem",
    "scenario",
    "optimizer",
    "learning_rate",
    "l2_clip_norm",
    "runner",
    "noise_multiplier",
    "epsilon",
    "target_delta",
    "num_steps",
]
SETTINGS = {"learning_rate": "rate", "l2_clip_norm": "clip"}


def data(table: pd.DataFrame, metric: str = "loss") -> pd.DataFrame:
    """Mean over seeds and the 95 % interval of that mean, for every scenario, runner and step.

    Returns: a frame with the columns of `CURVE`, `step`, `mean`, `low`, `high`, `num_seeds`, `num_diverged`; `low` and
      `high` are NaN where a single value has no interval.
    """
    chosen = table[table["metric"] == metric]
    if chosen.empty:
        raise ValueError(f"Expected rows with metric {metric!r}; the table has {sorted(table['metric'].unique())}.")
    return (
        chosen.groupby([*CURVE, "step"], dropna=False, sort=False).apply(_summary, include_groups=False).reset_index()
    )


def _summary(rows: pd.DataFrame) -> pd.Series:
    values = rows.loc[rows["status"].isin(SOUND), "value"].to_numpy()
    count = len(values)
    mean = values.mean() if count else np.nan
    half = stdtrit(count - 1, 0.975) * values.std(ddof=1) / math.sqrt(count) if count > 1 else np.nan
    return pd.Series(
        {
            "mean": mean, "low": mean - half, "high": mean + half,
            "num_seeds": count, "num_diverged": len(rows) - count,
        }
    )  # fmt: skip


def draw(frame: pd.DataFrame, metric: str = "loss") -> "Figure":
    """Draw `data(table, metric)`: colour is the optimizer, line the runner, bands over seeds."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    frame = frame.assign(low=low_ends(frame["mean"], frame["low"]))
    levels = sorted(frame["noise_multiplier"].unique(), reverse=True)  # epsilon grows to the right
    with mpl.rc_context(RC):
        columns = min(len(levels), 3)
        lines = -(-len(levels) // columns)
        below = 1.1 if columns > 1 else 1.7  # for the legend, of which a narrow one is higher
        figure = Figure(figsize=(1.2 + 3.1 * columns, below + 2.6 * lines), layout="constrained")
        panels = np.atleast_1d(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel())
        for panel, level in zip(panels, levels):
            _draw_panel(panel, frame.loc[frame["noise_multiplier"] == level])
        for panel in panels[max(0, len(levels) - columns) : len(levels)]:
            panel.set_xlabel("step")
            panel.tick_params(labelbottom=True)
        for panel in panels[len(levels) :]:
            panel.axis("off")
        _frame_axes(panels[: len(levels)], frame, columns)
        for panel, level in zip(panels, levels):
            _label_curves(panel, frame.loc[frame["noise_multiplier"] == level])
        figure.supylabel(f"{METRICS[metric].label}", fontsize=9)
        figure.suptitle(", ".join(frame["problem"].unique()), fontsize=10)
        spare = panels[len(levels)] if len(levels) < len(panels) else None
        _legend(figure, spare, frame)
    return figure


def _draw_panel(panel, frame: pd.DataFrame) -> None:
    for _, curve in frame.groupby(["scenario", "optimizer", "runner"], sort=False):
        curve = curve.sort_values("step")
        optimizer, runner = curve[["optimizer", "runner"]].iloc[0]
        colour = OPTIMIZER_COLOURS.get(optimizer, OTHER_COLOUR)
        style, marker = RUNNER_LINES[runner]
        panel.plot(
            curve["step"], curve["mean"], linestyle=style, marker=marker, markersize=3.2, linewidth=1.3, color=colour
        )
        panel.fill_between(curve["step"], curve["low"], curve["high"], color=colour, alpha=0.18, linewidth=0)
    epsilon = epsilon_text(frame["epsilon"].iloc[0], 3)
    panel.set_title(f"ε = {epsilon}   (noise multiplier {frame['noise_multiplier'].iloc[0]:.3g})")


def _label_curves(panel, frame: pd.DataFrame) -> None:
    """Rate and clip norm beside each curve's end, where an optimizer has several: colour tells optimizers alone.

    A curve that ends on the way has them there, and one of a single point has none.
    """
    ends, last_step = [], frame["step"].max()
    style: Any = {"textcoords": "offset points", "xytext": (3, 0), "va": "center", "fontsize": 6}
    for optimizer in frame["optimizer"].unique():
        curves: Any = frame[frame["optimizer"] == optimizer]
        varying = _varying(curves)
        for scenario in curves["scenario"].unique() if varying else []:
            curve = curves[(curves["scenario"] == scenario) & curves["mean"].notna()]
            if curve["step"].nunique() < 2:
                continue
            trained = curve[curve["runner"] == "training"]  # where it was: formulas may end elsewhere
            last = (curve if trained.empty else trained).sort_values("step").iloc[-1]
            text = ", ".join(f"{SETTINGS[name]} {last[name]:.3g}" for name in varying)
            colour = OPTIMIZER_COLOURS.get(optimizer, OTHER_COLOUR)
            if last["step"] < last_step:
                panel.annotate(text, (last["step"], last["mean"]), color=colour, **style)
            else:
                ends.append((_share_of_height(panel, last["mean"]), text, colour))
    ends.sort(key=lambda end: end[0])
    for height, (_, text, colour) in zip(_apart([height for height, _, _ in ends]), ends, strict=True):
        panel.annotate(text, (1.0, height), xycoords="axes fraction", color=colour, annotation_clip=False, **style)


def _share_of_height(panel, value: float) -> float:
    """Where a value lies in a panel, from 0 at the bottom to 1 at the top; beyond it, at its edge."""
    _, height = panel.transAxes.inverted().transform(panel.transData.transform((0.0, value)))
    return float(np.clip(height, 0.0, 1.0))


def _apart(heights: list[float], gap: float = 0.05) -> list[float]:
    """Increasing shares of a panel's height, moved as little as lets texts stand one above another within it.

    More texts than there is room for stand closer than `gap`.

    >>> [round(height, 2) for height in _apart([0.1, 0.5, 0.5], gap=0.1)]
    [0.1, 0.45, 0.55]
    >>> [round(height, 2) for height in _apart([0.0, 0.0, 0.05], gap=0.1)]
    [0.0, 0.1, 0.2]
    """
    if len(heights) < 2:
        return heights
    room = np.arange(len(heights)) * min(gap, 1 / (len(heights) - 1))
    # The nearest increasing sequence, once the room that each needs is taken off (isotonic regression).
    return (np.clip(isotonic_regression(np.array(heights) - room).x, 0, 1 - room[-1]) + room).tolist()


def _varying(curves: pd.DataFrame) -> list[str]:
    """Which settings an optimizer's curves differ in: some of `SETTINGS`."""
    return [name for name in SETTINGS if len(set(curves[name])) > 1]


def _frame_axes(panels, frame: pd.DataFrame, columns: int) -> None:
    # The range of what was trained, with room: a theory line that leaves it is off, and is drawn leaving it.
    seen = frame[frame["runner"] == "training"]
    seen = seen if len(seen) else frame
    values = np.ravel(seen[["mean", "low", "high"]])
    values = values[np.isfinite(values)]
    if not len(values):
        return
    if values.min() > 0 and values.max() > 8 * values.min():
        panels[0].set_yscale("log")
        panels[0].set_ylim(values.min() / 1.5, values.max() * 1.5)
        plain_numbers(panels[0].yaxis)
    else:
        room = 0.12 * (values.max() - values.min() or 1.0)
        panels[0].set_ylim(values.min() - room, values.max() + room)


def _legend(figure: "Figure", spare, frame: pd.DataFrame) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=OPTIMIZER_COLOURS.get(name, OTHER_COLOUR), linewidth=3, label=name)
        for name in frame["optimizer"].unique()
    ]
    for runner in (name for name in RUNNER_LINES if name in set(frame["runner"])):
        style, marker = RUNNER_LINES[runner]
        label = RUNNER_LABELS[runner]
        seeds = int(frame.loc[frame["runner"] == runner, "num_seeds"].max())
        if runner in ("training", "sde"):
            label += f", {seeds} seed{'s' if seeds != 1 else ''}"
        handles.append(Line2D([], [], color="black", linestyle=style, marker=marker, markersize=3.2, label=label))
    notes = ["losses are non-private"]
    if np.isfinite(frame["low"]).any():
        notes.insert(0, "band: 95 % interval of the mean over seeds")
    curves = frame["mean"].isna().groupby([frame["scenario"], frame["runner"]]).any().to_numpy(bool)
    if gaps := np.count_nonzero(curves):
        notes.append(f"{gaps} of {len(curves)} curves have gaps:\nwhere they diverge or are extrapolated none is drawn")
    is_narrow = figure.get_figwidth() < 5  # of one panel
    title = ("\n" if is_narrow else "; ").join(notes)
    if spare is not None:
        spare.legend(handles=handles, loc="center left", title=title, title_fontsize=8)
    else:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=2 if is_narrow else 3, title=title, title_fontsize=8
        )
