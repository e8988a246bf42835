"""DP-Adam's move of one number, estimated or not, against float64; laws are in `tests/contracts`."""

import numba
import numpy as np
import pytest

from noisecast import DPAdam
from noisecast.compiled import FAST, aligned, aligned_zeros, wide_vectors
from noisecast.engines import _adam_kernels

f32 = np.float32
COUNT = 2**20
SEED = 20261125
EPS = f32(1e-8)


@numba.njit(**FAST | {"cache": False})
def _moves(g, m, v, found):
    wide_vectors()
    for i in range(len(found)):
        _, _, found[i] = _adam_kernels.adam_move(g[i], m[i], v[i], f32(0.5), f32(0.75), EPS)


def moves(g, m, v):
    found = aligned_zeros(len(g))
    _moves(*(aligned(np.asarray(values, f32)) for values in (g, m, v)), found)
    return found


def float64_moves(g, m, v):
    g, m, v = (np.asarray(values, f32).astype(np.float64) for values in (g, m, v))
    return (0.5 * m + g) / (np.sqrt(0.75 * v + g * g) + np.float64(EPS))


def test_a_move_is_the_float64_one_to_float32s_rounding():
    """At every size of squares that float32 holds. With AVX-512 moves err by 3e-7 at most, with AVX2 by 3.7e-7."""
    rng = np.random.default_rng(SEED)
    v = np.exp(rng.uniform(np.log(1e-36), np.log(1e36), COUNT))
    m, g = np.sqrt(v) * rng.uniform(0.5, 2.0, (2, COUNT))
    expected = float64_moves(g, m, v)
    errors = np.abs(moves(g, m, v) / expected - 1.0)
    assert errors.max() < 5e-7, f"{errors.max():.1e}"
    assert errors.mean() < 1e-7, f"{errors.mean():.1e}"


@pytest.mark.parametrize("v", [0.0, 1e-45, 1e-40, 1e-38])
def test_where_squares_vanish_eps_alone_divides(v):
    """1 / sqrt(0) is not estimated: the root is at least 1e-19, which eps makes nothing of."""
    m = np.linspace(-1.0, 1.0, 64) * 1e-12
    np.testing.assert_allclose(moves(np.zeros(64), m, np.full(64, v)), 0.5 * m / np.float64(EPS), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_no_number_makes_a_move_that_is_none(bad):
    """So that the run is seen to diverge."""
    assert np.isnan(moves(np.full(64, bad), np.ones(64), np.ones(64))).all()


@pytest.mark.parametrize("field", ["b1", "b2"])
def test_an_average_that_float32_would_never_change_is_refused(field):
    """1 - 10^-9 is 1 in float32, and a sum that never fades has no average."""
    for kept in (1 - 1e-9, 1.0, -0.1):
        with pytest.raises(ValueError, match=rf"Expected 0 <= {field} <= 0.999999, got {kept}"):
            DPAdam(learning_rate=0.1, **{field: kept})


@pytest.mark.parametrize("b1, b2", [(0.9, 0.999), (0.0, 0.0), (0.99999, 0.999999), (0.5, 0.0)])
def test_the_first_move_is_the_gradients_sign(b1, b2):
    """Whatever is kept: both averages are unbiased by what they are in float32, not by what was asked for."""
    scale, eps_scale = _scales(b1, b2)
    g = np.array([-3.0, 0.5, 1.0, 2.0])
    found = aligned_zeros(4)
    _first_moves(aligned(g.astype(f32)), found)
    np.testing.assert_allclose(scale * found, np.sign(g), rtol=1e-6)
    assert eps_scale >= 1


@numba.njit(**FAST | {"cache": False})
def _scales(b1, b2):
    return _adam_kernels.rate_and_floor(b1, b2, 0)


@numba.njit(**FAST | {"cache": False})
def _first_moves(g, found):
    wide_vectors()
    for i in range(len(found)):
        _, _, found[i] = _adam_kernels.adam_move(g[i], f32(0.0), f32(0.0), f32(0.5), f32(0.5), f32(0.0))
