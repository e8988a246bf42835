"""Thresholds epsilon*: where the better of two optimizers changes along their final scores, in numbers and words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

_COUNT_WORDS = {1: "One", 2: "Two", 3: "Three", 4: "Four"}


class Point(NamedTuple):
    """A final score at one noise multiplier; value is None where the run diverged, half half its 95 % interval."""

    noise_multiplier: float
    epsilon: float
    value: float | None
    half: float


@dataclass(frozen=True)
class ScoreThreshold:
    """One change of the better optimizer, interpolated in log z between two levels.

    Args:
      noise_multiplier, epsilon: where; log epsilon is interpolated as well.
      below, above: the better optimizer at smaller and at larger epsilon.
      low, high: the next epsilons on either side at which the two are told apart; None where there is none.
    """

    noise_multiplier: float
    epsilon: float
    below: str
    above: str
    low: float | None
    high: float | None


def score_thresholds(
    first: str, ones: list[Point], second: str, others: list[Point], *, more: bool
) -> list[ScoreThreshold] | None:
    """Where the better of two changes, by increasing epsilon; None where fewer than two levels have both.

    A run that diverged has lost against one that has not. Two are told apart where their gap is larger than the root
    of the squares of their halves of 95 % intervals; a forecast has none, so nothing is left to chance there.

    Args:
      first, second: names.   ones, others: their scores.   more: whether larger is better.

    >>> flat = [Point(z, 1 / z, 1.0, 0.1) for z in (1.0, 2.0, 4.0)]
    >>> steep = [Point(z, 1 / z, value, 0.1) for z, value in ((1.0, 0.5), (2.0, 0.75), (4.0, 2.0))]
    >>> [found] = score_thresholds("flat", flat, "steep", steep, more=False)
    >>> round(found.noise_multiplier, 3), found.below, found.low, found.high
    (2.297, 'flat', 0.25, 0.5)
    """
    by_level = {point.noise_multiplier: point for point in others}
    pairs = [(one, by_level[one.noise_multiplier]) for one in ones if one.noise_multiplier in by_level]
    gaps = [(one, *_gap(one, other, more)) for one, other in pairs]
    # From much noise to little: epsilon increases.
    gaps = sorted(((p, gap, sure) for p, gap, sure in gaps if gap), key=lambda each: -each[0].noise_multiplier)
    if len(gaps) < 2:
        return None
    found = []
    for i, ((a, gap_a, _), (b, gap_b, _)) in enumerate(pairwise(gaps)):
        if gap_a * gap_b < 0:
            share = _share(gap_a, gap_b)
            noise = _between(a.noise_multiplier, b.noise_multiplier, share)
            epsilon = _between(a.epsilon, b.epsilon, share)
            below, above = (first, second) if gap_a > 0 else (second, first)
            low = next((p.epsilon for p, gap, sure in reversed(gaps[: i + 1]) if sure and gap * gap_a > 0), None)
            high = next((p.epsilon for p, gap, sure in gaps[i + 1 :] if sure and gap * gap_b > 0), None)
            found.append(ScoreThreshold(noise, epsilon, below, above, low, high))
    return found


def _gap(one: Point, other: Point, more: bool) -> tuple[float, bool]:
    """By how much the first is better, infinite where only one diverged, 0 where both did; and whether for sure."""
    if one.value is None or other.value is None:
        return (0.0, False) if one.value == other.value else (-math.inf if one.value is None else math.inf, True)
    gap = (one.value - other.value) * (1 if more else -1)
    return gap, abs(gap) > math.hypot(one.half, other.half)


def _share(gap_a: float, gap_b: float) -> float:
    """Where the line through both gaps is zero: 0 at the first, 1 at the second; the middle if one is infinite."""
    if math.isinf(gap_a) or math.isinf(gap_b):
        return 0.5
    return gap_a / (gap_a - gap_b)


def _between(a: float, b: float, share: float) -> float:
    return b if math.isinf(a) else a if math.isinf(b) else math.exp((1 - share) * math.log(a) + share * math.log(b))


def in_words(found: list[ScoreThreshold] | None, leader: str | None) -> str:
    """None, one or two thresholds, as a phrase; `leader` is better everywhere if there is none.

    >>> in_words([], "DP-Adam"), in_words(None, None)
    ('None: DP-Adam has the better mean at every ε.', 'Too few levels of ε to compare at.')
    """
    if found is None:
        return "Too few levels of ε to compare at."
    if not found:
        return f"None: {leader} has the better mean at every ε." if leader else "None: they are equal."
    parts = []
    for each in found:
        sure = "not established"
        if each.low is not None and each.high is not None:
            sure = f"told apart at {each.low:.3g} and {each.high:.3g}"
        parts.append(f"ε* ≈ {each.epsilon:.3g}, {each.below} better below ({sure})")
    return f"{_COUNT_WORDS.get(len(found), str(len(found)))}: {'; '.join(parts)}."
