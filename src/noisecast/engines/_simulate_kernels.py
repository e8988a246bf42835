"""Compiled steps of simulated problems: separable losses whose examples are the gradient plus isotropic noise.

Parameters are X[coordinate, lane]; a lane is one run. Coordinates are walked in tiles of a few rows whose noise is
drawn at once, so that it stays in the first-level cache and every inner loop runs along lanes.
`tests/engines/test_simulate.py` writes both simulations out plainly, in float64 with NumPy's generators. They have the
same law: every step does what the plain one does, coordinate by coordinate, and only the order differs in which
independent numbers are drawn.

  training   g_b = grad f(x) + sigma t_nu for each of B examples, clipped one by one; the private mean of their sum; the
             optimizer's step. A Student-t vector is a Gaussian one over sqrt(chi^2_nu / nu), one chi^2 an example.
  paths      Euler-Maruyama of the optimizer's SDE: h(|grad f|), s and the sign's scale mixture from the problem's own
             table, then drift and gain as `noisecast.theory` writes them, and one Gaussian a coordinate and step.

A draw is a function of a run's key and (example, coordinate block, step, purpose): it depends neither on the lanes
beside it nor on where a run was interrupted.
"""

import math
from typing import NamedTuple

import numpy as np

from noisecast.compiled import FAST, INLINE, INSIDE, njit, wide_vectors
from noisecast.privacy.counter_noise import (
    STEP_NOISE,
    exponential,
    minus_log_of_unit,
    normal_pair,
    threefry,
    threefry_12,
    threefry_12_twice,
)

f32, u32, i32 = np.float32, np.uint32, np.int32

TILE = 16  # coordinates whose noise is drawn at once; a multiple of 8
CHI_SQUARE = u32(3)  # a purpose beside those of counter_noise
FARTHEST = f32(1e15)  # a longer example is clipped to its direction whatever its length; its square fits float32
_INV_SQRT_2 = f32(math.sqrt(0.5))


class Separable(NamedTuple):
    """f(x) = sum_j h_j x_j^2 / 2 + lambda x_j^4 / 4 - xi x_j^3 / 3, with example noise sigma t_nu (inf: Gaussian)."""

    hessian_diag: np.ndarray  # h, (d,) float32
    quartic_weight: np.float32  # lambda
    cubic_weight: np.float32  # xi
    example_noise_std: np.float32  # sigma
    degrees_of_freedom: float  # nu


class Lanes(NamedTuple):
    """What differs from run to run, (lanes,) each; the keys are (4, lanes)."""

    learning_rate: np.ndarray  # eta
    clip: np.ndarray  # C
    noise_std: np.ndarray  # z C
    example_key: np.ndarray
    noise_key: np.ndarray


class Table(NamedTuple):
    """`population.ClippingTable` of every scenario, one under the other, and where in it each lane looks."""

    values: np.ndarray  # (scenarios * points, 2 + 2 K): h, s, r_1 .. r_K, w_1 .. w_K
    begin: np.ndarray  # (lanes,) a lane's first row
    first_log_norm: np.ndarray  # (lanes,)
    last_log_norm: np.ndarray  # (lanes,)
    points: int


class Scratch(NamedTuple):
    """Working memory of one block of lanes."""

    normals: np.ndarray  # (TILE, lanes)
    gradient: np.ndarray  # (d, lanes) of one example; (0, lanes) for paths
    others: np.ndarray  # (d, lanes) clipped sum of the examples before it
    scale: np.ndarray  # (lanes,) of its noise
    factor: np.ndarray  # (lanes,) its clip factor
    squares: np.ndarray  # (lanes,)
    row: np.ndarray  # (lanes,) int32, the table's row below
    share: np.ndarray  # (lanes,) of the row above
    moments: np.ndarray  # (2 + 2 K, lanes) the table's columns


# --- Variates ---------------------------------------------------------------------------------------------------------


@njit(**INSIDE)
def normal_tile(out, first, count, example, step, key):
    """out[:count]: N(0, 1) of coordinates first, first + 1, ...; `first` is a multiple of 4, len(out) of 8."""
    wide_vectors()
    k0, k1, k2, k3 = key[0], key[1], key[2], key[3]
    if count <= 2:  # two dimensions need half a block
        one, two, at = out[0], out[1], u32(first // 4)
        for lane in range(out.shape[1]):
            a, b, _, _ = threefry_12(example, at, step, STEP_NOISE, k0[lane], k1[lane], k2[lane], k3[lane])
            one[lane], two[lane] = normal_pair(a, b)
        return
    for block in range(0, (count + 3) // 4, 2):
        at = u32(first // 4 + block)
        one, two, three, four = out[4 * block], out[4 * block + 1], out[4 * block + 2], out[4 * block + 3]
        five, six, seven, eight = out[4 * block + 4], out[4 * block + 5], out[4 * block + 6], out[4 * block + 7]
        for lane in range(out.shape[1]):
            a, b, c, d, e, f, g, h = threefry_12_twice(
                example, at, u32(at + u32(1)), step, STEP_NOISE, k0[lane], k1[lane], k2[lane], k3[lane]
            )
            one[lane], two[lane] = normal_pair(a, b)
            three[lane], four[lane] = normal_pair(c, d)
            five[lane], six[lane] = normal_pair(e, f)
            seven[lane], eight[lane] = normal_pair(g, h)


@njit(**INSIDE)
def privacy_tile(out, first, count, step, key):
    """`normal_tile` of privacy noise: the generator and the Gaussians of `privacy.counter_noise`."""
    wide_vectors()
    k0, k1, k2, k3 = key[0], key[1], key[2], key[3]
    for block in range((count + 3) // 4):
        at = u32(first // 4 + block)
        one, two, three, four = out[4 * block], out[4 * block + 1], out[4 * block + 2], out[4 * block + 3]
        for lane in range(out.shape[1]):
            a, b, c, d = threefry(u32(0), at, step, STEP_NOISE, k0[lane], k1[lane], k2[lane], k3[lane])
            one[lane], two[lane] = normal_pair(a, b)
            three[lane], four[lane] = normal_pair(c, d)


@njit(**INSIDE)
def chi_square(degrees_of_freedom, example, step, k0, k1, k2, k3):
    """chi^2_nu = 2 Gamma(nu / 2), exactly, by rejection (Marsaglia and Tsang, 2000); each trial has a block of its own.

    Below shape 1, Gamma(a) = Gamma(a + 1) U^(1/a).
    """
    shape = 0.5 * degrees_of_freedom
    a = shape if shape >= 1.0 else shape + 1.0
    d = a - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    trial = 0
    while True:
        trial += 1
        w0, w1, w2, w3 = threefry_12(example, u32(trial), step, CHI_SQUARE, k0, k1, k2, k3)
        normal, _ = normal_pair(w0, w1)
        v = 1.0 + c * np.float64(normal)
        if v <= 0.0:
            continue
        v = v * v * v
        x = np.float64(normal)
        if -np.float64(minus_log_of_unit(w2)) < 0.5 * x * x + d - d * v + d * math.log(v):
            break
    if shape < 1.0:
        return 2.0 * d * v * math.exp(-np.float64(minus_log_of_unit(w3)) / shape)
    return 2.0 * d * v


@njit(**FAST)
def noise_scales(out, problem, example, step, key):
    """sigma / sqrt(chi^2_nu / nu) of one example in every lane; (lanes,)."""
    k0, k1, k2, k3 = key[0], key[1], key[2], key[3]
    nu, sigma = problem.degrees_of_freedom, problem.example_noise_std
    if nu == math.inf:
        out[:] = sigma
    elif nu == 1.0:  # chi^2_1 is the square of a Gaussian
        for lane in range(len(out)):
            a, b, _, _ = threefry_12(example, u32(0), step, CHI_SQUARE, k0[lane], k1[lane], k2[lane], k3[lane])
            normal, _ = normal_pair(a, b)
            out[lane] = min(sigma / max(abs(normal), f32(1e-30)), FARTHEST)
    else:
        for lane in range(len(out)):
            drawn = chi_square(nu, example, step, k0[lane], k1[lane], k2[lane], k3[lane])
            out[lane] = min(np.float64(sigma) * math.sqrt(nu / max(drawn, 1e-300)), 1e15)


@njit(**INLINE)
def error_function(x):
    """erf(x) to 6e-7: x P(x^2) / Q(x^2), fitted here to relative error by least squares; no branches."""
    x = min(max(x, f32(-3.93)), f32(3.93))
    t = x * x
    p = f32(3.1004001e-4) * t + f32(8.71094658e-3)
    p = (p * t + f32(6.7975716e-2)) * t + f32(3.1751563e-1)
    p = p * t + f32(1.12837885)
    q = f32(1.80324765e-5) * t + f32(2.19513403e-3)
    q = (q * t + f32(2.50351934e-2)) * t + f32(1.6519156e-1)
    q = (q * t + f32(6.14715345e-1)) * t + f32(1.0)
    return x * p / q


@njit(**INLINE)
def _log(x):
    """ln x of a positive float32: its exponent, and `minus_log_of_unit` of its mantissa; no branches."""
    bits = np.float32(x).view(np.int32)
    exponent = f32(i32((bits >> i32(23)) - i32(126)))
    mantissa = np.int32((bits & i32(0x7FFFFF)) | i32(0x3F000000)).view(np.float32)  # in [1/2, 1)
    return exponent * f32(0.6931471805599453) - minus_log_of_unit(u32(mantissa * f32(2.0**32)))


@njit(**INLINE)
def _slope(x, h, problem):
    """df/dx of one coordinate."""
    return x * (h + x * (problem.quartic_weight * x - problem.cubic_weight))


# --- Training ---------------------------------------------------------------------------------------------------------


@njit(**INSIDE)
def _example(params, problem, lanes, example, step, scratch):
    """One example a lane: its gradient into scratch.gradient, its clip factor into scratch.factor (0: not finite)."""
    wide_vectors()
    normals, gradient, scale, squares = scratch.normals, scratch.gradient, scratch.scale, scratch.squares
    noise_scales(scale, problem, u32(example), u32(step), lanes.example_key)
    squares[:] = f32(0.0)
    for first in range(0, len(params), TILE):
        count = min(TILE, len(params) - first)
        normal_tile(normals, first, count, u32(example), u32(step), lanes.example_key)
        for i in range(count):
            x, h, noise, g = params[first + i], problem.hessian_diag[first + i], normals[i], gradient[first + i]
            for lane in range(len(squares)):
                value = _slope(x[lane], h, problem) + scale[lane] * noise[lane]
                g[lane] = value
                squares[lane] += value * value
    for lane in range(len(squares)):
        length = f32(math.sqrt(squares[lane]))
        factor = min(f32(1.0), lanes.clip[lane] / max(length, f32(1e-38)))
        scratch.factor[lane] = factor if length < f32(3e38) else f32(0.0)


@njit(**INSIDE)
def _examples(params, problem, lanes, batch_size, step, scratch):
    """All examples of a step: the last stays in scratch.gradient, the clipped sum of the others in scratch.others."""
    wide_vectors()
    others, gradient, factor = scratch.others, scratch.gradient, scratch.factor
    if batch_size > 1:
        others[:] = f32(0.0)
    for example in range(batch_size):
        _example(params, problem, lanes, example, step, scratch)
        if example < batch_size - 1:
            for row in range(len(params)):
                total, g = others[row], gradient[row]
                for lane in range(len(factor)):
                    total[lane] += g[lane] * factor[lane] if factor[lane] > f32(0.0) else f32(0.0)


@njit(**INSIDE)
def _private_means(first, count, lanes, batch_size, step, scratch):
    """scratch.normals[:count]: (clipped sum + z C N(0, 1)) / B of the coordinates from `first` on."""
    wide_vectors()
    out, factor, noise_std, per_example = scratch.normals, scratch.factor, lanes.noise_std, f32(1.0 / batch_size)
    privacy_tile(out, first, count, u32(step), lanes.noise_key)
    for i in range(count):
        g, total, mean = scratch.gradient[first + i], scratch.others[first + i], out[i]
        for lane in range(len(factor)):
            clipped = g[lane] * factor[lane] if factor[lane] > f32(0.0) else f32(0.0)
            mean[lane] = (total[lane] + clipped + noise_std[lane] * mean[lane]) * per_example


@njit(**FAST)
def sgd_steps(params, problem, lanes, batch_size, begin, stop, scratch):
    """x <- x - eta g."""
    wide_vectors()
    learning_rate = lanes.learning_rate
    for step in range(begin, stop):
        _examples(params, problem, lanes, batch_size, step, scratch)
        for first in range(0, len(params), TILE):
            count = min(TILE, len(params) - first)
            _private_means(first, count, lanes, batch_size, step, scratch)
            for i in range(count):
                x, g = params[first + i], scratch.normals[i]
                for lane in range(len(learning_rate)):
                    x[lane] -= learning_rate[lane] * g[lane]


@njit(**FAST)
def sign_steps(params, problem, lanes, batch_size, begin, stop, scratch):
    """x <- x - eta sign(g)."""
    wide_vectors()
    learning_rate = lanes.learning_rate
    for step in range(begin, stop):
        _examples(params, problem, lanes, batch_size, step, scratch)
        for first in range(0, len(params), TILE):
            count = min(TILE, len(params) - first)
            _private_means(first, count, lanes, batch_size, step, scratch)
            for i in range(count):
                x, g = params[first + i], scratch.normals[i]
                for lane in range(len(learning_rate)):
                    up = learning_rate[lane] if g[lane] < f32(0.0) else f32(0.0)
                    x[lane] += up - (learning_rate[lane] if g[lane] > f32(0.0) else f32(0.0))


@njit(**FAST)
def adam_steps(params, mean, square, problem, lanes, batch_size, b1, b2, eps, begin, stop, scratch):
    """m, v: averages of g and g^2 without their bias towards 0; x <- x - eta m / (sqrt v + eps)."""
    wide_vectors()
    learning_rate, keep_1, keep_2, add = lanes.learning_rate, f32(b1), f32(b2), f32(eps)
    for step in range(begin, stop):
        unbias_1 = f32(-1.0 / math.expm1((step + 1) * math.log(b1))) if b1 > 0 else f32(1.0)
        unbias_2 = f32(-1.0 / math.expm1((step + 1) * math.log(b2))) if b2 > 0 else f32(1.0)
        _examples(params, problem, lanes, batch_size, step, scratch)
        for first in range(0, len(params), TILE):
            count = min(TILE, len(params) - first)
            _private_means(first, count, lanes, batch_size, step, scratch)
            for i in range(count):
                x, g, m, v = params[first + i], scratch.normals[i], mean[first + i], square[first + i]
                for lane in range(len(learning_rate)):
                    m[lane] = keep_1 * m[lane] + (f32(1.0) - keep_1) * g[lane]
                    v[lane] = keep_2 * v[lane] + (f32(1.0) - keep_2) * g[lane] * g[lane]
                    scale = f32(math.sqrt(v[lane] * unbias_2)) + add
                    x[lane] -= learning_rate[lane] * (m[lane] * unbias_1) / scale


# --- Euler-Maruyama ---------------------------------------------------------------------------------------------------


@njit(**INSIDE)
def _squared_slopes(params, problem, scratch):
    """scratch.squares: |grad f|^2 of every lane."""
    squares = scratch.squares
    squares[:] = f32(0.0)
    for j in range(len(params)):
        x, h = params[j], problem.hessian_diag[j]
        for lane in range(len(squares)):
            slope = _slope(x[lane], h, problem)
            squares[lane] += slope * slope


@njit(**INSIDE)
def _moments(table, scratch):
    """scratch.moments: h, s and the sign's scale mixture at every lane's |grad f|, as `ClippingTable.at` reads them.

    Leaves scratch.squares used up.
    """
    squares, row, share, moments = scratch.squares, scratch.row, scratch.share, scratch.moments
    last, outside = f32(table.points - 1), 0
    for lane in range(len(squares)):
        log_norm = f32(0.5) * _log(max(squares[lane], f32(1e-37)))
        spread = table.last_log_norm[lane] - table.first_log_norm[lane]
        position = min(max((log_norm - table.first_log_norm[lane]) / spread * last, f32(0.0)), last)
        below = min(i32(position), i32(table.points - 2))
        row[lane] = table.begin[lane] + below
        share[lane] = position - f32(below)
        squares[lane] = min(log_norm - table.last_log_norm[lane], f32(80.0))
        outside += squares[lane] > f32(0.0)
    for column in range(len(moments)):
        values, out = table.values[:, column], moments[column]
        for lane in range(len(squares)):
            low, high = values[row[lane]], values[row[lane] + 1]
            out[lane] = low + share[lane] * (high - low)
    if outside:  # beyond the table every example is clipped: h = C / G
        for lane in range(len(squares)):
            moments[0, lane] *= exponential(-max(squares[lane], f32(0.0)))


@njit(**FAST)
def sgd_paths(params, problem, lanes, table, substeps, begin, stop, scratch):
    """dX = -h grad f dt + sqrt(eta) s dW. The next step's |grad f| is summed while each coordinate is at hand."""
    wide_vectors()
    normals, pull, kick, squares = scratch.normals, scratch.moments[0], scratch.moments[1], scratch.squares
    time_step, spread = lanes.learning_rate / f32(substeps), lanes.learning_rate / f32(math.sqrt(substeps))
    _squared_slopes(params, problem, scratch)
    for step in range(begin * substeps, stop * substeps):
        _moments(table, scratch)
        squares[:] = f32(0.0)
        for lane in range(len(pull)):
            pull[lane] *= time_step[lane]
            kick[lane] *= spread[lane]
        for first in range(0, len(params), TILE):
            count = min(TILE, len(params) - first)
            normal_tile(normals, first, count, u32(0), u32(step), lanes.noise_key)
            for i in range(count):
                x, h, noise = params[first + i], problem.hessian_diag[first + i], normals[i]
                for lane in range(len(pull)):
                    x[lane] += kick[lane] * noise[lane] - pull[lane] * _slope(x[lane], h, problem)
                    slope = _slope(x[lane], h, problem)
                    squares[lane] += slope * slope


@njit(**INLINE)
def _sign_move(expected_sign, time_step, spread, normal):
    """-E sign dt + sqrt(1 - (E sign)^2) dW."""
    rest = max(f32(1.0) - expected_sign * expected_sign, f32(0.0))
    return spread * f32(math.sqrt(rest)) * normal - expected_sign * time_step


@njit(**FAST)
def sign_paths(params, problem, lanes, table, substeps, begin, stop, scratch):
    """dX = -m dt + sqrt(eta (1 - m^2)) dW, m = sum_k w_k erf(r_k h grad f / (sqrt2 s)), K = 1 or 4.

    At s = 0, m = sign(grad f).
    """
    wide_vectors()
    normals, moments, slope = scratch.normals, scratch.moments, scratch.scale
    one = len(moments) == 4
    r0, w0 = moments[2], moments[3 if one else 6]
    r1, r2, r3 = moments[2 if one else 3], moments[2 if one else 4], moments[2 if one else 5]
    w1, w2, w3 = moments[3 if one else 7], moments[3 if one else 8], moments[3 if one else 9]
    time_step, spread = lanes.learning_rate / f32(substeps), lanes.learning_rate / f32(math.sqrt(substeps))
    for step in range(begin * substeps, stop * substeps):
        _squared_slopes(params, problem, scratch)
        _moments(table, scratch)
        for lane in range(len(slope)):
            slope[lane] = _INV_SQRT_2 * moments[0, lane] / max(moments[1, lane], f32(1e-30))
        for first in range(0, len(params), TILE):
            count = min(TILE, len(params) - first)
            normal_tile(normals, first, count, u32(0), u32(step), lanes.noise_key)
            for i in range(count):
                x, h, noise = params[first + i], problem.hessian_diag[first + i], normals[i]
                if one:
                    for lane in range(len(slope)):
                        m = error_function(r0[lane] * slope[lane] * _slope(x[lane], h, problem))
                        x[lane] += _sign_move(m, time_step[lane], spread[lane], noise[lane])
                else:
                    for lane in range(len(slope)):
                        z = slope[lane] * _slope(x[lane], h, problem)
                        m = w0[lane] * error_function(r0[lane] * z) + w1[lane] * error_function(r1[lane] * z)
                        m += w2[lane] * error_function(r2[lane] * z) + w3[lane] * error_function(r3[lane] * z)
                        x[lane] += _sign_move(m, time_step[lane], spread[lane], noise[lane])


@njit(**FAST)
def adam_paths(params, square, problem, lanes, table, b2, eps, substeps, begin, stop, scratch):
    """v follows E[g^2] = s^2 + (h grad f)^2; dX = (-h grad f dt + sqrt(eta) s dW) / (sqrt v + eps)."""
    wide_vectors()
    normals, shrink, noise_std, add = scratch.normals, scratch.moments[0], scratch.moments[1], f32(eps)
    time_step, spread = lanes.learning_rate / f32(substeps), lanes.learning_rate / f32(math.sqrt(substeps))
    for step in range(begin * substeps, stop * substeps):
        weight = f32(1.0)
        if b2 > 0:
            weight = f32(math.expm1(math.log(b2) / substeps) / math.expm1((step + 1) * math.log(b2) / substeps))
        _squared_slopes(params, problem, scratch)
        _moments(table, scratch)
        for first in range(0, len(params), TILE):
            count = min(TILE, len(params) - first)
            normal_tile(normals, first, count, u32(0), u32(step), lanes.noise_key)
            for i in range(count):
                x, h, noise, v = params[first + i], problem.hessian_diag[first + i], normals[i], square[first + i]
                for lane in range(len(time_step)):
                    mean = shrink[lane] * _slope(x[lane], h, problem)
                    v[lane] += weight * (noise_std[lane] * noise_std[lane] + mean * mean - v[lane])
                    move = spread[lane] * noise_std[lane] * noise[lane] - mean * time_step[lane]
                    scale = f32(math.sqrt(v[lane])) + add
                    x[lane] += move / scale if scale > f32(0.0) else f32(0.0)
