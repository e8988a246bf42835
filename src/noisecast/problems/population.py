"""Problems without a data set: a known loss, and examples that are its gradient plus injected noise."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from noisecast.privacy.jax_noise import derived_key, standard_normal
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.problems.clipping import clip_factor
from noisecast.theory.clipping import sign_scale_mixture
from noisecast.theory.low_dimension import GRID_POINTS, clipping_table
from noisecast.theory.optimizer_theory import GradientMoments

Array = jax.Array

GRID_DECADES = 5.0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["log_norms", "shrink_factors", "noise_stds", "snr_factors", "snr_weights"],
    meta_fields=[],
)
@dataclass(frozen=True)
class ClippingTable:
    """E[clip(g)] = h(G) grad f and the noise around it, tabulated over the gradient norm G = |grad f|.

    Args:
      log_norms: ln G, evenly spaced; (GRID_POINTS,).
      shrink_factors: h(G); (GRID_POINTS,).
      noise_stds: s(G) per coordinate of the private mean gradient; (GRID_POINTS,).
      snr_factors, snr_weights: its scale mixture (`GradientMoments`); (GRID_POINTS, K).
    """

    log_norms: Array
    shrink_factors: Array
    noise_stds: Array
    snr_factors: Array
    snr_weights: Array

    def at(self, gradient_norm: Array) -> tuple[Array, Array, Array, Array]:
        log_norm = jnp.log(jnp.maximum(gradient_norm, 1e-30))
        spacing = self.log_norms[1] - self.log_norms[0]
        position = jnp.clip((log_norm - self.log_norms[0]) / spacing, 0.0, GRID_POINTS - 1.0)
        below = jnp.minimum(position.astype(jnp.int32), GRID_POINTS - 2)
        share = position - below
        h, s, r, w = (
            table[below] + share * (table[below + 1] - table[below])
            for table in (self.shrink_factors, self.noise_stds, self.snr_factors, self.snr_weights)
        )
        # Beyond the table every example is clipped: h = C / G.
        return h * jnp.minimum(1.0, jnp.exp(self.log_norms[-1] - log_norm)), s, r, w


class Population:
    """Per-example gradients grad f(x) + example_noise_std * t_nu(0, I_d), fresh at every step (paper, Assumption 2).

    t_nu is the multivariate Student-t, one chi-square scale an example: the noise is isotropic; nu = inf is Gaussian.
    Subclasses are frozen dataclasses registered as pytrees, with `loss` and `gradient`.
    """

    start: Array
    example_noise_std: float
    degrees_of_freedom: float
    num_examples = None
    is_quadratic = False
    why_no_closed_form: str | None = None

    @abstractmethod
    def loss(self, params: Array) -> Array: ...

    @abstractmethod
    def gradient(self, params: Array) -> Array: ...

    @property
    def num_params(self) -> int:
        return self.start.shape[0]

    def initial_params(self) -> Array:
        return self.start

    def examples(self, draw: tuple[Array, Array], mask: Array) -> Array:
        """Noise of a batch of fresh examples, drawn from a key and a step: (batch_size, d)."""
        key, step = draw
        normals = standard_normal(key, step, (mask.shape[0], self.num_params))
        if np.isinf(self.degrees_of_freedom):
            return self.example_noise_std * normals
        chi_square = jax.random.chisquare(derived_key(key, step), self.degrees_of_freedom, (mask.shape[0], 1))
        return self.example_noise_std * jnp.sqrt(self.degrees_of_freedom / chi_square) * normals

    def clipped_sum(self, params: Array, examples: Array, l2_clip_norm: Array) -> Array:
        gradients = self.gradient(params) + examples
        norms = jnp.linalg.norm(gradients, axis=1, keepdims=True)
        factors = clip_factor(norms, l2_clip_norm)
        return jnp.where(jnp.isfinite(norms), gradients * factors, 0.0).sum(axis=0)

    def evaluate(self, params: Array, l2_clip_norm: Array) -> dict[str, Array]:
        return {"loss": self.loss(params), "gradient_norm": jnp.linalg.norm(self.gradient(params))}

    def prepare_moments(self, mechanism: SampledGaussian) -> ClippingTable:
        """Clipping expectations over five decades of gradient norm around the clip norm and the start."""
        law = {
            "num_params": self.num_params,
            "example_noise_std": self.example_noise_std,
            "degrees_of_freedom": self.degrees_of_freedom,
            "l2_clip_norm": mechanism.l2_clip_norm,
        }
        largest = 100.0 * max(mechanism.l2_clip_norm, float(jnp.linalg.norm(self.gradient(self.start))))
        norms, clipping = clipping_table(largest, **law, decades=GRID_DECADES)
        covariance_trace = clipping.second_moment - (clipping.shrink_factor * norms) ** 2
        batch_variance = np.maximum(covariance_trace, 0.0) / self.num_params / mechanism.expected_batch_size
        factors, weights = self._sign_mixture(norms, mechanism, law)
        tables = (np.log(norms), clipping.shrink_factor, np.sqrt(batch_variance + mechanism.mean_noise_std**2))
        return ClippingTable(*(jnp.asarray(table, jnp.float32) for table in (*tables, factors, weights)))

    def _sign_mixture(self, norms: np.ndarray, mechanism: SampledGaussian, law: dict) -> tuple[np.ndarray, ...]:
        """The scale mixture over `norms`. It turns slowly and costs much, so it is computed at every 16th."""
        some = norms[np.r_[0 : GRID_POINTS - 1 : 16, GRID_POINTS - 1]]
        mixture = sign_scale_mixture(
            some, **law, batch_size=int(mechanism.expected_batch_size), mean_noise_std=mechanism.mean_noise_std
        )
        return tuple(
            np.stack([np.interp(np.log(norms), np.log(some), column) for column in table.T], axis=1)
            for table in mixture
        )

    def gradient_moments(self, params: Array, prepared: ClippingTable) -> GradientMoments:
        gradient = self.gradient(params)
        shrink, noise_std, factors, weights = prepared.at(jnp.linalg.norm(gradient))
        return GradientMoments(shrink * gradient, noise_std, factors, weights)

    def shrink_factor(self, params: Array, prepared: ClippingTable) -> Array:
        return prepared.at(jnp.linalg.norm(self.gradient(params)))[0]

    def gradient_noise(self, params: Array, prepared: ClippingTable, key: Array) -> Array:
        _, noise_std, _, _ = prepared.at(jnp.linalg.norm(self.gradient(params)))
        return noise_std * jax.random.normal(key, params.shape)
