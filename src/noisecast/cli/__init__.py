"""The command line: a command parses, calls and prints. One file a command, imported when it is asked for."""

import difflib
import errno
import inspect
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError, MissingArgumentError

from noisecast import __version__
from noisecast.cli.examples import examples_of

BAD_INPUT = 2
INTERRUPTED = 128  # and the signal's number, as shells have it: 130 after Ctrl-C, 143 after `kill`
SECONDS_BETWEEN_INTERRUPTS = 0.2
HELP_FLAGS = {"--help", "-h"}
ALIKE = 0.8  # of an option's name and what was typed for it

app = App(
    name="noisecast",
    help="Train models with differential privacy, and say beforehand what the privacy noise will do.",
    version=__version__,
    version_flags=["--version"],
    help_format="plaintext",
    result_action="return_value",
    print_error=False,
    exit_on_error=False,
    suppress_keyboard_interrupt=False,
)

# A line each stands here and not in the commands, so that listing them imports none of them.
COMMANDS = {
    "demo": "See it work: three optimizers at five privacy levels on handwritten digits, trained and predicted.",
    "train": "Train a model privately on a file of your own.",
    "predict": "Use a trained model on a file.",
    "answer": "Ask the runners (training, SDE, closed form) what a scenario file asks.",
    "forecast": "Forecast a scenario file's runs without training: losses, the best rate and clip, crossings.",
    "accuracy": "The forecast against training, over the grid of a scenario file.",
    "sweep": "Run a grid of scenarios into a store; run it again, and it goes on where it ended.",
    "results": "Read a store: the end of every scenario, or any question in SQL.",
    "select": "The best settings of a sweep, and what choosing them cost in privacy.",
    "protocol": "Optimizers compared across privacy levels, each tuned once (a) or at each of them (b).",
    "advise": "Optimizer, learning rate, clip norm and batch size for each budget, and what keeping yours would cost.",
    "report": "One page of a store or a model: the answer, charts, the privacy statement, settings to copy.",
    "account": "Epsilon spent by a mechanism, or the noise that a target epsilon needs.",
    "ledger": "What was spent on each data set, and how much is left: show, check, or set a budget.",
    "audit": "Attack the mechanism: a lower bound on epsilon, measured, beside the upper bound that is proved.",
    "reproduce": "The paper's figures: each with its numbers and what they say of its claims.",
    "datasets": "The data sets that are read by name, and the files that `train` reads.",
}
for _name, _help in COMMANDS.items():
    app.command(f"noisecast.cli.{_name}:{_name}", name=_name, help=_help)

# Top-level modules of the extras, and which one brings them.
_EXTRAS = {
    "jax": "train",
    "numba": "train",
    "sklearn": "train",
    "matplotlib": "train",
    "duckdb": "train",
    "randomgen": "secure",
    "ray": "ray",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      arguments: as in a shell, without the name of the program; None for those it was called with.
    Returns: the exit status: 0, 2 after one sentence about a bad input, 130 after Ctrl-C, 143 after SIGTERM. Errors of
      our own making are not caught: they keep their traceback.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        return _complain(_unknown_command(arguments[0]))
    received = [signal.SIGINT]
    try:
        with _insistent_interrupts(received), _whole_help(arguments), _plain_warnings():
            app(arguments)
            if sys.stdout is not None:  # closed from the start
                sys.stdout.flush()
    except CycloptsError as error:
        return _complain(_usage_sentence(error))
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    except OSError as error:
        return _complain(_os_sentence(error))
    except ImportError as error:
        missing = _missing_extra(error)
        if missing is None:
            raise
        return _complain(f"This command needs {missing}; run pip install 'noisecast[{_EXTRAS[missing]}]'.")
    except MemoryError as error:
        return _complain(
            f"Not enough memory on this machine ({error or 'allocation failed'}); ask for something smaller."
        )
    except ValueError as error:
        return _complain(str(error))
    except KeyboardInterrupt as interruption:  # with a sentence, and the number of a signal that was taken elsewhere
        sentence, *number = interruption.args or ("Interrupted.",)
        return _complain(sentence, INTERRUPTED + (number or received)[-1])
    return 0


@contextmanager
def _whole_help(arguments: Sequence[str]) -> Iterator[None]:
    """Of a command that is asked for its own help: its whole docstring, not the line of the list of all; examples."""
    name = arguments[0] if arguments else None
    if name not in COMMANDS or HELP_FLAGS.isdisjoint(arguments[1:]):
        yield
        return
    command: Any = app[name]
    paragraphs = (inspect.getdoc(command.default_command) or COMMANDS[name]).split("\n\n")
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    command.help_epilogue = examples_of(name)
    try:
        yield
    finally:
        command.help, command.help_epilogue = COMMANDS[name], None


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Our own as one sentence; a library's as Python shows them, with the line they come from."""
    usual: Any = warnings.formatwarning
    ours = Path(__file__).parents[1]

    def shown(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        if Path(filename).is_relative_to(ours):
            return f"Warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = shown
    try:
        yield
    finally:
        warnings.formatwarning = usual


@contextmanager
def _insistent_interrupts(received: list[signal.Signals]) -> Iterator[None]:
    """Repeat a Ctrl-C, or a SIGTERM, until it arrives: raised inside a library's callback, the first may be dropped.

    Args:
      received: gets the signal.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(number: int, _: object) -> None:
        if number != signal.SIGALRM:
            received.append(signal.Signals(number))
        signal.setitimer(signal.ITIMER_REAL, SECONDS_BETWEEN_INTERRUPTS)
        raise KeyboardInterrupt

    def report(unraisable: Any) -> None:  # of one that was dropped there is nothing to tell
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            hook(unraisable)

    hook, sys.unraisablehook = sys.unraisablehook, report
    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _complain(sentence: str, status: int = BAD_INPUT) -> int:
    print(sentence, file=sys.stderr)
    return status


def _unknown_command(name: str) -> str:
    # Ours, because Cyclopts would import every command to say it.
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean '{close[0]}'?" if close else "see: noisecast --help"
    return f"Expected a command among {', '.join(COMMANDS)}, got '{name}'; {hint}"


def _usage_sentence(error: CycloptsError) -> str:
    command = " ".join(error.command_chain or ())
    sentence = " ".join(str(error).split())
    if isinstance(error, MissingArgumentError) and error.argument is not None and not error.argument.tokens:
        given = [token.split("=")[0] for token in error.root_input_tokens or () if token.startswith("--")]
        misspelt = difflib.get_close_matches(error.argument.name, given, n=1, cutoff=ALIKE)
        sentence = f"Expected {error.argument.name}, got {misspelt[0] if misspelt else 'nothing'}."
    return f"{sentence} See: noisecast {command} --help"


def _os_sentence(error: OSError) -> str:
    from noisecast.files import reason_of

    where = f"{error.filename}: " if error.filename else ""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    room = f"make room {'there' if where else 'on the disk'} or " if is_full else ""
    return f"{where}{reason_of(error)}; {room}choose another place, and try again."


def _missing_extra(error: BaseException | None) -> str | None:
    """The module of an extra whose absence is behind an ImportError."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _EXTRAS:
            return (error.name or "").split(".")[0]
        error = error.__cause__
    return None
