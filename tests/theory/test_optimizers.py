"""The three optimizers' SDEs: phases against the unified form, bounds against each other, NumPy against JAX."""

import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import special

from noisecast.theory import (
    DP_SGD,
    DP_SIGN_SGD,
    SMALL_SIGNAL_RESPONSE,
    GradientMoments,
    clipping_expectations,
    dp_adam,
    dp_adam_theory,
    dp_sgd,
    dp_sign_sgd,
    gradient_noise_std,
    loss_bound,
    phase_1_noise_std,
    phase_2_noise_std,
)

THEORIES = [DP_SGD, DP_SIGN_SGD, dp_adam_theory(0.9, 0.999, 1e-8)]
by_name = pytest.mark.parametrize("theory", THEORIES, ids=lambda t: t.name)
MODEL = dict(example_noise_std=0.02, degrees_of_freedom=3.0)


def unified(gradient, batch_size, mean_noise_std, **model):
    g, d = np.linalg.norm(gradient), len(gradient)
    e = clipping_expectations(g, num_params=d, **model)
    s = gradient_noise_std(
        g,
        shrink_factor=e.shrink_factor,
        second_moment=e.second_moment,
        num_params=d,
        batch_size=batch_size,
        mean_noise_std=mean_noise_std,
    )
    return GradientMoments(mean=e.shrink_factor * gradient, noise_std=s)


# --- Phases are limits of the unified form ---


def test_phase_1_is_the_unified_form_with_every_example_clipped():
    gradient = np.linspace(-1, 1, 500) * 0.01  # G = 0.13 << sigma sqrt d = 0.45
    c, b, z = 1e-3, 16, 0.5
    moments = unified(gradient, b, c * z / b, l2_clip_norm=c, **MODEL)
    printed = dp_sgd.drift_phase_1_as_printed(gradient, l2_clip_norm=c, **MODEL)
    assert dp_sgd.drift_phase_1(gradient, l2_clip_norm=c, **MODEL) == pytest.approx(DP_SGD.drift(moments, None))
    assert printed == pytest.approx(DP_SGD.drift(moments, None), rel=0.07)
    covariance = dp_sgd.covariance_phase_1(gradient, l2_clip_norm=c, batch_size=b, mean_noise_std=c * z / b, **MODEL)
    assert np.trace(covariance) == pytest.approx(500 * moments.noise_std**2, rel=1e-9)
    # In all directions but the gradient's, whose variance heavy tails enlarge: the trace alone would not tell.
    assert np.linalg.eigvalsh(covariance)[:-1] == pytest.approx(np.full(499, moments.noise_std**2), rel=0.03)
    sign = dp_sign_sgd.drift_phase_1(gradient, batch_size=b, noise_multiplier=z, **MODEL)
    assert sign == pytest.approx(DP_SIGN_SGD.drift(moments, None), rel=0.1)


@pytest.mark.parametrize("nu", [1.0, 3.0, math.inf])
@pytest.mark.parametrize("gradient_norm", [0.5, 5.0, 20.0])
def test_phase_1_covariance_is_that_of_drawn_directions(nu, gradient_norm):
    """sigma = 1, d = 100. 1/d - a^2 G^2, as it had been, is negative along the gradient from G = 1 on."""
    rng, d, n, batch = np.random.default_rng(0), 100, 40_000, 4
    scale = np.sqrt(nu / rng.chisquare(nu, (n, 1))) if nu < math.inf else 1.0
    drawn = scale * rng.standard_normal((n, d))
    drawn[:, 0] += gradient_norm
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    gradient = np.zeros(d)
    gradient[0] = gradient_norm
    model = dict(example_noise_std=1.0, degrees_of_freedom=nu, l2_clip_norm=2.0, batch_size=batch, mean_noise_std=0.3)
    covariance = dp_sgd.covariance_phase_1(gradient, **model)
    directions = batch / 4 * (covariance - 0.09 * np.eye(d))
    # A variance of n draws is seen to sqrt(2/n) = 0.7 %, across the gradient far better; the formula errs by 2/d.
    assert directions[0, 0] == pytest.approx(drawn[:, 0].var(), rel=0.06)
    assert directions[1, 1] == pytest.approx(drawn[:, 1:].var(axis=0).mean(), rel=0.02)
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() == 0
    assert np.linalg.eigvalsh(covariance).min() > 0.09
    shrunk = dp_sgd.drift_phase_1(gradient, example_noise_std=1.0, degrees_of_freedom=nu, l2_clip_norm=2.0)
    assert np.trace(directions) == pytest.approx(1 - shrunk @ shrunk / 4)


def test_phase_1_covariance_as_printed_is_none_for_a_large_gradient():
    """The theorem has the exact E[u u^T] and a mean that is right for G << sigma sqrt d only."""
    model = dict(example_noise_std=1.0, degrees_of_freedom=math.inf, l2_clip_norm=1.0, batch_size=1, mean_noise_std=0.0)
    small, large = np.zeros(100), np.zeros(100)
    small[0], large[0] = 0.1, 20.0
    printed = dp_sgd.covariance_phase_1_as_printed(small, **model)
    np.testing.assert_allclose(printed, dp_sgd.covariance_phase_1(small, **model), rtol=1e-4)
    eigenvalues = np.linalg.eigvalsh(dp_sgd.covariance_phase_1_as_printed(large, **model))
    assert eigenvalues[0] == pytest.approx(400 / 500 - 400 / 100, abs=1e-3)  # E[u u^T], less the printed mean's square
    assert eigenvalues[1:] == pytest.approx(np.full(99, 1 / 500), rel=0.01)


def test_phase_2_is_the_unified_form_with_no_example_clipped():
    gradient, b, z, c = np.linspace(-1, 1, 50), 16, 1e-6, 1e4
    moments = unified(gradient, b, c * z / b, l2_clip_norm=c, example_noise_std=0.02, degrees_of_freedom=math.inf)
    s = phase_2_noise_std(example_noise_std=0.02, batch_size=b, mean_noise_std=c * z / b)
    assert moments.noise_std == pytest.approx(s)
    assert DP_SGD.drift(moments, None) == pytest.approx(dp_sgd.drift_phase_2(gradient))
    sign = dp_sign_sgd.drift_phase_2(gradient, gradient_noise_std=s)
    assert DP_SIGN_SGD.drift(moments, None) == pytest.approx(sign)
    variance = (DP_SIGN_SGD.noise_gain(moments, None) * moments.noise_std) ** 2
    assert variance == pytest.approx(dp_sign_sgd.sign_noise_variance(sign))


@pytest.mark.parametrize("batch_size, z, printed_error", [(1, 0.03, 0.45), (16, 0.1, 0.61), (64, 0.1, 1.72)])
def test_phase_1_sign_drift_needs_the_batch_noise(batch_size, z, printed_error):
    """One step of real normalised gradients, d = 1000: the corrected form holds, the printed one does not."""
    rng, d, n, sigma = np.random.default_rng(0), 1000, 1500, 0.1
    gradient = np.full(d, 0.02)
    total = 0
    for _ in range(batch_size):
        x = gradient + sigma * rng.standard_normal((n, d), dtype=np.float32)
        total = total + x / np.linalg.norm(x, axis=1, keepdims=True)
    exact = dp_sign_sgd.drift_given_batch_gradients(total / batch_size, mean_noise_std=z / batch_size)
    model = dict(example_noise_std=sigma, degrees_of_freedom=math.inf, batch_size=batch_size, noise_multiplier=z)
    corrected, printed = (
        f(gradient * 0.05).mean()
        for f in (
            lambda g: dp_sign_sgd.drift_phase_1_linear(g, **model),
            lambda g: dp_sign_sgd.drift_phase_1_linear_as_printed(g, **model),
        )
    )
    assert printed / corrected - 1 == pytest.approx(printed_error, abs=0.01)
    # (G/(sigma sqrt d))^2/2 = 2 % of model error, and 5 standard errors of a mean of n d draws
    truth, se = exact.mean(), 1 / math.sqrt(n * d)
    ours = dp_sign_sgd.drift_phase_1(gradient, **model).mean()
    assert abs(ours - truth) < 5 * se + 0.025 * abs(truth)


def test_mixed_phase_as_printed_exceeds_what_clipping_allows():
    gradient, c = np.full(100, 0.001), 1.0
    model = dict(example_noise_std=0.05, degrees_of_freedom=1.0, l2_clip_norm=c)
    e = clipping_expectations(0.01, num_params=100, **model)
    printed = -dp_sgd.drift_mixed_as_printed(gradient, clip_fraction=float(e.clip_fraction), **model) / gradient
    assert printed[0] > 1 > e.shrink_factor
    ends = [
        dp_sgd.covariance_mixed_as_printed(gradient, clip_fraction=p, batch_size=4, mean_noise_std=0.1, **model)
        for p in (0.0, 1.0)
    ]
    assert ends[0][0, 0] == pytest.approx(
        phase_2_noise_std(example_noise_std=0.05, batch_size=4, mean_noise_std=0.1) ** 2
    )
    assert ends[1][0, 0] == pytest.approx(
        phase_1_noise_std(num_params=100, l2_clip_norm=c, batch_size=4, mean_noise_std=0.1) ** 2, rel=1e-4
    )


def test_mixed_sign_slope_as_printed_is_wrong_by_20():
    """sigma = 1, B = 16, C = 60, z = 0.003: no example is clipped."""
    g, model = np.array([1e-4]), dict(example_noise_std=1.0, degrees_of_freedom=math.inf, batch_size=16)
    printed = dp_sign_sgd.drift_mixed_linear_as_printed(
        g, clip_fraction=0.0, l2_clip_norm=60.0, noise_multiplier=0.003, **model
    )
    s = phase_2_noise_std(example_noise_std=1.0, batch_size=16, mean_noise_std=60 * 0.003 / 16)
    assert printed / dp_sign_sgd.drift_phase_2(g, gradient_noise_std=s) == pytest.approx([22.2], abs=0.3)


# --- Rates, floors and bounds ---


@by_name
def test_floor_is_penalty_times_effective_learning_rate(theory):
    eta, d, s, h, lam = 0.03, 7, 0.4, 0.6, 2.0
    module = {"DP-SGD": dp_sgd, "DP-SignSGD": dp_sign_sgd, "DP-Adam": dp_adam}[theory.name]
    noise = {} if theory is DP_SGD else dict(gradient_noise_std=s)
    effective = theory.effective_learning_rate(eta, s)
    floor = module.floor_bound(
        learning_rate=eta, num_params=d, smoothness=lam, pl_constant=lam, gradient_noise_std=s, shrink_factor=h
    )
    assert floor == pytest.approx(theory.noise_penalty * effective * d * s**2 / (4 * h))
    rate = module.decay_rate(pl_constant=lam, shrink_factor=h, **noise)
    assert rate * eta == pytest.approx(2 * h * lam * effective)
    assert loss_bound(0.0, initial_loss=9.0, decay_rate=rate, floor=floor) == 9.0
    assert loss_bound(1e9, initial_loss=9.0, decay_rate=rate, floor=floor) == pytest.approx(floor)


@by_name
def test_effective_learning_rate_is_the_slope_of_the_drift(theory):
    moments = GradientMoments(mean=np.full(3, 1e-5), noise_std=0.7)
    state = theory.initial_state(moments)
    assert -theory.drift(moments, state) / 1e-5 == pytest.approx(theory.effective_learning_rate(1.0, 0.7), rel=1e-6)
    noise = theory.noise_gain(moments, state) * 0.7  # per unit sqrt(learning_rate)
    penalty = (noise / (theory.effective_learning_rate(1.0, 0.7) * 0.7)) ** 2
    assert penalty == pytest.approx(theory.noise_penalty, rel=1e-6)


def test_printed_bounds_differ_from_the_corrected_by_the_constants_they_drop():
    d, c, b, z, k = 400, 0.5, 8, 40.0, 0.9213177319  # z large: the batch noise that Phase 1 of Sign drops is small
    common = dict(pl_constant=0.3, num_params=d, example_noise_std=0.2)
    nu, floor = dict(degrees_of_freedom=3), dict(learning_rate=0.1, smoothness=2.0, **common)
    sgd = dict(l2_clip_norm=c)
    assert dp_sgd.decay_rate_phase_1(**common, **sgd, **nu) == pytest.approx(
        2 * k * dp_sgd.decay_rate_phase_1_as_printed(**common, **sgd)
    )
    noise = dict(batch_size=b, noise_multiplier=z)
    assert dp_sgd.floor_phase_1(**floor, **sgd, **noise, **nu) == pytest.approx(
        dp_sgd.floor_phase_1_as_printed(**floor, **sgd, **noise) / (4 * k)
    )
    assert dp_sgd.floor_phase_1(**floor, **sgd, **noise, **nu) == pytest.approx(
        dp_sgd.floor_bound(
            learning_rate=0.1,
            smoothness=2.0,
            pl_constant=0.3,
            num_params=d,
            shrink_factor=c * k / (0.2 * 20),
            gradient_noise_std=phase_1_noise_std(num_params=d, l2_clip_norm=c, batch_size=b, mean_noise_std=c * z / b),
        )
    )
    root = math.sqrt(2 / math.pi)
    assert dp_sign_sgd.decay_rate_phase_1(**common, **noise, **nu) == pytest.approx(
        2 * root * k * dp_sign_sgd.decay_rate_phase_1_as_printed(**common, **noise), rel=1e-4
    )
    assert dp_sign_sgd.floor_phase_1(**floor, **noise, **nu) == pytest.approx(
        dp_sign_sgd.floor_phase_1_as_printed(**floor, **noise) / (4 * root * k), rel=1e-4
    )
    second = dict(learning_rate=0.1, smoothness=2.0, pl_constant=0.3, num_params=d, gradient_noise_std=0.7)
    assert dp_sgd.floor_phase_2_as_printed(**second) == pytest.approx(4 * dp_sgd.floor_phase_2(**second))
    assert dp_sign_sgd.floor_phase_2_as_printed(**second) == pytest.approx(
        4 * root * dp_sign_sgd.floor_phase_2(**second)
    )
    assert dp_sgd.decay_rate_phase_2_as_printed(pl_constant=1.0) == dp_sgd.decay_rate_phase_2(pl_constant=1.0) / 2
    assert dp_sign_sgd.decay_rate_phase_2_as_printed(pl_constant=1.0, gradient_noise_std=0.7) == pytest.approx(
        dp_sign_sgd.decay_rate_phase_2(pl_constant=1.0, gradient_noise_std=0.7) / (2 * root)
    )


def test_gradient_norm_bounds_bound_the_linear_quadratic():
    """f = lambda ||x||^2/2, no clipping: the mean of E||grad f||^2 along the linear SDE stays below the bounds."""
    lam, d, eta, steps, x2, s, b = 0.5, 20, 0.01, 4000, 3.0, 0.3, 4
    sigma = s * math.sqrt(b)
    f0, path = lam * x2 / 2, dict(learning_rate=eta, num_steps=steps, curvature_trace=d * lam)
    t = (np.arange(steps) + 0.5) * eta

    def mean_squared_gradient(rate, floor):
        return np.mean(2 * lam * loss_bound(t, initial_loss=f0, decay_rate=rate, floor=floor))

    same = dict(smoothness=lam, pl_constant=lam, num_params=d, learning_rate=eta, gradient_noise_std=s)
    k1, k2 = dp_sgd.gradient_norm_constants(
        num_params=d,
        example_noise_std=sigma,
        degrees_of_freedom=math.inf,
        l2_clip_norm=sigma * math.sqrt(d),
        batch_size=b,
    )
    # At C = sigma sqrt d the two branches of each are equal, those of no clipping among them.
    assert (k1, k2) == pytest.approx((1.0, sigma**2 / b))
    sgd = mean_squared_gradient(dp_sgd.decay_rate(pl_constant=lam), dp_sgd.floor_bound(**same))
    bounds = [
        f(initial_loss=f0, k1=k1, k2=k2, mean_noise_std=0.0, **path)
        for f in (dp_sgd.gradient_norm_bound, dp_sgd.gradient_norm_bound_as_printed)
    ]
    assert sgd < bounds[0] < bounds[1]
    assert bounds[0] < 1.2 * sgd  # by Ito it is tight up to f(T)
    sign = mean_squared_gradient(
        dp_sign_sgd.decay_rate(pl_constant=lam, gradient_noise_std=s), dp_sign_sgd.floor_bound(**same)
    )
    model = dict(num_params=d, example_noise_std=sigma, degrees_of_freedom=math.inf, l2_clip_norm=1.0, batch_size=b)
    bounds = [
        f(initial_loss=f0, noise_multiplier=0.0, **path, **model)
        for f in (dp_sign_sgd.gradient_norm_bound, dp_sign_sgd.gradient_norm_bound_as_printed)
    ]
    assert sign < bounds[0] < bounds[1]


# --- DP-SignSGD and DP-Adam at their edges ---


def test_sign_without_noise_is_the_sign():
    moments = GradientMoments(mean=np.array([-2.0, 0.0, 1e-9]), noise_std=0.0)
    assert DP_SIGN_SGD.drift(moments, None).tolist() == [1.0, 0.0, -1.0]
    assert DP_SIGN_SGD.noise_gain(moments, None).tolist() == [0.0, 0.0, 0.0]


def test_sign_mixture_is_the_weighted_sum():
    moments = GradientMoments(np.array([0.3, -1.0]), np.array([0.5, 2.0]), np.array([0.5, 2.0]), np.array([0.2, 0.8]))
    snr = moments.mean / moments.noise_std / math.sqrt(2)
    assert DP_SIGN_SGD.drift(moments, None) == pytest.approx(-0.2 * special.erf(snr / 2) - 0.8 * special.erf(2 * snr))


@pytest.mark.parametrize("b2", [0.0, 0.5, 0.99])
def test_adam_second_moment_is_the_bias_corrected_average(b2):
    adam, rng = dp_adam_theory(0.9, b2, 1e-8), np.random.default_rng(0)
    means = rng.standard_normal((30, 2))
    state, raw = adam.initial_state(GradientMoments(means[0], 0.5)), np.zeros(2)
    for k, mean in enumerate(means):
        state = adam.advance_state(state, GradientMoments(mean, 0.5), k, 1)
        raw = b2 * raw + (1 - b2) * (0.25 + mean**2)
        assert state == pytest.approx(raw / (1 - b2 ** (k + 1)))


def test_adam_second_moment_advances_in_one_leap_or_many():
    adam, moments = dp_adam_theory(0.9, 0.99, 1e-8), GradientMoments(np.array([0.1, 3.0]), 0.5)
    start = np.array([4.0, 0.1])
    leap, state = adam.advance_state(start, moments, 10, 7.5), start
    for k in range(15):
        state = adam.advance_state(state, moments, 10 + k / 2, 0.5)
    assert state == pytest.approx(leap)
    late = (adam.advance_state(start, moments, 10**6, 1e-3) - start) / 1e-3
    assert late == pytest.approx(dp_adam.second_moment_drift(start, moments, learning_rate=1.0, b2=0.99), rel=6e-3)


@pytest.mark.parametrize("b2", [0.0, 0.99, 1.0])
@pytest.mark.parametrize("step", [0, 3])
def test_adam_second_moment_stays_for_no_steps(b2, step):
    start, moments = np.array([4.0, 0.1]), GradientMoments(np.array([0.1, 3.0]), 0.5)
    assert dp_adam.advance_second_moment(start, moments, step, 0, b2=b2).tolist() == start.tolist()


@pytest.mark.parametrize("b1, b2", [(0.0, 0.9), (0.9, 0.95), (0.9, 0.5)])
def test_small_signal_response_by_simulation(b1, b2):
    """kappa by equal noise under both signs of a signal; omega, over kappa, by sums of 400 directions without one."""
    rng, n, steps, burn_in, mu = np.random.default_rng(0), 8_000, 460, 60, 0.1
    m, v, total, walked = np.zeros((3, n)), np.zeros((3, n)), 0.0, 0.0
    shift = np.array([[mu], [-mu], [0.0]])
    for k in range(steps):
        g = shift + rng.standard_normal(n)  # the same noise for both signs of the signal, and for none
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        if k >= burn_in:
            u = m / np.sqrt(v)
            total, walked = total + (u[0] - u[1]) / (2 * mu), walked + u[2]
    kappa, noise_over_kappa = SMALL_SIGNAL_RESPONSE[b1, b2]
    samples = total / (steps - burn_in)
    bound = 5 * samples.std() / math.sqrt(n) + 0.005 + mu**2 / 2  # sampling, three printed digits, curvature in mu
    assert bound < 0.03
    assert abs(samples.mean() - kappa) < bound
    # A variance of n sums is seen to sqrt(2/n); their ends, b1/(1 - b1) steps long, count for 2 % at most.
    found = walked.var() / (steps - burn_in) / kappa
    assert found == pytest.approx(noise_over_kappa, rel=4 * math.sqrt(2 / n) + 0.02)


@pytest.mark.parametrize(
    "kwargs, match",
    [
        (dict(b1=1.0, b2=0.9, eps=0.0), "Expected 0 <= b1 < 1, got 1.0"),
        (dict(b1=0.9, b2=-0.1, eps=0.0), "Expected 0 <= b2 < 1, got -0.1"),
        (dict(b1=0.9, b2=0.9, eps=-1.0), "Expected eps >= 0, got -1.0"),
    ],
)
def test_adam_refuses(kwargs, match):
    with pytest.raises(ValueError, match=match):
        dp_adam_theory(**kwargs)


# --- NumPy, JAX, and neither at import ---


@by_name
def test_numpy_and_jit_agree(theory):
    jax = pytest.importorskip("jax")
    mean = np.linspace(-2, 2, 9)
    factors, weights = np.array([0.5, 1.0, 1.7]), np.array([0.2, 0.5, 0.3])

    def run(mean, noise_std, factors, weights, step):
        moments = GradientMoments(mean, noise_std, factors, weights)
        state = theory.initial_state(moments)
        state = theory.advance_state(state, moments, step, 2.5)
        return theory.drift(moments, state), theory.noise_gain(moments, state)

    for noise_std in (0.8, 0.0):
        expected = run(mean, noise_std, factors, weights, 3.0)
        got = jax.jit(run)(mean, noise_std, factors, weights, 3.0)
        for ours, theirs in zip(expected, got, strict=True):
            assert isinstance(theirs, jax.Array)
            assert np.asarray(theirs) == pytest.approx(ours, rel=2e-5, abs=2e-6)  # float32


def test_imports_neither_jax_nor_numba():
    code = "import sys, noisecast.theory; print({'jax', 'numba', 'matplotlib'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
