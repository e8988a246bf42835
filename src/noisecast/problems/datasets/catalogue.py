"""The data sets that Noisecast reads by name: what the command `noisecast datasets` prints."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from noisecast.problems.datasets.archives import (
    FORUM_FILE,
    IMDB_SOURCE,
    MOVIELENS_SOURCE,
    STACKOVERFLOW_SOURCE,
    forum500,
    imdb,
    movielens,
    stackoverflow,
)
from noisecast.problems.datasets.bundled import bundled


@dataclass(frozen=True)
class Entry:
    """A data set by name.

    Args:
      rows, columns: its size, as text ("25,000 + 25,000": train + test).
      obtain: how to get it.
      needs_data_dir: whether `load` takes the data folder.
      load: () or (data_dir) -> (train, test), or `Ratings` for movielens.
    """

    name: str
    what: str
    rows: str
    columns: str
    obtain: str
    needs_data_dir: bool
    load: Callable[..., Any]


_BUNDLED = "bundled with scikit-learn: nothing to get"

DATASETS = (
    Entry("digits", "handwritten digits, 10 classes", "1,438 + 359", "64", _BUNDLED, False, partial(bundled, "digits")),
    Entry("breast_cancer", "tumours, 2 classes", "455 + 114", "30", _BUNDLED, False, partial(bundled, "breast_cancer")),
    Entry("iris", "flowers, 3 classes", "120 + 30", "4", _BUNDLED, False, partial(bundled, "iris")),
    Entry("wine", "wines, 3 cultivars", "142 + 36", "13", _BUNDLED, False, partial(bundled, "wine")),
    Entry(
        "imdb",
        "film reviews, 2 classes (the paper's IMDB)",
        "25,000 + 25,000",
        "10,000",
        f"put into the data folder imdb_train.csv.gz and imdb_test.csv.gz (text, label), or {IMDB_SOURCE}",
        True,
        imdb,
    ),
    Entry(
        "movielens",
        "ratings by 943 users of 1,682 films (the paper's MovieLens-100k)",
        "100,000",
        "943 + 1,682",
        f"put into the data folder u.data, or {MOVIELENS_SOURCE}",
        True,
        movielens,
    ),
    Entry(
        "forum500",
        "forum posts, 500 classes (the shape of the paper's StackOverflow)",
        "246,092 + 61,719",
        "10,000",
        f"forum500_counts.npz in the data folder: make {FORUM_FILE}",
        True,
        forum500,
    ),
    Entry(
        "stackoverflow",
        "titles of Stack Overflow questions, 100 tags",
        "24,000 + 6,000",
        "10,000",
        f"so_titles_tags_30k.csv.gz in the data folder: export {STACKOVERFLOW_SOURCE}",
        True,
        stackoverflow,
    ),
)
