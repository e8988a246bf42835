"""Compute in the namespace of what is given: NumPy, or JAX if any argument is a JAX array. Never imports JAX itself."""

import sys
from typing import Any


def special_and_math(*arrays: Any) -> tuple[Any, Any]:
    """The array namespace of the arguments and its special functions.

    Args:
      *arrays: anything; one JAX array (concrete or traced) is enough to choose JAX.
    Returns: (numpy, scipy.special), or (jax.numpy, jax.scipy.special).

    >>> special_and_math(1.0, [2.0])[0].__name__
    'numpy'
    """
    jax = sys.modules.get("jax")  # who holds a JAX array has imported JAX
    if jax is not None and any(isinstance(array, jax.Array) for array in arrays):
        import jax.numpy
        import jax.scipy.special

        return jax.numpy, jax.scipy.special
    import numpy
    import scipy.special

    return numpy, scipy.special
