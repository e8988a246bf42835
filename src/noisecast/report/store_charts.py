"""Of the page of a store: the charts to turn, and what stands for them without JavaScript."""

from __future__ import annotations

from typing import Any

from noisecast.report.markup import Html, tag
from noisecast.report.parts import chart, scripted, section, without_scripts
from noisecast.report.static_chart import static_chart


def explore_section(data: dict[str, Any]) -> Html:
    """The end of training against ε; `data`: of `chart_data`, with the shape that is shown first."""
    caption = (
        "Dots are training, with 95 % intervals of the mean over seeds; a dash-dotted line is the forecast, made "
        "without training; dotted uprights are thresholds. The thin line through dots only guides the eye."
    )
    one = data["problems"][0]["shapes"][data["shape"]]
    shown = f"{data['problems'][0]['name']}, batch size {one['batch']:g}, {one['steps']:,} steps"
    num_others = sum(len(problem["shapes"]) for problem in data["problems"]) - 1
    are_hidden = f"; {num_others} more can be chosen with JavaScript" if num_others else ""
    about = tag("figcaption", f"Shown: {shown}{are_hidden}. {caption}")
    still = tag("figure", static_chart(data, 0, data["shape"]), about)
    live = scripted(
        tag("div", id="ends-controls", class_="controls"),
        tag("p", id="ends-say", class_="note live", aria_live="polite"),
        chart("ends", caption, _legend()),
        tag("h3", "Where the better optimizer changes, in what is shown"),
        tag("ul", id="ends-thresholds", class_="plain note", aria_live="polite"),
    )
    return section(
        "Loss against ε", live, without_scripts(still), id_="explore",
        non_private=True,
    )  # fmt: skip


def curves_section() -> Html:
    """The path to the end, which only the script draws."""
    live = scripted(
        tag("div", id="curves-controls", class_="controls"),
        tag("p", id="curves-say", class_="note live", aria_live="polite"),
        chart("curves", "At the recorded steps, with the settings chosen above.", _legend()),
    )
    return section("On the way there", live, without_scripts(tag("p", "Curves need JavaScript.")), id_="curves",
                   non_private=True)  # fmt: skip


def _legend() -> Html:
    return tag("ul", class_="legend", data_of="cells")
