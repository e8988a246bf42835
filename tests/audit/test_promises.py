"""What every engine promises, as checks that a planted bug fails (`python -m mutants` plants them).

Each statistical check states the chance with which it fails on correct code: `FALSE_ALARM` for one p-value, of which a
check makes a few. Nothing here asks the library what its noise should be: that is told by the epsilon it accounts.
"""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from dp_accounting import get_epsilon_gaussian
from scipy import optimize, stats

from noisecast import (
    DPSGD,
    DPAdam,
    DPSignSGD,
    Poisson,
    PrivacyLedger,
    SampledGaussian,
    Scenario,
    Schedule,
    Shuffled,
    Stream,
    calibrate_noise_multiplier,
    engines,
    epsilon_spent,
    jax_model,
    linear_model,
    train,
)
from noisecast.audit import canary
from noisecast.audit.white_box import white_box_audit
from noisecast.checkpoint import Checkpoint, save_checkpoint
from noisecast.ledger import Account
from noisecast.model_dir import save_model
from noisecast.privacy.mechanism import Adjacency
from noisecast.privacy.noise import Purpose, RandomRoot, key_for
from noisecast.problems.datasets import Dataset, MatrixEncoder
from noisecast.problems.linear import Labelled
from noisecast.problems.rows import rows_from

FALSE_ALARM = 1e-6
ADD, REPLACE = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE
FULL = Shuffled(2, 2)  # everybody in every batch; Poisson(1.0, 2) draws the same at fifty times the cost
LANES = 64


def gaussian(sampler, adjacency=ADD, z=1.0, clip=1.0) -> SampledGaussian:
    return SampledGaussian(noise_multiplier=z, l2_clip_norm=clip, sampler=sampler, adjacency=adjacency)


def z_behind_epsilon(mechanism: SampledGaussian, num_steps: int, farthest: float) -> float:
    """The noise multiplier at which unsampled steps with sums `farthest` clip norms apart have the stated epsilon."""
    epsilon = epsilon_spent(mechanism, num_steps=num_steps, target_delta=1e-5).epsilon
    ratio = optimize.brentq(lambda log_z: get_epsilon_gaussian(math.exp(log_z), 1e-5) - epsilon, -4, 8, xtol=1e-10)
    return math.exp(ratio) * farthest * math.sqrt(num_steps)


def released(scenario: Scenario, root: RandomRoot, runs: int) -> np.ndarray:
    """Parameters moved in each of `runs` runs with noise of their own, bias left out; (runs, columns)."""
    group = [replace(scenario, target_delta=0.5 / (1 + lane)) for lane in range(LANES)]
    run = engines.start(group, repeats=range(-(-runs // LANES)), root=root)
    run.advance(scenario.num_steps)
    moved = run.params.astype(np.float64).reshape(-1, scenario.problem.num_params)[:runs]
    moved -= np.asarray(scenario.problem.initial_params(), np.float64)
    return moved if scenario.problem.num_examples is None else moved[:, 1:-1]


def chi_square_p(noise: np.ndarray) -> float:
    """Two-sided p-value of numbers that should be N(0, 1)."""
    total = float(np.sum(noise**2))
    return 2 * min(stats.chi2.cdf(total, noise.size), stats.chi2.sf(total, noise.size))


# --- Noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
@pytest.mark.parametrize("engine", ["row_sparse", "dense", "simulate"])
def test_dp_sgd_draws_the_noise_that_is_accounted(engine, adjacency, root):
    """Columns that a row touches at every step, and those that only noise moves; 16,000 numbers and more see 8 %."""
    num_steps = 1 if engine == "simulate" else 3
    mechanism = gaussian(Stream(1) if engine == "simulate" else FULL, adjacency)
    z = z_behind_epsilon(mechanism, num_steps, 2.0 if adjacency == REPLACE else 1.0)
    for scenario, shift in zip(canary.pair(mechanism, DPSGD(learning_rate=1.0), engine, num_steps), (1.0, 0.0)):
        moved = released(scenario, root, 4096 if engine == "simulate" else 1024)
        rate = scenario.optimizer.learning_rate / mechanism.expected_batch_size
        if shift == 0.0 and adjacency == REPLACE:
            shift = -1.0
        moved[:, : canary.WIDTH] -= shift * num_steps * rate * mechanism.l2_clip_norm / math.sqrt(canary.WIDTH)
        noise = moved / (rate * z * mechanism.l2_clip_norm * math.sqrt(num_steps))
        own, others = noise[:, : canary.WIDTH], noise[:, canary.WIDTH :]
        for part in (own, others) if others.size else (own,):
            assert chi_square_p(part) > FALSE_ALARM, f"standard deviation {part.std():.4f} of what is accounted"
        assert chi_square_p(1.08 * own) < FALSE_ALARM  # the check's own control: 8 % would be seen


@pytest.mark.parametrize("optimizer", [DPSignSGD, DPAdam])
@pytest.mark.parametrize("engine", ["row_sparse", "dense", "simulate"])
def test_signs_are_as_noisy_as_is_accounted(engine, optimizer, root):
    """One step of either is the sign of the noisy sum: up with probability Phi(C / (z sqrt(16) C)) a column."""
    mechanism = gaussian(Stream(1) if engine == "simulate" else FULL)
    z = z_behind_epsilon(mechanism, 1, 1.0)
    inside, outside = canary.pair(mechanism, optimizer(learning_rate=1.0), engine, 1)
    for scenario, chance in ((inside, stats.norm.cdf(0.25 / z)), (outside, 0.5)):
        up = released(scenario, root, 8_000)[:, : canary.WIDTH] > 0
        heads = int(up.sum())
        p_value = 2 * min(stats.binom.cdf(heads, up.size, chance), stats.binom.sf(heads - 1, up.size, chance))
        assert p_value > FALSE_ALARM, f"{heads / up.size:.4f} up, {chance:.4f} accounted"


@pytest.mark.parametrize("engine", ["row_sparse", "dense"])
@pytest.mark.parametrize("optimizer", [DPSGD, DPSignSGD])
def test_postponed_noise_is_neither_lost_nor_given_twice(engine, optimizer, root):
    """The canary's rows wait three steps of four: 8 steps of noise must have come, of whatever was postponed."""
    num_steps, runs = 8, 256
    inside, outside = canary.pair(gaussian(Shuffled(1, 4)), optimizer(learning_rate=1.0), engine, num_steps)
    for scenario, times in ((inside, 2), (outside, 0)):
        moved = released(scenario, root, runs)
        rate = scenario.optimizer.learning_rate
        if optimizer is DPSGD:
            moved[:, : canary.WIDTH] -= times * rate / math.sqrt(canary.WIDTH)
            assert chi_square_p(moved[:, : canary.WIDTH] / (rate * math.sqrt(num_steps))) > FALSE_ALARM
        else:
            coins = np.round(moved / rate)
            assert (coins % 2 == num_steps % 2).all() and np.abs(coins).max() <= num_steps
            others = coins[:, canary.WIDTH :]
            law = stats.binom(num_steps, 0.5).pmf(np.arange(num_steps + 1)) * others.size
            counts = np.bincount(((others + num_steps) / 2).astype(int).ravel(), minlength=num_steps + 1)
            # Columns of one run are independent coins, and so are runs.
            assert stats.chisquare(counts, law).pvalue > FALSE_ALARM


@pytest.mark.parametrize("optimizer", [DPSGD, DPSignSGD])
def test_postponed_noise_is_of_the_rate_it_was_postponed_at(optimizer, root):
    """Five steps at the rate and three at a quarter of it, in columns that only noise moves."""
    before, after, factor = 5, 3, 0.25
    _, scenario = canary.pair(gaussian(Shuffled(1, 4)), optimizer(learning_rate=1.0), "row_sparse", before + after)
    moved = released(replace(scenario, schedule=Schedule((0, before), (1.0, factor))), root, 256)
    moved = moved[:, canary.WIDTH :] / scenario.optimizer.learning_rate
    if optimizer is DPSGD:
        assert chi_square_p(moved / math.sqrt(before + factor**2 * after)) > FALSE_ALARM
    else:  # heads of the coins before, times four, and of those after
        code = np.round((moved + before + factor * after) / (2 * factor)).astype(int)
        law = np.outer(stats.binom(before, 0.5).pmf(range(before + 1)), stats.binom(after, 0.5).pmf(range(after + 1)))
        counts = np.bincount(code.ravel(), minlength=law.size)
        assert stats.chisquare(counts, law.ravel() * code.size).pvalue > FALSE_ALARM


@pytest.mark.parametrize("engine", ["row_sparse", "dense"])
def test_noise_is_used_once(engine, root):
    """Uncorrelated between scenarios of a group, repeats, columns and steps."""
    _, scenario = canary.pair(gaussian(FULL), DPSGD(learning_rate=1.0), engine, 3)
    group = [replace(scenario, target_delta=0.5 / (1 + lane)) for lane in range(16)]
    run = engines.start(group, repeats=range(8), root=root)
    path = [np.zeros((8, 16, scenario.problem.num_params))]
    for step in range(1, 4):
        run.advance(step)
        path.append(run.params.astype(np.float64))
    noise = np.diff(np.stack(path), axis=0)[..., 1:-1]  # (steps, repeats, scenarios, columns)
    noise /= noise.std()
    for axis, name in enumerate(("steps", "repeats", "scenarios", "columns")):
        count = noise.shape[axis]
        products = np.take(noise, range(1, count), axis) * np.take(noise, range(count - 1), axis)
        z = products.mean() * math.sqrt(products.size) / products.std()
        assert 2 * stats.norm.sf(abs(z)) > FALSE_ALARM, f"neighbouring {name} share noise: z = {z:.1f}"


# --- Batches, and what is kept of a run -------------------------------------------------------------------------------


def q_behind_epsilon(mechanism: SampledGaussian, delta: float = 1e-3) -> float:
    """The sampling probability at which one Poisson-sampled step has the stated epsilon, by its own formula.

    delta = (1 - q) P(X > x) + q P(X > x - 1) - e^epsilon P(X > x), X ~ N(0, z^2), x where the densities' ratio is
    e^epsilon.
    """
    z, epsilon = mechanism.noise_multiplier, epsilon_spent(mechanism, num_steps=1, target_delta=delta).epsilon

    def excess(q: float) -> float:
        x = z**2 * math.log((math.exp(epsilon) - 1 + q) / q) + 0.5
        beyond, farther = stats.norm.sf(x / z), stats.norm.sf((x - 1) / z)
        return (1 - q) * beyond + q * farther - math.exp(epsilon) * beyond - delta

    return optimize.brentq(excess, 0.02, 0.98)


@pytest.mark.parametrize("engine", ["row_sparse", "dense"])
def test_batches_are_drawn_as_they_are_accounted(engine, root):
    """How often a record was in the batch, of 16,000 steps, against the q that the accounted epsilon stands for."""
    num_steps, repeats = 64, 256
    sampler = Poisson(0.25, 1.0)
    inside, _ = canary.pair(gaussian(sampler, z=0.01), DPSGD(learning_rate=1.0), engine, num_steps)
    run = engines.start([inside], repeats=range(repeats), root=root)
    run.advance(num_steps)
    times = np.rint(canary.along_canary(run.params[:, 0], inside) / inside.optimizer.learning_rate)
    q, count = q_behind_epsilon(gaussian(sampler)), num_steps * repeats
    p_value = 2 * min(stats.binom.cdf(times.sum(), count, q), stats.binom.sf(times.sum() - 1, count, q))
    assert p_value > FALSE_ALARM, f"{times.sum() / count:.4f} drawn, {q:.4f} accounted"
    assert stats.binom.sf(1.1 * q * count, count, q) < FALSE_ALARM  # the check's own control: 10 % would be seen


def test_later_steps_have_batches_of_their_own(root, monkeypatch):
    """Some thousands of steps' are drawn at once; of which steps, decides nothing."""
    inside, _ = canary.pair(gaussian(Poisson(0.25, 1.0), z=0.01), DPSGD(learning_rate=1.0), "row_sparse", 64)
    found = []
    for at_once in (64, 8):
        monkeypatch.setattr(engines.row_sparse, "STEPS_PER_CHUNK", at_once)
        run = engines.start([inside], repeats=[0], root=root)
        run.advance(64)
        found.append(run.params)
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("engine", ["row_sparse", "dense"])
def test_a_resumed_run_is_the_run(engine, root, tmp_path):
    """Other noise for steps that were taken before would be a second release of them."""
    inside, _ = canary.pair(gaussian(FULL), DPSGD(learning_rate=1.0), engine, 8)
    run, path = engines.start([inside], repeats=[0], root=root), tmp_path / "run.checkpoint"
    run.advance(3)
    save_checkpoint(path, Checkpoint(inside.id, root, run.state()))
    run.advance(8)
    resumed = train(inside, checkpoint=path, resume=True).params
    np.testing.assert_array_equal(resumed, engines.released_params(run, inside))


def test_a_ledger_knows_of_a_run_before_its_first_step(tmp_path):
    inside, _ = canary.pair(gaussian(FULL), DPSGD(learning_rate=1.0), "row_sparse", 8)
    ledger = PrivacyLedger(tmp_path / "privacy.ledger", create=True)
    ledger.set_budget("data", epsilon=1e3, delta=1e-5)

    def crash(moment) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(inside, account=Account(ledger, "data"), watch=crash)
    assert len(ledger.entries("data")) == 1


# --- Sensitivity ------------------------------------------------------------------------------------------------------


def crowd() -> tuple[np.ndarray, np.ndarray]:
    """Nine rows with gradients hundreds of clip norms long, all to one side, and one that is short."""
    rows = np.zeros((10, 40), np.float32)
    rows[:, 0] = 1e3
    rows[np.arange(10), 1 + np.arange(10)] = np.linspace(100, 2e3, 10)
    rows[9] = 0.01
    labels = np.ones(10, np.int32)
    labels[9] = 0
    return rows, labels


@pytest.mark.parametrize("engine", ["row_sparse", "dense", "dense, jax_model"])
def test_a_record_moves_the_sum_by_at_most_the_clip_norm(engine, root):
    """Through the engine: parameters after one step with and without each row, next to no noise."""
    rows, labels = crowd()
    clip, batch_size = 0.7, 5.0

    def one_step(keep: np.ndarray) -> np.ndarray:
        problem = canary._model(rows[keep], labels[keep], engine.split(",")[0])
        if engine.endswith("jax_model"):

            def loss(params, example):
                x, y = example
                margin = jnp.where(y == 1, 1.0, -1.0) * (x @ params["w"] + params["b"])
                return jnp.logaddexp(0.0, -margin)

            start = {"b": np.zeros((), np.float32), "w": np.zeros(rows.shape[1], np.float32)}
            problem = jax_model(loss, start, (rows[keep], labels[keep]))
        mechanism = gaussian(Poisson(1.0, batch_size), z=1e-7, clip=clip)
        question = Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=1.0), num_steps=1)
        run = engines.start([question], repeats=[0], root=root)
        run.advance(1)
        return run.params[0, 0].astype(np.float64) * batch_size

    whole = one_step(np.ones(10, bool))
    *long, short = (np.linalg.norm(whole - one_step(np.arange(10) != i)) for i in (0, 4, 8, 9))
    assert max(*long, short) <= clip * (1 + 1e-5), f"a record moves the sum by {max(*long, short) / clip:.4g} C"
    assert min(long) > 0.999 * clip  # and is cut to C, no shorter
    assert np.linalg.norm(whole) > 5 * clip  # one by one, not the sum


@pytest.mark.parametrize("kind", ["linear", "jax_model"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_row_that_is_not_finite_poisons_nothing(kind, value, root):
    rows = np.ones((6, 5), np.float32)
    rows[2, 1] = value
    labels = np.arange(6, dtype=np.int32) % 2
    if kind == "linear":
        problem = linear_model(Dataset("rows", np.ones((6, 5), np.float32), labels, ("0", "1")))
        problem = replace(problem, train=Labelled(rows_from(rows), problem.train.labels))
    else:
        problem = jax_model(lambda w, example: 0.5 * (example[0] @ w) ** 2 + example[0] @ w, np.zeros(5, np.float32),
                            (rows, labels))  # fmt: skip
    everyone = problem.examples(jnp.arange(6), jnp.ones(6, bool))
    without = problem.examples(jnp.arange(6), jnp.arange(6) != 2)
    params = 0.1 * jnp.ones(problem.num_params)
    sums = [np.asarray(problem.clipped_sum(params, batch, 1.0), np.float64) for batch in (everyone, without)]
    assert np.isfinite(sums[0]).all()
    assert np.linalg.norm(sums[0] - sums[1]) <= (0.0 if not np.isfinite(value) else 1 + 1e-5)


# --- Accounting -------------------------------------------------------------------------------------------------------


def test_shuffled_batches_earn_no_amplification():
    for size, num_steps, epochs in ((4, 16, 4), (1, 100, 7), (8, 3, 2)):
        sampler = Shuffled(size, 16)
        unsampled = get_epsilon_gaussian(1.0 / math.sqrt(epochs), 1e-5)
        found = epsilon_spent(gaussian(sampler), num_steps=num_steps, target_delta=1e-5).epsilon
        assert found >= unsampled * (1 - 1e-9)


@pytest.mark.parametrize(
    "sampler, adjacency, num_steps, targets",
    [
        (FULL, ADD, 4, (0.5, 1.7, 4.0)),  # exact, and so quick to ask
        (FULL, REPLACE, 3, (0.5, 1.7, 4.0)),
        (Poisson(0.2, 8), ADD, 20, (1.0,)),  # the search comes by a noise multiplier that is 0.6 % short
    ],
)
def test_calibration_errs_on_the_private_side(sampler, adjacency, num_steps, targets):
    for target in targets:
        mechanism = calibrate_noise_multiplier(
            gaussian(sampler, adjacency), target_epsilon=target, target_delta=1e-5, num_steps=num_steps
        )
        spent = epsilon_spent(mechanism, num_steps=num_steps, target_delta=1e-5).epsilon
        assert spent <= target < 1.03 * spent


@pytest.mark.parametrize("q, z, num_steps", [(0.01, 1.0, 1000), (0.01, 2.0, 2000), (0.002, 4.0, 10_000)])
def test_the_renyi_epsilon_is_not_below_that_of_the_loss_distribution(q, z, num_steps):
    """The second lies at most 1 % above the least epsilon that holds."""
    found = epsilon_spent(gaussian(Poisson(q, 100.0), z=z), num_steps=num_steps, target_delta=1e-5).details
    assert isinstance(found["PLD"], float), found  # a Renyi epsilon far too small would spare the other its trouble
    assert found["RDP"] >= 0.99 * found["PLD"]


def test_a_ledger_counts_every_run(tmp_path):
    ledger = PrivacyLedger(tmp_path / "privacy.ledger", create=True)
    ledger.set_budget("data", epsilon=20.0, delta=1e-5)
    for run in range(1, 4):
        ledger.spend("data", gaussian(FULL, z=4.0), 1, what="a model", run=str(run))
        assert ledger.spent("data").epsilon >= 0.999 * get_epsilon_gaussian(4.0 / math.sqrt(run), 1e-5)
    ledger.set_budget("other", epsilon=20.0, delta=1e-5)
    ledger.spend("other", gaussian(FULL, REPLACE, z=4.0), 1, what="a model", run="a")
    assert ledger.spent("other").epsilon >= 0.999 * get_epsilon_gaussian(2.0, 1e-5)


def test_a_release_has_no_seed():
    """Who trains twice gets two models, and neither is the one of a seed that somebody could guess."""
    inside, _ = canary.pair(gaussian(FULL), DPSGD(learning_rate=1.0), "row_sparse", 1)
    one, other = (train(inside).params[1:-1] for _ in range(2))
    # Two draws are the same float32 about once in 10^7; more than one column of them is no chance.
    assert np.count_nonzero(one == other) < 2


# --- What is released beside the parameters, and what it says -------------------------------------------------------


def dataset(last: float, num_classes: int = 2) -> Dataset:
    """200 rows of which the last is given; all but a few of 2,000 columns are empty."""
    rows = np.zeros((200, 2000), np.float32)
    rows[:, :3] = np.random.default_rng(0).normal(size=(200, 3))
    rows[-1, 0] = last
    labels = np.arange(200, dtype=np.int32) % num_classes
    return Dataset("rows", scipy.sparse.csr_array(rows), labels, tuple(map(str, range(num_classes))))


def question(data: Dataset) -> Scenario:
    mechanism = gaussian(Poisson(0.1, 20.0))
    return Scenario(problem=linear_model(data), mechanism=mechanism, optimizer=DPSGD(learning_rate=1.0), num_steps=5)


def test_files_beside_the_parameters_tell_nothing_of_a_record(tmp_path):
    found = []
    for last in (0.25, -0.5):
        folder, data = tmp_path / str(last), dataset(last)
        save_model(folder, train(question(data)), encoder=MatrixEncoder(2000), label_names=data.label_names)
        own = {"parameters.npz", "non_private.json"}
        found.append({each.name: each.read_text() for each in folder.iterdir() if each.name not in own})
    assert len(found[0]) == 3 and found[0] == found[1]


def test_secure_noise_comes_from_the_cipher_and_nothing_else_says_so(root):
    secure = RandomRoot(root.secret, None, secure_noise=True)
    key = key_for(Purpose.BATCHES, "a", root=secure, repeat=0)
    of_cipher, of_philox = (Poisson(0.1, 20.0).batches(each, 0, 64, 200).indices for each in (key, bytes(key)))
    assert of_cipher.shape != of_philox.shape or (of_cipher != of_philox).any()
    assert "ChaCha20" in train(question(dataset(0.0)), secure_noise=True).statement.noise
    assert "ChaCha20" not in train(question(dataset(0.0))).statement.noise
    run = engines.start([question(dataset(0.0, num_classes=3))], repeats=[0], root=secure)
    run.advance(5)
    outputs = run.params[0, 0].reshape(-1, 3)[3:-1]
    for r in np.corrcoef(outputs.T)[np.triu_indices(3, 1)]:
        assert 2 * stats.norm.sf(abs(r) * math.sqrt(len(outputs))) > FALSE_ALARM, f"outputs share noise: r = {r:.2f}"


# --- Audits -----------------------------------------------------------------------------------------------------------

AUDIT_DELTA = 0.1  # an attack is sharpest where the event is common: a tenth of all runs may betray the canary


@pytest.mark.parametrize(
    "engine, optimizer, sampler, adjacency, num_steps",
    [
        ("row_sparse", DPSGD, FULL, ADD, 2),
        ("row_sparse", DPSignSGD, FULL, ADD, 2),
        ("row_sparse", DPSGD, FULL, REPLACE, 2),
        ("row_sparse", DPSGD, Shuffled(1, 4), ADD, 8),
        ("dense", DPSGD, FULL, ADD, 2),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value).split("(")[0],
)
def test_an_attack_proves_no_more_than_is_accounted(engine, optimizer, sampler, adjacency, num_steps, root):
    mechanism = gaussian(sampler, adjacency, z=1.2 * (2 if adjacency == REPLACE else 1))
    runs = 8_000 if mechanism.sampling_probability == 1 else 300
    verdict = white_box_audit(
        mechanism, optimizer(learning_rate=1.0), engine=engine, num_steps=num_steps, target_delta=AUDIT_DELTA,
        root=root, runs=runs, confidence=1 - FALSE_ALARM,
    )  # fmt: skip
    print(f"\n{verdict.what}: {verdict.bound.epsilon:.3f} <= {verdict.epsilon:.3f}")
    assert verdict.is_consistent, verdict.contradiction()
    if mechanism.sampling_probability == 1 and optimizer is DPSGD:  # with power to spare, whatever the seed
        assert verdict.bound.epsilon >= verdict.epsilon / 3
