"""Of the page of a store: what choosing from it costs."""

from __future__ import annotations

import math
from typing import Any

from noisecast.printed import number
from noisecast.protocols import Score
from noisecast.report.answers import Answer, deciding_runner
from noisecast.report.markup import Html, joined, tag
from noisecast.report.parts import banner, chart, scripted, section, shown_epsilon, table
from noisecast.report.tuning_cost import Level, TuningCost, tuning_cost
from noisecast.sweeps.ledger import Ledger
from noisecast.sweeps.price import Choice
from noisecast.table import METRICS


def cost_of(rows: Any, score: Score, ledger: Ledger | None, why: str, found: dict[str, list[Answer]]) -> TuningCost:
    """The price of choosing by `score`, of the store and of each level that has an answer.

    Args:
      rows: of the whole store.   ledger: its own; None where it is lost, and `why` in a sentence.
      found: the answers of each problem.
    """
    runner = deciding_runner(rows)
    worst: Any = rows.loc[rows["epsilon"].idxmax()]
    choice = Choice(score.metric, runner, float(worst["epsilon"]), float(worst["target_delta"]))
    levels = [
        Level(problem, float(a.best["expected_batch_size"]), float(a.best["noise_multiplier"]), a.epsilon)
        for problem, of in found.items()
        for a in of
    ]
    return tuning_cost(rows, ledger, choice, sorted(levels, key=lambda level: level.epsilon), why)


def price_in_short(cost: TuningCost) -> Html:
    """What must stand beside every answer."""
    if cost.everything is None or math.isinf(cost.everything):
        private = cost.meaning
    else:
        private = (
            f"With every one of its {cost.num_runs:,} runs counted, choosing from this store on private data has "
            f"ε = {shown_epsilon(cost.everything)}."
        )
    return banner(
        "Choosing has a price, and the ε above do not hold it.",
        "If the data of this sweep are public, choosing cost nothing, and the ε above are those of training once on "
        "private data of the same size.",
        joined([f"If they are private: {private} ", tag("a", "The price of tuning", href="#price"), "."]),
    )


def price_section(cost: TuningCost, score: Score) -> Html:
    """The three ways to pay for a choice, and what each level alone would have cost."""
    return section("The price of tuning", _ways(cost), *_level_by_level(cost, score), id_="price", class_="long")


def _ways(cost: TuningCost) -> Html:
    everything = "not known" if cost.everything is None else shown_epsilon(cost.everything)
    return table(
        "What stands behind a choice from this store",
        [("how choosing is paid for", "text"), ("ε of the procedure", ""), ("what that says", "text wide")],
        [
            (tag("span", "Public: the sweep's data are public"), "ε of one run",
             "Choosing cost nothing. The model is then trained once on private data, and its ε is that of that run."),
            (tag("span", "Compose: every run is counted"), everything, cost.meaning),
            (tag("span", "RepeatSelect: the best of a random number of trials"), "not this store",
             "This store holds a fixed grid, whose number of runs is no secret. A sweep of random trials (a [tuning] "
             "table in its file) of which only the best is ever released has the ε drawn below."),
        ],
    )  # fmt: skip


def _level_by_level(cost: TuningCost, score: Score) -> list[Html]:
    if not cost.levels:
        return []
    columns = [("ε of one run", ""), ("batch size", ""), ("runs of the level", ""), ("tuned on public data", ""),
               ("best of as many random trials in the mean", ""), ("every run counted", "")]  # fmt: skip
    body = [
        (shown_epsilon(p.level.epsilon), number(p.level.batch_size), f"{p.num_runs:,}",
         shown_epsilon(p.level.epsilon), shown_epsilon(p.best_of_random), shown_epsilon(p.composed))
        for p in cost.levels
    ]  # fmt: skip
    caption = (
        f"Hypothetical, level by level, for a choice by {METRICS[score.metric].label}: held-out examples judge and are "
        f"not protected. {cost.left_out or ''}".strip()
    )
    legend = tag("ul", id="prices-legend", class_="legend")
    return [
        tag("h3", "Had one level alone been swept"),
        scripted(chart("prices", "Both axes are ε, both logarithmic.", legend)),
        table(caption, columns, body),
    ]
