"""DP-SGD, DP-SignSGD, DP-Adam and their pieces as Optax gradient transformations, for a training loop of your own.

One frozen `SampledGaussian` says how batches are drawn, how gradients are clipped, how much noise is added and by what
the sum is divided, and is what the accountant sees. Nothing goes before `clip_and_sum`, and nothing between it and
`add_noise`. No wrapper goes around the private part that would hand it a part
of a gradient (`optax.masked`, `optax.partition`), a mean of several batches (`optax.MultiSteps`) or some steps only
(`optax.apply_if_finite`, `optax.conditionally_transform`, `optax.conditionally_mask`).
"""

try:
    import optax  # noqa: F401
except ImportError as error:
    raise ImportError("noisecast.optax needs Optax; install it with `pip install 'noisecast[optax]'`.") from error

from noisecast.optax.batches import private_batches
from noisecast.optax.clip import ClippedSum, clip_and_sum, clipped_sum
from noisecast.optax.noise import NoiseState, add_noise, releases, without_key
from noisecast.optax.optimizers import dp_adam, dp_sgd, dp_sign_sgd, scale_by_direction

__all__ = [
    "ClippedSum",
    "NoiseState",
    "add_noise",
    "clip_and_sum",
    "clipped_sum",
    "dp_adam",
    "dp_sgd",
    "dp_sign_sgd",
    "private_batches",
    "releases",
    "scale_by_direction",
    "without_key",
]
