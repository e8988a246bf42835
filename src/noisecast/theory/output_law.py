"""The law of an example's output: at which places it lies, and with which shares."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy import special

Array = Any
NODES = 24  # of a Gaussian
SMALLEST_STD = 1e-3  # none of a logit
EVERY: Any = slice(None)


@dataclass(frozen=True)
class OutputLaw:
    """Laws of outputs z_i = E z_i + std z_i x_i, each as shares of standardised places.

    Args:
      mean, spread: of the outputs, and their standard deviation; (n,), > 0.
      places, shares: of x_i, in single precision; (m, n), or (m, 1) where all have the same. Of mean 0 and variance 1.
    """

    mean: Array
    spread: Array
    places: Array
    shares: Array

    @property
    def std(self) -> Array:
        """The spread, or so much that a quotient by it is known in single precision; (n,) >= `SMALLEST_STD`."""
        return np.maximum(self.spread, SMALLEST_STD)

    def outputs(self, side: Array) -> Array:
        """side_i z_i at its places, in single precision, in which exponentials take a quarter of the time.

        Args:
          side: (n,).
        Returns: (m, n).
        """
        return (side * self.mean).astype(np.float32) + (side * self.std).astype(np.float32) * self.places

    def at(self, places: Array, of: Array = EVERY) -> Array:
        """z_i where the Gaussian behind it is at such places; taken for one, where its law is no function of any.

        Args:
          places: (q,), or (m, q) of each its own.   of: which outputs; m places in [0, n), or all.
        Returns: (m, q).
        """
        return self.mean[of, None] + self.std[of, None] * places

    def hermite_means(self, values: Array, orders: int) -> Array:
        """E[f He_j(x)], j = 0 to orders - 1, of values f at the places.

        Args:
          values: (m, n).   orders: >= 1.
        Returns: (orders, n).
        """
        before, at = np.zeros_like(values), self.shares * values
        found = [at.sum(axis=0)]
        for order in range(1, orders):
            before, at = at, self.places * at - (order - 1) * before
            found.append(at.sum(axis=0))
        return np.stack(found)

    def below(self, threshold: Array) -> Array:
        """P(x < t).

        Args:
          threshold: t; (n,).
        Returns: (n,) in [0, 1].
        """
        raise NotImplementedError


class GaussianLaw(OutputLaw):
    """By the 24 nodes of Gauss and Hermite, which meet the kink of a clipped residual between two of them.

    Args:
      mean, variance: of the outputs; (n,).
    """

    def __init__(self, mean: Array, variance: Array):
        nodes, weights = hermite_nodes(NODES)
        super().__init__(mean, np.sqrt(np.maximum(variance, 1e-30)), nodes[:, None], weights[:, None])

    def hermite_means(self, values: Array, orders: int) -> Array:
        return _weighted_polynomials(orders) @ values

    def below(self, threshold: Array) -> Array:
        return special.ndtr(threshold)


class GridLaw(OutputLaw):
    """On a grid that is the same for all but for its middle and width.

    Args:
      mean: of the outputs; (n,).   places: z - E z at the grid's places; (m, n), evenly spaced in each column.
      shares: of the places, each column with the sum 1, and the mean 0; (m, n).
    """

    def __init__(self, mean: Array, places: Array, shares: Array):
        std = np.sqrt(np.maximum((shares * places**2).sum(axis=0), SMALLEST_STD**2))
        super().__init__(mean, std, (places / std).astype(np.float32), shares.astype(np.float32))

    def below(self, threshold: Array) -> Array:
        spacing = self.places[1] - self.places[0]
        return (self.shares * np.clip((threshold - self.places) / spacing + 0.5, 0.0, 1.0)).sum(axis=0)


class SkewLaw(OutputLaw):
    """Of x + gamma (x^2 - 1), standardised, x of another law: of third moment 6 gamma where that is a Gaussian.

    Args:
      law: of x.   gamma: small beside 1; (n,).

    >>> law = SkewLaw(GaussianLaw(np.zeros(1), np.ones(1)), np.array([0.05]))
    >>> moments = [float((law.shares * law.places**k).sum()) for k in (1, 2, 3)]
    >>> [round(abs(moment), 3) for moment in moments], law.below(np.zeros(1)).round(3)
    ([0.0, 1.0, 0.299], array([0.52]))
    """

    def __init__(self, law: OutputLaw, gamma: Array):
        bent = law.places + gamma * (law.places**2 - 1)
        self.law, self.gamma = law, gamma
        self.width = np.sqrt((law.shares * bent**2).sum(axis=0))
        super().__init__(law.mean, law.spread, (bent / self.width).astype(np.float32), law.shares)

    def at(self, places: Array, of: Array = EVERY) -> Array:
        bent = places + self.gamma[of, None] * (places**2 - 1)
        return self.mean[of, None] + (self.std / self.width)[of, None] * bent

    def below(self, threshold: Array) -> Array:
        reach = 1 + 4 * self.gamma * (self.gamma + threshold * self.width)
        place = 2 * (self.gamma + threshold * self.width) / (1 + np.sqrt(np.maximum(reach, 0.0)))
        return np.where(reach > 0, self.law.below(place), np.where(self.gamma > 0, 0.0, 1.0))


class Cosines:
    """Functions on a uniform grid as sums of cosines, whose slope is 0 at both ends: blurred, and derived.

    In single precision, which takes half the time.

    Args:
      num_places: m.   spacing: h > 0.

    >>> x = np.linspace(-6, 6, 49)[:, None]
    >>> narrow, wide = np.exp(-(x**2) / 0.5), np.exp(-(x**2) / 2)
    >>> bool(np.abs(Cosines(49, 0.25).blurred(narrow, np.sqrt([0.75])) - wide / 2).max() < 1e-5)
    True
    >>> bool(np.abs(Cosines(49, 0.25).derived(wide) + x * wide).max() < 1e-5)
    True
    """

    def __init__(self, num_places: int, spacing: float):
        order, place = np.arange(num_places), np.arange(num_places) + 0.5
        angles = np.pi / num_places * order[:, None] * place
        norm = np.sqrt(np.where(order == 0, 1, 2) / num_places)[:, None]
        waves, cosines = np.pi * order[:, None] / (num_places * spacing), norm * np.cos(angles)
        self.waves, self.cosines = waves.astype(np.float32), cosines.astype(np.float32)
        self.derivative = (-(waves * norm * np.sin(angles)).T @ cosines).astype(np.float32)

    def blurred(self, values: Array, blur: Array) -> Array:
        """E f(x + blur xi), xi a standard normal; (m, n), (n,) -> (m, n). Also the law of x + blur xi, of that of x."""
        narrowed = np.exp(-((self.waves * blur.astype(np.float32)) ** 2) / 2)
        return self.cosines.T @ (narrowed * (self.cosines @ values.astype(np.float32)))

    def derived(self, values: Array) -> Array:
        """f'; (m, n) -> (m, n)."""
        return self.derivative @ values.astype(np.float32)


@cache
def hermite_nodes(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of a standard normal; (order,) each, in single precision."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return nodes.astype(np.float32), (weights / weights.sum()).astype(np.float32)


@cache
def _weighted_polynomials(orders: int) -> np.ndarray:
    """He_0, He_1, ... at a Gaussian's places, times its shares; (orders, m)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    rows = [np.polynomial.hermite_e.hermeval(nodes, row) for row in np.eye(orders)]
    return (np.stack(rows) * weights / weights.sum()).astype(np.float32)
