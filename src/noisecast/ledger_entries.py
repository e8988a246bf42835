"""The entries of a privacy ledger as its file holds them: budgets and runs, each with the hash of all before it."""

import hashlib
import json
import math
import sqlite3
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from noisecast.privacy.mechanism import SampledGaussian

FORMAT = 1
NO_ENTRY = "0" * 64

TABLES = (
    "CREATE TABLE entries (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, dataset TEXT NOT NULL, "
    "content TEXT NOT NULL, hash TEXT NOT NULL)",
    "CREATE TRIGGER entries_stay BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'entries never change'); END",
    "CREATE TRIGGER entries_remain BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'entries never go'); END",
    f"PRAGMA user_version = {FORMAT}",
)


class Budget(NamedTuple):
    """The most that may be spent on a data set."""

    epsilon: float
    delta: float


class BudgetEntry(NamedTuple):
    """A budget as it was set. number: of the entry, among all of the ledger, from 1.   when: UTC, ISO 8601."""

    number: int
    budget: Budget
    when: str


@dataclass(frozen=True)
class Entry:
    """One run on a data set.

    Args:
      number: of the entry, among all of the ledger (budgets are entries too), from 1.
      dataset: its name in the ledger.
      mechanism, num_steps: what was spent.   what: in words.
      run: a name of the run's randomness, the same when it is resumed; says nothing of the noise.
      when: UTC, ISO 8601.   version: of noisecast.
      settled_order: of the first run: the Renyi order at which it and all later ones add up; None of later ones.
    """

    number: int
    dataset: str
    mechanism: SampledGaussian
    num_steps: int
    what: str
    run: str
    when: str
    version: str
    settled_order: float | None = None


def account_of(dataset: str) -> str:
    """The name in composed letters (NFC): written with one code point or two, "é" is one name and one account.

    >>> account_of("cafe\\u0301") == account_of("caf\\u00e9")
    True
    """
    return unicodedata.normalize("NFC", dataset)


class Row(NamedTuple):
    """One line of the file, as it was read.

    Args:
      number: from 1, through the whole file.   kind: "budget" or "spend".   dataset: its name.
      content: what was entered, as JSON.   hash: of this entry and all before it.
    """

    number: int
    kind: str
    dataset: str
    content: str
    hash: str

    @property
    def account(self) -> str:
        """The data set's name, however its letters were composed."""
        return account_of(self.dataset)

    def entry(self) -> Entry:
        """The run that it says was paid for. Raises: ValueError where it does not read as one."""
        try:
            data = json.loads(self.content)
            mechanism = SampledGaussian.from_data(data.pop("mechanism"))
            mechanism.dp_event(data["num_steps"])  # checks it
            found = Entry(number=self.number, dataset=self.dataset, mechanism=mechanism, **data)
            if not all(isinstance(text, str) for text in (found.what, found.run, found.when, found.version)):
                raise TypeError("text")
            if not isinstance(found.settled_order, float | None):
                raise TypeError("number")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise ValueError(f"Entry {self.number} cannot be read: it was altered; do not trust the totals.") from None
        return found

    def budget(self) -> BudgetEntry:
        """The budget that it says was set. Raises: ValueError where it does not read as one."""
        try:
            data = json.loads(self.content)
            found = BudgetEntry(self.number, Budget(float(data["epsilon"]), float(data["delta"])), data["when"])
            if not (0 < found.budget.epsilon < math.inf and 0 < found.budget.delta < 1):
                raise ValueError("range")
            if not isinstance(found.when, str):
                raise TypeError("text")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise ValueError(f"Entry {self.number} cannot be read: it was altered; do not trust the totals.") from None
        return found


def read_rows(connection: sqlite3.Connection) -> list[Row]:
    """Every entry, in order. Raises: ValueError where one is not text."""
    query = "SELECT number, kind, dataset, content, hash FROM entries ORDER BY number"
    rows = [Row(*row) for row in connection.execute(query)]
    for row in rows:
        if not all(isinstance(cell, str) for cell in row[1:]):
            raise ValueError(f"Entry {row.number} is not text: it was altered; do not trust the totals.")
    return rows


def damage_of(rows: Sequence[Row]) -> str | None:
    """Which entry is the first that is not as it was written, in words; None where the chain of hashes holds."""
    before = NO_ENTRY
    for number, row in enumerate(rows, start=1):
        if row.number != number:
            return f"Entry {number} is missing: the ledger was altered"
        if row.hash != _hash(before, number, row.kind, row.dataset, row.content):
            return f"Entry {number} cannot be read: it was altered"
        before = row.hash
    return None


def append(connection: sqlite3.Connection, rows: Sequence[Row], kind: str, dataset: str, content: Any) -> int:
    """Write one entry behind all others.

    Args:
      connection: in a transaction.   rows: all that are there.   kind, dataset: as of `Row`.   content: for JSON.
    Returns: the entry's number.
    """
    text, dataset = json.dumps(content, sort_keys=True, allow_nan=False), account_of(dataset)
    number, before = len(rows) + 1, rows[-1].hash if rows else NO_ENTRY
    row = Row(number, kind, dataset, text, _hash(before, number, kind, dataset, text))
    connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", row)
    return number


def _hash(before: str, *parts: Any) -> str:
    return hashlib.sha256(json.dumps([before, *parts]).encode()).hexdigest()
