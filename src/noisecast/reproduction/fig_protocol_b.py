"""Tuning at every privacy level: best loss and best learning rate (Figs. ProtocolB and protocolB_movielens).

The paper's grid for DP-SGD ends where small epsilons need it; "tuned again" adds the lower learning rates of its second
try. Learning rates are compared at one clip norm: where examples are clipped, DP-SGD's path depends on the product of
both, so with a free clip norm its best learning rate means little. There lower ones are added for the adaptive
optimizers too, lest an edge of their grid be taken for a best rate that does not move. A valley is flat at its bottom,
and the paper's grids are coarse: slopes are of a finer sweep, in half octaves, of many more seeds. All losses here are
non-private.
"""

from collections.abc import Callable, Iterator
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from noisecast.figures._style import OPTIMIZER_COLOURS, RC, RUNNER_LABELS, RUNNER_LINES, plain_numbers
from noisecast.protocols import NUM_LAST_EPOCHS, Score, tuned
from noisecast.reproduction.claims import UNDECIDED, Claim
from noisecast.reproduction.fits import Estimate, bootstrap
from noisecast.reproduction.price_of_tuning import price_of_tuning
from noisecast.reproduction.protocol_b_sweeps import COMPARED_CLIP, compared, questions, sweeps
from noisecast.reproduction.retuned import Cube, best_rates, cubes, slope, stacked, steps
from noisecast.reproduction.tasks import FORUM, IMDB, MOVIELENS_CENTRED, MOVIELENS_PAPER_LIKE
from noisecast.reproduction.which_task import in_the_papers_order, task_of, title_of
from noisecast.table import DIVERGED

__all__ = ["TITLE", "best_cells", "claims", "data", "draw", "questions"]

TITLE = "Tuned at every privacy level: best loss and best learning rate"
SOURCE = "Thm. sgd_opt, signsgd_opt, Fig. "
ADAPTIVE = ("DP-SignSGD", "DP-Adam")


def data(table: Any) -> pd.DataFrame:
    """The losses by which cells are judged: those of the last step, or of the ends of the last epochs."""
    table = in_the_papers_order(table)
    return table.loc[(table["metric"] == "loss") & (table["step"] > 0)].reset_index(drop=True)


# --- What is drawn ---------------------------------------------------------------------------------------------------


def score_of(rows: Any) -> Score:
    """The one whose steps were recorded."""
    return Score("loss", "last epochs" if rows["step"].nunique() >= NUM_LAST_EPOCHS else "final")


def is_in_first_grid(rows: Any) -> Any:
    """Whether a row's learning rate is in the paper's first grid, of one task: not below its lowest."""
    grids = task_of(str(rows["problem"].iloc[0])).protocol_b
    lowest = {kind.name: min(grid.learning_rates) for kind, grid in grids.items()}
    return rows["learning_rate"] >= rows["optimizer"].map(lowest)


def best_cells(frame: pd.DataFrame) -> Any:
    """`protocols.tuned` of every task, with a column `curve`: the optimizer, or "DP-SGD tuned again"."""
    found = []
    for _, part in frame.groupby("problem", sort=False):
        rows, _ = sweeps(part)
        is_sgd = rows["optimizer"] == "DP-SGD"
        first = rows[~is_sgd | is_in_first_grid(rows)]
        found.append(tuned(first, score_of(rows)).assign(curve=lambda best: best["optimizer"]))
        found.append(tuned(rows[is_sgd], score_of(rows)).assign(curve="DP-SGD tuned again"))
    return pd.concat(found, ignore_index=True)


# --- The claims ------------------------------------------------------------------------------------------------------


def claims(frame: pd.DataFrame) -> list[Claim]:
    """Of every task: the slopes of the best learning rate, the truncated grid and its rescue; the price once."""
    found = []
    for problem, rows in frame.groupby("problem", sort=False):
        about = f"{title_of(str(problem))}: "
        task = task_of(str(problem))
        source = SOURCE + ("protocolB_movielens" if "movielens" in str(problem) else "ProtocolB")
        found += [*_slopes(rows, source, about, COMPARED_CLIP[task.name]), *_losses(sweeps(rows)[0], source, about)]
    first, _ = sweeps(frame[frame["problem"] == frame["problem"].iloc[0]])
    return [*found, price_of_tuning(first)]


def _slopes(rows: Any, source: str, about: str, clip: float) -> Iterator[Claim]:
    of_slopes, (rows, _) = compared(rows), sweeps(rows)
    trained, forecast = cubes(of_slopes, "training", clip), cubes(of_slopes, "moments", clip)
    free = cubes(rows, "training")
    wanted = {
        "DP-SGD": (1.0, "is proportional to epsilon"),
        **dict.fromkeys(ADAPTIVE, (0.0, "hardly depends on epsilon")),
    }
    formulas = {"DP-SGD": "1 (sgd_learning_rate)"} | dict.fromkeys(ADAPTIVE, "0 (adaptive_learning_rate)")
    for name, (target, words) in wanted.items():
        measured, tuned_too = slope(trained[name]), slope(free[name])
        yield Claim(
            source=source,
            statement=f"{about}the best learning rate of {name} {words}.",
            measure=f"slope of log(best rate) on log(1/noise multiplier), clip {clip:g}, {_levels(trained[name])}",
            **measured._asdict(),
            wanted=f"{target:g} ± 0.25",
            holds=measured.within(target - 0.25, target + 0.25),
            theory=formulas[name]
            + ", of the mean gradient norm; of the final loss only the difference to DP-SGD is safe",
            forecast=_forecast(forecast, lambda of, name=name: slope(of[name])),
            corrected=f"{_open(measured, target, target)}Slope {_text(measured)}; with the clip norm free "
            f"{_text(tuned_too)}. {_stuck(rows, name)}",
        )
    for name in ADAPTIVE:
        measured, between = slope(trained["DP-SGD"], trained[name]), steps(trained["DP-SGD"], trained[name])
        yield Claim(
            source=source,
            statement=f"{about}DP-SGD's best learning rate falls by one power of epsilon more than that of {name}.",
            measure=f"difference of these slopes, clip {clip:g}, where neither's best is at an edge",
            **measured._asdict(),
            wanted="1 ± 0.25",
            holds=measured.within(0.75, 1.25),
            theory=f"1 where privacy noise dominates ({_share_of_noise(of_slopes)}), less where signs saturate",
            forecast=_forecast(forecast, lambda of, name=name: slope(of["DP-SGD"], of[name])),
            corrected=f"{_open(measured, 1, 1)}Difference {_text(measured)}: {between}.",
        )


def _open(measured: Estimate, low: float, high: float) -> str:
    """What begins `corrected` where a number from low to high may still be the true one."""
    return f"{UNDECIDED} " if measured.leaves_room(low, high) else ""


def _forecast(found: dict[str, Cube], number: Callable[[dict[str, Cube]], Estimate]) -> str:
    return _text(number(found)) if found else "not asked at this scale"


def _text(measured: Estimate) -> str:
    return f"{measured.value:.2f}" if np.isfinite(measured.value) else "unknown: too few levels inside the grid"


def _stuck(rows: Any, name: str) -> str:
    first = Cube(rows[is_in_first_grid(rows) & (rows["runner"] == "training") & (rows["optimizer"] == name)])
    return (
        f"On the paper's first grid the best is the lowest rate at {first.num_lowest()} of {len(first.noise)} levels: "
        "there it cannot fall."
    )


def _levels(cube: Cube) -> str:
    return f"{cube.is_inside().sum()} of {len(cube.noise)} levels inside the grid"


def _share_of_noise(rows: Any) -> str:
    """Of the squared noise of a step: z^2 C^2 d / B^2 of the mechanism, and at most C^2 / B of the batch."""
    z, b = rows["noise_multiplier"].min(), rows["expected_batch_size"].iloc[0]
    signal = z**2 * NUM_PARAMS[task_of(str(rows["problem"].iloc[0])).name] / b
    return f"here at least {signal / (1 + signal):.1%} of the squared noise"


# Of the smallest model run under that name: for the forum data the one with 20 classes.
NUM_PARAMS = {
    IMDB.name: 10_001, FORUM.name: 200_020, MOVIELENS_PAPER_LIKE.name: 262_500, MOVIELENS_CENTRED.name: 262_500,
}  # fmt: skip


def _losses(rows: Any, source: str, about: str) -> Iterator[Claim]:
    whole = cubes(rows, "training")
    first = Cube(rows[is_in_first_grid(rows) & (rows["runner"] == "training") & (rows["optimizer"] == "DP-SGD")])
    sgd, others = whole["DP-SGD"], [whole[name] for name in ADAPTIVE]
    values = stacked(sgd, first, *others)
    ends = np.cumsum([len(sgd.values), len(first.values), *(len(other.values) for other in others)])[:-1]

    def losses(means: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of DP-SGD on the whole grid and on the first one, and of the better adaptive one; (levels,) each."""
        mine, truncated, *rest = np.split(means, ends)
        best = np.min([cube.losses(part) for cube, part in zip(others, rest, strict=True)], axis=0)
        return sgd.losses(mine), first.losses(truncated), best

    def ratio(of: Callable[[np.ndarray, np.ndarray, np.ndarray], float]) -> Estimate:
        return bootstrap(lambda sample: of(*losses(sample.mean(axis=1))), values)

    at = f"at noise multiplier {sgd.noise[-1]:g}"
    comparable = ratio(lambda mine, _, best: float(np.exp(np.abs(np.log(mine / best)).max())))
    yield Claim(
        source=source,
        statement=f"{about}tuned at every epsilon, all optimizers do about as well.",
        measure="largest ratio of DP-SGD's best loss (whole grid) and the adaptive ones', over all levels",
        **comparable._asdict(),
        wanted="1 to 1.1",
        holds=comparable.high <= 1.1,
        theory="DP-SGD : DP-Adam : DP-SignSGD = 1 : 1 : 1.25 of the best bound (optimal_gradient_norm_bound)",
        forecast="",
        corrected=f"{_open(comparable, 1, 1.1)}They differ most by a factor of {comparable.value:.2f}.",
    )
    failing = ratio(lambda mine, truncated, _: float(truncated[-1] / mine[-1]))
    yield Claim(
        source=source,
        statement=f"{about}a grid without low learning rates makes DP-SGD fail at small epsilon.",
        measure=f"best loss on the first grid over that on the whole grid, {at}",
        **failing._asdict(),
        wanted="> 1.1",
        holds=failing.low > 1.1,
        theory=f"the best rate is the lowest of the first grid at {first.num_lowest()} of {len(first.noise)} levels",
        corrected=f"{_open(failing, 1.1, np.inf)}The first grid costs a factor {failing.value:.3g} {at}.",
    )
    rescued = ratio(lambda mine, _, best: float(mine[-1] / best[-1]))
    yield Claim(
        source=source,
        statement=f"{about}tuned again on a larger grid, DP-SGD is as good as the adaptive optimizers.",
        measure=f"DP-SGD's best loss over the better adaptive one's, {at}",
        **rescued._asdict(),
        wanted="< 1.1",
        holds=rescued.high < 1.1,
        theory="1 with DP-Adam, 1 / 1.25 with DP-SignSGD (optimal_gradient_norm_bound)",
        corrected=f"{_open(rescued, 0, 1.1)}A factor of {rescued.value:.3g} {at}.",
    )


# --- The picture -----------------------------------------------------------------------------------------------------

AGAIN = "#56B4E9"  # the paper's cyan
CURVE_COLOURS = OPTIMIZER_COLOURS | {"DP-SGD tuned again": AGAIN}
# Tuned, losses and rates often coincide: drawn a little aside, all of them are seen.
ASIDE = {"DP-SGD": 0.91, "DP-SGD tuned again": 0.97, "DP-SignSGD": 1.03, "DP-Adam": 1.1}


def draw(frame: pd.DataFrame) -> Figure:
    """One line a task: best loss against the accounted epsilon, and against the nominal one; best learning rate."""
    problems = list(frame["problem"].unique())
    best = best_cells(frame)
    with mpl.rc_context(RC):
        figure = Figure(figsize=(11.5, 1.3 + 2.9 * len(problems)), layout="constrained")
        for panels, problem in zip(figure.subplots(len(problems), 3, squeeze=False), problems):
            rows: Any = best.loc[(best["problem"] == problem) & (best["status"] != DIVERGED)]
            _draw_losses(panels[0], rows, "epsilon", "ε of one run, as accounted")
            _draw_losses(panels[1], rows, "nominal_epsilon", "nominal ε of the paper (no guarantee)")
            panels[0].set_ylabel(f"{title_of(str(problem))}\nbest training loss (non-private)")
            _draw_rates(panels[2], rows)
            _draw_finer(panels[2], sweeps(frame[frame["problem"] == problem])[1])
            panels[2].set(xlabel="nominal ε of the paper (no guarantee)", ylabel="best learning rate")
            panels[2].set(xscale="log", yscale="log")
            plain_numbers(panels[2].xaxis)
            plain_numbers(panels[2].yaxis)
        figure.legend(handles=_handles(frame), loc="outside lower center", ncols=3)
    return figure


def _draw_losses(panel: Any, rows: Any, axis: str, label: str) -> None:
    trained = rows[rows["runner"] == "training"]
    values = trained.loc[~(trained["curve"] == "DP-SGD")]["value"]
    top = values.max() * 1.6 if len(values) else np.inf
    panel.set(xscale="log", yscale="log", xlabel=label)
    for curve, part in trained.groupby("curve", sort=False):
        part = part.sort_values(axis)
        bars = (part["value"] - part["low"]).where(part["value"] <= top).to_numpy(float)
        panel.errorbar(
            part[axis] * ASIDE[str(curve)], part["value"], yerr=bars, marker="s" if "again" in str(curve) else "o",
            markersize=3.5, linewidth=0.8, color=CURVE_COLOURS[str(curve)], alpha=0.9,
        )  # fmt: skip
    if len(values):
        panel.set_ylim(values.min() / 1.15, top)
    for _, off in trained[(trained["curve"] == "DP-SGD") & (trained["value"] > top)].iterrows():
        panel.annotate(
            f"{off['value']:.3g} ↑", (off[axis], top), xytext=(0, -9), textcoords="offset points", fontsize=6.5,
            color=CURVE_COLOURS["DP-SGD"], ha="left",
        )  # fmt: skip
    plain_numbers(panel.xaxis)
    plain_numbers(panel.yaxis)


def _draw_rates(panel: Any, rows: Any) -> None:
    for (curve, runner), part in rows.groupby(["curve", "runner"], sort=False):
        if runner == "moments" and curve == "DP-SGD":
            continue  # as on the whole grid
        part = part.sort_values("nominal_epsilon")
        style, marker = RUNNER_LINES[str(runner)]
        colour = OPTIMIZER_COLOURS["DP-SGD"] if runner == "moments" and "again" in str(curve) else None
        panel.plot(
            part["nominal_epsilon"] * ASIDE[str(curve)], part["learning_rate"],
            linestyle=style if runner == "moments" else "-",
            marker={"o": "s" if "again" in str(curve) else "o"}.get(marker, ""), markersize=3.5, linewidth=0.9,
            color=colour or CURVE_COLOURS[str(curve)], alpha=0.9,
        )  # fmt: skip
        at_edge = part[(part["learning_rate_at_edge"] != "") & (part["runner"] == "training")]
        panel.plot(
            at_edge["nominal_epsilon"] * ASIDE[str(curve)], at_edge["learning_rate"], linestyle="none", marker="o",
            markersize=8, markerfacecolor="none", markeredgecolor=CURVE_COLOURS[str(curve)], markeredgewidth=0.8,
        )  # fmt: skip
    again = rows[(rows["curve"] == "DP-SGD tuned again") & (rows["runner"] == "training")].sort_values(
        "nominal_epsilon"
    )
    if len(again):  # the claimed slope, through the middle of what was found
        x = again["nominal_epsilon"].to_numpy(float)
        middle = np.exp(np.mean(np.log(again["learning_rate"].to_numpy(float)) - np.log(x)))
        panel.plot(x, middle * x, color="black", linewidth=0.8, linestyle=(0, (1, 2)))


def _draw_finer(panel: Any, rows: Any) -> None:
    """Best rates of the finer sweep, with their intervals, and those that are forecast."""
    nominal = rows.drop_duplicates("noise_multiplier").set_index("noise_multiplier")["nominal_epsilon"]
    for name, cube in cubes(rows, "moments").items():
        inside = cube.is_inside()
        panel.plot(
            nominal[cube.noise[inside]] * ASIDE[name], cube.rates_of(cube.values.mean(axis=1))[inside],
            linestyle=RUNNER_LINES["moments"][0], color=CURVE_COLOURS[name], linewidth=0.9,
        )  # fmt: skip
    for name, cube in cubes(rows, "training").items():
        found = best_rates(cube)
        values = np.array([[each.value, each.low, each.high] for each in found.values()]).reshape(-1, 3)
        panel.errorbar(
            nominal[list(found)] * ASIDE[name], values[:, 0], yerr=abs(values[:, 1:] - values[:, :1]).T,
            linestyle="none", marker="D", markersize=4, markerfacecolor="white", color=CURVE_COLOURS[name],
            linewidth=1, zorder=4,
        )  # fmt: skip


def _handles(frame: pd.DataFrame) -> list[Line2D]:
    handles = [
        Line2D([], [], color=colour, marker="s" if "again" in name else "o", markersize=4, label=name)
        for name, colour in CURVE_COLOURS.items()
    ]
    counts = [len(set(sweeps(rows)[0]["seed"].dropna())) for _, rows in frame.groupby("problem")]
    fewest, most = min(counts), max(counts)
    seeds = str(most) if fewest == most else f"{fewest} to {most}"
    bars = f"bars: 95 % interval of the mean of {seeds} seeds" if most > 1 else "one seed: no bars"
    handles += [
        Line2D([], [], color="black", linestyle="none", marker="o", markersize=4, label=f"trained; {bars}"),
        Line2D([], [], color="black", linestyle=RUNNER_LINES["moments"][0], label=RUNNER_LABELS["moments"]),
        Line2D([], [], color="black", linestyle="none", marker="o", markersize=8, markerfacecolor="none",
               label="at an edge of the grid"),
        Line2D([], [], color="black", linestyle="none", marker="D", markersize=4, markerfacecolor="white",
               label="best rate of the finer sweep, with its 95 % interval"),
        Line2D([], [], color="black", linestyle=(0, (1, 2)), label="claimed slope 1"),
        Line2D([], [], linestyle="none", label="points of one ε lie side by side; ↑ above the picture"),
    ]  # fmt: skip
    return handles
