"""How a step's batch is drawn, and the event it is accounted as.

A sampler is public: it holds only declared sizes and probabilities, never a count of the private data. Each one says in
`statement()` which guarantee its number is, because a batch that is shuffled must not be accounted as one that is
Poisson-sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from noisecast.privacy.drawing import STEPS_PER_BLOCK, Batches, batches_by_block, check_range, generator, round_up


class Adjacency(StrEnum):
    """Which data sets the guarantee calls neighbours: one record added or removed, or one record replaced."""

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"


class Sampler(Protocol):
    """What a mechanism asks of its sampler."""

    @property
    def expected_batch_size(self) -> float:
        """The public normaliser B of the private mean [examples]."""
        ...

    @property
    def sampling_probability(self) -> float | None:
        """The probability that a given record is in a given step's batch; None where no data set is sampled."""
        ...

    @property
    def num_examples(self) -> float | None:
        """The declared, public size of the data set; None where there is none."""
        ...

    @property
    def exact_batch_size(self) -> int | None:
        """B where every batch is of exactly B different records; None where that is chance."""
        ...

    def dp_event(self, noise_multiplier: float, num_steps: int) -> Any:
        """What num_steps steps release about one record, as a dp_accounting event.

        Args:
          noise_multiplier: z >= 0, relative to the most that one record adds to a sum.   num_steps: T >= 0.
        Returns: a `dp_accounting.DpEvent`.
        """
        ...

    def batch_noise_variance(self, mean: Any, second_moment: Any) -> Any:
        """Variance that the choice of the batch gives each coordinate of the mean clipped gradient.

        Args:
          mean, second_moment: E g and E g^2 of a clipped example's gradient, a coordinate; any shape.
        Returns: shape of both.
        """
        ...

    def batch_fill(self, num_examples: float | None) -> float:
        """Expected examples in a batch over B, from a data set of that many, which need not be the declared size.

        Args:
          num_examples: of that data set; None where the size is not known.
        Returns: () >= 0; 1 for the declared size.
        """
        ...

    def why_unsupported(self, adjacency: Adjacency) -> str | None:
        """A sentence when no guarantee is known for this adjacency, else None."""
        ...

    def statement(self) -> str:
        """The sentence that must stand beside the epsilon."""
        ...

    def neighbours(self, adjacency: Adjacency) -> str:
        """What a neighbouring data set does to one record, as in "with respect to {...} one record"."""
        ...


class _Usual:
    """What a sampler answers that has no answer of its own."""

    @property
    def exact_batch_size(self) -> int | None:
        return None

    def batch_fill(self, num_examples: float | None) -> float:
        return 1.0

    def neighbours(self, adjacency: Adjacency) -> str:
        return {Adjacency.ADD_OR_REMOVE_ONE: "adding or removing", Adjacency.REPLACE_ONE: "replacing"}[adjacency]


class _ZeroedOut(_Usual):
    """A record is left out by zeroing its contribution: without its place, others would move to other batches."""

    def neighbours(self, adjacency: Adjacency) -> str:
        if adjacency == Adjacency.ADD_OR_REMOVE_ONE:
            return "zeroing out the contribution of"
        return super().neighbours(adjacency)


@dataclass(frozen=True)
class Poisson(_Usual):
    """Every record enters every batch independently with probability q.

    q is the primitive; the batch size K ~ Binomial(n, q) is random and private, so sums are divided by the public
    `expected_batch_size`.

    Args:
      sampling_probability: q; 0 < q <= 1.
      expected_batch_size: B > 0, a public constant [examples].

    >>> Poisson.for_batch_size(64, 25_000)
    Poisson(sampling_probability=0.00256, expected_batch_size=64)
    """

    sampling_probability: float
    expected_batch_size: float

    def __post_init__(self) -> None:
        if not 0 < self.sampling_probability <= 1:
            raise ValueError(f"Expected 0 < sampling_probability <= 1, got {self.sampling_probability}.")
        if not 0 < self.expected_batch_size < math.inf:
            raise ValueError(f"Expected a finite expected_batch_size > 0, got {self.expected_batch_size}.")

    @classmethod
    def for_batch_size(cls, batch_size: float, num_examples: int) -> Poisson:
        """q = batch_size / num_examples, with num_examples the declared (public) size of the data set.

        Args:
          batch_size: B, expected; 0 < B <= n.   num_examples: n.
        Raises: ValueError for a batch size out of range.
        """
        if not 0 < batch_size <= num_examples:
            raise ValueError(
                f"Expected 0 < batch_size <= num_examples = {num_examples}, got {batch_size:g}; choose a smaller batch."
            )
        return cls(batch_size / num_examples, batch_size)

    @property
    def num_examples(self) -> float:
        """n = B / q, the data set size at which the expected batch size is B."""
        return self.expected_batch_size / self.sampling_probability

    @property
    def width(self) -> int:
        """Columns of a batch: at least B + 6 sqrt(B) + 8, exceeded less than once in 10^6 steps."""
        return round_up(math.ceil(self.expected_batch_size + 6 * math.sqrt(self.expected_batch_size) + 8))

    def dp_event(self, noise_multiplier: float, num_steps: int) -> Any:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

        step = GaussianDpEvent(noise_multiplier)
        if self.sampling_probability < 1:
            step = PoissonSampledDpEvent(self.sampling_probability, step)
        return _compose(step, num_steps)

    def batches(self, key: bytes, start: int, stop: int, num_rows: int) -> Batches:
        """The batches of steps start <= t < stop, the same whatever ranges are asked for.

        K ~ Binomial(num_rows, q) and then a uniform K-subset is the same law as independent coins. No batch is ever
        truncated: the width grows in the rare case that one is larger.

        Args:
          key: of this run's batches.   start, stop: of the steps, 0 <= start <= stop.   num_rows: of the data set.
        Returns: Batches of stop - start steps.
        Raises: ValueError for a range, or a number of rows, that there is not.

        >>> Poisson(0.5, 2).batches(b"key", 3, 5, num_rows=4).mask.shape
        (2, 24)
        """
        return batches_by_block(
            key,
            start,
            stop,
            lambda rng: rng.binomial(num_rows, self.sampling_probability, STEPS_PER_BLOCK),
            num_rows,
            self.width,
        )

    def batch_noise_variance(self, mean: Any, second_moment: Any) -> Any:
        """(1 - q) E[g^2] / B: n independent coins of variance q (1 - q), divided by B = q n, per coordinate.

        >>> Poisson(0.25, 4).batch_noise_variance(mean=0.0, second_moment=2.0)
        0.375
        """
        del mean
        return (1 - self.sampling_probability) * second_moment / self.expected_batch_size

    def batch_fill(self, num_examples: float | None) -> float:
        """n q/B. Sums are divided by B whatever n is: with fewer examples than declared, gradients come out smaller.

        >>> Poisson.for_batch_size(64, 1000).batch_fill(900)
        0.9
        """
        return 1.0 if num_examples is None else num_examples / self.num_examples

    def why_unsupported(self, adjacency: Adjacency) -> str | None:
        return None

    def statement(self) -> str:
        return (
            f"Each step draws every record independently with probability {self.sampling_probability:.6g} (Poisson "
            "sampling), and the guarantee holds for batches drawn so."
        )


@dataclass(frozen=True)
class _DeclaredSizes(_Usual):
    """batch_size records of a data set whose size num_examples is public, as replace-one adjacency has it."""

    batch_size: int
    num_examples: int

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.num_examples:
            raise ValueError(
                f"Expected 1 <= batch_size <= num_examples = {self.num_examples}, got batch_size {self.batch_size}."
            )

    @property
    def expected_batch_size(self) -> int:
        return self.batch_size

    @property
    def exact_batch_size(self) -> int:
        return self.batch_size

    @property
    def sampling_probability(self) -> float:
        return self.batch_size / self.num_examples

    @property
    def width(self) -> int:
        """Columns of a batch: batch_size, rounded up to a multiple of 8."""
        return round_up(self.batch_size)

    def batch_noise_variance(self, mean: Any, second_moment: Any) -> Any:
        """Var = (E[g^2] - E[g]^2) / B * (n - B) / (n - 1), per coordinate.

        Sampling without replacement: the population variance with divisor n - 1, n/(n-1) (E[g^2] - E[g]^2), over B,
        times the finite-population factor 1 - B/n.

        >>> FixedSize(2, 5).batch_noise_variance(mean=1.0, second_moment=3.0)
        0.75
        """
        n, b = self.num_examples, self.batch_size
        return (second_moment - mean**2) * ((n - b) / (max(n - 1, 1) * b))

    def _check_rows(self, num_rows: int) -> None:
        if num_rows != self.num_examples:
            raise ValueError(
                f"Expected a data set of the declared num_examples = {self.num_examples} rows, got {num_rows}; "
                "use Poisson where the size is private."
            )


@dataclass(frozen=True)
class FixedSize(_DeclaredSizes):
    """A fresh uniform batch of exactly batch_size records, without replacement, at every step.

    The size n is public, so the natural neighbours are data sets with one record replaced.

    >>> FixedSize(64, 25_000).sampling_probability
    0.00256
    """

    def dp_event(self, noise_multiplier: float, num_steps: int) -> Any:
        from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent

        step = GaussianDpEvent(noise_multiplier)
        if self.batch_size < self.num_examples:
            step = SampledWithoutReplacementDpEvent(self.num_examples, self.batch_size, step)
        return _compose(step, num_steps)

    def batches(self, key: bytes, start: int, stop: int, num_rows: int) -> Batches:
        """The batches of steps start <= t < stop, the same whatever ranges are asked for.

        Args, Returns and Raises: as `Poisson.batches`; num_rows is the declared size, else a ValueError.

        >>> FixedSize(3, 10).batches(b"key", 0, 2, num_rows=10).mask.sum(axis=1).tolist()
        [3, 3]
        """
        self._check_rows(num_rows)
        return batches_by_block(
            key, start, stop, lambda rng: np.full(STEPS_PER_BLOCK, self.batch_size), num_rows, self.width
        )

    def why_unsupported(self, adjacency: Adjacency) -> str | None:
        if adjacency == Adjacency.REPLACE_ONE:
            return None
        return (
            f"Expected adjacency {Adjacency.REPLACE_ONE} for fixed-size batches, got {adjacency}: such a batch "
            "changes in two records when one is added; use that adjacency, or the Poisson sampler."
        )

    def statement(self) -> str:
        return (
            f"Each step draws exactly {self.batch_size} of {self.num_examples} records without replacement, and the "
            "guarantee is for replacing one record."
        )


@dataclass(frozen=True)
class Shuffled(_ZeroedOut, _DeclaredSizes):
    """A new permutation every epoch, cut into batches of batch_size, the remainder dropped (as in the paper's runs).

    Accounted without amplification by sampling: a record is used at most once an epoch, so T steps are at most
    E = ceil(T / floor(n / B)) Gaussian mechanisms, whatever the order. Under add/remove in the zero-out sense: the
    neighbour has a record whose gradient is zero in the missing one's place.

    >>> Shuffled(64, 25_000).num_epochs(39_000)
    100
    """

    @property
    def steps_per_epoch(self) -> int:
        """floor(n / B): whole batches of a permutation."""
        return self.num_examples // self.batch_size  # in whole numbers: epsilon counts by it

    def num_epochs(self, num_steps: int) -> int:
        """E = ceil(num_steps / steps_per_epoch): the most often that one record is used.

        Args:
          num_steps: T >= 0.
        Returns: E >= 0.
        """
        return -(-num_steps // self.steps_per_epoch)

    def dp_event(self, noise_multiplier: float, num_steps: int) -> Any:
        from dp_accounting import GaussianDpEvent

        return _compose(GaussianDpEvent(noise_multiplier), self.num_epochs(num_steps))

    def batches(self, key: bytes, start: int, stop: int, num_rows: int) -> Batches:
        """The batches of steps start <= t < stop, the same whatever ranges are asked for.

        Args, Returns and Raises: as `Poisson.batches`; num_rows is the declared size, else a ValueError.

        >>> np.sort(Shuffled(2, 6).batches(b"key", 3, 6, num_rows=6).indices[:, :2].ravel()).tolist()
        [0, 1, 2, 3, 4, 5]
        """
        self._check_rows(num_rows)
        check_range(start, stop)
        per_epoch = self.steps_per_epoch
        indices = np.zeros((stop - start, self.width), np.int32)
        for epoch in range(start // per_epoch, -(-stop // per_epoch)):
            order = generator(key, "epoch", epoch).permutation(num_rows)[: per_epoch * self.batch_size]
            first, last = max(start, epoch * per_epoch), min(stop, (epoch + 1) * per_epoch)
            rows = order.reshape(per_epoch, self.batch_size)[first - epoch * per_epoch : last - epoch * per_epoch]
            indices[first - start : last - start, : self.batch_size] = rows
        mask = np.broadcast_to(np.arange(self.width) < self.batch_size, indices.shape).copy()
        return Batches(indices, mask)

    def why_unsupported(self, adjacency: Adjacency) -> str | None:
        return None

    def statement(self) -> str:
        return (
            "Batches are shuffled, not Poisson-sampled: the guarantee counts each record once an epoch, without "
            "amplification by sampling, and is not the (usually much smaller) Poisson number."
        )


@dataclass(frozen=True)
class Stream(_ZeroedOut):
    """Every step sees batch_size fresh examples of a population, so that no record is ever used twice.

    One record meets one Gaussian mechanism, whatever the number of steps. Under add/remove in the zero-out sense.

    >>> Stream(64).sampling_probability is None
    True
    """

    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size != int(self.batch_size) or self.batch_size < 1:
            raise ValueError(f"Expected batch_size to be a whole number >= 1, got {self.batch_size}.")
        object.__setattr__(self, "batch_size", int(self.batch_size))

    @property
    def expected_batch_size(self) -> int:
        return self.batch_size

    @property
    def sampling_probability(self) -> None:
        return None

    @property
    def num_examples(self) -> None:
        return None

    def dp_event(self, noise_multiplier: float, num_steps: int) -> Any:
        from dp_accounting import GaussianDpEvent

        return _compose(GaussianDpEvent(noise_multiplier), min(num_steps, 1))

    def batch_noise_variance(self, mean: Any, second_moment: Any) -> Any:
        """(E[g^2] - E[g]^2) / B: the variance of a mean of B independent examples, per coordinate.

        >>> Stream(4).batch_noise_variance(mean=1.0, second_moment=3.0)
        0.5
        """
        return (second_moment - mean**2) / self.batch_size

    def why_unsupported(self, adjacency: Adjacency) -> str | None:
        return None

    def statement(self) -> str:
        return "Every step uses fresh examples, each at most once, and the guarantee holds for such one-pass data only."


def steps_per_epoch(sampling_probability: float | np.ndarray) -> Any:
    """floor(n / B) = floor(1 / q) steps, at least one: what an epoch is everywhere.

    It is a whole number of steps, as in the paper: the rest of the rows is not waited for.

    >>> int(steps_per_epoch(64 / 25_000)), steps_per_epoch(np.array([0.1, 0.7, 1.0])).tolist()
    (390, [10, 1, 1])
    """
    return np.maximum(1, np.floor(1 / np.asarray(sampling_probability) + 1e-9)).astype(int)


def steps_of_epochs(num_epochs: float, sampling_probability: float) -> int:
    """T of so many epochs, which need not be a whole number; at least one step.

    >>> steps_of_epochs(100, 64 / 25_000), steps_of_epochs(0.5, 64 / 25_000), steps_of_epochs(0.1, 1.0)
    (39000, 195, 1)
    """
    return max(1, round(num_epochs * int(steps_per_epoch(sampling_probability))))


def sampler_named(name: str, batch_size: float, num_examples: int) -> Sampler:
    """The sampler of a data set under the name that a person types: "poisson", "fixed-size" or "shuffled".

    Args:
      name: of the three.   batch_size: B; > 0, a whole number except for "poisson".   num_examples: n, declared.
    Returns: the sampler.
    Raises: ValueError for a batch size that the sampler cannot draw.

    >>> sampler_named("shuffled", 64, 25_000)
    Shuffled(batch_size=64, num_examples=25000)
    """
    if name == "poisson":
        return Poisson.for_batch_size(batch_size, num_examples)
    if batch_size != int(batch_size):
        raise ValueError(f"Expected batch_size to be a whole number for {name} batches, got {batch_size}.")
    return {"fixed-size": FixedSize, "shuffled": Shuffled}[name](int(batch_size), num_examples)


def adjacency_named(name: str | None, sampler: str) -> Adjacency:
    """What one record may change, under the name that a person types; where none is typed, what the sampler is for.

    Args:
      name: "add-or-remove-one", "replace-one" or None.   sampler: the name of one, as `sampler_named` takes it.
    Returns: Adjacency.
    Raises: ValueError for another name.

    >>> str(adjacency_named(None, "poisson")), str(adjacency_named(None, "fixed-size"))
    ('add_or_remove_one', 'replace_one')
    """
    default = "replace-one" if sampler == "fixed-size" else "add-or-remove-one"
    return Adjacency((name or default).replace("-", "_"))


def _compose(step: Any, count: int) -> Any:
    from dp_accounting import NoOpDpEvent, SelfComposedDpEvent

    return SelfComposedDpEvent(step, count) if count > 0 else NoOpDpEvent()
