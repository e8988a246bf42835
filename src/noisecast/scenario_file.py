"""A scenario file: a TOML that a person types, checked whole, and the question that it asks of the runners.

num_steps = 1000
target_delta = 1e-5
num_seeds = 8                # or insecure_seeds = [0, 1, 2]
num_records = 20             # evenly spaced, or record_at = [0, 10, 1000]
runners = ["training", "sde", "closed_form"]   # these, or "moments" as well: the forecast

[problem]                    # kind = "quadratic", "quartic", "file", "bundled" or "factorization"
kind = "quadratic"
hessian_diag = [2.0, 1.0]    # or num_params = 1024 with hessian_value = 0.1
initial_params = 0.1         # a number, a list, or {normal_std = 1.56, insecure_seed = 0}
example_noise_std = 0.1
degrees_of_freedom = inf

[mechanism]
noise_multiplier = [0.5, 1]  # a number or a list; or target_epsilon
l2_clip_norm = 1.0
batch_size = 64
sampler = "stream"           # of data sets: "poisson" (the default), "fixed-size" or "shuffled"

[[optimizer]]
name = "dp-sgd"
learning_rate = 0.1          # a number or a list
l2_clip_norm = 0.5           # where it differs from the mechanism's
"""

import difflib
import itertools
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from noisecast.optimizers import OPTIMIZERS, Optimizer
from noisecast.privacy.accounting import calibrate_noise_multiplier
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.sampling import FixedSize, Sampler, Stream, sampler_named
from noisecast.problems.datasets import BUNDLED, ReadOptions, bundled, load_file, load_test_file, split_by_content
from noisecast.problems.datasets.encoders import TextKind
from noisecast.problems.datasets.ratings import read_ratings, split_ratings_by_content
from noisecast.problems.linear import linear_model
from noisecast.problems.matrix_factorization import matrix_factorization
from noisecast.problems.problem import Problem
from noisecast.problems.quadratic import quadratic
from noisecast.problems.quartic import quartic
from noisecast.question import Question
from noisecast.runners import RUNNERS, Moments
from noisecast.scenario import Scenario

# Each optimizer lives in a file of its own, dp_sign_sgd.py, and is typed by that name: dp-sign-sgd.
OPTIMIZER_NAMES = {each.__module__.rsplit(".", 1)[-1].replace("_", "-"): each for each in OPTIMIZERS}
RUNNER_NAMES = {runner.name: runner for runner in (*RUNNERS, Moments())}

_T = TypeVar("_T", bound=BaseModel)


class ScenarioFileError(ValueError):
    """Every mistake of a scenario file at once, one sentence each."""

    def __init__(self, mistakes: Iterable[str]):
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self.mistakes))


def read_scenario_file(path: str | Path) -> Question:
    """Read and check a scenario file; paths in it are relative to it.

    Raises:
      ScenarioFileError: with every mistake; those that only the data can show come when all others are mended.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "scenario.toml")
    >>> _ = file.write_text('''
    ... num_steps = 100
    ... [problem]
    ... kind = "quadratic"
    ... hessian_diag = [2.0, 1.0]
    ... initial_params = 0.1
    ... example_noise_std = 0.1
    ... [mechanism]
    ... noise_multiplier = [0.5, 1.0]
    ... l2_clip_norm = 1.0
    ... batch_size = 64
    ... [[optimizer]]
    ... name = "dp-sgd"
    ... learning_rate = 0.1
    ... ''')
    >>> [scenario.mechanism.noise_multiplier for scenario in read_scenario_file(file).scenarios]
    [0.5, 1.0]
    """
    path = Path(path)
    tables = _read_toml(path)
    mistakes: list[str] = []
    settings = _checked(_Settings, {k: v for k, v in tables.items() if k not in _SECTIONS}, "", mistakes)
    problem = _checked_problem(tables.get("problem"), mistakes)
    mechanism = _checked(_Mechanism, tables.get("mechanism"), "[mechanism] ", mistakes)
    optimizers = _checked_optimizers(tables.get("optimizer"), mistakes)
    mistakes += _contradictions(tables)
    mistakes += _mismatches(settings, problem, mechanism)
    if mistakes or settings is None or problem is None or mechanism is None:
        raise ScenarioFileError(f"{path}: {mistake}" for mistake in mistakes)
    try:
        scenarios = tuple(_scenarios(settings, problem.build(path.parent), mechanism, optimizers))
    except ValueError as error:
        raise ScenarioFileError([f"{path}: {error}"]) from None
    return Question(
        scenarios=scenarios,
        runners=tuple(RUNNER_NAMES[name] for name in settings.runners),
        num_seeds=settings.num_seeds,
        insecure_seeds=None if settings.insecure_seeds is None else tuple(settings.insecure_seeds),
        record_at=settings.steps_recorded(),
    )


# --- What may be written ---------------------------------------------------------------------------------------------


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _distinct(values: list) -> list:
    if len(set(values)) < len(values):
        raise ValueError(f"distinct values, got {values}; leave out the repeated ones")
    return values


def _one_of(names: Iterable[str]) -> AfterValidator:
    allowed = tuple(names)

    def check(name: str) -> str:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            raise ValueError(
                f"one of {', '.join(allowed)}, got '{name}'" + (f" (meant: '{close[0]}'?)" if close else "")
            )
        return name

    return AfterValidator(check)


Count: TypeAlias = Annotated[int, Field(ge=1)]
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_listed = (Field(min_length=1), AfterValidator(_distinct))
OneOrMorePositive: TypeAlias = Annotated[list[Positive], BeforeValidator(_as_list), *_listed]
OneOrMoreNotNegative: TypeAlias = Annotated[list[NotNegative], BeforeValidator(_as_list), *_listed]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Settings(_Table):
    num_steps: Count
    target_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    num_seeds: Count = 1
    insecure_seeds: Annotated[list[int], *_listed] | None = None
    num_records: Count = 20
    record_at: Annotated[list[Annotated[int, Field(ge=0)]], *_listed] | None = None
    runners: Annotated[list[Annotated[str, _one_of(RUNNER_NAMES)]], *_listed] = [runner.name for runner in RUNNERS]

    def steps_recorded(self) -> tuple[int, ...]:
        """`record_at`, or num_records + 1 evenly spaced steps from 0 to num_steps."""
        if self.record_at is not None:
            return tuple(sorted(self.record_at))
        return tuple(np.unique(np.linspace(0, self.num_steps, self.num_records + 1).round().astype(int)).tolist())


class _NormalDraw(_Table):
    normal_std: NotNegative
    insecure_seed: Annotated[int, Field(ge=0)]


def _start(value: Any) -> Any:
    # By hand: a union would report one mistake for each of its members.
    if isinstance(value, dict):
        return _NormalDraw.model_validate(value)
    values = _as_list(value)
    if not values or not all(type(x) in (int, float) and math.isfinite(x) for x in values):
        raise ValueError(f"a finite number, a list of them or {{normal_std, insecure_seed}}, got {value}")
    return np.asarray(value, np.float64)


class _Synthetic(_Table):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    hessian_diag: Annotated[list[Finite], Field(min_length=1)] | None = None
    num_params: Count | None = None
    hessian_value: Finite | None = None
    initial_params: Annotated[Any, BeforeValidator(_start)]
    example_noise_std: NotNegative
    degrees_of_freedom: Annotated[float, Field(gt=0)] = math.inf

    def arguments(self) -> dict[str, Any]:
        if self.hessian_diag is not None:
            diag = np.array(self.hessian_diag)
        else:
            assert self.num_params is not None and self.hessian_value is not None
            diag = np.full(self.num_params, self.hessian_value)
        start = self.initial_params
        if isinstance(start, _NormalDraw):
            start = start.normal_std * np.random.default_rng(start.insecure_seed).standard_normal(len(diag))
        noise = {"example_noise_std": self.example_noise_std, "degrees_of_freedom": self.degrees_of_freedom}
        return {"hessian_diag": diag, "initial_params": start, **noise}


class _Quadratic(_Synthetic):
    kind: Literal["quadratic"]

    def build(self, folder: Path) -> Problem:
        return quadratic(**self.arguments())


class _Quartic(_Synthetic):
    kind: Literal["quartic"]
    quartic_weight: Positive
    cubic_weight: Finite = 0.0

    def build(self, folder: Path) -> Problem:
        return quartic(**self.arguments(), quartic_weight=self.quartic_weight, cubic_weight=self.cubic_weight)


class _Bundled(_Table):
    kind: Literal["bundled"]
    name: Annotated[str, _one_of(BUNDLED)]

    def build(self, folder: Path) -> Problem:
        return linear_model(*bundled(self.name))


class _File(_Table):
    kind: Literal["file"]
    path: str
    label: str = "label"
    label_separator: str | None = None
    label_names: str | None = None
    text: str | None = None
    columns: Annotated[list[str], *_listed] | None = None
    features: TextKind = "term-frequency"
    vocabulary: str | None = None
    vocabulary_size: Count = 10_000
    max_tokens: Count | None = None
    bounds: str | None = None
    unit_rows: bool = False
    test: str | None = None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None

    def build(self, folder: Path) -> Problem:
        options = ReadOptions(
            label=self.label,
            label_separator=self.label_separator,
            label_names=None if self.label_names is None else folder / self.label_names,
            text=self.text,
            columns=None if self.columns is None else tuple(self.columns),
            text_kind=self.features,
            vocabulary=None if self.vocabulary is None else folder / self.vocabulary,
            vocabulary_size=self.vocabulary_size,
            max_tokens=self.max_tokens,
            bounds=None if self.bounds is None else folder / self.bounds,
            unit_rows=self.unit_rows,
        )
        data, encoder = load_file(folder / self.path, options)
        if self.test is not None:
            how = {"label": self.label, "label_separator": self.label_separator}
            return linear_model(data, load_test_file(folder / self.test, encoder, data.label_names, **how))
        if self.test_fraction is not None:
            train, test = split_by_content(data, self.test_fraction)
            return linear_model(data.rows(train), data.rows(test))
        return linear_model(data)


class _Factorization(_Table):
    kind: Literal["factorization"]
    path: str
    num_users: Count
    num_items: Count
    public_init_seed: int
    dim: Count = 16
    rating_scale: Annotated[list[Finite], Field(min_length=2, max_length=2)] = [1.0, 5.0]
    center: Finite | None = None
    init: Annotated[str, _one_of(("normal", "truncated-normal"))] = "normal"
    init_std: Positive = 0.1
    half: bool = True
    test: str | None = None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None

    def build(self, folder: Path) -> Problem:
        sizes = {"num_users": self.num_users, "num_items": self.num_items}
        train, test = read_ratings(folder / self.path, **sizes), None
        if self.test is not None:
            test = read_ratings(folder / self.test, **sizes)
        elif self.test_fraction is not None:
            train, test = split_ratings_by_content(train, self.test_fraction)
        low, high = self.rating_scale
        init: Any = self.init
        return matrix_factorization(
            train,
            test,
            public_init_seed=self.public_init_seed,
            dim=self.dim,
            rating_scale=(low, high),
            center=self.center,
            init=init,
            init_std=self.init_std,
            half=self.half,
            name=Path(self.path).name,
        )


class _Mechanism(_Table):
    noise_multiplier: OneOrMoreNotNegative | None = None
    target_epsilon: OneOrMorePositive | None = None
    l2_clip_norm: Positive = 1.0
    batch_size: Positive
    sampler: Annotated[str, _one_of(("poisson", "fixed-size", "shuffled", "stream"))] | None = None
    adjacency: Annotated[str, _one_of(("add-or-remove-one", "replace-one"))] | None = None


class _Optimizer(_Table):
    name: Annotated[str, _one_of(OPTIMIZER_NAMES)]
    learning_rate: OneOrMorePositive
    l2_clip_norm: Positive | None = None
    b1: Annotated[float, Field(ge=0, lt=1)] | None = None
    b2: Annotated[float, Field(ge=0, lt=1)] | None = None
    eps: Positive | None = None

    @model_validator(mode="after")
    def _its_own_settings(self) -> Self:
        own = {field.name for field in fields(OPTIMIZER_NAMES[self.name])}
        if strangers := sorted(self._given().keys() - own):
            raise ValueError(f"without {', '.join(strangers)}, which {self.name} does not have")
        return self

    def _given(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("b1", "b2", "eps") if getattr(self, name) is not None}

    def build(self, learning_rate: float) -> Optimizer:
        given = self._given()
        return OPTIMIZER_NAMES[self.name](learning_rate=learning_rate, **given)


_ProblemTable: TypeAlias = _Quadratic | _Quartic | _Bundled | _File | _Factorization
_KINDS = {
    "quadratic": _Quadratic,
    "quartic": _Quartic,
    "bundled": _Bundled,
    "file": _File,
    "factorization": _Factorization,
}
_SECTIONS = ("problem", "mechanism", "optimizer")


# --- Every mistake as a sentence -------------------------------------------------------------------------------------


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ScenarioFileError([f"There is no scenario file {path}; check the path."]) from None
    except OSError as error:
        raise ScenarioFileError([f"{path} cannot be read: {error.strerror}."]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioFileError([f"{path} is not a TOML file: {str(error).rstrip('.')}."]) from None


def _checked(model: type[_T], table: Any, where: str, mistakes: list[str]) -> _T | None:
    """`table` as a `model`, or None after adding to `mistakes`; `where` names the table, as "[problem] "."""
    if not isinstance(table, dict):
        mistakes.append(f"Expected a table {where.strip()}, got {'none' if table is None else repr(table)}; add one.")
        return None
    try:
        return model.model_validate(table)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        misspelt = {_closest(str(e["loc"][-1]), model) for e in errors if e["type"] == "extra_forbidden"}
        # One mistake, not two: a misspelt key is not missing as well.
        errors = [e for e in errors if e["type"] != "missing" or e["loc"][-1] not in misspelt]
        mistakes += [_sentence(each, where, model, table) for each in errors]
        return None


def _closest(name: str, model: type[BaseModel]) -> str | None:
    return next(iter(difflib.get_close_matches(name, model.model_fields, n=1)), None)


def _checked_problem(table: Any, mistakes: list[str]) -> _ProblemTable | None:
    kind = table.get("kind") if isinstance(table, dict) else None
    if isinstance(table, dict) and kind not in _KINDS:
        mistakes.append(_not_among("[problem] kind", kind, _KINDS))
        return None
    return _checked(_KINDS.get(kind, _Quadratic), table, "[problem] ", mistakes)  # type: ignore[arg-type]


def _checked_optimizers(tables: Any, mistakes: list[str]) -> list[_Optimizer]:
    if not isinstance(tables, list) or not tables:
        mistakes.append("Expected one or more tables [[optimizer]], got none; add one.")
        return []
    checked = []
    for number, table in enumerate(tables, start=1):
        where = f"[[optimizer]] number {number}: " if len(tables) > 1 else "[[optimizer]] "
        checked.append(_checked(_Optimizer, table, where, mistakes))
    return [optimizer for optimizer in checked if optimizer is not None]


def _sentence(error: Any, where: str, model: type[BaseModel], table: dict) -> str:
    """One of pydantic's errors in our form: expected, got, way out."""
    # A single number was made a list of one: its place in that list is not the reader's concern.
    place = error["loc"]
    if place and not isinstance(table.get(place[0]), list | dict):
        place = place[:1]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    got, context = error["input"], error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            close = _closest(name, model)
            hint = f"did you mean '{close}'?" if close else f"there are {', '.join(model.model_fields)}."
            return f"{where}has no key '{name}'; {hint}".strip()
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
            wanted = error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
            return f"Expected {where}{name} to be of the kind '{wanted}', got {got!r}."


def _not_among(what: str, got: Any, names: Iterable[str]) -> str:
    allowed = tuple(names)
    close = difflib.get_close_matches(str(got), allowed, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else "."
    return f"Expected {what} to be one of {', '.join(allowed)}, got {'nothing' if got is None else repr(got)}{hint}"


def _contradictions(tables: dict[str, Any]) -> list[str]:
    """Keys that exclude each other: looked up in the raw tables, so that no other mistake can hide them."""
    problem, mechanism = (t if isinstance(t, dict) else {} for t in (tables.get("problem"), tables.get("mechanism")))
    found = [
        _both(tables, "", "num_seeds", "insecure_seeds"),
        _both(tables, "", "num_records", "record_at"),
        _both(problem, "[problem] ", "hessian_diag", "hessian_value"),
        _both(problem, "[problem] ", "test", "test_fraction"),
        _both(mechanism, "[mechanism] ", "noise_multiplier", "target_epsilon"),
    ]
    if mechanism and not mechanism.keys() & {"noise_multiplier", "target_epsilon"}:
        found.append("Expected [mechanism] noise_multiplier or target_epsilon, got neither; add one.")
    if problem.get("kind") in ("quadratic", "quartic") and "hessian_diag" not in problem:
        absent = [name for name in ("num_params", "hessian_value") if name not in problem]
        if absent:
            found.append(
                "Expected [problem] hessian_diag, or num_params with hessian_value, "
                f"got no {' and no '.join(absent)}; add what is missing."
            )
    return [sentence for sentence in found if sentence is not None]


def _both(table: dict, where: str, one: str, other: str) -> str | None:
    if one in table and other in table:
        return f"Expected {where}{one} or {other}, got both; leave one out."
    return None


def _mismatches(settings: _Settings | None, problem: _ProblemTable | None, mechanism: _Mechanism | None) -> list[str]:
    """What is right by itself and wrong together."""
    found = []
    if settings is not None and settings.record_at is not None and max(settings.record_at) > settings.num_steps:
        found.append(f"Expected record_at <= num_steps = {settings.num_steps}, got {max(settings.record_at)}.")
    if isinstance(problem, _Synthetic) and problem.hessian_diag is not None:
        given = problem.initial_params
        if isinstance(given, np.ndarray) and given.ndim and len(given) != len(problem.hessian_diag):
            found.append(
                f"Expected [problem] initial_params with {len(problem.hessian_diag)} numbers, as many as hessian_diag, "
                f"got {len(given)}."
            )
    if problem is None or mechanism is None or mechanism.sampler is None:
        return found
    if isinstance(problem, _Synthetic) != (mechanism.sampler == "stream"):
        means = "fresh examples at every step" if isinstance(problem, _Synthetic) else "the rows of a data set"
        use = "stream" if isinstance(problem, _Synthetic) else "poisson, fixed-size or shuffled"
        found.append(
            f"Expected [mechanism] sampler {use}, since a {problem.kind} problem has {means}, got {mechanism.sampler}."
        )
    return found


# --- From tables to scenarios ----------------------------------------------------------------------------------------


def _scenarios(
    settings: _Settings, problem: Problem, table: _Mechanism, optimizers: Sequence[_Optimizer]
) -> Iterable[Scenario]:
    """Every optimizer and learning rate at every noise level; the noise level turns slowest."""
    sampler = _sampler(table, problem)
    adjacency = Adjacency.ADD_OR_REMOVE_ONE
    if table.adjacency == "replace-one" or (table.adjacency is None and isinstance(sampler, FixedSize)):
        adjacency = Adjacency.REPLACE_ONE
    base = SampledGaussian(noise_multiplier=0.0, l2_clip_norm=table.l2_clip_norm, sampler=sampler, adjacency=adjacency)
    if table.target_epsilon is None:
        mechanisms = [base.with_noise_multiplier(z) for z in table.noise_multiplier or ()]
    else:
        budget = {"target_delta": settings.target_delta, "num_steps": settings.num_steps}
        mechanisms = [calibrate_noise_multiplier(base, target_epsilon=e, **budget) for e in table.target_epsilon]
    for mechanism, optimizer in itertools.product(mechanisms, optimizers):
        for learning_rate in optimizer.learning_rate:
            yield Scenario(
                problem=problem,
                mechanism=replace(mechanism, l2_clip_norm=optimizer.l2_clip_norm or table.l2_clip_norm),
                optimizer=optimizer.build(learning_rate),
                num_steps=settings.num_steps,
                target_delta=settings.target_delta,
            )


def _sampler(table: _Mechanism, problem: Problem) -> Sampler:
    size, num_examples = table.batch_size, problem.num_examples
    if num_examples is None:
        return Stream(int(size))
    return sampler_named(table.sampler or "poisson", size, num_examples)
