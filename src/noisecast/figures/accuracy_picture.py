"""The accuracy picture: forecast lines and training dots, one panel an optimizer."""

import math
from collections.abc import Iterator
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from noisecast.figures._style import OPTIMIZER_COLOURS, OTHER_COLOUR, RC, RUNNER_LINES, low_ends, plain_numbers
from noisecast.printed import counted
from noisecast.table import DIVERGED, EXTRAPOLATED, METRICS, OK, SIMULATED

if TYPE_CHECKING:  # imported where one is drawn, as in `scenario_picture`
    from matplotlib.figure import Figure

__all__ = ["data", "draw", "last_steps", "with_errors"]

CELL = [
    "scenario", "problem", "optimizer", "learning_rate", "l2_clip_norm", "noise_multiplier", "epsilon", "target_delta",
    "num_steps",
]  # fmt: skip
MARKERS = "osD^vP"
SIGNS = {EXTRAPOLATED: ("x", "crosses: called extrapolated."), SIMULATED: ("+", "plus signs: simulated.")}
LEGEND_LINE = 0.16  # inches


def data(table: pd.DataFrame, metric: str = "loss") -> pd.DataFrame:
    """Training and forecast of a metric side by side, for every scenario and step that both answered.

    Returns: a frame with the columns of `CELL`, `step`, `trained_mean`, `trained_sem` (standard error of that mean),
      `trained_std`, `num_seeds`, `num_diverged`, `forecast`, `forecast_std` (NaN where none is predicted), `status` of
      the forecast, `error` = forecast / trained - 1 (NaN where a seed or the forecast diverged) and `standard_errors`,
      the same error over the standard error.
    Raises: ValueError where one of the two did not answer.
    """
    chosen: Any = table.loc[table["metric"] == metric]
    trained, forecast = (chosen[chosen["runner"] == runner] for runner in ("training", "moments"))
    if trained.empty or forecast.empty:
        raise ValueError(f"Expected rows of training and of moments with metric {metric!r}, got none of one of them.")
    means = trained.groupby([*CELL, "step"], dropna=False, sort=False).apply(_trained, include_groups=False)
    forecast = forecast.set_index(["scenario", "step"])
    spread: Any = table.loc[(table["metric"] == f"{metric}_std") & (table["runner"] == "moments")]
    frame: Any = (
        means.astype({"num_seeds": int, "num_diverged": int})
        .reset_index()
        .join(forecast[["value", "status"]].rename(columns={"value": "forecast"}), on=["scenario", "step"])
    )
    frame = frame.join(spread.set_index(["scenario", "step"])["value"].rename("forecast_std"), on=["scenario", "step"])
    return with_errors(frame[frame["status"].notna()].reset_index(drop=True))


def with_errors(frame: pd.DataFrame) -> pd.DataFrame:
    """With the last two columns of `data`, by the others."""
    frame = frame.copy()
    counts = (frame["num_diverged"] == 0) & (frame["status"] != DIVERGED)
    gap = (frame["forecast"] - frame["trained_mean"]).where(counts)
    frame["error"] = gap / frame["trained_mean"].abs()
    frame["standard_errors"] = (gap / frame["trained_sem"]).where(frame["trained_sem"] > 0)
    return frame


def last_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `data` at the end of their run."""
    return frame.loc[frame["step"] == frame["num_steps"]].reset_index(drop=True)


def _trained(rows: pd.DataFrame) -> pd.Series:
    values = rows.loc[rows["status"] == OK, "value"].to_numpy()
    count = len(values)
    found = {
        "trained_mean": values.mean() if count else np.nan,
        "trained_sem": values.std(ddof=1) / math.sqrt(count) if count > 1 else np.nan,
        "trained_std": values.std(ddof=1) if count > 1 else np.nan,
    }
    return pd.Series(found | {"num_seeds": count, "num_diverged": len(rows) - count})


def draw(frame: pd.DataFrame, metric: str = "loss") -> "Figure":
    """Draw `data(table, metric)`: against the noise multiplier at the last step, or, at one level, against the step."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    over_noise = len(set(frame["noise_multiplier"])) > 1
    shown: Any = last_steps(frame) if over_noise else frame
    x = "noise_multiplier" if over_noise else "step"
    optimizers = list(shown["optimizer"].unique())
    with mpl.rc_context(RC):
        lines = shown.groupby("optimizer")[["learning_rate", "l2_clip_norm"]].apply(lambda c: len(c.drop_duplicates()))
        height = 4.0 + LEGEND_LINE * lines.max()
        figure = Figure(figsize=(1.0 + 3.4 * len(optimizers), height), layout="constrained")
        panels = np.ravel(figure.subplots(1, len(optimizers), sharex=True, sharey=True, squeeze=False))
        for panel, optimizer in zip(panels, optimizers, strict=True):
            _draw_panel(panel, shown[shown["optimizer"] == optimizer], x)
            panel.set_title(optimizer)
            panel.set_xlabel("noise multiplier" if over_noise else "step")
        _frame_axes(panels[0], shown)
        if over_noise:
            _label_levels(panels[0], sorted(shown["noise_multiplier"].unique()))
        panels[0].set_ylabel(METRICS[metric].label)
        figure.suptitle(_title(shown, over_noise), fontsize=10)
        figure.supxlabel(_caption(shown), fontsize=8)
    return figure


def _draw_panel(panel: Any, frame: Any, x: str) -> None:
    colour = OPTIMIZER_COLOURS.get(frame["optimizer"].iloc[0], OTHER_COLOUR)
    cells = list(frame.groupby(["learning_rate", "l2_clip_norm"], sort=True))
    for (cell, curve), shade, marker in zip(cells, _shades(colour, len(cells)), cycle(MARKERS), strict=False):
        curve = curve.sort_values(x)
        panel.plot(curve[x], curve["forecast"], linestyle=RUNNER_LINES["moments"][0], linewidth=1.3, color=shade)
        for status, (sign, _) in SIGNS.items():
            such = curve[curve["status"] == status]
            panel.plot(such[x], such["forecast"], linestyle="none", marker=sign, markersize=9, color=shade)
        panel.errorbar(
            curve[x], curve["trained_mean"], _bars(curve), linestyle="none", marker=marker, markersize=3.6, color=shade,
            capsize=2, linewidth=1, label=_label(cell, cells),
        )  # fmt: skip
    panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16))  # below: curves go everywhere


def _half(frame: Any) -> Any:
    """Half a 95 % interval of each mean."""
    return stdtrit(np.maximum(frame["num_seeds"] - 1, 1), 0.975) * frame["trained_sem"]


def _bars(frame: Any) -> Any:
    """From each mean down and up, as Matplotlib has it."""
    mean, half = frame["trained_mean"].to_numpy(float), np.asarray(_half(frame), np.float64)
    return np.stack([mean - low_ends(mean, mean - half), half])


def _label(cell: Any, cells: list) -> str:
    rate, clip = cell
    label = f"rate {rate:.3g}"
    return label if len({c for (_, c), _ in cells}) == 1 else f"{label}, clip {clip:.3g}"


def _shades(colour: str, count: int) -> Iterator[tuple[float, ...]]:
    """From the optimizer's colour to a light and then a dark one of the same hue."""
    from matplotlib.colors import to_rgb

    for share in np.linspace(-0.45, 0.45, count) if count > 1 else [0.0]:
        towards = 1.0 if share < 0 else 0.0
        yield tuple((1 - abs(share)) * part + abs(share) * towards for part in to_rgb(colour))


def _frame_axes(panel: Any, frame: Any) -> None:
    # By what was trained: a forecast that leaves the range is off, and is drawn leaving it.
    means, half = frame["trained_mean"], _half(frame).fillna(0)
    is_log = means.min() > 0 and (means + half).max() > 8 * means.min()
    values = np.ravel([means, means + half, low_ends(means, means - half)])
    values = values[np.isfinite(values) & ((values > 0) | (not is_log))]  # a bar that ends below 0 has no end there
    if not len(values):
        return
    if is_log:
        panel.set_yscale("log")
        panel.set_ylim(values.min() / 1.5, values.max() * 1.5)
        plain_numbers(panel.yaxis)
    else:
        room = 0.12 * (values.max() - values.min() or 1.0)
        panel.set_ylim(values.min() - room, values.max() + room)


def _label_levels(panel: Any, levels: list[float]) -> None:
    if levels[0] > 0:
        panel.set_xscale("log")
    panel.set_xticks(levels, [f"{level:.3g}" for level in levels])
    panel.minorticks_off()


def _title(frame: Any, over_noise: bool) -> str:
    title = ", ".join(frame["problem"].unique())
    if over_noise:
        return f"{title}, after {counted(frame['num_steps'].max(), 'step')}"
    return f"{title}, noise multiplier {frame['noise_multiplier'].iloc[0]:.3g}"


def seeds_a_cell(cells: Any) -> str:
    """How many seeds the cells of `last_steps` were trained with: one number, or from the least to the most.

    >>> seeds_a_cell(pd.DataFrame({"num_seeds": [16, 64], "num_diverged": [0, 0]}))
    '16 to 64'
    """
    counts = cells["num_seeds"] + cells["num_diverged"]
    fewest, most = int(counts.min()), int(counts.max())
    return str(most) if fewest == most else f"{fewest} to {most}"


def _caption(frame: Any) -> str:
    seeds = seeds_a_cell(last_steps(frame))
    there = set(frame["status"])
    signs = "".join(f" {said}" for status, (_, said) in SIGNS.items() if status in there)
    return f"dash-dot: forecast.{signs} dots: mean of {seeds} trained seeds, bars: its 95 % interval. Non-private."
