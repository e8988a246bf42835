"""The columns of a table as numbers or texts; one sentence for the first cell that is not."""

import re
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches

import numpy as np
import pandas as pd

from noisecast.problems.datasets.dataset import MOST_LISTED, DataError, first_repeated, listed

TRUTHS = {"true": 1.0, "false": 0.0}
MOST_COLUMNS = 50_000  # of a table: each has a name, and takes memory beside its cells
IF_TEXT = (  # where numbers are expected in a column
    'give its public values in the file of bounds ({column} = ["this", "that"]), leave it out by naming the columns to '
    "use, or name the text column if the file's examples are texts"
)


def as_numbers(cells: pd.Series) -> np.ndarray:
    """(n,) float64, NaN where a cell is no number; of floats, themselves."""
    if isinstance(cells.dtype, np.dtype) and cells.dtype.kind == "f":
        return cells.to_numpy()
    return pd.Series(pd.to_numeric(cells, errors="coerce")).to_numpy(dtype=np.float64, na_value=np.nan)


def with_rows(frame: pd.DataFrame, source) -> pd.DataFrame:
    """The frame, or a DataError if it has no row."""
    if not len(frame):
        raise DataError(f"{source} has a header ({listed(list(frame.columns))}) but no rows.")
    return frame


def check_columns(names: list[str], path) -> None:
    """Raises: DataError for a name that is there twice, or too many of them."""
    if len(names) > MOST_COLUMNS:
        raise too_wide(len(names), path)
    repeated = first_repeated(names)
    if repeated is not None:
        raise DataError(f"Expected every column of {path} once, got '{repeated}' twice; rename one.")


def too_wide(num_columns: int, path) -> DataError:
    """The sentence for a table with more than MOST_COLUMNS."""
    return DataError(
        f"Expected at most {MOST_COLUMNS:,} columns in {path}, got {num_columns:,}; save so many features as a matrix "
        "(.npz or .svm)."
    )


def check_known(wanted: Sequence[str], columns: Collection[str], source) -> None:
    """Raises: DataError that names every column wanted that is not there, and lists those there are."""
    missing = [name for name in dict.fromkeys(wanted) if name not in columns]
    if not missing:
        return
    names = "', '".join(missing)
    expected = f"a column '{names}'" if len(missing) == 1 else f"columns '{names}'"
    there = [str(name) for name in columns]
    told = f"Expected {expected} in {source}, got the columns {listed(there)}."
    close = get_close_matches(missing[0], there, n=1)
    if close:
        told += f" Is '{close[0]}' meant?"
    elif len(there) > MOST_LISTED:  # labels often come last
        told += f" The last is '{there[-1][:40]}'."
    separators = [separator for separator in ";|\t" if any(separator in str(name) for name in columns)]
    if separators:
        told += (
            f" Its cells look separated by {separators[0]!r}; put quotes around names with other separators in them, "
            "or save it with commas."
        )
    raise DataError(told)


def column_of(frame: pd.DataFrame, column: str, source: str) -> pd.Series:
    """A column, or a DataError that lists the columns there are."""
    check_known([column], frame.columns, source)
    return pd.Series(frame[column])


def numeric_column(
    frame: pd.DataFrame, column: str, source: str, rows_before: int = 0, *, if_text: str = IF_TEXT
) -> np.ndarray:
    """A column as (n,) floats; DataError naming the first row whose cell is missing, not a number or not finite.

    True and false, in letters of any case, are 1 and 0. The frame's first row is number rows_before + 1 of its file.
    What to do about a cell of text is said by `if_text`.

    >>> numeric_column(pd.DataFrame({"age": ["1", " 2.5"], "is_new": ["true", "False"]}), "age", "a.csv")
    array([1. , 2.5])
    >>> numeric_column(pd.DataFrame({"age": ["1", " 2.5"], "is_new": ["true", "False"]}), "is_new", "a.csv")
    array([1., 0.])
    """
    cells = column_of(frame, column, source)
    if pd.api.types.is_datetime64_any_dtype(cells) or pd.api.types.is_timedelta64_dtype(cells):
        raise DataError(f"Expected numbers in column '{column}' of {source}, got dates; leave the column out.")
    try:
        values = as_numbers(cells)
    except TypeError:
        raise DataError(f"Expected numbers in column '{column}' of {source}, got {cells.iloc[0]!r} in row 1.") from None
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size and not pd.api.types.is_float_dtype(cells):
        truths = [TRUTHS.get(str(cell).strip().lower(), np.nan) for cell in cells.iloc[bad]]
        values = values.copy()
        values[bad] = np.where(np.isnan(truths), values[bad], truths)
        bad = np.flatnonzero(~np.isfinite(values))
    if not bad.size:
        return values
    row, cell = rows_before + bad[0] + 1, cells.iloc[bad[0]]
    where = f"in row {row} of column '{column}' of {source}"
    if cell is None or cell is pd.NA or not str(cell).strip():
        raise DataError(f"Expected a number, got nothing {where}; fill it in or leave the row out.")
    try:
        is_number = not np.isfinite(float(cell))  # nan and inf are; of a finite one pandas would have made a number
    except (TypeError, ValueError):
        is_number = False
    if re.fullmatch(r"\s*[+-]?\d+,\d+\s*", str(cell)):
        raise DataError(f"Expected a number, got '{cell}' {where}; write decimals with a point.")
    if not is_number:
        raise DataError(f"Expected a number, got '{str(cell)[:40]}' {where}; {if_text.format(column=column)}.")
    raise DataError(f"Expected a finite number, got {str(cell)[:40]} {where}; mend it or leave the row out.")


def texts_of(frame: pd.DataFrame, column: str, source: str) -> Iterator[str]:
    """A column's texts one by one (a missing one is empty); DataError naming the first row that is not text."""
    cells = column_of(frame, column, source)
    # A few at a time: as Python's objects all of them would take the file's size once more.
    for begin in range(0, len(cells), 1024):
        for row, cell in enumerate(cells.iloc[begin : begin + 1024].tolist(), start=begin + 1):
            # Only a float is asked whether it is NaN: of a list, another kind of Parquet cell, it has no one answer.
            if cell is None or cell is pd.NA or (isinstance(cell, float) and cell != cell):
                yield ""
            elif isinstance(cell, str):
                yield cell
            else:
                raise DataError(f"Expected text in column '{column}' of {source}, got {cell!r} in row {row}.")
