"""The paper's two ways to compare optimizers across privacy levels, as mathematics on the table.

Protocol A tunes (learning rate, clip norm) of each optimizer at one noise multiplier and keeps them at all others.
Protocol B tunes at each noise multiplier. Both read the answers of any runner: training and forecast each choose their
own cell. A score says explicitly which metric is compared, and when.

Choosing costs privacy that no row of the table knows of: `noisecast.sweeps` prices it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from noisecast.optimizers import Optimizer, with_learning_rate
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import steps_per_epoch
from noisecast.problems.problem import Problem
from noisecast.question import Question
from noisecast.runners import Runner
from noisecast.scenario import Scenario
from noisecast.table import DIVERGED, EXTRAPOLATED, METRICS, OK, SIMULATED

# One contest: within it the cells (learning rate, clip norm) of an optimizer compete.
CONTEST = ["problem", "expected_batch_size", "num_steps", "runner", "optimizer", "noise_multiplier"]
CELL = [*CONTEST, "learning_rate", "l2_clip_norm"]
EPSILONS = ["epsilon", "nominal_epsilon", "target_delta"]
STATUSES = [OK, EXTRAPOLATED, DIVERGED]  # from the best to the worst: what is not ok never beats what is
SHARED_CELL = (
    "Expected cells that differ in learning rate, clip norm, noise multiplier, batch size or number of steps, got "
    "several scenarios in one that differ elsewhere (b1, b2 or eps of DP-Adam, the schedule, the sampler, delta, the "
    "data); a comparison cannot tell them apart, so keep them in stores of their own."
)
NUM_LAST_EPOCHS = 5  # as in the paper's Protocol B


@dataclass(frozen=True)
class Score:
    """By which number a cell is judged.

    Args:
      metric: a metric of the table; accuracies, recalls and F1 are made large, everything else small.
      when: "final", after the last step, or "last epochs", the mean after each of the last five epochs.
    Raises: ValueError for an unknown metric.

    >>> Score("test_accuracy").larger_is_better, Score().larger_is_better
    (True, False)
    """

    metric: str = "loss"
    when: Literal["final", "last epochs"] = "final"

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"Expected a metric among {', '.join(METRICS)}, got {self.metric!r}.")

    @property
    def larger_is_better(self) -> bool:
        return METRICS[self.metric].larger_is_better is True

    @property
    def label(self) -> str:
        """In words, for tables and axes."""
        when = "final" if self.when == "final" else f"mean of the last {NUM_LAST_EPOCHS} epochs"
        return f"{METRICS[self.metric].label}, {when}"

    def record_at(self, scenario: Scenario) -> tuple[int, ...]:
        """The steps that must be recorded for this score, increasing.

        Raises: ValueError: examples come as a stream, which has no epochs.
        """
        if self.when == "final":
            return (scenario.num_steps,)
        probability = scenario.mechanism.sampling_probability
        if probability is None:
            raise ValueError('Expected epochs for the score "last epochs", got a stream of examples; use "final".')
        back = steps_per_epoch(probability) * np.arange(NUM_LAST_EPOCHS)
        return tuple(int(step) for step in sorted(scenario.num_steps - back) if step > 0)


class Grid(NamedTuple):
    """Learning rates and clip norms, every pair of which is tried."""

    learning_rates: tuple[float, ...]
    l2_clip_norms: tuple[float, ...]


# --- What is asked ---------------------------------------------------------------------------------------------------


def protocol_b_question(
    problem: Problem,
    mechanism: SampledGaussian,
    grids: Sequence[tuple[Optimizer, Grid]],
    *,
    noise_multipliers: Sequence[float],
    num_steps: int,
    runners: Sequence[Runner],
    target_delta: float = 1e-5,
    score: Score = Score(),
    num_seeds: int = 1,
) -> Question:
    """Every cell of every grid at every noise multiplier.

    Args:
      problem, num_steps, target_delta: as in `Scenario`; num_seeds, runners: as in `Question`.
      mechanism: its noise multiplier and clip norm are replaced.
      grids: optimizers, whose learning rates are replaced, with their cells.
      score: its steps are recorded, and the start.
    """
    scenarios = tuple(
        Scenario(
            problem=problem,
            mechanism=replace(mechanism, noise_multiplier=noise_multiplier, l2_clip_norm=clip),
            optimizer=with_learning_rate(optimizer, rate),
            num_steps=num_steps,
            target_delta=target_delta,
        )
        for noise_multiplier in noise_multipliers
        for optimizer, grid in grids
        for clip in grid.l2_clip_norms
        for rate in grid.learning_rates
    )
    record_at = (0, *score.record_at(scenarios[0]))
    return Question(scenarios=scenarios, runners=tuple(runners), num_seeds=num_seeds, record_at=record_at)


def tuning_questions(questions: Sequence[Question], tuned_at: float) -> tuple[Question, ...]:
    """The first stage of Protocol A: every cell at one noise multiplier.

    Raises: ValueError: none of the questions asks about that noise multiplier.
    """
    found = tuple(
        replace(question, scenarios=kept)
        for question in questions
        if (kept := tuple(s for s in question.scenarios if _is_close(s.mechanism.noise_multiplier, tuned_at)))
    )
    if not found:
        asked = sorted({s.mechanism.noise_multiplier for question in questions for s in question.scenarios})
        raise ValueError(
            f"Expected to tune at one of the noise multipliers {', '.join(f'{z:g}' for z in asked)}, got {tuned_at:g}."
        )
    return found


def kept_questions(questions: Sequence[Question], chosen: pd.DataFrame) -> tuple[Question, ...]:
    """The second stage: the cells that were chosen at every noise multiplier, each runner asked about its own.

    Args:
      questions: what was cut down to `tuning_questions`.   chosen: rows of `tuned` of their answers.
    """
    names = ["runner", "optimizer", "learning_rate", "l2_clip_norm"]
    settings: dict[str, set[tuple]] = {}
    for runner, *setting in chosen[names].itertuples(index=False):
        settings.setdefault(runner, set()).add(tuple(setting))
    return tuple(
        replace(question, scenarios=kept, runners=(runner,))
        for question in questions
        for runner in question.runners
        if (kept := tuple(s for s in question.scenarios if _setting(s) in settings.get(runner.name, ())))
    )


def ask_protocol_a(
    questions: Sequence[Question],
    score: Score,
    *,
    tuned_at: float,
    ask: Callable[[Sequence[Question]], pd.DataFrame],
) -> pd.DataFrame:
    """Both stages of Protocol A: the table of the tuning and of the settings that were kept.

    Args:
      questions: every cell at every noise multiplier; most are never asked.
      ask: answers some of them and keeps the answers, as `run_sweep` with a store: asked for the tuning twice, perhaps
        of a store that holds others of them already, which are left out.
    """
    tuning = tuning_questions(questions, tuned_at)
    chosen = tuned(_only(ask(tuning), tuning), score)
    both = (*tuning, *kept_questions(questions, chosen))
    return _only(ask(both), both)


def _only(table: pd.DataFrame, questions: Sequence[Question]) -> pd.DataFrame:
    ids = [scenario.id for question in questions for scenario in question.scenarios]
    return table.loc[table["scenario"].isin(ids)]


def check_cells(questions: Sequence[Question]) -> None:
    """Raises: ValueError: two scenarios would share a cell. `scores` says so, too, when they have been answered."""
    found: dict[tuple, str] = {}
    for question in questions:
        for scenario in question.scenarios:
            mechanism, optimizer = scenario.mechanism, scenario.optimizer
            cell = (
                scenario.problem.name, mechanism.expected_batch_size, scenario.num_steps, optimizer.name,
                mechanism.noise_multiplier, optimizer.learning_rate, mechanism.l2_clip_norm,
            )  # fmt: skip
            if found.setdefault(cell, scenario.id) != scenario.id:
                raise ValueError(SHARED_CELL)


# --- What is found ---------------------------------------------------------------------------------------------------


def scores(table: pd.DataFrame, score: Score) -> pd.DataFrame:
    """The score of every run.

    Returns: a frame with `CELL`, seed (-1 for a runner without one), `EPSILONS`, value (NaN where the run diverged) and
      rank, the place of its status in `STATUSES`.
    Raises: ValueError: the table has no such metric, too few steps were recorded for the score, or scenarios that
      differ in what is no column of the table share a cell.
    """
    rows: Any = table.loc[table["metric"] == score.metric]
    if rows.empty:
        there = ", ".join(sorted(table["metric"].unique()))
        raise ValueError(f"Expected rows of the metric {score.metric}, got {there or 'none'}.")
    if (rows.groupby(CELL, observed=True)["scenario"].nunique() > 1).any():
        raise ValueError(SHARED_CELL)
    rows = rows.assign(
        rank=rows["status"].replace(SIMULATED, OK).map(STATUSES.index), seed=rows["seed"].astype("Int64").fillna(-1)
    )
    rows.loc[~np.isfinite(rows["value"]), "rank"] = STATUSES.index(DIVERGED)
    if score.when == "final":
        rows = rows.loc[rows["step"] == rows["num_steps"]]
    else:
        rows = rows.loc[_is_end_of_a_last_epoch(rows)]
    columns = {name: (name, "first") for name in EPSILONS}
    found = rows.groupby([*CELL, "seed"], sort=False, observed=True).agg(
        **columns, value=("value", "mean"), rank=("rank", "max"), steps=("step", "size")
    )
    found.loc[found["rank"] == STATUSES.index(DIVERGED), "value"] = np.nan
    wanted = 1 if score.when == "final" else NUM_LAST_EPOCHS
    if found.empty or (found["steps"] < wanted).any():
        raise ValueError(
            f'Expected {wanted} recorded steps of {score.metric} a run for the score "{score.when}", got '
            f"{0 if found.empty else int(found['steps'].min())}; record the steps that `Score.record_at` names."
        )
    return found.drop(columns="steps").reset_index()


def cells(table: pd.DataFrame, score: Score) -> pd.DataFrame:
    """The score of every cell: its mean over seeds and what may be chance.

    Returns: a frame with `CELL`, `EPSILONS`, value, standard_error (NaN with one seed), low, high (the 95 % interval
      of the mean), num_seeds and status: `diverged` where any seed is, whose value is NaN.
    Raises: as `scores`.
    """
    grouped: Any = scores(table, score).groupby(CELL, sort=False, observed=True)
    found = grouped.agg(
        **{name: (name, "first") for name in EPSILONS},
        value=("value", "mean"),
        standard_error=("value", "sem"),
        num_seeds=("value", "size"),
        rank=("rank", "max"),
    ).reset_index()
    found["status"] = [STATUSES[rank] for rank in found.pop("rank")]
    found.loc[found["status"] == DIVERGED, ["value", "standard_error"]] = np.nan
    half = _students_factor(found["num_seeds"]) * found["standard_error"]
    return found.assign(low=found["value"] - half, high=found["value"] + half)


def ranked(table: pd.DataFrame, score: Score) -> pd.DataFrame:
    """`cells`, each beside the best of its contest (runner, optimizer, noise multiplier), the best first.

    Seeds are compared in pairs: cells trained at one seed see the same batches.

    Returns: `cells` with place (1 the best), behind (how much worse than the best; >= 0), behind_standard_error, and
      is_contender: behind by no more than chance explains, its 95 % interval reaching to 0: two standard errors, or
      more where seeds are few. With one seed only the best is.
    """
    sign = -1.0 if score.larger_is_better else 1.0
    found: Any = cells(table, score)
    contest = found.groupby(CONTEST, sort=False).ngroup()  # in the order of the table
    order = pd.DataFrame(
        {"contest": contest, "rank": found["status"].map(STATUSES.index), "cost": sign * found["value"]}
    )
    found = found.loc[order.sort_values(["contest", "rank", "cost"], kind="stable").index].reset_index(drop=True)
    found["place"] = found.groupby(CONTEST, sort=False).cumcount() + 1
    winners = found.loc[found["place"] == 1, CELL]
    # Where even the best diverged, everything did: there is no winner.
    winners = winners.loc[found.loc[winners.index, "status"] != DIVERGED]
    by_seed = scores(table, score)[[*CELL, "seed", "value"]]
    best = by_seed.merge(winners, on=CELL)[[*CONTEST, "seed", "value"]]
    pairs = by_seed.merge(best, on=[*CONTEST, "seed"], suffixes=("", "_best"))
    pairs["behind"] = sign * (pairs["value"] - pairs["value_best"])
    gaps = pairs.groupby(CELL, sort=False)["behind"].agg(behind="mean", behind_standard_error="sem").reset_index()
    found = found.merge(gaps, on=CELL, how="left")
    found.loc[found["status"] == DIVERGED, ["behind", "behind_standard_error"]] = np.nan
    chance = _students_factor(found["num_seeds"]) * found["behind_standard_error"].fillna(0.0)
    return found.assign(is_contender=found["behind"] <= chance)


def tuned(table: pd.DataFrame, score: Score) -> pd.DataFrame:
    """The best cell of each optimizer at each noise multiplier, by runner.

    The value is the best of many that are partly chance: with few seeds it flatters.

    Returns: `cells` of the winners, with num_cells, num_contenders (cells not told apart from it, itself included),
      and learning_rate_at_edge, l2_clip_norm_at_edge: "lowest", "highest" or "" of what was tried. Where every cell
      diverged the row has no learning rate and the status `diverged`.
    """
    found: Any = ranked(table, score)
    contests = found.groupby(CONTEST, sort=False)
    num_cells = contests.size().to_numpy()
    num_contenders = contests["is_contender"].sum().to_numpy()
    ranges = {name: contests[name].agg(["min", "max"]).to_numpy() for name in ("learning_rate", "l2_clip_norm")}
    best = found.loc[found["place"] == 1].reset_index(drop=True)
    best = best.drop(columns=["place", "behind", "behind_standard_error", "is_contender"])
    best["num_cells"], best["num_contenders"] = num_cells, num_contenders
    for name, bounds in ranges.items():
        best[f"{name}_at_edge"] = [_edge(*of) for of in zip(best[name], bounds[:, 0], bounds[:, 1], strict=True)]
    lost = best["status"] == DIVERGED
    best.loc[lost, ["learning_rate", "l2_clip_norm"]] = np.nan
    best.loc[lost, ["learning_rate_at_edge", "l2_clip_norm_at_edge"]] = ""
    return best


def protocol_a(table: pd.DataFrame, score: Score, *, tuned_at: float) -> pd.DataFrame:
    """The cells that are best at one noise multiplier, at all noise multipliers of the table.

    Returns: the columns of `tuned`; the edges and contenders are those of the tuning.
    Raises: ValueError: nothing was tuned there, or a kept cell was not asked about elsewhere (`ask_protocol_a` does).
    """
    is_there: Any = np.isclose(table["noise_multiplier"], tuned_at)
    if not is_there.any():
        levels = ", ".join(f"{z:g}" for z in sorted(table["noise_multiplier"].unique()))
        raise ValueError(f"Expected to tune at one of the noise multipliers {levels}, got {tuned_at:g}.")
    chosen: Any = tuned(table.loc[is_there], score)
    of_optimizer = [name for name in CONTEST if name != "noise_multiplier"]
    tuning = ["learning_rate_at_edge", "l2_clip_norm_at_edge", "num_cells", "num_contenders"]
    settings = [*of_optimizer, "learning_rate", "l2_clip_norm"]
    everything: Any = cells(table, score)
    kept = everything.merge(chosen[[*settings, *tuning]], on=settings)
    tunable = chosen.loc[chosen["status"] != DIVERGED, of_optimizer]
    wanted = everything[CONTEST].drop_duplicates().merge(tunable, on=of_optimizer)
    missing = wanted.merge(kept[CONTEST], how="left", indicator=True).query("_merge == 'left_only'")
    if len(missing):
        first = missing.iloc[0]
        raise ValueError(
            f"Expected the cell of {first['optimizer']} that is best at noise multiplier {tuned_at:g} by "
            f"{first['runner']} to be asked about at {first['noise_multiplier']:g} as well, got other cells; "
            "ask `kept_questions`."
        )
    return kept


def protocol_b(table: pd.DataFrame, score: Score) -> pd.DataFrame:
    """The best cells at each noise multiplier: `tuned`, under the paper's name."""
    return tuned(table, score)


# --- Parts -----------------------------------------------------------------------------------------------------------


def _is_end_of_a_last_epoch(rows: Any) -> Any:
    if rows["sampling_probability"].isna().any():
        raise ValueError('Expected epochs for the score "last epochs", got a stream of examples; use "final".')
    epochs = steps_per_epoch(rows["sampling_probability"].to_numpy(float))
    back = rows["num_steps"] - rows["step"]
    return (back % epochs == 0) & (back < NUM_LAST_EPOCHS * epochs)


def _students_factor(num_seeds: Any) -> Any:
    """Standard errors in half a 95 % interval of a mean."""
    return stdtrit(np.maximum(num_seeds - 1, 1), 0.975)


def _edge(value: float, low: float, high: float) -> str:
    if low == high:
        return ""
    return "lowest" if value == low else "highest" if value == high else ""


def _setting(scenario: Scenario) -> tuple[str, float, float]:
    return scenario.optimizer.name, scenario.optimizer.learning_rate, scenario.mechanism.l2_clip_norm


def _is_close(one: float, other: float) -> bool:
    return bool(np.isclose(one, other))
