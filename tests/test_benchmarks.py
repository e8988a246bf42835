"""The benchmark's curves on tiny stand-ins: they have all their points, and their rows say what they are."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1]))
from benchmarks import __main__ as command
from benchmarks import curves
from benchmarks.linear_model import SETTINGS
from benchmarks.race import Contestant, Result

CORE = max(os.sched_getaffinity(0))


def quiet(*_: object) -> None:
    """Says nothing."""


@pytest.fixture(scope="module")
def costs() -> list[curves.Row]:
    return curves.cost_curves(curves.QUICK, core=CORE, say=quiet)


def test_every_curve_has_all_its_points(costs):
    plan = curves.QUICK
    expected = {"examples": plan.num_examples, "features": plan.num_features, "non-zeros": plan.mean_words}
    for name, points in expected.items():
        rows = [row for row in costs if row.curve == name]
        assert len(rows) == len(points) * len(plan.groups) * len(SETTINGS)
        assert {(row.runs, row.optimizer) for row in rows} == {(r, o) for r in plan.groups for o in SETTINGS}
    runs = [row for row in costs if row.curve == "runs"]
    assert [row.runs for row in runs] == [r for r in plan.runs for _ in SETTINGS]
    assert len({row.num_examples for row in costs if row.curve == "examples"}) == len(plan.num_examples)
    assert len({row.num_params for row in costs if row.curve == "features"}) == len(plan.num_features)
    assert len({row.nonzeros_per_row for row in costs if row.curve == "non-zeros"}) == len(plan.mean_words)
    for row in costs:
        assert row.low is not None and row.high is not None and 0 < row.low <= row.value <= row.high
        assert row.how == "measured" and row.threads == 1


def test_two_threads_do_the_work_of_one():
    """The rates are of the same run-steps: their ratio is the speed-up, round by round."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process may use one core only")
    rows = curves.thread_curve(curves.QUICK, curves.imdb_task(curves.QUICK.imdb.data()), say=quiet)
    assert [(row.optimizer, row.metric, row.threads) for row in rows] == [
        (optimizer, *what)
        for optimizer in SETTINGS
        for what in (("run_steps_per_second", 1), ("run_steps_per_second", 2), ("speedup", 2))
    ]
    assert all(row.value > 0 for row in rows)


@pytest.mark.slow
def test_memory_is_that_of_the_fresh_process_alone():
    """Half a GiB held here is not counted there, as ru_maxrss would have it."""
    held = np.ones(2**26)
    task = curves.imdb_task(curves.QUICK.imdb.data())
    found = curves.peak_of_a_fresh_process(task, "DP-SGD", 2, steps=10)
    here = curves.status_mib("VmHWM")
    assert here > held.nbytes / 2**20 + found["data_mib"]
    assert found["libraries_mib"] < found["peak_mib"] < here
    assert found["peak_less_data_mib"] == found["peak_mib"] - found["data_mib"]


def test_grids_say_what_was_measured_and_what_estimated(monkeypatch):
    monkeypatch.delenv("NOISECAST_DATA", raising=False)
    rows = curves.grids(dataclasses.replace(curves.QUICK, seconds=0.005), None, core=CORE, say=quiet)
    whole = [row for row in rows if row.curve == "grid"]
    assert [(row.optimizer, row.runs) for row in whole] == [
        *((optimizer, curves.QUICK.groups[-1]) for optimizer in SETTINGS), ("all three", 1309), ("DP-SGD", 1)
    ]  # fmt: skip
    assert [row.how.split()[0] for row in whole] == ["measured"] * 3 + ["estimated"] * 2
    assert all("synthetic stand-in" in row.data and row.value > 0 for row in rows)
    seconds = {row.optimizer: row.value for row in whole[:3]}
    speedup = {row.optimizer: row.value for row in rows if row.metric == "speedup"}
    core_minutes = sum(seconds[o] * n / whole[0].runs / speedup.get(o, 1) for o, n in curves.PROTOCOL_B.items()) / 60
    assert whole[3].value == pytest.approx(core_minutes, rel=0.05)


def test_too_many_runs_are_refused_and_this_thread_keeps_its_cores():
    before, one_point = os.sched_getaffinity(0), dataclasses.replace(curves.QUICK, num_examples=(200,), groups=(65,))
    with pytest.raises(ValueError, match="Expected at most 64 runs a group, got 65"):
        curves.cost_curves(one_point, core=CORE, say=quiet)
    assert os.sched_getaffinity(0) == before


def test_rows_are_written_and_drawn_and_the_other_half_is_kept(costs, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "CURVES", tmp_path / "curves.json")
    command.write_curves(costs, grid=False)
    grid = [dataclasses.replace(costs[0], curve="grid", metric="core_seconds")]
    command.write_curves(grid, grid=True)
    command.write_curves(costs[:-1], grid=False)
    rows = json.loads((tmp_path / "curves.json").read_text(encoding="utf-8"))["rows"]
    assert [row["part"] for row in rows] == ["curves"] * (len(costs) - 1) + ["grid"]
    assert all(row["machine"] for row in rows)
    assert {field.name for field in dataclasses.fields(curves.Row)} <= rows[0].keys()
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_one_workload_replaces_its_own_rows_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RESULTS", tmp_path / "latest.json")

    def never(noise_multiplier):
        raise AssertionError("nothing is run here")

    def race(name, rate):
        results = [
            Result(
                Contestant("row_sparse", None, "DP-SGD", 64, start=never), cpu_rates=[rate, rate], wall_rates=[1.0, 1.0]
            ),
            Result(
                Contestant("Opacus ew", "Opacus", "DP-SGD", 1, start=never), cpu_rates=[2.0, 4.0], wall_rates=[1.0, 1.0]
            ),
        ]
        command.write(name, command.rows_of(name, "imdb", results), results)
        return json.loads(command.RESULTS.read_text(encoding="utf-8"))["rows"]

    race("W2", 40.0), race("W1", 80.0)
    assert [(row["workload"], row["ratio"], row["spread"]) for row in race("W2", 60.0)] == [
        ("W1", 30.0, [20.0, 40.0]),
        ("W2", 22.5, [15.0, 30.0]),
    ]
    monkeypatch.setattr(command, "machine", lambda: "another")
    assert [row["workload"] for row in race("W1", 60.0)] == ["W1"]
