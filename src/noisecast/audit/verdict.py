"""What an audit found: the lower bound that was measured beside the upper bound that is proved."""

from dataclasses import dataclass

from noisecast.audit.bounds import LowerBound
from noisecast.privacy.accounting import epsilon_text


@dataclass(frozen=True)
class Verdict:
    """One mechanism, audited.

    Args:
      what: the attack and its setting, in words.   optimizer, engine: what ran.
      epsilon: the accountant's, an upper bound; 0 for a null audit, whose two data sets are one.
      bound: the attack's, a lower one.   runs: trained on each of the two data sets; 1 with many canaries in one run.
      observer: what the attacker was shown.
    """

    what: str
    optimizer: str
    engine: str
    epsilon: float
    bound: LowerBound
    runs: int
    observer: str

    @property
    def is_consistent(self) -> bool:
        """Whether the measured lower bound leaves the accounted epsilon standing."""
        return self.bound.epsilon <= self.epsilon

    def contradiction(self) -> str | None:
        """None, or the sentence that says what is wrong."""
        if self.is_consistent:
            return None
        return (
            f"{self.optimizer} with the engine {self.engine} ({self.what}) is accounted as epsilon = "
            f"{epsilon_text(self.epsilon)}, but an attack proves at least {self.bound.epsilon:.3g} at delta "
            f"{self.bound.delta:g} with confidence {self.bound.confidence:.4%}: do not release a model that it trained."
        )
