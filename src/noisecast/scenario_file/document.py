"""A file, checked whole: its tables as models, or every mistake at once."""

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisecast.scenario_file import rules
from noisecast.scenario_file.mistakes import ScenarioFileError, bare, checked, closest, not_among
from noisecast.scenario_file.problem_tables import KINDS, ProblemTable, Quadratic
from noisecast.scenario_file.rules import Tables, located
from noisecast.scenario_file.tables import DrawsTable, MechanismTable, OptimizerTable, Settings, TuningTable

_SECTIONS = ("problem", "mechanism", "optimizer", "draws", "tuning")


@dataclass(frozen=True, kw_only=True)
class Document:
    """What a file says; `path` and `text` are the file's own."""

    path: Path
    text: str
    settings: Settings
    problems: tuple[ProblemTable, ...]
    mechanism: MechanismTable
    optimizers: tuple[OptimizerTable, ...]
    draws: DrawsTable | None
    tuning: TuningTable | None


def read_document(path: str | Path, forbidden: Callable[[Tables], Iterable[str]] = lambda tables: ()) -> Document:
    """Read and check a file; `forbidden` says what else it may not hold.

    Raises: ScenarioFileError, with every mistake that can be seen without the data.
    """
    path = Path(path)
    mistakes: list[str] = []
    text, tables = _read_toml(path)
    if "num_params" in tables and not {"problem", "mechanism"} & tables.keys():
        sentence = f"{path} is a file of numbers, not of scenarios; ask `noisecast advise --numbers {path}`."
        raise ScenarioFileError([sentence])
    tables = _renamed(tables, mistakes)
    settings = checked(Settings, {k: v for k, v in tables.items() if k not in _SECTIONS}, "", mistakes)
    problems = _problems(tables, mistakes)
    mechanism = checked(MechanismTable, tables.get("mechanism"), "[mechanism] ", mistakes)
    optimizers = _optimizers(tables, mistakes)
    draws = checked(DrawsTable, tables["draws"], "[draws] ", mistakes) if "draws" in tables else None
    tuning = checked(TuningTable, tables["tuning"], "[tuning] ", mistakes) if "tuning" in tables else None
    mistakes += rules.contradictions(tables)
    mistakes += forbidden(tables)
    if mistakes or settings is None or mechanism is None:
        raise ScenarioFileError(f"{path}: {mistake}" for mistake in dict.fromkeys(mistakes))
    return Document(
        path=path,
        text=text,
        settings=settings,
        problems=problems,
        mechanism=mechanism,
        optimizers=optimizers,
        draws=draws,
        tuning=tuning,
    )


def _read_toml(path: Path) -> tuple[str, Tables]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte-order mark is no part of it
        return text, tomllib.loads(text)
    except FileNotFoundError:
        raise ScenarioFileError([f"There is no scenario file {path}; check the path."]) from None
    except OSError as error:
        raise ScenarioFileError([f"{path} cannot be read: {error.strerror}."]) from None
    except UnicodeDecodeError:
        raise ScenarioFileError([f"{path} is not UTF-8 text; save the file as UTF-8."]) from None
    except (ValueError, RecursionError) as error:  # not TOML, a number of 5,000 digits, 1,000 brackets
        raise ScenarioFileError([f"{path} is not a TOML file: {str(error).rstrip('.')}."]) from None


def _renamed(tables: Tables, mistakes: list[str]) -> Tables:
    """Misspelt tables under the name that was meant, so that their own mistakes are seen as well.

    But where there are such already: those alone.
    """
    found = {}
    for name, value in tables.items():
        meant = closest(name, _SECTIONS)
        holds_tables = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value))
        if name in _SECTIONS or meant is None or not holds_tables:
            found[name] = value
            continue
        mistakes.append(f"has no table '{name}'; did you mean '{meant}'?")
        if meant not in tables:
            found[meant] = value
    return found


def _problems(tables: Tables, mistakes: list[str]) -> tuple[ProblemTable, ...]:
    found = located("problem", tables) or [("[problem] ", None)]
    raw = [table for _, table in found]
    checks = [_problem(where, table, mistakes) for where, table in found]
    for number, (where, _) in enumerate(found):
        if raw[number] in raw[:number]:
            mistakes.append(f"Expected distinct problems, got {bare(where)} twice; leave one out.")
    return tuple(problem for problem in checks if problem is not None)


def _problem(where: str, table: Any, mistakes: list[str]) -> ProblemTable | None:
    if not isinstance(table, dict):
        return checked(Quadratic, table, where, mistakes)
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        mistakes.append(not_among(f"{where}kind", kind, KINDS))
        return None
    return checked(KINDS[kind], table, where, mistakes)


def _optimizers(tables: Tables, mistakes: list[str]) -> tuple[OptimizerTable, ...]:
    found = tables.get("optimizer")
    if not isinstance(found, list) or not found:
        got = "one in single brackets; double them." if isinstance(found, dict) else "none; add one."
        mistakes.append(f"Expected one or more tables [[optimizer]], got {got}")
        found = [found] if isinstance(found, dict) else []
    given = located("optimizer", {"optimizer": found})
    for number, (where, table) in enumerate(given):
        if table in [before for _, before in given[:number]]:
            mistakes.append(f"Expected distinct optimizers, got {bare(where)} twice; leave one out.")
    checks = [checked(OptimizerTable, table, where, mistakes) for where, table in given]
    return tuple(optimizer for optimizer in checks if optimizer is not None)
