"""The paper's three tasks, read from a folder the user has: as CSV files or as the official archives, unpacked or not.

Nothing is downloaded. The folder is the argument `data_dir` or the environment variable NOISECAST_DATA.
"""

import io
import os
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from noisecast.files import is_bomb
from noisecast.problems.datasets.columns import column_of, numeric_column, texts_of
from noisecast.problems.datasets.contents import decode, opened, read_bytes
from noisecast.problems.datasets.csv_file import CsvFile
from noisecast.problems.datasets.dataset import (
    DataError,
    Dataset,
    encode_labels,
    hash_arrays,
    label_sets,
    listed,
)
from noisecast.problems.datasets.files import csr_from_arrays, read_npz, whole_number
from noisecast.problems.datasets.splits import public_split
from noisecast.problems.datasets.tables import read_table
from noisecast.problems.datasets.text_encoder import TextEncoder, TextKind

IMDB_SOURCE = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
MOVIELENS_SOURCE = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
STACKOVERFLOW_SOURCE = "the columns title and tags (joined by |) from https://data.stackexchange.com"
FORUM_FILE = (
    "it of your own texts with np.savez (indptr, indices, counts, num_tokens, label, num_train); the posts themselves "
    "are not published"
)

MOVIELENS_USERS, MOVIELENS_ITEMS = 943, 1682
RATINGS = ["user", "item", "rating", "timestamp"]  # columns of a file as MovieLens has it, without a header


def data_folder(data_dir=None) -> Path:
    """The folder with the data: `data_dir`, else the environment variable NOISECAST_DATA.

    Raises: DataError if neither is given or the folder is not there.
    """
    chosen = data_dir or os.environ.get("NOISECAST_DATA")
    if not chosen:
        raise DataError(
            "Expected a data folder, got none; give data_dir or set the environment variable NOISECAST_DATA."
        )
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise DataError(f"Expected a data folder, got {folder}, which is not a directory; check the path.")
    return folder


def find(data_dir, names: Sequence[str], *, what: str, obtain: str) -> Path:
    """The first of `names` in the data folder; DataError says what was looked for, where, and where users get it."""
    folder = data_folder(data_dir)
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise DataError(f"No {what} in {folder}, looked for {' or '.join(names)}; {obtain}.")


# --- IMDB -----------------------------------------------------------------------------------------------------------


def imdb(
    data_dir=None,
    *,
    features: TextKind | TextEncoder = "padded-term-frequency",
    vocabulary_size: int = 10_000,
    unit_rows: bool = False,
) -> tuple[Dataset, Dataset]:
    """Film reviews and whether they are positive (Maas et al. 2011): 25,000 for training, 25,000 for testing.

    Args:
      data_dir: holds imdb_train.csv.gz and imdb_test.csv.gz (columns text, label), or aclImdb_v1.tar.gz, or aclImdb/.
      features: how a text becomes numbers. The default is what the paper's encoding does, with (10,000 - 3) words. With
        an encoder, `vocabulary_size` and `unit_rows` are not looked at; with a kind, the vocabulary is taken from the
        training texts, which no privacy guarantee covers.

    Rows come as in the files, which are sorted by class.
    """
    train, test = imdb_texts(data_dir)
    if not isinstance(features, TextEncoder):
        features = TextEncoder.fit(
            train["text"].tolist(), features, vocabulary_size=vocabulary_size, unit_rows=unit_rows
        )
    train_labels, names = encode_labels(train["label"], source="the IMDB training reviews")
    test_labels, _ = encode_labels(test["label"], source="the IMDB test reviews", label_names=names)
    if names == ("0", "1"):
        names = ("negative", "positive")
    return (
        Dataset("imdb", features.encode(train), train_labels, names),
        Dataset("imdb", features.encode(test), test_labels, names),
    )


def imdb_texts(data_dir=None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The IMDB reviews as two tables (train, test) with, at least, the columns text and label (1 is positive)."""
    where = find(
        data_dir,
        ("imdb_train.csv.gz", "imdb_train.csv", "aclImdb_v1.tar.gz", "aclImdb"),
        what="IMDB reviews",
        obtain=f"get the archive from {IMDB_SOURCE}",
    )
    if where.name.startswith("imdb_train"):
        tables = [read_table(where), read_table(where.with_name(where.name.replace("train", "test")))]
        for table, part in zip(tables, ("train", "test")):
            for column in ("text", "label"):
                column_of(table, column, f"the IMDB {part} file beside {where}")
        return tables[0], tables[1]
    reviews = _imdb_tar(where) if where.is_file() else _imdb_folder(where)
    return _imdb_tables(reviews, where)


_REVIEW = re.compile(r"(?:^|/)(train|test)/(pos|neg)/(\d{1,9})_(\d+)\.txt$")


def _imdb_tar(path: Path) -> Iterator[tuple[str, bytes]]:
    unpacked, packed = 0, path.stat().st_size
    try:
        # Members are read, never unpacked to the disk, so a crafted archive can write nowhere.
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                unpacked += member.size  # as it says: a sparse one has more than the archive holds
                if is_bomb(unpacked, packed):
                    raise DataError(f"{path} would unpack to hundreds of times itself; get it from {IMDB_SOURCE}.")
                if member.isfile() and _REVIEW.search(member.name):
                    yield member.name, archive.extractfile(member).read()  # type: ignore[union-attr]
    except DataError:
        raise
    except Exception as error:  # Garbled bytes make tarfile and what unpacks them raise errors of a dozen types.
        raise DataError(f"{path} is not a whole archive ({error}); get it again from {IMDB_SOURCE}.") from None


def _imdb_folder(path: Path) -> Iterator[tuple[str, bytes]]:
    for file in path.glob("t*/*/*.txt"):
        name = file.relative_to(path).as_posix()
        if _REVIEW.search(name):
            yield name, file.read_bytes()


def _imdb_tables(reviews: Iterable[tuple[str, bytes]], where: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    rows: dict[str, list[tuple]] = {"train": [], "test": []}
    for name, content in reviews:
        part, sentiment, number, _ = _REVIEW.search(name).groups()  # type: ignore[union-attr]
        positive = sentiment == "pos"
        rows[part].append((not positive, int(number), decode(content, f"{where}/{name}"), str(int(positive))))
    for part, found in rows.items():
        if not found:
            raise DataError(f"Expected reviews {part}/pos/*.txt and {part}/neg/*.txt in {where}, got none.")
    # Positive first, then by number: the order of the CSV files, so that the contents do not depend on the layout.
    train, test = (
        pd.DataFrame([row[2:] for row in sorted(found)], columns=pd.Index(["text", "label"])) for found in rows.values()
    )
    return train, test


# --- MovieLens ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ratings:
    """A table of ratings; one rating is one example, the unit of privacy.

    Args:
      user: (n,) int32 in 0 .. num_users - 1.   item: (n,) int32 in 0 .. num_items - 1.
      rating: (n,) float32.
      num_users, num_items: public sizes of the two tables of a factorisation.

    >>> Ratings(np.array([0, 1]), np.array([1, 0]), np.array([3.0, 5.0]), num_users=2, num_items=2).num_examples
    2
    """

    user: np.ndarray = field(repr=False)
    item: np.ndarray = field(repr=False)
    rating: np.ndarray = field(repr=False)
    num_users: int
    num_items: int

    def __post_init__(self):
        for name, size in (("user", self.num_users), ("item", self.num_items)):
            ids = np.asarray(getattr(self, name))
            if not np.issubdtype(ids.dtype, np.integer) or ids.shape != np.shape(self.rating) or ids.ndim != 1:
                raise DataError(
                    f"Expected integer {name} ids (n,) beside ratings {np.shape(self.rating)}, got {ids.shape}."
                )
            if ids.size and not 0 <= ids.min() <= ids.max() < size:
                raise DataError(f"Expected {name} ids in 0 .. {size - 1}, got {ids.min()} .. {ids.max()}.")
            object.__setattr__(self, name, ids.astype(np.int32, copy=False))
        rating = np.asarray(self.rating, dtype=np.float32)
        if not np.isfinite(rating).all():
            raise DataError(f"Expected finite ratings, got {rating[~np.isfinite(rating)][0]}.")
        object.__setattr__(self, "rating", rating)

    @property
    def num_examples(self) -> int:
        return len(self.rating)

    @cached_property
    def content_hash(self) -> str:
        """sha256 of ids, ratings and sizes: the same in every process."""
        return hash_arrays(self.user, self.item, self.rating, np.array([self.num_users, self.num_items]))

    def rows(self, indices) -> "Ratings":
        """The ratings at `indices` (integers or a mask); the sizes stay."""
        return Ratings(self.user[indices], self.item[indices], self.rating[indices], self.num_users, self.num_items)


def movielens(data_dir=None) -> Ratings:
    """MovieLens-100k: 100,000 ratings (1 to 5) by 943 users of 1,682 films, in the file's order, ids from 0.

    The file counts its ids from 1; unshifted they would leave the last user and film without a row of their own.

    Args:
      data_dir: holds u.data, ml-100k_u.data.gz, ml-100k/u.data or ml-100k.zip.
    """
    where = find(
        data_dir,
        ("ml-100k_u.data.gz", "u.data", "u.data.gz", "ml-100k/u.data", "ml-100k.zip"),
        what="MovieLens-100k ratings",
        obtain=f"get the archive from {MOVIELENS_SOURCE}",
    )
    stream = io.BytesIO(_zip_member(where, "u.data")) if where.suffix == ".zip" else opened(where)
    table = CsvFile(stream, where, delimiter="\t", header=RATINGS).frame()
    user, item, rating = (numeric_column(table, name, str(where)) for name in ("user", "item", "rating"))
    for name, ids, size in (("user", user, MOVIELENS_USERS), ("item", item, MOVIELENS_ITEMS)):
        bad = np.flatnonzero((ids < 1) | (ids > size) | (ids % 1 != 0))
        if bad.size:
            raise DataError(f"Expected {name} ids in 1 .. {size} in {where}, got {ids[bad[0]]:g} in row {bad[0] + 1}.")
    return Ratings(user.astype(np.int32) - 1, item.astype(np.int32) - 1, rating, MOVIELENS_USERS, MOVIELENS_ITEMS)


def _zip_member(path: Path, name: str) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(read_bytes(path))) as archive:
            member = next((m for m in archive.infolist() if Path(m.filename).name == name), None)
            if member is None:
                raise DataError(f"Expected {name} in {path}, got {listed(archive.namelist())}.")
            if is_bomb(member.file_size, path.stat().st_size):
                raise DataError(f"{path} would unpack to hundreds of times itself; get it from {MOVIELENS_SOURCE}.")
            return archive.read(member)
    except DataError:
        raise
    except Exception as error:  # Garbled bytes make zipfile raise errors of a dozen types.
        raise DataError(f"{path} is not a whole zip archive ({error}); get it again from {MOVIELENS_SOURCE}.") from None


# --- Stack Overflow -------------------------------------------------------------------------------------------------


def forum500(data_dir=None) -> tuple[Dataset, Dataset]:
    """Term frequencies of 10,000 words in forum posts with one of 500 labels: 246,092 for training, 61,719 for testing.

    A stand-in of the shape of the paper's StackOverflow task; its classes are nearly balanced, unlike tags.

    Args:
      data_dir: holds forum500_counts.npz: indptr, indices, counts, num_tokens, label, num_train. A file of your own in
        that form, under that name, will do.
    """
    where = find(
        data_dir,
        ("forum500_counts.npz",),
        what="forum posts",
        obtain=f"make {FORUM_FILE}",
    )
    arrays = read_npz(where)
    for name in ("label", "num_train", "num_tokens", "counts", "indptr", "indices"):
        if name not in arrays:
            raise DataError(f"Expected the array '{name}' in {where}, got {listed(sorted(arrays))}.")
    features = csr_from_arrays(arrays, where)
    if arrays["label"].shape != features.shape[:1]:
        raise DataError(f"Expected {features.shape[0]} labels in {where}, one a row, got {arrays['label'].shape}.")
    num_train = whole_number(arrays, "num_train", where)
    if not 0 < num_train < features.shape[0]:
        raise DataError(f"Expected 0 < num_train < {features.shape[0]} (the rows) in {where}, got {num_train}.")
    labels, names = encode_labels(arrays["label"], source=str(where))
    whole = Dataset("forum500", features, labels, names)
    return whole.rows(slice(num_train)), whole.rows(slice(num_train, None))


@dataclass(frozen=True)
class TaggedTexts:
    """Texts, each with its tags in the order they were given.

    >>> TaggedTexts(("a loop", "a join"), (("python", "c"), ("sql",))).num_examples
    2
    """

    texts: tuple[str, ...]
    tags: tuple[tuple[str, ...], ...]

    @property
    def num_examples(self) -> int:
        return len(self.texts)

    def top_tags(self, num_tags: int) -> tuple[str, ...]:
        """The most frequent tags, ties by the alphabet. Read from private rows, they are private.

        >>> TaggedTexts(("", ""), (("b", "a"), ("b",))).top_tags(1)
        ('b',)
        """
        counts = Counter(tag for tags in self.tags for tag in tags)
        return tuple(sorted(sorted(counts), key=counts.__getitem__, reverse=True)[:num_tags])

    def rows(self, indices) -> "TaggedTexts":
        """The texts at `indices` (integers)."""
        return TaggedTexts(tuple(self.texts[i] for i in indices), tuple(self.tags[i] for i in indices))


def read_tagged_texts(path, *, text: str = "title", tags: str = "tags", separator: str = "|") -> TaggedTexts:
    """Any table of texts and tags; `separator` stands between the tags of a row.

    Raises: DataError, also for a row without a tag.
    """
    table = read_table(path)
    cells = list(texts_of(table, tags, str(path)))
    split = tuple(tuple(tag.strip() for tag in cell.split(separator) if tag.strip()) for cell in cells)
    if () in split:
        raise DataError(f"Row {split.index(()) + 1} of {path} has no tag in column '{tags}'; add one or leave it out.")
    return TaggedTexts(tuple(texts_of(table, text, str(path))), split)


def first_tag(data: TaggedTexts, tag_names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """One label a text: its first tag among `tag_names`.

    Returns: rows (m,) int64, the texts that have such a tag; labels (m,) int32, the tag's place in `tag_names`.

    >>> first_tag(TaggedTexts(("", "", ""), (("c", "a"), ("x",), ("b",))), ("a", "b"))
    (array([0, 2]), array([0, 1], dtype=int32))
    """
    index = {tag: i for i, tag in enumerate(tag_names)}
    labels = [next((index[tag] for tag in tags if tag in index), -1) for tags in data.tags]
    rows = np.flatnonzero(np.array(labels, dtype=np.int32) >= 0)
    return rows, np.array(labels, dtype=np.int32)[rows]


def every_tag(data: TaggedTexts, tag_names: Sequence[str]) -> np.ndarray:
    """All labels of each text: its tags' places in `tag_names`, other tags left out; (n, k) int32, padded with -1.

    >>> every_tag(TaggedTexts(("", ""), (("c", "a"), ("x",))), ("a", "b", "c"))
    array([[ 0,  2],
           [-1, -1]], dtype=int32)
    """
    index = {tag: i for i, tag in enumerate(tag_names)}
    return label_sets([[index[tag] for tag in tags if tag in index] for tags in data.tags])


def stackoverflow(
    data_dir=None,
    *,
    features: TextKind | TextEncoder = "term-frequency",
    vocabulary_size: int = 10_000,
    num_tags: int = 100,
    unit_rows: bool = False,
    multi_label: bool = False,
) -> tuple[Dataset, Dataset]:
    """Titles of Stack Overflow questions, labelled with their first tag among the `num_tags` most frequent ones.

    Titles without such a tag are left out. The split is `public_split`: 80 % train, 20 % test. Tags and, unless an
    encoder is given, the vocabulary are taken from the training rows, which no privacy guarantee covers.

    Args:
      data_dir: holds so_titles_tags_30k.csv.gz with the columns title and tags (joined by |).
      features: see `imdb`.
      multi_label: label every title with all of those tags that it has, which may be none; no title is left out.
    """
    where = find(
        data_dir,
        ("so_titles_tags_30k.csv.gz", "so_titles_tags_30k.csv"),
        what="Stack Overflow titles",
        obtain=f"export {STACKOVERFLOW_SOURCE}",
    )
    texts = read_tagged_texts(where)
    train, test = (texts.rows(rows) for rows in public_split(texts.num_examples))
    names = train.top_tags(num_tags)
    if len(names) < 2:
        raise DataError(
            f"Expected two or more tags to tell apart, got {listed(names) or 'none'} with num_tags {num_tags}."
        )
    if not isinstance(features, TextEncoder):
        features = TextEncoder.fit(train.texts, features, vocabulary_size=vocabulary_size, unit_rows=unit_rows)
    parts = []
    for part in (train, test):
        if multi_label:
            rows, labels = range(part.num_examples), every_tag(part, names)
        else:
            rows, labels = first_tag(part, names)
        parts.append(Dataset("stackoverflow", features.encode(part.rows(rows).texts), labels, names))
    return parts[0], parts[1]
