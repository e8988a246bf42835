"""The best learning rate and clip norm at a horizon, by a search without derivatives over forecasts."""

import math
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from noisecast.forecasting.outcome import Asker, Outcome, Range, cheap
from noisecast.optimizers import Optimizer, with_learning_rate
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.problems.problem import Problem
from noisecast.runners.moments import Moments
from noisecast.runners.runner import Progress
from noisecast.scenario import Scenario
from noisecast.table import DIVERGED, EXTRAPOLATED

FLAT = 2e-3  # of the value: cells that differ by less are as good as each other
NEAR = 0.05  # of the value: a line of the first grid that comes so close to its best is followed
COARSE_RATE, COARSE_CLIP = math.log(3), math.log(4)  # spacing of the first grid
FINE_STEPS = (COARSE_RATE / 2, COARSE_RATE / 4)
MOST_LINES = 20  # of the first grid, in either direction
HALF = 0.5  # of the first gradient, left by clipping: with less there may be better clip norms far off


@dataclass(frozen=True)
class BestForecast:
    """What `forecast_best` found. Non-private.

    Args:
      scenario: the question with the best learning rate and clip norm.
      outcome: what is forecast there.
      cells: all that was tried: learning_rate, l2_clip_norm, value, status, and setting ("coarse" or "full"; coarse
        values come from fewer examples and time steps, and only show where to look).
      reasons: what speaks against relying on it, one sentence each.
    """

    scenario: Scenario
    outcome: Outcome
    cells: pd.DataFrame
    reasons: tuple[str, ...]

    @property
    def learning_rate(self) -> float:
        return self.scenario.optimizer.learning_rate

    @property
    def l2_clip_norm(self) -> float:
        return self.scenario.mechanism.l2_clip_norm


def forecast_best(
    problem: Problem,
    mechanism: SampledGaussian,
    optimizer: Optimizer,
    *,
    num_steps: int,
    metric: str = "loss",
    learning_rates: Range | None = None,
    l2_clip_norms: Range | None = None,
    target_delta: float = 1e-5,
    moments: Moments | None = None,
    progress: Progress = lambda share: None,
) -> BestForecast:
    """The learning rate and clip norm with the best forecast after num_steps, without training. Non-private.

    First a grid with spacings 3 and 4, by forecasts from few examples and time steps; it grows while its best lies at
    an edge, and to learning rates that are worse than the lowest, since there may be two valleys. Around its best then
    steps by sqrt(3) and 3^(1/4) in either direction, and to the vertex of the parabolas through them, by full
    forecasts. Along a change of C the learning rate follows the one at which the first step's
    pace would use up the loss in T steps,

      eta(C) = f(x_0) / (T grad f . u),   u the optimizer's expected first direction,

    which is also where the grid starts. Where the clip norm asked for leaves less than half of the first gradient, and
    four times it too, there is a second grid around one that leaves more: on raw columns each has a valley of its own.
    A cell that diverges or is extrapolated is never preferred to one that is not, unless all that speaks against it is
    that hardly any loss is left, or that the run ends while its first steps still swing: half as much again as is
    forecast must still be better then.

    Args:
      problem, num_steps, target_delta: as in `Scenario`.
      mechanism: its clip norm is where the search for another starts.
      optimizer: its learning rate is replaced.
      metric: of the last step; accuracies are made large, everything else small.
      learning_rates, l2_clip_norms: (low, high) to search, low = high to keep it; None: as far as it takes.
      moments: the setting of the full forecasts.
      progress: told the share of the work that is done, roughly.
    Raises:
      ValueError: no forecast of this problem, an unknown metric, a bad range, or a forecast that diverges everywhere.

    >>> from noisecast import DPSGD, Stream, quadratic
    >>> problem = quadratic(np.ones(10), 1.0, example_noise_std=0.1)
    >>> mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=10.0, sampler=Stream(16))
    >>> best = forecast_best(problem, mechanism, DPSGD(learning_rate=1.0), num_steps=100, l2_clip_norms=(10.0, 10.0))
    >>> best.l2_clip_norm, 0.01 < best.learning_rate < 0.1, best.outcome.value < 5
    (10.0, True, True)
    """
    scenario = Scenario(
        problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps, target_delta=target_delta
    )
    searches = [_Search(scenario, metric, moments or Moments(), learning_rates, l2_clip_norms, progress)]
    if l2_clip_norms is None and (elsewhere := searches[0].elsewhere(learning_rates)) is not None:
        searches.append(elsewhere)
    starts = [(search, search.coarse()) for search in searches]
    search, start = min(starts, key=lambda pair: pair[0].seen_at(pair[1]).order)
    found = search.refined(start)
    progress(1.0)
    return found


class _Point(NamedTuple):
    """log learning rate, log clip norm."""

    log_rate: float
    log_clip: float


class _Line(NamedTuple):
    """Where a grid stands in one direction: first + spacing * k for k in range(count); an open one may grow."""

    first: float
    spacing: float
    count: int
    is_open: bool

    @classmethod
    def within(cls, name: str, bounds: Range, spacing: float) -> "_Line":
        low, high = bounds
        if not 0 < low <= high < math.inf:
            raise ValueError(f"Expected {name} as (low, high) with 0 < low <= high < inf, got {tuple(bounds)}.")
        count = math.ceil(math.log(high / low) / spacing - 1e-9) + 1
        return cls(math.log(low), math.log(high / low) / max(1, count - 1), count, False)


class _Search:
    """The cells tried so far, in both settings."""

    def __init__(
        self, scenario: Scenario, metric: str, moments: Moments, rates: Range | None, clips: Range | None,
        progress: Progress,
    ) -> None:  # fmt: skip
        self.scenario, self.progress, self.num_asked = scenario, progress, Counter()
        self.askers = {
            "coarse": Asker(metric, cheap(moments, metric), lambda: self._tick("coarse")),
            "full": Asker(metric, moments, lambda: self._tick("full")),
        }
        self.tried: dict[tuple[str, _Point], Outcome] = {}
        reason = moments.why_unsupported(scenario)
        if reason is not None:
            raise ValueError(reason)
        self.start = math.log(scenario.mechanism.l2_clip_norm)
        self._stand(self.start if clips is not None else self._downhill(self.start), rates, clips)

    def _stand(self, log_clip: float, rates: Range | None, clips: Range | None) -> None:
        """Where the first grid begins: within the ranges, or around this clip norm."""
        if clips is not None:
            self.clips = _Line.within("l2_clip_norms", clips, COARSE_CLIP)
        else:
            self.clips = _Line(log_clip - COARSE_CLIP, COARSE_CLIP, 3, True)
        self.slope = 0.0  # of the log learning rate along the log clip norm
        if rates is not None:
            self.rates = _Line.within("learning_rates", rates, COARSE_RATE)
        else:
            log_rate, self.slope = self._pace(log_clip)
            self.rates = _Line(log_rate - 2 * COARSE_RATE, COARSE_RATE, 6, True)
        self.origin = log_clip
        self.bounds = [
            None if line.is_open else (line.first, line.first + (line.count - 1) * line.spacing)
            for line in (self.rates, self.clips)
        ]
        self.reasons: list[str] = []
        self.flat_towards = 0  # the side on which the first grid found clip norms without effect

    def elsewhere(self, rates: Range | None) -> "_Search | None":
        """From the least of the larger clip norms that leaves half of the first gradient; None where that is near.

        It knows what was tried here, and the other way round.
        """
        logs = [self.start + number * COARSE_CLIP for number in range(MOST_LINES // 2)]
        log_clip = next((log for log in logs if self._left_of_gradient(log) >= HALF), self.start)
        if log_clip < self.origin + 1.5 * COARSE_CLIP:
            return None
        other = copy(self)
        other._stand(log_clip, rates, None)
        return other

    def coarse(self) -> _Point:
        """The best of a grid that grows while its best lies at an edge."""
        ks, js = list(range(self.rates.count)), list(range(self.clips.count))
        grid: dict[tuple[int, int], Outcome] = {}
        todo = [(k, j) for j in js for k in ks]
        while todo:
            grid |= zip(todo, self._ask("coarse", [self._at(k, j) for k, j in todo]), strict=True)
            # Of cells that all diverge the lowest learning rate: from there the grid grows downwards.
            best = min(grid, key=lambda cell: (*grid[cell].order, cell))
            todo = self._beyond(best, ks, js, grid) or self._unfinished(js, grid)
        return self._at(*best)

    def seen_at(self, point: _Point) -> Outcome:
        """By a full forecast."""
        return self._ask("full", [point])[0]

    def refined(self, start: _Point) -> BestForecast:
        """From `start` to where no step of the full forecast is better."""
        best = start
        for step in FINE_STEPS:
            for _ in range(MOST_LINES):
                now = self._ask("full", [best])[0]
                found, outcome = self._step(best, step)
                best = min((best, now), (found, outcome), key=lambda pair: pair[1].order)[0]
                if outcome.lead_over(now) <= FLAT / 4:
                    break
        return self._found(best)

    def _step(self, centre: _Point, step: float) -> tuple[_Point, Outcome]:
        """The best of four neighbours and the vertex of the parabolas through them."""
        sides = [[self._moved(centre, d * step, axis) for d in (-1, 1)] for axis in (0, 1)]
        self._ask("full", [*sides[0], *sides[1]])
        offsets = [step * self._vertex(low, centre, high) for low, high in sides]
        vertex = self._moved(self._moved(centre, offsets[0], 0), offsets[1], 1)
        points = [point for point in (*sides[0], *sides[1], vertex) if point != centre] or [centre]
        return min(zip(points, self._ask("full", points), strict=True), key=lambda pair: pair[1].order)

    def _vertex(self, low: _Point, centre: _Point, high: _Point) -> float:
        """Of the parabola through three cells, in steps from the centre; 0 where there is none."""
        if centre in (low, high):  # at a bound
            return 0.0
        ranks, values = zip(*(outcome.order for outcome in self._ask("full", [low, centre, high])), strict=True)
        bend = values[0] - 2 * values[1] + values[2]
        if any(ranks) or not 0 < bend < math.inf:
            return 0.0
        return float(np.clip((values[0] - values[2]) / (2 * bend), -1, 1))

    def _moved(self, point: _Point, by: float, axis: int) -> _Point:
        shift = (by, 0.0) if axis == 0 else (self.slope * by, by)
        logs = [p + s for p, s in zip(point, shift, strict=True)]
        return _Point(*(round(x if b is None else min(max(x, b[0]), b[1]), 6) for x, b in zip(logs, self.bounds)))

    def _at(self, k: int, j: int) -> _Point:
        log_clip = self.clips.first + self.clips.spacing * j
        log_rate = self.rates.first + self.rates.spacing * k + self.slope * (log_clip - self.origin)
        return _Point(round(log_rate, 6), round(log_clip, 6))

    def _beyond(self, best: tuple[int, int], ks: list[int], js: list[int], grid: dict) -> list[tuple[int, int]]:
        """The cells with which the grid grows: next to its best, where that lies at an open edge."""
        k, j = best
        if self.rates.is_open and k in (min(ks), max(ks)):
            if len(ks) >= MOST_LINES:
                self.reasons.append("The best learning rate lies at the edge of what was tried; give learning_rates.")
                return []
            ks.append(min(ks) - 1 if k == min(ks) else max(ks) + 1)
            return [(ks[-1], near) for near in (j - 1, j, j + 1) if near in js]
        if self.clips.is_open and j in (min(js), max(js)):
            inward = j + 1 if j == min(js) else j - 1
            inner = [grid[key] for key in ((k - 1, inward), (k, inward), (k + 1, inward)) if key in grid]
            if inner and grid[best].lead_over(min(inner, key=lambda outcome: outcome.order)) <= FLAT:
                self.flat_towards = -1 if j == min(js) else 1
                return []
            if len(js) >= MOST_LINES:
                self.reasons.append("The best clip norm lies at the edge of what was tried; give l2_clip_norms.")
                return []
            js.append(min(js) - 1 if j == min(js) else max(js) + 1)
            return [(near, js[-1]) for near in (k - 1, k, k + 1)]
        return []

    def _unfinished(self, js: list[int], grid: dict) -> list[tuple[int, int]]:
        """Where a second valley may lie, beyond what is higher than the best: cells to look at next.

        At higher learning rates common features overshoot, which costs at first, and rare ones go on learning: a line
        ends where it is worse than its lowest learning rate. At other clip norms that may cost less: an outermost line
        is followed where it comes close to the best and is still on its way down.
        """
        todo = []
        if self.rates.is_open:
            for j in js:
                ks = [k for k, line in grid if line == j]
                if len(ks) < MOST_LINES and grid[max(ks), j].order < grid[min(ks), j].order:
                    todo.append((max(ks) + 1, j))
        if self.clips.is_open and len(js) < MOST_LINES:
            best = min(grid.values(), key=lambda outcome: outcome.order)
            for j, inward, outward in ((min(js), 1, -1), (max(js), -1, 1)):
                ks = []
                for k in (k for k, line in grid if line == j and best.lead_over(grid[k, j]) <= NEAR):
                    # Rates of two lines are not the same: of a tilted valley the next one is as good.
                    inner = [grid[near, j + inward] for near in (k - 1, k, k + 1) if (near, j + inward) in grid]
                    if len(inner) == 3 and all(grid[k, j].lead_over(other) >= NEAR / 2 for other in inner):
                        ks.append(k)
                if ks:
                    js.append(j + outward)
                    todo += [(k, js[-1]) for k in sorted({near for k in ks for near in (k - 1, k, k + 1)})]
        return todo

    def _ask(self, setting: str, points: Sequence[_Point]) -> list[Outcome]:
        new = [point for point in dict.fromkeys(points) if (setting, point) not in self.tried]
        outcomes = self.askers[setting]([self._scenario_at(point) for point in new])
        self.tried |= zip(((setting, point) for point in new), outcomes, strict=True)
        return [self.tried[setting, point] for point in points]

    def _tick(self, setting: str) -> None:
        """Most searches take about 24 coarse cells and 18 full ones, and the coarse ones little of the time."""
        self.num_asked[setting] += 1
        shares = min(1.0, self.num_asked["coarse"] / 24), min(1.0, self.num_asked["full"] / 18)
        self.progress(0.3 * shares[0] + 0.7 * shares[1])

    def _scenario_at(self, point: _Point) -> Scenario:
        rate, clip = _rounded(point.log_rate), _rounded(point.log_clip)
        return replace(
            self.scenario,
            mechanism=replace(self.scenario.mechanism, l2_clip_norm=clip),
            optimizer=with_learning_rate(self.scenario.optimizer, rate),
        )

    def _downhill(self, log_clip: float) -> float:
        """The least clip norm, from this one on, at which the first step leads downhill; this one where none does.

        On raw columns small clip norms turn the force away: what is left of the largest gradients is their direction.
        """
        logs = [log_clip + number * COARSE_CLIP for number in range(MOST_LINES // 2)]
        return next((log for log in logs if _rate_by_first_step(self._scenario_at(_Point(0.0, log))) > 0), log_clip)

    def _left_of_gradient(self, log_clip: float) -> float:
        """The share of the gradient at the start that this clip norm leaves."""
        scenario = self._scenario_at(_Point(0.0, log_clip))
        problem = scenario.problem
        return float(problem.shrink_factor(problem.initial_params(), problem.prepare_moments(scenario.mechanism)))

    def _pace(self, log_clip: float) -> tuple[float, float]:
        """log eta(C) of `forecast_best`, and its slope in log C."""
        logs = log_clip - COARSE_CLIP, log_clip, log_clip + COARSE_CLIP
        found = [_rate_by_first_step(self._scenario_at(_Point(0.0, log))) for log in logs]
        if not all(0 < rate < math.inf for rate in found):  # no gradient to start with, for instance
            return math.log(self.scenario.optimizer.learning_rate), 0.0
        return math.log(found[1]), math.log(found[2] / found[0]) / (logs[2] - logs[0])

    def _found(self, best: _Point) -> BestForecast:
        outcome = self.tried["full", best]
        if outcome.status == DIVERGED:
            raise ValueError(
                f"Expected a learning rate at which {self.scenario.optimizer.name} is forecast to converge, got none "
                f"among the {len(self.tried)} cells tried; give a lower range of learning_rates."
            )
        beside = self._moved(best, self.flat_towards * COARSE_CLIP, 1)
        if self.flat_towards and outcome.lead_over(self._ask("full", [beside])[0]) <= FLAT:
            which = "Smaller" if self.flat_towards < 0 else "Larger"
            self.reasons.append(f"{which} clip norms do as well: they change the forecast by less than {FLAT:.1%}.")
        scenario = self._scenario_at(best)
        asker = self.askers["full"]
        forecast = next(asker.moments.forecasts([scenario], [0]))
        named = Outcome.of(forecast, asker.metric)  # with what a subsample adds, and runs where the closure is rough
        if named.is_nearly_gone:
            self.reasons.append(
                "It is extrapolated only because its loss is nearly gone, which is no reason to pass it over: the "
                "order of magnitude is known."
            )
        elif named.status == EXTRAPOLATED and outcome.status == EXTRAPOLATED:
            self.reasons.append("At the best cell the forecast is extrapolated: check it by training.")
        passed = [
            other
            for (setting, _), other in self.tried.items()
            if setting == "full" and other.order > outcome.order and other.cost < outcome.cost
        ]
        if passed:
            best_passed = min(passed, key=lambda other: other.order)
            why = f" {best_passed.reasons[0]}" if best_passed.reasons else ""
            self.reasons.append(
                f"{len(passed)} cells with better forecasts, {best_passed.value:.4g} at best, were passed over because "
                f"these are extrapolated.{why}"
            )
        for name, value, bounds in zip(("learning_rate", "l2_clip_norm"), best, self.bounds):
            if bounds is not None and bounds[0] < bounds[1] and min(abs(value - bound) for bound in bounds) < 0.01:
                self.reasons.append(f"The best {name} lies at the edge of its range; widen {name}s.")
        cells = [
            {
                "learning_rate": _rounded(point.log_rate),
                "l2_clip_norm": _rounded(point.log_clip),
                "value": tried.value,
                "status": tried.status,
                "setting": setting,
            }
            for (setting, point), tried in self.tried.items()
        ]
        start = float(forecast.metrics[asker.metric][0])
        if not named.order < replace(named, value=start).order:
            self.reasons.append(
                f"It is no better than the start, {start:.4g}: the search found no setting that trains this problem. "
                "Bring its columns to one scale, or give learning_rates and l2_clip_norms around a setting that does."
            )
        reasons = tuple(dict.fromkeys((*self.reasons, *named.reasons)))
        return BestForecast(scenario, named, pd.DataFrame(cells), reasons)


def _rounded(logarithm: float) -> float:
    return float(f"{math.exp(logarithm):.4g}")  # typed again, it is the same cell


def _rate_by_first_step(scenario: Scenario) -> float:
    """f(x_0)/(T grad f . u): the learning rate at which the first step's pace uses up the loss in T steps."""
    problem, theory = scenario.problem, scenario.optimizer.theory
    start, prepared = problem.initial_params(), problem.prepare_moments(scenario.mechanism)
    law = problem.gradient_moments(start, prepared)
    gradient = np.asarray(law.mean, np.float64) / float(problem.shrink_factor(start, prepared))
    direction = -np.asarray(theory.drift(law, theory.initial_state(law)), np.float64)
    loss = float(problem.evaluate(start, scenario.mechanism.l2_clip_norm)["loss"])
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.divide(loss, scenario.num_steps * (gradient @ direction)))
