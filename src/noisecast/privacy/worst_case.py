"""The worst case of a step: the pair of Gaussian mixtures that no two neighbours are easier to tell apart than.

One step is dominated by a pair (P, Q) when H_g(P, Q) = integral (P - g Q)_+ is at least that of every pair of
neighbours for all g > 0; then T adaptive steps are dominated by T independent copies. In units of l2_clip_norm, with
noise N(0, z^2), N_m short for N(m, z^2) and g >= 1 (g < 1 follows with P and Q swapped):

* Poisson, add/remove:  H_g(q N_1 + (1-q) N_0, N_0), and the reverse direction.
* Poisson, replace one: H_g(q N_1 + (1-q) N_0, q N_-1 + (1-q) N_0). Given the other records the sum is a mixture with
  the record at u, at v, or absent. Turn v away from u, its length fixed: H_g grows, because the set A = {P > g Q}
  contains, with every point beyond the line through 0 and v, its mirror image on the side of u. So v = -c u; and on
  that line A is a half line, so H_g grows with both lengths.
* Fixed size, replace one: H_g(q N_2 + (1-q) N_0, N_0). Given the rest of the batch the free place holds the record
  (probability q) or another one at w, so P = q N_u + (1-q) N_w and Q = q N_v + (1-q) N_w with all three in the unit
  ball. Advanced joint convexity (Balle, Barthe and Gaboardi, NeurIPS 2018, Thm 2) bounds H_{1 + q (g - 1)}(P, Q) by q
  max(H_g(N_u, N_w), H_g(N_u, N_v)), at most q H_g(N_2, N_0), and v = w = -u attains it. No smaller shift will do: this
  case is worse than Poisson with replace one.
* Without sampling:     H_g(N_D, N_0), D = 1 or (replace one) 2, exactly: E steps are one step with z / sqrt(E).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from noisecast.privacy.mechanism import Adjacency
from noisecast.privacy.renyi import SampledPair
from noisecast.privacy.sampling import Sampler


@dataclass(frozen=True)
class WorstCase:
    """`count` steps of one worst case: a record enters with `probability`, noise is z times its bound C.

    Args:
      noise_multiplier: z >= 0.   probability: q; 0 < q <= 1.   adjacency: which neighbours.
      fixed_size: whether batches have a fixed size.   count: of steps; >= 0.

    >>> from noisecast.privacy.sampling import Poisson
    >>> case = WorstCase.of(Poisson(0.01, 64), 1.0, Adjacency.ADD_OR_REMOVE_ONE, 100)
    >>> case.probability, case.count, case.shift
    (0.01, 100, 1.0)
    """

    noise_multiplier: float
    probability: float
    adjacency: Adjacency
    fixed_size: bool
    count: int

    @classmethod
    def of(cls, sampler: Sampler, z: float, adjacency: Adjacency, num_steps: int) -> WorstCase:
        """Read from the event, so that an event nobody has thought through is refused rather than guessed at.

        Args:
          sampler: how batches are drawn.   z: noise multiplier; >= 0.   adjacency: which neighbours.   num_steps: >= 0.
        Returns: WorstCase; of Shuffled and Stream with the count in which a record is really used.
        Raises: ValueError for an event without a known worst case.
        """
        import dp_accounting as dp

        match sampler.dp_event(z, num_steps):
            case dp.NoOpDpEvent():
                return cls(z, 1.0, adjacency, False, 0)
            case dp.SelfComposedDpEvent(event=dp.GaussianDpEvent(noise_multiplier=z), count=count):
                return cls(z, 1.0, adjacency, False, count)
            case dp.SelfComposedDpEvent(
                event=dp.PoissonSampledDpEvent(sampling_probability=q, event=dp.GaussianDpEvent(noise_multiplier=z)),
                count=count,
            ):
                return cls(z, q, adjacency, False, count)
            case dp.SelfComposedDpEvent(
                event=dp.SampledWithoutReplacementDpEvent(
                    source_dataset_size=n, sample_size=b, event=dp.GaussianDpEvent(noise_multiplier=z)
                ),
                count=count,
            ) if adjacency == Adjacency.REPLACE_ONE:
                return cls(z, b / n, adjacency, True, count)
            case event:
                raise ValueError(f"Expected an event with a known worst case under {adjacency}, got {event}.")

    @property
    def shift(self) -> float:
        """How far apart, in units of C, the sums of neighbours can be when the record is surely in the batch."""
        return 2.0 if self.adjacency == Adjacency.REPLACE_ONE else 1.0

    @property
    def pair(self) -> SampledPair:
        # A record that is surely in the batch moves the sum by its shift and no more: one Gaussian.
        """One step as Renyi divergences are computed of it."""
        is_replaced = self.adjacency == Adjacency.REPLACE_ONE and self.probability < 1
        return SampledPair(self.probability, self.noise_multiplier / self.shift, is_replaced)

    def exact_epsilon(self, target_delta: float) -> float:
        """Epsilon of `count` unsampled steps: one Gaussian with z / (shift sqrt(count)) (Balle and Wang, 2018).

        Args:
          target_delta: 0 < delta < 1.
        Returns: () >= 0, rounded to the private side.
        """
        from dp_accounting import get_epsilon_gaussian

        z = self.noise_multiplier / self.shift / math.sqrt(self.count)
        with np.errstate(divide="ignore"):  # it takes the logarithm of a vanishing delta on its way
            epsilon = float(get_epsilon_gaussian(z, target_delta))
        return epsilon * (1 + 1e-9) + 1e-12 if epsilon > 0 else 0.0  # the root finder stops on either side

    @property
    def largest_loss(self) -> float:
        """About the largest privacy loss of one step, where dp_accounting cuts the tails (10 standard deviations)."""
        z, shift = self.noise_multiplier, self.shift if self.fixed_size or self.probability == 1 else 1.0
        unsampled = shift * (10 * z + shift / 2) / z**2
        if self.probability == 1:
            return unsampled
        return float(np.logaddexp(math.log1p(-self.probability), math.log(self.probability) + unsampled))

    def pld(self, interval: float) -> Any:
        """One step's privacy loss distribution on a grid, rounded to the private side (connect the dots).

        Args:
          interval: of the grid; > 0.
        Returns: a `PrivacyLossDistribution` of dp_accounting.
        """
        from dp_accounting import NeighboringRelation
        from dp_accounting.pld import privacy_loss_distribution as pld

        if self.fixed_size:
            return pld.PrivacyLossDistribution(self._fixed_size_pmf(interval))
        # dp_accounting takes the noise relative to C here, and under REPLACE_ONE shifts by C to either side.
        return pld.from_gaussian_mechanism(
            self.noise_multiplier,
            value_discretization_interval=interval,
            sampling_prob=self.probability,
            neighboring_relation=NeighboringRelation[self.adjacency.name],
        )

    def _fixed_size_pmf(self, interval: float) -> Any:
        """The curve H_g(q N_2 + (1-q) N_0, N_0) for g >= 1 and its swap for g < 1: the pointwise larger of the two."""
        from dp_accounting.pld import pld_pmf
        from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

        directions = [
            GaussianPrivacyLoss(
                self.noise_multiplier, sensitivity=self.shift, sampling_prob=self.probability, adjacency_type=direction
            )
            for direction in (AdjacencyType.REMOVE, AdjacencyType.ADD)
        ]
        last = math.ceil(max(float(d.connect_dots_bounds().epsilon_upper or 0) for d in directions) / interval)
        losses: Any = np.arange(-last, last + 1) * interval
        deltas = np.max([np.asarray(d.get_delta_for_epsilon(losses)) for d in directions], axis=0)
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -last, last, deltas)
