"""DP-Adam at large learning rates on columns that bend together: its directions are averages, which swing less."""

from dataclasses import replace

import numpy as np
import pytest

from noisecast import DPAdam, Poisson, SampledGaussian, Scenario, answer, bundled, linear_model
from noisecast.problems.datasets import Dataset
from noisecast.runners import Training
from noisecast.runners.moments import Moments, lagging, logistic, logistic_limits, logistic_steps, multi_output

CLOSURE = Moments(most_runs=0)  # alone: no runs take its place

SEED_DATA, SEED_TRAINING = 640_201, 640_202
NUM_STEPS, LOOKS = 400, (80, 400)


def positive_columns(num_classes: int, num_examples=1500, num_features=200):
    """Log-normal, not centred: with learning rate 0.12 the curvature along their sum is about 2."""
    rng = np.random.default_rng(SEED_DATA)
    features = rng.lognormal(0, 0.7, size=(num_examples, num_features)) / 15
    scores = (features - features.mean(axis=0)) @ rng.normal(size=(num_features, num_classes)) * 2
    labels = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1).astype(np.int32)
    return linear_model(Dataset("toy", features.astype(np.float32), labels, tuple("abcd"[:num_classes])))


@pytest.mark.parametrize("num_classes, learning_rate", [(2, 0.12), pytest.param(4, 0.16, marks=pytest.mark.slow)])
def test_averaged_directions_swing_less_than_single_ones(monkeypatch, num_classes, learning_rate):
    """Loss on the way and at the end; with directions taken for single gradients it is seen to be too high."""
    monkeypatch.setattr(lagging.Lagging, "should_be_followed", lambda *_: False)
    problem = positive_columns(num_classes)
    sampler = Poisson.for_batch_size(64, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=0.5, l2_clip_norm=0.6, sampler=sampler)
    optimizer = DPAdam(learning_rate=learning_rate)
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=NUM_STEPS)
    seeds = range(SEED_TRAINING, SEED_TRAINING + 100)
    table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=LOOKS)
    trained = np.array([table[(table.metric == "loss") & (table.step == step)].value.mean() for step in LOOKS])
    found = CLOSURE.forecast(scenario, LOOKS)
    for home in (logistic_steps, multi_output):
        single = home.advance_covariance
        monkeypatch.setattr(home, "advance_covariance", lambda *a, lag, single=single, **named: single(*a, **named))
    by_single = CLOSURE.forecast(scenario, LOOKS)
    off, off_by_single = (np.array(f.metrics["loss"]) / trained - 1 for f in (found, by_single))
    print(f"\n{off.round(4)}; single {off_by_single.round(4)}")
    assert abs(off).max() < 0.03
    assert off_by_single[0] > 0.06 and off_by_single[1] > off[1] + 0.01


def test_averages_of_few_gradients_do_not_lag(monkeypatch):
    """The first steps of DP-Adam on correlated columns that tell the classes apart, where its force soon falls."""
    monkeypatch.setattr(lagging.Lagging, "should_be_followed", lambda *_: False)
    problem = linear_model(*bundled("breast_cancer"))
    mechanism = SampledGaussian(
        noise_multiplier=0.5, l2_clip_norm=1.5, sampler=Poisson.for_batch_size(64, problem.num_examples)
    )
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=DPAdam(learning_rate=0.06), num_steps=500)
    looks = (25, 100, 500)
    table = answer(
        [scenario],
        runners=[Training()],
        insecure_seeds=range(SEED_TRAINING, SEED_TRAINING + 256),
        record_at=looks,
    )
    trained = np.array([table[(table.metric == "loss") & (table.step == step)].value.mean() for step in looks])
    found = CLOSURE.forecast(scenario, looks)
    closure = DPAdam(learning_rate=0.06).theory.closure
    late = replace(closure, lag_of=lambda step, num_steps: closure.lag)
    for reader in (logistic._LogisticSolve, logistic.FrozenSteps):
        monkeypatch.setattr(reader, "closure", property(lambda _: late, lambda *_: None), raising=False)
    by_lag = CLOSURE.forecast(scenario, looks)
    off, off_by_lag = (np.array(f.metrics["loss"]) / trained - 1 for f in (found, by_lag))
    print(f"\n{off.round(4)}; always lagging {off_by_lag.round(4)}")
    assert abs(off).max() < 0.11 and abs(off[1:]).max() < 0.04
    assert off_by_lag[0] > 0.2


def test_where_directions_swing_past_they_are_followed_or_the_first_rows_say_so(monkeypatch):
    """A rare label on columns around 3: the weights shoot past, and what else is forecast is their envelope alone."""
    rng = np.random.default_rng(SEED_DATA)
    features = rng.normal(size=(500, 8))
    scores = features @ rng.normal(size=8) / 2 + rng.logistic(size=500)
    labels = (scores > np.quantile(scores, 0.96)).astype(np.int32)
    problem = linear_model(Dataset("toy", (features + 3).astype(np.float32), labels, ("no", "yes")))
    mechanism = SampledGaussian(noise_multiplier=0.3, l2_clip_norm=4.5, sampler=Poisson.for_batch_size(50, 500))
    looks = (10, 25, 130, 400)

    def found(learning_rate):
        optimizer = DPAdam(learning_rate=learning_rate)
        scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=400)
        seeds = range(SEED_TRAINING, SEED_TRAINING + 32)
        table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=looks)
        trained = [table[(table.metric == "loss") & (table.step == step)].value.mean() for step in looks]
        forecast = CLOSURE.forecast(scenario, looks)
        return np.array(forecast.metrics["loss"]) / trained - 1, forecast

    off, forecast = found(0.05)
    print(f"\n{off.round(3)}")
    assert abs(off).max() < 0.05
    assert forecast.extrapolated.tolist() == [True, True, False, False]
    assert any("before step 27" in reason for reason in forecast.reasons)
    monkeypatch.setattr(lagging.Lagging, "should_be_followed", lambda *_: False)
    off, forecast = found(0.05)
    assert off[0] < -0.3 and abs(off[3]) < 0.05
    assert forecast.extrapolated.tolist() == [True, True, True, False]
    assert any("swing past" in reason for reason in forecast.reasons)
    off, forecast = found(0.0005)
    assert abs(off).max() < 0.03
    assert not forecast.extrapolated.any() and not forecast.reasons


def few_columns():
    rng = np.random.default_rng(SEED_DATA)
    features = (rng.random((2000, 60)) < 0.15).astype(np.float32)
    scores = (features - features.mean(axis=0)) @ rng.normal(size=60) * 3
    labels = (scores + rng.logistic(size=2000) > 0).astype(np.int32)
    return linear_model(Dataset("toy", features, labels, ("no", "yes")))


@pytest.mark.parametrize("learning_rate, reach", [(0.1, (2, 4)), (0.3, (4, 20))])
def test_large_steps_of_averages_are_sound_far_below_what_explodes(monkeypatch, learning_rate, reach):
    """Learning rate times curvature is several times what single gradients could bear; 38 would explode."""
    problem, seen = positive_columns(2), []
    judged = logistic_limits.Limits.are_passed_by
    monkeypatch.setattr(
        logistic_limits.Limits,
        "are_passed_by",
        lambda self, *a, **named: (seen.append(named["curvature"]), judged(self, *a, **named))[1],
    )
    sampler = Poisson.for_batch_size(400, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=2.0, l2_clip_norm=1.0, sampler=sampler)
    optimizer = DPAdam(learning_rate=learning_rate)
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=300)
    seeds = range(SEED_TRAINING, SEED_TRAINING + 128)
    table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=[300])
    trained = table[(table.metric == "loss") & (table.step == 300)].value.mean()
    found = CLOSURE.forecast(scenario, [300])
    off = found.metrics["loss"][-1] / trained - 1
    print(f"\n{off:+.4f}, curvature {max(seen):.3g}")
    assert reach[0] < max(seen) < reach[1]
    assert not found.extrapolated[-1]
    assert abs(off) < 0.05


@pytest.mark.parametrize("learning_rate", [1.0, 8.0])
@pytest.mark.parametrize("num_classes", [2, 4])
def test_a_first_large_step_of_dp_adam_is_no_divergence(learning_rate, num_classes):
    """What spreads the weights early is never taken for less than nothing: the loss was nan, and `diverged`."""
    problem = few_columns() if num_classes == 2 else positive_columns(num_classes, num_features=60)
    sampler = Poisson.for_batch_size(600, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=0.5, l2_clip_norm=1.0, sampler=sampler)
    optimizer = DPAdam(learning_rate=learning_rate)
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=300)
    found = CLOSURE.forecast(scenario, [300])
    trained = answer([scenario], runners=[Training()], insecure_seeds=range(16), record_at=[300])
    loss = trained[(trained.metric == "loss") & (trained.step == 300)].value.mean()
    print(f"\n{found.metrics['loss'][-1]:.4f}, trained {loss:.4f}")
    assert found.metrics["loss"][-1] == pytest.approx(loss, rel=0.1 if num_classes == 2 else 0.3)


def windows(num_classes):
    """Columns around 1.5 that move together, as raw windows of time series do."""
    rng = np.random.default_rng(SEED_DATA)
    latent = rng.normal(size=(1500, 4))
    features = 1.5 + latent @ rng.normal(size=(4, 30)) / 2 + 0.3 * rng.normal(size=(1500, 30))
    scores = latent @ rng.normal(size=(4, num_classes)) * 2
    labels = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1).astype(np.int32)
    return linear_model(Dataset("toy", features.astype(np.float32), labels, tuple("abcd"[:num_classes])))


@pytest.mark.parametrize(
    "num_classes, learning_rate, off_by_envelope",
    [(2, 0.06, 0.06), pytest.param(4, 0.02, 0.04, marks=pytest.mark.slow)],
)
def test_short_runs_of_dp_adam_are_as_trained(monkeypatch, num_classes, learning_rate, off_by_envelope):
    """60 steps in which weights swing: averages followed step by step, and only the envelope of what they do."""
    problem, looks = windows(num_classes), (30, 45, 60)
    sampler = Poisson.for_batch_size(300, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=0.5, l2_clip_norm=2.0, sampler=sampler)
    scenario = Scenario(
        problem=problem, mechanism=mechanism, optimizer=DPAdam(learning_rate=learning_rate), num_steps=60
    )
    seeds = range(SEED_TRAINING, SEED_TRAINING + 200)
    table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=looks)
    losses = [table[(table.metric == "loss") & (table.step == step)].value for step in looks]
    trained, std = (np.array([getattr(each, name)() for each in losses]) for name in ("mean", "std"))
    found = CLOSURE.forecast(scenario, looks)
    monkeypatch.setattr(lagging.Lagging, "should_be_followed", lambda *_: False)
    by_envelope = np.array(CLOSURE.forecast(scenario, looks).metrics["loss"]) / trained - 1
    off, of_std = (found.metrics[name] / one - 1 for name, one in (("loss", trained), ("loss_std", std)))
    known = (std / trained / 200**0.5).round(4)
    print(f"\n{off.round(4)}, known to {known}; std {of_std.round(2)}; by its envelope {by_envelope.round(4)}")
    assert abs(off).max() < 0.02 and abs(of_std).max() < 0.3
    assert not found.extrapolated.any()
    assert abs(by_envelope).max() > off_by_envelope


def test_the_spread_of_dp_adams_first_steps_is_that_of_averages(monkeypatch):
    """Ten columns, a small rate: nothing swings, but a first run's loss depends on few gradients, averaged."""
    rng = np.random.default_rng(SEED_DATA)
    features = rng.normal(size=(1000, 10))
    labels = (features @ rng.normal(size=10) + rng.logistic(size=1000) > 0).astype(np.int32)
    problem = linear_model(Dataset("toy", features.astype(np.float32), labels, ("no", "yes")))
    sampler, looks = Poisson.for_batch_size(64, problem.num_examples), (15, 30, 60, 100, 500)
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=sampler)
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=DPAdam(learning_rate=0.002), num_steps=500)
    seeds = range(SEED_TRAINING, SEED_TRAINING + 400)
    table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=looks)
    trained = np.array([table[(table.metric == "loss") & (table.step == step)].value.std() for step in looks])
    found = CLOSURE.forecast(scenario, looks)
    monkeypatch.setattr(lagging.Lagging, "should_be_followed", lambda *_: False)
    off, off_by_gradients = (
        np.array(each.metrics["loss_std"]) / trained - 1 for each in (found, CLOSURE.forecast(scenario, looks))
    )
    print(f"\n{off.round(3)}, by gradients that lag {off_by_gradients.round(3)}; known to 3.5 %")
    assert abs(off).max() < 0.15
    assert off_by_gradients.max() > 0.3


def test_what_is_followed_is_given_up_where_a_swing_is_no_gaussian(monkeypatch):
    """Four columns around 6, every example clipped: what pushes them all is one of two forces."""
    rng = np.random.default_rng(SEED_DATA)
    features = rng.normal(size=(1000, 4))
    labels = (features @ rng.normal(size=4) * 1.5 + rng.logistic(size=1000) > 0).astype(np.int32)
    problem = linear_model(Dataset("toy", (features + 6).astype(np.float32), labels, ("no", "yes")))
    sampler = Poisson.for_batch_size(100, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=2.0, l2_clip_norm=0.3, sampler=sampler)
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=DPAdam(learning_rate=0.025), num_steps=60)
    seeds = range(SEED_TRAINING, SEED_TRAINING + 400)
    table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=[30])
    losses = table[(table.metric == "loss") & (table.step == 30)].value
    found = CLOSURE.forecast(scenario, [30])
    monkeypatch.setattr(lagging, "MOST_BENT", np.inf)
    off, off_by_gaussians = (
        float(each.metrics["loss"][0]) / losses.mean() - 1 for each in (found, CLOSURE.forecast(scenario, [30]))
    )
    known = losses.std() / losses.mean() / 20
    print(f"\n{off:+.3f}, by Gaussians {off_by_gaussians:+.3f}, known to {known:.3f}")
    assert found.extrapolated[0] and abs(off) < 0.06
    assert off_by_gaussians < -0.12
