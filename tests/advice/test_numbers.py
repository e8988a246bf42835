"""Advice from numbers alone: the paper's three tasks, bounds that hold, and what it must not claim to know."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noisecast.advice.floors import Kept, Numbers, Tuned, shrink_ratio, threshold_formulas
from noisecast.advice.numbers import advise_from_numbers
from noisecast.advice.transfer import Branch, Curvature
from noisecast.privacy.accounting import epsilon_spent
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import Poisson
from noisecast.theory.dp_adam import dp_adam_theory
from noisecast.theory.dp_sgd import DP_SGD
from noisecast.theory.dp_sign_sgd import DP_SIGN_SGD

DP_ADAM = dp_adam_theory(0.9, 0.999, 1e-8)


def numbers_of(
    d, n, batch, steps, delta, sgd, sign, *, adam=None, tuned_at=1.0, counted=None, clipped=None, **known
) -> Numbers:
    tuned = [(DP_SGD, sgd), (DP_SIGN_SGD, sign)] + ([(DP_ADAM, adam)] if adam else [])
    return Numbers(
        num_params=d,
        sampler=Poisson.for_batch_size(batch, n),
        num_steps=steps,
        target_delta=delta,
        optimizers=tuple(
            Tuned(theory=t, learning_rate=rate, l2_clip_norm=clip, clipped_share=clipped) for t, (rate, clip) in tuned
        ),
        tuned_noise_multiplier=tuned_at,
        nominal_num_examples=counted,
        **known,
    )


# (learning rate, clip norm) of the paper's Table hyperparam, batch size 64; epochs and delta of its paragraph
# "Hyper-parameters"; the noise multipliers at which they were tuned of its paragraph "Protocol A". IMDB has 25,000
# training examples and MovieLens trains on 80,000, but the paper's nominal epsilons are those of 10,000 and 100,000.
# Windows: "we show only a smaller window of epsilon values satisfying ...", appendix on Figs. eps_star and
# eps_star_sotag.
IMDB = numbers_of(10_001, 25_000, 64, 39_000, 1e-5, (5, 0.5), (0.1, 0.5), counted=10_000)
FORUM = numbers_of(5_000_500, 246_092, 64, 192_250, 1e-6, (3, 0.25), (0.01, 0.5))
MOVIELENS = numbers_of(
    262_500, 80_000, 64, 62_500, 1e-6, (0.1, 2), (0.001, 3), adam=(0.001, 1), tuned_at=0.5, counted=100_000
)


@pytest.mark.parametrize(
    "task, window, corrected",
    [(IMDB, (0.75, 1.25), 0.85), (FORUM, (0.15, 0.75), 0.20), (MOVIELENS, (0.75, 1.5), 1.11)],
    ids=["IMDB", "StackOverflow", "MovieLens"],
)
def test_the_papers_thresholds_lie_in_its_windows(task, window, corrected):
    """`corrected`: the general formula at these settings, computed independently."""
    advice = advise_from_numbers(replace(task, optimizers=task.optimizers[:2]), [])
    (found,) = advice.thresholds
    assert (found.optimizer, found.verdict) == ("DP-SignSGD", "above")
    (threshold,) = found.thresholds
    point, low, high = threshold.nominal_epsilon
    assert window[0] < point < window[1]
    assert point == pytest.approx(corrected, abs=0.007)
    assert low <= point <= high


def test_accounted_and_nominal_epsilon_are_of_one_noise():
    """At the paper's IMDB threshold, z = 3.21, the accountant says 0.577 for the 25,000 examples that there are."""
    (found,) = advise_from_numbers(IMDB, []).thresholds
    (threshold,) = found.thresholds
    z = threshold.noise_multiplier[0]
    assert z == pytest.approx(math.sqrt(math.pi / 2) * 0.1 * 0.5 / 5 * 64 / 0.5**2, rel=1e-12)
    spent = epsilon_spent(IMDB.mechanism(z), num_steps=39_000, target_delta=1e-5)
    assert threshold.epsilon[0] == spent.epsilon == pytest.approx(0.577, abs=0.002)
    assert threshold.nominal_epsilon[0] == pytest.approx(64 / 1e4 * math.sqrt(15_600 * math.log(1e5)) / z, rel=1e-12)


def test_the_papers_guidance_comes_out_as_corrected():
    """Paper, "Practitioner guidance": kept, adaptive at high privacy; re-tuned, alike, and DP-SGD's rate moves."""
    advice = advise_from_numbers(replace(IMDB, optimizers=IMDB.optimizers), [0.2, 4.0])
    strict, loose = advice.epsilons
    assert (strict.keep, loose.keep) == ("DP-SignSGD", "DP-SGD")
    sgd, sign = strict.optimizers
    assert sgd.branch == sign.branch == Branch.PRIVACY_NOISE
    # z from 1 to 8.29: DP-SGD's rate falls with it, DP-SignSGD's stays.
    assert sgd.retuned and sign.retuned
    assert sgd.retuned.learning_rate == pytest.approx(5 / strict.noise_multiplier, rel=0.005)
    assert sign.retuned.learning_rate == pytest.approx(0.1)
    assert "DP-SGD must follow the noise" in strict.sentences[1] and "1 : 1.25" in strict.sentences[1]
    # The floors' ratio is known exactly: equal clip norms, and batch noise is next to nothing.
    low, high = sgd.relative_floor
    assert low == pytest.approx(strict.noise_multiplier / 3.2084, rel=1e-3) and high == pytest.approx(low, rel=1e-3)
    assert strict.price.one_run < strict.price.best_of < strict.price.all_counted
    assert strict.price.one_run <= 0.2 and "epsilon" in strict.sentences[2]
    unknown = " ".join(advice.unknown)
    assert "not measured" in unknown and "absolute losses" in unknown


def test_different_clip_norms_leave_an_interval_and_no_answer_inside_it():
    """StackOverflow's settings: between z* without clipping and z* with everything clipped there is no winner."""
    (found,) = advise_from_numbers(FORUM, []).thresholds
    (threshold,) = found.thresholds
    _, low, high = threshold.noise_multiplier
    r = math.sqrt(math.pi / 2) * 0.01 / 3
    assert high == pytest.approx(r * 0.5 * 64 / 0.25**2, rel=1e-3)
    assert low == pytest.approx(r * 64 / 0.25, rel=1e-3)
    for z, keep in ((0.9 * low / 1.1, "DP-SGD"), (math.sqrt(low * high), None), (1.1 * 1.1 * high, "DP-SignSGD")):
        # The noise multiplier as it is, in place of a calibration that takes seconds.
        known = _at_noise(FORUM, z)
        (at,) = advise_from_numbers(known, [1.0]).epsilons
        assert at.keep == keep
    assert at.contenders == ("DP-SignSGD",)


class _Calibrated(Numbers):
    """Numbers whose epsilons all mean one noise multiplier."""

    def noise_multiplier(self, target_epsilon: float) -> float:
        return _Calibrated.z

    z = 1.0


def _at_noise(numbers: Numbers, z: float) -> Numbers:
    _Calibrated.z = z
    return _Calibrated(**{name: getattr(numbers, name) for name in Numbers.__dataclass_fields__})


def test_shares_of_clipped_records_narrow_the_interval():
    def with_share(share):
        return replace(FORUM, optimizers=tuple(replace(each, clipped_share=share) for each in FORUM.optimizers))

    def span(numbers):
        sgd, sign = numbers.optimizers
        found = [formula.noise_multipliers[0] for formula in threshold_formulas(numbers, sgd, sign)]
        return min(found), max(found)

    nobody, few, everybody = (span(with_share(share)) for share in (0.0, 0.1, 1.0))
    wide = span(FORUM)
    assert nobody[0] == pytest.approx(nobody[1], rel=1e-3) == pytest.approx(wide[1], rel=1e-3)
    assert everybody[0] == pytest.approx(everybody[1], rel=1e-3) == pytest.approx(wide[0], rel=1e-3)
    assert wide[0] < few[0] < few[1] <= wide[1] * (1 + 1e-9)


norms = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(norms=norms, small=st.floats(0.05, 20.0), widening=st.floats(1.0, 20.0))
def test_the_bounds_on_clipping_hold_for_any_norms(norms, small, widening):
    norms, large = np.array(norms), small * widening

    def shrink(clip):
        return np.mean(np.minimum(1, clip / norms))

    shares = [float(np.mean(norms > clip)) for clip in (small, large)]
    for known in (shares, [None, None], [shares[0], None], [None, shares[1]]):
        one, other = (
            Tuned(theory=DP_SGD, learning_rate=1.0, l2_clip_norm=clip, clipped_share=share)
            for clip, share in zip((small, large), known, strict=True)
        )
        for a, b, clips in ((one, other, (small, large)), (other, one, (large, small))):
            low, high = shrink_ratio(a, b)
            assert low * (1 - 1e-9) <= shrink(clips[0]) / shrink(clips[1]) <= high * (1 + 1e-9)


def test_two_thresholds_are_found_and_said():
    """Batch noise above r^2 and a larger clip norm for DP-SignSGD: DP-SGD wins only between two epsilons."""
    known = numbers_of(
        1, 25_000, 4, 1_000, 1e-5, (1, 4), (0.75, 8), example_noise_std=2.0, clipped=0.0
    )  # s = 1 >= r^2 = 0.884; the paper's theorem knows no second threshold
    (found,) = advise_from_numbers(known, []).thresholds
    assert found.verdict == "outside" and len(found.thresholds) == 2
    assert "between them DP-SGD has it" in found.sentence
    zs = [threshold.noise_multiplier[0] for threshold in found.thresholds]
    sgd, sign = known.optimizers
    for z, sign_wins in ((0.8 * zs[0], True), (math.sqrt(zs[0] * zs[1]), False), (1.2 * zs[1], True)):
        floors = [Kept(known, tuned, z, 1.0).floor() for tuned in (sgd, sign)]
        assert (floors[1] < floors[0]) == sign_wins
    # Without the measurement their number is not known, and that is what it says.
    (unmeasured,) = advise_from_numbers(replace(known, example_noise_std=None), []).thresholds
    assert unmeasured.verdict is None and "do not tell how many" in unmeasured.sentence


def test_batch_noise_that_is_always_the_larger_makes_the_adaptive_one_always_better():
    known = numbers_of(1, 25_000, 4, 1_000, 1e-5, (1, 8), (0.5, 8), example_noise_std=4.0)
    (found,) = advise_from_numbers(known, []).thresholds
    assert found.verdict == "always" and not found.thresholds


def test_regimes_by_measured_noise():
    known = _at_noise(numbers_of(100, 10_000, 100, 1_000, 1e-5, (1, 1), (0.1, 1), example_noise_std=0.1), 0.5)
    (at,) = advise_from_numbers(known, [1.0]).epsilons
    # C z/B = 0.005 against sigma/sqrt(B) sqrt(1 - q) = 0.00995.
    assert at.optimizers[0].branch == Branch.BATCH_NOISE
    assert (
        at.optimizers[0].noise_ratio[0] == at.optimizers[0].noise_ratio[1] == pytest.approx(0.005 / 0.00995, rel=1e-3)
    )
    unmeasured = _at_noise(replace(known, example_noise_std=None), 0.5)
    (at,) = advise_from_numbers(unmeasured, [1.0]).epsilons
    assert at.optimizers[0].branch == Branch.UNKNOWN


def test_curvature_gives_losses():
    """f_0 e^(-2 lambda e T) + e d s^2/4 (1 - e^(-2 lambda e T)) of DP-SGD, lambda = Tr H/d, by hand."""
    known = replace(IMDB, curvature=Curvature(0.69, 0.3), example_noise_std=0.0)
    (at,) = advise_from_numbers(_at_noise(known, 8.0), [1.0]).epsilons
    left = math.exp(-2 * 0.3 / 10_001 * 5 * 39_000)
    floor = 5 * 10_001 * (0.5 * 8 / 64) ** 2 / 4
    assert at.optimizers[0].excess_loss == pytest.approx(0.69 * left + floor * (1 - left))
    assert "absolute losses" not in " ".join(advise_from_numbers(known, []).unknown)


def test_what_was_released_before_is_counted():
    probe = SampledGaussian(noise_multiplier=8.0, l2_clip_norm=1.0, sampler=Poisson(1.0, 1))
    known = numbers_of(100, 6_400, 64, 200, 1e-5, (1, 1), (0.1, 1))
    with_probe = replace(known, before=probe)
    assert with_probe.noise_multiplier(1.0) > known.noise_multiplier(1.0)
    assert with_probe.epsilon(3.0) > known.epsilon(3.0)
    assert with_probe.tuned_at(1.0).tuned_noise_multiplier == known.noise_multiplier(1.0)


def test_without_the_noise_they_were_tuned_at_no_rate_is_given():
    known = replace(IMDB, tuned_noise_multiplier=None)
    advice = advise_from_numbers(_at_noise(known, 4.0), [1.0])
    assert all(each.retuned is None for each in advice.epsilons[0].optimizers)
    assert "no learning rate can be given" in advice.epsilons[0].sentences[1]


@pytest.mark.parametrize(
    "change",
    [{"num_params": 0}, {"target_delta": 1.0}, {"optimizers": ()}, {"optimizers": IMDB.optimizers[:1] * 2},
     {"tuned_noise_multiplier": -1.0}, {"example_noise_std": math.inf}],
)  # fmt: skip
def test_bad_numbers_are_refused(change):
    with pytest.raises(ValueError, match="Expected"):
        replace(IMDB, **change)
