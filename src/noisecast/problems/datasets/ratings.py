"""Ratings from a file of the user's own: columns user, item and rating, ids counted from 1."""

import hashlib

import numpy as np

from noisecast.problems.datasets.archives import RATINGS, Ratings
from noisecast.problems.datasets.columns import numeric_column
from noisecast.problems.datasets.contents import file_suffix, opened
from noisecast.problems.datasets.csv_file import CsvFile
from noisecast.problems.datasets.dataset import DataError, listed
from noisecast.problems.datasets.tables import read_table


def read_ratings(path, *, num_users: int, num_items: int) -> Ratings:
    """A table with the columns user, item and rating, or a `.data` file as MovieLens has it (tabs, no header).

    Args:
      path: CSV, TSV, Parquet or .data, perhaps with .gz. Ids are whole numbers from 1.
      num_users, num_items: public numbers; never the largest ids of a private file.
    Raises: DataError for a missing column or value, or an id that is not in 1 .. num_users or num_items.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp(), "ratings.csv")
    >>> _ = file.write_text("user,item,rating\\n1,2,4.5\\n3,1,2\\n")
    >>> read_ratings(file, num_users=3, num_items=2).item
    array([1, 0], dtype=int32)
    """
    if file_suffix(path) == ".data":
        table = CsvFile(opened(path), path, delimiter="\t", header=RATINGS).frame()
    else:
        table = read_table(path)
    names = RATINGS[:3]
    if not set(names) <= set(table):
        raise DataError(
            f"Expected the columns user, item and rating in {path}, got {listed(list(table.columns))}; rename them, or "
            "save a file as MovieLens has it (tabs, no header) under a name that ends in .data."
        )
    user, item, rating = (
        numeric_column(table, name, str(path), if_text="ratings and ids are numbers, mend that row or leave it out")
        for name in names
    )
    for name, ids, size in (("user", user, num_users), ("item", item, num_items)):
        bad = np.flatnonzero(~((ids >= 1) & (ids <= size) & (ids % 1 == 0)))
        if bad.size:
            raise DataError(
                f"Expected {name} ids in 1 .. {size} in {path}, got {ids[bad[0]]:g} in row {bad[0] + 1}; "
                f"ids start at 1: mend that row, or give a larger public number of {name}s."
            )
    return Ratings(user.astype(np.int32) - 1, item.astype(np.int32) - 1, rating, num_users, num_items)


def split_ratings_by_content(ratings: Ratings, test_fraction: float) -> tuple[Ratings, Ratings]:
    """(train, test), each rating's place decided by the sha256 of its own user, item and rating and nothing else.

    So adding or removing a rating moves no other.

    Raises: DataError unless 0 < test_fraction < 1, or when one side would be empty.

    >>> ratings = Ratings(np.arange(20) % 5, np.arange(20) // 5, np.ones(20), num_users=5, num_items=4)
    >>> train, test = split_ratings_by_content(ratings, 0.3)
    >>> train.num_examples + test.num_examples, 0 < test.num_examples < 20
    (20, True)
    """
    if not 0 < test_fraction < 1:
        raise DataError(f"Expected 0 < test_fraction < 1, got {test_fraction}.")
    parts = zip(ratings.user.tolist(), ratings.item.tolist(), ratings.rating.tolist())
    digests = (hashlib.sha256(repr(part).encode()).digest() for part in parts)
    is_test = np.array([int.from_bytes(digest[:6], "big") / 2**48 < test_fraction for digest in digests], bool)
    if is_test.all() or not is_test.any():
        raise DataError(
            f"Expected ratings on both sides of a test fraction of {test_fraction}, got {is_test.sum()} of "
            f"{len(is_test)} for testing; choose another fraction, or give a test file."
        )
    return ratings.rows(~is_test), ratings.rows(is_test)
