"""From settings tuned at one budget to settings for others: forecasts of a problem, and what they add up to."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd

from noisecast.advice.batches import better_batches, first_moves
from noisecast.advice.prediction import How, Prediction
from noisecast.advice.recommendation import WORTH_OTHER_BATCHES, Recommendation, choice, order, recommended
from noisecast.advice.search import Found, Searching, best_near, carried_on, side_by_side
from noisecast.advice.thresholds import Threshold, thresholds
from noisecast.advice.tuning_price import TuningPrice, tuning_price
from noisecast.forecasting import forecast_best
from noisecast.forecasting.forecasters import ELSEWHERE, Forecasters
from noisecast.forecasting.outcome import Asker, Outcome, cheap
from noisecast.optimizers import OPTIMIZERS
from noisecast.privacy.calibration import calibrate_noise_multiplier
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.sampling import Sampler
from noisecast.problems.linear import LinearModel
from noisecast.runners.moments import Moments, table_of
from noisecast.runners.moments.forecast import LARGEST_SUBSAMPLE_ERROR, Forecast
from noisecast.runners.runner import Progress
from noisecast.scenario import Scenario, check_constant_rates
from noisecast.table import OK

# For many examples: a quarter of a full forecast's time, and on IMDB's 32 cells at most 0.8 % off it.
MANY = 6000
SHOWN = Moments(full_covariance_features=100, time_steps=6, subsample=MANY)
SPENT = 0.998  # of a budget: the noise is the least there is, to about the digits it is given with
CONTENDS = 0.01  # behind the best optimizer by less, others are tried with other batches too


@dataclass(frozen=True)
class Advice:
    """What `advise` found. Computed from the examples without noise: non-private, unless they are public.

    Args:
      recommendations: one a budget, in the order that was asked.
      thresholds_kept, thresholds_retuned: budgets at which the better optimizer changes, settings kept and re-tuned.
      rows: of the table, every forecast that is shown.
      tried: the cheap forecasts that the search asked for: settings, value, status. They only show where to look.
      notes: what else to know, one sentence each.
    """

    recommendations: tuple[Recommendation, ...]
    thresholds_kept: tuple[Threshold, ...]
    thresholds_retuned: tuple[Threshold, ...]
    rows: pd.DataFrame
    tried: pd.DataFrame
    notes: tuple[str, ...]


def advise(
    tuned: Sequence[Scenario],
    *,
    target_epsilons: Sequence[float],
    may_retune: bool = True,
    may_change_batches: bool = True,
    optimizers: Sequence[type] = OPTIMIZERS,
    metric: str = "loss",
    moments: Moments | None = None,
    progress: Progress = lambda share: None,
    forecasters: Forecasters | None = None,
) -> Advice:
    """Which optimizer and settings to use at each budget, by forecasts. Nothing is trained. Non-private.

    At each target epsilon the noise is calibrated for the batch size and number of steps, and three ways are compared:

    * kept: the tuned settings at that noise (Protocol A);
    * re-tuned: the best learning rate and clip norm, the same batches and steps (Protocol B), where they gain 0.2 %;
    * re-tuned with other batches: other batch size and number of steps, where they gain 1 % more; never more example
      gradients (B T) than the tuned run.

    The search asks cheap forecasts (at most 2,000 examples, 30 features, 4 time steps) and starts each budget at the
    nearest one. What is shown and compared in the end are full ones; of more than 6,000 examples `SHOWN`, unless so few
    may move a loss by 2 %. What diverges or is extrapolated is never preferred to what is not, unless it is that
    only because hardly any loss is left, and said where it is all there is.

    Args:
      tuned: one scenario an optimizer, on one problem, at the noise it was tuned at.
      target_epsilons: budgets, at the scenarios' target_delta; > 0.
      may_retune: False: the best optimizer among the tuned ones, with its settings as they are.
      may_change_batches: whether batch size and number of steps may change.
      optimizers: classes; those that were not tuned are looked for from scratch, with the first one's batches.
      metric: of the last step; accuracies are made large, everything else small.
      moments: how to forecast what is shown, instead.   progress: told the share of the work that is done, roughly.
      forecasters: processes that started while the problem was read, and end here; None: they start now.
    Raises: ValueError for a budget out of range or reach, several settings or problems, no forecast of the problem.

    >>> import numpy as np
    >>> from noisecast import DPSGD, Stream, quadratic
    >>> mechanism = SampledGaussian(noise_multiplier=0.5, l2_clip_norm=1.0, sampler=Stream(16))
    >>> tuned = Scenario(problem=quadratic(np.ones(8), 0.2, example_noise_std=0.1), mechanism=mechanism,
    ...                  optimizer=DPSGD(learning_rate=0.1), num_steps=200)
    >>> advice = advise([tuned], target_epsilons=[1.0], optimizers=[DPSGD], may_change_batches=False)
    >>> chosen = advice.recommendations[0].chosen
    >>> pace = chosen.scenario.optimizer.learning_rate * chosen.scenario.mechanism.l2_clip_norm
    >>> chosen.how, chosen.scenario.privacy_spent.epsilon <= 1, pace < 0.1
    ('re-tuned', True, True)
    """
    epsilons = _checked(tuned, target_epsilons, optimizers, moments or SHOWN)
    problem = tuned[0].problem
    with forecasters.about(problem) if forecasters else Forecasters(problem) as ask:
        work = _Work(tuple(tuned), epsilons, metric, moments, progress, ask)
        ways: Ways = {"kept": work.kept(optimizers)}
        if may_retune:
            found = work.retuned(optimizers)
            ways["re-tuned"] = {epsilon: [each[epsilon].scenario for each in found] for epsilon in epsilons}
            if may_change_batches:
                ways["re-tuned, other batches"] = work.other_batches(found)
        shown, shown_by = work.shown(ways)
        work.price([choice(shown[epsilon])[0].scenario for epsilon in epsilons])
        untrained = work.untrained()
    recommendations = tuple(recommended(epsilon, shown[epsilon], work.prices, untrained) for epsilon in epsilons)
    progress(1.0)
    return Advice(
        recommendations=recommendations,
        thresholds_kept=thresholds({each.target_epsilon: each.kept for each in recommendations}),
        thresholds_retuned=thresholds({each.target_epsilon: each.by_optimizer for each in recommendations})
        if may_retune
        else (),
        rows=pd.concat([table_of(*pair) for pair in work.full.values()], ignore_index=True),
        tried=pd.DataFrame(work.tried),
        notes=tuple(dict.fromkeys(_notes(recommendations, shown_by))),
    )


# --- What is asked ---------------------------------------------------------------------------------------------------


def _checked(
    tuned: Sequence[Scenario], target_epsilons: Sequence[float], optimizers: Sequence[type], moments: Moments
) -> tuple[float, ...]:
    """The budgets, each once. Raises: ValueError, one sentence."""
    if not tuned:
        raise ValueError("Expected at least one tuned scenario, got none.")
    if not target_epsilons:
        raise ValueError("Expected at least one target epsilon, got none.")
    for epsilon in target_epsilons:
        if not 0 < epsilon < math.inf:
            raise ValueError(f"Expected finite target epsilons > 0, got {epsilon}.")
    names = [scenario.optimizer.name for scenario in tuned]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"Expected one tuned setting an optimizer, got {names.count(name)} of {name}; keep the one you use."
            )
    if len({scenario.problem.fingerprint for scenario in tuned}) > 1:
        raise ValueError("Expected tuned scenarios on one problem, got several; ask about one at a time.")
    if not any(type(scenario.optimizer) in optimizers for scenario in tuned):
        asked = ", ".join(each.name for each in optimizers) or "none"
        raise ValueError(f"Expected a tuned scenario of an optimizer that is asked about ({asked}), got {names}.")
    check_constant_rates(tuned, "to advise about")
    for scenario in tuned:
        if (reason := moments.why_unsupported(scenario)) is not None:
            raise ValueError(reason)
    return tuple(dict.fromkeys(float(epsilon) for epsilon in target_epsilons))


Ways = dict[How, dict[float, list[Scenario]]]  # by budget


class Budget(NamedTuple):
    """What the noise multiplier of a budget follows from; a mechanism's own noise and clip norm do not matter."""

    sampler: Sampler
    adjacency: Adjacency
    num_steps: int
    target_delta: float
    target_epsilon: float


def _budget(scenario: Scenario, epsilon: float) -> Budget:
    mechanism: SampledGaussian = scenario.mechanism
    return Budget(mechanism.sampler, mechanism.adjacency, scenario.num_steps, scenario.target_delta, epsilon)


def _noise_multiplier(_: Any, budget: Budget) -> float:
    """The least noise whose epsilon stays within the budget."""
    blank = SampledGaussian(noise_multiplier=0.0, l2_clip_norm=1.0, sampler=budget.sampler, adjacency=budget.adjacency)
    return calibrate_noise_multiplier(
        blank, target_epsilon=budget.target_epsilon, target_delta=budget.target_delta, num_steps=budget.num_steps
    ).noise_multiplier


def _tuning_price(_: Any, scenario: Scenario) -> TuningPrice:
    return tuning_price(scenario.mechanism, num_steps=scenario.num_steps, target_delta=scenario.target_delta)


class _Work:
    """The forecasts made so far, cheap and full."""

    def __init__(
        self,
        tuned: tuple[Scenario, ...],
        epsilons: tuple[float, ...],
        metric: str,
        moments: Moments | None,
        progress: Progress,
        forecasters: Forecasters,
    ) -> None:
        self.tuned, self.epsilons, self.metric = tuned, epsilons, metric
        has_many = (tuned[0].problem.num_examples or 0) > MANY
        self.settings = (moments,) if moments else (SHOWN, Moments()) if has_many else (Moments(),)
        self.cheap, self.progress, self.forecasters = cheap(self.settings[0], metric), progress, forecasters
        self.asker = Asker(metric, self.cheap, self._tick, forecasters)
        self.num_asked = 0
        self.calibrations: dict[Budget, float] = {}
        self.full: dict[str, tuple[Scenario, Forecast]] = {}  # by id
        self.prices: dict[str, TuningPrice] = {}  # by id
        self.tried: list[dict] = []

    def calibrated(self, scenario: Scenario, epsilon: float) -> Scenario:
        """The least noise whose epsilon stays within the budget."""
        self.calibrate([(scenario, epsilon)])
        noise_multiplier = self.calibrations[_budget(scenario, epsilon)]
        return replace(scenario, mechanism=scenario.mechanism.with_noise_multiplier(noise_multiplier))

    def calibrate(self, asked: Sequence[tuple[Scenario, float]]) -> None:
        """Of scenarios and their budgets, those that are not known yet, side by side."""
        budgets = list(dict.fromkeys(b for pair in asked if (b := _budget(*pair)) not in self.calibrations))
        budgets.sort(key=lambda budget: -budget.target_epsilon)  # the large ones take longest
        if len(budgets) < 2:
            self.calibrations |= {budget: _noise_multiplier(None, budget) for budget in budgets}
        else:
            self.calibrations |= zip(budgets, self.forecasters.map(_noise_multiplier, budgets), strict=True)

    def ask(self, scenarios: list[Scenario]) -> list[Outcome]:
        """Cheaply."""
        outcomes = self.asker(scenarios)
        self.tried += [_cell(*pair) for pair in zip(scenarios, outcomes, strict=True)]
        return outcomes

    def kept(self, optimizers: Sequence[type]) -> dict[float, list[Scenario]]:
        """The tuned settings at every budget's noise."""
        kept = [scenario for scenario in self.tuned if type(scenario.optimizer) in optimizers]
        for scenario in kept:  # a budget that it was calibrated for need not be again
            self.calibrations |= {
                _budget(scenario, epsilon): scenario.mechanism.noise_multiplier
                for epsilon in self.epsilons
                if SPENT * epsilon <= scenario.privacy_spent.epsilon <= epsilon
            }
        self.calibrate([(scenario, epsilon) for scenario in kept for epsilon in self.epsilons])
        return {epsilon: [self.calibrated(scenario, epsilon) for scenario in kept] for epsilon in self.epsilons}

    def retuned(self, optimizers: Sequence[type]) -> list[dict[float, Found]]:
        """The best rate and clip of every optimizer at every budget."""
        starts = [self.start(optimizer) for optimizer in optimizers]
        return side_by_side([self.over_budgets(start) for start in starts], self.ask)

    def start(self, optimizer: type) -> Scenario:
        """Where the search begins: the tuned settings, or for others the best from scratch at the nearest budget."""
        for scenario in self.tuned:
            if type(scenario.optimizer) is optimizer:
                return scenario
        first = self.calibrated(self.tuned[0], self._by_closeness(self.tuned[0])[0])
        given: Any = optimizer
        return forecast_best(
            first.problem,
            first.mechanism,
            given(learning_rate=1.0),
            num_steps=first.num_steps,
            target_delta=first.target_delta,
            metric=self.metric,
            moments=self.cheap,
        ).scenario

    def over_budgets(self, start: Scenario) -> Searching[dict[float, Found]]:
        """The best rate and clip at every budget, each from the nearest ones that are known."""
        known: dict[float, Found] = {}
        for epsilon in self._by_closeness(start):
            near = sorted(known, key=lambda other: abs(math.log(other / epsilon)))[:2]
            first = carried_on([known[other].scenario for other in near] or [start], self.calibrated(start, epsilon))
            known[epsilon] = yield from best_near(first)
        return known

    def other_batches(self, found: Sequence[dict[float, Found]]) -> dict[float, list[Scenario]]:
        """Of the optimizers that contend at each budget, all of them side by side; those that gain enough."""
        asked = [
            (epsilon, by_epsilon[epsilon])
            for epsilon in self.epsilons
            for by_epsilon in found
            if min((each[epsilon] for each in found), key=order).outcome.lead_over(by_epsilon[epsilon].outcome)
            < CONTENDS
        ]
        with suppress(ValueError):  # of a move that nobody may come to; else it is raised there
            self.calibrate([(there, epsilon) for epsilon, best in asked for there in first_moves(best.scenario)])
        searches = [
            better_batches(
                best,
                lambda scenario, epsilon=epsilon: self.calibrated(scenario, epsilon),
                least_gain=WORTH_OTHER_BATCHES,
            )
            for epsilon, best in asked
        ]
        better: dict[float, list[Scenario]] = {epsilon: [] for epsilon in self.epsilons}
        for (epsilon, before), after in zip(asked, side_by_side(searches, self.ask), strict=True):
            if after.scenario.id != before.scenario.id:
                better[epsilon].append(after.scenario)
        return better

    def shown(self, ways: Ways) -> tuple[dict[float, list[Prediction]], Moments]:
        """Better forecasts of what was found, all with as many examples, and how they were made."""
        wanted = {each.id: each for way in ways.values() for scenarios in way.values() for each in scenarios}
        moments = next(each for each in self.settings if self._is_shown_by(each, list(wanted.values())))
        predictions = {
            epsilon: [
                Prediction.of(scenario, how, self.full[scenario.id][1], self.metric)
                for how, way in ways.items()
                for scenario in way[epsilon]
            ]
            for epsilon in self.epsilons
        }
        return predictions, moments

    def _is_shown_by(self, moments: Moments, scenarios: Sequence[Scenario]) -> bool:
        """Forecasts all; the first one with too few examples ends it, unless there is nothing better."""
        forecasts = self.forecasters(moments, scenarios, [])
        for count, (scenario, forecast) in enumerate(zip(scenarios, forecasts, strict=True), start=1):
            if forecast.subsample_error > LARGEST_SUBSAMPLE_ERROR and moments is not self.settings[-1]:
                return False
            self.full[scenario.id] = scenario, forecast
            self.progress(min(0.99, 0.5 + 0.5 * count / len(scenarios)))
        return True

    def untrained(self) -> Outcome:
        """Where every optimizer starts."""
        [start] = self.forecasters(self.cheap, self.tuned[:1], [0])
        return replace(Outcome.of(start, self.metric), value=float(start.metrics[self.metric][0]), status=OK)

    def price(self, chosen: Sequence[Scenario]) -> None:
        """What choosing them by trained runs would have cost, side by side."""
        without_problem = [replace(scenario, problem=ELSEWHERE) for scenario in chosen]
        found = self.forecasters.map(_tuning_price, without_problem)
        self.prices |= zip((scenario.id for scenario in chosen), found, strict=True)

    def _by_closeness(self, scenario: Scenario) -> list[float]:
        """The budgets, first the one nearest to what was spent in tuning."""
        spent = scenario.privacy_spent.epsilon
        spent = min(max(spent, min(self.epsilons)), max(self.epsilons))  # 0 and inf have no logarithm
        return sorted(self.epsilons, key=lambda epsilon: abs(math.log(epsilon / spent)))

    def _tick(self) -> None:
        """A search takes about a dozen cells an optimizer and budget, and as many for other batches."""
        self.num_asked += 1
        self.progress(0.5 * min(1.0, self.num_asked / (60 * len(self.epsilons))))


# --- What is said of it ----------------------------------------------------------------------------------------------


def _notes(recommendations: Sequence[Recommendation], shown_by: Moments) -> list[str]:
    """What the forecasts of the chosen settings say against themselves."""
    of_few = []
    problem = recommendations[0].chosen.scenario.problem
    count = problem.num_examples or 0
    if shown_by is SHOWN and isinstance(problem, LinearModel) and count > MANY:
        of_few = [
            f"Losses are forecast from {MANY:,} or fewer of {count:,} examples; with more, as `noisecast forecast` has "
            "them, they may move by about 1 %."
        ]
    return of_few + [
        f"At ε = {each.target_epsilon:g}, {each.chosen.scenario.optimizer.name}: {reason}"
        for each in recommendations
        for reason in each.chosen.outcome.reasons
    ]


def _cell(scenario: Scenario, outcome: Outcome) -> dict:
    mechanism = scenario.mechanism
    return {
        "optimizer": scenario.optimizer.name,
        "learning_rate": scenario.optimizer.learning_rate,
        "l2_clip_norm": mechanism.l2_clip_norm,
        "noise_multiplier": mechanism.noise_multiplier,
        "expected_batch_size": mechanism.expected_batch_size,
        "num_steps": scenario.num_steps,
        "metric": outcome.metric,
        "value": outcome.value,
        "status": outcome.status,
    }
