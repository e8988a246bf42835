"""Privacy: one frozen mechanism that draws the noise and yields what is accounted. Imports neither JAX nor Numba."""

from noisecast.privacy.accounting import (
    PrivacySpent,
    calibrate_noise_multiplier,
    epsilon_curve,
    epsilon_spent,
    nominal_epsilon,
    nominal_noise_multiplier,
)
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.noise import Purpose, RandomRoot
from noisecast.privacy.sampling import FixedSize, Poisson, Sampler, Shuffled, Stream

__all__ = [
    "Adjacency",
    "FixedSize",
    "Poisson",
    "PrivacySpent",
    "Purpose",
    "RandomRoot",
    "SampledGaussian",
    "Sampler",
    "Shuffled",
    "Stream",
    "calibrate_noise_multiplier",
    "epsilon_curve",
    "epsilon_spent",
    "nominal_epsilon",
    "nominal_noise_multiplier",
]
