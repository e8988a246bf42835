"""The simulation engine against both simulations written out plainly, `train` and `solve` below.

**Equality in law.** As in `tests/contracts/test_engine_law.py`: many runs of a small problem by the engine and by the
plain form; two-sample tests of every coordinate, random projections, the sum of coordinates, |params|^2, the squared
distance from the mean, and the loss: Kolmogorov-Smirnov, means and variances. The smallest p-value times their number
must exceed `THRESHOLD`; the file makes fewer than `COMPARISONS` comparisons, so a correct engine raises a false alarm
less than once in 10^6 choices of the seeds. The seeds were written down before any result: a failing one is a finding,
not a reason to change it.

**Controls.** The same rule must reject a plain form that is a little wrong.
"""

import dataclasses
import itertools
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference
from scipy import special, stats

from noisecast import DPSGD, DPAdam, DPSignSGD, SampledGaussian, Scenario, Stream, engines, quadratic, quartic
from noisecast.engines import _simulate_kernels as kernels
from noisecast.engines.dense import DenseRun
from noisecast.engines.simulate import SimulatedPaths, SimulatedRun
from noisecast.privacy.noise import Purpose, RandomRoot, key_for, key_words
from noisecast.problems.population import Population
from noisecast.runners.sde import GeneralPaths
from noisecast.theory.optimizer_theory import GradientMoments

SEED_ENGINE, SEED_REFERENCE, SEED_DIRECTIONS, SEED_VARIATES = 910_001, 910_002, 910_003, 910_004
RUNS, QUICK_RUNS = 16_000, 2_000
COMPARISONS, FALSE_ALARM = 200, 1e-6
THRESHOLD = FALSE_ALARM / COMPARISONS
ROOT = RandomRoot.from_insecure_seed(SEED_ENGINE)

D, BATCH_SIZE, NUM_STEPS, FEW_STEPS = 9, 3, 40, 8  # D is no multiple of the four numbers a block of counters makes
CURVATURES = np.linspace(0.5, 2.0, D)
OPTIMIZERS = {
    "sgd": (DPSGD(learning_rate=0.05), reference.dp_sgd),
    "sign": (DPSignSGD(learning_rate=0.02), reference.dp_sign_sgd),
    "adam": (DPAdam(learning_rate=0.02, b2=0.95), lambda g, memory, k: reference.dp_adam(g, memory, k, b2=0.95)),
}
PROBLEMS = ("quadratic", "quartic")
NOISES = {"gaussian": np.inf, "nu=1": 1.0, "nu=5": 5.0}
CLIPS = {"clipped": (1.0, 1.0), "unclipped": (25.0, 0.08)}  # C and z


@pytest.fixture(scope="module", autouse=True)
def each_table_once():
    """Tables of clipping take seconds, and many cases share one."""
    tables, prepare = {}, Population.prepare_moments

    def remembered(problem, mechanism):
        asked = problem.fingerprint, mechanism
        if asked not in tables:
            tables[asked] = prepare(problem, mechanism)
        return tables[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Population, "prepare_moments", remembered)
        yield


class Case(NamedTuple):
    optimizer: str
    problem: str
    noise: str
    clipping: str


def scenario(case: Case, *, num_steps=NUM_STEPS, sigma=0.4, z_scale=1.0, delta=1e-5) -> Scenario:
    clip, z = CLIPS[case.clipping]
    noise: dict[str, Any] = {"example_noise_std": sigma, "degrees_of_freedom": NOISES[case.noise]}
    if case.problem == "quadratic":
        problem = quadratic(CURVATURES, 1.0, **noise)
    else:  # two wells in the first coordinate
        curvatures = np.r_[-1.0, CURVATURES[1:]]
        problem = quartic(curvatures, 0.5, quartic_weight=0.5, cubic_weight=0.1, **noise)
    mechanism = SampledGaussian(noise_multiplier=z_scale * z, l2_clip_norm=clip, sampler=Stream(BATCH_SIZE))
    return Scenario(
        problem=problem,
        mechanism=mechanism,
        optimizer=OPTIMIZERS[case.optimizer][0],
        num_steps=num_steps,
        target_delta=delta,
    )


# --- The plain forms --------------------------------------------------------------------------------------------------


def gradient(problem: Any, x: np.ndarray) -> np.ndarray:
    h = np.asarray(problem.hessian_diag, np.float64)
    if isinstance(problem, type(quadratic([1.0], 0.0, example_noise_std=0.0))):
        return h * x
    return h * x + problem.quartic_weight * x**3 - problem.cubic_weight * x**2


def train(question: Scenario, *, runs: int, rng: np.random.Generator, quiet_steps=()) -> np.ndarray:
    """Clip every example's gradient, sum, add noise, divide, step: (runs, d). `quiet_steps` have no privacy noise."""
    problem, mechanism, optimizer = question.problem, question.mechanism, question.optimizer
    direction = next(plain for ours, plain in OPTIMIZERS.values() if type(ours) is type(optimizer))
    x, memory = np.tile(np.asarray(problem.start, np.float64), (runs, 1)), None
    nu, sigma = problem.degrees_of_freedom, problem.example_noise_std
    for step in range(question.num_steps):
        examples = rng.standard_normal((runs, BATCH_SIZE, D))
        if nu < np.inf:
            examples *= np.sqrt(nu / rng.chisquare(nu, (runs, BATCH_SIZE, 1)))
        gradients = gradient(problem, x)[:, None] + sigma * examples
        total = reference.clip(gradients, mechanism.l2_clip_norm).sum(axis=1)
        noise = mechanism.noise_std * rng.standard_normal((runs, D)) * (step not in quiet_steps)
        update, memory = direction((total + noise) / BATCH_SIZE, memory, step)
        x = x - optimizer.learning_rate * update
    return x


def solve(question: Scenario, *, substeps: int, runs: int, rng: np.random.Generator, quiet_steps=()) -> np.ndarray:
    """Euler-Maruyama of dX = b dt + sqrt(eta) gain s dW, b and gain from the theory's own file: (runs, d)."""
    problem, eta, theory = question.problem, question.optimizer.learning_rate, question.optimizer.theory
    table = problem.prepare_moments(question.mechanism)
    log_norms = np.asarray(table.log_norms, np.float64)

    def moments(x: np.ndarray) -> GradientMoments:
        slope = gradient(problem, x)
        at = np.log(np.linalg.norm(slope, axis=1, keepdims=True))

        def look_up(column) -> np.ndarray:
            return np.interp(at, log_norms, np.asarray(column, np.float64))

        shrink = look_up(table.shrink_factors) * np.minimum(1.0, np.exp(log_norms[-1] - at))
        factors = [look_up(column) for column in np.asarray(table.snr_factors).T]
        weights = [look_up(column) for column in np.asarray(table.snr_weights).T]
        return GradientMoments(shrink * slope, look_up(table.noise_stds), np.stack(factors), np.stack(weights))

    x = np.tile(np.asarray(problem.start, np.float64), (runs, 1))
    state = theory.initial_state(moments(x))
    for substep in range(question.num_steps * substeps):
        at = moments(x)
        state = theory.advance_state(state, at, substep / substeps, 1 / substeps)
        noise = at.noise_std * rng.standard_normal(x.shape) * (substep // substeps not in quiet_steps)
        dt = eta / substeps
        x = x + theory.drift(at, state) * dt + np.sqrt(eta * dt) * theory.noise_gain(at, state) * noise
    return x


# --- Two samples of runs ----------------------------------------------------------------------------------------------


def trained(question: Scenario, runs: int) -> np.ndarray:
    """Half of the runs alone; the others in a group of two, restored into another one halfway."""
    half = runs // 2
    alone = SimulatedRun([question], repeats=range(half), root=ROOT)
    alone.advance(question.num_steps)
    group = [dataclasses.replace(question, target_delta=1e-6), question]
    first, second = (SimulatedRun(group, repeats=range(half, runs), root=ROOT) for _ in range(2))
    first.advance(question.num_steps // 2)
    second.restore(first.state())
    second.advance(question.num_steps)
    return np.concatenate([alone.params[:, 0], second.params[:, 1]]).astype(np.float64)


def solved(question: Scenario, runs: int, substeps: int) -> np.ndarray:
    paths = SimulatedPaths([question], repeats=range(runs), root=ROOT, substeps=substeps)
    paths.advance(question.num_steps)
    return paths.params[:, 0].astype(np.float64)


def p_of_equal_law(ours: np.ndarray, theirs: np.ndarray, question: Scenario, *, lattice: bool, label: str) -> float:
    """The smallest of all p-values times their number; prints which it is of."""
    assert np.isfinite(ours).all(), "not finite"
    centre = (ours.mean(axis=0) + theirs.mean(axis=0)) / 2
    a, b = (statistics_of(sample, centre, question, lattice) for sample in (ours, theirs))
    found = {}
    for name in a:
        for i, (x, y) in enumerate(zip(a[name].T, b[name].T)):
            found |= {f"{name} {i} {test}": p for test, p in two_sample_p_values(x, y).items()}
    smallest = min(found, key=found.__getitem__)
    p_value = min(1.0, len(found) * found[smallest])
    print(f"\n{label}, {len(ours)} runs: p = {p_value:.2g} ({len(found)} tests; smallest: {smallest})")
    return p_value


def statistics_of(x: np.ndarray, centre: np.ndarray, question: Scenario, lattice: bool) -> dict[str, np.ndarray]:
    start, rate = np.asarray(question.problem.start, np.float64), question.optimizer.learning_rate
    if lattice:  # DP-SignSGD's coordinates are whole numbers of steps: equal ones must tie
        x = start + rate * np.round((x - start) / rate)
    directions = np.random.default_rng([SEED_DIRECTIONS, D]).normal(size=(6, D)) / np.sqrt(D)
    h = np.asarray(question.problem.hessian_diag, np.float64)
    loss = 0.5 * h * x**2
    if question.problem.name.startswith("quartic"):
        loss = loss + question.problem.quartic_weight * x**4 / 4 - question.problem.cubic_weight * x**3 / 3
    found = {
        "coordinate": x,
        "projection": x @ directions.T,
        "sum": x.sum(axis=1, keepdims=True),
        "|params|^2": np.square(x).sum(axis=1, keepdims=True),
        "|params - mean|^2": np.square(x - centre).sum(axis=1, keepdims=True),
        "loss": loss.sum(axis=1, keepdims=True),
    }
    # Sums over the same numbers in another order must tie too.
    return {name: np.round(values, 9) for name, values in found.items()} if lattice else found


def two_sample_p_values(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    def z(x: np.ndarray, y: np.ndarray) -> float:
        return (x.mean() - y.mean()) / np.hypot(stats.sem(x), stats.sem(y))

    squares = np.square(a - a.mean()), np.square(b - b.mean())
    smirnov: Any = stats.ks_2samp(a, b, method="asymp")
    return {
        "KS": float(smirnov.pvalue),
        "mean": float(2 * stats.norm.sf(abs(z(a, b)))),
        "variance": float(2 * stats.norm.sf(abs(z(*squares)))),
    }


def p_of_training(case: Case, runs: int, *, num_steps=NUM_STEPS, quiet_steps=(), label="", **wrong) -> float:
    question = scenario(case, num_steps=num_steps)
    rng = np.random.default_rng([SEED_REFERENCE, runs])
    theirs = train(scenario(case, num_steps=num_steps, **wrong), runs=runs, rng=rng, quiet_steps=quiet_steps)
    label = f"training {'/'.join(case)} {label}"
    return p_of_equal_law(trained(question, runs), theirs, question, lattice=case.optimizer == "sign", label=label)


def p_of_paths(case: Case, runs: int, *, num_steps=NUM_STEPS, quiet_steps=(), label="", substeps=2, **wrong) -> float:
    question = scenario(case, num_steps=num_steps)
    rng = np.random.default_rng([SEED_REFERENCE, runs])
    theirs = solve(
        scenario(case, num_steps=num_steps, **wrong), substeps=substeps, runs=runs, rng=rng, quiet_steps=quiet_steps
    )
    label = f"paths {'/'.join(case)} {label}"
    return p_of_equal_law(solved(question, runs, substeps), theirs, question, lattice=False, label=label)


# --- Equality in law --------------------------------------------------------------------------------------------------

CASES = [Case(*each) for each in itertools.product(OPTIMIZERS, PROBLEMS, NOISES, CLIPS)]
QUICK = [
    Case("sgd", "quadratic", "gaussian", "unclipped"),
    Case("sign", "quartic", "nu=1", "clipped"),
    Case("adam", "quadratic", "nu=5", "clipped"),
]


@pytest.mark.parametrize("case", QUICK, ids="-".join)
@pytest.mark.parametrize("p_of", [p_of_training, p_of_paths], ids=["training", "paths"])
def test_law_with_few_runs(p_of, case):
    assert p_of(case, QUICK_RUNS) > THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("p_of", [p_of_training, p_of_paths], ids=["training", "paths"])
def test_law(p_of, case):
    assert p_of(case, RUNS) > THRESHOLD


# Wrong plain forms, and after how many steps each shows.
LOUD = ("gaussian", "unclipped")
WRONG: dict[str, tuple[dict[str, Any], int]] = {
    "noise multiplier 3 % high": ({"z_scale": 1.03}, NUM_STEPS),
    "noise multiplier 3 % low": ({"z_scale": 0.97}, NUM_STEPS),
    "first step without noise": ({"quiet_steps": (0,)}, FEW_STEPS),
}
# Examples without a variance, hardly clipped, drown the privacy noise; `test_example_noise_3_percent_off_is_seen`.
HEARD = [case for case in CASES if (case.noise, case.clipping) != ("nu=1", "unclipped")]


@pytest.mark.slow
@pytest.mark.parametrize("case", HEARD, ids="-".join)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("p_of", [p_of_training, p_of_paths], ids=["training", "paths"])
def test_a_wrong_simulation_is_seen(p_of, wrong, case):
    settings, num_steps = WRONG[wrong]
    assert p_of(case, 2 * RUNS, num_steps=num_steps, label=f"control: {wrong}", **settings) < THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("sign", [-1, 0, 1])
def test_example_noise_3_percent_off_is_seen(sign, noise):
    """DP-SGD with examples so noisy that they outweigh the privacy noise; 10 % where clipping hides the heavy tail."""
    scale = 1 + sign * (0.10 if noise == "nu=1" else 0.03)
    case, sigma = Case("sgd", "quadratic", noise, "unclipped"), 4.0
    question = scenario(case, sigma=sigma)
    rng = np.random.default_rng([SEED_REFERENCE, RUNS])
    theirs = train(scenario(case, sigma=scale * sigma), runs=RUNS, rng=rng)
    p = p_of_equal_law(trained(question, RUNS), theirs, question, lattice=False, label=f"{noise}, sigma x {scale}")
    assert (p > THRESHOLD) == (sign == 0)


def test_a_wrong_simulation_is_seen_with_few_runs():
    case = Case("sgd", "quadratic", *LOUD)
    for p_of in (p_of_training, p_of_paths):
        assert p_of(case, QUICK_RUNS, label="control: noise multiplier 8 % high", z_scale=1.08) < THRESHOLD


# --- What follows from how it works -----------------------------------------------------------------------------------


def varied(optimizer: str, size: int = 5) -> list[Scenario]:
    """Scenarios that differ in everything that may differ within a group."""
    question = scenario(Case(optimizer, "quartic", "nu=5", "clipped"))
    return [
        dataclasses.replace(
            question,
            mechanism=SampledGaussian(
                noise_multiplier=0.5 + 0.1 * i, l2_clip_norm=0.8 + 0.3 * i, sampler=Stream(BATCH_SIZE)
            ),
            optimizer=dataclasses.replace(question.optimizer, learning_rate=0.01 + 0.01 * i),
        )
        for i in range(size)
    ]


def simulation(kind: str, scenarios: list[Scenario], repeats) -> Any:
    if kind == "training":
        return SimulatedRun(scenarios, repeats=repeats, root=ROOT)
    return SimulatedPaths(scenarios, repeats=repeats, root=ROOT, substeps=2)


KINDS = ("training", "paths")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_does_not_depend_on_its_group_nor_on_where_it_was_interrupted(kind, optimizer, monkeypatch):
    """Bit for bit: alone, among 5 scenarios x 7 repeats in blocks of 16 lanes, and restored halfway."""
    monkeypatch.setattr("noisecast.engines.simulate.CACHED", 1)
    group = varied(optimizer)
    together, alone = simulation(kind, group, range(7)), simulation(kind, group[3:4], (5,))
    together.advance(17), together.advance(NUM_STEPS), alone.advance(NUM_STEPS)
    np.testing.assert_array_equal(together.params[5, 3], alone.params[0, 0])
    first, resumed = simulation(kind, group, range(7)), simulation(kind, group, range(7))
    first.advance(23)
    state = first.state()
    first.advance(NUM_STEPS)  # a state is a copy
    resumed.restore(state)
    resumed.advance(NUM_STEPS)
    assert resumed.step == NUM_STEPS
    np.testing.assert_array_equal(together.params, resumed.params)
    np.testing.assert_array_equal(together.params, first.params)


def test_a_damaged_state_is_refused():
    run = simulation("training", varied("adam"), range(2))
    state = run.state()
    for wrong in (np.zeros((1, 2), np.float32), np.full_like(state["memory_1"], np.nan)):
        with pytest.raises(ValueError, match="Expected a saved state of finite numbers"):
            run.restore(state | {"memory_1": wrong})


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_noise_training_takes_the_steps_of_the_plain_form(optimizer, problem):
    case = Case(optimizer, problem, "gaussian", "clipped")
    question = scenario(case, sigma=0.0, z_scale=1e-8, num_steps=FEW_STEPS)  # before signs turn, where rounding decides
    run = simulation("training", [question], (0,))
    run.advance(FEW_STEPS)
    plain = train(question, runs=1, rng=np.random.default_rng(SEED_REFERENCE))
    np.testing.assert_allclose(run.params[0], plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("substeps", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_noise_paths_take_the_steps_of_the_plain_form_and_of_the_general_one(optimizer, substeps):
    case = Case(optimizer, "quartic", "gaussian", "clipped")
    question = scenario(case, sigma=0.0, z_scale=1e-8, num_steps=FEW_STEPS)
    asked: dict[str, Any] = {"repeats": (0,), "root": ROOT, "substeps": substeps}
    plain = solve(question, substeps=substeps, runs=1, rng=np.random.default_rng(SEED_REFERENCE))
    for paths in (SimulatedPaths([question], **asked), GeneralPaths([question], **asked)):
        paths.advance(FEW_STEPS)
        # An erf to 6e-7 leaves sqrt(1 - erf^2) = 1e-3 of the noise where there should be none.
        np.testing.assert_allclose(paths.params[0], plain, rtol=1e-4, atol=2e-4)


def test_scenarios_at_one_repeat_see_the_same_examples_and_share_nothing_else():
    """With no privacy noise to speak of, equal questions take equal steps at one repeat, other ones at another."""
    case = Case("sgd", "quadratic", "nu=1", "clipped")
    quiet = [scenario(case, z_scale=1e-8, delta=delta) for delta in (1e-5, 1e-6)]
    run = simulation("training", quiet, range(3))
    run.advance(NUM_STEPS)
    np.testing.assert_allclose(run.params[:, 0], run.params[:, 1], atol=1e-5)
    assert np.abs(run.params[0] - run.params[1]).max() > 0.01
    loud = simulation("training", [scenario(case, delta=delta) for delta in (1e-5, 1e-6)], range(3))
    loud.advance(1)
    assert np.abs(loud.params[:, 0] - loud.params[:, 1]).min() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_independent_across_steps_coordinates_repeats_and_scenarios(kind):
    case = Case("sgd", "quadratic", "gaussian", "unclipped")
    group = [scenario(case, sigma=0.0, delta=1e-5 * (1 + i)) for i in range(4)]
    run = simulation(kind, group, range(40))
    steps, before = [], np.broadcast_to(1.0, run.params.shape)
    decay = 1 - 0.05 * CURVATURES if kind == "training" else (1 - 0.025 * CURVATURES) ** 2
    for step in range(10):
        run.advance(step + 1)
        steps.append(run.params - decay * before)
        before = run.params.astype(np.float64)
    noise = np.stack(steps)  # (steps, repeats, scenarios, coordinates)
    noise /= noise.std(axis=(0, 1, 2))
    assert len(np.unique(noise.round(7))) > 0.99 * noise.size
    for axis in range(4):
        lagged = np.take(noise, range(1, noise.shape[axis]), axis) * np.take(noise, range(noise.shape[axis] - 1), axis)
        assert abs(lagged.mean()) * np.sqrt(lagged.size) < 5


def test_metrics_are_those_of_the_dense_engine():
    group = varied("sgd", 2)
    run, other = simulation("training", group, range(3)), DenseRun(group, repeats=range(3), root=ROOT)
    ours, theirs = run.evaluate(), other.evaluate()
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_explain_says_which_engine_and_why():
    question = scenario(QUICK[0])
    assert "Computed by the engine simulate." in engines.explain(question)
    assert isinstance(engines.start([question], repeats=(0,), root=ROOT), SimulatedRun)


# --- Variates and functions -------------------------------------------------------------------------------------------


@cache
def variate_keys(count: int) -> np.ndarray:
    root = RandomRoot.from_insecure_seed(SEED_VARIATES)
    keys = [key_words(key_for(Purpose.EXAMPLE_NOISE, root=root, repeat=repeat)) for repeat in range(count)]
    return np.ascontiguousarray(np.stack(keys, axis=1))


@pytest.mark.parametrize("degrees_of_freedom", [0.3, 1.0, 2.5, 5.0, 40.0])
def test_student_scales_are_one_over_the_root_of_a_chi_square(degrees_of_freedom):
    """By Kolmogorov-Smirnov and by the mean of the logarithm; 3 % off is seen."""
    keys = variate_keys(64)
    separable = kernels.Separable(np.ones(1, np.float32), *np.float32([0, 0, 1]), degrees_of_freedom)
    # One degree's logarithm varies most.
    drawn = np.zeros((8000 if degrees_of_freedom == 1 else 1000, 64), np.float32)
    for step in range(len(drawn)):
        kernels.noise_scales(drawn[step], separable, np.uint32(step % 3), np.uint32(step), keys)
    chi_square = degrees_of_freedom / np.square(drawn.astype(np.float64)).ravel()
    assert len(np.unique(chi_square)) > 0.99 * chi_square.size
    law, half = stats.chi2(degrees_of_freedom), degrees_of_freedom / 2
    for scale in (1.0, 0.97, 1.03):
        logs = np.log(scale * chi_square)
        z = (logs.mean() - special.digamma(half) - np.log(2)) / np.sqrt(special.polygamma(1, half) / logs.size)
        smallest = min(stats.kstest(scale * chi_square, law.cdf).pvalue, 2 * stats.norm.sf(abs(z)))
        print(f"\nnu = {degrees_of_freedom}, scale {scale}: p = {smallest:.2g}")
        if scale == 1.0:
            assert smallest > 1e-6
        elif degrees_of_freedom >= 1:  # at 0.3 the logarithm varies by 7: 3 % are nothing
            assert smallest < 1e-6


def test_functions_are_what_they_are_called():
    x = np.linspace(-6, 6, 4001).astype(np.float32)
    erf = np.array([kernels.error_function.py_func(value) for value in x])
    assert np.abs(erf - special.erf(x.astype(np.float64))).max() < 1e-6
