"""The local quadratic forecast: its error bars hold what training does, and bars of a wrong forecast do not.

The seeds were written down before any result: a failing one is a finding, not a reason to change it.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from noisecast import DPSGD, DPAdam, DPSignSGD, Poisson, SampledGaussian, Scenario, Stream, answer, jax_model, quadratic
from noisecast.runners import ClosedForm, Training
from noisecast.runners.local_forecast import LARGEST_ERROR, LocalForecast
from noisecast.runners.moments import Moments

SEED_DATA, SEED_TRAINING = 690_001, 690_500
NUM_EXAMPLES = 400


def two_layers():
    """A network of one hidden layer on labels of a single neuron."""
    rng = np.random.default_rng(SEED_DATA)
    x = rng.normal(size=(NUM_EXAMPLES, 12)).astype(np.float32)
    y = (np.tanh(x @ rng.normal(size=12)) + 0.1 * rng.normal(size=NUM_EXAMPLES)).astype(np.float32)
    start = {name: (0.4 * rng.normal(size=size)).astype(np.float32) for name, size in (("w1", (12, 8)), ("w2", 8))}

    def squared_error(params, example):
        features, label = example
        return 0.5 * (jnp.tanh(features @ params["w1"]) @ params["w2"] - label) ** 2

    return jax_model(squared_error, start, (x, y), name="two layers")


MODEL = two_layers()


def asked(optimizer, noise_multiplier, num_steps, problem=MODEL):
    mechanism = SampledGaussian(
        noise_multiplier=noise_multiplier, l2_clip_norm=2.0, sampler=Poisson.for_batch_size(32, NUM_EXAMPLES)
    )
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps)


CASES = [
    pytest.param(
        optimizer,
        z,
        id=f"{optimizer.name}, z = {z:g}",
        marks=[pytest.mark.slow] if z > 2 or optimizer.name != "DP-SGD" else [],
    )
    for z in (2.0, 8.0)
    for optimizer in (DPSGD(learning_rate=0.05), DPSignSGD(learning_rate=0.002), DPAdam(learning_rate=0.002))
]


@pytest.mark.parametrize("optimizer, noise_multiplier", CASES)
def test_error_bars_hold_the_trained_mean(optimizer, noise_multiplier):
    """At every recorded step, up to three standard errors; those of half the learning rate do not."""
    record_at = [3, 10, 30]
    scenario = asked(optimizer, noise_multiplier, 30)
    table = answer(
        [scenario], runners=[Training()], insecure_seeds=range(SEED_TRAINING, SEED_TRAINING + 64), record_at=record_at
    )
    losses = table[table["metric"] == "loss"].groupby("step")["value"]
    mean, error = losses.mean().loc[record_at].to_numpy(), losses.sem().loc[record_at].to_numpy()
    slower = replace(scenario, optimizer=type(optimizer)(learning_rate=optimizer.learning_rate / 2))
    right, wrong = (LocalForecast().forecast(question, record_at) for question in (scenario, slower))
    print(
        f"\n{optimizer.name}, z = {noise_multiplier}: {right.metrics['loss'].round(4)} +- {right.error.round(4)}, "
        f"trained {mean.round(4)} (se {error.round(4)})"
    )
    assert np.all(np.abs(right.metrics["loss"] - mean) <= right.error + 3 * error)
    assert np.any(np.abs(wrong.metrics["loss"] - mean) > wrong.error + 3 * error)
    assert right.error[0] < 0.02 * mean[0]  # never blind


def test_beyond_the_quadratic_it_is_extrapolated_and_its_bars_are_wide():
    table = answer([asked(DPSGD(learning_rate=0.05), 2.0, 200)], runners=[LocalForecast()], record_at=[0, 3])
    status = table[table["metric"] == "loss"].set_index("step")["status"]
    assert status.loc[[0, 3, 200]].tolist() == ["ok", "ok", "extrapolated"]
    assert set(table["runner"]) == {"local_quadratic"} and table["seed"].isna().all()
    found = LocalForecast().forecast(asked(DPSGD(learning_rate=0.05), 2.0, 200), [200])
    assert found.error[-1] > LARGEST_ERROR * abs(found.metrics["loss"][-1])


def test_on_a_quadratic_it_is_the_closed_form_and_its_bars_are_nothing():
    problem = quadratic(np.linspace(0.5, 2.0, 200), 0.3, example_noise_std=0.1)
    mechanism = SampledGaussian(noise_multiplier=0.01, l2_clip_norm=100.0, sampler=Stream(4))
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=0.05), num_steps=100)
    found = LocalForecast().forecast(scenario, [10, 100])
    table = answer([scenario], runners=[ClosedForm()], record_at=[10])
    assert found.metrics["loss"].tolist() == table[table["metric"] == "loss"]["value"].tolist()
    assert found.error.max() < 1e-3 * found.metrics["loss"].min() and not found.extrapolated.any()


def test_it_starts_at_the_point_that_it_is_given():
    point = np.asarray(MODEL.initial_params()) * 0.5
    found = LocalForecast(at=point).forecast(asked(DPSGD(learning_rate=0.05), 2.0, 5), [0])
    assert found.metrics["loss"][0] == pytest.approx(float(MODEL.evaluate(jnp.asarray(point), 2.0)["loss"]), rel=1e-5)
    assert found.metrics["loss"][0] != pytest.approx(
        float(MODEL.evaluate(MODEL.initial_params(), 2.0)["loss"]), rel=0.01
    )


def test_refusals_are_sentences():
    scenario = asked(DPSGD(learning_rate=0.05), 2.0, 5)
    with pytest.raises(ValueError, match="expected a point of shape"):
        LocalForecast(at=np.zeros(3)).forecast(scenario, [0])
    assert Moments().why_unsupported(scenario) is not None
    assert LocalForecast().why_unsupported(scenario) is None
