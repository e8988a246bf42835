"""Where randomness comes from, and the only place that makes random keys.

Randomness starts from one `RandomRoot` and is handed down by name: `key_for(purpose, *names, root=, repeat=)`. There is
no default seed anywhere. The noise itself is drawn from these keys in `jax_noise` (inside JAX), in `aes_noise` and
`counter_noise` (inside compiled loops), and in `secure_noise`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import jax


class Purpose(StrEnum):
    """What a key is for. Privacy noise shares its stream with nothing."""

    BATCHES = "batches"
    PRIVACY_NOISE = "privacy_noise"
    EXAMPLE_NOISE = "example_noise"  # per-example gradient noise of a synthetic problem
    PATHS = "paths"  # the Brownian paths of a simulated SDE
    INITIAL_PARAMS = "initial_params"
    NAME = "name"  # of a run, to be written where others read it
    DATA = "data"  # synthetic data and splits
    TRIALS = "trials"  # how many random trials a sweep makes, and of what


class SecureKey(bytes):
    """A key whose numbers must come from a cipher: who draws from it may use no other generator."""


@dataclass(frozen=True)
class RandomRoot:
    """The secret that all keys of an answer derive from.

    Take it from the operating system (`from_os_entropy`) for a private release, or from a number (`from_insecure_seed`)
    for an answer that others can reproduce: who knows the seed knows the noise, so that run is not private.

    Args:
      secret: 32 bytes.   insecure_seed: the number it was made of, or None.
      secure_noise: whether batches and privacy noise are drawn by a cipher (ChaCha20) everywhere; else by fast
        counter-based generators, of which Philox (batches) and Threefry (noise, where it is not AES') pass every
        statistical test but nobody promises that they are unpredictable.

    >>> RandomRoot.from_insecure_seed(7)
    RandomRoot(insecure_seed=7, secure_noise=False)
    """

    secret: bytes = field(repr=False)
    insecure_seed: int | None
    secure_noise: bool = False

    def __post_init__(self) -> None:
        if len(self.secret) != 32:
            raise ValueError(
                f"Expected a secret of 32 bytes, got {len(self.secret)}; use RandomRoot.from_os_entropy()."
            )
        if self.secure_noise and self.insecure_seed is not None:
            raise ValueError("Expected no insecure seed with secure_noise: no cipher hides a seed that is known.")

    @classmethod
    def from_os_entropy(cls, *, secure_noise: bool = False) -> RandomRoot:
        """32 bytes from the operating system's generator.

        Args:
          secure_noise: as of the class.
        Returns: a root that nobody knows.
        """
        return cls(os.urandom(32), None, secure_noise)

    @classmethod
    def from_insecure_seed(cls, seed: int) -> RandomRoot:
        """A root that anybody who knows the seed can rebuild: reproducible, not private.

        Args:
          seed: an integer of at most 64 bits.
        Returns: the same root for the same seed.
        Raises: TypeError for what is no integer, ValueError for a longer one.
        """
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise TypeError(f"Expected an integer insecure seed, got {seed!r}.")
        seed = int(seed)
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"Expected an insecure seed of at most 64 bits, got {seed}.")
        return cls(hashlib.sha256(b"noisecast insecure seed " + str(seed).encode()).digest(), seed)

    @property
    def is_private(self) -> bool:
        """Whether nobody can rebuild it: it was not made of a seed."""
        return self.insecure_seed is None

    @property
    def name(self) -> str:
        """A public name of this root, 16 hexadecimal digits, from which nothing that it draws can be told."""
        return key_for(Purpose.NAME, root=self, repeat=0).hex()[:16]


def key_for(purpose: Purpose, *names: str | int, root: RandomRoot, repeat: int) -> bytes:
    """HMAC-SHA256(root, (purpose, names..., repeat)): 32 bytes, unrelated for any two different arguments.

    Every part is written with its type and length, so that no two lists of parts read the same.

    Args:
      purpose: what the key is for.
      names: whose key it is, e.g. the scenario's id; strings or integers.
      root: where the randomness comes from.
      repeat: the number of the repetition (the table's `seed` column).
    Returns: 32 bytes, a `SecureKey` if the root asks for secure noise.

    >>> root = RandomRoot.from_insecure_seed(0)
    >>> key_for(Purpose.BATCHES, "a", root=root, repeat=0) == key_for(Purpose.PRIVACY_NOISE, "a", root=root, repeat=0)
    False
    """
    parts = [_encode(part) for part in (str(Purpose(purpose)), *names, repeat)]
    key = hmac.new(root.secret, b"".join(parts), hashlib.sha256).digest()
    return SecureKey(key) if root.secure_noise else key


def _encode(part: str | int) -> bytes:
    if isinstance(part, bool) or not isinstance(part, str | int | np.integer):
        raise TypeError(f"Expected names of strings and integers, got {part!r}.")
    kind, text = (b"s", part.encode()) if isinstance(part, str) else (b"i", str(int(part)).encode())
    return kind + len(text).to_bytes(8, "big") + text


def key_data(keys: bytes | Sequence[bytes]) -> NDArray[np.uint32]:
    """The first 64 bits of a key as JAX's raw key data: (2,) uint32, or (n, 2) for n keys, ready to stack and vmap.

    Args:
      keys: one of at least 8 bytes, or n.
    Returns: (2,) or (n, 2) uint32.

    >>> key_data([bytes(32), b"\\x01" * 32]).tolist()
    [[0, 0], [16843009, 16843009]]
    """
    if isinstance(keys, bytes):
        return np.frombuffer(keys[:8], ">u4").astype(np.uint32)
    return np.stack([key_data(key) for key in keys])


def key_words(key: bytes) -> NDArray[np.uint32]:
    """A key of 32 bytes as words, most significant first: (8,) uint32. Threefry takes four of them, ChaCha20 all.

    Args:
      key: 32 bytes.
    Returns: (8,) uint32.

    >>> key_words(bytes(31) + b"\x07").tolist()
    [0, 0, 0, 0, 0, 0, 0, 7]
    """
    return np.frombuffer(key, ">u4").astype(np.uint32)


def jax_key(keys: bytes | Sequence[bytes] | NDArray[np.uint32]) -> jax.Array:
    """JAX's typed Threefry key: shape () for one key, (n,) for a sequence of n keys or their stacked `key_data`.

    The key of step t is `jax.random.fold_in(key, t)`, so that a resumed run draws what the uninterrupted one did. Not
    for privacy noise: that is `jax_noise.private_mean`.

    Args:
      keys: one of at least 8 bytes, n of them, or their `key_data`; (n, 2).
    Returns: a typed key array; () or (n,).

    >>> jax_key([bytes(32), bytes(32)]).shape
    (2,)
    """
    import jax

    data = keys if isinstance(keys, np.ndarray) else key_data(keys)
    return jax.random.wrap_key_data(jax.numpy.asarray(data), impl="threefry2x32")
