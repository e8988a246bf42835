"""What every problem offers: the clipped sum an engine needs, the moments theory needs, the metrics a reader needs."""

import hashlib
from typing import Any, Protocol

import numpy as np

from noisecast.privacy.mechanism import SampledGaussian
from noisecast.problems.local_quadratic import LocalQuadratic
from noisecast.theory.optimizer_theory import GradientMoments

Array = Any
Examples = Any  # a pytree: the examples of one batch, padded to a static width, padding masked to contribute nothing


class Problem(Protocol):
    """A loss to be minimised, and the examples it is private about.

    A problem is a JAX pytree: its arrays are leaves (so a compiled step takes them as arguments), its settings static.
    Parameters are always one flat vector (d,). Everything but `clipped_sum` reads the examples without noise and is
    named `non_private` wherever it is shown.
    """

    @property
    def name(self) -> str:
        """As shown, for instance "logistic on imdb"."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides the numbers: data and settings."""
        ...

    @property
    def num_params(self) -> int: ...

    @property
    def num_examples(self) -> int | None:
        """Rows of the data set; None for a population, which hands out fresh examples for ever."""
        ...

    def initial_params(self) -> Array:
        """Where training starts; (d,) float32."""
        ...

    def examples(self, draw: Array, mask: Array) -> Examples:
        """The examples of one batch.

        Args:
          draw: row numbers (width,) of a data set; for a population a key and the number of the step.
          mask: which of them are there (width,), False for padding; a population only reads its width, the batch size.
        """
        ...

    def clipped_sum(self, params: Array, examples: Examples, l2_clip_norm: Array) -> Array:
        """sum_i g_i min(1, C / |g_i|) over the batch; (d,). Adding or removing one example moves it by at most C.

        An example whose gradient is not finite contributes 0.
        """
        ...

    def evaluate(self, params: Array, l2_clip_norm: Array) -> dict[str, Array]:
        """Metrics at `params`: at least `loss`, `gradient_norm`, `clip_fraction`. All of them non-private."""
        ...

    def prepare_moments(self, mechanism: SampledGaussian) -> Any:
        """What `gradient_moments` needs of a mechanism, as a pytree of arrays: computed once a scenario."""
        ...

    def gradient_moments(self, params: Array, prepared: Any) -> GradientMoments:
        """The law of the private mean gradient at `params`, for the SDEs."""
        ...

    def gradient_noise(self, params: Array, prepared: Any, key: Array) -> Array:
        """One draw of N(0, Cov[private mean gradient]); (d,)."""
        ...

    def shrink_factor(self, params: Array, prepared: Any) -> Array:
        """h: the share of grad f that clipping leaves in E[clip(g)]; ()."""
        ...

    @property
    def is_quadratic(self) -> bool:
        """Whether the local quadratic is the loss itself, everywhere."""
        ...

    @property
    def why_no_closed_form(self) -> str | None:
        """None, or the sentence that says why the local quadratic would mislead."""
        ...

    def local_quadratic(self, params: Array) -> LocalQuadratic:
        """The loss around `params` to second order, in its Hessian's eigenbasis."""
        ...


def fingerprint_of(*parts: str | int | float | np.ndarray) -> str:
    """SHA-256 over the parts, each with its type and length, so that no two lists of parts run together."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            head, body = f"{part.dtype}{part.shape}", np.ascontiguousarray(part).tobytes()
        else:
            head, body = type(part).__name__, repr(part).encode()
        digest.update(f"{head}:{len(body)}:".encode())
        digest.update(body)
    return digest.hexdigest()
