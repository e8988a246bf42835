"""Planning with the forecast: the best learning rate and clip norm, and the noise at which the best optimizer changes.

Nothing is trained and no noise is drawn. All is computed from the examples without noise, therefore non-private: give
a public proxy of the data to plan, or count what is chosen here as learnt from them.
"""

from noisecast.forecasting.best import BestForecast, forecast_best
from noisecast.forecasting.crossing import Crossing, CrossingForecast, Theorem, forecast_crossing
from noisecast.forecasting.outcome import Outcome

__all__ = [
    "BestForecast",
    "Crossing",
    "CrossingForecast",
    "Outcome",
    "Theorem",
    "forecast_best",
    "forecast_crossing",
]
