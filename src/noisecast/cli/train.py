"""`noisecast train`: a model, trained privately on a file of the user's own."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from noisecast.checkpoint import load_checkpoint
from noisecast.cli.learning_rate import PublicScale, starting_learning_rate
from noisecast.cli.ledger_options import account_of
from noisecast.cli.mechanism_options import MechanismOptions
from noisecast.cli.output import Json, facts, number, print_json, to_reader, warn, whole_number
from noisecast.cli.progress import training_progress
from noisecast.files import reason_of, why_unwritable
from noisecast.ledger import Account
from noisecast.model_dir import save_model
from noisecast.optimizers import CONSTANT, Schedule
from noisecast.privacy.accounting import epsilon_text, noise_text, warnings_for
from noisecast.privacy.mechanism import Adjacency
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
from noisecast.problems.datasets.splits import ROWS_MOVE
from noisecast.problems.datasets.text_encoder import TextKind
from noisecast.problems.linear import linear_model
from noisecast.release import Interrupted, TrainedModel
from noisecast.release import train as run
from noisecast.scenario import Scenario
from noisecast.scenario_file import OPTIMIZER_NAMES
from noisecast.table import METRICS

OptimizerName = Literal["dp-sgd", "dp-sign-sgd", "dp-adam"]
ScheduleName = Literal["constant", "linear", "cosine"]
FAR_OFF = 1.5  # times as many examples as the file has rows, or as few
MOST_NAMES, LONGEST_NAME = 8, 30  # of labels, shown; letters
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
    columns: Annotated[str | None, Parameter(help="Numeric columns to use, as a,b,c. Default: all.")] = None
    bounds: Annotated[
        Path | None, Parameter(help="Public bounds of the columns (TOML: age = [0, 120]); scales them to [-1, 1].")
    ] = None
    unit_rows: Annotated[bool, Parameter(negative=(), show_default=False, help="Divide each row by its norm.")] = False
    test: Annotated[Path | None, Parameter(help="Labelled file to evaluate on.")] = None
    test_fraction: Annotated[float | None, Parameter(help="Share of the rows to hold out instead of --test.")] = None

    def load(self, path: Path) -> tuple[Dataset, Dataset | None, Encoder]:
        """(training rows, test rows or None, the encoder of both)."""
        if self.test is not None and self.test_fraction is not None:
            raise ValueError("Expected --test or --test-fraction, got both; leave one out.")
        columns = None if self.columns is None else tuple(name.strip() for name in self.columns.split(","))
        if columns is not None and not all(columns):
            raise ValueError(f"Expected --columns as names with commas between, a,b,c, got '{self.columns}'.")
        options = ReadOptions(
            label=self.label,
            label_separator=self.label_separator,
            label_names=self.label_names,
            text=self.text,
            columns=columns,
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


def train(
    file: Annotated[Path, Parameter(help="CSV, TSV, Parquet, svmlight or npz, perhaps with .gz.")],
    /,
    *,
    batch_size: Annotated[float, Parameter(help="Expected batch size.")],
    output: Annotated[Path, Parameter(help="Model directory to write; must not exist.")],
    optimizer: Annotated[OptimizerName, Parameter(help="What is made of the private gradients.")] = "dp-sgd",
    learning_rate: Annotated[
        float | None, Parameter(help="Default: a starting value from public numbers, not tuned.")
    ] = None,
    schedule: Annotated[
        ScheduleName, Parameter(help="Of the learning rate: linear and cosine fall to almost 0.")
    ] = "constant",
    warmup_steps: Annotated[
        int, Parameter(converter=whole_number, help="Steps in which the learning rate rises from almost 0.")
    ] = 0,
    l2_clip_norm: Annotated[float, Parameter(help="Each example's gradient is clipped to this norm.")] = 1.0,
    options: MechanismOptions = MechanismOptions(),  # noqa: B008 (frozen)
    target_delta: Annotated[
        float | None,
        Parameter(help="Default: that of --ledger, without one the largest power of ten below 1 / number of examples."),
    ] = None,
    num_examples: Annotated[
        int | None,
        Parameter(
            converter=whole_number,
            help="Declared, public number of examples. Default: the file's own, then taken as public.",
        ),
    ] = None,
    files: FileOptions = FileOptions(),
    resume: Annotated[bool, Parameter(negative=(), show_default=False, help="Go on after an interruption.")] = False,
    insecure_seed: Annotated[
        int | None,
        Parameter(
            converter=whole_number, help="Reproducible noise, therefore NO privacy: for experiments on public data."
        ),
    ] = None,
    secure_noise: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Draw batches and noise by a cipher, ChaCha20: slower.")
    ] = False,
    ledger: Annotated[
        Path | None, Parameter(help="Privacy ledger to write this run into before it begins; it may refuse.")
    ] = None,
    dataset: Annotated[str | None, Parameter(help="Name of the data set in the ledger.")] = None,
    json: Json = False,
) -> None:
    """Train a model privately on a file of your own.

    A linear model: logistic regression for two classes, softmax regression for more; with --label-separator one
    logistic output for each label, which a row may have or not have.
    """
    options.check()
    if files.test_fraction is not None and options.neighbours is Adjacency.REPLACE_ONE:
        raise ValueError(f"Expected --test with a guarantee for replaced records, got --test-fraction: {ROWS_MOVE}")
    _check_noise(insecure_seed, secure_noise)
    _check_places(output, resume)
    account = account_of(ledger, dataset)
    if account is not None and insecure_seed is not None:
        raise ValueError("Expected --ledger or --insecure-seed, got both: a run from a known seed has no guarantee.")
    if account is not None and target_delta is None:
        target_delta = account.ledger.budget(account.dataset).delta  # or what is planned is not what the ledger counts
    try:
        plan = _plan(
            file, files, options, optimizer, learning_rate, (schedule, warmup_steps), batch_size, l2_clip_norm,
            target_delta, num_examples,
        )  # fmt: skip
        warn((*plan.warnings, *plan.non_private_warnings))
        if not json:
            to_reader().print(_what_will_run(plan, _is_known(insecure_seed, plan.scenario, output, resume)))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted before the first step; nothing has changed.") from None
    model = _trained(plan, output, files.label_separator, resume, insecure_seed, secure_noise, account)
    if json:
        print_json(_as_json(plan, model, output))
    else:
        _print_result(model, output)


def _trained(
    plan: Plan,
    output: Path,
    label_separator: str | None,
    resume: bool,
    insecure_seed: int | None,
    secure_noise: bool,
    account: Account | None,
) -> TrainedModel:
    """Run the plan, and save its model at `output`. Raises: KeyboardInterrupt, with the way to go on."""

    def save(model: TrainedModel) -> None:
        names = plan.train.label_names
        save_model(output, model, encoder=plan.encoder, label_names=names, label_separator=label_separator)

    try:
        with training_progress(plan.scenario) as watch:
            return run(
                plan.scenario,
                insecure_seed=insecure_seed,
                secure_noise=secure_noise,
                checkpoint=_checkpoint_of(output),
                resume=resume,
                watch=watch,
                save=save,
                account=account,
                unit="one example (a row of the training file)",
                also_not_covered=plan.not_covered,
            )
    except Interrupted as interruption:
        raise KeyboardInterrupt(str(interruption), interruption.signal_number) from None
    except OSError as error:
        if not (kept := _checkpoint_of(output)).is_file():
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise ValueError(
            f"{where}{reason_of(error)}; what was trained up to the last checkpoint, and the budget it took, is "
            f"in {kept}: mend that and go on with --resume."
        ) from None


def _check_noise(insecure_seed: int | None, secure_noise: bool) -> None:
    if secure_noise and insecure_seed is not None:
        raise ValueError("Expected --insecure-seed or --secure-noise, got both: no cipher hides a seed that is known.")
    if secure_noise:
        import randomgen  # noqa: F401  (its absence is better known before the file is read)


def _checkpoint_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.checkpoint")


def _check_places(output: Path, resume: bool) -> None:
    """Before anything is read: hours of training must not end in a place that cannot be written."""
    if not output.name:
        raise ValueError(f"Expected --output to be the name of a new directory, got '{output}'.")
    checkpoint = _checkpoint_of(output)
    if output.exists():
        # Killed between the two, a run leaves both.
        secret = f" Delete {checkpoint} as well: it holds the secret of that model's noise."
        done = "; if a run with --resume wrote it, that run has finished" if resume else ""
        raise ValueError(
            f"Expected --output to be a new directory, {output} exists{done}; choose another name or remove it."
            + (secret if checkpoint.is_file() else "")
        )
    reason = why_unwritable(output.absolute())
    if reason is not None:
        raise ValueError(reason)
    if checkpoint.exists() and not resume:
        raise ValueError(
            f"{checkpoint} is the checkpoint of an interrupted run; give --resume to go on with it, or delete it."
        )
    if resume and not checkpoint.exists():
        raise ValueError(f"Expected a checkpoint at {checkpoint}, found none; leave out --resume to start anew.")


def _plan(
    file, files, options, optimizer, learning_rate, changes, batch_size, l2_clip_norm, target_delta, num_examples
) -> Plan:
    train, test, encoder = files.load(file)
    declared = num_examples if num_examples is not None else train.num_examples
    sampler = options.sampler_for(batch_size, declared)
    delta = target_delta if target_delta is not None else _delta_below_one_over(declared)
    num_steps = options.steps(sampler)
    shape, warmup_steps = changes
    schedule = Schedule.shaped(shape, num_steps, warmup_steps=warmup_steps)
    mechanism = options.mechanism(sampler, num_steps=num_steps, target_delta=delta, l2_clip_norm=l2_clip_norm)
    problem = linear_model(train, test)
    kind = OPTIMIZER_NAMES[optimizer]
    origin, warnings = "as given", warnings_for(mechanism, target_delta=delta)
    of_rows = []
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
    not_covered = _not_covered(
        train, encoder, public_size=num_examples is not None, public_labels=files.label_names is not None
    )
    return Plan(scenario, train, test, encoder, origin, not_covered, tuple(warnings), tuple(of_rows))


def _delta_below_one_over(num_examples: int) -> float:
    """The largest power of ten below 1 / n.

    >>> _delta_below_one_over(25_000), _delta_below_one_over(1000), _delta_below_one_over(1)
    (1e-05, 0.0001, 0.1)
    """
    # By the digits of n: log10(1000) need not be the integer 3.
    return float(f"1e-{len(str(num_examples))}")


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
        return encoder.num_features, None
    return encoder.num_features, (
        "The features have no public bounds: the default learning rate assumes values from -1 to 1; see --bounds, "
        "--unit-rows and --learning-rate."
    )


def _not_covered(train: Dataset, encoder: Encoder, *, public_size: bool, public_labels: bool) -> tuple[str, ...]:
    sentences = []
    if not public_labels:
        sentences.append(f"The names of the {train.num_classes} labels, which were read from the training file.")
    if not public_size:
        sentences.insert(0, f"The number of rows, {train.num_examples:,}, which was treated as public.")
    if isinstance(encoder, MatrixEncoder):
        features = f"{train.num_features:,}, and whether they are numbered from 0 or 1"
        sentences.insert(0, f"The number of features, {features}, where that was read off the training file.")
    if isinstance(encoder, TextEncoder) and encoder.vocabulary_is_private:
        words = len(encoder.vocabulary)
        sentences.insert(0, f"The vocabulary of {words:,} words was taken from the training text without noise.")
    return tuple(sentences)


def _few(names: Sequence[str]) -> str:
    """The first names, as a terminal may show them, and how many more."""
    more = len(names) - MOST_NAMES
    clean = ["".join(letter if letter.isprintable() else "?" for letter in name) for name in names[:MOST_NAMES]]
    short = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…" for name in clean]
    return ", ".join(short) + (f" and {more:,} more" if more > 0 else "")


def _is_known(insecure_seed: int | None, scenario: Scenario, output: Path, resume: bool) -> bool:
    """Whether the noise comes from a seed that somebody may know: one that is given, or that the run began with."""
    if insecure_seed is not None or not resume:
        return insecure_seed is not None
    return not load_checkpoint(_checkpoint_of(output), scenario=scenario.id).root.is_private


def _what_will_run(plan: Plan, noise_is_known: bool):
    scenario, train = plan.scenario, plan.train
    mechanism, spent = scenario.mechanism, scenario.privacy_spent
    examples = f"{train.num_examples:,} for training"
    if plan.test is not None:
        examples += f", {plan.test.num_examples:,} for testing"
    rows = [
        ("examples", examples),
        (
            f"features, {'labels' if train.has_label_sets else 'classes'}",
            f"{train.num_features:,}, {train.num_classes}  ({scenario.problem.num_params:,} parameters)",
        ),
        # A mistyped label is a class of its own: here it can be seen.
        ("labels" if train.has_label_sets else "names", _few(train.label_names)),
        ("optimizer", scenario.optimizer.name),
        (
            "learning rate",
            f"{number(scenario.optimizer.learning_rate)}  ({plan.learning_rate_origin})"
            + ("" if scenario.schedule == CONSTANT else f", {scenario.schedule}"),
        ),
        ("steps", f"{scenario.num_steps:,} of {number(mechanism.expected_batch_size)} examples on average"),
        (
            "noise",
            f"noise multiplier {noise_text(mechanism.noise_multiplier)}, clip norm {number(mechanism.l2_clip_norm)}: "
            f"std {number(mechanism.mean_noise_std, 3)} a coordinate of the mean gradient",
        ),
        (
            "epsilon",
            f"{epsilon_text(spent.epsilon)} at delta {scenario.target_delta:g}, by {spent.accountant}"
            + ("; but not of this run, whose seed is known: it has no guarantee" if noise_is_known else ""),
        ),
    ]
    return facts(rows, title="What will run")


def _print_result(model: TrainedModel, output: Path) -> None:
    metrics = model.non_private_metrics
    console = to_reader()
    console.print("[bold]Result[/bold] (non_private: computed without noise, not for release)")
    console.print(facts((METRICS[name].label, number(metrics[name])) for name in METRICS if name in metrics))
    console.print(model.statement.sentence())
    console.print(f"\nModel: {output}  ({model.seconds:.1f} s)", soft_wrap=True)


def _as_json(plan: Plan, model: TrainedModel, output: Path) -> dict:
    return {
        "model": str(output),
        "seconds": round(model.seconds, 3),
        "learning_rate": plan.scenario.optimizer.learning_rate,
        "learning_rate_origin": plan.learning_rate_origin,
        "schedule": None if plan.scenario.schedule == CONSTANT else asdict(plan.scenario.schedule),
        "non_private_metrics": model.non_private_metrics,
        "privacy": model.statement.to_json(),
        "warnings": list(plan.warnings),
        "non_private_warnings": list(plan.non_private_warnings),
    }
