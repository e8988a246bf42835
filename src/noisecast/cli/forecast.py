"""`noisecast forecast`: what a scenario file's runs will do, without running one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from noisecast.cli.answer import changing_rates, write
from noisecast.cli.output import TABLE_STYLE, Json, print_json, print_whole, to_reader, warn, whole_number
from noisecast.cli.places import check_places
from noisecast.cli.progress import share_progress
from noisecast.cli.train_line import print_commands, train_commands
from noisecast.forecasting import CrossingForecast, Theorem, forecast_best, forecast_crossing
from noisecast.forecasting.outcome import BAND, Outcome
from noisecast.optimizers import CONSTANT, Optimizer, with_learning_rate
from noisecast.printed import counted, number
from noisecast.privacy.accounting import epsilon_text, noise_text
from noisecast.question import Question
from noisecast.runners import Moments, Runner, refusals
from noisecast.runners.moments import table_of
from noisecast.runners.moments.forecast import Forecast
from noisecast.scenario import Scenario, check_constant_rates, warnings_of
from noisecast.scenario_file import read_scenario_file
from noisecast.table import EXTRAPOLATED, OK, SIMULATED, SOUND

NON_PRIVATE = "Non-private: computed from the examples without noise; use a public proxy to plan."
MOST_NAMES = 4  # of rows that a note is about
RANGE_AROUND_ONE_LEVEL = 16  # where a file names one noise multiplier, the crossing is looked for from 1/16 of it to 16
SHOWN = {
    "test_loss": "test\nloss",
    "test_rmse": "test\nrmse",
    "test_accuracy": "test\nacc.",
    "test_recall_at_5": "test\nrecall@5",
    "accuracy": "accuracy",
    "clip_fraction": "clipped",
}
SHARES = ("accuracy", "recall_at_5", "clip_fraction")

Record = Annotated[
    int | None,
    Parameter(
        converter=whole_number, help="Record that many evenly spaced steps, and the start. Default: as the file says."
    ),
]
Subsample = Annotated[
    int | None,
    Parameter(converter=whole_number, help="Forecast from that many examples. Default: as many as it needs."),
]
TimeSteps = Annotated[
    int | None, Parameter(converter=whole_number, help="Time steps of the solver: more are finer and slower.")
]

FullCovarianceFeatures = Annotated[
    int | None,
    Parameter(
        converter=whole_number,
        help="Features whose weights have a full covariance: more are better where columns overlap, and slower.",
    ),
]
MostRuns = Annotated[
    int | None,
    Parameter(
        converter=whole_number,
        help="Where the solver is rough and examples are few: simulate up to that many runs, by 1,024. 0: never.",
    ),
]


def forecast(
    scenario: Annotated[Path, Parameter(help="Scenario file (TOML), as `noisecast answer` reads it.")],
    /,
    *,
    best: Annotated[
        bool,
        Parameter(
            negative=(),
            show_default=False,
            help="Find the best learning rate and clip norm of each optimizer at each noise, instead of the file's.",
        ),
    ] = False,
    crossing: Annotated[
        bool,
        Parameter(
            negative=(), show_default=False, help="Find the noise at which the better of two optimizers changes."
        ),
    ] = False,
    record: Record = None,
    subsample: Subsample = None,
    time_steps: TimeSteps = None,
    full_covariance_features: FullCovarianceFeatures = None,
    most_runs: MostRuns = None,
    output: Annotated[Path | None, Parameter(help="Parquet file for all rows.")] = None,
    figure: Annotated[Path | None, Parameter(help="Picture of loss against steps (.png, .pdf or .svg).")] = None,
    json: Json = False,
) -> None:
    """What the runs of a scenario file will do: forecast by moments, without training. Non-private."""
    check_places(output, figure)
    _check_options(best, crossing, record, output, figure)
    moments = moments_with(subsample, time_steps, full_covariance_features, most_runs)
    question = read_scenario_file(scenario)
    able, refused = able_and_refused(question, [moments])
    if best or crossing:
        check_constant_rates(able, "to search among")
    warn(changing_rates(able))
    warn(warnings_of(able))
    if crossing:
        _cross(able, refused, moments, json)
        return
    record_at = question.record_at if record is None else _evenly(record, able[0].num_steps)
    if output is None and figure is None:  # a third of the time goes into what nobody would see
        record_at = (able[0].num_steps,)
    notes: list[tuple[Scenario, str]] = []
    tried = None
    if best:
        able, tried, notes = _best(able, moments)
    with share_progress("Forecasting") as progress:
        found: list[Forecast] = []
        for each_forecast in moments.forecasts(able, record_at):
            found.append(each_forecast)
            progress(len(found) / len(able))
    write(pd.concat([table_of(*pair) for pair in zip(able, found, strict=True)]), output, figure)
    results = _results(able, found)
    notes += [(each, reason) for each, f in zip(able, found, strict=True) for reason in Outcome.of(f).reasons]
    if json:
        where = {"output": output and str(output), "figure": figure and str(figure)}
        pairs = dict.fromkeys((each.optimizer.name, reason) for each, reason in notes)
        reasons = [{"optimizer": name, "reason": reason} for name, reason in pairs]
        content = {"forecasts": results, "reasons": reasons, "refusals": refused, "tried": tried}
        content |= {"train_commands": _train_commands(scenario, able, results)} if best else {}
        print_json({"non_private": NON_PRIVATE, **content, **where})
        return
    console = to_reader()
    print_whole(console, _shown(able, results, is_best=best))
    _print_notes(console.print, [(_which(each, able), reason) for each, reason in notes], refused)
    for path in (output, figure):
        if path is not None:
            console.print(f"Written: {path}", soft_wrap=True)
    if best:
        print_commands(_train_commands(scenario, able, results))


# --- What is asked ---------------------------------------------------------------------------------------------------


def moments_with(
    subsample: int | None, time_steps: int | None, full_covariance_features: int | None, most_runs: int | None
) -> Moments:
    given: Any = {
        "subsample": subsample,
        "time_steps": time_steps,
        "full_covariance_features": full_covariance_features,
        "most_runs": most_runs,
    }
    return Moments(**{name: value for name, value in given.items() if value is not None})


def able_and_refused(question: Question, runners: Sequence[Runner]) -> tuple[list[Scenario], list[str]]:
    """The scenarios that all runners can answer, and why others are left out. Raises: ValueError where all are."""
    able = [s for s in question.scenarios if all(runner.why_unsupported(s) is None for runner in runners)]
    refused = refusals(question.scenarios, runners)
    if not able:
        raise ValueError(" ".join(refused))
    return able, refused


def _check_options(best: bool, crossing: bool, record: int | None, output: Path | None, figure: Path | None) -> None:
    if best and crossing:
        raise ValueError("Expected --best or --crossing, got both; ask twice.")
    if crossing and (output or figure or record is not None):
        raise ValueError("Expected --crossing without --output, --figure and --record: it is printed; leave them out.")
    if record is not None and record < 1:
        raise ValueError(f"Expected --record >= 1, got {record}.")


def _evenly(count: int, num_steps: int) -> tuple[int, ...]:
    return tuple(np.unique(np.linspace(0, num_steps, count + 1).round().astype(int)).tolist())


# --- The best cell ---------------------------------------------------------------------------------------------------


def _best(able: Sequence[Scenario], moments: Moments) -> tuple[list[Scenario], list[dict], list[tuple[Scenario, str]]]:
    """One scenario for each optimizer and noise of the file; the cells tried; (scenario, what to know of it)."""
    asked = list({(_kind(each), each.mechanism.noise_multiplier): each for each in reversed(able)}.values())[::-1]
    found, tried, notes = [], [], []
    with share_progress("Searching") as progress:
        for number_done, each in enumerate(asked):
            best = forecast_best(
                each.problem,
                each.mechanism,
                each.optimizer,
                num_steps=each.num_steps,
                target_delta=each.target_delta,
                moments=moments,
                progress=lambda share, done=number_done: progress((done + share) / len(asked)),
            )
            found.append(best.scenario)
            head = {"optimizer": each.optimizer.name, "noise_multiplier": each.mechanism.noise_multiplier}
            tried += [head | cell for cell in best.cells.to_dict("records")]
            notes += [(best.scenario, reason) for reason in best.reasons]
    return found, tried, notes


def _which(scenario: Scenario, among: Sequence[Scenario]) -> str:
    """Its optimizer, and whatever else tells it from the others of that optimizer."""
    others = [each for each in among if each.optimizer.name == scenario.optimizer.name]
    told = [scenario.optimizer.name]
    for name, value in (
        ("noise", lambda each: each.mechanism.noise_multiplier),
        ("rate", lambda each: each.optimizer.learning_rate),
        ("clip", lambda each: each.mechanism.l2_clip_norm),
    ):
        if len({value(each) for each in others}) > 1:
            told.append(f"{name} {number(value(scenario), 3)}")
    return " ".join(told)


def _kind(scenario: Scenario) -> Optimizer:
    """The optimizer, whatever its learning rate."""
    return with_learning_rate(scenario.optimizer, 1.0)


# --- Results ---------------------------------------------------------------------------------------------------------


def _results(scenarios: Sequence[Scenario], forecasts: Sequence[Forecast]) -> list[dict[str, Any]]:
    """The last step of each forecast, and whether it is the best of its optimizer at its noise."""
    results, best = [], {}
    for scenario, found in zip(scenarios, forecasts, strict=True):
        outcome = Outcome.of(found)
        settings = ("optimizer", "learning_rate", "l2_clip_norm", "noise_multiplier", "epsilon", "num_steps")
        columns = scenario.columns()
        result = {name: columns[name] for name in settings} | {
            "status": outcome.status,
            "reasons": list(outcome.reasons),
            "is_best": False,
        }
        result["schedule"] = None if scenario.schedule == CONSTANT else asdict(scenario.schedule)
        metrics = {name: float(values[-1]) for name, values in found.metrics.items()}
        results.append(result | {"non_private_metrics": metrics})
        key = _kind(scenario), scenario.mechanism.noise_multiplier
        best.setdefault(key, []).append((outcome.order, len(results) - 1))
    for candidates in best.values():
        results[min(candidates)[1]]["is_best"] = True
    return results


def _train_commands(file: Path, scenarios: Sequence[Scenario], results: Sequence[dict[str, Any]]) -> list[str]:
    """One for each noise: of the optimizer with the lowest loss there, first the relied upon."""
    ends: dict[float, list[tuple[tuple[bool, float], Scenario]]] = {}
    for each, result in zip(scenarios, results, strict=True):
        order = result["status"] not in SOUND, result["non_private_metrics"]["loss"]
        ends.setdefault(each.mechanism.noise_multiplier, []).append((order, each))
    return train_commands(file, [(min(some, key=lambda pair: pair[0])[1], None) for some in ends.values()])


def _shown(scenarios: Sequence[Scenario], results: Sequence[dict[str, Any]], is_best: bool) -> Table:
    first = scenarios[0]
    levels = list(dict.fromkeys(result["noise_multiplier"] for result in results))
    is_choice = len(results) > len({(r["optimizer"], r["noise_multiplier"]) for r in results})
    has_status = any(result["status"] != OK for result in results)
    has_extrapolated = any(result["status"] == EXTRAPOLATED for result in results)
    caption = "Forecast: nothing was trained."
    if any(result["status"] == SIMULATED for result in results):
        caption = "Forecast. Simulated rows are means over runs of the optimizer."
    if any("loss_std" in result["non_private_metrics"] for result in results):
        caption += f" {BAND}" + (" Extrapolated rows may end elsewhere." if has_extrapolated else "")
    if is_choice:
        caption += (
            f" * lowest loss of its optimizer at that noise{', extrapolated rows last' if has_extrapolated else ''}."
        )
    caption += f" ε at delta {first.target_delta:g}."
    title = "Best learning rate and clip norm" if is_best else "Forecast"
    table = Table(
        title=f"{title}: loss after {counted(first.num_steps, 'step')}, {first.problem.name}",
        caption=caption,
        **TABLE_STYLE,
    )
    measured = [
        name for name in SHOWN if any(not math.isnan(r["non_private_metrics"].get(name, math.nan)) for r in results)
    ]
    if "test_accuracy" in measured:
        measured.remove("accuracy")
    headers = ["ε", "noise", "optimizer", "rate", "clip", "loss", *(SHOWN[name] for name in measured)]
    for header in [*headers, *(["status"] if has_status else [])]:
        table.add_column(header, justify="left" if header in ("optimizer", "status") else "right", no_wrap=True)
    for level in levels:
        for place, result in enumerate(r for r in results if r["noise_multiplier"] == level):
            metrics = result["non_private_metrics"]
            half_width = Outcome("loss", metrics["loss"], metrics.get("loss_std", math.nan), OK).half_width
            head = (epsilon_text(result["epsilon"], 3), noise_text(level)) if place == 0 else ("", "")
            mark = " *" if is_choice and result["is_best"] else ""
            table.add_row(
                *head,
                result["optimizer"] + mark,
                number(result["learning_rate"], 3),
                number(result["l2_clip_norm"], 3),
                loss_text(metrics["loss"], half_width if "loss_std" in metrics else None),
                *(_cell(name, metrics.get(name)) for name in measured),
                *([result["status"]] if has_status else []),
            )
        table.add_section()
    return table


def loss_text(loss: float, half_width: float | None) -> str:
    """A loss with as many decimals as its band deserves.

    >>> loss_text(0.31416, 0.0123), loss_text(2.0, None), loss_text(float("nan"), 1.0)
    ('0.314 ±0.012', '2', '–')
    """
    if half_width is None or not math.isfinite(half_width) or not math.isfinite(loss) or half_width <= 0:
        return number(loss, 4)
    decimals = 1 - math.floor(math.log10(half_width))
    if not 0 <= decimals <= 5 or abs(loss) >= 1e4:
        return f"{loss:.3g} ±{half_width:.1g}"
    return f"{loss:.{decimals}f} ±{half_width:.{decimals}f}"


def _cell(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{value:.1%}" if name.removeprefix("test_") in SHARES else number(value, 4)


def _print_notes(show: Callable, notes: Sequence[tuple[str, str]], refused: Sequence[str]) -> None:
    show(NON_PRIVATE)
    by_reason: dict[str, list[str]] = {}
    for name, reason in dict.fromkeys(notes):
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        show(f"Note ({'; '.join(names[:MOST_NAMES])}{more}): {reason}")
    for sentence in refused:
        show(f"Left out: {sentence}")


# --- The crossing ----------------------------------------------------------------------------------------------------


def _cross(able: Sequence[Scenario], refused: Sequence[str], moments: Moments, json: bool) -> None:
    pairs = list(combinations(_contestants(able), 2))
    low, high = _range_to_look_in(able)
    found = _crossings(pairs, low, high, moments)
    if json:
        content = [_as_json(pair, crossing) for pair, crossing in zip(pairs, found, strict=True)]
        print_json({"non_private": NON_PRIVATE, "crossings": content, "refusals": list(refused)})
        return
    console = to_reader()
    _print_question(console, able[0], low, high)
    notes = []
    for pair, crossing in zip(pairs, found, strict=True):
        console.print()
        console.print(" and ".join(_described(scenario) for scenario in pair), style="bold")
        for sentence in (*_sentences(crossing), _theorem_sentence(crossing.theorem)):
            console.print(f"  {sentence}")
        notes += [(scenario.optimizer.name, reason) for reason in crossing.reasons for scenario in pair]
    console.print()
    _print_notes(console.print, notes, refused)


def _range_to_look_in(able: Sequence[Scenario]) -> tuple[float, float]:
    levels = {scenario.mechanism.noise_multiplier for scenario in able}
    low, high = min(levels), max(levels)
    if low == high:
        low, high = low / RANGE_AROUND_ONE_LEVEL, high * RANGE_AROUND_ONE_LEVEL
    if low == 0:
        raise ValueError("Expected noise multipliers > 0 with --crossing, got 0; give the file the range to look in.")
    return low, high


def _crossings(
    pairs: Sequence[tuple[Scenario, Scenario]], low: float, high: float, moments: Moments
) -> list[CrossingForecast]:
    found = []
    with share_progress("Looking for crossings") as progress:
        for done, (one, other) in enumerate(pairs):
            found.append(
                forecast_crossing(
                    one.problem,
                    one.mechanism,
                    (one.optimizer, other.optimizer),
                    num_steps=one.num_steps,
                    noise_multipliers=(low, high),
                    l2_clip_norms=(one.mechanism.l2_clip_norm, other.mechanism.l2_clip_norm),
                    target_delta=one.target_delta,
                    moments=moments,
                    progress=lambda share, done=done: progress((done + share) / len(pairs)),
                )
            )
    return found


def _print_question(console: Console, first: Scenario, low: float, high: float) -> None:
    console.print(
        f"Which optimizer has the lower forecast loss after {counted(first.num_steps, 'step')}, {first.problem.name}"
    )
    spent = [replace(first, mechanism=first.mechanism.with_noise_multiplier(z)).privacy_spent for z in (low, high)]
    epsilons = " to ".join(epsilon_text(each.epsilon, 3) for each in spent)
    console.print(
        f"Noise multipliers {number(low, 3)} to {number(high, 3)}: ε = {epsilons} at delta {first.target_delta:g}."
    )


def _contestants(able: Sequence[Scenario]) -> list[Scenario]:
    """One scenario for each optimizer of the file."""
    cells: dict[Any, dict[Any, Scenario]] = {}
    for scenario in able:
        cell = scenario.optimizer.learning_rate, scenario.mechanism.l2_clip_norm
        cells.setdefault(_kind(scenario), {}).setdefault(cell, scenario)
    for kind, found in cells.items():
        if len(found) > 1:
            raise ValueError(
                f"Expected one learning rate and clip norm for {kind.name} with --crossing, got {len(found)}; "
                "leave one in the file."
            )
    if len(cells) < 2:
        raise ValueError(f"Expected two or more optimizers with --crossing, got {len(cells)}; add one to the file.")
    return [next(iter(found.values())) for found in cells.values()]


def _described(scenario: Scenario) -> str:
    optimizer, mechanism = scenario.optimizer, scenario.mechanism
    return f"{optimizer.name} (rate {number(optimizer.learning_rate, 3)}, clip {number(mechanism.l2_clip_norm, 3)})"


def _sentences(found: CrossingForecast) -> list[str]:
    if found.better is None:
        return ["Forecast: both diverge everywhere."]
    if not found.crossings:
        return [f"Forecast: {found.better} is better everywhere."]
    return [
        f"Forecast: {c.better_below} is better below noise multiplier {number(c.noise_multiplier, 3)} "
        f"(ε = {epsilon_text(c.epsilon, 3)}), {c.better_above} above. Loss {number(c.value, 3)} there; "
        f"a forecast 1 % off moves it by about {_share(c.shift_per_percent)}."
        for c in found.crossings
    ]


def _theorem_sentence(theorem: Theorem | str) -> str:
    if isinstance(theorem, str):
        return f"Theorem: {theorem}"
    places = [
        f"{number(z, 3)} (ε = {epsilon_text(epsilon, 3)})"
        for z, epsilon in zip(theorem.thresholds.noise_multipliers, theorem.epsilons, strict=True)
    ]
    where = {
        "always": lambda: "at every noise",
        "above": lambda: f"above noise multiplier {places[0]}",
        "outside": lambda: f"below noise multiplier {places[0]} and above {places[1]}",
    }[theorem.thresholds.verdict]()
    return f"Theorem, of the losses after infinitely many steps: {theorem.adaptive} is better {where} ({theorem.form})."


def _share(share: float) -> str:
    return f"{100 * share:.2g} %"


def _as_json(pair: Sequence[Scenario], found: CrossingForecast) -> dict[str, Any]:
    theorem: Any = found.theorem
    if isinstance(theorem, Theorem):
        theorem = {
            "adaptive": theorem.adaptive,
            "verdict": theorem.thresholds.verdict,
            "noise_multipliers": list(theorem.thresholds.noise_multipliers),
            "epsilons": list(theorem.epsilons),
            "form": theorem.form,
        }
    return {
        "optimizers": [scenario.optimizer.name for scenario in pair],
        "better_at_least_noise": found.better,
        "crossings": [vars(crossing) for crossing in found.crossings],
        "scan": found.scan.to_dict("records"),
        "theorem": theorem,
        "reasons": list(found.reasons),
    }
