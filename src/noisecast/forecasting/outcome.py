"""How a forecast run ends, and which of two endings is the better one."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from noisecast.runners.moments import Moments
from noisecast.runners.moments.forecast import LARGEST_SUBSAMPLE_ERROR, OF_A_FIT, Forecast, Rough
from noisecast.scenario import Scenario
from noisecast.table import DIVERGED, EXTRAPOLATED, METRICS, OK, SOUND

Range = tuple[float, float]
# Of the loss: of the 108 IMDB cells of docs/accuracy.md 95 % are off by less. Not where everything is clipped.
FORECAST_ERROR = 0.03
ROUGHLY = 1.5  # times what it is forecast to be counts a loss that is known roughly only
NEGLIGIBLE = 1e-3  # a loss: smaller ones are as good, lest a search go to any length for them
BAND = (
    "±: one run is predicted to end within it, 19 times out of 20 (two standard deviations of a run and "
    f"{100 * FORECAST_ERROR:g} % for the forecast's own error)."
)  # the one meaning of ± beside a forecast


@dataclass(frozen=True)
class Outcome:
    """How a forecast run ends.

    Args:
      metric: what was asked for.
      value: of the metric at the last step; inf or NaN where it diverges.
      spread: its predicted standard deviation over runs; NaN where none is predicted.
      status: `ok`, `extrapolated` (the closure is out of its depth), `simulated` (runs took its place) or `diverged`.
      reasons: why it may be off, one sentence each.
    """

    metric: str
    value: float
    spread: float
    status: str
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, forecast: Forecast, metric: str = "loss") -> "Outcome":
        """The last step of a forecast. Raises: ValueError where it does not say this metric."""
        if metric not in forecast.metrics:
            raise ValueError(f"Expected a metric among {', '.join(forecast.metrics)}, got {metric}.")
        value = float(forecast.metrics[metric][-1])
        spread = forecast.metrics.get(f"{metric}_std")
        reasons = forecast.reasons
        if forecast.subsample_error > LARGEST_SUBSAMPLE_ERROR:
            reasons = (
                *reasons,
                f"A subsample this small moves the loss by about {100 * forecast.subsample_error:.2g} %.",
            )
        return cls(
            metric=metric,
            value=value,
            spread=math.nan if spread is None else float(spread[-1]),
            status=forecast.status[-1] if math.isfinite(value) else DIVERGED,
            reasons=reasons,
        )

    @property
    def is_sound(self) -> bool:
        """Whether it is to be relied upon."""
        return self.status in SOUND

    @property
    def half_width(self) -> float:
        """Of the band: one run is predicted to end within it, 19 times out of 20.

          sqrt((2 spread)^2 + (0.03 value)^2)

        spread is the forecast's standard deviation of one run (0 where it predicts none), 3 % the forecast's own
        error: 95 % of the 108 IMDB cells of docs/accuracy.md are off by less; where everything is clipped it may be
        more. NaN where it diverges.

        >>> Outcome("loss", 0.5, 0.01, OK).half_width
        0.025
        """
        if not math.isfinite(self.value):
            return math.nan
        return math.hypot(2 * (0.0 if math.isnan(self.spread) else self.spread), FORECAST_ERROR * self.value)

    @property
    def is_nearly_gone(self) -> bool:
        """Whether it is out of its depth for nothing else than that hardly any loss is left.

        Of such a loss the order of magnitude is known, and that it is smaller than any that is not.
        """
        return self.status == EXTRAPOLATED and self.reasons == (OF_A_FIT,)

    @property
    def is_known_roughly(self) -> bool:
        """Whether it is out of its depth, not nearly gone, for nothing that its order of magnitude does not survive."""
        is_rough = bool(self.reasons) and all(isinstance(reason, Rough) for reason in self.reasons)
        return self.status == EXTRAPOLATED and is_rough and not self.is_nearly_gone

    @property
    def cost(self) -> float:
        """The value, so that smaller is better."""
        return -self.value if METRICS[self.metric].larger_is_better else self.value

    @property
    def order(self) -> tuple[int, float]:
        """Smaller is better: what diverges is worse than what is out of its depth, and that worse than any other.

        But for what is known roughly: it counts as `ROUGHLY` times as much, and as no more where it is nearly gone.

        >>> Outcome("loss", 1.0, 0.1, OK).order < Outcome("loss", 0.5, 0.1, EXTRAPOLATED).order
        True
        >>> Outcome("loss", 0.01, 0.1, EXTRAPOLATED, (OF_A_FIT,)).order < Outcome("loss", 1.0, 0.1, OK).order
        True
        >>> roughly = Outcome("loss", 0.5, 0.1, EXTRAPOLATED, (Rough("The run is short."),))
        >>> roughly.order < Outcome("loss", 1.0, 0.1, OK).order, roughly.order < Outcome("loss", 0.7, 0.1, OK).order
        (True, False)
        >>> nearly_none = [Outcome("loss", loss, 0.0, EXTRAPOLATED, (OF_A_FIT,)) for loss in (1e-4, 1e-6)]
        >>> nearly_none[0].lead_over(nearly_none[1])
        0.0
        >>> Outcome("accuracy", 0.9, 0.1, OK).order < Outcome("accuracy", 0.8, 0.1, OK).order
        True
        """
        value, status = self.cost, OK if self.is_sound else self.status
        if self.is_nearly_gone:
            status, value = OK, max(value, NEGLIGIBLE) if value > 0 else value
        elif self.is_known_roughly:
            status, value = OK, value * ROUGHLY if value > 0 else value / ROUGHLY
        return (OK, EXTRAPOLATED, DIVERGED).index(status), value if math.isfinite(value) else math.inf

    def lead_over(self, other: "Outcome") -> float:
        """By which share of its own value the other is worse; inf or -inf where only one is to be relied upon.

        >>> Outcome("loss", 1.0, 0.1, OK).lead_over(Outcome("loss", 1.5, 0.1, OK))
        0.5
        >>> roughly = Outcome("loss", 1.4, 0.1, EXTRAPOLATED, (Rough("The run is short."),))
        >>> Outcome("loss", 1.0, 0.1, OK).lead_over(roughly), roughly.lead_over(roughly)
        (inf, 0.0)
        """
        (rank, value), (other_rank, other_value) = self.order, other.order
        if self.order == other.order:
            return 0.0
        is_known_as_well = rank == other_rank and self.is_known_roughly == other.is_known_roughly
        if not is_known_as_well or not value or not math.isfinite(other_value - value):
            return math.inf if self.order < other.order else -math.inf
        return (other_value - value) / abs(value)


def cheap(moments: Moments, metric: str) -> Moments:
    """Few examples, features and time steps: enough to see where a minimum lies, at a tenth of the cost."""
    return replace(
        moments,
        full_covariance_features=min(moments.full_covariance_features, 30),
        time_steps=min(moments.time_steps, 4),
        subsample=min(moments.subsample or 2000, 2000),
        loss_alone=metric == "loss",
        most_runs=0,
    )


@dataclass(frozen=True)
class Asker:
    """Forecasts how scenarios end, to compare them: what a subsample adds, it adds to all. By the closure alone, whose
    numbers change smoothly from cell to cell, and cost little.

    Args:
      metric: of the last step.   moments: the setting.   tick: called after every forecast.
      forecasters: who forecasts; None: this process.
    """

    metric: str
    moments: Moments
    tick: Callable[[], None]
    forecasters: Callable[[Moments, Sequence[Scenario], Sequence[int]], Iterator[Forecast]] | None = None

    def __call__(self, scenarios: Sequence[Scenario]) -> list[Outcome]:
        outcomes = []
        ask = self.forecasters or Moments.forecasts
        for found in ask(replace(self.moments, most_runs=0), scenarios, []) if scenarios else ():
            outcomes.append(Outcome.of(found._replace(subsample_error=0.0), self.metric))
            self.tick()
        return outcomes
