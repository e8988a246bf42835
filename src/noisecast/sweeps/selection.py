"""Choose the best cell of a sweep, and say what choosing cost: the epsilon of one run, and that of the procedure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from noisecast.privacy.accounting import epsilon_text, noise_text
from noisecast.privacy.sampling import steps_per_epoch
from noisecast.runners import Training
from noisecast.sweeps.ledger import Ledger
from noisecast.sweeps.price import HELD_OUT, Choice, Compose, Price, Public, RepeatSelect
from noisecast.table import COLUMNS, EXTRAPOLATED, METRICS, table_from

__all__ = ["Compose", "Price", "Public", "RepeatSelect", "Selection", "select"]

SCORES = {name for name, metric in METRICS.items() if metric.larger_is_better is not None}
_NAMES = [column.name for column in COLUMNS]
SETTINGS = _NAMES[: _NAMES.index("runner")]  # the scenario's own columns


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """The best cell of a sweep, and what choosing it cost.

    Args:
      scenario: its id.   seed: of the one run that was chosen, where only the best may be told; else None.
      settings: the scenario's columns of the table.
      metric, value, standard_error: its score, the mean over num_seeds runs; standard_error is None for one.
      ranking: all cells from best to worst: settings, value, standard_error, num_seeds. Diverged ones are left out;
        and all but the best, where only that may be told.
      epsilon_of_run: of one run with these settings.   epsilon_of_procedure: of the whole sweep and the choice.
      target_delta: delta of both.   price: how the procedure was priced.   meaning: the two epsilons in words.
    """

    scenario: str
    seed: int | None
    settings: dict[str, Any]
    metric: str
    value: float
    standard_error: float | None
    num_seeds: int
    ranking: pd.DataFrame
    epsilon_of_run: float
    epsilon_of_procedure: float
    target_delta: float
    price: Price
    meaning: str

    @property
    def epsilons(self) -> tuple[float, float]:
        """Of one run: the least and the largest among the cells that are ranked together."""
        found = self.ranking["epsilon"].to_numpy(float)
        return float(found.min()), float(found.max())

    @property
    def runners_up(self) -> pd.DataFrame:
        """All but the best, from better to worse; empty where only the best may be told."""
        return self.ranking.iloc[1:]

    def sentence(self) -> str:
        """For the privacy statement: what was chosen, and both epsilons with what they mean."""
        s, spread = self.settings, "" if self.standard_error is None else f" ± {self.standard_error:.2g}"
        return (
            f"{s['optimizer']} with learning rate {s['learning_rate']:g}, clip norm {s['l2_clip_norm']:g}, noise "
            f"multiplier {noise_text(s['noise_multiplier'], 6)}, expected batch size {s['expected_batch_size']:g} and "
            f"{s['num_steps']:,} steps: {METRICS[self.metric].label} {self.value:.4g}{spread}. {self.meaning}"
        )


def select(
    table: pd.DataFrame,
    *,
    metric: str,
    price: Price,
    ledger: Ledger | None = None,
    problem: str | None = None,
    runner: str = Training.name,
    last_epochs: float = 0,
    at_most_epsilon: float = math.inf,
) -> Selection:
    """The cell with the best mean over seeds, and the epsilon of one run and of the procedure.

    Under `RepeatSelect` the best single trial, since each trial is a run of its own there.

    Args:
      table: of the whole sweep (`noisecast.table`).
      metric: the score: one that tells the better of two models (`Metric.larger_is_better`).
      price: Public(reason), Compose() or RepeatSelect(trials); there is no default.
      ledger: all that the sweep ran (`noisecast.sweeps.ledger`); may be left out for Public.
      problem: of a sweep of several, by name.   runner: whose answers are compared.
      last_epochs: 0: the score at the last step. More: its mean over the recorded steps of so many last epochs.
      at_most_epsilon: cells of which one run spends more are left out; what the whole sweep cost stays in the price.
        Not with RepeatSelect.
    Raises: ValueError: no price, nothing to choose from, or a sweep that the price does not fit.

    >>> import noisecast as nc
    >>> mechanism = nc.SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=nc.Stream(8))
    >>> problem = nc.quadratic([1.0, 2.0], 1.0, example_noise_std=0.1)
    >>> asked = [
    ...     nc.Scenario(problem=problem, mechanism=mechanism, optimizer=nc.DPSGD(learning_rate=rate), num_steps=20)
    ...     for rate in (1e-6, 0.1)
    ... ]
    >>> table = nc.answer(asked, runners=[nc.Training()], num_seeds=3, record_at=[0])
    >>> chosen = select(table, metric="loss", price=Public("simulated"))
    >>> chosen.settings["learning_rate"], chosen.epsilon_of_procedure == chosen.epsilon_of_run
    (0.1, True)
    """
    _check_request(metric, price, last_epochs)
    table = table_from(table)
    trained = table.loc[table["runner"] == Training.name, ["scenario", "seed"]].drop_duplicates()
    if (reason := price.why_unfit(ledger, set(trained.itertuples(index=False, name=None)))) is not None:
        raise ValueError(reason)
    table = _of_one_budget(_of_one_problem(table, problem), at_most_epsilon, price)
    keys = ["scenario", "seed"] if price.only_best else ["scenario"]
    found = _ranked(_scores(table, metric, runner, last_epochs), keys, metric)
    settings = table.drop_duplicates("scenario").set_index("scenario", drop=False)
    ranking = settings.loc[found["scenario"], SETTINGS].reset_index(drop=True).join(found.drop(columns="scenario"))
    best = {name: _plain(value) for name, value in ranking.iloc[0].items()}
    choice = Choice(metric, runner, best["epsilon"], best["target_delta"])
    priced = price.priced(choice, ledger)
    return Selection(
        scenario=best["scenario"],
        seed=best["seed"] if price.only_best else None,
        settings={name: best[name] for name in SETTINGS},
        metric=metric,
        value=best["value"],
        standard_error=best["standard_error"],
        num_seeds=best["num_seeds"],
        ranking=ranking.iloc[:1] if price.only_best else ranking,
        target_delta=choice.target_delta,
        price=price,
        **priced._asdict(),
    )


def _check_request(metric: str, price: Price, last_epochs: float) -> None:
    if not isinstance(price, Public | Compose | RepeatSelect):
        raise ValueError(
            "Expected the price of choosing to be named: public (Public(reason): the sweep ran on public data), "
            "compose (Compose(): every run is counted) or repeat_select (RepeatSelect(trials): the best of a random "
            f"number of trials); got {price!r}."
        )
    if metric not in SCORES:
        known = sorted(SCORES)
        raise ValueError(f"Expected a metric that tells the better model ({', '.join(known)}), got {metric}.")
    if not 0 <= last_epochs < math.inf:
        raise ValueError(f"Expected a finite last_epochs >= 0, got {last_epochs}.")


def _of_one_problem(table: pd.DataFrame, problem: str | None) -> pd.DataFrame:
    names = sorted(set(table["problem"]))
    if problem is None and len(names) > 1:
        raise ValueError(f"Expected one problem among {', '.join(names)}, got none: their scores cannot be compared.")
    if problem is not None and problem not in names:
        raise ValueError(f"Expected a problem among {', '.join(names)}, got '{problem}'.")
    return table if problem is None else table.loc[table["problem"] == problem]


def _of_one_budget(table: pd.DataFrame, at_most_epsilon: float, price: Price) -> pd.DataFrame:
    """Rows of runs within a budget."""
    if not at_most_epsilon > 0:
        raise ValueError(f"Expected at_most_epsilon > 0, got {at_most_epsilon:g}.")
    if price.only_best and at_most_epsilon < math.inf:  # budget after budget would tell which trials there are
        raise ValueError(
            f"Expected no budget for a choice from random trials, got {at_most_epsilon:g}: their number has to stay "
            "unknown, and the best of all is the one that may be told; sweep runs within the budget."
        )
    within = table.loc[table["epsilon"] <= at_most_epsilon]
    if len(table) and not len(within):
        least = epsilon_text(table["epsilon"].to_numpy(float).min(), 3)
        raise ValueError(
            f"Expected a run of epsilon <= {at_most_epsilon:g}, got none; the least of this sweep is {least}."
        )
    return within


def _scores(table: pd.DataFrame, metric: str, runner: str, last_epochs: float) -> pd.DataFrame:
    """One row a finished run: scenario, seed, score (NaN if it diverged, or is outside the range of its formula)."""
    rows = table.loc[table["runner"] == runner]
    if not len(rows):
        there = ", ".join(sorted(set(table["runner"]))) or "none"
        raise ValueError(f"Expected a runner that the sweep asked, {there}, got '{runner}'.")
    if metric not in set(rows["metric"]):
        scores = SCORES & set(rows["metric"])
        there = ", ".join(sorted(scores)) or "no score"
        raise ValueError(f"Expected {metric} among what the runner {runner} recorded, got {there}; choose from these.")
    rows = rows.loc[_is_late(rows, last_epochs)]
    # A score may look only at what it may be told by: the training loss must not decide which run has diverged.
    looked_at = rows["metric"].str.startswith(HELD_OUT) | (not metric.startswith(HELD_OUT))
    failed = ~np.isfinite(rows["value"]) | (rows["status"] == EXTRAPOLATED)
    runs = (
        rows.assign(
            score=rows["value"].where(rows["metric"] == metric),
            failed=(failed & looked_at).astype(bool),
            finished=((rows["step"] == rows["num_steps"]) & (rows["metric"] == metric)).astype(bool),
        )
        .groupby(["scenario", "seed"], dropna=False, as_index=False)
        .agg({"score": "mean", "failed": "any", "finished": "any"})
    )
    return runs.loc[runs["finished"]].assign(score=runs["score"].mask(runs["failed"]))


def _is_late(rows: pd.DataFrame, last_epochs: float) -> NDArray[np.bool_]:
    """Which rows count: those of the last step and of the last epochs."""
    last, q = (rows[name].to_numpy(float) for name in ("num_steps", "sampling_probability"))
    if last_epochs > 0 and np.isnan(q).any():
        raise ValueError("Expected a data set for last_epochs, got a stream, which has no epochs; use the last step.")
    step = rows["step"].to_numpy(float)
    if last_epochs == 0:
        return step == last
    return (step == last) | (step > last - last_epochs * steps_per_epoch(q))


def _ranked(runs: pd.DataFrame, keys: list[str], metric: str) -> pd.DataFrame:
    """Cells from best to worst, equal ones by name. A cell of which any run failed is left out."""
    grouped = runs.groupby(keys, dropna=False)["score"]
    cells = pd.DataFrame({"value": grouped.mean(), "standard_error": grouped.sem(), "num_seeds": grouped.size()}).loc[
        grouped.count() == grouped.size()
    ]
    if cells.empty:
        raise ValueError("Expected a cell that has not diverged, got none: there is nothing to choose, so no model.")
    sign = -1 if METRICS[metric].larger_is_better else 1
    cells = cells.reset_index().assign(order=sign * cells["value"].to_numpy())
    return cells.sort_values(["order", *keys], kind="stable", ignore_index=True).drop(columns="order")


def _plain(value: Any) -> Any:
    """A cell as Python has it; None for what is missing."""
    if pd.isna(value):
        return None
    return value.item() if isinstance(value, np.generic) else value
