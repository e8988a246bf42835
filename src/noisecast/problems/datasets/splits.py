"""Which rows are for training and which for testing: by row number for public data, by content for private data."""

import hashlib
import json
from collections import Counter
from typing import Any

import numpy as np

from noisecast.problems.datasets.dataset import DataError, Dataset

ROWS_MOVE = (
    "by its content a row is held out or trained on, so replacing one may add or remove another; split the file "
    "yourself."
)  # why such a split is refused where records are replaced


def public_split(num_rows: int, test_fraction: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers of (train, test), by a fixed shuffle that looks at no row: the same everywhere, for ever.

    Rows are ordered by the sha256 of their number; the first (1 - test_fraction) n, rounded, are the training rows.

    Raises: DataError unless 0 < test_fraction < 1.

    >>> train, test = public_split(10)
    >>> sorted([*train, *test]) == list(range(10)), len(test)
    (True, 2)
    """
    if not 0 < test_fraction < 1:
        raise DataError(f"Expected 0 < test_fraction < 1, got {test_fraction}.")
    order = sorted(range(num_rows), key=lambda row: hashlib.sha256(str(row).encode()).digest())
    num_train = num_rows - round(test_fraction * num_rows)
    return np.array(order[:num_train], dtype=np.int64), np.array(order[num_train:], dtype=np.int64)


def split_by_content(data: Dataset, test_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers of (train, test), each row's place decided by the sha256 of its own content and, of equal rows, by
    which of them it is: so these go to both sides, as rows of a random split do, and what is held out has the same law.

    So adding or removing a row moves no other: of equal rows the last one comes or goes. Where features are numbered
    by all rows, as by a vocabulary of their words, a row that changes the numbers changes what others are, too.

    Raises: DataError unless 0 < test_fraction < 1, or when one side would be empty.

    >>> data = Dataset("toy", np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10) % 2, ("a", "b"))
    >>> train, test = split_by_content(data, 0.3)
    >>> sorted([*train, *test]) == list(range(10))
    True
    """
    if not 0 < test_fraction < 1:
        raise DataError(f"Expected 0 < test_fraction < 1, got {test_fraction}.")
    places = _places([_digest(data, row) for row in range(data.num_examples)])
    train, test = np.flatnonzero(places >= test_fraction), np.flatnonzero(places < test_fraction)
    if not len(train) or not len(test):
        raise DataError(
            f"Expected rows on both sides of a test fraction of {test_fraction}, got {len(train)} for training and "
            f"{len(test)} for testing of {data.num_examples}; choose another fraction, or give a test file."
        )
    return train, test


def _places(digests: list[bytes]) -> np.ndarray:
    """In [0, 1), as good as random: of the first of equal rows by its digest, of others by that and their number."""
    met, places = Counter(), np.empty(len(digests))
    for row, digest in enumerate(digests):
        own = hashlib.sha256(digest + str(met[digest]).encode()).digest() if met[digest] else digest
        places[row] = int.from_bytes(own[:6], "big") / 2**48
        met[digest] += 1
    return places


def _digest(data: Dataset, row: int) -> bytes:
    labels = data.labels[row]
    # Without the padding, which is as long as the longest set of all rows.
    names = [data.label_names[label] for label in np.atleast_1d(labels) if label >= 0]  # numbers are other rows' too
    digest = hashlib.sha256(json.dumps(names).encode())
    features: Any = data.features
    if isinstance(features, np.ndarray):
        digest.update(features[row].tobytes())
    else:
        entries = slice(features.indptr[row], features.indptr[row + 1])
        digest.update(features.indices[entries].astype(np.int64).tobytes())
        digest.update(features.data[entries].tobytes())
    return digest.digest()
