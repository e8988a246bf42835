"""`noisecast advise --private-probe`: a look at the private data that is paid for, and advice fed with it."""

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from noisecast.advice.floors import Numbers, Tuned
from noisecast.advice.numbers import advise_from_numbers
from noisecast.advice.probe import ProbeResult, private_probe
from noisecast.cli.advise_numbers import advice_as_json, print_advice
from noisecast.cli.output import TABLE_STYLE, number, print_json, to_reader
from noisecast.privacy.accounting import epsilon_text
from noisecast.scenario import Scenario

NOT_COVERED = "Not covered: the number of records, which sets the sampling probability and was taken as public."


@dataclass(frozen=True)
class BudgetLeft:
    """At one total epsilon: the noise that training needs after the probe, and what it would need without it."""

    target_epsilon: float
    noise_multiplier: float
    without_probe: float


def check_public_shape(file: Path) -> None:
    """Refuse a probe where one record can change what the others' gradients are.

    The classes and the vocabulary that are read off a private file are such: a record with a new label makes a logistic
    model a softmax model, and moves every count. The file itself has been understood or is refused later.

    Raises: ValueError, one sentence.
    """
    try:
        problem = tomllib.loads(file.read_text(encoding="utf-8")).get("problem", {})
    except (OSError, ValueError):
        return  # its reader has a better sentence
    if not isinstance(problem, dict) or problem.get("kind") != "file":
        return
    needed = ["label_names"] + (["vocabulary"] if "text" in problem else [])
    missing = [name for name in needed if name not in problem]
    if missing:
        raise ValueError(
            f"Expected a public {' and a public '.join(missing)} in [problem] for a private probe, got none: read off "
            "the private file, they let one record change the counts of all others; write them into files of their own."
        )


def advise_probe(
    scenarios: Sequence[Scenario], target_epsilons: Sequence[float], probe_epsilon: float, json: bool
) -> None:
    """Spend probe_epsilon on noisy counts of gradient norms, then advise at each total epsilon; printed.

    Args:
      scenarios: one or more of each optimizer, on one problem; the first of each is taken as tuned.
      target_epsilons: of probe and training together.   probe_epsilon: of the probe; below all of them.
    Raises: ValueError where nothing would be left for training; before anything is spent.
    """
    first = scenarios[0]
    short = [epsilon for epsilon in target_epsilons if epsilon <= probe_epsilon]
    if short or not target_epsilons:
        got = ", ".join(f"{epsilon:g}" for epsilon in short) or "none"
        raise ValueError(
            f"Expected every target epsilon above the probe's {probe_epsilon:g}, got {got}; spend less on the probe."
        )
    tuned = list({each.optimizer.name: each for each in reversed(scenarios)}.values())[::-1]
    numbers = _numbers(tuned)  # whatever is wrong with them, it is found before the budget is spent
    probe = private_probe(
        first.problem,
        first.mechanism,
        epsilon=probe_epsilon,
        target_delta=first.target_delta,
        l2_clip_norms=[each.mechanism.l2_clip_norm for each in tuned],
    )
    advice = advise_from_numbers(_numbers(tuned, probe), target_epsilons)
    left = [
        BudgetLeft(each.target_epsilon, each.noise_multiplier, numbers.noise_multiplier(each.target_epsilon))
        for each in advice.epsilons
    ]
    if json:
        print_json({"probe": _probe_as_json(probe, tuned), "left": [asdict(x) for x in left], **advice_as_json(advice)})
        return
    console = to_reader()
    _print_probe(console, probe, tuned)
    _print_left(console, left)
    console.print(
        "\nAdvice from these noisy counts and the settings alone. Every epsilon below counts the probe too, but for "
        "those of a sweep. The counts are of the public start: later gradients may be shorter or longer."
    )
    print_advice(console, advice)


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
    for clip in sorted({each.mechanism.l2_clip_norm for each in tuned}):
        share = probe.clipped_share(clip)
        console.print(f"Clipped at {clip:g}: {share.value:.3f} ± {share.standard_error:.3f} of the records.")


def _print_left(console: Console, left: Sequence[BudgetLeft]) -> None:
    table = Table(title="What is left for training", **TABLE_STYLE)
    for name in ("epsilon in all", "noise mult.", "without probe", "more noise"):
        table.add_column(name, justify="right")
    for each in left:
        more = each.noise_multiplier / each.without_probe - 1
        table.add_row(
            epsilon_text(each.target_epsilon), number(each.noise_multiplier), number(each.without_probe), f"{more:.1%}"
        )
    console.print(table)
