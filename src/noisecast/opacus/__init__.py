"""Noisecast beside Opacus: DP-SignSGD for `make_private`, what a run really spends, and advice for a PyTorch model."""

try:
    import opacus  # noqa: F401  # pyright: ignore[reportMissingImports]
    import torch  # noqa: F401  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        "noisecast.opacus needs PyTorch and Opacus; install them with `pip install 'noisecast[opacus]'`."
    ) from error

from noisecast.opacus.advise import advise
from noisecast.opacus.measure import NonPrivateGradients, measure
from noisecast.opacus.mechanism import mechanism_of, poisson_sampler, privacy_spent
from noisecast.opacus.sign_sgd import DPSignSGD

__all__ = ["DPSignSGD", "NonPrivateGradients", "advise", "measure", "mechanism_of", "poisson_sampler", "privacy_spent"]
