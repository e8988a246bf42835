"""`noisecast answer`: what the runners say to a scenario file."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from cyclopts import Parameter
from rich.table import Table

from noisecast.cli.output import TABLE_STYLE, Json, print_json, to_reader, warn
from noisecast.cli.places import check_places
from noisecast.cli.progress import share_progress
from noisecast.figures import save, scenario_picture
from noisecast.files import written_whole
from noisecast.optimizers import CONSTANT
from noisecast.printed import counted, number
from noisecast.privacy.accounting import epsilon_text, noise_text
from noisecast.question import Question
from noisecast.runners import Moments, refusals
from noisecast.runners import answer as ask
from noisecast.scenario import Scenario, warnings_of
from noisecast.scenario_file import read_scenario_file
from noisecast.table import EXTRAPOLATED, OK, SIMULATED, write_table

SETTINGS = ("optimizer", "learning_rate", "l2_clip_norm", "noise_multiplier", "epsilon", "nominal_epsilon")

HEADERS = {
    "learning_rate": "rate",
    "l2_clip_norm": "clip",
    "noise_multiplier": "noise",
    "epsilon": "ε",
    "nominal_epsilon": "nominal ε",
    "closed_form": "closed form",
}


def answer(
    scenario: Annotated[Path, Parameter(help="Scenario file (TOML); see examples/ in the repository.")],
    /,
    *,
    output: Annotated[Path | None, Parameter(help="Parquet file for all rows.")] = None,
    figure: Annotated[Path | None, Parameter(help="Picture of loss against steps (.png, .pdf or .svg).")] = None,
    json: Json = False,
) -> None:
    """Ask the runners (training, SDE, closed form) what a scenario file asks."""
    check_places(output, figure)
    question = read_scenario_file(scenario)
    warn(changing_rates(question.scenarios))
    warn(warnings_of(question.scenarios))
    with share_progress("Asking " + ", ".join(runner.name for runner in question.runners)) as progress:
        table = ask(
            question.scenarios,
            runners=question.runners,
            num_seeds=question.num_seeds,
            insecure_seeds=question.insecure_seeds,
            record_at=question.record_at,
            progress=progress,
        )
    refused = refusals(question.scenarios, question.runners)
    write(table, output, figure)
    losses = summaries(table, "loss")
    if json:
        schedules = schedules_of(question.scenarios)
        print_json({"loss": losses, "refusals": refused, "output": output and str(output), "schedules": schedules})
        return
    console = to_reader()
    console.print(_table(losses, question))
    for sentence in refused:
        console.print(f"Left out: {sentence}")
    for path in (output, figure):
        if path is not None:
            console.print(f"Written: {path}", soft_wrap=True)


def schedules_of(scenarios: Iterable[Scenario]) -> dict[str, dict[str, Any]]:
    """Of the scenarios whose learning rate changes along the run: by id, from which steps on it is times what."""
    return {each.id: asdict(each.schedule) for each in scenarios if each.schedule != CONSTANT}


def changing_rates(scenarios: Iterable[Scenario]) -> list[str]:
    """What tables do not say: the learning rate that they show is multiplied along the run."""
    schedules = dict.fromkeys(each.schedule for each in scenarios if each.schedule != CONSTANT)
    return [f"The learning rates that are shown change along the run: {schedule}." for schedule in schedules]


def write(table: pd.DataFrame, output: Path | None, figure: Path | None) -> None:
    if output is not None:
        write_table(table, output)
    if figure is not None:
        drawn = scenario_picture.draw(scenario_picture.data(table))
        with written_whole(figure) as temporary:
            save(drawn, temporary)


def summaries(table: pd.DataFrame, metric: str) -> list[dict[str, Any]]:
    """A metric at the end, by scenario and runner: step, mean, 95 % half-width, seeds, status; NaN as None.

    The end is the last step; of a formula the last one recorded where it holds. A forecast is there to its end, and
    says that it is extrapolated.
    """
    holds = (table["status"] != EXTRAPOLATED) | (table["runner"] == Moments.name)
    holding = table.loc[holds & (table["metric"] == metric)]
    last = holding.groupby(["scenario", "runner"])["step"].transform("max")
    settings = {row["scenario"]: row for row in table.drop_duplicates("scenario").to_dict("records")}
    ends, found = holding.loc[holding["step"] == last], []
    said = ends.loc[ends["status"].isin([EXTRAPOLATED, SIMULATED]), ["scenario", "runner", "status"]]
    said = {(scenario, runner): status for scenario, runner, status in said.itertuples(index=False, name=None)}
    ends = ends.assign(status=ends["status"].where(ends["status"] != EXTRAPOLATED, OK))
    for row in scenario_picture.data(ends, metric).to_dict("records"):
        kept = {name: row[name] for name in ("scenario", "runner", "mean", "num_steps")}
        kept |= {name: int(row[name]) for name in ("step", "num_seeds", "num_diverged")}
        kept["half_width"] = row["high"] - row["mean"]
        kept["status"] = said.get((row["scenario"], row["runner"]), OK)
        kept |= {name: settings[row["scenario"]][name] for name in SETTINGS}
        found.append({name: _plain(value) for name, value in kept.items()})
    return found


def _table(losses: list[dict[str, Any]], question: Question) -> Table:
    first = question.scenarios[0]
    seeds = max(int(loss["num_seeds"]) for loss in losses)
    caption = f"± is the 95 % interval of the mean over {seeds} seeds. " if seeds > 1 else "One seed: no interval. "
    if {loss["runner"] for loss in losses}.isdisjoint({"training", "sde"}):
        caption = "Nothing was drawn: no seed, no interval. "
    caption += f"ε at delta {first.target_delta:g}."
    if any(loss["step"] < loss["num_steps"] for loss in losses):
        caption += ' "At": the last recorded step where the formula holds.'
    if any(loss["status"] == EXTRAPOLATED for loss in losses):
        caption += " ~: extrapolated, a forecast outside the range in which it is known to hold."
    if any(loss["status"] == SIMULATED for loss in losses):
        caption += " Of moments, some are means over simulated runs (noisecast forecast says which, and why)."
    if any(loss["nominal_epsilon"] is not None for loss in losses):
        caption += " Nominal ε is the paper's formula, not a guarantee."
    table = Table(
        title=f"Loss after {counted(first.num_steps, 'step')}, {first.problem.name} (non_private)",
        caption=caption,
        **TABLE_STYLE,
    )
    runners = list(dict.fromkeys(loss["runner"] for loss in losses))
    settings = [
        *(name for name in ("learning_rate", "l2_clip_norm") if _varies_within_an_optimizer(losses, name)),
        "noise_multiplier",
        "epsilon",
        *(name for name in ("nominal_epsilon",) if any(loss[name] is not None for loss in losses)),
    ]
    for name in ("optimizer", *settings, *runners):
        # Where the screen is narrow a loss takes two lines, its interval below it; settings are never cut.
        justify = "left" if name == "optimizer" else "right"
        table.add_column(HEADERS.get(name, name), justify=justify, no_wrap=name not in runners)
    for scenario in question.scenarios:
        by_runner = {loss["runner"]: loss for loss in losses if loss["scenario"] == scenario.id}
        if by_runner:
            row = next(iter(by_runner.values()))
            cells = [_setting(name, row[name]) for name in settings]
            table.add_row(row["optimizer"], *cells, *(loss_cell(by_runner.get(name)) for name in runners))
    return table


def _setting(name: str, value: float | None) -> str:
    if name == "noise_multiplier" and value is not None:
        return noise_text(value)
    return epsilon_text(value, 3) if name == "epsilon" and value is not None else number(value, 3)


def _varies_within_an_optimizer(losses: list[dict[str, Any]], name: str) -> bool:
    pairs = {(loss["optimizer"], loss[name]) for loss in losses}
    return len(pairs) > len({optimizer for optimizer, _ in pairs})


def loss_cell(loss: dict[str, Any] | None) -> str:
    """A mean with its interval, for a table."""
    if loss is None:
        return number(None)
    text = ("~" if loss["status"] == EXTRAPOLATED else "") + number(loss["mean"], 3)
    if loss["step"] < loss["num_steps"]:
        text += f" at {loss['step']:,}"
    if loss["num_diverged"]:
        return f"{loss['num_diverged']}/{loss['num_seeds'] + loss['num_diverged']} diverged, {text}"
    if loss["half_width"] is None or not loss["mean"]:
        return text
    # In per cent of the mean: small losses have long numbers.
    return f"{text} ±{100 * loss['half_width'] / abs(loss['mean']):.0f}%"


def _plain(value: Any) -> Any:
    """A cell as JSON has it."""
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return None
    return int(value) if isinstance(value, int) else float(value)
