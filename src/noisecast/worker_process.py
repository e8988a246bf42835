"""Programs of ours beside this one: objects go in on standard input, answers come back on standard output.

A program of its own and not a fork: threads and compiled code do not survive one, and the script that starts it need
not be importable. It ends with whoever started it, however that one ends.
"""

import io
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from types import FunctionType
from typing import IO, Any

# Each has one core: libraries that start a thread a core would only get in each other's way.
ONE_CORE = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1 " + os.environ.get("XLA_FLAGS", ""),
}


class WorkerProcess:
    """One such program, from the side of who started it.

    Args:
      module: its function `main` calls `serve`.
      first: what it prepares itself with, pickled; where None, `first` is set before the first question.
    """

    def __init__(self, module: str, first: bytes | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import main; main()", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ONE_CORE,
            start_new_session=True,  # Ctrl-C is for who started it to answer
        )
        self.first = first

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: Any) -> Any:
        """Its answer. Raises: EOFError or OSError when it was killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.stdin.closed:
            raise EOFError
        if self.first is not None:
            _send_bytes(self._process.stdin, self.first)
            self.first = None
        _send(self._process.stdin, question)
        return _receive(self._process.stdout)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # of a question that it did not read
                assert pipe is not None
                pipe.close()


def pickled(content: Any) -> bytes:
    """What `WorkerProcess` takes. Raises: pickle.PicklingError, AttributeError, TypeError."""
    written = io.BytesIO()
    _Pickler(written, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
    return written.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Functions and classes go by name, and the script that a worker would look in is another program there."""
        if isinstance(obj, FunctionType | type) and obj.__module__ == "__main__":
            raise pickle.PicklingError(
                f"{obj.__qualname__} is defined in the script itself, which they do not read: put it into a module"
            )
        return NotImplemented


def serve(prepare: Callable[[Any], Callable[[Any], Any]], *, imports: Sequence[str] = ()) -> None:
    """The program itself: prepares with the first object it receives, then answers every other; never returns.

    Its argument is who started it, as that one says: who asks later may have another parent already.

    Args:
      imports: modules that answers need and that take long, imported before the first object is there.
    """
    if os.name != "nt":  # where a venv's python is a launcher, and this program's parent; input ends there as well
        threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for module in imports:
        import_module(module)
    try:
        answer = prepare(_receive(sys.stdin.buffer))
        while True:
            _send(answers, answer(_receive(sys.stdin.buffer)))
    except (EOFError, BrokenPipeError):  # who asked has gone
        os._exit(0)


def _send(stream: IO[bytes], content: Any) -> None:
    _send_bytes(stream, pickled(content))


def _send_bytes(stream: IO[bytes], content: bytes) -> None:
    """With its length in front."""
    stream.write(struct.pack("<Q", len(content)))
    stream.write(content)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """The next object; EOFError when there is none, or only a part of one."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    (length,) = struct.unpack("<Q", head)
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return pickle.loads(content)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)
