"""Keys are unique, noise has the promised scale, and nothing has a default seed."""

import inspect
import itertools

import jax
import numpy as np
import pytest
from scipy import stats

from noisecast.privacy import noise as noise_module
from noisecast.privacy import sampling as sampling_module
from noisecast.privacy.noise import Purpose, RandomRoot, draw_noise, jax_key, key_data, key_for, private_mean

ROOT = RandomRoot.from_insecure_seed(0)


def test_keys_are_unique_and_repeatable():
    roots = [ROOT, RandomRoot.from_insecure_seed(1), RandomRoot.from_os_entropy()]
    names = [(), ("a",), ("b",), ("a", "b"), ("ab",), ("a", ""), ("", "a"), (1,), ("1",), (11,), (1, 1)]
    arguments = list(itertools.product(Purpose, names, roots, range(3)))
    keys = [key_for(p, *n, root=r, repeat=k) for p, n, r, k in arguments]
    assert len(set(keys)) == len(arguments)
    assert len({key[:8] for key in keys}) == len(arguments)  # what JAX sees of them
    assert keys == [key_for(p, *n, root=r, repeat=k) for p, n, r, k in arguments]


def test_key_names_are_strings_or_integers():
    with pytest.raises(TypeError, match="strings and integers"):
        key_for(Purpose.PATHS, 1.5, root=ROOT, repeat=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        key_for("no such purpose", root=ROOT, repeat=0)  # type: ignore[arg-type]


def test_roots():
    assert RandomRoot.from_os_entropy() != RandomRoot.from_os_entropy()
    assert RandomRoot.from_os_entropy().is_private
    assert not ROOT.is_private
    secret = RandomRoot.from_os_entropy()
    assert secret.secret.hex() not in repr(secret)
    assert repr(secret.secret) not in repr(secret)
    assert RandomRoot.from_insecure_seed(np.int64(3)) == RandomRoot.from_insecure_seed(3)
    with pytest.raises(TypeError, match="integer insecure seed"):
        RandomRoot.from_insecure_seed(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="32 bytes"):
        RandomRoot(b"short", None)


@pytest.mark.parametrize("module", [noise_module, sampling_module])
def test_no_key_seed_or_root_has_a_default(module):
    for _, function in inspect.getmembers(module, inspect.isroutine):
        for parameter in inspect.signature(function).parameters.values():
            if any(word in parameter.name for word in ("key", "seed", "root", "secret", "repeat")):
                assert parameter.default is inspect.Parameter.empty


@pytest.mark.parametrize("noise_std", [0.03, 4.0])
@pytest.mark.parametrize("scale, passes", [(1.0, True), (0.99, False), (1.01, False)])
def test_noise_has_the_promised_scale(noise_std, scale, passes):
    drawn = scale * np.asarray(draw_noise(jax_key(b"\x05" * 32), (1000, 1000), noise_std, "float32"), float)
    statistic = np.sum((drawn / noise_std) ** 2)
    p = 2 * min(stats.chi2.sf(statistic, drawn.size), stats.chi2.cdf(statistic, drawn.size))
    assert (p > 1e-6) == passes
    if passes:
        assert stats.kstest(drawn.ravel()[:50_000] / noise_std, "norm").pvalue > 1e-6


def test_noise_is_fresh_at_every_step_coordinate_and_scenario():
    keys = jax_key([key_for(Purpose.PRIVACY_NOISE, name, root=ROOT, repeat=0) for name in "ab"])

    def steps(key):
        return jax.vmap(lambda t: draw_noise(jax.random.fold_in(key, t), (500,), 1.0, "float32"))(np.arange(20))

    drawn = np.asarray(jax.vmap(steps)(keys)).reshape(40, 500)
    correlation = np.corrcoef(drawn)
    assert np.abs(correlation[np.triu_indices(40, 1)]).max() < 5.5 / np.sqrt(500)
    assert len(np.unique(drawn)) > 0.99 * drawn.size


def test_keys_stack():
    raw = [bytes([i]) * 32 for i in range(3)]
    assert key_data(raw).shape == (3, 2)
    together = jax.vmap(lambda key: draw_noise(key, (4,), 1.0, "float32"))(jax_key(key_data(raw)))
    alone = [draw_noise(jax_key(key), (4,), 1.0, "float32") for key in raw]
    assert np.array_equal(together, np.stack(alone))


def test_an_empty_batch_is_noised_all_the_same():
    key = jax_key(bytes(32))
    zero = private_mean(np.zeros(1000, np.float32), key, noise_std=2.0, expected_batch_size=4)
    assert np.std(zero) == pytest.approx(0.5, rel=0.1)
    full = private_mean(np.full(1000, 8, np.float32), key, noise_std=2.0, expected_batch_size=4)
    np.testing.assert_allclose(np.asarray(full) - np.asarray(zero), 2.0, rtol=1e-5)


def test_private_mean_is_pure_traceable_and_keeps_its_dtype():
    total = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
    mean = jax.jit(lambda s, std, b: private_mean(total, jax_key(bytes(32)), noise_std=std * s, expected_batch_size=b))
    first = mean(1.0, 0.5, 4.0)
    assert first.shape == (2, 3)
    assert first.dtype == np.float32
    np.testing.assert_allclose(first, mean(1.0, 0.5, 4.0), rtol=0)
    np.testing.assert_allclose(mean(1.0, 0.0, 4.0), total / 4, rtol=1e-6)
