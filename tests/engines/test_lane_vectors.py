"""Sums over rows of lanes, in vectors and parts of them, against the plain loops that they stand for."""

from unittest.mock import patch

import numba
import numpy as np
import pytest

from noisecast.compiled import FAST, aligned_zeros
from noisecast.engines import _lane_vectors

f32 = np.float32
ROWS, ENTRIES = 40, 23
LANES = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 47, 64, 65, 100, 130]
AROUND = 64  # numbers before and behind a table that nobody may touch
UNTOUCHED = f32(-123.0)


@numba.njit(**FAST | {"cache": False})
def added_to_rows(*arguments):
    _lane_vectors.add_to_rows(*arguments)


@numba.njit(**FAST | {"cache": False})
def product_added(*arguments):
    _lane_vectors.add_product(*arguments)


class Table:
    """(rows, lanes) of random numbers, with others around them."""

    def __init__(self, rng, rows: int, lanes: int):
        self._all = aligned_zeros(rows * lanes + 2 * AROUND)
        self._all[:] = UNTOUCHED
        self.numbers = self._all[AROUND : AROUND + rows * lanes].reshape(rows, lanes)
        self.numbers[:] = rng.normal(size=(rows, lanes))
        self.before = self.numbers.astype(np.float64)

    def is_alone(self) -> bool:
        return bool((self._all[:AROUND] == UNTOUCHED).all() and (self._all[-AROUND:] == UNTOUCHED).all())


@pytest.fixture
def rng():
    return np.random.default_rng(20261127)


def entries(rng):
    """As of two examples that lie one behind the other: different rows, neighbours among them."""
    rows = np.sort(rng.choice(ROWS, ENTRIES, replace=False)).astype(np.int32)
    return rows, rng.normal(size=ENTRIES).astype(f32)


@pytest.fixture(scope="module", params=["masks", "plain loops"])
def rows_added(request):
    """As compiled for this processor, and as for one without masks."""
    if request.param == "masks" and not _lane_vectors.MASKED:
        pytest.skip("This processor has no masks, and plain loops are compiled for it.")
    with patch.object(_lane_vectors, "MASKED", request.param == "masks"):
        add_rows = numba.njit(**FAST | {"cache": False})(_lane_vectors.add_rows.py_func)
        add_rows.compile("void(f4[:, ::1], i8, f4[:, ::1], i4[::1], f4[::1], i8, i8)")
    (compiled,) = add_rows.inspect_llvm().values()
    assert ("llvm.masked.load" in compiled) == (request.param == "masks")
    return add_rows


@pytest.mark.parametrize("lanes", LANES)
def test_rows_are_added_to_a_sum(lanes, rows_added, rng):
    table, out, (indices, values) = Table(rng, ROWS, lanes), Table(rng, 3, lanes), entries(rng)
    for begin, end in ((0, ENTRIES), (5, 12), (4, 4)):
        out.before = out.numbers.astype(np.float64)
        rows_added(out.numbers, 1, table.numbers, indices, values, begin, end)
        expected = out.before.copy()
        expected[1] += values[begin:end].astype(np.float64) @ table.before[indices[begin:end]]
        np.testing.assert_allclose(out.numbers, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(out.numbers[[0, 2]], out.before[[0, 2]].astype(f32))
        assert np.array_equal(table.numbers, table.before.astype(f32)) and table.is_alone() and out.is_alone()


@pytest.mark.parametrize("by_number", [True, False])
@pytest.mark.parametrize("lanes", LANES)
def test_a_row_is_added_to_others(lanes, by_number, rng):
    table, moves, (indices, values) = Table(rng, ROWS, lanes), Table(rng, 3, lanes), entries(rng)
    at = rng.permutation(ROWS).astype(np.uint32) if by_number else None
    added_to_rows(table.numbers, at, indices, values, 3, ENTRIES, moves.numbers, 2)
    expected = table.before.copy()
    rows = indices[3:] if at is None else at[indices[3:]]
    expected[rows] += values[3:, None].astype(np.float64) * moves.before[2]
    np.testing.assert_allclose(table.numbers, expected, rtol=1e-6, atol=1e-6)
    others = np.setdiff1d(np.arange(ROWS), rows)
    np.testing.assert_array_equal(table.numbers[others], table.before[others].astype(f32))
    assert table.is_alone() and np.array_equal(moves.numbers, moves.before.astype(f32))


@pytest.mark.parametrize("lanes", LANES)
def test_a_scaled_product_is_added_to_a_row(lanes, rng):
    table, moves, factors = Table(rng, 4, lanes), Table(rng, 3, lanes), rng.normal(size=lanes).astype(f32)
    product_added(table.numbers, 2, f32(-0.75), factors, moves.numbers, 1)
    expected = table.before.copy()
    expected[2] += -0.75 * factors.astype(np.float64) * moves.before[1]
    np.testing.assert_allclose(table.numbers, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(table.numbers[[0, 1, 3]], table.before[[0, 1, 3]].astype(f32))
    assert table.is_alone()


def test_a_number_that_is_none_stays_in_its_lane(rng):
    """Runs that diverge beside others: no part of a vector is multiplied by nothing."""
    table, moves, (indices, values) = Table(rng, ROWS, 9), Table(rng, 1, 9), entries(rng)
    moves.numbers[0, 8] = np.nan
    added_to_rows(table.numbers, None, indices, values, 0, ENTRIES, moves.numbers, 0)
    assert np.isfinite(table.numbers[:, :8]).all() and np.isnan(table.numbers[indices, 8]).all()
    assert np.isfinite(np.delete(table.numbers, indices, axis=0)).all()
