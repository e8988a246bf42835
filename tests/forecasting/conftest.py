"""A landscape of forecasts that is known."""

import math

import numpy as np
import pytest

from noisecast.runners import Moments
from noisecast.runners.moments.forecast import Forecast


@pytest.fixture
def landscape(monkeypatch):
    """Make every forecast end in value(learning_rate, l2_clip_norm, noise_multiplier) -> (value, extrapolated).

    Extrapolated: whether, or the reasons why.
    """

    def pretend(value, metric="loss"):
        def forecasts(moments, scenarios, record_at):
            for scenario in scenarios:
                mechanism = scenario.mechanism
                found, beyond = value(scenario.optimizer, mechanism.l2_clip_norm, mechanism.noise_multiplier)
                steps = np.array(sorted({*record_at, scenario.num_steps}))
                worst = 0.0 if metric == "accuracy" else math.inf
                values = np.where(steps == 0, worst, found)
                reasons = beyond if isinstance(beyond, tuple) else ()
                yield Forecast(steps, {metric: values}, np.full(len(steps), bool(beyond)), 0.0, reasons)

        monkeypatch.setattr(Moments, "forecasts", forecasts)

    return pretend
