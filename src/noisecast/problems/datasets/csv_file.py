"""A CSV file, read block by block: what is kept of it is what is asked for, as numbers or texts."""

import codecs
import csv
import io
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv

from noisecast.problems.datasets.columns import as_numbers, check_column_names, no_column, with_rows
from noisecast.problems.datasets.contents import file_suffix, not_utf8, opened, unreadable
from noisecast.problems.datasets.dataset import DataError, listed

DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Bytes parsed at a time. A row that is longer needs larger ones; Arrow counts a block's bytes in 32 bits.
BLOCKS = (2**20, 2**24, 2**31 - 1)


def open_csv(path) -> "CsvFile":
    """A file that ends in .csv or .tsv, and perhaps .gz."""
    return CsvFile(opened(path), path, delimiter=DELIMITERS.get(file_suffix(path), ","))


class CsvFile:
    """A CSV file open for reading; a byte-order mark and empty lines at its beginning are skipped.

    Args:
      stream: the file; it is read as often as something is asked for.   source: what sentences call it.
      delimiter: between cells.   header: the columns' names, if the file's first line does not give them.

    Raises: DataError if it is not UTF-8 (naming the line), empty, or names a column twice.

    >>> file = CsvFile(io.BytesIO(b"age,label\\n20,no\\n40,yes\\n"), "toy.csv", delimiter=",")
    >>> file.frame(is_number=lambda name: name == "age")["age"].tolist(), list(file.texts("label"))
    ([20.0, 40.0], ['no', 'yes'])
    """

    def __init__(self, stream: BinaryIO, source, *, delimiter: str, header: list[str] | None = None):
        self._stream, self._source, self._delimiter, self._header = stream, source, delimiter, header
        try:
            self._size = stream.seek(0, io.SEEK_END)
            self._begin = self._begin_of_text()
            self._names = header or self._first_row()
        except OSError as error:
            raise unreadable(source, error) from None
        self.columns = [name.strip() for name in self._names]
        check_column_names(self.columns, source)

    def frame(self, *, is_number: Callable[[str], bool] | None = None, without: str | None = None) -> pd.DataFrame:
        """All rows, their cells as text (empty cells as "").

        Args:
          is_number: columns to hold as float64, which takes less memory; if a cell of them is not a finite number, all
            are text.
          without: a column to leave out, for `texts`.

        Raises: DataError for a file without rows, or a row with too many or too few cells, naming it.
        """
        kept = [name for name in self._names if name.strip() != without]
        for block_size in BLOCKS:
            try:
                return with_rows(self._frame(block_size, kept, is_number), self._source)
            except _LongRow:
                pass
        raise AssertionError

    def texts(self, column: str) -> Iterator[str]:
        """The cells of a column one by one; none of them is kept. Raises: DataError, also if there is none such."""
        if column not in self.columns:
            raise no_column(column, self._source, self.columns)
        name, given = self._names[self.columns.index(column)], 0
        for block_size in BLOCKS:
            try:
                cells = (cell for block in self._blocks(block_size, [name]) for cell in block.column(0).to_pylist())
                for cell in islice(cells, given, None):
                    yield cell
                    given += 1
                return
            except _LongRow:
                pass

    def _frame(self, block_size: int, names: list[str], is_number: Callable[[str], bool] | None) -> pd.DataFrame:
        if is_number is not None:
            most_rows = self._size // len(self._names) + 1  # a cell has a byte behind it, but the last
            if (frame := _with_numbers(self._blocks(block_size, names), names, is_number, most_rows)) is not None:
                return frame
        blocks = list(self._blocks(block_size, names))
        if not blocks:
            raise DataError(f"{self._source} has a header ({listed(self._names)}) but no rows.")
        table = pa.Table.from_batches(blocks).rename_columns([name.strip() for name in names])
        return table.to_pandas(ignore_metadata=True)

    def _blocks(self, block_size: int, names: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows of some columns, all as text. Raises: _LongRow, DataError."""
        ragged = []

        def remember(row) -> str:
            ragged.append(row)
            return "error"

        reading = pa_csv.ReadOptions(  # one thread, so that row numbers are known
            use_threads=False, block_size=min(self._size + 1, block_size), column_names=self._header
        )
        parsing = pa_csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True, invalid_row_handler=remember)
        converting = pa_csv.ConvertOptions(
            column_types=dict.fromkeys(self._names, pa.large_string()), strings_can_be_null=False,
            include_columns=None if names == self._names else names,
        )  # fmt: skip
        try:
            yield from pa_csv.open_csv(self._from_begin(), reading, parsing, converting)
        except (pa.ArrowInvalid, KeyError) as error:
            if "straddling" in str(error) and block_size != BLOCKS[-1]:
                raise _LongRow from None
            raise self._refusal(error, ragged) from None
        except OSError as error:
            raise unreadable(self._source, error) from None

    def _refusal(self, error: Exception, ragged: list) -> DataError:
        if ragged:
            row = ragged[0].number - (0 if self._header else 1)
            return DataError(
                f"Row {row} of {self._source} has {ragged[0].actual_columns} cells, expected "
                f"{ragged[0].expected_columns}; is a quote or a separator missing or unescaped?"
            )
        if "Empty CSV" in str(error):
            return DataError(f"{self._source} has a header ({listed(self._names)}) but no rows.")
        return DataError(f"{self._source} cannot be read as a table: {first_line(error)}")

    def _begin_of_text(self) -> int:
        """The place of the first byte that is no mark and ends no line. Block by block, so that nothing is kept."""
        self._stream.seek(0)
        begin = len(codecs.BOM_UTF8) if self._stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        self._stream.seek(begin)
        decoder, num_lines, is_blank = codecs.getincrementaldecoder("utf-8")(), 0, True
        while block := self._stream.read(BLOCKS[0]):
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                raise not_utf8(num_lines + error.object.count(b"\n", 0, error.start) + 1, self._source) from None
            num_lines += block.count(b"\n")
            if is_blank:
                begin += len(block) - len(block.lstrip(b"\r\n"))
                is_blank = not block.strip(b"\r\n")
        if decoder.getstate()[0]:  # begun, and not ended
            raise not_utf8(num_lines + 1, self._source)
        if is_blank:
            raise DataError(f"{self._source} is empty.")
        return begin

    def _from_begin(self) -> Any:
        if isinstance(self._stream, io.BytesIO):  # Arrow's threads need not wait for Python's to read it
            return pa.BufferReader(pa.py_buffer(self._stream.getbuffer()).slice(self._begin))
        self._stream.seek(self._begin)
        return self._stream

    def _first_row(self) -> list[str]:
        self._stream.seek(self._begin)
        lines = io.TextIOWrapper(self._stream, encoding="utf-8", newline=None)
        try:
            names = next(csv.reader(lines, delimiter=self._delimiter), None)
        except csv.Error as error:
            raise DataError(f"{self._source} does not start with a line of column names ({error}).") from None
        finally:
            lines.detach()  # else the stream would be closed with it
        if names is None:
            raise DataError(f"{self._source} is empty.")
        return names


class _LongRow(Exception):
    """A row is longer than a block."""


def _with_numbers(
    blocks: Iterator[pa.RecordBatch], names: list[str], is_number: Callable[[str], bool], most_rows: int
) -> pd.DataFrame | None:
    """Cells as texts take several times what they take as numbers. None: one of them is no finite number."""
    names = [name.strip() for name in names]
    # Written where they will stay, as parts to be joined would be there twice; what is not written takes no memory.
    columns: dict[str, Any] = {name: np.empty(most_rows) if is_number(name) else [] for name in names}
    num_rows = 0
    for block in blocks:
        if block.num_columns != len(names):
            return None
        for name, cells in zip(names, block.columns, strict=True):
            if not is_number(name):
                columns[name].append(cells)
                continue
            values = as_numbers(cells.to_pandas())
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


def first_line(error: Exception) -> str:
    """Of what another library says, enough to tell what is wrong."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".") + "."
