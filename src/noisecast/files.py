"""Files that appear whole or not at all: written under a temporary name beside the target, then renamed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """A temporary file to write to; renamed to `path` when the block ends well, removed when it does not.

    Readable and writable by its owner alone, as a checkpoint must be.

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
        for file in temporary.iterdir():
            _flush(file)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def why_unwritable(path: str | Path) -> str | None:
    """None, or one sentence: why nothing could be written at `path`. Asked before hours of work, not after."""
    path = Path(path)
    if not path.parent.is_dir():
        return f"Expected the folder {path.parent} to exist, so that {path.name} can be written there; make it first."
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"Expected to be able to write in {path.parent}, but it is not permitted; choose another place."
    return None


def _flush(path: str | Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
