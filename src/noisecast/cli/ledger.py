"""`noisecast ledger`: what was spent on each data set, written down before it was spent."""

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.markup import escape
from rich.table import Table

from noisecast.cli.output import TABLE_STYLE, Json, print_json, to_reader
from noisecast.ledger import BudgetEntry, Entry, PrivacyLedger, check_budget
from noisecast.printed import number
from noisecast.privacy.accounting import epsilon_spent, epsilon_text, noise_text
from noisecast.privacy.mechanism import SampledGaussian


def ledger(
    action: Annotated[Literal["show", "check", "budget"], Parameter(help="What to do.")],
    file: Annotated[Path, Parameter(help="The ledger; `budget` makes it where there is none.")],
    dataset: Annotated[str | None, Parameter(help="With show: one data set alone; with budget: which.")] = None,
    /,
    *,
    epsilon: Annotated[float | None, Parameter(help="With budget: the most that may be spent.")] = None,
    delta: Annotated[float | None, Parameter(help="With budget: the delta that epsilon is stated at.")] = None,
    json: Json = False,
) -> None:
    """What was spent on each data set and how much is left; whether the ledger is sound; a data set's budget.

    `noisecast train --ledger FILE --dataset NAME` writes a run down before its first step, or refuses it; `noisecast
    advise --private-probe` a probe, before it answers.
    """
    if action == "budget":
        _set_budget(file, dataset, epsilon, delta, json)
        return
    if epsilon is not None or delta is not None:
        raise ValueError("Expected --epsilon and --delta with `ledger budget` alone; leave them out.")
    if action == "check" and dataset is not None:
        raise ValueError(
            f"Expected `ledger check` of a whole file, whose entries are one chain; leave out '{dataset}'."
        )
    found = PrivacyLedger(file)
    if action == "check":
        _check(found, json)
    else:
        _show(found, found.datasets if dataset is None else (dataset,), json)


def _set_budget(file: Path, dataset: str | None, epsilon: float | None, delta: float | None, json: bool) -> None:
    if dataset is None or epsilon is None or delta is None:
        raise ValueError("Expected a data set's name, --epsilon and --delta; give what is missing.")
    check_budget(dataset, epsilon=epsilon, delta=delta)  # before the file is made
    PrivacyLedger(file, create=True).set_budget(dataset, epsilon=epsilon, delta=delta)
    if json:
        print_json({"ledger": str(file), "dataset": dataset, "epsilon": epsilon, "delta": delta})
        return
    to_reader().print(f"{file}: '{dataset}' may spend ε = {epsilon:g} at δ = {delta:g}.", soft_wrap=True, markup=False)


def _check(ledger: PrivacyLedger, json: bool) -> None:
    troubles = ledger.check()
    if json:
        print_json({"ledger": str(ledger.path), "troubles": troubles})
    if troubles:
        raise ValueError(" ".join(troubles))
    if not json:
        count = sum(len(ledger.entries(dataset)) for dataset in ledger.datasets)
        runs = "1 run" if count == 1 else f"{count} runs"
        to_reader().print(f"{ledger.path} is sound: {runs}, none altered, no budget exceeded.", soft_wrap=True)


def _show(ledger: PrivacyLedger, datasets: tuple[str, ...], json: bool) -> None:
    if json:
        print_json({dataset: _as_json(ledger, dataset) for dataset in datasets})
        return
    console = to_reader()
    if not datasets:
        console.print(f"{ledger.path} has no data set; set a budget: noisecast ledger budget {ledger.path} NAME ...")
    for dataset in datasets:
        console.print(_table(ledger, dataset))


def _table(ledger: PrivacyLedger, dataset: str) -> Table:
    """Budgets and runs in the order in which they were written."""
    budget, spent, runs = ledger.budget(dataset), ledger.spent(dataset), ledger.entries(dataset)
    title = (
        f"{escape(dataset)}: ε = {epsilon_text(spent.epsilon, 4)} of {budget.epsilon:g} spent at δ = {budget.delta:g}"
    )
    alone = sum(_epsilon_alone(run.mechanism, run.num_steps, budget.delta) for run in runs)
    caption = f"Composed by {spent.accountant}, as runs that may depend on earlier ones" if len(runs) > 1 else None
    caption = f"{caption}: less than the sum of their own." if caption and spent.epsilon < alone else caption
    table = Table(title=title, caption=caption, **TABLE_STYLE)
    for header in ("entry", "when (UTC)", "what", "noise", "q", "steps", "ε"):
        table.add_column(header, justify="left" if header in ("when (UTC)", "what") else "right")
    for entry in sorted([*ledger.budgets(dataset), *runs], key=lambda each: each.number):
        table.add_row(str(entry.number), entry.when[:16].replace("T", " "), *_cells(entry, budget.delta))
    return table


def _cells(entry: Entry | BudgetEntry, delta: float) -> tuple[str, ...]:
    if isinstance(entry, BudgetEntry):
        return f"budget at δ = {entry.budget.delta:g}", "", "", "", f"{entry.budget.epsilon:g}"
    mechanism = entry.mechanism
    return (
        escape(entry.what),
        noise_text(mechanism.noise_multiplier),
        number(mechanism.sampling_probability, 3),
        f"{entry.num_steps:,}",
        epsilon_text(_epsilon_alone(mechanism, entry.num_steps, delta)),
    )


@cache  # the accountant takes a second, and many runs are alike
def _epsilon_alone(mechanism: SampledGaussian, num_steps: int, delta: float) -> float:
    return epsilon_spent(mechanism, num_steps=num_steps, target_delta=delta).epsilon


def _as_json(ledger: PrivacyLedger, dataset: str) -> dict[str, Any]:
    budget, spent = ledger.budget(dataset), ledger.spent(dataset)
    return {
        "budget_epsilon": budget.epsilon,
        "delta": budget.delta,
        "spent_epsilon": spent.epsilon,
        "accountant": spent.accountant,
        "budgets": [
            {"number": each.number, "epsilon": each.budget.epsilon, "delta": each.budget.delta, "when": each.when}
            for each in ledger.budgets(dataset)
        ],
        "entries": [
            vars(entry)
            | {
                "mechanism": entry.mechanism.as_data(),
                "epsilon": _epsilon_alone(entry.mechanism, entry.num_steps, budget.delta),
            }
            for entry in ledger.entries(dataset)
        ],
    }
