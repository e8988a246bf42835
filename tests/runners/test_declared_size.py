"""Runners where the declared size is not that of the data: sums over Poisson batches are divided by the declared B.

(sum + z C xi)/B with B = B'/fill is fill times (sum + z C xi)/B', so that a run which declares too many examples is
one that declares them rightly, at a lower learning rate: of DP-SGD. The others do not see the scale of a gradient.
"""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse

from noisecast import (
    DPSGD,
    DPAdam,
    DPSignSGD,
    Poisson,
    SampledGaussian,
    Scenario,
    answer,
    forecast_crossing,
    linear_model,
)
from noisecast.problems.datasets import Dataset, Ratings, label_sets
from noisecast.problems.matrix_factorization import matrix_factorization
from noisecast.runners import ClosedForm, Sde, Training
from noisecast.runners.moments import Moments

N, BATCH, DECLARED = 400, 20, 1600
OPTIMIZERS = [DPSGD(learning_rate=0.5), DPSignSGD(learning_rate=0.02), DPAdam(learning_rate=0.02)]
SGD = OPTIMIZERS[0]


def features(num_features: int = 200):
    rng = np.random.default_rng(0)
    shown = (rng.random((N, num_features)) < 0.1).astype(np.float32)
    shown[:, 0] = rng.normal(size=N)
    return scipy.sparse.csr_array(shown), rng


def logistic():
    rows, rng = features()
    labels = (rows[:, [0]].toarray()[:, 0] + rng.logistic(size=N) > 0).astype(np.int32)
    return linear_model(Dataset("toy", rows, labels, ("no", "yes")))


def softmax():
    rows, rng = features()
    return linear_model(Dataset("toy", rows, rng.integers(0, 3, N).astype(np.int32), ("a", "b", "c")))


def multi_label():
    rows, rng = features()
    labels = label_sets([np.flatnonzero(row) for row in rng.random((N, 3)) < 0.4])
    return linear_model(Dataset("toy", rows, labels, ("a", "b", "c")))


def factorization():
    rng = np.random.default_rng(1)
    users, items = rng.integers(0, 20, N), rng.integers(0, 30, N)
    ratings = Ratings(users, items, rng.integers(1, 6, N), num_users=20, num_items=30)
    return matrix_factorization(ratings, dim=12, public_init_seed=0)


PROBLEMS = [logistic, softmax, multi_label, factorization]


def declared(problem, optimizer, num_examples: int, *, num_steps: int = 60) -> Scenario:
    """Every example with probability BATCH/N, whatever size is declared."""
    sampler = Poisson(BATCH / N, BATCH / N * num_examples)
    mechanism = SampledGaussian(noise_multiplier=0.5, l2_clip_norm=0.8, sampler=sampler)
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps)


def slower(optimizer, share: float):
    is_scaled = isinstance(optimizer, DPSGD)
    return replace(optimizer, learning_rate=optimizer.learning_rate * share) if is_scaled else optimizer


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize(
    "build", [pytest.param(build, marks=[pytest.mark.slow] * (build is multi_label)) for build in PROBLEMS]
)
def test_a_forecast_with_too_large_a_size_is_the_one_of_a_lower_learning_rate(build, optimizer):
    problem = build()
    found = Moments().forecast(declared(problem, optimizer, DECLARED), [10, 60])
    right = Moments().forecast(declared(problem, slower(optimizer, N / DECLARED), N), [10, 60])
    wrong = Moments().forecast(declared(problem, optimizer, N), [10, 60])
    for name, expected in right.metrics.items():
        np.testing.assert_allclose(found.metrics[name], expected, rtol=2e-3, atol=1e-6, err_msg=name)
    assert list(found.extrapolated) == list(right.extrapolated)
    if isinstance(optimizer, DPSGD):  # a forecast that does not look at the size is far off
        assert abs(wrong.metrics["params_norm"][-1] / right.metrics["params_norm"][-1] - 1) > 0.2


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_the_forecast_is_as_trained(optimizer):
    scenario = declared(logistic(), optimizer, DECLARED)
    table = answer([scenario], runners=[Training(), Moments()], insecure_seeds=range(100), record_at=[60])
    ends = table[(table["metric"] == "params_norm") & (table["step"] == 60)].groupby("runner")["value"]
    error = ends.sem()["training"]
    assert ends.mean()["moments"] == pytest.approx(
        ends.mean()["training"], abs=4 * error + 0.01 * ends.mean()["moments"]
    )


@pytest.mark.parametrize("runner", [Sde(), ClosedForm()], ids=lambda runner: runner.name)
def test_other_runners_know_it_too(runner):
    """Five times as near to the run that declares its size as one that takes every batch for full, at least."""
    problem = logistic()
    losses = []
    for optimizer, size in ((SGD, DECLARED), (slower(SGD, N / DECLARED), N), (SGD, N)):
        table = answer([declared(problem, optimizer, size)], runners=[runner], insecure_seeds=range(50), record_at=[60])
        losses.append(table[(table["metric"] == "loss") & (table["step"] == 60)]["value"].mean())
    found, right, wrong = losses
    assert abs(found - right) < 0.2 * abs(wrong - right)


@pytest.mark.parametrize("size", [N // 2, N, DECLARED])
def test_the_theorem_of_a_crossing_knows_clipping_from_a_declared_size(size):
    """Far from clipping: its form is the one for examples that are not clipped, whatever size is declared."""
    mechanism = replace(declared(logistic(), SGD, size).mechanism, l2_clip_norm=50.0)
    pair = (SGD, DPSignSGD(learning_rate=0.02))
    found = forecast_crossing(
        logistic(), mechanism, pair, num_steps=60, noise_multipliers=(0.2, 20.0), target_delta=1e-5, num_scanned=4
    )
    assert "100% of the gradient" in found.theorem.form and "not clipped" in found.theorem.form
