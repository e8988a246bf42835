"""DP-SignSGD where few examples make a batch, of very different size: its signs feel more than two moments."""

from dataclasses import replace

import numpy as np

from noisecast import DPSGD, DPAdam, DPSignSGD, Poisson, SampledGaussian, Scenario, answer, linear_model
from noisecast.problems.datasets import Dataset
from noisecast.runners import Training
from noisecast.runners.moments import Moments, logistic
from noisecast.runners.moments.batch_shape import BatchShape

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
        found = Moments().forecast(scenario, [NUM_STEPS])
        with monkeypatch.context() as patch:
            patch.setattr(logistic.BatchShape, "of", lambda *_, **__: None)
            by_two_moments = Moments().forecast(scenario, [NUM_STEPS])
        trained = np.array([loss.mean(), loss.std()])
        rows.append([[f.metrics[name][-1] for name in ("loss", "loss_std")] / trained for f in (found, by_two_moments)])
        assert not found.extrapolated[-1]
    by_shape, by_moments = np.array(rows).transpose(1, 0, 2)
    print(f"\nloss, spread against training: {by_shape.round(3).tolist()}; two moments {by_moments.round(3).tolist()}")
    assert abs(by_shape[:, 0] - 1).max() < 0.02 and by_moments[1:, 0].max() < 0.97
    assert abs(by_shape[:, 1] - 1).max() < 0.25 and by_moments[1:, 1].max() < 0.8


def test_only_columns_that_the_noise_does_not_blur_are_looked_at(monkeypatch):
    """At much noise none, so that a forecast costs what it did; DP-SGD and DP-Adam never look."""
    problem, of, counts = heavy_tails(), BatchShape.of, []

    def counted(*args, **named):
        counts.append(of(*args, **named))
        return counts[-1]

    monkeypatch.setattr(logistic.BatchShape, "of", counted)
    for noise_multiplier in (0.05, 0.3, 1.0, 3.0):
        Moments().forecast(asked(problem, 0.01, noise_multiplier), [NUM_STEPS])
    heavy = [0 if shape is None else int(shape.heavy.sum()) for shape in counts]
    print(heavy)
    assert heavy == sorted(heavy, reverse=True)
    assert heavy[0] == problem.num_features and 0 < heavy[1] < heavy[0] and heavy[-1] == 0
    for optimizer in (DPSGD(learning_rate=0.1), DPAdam(learning_rate=0.01)):
        Moments().forecast(replace(asked(problem, 0.01), optimizer=optimizer), [NUM_STEPS])
    assert len(counts) == 4
