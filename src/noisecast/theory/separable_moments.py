"""The law of each weight of a separable loss: Gaussian where one well holds it, else a density on a grid.

f(x) = sum_j f_j(x_j). Clipping couples coordinates through |grad f| alone, whose mean over runs is used (a mean field),
so each coordinate has a law of its own. Own derivation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import scipy.sparse

from noisecast.theory.closures import Closure, GradientLaw, QuadraticRecursion
from noisecast.theory.quadratic_moments import recursion_of

Array = Any
Function = Callable[[Array], Array]  # of weights (..., c), coordinate by coordinate

NODES = 9  # of Gauss-Hermite quadrature: exact for polynomials up to degree 17
REFRESH = 1e-3  # relative change of noise, clipping or memory beyond which a grid's transition is made anew


def gaussian_expectation(function: Function, mean: Array, variance: Array, *, nodes: int = NODES) -> Array:
    """E function(x), x_j ~ N(m_j, v_j), by Gauss-Hermite quadrature: exact for polynomials below degree 2 nodes.

    Args:
      function: of (nodes, c).   mean, variance: (c,).   nodes: >= 1.
    Returns: (c,).

    >>> gaussian_expectation(lambda x: x**4, np.zeros(1), np.ones(1)).round(12)
    array([3.])
    """
    points, weights = _hermite(nodes)
    return np.tensordot(weights, function(mean + np.sqrt(np.maximum(variance, 0.0)) * points[:, None]), axes=1)


@cache
def _hermite(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return points, weights / math.sqrt(2 * math.pi)


@dataclass(frozen=True)
class Separable:
    """Coordinates of a separable loss.

    Args:
      slope, curvature: f' and f'', vectorised over (..., c).
    """

    slope: Function
    curvature: Function


class GaussianLaws:
    """Independent Gaussian coordinates under an optimizer's closure, step by step.

    The slope is replaced by its best linear approximation under the law, f'(x) ~ E f' + E f'' (x - m) (Stein), and
    keeps its variance; then the optimizer's recursion on quadratics is used with that curvature. Exact where f' is
    linear and the recursion is.

    Args:
      loss: slopes and curvatures.   start: weights at step 0; (c,).   closure: of the optimizer.

    >>> from noisecast.theory.closures import SGD_CLOSURE
    >>> square = Separable(slope=lambda x: x, curvature=np.ones_like)
    >>> laws = GaussianLaws(square, np.ones(1), SGD_CLOSURE)
    >>> laws.advance(0, 1.0, GradientLaw(np.zeros(1), 0.0, 4.0), 0.5)
    >>> laws.state.mean, laws.state.variance
    (array([0.5]), array([1.]))
    """

    def __init__(self, loss: Separable, start: Array, closure: Closure):
        self.loss = loss
        self.recursion: QuadraticRecursion = recursion_of(closure)
        self.state = self.recursion.start(np.asarray(start, np.float64))

    def expect(self, function: Function, *, nodes: int = NODES) -> Array:
        """E function(x), coordinate by coordinate.

        Args:
          function: of weights (nodes, c).   nodes: of the quadrature, exact below degree 2 nodes; >= 1.
        Returns: (c,).
        """
        return gaussian_expectation(function, self.state.mean, self.state.variance, nodes=nodes)

    def advance(self, step: int, shrink: float, noise: GradientLaw, learning_rate: float) -> None:
        """One step: E clip(g) = shrink f'; `noise` has the noise and its mixture.

        Args:
          step: k = 0, 1, ...   shrink: h; in [0, 1].   noise: of the gradient; mean and signal in it are replaced.
          learning_rate: eta; > 0.
        """
        mean, square, curvature = (
            self.expect(function, nodes=5)
            for function in (self.loss.slope, lambda x: self.loss.slope(x) ** 2, self.loss.curvature)
        )
        spread = shrink**2 * np.maximum(square - mean**2, 0.0)
        law = noise._replace(mean=shrink * mean, signal_variance=spread)
        self.state = self.recursion.step(self.state, step, shrink * curvature, law, learning_rate)


class GridLaws:
    """Densities on a grid, one a coordinate, for laws that no Gaussian is near: several wells, wide noise.

    Given x the closure knows mean and variance of the step. Both are kept exactly by steps to the neighbours of the
    nearest grid point (`grid_transition`); a step of fixed length, a sign's, is the birth-death chain itself. What the
    optimizer remembers is a mean field, one number a coordinate. Directions that lag by L steps move the slow mode
    faster by 1 + eta L k h f''(x), noise included, so that wells keep their width; early on steps lag by half their
    number.

    Args:
      loss, closure: as `GaussianLaws`.
      starts: of each law the points where it starts, equally likely; c arrays. The very first one becomes a grid
        point; others are split between neighbours, which keeps their means.
      span: the grid's ends; mass that gets there stays there.   spacing: of the grid; > 0 [params].

    >>> from noisecast.theory.closures import SIGN_CLOSURE
    >>> square = Separable(slope=lambda x: x, curvature=np.ones_like)
    >>> laws = GridLaws(square, [np.zeros(1)], SIGN_CLOSURE, span=(-2.0, 2.0), spacing=1.0)
    >>> laws.advance(0, 1.0, GradientLaw(np.zeros(1), 0.0, 1.0), 1.0)
    >>> laws.points, laws.probabilities[:, 0]                                              # one sign, up or down
    (array([-2., -1.,  0.,  1.,  2.]), array([0. , 0.5, 0. , 0.5, 0. ]))
    """

    def __init__(
        self, loss: Separable, starts: Sequence[Array], closure: Closure, *, span: tuple[float, float], spacing: float
    ):
        self.loss, self.closure = loss, closure
        first = float(starts[0][0])
        below, above = math.ceil((first - span[0]) / spacing), math.ceil((span[1] - first) / spacing)
        self.points = first + spacing * np.arange(-below, above + 1)
        self.probabilities = np.stack([_spikes(self.points, at) for at in starts], axis=1)
        self.memory: Any = None
        self._made_for: Any = None
        self._transitions: list[Any] = []

    def expect(self, function: Function, *, nodes: int = NODES) -> Array:
        """E function(x), coordinate by coordinate.

        Args:
          function: of weights (N, c).   nodes: of Gaussians; not used here.
        Returns: (c,).
        """
        return np.sum(self.probabilities * function(self._everywhere), axis=0)

    @property
    def mass_at_the_ends(self) -> float:
        """The most that a coordinate has of its law at the grid's ends, where it stays; () in [0, 1]."""
        return float(np.max(self.probabilities[0] + self.probabilities[-1]))

    @property
    def _everywhere(self) -> np.ndarray:
        return np.broadcast_to(self.points[:, None], self.probabilities.shape)

    def advance(self, step: int, shrink: float, noise: GradientLaw, learning_rate: float) -> None:
        """One step; the transition is made anew where noise, clipping or memory have changed by more than `REFRESH`.

        Args: as `GaussianLaws.advance`.
        """
        mean = self.expect(self.loss.slope)
        spread = np.maximum(self.expect(lambda x: self.loss.slope(x) ** 2) - mean**2, 0.0)
        everywhere = noise._replace(mean=shrink * mean, signal_variance=shrink**2 * spread)
        self.memory = self.closure.memory(self.memory, everywhere, step, 1)
        lag, share = min(self.closure.lag, step / 2), self.closure.noise_share(step, 1)
        numbers = (shrink, noise.noise_variance, lag, share, *noise.snr_factors, *noise.snr_weights)
        now = np.array([*numbers, *([] if self.memory is None else self.memory)], np.float64)
        if self._made_for is None or np.any(np.abs(now - self._made_for) > REFRESH * np.abs(self._made_for)):
            moved = self._step_given_x(shrink, noise, learning_rate, lag, share)
            self._transitions, self._made_for = grid_transition(self.points, *moved), now
        law = self.probabilities.T.ravel()
        for transition in self._transitions:
            law = transition @ law
        self.probabilities = law.reshape(self.probabilities.T.shape).T

    def _step_given_x(
        self, shrink: float, noise: GradientLaw, learning_rate: float, lag: float, share: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of x' - x given x; (c, N) each."""
        x = self._everywhere
        law = noise._replace(mean=shrink * self.loss.slope(x), signal_variance=np.zeros_like(x))
        expected, gain, of_one = self.closure.response(law, self.memory)
        variance = learning_rate**2 * share * of_one
        overshoot = np.clip(1 + learning_rate * lag * gain * shrink * self.loss.curvature(x), 0.5, 2.0)
        return -learning_rate * (overshoot * expected).T, (overshoot * variance).T


def grid_transition(points: Array, displacement: Array, variance: Array) -> list[Any]:
    """Matrices that move densities on a grid by steps of given mean and variance at each point.

    Mass at x moves to the grid point nearest x + displacement, and spreads from there to the neighbours with
    probabilities (w +- r)/2, w = variance/dx^2 + r^2, r = displacement/dx less the move: mean and variance are kept.
    Where |r| <= w <= 1 holds without a move there is none, so that steps of +-dx stay steps of +-dx. Variances beyond
    3/4 dx^2 take several such steps (such variances must vary slowly from point to point); below |r| (1 - |r|) dx^2, at
    most dx^2/4, no such law exists and the variance is that.

    Args:
      points: evenly spaced; (N,).   displacement, variance: (c, N).
    Returns: sparse matrices (c N, c N), to be applied in turn to probabilities (c, N), flattened.

    >>> (matrix,) = grid_transition(np.arange(3.0), np.zeros((1, 3)), np.full((1, 3), 0.5))
    >>> matrix @ np.array([0.0, 1.0, 0.0])
    array([0.25, 0.5 , 0.25])
    """
    spacing = points[1] - points[0]
    drift, spread = displacement / spacing, variance / spacing**2
    # 3/4 leaves room for the rounded move. One rule for all points: the rest of the variance is added where mass lands.
    first = spread if _fits(drift, spread).all() else np.minimum(spread, 0.75)
    move = np.where(_fits(drift, first), 0.0, np.rint(np.clip(drift, -len(points), len(points))))
    transitions = [_neighbours(move, drift - move, first)]
    times = math.ceil(float(np.max(spread - first)))
    if times > 0:
        nowhere = np.zeros_like(drift)
        transitions += times * [_neighbours(nowhere, nowhere, (spread - first) / times)]
    return transitions


def _fits(drift: np.ndarray, spread: np.ndarray) -> np.ndarray:
    width = spread + drift**2
    return (np.abs(drift) <= width + 1e-9) & (width <= 1 + 1e-9)


def _neighbours(move: np.ndarray, rest: np.ndarray, spread: np.ndarray) -> Any:
    coordinates, n = move.shape
    rest = np.clip(rest, -1.0, 1.0)
    width = np.clip(spread + rest**2, np.abs(rest), 1.0)
    chances = np.stack([(width - rest) / 2, 1 - width, (width + rest) / 2])
    targets = np.arange(n) + move + np.array([-1, 0, 1])[:, None, None]
    targets = np.clip(targets, 0, n - 1).astype(np.int64) + n * np.arange(coordinates)[:, None]
    sources = np.broadcast_to(np.arange(coordinates * n).reshape(coordinates, n), targets.shape)
    size = (coordinates * n, coordinates * n)
    return scipy.sparse.csr_array((chances.ravel(), (targets.ravel(), sources.ravel())), shape=size)


def _spikes(points: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Equal masses at `at`, each split between the two grid points around it; (N,)."""
    place = np.clip((at - points[0]) / (points[1] - points[0]), 0, len(points) - 1)
    nearest = np.rint(place)
    place = np.where(np.abs(place - nearest) < 1e-6, nearest, place)
    below = np.minimum(place.astype(np.int64), len(points) - 2)
    law = np.bincount(below, 1 - (place - below), len(points)) + np.bincount(below + 1, place - below, len(points))
    return law / len(at)
