"""Forecasts of softmax and multi-label models against training; every tolerance with a control that breaks it.

The seeds were written down before any result: a failing one is a finding, not a reason to change it.
"""

import dataclasses

import numpy as np
import pytest
import scipy.sparse

from noisecast import DPSGD, DPAdam, DPSignSGD, Poisson, SampledGaussian, Scenario, answer, linear_model
from noisecast.problems.datasets import Dataset, bundled, label_sets
from noisecast.problems.linear import MULTI_LABEL_MEAN
from noisecast.runners import Training
from noisecast.runners.moments import Moments, multi_output, output_examples, parted_rows

SEED_DATA, SEED_RUNS = 671_001, 671_100
N, P, M, B = 800, 40, 6, 20
OPTIMIZERS = [DPSGD(learning_rate=2.0), DPSignSGD(learning_rate=0.02), DPAdam(learning_rate=0.02)]


def features(sparse: bool):
    rng = np.random.default_rng(SEED_DATA)
    found = (rng.random((N, P)) < 0.2) * rng.exponential(0.4, (N, P))
    return scipy.sparse.csr_array(found.astype(np.float32)) if sparse else found.astype(np.float32)


def logits(rows):
    weights = 4 * np.random.default_rng(SEED_DATA + 1).standard_normal((P, M))
    return rows @ weights + np.linspace(-1, 1, M)


def softmax_problem(sparse=True):
    rows = features(sparse)
    gumbel = np.random.default_rng(SEED_DATA + 2).gumbel(size=(N, M))
    labels = (logits(rows) + gumbel).argmax(axis=1).astype(np.int32)
    data = Dataset("toy", rows, labels, tuple("abcdef"))
    return linear_model(data.rows(slice(600)), data.rows(slice(600, None)))


def multi_label_problem(likelihood=None):
    rows = features(True)
    logistic = np.random.default_rng(SEED_DATA + 2).logistic(size=(N, M))
    sets = label_sets([np.flatnonzero(row) for row in logits(rows) + logistic > 1])
    data = Dataset("toy", rows, sets, tuple("abcdef"))
    return linear_model(data.rows(slice(600)), data.rows(slice(600, None)), likelihood=likelihood)


def asked(problem, optimizer, num_steps, noise_multiplier, l2_clip_norm=0.4) -> Scenario:
    mechanism = SampledGaussian(
        noise_multiplier=noise_multiplier, l2_clip_norm=l2_clip_norm, sampler=Poisson(B / problem.num_examples, B)
    )
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps)


def forecast(scenario, record_at, **settings):
    settings = Moments(**settings)
    return multi_output.forecast(
        scenario, multi_output.prepare(scenario.problem, settings), [*record_at, scenario.num_steps], settings
    )


def trained(scenario, record_at, num_seeds):
    seeds = range(SEED_RUNS, SEED_RUNS + num_seeds)
    table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=record_at)
    return table.groupby(["metric", "step"])["value"]


def gaps(found, values, names):
    """Relative differences beyond three standard errors, the largest over steps."""
    steps, result = found.steps, {}
    for name in names:
        mean, error = values.mean()[name].loc[steps].to_numpy(), values.sem()[name].loc[steps].to_numpy()
        result[name] = float(np.max((np.abs(found.metrics[name] - mean) - 3 * error) / mean))
    return result


CELLS = [
    pytest.param(optimizer, z, id=f"{optimizer.name}-{z}", marks=[pytest.mark.slow] * (z < 1))
    for optimizer in OPTIMIZERS
    for z in (0.3, 2.0)
]


@pytest.mark.parametrize("optimizer, noise_multiplier", CELLS)
def test_softmax_is_as_trained(optimizer, noise_multiplier):
    """Losses within 2.5 % and the rest within 6 %, after early and late steps; a learning rate 40 % off is seen."""
    problem, record_at = softmax_problem(), [30, 150]
    scenario = asked(problem, optimizer, 600, noise_multiplier)
    found, values = forecast(scenario, record_at), trained(scenario, record_at, 40)
    losses = gaps(found, values, ["loss", "test_loss"])
    others = gaps(found, values, ["accuracy", "test_accuracy", "clip_fraction", "gradient_norm", "params_norm"])
    wrong = dataclasses.replace(optimizer, learning_rate=1.4 * optimizer.learning_rate)
    control = gaps(forecast(asked(problem, wrong, 600, noise_multiplier), record_at), values, ["loss", "params_norm"])
    measured = values.std()["loss"].loc[600]
    spread = found.metrics["loss_std"][-1] / measured
    print(f"\n{optimizer.name}, {noise_multiplier}: {losses}, {others}, control {control}, std {spread:.2f}")
    assert max(losses.values()) < 0.025 < max(control.values())
    assert max(others.values()) < 0.06
    assert 1 / 1.6 < spread < 1.6  # 40 runs know a standard deviation within 11 %, at three of those 34 %
    swings = [reason for reason in found.reasons if "swing past where the force turns" in reason]
    assert not found.extrapolated[1:].any() and list(found.reasons) == swings  # DP-Adam's first steps, by caution
    assert not swings or optimizer.name == "DP-Adam"


@pytest.mark.slow
def test_signs_feel_the_shape_of_small_batches(monkeypatch):
    """A feature in every fifth of 20 examples, little noise: by two moments the loss is seen to be far too low."""
    scenario = asked(softmax_problem(), OPTIMIZERS[1], 600, 0.3)
    values = trained(scenario, [150], 40)
    by_shape = gaps(forecast(scenario, [150]), values, ["loss"])["loss"]
    monkeypatch.setattr(multi_output.BatchShape, "of", lambda *_, **__: None)
    by_moments = gaps(forecast(scenario, [150]), values, ["loss"])["loss"]
    print(f"\nbeyond chance: by shape {by_shape:+.2%}, by two moments {by_moments:+.2%}")
    assert by_shape < 0.01 and by_moments > 0.03


@pytest.mark.parametrize("likelihood", [None, MULTI_LABEL_MEAN], ids=["sum", "mean"])
def test_multi_label_is_as_trained(likelihood):
    problem = multi_label_problem(likelihood)
    optimizer, clip = (DPSGD(learning_rate=1.0), 0.6) if likelihood is None else (DPSGD(learning_rate=6.0), 0.1)
    scenario = asked(problem, optimizer, 400, 1.0, clip)
    found, values = forecast(scenario, [40]), trained(scenario, [40], 40)
    losses = gaps(found, values, ["loss", "test_loss"])
    others = gaps(found, values, ["recall_at_5", "test_recall_at_5", "micro_f1", "clip_fraction", "params_norm"])
    wrong = dataclasses.replace(optimizer, learning_rate=1.4 * optimizer.learning_rate)
    control = gaps(forecast(asked(problem, wrong, 400, 1.0, clip), [40]), values, ["loss", "params_norm"])
    print(f"\n{losses}, {others}, control {control}")
    assert max(losses.values()) < 0.025 < max(control.values())
    assert max(others.values()) < 0.06


def test_the_mean_over_labels_is_the_sum_in_other_units():
    summed = forecast(asked(multi_label_problem(), DPSGD(learning_rate=1.0), 200, 1.0, 0.6), [])
    meant = forecast(asked(multi_label_problem(MULTI_LABEL_MEAN), DPSGD(learning_rate=6.0), 200, 1.0, 0.1), [])
    assert meant.metrics["loss"] * M == pytest.approx(summed.metrics["loss"], rel=1e-3)
    assert meant.metrics["params_norm"] == pytest.approx(summed.metrics["params_norm"], rel=1e-3)


def test_dense_and_sparse_rows_are_forecast_alike():
    sparse, dense = (
        forecast(asked(softmax_problem(kind), OPTIMIZERS[0], 200, 1.0), [], full_covariance_features=10)
        for kind in (True, False)
    )
    for name, values in sparse.metrics.items():
        assert dense.metrics[name] == pytest.approx(values, rel=1e-3), name


def on_digits(optimizer, noise):
    problem = linear_model(*bundled("digits"))
    sampler = Poisson.for_batch_size(64, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=noise, l2_clip_norm=1.0, sampler=sampler)
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=1000)


@pytest.mark.slow
def test_no_grid_of_time_steps_is_unlucky(monkeypatch):
    """Noise that moves weights far, into flat places that hold them less: long steps saw a quarter too much of it."""

    def loss(time_steps):
        return forecast(on_digits(DPSGD(learning_rate=3.0), 4.0), [], time_steps=time_steps).metrics["loss"][-1]

    fine = loss(48)
    assert [loss(6), loss(12)] == pytest.approx([fine] * 2, rel=0.04)
    monkeypatch.setattr(multi_output, "LARGEST_BEND", np.inf)
    assert loss(6) > 1.2 * fine


@pytest.mark.parametrize("noise, is_far", [(4.0, True), (1.0, False)])
def test_where_noise_makes_most_of_the_loss_it_says_so(noise, is_far):
    """Beyond, its losses are far too high; below, they are as trained."""
    scenario = on_digits(DPSGD(learning_rate=3.0), noise)
    found = forecast(scenario, [])
    rows = answer([scenario], runners=[Training()], insecure_seeds=list(range(16)), record_at=[1000])
    trained = rows.loc[(rows["metric"] == "loss") & (rows["step"] == 1000), "value"]
    assert (found.metrics["loss"][-1] > 1.1 * trained.mean()) == is_far
    assert found.extrapolated[-1] == is_far
    assert any("Fluctuations of the weights make" in each for each in found.reasons) == is_far


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_looking_on_the_way_does_not_move_the_end_and_sees_it_right(optimizer):
    scenario, looks = asked(softmax_problem(), optimizer, 300, 1.0), [0, 1, 2, 3, 7, 40, 77, 150, 151, 299, 300]
    seen, unseen = forecast(scenario, looks), forecast(scenario, [])
    assert all(seen.metrics[name][-1] == unseen.metrics[name][-1] for name in unseen.metrics)
    assert seen.steps.tolist() == looks
    fine = forecast(scenario, looks, time_steps=300)  # where every one of them ends a time step
    np.testing.assert_allclose(seen.metrics["loss"], fine.metrics["loss"], rtol=0.006)


def test_it_starts_where_training_starts():
    found = forecast(asked(softmax_problem(), OPTIMIZERS[0], 5, 1.0), [0])
    assert found.metrics["loss"][0] == pytest.approx(np.log(M), rel=1e-6)
    assert found.metrics["loss_std"][0] == found.metrics["params_norm"][0] == 0


def test_a_subsample_says_so_and_measures_itself():
    whole = forecast(asked(softmax_problem(), OPTIMIZERS[0], 300, 1.0), [])
    part = forecast(asked(softmax_problem(), OPTIMIZERS[0], 300, 1.0), [], subsample=250)
    assert whole.subsample_error == 0 < part.subsample_error
    assert any("250 of 600" in reason for reason in part.reasons)
    off = abs(float(part.metrics["loss"][-1] / whole.metrics["loss"][-1]) - 1)
    assert off < 3 * part.subsample_error


def test_a_diverging_run_is_forecast_as_diverging():
    found = forecast(asked(softmax_problem(), DPSGD(learning_rate=3000.0), 300, 0.1, l2_clip_norm=100.0), [])
    assert found.extrapolated[-1]
    assert any("overshoot" in reason for reason in found.reasons)


def test_it_handles_models_with_several_outputs_only():
    binary = linear_model(Dataset("two", features(True), np.arange(N, dtype=np.int32) % 2, ("a", "b")))
    assert multi_output.handles(softmax_problem()) and multi_output.handles(multi_label_problem(MULTI_LABEL_MEAN))
    assert not multi_output.handles(binary)


def pixels(side: int):
    """The digits in -1 .. 1, as bounds scale them: most pixels are near -1, so that they move together.

    Args:
      side: pixels along a picture's side; a multiple of 8.
    """
    data = bundled("digits")[0]
    share = data.features.reshape(-1, 8, 8) / data.features.max()
    large = np.kron(share, np.ones((1, side // 8, side // 8))).reshape(len(share), -1)
    noisy = large + 0.1 * np.random.default_rng(SEED_DATA + 3).standard_normal(large.shape)
    return linear_model(dataclasses.replace(data, features=(2 * np.clip(noisy, 0, 1) - 1).astype(np.float32)))


def of_pixels(side: int) -> Scenario:
    return asked(pixels(side), DPAdam(learning_rate=0.02), 300, noise_multiplier=0.75, l2_clip_norm=1.0)


def test_columns_that_move_together_are_forecast_together(monkeypatch):
    """All 64 have a covariance, though 500 weights divided by ten classes would be 50 of them; those 50 and the joint
    directions of the others do as well, and without these the loss is too high.
    """
    scenario = of_pixels(8)
    values = trained(scenario, [], 12)
    mean, error = (part()["loss"].loc[300].item() for part in (values.mean, values.sem))
    found = forecast(scenario, [])
    assert not found.reasons and abs(found.metrics["loss"][-1] - mean) < 0.03 * mean + 2 * error
    monkeypatch.setattr(output_examples, "MOST_WEIGHTS_OF_ALL", 0)
    joint = forecast(scenario, [])
    assert not joint.reasons and abs(joint.metrics["loss"][-1] / found.metrics["loss"][-1] - 1) < 0.005
    monkeypatch.setattr(parted_rows, "MOST_JOINT", 0)
    apart = forecast(scenario, [])
    assert apart.metrics["loss"][-1] > 1.06 * mean + 2 * error
    assert "move together" in " ".join(apart.reasons)


def test_where_they_are_too_many_it_says_so(monkeypatch):
    monkeypatch.setattr(parted_rows, "MOST_JOINT", 0)
    found = forecast(of_pixels(24), [], subsample=300, time_steps=12)
    assert "Columns beyond the 50 with a full covariance move together" in " ".join(found.reasons)
    assert found.extrapolated[-1]


def embeddings(num_examples=800, num_features=400, num_classes=10):
    """Unit rows with correlated columns, as a network makes them: energy k^-1.2 along directions of no column."""
    rng = np.random.default_rng(SEED_DATA + 4)
    scale = np.arange(1, num_features + 1) ** -0.6
    basis = np.linalg.qr(rng.normal(size=(num_features, num_features)))[0]
    labels = rng.integers(0, num_classes, num_examples).astype(np.int32)
    centres = 0.8 * rng.normal(size=(num_classes, num_features)) * scale
    rows = (centres[labels] + rng.normal(size=(num_examples, num_features)) * scale) @ basis.T
    rows += 0.15 * rng.normal(size=num_features)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return linear_model(Dataset("toy", rows.astype(np.float32), labels, tuple("abcdefghij")))


def test_embeddings_are_forecast_by_their_joint_directions(monkeypatch):
    problem = embeddings()
    mechanism = SampledGaussian(noise_multiplier=2.0, l2_clip_norm=1.0, sampler=Poisson.for_batch_size(64, 800))
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=3.0), num_steps=300)
    values = trained(scenario, [], 32)
    mean, error = (part()["loss"].loc[300].item() for part in (values.mean, values.sem))
    found = forecast(scenario, [])
    print(found.metrics["loss"][-1] / mean - 1, error / mean)
    assert abs(found.metrics["loss"][-1] - mean) < 0.02 * mean + 2 * error and error < 0.015 * mean
    monkeypatch.setattr(parted_rows, "MOST_JOINT", 0)
    apart = forecast(scenario, [])
    print(apart.metrics["loss"][-1] / mean - 1, apart.reasons)
    assert apart.metrics["loss"][-1] > 1.3 * mean and "move together" in " ".join(apart.reasons)


@pytest.mark.parametrize("sparse", [True, False])
def test_what_is_left_of_columns_beside_their_directions(sparse, monkeypatch):
    monkeypatch.setattr(parted_rows, "MOST_JOINT", 5)
    monkeypatch.setattr(parted_rows, "JOINT_SHARE", 0.0)
    monkeypatch.setattr(output_examples, "MOST_WEIGHTS_OF_ALL", 0)
    monkeypatch.setattr(output_examples, "ROWS_AT_ONCE", 7)
    rows = output_examples.OutputExamples.of(softmax_problem(sparse), 3, None).train
    rest = rows.rest.toarray() if sparse else rows.rest
    beside = rest - rest @ rows.joint @ rows.joint.T
    assert rows.joint.shape == (P - 3, 5) and 0.2 < (beside**2).sum() / (rest**2).sum() < 0.8
    rng = np.random.default_rng(SEED_DATA + 3)
    variance, coefficients = rng.random((P - 3, M)), rng.random((len(rest), M))
    np.testing.assert_allclose(rows.rest_variance(variance), beside**2 @ variance, rtol=1e-4, atol=1e-6)
    along = (rest**2 - beside**2).T @ coefficients / len(rest)
    np.testing.assert_allclose(rows.rest_moment_along(coefficients), along, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("learning_rate, is_said", [(0.1, True), (0.01, False)])
def test_a_small_loss_of_fluctuations_says_so(learning_rate, is_said):
    """Three classes that can nearly be told apart: at so large a rate a loss like it was forecast 8.7 % too high."""
    rng = np.random.default_rng(SEED_DATA + 3)
    labels = rng.choice(3, 900, p=[0.6, 0.3, 0.1])
    rows = 0.8 * rng.normal(size=(3, 15))[labels] + rng.normal(size=(900, 15))
    problem = linear_model(Dataset("toy", rows.astype(np.float32), labels.astype(np.int32), tuple("abc")))
    mechanism = SampledGaussian(noise_multiplier=2.0, l2_clip_norm=2.0, sampler=Poisson.for_batch_size(64, 900))
    optimizer = DPAdam(learning_rate=learning_rate)
    found = Moments().forecast(Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=300), [])
    assert any("a loss that is small" in reason for reason in found.reasons) == is_said
    assert found.extrapolated[-1] == is_said
