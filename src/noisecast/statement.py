"""The privacy statement of a trained model: what is guaranteed, for whom, by what, and what is not."""

import math
from dataclasses import asdict, dataclass

from noisecast.privacy.accounting import epsilon_text, noise_text
from noisecast.scenario import Scenario

NOT_COVERED = (
    "Choosing the hyperparameters: if they were tuned on this data, that is not included.",
    "Anything else computed from the examples without noise: losses, accuracies and norms named non_private.",
)


FAST_NOISE = "fast generators, AES or Threefry for noise and Philox for batches, not hardened; float32 numbers"
SECURE_NOISE = "the cipher ChaCha20; float32 numbers"


@dataclass(frozen=True)
class PrivacyStatement:
    """A guarantee in words and numbers, for exactly the run that was made.

    Args:
      epsilon, target_delta: the guarantee; epsilon is infinite where there is none.   accountant: what proves it.
      unit: what one record is.   adjacency: which data sets are neighbours; `neighbours` says it in words.
      sampler: how batches were drawn.
      noise_multiplier, l2_clip_norm, expected_batch_size, num_steps: the mechanism.
      released: what the guarantee covers.   not_covered: what it does not.
      noise: the generator that batches and noise came from.
      reproducible: whether the noise came from a seed that somebody may know; then there is no guarantee.
      chosen: of a model that was chosen among several runs, what that cost in words (epsilon is then the procedure's).
    """

    epsilon: float
    target_delta: float
    nominal_epsilon: float | None
    accountant: str
    unit: str
    adjacency: str
    neighbours: str
    sampler: str
    noise_multiplier: float
    l2_clip_norm: float
    expected_batch_size: float
    num_steps: int
    optimizer: str
    released: str
    not_covered: tuple[str, ...]
    reproducible: bool
    noise: str
    note: str | None = None
    chosen: str | None = None

    def sentence(self) -> str:
        """What a lawyer could quote."""
        if self.reproducible:
            return (
                "This model is NOT private: its noise was drawn from a seed that makes the run reproducible, so "
                "whoever knows the seed can take the noise away. Train without an insecure seed for a guarantee."
            )
        if self.epsilon == float("inf"):
            return f"This model is NOT private: {self.chosen or 'no noise was added (epsilon is infinite).'}"
        how = self.chosen or (
            f"This is computed by the {self.accountant} accountant "
            f"for {self.num_steps:,} steps of {self.optimizer} with noise multiplier "
            f"{noise_text(self.noise_multiplier, 6)}, clip norm {self.l2_clip_norm:g} and expected batch size "
            f"{self.expected_batch_size:g}."
        )
        return (
            f"{self.released} satisfy (ε = {epsilon_text(self.epsilon, 3)}, δ = {self.target_delta:g})-differential "
            f"privacy with respect to {self.neighbours} {self.unit}. {how} {self.sampler} "
            f"Randomness: {self.noise}. "
            f"Not covered: {' '.join(self.not_covered)}"
        )

    def to_json(self) -> dict:
        """For a JSON file; an infinite epsilon is infinite here and written as the string "inf"."""
        return asdict(self) | {"sentence": self.sentence()}


def privacy_statement(
    scenario: Scenario,
    *,
    reproducible: bool,
    secure_noise: bool = False,
    unit: str = "one example",
    released: str = "The final model's parameters",
    also_not_covered: tuple[str, ...] = (),
) -> PrivacyStatement:
    """The statement of a finished run of `scenario`."""
    spent, mechanism = scenario.privacy_spent, scenario.mechanism
    return PrivacyStatement(
        epsilon=math.inf if reproducible else spent.epsilon,  # who knows the seed can take the noise away
        target_delta=scenario.target_delta,
        nominal_epsilon=spent.nominal_epsilon,
        accountant=spent.accountant,
        unit=unit,
        adjacency=str(mechanism.adjacency),
        neighbours=mechanism.sampler.neighbours(mechanism.adjacency),
        sampler=mechanism.sampler.statement(),
        noise_multiplier=mechanism.noise_multiplier,
        l2_clip_norm=mechanism.l2_clip_norm,
        expected_batch_size=mechanism.expected_batch_size,
        num_steps=scenario.num_steps,
        optimizer=scenario.optimizer.name,
        released=released,
        not_covered=(*also_not_covered, *NOT_COVERED),
        reproducible=reproducible,
        noise=SECURE_NOISE if secure_noise else FAST_NOISE,
        note=spent.note,
    )
