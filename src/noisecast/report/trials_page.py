"""The page of a store of random trials: only the best may be told, so it is all that stands there."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from noisecast.printed import number
from noisecast.report.answers import metric_of
from noisecast.report.markup import Html, joined, page, tag
from noisecast.report.parts import banner, facts, footer, section, settings_of_one, shown_epsilon
from noisecast.report.store_settings import settings_of
from noisecast.sweeps import Store
from noisecast.sweeps.price import RepeatSelect
from noisecast.sweeps.selection import Selection, select
from noisecast.table import METRICS


def trials_page(store: Store, rows: pd.DataFrame, metric: str | None) -> str:
    """No chart, no count, no other cell than the best.

    Args:
      store: of random trials.   rows: of it, whole.   metric: that decides; None: held-out loss, or what there is.
    Raises: ValueError: the store has no best yet, or not by this metric, or another was told before.
    """
    ledger = store.ledger()
    assert ledger.trials is not None
    decides = metric_of(rows, metric) if len(rows) else (metric or "test_loss")
    chosen = select(rows, metric=decides, price=RepeatSelect(ledger.trials), ledger=ledger)
    store.settle(chosen)
    title = f"The best of random trials on {chosen.settings['problem']}"
    body = joined(
        [
            tag(
                "header",
                tag("p", f"Noisecast report · store {store.folder.resolve().name}", class_="eyebrow"),
                tag("h1", title),
                banner(
                    "Only the best trial is shown.",
                    "How many trials there were, and all of them but the best, must stay secret: the ε of the "
                    "procedure holds only so. Keep the store to yourself.",
                ),
                _guarantee_of(chosen),
            ),
            tag("main", _chosen(chosen), settings_of_one(settings_of(pd.Series(chosen.settings), ledger))),
            footer(),
        ]
    )
    return page(f"{title} · Noisecast report", body, {"kind": "trials"}, ("chart.js", "page.js"))


def _guarantee_of(chosen: Selection) -> Html:
    if math.isinf(chosen.epsilon_of_procedure):
        return banner("NOT private", chosen.meaning, kind="bad")
    return banner(f"ε of the procedure: {shown_epsilon(chosen.epsilon_of_procedure)}", chosen.meaning, kind="good")


def _chosen(chosen: Selection) -> Html:
    names = ("optimizer", "learning_rate", "l2_clip_norm", "noise_multiplier", "expected_batch_size", "num_steps")
    rows: list[tuple[str, Any]] = [
        (name.replace("_", " "), number(value) if isinstance(value, int | float) else str(value))
        for name in names
        for value in [chosen.settings[name]]
    ]
    rows += [
        (METRICS[chosen.metric].label, number(chosen.value)),
        ("ε of one run", shown_epsilon(chosen.epsilon_of_run)),
        ("ε of the procedure", shown_epsilon(chosen.epsilon_of_procedure)),
        ("δ", f"{chosen.target_delta:g}"),
    ]
    return section("The answer", facts(rows), id_="answer", non_private=True)
