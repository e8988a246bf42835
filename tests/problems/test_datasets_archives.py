"""The paper's tasks in each layout users have them, and, where the real data is at hand, the facts known about it."""

import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from noisecast.problems.datasets import (
    DATASETS,
    DataError,
    Ratings,
    TaggedTexts,
    TextEncoder,
    data_folder,
    every_tag,
    first_tag,
    forum500,
    imdb,
    imdb_texts,
    movielens,
    read_tagged_texts,
    stackoverflow,
)


@pytest.fixture(autouse=True)
def no_data_folder_of_the_user(monkeypatch):
    monkeypatch.delenv("NOISECAST_DATA", raising=False)


def find_real_data() -> Path | None:
    folders = [os.environ.get("NOISECAST_DATA"), Path(__file__).parents[3] / "shared" / "data"]
    return next((Path(folder) for folder in folders if folder and Path(folder).is_dir()), None)


REAL_DATA = find_real_data()


def real(name: str) -> Path:
    if REAL_DATA is None or not (REAL_DATA / name).exists():
        pytest.skip(f"needs {name} in the folder that NOISECAST_DATA names")
    return REAL_DATA


# --- IMDB

REVIEWS = {
    "train": [("pos", 0, 9, "A fine film.<br />Fine!"), ("pos", 10, 8, "Großartig"), ("neg", 2, 1, "A bore")],
    "test": [("pos", 1, 10, "Fine, fine"), ("neg", 0, 3, "No")],
}


def imdb_as_csv(folder: Path) -> None:
    for part, reviews in REVIEWS.items():
        rows = [f'{int(kind == "pos")},{rating},{number},"{text}"' for kind, number, rating, text in reviews]
        content = "\n".join(["label,rating,id,text", *rows]).encode()
        (folder / f"imdb_{part}.csv.gz").write_bytes(gzip.compress(content))


def imdb_files() -> dict[str, bytes]:
    files = {
        f"aclImdb/{part}/{kind}/{number}_{rating}.txt": text.encode()
        for part, reviews in REVIEWS.items()
        for kind, number, rating, text in reversed(reviews)
    }
    return {
        **files,
        "aclImdb/train/unsup/0_0.txt": b"unlabelled",
        "aclImdb/README": b"x",
        "aclImdb/train/urls.txt": b"x",
    }


def imdb_as_folder(folder: Path) -> None:
    for name, content in imdb_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def imdb_as_archive(folder: Path) -> None:
    with tarfile.open(folder / "aclImdb_v1.tar.gz", "w:gz") as archive:
        for name, content in imdb_files().items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("layout", [imdb_as_csv, imdb_as_folder, imdb_as_archive])
def test_each_layout_of_imdb_gives_the_same_rows(tmp_path, layout):
    layout(tmp_path)
    train, test = imdb_texts(tmp_path)
    assert train["text"].tolist() == [review[3] for review in REVIEWS["train"]]
    assert train["label"].tolist() == ["1", "1", "0"] and test["label"].tolist() == ["1", "0"]
    train, test = imdb(tmp_path)
    assert train.label_names == ("negative", "positive")
    assert train.labels.tolist() == [1, 1, 0] and test.labels.tolist() == [1, 0]
    np.testing.assert_allclose(train.features.sum(axis=1), 1, rtol=1e-6)


def test_the_vocabulary_comes_from_the_training_reviews_or_from_the_encoder_given(tmp_path):
    imdb_as_csv(tmp_path)
    train, test = imdb(tmp_path, features="binary", vocabulary_size=2)
    assert train.features.toarray().tolist() == [[1, 1], [0, 0], [1, 0]]  # a, fine
    assert test.features.toarray().tolist() == [[0, 1], [0, 0]]
    train, _ = imdb(tmp_path, features=TextEncoder("count", ("bore",)))
    assert train.features.toarray().tolist() == [[0], [0], [1]]


def test_a_crafted_archive_writes_nothing(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    with tarfile.open(folder / "aclImdb_v1.tar.gz", "w:gz") as archive:
        for name in ("../../train/pos/0_9.txt", "train/neg/0_1.txt", "/test/pos/0_9.txt", "test/neg/0_1.txt"):
            member = tarfile.TarInfo(name)
            member.size = 2
            archive.addfile(member, io.BytesIO(b"hi"))
    before = sorted(tmp_path.rglob("*"))
    imdb_texts(folder)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_cut_archive_is_refused(tmp_path):
    imdb_as_archive(tmp_path)
    whole = (tmp_path / "aclImdb_v1.tar.gz").read_bytes()
    for content in (whole[: len(whole) // 2], b"garbage" * 100):
        (tmp_path / "aclImdb_v1.tar.gz").write_bytes(content)
        with pytest.raises(DataError, match="not a whole archive"):
            imdb_texts(tmp_path)


def test_an_imdb_folder_without_reviews_or_test_file_is_refused(tmp_path):
    (tmp_path / "aclImdb").mkdir()
    with pytest.raises(DataError, match=r"train/pos/\*.txt"):
        imdb(tmp_path)
    imdb_as_csv(tmp_path)
    (tmp_path / "imdb_test.csv.gz").unlink()
    with pytest.raises(DataError, match=r"no file .*imdb_test.csv.gz"):
        imdb(tmp_path)


# --- MovieLens

RATINGS = b"1\t1682\t3\t881250949\n943\t1\t5\t891717742\n7\t7\t1\t0\n"


def movielens_as_zip(folder: Path) -> None:
    with zipfile.ZipFile(folder / "ml-100k.zip", "w") as archive:
        archive.writestr("ml-100k/README", "x")
        archive.writestr("ml-100k/u.data", RATINGS)


def movielens_as_folder(folder: Path) -> None:
    (folder / "ml-100k").mkdir()
    (folder / "ml-100k" / "u.data").write_bytes(RATINGS)


@pytest.mark.parametrize(
    "layout",
    [
        movielens_as_zip,
        movielens_as_folder,
        lambda folder: (folder / "u.data").write_bytes(RATINGS),
        lambda folder: (folder / "ml-100k_u.data.gz").write_bytes(gzip.compress(RATINGS)),
    ],
)
def test_each_layout_of_movielens_gives_ids_from_zero(tmp_path, layout):
    layout(tmp_path)
    ratings = movielens(tmp_path)
    assert ratings.user.tolist() == [0, 942, 6] and ratings.item.tolist() == [1681, 0, 6]
    assert ratings.rating.tolist() == [3, 5, 1] and ratings.num_examples == 3
    assert (ratings.num_users, ratings.num_items) == (943, 1682)
    assert ratings.user.dtype == ratings.item.dtype == np.int32 and ratings.rating.dtype == np.float32
    assert ratings.rows([2, 0]).rating.tolist() == [1, 3]
    assert ratings.rows([2, 0]).content_hash != ratings.content_hash == movielens(tmp_path).content_hash


@pytest.mark.parametrize(
    "content, says",
    [
        (b"0\t1\t3\t0\n", "user ids in 1 .. 943 in {}, got 0 in row 1"),
        (b"1\t1\t3\t0\n1\t1683\t3\t0\n", "item ids in 1 .. 1682 in {}, got 1683 in row 2"),
        (b"1.5\t1\t3\t0\n", "got 1.5 in row 1"),
        (b"1\t1\tfine\t0\n", "got 'fine' in row 1 of column 'rating'"),
        (b"1\t1\t3\t0\n1\t1\t3\n", "Row 2 of {} has 3 cells, expected 4"),
        (b"user,item,rating\n", "Row 1 of {} has 1 cells, expected 4"),
        (b"", "is empty"),
    ],
)
def test_bad_ratings_are_refused(tmp_path, content, says):
    file = tmp_path / "u.data"
    file.write_bytes(content)
    with pytest.raises(DataError) as error:
        movielens(tmp_path)
    assert says.replace("{}", str(file)) in str(error.value)


def test_a_bad_zip_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "ml-100k.zip", "w") as archive:
        archive.writestr("ml-100k/README", "x")
    with pytest.raises(DataError, match=r"Expected u\.data in"):
        movielens(tmp_path)
    (tmp_path / "ml-100k.zip").write_bytes(b"PK garbage")
    with pytest.raises(DataError, match="not a whole zip archive"):
        movielens(tmp_path)


@pytest.mark.parametrize(
    "user, item, rating, says",
    [
        ([0, 2], [0, 0], [1, 1], "user ids in 0 .. 1, got 0 .. 2"),
        ([0, 1], [-1, 0], [1, 1], "item ids in 0 .. 1, got -1 .. 0"),
        ([0], [0, 0], [1, 1], "got (1,)"),
        ([0.5, 1], [0, 0], [1, 1], "integer user ids"),
        ([0, 1], [0, 0], [1, np.nan], "finite ratings"),
    ],
)
def test_a_bad_table_of_ratings_is_refused(user, item, rating, says):
    with pytest.raises(DataError) as error:
        Ratings(np.array(user), np.array(item), np.array(rating), num_users=2, num_items=2)
    assert says in str(error.value)


# --- Stack Overflow

POSTS = dict(indptr=[0, 2, 3, 4], indices=[0, 1, 1, 0], counts=[1, 3, 2, 1], num_tokens=[4, 4, 1], label=[5, 9, 5])


def test_forum_posts_are_split_where_the_file_says(tmp_path):
    np.savez(tmp_path / "forum500_counts.npz", **POSTS, num_train=2, num_features=3)
    train, test = forum500(tmp_path)
    assert train.features.toarray().tolist() == [[0.25, 0.75, 0], [0, 0.5, 0]]
    assert test.features.toarray().tolist() == [[1, 0, 0]] and test.labels.tolist() == [0]
    assert train.label_names == test.label_names == ("5", "9")


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"num_train": 3}, "0 < num_train < 3"),
        ({"num_train": 0}, "got 0"),
        ({"num_train": 1.5}, "one integer as 'num_train'"),
        ({"num_train": 2, "label": [0, 1]}, "Expected 3 labels"),
        ({}, "the array 'num_train'"),
    ],
)
def test_bad_forum_posts_are_refused(tmp_path, changes, says):
    np.savez(tmp_path / "forum500_counts.npz", **{**POSTS, **changes})
    with pytest.raises(DataError) as error:
        forum500(tmp_path)
    assert says in str(error.value)


def test_any_table_of_texts_and_tags_is_read(tmp_path):
    file = tmp_path / "q.tsv"
    file.write_text("id\tbody\tlabels\n1\thow to loop\tpython, c\n2\tjoin\tsql\n")
    data = read_tagged_texts(file, text="body", tags="labels", separator=",")
    assert data == TaggedTexts(("how to loop", "join"), (("python", "c"), ("sql",)))
    file.write_text("title\ttags\na\tx\nb\t|\n")
    with pytest.raises(DataError, match=r"Row 2 of .* has no tag in column 'tags'"):
        read_tagged_texts(file)


def test_single_and_multiple_labels_of_tags():
    data = TaggedTexts(("1", "2", "3", "4"), (("c", "sql"), ("perl",), ("sql",), ("perl", "c")))
    names = data.top_tags(3)
    assert names == ("c", "perl", "sql"), "two each: ties go by the alphabet"
    rows, labels = first_tag(data, ("c", "sql"))
    assert rows.tolist() == [0, 2, 3] and labels.tolist() == [0, 1, 0]
    assert every_tag(data, names).tolist() == [[0, 2], [1, -1], [2, -1], [0, 1]]
    assert every_tag(data, ("perl",)).tolist() == [[-1], [0], [-1], [0]]
    assert every_tag(data, ()).tolist() == [[-1]] * 4


def test_titles_without_a_top_tag_are_left_out(tmp_path):
    rows = [f"title {i},{['c', 'sql', 'perl|c', 'rare'][i % 4]}" for i in range(40)]
    (tmp_path / "so_titles_tags_30k.csv").write_text("title,tags\n" + "\n".join(rows))
    train, test = stackoverflow(tmp_path, num_tags=2)
    assert train.num_classes == 2 and "rare" not in train.label_names
    assert train.num_examples + test.num_examples < 40
    with pytest.raises(DataError, match="two or more tags"):
        stackoverflow(tmp_path, num_tags=1)


# --- the folder


@pytest.mark.parametrize("entry", [e for e in DATASETS if e.needs_data_dir], ids=lambda e: e.name)
def test_missing_data_says_what_was_looked_for_and_where_to_get_it(tmp_path, monkeypatch, entry):
    with pytest.raises(DataError, match="environment variable NOISECAST_DATA"):
        entry.load()
    monkeypatch.setenv("NOISECAST_DATA", str(tmp_path))
    for load in (entry.load, lambda: entry.load(tmp_path)):
        with pytest.raises(DataError, match=f"in {tmp_path}, looked for .*; (get|export|make)"):
            load()
    with pytest.raises(DataError, match="not a directory"):
        entry.load(tmp_path / "nowhere")


def test_the_argument_wins_over_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("NOISECAST_DATA", "/nowhere")
    assert data_folder(tmp_path) == tmp_path


# --- the real data


def test_real_movielens_has_its_known_size_and_moments():
    ratings = movielens(real("ml-100k_u.data.gz"))
    assert ratings.num_examples == 100_000
    assert (len(np.unique(ratings.user)), len(np.unique(ratings.item))) == (943, 1682)
    assert ratings.rating.mean() == pytest.approx(3.530, abs=1e-3)
    assert ratings.rating.std() == pytest.approx(1.126, abs=1e-3)


def test_real_titles_have_a_hundred_tags():
    folder = real("so_titles_tags_30k.csv.gz")
    data = read_tagged_texts(folder / "so_titles_tags_30k.csv.gz")
    assert data.num_examples == 30_000 and len(data.top_tags(1000)) == 100
    train, test = stackoverflow(folder)
    assert (train.num_examples, test.num_examples, train.num_classes) == (24_000, 6_000, 100)
    assert train.features.sum(axis=1).max() == pytest.approx(1, rel=1e-6)


@pytest.mark.slow
def test_real_forum_posts_have_their_known_sizes():
    train, test = forum500(real("forum500_counts.npz"))
    assert train.features.shape == (246_092, 10_000) and test.features.shape == (61_719, 10_000)
    assert train.num_classes == 500 and train.features.sum(axis=1).max() <= 1 + 1e-5


@pytest.mark.slow
def test_real_imdb_in_the_papers_encoding():
    train, test = imdb(real("imdb_train.csv.gz"))
    assert train.features.shape == test.features.shape == (25_000, 10_000)
    assert np.bincount(train.labels).tolist() == np.bincount(test.labels).tolist() == [12_500, 12_500]
    for part in (train, test):
        np.testing.assert_allclose(part.features.sum(axis=1), 1, rtol=1e-5)
        norms = np.sqrt(part.features.power(2).sum(axis=1))
        assert norms.min() > 0.05 and norms.max() < 1, "so that the bias carries most of a gradient"
