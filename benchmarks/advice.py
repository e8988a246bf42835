"""Is the advice good? Its settings are trained, and a whole sweep beside them; regret is what the sweep does better.

  python -m benchmarks.advice examples/imdb_advise.toml --epsilon 0.1,0.3,1,3,8 --store /tmp/imdb

Of a scenario file with one tuned setting an optimizer: `advise` at each budget, then with real noise
  sweep       7 learning rates x 7 clip norms x 3 optimizers (the paper's Protocol A grid) at each budget, few seeds;
  finalists   the best cells of each budget, what was advised, the kept settings, and DP-SGD's rate as `transfer` would
              carry it: many seeds.
Regret = final loss over the best finalist of the sweep's, less 1. The best of several means is lucky rather than not,
which counts against the advice. Everything goes into a store: the same command goes on where it was stopped.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import App, Parameter
from rich.console import Console

from noisecast.advice.advise import Advice, advise
from noisecast.advice.transfer import Settings, transfer
from noisecast.cli.output import TABLE_STYLE
from noisecast.optimizers import DPSGD, OPTIMIZERS
from noisecast.privacy.calibration import calibrate_noise_multiplier
from noisecast.protocols import Score, cells, protocol_b_question
from noisecast.question import Question
from noisecast.reproduction.tasks import PROTOCOL_A
from noisecast.runners import Training
from noisecast.scenario import Scenario
from noisecast.scenario_file import read_scenario_file
from noisecast.sweeps import run_sweep

Contestant = tuple[float, str, Scenario]  # budget, role
NUM_FINALISTS = 4  # of the sweep, at each budget
console = Console(width=130, highlight=False)
app = App(help=__doc__, help_format="plaintext")


@app.default
def main(
    file: Path,
    /,
    *,
    epsilon: Annotated[str, Parameter(help="Budgets, with commas between.")] = "0.1,0.3,1,3,8",
    store: Path,
    seeds: Annotated[int, Parameter(help="Of every cell of the sweep.")] = 2,
    finalist_seeds: int = 16,
    same_batches: bool = False,
) -> None:
    epsilons = [float(part) for part in epsilon.split(",")]
    tuned = read_scenario_file(file).scenarios
    began, cpu = time.monotonic(), time.process_time()
    advice = advise(tuned, target_epsilons=epsilons, may_change_batches=not same_batches)
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu
    console.print(f"Advice for {tuned[0].problem.name} took {seconds:.0f} s ({cpu_seconds:.0f} s of CPU)")
    store.mkdir(parents=True, exist_ok=True)
    swept = _sweep(tuned[0], epsilons, store / "sweep", seeds)
    contestants = _contestants(tuned, advice, swept)
    trained = _trained(contestants, store / "finalists", finalist_seeds)
    table = _regrets(contestants, trained)
    table.to_csv(store / "regrets.csv", index=False)
    _show(table, finalist_seeds)


def _calibrated(scenario: Scenario, epsilon: float) -> Scenario:
    mechanism = calibrate_noise_multiplier(
        scenario.mechanism, target_epsilon=epsilon, target_delta=scenario.target_delta, num_steps=scenario.num_steps
    )
    return replace(scenario, mechanism=mechanism)


def _sweep(like: Scenario, epsilons: Sequence[float], store: Path, seeds: int) -> pd.DataFrame:
    """Every cell of the grid at every budget, with the batches and steps of the tuned run; its mean final loss."""
    question = protocol_b_question(
        like.problem,
        like.mechanism,
        [(kind(learning_rate=1.0), PROTOCOL_A) for kind in OPTIMIZERS],
        noise_multipliers=[_calibrated(like, epsilon).mechanism.noise_multiplier for epsilon in epsilons],
        num_steps=like.num_steps,
        target_delta=like.target_delta,
        runners=[Training()],
        num_seeds=seeds,
    )
    began = time.monotonic()
    found = cells(run_sweep([question], store), Score())
    console.print(f"Sweep: {len(question.scenarios)} cells x {seeds} seeds, {time.monotonic() - began:.0f} s")
    budgets = {_calibrated(like, epsilon).mechanism.noise_multiplier: epsilon for epsilon in epsilons}
    return found.assign(budget=found["noise_multiplier"].map(budgets))


def _contestants(tuned: Sequence[Scenario], advice: Advice, swept: pd.DataFrame) -> list[Contestant]:
    """All that is trained with many seeds."""
    found = []
    for each in advice.recommendations:
        epsilon = each.target_epsilon
        found.append((epsilon, "advised", each.chosen.scenario))
        found += [(epsilon, f"re-tuned {p.scenario.optimizer.name}", p.scenario) for p in each.by_optimizer]
        found += [(epsilon, f"kept {p.scenario.optimizer.name}", p.scenario) for p in each.kept]
        for scenario in tuned:
            if isinstance(scenario.optimizer, DPSGD):
                found.append((epsilon, "transferred DP-SGD", _transferred(scenario, _calibrated(scenario, epsilon))))
        here: Any = swept.loc[(swept["budget"] == epsilon) & np.isfinite(swept["value"])]
        like = _calibrated(tuned[0], epsilon)
        for row in here.nsmallest(NUM_FINALISTS, "value").itertuples():
            kind = next(kind for kind in OPTIMIZERS if kind.name == row.optimizer)
            mechanism = replace(like.mechanism, l2_clip_norm=float(row.l2_clip_norm))
            optimizer = kind(learning_rate=float(row.learning_rate))
            found.append((epsilon, "sweep", replace(like, mechanism=mechanism, optimizer=optimizer)))
    return found


def _transferred(old: Scenario, new: Scenario) -> Scenario:
    settings = Settings(old.optimizer.learning_rate, old.num_steps)
    found = transfer(settings, old.mechanism, new.mechanism, old.optimizer, num_params=old.problem.num_params)
    optimizer: Any = old.optimizer
    return replace(new, optimizer=replace(optimizer, learning_rate=float(f"{found.learning_rate:.4g}")))


def _trained(contestants: Sequence[Contestant], store: Path, seeds: int) -> dict[str, tuple[float, float]]:
    """Mean final training loss and its standard error, by scenario."""
    scenarios = {scenario.id: scenario for _, _, scenario in contestants}
    questions = [
        Question(
            scenarios=tuple(group), runners=(Training(),), num_seeds=seeds, first_seed=1000, record_at=(num_steps,)
        )
        for num_steps in dict.fromkeys(scenario.num_steps for scenario in scenarios.values())
        if (group := tuple(scenario for scenario in scenarios.values() if scenario.num_steps == num_steps))
    ]
    began = time.monotonic()
    rows = run_sweep(questions, store, may_hold_more=True)
    console.print(f"Finalists: {len(scenarios)} settings x {seeds} seeds, {time.monotonic() - began:.0f} s")
    ends = rows.loc[(rows["metric"] == "loss") & (rows["step"] == rows["num_steps"])]
    grouped = ends.groupby("scenario")["value"]
    return {str(key): (mean, sem) for key, mean, sem in zip(grouped.mean().index, grouped.mean(), grouped.sem())}


def _regrets(contestants: Sequence[Contestant], trained: dict) -> pd.DataFrame:
    rows = []
    for epsilon, role, scenario in contestants:
        mean, error = trained[scenario.id]
        best = min(trained[other.id][0] for budget, name, other in contestants if (budget, name) == (epsilon, "sweep"))
        rows.append(
            {
                "epsilon": epsilon,
                "role": role,
                "optimizer": scenario.optimizer.name,
                "learning_rate": scenario.optimizer.learning_rate,
                "l2_clip_norm": scenario.mechanism.l2_clip_norm,
                "batch_size": scenario.mechanism.expected_batch_size,
                "num_steps": scenario.num_steps,
                "loss": mean,
                "standard_error": error / mean,
                "regret": mean / best - 1,
            }
        )
    return pd.DataFrame(rows)


def _show(table: pd.DataFrame, seeds: int) -> None:
    from rich.table import Table

    shown = Table(title=f"Final training loss, mean of {seeds} seeds", **TABLE_STYLE)
    for header in ("ε", "settings", "optimizer", "rate", "clip", "batch", "steps", "loss", "s.e.", "regret"):
        shown.add_column(header, justify="left" if header in ("settings", "optimizer") else "right")
    for epsilon, rows in table.groupby("epsilon", sort=False):
        best_cell = rows.loc[rows["role"] == "sweep", "loss"].idxmin()
        for place, row in rows.loc[(rows["role"] != "sweep") | (rows.index == best_cell)].iterrows():
            name = "best of the sweep" if place == best_cell else row["role"]
            settings = [
                f"{row[column]:,.4g}" for column in ("learning_rate", "l2_clip_norm", "batch_size", "num_steps")
            ]
            found = f"{row['loss']:.4f}", f"{row['standard_error']:.2%}", f"{row['regret']:+.1%}"
            shown.add_row(f"{epsilon:g}", name, row["optimizer"], *settings, *found)
        shown.add_section()
    console.print(shown)
    for role in dict.fromkeys(table["role"]):
        regret = table.loc[table["role"] == role].groupby("epsilon")["regret"].min()
        console.print(f"{role}: regret median {regret.median():+.1%}, worst {regret.max():+.1%}")


if __name__ == "__main__":
    app()
