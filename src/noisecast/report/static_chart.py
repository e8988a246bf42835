"""The main chart without JavaScript: the best cells of each optimizer against epsilon, as SVG."""

from __future__ import annotations

import math
from typing import Any

from noisecast.figures._style import RUNNER_LINES
from noisecast.report.chart_data import DASHES
from noisecast.report.markup import Html, joined, tag

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 340, 62, 100, 14, 46


def static_chart(data: dict[str, Any], problem: int, shape: int) -> Html:
    """One batch size of one problem.

    Args:
      data: of `chart_data`.   problem, shape: places in it.
    """
    levels = data["problems"][problem]["shapes"][shape]["levels"]
    ends = data["ends"][data["metric"]]
    lines: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for i, (p, s, runner, optimizer, level, *_, place) in enumerate(data["cells"]):
        if (p, s, place) == (problem, shape, 1) and ends[i] is not None and _finite(levels[level]["epsilon"]):
            lines.setdefault((runner, optimizer), []).append((levels[level]["epsilon"], ends[i][0]))
    points = [point for line in lines.values() for point in line]
    label = data["metrics"][data["metric"]]["label"]
    if not points:
        return tag("p", "Nothing to draw: every run diverged, or epsilon is infinite.")
    x, y = _scale([p[0] for p in points], LEFT, WIDTH - RIGHT, log=True), _scale(
        [p[1] for p in points], HEIGHT - BOTTOM, TOP, log=False
    )  # fmt: skip
    parts = [_axes(x, y, [p[0] for p in points], [p[1] for p in points], data["labels"]["epsilon"], label)]
    for (runner, optimizer), line in sorted(lines.items()):
        parts.append(
            _line(sorted((x(a), y(b)) for a, b in line), data["runners"][runner], data["optimizers"][optimizer])
        )
    title = f"{label} of the best settings of each optimizer, against epsilon of one run"
    return tag("svg", tag("title", title), *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="static-chart")


def _line(points: list[tuple[float, float]], runner: dict[str, Any], optimizer: dict[str, Any]) -> Html:
    path = "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in points)
    parts = []
    if RUNNER_LINES[runner["name"]][0] != "none":
        dash = DASHES[RUNNER_LINES[runner["name"]][0]] or None
        parts.append(
            tag("path", d=path, fill="none", stroke=optimizer["colour"], stroke_width=2, stroke_dasharray=dash)
        )
    else:
        parts += [tag("circle", cx=f"{a:.1f}", cy=f"{b:.1f}", r=4, fill=optimizer["colour"]) for a, b in points]
        a, b = points[-1]
        parts.append(tag("text", optimizer["name"], x=f"{a + 9:.1f}", y=f"{b + 4:.1f}", font_size=12))
    return joined(parts)


def _axes(x: Any, y: Any, xs: list[float], ys: list[float], x_label: str, y_label: str) -> Html:
    parts = []
    for value in sorted({float(f"{v:.2g}") for v in xs}):
        parts.append(tag("text", f"{value:g}", x=f"{x(value):.1f}", y=HEIGHT - 26, text_anchor="middle", font_size=12))
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = min(ys) + share * (max(ys) - min(ys))
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y(value):.1f}", y2=f"{y(value):.1f}", class_="grid"))
        where = {"x": LEFT - 8, "y": f"{y(value) + 4:.1f}"}
        parts.append(tag("text", f"{value:.3g}", **where, text_anchor="end", font_size=12))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(tag("text", x_label, x=middle, y=HEIGHT - 6, text_anchor="middle", font_size=12))
    turned = f"rotate(-90 14 {HEIGHT / 2})"
    y_text = f"{y_label} (non-private)"
    parts.append(tag("text", y_text, x=14, y=HEIGHT / 2, transform=turned, text_anchor="middle", font_size=12))
    return joined(parts)


def _scale(values: list[float], start: float, end: float, *, log: bool) -> Any:
    through = math.log if log else float
    low, high = through(min(values)), through(max(values))
    width = (high - low) or 1.0
    return lambda value: start + (end - start) * (through(value) - low) / width


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
