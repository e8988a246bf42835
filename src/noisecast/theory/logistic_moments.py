"""One example of a binary logistic model under its logit's law: expectations of its loss and clipped gradient.

The law is a Gaussian times its first corrections (Gram and Charlier): E f = E_G[f (1 + sum_j gamma_j He_j)], He_j of
the standardised logit. gamma_3 = mu_3/(6 std^3) of what the example has pushed away itself (`own_push`), gamma_3 to
gamma_6 of what it shares with all others (`common_swing`).
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from noisecast.theory.common_swing import GRID, Swing

Array = Any
NOTHING_SHARED = np.zeros((4, 1))
FOLLOWS = 0.55  # correlation with the common swing, up to which a series of eight terms holds
MOST_SKEW = 0.8  # of a logit: with more, the corrected density is negative where it matters


class ClippedExpectations(NamedTuple):
    """What moves the weights: of the residual r(z) clamped to its bound, z a logit; (n,) each.

    Args:
      residual: E r.   squared_residual: E r^2.
      slope: Cov(z, r)/Var z, which is E r' of a Gaussian (Stein); of what is shared E r', since other directions of the
        weights feel no more than that.
      first, second, third: expected derivatives of r.   squared_slope: E (r^2)'. The last three of the Gaussian.
    """

    residual: Array
    slope: Array
    squared_residual: Array
    first: Array
    second: Array
    third: Array
    squared_slope: Array

    def felt(self, share: Array) -> "ClippedExpectations":
        """With derivatives as an optimizer feels them that answers to some examples less than to others; (n,).

        Args:
          share: of the curvature that an example still has; (n,) in [0, 1].
        Returns: ClippedExpectations; residuals and their squares are the same.
        """
        return self._replace(
            slope=share * self.slope, first=share * self.first, second=share * self.second, third=share * self.third
        )


class LogisticExpectations(NamedTuple):
    """What is seen of an example with the logit z; (n,) each.

    Args:
      loss: E softplus.   clip_fraction: P(|residual| > bound).
      full_residual, full_slope: of the residual that is not clamped.
      probability_of_right: P(the class is predicted rightly).
    """

    loss: Array
    clip_fraction: Array
    full_residual: Array
    full_slope: Array
    probability_of_right: Array


def clipped_expectations(
    mean: Array, variance: Array, labels: Array, bound: Array, third_moment: Array = 0.0, shared: Array = NOTHING_SHARED
) -> ClippedExpectations:
    """Of the residual, clamped to the bound, of one example each under its logit z.

    By symmetry everything is written for label 1: w = z or -z, residual -1/(1 + e^w), clamped at -bound.
    Gauss-Hermite with 24 nodes, which meets the kink at the bound between two of them. For bounds of 0.1, 0.5 and none
    and means up to 8 it errs at most, absolutely, by 0.002 of E r and of E r^2 and by 0.0013 of the slope where the
    logit's standard deviation is 1; by 0.009 and 0.0014 at 3 (of 0.27 and 0.05), by 0.032 and 0.0015 at 10.

    Args:
      mean, variance, third_moment: of the logits, the third about the mean; (n,).   labels: 0 or 1; (n,).
      shared: gamma_3 to gamma_6 of the common swing; (4, n).
      bound: C/sqrt(|x|^2 + 1); (n,), > 0.
    Returns: ClippedExpectations; (n,) each.

    >>> e = clipped_expectations(np.zeros(2), np.ones(2), np.array([0, 1]), np.array([9.0, 0.1]))
    >>> e.residual.round(3)
    array([ 0.5, -0.1])
    """
    side, std, z = _seen_from_its_label(mean, variance, labels)
    clamped = np.maximum(_residual(z), -bound.astype(z.dtype)[:, None])
    skew = _skew(third_moment, side, std)
    shape = _shape(shared, skew, side)
    r, square = _projections(clamped), _projections(clamped**2)
    first = r[1] + _corrected(shape, r[4:8])
    return ClippedExpectations(
        residual=side * (r[0] + _corrected(shape, r[3:7])),
        slope=np.maximum((first + 3 * skew * r[2]) / std, 0.0),  # He_1 He_3 = He_4 + 3 He_2
        squared_residual=np.maximum(square[0] + _corrected(shape, square[3:7]), 0.0),
        first=np.maximum(first / std, 0.0),
        second=side * r[2] / std**2,
        third=r[3] / std**3,
        squared_slope=side * square[1] / std,
    )


def residual_given(
    mean: Array, variance: Array, labels: Array, bound: Array, correlations: Array, swing: Swing
) -> Array:
    """E[r | s] - E r of each example at the places s of a common swing, on `GRID`.

    Args:
      mean, variance, labels, bound: as `clipped_expectations`.   correlations: b, of logit and s; (n,).
      swing: the law of s.
    Returns: (n, 71).

    >>> given = np.zeros(2), np.ones(2), np.ones(2), np.full(2, 9.0)
    >>> residual_given(*given, np.array([0.5, 0.8]), Swing.gaussian())[:, [25, 45]].round(3)     # s = -2, 2
    array([[-0.204,  0.204],
           [-0.316,  0.316]])
    """
    side = np.where(labels == 1, 1.0, -1.0)
    found = _given(
        lambda z, of: np.maximum(_residual(z), -bound[of, None]), mean, variance, labels, correlations, swing
    )
    return side[:, None] * found


def loss_given(mean: Array, variance: Array, labels: Array, correlations: Array, swing: Swing) -> Array:
    """E[softplus | s] - E softplus, as `residual_given`.

    Args: as `residual_given`.
    Returns: (n, 71).

    >>> given = np.zeros(1), np.ones(1), np.ones(1), np.array([0.5])
    >>> loss_given(*given, Swing.gaussian())[:, [25, 45]].round(3)                         # s = -2, 2
    array([[ 0.578, -0.422]])
    """
    return _given(lambda z, of: _loss(z), mean, variance, labels, correlations, swing)


def logistic_expectations(
    mean: Array, variance: Array, labels: Array, bound: Array, third_moment: Array = 0.0, shared: Array = NOTHING_SHARED
) -> LogisticExpectations:
    """What is seen of one example each under its logit z.

    The share of clipped examples and the accuracy are exact for the law, the rest is Gauss-Hermite with 24 nodes.

    Args: as `clipped_expectations`.
    Returns: LogisticExpectations; (n,) each.

    >>> e = logistic_expectations(np.zeros(2), np.ones(2), np.array([0, 1]), np.array([9.0, 0.1]))
    >>> e.loss.round(3), e.clip_fraction.round(3)
    (array([0.806, 0.806]), array([0.   , 0.986]))
    """
    side, std, z = _seen_from_its_label(mean, variance, labels)
    shape = _shape(shared, _skew(third_moment, side, std), side)
    loss, full = _projections(_loss(z)), _projections(_residual(z))
    with np.errstate(divide="ignore"):
        threshold = np.where(bound < 1, special.logit(1 - np.minimum(bound, 1.0)), -np.inf)
    exact = np.sqrt(np.maximum(variance, 1e-30))
    right = 1 - _below(-side * mean / exact, shape)
    right = np.where((mean == 0) & (variance == 0), labels == 0, right)  # 0 says class 0
    return LogisticExpectations(
        loss=np.maximum(loss[0] + _corrected(shape, loss[3:7]), 0.0),
        clip_fraction=_below((threshold - side * mean) / exact, shape),
        full_residual=side * (full[0] + _corrected(shape, full[3:7])),
        full_slope=np.maximum((full[1] + _corrected(shape, full[4:8])) / std, 0.0),
        probability_of_right=right,
    )


def _seen_from_its_label(mean: Array, variance: Array, labels: Array) -> tuple[Array, Array, Array]:
    """The label's side, the logits' standard deviations, and their nodes with the label's side positive.

    Nodes in single precision, in which exponentials take a quarter of the time.
    """
    nodes, _ = _hermite(24)
    side = np.where(labels == 1, 1.0, -1.0)
    std = np.sqrt(np.maximum(variance, 1e-6))  # Stein's quotient needs some spread; 1e-3 of a logit is none
    return side, std, (side * mean).astype(np.float32)[:, None] + std.astype(np.float32)[:, None] * nodes


def _skew(third_moment: Array, side: Array, std: Array) -> Array:
    """mu_3/(6 std^3), seen with the label's side positive; (n,)."""
    return np.clip(side * third_moment / std**3, -MOST_SKEW, MOST_SKEW) / 6


def _residual(z: Array) -> Array:
    """-1/(1 + e^z): of an example with its label's side positive."""
    return -1 / (1 + np.exp(np.minimum(z, 80)))  # e^89 is more than single precision holds


def _loss(z: Array) -> Array:
    return np.log1p(np.exp(-np.abs(z))) + np.maximum(-z, 0)


def _given(
    value: Callable[[Array, Array], Array], mean: Array, variance: Array, labels: Array, correlations: Array,
    swing: Swing,
) -> Array:  # fmt: skip
    """E[f | s] - E f of f(z, examples), z seen with the label's side positive; (n, 71).

    Of an example that follows the swing little, sum_j b^j E_G[f He_j] He_j(s)/j! up to j = 7; of others by
    Gauss-Hermite with 8 nodes over the rest of its logit, whose steps the swing's own width blurs.
    """
    side, std, z = _seen_from_its_label(mean, variance, labels)
    b, everybody = side * correlations, np.arange(len(side))
    projections = _projections(value(z, everybody)) * b ** np.arange(8)[:, None]
    found = projections.T @ _scaled_polynomials()
    follow = everybody[np.abs(b) > FOLLOWS]
    if len(follow):
        nodes, weights = _hermite(8)
        middle = ((side * mean)[follow, None] + (b * std)[follow, None] * GRID).astype(np.float32)
        rest = (std * np.sqrt(1 - b**2))[follow, None].astype(np.float32)
        found[follow] = sum(weight * value(middle + node * rest, follow) for node, weight in zip(nodes, weights))
    return found - (projections[0] + swing.coefficients @ projections[3:7])[:, None]


def _shape(shared: Array, skew: Array, side: Array) -> Array:
    """gamma_3 to gamma_6, seen with the label's side positive; (4, n)."""
    even = np.ones_like(side)
    return shared * np.stack([side, even, side, even]) + np.stack([skew, *3 * [np.zeros_like(side)]])


def _corrected(shape: Array, projections: Array) -> Array:
    """sum_j gamma_j f_j, f_j the projections that belong to gamma_3 to gamma_6; (4, n) each -> (n,)."""
    return np.einsum("jn,jn->n", shape, projections)


def _below(threshold: Array, shape: Array) -> Array:
    """P(standardised z < t): its density is phi (1 + sum_j gamma_j He_j), and phi He_j integrates to -phi He_(j-1)."""
    t = np.clip(threshold, -40, 40)
    tails = np.exp(-(t**2) / 2) / np.sqrt(2 * np.pi) * np.stack([_hermite_polynomial(j, t) for j in (2, 3, 4, 5)])
    return np.clip(special.ndtr(t) - _corrected(shape, tails), 0.0, 1.0)


def _projections(values: Array) -> Array:
    """E_G[f He_j], j = 0 .. 7, of values at the nodes; (n, 24) -> (8, n)."""
    return np.ascontiguousarray((values @ _weighted_polynomials().T).T, np.float64)


@cache
def _hermite(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return nodes.astype(np.float32), (weights / weights.sum()).astype(np.float32)


@cache
def _weighted_polynomials() -> np.ndarray:
    """He_0 to He_7 at 24 nodes, times their weights; (8, 24)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    polynomials = np.stack([_hermite_polynomial(j, nodes) for j in range(8)])
    return (polynomials * weights / weights.sum()).astype(np.float32)


@cache
def _scaled_polynomials() -> np.ndarray:
    """He_0/0! to He_7/7! on `GRID`; (8, 71)."""
    return np.stack([_hermite_polynomial(j, GRID) / math.factorial(j) for j in range(8)])


def _hermite_polynomial(order: int, x: Array) -> Array:
    return np.polynomial.hermite_e.hermeval(x, np.eye(order + 1)[order])
