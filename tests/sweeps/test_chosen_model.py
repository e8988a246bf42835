"""The chosen run's model is that run's, with the price of the whole procedure in its statement."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse

import noisecast as nc
from noisecast import engines
from noisecast.problems.datasets import Dataset
from noisecast.question import Question
from noisecast.sweeps import Store, run_sweep
from noisecast.sweeps.chosen_model import chosen_model
from noisecast.sweeps.selection import Compose, Public, RepeatSelect, select


def asked() -> list[Question]:
    train, test = nc.bundled("breast_cancer")
    problem = nc.linear_model(train, test)
    sampler = nc.Poisson.for_batch_size(32, train.num_examples)
    mechanism = nc.SampledGaussian(noise_multiplier=2.0, l2_clip_norm=1.0, sampler=sampler)
    scenarios = tuple(
        nc.Scenario(problem=problem, mechanism=mechanism, optimizer=nc.DPSGD(learning_rate=rate), num_steps=30)
        for rate in (0.01, 0.5)
    )
    return [Question(scenarios=scenarios, runners=(nc.Training(),), record_at=(), num_seeds=2)]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    folder = tmp_path_factory.mktemp("sweep") / "store"
    run_sweep(asked(), folder, workers=0)
    return Store(folder)


def test_it_is_the_run_that_was_recorded(store):
    selection = select(store.read(), metric="test_loss", price=Compose(), ledger=store.ledger())
    model = chosen_model(selection, asked(), store)
    question = asked()[0]
    run = engines.start(question.scenarios, repeats=[0, 1], root=store.root())
    run.advance(30)
    index = [s.id for s in question.scenarios].index(selection.scenario)
    scenario = question.scenarios[index]  # what is released is rounded to a grid of its noise
    noise = scenario.optimizer.learning_rate * scenario.mechanism.mean_noise_std * 30**0.5
    np.testing.assert_allclose(model.params, run.params[0, index], rtol=1e-4, atol=noise * 2.0**-12)


def test_the_statement_has_the_procedures_epsilon(store):
    selection = select(store.read(), metric="test_loss", price=Compose(), ledger=store.ledger())
    model = chosen_model(selection, asked(), store)
    assert model.statement.epsilon == selection.epsilon_of_procedure > selection.epsilon_of_run
    assert "The number of rows" in model.statement.sentence() and "a vocabulary" in model.statement.sentence()
    assert selection.meaning in model.statement.sentence()
    assert "Choosing the hyperparameters" not in model.statement.sentence()


def test_of_fresh_examples_no_number_is_public(tmp_path):
    quadratic = nc.quadratic(hessian_diag=np.ones(3), initial_params=np.ones(3), example_noise_std=0.1)
    mechanism = nc.SampledGaussian(noise_multiplier=2.0, l2_clip_norm=1.0, sampler=nc.Stream(8))
    scenarios = tuple(
        nc.Scenario(problem=quadratic, mechanism=mechanism, optimizer=nc.DPSGD(learning_rate=rate), num_steps=20)
        for rate in (0.01, 0.1)
    )
    questions = [Question(scenarios=scenarios, runners=(nc.Training(),), record_at=(), num_seeds=2)]
    run_sweep(questions, tmp_path / "store", workers=0)
    store = Store(tmp_path / "store")
    selection = select(store.read(), metric="loss", price=Compose(), ledger=store.ledger())
    statement = chosen_model(selection, questions, store).statement
    assert "number of rows" not in statement.sentence() and selection.meaning in statement.sentence()


@pytest.mark.parametrize("optimizer", [nc.DPSGD(learning_rate=0.5), nc.DPSignSGD(learning_rate=0.01)])
def test_it_is_looked_at_when_the_recorded_run_was(tmp_path, optimizer):
    """A look draws the noise that rows lack so far: without looks it would be another run, never scored or priced."""
    rng = np.random.default_rng(0)
    rows = scipy.sparse.random_array((200, 300), density=0.01, rng=rng, format="csr", dtype=np.float32)
    train, test = (Dataset("sparse", part, rng.integers(0, 2, part.shape[0]), ("a", "b")) for part in (rows, rows))
    mechanism = nc.SampledGaussian(noise_multiplier=2.0, l2_clip_norm=1.0, sampler=nc.Poisson.for_batch_size(4, 200))
    scenario = nc.Scenario(problem=nc.linear_model(train, test), mechanism=mechanism, optimizer=optimizer, num_steps=60)
    questions = [Question(scenarios=(scenario,), runners=(nc.Training(),), record_at=(20, 40), num_seeds=1)]
    run_sweep(questions, tmp_path / "store", workers=0)
    store = Store(tmp_path / "store")
    model = chosen_model(
        select(store.read(), metric="test_loss", price=Compose(), ledger=store.ledger()), questions, store
    )

    def params_after(looks) -> np.ndarray:
        run = engines.start([scenario], repeats=[0], root=store.root())
        for step in looks:
            run.advance(step)
            run.evaluate()
        return engines.released_params(run, scenario)

    np.testing.assert_array_equal(model.params, params_after((20, 40, 60)))
    assert np.abs(model.params - params_after((60,))).max() > 0.01  # what it would have been


def test_of_random_trials_one_choice_is_told_and_no_other(tmp_path):
    """The price covers the best by one score; by another another trial may be the best."""
    trials = nc.TrialDistribution(nc.TrialKind.GEOMETRIC, 3.0)
    run_sweep(asked_once(), tmp_path / "store", workers=0, trials=trials)
    store = Store(tmp_path / "store")
    selection = select(store.read(), metric="test_loss", price=RepeatSelect(trials), ledger=store.ledger())
    chosen_model(selection, asked_once(), store)
    store.settle(selection)  # again, and the same
    other = replace(selection, seed=selection.seed + 1, metric="test_accuracy")
    with pytest.raises(ValueError, match="the choice that was made before, by test_loss, got another trial"):
        store.settle(other)
    (store.folder / "choice.json").write_text("{")
    with pytest.raises(ValueError, match="it is damaged"):
        store.settle(selection)


def test_of_random_trials_the_best_trial_is_released(tmp_path):
    trials = nc.TrialDistribution(nc.TrialKind.GEOMETRIC, 3.0)
    run_sweep(asked_once(), tmp_path / "store", workers=0, trials=trials)
    store = Store(tmp_path / "store")
    selection = select(store.read(), metric="test_loss", price=RepeatSelect(trials), ledger=store.ledger())
    model = chosen_model(selection, asked_once(), store)
    assert model.non_private_metrics["test_loss"] == pytest.approx(selection.value, rel=1e-4)
    assert model.statement.epsilon == selection.epsilon_of_procedure


def asked_once() -> list[Question]:
    return [replace(asked()[0], num_seeds=1)]


def test_another_key_is_seen(store, tmp_path):
    run_sweep(asked(), tmp_path / "other", workers=0)
    selection = select(store.read(), metric="test_loss", price=Compose(), ledger=store.ledger())
    (store.folder / "key").rename(store.folder / "kept")
    try:
        (store.folder / "key").write_bytes((tmp_path / "other" / "key").read_bytes())
        with pytest.raises(ValueError, match="another release"):
            chosen_model(selection, asked(), store)
        (store.folder / "key").unlink()
        with pytest.raises(ValueError, match="it is lost"):
            chosen_model(selection, asked(), store)
        assert not (store.folder / "key").exists()
    finally:
        (store.folder / "kept").replace(store.folder / "key")


@pytest.mark.parametrize("change, is_seen", [(1.03, False), (1.08, True), (0.92, True), (0.0, True)])
def test_another_score_than_recorded_is_seen(store, monkeypatch, change, is_seen):
    selection = select(store.read(), metric="test_loss", price=Compose(), ledger=store.ledger())
    table = store.read()
    monkeypatch.setattr(store, "read", lambda: table.assign(value=table["value"] * change))
    if is_seen:
        with pytest.raises(ValueError, match="Expected test_loss to come out as recorded"):
            chosen_model(selection, asked(), store)
    else:
        chosen_model(selection, asked(), store)


def test_a_choice_by_the_training_loss_gives_a_model_that_says_it_is_not_private(store):
    selection = select(store.read(), metric="loss", price=Compose(), ledger=store.ledger())
    assert "NOT private" in chosen_model(selection, asked(), store).statement.sentence()


def test_a_public_sweep_has_no_private_model(store):
    selection = select(store.read(), metric="loss", price=Public("simulated"))
    with pytest.raises(ValueError, match="noisecast train"):
        chosen_model(selection, asked(), store)
