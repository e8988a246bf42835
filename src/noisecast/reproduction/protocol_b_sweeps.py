"""What `fig_protocol_b` asks: a coarse sweep at every privacy level, a finer one for the slopes of the best rate."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from noisecast.optimizers import DPSGD, DPAdam, DPSignSGD, Optimizer
from noisecast.protocols import Grid, Score, protocol_b_question
from noisecast.question import Question
from noisecast.reproduction.tasks import (
    FORUM,
    FORUM_QUICK,
    IMDB,
    IMDB_QUICK,
    MOVIELENS_CENTRED,
    MOVIELENS_CENTRED_QUICK,
    MOVIELENS_PAPER_LIKE,
    Numbers,
    Scale,
    Task,
    repeatable,
)
from noisecast.reproduction.which_task import task_of
from noisecast.runners import Moments, Training

MEAN_OF_LAST_EPOCHS = Score("loss", "last epochs")
# Forecasts here only choose among cells: what few examples add is the same for all of them.
MOMENTS = Moments(full_covariance_features=50, time_steps=12, subsample=2000)
# At which learning rates are compared: large enough for examples not to be clipped, or near it.
COMPARED_CLIP = {IMDB.name: 0.5, FORUM.name: 0.5, MOVIELENS_PAPER_LIKE.name: 2.0, MOVIELENS_CENTRED.name: 2.0}


@dataclass(frozen=True)
class Finer:
    """A task's second sweep, at the clip norm at which learning rates are compared.

    Args:
      noise_multipliers: at which something is learnt; far apart, for the slope.
      learning_rates: by optimizer class; none of the first sweep, so that each row is of one of them.
    """

    noise_multipliers: Numbers
    learning_rates: Mapping[type, Numbers]


def _half_octaves(first: float, count: int) -> Numbers:
    return tuple(float(f"{first * 2 ** (k / 2):.4g}") for k in range(count))


def _finer(levels: Numbers, sgd: tuple[float, int], adaptive: tuple[float, int]) -> Finer:
    """From (lowest learning rate, how many) of either kind."""
    rates = dict.fromkeys((DPSignSGD, DPAdam), _half_octaves(*adaptive))
    return Finer(levels, {DPSGD: _half_octaves(*sgd), **rates})


FINER = {
    IMDB.name: _finer((5.42, 2.71, 1.36), sgd=(0.26, 13), adaptive=(0.0127, 9)),
    FORUM.name: _finer((2.824, 1.412, 0.706), sgd=(0.42, 13), adaptive=(0.0079, 9)),
    MOVIELENS_CENTRED.name: _finer((0.3, 0.15, 0.075), sgd=(0.068, 12), adaptive=(0.00044, 8)),
}


@dataclass(frozen=True)
class Plan:
    """A task's sweep.

    Args:
      task: with its epochs and grids.   noise_multipliers: where it is tuned.   num_seeds: of every cell.
      grids: by optimizer class, as in the paper.
      more: learning rates that are added afterwards, the adaptive optimizers' at the compared clip norm alone.
      forecast: whether that of which slopes are taken is forecast: the second sweep, else the cells of one clip norm.
      finer_seeds: of every cell of the second sweep; 0: there is none.
      finer_levels: of the second sweep, where not those of `FINER`: what lies midway has no weight in a slope.
      score: of a cell.
    """

    task: Task
    noise_multipliers: Numbers
    num_seeds: int
    grids: Mapping[type, tuple[Numbers, Numbers]]
    more: Mapping[type, Numbers]
    forecast: bool
    finer_seeds: int
    finer_levels: Numbers = ()
    score: Score = MEAN_OF_LAST_EPOCHS


def _more(task: Task, adaptive: Numbers = ()) -> dict[type, Numbers]:
    return {DPSGD: task.more_learning_rates, DPSignSGD: adaptive, DPAdam: adaptive}


def _papers(task: Task, adaptive: Numbers = (), *, finer_seeds: int = 0) -> Plan:
    return Plan(task, task.budgets, 1, task.protocol_b, _more(task, adaptive), forecast=True, finer_seeds=finer_seeds)


_LOWER, _LOWER_MOVIELENS = (0.001, 0.003), (0.00001, 0.00003)  # than the adaptive optimizers have in the paper
_IMDB_ADAPTIVE = ((0.01, 0.05, 0.1, 0.22, 0.5), (0.1, 0.5))
_FORUM_ADAPTIVE = ((0.001, 0.003, 0.01, 0.03, 0.1), (0.5,))
_MOVIELENS = {
    DPSGD: ((0.01, 0.03, 0.1, 0.3, 1), (0.5, 2)),
    DPSignSGD: ((0.0001, 0.0003, 0.001, 0.003, 0.01), (2,)),
    DPAdam: ((0.0001, 0.0003, 0.001, 0.003), (2,)),
}


def _movielens_quick() -> Plan:
    """The start that can learn, alone; in five epochs, too few to take the mean of the last five."""
    task = replace(MOVIELENS_CENTRED_QUICK, epochs=5)
    noise = (66.48, 3.32, 1.33, 0.66)
    more, score = _more(task, _LOWER_MOVIELENS), Score("loss", "final")
    return Plan(task, noise, 3, _MOVIELENS, more, forecast=True, finer_seeds=3, finer_levels=(0.3, 0.075), score=score)


PLANS: dict[Scale, tuple[Plan, ...]] = {
    "quick": (
        Plan(
            replace(IMDB_QUICK, epochs=40),
            # A slope needs levels far apart, DP-SGD's best rate inside its grid, and losses that learning lowers: above
            # z = 7 the best is what chance makes lowest. The first level is for the grid that is too high.
            (271.23, 6.78, 3.39, 2.26),
            4,
            {DPSGD: ((0.5, 1, 2, 3.5, 5, 6), (0.1, 0.5)), DPSignSGD: _IMDB_ADAPTIVE, DPAdam: _IMDB_ADAPTIVE},
            _more(IMDB, _LOWER),
            forecast=True,
            # By forecasts DP-SGD's best rate falls by one power of epsilon more near the first of these levels, by a
            # third of one near the second: so far apart, few seeds tell how far one power law goes.
            finer_seeds=18,
            finer_levels=(5.42, 0.68),
        ),
        Plan(
            replace(FORUM_QUICK, epochs=25),
            (42.384, 4, 2.119, 0.706),
            3,
            {DPSGD: ((0.1, 0.5, 1, 2, 5), (0.1, 0.5)), DPSignSGD: _FORUM_ADAPTIVE, DPAdam: _FORUM_ADAPTIVE},
            # Higher ones, too: with 20 classes the best of half of the levels is the highest of the paper's grid.
            {DPSGD: (*FORUM.more_learning_rates, 10, 25), DPSignSGD: (0.3,), DPAdam: (0.3,)},
            forecast=False,
            finer_seeds=8,
            finer_levels=(2.824, 0.706),
        ),
        _movielens_quick(),
    ),
    "paper": (
        _papers(IMDB, _LOWER, finer_seeds=40),
        _papers(FORUM),
        *(_papers(task, _LOWER_MOVIELENS) for task in (MOVIELENS_PAPER_LIKE, MOVIELENS_CENTRED)),
    ),
}


def questions(scale: Scale, data_dir: Path | None = None, asked: str | None = None) -> tuple[Question, ...]:
    """Every cell of every task trained, and those of one clip norm forecast."""
    plans = (plan for plan in PLANS[scale] if plan.task.is_among(asked))
    return tuple(question for plan in plans for question in _questions(plan, data_dir))


def grids_of(plan: Plan, compared_clip: float) -> list[tuple[Optimizer, Grid]]:
    """The paper's, and `more`: DP-SGD's is a second try, of every clip norm; the others' shows an edge."""
    grids: list[tuple[Optimizer, Grid]] = []
    for kind, (rates, clips) in plan.grids.items():
        more = tuple(rate for rate in plan.more[kind] if rate not in rates)
        grids.append((kind(learning_rate=1.0), Grid(rates, clips)))
        if more:
            grids.append((kind(learning_rate=1.0), Grid(more, clips if kind is DPSGD else (compared_clip,))))
    return grids


def _questions(plan: Plan, data_dir: Path | None) -> Iterator[Question]:
    task, problem = plan.task, plan.task.load(data_dir)
    clip = COMPARED_CLIP[task_of(problem.name).name]
    base = task.scenario(problem, DPSGD, 1.0)
    asked: dict[str, Any] = {
        "num_steps": base.num_steps,
        "target_delta": base.target_delta,
        "score": plan.score,
    }
    grids = grids_of(plan, clip)

    def question(grids: Any, runner: Any, noise_multipliers: Numbers, num_seeds: int = 1) -> Question:
        of = {"noise_multipliers": noise_multipliers, "runners": [runner]}
        return repeatable(protocol_b_question(problem, base.mechanism, grids, **asked, **of), num_seeds)

    yield question(grids, Training(), plan.noise_multipliers, plan.num_seeds)
    if plan.forecast and not plan.finer_seeds:
        at_clip = [(optimizer, Grid(grid.learning_rates, (clip,))) for optimizer, grid in grids]
        yield question(at_clip, MOMENTS, plan.noise_multipliers)
    if plan.finer_seeds:
        finer = FINER[task_of(problem.name).name]
        grids = [(kind(learning_rate=1.0), Grid(rates, (clip,))) for kind, rates in finer.learning_rates.items()]
        levels = plan.finer_levels or finer.noise_multipliers
        yield question(grids, Training(), levels, plan.finer_seeds)
        if plan.forecast:
            yield question(grids, MOMENTS, levels)


def sweeps(rows: Any) -> tuple[Any, Any]:
    """The rows of one task: those of the first sweep, those of the finer one."""
    finer = FINER.get(task_of(str(rows["problem"].iloc[0])).name)
    rates = {kind.name: set(of) for kind, of in finer.learning_rates.items()} if finer else {}
    pairs = zip(rows["optimizer"], rows["learning_rate"], strict=True)
    is_finer = np.array([rate in rates.get(name, ()) for name, rate in pairs], bool)
    return rows[~is_finer], rows[is_finer]


def compared(rows: Any) -> Any:
    """Of which slopes are taken: the finer sweep, where there is one."""
    first, finer = sweeps(rows)
    return finer if len(finer) else first
