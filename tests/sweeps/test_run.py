"""A sweep computes every run once, whoever computes it, and goes on where it was ended."""

import errno
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from small_sweep import questions

import noisecast as nc
from noisecast.privacy.tuning import TrialDistribution, TrialKind
from noisecast.question import Question
from noisecast.sweeps import Store, estimate_seconds, run_sweep, tasks
from noisecast.sweeps import run as sweep_run
from noisecast.sweeps.pace import Pace
from noisecast.sweeps.run import _in_order, _seconds_of, cells_of
from noisecast.sweeps.selection import Compose, select


def grid(**changes) -> Question:
    train, test = nc.bundled("breast_cancer")
    problem = nc.linear_model(train, test)
    sampler = nc.Poisson.for_batch_size(32, train.num_examples)
    scenarios = tuple(
        nc.Scenario(
            problem=problem,
            mechanism=nc.SampledGaussian(noise_multiplier=z, l2_clip_norm=1.0, sampler=sampler),
            optimizer=optimizer,
            num_steps=20,
        )
        for z in (0.5, 2.0)
        for optimizer in (nc.DPSGD(learning_rate=0.5), nc.DPAdam(learning_rate=0.01))
    )
    asked = Question(
        scenarios=scenarios, runners=(nc.Training(), nc.ClosedForm()), record_at=(0, 10), insecure_seeds=(3, 5)
    )
    return replace(asked, **changes)


def runs(table: pd.DataFrame) -> set:
    return set(zip(table["scenario"], table["runner"], table["seed"].fillna(-1)))


def test_a_sweep_says_what_answer_says(tmp_path):
    question = grid()
    swept = run_sweep([question], tmp_path / "store", workers=0)
    asked = nc.answer(
        question.scenarios, runners=question.runners, insecure_seeds=question.insecure_seeds, record_at=[0, 10]
    )
    keys = ["scenario", "runner", "seed", "step", "metric"]
    both = swept.merge(asked, on=keys, suffixes=("", "_asked"))
    assert len(both) == len(swept) == len(asked)
    # Groups are cut differently: the same runs, up to the last bits of a float32 sum.
    assert (both["value"] - both["value_asked"]).abs().max() <= 2e-5 * both["value"].abs().max()


def test_a_cluster_takes_no_number_of_workers(tmp_path):
    with pytest.raises(ValueError, match="Expected workers or ray, got workers 0 and ray 'local'"):
        run_sweep(questions(1), tmp_path / "store", workers=0, ray="local")
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_worker_processes_give_the_same_table_twice(tmp_path):
    one = run_sweep(questions(3, insecure_seeds=(0, 1)), tmp_path / "one", workers=1)
    two = run_sweep(questions(3, insecure_seeds=(0, 1)), tmp_path / "two", workers=2)
    pd.testing.assert_frame_equal(one, two)


def test_what_a_store_beside_it_has_is_taken_over(tmp_path, monkeypatch):
    """Of a group what is asked for; the rest is computed, and what nobody asks for stays where it is."""
    first = grid(runners=(nc.Training(), nc.Moments()))
    run_sweep([first], tmp_path / "first", workers=0)
    new = replace(first.scenarios[0], num_steps=30)
    asked = replace(first, scenarios=(*first.scenarios[::2], new))
    assert len(cells_of([asked]) & Store(tmp_path / "first").cells) == 2 * (2 + 1)
    computed = []
    run = tasks.Task.run
    monkeypatch.setattr(tasks.Task, "run", lambda task: computed.append(task) or run(task))
    table = run_sweep([asked], tmp_path / "second", workers=0, beside=[tmp_path / "first"])
    assert {scenario.id for task in computed for scenario in task.scenarios} == {new.id}
    assert Store(tmp_path / "second").cells == cells_of([asked])
    alone = run_sweep([asked], tmp_path / "alone", workers=0)
    pd.testing.assert_frame_equal(table, alone, rtol=1e-5)  # single-precision sums of other groups
    assert runs(table) == {
        *((s.id, "training", seed) for s in asked.scenarios for seed in (3, 5)),
        *((s.id, "moments", -1) for s in asked.scenarios),
    }


def test_runs_of_secret_seeds_are_nobodys_but_the_stores_own(tmp_path):
    asked = grid(runners=(nc.Training(),), insecure_seeds=None)
    run_sweep([asked], tmp_path / "first", workers=0)
    run_sweep([asked], tmp_path / "second", workers=0, beside=[tmp_path / "first"])
    first, second = (Store(tmp_path / name) for name in ("first", "second"))
    assert not set(first.finished) & set(second.finished) and not first.cells & second.cells
    assert cells_of([asked]) == set()


def test_a_damaged_store_beside_it_is_named(tmp_path):
    run_sweep([grid()], tmp_path / "first", workers=0)
    shard = next((tmp_path / "first" / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{shard.name} is damaged"):
        run_sweep([grid()], tmp_path / "second", workers=0, beside=[tmp_path / "first"])


def test_nothing_is_computed_twice(tmp_path, monkeypatch):
    computed = []
    run = tasks.Task.run
    monkeypatch.setattr(tasks.Task, "run", lambda task: computed.append(task) or run(task))
    first = run_sweep([grid()], tmp_path / "store", workers=0)
    before = len(computed)
    again = run_sweep([grid()], tmp_path / "store", workers=0)
    assert len(computed) == before
    pd.testing.assert_frame_equal(first, again)


def test_a_sweep_may_grow_and_only_what_is_new_is_computed(tmp_path, monkeypatch):
    small = grid(insecure_seeds=(3,))
    first = run_sweep([small], tmp_path / "store", workers=0)
    computed = []
    run = tasks.Task.run
    monkeypatch.setattr(tasks.Task, "run", lambda task: computed.append(task) or run(task))
    table = run_sweep([grid()], tmp_path / "store", workers=0)
    assert {task.repeats for task in computed} <= {(3, 5), (5,)}
    assert runs(first) < runs(table)
    assert len(runs(table)) == 4 * 2 + 4


def test_another_sweep_is_refused_and_nothing_changes(tmp_path):
    before = run_sweep([grid()], tmp_path / "store", workers=0)
    for other, why in (
        (grid(record_at=(0, 5)), "settings, seeds, recorded steps or key"),
        (questions(1)[0], "other data"),
    ):
        with pytest.raises(ValueError, match=why):
            run_sweep([other], tmp_path / "store", workers=0)
    pd.testing.assert_frame_equal(Store(tmp_path / "store").read(), before)


def test_changed_code_is_noticed(tmp_path, monkeypatch):
    run_sweep([grid()], tmp_path / "store", workers=0)
    for module in ("tasks", "run"):
        monkeypatch.setattr(f"noisecast.sweeps.{module}.code_fingerprint", lambda: "another version")
    with pytest.raises(ValueError, match="computed by other code"):
        run_sweep([grid()], tmp_path / "store", workers=0)


def test_questions_that_share_runs_compute_them_once(tmp_path):
    table = run_sweep([grid(), grid()], tmp_path / "store", workers=0)
    assert len(runs(table)) == 4 * 2 + 4


def test_diverged_runs_are_rows(tmp_path):
    question = questions(1, num_seeds=2)[0]
    first = question.scenarios[0]
    # A clip norm that lets the steps grow beyond float32.
    mechanism = replace(first.mechanism, l2_clip_norm=1e20)
    scenarios = (replace(first, mechanism=mechanism, optimizer=nc.DPSGD(learning_rate=10.0)),)
    table = run_sweep([replace(question, scenarios=scenarios)], tmp_path / "store", workers=0)
    last = table[(table["metric"] == "loss") & (table["step"] == 20_000)]
    assert len(last) == 2
    assert set(last["status"]) == {"diverged"}


def test_a_failing_group_does_not_cost_the_others(tmp_path, monkeypatch):
    run = tasks.Task.run

    def sometimes(task):
        if task.scenarios[0].num_steps == 20_001:
            raise RuntimeError("a fault of ours")
        return run(task)

    monkeypatch.setattr(tasks.Task, "run", sometimes)
    with pytest.raises(ValueError, match=r"1 of 3 groups failed(.|\n)*a fault of ours"):
        run_sweep(questions(3), tmp_path / "store", workers=0)
    assert len(Store(tmp_path / "store").cells) == 4
    monkeypatch.setattr(tasks.Task, "run", run)
    run_sweep(questions(3), tmp_path / "store", workers=0)
    assert len(Store(tmp_path / "store").cells) == 6


def test_an_interrupted_sweep_counts_what_is_stored_and_says_what_failed(tmp_path, monkeypatch):
    run, calls = tasks.Task.run, []

    def one_then_a_fault_then_the_end(task):
        calls.append(task)
        if len(calls) == 2:
            raise ZeroDivisionError("a fault of ours")
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(task)

    monkeypatch.setattr(tasks.Task, "run", one_then_a_fault_then_the_end)
    with pytest.raises(KeyboardInterrupt, match=r"1 group more is in(.|\n)*goes on\. 1 failed(.|\n)*a fault of ours"):
        run_sweep(questions(4), tmp_path / "store", workers=0)
    assert len(list((tmp_path / "store" / "shards").glob("*.parquet"))) == 1


def test_a_full_disk_is_told_and_the_store_is_whole(tmp_path, monkeypatch):
    add, count = Store.add, []

    def full_after_two(self, table, finished):
        if len(count) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        count.append(1)
        add(self, table, finished)

    monkeypatch.setattr(Store, "add", full_after_two)
    with pytest.raises(OSError, match="all 4 finished runs are safe"):
        run_sweep(questions(5), tmp_path / "store", workers=0)
    monkeypatch.setattr(Store, "add", add)
    assert len(Store(tmp_path / "store").cells) == 4
    run_sweep(questions(5), tmp_path / "store", workers=0)
    assert len(Store(tmp_path / "store").cells) == 10


def test_a_problem_that_cannot_travel_is_a_sentence(tmp_path):
    import jax.numpy as jnp
    import numpy as np

    problem = nc.jax_model(lambda params, example: jnp.sum((params - example) ** 2), jnp.zeros(2), np.ones((8, 2)))
    mechanism = nc.SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=nc.Poisson.for_batch_size(4, 8))
    asked = nc.Scenario(problem=problem, mechanism=mechanism, optimizer=nc.DPSGD(learning_rate=0.1), num_steps=2)
    question = Question(scenarios=(asked,), runners=(nc.Training(),), record_at=())
    with pytest.raises(ValueError, match="workers=0"):
        run_sweep([question], tmp_path / "store", workers=1)
    assert len(run_sweep([question], tmp_path / "store", workers=0))


def test_the_share_only_grows_and_ends_at_one():
    left = tasks.tasks_of(questions(4), nc_root())
    pace = Pace(left, at_once=2)
    assert pace.seconds_left is None
    shares = [pace.share]
    for place, task in enumerate(list(left)):
        pace.finished(task, 2.0 * 9**place)  # every next one slower than thought
        shares.append(pace.share)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert pace.seconds_left == 0.0


def test_time_left_follows_what_was_seen():
    left = tasks.tasks_of(questions(4), nc_root())
    pace = Pace(left, at_once=2)
    pace.finished(left[0], 2.0)
    assert pace.seconds_left == pytest.approx(3.0, rel=0.01)  # three of two seconds each, two at a time


def test_what_compiling_took_is_not_expected_again():
    left = tasks.tasks_of(questions(8), nc_root())
    pace = Pace(left, at_once=2)
    found = []
    for task, seconds in zip(left[:4], (30.0, 20.0, 2.0, 4.0), strict=True):
        pace.finished(task, seconds)
        found.append(pace.seconds_left)
    assert found == pytest.approx([30 * 7 / 2, 20 * 6 / 2, 2 * 5 / 2, 3 * 4 / 2], rel=0.01)


def test_of_a_task_that_failed_nothing_is_learnt():
    left = tasks.tasks_of(questions(4), nc_root())
    pace = Pace(left, at_once=2)
    pace.finished(left[0], 0.0)
    assert pace.seconds_left is None and pace.share == 0.0
    pace.finished(left[1], 2.0)
    pace.finished(left[2], 0.0)
    assert pace.seconds_left == pytest.approx(2.0, rel=0.01)  # one at a time, as there is but one
    assert 0 < pace.share < 1


def test_long_tasks_come_first_and_kinds_of_one_length_take_turns():
    every = grid(runners=(nc.Training(),))
    short = [
        replace(every, scenarios=tuple(s for s in every.scenarios if s.optimizer.name == name), insecure_seeds=seeds)
        for name in ("DP-SGD", "DP-Adam")
        for seeds in ((3, 5), (8, 9))
    ]
    long = replace(every, scenarios=tuple(replace(scenario, num_steps=25) for scenario in every.scenarios))
    found = [
        (task.scenarios[0].num_steps, task.scenarios[0].optimizer.name)
        for task in _in_order(tasks.tasks_of([*short, long], nc_root()))
    ]
    assert found == [(steps, name) for steps in (25, 20, 20) for name in ("DP-SGD", "DP-Adam")]


def test_an_estimate_is_of_the_right_size(tmp_path):
    asked = questions(6)
    said = estimate_seconds(asked, workers=0)
    began = time.monotonic()
    run_sweep(asked, tmp_path / "store", workers=0)
    assert 0.1 < said / (time.monotonic() - began) < 10


@pytest.mark.slow
def test_an_estimate_counts_that_a_worker_starts(monkeypatch):
    """Seconds, where a process reads JAX anew: more than the few runs of a small sweep."""
    monkeypatch.setattr(sweep_run, "_pace_of_training", lambda task: lambda work: 0.5)
    monkeypatch.setattr(sweep_run, "_seconds_to_start", lambda: 7.0)
    asked = [grid(runners=(nc.Training(),))]
    assert estimate_seconds(asked, workers=1) - estimate_seconds(asked, workers=0) == pytest.approx(7.0)
    monkeypatch.undo()
    assert sweep_run._seconds_to_start() > 0.2


def test_an_estimate_shares_the_work_among_the_workers(monkeypatch):
    monkeypatch.setattr(sweep_run, "_pace_of_training", lambda task: lambda work: 3.0)
    monkeypatch.setattr(sweep_run, "_seconds_to_start", lambda: 0.0)
    asked = [grid(runners=(nc.Training(),))]
    one, two, more = (estimate_seconds(asked, workers=workers) for workers in (1, 2, 1000))
    assert one == pytest.approx(2 * two) and more == pytest.approx(3.0)  # no task is shared


def test_an_estimate_makes_one_trial_of_a_kind_and_says_how_many_are_made(monkeypatch):
    made, told = [], []

    def trial(task, preparing=None):
        made.append((task.runner.name, task.scenarios[0].optimizer.name))
        return lambda work: 1.0

    for name in ("_pace_of", "_pace_of_training"):
        monkeypatch.setattr(sweep_run, name, trial)
    monkeypatch.setattr(sweep_run, "_seconds_to_start", lambda: 0.0)
    all_noises = grid(runners=(nc.Training(), nc.Moments()))
    one_noise = replace(all_noises, scenarios=tuple(replace(s, num_steps=19) for s in all_noises.scenarios[:2]))
    estimate_seconds([one_noise, all_noises], workers=1, progress=told.append)
    # Of groups of one and of two: training is timed for each, and of forecasts one tells what all of them take.
    assert [made.count((runner, "DP-SGD")) for runner in ("training", "moments")] == [2, 1]
    assert told == [number / len(made) for number in range(len(made) + 1)]


def test_what_is_prepared_once_for_a_problem_is_timed_once(monkeypatch):
    """A forecast that takes 2 seconds to prepare and 3 to solve, of each of two optimizers."""
    one = grid(runners=(nc.Moments(),))
    made = tasks.tasks_of([replace(one, scenarios=one.scenarios[first::2]) for first in (0, 1)], nc_root())
    tried, preparing = [], {}

    def seconds(work, **_):
        tried.append(len(work.__self__.scenarios))
        return 2.0 + 3.0 * tried[-1]

    monkeypatch.setattr(sweep_run, "_seconds_of", seconds)
    paces = [sweep_run._pace_of(task, preparing) for task in made]
    assert tried == [1, 2, 1]
    assert [pace(task.work) for pace, task in zip(paces, made, strict=True)] == pytest.approx([8.0, 8.0])


def test_compiling_does_not_count_in_an_estimate():
    took = iter([0.3, 0.01, 0.5])

    def work():
        time.sleep(next(took))

    assert _seconds_of(work, no_longer_to_compile=0.4) < 0.2  # the second time
    assert _seconds_of(work, no_longer_to_compile=0.4) >= 0.5  # is not tried


def test_random_trials_are_drawn_once_and_for_all(tmp_path):
    trials = TrialDistribution(TrialKind.POISSON, 5.0)
    asked = [grid(insecure_seeds=None, runners=(nc.Training(),))]
    tables = [run_sweep(asked, tmp_path / name, workers=0, trials=trials) for name in ("a", "a", "b", "c", "d")]
    pd.testing.assert_frame_equal(tables[0], tables[1])
    drawn = [len(table.drop_duplicates(["scenario", "seed"])) for table in tables]
    assert len(set(drawn)) > 1, "Four stores that drew the same number of trials: the draw is not random."
    ledger = Store(tmp_path / "a").ledger()
    assert ledger.trials == trials
    assert len(ledger.runs) == drawn[0]
    assert {key[0] for key in ledger.runs} <= {s.id for s in asked[0].scenarios}


@pytest.mark.parametrize("other", [TrialDistribution(TrialKind.POISSON, 12.0), None])
def test_trials_are_not_drawn_again_after_looking(tmp_path, other):
    asked = [grid(insecure_seeds=None, runners=(nc.Training(),))]
    drawn = TrialDistribution(TrialKind.GEOMETRIC, 2.0)
    run_sweep(asked, tmp_path / "store", workers=0, trials=drawn)
    before = Store(tmp_path / "store").ledger()
    with pytest.raises(ValueError, match=r"holds|drawing again"):
        run_sweep(asked, tmp_path / "store", workers=0, trials=other)
    with pytest.raises(ValueError, match=r"other cells|does not ask for"):
        run_sweep([grid(insecure_seeds=None, runners=(nc.Training(),), scenarios=asked[0].scenarios[:3])],
                  tmp_path / "store", workers=0, trials=drawn)  # fmt: skip
    assert Store(tmp_path / "store").ledger() == before


def test_no_trial_at_all_is_not_drawn_again(tmp_path, monkeypatch):
    asked = [grid(insecure_seeds=None, runners=(nc.Training(),))]
    with monkeypatch.context() as none_drawn:
        none_drawn.setattr(TrialDistribution, "draw", lambda self, rng: 0)
        table = run_sweep(asked, tmp_path / "store", workers=0, trials=TrialDistribution(TrialKind.POISSON, 1.0))
    assert table.empty
    with pytest.raises(ValueError, match="drawing again"):
        run_sweep(asked, tmp_path / "store", workers=0, trials=TrialDistribution(TrialKind.POISSON, 9.0))
    assert not Store(tmp_path / "store").ledger().runs


def test_a_grid_does_not_become_trials(tmp_path):
    asked = [grid(insecure_seeds=None, runners=(nc.Training(),))]
    run_sweep(asked, tmp_path / "store", workers=0)
    with pytest.raises(ValueError, match=r"does not ask for|drawing again"):
        run_sweep(asked, tmp_path / "store", workers=0, trials=TrialDistribution(TrialKind.GEOMETRIC, 2.0))


def test_runs_added_after_looking_have_no_price(tmp_path):
    small = grid(insecure_seeds=None, num_seeds=1, runners=(nc.Training(),))
    for question, grown in ((small, False), (small, False), (replace(small, num_seeds=2), True)):
        table = run_sweep([question], tmp_path / "store", workers=0)
        ledger = Store(tmp_path / "store").ledger()
        assert ledger.has_grown == grown
        chosen = select(table, metric="test_loss", price=Compose(), ledger=ledger)
        assert (chosen.epsilon_of_procedure == float("inf")) == grown


def test_a_store_without_its_ledger_counts_as_grown(tmp_path):
    question = grid(insecure_seeds=None, runners=(nc.Training(),))
    run_sweep([question], tmp_path / "store", workers=0)
    (tmp_path / "store" / "ledger.json").write_text("[]")
    run_sweep([question], tmp_path / "store", workers=0)
    assert Store(tmp_path / "store").ledger().has_grown


def test_what_one_table_cannot_tell_apart_is_refused(tmp_path):
    with pytest.raises(ValueError, match="put it into a list"):
        run_sweep(grid(), tmp_path / "store", workers=0)
    with pytest.raises(ValueError, match="in all questions or in none"):
        run_sweep([grid(), grid(insecure_seeds=None)], tmp_path / "store", workers=0)
    train, _ = nc.bundled("breast_cancer")
    first = grid().scenarios[0]
    other = replace(first, problem=nc.linear_model(train.rows(range(100))))
    assert other.problem.name == first.problem.name
    with pytest.raises(ValueError, match="different names"):
        run_sweep([grid(scenarios=(first, other))], tmp_path / "store", workers=0)
    assert not (tmp_path / "store").exists()


def nc_root():
    from noisecast.privacy.noise import RandomRoot

    return RandomRoot.from_insecure_seed(0)


def test_a_loss_of_the_script_itself_is_refused_before_a_worker_starts(monkeypatch, tmp_path):
    """A worker would look for it in its own program, and die of not finding it."""

    def loss(weights, example):
        return (weights @ example) ** 2

    monkeypatch.setattr(loss, "__module__", "__main__", raising=False)
    problem = nc.jax_model(loss, np.zeros(2, np.float32), np.ones((8, 2), np.float32))
    mechanism = nc.SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=nc.Poisson(0.5, 4))
    asked = nc.Scenario(problem=problem, mechanism=mechanism, optimizer=nc.DPSGD(learning_rate=0.1), num_steps=2)
    question = Question(scenarios=(asked,), runners=(nc.Training(),), record_at=(0,), num_seeds=1)
    with pytest.raises(ValueError, match=r"loss is defined in the script itself.* workers=0"):
        run_sweep([question], tmp_path / "store", workers=1)
    assert len(run_sweep([question], tmp_path / "here", workers=0))
