"""Every engine has the law of the plain trainer in `tests/engines/reference.py`, and what follows from how it works.

**Equality in law.** A small problem is trained many times by an engine and by the reference. Two-sample tests compare
every coordinate, random projections, the first descent direction, |moved|^2 and the loss: Kolmogorov-Smirnov, means
and variances. The smallest p-value times their number (Bonferroni) must exceed `THRESHOLD`; the file makes fewer than
`COMPARISONS` comparisons, so correct engines raise a false alarm less than once in 10^6 choices of the seeds below. The
seeds were written down before any result: a failing one is a finding, not a reason to change it.

**Controls.** The same rule must reject an engine that is a little wrong. Sixteen thousand runs cannot see one step's
noise missing from 120 (0.8 % of a variance), so those controls train 40 steps. `pytest -s` shows the numbers.
"""

import dataclasses
import itertools
import sys
import zlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numba
import numpy as np
import pytest
import scipy.sparse
from scipy import stats

from noisecast import (
    DPSGD,
    DPAdam,
    DPSignSGD,
    FixedSize,
    Poisson,
    SampledGaussian,
    Scenario,
    Shuffled,
    Stream,
    engines,
    linear_model,
    matrix_factorization,
    quadratic,
)
from noisecast.engines import _kernels, dense, row_sparse
from noisecast.engines.dense import DenseRun
from noisecast.engines.row_sparse import RowSparseRun
from noisecast.engines.simulate import SimulatedRun
from noisecast.optimizers import CONSTANT, Schedule
from noisecast.privacy.mechanism import Adjacency
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.clipping import NORM_SLACK
from noisecast.problems.datasets import Dataset, Ratings, label_sets

sys.path.append(str(Path(__file__).parents[1] / "engines"))
import reference  # pyright: ignore[reportMissingImports]

SEED_DATA, SEED_ENGINE, SEED_REFERENCE, SEED_DIRECTIONS = 900_001, 900_002, 900_003, 900_004
RUNS, QUICK_RUNS = 16_000, 2_000
COMPARISONS, FALSE_ALARM = 200, 1e-6
THRESHOLD = FALSE_ALARM / COMPARISONS

N, BATCH_SIZE, NUM_STEPS, FEW_STEPS = 160, 8, 120, 40
NOISE_MULTIPLIER, CLIP = 1.0, 0.6
ENGINES: dict[str, Any] = {"row_sparse": RowSparseRun, "dense": DenseRun}
OPTIMIZERS = {
    "sgd": (DPSGD(learning_rate=1.0), reference.dp_sgd),
    "sign": (DPSignSGD(learning_rate=0.03), reference.dp_sign_sgd),
    "adam": (DPAdam(learning_rate=0.03), reference.dp_adam),
}
SAMPLERS = {
    "poisson": (Poisson.for_batch_size(BATCH_SIZE, N), reference.poisson(N, BATCH_SIZE)),
    "fixed-size": (FixedSize(BATCH_SIZE, N), reference.fixed_size(N, BATCH_SIZE)),
    "shuffled": (Shuffled(BATCH_SIZE, N), reference.shuffled(N, BATCH_SIZE)),
}
# The learning rate of every step, and the largest number of which all of them are multiples (what a sign moves by).
STAIRS = [1.0] * 37 + [0.5] * 53 + [2.0] * 30
SCHEDULES = {"": (CONSTANT, None, 1.0), "stairs": (Schedule((0, 37, 90), (1.0, 0.5, 2.0)), STAIRS, 0.5)}
PROBLEMS = ("logistic", "softmax", "multi-label", "factorization")
ROOT = RandomRoot.from_insecure_seed(SEED_ENGINE)


class Case(NamedTuple):
    engine: str
    optimizer: str
    sampler: str
    problem: str
    schedule: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, self))


def sparse_features(num_features: int, num_never: int) -> np.ndarray:
    """(N, num_features), four non-zeros a row: a few common columns, many rare ones, and some that never occur."""
    rng = np.random.default_rng([SEED_DATA, num_features])
    popularity = 1.0 / (1 + np.arange(num_features - num_never)) ** 1.2
    features = np.zeros((N, num_features), np.float32)
    for row in features:
        at = rng.choice(len(popularity), 4, replace=False, p=popularity / popularity.sum())
        row[at] = rng.choice([-1, 1], 4) * rng.uniform(0.3, 1.2, 4)
    return features


@cache
def ratings() -> Ratings:
    """Twelve users and twelve items, of which two and three have no rating; some have many, some one or two."""
    rng = np.random.default_rng([SEED_DATA, 5])
    popularity = 1.0 / (1 + np.arange(10)) ** 1.2
    user = rng.choice(10, N, p=popularity / popularity.sum())
    item = rng.choice(9, N, p=popularity[:9] / popularity[:9].sum())
    taste = rng.normal(size=(2, 12, 2))
    rating = np.clip(np.round(3 + (taste[0, user] * taste[1, item]).sum(axis=1) + 0.5 * rng.normal(size=N)), 1, 5)
    return Ratings(user, item, rating, num_users=12, num_items=12)


@cache
def problem(name: str):
    if name == "factorization":
        return matrix_factorization(ratings(), dim=3, init_std=0.3, public_init_seed=SEED_DATA)
    shapes = {"logistic": (60, 6, 2), "softmax": (19, 2, 3), "multi-label": (22, 2, 3)}
    num_features, num_never, num_classes = shapes[name]
    features = sparse_features(num_features, num_never)
    rng = np.random.default_rng([SEED_DATA, num_classes])
    scores = features @ rng.normal(size=(num_features, num_classes)) + rng.gumbel(size=(N, num_classes))
    labels = (scores + np.arange(num_classes)).argmax(axis=1).astype(np.int32)
    if name == "multi-label":  # none to all of three
        labels = label_sets([np.flatnonzero(row > 1) for row in scores])
    data = Dataset(name, scipy.sparse.csr_array(features), labels, tuple("abc"[:num_classes]))
    return linear_model(data)


@cache
def model(name: str) -> Any:
    data = problem(name)
    if name == "factorization":
        start = np.asarray(data.initial_params(), np.float64)
        return reference.Factorization(ratings().user, 12 + ratings().item, ratings().rating - 3.0, 3, start)
    inputs = np.hstack([sparse_features(data.num_features, 6 if name == "logistic" else 2), np.ones((N, 1))])
    return reference.Model(inputs.astype(np.float64), np.asarray(data.train.labels), data.num_outputs)


def scenario(case: Case, *, num_steps=NUM_STEPS, z=NOISE_MULTIPLIER, clip=CLIP, rate=1.0, delta=1e-5) -> Scenario:
    optimizer = OPTIMIZERS[case.optimizer][0]
    adjacency = Adjacency.REPLACE_ONE if case.sampler == "fixed-size" else Adjacency.ADD_OR_REMOVE_ONE
    mechanism = SampledGaussian(
        noise_multiplier=z, l2_clip_norm=clip, sampler=SAMPLERS[case.sampler][0], adjacency=adjacency
    )
    return Scenario(
        problem=problem(case.problem),
        mechanism=mechanism,
        optimizer=dataclasses.replace(optimizer, learning_rate=rate * optimizer.learning_rate),
        num_steps=num_steps,
        target_delta=delta,
        schedule=SCHEDULES[case.schedule][0],
    )


# --- Two samples of runs ----------------------------------------------------------------------------------------------


@cache
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


@cache
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
    print(f"\n{case}, {len(ours)} runs: p = {p_value:.2g} ({count} tests; smallest: {smallest})")
    return p_value


# --- Equality in law --------------------------------------------------------------------------------------------------

CASES = [Case(e, o, s, p) for p in PROBLEMS for s in SAMPLERS for o in OPTIMIZERS for e in ENGINES]
CASES += [Case(e, o, "poisson", "logistic", "stairs") for o in OPTIMIZERS for e in ENGINES]
QUICK = [
    Case("row_sparse", "sgd", "poisson", "logistic"),
    Case("row_sparse", "sign", "poisson", "logistic"),
    Case("row_sparse", "sgd", "shuffled", "softmax"),
    Case("row_sparse", "adam", "fixed-size", "softmax"),
    Case("row_sparse", "sgd", "poisson", "multi-label"),
    Case("row_sparse", "sgd", "fixed-size", "factorization"),
    Case("row_sparse", "adam", "shuffled", "factorization"),
    Case("dense", "sgd", "poisson", "logistic"),
    *(Case("row_sparse", optimizer, "poisson", "logistic", "stairs") for optimizer in ("sgd", "sign")),
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


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_law(case):
    theirs = reference_runs(case.optimizer, case.sampler, case.problem, RUNS, schedule=case.schedule)
    assert p_of_equal_law(engine_runs(case, RUNS), theirs, case) > THRESHOLD


# --- Controls: each must be seen --------------------------------------------------------------------------------------

# Wrong trainers, and the optimizers whose law they change: sign(g) does not know what g was divided by.
WRONG: dict[str, tuple[dict, tuple[str, ...], int]] = {
    "noise multiplier 3 % high": ({"z": 1.03 * NOISE_MULTIPLIER}, ("sgd", "sign", "adam"), NUM_STEPS),
    "noise multiplier 3 % low": ({"z": 0.97 * NOISE_MULTIPLIER}, ("sgd", "sign", "adam"), NUM_STEPS),
    "clip norm 5 % high, same noise": (
        {"clip": 1.05 * CLIP, "z": NOISE_MULTIPLIER / 1.05}, ("sgd", "sign", "adam"), NUM_STEPS,
    ),
    "divided by the drawn size": ({"batch_size": None}, ("sgd", "adam"), NUM_STEPS),
    "first step without noise": ({"quiet_steps": (0,)}, ("sgd", "sign", "adam"), FEW_STEPS),
    # Not DP-Adam: its last step is a tenth of one among forty, and 16,000 runs do not see it (p = 0.98).
    "last step without noise": ({"quiet_steps": (FEW_STEPS - 1,)}, ("sgd", "sign"), FEW_STEPS),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("wrong, optimizer", [(wrong, o) for wrong in WRONG for o in WRONG[wrong][1]])
def test_a_wrong_trainer_is_seen(wrong, optimizer):
    settings, _, num_steps = WRONG[wrong]
    case = Case("row_sparse", optimizer, "poisson", "logistic")
    theirs = reference_runs(optimizer, case.sampler, case.problem, RUNS, num_steps, **settings)
    print(f"\ncontrol: {wrong}", end="")
    assert p_of_equal_law(engine_runs(case, RUNS, num_steps), theirs, case) < THRESHOLD


@pytest.mark.parametrize("wrong", ["noise multiplier 3 % high", "divided by the drawn size"])
def test_a_wrong_trainer_is_seen_with_few_runs(wrong):
    case = Case("row_sparse", "sgd", "poisson", "logistic")
    theirs = reference_runs("sgd", case.sampler, case.problem, QUICK_RUNS, **WRONG[wrong][0])
    print(f"\ncontrol: {wrong}", end="")
    assert p_of_equal_law(engine_runs(case, QUICK_RUNS), theirs, case) < THRESHOLD


@pytest.mark.parametrize("optimizer", ["sgd", "sign"])
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


@pytest.mark.slow
@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("optimizer", ["sgd", "sign"])
def test_a_count_off_by_one_in_the_flush_is_seen(optimizer, shift):
    """`last` counts the steps that a row has had; shifted by 0, the engine is as it is, flushed after a restore."""
    case = Case("row_sparse", optimizer, "poisson", "logistic")
    question, found = scenario(case, num_steps=FEW_STEPS), []
    for first in range(0, RUNS, 400):
        run = RowSparseRun([question], repeats=range(first, first + 400), root=ROOT)
        run.advance(FEW_STEPS)
        state = run.state()
        for name in last_counts(state):
            state[name] = np.minimum(state[name] + shift, FEW_STEPS)
        run.restore(state)
        found.append(run.params[:, 0].astype(np.float64))
    theirs = reference_runs(optimizer, case.sampler, case.problem, RUNS, FEW_STEPS)
    print(f"\ncounts shifted by {shift}", end="")
    assert (p_of_equal_law(np.concatenate(found), theirs, case) > THRESHOLD) == (shift == 0)


@pytest.mark.parametrize("optimizer, shift", [("sgd", 0), ("sgd", 1), ("sign", 0), ("sign", -1)])
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


# --- A run is its own: groups, repeats, resuming (of the dense engine, see its own tests too) -------------------------


def varied(case: Case, size: int) -> list[Scenario]:
    """Scenarios that differ in everything that may differ within a group."""
    return [
        scenario(case, z=0.8 + 0.05 * i, clip=0.4 + 0.03 * i, rate=1 + 0.1 * (i % 5), num_steps=FEW_STEPS)
        for i in range(size)
    ]


@pytest.mark.parametrize("case", [Case("row_sparse", o, "poisson", p) for o in OPTIMIZERS for p in PROBLEMS], ids=str)
def test_a_run_does_not_depend_on_its_group(case):
    """Alone, among three, sixteen and twenty: lanes that fill whole vectors are drawn in a loop of their own."""
    found = {}
    for size in (1, 3, 16, 20):
        group = varied(case, 20)
        group = [*group[20 - size : 19], group[7]]  # number 7 is always the last
        run = ENGINES[case.engine](group, repeats=(2, 5), root=ROOT)
        run.advance(FEW_STEPS)
        found[size] = run.params[:, -1]
    for size in (3, 16, 20):
        np.testing.assert_allclose(found[size], found[1], rtol=1e-4, atol=2e-5)


def test_lanes_that_fill_a_vector_are_computed_for_nothing_and_dropped():
    """Nine runs take sixteen lanes: what comes out are the nine, as each is alone; and the state can be continued."""
    case = next(case for case in CASES if case.engine == "row_sparse" and case.problem == "logistic")
    group = varied(case, 9)
    run, again = (RowSparseRun(group, repeats=[3], root=ROOT) for _ in range(2))
    run.advance(FEW_STEPS)
    again.restore(run.state())
    for each in (run, again):
        assert each.params.shape[:2] == (1, 9)
        assert {value.shape for value in each.evaluate().values()} == {(1, 9)}
        np.testing.assert_array_equal(each.params, run.params)
    alone = RowSparseRun(group[4:5], repeats=[3], root=ROOT)
    alone.advance(FEW_STEPS)
    np.testing.assert_allclose(run.params[0, 4], alone.params[0, 0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("engine, optimizer", [*(("row_sparse", o) for o in OPTIMIZERS), ("dense", "sgd")])
def test_neighbours_in_a_group_and_repeats_share_no_noise(engine, optimizer):
    """Rows that nothing touches move by noise alone: uncorrelated between scenarios, repeats and coordinates."""
    case = Case(engine, optimizer, "poisson", "logistic")
    group = [scenario(case, delta=1e-5 * (1 + i), num_steps=FEW_STEPS) for i in range(9)]
    run = ENGINES[engine](group, repeats=range(100), root=ROOT)
    run.advance(FEW_STEPS)
    never = np.flatnonzero(~(model("logistic").inputs != 0).any(axis=0))
    noise = run.params[:, :, never].astype(np.float64)  # (repeats, scenarios, rows)
    noise /= noise.std()

    def largest_z(samples: np.ndarray) -> float:
        """Of products of neighbours along each axis."""
        z = []
        for axis in range(3):
            size = samples.shape[axis]
            products = np.take(samples, range(1, size), axis) * np.take(samples, range(size - 1), axis)
            z.append(abs(products.mean()) * np.sqrt(products.size) / products.std())
        return max(z)

    print(f"{engine} {optimizer}: largest z {largest_z(noise):.2f}")
    assert largest_z(noise) < 5.5
    shared = noise + 0.5 * noise[:, :1]  # control: neighbours share a part
    assert largest_z(shared) > 5.5


@pytest.mark.parametrize("engine", ENGINES)
def test_repeats_draw_batches_of_their_own_and_scenarios_at_one_repeat_share_them(engine):
    case = Case(engine, "sgd", "poisson", "logistic")
    group = [scenario(case, z=1e-7, num_steps=FEW_STEPS, delta=delta) for delta in (1e-5, 1e-6)]
    run = ENGINES[engine](group, repeats=range(4), root=ROOT)
    run.advance(FEW_STEPS)
    params = run.params
    np.testing.assert_allclose(params[:, 0], params[:, 1], atol=2e-5)
    for i in range(4):
        for j in range(i):
            assert np.abs(params[i] - params[j]).max() > 0.1


def a_run(case: Case, repeats=(0, 1)) -> Any:
    group = [scenario(case, num_steps=NUM_STEPS, delta=delta) for delta in (1e-5, 1e-6, 1e-7)]
    return ENGINES[case.engine](group, repeats=repeats, root=ROOT)


@pytest.mark.parametrize("looking", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        *(Case("row_sparse", o, "poisson", "softmax") for o in OPTIMIZERS),
        *(Case("row_sparse", o, "poisson", "softmax", "stairs") for o in OPTIMIZERS),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(case, looking):
    """Stopped at any steps, and evaluated at any: both runs at the same ones."""
    rng = np.random.default_rng([SEED_DATA, zlib.crc32(repr(case).encode())])
    stops = [*sorted(rng.choice(np.arange(1, NUM_STEPS), 5, replace=False).tolist()), NUM_STEPS]
    whole, piece = a_run(case), a_run(case)
    for stop in stops:
        whole.advance(stop)
        state = piece.state()
        piece = a_run(case)
        piece.restore(state)
        piece.advance(stop)
        if looking:
            metrics, again = whole.evaluate(), piece.evaluate()
            assert all((metrics[name] == again[name]).all() for name in metrics)
    np.testing.assert_array_equal(whole.params, piece.params)
    if not looking:  # and how often it was stopped does not matter
        straight = a_run(case)
        straight.advance(NUM_STEPS)
        np.testing.assert_array_equal(straight.params, whole.params)


@pytest.mark.parametrize("case", [Case("row_sparse", o, "poisson", "logistic") for o in OPTIMIZERS], ids=str)
def test_a_run_can_go_back_to_an_earlier_state(case):
    """What a run has in hand besides its state must not outlive a restore."""
    run = a_run(case)
    run.advance(50)
    state = run.state()
    run.advance(51)
    once = run.params
    run.restore(state)
    run.advance(51)
    np.testing.assert_array_equal(run.params, once)


# --- Postponed noise is never missing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("problem_name", PROBLEMS)
def test_looking_gives_what_was_postponed_first(optimizer, problem_name):
    """Metrics and parameters are those of one and the same flushed iterate, in whatever order they are asked for."""
    case = Case("row_sparse", optimizer, "poisson", problem_name)
    one, other = a_run(case), a_run(case)
    one.advance(37)
    other.advance(37)
    metrics, params = one.evaluate(), one.params
    np.testing.assert_array_equal(params, other.params)
    np.testing.assert_array_equal(params, one.params)
    assert all((metrics[name] == other.evaluate()[name]).all() for name in metrics)
    assert (params != 0).mean() > 0.9  # sign's coins may have come out even
    exact = model(problem_name).loss(params.reshape(-1, params.shape[-1]).astype(np.float64))
    np.testing.assert_allclose(metrics["loss"].ravel(), exact, rtol=1e-5)
    plain = dense.evaluate(problem(problem_name), jnp.asarray(params), jnp.full(params.shape[1], CLIP))
    assert plain.keys() == metrics.keys()
    for name in plain:
        # A margin within rounding of the clip norm, or of 0, may fall on either side.
        slack = 1.01 / N if name in ("accuracy", "micro_f1", "clip_fraction") else 0.0
        np.testing.assert_allclose(metrics[name], plain[name], rtol=2e-5, atol=slack, err_msg=name)


@cache
def untouched_problem():
    """Two thousand columns, of which examples only have the first."""
    features = scipy.sparse.csr_array((np.ones(N, np.float32), (np.arange(N), np.zeros(N, int))), shape=(N, 2000))
    return linear_model(Dataset("untouched", features, np.arange(N, dtype=np.int32) % 2, ("a", "b")))


def untouched_params(optimizer: str, looks: tuple[int, ...], kept=slice(None), repeats=range(20)) -> np.ndarray:
    """Rows that nothing ever touches, in units of one step, after each look: (looks, repeats, scenarios, rows)."""
    question = scenario(Case("row_sparse", optimizer, "shuffled", "logistic"))
    group = [
        dataclasses.replace(question, problem=untouched_problem(), num_steps=400, target_delta=1e-5 * (1 + i))
        for i in range(16)
    ]
    run, found = RowSparseRun(group[kept], repeats=repeats, root=ROOT), []
    unit = question.optimizer.learning_rate
    if optimizer == "sgd":
        unit *= question.mechanism.mean_noise_std
    for look in looks:
        run.advance(look)
        found.append(run.params[:, :, 1:-1].astype(np.float64) / unit)
    return np.stack(found)


LOOKS = [(1,), (5,), (31,), (32,), (33,), (64,), (160,), (161,), (300,), (3, 4, 40), (32, 64, 200, 333)]


@pytest.mark.parametrize("looks", LOOKS, ids=str)
def test_rows_never_touched_have_the_variance_of_all_steps(looks):
    """DP-SGD: N(0, k) in units of one step's noise, however often it was flushed on the way; k (1 +- 2 %) is seen."""
    sums = untouched_params("sgd", looks)
    gaps = np.diff(looks, prepend=0)
    pieces = np.diff(sums, axis=0, prepend=0) / np.sqrt(gaps)[:, None, None, None]
    p_values = {}
    for off in (0.98, 1.0, 1.02):
        statistic, count = np.sum(sums[-1] ** 2) / (looks[-1] * off), sums[-1].size
        p_values[off] = 2 * min(stats.chi2.cdf(statistic, count), stats.chi2.sf(statistic, count))
    print(f"looks {looks}: chi-square p of k, and of k 2 % off: {p_values}")
    assert p_values[1.0] > THRESHOLD > max(p_values[0.98], p_values[1.02])
    assert stats.kstest(pieces[-1].ravel()[:200_000], "norm").pvalue > THRESHOLD
    for earlier, later in itertools.pairwise(pieces):
        assert abs(np.mean(earlier * later)) * np.sqrt(later.size) < 5.5


@pytest.mark.parametrize("looks", LOOKS, ids=str)
def test_rows_never_touched_have_had_all_their_coins(looks):
    """DP-SignSGD: 2 Binomial(k, 1/2) - k, by chi-square over its values; beyond 32 coins there are several words."""
    sums = untouched_params("sign", looks)
    values = np.round(sums)
    assert np.abs(sums - values).max() < 0.01
    k = looks[-1]
    heads = (values[-1].ravel() + k) / 2
    assert (heads == np.round(heads)).all() and heads.min() >= 0 and heads.max() <= k

    def p_of(coins: int, law: Any) -> float:
        counts = np.bincount(heads.astype(int), minlength=coins + 1)[: coins + 1]
        expected = law.pmf(np.arange(coins + 1)) * heads.size
        common = expected >= 10
        if common.all():
            return float(stats.chisquare(counts, expected).pvalue)
        rest = [counts[~common].sum()], [expected[~common].sum()]
        return float(
            stats.chisquare([*counts[common], *rest[0]], [*expected[common], *rest[1]], sum_check=False).pvalue
        )

    p, control = p_of(k, stats.binom(k, 0.5)), p_of(k, stats.binom(k, 0.505))
    print(f"looks {looks}: p = {p:.3g} of fair coins, {control:.3g} of coins 0.505")
    assert p > THRESHOLD > control
    for earlier, later in zip(np.diff(values, axis=0, prepend=0), np.diff(values, axis=0)):
        assert abs(np.mean(earlier * later)) * np.sqrt(later.size) / (earlier.std() * later.std()) < 5.5


@pytest.mark.parametrize("looks", LOOKS, ids=str)
def test_one_run_alone_has_the_coins_that_it_has_among_others(looks):
    """One lane counts its coins along rows, many along lanes: the very same ones."""
    together, alone = untouched_params("sign", looks), untouched_params("sign", looks, slice(7, 8), [3])
    np.testing.assert_allclose(alone[:, 0, 0], together[:, 3, 7], rtol=0, atol=1e-2)
    assert np.abs(alone[:, 0, 0] - together[:, 3, 6]).max() > 1


# --- The two engines, and what neither may choke on -------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("problem_name", PROBLEMS)
def test_engines_agree_where_noise_does_not_matter(sampler, problem_name):
    """The same keys give the same batches, so without noise they take the same steps; DP-SGD at z = 10^-7."""
    found = []
    for engine in ENGINES:
        case = Case(engine, "sgd", sampler, problem_name)
        group = [scenario(case, z=1e-7, clip=clip) for clip in (0.2, 0.6, 5.0)]
        run = ENGINES[engine](group, repeats=(0, 3), root=ROOT)
        run.advance(NUM_STEPS)
        found.append(run.params)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=2e-5)


def test_explain_says_which_engine_and_why():
    sparse = scenario(Case("row_sparse", "sgd", "poisson", "logistic"))
    assert engines.explain(sparse) == "Computed by the engine row_sparse."
    quiet = dataclasses.replace(sparse, mechanism=sparse.mechanism.with_noise_multiplier(0.0))
    population = Scenario(
        problem=quadratic(np.ones(2), 1.0, example_noise_std=0.1),
        mechanism=SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Stream(8)),
        optimizer=DPSGD(learning_rate=0.1),
        num_steps=3,
    )
    rows = np.random.default_rng(SEED_DATA).normal(size=(N, 5)).astype(np.float32)
    dense_rows = linear_model(Dataset("dense", rows, np.arange(N, dtype=np.int32) % 2, ("a", "b")))
    for question, why in [
        (quiet, "Without noise there is nothing to postpone."),
        (dataclasses.replace(sparse, problem=dense_rows), "is not a linear model on sparse rows"),
    ]:
        sentence = engines.explain(question)
        assert sentence.startswith("Computed by the engine dense. Not by row_sparse: ") and why in sentence
        assert engines.group_key(question) != engines.group_key(sparse)
        assert isinstance(engines.start([question], repeats=(0,), root=ROOT), DenseRun)
    assert engines.explain(population).startswith("Computed by the engine simulate. Not by row_sparse: ")
    assert isinstance(engines.start([population], repeats=(0,), root=ROOT), SimulatedRun)
    assert isinstance(engines.start([sparse], repeats=(0,), root=ROOT), RowSparseRun)
    assert row_sparse.why_unsupported(sparse) is None


def residuals_of_one(likelihood: int, outputs: int, length: float, clip: float, logits: np.ndarray) -> np.ndarray:
    """Clipped residuals of examples of norm `length`, label 0, with these logits: (examples, outputs)."""
    out = logits.astype(np.float32)
    n = len(out)
    examples = _kernels.Examples(
        begin=np.zeros(n, np.int64), end=np.zeros(n, np.int64), indices=np.zeros(0, np.uint32),
        values=np.zeros(0, np.float32), labels=np.zeros((n, 1), np.int32),
        norms=np.full(n, length * NORM_SLACK, np.float32), likelihood=likelihood,
    )  # fmt: skip
    lanes = row_sparse._lanes([scenario(Case("row_sparse", "sgd", "poisson", "logistic"), clip=clip)], outputs, ROOT, 0)
    clip_residuals(examples, np.arange(n), lanes, outputs, out)
    return out


@numba.njit
def clip_residuals(examples, batch, lanes, outputs, out):
    """Pieces of a kernel have no form that Python could call."""
    if examples.likelihood == _kernels.LOGISTIC:
        _kernels._clip_logistic(examples, batch, lanes, out)
    elif examples.likelihood == _kernels.SOFTMAX:
        _kernels._clip_softmax(examples, batch, lanes, outputs, out)
    else:
        _kernels._clip_multi_label(examples, batch, lanes, outputs, out)


@pytest.mark.parametrize("likelihood, outputs", [(0, 1), (1, 2), (1, 3), (1, 500), (2, 1), (2, 500)])
@pytest.mark.parametrize("clip", [1e-4, 1.0])
def test_a_confident_example_alone_is_no_longer_than_the_clip_norm(likelihood, outputs, clip):
    """Where the model is nearly sure, residuals are differences of nearly equal numbers: margins of -20 to 20."""
    logits = np.zeros((2001, outputs))
    logits[:, 0] = np.linspace(-20, 20, 2001)
    for length in (1.0, 1e2, 1e4, 1e6):
        clipped = residuals_of_one(likelihood, outputs, length, clip, logits).astype(np.float64)
        lengths = np.linalg.norm(clipped, axis=1) * length
        assert lengths.max() <= clip, f"length {length:g}: {lengths.max() / clip} C"
        assert lengths.max() > 0.99 * min(clip, 0.5 * length)  # and is cut to C, no shorter


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hostile_rows_move_a_sum_by_no_more_than_the_clip_norm(optimizer, num_classes):
    """Values up to the end of float32: parameters stay finite, and no example counts for more than any other."""
    rng = np.random.default_rng(SEED_DATA)
    features = np.zeros((N, 20), np.float32)
    for row in features:
        row[rng.choice(20, 4, replace=False)] = rng.normal(size=4)
    hostile = [1e4, 1e9, 1e18, -1e18, 1e19, -1e30, 3e38]
    for i, value in enumerate(hostile):
        features[i, np.flatnonzero(features[i])[0]] = value
    labels = rng.integers(0, num_classes, N).astype(np.int32)
    data = linear_model(Dataset("hostile", scipy.sparse.csr_array(features), labels, tuple("abc"[:num_classes])))
    question = scenario(Case("row_sparse", optimizer, "poisson", "logistic"))
    question = dataclasses.replace(question, problem=data)
    assert row_sparse.why_unsupported(question) is None
    run = RowSparseRun([question, dataclasses.replace(question, target_delta=1e-6)], repeats=range(5), root=ROOT)
    run.advance(NUM_STEPS)
    assert np.isfinite(run.params).all()
    if optimizer == "sgd":  # every example, one step, next to no noise: the step is at most n C / B long
        mechanism = SampledGaussian(noise_multiplier=1e-7, l2_clip_norm=CLIP, sampler=Poisson(1.0, 1.0))
        quiet = dataclasses.replace(question, mechanism=mechanism, num_steps=2)
        found = []
        for engine in (RowSparseRun, DenseRun):
            one = engine([quiet], repeats=(0,), root=ROOT)
            one.advance(1)
            found.append(one.params)
            one.advance(2)  # from weights along hostile rows, where logits overflow
            assert np.isfinite(one.params).all()
            assert np.linalg.norm(one.params - found[-1]) <= N * CLIP * (1 + 1e-5)
        np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=2e-5)
