"""DP-Adam's first steps, one by one: weights w and both averages of gradients fluctuate together.

    m' = b1 m + (1 - b1) g,     v' = b2 v + (1 - b2) g^2,     w' = w - eta m_hat/(sqrt(v_hat) + eps),

m_hat = m'/(1 - b1^t) and v_hat = v'/(1 - b2^t). At first v_hat is made of the few gradients that m_hat is made of: one
that is large enlarges the root that divides it, and of a gradient far above its noise a sign is left, which hardly
fluctuates. And weights swing, since directions go on where the force has turned. So nothing is taken for settled here:
with D = 1/(sqrt(v_hat) + eps) and deviations d of Gaussians, to first order

    dg = J dw + noise,     dm' = b1 dm + (1 - b1) dg,     dv' = b2 dv + (1 - b2)(2 E g dg + dg^2 - Var g),
    dw' = dw - eta (D dm_hat - m_hat D^2/(2 sqrt(v_hat)) dv_hat),

and to second order in v_hat's E u = D m_hat - D^2/(2 sqrt(v_hat)) Cov(m_hat, v_hat) + D''/2 m_hat Var v_hat, which
`dp_adam.few_gradients` has where gradients do not change. Own derivation.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = Any


class Fluctuations(NamedTuple):
    """Covariances of averages with the weights and each other: (..., k, k) along k columns, or of independent ones any.

    Args:
      of_first, of_second: Cov(w, m), Cov(w, v).   first, both, second: Cov m, Cov(m, v), Cov v.
    """

    of_first: Array
    of_second: Array
    first: Array
    both: Array
    second: Array

    @classmethod
    def none(cls, *shape: int) -> "Fluctuations":
        return cls(*(np.zeros(shape) for _ in range(5)))


class Averages(NamedTuple):
    """What DP-Adam averages, before the correction of its bias.

    Args:
      first, second: E m, E v; of all weights.   block: along columns with a full covariance.   rest: of the others.
    """

    first: Array
    second: Array
    block: Fluctuations
    rest: Fluctuations


class Direction(NamedTuple):
    """A step's direction u: E u, du/dm and du/dv, of all weights."""

    expected: Array
    of_first: Array
    of_second: Array


@dataclass(frozen=True)
class AveragedSteps:
    """Steps of DP-Adam.

    Args:
      b1, b2: decay rates; in [0, 1).   eps: adaptivity; >= 0 [loss/params].

    >>> steps, law = AveragedSteps(0.9, 0.999, 0.0), (np.array([3.0]), np.array([0.01]))        # of g
    >>> first, second = steps.means(np.zeros(1), np.zeros(1), *law)
    >>> seen = steps.taken_in(np.eye(1), Fluctuations.none(1, 1), np.eye(1), np.zeros((1, 1)), *law)
    >>> direction = steps.direction(first, second, np.diag(seen.both), np.diag(seen.second), 1)
    >>> steps.moved(np.eye(1), seen, direction, learning_rate=1.0)[0].round(3)    # a sign: nothing turns weights back
    array([[0.999]])
    """

    b1: float
    b2: float
    eps: float

    def means(self, first: Array, second: Array, pull: Array, variance: Array) -> tuple[Array, Array]:
        """E m and E v after a step.

        Args:
          first, second: before it.   pull, variance: E g and Var g; as these.
        """
        return self.b1 * first + (1 - self.b1) * pull, self.b2 * second + (1 - self.b2) * (pull**2 + variance)

    def taken_in(
        self, covariance: Array, at: Fluctuations, jacobian: Array, noise: Array, pull: Array, variance: Array,
        *, independent: bool = False,
    ) -> Fluctuations:  # fmt: skip
        """Of the averages after a step's gradient, with the weights before they move.

        Args:
          covariance: Cov w.   jacobian: J.   noise: Cov g at given weights; (..., k, k) each.
          pull, variance: E g, Var g; (..., k).   independent: columns, all arrays are of diagonals.
        """
        a, b = 1 - self.b1, 1 - self.b2  # dm' of dg
        by_row, by_column = _factors(2 * b * pull, independent)  # dv' of dg
        bent: Any = np.multiply if independent else np.matmul
        with_weights = bent(covariance, jacobian)  # Cov(w, g), and so on
        with_first, with_second = (bent(_turned(each, independent), jacobian) for each in (at.of_first, at.of_second))
        gradient, crossing = noise + bent(jacobian, with_weights), by_column * with_second
        of_first = with_first + _turned(with_first, independent)
        of_second = crossing + _turned(crossing, independent)
        own = 2 * b**2 * variance**2  # of dg^2 - Var g
        both = by_column * (self.b1 * with_first + a * gradient) + a * self.b2 * _turned(with_second, independent)
        return Fluctuations(
            of_first=self.b1 * at.of_first + a * with_weights,
            of_second=self.b2 * at.of_second + by_column * with_weights,
            first=self.b1**2 * at.first + self.b1 * a * of_first + a**2 * gradient,
            both=self.b1 * self.b2 * at.both + both,
            second=self.b2**2 * at.second
            + self.b2 * of_second
            + by_row * gradient * by_column
            + (own if independent else own[..., None] * np.eye(own.shape[-1])),
        )

    def direction(self, first: Array, second: Array, both: Array, spread: Array, step: int) -> Direction:
        """Where the averages lead.

        Args:
          first, second: E m, E v.   both, spread: Cov(m_j, v_j), Var v_j; as these.   step: t = 1, 2, ...
        """
        of_first, of_second = 1 / (1 - self.b1**step), 1 / (1 - self.b2**step)
        root = np.sqrt(np.maximum(of_second * second, 1e-300))
        scale, mean = 1 / (root + self.eps), of_first * first
        slope, bend = -(scale**2) / (2 * root), scale**2 / (4 * root**3) + scale**3 / (2 * root**2)
        expected = scale * mean + of_first * of_second * slope * both + of_second**2 * mean * bend / 2 * spread
        return Direction(expected, of_first * scale, of_second * mean * slope)

    def moved(
        self, covariance: Array, at: Fluctuations, taken: Direction, *, learning_rate: float, independent: bool = False
    ) -> tuple[Array, Fluctuations]:
        """Cov w after a step in this direction, and the averages' fluctuations with it; as `taken_in`."""
        row_first, by_first = _factors(taken.of_first, independent)
        row_second, by_second = _factors(taken.of_second, independent)
        with_direction = at.of_first * by_first + at.of_second * by_second  # Cov(w, u), and so on
        first_with = at.first * by_first + at.both * by_second
        second_with = _turned(at.both, independent) * by_first + at.second * by_second
        own, eta = row_first * first_with + row_second * second_with, learning_rate
        covariance = covariance - eta * (with_direction + _turned(with_direction, independent)) + eta**2 * own
        return covariance, at._replace(
            of_first=at.of_first - eta * _turned(first_with, independent),
            of_second=at.of_second - eta * _turned(second_with, independent),
        )

    def memory(self, second: Array, step: int) -> Array:
        """v_hat after t steps, as the closure remembers it."""
        return second / (1 - self.b2**step)


def _turned(covariance: Array, independent: bool) -> Array:
    return covariance if independent else np.swapaxes(covariance, -1, -2)


def _factors(each: Array, independent: bool) -> tuple[Array, Array]:
    """Of a covariance's rows, and of its columns."""
    return (each, each) if independent else (each[..., :, None], each[..., None, :])
