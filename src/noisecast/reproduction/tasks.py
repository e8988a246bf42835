"""The paper's three tasks as frozen data: problem, tuned settings and grids, at the paper's scale and at a quick one.

Numbers are those of the paper's appendix "Experimental Details". Where it contradicts itself, what was run counts: IMDB
has 25,000 training examples (its printed epsilons were computed with 10,000), MovieLens trains on 80,000 of its 100,000
ratings, and six of IMDB's threshold multipliers, printed as 1.2, 1.8, ... 3.8, are 1.25, 1.75, ... 3.75.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from noisecast.optimizers import DPSGD, OPTIMIZERS, DPAdam, DPSignSGD
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import Poisson, steps_of_epochs
from noisecast.problems.datasets import Dataset, Ratings, forum500, imdb, movielens, public_split
from noisecast.problems.linear import linear_model
from noisecast.problems.matrix_factorization import matrix_factorization, paper_like_matrix_factorization
from noisecast.problems.problem import Problem
from noisecast.protocols import Grid
from noisecast.question import Question
from noisecast.runners import Moments, Runner, Training
from noisecast.scenario import Scenario

Scale = Literal["quick", "paper"]
SCALES: tuple[Scale, ...] = ("quick", "paper")

Numbers = tuple[float, ...]

NUM_TIMES = 14  # at which curves are looked at


class Setting(NamedTuple):
    """Learning rate and clip norm of one optimizer (paper, Table hyperparam)."""

    learning_rate: float
    l2_clip_norm: float


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set, how it is trained, and what each figure varies.

    Args:
      key: as it is asked for; begins with the data set's name.
      name: as shown; says where the task is not the paper's.
      load: the problem, of the data folder (None: the environment variable NOISECAST_DATA).
      tuned: by optimizer class; at batch size 64.
      epochs, target_delta, num_seeds: num_steps = floor(n / B) epochs.
      seeds_of: by optimizer class, where it is not num_seeds: more where a claim is near, fewer where runs cost.
      floors, speed, threshold, budgets: noise multipliers of Figs. nm_scaling, speed, eps_star and ProtocolB.
      threshold_batch_sizes: of Fig. eps_star.
      protocol_a_noise_multiplier: at which `PROTOCOL_A` is searched.   protocol_b: grids by optimizer class.
      more_learning_rates: those that the paper adds to DP-SGD's afterwards.
      forecast: asked beside training; None at the quick scale where it would cost more than the training.
    """

    key: str
    name: str
    load: Callable[[Path | None], Problem]
    tuned: Mapping[type, Setting]
    epochs: int
    target_delta: float
    num_seeds: int
    floors: Numbers
    speed: Numbers
    threshold: Numbers
    budgets: Numbers
    threshold_batch_sizes: tuple[int, ...]
    protocol_a_noise_multiplier: float
    protocol_b: Mapping[type, Grid]
    more_learning_rates: Numbers
    seeds_of: Mapping[type, int] = field(default_factory=dict)
    forecast: Moments | None = field(default_factory=Moments)

    @property
    def runners(self) -> tuple[Runner, ...]:
        return (Training(), self.forecast) if self.forecast else (Training(),)

    def is_among(self, asked: str | None) -> bool:
        """Whether a key or a data set's name asks for this task; None asks for all."""
        return asked is None or asked in (self.key, self.key.split("-")[0])

    def num_steps(self, num_examples: int, batch_size: int = 64) -> int:
        """floor(n / B) epochs."""
        return steps_of_epochs(self.epochs, batch_size / num_examples)

    def looks(self, own: tuple[int, ...], num_steps: int) -> tuple[int, ...]:
        """The steps at which a figure of curves looks at its runs: its own.

        Where the runs of fig-speed are all among those of fig-floors, both look when either does, so that their runs
        are the same ones and need not be made twice.
        """
        if not set(self.speed) <= set(self.floors):
            return own
        return tuple(sorted({late(num_steps), *times(num_steps)}))

    def scenario(
        self,
        problem: Problem,
        optimizer: type,
        noise_multiplier: float,
        *,
        batch_size: int = 64,
        setting: Setting | None = None,
    ) -> Scenario:
        """One run of `problem` (from `load`) under Poisson sampling, by default as the paper tuned it."""
        learning_rate, l2_clip_norm = setting or self.tuned[optimizer]
        num_examples = problem.num_examples
        assert num_examples is not None  # a task is a data set
        return Scenario(
            problem=problem,
            mechanism=SampledGaussian(
                noise_multiplier=noise_multiplier,
                l2_clip_norm=l2_clip_norm,
                sampler=Poisson.for_batch_size(batch_size, num_examples),
            ),
            optimizer=optimizer(learning_rate=learning_rate),
            num_steps=self.num_steps(num_examples, batch_size),
            target_delta=self.target_delta,
        )

    def scenarios(self, problem: Problem, noise_multipliers: Sequence[float], *, batch_size: int = 64):
        """Every optimizer, as tuned, at every noise multiplier, optimizer by optimizer."""
        return tuple(
            self.scenario(problem, optimizer, z, batch_size=batch_size)
            for optimizer in OPTIMIZERS
            for z in noise_multipliers
        )

    def questions(self, scenarios: Sequence[Scenario], record_at: tuple[int, ...]) -> tuple[Question, ...]:
        """Runs of this task, trained and (mostly) forecast, every optimizer with its number of seeds."""
        found: dict[int, list[Scenario]] = {}
        for scenario in scenarios:
            found.setdefault(self.seeds_of.get(type(scenario.optimizer), self.num_seeds), []).append(scenario)
        return tuple(
            repeatable(Question(scenarios=tuple(some), runners=self.runners, record_at=record_at), num_seeds)
            for num_seeds, some in found.items()
        )


def late(num_steps: Any) -> Any:
    """When a run's last quarter begins."""
    return 3 * num_steps // 4


@cache
def times(num_steps: int) -> tuple[int, ...]:
    """The start, then times evenly spaced in their logarithm from num_steps / 200.

    >>> times(1000)[:4], times(1000)[-1]
    ((0, 5, 8, 11), 1000)
    """
    later = np.unique(np.round(np.geomspace(num_steps / 200, num_steps, NUM_TIMES)).astype(int))
    return (0, *later[later > 0].tolist())


def repeatable(question: Question, num_seeds: int) -> Question:
    """The question with seeds that everybody knows: data are public here, and who runs it again finds the same."""
    return replace(question, num_seeds=1, insecure_seeds=tuple(range(num_seeds)))


# Protocol A: one grid for every task and optimizer.
PROTOCOL_A = Grid((0.001, 0.01, 0.1, 1, 3, 5, 10), (0.1, 0.25, 0.5, 1, 2, 3, 5))


# --- Problems -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def load_imdb(data_dir: Path | None = None) -> Problem:
    """Logistic regression on padded term frequencies: 25,000 reviews, 10,001 parameters."""
    return linear_model(*imdb(data_dir))


@lru_cache(maxsize=1)
def load_forum(data_dir: Path | None = None) -> Problem:
    """Softmax regression with 500 classes on forum posts: 246,092 examples, 5,000,500 parameters."""
    return linear_model(*forum500(data_dir))


@lru_cache(maxsize=1)
def load_forum20(data_dir: Path | None = None) -> Problem:
    """The same restricted to 20 public classes, those numbered first in the file; about 10,000 examples."""
    return linear_model(*(_with_classes(part, 20) for part in forum500(data_dir)))


def _with_classes(data: Dataset, count: int) -> Dataset:
    # By class number, which is public: the most frequent classes of private rows would be private themselves.
    chosen = data.rows(np.flatnonzero(data.labels < count))
    return replace(chosen, name=f"{data.name}, {count} classes", label_names=data.label_names[:count])


def _movielens_parts(data_dir: Path | None) -> tuple[Ratings, Ratings]:
    ratings = movielens(data_dir)
    train, test = public_split(ratings.num_examples)
    return ratings.rows(train), ratings.rows(test)


@lru_cache(maxsize=1)
def load_movielens_paper_like(data_dir: Path | None = None) -> Problem:
    """Factorisation as the paper's code sets it up: rows start from a cut N(0, 1), ratings are not centred."""
    train, test = _movielens_parts(data_dir)
    return paper_like_matrix_factorization(train, test, public_init_seed=0, name="movielens, paper-like")


@lru_cache(maxsize=1)
def load_movielens_centred(data_dir: Path | None = None) -> Problem:
    """Factorisation that can learn: rows start from N(0, 0.1^2), ratings are centred at 3, the middle of the scale."""
    train, test = _movielens_parts(data_dir)
    return matrix_factorization(train, test, public_init_seed=0, dim=100, name="movielens, centred")


# --- The paper's scale ----------------------------------------------------------------------------------------------

_IMDB_ADAPTIVE = Grid((0.01, 0.05, 0.10, 0.15, 0.22, 0.27, 0.33, 0.38, 0.44, 0.50), (0.05, 0.1, 0.25, 0.5))

IMDB = Task(
    key="imdb",
    name="IMDB",
    load=load_imdb,
    tuned={DPSGD: Setting(5, 0.5), DPSignSGD: Setting(0.1, 0.5), DPAdam: Setting(0.1, 0.5)},
    epochs=100,
    target_delta=1e-5,
    num_seeds=10,
    floors=(0.5, 1, 2, 4, 6, 8, 10, 12),
    speed=(0.8, 1, 1.2, 1.6, 4, 6),
    threshold=(0.5, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75, 4, 4.5, 5, 6, 8, 10, 12),
    budgets=(271.23, 13.56, 6.78, 4.52, 3.39, 2.71, 2.26, 1.94, 1.70, 1.51, 1.36),
    threshold_batch_sizes=(48, 56, 64, 72, 80),
    protocol_a_noise_multiplier=1,
    protocol_b={
        DPSGD: Grid((0.5, 0.7, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6), (0.1, 0.25, 0.5)),
        DPSignSGD: _IMDB_ADAPTIVE,
        DPAdam: _IMDB_ADAPTIVE,
    },
    more_learning_rates=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5),
)

_FORUM_CLIPS = (0.05, 0.1, 0.25, 0.35, 0.5, 1)

FORUM = Task(
    key="forum500",
    name="StackOverflow-shaped",
    load=load_forum,
    tuned={DPSGD: Setting(3, 0.25), DPSignSGD: Setting(0.01, 0.5), DPAdam: Setting(0.01, 0.5)},
    epochs=50,
    target_delta=1e-6,
    num_seeds=3,
    floors=(0.1, 0.3, 0.5, 1, 2, 4, 6, 8),
    speed=(0.37, 0.5, 0.64, 1.19, 1.46, 1.73),
    threshold=(0.1, 0.3, 0.5, 1, 2, 4, 6, 8),
    budgets=(42.384, 2.119, 1.06, 0.706, 0.53, 0.424, 0.353, 0.303),
    threshold_batch_sizes=(48, 56, 64),
    protocol_a_noise_multiplier=1,
    protocol_b={
        DPSGD: Grid((0.1, 0.5, 1, 2, 2.5, 3, 3.5, 4, 5), _FORUM_CLIPS),
        DPSignSGD: Grid(
            (0.001, 0.003, 0.005, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.1, 0.5), _FORUM_CLIPS
        ),
        DPAdam: Grid((0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.5), _FORUM_CLIPS),
    },
    more_learning_rates=(0.001, 0.01, 0.05),
)  # fmt: skip

_MOVIELENS_CLIPS = (0.1, 0.25, 0.5, 1, 2, 3)
_MOVIELENS_ADAPTIVE = Grid((0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3), _MOVIELENS_CLIPS)

MOVIELENS_PAPER_LIKE = Task(
    key="movielens-paper-like",
    name="MovieLens, paper-like start",
    load=load_movielens_paper_like,
    tuned={DPSGD: Setting(0.1, 2), DPSignSGD: Setting(0.001, 3), DPAdam: Setting(0.001, 1)},
    epochs=50,
    target_delta=1e-6,
    num_seeds=10,
    floors=(0.06, 0.08, 0.1, 0.2, 0.3, 0.5, 1, 1.5),
    speed=(0.06, 0.1, 0.2, 0.3, 0.5, 1),
    threshold=(0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95),
    budgets=(66.48, 13.3, 6.65, 3.32, 1.33, 0.66),
    threshold_batch_sizes=(56, 64, 72),
    protocol_a_noise_multiplier=0.5,
    protocol_b={
        DPSGD: Grid((0.01, 0.03, 0.05, 0.1, 0.3, 0.5, 1), _MOVIELENS_CLIPS),
        DPSignSGD: _MOVIELENS_ADAPTIVE,
        DPAdam: _MOVIELENS_ADAPTIVE,
    },
    more_learning_rates=(0.0001, 0.0003, 0.001, 0.003),
)

# The paper's settings are for rows that start large. These are near the best of `forecast_best` at z = 0.5.
MOVIELENS_CENTRED = replace(
    MOVIELENS_PAPER_LIKE,
    key="movielens-centred",
    name="MovieLens, centred",
    load=load_movielens_centred,
    tuned={DPSGD: Setting(0.1, 1), DPSignSGD: Setting(0.001, 1), DPAdam: Setting(0.001, 1)},
)

# --- Quick: minutes on two cores, the same questions at fewer points ------------------------------------------------


def _spaced(low: float, high: float, count: int) -> Numbers:
    """Multipliers near a crossing, in equal ratios: between points far apart a line is no curve."""
    return tuple(float(f"{z:.3g}") for z in np.geomspace(low, high, count))


IMDB_QUICK = replace(
    IMDB,
    num_seeds=5,
    seeds_of={DPSGD: 12},
    floors=(0.5, 1, 2, 4, 8, 12),
    speed=(0.4, 0.6, 0.8, 1.2, 1.6),
    threshold=_spaced(1.7, 3.4, 8),
    budgets=(13.56, 4.52, 2.71, 1.94, 1.36),
    threshold_batch_sizes=(48, 64, 100),
)
FORUM_QUICK = replace(
    FORUM,
    name="StackOverflow-shaped, 20 classes",
    load=load_forum20,
    seeds_of={DPSGD: 16},
    forecast=None,
    floors=(0.1, 0.5, 1, 2, 4, 8),
    threshold=_spaced(1.8, 4.5, 6),
    budgets=(42.384, 2.119, 1.06, 0.53, 0.303),
    threshold_batch_sizes=(32, 64, 128),
)
_MOVIELENS_QUICK = {
    "epochs": 6,
    "num_seeds": 3,
    "seeds_of": {DPSGD: 8},
    "floors": (0.06, 0.1, 0.3, 0.5, 1, 1.5),
    "threshold": _spaced(0.4, 0.9, 5),
    "threshold_batch_sizes": (32, 64, 128),
    "budgets": (13.3, 3.32, 1.33, 0.66),
}
MOVIELENS_PAPER_LIKE_QUICK = replace(MOVIELENS_PAPER_LIKE, **_MOVIELENS_QUICK | {"num_seeds": 4}, forecast=None)
MOVIELENS_CENTRED_QUICK = replace(MOVIELENS_CENTRED, **_MOVIELENS_QUICK)

TASKS: dict[Scale, tuple[Task, ...]] = {
    "quick": (IMDB_QUICK, FORUM_QUICK, MOVIELENS_PAPER_LIKE_QUICK, MOVIELENS_CENTRED_QUICK),
    "paper": (IMDB, FORUM, MOVIELENS_PAPER_LIKE, MOVIELENS_CENTRED),
}
