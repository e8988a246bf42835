"""The mechanism is one object: what changes the noise or the sampling changes the epsilon with it."""

import dataclasses
import json
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from noisecast.privacy.accounting import epsilon_spent
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.sampling import FixedSize, Poisson, Shuffled, Stream

BASE = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=0.5, sampler=Poisson(0.01, 64))


def epsilon(mechanism):
    return epsilon_spent(mechanism, num_steps=100, target_delta=1e-5).epsilon


def test_scales():
    mechanism = SampledGaussian(noise_multiplier=3.0, l2_clip_norm=0.5, sampler=Poisson(0.01, 64))
    assert mechanism.noise_std == 1.5
    assert mechanism.mean_noise_std == 1.5 / 64
    assert mechanism.sensitivity == 0.5
    assert dataclasses.replace(mechanism, adjacency=Adjacency.REPLACE_ONE).sensitivity == 1.0
    assert dataclasses.replace(mechanism, adjacency=Adjacency.REPLACE_ONE).noise_std == 1.5
    assert mechanism.with_noise_multiplier(1.0).noise_std == 0.5


@pytest.mark.parametrize(
    "change, epsilon_changes, noise_changes",
    [
        ({"noise_multiplier": 1.1}, True, True),
        ({"l2_clip_norm": 0.6}, False, True),  # the noise follows the sensitivity
        ({"sampler": Poisson(0.012, 64)}, True, False),
        ({"sampler": Poisson(0.01, 32)}, False, True),  # the divisor is post-processing, but the mean's noise moves
        ({"sampler": Shuffled(64, 6400)}, True, False),
        ({"sampler": Stream(64)}, True, False),
        ({"adjacency": Adjacency.REPLACE_ONE}, True, False),
        ({"sampler": FixedSize(64, 6400), "adjacency": Adjacency.REPLACE_ONE}, True, False),
    ],
)
def test_any_change_shows_in_epsilon_or_noise(change, epsilon_changes, noise_changes):
    other = dataclasses.replace(BASE, **change)
    assert (abs(epsilon(other) / epsilon(BASE) - 1) > 0.02) == epsilon_changes
    assert (other.mean_noise_std != BASE.mean_noise_std) == noise_changes


def test_it_is_frozen_hashable_and_picklable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.noise_multiplier = 2.0  # type: ignore[misc]
    assert hash(BASE) == hash(dataclasses.replace(BASE))
    assert pickle.loads(pickle.dumps(BASE)) == BASE


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier >= 0, got -1"),
        ({"noise_multiplier": math.nan}, "noise_multiplier >= 0, got nan"),
        ({"noise_multiplier": math.inf}, "noise_multiplier >= 0, got inf"),
        ({"l2_clip_norm": 0.0}, "l2_clip_norm > 0, got 0"),
        ({"l2_clip_norm": math.inf}, "l2_clip_norm > 0, got inf"),
        ({"sampler": FixedSize(64, 6400)}, "replace_one for fixed-size batches"),
        ({"adjacency": "none"}, "none"),
    ],
)
def test_out_of_range_is_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(BASE, **change)


def test_event_is_relative_to_the_clip():
    event = dataclasses.replace(BASE, l2_clip_norm=7.0, adjacency=Adjacency.REPLACE_ONE).dp_event(10)
    assert event.count == 10
    assert event.event.sampling_probability == 0.01
    assert event.event.event.noise_multiplier == 1.0


def test_words():
    assert "Poisson" in BASE.statement()
    assert "adding or removing one record" in BASE.statement()
    shuffled = dataclasses.replace(BASE, sampler=Shuffled(64, 6400))
    assert "not the (usually much smaller) Poisson number" in shuffled.statement()
    assert f"{BASE.mean_noise_std:.6g}" in BASE.where_is_the_noise()


def test_numbers_from_numpy_are_fine():
    mechanism = SampledGaussian(noise_multiplier=np.float64(1.0), l2_clip_norm=np.float64(0.5), sampler=BASE.sampler)
    assert mechanism == BASE
    assert epsilon(mechanism) == epsilon(BASE)


def test_importing_privacy_imports_neither_jax_nor_numba_nor_dp_accounting():
    code = (
        "import sys, noisecast.privacy.sampling, noisecast.privacy.noise, noisecast.privacy.mechanism, "
        "noisecast.privacy.accounting; print([m for m in ('jax', 'numba', 'dp_accounting') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("sampler", [Poisson(0.01, 64), FixedSize(64, 6400), Shuffled(64, 6400)])
def test_what_json_holds_is_the_same_mechanism(sampler, adjacency):
    try:
        mechanism = dataclasses.replace(BASE, sampler=sampler, adjacency=adjacency)
    except ValueError:
        pytest.skip("not accounted")
    again = SampledGaussian.from_data(json.loads(json.dumps(mechanism.as_data())))
    assert again == mechanism and epsilon(again) == epsilon(mechanism)
