"""`noisecast protocol`: optimizers compared across privacy levels, tuned once (A) or at each of them (B)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from cyclopts import Parameter
from rich.table import Table

from noisecast.cli.output import TABLE_STYLE, Json, Workers, print_json, print_whole, to_reader, warn
from noisecast.cli.places import check_places
from noisecast.cli.progress import sweep_progress
from noisecast.files import written_whole
from noisecast.optimizers import OPTIMIZERS
from noisecast.printed import number
from noisecast.privacy.accounting import epsilon_text, noise_text
from noisecast.protocols import Score, ask_protocol_a, check_cells, protocol_a, protocol_b
from noisecast.question import Question
from noisecast.runners import Moments, Runner, Training, refusals
from noisecast.scenario import warnings_of
from noisecast.scenario_file import read_sweep_file
from noisecast.sweeps import Store, run_sweep
from noisecast.sweeps.price import Choice, Compose
from noisecast.table import DIVERGED

NON_PRIVATE = "Non-private: training scores and forecasts are computed from the examples without noise."
RUNNERS: dict[str, tuple[Runner, ...]] = {
    "training": (Training(),),
    "forecast": (Moments(),),
    "both": (Training(), Moments()),
}
NEAR = 0.01  # noise multipliers that come from a target epsilon have many digits; nobody types them all
EDGES = {"lowest": " ↓", "highest": " ↑", "": ""}
SHOWN = (
    "problem", "expected_batch_size", "runner", "optimizer", "noise_multiplier", "epsilon", "nominal_epsilon",
    "learning_rate", "l2_clip_norm", "value", "standard_error", "low", "high", "num_seeds", "status",
    "learning_rate_at_edge", "l2_clip_norm_at_edge", "num_cells", "num_contenders",
)  # fmt: skip


def protocol(
    which: Annotated[Literal["a", "b"], Parameter(help="a: tune at one noise multiplier; b: tune at each.")],
    file: Annotated[Path, Parameter(help="Sweep file (TOML) with every cell at every noise multiplier.")],
    /,
    *,
    store: Annotated[Path, Parameter(help="Folder for the results: a new one, or the one that this has begun.")],
    tuned_at: Annotated[float | None, Parameter(help="Protocol a: the noise multiplier to tune at.")] = None,
    by: Annotated[Literal["training", "forecast", "both"], Parameter(help="Who answers.")] = "training",
    metric: Annotated[
        Literal["loss", "test_loss", "accuracy", "test_accuracy"], Parameter(help="What is compared.")
    ] = "loss",
    when: Annotated[
        Literal["final", "last-epochs"],
        Parameter(help="Compared after the last step, or as the mean after each of the last five epochs."),
    ] = "final",
    workers: Workers = None,
    figure: Annotated[Path | None, Parameter(help="Picture of it (.png, .pdf or .svg).")] = None,
    json: Json = False,
) -> None:
    """Compare optimizers across privacy levels, each tuned once (a) or at each level (b)."""
    check_places(None, figure)
    score = Score(metric, "final" if when == "final" else "last epochs")
    questions = _questions(file, RUNNERS[by], score)
    warn(warnings_of([scenario for question in questions for scenario in question.scenarios]))
    level = _tuned_at(which, tuned_at, questions)
    found = _found(questions, score, level, store, workers)
    if figure is not None:
        from noisecast.figures import protocol_picture, save  # Matplotlib takes a second to import, for this alone

        with written_whole(figure) as temporary:
            save(protocol_picture.draw(found, score.label), temporary)
    price = _price(which, store, found, score, by)
    refused = [sentence for question in questions for sentence in refusals(question.scenarios, question.runners)]
    if json:
        rows: Any = found[list(SHOWN)]
        head = {"protocol": which, "score": score.label, "tuned_at": level, "non_private": NON_PRIVATE}
        where = {"store": str(store), "figure": figure and str(figure)}
        print_json(
            {
                **head,
                "best": rows.to_dict("records"),
                "price_of_tuning": price,
                "refusals": list(dict.fromkeys(refused)),
                **where,
            }
        )
        return
    console = to_reader()
    for _, rows in found.groupby(["problem", "expected_batch_size"], sort=False):
        print_whole(console, _shown(rows, which, score, level))
    console.print(NON_PRIVATE)
    console.print(f"Price of tuning: {price}")
    for sentence in dict.fromkeys(refused):
        console.print(f"Left out: {sentence}")
    if figure is not None:
        console.print(f"Written: {figure}", soft_wrap=True)


def _found(
    questions: tuple[Question, ...], score: Score, level: float | None, store: Path, workers: int | None
) -> pd.DataFrame:
    """The best cells; `level`: to tune at, None for Protocol B."""
    with sweep_progress(f"Protocol {'B' if level is None else 'A'}") as progress:

        def ask(some: Sequence[Question]) -> pd.DataFrame:
            return run_sweep(some, store, workers=workers, among=questions, progress=progress)

        if level is None:
            return protocol_b(ask(questions), score)
        return protocol_a(ask_protocol_a(questions, score, tuned_at=level, ask=ask), score, tuned_at=level)


# --- What is asked ---------------------------------------------------------------------------------------------------


def _questions(file: Path, runners: tuple[Runner, ...], score: Score) -> tuple[Question, ...]:
    asked = read_sweep_file(file)
    if asked.tuning is not None:
        raise ValueError(
            f"Expected a grid in {file}, got [tuning], a random number of trials of which only the best may be seen; "
            "leave it out, or run `noisecast sweep` and `noisecast select`."
        )
    check_cells(asked.questions)
    return tuple(
        replace(question, runners=runners, record_at=score.record_at(question.scenarios[0]))
        for question in asked.questions
    )


def _tuned_at(which: str, asked: float | None, questions: Sequence[Question]) -> float | None:
    """The noise multiplier of the file that is meant; None for Protocol B."""
    if which == "b":
        if asked is not None:
            raise ValueError(
                "Expected protocol b without --tuned-at: it tunes at every noise multiplier; leave it out."
            )
        return None
    levels = np.array(sorted({s.mechanism.noise_multiplier for question in questions for s in question.scenarios}))
    listed = ", ".join(f"{level:.4g}" for level in levels)
    if asked is None:
        raise ValueError(f"Expected --tuned-at with protocol a, got nothing; give one of {listed}.")
    nearest = float(levels[np.abs(levels - asked).argmin()])
    if abs(nearest - asked) > NEAR * nearest:
        raise ValueError(f"Expected --tuned-at to be one of the file's noise multipliers {listed}, got {asked:g}.")
    return nearest


def _price(which: str, store: Path, found: pd.DataFrame, score: Score, by: str) -> str:
    """What the procedure costs on private data, all its runs counted."""
    first: Any = found.loc[found["epsilon"].idxmax()]  # of the levels the least private
    runner = "training" if by == "training" else "moments"  # of both, the one that reads the examples without noise
    choice = Choice(score.metric, runner, float(first["epsilon"]), float(first["target_delta"]))
    if by == "forecast":
        return f"nothing on public data. {_WITHOUT_NOISE}"
    ledger = Store(store).ledger()
    if which == "a" and ledger.is_private and ledger.has_grown:
        return f"nothing on public data. {_DECIDED}"
    meaning = Compose().priced(choice, ledger).meaning
    return f"nothing on public data. On private data: {meaning}"


_WITHOUT_NOISE = "On private data there is no guarantee (ε = inf): a forecast reads the examples without noise."
_DECIDED = (
    "On private data there is no guarantee (ε = inf): losses of earlier runs in this store may have decided which were "
    "made later, as in a's second part. Run protocol b in a new folder, then a in the same one: all are counted then."
)


# --- What is shown ---------------------------------------------------------------------------------------------------


def _shown(rows: Any, which: str, score: Score, tuned_at: float | None) -> Table:
    first = rows.iloc[0]
    tuning = f"tuned at noise multiplier {tuned_at:.4g} and kept" if which == "a" else "tuned at every level"
    where = f"{first['problem']}, B = {first['expected_batch_size']:g}"
    table = Table(
        title=f"Protocol {which.upper()}, {tuning}: {score.label}. {where}",
        caption=_caption(rows),
        **TABLE_STYLE,
    )
    names = {"training": "trained", "moments": "forecast"}
    runners = [runner for runner in names if runner in set(rows["runner"])]
    for header in ("ε", "noise", "optimizer"):
        table.add_column(header, justify="left" if header == "optimizer" else "right", no_wrap=True)
    for runner in runners:
        for header in ("rate", "clip", names[runner]):
            table.add_column(header, justify="right", no_wrap=True)
    for level, part in rows.groupby("noise_multiplier", sort=True):
        for place, optimizer in enumerate(kind.name for kind in OPTIMIZERS if kind.name in set(part["optimizer"])):
            said = epsilon_text(float(part["epsilon"].iloc[0]), 3), noise_text(float(level))
            head = said if place == 0 else ("", "")
            of_optimizer = part[part["optimizer"] == optimizer].set_index("runner")
            cells = [cell for runner in runners for cell in _cells(of_optimizer, runner)]
            table.add_row(*head, optimizer, *cells)
        table.add_section()
    return table


def _cells(rows: Any, runner: str) -> tuple[str, str, str]:
    if runner not in rows.index:
        return "–", "–", "–"
    row = rows.loc[runner]
    if row["status"] == DIVERGED:
        return "–", "–", "diverged"
    rate = number(row["learning_rate"], 3) + EDGES[row["learning_rate_at_edge"]]
    clip = number(row["l2_clip_norm"], 3) + EDGES[row["l2_clip_norm_at_edge"]]
    half = row["high"] - row["value"]
    interval = f" ±{number(half, 2)}" if np.isfinite(half) else ""
    return rate, clip, number(row["value"], 4) + interval


def _caption(rows: Any) -> str:
    seeds = int(rows["num_seeds"].max())
    interval = f"± is the 95 % interval of the mean of {seeds} seeds" if seeds > 1 else "One seed: no interval"
    return (
        f"{interval}; the best of many cells flatters itself. ↓ ↑ the lowest or highest that was tried: the best "
        f"may lie beyond. ε of one run at delta {rows['target_delta'].iloc[0]:g}."
    )
