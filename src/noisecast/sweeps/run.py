"""Run a sweep: what is not in its store yet is computed and added, group by group."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from noisecast import engines
from noisecast.files import reason_of
from noisecast.privacy.noise import Purpose, RandomRoot, key_for
from noisecast.privacy.tuning import TrialDistribution
from noisecast.question import Question
from noisecast.runners import Training
from noisecast.scenario import check_constant_rates
from noisecast.sweeps.ledger import Ledger, draw_trials, ledger_of
from noisecast.sweeps.pace import Pace
from noisecast.sweeps.store import Finished, Store
from noisecast.sweeps.tasks import Task, code_fingerprint, tasks_of
from noisecast.sweeps.workers import Done, in_processes, in_this_process, on_ray

LONG_TRIAL = 20.0  # seconds: beside it what is prepared once is little, and a second trial is not worth its time
_SYNTHETIC = ("quadratic", "quartic")  # named by their shape: figures have many of one name, told apart by settings
# Told the share of the work that is done, and the seconds left (None: not known yet).
SweepProgress = Callable[[float, float | None], None]


def run_sweep(
    questions: Sequence[Question],
    store: str | Path,
    *,
    workers: int | None = None,
    ray: str | None = None,
    trials: TrialDistribution | None = None,
    among: Sequence[Question] = (),
    may_hold_more: bool = False,
    beside: Sequence[str | Path] = (),
    progress: SweepProgress = lambda share, seconds_left: None,
) -> pd.DataFrame:
    """Answer every question, and keep the answers in `store`: run it again, and it goes on where it ended.

    Scenarios that share a compiled call are computed together, one such group a task. Killing workers, this process or
    the machine loses the groups in flight and nothing else. Diverged runs are rows like others.

    Args:
      questions: of the sweep; runs that they share are computed once.
      store: folder for the shards; a new one, or one that this sweep (perhaps a smaller one before) has begun.
      workers: processes; None: one a core. 0: none, all is done in this process.
      ray: address of a Ray cluster to run on instead ("auto": the one this machine belongs to; "local": its own).
      trials: run a random number of trials instead, each of a cell drawn among the questions' (`ledger.draw_trials`).
      among: the sweep of which the questions are a part, where they are: the store may hold its other runs as well.
      may_hold_more: whether the store may hold any other runs of this code: of a search that decides as it goes.
      beside: other stores: what they have of this (runs of seeds that everybody knows, forecasts) is taken over.
      progress: told the share that is done and the seconds left.
    Returns: all rows of the store (`noisecast.table`), in an order that does not depend on who finished first.
    Raises:
      ValueError: one sentence: nothing to answer, a store of another sweep, a damaged shard, groups that failed.
      OSError: the disk is full; every group finished before is in the store.

    >>> import tempfile, noisecast as nc
    >>> mechanism = nc.SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=nc.Stream(8))
    >>> problem = nc.quadratic([1.0, 2.0], 0.1, example_noise_std=0.1)
    >>> asked = nc.Scenario(problem=problem, mechanism=mechanism, optimizer=nc.DPSGD(learning_rate=0.1), num_steps=10)
    >>> question = nc.Question(scenarios=(asked,), runners=(nc.Training(),), record_at=(0,), num_seeds=3)
    >>> table = run_sweep([question], Path(tempfile.mkdtemp(), "store"), workers=0)
    >>> table[table["metric"] == "loss"].groupby("step")["value"].count().to_dict()
    {0: 3, 10: 3}
    """
    _check_questions(questions)
    if workers is not None and not (isinstance(workers, int) and workers >= 0):
        raise ValueError(f"Expected workers to be a whole number >= 0, got {workers}.")
    if workers is not None and ray is not None:
        raise ValueError(f"Expected workers or ray, got workers {workers} and ray '{ray}': it has cores of its own.")
    with Store.open_for_writing(store) as opened:
        ledger = ledger_of(questions)
        if trials is not None:
            drawn_from, questions = questions, draw_trials(questions, trials, _rng_of_trials(opened.root()))
            ledger = ledger_of(questions, trials=trials, drawn_from=drawn_from)
        tasks = tasks_of(questions, opened.root())
        if not tasks and trials is None:
            raise ValueError("Expected at least one scenario that one of the runners can answer, got none.")
        _check_own(opened, [*tasks, *tasks_of(among, opened.root())], may_hold_more)
        before = opened.ledger_before()
        if opened.has_begun:  # also without a shard: no trial at all is what may have been drawn
            _check_trials(opened, before, ledger)
        if opened.finished:
            ledger = ledger.after(before)
        opened.write_ledger(ledger)
        with _a_full_disk_said(opened):
            for folder in beside:
                opened.take_over(Store(folder), tasks)
        done = opened.cells
        left = [rest for task in tasks if (rest := task.without(done)) is not None]
        pace = Pace(left, at_once=_at_once(workers), share_done=1 - _share(left, tasks))
        progress(pace.share, None)
        failed = _add_all(opened, _computed(left, workers, ray), pace, progress)
        opened.write_manifest({"code": code_fingerprint(), "groups": len(tasks)})
        if failed:
            others = f"; the others are in {store}, run again for these alone" if len(failed) < len(tasks) else ""
            raise ValueError(f"{len(failed)} of {len(tasks)} groups failed{others}. The first: {failed[0].why}")
        return opened.read()


def estimate_seconds(
    questions: Sequence[Question],
    *,
    workers: int | None = None,
    done: AbstractSet[str] = frozenset(),
    progress: Callable[[float], None] = lambda share: None,
) -> float:
    """Wall time of a sweep on this machine, from a second's trial of each kind of run; forecasts by solving one.

    Starting the workers counts, compiling in them does not.

    Args:
      questions: of the sweep.   workers: as for `run_sweep`.   progress: told the share of the trials that are made.
      done: ids of runs that need not be computed (`Store.cells`, `cells_of`).
    Returns: seconds; a rough number, for a person who decides whether to wait.
    Raises: ValueError: questions that `run_sweep` refuses.
    """
    _check_questions(questions)
    tasks = [left for task in tasks_of(questions, RandomRoot.from_os_entropy()) if (left := task.without(done))]
    kinds: dict[tuple, Task] = {}
    for task in tasks:
        kinds.setdefault(_kind_of_trial(task), task)
    paces: dict[tuple, Callable[[int], float]] = {}
    preparing: dict[tuple, float] = {}
    for number, (kind, task) in enumerate(kinds.items()):
        progress(number / len(kinds))
        paces[kind] = _pace_of_training(task) if isinstance(task.runner, Training) else _pace_of(task, preparing)
    progress(1.0)
    seconds = sum(paces[_kind_of_trial(task)](task.work) for task in tasks)
    starting = 0.0 if workers == 0 else _seconds_to_start()
    return starting + seconds / max(min(_at_once(workers), len(tasks)), 1)


def cells_of(questions: Sequence[Question]) -> set[str]:
    """Ids of the runs of questions with seeds that everybody knows, by which a store and a sweep know them."""
    known = [question for question in questions if question.insecure_seeds is not None]
    return {cell for task in tasks_of(known, RandomRoot.from_os_entropy()) for cell in task.cells}


def _at_once(workers: int | None) -> int:
    """Tasks side by side; without workers, in this process, one after another."""
    return max(workers, 1) if workers is not None else os.cpu_count() or 1


def _seconds_to_start() -> float:
    """Of a worker, until it can begin: the libraries, which a process of its own reads anew."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import noisecast.runners"], check=False, capture_output=True)
    return time.monotonic() - began


def _kind_of_trial(task: Task) -> tuple:
    """Training is as fast as groups are large; of the others' kinds one trial tells the pace for every size."""
    return task.kind if isinstance(task.runner, Training) else task.kind[:-1]


def _pace_of_training(task: Task) -> Callable[[int], float]:
    """Seconds that such an amount of work takes: some steps measured, and one evaluation."""
    run = engines.start(task.scenarios, repeats=task.repeats, root=task.root)
    last = task.scenarios[0].num_steps
    run.advance(min(16, last))  # compiled now
    stretch, seconds, steps = 16, 0.0, 1
    while seconds < 0.5 and run.step < last:
        before, began = run.step, time.monotonic()
        run.advance(min(before + stretch, last))
        run.block_until_ready()
        seconds, steps = time.monotonic() - began, run.step - before
        stretch *= 2
    whole = seconds / steps * last + _seconds_of(run.evaluate, no_longer_to_compile=60.0) * len(task.record_at)
    return lambda work: work * whole / task.work


def _pace_of(task: Task, preparing: dict[tuple, float]) -> Callable[[int], float]:
    """The same for another runner: what one scenario takes, and what one more adds.

    Args:
      preparing: seconds of what a runner does once for a problem, whatever the optimizer; found where it is not there.
    """
    scenarios = task.scenarios
    if task.repeats:
        scenarios = tuple(replace(each, num_steps=min(64, each.num_steps)) for each in scenarios)
    parts = [replace(task, scenarios=some, record_at=(some[0].num_steps,)) for some in (scenarios[:1], scenarios[:2])]
    one, two = (part.work for part in parts)
    one_takes = _seconds_of(parts[0].run, no_longer_to_compile=3.0)
    if two == one or one_takes > LONG_TRIAL:
        return lambda work: one_takes * work / one
    place = task.runner, scenarios[0].problem.fingerprint
    if place not in preparing:
        more = max(_seconds_of(parts[1].run, no_longer_to_compile=3.0) - one_takes, 0.0) / (two - one)
        preparing[place] = max(one_takes - more * one, 0.0)
    once = min(preparing[place], one_takes)
    return lambda work: once + (one_takes - once) * work / one


def _seconds_of(work: Callable[[], Any], *, no_longer_to_compile: float) -> float:
    """Of the second time, when everything is compiled; of the first, where compiling cannot be what took so long."""
    seconds = 0.0
    for _ in range(2):
        began = time.monotonic()
        work()
        seconds = time.monotonic() - began
        if seconds > no_longer_to_compile:
            break
    return seconds


def _rng_of_trials(root: RandomRoot) -> np.random.Generator:
    """Of the store's secret: a sweep that is run again goes on with the trials that were drawn, for good."""
    key = key_for(Purpose.TRIALS, root=root, repeat=0)
    return np.random.default_rng(int.from_bytes(key, "big"))


def _share(some: Sequence[Task], all_of_them: Sequence[Task]) -> float:
    return sum(task.work for task in some) / max(sum(task.work for task in all_of_them), 1)


def _check_questions(questions: Sequence[Question]) -> None:
    """What rows of one table could not tell apart."""
    if isinstance(questions, Question):
        raise ValueError("Expected a list of questions, got one question; put it into a list.")
    if len({question.insecure_seeds is None for question in questions}) > 1:
        raise ValueError("Expected insecure seeds in all questions or in none, got both; sweep them apart.")
    prints: dict[str, set[str]] = {}
    for scenario in (scenario for question in questions for scenario in question.scenarios):
        # Its tables do not say how rates change, and what is chosen from them would be written down without it.
        check_constant_rates([scenario], "in a sweep")
        prints.setdefault(scenario.problem.name, set()).add(scenario.problem.fingerprint)
    for name, found in prints.items():
        if len(found) > 1 and not name.startswith(_SYNTHETIC):
            raise ValueError(
                f"Expected problems of different names, got {len(found)} called '{name}' with different data: give the "
                "files different names, or sweep them apart."
            )


def _check_own(store: Store, tasks: Sequence[Task], may_hold_more: bool) -> None:
    """A store is only ever added to by the sweep that it is of."""
    asked = {cell for task in tasks for cell in task.cells}
    strangers = {name: f for name, f in store.finished.items() if not asked.issuperset(f.cells)}
    if may_hold_more:
        strangers = {name: f for name, f in strangers.items() if f.code != code_fingerprint()}
    if not strangers:
        return
    runs = sum(len(set(f.cells) - asked) or len(f.cells) for f in strangers.values())
    first, others = min(strangers), len(strangers) - 1
    where = f"shards/{first}" + (f" and {others} other{'s' * (others > 1)}" if others else "")
    data = {task.scenarios[0].problem.fingerprint for task in tasks}
    if any(f.code != code_fingerprint() for f in strangers.values()):
        why = "they were computed by other code (another version of noisecast or of a library under it)"
    elif any(not data.issuperset(f.data) for f in strangers.values()):
        why = "they are about other data"
    else:
        why = "their settings, seeds, recorded steps or key are others"
    raise ValueError(
        f"{store.folder} holds {runs} runs that this sweep does not ask for, in {where}: {why}. Nothing was changed; "
        "use a new folder, or put back what has changed; a shard of another store is to be moved away."
    )


def _check_trials(store: Store, before: Ledger | None, ledger: Ledger) -> None:
    """Trials are drawn once: whoever looks at them and then draws others does something that no theorem covers."""
    if before is None:
        if ledger.trials is not None:
            raise ValueError(f"Expected the ledger of {store.folder}, which is lost or damaged; use a new folder.")
        return
    if (before.trials, before.cells) != (ledger.trials, ledger.cells):
        one, other = (_in_words(each.trials) for each in (before, ledger))
        what = f"{one}, got {other}" if one != other else f"{one} among {len(before.cells)} cells, got other cells"
        raise ValueError(
            f"Expected what {store.folder} has drawn, {what}. Use a new folder: drawing again after looking is not "
            "covered by any price."
        )


def _in_words(trials: TrialDistribution | None) -> str:
    return "a grid without trials" if trials is None else f"{trials.kind} trials of mean {trials.mean:g}"


def _computed(tasks: Sequence[Task], workers: int | None, ray: str | None) -> Iterator[Done]:
    tasks = _in_order(tasks)
    if not tasks:
        return iter(())
    if ray is not None:
        return on_ray(tasks, ray)
    if workers == 0:
        return in_this_process(tasks)
    return in_processes(tasks, workers or os.cpu_count() or 1)


def _in_order(tasks: Sequence[Task]) -> list[Task]:
    """The longest first, so that no core waits at the end for one that has begun late.

    Of those that are as long, kinds take turns: how long each kind takes is then known early, and so the time left.
    """
    seen: Counter[tuple] = Counter()
    keyed = []
    for task in tasks:
        keyed.append((-task.work * task.scenarios[0].problem.num_params, seen[task.kind]))
        seen[task.kind] += 1
    return [tasks[i] for i in sorted(range(len(tasks)), key=keyed.__getitem__)]


def _add_all(store: Store, computed: Iterator[Done], pace: Pace, progress: SweepProgress) -> list[Done]:
    """Every finished group into the store as it comes; the failed ones back."""
    failed, stored = [], 0
    try:
        for done in computed:
            if done.table is None:
                failed.append(done)
            else:
                with _a_full_disk_said(store):
                    store.add(done.table, _about(done))
                stored += 1
            pace.finished(done.task, done.seconds)
            progress(pace.share, pace.seconds_left)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interrupted(stored, failed, store.folder)) from None
    finally:
        close: Any = getattr(computed, "close", None)
        if close is not None:
            close()
    return failed


def _interrupted(stored: int, failed: Sequence[Done], folder: Path) -> str:
    more = "1 group more is" if stored == 1 else f"{stored} groups more are"
    again = f" {len(failed)} failed, the first: {failed[0].why}" if failed else ""
    return f"Interrupted; {more} in {folder}: the same command goes on.{again}"


@contextmanager
def _a_full_disk_said(store: Store) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"{reason_of(error)}: could not write the next group; all {len(store.cells)} finished runs are "
            "safe, and the same command goes on",
            str(store.folder),
        ) from None


def _about(done: Done) -> Finished:
    task = done.task
    return Finished(
        cells=task.cells,
        code=code_fingerprint(),
        data=(task.scenarios[0].problem.fingerprint,),
        seconds=round(done.seconds, 3),
        origin=task.origin,
    )
