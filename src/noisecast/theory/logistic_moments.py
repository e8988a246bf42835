"""One example of a binary logistic model under its logit's law: expectations of its loss and clipped gradient.

The law is a Gaussian, or what `own_push` has made of one, times the first corrections (Gram and Charlier) for what the
logit shares with all others (`common_swing`): E f = E_0[f (1 + sum_j gamma_j He_j)], He_j of the standardised logit,
j = 3 to 6.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from noisecast.theory.common_swing import GRID, Swing
from noisecast.theory.output_law import NODES, GaussianLaw, OutputLaw, hermite_nodes

Array = Any
NOTHING_SHARED = np.zeros((4, 1))
LEAST_SHARED = 1e-5  # of gamma_j that single precision tells from none
FOLLOWS = 0.55  # correlation with the common swing, up to which a series of eight terms holds


class ClippedExpectations(NamedTuple):
    """What moves the weights: of the residual r(z) clamped to its bound, z a logit; (n,) each.

    Args:
      residual: E r.   squared_residual: E r^2.
      slope: Cov(z, r)/Var z, which is E r' of a Gaussian (Stein); of what is shared E r', since other directions of the
        weights feel no more than that.
      values: r at the law's places; (m, n).
    """

    residual: Array
    slope: Array
    squared_residual: Array
    values: Array

    def felt(self, share: Array) -> "ClippedExpectations":
        """With slopes as an optimizer feels them that answers to some examples less than to others; (n,).

        Args:
          share: of the curvature that an example still has; (n,) in [0, 1].
        Returns: ClippedExpectations; residuals and their squares are the same.
        """
        values = self.residual + share * (self.values - self.residual)
        return self._replace(slope=share * self.slope, values=values)


class LogisticExpectations(NamedTuple):
    """What is seen of an example with the logit z; (n,) each.

    Args:
      loss, loss_variance: of softplus.   loss_slope: Cov(z, softplus)/Var z.   clip_fraction: P(|residual| > bound).
      loss_bend: E[softplus (x^2 - 1)]/Var z, x the standardised z: E softplus'' of a Gaussian.
      full_residual, full_slope: of the residual that is not clamped.
      probability_of_right: P(the class is predicted rightly).
    """

    loss: Array
    loss_variance: Array
    loss_slope: Array
    loss_bend: Array
    clip_fraction: Array
    full_residual: Array
    full_slope: Array
    probability_of_right: Array


def clipped_expectations(
    law: OutputLaw, labels: Array, bound: Array, shared: Array = NOTHING_SHARED
) -> ClippedExpectations:
    """Of the residual, clamped to the bound, of one example each under its logit's law.

    By symmetry everything is written for label 1: w = z or -z, residual -1/(1 + e^w), clamped at -bound.
    The 24 nodes of a Gaussian meet the kink at the bound between two of them. For bounds of 0.1, 0.5 and none
    and means up to 8 that errs at most, absolutely, by 0.002 of E r and of E r^2 and by 0.0013 of the slope where the
    logit's standard deviation is 1; by 0.009 and 0.0014 at 3 (of 0.27 and 0.05), by 0.032 and 0.0015 at 10.

    Args:
      law: of the logits, n of them.   labels: 0 or 1; (n,).   bound: C/sqrt(|x|^2 + 1); (n,), > 0.
      shared: gamma_3 to gamma_6 of the common swing; (4, n).
    Returns: ClippedExpectations; (n,) each, values (m, n).

    >>> law = GaussianLaw(np.zeros(2), np.ones(2))
    >>> clipped_expectations(law, np.array([0, 1]), np.array([9.0, 0.1])).residual.round(3)
    array([ 0.5, -0.1])
    """
    side = _side(labels)
    clamped = side.astype(np.float32) * np.maximum(_residual(law.outputs(side)), -bound.astype(np.float32))
    r = _projections(law, clamped, shared)
    square = _projections(law, clamped**2, shared)
    return ClippedExpectations(
        residual=r[0] + _corrected(shared, r[3:7]),
        slope=np.maximum((r[1] + _corrected(shared, r[4:8])) / law.std, 0.0),
        squared_residual=np.maximum(square[0] + _corrected(shared, square[3:7]), 0.0),
        values=clamped,
    )


def residual_given(
    mean: Array, variance: Array, labels: Array, bound: Array, correlations: Array, swing: Swing
) -> Array:
    """E[r | s] - E r of each example at the places s of a common swing, on `GRID`; of Gaussian logits.

    Of an example that follows the swing little, sum_j b^j E_G[r He_j] He_j(s)/j! up to j = 7; of others by
    Gauss-Hermite with 8 nodes over the rest of its logit, whose steps the swing's own width blurs.

    Args:
      mean, variance, labels, bound: as `clipped_expectations`.   correlations: b, of logit and s; (n,).
      swing: the law of s.
    Returns: (n, 71).

    >>> given = np.zeros(2), np.ones(2), np.ones(2), np.full(2, 9.0)
    >>> residual_given(*given, np.array([0.5, 0.8]), Swing.gaussian())[:, [25, 45]].round(3)     # s = -2, 2
    array([[-0.204,  0.204],
           [-0.316,  0.316]])
    """
    bound = bound.astype(np.float32)
    law, side = GaussianLaw(mean, variance), _side(labels)
    values = np.maximum(_residual(law.outputs(side)), -bound)
    projections = law.hermite_means(values, 8).astype(np.float64) * correlations ** np.arange(8)[:, None]
    found = projections.T @ _scaled_polynomials()
    follow = np.flatnonzero(np.abs(correlations) > FOLLOWS)
    if len(follow):
        nodes, weights = hermite_nodes(8)
        along, beside = side * correlations * law.std, law.std * np.sqrt(1 - correlations**2)
        middle = ((side * mean)[follow] + along[follow] * GRID[:, None]).astype(np.float32)
        rest, least = beside[follow].astype(np.float32), -bound[follow]
        given = [weight * np.maximum(_residual(middle + node * rest), least) for node, weight in zip(nodes, weights)]
        found[follow] = np.sum(given, axis=0).T
    return side[:, None] * (found - (projections[0] + swing.coefficients @ projections[3:7])[:, None])


def loss_given(outputs: Callable[[Array], Array], labels: Array, correlations: Array, swing: Swing) -> Array:
    """E[softplus | s] - E softplus of each example at the places s of a common swing, on `GRID`.

    Args:
      outputs: of each, where the Gaussian behind it is at such places (`OutputLaw.at`); (n, 71) -> (n, 71).
      labels: 0 or 1; (n,).   correlations: b, of that Gaussian and s; (n,).   swing: the law of s.
    Returns: (n, 71).

    >>> law = GaussianLaw(np.zeros(1), np.ones(1))
    >>> loss_given(law.at, np.ones(1), np.array([0.5]), Swing.gaussian())[:, [25, 45]].round(3)             # s = -2, 2
    array([[ 0.578, -0.422]])
    """
    side, (nodes, weights) = _side(labels)[:, None], hermite_nodes(NODES)
    along, beside = correlations[:, None] * GRID, np.sqrt(1 - correlations**2)[:, None]
    found = sum(weight * _loss(side * outputs(along + beside * node)) for node, weight in zip(nodes, weights))
    return found - swing.mean_of(found)[:, None]


def logistic_expectations(
    law: OutputLaw, labels: Array, bound: Array, shared: Array = NOTHING_SHARED
) -> LogisticExpectations:
    """What is seen of one example each under its logit's law.

    Of a Gaussian the share of clipped examples and the accuracy are exact, the rest is by 24 nodes.

    Args: as `clipped_expectations`.
    Returns: LogisticExpectations; (n,) each.

    >>> law = GaussianLaw(np.zeros(2), np.ones(2))
    >>> e = logistic_expectations(law, np.array([0, 1]), np.array([9.0, 0.1]))
    >>> e.loss.round(3), e.clip_fraction.round(3)
    (array([0.806, 0.806]), array([0.   , 0.986]))
    """
    side = _side(labels)
    z = law.outputs(side)
    losses = _loss(z)
    loss, full = (_projections(law, values, shared) for values in (losses, _residual(z)))
    shift = _corrected(shared, loss[3:7])
    around = _projections(law, (losses - loss[0].astype(np.float32)) ** 2, shared)
    with np.errstate(divide="ignore"):
        threshold = np.where(bound < 1, special.logit(1 - np.minimum(bound, 1.0)), -np.inf)
    right = 1 - _below(law, np.zeros(len(side)), side, shared)
    right = np.where((law.mean == 0) & (law.spread <= 1e-15), labels == 0, right)  # 0 says class 0
    return LogisticExpectations(
        loss=np.maximum(loss[0] + shift, 0.0),
        loss_variance=np.maximum(around[0] + _corrected(shared, around[3:7]) - shift**2, 0.0),
        loss_slope=(loss[1] + _corrected(shared, loss[4:8])) / law.std,
        loss_bend=loss[2] / law.std**2,
        clip_fraction=_below(law, threshold, side, shared),
        full_residual=side * (full[0] + _corrected(shared, full[3:7])),
        full_slope=np.maximum(side * (full[1] + _corrected(shared, full[4:8])) / law.std, 0.0),
        probability_of_right=right,
    )


def _side(labels: Array) -> Array:
    """1 of label 1, -1 of label 0."""
    return np.where(labels == 1, 1.0, -1.0)


def _residual(z: Array) -> Array:
    """-1/(1 + e^z): of an example with its label's side positive."""
    return -1 / (1 + np.exp(np.minimum(z, 80)))  # e^89 is more than single precision holds


def _loss(z: Array) -> Array:
    return np.log1p(np.exp(-np.abs(z))) + np.maximum(-z, 0)


def _corrected(shared: Array, projections: Array) -> Array:
    """sum_j gamma_j f_j, f_j the projections that belong to gamma_3 to gamma_6; (4, n) each -> (n,)."""
    return np.einsum("jn,jn->n", shared, projections) if len(projections) else 0.0


def _projections(law: OutputLaw, values: Array, shared: Array) -> Array:
    """E_0[f He_j], j = 0 .. 7, of values at the places, or to 2 where nothing is shared; (m, n) -> (8 or 3, n)."""
    return law.hermite_means(values, 8 if abs(shared).max() > LEAST_SHARED else 3).astype(np.float64)


def _below(law: OutputLaw, threshold: Array, side: Array, shared: Array) -> Array:
    """P(z < t), z seen with the label's side positive: phi He_j integrates to -phi He_(j-1)."""
    t = np.clip((side * threshold - law.mean) / law.spread, -40, 40)
    tails = np.exp(-(t**2) / 2) / np.sqrt(2 * np.pi) * np.stack([_hermite_polynomial(j, t) for j in (2, 3, 4, 5)])
    below = np.clip(law.below(t) - _corrected(shared, tails), 0.0, 1.0)
    return np.where(side > 0, below, 1 - below)


@cache
def _scaled_polynomials() -> np.ndarray:
    """He_0/0! to He_7/7! on `GRID`; (8, 71)."""
    return np.stack([_hermite_polynomial(j, GRID) / math.factorial(j) for j in range(8)])


def _hermite_polynomial(order: int, x: Array) -> Array:
    return np.polynomial.hermite_e.hermeval(x, np.eye(order + 1)[order])
