"""Of the page of a store: what is promised of one run, and what is not."""

from __future__ import annotations

from typing import Any

from noisecast.report.markup import Html, tag
from noisecast.report.parts import facts, listed, section
from noisecast.sweeps.ledger import Ledger


def privacy_section(rows: Any, ledger: Ledger | None) -> Html:
    """`rows`: of the whole store.   ledger: None where it is lost, and with it how batches were drawn."""
    mechanisms = (
        [] if ledger is None else list({run.mechanism.sampler: run.mechanism for run in ledger.runs.values()}.values())
    )
    sentences = list(dict.fromkeys(m.statement() for m in mechanisms))
    neighbours = sorted({f"{m.sampler.neighbours(m.adjacency)} one training example" for m in mechanisms})
    about = [
        ("ε", "An upper bound, proven for one run with these settings: the smaller of a PLD and an RDP bound."),
        ("With respect to", "; ".join(neighbours) or "not known: the store has no readable ledger"),
        ("δ", listed(sorted(set(rows["target_delta"])))),
        ("Not covered", "Choosing (see the price of tuning), and every loss, accuracy or norm on this page."),
        ("Nominal ε", "The paper's formula q √(T ln(1/δ)) / z stands in the last table as “nominal, not a guarantee”."),
    ]
    said = [tag("p", sentence, class_="note") for sentence in sentences[:4]]
    return section("What is promised, and what is not", facts(about), *said, id_="privacy")
