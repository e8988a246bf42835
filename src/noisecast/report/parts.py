"""Pieces that all pages are made of: tables, sections, snippets, marks of optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from noisecast.figures._style import OPTIMIZER_COLOURS, OTHER_COLOUR
from noisecast.printed import number
from noisecast.privacy.accounting import epsilon_text
from noisecast.report.markup import Child, Html, joined, tag
from noisecast.report.snippets import Settings, snippets
from noisecast.table import DIVERGED

RUNNER_WORDS = {"training": "trained", "moments": "forecast", "sde": "SDE", "closed_form": "closed form"}
_MARKS = {  # the shapes of chart.js
    "DP-SGD": "M1,6a5,5 0 1,0 10,0a5,5 0 1,0 -10,0Z",
    "DP-SignSGD": "M1,1h10v10h-10Z",
    "DP-Adam": "M6,0L12,11H0Z",
}


def shown_epsilon(epsilon: float) -> str:
    """Rounded up, three digits or all before the point.

    >>> shown_epsilon(0.29997), shown_epsilon(7646.39), shown_epsilon(float("inf"))
    ('0.3', '7,647', 'inf')
    """
    if not 1000 <= epsilon < 1e9:
        return epsilon_text(epsilon, 3)
    return f"{math.ceil(epsilon):,}"


def listed(values: Sequence[float]) -> str:
    """Sorted numbers one by one, or how many there are and their ends.

    >>> listed([0.1, 1.0]), listed([float(i) for i in range(9)])
    ('0.1, 1', '9 values from 0 to 8')
    """
    if len(values) > 8:
        return f"{len(values)} values from {number(values[0])} to {number(values[-1])}"
    return ", ".join(number(value) for value in values)


def mean_with_interval(row: Any) -> Html:
    """The value of a row of `protocols.tuned`, with half its 95 % interval and its standard error where it has them."""
    if row["status"] == DIVERGED:
        return tag("span", "diverged")
    half = row["high"] - row["value"]
    if not math.isfinite(half):
        return tag("span", number(row["value"]))
    # One child for a flex row on a phone.
    error = tag("span", f"se {number(row['standard_error'], 2)}", class_="soft")
    return tag("span", f"{number(row['value'])} ± {number(half, 2)}", error)


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


def settings_section(choices: Sequence[tuple[str, Settings]], *, before: Child = None, after: Child = None) -> Html:
    """Every choice, with its title, in every library and with what differs there; the first open."""
    return section("Settings to copy", before, _settings_to_copy(choices), after, id_="copy", class_="long")


def settings_of_one(settings: Settings) -> Html:
    """The same where there is one choice."""
    title = f"{settings.optimizer}, learning rate {number(settings.learning_rate)}"
    return settings_section([(title, settings)])


def footer() -> Html:
    """Who wrote the page, and the place from which screen readers are told what changes."""
    from noisecast import __version__

    return tag(
        "footer",
        tag("p", f"Written by noisecast {__version__}. This file loads nothing and sends nothing.", class_="note"),
        tag("p", id="announce", class_="hidden", aria_live="assertive"),
    )


def _settings_to_copy(choices: Sequence[tuple[str, Settings]]) -> Html:
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
