"""Matrix factorisation under Gaussian rows: clipped errors, a rating's own push, and steps that stay stable.

A rating of user u and item w has the error e = <x_u, x_w> - y. Rows are Gaussian with means m and variances v (d_r
numbers a row), so that

    E e = <m_u, m_w> + c - y,       Var e = D s^2,       s^2 = sum_l v_ul m_wl^2 + v_wl m_ul^2 + v_ul v_wl.

c and D say what the rating itself has done, for it pushes its own two rows against its own error: c <= 0 or >= 0 is the
covariance sum_l Cov(x_ul, x_wl) that its pushes have built, and D the share of the fluctuation that they have left. A
rating never seen has c = 0 and D = 1. Own derivation, closed in second moments. For a linear regression on directions
without structure it is exact early on (to second order in time) and late: errors settle at the share 1 - d_r/n of n
ratings on d_r numbers, or at 0 where n <= d_r, as they do by the law of Marchenko and Pastur.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import special

Array = Any
SMALLEST_STD = 1e-12  # of an error: below it the error is a number


class ClippedError(NamedTuple):
    """Expectations of r(e) = clamp(e, -b, b) for Gaussian e; (n,) each.

    Args:
      push: E r.   slope: E r' = Cov(e, r)/Var e (Stein).   square: E r^2.
      by_bound: d E r/db = P(e > b) - P(e < -b).   clip_fraction: P(|e| > b).
    """

    push: Array
    slope: Array
    square: Array
    by_bound: Array
    clip_fraction: Array

    def times(self, weight: float) -> "ClippedError":
        """Where every example counts so much.

        Args:
          weight: of each example's error in its gradient; >= 0.
        Returns: ClippedError with the same clip fraction.
        """
        push, slope, square, by_bound = (weight * part for part in self[:4])
        return ClippedError(push, slope, square, by_bound, self.clip_fraction)


def clipped_error(mean: Array, variance: Array, bound: Array) -> ClippedError:
    """E r, E r', E r^2 and P(|e| > b) of r = clamp(e, -b, b), e ~ N(mean, variance); closed forms.

    Args:
      mean, variance: of the errors; (n,).   bound: b > 0, inf for none; (n,).
    Returns: ClippedError; (n,) each.

    >>> e = clipped_error(np.array([0.0, 3.0]), np.array([1.0, 0.0]), np.array([1.0, 2.0]))
    >>> e.push, e.slope.round(3), e.square.round(3)
    (array([0., 2.]), array([0.683, 0.   ]), array([0.516, 4.   ]))
    """
    bound = np.asarray(bound, dtype=float)
    std = np.maximum(np.sqrt(np.maximum(variance, 0.0)), SMALLEST_STD)
    low, high = (-bound - mean) / std, (bound - mean) / std
    below, above = special.ndtr(low), special.ndtr(-high)
    inside = np.maximum(1 - below - above, 0.0)
    at_low, at_high = (np.exp(-(edge**2) / 2) / math.sqrt(2 * math.pi) for edge in (low, high))
    finite = np.where(np.isinf(bound), 0.0, bound)  # nothing lies beyond a bound of infinity
    # E[e; |e| < b] and E[e^2; |e| < b]; edge * density vanishes where the edge is far.
    first = mean * inside + std * (at_low - at_high)
    second = mean * first + std * (std * inside - finite * (at_low + at_high))
    return ClippedError(
        push=finite * (above - below) + first,
        slope=inside,
        square=finite**2 * (above + below) + np.maximum(second, 0.0),
        by_bound=above - below,
        clip_fraction=below + above,
    )


def remaining_share(share: Array, *, spread: Array, noise: Array, damping: Array, num_steps: float) -> Array:
    """D after num_steps of D' = (1 - D) noise/s^2 - D damping, all else frozen; (n,), in [0, 1].

    Fresh noise in the two rows is not yet pushed away, and draws D to 1; the rating's own pushes draw it to 0.

    Args:
      share: D; (n,).   spread: s^2; (n,) >= 0.   noise: growth of s^2 by noise, a step; (n,).
      damping: 2 (eta/n) E r' (k_u E|x_w|^2 + k_w E|x_u|^2), a step; (n,).   num_steps: >= 0.
    Returns: (n,) in [0, 1].

    >>> remaining_share(np.ones(2), spread=np.array([0.0, 2.0]), noise=1.0, damping=0.5, num_steps=1e9)
    array([1. , 0.5])
    """
    fresh = np.asarray(noise / np.maximum(spread, 1e-300), np.float64)
    rate = fresh + damping
    with np.errstate(invalid="ignore"):
        settled = np.where(np.isfinite(fresh) & (rate > 0), fresh / np.maximum(rate, 1e-300), 1.0)
    faded = np.exp(-num_steps * np.minimum(rate, 1e3))
    return np.clip(settled + (share - settled) * faded, 0.0, 1.0)


def variance_of_squares(error_mean: Array, error_variance: Array, of_two: Array) -> float:
    """What of Var sum_i e_i^2 is quadratic in the rows: sum_i 2 q_i^2 + 4 e_i^2 b_i, independent from rating to rating.

    Args:
      error_mean, error_variance: e_i and q_i of each rating's error; (n,).
      of_two: b_i, what of q_i the fluctuations of both rows make, sum_l v_ul v_wl; (n,).
    Returns: () >= 0.

    >>> variance_of_squares(np.array([0.0, 1.0]), np.array([1.0, 1.0]), np.array([1.0, 0.5]))
    6.0
    """
    return float(np.sum(2 * error_variance**2 + 4 * error_mean**2 * of_two))


# --- Stabilised steps ---------------------------------------------------------------------------------------------

DAMPING = 2 / 13  # of the Chebyshev polynomial, so that the fastest modes die out too


def stages_for(stiffness: float) -> int:
    """How many stages one step of length h needs when rates reach `stiffness`/h: as its root; >= 2.

    Args:
      stiffness: the fastest rate times h; >= 0.
    Returns: how many; >= 2.

    >>> stages_for(0.1), stages_for(200.0)
    (2, 18)
    """
    return max(2, math.ceil(math.sqrt(1 + 1.54 * stiffness)))


def chebyshev_step(
    field: Callable[[Array], Array], state: Array, at_start: Array, length: float, num_stages: int
) -> Array:
    """One step of x' = field(x) of second order, stable for rates up to 0.65 (num_stages^2 - 1)/length (RKC).

    Explicit, so that it needs no solve, and yet fit for stiff flows down a slope: twice the stages, four times the
    rates. Sommeijer, Shampine and Verwer, 'RKC: an explicit solver for parabolic PDEs', 1998, Eq. (2.1)-(2.6).

    Args:
      field: state -> its rate of change.   at_start: field(state).   length: h.   num_stages: >= 2.
    Returns: the state after it; shape of state.

    >>> y = np.ones(2)
    >>> f = lambda y: -np.array([0.1, 20.0]) * y
    >>> chebyshev_step(f, y, f(y), 1.0, stages_for(20.0)).round(3)        # e^-0.1 = 0.905; fast ones about halve a step
    array([0.905, 0.544])
    """
    a, b, ratio, scale = _chebyshev(num_stages)
    before, now = state, state + b[1] * scale * length * at_start
    for j in range(2, num_stages + 1):
        mu, nu, push = 2 * b[j] / b[j - 1] * ratio, -b[j] / b[j - 2], 2 * b[j] / b[j - 1] * scale * length
        moved = push * (field(now) - a[j - 1] * at_start)
        for weight, known in ((mu, now), (nu, before), (1 - mu - nu, state)):
            moved += weight * known
        before, now = now, moved
    return now


def _chebyshev(num_stages: int) -> tuple[np.ndarray, np.ndarray, float, float]:
    """a_j, b_j, w_0 and w_1."""
    w0 = 1 + DAMPING / num_stages**2
    values, slopes, bends = [1.0, w0], [0.0, 1.0], [0.0, 0.0]
    for _ in range(2, num_stages + 1):
        values.append(2 * w0 * values[-1] - values[-2])
        bends.append(4 * slopes[-1] + 2 * w0 * bends[-1] - bends[-2])
        slopes.append(2 * values[-2] + 2 * w0 * slopes[-1] - slopes[-2])
    b = np.array([0.0, 0.0, *(bend / slope**2 for bend, slope in zip(bends[2:], slopes[2:], strict=True))])
    b[:2] = b[2]
    return 1 - b * np.array(values), b, w0, slopes[-1] / bends[-1]
