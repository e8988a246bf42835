"""What all outputs share: its law against simulated runs, and what examples know of it against direct integrals."""

import numpy as np
import pytest
from scipy import special

from noisecast.theory.common_swing import GRID, Swing, explained_by_gaussian
from noisecast.theory.logistic_moments import (
    clipped_expectations,
    logistic_expectations,
    loss_given,
    residual_given,
)
from noisecast.theory.output_law import GaussianLaw

SEED = 650_101


def skewed() -> Swing:
    """A law that is skew and flat: two Gaussians, standardised."""
    density = 0.65 * np.exp(-((GRID + 0.75) ** 2) / 0.5) + 0.35 * np.exp(-((GRID - 1.2) ** 2) / 0.8)
    moved = Swing(density / density.sum())
    mean = moved.mean_of(GRID)
    std = np.sqrt(moved.variance_of(GRID))
    density = np.interp(mean + std * GRID, GRID, density, left=0.0, right=0.0)
    return Swing(density / density.sum())


def overshooting(s):
    return 1.4 * np.tanh(s)


def box(s):
    """Nothing in the middle and bounded outside, where 60 of 100 examples push one way: clipped residuals."""
    return 0.02 * (0.4 * special.expit(8 * (s - 1.0)) - 0.6 * special.expit(-8 * (s + 1.0)))


@pytest.mark.parametrize(
    "pull, noise, num_steps, kurtosis",
    [
        (box, 0.002, 150, 2.4),
        pytest.param(box, 0.002, 3_000, 2.3, marks=pytest.mark.slow),
        (overshooting, 0.5, 3, 3.2),
    ],
)
def test_a_swing_has_the_law_of_simulated_runs(pull, noise, num_steps, kurtosis):
    """On the way and where it settles, in small steps and, of the last, in steps that overshoot."""
    rng = np.random.default_rng(SEED)
    s = 0.3 + 0.6 * rng.standard_normal(100_000)
    for _ in range(num_steps):
        s = s - pull(s) + np.sqrt(noise) * rng.standard_normal(len(s))
    law, mean, std = Swing.gaussian().moved(pull(GRID), noise, num_steps, mean=0.3, std=0.6)
    drawn = (s - s.mean()) / s.std()
    found = [float(law.mean_of(GRID**k)) for k in (3, 4)]
    print(f"\n{mean:.3f} {s.mean():.3f}, {std:.3f} {s.std():.3f}, {found} {np.mean(drawn**3)} {np.mean(drawn**4)}")
    assert mean == pytest.approx(s.mean(), abs=0.012)
    assert std == pytest.approx(s.std(), rel=0.015)
    np.testing.assert_allclose(found, [np.mean(drawn**3), np.mean(drawn**4)], atol=0.06)
    assert found[1] < kurtosis  # the control: no Gaussian in a box


def test_a_law_is_standardised_wherever_it_went():
    law, mean, std = skewed().moved(0.02 * GRID + 0.01, 0.02, 50, mean=-1.0, std=1.2)
    assert law.mean_of(np.ones_like(GRID)) == pytest.approx(1)
    assert law.mean_of(GRID) == pytest.approx(0, abs=1e-3)
    assert law.variance_of(GRID) == pytest.approx(1, abs=3e-3)
    assert mean == pytest.approx(-0.5 - 0.5 * np.exp(-1.0), abs=0.01)  # a spring's: around -1/2
    assert std**2 == pytest.approx(0.5 + (1.2**2 - 0.5) * np.exp(-2.0), rel=0.02)


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("correlation, tolerance", [(0.3, 0.006), (-0.5, 0.006), (0.9, 0.025)])
def test_what_examples_know_of_it_are_the_integrals(label, correlation, tolerance):
    """Over s and what is left of the logit; six orders tell a law of two humps roughly to whom follows it closely."""
    swing, mean, std, bound = skewed(), 0.4, 1.3, 0.4
    rest, weights = np.polynomial.hermite_e.hermegauss(80)
    z = mean + std * (correlation * GRID[:, None] + np.sqrt(1 - correlation**2) * rest)
    share = swing.density[:, None] * weights / weights.sum()
    full = special.expit(z) - label
    clamped, loss = np.clip(full, -bound, bound), np.logaddexp(0, z) - label * z
    slope = special.expit(z) * special.expit(-z) * (abs(full) < bound)

    moments, seen_by = (np.array([mean]), np.array([std**2])), (np.array([label]), np.array([bound]))
    example, b = (GaussianLaw(*moments), *seen_by), np.array([correlation])
    values = {"residual": clamped, "slope": slope, "squared_residual": clamped**2, "loss": loss, "full_residual": full}
    values |= {"clip_fraction": abs(full) > bound, "probability_of_right": (z > 0) == label}
    exact = {name: (share * value).sum() for name, value in values.items()}

    def errors(law: Swing) -> dict[str, float]:
        moves = clipped_expectations(*example, law.departures(b))._asdict()
        seen = moves | logistic_expectations(*example, law.departures(b))._asdict()
        return {name: abs(float(seen[name][0] - value)) for name, value in exact.items()}

    own, gaussian = errors(swing), errors(Swing.gaussian())
    assert max(own.values()) < tolerance, own
    for name in ("loss", "full_residual"):  # the control, where quadrature is exact enough to tell
        assert abs(correlation) < 0.5 or own[name] < 0.5 * gaussian[name], name

    at = abs(GRID) < 3
    found_given = residual_given(*moments, *seen_by, b, swing), loss_given(example[0].at, seen_by[0], b, swing)
    for value, found in zip((clamped, loss), found_given, strict=True):
        given = value @ weights / weights.sum() - (share * value).sum()
        np.testing.assert_allclose(found[0][at], given[at], atol=0.02)


def test_the_variance_that_a_gaussian_explains():
    values = 3 * GRID + 0.5 * (GRID**2 - 1)
    assert explained_by_gaussian(values, (1, 2)) == pytest.approx(9 + 0.5, rel=1e-3)
    assert Swing.gaussian().variance_of(values) == pytest.approx(9.5, rel=1e-3)
