"""What is publicly known of a table's columns, and categories as features."""

import numpy as np
import pandas as pd
import pytest

from noisecast.problems.datasets import (
    DataError,
    ReadOptions,
    TabularEncoder,
    load_features,
    load_file,
    load_test_file,
    read_public_columns,
)

PUBLIC = 'age = [0, 100]\ncity = ["Oslo", "Rome"]\ngrade = ["1", "2", "*"]\n'
ROWS = "age,city,grade,label\n50,Rome,1,no\n100, Oslo ,3,yes\n0,Rome,2.0,no\n"
FEATURES = [[0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 1], [-1, 0, 1, 0, 1, 0]]


@pytest.fixture
def options(tmp_path):
    (tmp_path / "public.toml").write_text(PUBLIC)
    return ReadOptions(bounds=tmp_path / "public.toml")


def saved(folder, text, name="rows.csv"):
    (folder / name).write_text(text)
    return folder / name


def test_each_value_of_a_category_is_a_feature(tmp_path, options):
    data, encoder = load_file(saved(tmp_path, ROWS), options)
    np.testing.assert_array_equal(data.features.toarray(), FEATURES)
    assert encoder.num_features == data.num_features == 6 and encoder.all_columns == ("age", "city", "grade")


def test_a_parquet_file_says_the_same(tmp_path, options):
    frame = pd.read_csv(saved(tmp_path, ROWS)).astype({"grade": float, "city": "category"})
    frame.to_parquet(tmp_path / "rows.parquet")
    np.testing.assert_array_equal(load_file(tmp_path / "rows.parquet", options)[0].features.toarray(), FEATURES)


def test_other_files_are_read_as_the_training_file_was(tmp_path, options):
    data, encoder = load_file(saved(tmp_path, ROWS), options)
    test = load_test_file(saved(tmp_path, ROWS, "test.csv"), encoder, data.label_names)
    np.testing.assert_array_equal(test.features.toarray(), FEATURES)
    new = saved(tmp_path, "grade,city,age\n1,Rome,50\n", "new.csv")
    np.testing.assert_array_equal(load_features(new, encoder).toarray(), FEATURES[:1])


@pytest.mark.parametrize(
    "value, text, cells",
    [
        ("true", "True\nFALSE\n", [True, False]),
        ("0.50", "0.5\n1.50\n", [0.5, 1.5]),
        ("2020-01-01", "2020-01-01\n2021-03-04\n", pd.to_datetime(["2020-01-01", "2021-03-04"])),
        ("S\u00e3o", "Sa\u0303o\nRio\n", ["Sa\u0303o", "Rio"]),
    ],
)
def test_a_category_is_the_same_one_in_every_file(tmp_path, value, text, cells):
    """Else it would silently be one of all others."""
    encoder = TabularEncoder((), categories=(("a", (value, "*")),))
    pd.DataFrame({"a": cells}).to_parquet(tmp_path / "t.parquet")
    for file in (saved(tmp_path, "a\n" + text, "t.csv"), tmp_path / "t.parquet"):
        np.testing.assert_array_equal(load_features(file, encoder).toarray(), [[1, 0], [0, 1]])


def test_how_many_features_there_are_is_public(tmp_path, options):
    """One row or three, of one city or two."""
    for rows in (ROWS, ROWS.replace("Oslo", "Rome"), "".join(ROWS.splitlines(keepends=True)[:3])):
        assert load_file(saved(tmp_path, rows), options)[0].num_features == 6


@pytest.mark.parametrize(
    "row, says",
    [
        ("50,Bonn,1,no", "one of the 2 public values of column 'city' in row 4 of"),
        (
            "50,Bonn,1,no",
            'got \'Bonn\'; training wants "Bonn" among the values in the file of bounds, or "*" for all others',
        ),
        ("50,,1,no", 'got nothing; training wants "" among the values'),
        ("old,Rome,1,no", "Expected a number, got 'old'"),
    ],
)
def test_a_cell_that_nobody_announced_is_refused(tmp_path, options, row, says):
    with pytest.raises(DataError) as error:
        load_file(saved(tmp_path, ROWS + row + "\n"), options)
    assert says in str(error.value)


def test_a_missing_cell_is_a_value_where_that_is_said(tmp_path):
    public = saved(tmp_path, 'age = [0, 100]\ncity = ["Oslo", "Rome", ""]\ngrade = ["*"]\n', "public.toml")
    data, _ = load_file(saved(tmp_path, ROWS.replace(" Oslo ", "")), ReadOptions(bounds=public))
    np.testing.assert_array_equal(data.features.toarray()[:, 1:4], [[0, 1, 0], [0, 0, 1], [0, 1, 0]])
    _, encoder = load_file(saved(tmp_path, ROWS.replace(" Oslo ", "")), ReadOptions(bounds=public))
    frame = pd.DataFrame({"age": [1.0], "city": [None], "grade": [np.nan]})
    np.testing.assert_array_equal(encoder.encode(frame).toarray()[:, 1:], [[0, 0, 1, 1]])


def test_lists_in_cells_are_no_categories():
    with pytest.raises(DataError, match="cells of several values"):
        TabularEncoder((), categories=(("a", ("x",)),)).encode(pd.DataFrame({"a": [[1], [2]]}))


@pytest.mark.parametrize(
    "name, content",
    [
        ("b.toml", 'age = [0, 120]\n"hours a week" = [0.5, 99.0]\n'),
        ("b.json", '{"age": [0, 120], "hours a week": [0.5, 99.0]}'),
        ("b.csv", "column,low,high\nage,0,120\nhours a week,0.5,99\n"),
    ],
)
def test_bounds_are_read_from_each_format(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    bounds, values = read_public_columns(tmp_path / name)
    assert bounds == {"age": (0.0, 120.0), "hours a week": (0.5, 99.0)} and not values


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("b.toml", "age = [0, ", "cannot be read as TOML"),
        ("b.json", "{", "cannot be read as JSON"),
        ("b.json", "[1, 2]", "got list"),
        ("b.json", "{}", "without entries"),
        ("b.toml", "age = 120", "'age = [low, high]'"),
        ("b.toml", "age = [0, 1, 2]", "'age = [low, high]'"),
        ("b.toml", "age = [true, false]", "'age = [low, high]'"),
        ("b.toml", "age = ['0', 1]", "'age = [low, high]'"),
        ("b.toml", "city = []", "'city = [low, high]'"),
        ("b.toml", "city = ['Rome', ' Rome']", "'Rome' twice"),
        ("b.toml", "age = [120, 0]", "low < high for column 'age'"),
        ("b.toml", "age = [0, inf]", "finite bounds"),
        ("b.json", '{"age": [0, NaN]}', "finite bounds"),
        ("b.csv", "column,low,high\nage,0,x\n", "got 'x' in row 1 of column 'high'"),
        ("b.csv", "column,low,high\nage,0,1\nage,0,2\n", "'age' twice"),
        ("b.csv", "name,min,max\nage,0,1\n", "column, low, high"),
        ("b.yaml", "age: [0, 1]", ".toml, .json or .csv"),
    ],
)
def test_bad_bounds_are_refused(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as error:
        read_public_columns(tmp_path / name)
    assert says in str(error.value) and name in str(error.value)
