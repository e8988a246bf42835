"""The forecast: mean and covariance of the weights as one deterministic solve; paths only where it is out of depth."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from noisecast.privacy.noise import RandomRoot
from noisecast.runners.moments import factorization, logistic, multi_output, quadratic, runs, separable
from noisecast.runners.moments.forecast import Forecast, Solver
from noisecast.runners.runner import Call, Progress, deterministic_calls, groups_of, rows, why_not_constant
from noisecast.scenario import Scenario
from noisecast.table import OK

# One kind of problem each; the first that handles a problem forecasts it.
SOLVERS: tuple[Solver, ...] = (quadratic, separable, logistic, multi_output, factorization)
# Two threads of linear algebra gain a seventh on two idle cores, and take twice the time and more where one is busy.
ONE_CORE = partial(threadpool_limits, 1)


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of the weights, closed by Gaussians (`theory.closures`).

    - Quadratics and quartics: the algorithm's own recursion, coordinate by coordinate; exact for DP-SGD on a quadratic
      while nothing is clipped. Where a quartic has two wells, a density on a grid.
    - Logistic, softmax and multi-label models: full covariance among the features of most energy and the bias
      (logistic models: and the directions in which the others move together), variances elsewhere; every logit is
      Gaussian; time runs in growing steps within which the response is linear.
    - Matrix factorisations: rows are Gaussian and independent; time steps are quadratic in their number.

    Metrics are expectations over runs. Everything is computed from the examples without noise: non-private. Rows are
    marked `diverged` where the forecast has no finite number, and `extrapolated` where the closure is out of its depth;
    of logistic models of few examples, which seconds suffice for, runs of the optimizer take its place there and where
    the loss differs from run to run by a quarter and more, always the same ones, and rows are marked `simulated`.

    Args:
      full_covariance_features: how many features have a full covariance; >= 0. With two classes 200 others at most
        have one, too, where they do much together; of softmax and multi-label models all where they are few, and else
        500 weights at most.
      time_steps: how many; >= 1.
      subsample: use that many examples; the same ones for everybody. None: as few as add less than 2 % to the loss,
        at most 50,000. What a subsample adds is estimated from as many other examples; beyond
        `LARGEST_SUBSAMPLE_ERROR` all rows are `extrapolated`.
      loss_alone: leave out what the training loss can be forecast without and takes long, as test examples: for
        searches through hundreds of cells.
      most_runs: how many are simulated where that takes seconds, in multiples of 1,024; >= 0. 0: the closure alone.

    Raises: ValueError for a number out of range.

    >>> from noisecast import DPSGD, SampledGaussian, Scenario, Stream, answer, quadratic
    >>> problem = quadratic(np.ones(4), 1.0, example_noise_std=0.1)
    >>> mechanism = SampledGaussian(noise_multiplier=0.01, l2_clip_norm=100.0, sampler=Stream(8))
    >>> asked = Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=0.1), num_steps=20)
    >>> table = answer([asked], runners=[Moments()], record_at=[0])
    >>> table[table["metric"] == "loss"]["value"].round(4).tolist()
    [2.0, 0.0313]
    """

    full_covariance_features: int = 150
    time_steps: int = 12
    subsample: int | None = None
    loss_alone: bool = False
    most_runs: int = 8192
    name: ClassVar[str] = "moments"

    def __post_init__(self) -> None:
        for name, least in (("full_covariance_features", 0), ("time_steps", 1), ("subsample", 2), ("most_runs", 0)):
            value = getattr(self, name)
            if value is None and name == "subsample":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Expected {name} to be a whole number >= {least}, got {value}.")

    def why_unsupported(self, scenario: Scenario) -> str | None:
        if scenario.optimizer.theory.closure is None:
            return (
                f"moments cannot answer {scenario.optimizer.name}: it has no closure of its step. "
                'Use runner "training".'
            )
        solver = _solver_of(scenario.problem)
        if solver is None:
            return (
                f'moments cannot answer {scenario.problem.name}: it has no closure of its law. Use runner "training", '
                "or LocalForecast() for its quadratic around a point, with error bars."
            )
        reason = None if solver is quadratic else why_not_constant(self.name, scenario)
        return reason or solver.why_unsupported(scenario)

    def calls(self, scenarios: Sequence[Scenario], repeats: Sequence[int]) -> list[Call]:
        return deterministic_calls(scenarios, size=4)

    def answer(
        self,
        scenarios: Sequence[Scenario],
        *,
        repeats: Sequence[int],
        root: RandomRoot,
        record_at: Sequence[int],
        progress: Progress,
    ) -> pd.DataFrame:
        tables = []
        for group in groups_of(scenarios, lambda scenario: (scenario.problem.fingerprint,)):
            for scenario, forecast in zip(group, self.forecasts(group, record_at)):
                tables.append(table_of(scenario, forecast))
                progress(len(tables) / len(scenarios))
        return pd.concat(tables, ignore_index=True)

    def forecasts(self, group: Sequence[Scenario], record_at: Sequence[int]) -> Iterator[Forecast]:
        """Of scenarios on one problem, at these steps and their last, one a core."""
        with ONE_CORE(), ThreadPoolExecutor(os.cpu_count()) as pool:
            prepared = self._prepared(group[0])
            yield from pool.map(lambda scenario: self._forecast(scenario, prepared, record_at), group)

    def forecast(self, scenario: Scenario, record_at: Sequence[int]) -> Forecast:
        """One scenario's forecast, with the error that a subsample adds to it. Non-private.

        Raises: ValueError with the sentence of `why_unsupported`.
        """
        reason = self.why_unsupported(scenario)
        if reason is not None:
            raise ValueError(reason)
        with ONE_CORE():
            return self._forecast(scenario, self._prepared(scenario), record_at)

    def _prepared(self, scenario: Scenario) -> Any:
        return _prepared(_Asked(scenario.problem.fingerprint, self, scenario.problem))

    def _forecast(self, scenario: Scenario, prepared: Any, record_at: Sequence[int]) -> Forecast:
        steps = sorted({step for step in record_at if step < scenario.num_steps} | {scenario.num_steps})
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # a diverging forecast says so in its rows
            found = _solver_of(scenario.problem).forecast(scenario, prepared, steps, self)
            closure: Any = scenario.optimizer.theory.closure
            if closure.caveat:
                found = found._replace(extrapolated=np.ones(len(steps), bool), reasons=(*found.reasons, closure.caveat))
            return runs.where_rough(found, scenario, self.most_runs)


@dataclass(frozen=True)
class _Asked:
    fingerprint: str
    settings: Moments
    problem: Any = field(compare=False)


@lru_cache(maxsize=2)  # a search asks again and again, with few settings and with full ones
def _prepared(asked: _Asked) -> Any:
    return _solver_of(asked.problem).prepare(asked.problem, asked.settings)


def _solver_of(problem: Any) -> Any:
    return next((solver for solver in SOLVERS if solver.handles(problem)), None)


def table_of(scenario: Scenario, forecast: Forecast) -> pd.DataFrame:
    records = [(int(k), {m: v[i : i + 1] for m, v in forecast.metrics.items()}) for i, k in enumerate(forecast.steps)]
    table = rows(Moments.name, [scenario], None, records)
    by_step: Any = dict(zip(forecast.steps.tolist(), forecast.status))
    status = table["step"].map(by_step)
    return table.assign(status=table["status"].where(table["status"] != OK, status))
