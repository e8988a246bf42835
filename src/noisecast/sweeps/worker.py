"""A worker process of a sweep: it holds the tasks, is asked for one by its number, and answers with its rows."""

import time
import traceback
from typing import Any

from noisecast.worker_process import serve


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


def main() -> None:
    serve(lambda tasks: lambda number: answer(tasks, number))
