"""The tuned settings (Table hyperparam): Protocol A's grid at one noise multiplier, and where the paper's cells stand.

The paper does not say by which score it tuned; here it is the final training loss; accuracy's winner is said beside it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import scipy.stats
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from noisecast.figures._style import RC, plain_numbers
from noisecast.optimizers import DPSGD, OPTIMIZERS
from noisecast.protocols import Grid, Score, protocol_b_question, ranked
from noisecast.question import Question
from noisecast.reproduction.claims import Claim
from noisecast.reproduction.tasks import (
    FORUM,
    FORUM_QUICK,
    IMDB,
    IMDB_QUICK,
    MOVIELENS_CENTRED,
    MOVIELENS_PAPER_LIKE,
    MOVIELENS_PAPER_LIKE_QUICK,
    PROTOCOL_A,
    Numbers,
    Scale,
    Task,
    repeatable,
)
from noisecast.reproduction.which_task import in_the_papers_order, task_of, title_of
from noisecast.runners import Moments, Training
from noisecast.table import EXTRAPOLATED, SOUND

TITLE = "Tuned at one noise multiplier (Protocol A): which settings win"
LOSS, ACCURACY = Score("loss"), Score("accuracy")
# Forecasts here only choose among cells: what few examples add is the same for all of them.
MOMENTS = Moments(full_covariance_features=50, time_steps=12, subsample=2000)


@dataclass(frozen=True)
class Plan:
    """A task's sweep: its grids by optimizer class, of how many seeds, and whether it is forecast as well."""

    task: Task
    grids: Mapping[type, Grid]
    num_seeds: int = 3
    is_forecast: bool = True


def _quick(learning_rates: Numbers, l2_clip_norms: Numbers) -> dict[type, Grid]:
    """Those above 1 for DP-SGD alone: an adaptive optimizer moves every weight by about as much at every step."""
    adaptive = tuple(rate for rate in learning_rates if rate <= 1)
    return {kind: Grid(learning_rates if kind is DPSGD else adaptive, l2_clip_norms) for kind in OPTIMIZERS}


PLANS: dict[Scale, tuple[Plan, ...]] = {
    "quick": (
        Plan(IMDB_QUICK, _quick((0.01, 0.1, 1, 5), (0.1, 0.25, 0.5, 1, 3))),
        Plan(
            replace(FORUM_QUICK, epochs=20),
            _quick(PROTOCOL_A.learning_rates, (0.1, 0.25, 0.5, 1, 3)),
            is_forecast=False,
        ),
        Plan(
            replace(MOVIELENS_PAPER_LIKE_QUICK, epochs=5),
            _quick((0.001, 0.01, 0.1, 1), (0.25, 1, 2, 3, 5)),
            is_forecast=False,
        ),
    ),
    "paper": tuple(
        Plan(task, dict.fromkeys(OPTIMIZERS, PROTOCOL_A))
        for task in (IMDB, FORUM, MOVIELENS_PAPER_LIKE, MOVIELENS_CENTRED)
    ),
}


def questions(scale: Scale, data_dir: Path | None = None, asked: str | None = None) -> tuple[Question, ...]:
    """Every cell of the grid at the noise multiplier of the paper's tuning: trained, and forecast."""
    plans = (plan for plan in PLANS[scale] if plan.task.is_among(asked))
    return tuple(question for plan in plans for question in _questions(plan, data_dir))


def _questions(plan: Plan, data_dir: Path | None) -> Iterator[Question]:
    task, problem = plan.task, plan.task.load(data_dir)
    level = task.protocol_a_noise_multiplier
    base = task.scenario(problem, OPTIMIZERS[0], level)
    grids = [(kind(learning_rate=1.0), grid) for kind, grid in plan.grids.items()]
    asked: dict[str, Any] = {
        "noise_multipliers": [level],
        "num_steps": base.num_steps,
        "target_delta": base.target_delta,
        "score": LOSS,
    }
    trained = protocol_b_question(problem, base.mechanism, grids, **asked, runners=[Training()])
    yield repeatable(trained, plan.num_seeds)
    if plan.is_forecast:
        yield repeatable(protocol_b_question(problem, base.mechanism, grids, **asked, runners=[MOMENTS]), 1)


def data(table: Any) -> pd.DataFrame:
    """Training loss and accuracy of every run after its last step."""
    table = in_the_papers_order(table)
    is_end = table["step"] == table["num_steps"]
    return table.loc[is_end & table["metric"].isin([LOSS.metric, ACCURACY.metric])].reset_index(drop=True)


def standings(frame: pd.DataFrame, score: Score = LOSS) -> pd.DataFrame:
    """`protocols.ranked` with is_papers: whether a cell is the one of the paper's table."""
    found: Any = ranked(frame, score)
    papers = [
        (rate, clip) == _papers_setting(problem, optimizer)
        for problem, optimizer, rate, clip in zip(
            found["problem"], found["optimizer"], found["learning_rate"], found["l2_clip_norm"], strict=True
        )
    ]
    return found.assign(is_papers=papers)


def _papers_setting(problem: str, optimizer: str) -> tuple[float, float] | None:
    # Those of the centred factorisation are not the paper's: there the paper's own setting is looked up.
    task = MOVIELENS_PAPER_LIKE if "movielens" in problem else task_of(problem)
    return next((tuple(setting) for kind, setting in task.tuned.items() if kind.name == optimizer), None)  # type: ignore


# --- The claims ------------------------------------------------------------------------------------------------------


def claims(frame: pd.DataFrame) -> list[Claim]:
    """Of every task and optimizer: is the paper's cell the best of its grid."""
    everything: Any = standings(frame)
    by_accuracy: Any = standings(frame, ACCURACY) if ACCURACY.metric in set(frame["metric"]) else None
    found = []
    for (problem, optimizer), rows in everything.groupby(["problem", "optimizer"], sort=False):
        runners = {runner: part.sort_values("place") for runner, part in rows.groupby("runner")}
        by_loss = runners["training"]
        papers = by_loss[by_loss["is_papers"]]
        if papers.empty:
            raise ValueError(f"Expected the paper's cell of {optimizer} in the grid of {problem}; add it.")
        found.append(_claim(by_loss, papers.iloc[0], runners.get("moments"), _winner(by_accuracy, problem, optimizer)))
    return found


def _claim(by_loss: Any, papers: Any, forecast: Any, by_accuracy: str) -> Claim:
    best = by_loss.iloc[0]
    error, seeds = papers["behind_standard_error"], papers["num_seeds"]
    reach = scipy.stats.t.ppf(0.975, max(1, seeds - 1)) * error if papers["place"] > 1 else 0.0
    contenders = by_loss[by_loss["is_contender"]]
    alike = "; ".join(_setting(cell) for _, cell in contenders.head(6).iterrows())
    more = f" and {len(contenders) - 6} more" if len(contenders) > 6 else ""
    return Claim(
        source="Table hyperparam",
        statement=(
            f"{title_of(best['problem'])}: no (learning rate, clip norm) of the grid is seen to do better than "
            f"{_setting(papers)} for {best['optimizer']} at noise multiplier {best['noise_multiplier']:g}."
        ),
        measure=f"its final training loss above the best cell's ({best['value']:.4g}), mean of {seeds} paired seeds",
        value=papers["behind"],
        low=papers["behind"] - reach,
        high=papers["behind"] + reach,
        wanted="0 within its interval",
        holds=bool(papers["is_contender"]),
        theory=_WHERE_CLIPPED,
        forecast=_forecast(forecast),
        corrected=(
            f"{_setting(best)} wins; the paper's cell is number {papers['place']} of {len(by_loss)}"
            f"{_above(papers['value'], best['value'])}. Not told apart from the best: {alike}{more}.{by_accuracy}"
        ),
    )


_WHERE_CLIPPED = (
    "where every example is clipped, DP-SGD depends on learning rate times clip norm alone, an adaptive optimizer not "
    "on the clip norm at all: cells tie"
)


def _above(value: float, best: float) -> str:
    return f", {value / best - 1:.2%} above it" if np.isfinite(value) and best > 0 else ", diverged"


def _forecast(rows: Any) -> str:
    """By the numbers alone; and, where some are extrapolated, which never beat those that are not, among the others."""
    if rows is None:
        return "not asked at this scale"
    by_number, are_beyond = rows.sort_values("value", kind="stable"), rows["status"] == EXTRAPOLATED
    place = 1 + int(np.argmax(by_number["is_papers"]))
    found = f"{_setting(by_number.iloc[0])} wins; the paper's cell is number {place} of {len(rows)}"
    if not are_beyond.any():
        return found
    papers = "the paper's among them" if are_beyond[rows["is_papers"]].any() else "not the paper's"
    ok = rows[rows["status"].isin(SOUND)]
    others = f"; of those that are not, {_setting(ok.iloc[0])} wins" if len(ok) else ""
    return f"{found}. {are_beyond.sum()} are extrapolated, {papers}{others}"


def _winner(by_accuracy: Any, problem: str, optimizer: str) -> str:
    if by_accuracy is None:
        return ""
    is_it = (by_accuracy["problem"] == problem) & (by_accuracy["optimizer"] == optimizer)
    rows = by_accuracy[is_it & (by_accuracy["runner"] == "training")].sort_values("place")
    if rows.empty:
        return ""
    papers = rows[rows["is_papers"]].iloc[0]
    return f" By training accuracy {_setting(rows.iloc[0])} wins, and the paper's is number {papers['place']}."


def _setting(cell: Any) -> str:
    return f"({cell['learning_rate']:g}, {cell['l2_clip_norm']:g})"


# --- The picture -----------------------------------------------------------------------------------------------------


def draw(frame: pd.DataFrame) -> Figure:
    """A heat map for every task and optimizer: black frame the winner, grey those not told apart, cross the paper's."""
    everything: Any = standings(frame)
    trained = everything[everything["runner"] == "training"]
    problems = list(trained["problem"].unique())
    without_grid: Any = RC | {"axes.grid": False}
    with mpl.rc_context(without_grid):
        figure = Figure(figsize=(11.5, 0.9 + 3.1 * len(problems)), layout="constrained")
        lines = figure.subplots(len(problems), len(OPTIMIZERS), squeeze=False)
        for panels, problem in zip(lines, problems):
            rows = trained[trained["problem"] == problem]
            best = rows["value"].min()
            for panel, kind in zip(panels, OPTIMIZERS):
                _draw_cells(panel, rows[rows["optimizer"] == kind.name], best)
            level = rows["noise_multiplier"].iloc[0]
            panels[0].set_ylabel(f"{title_of(problem)}, z = {level:g}\nclip norm")
            image = mpl.cm.ScalarMappable(_norm(best), _COLOURS)  # type: ignore[attr-defined]
            bar = figure.colorbar(image, ax=list(panels), label="final training loss (non-private)", extend="max")
            plain_numbers(bar.ax.yaxis)
        figure.suptitle(
            "Black frame: the best. Grey: not told apart from it (95 %, paired seeds). ×: the paper's. "
            f"Means of {trained['num_seeds'].max()} seeds; –: diverged",
            fontsize=9,
        )
    return figure


_COLOURS = mpl.colormaps["viridis_r"].with_extremes(bad="white")


def _norm(best: float) -> LogNorm:
    return LogNorm(best, 10 * best)


def _draw_cells(panel: Any, rows: Any, best: float) -> None:
    grid = rows.pivot(index="l2_clip_norm", columns="learning_rate", values="value").sort_index()
    panel.imshow(grid.to_numpy(float), origin="lower", aspect="auto", cmap=_COLOURS, norm=_norm(best))
    panel.set_xticks(range(len(grid.columns)), [f"{rate:g}" for rate in grid.columns])
    panel.set_yticks(range(len(grid.index)), [f"{clip:g}" for clip in grid.index])
    panel.set(xlabel="learning rate", title=rows["optimizer"].iloc[0])
    for _, cell in rows.iterrows():
        at = grid.columns.get_loc(cell["learning_rate"]), grid.index.get_loc(cell["l2_clip_norm"])
        colour = "white" if cell["value"] > 3 * best else "black"  # where the map is dark
        panel.text(*at, _text(cell["value"]), ha="center", va="center", fontsize=6, color=colour)
        if cell["is_contender"]:
            is_best = cell["place"] == 1
            corner = (at[0] - 0.47, at[1] - 0.47)
            colour, width = ("black", 2.0) if is_best else ("#777777", 1.2)
            panel.add_patch(Rectangle(corner, 0.94, 0.94, fill=False, edgecolor=colour, linewidth=width))
        if cell["is_papers"]:
            panel.plot(at[0], at[1] + 0.3, marker="x", color="#D00000", markersize=6, markeredgewidth=1.8)


def _text(value: float) -> str:
    if not np.isfinite(value):
        return "–"
    if value >= 1000:
        return f"{value:.3g}".replace("e+0", "e")
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"
