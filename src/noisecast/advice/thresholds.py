"""The budgets at which the better optimizer changes, read off the forecasts at the budgets that were asked about."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from noisecast.advice.prediction import Prediction

TOO_CLOSE = 0.01  # of the loss: leads below it may be the forecast's own error


@dataclass(frozen=True)
class Threshold:
    """One change of the better optimizer.

    Args:
      epsilon: where straight lines, in its logarithm, through the neighbouring forecasts meet.
      between: the budgets on either side, between which it lies if there is one change.
      better_below, better_above: the better optimizer at smaller and at larger epsilon.
      is_close: whether on one side the lead is below 1 %, so that the change may be the forecast's error.
    """

    epsilon: float
    between: tuple[float, float]
    better_below: str
    better_above: str
    is_close: bool


def thresholds(by_epsilon: Mapping[float, Sequence[Prediction]]) -> tuple[Threshold, ...]:
    """Where the best optimizer changes between neighbouring budgets, by increasing epsilon: none, one or more.

    Args:
      by_epsilon: at each budget one prediction an optimizer; budgets with fewer than two are left out.
    """
    levels = [(epsilon, _by_name(found)) for epsilon, found in sorted(by_epsilon.items()) if len(found) > 1]
    changes = []
    for (low, below), (high, above) in pairwise(levels):
        first, second = _winner(below), _winner(above)
        if first == second or second not in below or first not in above:
            continue
        leads = _lead(below, first, second), _lead(above, first, second)  # > 0 and < 0
        share = leads[0] / (leads[0] - leads[1]) if math.isfinite(leads[0]) and math.isfinite(leads[1]) else 0.5
        changes.append(
            Threshold(
                epsilon=math.exp((1 - share) * math.log(low) + share * math.log(high)),
                between=(low, high),
                better_below=first,
                better_above=second,
                is_close=min(abs(lead) for lead in leads) < TOO_CLOSE,
            )
        )
    return tuple(changes)


def _by_name(found: Sequence[Prediction]) -> dict[str, Prediction]:
    return {prediction.scenario.optimizer.name: prediction for prediction in found}


def _winner(found: Mapping[str, Prediction]) -> str:
    return min(found, key=lambda name: found[name].outcome.order)


def _lead(found: Mapping[str, Prediction], first: str, second: str) -> float:
    """Of the first over the second, as a share of their mean: straight lines need it to be symmetric."""
    values = [found[name].outcome.order[1] for name in (first, second)]
    by = found[first].outcome.lead_over(found[second].outcome)
    return (values[1] - values[0]) / (sum(abs(value) for value in values) / 2) if math.isfinite(by) and by else by
