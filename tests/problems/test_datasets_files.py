"""Users' files: each format read, each bad one met by one sentence."""

import gzip
import io
import json
import pickle
import time

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pytest
import scipy.sparse as sp

from noisecast.problems.datasets import (
    DataError,
    MatrixEncoder,
    ReadOptions,
    csv_file,
    encoder_from_json,
    load_features,
    load_file,
    load_test_file,
)
from noisecast.problems.datasets.tables import read_table

FEATURES = np.array([[1.0, 0.0, -2.5], [0.0, 4.0, 0.0], [0.5, 0.0, 3.0], [0.0, 0.0, 1.0]])
LABELS = ["no", "yes", "yes", "no"]
FRAME = pd.DataFrame({"a": FEATURES[:, 0], "b": FEATURES[:, 1], "c": FEATURES[:, 2], "label": LABELS})


def npz(**arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=True, **arrays)
    return buffer.getvalue()


def parquet(frame: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.to_parquet(buffer)
    return buffer.getvalue()


CSR = sp.csr_array(FEATURES)
SVM_FROM_1 = "-1 1:1 3:-2.5\n+1 2:4 # a comment\n1 qid:7 1:0.5 3:3\n\n-1 3:1\n"
SVM_FROM_0 = "-1 0:1 2:-2.5\n+1 1:4\n1 0:0.5 2:3\n-1 2:1\n"
FORMATS = {
    "t.csv": FRAME.to_csv(index=False).encode(),
    "t.CSV": ("\ufeff" + FRAME.to_csv(index=False, lineterminator="\r\n")).encode(),
    "t.tsv": FRAME.to_csv(index=False, sep="\t").encode(),
    "t.parquet": parquet(FRAME),
    "indexed.parquet": parquet(FRAME.set_index(pd.Index([9, 8, 7, 6]))),
    "spaced.parquet": parquet(FRAME.rename(columns={"a": " a", "label": "label "})),
    "t.svm": SVM_FROM_1.encode(),
    "t.libsvm": SVM_FROM_0.encode(),
    "t.npz": npz(features=FEATURES, labels=np.array(LABELS)),
    "xy.npz": npz(X=FEATURES.astype(np.float16), y=np.array([0, 1, 1, 0])),
    "csr.npz": npz(indptr=CSR.indptr, indices=CSR.indices, data=CSR.data, shape=CSR.shape, label=[3, 7, 7, 3]),
}


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz"])
@pytest.mark.parametrize("separator", [";", "\t"])
def test_what_separates_cells_is_read_off_the_first_line(tmp_path, name, separator):
    rows = [["text", "label"], ["one; two, three", "no"], ["four", "yes"]]
    lines = [separator.join(f'"{cell}"' for cell in row) for row in rows]
    text = ("\ufeff\n" + "\n".join(lines) + "\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert read_table(tmp_path / name).to_numpy().tolist() == rows[1:]


@pytest.mark.parametrize(
    "name, text",
    [
        ("t.csv", '"size, cm";b;label\n1;2;y\n'),
        ("t.csv", '"a;b"\tlabel\n1\ty\n'),
        ("t.csv", "x;y\tz\tlabel\n1\t2\ty\n"),
        ("t.tsv", "a,b,label\n1,2,y\n"),
    ],
)
def test_separators_within_names_are_none(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_table(tmp_path / name)["label"].tolist() == ["y"]


def test_decimal_commas_are_told(tmp_path):
    (tmp_path / "t.csv").write_text("a;label\n1,5;y\n2,5;n\n")
    with pytest.raises(DataError, match=r"got '1,5' in row 1 of column 'a'.*write decimals with a point"):
        load_file(tmp_path / "t.csv")


def test_a_first_line_with_commas_is_separated_by_them(tmp_path):
    (tmp_path / "t.csv").write_text("a;b,label\n1,no\n")
    assert list(read_table(tmp_path / "t.csv").columns) == ["a;b", "label"]


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_the_same_arrays(tmp_path, name, zipped):
    if name.endswith("svm"):
        pytest.importorskip("sklearn")
    file = tmp_path / (name + ".gz" * zipped)
    file.write_bytes(gzip.compress(FORMATS[name]) if zipped else FORMATS[name])
    data, encoder = load_file(file)
    np.testing.assert_allclose(sp.csr_array(data.features).toarray(), FEATURES)
    assert data.labels.tolist() == [0, 1, 1, 0] and data.num_classes == 2
    again = encoder_from_json(json.loads(json.dumps(encoder.to_json())))
    assert load_test_file(file, again, data.label_names).content_hash == data.content_hash
    np.testing.assert_array_equal(sp.csr_array(load_features(file, again)).toarray(), FEATURES)


def write(folder, name: str, content: str | bytes):
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("yes, no", [("true", "false"), ("True", "False"), ("TRUE", " FALSE")])
def test_true_and_false_are_one_and_zero(tmp_path, monkeypatch, yes, no, wide):
    """As features, beside numbers too, and as labels: false is the first class."""
    if wide:
        monkeypatch.setattr("noisecast.problems.datasets.csv_file.WIDE", 2)
    lines = [f"{yes},1.5,{yes}", f"{no},{no},{no}", f"{yes},{yes},{yes}"]
    (tmp_path / "t.csv").write_text("\n".join(["is_new,mixed,label", *lines]), encoding="utf-8")
    data, _ = load_file(tmp_path / "t.csv")
    assert np.asarray(data.features).tolist() == [[1, 1.5], [0, 0], [1, 1]]
    assert data.labels.tolist() == [1, 0, 1] and data.label_names == (no.strip(), yes)
    flags = pd.DataFrame({"is_new": [True, False, True], "label": [True, False, True]})
    flags.astype({"is_new": object}).to_parquet(tmp_path / "t.parquet")
    data, _ = load_file(tmp_path / "t.parquet")
    assert np.asarray(data.features).tolist() == [[1], [0], [1]] and data.labels.tolist() == [1, 0, 1]


def test_a_truth_that_is_missing_is_named_by_its_row(tmp_path):
    (tmp_path / "t.csv").write_text("is_new,label\ntrue,a\n,b\n", encoding="utf-8")
    with pytest.raises(DataError, match="got nothing in row 2 of column 'is_new'"):
        load_file(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text("is_new,label\ntrue,a\nyes,b\n", encoding="utf-8")
    with pytest.raises(DataError, match="got 'yes' in row 2 of column 'is_new'"):
        load_file(tmp_path / "t.csv")


def test_text_beside_other_columns(tmp_path):
    train = write(tmp_path, "train.csv", 'id,text,label\nx,"good, ""good"" film\nnot bad",1\ny,NA,0\nz,,0\n')
    data, encoder = load_file(train, ReadOptions(text="text", text_kind="count"))
    assert dict(zip(encoder.vocabulary, data.features[[0]].toarray()[0])) == {  # type: ignore[union-attr]
        "good": 2, "bad": 1, "film": 1, "na": 0, "not": 1,
    }  # fmt: skip
    assert data.features[[1]].sum() == 1, "the word NA is no missing value"
    assert data.features[[2]].sum() == 0
    new = write(tmp_path, "new.tsv", "text\tother\ngood unknown\tq\n")
    assert load_features(new, encoder).toarray().sum() == 1


def test_a_public_vocabulary_is_marked_public(tmp_path):
    train = write(tmp_path, "train.csv", "text,label\ngood film,1\nbad film,0\n")
    words = write(tmp_path, "words.txt", "bad\ngood\n")
    data, encoder = load_file(train, ReadOptions(text="text", text_kind="binary", vocabulary=words))
    assert encoder.vocabulary_is_private is False  # type: ignore[union-attr]
    assert data.features.toarray().tolist() == [[0, 1], [1, 0]]


def test_chosen_columns_with_bounds(tmp_path):
    train = write(tmp_path, "train.csv", "name,age,height,label\nann,60,1.5,0\nbob,150,2.0,1\n")
    bounds = write(tmp_path, "bounds.toml", "age = [0, 120]\nheight = [0.5, 2.5]\n")
    data, encoder = load_file(train, ReadOptions(columns=("height", "age"), bounds=bounds))
    np.testing.assert_allclose(data.features, [[0, 0], [0.5, 1]])
    test = write(tmp_path, "test.csv", "age,height,label\n0,1.5,1\n")
    part = load_test_file(test, encoder, data.label_names)
    np.testing.assert_allclose(part.features, [[0, -1]])
    assert part.labels.tolist() == [1]


def test_an_svmlight_test_file_is_numbered_as_the_training_file_was(tmp_path):
    """A test file without its first feature looks as if it counted from 1; only the training file knows."""
    pytest.importorskip("sklearn")
    _, encoder = load_file(write(tmp_path, "train.svm", SVM_FROM_0))
    assert encoder == MatrixEncoder(3, first_column=0)
    assert load_features(write(tmp_path, "test.svm", "1 1:5\n"), encoder).toarray().tolist() == [[0, 5, 0]]
    _, encoder = load_file(write(tmp_path, "train.svm", SVM_FROM_1))
    assert encoder == MatrixEncoder(3, first_column=1)
    assert load_features(write(tmp_path, "test.svm", "1 1:5\n"), encoder).toarray().tolist() == [[5, 0, 0]]


def test_counts_with_num_tokens_are_term_frequencies(tmp_path):
    arrays = dict(indptr=[0, 2, 2, 3], indices=[0, 2, 1], counts=np.array([1, 3, 200], np.uint8), label=[0, 1, 1])
    file = write(tmp_path, "c.npz", npz(**arrays, num_tokens=np.array([4, 9, 400], np.uint16), num_features=4))
    data, _ = load_file(file)
    np.testing.assert_allclose(data.features.toarray(), [[0.25, 0, 0.75, 0], [0, 0, 0, 0], [0, 0.5, 0, 0]])


def test_a_labelled_npz_without_labels_still_serves_prediction(tmp_path):
    file = write(tmp_path, "x.npz", npz(X=FEATURES))
    assert load_features(file, MatrixEncoder(3)).shape == (4, 3)


def test_a_long_text_straddles_no_block(tmp_path):
    long = "word " * 500_000
    file = write(tmp_path, "long.csv", f"text,label\n{long},0\nshort,1\n")
    data, _ = load_file(file, ReadOptions(text="text", text_kind="count"))
    assert data.features.max() == 500_000


def test_many_columns_take_seconds(tmp_path):
    # As expression data has. Done column by column with pandas, or looking each name up in a list, it took a minute.
    values = np.random.default_rng(1).normal(size=(20, 20_000)).round(3)
    frame = pd.DataFrame(values, columns=[f"gene{j}" for j in range(20_000)]).assign(label=[0, 1] * 10)
    frame.to_csv(file := tmp_path / "wide.csv", index=False)
    began = time.process_time()
    data, _ = load_file(file)
    assert time.process_time() - began < 12
    np.testing.assert_allclose(data.features, values, rtol=1e-6)


@pytest.mark.parametrize(
    "rows",
    [
        "1,2,a\n3,4.5,b\n",
        " 1,-2e3,a\r\n\r\n+3,.5,b\r\n",
        '"1",2,"a ""b"", c\nd"\n3,4,\n',
        "1,2,a\n3,4",  # ragged
        "1,2,a,b\n",
        "1,,a\n",
        "1, ,a\n",
        "1,x,a\n",
        "1,nan,a\n",
        "1,2,a\n-inf,4,b\n",
        "1,2,a\n1_000,4,b\n",
        "1,2,a\n\u0663,4,b\n",
        "1,2,a\n1e39,4,b\n",
        "1,0x1F,a\n",
        "",
        "\n\n",
    ],
)
@pytest.mark.parametrize("text", [None, "label"])
def test_a_wide_table_is_read_as_a_narrow_one(tmp_path, monkeypatch, rows, text):
    """Row by row and block by block: the same numbers and texts, or the same sentence."""
    file = write(tmp_path, "a.csv", "x,y,label\n" + rows)

    def read():
        table = csv_file.open_csv(file)
        try:
            frame = table.frame(["x", "y", "label"], numbers=["x", "y"], dtype=np.float32)
            return frame.to_dict("list") if text is None else list(table.texts(text))
        except DataError as error:
            return str(error)

    narrow = read()
    monkeypatch.setattr(csv_file, "WIDE", 1)
    assert read() == narrow


def test_a_table_whose_lines_end_as_on_old_macintoshes_is_no_wide_one(tmp_path):
    file = write(tmp_path, "a.csv", "x,y,label\r" + "1,2,no\r3,4,yes\r" * 60_000)
    assert load_file(file)[0].features.shape == (120_000, 2)


@pytest.mark.slow
def test_a_table_with_more_columns_than_memory_is_kept_for(tmp_path):
    names = [f"x{j}" for j in range(60_000)]
    pd.DataFrame([[1.0] * 60_000] * 2, columns=names).to_parquet(parquet := tmp_path / "a.parquet")
    for file in (
        write(tmp_path, "a.csv", ",".join(names) + "\n" + ",".join(["1"] * 60_000)),
        write(tmp_path, "b.csv", "," * 1_000_000 + "\n1,2\n"),
        parquet,
    ):
        with pytest.raises(DataError, match=r"Expected at most 50,000 columns in .*; save so many"):
            load_file(file)


def test_arrow_reads_ahead_in_no_file_of_python(tmp_path, monkeypatch):
    # Its thread may still read as the interpreter ends, and in a file of Python's that aborts it, after all went well.
    seen, open_csv = [], pa.csv.open_csv
    monkeypatch.setattr(pa.csv, "open_csv", lambda file, *rest: seen.append(type(file)) or open_csv(file, *rest))
    for name, num_rows in (("small.csv", 3), ("large.csv", 300_000)):
        (file := tmp_path / name).write_text("a,label\n" + "1,no\n2,yes\n" * num_rows)
        load_file(file)
    assert {pa.BufferReader, pa.OSFile} == set(seen)


def test_a_table_has_as_many_rows_as_the_file(tmp_path):
    """Thousands of short rows: row numbers and values stay right beyond the first block of the reader."""
    rows = [f"{i},{i % 2}" for i in range(300_000)]
    data, _ = load_file(write(tmp_path, "many.csv", "x,label\n" + "\n".join(rows)))
    np.testing.assert_array_equal(data.features[:, 0], np.arange(300_000, dtype=np.float32))
    rows[250_000] = "oops,0"
    with pytest.raises(DataError, match="'oops' in row 250001"):
        load_file(write(tmp_path, "many.csv", "x,label\n" + "\n".join(rows)))


TEXT = ReadOptions(text="text")
CSR_ARRAYS = dict(indptr=[0, 1, 2], indices=[0, 1], labels=[0, 1])
OBJECTS = np.array([{"a": 1}, None], dtype=object)
BAD_FILES = [
    # name, content, options, what the sentence says
    ("empty.csv", "", None, "empty.csv is empty"),
    ("blank.csv", "\n\n \n", None, "blank.csv is empty"),
    ("empty.csv.gz", gzip.compress(b"", mtime=0), None, "is empty"),
    ("empty.svm", "", None, "is empty"),
    ("header.csv", "a,label\n", None, "has a header (a, label) but no rows"),
    ("header.csv", "a,label", None, "has a header (a, label) but no rows"),
    ("header.parquet", parquet(FRAME[:0]), None, "but no rows"),
    ("t.csv", "a,b\n1,2\n", None, "Expected a column 'label' in {}, got the columns a, b"),
    ("t.csv", "1,2,0\n3,4,1\n", None, "got the columns 1, 2, 0"),
    ("t.csv", "txt,label\nhi,0\nho,1\n", TEXT, "Expected a column 'text' in {}, got the columns txt, label"),
    ("t.csv", "a,label\n1,0\n2,0\n", None, "only '0'"),
    ("t.csv", "a,label\n1,0\n2,\n", None, "Row 2 of {} has no label"),
    ("t.csv", "a,label\n1,0\n2, \n", None, "Row 2 of {} has no label"),
    ("t.csv", "a,label\n1,0\nnan,1\n", None, "finite number, got nan in row 2 of column 'a' of {}"),
    ("t.csv", "a,label\n1,0\n-inf,1\n", None, "finite number, got -inf in row 2 of column 'a'"),
    ("t.csv", "a,label\n1,0\n1e999,1\n", None, "finite number, got 1e999 in row 2 of column 'a'"),
    ("t.csv", "a,label\n1,0\n1e99,1\n", None, "finite in float32, got 1e+99 in row 2 of column 'a' of {}"),
    ("t.csv", "a,label\n1,0\n,1\n", None, "got nothing in row 2 of column 'a'"),
    ("t.csv", "a,city,label\n1,Paris,0\n2,Rome,1\n", None, "got 'Paris' in row 1 of column 'city'"),
    ("t.csv", 'a,label\n"1,5",0\n2,1\n', None, "got '1,5' in row 1 of column 'a'"),
    ("t.csv", "a,b,label\n1,2,0\n3,1\n", None, "Row 2 of {} has 2 cells, expected 3"),
    ("t.csv", "a,b,label\n1,2,0\n\n3,4,5,1\n", None, "Row 2 of {} has 4 cells, expected 3"),
    ("t.csv", 'a,b,label\n"1,2,0\n3,4,1\n', None, "The row of {} that begins in line 2 has a quote that is not closed"),
    ("t.tsv", "a\tlabel\n1,0\n", None, "Row 1 of {} has 1 cells, expected 2"),
    ("t.csv", "a,a,label\n1,2,0\n", None, "'a' twice"),
    ("t.csv", "a, a,label\n1,2,0\n", None, "'a' twice"),
    ("t.csv", ",a,label\n0,2,0\n1,3,1\n", None, "Column 1 of {} has no name"),
    ("t.csv", "label\n0\n1\n", None, "one column or more"),
    ("t.csv", "a,label\n" + "".join(f"1,{i / 7}\n" for i in range(40)), None, "40 in the 40 rows"),
    ("t.csv", "a,label\n1,0\n2,1\n", ReadOptions(columns=("b",)), "Expected a column 'b' in {}"),
    ("t.csv", "a,label\n1,0\n2,1\n", ReadOptions(columns=("a", "label")), "got 'label' among them"),
    ("t.csv", "a,label\n1,0\n2,1\n", ReadOptions(text="label"), "got 'label' for both"),
    ("t.csv", "a,label\n1,0\n2,1\n", ReadOptions(text="a", columns=("a",)), "only without a text column"),
    ("t.csv", "a,label\n1,0\n2,1\n", ReadOptions(vocabulary="w.txt"), "only with a text column"),
    ("t.csv", "a,label\n1,0\n2,1\n", ReadOptions(text="a", vocabulary="w.txt"), "There is no file w.txt"),
    ("t.csv", "text,label\n...,0\n?,1\n", TEXT, "are the texts or the file empty"),
    ("t.csv", "text,label\ncaf\xe9,0\n".encode("latin-1"), TEXT, "Line 2 of {} is not UTF-8"),
    ("t.csv", "text,label\na,0\nb,1\n".encode("utf-16"), TEXT, "Line 1 of {} is not UTF-8"),
    ("t.csv", "x" * 200_000 + "\n1\n", None, "does not start with a line of column names"),
    ("t.csv.gz", b"a,label\n1,0\n", None, "not a whole gzip file"),
    ("t.csv.gz", gzip.compress(b"a,label\n1,0\n" * 99, mtime=0)[:-12], None, "not a whole gzip file"),
    ("t.parquet", b"PAR1 garbage PAR1", None, "not a readable Parquet file"),
    ("t.parquet", parquet(FRAME)[:-20], None, "not a readable Parquet file"),
    ("t.parquet", parquet(FRAME.assign(b=[1, None, 2, 3])), None, "row 2 of column 'b'"),
    ("t.parquet", parquet(FRAME.assign(label=["a", None, "b", "a"])), None, "Row 2 of {} has no label"),
    ("t.parquet", parquet(FRAME.assign(b=[[1], [2], [3], [4]])), None, "column 'b'"),
    ("t.parquet", parquet(FRAME.assign(b=pd.to_datetime("2020-01-01"))), None, "got dates"),
    ("t.parquet", parquet(FRAME), ReadOptions(text="a"), "Expected text in column 'a' of {}, got 1.0 in row 1"),
    ("t.svm", "1 1:2\n1 x:3\n", None, "Line 2 of {} holds 'x:3'"),
    ("t.svm", "1 1:2\n\nyes 1:3\n", None, "Line 3 of {} starts with 'yes'"),
    ("t.svm", "1 1:2\n-1 1:3 4\n", None, "Line 2 of {} holds '4'"),
    ("t.svm", "1 3:2 2:1\n", None, "Line 1 of {} names feature 2 after 3"),
    ("t.svm", "1 1:2\n-1 1:nan\n", None, "Line 2 of {} holds '1:nan'"),
    ("t.svm", "1 1:2\n-1 -4:1\n", None, "Line 2 of {} holds '-4:1'"),
    ("t.svm", "1 1:2\n-1 99999999999:1\n", None, "Line 2 of {} holds '99999999999:1'"),
    ("t.svm", "1,2 1:2\n", None, "Line 1 of {} starts with '1,2'"),
    ("t.svm", "# nothing\n", None, "holds no readable svmlight line"),
    ("t.svm", "1\n-1\n", None, "one feature or more"),
    ("t.svm", "1 1:2\n1 1:3\n", None, "only '1'"),
    ("t.svm", "1 1:2\n-1 1:3\n", TEXT, "Expected a table"),
    ("t.npz", b"garbage", None, "not a readable .npz file"),
    ("t.npz", npz(X=FEATURES, y=[0, 1, 1, 0])[:-30], None, "not a readable .npz file"),
    ("t.npz", pickle.dumps({"X": 1}), None, "not a readable .npz file"),
    ("t.npz", npz(X=OBJECTS, y=[0, 1]), None, "pickled Python objects"),
    ("t.npz", npz(x=FEATURES, y=[0, 1, 1, 0]), None, "'features' or 'X' in {}, or 'indptr'"),
    ("t.npz", npz(X=FEATURES), None, "'labels', 'label' or 'y' in {}, got none"),
    ("t.npz", npz(X=FEATURES, y=[0, 1]), None, "Expected 4 labels in {}, one a row, got the shape (2,)"),
    ("t.npz", npz(X=FEATURES, y=np.eye(4)), None, "got the shape (4, 4)"),
    ("t.npz", npz(X=FEATURES[0], y=[0, 1, 1]), None, "Expected numeric features (n, p)"),
    ("t.npz", npz(X=FEATURES * 1j, y=[0, 1, 1, 0]), None, "Expected numeric features (n, p)"),
    ("t.npz", npz(X=np.array([["a"], ["b"]]), y=[0, 1]), None, "Expected numeric features (n, p)"),
    ("t.npz", npz(X=FEATURES[:0], y=[]), None, "got float64 (0, 3)"),
    ("t.npz", npz(X=np.where(FEATURES == 4, np.inf, FEATURES), y=[0, 1, 1, 0]), None, "got inf in row 2 of {}"),
    ("t.npz", npz(**CSR_ARRAYS), None, "Expected an array 'data' (k,) of numbers in {}"),
    ("t.npz", npz(**{**CSR_ARRAYS, "indptr": [0, 2, 1]}, data=[1, 1]), None, "Expected indptr from 0 upwards to 2"),
    ("t.npz", npz(**{**CSR_ARRAYS, "indptr": [0, 1, 3]}, data=[1, 1]), None, "Expected indptr from 0 upwards to 2"),
    ("t.npz", npz(**{**CSR_ARRAYS, "indices": [0, -1]}, data=[1, 1]), None, "non-negative integer indices"),
    ("t.npz", npz(**{**CSR_ARRAYS, "indices": [0.0, 1.0]}, data=[1, 1]), None, "non-negative integer indices"),
    ("t.npz", npz(**CSR_ARRAYS, data=[1, 1, 1]), None, "Expected indptr"),
    ("t.npz", npz(**CSR_ARRAYS, data=[1, np.nan]), None, "got nan in row 2"),
    ("t.npz", npz(**CSR_ARRAYS, data=[1, 1], num_features=1), None, "Expected indices below 1"),
    ("t.npz", npz(**CSR_ARRAYS, data=[1, 1], num_features=[1, 2]), None, "one integer as 'num_features'"),
    ("t.npz", npz(**CSR_ARRAYS, counts=[1, -2]), None, "Expected counts >= 0 in {}, got -2 in row 2"),
    ("t.npz", npz(**CSR_ARRAYS, counts=[1, 2], num_tokens=[1, 1]), None, "got 1 tokens and 2 counts in row 2"),
    ("t.npz", npz(**CSR_ARRAYS, counts=[1, 0], num_tokens=[1, 0]), None, "got 0 tokens and 0 counts in row 2"),
    ("t.npz", npz(**CSR_ARRAYS, counts=[1, 2], num_tokens=[3]), None, "Expected num_tokens (2,)"),
    ("t.npz", FORMATS["t.npz"], ReadOptions(label="answer"), "a table for the label column 'answer', got the matrix"),
    ("t.svm", SVM_FROM_1, ReadOptions(label="answer"), "a table for the label column 'answer', got the matrix"),
    ("t.npz", npz(X=FEATURES, y=[0, 1, 1, 0], labels=[1, 0, 0, 1]), None, "one array of labels in {}, got labels, y"),
    ("t.npz", FORMATS["t.npz"], ReadOptions(max_tokens=5), "for text, vocabulary, max_tokens, columns or"),
    ("t.xlsx", "PK", None, ".csv, .tsv, .parquet, .svm, .svmlight, .libsvm, .npz (and perhaps .gz), got {}"),
    ("t", "a,label\n", None, "Expected a file that ends in"),
    ("t.pkl", pickle.dumps(1), None, "Expected a file that ends in"),
]  # fmt: skip


@pytest.mark.parametrize("name, content, options, says", BAD_FILES)
def test_a_bad_file_meets_one_sentence(tmp_path, name, content, options, says):
    if name.endswith(".svm"):
        pytest.importorskip("sklearn")
    file = write(tmp_path, name, content)
    with pytest.raises(DataError) as error:
        load_file(file, options)
    sentence = str(error.value)
    assert says.replace("{}", str(file)) in sentence
    assert sentence.endswith((".", "?")) and "\n" not in sentence


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_read_or_meets_a_sentence_but_never_a_traceback(tmp_path, name):
    if name.endswith("svm"):
        pytest.importorskip("sklearn")
    random, whole = np.random.default_rng(0), FORMATS[name]
    refused = 0
    for _ in range(100):
        damaged = bytearray(whole)
        at = random.integers(len(whole), size=2)
        damaged[at[0]] = random.integers(256)
        del damaged[at[1] : at[1] + random.integers(8)]
        try:
            load_file(write(tmp_path, name, bytes(damaged)))
        except DataError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 10


def test_a_missing_file_and_a_directory_meet_a_sentence(tmp_path):
    with pytest.raises(DataError, match="There is no file"):
        load_file(tmp_path / "no.csv")
    for name in ("folder", "folder.csv"):
        (tmp_path / name).mkdir()
        with pytest.raises(DataError, match="Expected a file, got the directory"):
            load_file(tmp_path / name)


BAD_TESTS = [
    ("test.csv", "a,b,label\n1,2,0\n1,2,7\n", "Row 2 of {} has the label '7', which"),
    ("test.csv", "a,label\n1,0\n", "Expected a column 'b' in {}, got the columns a, label"),
    ("test.csv", "a,b\n1,0\n", "Expected a column 'label'"),
    ("test.csv", "a,b,label\n1,x,0\n", "got 'x' in row 1 of column 'b'"),
    ("test.npz", npz(X=FEATURES, y=[0, 1, 1, 0]), "Expected a table with columns, as in training, got {}"),
]  # fmt: skip


@pytest.mark.parametrize("name, content, says", BAD_TESTS)
def test_a_test_file_unlike_the_training_file_is_refused(tmp_path, name, content, says):
    data, encoder = load_file(write(tmp_path, "train.csv", "a,b,label\n1,2,0\n3,4,1\n"))
    file = write(tmp_path, name, content)
    with pytest.raises(DataError) as error:
        load_test_file(file, encoder, data.label_names)
    assert says.replace("{}", str(file)) in str(error.value)


def test_a_test_file_may_have_one_class_only(tmp_path):
    data, encoder = load_file(write(tmp_path, "train.csv", "a,label\n1,x\n3,y\n"))
    test = load_test_file(write(tmp_path, "test.csv", "label,a\ny,2\n"), encoder, data.label_names)
    assert test.labels.tolist() == [1] and test.label_names == ("x", "y")


def test_a_wider_sparse_test_file_is_refused(tmp_path):
    pytest.importorskip("sklearn")
    _, encoder = load_file(write(tmp_path, "train.svm", SVM_FROM_1))
    with pytest.raises(DataError, match=r"Expected 3 features in .*, as in training, got 9"):
        load_features(write(tmp_path, "test.svm", "1 9:5\n"), encoder)


def test_nothing_is_unpickled_from_a_file(tmp_path):
    """A file that would create another file if it were unpickled."""

    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    payload = np.array([Payload()], dtype=object)
    for content in (pickle.dumps(Payload()), npz(X=payload, y=[0]), npz(X=FEATURES, y=[0, 1, 1, 0], other=payload)):
        with pytest.raises(DataError):
            load_file(write(tmp_path, "t.npz", content))
    assert not (tmp_path / "ran").exists()
