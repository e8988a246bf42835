"""The forecast of matrix factorisation against training; every tolerance with a control that breaks it.

The seeds were written down before any result: a failing one is a finding, not a reason to change it.
"""

import numpy as np
import pytest

from noisecast import DPSGD, DPAdam, DPSignSGD, Poisson, SampledGaussian, Scenario, answer
from noisecast.problems.datasets import Ratings
from noisecast.problems.matrix_factorization import matrix_factorization
from noisecast.runners import Training, moments
from noisecast.runners.moments import Moments, factorization
from noisecast.runners.moments.factorization_rows import errors_of, pairs_of, single, sums_of
from noisecast.runners.moments.factorization_spread import Past, pulled_back
from noisecast.theory.factorization_moments import clipped_error

SEED_DATA, SEED_TRAINING = 646_001, 646_101
NUM_USERS, NUM_ITEMS, NUM_RATINGS, DIM = 80, 60, 1500, 24


@pytest.fixture(autouse=True)
def only_this_solver(monkeypatch):
    monkeypatch.setattr(moments, "SOLVERS", (factorization,))


def ratings() -> tuple[Ratings, Ratings]:
    """Rank two and an offset; items of unequal popularity."""
    rng = np.random.default_rng(SEED_DATA)
    popular = np.arange(1, NUM_ITEMS + 1) ** -0.7
    taken = rng.choice(
        NUM_USERS * NUM_ITEMS,
        NUM_RATINGS + 500,
        replace=False,
        p=np.tile(popular, NUM_USERS) / popular.sum() / NUM_USERS,
    )
    user, item = np.divmod(taken, NUM_ITEMS)
    liking = 0.4 + (rng.normal(size=(NUM_USERS, 2)) @ rng.normal(size=(2, NUM_ITEMS)))[user, item]
    stars = np.clip(3 + liking + 0.5 * rng.normal(size=len(user)), 1, 5).astype(np.float32)
    train, test = (
        Ratings(user[h].astype(np.int32), item[h].astype(np.int32), stars[h], NUM_USERS, NUM_ITEMS)
        for h in (slice(None, NUM_RATINGS), slice(NUM_RATINGS, None))
    )
    return train, test


PROBLEM = matrix_factorization(*ratings(), dim=DIM, public_init_seed=0)


def asked(optimizer, *, noise_multiplier, l2_clip_norm=1.0, num_steps=1500, problem=PROBLEM) -> Scenario:
    sampler = Poisson.for_batch_size(50, NUM_RATINGS)
    mechanism = SampledGaussian(noise_multiplier=noise_multiplier, l2_clip_norm=l2_clip_norm, sampler=sampler)
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps)


def trained(scenario, record_at, num_seeds):
    seeds = range(SEED_TRAINING, SEED_TRAINING + num_seeds)
    table = answer([scenario], runners=[Training()], insecure_seeds=seeds, record_at=record_at)
    by = table.groupby(["metric", "step"])["value"]
    mean, error, std = by.mean(), by.sem(), by.std()
    return {
        name: tuple(part[name].loc[record_at].to_numpy() for part in (mean, error, std))
        for name in table["metric"].unique()
    }


def gap(forecast, found, name):
    """Largest relative difference beyond three standard errors."""
    mean, error, _ = found[name]
    return float(np.max(np.abs(forecast.metrics[name] / mean - 1) - 3 * error / mean))


CASES = [
    (DPSGD(learning_rate=0.6), 0.3),
    (DPSGD(learning_rate=0.3), 2.0),
    (DPSignSGD(learning_rate=0.006), 0.5),
    (DPAdam(learning_rate=0.006), 0.5),
]


@pytest.mark.parametrize("optimizer, noise_multiplier", CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_factorisations_are_as_trained(optimizer, noise_multiplier, monkeypatch):
    """Losses within 2.5 % beyond chance; noise 30 % off, or a learning rate 20 % off, is seen.

    One run's deviation from the mean within 20 %, of which 7 are chance; where the rows do more than fluctuate, not if
    noise is not carried along.
    """
    record_at, tolerance = [100, 300, 600], 0.025

    def question(noise_factor=1.0, rate_factor=1.0):
        changed = type(optimizer)(learning_rate=rate_factor * optimizer.learning_rate)
        return asked(changed, noise_multiplier=noise_factor * noise_multiplier, num_steps=600)

    def gaps(forecast):
        return max(gap(forecast, found, name) for name in ("loss", "test_loss"))

    found = trained(question(), record_at, num_seeds=100)
    forecast = Moments().forecast(question(), record_at)
    controls = [gaps(Moments().forecast(wrong, record_at)) for wrong in (question(1.3), question(rate_factor=1.2))]
    names = ("rmse", "gradient_norm", "clip_fraction", "params_norm")
    others = {name: gap(forecast, found, name) for name in names}
    monkeypatch.setattr(Past, "_back", lambda self, at, leg, rows: rows)
    spreads, not_carried = (
        np.array([one.metrics[f"{name}_std"] / found[name][2] for name in ("loss", "test_loss")])
        for one in (forecast, Moments().forecast(question(), record_at))
    )
    print(f"\n{optimizer.name}: spread over trained {spreads.round(2).tolist()}, {not_carried.round(2).tolist()}")
    assert np.abs(spreads - 1).max() < 0.2
    assert noise_multiplier > 1 or np.abs(not_carried - 1).max() > 0.4
    print(f"\n{optimizer.name}: {gaps(forecast):+.2%}, controls {np.round(controls, 3)}, {others}")
    assert gaps(forecast) < tolerance < min(controls)
    assert max(others.values()) < 0.05
    assert not forecast.extrapolated[:-1].any()  # at the end two are, by caution: they have begun to fit noise


def test_without_noise_it_is_gradient_descent_as_steps_shrink():
    """Batches of everything and hardly any noise: within 0.3 %, halved with the learning rate; 3 % off it is seen."""
    everything = Poisson(1.0, NUM_RATINGS)

    def loss(runner, learning_rate, num_steps):
        mechanism = SampledGaussian(noise_multiplier=1e-6, l2_clip_norm=0.7, sampler=everything)
        optimizer = DPSGD(learning_rate=learning_rate)
        scenario = Scenario(problem=PROBLEM, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps)
        table = answer([scenario], runners=[runner], insecure_seeds=[SEED_TRAINING], record_at=[num_steps])
        return table.set_index(["metric", "step"])["value"]["loss", num_steps]

    runner = Moments(time_steps=60)
    coarse, fine = (loss(runner, 1.0 / k, 400 * k) / loss(Training(), 1.0 / k, 400 * k) - 1 for k in (2, 4))
    assert abs(coarse) < 3e-3
    assert abs(fine) < 0.6 * abs(coarse)
    assert abs(loss(runner, 0.515, 800) / loss(Training(), 0.5, 800) - 1) > 3e-3


def test_time_steps_have_converged():
    scenario = asked(DPSGD(learning_rate=0.6), noise_multiplier=0.3, num_steps=600)
    few, some, many = (Moments(time_steps=n).forecast(scenario, [600]).metrics["loss"][-1] for n in (2, 16, 150))
    assert some == pytest.approx(many, rel=5e-3)
    assert few != pytest.approx(many, rel=5e-3)


def test_it_starts_where_training_starts():
    scenario = asked(DPSGD(learning_rate=0.1), noise_multiplier=1.0, num_steps=2)
    table = answer([scenario], runners=[Moments(), Training()], insecure_seeds=[SEED_TRAINING], record_at=[0])
    start = table[table["step"] == 0].pivot(index="metric", columns="runner", values="value")
    start = start.drop(["loss_std", "test_loss_std"])
    np.testing.assert_allclose(start["moments"], start["training"], rtol=1e-4)
    assert table[table["runner"] == "moments"]["seed"].isna().all()


def test_what_the_closure_does_not_follow_is_extrapolated_with_a_sentence():
    steep = Moments().forecast(asked(DPSGD(learning_rate=300.0), noise_multiplier=0.01, l2_clip_norm=100.0), [])
    assert steep.extrapolated[-1]
    assert steep.reasons
    overshoots = Moments().forecast(asked(DPSGD(learning_rate=20.0), noise_multiplier=0.01), [])
    assert any("curvature" in reason for reason in overshoots.reasons)
    fitted = Moments().forecast(asked(DPSGD(learning_rate=3.0), noise_multiplier=0.5), [])
    assert fitted.extrapolated[-1]
    assert any("each other's noise" in reason for reason in fitted.reasons)
    calm = Moments().forecast(asked(DPSGD(learning_rate=0.1), noise_multiplier=0.5), [])
    assert not calm.extrapolated.any()
    assert calm.reasons == ()


@pytest.mark.parametrize("clip", [np.inf, 0.7])
def test_noise_is_carried_by_the_mean_s_own_tangent(clip):
    """l' A d: what the mean clipped gradient gains along l by a small d. What the bound loses as rows grow is seen."""
    pairs = pairs_of(PROBLEM.train, PROBLEM.num_rows)
    rng = np.random.default_rng(SEED_DATA + 1)
    shape = PROBLEM.num_rows, DIM
    mean, moved, rows = 0.3 * rng.normal(size=shape), rng.normal(size=shape), rng.normal(size=shape)
    nothing, of_none = np.zeros(shape), np.zeros(len(pairs.labels))

    def clipped(mean):
        squares = (mean**2).sum(axis=1)
        of_both = squares[pairs.users] + squares[pairs.items]
        bound = clip / np.sqrt(of_both)
        return clipped_error(errors_of(pairs, mean, nothing)[0], of_none, bound), bound / of_both

    def along_rows(mean):
        found = clipped(mean)[0]
        return float(np.sum(rows * sums_of(pairs, mean, nothing, found.push, found.slope, of_none)[0]))

    found, by_length = clipped(mean)
    assert (found.clip_fraction.mean() > 0.3) == np.isfinite(clip)
    measured = (along_rows(mean + 3e-4 * moved) - along_rows(mean - 3e-4 * moved)) / 6e-4
    lever = -found.by_bound * (by_length if np.isfinite(clip) else 0.0)

    def carried(lever):
        of_ratings = (single(part / len(pairs.labels)) for part in (found.push, found.slope, of_none, lever))
        back = np.zeros(shape, np.float32)
        pulled_back(pairs.users, pairs.items, single(mean), single(nothing), single(rows), *of_ratings, back)
        return float(np.sum(back * moved))

    assert carried(lever) == pytest.approx(measured, rel=0.01)
    if np.isfinite(clip):
        assert carried(of_none) != pytest.approx(measured, rel=0.01)


def test_a_past_too_long_to_keep_says_no_spread(monkeypatch):
    scenario = asked(DPSGD(learning_rate=0.3), noise_multiplier=1.0, num_steps=20)
    assert "loss_std" in Moments().forecast(scenario, []).metrics
    monkeypatch.setattr(factorization, "MOST_NUMBERS", 1000)
    found = Moments().forecast(scenario, [])
    assert "loss_std" not in found.metrics and np.isfinite(found.metrics["loss"]).all()


def test_directions_surer_than_noise_are_extrapolated():
    """Large batches and hardly any noise: DP-Adam's loss is forecast too low, and says so; DP-SGD's is followed."""
    sampler = Poisson.for_batch_size(500, NUM_RATINGS)
    mechanism = SampledGaussian(noise_multiplier=0.1, l2_clip_norm=2.0, sampler=sampler)

    def question(optimizer):
        return Scenario(problem=PROBLEM, mechanism=mechanism, optimizer=optimizer, num_steps=60)

    def off(optimizer):
        forecast = Moments().forecast(question(optimizer), [])
        loss, error, _ = trained(question(optimizer), [60], num_seeds=24)["loss"]
        return float(forecast.metrics["loss"][-1] / loss[0] - 1), float(error[0] / loss[0]), forecast

    sure, error, forecast = off(DPAdam(learning_rate=0.02))
    assert sure < -0.05 and error < 0.01
    assert forecast.extrapolated[-1] and any("move together" in reason for reason in forecast.reasons)
    followed, error, forecast = off(DPSGD(learning_rate=3.0))
    assert abs(followed) < 0.025 + 3 * error and not forecast.extrapolated[-1]
