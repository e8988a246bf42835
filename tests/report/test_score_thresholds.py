"""Thresholds on curves whose crossings are known."""

import math

import pytest

from noisecast.report.score_thresholds import Point, in_words, score_thresholds

LEVELS = (1.0, 2.0, 4.0, 8.0)


def curve(values, half=0.0):
    return [Point(z, 8 / z, value, half) for z, value in zip(LEVELS, values, strict=True)]


def found(ones, others, more=False):
    return score_thresholds("one", ones, "other", others, more=more)


def test_none_one_and_two():
    flat = curve([1.0] * 4)
    assert found(flat, curve([2.0] * 4)) == []
    [at] = found(flat, curve([0.5, 0.5, 1.5, 1.5]))
    # Half-way between z = 2 and 4 on a logarithmic axis; the flat one wins where noise is large, epsilon small.
    assert at.noise_multiplier == pytest.approx(math.sqrt(8)) and at.epsilon == pytest.approx(8 / math.sqrt(8))
    assert (at.below, at.above, at.low, at.high) == ("one", "other", 2.0, 4.0)
    two = found(flat, curve([0.5, 1.5, 1.5, 0.5]))
    assert [(t.below, t.above) for t in two] == [("other", "one"), ("one", "other")]
    assert two[0].epsilon < two[1].epsilon


def test_larger_may_be_better():
    [less], [more] = (found(curve([1.0] * 4), curve([0.0, 0.0, 2.0, 2.0]), more=m) for m in (False, True))
    assert less.below == more.above == "one"


def test_a_threshold_within_chance_is_not_established():
    close = found(curve([1.0] * 4, half=0.5), curve([0.9, 0.9, 1.1, 1.1], half=0.5))
    assert len(close) == 1 and close[0].low is None and close[0].high is None
    assert "not established" in in_words(close, None)
    assert "told apart at 2 and 4" in in_words(found(curve([1.0] * 4), curve([0.9, 0.9, 1.1, 1.1])), None)


def test_one_seed_establishes_nothing():
    assert found(curve([1.0] * 4, half=math.inf), curve([0.0, 0.0, 2.0, 2.0], half=math.inf))[0].low is None


def test_who_diverges_has_lost():
    [at] = found(curve([1.0] * 4), curve([0.5, 0.5, None, None]))
    assert at.below == "one" and at.noise_multiplier == pytest.approx(math.sqrt(8))
    assert found(curve([1.0, None, None, None]), curve([0.5, None, None, None])) is None
    assert in_words(None, None).startswith("Too few")


def test_levels_without_a_partner_are_left_out():
    assert found(curve([1.0] * 4)[:1], curve([2.0] * 4)) is None
