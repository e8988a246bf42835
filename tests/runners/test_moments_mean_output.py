"""Columns that are not centred: all outputs swing together in a force that is flat in the middle, and no Gaussian."""

import numpy as np
import pytest

from noisecast import DPSGD, DPAdam, DPSignSGD, Poisson, SampledGaussian, Scenario, answer, linear_model
from noisecast.problems.datasets import Dataset
from noisecast.runners import Training
from noisecast.runners.moments import Moments, logistic_weights
from noisecast.runners.moments.mean_output import MeanOutput

CLOSURE = Moments(most_runs=0)  # alone: no runs take its place

SEED_DATA, SEED_RUNS, RUNS, STEPS = 650_201, 650_202, 600, 300
OPTIMIZERS = {
    "DP-SGD": (DPSGD(learning_rate=0.006), 1.0),
    "DP-SignSGD": (DPSignSGD(learning_rate=0.0015), 2.0),
    "DP-Adam": (DPAdam(learning_rate=0.0015), 2.0),
}


def raw_columns(n=400, p=30):
    rng = np.random.default_rng(SEED_DATA)
    features = (5 + rng.normal(size=(n, p))).astype(np.float32)
    score = (features - 5) @ rng.normal(size=p) / 2 + rng.logistic(size=n)
    return features, (score > np.median(score)).astype(np.int32)  # as many of each label


def trained(features, labels, optimizer, clip, noise_multiplier):
    """Final weights of many runs at once, in NumPy: they share nothing but the examples."""
    rng = np.random.default_rng(SEED_RUNS)
    rows = np.hstack([features, np.ones((len(features), 1), np.float32)])
    bound = (clip / np.sqrt((rows**2).sum(axis=1))).astype(np.float32)
    w = np.zeros((RUNS, rows.shape[1]), np.float32)
    m, v, eta, size = 0 * w, 0 * w, optimizer.learning_rate, 40
    for k in range(1, STEPS + 1):
        residual = np.clip(1 / (1 + np.exp(-(w @ rows.T))) - labels, -bound, bound)
        drawn = rng.random(residual.shape, np.float32) < size / len(rows)
        noise = np.float32(noise_multiplier * clip) * rng.standard_normal(w.shape, np.float32)
        gradient = ((residual * drawn) @ rows + noise) / size
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        w = (
            w
            - eta
            * {
                "DP-SGD": gradient,
                "DP-SignSGD": np.sign(gradient),
                "DP-Adam": m / (1 - 0.9**k) / (np.sqrt(v / (1 - 0.999**k)) + 1e-8),
            }[optimizer.name]
        )
    logits = w @ rows.T
    loss = np.logaddexp(0, -(2 * labels - 1) * logits).mean(axis=1)
    gradients = (1 / (1 + np.exp(-logits)) - labels) @ rows / len(rows)
    return loss, np.linalg.norm(gradients, axis=1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipped_examples_that_swing_together(name, monkeypatch):
    """Loss, its spread and the gradient's norm; with the law held Gaussian all are far off."""
    (optimizer, noise_multiplier), clip = OPTIMIZERS[name], 4.0
    features, labels = raw_columns()
    mechanism = SampledGaussian(
        noise_multiplier=noise_multiplier, l2_clip_norm=clip, sampler=Poisson.for_batch_size(40, len(labels))
    )
    problem = linear_model(Dataset("raw", features, labels, ("no", "yes")))
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=STEPS)

    def forecast():
        found = CLOSURE.forecast(scenario, [STEPS]).metrics
        return np.array([found[metric][-1] for metric in ("loss", "loss_std", "gradient_norm")])

    loss, norm = trained(features, labels, optimizer, clip, noise_multiplier)
    seen, error = np.array([loss.mean(), loss.std(), norm.mean()]), loss.std() / np.sqrt(RUNS)
    found = forecast()
    monkeypatch.setattr(
        MeanOutput, "carried", lambda self, before, middle, mean, covariance, *_, **__: (mean, covariance, before.swing)
    )
    gaussian = forecast()
    print(f"\n{name}: trained {seen.round(4)} ±{error:.4f}, forecast {found.round(4)}, Gaussian {gaussian.round(4)}")
    assert found[0] == pytest.approx(seen[0], rel=0.01, abs=2.5 * error)
    assert found[1] == pytest.approx(seen[1], rel=0.15)
    assert found[2] == pytest.approx(seen[2], rel=0.06)
    assert gaussian[0] < 0.97 * seen[0] and gaussian[2] < 0.85 * seen[2]  # the control


@pytest.mark.parametrize("value", [0.0, 2.0])
def test_rows_that_are_all_the_same_have_a_gradient(value):
    """All there is swings: nothing is left beside it, and rounding must not leave less."""
    labels = (np.arange(60) % 2).astype(np.int32)
    problem = linear_model(Dataset("same", np.full((60, 1), value, np.float32), labels, ("no", "yes")))
    for optimizer, noise_multiplier in OPTIMIZERS.values():
        mechanism = SampledGaussian(
            noise_multiplier=noise_multiplier, l2_clip_norm=0.3, sampler=Poisson.for_batch_size(10, 60)
        )
        scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=200)
        found = CLOSURE.forecast(scenario, [10, 25, 50, 100, 150, 200]).metrics
        assert all(np.isfinite(values).all() for values in found.values())


def rare_label_by_raw_columns(n=3000):
    """Ages, sums of money and days as they are; one label in fifty."""
    rng = np.random.default_rng(1)
    money = np.exp(rng.normal(size=(n, 2)) * [0.6, 1.2] + [3.6, 3.4])
    age, days, flag = rng.normal(60, 15, n), rng.integers(0, 30, n), rng.random(n) < 0.6
    score = 0.03 * (age - 60) - 0.5 * np.log(money[:, 1]) + 0.7 * flag + rng.logistic(size=n)
    rows = np.column_stack([age, money, days, flag]).astype(np.float32)
    return linear_model(Dataset("raw", rows, (score > np.quantile(score, 0.98)).astype(np.int32), ("no", "yes")))


@pytest.mark.parametrize(
    "optimizer, noise_multiplier", [(DPSGD(learning_rate=5e-4), 4), (DPSignSGD(learning_rate=2e-3), 2)]
)
def test_the_spread_of_a_swing_that_skew_outputs_share(optimizer, noise_multiplier, monkeypatch):
    """What a swing makes of losses, and what of that is counted already, are of the same laws: not of Gaussian ones."""
    problem = rare_label_by_raw_columns()
    sampler = Poisson.for_batch_size(64, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=noise_multiplier, l2_clip_norm=100.0, sampler=sampler)
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=600)
    table = answer([scenario], runners=[Training()], insecure_seeds=range(256), record_at=[600])
    std = table[(table.metric == "loss") & (table.step == 600)].value.std()
    found = CLOSURE.forecast(scenario, [600]).metrics["loss_std"][-1]
    given = logistic_weights.loss_given

    def of_gaussians(outputs, *seen):
        ends = outputs(np.array([-1.0, 1.0]))
        middle, width = ends.mean(axis=1)[:, None], (ends[:, 1:] - ends[:, :1]) / 2
        return given(lambda places: middle + width * places, *seen)

    monkeypatch.setattr(logistic_weights, "loss_given", of_gaussians)
    gaussian = CLOSURE.forecast(scenario, [600]).metrics["loss_std"][-1]
    print(f"\n{found / std:.3f} of the trained spread, by Gaussian outputs {gaussian / std:.3f}")
    assert found == pytest.approx(std, rel=0.25)
    assert gaussian < 0.8 * std
