"""A store: a folder in which a sweep's finished groups lie, one Parquet shard each, and nothing else that matters.

    store/
      shards/<hash of its bytes>.parquet   rows of one finished group, written whole or not at all
      ledger.json                          every run that the sweep makes, for the price of choosing among them
      key                                  the secret that noise and batches are made of; its owner's alone
      manifest.json                        an index for people: rebuilt whenever the store is opened

A shard says in its own metadata which runs it holds, so the folder of shards is the whole truth: killing whoever writes
it loses the group in flight and nothing else. A shard whose bytes are not what its name says is refused by name.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from noisecast.files import is_bomb, strict_json, why_unwritable, written_whole
from noisecast.locks import held
from noisecast.privacy.noise import RandomRoot
from noisecast.runners import Training
from noisecast.sweeps.ledger import Ledger, ledger_as_data, ledger_from
from noisecast.sweeps.selection import Selection
from noisecast.sweeps.tasks import Task, origin_of
from noisecast.table import COLUMNS, METRICS, table_from

_METADATA = b"noisecast"
_FOREIGN = "{} is not a shard of this version of noisecast; move it out of the store."
_RUN = ["scenario", "runner", "seed"]
_ORDER = ["problem", "optimizer", "expected_batch_size", "num_steps", "noise_multiplier", "l2_clip_norm",
          "learning_rate", "scenario", "runner", "seed", "step", "metric"]  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """What a shard says of itself.

    Args:
      cells: ids of the runs whose rows it holds (`tasks.cell_id`).
      code: hash of the code that computed them.   data: fingerprints of their problems.
      seconds: what computing them took [s].
      origin: of the secret that they were made from (`tasks.Task.origin`).
    """

    cells: tuple[str, ...]
    code: str
    data: tuple[str, ...]
    seconds: float
    origin: str = ""


class Store:
    """A folder of finished groups. Reading needs no lock; writing needs `open_for_writing`.

    Args:
      folder: of the store.
    Raises: ValueError with one sentence: no store there, or a damaged or foreign shard in it.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._shards = self.folder / "shards"
        self._read: dict[str, tuple[Finished, bytes]] = {}
        if not is_store(self.folder):
            raise ValueError(f"Expected a store at {self.folder}, found none; make one with: noisecast sweep.")
        self._refresh()

    @staticmethod
    @contextmanager
    def open_for_writing(folder: str | Path) -> Iterator["Store"]:
        """The store at `folder`, made where there is none; ours alone while the block runs, or until we are killed.

        Raises: ValueError: it cannot be written, holds something else, or another sweep is writing it.
        """
        folder = Path(folder)
        if not is_store(folder):
            reason = why_unwritable(folder.absolute())
            if reason is None and folder.exists() and (not folder.is_dir() or set(os.listdir(folder)) - {"lock"}):
                reason = f"Expected an empty or new folder for a store, got {folder}, which holds something else."
            if reason is not None:
                raise ValueError(reason)
            folder.mkdir(exist_ok=True)
            folder.chmod(0o700)  # losses of private examples, and how many trials were drawn
            (folder / "lock").touch()
            (folder / "shards").mkdir(exist_ok=True)
        refusal = f"Another sweep is writing {folder}; wait for it, stop it, or use another folder."
        with held(folder / "lock", refusal=refusal, keep=True):
            store = Store(folder)
            store._sweep_up()
            yield store

    @property
    def finished(self) -> dict[str, Finished]:
        """Every shard by name."""
        return {name: finished for name, (finished, _) in self._read.items()}

    @property
    def cells(self) -> set[str]:
        """Ids of all runs in the store."""
        return {cell for finished in self.finished.values() for cell in finished.cells}

    def root(self) -> RandomRoot:
        """Where the noise of this store's runs comes from; drawn from the operating system once.

        Kept, so that a resumed run is the run that it would have been. Whoever reads it can take the noise away.

        Raises: ValueError: it is lost, and runs were made from it, or damaged.
        """
        if not (self.folder / "key").exists() and not self.has_begun:
            with written_whole(self.folder / "key", secret=True) as temporary:
                temporary.write_bytes(RandomRoot.from_os_entropy().secret)
        return self.kept_root()

    def kept_root(self) -> RandomRoot:
        """The same, of runs that are there already.

        Raises: ValueError: the key is lost, or damaged.
        """
        path = self.folder / "key"
        if not path.exists():
            raise ValueError(
                f"Expected {path}, from which the runs of this store were made, but it is lost: they cannot be "
                "continued; use a new folder."
            )
        secret = path.read_bytes()
        if len(secret) != 32:
            raise ValueError(f"{path} is damaged: its runs cannot be continued; use a new folder.")
        return RandomRoot(secret, None)

    def add(self, table: pd.DataFrame, finished: Finished) -> None:
        """Write one group's rows, whole or not at all."""
        content = _as_bytes(table, finished)
        name = f"{hashlib.sha256(content).hexdigest()[:32]}.parquet"
        with written_whole(self._shards / name) as temporary:
            temporary.write_bytes(content)
        self._read[name] = finished, content

    def take_over(self, other: "Store", tasks: Sequence[Task]) -> None:
        """Runs of these tasks that another store has and this one lacks: who asks for them need not compute them.

        An id says everything that decides a run's numbers, its secret too: of runs, only those of seeds that everybody
        knows are shared.
        """
        asked = {cell: run for task in tasks for cell, run in zip(task.cells, task.runs, strict=True)}
        for name, (finished, content) in other._read.items():
            own = self.cells
            cells = tuple(cell for cell in finished.cells if cell in asked and cell not in own)
            if cells:
                rows, runs = _rows_of(other._shards / name, content), {asked[cell] for cell in cells}
                kept = [tuple(run.values()) in runs for run in rows.select(_RUN).to_pylist()]
                self.add(rows.filter(kept).to_pandas(), replace(finished, cells=cells))

    @property
    def has_begun(self) -> bool:
        """Whether a sweep has ever begun here, or left something behind."""
        return bool(self._read) or (self.folder / "ledger.json").exists()

    @property
    def is_of_trials(self) -> bool:
        """Whether its sweep drew a random number of trials, which must stay secret."""
        before = self.ledger_before()
        return before is not None and before.trials is not None

    def ledger_before(self) -> Ledger | None:
        """The ledger that the store's runs were made under; None where it is lost or damaged."""
        try:
            return self.ledger()
        except ValueError:
            return None

    def ledger(self) -> Ledger:
        """Every run that this store's sweep makes, for the price of choosing among them.

        Raises: ValueError: there is none, or it cannot be read.
        """
        path = self.folder / "ledger.json"
        try:
            return ledger_from(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            reason = "there is none"
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            reason = "it is damaged"
        raise ValueError(
            f"Expected {path}, which says what the sweep ran, but {reason}; only "
            "--price public can choose from this store: sweep in a new folder for another."
        )

    def write_ledger(self, ledger: Ledger) -> None:
        """What the sweep is about to run: written before the first of its runs touches the data."""
        # Its owner's alone: it tells how many random trials were drawn.
        with written_whole(self.folder / "ledger.json", secret=True) as temporary:
            temporary.write_text(json.dumps(ledger_as_data(ledger)), encoding="utf-8")

    def settle(self, selection: Selection) -> None:
        """Keep which of random trials was chosen. Only one may ever be told: the price covers one choice.

        Raises: ValueError: another trial was chosen before, by another score.
        """
        path, chosen = self.folder / "choice.json", {"scenario": selection.scenario, "seed": selection.seed}
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            metric, trial = before.pop("metric"), before
        except FileNotFoundError:
            with written_whole(path, secret=True) as temporary:
                temporary.write_text(json.dumps(chosen | {"metric": selection.metric}), encoding="utf-8")
            return
        except (OSError, ValueError, KeyError, AttributeError):
            raise ValueError(f"Expected {path} to say which trial was chosen before, but it is damaged.") from None
        if trial != chosen:
            raise ValueError(
                f"Expected the choice that was made before, by {metric}, got another trial by another score: the price "
                "covers one choice from these trials, not two. Choose by the score that was used first."
            )

    def read(self) -> pd.DataFrame:
        """All rows, in an order that does not depend on who finished first.

        Raises: ValueError: a shard is of another store.
        """
        if not self._read:
            return table_from([])
        parts = {name: _rows_of(self._shards / name, content) for name, (_, content) in self._read.items()}
        self._refuse_foreign(parts)
        table = pa.concat_tables(parts.values()).to_pandas()
        table = table.sort_values(_ORDER, kind="stable", ignore_index=True)
        # A run may lie in two shards where two sweeps shared cells: it is one run, from one key.
        return table_from(table.drop_duplicates([*_RUN, "step", "metric"], ignore_index=True))

    def _refuse_foreign(self, parts: dict[str, pa.Table]) -> None:
        """Whole shards of another store, put among ours: of runs that are not ours, or of ours from another key."""
        ledger, own = self.ledger_before(), self._own_origin()
        holders: dict[tuple, str] = {}
        for name, rows in parts.items():
            runs = {tuple(run.values()) for run in rows.group_by(_RUN).aggregate([]).to_pylist()}
            if ledger is not None and not all(_is_listed(run, ledger) for run in runs):
                raise ValueError(f"{self._shards / name} is of another sweep than ledger.json lists; move it away.")
            if self.finished[name].origin not in ("", own):
                raise ValueError(f"{self._shards / name} was made from another key than this store's; move it away.")
            for other in {holders[run] for run in runs & holders.keys()}:
                if set(self.finished[name].cells).isdisjoint(self.finished[other].cells):
                    raise ValueError(
                        f"{self._shards / name} and {other} hold the same runs from different keys; move the one that "
                        "is of another store away."
                    )
            holders |= dict.fromkeys(runs, name)

    def _own_origin(self) -> str:
        """Of this store's key; where that is lost, or not for this reader, of the first shard that has one."""
        try:
            return origin_of(self.kept_root())
        except (ValueError, OSError):
            return next((finished.origin for finished in self.finished.values() if finished.origin), "")

    def write_manifest(self, about: dict[str, Any]) -> None:
        """An index for people; nothing reads it."""
        shards = {name: asdict(f) | {"cells": len(f.cells)}
                  for name, f in sorted(self.finished.items())}  # fmt: skip
        with written_whole(self.folder / "manifest.json") as temporary:
            temporary.write_text(strict_json(about | {"runs": len(self.cells), "shards": shards}), encoding="utf-8")

    def _refresh(self) -> None:
        for path in sorted(self._shards.glob("[!.]*")):
            self._read[path.name] = _read_shard(path)

    def _sweep_up(self) -> None:
        """Remove what a killed writer left half-written: hidden, and never read."""
        for path in [*self._shards.glob(".*"), *self.folder.glob(".key.*"), *self.folder.glob(".*.json.*")]:
            path.unlink(missing_ok=True)


def _is_listed(run: tuple[str, str, int | None], ledger: Ledger) -> bool:
    scenario, runner, seed = run
    if runner == Training.name:
        return (scenario, seed) in ledger.runs
    return ledger.answers is None or (scenario, runner) in ledger.answers


def _as_bytes(table: pd.DataFrame, finished: Finished) -> bytes:
    arrow = pa.Table.from_pandas(table_from(table), preserve_index=False)
    said = json.dumps({"format": 1, **asdict(finished)}).encode()
    buffer = io.BytesIO()
    pq.write_table(arrow.replace_schema_metadata({**(arrow.schema.metadata or {}), _METADATA: said}), buffer)
    return buffer.getvalue()


def _read_shard(path: Path) -> tuple[Finished, bytes]:
    if path.suffix != ".parquet" or not path.is_file():
        raise ValueError(_FOREIGN.format(path))
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest()[:32] != path.stem:
        raise ValueError(
            f"{path} is damaged: its content is not what its name says. Delete it; the same sweep computes it again."
        )
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        schema = file.schema_arrow
        said = json.loads((schema.metadata or {})[_METADATA])
        if is_bomb(8 * len(schema.names) * file.metadata.num_rows, len(content)):
            raise ValueError("rows")
        names = [column.name for column in COLUMNS]
        if said.pop("format") != 1 or schema.names != names:
            raise KeyError("format")
        finished = Finished(**said | {"cells": tuple(said["cells"]), "data": tuple(said["data"])})
    except Exception:  # A stranger's bytes make Arrow raise errors of many types.
        raise ValueError(_FOREIGN.format(path)) from None
    return finished, content


def _rows_of(path: Path, content: bytes) -> pa.Table:
    """A shard's rows, in `table_from`'s columns; as Arrow's, for a frame of each of thousands takes half a minute."""
    try:
        table = pq.read_table(pa.BufferReader(content))
        table.validate(full=True)  # text that is no UTF-8 would fail later, while sorting
        table = table.cast(_schema())
        lacks = [column.name for column in COLUMNS if column.dtype == "int64" and table[column.name].null_count]
        if lacks or not set(table["metric"].unique().to_pylist()) <= METRICS.keys():
            raise ValueError("rows")
        return table
    except Exception:  # as above
        raise ValueError(_FOREIGN.format(path)) from None


@cache
def _schema() -> pa.Schema:
    return pa.Schema.from_pandas(table_from([]), preserve_index=False)


def is_store(folder: str | Path) -> bool:
    """Whether there is a store, not whether it is whole: others have folders called shards too."""
    return (Path(folder) / "shards").is_dir() and (Path(folder) / "lock").is_file()
