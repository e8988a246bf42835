"""Of the page of a store: every best cell, by every runner, in one long table."""

from __future__ import annotations

from typing import Any

from noisecast.printed import number
from noisecast.protocols import Score, tuned
from noisecast.report.markup import Html, tag
from noisecast.report.parts import RUNNER_WORDS, mean_with_interval, optimizer_name, section, shown_epsilon, table
from noisecast.table import METRICS


def numbers_section(rows: Any, score: Score) -> Html:
    """`rows`: of the whole store."""
    best: Any = tuned(rows, score).sort_values(
        ["problem", "expected_batch_size", "epsilon", "runner", "value"], kind="stable"
    )
    several = best["problem"].nunique() > 1
    columns = [("ε of one run", ""), ("nominal, not a guarantee", ""), ("batch size", ""), ("optimizer", "text"),
               ("answered by", "text"), (METRICS[score.metric].label, ""), ("learning rate", ""), ("clip norm", ""),
               ("seeds", "")]  # fmt: skip
    columns = [("problem", "text"), *columns] if several else columns
    body = []
    for _, row in best.iterrows():
        line: list[Any] = [
            shown_epsilon(row["epsilon"]),
            number(row["nominal_epsilon"], 3),
            number(row["expected_batch_size"]),
            optimizer_name(str(row["optimizer"])),
            RUNNER_WORDS.get(row["runner"], row["runner"]),
            mean_with_interval(row),
            number(row["learning_rate"]),
            number(row["l2_clip_norm"]),
            number(row["num_seeds"]) if row["runner"] == "training" else "–",
        ]
        body.append([str(row["problem"]), *line] if several else line)
    note = "The best settings of each optimizer at every noise level, by every runner."
    inner = tag("details", tag("summary", f"{len(body)} rows"), table(note, columns, body))
    return section("All numbers", inner, id_="numbers", non_private=True, class_="long")
