"""Epsilon from Renyi differential privacy: the best order, found without a look at most of them.

The Renyi divergence of order a > 1 is log A_a / (a - 1) with A_a = E_Q (P/Q)^a, and each order gives an epsilon; the
smallest counts. An order costs dp_accounting a sum of hundreds of terms, and there are two hundred orders. But log A_a
is convex in a, and 0 at a = 1, so the line through two of its points lies below it everywhere outside of them: a few
known orders tell how small an epsilon the others can have at best. The order that looks best in that light is looked
at next, and once it is one already known, it is the best of all.

Whole orders are what the lines are drawn through. Of fractional ones dp_accounting adds the alternating terms without
their signs: bounds from above, and no points of a convex curve.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

MACHINE_EPS = float(np.finfo(float).eps)
FIRST_ORDERS = tuple(range(2, 12))  # they cost next to nothing, and every fractional order lies among them

# Tried in turn, each only when the largest order of the one before is still the best: a small epsilon needs large
# orders.
ORDERS = (
    tuple(1 + np.geomspace(0.0101, 9.9, 120)) + tuple(range(11, 64)) + tuple(range(64, 256, 8)),
    tuple(int(order) for order in np.geomspace(248, 4096, 24)),
    tuple(int(order) for order in np.geomspace(4096, 16384, 8)),
)


@dataclass(frozen=True)
class SampledPair:
    """P = q N_1 + (1-q) N_0 and Q = N_0, with noise N(0, z^2): one step, in units of how far a record moves the sum.

    Args:
      probability: 0 < q <= 1.   noise_multiplier: z > 0, relative to that distance.
      is_replaced: whether neighbours differ by a replaced record, which costs up to twice as much (`divergences`).
    """

    probability: float
    noise_multiplier: float
    is_replaced: bool

    def divergences(self, orders: Sequence[float]) -> NDArray[np.float64]:
        """Renyi divergence of one step at each order > 1, from above; (alpha - 1) times it is log A_alpha.

        dp_accounting gives A_alpha for add/remove with noise relative to the shift. Replacing a record: with
        (A - 1) / (alpha (alpha - 1)) = integral_1^oo g^(alpha-2) H_g(P, Q) + g^(-alpha-1) H_g(Q, P) dg and both H_g
        bounded by the fixed-size pair's (P = q N_2 + (1-q) N_0, Q = N_0), A <= A_alpha + E_Q (P/Q)^(1-alpha) - 1 <= 2
        A_alpha - 1, as E_Q (P/Q)^(1-alpha) <= A_alpha (Mironov, Talwar and Zhang, 2019, Thm 5). Poisson is one of the
        cases bounded.

        Args:
          orders: > 1, ascending; (k,).
        Returns: (k,) >= 0; inf where no bound is known.

        >>> SampledPair(0.01, 1.0, False).divergences([2, 8, 64]).round(6).tolist()
        [0.000172, 0.000894, 27.321732]
        """
        return self._from_above(np.asarray(orders, float), self.computed(orders))

    def computed(self, orders: Sequence[float]) -> NDArray[np.float64]:
        """dp_accounting's divergences for add/remove; inf at a fractional order whose sum does not converge.

        Args:
          orders: > 1; (k,).
        Returns: (k,).
        """
        import dp_accounting as dp

        event = dp.PoissonSampledDpEvent(self.probability, dp.GaussianDpEvent(self.noise_multiplier))
        with _quiet():  # it warns of fractional orders that do not converge, and leaves them out
            return dp.rdp.RdpAccountant(list(orders)).compose(event).rdp

    def _from_above(self, alpha: NDArray, computed: NDArray) -> NDArray[np.float64]:
        # The divergence grows with the order, so a bound at a larger order is one at a smaller.
        log_a = np.minimum.accumulate(computed[::-1])[::-1] * (alpha - 1)
        return self._of_log_a(alpha, np.maximum(log_a, 0) + _rounding(alpha))

    def _of_log_a(self, alpha: NDArray, log_a: NDArray) -> NDArray[np.float64]:
        if self.is_replaced:
            log_a = np.where(log_a > 1, log_a + math.log(2), np.log1p(2 * np.expm1(np.minimum(log_a, 1))))
        return log_a / (alpha - 1)


class _Known:
    """The divergences of one pair at the orders looked at, and how small those of other orders can be."""

    def __init__(self, pair: SampledPair) -> None:
        self._pair = pair
        self._computed: dict[float, float] = dict(zip(FIRST_ORDERS, pair.computed(FIRST_ORDERS), strict=True))

    def __contains__(self, order: float) -> bool:
        return order in self._computed

    def look_at(self, order: float) -> None:
        self._computed[order] = self._pair.computed([order])[0]

    def whole_orders(self) -> list[float]:
        return sorted(order for order in self._computed if order == int(order))

    def at_least(self, orders: Sequence[float]) -> NDArray[np.float64]:
        """`SampledPair.divergences` at the orders that are known, and no more than that at the others."""
        alpha = np.asarray(orders, float)
        computed = np.array([self._computed.get(order, math.inf) for order in orders])
        above = self._pair._from_above(alpha, computed)
        below = self._pair._of_log_a(alpha, self._least_log_a(alpha))
        return np.where([order in self._computed for order in orders], above, below)

    def _least_log_a(self, alpha: NDArray) -> NDArray[np.float64]:
        whole = self.whole_orders()
        x = np.array([1.0, *whole])
        y = np.array([0.0, *(self._computed[order] * (order - 1) for order in whole)])
        low, high = y - _rounding(x), y + _rounding(x)
        (a, b), alpha = (part[:, None] for part in (x[:-1], x[1:])), alpha[None, :]
        (low_a, low_b), (high_a, high_b) = ((part[:-1, None], part[1:, None]) for part in (low, high))
        with np.errstate(invalid="ignore"):  # where A_alpha is too large for a float
            beyond = low_b + (low_b - high_a) / (b - a) * (alpha - b)
            before = low_a - (high_b - low_a) / (b - a) * (a - alpha)
        lines = np.where(alpha >= b, beyond, np.where(alpha <= a, before, -np.inf))
        # Not less than the divergence of order 1, which is at least twice the squared total variation (Pinsker).
        variation = self._pair.probability * math.erf(1 / (math.sqrt(8) * self._pair.noise_multiplier))
        return np.fmax(np.fmax.reduce(lines), 2 * variation**2 * (alpha[0] - 1))


def smallest_epsilons(
    pairs: Sequence[SampledPair], counts: ArrayLike, target_delta: float, ladder: Sequence[tuple] = ORDERS
) -> NDArray[np.float64]:
    """Epsilon of counts[i, j] steps of each pair j together, i = 0, 1, ...: divergences add up, the best order counts.

    Args:
      pairs: the worst case of a step of each kind.   counts: (k, number of pairs) steps >= 0.
      target_delta: 0 < delta < 1.   ladder: orders > 1, ascending; the second tuple only where the last of the first
      is the best, and so on.
    Returns: (k,) epsilon, the same as from all orders; of several pairs all are looked at.

    >>> smallest_epsilons([SampledPair(0.01, 1.0, False)], [[100], [10_000]], 1e-5).round(3).tolist()
    [1.214, 6.713]
    """
    known = [_Known(pair) for pair in pairs]
    counts = np.asarray(counts)
    best = np.full(len(counts), np.inf)
    for orders in ladder:
        found = _at_best_orders(known, counts, target_delta, orders)
        best = np.minimum(best, [epsilon for epsilon, _ in found])
        if all(order < orders[-1] for _, order in found):
            break
    return best


def _at_best_orders(
    known: list[_Known], counts: NDArray, target_delta: float, orders: tuple
) -> list[tuple[float, float]]:
    """(epsilon, order) for each row of counts."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    if len(known) > 1:
        # A fractional order's bound may be that of a larger order, and where several pairs meet, of one not looked at.
        for each, order in product(known, orders):
            if order not in each:
                each.look_at(order)
    divergences = [each.at_least(orders) for each in known]
    found = []
    for row in counts:
        while True:
            composed = sum(count * each for count, each in zip(row, divergences, strict=True))
            epsilon, order = compute_epsilon(orders, list(np.atleast_1d(composed)), target_delta)
            if order in known[0]:
                break
            # A whole order improves the bounds of all beyond it: so not itself, but halfway from the last known one.
            if order == int(order):
                last = max(each for each in known[0].whole_orders() if each < order)
                between = [each for each in orders if last < each <= order]
                order = between[len(between) // 2]
            for each in known:
                each.look_at(order)
            divergences = [each.at_least(orders) for each in known]
        found.append((float(epsilon), order))
    return found


def _rounding(alpha: NDArray) -> NDArray[np.float64]:
    """What float64 may have lost of log A_alpha, in a sum of about alpha terms."""
    return 8 * MACHINE_EPS * alpha * np.log(alpha + 2)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of dp_accounting's log, for the time of the block."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
