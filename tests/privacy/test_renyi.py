"""The best order is found without a look at most of them, and is the best of all."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

from noisecast.privacy.renyi import ORDERS, SampledPair, _Known, smallest_epsilons

WHOLE = ((2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256, 512, 1024),)
STEPS, DELTAS = (1, 100, 39_000, 1_000_000), (1e-8, 1e-5, 0.1)
FAST = [(0.00256, 0.7), (0.00256, 2.0), (1e-9, 1.0), (1.0, 10.0)]
WIDE = itertools.product((1e-9, 1e-4, 0.00256, 0.01, 0.1, 0.5, 0.9), (0.1, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0, 30.0, 1e3))


def by_all_orders(divergences, target_delta, ladder):
    """The minimum, with every order of a tuple looked at."""
    best = math.inf
    for orders in ladder:
        epsilon, order = compute_epsilon(orders, list(divergences(orders)), target_delta)
        best = min(best, float(epsilon))
        if order < orders[-1]:
            break
    return best


def looked_up(pairs):
    """orders -> divergences of each pair, each worked out once."""
    known = {}

    def divergences(orders):
        if orders not in known:
            known[orders] = [pair.divergences(orders) for pair in pairs]
        return known[orders]

    return divergences


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("q, z", [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in WIDE)])
def test_epsilon_is_that_of_all_orders(q, z, is_replaced):
    pair = SampledPair(q, z, is_replaced)
    of_all = looked_up([pair])
    for ladder, target_delta in itertools.product((ORDERS, WHOLE), DELTAS):
        # One by one: what is known from other numbers of steps would help.
        found = [smallest_epsilons([pair], [[count]], target_delta, ladder)[0] for count in STEPS]
        expected = [by_all_orders(lambda o, c=count: c * of_all(o)[0], target_delta, ladder) for count in STEPS]
        assert found == pytest.approx(expected, rel=1e-12, abs=0)


def test_parts_add_up_at_the_best_order_of_the_whole():
    two = [SampledPair(0.5, 10.353416715758142, False), SampledPair(1.0, 1.7133342021112086, True)]
    of_both = looked_up(two)
    expected = by_all_orders(lambda o: np.array([121, 1629]) @ np.array(of_both(o)), 1e-5, ORDERS)
    assert smallest_epsilons(two, [[121, 1629]], 1e-5)[0] == pytest.approx(expected, rel=1e-12)
    pairs = [SampledPair(0.01, 1.0, False), SampledPair(0.002, 0.6, False), SampledPair(1.0, 50.0, False)]
    counts = np.array([[1000, 0, 1], [1000, 20_000, 10], [10, 100_000, 100]])
    of_all = looked_up(pairs)
    expected = [by_all_orders(lambda o, row=row: row @ np.array(of_all(o)), 1e-6, ORDERS) for row in counts]
    assert smallest_epsilons(pairs, counts, 1e-6) == pytest.approx(expected, rel=1e-12, abs=0)


def test_one_row_that_needs_larger_orders_gets_them_for_all():
    pair = SampledPair(0.00256, 5.0, False)
    both = smallest_epsilons([pair], [[1], [39_000]], 1e-5)
    assert both.tolist() == [smallest_epsilons([pair], [[count]], 1e-5)[0] for count in (1, 39_000)]


@pytest.mark.parametrize("q, z", FAST)
@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_is_not_known_is_never_thought_too_large(q, z, is_replaced):
    pair, orders = SampledPair(q, z, is_replaced), ORDERS[0]
    true = pair.divergences(orders)
    known = _Known(pair)
    for order in (None, 248, 64, orders[90], 13):
        if order is not None:
            known.look_at(order)
        unknown = np.array([each not in known for each in orders])
        assert np.all(known.at_least(orders)[unknown] <= true[unknown])


def test_few_orders_are_looked_at(monkeypatch):
    looked_at, computed = [], SampledPair.computed

    def watched(pair, orders):
        looked_at.extend(orders)
        return computed(pair, orders)

    monkeypatch.setattr(SampledPair, "computed", watched)
    for z in (0.7, 1.0, 2.0, 5.0, 16.0):
        smallest_epsilons([SampledPair(0.00256, z, False)], [[39_000]], 1e-5)
    assert len(looked_at) < 5 * 25 < 5 * len(ORDERS[0])
