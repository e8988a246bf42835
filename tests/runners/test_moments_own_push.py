"""More features than rows: examples fit each other's noise, and their outputs are skew."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse

from noisecast import DPSGD, DPAdam, DPSignSGD, Poisson, SampledGaussian, Scenario, answer, linear_model
from noisecast.problems.datasets import Dataset
from noisecast.runners import Training, moments
from noisecast.runners.moments import Moments, examples, logistic_steps
from noisecast.runners.moments.pushes import Pushes
from noisecast.theory import own_push

CLOSURE = Moments(most_runs=0)  # alone: no runs take its place

SEED_DATA, SEED_TRAINING = 640_401, 640_402


def wide_texts(num_examples=700, num_words=1500):
    rng = np.random.default_rng(SEED_DATA)
    present = rng.random((num_examples, num_words)) < rng.uniform(0.01, 0.12, (num_examples, 1))
    margin = present @ rng.normal(size=num_words)
    margin = 1.5 * (margin - margin.mean()) / margin.std()
    labels = (rng.random(num_examples) < 1 / (1 + np.exp(-margin))).astype(np.int32)
    return linear_model(Dataset("wide", scipy.sparse.csr_array(present.astype(np.float32)), labels, ("no", "yes")))


@pytest.mark.parametrize(
    "optimizer", [DPSGD(learning_rate=3.0), pytest.param(DPAdam(learning_rate=0.009), marks=pytest.mark.slow)]
)
def test_skew_outputs_are_forecast(monkeypatch, optimizer):
    """The final loss, which a forecast with Gaussian outputs puts too low."""
    problem = wide_texts()
    sampler = Poisson.for_batch_size(64, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=0.25, sampler=sampler)
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=500)
    seeds = range(SEED_TRAINING, SEED_TRAINING + 192)
    table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=[500])
    losses = table[(table.metric == "loss") & (table.step == 500)].value
    found = CLOSURE.forecast(scenario, [500]).metrics["loss"][-1]
    monkeypatch.setattr(own_push, "PUSHED", 2.0)  # outputs stay Gaussians
    gaussian = CLOSURE.forecast(scenario, [500]).metrics["loss"][-1]
    off, off_gaussian = found / losses.mean() - 1, gaussian / losses.mean() - 1
    print(f"\n{off:+.4f}, Gaussian {off_gaussian:+.4f}, trained ±{losses.sem() / losses.mean():.4f}")
    assert abs(off) < 0.035
    assert off_gaussian < off - 0.02


def test_what_is_pushed_lasts_in_the_weights(monkeypatch):
    """Examples fit each other's noise: without it loss and norm come out too low; and, without laws, the spread."""
    problem = wide_texts()
    sampler = Poisson.for_batch_size(64, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=0.5, l2_clip_norm=0.15, sampler=sampler)
    optimizer = DPAdam(learning_rate=0.025)
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=500)
    seeds = range(SEED_TRAINING, SEED_TRAINING + 192)
    table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=[500])
    table = table[table.step == 500]
    loss, norm = (table[table.metric == metric].value for metric in ("loss", "params_norm"))
    found = CLOSURE.forecast(scenario, [500]).metrics
    of_run = loss.std()
    with monkeypatch.context() as gaussian:
        gaussian.setattr(own_push, "PUSHED", 2.0)  # outputs stay Gaussians
        spread, of_gaussians = found["loss_std"][-1], CLOSURE.forecast(scenario, [500]).metrics["loss_std"][-1]
    none = Pushes.lasting
    monkeypatch.setattr(Pushes, "lasting", lambda *given: tuple(0 * part for part in none(*given)))
    without = CLOSURE.forecast(scenario, [500]).metrics
    off, off_without = (
        [each["loss"][-1] / loss.mean() - 1, each["params_norm"][-1] / norm.mean() - 1] for each in (found, without)
    )
    print(f"\n{off}, without {off_without}, known to {loss.sem() / loss.mean():.1%}")
    print(f"spread {spread / of_run - 1:+.3f}, of Gaussians {of_gaussians / of_run - 1:+.3f}, known to 5 %")
    assert abs(off[0]) < 0.05 and abs(off[1]) < 0.01
    assert off_without[0] < off[0] - 0.04 and off_without[1] < off[1] - 0.012
    assert spread == pytest.approx(of_run, rel=0.15)
    assert of_gaussians < spread - 0.15 * of_run


def test_time_steps_have_converged_where_little_of_the_loss_is_left(monkeypatch):
    """A loss of few outputs, far out in their laws, asks for shorter steps than one of all."""
    rng = np.random.default_rng(SEED_DATA)
    raw = 0.3 * rng.normal(size=(200, 12)) @ rng.normal(size=(12, 1500)) + rng.normal(size=(200, 1500))
    rows = (raw / np.linalg.norm(raw, axis=1, keepdims=True)).astype(np.float32)
    labels = (rng.random(200) < 1 / (1 + np.exp(-3 * rows @ rng.normal(size=1500)))).astype(np.int32)
    problem = linear_model(Dataset("genes", rows, labels, ("no", "yes")))
    mechanism = SampledGaussian(noise_multiplier=0.5, l2_clip_norm=0.0625, sampler=Poisson.for_batch_size(48, 200))
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=DPAdam(learning_rate=0.12), num_steps=500)

    def loss(time_steps=12):
        return replace(CLOSURE, time_steps=time_steps).forecast(scenario, [500]).metrics["loss"][-1]

    fine, found = loss(time_steps=100), loss()
    monkeypatch.setattr(moments.logistic, "LARGEST_BEND_OF_LAWS", moments.logistic.LARGEST_BEND)
    coarse = loss()
    print(f"\n{found / fine - 1:+.4f}, with steps as long as elsewhere {coarse / fine - 1:+.4f}, loss {fine:.4f}")
    assert found == pytest.approx(fine, rel=0.01)
    assert coarse > 1.015 * fine


@pytest.mark.slow
def test_what_is_forgotten_fast_is_not_what_is_pushed_away(monkeypatch):
    """Half of every row are factors, whose noise all rows undo; what is left of the loss hangs on the other half."""
    rng = np.random.default_rng(SEED_DATA)
    rows = 0.3 * rng.normal(size=(300, 12)) @ rng.normal(size=(12, 4000)) + rng.normal(size=(300, 4000))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    labels = (rng.random(300) < 1 / (1 + np.exp(-2 * rows @ rng.normal(size=4000)))).astype(np.int32)
    problem = linear_model(Dataset("genes", rows.astype(np.float32), labels, ("no", "yes")))
    mechanism = SampledGaussian(noise_multiplier=0.5, l2_clip_norm=0.125, sampler=Poisson.for_batch_size(64, 300))
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=DPSignSGD(learning_rate=0.15), num_steps=500)
    seeds = range(SEED_TRAINING, SEED_TRAINING + 384)
    table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=[500])
    losses = table[(table.metric == "loss") & (table.step == 500)].value
    off = CLOSURE.forecast(scenario, [500]).metrics["loss"][-1] / losses.mean() - 1
    monkeypatch.setattr(Pushes, "_rate_share", lambda *given: 1.0)
    without = CLOSURE.forecast(scenario, [500]).metrics["loss"][-1] / losses.mean() - 1
    print(f"\n{off:+.4f}, all forgotten alike {without:+.4f}, trained ±{losses.sem() / losses.mean():.4f}")
    assert abs(off) < 0.05
    assert without > off + 0.05


def test_few_examples_far_out_are_said():
    """Classes that can be told apart: what is left of the loss is nothing that a Gaussian knows."""
    rng = np.random.default_rng(SEED_DATA)
    features = rng.normal(size=(300, 5)).astype(np.float32)
    labels = (features[:, 0] > 0).astype(np.int32)
    features[:, 0] += 3 * (2 * labels - 1)
    mechanism = SampledGaussian(noise_multiplier=0.1, l2_clip_norm=1.0, sampler=Poisson.for_batch_size(64, 300))
    for classes in (2, 3):
        names = tuple("abc"[:classes])
        data = Dataset("apart", features, labels, names)
        scenario = Scenario(
            problem=linear_model(data), mechanism=mechanism, optimizer=DPSGD(learning_rate=1.0), num_steps=300
        )
        found = CLOSURE.forecast(scenario, [0, 300])
        assert found.metrics["loss"][-1] < 0.02 and found.extrapolated.tolist() == [False, True]
        assert any("Less than 5%" in reason for reason in found.reasons)


def copied_rows(num_different=120, num_copies=20, num_features=1500):
    rng = np.random.default_rng(11)
    rows = np.repeat(rng.normal(size=(num_different, num_features)) / num_features**0.5 * 3, num_copies, 0)
    labels = np.repeat(rng.integers(0, 2, num_different), num_copies).astype(np.int32)
    return linear_model(Dataset("copies", rows.astype(np.float32), labels, ("no", "yes")))


def test_copies_of_a_row_push_along_one_line(monkeypatch):
    """Without directions of their own, and taken for different rows, they came out 54 % too high."""
    problem = copied_rows()
    sampler = Poisson.for_batch_size(64, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=2.0, l2_clip_norm=0.38, sampler=sampler)
    optimizer = DPSignSGD(learning_rate=0.0326)
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=500)
    table = answer([scenario], runners=[Training()], insecure_seeds=range(640_501, 640_541), record_at=[500])
    losses = table[(table.metric == "loss") & (table.step == 500)].value

    def off():
        moments._prepared.cache_clear()
        return float(CLOSURE.forecast(scenario, [500]).metrics["loss"][-1] / losses.mean() - 1)

    with_directions = off()
    monkeypatch.setattr(examples, "MUCH_TOGETHER", 2.0)
    found = off()
    monkeypatch.setattr(examples.Rows, "copies", 1.0)
    apart = off()
    moments._prepared.cache_clear()
    known = losses.sem() / losses.mean()
    print(f"\n{with_directions:+.3f}, without directions {found:+.3f}, apart {apart:+.3f}, known to {known:.1%}")
    assert abs(with_directions) < 0.05 + 2 * known
    assert apart > 0.3 + found


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_array])
def test_copies_are_counted(form):
    """By all features, the block's and the rest's."""
    block = np.array([[1, 1], [1, 1], [1, 1], [2, 1]], np.float32)
    rest = form(np.array([[1, 0], [1, 0], [0, 2], [1, 0]], np.float32))
    rows = examples.Rows(block, rest, np.zeros((2, 0), np.float32), np.zeros(4, int), np.ones(4))
    assert rows.copies.tolist() == [2, 2, 1, 1]


def test_few_examples_of_as_many_columns_skew_themselves(monkeypatch):
    """In the block the covariance knows what an example pushes of its own output, and not that it is skew by that."""
    rng = np.random.default_rng(4)
    rows = np.exp(rng.normal(size=(150, 80)))
    rows = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    margin = rows @ rng.normal(size=80)
    labels = (rng.random(150) < 1 / (1 + np.exp(-4 * margin / margin.std()))).astype(int)
    problem = linear_model(Dataset("amounts", rows.astype(np.float32), labels, ("no", "yes")))
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.8, sampler=Poisson.for_batch_size(50, 150))
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=DPAdam(learning_rate=0.1), num_steps=500)
    seeds = range(SEED_TRAINING, SEED_TRAINING + 300)
    table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=[500])
    losses = table[(table.metric == "loss") & (table.step == 500)].value
    found = CLOSURE.forecast(scenario, [500])
    monkeypatch.setattr(logistic_steps, "MOST_OFTEN", 0.0)
    without = CLOSURE.forecast(scenario, [500]).metrics["loss"][-1] / losses.mean() - 1
    off, known = found.metrics["loss"][-1] / losses.mean() - 1, losses.sem() / losses.mean()
    print(f"\n{off:+.4f}, without {without:+.4f}, trained ±{known:.4f}")
    assert abs(off) < 0.03 + 2 * known
    assert without > off + 0.1
    assert found.extrapolated[-1] and any("Outputs are skew" in reason for reason in found.reasons)
