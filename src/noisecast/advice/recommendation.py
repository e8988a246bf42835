"""What to use at one budget: the best of what was forecast there, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from noisecast.advice.prediction import Prediction
from noisecast.advice.reasons import confidence_in, reason_for
from noisecast.advice.search import Found
from noisecast.advice.tuning_price import TuningPrice
from noisecast.forecasting.outcome import Outcome
from noisecast.table import EXTRAPOLATED

WORTH_RETUNING = 2e-3  # of the value: a smaller gain does not change settings
WORTH_OTHER_BATCHES = 1e-2


@dataclass(frozen=True)
class Recommendation:
    """What to use at one budget. Non-private, unless the examples are public.

    Args:
      target_epsilon: the budget.
      chosen: the settings to use, with their forecast; `chosen.scenario` spends at most target_epsilon.
      by_optimizer: the best of every optimizer, chosen included.
      kept: the tuned settings at this budget's noise, one an optimizer that was tuned.
      price: of choosing `chosen` by trained runs instead.
      reason: one sentence.   confidence: how sure, and why.
    """

    target_epsilon: float
    chosen: Prediction
    by_optimizer: tuple[Prediction, ...]
    kept: tuple[Prediction, ...]
    price: TuningPrice
    reason: str
    confidence: str

    @property
    def best_kept(self) -> Prediction | None:
        return min(self.kept, key=order, default=None)


def choice(predictions: Sequence[Prediction]) -> tuple[Prediction, tuple[Prediction, ...]]:
    """The best of all, and the best of every optimizer."""
    names = dict.fromkeys(each.scenario.optimizer.name for each in predictions)
    by_optimizer = tuple(_settled([each for each in predictions if each.scenario.optimizer.name == n]) for n in names)
    return min(by_optimizer, key=order), by_optimizer


def recommended(
    epsilon: float, predictions: Sequence[Prediction], prices: dict[str, TuningPrice], untrained: Outcome
) -> Recommendation:
    chosen, by_optimizer = choice(predictions)
    kept = tuple(each for each in predictions if each.how == "kept")
    others = [each for each in by_optimizer if each is not chosen]
    best_kept = min(kept, key=order, default=None)
    return Recommendation(
        target_epsilon=epsilon,
        chosen=chosen,
        by_optimizer=by_optimizer,
        kept=kept,
        price=prices[chosen.scenario.id],
        reason=reason_for(chosen, others, best_kept, untrained),
        confidence=confidence_in(chosen, others, _passed_over(chosen, predictions)),
    )


def _settled(ways: Sequence[Prediction]) -> Prediction:
    """The way that is worth it: later ones change more, and have to gain more."""
    best = ways[0]
    for way in ways[1:]:
        least = WORTH_OTHER_BATCHES if way.how == "re-tuned, other batches" else WORTH_RETUNING
        if way.outcome.lead_over(best.outcome) >= least:
            best = way
    return best


def _passed_over(chosen: Prediction, predictions: Sequence[Prediction]) -> int:
    """Predictions that look better and are extrapolated."""
    if not chosen.outcome.is_sound:
        return 0
    return sum(
        each.outcome.status == EXTRAPOLATED and each.outcome.order[1] < chosen.outcome.order[1] for each in predictions
    )


def order(found: Prediction | Found) -> tuple[int, float]:
    return found.outcome.order
