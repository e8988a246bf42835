"""Of the page of a store: what was asked, and what must be known before anything is read."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from noisecast.printed import number
from noisecast.protocols import Score
from noisecast.report.answers import ordered
from noisecast.report.markup import Html, tag
from noisecast.report.parts import RUNNER_WORDS, banner, facts, listed, section, shown_epsilon
from noisecast.sweeps import Store
from noisecast.sweeps.ledger import Ledger
from noisecast.table import DIVERGED, METRICS


def question(rows: pd.DataFrame) -> str:
    """The title of the page; `rows`: of the whole store."""
    problems = " and ".join(sorted(set(rows["problem"])))
    names = ordered(set(rows["optimizer"]))
    who = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
    what = "how does it fare" if len(names) == 1 else "which is best"
    return f"{who}: {what} at each privacy budget on {problems}?"


def header(store: Store, title: str, rows: Any, ledger: Ledger | None, score: Score) -> Html:
    """The title, the question in a sentence, and warnings.

    Args:
      title: of `question`.   rows: of the whole store.   ledger: its own; None where it is lost.
    """
    return tag(
        "header",
        tag("p", f"Noisecast report · {store.folder.resolve().name}", class_="eyebrow"),
        tag("h1", title),
        tag("p", _in_words(rows, score), class_="lead"),
        *_warnings(rows, ledger),
        tag(
            "p",
            tag("span", "non-private", class_="chip first"),
            "Losses and accuracies here were computed from the examples without noise, and no ε covers them. Share "
            "this page where the data are public, or as you would share the data.",
            class_="note",
        ),
    )


def question_section(rows: Any, ledger: Ledger | None, score: Score) -> Html:
    """Every setting that was asked about, and how much of it is done; arguments as for `header`."""
    runs, diverged = _runs(rows), _runs(rows[rows["status"] == DIVERGED])
    about = [
        ("Problem", ", ".join(sorted(set(rows["problem"])))),
        ("Examples", _examples(rows)),
        ("Optimizers", ", ".join(ordered(set(rows["optimizer"])))),
        ("Budgets", _budgets(rows)),
        ("Learning rates", listed(sorted(set(rows["learning_rate"])))),
        ("Clip norms", listed(sorted(set(rows["l2_clip_norm"])))),
        ("Batch size, steps", "; ".join(f"{number(b)}, {t:,}" for b, t in _shapes(rows))),
        ("Answered by", ", ".join(str(RUNNER_WORDS.get(r, r)) for r in sorted(set(rows["runner"]), reverse=True))),
        ("Judged by", f"{score.label} ({'larger' if score.larger_is_better else 'smaller'} is better)"),
        ("Runs done", _share_done(runs, ledger)),
        ("Diverged", f"{diverged:,} of {runs:,} training runs" if runs else "nothing was trained"),
    ]
    return section("What was asked", facts(about), id_="question")


def _warnings(rows: Any, ledger: Ledger | None) -> list[Html]:
    found = []
    if ledger is not None and _runs(rows) < len(ledger.runs):
        filled = "What is here may change; what has not run is not in the charts."
        found.append(banner("This store is still being filled.", filled))
    if ledger is not None and not ledger.is_private:
        found.append(
            banner(
                "NOT private: the noise of these runs was drawn from known seeds.",
                "Whoever knows the seeds can take the noise away. Every ε on this page is what the same settings spend "
                "when they are run without a seed; these runs and their models have no guarantee (ε = inf).",
                kind="bad",
            )
        )
    return found


def _in_words(rows: Any, score: Score) -> str:
    """The question as a sentence."""
    settings = rows.drop_duplicates(["optimizer", "learning_rate", "l2_clip_norm", "expected_batch_size"])
    each = settings.groupby("optimizer").size()
    trained = rows.loc[rows["runner"] == "training"]
    repeats = f", each trained {trained['seed'].nunique()} times" if len(trained) else ""
    forecast = " and forecast" if len(trained) and (rows["runner"] == "moments").any() else ""
    better = "largest" if score.larger_is_better else "smallest"
    return (
        f"Which optimizer and settings give the {better} {METRICS[score.metric].label}? Tried: {number(each.max())} "
        f"settings of each (learning rate, clip norm, batch size) at every noise level{repeats}{forecast}."
    )


def _runs(rows: Any) -> int:
    """How many training runs have a row here."""
    return len(rows[rows["runner"] == "training"].drop_duplicates(["scenario", "seed"]))


def _budgets(rows: Any) -> str:
    finite = rows["epsilon"][rows["epsilon"] < math.inf]
    if not len(finite):
        return "none: without noise epsilon is infinite"
    return (
        f"ε from {shown_epsilon(finite.min())} to {shown_epsilon(finite.max())}, as accounted for one run at "
        f"δ = {rows['target_delta'].iloc[0]:g}"
    )


def _examples(rows: Any) -> str:
    sizes = sorted({round(b / q) for b, q in zip(rows["expected_batch_size"], rows["sampling_probability"]) if q > 0})
    return listed(sizes) if sizes else "a stream: every step has fresh ones"


def _shapes(rows: Any) -> list[tuple[float, int]]:
    pairs = rows[["expected_batch_size", "num_steps"]].drop_duplicates().itertuples(index=False, name=None)
    return sorted((float(b), int(t)) for b, t in pairs)


def _share_done(done: int, ledger: Ledger | None) -> str:
    if ledger is None:
        return f"{done:,} training runs; how many were asked for is not known: the store has no readable ledger"
    if not ledger.runs:
        return "nothing was to be trained"
    return f"{done:,} of {len(ledger.runs):,} training runs ({min(1.0, done / len(ledger.runs)):.0%})"
