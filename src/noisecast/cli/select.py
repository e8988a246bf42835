"""`noisecast select`: the best settings of a sweep, and what choosing them cost."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from cyclopts import Parameter
from rich.table import Table

from noisecast.cli.output import TABLE_STYLE, Json, facts, print_json, to_reader, warn
from noisecast.cli.unfinished import why_unfinished
from noisecast.files import why_unwritable
from noisecast.model_dir import save_parameters
from noisecast.printed import number
from noisecast.privacy.accounting import epsilon_text, noise_text
from noisecast.runners import Training
from noisecast.scenario_file import read_sweep_file
from noisecast.sweeps import Store
from noisecast.sweeps.chosen_model import chosen_model
from noisecast.sweeps.ledger import Ledger
from noisecast.sweeps.selection import Compose, Price, Public, RepeatSelect, Selection
from noisecast.sweeps.selection import select as select_from
from noisecast.table import METRICS

MOST_RUNNERS_UP = 5
ONE_LEVEL = 1.05  # epsilons that differ by less are of one privacy level
PARAMETERS_ALONE = (
    "It is for a program of your own: the parameters alone, without what turns a file into features. A model for "
    "`noisecast predict` is trained by `noisecast train` with these settings; that is another run, whose epsilon comes "
    "on top."
)
NON_PRIVATE = "Scores are non-private: they were measured without noise, and no epsilon here covers showing them."
SHOWN = ("optimizer", "learning_rate", "l2_clip_norm", "noise_multiplier", "expected_batch_size", "num_steps")
HEADERS = {
    "learning_rate": "rate",
    "l2_clip_norm": "clip",
    "noise_multiplier": "noise",
    "expected_batch_size": "batch",
    "num_steps": "steps",
}


def select(
    store: Annotated[Path, Parameter(help="Folder of a sweep.")],
    /,
    *,
    metric: Annotated[str, Parameter(help="The score, for instance test_loss or test_accuracy.")],
    price: Annotated[
        Literal["public", "compose", "repeat-select"] | None,
        Parameter(
            help="How choosing is paid for: public (the sweep's data are public), compose (every run is counted), "
            "repeat-select (the best of a random number of trials)."
        ),
    ] = None,
    reason: Annotated[str | None, Parameter(help="With --price public: why the data are public, in words.")] = None,
    problem: Annotated[str | None, Parameter(help="Of a sweep of several problems: which one, by name.")] = None,
    runner: Annotated[str, Parameter(help="Whose answers are compared.")] = Training.name,
    last_epochs: Annotated[
        float, Parameter(help="Score by the mean over the recorded steps of so many last epochs. 0: the last step.")
    ] = 0,
    at_most_epsilon: Annotated[
        float | None, Parameter(help="Choose among runs that spend no more than that each. Not with repeat-select.")
    ] = None,
    sweep: Annotated[Path | None, Parameter(help="With --output: the sweep file, for its data.")] = None,
    output: Annotated[
        Path | None,
        Parameter(
            help="Folder for the chosen run's parameters and privacy statement, for programs: `predict` reads what "
            "`train` writes. Not with --price public."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """The best settings of a sweep, and what choosing them cost in privacy."""
    _check_output(sweep, output)
    opened = Store(store)
    table, ledger = opened.read(), None if price in (None, "public") else opened.ledger()
    chosen = select_from(
        table,
        metric=metric,
        problem=problem,
        price=_price(price, reason, ledger),
        ledger=ledger,
        runner=runner,
        last_epochs=last_epochs,
        at_most_epsilon=math.inf if at_most_epsilon is None else at_most_epsilon,
    )
    if chosen.price.only_best:
        opened.settle(chosen)
    warn(why_unfinished(opened, table))
    if sweep is not None and output is not None:
        save_parameters(output, chosen_model(chosen, read_sweep_file(sweep).questions, opened))
    if json:
        print_json(_as_json(chosen) | {"output": output and str(output)})
        return
    _print(chosen)
    if output is not None:
        to_reader().print(f"\nWritten: {output} (parameters.npz, PRIVACY.txt). {PARAMETERS_ALONE}", soft_wrap=True)


def _check_output(sweep: Path | None, output: Path | None) -> None:
    if (sweep is None) != (output is None):
        raise ValueError(
            "Expected --sweep and --output together, got one of them; the model is that of a run on its data."
        )
    if output is not None and output.exists():
        raise ValueError(f"Expected a new folder for --output, got {output}, which exists; choose another name.")
    if output is not None and (reason := why_unwritable(output.absolute())) is not None:
        raise ValueError(reason)


def _price(name: str | None, reason: str | None, ledger: Ledger | None) -> Price:
    if name is None:
        raise ValueError(
            "Expected --price public, compose or repeat-select, got none: a selection must say what choosing cost."
        )
    if reason is not None and name != "public":
        raise ValueError(f"Expected --reason with --price public only, got it with {name}; leave it out.")
    if name == "public":
        return Public(reason or "")
    if name == "compose":
        return Compose()
    if ledger is None or ledger.trials is None:
        raise ValueError(
            "Expected a sweep of random trials for --price repeat-select, got a fixed grid; use --price compose, or "
            "sweep again with random trials."
        )
    return RepeatSelect(ledger.trials)


def _as_json(chosen: Selection) -> dict[str, Any]:
    return {
        "seed": chosen.seed,
        "settings": _to_quote(chosen.settings),
        "metric": chosen.metric,
        "non_private_value": chosen.value,
        "non_private_standard_error": chosen.standard_error,
        "num_seeds": chosen.num_seeds,
        "epsilons_ranked": list(chosen.epsilons),
        "price": chosen.price.name,
        "epsilon_of_run": chosen.epsilon_of_run,
        "epsilon_of_procedure": chosen.epsilon_of_procedure,
        "target_delta": chosen.target_delta,
        "best_of_each": [_to_quote(row) for row in _plain_rows(best_of_each(chosen.ranking))],
        "runners_up": [_to_quote(row) for row in _plain_rows(chosen.runners_up.head(MOST_RUNNERS_UP))],
        "sentence": chosen.sentence(),
    }


def best_of_each(ranking: pd.DataFrame) -> pd.DataFrame:
    """The best cell of each optimizer, and of each noise multiplier where there are several."""
    return ranking.drop_duplicates(["optimizer", "noise_multiplier"]).sort_values(
        ["optimizer", "noise_multiplier"], kind="stable"
    )


def _plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in rows]


def _to_quote(row: dict[str, Any]) -> dict[str, Any]:
    """Without the scenario's id, a hash of the examples, too; what was measured on them is called non-private."""
    measured = ("value", "standard_error")
    return {f"non_private_{name}" if name in measured else name: row[name] for name in row if name != "scenario"}


def _print(chosen: Selection) -> None:
    console, label = to_reader(), METRICS[chosen.metric].label
    # Of runs whose noise is known, one run's epsilon is inf; the mechanism's is that of the same run with secret noise.
    epsilon = "ε" if chosen.epsilon_of_run == chosen.settings["epsilon"] else "ε if secret"
    if len(best := best_of_each(chosen.ranking)) > 1:
        console.print(_cells(f"Best {label} (± standard error), by optimizer and noise multiplier", best, epsilon))
    delta = f"at delta {chosen.target_delta:g}"
    rows = [
        *((HEADERS.get(name, name), _shown(name, chosen.settings[name])) for name in SHOWN),
        (label, _score(chosen.value, chosen.standard_error)),
        ("epsilon of one run", f"{epsilon_text(chosen.epsilon_of_run, 3)}   {delta}"),
        ("epsilon of the procedure", f"{epsilon_text(chosen.epsilon_of_procedure, 3)}   {delta}, {chosen.price.name}"),
    ]
    if (sentence := _why_unequal(chosen)) is not None:
        console.print(sentence + "\n")
    console.print(facts(rows, title="Chosen" + _seed(chosen)))
    console.print(chosen.meaning)
    if not isinstance(chosen.price, Public):
        console.print(NON_PRIVATE)
    if len(chosen.runners_up):
        console.print()
        console.print(_cells("Runners-up", chosen.runners_up.head(MOST_RUNNERS_UP), epsilon))


def _why_unequal(chosen: Selection) -> str | None:
    low, high = chosen.epsilons
    if high <= ONE_LEVEL * low:
        return None
    return (
        f"Ranked together: runs of ε = {epsilon_text(low, 3)} to {epsilon_text(high, 3)}, of which those with less "
        "noise have the easier task; --at-most-epsilon E chooses within a budget."
    )


def _seed(chosen: Selection) -> str:
    return "" if chosen.seed is None else f", seed {chosen.seed}"


def _cells(title: str, frame: pd.DataFrame, epsilon: str) -> Table:
    table = Table(title=title, **TABLE_STYLE)
    for name in (*SHOWN, "score", epsilon):
        table.add_column(HEADERS.get(name, name), justify="left" if name == "optimizer" else "right", no_wrap=True)
    for row in _plain_rows(frame):
        score = _score(row["value"], row["standard_error"])
        table.add_row(*(_shown(name, row[name]) for name in SHOWN), score, epsilon_text(row["epsilon"], 3))
    return table


def _shown(name: str, value: Any) -> str:
    if name == "noise_multiplier":
        return noise_text(value)
    return value if isinstance(value, str) else number(value, 3)


def _score(value: float, standard_error: float | None) -> str:
    return number(value) if standard_error is None else f"{number(value)} ±{number(standard_error, 2)}"
