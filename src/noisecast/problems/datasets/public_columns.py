"""What everybody knows of a table's columns: bounds of numbers, values of categories. It comes from a file of its own.

The extremes of a private column, and which categories its rows name, are private: they are never read off the rows.
"""

import json
import re
import sys
import tomllib
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from noisecast.problems.datasets.columns import TRUTHS, column_of, numeric_column
from noisecast.problems.datasets.contents import decode, read_bytes
from noisecast.problems.datasets.dataset import DataError, first_repeated, label_name, listed
from noisecast.problems.datasets.tables import read_table

ANY_OTHER = "*"  # the value that stands for all that are not listed


class PublicColumns(NamedTuple):
    """By column name.

    Args:
      bounds: of columns of numbers, (low, high).   values: of columns of categories, as `category_name` writes them.
    """

    bounds: Mapping[str, tuple[float, float]]
    values: Mapping[str, tuple[str, ...]]


def category_name(cell) -> str:
    """A cell as a category, alike whatever file it comes from: stripped, missing or NaN as "", letters composed (NFC),
    true and false in small letters, decimals and dates without zeros that say nothing.

    >>> [category_name(cell) for cell in (" Oslo ", True, "FALSE", 2.0, "0.50", None, "007")]
    ['Oslo', 'true', 'false', '2', '0.5', '', '007']
    >>> category_name(pd.Timestamp("2020-01-01")), category_name("Sa\u0303o Paulo") == "S\u00e3o Paulo"
    ('2020-01-01', True)
    """
    name = unicodedata.normalize("NFC", label_name(cell))
    if name.lower() in TRUTHS:
        return name.lower()
    return re.sub(r"^([+-]?\d+\.\d*?[1-9])0+$|^(\d{4}-\d\d-\d\d)[ T]00:00:00$", r"\1\2", name)


def read_public_columns(path) -> PublicColumns:
    """TOML or JSON of `column = [low, high]` or `column = ["value", "value"]`; or CSV of the columns column, low, high.

    Raises: DataError naming the file and the column.
    """
    path = Path(path)
    bounds, values = {}, {}
    for column, told in (_bounds_of_table(path) if path.suffix.lower() == ".csv" else _parsed(path)).items():
        where = f" in {path}"
        if isinstance(told, list) and told and all(isinstance(each, str) for each in told):
            values[column] = check_values(column, told, where)
        elif isinstance(told, list) and len(told) == 2 and all(type(each) in (int, float) for each in told):
            bounds[column] = check_bounds(column, told[0], told[1], where)
        else:
            raise DataError(
                f"Expected '{column} = [low, high]' or '{column} = [\"value\", \"value\"]' in {path}, got {told!r}."
            )
    return PublicColumns(bounds, values)


def check_bounds(column: str, low: float, high: float, where: str = "") -> tuple[float, float]:
    """Both as floats. Raises: DataError."""
    # Whole numbers have no largest one, floats have.
    if not (-sys.float_info.max <= low < high and high - low <= sys.float_info.max):
        raise DataError(f"Expected finite bounds low < high for column '{column}'{where}, got [{low}, {high}].")
    return float(low), float(high)


def check_values(column: str, values: Sequence[str], where: str = "") -> tuple[str, ...]:
    """The names of categories, each once. Raises: DataError."""
    names = tuple(map(category_name, values))
    if not names:
        raise DataError(f"Expected a value or more for column '{column}'{where}, got none.")
    if (repeated := first_repeated(names)) is not None:
        raise DataError(f"Expected every value of column '{column}'{where} once, got '{repeated}' twice; remove one.")
    return names


def category_places(frame: pd.DataFrame, column: str, values: Sequence[str], source: str) -> np.ndarray:
    """Which of the values each row has; (n,) integers. DataError for a row that has none of them.

    >>> category_places(pd.DataFrame({"city": ["Rome", "Bonn", "Rome"]}), "city", ("*", "Rome"), "a.csv").tolist()
    [1, 0, 1]
    """
    try:
        codes, distinct = pd.factorize(column_of(frame, column, source), use_na_sentinel=False)
    except TypeError:  # a list in a cell
        raise DataError(f"Expected categories in column '{column}' of {source}, got cells of several values.") from None
    place_of = {name: place for place, name in enumerate(values)}
    other = place_of.get(ANY_OTHER, -1)
    places = np.array([place_of.get(category_name(cell), other) for cell in distinct], np.int64)[codes]
    if (places < 0).any():
        row = int((places < 0).argmax())
        name = category_name(distinct[codes[row]])
        told = f"'{name[:40]}'" if name else "nothing"
        raise DataError(
            f"Expected one of the {len(values)} public values of column '{column}' in row {row + 1} of {source}, got "
            f'{told}; training wants "{name[:40]}" among the values in the file of bounds, or "*" for all others.'
        )
    return places


def _bounds_of_table(path: Path) -> dict[str, Any]:
    frame = read_table(path)
    if set(frame.columns) != {"column", "low", "high"}:
        raise DataError(f"Expected the columns column, low, high in {path}, got {listed(list(frame.columns))}.")
    low, high = (numeric_column(frame, name, str(path)) for name in ("low", "high"))
    if repeated := first_repeated(frame["column"].tolist()):
        raise DataError(f"Expected every column of {path} once, got '{repeated}' twice.")
    return {str(column): pair for column, *pair in zip(frame["column"], low.tolist(), high.tolist())}


def _parsed(path: Path) -> dict[str, Any]:
    parsers = {".toml": tomllib.loads, ".json": json.loads}
    if path.suffix.lower() not in parsers:
        raise DataError(f"Expected bounds as .toml, .json or .csv, got {path}.")
    text = decode(read_bytes(path), path)
    try:
        found = parsers[path.suffix.lower()](text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 1,000 brackets
        raise DataError(f"{path} cannot be read as {path.suffix[1:].upper()}: {error}.") from None
    if not isinstance(found, dict) or not found:
        raise DataError(f"Expected 'column = [low, high]' in {path}, got {type(found).__name__} without entries.")
    return found
