"""The options that fix a mechanism, the same for `account` and `train`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from noisecast.cli.output import whole_number
from noisecast.privacy.calibration import calibrate_noise_multiplier
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.sampling import Sampler, adjacency_named, sampler_named, steps_of_epochs

SamplerName = Literal["poisson", "fixed-size", "shuffled"]
AdjacencyName = Literal["add-or-remove-one", "replace-one"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MechanismOptions:
    """How long, how noisy and on which batches."""

    num_steps: Annotated[int | None, Parameter(converter=whole_number, help="Number of steps; or give --epochs.")] = (
        None
    )
    epochs: Annotated[
        float | None, Parameter(help="Passes over the data, instead of --num-steps: floor(n / B) steps each.")
    ] = None
    noise_multiplier: Annotated[
        float | None, Parameter(help="Noise standard deviation / clip norm; or give --target-epsilon.")
    ] = None
    target_epsilon: Annotated[
        float | None, Parameter(help="Finds the smallest noise multiplier with this epsilon.")
    ] = None
    sampler: Annotated[SamplerName, Parameter(help="How batches are drawn.")] = "poisson"
    adjacency: Annotated[
        AdjacencyName | None,
        Parameter(help="What one record may change. Default: add-or-remove-one; fixed-size: replace-one."),
    ] = None

    @property
    def neighbours(self) -> Adjacency:
        """What was asked for, or the sampler's own."""
        return adjacency_named(self.adjacency, self.sampler)

    def check(self) -> None:
        """One sentence where an alternative is given twice or not at all: asked before any work."""
        for one, other in (("num_steps", "epochs"), ("noise_multiplier", "target_epsilon")):
            given = [name for name in (one, other) if getattr(self, name) is not None]
            if len(given) != 1:
                got = "both" if given else "neither"
                raise ValueError(f"Expected {_option(one)} or {_option(other)}, got {got}; give one of them.")
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"Expected --num-steps >= 1, got {self.num_steps}.")
        if self.epochs is not None and not 0 < self.epochs < float("inf"):
            raise ValueError(f"Expected a finite --epochs > 0, got {self.epochs}.")
        if self.target_epsilon is not None and not 0 < self.target_epsilon < float("inf"):
            raise ValueError(f"Expected a finite --target-epsilon > 0, got {self.target_epsilon}.")
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < float("inf"):
            raise ValueError(f"Expected a finite --noise-multiplier >= 0, got {self.noise_multiplier}.")

    def sampler_for(self, batch_size: float, num_examples: int) -> Sampler:
        if num_examples < 1:
            raise ValueError(f"Expected --num-examples >= 1, got {num_examples}.")
        return sampler_named(self.sampler, batch_size, num_examples)

    def steps(self, sampler: Sampler) -> int:
        """num_steps, or those of `epochs` passes."""
        if self.num_steps is not None:
            return self.num_steps
        assert self.epochs is not None and sampler.sampling_probability is not None
        return steps_of_epochs(self.epochs, sampler.sampling_probability)

    def mechanism(
        self, sampler: Sampler, *, num_steps: int, target_delta: float, l2_clip_norm: float = 1.0
    ) -> SampledGaussian:
        """With the noise given, or the least that keeps to target_epsilon."""
        mechanism = SampledGaussian(
            noise_multiplier=self.noise_multiplier or 0.0,
            l2_clip_norm=l2_clip_norm,
            sampler=sampler,
            adjacency=self.neighbours,
        )
        if self.target_epsilon is None:
            return mechanism
        return calibrate_noise_multiplier(
            mechanism, target_epsilon=self.target_epsilon, target_delta=target_delta, num_steps=num_steps
        )


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")
