"""Noisecast: differentially private training that says beforehand what the privacy noise will do.

Names are imported when first used, so that accounting and theory never wait for JAX.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name: the module it lives in.
_HOMES = {
    "Adjacency": "noisecast.privacy.mechanism",
    "FixedSize": "noisecast.privacy.sampling",
    "Poisson": "noisecast.privacy.sampling",
    "SampledGaussian": "noisecast.privacy.mechanism",
    "Shuffled": "noisecast.privacy.sampling",
    "Stream": "noisecast.privacy.sampling",
    "calibrate_noise_multiplier": "noisecast.privacy.calibration",
    "epsilon_spent": "noisecast.privacy.accounting",
    "nominal_epsilon": "noisecast.privacy.accounting",
    "bundled": "noisecast.problems.datasets",
    "jax_model": "noisecast.problems.jax_model",
    "linear_model": "noisecast.problems.linear",
    "load_file": "noisecast.problems.datasets",
    "matrix_factorization": "noisecast.problems.matrix_factorization",
    "quadratic": "noisecast.problems.quadratic",
    "quartic": "noisecast.problems.quartic",
    "DPSGD": "noisecast.optimizers",
    "DPAdam": "noisecast.optimizers",
    "DPSignSGD": "noisecast.optimizers",
    "Schedule": "noisecast.optimizers",
    "Question": "noisecast.question",
    "Scenario": "noisecast.scenario",
    "ClosedForm": "noisecast.runners",
    "Moments": "noisecast.runners",
    "Sde": "noisecast.runners",
    "Training": "noisecast.runners",
    "answer": "noisecast.runners",
    "forecast_best": "noisecast.forecasting",
    "forecast_crossing": "noisecast.forecasting",
    "Compose": "noisecast.sweeps.selection",
    "Public": "noisecast.sweeps.selection",
    "RepeatSelect": "noisecast.sweeps.selection",
    "Store": "noisecast.sweeps",
    "TrialDistribution": "noisecast.privacy.tuning",
    "TrialKind": "noisecast.privacy.tuning",
    "composed_epsilon": "noisecast.privacy.tuning",
    "repeat_select_epsilon": "noisecast.privacy.tuning",
    "settled_order": "noisecast.privacy.tuning",
    "run_sweep": "noisecast.sweeps",
    "select": "noisecast.sweeps.selection",
    "train": "noisecast.release",
    "Account": "noisecast.ledger",
    "PrivacyLedger": "noisecast.ledger",
    "DPLogisticRegression": "noisecast.estimators",
    "DPMatrixFactorization": "noisecast.estimators",
    "DPSoftmaxRegression": "noisecast.estimators",
    "advise": "noisecast.advice.advise",
    "advise_from_numbers": "noisecast.advice.numbers",
    "private_probe": "noisecast.advice.probe",
    "transfer": "noisecast.advice.transfer",
}

__all__ = [*_HOMES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'noisecast' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
