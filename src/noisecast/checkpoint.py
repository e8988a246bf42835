"""A checkpoint: an interrupted training run, from which it continues bit for bit.

It holds the secret that the noise is made of: whoever reads it can take the noise away. So it is readable by its owner
alone, never part of a model directory, and deleted when the run is done.
"""

import glob
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from noisecast.files import read_arrays, written_whole
from noisecast.privacy.noise import RandomRoot

FORMAT = 2


@dataclass(frozen=True)
class Checkpoint:
    """Whose run it is, where its randomness comes from, and its state after `step` steps."""

    scenario: str
    root: RandomRoot
    state: dict[str, np.ndarray]

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
        "insecure_seed": np.array([] if root.insecure_seed is None else [root.insecure_seed], np.int64),
    }
    arrays |= {f"state_{name}": array for name, array in checkpoint.state.items()}
    with written_whole(path, secret=True) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)


def remove_checkpoint(path: str | Path) -> None:
    """Remove it, and what a killed writer left half-written beside it: that holds the secret as well."""
    path = Path(path)
    for file in (path, *path.parent.glob(f".{glob.escape(path.name)}.*{glob.escape(path.suffix)}")):
        file.unlink(missing_ok=True)


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
        stored = read_arrays(io.BytesIO(path.read_bytes()))
        owner = stored["scenario"].tobytes().decode()
        seed = stored["insecure_seed"].reshape(-1).tolist()
        root = RandomRoot(stored["secret"].tobytes(), seed[0] if seed else None, bool(stored["secure_noise"]))
        state = {name.removeprefix("state_"): stored[name] for name in stored if name.startswith("state_")}
        checkpoint = Checkpoint(owner, root, state)
        readable = int(stored["format"]) == FORMAT and checkpoint.step >= 0 and owner.isalnum()
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
