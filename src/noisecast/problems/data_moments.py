"""Gradient moments of a data set: what the SDEs need of a problem that can weigh its clipped gradients."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp

from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import Sampler
from noisecast.theory.optimizer_theory import GradientMoments

Array = jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["l2_clip_norm", "mean_noise_std"], meta_fields=["sampler"])
@dataclass(frozen=True)
class PreparedMechanism:
    """The mechanism as the moments of a data set need it: two numbers, and the sampler for the batch noise."""

    l2_clip_norm: Array
    mean_noise_std: Array
    sampler: Sampler


class WeighsClippedGradients(Protocol):
    @property
    def num_examples(self) -> int: ...

    def clipped_gradient_moments(self, params: Array, l2_clip_norm: Array) -> tuple[Array, Array]:
        """Mean of clip(g_i) and of clip(g_i)^2 over all examples; (d,) each."""
        ...

    def weighted_clipped_sum(self, params: Array, weights: Array, l2_clip_norm: Array) -> Array:
        """sum_i weights_i clip(g_i); (d,)."""
        ...


def prepare_moments(mechanism: SampledGaussian) -> PreparedMechanism:
    return PreparedMechanism(
        jnp.asarray(mechanism.l2_clip_norm, jnp.float32),
        jnp.asarray(mechanism.mean_noise_std, jnp.float32),
        mechanism.sampler,
    )


def gradient_moments(problem: WeighsClippedGradients, params: Array, prepared: PreparedMechanism) -> GradientMoments:
    """Mean and standard deviation per coordinate of the private mean gradient.

    s_j^2 = batch noise of coordinate j (as its sampler has it) + (C z / B)^2. Examples that were declared and are not
    there count as gradients of 0.
    """
    mean, second_moment = problem.clipped_gradient_moments(params, prepared.l2_clip_norm)
    fill = prepared.sampler.batch_fill(problem.num_examples)
    batch_variance = fill * prepared.sampler.batch_noise_variance(mean, second_moment)
    return GradientMoments(fill * mean, jnp.sqrt(batch_variance + prepared.mean_noise_std**2))


def gradient_noise(problem: WeighsClippedGradients, params: Array, prepared: PreparedMechanism, key: Array) -> Array:
    """One draw of Gaussian noise with the covariance of the private mean gradient, off-diagonal terms included.

    n^(-1/2) sum_i xi_i clip(g_i), xi_i ~ N(0, 1), has the second-moment matrix of one clipped gradient as its
    covariance. A sampler without replacement wants the covariance instead, which is the same sum with xi centred.
    """
    example_key, privacy_key = jax.random.split(key)
    n = problem.num_examples
    xi = jax.random.normal(example_key, (n,))
    # A sampler's batch noise is a * second moment - b * mean^2; a and b are read off the sampler itself.
    scale = prepared.sampler.batch_fill(n) * prepared.sampler.batch_noise_variance(0.0, 1.0)
    centred = prepared.sampler.batch_noise_variance(1.0, 1.0) == 0.0
    xi = xi - xi.mean() if centred else xi
    batch = problem.weighted_clipped_sum(params, xi * jnp.sqrt(scale / n), prepared.l2_clip_norm)
    return batch + prepared.mean_noise_std * jax.random.normal(privacy_key, batch.shape)


def shrink_factor(problem: WeighsClippedGradients, params: Array, prepared: PreparedMechanism) -> Array:
    """h = <E g~, E g> / |E g|^2: what clipping and the declared size leave of the gradient, along the gradient; ()."""
    clipped = gradient_moments(problem, params, prepared).mean
    gradient, _ = problem.clipped_gradient_moments(params, jnp.asarray(jnp.inf))
    return clipped @ gradient / (gradient @ gradient)
