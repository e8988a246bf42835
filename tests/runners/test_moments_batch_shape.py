"""DP-SignSGD where few examples make a batch, of very different size: its signs feel more than two moments."""

from dataclasses import replace

import numpy as np
import pytest

from noisecast import DPSGD, DPAdam, DPSignSGD, FixedSize, Poisson, SampledGaussian, Scenario, answer, linear_model
from noisecast.privacy.sampling import Adjacency
from noisecast.problems.datasets import Dataset
from noisecast.problems.linear import SOFTMAX
from noisecast.runners import Training
from noisecast.runners.moments import Moments, logistic_field
from noisecast.runners.moments.batch_shape import BatchShape

CLOSURE = Moments(most_runs=0)  # alone: no runs take its place

SEED_DATA, SEED_TRAINING = 640_101, 640_102
BATCH_SIZE, NUM_STEPS = 24, 600


def heavy_tails(num_examples=600, num_features=60):
    """Student's t with 1.7 degrees of freedom, in half of the columns one entry in twenty only."""
    rng = np.random.default_rng(SEED_DATA)
    features = 0.3 * rng.standard_t(1.7, size=(num_examples, num_features))
    features[:, ::2] *= rng.random((num_examples, num_features // 2)) < 0.05
    labels = (rng.random(num_examples) < 1 / (1 + np.exp(-features[:, :6] @ rng.normal(size=6)))).astype(np.int32)
    return linear_model(Dataset("toy", features.astype(np.float32), labels, ("no", "yes")))


def asked(problem, learning_rate: float, noise_multiplier: float = 0.05) -> Scenario:
    sampler = Poisson.for_batch_size(BATCH_SIZE, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=noise_multiplier, l2_clip_norm=4.0, sampler=sampler)
    optimizer = DPSignSGD(learning_rate=learning_rate)
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=NUM_STEPS)


@pytest.mark.slow
def test_signs_of_heavy_tailed_batches_are_as_trained(monkeypatch):
    """Loss and its spread at three rates; by two moments alone both are seen to be too low."""
    problem = heavy_tails()
    rows = []
    for learning_rate in (0.003, 0.01, 0.03):
        scenario = asked(problem, learning_rate)
        seeds = range(SEED_TRAINING, SEED_TRAINING + 150)
        table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=[NUM_STEPS])
        loss = table[(table.metric == "loss") & (table.step == NUM_STEPS)].value
        assert loss.sem() / loss.mean() < 0.005
        found = CLOSURE.forecast(scenario, [NUM_STEPS])
        with monkeypatch.context() as patch:
            patch.setattr(logistic_field.BatchShape, "of", lambda *_, **__: None)
            by_two_moments = CLOSURE.forecast(scenario, [NUM_STEPS])
        trained = np.array([loss.mean(), loss.std()])
        rows.append([[f.metrics[name][-1] for name in ("loss", "loss_std")] / trained for f in (found, by_two_moments)])
        assert not found.extrapolated[-1]
    by_shape, by_moments = np.array(rows).transpose(1, 0, 2)
    print(f"\nloss, spread against training: {by_shape.round(3).tolist()}; two moments {by_moments.round(3).tolist()}")
    assert abs(by_shape[:, 0] - 1).max() < 0.02 and by_moments[1:, 0].max() < 0.97
    assert abs(by_shape[:, 1] - 1).max() < 0.25 and by_moments[1:, 1].max() < 0.8


def categories(num_examples=200):
    """One-hot columns of few examples each, labels that they explain well."""
    rng = np.random.default_rng(SEED_DATA + 1)
    columns = [np.eye(k)[rng.choice(k, num_examples, p=rng.dirichlet(np.full(k, 0.7)))] for k in (2, 3, 5, 7, 30, 60)]
    features = np.hstack(columns)
    margin = features @ rng.normal(size=features.shape[1])
    margin = 3 * (margin - margin.mean()) / margin.std()
    labels = (rng.random(num_examples) < 1 / (1 + np.exp(-margin))).astype(np.int32)
    return linear_model(Dataset("toy", features.astype(np.float32), labels, ("no", "yes")))


def table(num_examples=100, num_features=8, likelihood=None):
    rng = np.random.default_rng(SEED_DATA + 2)
    features = rng.normal(size=(num_examples, num_features))
    labels = (rng.random(num_examples) < 1 / (1 + np.exp(-features @ rng.normal(size=num_features)))).astype(np.int32)
    data = Dataset("toy", features.astype(np.float32), labels, ("no", "yes"))
    return linear_model(data, likelihood=likelihood)


def error_of_final_loss(scenario: Scenario, num_seeds: int, *, extrapolated: bool = False) -> float:
    seeds = range(SEED_TRAINING, SEED_TRAINING + num_seeds)
    trained = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=[scenario.num_steps])
    loss = trained[(trained.metric == "loss") & (trained.step == scenario.num_steps)].value
    assert loss.sem() / loss.mean() < 0.006
    found = CLOSURE.forecast(scenario, [scenario.num_steps])
    assert found.extrapolated[-1] == extrapolated
    return found.metrics["loss"][-1] / loss.mean() - 1


def sampled(problem, batch_size: int, learning_rate: float) -> Scenario:
    sampler = Poisson.for_batch_size(batch_size, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=0.05, l2_clip_norm=1.0, sampler=sampler)
    optimizer = DPSignSGD(learning_rate=learning_rate)
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=NUM_STEPS)


@pytest.mark.parametrize(
    "batch_size", [pytest.param(50, marks=pytest.mark.slow), pytest.param(120, marks=pytest.mark.slow), 200]
)
def test_batches_of_much_of_the_data_are_as_trained(monkeypatch, batch_size):
    """Each example is drawn once at most; batches that draw it any number of times are seen to be others."""
    problem, shape = categories(), BatchShape.of
    scenario = sampled(problem, batch_size, learning_rate=0.005)
    steep = {"extrapolated": batch_size == 200}  # learning rate times curvature is 1.4, and yet it holds
    error = error_of_final_loss(scenario, 100, **steep)
    drawn = {"probability": 0.0}
    monkeypatch.setattr(logistic_field.BatchShape, "of", lambda *a, **named: shape(*a, **(named | drawn)))
    by_poisson = error_of_final_loss(scenario, 100, **steep)
    print(f"\nB = {batch_size}: {error:+.3f}, Poisson {by_poisson:+.3f}")
    assert abs(error) < 0.01
    assert by_poisson > (0.015 if batch_size == 50 else 0.04)


@pytest.mark.parametrize("likelihood", [None, SOFTMAX], ids=["one output", "two outputs"])
def test_batches_of_exactly_one_are_as_trained(monkeypatch, likelihood):
    """No batch is empty, none holds two: batches of one on average are seen to be others."""
    problem, shape = table(200, likelihood=likelihood), BatchShape.of
    sampler = FixedSize(1, 200)
    mechanism = SampledGaussian(
        noise_multiplier=0.05, l2_clip_norm=1.0, sampler=sampler, adjacency=Adjacency.REPLACE_ONE
    )
    optimizer = DPSignSGD(learning_rate=0.003)
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=NUM_STEPS)
    error = error_of_final_loss(scenario, 100)
    monkeypatch.setattr(BatchShape, "of", lambda *a, **named: shape(*a, **(named | {"exactly": None})))
    on_average = error_of_final_loss(scenario, 100)
    print(f"\n{error:+.3f}, one on average {on_average:+.3f}")
    assert abs(error) < 0.015 and on_average > 0.03


def test_batches_of_one_that_throw_their_example_say_so():
    """At three times the best rate the loss of 60 dense columns was forecast 7 % too low, known to 1.5 %."""
    problem = table(400, 60)
    mechanism = SampledGaussian(
        noise_multiplier=0.05, l2_clip_norm=1.0, sampler=FixedSize(1, 400), adjacency=Adjacency.REPLACE_ONE
    )
    found = []
    for learning_rate in (0.025, 0.008):
        optimizer = DPSignSGD(learning_rate=learning_rate)
        scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=NUM_STEPS)
        found.append(CLOSURE.forecast(scenario, []))
    assert [bool(each.extrapolated[-1]) for each in found] == [True, False]
    assert "A batch moves the outputs" in found[0].reasons[0]


def test_means_of_signs_go_where_single_steps_lead(monkeypatch):
    """Small batches of a plain table at a large rate: E sign points against the mean force for most of the run.

    A stiffness of their quotient, whatever its size, is seen to lead elsewhere.
    """
    scenario = sampled(table(), batch_size=4, learning_rate=0.03)
    error = error_of_final_loss(scenario, 400)

    def quotient(law, expected, gain):
        return np.maximum(expected / law.mean, gain)

    monkeypatch.setattr(logistic_field, "chord", quotient)
    elsewhere = error_of_final_loss(scenario, 400)
    print(f"\n{error:+.3f}, by the quotient {elsewhere:+.3f}")
    assert abs(error) < 0.02
    assert abs(elsewhere) > 0.03


def test_only_columns_that_the_noise_does_not_blur_are_looked_at(monkeypatch):
    """At much noise none, so that a forecast costs what it did; DP-SGD and DP-Adam never look."""
    problem, of, counts = heavy_tails(), BatchShape.of, []

    def counted(*args, **named):
        counts.append(of(*args, **named))
        return counts[-1]

    monkeypatch.setattr(logistic_field.BatchShape, "of", counted)
    for noise_multiplier in (0.05, 0.3, 1.0, 3.0):
        CLOSURE.forecast(asked(problem, 0.01, noise_multiplier), [NUM_STEPS])
    heavy = [0 if shape is None else int(shape.heavy.sum()) for shape in counts]
    print(heavy)
    assert heavy == sorted(heavy, reverse=True)
    assert heavy[0] == problem.num_features and 0 < heavy[1] < heavy[0] and heavy[-1] == 0
    for optimizer in (DPSGD(learning_rate=0.1), DPAdam(learning_rate=0.01)):
        CLOSURE.forecast(replace(asked(problem, 0.01), optimizer=optimizer), [NUM_STEPS])
    assert len(counts) == 4
