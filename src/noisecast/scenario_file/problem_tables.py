"""The tables [problem], one a kind; each builds its problem."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from noisecast.problems.datasets import BUNDLED, ReadOptions, bundled, load_file, load_test_file, split_by_content
from noisecast.problems.datasets.ratings import read_ratings, split_ratings_by_content
from noisecast.problems.datasets.text_encoder import TextKind
from noisecast.problems.linear import linear_model
from noisecast.problems.matrix_factorization import matrix_factorization
from noisecast.problems.problem import Problem
from noisecast.problems.quadratic import quadratic
from noisecast.problems.quartic import quartic
from noisecast.scenario_file.values import (
    LISTED,
    Count,
    FileName,
    Finite,
    NotNegative,
    Positive,
    Table,
    as_list,
    one_of,
)


class _NormalDraw(Table):
    normal_std: NotNegative
    insecure_seed: Annotated[int, Field(ge=0)]


def _start(value: Any) -> Any:
    # By hand: a union would report one mistake for each of its members.
    if isinstance(value, dict):
        return _NormalDraw.model_validate(value)
    values = as_list(value)
    if not values or not all(type(x) in (int, float) and math.isfinite(x) for x in values):
        raise ValueError(f"a finite number, a list of them or {{normal_std, insecure_seed}}, got {value}")
    return np.asarray(value, np.float64)


class Synthetic(Table):
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


class Quadratic(Synthetic):
    kind: Literal["quadratic"]

    def build(self, folder: Path) -> Problem:
        return quadratic(**self.arguments())


class Quartic(Synthetic):
    kind: Literal["quartic"]
    quartic_weight: Positive
    cubic_weight: Finite = 0.0

    def build(self, folder: Path) -> Problem:
        return quartic(**self.arguments(), quartic_weight=self.quartic_weight, cubic_weight=self.cubic_weight)


class Bundled(Table):
    kind: Literal["bundled"]
    name: Annotated[str, one_of(BUNDLED)]

    def build(self, folder: Path) -> Problem:
        return linear_model(*bundled(self.name))


class File(Table):
    kind: Literal["file"]
    path: FileName
    label: str = "label"
    label_separator: str | None = None
    label_names: FileName | None = None
    text: str | None = None
    columns: Annotated[list[str], *LISTED] | None = None
    features: TextKind = "term-frequency"
    vocabulary: FileName | None = None
    vocabulary_size: Count = 10_000
    max_tokens: Count | None = None
    bounds: FileName | None = None
    unit_rows: bool = False
    test: FileName | None = None
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


def _two(ends: list[float]) -> list[float]:
    if len(ends) != 2:
        raise ValueError(f"the lowest and the highest rating, got {ends}")
    return ends


class Factorization(Table):
    kind: Literal["factorization"]
    path: FileName
    num_users: Count
    num_items: Count
    public_init_seed: int
    dim: Count = 16
    rating_scale: Annotated[list[Finite], AfterValidator(_two)] = Field([1.0, 5.0])
    center: Finite | None = None
    init: Annotated[str, one_of(("normal", "truncated-normal"))] = "normal"
    init_std: Positive = 0.1
    half: bool = True
    test: FileName | None = None
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


ProblemTable: TypeAlias = Quadratic | Quartic | Bundled | File | Factorization
KINDS: dict[str, type[ProblemTable]] = {
    "quadratic": Quadratic,
    "quartic": Quartic,
    "bundled": Bundled,
    "file": File,
    "factorization": Factorization,
}
# Their examples are fresh at every step: there is no data set, and no epoch.
SYNTHETIC_KINDS = tuple(name for name, kind in KINDS.items() if issubclass(kind, Synthetic))
