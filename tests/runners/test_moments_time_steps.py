"""Small tables, whose time steps are nearly free, are forecast in short ones: where few were too few."""

import numpy as np
import pytest
from sklearn.datasets import make_moons
from sklearn.preprocessing import PolynomialFeatures

from noisecast import DPAdam, DPSignSGD, Poisson, SampledGaussian, Scenario, answer, linear_model
from noisecast.problems.datasets import Dataset
from noisecast.runners import Training
from noisecast.runners.moments import Moments, logistic

SEED_DATA, SEED_TRAINING = 700_201, 700_202


def rare_label():
    """One in seventy, of columns of falling size and heavy tails: a tenth of the loss is left after 15 steps."""
    rng = np.random.default_rng(SEED_DATA)
    sizes, is_rare = 1.9 / np.sqrt(np.arange(1, 29)), rng.random(3000) < 1 / 70
    features = rng.standard_t(4, size=(3000, 28)) * sizes
    features[is_rare] += rng.normal(size=28) * 1.2 * sizes
    return linear_model(Dataset("rare", (features / 2).astype(np.float32), is_rare.astype(np.int32), ("no", "yes")))


def moons():
    """Powers of two columns: heavy tails, and a few directions in which all bend."""
    points, labels = make_moons(500, noise=0.25, random_state=2)
    points = (points - points.mean(axis=0)) / points.std(axis=0)
    features = PolynomialFeatures(4, include_bias=False).fit_transform(points) / 3
    return linear_model(Dataset("moons", features.astype(np.float32), labels.astype(np.int32), ("no", "yes")))


@pytest.mark.parametrize(
    "problem, optimizer, l2_clip_norm, batch_size, num_steps, num_seeds, off_by_few",
    [
        (rare_label(), DPSignSGD(learning_rate=0.12), 0.8, 128, 15, 200, -0.02),
        (moons(), DPAdam(learning_rate=0.4), 0.17, 50, 600, 400, 0.04),
    ],
    ids=["a fast fall", "far above the best rate"],
)  # fmt: skip
def test_short_time_steps_are_as_trained(
    monkeypatch, problem, optimizer, l2_clip_norm, batch_size, num_steps, num_seeds, off_by_few
):
    sampler = Poisson.for_batch_size(batch_size, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=l2_clip_norm, sampler=sampler)
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps)
    looks = [num_steps * share // 6 for share in (2, 4, 6)]
    seeds = range(SEED_TRAINING, SEED_TRAINING + num_seeds)
    table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=looks)
    losses = [table[(table.metric == "loss") & (table.step == step)].value for step in looks]
    trained = np.array([each.mean() for each in losses])
    known = (np.array([each.sem() for each in losses]) / trained).round(4)
    found = Moments().forecast(scenario, looks)
    monkeypatch.setattr(logistic, "is_nearly_free", lambda *_: False)
    off, off_by_coarse = (
        np.array(each.metrics["loss"])[-3:] / trained - 1 for each in (found, Moments().forecast(scenario, looks))
    )
    print(f"\n{off.round(4)}, known to {known}; in few time steps {off_by_coarse.round(4)}")
    assert abs(off).max() < 0.02
    assert off_by_coarse[-1] / off_by_few > 1
