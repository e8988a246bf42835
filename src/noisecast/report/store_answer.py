"""Of the page of a store: the best settings of each budget, and how sure that is."""

from __future__ import annotations

from typing import Any

from noisecast.printed import number
from noisecast.privacy.accounting import noise_text
from noisecast.protocols import Score
from noisecast.report.answers import Answer, how_sure, smallest_means, verdict
from noisecast.report.markup import Html, joined, tag
from noisecast.report.parts import mean_with_interval, optimizer_name, section, shown_epsilon, table
from noisecast.report.store_price import price_in_short
from noisecast.report.tuning_cost import TuningCost
from noisecast.table import METRICS


def answer_section(found: dict[str, list[Answer]], score: Score, cost: TuningCost) -> Html:
    """A verdict and a table a problem, and what choosing costs; `found`: the answers of each problem."""
    parts: list[Html] = []
    for problem, rows in found.items():
        if len(found) > 1:
            parts.append(tag("h3", problem))
        parts.append(tag("p", verdict(rows), class_="verdict"))
        means = "" if verdict(rows) == smallest_means(rows) or len(rows) == 1 else f"{smallest_means(rows)} "
        parts.append(tag("p", means, how_sure(rows, score)))
        parts.append(_answer_table(rows, score))
    parts.append(price_in_short(cost))
    return section("The answer", *parts, id_="answer", non_private=True)


def _answer_table(rows: list[Answer], score: Score) -> Html:
    has_forecast = any(each.forecast is not None for each in rows)
    label = METRICS[score.metric].label
    columns = [("ε of one run", ""), ("best", "text"), (label, ""), ("learning rate", ""), ("clip norm", ""),
               ("batch size", ""), ("steps", ""), ("noise multiplier", "")]  # fmt: skip
    columns += [("the forecast says", "text")] if has_forecast else []
    body, below = [], []
    for each in rows:
        best = each.best
        line: list[Any] = [
            shown_epsilon(each.epsilon),
            optimizer_name(str(best["optimizer"])),
            mean_with_interval(best),
            number(best["learning_rate"]),
            number(best["l2_clip_norm"]),
            number(best["expected_batch_size"]),
            number(best["num_steps"]),
            noise_text(float(best["noise_multiplier"])),
        ]
        if has_forecast:
            line.append("–" if each.forecast is None else _forecast(each.forecast))
        body.append(line)
        doubts = "; ".join(each.doubts) or "nothing here speaks against it"
        below.append(joined([tag("b", "How sure: "), doubts, "."]))
    seeds = sorted({int(each.best["num_seeds"]) for each in rows})
    interval = (
        f"± is the 95 % interval of the mean of {seeds[-1]} seeds, se its standard error"
        if seeds[-1] > 1 and rows[0].best["runner"] == "training"
        else "One number each, no interval"
    )
    note = f"{interval}. The best of many settings flatters itself: chance chose it as well."
    return table(note, columns, body, below=below)


def _forecast(row: Any) -> Html:
    settings = tag("span", f"rate {number(row['learning_rate'])}, clip {number(row['l2_clip_norm'])}", class_="soft")
    return tag("span", f"{row['optimizer']}: {number(row['value'])}", settings)
