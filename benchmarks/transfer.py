"""Is the transferred learning rate good? Tuned at one budget, carried to another, and tuned there again beside it.

  python -m benchmarks.transfer tasks imdb,forum500,movielens,breast_cancer --store /tmp/transfer --data DATA
  python -m benchmarks.transfer tasks breast_cancer --forecast --to-epsilon 0.5,0.1 --store /tmp/transfer
  python -m benchmarks.transfer quadratics

Of each optimizer the learning rate with the smallest final training loss at the first budget is found by `search`; at
the second budget the loss is seen at that rate (kept), at the rate of `transfer` and at the best of another search. The
clip norm is kept. `transfer` reads no data: it bounds the batch noise. All rates are trained with the same seeds: the
best of them is lucky rather than not, which counts against `transfer`.
Regret = final loss over the best one, less 1. Everything goes into a store: the same command goes on where it stopped.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from noisecast.advice.transfer import Curvature, Settings, gradient_noise_std, transfer
from noisecast.cli.output import TABLE_STYLE
from noisecast.optimizers import DPSGD, OPTIMIZERS, DPAdam, DPSignSGD
from noisecast.privacy.calibration import calibrate_noise_multiplier
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import Poisson
from noisecast.problems.datasets import bundled
from noisecast.problems.linear import linear_model
from noisecast.problems.problem import Problem
from noisecast.question import Question
from noisecast.reproduction.tasks import (
    FORUM,
    FORUM_QUICK,
    IMDB,
    MOVIELENS_CENTRED,
    MOVIELENS_PAPER_LIKE,
    Setting,
    Task,
)
from noisecast.runners import Moments, Runner, Training
from noisecast.scenario import Scenario
from noisecast.sweeps import run_sweep

console = Console(width=150, highlight=False)
app = App(help=__doc__, help_format="plaintext")


class Loss(NamedTuple):
    """A mean final training loss; error: its standard error, NaN of a forecast."""

    mean: float
    error: float = math.nan


Losses = Callable[[list[float]], Mapping[float, Loss]]  # of learning rates


# --- The search -------------------------------------------------------------------------------------------------------


def search(losses: Losses, start: float, *, halvings: int) -> tuple[float, Mapping[float, Loss]]:
    """The best learning rate, and all that were tried.

    Five rates in factors of 2 around `start`, and more while the best is the least or the largest; then its two
    neighbours at a factor of sqrt 2, then at the root of that, `halvings` times in all.
    """
    rates = [start * 2.0**k for k in range(-2, 3)]
    found = losses(rates)
    while (best := _best(found)) in (min(rates), max(rates)):
        rates += [best * 2.0**k for k in ((-2, -1) if best == min(rates) else (1, 2))]
        found = losses(rates)
    for halving in range(1, halvings + 1):
        step = 2.0 ** (0.5**halving)
        rates += [_best(found) / step, _best(found) * step]
        found = losses(rates)
    return _best(found), found


def _best(found: Mapping[float, Loss]) -> float:
    return min(found, key=lambda rate: found[rate].mean)


# --- Tasks, trained or forecast ---------------------------------------------------------------------------------------

_BREAST_CANCER = replace(
    IMDB,
    name="breast cancer",
    load=lambda data_dir: linear_model(*bundled("breast_cancer")),
    tuned={DPSGD: Setting(3, 0.5), DPSignSGD: Setting(0.05, 0.5), DPAdam: Setting(0.05, 0.5)},
    epochs=71,
    target_delta=1e-4,
    num_seeds=256,
)
TASKS = {
    "breast_cancer": _BREAST_CANCER,
    "imdb": replace(IMDB, num_seeds=8),
    "forum20": replace(FORUM_QUICK, num_seeds=4),
    # Of 500 classes a run of all 50 epochs takes minutes to half an hour.
    "forum500": replace(FORUM, name="StackOverflow-shaped, 1 epoch of 50", epochs=1, num_seeds=2),
    "movielens": replace(
        MOVIELENS_PAPER_LIKE, name="MovieLens, paper-like start, 10 epochs of 50", epochs=10, num_seeds=3
    ),
    "movielens_centred": replace(MOVIELENS_CENTRED, name="MovieLens, centred, 10 epochs of 50", epochs=10, num_seeds=3),
}


@dataclass(frozen=True)
class Answer:
    """One optimizer on one task: rates and losses, in the order of the table's columns."""

    task: str
    optimizer: str
    epsilons: tuple[float, float]
    tuned: float
    kept: Loss
    transferred: float
    carried: Loss
    retuned: float
    best: Loss

    def row(self) -> list[str]:
        regrets = [f"{loss.mean / self.best.mean - 1:+.2%}" for loss in (self.kept, self.carried)]
        return [
            self.task,
            f"{self.epsilons[0]:g} → {self.epsilons[1]:g}",
            self.optimizer,
            f"{self.tuned:.4g}",
            _text(self.kept),
            f"{self.transferred:.4g}",
            _text(self.carried),
            f"{self.retuned:.4g}",
            _text(self.best),
            *regrets,
        ]


@app.command
def tasks(
    names: Annotated[str, Parameter(help=f"With commas between: {', '.join(TASKS)}.")],
    /,
    *,
    store: Path,
    data: Annotated[Path | None, Parameter(help="Folder with the data; else NOISECAST_DATA.")] = None,
    from_epsilon: float = 8.0,
    to_epsilon: str = "0.5",
    optimizers: Annotated[str, Parameter(help="With commas between.")] = ",".join(kind.name for kind in OPTIMIZERS),
    seeds: Annotated[int | None, Parameter(help="Of every rate; else the task's own number.")] = None,
    forecast: Annotated[bool, Parameter(negative=(), help="Forecast (Moments) instead of trained.")] = False,
) -> None:
    """The three rates on tasks, by training or by forecast."""
    kinds = {kind.name: kind for kind in OPTIMIZERS}
    for given, known in ((names, TASKS), (optimizers, kinds)):
        if unknown := set(given.split(",")) - set(known):
            raise SystemExit(f"Expected names of {', '.join(known)}, got {', '.join(sorted(unknown))}.")
    store.mkdir(parents=True, exist_ok=True)
    answers = []
    for name in names.split(","):
        task = replace(TASKS[name], num_seeds=seeds or TASKS[name].num_seeds)
        problem = task.load(data)
        start = problem.evaluate(problem.initial_params(), 1.0)["loss"]
        how = "forecast" if forecast else f"{task.num_seeds} seeds"
        console.print(f"{task.name}: {task.num_steps(problem.num_examples):,} steps, {how}; loss {start:.4f} at first")
        runner = Moments() if forecast else Training()
        asked = _Asked(problem, task, runner, store / f"{name}-{runner.name}")
        for optimizer in (kinds[each] for each in optimizers.split(",")):
            for epsilon in map(float, to_epsilon.split(",")):
                answers.append(asked.answer(optimizer, from_epsilon, epsilon))
                console.print("  ".join(answers[-1].row()))
    _show([answer.row() for answer in answers])


@dataclass(frozen=True)
class _Asked:
    """A task of which learning rates are asked."""

    problem: Problem
    task: Task
    runner: Runner
    store: Path

    def answer(self, optimizer: type, from_epsilon: float, to_epsilon: float) -> Answer:
        halvings = 4 if isinstance(self.runner, Moments) else 1  # training does not see finer steps
        old, new = (self._calibrated(optimizer, epsilon) for epsilon in (from_epsilon, to_epsilon))
        tuned, _ = search(self._losses(old), old.optimizer.learning_rate, halvings=halvings)
        carried = transfer(
            Settings(tuned, old.num_steps),
            old.mechanism,
            new.mechanism,
            old.optimizer,
            num_params=self.problem.num_params,
        ).learning_rate
        losses = self._losses(new)
        retuned, found = search(losses, carried, halvings=halvings)
        found = {**found, **losses([tuned, carried])}
        retuned = _best(found)
        return Answer(
            self.task.name, old.optimizer.name, (from_epsilon, to_epsilon),
            tuned, found[tuned], carried, found[carried], retuned, found[retuned],
        )  # fmt: skip

    def _calibrated(self, optimizer: type, epsilon: float) -> Scenario:
        scenario = self.task.scenario(self.problem, optimizer, 0.0)
        mechanism = calibrate_noise_multiplier(
            scenario.mechanism, target_epsilon=epsilon, target_delta=scenario.target_delta, num_steps=scenario.num_steps
        )
        return replace(scenario, mechanism=mechanism)

    def _losses(self, like: Scenario) -> Losses:
        """Mean final training loss at each rate, all asked in one call; infinite where a run diverges."""
        optimizer: Any = like.optimizer

        def losses(rates: list[float]) -> Mapping[float, Loss]:
            scenarios = {rate: replace(like, optimizer=replace(optimizer, learning_rate=rate)) for rate in rates}
            question = Question(
                scenarios=tuple(scenarios.values()),
                runners=(self.runner,),
                num_seeds=self.task.num_seeds,
                record_at=(like.num_steps,),
            )
            # In this process: there are many short calls, and each new process compiles again.
            rows = run_sweep([question], self.store, workers=0, may_hold_more=True)
            is_end = (rows["metric"] == "loss") & (rows["step"] == rows["num_steps"])
            ends = rows.loc[is_end & (rows["seed"].fillna(0) < self.task.num_seeds)]  # a forecast has no seed
            grouped = ends["value"].fillna(math.inf).groupby(ends["scenario"])
            mean, error = grouped.mean(), grouped.sem()
            return {rate: Loss(mean[each.id], error[each.id]) for rate, each in scenarios.items()}

        return losses


# --- Quadratics, of which the best is known ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Quadratic:
    """1/2 sum h x^2 from x = 1, example noise 0.5, batches of 64 of 25,000, clip norm 20: nothing is clipped."""

    name: str
    hessian_diag: np.ndarray
    num_steps: int
    knows_curvature: bool = False

    def mechanism(self, noise_multiplier: float) -> SampledGaussian:
        return SampledGaussian(
            noise_multiplier=noise_multiplier, l2_clip_norm=20.0, sampler=Poisson.for_batch_size(64, 25_000)
        )

    def noise_std(self, noise_multiplier: float) -> float:
        return gradient_noise_std(
            self.mechanism(noise_multiplier), num_params=len(self.hessian_diag), example_noise_std=0.5
        )

    def loss(self, optimizer: Any, learning_rate: float, noise_std: float) -> float:
        """E f at the end in the SDE of the linearised optimizer: what is left of the start, and the floor."""
        theory, h = optimizer.theory, self.hessian_diag
        rate = float(theory.effective_learning_rate(learning_rate, noise_std))
        left = np.exp(-2 * h * rate * self.num_steps)
        return float(0.5 * np.sum(h * left) + np.sum(theory.noise_penalty * rate * noise_std**2 / 4 * (1 - left)))

    def regrets(self, kind: type, z_from: float, z_to: float) -> tuple[float, float]:
        """(kept, transferred) of an optimizer."""
        optimizer, grid, now = kind(learning_rate=1.0), np.geomspace(1e-5, 10, 4000), self.noise_std(z_to)

        def best(noise_std: float) -> float:
            return min(grid, key=lambda rate: self.loss(optimizer, rate, noise_std))

        tuned = best(self.noise_std(z_from))
        trace = float(self.hessian_diag.sum())
        carried = transfer(
            Settings(tuned, self.num_steps), self.mechanism(z_from), self.mechanism(z_to), optimizer,
            num_params=len(self.hessian_diag), example_noise_std=0.5,
            curvature=Curvature(trace / 2, trace) if self.knows_curvature else None,
        ).learning_rate  # fmt: skip
        kept, moved, least = (self.loss(optimizer, rate, now) for rate in (tuned, carried, best(now)))
        return kept / min(least, moved) - 1, moved / min(least, moved) - 1


@app.command
def quadratics(*, dim: int = 200, from_noise_multiplier: float = 1.0, to_noise_multiplier: float = 16.0) -> None:
    """Regret of the transferred rate, and of DP-SGD's kept one, by formula; the rates are the best of 4,000."""
    spread, equal = np.geomspace(1e-3, 1, dim), np.ones(dim)
    shown = Table(title=f"z {from_noise_multiplier:g} → {to_noise_multiplier:g}: regret", **TABLE_STYLE)
    for header in ("quadratic", "DP-SGD kept", *(kind.name for kind in OPTIMIZERS)):
        shown.add_column(header, justify="left" if header == "quadratic" else "right")
    for each in (
        Quadratic("curvatures 10⁻³ … 1, T = 1,000", spread, 1_000),
        Quadratic("the same, T = 10,000", spread, 10_000),
        Quadratic("equal curvatures, with `curvature`", equal, 1_000, knows_curvature=True),
        Quadratic("equal curvatures, without: the wrong rule", equal, 1_000),
    ):
        regrets = [each.regrets(kind, from_noise_multiplier, to_noise_multiplier) for kind in OPTIMIZERS]
        shown.add_row(each.name, f"{regrets[0][0]:,.0%}", *(f"{carried:,.1%}" for _, carried in regrets))
    console.print(shown)


# --- Printing ---------------------------------------------------------------------------------------------------------


def _show(rows: list[list[str]]) -> None:
    shown = Table(title="Final training loss ± standard error", **TABLE_STYLE)
    headers = ("task", "ε", "optimizer", "tuned", "kept", "transferred", "loss", "re-tuned", "loss")
    for header in (*headers, "regret kept", "regret transferred"):
        shown.add_column(header, justify="left" if header in ("task", "optimizer") else "right")
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


def _text(loss: Loss) -> str:
    return f"{loss.mean:.4f}" + ("" if math.isnan(loss.error) else f" ± {loss.error:.4f}")


if __name__ == "__main__":
    app()
