"""One step of an optimizer's moments on a quadratic, and the example noise that clipping leaves there."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from noisecast.theory.closures import Closure, GradientLaw, QuadraticRecursion
from noisecast.theory.low_dimension import clipping_table

Array = Any


class GaussianWeights(NamedTuple):
    """Independent Gaussian weights; (d,) each.

    Args:
      mean: m [params].   variance: v; >= 0 [params^2].

    >>> GaussianWeights(np.zeros(2), np.ones(2)).variance
    array([1., 1.])
    """

    mean: Array
    variance: Array


def recursion_of(closure: Closure) -> QuadraticRecursion:
    """The closure's own recursion on quadratics, or the step of an optimizer without memory:

    m' = m - eta E u, v' = v - 2 eta k j v + eta^2 Var u on f = 1/2 sum_j j_j x_j^2, where j = h lambda is what
    clipping leaves of the curvature. Exact for DP-SGD.

    Args:
      closure: of the optimizer.
    Returns: QuadraticRecursion; of an optimizer without memory its state is `GaussianWeights`.

    >>> from noisecast.theory.closures import SGD_CLOSURE
    >>> law = GradientLaw(np.array([2.0]), 0.0, 1.0)
    >>> at = GaussianWeights(np.ones(1), np.zeros(1))
    >>> recursion_of(SGD_CLOSURE).step(at, 0, 2.0, law, 0.25)
    GaussianWeights(mean=array([0.5]), variance=array([0.0625]))
    """
    if closure.quadratic is not None:
        return closure.quadratic

    def step(at: GaussianWeights, k: int, curvature: Array, law: GradientLaw, learning_rate: float) -> GaussianWeights:
        found = closure.response(law, None)
        kept = 1 - 2 * learning_rate * found.gain * curvature
        spread = learning_rate**2 * found.variance
        return GaussianWeights(at.mean - learning_rate * found.expected, kept * at.variance + spread)

    return QuadraticRecursion(lambda params: GaussianWeights(params, np.zeros_like(params)), step)


@dataclass(frozen=True)
class InjectedNoise:
    """Shrink factor h(G) and variance of one clipped example per coordinate, over the gradient norm G, in float64.

    The variance is (m2 - h^2 G^2)/d of `low_dimension_clipping_expectations`; where nothing is clipped it is
    sigma^2 nu/(nu - 2), since the difference would lose digits: there DP-SGD is forecast exactly.

    Args:
      log_norms: ln G, evenly spaced; (k,).   log_shrink_factors: ln h there; (k,).
      variances: of one clipped example, a coordinate; (k,) >= 0 [loss^2/params^2].

    >>> noise = InjectedNoise.tabulated(num_params=200, example_noise_std=0.1, degrees_of_freedom=math.inf,
    ...                                 l2_clip_norm=50.0, largest_norm=10.0)
    >>> [float(number) for number in noise.at(3.0)]
    [1.0, 0.010000000000000002]
    """

    log_norms: np.ndarray
    log_shrink_factors: np.ndarray
    variances: np.ndarray

    @classmethod
    def tabulated(
        cls, *, num_params: int, example_noise_std: float, degrees_of_freedom: float, l2_clip_norm: float,
        largest_norm: float, decades: float = 5.0,
    ) -> "InjectedNoise":  # fmt: skip
        """Tabulate up to largest_norm, by quadrature over the noise itself.

        Args:
          num_params, example_noise_std, degrees_of_freedom, l2_clip_norm, largest_norm, decades: as `clipping_table`.
        Returns: InjectedNoise.
        Raises: ValueError for a value outside its range.
        """
        norms, clipped = clipping_table(
            float(largest_norm), num_params=num_params, example_noise_std=float(example_noise_std),
            degrees_of_freedom=float(degrees_of_freedom), l2_clip_norm=float(l2_clip_norm), decades=decades,
        )  # fmt: skip
        untouched = np.asarray(clipped.clip_fraction) == 0
        h = np.where(untouched, 1.0, clipped.shrink_factor)
        variance = (clipped.second_moment - (h * norms) ** 2) / num_params
        if degrees_of_freedom > 2:
            heavy = 1.0 if math.isinf(degrees_of_freedom) else degrees_of_freedom / (degrees_of_freedom - 2)
            variance = np.where(untouched, example_noise_std**2 * heavy, variance)
        return cls(np.log(norms), np.log(h), np.maximum(variance, 0.0))

    def at(self, gradient_norm: float) -> tuple[float, float]:
        """h and the variance at one G, both linear in log G, and h in log h: a power where all is clipped.

        Args:
          gradient_norm: G; >= 0 [loss/params]. Below the table's first it is taken for that.
        Returns: h in (0, 1], and the variance [loss^2/params^2].
        """
        log_norm, first, last = math.log(max(gradient_norm, 1e-300)), self.log_norms[0], self.log_norms[-1]
        intervals = len(self.log_norms) - 1
        place = min(max((log_norm - first) / (last - first), 0.0), 1.0) * intervals
        i = min(int(place), intervals - 1)
        log_h, variance = (
            float(each[i] + (place - i) * (each[i + 1] - each[i])) for each in (self.log_shrink_factors, self.variances)
        )
        # Beyond the last norm every example is clipped: h = C/G.
        return math.exp(log_h + min(0.0, last - log_norm)), variance
