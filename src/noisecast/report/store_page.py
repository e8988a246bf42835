"""The page of a store: the question, the answer, charts to turn, thresholds, the price, settings to copy."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from noisecast.protocols import Score, tuned
from noisecast.report.answers import (
    Answer,
    answers,
    crossings,
    deciding_runner,
    how_sure,
    metric_of,
    ordered,
    smallest_means,
    verdict,
)
from noisecast.report.chart_data import chart_data
from noisecast.report.markup import Html, joined, page, tag
from noisecast.report.parts import (
    banner,
    chart,
    facts,
    number,
    optimizer_name,
    scripted,
    section,
    settings_to_copy,
    shown_epsilon,
    table,
    without_scripts,
)
from noisecast.report.snippets import Settings
from noisecast.report.static_chart import static_chart
from noisecast.report.tuning_cost import Level, TuningCost, tuning_cost
from noisecast.sweeps import Store
from noisecast.sweeps.ledger import Ledger
from noisecast.sweeps.price import Choice, RepeatSelect
from noisecast.sweeps.selection import Selection, select
from noisecast.table import DIVERGED, METRICS

MOST_COPIED = 12
RUNNER_WORDS = {"training": "trained", "moments": "forecast", "sde": "SDE", "closed_form": "closed form"}


def store_page(store: Store, metric: str | None) -> str:
    """One page.

    Args:
      store: of a sweep, finished or not.   metric: that decides; None: held-out loss, or what there is.
    Raises: ValueError: nothing is there, or the metric is not.
    """
    rows = store.read()
    if store.is_of_trials:
        return _page_of_trials(store, rows, metric)
    decides = metric_of(rows, metric)
    score = Score(decides)
    ledger, why_no_ledger = _ledger(store)
    found = {str(name): answers(of, score) for name, of in rows.groupby("problem", sort=True)}
    cost = _cost(rows, score, ledger, why_no_ledger, found)
    data = chart_data(rows, score)
    data["prices"] = [
        {"run": p.level.epsilon, "text": shown_epsilon(p.level.epsilon), "composed": p.composed,
         "random": p.best_of_random}
        for p in cost.levels
    ]  # fmt: skip
    data["shape"] = _first_shape(data, found)
    title = _question(rows)
    header, asked = _header(store, title, rows, ledger, score)
    parts = [
        header,
        tag(
            "main",
            _answer(found, score, cost),
            _explore(data),
            _curves(),
            _thresholds(rows, score),
            _price(cost, score),
            _privacy(rows, ledger),
            _to_copy(found, ledger),
            asked,
            _all_numbers(rows, score),
        ),
        _footer(),
    ]
    return page(f"{title} · Noisecast report", joined(parts), data, ("chart.js", "page.js"))


# --- The question ---------------------------------------------------------------------------------------


def _question(rows: pd.DataFrame) -> str:
    problems = " and ".join(sorted(set(rows["problem"])))
    names = ordered(set(rows["optimizer"]))
    who = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
    what = "how does it fare" if len(names) == 1 else "which is best"
    return f"{who}: {what} at each privacy budget on {problems}?"


def _header(store: Store, title: str, rows: Any, ledger: Ledger | None, score: Score) -> tuple[Html, Html]:
    distinct = {name: sorted(set(rows[name])) for name in
                ("learning_rate", "l2_clip_norm", "expected_batch_size", "num_steps")}  # fmt: skip
    finite = rows["epsilon"][rows["epsilon"] < math.inf]
    budgets = (
        f"ε from {shown_epsilon(finite.min())} to {shown_epsilon(finite.max())}, as accounted for one run at "
        f"δ = {rows['target_delta'].iloc[0]:g}"
        if len(finite)
        else "none: without noise epsilon is infinite"
    )
    trained = rows[rows["runner"] == "training"]
    runs = trained.drop_duplicates(["scenario", "seed"])
    diverged = trained.loc[trained["status"] == DIVERGED].drop_duplicates(["scenario", "seed"])
    about = [
        ("Problem", ", ".join(sorted(set(rows["problem"])))),
        ("Examples", _examples(rows)),
        ("Optimizers", ", ".join(ordered(set(rows["optimizer"])))),
        ("Budgets", budgets),
        ("Learning rates", _listed(distinct["learning_rate"])),
        ("Clip norms", _listed(distinct["l2_clip_norm"])),
        ("Batch size, steps", "; ".join(f"{number(b)}, {t:,}" for b, t in _shapes(rows))),
        ("Answered by", ", ".join(str(RUNNER_WORDS.get(r, r)) for r in sorted(set(rows["runner"]), reverse=True))),
        ("Judged by", f"{score.label} ({'larger' if score.larger_is_better else 'smaller'} is better)"),
        ("Runs done", _share_done(len(runs), ledger)),
        ("Diverged", f"{len(diverged):,} of {len(runs):,} training runs" if len(runs) else "nothing was trained"),
    ]
    warnings = []
    if ledger is not None and len(runs) < len(ledger.runs):
        warnings.append(
            banner(
                "This store is still being filled.", "What is here may change; what has not run is not in the charts."
            )
        )
    if ledger is not None and not ledger.is_private:
        warnings.append(
            banner(
                "NOT private: the noise of these runs was drawn from known seeds.",
                "Whoever knows the seeds can take the noise away. Every ε on this page is what the same settings spend "
                "when they are run without a seed; these runs and their models have no guarantee (ε = inf).",
                kind="bad",
            )
        )
    if (doubled := _several_scenarios_a_cell(rows)) is not None:
        warnings.append(banner("Runs with different settings share a row here.", doubled))
    header = tag(
        "header",
        tag("p", f"Noisecast report · {store.folder.resolve().name}", class_="eyebrow"),
        tag("h1", title),
        tag("p", _in_words(rows, score), class_="lead"),
        *warnings,
        tag(
            "p",
            tag("span", "non-private", class_="chip first"),
            "Losses and accuracies here were computed from the examples without noise, and no ε covers them. "
            "Share this "
            "page where the data are public, or as you would share the data.",
            class_="note",
        ),
    )
    return header, section("What was asked", facts(about), id_="question")


def _in_words(rows: Any, score: Score) -> str:
    """The question as a sentence."""
    settings = rows.drop_duplicates(["optimizer", "learning_rate", "l2_clip_norm", "expected_batch_size"])
    each = settings.groupby("optimizer").size()
    trained = rows.loc[rows["runner"] == "training"]
    repeats = f", each trained {trained['seed'].nunique()} times" if len(trained) else ""
    forecast = " and forecast" if len(trained) and (rows["runner"] == "moments").any() else ""
    better = "largest" if score.larger_is_better else "smallest"
    return (
        f"Which optimizer and settings give the {better} {METRICS[score.metric].label}? Tried: {number(each.max())} "
        f"settings of each (learning rate, clip norm, batch size) at every budget{repeats}{forecast}."
    )


def _examples(rows: Any) -> str:
    sizes = sorted({round(b / q) for b, q in zip(rows["expected_batch_size"], rows["sampling_probability"]) if q > 0})
    return _listed(sizes) if sizes else "a stream: every step has fresh ones"


def _shapes(rows: Any) -> list[tuple[float, int]]:
    pairs = rows[["expected_batch_size", "num_steps"]].drop_duplicates().itertuples(index=False, name=None)
    return sorted((float(b), int(t)) for b, t in pairs)


def _listed(values: list[float]) -> str:
    if len(values) > 8:
        return f"{len(values)} values from {number(values[0])} to {number(values[-1])}"
    return ", ".join(number(value) for value in values)


def _share_done(done: int, ledger: Ledger | None) -> str:
    if ledger is None:
        return f"{done:,} training runs; how many were asked for is not known: the store has no readable ledger"
    if not ledger.runs:
        return "nothing was to be trained"
    return f"{done:,} of {len(ledger.runs):,} training runs ({min(1.0, done / len(ledger.runs)):.0%})"


def _several_scenarios_a_cell(rows: Any) -> str | None:
    """Settings that the table does not hold (Adam's b1, b2, eps; the sampler) may differ between scenarios."""
    names = [
        "problem",
        "expected_batch_size",
        "num_steps",
        "optimizer",
        "noise_multiplier",
        "learning_rate",
        "l2_clip_norm",
    ]
    if (rows.groupby(names)["scenario"].nunique() <= 1).all():
        return None
    return (
        "Some cells hold several scenarios that differ in what the table has no column for (b1, b2, eps of Adam, the "
        "sampler, δ); they are averaged here as if they were one. Report such sweeps from stores of their own."
    )


# --- The answer -----------------------------------------------------------------------------------------


def _answer(found: dict[str, list[Answer]], score: Score, cost: TuningCost) -> Html:
    parts: list[Html] = []
    for problem, rows in found.items():
        if len(found) > 1:
            parts.append(tag("h3", problem))
        parts.append(tag("p", verdict(rows), class_="verdict"))
        means = "" if verdict(rows) == smallest_means(rows) or len(rows) == 1 else f"{smallest_means(rows)} "
        parts.append(tag("p", means, how_sure(rows, score)))
        parts.append(_answer_table(rows, score))
    parts.append(_price_in_short(cost))
    return section("The answer", *parts, id_="answer", non_private=True)


def _answer_table(rows: list[Answer], score: Score) -> Html:
    has_forecast = any(each.forecast is not None for each in rows)
    label = METRICS[score.metric].label
    columns = [("ε of one run", ""), ("best", "text"), (label, ""), ("learning rate", ""), ("clip norm", ""),
               ("batch size", ""), ("steps", ""), ("noise multiplier", "")]  # fmt: skip
    columns += [("the forecast says", "text")] if has_forecast else []
    body, below = [], []
    for each in rows:
        best = each.best
        line: list[Any] = [
            shown_epsilon(each.epsilon),
            optimizer_name(str(best["optimizer"])),
            _value(best),
            number(best["learning_rate"]),
            number(best["l2_clip_norm"]),
            number(best["expected_batch_size"]),
            number(best["num_steps"]),
            number(best["noise_multiplier"]),
        ]
        if has_forecast:
            line.append("–" if each.forecast is None else _forecast(each.forecast))
        body.append(line)
        doubts = "; ".join(each.doubts) or "nothing here speaks against it"
        below.append(joined([tag("b", "How sure: "), doubts, "."]))
    seeds = sorted({int(each.best["num_seeds"]) for each in rows})
    interval = (
        f"± is the 95 % interval of the mean of {seeds[-1]} seeds, se its standard error"
        if seeds[-1] > 1 and rows[0].best["runner"] == "training"
        else "One number each, no interval"
    )
    note = f"{interval}. The best of many settings flatters itself: chance chose it as well."
    return table(note, columns, body, below=below)


def _value(best: Any) -> Html:
    if best["status"] == DIVERGED:
        return tag("span", "diverged")
    half = best["high"] - best["value"]
    if not math.isfinite(half):
        return tag("span", number(best["value"]))
    # One child for a flex row on a phone.
    error = tag("span", f"se {number(best['standard_error'], 2)}", class_="soft")
    return tag("span", f"{number(best['value'])} ± {number(half, 2)}", error)


def _forecast(row: Any) -> Html:
    settings = tag("span", f"rate {number(row['learning_rate'])}, clip {number(row['l2_clip_norm'])}", class_="soft")
    return tag("span", f"{row['optimizer']}: {number(row['value'])}", settings)


def _price_in_short(cost: TuningCost) -> Html:
    if cost.everything is None or math.isinf(cost.everything):
        private = cost.meaning
    else:
        private = (
            f"With every one of its {cost.num_runs:,} runs counted, choosing from this store on private data has "
            f"ε = {shown_epsilon(cost.everything)}."
        )
    return banner(
        "Choosing has a price, and the ε above do not hold it.",
        "If the data of this sweep are public, choosing cost nothing, and the ε above are those of training once on "
        "private data of the same size.",
        joined([f"If they are private: {private} ", tag("a", "The price of tuning", href="#price"), "."]),
    )


# --- Charts ---------------------------------------------------------------------------------------------


def _legend() -> Html:
    return tag("ul", class_="legend", data_of="cells")


def _explore(data: dict[str, Any]) -> Html:
    still = static_chart(data, 0, data["shape"])
    caption = (
        "Dots are training, with 95 % intervals of the mean over seeds; a dash-dotted line is the forecast, made "
        "without "
        "training; dotted uprights are thresholds. The thin line through dots only guides the eye."
    )
    live = scripted(
        tag("div", id="ends-controls", class_="controls"),
        tag("p", id="ends-say", class_="note live", aria_live="polite"),
        chart("ends", caption, _legend()),
        tag("h3", "Where the better optimizer changes, in what is shown"),
        tag("ul", id="ends-thresholds", class_="plain note", aria_live="polite"),
    )
    return section(
        "Loss against ε", live, without_scripts(tag("figure", still, tag("figcaption", caption))), id_="explore",
        non_private=True,
    )  # fmt: skip


def _curves() -> Html:
    live = scripted(
        tag("div", id="curves-controls", class_="controls"),
        tag("p", id="curves-say", class_="note live", aria_live="polite"),
        chart("curves", "At the recorded steps, with the settings chosen above.", _legend()),
    )
    return section("On the way there", live, without_scripts(tag("p", "Curves need JavaScript.")), id_="curves",
                   non_private=True)  # fmt: skip


def _thresholds(rows: Any, score: Score) -> Html:
    parts: list[Html] = [
        tag(
            "p",
            "ε* is the budget at which the better of two optimizers changes, interpolated between the levels that were "
            "run. It is established only where the two are told apart on both sides of it; a forecast has no interval.",
        )
    ]
    for problem, of in rows.groupby("problem", sort=True):
        if rows["problem"].nunique() > 1:
            parts.append(tag("h3", str(problem)))
        parts.append(_threshold_table(of, score))
    return section("Thresholds ε*", *parts, id_="thresholds", non_private=True)


def _threshold_table(of: Any, score: Score) -> Html:
    highest = float(of.loc[of["epsilon"] < math.inf, "epsilon"].max())
    ways = {"re-tuned at each ε": None} | (
        {f"tuned at ε = {shown_epsilon(highest)} and kept": highest} if math.isfinite(highest) else {}
    )
    entries = {way: crossings(of, score, kept_at) for way, kept_at in ways.items()}
    shapes = {(entry["batch"], entry["steps"]) for found in entries.values() for entry in found}
    lines: dict[tuple, dict[str, str]] = {}
    for way, found in entries.items():
        for e in found:
            batch = f", batch size {number(e['batch'])}" if len(shapes) > 1 else ""
            key = (
                e["batch"],
                e["steps"],
                f"{e['first']} or {e['second']}{batch}",
                e["runner"] != "training",
                e["runner"],
            )
            lines.setdefault(key, {})[way] = e["words"]
    if not lines:
        return tag("p", "There is one optimizer: nothing to compare.")
    body = [
        (key[2], RUNNER_WORDS.get(key[4], key[4]), *(words.get(way, "–") for way in ways))
        for key, words in sorted(lines.items(), key=lambda item: item[0])
    ]
    columns = [("which", "text full"), ("answered by", "text"), *((way, "text full") for way in ways)]
    return table(f"By {score.label}", columns, body)


# --- The price ------------------------------------------------------------------------------------------


def _cost(rows: Any, score: Score, ledger: Ledger | None, why: str, found: dict[str, list[Answer]]) -> TuningCost:
    runner = deciding_runner(rows)
    worst: Any = rows.loc[rows["epsilon"].idxmax()]
    choice = Choice(score.metric, runner, float(worst["epsilon"]), float(worst["target_delta"]))
    levels = [
        Level(problem, float(a.best["expected_batch_size"]), float(a.best["noise_multiplier"]), a.epsilon)
        for problem, of in found.items()
        for a in of
    ]
    return tuning_cost(rows, ledger, choice, sorted(levels, key=lambda level: level.epsilon), why)


def _ledger(store: Store) -> tuple[Ledger | None, str]:
    try:
        return store.ledger(), ""
    except ValueError as error:
        return None, str(error)


def _price(cost: TuningCost, score: Score) -> Html:
    everything = "not known" if cost.everything is None else shown_epsilon(cost.everything)
    ways = table(
        "What stands behind a choice from this store",
        [("how choosing is paid for", "text"), ("ε of the procedure", ""), ("what that says", "text wide")],
        [
            (tag("span", "Public: the sweep's data are public"), "ε of one run",
             "Choosing cost nothing. The model is then trained once on private data, and its ε is that of that run."),
            (tag("span", "Compose: every run is counted"), everything, cost.meaning),
            (tag("span", "RepeatSelect: the best of a random number of trials"), "not this store",
             "This store holds a fixed grid, whose number of runs is no secret. A sweep of random trials (a "
             "[tuning] table "
             "in its file) of which only the best is ever released has the ε drawn below."),
        ],
    )  # fmt: skip
    parts: list[Any] = [ways]
    legend = tag("ul", id="prices-legend", class_="legend")
    if cost.levels:
        body = [
            (shown_epsilon(p.level.epsilon), number(p.level.batch_size), f"{p.num_runs:,}",
             shown_epsilon(p.level.epsilon), shown_epsilon(p.best_of_random), shown_epsilon(p.composed))
            for p in cost.levels
        ]  # fmt: skip
        parts += [
            tag("h3", "Had one level alone been swept"),
            scripted(chart("prices", "Both axes are ε, both logarithmic.", legend)),
            table(
                f"Hypothetical, level by level, for a choice by {METRICS[score.metric].label}: held-out examples "
                f"judge and "
                f"are not protected. {cost.left_out or ''}".strip(),
                [("ε of one run", ""), ("batch size", ""), ("runs of the level", ""), ("tuned on public data", ""),
                 ("best of as many random trials in the mean", ""), ("every run counted", "")],
                body,
            ),
        ]  # fmt: skip
    return section("The price of tuning", *parts, id_="price", class_="long")


def _privacy(rows: Any, ledger: Ledger | None) -> Html:
    mechanisms = (
        [] if ledger is None else list({run.mechanism.sampler: run.mechanism for run in ledger.runs.values()}.values())
    )
    sentences = list(dict.fromkeys(m.statement() for m in mechanisms))
    neighbours = sorted({f"{m.sampler.neighbours(m.adjacency)} one training example" for m in mechanisms})
    about = [
        ("ε", "An upper bound, proven for one run with these settings: the smaller of a PLD and an RDP bound."),
        ("With respect to", "; ".join(neighbours) or "not known: the store has no readable ledger"),
        ("δ", _listed(sorted(set(rows["target_delta"])))),
        ("Not covered", "Choosing (see the price of tuning), and every loss, accuracy or norm on this page."),
        ("Nominal ε", "The paper's formula q √(T ln(1/δ)) / z stands in the last table as “nominal, not a guarantee”."),
    ]
    said = [tag("p", sentence, class_="note") for sentence in sentences[:4]]
    return section("What is promised, and what is not", facts(about), *said, id_="privacy")


# --- To take away ---------------------------------------------------------------------------------------


def _to_copy(found: dict[str, list[Answer]], ledger: Ledger | None) -> Html:
    choices = []
    for problem, rows in found.items():
        for each in rows:
            if each.best["status"] != DIVERGED:
                of = f"{problem}, " if len(found) > 1 else ""
                rate = number(each.best["learning_rate"])
                title = f"{of}ε = {shown_epsilon(each.epsilon)}: {each.best['optimizer']}, learning rate {rate}"
                choices.append((title, _settings(each.best, ledger)))
    left = len(choices) - MOST_COPIED
    more = [tag("p", f"{left} more budgets are left out here; the tables have their settings.")] if left > 0 else []
    reminder = tag(
        "p",
        "The ε named is that of one run with these settings. If they were chosen on private data, the price of "
        "tuning is "
        "added to it.",
    )
    if not choices:
        return section("Settings to copy", tag("p", "There are none: every run diverged."), id_="copy")
    return section(
        "Settings to copy", reminder, settings_to_copy(choices[:MOST_COPIED]), *more, id_="copy", class_="long"
    )


def _settings(row: Any, ledger: Ledger | None) -> Settings:
    samplers = set()
    if ledger is not None:
        samplers = {
            (run.mechanism.sampler, str(run.mechanism.adjacency))
            for run in ledger.runs.values()
            if run.mechanism.noise_multiplier == row["noise_multiplier"]
            and run.mechanism.expected_batch_size == row["expected_batch_size"]
            and run.mechanism.sampling_probability == _or_none(row["sampling_probability"])
        }
    sampler, adjacency = samplers.pop() if len(samplers) == 1 else (None, None)
    return Settings(
        optimizer=str(row["optimizer"]),
        learning_rate=float(row["learning_rate"]),
        noise_multiplier=float(row["noise_multiplier"]),
        l2_clip_norm=float(row["l2_clip_norm"]),
        expected_batch_size=float(row["expected_batch_size"]),
        sampling_probability=_or_none(row["sampling_probability"]),
        num_steps=int(row["num_steps"]),
        target_delta=float(row["target_delta"]),
        sampler=sampler,
        adjacency=adjacency,
    )


def _or_none(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


def _all_numbers(rows: Any, score: Score) -> Html:
    best: Any = tuned(rows, score).sort_values(
        ["problem", "expected_batch_size", "epsilon", "runner", "value"], kind="stable"
    )
    several = best["problem"].nunique() > 1
    columns = [("ε of one run", ""), ("nominal, not a guarantee", ""), ("batch size", ""), ("optimizer", "text"),
               ("answered by", "text"), (METRICS[score.metric].label, ""), ("learning rate", ""), ("clip norm", ""),
               ("seeds", "")]  # fmt: skip
    columns = [("problem", "text"), *columns] if several else columns
    body = []
    for _, row in best.iterrows():
        line: list[Any] = [
            shown_epsilon(row["epsilon"]),
            number(row["nominal_epsilon"], 3),
            number(row["expected_batch_size"]),
            optimizer_name(str(row["optimizer"])),
            RUNNER_WORDS.get(row["runner"], row["runner"]),
            _value(row),
            number(row["learning_rate"]),
            number(row["l2_clip_norm"]),
            number(row["num_seeds"]) if row["runner"] == "training" else "–",
        ]
        body.append([str(row["problem"]), *line] if several else line)
    note = "The best settings of each optimizer at every noise level, by every runner."
    inner = tag("details", tag("summary", f"{len(body)} rows"), table(note, columns, body))
    return section("All numbers", inner, id_="numbers", non_private=True, class_="long")


def _first_shape(data: dict[str, Any], found: dict[str, list[Answer]]) -> int:
    """The batch size that wins most often on the first problem: shown first."""
    problem = data["problems"][0]
    wins = [(a.best["expected_batch_size"], a.best["num_steps"]) for a in found[problem["name"]]]
    counts = [wins.count((shape["batch"], shape["steps"])) for shape in problem["shapes"]]
    return counts.index(max(counts))


# --- Random trials --------------------------------------------------------------------------------------


def _page_of_trials(store: Store, rows: pd.DataFrame, metric: str | None) -> str:
    """Only the best trial may be told, so it is all that stands on the page: no chart, no count, no other cell."""
    ledger = store.ledger()
    assert ledger.trials is not None
    decides = metric_of(rows, metric) if len(rows) else (metric or "test_loss")
    chosen = select(rows, metric=decides, price=RepeatSelect(ledger.trials), ledger=ledger)
    title = f"The best of random trials on {chosen.settings['problem']}"
    body = joined(
        [
            tag(
                "header",
                tag("p", f"Noisecast report · store {store.folder.name}", class_="eyebrow"),
                tag("h1", title),
                banner(
                    "Only the best trial is shown.",
                    "How many trials there were, and all of them but the best, must stay secret: the ε of the "
                    "procedure "
                    "holds only so. Keep the store to yourself.",
                ),
                _guarantee_of(chosen),
            ),
            tag("main", _chosen(chosen), _settings_of(chosen, ledger)),
            _footer(),
        ]
    )
    return page(f"{title} · Noisecast report", body, {"kind": "trials"}, ("chart.js", "page.js"))


def _guarantee_of(chosen: Selection) -> Html:
    if math.isinf(chosen.epsilon_of_procedure):
        return banner("NOT private", chosen.meaning, kind="bad")
    return banner(f"ε of the procedure: {shown_epsilon(chosen.epsilon_of_procedure)}", chosen.meaning, kind="good")


def _chosen(chosen: Selection) -> Html:
    names = ("optimizer", "learning_rate", "l2_clip_norm", "noise_multiplier", "expected_batch_size", "num_steps")
    rows: list[tuple[str, Any]] = [
        (name.replace("_", " "), number(value) if isinstance(value, int | float) else str(value))
        for name in names
        for value in [chosen.settings[name]]
    ]
    rows += [
        (METRICS[chosen.metric].label, number(chosen.value)),
        ("ε of one run", shown_epsilon(chosen.epsilon_of_run)),
        ("ε of the procedure", shown_epsilon(chosen.epsilon_of_procedure)),
        ("δ", f"{chosen.target_delta:g}"),
    ]
    return section("The answer", facts(rows), id_="answer", non_private=True)


def _settings_of(chosen: Selection, ledger: Ledger) -> Html:
    settings = _settings(pd.Series(chosen.settings), ledger)
    title = f"{settings.optimizer}, learning rate {number(settings.learning_rate)}"
    return section("Settings to copy", settings_to_copy([(title, settings)]), id_="copy", class_="long")


def _footer() -> Html:
    from noisecast import __version__

    return tag(
        "footer",
        tag("p", f"Written by noisecast {__version__}. This file loads nothing and sends nothing.", class_="note"),
        tag("p", id="announce", class_="hidden", aria_live="assertive"),
    )
