"""Which key every engine uses for what: the same root gives the same batches whatever engine computes the steps."""

from noisecast.privacy.noise import Purpose, RandomRoot, key_for
from noisecast.scenario import Scenario


def batch_key(scenario: Scenario, *, root: RandomRoot, repeat: int) -> bytes:
    """Batches belong to the problem and its sampler: optimizers compared at one repeat see the same."""
    return key_for(Purpose.BATCHES, *_source(scenario), root=root, repeat=repeat)


def example_key(scenario: Scenario, *, root: RandomRoot, repeat: int) -> bytes:
    """Fresh examples of a population, likewise."""
    return key_for(Purpose.EXAMPLE_NOISE, *_source(scenario), root=root, repeat=repeat)


def noise_key(scenario: Scenario, *, root: RandomRoot, repeat: int) -> bytes:
    """Privacy noise belongs to one scenario and shares its stream with nothing."""
    return key_for(Purpose.PRIVACY_NOISE, scenario.id, root=root, repeat=repeat)


def _source(scenario: Scenario) -> tuple[str, str]:
    return scenario.problem.fingerprint, repr(scenario.mechanism.sampler)
