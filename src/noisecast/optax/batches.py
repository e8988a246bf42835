"""Batches for a loop of one's own, drawn by the mechanism's sampler."""

import math
from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from noisecast.privacy.drawing import STEPS_PER_BLOCK
from noisecast.privacy.mechanism import SampledGaussian


def private_batches(
    mechanism: SampledGaussian, key: bytes, *, num_steps: int, num_examples: int
) -> Iterator[tuple[NDArray, NDArray]]:
    """Each step's batch, padded to a width that jit sees once: row numbers (width,) int32 and mask (width,) bool.

    Drawn as the mechanism is accounted. A Poisson batch is never cut off, for that would be another sampler than the
    accounted one: about once in a million steps a batch is larger than the usual width, and then `width` grows (and a
    compiled step is compiled anew). Which examples were drawn, and how many, is private.

    Args:
      mechanism: whose sampler draws.
      key: 32 bytes that nobody knows, of this purpose alone.
      num_steps: T >= 0.   num_examples: rows of the data set.
    Raises: ValueError for a sampler that has no rows to draw from, or sizes that do not fit it.

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
    return _draw(sampler, key, num_steps, num_examples)


def _draw(sampler: Any, key: bytes, num_steps: int, num_examples: int) -> Iterator[tuple[NDArray, NDArray]]:
    for start in range(0, num_steps, STEPS_PER_BLOCK):
        drawn = sampler.batches(key, start, min(start + STEPS_PER_BLOCK, num_steps), num_examples)
        yield from zip(drawn.indices, drawn.mask)
