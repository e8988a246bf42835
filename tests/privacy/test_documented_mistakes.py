"""What mistakes cost that `docs/optax.md` and `docs/opacus.md` warn of: the numbers that they give."""

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian

from noisecast import Poisson, SampledGaussian, Shuffled, epsilon_spent

DELTA = 1e-5


def epsilon(sampler, noise_multiplier, num_steps) -> float:
    mechanism = SampledGaussian(noise_multiplier=noise_multiplier, l2_clip_norm=1.0, sampler=sampler)
    return epsilon_spent(mechanism, num_steps=num_steps, target_delta=DELTA).epsilon


def test_batches_of_one_key_each_epoch():
    """Ten epochs of the same 100 batches: each is released ten times, which is once with z / sqrt(10)."""
    assert epsilon(Poisson(0.01, 10), 1.0, 1000) == pytest.approx(1.83, abs=0.005)
    assert epsilon(Poisson(0.01, 10), 10**-0.5, 100) == pytest.approx(23.3, abs=0.05)


def test_momentum_between_clip_and_noise():
    """sum_k 0.9^(t - k) of 100 gradients, each step with noise of its own; in each a record may move every sum."""
    moved = 10 * (1 - 0.9 ** np.arange(1, 101))
    assert get_epsilon_gaussian(40 / 100**0.5, DELTA) == pytest.approx(0.93, abs=0.005)
    assert get_epsilon_gaussian(40 / np.linalg.norm(moved), DELTA) == pytest.approx(12.0, abs=0.05)


def test_the_original_loader():
    assert epsilon(Poisson(0.1, 100), 1.0, 30) == pytest.approx(4.18, abs=0.005)
    assert epsilon(Shuffled(100, 1000), 1.0, 30) == pytest.approx(8.39, abs=0.005)
