"""Calibrated noise against golden numbers and its own promise: within the budget, and a percent less is not."""

import csv
import math
from pathlib import Path

import pytest

from noisecast.privacy import calibration
from noisecast.privacy.accounting import epsilon_spent
from noisecast.privacy.calibration import calibrate_noise_multiplier
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.sampling import FixedSize, Poisson, Shuffled, Stream

GOLDEN = Path(__file__).parent.parent / "golden" / "noise_multipliers.csv"
ADD, REPLACE = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE


def gaussian(noise_multiplier, sampler, adjacency=ADD):
    return SampledGaussian(noise_multiplier=noise_multiplier, l2_clip_norm=0.5, sampler=sampler, adjacency=adjacency)


def epsilon_of(noise_multiplier, sampler, num_steps, target_delta, adjacency=ADD):
    mechanism = gaussian(noise_multiplier, sampler, adjacency)
    return epsilon_spent(mechanism, num_steps=num_steps, target_delta=target_delta).epsilon


def golden_rows():
    return list(csv.DictReader(line for line in GOLDEN.read_text().splitlines() if not line.startswith("#")))


def calibration_parameters():
    found = []
    for row in golden_rows():
        fast = row["num_examples"] == "25000" and row["target_epsilon"] in ("1", "2")
        marks = () if fast else pytest.mark.slow
        found.append(pytest.param(row, id=f"{row['num_examples']}-{row['target_epsilon']}", marks=marks))
    return found


@pytest.mark.parametrize("row", calibration_parameters())
def test_calibration_golden_and_tight(row):
    sampler = Poisson.for_batch_size(64, int(row["num_examples"]))
    target, delta, num_steps = float(row["target_epsilon"]), float(row["target_delta"]), int(row["num_steps"])
    found = calibrate_noise_multiplier(
        gaussian(0.0, sampler), target_epsilon=target, target_delta=delta, num_steps=num_steps
    )
    z = found.noise_multiplier
    assert z == pytest.approx(float(row["noise_multiplier"]), rel=0.006)
    assert epsilon_of(z, sampler, num_steps, delta) <= target < epsilon_of(0.99 * z, sampler, num_steps, delta)


@pytest.mark.parametrize(
    "sampler, adjacency",
    [(Poisson(0.05, 8), ADD), (Poisson(0.05, 8), REPLACE), (FixedSize(8, 160), REPLACE),
     (Shuffled(8, 160), ADD), (Stream(8), REPLACE)],
)  # fmt: skip
@pytest.mark.parametrize("target", [0.5, pytest.param(8.0, marks=pytest.mark.slow)])
def test_calibration_is_safe_and_tight(sampler, adjacency, target):
    found = calibrate_noise_multiplier(
        gaussian(0.0, sampler, adjacency), target_epsilon=target, target_delta=1e-5, num_steps=100
    )
    z = found.noise_multiplier
    assert found == gaussian(z, sampler, adjacency)
    assert epsilon_of(z, sampler, 100, 1e-5, adjacency) <= target
    assert epsilon_of(0.99 * z, sampler, 100, 1e-5, adjacency) > target


def test_calibration_refuses_with_a_sentence():
    mechanism = gaussian(1.0, Poisson(1e-9, 1))
    with pytest.raises(ValueError, match=r"holds at noise_multiplier 0\.001"):
        calibrate_noise_multiplier(mechanism, target_epsilon=1.0, target_delta=1e-3, num_steps=10)
    with pytest.raises(ValueError, match="noise_multiplier > 10"):
        calibrate_noise_multiplier(gaussian(1.0, Stream(8)), target_epsilon=1e-9, target_delta=1e-12, num_steps=10)
    with pytest.raises(ValueError, match="target_epsilon > 0, got 0"):
        calibrate_noise_multiplier(mechanism, target_epsilon=0, target_delta=1e-5, num_steps=10)
    with pytest.raises(ValueError, match="num_steps >= 1, got 0"):
        calibrate_noise_multiplier(mechanism, target_epsilon=1, target_delta=1e-5, num_steps=0)


def jumping(z):
    """An accountant's epsilon over a target of 1: 1000/z, and 0 where a grid no longer sees it."""
    return -7.0 if z > 1300 else math.log(1000 / z)


def plateaus(z):
    return 0.004 * math.floor(250 * math.log(1000 / z))


def cliff(z):
    return -7.0 if z >= 777.7 else 3.0


@pytest.mark.parametrize("excess", [jumping, plateaus, cliff], ids=lambda each: each.__name__)
@pytest.mark.parametrize("start", [0.01, 900.0, 1250.0, 90_000.0])
@pytest.mark.parametrize("slope", [-2000.0, -1.0, 0.0])
def test_the_search_ends_soon_where_epsilons_jump(excess, start, slope):
    """Each evaluation may take seconds. The rough bound may vanish far from the answer, and by a jump of its own."""
    evaluated = []

    def counted(z):
        evaluated.append(z)
        return excess(z)

    found = calibration._least_noise(counted, lambda log_z: slope * (log_z - math.log(start)) - 1e-9, 1.0)
    assert excess(found) <= 0 < excess(0.99 * found)
    assert len(set(evaluated)) <= 40


@pytest.mark.parametrize("delta", [0.0, -1.0, 1.0, math.nan])
def test_a_delta_that_is_none(delta):
    with pytest.raises(ValueError, match="Expected 0 < target_delta < 1"):
        calibrate_noise_multiplier(gaussian(0.0, Poisson(0.1, 8)), target_epsilon=1.0, target_delta=delta, num_steps=10)
