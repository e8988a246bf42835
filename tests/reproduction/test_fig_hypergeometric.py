"""The hypergeometric figure: its numbers against mpmath and Monte Carlo, and that its claims can fail."""

import math

import mpmath
import numpy as np
import pytest

from noisecast.reproduction import fig_hypergeometric as figure


@pytest.fixture(scope="module")
def frame():
    return figure.run("quick")


@pytest.mark.parametrize("num_params", figure.NUM_PARAMS)
@pytest.mark.parametrize("z", [0.1, 10.0, 1e3, 1e5])
def test_kummer_is_1f1(num_params, z):
    exact = float(mpmath.hyp1f1(0.5, num_params / 2 + 1, -z))
    assert figure.kummer(z, num_params) == pytest.approx(exact, rel=1e-9)


def test_claims_of_the_lemmas(frame):
    claims = figure.claims(frame)
    assert [claim.holds for claim in claims] == [True, True, False, False, False, False, True, True]
    by_hand = {2: 2.0, 3: 0.0}  # first order of the Student form; the remainder's slope
    assert all(claims[i].value == pytest.approx(number, abs=0.1) for i, number in by_hand.items())
    assert all(claim.corrected for claim in claims if not claim.holds)


def test_the_students_first_order_is_twice_the_gaussians_at_one_degree_of_freedom():
    num_params, z = 10_000, 10.0
    ratio = math.sqrt(2 * z / num_params)
    at_zero, at_z = (figure._exact(x, num_params, 1.0) for x in (0.0, ratio))
    assert 1 - at_z / at_zero == pytest.approx(2 * z / (num_params + 2), rel=0.01)


@pytest.mark.parametrize("wrong, seen", [(1.0, False), (1.01, True), (0.99, True)])
def test_monte_carlo_sees_one_per_cent(frame, wrong, seen):
    altered = frame.assign(exact=frame["exact"] * wrong)
    assert figure._exact_form_is_right(altered).holds != seen


@pytest.mark.parametrize("wrong, holds", [(1.0, True), (1.004, False)])
def test_concentration_is_held_to_its_promise(frame, wrong, holds):
    altered = frame.assign(concentrated=frame["concentrated"] * wrong)
    assert figure._concentration(altered).holds == holds


def test_the_papers_starts():
    # The quadratic: |H x0| = 5 by construction, sigma sqrt(d) = 1; one draw of x0.
    assert figure.starting_ratio("quadratic") == pytest.approx(5.0, rel=0.1)
    assert 250 < figure.starting_ratio("quartic") < 330


def test_the_picture_has_the_papers_panel_and_two_of_the_factor(frame):
    drawn = figure.draw(figure.data(frame))
    assert [axes.get_title() for axes in drawn.axes] == ["the paper's figure: is it 1?", "d = 100", "d = 10,000"]
    assert len(drawn.axes[0].lines) == len(figure.NUM_PARAMS)


def test_progress_ends_at_one(monkeypatch):
    monkeypatch.setitem(figure.NUM_PAIRS, "quick", 100)
    told = []
    figure.run("quick", progress=lambda share, left: told.append(share))
    assert np.all(np.diff(told) > 0) and told[-1] == 1.0
