"""How wrong is the learning rate that the estimators forecast on a public stand-in? It and eight others, trained.

  python -m benchmarks.stand_in --data-dir DATA
  python -m benchmarks.stand_in breast_cancer,digits

The stand-in's rate is that of `noisecast.estimators` with their defaults. It, and rates from a sixteenth to sixteen
times it, are trained on the real data, with the estimators' scaling of rows. Regret = test loss at the stand-in's rate
over the least of the nine, less 1. That least is chosen by test loss, which counts against the stand-in.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from benchmarks.estimators import reviews
from noisecast.advice.stand_in import Shape, stand_in, stand_in_ratings
from noisecast.cli.output import TABLE_STYLE
from noisecast.estimators import DPLogisticRegression, DPMatrixFactorization
from noisecast.estimators.linear import ROW_NORM
from noisecast.estimators.plan import Plan, plan
from noisecast.problems.datasets import Dataset, bundled, movielens, public_split
from noisecast.problems.linear import linear_model
from noisecast.problems.matrix_factorization import matrix_factorization
from noisecast.problems.problem import Problem
from noisecast.runners import Training, answer
from noisecast.scenario import Scenario

FACTORS = 2.0 ** np.arange(-4, 5)
WORDS = 10_000
OPTIMIZERS = ("DP-Adam", "DP-SGD")
HEADERS = (
    "data", "ε", "optimizer", "its rate", "score there", "best score", "loss there", "best loss", "at", "regret", "CPU",
)  # fmt: skip
console = Console(width=150, highlight=False)
app = App(help=__doc__, help_format="plaintext")


@dataclass(frozen=True)
class Task:
    """Real data, and what the estimator knows of them.

    Args:
      problem: with test examples.   proxy: what the estimator forecasts on, of a number of examples.
      estimator: of whose parameters the plan is made; of `target_epsilon` and `optimizer`.
      score: shown beside the test loss.   num_runs: of every rate.
    """

    problem: Problem
    proxy: Callable[[int], Problem]
    estimator: Callable[..., Any]
    score: str
    num_runs: int


def _bundled(name: str, data_norm: float, num_runs: int) -> Task:
    train, test = bundled(name)
    return _classification((train.features, train.labels, test.features, test.labels), data_norm, num_runs)


def _imdb(data_dir: str | None) -> Task:
    return _classification(reviews(data_dir, WORDS), 1.0, num_runs=4)


def _classification(parts: tuple, data_norm: float, num_runs: int) -> Task:
    rows, labels, test_rows, test_labels = parts
    names = tuple(map(str, range(int(labels.max()) + 1)))
    shape = Shape(rows.shape[0], rows.shape[1], len(names), row_norm=ROW_NORM, is_sparse=sp.issparse(rows))
    data = [
        Dataset(part, _scaled(some, data_norm), some_labels.astype(np.int32), names)
        for part, some, some_labels in (("train", rows, labels), ("test", test_rows, test_labels))
    ]
    # Of the estimators for two classes and for more, the plans are the same.
    return Task(
        linear_model(*data), lambda _: linear_model(stand_in(shape)), DPLogisticRegression, "test_accuracy", num_runs
    )


def _scaled(rows: Any, data_norm: float) -> Any:
    """Rows longer than data_norm shortened to it, and data_norm made ROW_NORM, as the estimators do."""
    norms = np.sqrt(rows.power(2).sum(axis=1)) if sp.issparse(rows) else np.linalg.norm(rows, axis=1)
    factors = ROW_NORM / np.maximum(np.asarray(norms).ravel(), data_norm)
    return sp.csr_array(sp.diags_array(factors) @ rows) if sp.issparse(rows) else rows * factors[:, None]


def _movielens(data_dir: str | None) -> Task:
    ratings = movielens(data_dir)
    train, test = (ratings.rows(part) for part in public_split(ratings.num_examples))
    sizes = {"num_users": ratings.num_users, "num_items": ratings.num_items}

    def proxy(num_examples: int) -> Problem:
        drawn = stand_in_ratings(num_examples=num_examples, rating_scale=(1.0, 5.0), **sizes)
        return matrix_factorization(drawn, public_init_seed=0)

    def estimator(**parameters: Any) -> Any:
        return DPMatrixFactorization(**sizes, **parameters)

    return Task(matrix_factorization(train, test, public_init_seed=0), proxy, estimator, "test_rmse", 4)


TASKS: dict[str, Callable[[str | None], Task]] = {
    "breast_cancer": lambda data_dir: _bundled("breast_cancer", data_norm=4.0, num_runs=64),
    "digits": lambda data_dir: _bundled("digits", data_norm=4.0, num_runs=16),
    "imdb": _imdb,
    "movielens": _movielens,
}


@app.default
def main(
    data: Annotated[str, Parameter(help=f"With commas between: {', '.join(TASKS)}.")] = ",".join(TASKS),
    /,
    *,
    data_dir: Annotated[str | None, Parameter(help="Folder with the data; else NOISECAST_DATA.")] = None,
    epsilon: Annotated[str, Parameter(help="Budgets, with commas between.")] = "0.1,1,8",
    runs: Annotated[int | None, Parameter(help="Of every rate; else the task's own number.")] = None,
) -> None:
    shown = Table(title="Test loss and score at the stand-in's learning rate, and at the best of nine", **TABLE_STYLE)
    for header in HEADERS:
        shown.add_column(header, justify="left" if header in ("data", "optimizer") else "right")
    for name in data.split(","):
        task = TASKS[name](data_dir)
        num_runs = runs or task.num_runs
        for each in map(float, epsilon.split(",")):
            for optimizer in OPTIMIZERS:
                began = time.process_time()
                found = planned(task, optimizer, each)
                seconds = time.process_time() - began
                row = [*_row(task, found, num_runs), f"{seconds:.1f} s"]
                title = f"{name} ({task.problem.num_examples:,} rows, {num_runs} runs)"
                shown.add_row(title, f"{each:g}", optimizer, *row)
                console.print(title, f"{each:g}", optimizer, *row, sep="  ")
    console.print(shown)


def planned(task: Task, optimizer: str, epsilon: float) -> Plan:
    """What the estimator would run: the noise for the budget, and the stand-in's learning rate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at small budgets it warns that little can be learnt
        estimator = task.estimator(target_epsilon=epsilon, optimizer=optimizer)
        return plan(estimator, num_rows=task.problem.num_examples, proxy=task.proxy)


def _row(task: Task, plan: Plan, num_runs: int) -> list[str]:
    """The table's columns from the rate on."""
    found = _trained(task, plan, num_runs)
    here = found.iloc[len(FACTORS) // 2]
    least = found["loss"].idxmin()
    best_score = found["score"].min() if task.score == "test_rmse" else found["score"].max()
    return [
        f"{plan.optimizer.learning_rate:.3g}",
        _score(here["score"], task.score),
        _score(best_score, task.score),
        f"{here['loss']:.3f} ± {here['error']:.3f}",
        f"{found['loss'][least]:.3f}",
        f"{FACTORS[least]:g} ×",
        f"{here['loss'] / found['loss'][least] - 1:.1%}",
    ]


def _trained(task: Task, plan: Plan, num_runs: int) -> pd.DataFrame:
    """Mean test loss, its standard error and the mean score at each of FACTORS."""
    scenarios = [
        Scenario(
            problem=task.problem,
            mechanism=plan.mechanism,
            optimizer=replace(plan.optimizer, learning_rate=float(plan.optimizer.learning_rate * factor)),
            num_steps=plan.num_steps,
            target_delta=plan.target_delta,
        )
        for factor in FACTORS
    ]
    rows = answer(scenarios, runners=[Training()], num_seeds=num_runs, record_at=[])
    found = rows.pivot_table(index="scenario", columns="metric", values="value", aggfunc=["mean", "sem"])
    columns = {"loss": ("mean", "test_loss"), "error": ("sem", "test_loss"), "score": ("mean", task.score)}
    return (
        pd.DataFrame({name: found[column] for name, column in columns.items()})
        .loc[[scenario.id for scenario in scenarios]]
        .reset_index(drop=True)
    )


def _score(value: float, metric: str) -> str:
    return f"{value:.3f}" if metric == "test_rmse" else f"{value:.1%}"


if __name__ == "__main__":
    app()
