"""Weights for release, rounded to a public grid that is far coarser than what computing them leaves in their last bits.

Which float32 numbers can come out depends on how often a weight was added to: the postponed noise of a row that no
example touched is one product, of which float32 has few, and a row that was touched is a sum (Mironov, CCS 2012, of one
release). In exact arithmetic both have one law. Beside a grid a thousand times coarser than the roundings they have it
here too; rounding is post-processing and costs no privacy.
"""

import numpy as np

FINEST = 2.0**-12  # of the noise's standard deviation: rounding adds a 2 * 10^8th of its variance
KEPT_BITS = 16  # of float32's 24, of a weight that is large beside its noise


def on_public_grid(weights: np.ndarray, noise_std: float) -> np.ndarray:
    """Each weight as a multiple of a power of two: 2^-12 of `noise_std`, or 2^-16 of its own binade if that is more.

    Args:
      weights: any shape, float32.   noise_std: > 0, that noise has given each of them, from public numbers [params].
    Returns: shape of weights, float32.
    Raises: ValueError for another noise_std.

    >>> on_public_grid(np.array([0.1, 0.10001, 3.0, 0.0], np.float32), 1.0).tolist()
    [0.10009765625, 0.10009765625, 3.0, 0.0]
    """
    if not 0 < noise_std < np.inf:
        raise ValueError(f"Expected 0 < noise_std < infinity, got {noise_std}; without noise nothing is hidden.")
    _, exponent = np.frexp(weights)
    coarse = np.ldexp(1.0, np.maximum(np.frexp(FINEST * noise_std)[1] - 1, exponent - KEPT_BITS))
    return (np.rint(weights.astype(np.float64) / coarse) * coarse).astype(np.float32)
