"""`noisecast reproduce`: the paper's figures, each with its frame and with its claims beside the numbers."""

import difflib
import importlib
import math
import os
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from noisecast.cli.output import TABLE_STYLE, Json, Workers, print_json, to_reader, to_watcher
from noisecast.cli.progress import duration, share_progress, sweep_progress
from noisecast.files import why_unwritable, written_whole
from noisecast.printed import number

Scale = Literal["quick", "paper"]
ALL = "all"
PICTURES = ("png", "pdf", "svg")
WIDTH = 100  # of the table of claims in a file or a pipe


@dataclass(frozen=True)
class Figure:
    """What can be said of a figure without importing it.

    Args:
      asks: its question.   datasets: which it needs.
      shares: figures that ask for some of the same runs.
    """

    asks: str
    datasets: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()


_DATA = ("imdb", "movielens", "forum500")
TASKS = (*_DATA, "movielens-paper-like", "movielens-centred")
FIGURES: dict[str, Figure] = {
    "fig-floors": Figure("final loss against the noise multiplier: the floors and their slopes", _DATA, ("fig-speed",)),
    "fig-speed": Figure("speed of training at six privacy levels: whose depends on epsilon", _DATA, ("fig-floors",)),
    "fig-threshold": Figure("epsilon below which the adaptive methods win, against the batch size", _DATA),
    "fig-protocol-b": Figure("loss and best learning rate when all is tuned at every epsilon", _DATA),
    "fig-sde": Figure("the optimizers against their SDEs, unified and as printed"),
    "fig-stationary": Figure("mean and variance of the weights against the stationary theorems"),
    "fig-hypergeometric": Figure("what the normalised-gradient lemmas neglect, and when that counts"),
    "table-tuned": Figure("the paper's table of tuned learning rates and clip norms (Protocol A)", _DATA),
}


def reproduce(
    *figures: Annotated[
        str, Parameter(help="Which figures and tables, by name, or all of them; left out: the list of names.")
    ],
    scale: Annotated[
        Scale, Parameter(help="quick: minutes, and still showing the claim; paper: the paper's grid, runs and epochs.")
    ] = "quick",
    output: Annotated[Path, Parameter(help="Folder for pictures, frames, claims and stores.")] = Path(
        "noisecast-figures"
    ),
    task: Annotated[str | None, Parameter(help=f"One alone: {', '.join(TASKS)}. Default: all of the figure's.")] = None,
    data: Annotated[Path | None, Parameter(help="Folder with the data sets. Default: NOISECAST_DATA.")] = None,
    workers: Workers = None,
    estimate: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Say how long it would take, and stop.")
    ] = False,
    json: Json = False,
) -> None:
    """A figure of the paper, with its numbers and what they say of its claims. Run it again, and it goes on."""
    if not figures:
        if estimate or task is not None:
            raise ValueError(
                f"Expected a figure, or all, to {'estimate the time of' if estimate else 'run'}, got none."
            )
        _list(json)
        return
    for figure in figures:
        if figure not in (*FIGURES, ALL):
            raise ValueError(f"Expected a figure among {', '.join(FIGURES)}, or all, got '{figure}'{_meant(figure)}")
    if workers is not None and workers < 0:
        raise ValueError(f"Expected --workers to be a whole number >= 0, got {workers}.")
    if task is not None and task not in TASKS:
        raise ValueError(f"Expected a task among {', '.join(TASKS)}, got '{task}'.")
    asked = [name for name in FIGURES if name in figures or ALL in figures]
    names = [name for name in asked if task is None or FIGURES[name].datasets]
    if not names:
        raise ValueError(f"Expected a figure that {task} is in, got {', '.join(figures)}; leave out --task.")
    order = _Order(scale=scale, task=task, output=output, data=data, workers=workers)
    if estimate:
        _say_estimates(names, order, json)
        return
    _check_folder(output)
    results, refused = [], {}
    for name in names:
        try:
            result = _reproduce(name, order)
        except _NotThere as error:
            if len(asked) == 1:
                raise
            _say(f"{error}\n")
            continue
        except ValueError as error:  # no data, or a store of something else: one sentence, and the others go on
            if len(asked) == 1:
                raise
            refused[name] = str(error)
            _say(f"{name} is not reproduced. {error}\n")
            continue
        results.append(result)
        if not json:
            _print_result(result)
    if json:
        print_json({"scale": scale, "figures": results, "refused": refused})
    elif len(asked) > 1:
        to_reader().print(_summary(results, refused))
    if refused:
        raise ValueError(f"Not reproduced, for the reasons above: {', '.join(refused)}.")


@dataclass(frozen=True)
class _Order:
    scale: Scale
    task: str | None
    output: Path
    data: Path | None
    workers: int | None

    def store(self, name: str) -> Path:
        """A store is of one sweep, so each scale has its own, and each task that is asked for alone."""
        return self.output / "stores" / f"{self.file(name)}-{self.scale}"

    def stores_beside(self, name: str) -> list[Path]:
        """Of figures that ask for some of the same runs, where they have begun: these are computed once."""
        from noisecast.sweeps.store import Store, is_store

        found = []
        for folder in map(self.store, FIGURES[name].shares):
            if is_store(folder):
                try:
                    Store(folder)
                    found.append(folder)
                except ValueError as error:  # the other figure's trouble; here it costs time at most
                    _say(f"{name} takes nothing from the store of another figure: {error}")
        return found

    def file(self, name: str) -> str:
        """Of the pictures and tables."""
        return name if self.task is None else f"{name}-{self.task}"

    def questions(self, name: str, module: Any) -> tuple[Any, ...]:
        """Of a figure that is a sweep: all of them, or those about one task; no other's data are read."""
        if _is_computed_whole(module):
            return ()
        from noisecast.problems.datasets import DataError

        try:
            asked = module.questions(self.scale, self.data, self.task)
        except DataError as error:
            others = "" if self.task else f" To reproduce it for the data that you have: --task {' or '.join(_DATA)}."
            raise _NoData(f"{name} lacks data: {error}{others}") from None
        if not asked:
            raise _NotThere(f"{name} has no {self.task} at the {self.scale} scale; --scale paper has.")
        return asked


class _NoData(ValueError):
    """One sentence: which data a figure lacks, and how to get them."""


class _NotThere(ValueError):
    """One sentence: a figure that has not the task at this scale."""


# --- One figure -------------------------------------------------------------------------------------------------------


def _reproduce(name: str, order: _Order) -> dict[str, Any]:
    """Say how long it will take, compute, write; what is to be shown."""
    _check_data(name, order)
    began = time.monotonic()
    try:
        module = importlib.import_module(f"noisecast.reproduction.{name.replace('-', '_')}")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted in {name}, before it began.") from None
    try:
        asked = order.questions(name, module)
        _say(f"{name}, {order.scale} scale. {module.TITLE}. {_expectation(module, name, order, asked)}")
        if not _is_computed_whole(module):
            order.store(name).parent.mkdir(exist_ok=True)
        with sweep_progress(order.file(name)) as progress:
            table = _table(module, name, order, asked, progress)
    except KeyboardInterrupt as interruption:
        raise KeyboardInterrupt(str(interruption) or f"Interrupted in {name}; {_what_is_kept(module)}.") from None
    frame = module.data(table)
    claims = module.claims(frame)
    files = _write(module, order.file(name), order.output, table, frame, claims)
    return {
        "name": name,
        "task": order.task,
        "title": module.TITLE,
        "scale": order.scale,
        "seconds": round(time.monotonic() - began, 1),
        "claims": [_as_data(claim) for claim in claims],
        "files": [str(file) for file in files],
    }


def _table(module: Any, name: str, order: _Order, asked: tuple[Any, ...], progress: Any) -> Any:
    if _is_computed_whole(module):
        return module.run(order.scale, progress=progress)
    from noisecast.sweeps import run_sweep

    return run_sweep(
        asked, order.store(name), workers=order.workers, beside=order.stores_beside(name), progress=progress
    )


def _is_computed_whole(module: Any) -> bool:
    """Whether it takes so little time that it needs no store: then it states its seconds; else it has questions."""
    return hasattr(module, "SECONDS")


def _what_is_kept(module: Any) -> str:
    if _is_computed_whole(module):
        return "it takes little time and starts anew"
    return "what was finished is kept, the same command goes on"


def _expectation(module: Any, name: str, order: _Order, asked: tuple[Any, ...]) -> str:
    """How long, where that is worth the trial that finds it out: not before minutes, and not once begun."""
    if _is_computed_whole(module):
        return f"About {duration(_seconds(module, order, asked))}."
    if order.store(name).exists():
        return f"It goes on with what is in {order.store(name)}."
    if order.scale == "quick":
        return "It takes minutes."
    _say(f"{name}, {order.scale} scale: some short trials, to say how long it will take.")
    from noisecast.sweeps.store import Store

    done = {cell for store in order.stores_beside(name) for cell in Store(store).cells}
    return f"About {duration(_seconds(module, order, asked, done))}; interrupted, the same command goes on."


def _seconds(module: Any, order: _Order, asked: tuple[Any, ...], done: Set[str] = frozenset()) -> float:
    """By trial where it is a sweep, of the runs that other figures have not made; else as once measured."""
    if _is_computed_whole(module):
        return float(module.SECONDS[order.scale])
    from noisecast.sweeps import estimate_seconds

    with share_progress("Trials") as progress:
        return estimate_seconds(asked, workers=order.workers, done=done, progress=progress)


def _as_data(claim: Any) -> dict[str, Any]:
    """With Python's own numbers: NumPy's are no JSON."""
    numbers = {name: float(getattr(claim, name)) for name in ("value", "low", "high")}
    return vars(claim) | numbers | {"holds": bool(claim.holds), "verdict": claim.verdict}


def _write(module: Any, name: str, output: Path, table: Any, frame: Any, claims: list) -> list[Path]:
    """Pictures, the frame that is drawn, all rows, and the claims; each file whole or not at all."""
    from matplotlib import rc_context

    from noisecast.reproduction.claims import claims_frame

    decided = claims_frame(claims)
    files = {suffix: output / f"{name}.{suffix}" for suffix in PICTURES}
    picture = module.draw(frame)
    for suffix, path in files.items():
        with written_whole(path) as temporary:
            picture.savefig(temporary, format=suffix, dpi=150)
        # The first one has laid it out, which takes as long as to draw it. None means what a user's own settings say.
        with rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}):
            picture.set_layout_engine(None)
    for path, rows in (
        (output / f"{name}.parquet", frame),
        (output / f"{name}-table.parquet", table),
        (output / f"{name}-claims.parquet", decided),
    ):
        with written_whole(path) as temporary:
            rows.to_parquet(temporary, index=False)
        files[path.stem] = path
    with written_whole(output / f"{name}-claims.csv") as temporary:
        decided.to_csv(temporary, index=False)
    return [*files.values(), output / f"{name}-claims.csv"]


# --- What may be missing ----------------------------------------------------------------------------------------------


def _meant(figure: str) -> str:
    close = difflib.get_close_matches(figure, FIGURES, n=1, cutoff=0.75)  # all but one begin alike
    return f"; did you mean '{close[0]}'?" if close else "."


def _check_folder(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise ValueError(f"Expected --output to be a folder, {output} is a file; choose another name.")
    reason = why_unwritable((output / "x" if output.exists() else output).absolute())
    if reason is not None:
        raise ValueError(reason)
    output.mkdir(exist_ok=True)


def _check_data(name: str, order: _Order) -> None:
    """A figure without a data folder: what to get, at once. Which file is missing from a folder, its reader says."""
    needed = [data for data in FIGURES[name].datasets if order.task is None or order.task.startswith(data)]
    if not needed or order.data is not None or os.environ.get("NOISECAST_DATA"):
        return
    from noisecast.problems.datasets import DATASETS

    ways = ", ".join(f"{entry.name} ({entry.obtain})" for entry in DATASETS if entry.name in needed)
    raise _NoData(f"{name} needs data, in a folder given by --data or NOISECAST_DATA: {ways}.")


# --- What is said -----------------------------------------------------------------------------------------------------


def _say(sentence: str) -> None:
    """To who waits, or to the log; results go to standard output alone."""
    to_watcher().print(sentence, soft_wrap=True, markup=False)


def _list(json: bool) -> None:
    if json:
        print_json({"figures": {name: {"asks": f.asks, "datasets": f.datasets} for name, f in FIGURES.items()}})
        return
    table = Table(title="Figures and tables of the paper", **TABLE_STYLE)
    for column in ("name", "what it asks", "data"):
        table.add_column(column, no_wrap=column == "name")
    for name, figure in FIGURES.items():
        table.add_row(name, figure.asks, ", ".join(figure.datasets) or "none")
    console = to_reader()
    console.print(table)
    console.print("One: noisecast reproduce NAME   All: noisecast reproduce all   Time: --estimate")


def _say_estimates(names: list[str], order: _Order, json: bool) -> None:
    from noisecast.sweeps import cells_of

    found: dict[str, float | str] = {}
    lacking, done = [], set()
    for name in names:
        try:
            _check_data(name, order)
            module = importlib.import_module(f"noisecast.reproduction.{name.replace('-', '_')}")
            asked = order.questions(name, module)
            found[name] = _seconds(module, order, asked, done)
            done |= cells_of(asked)
        except (_NoData, _NotThere) as error:
            if len(names) == 1:
                raise
            found[name] = str(error)
            lacking += [name] if isinstance(error, _NoData) else []
    if json:
        print_json({"scale": order.scale, "seconds": found})
    else:
        _print_estimates(found, order.scale)
    if lacking:
        raise ValueError(f"Not estimated, for the reasons above: {', '.join(lacking)}.")


def _print_estimates(found: dict[str, float | str], scale: Scale) -> None:
    table = Table(title=f"Expected times, {scale} scale, from the start", **TABLE_STYLE)
    table.add_column("figure", no_wrap=True)
    table.add_column("time")
    for name, seconds in found.items():
        table.add_row(name, seconds if isinstance(seconds, str) else duration(seconds))
    to_reader().print(table)


def _print_result(result: dict[str, Any]) -> None:
    console = to_reader()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    console.print(_claims_table(result))
    stem = Path(result["files"][0]).with_suffix("")
    console.print(
        f"Took {duration(result['seconds'])}. Pictures: {stem}.{{{','.join(PICTURES)}}}   drawn frame: {stem}.parquet\n"
        f"All rows: {stem}-table.parquet   claims: {stem}-claims.{{csv,parquet}}\n",
        soft_wrap=True, markup=False,
    )  # fmt: skip


def _claims_table(result: dict[str, Any]) -> Table:
    """A claim, what was measured, what else is known of it; the number, what was wanted of it, whether it holds."""
    table = Table(title=f"{result['title']} ({result['scale']} scale)", show_lines=True, **TABLE_STYLE)
    table.add_column("claim", ratio=1, overflow="fold")
    table.add_column("number [95 %]", max_width=20)
    table.add_column("wanted", max_width=14)
    table.add_column("holds", width=5)
    for claim in result["claims"]:
        holds = Text(claim["verdict"], style="" if claim["holds"] else "bold red")
        table.add_row(_in_words(claim), Text(_with_interval(claim)), Text(claim["wanted"]), holds)
    return table


def _in_words(claim: dict[str, Any]) -> Text:
    text = Text(f"{claim['statement']}")
    lines = {"source": claim["source"], "measured": claim["measure"]}
    lines |= {name: claim[name] for name in ("theory", "forecast") if claim[name]}
    if not claim["holds"] and claim["corrected"]:
        lines["instead"] = claim["corrected"]
    for name, line in lines.items():
        text.append(f"\n{name}: ", style="bold" if name == "instead" else "dim").append(line)
    return text


def _with_interval(claim: dict[str, Any]) -> str:
    text = number(claim["value"], 3)
    if math.isnan(claim["low"]):
        return text
    return f"{text} [{number(claim['low'], 3)}, {number(claim['high'], 3)}]"


def _summary(results: Iterable[dict[str, Any]], refused: dict[str, str]) -> Table:
    table = Table(title="Summary", **TABLE_STYLE)
    table.add_column("figure", no_wrap=True)
    for column in ("time", "claims that hold", "that do not", "open at this scale"):
        table.add_column(column, justify="right")
    done = {result["name"]: result for result in results}
    for name in (name for name in FIGURES if name in done or name in refused):
        if name in refused:
            table.add_row(name, "not done", "–", "–", "–")
            continue
        verdicts = [claim["verdict"] for claim in done[name]["claims"]]
        counts = (str(verdicts.count(verdict)) for verdict in ("yes", "no", "open"))
        table.add_row(name, duration(done[name]["seconds"]), *counts)
    return table
