"""Lock files: of two processes that would write the same, the second is told so. A killed one's holds nobody up."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: there is nobody to ask
    fcntl = None


@contextmanager
def held(lock: Path, *, refusal: str, keep: bool = False) -> Iterator[None]:
    """Keep every other process out while the block runs, or until we are killed.

    Args:
      lock: the file, made where there is none.   keep: whether it stays behind.
      refusal: what the other process is told.
    Raises: ValueError(refusal): another process holds it.
    """
    if fcntl is None:
        yield
        return
    handle = _locked(lock)
    if handle is None:
        raise ValueError(refusal)
    try:
        yield
    finally:
        if not keep and _is_at(lock, handle):  # else somebody removed ours, and this is another's
            lock.unlink(missing_ok=True)
        os.close(handle)  # only now: who waits for it must not lock a file that we remove


def _locked(lock: Path) -> int | None:
    """The lock file, open and ours; None where another process holds it."""
    assert fcntl is not None
    while True:
        handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:  # a file system without locks: there is nobody to ask
            return handle
        if _is_at(lock, handle):
            return handle
        os.close(handle)  # whoever held it removed it after we opened it


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
