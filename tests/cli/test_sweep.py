"""`noisecast sweep`, `results` and `select` as a person meets them."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from noisecast.cli import main
from noisecast.cli import sweep as sweep_command
from noisecast.cli.answer import loss_cell, summaries
from noisecast.cli.select import PARAMETERS_ALONE
from noisecast.privacy.accounting import epsilon_text
from noisecast.sweeps import Store
from noisecast.table import table_from

SWEEP = """
num_steps = 40
num_seeds = 2
record_at = [20]
runners = ["training"]
[problem]
kind = "bundled"
name = "breast_cancer"
[mechanism]
noise_multiplier = [1.0, 2.0]
l2_clip_norm = [0.1, 0.5]
batch_size = 32
[[optimizer]]
name = "dp-sgd"
learning_rate = [0.1, 1.0]
"""
FIVE_MISTAKES = """
num_step = 40
num_seeds = 0
[problem]
kind = "bundled"
name = "brest_cancer"
[mechanism]
noise_multiplier = [1.0, -2.0]
batch_size = 32
[[optimizer]]
name = "dp-sdg"
learning_rate = [0.1, 1.0]
"""


@pytest.fixture
def run(folder, capsys):
    (folder / "sweep.toml").write_text(SWEEP, encoding="utf-8")

    def run(*arguments, status=0):
        assert main(list(arguments)) == status
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        if status:
            assert not printed.out
            return printed.err.strip()
        return json.loads(printed.out) if "--json" in arguments else " ".join(printed.out.split())

    return run


@pytest.fixture
def swept(run):
    run("sweep", "sweep.toml", "--store", "store", "--workers", "0")


def test_a_sweep_counts_its_runs_and_says_what_comes_next(run):
    printed = run("sweep", "sweep.toml", "--store", "store", "--workers", "0")
    assert "DP-SGD training 8 16 0" in printed
    assert "noisecast results store" in printed and "noisecast select store" in printed


def test_again_it_computes_nothing_and_says_the_same(run, swept):
    (row,) = run("sweep", "sweep.toml", "--store", "store", "--workers", "0", "--json")["runs"]
    assert (row["scenarios"], row["runs"], row["diverged"]) == (8, 16, 0)


def test_an_estimate_runs_nothing(run, folder):
    said = run("sweep", "sweep.toml", "--store", "store", "--estimate", "--json")
    assert said["runs"] == 16 and said["seconds"] > 0
    assert not (folder / "store").exists()


def test_an_estimate_of_a_cluster_is_refused(run):
    assert "without --ray" in run("sweep", "sweep.toml", "--store", "s", "--estimate", "--ray", "auto", status=2)


def test_five_mistakes_are_reported_at_once(run, folder):
    (folder / "sweep.toml").write_text(FIVE_MISTAKES, encoding="utf-8")
    said = run("sweep", "sweep.toml", "--store", "store", status=2)
    for words in ("num_step", "num_seeds", "brest_cancer", "-2", "dp-sdg"):
        assert words in said
    assert len(said.splitlines()) >= 5
    assert not (folder / "store").exists()


def test_another_sweeps_store_is_not_touched(run, folder, swept):
    before = {path: path.read_bytes() for path in folder.joinpath("store").rglob("*") if path.is_file()}
    (folder / "sweep.toml").write_text(SWEEP.replace("record_at = [20]", "record_at = [10]"), encoding="utf-8")
    assert "does not ask for" in run("sweep", "sweep.toml", "--store", "store", "--workers", "0", status=2)
    assert {path: path.read_bytes() for path in folder.joinpath("store").rglob("*") if path.is_file()} == before


def test_no_cluster_no_traceback(run):
    assert "Expected a Ray cluster at" in run(
        "sweep", "sweep.toml", "--store", "store", "--ray", "127.0.0.1:1", status=2
    )


def test_what_others_print_meanwhile_is_no_result(run, monkeypatch):
    """Ray does, of a node that is lost."""

    def ray_speaks(*arguments, **options):
        print("(raylet) has been marked dead")
        return run_sweep(*arguments, **options)

    run_sweep = sweep_command.run_sweep
    monkeypatch.setattr(sweep_command, "run_sweep", ray_speaks)
    (row,) = run("sweep", "sweep.toml", "--store", "store", "--workers", "0", "--json")["runs"]
    assert row["runs"] == 16


# --- results ---------------------------------------------------------------------------------------------------------


def test_results_show_every_scenarios_end(run, swept):
    rows = run("results", "store", "--json")["rows"]
    assert len(rows) == 8
    assert {row["num_seeds"] for row in rows} == {2}
    assert "non_private" in run("results", "store")


def test_sql_asks_the_table(run, swept):
    query = "select count(*) as n from results where metric = 'loss' and step = 40"
    assert run("results", "store", "--sql", query, "--json")["rows"] == [{"n": 16}]


def test_what_sql_makes_is_json(run, swept):
    query = "select [1, 2] as list, {'a': 1.5} as struct, null as none, date '2026-01-02' as day, 1 = 1 as yes"
    row = run("results", "store", "--sql", query, "--json")["rows"][0]
    assert (row["list"], row["struct"], row["none"], row["yes"]) == ([1, 2], {"a": 1.5}, None, True)
    assert row["day"].startswith("2026-01-02")


@pytest.mark.parametrize(
    "query",
    [
        "select * from nothing",
        "selec",
        "",
        ";",
        "select 1; select 2",
        "select * from read_csv('data.csv')",
        "copy results to 'stolen.csv'",
    ],
)
def test_a_query_that_fails_or_leaves_the_table_is_a_sentence(run, folder, swept, query):
    assert run("results", "store", "--sql", query, status=2).startswith(("Expected a query", "Expected one query"))
    assert not (folder / "stolen.csv").exists()


def test_all_rows_can_be_written(run, folder, swept):
    for name, read in (("rows.csv", pd.read_csv), ("rows.parquet", pd.read_parquet)):
        run("results", "store", "--output", name)
        assert len(read(folder / name)) == 16 * 2 * len(read(folder / name)["metric"].unique())


def test_columns_are_listed(run, swept):
    listed = run("results", "store", "--columns", "--json")
    assert {"column": "noise_multiplier", "type": "float64"} in listed["rows"]
    assert "test_loss" in listed["metrics"] and "rmse" not in listed["metrics"]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["results", "nowhere"], "Expected a store at nowhere"),
        (["results", "store", "--metric", "los"], "Expected a metric among"),
        (["results", "store", "--output", "rows.txt"], ".csv or .parquet"),
        (["select", "nowhere", "--metric", "test_loss", "--price", "compose"], "Expected a store at nowhere"),
        (["select", "store", "--metric", "test_loss"], "public, compose or repeat-select"),
        (["select", "store", "--metric", "test_loss", "--price", "repeat-select"], "fixed grid"),
        (["select", "store", "--metric", "test_loss", "--price", "compose", "--output", "m"], "--sweep and --output"),
    ],
)
def test_bad_requests_are_sentences(run, swept, arguments, says):
    assert says in run(*arguments, status=2)


def test_a_truncated_shard_is_refused_by_name(run, folder, swept):
    shard = next(folder.joinpath("store", "shards").glob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:100])
    assert shard.name in run("results", "store", status=2)


@pytest.mark.parametrize("is_of_trials, warns", [(False, True), (True, False)])
def test_a_store_whose_sweep_has_runs_to_come_says_so_but_not_how_many_trials(
    folder, swept, capsys, monkeypatch, is_of_trials, warns
):
    whole = Store(folder / "store").ledger()
    ((scenario, _), first), *_ = whole.runs.items()
    monkeypatch.setattr(Store, "ledger", lambda self: replace(whole, runs={**whole.runs, (scenario, 99): first}))
    monkeypatch.setattr(Store, "is_of_trials", is_of_trials)
    said = "Warning: The sweep is not finished: 16 of 17 training runs are in store; run it again to go on."
    select = ["select", "store", "--metric", "test_loss", "--price", "public", "--reason", "a test"]
    for arguments in (["results", "store"], select):
        assert main(arguments) == 0
        assert (said in capsys.readouterr().err) == warns


def test_a_finished_store_is_not_warned_of(swept, capsys):
    assert main(["results", "store"]) == 0
    assert capsys.readouterr().err == ""


# --- select ----------------------------------------------------------------------------------------------------------


def test_a_choice_carries_both_epsilons_and_its_model(run, folder, swept):
    chosen = run("select", "store", "--metric", "test_loss", "--price", "compose",
                 "--sweep", "sweep.toml", "--output", "model", "--json")  # fmt: skip
    assert chosen["epsilon_of_procedure"] > chosen["epsilon_of_run"]
    said = json.loads((folder / "model" / "privacy.json").read_text())
    assert said["epsilon"] == chosen["epsilon_of_procedure"]
    assert (folder / "model" / "parameters.npz").exists()


def test_what_a_choice_writes_says_what_it_is_and_what_predicts(run, folder, swept):
    printed = run("select", "store", "--metric", "test_loss", "--price", "compose",
                  "--sweep", "sweep.toml", "--output", "model")  # fmt: skip
    assert PARAMETERS_ALONE in printed and "`noisecast predict` is trained by `noisecast train`" in PARAMETERS_ALONE
    assert "parameters alone, for programs; train with its settings" in run("predict", "model", "data.csv", status=2)


def test_levels_ranked_together_are_told_and_a_budget_leaves_one(run, swept):
    """Noise 1 has the easier task: chosen among both, it says nothing of what is best at noise 2."""
    ask = ["select", "store", "--metric", "test_loss", "--price", "compose"]
    both, levels = run(*ask, "--json"), sorted(set(Store(Path("store")).read()["epsilon"]))
    assert both["epsilons_ranked"] == levels and len(levels) == 2
    told = f"Ranked together: runs of ε = {epsilon_text(levels[0], 3)} to {epsilon_text(levels[1], 3)}"
    assert told in run(*ask)
    budget = ["--at-most-epsilon", epsilon_text(levels[0], 3)]  # as it was printed
    one = run(*ask, *budget, "--json")
    assert one["settings"]["noise_multiplier"] == 2.0 and one["epsilons_ranked"] == levels[:1] * 2
    assert one["epsilon_of_procedure"] == both["epsilon_of_procedure"]  # the others were run as well
    assert "Ranked together" not in run(*ask, *budget)
    said = run(*ask, "--at-most-epsilon", "0.001", status=2)
    assert (
        said
        == f"Expected a run of epsilon <= 0.001, got none; the least of this sweep is {epsilon_text(levels[0], 3)}."
    )
    assert run(*ask, "--at-most-epsilon", "0", status=2) == "Expected at_most_epsilon > 0, got 0."


def test_a_choice_prints_no_hash_of_the_examples(run, swept):
    names = set(Store(Path("store")).read()["scenario"])
    printed = run("select", "store", "--metric", "test_loss", "--price", "compose")
    said = json.dumps(run("select", "store", "--metric", "test_loss", "--price", "compose", "--json"))
    assert names and not any(name in printed or name in said for name in names)


def test_an_epsilon_of_known_noise_is_not_shown_as_the_runs(run, folder):
    for seeds, heading in (("num_seeds = 2", "score ε "), ("insecure_seeds = [0, 1]", "score ε if secret")):
        (folder / "sweep.toml").write_text(SWEEP.replace("num_seeds = 2", seeds), encoding="utf-8")
        store = seeds[:3]
        run("sweep", "sweep.toml", "--store", store, "--workers", "0")
        printed = run("select", store, "--metric", "test_loss", "--price", "compose")
        assert printed.count(heading) == 2 and ("one run inf" in printed) == ("insecure" in seeds)
        assert ("if secret" in printed) == ("insecure" in seeds)


def test_a_choice_by_training_loss_has_no_guarantee(run, swept):
    assert run("select", "store", "--metric", "loss", "--price", "compose", "--json")["epsilon_of_procedure"] == "inf"


def end_rows(runner: str) -> list[dict]:
    """Of one run: the start, where the formula holds, and the end, where it is extrapolated."""
    about = {
        "scenario": "s", "problem": "p", "optimizer": "DP-SGD", "learning_rate": 1.0, "noise_multiplier": 1.0,
        "l2_clip_norm": 1.0, "sampling_probability": 0.1, "expected_batch_size": 10.0, "num_steps": 100,
        "epsilon": 1.0, "nominal_epsilon": 1.0, "target_delta": 1e-5, "runner": runner, "seed": None, "metric": "loss",
    }  # fmt: skip
    return [
        about | {"step": 0, "value": 0.69, "status": "ok"},
        about | {"step": 100, "value": 0.12, "status": "extrapolated"},
    ]


def test_the_end_of_an_extrapolated_forecast_is_its_end_and_says_so():
    """Not its start, which held."""
    (found,) = summaries(table_from(end_rows("moments")), "loss")
    assert (found["step"], found["mean"], found["status"]) == (100, 0.12, "extrapolated")
    assert loss_cell(found) == "~0.12"
    (found,) = summaries(table_from(end_rows("closed_form")), "loss")  # a formula says nothing beyond its range
    assert (found["step"], found["mean"], found["status"]) == (0, 0.69, "ok")
    assert loss_cell(found) == "0.69 at 0"
