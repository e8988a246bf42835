"""Every mistake as a sentence: expected, got, way out."""

import difflib
import math
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from noisecast.scenario_file.values import LIST, RANGE

_T = TypeVar("_T", bound=BaseModel)
# What other tools, and papers, call it.
_ELSEWHERE = {
    **dict.fromkeys(("lr", "eta", "step_size"), "learning_rate"),
    **dict.fromkeys(("max_grad_norm", "clip", "clip_norm", "clipping_norm", "l2_clip", "l2_norm_clip"), "l2_clip_norm"),
    **dict.fromkeys(("sigma", "noise"), "noise_multiplier"),
    **dict.fromkeys(("epsilon", "target_eps"), "target_epsilon"),
    **dict.fromkeys(("sample_rate", "batch"), "batch_size"),
    **dict.fromkeys(("num_runs", "runs", "repeats"), "num_seeds"),
    "delta": "target_delta",
    "steps": "num_steps",
    "epochs": "num_epochs",
    "seed": "insecure_seeds",
    "beta1": "b1",
    "beta2": "b2",
    "adam_epsilon": "eps",
    "target": "label",
    "test_size": "test_fraction",
    "num_factors": "dim",
    "type": "kind",
}
# Where a key belongs that is looked for in another table.
_HOMES = {
    **dict.fromkeys(("learning_rate", "b1", "b2", "eps"), "of [[optimizer]]"),
    **dict.fromkeys(("noise_multiplier", "target_epsilon", "l2_clip_norm", "batch_size"), "of [mechanism]"),
    **dict.fromkeys(("target_delta", "num_steps", "num_epochs", "num_seeds", "insecure_seeds"), "above all tables"),
    **dict.fromkeys(("kind", "label", "test_fraction"), "of [problem]"),
}
ALIKE = 0.75  # a key: of less it is guesswork what was meant
# What pydantic calls a valid one of these is here:
_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "boolean": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dictionary": "a table",
}


class ScenarioFileError(ValueError):
    """Every mistake of a scenario or sweep file at once, one sentence each."""

    def __init__(self, mistakes: Iterable[str]):
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self.mistakes))


def checked(model: type[_T], table: Any, where: str, mistakes: list[str]) -> _T | None:
    """`table` as a `model`, or None after adding to `mistakes`; `where` names the table, as "[problem] "."""
    if not isinstance(table, dict):
        got = "none; add one" if table is None else "a list; write one" if isinstance(table, list) else f"{table!r}"
        mistakes.append(f"Expected a table {bare(where)}, got {got}.")
        return None
    try:
        return model.model_validate(table)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        meant = as_meant(table, model)
        # One mistake, not two: a misspelt key is not missing as well.
        errors = [e for e in errors if e["type"] != "missing" or e["loc"][-1] not in meant]
        mistakes += [_sentence(each, where, model, table) for each in errors]
        return None


def bare(where: str) -> str:
    """The name of a table without what leads on to a key."""
    return where.strip().removesuffix(":")


def as_meant(table: dict, model: type[BaseModel]) -> set[str]:
    """The keys of a table, misspelt ones as they were meant."""
    return {key if key in model.model_fields else closest(key, model.model_fields) or key for key in table}


def closest(name: str, names: Collection[str]) -> str | None:
    """The key of a table that was meant by another."""
    meant = _ELSEWHERE.get(name.lower(), name)
    if meant in names:
        return meant
    if meant in _HOMES:  # of another table: what looks like it here is something else
        return None
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=ALIKE)), None)


def not_among(what: str, got: Any, names: Collection[str]) -> str:
    close = next(iter(difflib.get_close_matches(str(got), names, n=1)), None)
    hint = f"; did you mean '{close}'?" if close else "."
    return f"Expected {what} to be one of {', '.join(names)}, got {'nothing' if got is None else repr(got)}{hint}"


def _sentence(error: Any, where: str, model: type[BaseModel], table: dict) -> str:
    """One of pydantic's errors in our form."""
    place = tuple(part for part in error["loc"] if part not in (LIST, RANGE))
    # A single number was made a list of one: its place in that list is not the reader's concern.
    if len(place) > 1 and isinstance(place[1], int) and not isinstance(table[place[0]], list):
        place = place[:1]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    got, context = error["input"], error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            return f"{where}has no key '{name}'; {_hint(name, model.model_fields, where)}".strip()
        case "missing":
            return f"Expected {where}{name}, got nothing; add it."
        case "value_error":
            return f"Expected {(where + name).strip()} to be {context['error']}."
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal" as bound:
            sign = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}[bound]
            return f"Expected {where}{name} {sign} {next(iter(context.values())):g}, got {got}."
        case "too_short":
            return f"Expected at least one value in {where}{name}, got none."
        case _:
            wanted = error["msg"].removeprefix("Input should be ")
            kind = wanted.removeprefix("a valid ").split()[0].rstrip(",")
            way_out = "; leave out the quotes" if kind in ("integer", "number") and _is_quoted_number(got) else ""
            return f"Expected {where}{name} to be {_KINDS.get(kind, wanted)}, got {got!r}{way_out}."


def _is_quoted_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def _hint(name: str, names: Collection[str], where: str) -> str:
    if (close := closest(name, names)) is not None:
        return f"did you mean '{close}'?"
    elsewhere = _ELSEWHERE.get(name.lower(), name)
    if elsewhere in _HOMES and f"of {where.strip()}" != _HOMES[elsewhere]:  # here it is of another kind
        return f"did you mean '{elsewhere}' {_HOMES[elsewhere]}?"
    return f"there are {', '.join(names)}."
