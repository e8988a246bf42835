"""A checkpoint: an interrupted training run, from which it continues bit for bit.

It holds the secret that the noise is made of: whoever reads it can take the noise away. So it is readable by its owner
alone, never part of a model directory, and deleted when the run is done.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from noisecast import engines
from noisecast.files import half_written, read_arrays, why_unwritable, written_whole
from noisecast.locks import held
from noisecast.privacy.noise import RandomRoot

FORMAT = 4


@dataclass(frozen=True)
class Checkpoint:
    """Whose run it is, where its randomness comes from, and its state after `step` steps.

    evaluate_every: steps between evaluations, 0 for none.   noise_source: what its noise is drawn by.
    A run is resumed with the same two: an evaluation draws postponed noise, and of one key each generator makes its
    own, so with others the rest of the run would be another draw, a second release that nobody counts.
    """

    scenario: str
    root: RandomRoot
    state: dict[str, np.ndarray]
    evaluate_every: int = 0
    noise_source: str = field(default_factory=engines.noise_source)

    @property
    def step(self) -> int:
        return int(self.state["step"])


def save_checkpoint(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint`, whole or not at all."""
    root = checkpoint.root
    arrays: dict[str, Any] = {
        "format": np.int64(FORMAT),
        "scenario": np.frombuffer(checkpoint.scenario.encode(), np.uint8),
        "secret": np.frombuffer(root.secret, np.uint8),
        "secure_noise": np.bool_(root.secure_noise),
        "evaluate_every": np.int64(checkpoint.evaluate_every),
        "noise_source": np.frombuffer(checkpoint.noise_source.encode(), np.uint8),
        "insecure_seed": np.array([] if root.insecure_seed is None else [root.insecure_seed], np.int64),
    }
    arrays |= {f"state_{name}": array for name, array in checkpoint.state.items()}
    with written_whole(path, secret=True) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)


def remove_checkpoint(path: str | Path) -> None:
    """Remove it, and what a killed writer left half-written beside it: that holds the secret as well."""
    for file in (Path(path), *half_written(path)):
        file.unlink(missing_ok=True)


@contextmanager
def checkpoint_held(path: str | Path) -> Iterator[None]:
    """Keep every other process from training with this checkpoint while the block runs, or until we are killed.

    Two would overwrite each other's state, and the first to be done would take away what the other saves from.

    Raises: ValueError: another process has it, or nothing could be written beside it.
    """
    path = Path(path)
    if (reason := why_unwritable(path.absolute())) is not None:
        raise ValueError(reason)
    refusal = f"Another process is training from the checkpoint {path}; wait until it is done, or stop it."
    with held(path.with_name(f".{path.name}.lock"), refusal=refusal):
        yield


def load_checkpoint(path: str | Path, *, scenario: str) -> Checkpoint:
    """Read a checkpoint of the scenario with this id.

    Raises:
      ValueError: one sentence: it is missing, unreadable, or of another scenario.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(
            f"Expected a checkpoint at {path}, found none; leave out --resume to start from the beginning."
        )
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ValueError
        stored = read_arrays(io.BytesIO(path.read_bytes()))
        owner = stored["scenario"].tobytes().decode()
        seed = stored["insecure_seed"].reshape(-1).tolist()
        root = RandomRoot(stored["secret"].tobytes(), seed[0] if seed else None, bool(stored["secure_noise"]))
        state = {name.removeprefix("state_"): stored[name] for name in stored if name.startswith("state_")}
        source = stored["noise_source"].tobytes().decode()
        checkpoint = Checkpoint(owner, root, state, int(stored["evaluate_every"]), source)
        readable = int(stored["format"]) == FORMAT and min(checkpoint.step, checkpoint.evaluate_every) >= 0
        readable = readable and owner.isalnum() and source.isalnum()
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        readable = False
    if not readable:
        raise ValueError(f"{path} is not a readable checkpoint; delete it to start from the beginning.")
    if checkpoint.scenario != scenario:
        raise ValueError(
            f"{path} is a checkpoint of another scenario ({checkpoint.scenario}, not {scenario}): data or settings "
            "have changed; repeat the command it came from, or delete it to start anew."
        )
    return checkpoint
