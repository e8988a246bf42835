"""What `noisecast train` will run: the rows that are read, the scenario, and what must be said about both."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from noisecast import engines
from noisecast.cli.learning_rate import PublicScale, starting_learning_rate
from noisecast.cli.mechanism_options import MechanismOptions
from noisecast.cli.output import whole_number
from noisecast.optimizers import Schedule
from noisecast.printed import number
from noisecast.privacy.accounting import default_delta, warnings_for
from noisecast.privacy.sampling import Poisson
from noisecast.problems.datasets import (
    Dataset,
    Encoder,
    MatrixEncoder,
    ReadOptions,
    TabularEncoder,
    TextEncoder,
    load_file,
    load_test_file,
    split_by_content,
)
from noisecast.problems.datasets.text_encoder import TextKind
from noisecast.problems.linear import linear_model
from noisecast.scenario import Scenario
from noisecast.scenario_file import OPTIMIZER_NAMES

FAR_OFF = 1.5  # times as many examples as the file has rows, or as few
GUESSED_TOKENS = 100  # of a text whose length is not bounded; only the default learning rate looks at it


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """How the training file is read."""

    label: Annotated[str, Parameter(help="Column with the label.")] = "label"
    label_separator: Annotated[
        str | None,
        Parameter(help="What stands between the labels of a row that has any number of them, as in php|sql."),
    ] = None
    label_names: Annotated[
        Path | None, Parameter(help="Public names of the labels, one a line. Without it the file's own: those leak.")
    ] = None
    text: Annotated[str | None, Parameter(help="Column with texts; the other columns are then ignored.")] = None
    features: Annotated[TextKind, Parameter(help="How a text becomes numbers.")] = "term-frequency"
    vocabulary: Annotated[
        Path | None,
        Parameter(help="Public vocabulary, one word a line. Without it the training texts' own words: those leak."),
    ] = None
    vocabulary_size: Annotated[
        int, Parameter(converter=whole_number, help="Columns at most, without --vocabulary.")
    ] = 10_000
    max_tokens: Annotated[int | None, Parameter(converter=whole_number, help="Tokens used of each text.")] = None
    columns: Annotated[str | None, Parameter(help="Columns to use, as a,b,c. Default: all.")] = None
    bounds: Annotated[
        Path | None,
        Parameter(
            help="Public bounds of the columns (TOML: age = [0, 120]), which scale them to [-1, 1], or public values "
            '(city = ["Oslo", "Rome", "*"]; "*": all others).'
        ),
    ] = None
    unit_rows: Annotated[bool, Parameter(negative=(), show_default=False, help="Divide each row by its norm.")] = False
    test: Annotated[Path | None, Parameter(help="Labelled file to evaluate on.")] = None
    test_fraction: Annotated[float | None, Parameter(help="Share of the rows to hold out instead of --test.")] = None

    def load(self, path: Path) -> tuple[Dataset, Dataset | None, Encoder]:
        """(training rows, test rows or None, the encoder of both)."""
        if self.test is not None and self.test_fraction is not None:
            raise ValueError("Expected --test or --test-fraction, got both; leave one out.")
        options = ReadOptions(
            label=self.label,
            label_separator=self.label_separator,
            label_names=self.label_names,
            text=self.text,
            columns=None if self.columns is None else _names(self.columns),
            text_kind=self.features,
            vocabulary=self.vocabulary,
            vocabulary_size=self.vocabulary_size,
            max_tokens=self.max_tokens,
            bounds=self.bounds,
            unit_rows=self.unit_rows,
        )
        data, encoder = load_file(path, options)
        if self.test_fraction is not None:
            train, test = split_by_content(data, self.test_fraction)
            return data.rows(train), data.rows(test), encoder
        if self.test is None:
            return data, None, encoder
        how = {"label": self.label, "label_separator": self.label_separator}
        return data, load_test_file(self.test, encoder, data.label_names, **how), encoder


def _names(columns: str) -> tuple[str, ...]:
    """As in a line of a CSV file, where a name with a comma is quoted.

    >>> _names('age, "size, cm"')
    ('age', 'size, cm')
    """
    (names, *rest) = csv.reader([columns], skipinitialspace=True) if columns.strip() else [[]]
    found = tuple(name.strip() for name in names)
    if rest or not found or not all(found):
        raise ValueError(f"Expected --columns as names with commas between, a,b,c, got '{columns}'.")
    return found


@dataclass(frozen=True)
class Plan:
    """What will be trained, and what must be said about it."""

    scenario: Scenario
    train: Dataset
    test: Dataset | None
    encoder: Encoder
    learning_rate_origin: str
    not_covered: tuple[str, ...]
    warnings: tuple[str, ...]
    non_private_warnings: tuple[str, ...]  # of what the rows themselves are


def plan_of(
    file: Path,
    files: FileOptions,
    options: MechanismOptions,
    *,
    optimizer: str,
    learning_rate: float | None,
    changes: tuple[str, int],
    batch_size: float,
    l2_clip_norm: float,
    target_delta: float | None,
    num_examples: int | None,
) -> Plan:
    """Read the rows, and make of them and of the options one scenario.   changes: shape and warm-up of the rate."""
    train, test, encoder = files.load(file)
    declared = num_examples if num_examples is not None else train.num_examples
    sampler = options.sampler_for(batch_size, declared)
    delta = target_delta if target_delta is not None else default_delta(declared)
    num_steps = options.steps(sampler)
    shape, warmup_steps = changes
    schedule = Schedule.shaped(shape, num_steps, warmup_steps=warmup_steps)
    mechanism = options.mechanism(sampler, num_steps=num_steps, target_delta=delta, l2_clip_norm=l2_clip_norm)
    problem = linear_model(train, test)
    kind = OPTIMIZER_NAMES[optimizer]
    origin, warnings = "as given", warnings_for(mechanism, target_delta=delta)
    of_rows = list(encoder.doubts(train.features))
    if isinstance(sampler, Poisson) and not 1 / FAR_OFF <= declared / train.num_examples <= FAR_OFF:
        held = number(sampler.sampling_probability * train.num_examples, 2)
        of_rows.append(
            f"--num-examples {declared:,} is far from the file's number of rows: batches hold {held} examples on "
            f"average, and their sums are divided by {batch_size:g}."
        )
    if files.label_separator is not None and train.labels.shape[1] <= 1:
        of_rows.append(f"No row has more than one label: is '{files.label_separator}' what stands between them?")
    if learning_rate is None:
        squared_norm, guess = _squared_feature_norm(encoder)
        m, likelihood = problem.num_outputs, problem.likelihood
        scale = PublicScale(likelihood.initial_loss(m), problem.num_params, likelihood.curvature(m), squared_norm)
        steps = sum((stop - begin) * schedule.at(begin) ** 2 for begin, stop, _ in schedule.stretches(0, num_steps))
        learning_rate = starting_learning_rate(kind(learning_rate=1.0).theory, scale, mechanism, steps)
        origin = "a starting value from public numbers, not tuned"
        warnings += [guess] if guess else []
    scenario = Scenario(
        problem=problem,
        mechanism=mechanism,
        optimizer=kind(learning_rate=learning_rate),
        num_steps=num_steps,
        target_delta=delta,
        schedule=schedule,
    )
    if (reason := engines.why_unsupported(scenario)) is not None:
        raise ValueError(reason)
    not_covered = _not_covered(
        train,
        encoder,
        public_size=num_examples is not None,
        public_labels=files.label_names is not None,
        holds_out=files.test_fraction is not None,
    )
    return Plan(scenario, train, test, encoder, origin, not_covered, tuple(warnings), tuple(of_rows))


def _squared_feature_norm(encoder: Encoder) -> tuple[float, str | None]:
    """R^2, a public bound on |x|^2; where there is none a guess, and the sentence that owns up to it."""
    if encoder.unit_rows:
        return 1.0, None
    if isinstance(encoder, TextEncoder):
        if encoder.kind in ("term-frequency", "padded-term-frequency"):
            return 1.0, None
        words = min(encoder.max_tokens or GUESSED_TOKENS, encoder.num_features)
        return words, f"The default learning rate assumes about {words} different words a text; see --learning-rate."
    if isinstance(encoder, TabularEncoder) and encoder.lower is not None:
        return len(encoder.all_columns), None  # a row has one of a column's values
    return encoder.num_features, (
        "The features have no public bounds: the default learning rate assumes values from -1 to 1; see --bounds, "
        "--unit-rows and --learning-rate."
    )


def _not_covered(
    train: Dataset, encoder: Encoder, *, public_size: bool, public_labels: bool, holds_out: bool
) -> tuple[str, ...]:
    sentences = []
    too = " So was what follows from it: which rows were held out." if holds_out else ""  # by their numbered features
    if not public_labels:
        sentences.append(f"The names of the {train.num_classes} labels, which were read from the training file.")
    if not public_size:
        sentences.insert(0, f"The number of rows, {train.num_examples:,}, which was treated as public.")
    if isinstance(encoder, MatrixEncoder):
        features = f"{train.num_features:,}, and whether they are numbered from 0 or 1"
        sentences.insert(0, f"The number of features, {features}, where that was read off the training file.")
    if isinstance(encoder, TextEncoder) and encoder.vocabulary_is_private:
        words = len(encoder.vocabulary)
        sentences.insert(0, f"The vocabulary of {words:,} words was taken from the training text without noise.{too}")
    return tuple(sentences)
