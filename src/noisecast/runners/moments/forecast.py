"""What a forecast is, whichever problem it is of, and what solves one."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from noisecast.scenario import Scenario
from noisecast.table import EXTRAPOLATED, OK, SIMULATED

LARGEST_SUBSAMPLE_ERROR = 0.02  # of the loss: beyond it all rows are `extrapolated`
Metrics = dict[str, float]
FITTED = 0.05  # of the loss at the start: what is left then is made far out in the examples' laws, where none is known


class Rough(str):
    """A reason for which a loss is known roughly, but known: its order of magnitude holds."""


OF_A_FIT = Rough(
    f"Less than {FITTED:.0%} of the loss at the start is left: few examples make it, far out in the laws of their "
    "outputs, which are taken for Gaussian; it may be off by tens of per cent, and by a factor where it is nearly gone."
)


class Forecast(NamedTuple):
    """What a scenario's run will do. Computed from the examples without noise, therefore non-private.

    Args:
      steps: where the metrics are recorded.   metrics: by name, (number of steps,) each.
      extrapolated: whether the closure is out of its depth there; (number of steps,).
      subsample_error: estimated share of the loss by which a subsample moves it; () >= 0, 0 without one.
      reasons: sentences, why it may be off and by how much; empty where nothing speaks against it.
      simulated: whether it is a mean over runs of the optimizer there; (number of steps,). None: nowhere.
    """

    steps: np.ndarray
    metrics: dict[str, np.ndarray]
    extrapolated: np.ndarray
    subsample_error: float
    reasons: tuple[str, ...] = ()
    simulated: np.ndarray | None = None

    @property
    def status(self) -> list[str]:
        """Of each step: `extrapolated`, `simulated` or `ok`; a metric that is no finite number is `diverged` there."""
        is_beyond = self.extrapolated | (self.subsample_error > LARGEST_SUBSAMPLE_ERROR)
        by_runs = np.zeros(len(self.steps), bool) if self.simulated is None else self.simulated
        return np.where(is_beyond, EXTRAPOLATED, np.where(by_runs, SIMULATED, OK)).tolist()


class Solver(Protocol):
    """A module that forecasts one kind of problem."""

    def handles(self, problem: Any) -> bool: ...

    def why_unsupported(self, scenario: Scenario) -> str | None:
        """None, or one sentence: what it cannot forecast, why, and what to use instead."""
        ...

    def prepare(self, problem: Any, settings: Any) -> Any:
        """What all scenarios on a problem share. `settings` is the `Moments` runner."""
        ...

    def forecast(self, scenario: Scenario, prepared: Any, record_at: Sequence[int], settings: Any) -> Forecast:
        """Forecast at the steps `record_at`, sorted, the last step among them."""
        ...


def collected(
    recorded: dict[int, tuple[Metrics, bool]], subsample_error: float = 0.0, reasons: Sequence[str] = ()
) -> Forecast:
    steps = np.array(sorted(recorded))
    found = [recorded[step] for step in steps]
    # Training is in single precision: what leaves it there has diverged here.
    metrics = {name: _within_single([one[name] for one, _ in found]) for name in found[0][0]}
    return Forecast(steps, metrics, np.array([beyond for _, beyond in found]), subsample_error, tuple(reasons))


def _within_single(values: Sequence[float]) -> np.ndarray:
    found = np.array(values, np.float64)
    return np.where(np.abs(found) > np.finfo(np.float32).max, np.inf, found)
