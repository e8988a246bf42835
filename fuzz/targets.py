"""What is fuzzed: one target a format, each with files to begin from and the function that reads it.

A reader must answer: with a result, or with a ValueError whose text is one line (a scenario file's: one line a
mistake). Anything else, an exception of another type, a hang, memory that the file does not account for, is a finding.
"""

import gzip
import hashlib
import io
import json
import shutil
import sqlite3
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from noisecast import DPSGD, Poisson, SampledGaussian, Scenario, linear_model
from noisecast.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from noisecast.cli.advise_numbers import read_numbers
from noisecast.engines import start
from noisecast.ledger import PrivacyLedger
from noisecast.model_dir import load_model, save_model
from noisecast.privacy.noise import RandomRoot
from noisecast.privacy.sampling import Shuffled
from noisecast.problems.datasets import (
    Dataset,
    ReadOptions,
    forum500,
    imdb,
    load_file,
    movielens,
    read_public_columns,
    stackoverflow,
)
from noisecast.problems.datasets.encoders import MatrixEncoder
from noisecast.release import train
from noisecast.scenario_file.document import read_document
from noisecast.sweeps.ledger import Ledger, ledger_as_data
from noisecast.sweeps.store import Finished, Store, _as_bytes
from noisecast.table import table_from

EXAMPLES = Path(__file__).parents[1] / "examples"
PARAMETERS = "parameters.npz"
ROOT = RandomRoot.from_insecure_seed(0)


@dataclass(frozen=True)
class Target:
    """One format.

    Args:
      suffix: of the file's name.   seeds: whole files to begin from.
      read: what reads it, given the path of a file in a folder of its own.   words: what such files are made of.
      may_say_more: whether a refusal may have several lines, one a mistake.
    """

    suffix: str
    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[Path], Any]
    words: tuple[bytes, ...] = ()
    may_say_more: bool = False

    def run(self, content: bytes, folder: Path) -> str:
        """What came of it, `result` or `refused`; every other outcome is raised."""
        path = folder / f"input{self.suffix}"
        path.write_bytes(content)
        try:
            self.read(path)
        except ValueError as error:
            said = str(error)
            if not said.strip() or ("\n" in said and not self.may_say_more):
                raise AssertionError(f"Expected one line, got {said!r}.") from error
            return "refused"
        return "result"


# --- Files to begin from ----------------------------------------------------------------------------------------------

CSV = b'age,name,label\n1,"a ""b""",no\n2.5,c,yes\n-3e2,"d\ne",no\n4,f,yes\n5,g,no\n'
NUMBERS = b"age,height,label\n1,2.5,no\n2.5,-1e3,yes\n-3e2, 7,no\n4,0,yes\n5,.5,no\n"
SVM = b"1 1:0.5 3:2 # no\n-1 2:1e3 7:-1\n+1 1:1\n0 4:2\n1 qid:3 1:2\n"


def _npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _packed_npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


CSR = {"indptr": [0, 2, 3, 3, 4], "indices": [0, 2, 1, 0], "counts": [1, 2, 1, 4], "y": [0, 1, 0, 1]}


def _npz_seeds() -> list[bytes]:
    dense = np.arange(8, dtype=np.float32).reshape(4, 2)
    return [
        _npz(X=dense, y=np.array([0, 1, 1, 0])),
        _packed_npz(X=dense, labels=np.array(["a", "b", "a", "b"])),
        _npz(**CSR, num_tokens=[4, 1, 1, 4], num_features=3),
        _npz(**CSR, shape=[4, 3]),
    ]


def _parquet_seeds() -> list[bytes]:
    found = []
    for frame in (
        pd.DataFrame({"age": [1.0, 2.0, None, 4.0], "label": ["a", "b", "a", "b"]}),
        pd.DataFrame({"age": [1, 2, 3, 4], "ok": [True, False, True, False], "label": [0, 1, 0, 1]}),
    ):
        for codec in ("snappy", "none"):
            buffer = io.BytesIO()
            pq.write_table(pa.Table.from_pandas(frame), buffer, compression=codec)
            found.append(buffer.getvalue())
    return found


TOML_WORDS = (
    b"[problem]\n", b"[[problem]]\n", b"[mechanism]\n", b"[[optimizer]]\n", b"[draws]\n", b"[tuning]\n",
    b'kind = "file"\n',    b"= [", b"]", b"inf", b"nan", b"-1", b"1e400", b"9" * 25, b"true", b'""', b"[" * 500,
    b"{log_uniform = [0.1, 1]}",
    b"num_steps", b"num_epochs", b"record_at", b"runners", b"target_epsilon", b"batch_size", b"learning_rate",
)  # fmt: skip


def _toml_seeds() -> list[bytes]:
    numbers = ("advise_numbers", "bounds")
    return [p.read_bytes() for p in sorted(EXAMPLES.glob("*.toml")) if not p.stem.startswith(numbers)]


def _numbers_seeds() -> list[bytes]:
    return [path.read_bytes() for path in sorted(EXAMPLES.glob("advise_numbers*.toml"))]


@cache
def _scenario() -> Scenario:
    features = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    data = Dataset("toy", features, (features[:, 0] > 0).astype(np.int32), ("no", "yes"))
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson.for_batch_size(8, 40))
    return Scenario(problem=linear_model(data), mechanism=mechanism, optimizer=DPSGD(learning_rate=0.1), num_steps=20)


@cache
def _new_run() -> tuple[Any, dict[str, np.ndarray]]:
    run = start([_scenario()], repeats=[0], root=ROOT)
    return run, run.state()


def _checkpoint_seeds() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        found = []
        for root in (ROOT, RandomRoot(bytes(32), None, secure_noise=True)):
            save_checkpoint(path, Checkpoint(_scenario().id, root, _new_run()[1]))
            found.append(path.read_bytes())
        return found


def _read_checkpoint(path: Path) -> None:
    saved = load_checkpoint(path, scenario=_scenario().id)
    _new_run()[0].restore(saved.state)


def _shard_seeds() -> list[bytes]:
    row = {"scenario": "s", "problem": "p", "optimizer": "DP-SGD", "runner": "training", "metric": "loss", "value": 0.5}
    row |= {"status": "ok", "num_steps": 3}
    row |= dict.fromkeys(
        ("learning_rate", "noise_multiplier", "l2_clip_norm", "sampling_probability", "expected_batch_size",
         "epsilon", "nominal_epsilon", "target_delta"), 0.5,
    )  # fmt: skip
    about = Finished(cells=("a", "b"), code="c", data=("d",), seconds=1.0)
    return [_as_bytes(table_from([row | {"step": step, "seed": 0} for step in range(3)]), about)]


def _read_shard(path: Path) -> None:
    """As a stranger's store: the name is right, whatever the content is."""
    folder = path.parent / "store"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "shards").mkdir(parents=True)
    (folder / "lock").touch()
    content = path.read_bytes()
    (folder / "shards" / f"{hashlib.sha256(content).hexdigest()[:32]}.parquet").write_bytes(content)
    Store(folder).read()


def _store_ledger_seeds() -> list[bytes]:
    return [json.dumps(ledger_as_data(Ledger(runs={}, is_private=True))).encode()]


def _read_store_ledger(path: Path) -> None:
    folder = path.parent / "store"
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    (folder / "lock").touch()
    shutil.copy(path, folder / "ledger.json")
    Store(folder).ledger()


@cache
def _model_files() -> dict[str, bytes]:
    model = train(_scenario(), insecure_seed=0, num_evaluations=0)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "model")
        save_model(target, model, encoder=MatrixEncoder(3), label_names=("no", "yes"))
        return {file.name: file.read_bytes() for file in target.iterdir()}


def _model_with(name: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        folder = path.parent / "model"
        folder.mkdir(exist_ok=True)
        for other, content in _model_files().items():
            (folder / other).write_bytes(content)
        shutil.copy(path, folder / name)
        model = load_model(folder)
        if name == "model.json":
            model.metric_names, model.has_label_sets  # noqa: B018

    return read


@cache
def _ledger_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        ledger = PrivacyLedger(Path(folder, "l"), create=True)
        ledger.set_budget("reviews", epsilon=50.0, delta=1e-5)
        # Without amplification by sampling its price is a formula: thousands of files a minute, not a dozen.
        mechanism = replace(_scenario().mechanism, sampler=Shuffled(8, 40))
        ledger.spend("reviews", mechanism, 5, what="a model", run="a")
        with sqlite3.connect(Path(folder, "l")) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
        return Path(folder, "l").read_bytes()


def _read_ledger(path: Path) -> None:
    for beside in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + beside).unlink(missing_ok=True)
    ledger = PrivacyLedger(path)
    ledger.check()
    for dataset in ledger.datasets:
        ledger.budget(dataset)
        ledger.entries(dataset)


def _load_text(path: Path) -> None:
    load_file(path, ReadOptions(text="name"))


RATINGS = b"1\t2\t3\t881250949\n943\t1682\t5\t881250950\n2\t2\t1\t881250951\n"
REVIEWS = {
    "aclImdb/train/pos/0_9.txt": b"Good, good film.", "aclImdb/train/neg/1_2.txt": b"Bad<br />film",
    "aclImdb/test/pos/3_8.txt": b"good", "aclImdb/test/neg/2_1.txt": b"bad", "aclImdb/README": b"no review",
}  # fmt: skip


def _imdb_archives() -> list[bytes]:
    found = []
    for mode in ("w:", "w:gz", "w:xz"):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode=mode) as archive:
            for name, content in REVIEWS.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        found.append(buffer.getvalue())
    return found


def _movielens_archives() -> list[bytes]:
    found = []
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", compression) as archive:
            archive.writestr("ml-100k/README", b"no ratings")
            archive.writestr("ml-100k/u.data", RATINGS)
        found.append(buffer.getvalue())
    return found


def _forum_seeds() -> list[bytes]:
    arrays = {**CSR, "num_tokens": [4, 1, 1, 4], "label": [0, 1, 0, 1], "num_train": 2, "num_features": 3}
    return [_npz(**arrays), _packed_npz(**arrays)]


def _titles() -> list[bytes]:
    rows = "".join(f"a title {i},tag{i % 3}|other\n" for i in range(40))
    return [gzip.compress(("title,tags\n" + rows).encode())]


def _catalogued(load: Callable[[Path], Any], name: str) -> Callable[[Path], None]:
    """As somebody's data folder with that one file."""

    def read(path: Path) -> None:
        folder = path.parent / "data"
        folder.mkdir(exist_ok=True)
        shutil.copy(path, folder / name)
        load(folder)

    return read


JSON_WORDS = (b"null", b"true", b"{}", b"[]", b'"', b"1e999", b"-1", b"[" * 2000, b'{"a":' * 500, b"9" * 400, b"NaN")
NUMBER_WORDS = (b"nan", b"inf", b"1e999", b"9" * 400, b"\x00", b"\xff\xfe", b'"', b"\r\n", b"-0", b"label", b",,")

NPZ_WORDS = (b"PK\x03\x04", b"PK\x01\x02", b"|O", b"<f8", b"<U9", b"(2, 2)", b"(1000000000000,)")

TAR_WORDS = (
    b"aclImdb/train/pos/",
    b"ustar",
    b"././@LongLink",
    b"PaxHeader",
    b"GNU.sparse.realsize=9",
    b"7" * 11,
    b"\x80",
)
ZIP_WORDS = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"u.data", b"\t", b"\xff" * 4)

TARGETS = {
    "csv": Target(".csv", lambda: [NUMBERS, CSV], load_file, NUMBER_WORDS),
    "text": Target(".csv", lambda: [CSV], _load_text, NUMBER_WORDS),
    "tsv": Target(".tsv", lambda: [each.replace(b",", b"\t") for each in (NUMBERS, CSV)], load_file, NUMBER_WORDS),
    "csv.gz": Target(".csv.gz", lambda: [gzip.compress(NUMBERS), gzip.compress(CSV)], load_file),
    "svmlight": Target(".svm", lambda: [SVM], load_file, (*NUMBER_WORDS, b":", b"#", b" qid:", b" 2147483648:1")),
    "npz": Target(".npz", _npz_seeds, load_file, NPZ_WORDS),
    "parquet": Target(".parquet", _parquet_seeds, load_file, (b"PAR1",)),
    "imdb.tar": Target(".tar", _imdb_archives, _catalogued(imdb, "aclImdb_v1.tar.gz"), TAR_WORDS),
    "movielens.zip": Target(".zip", _movielens_archives, _catalogued(movielens, "ml-100k.zip"), ZIP_WORDS),
    "u.data": Target(".data", lambda: [RATINGS], _catalogued(movielens, "u.data"), NUMBER_WORDS),
    "forum500": Target(".npz", _forum_seeds, _catalogued(forum500, "forum500_counts.npz"), NPZ_WORDS),
    "titles": Target(".csv.gz", _titles, _catalogued(stackoverflow, "so_titles_tags_30k.csv.gz")),
    "bounds.toml": Target(".toml", lambda: [b"age = [0, 1]\nc = ['x', '*']\n"], read_public_columns, TOML_WORDS),
    "bounds.json": Target(".json", lambda: [b'{"age": [0, 1]}'], read_public_columns, JSON_WORDS),
    "scenario": Target(".toml", _toml_seeds, read_document, TOML_WORDS, may_say_more=True),
    "numbers": Target(".toml", _numbers_seeds, read_numbers, TOML_WORDS, may_say_more=True),
    "checkpoint": Target(".checkpoint", _checkpoint_seeds, _read_checkpoint, NPZ_WORDS),
    "shard": Target(".parquet", _shard_seeds, _read_shard, (b"PAR1", b"noisecast", *JSON_WORDS)),
    "store-ledger": Target(".json", _store_ledger_seeds, _read_store_ledger, (b'"cells": ', *JSON_WORDS)),
    "model.json": Target(".json", lambda: [_model_files()["model.json"]], _model_with("model.json"), JSON_WORDS),
    "privacy.json": Target(".json", lambda: [_model_files()["privacy.json"]], _model_with("privacy.json"), JSON_WORDS),
    "parameters": Target(".npz", lambda: [_model_files()[PARAMETERS]], _model_with(PARAMETERS), NPZ_WORDS),
    "ledger": Target(".ledger", lambda: [_ledger_bytes()], _read_ledger, (b"CREATE TABLE", b"entries", *JSON_WORDS)),
}  # fmt: skip
