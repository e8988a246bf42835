"""The dataset itself, its labels and its hash; bundled sets; what importing costs."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import scipy.sparse as sp

from noisecast.problems.datasets import (
    BUNDLED,
    DATASETS,
    DataError,
    Dataset,
    bundled,
    encode_labels,
    public_split,
    split_by_content,
)

DENSE = np.array([[0.0, 2.0], [3.0, 0.0], [0.0, 0.0]])


def toy(features=DENSE, labels=(0, 1, 1), names=("no", "yes")) -> Dataset:
    return Dataset("toy", features, np.array(labels), names)


def test_a_dataset_holds_float32_features_and_int32_labels():
    for features in (DENSE, sp.csr_array(DENSE), sp.coo_array(DENSE)):
        data = toy(features)
        assert data.features.dtype == np.float32 and data.labels.dtype == np.int32
        assert (data.num_examples, data.num_features, data.num_classes) == (3, 2, 2)
    assert isinstance(toy(sp.coo_array(DENSE)).features, sp.csr_array)


def test_duplicate_entries_of_a_sparse_matrix_are_summed():
    twice = sp.csr_array((np.ones(2), np.array([1, 1]), np.array([0, 2])), shape=(1, 2))
    data = Dataset("toy", twice, np.array([0]), ("a",))
    assert data.features.nnz == 1 and data.features[0, 1] == 2
    assert twice.nnz == 2, "the caller's matrix must stay as it was"


@pytest.mark.parametrize("index", [-7, 2, 99, 10**8])
@pytest.mark.parametrize("kind", [sp.csr_array, sp.csr_matrix, sp.csc_array])
def test_indices_outside_the_matrix_are_refused(kind, index):
    """Compiled kernels would write wherever they point."""
    matrix = kind(sp.csr_array(DENSE))
    matrix.indices[1] = index if kind is not sp.csc_array or index < 0 else index + 1
    with pytest.raises(DataError, match=r"indices fit its shape \(3, 2\) in toy: .*ind"):
        toy(matrix)


@pytest.mark.parametrize("indices", [[2, 0], np.array([True, False, True]), slice(1, None), []])
def test_rows_are_the_same_dense_and_sparse(indices):
    dense, sparse = toy().rows(indices), toy(sp.csr_array(DENSE)).rows(indices)
    expected = DENSE[np.array(indices, dtype=int) if isinstance(indices, list) else indices]
    np.testing.assert_array_equal(dense.features, expected)
    np.testing.assert_array_equal(sparse.features.toarray(), expected)
    np.testing.assert_array_equal(dense.labels, sparse.labels)


def test_the_hash_sees_each_part_of_the_content_and_not_the_name():
    hashes = [
        data.content_hash
        for data in (
            toy(),
            toy(DENSE + 1),
            toy(labels=(0, 1, 0)),
            toy(names=("no", "yes!")),
            toy(DENSE[::-1]),
            toy(sp.csr_array(DENSE)),
        )
    ]
    assert len(set(hashes)) == len(hashes)
    assert Dataset("other", DENSE, np.array([0, 1, 1]), ("no", "yes")).content_hash == hashes[0]


def test_the_hash_is_the_same_in_another_process():
    code = (
        "import numpy as np; from noisecast.problems.datasets import Dataset;"
        "print(Dataset('x', np.array([[0., 2.], [3., 0.], [0., 0.]]), np.array([0, 1, 1]), ('no', 'yes')).content_hash)"
    )
    assert run_python(code) == toy().content_hash


def test_importing_brings_neither_jax_nor_scikit_learn():
    # The package around it may import JAX for the models, so a bare one stands in its place.
    code = (
        "import noisecast, types; around = types.ModuleType('noisecast.problems');"
        "around.__path__ = [noisecast.__path__[0] + '/problems']; sys.modules['noisecast.problems'] = around;"
        "import noisecast.problems.datasets; print([m for m in ('jax', 'sklearn', 'numba') if m in sys.modules])"
    )
    assert run_python(code) == "[]"


def run_python(code: str) -> str:
    search = f"import sys; sys.path[:0] = {[path for path in sys.path if path]!r}; "
    done = subprocess.run([sys.executable, "-c", search + code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    "features, labels, names, says",
    [
        (DENSE, [0, 1], ("a", "b"), "(3, 2) and (2,)"),
        (DENSE[0], [0, 1], ("a", "b"), "(2,)"),
        (DENSE, [0.0, 1.0, 1.0], ("a", "b"), "integer labels"),
        (DENSE, [0, 1, 2], ("a", "b"), "0 .. 1"),
        (DENSE, [0, -1, 1], ("a", "b"), "-1"),
        (np.where(DENSE == 3, np.nan, DENSE), [0, 1, 1], ("a", "b"), "row 2 of toy"),
        (sp.csr_array(np.where(DENSE == 3, np.inf, DENSE)), [0, 1, 1], ("a", "b"), "row 2 of toy"),
        (DENSE * 1e300, [0, 1, 1], ("a", "b"), "finite in float32, got inf in row 1 of toy, column 2"),
    ],
)
def test_a_bad_dataset_is_refused(features, labels, names, says):
    with pytest.raises(DataError) as error:
        Dataset("toy", features, np.array(labels), names)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "cells, names, labels",
    [
        (["b", "a", "b"], ("a", "b"), [1, 0, 1]),
        (["10", "9", "9"], ("9", "10"), [1, 0, 0]),  # by size, not by the alphabet
        ([1.0, -1.0, 1.0], ("-1", "1"), [1, 0, 1]),
        (["1.0", 1, "+1", " 0"], ("0", "1"), [1, 1, 1, 0]),
        (["01", "1", "1", "01"], ("01", "1"), None),  # a code with a leading zero is no number
        ([True, False, True], ("False", "True"), [1, 0, 1]),
        (["NA", "UK", "UK"], ("NA", "UK"), [0, 1, 1]),  # Namibia is no missing value
    ],
)
def test_label_names_are_sorted_and_numbers_compare_by_size(cells, names, labels):
    found, found_names = encode_labels(cells, source="f")
    assert found_names == names and found.dtype == np.int32
    assert labels is None or found.tolist() == labels


def test_imposed_label_names_keep_their_order():
    labels, names = encode_labels(["b", "b"], source="f", label_names=("b", "a"))
    assert labels.tolist() == [0, 0] and names == ("b", "a")


@pytest.mark.parametrize(
    "cells, says",
    [
        (["a", "", "b"], "Row 2 of f has no label"),
        (["a", "b", None], "Row 3 of f has no label"),
        ([1.0, float("nan")], "Row 2 of f has no label"),
        (["a", "a"], "only 'a'"),
        ([str(i) for i in range(50)], "got 50 in the 50 rows"),
        ([str(i % 10_001) for i in range(30_000)], "at most 10,000 classes"),
    ],
)
def test_bad_labels_are_refused(cells, says):
    with pytest.raises(DataError) as error:
        encode_labels(cells, source="f")
    assert says in str(error.value)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_sets_lie_in_their_public_range_and_are_split_without_overlap(name):
    pytest.importorskip("sklearn")
    from sklearn import datasets

    train, test = bundled(name)
    raw = getattr(datasets, f"load_{name}")()
    assert train.num_examples + test.num_examples == len(raw.data)
    assert train.num_classes == test.num_classes == len(raw.target_names)
    assert set(train.labels) == set(test.labels), "each class on both sides"
    lowest = 0 if name == "digits" else -1
    for part in (train, test):
        assert part.features.min() >= lowest and part.features.max() <= 1
    rows, _ = public_split(len(raw.data))
    np.testing.assert_array_equal(train.labels, raw.target[rows])
    if name == "digits":
        np.testing.assert_array_equal(train.features, raw.data[rows] / 16)


def test_bounds_of_bundled_sets_are_not_the_ranges_of_their_rows():
    pytest.importorskip("sklearn")
    for name in ("iris", "wine", "breast_cancer"):
        both = np.concatenate([part.features for part in bundled(name)])
        assert (both.max(axis=0) < 1).mean() > 0.5


def test_the_public_split_is_what_it_always_was():
    assert tuple(part.tolist() for part in public_split(10)) == GOLDEN_SPLIT_OF_10
    for fraction in (0, 1, 1.5):
        with pytest.raises(DataError):
            public_split(10, fraction)


# sha256 of "0" .. "9", sorted; computed with coreutils: for i in $(seq 0 9); do printf $i | sha256sum; done | sort
GOLDEN_SPLIT_OF_10 = ([9, 8, 4, 3, 0, 1, 7, 2], [6, 5])


def test_the_catalogue_names_each_set_once():
    names = [entry.name for entry in DATASETS]
    assert len(set(names)) == len(names) and set(BUNDLED) < set(names)
    assert all(entry.what and entry.rows and entry.columns and entry.obtain for entry in DATASETS)


@pytest.mark.parametrize("entry", [e for e in DATASETS if not e.needs_data_dir], ids=lambda e: e.name)
def test_the_catalogue_tells_the_true_size(entry):
    pytest.importorskip("sklearn")
    train, test = entry.load()
    assert entry.rows == f"{train.num_examples:,} + {test.num_examples:,}"
    assert entry.columns == f"{train.num_features:,}"


def test_an_unknown_bundled_set_is_refused():
    with pytest.raises(DataError, match="digits, iris, wine, breast_cancer, got 'mnist'"):
        bundled("mnist")


def test_removing_a_row_moves_no_other_between_training_and_testing():
    features = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    labels = np.arange(200, dtype=np.int32) % 2
    whole = Dataset("toy", features, labels, ("a", "b"))
    side = np.zeros(200, bool)
    side[split_by_content(whole, 0.3)[1]] = True
    assert 30 < side.sum() < 90
    for left_out in (0, 57, 199):
        kept = np.arange(200) != left_out
        rest = np.zeros(199, bool)
        rest[split_by_content(Dataset("toy", features[kept], labels[kept], ("a", "b")), 0.3)[1]] = True
        np.testing.assert_array_equal(rest, side[kept])


def toy_table(copies):
    """Six different rows, (x, y) with P(y = 1 | x) of a quarter, a half and three quarters."""
    rows = [(x, y) for x in range(3) for y in (0, 1) for _ in range(copies * (1 + x if y else 3 - x))]
    features, labels = np.array(rows, np.float32)[:, :1], np.array(rows, np.int32)[:, 1]
    return Dataset("toy", features, labels, ("a", "b"))


def test_what_is_held_out_of_few_different_rows_has_the_law_of_the_others():
    data = toy_table(copies=500)
    for part in split_by_content(data, 0.3):
        for x in range(3):
            labels = data.labels[part][data.features[part, 0] == x]
            assert labels.mean() == pytest.approx((1 + x) / 4, abs=5 * (0.25 / len(labels)) ** 0.5)


def test_removing_one_of_equal_rows_moves_no_other_between_training_and_testing():
    data = toy_table(copies=20)

    def counts(rows):
        kept = Dataset("toy", data.features[rows], data.labels[rows], ("a", "b"))
        parts = split_by_content(kept, 0.3)
        return [Counter(zip(kept.features[part, 0], kept.labels[part], strict=True)) for part in parts]

    everything = np.arange(data.num_examples)
    before = counts(everything)
    for left_out in (0, 33, 119, data.num_examples - 1):
        lost = [a - b for a, b in zip(before, counts(np.delete(everything, left_out)), strict=True)]
        assert sum(each.total() for each in lost) == 1, "one row, of one side"


def test_a_new_label_moves_no_other_row():
    """It comes first, and every other label gets another number."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(200, 3)).astype(np.float32), np.array(["b", "c"] * 100)
    sides = []
    for more in ((), ("a",)):
        numbers, names = encode_labels([*labels, *more], source="f")
        rows = np.concatenate([features, np.ones((len(more), 3), np.float32)])
        held_out = split_by_content(Dataset("toy", rows, numbers, names), 0.3)[1]
        sides.append(sorted(row for row in held_out if row < 200))
    assert sides[0] == sides[1]


def test_an_empty_side_of_a_split_is_refused():
    data = Dataset("toy", np.eye(4, dtype=np.float32), np.arange(4, dtype=np.int32) % 2, ("a", "b"))
    with pytest.raises(DataError, match="0 for testing of 4; choose another fraction"):
        split_by_content(data, 1e-9)
