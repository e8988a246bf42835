"""How fast the loss falls at several noise levels: Figs. speed, speed_movielens and speed_test_loss.

The paper: DP-SGD's speed does not depend on epsilon, the adaptive optimizers' is proportional to it (Thms.
lossbound_sgd, lossbound_sign). In the noise multiplier z these are the powers 0 and -1.

Speed is the rate at which the way to the best loss gets shorter in the first part of training: the least-squares rate
r, per step, of (f - f_best) / (f_start - f_best) = exp(-r k), from the start until a fifth of the way is gone or the
loss turns, whichever is first. f_best is the lowest mean loss that this optimizer reaches at any of the multipliers. A
curve that never covers `LEAST_FALL` of the way does not converge and has no speed: the paper's claim leaves it out too.
Where fewer than three converge there is no power of z, and the claim fails: `_too_few`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from noisecast.figures._style import OPTIMIZER_COLOURS, RC, RUNNER_LABELS, RUNNER_LINES, plain_numbers
from noisecast.optimizers import DPSGD
from noisecast.question import Question
from noisecast.reproduction.claims import UNDECIDED, Claim
from noisecast.reproduction.fits import Estimate, bootstrap, each, mean, only, seed_counts
from noisecast.reproduction.tasks import IMDB_QUICK, TASKS, Scale, Task, times
from noisecast.reproduction.which_task import in_the_papers_order
from noisecast.table import METRICS

TITLE = "How fast the loss falls, by privacy noise"

FIRST_PART = 0.2  # of the way to the best loss: over it the rate is fitted
LEAST_FALL = 0.1  # of the way: a curve that never gets there does not converge
LEAST_WAY = 1e-3  # of the loss at the start: less is chance, at any of the multipliers
LEAST_RATES = 3  # multipliers at which the loss falls, for a slope

WANTED = {"DP-SGD": 0.0, "DP-SignSGD": -1.0, "DP-Adam": -1.0}  # powers of z
TOLERANCE = 0.25  # a slope is as claimed if its whole interval is that near


def questions(scale: Scale, data_dir: Path | None = None, asked: str | None = None) -> tuple[Question, ...]:
    """Every task (that is asked for) at its multipliers, looked at often early on."""
    tasks = (task for task in _tasks(scale) if task.is_among(asked))
    return tuple(question for task in tasks for question in _questions(task, data_dir))


def _tasks(scale: Scale) -> Iterator[Task]:
    """An early rate is a small difference of noisy losses: quickly, with more seeds where they are cheap."""
    for task in TASKS[scale]:
        few = replace(task, seeds_of={})
        yield replace(few, num_seeds=16, seeds_of={DPSGD: 60}) if task is IMDB_QUICK else few


def _questions(task: Task, data_dir: Path | None) -> tuple[Question, ...]:
    scenarios = task.scenarios(task.load(data_dir), task.speed)
    num_steps = scenarios[0].num_steps
    return task.questions(scenarios, task.looks(times(num_steps), num_steps))


def data(table: pd.DataFrame) -> pd.DataFrame:
    """Loss by problem, optimizer, metric, runner, noise multiplier (and its epsilons), seed and step."""
    table = in_the_papers_order(table)
    looked = zip(table["step"], table["num_steps"], strict=True)
    looks = np.array([step in times(num_steps) for step, num_steps in looked], bool)
    rows = table.loc[looks & table["metric"].isin(["loss", "test_loss"])]
    columns = [
        "problem",
        "optimizer",
        "metric",
        "runner",
        "noise_multiplier",
        "epsilon",
        "nominal_epsilon",
        "num_steps",
    ]
    frame = rows.loc[:, [*columns, "seed", "step", "value"]].rename(columns={"value": "loss"})
    frame["seed"] = frame["seed"].astype("Int64").fillna(0)  # the deterministic runner's only one
    return frame.reset_index(drop=True)


# --- The numbers ----------------------------------------------------------------------------------------------------


def curves(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One optimizer's losses on one problem: z (multipliers,), steps (times,), losses (multipliers, times, seeds)."""
    table = rows.pivot(index=["noise_multiplier", "step"], columns="seed", values="loss").sort_index()
    multipliers, steps = (table.index.unique(level) for level in table.index.names)
    return (
        multipliers.to_numpy(float),
        steps.to_numpy(float),
        table.to_numpy(float).reshape(len(multipliers), len(steps), -1),
    )


def rates(steps: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Early rates per step of mean curves (multipliers, times); nan for one that diverges or never falls.

    >>> steps = np.linspace(0, 100, 200)
    >>> losses = np.exp(-np.outer([0.02, 0.1], steps))
    >>> rates(steps, losses).round(3).tolist()
    [0.02, 0.1]
    """
    best = min((curve.min() for curve in losses if np.isfinite(curve).all()), default=math.nan)
    return np.array([_rate(steps, curve, best) if np.isfinite(curve).all() else math.nan for curve in losses])


def _rate(steps: np.ndarray, curve: np.ndarray, best: float) -> float:
    if curve[0] - best < LEAST_WAY * curve[0]:
        return math.nan
    left = (curve - best) / (curve[0] - best)
    last = int(np.argmin(left))
    if left[last] > 1 - LEAST_FALL:
        return math.nan
    gone = np.flatnonzero(left <= 1 - FIRST_PART)
    last = min(last, int(gone[0])) if len(gone) else last
    # The curve that is the best has nothing left at its end, and no logarithm there.
    way = np.log(np.maximum(left[1 : last + 1], 1e-3))
    time = steps[1 : last + 1]
    return float(-(time @ way) / (time @ time))


def rate_slope(multipliers: np.ndarray, steps: np.ndarray, losses: np.ndarray) -> tuple[Estimate, np.ndarray]:
    """Log-log slope of the early rate in z, and the multipliers that have one; nan of fewer than `LEAST_RATES`."""
    found = rates(steps, losses.mean(axis=2))
    used = found > 0
    if used.sum() < LEAST_RATES:
        return Estimate(math.nan, math.nan, math.nan), multipliers[used]
    log_z = np.log(multipliers[used])
    centred = log_z - log_z.mean()

    def slope(sample: np.ndarray) -> float:
        rate = rates(steps, sample.mean(axis=2))[used]
        return float(centred @ np.log(rate) / (centred @ centred)) if (rate > 0).all() else math.nan

    return bootstrap(slope, losses), multipliers[used]


# --- Claims ---------------------------------------------------------------------------------------------------------


def claims(frame: pd.DataFrame) -> list[Claim]:
    """For each problem, loss and optimizer: the power of z that its early speed follows."""
    trained = only(frame, runner="training")
    return [_claim(rows, *name, frame=frame) for name, rows in each(trained, "problem", "metric", "optimizer")]


def _claim(rows: pd.DataFrame, problem: str, metric: str, optimizer: str, *, frame: pd.DataFrame) -> Claim:
    wanted, label = WANTED[optimizer], METRICS[metric].label
    power = "does not depend on epsilon" if wanted == 0 else "is proportional to epsilon, so to 1/z"
    return Claim(
        source=f"Thm. {'lossbound_sgd' if wanted == 0 else 'lossbound_sign'}, Fig. {_figure(problem, metric)}",
        statement=f"{optimizer} on {problem}: the speed of the {label} {power}",
        theory="2 h lambda: 0, the drift; the noise adds to the loss meanwhile"
        if wanted == 0
        else "2 h lambda / S (sign: times 0.80): -1 where privacy noise dominates S, 0 where batch noise does",
        forecast=_forecast(frame, problem, metric, optimizer),
        **_decision(optimizer, label, *curves(rows)),
    )


def _decision(
    optimizer: str, label: str, multipliers: np.ndarray, steps: np.ndarray, losses: np.ndarray
) -> dict[str, Any]:
    """The number that decides, and what follows from it: the slope, or that the loss falls too seldom to have one."""
    wanted = WANTED[optimizer]
    found, used = rate_slope(multipliers, steps, losses)
    if len(used) < LEAST_RATES:
        return _too_few(label, used, steps, losses)
    num_left_out = len(multipliers) - len(used)
    left_out = f"; {num_left_out} of {len(multipliers)} do not converge" if num_left_out else ""
    holds = found.within(wanted - TOLERANCE, wanted + TOLERANCE)
    is_open = found.leaves_room(wanted, wanted)
    return {
        "measure": f"log-log slope in z of the early rate of the {label}, {_range(used)}{left_out}",
        **found._asdict(),
        "wanted": f"{wanted:g} ± {TOLERANCE:g}",
        "holds": holds,
        "corrected": "" if holds else UNDECIDED if is_open else _corrected(optimizer, multipliers, steps, losses),
    }


def _too_few(label: str, used: np.ndarray, steps: np.ndarray, losses: np.ndarray) -> dict[str, Any]:
    """Where the loss falls at fewer multipliers, `used`, than a slope takes: their number decides, and it refutes."""
    count = bootstrap(lambda sample: float(np.sum(rates(steps, sample.mean(axis=2)) > 0)), losses)
    seen = f"only at z = {' and '.join(f'{z:g}' for z in used)}: elsewhere" if len(used) else "at none of these:"
    return {
        "measure": f"at how many of {len(losses)} noise multipliers the {label} falls at all",
        **count._asdict(),
        "wanted": f">= {LEAST_RATES}, for a slope",
        "holds": False,
        "corrected": UNDECIDED
        if count.leaves_room(LEAST_RATES, math.inf)
        else f"The {label} falls {seen} the noise adds as much as the drift takes away, and there is no speed to "
        "compare.",
    }


def _figure(problem: str, metric: str) -> str:
    if metric == "test_loss":
        return "speed_test_loss"
    return "speed_movielens" if "movielens" in problem else "speed"


def _range(used: np.ndarray) -> str:
    return f"z = {used.min():g} to {used.max():g}" if len(used) else "no z"


def _forecast(frame: pd.DataFrame, problem: str, metric: str, optimizer: str) -> str:
    rows = only(frame, problem=problem, metric=metric, optimizer=optimizer, runner="moments")
    if rows.empty:
        return ""
    found, used = rate_slope(*curves(rows))
    return f"{found.value:.2f} over {_range(used)}" if np.isfinite(found.value) else f"no slope: {len(used)} converge"


def _corrected(optimizer: str, multipliers: np.ndarray, steps: np.ndarray, losses: np.ndarray) -> str:
    """The rates themselves at the least and the most noise that has one."""
    found = rates(steps, losses.mean(axis=2))
    falling = np.flatnonzero(found > 0)
    first, last = falling[0], falling[-1]
    low, high = multipliers[first], multipliers[last]
    if optimizer == "DP-SGD":
        why = "The drift is the same, but what the noise adds to the loss grows with z^2 from the first step."
    elif found[last] / found[first] > low / high:
        why = "Less than 1/z: batch noise in S makes the speed saturate."
    else:
        why = "More than 1/z: what the noise adds to the loss slows its fall as well."
    return (
        f"From z = {low:g} to {high:g} (a factor of {high / low:.2g}) the rate changes by a factor of "
        f"{found[last] / found[first]:.2g}. {why}"
    )


# --- The picture ----------------------------------------------------------------------------------------------------


def draw(frame: pd.DataFrame) -> Figure:
    """A row a problem and a loss: its path under each optimizer, then its early rates against z."""
    optimizers = [name for name in OPTIMIZER_COLOURS if name in set(frame["optimizer"])]
    panels = list(each(frame, "problem", "metric"))
    with mpl.rc_context(RC):
        figure = Figure(figsize=(3.2 * (len(optimizers) + 1), 2.5 * len(panels) + 1), layout="constrained")
        grid = figure.subplots(len(panels), len(optimizers) + 1, squeeze=False)
        for row, ((problem, metric), rows) in zip(grid, panels):
            levels = np.unique(rows["noise_multiplier"].to_numpy(float))
            colours = ScalarMappable(LogNorm(0.8 * levels[0], 1.1 * levels[-1]), mpl.colormaps["plasma_r"])
            for axes, optimizer in zip(row, optimizers):
                _draw_paths(axes, only(rows, optimizer=optimizer), colours)
                axes.set_title(optimizer, color=OPTIMIZER_COLOURS[optimizer])
            row[0].set_ylabel(f"{problem.replace('factorisation of ', '').replace(', dim 100', '')}\n"
                              f"{METRICS[metric].label}")  # fmt: skip
            bar = figure.colorbar(colours, ax=row[-2], ticks=levels, format="%g", aspect=30, pad=0.02)
            bar.ax.minorticks_off()
            bar.ax.tick_params(labelsize=7)
            bar.ax.set_title("z", fontsize=9)
            _draw_rates(row[-1], rows)
        _legend(figure, frame)
    return figure


def _draw_paths(axes: Any, rows: pd.DataFrame, colours: ScalarMappable) -> None:
    """Mean loss by step, dark for much noise; bands where trained."""
    seen: list[float] = []
    for (z, runner), curve in each(rows.sort_values("step"), "noise_multiplier", "runner"):
        points = np.array([(step, *mean(some["loss"].to_numpy(float))) for step, some in each(curve, "step")])
        step, value, low, high = points[np.isfinite(points[:, 1])].T
        seen += value.tolist()
        trained, colour = runner == "training", colours.to_rgba(z)
        style = "-" if trained else RUNNER_LINES[runner][0]
        axes.plot(step, value, style, color=colour, linewidth=1.3 if trained else 0.9)
        if trained:
            axes.fill_between(step, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(step, value, ".", color=colour, markersize=3)
    start = only(rows, step=0)["loss"].to_numpy(float).mean()
    low, high = min(seen), min(max(seen), 2 * start)  # a diverging curve leaves the picture
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.set_xlabel("step")
    axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 4))


def _draw_rates(axes: Any, rows: pd.DataFrame) -> None:
    """Early rates, where there are enough for a slope, relative to the least noise; with the claimed powers."""
    for (optimizer, runner), some in each(rows, "optimizer", "runner"):
        multipliers, steps, losses = curves(some)
        found = rates(steps, losses.mean(axis=2))
        used = found > 0
        if used.sum() < LEAST_RATES:
            continue
        style, marker = RUNNER_LINES[runner]
        colour = OPTIMIZER_COLOURS[optimizer]
        relative = found[used] / found[used][0]
        axes.plot(multipliers[used], relative, linestyle=style, marker=marker, markersize=4, color=colour)
    levels = np.unique(rows["noise_multiplier"].to_numpy(float))
    ends = levels[[0, -1]]
    for power in (0, -1):
        axes.plot(ends, (ends / ends[0]) ** power, linestyle=(0, (1, 2)), color="black", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="noise multiplier z", title="early rate / that at the least z")
    plain_numbers(axes.yaxis)
    axes.set_xticks(levels, [f"{z:g}" for z in levels], fontsize=7, rotation=45)
    axes.set_xticks([], minor=True)


def _legend(figure: Figure, frame: pd.DataFrame) -> None:
    handles = [Line2D([], [], color=colour, linewidth=3, label=name) for name, colour in OPTIMIZER_COLOURS.items()]
    handles.append(Line2D([], [], color="black", marker=".", label="training (solid with dots; rates: dots)"))
    if "moments" in set(frame["runner"]):
        handles.append(Line2D([], [], color="black", linestyle="-.", label=RUNNER_LABELS["moments"]))
    handles.append(Line2D([], [], color="black", linestyle=(0, (1, 2)), label="claimed powers of z: 0 and -1 (dotted)"))
    seeds = [seed_counts(rows) for _, rows in each(only(frame, runner="training"), "problem")]
    title = (
        "Colour of the paths: noise multiplier z (dark: much noise).\n"
        "Rates where the loss goes a tenth of the way to the optimizer's best, at three z or more.\n"
        f"Bands: 95 % interval of the mean over {' / '.join(seeds)} seeds{_by_problem(seeds)}. Non-private."
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=3, title=title)


def _by_problem(seeds: Sequence[str]) -> str:
    """What the numbers of seeds are told apart by, where they are more than one."""
    of_two = " (of two numbers, the first is DP-SGD's)" if any(" and " in each for each in seeds) else ""
    return (", problem by problem" if len(seeds) > 1 else "") + of_two
