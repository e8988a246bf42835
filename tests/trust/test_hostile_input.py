"""Files of strangers: a result, or one sentence. No traceback, no hang, no code run, no memory beyond the file's own.

The same targets that `python -m fuzz` runs for hours, for a second each; and what fuzzing would hardly ever find.
"""

import contextlib
import gzip
import io
import json
import pickle
import random
import re
import sqlite3
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

sys.path.append(str(Path(__file__).parents[2]))
import noisecast
from fuzz.mutate import mutated
from fuzz.targets import CSV, TARGETS
from noisecast import SampledGaussian, Stream
from noisecast.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from noisecast.cli import main
from noisecast.files import MOST_UNPACKED, read_arrays
from noisecast.ledger import PrivacyLedger
from noisecast.model_dir import load_model
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.datasets import (
    DataError,
    ReadOptions,
    contents,
    csv_file,
    imdb,
    load_file,
    movielens,
    read_public_columns,
)

SOURCES = sorted(Path(noisecast.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("name", TARGETS)
def test_garbled_files_are_read_or_refused(name, tmp_path):
    target, rng = TARGETS[name], random.Random(900_300)
    seeds = target.seeds()
    for seed in seeds:
        target.run(seed, tmp_path)
    for content in (b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n" * 1000, seeds[0][:-1], seeds[0] * 2):
        target.run(content, tmp_path)
    until, count = time.monotonic() + 1.0, 0
    while time.monotonic() < until and count < 500:
        target.run(mutated(rng, seeds, target.words), tmp_path)
        count += 1
    assert count > 5


def test_a_reader_that_does_not_refuse_is_seen(tmp_path):
    """The control: what raises another error, or says two lines, does not pass for a refusal."""

    def careless(path: Path) -> None:
        if path.read_bytes():
            raise KeyError("a bug")

    target = TARGETS["csv"]
    with pytest.raises(KeyError):
        replace(target, read=careless).run(CSV, tmp_path)

    def talkative(path: Path) -> None:
        raise ValueError("one\ntwo")

    with pytest.raises(AssertionError, match="Expected one line"):
        replace(target, read=talkative).run(CSV, tmp_path)


# --- Nothing that is read back can run code ---------------------------------------------------------------------------


def test_nothing_reads_pickles_but_processes_that_belong_together():
    """Workers of one sweep or advice send pickles through pipes of their own; no file is ever read as one."""
    # A method named eval is none of Python's: torch modules have one.
    dangerous = (
        r"allow_pickle=True|pickle\.loads?\(|joblib|marshal|shelve|(?<![.\w])eval\(|\bexec\(|torch\.load|yaml\.load\("
    )
    found = {path.name for path in SOURCES if re.search(dangerous, path.read_text(encoding="utf-8"))}
    assert found == {"worker_process.py", "workers.py"}
    assert all(
        "np.load(" not in (text := p.read_text(encoding="utf-8")) or "allow_pickle=False" in text for p in SOURCES
    )


class _Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def trap(tmp_path):
    path = tmp_path / "code was run"
    yield path
    assert not path.exists()


def test_a_pickled_array_runs_no_code(tmp_path, trap):
    evil = np.array([_Evil(trap)], dtype=object)
    buffer = io.BytesIO()
    np.savez(buffer, X=evil, scenario=evil, params=evil, y=np.array([1]))
    np.load(io.BytesIO(buffer.getvalue()), allow_pickle=True)["X"]
    assert trap.exists(), "the trap works"
    trap.unlink()
    (tmp_path / "evil.npz").write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match="holds pickled Python objects, which could run code"):
        load_file(tmp_path / "evil.npz")
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        load_checkpoint(tmp_path / "evil.npz", scenario="s")
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.json", "privacy.json"):
        (folder / name).write_text("{}")
    (folder / "parameters.npz").write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match="not a readable model directory"):
        load_model(folder)


def test_a_file_that_is_itself_a_pickle_runs_no_code(tmp_path, trap):
    content = pickle.dumps(_Evil(trap))
    for name in ("evil.npz", "evil.parquet", "evil.csv", "evil.svm"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError):
            load_file(tmp_path / name)
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        load_checkpoint(tmp_path / "evil.npz", scenario="s")


def test_a_parquet_file_with_a_pickled_type_runs_no_code(tmp_path, trap):
    """Arrow once unpickled types that a file brought with it (CVE-2023-47248)."""
    kind = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(_Evil(trap))}
    schema = pa.schema([pa.field("x", pa.float64(), metadata=kind), pa.field("label", pa.int64())])
    table = pa.Table.from_arrays([pa.array([1.0, 2.0, 3.0, 4.0]), pa.array([0, 1, 0, 1])], schema=schema)
    pq.write_table(table, tmp_path / "evil.parquet")
    with contextlib.suppress(DataError):
        load_file(tmp_path / "evil.parquet")


# --- Small files that ask for much ------------------------------------------------------------------------------------


def npy(shape: tuple, content: bytes, dtype: str = "<f4") -> bytes:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def zipped(compression: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("rows", [10**9, 10**12, 2**60])
def test_a_header_that_claims_more_rows_than_there_are(tmp_path, rows):
    claims = zipped(X=npy((rows, 1), bytes(100)), y=npy((4,), bytes(32), "<i8"), params=npy((rows,), bytes(8)))
    assert len(claims) < 2000
    with pytest.raises(DataError, match=r"is not a readable \.npz file"):
        load_file(save(tmp_path / "a.npz", claims))
    with pytest.raises(ValueError, match="is not a readable checkpoint"):
        load_checkpoint(tmp_path / "a.npz", scenario="s")


def test_a_checkpoint_whose_scenario_would_break_the_line(tmp_path):
    """Found by the fuzzer: the name that it gives its scenario was shown as it came."""
    root = RandomRoot.from_insecure_seed(1)
    for name, says in (
        ("0123abcd", "is a checkpoint of another scenario"),
        ("ab\ncd", "not a readable"),
        ("", "not a"),
    ):
        save_checkpoint(tmp_path / "a.npz", Checkpoint(name, root, {"step": np.asarray(3)}))
        with pytest.raises(ValueError, match=says) as found:
            load_checkpoint(tmp_path / "a.npz", scenario="s")
        assert "\n" not in str(found.value)


def test_archives_that_unpack_to_hundreds_of_times_themselves(tmp_path, monkeypatch):
    zeros = bytes(MOST_UNPACKED + 1)
    bomb = zipped(zipfile.ZIP_DEFLATED, X=npy((len(zeros) // 4, 1), zeros))
    with pytest.raises(ValueError, match=r"would unpack to 256 MiB, .* times itself"):
        read_arrays(io.BytesIO(bomb))
    monkeypatch.setattr(contents, "MOST_UNPACKED", 2**20)
    packed = gzip.compress(b"a,label\n" + b"1,0\n2,1\n" * 2**18)
    assert 200 * len(packed) < 2**21
    with pytest.raises(DataError, match="unpacks to more than 1 MiB, 200 times itself"):
        load_file(save(tmp_path / "a.csv.gz", packed))


def tar_gz(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_catalogued_archives_that_unpack_to_hundreds_of_times_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr("noisecast.files.MOST_UNPACKED", 2**20)
    with zipfile.ZipFile(tmp_path / "ml-100k.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ml-100k/u.data", bytes(2**22))
    save(tmp_path / "aclImdb_v1.tar.gz", tar_gz(**{"aclImdb/train/pos/1_9.txt": bytes(2**22)}))
    for read in (movielens, imdb):
        with pytest.raises(DataError, match="unpack to hundreds of times itself"):
            read(tmp_path)


def test_a_table_read_in_many_blocks_is_the_same_and_names_the_same_rows(tmp_path, monkeypatch):
    """With blocks of a few rows; some cells are longer than one."""
    path = tmp_path / "a.csv"
    rows = [f"{i}.5,{'word ' * (i % 40)}{i % 2},{i % 3}" for i in range(500)]
    whole = "a,text,label\n" + "\n".join(rows) + "\n"
    options = ReadOptions(columns=("a",))
    save(path, whole.encode())
    expected = load_file(path, options)[0].content_hash, load_file(path, ReadOptions(text="text"))[0].content_hash
    monkeypatch.setattr(csv_file, "BLOCKS", (64, 2**8, 2**20))
    assert expected == tuple(load_file(path, o)[0].content_hash for o in (options, ReadOptions(text="text")))
    monkeypatch.setattr(csv_file, "BLOCKS", (2**12, 2**20))
    assert expected[0] == load_file(path, options)[0].content_hash
    for last, says in [
        ("1,2", "Row 501 of .* has 2 cells, expected 3"),
        ("x,y,1", "got 'x' in row 501 of column 'a'"),
        (",y,1", "got nothing in row 501 of column 'a'"),
        ("inf,y,1", "got inf in row 501 of column 'a'"),
        ("1e300,y,1", r"got 1e\+300 in row 501 of "),
    ]:
        save(path, (whole + last + "\n").encode())
        with pytest.raises(DataError, match=says):
            load_file(path, options)


def test_a_parquet_file_of_millions_of_equal_rows(tmp_path):
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_000_000, np.int8)), pa.array([1.0]))
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("label", column.type)])) as writer:
        for _ in range(50):
            writer.write_table(pa.table({"label": column}))
    size = (tmp_path / "a.parquet").stat().st_size
    assert 200 * size < 8 * 50_000_000
    with pytest.raises(DataError, match=r"says it holds 50,000,000 rows of 1 columns"):
        load_file(tmp_path / "a.parquet")


@pytest.mark.parametrize("column", [10**9 - 1, 2**31, 2**60])
def test_a_feature_with_a_number_beyond_everything(tmp_path, column):
    with pytest.raises(DataError, match=r"Line 1 of|Expected at most 100,000,000 features"):
        load_file(save(tmp_path / "a.svm", f"1 {column}:1\n0 1:1\n".encode()))
    arrays = {"indptr": [0, 1, 2], "data": [1.0, 1.0], "y": [0, 1]}
    for more in ({"indices": [0, column]}, {"indices": [0, 1], "num_features": column}):
        np.savez(tmp_path / "a.npz", **arrays, **more)
        with pytest.raises(DataError, match="Expected at most 100,000,000 features"):
            load_file(tmp_path / "a.npz")


def test_two_entries_that_name_millions_of_features(tmp_path):
    says = "got 50,000,001 features and 2 entries"
    with pytest.raises(DataError, match=says):
        load_file(save(tmp_path / "a.svm", b"1 0:1\n0 50000000:1\n"))
    np.savez(tmp_path / "a.npz", indptr=[0, 1, 2], indices=[0, 50_000_000], data=[1.0, 1.0], y=[0, 1])
    with pytest.raises(DataError, match=says):
        load_file(tmp_path / "a.npz")
    data, _ = load_file(save(tmp_path / "b.svm", b"1 0:1\n0 5000000:1\n"))
    assert data.features.shape == (2, 5_000_001)


@pytest.mark.parametrize("name", ["a.toml", "a.json"])
@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5000])
def test_nesting_and_numbers_without_end(tmp_path, name, value):
    text = f"a = {value}" if name.endswith("toml") else f'{{"a": {value}'
    with pytest.raises(DataError, match=r"cannot be read as (TOML|JSON)"):
        read_public_columns(save(tmp_path / name, text.encode()))


def test_bounds_larger_than_any_float(tmp_path):
    with pytest.raises(DataError, match="Expected finite bounds"):
        read_public_columns(save(tmp_path / "b.json", json.dumps({"a": [0, 10**400]}).encode()))


def test_a_member_that_is_no_array(tmp_path):
    with pytest.raises(DataError, match=r"is not a readable \.npz file"):
        load_file(save(tmp_path / "a.npz", zipped(X=b"no array", y=b"none")))


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[" * 100_000,
        '{"mechanism": {}}',
        '{"mechanism": 1, "num_steps": 1}',
        '{"epsilon": "x", "delta": 1}',
        "\x00",
    ],
)
@pytest.mark.parametrize("kind", ["spend", "budget"])
def test_an_altered_ledger_is_refused_by_all_who_read_it(tmp_path, kind, content):
    ledger = PrivacyLedger(tmp_path / "ledger", create=True)
    ledger.set_budget("d", epsilon=1.0, delta=1e-5)
    with sqlite3.connect(ledger.path) as connection:
        connection.execute("INSERT INTO entries VALUES (2, ?, 'd', ?, 'h')", (kind, content))
    for read in (ledger.spent, ledger.entries if kind == "spend" else ledger.budget):
        with pytest.raises(ValueError, match="Entry 2 cannot be read: it was altered"):
            read("d")
    assert ledger.check()


def test_names_in_a_ledger_are_no_markup(tmp_path, capsys):
    ledger = PrivacyLedger(tmp_path / "ledger", create=True)
    ledger.set_budget("[/d]", epsilon=10.0, delta=1e-5)
    mechanism = SampledGaussian(noise_multiplier=4.0, l2_clip_norm=1.0, sampler=Stream(8))
    ledger.spend("[/d]", mechanism, 1, what="a model of [/x].csv", run="a")
    assert main(["ledger", "show", str(ledger.path)]) == 0
    assert "[/d]: ε" in (shown := capsys.readouterr().out) and "[/x].csv" in shown


# --- The command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, content, command",
    [
        ("s.toml", b"x = " + b"[" * 50_000, ["answer", "{}"]),
        ("s.toml", b"x = " + b"[" * 50_000, ["sweep", "{}", "--store", "new"]),
        ("n.toml", b"x = " + b"9" * 5000, ["advise", "--numbers", "{}"]),
        ("d.csv", b"a,label\n" + b"\xff" * 100, ["train", "{}", "--output", "m"]),
        ("d.npz", b"PK\x03\x04" + bytes(100), ["train", "{}", "--output", "m"]),
        ("l", b"SQLite format 3\0" + bytes(200), ["ledger", "show", "{}"]),
        ("l", b"SQLite format 3\0" + bytes(200), ["ledger", "check", "{}"]),
    ],
)
def test_a_hostile_file_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, name, content, command):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / name, content)
    assert main([part.format(name) for part in command]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and "Traceback" not in said


PEAK = """
import sys
from pathlib import Path
from noisecast.problems.datasets import DataError, ReadOptions, load_file
def status(name): return int(next(l for l in open("/proc/self/status") if l.startswith(name)).split()[1]) * 1024
options = ReadOptions(text=sys.argv[3] or None, columns=("x0", "x1") if sys.argv[4] else None)
load_file(sys.argv[1], options)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
try: load_file(sys.argv[2], options)
except DataError as error: print(error, file=sys.stderr)
print(status("VmHWM") - before)
"""


@pytest.mark.parametrize(
    "content, line",
    [
        ('a,label\n1,no\n2,"yes\n3,no\n4,yes\n', 3),
        ('label,text\n0,"film\n1,film number 2\n', 2),
        ('a,label\n1,no\n2,"yes" or no\n3,no\n', 3),
        ('a,label\n1,"no"\n2,"yes\n3,"no"\n', 3),
        ('"a,label\n1,no\n2,yes\n', 1),
    ],
)
def test_a_quote_that_is_not_closed_swallows_no_rows(tmp_path, content, line):
    """Arrow takes the end of the file for the end of the cell, and a label would hold the rows behind it."""
    with pytest.raises(DataError, match=rf"begins in line {line} has a quote that is not closed, or that more text"):
        load_file(save(tmp_path / "a.csv", content.encode()), ReadOptions(text="text" if "text" in content else None))


def test_quotes_that_are_closed_hold_anything(tmp_path):
    content = 'text,label\n"a ""b"", c\nd",no\n5" film,yes\n"",no\n'
    data, encoder = load_file(save(tmp_path / "a.csv", content.encode()), ReadOptions(text="text"))
    assert encoder.vocabulary == ("5", "a", "b", "c", "d", "film") and len(data.labels) == 3


def test_a_header_that_is_longer_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_file, "BLOCKS", (64, 2**8, 2**20))
    names = [f"column{i}" for i in range(100)]
    rows = "".join(",".join(str(i % (j + 2)) for j in range(100)) + f",{i % 2}\n" for i in range(5))
    save(tmp_path / "a.csv", (",".join(names) + ",label\n" + rows).encode())
    assert load_file(tmp_path / "a.csv")[0].features.shape == (5, 100)


def test_a_missing_label_lists_all_columns_there_are(tmp_path):
    save(tmp_path / "a.csv", b"text,y\na b,0\nc,1\n")
    with pytest.raises(DataError, match=r"Expected a column 'label' in .*, got the columns text, y"):
        load_file(tmp_path / "a.csv", ReadOptions(text="text"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npz", "csv", "narrow", "mistaken", "unused", "text", "long", "wide"])
def test_memory_is_at_most_twice_the_file(tmp_path, kind):
    suffix = "npz" if kind == "npz" else "csv"
    small, large = tmp_path / f"small.{suffix}", tmp_path / f"large.{suffix}"
    for path, count in ((small, 10), (large, 100_000 if kind in ("text", "long") else 2_000_000)):
        save_example(path, kind, count)
    command = [sys.executable, "-c", PEAK, str(small), str(large), *READ_AS.get(kind, ("", ""))]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert bool(run.stderr) == (kind == "mistaken") == ("got 'oops' in row 2000000" in run.stderr)
    size = large.stat().st_size
    print(f"{kind}: {int(run.stdout) / size:.2f} times the file of {size / 2**20:.0f} MiB")
    assert int(run.stdout) < 2 * size


READ_AS = {"text": ("text", ""), "long": ("text", ""), "unused": ("", "columns")}


def save_example(path: Path, kind: str, count: int) -> None:
    rng = np.random.default_rng(0)
    if kind == "wide":  # the same numbers in 20,000 columns, or in 10
        features = rng.random(size=(max(2, count // 2000), 20_000 if count > 10 else 10), dtype=np.float32)
        lines = [",".join([*map("{:.6f}".format, row), "ny"[i % 2]]) for i, row in enumerate(features)]
        path.write_text("\n".join([",".join([*(f"x{j}" for j in range(features.shape[1])), "label"]), *lines]))
        return
    labels = np.arange(count) % 2
    if kind in ("text", "long"):  # of 300 words; one of them of 17 MiB
        words = np.array([f"word{i}" for i in range(30_000)])
        texts = [" ".join(words[(30_000 ** rng.random(300)).astype(int)]) for _ in range(count)]
        if kind == "long":
            texts[count // 2] = " ".join(words[:2000].tolist() * (1000 if count > 10 else 1))
        pa.csv.write_csv(pa.table({"text": texts, "label": labels}), path)
        return
    features = rng.random(size=(count, 4 if kind in ("narrow", "mistaken") else 10), dtype=np.float32)
    if kind == "npz":
        np.savez(path, X=features, y=labels)
        return
    columns: dict = {f"x{j}": np.round(column, 6) for j, column in enumerate(features.T)}
    if kind == "mistaken" and count > 10:
        columns["x2"] = [*map(str, columns["x2"][:-1]), "oops"]
    if kind == "unused":
        columns = {f"x{j}": columns[f"x{j}"] for j in range(2)} | {"id": [f"customer {i:09d}" for i in range(count)]}
    pa.csv.write_csv(pa.table(columns | {"label": labels}), path)
