"""The loss around a point to second order, by Hessian-vector products alone."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

NUM_PROBES = 8  # Rademacher directions that the noise's spectrum is averaged over


@dataclass(frozen=True)
class LocalQuadratic:
    """f(x0 + u) ~ loss + g'u + u'Hu / 2, as the two measures on H's spectrum that decide every expected loss.

    Args:
      loss: f(x0); () [loss].
      signal_eigenvalues, signal_squared_gradients: where the gradient lives: sum over nodes = |g|^2.
      noise_eigenvalues, noise_multiplicities: where isotropic noise lives: sum over nodes = d.
    """

    loss: float
    signal_eigenvalues: np.ndarray
    signal_squared_gradients: np.ndarray
    noise_eigenvalues: np.ndarray
    noise_multiplicities: np.ndarray


def local_quadratic_of(mean_loss: Callable[[jax.Array], jax.Array], params: jax.Array) -> LocalQuadratic:
    """`local_quadratic_by_lanczos` of a JAX function at `params`; its curvatures may be negative."""
    gradient = jax.grad(mean_loss)
    product = jax.jit(lambda vector: jax.jvp(gradient, (params,), (vector,))[1])
    return local_quadratic_by_lanczos(
        loss=float(mean_loss(params)),
        gradient=np.asarray(gradient(params)),
        hessian_vector=lambda vector: np.asarray(product(jnp.asarray(vector, params.dtype))),
    )


def local_quadratic_by_lanczos(
    *,
    loss: float,
    gradient: np.ndarray,
    hessian_vector: Callable[[np.ndarray], np.ndarray],
    num_nodes: int = 40,
    num_probes: int = NUM_PROBES,
) -> LocalQuadratic:
    """Stochastic Lanczos quadrature: `num_nodes` Hessian-vector products for the gradient's measure and each probe's.

    The gradient's measure is Gauss quadrature started at g (exact for polynomials up to degree 2 num_nodes - 1);
    the noise's is the mean over Rademacher probes, whose relative error is about sqrt(2 / (d num_probes)).

    >>> h = np.array([1.0, 2.0, 3.0])
    >>> q = local_quadratic_by_lanczos(loss=1.0, gradient=np.ones(3), hessian_vector=lambda v: h * v)
    >>> np.round(q.signal_eigenvalues, 6), round(float(q.noise_multiplicities @ q.noise_eigenvalues), 6)
    (array([1., 2., 3.]), 6.0)
    """
    num_params = len(gradient)
    # The probes are directions in parameter space, not privacy noise: a fixed generator keeps the answer deterministic.
    probes = np.random.default_rng(0).choice([-1.0, 1.0], size=(num_probes, num_params))
    signal_nodes, signal_weights = _gauss_nodes(hessian_vector, gradient, num_nodes)
    noise = [_gauss_nodes(hessian_vector, probe, num_nodes) for probe in probes]
    return LocalQuadratic(
        loss=float(loss),
        signal_eigenvalues=signal_nodes,
        signal_squared_gradients=signal_weights,
        noise_eigenvalues=np.concatenate([nodes for nodes, _ in noise]),
        noise_multiplicities=np.concatenate([weights for _, weights in noise]) / num_probes,
    )


def _gauss_nodes(hessian_vector, start: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights (summing to |start|^2) of the spectral measure of `start`; Lanczos, fully reorthogonalised."""
    norm = np.linalg.norm(start)
    if norm == 0:
        return np.zeros(1), np.zeros(1)
    basis = [np.asarray(start, dtype=np.float64) / norm]
    diagonal, off_diagonal = [], []
    for _ in range(min(num_nodes, len(start))):
        image = np.asarray(hessian_vector(basis[-1]), dtype=np.float64)
        diagonal.append(image @ basis[-1])
        for _ in range(2):  # twice is enough: one pass leaves rounding in the basis
            image = image - np.array(basis).T @ (np.array(basis) @ image)
        off_diagonal.append(np.linalg.norm(image))
        if off_diagonal[-1] < 1e-6 * max(map(abs, diagonal), default=1.0):
            break
        basis.append(image / off_diagonal[-1])
    off = np.diag(off_diagonal[: len(diagonal) - 1], 1)
    nodes, vectors = np.linalg.eigh(np.diag(diagonal) + off + off.T)
    return nodes, norm**2 * vectors[0] ** 2
