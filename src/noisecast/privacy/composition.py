"""Epsilon of worst cases together: by privacy loss distributions (PLD), by Renyi divergences, the smaller of the two.

Both are proven upper bounds, on dp_accounting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from noisecast.privacy.renyi import MACHINE_EPS, smallest_epsilons
from noisecast.privacy.worst_case import WorstCase

PLD, RDP, EXACT, NONE = "PLD", "RDP", "Gaussian (exact)", "none"
STABLE = 0.005  # a PLD grid is fine enough when it moved the epsilon of one twice as coarse by less than this fraction
MAX_STEP_LOSSES, MAX_TOTAL_LOSSES = 1_000_000, 8_000_000  # most grid points of one step's and of all steps' losses


def smaller_bound(
    parts: Sequence[WorstCase], target_delta: float, deadline: float
) -> tuple[float, str, dict[str, float | str], str | None]:
    """The smaller of the PLD and the RDP bound on all parts together.

    Args:
      parts: independent of each other, all with noise and at least one sampled; one or more.
      target_delta: 0 < delta < 1.   deadline: `time.monotonic` at which no further PLD grid is begun [s].
    Returns: epsilon, inf if neither bound is finite; whose number it is; each accountant's epsilon, or why it has none;
      a note for the reader, or None.

    >>> from noisecast.privacy.mechanism import Adjacency
    >>> part = WorstCase(1.0, 0.01, Adjacency.ADD_OR_REMOVE_ONE, False, 100)
    >>> epsilon, accountant, details, note = smaller_bound([part], 1e-5, time.monotonic() + 30)
    >>> accountant, epsilon < details["RDP"], note
    ('PLD', True, None)
    """
    rdp = rdp_epsilon(parts, target_delta)
    pld = _pld_epsilon(parts, target_delta, rdp, deadline)
    details: dict[str, float | str] = {RDP: rdp, PLD: pld.epsilon if pld.epsilon < math.inf else str(pld.why)}
    epsilon, accountant = min((pld.epsilon, PLD), (rdp, RDP))
    if epsilon == math.inf:
        return epsilon, NONE, details, f"No accountant found a finite epsilon: {pld.why}"
    note = zero_note(epsilon)
    if pld.why is not None:
        note = f"{pld.why} The epsilon is a valid upper bound ({accountant}), looser than a finished PLD's."
    return epsilon, accountant, details, note


def zero_note(epsilon: float) -> str | None:
    """What must be said of an epsilon of 0; None of any other."""
    return None if epsilon > 0 else "Epsilon is 0: the whole run is indistinguishable up to delta itself."


@dataclass(frozen=True)
class _PldAnswer:
    """A PLD epsilon (inf if none), and why it is missing or not settled (None if it is)."""

    epsilon: float
    why: str | None


def rdp_epsilon(parts: Sequence[WorstCase], target_delta: float) -> float:
    """Epsilon of all parts together by Renyi differential privacy.

    Args:
      parts: independent of each other, with noise; one or more.   target_delta: 0 < delta < 1.
    Returns: () >= 0, an upper bound.

    >>> from noisecast.privacy.mechanism import Adjacency
    >>> round(rdp_epsilon([WorstCase(1.0, 0.01, Adjacency.ADD_OR_REMOVE_ONE, False, 100)], 1e-5), 3)
    1.214
    """
    return float(smallest_epsilons([part.pair for part in parts], [[part.count for part in parts]], target_delta)[0])


def _pld_epsilon(parts: Sequence[WorstCase], target_delta: float, rdp_epsilon: float, deadline: float) -> _PldAnswer:
    """Halve the loss grid's interval until epsilon settles. Each grid's epsilon is an upper bound on its own."""
    # The FFT loses up to about `count` machine epsilons of probability: pay for them, or refuse.
    count = sum(part.count for part in parts)
    rounding = 8 * MACHINE_EPS * count
    if rounding > 0.1 * target_delta:
        return _PldAnswer(
            math.inf, f"PLD was not run: float64 cannot resolve delta {target_delta:g} over {count} steps."
        )
    if rdp_epsilon == 0:
        return _PldAnswer(0.0, None)
    largest = max(part.largest_loss for part in parts)
    interval = min(max(min(rdp_epsilon / 500, largest / 10), largest / 50_000), 50.0)
    known = min(rdp_epsilon, sum(part.count * part.largest_loss for part in parts))
    best, started = math.inf, time.monotonic()
    while True:
        if 2 * largest / interval > MAX_STEP_LOSSES or known / interval > MAX_TOTAL_LOSSES:
            return _PldAnswer(best, _unfinished(best, "the grid that would settle it is too fine"))
        each = [self_composed(part.pld(interval), part.count) for part in parts]
        composed = reduce(lambda one, other: one.compose(other), each)
        epsilon = _smallest_epsilon(composed, target_delta - rounding, known)
        if best - epsilon < STABLE * epsilon or epsilon == 0:
            return _PldAnswer(min(best, epsilon), None)
        best, known, interval = min(best, epsilon), min(known, epsilon), interval / 2
        now = time.monotonic()
        # A grid costs little more than twice the one before it.
        if now + 3 * (now - started) > deadline:
            return _PldAnswer(best, _unfinished(best, "the time limit was near"))
        started = now


def self_composed(pld: Any, count: int) -> Any:
    """pld.self_compose(count), sooner.

    dp_accounting works out size^count, a number of up to a million digits, to see whether sparse losses stay few. More
    than ten times two or more of them do not, and what it does then is this.

    Args:
      pld: of one step, a `PrivacyLossDistribution`.   count: >= 1.
    Returns: the loss distribution of `count` independent steps.
    """
    each = [pld._pmf_remove] if pld._symmetric else [pld._pmf_remove, pld._pmf_add]
    if count > 10 and all(pmf.size > 1 for pmf in each):
        pld = type(pld)(*(pmf.to_dense_pmf() for pmf in each))
    return pld.self_compose(count)


def _unfinished(best: float, reason: str) -> str:
    return f"PLD was {'stopped before it was stable' if best < math.inf else 'not run'}: {reason}."


def _smallest_epsilon(pld: Any, delta: float, upper: float) -> float:
    """An epsilon <= upper with pld's delta(epsilon) <= delta, at most 1e-5 relative above the smallest; inf if none."""
    if pld.get_delta_for_epsilon(upper) > delta:
        return math.inf
    if pld.get_delta_for_epsilon(0.0) <= delta:
        return 0.0
    low, high = 0.0, upper
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if pld.get_delta_for_epsilon(middle) > delta else (low, middle)
    return high
