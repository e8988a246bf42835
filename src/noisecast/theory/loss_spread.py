"""How far one run's loss lies from the mean over runs: Gaussian weights move all examples' losses together."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

Array = Any


def hermite_coefficients(loss: Callable[[Array], Array], *, order: int = 4) -> Array:
    """c_k(i) = E[He_k(Z) loss_i(Z)], k = 1 .. order, by Gauss-Hermite with 24 nodes.

    Args:
      loss: of each example's where the Gaussian behind its output is at such places; (24,) -> (n, 24).
    Returns: (order, n) [loss].

    >>> hermite_coefficients(lambda z: z[None, :] ** 2, order=2).round(12) + 0.0
    array([[0.],
           [2.]])
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    weights = weights / weights.sum()
    polynomials = np.array([np.polynomial.hermite_e.hermeval(nodes, np.eye(order + 1)[k]) for k in range(1, order + 1)])
    return (loss(nodes) @ (polynomials * weights).T).T


def mean_loss_std(
    coefficients: Array, covariance: Array, std: Array, own: float, num_examples: int, *,
    known: Mapping[int, float] = MappingProxyType({}),
) -> float:  # fmt: skip
    """Standard deviation over runs of the mean loss of num_examples, of which the arrays hold m.

    Two Gaussian outputs of correlation rho have Cov(loss_i, loss_l) = sum_k c_k(i) c_k(l) rho^k/k! (Mehler). Pairs of
    different examples stand for all such pairs; with itself each has the other 1/num_examples, by its own law.

    Args:
      coefficients: `hermite_coefficients`; (order, m) [loss].   covariance: of the outputs; (m, m).
      std: of them; (m,).   own: mean over examples of Var loss_i; [loss^2].   num_examples: >= m.
      known: by order k, means over pairs of c_k(i) c_k(l) rho^k, where `linear_covariance` or `square_covariance`
        knows them from more than m examples.
    Returns: () >= 0 [loss].

    >>> round(mean_loss_std(np.array([[1.0, 1.0]]), np.ones((2, 2)), np.ones(2), 1.0, 2), 12)      # the same in both
    1.0
    """
    correlation = np.clip(covariance / np.maximum(np.outer(std, std), 1e-300), -1.0, 1.0)
    np.fill_diagonal(correlation, 1.0)
    power, pairs = np.ones_like(correlation), 0.0
    for k, c in enumerate(coefficients, start=1):
        power = power * correlation
        of_order = known[k] if k in known else _mean_of_pairs(float(c @ power @ c - c @ c), len(std))
        pairs += of_order / math.factorial(k)
    return math.sqrt(max(_variance_of_mean(pairs, own, num_examples), 0.0))


def std_of_mean(losses: Array, num_examples: int, *, more: float = 0.0) -> float:
    """Standard deviation over runs of the mean loss of num_examples, from the losses of m of them in some runs.

    By the covariances of pairs, as `mean_loss_std`: the mean of m alone would count each example's own part 1/m times.

    Args:
      losses: of a run and an example; (runs, m).   num_examples: >= m.
      more: by which the mean's variance over all runs is known to differ from that over these; [loss^2].
    Returns: () >= 0 [loss].

    >>> std_of_mean(np.array([[1.0, 1.0], [-1.0, -1.0]]), 10)      # they move together
    1.0
    >>> independent = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    >>> round(std_of_mean(independent, 100), 12)
    0.1
    """
    m, own = losses.shape[1], losses.var(axis=0)
    pairs = _mean_of_pairs(float(losses.sum(axis=1).var() - own.sum()), m) + more
    return math.sqrt(max(_variance_of_mean(pairs, float(own.mean()), num_examples), 0.0))


def linear_covariance(together: float, shared: Array) -> float:
    """Mean over pairs of different examples of Cov(l_i' x_i . dw, l_j' x_j . dw), of weights that know no example.

    Args:
      together: Var (1/m) sum_i l_i' x_i . dw.   shared: Var l_i' x_i . dw; (m,).
    Returns: () [loss^2].

    >>> round(linear_covariance(1.0, np.ones(2)), 12)      # the same noise in both
    1.0
    """
    return _mean_of_pairs(len(shared) ** 2 * together - float(shared.sum()), len(shared))


def square_covariance(together: float, shared: Array) -> float:
    """Mean over pairs of different examples of a_i a_j (x_i' V x_j)^2, of weights of covariance V.

    Args:
      together: tr(H V H V), H = (1/m) sum_i a_i x_i x_i'.   shared: a_i x_i' V x_i; (m,).
    Returns: ().

    >>> round(square_covariance(1.0, np.ones(2)), 12)      # the same in both
    1.0
    """
    return _mean_of_pairs(len(shared) ** 2 * together - float(shared @ shared), len(shared))


def _mean_of_pairs(pairs: float, m: int) -> float:
    return pairs / (m * (m - 1)) if m > 1 else 0.0


def _variance_of_mean(of_pair: float, own: float, num_examples: int) -> float:
    return of_pair * (1 - 1 / num_examples) + own / num_examples
