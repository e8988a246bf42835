"""What clipping leaves of a gradient, with the noise's length and direction integrated over, in any dimension.

`clipping.py` takes the length for its typical value, which is wrong in few dimensions, and in many where most examples
are about as long as the clip norm.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import special

from noisecast.theory.clipping import ClippingExpectations, clipping_expectations

Array = Any

NO_TAIL = 1e12  # degrees of freedom beyond which Student's noise is Gaussian to float64
GRID_POINTS = 1024  # of a table over gradient norms, 1 % apart
EVERY = 8  # of them are integrated, and all within `KINK` of where the typical example begins to be clipped
KINK = 0.2
AT_ONCE = 64  # gradient norms whose nodes are in memory together, some 100 MB


def low_dimension_clipping_expectations(
    gradient_norm: Array, *, num_params: int, example_noise_std: float, degrees_of_freedom: float, l2_clip_norm: float
) -> ClippingExpectations:
    """`clipping_expectations` without taking the noise's norm for its typical value: right at every d.

    With g = (G + t u, t sqrt(1 - u^2)), t the length of the noise, t^2/(sigma^2 nu) = chi^2_d / chi^2_nu, u the cosine
    of its angle to the gradient, R = |g|: h = E[min(1, C/R) (G + t u)]/G, m2 = E[min(R, C)^2], by Gauss quadrature over
    log t and the angle, in pieces that end where R = C (own derivation).

    Args, Returns and Raises: as `clipping_expectations`; gradient_norm (m,).

    >>> law = dict(num_params=1, example_noise_std=1.0, degrees_of_freedom=np.inf, l2_clip_norm=0.5)
    >>> h = low_dimension_clipping_expectations(np.array([1e-3]), **law).shrink_factor
    >>> round(float(h[0]), 3)                                                      # P(|z| < C), one coordinate, G -> 0
    0.383
    """
    g = np.atleast_1d(np.asarray(gradient_norm, dtype=float))
    _check(g, num_params, example_noise_std, degrees_of_freedom, l2_clip_norm)
    if math.isinf(l2_clip_norm) or example_noise_std == 0:
        law: dict[str, Any] = {"num_params": num_params, "example_noise_std": example_noise_std}
        return clipping_expectations(g, degrees_of_freedom=degrees_of_freedom, l2_clip_norm=l2_clip_norm, **law)
    nu = math.inf if degrees_of_freedom > NO_TAIL else degrees_of_freedom
    # At G = 0 is what it tends to, as G^2: the formulas divide by G.
    g = np.maximum(g, 1e-8 * min(l2_clip_norm, example_noise_std))
    length = _NoiseLength(num_params, example_noise_std, nu)
    some = [_integrated(g[i : i + AT_ONCE, None], length, l2_clip_norm) for i in range(0, len(g), AT_ONCE)]
    return ClippingExpectations(*np.concatenate(some, axis=1))


def _check(g: np.ndarray, num_params: int, sigma: float, nu: float, clip_norm: float) -> None:
    wrong = g[~((g >= 0) & np.isfinite(g))]
    for expected, got, is_right in (
        ("0 <= gradient_norm < inf", wrong[0] if len(wrong) else 0.0, len(wrong) == 0),
        ("num_params >= 1", num_params, num_params >= 1),
        ("example_noise_std >= 0", sigma, sigma >= 0),
        ("degrees_of_freedom > 0", nu, nu > 0),
        ("l2_clip_norm > 0", clip_norm, clip_norm > 0),
    ):
        if not is_right:
            raise ValueError(f"Expected {expected}, got {got}.")


@lru_cache(maxsize=64)  # mechanisms of one clip norm share it, whatever their noise
def clipping_table(
    largest_norm: float,
    *,
    num_params: int,
    example_noise_std: float,
    degrees_of_freedom: float,
    l2_clip_norm: float,
    decades: float = 5.0,
) -> tuple[np.ndarray, ClippingExpectations]:
    """`low_dimension_clipping_expectations` at `GRID_POINTS` norms, a geometric series up to largest_norm.

    Some are integrated; between them ln h, ln (m2 - h^2 G^2) and the clip fraction are linear in ln G, to 0.1 %.

    Args:
      largest_norm: the last gradient norm; > 0 [loss/params].   decades: of the series below it; > 0.
      num_params, example_noise_std, degrees_of_freedom, l2_clip_norm: as `clipping_expectations`.
    Returns: gradient norms, (GRID_POINTS,), and expectations there; not to be written to.
    Raises: ValueError for a value outside its range.

    >>> norms, found = clipping_table(10.0, num_params=200, example_noise_std=0.01, degrees_of_freedom=np.inf,
    ...                               l2_clip_norm=1.0)
    >>> norms[[0, -1]].round(6), found.shrink_factor[[0, -1]].round(3)
    (array([1.e-04, 1.e+01]), array([1. , 0.1]))
    """
    law = {"num_params": num_params, "example_noise_std": example_noise_std, "degrees_of_freedom": degrees_of_freedom}
    norms = np.geomspace(largest_norm * 10**-decades, largest_norm, GRID_POINTS)
    if math.isinf(l2_clip_norm) or example_noise_std == 0:
        return norms, clipping_expectations(norms, l2_clip_norm=l2_clip_norm, **law)
    kink = math.sqrt(max(l2_clip_norm**2 - num_params * example_noise_std**2, 0.0))
    near = (norms > kink / (1 + KINK)) & (norms < kink * (1 + KINK))
    near[::EVERY] = near[-1] = True
    some = norms[near]
    exact = low_dimension_clipping_expectations(some, l2_clip_norm=l2_clip_norm, **law)
    variance = np.maximum(exact.second_moment - (exact.shrink_factor * some) ** 2, 1e-300)
    h, between = (
        np.exp(np.interp(np.log(norms), np.log(some), np.log(field))) for field in (exact.shrink_factor, variance)
    )
    fraction = np.interp(np.log(norms), np.log(some), exact.clip_fraction)
    return norms, ClippingExpectations(h, between + (h * norms) ** 2, fraction)


def _integrated(g: np.ndarray, length: "_NoiseLength", clip: float) -> np.ndarray:
    """h, m2 and the clip fraction of `low_dimension_clipping_expectations`, (3, m)."""
    t, weight, beyond = length.quadrature(g, clip)
    u, share = _directions(g, t, length.num_params, clip)
    g, t = g[:, :, None], t[:, :, None]
    radius = np.sqrt((g + t * u) ** 2 + t**2 * (1 - u**2))
    is_clipped = radius > clip
    factor = clip / np.maximum(radius, clip)
    # E u = 0, so that the factor at G = 0 may be taken off it: what is left is of the order of G, and loses no digits.
    turned = (factor - clip / np.maximum(t, clip)) / g
    both = -clip * (g + 2 * t * u) / (np.maximum(radius, clip) * t * (t + radius))
    turned = np.where(is_clipped & (t > clip), both, turned)

    def mean(of_noise: np.ndarray) -> np.ndarray:
        return np.sum(weight * np.sum(share * of_noise, axis=-1), axis=-1)

    second = mean(np.minimum(radius, clip) ** 2) + beyond * clip**2
    return np.stack([mean(factor + turned * t * u), second, np.minimum(mean(is_clipped * 1.0) + beyond, 1.0)])


@dataclass(frozen=True)
class _NoiseLength:
    """t = sigma |z| sqrt(nu/S) of `low_dimension_clipping_expectations`: t^2/(nu sigma^2) is chi^2_d over chi^2_nu."""

    num_params: int
    example_noise_std: float
    degrees_of_freedom: float

    PIECES, NODES = 32, 8  # of log t, and in each
    SHORT, LONG = 1e-12, 1e-30  # shares of the noise that is as short as the shortest node; that is left out

    def quadrature(self, g: np.ndarray, clip: float) -> tuple[np.ndarray, np.ndarray, float]:
        """Nodes and weights, (m, T), in pieces that follow how clipping sets in; and P(t beyond the last node).

        Beyond it every example is clipped, to a direction that the gradient hardly turns.
        """
        first, median = self._where(self._below, self.SHORT), self._where(self._below, 0.5)
        end = self._where(self._above, self.LONG)
        last = min(end, max(1e6 * median, 2e3 * (clip + g.max())))
        grid = np.broadcast_to(np.linspace(math.log(first), math.log(last), self.PIECES + 1), (len(g), self.PIECES + 1))
        u = math.sin(_widest_angle(self.num_params)) * np.array([-1.0, -0.35, 0.0, 0.35, 1.0])
        across = np.sqrt(1 - u**2) * g
        root = np.sqrt(np.maximum((clip - across) * (clip + across), 0.0))  # R = C at t = -u G +- root
        turns = np.clip(np.hstack([g, root - u * g, -root - u * g]), first, last)
        edges = np.sort(np.hstack([grid, np.log(turns)]), axis=1)
        node, weight = np.polynomial.legendre.leggauss(self.NODES)
        half = np.diff(edges, axis=1)[:, :, None] / 2
        log_t = ((edges[:, 1:, None] + edges[:, :-1, None]) / 2 + half * node).reshape(len(g), -1)
        weight = (half * weight).reshape(len(g), -1) * np.exp(self._log_density(log_t))
        t = np.hstack([np.full_like(g, first), np.exp(log_t)])
        # Of thin tails what is left out is nothing: where no example is clipped, that is seen.
        beyond = 0.0 if last == end else self._above(last)
        weight = np.hstack([np.full_like(g, self.SHORT), weight])
        return t, weight * ((1 - beyond) / weight.sum(axis=1, keepdims=True)), beyond

    def _where(self, tail: Callable[[float], float], share: float) -> float:
        """t at which P(length < t), or P(length > t), is that share: by bisection, as SciPy's inverses may fail."""
        low, high, unit = -320.0, 320.0, self.example_noise_std  # log(t / sigma); a square stays a number
        rises = tail(unit * math.exp(high)) > tail(unit * math.exp(low))
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if (tail(unit * math.exp(middle)) < share) == rises else (low, middle)
        return unit * math.exp(low)

    def _below(self, t: float) -> float:
        d, nu, x = self.num_params / 2, self.degrees_of_freedom / 2, (t / self.example_noise_std) ** 2 / 2
        return float(special.gammainc(d, x) if math.isinf(nu) else special.betainc(d, nu, x / (nu + x)))

    def _above(self, t: float) -> float:
        d, nu, x = self.num_params / 2, self.degrees_of_freedom / 2, (t / self.example_noise_std) ** 2 / 2
        return float(special.gammaincc(d, x) if math.isinf(nu) else special.betainc(nu, d, nu / (nu + x)))

    def _log_density(self, log_t: np.ndarray) -> np.ndarray:
        """Of log t."""
        d, nu = self.num_params / 2, self.degrees_of_freedom / 2
        log_x = 2 * (log_t - math.log(self.example_noise_std)) - math.log(2)  # x = t^2 / (2 sigma^2)
        if math.isinf(nu):
            return math.log(2) + d * log_x - np.exp(log_x) - special.gammaln(d)
        log_ratio = log_x - math.log(nu)
        tail = (d + nu) * np.logaddexp(0.0, log_ratio)
        return math.log(2) + d * log_ratio - tail - special.betaln(d, nu)


def _widest_angle(num_params: int) -> float:
    """From the right angle to the gradient, where the angle has density cos^(d - 2): 8.5 standard deviations."""
    return min(math.pi / 2, 8.5 / math.sqrt(max(num_params - 2, 1)))


def _directions(g: np.ndarray, t: np.ndarray, num_params: int, clip: float) -> tuple[np.ndarray, np.ndarray]:
    """Cosines of the noise's angle to the gradient and their shares, (m, T, N), on either side of where R = C."""
    if num_params == 1:
        return np.array([1.0, -1.0]), np.array([0.5, 0.5])
    widest = _widest_angle(num_params)
    with np.errstate(over="ignore"):
        edge = np.clip(((clip - g) * (clip + g) - t**2) / (2 * g * t), -1.0, 1.0)
    turn = np.clip(np.arcsin(edge), -widest, widest)[:, :, None]
    node, weight = np.polynomial.legendre.leggauss(32)
    before, behind = (turn + widest) / 2, (widest - turn) / 2
    angle = np.concatenate([-widest + before * (1 + node), turn + behind * (1 + node)], axis=-1)
    share = np.concatenate([before * weight, behind * weight], axis=-1) * np.cos(angle) ** (num_params - 2)
    return np.sin(angle), share / share.sum(axis=-1, keepdims=True)
