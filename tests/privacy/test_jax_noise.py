"""Noise inside JAX: the words are Threefry's, the numbers Box-Muller's, the scale is the promised one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import stats

from noisecast.privacy.jax_noise import (
    _word_pairs,
    _word_pairs_on_a_cpu,
    counter_keys,
    derived_key,
    private_mean,
    standard_normal,
    threefry,
)
from noisecast.privacy.noise import Purpose, RandomRoot, key_for

ROOT = RandomRoot.from_insecure_seed(910_001)  # chosen before any result
KEY = counter_keys(key_for(Purpose.PRIVACY_NOISE, "test", root=ROOT, repeat=0))


@pytest.mark.parametrize(
    "key, counter, words",
    [  # known answers published with Random123
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_words_are_threefrys(key, counter, words):
    got = threefry(jnp.array(key, jnp.uint32), *(jnp.uint32(part) for part in counter))
    assert tuple(int(word) for word in got) == words


@pytest.mark.parametrize("size", [1, 2, 7, 100_001])
def test_numbers_are_box_mullers_of_those_words(size):
    """In float64 from JAX's own Threefry; words whose bits happen to be a NaN's pass through unharmed."""
    pairs = (size + 1) // 2
    counter = jnp.concatenate([jnp.arange(pairs, dtype=jnp.uint32), jnp.full(pairs, 5, jnp.uint32)])
    words = np.asarray(threefry_2x32((KEY[0], KEY[1]), counter))
    unit = (words[:pairs].astype(np.float32) + np.float32(0.5)) / np.float32(2**32)  # 24 bits of the word are kept
    radius = np.sqrt(-2 * np.log(unit.astype(np.float64)))
    angle = 2 * np.pi * words[pairs:].astype(np.float64) / 2**32
    exact = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]
    for draw in (standard_normal, jax.jit(standard_normal, static_argnums=2)):
        np.testing.assert_allclose(draw(KEY, 5, (size,)), exact, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("step", [0, 1, 2**31 - 2])
@pytest.mark.parametrize("size", [1, 100_001])
def test_every_kind_of_device_draws_the_same_words(size, step):
    """The loop that a CPU needs changes no bit, of one key or of several side by side."""
    index, steps = jnp.arange(size, dtype=jnp.uint32), jnp.int32(step)
    plain, looped = (np.asarray(jax.jit(words)(KEY, steps, index)) for words in (_word_pairs, _word_pairs_on_a_cpu))
    np.testing.assert_array_equal(plain.view(np.uint32), looped.view(np.uint32))
    keys = jnp.stack([KEY, KEY + 1])
    both = np.asarray(jax.jit(jax.vmap(_word_pairs_on_a_cpu, (0, None, None)))(keys, steps, index))
    np.testing.assert_array_equal(both[0].view(np.uint32), plain.view(np.uint32))
    assert (both[1].view(np.uint32) != plain.view(np.uint32)).any(), "another key, other words"


@pytest.mark.parametrize("noise_std", [0.03, 4.0])
@pytest.mark.parametrize("scale, passes", [(1.0, True), (0.99, False), (1.01, False)])
def test_noise_has_the_promised_scale(noise_std, scale, passes):
    zero = np.zeros((1000, 1000), np.float32)
    normals = standard_normal(KEY, 3, zero.shape)
    drawn = scale * np.asarray(private_mean(zero, normals, noise_std=noise_std, expected_batch_size=4), float)
    statistic = np.sum((drawn / (noise_std / 4)) ** 2)
    p = 2 * min(stats.chi2.sf(statistic, drawn.size), stats.chi2.cdf(statistic, drawn.size))
    assert (p > 1e-6) == passes
    if passes:
        assert stats.kstest(drawn.ravel()[:50_000] / (noise_std / 4), "norm").pvalue > 1e-6


def test_noise_is_fresh_at_every_step_coordinate_and_scenario():
    keys = counter_keys([key_for(Purpose.PRIVACY_NOISE, name, root=ROOT, repeat=0) for name in "abc"])
    draw = jax.vmap(jax.vmap(lambda key, step: standard_normal(key, step, (500,)), (None, 0)), (0, None))
    drawn = np.asarray(draw(keys, np.arange(20))).reshape(60, 500)
    rows = np.corrcoef(drawn)[np.triu_indices(60, 1)]
    assert np.abs(rows).max() < 5.5 / np.sqrt(500)
    many = np.asarray(standard_normal(KEY, 0, (4000, 30)))  # coordinates beside each other, and half a draw apart
    columns = np.corrcoef(many.T)[np.triu_indices(30, 1)]
    assert np.abs(columns).max() < 5.5 / np.sqrt(4000)
    assert len(np.unique(drawn)) > 0.999 * drawn.size
    for first, second in itertools.combinations(np.split(many.ravel(), 4), 2):
        assert abs(np.corrcoef(first**2, second**2)[0, 1]) < 5.5 / np.sqrt(first.size)


def test_a_run_draws_the_same_alone_and_in_a_group():
    keys = counter_keys([bytes([i]) * 32 for i in range(3)])
    together = jax.vmap(lambda key: standard_normal(key, 4, (5,)))(keys)
    np.testing.assert_array_equal(together, np.stack([standard_normal(key, 4, (5,)) for key in keys]))


def test_other_variates_of_a_step_have_a_key_of_their_own():
    others = {tuple(jax.random.key_data(derived_key(KEY, step)).tolist()) for step in range(50)}
    assert len(others) == 50 and tuple(KEY.tolist()) not in others


def test_an_empty_batch_is_noised_all_the_same():
    normals = standard_normal(KEY, 0, (1000,))
    zero = private_mean(np.zeros(1000, np.float32), normals, noise_std=2.0, expected_batch_size=4)
    assert np.std(zero) == pytest.approx(0.5, rel=0.1)
    full = private_mean(np.full(1000, 8, np.float32), normals, noise_std=2.0, expected_batch_size=4)
    np.testing.assert_allclose(np.asarray(full) - np.asarray(zero), 2.0, rtol=1e-5)


def test_a_draw_of_exactly_zero_does_not_show_in_a_sign():
    """Were it released, a sign of 0 would tell of a coordinate without gradient; the accounted law has no such sign."""
    zero = np.zeros(3, np.float32)
    noisy = private_mean(zero, jnp.array([0.0, 1.0, -1.0]), noise_std=2.0, expected_batch_size=4)
    np.testing.assert_array_equal(jnp.sign(noisy), [1, 1, -1])
    np.testing.assert_allclose(noisy, [0, 0.5, -0.5], atol=1e-30)
    without = private_mean(zero, jnp.array([0.0, 1.0, -1.0]), noise_std=0.0, expected_batch_size=4)
    np.testing.assert_array_equal(without, zero)  # and what is untouched stays where it is without noise


def test_private_mean_is_pure_traceable_and_keeps_its_dtype():
    total = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)

    @jax.jit
    def mean(std, b, step):
        return private_mean(total, standard_normal(KEY, step, (2, 3)), noise_std=std, expected_batch_size=b)

    first = mean(0.5, 4.0, 7)
    assert first.shape == (2, 3) and first.dtype == np.float32
    np.testing.assert_allclose(first, mean(0.5, 4.0, 7), rtol=0)
    np.testing.assert_allclose(mean(0.0, 4.0, 7), total / 4, rtol=1e-6)
    assert not np.allclose(first, mean(0.5, 4.0, 8))
