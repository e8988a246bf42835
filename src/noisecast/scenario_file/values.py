"""What a single key may hold: a number in bounds, one or more of them, a range to draw from, a name among some."""

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag


class Table(BaseModel):
    """A TOML table: no keys but its own, no number as text."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)


@dataclass(frozen=True)
class LogUniform:
    """{log_uniform = [low, high]}: a value to be drawn, its logarithm uniform between theirs; 0 < low < high.

    >>> [LogUniform(0.01, 1.0).at(share) for share in (0.0, 0.5)]
    [0.01, 0.1]
    """

    low: float
    high: float

    def at(self, share: float) -> float:
        """The value that this share of all draws stays below; 0 <= share <= 1."""
        value = math.exp((1 - share) * math.log(self.low) + share * math.log(self.high))
        # Eight digits: the last ones of a logarithm differ between machines, and a scenario's id must not.
        return min(max(float(f"{value:.8g}"), self.low), self.high)


def as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def is_range(value: Any) -> bool:
    """Whether a raw value is meant as a range: nothing else is written as a table."""
    return isinstance(value, dict)


def one_of(names: Iterable[str]) -> AfterValidator:
    allowed = tuple(names)

    def check(name: str) -> str:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            raise ValueError(
                f"one of {', '.join(allowed)}, got '{name}'" + (f" (meant: '{close[0]}'?)" if close else "")
            )
        return name

    return AfterValidator(check)


def _file_name(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"the name of a file, got {value!r}")
    return value


def _distinct(values: list) -> list:
    if len(set(values)) < len(values):
        raise ValueError(f"distinct values, got {values}; leave out the repeated ones")
    return values


def _log_uniform(value: Any) -> LogUniform:
    ends = value.get("log_uniform")
    numbers = isinstance(ends, list) and len(ends) == 2 and all(type(end) in (int, float) for end in ends)
    if len(value) == 1 and numbers and 0 < ends[0] < ends[1] < math.inf:
        return LogUniform(*(float(end) for end in ends))
    raise ValueError(f"a number, a list or a range {{log_uniform = [low, high]}} with 0 < low < high, got {value}")


LISTED = (Field(min_length=1), AfterValidator(_distinct))
# Tags, so that a mistake is reported of the form that was meant, not of each in turn.
LIST, RANGE = "list", "range"
_meant = Discriminator(lambda value: RANGE if is_range(value) else LIST)
_Range: TypeAlias = Annotated[LogUniform, BeforeValidator(_log_uniform), Tag(RANGE)]

FileName: TypeAlias = Annotated[str, BeforeValidator(_file_name)]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
OneOrMorePositive: TypeAlias = Annotated[list[Positive], BeforeValidator(as_list), *LISTED]
_OneOrMoreNotNegative: TypeAlias = Annotated[list[NotNegative], BeforeValidator(as_list), *LISTED]

Values: TypeAlias = list[float] | LogUniform
PositiveValues: TypeAlias = Annotated[Annotated[OneOrMorePositive, Tag(LIST)] | _Range, _meant]
NotNegativeValues: TypeAlias = Annotated[Annotated[_OneOrMoreNotNegative, Tag(LIST)] | _Range, _meant]
