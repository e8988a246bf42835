"""`noisecast audit`: attack the mechanism, and set what the attack proves beside what the accountant proves."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table

from noisecast.cli.output import TABLE_STYLE, Json, print_json, to_reader, to_watcher, whole_number
from noisecast.printed import number
from noisecast.privacy.accounting import epsilon_text, noise_text

OptimizerName = Literal["dp-sgd", "dp-sign-sgd", "dp-adam"]
EngineName = Literal["row_sparse", "dense", "simulate"]


def audit(
    file: Annotated[
        Path | None, Parameter(help="A scenario file: audit its mechanisms instead, on the canary's problem.")
    ] = None,
    /,
    *,
    optimizer: Annotated[
        tuple[OptimizerName, ...], Parameter(help="Audit these alone. Default: all.", negative=(), show_default=False)
    ] = (),
    engine: Annotated[
        tuple[EngineName, ...], Parameter(help="Audit these alone. Default: all.", negative=(), show_default=False)
    ] = (),
    epsilon: Annotated[float, Parameter(help="Of every mechanism; its noise is calibrated to it.")] = 4.0,
    # No attack sees events rarer than one in its runs: at a smaller delta it would prove as much, beside a larger
    # epsilon.
    delta: Annotated[float, Parameter(help="Delta that both bounds are stated at.")] = 1e-3,
    runs: Annotated[
        int | None, Parameter(converter=whole_number, help="On each of the two data sets. Default: what is cheap.")
    ] = None,
    confidence: Annotated[float, Parameter(help="Of each lower bound.")] = 0.999,
    insecure_seed: Annotated[
        int | None, Parameter(converter=whole_number, help="Makes the audit reproducible.")
    ] = None,
    json: Json = False,
) -> None:
    """Attack the training engines, and compare the epsilon that an attack proves with the one that is accounted.

    White box: two data sets that differ in a worst-case canary, trained many times, told apart by what was released.
    One run: a thousand canaries in a real task. Null: one data set twice, where nothing may be found. The bounds are
    lower ones: that they stay below the accounted epsilon refutes bugs, and proves nothing else.
    """
    verdicts = [
        _done(one, json) for one in _audits(file, optimizer, engine, epsilon, delta, runs, confidence, insecure_seed)
    ]
    if json:
        print_json({"verdicts": [_as_json(verdict) for verdict in verdicts]})
    else:
        _print(verdicts, confidence)
    found = [sentence for sentence in (verdict.contradiction() for verdict in verdicts) if sentence is not None]
    if found:
        more = f" {len(found) - 1} more of {len(verdicts)} audits contradict the accounting." if len(found) > 1 else ""
        raise ValueError(found[0] + more)


def _audits(
    file: Path | None, optimizer, engine, epsilon, delta, runs, confidence, insecure_seed
) -> Iterator[Callable[[], Any]]:
    from noisecast.audit.standard import audits_of, standard_audits
    from noisecast.optimizers import OPTIMIZERS, with_learning_rate
    from noisecast.privacy.noise import RandomRoot
    from noisecast.scenario import check_constant_rates
    from noisecast.scenario_file import read_scenario_file

    if not 0 < confidence < 1:
        raise ValueError(f"Expected 0 < --confidence < 1, got {confidence}.")
    if runs is not None and runs < 100:
        raise ValueError(f"Expected --runs >= 100, got {runs}: with fewer no attack proves anything.")
    root = RandomRoot.from_os_entropy() if insecure_seed is None else RandomRoot.from_insecure_seed(insecure_seed)
    kinds = [
        kind for kind in OPTIMIZERS if not optimizer or kind.name.lower().replace("signsgd", "sign-sgd") in optimizer
    ]
    engines = engine or ("row_sparse", "dense", "simulate")
    if file is None:
        yield from standard_audits(
            target_epsilon=epsilon, target_delta=delta, root=root, runs=runs, confidence=confidence,
            optimizers=kinds, engines=engines,
        )  # fmt: skip
        return
    scenarios = read_scenario_file(file).scenarios
    check_constant_rates(scenarios, "to audit, at a rate of the audit's own")
    # At a rate of the audit's own: scenarios that differ in theirs alone are one audit.
    asked: dict[Any, Any] = {}
    for scenario in scenarios:
        asked.setdefault((with_learning_rate(scenario.optimizer, 1.0), scenario.mechanism), scenario)
    is_one = len({mechanism for _, mechanism in asked}) == 1
    for scenario in asked.values():
        if type(scenario.optimizer) in kinds:
            for one in audits_of(scenario, root=root, runs=runs, confidence=confidence, engines=engines):
                yield one if is_one else partial(_of_mechanism, one, scenario.mechanism)


def _of_mechanism(one: Callable[[], Any], mechanism: Any) -> Any:
    """The verdict, with the noise and the clip norm that tell it from others of the file."""
    verdict = one()
    noise, clip = noise_text(mechanism.noise_multiplier), number(mechanism.l2_clip_norm, 3)
    return replace(verdict, what=f"noise {noise}, clip {clip}, {verdict.what}")


def _done(one: Callable[[], Any], quiet: bool) -> Any:
    verdict = one()
    if not quiet:
        found = f"{_proved(verdict)} of {epsilon_text(verdict.epsilon)}" if verdict.is_consistent else "CONTRADICTION"
        to_watcher().print(f"{verdict.optimizer}, {verdict.engine}, {verdict.what}: {found}", soft_wrap=True)
    return verdict


def _print(verdicts: list[Any], confidence: float) -> None:
    table = Table(
        title=f"Audited: lower bounds on epsilon, each with confidence {confidence:.4%}",
        caption="ε ≥: what the attack proves; 0 proves nothing in either direction. ε ≤: what the accountant proves.",
        **TABLE_STYLE,
    )
    for header in ("optimizer", "engine", "what", "runs", "ε ≥", "ε ≤", "verdict"):
        table.add_column(header, justify="right" if header in ("runs", "ε ≥", "ε ≤") else "left")
    for verdict in verdicts:
        table.add_row(
            verdict.optimizer,
            verdict.engine,
            verdict.what,
            f"{verdict.runs:,}",
            _proved(verdict),
            epsilon_text(verdict.epsilon),
            "consistent" if verdict.is_consistent else "CONTRADICTED",
        )
    to_reader().print(table)


def _proved(verdict: Any) -> str:
    """Towards 0: a lower bound that is shown is never above the one that is proved."""
    return number(int(verdict.bound.epsilon * 1000) / 1000, 4)


def _as_json(verdict: Any) -> dict[str, Any]:
    return {
        "optimizer": verdict.optimizer,
        "engine": verdict.engine,
        "what": verdict.what,
        "observer": verdict.observer,
        "runs": verdict.runs,
        "lower_bound": verdict.bound.epsilon,
        "epsilon": verdict.epsilon,
        "delta": verdict.bound.delta,
        "confidence": verdict.bound.confidence,
        "rule": verdict.bound.rule,
        "is_consistent": verdict.is_consistent,
    }
