"""What the outputs of a model share: they swing together, and not as a Gaussian does.

Where features are not centred, or classes are told apart by a bias, the outputs z_i of all examples follow one number,
their mean. With s that number, standardised, and a_i = Cov(z_i, s),

    z_i = E z_i + a_i s + what is left, a Gaussian that is independent of s.

A step moves s by the examples' pull F(s), a sum of E[rho_i | s] over clipped residuals rho_i, and by noise of variance
D. The pull is bounded, and next to nothing in the middle where every example is clipped and both classes are as many:
there s wanders as in a box, and a Gaussian closure is told a force that is not there. So its law p is found by itself,

    dp/dt = d/ds (F p) + D/2 d^2 p/ds^2                                   (Fokker and Planck),

or, where single steps are large, by their own kernel, p'(s') = int N(s'; s - F(s), D) p(s) ds. It knows mean and
variance of s too. What an example's output is expected to do then follows from Mehler's formula: with b_i = a_i/std z_i
the standardised z_i has a Gaussian's density times 1 + sum_j c_j b_i^j He_j, c_j = E He_j(s)/j!. Own derivation.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.polynomial.hermite_e import hermeval
from scipy.linalg import expm
from scipy.ndimage import map_coordinates

from noisecast.theory.frozen_steps import SATURATED, geometric_sum

Array = Any
GRID = np.linspace(-7.0, 7.0, 71)  # of s, in standard deviations
SPACING = float(GRID[1] - GRID[0])
ORDERS = (3, 4, 5, 6)  # of the polynomials by which examples know the law


class Swing(NamedTuple):
    """The law of s, standardised.

    Args:
      density: shares of the places of `GRID`; their sum is 1, their mean 0 and their variance 1.
    """

    density: Array

    @classmethod
    def gaussian(cls) -> "Swing":
        """The standard normal law on `GRID`."""
        density = np.exp(-(GRID**2) / 2)
        return cls(density / density.sum())

    @property
    def coefficients(self) -> Array:
        """c_3 to c_6: 0 of a Gaussian.

        Returns: (4,).

        >>> bool(np.abs(Swing.gaussian().coefficients).max() < 1e-7)
        True
        """
        return _polynomials() @ self.density

    def departures(self, correlations: Array) -> Array:
        """c_j b_i^j, j = 3 to 6, by which outputs of correlation b_i with s depart from Gaussians; (n,) -> (4, n).

        Args:
          correlations: b_i, of an example's output and s; (n,) in [-1, 1].
        Returns: (4, n).
        """
        powers = np.cumprod(np.broadcast_to(correlations, (ORDERS[-1], len(correlations))), axis=0)
        return self.coefficients[:, None] * powers[ORDERS[0] - 1 :]

    def mean_of(self, values: Array) -> Array:
        """E f(s) of the values f on `GRID`; (..., 71) -> (...).

        Args:
          values: f on `GRID`; (..., 71).
        Returns: (...).
        """
        return values @ self.density

    def variance_of(self, values: Array) -> float:
        """Var f(s) of the values f on `GRID`; (71,).

        Args:
          values: f on `GRID`; (71,).
        Returns: () >= 0.
        """
        return float(self.mean_of((values - self.mean_of(values)) ** 2))

    def slope_share(self, pull: Array) -> float:
        """E[s R]/E R' of a pull R on `GRID`: how much stiffer than its mean slope s finds it; 1 of a Gaussian (Stein).

        Args:
          pull: R on `GRID`; (71,).
        Returns: () in [0.1, 10]; 1 where R does not pull back.

        >>> round(Swing.gaussian().slope_share(np.tanh(GRID)), 6)
        1.0
        """
        slope = np.gradient(pull, SPACING)
        stein = Swing.gaussian()
        parts = [float(law.mean_of(part)) for law in (self, stein) for part in (GRID * pull, slope)]
        if min(parts) <= 0:
            return 1.0
        return float(np.clip(parts[0] / parts[1] * parts[3] / parts[2], 0.1, 10.0))

    def moved(
        self, pull: Array, noise: float, num_steps: int, *, mean: float, std: float, lag: float = 0.0
    ) -> tuple["Swing", float, float]:
        """The law after num_steps in an unchanging pull, its mean and its standard deviation.

        Args:
          pull: F on `GRID`; (71,) per step.   noise: D > 0 per step.   num_steps: >= 1.
          mean, std: where on `GRID` this law is at the start, and how wide.
          lag: L of directions behind gradients. With one there are no single steps; the law on which s settles is the
            same, as that of a heavy particle is.
        Returns: the law, standardised, and its mean and standard deviation on `GRID`.

        >>> law, mean, std = Swing.gaussian().moved(0.01 * GRID, 0.02, 1000, mean=1.0, std=0.5)
        >>> round(mean, 2), round(std, 2)                                          # a spring's: it settles at 0 and 1
        (0.0, 1.0)
        """
        density = _between_places(self.density, (GRID - mean) / std)
        if _in_single_steps(noise, lag):
            density = _stepped(density, pull, noise, num_steps)
        else:
            density = _diffused(density, pull, noise, num_steps)
        mean = float(GRID @ density)
        std = math.sqrt((GRID - mean) ** 2 @ density)
        return Swing(_standardised(density)), mean, std


def moved_by_spring(
    push: float, slope: float, noise: float, num_steps: int, *, mean: float, std: float, lag: float = 0.0
) -> tuple[float, float]:
    """Mean and standard deviation where `Swing.moved` would lead if the pull were push + slope s.

    Args:
      push, slope: of the pull, per step.   noise, num_steps, mean, std, lag: as `Swing.moved`.
    Returns: mean and standard deviation; () each.

    >>> mean, std = moved_by_spring(0.0, 0.01, 0.02, 1000, mean=1.0, std=0.5)
    >>> round(mean, 2), round(std, 2)
    (0.0, 1.0)
    """
    if _in_single_steps(noise, lag):
        x = min(slope, SATURATED)
        fading = x * (2 - x)
        steps, squares = (float(geometric_sum(each, num_steps)) for each in (x, fading))
    else:
        x, fading = slope, 2 * slope
        steps, squares = (-math.expm1(-each * num_steps) / each if each > 0 else num_steps for each in (x, fading))
    return mean - (push + x * mean) * steps, math.sqrt(std**2 * (1 - fading * squares) + noise * squares)


def _in_single_steps(noise: float, lag: float) -> bool:
    """Where steps are so large that places are seen between them."""
    return noise > SPACING**2 / 2 and lag == 0


def explained_by_gaussian(values: Array, orders: Sequence[int]) -> float:
    """Sum of (E f He_k)^2/k!, what these orders have of Var f(s) of a Gaussian s; f on `GRID`.

    Args:
      values: f on `GRID`; (71,).   orders: k >= 1.
    Returns: () >= 0.

    >>> round(explained_by_gaussian(GRID**2, (1, 2)), 6)                            # Var s^2
    2.0
    """
    coefficients = [float(Swing.gaussian().mean_of(values * hermeval(GRID, np.eye(k + 1)[k]))) for k in orders]
    return sum(c**2 / math.factorial(k) for c, k in zip(coefficients, orders))


def _diffused(density: Array, pull: Array, noise: float, num_steps: int) -> Array:
    """exp(n L) p, L the jumps between neighbouring places at the rates of Scharfetter and Gummel.

    They settle on the law exp(-2/D int F) at any spacing.
    """
    tilt = np.clip((pull[1:] + pull[:-1]) / noise * SPACING, -600, 600)
    up, down = (noise / (2 * SPACING**2) * _bernoulli(x) for x in (tilt, -tilt))
    leaving = np.concatenate([up, [0.0]]) + np.concatenate([[0.0], down])
    jumps = np.diag(up, -1) + np.diag(down, 1) - np.diag(leaving)
    return _normalised(expm(num_steps * jumps) @ density)


def _stepped(density: Array, pull: Array, noise: float, num_steps: int) -> Array:
    """K^n p, K the kernel of a step s -> s - F(s) + noise."""
    to = np.clip(GRID - pull, GRID[0], GRID[-1])
    kernel = np.exp(-((GRID[:, None] - to) ** 2) / (2 * noise))
    return _normalised(np.linalg.matrix_power(kernel / kernel.sum(axis=0), num_steps) @ density)


def _bernoulli(x: Array) -> Array:
    """x/(e^x - 1)."""
    small = np.abs(x) < 1e-8
    return np.where(small, 1 - x / 2, x / np.expm1(np.where(small, 1.0, x)))


def _standardised(density: Array) -> Array:
    for _ in range(2):  # the first leaves what the grid makes of it
        mean = GRID @ density
        density = _between_places(density, mean + math.sqrt((GRID - mean) ** 2 @ density) * GRID)
    return density


def _between_places(density: Array, places: Array) -> Array:
    # Not by scipy.interpolate: it takes a third of a second to import, and every worker would wait for it.
    return _normalised(map_coordinates(density, [(places - GRID[0]) / SPACING], order=3, mode="constant"))


def _normalised(density: Array) -> Array:
    density = np.maximum(density, 0.0)
    return density / density.sum()


@cache
def _polynomials() -> Array:
    """He_j/j! on `GRID`, of `ORDERS`."""
    return np.stack([hermeval(GRID, np.eye(7)[j]) / math.factorial(j) for j in ORDERS])
