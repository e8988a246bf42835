"""The API page lists what `noisecast.__all__` lists: a new public name is documented without an edit, and once."""

import re
from importlib import import_module
from typing import Any

import noisecast

MARK = "<!-- every public name -->"

# Part of the package: its heading. A part that is not here gets its own name.
HEADINGS = {
    "privacy": "Mechanism, samplers, accounting",
    "problems": "Problems and data",
    "optimizers": "Optimizers",
    "scenario": "Scenarios and questions",
    "question": "Scenarios and questions",
    "runners": "Runners",
    "forecasting": "Forecasts",
    "sweeps": "Sweeps, and what choosing costs",
    "release": "Training for release",
    "advice": "Advice",
    "estimators": "Estimators",
}


def listing() -> str:
    """MyST: one autodoc directive a name, under the heading of its part."""
    groups: dict[str, list[str]] = {}
    for name, home in noisecast._HOMES.items():
        part = home.split(".")[1]
        groups.setdefault(HEADINGS.get(part, part), []).append(name)
    return "\n\n".join(f"## {heading}\n\n{_directives(names)}" for heading, names in groups.items())


def _directives(names: list[str]) -> str:
    lines = ["```{eval-rst}"]
    for name in names:
        value = getattr(noisecast, name)
        kind = "class" if isinstance(value, type) else "function" if callable(value) else "data"
        members = ["   :members:"] if kind == "class" else []
        lines += [f".. auto{kind}:: noisecast.{name}", *members, ""]
    return "\n".join([*lines, "```"])


def without_public_names(directive: re.Match[str]) -> str:
    """An automodule directive, with what the API page has already left out."""
    module = import_module(directive[1])
    public = [name for name in noisecast._HOMES if getattr(module, name, module) is getattr(noisecast, name)]
    return directive[0] + (f"\n   :exclude-members: {', '.join(public)}" if public else "")


def fill_in(app: Any, docname: str, source: list[str]) -> None:
    if MARK in source[0]:
        source[0] = source[0].replace(MARK, listing())
    if docname == "api-modules":
        source[0] = re.sub(r"^\.\. automodule:: (\S+)$", without_public_names, source[0], flags=re.MULTILINE)


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", fill_in)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
