"""A CSV file, read block by block, or row by row where it is wide: what is kept of it is what is asked for."""

import codecs
import csv
import io
import math
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv

from noisecast.problems.datasets.columns import MOST_COLUMNS, check_columns, check_known, numeric_column, too_wide
from noisecast.problems.datasets.contents import file_suffix, not_utf8, opened, unreadable
from noisecast.problems.datasets.dataset import DataError, listed

DELIMITERS, SEPARATORS = {".csv": ",", ".tsv": "\t"}, (";", "\t", ",")
LONGEST_CELL = 2**20  # characters, of a file with quotes; or an eighth of the file
WIDE = 1000  # columns: of as many Arrow takes 9 KB each and 30 microseconds a block each, whatever they hold
# Bytes parsed at a time. A row that is longer needs larger ones; Arrow counts a block's bytes in 32 bits.
BLOCKS = (2**20, 2**22, 2**24, 3 * 2**23, *(2**k for k in range(25, 31)), 2**31 - 1)


def open_csv(path) -> "CsvFile":
    """A file that ends in .csv or .tsv, and perhaps .gz.

    Where its first line has no comma (.tsv: no tab) outside of quotes, what stands between cells is the semicolon, tab
    or comma of which it has most.
    """
    stream = opened(path)
    try:
        return CsvFile(stream, path, delimiter=_delimiter(stream, DELIMITERS.get(file_suffix(path), ",")))
    except OSError as error:
        raise unreadable(path, error) from None


def _delimiter(stream: BinaryIO, usual: str) -> str:
    stream.seek(0)
    line = b"\n"
    while line and not line.strip(codecs.BOM_UTF8 + b"\r\n"):
        line = stream.readline(BLOCKS[0])
    counts = Counter(re.sub(rb'"[^"]*"', b"", line).decode("latin-1"))
    return usual if counts[usual] else max((usual, *SEPARATORS), key=lambda each: counts[each])


class CsvFile:
    """A CSV file open for reading; a byte-order mark and empty lines at its beginning are skipped.

    Args:
      stream: bytes in memory, or a file opened by its name; read as often as something is asked for.
      source: what sentences call it.
      delimiter: between cells.   header: the columns' names, if the file's first line does not give them.

    Raises: DataError if it is not UTF-8 (naming the line), empty, names a column twice, or if a quoted cell does not
      end: it would swallow the rows behind it.

    >>> file = CsvFile(io.BytesIO(b"age,label\\n20,no\\n40,yes\\n"), "toy.csv", delimiter=",")
    >>> file.frame(numbers=["age"])["age"].tolist(), list(file.texts("label"))
    ([20.0, 40.0], ['no', 'yes'])
    """

    def __init__(self, stream: BinaryIO, source, *, delimiter: str, header: list[str] | None = None):
        self._stream, self._source, self._delimiter, self._header = stream, source, delimiter, header
        try:
            self._size = stream.seek(0, io.SEEK_END)
            self._begin, has_quotes, longest_line = self._looked_through()
            if has_quotes:
                self._check_quotes()
            self._names = header or self._first_row()
        except OSError as error:
            raise unreadable(source, error) from None
        self.columns = [name.strip() for name in self._names]
        check_columns(self.columns, source)
        self._known = set(self.columns)
        self._is_wide = len(self.columns) >= WIDE
        # A row is a line; one with quotes may be several, and needs a larger block.
        enough = min(max(BLOCKS[0], longest_line), BLOCKS[-1])
        self._block_sizes = [enough, *(size for size in BLOCKS if size > enough)]
        self._has_long_rows = enough > BLOCKS[0]

    def check(self, wanted: Sequence[str]) -> None:
        """Raises: DataError if any of these columns is not there."""
        if not self._known.issuperset(wanted):
            check_known(wanted, self.columns, self._source)

    def frame(
        self, columns: Sequence[str] | None = None, *, numbers: Collection[str] = (), dtype: Any = np.float64
    ) -> pd.DataFrame:
        """All rows of some columns (None: of all), their cells as text (empty cells as "").

        Args:
          numbers: columns among them whose cells must be numbers.   dtype: what these are held as.

        Raises: DataError for a file without rows, a row with too many or too few cells, or a cell that is no finite
          number where it must be one, naming the row.
        """
        self.check(columns or ())
        wanted, numbers = self._known if columns is None else set(columns), set(numbers)  # of which there may be many
        names = [name for name in self._names if name.strip() in wanted]
        if self._is_wide:
            return self._wide_frame(list(map(str.strip, names)), numbers, dtype)
        for block_size in self._block_sizes:
            try:
                return self._frame(block_size, names, numbers, dtype)
            except _LongRow:
                pass
        raise AssertionError

    def texts(self, column: str) -> Iterator[str]:
        """The cells of a column one by one; none of them is kept. Raises: DataError, also if there is none such."""
        self.check([column])
        place, given = self.columns.index(column), 0
        if self._is_wide or self._has_long_rows:  # Arrow reads 32 blocks ahead, however large they are
            yield from (cells[place] for cells in self._rows())
            return
        name = self._names[place]
        for block_size in self._block_sizes:
            try:
                for cell in islice(_one_by_one(self._blocks(block_size, [name])), given, None):
                    yield cell
                    given += 1
                return
            except _LongRow:
                pass

    def _frame(self, block_size: int, names: list[str], numbers: Collection[str], dtype: Any) -> pd.DataFrame:
        # Numbers are written where they will stay, as parts to be joined would be there twice. A cell has a byte behind
        # it, so there are not more rows than that; what is not written takes no memory.
        most_rows = self._size // len(self._names) + 2
        parts: dict[str, Any] = {
            name: np.empty(most_rows, dtype) if name in numbers else _Texts() for name in map(str.strip, names)
        }
        num_rows = 0
        for block in self._blocks(block_size, names):
            for (name, part), cells in zip(parts.items(), block.columns, strict=True):
                if name in numbers:
                    found = self._as_numbers(cells, name, num_rows)
                    part[num_rows : num_rows + len(found)] = self._held_as(dtype, found, name, num_rows)
                else:
                    part.append(cells)
            num_rows += block.num_rows
        if not num_rows:
            raise self._no_rows()
        columns = {
            name: part[:num_rows] if name in numbers else part.array().to_pandas() for name, part in parts.items()
        }
        return pd.DataFrame(columns, copy=False)

    def _as_numbers(self, cells: pa.Array, name: str, rows_before: int) -> np.ndarray:
        # Arrow takes microseconds for a column of few rows. What it does not read may still be a number, or is wrong.
        with suppress(pa.ArrowInvalid):
            values = cells.cast(pa.float64()).to_numpy(zero_copy_only=False)
            if np.isfinite(values).all():
                return values
        with suppress(pa.ArrowInvalid):  # true and false
            return cells.cast(pa.bool_()).cast(pa.float64()).to_numpy(zero_copy_only=False)
        return numeric_column(pd.DataFrame({name: cells.to_pandas()}), name, self._source, rows_before)

    def _held_as(self, dtype: Any, values: np.ndarray, name: str, rows_before: int) -> np.ndarray:
        with np.errstate(over="ignore"):
            held = values.astype(dtype)
        if not np.isfinite(held).all():
            bad = int(np.isinf(held).argmax())
            where = f"in row {rows_before + bad + 1} of column '{name}' of {self._source}"
            raise DataError(
                f"Expected numbers finite in {np.dtype(dtype).name}, got {values[bad]:g} {where}; rescale the column."
            )
        return held

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
            with pa_csv.open_csv(self._from_begin(), reading, parsing, converting) as blocks:
                for block in blocks:
                    if block.num_columns != len(names):
                        raise pa.ArrowInvalid("its rows and its header are not of the same columns")
                    yield block
                    del block
                    if block_size > BLOCKS[0]:
                        pa.default_memory_pool().release_unused()
        except (pa.ArrowInvalid, KeyError) as error:
            # Of a header that is longer than a block it says that nothing follows.
            if ("straddling" in str(error) or "Empty CSV" in str(error)) and block_size < min(self._size, BLOCKS[-1]):
                raise _LongRow from None
            raise self._refusal(error, ragged) from None
        except OSError as error:
            raise unreadable(self._source, error) from None
        finally:  # Arrow keeps tens of small blocks' memory for later
            pa.default_memory_pool().release_unused()

    def _refusal(self, error: Exception, ragged: list) -> DataError:
        if ragged:
            return self._ragged(ragged[0].number - (0 if self._header else 1), ragged[0].actual_columns)
        if "Empty CSV" in str(error):
            return self._no_rows()
        return DataError(f"{self._source} cannot be read as a table: {first_line(error)}")

    def _ragged(self, row: int, num_cells: int) -> DataError:
        return DataError(
            f"Row {row} of {self._source} has {num_cells} cells, expected {len(self._names)}; is a quote or a "
            "separator missing or unescaped?"
        )

    def _no_rows(self) -> DataError:
        return DataError(f"{self._source} has a header ({listed(self._names)}) but no rows.")

    def _wide_frame(self, names: list[str], numbers: Collection[str], dtype: Any) -> pd.DataFrame:
        places = {name: place for place, name in enumerate(self.columns)}
        wanted = [(name, places[name]) for name in names if name in numbers]
        matrix = np.empty((self._size // len(self._names) + 2, len(wanted)), dtype)  # as in `_frame`
        texts, num_rows = {name: [] for name in names if name not in numbers}, 0
        for num_rows, cells in enumerate(self._rows(), start=1):
            found = np.array([self._number(cells[place], name, num_rows - 1) for name, place in wanted])
            with np.errstate(over="ignore"):
                matrix[num_rows - 1] = found
            if len(too_large := np.flatnonzero(np.isinf(matrix[num_rows - 1]))):
                bad = too_large[0]
                self._held_as(dtype, found[bad : bad + 1], wanted[bad][0], num_rows - 1)
            for name, kept in texts.items():
                kept.append(cells[places[name]])
        if not num_rows:
            raise self._no_rows()
        if not wanted:
            return pd.DataFrame(texts)
        frame = pd.DataFrame(matrix[:num_rows], columns=[name for name, _ in wanted], copy=False)
        for name, kept in texts.items():
            frame.insert(names.index(name), name, kept)
        return frame

    def _number(self, cell: str, name: str, rows_before: int) -> float:
        # Of what Python takes for a number, and Arrow and pandas do not, there is 1_000 and other scripts' digits.
        with suppress(ValueError):
            value = float(cell)
            if math.isfinite(value) and "_" not in cell and cell.isascii():
                return value
        return float(numeric_column(pd.DataFrame({name: [cell]}), name, self._source, rows_before)[0])

    def _rows(self) -> Iterator[list[str]]:
        """The cells of one row after the other. Raises: DataError for one that has too many or too few."""
        self._stream.seek(self._begin)
        lines = io.TextIOWrapper(self._stream, encoding="utf-8", newline="")
        before, num_rows = csv.field_size_limit(max(self._size, 1)), 0
        try:
            rows = csv.reader(lines, delimiter=self._delimiter)
            for cells in islice(filter(None, rows), 0 if self._header else 1, None):
                num_rows += 1
                if len(cells) != len(self._names):
                    raise self._ragged(num_rows, len(cells))
                yield cells
        except OSError as error:
            raise unreadable(self._source, error) from None
        finally:
            csv.field_size_limit(before)
            lines.detach()  # else the stream would be closed with it

    def _looked_through(self) -> tuple[int, bool, int]:
        """The place of the first byte that is no mark and ends no line, whether there is a quote in the file, and how
        many bytes the longest line has, if more than a block.
        """
        self._stream.seek(0)
        begin = len(codecs.BOM_UTF8) if self._stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        self._stream.seek(begin)
        decoder, num_lines, is_blank, has_quotes = codecs.getincrementaldecoder("utf-8")(), 0, True, False
        line, longest_line = 0, 0
        while block := self._stream.read(BLOCKS[0]):
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                raise not_utf8(num_lines + error.object.count(b"\n", 0, error.start) + 1, self._source) from None
            num_lines += block.count(b"\n")
            last = max(block.rfind(b"\n"), block.rfind(b"\r"))
            first = len(block) if last < 0 else 1 + min(at for end in b"\n\r" if (at := block.find(end)) >= 0)
            longest_line = max(longest_line, line + first)
            line = line + len(block) if last < 0 else len(block) - last - 1
            has_quotes = has_quotes or b'"' in block
            if is_blank:
                begin += len(block) - len(block.lstrip(b"\r\n"))
                is_blank = not block.strip(b"\r\n")
        if decoder.getstate()[0]:  # begun, and not ended
            raise not_utf8(num_lines + 1, self._source)
        if is_blank:
            raise DataError(f"{self._source} is empty.")
        return begin, has_quotes, longest_line

    def _check_quotes(self) -> None:
        """Arrow takes a quote that is never closed for one that is closed by the end of the file."""
        self._stream.seek(self._begin)
        lines = io.TextIOWrapper(self._stream, encoding="utf-8", newline="")
        rows = csv.reader(lines, delimiter=self._delimiter, strict=True)
        longest = max(LONGEST_CELL, self._size // 8)  # the csv module takes 4 bytes a character
        before, begin = csv.field_size_limit(longest), 1
        try:
            for _ in rows:
                begin = rows.line_num + 1
        except csv.Error as error:
            if "field limit" in str(error):
                fault = f"has a cell of more than {longest:,} characters, or a quote that is not closed"
            else:
                fault = "has a quote that is not closed, or that more text follows"
            raise DataError(
                f"The row of {self._source} that begins in line {begin} {fault}; a quoted cell begins and ends with a "
                'quote, and has "" for each within it.'
            ) from None
        finally:
            csv.field_size_limit(before)
            lines.detach()  # else the stream would be closed with it

    def _from_begin(self) -> Any:
        # Never Python's own file: Arrow reads ahead in a thread, and one that still does as Python ends aborts it.
        if isinstance(self._stream, io.BytesIO):
            return pa.BufferReader(pa.py_buffer(self._stream.getbuffer()).slice(self._begin))
        file = pa.OSFile(str(self._stream.name))
        file.seek(self._begin)
        return file

    def _first_row(self) -> list[str]:
        self._stream.seek(self._begin)
        # As Python's strings its names take 60 bytes each: nobody's header is that long.
        if (num_columns := 1 + _first_line_count(self._stream, self._delimiter)) > 4 * MOST_COLUMNS:
            raise too_wide(num_columns, self._source)
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


def _first_line_count(stream: BinaryIO, delimiter: str) -> int:
    """How many delimiters are in the line that begins here, ended by \\n or \\r."""
    count = 0
    while piece := stream.read(BLOCKS[0]):
        line = piece.replace(b"\r", b"\n").partition(b"\n")[0]
        count += line.count(delimiter.encode())
        if len(line) < len(piece):
            break
    return count


def _one_by_one(blocks: Iterable[pa.RecordBatch]) -> Iterator[str]:
    for block in blocks:
        for begin in range(0, block.num_rows, 64):  # as Python's objects all of a block's would be there twice
            yield from block.column(0).slice(begin, 64).to_pylist()


class _Texts:
    """A growing column of texts, outside of Arrow's memory: there it would keep whole blocks of it from being freed."""

    def __init__(self) -> None:
        self._bytes, self._ends = bytearray(), array("q", [0])

    def append(self, cells: pa.Array) -> None:
        _, ends, content = cells.cast(pa.large_string()).buffers()
        places = np.frombuffer(ends, np.int64)[cells.offset : cells.offset + len(cells) + 1]
        self._ends.frombytes((places[1:] - places[0] + len(self._bytes)).tobytes())
        if content is not None:
            self._bytes += memoryview(content)[places[0] : places[-1]]

    def array(self) -> pa.Array:
        ends, content = (pa.py_buffer(part) for part in (self._ends, self._bytes))
        return pa.Array.from_buffers(pa.large_string(), len(self._ends) - 1, [None, ends, content])


def first_line(error: Exception) -> str:
    """Of what another library says, enough to tell what is wrong."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".") + "."
