"""Keys are unique, and nothing has a default seed. The noise drawn from them: test_jax_noise, test_counter_noise."""

import inspect
import itertools

import jax
import numpy as np
import pytest

from noisecast.privacy import jax_noise as jax_noise_module
from noisecast.privacy import noise as noise_module
from noisecast.privacy import sampling as sampling_module
from noisecast.privacy.noise import Purpose, RandomRoot, jax_key, key_data, key_for

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


@pytest.mark.parametrize("module", [noise_module, jax_noise_module, sampling_module])
def test_no_key_seed_or_root_has_a_default(module):
    for _, function in inspect.getmembers(module, inspect.isroutine):
        for parameter in inspect.signature(function).parameters.values():
            if any(word in parameter.name for word in ("key", "seed", "root", "secret", "repeat")):
                assert parameter.default is inspect.Parameter.empty


def test_keys_stack():
    raw = [bytes([i]) * 32 for i in range(3)]
    assert key_data(raw).shape == (3, 2)
    together = jax.random.key_data(jax_key(raw))
    assert np.array_equal(together, np.stack([jax.random.key_data(jax_key(key)) for key in raw]))
