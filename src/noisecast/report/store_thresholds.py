"""Of the page of a store: the thresholds ε*, settings re-tuned and kept."""

from __future__ import annotations

import math
from typing import Any

from noisecast.printed import number
from noisecast.protocols import Score
from noisecast.report.answers import crossings
from noisecast.report.markup import Html, tag
from noisecast.report.parts import RUNNER_WORDS, section, shown_epsilon, table


def thresholds_section(rows: Any, score: Score) -> Html:
    """A table a problem; `rows`: of the whole store."""
    parts: list[Html] = [
        tag(
            "p",
            "ε* is the budget at which the better of two optimizers changes, interpolated between the levels that were "
            "run. It is established only where the two are told apart on both sides of it; a forecast has no interval.",
        )
    ]
    for problem, of in rows.groupby("problem", sort=True):
        if rows["problem"].nunique() > 1:
            parts.append(tag("h3", str(problem)))
        parts.append(_threshold_table(of, score))
    return section("Thresholds ε*", *parts, id_="thresholds", non_private=True)


def _threshold_table(of: Any, score: Score) -> Html:
    highest = float(of.loc[of["epsilon"] < math.inf, "epsilon"].max())
    ways = {"re-tuned at each ε": None} | (
        {f"tuned at ε = {shown_epsilon(highest)} and kept": highest} if math.isfinite(highest) else {}
    )
    entries = {way: crossings(of, score, kept_at) for way, kept_at in ways.items()}
    shapes = {(entry["batch"], entry["steps"]) for found in entries.values() for entry in found}
    lines: dict[tuple, dict[str, str]] = {}
    for way, found in entries.items():
        for e in found:
            batch = f", batch size {number(e['batch'])}" if len(shapes) > 1 else ""
            key = (
                e["batch"],
                e["steps"],
                f"{e['first']} or {e['second']}{batch}",
                e["runner"] != "training",
                e["runner"],
            )
            lines.setdefault(key, {})[way] = e["words"]
    if not lines:
        return tag("p", "There is one optimizer: nothing to compare.")
    body = [
        (key[2], RUNNER_WORDS.get(key[4], key[4]), *(words.get(way, "–") for way in ways))
        for key, words in sorted(lines.items(), key=lambda item: item[0])
    ]
    columns = [("which", "text full"), ("answered by", "text"), *((way, "text full") for way in ways)]
    return table(f"By {score.label}", columns, body)
