"""Files that appear whole or not at all: written under a temporary name beside the target, then renamed."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def written_whole(path: str | Path, *, secret: bool = False) -> Iterator[Path]:
    """A temporary file to write to; renamed to `path` when the block ends well, removed when it does not.

    Readable as the user's files are; a `secret` one by its owner alone.

    >>> target = Path(tempfile.mkdtemp(), "numbers.txt")
    >>> with written_whole(target) as temporary:
    ...     _ = temporary.write_text("1 2 3")
    >>> target.read_text()
    '1 2 3'
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(name)
        if not secret:
            os.chmod(name, 0o666 & ~_umask())
        _flush(name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


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
        return f"Expected the folder {path.parent} to exist, so that {path.name} can be written there; make it first."
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"Expected to be able to write in {path.parent}, but it is not permitted; choose another place."
    return None


def strict_json(content: Any) -> str:
    """JSON that every reader accepts: infinity as the string "inf" (which Python's `float` reads), NaN as null.

    >>> print(strict_json({"epsilon": float("inf")}))
    {
      "epsilon": "inf"
    }
    """
    return json.dumps(_strict(content), indent=2, ensure_ascii=False, allow_nan=False)


def _strict(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(key): _strict(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_strict(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None if math.isnan(content) else "inf" if content > 0 else "-inf"
    return content


def _umask() -> int:
    # It can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _flush(path: str | Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
