"""`noisecast account`: what a mechanism costs."""

from typing import Annotated

from cyclopts import Parameter

from noisecast.cli.mechanism_options import MechanismOptions
from noisecast.cli.output import Json, facts, print_json, to_reader, warn, whole_number
from noisecast.printed import number
from noisecast.privacy.accounting import (
    PrivacySpent,
    default_delta,
    epsilon_spent,
    epsilon_text,
    noise_text,
    warnings_for,
)
from noisecast.privacy.composition import NONE
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import Poisson, Sampler


def account(
    *,
    target_delta: Annotated[
        float | None,
        Parameter(
            help="Delta that epsilon is stated at. Default: 1e-5, or a power of ten below 1 / number of examples."
        ),
    ] = None,
    num_examples: Annotated[
        int | None, Parameter(converter=whole_number, help="Number of examples, with --batch-size.")
    ] = None,
    batch_size: Annotated[float | None, Parameter(help="Expected batch size, with --num-examples.")] = None,
    sampling_probability: Annotated[
        float | None, Parameter(help="Instead of the two: Poisson sampling with this probability.")
    ] = None,
    options: MechanismOptions = MechanismOptions(),  # noqa: B008 (frozen)
    json: Json = False,
) -> None:
    """Epsilon spent by a mechanism, or the noise that a target epsilon needs.

    Needs --num-examples and --batch-size (or --sampling-probability), --num-steps (or --epochs) and --noise-multiplier
    (or --target-epsilon).
    """
    options.check()
    sampler = _sampler(options, num_examples, batch_size, sampling_probability)
    num_steps = options.steps(sampler)
    target_delta = default_delta(num_examples) if target_delta is None else target_delta
    mechanism = options.mechanism(sampler, num_steps=num_steps, target_delta=target_delta)
    spent = epsilon_spent(mechanism, num_steps=num_steps, target_delta=target_delta)
    warnings = warnings_for(mechanism, target_delta=target_delta)
    if json:
        print_json(_as_json(mechanism, options.sampler, num_examples, num_steps, spent, warnings))
    else:
        _print(mechanism, num_steps, spent)
        warn(warnings)


def _sampler(
    options: MechanismOptions, num_examples: int | None, batch_size: float | None, probability: float | None
) -> Sampler:
    if probability is None:
        if num_examples is None or batch_size is None:
            raise ValueError(
                "Expected --num-examples and --batch-size, or --sampling-probability; give what is missing."
            )
        return options.sampler_for(batch_size, num_examples)
    if batch_size is not None or options.sampler != "poisson":
        raise ValueError(
            "Expected --sampling-probability without --batch-size and with the sampler poisson; leave one of them out."
        )
    # The batch size is only the divisor of the mean: epsilon does not depend on it.
    return Poisson(probability, 1 if num_examples is None else probability * num_examples)


def _as_json(
    mechanism: SampledGaussian, sampler: str, num_examples, num_steps: int, spent: PrivacySpent, warnings
) -> dict:
    by_probability = isinstance(mechanism.sampler, Poisson) and num_examples is None
    return {
        "epsilon": spent.epsilon,
        "nominal_epsilon": spent.nominal_epsilon,
        "noise_multiplier": mechanism.noise_multiplier,
        "accountant": spent.accountant,
        "adjacency": str(spent.adjacency),
        "sampler": sampler,
        "sampling_probability": mechanism.sampling_probability,
        "expected_batch_size": None if by_probability else mechanism.expected_batch_size,
        "num_examples": num_examples,
        "num_steps": num_steps,
        "target_delta": spent.target_delta,
        "details": spent.details,
        "note": spent.note,
        "statement": mechanism.statement(),
        "warnings": warnings,
    }


def _print(mechanism: SampledGaussian, num_steps: int, spent: PrivacySpent) -> None:
    by = "" if spent.accountant == NONE else f", by {spent.accountant}"
    rows = [
        ("epsilon", f"{epsilon_text(spent.epsilon)}   at delta {spent.target_delta:g}{by}"),
        ("noise multiplier", noise_text(mechanism.noise_multiplier)),
        ("steps", f"{num_steps:,}"),
        ("sampling probability", number(mechanism.sampling_probability)),
        ("adjacency", str(spent.adjacency).replace("_", "-")),
        ("nominal epsilon", f"{number(spent.nominal_epsilon)}   the paper's formula, not a guarantee"),
        *(
            (f"by {name}", value if isinstance(value, str) else epsilon_text(value))
            for name, value in spent.details.items()
            if name != NONE
        ),
        ("sampler", mechanism.sampler.statement()),
    ]
    if spent.note is not None:
        rows.append(("note", spent.note))
    to_reader().print(facts(rows))
