"""How far one run's loss lies from the mean over runs: Gaussian weights move all examples' losses together."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any


def hermite_coefficients(loss: Callable[[Array], Array], mean: Array, std: Array, *, order: int = 4) -> Array:
    """c_k(i) = E[He_k(Z) loss(mean_i + std_i Z)], k = 1 .. order, by Gauss-Hermite with 24 nodes.

    Args:
      loss: of (n, 24) outputs -> (n, 24).   mean, std: of each example's output; (n,).
    Returns: (order, n) [loss].

    >>> hermite_coefficients(lambda z: z**2, np.zeros(1), np.ones(1), order=2).round(12) + 0.0
    array([[0.],
           [2.]])
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    weights = weights / weights.sum()
    losses = loss(mean[:, None] + std[:, None] * nodes)
    polynomials = np.array([np.polynomial.hermite_e.hermeval(nodes, np.eye(order + 1)[k]) for k in range(1, order + 1)])
    return (losses @ (polynomials * weights).T).T


def mean_loss_std(
    coefficients: Array, covariance: Array, std: Array, num_examples: int, *, linear: float | None = None
) -> float:
    """Standard deviation over runs of the mean loss of num_examples, of which the arrays hold m.

    Two Gaussian outputs of correlation rho have Cov(loss_i, loss_l) = sum_k c_k(i) c_k(l) rho^k/k! (Mehler). Pairs of
    different examples stand for all such pairs, each example with itself for the other 1/num_examples.

    Args:
      coefficients: `hermite_coefficients`; (order, m) [loss].   covariance: of the outputs; (m, m).
      std: of them; (m,).   num_examples: >= m.
      linear: the first order's part of the variance, where `linear_variance` knows it from more than m examples.
    Returns: () >= 0 [loss].

    >>> round(mean_loss_std(np.array([[1.0, 1.0]]), np.ones((2, 2)), np.ones(2), 2), 12)      # the same noise in both
    1.0
    """
    correlation = np.clip(covariance / np.maximum(np.outer(std, std), 1e-300), -1.0, 1.0)
    np.fill_diagonal(correlation, 1.0)
    m, power, total = len(std), np.ones_like(correlation), 0.0
    for k, c in enumerate(coefficients, start=1):
        power = power * correlation
        if k == 1 and linear is not None:
            total += linear
            continue
        alone = float(c @ c)
        total += _of_mean(float(c @ power @ c) - alone, alone, m, num_examples) / math.factorial(k)
    return math.sqrt(max(total, 0.0))


def std_of_mean(losses: Array, num_examples: int) -> float:
    """Standard deviation over runs of the mean loss of num_examples, from the losses of m of them in some runs.

    By the covariances of pairs, as `mean_loss_std`: the mean of m alone would count each example's own part 1/m times.

    Args:
      losses: of a run and an example; (runs, m).   num_examples: >= m.
    Returns: () >= 0 [loss].

    >>> std_of_mean(np.array([[1.0, 1.0], [-1.0, -1.0]]), 10)      # they move together
    1.0
    >>> independent = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    >>> round(std_of_mean(independent, 100), 12)
    0.1
    """
    m = losses.shape[1]
    alone = float(losses.var(axis=0).sum())
    of_sum = float(losses.sum(axis=1).var())
    return math.sqrt(max(_of_mean(of_sum - alone, alone, m, num_examples), 0.0))


def linear_variance(together: float, shared: Array, alone: Array, num_examples: int) -> float:
    """Variance over runs of (1/num_examples) sum_i l_i' dz_i, from m of the examples.

    Args:
      together: Var (1/m) sum_i l_i' x_i . dw, of weights that know no example.   shared: Var l_i' x_i . dw; (m,).
      alone: Var l_i' dz_i, of the example's own output; (m,).   num_examples: >= m.
    Returns: () [loss^2].

    >>> round(linear_variance(1.0, np.ones(2), np.ones(2), 2), 12)      # the same noise in both
    1.0
    """
    m = len(alone)
    return _of_mean(m**2 * together - float(shared.sum()), float(alone.sum()), m, num_examples)


def _of_mean(pairs: float, alone: float, m: int, num_examples: int) -> float:
    """Variance of a mean of num_examples, from the covariances of all pairs of m summed, and the variances summed."""
    of_pair = pairs / (m * (m - 1)) if m > 1 else 0.0
    return of_pair * (1 - 1 / num_examples) + alone / (m * num_examples)
