"""Files that appear whole or not at all: written under a temporary name, then renamed. And files of strangers, read."""

import errno
import glob
import io
import json
import math
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# More than this, and more than so many times the file, no data of people's own unpack to; gzip can do 1,000 times.
MOST_UNPACKED, MOST_TIMES = 2**28, 200
_HALF = ".half-written-"  # in the names of files that are not whole yet


@contextmanager
def written_whole(path: str | Path, *, secret: bool = False) -> Iterator[Path]:
    """A temporary file to write to; renamed to `path` when the block ends well, removed when it does not.

    Readable as the user's files are; a `secret` one by its owner alone.

    Raises: OSError; of a full disk, too, with the name of the file that there is no room for.

    >>> target = Path(tempfile.mkdtemp(), "numbers.txt")
    >>> with written_whole(target) as temporary:
    ...     _ = temporary.write_text("1 2 3")
    >>> target.read_text()
    '1 2 3'
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}{_HALF}", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(name)
        if not secret:
            os.chmod(name, 0o666 & ~_umask())
        _flush(name)
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = str(path)  # who writes to an open file is told no name
        raise


def half_written(path: str | Path) -> list[Path]:
    """What killed writers of `path` left beside it; nobody else's files are called so."""
    path = Path(path)
    eight = "?" * 8  # characters that `mkstemp` chooses
    return list(path.parent.glob(f".{glob.escape(path.name)}{_HALF}{eight}{glob.escape(path.suffix)}"))


@contextmanager
def folder_written_whole(path: str | Path) -> Iterator[Path]:
    """The same for a folder; `path` must not exist yet."""
    path = Path(path)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        os.chmod(temporary, 0o777 & ~_umask())
        for file in temporary.iterdir():
            _flush(file)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def why_unwritable(path: str | Path) -> str | None:
    """None, or one sentence: why nothing could be written at `path`. Asked before hours of work, not after."""
    path = Path(path)
    if not path.name or path.is_mount():
        return f"Expected the name of a new file or folder, got '{path}'."
    if not path.parent.is_dir():
        if path.parent.exists():
            return f"Expected {path.parent} to be a folder, so that {path.name} can be written there, got a file."
        return f"Expected the folder {path.parent} to exist, so that {path.name} can be written there; make it first."
    try:  # permissions alone do not say what a read-only disk, or /proc, will
        with tempfile.TemporaryFile(dir=path.parent):
            return None
    except OSError as error:
        reason = "it is not permitted" if isinstance(error, PermissionError) else f"the system says '{error.strerror}'"
        return f"Expected to be able to write in {path.parent}, but {reason}; choose another place."


def reason_of(error: OSError) -> str:
    """What the system says, without the words of a library that passes it on.

    >>> reason_of(OSError(28, "Error writing bytes to file. Detail: [errno 28] No space left on device"))
    'No space left on device'
    """
    return re.sub(r"^.*Detail: \[errno \d+\] ", "", error.strerror or str(error))


def is_bomb(unpacked: int, packed: int) -> bool:
    """Whether a file of `packed` bytes that asks for `unpacked` bytes of memory is made to exhaust it.

    >>> is_bomb(10**8, packed=10**3), is_bomb(10**9, packed=10**3), is_bomb(10**9, packed=10**7)
    (False, True, False)
    """
    return unpacked > max(MOST_UNPACKED, MOST_TIMES * packed)


def read_arrays(stream: BinaryIO) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, open for reading; none of them pickled objects, which could run code.

    Raises: ValueError: what is wrong with it, to be said behind its name.

    >>> read_arrays(io.BytesIO(b"PK"))
    Traceback (most recent call last):
    ValueError: is not a readable .npz file; save arrays with np.savez.
    """
    try:
        with zipfile.ZipFile(stream) as archive:  # what is no archive np.load takes for a pickle
            unpacked = sum(member.file_size for member in archive.infolist())
        size = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        if not is_bomb(unpacked, size):
            with np.load(stream, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
            if not all(isinstance(array, np.ndarray) for array in found.values()):  # else bytes, of no array
                raise ValueError("array")
            return found
        reason = f"would unpack to {unpacked / 2**20:,.0f} MiB, {unpacked // size} times itself; if that is "
        reason += "meant, save it with np.savez, unpacked."
    except Exception as error:  # Garbled bytes make zipfile and NumPy raise errors of a dozen types.
        reason = "is not a readable .npz file; save arrays with np.savez."
        if "allow_pickle" in str(error):
            reason = "holds pickled Python objects, which could run code when read; save plain number or string "
            reason += "arrays with np.savez."
    raise ValueError(reason)


def strict_json(content: Any, *, default: Callable[[Any], Any] | None = None) -> str:
    """JSON that every reader accepts: infinity as the string "inf" (which Python's `float` reads), NaN as null.

    Args:
      default: what stands for an object that JSON has no form for; None: TypeError.

    >>> print(strict_json({"epsilon": float("inf")}))
    {
      "epsilon": "inf"
    }
    """
    return json.dumps(_strict(content), indent=2, ensure_ascii=False, allow_nan=False, default=default)


def _strict(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(key): _strict(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_strict(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None if math.isnan(content) else "inf" if content > 0 else "-inf"
    if isinstance(content, np.ndarray | np.generic):
        return _strict(content.tolist())
    return content


def _umask() -> int:
    # It can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _flush(path: str | Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
