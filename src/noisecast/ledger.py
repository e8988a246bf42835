"""The privacy ledger: what has been spent on each data set, written down before it is spent.

One SQLite file for any number of data sets, each with a budget (epsilon, delta). An entry is a mechanism and its number
of steps; what a data set has spent is their composition, not their sum (`privacy.tuning.composed_epsilon`, for runs
that may depend on earlier ones, at the Renyi order that the budget and the first run settle). Budgets that were set and
runs are entries, numbered from 1 through the whole file, so the first run of a new ledger is entry 2. Entries are added
and never changed: each carries the hash of all before it, and who reads them sees one that was altered or cut out of
the middle; of such a ledger nothing more is told or spent.

The entry comes first and the first noisy step after it, in one transaction that asks whether the budget allows it. So
a crash in between counts as spent, though nothing was released, and of two processes that want the last of a budget one
is refused. A run that is resumed from its checkpoint is the same run and is not counted again.
"""

import math
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from noisecast import __version__
from noisecast.files import why_unwritable
from noisecast.ledger_entries import (
    FORMAT,
    TABLES,
    Budget,
    BudgetEntry,
    Entry,
    Row,
    account_of,
    append,
    damage_of,
    read_rows,
)
from noisecast.privacy.accounting import PrivacySpent, epsilon_text
from noisecast.privacy.calibration import least_noise
from noisecast.privacy.composition import NONE
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.tuning import Run, composed_epsilon, settled_order

SECONDS_TO_WAIT = 120.0  # for another process that is deciding whether its own run fits


class Account(NamedTuple):
    """One data set of a ledger."""

    ledger: "PrivacyLedger"
    dataset: str


def check_budget(dataset: str, *, epsilon: float, delta: float) -> None:
    """Whether this could be a budget, asked before there is a ledger. Raises: ValueError: a name or number unfit."""
    _check_name(dataset)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"Expected 0 < epsilon < inf, got {epsilon}.")
    if not 0 < delta < 1:
        raise ValueError(f"Expected 0 < delta < 1, got {delta}.")


class PrivacyLedger:
    """A ledger file, to be spent from.

    Args:
      path: of the file; it must exist unless `create` is given.   create: make a new one where there is none.
    Raises: ValueError: no file, or not a ledger.

    >>> import tempfile
    >>> from noisecast.privacy.sampling import Poisson
    >>> ledger = PrivacyLedger(Path(tempfile.mkdtemp(), "privacy.ledger"), create=True)
    >>> ledger.set_budget("reviews", epsilon=1.0, delta=1e-5)
    >>> mechanism = SampledGaussian(noise_multiplier=4.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, 25_000))
    >>> for run in ("first", "second"):
    ...     number = ledger.spend("reviews", mechanism, 20_000, what="a model", run=run)
    ...     print(number, round(ledger.spent("reviews").epsilon, 2))
    2 0.31
    3 0.62
    >>> ledger.spend("reviews", mechanism, 200_000, what="a model", run="third")
    Traceback (most recent call last):
    ValueError: The budget of 'reviews' is ε = 1 at δ = 1e-05, of which ... is spent; with this run it would be ....  \
Spend less: more noise, or fewer steps.
    """

    def __init__(self, path: str | Path, *, create: bool = False) -> None:
        self.path = Path(path)
        if not self.path.exists() and not create:
            raise ValueError(
                f"Expected a ledger at {self.path}, found none; make one by setting a budget: "
                f"noisecast ledger budget {self.path} DATASET --epsilon 8 --delta 1e-5"
            )
        if self.path.is_dir():
            raise ValueError(f"Expected a ledger at {self.path}, found a folder; name a file.")
        if create and not self.path.exists() and (reason := why_unwritable(self.path.absolute())) is not None:
            raise ValueError(reason)
        if create:
            with self._writing() as connection:
                if _is_empty(connection):
                    for statement in TABLES:
                        connection.execute(statement)
        self._check_format()

    # --- Reading: of a ledger that was altered nothing, but a ValueError ----------------------------------------------

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of all data sets with a budget, in the order in which they came."""
        return tuple(dict.fromkeys(row.account for row in self._rows() if row.kind == "budget"))

    def budget(self, dataset: str) -> Budget:
        """The budget that was set last. Raises: ValueError where none was."""
        return _budget(self._rows(), dataset)

    def budgets(self, dataset: str) -> tuple[BudgetEntry, ...]:
        """Every budget that was set, in order; the last one holds."""
        return tuple(
            row.budget() for row in self._rows() if row.kind == "budget" and row.account == account_of(dataset)
        )

    def entries(self, dataset: str) -> tuple[Entry, ...]:
        """Everything that was spent on a data set, in order."""
        return tuple(row.entry() for row in self._rows() if row.kind == "spend" and row.account == account_of(dataset))

    def spent(self, dataset: str) -> PrivacySpent:
        """All entries of a data set composed, at its budget's delta."""
        rows = self._rows()
        return _composed(rows, dataset, _budget(rows, dataset).delta)

    def spent_with(self, dataset: str, mechanism: SampledGaussian, num_steps: int) -> PrivacySpent:
        """What would be spent with one more run: nothing is written, and another process may come first."""
        rows = self._rows()
        return _composed(rows, dataset, _budget(rows, dataset).delta, Run(mechanism, num_steps, "next"))

    def least_noise_multiplier(
        self, dataset: str, mechanism: SampledGaussian, num_steps: int, *, after: tuple[SampledGaussian, int]
    ) -> float | None:
        """The least noise of a run for which the budget has room after another; None where no noise is enough.

        Args:
          mechanism, num_steps: of the run; its noise_multiplier is ignored.   after: mechanism and steps of the other.
        """
        rows = self._rows()
        budget = _budget(rows, dataset)
        order = _order(rows, dataset) or settled_order(after[0], epsilon=budget.epsilon, delta=budget.delta)
        before = [*_runs(rows, dataset), Run(*after, "next")]

        def fits(noise_multiplier: float) -> bool:
            runs = [*before, Run(mechanism.with_noise_multiplier(noise_multiplier), num_steps, "the one after")]
            return composed_epsilon(runs, target_delta=budget.delta, order=order).epsilon <= budget.epsilon

        return least_noise(fits)

    # --- Spending -----------------------------------------------------------------------------------------------------

    def set_budget(self, dataset: str, *, epsilon: float, delta: float) -> None:
        """Set, or set anew, what may be spent on a data set; the old budget stays in the ledger's history.

        Raises: ValueError: a number out of range, or less than is spent already; or the ledger was altered.
        """
        check_budget(dataset, epsilon=epsilon, delta=delta)
        with self._writing() as connection:
            rows = self._sound_rows(connection)
            spent = _composed(rows, dataset, delta).epsilon
            if spent > epsilon:
                raise ValueError(
                    f"Expected a budget of at least the ε = {epsilon_text(spent)} that is spent on '{dataset}' at "
                    f"δ = {delta:g}, got {epsilon:g}."
                )
            append(connection, rows, "budget", dataset, {"epsilon": epsilon, "delta": delta, **_stamp()})

    def spend(self, dataset: str, mechanism: SampledGaussian, num_steps: int, *, what: str, run: str) -> int:
        """Write down a run that is about to begin, if the budget allows it; the number of its entry (see `Entry`).

        Of the same `run` with the same mechanism and steps there is one entry: it is the run before, resumed.

        Raises: ValueError: no budget, or the budget would be exceeded (nothing is written then), or the run's guarantee
          speaks of other neighbours than those before; or the ledger was altered.
        """
        with self._writing() as connection:
            rows = self._sound_rows(connection)
            budget = _budget(rows, dataset)
            for row in rows:
                if row.kind == "spend" and row.account == account_of(dataset) and row.entry().run == run:
                    return _same_run(row.entry(), mechanism, num_steps)
            after = _composed(rows, dataset, budget.delta, Run(mechanism, num_steps, run)).epsilon
            if after > budget.epsilon:
                now = epsilon_text(_composed(rows, dataset, budget.delta).epsilon)
                least = _composed(rows, dataset, budget.delta, Run(mechanism, 0, run)).epsilon
                way_out = "Spend less: more noise, or fewer steps."
                if least > budget.epsilon:
                    way_out = (
                        "With any run after it what is spent counts as chosen step by step, "
                        f"{epsilon_text(least)} by itself: nothing fits but into a larger budget."
                    )
                raise ValueError(
                    f"The budget of '{dataset}' is ε = {budget.epsilon:g} at δ = {budget.delta:g}, of which {now} is "
                    f"spent; with this run it would be {epsilon_text(after)} at that δ. {way_out}"
                )
            content = {"mechanism": mechanism.as_data(), "num_steps": num_steps, "what": what, "run": run}
            if not _runs(rows, dataset):
                content["settled_order"] = settled_order(mechanism, epsilon=budget.epsilon, delta=budget.delta)
            return append(connection, rows, "spend", dataset, content | _stamp())

    def check(self) -> list[str]:
        """What is wrong with the ledger, one sentence each; none where all is well.

        The chain of hashes; where it holds, the entries' meaning, and that no data set has spent more than its budget.
        """
        with self._open() as connection:
            rows = read_rows(connection)
        if (damage := damage_of(rows)) is not None:  # nothing that could be said of the totals would be worth anything
            return [f"{damage}; do not trust the totals of {self.path}, and put back a backup."]
        found = []
        for dataset in dict.fromkeys(row.account for row in rows):
            try:
                budget = _budget(rows, dataset)
                spent = _composed(rows, dataset, budget.delta).epsilon
            except (ValueError, KeyError, TypeError) as error:
                found.append(f"The entries of '{dataset}' cannot be read: {error}")
                continue
            if spent > budget.epsilon:
                found.append(f"'{dataset}' has spent ε = {epsilon_text(spent)}, more than its {budget.epsilon:g}.")
        return found

    # --- The file -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            if not self.path.exists():  # its owner's alone: it says what was done with private data
                os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            # Transactions are begun by hand: the module's own begin too late.
            connection = sqlite3.connect(self.path, timeout=SECONDS_TO_WAIT, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")  # an entry is on the disk before a step is taken
                yield connection
            finally:
                connection.close()
        except sqlite3.DatabaseError as error:
            raise ValueError(self._trouble(error)) from None

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction that no other process can come between."""
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def _rows(self) -> list[Row]:
        with self._open() as connection:
            return self._sound_rows(connection)

    def _sound_rows(self, connection: sqlite3.Connection) -> list[Row]:
        rows = read_rows(connection)
        if (damage := damage_of(rows)) is not None:
            raise ValueError(
                f"{damage}; do not trust the totals of {self.path}, see `noisecast ledger check {self.path}` and put "
                "back a backup."
            )
        return rows

    def _check_format(self) -> None:
        with self._open() as connection:
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            is_empty = _is_empty(connection)
        if is_empty:  # as a full disk leaves it while it is made
            raise ValueError(
                f"{self.path} is not a ledger: it is empty; set its first budget (again), or put back a backup if it "
                "had entries."
            )
        if "entries" not in names:
            raise ValueError(f"{self.path} is not a ledger.")
        if found != FORMAT:
            raise ValueError(f"Expected a ledger of format {FORMAT}, {self.path} has {found}; use its own noisecast.")

    def _trouble(self, error: sqlite3.DatabaseError) -> str:
        if "locked" in str(error) or "busy" in str(error):
            return (
                f"{self.path} has been held by another process for {SECONDS_TO_WAIT:.0f} s; try again when it is done."
            )
        if "not a database" in str(error) or "malformed" in str(error):
            return f"{self.path} is not a ledger."
        if "disk" in str(error):  # full, or failing; what is left is not ours to delete: it may hold entries
            return (
                f"{self.path} cannot be used ({error}): make room on the disk and try again; if it stays so and the "
                f"ledger was just being made, move {self.path}, {self.path}-wal and {self.path}-shm away, else put "
                "back a backup."
            )
        return f"{self.path} cannot be used: {' '.join(str(error).split())}."


def _budget(rows: Sequence[Row], dataset: str) -> Budget:
    found = [row for row in rows if row.kind == "budget" and row.account == account_of(dataset)]
    if not found:
        _check_name(dataset)  # what no budget can be set for needs another sentence
        known = ", ".join(dict.fromkeys(row.account for row in rows)) or "none"
        raise ValueError(
            f"Expected a data set with a budget (here: {known}), got '{dataset}'; set one by: "
            f"noisecast ledger budget LEDGER {dataset} --epsilon 8 --delta 1e-5"
        )
    return found[-1].budget().budget


def _runs(rows: Sequence[Row], dataset: str) -> list[Run]:
    entries = [row.entry() for row in rows if row.kind == "spend" and row.account == account_of(dataset)]
    return [Run(entry.mechanism, entry.num_steps, entry.run) for entry in entries]


def _composed(rows: Sequence[Row], dataset: str, delta: float, *more: Run) -> PrivacySpent:
    """Everything spent on a data set, and what is to be spent beside it."""
    runs = [*_runs(rows, dataset), *more]
    if not runs:
        return PrivacySpent(0.0, delta, NONE, Adjacency.ADD_OR_REMOVE_ONE, None, {NONE: 0.0}, "Nothing was spent.")
    # Whoever decides on the next run has seen what the runs before released.
    return composed_epsilon(runs, target_delta=delta, order=_order(rows, dataset))


def _order(rows: Sequence[Row], dataset: str) -> float | None:
    """The Renyi order that the first run and the budget that it had have settled; None before it."""
    of_dataset = [row for row in rows if row.account == account_of(dataset)]
    first = next((place for place, row in enumerate(of_dataset) if row.kind == "spend"), None)
    if first is None:
        return None
    entry, budget = of_dataset[first].entry(), _budget(of_dataset[:first], dataset)
    # Ledgers that were begun before it was written down have settled it all the same.
    return entry.settled_order or settled_order(entry.mechanism, epsilon=budget.epsilon, delta=budget.delta)


def _same_run(entry: Entry, mechanism: SampledGaussian, num_steps: int) -> int:
    if (entry.mechanism, entry.num_steps) != (mechanism, num_steps):
        raise ValueError(f"Entry {entry.number} of the ledger is this run with other settings; start it anew.")
    return entry.number


def _stamp() -> dict[str, str]:
    return {"when": datetime.now(UTC).isoformat(timespec="seconds"), "version": __version__}


def _check_name(dataset: str) -> None:
    # Names that look the same on a screen would be accounts of their own, each with a budget.
    if not 0 < len(dataset) <= 200 or dataset != dataset.strip() or not dataset.isprintable():
        raise ValueError(
            "Expected a name for the data set, of 1 to 200 printable letters without blanks around it, got "
            f"{dataset!r}; give another."
        )


def _is_empty(connection: sqlite3.Connection) -> bool:
    return not connection.execute("SELECT name FROM sqlite_master").fetchall()
