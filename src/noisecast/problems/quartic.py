"""The quartic of the paper's validation: separable, non-convex where its curvature at 0 is negative."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from noisecast.problems.local_quadratic import LocalQuadratic
from noisecast.problems.population import Population
from noisecast.problems.problem import fingerprint_of
from noisecast.problems.quadratic import check_noise, checked_vectors

Array = jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["hessian_diag", "start", "minimum"],
    meta_fields=["quartic_weight", "cubic_weight", "example_noise_std", "degrees_of_freedom", "name", "fingerprint"],
)
@dataclass(frozen=True)
class Quartic(Population):
    """f(x) = sum_j h_j x_j^2 / 2 + lambda x_j^4 / 4 - xi x_j^3 / 3 - min, with injected example noise."""

    hessian_diag: Array
    start: Array
    minimum: Array
    quartic_weight: float
    cubic_weight: float
    example_noise_std: float
    degrees_of_freedom: float
    name: str
    fingerprint: str

    why_no_closed_form = (
        "closed_form cannot answer a quartic: its expected loss has no closed form, and two wells no single mean. "
        'Use runner "sde" or "training".'
    )

    def losses(self, params: Array) -> Array:
        """Excess loss of each coordinate; (d,) >= 0."""
        return _value(params, self.hessian_diag, self.quartic_weight, self.cubic_weight) - self.minimum

    def loss(self, params: Array) -> Array:
        return jnp.sum(self.losses(params))

    def gradient(self, params: Array) -> Array:
        return self.hessian_diag * params + self.quartic_weight * params**3 - self.cubic_weight * params**2

    def evaluate(self, params: Array, l2_clip_norm: Array) -> dict[str, Array]:
        """Also the excess loss without the two-well coordinates: which well a run ends in is a coin that swamps it."""
        one_well = jnp.where(self.hessian_diag > 0, self.losses(params), 0.0)
        return super().evaluate(params, l2_clip_norm) | {"one_well_loss": jnp.sum(one_well)}

    def local_quadratic(self, params: Array) -> LocalQuadratic:
        at = np.asarray(params, np.float64)
        eigenvalues = np.asarray(self.hessian_diag) + 3 * self.quartic_weight * at**2 - 2 * self.cubic_weight * at
        return LocalQuadratic(
            loss=float(self.loss(params)),
            signal_eigenvalues=eigenvalues,
            signal_squared_gradients=np.asarray(self.gradient(params), np.float64) ** 2,
            noise_eigenvalues=eigenvalues,
            noise_multiplicities=np.ones_like(eigenvalues),
        )


def quartic(
    hessian_diag: np.ndarray,
    initial_params: np.ndarray | float,
    *,
    quartic_weight: float,
    cubic_weight: float,
    example_noise_std: float,
    degrees_of_freedom: float = math.inf,
) -> Quartic:
    """The paper's quartic (Appendix, "SDE Validation"), its loss counted from its global minimum.

    Args:
      hessian_diag: h, the curvatures at 0; (d,) [loss/params^2]; a negative one makes two wells.
      initial_params: x_0; (d,) or a number.
      quartic_weight: lambda > 0 [loss/params^4].    cubic_weight: xi [loss/params^3].
      example_noise_std, degrees_of_freedom: as in `quadratic`.

    >>> problem = quartic([-2.0], 2.1025, quartic_weight=0.5, cubic_weight=0.1, example_noise_std=0.1)
    >>> abs(float(problem.loss(problem.initial_params()))) < 1e-5
    True
    """
    diag, start = checked_vectors(hessian_diag, initial_params)
    check_noise(example_noise_std, degrees_of_freedom)
    if not quartic_weight > 0:
        raise ValueError(f"Expected quartic_weight > 0 (else the loss has no minimum), got {quartic_weight}.")
    minimum = np.array([_minimum(h, quartic_weight, cubic_weight) for h in diag])
    numbers = (float(quartic_weight), float(cubic_weight), float(example_noise_std), float(degrees_of_freedom))
    return Quartic(
        jnp.asarray(diag, jnp.float32),
        jnp.asarray(start, jnp.float32),
        jnp.asarray(minimum, jnp.float32),
        *numbers,
        name=f"quartic (d = {len(diag)})",
        fingerprint=fingerprint_of("quartic", diag, start, *numbers),
    )


def _value(x, h, quartic_weight, cubic_weight):
    return h * x**2 / 2 + quartic_weight * x**4 / 4 - cubic_weight * x**3 / 3


def _minimum(h: float, quartic_weight: float, cubic_weight: float) -> float:
    # f' = x (lambda x^2 - xi x + h)
    stationary = np.roots([quartic_weight, -cubic_weight, h, 0.0])
    return float(_value(stationary[np.isreal(stationary)].real, h, quartic_weight, cubic_weight).min())
