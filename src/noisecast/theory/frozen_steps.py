"""Many steps of a frozen linear recursion at once, by its geometric sums."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = Any
SATURATED = 1.95  # the most that learning rate times curvature can be where a force is bounded: see `most`
# Beyond it a direction's variance, eta^2 N/(x (2 - x)), shrinks fast with the slope that x has, and the slope shrinks
# with the variance: found in turns, one from the other, they may swing ever wider.
OVERSHOOTING = 1.5
# Of a time step, where a run is not long: after one too long weights overshoot, and then hardly move again.
HALVINGS = 3
SWING_BACK, SMALLEST_SWING = 0.3, 0.01  # of a swing, and of variances themselves: less dies away by itself
LARGEST_DRIFT = 0.5  # of a variance, in one time step
SMALLEST_GAIN = 1e-8  # relative to the largest: below it a saturated sign no longer moves with its gradient


def geometric_sum(x: Array, num_steps: int) -> Array:
    """sum_{i < n} (1 - x)^i = (1 - (1 - x)^n)/x, also at x = 0 (n) and beyond stability (x > 2: it explodes).

    Args:
      x: any shape.   num_steps: n; >= 0.
    Returns: shape of x; infinite where it overflows.

    >>> geometric_sum(np.array([0.0, 0.5, 1.0]), 2)
    array([2. , 1.5, 1. ])
    """
    x = np.asarray(x, np.float64)
    rest = 1 - x
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        log_power = num_steps * np.where(rest > 0, np.log1p(-np.minimum(x, 1.0)), np.log(np.abs(rest)))
        even = np.where((rest < 0) & (num_steps % 2 == 1), -1.0, 1.0)
        total = np.where(even > 0, -np.expm1(log_power), 1 + np.exp(log_power)) / x
    return np.where(np.abs(x) < 1e-14, float(num_steps), total)


def largest_stable_step(lag: float) -> float:
    """The eta lambda beyond which steps explode: 2 for those that follow the gradient, 2 (1 + 2 L) for its average.

    m' = b m + (1 - b) lambda x and x' = x - eta m' are stable up to 2 (1 + b)/(1 - b), and L = b/(1 - b).

    Args:
      lag: L, steps by which directions lag behind gradients; >= 0.
    Returns: () >= 2.

    >>> largest_stable_step(0.0), largest_stable_step(9.0)
    (2.0, 38.0)
    """
    return 2 * (1 + 2 * lag)


class Drift(NamedTuple):
    """What is not frozen: by how much more a variance is given, less what fades of it, from one step to the next.

    Where steps are many, a stiff direction settles on what the last of them give it, not on what those half-way do.

    Args:
      growth: g, of eta^2 N - (V - R V R^T) at an unchanging V; like V.
      since: c, the step at which everything frozen was found.
    """

    growth: Array
    since: int


def drift_sum(x: Array, num_steps: int, since: int) -> Array:
    """int_0^n e^(-x (n - t)) (t - c) dt: what is left of a push that grows by one a step, and is none at c.

    Args:
      x: rates, any shape; below 0 taken as 0.   num_steps: n; >= 0.   since: c; >= 0.
    Returns: shape of x [steps^2].

    >>> drift_sum(np.array([0.0, 0.5]), 10, 5).round(3)
    array([0.   , 6.094])
    """
    y = np.maximum(np.asarray(x, np.float64), 0.0) * num_steps
    near, far = np.minimum(y, 1e-3), np.clip(y, 1e-3, 700.0)
    whole = np.where(y < 1e-3, 1 - near / 2, -np.expm1(-far) / far)
    by_age = np.where(y < 1e-3, 1 / 2 - near / 3, (-np.expm1(-far) - far * np.exp(-far)) / far**2)
    return num_steps * ((num_steps - since) * whole - num_steps * by_age)


def advance_covariance(
    covariance: Array, *, jacobian: Array, gain: Array, noise: Array, learning_rate: float, num_steps: int,
    lag: float = 0.0, most: float = np.inf, overshooting: float = np.inf,
) -> Array:  # fmt: skip
    """V after n steps of V' = R V R^T + eta^2 N, R = I - eta K J, all else frozen; (d, d).

    With y = K^(-1/2) x the operator K^(1/2) J K^(1/2) is symmetric; in its eigenbasis, x_a = eta lambda_a and
    r_ab = (1 - x_a)(1 - x_b), V_ab -> r_ab^n V_ab + eta^2 N_ab (1 - r_ab^n)/(1 - r_ab). No learning rate is too large.
    For directions that lag see `_fading`.

    Args:
      covariance: V; (d, d) [params^2].   jacobian: J, symmetric; (d, d).   gain: k; (d,) >= 0.
      noise: N, of one step's direction; (d, d).   learning_rate: eta; > 0.   num_steps: n; >= 0.
      lag: L; () >= 0. With one, `most` and `overshooting` are multiplied by 1 + 2 L, as the largest stable step is.
      most: x_a is not taken to be larger. A force that is bounded saturates where linear steps would explode, and ends
        in wide swings at the edge of stability: `SATURATED` says so.
      overshooting: where x_a is larger, direction a's variance is taken half-way between before and after: see
        `OVERSHOOTING`.
    Returns: (d, d); nan where K^(1/2) J K^(1/2) is not finite.

    >>> advance_covariance(np.eye(1), jacobian=np.eye(1), gain=np.ones(1), noise=np.eye(1), learning_rate=0.5,
    ...                    num_steps=2)
    array([[0.375]])
    """
    modes = _modes(jacobian, gain)
    if modes is None:  # beyond float64: the run diverges
        return np.full_like(covariance, np.nan)
    eigenvalues, into, back = modes
    reach = largest_stable_step(lag) / 2
    x = np.minimum(learning_rate * eigenvalues, most * reach)
    fading, total = _fading(x[:, None], x, num_steps, lag)
    before = into @ covariance @ into.T
    after = (1 - fading * total) * before + learning_rate**2 * total * (into @ noise @ into.T)
    # Two congruences, S after S + (1 - S^2)^(1/2) before (1 - S^2)^(1/2): their sum stays a covariance.
    kept = np.where(x > overshooting * reach, math.sqrt(0.5), 1.0)
    held = np.sqrt(1 - kept**2)
    return back @ (np.outer(kept, kept) * after + np.outer(held, held) * before) @ back.T


def advance_variance(
    variance: Array, *, jacobian: Array, gain: Array, noise: Array, learning_rate: float, num_steps: int,
    lag: float = 0.0, most: float = np.inf,
) -> Array:  # fmt: skip
    """`advance_covariance` of independent coordinates; everything (d,).

    Args:
      variance, jacobian, gain, noise: diagonals of V, J, K and N; (d,).
      learning_rate, num_steps, lag, most: as `advance_covariance`.
    Returns: (d,) [params^2].

    >>> advance_variance(np.ones(1), jacobian=np.ones(1), gain=np.ones(1), noise=np.ones(1), learning_rate=0.5,
    ...                  num_steps=2)
    array([0.375])
    """
    x = np.minimum(learning_rate * gain * jacobian, most * largest_stable_step(lag) / 2)
    fading, total = _fading(x, x, num_steps, lag)
    return (1 - fading * total) * variance + learning_rate**2 * total * noise


def drift_covariance(
    covariance: Array, drift: Drift, *, jacobian: Array, gain: Array, learning_rate: float, num_steps: int,
    lag: float = 0.0, most: float = np.inf, apart: Array | None = None,
) -> Array:  # fmt: skip
    """`advance_covariance`'s, where what is given drifts: in the eigenbasis S V S, S by how much variances grow.

    Args:
      covariance: after n steps of which all is frozen; (d, d).   drift: (d, d).
      jacobian, gain, learning_rate, num_steps, lag, most: as there.
      apart: u of which Var u.w does not drift, having a law of its own; (d,), or None.
    Returns: (d, d).

    >>> frozen = {"jacobian": np.eye(1), "gain": np.ones(1), "learning_rate": 0.1, "num_steps": 100}
    >>> drift_covariance(np.eye(1), Drift(np.full((1, 1), 0.001), since=50), **frozen).round(4)
    array([[1.2355]])
    """
    modes = _modes(jacobian, gain)
    if modes is None:
        return covariance
    eigenvalues, into, back = modes
    x = np.minimum(learning_rate * eigenvalues, most * largest_stable_step(lag) / 2)
    variance = ((into @ covariance) * into).sum(axis=1)
    grown = ((into @ drift.growth) * into).sum(axis=1) * drift_sum(
        _fading(x, x, num_steps, lag)[0], num_steps, drift.since
    )
    wider = np.sqrt(1 + _drift_share(variance, grown))
    scale = (back * wider) @ into
    after = scale @ covariance @ scale.T
    if apart is None:
        return after
    along = after @ apart
    before, now = float(apart @ covariance @ apart), float(apart @ along)
    return after + (before / now - 1) / now * np.outer(along, along) if now > 0 else after


def drift_variance(
    variance: Array, drift: Drift, *, jacobian: Array, gain: Array, learning_rate: float, num_steps: int,
    lag: float = 0.0, most: float = np.inf,
) -> Array:  # fmt: skip
    """`drift_covariance` of independent coordinates; everything (d,).

    >>> frozen = {"jacobian": np.ones(1), "gain": np.ones(1), "learning_rate": 0.1, "num_steps": 100}
    >>> drift_variance(np.ones(1), Drift(np.array([0.001]), since=50), **frozen).round(4)
    array([1.2355])
    """
    x = np.minimum(learning_rate * gain * jacobian, most * largest_stable_step(lag) / 2)
    grown = drift.growth * drift_sum(_fading(x, x, num_steps, lag)[0], num_steps, drift.since)
    return variance * (1 + _drift_share(variance, grown))


def _modes(jacobian: Array, gain: Array) -> tuple[Array, Array, Array] | None:
    """Eigenvalues of K^(1/2) J K^(1/2), and what leads into its eigenbasis and back; None where they are not finite."""
    root = np.sqrt(np.maximum(gain, SMALLEST_GAIN * gain.max()))
    response = root[:, None] * jacobian * root
    if not np.isfinite(response).all():
        return None
    eigenvalues, basis = np.linalg.eigh(response)
    return eigenvalues, basis.T / root, root[:, None] * basis


def _drift_share(variance: Array, grown: Array) -> Array:
    return np.clip(grown / np.maximum(variance, 1e-300), -LARGEST_DRIFT, LARGEST_DRIFT)


def _fading(x: Array, other: Array, num_steps: int, lag: float) -> tuple[Array, Array]:
    """f, the share of V_ab that fades a step, and n steps' sum s of what is left of it, so that 1 - f s stays.

    Without lag f = x + y - x y, and s the sum of (1 - f)^i. Directions that average gradients, m' = b m + (1 - b)(...)
    with L = b/(1 - b), let eta^2 N_ab settle at eta^2 N_ab/f,

        f = x + y + (L (1 + L) (x - y)^2 - x y)/(1 + 2 L),

    the stationary covariance of two such averages of common noise (own derivation). On the way there s is the integral
    of e^(-f t): e^(-f t) = e^(-x t) e^(-y t) times a Gaussian kernel of x - y times e^(x y t/(1 + 2 L)), three
    covariances, so that V stays one. It leaves out what modes of x > 1/(4 L) swing before they settle, which takes them
    some 2 (1 + L) steps.
    """
    if lag == 0:
        fading = x + other - x * other
        return fading, geometric_sum(fading, num_steps)
    fading = x + other + (lag * (1 + lag) * (x - other) ** 2 - x * other) / (1 + 2 * lag)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        total = -np.expm1(-fading * num_steps) / fading
    return fading, np.where(np.abs(fading) < 1e-14, float(num_steps), total)


def halvings_of(num_steps: int) -> int:
    """How often a time step of such a run may be halved: more in long runs, whose first time step is long beside what
    the weights take to settle.

    Args:
      num_steps: of the run; >= 1.
    Returns: how often; >= `HALVINGS`.

    >>> halvings_of(39_000), halvings_of(1_000_000)
    (3, 7)
    """
    return HALVINGS + max(0, (num_steps - 1).bit_length() - 16)


def bend(before: Array, after: Array) -> float:
    """By how much the examples' slopes change, as a share of the larger.

    Args:
      before, after: slopes; (n,) >= 0.
    Returns: () in [0, 2]; at most 1 where all grew or all shrank.

    >>> bend(np.array([0.25, 0.25]), np.array([0.25, 0.15]))
    0.2
    """
    return float(np.abs(after - before).sum() / max(before.sum(), after.sum(), 1e-30))


def way_to_rest(before: Array, halfway: Array, after: Array) -> float:
    """The share of the way from before to half-way at which variances s come to rest.

    Frozen steps that are so many that they forget where they began lead to an s = F(s') of the slopes that s' has.
    Outputs that are far on the right side and wide meet a wall: the wider they are the steeper, F falls, and by F' < -1
    s swings ever wider from step to step. With d = halfway - before and d' = after - halfway of those that swing back,
    F' is about d.d'/d.d, and s rests at before + d/(1 - F') (Aitken).

    Args:
      before, halfway, after: variances; (n,) >= 0.
    Returns: 1/(1 - F'); 1 where they do not swing back by more than `SWING_BACK` of d, or d is small.

    >>> way_to_rest(np.array([4.0, 1.0]), np.array([1.0, 2.0]), np.array([4.0, 3.0]))
    0.5
    >>> way_to_rest(np.array([1.0]), np.array([2.0]), np.array([3.0]))
    1.0
    """
    first, then = halfway - before, after - halfway
    swings = first * then < 0
    squared = float(first[swings] @ first[swings])
    back = float(first[swings] @ then[swings]) / max(squared, 1e-300)
    return 1 / (1 - back) if back < -SWING_BACK and squared > SMALLEST_SWING**2 * float(halfway @ halfway) else 1.0


def power_iteration(operator: Callable[[Array], Array], direction: Array, num_powers: int) -> tuple[float, Array]:
    """The largest eigenvalue of a symmetric A >= 0, from below, and the direction where to go on looking for it.

    Args:
      operator: v -> A v.   direction: v, of length 1; (d,).   num_powers: n; A^n v has turned towards it.
    Returns: the eigenvalue; () >= 0, and the direction, of length 1; (d,).

    >>> largest, _ = power_iteration(lambda v: np.array([0.5, 2.0]) * v, np.array([0.8, 0.6]), 4)
    >>> round(largest, 3)
    2.0
    """
    largest = 0.0
    for _ in range(num_powers):
        image = operator(direction)
        largest = float(np.linalg.norm(image))
        if largest > 0:  # nothing bends at a start where every sign is saturated; later on something may
            direction = image / largest
    return largest, direction


def krylov_response(
    operator: Callable[[Array], Array],
    start: Array,
    num_steps: int,
    *,
    lag: float = 0.0,
    tolerance: float = 3e-4,
    max_iterations: int = 48,
    most: float = np.inf,
    since: int | None = None,
) -> Array:
    """sum_{i < n} (I - A')^i A' A^-1 b for symmetric A >= 0: how far n linear steps travel, by Lanczos.

    A' = A (I + L A): directions that lag by L steps overshoot, so that x shrinks by 1 - a - L a^2 a step (the slow root
    of the heavy ball, to second order). No a' is more than 1 - sqrt(L/(1 + L)): the heavy ball, where it oscillates,
    calms down no faster.

    Args:
      operator: v -> A v.   start: b; (d,).   num_steps: n; >= 1.   lag: L; >= 0.
      tolerance: of the answer's length, between one iteration and the next.   max_iterations: of Lanczos; >= 1.
      most: without lag, as in `advance_covariance`.   since: b is no force but by how much one grows a step, which is
        none at step `since` (`drift_sum`).
    Returns: (d,), in units of b; of such a growth, times steps.

    >>> krylov_response(lambda v: np.array([0.5, 1.0]) * v, np.ones(2), 2).round(12)
    array([1.5, 1. ])
    """
    length = np.linalg.norm(start)
    if (since is None and num_steps == 1 and lag == 0) or length == 0 or not np.isfinite(length):
        return num_steps * start
    basis, diagonal, off = np.empty((max_iterations + 1, len(start))), [], []
    basis[0] = start / length
    found = None
    for iteration in range(1, max_iterations + 1):
        known = basis[:iteration]
        image = operator(known[-1])
        diagonal.append(known[-1] @ image)
        for _ in range(2):  # twice is enough to keep the basis orthogonal
            image = image - known.T @ (known @ image)
        off.append(np.linalg.norm(image))
        exhausted = off[-1] <= 1e-10 * max(map(abs, diagonal)) or iteration >= min(len(start), max_iterations)
        eigenvalues, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(off[:-1], 1) + np.diag(off[:-1], -1))
        answer = length * (vectors @ (_steps_travelled(eigenvalues, num_steps, lag, most, since) * vectors[0]))
        if exhausted or (found is not None and _change(found, answer) <= tolerance):
            return known.T @ answer
        found = answer
        basis[iteration] = image / off[-1]
    raise AssertionError("the last iteration returns")


def _steps_travelled(curvature: Array, num_steps: int, lag: float, most: float, since: int | None) -> Array:
    """sum_{i < n} (1 - a')^i a'/a: by how many steps of an unchanging force; or of one that grows."""
    a = np.minimum(curvature, most) if lag == 0 else np.maximum(curvature, 1e-300)
    faster = 1.0 if lag == 0 else np.minimum(1 + lag * a, (1 - math.sqrt(lag / (1 + lag))) / a)
    if since is not None:
        return faster * drift_sum(faster * a, num_steps, since)
    return faster * geometric_sum(faster * a, num_steps)


def _change(before: np.ndarray, after: np.ndarray) -> float:
    padded = np.concatenate([before, np.zeros(len(after) - len(before))])
    return float(np.linalg.norm(after - padded) / max(np.linalg.norm(after), 1e-300))
