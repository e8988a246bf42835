"""Of the page of a store: settings to copy, with the sampler that its ledger tells."""

from __future__ import annotations

from typing import Any

from noisecast.printed import number
from noisecast.report.answers import Answer
from noisecast.report.markup import Html, tag
from noisecast.report.parts import section, settings_section, shown_epsilon
from noisecast.report.snippets import Settings
from noisecast.sweeps.ledger import Ledger
from noisecast.table import DIVERGED

MOST_COPIED = 12


def copy_section(found: dict[str, list[Answer]], ledger: Ledger | None) -> Html:
    """The best of each budget; `found`: the answers of each problem."""
    choices = []
    for problem, rows in found.items():
        for each in rows:
            if each.best["status"] != DIVERGED:
                of = f"{problem}, " if len(found) > 1 else ""
                rate = number(each.best["learning_rate"])
                title = f"{of}ε = {shown_epsilon(each.epsilon)}: {each.best['optimizer']}, learning rate {rate}"
                choices.append((title, settings_of(each.best, ledger)))
    left = len(choices) - MOST_COPIED
    more = tag("p", f"{left} more budgets are left out here; the tables have their settings.") if left > 0 else None
    reminder = tag(
        "p",
        "The ε named is that of one run with these settings. If they were chosen on private data, the price of "
        "tuning is added to it.",
    )
    if not choices:
        return section("Settings to copy", tag("p", "There are none: every run diverged."), id_="copy")
    return settings_section(choices[:MOST_COPIED], before=reminder, after=more)


def settings_of(row: Any, ledger: Ledger | None) -> Settings:
    """Of a row of `protocols.tuned`; how batches were drawn, where the ledger leaves no doubt of it."""
    samplers = set()
    if ledger is not None:
        samplers = {
            (run.mechanism.sampler, str(run.mechanism.adjacency))
            for run in ledger.runs.values()
            if run.mechanism.noise_multiplier == row["noise_multiplier"]
            and run.mechanism.expected_batch_size == row["expected_batch_size"]
            and run.mechanism.sampling_probability == _or_none(row["sampling_probability"])
        }
    sampler, adjacency = samplers.pop() if len(samplers) == 1 else (None, None)
    return Settings(
        optimizer=str(row["optimizer"]),
        learning_rate=float(row["learning_rate"]),
        noise_multiplier=float(row["noise_multiplier"]),
        l2_clip_norm=float(row["l2_clip_norm"]),
        expected_batch_size=float(row["expected_batch_size"]),
        sampling_probability=_or_none(row["sampling_probability"]),
        num_steps=int(row["num_steps"]),
        target_delta=float(row["target_delta"]),
        sampler=sampler,
        adjacency=adjacency,
    )


def _or_none(value: Any) -> float | None:
    return None if value is None or value != value else float(value)
