"""One example of a binary logistic model under a Gaussian logit: expectations of its loss and clipped gradient."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy import special

Array = Any


class LogisticExpectations(NamedTuple):
    """What clipped logistic gradients r(z) [x; 1] are made of, for z ~ N(mean, variance); (n,) each.

    Args:
      residual: E r, the residual clamped to the bound.   slope: E r' = Cov(z, r)/Var z (Stein).
      squared_residual: E r^2.   loss: E softplus.   clip_fraction: P(|residual| > bound).
      full_residual, full_slope: the same without clipping.
      probability_of_right: P(the class is predicted rightly).
    """

    residual: Array
    slope: Array
    squared_residual: Array
    loss: Array
    clip_fraction: Array
    full_residual: Array
    full_slope: Array
    probability_of_right: Array


def logistic_expectations(mean: Array, variance: Array, labels: Array, bound: Array) -> LogisticExpectations:
    """Expectations over the logit z ~ N(mean, variance) of one example's loss, residual and clipped residual.

    By symmetry everything is written for label 1: w = z or -z, loss log(1 + e^-w), residual -1/(1 + e^w), clamped at
    -bound. Gauss-Hermite with 24 nodes; the share of clipped examples and the accuracy are exact.

    Args:
      mean, variance: of the logits; (n,).   labels: 0 or 1; (n,).   bound: C/sqrt(|x|^2 + 1); (n,), > 0.

    >>> e = logistic_expectations(np.zeros(2), np.ones(2), np.array([0, 1]), np.array([9.0, 0.1]))
    >>> e.residual.round(3), e.clip_fraction.round(3)
    (array([ 0.5, -0.1]), array([0.   , 0.986]))
    """
    nodes, weights = _hermite(24)
    side = np.where(labels == 1, 1.0, -1.0)
    std = np.sqrt(np.maximum(variance, 1e-8))  # Stein's quotient needs some spread; 1e-4 of a logit is none
    z = (side * mean)[:, None] + std[:, None] * nodes
    full = -special.expit(-z)
    clamped = np.maximum(full, -bound[:, None])
    # softplus(-z) = -z - log(residual's complement); logaddexp keeps it finite.
    loss = np.logaddexp(0.0, -z) @ weights
    with np.errstate(divide="ignore"):
        threshold = np.where(bound < 1, special.logit(1 - np.minimum(bound, 1.0)), -np.inf)
    return LogisticExpectations(
        residual=side * (clamped @ weights),
        slope=np.maximum(clamped @ (weights * nodes) / std, 0.0),
        squared_residual=clamped**2 @ weights,
        loss=loss,
        clip_fraction=special.ndtr((threshold - side * mean) / std),
        full_residual=side * (full @ weights),
        full_slope=np.maximum(full @ (weights * nodes) / std, 0.0),
        probability_of_right=special.ndtr(side * mean / std),
    )


@cache
def _hermite(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return nodes, weights / weights.sum()
