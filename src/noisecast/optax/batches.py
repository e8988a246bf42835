"""Batches for a loop of one's own, drawn by the mechanism's sampler."""

import hashlib
import math
from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from noisecast.privacy.drawing import STEPS_PER_BLOCK
from noisecast.privacy.mechanism import SampledGaussian

# Of each key (its hash) the step after the last one handed out in this process: batches are drawn once.
_next_steps: dict[bytes, int] = {}


def private_batches(
    mechanism: SampledGaussian, key: bytes, *, num_steps: int, num_examples: int, first_step: int = 0
) -> Iterator[tuple[NDArray, NDArray]]:
    """Each step's batch, padded to a width that jit sees once: row numbers (width,) int32 and mask (width,) bool.

    Drawn as the mechanism is accounted. A Poisson batch is never cut off, for that would be another sampler than the
    accounted one: about once in a million steps a batch is larger than the usual width, and then `width` grows (and a
    compiled step is compiled anew). Which examples were drawn, and how many, is private.

    Batches are a function of the key and the step. A loop that comes back for more, an epoch later or in a process that
    resumes it, goes on with `first_step`: the same steps again are the same batches again, and the accountant, who
    counts fresh ones, would say far too little. In one process that is refused.

    Args:
      mechanism: whose sampler draws.
      key: 32 bytes that nobody knows, of this purpose alone.
      num_steps: how many, >= 0.   num_examples: rows of the data set.
      first_step: of the whole run, >= 0: how many steps it has taken, `releases(state)`.
    Raises: ValueError for a sampler that has no rows to draw from, sizes that do not fit it, and steps of which a batch
      was handed out before, or a later one's (also while iterating).

    >>> import os
    >>> from noisecast import Poisson, SampledGaussian
    >>> mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson.for_batch_size(4, 100))
    >>> batches = private_batches(mechanism, os.urandom(32), num_steps=3, num_examples=100)
    >>> [rows.shape == mask.shape for rows, mask in batches]
    [True, True, True]
    """
    sampler: Any = mechanism.sampler
    if not hasattr(sampler, "batches"):
        raise ValueError(f"Expected a sampler of a data set, got {sampler}; use Poisson, FixedSize or Shuffled.")
    if not (isinstance(key, bytes) and len(key) == 32):
        raise TypeError("Expected key to be 32 bytes; use os.urandom(32), another than the noise's.")
    if not math.isclose(sampler.num_examples, num_examples, rel_tol=1e-3, abs_tol=1):
        raise ValueError(
            f"Expected num_examples near the sampler's own {sampler.num_examples:g} (B/q), got {num_examples}; the sum "
            "would be divided by a batch size of other data."
        )
    if first_step < 0:
        raise ValueError(f"Expected first_step >= 0, got {first_step}; the first step of a run is 0.")
    _refuse_repeats(key, first_step)
    return _draw(sampler, key, first_step, first_step + num_steps, num_examples)


def _draw(sampler: Any, key: bytes, first: int, last: int, num_examples: int) -> Iterator[tuple[NDArray, NDArray]]:
    for start in range(first, last, STEPS_PER_BLOCK):
        drawn = sampler.batches(key, start, min(start + STEPS_PER_BLOCK, last), num_examples)
        for step, batch in enumerate(zip(drawn.indices, drawn.mask), start):
            _next_steps[_refuse_repeats(key, step)] = step + 1
            yield batch


def _refuse_repeats(key: bytes, step: int) -> bytes:
    """The key's hash. Raises: ValueError where this step, or a later one, was handed out before."""
    known = hashlib.sha256(key).digest()
    if step < _next_steps.get(known, 0):
        raise ValueError(
            f"Expected batches that were not drawn before, got step {step} of a key whose steps up to "
            f"{_next_steps[known] - 1} were handed out: the same batches again are not what is accounted. Go on with "
            f"first_step={_next_steps[known]}, or use a new key for a new run."
        )
    return known
