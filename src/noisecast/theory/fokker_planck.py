"""Many one-dimensional laws at once, advanced on a grid by dp/dt = -d(v p)/dx + d^2(D p)/dx^2 (Fokker and Planck).

Own discretisation: between two places flows (v p)_left/2 + (v p)_right/2 - ((D p)_right - (D p)_left)/h. So the mean of
a law changes by sum p v and its second moment by sum p (2 x v + 2 D), exactly as on the line; no numerical diffusion
blurs it, and where the grid is coarse it is the higher moments that err.
"""

import math
from typing import Any

import numpy as np

Array = Any
GAMMA = 1 - math.sqrt(0.5)  # of the two-stage implicit Runge-Kutta method that is L-stable and of second order


def advance_densities(
    density: Array, *, drift: Array, diffusion: Array, spacing: float, time: float, substeps: int = 2
) -> Array:
    """Laws after `time` in unchanging drift and diffusion, which nothing leaves at the ends of the grid.

    Args:
      density: shares at the places of a uniform grid; (m, n), one law a column, each with the sum 1.
      drift, diffusion: v and D >= 0 at the places; (m, n).   spacing: h > 0.   time: >= 0.   substeps: >= 1.
    Returns: (m, n) >= 0, each with the sum 1.

    >>> x = np.linspace(-6, 6, 49)[:, None]
    >>> law = np.exp(-((x - 1) ** 2) / 0.5)
    >>> law = law / law.sum()
    >>> for _ in range(10):
    ...     law = advance_densities(law, drift=-x, diffusion=np.ones_like(x), spacing=0.25, time=1.0)
    >>> round(float((law * x).sum()), 3), round(float((law * x**2).sum()), 3)        # a spring: it settles at 0 and 1
    (0.0, 1.0)
    """
    step = time / substeps
    out, into = drift / (2 * spacing) + diffusion / spacing**2, diffusion / spacing**2 - drift / (2 * spacing)
    # A p: what flows on to the right from each place, and back to the left from each.
    lower, upper = out[:-1], into[1:]
    diagonal = np.zeros_like(density)
    diagonal[:-1] -= lower
    diagonal[1:] -= upper

    def flow(law: Array) -> Array:
        found = diagonal * law
        found[1:] += lower * law[:-1]
        found[:-1] += upper * law[1:]
        return found

    solve = _tridiagonal(-step * GAMMA * lower, 1 - step * GAMMA * diagonal, -step * GAMMA * upper)
    for _ in range(substeps):
        first = solve(flow(density))
        second = solve(flow(density + step * (1 - GAMMA) * first))
        density = density + step * ((1 - GAMMA) * first + GAMMA * second)
    density = np.maximum(density, 0.0)
    return density / density.sum(axis=0)


def _tridiagonal(lower: Array, diagonal: Array, upper: Array) -> Any:
    """b -> A^-1 b of many tridiagonal A, by Thomas' elimination, a place at a time for all; (m, n) -> (m, n)."""
    inverse, factors = np.empty_like(diagonal), np.empty_like(lower)
    inverse[0] = 1 / diagonal[0]
    for place in range(1, len(diagonal)):
        np.multiply(lower[place - 1], inverse[place - 1], out=factors[place - 1])
        np.divide(1.0, diagonal[place] - factors[place - 1] * upper[place - 1], out=inverse[place])

    def solve(known: Array) -> Array:
        for place in range(1, len(known)):
            known[place] -= factors[place - 1] * known[place - 1]
        known[-1] *= inverse[-1]
        for place in range(len(known) - 2, -1, -1):
            known[place] -= upper[place] * known[place + 1]
            known[place] *= inverse[place]
        return known

    return solve
