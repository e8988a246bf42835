"""One model, trained for release: progress, interruption and resumption around the engine's run."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from noisecast import engines
from noisecast.checkpoint import Checkpoint, checkpoint_held, load_checkpoint, remove_checkpoint, save_checkpoint
from noisecast.ledger import Account
from noisecast.privacy.noise import RandomRoot
from noisecast.scenario import Scenario
from noisecast.statement import PrivacyStatement, privacy_statement

SECONDS_BETWEEN_LOOKS = 0.25  # how long a compiled stretch of steps may keep Ctrl-C and the progress bar waiting
SECONDS_BETWEEN_CHECKPOINTS = 30.0
MAX_STRETCH = 2**16


@dataclass(frozen=True)
class TrainedModel:
    """A model after its last step.

    Only `params` and the statement are for release: `scenario` holds the training rows, and so does a pickle of this.
    `noisecast train` and the estimators write and hold the former alone.

    Args:
      scenario: what was run.
      params: released parameters; (d,) float32, on a public grid (`privacy/public_grid.py`).
      non_private_metrics: losses and accuracies, computed from the examples without noise: not covered by epsilon.
      statement: the guarantee.
      seconds: wall time of this session's steps.
    """

    scenario: Scenario = field(repr=False)
    params: np.ndarray
    non_private_metrics: dict[str, float]
    statement: PrivacyStatement
    seconds: float


@dataclass(frozen=True)
class Moment:
    """Where a run is: told to whoever watches. `non_private_metrics` is empty between evaluations."""

    step: int
    num_steps: int
    steps_per_second: float
    non_private_metrics: dict[str, float]


class Interrupted(Exception):
    """Training was asked to stop, by a signal, after `step` steps; its checkpoint, if one was asked for, is there."""

    def __init__(self, step: int, checkpoint: Path | None, signal_number: int):
        kept = f"continue with --resume (checkpoint: {checkpoint})" if checkpoint else "no checkpoint was asked for"
        super().__init__(f"Interrupted after {step:,} steps; {kept}.")
        self.step, self.checkpoint, self.signal_number = step, checkpoint, signal_number


class _Diverged(ValueError):
    """The last parameters are not finite."""


def train(
    scenario: Scenario,
    *,
    insecure_seed: int | None = None,
    secure_noise: bool = False,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    watch: Callable[[Moment], None] | None = None,
    save: Callable[[TrainedModel], None] = lambda model: None,
    account: Account | None = None,
    num_evaluations: int = 20,
    unit: str = "one example",
    also_not_covered: tuple[str, ...] = (),
) -> TrainedModel:
    """Train one scenario once, for release.

    Args:
      scenario: what to run.
      insecure_seed: makes the run reproducible and therefore not private; None draws from the operating system.
        `watch` and `num_evaluations` change its random numbers, not their law: an evaluation draws postponed noise.
      secure_noise: draw batches and noise by a cipher, ChaCha20. It needs the extra [secure], and more time.
      checkpoint: file to keep the run's state in while it runs, for this process alone; deleted when it is done.
      resume: continue from `checkpoint`, evaluated where it was begun to be.
      watch: told where the run is, several times a second.
      save: what to do with the finished model before its checkpoint is deleted, so that a full disk loses nothing.
      account: a data set's in a privacy ledger; the run is written down there before its first step, or refused.
      num_evaluations: how often losses are evaluated for the watcher; 0 for only at the end.
      unit, also_not_covered: for the privacy statement.
    Raises:
      Interrupted: on Ctrl-C or SIGTERM, after the checkpoint is written.
      ValueError: the scenario cannot be trained, the checkpoint is not its own, or is there and not to be resumed, the
        account's budget would be exceeded, another process trains from the checkpoint, or the parameters are not
        finite.
    """
    reason = engines.why_unsupported(scenario)
    if reason is None and insecure_seed is None:
        reason = engines.why_not_for_release(scenario)
    if reason is not None:
        raise ValueError(reason)
    path = Path(checkpoint) if checkpoint is not None else None
    # From before the first step until the model is saved: an exception in between would lose a spent budget.
    held = nullcontext() if path is None else checkpoint_held(path)
    with _stop_requests() as stop_requested, held:
        evaluate_every = -(-scenario.num_steps // num_evaluations) if watch and num_evaluations else 0
        run = _started(scenario, insecure_seed, secure_noise, path, resume, evaluate_every)
        if path is not None and not resume:
            run.keep(scenario, path)  # before the budget is spent: from here on nothing that stops the run loses it
        if account is not None:
            try:
                _write_down(account, run, scenario)
            except ValueError:
                if path is not None and not resume:  # refused, and nothing begun
                    remove_checkpoint(path)
                raise
        began = time.monotonic()
        _advance_to_the_end(run, scenario, path, watch, stop_requested)
        try:
            model = _finished(run, scenario, unit, also_not_covered, time.monotonic() - began)
        except _Diverged:
            if path is not None:  # nobody can go on with it
                remove_checkpoint(path)
            raise
        if path is not None:
            run.keep(scenario, path)
        save(model)
        if path is not None:
            remove_checkpoint(path)
    return model


def _write_down(account: Account, run: "_Run", scenario: Scenario) -> None:
    """Before the first step: a crash from here on errs on the private side."""
    if not run.root.is_private:
        raise ValueError("Expected a run without insecure seed for a ledger: one with a known seed has no guarantee.")
    what = f"{scenario.optimizer.name} on {scenario.problem.name}"
    account.ledger.spend(account.dataset, scenario.mechanism, scenario.num_steps, what=what, run=run.root.name)


def _finished(run: "_Run", scenario: Scenario, unit: str, also_not_covered: tuple[str, ...], seconds: float):
    params = engines.released_params(run.engine, scenario)
    if not np.isfinite(params).all():
        raise _Diverged(
            f"{scenario.optimizer.name} diverged: its parameters are no longer finite. Use a smaller learning_rate "
            f"than {scenario.optimizer.learning_rate:g} (or a smaller l2_clip_norm); the budget of this run is spent."
        )
    statement = privacy_statement(
        scenario,
        reproducible=not run.root.is_private,
        secure_noise=run.root.secure_noise,
        unit=unit,
        also_not_covered=also_not_covered,
    )
    return TrainedModel(scenario, params, _metrics(run.engine), statement, seconds)


@dataclass(frozen=True)
class _Run:
    engine: Any
    root: RandomRoot
    evaluate_every: int  # steps; 0: only at the end

    def keep(self, scenario: Scenario, path: Path) -> None:
        save_checkpoint(path, Checkpoint(scenario.id, self.root, self.engine.state(), self.evaluate_every))


def _started(
    scenario: Scenario, insecure_seed: int | None, secure: bool, path: Path | None, resume: bool, evaluate_every: int
) -> _Run:
    if insecure_seed is not None and secure:
        raise ValueError("Expected an insecure seed or secure noise, got both: no cipher hides a seed that is known.")
    if not resume:
        if path is not None and path.exists():  # its run may have spent a budget
            raise ValueError(f"{path} is the checkpoint of an interrupted run; resume it, or delete it to start anew.")
        root = RandomRoot.from_os_entropy(secure_noise=secure)
        if insecure_seed is not None:
            root = RandomRoot.from_insecure_seed(insecure_seed)
        return _Run(engines.start([scenario], repeats=[0], root=root), root, evaluate_every)
    if path is None:
        raise ValueError("Expected a checkpoint file to resume from, got none.")
    saved = load_checkpoint(path, scenario=scenario.id)
    if insecure_seed is not None and saved.root.insecure_seed != insecure_seed:
        began = saved.root.insecure_seed
        other = "noise that nobody knows" if began is None else f"insecure seed {began}"
        raise ValueError(f"{path} was started with {other}, not insecure seed {insecure_seed}; resume without one.")
    if secure and not saved.root.secure_noise:
        raise ValueError(f"{path} was not started with secure noise; resume without it, or start anew.")
    here = engines.noise_source()
    if not saved.root.secure_noise and saved.noise_source != here:
        raise ValueError(
            f"{path} was begun with noise drawn by {saved.noise_source}, and this machine draws it by {here}: what "
            "follows would be of another run, a second release that nothing has accounted for. Resume it on a machine "
            "like the first, or delete it to start anew."
        )
    if saved.step > scenario.num_steps:
        raise ValueError(
            f"{path} is at step {saved.step:,} of {scenario.num_steps:,}: not a readable checkpoint; delete it."
        )
    engine = engines.start([scenario], repeats=[0], root=saved.root)
    engine.restore(saved.state)
    return _Run(engine, saved.root, saved.evaluate_every)


def _advance_to_the_end(run: _Run, scenario: Scenario, path, watch, stop_requested) -> None:
    engine, num_steps = run.engine, scenario.num_steps
    evaluate_every = run.evaluate_every or num_steps + 1
    stretch, rate, saved_at = 1, 0.0, time.monotonic()
    while engine.step < num_steps:
        if signal_number := stop_requested():  # also before the first step
            _stop(run, scenario, path, signal_number)
        before, began = engine.step, time.monotonic()
        next_evaluation = (before // evaluate_every + 1) * evaluate_every
        engine.advance(min(before + stretch, next_evaluation, num_steps))
        engine.block_until_ready()
        seconds = max(time.monotonic() - began, 1e-9)
        # The first stretch waits for the compiler: its rate says nothing.
        rate = rate if before == 0 and stretch == 1 else (engine.step - before) / seconds
        stretch = min(int(max(rate, 1.0) * SECONDS_BETWEEN_LOOKS) + 1, 4 * stretch, MAX_STRETCH)
        evaluates = engine.step == next_evaluation
        # Before the checkpoint: it gives rows the noise that they lack, and whoever resumes does not repeat it.
        metrics = _metrics(engine) if evaluates else {}
        if path is not None and time.monotonic() - saved_at > SECONDS_BETWEEN_CHECKPOINTS:
            run.keep(scenario, path)
            saved_at = time.monotonic()
        if watch is not None:
            watch(Moment(engine.step, num_steps, rate, metrics))


def _stop(run: _Run, scenario: Scenario, path: Path | None, signal_number: int) -> NoReturn:
    if path is not None:
        run.keep(scenario, path)
    raise Interrupted(run.engine.step, path, signal_number)


def _metrics(engine: Any) -> dict[str, float]:
    return {name: float(value[0, 0]) for name, value in engine.evaluate().items()}


@contextmanager
def _stop_requests() -> Iterator[Callable[[], int | None]]:
    """Turn Ctrl-C and SIGTERM into a question asked between stretches, whose answer is the first one's number, or None:
    an exception inside a stretch would lose its state.
    """
    requested: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda number, _: requested.append(number)) for number in signals}
    try:
        yield lambda: requested[0] if requested else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
