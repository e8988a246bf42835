"""The noise at which the better of two optimizers changes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from noisecast.forecasting.outcome import Asker, Outcome, Range
from noisecast.optimizers import Optimizer
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.problems.problem import Problem
from noisecast.runners.moments import Moments
from noisecast.runners.runner import Progress
from noisecast.scenario import Scenario
from noisecast.table import EXTRAPOLATED, OK
from noisecast.theory.optimal import (
    Thresholds,
    threshold_noise_multiplier_all_clipped,
    threshold_noise_multipliers,
)

SMALLEST_BRACKET = 1e-3  # of the noise multiplier


@dataclass(frozen=True)
class Crossing:
    """One noise multiplier at which the better optimizer changes.

    Args:
      noise_multiplier, epsilon: where; epsilon as accounted for the run.
      better_below, better_above: the better optimizer at less and at more noise.
      value: the metric of both there.
      shift_per_percent: by which share it moves where one of the two forecasts is off by 1 %; > 0.
      status: `extrapolated` where one of them is.
    """

    noise_multiplier: float
    epsilon: float
    better_below: str
    better_above: str
    value: float
    shift_per_percent: float
    status: str


@dataclass(frozen=True)
class Theorem:
    """Where the theorem says that the floor of an adaptive optimizer is below DP-SGD's.

    Args:
      adaptive: the name of that optimizer.
      thresholds: its noise multipliers.    epsilons: as accounted for the run; one each.
      form: which form of the theorem, and why that.
    """

    adaptive: str
    thresholds: Thresholds
    epsilons: tuple[float, ...]
    form: str


@dataclass(frozen=True)
class CrossingForecast:
    """What `forecast_crossing` found. Non-private.

    Args:
      crossings: none, one or more, by increasing noise.
      better: the better optimizer at the least noise that was looked at; None where both diverge everywhere.
      scan: noise_multiplier, optimizer, value, spread, status of every forecast made, by increasing noise.
      theorem: the theorem's own value, or the sentence that says why there is none.
      reasons: what speaks against relying on it, one sentence each.
    """

    crossings: tuple[Crossing, ...]
    better: str | None
    scan: pd.DataFrame
    theorem: Theorem | str
    reasons: tuple[str, ...]


def forecast_crossing(
    problem: Problem,
    mechanism: SampledGaussian,
    optimizers: tuple[Optimizer, Optimizer],
    *,
    num_steps: int,
    noise_multipliers: Range,
    metric: str = "loss",
    l2_clip_norms: tuple[float, float] | None = None,
    target_delta: float = 1e-5,
    num_scanned: int = 9,
    moments: Moments | None = None,
    progress: Progress = lambda share: None,
) -> CrossingForecast:
    """The noise multipliers at which the better of two optimizers changes, both at fixed settings. Non-private.

    Scans the range in equal factors for changes of sign of the difference of forecast final values, then halves each
    (Brent's method in the logarithm). Two changes between neighbours of the scan are missed.

    The theorem beside it (`theory.threshold_noise_multipliers`; where most examples are clipped at the start,
    `theory.threshold_noise_multiplier_all_clipped`) compares floors, the loss after infinitely many steps.

    Args:
      problem, mechanism, num_steps, target_delta: as in `Scenario`; the noise multiplier is replaced.
      optimizers: two, with their learning rates.
      noise_multipliers: (low, high), 0 < low < high.
      l2_clip_norms: of either optimizer; None: the mechanism's for both.
      metric: of the last step.    num_scanned: forecasts of each optimizer in the scan; >= 2.
      moments: the setting of the forecasts.    progress: told the share of the work that is done, roughly.
    Raises: ValueError: no forecast of this problem, an unknown metric, a bad range.

    >>> from noisecast import DPSGD, DPSignSGD, Stream, quadratic
    >>> problem = quadratic(np.ones(10), 0.1, example_noise_std=0.1)
    >>> mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=10.0, sampler=Stream(16))
    >>> found = forecast_crossing(problem, mechanism, (DPSGD(learning_rate=0.1), DPSignSGD(learning_rate=0.01)),
    ...                           num_steps=300, noise_multipliers=(0.02, 2.0))
    >>> [(c.better_below, c.better_above) for c in found.crossings]
    [('DP-SGD', 'DP-SignSGD')]
    >>> abs(found.crossings[0].noise_multiplier / found.theorem.thresholds.noise_multipliers[0] - 1) < 0.2
    True
    """
    low, high = noise_multipliers
    if not 0 < low < high < math.inf:
        raise ValueError(f"Expected noise_multipliers as (low, high) with 0 < low < high < inf, got {(low, high)}.")
    if num_scanned < 2:
        raise ValueError(f"Expected num_scanned >= 2, got {num_scanned}.")
    pair = tuple(
        Scenario(
            problem=problem,
            mechanism=mechanism if l2_clip_norms is None else replace(mechanism, l2_clip_norm=l2_clip_norms[i]),
            optimizer=optimizer,
            num_steps=num_steps,
            target_delta=target_delta,
        )
        for i, optimizer in enumerate(optimizers)
    )
    contest = _Contest(pair, metric, moments or Moments(), lambda done: progress(min(1.0, done / (num_scanned + 8))))
    logs = np.linspace(math.log(low), math.log(high), num_scanned).tolist()
    found = contest.found(tuple(contest.crossings(logs)))
    progress(1.0)
    return found


class _Contest:
    """Two optimizers over the noise multiplier."""

    def __init__(self, pair: Sequence[Scenario], metric: str, moments: Moments, progress: Progress):
        for scenario in pair:
            reason = moments.why_unsupported(scenario)
            if reason is not None:
                raise ValueError(reason)
        self.pair, self.progress, self.num_asked = pair, progress, 0
        self.asker = Asker(metric, moments, self._tick)
        self.tried: dict[float, tuple[Outcome, Outcome]] = {}

    def outcomes(self, logs: Sequence[float]) -> list[tuple[Outcome, Outcome]]:
        new = [log for log in logs if log not in self.tried]
        found = self.asker([_at(scenario, log) for log in new for scenario in self.pair])
        self.tried |= zip(new, zip(found[::2], found[1::2], strict=True), strict=True)
        return [self.tried[log] for log in logs]

    def _tick(self) -> None:
        self.num_asked += 1
        self.progress(self.num_asked / 2)

    def lead(self, log_noise: float) -> float:
        """By which share of their mean the first is better, within [-1, 1]; NaN where both diverge."""
        first, second = (outcome.order[1] for outcome in self.outcomes([log_noise])[0])
        if math.isinf(first) or math.isinf(second):
            return math.nan if first == second else math.copysign(1.0, second - first)
        scale = (abs(first) + abs(second)) / 2
        return float(np.clip((second - first) / scale, -1, 1)) if scale else 0.0

    def crossings(self, logs: Sequence[float]) -> Iterator[Crossing]:
        self.outcomes(logs)
        leads = [(log, self.lead(log)) for log in logs]
        leads = [(log, lead) for log, lead in leads if lead and not math.isnan(lead)]
        for (low, at_low), (high, at_high) in pairwise(leads):
            if at_low * at_high < 0:
                root = float(brentq(self.lead, low, high, xtol=SMALLEST_BRACKET))  # type: ignore[arg-type]
                yield self._crossing(root, at_low > 0, 0.01 * (high - low) / abs(at_high - at_low))

    def _crossing(self, log_noise: float, first_is_better_below: bool, shift: float) -> Crossing:
        first, second = (scenario.optimizer.name for scenario in self.pair)
        outcomes = self.outcomes([log_noise])[0]
        return Crossing(
            noise_multiplier=math.exp(log_noise),
            epsilon=_at(self.pair[0], log_noise).privacy_spent.epsilon,
            better_below=first if first_is_better_below else second,
            better_above=second if first_is_better_below else first,
            value=float(np.mean([outcome.value for outcome in outcomes])),
            shift_per_percent=shift,
            status=OK if all(outcome.is_sound for outcome in outcomes) else EXTRAPOLATED,
        )

    def found(self, crossings: tuple[Crossing, ...]) -> CrossingForecast:
        scan = [
            {
                "noise_multiplier": math.exp(log),
                "optimizer": scenario.optimizer.name,
                "value": outcome.value,
                "spread": outcome.spread,
                "status": outcome.status,
            }
            for log in sorted(self.tried)
            for scenario, outcome in zip(self.pair, self.tried[log], strict=True)
        ]
        reasons = [reason for log in sorted(self.tried) for o in self.tried[log] for reason in o.reasons]
        if any(crossing.status != OK for crossing in crossings):
            reasons.insert(0, "At a crossing a forecast is extrapolated: check it by training.")
        if any(math.isnan(self.lead(log)) for log in self.tried):
            reasons.insert(0, "Both optimizers diverge in a part of the range: no crossing was looked for there.")
        leads = [lead for log in sorted(self.tried) if not math.isnan(lead := self.lead(log))]
        better = self.pair[0 if leads[0] >= 0 else 1].optimizer.name if leads else None
        return CrossingForecast(
            crossings, better, pd.DataFrame(scan), _theorem(self.pair), tuple(dict.fromkeys(reasons))
        )


def _at(scenario: Scenario, log_noise: float) -> Scenario:
    return replace(scenario, mechanism=scenario.mechanism.with_noise_multiplier(math.exp(log_noise)))


def _theorem(pair: Sequence[Scenario]) -> Theorem | str:
    plain = [scenario for scenario in pair if not _feels_noise(scenario)]
    adaptive = [scenario for scenario in pair if _feels_noise(scenario)]
    if len(plain) != 1:
        names = " and ".join(scenario.optimizer.name for scenario in pair)
        return f"The theorem compares DP-SGD with an adaptive optimizer, not {names}."
    (sgd,), (other,) = plain, adaptive
    left = _share_that_clipping_leaves(sgd)
    shared = {
        "sgd_learning_rate": sgd.optimizer.learning_rate,
        "sgd_l2_clip_norm": sgd.mechanism.l2_clip_norm,
        "adaptive_learning_rate": other.optimizer.learning_rate,
        "noise_penalty": other.optimizer.theory.noise_penalty,
        "expected_batch_size": sgd.mechanism.expected_batch_size,
    }
    form = f"clipping leaves {left:.0%} of the gradient at the start: its form for examples that are "
    if left < 0.5:
        form += "clipped"
        found = threshold_noise_multiplier_all_clipped(**shared, num_params=sgd.problem.num_params)
    else:
        form += "not clipped"
        clip = other.mechanism.l2_clip_norm
        found = threshold_noise_multipliers(
            **shared, adaptive_l2_clip_norm=clip, example_noise_std=_example_noise_std(sgd)
        )
    epsilons = tuple(_at(sgd, math.log(z)).privacy_spent.epsilon for z in found.noise_multipliers)
    return Theorem(other.optimizer.name, found, epsilons, form)


def _share_that_clipping_leaves(scenario: Scenario) -> float:
    problem, mechanism = scenario.problem, scenario.mechanism
    left = float(problem.shrink_factor(problem.initial_params(), problem.prepare_moments(mechanism)))
    return left / mechanism.sampler.batch_fill(problem.num_examples)


def _example_noise_std(scenario: Scenario) -> float:
    """sigma at the start: without noise of the mechanism what is left is the batch's, sigma^2/B a coordinate."""
    problem, mechanism = scenario.problem, scenario.mechanism
    law = problem.gradient_moments(
        problem.initial_params(), problem.prepare_moments(mechanism.with_noise_multiplier(0.0))
    )
    return math.sqrt(mechanism.expected_batch_size * float(np.mean(np.square(law.noise_std, dtype=np.float64))))


def _feels_noise(scenario: Scenario) -> bool:
    """Whether more gradient noise makes the optimizer's linearised steps shorter, as adaptive ones do."""
    rate = scenario.optimizer.theory.effective_learning_rate
    return float(rate(1.0, 2.0)) != float(rate(1.0, 1.0))
