"""The page of a store, without a browser: its numbers are those of the store, and nothing in it breaks out."""

import base64
import hashlib
import html
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from noisecast.cli.report import report as report_command
from noisecast.privacy.accounting import epsilon_text
from noisecast.privacy.tuning import TrialDistribution, TrialKind, composed_epsilon
from noisecast.protocols import CELL, Score, cells, tuned
from noisecast.report import chart_data, is_report, report_page, write_report
from noisecast.sweeps import Store
from noisecast.sweeps.price import Choice, Compose

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def text(swept):
    return report_page(swept)


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def words_of(page: str) -> str:
    """What is read, without markup, style and scripts."""
    page = re.sub(r"<(style|script).*?</\1>", " ", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_the_picture_without_javascript_says_what_it_leaves_out(text):
    """It shows one batch size; the others need the script."""
    still = re.search(r"<figure>.*?static-chart.*?</figure>", text, re.S)
    assert still is not None
    data = data_of(text)
    one = data["problems"][0]["shapes"][data["shape"]]
    shown = f"Shown: {data['problems'][0]['name']}, batch size {one['batch']:g}, {one['steps']:,} steps"
    assert f"{shown}; 1 more can be chosen with JavaScript." in words_of(still[0])


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["test_loss", "loss", "accuracy"])
def test_every_cell_of_the_page_is_a_cell_of_the_store(swept, text, metric):
    data = data_of(text)
    of = cells(Store(swept).read(), Score(metric)).set_index(CELL)
    assert len(data["cells"]) == len(of) == 2 * 2 * 2 * 3 * 2 * 2
    for cell, end in zip(data["cells"], data["ends"][metric], strict=True):
        problem, shape, runner, optimizer, level, rate, clip, seeds, diverged, _ = cell
        its = data["problems"][problem]["shapes"][shape]
        key = (data["problems"][problem]["name"], its["batch"], its["steps"], data["runners"][runner]["name"],
               data["optimizers"][optimizer]["name"], its["levels"][level]["z"], rate, clip)  # fmt: skip
        row = of.loc[key]
        assert not diverged and end[0] == pytest.approx(row["value"], rel=1e-5)
        assert seeds == row["num_seeds"] and its["levels"][level]["epsilon"] == row["epsilon"]
        if seeds > 1:
            assert end[1] == pytest.approx(row["high"] - row["value"], rel=1e-2)
        else:
            assert end[1] is None


def test_places_are_those_of_protocol_b(swept, text):
    data, best = data_of(text), tuned(Store(swept).read(), Score("test_loss"))
    ours = sorted((c[5], c[6]) for c in data["cells"] if c[9] == 1)
    assert ours == sorted(zip(best["learning_rate"], best["l2_clip_norm"]))


def test_the_answer_is_the_best_of_each_budget(swept, text):
    best = tuned(Store(swept).read(), Score("test_loss"))
    trained = best[best["runner"] == "training"]
    shown = words_of(text.split('id="answer"')[1].split('id="explore"')[0])
    for _, rows in trained.groupby("epsilon"):
        winner = rows.loc[rows["value"].idxmin()]
        assert (
            f"{winner['value']:.4g} ± {winner['high'] - winner['value']:.2g} se {winner['standard_error']:.2g}" in shown
        )
        assert epsilon_text(winner["epsilon"], 3) in shown


def test_curves_are_means_over_seeds(swept, text):
    data, rows = data_of(text), Store(swept).read()
    i = next(i for i, c in enumerate(data["cells"]) if data["runners"][c[2]]["name"] == "training")
    cell, curve = data["cells"][i], data["curves"]["test_loss"][str(i)]
    shape = data["problems"][0]["shapes"][cell[1]]
    mine = rows[
        (rows["runner"] == "training") & (rows["metric"] == "test_loss") & (rows["learning_rate"] == cell[5])
        & (rows["optimizer"] == data["optimizers"][cell[3]]["name"]) & (rows["l2_clip_norm"] == cell[6])
        & (rows["expected_batch_size"] == shape["batch"])
        & np.isclose(rows["noise_multiplier"], shape["levels"][cell[4]]["z"])
    ]  # fmt: skip
    means = mine.groupby("step")["value"].mean()
    assert [step for step, *_ in curve] == list(means.index) and len(curve) == 5
    assert [value for _, value, _ in curve] == pytest.approx(list(means), rel=1e-5)


def test_a_selection_never_stands_without_its_price(swept, text):
    store = Store(swept)
    rows, ledger = store.read(), store.ledger()
    priced = Compose().priced(Choice("test_loss", "training", float(rows["epsilon"].max()), 1e-4), ledger)
    answer = words_of(text.split('id="answer"')[1].split('id="explore"')[0])
    assert f"ε = {math.ceil(priced.epsilon_of_procedure):,}" in answer and "every one of its 144 runs" in answer
    price = words_of(text.split('id="price"')[1])
    for words in ("Public", "Compose", "RepeatSelect", priced.meaning):
        assert words in price
    first = data_of(text)["prices"][0]
    runs = [run for run in ledger.runs.values() if run.mechanism.noise_multiplier == 4.0]
    runs = [run for run in runs if run.mechanism.expected_batch_size == 32]
    assert first["composed"] == composed_epsilon(runs, target_delta=1e-4).epsilon
    assert first["run"] < first["random"] < first["composed"]


def test_a_choice_by_the_training_loss_has_no_guarantee(swept):
    page = report_page(swept, metric="loss")
    assert "no privacy guarantee (ε = inf)" in words_of(page) and data_of(page)["prices"] == []


def test_what_was_computed_without_noise_says_so(text):
    for part in ("answer", "explore", "curves", "thresholds", "numbers"):
        heading = re.search(rf'<h2 id="{part}-title">(.*?)</h2>', text)[1]
        assert "non-private" in heading
    assert "nominal, not a guarantee" in text and "Nominal ε" in text


# --- what may be in a store -------------------------------------------------------------------------------------------


def test_names_cannot_break_out(made):
    folder = made(lambda table: table.assign(problem=EVIL, optimizer=table["optimizer"].replace("DP-Adam", EVIL)))
    page = report_page(folder)
    assert EVIL not in page and "alert(1)" in page
    assert len(re.findall(r"<script", page)) == 2 and len(re.findall(r"</script", page)) == 2
    assert data_of(page)["problems"][0]["name"] == EVIL  # whole, for those who read it


def test_only_our_own_script_and_style_run(text):
    policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)"', text)[1])
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
    for name in ("style", "script"):
        content = re.search(rf"<{name}>(.*?)</{name}>", text, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert not re.search(r"\s(on\w+|style|src)=", re.sub(r"<script.*?</script>", "", text, flags=re.S))
    assert re.findall(r'href="(?!#|data:)', text) == []


def test_it_is_small_and_always_the_same(swept, text):
    assert len(text.encode()) < 2_000_000
    assert report_page(swept) == text


def test_of_a_store_too_large_for_a_page_the_best_cells_are_kept(swept, text, monkeypatch):
    monkeypatch.setattr(chart_data, "MOST_CELLS", 50)
    monkeypatch.setattr(chart_data, "MOST_NUMBERS", 250)
    page = report_page(swept)
    small, whole = data_of(page), data_of(text)
    assert len(small["cells"]) == 48 and small["left_out"] == len(whole["cells"]) - 48
    assert {c[9] for c in small["cells"]} == {1, 2} and list(small["ends"]) == ["test_loss", "loss"]
    assert [c for c in whole["cells"] if c[9] == 1] == [c for c in small["cells"] if c[9] == 1]


def test_a_diverged_cell_is_shown_as_such(made):
    def diverge(table):
        lost = (table["optimizer"] == "DP-SGD") & (table["learning_rate"] == 4.0) & (table["seed"].fillna(-1) == 1)
        lost &= table["step"] == table["num_steps"]
        return table.assign(
            status=table["status"].mask(lost, "diverged"), value=table["value"].mask(lost, float("nan"))
        )

    page = report_page(made(diverge))
    data = data_of(page)
    lost = [i for i, c in enumerate(data["cells"]) if c[8]]
    assert len(lost) == 2 * 2 * 2 and all(data["ends"]["test_loss"][i] is None for i in lost)
    assert "8 of 144 training runs" in words_of(page)


def test_an_unfinished_store_says_how_much_is_there_and_has_no_price(made, unfinished):
    page = words_of(report_page(made(ledger=unfinished)))
    assert "still being filled" in page and "144 of 145 training runs" in page
    assert "There is no price yet. Expected all 145 runs" in page


def test_a_store_without_its_ledger_has_no_price(made):
    page = words_of(report_page(made(ledger=lambda whole: None)))
    assert "only --price public can choose from this store" in page and "how many were asked for is not known" in page


def test_noise_from_known_seeds_is_not_private(made):
    page = words_of(report_page(made(ledger=lambda whole: replace(whole, is_private=False))))
    assert "NOT private: the noise of these runs was drawn from known seeds" in page and "ε = inf" in page


def test_of_random_trials_only_the_best_is_told(made):
    def as_trials(ledger):
        # Batches of their own: seeds are made different.
        runs = {key: replace(run, batches=str(i)) for i, (key, run) in enumerate(ledger.runs.items())}
        cells = tuple({(run.mechanism, run.num_steps) for run in runs.values()})
        return replace(ledger, runs=runs, trials=TrialDistribution(TrialKind.GEOMETRIC, 200.0), cells=cells)

    folder = made(ledger=as_trials)
    page, rows = report_page(folder), Store(folder).read()
    assert data_of(page) == {"kind": "trials"}
    last = rows[(rows["metric"] == "test_loss") & (rows["step"] == rows["num_steps"]) & (rows["runner"] == "training")]
    best = last.loc[last["value"].idxmin()]
    told = words_of(page)
    assert f"{best['value']:.4g}" in told and "must stay secret" in told and "144" not in told
    others = {f"{value:.4g}" for value in last["value"]} - {f"{best['value']:.4g}"}
    assert not others & set(told.split())


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_report(swept, tmp_path, capsys):
    output = tmp_path / "out.html"
    report_command(swept, output=output, json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["bytes"] == output.stat().st_size and is_report(output.read_text(encoding="utf-8"))
    report_command(swept, output=output)  # over an older report
    assert "non-private" in capsys.readouterr().out


def test_it_writes_over_nothing_but_a_report(swept, tmp_path):
    precious = tmp_path / "thesis.html"
    precious.write_text("<!doctype html><p>mine</p>")
    with pytest.raises(ValueError, match="older report"):
        write_report(swept, precious)
    assert precious.read_text() == "<!doctype html><p>mine</p>"


@pytest.mark.parametrize(
    "metric, sentence", [("clip_fraction", "tells the better model"), ("rmse", "Expected a metric among")]
)
def test_a_metric_that_does_not_fit(swept, metric, sentence):
    with pytest.raises(ValueError, match=sentence):
        report_page(swept, metric=metric)


def test_what_is_neither_is_refused_in_a_sentence(tmp_path, swept):
    with pytest.raises(ValueError, match="found neither"):
        report_page(tmp_path)
    with pytest.raises(ValueError, match="folder"):
        write_report(swept, tmp_path)
    with pytest.raises(ValueError, match="to exist"):
        write_report(swept, tmp_path / "no" / "report.html")
