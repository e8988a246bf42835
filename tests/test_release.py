"""A run for release: nothing is lost, nothing secret is left open, nothing is taken for what it is not."""

import math
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse

from noisecast import DPSGD, Poisson, SampledGaussian, Scenario, engines, linear_model, release
from noisecast.checkpoint import Checkpoint, checkpoint_held, load_checkpoint, save_checkpoint
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.datasets import Dataset
from noisecast.release import Interrupted, train


def scenario(num_steps: int = 30) -> Scenario:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, 4)).astype(np.float32)
    data = Dataset("toy", features, (features[:, 0] > 0).astype(np.int32), ("no", "yes"))
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson.for_batch_size(8, 60))
    return Scenario(
        problem=linear_model(data), mechanism=mechanism, optimizer=DPSGD(learning_rate=0.1), num_steps=num_steps
    )


def interrupt(*_) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.checkpoint"


def test_a_checkpoint_is_readable_by_its_owner_alone(path):
    with pytest.raises(Interrupted):
        train(scenario(), checkpoint=path, watch=interrupt)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_checkpoint_outlives_a_failed_save_and_resumes_to_the_same_model(path):
    def disk_full(model):
        assert path.exists()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        train(scenario(), insecure_seed=1, checkpoint=path, save=disk_full)
    saved = []
    train(scenario(), checkpoint=path, resume=True, save=saved.append)
    np.testing.assert_array_equal(saved[0].params, train(scenario(), insecure_seed=1).params)
    assert not path.exists()


@pytest.mark.parametrize("moment", ["save", "first look", "every look"])
def test_an_interruption_at_any_moment_loses_nothing(path, moment):
    expected = train(scenario(), insecure_seed=1).params
    looks = []

    def watch(at):
        looks.append(at.step)
        if moment == "every look" or (moment == "first look" and len(looks) == 1):
            interrupt()

    save = interrupt if moment == "save" else (lambda model: None)
    try:
        model = train(scenario(), insecure_seed=1, checkpoint=path, watch=watch, save=save)
    except Interrupted:
        assert path.exists()
        model = train(scenario(), checkpoint=path, resume=True)
    np.testing.assert_array_equal(model.params, expected)


def locks(path) -> list[str]:
    return [file.name for file in path.parent.glob(".*")]


def test_of_two_that_train_from_one_checkpoint_the_second_is_refused_and_harms_nothing(path):
    expected = train(scenario(), insecure_seed=1).params
    refused = []

    def second(*_) -> None:
        with pytest.raises(ValueError, match=r"Another process is training from the checkpoint .*run\.checkpoint; "):
            train(scenario(), checkpoint=path, resume=path.exists())
        refused.append(locks(path))

    def second_and_interrupt(*_) -> None:
        second()
        interrupt()

    with pytest.raises(Interrupted):  # its lock goes with it
        train(scenario(), insecure_seed=1, checkpoint=path, watch=second_and_interrupt)
    assert locks(path) == []
    model = train(scenario(), checkpoint=path, resume=True, watch=second, save=second)
    np.testing.assert_array_equal(model.params, expected)
    assert len(refused) > 2 and all(left == [".run.checkpoint.lock"] for left in refused)
    assert locks(path) == [] and not path.exists()


HOLD = """
import sys, time
from noisecast.checkpoint import checkpoint_held
with checkpoint_held(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("name", ["run.checkpoint", "run", "a[b]*"])
def test_what_a_killed_process_held_is_free_and_its_lock_file_goes_with_the_next_run(tmp_path, name):
    path = tmp_path / name
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="Another process is training"):
            train(scenario(), checkpoint=path)
        assert locks(path) == [f".{name}.lock"]  # not removed by whom it was not given
    finally:
        holder.kill()
        holder.communicate()
    assert locks(path) == [f".{name}.lock"]
    train(scenario(), checkpoint=path)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_is_not_continued_with_noise_of_another_generator(path, monkeypatch):
    """Of one key each generator makes its own noise: the rest would be a second release under one entry of a ledger."""
    with pytest.raises(Interrupted):
        train(scenario(), checkpoint=path, watch=interrupt)
    here = engines.noise_source()
    monkeypatch.setattr(engines, "noise_source", lambda: "Other")
    with pytest.raises(ValueError, match=f"was begun with noise drawn by {here}, and this machine draws it by Other"):
        train(scenario(), checkpoint=path, resume=True)
    monkeypatch.undo()
    train(scenario(), checkpoint=path, resume=True)


def test_files_that_only_look_like_a_runs_own_are_left_alone(tmp_path):
    """What belongs to a checkpoint `run` is none of `.run.toml` or of the lock of a checkpoint `run.b`."""
    others = [".run.toml", ".run.b.lock", ".run.b.half-written-abcdefgh", ".run.settings", "run.b"]
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / ".run.half-written-abc_1234").touch()
    train(scenario(), checkpoint=tmp_path / "run")
    assert sorted(os.listdir(tmp_path)) == sorted(others)


def test_a_run_that_fails_lets_go_of_its_checkpoint(path):
    with pytest.raises(ValueError, match="found none"):
        train(scenario(), checkpoint=path, resume=True)
    assert locks(path) == []


def hold_often(path, count, number):
    for _ in range(number):
        try:
            with checkpoint_held(path), open(path, "x"):  # "x": fails where two are in here at once
                path.unlink()
            count.put("held")
        except ValueError:
            count.put("refused")
        except OSError as error:
            count.put(repr(error))


@pytest.mark.slow
def test_a_lock_that_is_removed_while_others_reach_for_it_is_held_by_one(path):
    context = multiprocessing.get_context("spawn")
    count = context.Queue()
    processes = [context.Process(target=hold_often, args=(path, count, 2000)) for _ in range(3)]
    for process in processes:
        process.start()
    said = Counter(count.get(timeout=120) for _ in range(6000))
    for process in processes:
        process.join()
    assert set(said) <= {"held", "refused"} and said["held"] > 0 and locks(path) == []


def interrupted_state(path) -> Checkpoint:
    with pytest.raises(Interrupted):
        train(scenario(), insecure_seed=1, checkpoint=path, watch=interrupt)
    return load_checkpoint(path, scenario=scenario().id)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"step": np.asarray(10**9)}, "at step 1,000,000,000 of 30"),
        ({"leaf_0": np.full((1, 1, 5), np.nan, np.float32)}, "Expected a saved state of finite numbers"),
        ({"leaf_0": np.zeros(3, np.float32)}, "Expected a saved state of finite numbers"),
        ({"leaf_0": None}, "Expected a saved state of finite numbers"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(path, change, words):
    saved = interrupted_state(path)
    state = {name: array for name, array in (saved.state | change).items() if array is not None}
    save_checkpoint(path, Checkpoint(saved.scenario, saved.root, state))
    with pytest.raises(ValueError, match=words):
        train(scenario(), checkpoint=path, resume=True)


def test_a_seed_that_is_not_the_checkpoints_own_is_refused(path):
    interrupted_state(path)
    with pytest.raises(ValueError, match="not insecure seed 99; resume without one"):
        train(scenario(), insecure_seed=99, checkpoint=path, resume=True)


def test_a_checkpoint_of_another_scenario_is_refused(path):
    interrupted_state(path)
    with pytest.raises(ValueError, match="another scenario"):
        train(scenario(num_steps=31), checkpoint=path, resume=True)


def test_a_seed_too_large_to_store_is_refused_before_any_step():
    with pytest.raises(ValueError, match="at most 64 bits"):
        RandomRoot.from_insecure_seed(10**30)


def test_a_resumed_run_is_evaluated_where_it_was_begun_to_be(path, tmp_path):
    # An evaluation gives rows the noise they lack: with others, one run would be released as two different draws.
    rows = scipy.sparse.csr_array(np.eye(60, 30, dtype=np.float32))
    data = Dataset("toy", rows, np.arange(60, dtype=np.int32) % 2, ("no", "yes"))
    asked = replace(scenario(num_steps=40), problem=linear_model(data))
    with pytest.raises(Interrupted):
        train(asked, checkpoint=path, watch=interrupt, num_evaluations=8)
    assert load_checkpoint(path, scenario=asked.id).evaluate_every == 5
    models = []
    for number, asked_now in enumerate(
        ({"watch": lambda moment: None, "num_evaluations": 8}, {"watch": lambda moment: None}, {})
    ):
        copy = tmp_path / str(number)
        copy.write_bytes(path.read_bytes())
        models.append(train(asked, checkpoint=copy, resume=True, **asked_now).params)
    np.testing.assert_array_equal(models[1], models[0])
    np.testing.assert_array_equal(models[2], models[0])


def test_a_run_that_diverges_leaves_no_secret(path, monkeypatch):
    monkeypatch.setattr(engines, "released_params", lambda run, scenario: np.full(3, np.nan, np.float32))
    seen = []
    with pytest.raises(ValueError, match="diverged"):
        train(
            scenario(),
            checkpoint=path,
            watch=lambda moment: seen.append(path.exists()),
        )
    assert seen[0] and not path.exists()


def test_a_run_from_a_known_seed_states_no_finite_epsilon(path):
    assert train(scenario(), insecure_seed=1).statement.epsilon == float("inf")
    assert train(scenario()).statement.epsilon == scenario().privacy_spent.epsilon < float("inf")


def test_a_run_can_be_resumed_from_before_its_first_step(path, monkeypatch):
    monkeypatch.setattr(release, "SECONDS_BETWEEN_CHECKPOINTS", math.inf)  # whatever the compiler takes

    def killed(moment):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(scenario(), insecure_seed=1, checkpoint=path, watch=killed)
    assert load_checkpoint(path, scenario=scenario().id).step == 0
    resumed = train(scenario(), checkpoint=path, resume=True)
    np.testing.assert_array_equal(resumed.params, train(scenario(), insecure_seed=1).params)


def test_the_checkpoint_of_an_interrupted_run_is_not_written_over(path):
    with pytest.raises(Interrupted):
        train(scenario(), checkpoint=path, watch=interrupt)
    kept = path.read_bytes()
    with pytest.raises(ValueError, match=r"checkpoint of an interrupted run; resume it, or delete it"):
        train(scenario(), checkpoint=path)
    assert path.read_bytes() == kept
