"""One example of a binary logistic model under its logit's law: expectations of its loss and clipped gradient.

The law is a Gaussian, and with a third moment mu_3 its first correction (Gram and Charlier):
E f = E_G[f (1 + mu_3 He_3/(6 std^3))], He_3 of the standardised logit.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy import special

Array = Any
MOST_SKEW = 0.8  # of a logit: with more, the corrected density is negative where it matters


class ClippedExpectations(NamedTuple):
    """What moves the weights: of the residual r(z) clamped to its bound, z a logit; (n,) each.

    Args:
      residual: E r.   slope: Cov(z, r)/Var z, which is E r' of a Gaussian (Stein).   squared_residual: E r^2.
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
        """With derivatives as an optimizer feels them that answers to some examples less than to others; (n,)."""
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
    mean: Array, variance: Array, labels: Array, bound: Array, third_moment: Array = 0.0
) -> ClippedExpectations:
    """Of the residual, clamped to the bound, of one example each under its logit z.

    By symmetry everything is written for label 1: w = z or -z, residual -1/(1 + e^w), clamped at -bound.
    Gauss-Hermite with 24 nodes.

    Args:
      mean, variance, third_moment: of the logits, the third about the mean; (n,).   labels: 0 or 1; (n,).
      bound: C/sqrt(|x|^2 + 1); (n,), > 0.

    >>> e = clipped_expectations(np.zeros(2), np.ones(2), np.array([0, 1]), np.array([9.0, 0.1]))
    >>> e.residual.round(3)
    array([ 0.5, -0.1])
    """
    nodes, weights = _hermite(24)
    side, std, z = _seen_from_its_label(mean, variance, labels, nodes)
    clamped = np.maximum(_residual(z), -bound.astype(z.dtype)[:, None])
    cubic = _polynomials(24)[3]
    square, skew = clamped**2, _skew(third_moment, side, std)
    r0, r1, r2, r3, r4 = (_average(clamped, weights * polynomial) for polynomial in _polynomials(24))
    return ClippedExpectations(
        residual=side * (r0 + skew * r3),
        slope=np.maximum((r1 + skew * (r4 + 3 * r2)) / std, 0.0),  # He_1 He_3 = He_4 + 3 He_2
        squared_residual=np.maximum(_average(square, weights) + skew * _average(square, weights * cubic), 0.0),
        first=np.maximum((r1 + skew * r4) / std, 0.0),
        second=side * r2 / std**2,
        third=r3 / std**3,
        squared_slope=side * _average(square, weights * nodes) / std,
    )


def logistic_expectations(
    mean: Array, variance: Array, labels: Array, bound: Array, third_moment: Array = 0.0
) -> LogisticExpectations:
    """What is seen of one example each under its logit z; arguments as `clipped_expectations`.

    The share of clipped examples and the accuracy are exact for a Gaussian, the rest is Gauss-Hermite with 24 nodes. A
    third moment counts in the loss alone.

    >>> e = logistic_expectations(np.zeros(2), np.ones(2), np.array([0, 1]), np.array([9.0, 0.1]))
    >>> e.loss.round(3), e.clip_fraction.round(3)
    (array([0.806, 0.806]), array([0.   , 0.986]))
    """
    nodes, weights = _hermite(24)
    side, std, z = _seen_from_its_label(mean, variance, labels, nodes)
    full, loss = _residual(z), np.log1p(np.exp(-np.abs(z))) + np.maximum(-z, 0)
    skew = _skew(third_moment, side, std)
    with np.errstate(divide="ignore"):
        threshold = np.where(bound < 1, special.logit(1 - np.minimum(bound, 1.0)), -np.inf)
    exact = np.sqrt(np.maximum(variance, 1e-30))
    right = np.where((mean == 0) & (variance == 0), labels == 0, special.ndtr(side * mean / exact))  # 0 says class 0
    return LogisticExpectations(
        loss=np.maximum(_average(loss, weights) + skew * _average(loss, weights * _polynomials(24)[3]), 0.0),
        clip_fraction=special.ndtr((threshold - side * mean) / exact),
        full_residual=side * _average(full, weights),
        full_slope=np.maximum(_average(full, weights * nodes) / std, 0.0),
        probability_of_right=right,
    )


def _seen_from_its_label(mean: Array, variance: Array, labels: Array, nodes: Array) -> tuple[Array, Array, Array]:
    """The label's side, the logits' standard deviations, and their nodes with the label's side positive.

    Nodes in single precision, in which exponentials take a quarter of the time.
    """
    side = np.where(labels == 1, 1.0, -1.0)
    std = np.sqrt(np.maximum(variance, 1e-6))  # Stein's quotient needs some spread; 1e-3 of a logit is none
    return side, std, (side * mean).astype(np.float32)[:, None] + std.astype(np.float32)[:, None] * nodes


def _skew(third_moment: Array, side: Array, std: Array) -> Array:
    """mu_3/(6 std^3), seen with the label's side positive; (n,)."""
    return np.clip(side * third_moment / std**3, -MOST_SKEW, MOST_SKEW) / 6


def _residual(z: Array) -> Array:
    """-1/(1 + e^z): of an example with its label's side positive."""
    return -1 / (1 + np.exp(np.minimum(z, 80)))  # e^89 is more than single precision holds


def _average(values: Array, weights: Array) -> Array:
    return (values @ weights).astype(np.float64)


@cache
def _hermite(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return nodes.astype(np.float32), (weights / weights.sum()).astype(np.float32)


@cache
def _polynomials(order: int) -> np.ndarray:
    """He_0 to He_4 at the nodes; (5, order)."""
    nodes, _ = _hermite(order)
    return np.stack([np.ones_like(nodes), nodes, nodes**2 - 1, nodes**3 - 3 * nodes, nodes**4 - 6 * nodes**2 + 3])
