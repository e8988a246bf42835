"""What a scenario is forecast to end with, and the band around it."""

from dataclasses import dataclass
from typing import Any, Literal

from noisecast.forecasting.outcome import Outcome
from noisecast.runners.moments.forecast import Forecast
from noisecast.scenario import Scenario
from noisecast.table import METRICS

How = Literal["kept", "re-tuned", "re-tuned, other batches"]


@dataclass(frozen=True)
class Prediction:
    """One optimizer's settings at one budget, and their forecast. Non-private.

    Args:
      scenario: the settings.   how: "kept" as they were tuned, or what was changed.
      outcome: the metric that was asked for, at the last step.
      metrics: all metrics of the forecast there.
    """

    scenario: Scenario
    how: How
    outcome: Outcome
    metrics: dict[str, float]

    @classmethod
    def of(cls, scenario: Scenario, how: How, forecast: Forecast, metric: str) -> "Prediction":
        last = {name: float(values[-1]) for name, values in forecast.metrics.items()}
        return cls(scenario, how, Outcome.of(forecast, metric), last)

    @property
    def half_width(self) -> float:
        """Of the band: one run is predicted to end within it, 19 times out of 20 (`Outcome.half_width`)."""
        return self.outcome.half_width

    @property
    def band(self) -> tuple[float, float]:
        return self.outcome.value - self.half_width, self.outcome.value + self.half_width

    @property
    def larger_is_better(self) -> bool:
        return METRICS[self.outcome.metric].larger_is_better is True

    def as_dict(self) -> dict[str, Any]:
        """Settings and numbers, for JSON."""
        columns = self.scenario.columns()
        names = (
            "scenario", "optimizer", "learning_rate", "l2_clip_norm", "noise_multiplier", "expected_batch_size",
            "num_steps", "epsilon", "target_delta",
        )  # fmt: skip
        low, high = self.band
        return {name: columns[name] for name in names} | {
            "how": self.how,
            "metric": self.outcome.metric,
            "value": self.outcome.value,
            "low": low,
            "high": high,
            "spread_of_one_run": self.outcome.spread,
            "status": self.outcome.status,
            "reasons": list(self.outcome.reasons),
            "non_private_metrics": self.metrics,
        }
