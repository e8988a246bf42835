"""Rows of the table with known answers."""

import math
import zlib

import numpy as np

from noisecast.problems.datasets import Dataset
from noisecast.problems.linear import linear_model
from noisecast.reproduction.tasks import IMDB
from noisecast.table import DIVERGED, OK
from noisecast.theory.optimal import nominal_epsilon

NUM_EXAMPLES = 25_000
SETTINGS = ("problem", "optimizer", "learning_rate", "noise_multiplier", "l2_clip_norm", "expected_batch_size")


def imdb_row(*, value, batch_size=64.0, noise_multiplier=1.0, **settings):
    """One row about the IMDB task."""
    num_steps = int(NUM_EXAMPLES // batch_size) * IMDB.epochs
    q = batch_size / NUM_EXAMPLES
    nominal = nominal_epsilon(
        noise_multiplier, sampling_probability=q, num_steps=num_steps, target_delta=IMDB.target_delta
    )
    row = {
        "scenario": "", "problem": "logistic on imdb", "optimizer": "DP-SGD", "learning_rate": 1.0,
        "noise_multiplier": noise_multiplier, "l2_clip_norm": 0.5, "sampling_probability": q,
        "expected_batch_size": batch_size, "num_steps": num_steps, "epsilon": 1.5 * nominal,
        "nominal_epsilon": nominal, "target_delta": IMDB.target_delta, "runner": "training", "seed": 0,
        "step": num_steps, "metric": "loss", "value": value, "status": OK if math.isfinite(value) else DIVERGED,
    }  # fmt: skip
    row |= settings
    return row | {"scenario": repr([row[name] for name in SETTINGS])}


def draw_for(*names):
    """A standard normal that belongs to these names, today and tomorrow."""
    return float(np.random.default_rng(zlib.crc32(repr(names).encode())).standard_normal())


def toy_problem(data_dir=None):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(128, 3)).astype(np.float32)
    parts = [Dataset("toy", features, rng.integers(2, size=128), ("a", "b")) for _ in range(2)]
    return linear_model(*parts)
