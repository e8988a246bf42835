"""The closures against plain loops, against each other, and against exact laws. No randomness."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from noisecast.theory import sign_lattice_law, sign_moments_closure, sign_second_moment_linear
from noisecast.theory.clipping import clipping_expectations
from noisecast.theory.closures import SIGN_CLOSURE, GradientLaw, expected_norm, sign_response
from noisecast.theory.dp_adam import few_gradients, lag_at, momentum_noise
from noisecast.theory.frozen_steps import (
    Drift,
    advance_covariance,
    advance_variance,
    drift_covariance,
    drift_variance,
    geometric_sum,
    krylov_response,
    largest_stable_step,
)
from noisecast.theory.logistic_moments import clipped_expectations, logistic_expectations
from noisecast.theory.loss_spread import (
    hermite_coefficients,
    linear_covariance,
    mean_loss_std,
    square_covariance,
    std_of_mean,
)
from noisecast.theory.low_dimension import low_dimension_clipping_expectations
from noisecast.theory.output_law import GaussianLaw, SkewLaw
from noisecast.theory.quadratic_moments import InjectedNoise, recursion_of

SIGN = recursion_of(SIGN_CLOSURE)


def sign_floor(rho: float, num_steps: int) -> float:
    """E x^2 in units of eta^2 after many steps of the closure on f = x^2/2 with s = 1/rho, eta = 1."""
    at = SIGN.start(np.zeros(1))
    for step in range(num_steps):
        at = SIGN.step(at, step, 1.0, GradientLaw(at.mean, at.variance, 1 / rho**2), 1.0)
    return float((at.mean**2 + at.variance)[0])


@pytest.mark.parametrize("rho, tolerance, num_steps", [(0.1, 2e-4, 400), (1.0, 2e-2, 60)])
def test_sign_floor_is_the_birth_death_chains(rho, tolerance, num_steps):
    points, law = sign_lattice_law(
        -1, initial_param=0.0, gradient=lambda x: x, gradient_noise_std=1 / rho, learning_rate=1.0, half_width=200
    )
    exact = float(law @ points**2)
    linear = float(
        sign_second_moment_linear(
            10**6, initial_params=np.zeros(1), hessian_diag=np.ones(1), gradient_noise_std=1 / rho, learning_rate=1.0
        )[0]
    )
    print(f"\nrho = {rho}: closure {sign_floor(rho, num_steps) / exact - 1:+.3%}, linear {linear / exact - 1:+.2%}")
    assert abs(sign_floor(rho, num_steps) / exact - 1) < tolerance
    assert abs(linear / exact - 1) > tolerance  # the control: the linearised algorithm is seen to be wrong


def test_sign_transient_is_the_chains_and_the_other_closures():
    """Signal-to-noise ratio 3 at the start, where the linear theory errs by tens of per cent."""
    eta, start, num_steps = 0.01, 3.0, 500
    at = SIGN.start(np.array([start]))
    for step in range(num_steps):
        at = SIGN.step(at, step, 1.0, GradientLaw(at.mean, at.variance, 1.0), eta)
    second = float((at.mean**2 + at.variance)[0])
    settings = {"initial_params": np.array([start]), "hessian_diag": np.ones(1), "learning_rate": eta}
    _, other = sign_moments_closure(num_steps, gradient_noise_std=1.0, **settings)
    points, law = sign_lattice_law(
        num_steps, initial_param=start, gradient=lambda x: x, gradient_noise_std=1.0, learning_rate=eta, half_width=500
    )
    assert second == pytest.approx(other[-1, 0], rel=1e-10)
    assert second == pytest.approx(float(law @ points**2), rel=2e-4)


@pytest.mark.parametrize("factors, weights", [((1.0,), (1.0,)), ((0.5, 2.0, 1.0), (0.3, 0.3, 0.4))])
def test_the_gain_of_a_sign_is_the_slope_of_its_expectation(factors, weights):
    mean, step = np.array([-2.0, -0.1, 0.0, 0.7, 3.0]), 1e-5

    def response(shift):
        return sign_response(GradientLaw(mean + shift, 0.3, 0.8, factors, weights))

    slope = (response(step)[0] - response(-step)[0]) / (2 * step)
    np.testing.assert_allclose(response(0.0)[1], slope, rtol=1e-6)


def test_geometric_sum_is_the_sum():
    x = np.array([0.0, 1e-16, 1e-9, 0.3, 1.0, 1.7, 2.0, 2.5, -0.1])
    for n in (1, 2, 7, 30):
        plain = sum((1 - x) ** i for i in range(n))
        np.testing.assert_allclose(geometric_sum(x, n), plain, rtol=1e-9, atol=1e-12)


def test_directions_that_overshoot_are_taken_halfway_on_request():
    """x = eta k J: below the bound nothing changes, beyond it the variance lies between before and after."""

    def after(learning_rate, **asked):
        given = {"jacobian": np.eye(2), "gain": np.array([1.0, 0.1]), "noise": np.eye(2), "num_steps": 400}
        return advance_covariance(np.eye(2), learning_rate=learning_rate, **given, **asked)

    np.testing.assert_array_equal(after(1.4, overshooting=1.5), after(1.4))
    calm, swung = after(1.8, overshooting=1.5), after(1.8)
    assert swung[0, 0] == pytest.approx(1.8 / 0.2) and calm[0, 0] == pytest.approx((1 + 1.8 / 0.2) / 2)
    assert calm[1, 1] == swung[1, 1]


def test_what_is_taken_halfway_is_still_a_covariance():
    given = {"jacobian": np.diag([0.5, 1.8]), "gain": np.ones(2), "noise": 1e-3 * np.eye(2), "learning_rate": 1.0}
    after = advance_covariance(np.ones((2, 2)) + 1e-3 * np.eye(2), **given, num_steps=40, overshooting=1.5)
    assert np.linalg.eigvalsh(after)[0] > 0


def plain_example():
    rng = np.random.default_rng(20_261_120)
    square = rng.normal(size=(5, 8))
    jacobian = square @ square.T / 8
    noise = np.cov(rng.normal(size=(5, 30)))
    return jacobian, rng.uniform(0.1, 1.0, 5), noise, 0.2 * np.eye(5), rng.normal(size=5)


@pytest.mark.parametrize("learning_rate", [0.01, 0.9])
def test_many_frozen_steps_are_so_many_single_ones(learning_rate):
    jacobian, gain, noise, covariance, force = plain_example()
    n = 23
    step = np.eye(5) - learning_rate * gain[:, None] * jacobian
    plain, travelled = covariance, np.zeros(5)
    for _ in range(n):
        plain = step @ plain @ step.T + learning_rate**2 * noise
        travelled = (np.eye(5) - learning_rate * jacobian) @ travelled + force
    fast = advance_covariance(
        covariance, jacobian=jacobian, gain=gain, noise=noise, learning_rate=learning_rate, num_steps=n
    )
    np.testing.assert_allclose(fast, plain, rtol=1e-9, atol=1e-12)
    response = krylov_response(lambda v: learning_rate * (jacobian @ v), force, n, tolerance=1e-12)
    np.testing.assert_allclose(response, travelled, rtol=1e-8)
    diagonal = np.diag(np.diag(jacobian))
    alone = advance_variance(
        np.diag(covariance), jacobian=np.diag(jacobian), gain=gain, noise=np.diag(noise),
        learning_rate=learning_rate, num_steps=n,
    )  # fmt: skip
    together = advance_covariance(
        covariance, jacobian=diagonal, gain=gain, noise=np.diag(np.diag(noise)),
        learning_rate=learning_rate, num_steps=n,
    )  # fmt: skip
    np.testing.assert_allclose(np.diag(together), alone, rtol=1e-9)


def averaged_steps(b: float, curvature, noise, num_steps: int):
    """Covariance of x, x' = x - m', m' = b m + (1 - b)(curvature x + noise), from x = m = 0; from moments of (x, m)."""
    d = len(curvature)
    move = np.block(
        [[np.eye(d) - (1 - b) * np.diag(curvature), -b * np.eye(d)], [(1 - b) * np.diag(curvature), b * np.eye(d)]]
    )
    feel = (1 - b) * np.vstack([-np.eye(d), np.eye(d)])
    both = np.zeros((2 * d, 2 * d))
    for _ in range(num_steps):
        both = move @ both @ move.T + feel @ noise @ feel.T
    return both[:d, :d]


@pytest.mark.parametrize("b", [0.5, 0.9])
def test_directions_that_average_gradients_settle_where_their_recursion_does(b):
    curvature = np.array([0.02, 0.3, 1.5, 2.5])  # the last would explode by gradients themselves
    noise = np.cov(np.random.default_rng(20_261_126).normal(size=(4, 30)))
    asked = {
        "jacobian": np.diag(curvature),
        "gain": np.ones(4),
        "noise": noise,
        "learning_rate": 1.0,
        "num_steps": 5000,
    }
    plain = averaged_steps(b, curvature, noise, 5000)
    lag = b / (1 - b)
    np.testing.assert_allclose(advance_covariance(np.zeros((4, 4)), **asked, lag=lag), plain, rtol=1e-9)
    alike = asked | {"jacobian": curvature, "gain": 1.0, "noise": np.diag(noise)}
    np.testing.assert_allclose(advance_variance(np.zeros(4), **alike, lag=lag), np.diag(plain), rtol=1e-9)
    alone = advance_variance(np.zeros(3), **{k: v[:3] if np.ndim(v) else v for k, v in alike.items()})
    assert (alone[1:] > 1.05 * np.diag(plain)[1:3]).all()  # without lag
    limit = largest_stable_step(lag)
    assert averaged_steps(b, np.array([0.98 * limit]), np.eye(1), 4000) < 1e3
    assert averaged_steps(b, np.array([1.02 * limit]), np.eye(1), 400) > 1e6


@pytest.mark.parametrize("curvature", [0.01, 0.05, 0.2])
def test_what_is_given_may_drift(curvature):
    """Noise and slope that grow by a tenth half-way to the end: frozen ones leave a variance that settles behind."""
    n, since = 60, 30
    later = (np.arange(n) - since + 0.5) / since
    noises, slopes = 0.5 * (1 - 0.1 * later), curvature * (1 + 0.1 * later)
    start = halfway = 0.5 * 1.1 / (2 * curvature * 0.9)
    end, place = start, 0.0
    for step, (noise, slope) in enumerate(zip(noises, slopes)):
        end += noise - (2 * slope - slope**2) * end
        halfway = end if step == since - 1 else halfway
        place += 0.1 * later[step] - curvature * place
    growth = (-0.1 * 0.5 - 0.1 * (2 * curvature - 2 * curvature**2) * halfway) / since
    asked = {"gain": np.ones(1), "learning_rate": 1.0, "num_steps": n}
    frozen = {"jacobian": np.array([curvature]), "noise": np.array([0.5])}
    square = {name: np.diag(value) for name, value in frozen.items()}
    behind = advance_variance(np.array([start]), **frozen, **asked)
    drift = Drift(np.array([growth]), since)
    drifted = drift_variance(behind, drift, jacobian=frozen["jacobian"], **asked)
    assert abs(drifted - end) < 0.25 * abs(behind - end) and abs(behind / end - 1) > 0.02
    together = advance_covariance(np.diag([start]), **square, **asked)
    of_square = drift._replace(growth=np.diag(drift.growth))
    found = drift_covariance(together, of_square, jacobian=square["jacobian"], **asked)
    np.testing.assert_allclose(found, np.diag(drifted))
    moved = krylov_response(lambda v: curvature * v, np.array([0.1 / since]), n, since=since)
    np.testing.assert_allclose(moved, place, rtol=0.15)


@pytest.mark.parametrize("growth", [-1e9, -0.01, 0.0, 0.01, 1e9])
def test_what_drifts_is_a_covariance_and_leaves_alone_what_has_a_law_of_its_own(growth):
    jacobian, gain, noise, covariance, apart = plain_example()
    asked = {"jacobian": jacobian, "gain": gain, "learning_rate": 0.1, "num_steps": 30}
    frozen = advance_covariance(covariance, noise=noise, **asked)
    drift = Drift(growth * (noise + 0.1 * np.eye(5)), 15)
    everywhere, beside = (drift_covariance(frozen, drift, apart=each, **asked) for each in (None, apart))
    assert np.linalg.eigvalsh(beside)[0] > 0
    assert apart @ beside @ apart == pytest.approx(apart @ frozen @ apart)
    assert np.sign(np.round(np.trace(everywhere - frozen), 12)) == np.sign(growth)


@settings(deadline=None, derandomize=True)
@given(
    x=st.lists(st.floats(1e-4, 30.0), min_size=2, max_size=6), lag=st.floats(0.01, 9.0), num_steps=st.integers(1, 400),
    share=st.floats(0.0, 1.0),
)  # fmt: skip
def test_what_lags_is_a_covariance_at_any_time(x, lag, num_steps, share):
    x = np.minimum(x, 0.9 * largest_stable_step(lag))
    ones = np.ones((len(x), len(x)))
    after = advance_covariance(
        share * ones, jacobian=np.diag(x), gain=np.ones(len(x)), noise=ones, learning_rate=1.0, num_steps=num_steps,
        lag=lag,
    )  # fmt: skip
    assert np.linalg.eigvalsh(after)[0] > -1e-9 * np.linalg.eigvalsh(after)[-1]


@pytest.mark.parametrize("curvature", [1e-4, 0.01, 0.3, 5.0])
def test_an_averaged_force_travels_as_its_recursion_does(curvature):
    """From an average that knows the force already, as between time steps; where it oscillates, by its envelope."""
    b, n = 0.9, 40
    x, m = 0.0, 1.0 if curvature < 0.02 else 0.0
    for _ in range(n):
        m = b * m + (1 - b) * (1.0 - curvature * x)
        x += m
    found = krylov_response(lambda v: curvature * v, np.ones(1), n, lag=b / (1 - b))[0]
    envelope = b ** (n / 2) / curvature if curvature > 0.02 else 0.0
    assert found == pytest.approx(x, rel=0.03, abs=1.5 * envelope)


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("mean, std", [(0.0, 0.3), (-1.5, 1.0), (2.0, 3.0)])
def test_logistic_expectations_are_the_integrals(label, mean, std):
    bound = 0.35
    example = GaussianLaw(np.array([mean]), np.array([std**2])), np.array([label]), np.array([bound])
    moves, found = clipped_expectations(*example), logistic_expectations(*example)

    def expected(function):
        def weighted(z):
            return function(z) * stats.norm.pdf(z, mean, std)

        kinks = [float(special.logit(bound)), float(special.logit(1 - bound))]
        return integrate.quad(weighted, mean - 9 * std, mean + 9 * std, points=kinks, limit=400)[0]

    def clamped(z):
        return np.clip(special.expit(z) - label, -bound, bound)

    def slope(z):
        return special.expit(z) * special.expit(-z) * (abs(special.expit(z) - label) < bound)

    # The kink of the clamp is what 24 nodes see least of; over many examples it averages out.
    assert moves.residual[0] == pytest.approx(expected(clamped), abs=2e-3)
    assert moves.squared_residual[0] == pytest.approx(expected(lambda z: clamped(z) ** 2), abs=2e-3)
    assert moves.slope[0] == pytest.approx(expected(slope), abs=1e-2)
    assert found.full_residual[0] == pytest.approx(expected(lambda z: special.expit(z) - label), abs=1e-4)
    assert found.loss[0] == pytest.approx(expected(lambda z: np.logaddexp(0, z) - label * z), abs=1e-4)
    is_clipped = expected(lambda z: float(abs(special.expit(z) - label) > bound))
    assert found.clip_fraction[0] == pytest.approx(is_clipped, abs=1e-7)
    assert found.probability_of_right[0] == pytest.approx(stats.norm.cdf((2 * label - 1) * mean / std), abs=1e-12)


SEED_ADAM = 640_301


def adam_paths(mean, b1, b2, num_steps, num_paths=100_000):
    """sum_{t <= n} m_hat_t/sqrt(v_hat_t) for n = 1, ..., num_steps, of gradients N(mean, 1); (num_steps, num_paths)."""
    rng = np.random.default_rng(SEED_ADAM)
    m, v, total, found = 0.0, 0.0, 0.0, []
    for t in range(1, num_steps + 1):
        g = mean + rng.standard_normal(num_paths)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        total = total + m / (1 - b1**t) / np.sqrt(v / (1 - b2**t))
        found.append(total)
    return np.array(found)


@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_momentum_counts_the_first_gradients_several_times(b2):
    drawn = adam_paths(0.0, 0.9, b2, 40).var(axis=1)
    for steps in (1, 2, 5, 10, 40):
        assert momentum_noise(steps, b1=0.9, b2=b2) == pytest.approx(drawn[steps - 1], rel=0.025)
    weights = [sum(0.1 * 0.9 ** (k - i) / (1 - 0.9 ** (k + 1)) for k in range(i, 10)) for i in range(10)]
    assert np.square(weights).sum() > 1.04 * drawn[9]  # the control: v_hat taken for known
    assert momentum_noise(5001, b1=0.9, b2=b2) - momentum_noise(5000, b1=0.9, b2=b2) == pytest.approx(1.0)


@pytest.mark.parametrize("b1, b2", [(0.9, 0.999), (0.5, 0.95), (0.0, 0.99)])
@pytest.mark.parametrize("mean", [0.3, 1.5])
def test_a_root_of_few_squares_holds_back(mean, b1, b2):
    """From step 3 on, to 2.5 % of the way; without it the first three steps are 8 % too long and more."""
    travelled = adam_paths(mean, b1, b2, 20).mean(axis=1)
    rho, plain = np.array(1 / (1 + mean**2)), mean / math.sqrt(1 + mean**2)
    found = plain * np.cumsum([few_gradients(rho, t, 1, b1=b1, b2=b2) for t in range(1, 21)])
    np.testing.assert_allclose(found[2:], travelled[2:], rtol=0.025, atol=0.02)
    assert few_gradients(rho, 3, 5, b1=b1, b2=b2) * plain * 5 == pytest.approx(found[6] - found[1])
    if mean == 0.3:
        assert plain * 3 > 1.08 * travelled[2]


def test_averages_lag_by_the_age_of_what_they_average():
    b1, t = 0.9, 7
    weights = (1 - b1) * b1 ** np.arange(t) / (1 - b1**t)
    assert lag_at(t, b1=b1) == pytest.approx(weights @ np.arange(t))
    assert lag_at(1, b1=b1) == pytest.approx(0.0) and lag_at(5, b1=0.0) == 0.0


@pytest.mark.parametrize("num_params", [3, 400])
@pytest.mark.parametrize("nu", [1.0, pytest.param(5.0, marks=pytest.mark.slow), math.inf])
def test_injected_noise_is_clippings(num_params, nu):
    law = {"num_params": num_params, "example_noise_std": 0.2, "degrees_of_freedom": nu, "l2_clip_norm": 1.0}
    found = InjectedNoise.tabulated(**law, largest_norm=100.0)
    for norm in (0.05, 0.8, 3.0):
        exact = low_dimension_clipping_expectations(np.array([norm]), **law)
        h, variance = found.at(norm)
        assert h == pytest.approx(exact.shrink_factor[0], rel=5e-3)
        trace = exact.second_moment[0] - (exact.shrink_factor[0] * norm) ** 2
        assert variance * num_params == pytest.approx(trace, rel=1e-2)


@pytest.mark.parametrize("num_params", [10, 100, 1000, 100_000])
@pytest.mark.parametrize("spread", [0.01, 0.3, 0.9])
def test_injected_noise_is_clippings_where_the_typical_example_begins_to_be_clipped(num_params, spread):
    """Gaussian noise of length `spread` C: the typical length alone errs there by 11, 3, 0.9 % of h, and the noise."""
    sigma = spread / math.sqrt(num_params)
    law = {"num_params": num_params, "example_noise_std": sigma, "degrees_of_freedom": math.inf, "l2_clip_norm": 1.0}
    noise = InjectedNoise.tabulated(**law, largest_norm=100.0)
    kink = math.sqrt(1 - spread**2)
    for norm in np.array([0.5, 0.95, 0.9973, 1.0011, 1.05, 2.0]) * kink:
        exact = low_dimension_clipping_expectations(np.array([norm]), **law)
        variance = exact.second_moment[0] - (exact.shrink_factor[0] * norm) ** 2
        # A table of points 1 % apart does not see a kink that is sharper: spread/sqrt(d) of C wide.
        blind = 0.0015 if spread / math.sqrt(num_params) < 0.01 and abs(norm / kink - 1) < 0.01 else 0.0
        assert noise.at(norm)[0] == pytest.approx(exact.shrink_factor[0], rel=1e-3 + blind)
        if not blind:
            assert noise.at(norm)[1] * num_params == pytest.approx(variance, rel=0.01)
    typical = clipping_expectations(kink, **law).shrink_factor
    if spread == 0.9 and num_params <= 1000:
        assert abs(noise.at(kink)[0] / typical - 1) > 5e-3


def test_injected_noise_is_exact_without_clipping():
    for num_params in (3, 400):
        law = {"num_params": num_params, "example_noise_std": 0.2, "degrees_of_freedom": math.inf}
        assert InjectedNoise.tabulated(**law, l2_clip_norm=1e4, largest_norm=10.0).at(2.0) == (1.0, 0.2**2)


def test_expected_norm_of_a_gaussian():
    assert expected_norm(9.0, 18.0) == pytest.approx(stats.chi(9).mean(), rel=1e-12)


def test_the_spread_of_skew_outputs_is_that_of_drawn_ones():
    """Their tail lies away from the wall at 0: losses of Gaussian ones, that go through it, differ twice as much."""
    rng = np.random.default_rng(710_001)
    rows, root = rng.normal(size=(40, 3)) + 2.0, np.eye(3) * 0.7
    mean, covariance = np.full(40, 4.0), rows @ root @ root.T @ rows.T
    std, gamma = np.sqrt(np.diag(covariance)), np.full(40, 0.13)
    laws = SkewLaw(GaussianLaw(mean, std**2), gamma), GaussianLaw(mean, std**2)
    behind = rng.normal(size=(100_000, 3)) @ root.T @ rows.T / std
    outputs = laws[0].mean + laws[0].std / laws[0].width * (behind + gamma * (behind**2 - 1))
    losses = np.logaddexp(0.0, -outputs)
    drawn, own = losses.mean(axis=1).std(), float(losses.var(axis=0).mean())

    def found(law) -> float:
        coefficients = hermite_coefficients(lambda x: np.logaddexp(0.0, -law.at(x)), order=6)
        return mean_loss_std(coefficients, covariance, std, own, len(mean))

    print([round(found(law) / drawn, 3) for law in laws])
    assert found(laws[0]) == pytest.approx(drawn, rel=0.02)
    assert found(laws[1]) > 1.2 * drawn


def test_the_spread_of_the_mean_loss_is_that_of_drawn_weights():
    rng = np.random.default_rng(690_001)
    rows, root = rng.normal(size=(40, 6)), rng.normal(size=(6, 6)) / 2
    mean, covariance = rows @ rng.normal(size=6), rows @ root @ root.T @ rows.T
    std = np.sqrt(np.diag(covariance))
    coefficients = hermite_coefficients(lambda x: np.logaddexp(0.0, mean[:, None] + std[:, None] * x))
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    losses = np.logaddexp(0.0, mean[:, None] + std[:, None] * nodes)
    own = float(np.cov(losses, aweights=weights, ddof=0).diagonal().mean())
    found = mean_loss_std(coefficients, covariance, std, own, len(mean))
    drawn = np.logaddexp(0.0, mean + rng.normal(size=(100_000, 6)) @ root.T @ rows.T).mean(axis=1).std()
    assert found == pytest.approx(drawn, rel=0.015)
    assert mean_loss_std(coefficients[:1], covariance, std, own, len(mean)) < 0.97 * drawn  # control: the slope alone
    assert mean_loss_std(coefficients, covariance, std, 2 * own, len(mean)) > 1.05 * drawn  # control: wider laws

    # The slope's part from all examples, the rest from a quarter of them.
    pull = (coefficients[0] / std) @ rows @ root / len(mean)
    linear = linear_covariance(float(pull @ pull), coefficients[0] ** 2)
    again = mean_loss_std(coefficients, covariance, std, own, len(mean), known={1: linear})
    assert again == pytest.approx(found, rel=1e-9)

    def error(**known) -> float:
        quarters = [slice(first, None, 4) for first in range(4)]
        stds = [mean_loss_std(coefficients[:, q], covariance[q, q], std[q], own, len(mean), **known) for q in quarters]
        return float(np.abs(np.array(stds) - found).mean())

    assert error(known={1: linear}) < error() / 2

    # And the curvature's.
    bends = coefficients[1] / std**2
    bent = (rows.T * bends) @ rows @ root @ root.T / len(mean)
    square = square_covariance(float(np.trace(bent @ bent)), coefficients[1])
    again = mean_loss_std(coefficients, covariance, std, own, len(mean), known={1: linear, 2: square})
    assert again == pytest.approx(found, rel=1e-9)
    print(error(), error(known={1: linear}), error(known={1: linear, 2: square}))
    assert error(known={1: linear, 2: square}) < error(known={1: linear}) / 2


def test_a_few_examples_say_the_spread_of_the_mean_of_all():
    """What examples have in common does not average out, what is their own does."""
    rng = np.random.default_rng(690_002)
    common, own, m, n = 0.02, 0.3, 100, 2_000
    losses = common * rng.normal(size=(4_000, 1)) + own * rng.normal(size=(4_000, n))
    few = losses[:, :m]
    assert std_of_mean(few, n) == pytest.approx(losses.mean(axis=1).std(), rel=0.06)
    assert std_of_mean(losses, n) == pytest.approx(losses.mean(axis=1).std(), rel=1e-9)
    assert few.mean(axis=1).std() > 1.6 * losses.mean(axis=1).std()  # control: the mean of the few


@pytest.mark.parametrize("presence, sees", [(0.05, True), (1.0, False)])
def test_the_sign_of_a_rare_coordinate_is_that_of_a_mixture(presence, sees):
    """A coordinate that one batch in twenty moves, by N(0.5, 0.3^2), over noise of std 0.4; presence 1 is off."""
    rng, rare = np.random.default_rng(0), 0.05
    present = rng.random(4_000_000) < rare
    batch = np.where(present, rng.normal(0.5, 0.3, len(present)), 0.0)
    gradient = batch + rng.normal(0.0, 0.4, len(present))
    second = rare * (0.5**2 + 0.3**2)
    law = GradientLaw(
        np.array([rare * 0.5]), 0.0, np.array([second - (rare * 0.5) ** 2 + 0.4**2]),
        presence=presence, privacy_variance=0.4**2,
    )  # fmt: skip
    expected = sign_response(law)[0][0]
    assert (abs(np.sign(gradient).mean() / expected - 1) < 0.06) == sees
