"""The answer of a store: which optimizer and settings are best at each epsilon, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from noisecast.optimizers import OPTIMIZERS
from noisecast.protocols import Score, ranked, tuned
from noisecast.report.parts import shown_epsilon
from noisecast.report.score_thresholds import Point, in_words, score_thresholds
from noisecast.table import DIVERGED, METRICS

SAME_BUDGET = 1.02  # epsilons of two batch sizes that were calibrated to one target differ by less
PREFERRED = ("test_loss", "test_rmse", "test_accuracy", "test_recall_at_5", "test_micro_f1", "loss", "rmse")
SHAPE = ["problem", "expected_batch_size", "num_steps"]
FEW_SEEDS = 3


@dataclass(frozen=True)
class Answer:
    """The best cell at one budget.

    Args:
      best: its row of `tuned`.   others: the best cells of the other optimizers at this budget, from better to worse.
      not_told_apart: names of those whose gap to the best is within both 95 % intervals; with one seed all of them.
      forecast: the best cell by forecast, where training decides and there are forecasts.
      doubts: how sure this is not, one sentence each.
    """

    best: Any
    others: pd.DataFrame
    not_told_apart: tuple[str, ...]
    forecast: Any | None
    doubts: tuple[str, ...]

    @property
    def epsilon(self) -> float:
        return float(self.best["epsilon"])


def metric_of(table: pd.DataFrame, asked: str | None) -> str:
    """The metric that decides: the one asked for, or held-out loss before anything else.

    Raises: ValueError: it was not recorded, or says nothing of which model is better.
    """
    there = [name for name in METRICS if name in set(table["metric"])]
    if asked is not None and asked not in there:
        raise ValueError(f"Expected a metric among {', '.join(there) or 'none: nothing is there'}, got '{asked}'.")
    if asked is not None and asked.removeprefix("test_") not in {name.removeprefix("test_") for name in PREFERRED} | {
        "accuracy", "recall_at_5", "micro_f1", "gradient_norm"
    }:  # fmt: skip
        raise ValueError(f"Expected a metric that tells the better model, such as test_loss, got {asked}.")
    found = asked or next((name for name in PREFERRED if name in there), None)
    if found is None:
        raise ValueError(
            "Expected a store with finished runs, got one without; wait for the first groups of its sweep."
        )
    return found


def deciding_runner(table: pd.DataFrame) -> str:
    """Training where there is any; else the first of what there is."""
    there = set(table["runner"])
    return (
        "training" if "training" in there else next(r for r in ("moments", "sde", "closed_form", *there) if r in there)
    )


def answers(table: pd.DataFrame, score: Score) -> list[Answer]:
    """The best of each budget of one problem, by increasing epsilon.

    Args:
      table: rows of one problem.
    """
    best: Any = tuned(table, score)
    q = table.drop_duplicates("expected_batch_size").set_index("expected_batch_size")["sampling_probability"]
    best["sampling_probability"] = best["expected_batch_size"].map(q)
    runner = deciding_runner(table)
    decided, forecasts = best[best["runner"] == runner], best[best["runner"] == "moments"]
    found = []
    for low, high in _budgets(decided["epsilon"]):
        at: Any = decided[_within(decided["epsilon"], low, high)]
        guesses: Any = (
            forecasts[_within(forecasts["epsilon"], low, high)] if runner != "moments" else forecasts.iloc[:0]
        )
        found.append(_answer(at, guesses, score))
    return found


def verdict(found: list[Answer]) -> str:
    """What to take, in one sentence; `found` by increasing epsilon."""
    runs = [each for each in found if each.best["status"] != DIVERGED]
    if not runs:
        return "Nothing is best: every run diverged."
    winners = [str(each.best["optimizer"]) for each in runs]
    unsure = sum(bool(each.not_told_apart) for each in runs)
    if len(runs) == 1:
        at = f"at ε = {shown_epsilon(runs[0].epsilon)}"
        return (
            f"{winners[0]} has the best mean {at}; another may be as good." if unsure else f"{winners[0]} is best {at}."
        )
    if len(set(winners)) == 1 and unsure:
        return f"{winners[0]} has the best mean at every ε; at {unsure} of {len(runs)} another may be as good."
    if len(set(winners)) == 1:
        return f"{winners[0]} is best at every ε."
    # An optimizer that nothing beats for sure is the simplest advice.
    unbeaten = [n for n in ordered(set(winners)) if all(w == n or n in a.not_told_apart for w, a in zip(winners, runs))]
    if unbeaten:
        name = max(unbeaten, key=winners.count)
        return f"{name} is best, or not told apart from the best, at every ε."
    return f"{smallest_means(found)}"


def smallest_means(found: list[Answer]) -> str:
    """Who has the best mean where, in one sentence."""
    spans: list[tuple[str, float, float]] = []
    for each in found:
        name = "nothing (all runs diverged)" if each.best["status"] == DIVERGED else str(each.best["optimizer"])
        if spans and spans[-1][0] == name:
            spans[-1] = (name, spans[-1][1], each.epsilon)
        else:
            spans.append((name, each.epsilon, each.epsilon))
    parts = [
        f"{n} at ε = {shown_epsilon(a)}" if a == b else f"{n} from ε = {shown_epsilon(a)} to {shown_epsilon(b)}"
        for n, a, b in spans
    ]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"The best mean has {listed}."


def how_sure(found: list[Answer], score: Score) -> str:
    """How much the verdict is worth, in a sentence or two."""
    unsure = [each for each in found if each.not_told_apart]
    seeds = sorted({int(each.best["num_seeds"]) for each in found})
    runner = str(found[0].best["runner"])
    if runner == "moments":
        return "This is a forecast: nothing was trained, and the forecast's own error is not in these numbers."
    counted = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    if seeds == [1]:
        return "Each number is one run: without a second seed, chance and merit cannot be told apart."
    if not unsure:
        return f"With {counted} seeds the winner is told apart from the other optimizers at every ε."
    return (
        f"With {counted} seeds the winner is not told apart from another optimizer at {len(unsure)} of {len(found)} "
        f"budgets: there the choice between them is free."
    )


def crossings(table: pd.DataFrame, score: Score, kept_at: float | None = None) -> list[dict[str, Any]]:
    """Every threshold between two optimizers, of the best cells or of those kept from the level nearest to `kept_at`.

    Returns: one entry a batch size, runner and pair: batch, steps, runner, first, second, words, thresholds.
    """
    everything: Any = ranked(table, score)
    best: Any = everything[everything["place"] == 1]
    entries = []
    for (_, batch, steps, runner), part in best.groupby([*SHAPE, "runner"], sort=False):
        curves = {
            name: _points(_kept(everything, of, kept_at) if kept_at is not None else of)
            for name, of in part.groupby("optimizer", sort=False)
        }
        names = [name for name in ordered(curves)]
        for i, first in enumerate(names):
            for second in names[i + 1 :]:
                found = score_thresholds(first, curves[first], second, curves[second], more=score.larger_is_better)
                words = in_words(found, _leader(curves, first, second, score.larger_is_better))
                entries.append(
                    {"batch": batch, "steps": steps, "runner": runner, "first": first, "second": second,
                     "thresholds": found or [], "words": words}
                )  # fmt: skip
    return entries


def ordered(names: Any) -> list[str]:
    """Optimizers as the library lists them, then others by name."""
    known = [optimizer.name for optimizer in OPTIMIZERS]
    return [name for name in known if name in names] + sorted(name for name in names if name not in known)


# --- Parts ----------------------------------------------------------------------------------------------


def _budgets(epsilons: Any) -> list[tuple[float, float]]:
    """Ranges of epsilon that belong together: several batch sizes calibrated to one target."""
    found: list[tuple[float, float]] = []
    for epsilon in sorted({float(e) for e in epsilons}):
        if found and (epsilon == found[-1][0] or epsilon <= SAME_BUDGET * found[-1][0]):
            found[-1] = (found[-1][0], epsilon)
        else:
            found.append((epsilon, epsilon))
    return found


def _within(epsilons: Any, low: float, high: float) -> Any:
    slack = 1.0 + 0.5 * (SAME_BUDGET - 1)  # forecasts carry the same epsilon, but a reader of files may round it
    return (epsilons >= low / slack) & (epsilons <= high * slack) if math.isfinite(high) else np.isinf(epsilons)


def _answer(at: Any, forecasts: Any, score: Score) -> Answer:
    ranking = _by_merit(at, score)
    best = ranking.iloc[0]
    others = ranking[ranking["optimizer"] != best["optimizer"]].drop_duplicates("optimizer")
    close = tuple(row["optimizer"] for _, row in others.iterrows() if not _told_apart(best, row))
    guess = _by_merit(forecasts, score).iloc[0] if len(forecasts) else None
    return Answer(best, others, close, guess, tuple(_doubts(best, close, score)))


def _by_merit(rows: Any, score: Score) -> Any:
    sign = -1 if score.larger_is_better else 1
    order = {"ok": 0, "simulated": 0, "extrapolated": 1, DIVERGED: 2}
    by = rows.assign(_rank=rows["status"].map(order), _cost=sign * rows["value"])
    return by.sort_values(["_rank", "_cost"], kind="stable").drop(columns=["_rank", "_cost"])


def _told_apart(best: Any, other: Any) -> bool:
    if other["status"] == DIVERGED:
        return best["status"] != DIVERGED
    if best["runner"] == "moments":
        return True
    halves = [row["high"] - row["value"] for row in (best, other)]
    return bool(np.isfinite(halves).all()) and abs(best["value"] - other["value"]) > math.hypot(*halves)


def _doubts(best: Any, close: tuple[str, ...], score: Score) -> list[str]:
    if best["status"] == DIVERGED:
        return ["Every run diverged: try smaller learning rates."]
    found = []
    if close:
        found.append(f"not told apart from {' and '.join(close)}")
    if best["num_contenders"] > 1:
        found.append(f"{int(best['num_contenders'])} of its {int(best['num_cells'])} settings are not told apart")
    if edge := best["learning_rate_at_edge"]:
        found.append(f"learning rate at the {edge} that was tried: the best may lie beyond")
    if edge := best["l2_clip_norm_at_edge"]:
        found.append(f"clip norm at the {edge} that was tried")
    if best["runner"] == "training" and best["num_seeds"] < FEW_SEEDS:
        found.append(f"{int(best['num_seeds'])} seed{'' if best['num_seeds'] == 1 else 's'} only")
    if best["status"] == "extrapolated":
        found.append("outside the range in which its formula holds")
    return found


def _points(rows: Any) -> list[Point]:
    half = (rows["high"] - rows["value"]).fillna(0.0)
    if (rows["runner"] == "training").any():
        # One seed has no interval: nothing is told apart by it.
        half = (rows["high"] - rows["value"]).fillna(math.inf)
    return [
        Point(float(z), float(e), None if status == DIVERGED else float(value), float(h))
        for z, e, value, h, status in zip(
            rows["noise_multiplier"], rows["epsilon"], rows["value"], half, rows["status"], strict=True
        )
    ]


def _kept(everything: Any, best: Any, kept_at: float) -> Any:
    """The cell of one optimizer that is best at the level nearest to epsilon `kept_at`, at every level."""
    epsilons = best["epsilon"].to_numpy(float)
    chosen = best.iloc[int(np.abs(np.log(epsilons / kept_at)).argmin())]
    names = [*SHAPE, "runner", "optimizer", "learning_rate", "l2_clip_norm"]
    return everything[np.logical_and.reduce([everything[name] == chosen[name] for name in names])]


def _leader(curves: dict[str, list[Point]], first: str, second: str, more: bool) -> str | None:
    worst = -math.inf if more else math.inf
    for one in curves[first]:
        for other in curves[second]:
            if one.noise_multiplier == other.noise_multiplier and one.value != other.value:
                a, b = (worst if v is None else v for v in (one.value, other.value))
                return first if (a > b) == more else second
    return None
