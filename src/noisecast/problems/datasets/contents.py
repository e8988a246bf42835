"""The bytes of a user's file, unpacked or read piece by piece; one sentence for whatever cannot be read."""

import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO

from noisecast.files import MOST_TIMES, MOST_UNPACKED
from noisecast.problems.datasets.dataset import DataError

SMALL = 2**20  # bytes; a file of fewer is read at once


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


def opened(path) -> BinaryIO:
    """A file to be read piece by piece, and more than once; unpacked, and then in memory, if it ends in `.gz`.

    Raises: DataError if it is missing, a directory, unreadable or empty.
    """
    path = existing_file(path)
    try:
        if path.suffix.lower() != ".gz" and path.is_file() and path.stat().st_size > SMALL:
            return path.open("rb")
    except OSError as error:
        raise unreadable(path, error) from None
    return io.BytesIO(read_bytes(path))  # also of a pipe, which can be read but once


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
        raise unreadable(path, error) from None
    if content.isspace() or not content:
        raise DataError(f"{path} is empty.")
    return content


def unreadable(path, error: OSError) -> DataError:
    """The sentence for a file that the operating system does not let be read."""
    return DataError(f"{path} cannot be read: {error.strerror or error}.")


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
        raise not_utf8(content.count(b"\n", 0, error.start) + 1, source) from None


def not_utf8(line: int, source) -> DataError:
    """The sentence for a line that is not UTF-8."""
    return DataError(f"Line {line} of {source} is not UTF-8 text; save the file as UTF-8.")
