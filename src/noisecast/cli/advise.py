"""`noisecast advise`: which optimizer and settings to use at each budget, and what keeping yours would cost."""

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from noisecast.cli.output import TABLE_STYLE, Json, print_json, print_whole, to_reader, warn
from noisecast.cli.places import check_places
from noisecast.cli.progress import share_progress
from noisecast.files import why_unwritable
from noisecast.printed import number
from noisecast.privacy.accounting import epsilon_text, noise_text

NON_PRIVATE = (
    "Non-private: the examples were read without noise, so this advice, and whatever is trained with it, depends on "
    "them in a way that no ε covers; to be covered, ask about public data of the same kind (--public)."
)
PUBLIC = "The examples are declared public: choosing these settings cost no privacy."


def advise(
    scenario: Annotated[
        Path | None, Parameter(help="Scenario file (TOML) with the settings as they were tuned, one an optimizer.")
    ] = None,
    /,
    *,
    epsilon: Annotated[
        list[str] | None,
        Parameter(help="Budgets: 0.1,0.3,1 or the option several times. At the file's target_delta.", negative=()),
    ] = None,
    keep: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Settings cannot be tuned again: only choose among them.")
    ] = False,
    same_batches: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Keep batch size and number of steps.")
    ] = False,
    public: Annotated[
        bool,
        Parameter(negative=(), show_default=False, help="The examples are public: choosing by them costs nothing."),
    ] = False,
    output: Annotated[Path | None, Parameter(help="Parquet file for all rows.")] = None,
    settings: Annotated[
        Path | None, Parameter(help="New folder for a scenario file a budget, which `noisecast answer` runs as it is.")
    ] = None,
    numbers: Annotated[
        Path | None, Parameter(help="Advice from the numbers in this file (TOML), without data.")
    ] = None,
    private_probe: Annotated[
        float | None, Parameter(help="Spend that epsilon on the numbers needed, instead of reading without noise.")
    ] = None,
    ledger: Annotated[
        Path | None,
        Parameter(help="With --private-probe: privacy ledger to write it into before it answers; it may refuse."),
    ] = None,
    dataset: Annotated[str | None, Parameter(help="Name of the data set in the ledger.")] = None,
    json: Json = False,
) -> None:
    """Which optimizer, learning rate, clip norm and batch size at each budget, and what keeping yours would cost."""
    _check_ways(
        scenario, numbers, private_probe, epsilon, (keep, same_batches, public, output, settings), (ledger, dataset)
    )
    if numbers is not None:
        from noisecast.cli.advise_numbers import advise_numbers

        advise_numbers(numbers, json)
        return
    if scenario is None:
        raise ValueError("Expected a scenario file with the tuned settings, or --numbers with a file, got neither.")
    budgets = _budgets(epsilon)
    if private_probe is not None:
        _probe(scenario, budgets, private_probe, ledger, dataset, json)
        return
    _advise(scenario, budgets, keep, same_batches, public, output, settings, json)


def _probe(
    file: Path, budgets: Sequence[float], epsilon: float, ledger: Path | None, dataset: str | None, json: bool
) -> None:
    from noisecast.cli.advise_probe import advise_probe, check_public_shape
    from noisecast.cli.ledger_options import account_of

    if not 0 < epsilon < math.inf:
        raise ValueError(f"Expected a finite --private-probe > 0, got {epsilon}.")
    account = account_of(ledger, dataset)
    check_public_shape(file)
    advise_probe(_tuned(file), budgets, epsilon, json, account)


def _advise(
    file: Path,
    budgets: Sequence[float],
    keep: bool,
    same_batches: bool,
    public: bool,
    output: Path | None,
    settings: Path | None,
    json: bool,
) -> None:
    from noisecast.advice.advise import advise as ask
    from noisecast.cli.train_line import print_commands, train_commands
    from noisecast.forecasting.forecasters import Forecasters
    from noisecast.scenario import warnings_of
    from noisecast.table import write_table

    check_places(output, None)
    _check_folder(settings, budgets)
    with Forecasters() as forecasters:
        tuned = _tuned(file)
        warn(warnings_of(tuned))
        with share_progress("Forecasting") as progress:
            advice = ask(
                tuned,
                target_epsilons=budgets,
                may_retune=not keep,
                may_change_batches=not same_batches,
                progress=progress,
                forecasters=forecasters,
            )
    if output is not None:
        write_table(advice.rows, output)
    written = [] if settings is None else _write_settings(advice, file, settings)
    commands = train_commands(file, [(each.chosen.scenario, each.target_epsilon) for each in advice.recommendations])
    if json:
        where = {"output": output and str(output), "settings": [str(path) for path in written]}
        print_json(_content(advice, public) | {"train_commands": commands} | where)
        return
    _show(to_reader(), advice, public, keep)
    for path in (output, settings):
        if path is not None:
            print(f"Written: {path}")
    print_commands(commands)


# --- What is asked ---------------------------------------------------------------------------------------------------


def _check_ways(
    scenario: Path | None, numbers: Path | None, probe: float | None, epsilon: Any, others: tuple, of_ledger: tuple
) -> None:
    """An option that would not be looked at is refused: silence would be taken for obedience."""
    if numbers is not None and (scenario is not None or probe is not None or epsilon or any((*others, *of_ledger))):
        raise ValueError("Expected --numbers alone (or with --json): its file holds the budgets; leave out the rest.")
    if probe is not None and any(others):
        raise ValueError(
            "Expected --private-probe with a scenario file, --epsilon, --ledger, --dataset and --json alone: it "
            "forecasts nothing, and what it spends would be wasted on --public data; leave out the rest."
        )
    if probe is None and any(of_ledger):
        raise ValueError(
            "Expected --ledger and --dataset with --private-probe alone: advice without it spends no epsilon that "
            "could be written down; leave them out."
        )


def _budgets(given: Sequence[str] | None) -> list[float]:
    texts = [text for each in given or () for text in each.split(",") if text.strip()]
    if not texts:
        raise ValueError("Expected --epsilon with one or more budgets, as 0.1,1,8, got none.")
    found = []
    for text in texts:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"Expected --epsilon as numbers with commas between, got '{text.strip()}'.") from None
        if not 0 < value < math.inf:
            raise ValueError(f"Expected --epsilon > 0 and finite, got {text.strip()}.")
        found.append(value)
    return list(dict.fromkeys(found))


def _tuned(file: Path) -> list[Any]:
    """One scenario an optimizer. Raises: ValueError where the file gives several for one."""
    from noisecast.scenario_file import read_scenario_file

    scenarios = read_scenario_file(file).scenarios
    by_name: dict[str, int] = {}
    for scenario in scenarios:
        by_name[scenario.optimizer.name] = by_name.get(scenario.optimizer.name, 0) + 1
    several = [f"{count} of {name}" for name, count in by_name.items() if count > 1]
    if several:
        raise ValueError(
            f"Expected one setting an optimizer in {file}, as it was tuned at its noise, got {' and '.join(several)}; "
            "keep one learning rate, one l2_clip_norm and one noise_multiplier or target_epsilon."
        )
    return list(scenarios)


# --- What is written -------------------------------------------------------------------------------------------------


def _settings_file(folder: Path, epsilon: float) -> Path:
    return folder / f"epsilon_{epsilon:.12g}.toml"


def _check_folder(folder: Path | None, budgets: Sequence[float]) -> None:
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"Expected a folder for --settings, got the file {folder}.")
    if (reason := why_unwritable(folder.absolute())) is not None and not folder.is_dir():
        raise ValueError(reason)
    for path in (_settings_file(folder, epsilon) for epsilon in budgets):
        if path.exists():
            raise ValueError(f"{path} is there already; give --settings another folder, or move it away.")


def _write_settings(advice: Any, file: Path, folder: Path) -> list[Path]:
    from noisecast.advice.settings_file import settings_toml
    from noisecast.files import written_whole

    asked = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    if isinstance(asked["problem"], list):
        asked["problem"] = asked["problem"][0]
    folder.mkdir(exist_ok=True)
    paths = []
    for each in advice.recommendations:
        path = _settings_file(folder, each.target_epsilon)
        text = settings_toml(each, asked, read_in=file.absolute().parent, written_in=folder.absolute())
        with written_whole(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _content(advice: Any, public: bool) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "privacy_of_this_advice": PUBLIC if public else NON_PRIVATE,
        "is_public": public,
        "recommendations": [
            {
                "target_epsilon": each.target_epsilon,
                "use": each.chosen.as_dict(),
                "by_optimizer": [one.as_dict() for one in each.by_optimizer],
                "kept": [one.as_dict() for one in each.kept],
                "price_of_tuning": vars(each.price) | {"public": each.price.one_run},
                "reason": each.reason,
                "confidence": each.confidence,
            }
            for each in advice.recommendations
        ],
        "thresholds": {
            "kept": [vars(each) for each in advice.thresholds_kept],
            "retuned": [vars(each) for each in advice.thresholds_retuned],
        },
        "notes": list(advice.notes),
    }


# --- What is shown ---------------------------------------------------------------------------------------------------


def _show(console: Console, advice: Any, public: bool, keep: bool) -> None:
    print_whole(console, _settings_table(advice))
    print_whole(console, _optimizers_table(advice))
    console.print(_thresholds_text("With the tuned settings kept", advice.thresholds_kept, advice, "kept"))
    if not keep:
        console.print(_thresholds_text("With the settings above", advice.thresholds_retuned, advice, "by_optimizer"))
    console.print(_price_text(advice, public))
    console.print()
    for each in advice.recommendations:
        console.print(f"ε = {each.target_epsilon:g}: {each.reason} {_sentence(each.confidence)}")
    for note in advice.notes:
        console.print(f"Note: {note}")
    console.print(PUBLIC if public else NON_PRIVATE)


def _settings_table(advice: Any) -> Table:
    first = advice.recommendations[0].chosen
    share = next((name for name in ("test_accuracy", "test_recall_at_5") if name in first.metrics), None)
    has_others = any("batches" in each.chosen.how for each in advice.recommendations)
    starred = "* other batch size or number of steps. " if has_others else ""
    table = Table(
        title=f"Advice for {first.scenario.problem.name}, at delta {first.scenario.target_delta:g}",
        caption=starred + "kept: the loss of the best of the tuned settings as they are.",
        **TABLE_STYLE,
    )
    headers = ["ε", "use", "rate", "clip", "batch", "steps", "noise", "loss"]
    shares = [] if share is None else [share.replace("test_accuracy", "test")]
    for header in [*headers, *shares, "kept"]:
        table.add_column(header, justify="left" if header == "use" else "right", no_wrap=True)
    for each in advice.recommendations:
        scenario, mechanism = each.chosen.scenario, each.chosen.scenario.mechanism
        cells = [f"{each.chosen.metrics[share]:.1%}"] if share else []
        table.add_row(
            f"{each.target_epsilon:g}",
            scenario.optimizer.name + (" *" if "batches" in each.chosen.how else ""),
            number(scenario.optimizer.learning_rate, 3),
            number(mechanism.l2_clip_norm, 3),
            number(mechanism.expected_batch_size),
            number(scenario.num_steps),
            noise_text(mechanism.noise_multiplier),
            _banded(each.chosen),
            *cells,
            "–" if each.best_kept is None else _loss(each.best_kept),
        )
    return table


def _optimizers_table(advice: Any) -> Table:
    """Every optimizer: kept, and what is best for it, with its band."""
    from noisecast.forecasting.outcome import BAND

    table = Table(
        title="Forecast loss of every optimizer: tuned settings kept → the best for it",
        caption=f"{BAND} ~ extrapolated: check it by training.",
        **TABLE_STYLE,
    )
    table.add_column("ε", justify="right", no_wrap=True)
    names = [one.scenario.optimizer.name for one in advice.recommendations[0].by_optimizer]
    for name in names:
        table.add_column(name, no_wrap=True)
    for each in advice.recommendations:
        kept = {one.scenario.optimizer.name: one for one in each.kept}
        best = {one.scenario.optimizer.name: one for one in each.by_optimizer}
        cells = []
        for name in names:
            before = f"{_loss(kept[name])} → " if name in kept else "– → "
            cells.append(before + _banded(best[name]))
        table.add_row(f"{each.target_epsilon:g}", *cells)
    return table


def _thresholds_text(when: str, found: Sequence[Any], advice: Any, field: str) -> str:
    candidates = {one.scenario.optimizer.name for each in advice.recommendations for one in getattr(each, field)}
    if len(candidates) < 2:
        return f"{when}: one optimizer only, so there is no threshold."
    if len(advice.recommendations) < 2:
        return f"{when}: no threshold can be seen from one budget; ask about several."
    if not found:
        best = min(getattr(advice.recommendations[0], field), key=lambda one: one.outcome.order)
        return f"{when}: {best.scenario.optimizer.name} is the best at every budget asked about: no threshold there."
    changes = "; ".join(
        f"below ε* ≈ {each.epsilon:.2g} (between {each.between[0]:g} and {each.between[1]:g}) {each.better_below} is "
        f"better, above it {each.better_above}{', but by so little that it is open' if each.is_close else ''}"
        for each in found
    )
    return f"{when}: {changes}."


def _price_text(advice: Any, public: bool) -> str:
    """What the same choice by training would have cost."""
    prices = [each.price for each in advice.recommendations]
    one = ", ".join(f"{each.target_epsilon:g}" for each in advice.recommendations)
    every = ", ".join(epsilon_text(price.all_counted, 3) for price in prices)
    best = ", ".join(epsilon_text(price.best_of, 3) for price in prices)
    here = "these public examples" if public else "a public proxy"
    return (
        f"Price of tuning by {prices[0].num_runs} trained runs (7 rates, 7 clips) on private data instead: for one run "
        f"at ε = {one} the whole costs {every} with all runs counted, {best} as the best of a random number of them; "
        f"forecasts of {here} add nothing to it."
    )


def _banded(prediction: Any) -> str:
    value, half = prediction.outcome.value, prediction.half_width
    if not math.isfinite(value) or not math.isfinite(half):
        return "diverges"
    mark = "" if prediction.outcome.is_sound else "~"
    if half <= 0:
        return mark + number(value, 4)
    decimals = min(6, max(0, 1 - math.floor(math.log10(half))))
    if value and (abs(value) < 1e-2 or abs(value) >= 1e4):
        return f"{mark}{value:.2g} ±{half / abs(value):.0%}"
    return f"{mark}{value:.{decimals}f} ±{half:.{decimals}f}"


def _loss(prediction: Any) -> str:
    value = prediction.outcome.value
    if not math.isfinite(value):
        return "diverges"
    return ("" if prediction.outcome.is_sound else "~") + (f"{value:.0e}" if value >= 1e4 else number(value, 3))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
