"""`noisecast advise --numbers`: advice from a file of numbers, no data."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.console import Console
from rich.table import Table as RichTable

from noisecast.advice.floors import Numbers, Tuned
from noisecast.advice.numbers import NOT_A_GUARANTEE, EpsilonAdvice, NumbersAdvice, advise_from_numbers
from noisecast.advice.transfer import Branch, Curvature
from noisecast.cli.output import TABLE_STYLE, print_json, to_reader, warn
from noisecast.printed import number
from noisecast.privacy.accounting import default_delta, epsilon_text, noise_text, warnings_for
from noisecast.privacy.sampling import Sampler, adjacency_named, sampler_named, steps_of_epochs
from noisecast.scenario_file.mistakes import ScenarioFileError, checked
from noisecast.scenario_file.tables import OPTIMIZER_NAMES
from noisecast.scenario_file.values import LISTED, Count, NotNegative, OneOrMorePositive, Positive, Table, one_of

NO_DATA = "From numbers alone: no data was read."


class OptimizerNumbers(Table):
    """[[optimizer]]: one as it was tuned."""

    name: Annotated[str, one_of(OPTIMIZER_NAMES)]
    learning_rate: Positive
    l2_clip_norm: Positive
    clipped_share: Annotated[float, Field(ge=0, le=1)] | None = None

    def tuned(self) -> Tuned:
        return Tuned(
            theory=OPTIMIZER_NAMES[self.name](learning_rate=self.learning_rate).theory,
            learning_rate=self.learning_rate,
            l2_clip_norm=self.l2_clip_norm,
            clipped_share=self.clipped_share,
        )


class NumbersFile(Table):
    """A file of numbers: what is known, in the words of `Numbers`."""

    num_params: Count
    num_examples: Count
    batch_size: Positive
    num_steps: Count | None = None
    num_epochs: Count | None = None
    target_delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    target_epsilon: OneOrMorePositive
    tuned_at_noise_multiplier: Positive | None = None
    tuned_at_epsilon: Positive | None = None
    example_noise_std: NotNegative | None = None
    initial_loss: Positive | None = None
    hessian_trace: Positive | None = None
    nominal_num_examples: Count | None = None
    sampler: Annotated[str, one_of(("poisson", "fixed-size", "shuffled"))] = "poisson"
    adjacency: Annotated[str, one_of(("add-or-remove-one", "replace-one"))] | None = None
    optimizer: Annotated[list[OptimizerNumbers], *LISTED[:1]]

    def contradictions(self) -> list[str]:
        found = []
        if (self.num_steps is None) == (self.num_epochs is None):
            found.append("Expected num_steps or num_epochs, got both or neither; give one of them.")
        if self.tuned_at_noise_multiplier is not None and self.tuned_at_epsilon is not None:
            found.append("Expected tuned_at_noise_multiplier or tuned_at_epsilon, got both; leave one out.")
        if (self.initial_loss is None) != (self.hessian_trace is None):
            found.append("Expected initial_loss and hessian_trace together, got one of them; give both or neither.")
        if self.batch_size > self.num_examples:
            found.append(f"Expected batch_size <= num_examples = {self.num_examples}, got {self.batch_size:g}.")
        return found

    def numbers(self) -> Numbers:
        sampler: Sampler = sampler_named(self.sampler, self.batch_size, self.num_examples)
        curvature = None
        if self.initial_loss is not None and self.hessian_trace is not None:
            curvature = Curvature(self.initial_loss, self.hessian_trace)
        known = Numbers(
            num_params=self.num_params,
            sampler=sampler,
            num_steps=self.num_steps or steps_of_epochs(self.num_epochs or 0, self.batch_size / self.num_examples),
            optimizers=tuple(each.tuned() for each in self.optimizer),
            target_delta=default_delta(self.num_examples) if self.target_delta is None else self.target_delta,
            tuned_noise_multiplier=self.tuned_at_noise_multiplier,
            example_noise_std=self.example_noise_std,
            curvature=curvature,
            nominal_num_examples=self.nominal_num_examples,
            adjacency=adjacency_named(self.adjacency, self.sampler),
        )
        if self.tuned_at_epsilon is None:
            return known
        return known.tuned_at(self.tuned_at_epsilon)


def read_numbers(path: str | Path) -> tuple[Numbers, tuple[float, ...]]:
    """What a file of numbers says: the numbers, and the epsilons that it asks about.

    Raises: ScenarioFileError, with every mistake at once.
    """
    path, mistakes = Path(path), []
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ScenarioFileError([f"There is no file of numbers {path}; check the path."]) from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number of 5,000 digits, 1,000 brackets
        raise ScenarioFileError([f"{path} is not a TOML file: {str(error).rstrip('.')}."]) from None
    if "problem" in table and "mechanism" in table:
        sentence = f"{path} is a scenario file, not a file of numbers; ask `noisecast advise {path} --epsilon ...`."
        raise ScenarioFileError([sentence])
    found = checked(NumbersFile, table, "", mistakes)
    if found is not None:
        mistakes += found.contradictions()
    if mistakes or found is None:
        raise ScenarioFileError(f"{path}: {mistake}" for mistake in mistakes)
    try:
        return found.numbers(), tuple(found.target_epsilon)
    except ValueError as error:
        raise ScenarioFileError([f"{path}: {error}"]) from None


def advise_numbers(path: Path, json: bool) -> None:
    """Advice from a file of numbers (`examples/advise_numbers.toml`), printed."""
    numbers, target_epsilons = read_numbers(path)
    warn(warnings_for(numbers.mechanism(numbers.tuned_noise_multiplier or 1.0), target_delta=numbers.target_delta))
    advice = advise_from_numbers(numbers, target_epsilons)
    if json:
        print_json({"source": NO_DATA, **advice_as_json(advice)})
        return
    console = to_reader()
    console.print(NO_DATA)
    print_advice(console, advice)


def advice_as_json(advice: NumbersAdvice) -> dict[str, Any]:
    """For programs: the dataclasses as they are."""
    return {"nominal_epsilon_is": NOT_A_GUARANTEE, **asdict(advice)}


def print_advice(console: Console, advice: NumbersAdvice) -> None:
    """A table of the epsilons, then the thresholds, then each epsilon's sentences, then what cannot be known."""
    console.print(_table(advice.epsilons))
    for threshold in advice.thresholds:
        console.print(threshold.sentence)
    if advice.thresholds:
        console.print(f"(Settings kept. Epsilon as accounted; nominal: {NOT_A_GUARANTEE}.)")
    for epsilon in advice.epsilons:
        console.print(f"\n[bold]epsilon {epsilon.target_epsilon:g}[/bold]")
        for sentence in epsilon.sentences:
            console.print(sentence)
    console.print("\n[bold]What the numbers do not tell[/bold]")
    for sentence in advice.unknown:
        console.print(sentence)


def _table(epsilons: Sequence[EpsilonAdvice]) -> RichTable:
    names = [each.name for each in epsilons[0].optimizers]
    table = RichTable(
        title="Learning rates if re-tuned, and what to use if settings are kept",
        caption=f"nominal: {NOT_A_GUARANTEE}",
        **TABLE_STYLE,
    )
    for name in (
        "epsilon",
        "noise\nmult.",
        "nominal",
        *(f"{name.removeprefix('DP-')}\nrate" for name in names),
        "sweep's\nepsilon",
    ):
        table.add_column(name, justify="right")
    table.add_column("limited by")
    table.add_column("keep")
    for each in epsilons:
        rates = (number(optimizer.retuned and optimizer.retuned.learning_rate, 3) for optimizer in each.optimizers)
        table.add_row(
            number(each.target_epsilon),
            noise_text(each.noise_multiplier),
            number(each.nominal_epsilon, 3),
            *rates,
            epsilon_text(each.price.best_of, 3),
            _limit(each),
            each.keep or "/".join(each.contenders),
        )
    return table


_SHORT: Mapping[Branch, str] = {
    Branch.BATCH_NOISE: "batch",
    Branch.PRIVACY_NOISE: "privacy",
    Branch.UNKNOWN: "?",
}


def _limit(epsilon: EpsilonAdvice) -> str:
    return "/".join(dict.fromkeys(_SHORT[optimizer.branch] for optimizer in epsilon.optimizers))
