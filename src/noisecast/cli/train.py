"""`noisecast train`: a model, trained privately on a file of the user's own."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from noisecast.checkpoint import load_checkpoint
from noisecast.cli.ledger_options import account_of
from noisecast.cli.mechanism_options import MechanismOptions
from noisecast.cli.output import Json, facts, print_json, to_reader, warn, whole_number
from noisecast.cli.progress import training_progress
from noisecast.cli.train_plan import FileOptions, Plan, plan_of
from noisecast.files import reason_of, why_unwritable
from noisecast.ledger import Account
from noisecast.model_dir import save_model
from noisecast.optimizers import CONSTANT
from noisecast.printed import number
from noisecast.privacy.accounting import epsilon_text, noise_text
from noisecast.privacy.mechanism import Adjacency
from noisecast.problems.baseline import baseline
from noisecast.problems.datasets.splits import ROWS_MOVE
from noisecast.release import Interrupted, TrainedModel
from noisecast.release import train as run
from noisecast.scenario import Scenario
from noisecast.table import METRICS

OptimizerName = Literal["dp-sgd", "dp-sign-sgd", "dp-adam"]
ScheduleName = Literal["constant", "linear", "cosine"]
MOST_NAMES, LONGEST_NAME = 8, 30  # of labels, shown; letters
WITHOUT = {
    "loss": "at the start",
    "test_loss": "at the start",
    "accuracy": "always the commonest class",
    "test_accuracy": "always the commonest class",
}


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
        Parameter(help="Default: that of --ledger; without one 1e-5, or a power of ten below 1 / number of examples."),
    ] = None,
    num_examples: Annotated[
        int | None,
        Parameter(
            converter=whole_number,
            help="Declared, public number of examples. Default: the file's own, then taken as public.",
        ),
    ] = None,
    files: FileOptions = FileOptions(),  # noqa: B008 (frozen)
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
        plan = plan_of(
            file,
            files,
            options,
            optimizer=optimizer,
            learning_rate=learning_rate,
            changes=(schedule, warmup_steps),
            batch_size=batch_size,
            l2_clip_norm=l2_clip_norm,
            target_delta=target_delta,
            num_examples=num_examples,
        )
        warn((*plan.warnings, *plan.non_private_warnings))
        if not json:
            to_reader().print(_what_will_run(plan, _is_known(insecure_seed, plan.scenario, output, resume)))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted before the first step; nothing has changed.") from None
    model = _trained(plan, output, files.label_separator, resume, insecure_seed, secure_noise, account)
    nothing = baseline(plan.train, plan.test)
    if json:
        print_json(_as_json(plan, model, output, nothing))
    else:
        _print_result(model, output, nothing)
    if sentence := _why_no_use(model.non_private_metrics, nothing):
        warn([sentence])


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


def _print_result(model: TrainedModel, output: Path, nothing: dict[str, float]) -> None:
    metrics = model.non_private_metrics
    console = to_reader()
    console.print("[bold]Result[/bold] (non_private: computed without noise, not for release)")
    rows = []
    for name in METRICS:
        if name in metrics:
            without = f"  ({WITHOUT[name]}: {number(nothing[name])})" if name in nothing else ""
            rows.append((METRICS[name].label, number(metrics[name]) + without))
    console.print(facts(rows))
    console.print(model.statement.sentence())
    console.print(f"\nModel: {output}  ({model.seconds:.1f} s)", soft_wrap=True)


def _why_no_use(metrics: dict[str, float], nothing: dict[str, float]) -> str | None:
    """What tells a newcomer that noise, or too high a learning rate, has won."""
    if not metrics["loss"] > nothing["loss"]:
        return None
    return (
        f"The model ended worse than it began (non_private): its training loss is {number(metrics['loss'])}, and was "
        f"{number(nothing['loss'])} at the start. A lower --learning-rate, a larger --batch-size or a larger "
        "epsilon may mend that; noisecast forecast says which, without spending a budget, on public data like yours."
    )


def _as_json(plan: Plan, model: TrainedModel, output: Path, nothing: dict[str, float]) -> dict:
    return {
        "model": str(output),
        "seconds": round(model.seconds, 3),
        "learning_rate": plan.scenario.optimizer.learning_rate,
        "learning_rate_origin": plan.learning_rate_origin,
        "schedule": None if plan.scenario.schedule == CONSTANT else asdict(plan.scenario.schedule),
        "non_private_metrics": model.non_private_metrics,
        "non_private_metrics_of_no_model": nothing,
        "privacy": model.statement.to_json(),
        "warnings": list(plan.warnings),
        "non_private_warnings": list(plan.non_private_warnings),
    }
