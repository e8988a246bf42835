"""What is right by itself and wrong together, and what only a sweep may say.

Looked up in the raw tables, so that no other mistake can hide it.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from noisecast.problems.datasets.splits import ROWS_MOVE
from noisecast.scenario_file.mistakes import as_meant, bare
from noisecast.scenario_file.problem_tables import KINDS, SYNTHETIC_KINDS, Quadratic
from noisecast.scenario_file.tables import OPTIMIZER_NAMES, OWN_SETTINGS, SAMPLERS, MechanismTable, Settings
from noisecast.scenario_file.values import as_list, is_range

Tables = dict[str, Any]
SWEEP = "use noisecast sweep."
RANGEABLE = ("learning_rate", "l2_clip_norm", "noise_multiplier")


def located(section: str, tables: Tables) -> list[tuple[str, Any]]:
    """The tables of a section that may stand once or several times, each with its name, as "[problem] "."""
    match tables.get(section):
        case None:
            return []
        case [only]:
            return [(f"[[{section}]] ", only)]
        case list(several):
            return [(f"[[{section}]] number {number}: ", table) for number, table in enumerate(several, start=1)]
        case table:
            return [(f"[{section}] ", table)]


def contradictions(tables: Tables) -> Iterator[str]:
    """Keys that exclude each other or need each other, and values that do not fit together."""
    yield from _settings_contradictions(tables)
    for where, mechanism in _dicts("mechanism", tables):
        yield from _both(mechanism, where, "noise_multiplier", "target_epsilon")
        if not as_meant(mechanism, MechanismTable) & {"noise_multiplier", "target_epsilon"}:
            yield f"Expected {where}noise_multiplier or target_epsilon, got neither; add one."
    for where, problem in _dicts("problem", tables):
        yield from _both(problem, where, "hessian_diag", "hessian_value")
        yield from _both(problem, where, "test", "test_fraction")
        if problem.get("kind") in SYNTHETIC_KINDS:
            yield from _synthetic_contradictions(tables, where, problem)
        for _, mechanism in _dicts("mechanism", tables):
            yield from _sampler_mismatches(problem, mechanism)
            yield from _rows_that_move(where, problem, mechanism)
    for where, optimizer in _dicts("optimizer", tables):
        yield from _settings_of_other_optimizers(where, optimizer)
    yield from _draws_without_ranges(tables) if "draws" in tables else _ranges_without_draws(tables)


def beyond_a_scenario(tables: Tables) -> Iterator[str]:
    """What a sweep file may say and a scenario file may not: it has one problem and one batch size."""
    problems = tables.get("problem")
    if isinstance(problems, list) and len(problems) > 1:
        yield f"Expected one [problem] in a scenario file, got {len(problems)}; {SWEEP}"
    for where, mechanism in _dicts("mechanism", tables):
        values = mechanism.get("batch_size")
        if isinstance(values, list) and len(values) > 1:
            yield f"Expected one number for {where}batch_size in a scenario file, got {values}; {SWEEP}"
    for section in ("draws", "tuning"):
        if section in tables:
            yield f"Expected no table [{section}] in a scenario file, got one; {SWEEP}"


def _dicts(section: str, tables: Tables) -> list[tuple[str, dict]]:
    return [(where, table) for where, table in located(section, tables) if isinstance(table, dict)]


def _both(table: dict, where: str, one: str, other: str) -> Iterator[str]:
    if one in table and other in table:
        yield f"Expected {where}{one} or {other}, got both; leave one out."


def _settings_contradictions(tables: Tables) -> Iterator[str]:
    yield from _both(tables, "", "num_steps", "num_epochs")
    yield from _both(tables, "", "num_seeds", "insecure_seeds")
    yield from _both(tables, "", "num_records", "record_at")
    if not as_meant(tables, Settings) & {"num_steps", "num_epochs"}:
        yield "Expected num_steps, got nothing; add it, or num_epochs for a data set."
    if "record_last_epochs" in tables and "num_epochs" not in tables:
        yield "Expected num_epochs beside record_last_epochs, got none; give it in place of num_steps."
    for name in ("num_seeds", "insecure_seeds"):
        if "tuning" in tables and name in tables:
            yield f"Expected no {name} beside [tuning], since every trial is one run with secret seeds; leave it out."
    for one, limit in (("record_at", "num_steps"), ("record_last_epochs", "num_epochs")):
        given, most = as_list(tables.get(one, 0)), tables.get(limit)
        if type(most) is int and all(type(each) is int for each in given) and max(given, default=0) > most >= 1:
            yield f"Expected {one} <= {limit} = {most}, got {max(given)}."


def _synthetic_contradictions(tables: Tables, where: str, problem: dict) -> Iterator[str]:
    meant = as_meant(problem, Quadratic)
    absent = [name for name in ("num_params", "hessian_value") if name not in meant]
    if absent and "hessian_diag" not in meant:
        yield (
            f"Expected {where}hessian_diag, or num_params with hessian_value, "
            f"got no {' and no '.join(absent)}; add what is missing."
        )
    diag, start = problem.get("hessian_diag"), problem.get("initial_params")
    if isinstance(diag, list) and "num_params" in problem and problem["num_params"] != len(diag):
        yield (
            f"Expected {where}num_params = {len(diag)}, as many as hessian_diag has, or none beside it, "
            f"got {problem['num_params']}; leave it out."
        )
    if isinstance(diag, list) and isinstance(start, list) and len(start) != len(diag):
        yield f"Expected {where}initial_params with {len(diag)} numbers, as many as hessian_diag, got {len(start)}."
    if "num_epochs" in tables:
        yield (
            f"Expected num_steps, since the examples of a {problem['kind']} problem are fresh at every step and make "
            "no epochs, got num_epochs; replace it."
        )


def _sampler_mismatches(problem: dict, mechanism: dict) -> Iterator[str]:
    kind, sampler = problem.get("kind"), mechanism.get("sampler")
    if kind not in tuple(KINDS) or sampler not in SAMPLERS:
        return
    fresh = kind in SYNTHETIC_KINDS
    if fresh != (sampler == "stream"):
        use = "stream" if fresh else "poisson, fixed-size or shuffled"
        means = "fresh examples at every step" if fresh else "the rows of a data set"
        yield f"Expected [mechanism] sampler {use}, since a {kind} problem has {means}, got {sampler}."


def _rows_that_move(where: str, problem: dict, mechanism: dict) -> Iterator[str]:
    sampler, adjacency = mechanism.get("sampler"), mechanism.get("adjacency")
    replaced = adjacency == "replace-one" or (adjacency is None and sampler == "fixed-size")
    if "test_fraction" in problem and replaced:
        yield f"Expected {where}test with a guarantee for replaced records, got test_fraction: {ROWS_MOVE}"


def _settings_of_other_optimizers(where: str, optimizer: dict) -> Iterator[str]:
    name = optimizer.get("name")
    if name in tuple(OPTIMIZER_NAMES):
        own = {field.name for field in fields(OPTIMIZER_NAMES[name])}
        if strangers := [each for each in OWN_SETTINGS if each in optimizer and each not in own]:
            yield f"Expected {bare(where)} without {', '.join(strangers)}, which {name} does not have."


def _ranges_without_draws(tables: Tables) -> Iterator[str]:
    for section in ("mechanism", "optimizer"):
        for where, table in _dicts(section, tables):
            for name in (name for name in _ranges(table) if "log_uniform" in table[name]):  # another table is a mistake
                wanted = f"a number or a list for {where}{name}"
                yield f"Expected {wanted}, got a range; add [draws] with count and public_seed."


def _draws_without_ranges(tables: Tables) -> Iterator[str]:
    """Draws from lists alone would meet the same cell again and again."""
    shared = {name for _, table in _dicts("mechanism", tables) for name in _ranges(table)}
    for where, table in _dicts("optimizer", tables):
        # The mechanism's clip is not drawn for an optimizer that has its own.
        if not _ranges(table) and not shared - table.keys():
            yield (
                f"Expected a range {{log_uniform = [low, high]}} in {bare(where)} to draw from, "
                "got numbers and lists alone; give one, or leave out [draws] for the whole grid."
            )


def _ranges(table: Any) -> list[str]:
    return [name for name in RANGEABLE if is_range(table.get(name))] if isinstance(table, dict) else []
