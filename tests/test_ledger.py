"""The privacy ledger: it counts before, it never counts less, and of two who want the last one gets it."""

import math
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant

from noisecast import DPSGD, Poisson, SampledGaussian, Scenario, bundled, composed_epsilon, linear_model
from noisecast.cli import main
from noisecast.cli.ledger_options import account_of
from noisecast.ledger import Account, PrivacyLedger, _composed
from noisecast.privacy.accounting import epsilon_spent
from noisecast.privacy.mechanism import Adjacency
from noisecast.privacy.sampling import Shuffled
from noisecast.privacy.tuning import OTHER_ORDERS, Run, settled_order
from noisecast.release import train

SAMPLER = Poisson.for_batch_size(64, 25_000)
MECHANISM = SampledGaussian(noise_multiplier=4.0, l2_clip_norm=0.5, sampler=SAMPLER)
DELTA = 1e-5


@pytest.fixture
def ledger(tmp_path):
    made = PrivacyLedger(tmp_path / "privacy.ledger", create=True)
    made.set_budget("reviews", epsilon=1.0, delta=DELTA)
    return made


def spend(ledger, run, mechanism=MECHANISM, num_steps=20_000):
    return ledger.spend("reviews", mechanism, num_steps, what="a model", run=run)


def bounds(order, *events):
    """dp_accounting's epsilons at the settled order with 0.8 of delta, and at others with shares of a tenth."""
    found = []
    for each, share in [(order, 0.8 * DELTA), *((other, 0.1 * DELTA / len(OTHER_ORDERS)) for other in OTHER_ORDERS)]:
        accountant = RdpAccountant([each])
        for event in events:
            accountant.compose(event)
        found.append(accountant.get_epsilon(share))
    return found


# --- what is counted --------------------------------------------------------------------------------------------------


def test_one_run_costs_what_the_accountant_says_and_two_at_least_as_much_as_composed(ledger):
    spend(ledger, "a")
    assert ledger.spent("reviews").epsilon == epsilon_spent(MECHANISM, num_steps=20_000, target_delta=DELTA).epsilon
    spend(ledger, "b")
    runs = [Run(MECHANISM, 20_000, name) for name in "ab"]
    planned = composed_epsilon(runs, target_delta=DELTA).epsilon
    # The second may depend on what the first released, which costs more than two runs planned beforehand.
    spent = ledger.spent("reviews").epsilon
    assert planned < spent < 1.0
    order = settled_order(MECHANISM, epsilon=1.0, delta=DELTA)
    assert spent == pytest.approx(min(bounds(order, MECHANISM.dp_event(40_000))), rel=1e-9)


def test_the_order_is_settled_by_the_first_run_and_its_budget(ledger):
    """What comes later may depend on what was released: neither another budget nor another noise moves it. Another
    order's bound, where it is far better, costs its share of delta.
    """
    spend(ledger, "a", num_steps=1_000)
    other = MECHANISM.with_noise_multiplier(1.0)
    ledger.set_budget("reviews", epsilon=30.0, delta=DELTA)
    spend(ledger, "b", other, num_steps=10_000)
    order = settled_order(MECHANISM, epsilon=1.0, delta=DELTA)
    assert order != settled_order(other, epsilon=30.0, delta=DELTA)
    runs = [Run(MECHANISM, 1_000, "a"), Run(other, 10_000, "b")]
    spent = ledger.spent("reviews").epsilon
    assert spent == composed_epsilon(runs, target_delta=DELTA, order=order).epsilon
    theirs = bounds(order, MECHANISM.dp_event(1_000), other.dp_event(10_000))
    assert spent == pytest.approx(min(theirs), rel=1e-9) and spent < theirs[0]
    assert composed_epsilon(runs, target_delta=DELTA).epsilon < spent


def test_the_settled_order_is_written_down(ledger):
    """In the first entry, under the hash of the chain: another version may settle otherwise, and changes nothing."""
    spend(ledger, "a")
    spend(ledger, "b")
    first, second = ledger.entries("reviews")
    assert first.settled_order == settled_order(MECHANISM, epsilon=1.0, delta=DELTA) and second.settled_order is None


def test_one_rule_for_sampled_runs_and_others(ledger):
    """After an unsampled run the next may be of either kind, as its output says: each bound has its share of delta."""
    full = SampledGaussian(noise_multiplier=20.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(25_000, 25_000))
    for run in "ab":
        spend(ledger, run, full, num_steps=5)
    order = settled_order(full, epsilon=1.0, delta=DELTA)
    exact = epsilon_spent(full, num_steps=10, target_delta=0.1 * DELTA).epsilon
    assert ledger.spent("reviews").epsilon == pytest.approx(min(exact, *bounds(order, full.dp_event(10))), rel=1e-6)
    spend(ledger, "c", num_steps=1_000)
    mixed = bounds(order, full.dp_event(10), MECHANISM.dp_event(1_000))
    assert ledger.spent("reviews").epsilon == pytest.approx(min(mixed), rel=1e-6)


def test_a_budget_that_has_room_for_no_second_run_says_so(ledger):
    spend(ledger, "a", num_steps=150_000)
    assert 0.9 < ledger.spent("reviews").epsilon < 1.0
    with pytest.raises(ValueError, match="by itself: nothing fits but into a larger budget"):
        spend(ledger, "b", MECHANISM.with_noise_multiplier(1000.0), num_steps=1)


def test_a_budget_lasts_nearly_as_long_as_for_runs_that_were_planned(ledger):
    """Of runs like the first, by Renyi divergences at the best of all orders: at least nine tenths of them."""

    def planned(num_steps):
        return RdpAccountant().compose(MECHANISM.dp_event(num_steps)).get_epsilon(DELTA)

    fit = next(count for count in range(1, 200) if planned(2_000 * (count + 1)) > 1.0)
    order = settled_order(MECHANISM, epsilon=1.0, delta=DELTA)
    runs = [Run(MECHANISM, 2_000, str(number)) for number in range(math.floor(0.9 * fit))]
    assert composed_epsilon(runs, target_delta=DELTA, order=order).epsilon < 1.0


def test_a_run_that_would_exceed_the_budget_is_refused_and_leaves_no_entry(ledger):
    spend(ledger, "a")
    with pytest.raises(ValueError, match=r"of which 0\.312.* is spent; with this run it would be 1\.3"):
        spend(ledger, "b", num_steps=200_000)
    assert len(ledger.entries("reviews")) == 1
    spend(ledger, "b")  # one that fits still does


def test_without_noise_nothing_fits(ledger):
    with pytest.raises(ValueError, match="it would be inf"):
        spend(ledger, "a", mechanism=MECHANISM.with_noise_multiplier(0.0))


def test_a_resumed_run_is_counted_once_and_only_if_it_is_the_same(ledger):
    number = spend(ledger, "a")
    assert spend(ledger, "a") == number and len(ledger.entries("reviews")) == 1
    with pytest.raises(ValueError, match="this run with other settings"):
        spend(ledger, "a", num_steps=20_001)


def test_guarantees_of_different_neighbours_do_not_add_up(ledger):
    spend(ledger, "a")
    other = SampledGaussian(
        noise_multiplier=50.0, l2_clip_norm=0.5, sampler=Shuffled(64, 25_000), adjacency=Adjacency.REPLACE_ONE
    )
    with pytest.raises(ValueError, match="these do not add up"):
        spend(ledger, "b", mechanism=other, num_steps=391)


def test_a_budget_may_grow_but_not_fall_below_what_is_spent(ledger):
    spend(ledger, "a")
    with pytest.raises(ValueError, match=r"Expected a budget of at least the ε = 0\.312"):
        ledger.set_budget("reviews", epsilon=0.1, delta=DELTA)
    ledger.set_budget("reviews", epsilon=8.0, delta=DELTA)
    assert ledger.budget("reviews").epsilon == 8.0
    spend(ledger, "b", num_steps=200_000)


@pytest.mark.parametrize(
    "epsilon, delta", [(0, 1e-5), (-1, 1e-5), (float("nan"), 1e-5), (float("inf"), 1e-5), (1, 0), (1, 1)]
)
def test_a_budget_out_of_range_is_refused(ledger, epsilon, delta):
    with pytest.raises(ValueError, match="Expected 0 <"):
        ledger.set_budget("reviews", epsilon=epsilon, delta=delta)


def test_budgets_are_entries_too_and_all_of_them_are_kept(ledger):
    first = spend(ledger, "a")
    ledger.set_budget("letters", epsilon=2.0, delta=1e-6)
    ledger.set_budget("reviews", epsilon=3.0, delta=DELTA)
    second = spend(ledger, "b")
    assert [(each.number, each.budget) for each in ledger.budgets("reviews")] == [(1, (1.0, DELTA)), (4, (3.0, DELTA))]
    assert (first, second) == (2, 5) == tuple(entry.number for entry in ledger.entries("reviews"))
    assert ledger.budget("reviews") == (3.0, DELTA) and ledger.budgets("nobody") == ()


# --- the file ---------------------------------------------------------------------------------------------------------


def test_entries_survive_and_are_its_owners_alone(ledger):
    spend(ledger, "a")
    again = PrivacyLedger(ledger.path)
    assert [entry.mechanism for entry in again.entries("reviews")] == [MECHANISM]
    assert ledger.path.stat().st_mode & 0o077 == 0


def test_a_run_between_replaced_records_is_written_down_at_its_own_price(ledger):
    mechanism = SampledGaussian(
        noise_multiplier=16.0, l2_clip_norm=0.5, sampler=Shuffled(64, 25_000), adjacency=Adjacency.REPLACE_ONE
    )
    spend(ledger, "a", mechanism, num_steps=391)
    again = PrivacyLedger(ledger.path)
    assert again.entries("reviews")[0].mechanism == mechanism
    expected = epsilon_spent(mechanism, num_steps=391, target_delta=DELTA).epsilon
    assert again.spent("reviews").epsilon == pytest.approx(expected)


def test_a_budget_that_is_exceeded_nevertheless_is_seen_by_check(ledger, monkeypatch):
    """As by a version that counted less: entries are whole, their sum is too large."""
    with monkeypatch.context() as patched:
        patched.setattr("noisecast.ledger._composed", lambda rows, dataset, delta, *more: _composed([], dataset, delta))
        for run in "abcde":
            spend(ledger, run, num_steps=100_000)
    [trouble] = PrivacyLedger(ledger.path).check()
    assert "'reviews' has spent" in trouble and trouble.endswith("more than its 1.")


def test_entries_can_neither_be_changed_nor_removed_by_sql(ledger):
    spend(ledger, "a")
    for statement in ("DELETE FROM entries", "UPDATE entries SET content = '{}'"):
        with sqlite3.connect(ledger.path) as connection, pytest.raises(sqlite3.IntegrityError):
            connection.execute(statement)


@pytest.mark.parametrize(
    "tampering",
    [
        "UPDATE entries SET content = replace(content, '20000', '20') WHERE number = 2",
        "DELETE FROM entries WHERE number = 2",
        "UPDATE entries SET dataset = 'other' WHERE number = 2",
    ],
)
def test_whoever_alters_it_nevertheless_is_seen(ledger, tampering):
    spend(ledger, "a")
    spend(ledger, "b")
    assert ledger.check() == []
    with sqlite3.connect(ledger.path) as connection:
        connection.execute("DROP TRIGGER entries_stay")
        connection.execute("DROP TRIGGER entries_remain")
        connection.execute(tampering)
    assert "altered" in ledger.check()[0]


def alter(ledger, *statements):
    with sqlite3.connect(ledger.path) as connection:
        for trigger in ("entries_stay", "entries_remain"):
            connection.execute(f"DROP TRIGGER {trigger}")
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize(
    "tampering, said",
    [
        ("UPDATE entries SET content = replace(content, '20000', '20') WHERE number = 2", "Entry 2 cannot be read"),
        ("UPDATE entries SET kind = 'note' WHERE number = 2", "Entry 2 cannot be read: it was altered"),
        ("UPDATE entries SET content = x'00' WHERE number = 3", "Entry 3 is not text: it was altered"),
        ("DELETE FROM entries WHERE number = 1", "Entry 1 is missing: the ledger was altered"),
        ("DELETE FROM entries WHERE number = 2", "Entry 2 is missing: the ledger was altered"),
    ],
)
def test_of_a_ledger_that_was_altered_nothing_is_spent_or_shown(ledger, capsys, tampering, said):
    spend(ledger, "a")
    spend(ledger, "b")
    alter(ledger, tampering)
    asked = [
        lambda: spend(ledger, "c", num_steps=1),
        lambda: spend(ledger, "b"),
        lambda: ledger.set_budget("reviews", epsilon=9.0, delta=DELTA),
        lambda: ledger.spent("reviews"),
        lambda: ledger.spent_with("reviews", MECHANISM, 1),
        lambda: account_of(ledger.path, "reviews"),
    ]
    content = rows_of(ledger)
    for ask in asked:
        with pytest.raises(ValueError, match=f"^{said}"):
            ask()
    assert rows_of(ledger) == content
    for action in ("show", "check"):
        assert main(["ledger", action, str(ledger.path)]) == 2
        printed = capsys.readouterr()
        assert said in printed.err and len(printed.err.splitlines()) == 1 and printed.out == ""


def rows_of(ledger):
    with sqlite3.connect(ledger.path) as connection:
        return connection.execute("SELECT * FROM entries").fetchall()


@pytest.mark.parametrize("name", ["", " ", " people", "people ", "peo\nple", "people\u200b", "\u00a0people", "p" * 201])
def test_a_name_that_looks_like_another_has_no_account(ledger, name):
    sentence = "Expected a name for the data set, of 1 to 200 printable letters without blanks around it"
    with pytest.raises(ValueError, match=sentence):
        ledger.set_budget(name, epsilon=1.0, delta=DELTA)
    with pytest.raises(ValueError, match=sentence):
        ledger.spend(name, MECHANISM, 1, what="a model", run="a")
    assert ledger.datasets == ("reviews",)


def test_a_name_is_one_account_however_its_letters_are_composed(ledger):
    """A Mac writes é as two code points in names of files, a keyboard as one: two budgets would be spent."""
    composed, apart = "caf\u00e9", "cafe\u0301"
    ledger.set_budget(apart, epsilon=8.0, delta=DELTA)
    ledger.set_budget(composed, epsilon=9.0, delta=DELTA)
    ledger.spend(apart, MECHANISM, 1, what="a model", run="a")
    assert ledger.datasets == ("reviews", composed) and ledger.budget(apart).epsilon == 9.0
    assert len(ledger.entries(composed)) == 1 and ledger.spent(composed).epsilon > 0
    assert {row[2] for row in rows_of(ledger)} <= {"reviews", composed} and not ledger.check()


@pytest.mark.parametrize(
    "name, epsilon, delta",
    [("people", "0", "1e-5"), ("people", "1", "1"), ("people", "nan", "1e-5"), (" ", "1", "0.1")],
)
def test_a_budget_that_is_refused_makes_no_file(tmp_path, capsys, name, epsilon, delta):
    assert main(["ledger", "budget", str(tmp_path / "l"), name, "--epsilon", epsilon, "--delta", delta]) == 2
    assert capsys.readouterr().err.startswith("Expected ") and list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_with_the_way_out_and_what_it_left_is_made_whole_by_the_next_budget(
    tmp_path, monkeypatch, capsys
):
    path = tmp_path / "l"
    budget = ["ledger", "budget", str(path), "people", "--epsilon", "1", "--delta", "1e-5"]
    for said in ("disk I/O error", "database or disk is full"):
        with monkeypatch.context() as full:
            full.setattr(sqlite3, "connect", Mock(side_effect=sqlite3.OperationalError(said)))
            assert main(budget) == 2
        told = capsys.readouterr().err
        assert f"({said}): make room on the disk" in told and f"move {path}, {path}-wal and {path}-shm away" in told
    assert path.stat().st_size == 0
    assert main(["ledger", "show", str(path)]) == 2
    assert "is not a ledger: it is empty; set its first budget" in capsys.readouterr().err
    assert main(budget) == 0 and PrivacyLedger(path).check() == []


def test_what_is_no_ledger_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"Expected a ledger at .*missing, found none; make one"):
        PrivacyLedger(tmp_path / "missing")
    with pytest.raises(ValueError, match="found a folder"):
        PrivacyLedger(tmp_path, create=True)
    (tmp_path / "text").write_text("not a database, but long enough to be taken for one" * 100)
    with pytest.raises(ValueError, match="text is not a ledger"):
        PrivacyLedger(tmp_path / "text")
    with sqlite3.connect(tmp_path / "other") as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")
    with pytest.raises(ValueError, match="other is not a ledger"):
        PrivacyLedger(tmp_path / "other", create=True)


def test_a_data_set_without_a_budget_is_refused(ledger):
    with pytest.raises(ValueError, match=r"Expected a data set with a budget \(here: reviews\), got 'letters'"):
        ledger.spend("letters", MECHANISM, 1, what="a model", run="a")


# --- two at once, and crashes -----------------------------------------------------------------------------------------


def _spend_when_told(path, run, start, results):
    start.wait()
    try:
        spend(PrivacyLedger(path), run, num_steps=60_000)
        results.put("spent")
    except ValueError as error:
        results.put(str(error))


def test_of_two_processes_that_want_the_last_of_a_budget_exactly_one_gets_it(ledger):
    # Of 60,000 steps one run costs 0.57, two 0.91 and three 1.13 of the budget of 1.
    spend(ledger, "before", num_steps=60_000)
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_spend_when_told, args=(ledger.path, f"r{i}", start, results)) for i in (0, 1)]
    for process in processes:
        process.start()
    start.set()
    said = sorted(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    assert said[1] == "spent" and said[0].startswith("The budget of 'reviews' is ε = 1")
    assert len(ledger.entries("reviews")) == 2 and ledger.spent("reviews").epsilon <= 1.0


def iris_scenario():
    data, _ = bundled("iris")
    sampler = Poisson.for_batch_size(12, data.num_examples)
    mechanism = SampledGaussian(noise_multiplier=4.0, l2_clip_norm=1.0, sampler=sampler)
    return Scenario(
        problem=linear_model(data), mechanism=mechanism, optimizer=DPSGD(learning_rate=0.1), num_steps=50,
        target_delta=DELTA,
    )  # fmt: skip


def test_training_writes_itself_down_before_its_first_step(tmp_path):
    ledger = PrivacyLedger(tmp_path / "privacy.ledger", create=True)
    scenario = iris_scenario()
    ledger.set_budget("iris", epsilon=1.5 * scenario.privacy_spent.epsilon, delta=DELTA)
    seen = []

    def watch(moment):
        seen.append((moment.step, len(ledger.entries("iris"))))

    train(scenario, account=Account(ledger, "iris"), watch=watch)
    assert seen[0][0] >= 1 and all(count == 1 for _, count in seen)
    [entry] = ledger.entries("iris")
    assert (entry.mechanism, entry.num_steps) == (scenario.mechanism, 50)
    while True:  # until the budget is used up: then nothing is trained
        try:
            train(scenario, account=Account(ledger, "iris"))
        except ValueError as error:
            assert "with this run it would be" in str(error)
            break
    assert ledger.spent("iris").epsilon <= ledger.budget("iris").epsilon


@pytest.mark.parametrize("is_begun", [False, True])
def test_what_a_ledger_that_does_not_answer_leaves(tmp_path, monkeypatch, is_begun):
    """A run that was begun can go on; of one that was refused nothing is left."""
    ledger, checkpoint = PrivacyLedger(tmp_path / "privacy.ledger", create=True), tmp_path / "checkpoint"
    ledger.set_budget("iris", epsilon=100.0, delta=DELTA)
    account = Account(ledger, "iris")

    def stop(moment):
        raise KeyboardInterrupt

    def locked(*args, **named):
        raise ValueError("held by another process")

    if is_begun:
        with pytest.raises(KeyboardInterrupt):
            train(iris_scenario(), account=account, checkpoint=checkpoint, watch=stop)
    with monkeypatch.context() as patched:
        patched.setattr(PrivacyLedger, "spend", locked)
        with pytest.raises(ValueError, match="held by another"):
            train(iris_scenario(), account=account, checkpoint=checkpoint, resume=is_begun)
    assert checkpoint.exists() == is_begun
    model = train(iris_scenario(), account=account, checkpoint=checkpoint, resume=is_begun)
    assert np.isfinite(model.params).all() and len(ledger.entries("iris")) == 1


def test_a_known_seed_has_no_place_in_a_ledger(tmp_path):
    ledger = PrivacyLedger(tmp_path / "privacy.ledger", create=True)
    ledger.set_budget("iris", epsilon=100.0, delta=DELTA)
    with pytest.raises(ValueError, match="without insecure seed"):
        train(iris_scenario(), account=Account(ledger, "iris"), insecure_seed=0)
    assert ledger.entries("iris") == ()


CHILD = """
    import sys
    sys.path.insert(0, {tests!r})
    from test_ledger import iris_scenario
    from noisecast.ledger import Account, PrivacyLedger
    from noisecast.release import train
    def watch(moment):
        print("step", moment.step, flush=True)
        import time; time.sleep(0.3)
    train(iris_scenario(), account=Account(PrivacyLedger({path!r}), "iris"), watch=watch, checkpoint={checkpoint!r})
"""


@pytest.mark.slow
def test_a_killed_run_is_spent_and_its_resumption_is_not_spent_again(tmp_path):
    path, checkpoint = tmp_path / "privacy.ledger", tmp_path / "checkpoint"
    ledger = PrivacyLedger(path, create=True)
    ledger.set_budget("iris", epsilon=100.0, delta=DELTA)
    code = CHILD.format(tests=str(Path(__file__).parent), path=str(path), checkpoint=str(checkpoint))
    for number, kill in enumerate((signal.SIGKILL, signal.SIGTERM), start=1):
        child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stdout.readline().startswith("step")
        os.kill(child.pid, kill)
        child.wait()
        assert len(ledger.entries("iris")) == number  # both runs count, though neither released a model
        assert checkpoint.exists()
        if number == 1:
            checkpoint.unlink()  # given up: a run of its own begins
    model = train(iris_scenario(), account=Account(ledger, "iris"), checkpoint=checkpoint, resume=True)
    assert np.isfinite(model.params).all() and len(ledger.entries("iris")) == 2
