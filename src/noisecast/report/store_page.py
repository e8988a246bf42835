"""The page of a store: the question, the answer, charts to turn, thresholds, the price, settings to copy."""

from __future__ import annotations

from typing import Any

from noisecast.protocols import Score
from noisecast.report.answers import Answer, answers, metric_of
from noisecast.report.chart_data import chart_data
from noisecast.report.markup import joined, page, tag
from noisecast.report.parts import footer, shown_epsilon
from noisecast.report.store_answer import answer_section
from noisecast.report.store_charts import curves_section, explore_section
from noisecast.report.store_numbers import numbers_section
from noisecast.report.store_price import cost_of, price_section
from noisecast.report.store_privacy import privacy_section
from noisecast.report.store_question import header, question, question_section
from noisecast.report.store_settings import copy_section
from noisecast.report.store_thresholds import thresholds_section
from noisecast.report.trials_page import trials_page
from noisecast.sweeps import Store
from noisecast.sweeps.ledger import Ledger


def store_page(store: Store, metric: str | None) -> str:
    """One page.

    Args:
      store: of a sweep, finished or not.   metric: that decides; None: held-out loss, or what there is.
    Raises: ValueError: nothing is there, or the metric is not.
    """
    rows = store.read()
    if store.is_of_trials:
        return trials_page(store, rows, metric)
    decides = metric_of(rows, metric)
    score = Score(decides)
    ledger, why_no_ledger = _ledger(store)
    found = {str(name): answers(of, score) for name, of in rows.groupby("problem", sort=True)}
    cost = cost_of(rows, score, ledger, why_no_ledger, found)
    data = chart_data(rows, score)
    data["prices"] = [
        {"run": p.level.epsilon, "text": shown_epsilon(p.level.epsilon), "composed": p.composed,
         "random": p.best_of_random}
        for p in cost.levels
    ]  # fmt: skip
    data["shape"] = _first_shape(data, found)
    title = question(rows)
    parts = [
        header(store, title, rows, ledger, score),
        tag(
            "main",
            answer_section(found, score, cost),
            explore_section(data),
            curves_section(),
            thresholds_section(rows, score),
            price_section(cost, score),
            privacy_section(rows, ledger),
            copy_section(found, ledger),
            question_section(rows, ledger, score),
            numbers_section(rows, score),
        ),
        footer(),
    ]
    return page(f"{title} · Noisecast report", joined(parts), data, ("chart.js", "page.js"))


def _ledger(store: Store) -> tuple[Ledger | None, str]:
    try:
        return store.ledger(), ""
    except ValueError as error:
        return None, str(error)


def _first_shape(data: dict[str, Any], found: dict[str, list[Answer]]) -> int:
    """The batch size that wins most often on the first problem: shown first."""
    problem = data["problems"][0]
    wins = [(a.best["expected_batch_size"], a.best["num_steps"]) for a in found[problem["name"]]]
    counts = [wins.count((shape["batch"], shape["steps"])) for shape in problem["shapes"]]
    return counts.index(max(counts))
