"""From an estimator's parameters and public numbers to a scenario: one place for both kinds of model."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from noisecast.estimators import warned
from noisecast.forecasting import Outcome, forecast_best
from noisecast.optimizers import DPSGD, DPAdam, DPSignSGD
from noisecast.privacy.accounting import warnings_for
from noisecast.privacy.calibration import calibrate_noise_multiplier
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import Poisson, steps_of_epochs
from noisecast.release import TrainedModel, train
from noisecast.runners.moments import Moments
from noisecast.scenario import Scenario

OPTIMIZERS = {kind.name: kind for kind in (DPSGD, DPSignSGD, DPAdam)}
FORECAST = "forecast"
USUAL_PROBABILITY = 0.1  # of a row to be in a batch
CHEAP = Moments(full_covariance_features=20, time_steps=10, subsample=1000, most_runs=0)
START_RATE = 0.05  # only where the forecast finds no gradient to start from
HOPELESS = 0.02  # a forecast that lowers the loss by less than this share says that nothing can be learnt


@dataclass(frozen=True)
class Plan:
    """What will be run on the private examples; all of it follows from public numbers.

    Args:
      mechanism, num_steps, target_delta: what is released, and how often.
      optimizer: with its learning rate.
      forecast: how the stand-in or proxy is forecast to end; None where nothing was forecast.
      not_covered: sentences for the privacy statement.
    """

    mechanism: SampledGaussian
    num_steps: int
    target_delta: float
    optimizer: Any
    forecast: Outcome | None
    not_covered: tuple[str, ...]


def plan(estimator: Any, *, num_rows: int, proxy: Callable[[int], Any]) -> Plan:
    """The plan of a fit.

    Args:
      estimator: its parameters.
      num_rows: of the private data; only read where no num_examples is declared, and then said to be public.
      proxy: of a number of examples, the public problem on which settings are forecast.
    Raises: ValueError for a parameter out of range.
    """
    declared: Any = estimator.num_examples
    if declared is not None and not is_whole(declared):
        raise ValueError(f"Expected num_examples to be a whole number >= 1 or None, got {declared!r}.")
    num_examples = num_rows if declared is None else int(declared)
    kind = _optimizer_kind(estimator.optimizer)
    clip, rate = (_number_or_forecast(estimator, name) for name in ("l2_clip_norm", "learning_rate"))
    sampler = _sampler(estimator, num_examples)
    num_steps = steps_of_epochs(positive(estimator, "num_epochs"), sampler.sampling_probability)
    mechanism = _calibrated(estimator, clip or 1.0, sampler, num_steps)
    for sentence in warnings_for(mechanism, target_delta=estimator.target_delta):
        warned.warn(sentence)
    optimizer, outcome = kind(learning_rate=rate or START_RATE), None
    if clip is None or rate is None:
        mechanism, optimizer, outcome = _forecast(proxy(num_examples), mechanism, optimizer, num_steps, clip, rate)
    not_covered = () if declared is not None else (f"The number of rows, {num_rows:,}, which was treated as public.",)
    return Plan(mechanism, num_steps, float(estimator.target_delta), optimizer, outcome, not_covered)


def run(estimator: Any, problem: Any, planned: Plan, *, unit: str, also_not_covered: tuple[str, ...]) -> TrainedModel:
    """Train `problem` as planned; warns first of what the epsilon will not cover."""
    not_covered = (*planned.not_covered, *also_not_covered)
    if hasattr(estimator, "feature_names_in_"):  # scikit-learn keeps them, as it must
        not_covered = (*not_covered, "The names of the columns, which are kept in feature_names_in_.")
    if warned.is_in_a_search():
        warned.warn_of_a_search(estimator.target_epsilon)
        not_covered = (*not_covered, warned.IN_A_SEARCH)
    scenario = Scenario(
        problem=problem,
        mechanism=planned.mechanism,
        optimizer=planned.optimizer,
        num_steps=planned.num_steps,
        target_delta=planned.target_delta,
    )
    return train(
        scenario,
        insecure_seed=estimator.insecure_seed,
        secure_noise=estimator.secure_noise,
        unit=unit,
        also_not_covered=not_covered,
    )


def remember(estimator: Any, planned: Plan, model: TrainedModel) -> None:
    """Set what is public of the run. The scenario itself holds the private rows, and stays out of pickles."""
    estimator.privacy_ = model.statement
    estimator.mechanism_ = planned.mechanism
    estimator.l2_clip_norm_ = planned.mechanism.l2_clip_norm
    estimator.optimizer_ = planned.optimizer
    estimator.learning_rate_ = planned.optimizer.learning_rate
    estimator.n_iter_ = planned.num_steps
    estimator.forecast_ = planned.forecast


def _sampler(estimator: Any, num_examples: int) -> Poisson:
    if estimator.expected_batch_size is None:
        # A constant: so neither the sampling nor epsilon depends on the number of rows, only the divisor does.
        return Poisson(USUAL_PROBABILITY, USUAL_PROBABILITY * num_examples)
    return Poisson.for_batch_size(positive(estimator, "expected_batch_size"), num_examples)


def _calibrated(estimator: Any, clip: float, sampler: Poisson, num_steps: int) -> SampledGaussian:
    # Epsilon does not depend on B. With one B for all, fits on data of any size share what the accountant remembers;
    # the statement is computed from the real one.
    usual = Poisson(sampler.sampling_probability, 1.0)
    found = calibrate_noise_multiplier(
        SampledGaussian(noise_multiplier=0.0, l2_clip_norm=clip, sampler=usual),
        target_epsilon=positive(estimator, "target_epsilon"),
        target_delta=positive(estimator, "target_delta"),
        num_steps=num_steps,
    )
    return replace(found, sampler=sampler)


def _forecast(problem, mechanism, optimizer, num_steps, clip, rate) -> tuple[SampledGaussian, Any, Outcome]:
    found = forecast_best(
        problem,
        mechanism,
        optimizer,
        num_steps=num_steps,
        learning_rates=None if rate is None else (rate, rate),
        l2_clip_norms=None if clip is None else (clip, clip),
        moments=CHEAP,
    )
    start = float(problem.evaluate(problem.initial_params(), mechanism.l2_clip_norm)["loss"])
    if found.outcome.value > (1 - HOPELESS) * start:
        warned.warn(
            f"The forecast on public stand-in data says that almost nothing can be learnt at this budget: loss "
            f"{found.outcome.value:.3g} after training, {start:.3g} before. Use a larger target_epsilon or more rows."
        )
    return replace(mechanism, l2_clip_norm=found.l2_clip_norm), found.scenario.optimizer, found.outcome


def _optimizer_kind(name: Any) -> Any:
    kinds = {known.lower(): kind for known, kind in OPTIMIZERS.items()}
    if not isinstance(name, str) or name.lower() not in kinds:
        raise ValueError(f"Expected an optimizer among {', '.join(OPTIMIZERS)}, got {name!r}.")
    return kinds[name.lower()]


def _number_or_forecast(estimator: Any, name: str) -> float | None:
    """The number, or None for "forecast"."""
    value = getattr(estimator, name)
    if isinstance(value, str) and value == FORECAST:
        return None
    if isinstance(value, str) or not _is_positive(value):
        raise ValueError(f'Expected {name} to be a finite number > 0 or "{FORECAST}", got {value!r}.')
    return float(value)


def positive(estimator: Any, name: str) -> float:
    value = getattr(estimator, name)
    if not _is_positive(value):
        raise ValueError(f"Expected {name} to be a finite number > 0, got {value!r}.")
    return float(value)


def is_whole(value: Any) -> bool:
    """A whole number >= 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf
