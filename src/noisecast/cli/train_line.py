"""The `noisecast train` that trains with settings that were found, to be pasted into a shell."""

import csv
import io
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from noisecast.advice.settings_file import PATHS, optimizer_table
from noisecast.scenario import Scenario
from noisecast.scenario_file.rules import located
from noisecast.scenario_file.values import as_list

INTRODUCTION = "To train so (with the private file in place of this one, if this one is a public proxy):"
WIDTH = 76  # at which the command goes on in a line of its own
SAME = ("sampler", "adjacency")  # of [mechanism]: options of the same names


def train_commands(file: Path, found: Iterable[tuple[Scenario, float | None]]) -> list[str]:
    """A command for each scenario; none where the problem is no file, or the optimizer is set as `train` cannot.

    Args:
      file: the scenario file that was asked about.
      found: scenarios, each with the epsilon that it is for; None: the file's target_epsilon that it spends, or its
        noise multiplier.
    """
    tables = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    (_, problem), *_ = located("problem", tables)
    if problem["kind"] != "file":
        return []
    commands = [_command(scenario, epsilon, problem, tables["mechanism"], file.parent) for scenario, epsilon in found]
    return [command for command in commands if command is not None]


def print_commands(commands: Sequence[str]) -> None:
    """At the end of what was found: as they are, whatever the width of the screen."""
    if commands:
        print("\n".join(["", INTRODUCTION, *commands]))


def _command(
    scenario: Scenario, epsilon: float | None, problem: Mapping, mechanism: Mapping, folder: Path
) -> str | None:
    given = optimizer_table(scenario.optimizer)
    if given.keys() - {"name", "learning_rate"}:  # b1, b2, eps
        return None
    if epsilon is None and "target_epsilon" in mechanism:
        spent = scenario.privacy_spent.epsilon
        epsilon = min(as_list(mechanism["target_epsilon"]), key=lambda asked: abs(asked - spent))
    settings = scenario.mechanism
    noise = {"noise_multiplier": settings.noise_multiplier} if epsilon is None else {"target_epsilon": epsilon}
    options = {
        **{key: value for key, value in problem.items() if key not in ("kind", "path")},
        "optimizer": given["name"],
        "learning_rate": scenario.optimizer.learning_rate,
        "l2_clip_norm": settings.l2_clip_norm,
        **noise,
        "target_delta": scenario.target_delta,
        "batch_size": settings.expected_batch_size,
        "num_steps": scenario.num_steps,
        **{key: mechanism[key] for key in SAME if key in mechanism},
        "output": "model",
    }
    words = [_words(key, str(folder / value) if key in PATHS else value) for key, value in options.items()]
    return _in_lines(["noisecast train", shlex.quote(str(folder / problem["path"])), *filter(None, words)])


def _words(key: str, value: Any) -> str:
    """An option as a shell takes it; nothing for a flag that is off.

    >>> _words("unit_rows", True), _words("columns", ["a", "my b"]), _words("label_separator", "-")
    ('--unit-rows', "--columns 'a,my b'", '--label-separator=-')
    >>> print(_words("columns", ["size, cm", "age"]))
    --columns '"size, cm",age'
    >>> _words("batch_size", 64.0), _words("learning_rate", 0.0597)
    ('--batch-size 64', '--learning-rate 0.0597')
    """
    name = "--" + key.replace("_", "-")
    if isinstance(value, bool):
        return name if value else ""
    if isinstance(value, list):
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(value)
        value = line.getvalue()
    text = value if isinstance(value, str) else _exactly(value)
    return f"{name}{'=' if text.startswith('-') else ' '}{shlex.quote(text)}"


def _exactly(value: float) -> str:
    short = f"{value:.6g}"
    return short if float(short) == value else repr(value)


def _in_lines(words: list[str]) -> str:
    """In lines of a shell, each but the last with a backslash at its end."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)
