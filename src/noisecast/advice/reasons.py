"""Why a recommendation is what it is, and how sure: one sentence each, with the numbers in it."""

import math
from collections.abc import Sequence

from noisecast.advice.prediction import Prediction
from noisecast.advice.thresholds import TOO_CLOSE
from noisecast.forecasting.outcome import FORECAST_ERROR, Outcome
from noisecast.table import DIVERGED, EXTRAPOLATED

HARDLY = 0.01  # of the value: an untrained model that is behind by less is as good


def reason_for(chosen: Prediction, others: Sequence[Prediction], kept: Prediction | None, untrained: Outcome) -> str:
    """Against the next best optimizer, against the settings as they were tuned, and against not training at all.

    Args:
      chosen: the recommendation.   others: the best of each other optimizer.   kept: the best of the tuned settings.
      untrained: the model at the start.
    """
    name = chosen.scenario.optimizer.name
    parts = [f"{name} is forecast to end at {chosen.outcome.metric.replace('_', ' ')} {_value(chosen)}"]
    if others:
        other = min(others, key=lambda each: each.outcome.order)
        parts.append(f"{other.scenario.optimizer.name} at {_value(other)} ({_behind(chosen, other)})")
    if kept is None:
        parts.append("no tuned settings to keep")
    elif kept.scenario.id == chosen.scenario.id:
        parts.append("and nothing else gains enough to change the tuned settings")
    else:
        parts.append(f"the best of the tuned settings at {_value(kept)} ({_behind(chosen, kept)})")
    reason = ", ".join(parts) + "."
    low, high = chosen.band
    if chosen.outcome.lead_over(untrained) < HARDLY:
        reason += f" Hardly anything is learnt at this budget: the untrained model is at {untrained.value:.4g}."
    elif low <= untrained.value <= high:
        reason += f" One run may end no better than the untrained model, which is at {untrained.value:.4g}."
    return reason


def confidence_in(chosen: Prediction, others: Sequence[Prediction], passed_over: int) -> str:
    """How sure the choice of the optimizer is, which noise limits it, and what the guard rails say."""
    parts = [_certainty(chosen, others), _regime(chosen)]
    if chosen.outcome.status == EXTRAPOLATED:
        parts.append("even this forecast is extrapolated: check it by training")
    if chosen.outcome.status == DIVERGED:
        parts.append("every forecast diverges: tune anew at lower learning rates before you train")
    if passed_over:
        parts.append(f"{passed_over} better forecasts were passed over because they are extrapolated")
    return "; ".join(parts)


def _certainty(chosen: Prediction, others: Sequence[Prediction]) -> str:
    if not others:
        return "only one optimizer was asked about"
    by = min(chosen.outcome.lead_over(other.outcome) for other in others)
    nearest = min(others, key=lambda other: chosen.outcome.lead_over(other.outcome)).scenario.optimizer.name
    if by < TOO_CLOSE:
        return f"a toss-up with {nearest}: they differ by {max(by, 0):.1%}, which may be the forecast's error"
    if by < FORECAST_ERROR:
        return f"likely: ahead of {nearest} by {by:.1%}, the forecast's error being below {FORECAST_ERROR:.1%} mostly"
    return f"clear: ahead of {nearest} by {by:.1%}" if math.isfinite(by) else f"clear: {nearest} is not to be relied on"


def _regime(chosen: Prediction) -> str:
    """A bound that needs no example: clipped gradients are at most C long, so the batch's variance is at most C^2/B.

    Privacy has d (z C / B)^2 in total, d z^2 / B times as much.
    """
    mechanism = chosen.scenario.mechanism
    share = chosen.scenario.problem.num_params * mechanism.noise_multiplier**2 / mechanism.expected_batch_size
    if share >= 1:
        times = f"{share:,.0f}" if share >= 10 else f"{share:.2g}"
        return f"the variance of the privacy noise is at least {times} times that of the batch"
    return "batch noise may be the larger one"


def _behind(chosen: Prediction, other: Prediction) -> str:
    if other.outcome.status == DIVERGED:
        return "diverges"
    by = chosen.outcome.lead_over(other.outcome)
    text = f"{max(by, 0):.1%} worse" if math.isfinite(by) else "not to be relied on"
    return text if other.outcome.is_sound else f"{text}, {other.outcome.status}"


def _value(prediction: Prediction) -> str:
    return f"{prediction.outcome.value:.4g}" if math.isfinite(prediction.outcome.value) else "no finite value"
