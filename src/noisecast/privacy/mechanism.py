"""The mechanism: one frozen object that owns the clip, the noise, the sampler and the event that is accounted.

The noise that is drawn and the epsilon that is reported read the same fields, so they cannot drift apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from noisecast.privacy.sampling import Adjacency, FixedSize, Poisson, Sampler, Shuffled, Stream

__all__ = ["Adjacency", "SampledGaussian"]


_SAMPLERS = {sampler.__name__: sampler for sampler in (Poisson, FixedSize, Shuffled, Stream)}

# Beyond these float32 training and the accountants' float64 have no numbers left (clip factors of the longest gradients
# would round up), and nobody a use.
RANGES = {"noise_multiplier": (1e-9, 1e9), "l2_clip_norm": (1e-12, 1e20)}


@dataclass(frozen=True, kw_only=True)
class SampledGaussian:
    """Sum of the sampled batch's clipped gradients plus Gaussian noise, over a public batch size (DP-SGD's release).

      private mean = (sum_{i in batch} clip(g_i, C) + N(0, (z C)^2 I)) / B

    z is always relative to C, the most that one record can add to the sum. Replacing a record can move the sum by 2 C:
    under REPLACE_ONE the same noise is accounted against twice the sensitivity, the noise itself does not change.

    Args:
      noise_multiplier: z; >= 0, finite. 0 is allowed and has epsilon = inf.
      l2_clip_norm: C; > 0, finite [loss/params].
      sampler: how batches are drawn (`noisecast.privacy.sampling`).
      adjacency: which data sets are neighbours.
    Raises: ValueError when a number is out of range, or the sampler has no guarantee for the adjacency.

    >>> from noisecast.privacy.sampling import Poisson
    >>> mechanism = SampledGaussian(noise_multiplier=2.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, 25_000))
    >>> mechanism.noise_std, mechanism.mean_noise_std
    (1.0, 0.015625)
    """

    noise_multiplier: float
    l2_clip_norm: float
    sampler: Sampler
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"Expected a finite noise_multiplier >= 0, got {self.noise_multiplier}.")
        if not 0 < self.l2_clip_norm < math.inf:
            raise ValueError(
                f"Expected a finite l2_clip_norm > 0, got {self.l2_clip_norm}; without a clip one record can move the "
                "sum without bound, so choose one that no gradient reaches."
            )
        for field, (low, high) in RANGES.items():
            value = getattr(self, field)
            if value and not low <= value <= high:
                raise ValueError(f"Expected {low:g} <= {field} <= {high:g}, got {value}.")
        object.__setattr__(self, "adjacency", Adjacency(self.adjacency))
        reason = self.sampler.why_unsupported(self.adjacency)
        if reason is not None:
            raise ValueError(reason)

    @property
    def noise_std(self) -> float:
        """z C: standard deviation per coordinate of the noise on the sum [loss/params]."""
        return self.noise_multiplier * self.l2_clip_norm

    @property
    def mean_noise_std(self) -> float:
        """z C / B: standard deviation per coordinate of the noise on the private mean gradient [loss/params]."""
        return self.noise_std / self.expected_batch_size

    @property
    def expected_batch_size(self) -> float:
        """B, the public normaliser [examples]."""
        return self.sampler.expected_batch_size

    @property
    def sampling_probability(self) -> float | None:
        """q; None for a stream, where no data set is sampled."""
        return self.sampler.sampling_probability

    @property
    def sensitivity(self) -> float:
        """The most a step's sum moves between neighbours, in L2: C, or 2 C for a replaced record [loss/params]."""
        return self.l2_clip_norm * (2 if self.adjacency == Adjacency.REPLACE_ONE else 1)

    def dp_event(self, num_steps: int) -> Any:
        """num_steps steps as a dp_accounting event, its noise multiplier relative to C (std / bound on one record).

        Under REPLACE_ONE do not hand it to dp_accounting's RdpAccountant, which reads the noise multiplier as relative
        to the sensitivity and would take 2 C for C; `epsilon_spent` knows the difference.

        Args:
          num_steps: T; an integer >= 0.
        Returns: a `dp_accounting.DpEvent`.
        Raises: ValueError for another num_steps.
        """
        if isinstance(num_steps, bool) or num_steps != int(num_steps) or num_steps < 0:
            raise ValueError(f"Expected an integer num_steps >= 0, got {num_steps}.")
        return self.sampler.dp_event(self.noise_multiplier, int(num_steps))

    def with_noise_multiplier(self, noise_multiplier: float) -> SampledGaussian:
        """The same mechanism with another z.

        Args:
          noise_multiplier: z, of the same range.
        Raises: ValueError out of it.
        """
        return replace(self, noise_multiplier=noise_multiplier)

    def as_data(self) -> dict[str, Any]:
        """As JSON has it; `from_data` reads it."""
        sampler = {"kind": type(self.sampler).__name__, **vars(self.sampler)}
        return vars(self) | {"sampler": sampler, "adjacency": str(self.adjacency)}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> SampledGaussian:
        """Back from `as_data`.

        Args:
          data: as `as_data` gave it.
        Raises: KeyError, TypeError or ValueError for anything else.

        >>> from noisecast.privacy.sampling import Poisson
        >>> mechanism = SampledGaussian(noise_multiplier=2.0, l2_clip_norm=0.5, sampler=Poisson(0.01, 64))
        >>> SampledGaussian.from_data(mechanism.as_data()) == mechanism
        True
        """
        settings = dict(data["sampler"])
        sampler = _SAMPLERS[settings.pop("kind")](**settings)
        return cls(**data | {"sampler": sampler, "adjacency": Adjacency(data["adjacency"])})

    def statement(self) -> str:
        """Which guarantee the epsilon of this mechanism is, in words."""
        return f"Neighbours differ by {self.sampler.neighbours(self.adjacency)} one record. {self.sampler.statement()}"

    def where_is_the_noise(self) -> str:
        """Where the noise enters and how large it is there, on the sum and on the mean.

        >>> from noisecast.privacy.sampling import Poisson
        >>> mechanism = SampledGaussian(noise_multiplier=2.0, l2_clip_norm=0.5, sampler=Poisson(0.01, 64))
        >>> print(mechanism.where_is_the_noise())
        Each record's gradient is clipped to L2 norm 0.5 (l2_clip_norm).
        The sum over the batch gets Gaussian noise of std 1 a coordinate (noise_multiplier 2 x l2_clip_norm 0.5).
        Sum and noise are divided by 64 (expected_batch_size, public): its std on the mean gradient is 0.015625.
        A neighbouring data set moves the sum by at most 0.5 (add_or_remove_one), and the mean by at most 0.0078125.
        """
        z, c, b = self.noise_multiplier, self.l2_clip_norm, self.expected_batch_size
        return (
            f"Each record's gradient is clipped to L2 norm {c:g} (l2_clip_norm).\n"
            f"The sum over the batch gets Gaussian noise of std {self.noise_std:.6g} a coordinate "
            f"(noise_multiplier {z:g} x l2_clip_norm {c:g}).\n"
            f"Sum and noise are divided by {b:g} (expected_batch_size, public): "
            f"its std on the mean gradient is {self.mean_noise_std:.6g}.\n"
            f"A neighbouring data set moves the sum by at most {self.sensitivity:g} ({self.adjacency}), "
            f"and the mean by at most {self.sensitivity / b:.6g}."
        )
