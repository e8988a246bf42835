"""What privacy noise costs in final loss: Figs. nm_scaling, nm_scaling_movielens and nm_scaling_test.

The paper: DP-SGD's loss grows with 1 / epsilon^2, the adaptive optimizers' with 1 / epsilon (Thms. lossbound_sgd,
lossbound_sign). Its nominal epsilon is a constant over the noise multiplier z, so these are powers 2 and 1 of z.

On the quadratic, whose minimum is 0, the power is the log-log slope of the final loss. Of the other losses nobody knows
the floor without noise, and it is not the loss at z = 0, where DP-SignSGD is worse on IMDB than at z = 0.5: the power p
is fitted with the offset, loss = a + b z^p, as the paper draws its trends.

The paper's quadratic needs a learning rate that falls to 2.4e-4; ours is 2.4e-4 throughout, at which the floor is the
same and is reached. At its B = 1 the privacy noise alone makes gradients longer than the clip norm; B = 4 is what its
theorem is about, and both are shown.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from noisecast.figures._style import OPTIMIZER_COLOURS, RC, RUNNER_LABELS, RUNNER_LINES, plain_numbers
from noisecast.optimizers import OPTIMIZERS
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import Stream
from noisecast.problems.quadratic import quadratic
from noisecast.question import Question
from noisecast.reproduction.claims import UNDECIDED, Claim
from noisecast.reproduction.fits import (
    Estimate,
    by_seed,
    each,
    log_log_slope,
    mean,
    offset_curve,
    offset_fit,
    only,
    power_law,
    seed_counts,
)
from noisecast.reproduction.tasks import TASKS, Scale, Task, late
from noisecast.reproduction.which_task import in_the_papers_order
from noisecast.runners import ClosedForm, Moments, Training
from noisecast.scenario import Scenario
from noisecast.table import METRICS

TITLE = "What privacy noise costs in final loss"

# As printed, "8 multipliers linearly spaced from 0 to 2", and the 0.1 that its ninth epsilon asks for.
QUADRATIC_NOISE_MULTIPLIERS = (0.1, *np.linspace(0, 2, 8)[1:].tolist())
QUADRATIC_STEPS: dict[Scale, int] = {"quick": 20_000, "paper": 50_000}
QUADRATIC_SEEDS: dict[Scale, int] = {"quick": 5, "paper": 10}

WANTED = {"DP-SGD": 2.0, "DP-SignSGD": 1.0, "DP-Adam": 1.0}  # powers of z
TOLERANCE = 0.25  # a slope is as claimed if its whole interval is that near

KEYS = ["panel", "optimizer", "metric", "runner", "noise_multiplier"]


def questions(scale: Scale, data_dir: Path | None = None, asked: str | None = None) -> tuple[Question, ...]:
    """The two quadratics, unless a task is asked for, then every such task at the paper's multipliers."""
    return (
        *(_quadratic_question(scale, batch_size) for batch_size in (4, 1) if asked is None),
        *(question for task in TASKS[scale] if task.is_among(asked) for question in _task_questions(task, data_dir)),
    )


def _quadratic_question(scale: Scale, batch_size: int) -> Question:
    problem = quadratic(np.full(1024, 10.0), 0.01, example_noise_std=0.01)  # starts inside the clip norm
    num_steps = QUADRATIC_STEPS[scale]
    scenarios = tuple(
        Scenario(
            problem=problem,
            mechanism=SampledGaussian(noise_multiplier=z, l2_clip_norm=5.0, sampler=Stream(batch_size)),
            optimizer=optimizer(learning_rate=2.4e-4),
            num_steps=num_steps,
            target_delta=1e-4,
        )
        for optimizer in OPTIMIZERS
        for z in QUADRATIC_NOISE_MULTIPLIERS
    )
    return Question(
        scenarios=scenarios,
        runners=(Training(), Moments(), ClosedForm()),
        record_at=(3 * num_steps // 4,),
        insecure_seeds=tuple(range(QUADRATIC_SEEDS[scale])),
    )


def _task_questions(task: Task, data_dir: Path | None) -> tuple[Question, ...]:
    scenarios = task.scenarios(task.load(data_dir), task.floors)
    num_steps = scenarios[0].num_steps
    return task.questions(scenarios, task.looks((late(num_steps),), num_steps))


def data(table: pd.DataFrame) -> pd.DataFrame:
    """Final loss, one row a panel, optimizer, metric, runner, noise multiplier and seed; not finite where diverged.

    Columns: also both epsilons, and `late_change`, by how much the loss changed over the last quarter of the steps.
    """
    table = in_the_papers_order(table)
    rows = table.loc[table["metric"].isin(["loss", "test_loss"])]
    rows = rows.assign(panel=[_panel(*row) for row in zip(rows["problem"], rows["expected_batch_size"])])
    rows["seed"] = rows["seed"].astype("Int64").fillna(0)  # the deterministic runners' only one
    keys = [*KEYS, "seed"]
    last = rows["step"] == rows["num_steps"]
    before = rows["step"] == late(rows["num_steps"])
    frame = rows.loc[last, [*keys, "epsilon", "nominal_epsilon", "value", "status"]].rename(columns={"value": "loss"})
    frame = frame.merge(rows.loc[before, [*keys, "value"]], on=keys, how="left")
    frame["late_change"] = frame["loss"] - frame.pop("value")
    return frame


def _panel(problem: str, batch_size: float) -> str:
    return f"{problem}, B = {batch_size:g}" if _is_quadratic(problem) else problem


# --- Claims ---------------------------------------------------------------------------------------------------------


def claims(frame: pd.DataFrame) -> list[Claim]:
    """A power for each panel, metric and optimizer, against the paper's 2 or 1."""
    trained = only(frame, runner="training")
    return [_claim(curve, *name, frame=frame) for name, curve in each(trained, "panel", "metric", "optimizer")]


def power_of(curve: pd.DataFrame) -> tuple[Estimate, np.ndarray]:
    """The power of z with which one curve's loss grows, and the multipliers it is of: those where no run diverged.

    nan where fewer than four are left, or the loss does not grow.
    """
    means = {z: rows["loss"].to_numpy(float).mean() for z, rows in each(curve, "noise_multiplier")}
    used = np.array(sorted(z for z, value in means.items() if np.isfinite(value)))
    if len(used) < 4:
        return Estimate(np.nan, np.nan, np.nan), used
    rows = curve.loc[curve["noise_multiplier"].isin(list(used))]
    fit = log_log_slope if _is_quadratic(curve["panel"].iloc[0]) else power_law
    x, values = by_seed(rows.assign(value=rows["loss"]))
    return _fitted(fit, tuple(x.tolist()), tuple(map(tuple, values.tolist()))), used


@lru_cache(maxsize=256)
def _fitted(fit: Callable[..., Estimate], x: tuple[float, ...], values: tuple[tuple[float, ...], ...]) -> Estimate:
    """Once for the claim, for what holds instead and for the picture: a bootstrap takes a while."""
    return fit(np.array(x), np.array(values))


def _is_quadratic(panel: str) -> bool:
    return panel.startswith("quadratic")


def _claim(curve: pd.DataFrame, panel: str, metric: str, optimizer: str, *, frame: pd.DataFrame) -> Claim:
    wanted = WANTED[optimizer]
    found, used = power_of(curve)
    holds = found.within(wanted - TOLERANCE, wanted + TOLERANCE)
    is_open = np.isfinite(found.value) and found.leaves_room(wanted, wanted)
    asked = len(set(curve["noise_multiplier"]))
    over = f"z = {used.min():g} to {used.max():g}" if len(used) else "no z"
    left_out = f" ({asked - len(used)} of {asked} left out: diverged)" if len(used) < asked else ""
    return Claim(
        source=f"Thm. {'lossbound_sgd' if optimizer == 'DP-SGD' else 'lossbound_sign'}, Fig. {_figure(panel, metric)}",
        statement=f"{optimizer} on {panel}: {METRICS[metric].label} grows with 1/epsilon"
        f"{'^2' if wanted == 2 else ''}, so with z^{wanted:g}",
        measure=f"{'log-log slope' if _is_quadratic(panel) else 'p of a + b z^p'} of the final {METRICS[metric].label} "
        f"in z, {over}{left_out}",
        value=found.value,
        low=found.low,
        high=found.high,
        wanted=f"{wanted:g} ± {TOLERANCE:g}",
        holds=holds,
        theory=_predicted(frame, panel, metric, optimizer, "closed_form", used)
        or ("eta d S^2 / 4 with S ~ z: 2" if optimizer == "DP-SGD" else "eta d S / 4 (sign: times 1.25) with S ~ z: 1"),
        forecast=_predicted(frame, panel, metric, optimizer, "moments", used),
        corrected="" if holds else UNDECIDED if is_open else _corrected(curve, used),
    )


def _figure(panel: str, metric: str) -> str:
    if metric == "test_loss":
        return "nm_scaling_test"
    return "nm_scaling_movielens" if "movielens" in panel else "nm_scaling"


def _predicted(frame: pd.DataFrame, panel: str, metric: str, optimizer: str, runner: str, used: np.ndarray) -> str:
    curve = only(frame, panel=panel, metric=metric, optimizer=optimizer, runner=runner)
    curve = curve.loc[curve["noise_multiplier"].isin(list(used))]
    value = power_of(curve)[0].value if len(curve) else np.nan
    return f"{value:.2f}" if np.isfinite(value) else ""


def _corrected(curve: pd.DataFrame, used: np.ndarray) -> str:
    """What holds instead: the power, that of the upper multipliers, and whether the last loss is a floor at all."""
    if len(used) < 4:
        return "No power: too few multipliers at which no run diverges."
    found, _ = power_of(curve)
    if not np.isfinite(found.value):
        return "The loss does not grow with z."
    says = f"Power {found.value:.2f}"
    if _is_quadratic(curve["panel"].iloc[0]):
        upper = used[-max(4, len(used) // 2) :]
        above, _ = power_of(curve.loc[curve["noise_multiplier"] >= upper[0]])
        says += f", and {above.value:.2f} ({above.low:.2f} to {above.high:.2f}) from z = {upper[0]:g} on"
    elif found.contains(0):
        says += ": no more than a logarithm, the same rise with every doubling of z"
    first, last = (only(curve, noise_multiplier=z) for z in (used[0], used[-1]))
    rise = last["loss"].to_numpy(float).mean() - first["loss"].to_numpy(float).mean()
    moving = last["late_change"].to_numpy(float).mean() / rise
    return (
        f"{says}. At z = {used[-1]:g} the last quarter of the steps changed the loss by {moving:+.0%} of its rise from "
        f"z = {used[0]:g}{': no floor yet' if abs(moving) > 0.1 else ''}."
    )


# --- The picture ----------------------------------------------------------------------------------------------------

# (metric, column of the horizontal axis, its label); the last two tell how the same losses look against epsilon.
ROWS = (
    ("loss", "noise_multiplier", "noise multiplier"),
    ("test_loss", "noise_multiplier", "noise multiplier"),
    ("loss", "epsilon", "epsilon (accounted)"),
    ("loss", "nominal_epsilon", "nominal epsilon (no guarantee)"),
)


def draw(frame: pd.DataFrame) -> Figure:
    """The quadratics one below the other, then a column a task: losses against z, training loss against epsilon."""
    panels = list(dict.fromkeys(frame["panel"]))
    quadratics = [panel for panel in panels if _is_quadratic(panel)]
    tasks = [panel for panel in panels if not _is_quadratic(panel)]
    # (row, column, panel, what is drawn); a quadratic has no test set, and no data set that an epsilon could protect.
    places = [(row, 0, panel, ROWS[0]) for row, panel in enumerate(quadratics)]
    for column, panel in enumerate(tasks, start=min(1, len(quadratics))):
        places += [(row, column, panel, what) for row, what in enumerate(ROWS)]
    shape = (max(place[0] for place in places) + 1, max(place[1] for place in places) + 1)
    with mpl.rc_context(RC):
        figure = Figure(figsize=(max(3 * shape[1], 9), 2.6 * shape[0] + 0.8), layout="constrained")
        grid = figure.subplots(*shape, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for row, column, panel, (metric, x, label) in places:
            axes = grid[row, column]
            axes.set_axis_on()
            axes.set(xscale="log", yscale="log", xlabel=label)
            _draw_panel(axes, only(frame, panel=panel, metric=metric), x)
            for axis in (axes.xaxis, axes.yaxis):
                plain_numbers(axis)
            axes.set_ylabel(f"final {METRICS[metric].label}")
            if row == 0 or panel in quadratics:
                axes.set_title(_short(panel))
        _legend(figure, frame)
    return figure


def _short(panel: str) -> str:
    return panel.replace("factorisation of ", "").replace(", dim 100", "").replace(" (d = 1024)", "")


def _draw_panel(axes: Any, rows: pd.DataFrame, x: str) -> None:
    notes = []
    for (optimizer, runner), curve in each(rows, "optimizer", "runner"):
        colour = OPTIMIZER_COLOURS[optimizer]
        style, marker = RUNNER_LINES[runner]
        points = np.array([_point(some, x) for _, some in each(curve, "noise_multiplier")])
        points = points[np.isfinite(points[:, :2]).all(axis=1) & (points[:, 1] > 0)]
        at, loss, low, high = points[np.argsort(points[:, 0])].T
        axes.plot(at, loss, linestyle=style, marker=marker, markersize=4, color=colour)
        if runner == "training":
            axes.vlines(at, np.maximum(low, loss / 10), high, color=colour)
            notes.append((colour, power_of(curve)[0]))
    if x == "noise_multiplier":
        for line, (colour, found) in enumerate(notes):
            text = f"power {found.value:.2f} ({found.low:.2f}, {found.high:.2f})"
            axes.text(0.03, 0.97 - 0.09 * line, text, color=colour, fontsize=7.5, va="top", transform=axes.transAxes)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.4)  # room for the powers
    if x != "epsilon":
        _guides(axes, rows, x)


def _point(rows: pd.DataFrame, x: str) -> tuple[float, ...]:
    """Place, mean loss and its interval."""
    return (rows[x].iloc[0], *mean(rows["loss"].to_numpy(float)))


def _guides(axes: Any, rows: pd.DataFrame, x: str) -> None:
    """The claimed powers, dotted: the best a + b z^2 and a + b z of the trained means (a = 0 on quadratics)."""
    for optimizer, wanted in WANTED.items():
        curve = only(rows, optimizer=optimizer, runner="training")
        points = np.array([(z, *_point(some, x)[:2]) for z, some in each(curve, "noise_multiplier")])
        points = points[np.isfinite(points).all(axis=1)] if len(points) else points
        if len(points) < 2:
            continue
        z, at, loss = points[np.argsort(points[:, 0])].T
        if _is_quadratic(curve["panel"].iloc[0]):
            line = np.exp(np.log(loss / z**wanted).mean()) * z**wanted
        else:
            line = offset_curve(z, wanted, offset_fit(z, loss, wanted))
        above = line > loss.min() / 2  # an offset may be below 0
        axes.plot(at[above], line[above], linestyle=(0, (1, 2)), color=OPTIMIZER_COLOURS[optimizer], zorder=0)


def _legend(figure: Figure, frame: pd.DataFrame) -> None:
    handles = [
        Line2D([], [], color=OPTIMIZER_COLOURS[name], linewidth=3, label=name)
        for name in dict.fromkeys(frame["optimizer"])
    ]
    for runner in dict.fromkeys(frame["runner"]):
        style, marker = RUNNER_LINES[runner]
        handles.append(Line2D([], [], color="black", linestyle=style, marker=marker, label=RUNNER_LABELS[runner]))
    handles.append(
        Line2D([], [], color="black", linestyle=(0, (1, 2)), label="best curve of the claimed power, 2 or 1 (dotted)")
    )
    seeds = [seed_counts(rows) for _, rows in each(only(frame, runner="training"), "panel")]
    title = (
        "Powers: p of a + b z^p (quadratics: the log-log slope), with 95 % intervals. Losses are non-private.\n"
        f"Bars: 95 % interval of the mean over {' / '.join(seeds)} seeds, panel by panel; of two "
        "numbers, the first is DP-SGD's."
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, title=title)
