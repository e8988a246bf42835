"""Pieces that both pages are made of: tables, sections, snippets, marks of optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from noisecast.figures._style import OPTIMIZER_COLOURS, OTHER_COLOUR
from noisecast.privacy.accounting import epsilon_text
from noisecast.report.markup import Child, Html, joined, tag
from noisecast.report.snippets import Settings, snippets

_MARKS = {  # the shapes of chart.js
    "DP-SGD": "M1,6a5,5 0 1,0 10,0a5,5 0 1,0 -10,0Z",
    "DP-SignSGD": "M1,1h10v10h-10Z",
    "DP-Adam": "M6,0L12,11H0Z",
}


def number(value: float | None, digits: int = 4) -> str:
    """A number to read; a dash for none.

    >>> number(0.123456), number(25000.0), number(float("inf")), number(None)
    ('0.1235', '25,000', 'inf', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if float(value).is_integer() and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.{digits}g}"


def shown_epsilon(epsilon: float) -> str:
    """Rounded up, three digits or all before the point.

    >>> shown_epsilon(0.29997), shown_epsilon(7646.39), shown_epsilon(float("inf"))
    ('0.3', '7,647', 'inf')
    """
    if not 1000 <= epsilon < 1e9:
        return epsilon_text(epsilon, 3)
    return f"{math.ceil(epsilon):,}"


def section(title: str, *children: Child, id_: str, non_private: bool = False, class_: str | None = None) -> Html:
    """A part of the page; one that shows what was computed without noise says so in its heading."""
    chip = tag("span", "non-private", class_="chip") if non_private else None
    head = tag("h2", title, " " if chip else None, chip, id=f"{id_}-title")
    return tag("section", head, *children, id=id_, class_=class_, aria_labelledby=f"{id_}-title")


def banner(strong: str, *children: Child, kind: str = "") -> Html:
    """A box that is not overlooked; kind: "", "bad" or "good"."""
    return tag(
        "div", tag("p", tag("strong", strong)), *(tag("p", c) for c in children), class_=f"banner {kind}".strip()
    )


def facts(rows: Iterable[tuple[str, Child]]) -> Html:
    """Names and values."""
    return tag("dl", *(part for name, value in rows for part in (tag("dt", name), tag("dd", value))), class_="facts")


def optimizer_name(name: str) -> Html:
    """With the mark that it has in the charts."""
    path = tag("path", d=_MARKS.get(name, _MARKS["DP-SGD"]), fill=OPTIMIZER_COLOURS.get(name, OTHER_COLOUR))
    mark = tag("svg", path, viewBox="0 0 12 12", class_="swatch", aria_hidden="true")
    return tag("span", mark, name, class_="name")


def table(
    caption: Child,
    columns: Sequence[tuple[str, str]],
    rows: Iterable[Sequence[Child]],
    *,
    below: Sequence[Child] = (),
    cards: bool = True,
) -> Html:
    """A table whose rows become cards on a phone.

    Args:
      columns: (heading, class of its cells).   rows: one child a column; the first is the row's heading.
      below: a remark under each row, over its whole width.   cards: False leaves a narrow table as it is.
    """
    head = tag("tr", *(tag("th", name, scope="col", class_=kind or None) for name, kind in columns))
    bodies = []
    for i, row in enumerate(rows):
        cells = []
        for j, (child, (name, kind)) in enumerate(zip(row, columns, strict=True)):
            kinds: dict[str, Any] = {"class_": kind or None, "data_label": name}
            cells.append(tag("th", child, scope="row", **kinds) if j == 0 else tag("td", child, **kinds))
        remark = tag("tr", tag("td", below[i], colspan=len(columns), class_="below")) if below else None
        # A body a row, so that a remark stays with its row.
        bodies.append(tag("tbody", tag("tr", *cells), remark, class_="with-remark" if remark else None))
    classes = "cards" if cards else None
    return tag(
        "div", tag("table", tag("caption", caption), tag("thead", head), *bodies, class_=classes), class_="scroll"
    )


def chart(id_: str, caption: Child, legend: Html | None = None) -> Html:
    """A place that the scripts draw into."""
    return tag("figure", tag("div", id=f"{id_}-chart", class_="chart"), legend, tag("figcaption", caption))


def scripted(*children: Child) -> Html:
    """What only works with JavaScript, and is shown only then."""
    return tag("div", *children, class_="scripted", hidden=True)


def without_scripts(*children: Child) -> Html:
    """What stands in for it without JavaScript, and also where a script has failed: the last line of ours hides it."""
    return tag("div", *children, class_="unscripted")


def settings_to_copy(choices: Sequence[tuple[str, Settings]]) -> Html:
    """Every choice in every library, with what differs there; the first open."""
    parts = []
    for i, (title, settings) in enumerate(choices):
        blocks = [
            tag(
                "div",
                tag("div", tag("h3", snippet.tool), class_="bar"),
                tag("pre", tag("code", snippet.code), tabindex=0) if snippet.code is not None else None,
                tag("p", snippet.differs, class_="note"),
                class_="snippet",
                data_tool=snippet.tool,
            )
            for snippet in snippets(settings)
        ]
        parts.append(tag("details", tag("summary", title), *blocks, open=i == 0))
    return joined([tag("div", id="tools", class_="controls scripted tools", hidden=True), *parts])
