"""Killed at any moment, a run for release comes to the same model, bit for bit, and is never missing in the ledger."""

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))
import train_to_be_killed as training

from noisecast import release
from noisecast.checkpoint import load_checkpoint
from noisecast.ledger import PrivacyLedger

EVERY_KIND = [(engine, optimizer) for engine in training.NUM_STEPS for optimizer in training.OPTIMIZERS]
QUICK = {("row_sparse", "sgd")}


@pytest.fixture(scope="module")
def processes():
    """Forked from a server that has imported everything and started nothing: JAX does not survive a fork of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_to_be_killed"])
    return context


class Killed:
    """Runs in a folder, one after another, and what was seen of their randomness."""

    def __init__(self, processes, folder: Path, engine: str, optimizer: str):
        self.processes, self.folder, self.kind = processes, folder, (engine, optimizer)
        self.id = training.scenario(engine, optimizer).id
        self.ledger = PrivacyLedger(folder / "ledger", create=True)
        self.ledger.set_budget(training.DATASET, epsilon=1e6, delta=1e-5)
        self.seen: set[str] = set()
        self.kept: list[int] = []  # steps that outlived a kill
        self.seconds = self.stepping = 3.0  # of a whole run, and from its first checkpoint on

    def start(self):
        process = self.processes.Process(target=training.run, args=(self.folder, *self.kind))
        process.start()
        return process

    def look(self) -> None:
        """Whoever has taken a step, its randomness on the disk to prove it, has an entry."""
        entries = [entry.run for entry in self.ledger.entries(training.DATASET)]
        assert len(entries) == len(set(entries)), "a resumed run was counted twice"
        for name in ("run.checkpoint", "last.checkpoint"):
            if (self.folder / name).exists():
                saved = load_checkpoint(self.folder / name, scenario=self.id)  # whole, always
                if saved.step > 0:  # the first checkpoint is written before the entry, and before any step
                    self.seen.add(saved.root.name)
                if name == "run.checkpoint":
                    self.kept.append(saved.step)
        assert self.seen <= set(entries), "a run that took steps is missing in the ledger"

    def undisturbed(self) -> None:
        """One run that is let alone: what it takes, and that it does."""
        began, process = time.monotonic(), self.start()
        self.await_checkpoint(process, None)
        stepped = time.monotonic()
        process.join()
        self.seconds, self.stepping = time.monotonic() - began, time.monotonic() - stepped
        self.look()
        self.compare()

    def await_checkpoint(self, process, before: int | None) -> None:
        while self.written() in (before, None) and process.exitcode is None:
            process.join(0.02)

    def kill(self, rng: random.Random) -> bool:
        """Whether a process was killed before it was done."""
        before, process, number = self.written(), self.start(), rng.choice((signal.SIGKILL, signal.SIGTERM))
        if rng.random() < 0.2:  # while it begins
            process.join(rng.uniform(0, self.seconds))
        else:  # while it takes steps, and writes a checkpoint after each few
            self.await_checkpoint(process, before)
            began = time.monotonic()
            process.join(rng.expovariate(2 / self.stepping))
            if process.exitcode is not None:  # done before, on a machine that had less time for it at first
                self.stepping = max(0.1, min(self.stepping, time.monotonic() - began))
        done = process.exitcode is not None
        if not done:
            with contextlib.suppress(ProcessLookupError):  # done just now
                os.kill(process.pid, number)
            process.join(60)
            assert process.exitcode is not None, "it did not stop when it was asked to"
        self.look()
        if process.exitcode == 0:
            self.compare()
        return process.exitcode != 0

    def written(self) -> int | None:
        try:
            return (self.folder / "run.checkpoint").stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def finish(self) -> None:
        left = [self.folder / name for name in ("run.checkpoint", ".run.checkpoint.lock")]
        if not any(path.exists() for path in left):
            return
        process = self.start()
        process.join()
        assert process.exitcode == 0
        self.look()
        self.compare()

    def compare(self) -> None:
        params = np.load(self.folder / "params.npy")
        np.testing.assert_array_equal(params, training.undisturbed(self.folder, *self.kind))
        (self.folder / "params.npy").unlink()
        (self.folder / "last.checkpoint").unlink()


@pytest.mark.parametrize(
    "engine, optimizer, kills",
    [
        *(pytest.param(*kind, 2, id="-".join(kind)) for kind in EVERY_KIND if kind in QUICK),
        *(pytest.param(*kind, 50, id="-".join((*kind, "50")), marks=pytest.mark.slow) for kind in EVERY_KIND),
    ],
)
def test_a_run_that_was_killed_again_and_again_comes_to_the_same_model(processes, tmp_path, engine, optimizer, kills):
    rng, runs = random.Random(kills), Killed(processes, tmp_path, engine, optimizer)
    began, killed = time.monotonic(), 0
    runs.undisturbed()
    while killed < kills:
        killed += runs.kill(rng)
    runs.finish()
    spent = runs.ledger.entries(training.DATASET)
    left = [path.name for path in tmp_path.glob(".*")]
    assert not left, f"{left} hold the secret of the noise, and nobody will ever remove them"
    print(f"{killed} kills, {len(spent)} runs in the ledger, steps kept {runs.kept}, {time.monotonic() - began:.0f} s")
    assert runs.ledger.check() == []
    assert kills < 10 or len(set(runs.kept)) > kills / 4  # most were killed midway


def test_a_crash_right_after_an_evaluation_changes_nothing(tmp_path, monkeypatch):
    """Evaluating gives rows the noise that they lack: the checkpoint is of after that, which is not done again."""
    monkeypatch.setattr(release, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    asked = replace(training.scenario("row_sparse", "sgd"), num_steps=400)
    expected = release.train(asked, insecure_seed=1, watch=lambda moment: None, num_evaluations=4).params

    def crash(moment: release.Moment) -> None:
        if moment.step == 200:
            raise RuntimeError("killed")

    checkpoint = tmp_path / "run.checkpoint"
    with pytest.raises(RuntimeError, match="killed"):
        release.train(asked, insecure_seed=1, checkpoint=checkpoint, watch=crash, num_evaluations=4)
    assert load_checkpoint(checkpoint, scenario=asked.id).step == 200
    resumed = release.train(asked, checkpoint=checkpoint, resume=True, watch=lambda moment: None, num_evaluations=4)
    np.testing.assert_array_equal(resumed.params, expected)


def test_another_seed_is_seen(tmp_path):
    """The control: of another run's randomness the model is another one."""
    ledger = PrivacyLedger(tmp_path / "ledger", create=True)
    ledger.set_budget(training.DATASET, epsilon=1e6, delta=1e-5)
    found = []
    for _ in range(2):
        training.run(tmp_path, "row_sparse", "sgd")
        found.append(np.load(tmp_path / "params.npy"))
    assert (found[0] != found[1]).any()
