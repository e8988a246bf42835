"""What a training example does to its own output: the closure against drawn paths, and against its equations."""

import math

import numpy as np
import pytest
from scipy import special, stats

from noisecast.theory.fokker_planck import advance_densities
from noisecast.theory.logistic_moments import clipped_expectations, logistic_expectations
from noisecast.theory.output_law import Cosines, GaussianLaw, GridLaw
from noisecast.theory.own_push import GRID, SPACING, Held, OwnPush, Pull

SEED_OWN = 960_101
KAPPA, BOUND, OWN_NOISE, FADING, FORGETTING = 0.15, 0.2, 0.01, 0.002, 0.003


def rho(z):
    """Of label 1."""
    return np.maximum(-special.expit(-z), -BOUND)


def drawn_paths(mean: float, num_steps: int, *, slow: float, swing: float, swing_rate: float):
    """b, r, y of 100,000 paths of b, r: Ornstein-Uhlenbeck, and y' = -kappa (rho(z) - E rho) - lambda y + own draws."""
    rng, paths = np.random.default_rng(SEED_OWN), 100_000
    b, r = (math.sqrt(spread) * rng.standard_normal(paths) for spread in (swing, slow))
    y = np.zeros(paths)
    for _ in range(num_steps):
        residual = rho(mean + b + r + y)
        own = math.sqrt(OWN_NOISE) * residual * rng.standard_normal(paths)
        y += -KAPPA * (residual - residual.mean()) - FADING * y + own
        r += -FORGETTING * r + math.sqrt(slow * (1 - (1 - FORGETTING) ** 2)) * rng.standard_normal(paths)
        b += -swing_rate * b + math.sqrt(swing * (1 - (1 - swing_rate) ** 2)) * rng.standard_normal(paths)
    return b, r, y - y.mean()


def closed(mean: float, num_steps: int, *, slow: float, swing: float, swing_rate: float, time_steps: int = 40):
    """The law of z, what is pushed, and what is held, by the closure."""
    one, length = np.ones(1), num_steps / time_steps
    swings, slows = swing * one, slow * one
    found = OwnPush.none(1)

    def seen(at: OwnPush):
        law = at.law(mean * one, swings, slows)
        moves = clipped_expectations(law, one, BOUND * one)
        return law, at.held(swings, slows, law, moves.values), moves.squared_residual

    def advanced(at: OwnPush, middle: OwnPush, steps: float) -> OwnPush:
        _, held, squared = seen(middle)
        return at.advance(
            steps, middle=middle, swing=swings, slow=slows, pull=Pull(KAPPA * one, held, squared, OWN_NOISE * one),
            swing_rate=swing_rate * one, slow_rate=FORGETTING * one, slow_noise=2 * FORGETTING * slows,
            growth=0 * one, fading_rate=FADING * one,
        )  # fmt: skip

    for _ in range(time_steps):
        found = found.resolved(swings, slows)
        found = advanced(found, advanced(found, found, length / 2), length)
    law, held, _ = seen(found)
    return law, found, held


def shape_of(x, shares):
    mean = shares @ x
    std = math.sqrt(shares @ (x - mean) ** 2)
    return std**2, shares @ (x - mean) ** 3 / std**3, shares @ (x - mean) ** 4 / std**4 - 3


@pytest.mark.parametrize("mean, num_steps", [(1.0, 150), (3.0, 150), (3.0, 600), (5.0, 600)])
@pytest.mark.parametrize("swing, swing_rate", [(0.0, 0.0), (1.5, 0.3)])
def test_the_law_of_a_pushed_output_is_the_drawn_one(mean, num_steps, swing, swing_rate):
    """Variance, skewness, excess kurtosis, loss, and with what the example holds the weights."""
    given = {"slow": 4.0, "swing": swing, "swing_rate": swing_rate}
    b, r, y = drawn_paths(mean, num_steps, **given)
    z = mean + b + r + y
    law, pushed, held = closed(mean, num_steps, **given)
    found = shape_of(law.outputs(np.ones(1))[:, 0].astype(float), law.shares[:, 0].astype(float))
    drawn = shape_of(z, np.full(len(z), 1 / len(z)))
    loss = logistic_expectations(law, np.ones(1), np.ones(1)).loss[0]
    residual = rho(z)
    holds = np.cov(r, residual)[0, 1] / r.var()
    print(f"\ndrawn {drawn}, found {found}; loss {np.logaddexp(0, -z).mean():.4f} {loss:.4f}; {holds:.4f} {held.slow}")
    assert found[0] == pytest.approx(drawn[0], rel=0.03)
    assert found[1] == pytest.approx(drawn[1], abs=0.1) and found[2] == pytest.approx(drawn[2], abs=0.36)
    assert loss == pytest.approx(np.logaddexp(0, -z).mean(), rel=0.03)
    assert pushed.with_slow[0] == pytest.approx(np.cov(r, y)[0, 1], rel=0.06)
    assert held.slow[0] == pytest.approx(holds, rel=0.05)
    assert held.lasting[0] == pytest.approx(-np.cov(y, residual)[0, 1], rel=0.15)
    if swing:
        assert held.swing[0] == pytest.approx(np.cov(b, residual)[0, 1] / b.var(), rel=0.03)
    assert drawn[0] < 0.75 * (4.0 + swing)  # the control: it is narrower, and without a swing no Gaussian
    assert swing or max(abs(drawn[1]), drawn[2]) > 0.35


def test_little_pushed_is_a_gaussian_and_joins_the_grid_without_a_jump():
    """Just before and just after `PUSHED` the law has the same mean, variance and loss."""
    one = np.ones(1)
    before = OwnPush.none(1)._replace(with_slow=-0.05 * one, drawn=0.02 * one)
    after = before.resolved(0.3 * one, one)
    assert before.density is None and after.density is not None
    laws = [each.law(1.5 * one, 0.3 * one, one) for each in (before, after)]
    assert isinstance(laws[0], GaussianLaw) and isinstance(laws[1], GridLaw)
    assert laws[1].std[0] == pytest.approx(laws[0].std[0], rel=2e-3)
    seen = [logistic_expectations(law, one, 0.3 * one) for law in laws]
    for name in ("loss", "full_residual", "full_slope", "probability_of_right", "clip_fraction"):
        assert getattr(seen[1], name)[0] == pytest.approx(getattr(seen[0], name)[0], rel=3e-3), name
    moves = [clipped_expectations(law, one, one) for law in laws]
    held = [at.held(0.3 * one, one, law, move.values) for at, law, move in zip((before, after), laws, moves)]
    for name in ("swing", "slow", "slope"):
        assert getattr(held[1], name)[0] == pytest.approx(getattr(held[0], name)[0], rel=6e-3), name


def test_what_is_pushed_of_a_gaussian_is_the_integrated_equations():
    one = np.ones(1)
    held = Held(0.1 * one, 0.2 * one, 0 * one, 0.25 * one)
    pull = Pull(0.04 * one, held, 0.3 * one, 0.01 * one)
    with_swing = with_slow = drawn = 0.0
    small, swing, slow = 0.01, 0.5, 2.0
    for _ in range(10_000):
        with_swing -= small * (0.04 * 0.1 * (swing + with_swing) + (0.002 + 0.05) * with_swing)
        with_slow -= small * (0.04 * 0.25 * (slow + with_slow) + (0.002 + 0.001) * with_slow)
        drawn += small * (0.01 * 0.3 - 2 * 0.002 * drawn)
    found = OwnPush.none(1)
    for _ in range(100):
        found = found.advance(
            1, middle=found._replace(with_swing=0 * one), swing=swing * one, slow=slow * one, pull=pull,
            swing_rate=0.05 * one, slow_rate=0.001 * one, slow_noise=one, growth=0 * one, fading_rate=0.002 * one,
        )  # fmt: skip
    advanced = [found.with_swing[0], found.with_slow[0], found.drawn[0]]
    np.testing.assert_allclose(advanced, [with_swing, with_slow, drawn], rtol=2e-3)
    assert found.density is None


@pytest.mark.parametrize("num_steps", [1, 40])
def test_densities_spread_as_their_process(num_steps):
    """An Ornstein-Uhlenbeck process from a shifted Gaussian: exact mean and variance, and the Gaussian's kurtosis."""
    x, time = GRID[:, None], 0.7
    density = np.exp(-((x - 1.0) ** 2) / (2 * 0.5))
    density /= density.sum()
    for _ in range(num_steps):
        density = advance_densities(
            density, drift=-x, diffusion=np.full_like(x, 1.2), spacing=SPACING, time=time / num_steps, substeps=3
        )
    variance, skewness, kurtosis = shape_of(GRID, density[:, 0])
    left = math.exp(-time)
    assert density.min() >= 0
    assert GRID @ density[:, 0] == pytest.approx(left, rel=5e-3)
    assert variance == pytest.approx(0.5 * left**2 + 1.2 * (1 - left**2), rel=5e-3)
    assert abs(skewness) < 0.02 and abs(kurtosis) < 0.02


def test_a_grid_finds_what_integrals_do():
    """A Gamma's skew law, blurred: expectations, share below a threshold, and derivatives."""
    shape, blur = 9.0, 0.4
    places, wide = GRID[:, None], np.linspace(-8, 8, 40_001)
    law = stats.gamma(shape)

    def density(x):
        return law.pdf(shape + math.sqrt(shape) * x) * math.sqrt(shape)

    shares = density(places)
    cosines = Cosines(len(GRID), SPACING)
    blurred = cosines.blurred(shares / shares.sum(), np.array([blur]))
    exact = np.convolve(density(wide), stats.norm.pdf(wide, scale=blur) * (wide[1] - wide[0]), mode="same")
    np.testing.assert_allclose(blurred[:, 0] / SPACING, np.interp(GRID, wide, exact), atol=2e-4)
    slope = np.gradient(exact, wide)
    np.testing.assert_allclose(cosines.derived(blurred)[:, 0] / SPACING, np.interp(GRID, wide, slope), atol=2e-3)
    found = GridLaw(np.zeros(1), 2 * (places - GRID @ blurred), blurred)
    assert found.std[0] == pytest.approx(2 * math.sqrt(1 + blur**2), rel=2e-3)
    for threshold in (-1.0, 0.3, 1.7):
        below = np.trapezoid(np.where(wide <= threshold * math.sqrt(1 + blur**2), exact, 0.0), wide)
        assert found.below(np.array([threshold]))[0] == pytest.approx(below, abs=4e-3)


@pytest.mark.parametrize("label", [0, 1])
def test_expectations_of_a_skew_logit(label):
    """Of a Gamma of skewness 0.5, either way, clipped or not."""
    std, shape = 1.5, 16.0
    law = stats.gamma(shape)
    grid = law.ppf((np.arange(200_000) + 0.5) / 200_000)
    for sign in (-1, 1):
        shares = law.pdf(shape + math.sqrt(shape) * sign * GRID)[:, None]
        shares /= shares.sum()
        on_grid = GridLaw(np.array([0.8]), std * (GRID[:, None] - GRID @ shares), shares)
        for bound in (np.array([0.3]), np.array([2.0])):
            z = 0.8 + sign * std * (grid - shape) / math.sqrt(shape)
            residual = np.clip(special.expit(z) - label, -bound, bound)
            exact = residual.mean(), np.cov(z, residual)[0, 1] / z.var(), (residual**2).mean()
            given = np.array([label]), bound
            gaussian, skew = (
                np.ravel(clipped_expectations(each, *given)[:3])
                for each in (GaussianLaw(np.array([0.8]), np.array([std**2])), on_grid)
            )
            np.testing.assert_allclose(skew, exact, atol=2.5e-3)
            assert bound < 1 or np.abs(gaussian - exact).max() > 6e-3  # the control
            loss = np.logaddexp(0, -(2 * label - 1) * z).mean()
            assert logistic_expectations(on_grid, *given).loss[0] == pytest.approx(
                loss, abs=4e-4
            )  # the grid ends at 5 deviations
