"""Forecasts of the quartic, and of any separable loss with injected noise: a one-dimensional law a coordinate."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from noisecast.problems.quartic import Quartic
from noisecast.runners.moments import quadratic
from noisecast.runners.moments.forecast import Forecast, Metrics, collected
from noisecast.scenario import Scenario
from noisecast.theory.closures import GradientLaw, expected_norm
from noisecast.theory.separable_moments import NODES, GaussianLaws, GridLaws, Separable

Array = np.ndarray

LARGEST_WIDTH = 0.02  # 3 lambda v/h: of the curvature that a Gaussian closure averages, how much the quartic adds
LARGEST_GAUSSIAN_WIDTH = 0.2  # beyond it a Gaussian that was taken nevertheless is out of its depth
MOST_STARTS = 32  # densities of one curvature; more starts than that are binned
MOST_POINTS = 100_000  # of all densities together
LARGEST_MASS_AT_THE_ENDS = 1e-4
LOST_MASS = "Some mass has reached the ends of the grid that holds a coordinate's density."
NO_GAUSSIAN = (
    "A coordinate has been spread over several wells, or over a slope that bends, and its step is too small next to "
    "the way for a density on a grid: the Gaussian that stands for it may be off by its whole loss."
)


def handles(problem: Any) -> bool:
    return isinstance(problem, Quartic)


why_unsupported = quadratic.why_unsupported


def prepare(problem: Quartic, settings: Any) -> None:
    return None


def forecast(scenario: Scenario, prepared: None, record_at: Sequence[int], settings: Any) -> Forecast:
    """Step by step; coordinates that share curvature and start share a law."""
    return _SeparableSolve(scenario).forecast(record_at)


class _Coordinates(NamedTuple):
    """Distinct coordinates of the quartic, how often each occurs, and how a law of theirs is kept."""

    hessian: Array
    start: Array
    minimum: Array
    counts: Array
    quartic_weight: float
    cubic_weight: float

    def take(self, chosen: Array) -> "_Coordinates":
        return self._replace(
            hessian=self.hessian[chosen], start=self.start[chosen],
            minimum=self.minimum[chosen], counts=self.counts[chosen],
        )  # fmt: skip

    def loss(self, x: Array) -> Array:
        return self.hessian * x**2 / 2 + self.quartic_weight * x**4 / 4 - self.cubic_weight * x**3 / 3 - self.minimum

    def slope(self, x: Array) -> Array:
        return x * (self.hessian + x * (self.quartic_weight * x - self.cubic_weight))

    def curvature(self, x: Array) -> Array:
        return self.hessian + x * (3 * self.quartic_weight * x - 2 * self.cubic_weight)

    def reach(self, rise: float) -> tuple[float, float]:
        """Ends of the stretch where some coordinate's loss is less than `rise` above its highest stationary point."""
        ends = []
        for h in np.unique(self.hessian):
            polynomial = np.array([self.quartic_weight / 4, -self.cubic_weight / 3, h / 2, 0.0, 0.0])
            stationary = _real_roots(np.polyder(polynomial))
            polynomial[-1] = -np.polyval(polynomial, stationary).max() - rise
            ends += [*stationary, *_real_roots(polynomial)]
        return min(ends), max(ends)

    def binned(self) -> tuple["_Coordinates", list[Array]]:
        """One coordinate for at most `MOST_STARTS` bins of starts a curvature, and the starts in each."""
        members = []
        for h in np.unique(self.hessian):
            same = np.flatnonzero(self.hessian == h)  # in the order of their starts
            members += np.array_split(same, min(len(same), MOST_STARTS))
        merged = self.take(np.array([bin[0] for bin in members]))
        counts = np.array([self.counts[bin].sum() for bin in members])
        return merged._replace(counts=counts), [np.repeat(self.start[bin], self.counts[bin]) for bin in members]


class _Part(NamedTuple):
    coordinates: _Coordinates
    laws: Any  # GaussianLaws or GridLaws

    def total(self, function: Callable[[Array], Array], *, where: Any = 1.0, nodes: int = NODES) -> float:
        """sum_j E function(x_j)."""
        return float(np.sum(self.coordinates.counts * where * self.laws.expect(function, nodes=nodes)))

    def variance(self, function: Callable[[Array], Array]) -> float:
        """Var sum_j function(x_j): coordinates are independent."""
        mean, square = self.laws.expect(function), self.laws.expect(lambda x: function(x) ** 2)
        return float(np.sum(self.coordinates.counts * np.maximum(square - mean**2, 0.0)))


class _SeparableSolve:
    """The steps of one scenario."""

    def __init__(self, scenario: Scenario):
        self.scenario, self.learning_rate = scenario, scenario.optimizer.learning_rate
        self.closure: Any = scenario.optimizer.theory.closure
        every = _distinct(scenario.problem)
        norm = math.sqrt(np.sum(every.counts * every.slope(every.start) ** 2))
        self.noise_at = quadratic.private_noise(scenario, norm)
        self.noises = [self.noise_at(0.0), self.noise_at(norm)]  # at the bottom and at the start
        self.largest_ratio = 0.0
        self.reasons: dict[str, None] = {}
        wide = self._is_wide(every)
        grid = self._grid(every.take(wide)) if wide.any() else None
        if grid is None:
            self.parts = [self._gaussian(every)]
        else:
            self.parts = [grid] if wide.all() else [self._gaussian(every.take(~wide)), grid]

    def forecast(self, record_at: Sequence[int]) -> Forecast:
        recorded: dict[int, tuple[Metrics, bool]] = {}
        smallest_shrink = 1.0
        for step in range(self.scenario.num_steps + 1):
            square = sum(part.total(lambda x, at=part.coordinates: at.slope(x) ** 2, nodes=5) for part in self.parts)
            if not math.isfinite(square):
                nothing = dict.fromkeys(self._metrics(), math.inf)
                recorded |= {later: (nothing, True) for later in record_at if later >= step}
                break
            shrink, noise = self.noise_at(math.sqrt(square))
            smallest_shrink = min(smallest_shrink, shrink)
            beyond = self._out_of_depth(shrink, noise)
            if step in record_at:
                recorded[step] = self._metrics(), beyond
            for part in self.parts:
                part.laws.advance(step, shrink, noise, self.learning_rate)
        return collected(recorded, reasons=[*self.reasons, *quadratic.reasons(self.largest_ratio, smallest_shrink)])

    # --- Which law for which coordinate -------------------------------------------------------------------------------

    def _temperature(self) -> float:
        """T of the linearised optimizer's stationary law exp(-f/T), E x^2 = T/h; at the larger of the noises."""
        theory = self.scenario.optimizer.theory
        std = max(math.sqrt(noise.noise_variance) for _, noise in self.noises)
        rate = float(theory.effective_learning_rate(self.learning_rate, std)) if std > 0 else 0.0
        return theory.noise_penalty * rate * std**2 / (2 * max(self.noises[0][0], 1e-300))

    def _is_wide(self, every: _Coordinates) -> Array:
        """Whether a coordinate has several wells, or noise carries it to where its curvature is another."""
        several = every.cubic_weight**2 >= 4 * every.quartic_weight * every.hessian
        return several | (3 * every.quartic_weight * self._temperature() > LARGEST_WIDTH * every.hessian**2)

    def _gaussian(self, at: _Coordinates) -> _Part:
        return _Part(at, GaussianLaws(Separable(at.slope, at.curvature), at.start, self.closure))

    def _grid(self, at: _Coordinates) -> _Part | None:
        """A grid that holds the starts and all losses below 60 T; None where it would need too many points."""
        spacing, ends = self._spacing(at), at.reach(60 * self._temperature())
        low, high = float(min(at.start.min(), ends[0])), float(max(at.start.max(), ends[1]))
        merged, starts = at.binned()
        if spacing == 0 or (high - low) / spacing * len(starts) > MOST_POINTS:
            return None
        loss, span = Separable(merged.slope, merged.curvature), (low - 20 * spacing, high + 20 * spacing)
        return _Part(merged, GridLaws(loss, starts, self.closure, span=span, spacing=spacing))

    def _spacing(self, at: _Coordinates) -> float:
        """Steps of fixed length live on a lattice of that length; else 1.5 standard deviations of the quietest step."""
        variances, squares = [], []
        for (shrink, noise), slope in zip(self.noises, (np.zeros_like(at.start), at.slope(at.start))):
            law = noise._replace(mean=shrink * slope, signal_variance=np.zeros_like(slope))
            memory = self.closure.memory(None, law, 0, 1)
            found = self.closure.response(law, memory)
            variances.append(found.variance)
            squares.append(found.variance + found.expected**2)
        fixed = memory is None and np.ptp(squares) <= 1e-9 * np.max(squares) and np.ptp(variances) > 0
        return self.learning_rate * (math.sqrt(np.max(squares)) if fixed else 1.5 * math.sqrt(np.min(variances)))

    # --- What is said -------------------------------------------------------------------------------------------------

    def _metrics(self) -> Metrics:
        parts = [(part, part.coordinates) for part in self.parts]
        squares = {
            "gradient_norm": [(part, lambda x, at=at: at.slope(x) ** 2) for part, at in parts],
            "params_norm": [(part, lambda x: x**2) for part, _ in parts],
        }
        norms = {
            name: expected_norm(sum(p.total(f) for p, f in terms), sum(p.variance(f) for p, f in terms))
            for name, terms in squares.items()
        }
        return {
            "loss": sum(part.total(at.loss) for part, at in parts),
            "loss_std": math.sqrt(sum(part.variance(at.loss) for part, at in parts)),
            "one_well_loss": sum(part.total(at.loss, where=at.hessian > 0) for part, at in parts),
            **norms,
        }

    def _out_of_depth(self, shrink: float, noise: GradientLaw) -> bool:
        """At this step or, for laws that have once been wrong, at an earlier one."""
        beyond = False
        for part in self.parts:
            if isinstance(part.laws, GridLaws):
                if part.laws.mass_at_the_ends > LARGEST_MASS_AT_THE_ENDS:
                    self.reasons[LOST_MASS] = None
                continue
            curvature = part.laws.expect(part.coordinates.curvature, nodes=5)
            width = 3 * part.coordinates.quartic_weight * part.laws.state.variance
            if np.any(width > LARGEST_GAUSSIAN_WIDTH * np.abs(curvature)):
                self.reasons[NO_GAUSSIAN] = None
            if not self.closure.is_linear:
                ratio = quadratic.lattice_ratio(self.scenario, shrink * curvature, noise)
                self.largest_ratio = max(self.largest_ratio, ratio)
                beyond |= ratio > quadratic.LARGEST_LATTICE_RATIO
        return beyond or bool(self.reasons)


def _real_roots(polynomial: Array) -> list[float]:
    roots = np.roots(polynomial)
    return roots[np.abs(roots.imag) <= 1e-7 * (1 + np.abs(roots))].real.tolist()


def _distinct(problem: Any) -> _Coordinates:
    every = np.stack(
        [np.asarray(part, np.float64) for part in (problem.hessian_diag, problem.initial_params(), problem.minimum)]
    )
    (hessian, start, minimum), counts = np.unique(every, axis=1, return_counts=True)
    return _Coordinates(hessian, start, minimum, counts, problem.quartic_weight, problem.cubic_weight)
