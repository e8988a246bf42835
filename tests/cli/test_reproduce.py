"""`noisecast reproduce` as a person meets it, with figures that take no time."""

import json
import signal
import subprocess
import sys
import types
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import matplotlib as mpl
import pandas as pd
import pytest
from matplotlib.figure import Figure

from noisecast.cli import main, reproduce
from noisecast.problems.datasets import DataError
from noisecast.reproduction.claims import UNDECIDED, Claim
from noisecast.sweeps.store import Finished, Store
from noisecast.table import table_from

NAN, INF = float("nan"), float("inf")
HOLDS = Claim(
    source="Thm. 1, Fig. 1", statement="The floor grows as the square.", measure="slope of log loss",
    value=1.93, low=1.88, high=1.98, wanted="1.75 to 2.25", holds=True, theory="2: the floor", forecast="1.95",
)  # fmt: skip
FAILS = Claim(
    source="Thm. 2", statement="It converges [always].", measure="largest gap", value=INF, low=NAN, high=NAN,
    wanted="< 0.1", holds=False, corrected="It converges below [eta = 2].",
)  # fmt: skip

IS_OPEN = Claim(
    source="Thm. 3", statement="It is one.", measure="slope", value=1.2, low=0.5, high=1.9, wanted="0.75 to 1.25",
    holds=False, corrected=f"{UNDECIDED} Slope 1.2.",
)  # fmt: skip


def figure(*, claims=(HOLDS, FAILS), run=None, **more):
    """A module of `noisecast.reproduction` that is computed at once."""

    def default(scale, *, progress):
        progress(0.5, 3.0)
        return pd.DataFrame({"scale": [scale]})

    parts = {
        "TITLE": "A figure", "SECONDS": {"quick": 1, "paper": 7200}, "run": run or default, "data": lambda table: table,
        "claims": lambda frame: list(claims), "draw": lambda frame: Figure(figsize=(1, 1)),
    }  # fmt: skip
    return types.SimpleNamespace(**{key: value for key, value in (parts | more).items() if value is not None})


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Put a figure in the place of one of ours; the others must not be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOISECAST_DATA", raising=False)

    def install(name, module):
        monkeypatch.setitem(sys.modules, f"noisecast.reproduction.{name.replace('-', '_')}", module)

    return install


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_figure_writes_pictures_frame_rows_and_claims(install, tmp_path, capsys):
    install("fig-sde", figure(claims=[HOLDS, FAILS, IS_OPEN]))
    assert main(["reproduce", "fig-sde", "--scale", "paper", "--output", "out"]) == 0
    expected = [f"fig-sde.{suffix}" for suffix in ("png", "pdf", "svg", "parquet")]
    expected += ["fig-sde-table.parquet", "fig-sde-claims.csv", "fig-sde-claims.parquet"]
    assert files(tmp_path / "out") == sorted(expected)
    row = pd.read_parquet(tmp_path / "out" / "fig-sde-table.parquet").iloc[0]
    assert row["scale"] == "paper"
    claims = pd.read_csv(tmp_path / "out" / "fig-sde-claims.csv")
    assert claims["holds"].tolist() == [True, False, False] and claims["value"].tolist() == [1.93, INF, 1.2]
    assert claims["verdict"].tolist() == ["yes", "no", "open"]
    printed = capsys.readouterr()
    assert "fig-sde, paper scale. A figure. About 2 h." in printed.err


def test_the_claims_are_printed_with_all_that_decides_them(install, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    install("fig-sde", figure())
    assert main(["reproduce", "fig-sde"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "The floor grows as the square.", "slope of log loss", "1.93 [1.88, 1.98]", "1.75 to 2.25", "yes",
        "2: the floor", "1.95", "Thm. 1, Fig. 1", "It converges [always].", "inf", "no",
        "instead: It converges below [eta = 2].",
    ):  # fmt: skip
        assert words in printed
    table = printed[: printed.index("Took")]
    assert max(map(len, table.splitlines())) <= reproduce.WIDTH
    assert "instead" not in table[: table.index("It converges [always].")]  # a claim that holds needs no correction


def test_json_is_strict(install, capsys):
    install("fig-sde", figure())
    assert main(["reproduce", "fig-sde", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    claims = answer["figures"][0]["claims"]
    assert [claim["holds"] for claim in claims] == [True, False]
    assert claims[1]["value"] == "inf" and claims[1]["low"] is None
    assert all(Path(path).is_file() for path in answer["figures"][0]["files"])


def test_numbers_of_numpy_are_json_too(install, capsys):
    import numpy as np

    claim = Claim(**vars(HOLDS) | {"value": np.float32(2), "holds": np.bool_(True)})
    install("fig-sde", figure(claims=[claim]))
    assert main(["reproduce", "fig-sde", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"][0]["claims"][0]["value"] == 2


def test_the_list_is_fast_and_knows_every_figure():
    code = (
        "import sys; from noisecast.cli import main; main(['reproduce']);"
        "print([m for m in ('jax', 'numba', 'matplotlib', 'pandas') if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in result.stdout for name in reproduce.FIGURES)
    assert result.stderr.splitlines()[-1] == "[]"


# --- what can be wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["fig-stationery"], "got 'fig-stationery'; did you mean 'fig-stationary'?"),
        (["everything"], "Expected a figure among fig-floors, "),
        (["fig-sde", "--workers", "-1"], "Expected --workers to be a whole number >= 0, got -1."),
        (["fig-sde", "--output", "missing/folder"], "Expected the folder"),
        (["fig-sde", "--output", "file"], "Expected --output to be a folder, file is a file"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(install, tmp_path, capsys, arguments, sentence):
    install("fig-sde", figure(run=lambda *a, **k: pytest.fail("it must not start")))
    (tmp_path / "file").write_text("")
    assert main(["reproduce", *arguments]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and len(printed.err.splitlines()) == 1
    assert files(tmp_path) == ["file"]


def test_without_a_data_folder_one_sentence_says_what_to_get(install, capsys):
    assert main(["reproduce", "fig-floors"]) == 2
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    for words in ("fig-floors needs data", "--data", "NOISECAST_DATA", "aclImdb_v1.tar.gz", "ml-100k.zip", "forum500"):
        assert words in printed


def test_a_missing_file_is_named_by_its_reader(install, capsys, tmp_path):
    def questions(scale, data_dir, asked):
        raise DataError("No ratings in here, looked for u.data; get them.")

    install("fig-floors", figure(SECONDS=None, questions=questions))
    assert main(["reproduce", "fig-floors", "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "fig-floors lacks data: No ratings in here, looked for u.data; get them. "
        "To reproduce it for the data that you have: --task imdb or movielens or forum500."
    )


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_figure_without_a_store_says_that_it_starts_anew(install, capsys, tmp_path, number, status):
    """By Ctrl-C, or by whoever stops the jobs of a machine; and those are as they were before."""
    before = signal.getsignal(number)

    def run(scale, **_):
        signal.raise_signal(number)

    install("fig-sde", figure(run=run))
    assert main(["reproduce", "fig-sde", "--output", "out"]) == status
    assert signal.getsignal(number) is before
    assert "Interrupted in fig-sde; it takes little time and starts anew" in capsys.readouterr().err
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []


def test_one_task_alone_asks_its_questions_alone(install, capsys, tmp_path):
    from noisecast import DPSGD, Poisson, SampledGaussian, Scenario, bundled, linear_model
    from noisecast.question import Question
    from noisecast.runners import Training

    def questions(scale, data_dir, asked):
        train, _ = bundled("iris")
        found = []
        for name in ("imdb",) if asked == "imdb" else ():
            problem = linear_model(replace(train, name=name))
            sampler = Poisson.for_batch_size(30, train.num_examples)
            mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=sampler)
            one = Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=0.1), num_steps=2)
            found.append(Question(scenarios=(one,), runners=(Training(),), record_at=()))
        return tuple(found)

    install("fig-floors", figure(SECONDS=None, questions=questions))
    command = ["reproduce", "fig-floors", "--data", ".", "--output", "out", "--workers", "0"]
    assert main([*command, "--task", "imdb"]) == 0
    rows = pd.read_parquet(tmp_path / "out" / "fig-floors-imdb-table.parquet")
    assert all("imdb" in problem for problem in rows["problem"])
    assert main(["reproduce", "fig-sde", "--task", "imdb"]) == 2
    assert main([*command, "--task", "movielens-centred"]) == 2
    assert capsys.readouterr().err.endswith("has no movielens-centred at the quick scale; --scale paper has.\n")
    assert main(["reproduce", "--task", "imdb"]) == 2
    assert "Expected a figure, or all, to run" in capsys.readouterr().err
    assert main([*command, "--task", "mnist"]) == 2
    assert "Expected a task among imdb, movielens, forum500" in capsys.readouterr().err


def test_an_interrupted_sweep_goes_on_by_the_same_command(install, capsys, tmp_path, monkeypatch):
    from noisecast import DPSGD, SampledGaussian, Scenario, Stream, quadratic
    from noisecast.question import Question
    from noisecast.runners import Training
    from noisecast.sweeps import Store

    def questions(scale, data_dir, asked):
        mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Stream(8))
        scenarios = [
            Scenario(
                problem=quadratic([1.0, 2.0], 0.1, example_noise_std=0.1), mechanism=mechanism,
                optimizer=DPSGD(learning_rate=0.1), num_steps=num_steps,
            )
            for num_steps in (20, 10)
        ]  # fmt: skip
        return [Question(scenarios=(scenario,), runners=(Training(),), record_at=(0,)) for scenario in scenarios]

    @contextmanager
    def interrupted_midway(name):
        def told(share, seconds_left):
            if 0 < share < 1:
                raise KeyboardInterrupt

        yield told

    command = ["reproduce", "fig-sde", "--workers", "0", "--output", "out"]
    install("fig-sde", figure(SECONDS=None, questions=questions))
    with monkeypatch.context() as patch:
        patch.setattr(reproduce, "sweep_progress", interrupted_midway)
        assert main(command) == 130
    assert "1 group more is in out/stores/fig-sde-quick: the same command goes on." in capsys.readouterr().err
    store = Store(tmp_path / "out" / "stores" / "fig-sde-quick")
    kept = store.read()
    assert set(kept["num_steps"]) < {10, 20}

    assert main(command) == 0
    rows = pd.read_parquet(tmp_path / "out" / "fig-sde-table.parquet")
    assert set(rows["num_steps"]) == {10, 20}
    again = rows[rows["num_steps"].isin(kept["num_steps"])]
    assert again["value"].tolist() == kept["value"].tolist()


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(install, tmp_path):
    install("fig-sde", figure())
    assert main(["reproduce", "fig-sde", "--output", "out"]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    class Broken:
        def savefig(self, path, **_):
            path.write_text("half a picture")
            raise RuntimeError("the pen broke")

    install("fig-sde", figure(draw=lambda frame: Broken()))
    with pytest.raises(RuntimeError):
        main(["reproduce", "fig-sde", "--output", "out"])
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("setting", ["figure.autolayout", "figure.constrained_layout.use"])
def test_a_users_own_layout_does_not_move_a_picture_between_its_files(install, tmp_path, setting):
    drawn = Figure(figsize=(4, 3), layout="constrained")
    axes = drawn.subplots(2, 1)
    drawn.colorbar(axes[0].imshow([[0.0, 1.0]]), ax=axes[0], label="a bar, which some layouts refuse")
    drawn.supylabel("at the side")
    install("fig-sde", figure(draw=lambda frame: drawn))
    places, save = [], Figure.savefig

    def saved(self, *arguments, **options):
        save(self, *arguments, **options)
        places.append([each.get_position().bounds for each in self.axes])

    with mpl.rc_context({setting: True}), mock.patch.object(Figure, "savefig", saved):
        assert main(["reproduce", "fig-sde", "--output", "out"]) == 0
    assert len(places) == 3 and places[0] == places[1] == places[2]


# --- all, and how long ------------------------------------------------------------------------------------------------


def test_all_goes_on_without_data_and_ends_with_a_summary(install, capsys):
    for name in reproduce.FIGURES:
        install(name, figure())
    assert main(["reproduce", "all"]) == 2
    printed = capsys.readouterr()
    summary = printed.out[printed.out.index("Summary") :]
    for name, entry in reproduce.FIGURES.items():
        line = next(line.split() for line in summary.splitlines() if line.strip().startswith(name))
        assert line[-3:] == (["–", "–", "–"] if entry.datasets else ["1", "1", "0"])
    last = printed.err.splitlines()[-1]
    assert last == (
        "Not reproduced, for the reasons above: fig-floors, fig-speed, fig-threshold, fig-protocol-b, table-tuned."
    )


def test_all_goes_on_after_a_refusal(install, capsys, tmp_path):
    def refuses(scale, **_):
        raise ValueError("out/stores/fig-sde-quick holds runs that this sweep does not ask for.")

    for name in reproduce.FIGURES:
        install(name, figure(run=refuses if name == "fig-sde" else None))
    assert main(["reproduce", "all", "--data", str(tmp_path), "--json"]) == 2
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert [result["name"] for result in answer["figures"]] == [n for n in reproduce.FIGURES if n != "fig-sde"]
    assert list(answer["refused"]) == ["fig-sde"]
    assert "fig-sde is not reproduced. out/stores/fig-sde-quick holds runs" in printed.err


def test_all_with_data_succeeds(install, capsys, tmp_path):
    for name in reproduce.FIGURES:
        install(name, figure())
    assert main(["reproduce", "all", "--data", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [result["name"] for result in answer["figures"]] == list(reproduce.FIGURES)
    assert answer["refused"] == {}


def test_figures_that_are_named_are_reproduced_and_no_others(install, capsys):
    for name in ("fig-hypergeometric", "fig-sde"):
        install(name, figure())
    install("fig-stationary", figure(run=lambda *a, **k: pytest.fail("nobody asked for it")))
    assert main(["reproduce", "fig-hypergeometric", "fig-sde"]) == 0
    summary = capsys.readouterr().out.split("Summary")[1]
    assert "fig-hypergeometric" in summary and "fig-sde" in summary and "fig-stationary" not in summary


def test_one_wrong_name_among_figures_begins_nothing(install, capsys, tmp_path):
    install("fig-sde", figure(run=lambda *a, **k: pytest.fail("it must not start")))
    assert main(["reproduce", "fig-sde", "fig-stationar"]) == 2
    assert "got 'fig-stationar'; did you mean 'fig-stationary'?" in capsys.readouterr().err
    assert files(tmp_path) == []


def test_an_estimate_computes_nothing(install, capsys, tmp_path):
    install("fig-sde", figure(run=lambda *a, **k: pytest.fail("it must not start")))
    assert main(["reproduce", "fig-sde", "--estimate", "--scale", "paper", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"scale": "paper", "seconds": {"fig-sde": 7200.0}}
    assert files(tmp_path) == []


def test_an_estimate_of_all_without_data_says_which_and_fails(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOISECAST_DATA", raising=False)
    assert main(["reproduce", "all", "--estimate", "--json"]) == 2
    said = capsys.readouterr()
    seconds = json.loads(said.out)["seconds"]
    lacking = [name for name, found in seconds.items() if isinstance(found, str)]
    assert lacking == [name for name, each in reproduce.FIGURES.items() if each.datasets] and len(lacking) < len(
        seconds
    )
    assert f"Not estimated, for the reasons above: {', '.join(lacking)}." in " ".join(said.err.split())


def test_an_estimate_needs_a_figure(capsys):
    assert main(["reproduce", "--estimate"]) == 2
    assert "Expected a figure, or all, to estimate" in capsys.readouterr().err


def test_a_long_sweep_is_estimated_by_trial_before_it_begins(install, capsys, monkeypatch, tmp_path):
    import noisecast.sweeps

    asked, swept = [], []

    def estimated(questions, *, workers, done, progress):
        progress(0.5)
        asked.append((questions, workers))
        return 600.0 if not done else 60.0

    monkeypatch.setattr(noisecast.sweeps, "estimate_seconds", estimated)
    monkeypatch.setattr(
        noisecast.sweeps, "run_sweep", lambda *a, **k: swept.append(k) or pd.DataFrame({"value": [1.0]})
    )
    install("fig-sde", figure(SECONDS=None, questions=lambda scale, data, asked: (scale, data, asked)))
    monkeypatch.setitem(reproduce.FIGURES, "fig-sde", reproduce.Figure("", shares=("fig-speed",)))
    command = ["reproduce", "fig-sde", "--workers", "2", "--output", "out"]
    assert main(command) == 0  # quick: a trial would take as long as the figure
    assert "It takes minutes." in capsys.readouterr().err and asked == []
    assert main([*command, "--scale", "paper"]) == 0
    assert "About 10 min; interrupted, the same command goes on." in capsys.readouterr().err
    assert asked == [(("paper", None, None), 2)]
    with Store.open_for_writing(tmp_path / "out" / "stores" / "fig-speed-paper") as beside:
        beside.add(table_from([]), Finished(cells=("a run",), code="", data=(), seconds=1.0))
    assert main([*command, "--scale", "paper"]) == 0  # what another figure has computed takes no time
    assert "About 60 s" in capsys.readouterr().err and asked.pop() == (("paper", None, None), 2)
    (tmp_path / "out" / "stores" / "fig-sde-paper").mkdir()
    assert main([*command, "--scale", "paper"]) == 0
    assert "It goes on with what is in out/stores/fig-sde-paper." in capsys.readouterr().err and len(asked) == 1
    assert [each["beside"] for each in swept] == [[], [], *2 * [[Path("out/stores/fig-speed-paper")]]]


def test_a_damaged_store_of_another_figure_is_left_aside_with_a_word(install, capsys, monkeypatch, tmp_path):
    import noisecast.sweeps

    swept = []
    monkeypatch.setattr(
        noisecast.sweeps, "run_sweep", lambda *a, **k: swept.append(k) or pd.DataFrame({"value": [1.0]})
    )
    install("fig-sde", figure(SECONDS=None, questions=lambda scale, data, asked: (scale, data, asked)))
    monkeypatch.setitem(reproduce.FIGURES, "fig-sde", reproduce.Figure("", shares=("fig-speed",)))
    store = tmp_path / "out" / "stores" / "fig-speed-quick"
    store.parent.mkdir(parents=True)
    with Store.open_for_writing(store):
        (store / "shards" / "foreign.parquet").write_bytes(b"x")
    assert main(["reproduce", "fig-sde", "--output", "out"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "takes nothing from the store of another figure: out/stores/fig-speed-quick/shards/foreign.parquet" in said
    assert swept[0]["beside"] == []


# --- progress in a log ------------------------------------------------------------------------------------------------


def test_a_log_has_a_line_now_and_then_without_control_characters(capsys, monkeypatch):
    from noisecast.cli import progress

    clock = iter(range(0, 10_000, 10))  # every look at the clock is 10 s later
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.sweep_progress("fig-floors") as tell:
        for done in range(1, 41):
            tell(done / 40, 90.0 if done < 20 else None)
    printed = capsys.readouterr().err
    lines = printed.splitlines()
    assert 5 < len(lines) < 40
    assert "fig-floors: " in lines[0] and "2 min left" in lines[0]
    assert all(line.isprintable() for line in lines)


def test_shares_of_other_commands_are_told_in_a_log_too(capsys, monkeypatch):
    from noisecast.cli import progress

    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.share_progress("Training") as tell:
        for done in range(1, 41):
            tell(done / 40)
    lines = capsys.readouterr().err.splitlines()
    assert 5 < len(lines) < 40
    assert "Training: " in lines[1] and " left" in lines[1]


@pytest.mark.parametrize("shares, seconds_left", [([0.0, 0.25], 30.0), ([0.5, 0.75], 10.0), ([0.5], None)])
def test_time_left_counts_only_what_was_done_now(monkeypatch, shares, seconds_left):
    from noisecast.cli import progress

    clock = iter(range(0, 100, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    pace = progress._Pace()
    assert [pace.seconds_left(share) for share in shares][-1] == seconds_left
