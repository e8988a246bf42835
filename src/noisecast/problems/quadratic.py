"""The quadratic of the paper's theorems and of its validation: f(x) = x'Hx / 2 with H diagonal."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from noisecast.problems.local_quadratic import LocalQuadratic
from noisecast.problems.population import Population
from noisecast.problems.problem import fingerprint_of

Array = jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["hessian_diag", "start"],
    meta_fields=["example_noise_std", "degrees_of_freedom", "name", "fingerprint"],
)
@dataclass(frozen=True)
class Quadratic(Population):
    """f(x) = 1/2 sum_j h_j x_j^2, with injected example noise. Made by `quadratic`."""

    hessian_diag: Array
    start: Array
    example_noise_std: float
    degrees_of_freedom: float
    name: str
    fingerprint: str

    is_quadratic = True

    def loss(self, params: Array) -> Array:
        return 0.5 * jnp.sum(self.hessian_diag * params**2)

    def gradient(self, params: Array) -> Array:
        return self.hessian_diag * params

    def local_quadratic(self, params: Array) -> LocalQuadratic:
        """Exact: the spectrum is the diagonal."""
        eigenvalues = np.asarray(self.hessian_diag, np.float64)
        at = np.asarray(params, np.float64)
        return LocalQuadratic(
            loss=float(0.5 * np.sum(eigenvalues * at**2)),
            signal_eigenvalues=eigenvalues,
            signal_squared_gradients=(eigenvalues * at) ** 2,
            noise_eigenvalues=eigenvalues,
            noise_multiplicities=np.ones_like(eigenvalues),
        )


def quadratic(
    hessian_diag: np.ndarray,
    initial_params: np.ndarray | float,
    *,
    example_noise_std: float,
    degrees_of_freedom: float = math.inf,
) -> Quadratic:
    """A diagonal quadratic whose examples are its gradient plus noise.

    Args:
      hessian_diag: h; (d,) [loss/params^2].
      initial_params: x_0; (d,) or a number for all coordinates.
      example_noise_std: sigma_gamma, the scale per coordinate; () >= 0 [loss/params].
      degrees_of_freedom: nu of the Student-t noise; > 0, inf for Gaussian.

    >>> problem = quadratic(np.array([2.0, 1.0]), 0.1, example_noise_std=0.1)
    >>> round(float(problem.loss(problem.initial_params())), 4)
    0.015
    """
    diag, start = checked_vectors(hessian_diag, initial_params)
    check_noise(example_noise_std, degrees_of_freedom)
    return Quadratic(
        hessian_diag=jnp.asarray(diag, jnp.float32),
        start=jnp.asarray(start, jnp.float32),
        example_noise_std=float(example_noise_std),
        degrees_of_freedom=float(degrees_of_freedom),
        name=f"quadratic (d = {len(diag)})",
        fingerprint=fingerprint_of("quadratic", diag, start, float(example_noise_std), float(degrees_of_freedom)),
    )


def checked_vectors(hessian_diag: np.ndarray, initial_params: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    diag = np.asarray(hessian_diag, np.float64)
    if diag.ndim != 1 or len(diag) == 0 or not np.isfinite(diag).all():
        raise ValueError(f"Expected hessian_diag to be finite numbers of shape (d,), got shape {diag.shape}.")
    start = np.asarray(initial_params, np.float64)
    if start.shape not in [(), diag.shape] or not np.isfinite(start).all():
        raise ValueError(f"Expected initial_params finite, one number or shape {diag.shape}, got shape {start.shape}.")
    return diag, np.broadcast_to(start, diag.shape).copy()


def check_noise(example_noise_std: float, degrees_of_freedom: float) -> None:
    if not 0 <= example_noise_std < math.inf:
        raise ValueError(f"Expected 0 <= example_noise_std < inf, got {example_noise_std}.")
    if not degrees_of_freedom > 0:
        raise ValueError(f"Expected degrees_of_freedom > 0 (inf for Gaussian noise), got {degrees_of_freedom}.")
