"""What the forecast says of the paper's IMDB task, trained: the settings that it names, and where optimizers cross.

  python -m benchmarks.forecast_trained named --data-dir DATA --store /tmp/named
  python -m benchmarks.forecast_trained crossings --data-dir DATA --store /tmp/crossings

named: `forecast_best` for each optimizer at noise 0.5, 2 and 8; what it names is trained, and beside it a sweep of 7
learning rates and 4 clip norms. Regret = the named setting's mean final loss over that of the sweep's best, less 1.
The best of 28 noisy means is lucky rather than not, which counts against the forecast.

crossings: the noise multiplier above which DP-SignSGD ends lower than DP-SGD, both as the paper tuned them, by
`forecast_crossing`; and by training at four multipliers around it, with a parabola through the differences.

Runs go into a store: the same command goes on where it was stopped. The searches, half a minute each, are made again.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from cyclopts import App
from rich.console import Console
from rich.table import Table

from noisecast.cli.output import TABLE_STYLE
from noisecast.forecasting import CrossingForecast, forecast_best, forecast_crossing
from noisecast.optimizers import DPSGD, OPTIMIZERS, DPAdam, DPSignSGD
from noisecast.problems.problem import Problem
from noisecast.question import Question
from noisecast.reproduction.tasks import IMDB, Setting, Task
from noisecast.runners import Training
from noisecast.scenario import Scenario
from noisecast.sweeps import run_sweep

NOISE_MULTIPLIERS = (0.5, 2.0, 8.0)
SIGN_RATES = (0.005, 0.01, 0.02, 0.04, 0.07, 0.12, 0.2)
RATES = {DPSGD: (0.4, 0.8, 1.67, 3.0, 5.0, 8.0, 15.0), DPSignSGD: SIGN_RATES, DPAdam: SIGN_RATES}
CLIPS = (0.1, 0.25, 0.5, 1.0)
BATCH_SIZES = (48, 64, 80)
FACTORS = (0.8, 0.95, 1.08, 1.22)  # of the forecast crossing: where it is trained
NUM_RESAMPLES = 2_000
console = Console(width=130, highlight=False)
app = App(help=__doc__, help_format="plaintext")


class Mean(NamedTuple):
    """Of final losses, with its standard error."""

    value: float
    error: float


@app.command
def named(*, data_dir: Path | None = None, store: Path, sweep_seeds: int = 16, named_seeds: int = 64) -> None:
    problem = IMDB.load(data_dir)
    _show_named(regrets(IMDB, problem, store, sweep_seeds=sweep_seeds, named_seeds=named_seeds))


@app.command
def crossings(*, data_dir: Path | None = None, store: Path, seeds: int = 32) -> None:
    problem = IMDB.load(data_dir)
    _show_crossings([crossing(IMDB, problem, batch_size, store / str(batch_size), seeds) for batch_size in BATCH_SIZES])


# --- The setting that is named ----------------------------------------------------------------------------------------


def regrets(task: Task, problem: Problem, store: Path, *, sweep_seeds: int, named_seeds: int) -> pd.DataFrame:
    """By optimizer and noise multiplier: what is named and what the sweep finds, trained."""
    cases = [(kind, noise) for kind in OPTIMIZERS for noise in NOISE_MULTIPLIERS]
    found = [_named(task.scenario(problem, kind, noise)) for kind, noise in cases]
    swept = [
        [
            task.scenario(problem, kind, noise, setting=Setting(rate, clip))
            for rate in RATES[kind]
            for clip in CLIPS
        ]
        for kind, noise in cases
    ]  # fmt: skip
    ours = trained([scenario for scenario, _, _ in found], store / "named", named_seeds)
    theirs = trained([cell for cells in swept for cell in cells], store / "sweep", sweep_seeds)
    rows = []
    for (kind, noise), (scenario, forecast, seconds), cells in zip(cases, found, swept, strict=True):
        at, best = ours[scenario.id], min(cells, key=lambda cell: theirs[cell.id].value)
        least = theirs[best.id]
        rows.append({
            "optimizer": kind.name, "noise_multiplier": noise, "seconds": seconds, "forecast": forecast,
            "named": _setting(scenario), "trained": at.value, "trained_error": at.error / at.value,
            "best": _setting(best), "least": least.value, "least_error": least.error / least.value,
            "regret": at.value / least.value - 1,
            "regret_error": np.hypot(at.error / at.value, least.error / least.value),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _named(like: Scenario) -> tuple[Scenario, float, float]:
    began = time.monotonic()
    best = forecast_best(
        like.problem, like.mechanism, like.optimizer, num_steps=like.num_steps, target_delta=like.target_delta
    )
    return best.scenario, best.outcome.value, time.monotonic() - began


def _setting(scenario: Scenario) -> str:
    return f"{scenario.optimizer.learning_rate:.3g}, {scenario.mechanism.l2_clip_norm:.3g}"


def trained(scenarios: Sequence[Scenario], store: Path, num_seeds: int) -> dict[str, Mean]:
    """Mean final training loss, by scenario; a run that diverged makes it infinite."""
    question = Question(scenarios=tuple(scenarios), runners=(Training(),), num_seeds=num_seeds, record_at=())
    began = time.monotonic()
    rows = run_sweep((question,), store)
    console.print(f"{store}: {len(scenarios)} settings x {num_seeds} seeds, {time.monotonic() - began:.0f} s")
    ends: Any = rows[(rows["metric"] == "loss") & (rows["step"] == rows["num_steps"])]
    ends = ends.assign(value=ends["value"].where(ends["status"] != "diverged", np.inf)).groupby("scenario")["value"]
    errors = ends.std() / np.sqrt(ends.size())
    return {str(key): Mean(float(value), float(errors[key])) for key, value in ends.mean().items()}


def _show_named(table: pd.DataFrame) -> None:
    shown = Table(title="forecast_best, trained, against a trained sweep", **TABLE_STYLE)
    for header in (
        "optimizer",
        "noise",
        "named",
        "forecast",
        "trained",
        "sweep's best",
        "its loss",
        "regret",
        "search",
    ):
        shown.add_column(header, justify="right")
    for row in table.itertuples():
        shown.add_row(
            row.optimizer, f"{row.noise_multiplier:g}", row.named, f"{row.forecast:.4f}",
            f"{row.trained:.4f} ±{row.trained_error:.1%}", row.best, f"{row.least:.4f} ±{row.least_error:.1%}",
            f"{row.regret:+.1%} ±{row.regret_error:.1%}", f"{row.seconds:.0f} s",
        )  # fmt: skip
    console.print(shown)


# --- Where two optimizers cross ---------------------------------------------------------------------------------------


def crossing(task: Task, problem: Problem, batch_size: int, store: Path, num_seeds: int) -> dict[str, Any]:
    """z* at one batch size: forecast, by the theorem, and trained with a 95 % interval of resamples."""
    pair = [task.scenario(problem, kind, 1.0, batch_size=batch_size) for kind in (DPSGD, DPSignSGD)]
    found = _forecast_crossing(pair, (0.5, 8.0))
    if not found.crossings:
        raise SystemExit(f"No crossing is forecast at B = {batch_size} between noise multipliers 0.5 and 8.")
    last = found.crossings[-1]
    noises = np.round(np.array(FACTORS) * last.noise_multiplier, 2)
    cells = [[_at(scenario, noise) for noise in noises] for scenario in pair]
    losses = trained([cell for row in cells for cell in row], store, num_seeds)
    sgd, sign = ([losses[cell.id] for cell in row] for row in cells)
    gaps = np.array([a.value - b.value for a, b in zip(sgd, sign, strict=True)])
    errors = np.array([np.hypot(a.error, b.error) for a, b in zip(sgd, sign, strict=True)])
    rng = np.random.default_rng(0)
    resampled = [
        parabola_root(noises, gaps + errors * rng.normal(size=len(noises)), errors) for _ in range(NUM_RESAMPLES)
    ]
    place = parabola_root(noises, gaps, errors)
    # An interval of those resamples that cross would be too narrow.
    is_known = np.isnan(resampled).mean() <= 0.025
    low, high = np.nanpercentile(resampled, [2.5, 97.5]) if is_known else (np.nan, np.nan)
    return {
        "batch_size": batch_size, "forecast": last.noise_multiplier, "forecast_epsilon": last.epsilon,
        "trained": place, "low": low, "high": high,
        "trained_epsilon": _at(pair[0], place).privacy_spent.epsilon if np.isfinite(place) else np.nan,
        "theorem": found.theorem,
    }  # fmt: skip


def _forecast_crossing(pair: Sequence[Scenario], noise_multipliers: tuple[float, float]) -> CrossingForecast:
    one, other = pair
    return forecast_crossing(
        one.problem, one.mechanism, (one.optimizer, other.optimizer), num_steps=one.num_steps,
        noise_multipliers=noise_multipliers, target_delta=one.target_delta,
        l2_clip_norms=(one.mechanism.l2_clip_norm, other.mechanism.l2_clip_norm),
    )  # fmt: skip


def _at(scenario: Scenario, noise_multiplier: float) -> Scenario:
    return replace(scenario, mechanism=scenario.mechanism.with_noise_multiplier(float(noise_multiplier)))


def parabola_root(x: np.ndarray, gaps: np.ndarray, errors: np.ndarray) -> float:
    """Where the parabola through the gaps is zero, a fifth beyond x at most; nan where it is not. The last such place.

    >>> parabola_root(np.array([1.0, 2.0, 3.0, 4.0]), np.array([-1.5, -0.5, 0.5, 1.5]), np.ones(4)).__round__(6)
    2.5
    """
    roots = np.roots(np.polyfit(x, gaps, 2, w=1 / errors))
    roots = roots[np.isreal(roots)].real
    roots = roots[(roots > 0.8 * x[0]) & (roots < 1.2 * x[-1])]
    return float(roots.max()) if len(roots) else np.nan


def _show_crossings(rows: Sequence[dict[str, Any]]) -> None:
    shown = Table(title="Noise multiplier (ε) above which DP-SignSGD ends lower than DP-SGD", **TABLE_STYLE)
    for header in ("batch", "forecast", "trained, 95 %", "forecast's ε", "theorem"):
        shown.add_column(header, justify="right")
    for row in rows:
        theorem = row["theorem"]
        by_theorem = theorem if isinstance(theorem, str) else ", ".join(
            f"{z:.2f} ({epsilon:.3f})" for z, epsilon in zip(theorem.thresholds.noise_multipliers, theorem.epsilons)
        )  # fmt: skip
        shown.add_row(
            str(row["batch_size"]), f"{row['forecast']:.2f} ({row['forecast_epsilon']:.3f})",
            f"{row['trained']:.2f}, {row['low']:.2f} to {row['high']:.2f} ({row['trained_epsilon']:.3f})",
            f"{row['forecast_epsilon'] / row['trained_epsilon'] - 1:+.0%}", by_theorem,
        )  # fmt: skip
    console.print(shown)


if __name__ == "__main__":
    app()
