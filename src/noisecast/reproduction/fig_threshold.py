"""The privacy level at which adaptive optimizers overtake DP-SGD, against batch size (Figs. eps_star, eps_star_sotag).

Every optimizer keeps the paper's tuned setting at all noise multipliers and batch sizes, for a fixed number of epochs:
T = floor(n / B) epochs, so larger batches take fewer steps. The threshold is where the mean final losses cross last; a
run's final loss is the mean over its last hundredth, of the paper's 100 epochs the last one: the loss of DP-SGD after
one step shows that step's noise, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import scipy.stats
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from noisecast.figures._style import OPTIMIZER_COLOURS, RC, RUNNER_LABELS, RUNNER_LINES, plain_numbers
from noisecast.optimizers import OPTIMIZERS, DPSignSGD
from noisecast.question import Question
from noisecast.reproduction.claims import UNDECIDED, Claim
from noisecast.reproduction.fits import Estimate
from noisecast.reproduction.tasks import (
    FORUM,
    FORUM_QUICK,
    IMDB,
    IMDB_QUICK,
    MOVIELENS_CENTRED,
    MOVIELENS_PAPER_LIKE,
    MOVIELENS_PAPER_LIKE_QUICK,
    Numbers,
    Scale,
    Task,
)
from noisecast.reproduction.threshold_voices import (
    ADAPTIVE,
    WINDOWS,
    gaps,
    slope_on_batch_size,
    threshold_voices,
    window_of,
)
from noisecast.reproduction.which_task import in_the_papers_order, task_of, title_of
from noisecast.runners import Moments
from noisecast.table import OK

TITLE = "Where adaptive optimizers overtake DP-SGD, against the batch size"
SOURCE = "Thm. eps_star, Fig. "
NOTICEABLE_POWER = 1.25  # of B, with which z* grows: by a quarter more than the 1 that it has without any batch noise


@dataclass(frozen=True)
class Plan:
    """A task at its `threshold` multipliers.

    Args:
      moves: whether multipliers are those of B = 64 and others' are in proportion to B, about as crossings move at
        fixed epochs: with as many points batch sizes may then lie farther apart, which is what a slope on B needs.
    """

    task: Task
    moves: bool = False

    def levels(self, batch_size: int) -> Numbers:
        return tuple(z * batch_size / 64 if self.moves else z for z in self.task.threshold)


# Fewer epochs and more seeds than elsewhere: how long a run is hardly moves a crossing, chance does. More epochs on
# IMDB: after the paper's 100 DP-SGD and DP-Adam nearly tie (by the forecast DP-SGD leads by 0.001 at most at B = 100),
# after 200 they do not (0.011).
PLANS: dict[Scale, tuple[Plan, ...]] = {
    "quick": tuple(
        Plan(task, moves=True)
        for task in (
            replace(IMDB_QUICK, epochs=200, num_seeds=9, seeds_of={DPSignSGD: 6}),
            replace(FORUM_QUICK, epochs=25, num_seeds=8, seeds_of={}),
            replace(MOVIELENS_PAPER_LIKE_QUICK, epochs=5, num_seeds=3, seeds_of={}, forecast=Moments()),
        )
    ),
    "paper": tuple(Plan(task) for task in (IMDB, FORUM, MOVIELENS_PAPER_LIKE, MOVIELENS_CENTRED)),
}


def questions(scale: Scale, data_dir: Path | None = None, asked: str | None = None) -> tuple[Question, ...]:
    """Every batch size and noise multiplier of every task (that is asked for): trained, and mostly forecast."""
    found = []
    for plan in PLANS[scale]:
        if not plan.task.is_among(asked):
            continue
        task, problem = plan.task, plan.task.load(data_dir)
        if task.forecast:
            task = replace(task, forecast=replace(task.forecast, loss_alone=True))
        for batch_size in task.threshold_batch_sizes:
            scenarios = task.scenarios(problem, plan.levels(batch_size), batch_size=batch_size)
            found += task.questions(scenarios, _at_the_end(scenarios[0].num_steps, task.epochs))
    return tuple(found)


def _at_the_end(num_steps: int, epochs: int) -> tuple[int, ...]:
    """Up to five steps of the last hundredth, the last one among them: as many as cost little beside the training."""
    count = min(max(1, epochs // 20), 5)
    return tuple(sorted({num_steps - num_steps // 100 * part // count for part in range(count)}))


def data(table: Any) -> pd.DataFrame:
    """Of every run, at its end: its loss, and the share of examples that is clipped; means of the steps recorded."""
    table = in_the_papers_order(table)
    at_the_end = table["step"] >= table["num_steps"] - table["num_steps"] // 100
    shown = table.loc[at_the_end & table["metric"].isin(["loss", "clip_fraction"])]
    runs = shown.groupby(["scenario", "runner", "seed", "metric"], dropna=False)
    shown = shown.assign(value=runs["value"].transform("mean")).loc[shown["step"] == shown["num_steps"]]
    return shown.drop(columns=["scenario", "step", "target_delta"]).reset_index(drop=True)


# --- The claims ------------------------------------------------------------------------------------------------------


def claims(frame: pd.DataFrame) -> list[Claim]:
    """Of every task and adaptive optimizer: is there a threshold, where, how it moves, and do the formulas find it."""
    found = []
    for (problem, name), rows in threshold_voices(frame).groupby(["problem", "optimizer"], sort=False):
        voices = {source: part.set_index("batch_size") for source, part in rows.groupby("source", sort=False)}
        about = f"{title_of(problem)}, DP-SGD and {name}: "
        source = SOURCE + WINDOWS[task_of(problem).name][2]
        found += [
            _there_is_one(frame[frame["problem"] == problem], voices, source, about, name),
            *_it_falls(voices, source, about),
            _in_the_window(voices, source, about, problem),
            _printed_formula(voices, source, about),
        ]
    return found


def _there_is_one(rows: Any, voices: dict, source: str, about: str, name: str) -> Claim:
    size, at = _middle(voices)
    measured = Estimate(*_numbers(at["training"]).values())
    # Resamples without a crossing in the range have it at 0 or at infinity: an interval that reaches there has room.
    found = np.isfinite(measured.value)
    holds = found and measured.low > 0 and measured.high < np.inf
    undecided = not holds and (found or not np.isnan(measured.low))
    exceptions = _exceptions(rows[rows["expected_batch_size"] == size], name, found)
    return Claim(
        source=source,
        statement=f"{about}below some epsilon {name} has the lower final loss, above it DP-SGD.",
        measure=f"noise multiplier at which the losses cross, B = {size:g} (epsilon {at['training']['epsilon']:.3g})",
        **measured._asdict(),
        wanted="> 0 and finite",
        holds=bool(holds),
        **_beside(at),
        corrected=" ".join([*([UNDECIDED] if undecided else []), *exceptions]),
    )


def _exceptions(rows: Any, name: str, is_crossing: bool) -> Iterator[str]:
    """Where the means say something else than one threshold."""
    x, gap = gaps(rows, "training", name)
    gap = gap.mean(axis=1)
    if not is_crossing:
        better = name if gap[-1] > 0 else "DP-SGD"
        yield f"The means do not cross: {better} is better at the largest noise, and before it."
    elif gap[0] > 0:
        yield (
            f"{name} is better at the least noise too (z = {x[0]:g}): there DP-SGD has not arrived after "
            f"{int(rows['num_steps'].iloc[0]):,} steps; the theorem compares floors."
        )


def _it_falls(voices: dict, source: str, about: str) -> Iterator[Claim]:
    slopes = {name: slope_on_batch_size(voice) for name, voice in voices.items()}
    steps = voices["training"]["num_steps"]
    taken = f"T = {', '.join(f'{int(t):,}' for t in steps)} at B = {', '.join(f'{size:g}' for size in steps.index)}"
    measured = slopes["training"]
    yield Claim(
        source=source,
        statement=f"{about}the threshold falls as the batch grows.",
        measure=f"slope of log(nominal epsilon*) against log(B), {taken}",
        **measured._asdict(),
        wanted="< 0",
        holds=measured.high < 0,
        theory=f"{slopes['corrected'].value:.2f} ({_form(voices)})",
        forecast=_text(slopes["moments"].value),
        corrected=""
        if measured.high < 0
        else UNDECIDED
        if measured.leaves_room(-np.inf, 0)
        else f"Slope {_text(measured.value)}.",
    )
    # Nominal epsilon is q sqrt(T log(1/delta)) / z, and q sqrt(T) grows as B^(1/2) at fixed epochs.
    powers = {name: Estimate(*(0.5 - number for number in (s.value, s.high, s.low))) for name, s in slopes.items()}
    yield Claim(
        source=source,
        statement=f"{about}the threshold falls because a larger batch has less batch noise.",
        measure="power of B with which z* grows at fixed epochs; 1 without any batch noise, more with it",
        **powers["training"]._asdict(),
        wanted=f"> {NOTICEABLE_POWER}",
        holds=powers["training"].low > NOTICEABLE_POWER,
        theory=f"{powers['corrected'].value:.2f} ({_form(voices)}, batch noise neglected)",
        forecast=_text(powers["moments"].value),
        corrected=(f"{UNDECIDED} " if powers["training"].leaves_room(NOTICEABLE_POWER, np.inf) else "")
        + (
            f"At fixed epochs {taken}: z* in proportion to B, without any batch noise, already makes nominal epsilon* "
            f"fall as B^-0.5; at fixed steps it would not move. z* grows as B^{_text(powers['training'].value)}."
        ),
    )


def _in_the_window(voices: dict, source: str, about: str, problem: str) -> Claim:
    size, at = _middle(voices)
    low, high = window_of(problem, size)
    (shown, counted, _) = WINDOWS[task_of(problem).name]
    measured = Estimate(*_numbers(at["training"]).values())
    return Claim(
        source=source,
        statement=f"{about}the threshold lies in the window shown, epsilon {shown[0]:g} to {shown[1]:g} (its count).",
        measure=f"noise multiplier at which the losses cross, B = {size:g}",
        **_numbers(at["training"]),
        wanted=f"{low:.3g} to {high:.3g}",
        holds=measured.within(low, high),
        **_beside(at),
        corrected=(f"{UNDECIDED} " if measured.leaves_room(low, high) else "")
        + (
            f"The paper counts {counted:,} examples and no accountant; of what was run here, epsilon* as accounted is "
            f"{_text(at['training']['epsilon'])}."
        ),
    )


def _printed_formula(voices: dict, source: str, about: str) -> Claim:
    size, at = _middle(voices)
    printed, corrected = (at[name]["noise_multiplier"] for name in ("printed", "corrected"))
    measured = Estimate(*_numbers(at["training"]).values())
    with np.errstate(divide="ignore"):  # an interval of z* may reach to 0
        ratio = Estimate(*(float(np.divide(printed, z)) for z in (measured.value, measured.high, measured.low)))
    holds = ratio.contains(1.0) and ratio.low > 0 and bool(np.isfinite(ratio.high))
    return Claim(
        source="Thm. eps_star, Cor. sign-vs-sgd",
        statement=f"{about}the theorem's formula gives the threshold.",
        measure=f"measured epsilon* over the printed formula's, B = {size:g}",
        **ratio._asdict(),
        wanted="1",
        holds=holds,
        theory=f"the printed formula puts z* at {printed:.3g}; with own learning rates and clip norms {corrected:.3g}",
        forecast=f"z* {_text(at['moments']['noise_multiplier'])}",
        corrected=(f"{UNDECIDED} " if not holds and ratio.leaves_room(1.0, 1.0) else "")
        + (
            f"Each optimizer has its own learning rate and clip norm: then z* = {corrected:.3g}, measured "
            f"{_text(measured.value)}."
        ),
    )


def _text(number: float) -> str:
    return f"{number:.3g}" if np.isfinite(number) else "none"


def _middle(voices: dict) -> tuple[float, dict]:
    sizes = list(voices["training"].index)
    size = 64.0 if 64.0 in sizes else sizes[len(sizes) // 2]
    return size, {name: voice.loc[size] for name, voice in voices.items()}


def _numbers(at: Any) -> dict[str, Any]:
    return {"value": at["noise_multiplier"], "low": at["low"], "high": at["high"]}


def _form(voices: dict) -> str:
    return _form_at(voices["corrected"].iloc[0])


def _form_at(row: Any) -> str:
    return "threshold_noise_multiplier_all_clipped" if row["is_clipped"] else "threshold_noise_multipliers"


def _beside(at: dict) -> dict[str, Any]:
    return {
        "theory": f"{at['corrected']['noise_multiplier']:.3g} ({_form_at(at['corrected'])}, floors)",
        "forecast": _text(at["moments"]["noise_multiplier"]),
    }


# --- The picture -----------------------------------------------------------------------------------------------------

MOST_PANELS = 3  # of batch sizes: the smallest, the middle one and the largest


def draw(frame: Any) -> Figure:
    """One line a task: losses against the noise multiplier at some batch sizes, then the threshold against B."""
    problems = list(frame["problem"].unique())
    found = threshold_voices(frame)
    with mpl.rc_context(RC):
        figure = Figure(figsize=(14.5, 0.9 + 2.9 * len(problems)), layout="constrained")
        lines = figure.subplots(len(problems), MOST_PANELS + 2, squeeze=False)
        for panels, problem in zip(lines, problems):
            _draw_task(panels, frame[frame["problem"] == problem], found[found["problem"] == problem])
        figure.legend(handles=_handles(frame), loc="outside lower center", ncols=5)
    return figure


def _draw_task(panels, rows: Any, found: Any) -> None:
    sizes = sorted(rows["expected_batch_size"].unique())
    shown = sizes if len(sizes) <= MOST_PANELS else [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    for panel in panels[len(shown) : MOST_PANELS]:
        panel.axis("off")
    problem = str(rows["problem"].iloc[0])
    for panel, size in zip(panels, shown):
        _draw_losses(panel, rows[rows["expected_batch_size"] == size], found[found["batch_size"] == size], problem)
    panels[0].set_ylabel(f"{title_of(problem)}\nfinal training loss (non-private)")
    _draw_thresholds(panels[-2], found, "epsilon", "ε* as accounted")
    _draw_thresholds(panels[-1], found, "nominal_epsilon", "ε* nominal (no guarantee)")


def _draw_losses(panel, rows: Any, found: Any, problem: str) -> None:
    size, steps = float(rows["expected_batch_size"].iloc[0]), int(rows["num_steps"].iloc[0])
    for (name, runner), curve in rows[rows["metric"] == "loss"].groupby(["optimizer", "runner"], sort=False):
        style, marker = RUNNER_LINES[runner]
        by_level = curve[curve["status"] != "diverged"].groupby("noise_multiplier")["value"]
        means, seeds = by_level.mean(), np.maximum(by_level.size() - 1, 1)
        errors = scipy.stats.t.isf(0.025, seeds) * by_level.sem()
        colour = OPTIMIZER_COLOURS[name]
        panel.errorbar(
            means.index, means, yerr=errors if runner == "training" else None, linestyle=style, marker=marker,
            markersize=3, color=colour, linewidth=1.2,
        )  # fmt: skip
    panel.axvspan(*window_of(problem, size), color="#999999", alpha=0.15, linewidth=0)
    for name in ADAPTIVE:
        at = found[(found["source"] == "training") & (found["optimizer"] == name)]["noise_multiplier"].iloc[0]
        if np.isfinite(at):
            panel.axvline(at, color=OPTIMIZER_COLOURS[name], linewidth=0.9, linestyle=(0, (1, 1)))
    panel.set(xscale="log", yscale="log", xlabel="noise multiplier", title=f"B = {size:g}, T = {steps:,}")
    plain_numbers(panel.xaxis)
    plain_numbers(panel.yaxis)


def _draw_thresholds(panel, found: Any, axis: str, title: str) -> None:
    for (name, source), voice in found.groupby(["optimizer", "source"], sort=False):
        voice = voice.sort_values("batch_size")
        sizes = voice["batch_size"] * (1.0 if name == "DP-SignSGD" else 1.012)  # side by side
        style = {"training": "none", "moments": "-.", "corrected": "--", "printed": ":"}[source]
        values, colour = voice[axis].to_numpy(float), OPTIMIZER_COLOURS[name]
        if source == "printed" and name != "DP-SignSGD":
            continue  # it knows no optimizer
        bars = None
        if source == "training":
            ratio = (voice["noise_multiplier"] / voice[["high", "low"]].T).to_numpy(float)  # epsilon falls as z grows
            bars = np.abs(np.nan_to_num(values * ratio - values, posinf=0.0))
        panel.errorbar(
            sizes, values, yerr=bars, linestyle=style, marker="o" if source == "training" else "", markersize=4,
            color="black" if source == "printed" else colour, linewidth=1.2,
        )  # fmt: skip
    panel.set(yscale="log", xlabel="expected batch size", title=title, xticks=sorted(found["batch_size"].unique()))
    plain_numbers(panel.yaxis)


def _handles(frame: Any) -> Sequence[Line2D]:
    names = [optimizer.name for optimizer in OPTIMIZERS]
    handles = [Line2D([], [], color=OPTIMIZER_COLOURS[name], linewidth=3, label=name) for name in names]
    seeds = frame.loc[frame["status"] == OK, "seed"].nunique()
    for runner in ("training", "moments"):
        style, marker = RUNNER_LINES[runner]
        label = RUNNER_LABELS[runner] + (f", at most {seeds} seeds, bars 95 %" if runner == "training" else "")
        handles.append(Line2D([], [], color="black", linestyle=style, marker=marker, markersize=3, label=label))
    handles.append(
        Line2D([], [], color="black", linestyle="--", label="corrected formula (accounted: within the trained z)")
    )
    handles.append(Line2D([], [], color="black", linestyle=":", label="printed formula"))
    handles.append(Line2D([], [], color="#999999", alpha=0.3, linewidth=8, label="window shown in the paper"))
    handles.append(Line2D([], [], color="black", linestyle=(0, (1, 1)), linewidth=0.9, label="crossing (vertical)"))
    return handles
