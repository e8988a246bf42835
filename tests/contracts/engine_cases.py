"""What engines are tried on: small problems, optimizers, samplers and schedules, and the same for the plain trainer."""

import dataclasses
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from noisecast import (
    DPSGD,
    DPAdam,
    DPSignSGD,
    FixedSize,
    Poisson,
    SampledGaussian,
    Scenario,
    Shuffled,
    linear_model,
    matrix_factorization,
)
from noisecast.engines.dense import DenseRun
from noisecast.engines.row_sparse import RowSparseRun
from noisecast.optimizers import CONSTANT, Schedule
from noisecast.privacy.mechanism import Adjacency
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.datasets import Dataset, Ratings, label_sets

sys.path.append(str(Path(__file__).parents[1] / "engines"))
import reference

SEED_DATA, SEED_ENGINE = 900_001, 900_002
FALSE_ALARM, COMPARISONS = 1e-6, 200
THRESHOLD = FALSE_ALARM / COMPARISONS

N, BATCH_SIZE, NUM_STEPS, FEW_STEPS = 160, 8, 120, 40
NOISE_MULTIPLIER, CLIP = 1.0, 0.6
ENGINES: dict[str, Any] = {"row_sparse": RowSparseRun, "dense": DenseRun}
OPTIMIZERS = {
    "sgd": (DPSGD(learning_rate=1.0), reference.dp_sgd),
    "sign": (DPSignSGD(learning_rate=0.03), reference.dp_sign_sgd),
    "adam": (DPAdam(learning_rate=0.03), reference.dp_adam),
}
SAMPLERS = {
    "poisson": (Poisson.for_batch_size(BATCH_SIZE, N), reference.poisson(N, BATCH_SIZE)),
    "fixed-size": (FixedSize(BATCH_SIZE, N), reference.fixed_size(N, BATCH_SIZE)),
    "shuffled": (Shuffled(BATCH_SIZE, N), reference.shuffled(N, BATCH_SIZE)),
}
# The learning rate of every step, and the largest number of which all of them are multiples (what a sign moves by).
STAIRS = [1.0] * 37 + [0.5] * 53 + [2.0] * 30
SCHEDULES = {"": (CONSTANT, None, 1.0), "stairs": (Schedule((0, 37, 90), (1.0, 0.5, 2.0)), STAIRS, 0.5)}
PROBLEMS = ("logistic", "softmax", "multi-label", "factorization")
ROOT = RandomRoot.from_insecure_seed(SEED_ENGINE)


class Case(NamedTuple):
    engine: str
    optimizer: str
    sampler: str
    problem: str
    schedule: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, self))


def sparse_features(num_features: int, num_never: int) -> np.ndarray:
    """(N, num_features), four non-zeros a row: a few common columns, many rare ones, and some that never occur."""
    rng = np.random.default_rng([SEED_DATA, num_features])
    popularity = 1.0 / (1 + np.arange(num_features - num_never)) ** 1.2
    features = np.zeros((N, num_features), np.float32)
    for row in features:
        at = rng.choice(len(popularity), 4, replace=False, p=popularity / popularity.sum())
        row[at] = rng.choice([-1, 1], 4) * rng.uniform(0.3, 1.2, 4)
    return features


@cache
def ratings() -> Ratings:
    """Twelve users and twelve items, of which two and three have no rating; some have many, some one or two."""
    rng = np.random.default_rng([SEED_DATA, 5])
    popularity = 1.0 / (1 + np.arange(10)) ** 1.2
    user = rng.choice(10, N, p=popularity / popularity.sum())
    item = rng.choice(9, N, p=popularity[:9] / popularity[:9].sum())
    taste = rng.normal(size=(2, 12, 2))
    rating = np.clip(np.round(3 + (taste[0, user] * taste[1, item]).sum(axis=1) + 0.5 * rng.normal(size=N)), 1, 5)
    return Ratings(user, item, rating, num_users=12, num_items=12)


@cache
def problem(name: str):
    if name == "factorization":
        return matrix_factorization(ratings(), dim=3, init_std=0.3, public_init_seed=SEED_DATA)
    shapes = {"logistic": (60, 6, 2), "softmax": (19, 2, 3), "multi-label": (22, 2, 3)}
    num_features, num_never, num_classes = shapes[name]
    features = sparse_features(num_features, num_never)
    rng = np.random.default_rng([SEED_DATA, num_classes])
    scores = features @ rng.normal(size=(num_features, num_classes)) + rng.gumbel(size=(N, num_classes))
    labels = (scores + np.arange(num_classes)).argmax(axis=1).astype(np.int32)
    if name == "multi-label":  # none to all of three
        labels = label_sets([np.flatnonzero(row > 1) for row in scores])
    data = Dataset(name, scipy.sparse.csr_array(features), labels, tuple("abc"[:num_classes]))
    return linear_model(data)


@cache
def model(name: str) -> Any:
    data = problem(name)
    if name == "factorization":
        start = np.asarray(data.initial_params(), np.float64)
        return reference.Factorization(ratings().user, 12 + ratings().item, ratings().rating - 3.0, 3, start)
    inputs = np.hstack([sparse_features(data.num_features, 6 if name == "logistic" else 2), np.ones((N, 1))])
    return reference.Model(inputs.astype(np.float64), np.asarray(data.train.labels), data.num_outputs)


def scenario(case: Case, *, num_steps=NUM_STEPS, z=NOISE_MULTIPLIER, clip=CLIP, rate=1.0, delta=1e-5) -> Scenario:
    optimizer = OPTIMIZERS[case.optimizer][0]
    adjacency = Adjacency.REPLACE_ONE if case.sampler == "fixed-size" else Adjacency.ADD_OR_REMOVE_ONE
    mechanism = SampledGaussian(
        noise_multiplier=z, l2_clip_norm=clip, sampler=SAMPLERS[case.sampler][0], adjacency=adjacency
    )
    return Scenario(
        problem=problem(case.problem),
        mechanism=mechanism,
        optimizer=dataclasses.replace(optimizer, learning_rate=rate * optimizer.learning_rate),
        num_steps=num_steps,
        target_delta=delta,
        schedule=SCHEDULES[case.schedule][0],
    )


def a_run(case: Case, repeats=(0, 1)) -> Any:
    group = [scenario(case, num_steps=NUM_STEPS, delta=delta) for delta in (1e-5, 1e-6, 1e-7)]
    return ENGINES[case.engine](group, repeats=repeats, root=ROOT)
