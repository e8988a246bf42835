"""A worker process: reads tasks on standard input, answers on standard output.

A program of its own and not a fork: threads and compiled code do not survive one, and a script that asks for a sweep
need not be importable. It ends with whoever started it, however that one ends.
"""

import os
import pickle
import struct
import sys
import threading
import time
import traceback
from typing import IO, Any


def send(stream: IO[bytes], content: Any) -> None:
    """One object, with its length in front."""
    send_bytes(stream, pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL))


def send_bytes(stream: IO[bytes], content: bytes) -> None:
    """One object that is pickled already."""
    stream.write(struct.pack("<Q", len(content)))
    stream.write(content)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next object; EOFError when there is none, or only a part of one."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    (length,) = struct.unpack("<Q", head)
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return pickle.loads(content)


def answer(tasks: list, number: int) -> dict[str, Any]:
    """Rows of a task and the seconds it took, or the sentence that says why there are none."""
    began = time.monotonic()
    try:
        table = tasks[number].run()
    except ValueError as error:
        return {"why": str(error)}
    except Exception:  # a fault of ours: the driver shows all of it
        return {"why": traceback.format_exc()}
    return {"table": table, "seconds": time.monotonic() - began}


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    tasks = receive(requests)
    while True:
        try:
            send(answers, answer(tasks, receive(requests)))
        except (EOFError, BrokenPipeError):  # the driver has gone
            os._exit(0)
