"""Thresholds and learning rates: against the floors they compare, numerical minimisers, and the paper's figures."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import optimize

from noisecast.theory import (
    Thresholds,
    adaptive_learning_rate,
    adaptive_learning_rate_as_printed,
    dp_adam,
    dp_sgd,
    dp_sign_sgd,
    final_loss_effective_learning_rate,
    loss_bound,
    nominal_epsilon,
    nominal_noise_multiplier,
    optimal_gradient_norm_bound,
    phase_1_noise_std,
    phase_2_noise_std,
    sgd_learning_rate,
    sgd_learning_rate_as_printed,
    threshold_epsilon_as_printed,
    threshold_noise_multiplier_all_clipped,
    threshold_noise_multipliers,
)

SIGN = math.pi / 2
ADAM = 1.0
# The paper's hyperparameters, its table: (learning rate, clip norm) of DP-SGD and DP-SignSGD, n, epochs, delta.
IMDB = ((5, 0.5), (0.1, 0.5), 10_000, 100, 1e-5)
STACK_OVERFLOW = ((3, 0.25), (0.01, 0.5), 246_092, 50, 1e-6)
MOVIE_LENS = ((0.1, 2), (0.001, 3), 100_000, 50, 1e-6)


@pytest.mark.parametrize(
    "setting, batch_sizes, epsilons, window",
    [
        (IMDB, (48, 56, 64, 72, 80), (0.98, 0.90, 0.85, 0.80, 0.76), (0.75, 1.25)),
        (STACK_OVERFLOW, (48, 56, 64), (0.229, 0.212, 0.198), (0.15, 0.75)),
        (MOVIE_LENS, (56, 64, 72), (1.18, 1.105, 1.04), (0.75, 1.5)),
    ],
)
def test_thresholds_of_the_papers_figures(setting, batch_sizes, epsilons, window):
    """With example_noise_std = 0: the privacy noise dominates, and sigma^2/B of the data is not known."""
    (eta_g, c_g), (eta_a, c_a), n, epochs, delta = setting
    for b, expected in zip(batch_sizes, epsilons, strict=True):
        steps = n // b * epochs
        t = threshold_noise_multipliers(
            sgd_learning_rate=eta_g,
            sgd_l2_clip_norm=c_g,
            adaptive_learning_rate=eta_a,
            adaptive_l2_clip_norm=c_a,
            noise_penalty=SIGN,
            example_noise_std=0.0,
            expected_batch_size=b,
        )
        (epsilon,) = t.nominal_epsilons(sampling_probability=b / n, num_steps=steps, target_delta=delta)
        assert epsilon == pytest.approx(expected, abs=0.006)
        assert window[0] < epsilon < window[1]
        printed = threshold_epsilon_as_printed(
            example_noise_std=0.0,
            expected_batch_size=b,
            l2_clip_norm=c_g,
            num_steps=steps,
            target_delta=delta,
            num_examples=n,
        )
        assert not window[0] / 4 < printed < window[1] * 4  # far outside


@pytest.mark.parametrize("noise, sign, adam", [(0.125, 1.197, 1.539), (0.25, 1.253, 1.662), (0.9, 1.758, 4.55)])
def test_thresholds_of_a_simulated_quadratic(noise, sign, adam):
    """C = 30, n = 10^4, T = 2 * 10^4, delta = 1e-5, equal learning rates; sigma^2/B = noise."""
    for penalty, expected in ((SIGN, sign), (ADAM, adam)):
        t = threshold_noise_multipliers(
            sgd_learning_rate=0.01,
            sgd_l2_clip_norm=30,
            adaptive_learning_rate=0.01,
            adaptive_l2_clip_norm=30,
            noise_penalty=penalty,
            example_noise_std=math.sqrt(16 * noise),
            expected_batch_size=16,
        )
        (epsilon,) = t.nominal_epsilons(sampling_probability=16e-4, num_steps=20_000, target_delta=1e-5)
        assert epsilon == pytest.approx(expected, rel=2e-3)
    printed = threshold_epsilon_as_printed(
        example_noise_std=math.sqrt(16 * noise),
        expected_batch_size=16,
        l2_clip_norm=30,
        num_steps=20_000,
        target_delta=1e-5,
        num_examples=10_000,
    )
    assert printed == pytest.approx(epsilon)  # the printed formula is DP-Adam's


positive = st.floats(0.05, 20)


@given(positive, positive, positive, positive, st.floats(0, 20), st.floats(1, 100), st.sampled_from([SIGN, ADAM]))
def test_thresholds_are_where_the_floors_cross(eta_g, c_g, eta_a, c_a, sigma, b, penalty):
    t = threshold_noise_multipliers(
        sgd_learning_rate=eta_g,
        sgd_l2_clip_norm=c_g,
        adaptive_learning_rate=eta_a,
        adaptive_l2_clip_norm=c_a,
        noise_penalty=penalty,
        example_noise_std=sigma,
        expected_batch_size=b,
    )
    assert len(t.noise_multipliers) == {"always": 0, "above": 1, "outside": 2}[t.verdict]
    adaptive = dp_sign_sgd if penalty == SIGN else dp_adam

    def margin(z):
        floors = [
            module.floor_bound(
                learning_rate=eta,
                num_params=1,
                smoothness=1.0,
                pl_constant=1.0,
                gradient_noise_std=phase_2_noise_std(example_noise_std=sigma, batch_size=b, mean_noise_std=c * z / b),
            )
            for module, eta, c in ((dp_sgd, eta_g, c_g), (adaptive, eta_a, c_a))
        ]
        return floors[0] / floors[1] - 1 if floors[1] else math.nan

    for z in np.geomspace(1e-4, 1e5, 60):
        m = margin(z)
        assume(not math.isnan(m))
        if abs(m) > 1e-7:
            assert t.adaptive_wins(z) == (m > 0)


def test_two_thresholds_leave_sgd_a_window():
    t = threshold_noise_multipliers(
        sgd_learning_rate=1.0,
        sgd_l2_clip_norm=1.0,
        adaptive_learning_rate=1.0,
        adaptive_l2_clip_norm=4.0,
        noise_penalty=1.0,
        example_noise_std=1.1,
        expected_batch_size=1,
    )
    assert t.verdict == "outside"
    low, high = t.noise_multipliers
    assert [t.adaptive_wins(z) for z in (low * 0.9, math.sqrt(low * high), high * 1.1)] == [True, False, True]


def test_much_batch_noise_means_always_and_the_paper_says_so_too_early():
    same = dict(
        sgd_learning_rate=1.0,
        sgd_l2_clip_norm=1.0,
        adaptive_learning_rate=1.0,
        adaptive_l2_clip_norm=1.0,
        noise_penalty=SIGN,
        expected_batch_size=1.0,
    )
    assert threshold_noise_multipliers(example_noise_std=math.sqrt(1.6), **same) == Thresholds("always", ())
    assert threshold_noise_multipliers(example_noise_std=math.sqrt(1.25), **same).verdict == "above"
    assert (
        threshold_epsilon_as_printed(
            example_noise_std=math.sqrt(1.25),
            expected_batch_size=1,
            l2_clip_norm=1,
            num_steps=1,
            target_delta=0.1,
            num_examples=1,
        )
        == math.inf
    )


def test_threshold_with_every_example_clipped_is_where_those_floors_cross():
    d, b, c_g, c_a, eta_g, eta_a = 50, 8, 0.02, 0.1, 1.0, 0.01
    (z,) = threshold_noise_multiplier_all_clipped(
        sgd_learning_rate=eta_g,
        sgd_l2_clip_norm=c_g,
        adaptive_learning_rate=eta_a,
        noise_penalty=SIGN,
        num_params=d,
        expected_batch_size=b,
    ).noise_multipliers
    same = dict(num_params=d, smoothness=1.0, pl_constant=1.0)
    floors = [
        module.floor_bound(
            learning_rate=eta,
            shrink_factor=0.3 * c,
            gradient_noise_std=phase_1_noise_std(num_params=d, l2_clip_norm=c, batch_size=b, mean_noise_std=c * z / b),
            **same,
        )
        for module, eta, c in ((dp_sgd, eta_g, c_g), (dp_sign_sgd, eta_a, c_a))
    ]
    assert floors[0] == pytest.approx(floors[1])


@given(st.floats(1e-3, 1e3), st.floats(1e-6, 1), st.integers(1, 10**6), st.floats(1e-12, 0.5))
def test_nominal_epsilon_and_back(z, q, steps, delta):
    same = dict(sampling_probability=q, num_steps=steps, target_delta=delta)
    assert nominal_noise_multiplier(nominal_epsilon(z, **same), **same) == pytest.approx(z)


@pytest.mark.parametrize(
    "n, b, epochs, delta, z, epsilon",
    [
        (10_000, 64, 100, 1e-5, 1.0, 2.712),
        (246_092, 64, 50, 1e-6, 1.0, 0.424),
        (100_000, 64, 50, 1e-6, 0.5, 1.329),
    ],
)
def test_nominal_epsilon_of_the_paper(n, b, epochs, delta, z, epsilon):
    ours = nominal_epsilon(z, sampling_probability=b / n, num_steps=n // b * epochs, target_delta=delta)
    assert ours == pytest.approx(epsilon, abs=6e-4)


def minimiser(f, guess):
    return guess * math.exp(
        optimize.minimize_scalar(
            lambda log: f(guess * math.exp(log)), bounds=(-4, 4), method="bounded", options={"xatol": 1e-9}
        ).x
    )


def test_learning_rates_minimise_their_bounds():
    f0, trace, steps, c, z, b, d, sigma = 0.7, 30.0, 500, 2.0, 1.5, 16, 40, 0.1
    k1, k2 = dp_sgd.gradient_norm_constants(
        num_params=d, example_noise_std=sigma, degrees_of_freedom=3, l2_clip_norm=c, batch_size=b
    )
    shared = dict(initial_loss=f0, curvature_trace=trace, num_steps=steps)
    noise = c * z / b
    s = math.sqrt(k2 + noise**2)

    def sgd(eta):
        return dp_sgd.gradient_norm_bound(learning_rate=eta, k1=k1, k2=k2, mean_noise_std=noise, **shared)

    eta = sgd_learning_rate(gradient_noise_std=s, **shared)
    assert minimiser(sgd, eta * 1.3) == pytest.approx(eta, rel=1e-4)
    assert sgd(eta) == pytest.approx(
        optimal_gradient_norm_bound(gradient_noise_std=s, noise_penalty=1.0, shrink_factor=1 / k1, **shared)
    )

    model = dict(
        num_params=d, example_noise_std=sigma, degrees_of_freedom=3, l2_clip_norm=c, batch_size=b, noise_multiplier=z
    )

    def sign(eta):
        return dp_sign_sgd.gradient_norm_bound(learning_rate=eta, **shared, **model)

    eta = adaptive_learning_rate(**shared)
    assert minimiser(sign, eta * 1.3) == pytest.approx(eta, rel=1e-4)
    assert adaptive_learning_rate_as_printed(**shared) == pytest.approx(eta / math.sqrt(2))


def test_printed_sgd_learning_rate_is_linear_in_epsilon_until_the_batch_noise():
    shared = dict(
        initial_loss=1.0, curvature_trace=1.0, num_steps=100, example_noise_std=0.1, l2_clip_norm=1.0, num_examples=1000
    )
    rates = sgd_learning_rate_as_printed(nominal_epsilon=np.array([0.01, 0.02, 10.0]), **shared)
    assert rates == pytest.approx([0.1, 0.2, 1.0])


@given(st.floats(1e-3, 1e8), st.sampled_from([ADAM, SIGN]), st.floats(0.1, 1))
def test_final_loss_learning_rate_minimises_the_final_loss(signal, penalty, h):
    lam, steps, d, s = 2.0, 300, 5, 0.4
    f0 = signal * penalty * d * s**2 / (8 * h**2 * lam * steps)

    def final_loss(eta_e):
        return loss_bound(
            steps, initial_loss=f0, decay_rate=2 * h * lam * eta_e, floor=penalty * eta_e * d * s**2 / (4 * h)
        )

    best = final_loss_effective_learning_rate(
        initial_loss=f0,
        curvature=lam,
        num_steps=steps,
        num_params=d,
        gradient_noise_std=s,
        noise_penalty=penalty,
        shrink_factor=h,
    )
    assert final_loss(best) <= min(final_loss(best * 1.02), final_loss(best * 0.98))


def test_refuses_a_rate_out_of_range():
    with pytest.raises(ValueError, match=r"Expected sgd_learning_rate > 0, got 0\.0"):
        threshold_noise_multipliers(
            sgd_learning_rate=0.0,
            sgd_l2_clip_norm=1,
            adaptive_learning_rate=1,
            adaptive_l2_clip_norm=1,
            noise_penalty=1,
            example_noise_std=1,
            expected_batch_size=1,
        )


@pytest.mark.parametrize("change", [{"noise_penalty": 0.0}, {"expected_batch_size": 0.0}, {"sgd_l2_clip_norm": -1.0}])
def test_thresholds_refuse_values_out_of_range(change):
    rates = dict(sgd_learning_rate=1.0, sgd_l2_clip_norm=1.0, adaptive_learning_rate=1.0, noise_penalty=1.0)
    (name, value), rest = *change.items(), dict(expected_batch_size=4.0)
    with pytest.raises(ValueError, match=f"Expected {name} > 0, got {value}"):
        threshold_noise_multipliers(**rates | rest | dict(adaptive_l2_clip_norm=1.0, example_noise_std=1.0) | change)
    with pytest.raises(ValueError, match=f"Expected {name} > 0, got {value}"):
        threshold_noise_multiplier_all_clipped(**rates | rest | dict(num_params=3) | change)


def test_thresholds_refuse_negative_noise():
    with pytest.raises(ValueError, match=r"Expected example_noise_std >= 0, got -1\.0"):
        threshold_noise_multipliers(
            sgd_learning_rate=1.0, sgd_l2_clip_norm=1.0, adaptive_learning_rate=1.0, adaptive_l2_clip_norm=1.0,
            noise_penalty=1.0, example_noise_std=-1.0, expected_batch_size=1.0,
        )  # fmt: skip


def test_no_noise_is_an_infinite_nominal_epsilon():
    plan = dict(sampling_probability=0.1, num_steps=100, target_delta=1e-5)
    assert nominal_epsilon(0.0, **plan) == nominal_noise_multiplier(0.0, **plan) == math.inf
    assert nominal_epsilon(np.array([0.0, 1.0]), **plan).tolist() == [math.inf, nominal_epsilon(1.0, **plan)]


@pytest.mark.parametrize("change", [{"curvature": 0.0}, {"num_steps": 0}, {"curvature": 1e-13}])
def test_final_loss_learning_rate_has_a_limit_without_curvature_or_steps(change):
    law = dict(curvature=1.0, num_steps=1, initial_loss=3.0, num_params=5, gradient_noise_std=0.4, noise_penalty=SIGN)
    found = final_loss_effective_learning_rate(**law | change, shrink_factor=0.7)
    assert found == pytest.approx(2 * 0.7 * 3.0 / (SIGN * 5 * 0.4**2), rel=1e-6)


def test_final_loss_learning_rate_at_its_other_edges():
    law = dict(curvature=1.0, num_steps=10, initial_loss=3.0, num_params=5, noise_penalty=SIGN)
    assert final_loss_effective_learning_rate(**law, gradient_noise_std=0.0) == math.inf
    assert final_loss_effective_learning_rate(**law, gradient_noise_std=0.4, shrink_factor=0.0) == 0.0
    assert final_loss_effective_learning_rate(**law | {"initial_loss": 0.0}, gradient_noise_std=0.0) == 0.0
    for name in ("curvature", "num_steps", "initial_loss"):
        with pytest.raises(ValueError, match=f"Expected {name} >= 0, got -1"):
            final_loss_effective_learning_rate(**law | {name: -1}, gradient_noise_std=0.4)
