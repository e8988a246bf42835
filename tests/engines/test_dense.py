"""The dense engine: the same steps as a plain NumPy loop, reproducible, resumable, independent of its grouping."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

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
    linear_model,
    quadratic,
)
from noisecast.engines import dense
from noisecast.engines.dense import DenseRun
from noisecast.optimizers import OPTIMIZERS
from noisecast.privacy.mechanism import Adjacency
from noisecast.privacy.noise import Purpose, RandomRoot, key_for
from noisecast.problems.datasets import Dataset

N, P = 60, 5
ROOT = RandomRoot.from_insecure_seed(3)
SAMPLERS = {
    "poisson": Poisson.for_batch_size(8, N),
    "fixed-size": FixedSize(8, N),
    "shuffled": Shuffled(8, N),
}


def problem():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(N, P)).astype(np.float32)
    labels = (features[:, 0] + rng.normal(size=N) > 0).astype(np.int32)
    return linear_model(Dataset("toy", features, labels, ("no", "yes")))


PROBLEM = problem()


def scenario(optimizer=None, noise_multiplier=1.0, sampler="poisson", l2_clip_norm=0.5, num_steps=40) -> Scenario:
    adjacency = Adjacency.REPLACE_ONE if sampler == "fixed-size" else Adjacency.ADD_OR_REMOVE_ONE
    mechanism = SampledGaussian(
        noise_multiplier=noise_multiplier, l2_clip_norm=l2_clip_norm, sampler=SAMPLERS[sampler], adjacency=adjacency
    )
    optimizer = optimizer or DPSGD(learning_rate=0.5)
    return Scenario(problem=PROBLEM, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps)


def run_of(*scenarios, repeats=(0,), root=ROOT) -> DenseRun:
    return DenseRun(list(scenarios), repeats=list(repeats), root=root)


def plain_loop(question: Scenario, num_steps: int) -> np.ndarray:
    """The definition, in float64 and without noise: the sampler's batches, gradients one by one, updates by hand."""
    x = np.hstack([np.asarray(PROBLEM.train.rows.values, np.float64), np.ones((N, 1))])
    y = np.asarray(PROBLEM.train.labels)
    sampler, optimizer = question.mechanism.sampler, question.optimizer
    key = key_for(Purpose.BATCHES, PROBLEM.fingerprint, repr(sampler), root=ROOT, repeat=0)
    batches = sampler.batches(key, 0, num_steps, N)
    params, m, v = np.zeros(P + 1), 0.0, 0.0
    for k in range(num_steps):
        total = np.zeros(P + 1)
        for i in batches.indices[k][batches.mask[k]]:
            gradient = (1 / (1 + np.exp(-x[i] @ params)) - y[i]) * x[i]
            total += gradient * min(1.0, question.mechanism.l2_clip_norm / np.linalg.norm(gradient))
        g = total / 8
        if isinstance(optimizer, DPSGD):
            step = g
        elif isinstance(optimizer, DPSignSGD):
            step = np.sign(g)
        else:
            m, v = optimizer.b1 * m + (1 - optimizer.b1) * g, optimizer.b2 * v + (1 - optimizer.b2) * g**2
            m_hat, v_hat = m / (1 - optimizer.b1 ** (k + 1)), v / (1 - optimizer.b2 ** (k + 1))
            step = m_hat / (np.sqrt(v_hat) + optimizer.eps)
        params = params - optimizer.learning_rate * step
    return params


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "optimizer", [DPSGD(learning_rate=0.5), DPSignSGD(learning_rate=0.01), DPAdam(learning_rate=0.01)]
)
def test_without_noise_the_steps_are_those_of_a_plain_loop(sampler, optimizer):
    question = scenario(optimizer, noise_multiplier=0.0, sampler=sampler, num_steps=30)
    run = run_of(question)
    run.advance(30)
    np.testing.assert_allclose(run.params[0, 0], plain_loop(question, 30), rtol=2e-4, atol=2e-6)


@cache
def noise_of_many_first_steps() -> np.ndarray:
    """Of many repeats: what is left after the noiseless step, in units of eta C z / B."""
    clips = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    noisy, quiet = (
        run_of(*[scenario(noise_multiplier=z, l2_clip_norm=c) for c in clips], repeats=range(800)) for z in (1.5, 0.0)
    )
    noisy.advance(1), quiet.advance(1)
    promised = 0.5 * np.array([scenario(noise_multiplier=1.5, l2_clip_norm=c).mechanism.mean_noise_std for c in clips])
    return (np.float64(noisy.params - quiet.params) / promised[:, None]).ravel()


@pytest.mark.parametrize("scale, passes", [(1.0, True), (0.97, False), (1.03, False)])
def test_noise_has_the_scale_of_the_mechanism_divided_by_the_expected_batch_size(scale, passes):
    noise = scale * noise_of_many_first_steps()
    p_value = 2 * min(scipy.stats.chi2.cdf(noise @ noise, noise.size), scipy.stats.chi2.sf(noise @ noise, noise.size))
    assert (p_value > 1e-6) == passes


def test_noise_is_independent_across_steps_coordinates_repeats_and_scenarios():
    questions = [scenario(l2_clip_norm=c) for c in (0.5, 0.6, 0.7)]
    quiet = [scenario(l2_clip_norm=c, noise_multiplier=0.0) for c in (0.5, 0.6, 0.7)]
    steps = []
    for chosen in (questions, quiet):
        run, path = run_of(*chosen, repeats=range(50)), []
        for k in range(1, 9):
            run.restore(run_of(*chosen, repeats=range(50)).state() | {"step": np.int64(k - 1)})
            run.advance(k)
            path.append(run.params.copy())
        steps.append(np.stack(path))
    noise = np.float64(steps[0] - steps[1])  # (steps, repeats, scenarios, coordinates), each from the same start
    noise /= noise.std()
    assert len(np.unique(np.round(noise.ravel(), 6))) > 0.99 * noise.size  # nothing is used twice
    for axis in range(4):
        lagged = np.take(noise, range(1, noise.shape[axis]), axis) * np.take(noise, range(noise.shape[axis] - 1), axis)
        assert abs(lagged.mean()) * np.sqrt(lagged.size) < 5


@pytest.mark.parametrize("optimizer", [cls(learning_rate=0.1) for cls in OPTIMIZERS])
def test_a_run_does_not_depend_on_its_group(optimizer):
    one, other = scenario(optimizer), scenario(optimizer, noise_multiplier=2.0, l2_clip_norm=0.25)
    together, alone = run_of(one, other, repeats=(0, 1)), run_of(other, repeats=(1,))
    together.advance(20), alone.advance(20)
    # The same noise and batches; sums over a group may round in another order.
    np.testing.assert_allclose(together.params[1, 1], alone.params[0, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [cls(learning_rate=0.1) for cls in OPTIMIZERS])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(optimizer, sampler, monkeypatch):
    monkeypatch.setattr(dense, "DRAWS_PER_CHUNK", 72 * 16)  # several chunks in 40 steps
    whole, first = run_of(scenario(optimizer, sampler=sampler)), run_of(scenario(optimizer, sampler=sampler))
    whole.advance(40), first.advance(17)
    resumed = run_of(scenario(optimizer, sampler=sampler))
    resumed.restore(first.state())
    resumed.advance(23), resumed.advance(40)
    np.testing.assert_array_equal(whole.params, resumed.params)


def test_optimizers_at_one_seed_see_the_same_batches_and_seeds_differ():
    quiet = {
        cls: run_of(scenario(cls(learning_rate=1e-6), noise_multiplier=0.0), repeats=(0, 1)) for cls in (DPSGD, DPAdam)
    }
    for run in quiet.values():
        run.advance(1)
    # At a vanishing learning rate the first DP-Adam step is the sign of the first DP-SGD step.
    np.testing.assert_array_equal(np.sign(quiet[DPSGD].params), np.sign(quiet[DPAdam].params))
    assert not np.array_equal(quiet[DPSGD].params[0], quiet[DPSGD].params[1])


def test_an_empty_batch_still_adds_noise():
    nobody = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=0.5, sampler=Poisson(1e-9, 8))
    run = run_of(Scenario(problem=PROBLEM, mechanism=nobody, optimizer=DPSGD(learning_rate=1.0), num_steps=3))
    run.advance(3)
    assert (run.params != 0).all()


def test_the_normaliser_is_the_declared_one_not_the_drawn_one():
    """Twice the declared batch size, same draws: half the step."""
    steps = []
    for expected in (8, 16):
        mechanism = SampledGaussian(noise_multiplier=0.0, l2_clip_norm=0.5, sampler=Poisson(1.0, expected))
        run = run_of(Scenario(problem=PROBLEM, mechanism=mechanism, optimizer=DPSGD(learning_rate=1.0), num_steps=1))
        run.advance(1)
        steps.append(run.params)
    np.testing.assert_allclose(steps[0], 2 * steps[1], rtol=1e-6)


def test_problems_and_samplers_that_do_not_fit_are_refused_in_a_sentence():
    population = quadratic(np.ones(2), 1.0, example_noise_std=0.1)
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson(0.1, 8))
    stream = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Stream(8))
    for wrong, word in [((population, mechanism), "Stream"), ((PROBLEM, stream), "Poisson")]:
        question = Scenario(problem=wrong[0], mechanism=wrong[1], optimizer=DPSGD(learning_rate=1.0), num_steps=1)
        assert word in (dense.why_unsupported(question) or "")


def test_float32_everywhere_and_finite():
    run = run_of(scenario())
    run.advance(40)
    assert run.params.dtype == np.float32 and np.isfinite(run.params).all()
    assert jnp.asarray(run.params).shape == (1, 1, P + 1)
