"""Forecasts at the edges of what can be asked: no traceback, no number that a row calls ok and is not."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.datasets import load_wine

from noisecast import (
    DPSGD,
    DPAdam,
    DPSignSGD,
    Poisson,
    SampledGaussian,
    Scenario,
    Stream,
    answer,
    linear_model,
    quadratic,
)
from noisecast.problems.datasets import Dataset, Ratings, label_sets
from noisecast.problems.linear import SOFTMAX
from noisecast.problems.matrix_factorization import matrix_factorization
from noisecast.runners import Training
from noisecast.runners.moments import Moments, logistic
from noisecast.runners.moments.examples import subsample_of
from noisecast.theory import collective_skew

CLOSURE = Moments(most_runs=0)  # alone: no runs take its place

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(120, 4)).astype(np.float32)


def model(num_classes: int, rows=ROWS, labels=None):
    labels = np.arange(len(rows)) % num_classes if labels is None else labels
    return linear_model(Dataset("toy", rows, labels, tuple("abc"[:num_classes])))


def asked(problem, optimizer, num_steps=40, *, noise_multiplier=1.0, l2_clip_norm=1.0, sampler=None) -> Scenario:
    sampler = sampler or Poisson.for_batch_size(16, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=noise_multiplier, l2_clip_norm=l2_clip_norm, sampler=sampler)
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps)


@pytest.mark.parametrize("kind", [DPSGD, DPAdam, DPSignSGD])
@pytest.mark.parametrize("learning_rate", [1e15, 1e20, 1e25, 1e80, 1e200])
@pytest.mark.parametrize("num_classes", [2, 3])
def test_runs_that_leave_every_bound_are_diverged_rows(num_classes, learning_rate, kind, monkeypatch):
    monkeypatch.setattr(logistic, "SMALLEST_SUBSAMPLE", 50)  # with more examples than are looked at first
    scenario = asked(model(num_classes), kind(learning_rate=learning_rate))
    table = answer([scenario], runners=[CLOSURE], record_at=[10, 40])
    assert not (table[(table["metric"] == "loss") & (table["step"] > 0)]["status"] == "ok").any()


@pytest.mark.parametrize("num_classes", [2, 3])
def test_a_row_too_long_for_single_precision_is_named(num_classes):
    rows = np.array(ROWS)
    rows[3, 1] = -1e30
    why = CLOSURE.why_unsupported(asked(model(num_classes, rows), DPSGD(learning_rate=0.5)))
    assert why is not None and "feature 2 of" in why and "is -1e+30 in one; scale it down" in why


def test_a_diverged_row_says_only_that():
    found = CLOSURE.forecast(asked(model(2), DPSGD(learning_rate=1e200)), [40])
    assert not np.isfinite(found.metrics["loss"][-1]) and found.reasons == ("The weights grow without bound.",)


@pytest.mark.parametrize("case", [{"degrees_of_freedom": 1.0}, {"l2_clip_norm": 1e18, "noise_multiplier": 1e-9}])
def test_quadratics_that_leave_every_bound_too(case):
    problem = quadratic(np.ones(3), 1.0, example_noise_std=0.1, **{k: v for k, v in case.items() if k[0] == "d"})
    settings = {k: v for k, v in case.items() if k[0] != "d"}
    scenario = asked(problem, DPSGD(learning_rate=1e80), 10, sampler=Stream(4), **settings)
    assert not np.isfinite(CLOSURE.forecast(scenario, [10]).metrics["loss"][-1])


def test_a_single_class_is_nothing_to_learn():
    assert CLOSURE.forecast(asked(model(1), DPSGD(learning_rate=0.5)), [40]).metrics["loss"][-1] == pytest.approx(
        0, abs=0.01
    )


@pytest.mark.parametrize("kind, learning_rate", [(DPSGD, 3.0), (DPAdam, 0.1), (DPSignSGD, 0.1)])
def test_columns_of_nothing_leave_the_bias_as_trained(kind, learning_rate):
    """All outputs are the bias: beside it examples have nothing of which a share could be taken."""
    scenario = asked(model(2, np.zeros_like(ROWS)), kind(learning_rate=learning_rate), 400)
    steps = [1, 2, 5, 10, 20, 40, 100, 200, 400]
    table = answer([scenario], runners=[Training()], record_at=steps, insecure_seeds=tuple(range(400_000, 400_100)))
    losses = table[(table["metric"] == "loss") & table["step"].isin(steps)].groupby("step")["value"]
    found = CLOSURE.forecast(scenario, steps).metrics["loss"]
    assert (np.abs(found - losses.mean().to_numpy()) < 0.003 + 4 * losses.sem().to_numpy()).all()


def test_an_empty_test_set_is_refused():
    data = Dataset("toy", ROWS, np.arange(120) % 2, ("a", "b"))
    with pytest.raises(ValueError, match="Expected one row or more, got none"):
        linear_model(data, data.rows([]))
    ratings = Ratings(np.array([0]), np.array([0]), np.array([3]), num_users=1, num_items=1)
    none = Ratings(np.array([], int), np.array([], int), np.array([], int), num_users=1, num_items=1)
    with pytest.raises(ValueError, match="to test on, got none"):
        matrix_factorization(ratings, none, dim=2, public_init_seed=0)


@pytest.mark.parametrize("size", [1, 30, 59, 60, 61, 119, 120, 500])
def test_as_many_examples_are_used_as_asked(size):
    chosen, others = subsample_of(model(2).train, size)
    assert len(chosen) == min(size, 120) and len(others) == min(size, 120 - len(chosen))
    assert not set(chosen) & set(others) and len(set(chosen)) == len(chosen)


@pytest.mark.parametrize("learning_rate", [1e-5, 1.0])
def test_accuracy_before_and_just_after_the_start_is_as_trained(learning_rate):
    """Logits of 0 say the first class; those of 1e-5 a class, too, and no coin."""
    labels = (ROWS[:, 0] + 0.5 > 0).astype(int)
    scenario = asked(
        model(2, labels=labels),
        DPSGD(learning_rate=learning_rate),
        3,
        noise_multiplier=1e-3,
        sampler=Poisson(1.0, 120),
    )
    table = answer([scenario], runners=[Training(), CLOSURE], insecure_seeds=range(5), record_at=[0, 3])
    found = table[table["metric"] == "accuracy"].groupby(["runner", "step"])["value"].mean()
    assert found["moments", 0] == pytest.approx(found["training", 0], abs=1e-6) and found["moments", 0] < 0.4
    assert found["moments", 3] == pytest.approx(found["training", 3], abs=0.02)


def test_the_first_of_equal_logits_is_said():
    """Softmax before the first step: the first class, for everybody; of label sets: none."""
    labels = np.arange(120) % 3 * (np.arange(120) % 2)
    sets = linear_model(Dataset("toy", ROWS, label_sets([[0, 2][: k % 3] for k in range(120)]), tuple("abc")))
    for problem, metric in ((model(3, labels=labels), "accuracy"), (sets, "micro_f1")):
        scenario = asked(problem, DPSGD(learning_rate=1e-4), 2, noise_multiplier=1e-3, sampler=Poisson(1.0, 120))
        table = answer([scenario], runners=[Training(), CLOSURE], insecure_seeds=range(5), record_at=[0, 2])
        found = table[table["metric"] == metric].groupby(["runner", "step"])["value"].mean()
        assert found["moments", 0] == pytest.approx(found["training", 0], abs=1e-6)
        assert found["moments", 2] == pytest.approx(found["training", 2], abs=0.03)


@pytest.mark.parametrize("kind", [DPSGD, DPAdam, DPSignSGD])
@pytest.mark.parametrize("learning_rate", [1e10, 1e20, 1e100])
def test_a_factorisation_that_explodes_is_answered_soon(kind, learning_rate):
    """The stages of a time step grow as the root of its stiffness: followed so, 1e20 would never return."""
    rng = np.random.default_rng(1)
    ratings = Ratings(rng.integers(0, 20, 400), rng.integers(0, 30, 400), rng.integers(1, 6, 400), 20, 30)
    problem = matrix_factorization(ratings, dim=16, public_init_seed=0)
    found = CLOSURE.forecast(asked(problem, kind(learning_rate=learning_rate)), [40])
    assert found.extrapolated.all() and any("leaves every bound" in reason for reason in found.reasons)


@pytest.mark.parametrize("b2, is_off", [(0.5, True), (0.9, False)])
def test_a_short_memory_of_dp_adam_is_said(b2, is_off):
    found = CLOSURE.forecast(asked(model(2), DPAdam(learning_rate=0.01, b1=0.0, b2=b2)), [20, 40])
    assert found.extrapolated.all() == is_off
    assert any("b2" in reason for reason in found.reasons) == is_off


def test_overshooting_is_seen_where_the_first_gradient_is_zero():
    """Balanced XOR: the mean gradient at the start is 0, and is no direction to look for curvature along."""
    rows = np.array([[1, 1], [-1, -1], [1, -1], [-1, 1]] * 30, np.float32)
    labels = np.array([0, 0, 1, 1] * 30)
    both = np.concatenate([labels, [2]])
    problem = model(3, np.vstack([rows, [[0, 0]]]).astype(np.float32), both)
    found = CLOSURE.forecast(asked(problem, DPSGD(learning_rate=40.0), 30, noise_multiplier=1e-3), [30])
    assert any("steps overshoot" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    "scale, offset, optimizer, bounces",
    [
        (40, 0, DPSignSGD(learning_rate=0.05), True),
        (40, 0, DPSignSGD(learning_rate=0.002), False),
        (1, 0, DPSignSGD(learning_rate=0.05), False),
        (40, 0, DPSGD(learning_rate=0.05), False),
        (1, 10, DPSignSGD(learning_rate=0.1), True),
        (1, 10, DPSignSGD(learning_rate=0.01), False),
    ],
)
def test_a_weight_that_signs_throw_back_and_forth_says_so(scale, offset, optimizer, bounces):
    """One column is 40 times as long as the others, or far from 0: its weight knows but multiples of the learning rate.

    On such columns losses were up to 5 % off, and 14 % with an offset at three times this rate.
    """
    rng = np.random.default_rng(68)
    features = 0.4 * rng.normal(size=(800, 30))
    scores = features @ rng.normal(size=30) + rng.logistic(size=800)
    features[:, 7] = scale * features[:, 7] + offset
    problem = model(2, features.astype(np.float32), (scores > 1).astype(np.int32))
    sampler = Poisson.for_batch_size(400, 800)
    found = CLOSURE.forecast(asked(problem, optimizer, 100, l2_clip_norm=4.0, sampler=sampler), [100])
    assert any("back and forth" in reason for reason in found.reasons) == bounces
    assert found.extrapolated[-1] == bounces


def test_a_small_loss_of_outputs_thrown_far_says_so():
    """Two rings, 300 features that fall off with the distance from points on them: few examples are hard.

    On such rings, drawn otherwise, a loss was 15 % off by Gaussian outputs (0.272 against 0.236, known to 1.7 %).
    """
    rng = np.random.default_rng(5)
    radius, angle = rng.choice([1.0, 2.0], 2400), rng.uniform(0, 2 * np.pi, 2400)
    places = radius[:, None] * np.c_[np.cos(angle), np.sin(angle)] + 0.25 * rng.normal(size=(2400, 2))
    distances = ((places[:, None] - places[None, :300]) ** 2).sum(axis=-1)
    features = np.exp(-distances / 0.5).astype(np.float32)
    rings = linear_model(Dataset("rings", features, (radius > 1.5).astype(np.int32), ("0", "1")))
    found = []
    for rate, noise_multiplier in ((1.378, 8.0), (4.134, 2.0), (5.5, 8.0)):
        sampler = Poisson.for_batch_size(64, 2400)
        settings = {"noise_multiplier": noise_multiplier, "l2_clip_norm": 0.4319, "sampler": sampler}
        found.append(CLOSURE.forecast(asked(rings, DPSGD(learning_rate=rate), 500, **settings), [500]))
    assert [bool(each.extrapolated[-1]) for each in found] == [False, False, True]
    assert [any("thrown far" in reason for reason in each.reasons) for each in found] == [False, False, True]


def spirals():
    """Two of them, one in the other, told apart by 60 random Fourier features."""
    rng = np.random.default_rng(21)
    turn, arm = rng.uniform(0.3, 1, 1500), rng.integers(0, 2, 1500)
    angle = 2.5 * np.pi * turn + np.pi * arm
    places = turn[:, None] * np.c_[np.cos(angle), np.sin(angle)] + rng.normal(0, 0.02, (1500, 2))
    waves = np.cos(places @ rng.normal(0, 6, (2, 60)) + rng.uniform(0, 2 * np.pi, 60))
    features = (np.sqrt(2 / 60) * waves).astype(np.float32)
    return linear_model(Dataset("spirals", features, arm.astype(np.int32), ("0", "1")))


def on_spirals(rate: float) -> Scenario:
    problem = spirals()
    settings = {"noise_multiplier": 8.0, "l2_clip_norm": 0.2682, "sampler": Poisson.for_batch_size(64, 1500)}
    return asked(problem, DPSGD(learning_rate=rate), 400, **settings)


def of_separable_labels(rate: float, noise_multiplier: float = 2.0) -> Scenario:
    """DP-Adam above its best rate: what is left of the loss is that of few examples close to the plane."""
    rng = np.random.default_rng(640_501)
    middles, cluster = rng.normal(size=(6, 40)), rng.integers(0, 6, 1200)
    rows = (middles[cluster] + 0.7 * rng.normal(size=(1200, 40))) / 40**0.5
    margin = rows @ rng.normal(size=40)
    margin -= np.median(margin)
    apart = np.abs(margin) > 0.15 * margin.std()
    problem = model(2, rows[apart].astype(np.float32), (margin[apart] > 0).astype(np.int32))
    sampler = Poisson.for_batch_size(64, problem.num_examples)
    settings = {"noise_multiplier": noise_multiplier, "l2_clip_norm": 0.002, "sampler": sampler}
    return asked(problem, DPAdam(learning_rate=rate), 600, **settings)


def test_what_is_given_late_in_a_time_step_is_not_what_is_half_way(monkeypatch):
    """A small loss by long time steps and by short ones, and with all that is given frozen half-way."""
    scenario = of_separable_labels(1.2)
    found, fine = (
        replace(CLOSURE, time_steps=steps).forecast(scenario, [600]).metrics["loss"][-1] for steps in (12, 96)
    )
    monkeypatch.setattr(logistic.FrozenSteps, "changed", lambda self, after, *_: after)
    frozen = CLOSURE.forecast(scenario, [600]).metrics["loss"][-1]
    print(f"\n{found / fine - 1:+.4f}, frozen {frozen / fine - 1:+.4f}")
    assert found == pytest.approx(fine, rel=0.02)
    assert frozen < 0.97 * fine


@pytest.mark.slow
@pytest.mark.parametrize("rate, noise_multiplier, error", [(1.2, 2.0, 0.03), (0.5, 2.0, 0.03), (1.2, 1.0, 0.05)])
def test_separable_labels_are_forecast(rate, noise_multiplier, error):
    scenario = of_separable_labels(rate, noise_multiplier)
    table = answer([scenario], runners=[Training()], insecure_seeds=range(1536), record_at=[600])
    losses = table[(table.metric == "loss") & (table.step == 600)].value
    off, fine = (
        replace(CLOSURE, time_steps=steps).forecast(scenario, [600]).metrics["loss"][-1] / losses.mean() - 1
        for steps in (12, 96)
    )
    known = losses.sem() / losses.mean()
    print(f"\n{losses.mean():.4f} {off:+.4f}, in finer time steps {fine:+.4f}, known to {known:.1%}")
    assert abs(off) < error + known and abs(fine) < error + known


@pytest.mark.slow
@pytest.mark.parametrize("rate, error", [(0.1, 0.05), (0.3, 0.17)])
def test_what_is_left_of_few_rows_that_are_nearly_told_apart_is_known_roughly_and_says_so(rate, error):
    """DP-SignSGD on 178 wines at its best rate and three times it: a dozen of them make the loss."""
    features, labels = load_wine(return_X_y=True)
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    problem = model(2, features.astype(np.float32), (labels == 1).astype(np.int32))
    sampler = Poisson.for_batch_size(32, problem.num_examples)
    scenario = asked(
        problem, DPSignSGD(learning_rate=rate), 200, noise_multiplier=0.5, l2_clip_norm=0.178, sampler=sampler
    )
    losses = answer([scenario], runners=[Training()], insecure_seeds=range(1024), record_at=[200])
    losses = losses[(losses.metric == "loss") & (losses.step == 200)].value
    closure, forecast = (each.forecast(scenario, [200]) for each in (CLOSURE, Moments()))
    off, by_runs = (each.metrics["loss"][-1] / losses.mean() - 1 for each in (closure, forecast))
    known = losses.sem() / losses.mean()
    print(f"\n{losses.mean():.4f} {off:+.4f}, by runs {by_runs:+.4f}, known to {known:.1%}")
    assert closure.extrapolated[-1] and any("is left" in reason for reason in closure.reasons)
    assert abs(off) < error + known
    assert forecast.status == ["simulated"] and "simulated runs" in forecast.reasons[0]
    assert abs(by_runs) < 0.02 + 3 * known


def test_a_loss_that_differs_much_from_run_to_run_says_so():
    found = [CLOSURE.forecast(on_spirals(rate), [400]) for rate in (2.6, 7.8)]
    assert [bool(each.extrapolated[-1]) for each in found] == [False, True]
    assert [any("From run to run" in reason for reason in each.reasons) for each in found] == [False, True]


@pytest.mark.slow
def test_and_its_mean_is_forecast_by_skew_outputs(monkeypatch):
    """By Gaussian ones more than a tenth too high."""
    scenario = on_spirals(7.8)
    seeds = range(600_700, 601_212)
    trained = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=[400])
    losses = trained[(trained["metric"] == "loss") & (trained["step"] == 400)]["value"].astype(float)
    found = CLOSURE.forecast(scenario, [400]).metrics["loss"][-1]
    monkeypatch.setattr(collective_skew, "LEAST_SKEW", np.inf)
    of_gaussians = CLOSURE.forecast(scenario, [400]).metrics["loss"][-1]
    known = losses.sem() / losses.mean()
    print(f"{found / losses.mean() - 1:+.1%}, Gaussians {of_gaussians / losses.mean() - 1:+.1%}, known to {known:.1%}")
    assert abs(found / losses.mean() - 1) < 0.05 + 3 * known
    assert of_gaussians > 1.05 * found


@pytest.mark.parametrize("kind, learning_rate", [(DPSGD, 0.5), (DPAdam, 0.02), (DPSignSGD, 0.02)])
def test_a_very_long_run_ends_where_a_long_one_does(kind, learning_rate):
    """Time steps grow with the run: the first one must not throw the weights to where slopes are gone."""
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(300, 12)).astype(np.float32)
    labels = (rows @ rng.normal(size=12) + 1.5 * rng.normal(size=300) > 0).astype(int)
    problem = model(2, rows, labels)
    long, longer = (
        CLOSURE.forecast(asked(problem, kind(learning_rate=learning_rate), num_steps, sampler=None), [])
        for num_steps in (60_000, 100_000_000)
    )
    assert longer.metrics["loss"][-1] == pytest.approx(long.metrics["loss"][-1], rel=1e-3)
    assert longer.metrics["loss"][-1] < np.log(2)


def of_near_copies(noise_multiplier: float) -> Scenario:
    rng = np.random.default_rng(6)
    rows = np.repeat(rng.normal(size=(60, 25)), 25, axis=0) + 1e-3 * rng.normal(size=(1500, 25))
    problem = model(2, rows.astype(np.float32), np.repeat(rng.integers(0, 2, 60), 25))
    sampler = Poisson.for_batch_size(64, problem.num_examples)
    return asked(problem, DPAdam(learning_rate=0.82), 500, noise_multiplier=noise_multiplier, sampler=sampler)


@pytest.mark.parametrize("noise_multiplier", [6.0, 12.0])
def test_a_high_loss_that_differs_much_from_run_to_run_is_not_called_ok(noise_multiplier):
    forecast = CLOSURE.forecast(of_near_copies(noise_multiplier), [])
    assert forecast.metrics["loss"][-1] > 2 * np.log(2)
    assert forecast.extrapolated[-1]
    assert any("From run to run the loss differs" in reason for reason in forecast.reasons)


@pytest.mark.slow
@pytest.mark.parametrize("noise_multiplier", [6.0, 12.0])
def test_such_a_loss_is_forecast_by_skew_outputs(noise_multiplier, monkeypatch):
    """By Gaussian ones 3 and 4 % too high."""
    scenario = of_near_copies(noise_multiplier)
    seeds = tuple(range(600_100, 600_600))
    table = answer([scenario], runners=[Training()], record_at=[500], insecure_seeds=seeds)
    losses = table.loc[(table["metric"] == "loss") & (table["step"] == 500), "value"]
    off = CLOSURE.forecast(scenario, []).metrics["loss"][-1] / losses.mean() - 1
    monkeypatch.setattr(collective_skew, "LEAST_SKEW", np.inf)
    of_gaussians = CLOSURE.forecast(scenario, []).metrics["loss"][-1] / losses.mean() - 1
    print(f"{off:+.1%}, Gaussians {of_gaussians:+.1%}, standard error {losses.sem() / losses.mean():.1%}")
    assert abs(off) < 0.03
    assert of_gaussians > off + 0.02


def of_few_long_rows(learning_rate: float) -> Scenario:
    """As of genes: 250 rows of 1,500 features, some far larger than others."""
    rng = np.random.default_rng([77, 0])
    rows = (rng.normal(size=(250, 1500)) * np.exp(rng.normal(0, 0.5, 1500)) / 40).astype(np.float32)
    margin = rows @ rng.normal(size=1500)
    chance = 1 / (1 + np.exp(-1.5 * (margin - margin.mean()) / margin.std()))
    problem = model(2, rows, (rng.random(250) < chance).astype(np.int32))
    settings = {"noise_multiplier": 2.0, "l2_clip_norm": 0.0712, "sampler": Poisson.for_batch_size(32, 250)}
    return asked(problem, DPSGD(learning_rate=learning_rate), 400, **settings)


def test_few_long_rows_that_steps_throw_are_not_called_ok():
    thrown, calm = (CLOSURE.forecast(of_few_long_rows(rate), []) for rate in (150.0, 15.0))
    assert thrown.extrapolated[-1] and not calm.extrapolated[-1]
    assert any("more than 10% of their outputs' own fluctuation" in reason for reason in thrown.reasons)


@pytest.mark.slow
def test_and_their_loss_is_as_trained_all_the_same():
    """It came out 17 % too high when what examples push was three moments of a Gaussian."""
    scenario = of_few_long_rows(150.0)
    table = answer([scenario], runners=[Training()], record_at=[400], insecure_seeds=tuple(range(600_700, 600_828)))
    losses = table.loc[(table["metric"] == "loss") & (table["step"] == 400), "value"]
    forecast = CLOSURE.forecast(scenario, []).metrics["loss"][-1]
    print(f"{forecast / losses.mean() - 1:+.1%}, standard error {losses.sem() / losses.mean():.1%}")
    assert abs(forecast / losses.mean() - 1) < 0.07


@pytest.mark.parametrize(
    "learning_rate, noise_multiplier, l2_clip_norm, is_off",
    [
        (1.0, 2.0, 5.0, True),
        (1.0, 0.1, 5.0, True),
        (0.97, 0.1, 5.0, False),
        (3.0, 0.5, 1.0, False),
        (1.0, 0.1, np.inf, False),
    ],
)
def test_the_edge_of_stability_that_clipping_holds_is_said(learning_rate, noise_multiplier, l2_clip_norm, is_off):
    """Simulated: 1.69 where 3.03 is forecast (rate 1, noise .1); within 0.5 % in the cases that say nothing."""
    if np.isinf(l2_clip_norm):
        l2_clip_norm, noise_multiplier = 1e9, 1e-9
    problem = quadratic(np.geomspace(0.05, 2, 20), 1.0, example_noise_std=0.3)
    settings = {"noise_multiplier": noise_multiplier, "l2_clip_norm": l2_clip_norm, "sampler": Stream(16)}
    found = CLOSURE.forecast(asked(problem, DPSGD(learning_rate=learning_rate), 300, **settings), [300])
    assert found.extrapolated[-1] == is_off == ("edge of stability" in " ".join(found.reasons))


def copies_of_two_outputs(num_examples=600, num_features=6):
    rng = np.random.default_rng(9)
    rows = (rng.normal(size=(num_examples, num_features)) / 2).astype(np.float32)
    labels = (rng.random(num_examples) < 1 / (1 + np.exp(-rows @ rng.normal(size=num_features)))).astype(np.int32)
    return Dataset("toy", rows, labels, ("no", "yes"))


@pytest.mark.parametrize("num_steps, is_off", [(20, True), (400, False)])
def test_several_outputs_have_the_limits_of_one(num_steps, is_off):
    """A start of DP-Adam's was 33 % off and said to be ok."""
    problem = linear_model(copies_of_two_outputs(), likelihood=SOFTMAX)
    settings = {"noise_multiplier": 0.5, "l2_clip_norm": 2.0}
    found = CLOSURE.forecast(asked(problem, DPAdam(learning_rate=0.1), num_steps, **settings), [num_steps])
    assert found.extrapolated[-1] == is_off == ("swing past" in " ".join(found.reasons))


def test_two_outputs_of_a_softmax_are_forecast_as_the_one_of_a_logistic_model():
    """Half the rate and sqrt 2 times the clip norm, little privacy noise: batch noise of the outputs is one and the
    same, and independent outputs would see half of it in their difference.
    """
    data, settings = copies_of_two_outputs(), {"noise_multiplier": 0.02}
    one = asked(linear_model(data), DPSGD(learning_rate=6.0), 300, l2_clip_norm=8.0, **settings)
    likewise = {"l2_clip_norm": 8 * 2**0.5, **settings}
    two = asked(linear_model(data, likelihood=SOFTMAX), DPSGD(learning_rate=3.0), 300, **likewise)
    alone, both = (CLOSURE.forecast(each, [300]).metrics for each in (one, two))
    assert both["loss"][-1] == pytest.approx(alone["loss"][-1], rel=0.012)  # of independent outputs 6 % lower
    assert both["loss_std"][-1] == pytest.approx(alone["loss_std"][-1], rel=0.15)
