"""`noisecast advise --private-probe`: a look at the private data that is paid for, and advice fed with it."""

import math
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from noisecast.advice.floors import Numbers, Tuned
from noisecast.advice.numbers import advise_from_numbers
from noisecast.advice.probe import ProbeResult, private_probe
from noisecast.cli.advise_numbers import advice_as_json, print_advice
from noisecast.cli.output import TABLE_STYLE, print_json, to_reader
from noisecast.ledger import Account
from noisecast.printed import number
from noisecast.privacy.accounting import epsilon_text, noise_text
from noisecast.scenario import Scenario, check_constant_rates
from noisecast.scenario_file.rules import located

DROWNED = 0.25  # standard error of a share; two of them are half of all records
NOT_COVERED = "Not covered: the number of records, which sets the sampling probability and was taken as public."


@dataclass(frozen=True)
class BudgetLeft:
    """At one total epsilon: the noise that training needs after the probe, and what it would need without it.

    spent_in_ledger: epsilon of the account after such a training; None without one.
    """

    target_epsilon: float
    noise_multiplier: float
    without_probe: float
    spent_in_ledger: float | None


def check_public_shape(file: Path) -> None:
    """Refuse a probe where one record can change what the others' gradients are.

    The classes and the vocabulary that are read off a private file are such: a record with a new label makes a logistic
    model a softmax model, and moves every count. The file itself has been understood or is refused later.

    Raises: ValueError, one sentence.
    """
    try:
        problems = located("problem", tomllib.loads(file.read_text(encoding="utf-8-sig")))
    except (OSError, ValueError, RecursionError):
        return  # its reader has a better sentence
    for where, problem in problems:
        if not isinstance(problem, dict) or problem.get("kind") != "file":
            continue
        needed = ["label_names"] + (["vocabulary"] if "text" in problem else [])
        missing = [name for name in needed if name not in problem]
        if missing:
            raise ValueError(
                f"Expected a public {' and a public '.join(missing)} in {where}for a private probe, got none: read off "
                "the private file, they let one record change the counts of all others; write them into files of "
                "their own."
            )


def advise_probe(
    scenarios: Sequence[Scenario],
    target_epsilons: Sequence[float],
    probe_epsilon: float,
    json: bool,
    account: Account | None = None,
) -> None:
    """Spend probe_epsilon on noisy counts of gradient norms, then advise at each total epsilon; printed.

    Args:
      scenarios: one or more of each optimizer, on one problem; the first of each is taken as tuned.
      target_epsilons: of probe and training together.   probe_epsilon: of the probe; below all of them.
      account: a data set's in a privacy ledger; the probe is written down there before it answers, or refused.
    Raises: ValueError where nothing would be left for training, or the account's budget would be exceeded; before
      anything is spent.
    """
    _check_left(target_epsilons, probe_epsilon)
    check_constant_rates(scenarios, "to advise about")
    first = scenarios[0]
    tuned = list({each.optimizer.name: each for each in reversed(scenarios)}.values())[::-1]
    numbers = _numbers(tuned)  # whatever is wrong with them, it is found before the budget is spent
    without_probe = {epsilon: numbers.noise_multiplier(epsilon) for epsilon in target_epsilons}
    probe = private_probe(
        first.problem,
        first.mechanism,
        epsilon=probe_epsilon,
        target_delta=first.target_delta,
        l2_clip_norms=[each.mechanism.l2_clip_norm for each in tuned],
    )
    numbers = _numbers(tuned, probe)
    for epsilon in target_epsilons:  # out of reach or not, whatever the counts are
        numbers.noise_multiplier(epsilon)
    in_ledger = None
    if account is not None:
        in_ledger = _least_in_ledger(account, probe, first)
        _write_down(account, probe, first.problem.name)
    advice = advise_from_numbers(numbers, target_epsilons)
    left = [
        BudgetLeft(
            each.target_epsilon,
            each.noise_multiplier,
            without_probe[each.target_epsilon],
            _spent_in_ledger(account, first, each.noise_multiplier),
        )
        for each in advice.epsilons
    ]
    if json:
        of_ledger = {} if in_ledger is None else {"least_noise_multiplier_in_ledger": in_ledger}
        said = {"probe": _probe_as_json(probe, tuned), "left": [asdict(x) for x in left]}
        print_json(said | of_ledger | advice_as_json(advice))
        return
    console = to_reader()
    _print_probe(console, probe, tuned)
    _print_left(console, left, account)
    if account is not None:
        console.print(
            f"The budget of '{account.dataset}' allows this training from noise multiplier {in_ledger:g} on.",
            soft_wrap=True, markup=False,
        )  # fmt: skip
    console.print(
        "\nAdvice from these noisy counts and the settings alone. Every epsilon below counts the probe too, but for "
        "those of a sweep. The counts are of the public start: later gradients may be shorter or longer."
    )
    print_advice(console, advice)


def _check_left(target_epsilons: Sequence[float], probe_epsilon: float) -> None:
    short = [epsilon for epsilon in target_epsilons if epsilon <= probe_epsilon]
    if short or not target_epsilons:
        got = ", ".join(f"{epsilon:g}" for epsilon in short) or "none"
        raise ValueError(
            f"Expected every target epsilon above the probe's {probe_epsilon:g}, got {got}; spend less on the probe."
        )


def _write_down(account: Account, probe: ProbeResult, problem: str) -> None:
    """Before a word of the answer is printed: counts that were drawn and never left this process are no release.

    Every probe draws noise of its own, so each has a name of its own.
    """
    what = f"probe of gradient norms on {problem}"
    account.ledger.spend(account.dataset, probe.mechanism, 1, what=what, run=secrets.token_hex(8))


def _least_in_ledger(account: Account, probe: ProbeResult, scenario: Scenario) -> float:
    """From which noise on the budget allows the training after the probe; asked before the probe is written down."""
    ledger, dataset = account
    found = ledger.least_noise_multiplier(dataset, scenario.mechanism, scenario.num_steps, after=(probe.mechanism, 1))
    if found is None:
        budget = ledger.budget(dataset)
        raise ValueError(
            f"Expected a budget with room for the training after the probe, but whatever its noise, '{dataset}' would "
            f"have spent more than its ε = {budget.epsilon:g} at δ = {budget.delta:g}; spend less on the probe, or set "
            "a larger budget. Nothing was spent."
        )
    return found


def _spent_in_ledger(account: Account | None, scenario: Scenario, noise_multiplier: float) -> float | None:
    if account is None:
        return None
    mechanism = scenario.mechanism.with_noise_multiplier(noise_multiplier)
    return account.ledger.spent_with(account.dataset, mechanism, scenario.num_steps).epsilon


def _numbers(tuned: Sequence[Scenario], probe: ProbeResult | None = None) -> Numbers:
    """The numbers of scenarios and of a probe: shares of clipped records, and the noise per example as a bound."""
    first = tuned[0]
    d, largest = first.problem.num_params, max(each.mechanism.l2_clip_norm for each in tuned)
    return Numbers(
        num_params=d,
        sampler=first.mechanism.sampler,
        num_steps=first.num_steps,
        optimizers=tuple(_tuned(each, probe) for each in tuned),
        target_delta=first.target_delta,
        tuned_noise_multiplier=first.mechanism.noise_multiplier or None,
        example_noise_std=probe and probe.example_noise_std(l2_clip_norm=largest, num_params=d),
        adjacency=first.mechanism.adjacency,
        before=probe and probe.mechanism,
    )


def _tuned(scenario: Scenario, probe: ProbeResult | None) -> Tuned:
    clip = scenario.mechanism.l2_clip_norm
    share = None
    if probe is not None:
        noisy = probe.clipped_share(clip)
        # As far as the noise allows towards clipping: a bound with fewer clipped records would be too narrow.
        share = min(noisy.value + 2 * noisy.standard_error, 1.0 - 1e-9)
    return Tuned(
        theory=scenario.optimizer.theory,
        learning_rate=scenario.optimizer.learning_rate,
        l2_clip_norm=clip,
        clipped_share=share,
    )


# --- Printed ----------------------------------------------------------------------------------------------------------


def _probe_as_json(probe: ProbeResult, tuned: Sequence[Scenario]) -> dict[str, Any]:
    clips = sorted({each.mechanism.l2_clip_norm for each in tuned})
    return {
        "epsilon": probe.epsilon,
        "target_delta": probe.target_delta,
        "statement": probe.sentence(),
        "not_covered": NOT_COVERED,
        "edges": probe.edges,
        "noisy_counts": probe.noisy_counts,
        "noise_std": probe.noise_std,
        "num_examples": probe.num_examples,
        "clipped_shares": [{"l2_clip_norm": clip, **asdict(probe.clipped_share(clip))} for clip in clips],
        "quantiles": [asdict(quantile) for quantile in probe.quantiles],
    }


def _print_probe(console: Console, probe: ProbeResult, tuned: Sequence[Scenario]) -> None:
    console.print(f"{probe.sentence()} {NOT_COVERED}")
    table = Table(
        title="Norms of per-example gradients at the public start, by noisy counts",
        caption=f"each count has noise of std {number(probe.noise_std)} records; shares are of "
        f"{number(probe.num_examples)} examples, taken as public; between: two standard errors of the noise",
        **TABLE_STYLE,
    )
    for name in ("share of norms below", "norm", "between"):
        table.add_column(name, justify="right")
    for quantile in probe.quantiles:
        between = f"{number(quantile.low, 3)} – {number(quantile.high, 3)}"
        table.add_row(number(quantile.probability), number(quantile.value, 3), between)
    console.print(table)
    shares = {clip: probe.clipped_share(clip) for clip in sorted({each.mechanism.l2_clip_norm for each in tuned})}
    for clip, share in shares.items():
        console.print(f"Clipped at {clip:g}: {share.value:.3f} ± {share.standard_error:.3f} of the records.")
    if max(share.standard_error for share in shares.values()) > DROWNED:
        console.print("These counts tell next to nothing: their noise is as large as what they count; spend more.")


def _print_left(console: Console, left: Sequence[BudgetLeft], account: Account | None) -> None:
    caption, budget = None, math.inf
    if account is not None:
        budget = account.ledger.budget(account.dataset).epsilon
        # A plan made beforehand adds up by loss distributions; the ledger cannot know that there was one.
        caption = (
            f"in the ledger: the ε of '{escape(account.dataset)}' after such a training, all entries counted as the "
            f"ledger does, which is more than the plan's own; its budget is {budget:g}"
        )
    table = Table(title="What is left for training", caption=caption, **TABLE_STYLE)
    headers = ("epsilon in all", "noise mult.", "without probe", "more noise")
    for name in headers if account is None else (*headers, "in the ledger"):
        table.add_column(name, justify="right")
    for each in left:
        more = each.noise_multiplier / each.without_probe - 1
        spent = each.spent_in_ledger
        in_ledger = () if spent is None else (epsilon_text(spent) + (", refused" if spent > budget else ""),)
        table.add_row(
            f"{each.target_epsilon:g}", noise_text(each.noise_multiplier), noise_text(each.without_probe),
            f"{more:.1%}", *in_ledger,
        )  # fmt: skip
    console.print(table)
