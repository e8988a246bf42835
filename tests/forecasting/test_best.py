"""The search for the best cell, in landscapes that are known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from noisecast import DPSGD, Poisson, SampledGaussian, Scenario, Stream, forecast_best, jax_model, quadratic
from noisecast.runners import Moments
from noisecast.runners.moments.forecast import OF_A_FIT, Rough
from noisecast.table import DIVERGED, EXTRAPOLATED, OK

PROBLEM = quadratic(np.linspace(0.5, 2.0, 20), 0.3, example_noise_std=0.2)
MECHANISM = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Stream(8))


def valley(best_rate, best_clip, tilt=0.0, skew=0.0):
    """A loss of 0.5 at its best, as forecasts look in the logarithms: a parabola, a cubic part, a tilt between them."""

    def value(optimizer, clip, noise):
        u, c = math.log(optimizer.learning_rate / best_rate), math.log(clip / best_clip)
        u = u + tilt * c
        return 0.5 + 0.05 * u**2 + 0.01 * c**2 + skew * max(u, 0) ** 3, False

    return value


@pytest.mark.parametrize("best_rate", [1e-4, 0.1, 300.0])
@pytest.mark.parametrize("best_clip, tilt, skew", [(1.0, 0.0, 0.0), (12.0, 0.0, 0.05), (0.2, 0.7, 0.05)])
def test_the_bottom_of_a_valley_is_found(landscape, best_rate, best_clip, tilt, skew):
    landscape(valley(best_rate, best_clip, tilt, skew))
    best = forecast_best(PROBLEM, MECHANISM, DPSGD(learning_rate=1.0), num_steps=100)
    assert best.outcome.value < 0.5 * 1.002
    assert best.outcome.status == OK and not best.reasons
    assert (best.cells["setting"] == "full").sum() < 50 and len(best.cells) < 120


def test_a_higher_accuracy_is_better(landscape):
    def value(optimizer, clip, noise):
        return 1.2 - valley(0.1, 1.0)(optimizer, clip, noise)[0], False

    landscape(value, "test_accuracy")
    best = forecast_best(PROBLEM, MECHANISM, DPSGD(learning_rate=1.0), num_steps=100, metric="test_accuracy")
    assert best.outcome.value > 0.698


def test_what_is_extrapolated_is_not_preferred_and_said(landscape):
    def value(optimizer, clip, noise):
        return valley(0.1, 1.0)(optimizer, clip, noise)[0], optimizer.learning_rate > 0.05

    landscape(value)
    best = forecast_best(PROBLEM, MECHANISM, DPSGD(learning_rate=1.0), num_steps=100)
    assert best.outcome.status == OK and best.learning_rate <= 0.05
    assert any("with better forecasts, 0.5105 at best, were passed over" in reason for reason in best.reasons)


def test_a_best_that_is_extrapolated_says_so(landscape):
    landscape(lambda optimizer, clip, noise: (valley(0.1, 1.0)(optimizer, clip, noise)[0], True))
    best = forecast_best(PROBLEM, MECHANISM, DPSGD(learning_rate=1.0), num_steps=100)
    assert best.outcome.status == EXTRAPOLATED and best.outcome.value < 0.502
    assert any("At the best cell the forecast is extrapolated" in reason for reason in best.reasons)


@pytest.mark.parametrize("more, is_passed", [((), False), (("Steps overshoot.",), True)])
def test_a_loss_that_is_nearly_gone_is_not_passed_over(landscape, more, is_passed):
    def value(optimizer, clip, noise):
        return valley(0.1, 1.0)(optimizer, clip, noise)[0], (*more, OF_A_FIT) if optimizer.learning_rate > 0.05 else ()

    landscape(value)
    best = forecast_best(PROBLEM, MECHANISM, DPSGD(learning_rate=1.0), num_steps=100)
    assert (best.learning_rate <= 0.05) == is_passed == (best.outcome.status == OK)
    assert any("passed over because these are extrapolated" in reason for reason in best.reasons) == is_passed
    assert any("its loss is nearly gone" in reason for reason in best.reasons) != is_passed
    assert (OF_A_FIT in best.reasons) != is_passed  # by how much it may be off


@pytest.mark.parametrize("sound, is_passed", [(0.06, True), (0.003, False)])
def test_what_is_known_roughly_is_passed_over_where_that_may_turn_the_order(landscape, sound, is_passed):
    """0.5 is left at best, 0.51 and 1.1 at the largest learning rates that are sound."""

    def value(optimizer, clip, noise):
        reasons = () if optimizer.learning_rate <= sound else (Rough("Directions lag."),)
        return valley(0.1, 1.0)(optimizer, clip, noise)[0], reasons

    landscape(value)
    best = forecast_best(PROBLEM, MECHANISM, DPSGD(learning_rate=1.0), num_steps=100)
    assert (best.learning_rate <= sound) == is_passed == (best.outcome.status == OK)
    assert any("passed over because these are extrapolated" in reason for reason in best.reasons) == is_passed
    assert ("Directions lag." in best.reasons) != is_passed


def test_divergence_is_never_the_answer(landscape):
    def value(optimizer, clip, noise):
        low = valley(1e-5, 1.0)(optimizer, clip, noise)[0]
        return (math.nan if optimizer.learning_rate > 2e-5 else low), False

    landscape(value)
    best = forecast_best(PROBLEM, MECHANISM, DPSGD(learning_rate=1.0), num_steps=100)
    assert best.outcome.value < 0.502 and (best.cells["status"] == DIVERGED).any()
    landscape(lambda optimizer, clip, noise: (math.inf, False))
    with pytest.raises(ValueError, match="Expected a learning rate at which DP-SGD is forecast to converge"):
        forecast_best(PROBLEM, MECHANISM, DPSGD(learning_rate=1.0), num_steps=100)


def test_a_range_is_kept_and_its_edge_is_said(landscape):
    landscape(valley(0.1, 1.0))
    ranges = {"learning_rates": (0.2, 2.0), "l2_clip_norms": (0.7, 0.7)}
    best = forecast_best(PROBLEM, MECHANISM, DPSGD(learning_rate=1.0), num_steps=100, **ranges)
    assert (best.learning_rate, best.l2_clip_norm) == (0.2, 0.7)
    assert best.reasons == ("The best learning_rate lies at the edge of its range; widen learning_rates.",)
    assert best.cells["learning_rate"].between(0.2, 2.0).all() and (best.cells["l2_clip_norm"] == 0.7).all()


def test_clip_norms_without_effect_are_not_chased(landscape):
    landscape(lambda optimizer, clip, noise: valley(0.1, 1.0)(optimizer, max(clip, 1.0), noise))
    best = forecast_best(PROBLEM, MECHANISM, DPSGD(learning_rate=1.0), num_steps=100)
    assert best.outcome.value < 0.501 and 0.01 < best.l2_clip_norm < 2


def test_two_sides_of_a_valley_are_no_clip_norms_without_effect(landscape):
    """At an edge of the first grid they are as good as each other; between them, and beyond, they are not."""
    landscape(valley(0.1, 8.0))
    best = forecast_best(PROBLEM, MECHANISM, DPSGD(learning_rate=1.0), num_steps=100)
    assert best.l2_clip_norm == pytest.approx(8.0, rel=0.3) and best.reasons == ()


@pytest.mark.parametrize("other_clip", [1.0, 64.0])
def test_a_second_valley_behind_a_ridge_is_found(landscape, other_clip):
    """At a learning rate two hundred times higher, at the same clip norm or at a larger one."""

    def value(optimizer, clip, noise):
        near, _ = valley(0.1, 1.0)(optimizer, clip, noise)
        far, _ = valley(20.0, other_clip)(optimizer, clip, noise)
        ridge = 0.7 if optimizer.learning_rate < 0.1 else 0.65
        return min(near, far - 0.1 + 0.005 * math.log(clip / other_clip) ** 2, ridge), False

    landscape(value)
    best = forecast_best(PROBLEM, MECHANISM, DPSGD(learning_rate=1.0), num_steps=100)
    assert best.outcome.value == pytest.approx(0.4, abs=2e-3)
    assert best.learning_rate == pytest.approx(20.0, rel=0.3)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"learning_rates": (2.0, 1.0)}, "Expected learning_rates as"),
        ({"l2_clip_norms": (0.0, 1.0)}, "Expected l2_clip_norms as"),
        ({"metric": "test_loss"}, "Expected a metric among loss"),
        ({"num_steps": 0}, "Expected num_steps"),
    ],
)
def test_bad_requests_are_one_sentence(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        forecast_best(PROBLEM, MECHANISM, DPSGD(learning_rate=1.0), **{"num_steps": 10} | given)


def test_an_unsupported_problem_is_refused():
    problem = jax_model(lambda params, x: (params["w"] * x).sum(), {"w": np.ones(2, np.float32)}, np.ones((9, 2)))
    mechanism = replace(MECHANISM, sampler=Poisson.for_batch_size(3, 9))
    assert (reason := Moments().why_unsupported(
        Scenario(problem=problem, mechanism=mechanism, optimizer=DPSGD(learning_rate=1.0), num_steps=10)
    )) is not None  # fmt: skip
    with pytest.raises(ValueError) as caught:
        forecast_best(problem, mechanism, DPSGD(learning_rate=1.0), num_steps=10)
    assert str(caught.value) == reason
