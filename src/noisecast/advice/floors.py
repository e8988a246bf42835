"""What is known of a training, as numbers, and what they say of optimizers whose settings are kept.

Settings are compared by the loss floors of their optimizers, phi e d s^2/(4 h) with effective learning rate e, gradient
noise s and shrink factor h of clipping (`OptimizerTheory`): where they cross is `threshold_noise_multipliers`. What is
not known is bounded, and the bounds are carried through:

* batch noise: no clipped gradient is longer than C, so its variance a coordinate is between 0 and C^2/(d B);
* clipping: h(C) = E min(1, C/|g|) is concave, so for clip norms c < C, with p the share of records longer than c,
  1 <= h(C)/h(c) <= min(C/c, 1 + p ln(C/c)/(1 - p)). The lower end is exact without clipping (p = 0), the upper end if
  every gradient is longer than both. Own derivation: h'(C) = E[1/|g|; |g| > C] <= p/C, and h(c) >= 1 - p.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from noisecast.advice.probe import calibrate_after, epsilon_after
from noisecast.advice.transfer import Curvature, gradient_noise_std
from noisecast.privacy.accounting import PrivacySpent, epsilon_spent, nominal_epsilon
from noisecast.privacy.calibration import calibrate_noise_multiplier
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.sampling import Sampler, steps_per_epoch
from noisecast.theory.dp_sgd import DP_SGD
from noisecast.theory.optimal import Thresholds, threshold_noise_multiplier_all_clipped, threshold_noise_multipliers
from noisecast.theory.optimizer_theory import OptimizerTheory

BATCH_NOISES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)  # of the largest, at which thresholds are looked at


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """One optimizer as it was tuned.

    Args:
      theory: of the optimizer (`optimizer.theory`).   learning_rate: eta > 0, in its own units.
      l2_clip_norm: C > 0 [loss/params].
      clipped_share: of records whose gradient is longer than C; in [0, 1], None where not known.
    """

    theory: OptimizerTheory
    learning_rate: float
    l2_clip_norm: float
    clipped_share: float | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "l2_clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"Expected 0 < {name} < inf, got {getattr(self, name)}.")
        if self.clipped_share is not None and not 0 <= self.clipped_share <= 1:
            raise ValueError(f"Expected 0 <= clipped_share <= 1, got {self.clipped_share}.")

    @property
    def name(self) -> str:
        return self.theory.name


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """All that is known.

    Args:
      num_params: d.   sampler: how batches are drawn; it holds B, n and q.   num_steps: T.
      target_delta: in (0, 1).
      optimizers: as tuned, each once.
      tuned_noise_multiplier: z at which they were tuned; None: nothing can be said of other learning rates.
      example_noise_std: sigma, measured, per example and coordinate [loss/params]; None: bounded.
      curvature: initial loss and Tr H; None: nothing is said of absolute losses.
      nominal_num_examples: how many examples the nominal epsilon counts, at as many epochs; None: as many as there are.
      adjacency: which data sets are neighbours.
      before: what was released of the data before, one step of it (a probe's); counted in every epsilon.
    """

    num_params: int
    sampler: Sampler
    num_steps: int
    optimizers: tuple[Tuned, ...]
    target_delta: float = 1e-5
    tuned_noise_multiplier: float | None = None
    example_noise_std: float | None = None
    curvature: Curvature | None = None
    nominal_num_examples: float | None = None
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
    before: SampledGaussian | None = None

    def __post_init__(self) -> None:
        if self.num_params < 1 or self.num_steps < 1:
            raise ValueError(
                f"Expected num_params >= 1 and num_steps >= 1, got {self.num_params} and {self.num_steps}."
            )
        if not 0 < self.target_delta < 1:
            raise ValueError(f"Expected 0 < target_delta < 1, got {self.target_delta}.")
        names = [tuned.name for tuned in self.optimizers]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"Expected one or more optimizers, each once, got {', '.join(names) or 'none'}.")
        if self.sampler.num_examples is None:
            raise ValueError("Expected a sampler of a data set, got a stream; give num_examples and batch_size.")
        for name in ("tuned_noise_multiplier", "nominal_num_examples"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"Expected 0 < {name} < inf, got {value}.")
        if self.example_noise_std is not None and not 0 <= self.example_noise_std < math.inf:
            raise ValueError(f"Expected a finite example_noise_std >= 0, got {self.example_noise_std}.")

    @property
    def sgd(self) -> Tuned | None:
        """DP-SGD as tuned, whose pace no noise changes: what others are measured by."""
        return next((tuned for tuned in self.optimizers if tuned.theory is DP_SGD), None)

    @property
    def adaptive(self) -> tuple[Tuned, ...]:
        """The others, where DP-SGD is there to be compared with."""
        return () if self.sgd is None else tuple(tuned for tuned in self.optimizers if tuned.theory is not DP_SGD)

    @property
    def expected_batch_size(self) -> float:
        return self.sampler.expected_batch_size

    def mechanism(self, noise_multiplier: float, l2_clip_norm: float = 1.0) -> SampledGaussian:
        """One step of training; epsilon does not depend on the clip norm."""
        return SampledGaussian(
            noise_multiplier=noise_multiplier,
            l2_clip_norm=l2_clip_norm,
            sampler=self.sampler,
            adjacency=self.adjacency,
        )

    def epsilon(self, noise_multiplier: float) -> float:
        """As accounted, of training and of what was released before."""
        mechanism, delta = self.mechanism(noise_multiplier), self.target_delta
        if self.before is None:
            spent: PrivacySpent = epsilon_spent(mechanism, num_steps=self.num_steps, target_delta=delta)
        else:
            spent = epsilon_after(self.before, mechanism, num_steps=self.num_steps, target_delta=delta)
        return spent.epsilon

    def noise_multiplier(self, target_epsilon: float) -> float:
        """The least z that stays within target_epsilon, what was released before included."""
        asked = {"target_epsilon": target_epsilon, "target_delta": self.target_delta, "num_steps": self.num_steps}
        if self.before is None:
            return calibrate_noise_multiplier(self.mechanism(0.0), **asked).noise_multiplier
        return calibrate_after(self.before, self.mechanism(0.0), **asked).noise_multiplier

    def tuned_at(self, target_epsilon: float) -> "Numbers":
        """The same, the settings having been tuned at this epsilon of training alone."""
        z = replace(self, before=None).noise_multiplier(target_epsilon)
        return replace(self, tuned_noise_multiplier=z)

    def nominal_epsilon(self, noise_multiplier: float) -> float:
        """The paper's formula, not a guarantee, with the number of examples that it is said to count."""
        batch, there = self.expected_batch_size, float(self.sampler.num_examples or 0)
        counted = self.nominal_num_examples or there
        return nominal_epsilon(
            noise_multiplier=noise_multiplier,
            sampling_probability=batch / counted,
            # As many epochs.
            num_steps=self.num_steps / float(steps_per_epoch(batch / there)) * float(steps_per_epoch(batch / counted)),
            target_delta=self.target_delta,
        )


# --- Thresholds -----------------------------------------------------------------------------------------------------


def shrink_ratio(one: Tuned, other: Tuned) -> tuple[float, float]:
    """Bounds on h(one)/h(other), what clipping leaves of one's gradient over what it leaves of the other's.

    >>> a = Tuned(theory=DP_SGD, learning_rate=1.0, l2_clip_norm=1.0)
    >>> b = Tuned(theory=DP_SGD, learning_rate=1.0, l2_clip_norm=3.0)
    >>> shrink_ratio(b, a), shrink_ratio(a, a)
    ((1.0, 3.0), (1.0, 1.0))
    """
    if one.l2_clip_norm < other.l2_clip_norm:
        low, high = shrink_ratio(other, one)
        return 1 / high, 1 / low
    widening, p = one.l2_clip_norm / other.l2_clip_norm, other.clipped_share
    if one.clipped_share == 1:  # every gradient is longer than both
        return widening, widening
    if p is None or p == 1:
        return 1.0, widening
    return 1.0, min(widening, 1 + p * math.log(widening) / (1 - p))


def threshold_formulas(numbers: Numbers, sgd: Tuned, other: Tuned) -> list[Thresholds]:
    """The thresholds at every extreme of what is not known, the one to name first."""
    shared = {
        "sgd_learning_rate": sgd.learning_rate,
        "sgd_l2_clip_norm": sgd.l2_clip_norm,
        "noise_penalty": other.theory.noise_penalty,
        "expected_batch_size": numbers.expected_batch_size,
    }
    ratios = shrink_ratio(other, sgd)
    most = min(sgd.l2_clip_norm, other.l2_clip_norm) / math.sqrt(numbers.num_params)
    measured = numbers.example_noise_std
    noises = [share * most for share in BATCH_NOISES] if measured is None else [min(measured, most)]
    found = [
        threshold_noise_multipliers(
            # Clipping slows the other by the ratio, as a learning rate so much smaller would not: its floor rises.
            adaptive_learning_rate=other.learning_rate / ratio,
            adaptive_l2_clip_norm=other.l2_clip_norm,
            example_noise_std=noise,
            **shared,
        )
        for ratio in sorted({*ratios, 1.0} if ratios[0] <= 1.0 <= ratios[1] else set(ratios), key=lambda r: r != 1.0)
        for noise in noises
    ]
    widening = other.l2_clip_norm / sgd.l2_clip_norm
    if ratios[0] <= widening <= ratios[1] and sgd.clipped_share in (None, 1) and other.clipped_share in (None, 1):
        all_clipped = threshold_noise_multiplier_all_clipped(
            adaptive_learning_rate=other.learning_rate, num_params=numbers.num_params, **shared
        )
        known = sgd.clipped_share == other.clipped_share == 1
        found = [all_clipped] if known else [*found, all_clipped]
    return found


# --- Settings kept ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """An optimizer at one noise multiplier, its settings kept, with `share` of the largest batch noise."""

    numbers: Numbers
    tuned: Tuned
    noise_multiplier: float
    share: float

    @cached_property
    def mechanism(self) -> SampledGaussian:
        return self.numbers.mechanism(self.noise_multiplier, self.tuned.l2_clip_norm)

    @cached_property
    def noise_std(self) -> float:
        """s. A share of the variance is one of sigma^2."""
        measured, d = self.numbers.example_noise_std, self.numbers.num_params
        sigma = self.tuned.l2_clip_norm / math.sqrt(d) if measured is None else measured
        return gradient_noise_std(self.mechanism, num_params=d, example_noise_std=math.sqrt(self.share) * sigma)

    @property
    def pace(self) -> float:
        """e, the effective learning rate."""
        return float(self.tuned.theory.effective_learning_rate(self.tuned.learning_rate, self.noise_std))

    def floor(self) -> float:
        """phi e d s^2/4, to be divided by h."""
        return self.tuned.theory.noise_penalty * self.pace * self.numbers.num_params * self.noise_std**2 / 4

    def excess_loss(self, curvature: Curvature) -> float:
        """f_0 e^(-2 lambda e T) + floor (1 - e^(-2 lambda e T)), lambda = Tr H/d, nothing clipped."""
        left = math.exp(-2 * curvature.hessian_trace / self.numbers.num_params * self.pace * self.numbers.num_steps)
        return curvature.initial_loss * left + self.floor() * (1 - left)

    def badness(self) -> float:
        curvature = self.numbers.curvature
        return self.floor() if curvature is None else self.excess_loss(curvature)


def batch_noise_shares(numbers: Numbers) -> tuple[float, ...]:
    return (0.0, 1.0) if numbers.example_noise_std is None else (1.0,)


def loss_ratio(numbers: Numbers, z: float, one: Tuned, other: Tuned) -> tuple[float, float]:
    """Bounds on how many times the one's loss is the other's, settings kept."""
    clipping = (1.0, 1.0) if numbers.curvature is not None else shrink_ratio(one, other)
    found = [
        Kept(numbers, one, z, share).badness() / Kept(numbers, other, z, share).badness() / ratio
        for share in batch_noise_shares(numbers)
        for ratio in clipping
    ]
    return min(found), max(found)
