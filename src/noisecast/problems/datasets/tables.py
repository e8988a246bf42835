"""Tables as users have them (CSV, TSV, Parquet, gzipped or not), strictly: what is odd is reported, not guessed at."""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from noisecast.files import MOST_TIMES, MOST_UNPACKED, is_bomb
from noisecast.problems.datasets.dataset import DataError, first_repeated, listed

DELIMITERS = {".csv": ",", ".tsv": "\t"}
BLOCK = 2**22  # bytes parsed at a time; a row that is longer needs a larger block
MAX_BLOCK = 2**31 - 1  # Arrow counts a block's bytes in 32 bits.


def file_suffix(path) -> str:
    """The suffix that says the format, in lower case and without `.gz`.

    >>> file_suffix("a/b.CSV.gz")
    '.csv'
    """
    name = str(path).lower().removesuffix(".gz")
    return Path(name).suffix


def existing_file(path) -> Path:
    """The path with ~ expanded; DataError if nothing is there, or a directory."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise DataError(f"Expected a file, got the directory {path}; name a file in it.")
    if not path.exists():
        raise DataError(f"There is no file {path}; check the path.")
    return path


def read_bytes(path) -> bytes:
    """A file's bytes, unpacked if it ends in `.gz`; DataError if it is missing, a directory, unreadable or empty."""
    path = existing_file(path)
    try:
        content = path.read_bytes()
        if path.suffix.lower() == ".gz":
            content = _unzipped(content, path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}); fetch or compress it again.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    if content.isspace() or not content:
        raise DataError(f"{path} is empty.")
    return content


def _unzipped(content: bytes, path: Path) -> bytes:
    most = max(MOST_UNPACKED, MOST_TIMES * len(content))
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        unpacked = file.read(most + 1)
    if len(unpacked) > most:
        raise DataError(f"{path} unpacks to more than {most / 2**20:,.0f} MiB, {MOST_TIMES} times itself; unpack it.")
    return unpacked


def decode(content: bytes, source) -> str:
    """UTF-8 text (a byte-order mark is dropped); DataError naming the first line that is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"Line {line} of {source} is not UTF-8 text; save the file as UTF-8.") from None


def read_table(path, *, is_number: Callable[[str], bool] | None = None) -> pd.DataFrame:
    """A CSV or TSV file with all cells as text (empty cells as ""), or a Parquet file with its own types.

    Args:
      path: ends in .csv, .tsv or .parquet, and perhaps .gz.
      is_number: which columns of a CSV or TSV file to hold as float64, which takes less memory than text; if a cell of
        them is not a finite number, all are text.

    Raises: DataError for a file that is unreadable, without rows, ragged (naming the row), not UTF-8 (naming the line),
      or with a column name twice.
    """
    content = read_bytes(path)
    if file_suffix(path) != ".parquet":
        return read_csv(content, path, delimiter=DELIMITERS.get(file_suffix(path), ","), is_number=is_number)
    try:
        said = pa_parquet.read_metadata(pa.BufferReader(content))
        too_large = is_bomb(8 * said.num_rows * said.num_columns, len(content))
        table = None if too_large else pa_parquet.read_table(pa.BufferReader(content))
        if table is not None:
            table.validate(full=True)
    except Exception as error:  # Garbled bytes make Arrow raise errors of many types.
        raise DataError(f"{path} is not a readable Parquet file: {_first_line(error)}") from None
    if table is None:
        raise DataError(
            f"{path} of {len(content):,} bytes says it holds {said.num_rows:,} rows of {said.num_columns} columns; if "
            "that is meant, save it as CSV."
        )
    names = table.column_names
    _check_column_names(names, path)
    # The index that pandas wrote into the file is no measurement.
    table = table.drop_columns([name for name in names if re.fullmatch(r"__index_level_\d+__", name)])
    return _with_rows(table.replace_schema_metadata(None).to_pandas(ignore_metadata=True), path)


def read_csv(
    content: bytes, source, *, delimiter: str, header: list[str] | None = None,
    is_number: Callable[[str], bool] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """The bytes of a CSV file, see `read_table`; `header` names the columns of a file without a header line."""
    _check_utf8(content, source)
    body = pa.py_buffer(content).slice(_MARK_AND_EMPTY_LINES.match(content).end())  # type: ignore[union-attr]
    names = header or _column_names(body, source, delimiter)
    _check_column_names([name.strip() for name in names], source)
    ragged = []

    def remember(row) -> str:
        ragged.append(row)
        return "error"

    try:
        frame = _parsed(body, names, delimiter, header, is_number, remember)
    except pa.ArrowInvalid as error:
        if ragged:
            row = ragged[0].number - (0 if header else 1)
            raise DataError(
                f"Row {row} of {source} has {ragged[0].actual_columns} cells, expected {ragged[0].expected_columns}; "
                "is a quote or a separator missing or unescaped?"
            ) from None
        if "Empty CSV" in str(error):
            raise DataError(f"{source} has a header ({listed(names)}) but no rows.") from None
        raise DataError(f"{source} cannot be read as a table: {_first_line(error)}") from None
    return _with_rows(frame, source)


_MARK_AND_EMPTY_LINES = re.compile(rb"(?:\xef\xbb\xbf)?[\r\n]*")


def _check_utf8(content: bytes, source) -> None:
    """Looked at where it lies: as a text it would be there twice."""
    offsets = pa.py_buffer(np.array([0, len(content)], np.int64))
    try:
        pa.Array.from_buffers(pa.large_string(), 1, [None, offsets, pa.py_buffer(content)]).validate(full=True)
    except pa.ArrowInvalid:
        decode(content, source)


def _column_names(body: pa.Buffer, source, delimiter: str) -> list[str]:
    lines = io.TextIOWrapper(pa.BufferReader(body), encoding="utf-8", newline=None)
    try:
        names = next(csv.reader(lines, delimiter=delimiter), None)
    except csv.Error as error:
        raise DataError(f"{source} does not start with a line of column names ({error}).") from None
    if names is None:
        raise DataError(f"{source} is empty.")
    return names


def _parsed(body: pa.Buffer, names: list[str], delimiter: str, header: list[str] | None, is_number, remember):
    """The table; where all cells of the columns that `is_number` names are, numbers. Raises: pa.ArrowInvalid."""
    for block in (BLOCK, MAX_BLOCK):
        # By blocks: in one the parser would hold the file once more. One thread, so that row numbers are known.
        reading = pa_csv.ReadOptions(use_threads=False, block_size=min(body.size + 1, block), column_names=header)
        parsing = pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=remember)
        types = {name: pa.large_string() for name in names}
        converting = pa_csv.ConvertOptions(column_types=types, strings_can_be_null=False)
        try:
            if is_number is not None:
                blocks = pa_csv.open_csv(pa.BufferReader(body), reading, parsing, converting)
                most_rows = body.size // len(names) + 1  # a cell has a byte behind it, but the last
                if (frame := _with_numbers(blocks, names, is_number, most_rows)) is not None:
                    return frame
            table = pa_csv.read_csv(pa.BufferReader(body), reading, parsing, converting)
            return table.rename_columns([name.strip() for name in names]).to_pandas(ignore_metadata=True)
        except pa.ArrowInvalid as error:  # a row that is longer than a block
            if "straddling" not in str(error) or block == MAX_BLOCK:
                raise
    raise AssertionError


def _with_numbers(
    blocks: pa_csv.CSVStreamingReader, names: list[str], is_number: Callable[[str], bool], most_rows: int
) -> pd.DataFrame | None:
    """Cells as texts take several times what they take as numbers. None: one of them is no finite number."""
    if len(blocks.schema) != len(names):
        return None
    names = [name.strip() for name in names]
    # Written where they will stay, as parts to be joined would be there twice; what is not written takes no memory.
    columns: dict[str, Any] = {name: np.empty(most_rows) if is_number(name) else [] for name in names}
    num_rows = 0
    for block in blocks:
        for name, cells in zip(names, block.columns, strict=True):
            if not is_number(name):
                columns[name].append(cells)
                continue
            values = _as_numbers(cells.to_pandas())
            if not np.isfinite(values).all():
                return None
            columns[name][num_rows : num_rows + len(values)] = values
        num_rows += block.num_rows
    if not num_rows:
        return None
    found = {
        name: column[:num_rows] if is_number(name) else pa.chunked_array(column).to_pandas()
        for name, column in columns.items()
    }
    return pd.DataFrame(found, copy=False)


def _as_numbers(cells: pd.Series) -> np.ndarray:
    """(n,) float64, NaN where a cell is no number."""
    return pd.Series(pd.to_numeric(cells, errors="coerce")).to_numpy(dtype=np.float64, na_value=np.nan)


def _with_rows(frame: pd.DataFrame, source) -> pd.DataFrame:
    if not len(frame):
        raise DataError(f"{source} has a header ({listed(list(frame.columns))}) but no rows.")
    return frame


def _check_column_names(names: list[str], path) -> None:
    repeated = first_repeated(names)
    if repeated is not None:
        raise DataError(f"Expected every column of {path} once, got '{repeated}' twice; rename one.")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".") + "."


def column_of(frame: pd.DataFrame, column: str, source: str) -> pd.Series:
    """A column, or a DataError that lists the columns there are."""
    if column not in frame.columns:
        raise DataError(f"Expected a column '{column}' in {source}, got the columns {listed(list(frame.columns))}.")
    return pd.Series(frame[column])


def numeric_column(frame: pd.DataFrame, column: str, source: str) -> np.ndarray:
    """A column as (n,) float64; DataError naming the first row whose cell is missing, not a number or not finite.

    >>> numeric_column(pd.DataFrame({"age": ["1", " 2.5"]}), "age", "a.csv")
    array([1. , 2.5])
    """
    cells = column_of(frame, column, source)
    if pd.api.types.is_datetime64_any_dtype(cells) or pd.api.types.is_timedelta64_dtype(cells):
        raise DataError(f"Expected numbers in column '{column}' of {source}, got dates; leave the column out.")
    try:
        values = _as_numbers(cells)
    except TypeError:
        raise DataError(f"Expected numbers in column '{column}' of {source}, got {cells.iloc[0]!r} in row 1.") from None
    bad = np.flatnonzero(~np.isfinite(values))
    if not bad.size:
        return values
    row, cell = bad[0] + 1, cells.iloc[bad[0]]
    where = f"in row {row} of column '{column}' of {source}"
    if cell is None or cell is pd.NA or not str(cell).strip():
        raise DataError(f"Expected a number, got nothing {where}; fill it in or leave the row out.")
    try:
        float(cell)
    except (TypeError, ValueError):
        raise DataError(
            f"Expected a number, got '{str(cell)[:40]}' {where}; encode the column as numbers, leave it out by naming "
            "the columns to use, or name the text column if the file's examples are texts."
        ) from None
    raise DataError(f"Expected a finite number, got {cell} {where}; mend it or leave the row out.")


def text_column(frame: pd.DataFrame, column: str, source: str) -> list[str]:
    """A column as texts (a missing one is empty); DataError naming the first row that is not text."""
    cells = column_of(frame, column, source).tolist()
    # Only a float is asked whether it is NaN: of a list, Parquet's other kind of cell, the question has no one answer.
    missing = (cell is None or cell is pd.NA or (isinstance(cell, float) and cell != cell) for cell in cells)
    texts: list[str] = ["" if nothing else cell for nothing, cell in zip(missing, cells)]
    for row, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise DataError(f"Expected text in column '{column}' of {source}, got {text!r} in row {row}.")
    return texts
