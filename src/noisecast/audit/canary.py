"""The worst-case canary: a record whose clipped gradient has one direction and exactly the length of the clip norm.

A canary owns `WIDTH` columns that no other row has, so its gradient is orthogonal to all others and whoever looks along
these columns sees the canary and the noise, nothing else. Its features are so large, and the learning rate so small,
that the gradient is far longer than C at every step: clipped, it is C u, the same at every step. Spread over many
columns because a sign shows little of one large number and much of many small ones.

Two data sets with and without it, as the mechanism's neighbours are:

  add/remove, Poisson      D has one row more
  add/remove, shuffled     the row is blank in D': sizes are public, a zeroed-out record has no gradient there
  replace one              the row's label is the other in D', so its gradient is -C u
  stream                   one step on a quadratic: gradient C u against 0 or -C u
"""

import math
from typing import Any

import numpy as np
import scipy.sparse

from noisecast import engines
from noisecast.optimizers import DPSGD, Optimizer, with_learning_rate
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.sampling import Poisson, Stream
from noisecast.problems.datasets import Dataset
from noisecast.problems.linear import linear_model
from noisecast.problems.quadratic import quadratic
from noisecast.scenario import Scenario

WIDTH = 16
NUM_COLUMNS = 4 * WIDTH  # most of them nobody's: rows that only postponed noise ever moves
LARGEST_LOGIT = 0.1  # of the canary in training: its gradient stays as long as it was
CANARY = slice(1, 1 + WIDTH)  # its columns; column 0 is everybody else's
ENGINES = ("row_sparse", "dense", "simulate")


def pair(
    mechanism: SampledGaussian, optimizer: Optimizer, engine: str, num_steps: int, *, with_canary: bool = True
) -> tuple[Scenario, Scenario]:
    """The same question on D and on D'; without the canary, D' twice.

    Args:
      optimizer: its learning rate is ours to choose: epsilon does not depend on it.
      engine: "row_sparse", "dense" or "simulate".
    Raises: ValueError: no such engine, or one that this sampler has no use for.
    """
    _check_engine(engine, mechanism)
    optimizer = with_learning_rate(optimizer, learning_rate(mechanism, optimizer, num_steps))
    problems = _quadratics(mechanism) if engine == "simulate" else _data_sets(mechanism, engine)
    if not with_canary:
        problems = problems[1], problems[1]
    inside, outside = (
        Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps) for problem in problems
    )
    computed_by = engines.explain(inside)
    if not computed_by.startswith(f"Computed by the engine {engine}."):
        raise ValueError(f"Expected a mechanism that the engine {engine} computes, got: {computed_by}")
    return inside, outside


def learning_rate(mechanism: SampledGaussian, optimizer: Optimizer, num_steps: int) -> float:
    """So small that the canary's logit stays below LARGEST_LOGIT however the noise falls (6 standard deviations)."""
    z, clip, batch = mechanism.noise_multiplier, mechanism.l2_clip_norm, mechanism.expected_batch_size
    if isinstance(optimizer, DPSGD):
        farthest = clip * (num_steps + 6 * z * math.sqrt(num_steps)) / batch
    else:
        farthest = 4 * num_steps * math.sqrt(WIDTH)
    return LARGEST_LOGIT / _size(mechanism) / farthest


def _size(mechanism: SampledGaussian) -> float:
    """|x| of a row: with a residual near 1/2 its gradient is hundreds of clip norms long."""
    return 1e3 * max(1.0, mechanism.l2_clip_norm)


def _data_sets(mechanism: SampledGaussian, engine: str) -> tuple[Any, Any]:
    sampler: Any = mechanism.sampler
    rows = np.zeros((max(2, round(sampler.num_examples)), NUM_COLUMNS), np.float32)
    labels = np.arange(len(rows), dtype=np.int32) % 2
    rows[1:, 0] = _size(mechanism)
    rows[0, CANARY] = _size(mechanism) / math.sqrt(WIDTH)
    labels[0] = 1
    inside = _model(rows, labels, engine)
    if mechanism.adjacency == Adjacency.REPLACE_ONE:
        labels[0] = 0
    elif isinstance(sampler, Poisson):
        rows, labels = rows[1:], labels[1:]
    else:
        rows[0] = 0.0
    return inside, _model(rows, labels, engine)


def _model(rows: np.ndarray, labels: np.ndarray, engine: str) -> Any:
    features = scipy.sparse.csr_array(rows) if engine == "row_sparse" else rows.copy()
    return linear_model(Dataset("canary", features, labels.copy(), ("0", "1")))


def _quadratics(mechanism: SampledGaussian) -> tuple[Any, Any]:
    """Gradients h x far above the clip: -C u, and 0 or C u, of a population whose examples are all alike."""
    # A hundred times as far out as training moves: the gradient stays, and float32 still resolves the step.
    start = 100.0 * LARGEST_LOGIT / _size(mechanism)
    steep = 10.0 * mechanism.l2_clip_norm / start
    curvatures = (-steep, steep if mechanism.adjacency == Adjacency.REPLACE_ONE else 0.0)
    inside, outside = (quadratic(np.full(WIDTH, h), start, example_noise_std=0.0) for h in curvatures)
    return inside, outside


def _check_engine(engine: str, mechanism: SampledGaussian) -> None:
    if engine not in ENGINES:
        raise ValueError(f"Expected an engine among {', '.join(ENGINES)}, got {engine}.")
    if isinstance(mechanism.sampler, Stream) != (engine == "simulate"):
        raise ValueError(
            f"Expected the engine simulate for a stream and another for a data set, got {engine} for "
            f"{mechanism.sampler}."
        )
    if mechanism.noise_multiplier == 0:
        raise ValueError("Expected noise to audit, got noise_multiplier 0: its epsilon is infinite, and no audit lies.")


def along_canary(params: np.ndarray, scenario: Scenario) -> np.ndarray:
    """Params (..., d) projected on u, from where training starts; (...)."""
    moved = np.asarray(params, np.float64) - np.asarray(scenario.problem.initial_params(), np.float64)
    columns = moved if scenario.problem.num_examples is None else moved[..., CANARY]
    return columns.sum(axis=-1) / math.sqrt(WIDTH)
