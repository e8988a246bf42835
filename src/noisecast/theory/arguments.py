"""What the formulas take: one gradient norm or an array of them, and degrees of freedom in their range."""

from typing import Any

import numpy as np

Array = Any


def as_column(values: Array) -> np.ndarray:
    """Values of any shape as (m, 1) float64, for a formula that spreads each along a second axis.

    Args:
      values: m numbers; any shape, () is one.
    Returns: (m, 1).

    >>> as_column([1, 2])
    array([[1.],
           [2.]])
    """
    return np.atleast_1d(np.asarray(values, dtype=float)).reshape(-1, 1)


def shaped_like(values: np.ndarray, original: Array) -> Array:
    """The formula's answer for each of `as_column(original)`, in the shape of `original`.

    Args:
      values: (m,).   original: what was asked for; m numbers of any shape.
    Returns: shape of original; a scalar for ().

    >>> float(shaped_like(np.ones(1), 3.0)), shaped_like(np.ones(2), [[1, 2]]).shape
    (1.0, (1, 2))
    """
    return np.reshape(values, np.shape(original))[()]


def checked_degrees_of_freedom(nu: float) -> float:
    """nu of Student-t noise, if it is one.

    Args:
      nu: > 0, inf for Gaussian noise.
    Returns: nu; () > 0.
    Raises: ValueError: nu <= 0, or nan.

    >>> checked_degrees_of_freedom(3)
    3.0
    """
    if not nu > 0:
        raise ValueError(f"Expected degrees_of_freedom > 0, got {nu}; use math.inf for Gaussian noise.")
    return float(nu)
