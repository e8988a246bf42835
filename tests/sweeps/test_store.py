"""A store holds what was finished, whole; and refuses what it does not hold, by name."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_sweep import questions

import noisecast as nc
from noisecast.cli.unfinished import why_unfinished
from noisecast.sweeps import Store, run_sweep
from noisecast.sweeps.ledger import ledger_of


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "store"
    run_sweep(questions(3, num_seeds=2), folder, workers=0)
    return folder


@pytest.fixture
def store(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "shards").glob("*.parquet"))


def test_every_run_is_there_once(store):
    table = Store(store).read()
    assert len(shards(store)) == 3
    assert len(Store(store).cells) == 3 * 2 * 2
    assert not table.duplicated(["scenario", "runner", "seed", "step", "metric"]).any()
    assert set(table["step"]) == {0, 10_000, 20_000, 20_001, 20_002}


def test_the_order_does_not_depend_on_names(store):
    before = Store(store).read()
    found = Store(store)
    found._read = dict(reversed(found._read.items()))
    pd.testing.assert_frame_equal(found.read(), before)


def test_the_ledger_comes_back_as_it_was(store):
    assert Store(store).ledger() == ledger_of(questions(3, num_seeds=2))


def test_a_lost_or_damaged_ledger_is_told(store):
    (store / "ledger.json").write_text("{")
    with pytest.raises(ValueError, match="it is damaged"):
        Store(store).ledger()
    assert Store(store).ledger_before() is None
    (warning,) = why_unfinished(Store(store), Store(store).read())
    assert "it is damaged" in warning
    (store / "ledger.json").unlink()
    with pytest.raises(ValueError, match="there is none"):
        Store(store).ledger()


@pytest.mark.parametrize("how", ["truncated", "one bit", "empty"])
def test_a_damaged_shard_is_refused_by_name(store, how):
    shard = shards(store)[1]
    content = bytearray(shard.read_bytes())
    if how == "truncated":
        content = content[: len(content) // 2]
    elif how == "one bit":
        content[len(content) // 2] ^= 1
    else:
        content = bytearray()
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=shard.name):
        Store(store)
    with pytest.raises(ValueError, match=shard.name):
        run_sweep(questions(3, num_seeds=2), store, workers=0)


def test_a_deleted_shard_is_computed_again_as_it_was(store):
    before = Store(store).read()
    shards(store)[0].unlink()
    assert len(Store(store).read()) < len(before)
    again = run_sweep(questions(3, num_seeds=2), store, workers=0)
    # The key is kept, so the runs are the same runs, to the last bit.
    pd.testing.assert_frame_equal(again, before)


def test_a_shard_of_another_key_is_not_taken_for_ours(store, tmp_path):
    run_sweep(questions(1, num_seeds=2), tmp_path / "other", workers=0)
    foreign = shards(tmp_path / "other")[0]
    shutil.copy(foreign, store / "shards" / foreign.name)
    with pytest.raises(ValueError, match=f"does not ask for, in shards/{foreign.name}"):
        run_sweep(questions(3, num_seeds=2), store, workers=0)


@pytest.mark.parametrize("name", ["sub", "link.parquet", "notes.txt"])
def test_what_is_no_file_of_a_store_is_named(store, name):
    path = store / "shards" / name
    if name == "sub":
        path.mkdir()
    elif name == "link.parquet":
        path.symlink_to(store / "nowhere")
    else:
        path.write_text("buy milk", encoding="utf-8")
    with pytest.raises(ValueError, match=f"{name} is not a shard of this version of noisecast; move it out"):
        Store(store)


@pytest.mark.parametrize("same_runs", [True, False])
def test_a_shard_of_another_store_is_refused_by_name_by_all_who_read(store, tmp_path, same_runs):
    other = questions(3, num_seeds=2) if same_runs else questions(1, num_seeds=2, first_seed=50)
    run_sweep(other, tmp_path / "other", workers=0)
    foreign = shards(tmp_path / "other")[0]
    shutil.copy(foreign, store / "shards" / foreign.name)
    with pytest.raises(ValueError, match=foreign.stem):
        Store(store).read()
    (store / "shards" / foreign.name).unlink()
    assert len(Store(store).read())


def test_shards_of_another_key_are_refused_where_they_stand_for_all_of_ours(store, tmp_path):
    """The same sweep, run twice: rows of one are no rows of the other, and nothing but the key tells."""
    run_sweep(questions(3, num_seeds=2), tmp_path / "other", workers=0)
    own, foreign = shards(store), shards(tmp_path / "other")
    for shard in own:
        shard.unlink()
    for shard in foreign:
        shutil.copy(shard, store / "shards" / shard.name)
    with pytest.raises(ValueError, match="was made from another key than this store's"):
        Store(store).read()
    (store / "key").unlink()  # then nobody can tell whose they are, but they are of one key
    assert len(Store(store).read())


def test_shards_from_seeds_that_everybody_knows_are_of_no_key(tmp_path):
    asked = [replace(each, num_seeds=1, insecure_seeds=(1, 2)) for each in questions(3)]
    tables = [run_sweep(asked, tmp_path / name, workers=0) for name in ("mine", "other")]
    for shard in shards(tmp_path / "mine"):
        shard.unlink()
    for shard in shards(tmp_path / "other"):
        shutil.copy(shard, tmp_path / "mine" / "shards" / shard.name)
    pd.testing.assert_frame_equal(Store(tmp_path / "mine").read(), tables[0])


def test_a_shard_of_another_sweeps_forecasts_is_refused_by_name(store, tmp_path):
    """Runners that train nothing have no price, but their rows are of a sweep as well."""
    asked = [replace(each, runners=(nc.Training(), nc.Moments())) for each in questions(3, num_seeds=2)]
    whole = run_sweep(asked, tmp_path / "mine", workers=0)
    assert set(Store(tmp_path / "mine").read()["runner"]) == {"training", "moments"} == set(whole["runner"])
    run_sweep([replace(questions(5, num_seeds=1)[4], runners=(nc.Moments(),))], tmp_path / "other", workers=0)
    foreign = shards(tmp_path / "other")[0]
    shutil.copy(foreign, tmp_path / "mine" / "shards" / foreign.name)
    with pytest.raises(ValueError, match=f"{foreign.stem}.* is of another sweep than ledger.json lists"):
        Store(tmp_path / "mine").read()


def test_a_ledger_of_before_forecasts_were_listed_is_read(store):
    path = store / "ledger.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    assert said.pop("answers") == []
    path.write_text(json.dumps(said), encoding="utf-8")
    assert Store(store).ledger().answers is None and len(Store(store).read())


def test_a_parquet_file_of_somebody_else_is_refused_by_name(store):
    file = store / "shards" / "x.parquet"
    pd.DataFrame({"a": [1]}).to_parquet(file)
    name = hashlib.sha256(file.read_bytes()).hexdigest()[:32] + ".parquet"
    file.rename(file.with_name(name))
    with pytest.raises(ValueError, match=f"{name} is not a shard"):
        Store(store)


def rewritten(shard: Path, change) -> Path:
    """The shard with its rows changed, under the name that it has then."""
    table = change(pq.read_table(shard))
    pq.write_table(table, shard)
    return shard.rename(shard.with_stem(hashlib.sha256(shard.read_bytes()).hexdigest()[:32]))


def with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("metric", lambda n: pa.array(["gain"] * n)),
        ("metric", lambda n: pa.array([None] * n, pa.string())),
        ("step", lambda n: pa.array([None] * n, pa.int64())),
        ("value", lambda n: pa.array(["much"] * n)),
    ],
)
def test_a_shard_whose_rows_are_none_of_a_table_is_refused_by_name(store, name, values):
    found = rewritten(shards(store)[0], lambda table: with_column(table, name, values(len(table))))
    with pytest.raises(ValueError, match=f"{found.name} is not a shard"):
        Store(store).read()


def test_rows_are_the_same_in_whatever_type_a_library_wrote_them(store):
    before = Store(store).read()
    for shard in shards(store)[:1]:
        rewritten(shard, lambda table: with_column(table, "metric", table["metric"].cast(pa.large_string())))
    pd.testing.assert_frame_equal(Store(store).read(), before)


def test_half_written_files_are_not_read_and_are_swept_up(store):
    half = store / "shards" / ".abc.parquet.x1"
    half.write_bytes(b"PAR1 and then the light went out")
    before = len(Store(store).cells)
    run_sweep(questions(3, num_seeds=2), store, workers=0)
    assert not half.exists()
    assert len(Store(store).cells) == before


def test_the_key_is_its_owners_alone_and_damage_to_it_is_told(store):
    assert stat.S_IMODE((store / "key").stat().st_mode) == 0o600
    (store / "key").write_bytes(b"short")
    with pytest.raises(ValueError, match="key is damaged"):
        run_sweep(questions(3, num_seeds=2), store, workers=0)


def test_a_lost_key_is_told_and_none_is_made_in_its_place(store):
    (store / "key").unlink()
    with pytest.raises(ValueError, match="but it is lost: they cannot be continued"):
        run_sweep(questions(3, num_seeds=2), store, workers=0)
    assert not (store / "key").exists()


def test_a_lost_manifest_is_written_anew(store):
    (store / "manifest.json").unlink()
    run_sweep(questions(3, num_seeds=2), store, workers=0)
    assert (store / "manifest.json").exists()


def test_two_writers_are_one_too_many(store):
    code = f"from noisecast.sweeps import Store\nwith Store.open_for_writing({str(store)!r}): print('mine')"
    with Store.open_for_writing(store):
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Another sweep is writing" in second.stderr
    third = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert third.stdout == "mine\n"


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(ValueError, match="holds something else"):
        run_sweep(questions(1), tmp_path, workers=0)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_folder_that_has_shards_of_its_own_is_left_alone(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / ".gitkeep").touch()
    with pytest.raises(ValueError, match="holds something else"):
        run_sweep(questions(1), tmp_path, workers=0)
    assert os.listdir(tmp_path) == ["shards"] and os.listdir(tmp_path / "shards") == [".gitkeep"]


def test_a_store_is_its_owners_alone(store, made):
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_no_store_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="found none"):
        Store(tmp_path / "nowhere")
