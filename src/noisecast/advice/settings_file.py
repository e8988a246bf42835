"""A recommendation as a scenario file: what was asked, with the settings that were found."""

import os
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from noisecast.advice.recommendation import Recommendation
from noisecast.privacy.accounting import epsilon_text
from noisecast.privacy.mechanism import Adjacency

PATHS = ("path", "test", "vocabulary", "bounds", "label_names")  # of [problem]: relative to the file


def settings_toml(recommendation: Recommendation, asked: Mapping[str, Any], *, read_in: Path, written_in: Path) -> str:
    """A scenario file that trains the recommendation and forecasts it beside, as `noisecast answer` reads it.

    Args:
      asked: the tables of the scenario file that the advice is for.
      read_in, written_in: the folders of that file and of this one, to which paths are relative.
    """
    scenario = recommendation.chosen.scenario
    mechanism: Any = scenario.mechanism
    batch_size = mechanism.expected_batch_size
    settings = {"num_steps": scenario.num_steps, "target_delta": scenario.target_delta}
    settings |= {name: asked[name] for name in ("num_seeds", "num_records") if name in asked}
    problem = {
        key: _moved(value, read_in, written_in) if key in PATHS else value for key, value in asked["problem"].items()
    }
    noise = {
        "noise_multiplier": mechanism.noise_multiplier,
        "l2_clip_norm": mechanism.l2_clip_norm,
        "batch_size": int(batch_size) if batch_size == int(batch_size) else batch_size,
    }
    noise |= {name: asked["mechanism"][name] for name in ("sampler",) if name in asked["mechanism"]}
    if "adjacency" in asked["mechanism"]:
        noise["adjacency"] = "replace-one" if mechanism.adjacency == Adjacency.REPLACE_ONE else "add-or-remove-one"
    spent = epsilon_text(scenario.privacy_spent.epsilon)
    return "\n".join(
        [
            f"# Advised for epsilon = {recommendation.target_epsilon:g}: "
            f"spends {spent} at delta {scenario.target_delta:g}.",
            *_wrapped(recommendation.reason),
            *_pairs(settings | {"runners": ["training", "moments"]}),
            *("", "[problem]", *_pairs(problem)),
            *("", "[mechanism]", *_pairs(noise)),
            *("", "[[optimizer]]", *_pairs(optimizer_table(scenario.optimizer)), ""),
        ]
    )


def optimizer_table(optimizer: Any) -> dict[str, Any]:
    """Its table: the name that a person types is that of its module, and what is as ever is left out."""
    found = {"name": type(optimizer).__module__.rsplit(".", 1)[-1].replace("_", "-")}
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        if field.default is MISSING or value != field.default:
            found[field.name] = value
    return found


def _moved(path: str, read_in: Path, written_in: Path) -> str:
    return path if Path(path).is_absolute() else os.path.relpath(read_in / path, written_in)


def _wrapped(sentence: str) -> list[str]:
    return textwrap.wrap(sentence, 116, initial_indent="# ", subsequent_indent="# ")


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_toml(value)}" for key, value in table.items()]


def _toml(value: Any) -> str:
    """A value as TOML writes it: of what a scenario file may hold.

    >>> print(_toml({"a": [1, 2.5, "x"], "b": True}))
    {a = [1, 2.5, "x"], b = true}
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c for c in _quoted(value))
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(each) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(_pairs(value))}}}"
    return repr(value)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
