"""`python -m noisecast`: the command line, also where the folder of scripts is not on the path."""

import contextlib
import os
import sys
from typing import NoReturn

from noisecast.cli import main


def program() -> NoReturn:
    """`main`, and out at once: threads of JAX and Arrow that still run may crash an interpreter that is shutting down.

    What a terminal cannot show is shown as a question mark.
    """
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    for stream in streams:
        getattr(stream, "reconfigure", lambda **_: None)(errors="replace")
    status = main()
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    program()
