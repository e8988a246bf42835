"""Every engine has the law of the plain trainer in `tests/engines/reference.py`.

**Equality in law.** A small problem is trained many times by an engine and by the reference. Two-sample tests compare
every coordinate, random projections, the first descent direction, |moved|^2 and the loss: Kolmogorov-Smirnov, means
and variances. The smallest p-value times their number (Bonferroni) must exceed `THRESHOLD`; this file and
`test_postponed_noise.py` make fewer than `COMPARISONS` comparisons, so correct engines raise a false alarm less than
once in 10^6 choices of the seeds. The seeds were written down before any result: a failing one is a finding, not a
reason to change it.

**Controls.** The same rule must reject an engine that is a little wrong, in every case without a schedule: what is
compared with the engine is the right trainer and wrong ones (`TRAINERS`).
Sixteen thousand runs cannot see one step's noise missing from 120 (0.8 % of a variance), so those controls train 40
steps. `pytest -s` shows the numbers.
"""

import zlib
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from engine_cases import (
    BATCH_SIZE,
    CLIP,
    ENGINES,
    FEW_STEPS,
    NOISE_MULTIPLIER,
    NUM_STEPS,
    OPTIMIZERS,
    PROBLEMS,
    ROOT,
    SAMPLERS,
    SCHEDULES,
    THRESHOLD,
    Case,
    N,
    model,
    reference,
    scenario,
)
from scipy import stats

from noisecast.engines.row_sparse import RowSparseRun
from noisecast.optimizers import Schedule

SEED_REFERENCE, SEED_DIRECTIONS = 900_003, 900_004
RUNS, QUICK_RUNS = 16_000, 2_000


# --- Two samples of runs ----------------------------------------------------------------------------------------------


@lru_cache(2)
def engine_runs(case: Case, runs: int, num_steps: int = NUM_STEPS) -> np.ndarray:
    """(runs, d): half of them alone, half out of groups (of nine lanes, if it has any) looked at on the way."""
    size = 9 // model(case.problem).num_outputs if case.engine == "row_sparse" else 2
    # Neighbours differ in the number that training never sees: the same question, with noise of its own.
    group = [scenario(case, num_steps=num_steps, delta=1e-5 * (1 + i)) for i in range(size)]
    found = []
    for first in range(0, runs, 400):
        repeats = range(first, min(first + 400, runs))
        alone = first < runs // 2
        run = ENGINES[case.engine](group[:1] if alone else group, repeats=repeats, root=ROOT)
        if not alone:
            run.advance(num_steps // 3)
            _ = run.params  # gives what was postponed
        run.advance(num_steps)
        params = run.params
        at = np.arange(len(repeats)) % params.shape[1]
        found.append(params[np.arange(len(repeats)), at])
    return np.concatenate(found).astype(np.float64)


@lru_cache(12)
def reference_runs(
    optimizer: str, sampler: str, problem_name: str, runs: int, num_steps: int = NUM_STEPS, *,
    z=NOISE_MULTIPLIER, clip=CLIP, batch_size: float | None = BATCH_SIZE, quiet_steps: tuple[int, ...] = (),
    schedule: str = "",
) -> np.ndarray:  # fmt: skip
    """(runs, d) of the plain trainer; z to quiet_steps make wrong ones."""
    changes = (schedule,) if schedule else ()
    name = repr((optimizer, sampler, problem_name, runs, num_steps, z, clip, batch_size, quiet_steps, *changes))
    rng = np.random.default_rng([SEED_REFERENCE, zlib.crc32(name.encode())])
    parts = [
        reference.train(
            model(problem_name), OPTIMIZERS[optimizer][1], SAMPLERS[sampler][1],
            learning_rate=OPTIMIZERS[optimizer][0].learning_rate, l2_clip_norm=clip,
            noise_std=z * clip, batch_size=batch_size, num_steps=num_steps, runs=min(250, runs - first), rng=rng,
            quiet_steps=quiet_steps, factors=SCHEDULES[schedule][1],
        )
        for first in range(0, runs, 250)
    ]  # fmt: skip
    return np.concatenate(parts)


def statistics_of(params: np.ndarray, case: Case) -> dict[str, np.ndarray]:
    """What is compared: (runs, numbers) each."""
    scale, plain = OPTIMIZERS[case.optimizer][0].learning_rate, model(case.problem)
    moved = params - plain.start
    if case.optimizer == "sign":  # every coordinate is a whole number of steps: equal ones must tie
        scale *= SCHEDULES[case.schedule][2]
        moved, scale = np.round(moved / scale), 1 / scale
    else:
        scale = 1.0
    d = moved.shape[1]
    directions = np.random.default_rng([SEED_DIRECTIONS, d]).normal(size=(8, d)) / np.sqrt(d)
    everyone = plain.gradients(plain.start[None], np.arange(N)[None])
    descent = reference.clip(everyone, CLIP).sum(axis=1)
    return {
        "coordinate": moved,
        "projection": moved @ directions.T,
        "descent": moved @ (descent / np.linalg.norm(descent)).T,
        "|moved|^2": np.square(moved).sum(axis=1, keepdims=True),
        "loss": np.concatenate([plain.loss(plain.start + part / scale) for part in np.array_split(moved, 16)])[:, None],
    }


def two_sample_p_values(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Of two samples of one number."""
    means = (a.mean() - b.mean()) / np.hypot(stats.sem(a), stats.sem(b))

    def variance_and_error(x):
        squares = np.square(x - x.mean())
        return squares.mean(), stats.sem(squares)

    (var_a, error_a), (var_b, error_b) = variance_and_error(a), variance_and_error(b)
    variances = (var_a - var_b) / np.hypot(error_a, error_b)
    smirnov: Any = stats.ks_2samp(a, b, method="asymp")
    return {
        "KS": float(smirnov.pvalue),
        "mean": float(2 * stats.norm.sf(abs(means))),
        "variance": float(2 * stats.norm.sf(abs(variances))),
    }


def p_of_equal_law(ours: np.ndarray, theirs: np.ndarray, case: Case) -> float:
    """The smallest of all p-values times their number; prints the smallest of each kind."""
    assert np.isfinite(ours).all(), "not finite"
    a, b = statistics_of(ours, case), statistics_of(theirs, case)
    found: dict[str, list[float]] = {}
    for name in a:
        for x, y in zip(a[name].T, b[name].T):
            for test, p in two_sample_p_values(x, y).items():
                found.setdefault(f"{name} {test}", []).append(p)
    count = sum(map(len, found.values()))
    p_value = min(1.0, count * min(map(min, found.values())))
    smallest = ", ".join(f"{name} {min(ps):.1e}" for name, ps in found.items())
    print(f"\n{case}, {len(ours)} runs against {len(theirs)}: p = {p_value:.2g} ({count} tests; smallest: {smallest})")
    return p_value


# --- Equality in law --------------------------------------------------------------------------------------------------

CASES = [Case(e, o, s, p) for p in PROBLEMS for s in SAMPLERS for o in OPTIMIZERS for e in ENGINES]
CASES += [Case(e, o, "poisson", "logistic", "stairs") for o in OPTIMIZERS for e in ENGINES]
QUICK = [
    Case("row_sparse", "sgd", "poisson", "logistic"),
    Case("row_sparse", "sign", "poisson", "logistic"),
    Case("row_sparse", "adam", "fixed-size", "softmax"),
    Case("row_sparse", "sgd", "poisson", "multi-label"),
    Case("row_sparse", "adam", "shuffled", "factorization"),
    Case("dense", "sgd", "poisson", "logistic"),
    Case("row_sparse", "sign", "poisson", "logistic", "stairs"),
]


def test_the_problem_has_rows_that_wait_for_long():
    """Else lazy noise is not tested: gaps beyond one word of coins, and rows that nothing ever touches."""
    drawn = SAMPLERS["poisson"][0].batches(b"\x01" * 32, 0, NUM_STEPS, N)
    for name in PROBLEMS:
        by_example = model(name).touched
        touched = np.array([by_example[rows[there]].any(axis=0) for rows, there in zip(*drawn)])  # (steps, rows)
        waits = [np.diff(np.flatnonzero(column), prepend=0).max(initial=0) for column in touched.T]
        print(name, "longest waits between touches:", sorted(waits)[-8:], "never:", (~touched.any(axis=0)).sum())
        assert (~by_example.any(axis=0)).sum() >= 2
        # These have few rows, all but two of them common.
        assert name in ("softmax", "multi-label") or max(waits) > 32


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_law_with_few_runs(case):
    theirs = reference_runs(case.optimizer, case.sampler, case.problem, QUICK_RUNS, schedule=case.schedule)
    assert p_of_equal_law(engine_runs(case, QUICK_RUNS), theirs, case) > THRESHOLD


class Trainer(NamedTuple):
    """What an engine is compared with: the plain trainer, or one that is `wrong` in the laws that it changes."""

    wrong: dict[str, Any]
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    samplers: tuple[str, ...] = tuple(SAMPLERS)
    num_steps: int = NUM_STEPS
    twice_in: tuple[tuple[str, str], ...] = ()  # (optimizer, problem) with twice the runs
    forgotten_in: tuple[tuple[str, str], ...] = ()  # (optimizer, problem)

    def concerns(self, case: Case) -> bool:
        known = case.optimizer in self.optimizers and case.sampler in self.samplers
        seen = (case.optimizer, case.problem) not in self.forgotten_in
        # What schedules add has a control of its own: `test_noise_of_one_learning_rate_given_at_another_is_seen`.
        return known and seen and (not self.wrong or not case.schedule)


TRAINERS = {
    "right": Trainer({}),
    # What signs do depends little on how large the noise is (p up to 2e-8 with 16,000 runs of the logistic model).
    "noise multiplier 3 % high": Trainer({"z": 1.03 * NOISE_MULTIPLIER}, twice_in=(("sign", "logistic"),)),
    "noise multiplier 3 % low": Trainer({"z": 0.97 * NOISE_MULTIPLIER}, twice_in=(("sign", "logistic"),)),
    "clip norm 5 % high, same noise": Trainer({"clip": 1.05 * CLIP, "z": NOISE_MULTIPLIER / 1.05}),
    # sign(g) does not know what g was divided by, and other samplers draw no other size.
    "divided by the drawn size": Trainer({"batch_size": None}, ("sgd", "adam"), ("poisson",)),
    # DP-SGD has forgotten the first step after forty in two of the problems (p up to 4e-5 with 16,000 runs).
    "first step without noise": Trainer(
        {"quiet_steps": (0,)}, num_steps=FEW_STEPS, forgotten_in=(("sgd", "softmax"), ("sgd", "multi-label"))
    ),
    # Not DP-Adam: its last step is a tenth of one among forty, and 16,000 runs do not see it (p = 0.98).
    "last step without noise": Trainer({"quiet_steps": (FEW_STEPS - 1,)}, ("sgd", "sign"), num_steps=FEW_STEPS),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, trainer", [(case, name) for case in CASES for name in TRAINERS if TRAINERS[name].concerns(case)], ids=str
)
def test_an_engine_has_the_law_of_the_right_trainer_alone(case, trainer):
    wrong, _, _, num_steps, twice_in, _ = TRAINERS[trainer]
    runs = 2 * RUNS if (case.optimizer, case.problem) in twice_in else RUNS
    theirs = reference_runs(
        case.optimizer, case.sampler, case.problem, runs, num_steps, **wrong, schedule=case.schedule
    )
    print(f"\n{trainer}", end="")
    assert (p_of_equal_law(engine_runs(case, RUNS, num_steps), theirs, case) > THRESHOLD) == (not wrong)


# --- More controls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["noise multiplier 3 % high", "divided by the drawn size"])
def test_a_wrong_trainer_is_seen_with_few_runs(wrong):
    case = Case("row_sparse", "sgd", "poisson", "logistic")
    theirs = reference_runs("sgd", case.sampler, case.problem, QUICK_RUNS, **TRAINERS[wrong].wrong)
    print(f"\ncontrol: {wrong}", end="")
    assert p_of_equal_law(engine_runs(case, QUICK_RUNS), theirs, case) < THRESHOLD


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("sign", marks=pytest.mark.slow)])
def test_noise_of_one_learning_rate_given_at_another_is_seen(optimizer, monkeypatch):
    """What rows lack at a phase's end is given there: an engine that forgets it gives it at the next phase's rate."""
    case = Case("row_sparse", optimizer, "poisson", "logistic", "stairs")
    right = Schedule.stretches
    ends_nothing = lambda *where: [(begin, stop, False) for begin, stop, _ in right(*where)]  # noqa: E731
    monkeypatch.setattr(Schedule, "stretches", ends_nothing)
    run = RowSparseRun([scenario(case)], repeats=range(QUICK_RUNS), root=ROOT)
    run.advance(NUM_STEPS)
    theirs = reference_runs(optimizer, case.sampler, case.problem, QUICK_RUNS, schedule="stairs")
    print("\ncontrol: given at the next rate", end="")
    assert p_of_equal_law(run.params[:, 0].astype(np.float64), theirs, case) < THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "sign"])
def test_another_sampler_is_seen(optimizer):
    """Batches of a fixed size make less gradient noise than Poisson's."""
    case = Case("row_sparse", optimizer, "poisson", "logistic")
    theirs = reference_runs(optimizer, "shuffled", case.problem, RUNS)
    print("\ncontrol: shuffled, not Poisson", end="")
    assert p_of_equal_law(engine_runs(case, RUNS), theirs, case) < THRESHOLD


def last_counts(state: dict[str, np.ndarray]) -> list[str]:
    names = [name for name in state if name.startswith("last")]
    assert names, "the state has no counts of the steps each row has had"
    return names


LAZY = [case for case in CASES if case.engine == "row_sparse" and case.optimizer != "adam" and not case.schedule]


@pytest.mark.slow
@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("case", LAZY, ids=str)
def test_a_count_off_by_one_in_the_flush_is_seen(case, shift):
    """`last` counts the steps that a row has had; shifted by 0, the engine is as it is, flushed after a restore."""
    question, found = scenario(case, num_steps=FEW_STEPS), []
    for first in range(0, RUNS, 400):
        run = RowSparseRun([question], repeats=range(first, first + 400), root=ROOT)
        run.advance(FEW_STEPS)
        state = run.state()
        for name in last_counts(state):
            state[name] = np.minimum(state[name] + shift, FEW_STEPS)
        run.restore(state)
        found.append(run.params[:, 0].astype(np.float64))
    theirs = reference_runs(case.optimizer, case.sampler, case.problem, RUNS, FEW_STEPS)
    print(f"\ncounts shifted by {shift}", end="")
    assert (p_of_equal_law(np.concatenate(found), theirs, case) > THRESHOLD) == (shift == 0)


@pytest.mark.parametrize(
    "optimizer, shift",
    [
        ("sgd", 0),
        pytest.param("sgd", 1, marks=pytest.mark.slow),
        pytest.param("sign", 0, marks=pytest.mark.slow),
        ("sign", -1),
    ],
)
def test_a_count_off_by_one_at_every_touch_is_seen(optimizer, shift):
    """After a step, the rows that it touched count one more than they had (DP-SGD), or one less (DP-SignSGD)."""
    runs, num_steps = 800, 20
    case = Case("row_sparse", optimizer, "shuffled", "logistic")
    run = RowSparseRun([scenario(case, num_steps=num_steps)], repeats=range(runs), root=ROOT)
    for step in range(num_steps):
        before = run.state()
        run.advance(step + 1)
        after = run.state()
        for name in last_counts(after):
            after[name] += shift * (after[name] != before[name])
        run.restore(after)
    theirs = reference_runs(optimizer, case.sampler, case.problem, runs, num_steps)
    print(f"\ncounts shifted by {shift} at every touch", end="")
    assert (p_of_equal_law(run.params[:, 0].astype(np.float64), theirs, case) > THRESHOLD) == (shift == 0)
