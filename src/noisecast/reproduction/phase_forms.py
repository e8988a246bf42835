"""The SDEs as the paper prints them, in two phases, to be drawn beside the unified form that replaces them."""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from noisecast.optimizers import DPSignSGD
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.problems.population import Population
from noisecast.theory import DP_SIGN_SGD, student_scale_factor
from noisecast.theory.optimizer_theory import GradientMoments, OptimizerTheory

Array = jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["l2_clip_norm", "batch_size", "privacy_noise_std"],
    meta_fields=[],
)
@dataclass(frozen=True)
class _Mechanism:
    l2_clip_norm: Array
    batch_size: Array
    privacy_noise_std: Array


@partial(jax.tree_util.register_dataclass, data_fields=["population"], meta_fields=["batch_noise_in_phase_1"])
@dataclass(frozen=True)
class PhaseForms:
    """A population whose gradient moments are the paper's: all examples clipped where |grad f| >= C, none elsewhere.

    Phase 1: mean C K(nu) grad f / (sigma sqrt(d)), variance [C^2 / (d B)] + (C z / B)^2 (Thm sdesgd; the paper's
    DP-SignSGD leaves the bracket out, Cor. actual_sdes). Phase 2: mean grad f, variance sigma^2 / B + (C z / B)^2.
    """

    population: Population
    batch_noise_in_phase_1: bool

    def __getattr__(self, name: str):
        return getattr(self.population, name)

    def initial_params(self) -> Array:
        return self.population.initial_params()

    def prepare_moments(self, mechanism: SampledGaussian) -> _Mechanism:
        numbers = (mechanism.l2_clip_norm, mechanism.expected_batch_size, mechanism.mean_noise_std)
        return _Mechanism(*(jnp.asarray(number, jnp.float32) for number in numbers))

    def gradient_moments(self, params: Array, prepared: _Mechanism) -> GradientMoments:
        gradient = self.population.gradient(params)
        clipped = jnp.linalg.norm(gradient) >= prepared.l2_clip_norm
        sigma, d = self.population.example_noise_std, params.shape[0]
        kappa = student_scale_factor(self.population.degrees_of_freedom)
        shrink = jnp.where(clipped, prepared.l2_clip_norm * float(kappa) / (sigma * math.sqrt(d)), 1.0)
        phase_1 = prepared.l2_clip_norm**2 / (d * prepared.batch_size) if self.batch_noise_in_phase_1 else 0.0
        batch_variance = jnp.where(clipped, phase_1, sigma**2 / prepared.batch_size)
        return GradientMoments(shrink * gradient, jnp.sqrt(batch_variance + prepared.privacy_noise_std**2))

    def gradient_noise(self, params: Array, prepared: _Mechanism, key: Array) -> Array:
        return self.gradient_moments(params, prepared).noise_std * jax.random.normal(key, params.shape)


def _linear_drift(moments: GradientMoments, state) -> Array:
    return -math.sqrt(2 / math.pi) * moments.mean / moments.noise_std


def _clamped_gain(moments: GradientMoments, state) -> Array:
    # The printed diffusion I - diag(erf^2); erf itself keeps it real.
    erf = jax.scipy.special.erf(moments.mean / (math.sqrt(2) * moments.noise_std))
    return jnp.sqrt(1 - erf**2) / moments.noise_std


@dataclass(frozen=True, kw_only=True)
class DPSignSGDAsPrinted(DPSignSGD):
    """DP-SignSGD with the paper's linearised drift (Cor. actual_sdes)."""

    @property
    def theory(self) -> OptimizerTheory:
        return replace(DP_SIGN_SGD, drift=_linear_drift, noise_gain=_clamped_gain)
