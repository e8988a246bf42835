"""Features outside the block of a logistic forecast, whose fluctuations are kept along their joint directions."""

import itertools

import numpy as np
import pytest
import scipy.sparse

from noisecast import DPSGD, DPAdam, DPSignSGD, Poisson, SampledGaussian, Scenario, linear_model
from noisecast.problems.datasets import Dataset
from noisecast.runners import moments
from noisecast.runners.moments import Moments, examples, parted_rows

SEED_DATA = 640_004

OPTIMIZERS = [DPSGD(learning_rate=1.0), DPSignSGD(learning_rate=0.03), DPAdam(learning_rate=0.03)]


def asked(problem, optimizer, num_steps) -> Scenario:
    sampler = Poisson.for_batch_size(32, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=4.0, l2_clip_norm=0.5, sampler=sampler)
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps)


def common_words(num_examples=600, num_features=200):
    """Every feature in a seventh of the rows, rows of very different length: none stands out, all bend together."""
    rng = np.random.default_rng(SEED_DATA)
    share = rng.uniform(0.03, 0.25, (num_examples, 1))
    features = (rng.random((num_examples, num_features)) < share).astype(np.float32)
    labels = (rng.random(num_examples) < 1 / (1 + np.exp(-features @ rng.normal(size=num_features)))).astype(np.int32)
    return Dataset("toy", scipy.sparse.csr_array(features), labels, ("no", "yes"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_features_outside_the_block_fluctuate_together(optimizer, monkeypatch):
    """With a direction of theirs in the block ten features do for all; without it one run's spread is far off."""

    def found(num_full):
        moments._prepared.cache_clear()  # the examples in their parts
        scenario = asked(linear_model(common_words()), optimizer, 500)
        return Moments(full_covariance_features=num_full).forecast(scenario, [500]).metrics

    whole, few = found(200), found(10)
    monkeypatch.setattr(parted_rows, "MOST_JOINT", 0)
    joint, without = (
        {name: float(part[name][-1] / whole[name][-1] - 1) for name in ("loss", "loss_std", "params_norm")}
        for part in (few, found(10))
    )
    print(f"\n{optimizer.name}: {joint}; without {without}")
    assert abs(joint["loss"]) < 0.02 and without["loss"] > 0.05
    assert abs(joint["loss_std"]) < 0.05 and without["loss_std"] > 0.5


def test_groups_of_equal_columns_are_one_direction_each():
    """Ten groups of twenty noisy copies, none of them in the block: as with all in it, within two per cent."""
    rng = np.random.default_rng(SEED_DATA)
    groups = rng.normal(size=(500, 10))
    features = ((groups[:, np.arange(200) % 10] + 0.1 * rng.normal(size=(500, 200))) / 14).astype(np.float32)
    labels = (rng.random(500) < 1 / (1 + np.exp(-groups @ rng.normal(size=10)))).astype(np.int32)
    problem = linear_model(Dataset("toy", features, labels, ("no", "yes")))
    scenario = asked(problem, DPSGD(learning_rate=4.0), 300)

    def found(num_full):
        moments._prepared.cache_clear()
        return float(Moments(full_covariance_features=num_full).forecast(scenario, [300]).metrics["loss"][-1])

    assert examples.Examples.of(problem, 5, 500).train.joint.shape == (195, 10)
    assert found(5) == pytest.approx(found(200), rel=0.02)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e12])
def test_joint_directions_do_not_depend_on_units(scale):
    rest = np.random.default_rng(SEED_DATA).normal(size=(50, 4)) @ np.diag([8.0, 4.0, 1.0, 0.01])
    found = parted_rows.joint_directions((scale * rest).astype(np.float32))
    assert found.shape == (4, 3 if scale else 0)  # the last holds a millionth of the energy
    np.testing.assert_allclose(found.T @ found, np.eye(found.shape[1]), atol=1e-5)


def test_what_the_rest_adds_beside_its_joint_directions(monkeypatch):
    monkeypatch.setattr(parted_rows, "MOST_JOINT", 3)
    rows = examples.Examples.of(linear_model(common_words(400, 60)), 20, 400).train
    assert rows.joint.shape == (40, 3) and rows.split == 21 and rows.block.shape[1] == 24
    np.testing.assert_allclose(rows.joint.T @ rows.joint, np.eye(3), atol=1e-6)
    variance = np.linspace(0.5, 2.0, 40)
    rest = rows.rest.toarray()
    beside = rest - rest @ rows.joint @ rows.joint.T
    np.testing.assert_allclose(rows.rest_spread(variance), beside**2 @ variance, rtol=1e-4, atol=1e-6)
    along = np.mean(rest**2 - beside**2, axis=0)
    np.testing.assert_allclose(rows.rest_moment_along(np.ones(400)), along, rtol=1e-4, atol=1e-6)
    root = np.random.default_rng(SEED_DATA).normal(size=(24, 24))
    full = rows.block @ (root @ root.T) @ rows.block.T + beside @ (variance[:, None] * beside.T)
    np.testing.assert_allclose(rows.logit_covariance(root @ root.T, variance), full, rtol=1e-4, atol=1e-4)
    weights = np.random.default_rng(SEED_DATA).normal(size=61)
    np.testing.assert_allclose(
        rows.block @ rows.in_block(weights) + rest @ rows.beside(weights[rows.split :]),
        rows.dot(weights),
        rtol=1e-4,
        atol=1e-5,
    )


def test_where_there_are_no_joint_directions_nothing_is_read():
    """Forecasts turned NaN by chance: `einsum` over no columns reads what lies beyond an array's end."""
    beyond = np.full(1, np.nan, np.float32)
    none = np.lib.stride_tricks.as_strided(beyond, (7, 0), (0, 0))
    for one, other in itertools.permutations([none, np.ones((7, 3), np.float32)[:, 3:]]):
        np.testing.assert_array_equal(parted_rows.row_dots(one, other), np.zeros(7))
