"""What commands print with: tables and sentences to people, strict JSON to programs, progress to neither's file."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeAlias

from cyclopts import Parameter, Token
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from noisecast.files import strict_json

Json: TypeAlias = Annotated[
    bool, Parameter(negative=(), show_default=False, help='Print JSON; an infinite number is the string "inf".')
]


def whole_number(kind: type, tokens: Sequence[Token]) -> int:
    """A converter for options that count: 39000, 1e6; Cyclopts' own would round 1.5 and say nothing."""
    del kind
    text = tokens[0].value
    with suppress(ValueError):
        return int(text)  # exactly, however long
    with suppress(ValueError):
        if (value := float(text)).is_integer():
            return int(value)
    raise ValueError(f"Expected a whole number, got {text}.")


Workers: TypeAlias = Annotated[
    int | None, Parameter(converter=whole_number, help="Processes; one a core by default, 0 for none.")
]

NARROWEST = 72  # columns that every table fits in

TABLE_STYLE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "title_justify": "left",
    "title_style": "bold",
    "caption_justify": "left",
    "pad_edge": False,
    "collapse_padding": True,
}


def to_reader() -> Console:
    """Results: standard output. On a narrower screen the terminal breaks the lines: nothing is left out."""
    console = Console(highlight=False, soft_wrap=False)
    console.width = max(console.width, NARROWEST)
    return console


def print_whole(console: Console, table: Table) -> None:
    """A table in all its columns: on a narrower screen the terminal breaks the lines."""
    whole = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    kept, console.width = console.width, max(console.width, whole)
    console.print(table)
    console.width = kept


def to_watcher() -> Console:
    """Progress and warnings: standard error, so that results can be redirected."""
    return Console(stderr=True, highlight=False)


def warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        print(f"Warning: {sentence}", file=sys.stderr)


def print_json(content: Any, *, default: Callable[[Any], Any] | None = None) -> None:
    """Strict JSON to standard output: infinity as the string "inf" (which `float` reads), NaN as null."""
    print(strict_json(content, default=default))


def facts(rows: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Names and values, one a line, as they are: what a file says is no markup."""
    table = Table(title=title, **TABLE_STYLE | {"box": box.SIMPLE, "show_header": False})
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table
