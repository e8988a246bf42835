"""Time steps: short ones on small tables, where they are nearly free; and variances that swing from one to the next."""

import numpy as np
import pandas as pd
from sklearn.datasets import make_moons
from sklearn.preprocessing import PolynomialFeatures

from noisecast import DPAdam, DPSignSGD, Poisson, SampledGaussian, Scenario, answer, linear_model
from noisecast.problems.datasets import Dataset
from noisecast.runners import Training
from noisecast.runners.moments import Moments, logistic

CLOSURE = Moments(most_runs=0)  # alone: no runs take its place

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


def trained_at(scenario, looks, num_seeds) -> pd.DataFrame:
    """Mean loss and its standard deviation over runs, by step."""
    seeds = range(SEED_TRAINING, SEED_TRAINING + num_seeds)
    table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=looks)
    trained = table[table.metric == "loss"].groupby("step").value.agg(["mean", "sem", "std"]).loc[looks]
    print(f"\nknown to {(trained['sem'] / trained['mean']).round(4).tolist()}")
    return trained


def test_short_time_steps_follow_a_fast_fall(monkeypatch):
    problem, looks = rare_label(), [5, 10, 15]
    sampler = Poisson.for_batch_size(128, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=0.8, sampler=sampler)
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=DPSignSGD(learning_rate=0.12), num_steps=15)
    trained = trained_at(scenario, looks, 200)
    found = CLOSURE.forecast(scenario, looks)
    monkeypatch.setattr(logistic, "is_nearly_free", lambda *_: False)
    off, off_by_coarse = (
        np.array(each.metrics["loss"])[-3:] / trained["mean"] - 1 for each in (found, CLOSURE.forecast(scenario, looks))
    )
    print(f"\n{off.round(4).tolist()}, in few time steps {off_by_coarse.round(4).tolist()}")
    assert abs(off).max() < 0.02
    assert off_by_coarse[15] < -0.02


def test_outputs_that_meet_a_wall_do_not_swing_ever_wider(monkeypatch):
    """Far above the best rate the forecast's variances went up and down from step to step, and the loss with them."""
    problem, looks = moons(), [300, 350, 400, 450, 500, 550, 600]
    sampler = Poisson.for_batch_size(50, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=0.5, l2_clip_norm=0.8, sampler=sampler)
    scenarios = [
        Scenario(problem=problem, mechanism=mechanism, optimizer=DPAdam(learning_rate=rate), num_steps=600)
        for rate in (0.6, 0.45, 0.8)
    ]

    def forecast() -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations, by scenario and look."""
        found = [CLOSURE.forecast(scenario, looks).metrics for scenario in scenarios]
        means, stds = ([each[name][-len(looks) :] for each in found] for name in ("loss", "loss_std"))
        return np.array(means), np.array(stds)

    means, stds = forecast()
    trained = trained_at(scenarios[0], looks, 400)
    off, spread = means[0] / trained["mean"].to_numpy() - 1, stds[0] / trained["std"].to_numpy()
    monkeypatch.setattr(logistic, "way_to_rest", lambda *_: 1.0)
    swinging, wide = forecast()
    print(f"{off.round(3)}, {spread.round(2)}; when they swing\n{swinging / means}\n{wide / stds}")
    assert abs(off).max() < 0.025
    assert spread.min() > 0.8 and spread.max() < 1.25
    assert (swinging / means).max() > 1.05 and (wide / stds).max() > 1.5  # where, is chance
