"""A public stand-in for private data: examples drawn from public numbers alone, on which settings are tried out.

What is learnt from it costs no privacy, because no private row was looked at. It may be wrong, by as much as the
stand-in differs from the data; docs/estimators.md has measurements.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from noisecast.problems.datasets import Dataset, Ratings

# Decided once, by comparing learning rates on the public data sets of docs/estimators.md. Nothing is read at run time.
MOST_EXAMPLES, MOST_FEATURES, MOST_CLASSES = 3_000, 1_000, 4
MOST_RATINGS = 100_000
WORDS_A_ROW = 60
ZIPF_OFFSET = 5.0
SCORE_STD = 20.0  # of the planted scores: most labels are then sure
ALIGNMENT = 0.25  # planted weights are larger where features vary more, by this power of their variance
PUBLIC_SEED = 20_262_511


@dataclass(frozen=True)
class Shape:
    """What is public about the rows of a classification task.

    Args:
      num_examples: n, declared or taken as public; >= 1.   num_features: p; >= 1.   num_classes: >= 2.
      row_norm: the norm that rows have, about; > 0.
      is_sparse: rows of a wide table with few entries, as texts are.
    """

    num_examples: int
    num_features: int
    num_classes: int
    row_norm: float
    is_sparse: bool


def stand_in(shape: Shape) -> Dataset:
    """Examples of about this shape: the same whenever it is asked for.

    Sparse rows are texts: word j is drawn with probability ~ 1 / (j + 5) and weighted by how rare it is. Dense rows are
    Gaussian around a common mean, with variances ~ 1 / k. Rows are scaled to row_norm. Labels are drawn by planted
    scores x . w of standard deviation 20. Large tables are represented by smaller ones: the noise that a logit feels
    depends on the norm of its row, not on the number of columns.

    >>> data = stand_in(Shape(500, 20, 2, row_norm=1.0, is_sparse=False))
    >>> data.features.shape, round(float(np.linalg.norm(data.features[0])), 3)
    ((500, 20), 1.0)
    """
    rng = np.random.default_rng([PUBLIC_SEED, shape.num_features, shape.num_classes])  # public: it draws no noise
    num_examples, num_features = min(shape.num_examples, MOST_EXAMPLES), min(shape.num_features, MOST_FEATURES)
    num_classes = min(shape.num_classes, MOST_CLASSES)
    draw = _texts if shape.is_sparse else _dense_rows
    features = _scaled(draw(rng, num_examples, num_features), shape.row_norm)
    labels = _planted_labels(rng, features, num_classes)
    return Dataset("public stand-in", features, labels, tuple(str(k) for k in range(num_classes)))


def stand_in_ratings(
    *, num_examples: int, num_users: int, num_items: int, rating_scale: tuple[float, float]
) -> Ratings:
    """Ratings by as many users of as many items: a planted factorisation of rank 4, with noise.

    Users and items are drawn with probability ~ 1 / (rank + 50), for a few are much more active than the rest. Scores
    have a standard deviation of a quarter of the scale, half of their variance planted, and are cut to the scale.

    >>> ratings = stand_in_ratings(num_examples=1000, num_users=50, num_items=30, rating_scale=(1.0, 5.0))
    >>> ratings.num_examples, float(ratings.rating.min()) >= 1.0
    (1000, True)
    """
    rng = np.random.default_rng([PUBLIC_SEED, num_users, num_items])
    count, rank = min(num_examples, MOST_RATINGS), 4
    users = rng.choice(num_users, count, p=_power_law(num_users, 50.0))
    items = rng.choice(num_items, count, p=_power_law(num_items, 50.0))
    tables = [rng.normal(size=(size, rank)) for size in (num_users, num_items)]
    planted = (tables[0][users] * tables[1][items]).sum(axis=1) / np.sqrt(rank)
    low, high = rating_scale
    scores = (low + high) / 2 + (high - low) / 4 * (planted + rng.normal(size=count)) / np.sqrt(2)
    return Ratings(users, items, np.clip(scores, low, high), num_users, num_items)


def _power_law(size: int, offset: float) -> np.ndarray:
    weights = 1.0 / (np.arange(size) + offset)
    return weights / weights.sum()


def _texts(rng: np.random.Generator, count: int, num_features: int) -> Any:
    probabilities = _power_law(num_features, ZIPF_OFFSET)
    lengths = 1 + rng.poisson(WORDS_A_ROW * rng.gamma(4.0, 0.25, count))
    words = rng.choice(num_features, lengths.sum(), p=probabilities)
    rows = np.repeat(np.arange(count), lengths)
    counts = sp.coo_array((np.ones(len(words)), (rows, words)), shape=(count, num_features)).tocsr()
    counts.data *= 1.0 - np.log(probabilities * num_features)[counts.indices].clip(max=0.0)
    return counts


def _dense_rows(rng: np.random.Generator, count: int, num_features: int) -> np.ndarray:
    stds = np.arange(1, num_features + 1) ** -0.5
    centre = rng.normal(size=num_features)
    centre *= np.linalg.norm(stds) / np.linalg.norm(centre)  # half of the energy, as of columns scaled to [0, 1]
    return centre + (rng.normal(size=(count, num_features)) * stds)


def _scaled(rows: Any, row_norm: float) -> Any:
    if not sp.issparse(rows):
        return rows * (row_norm / np.linalg.norm(rows, axis=1, keepdims=True))
    norms = np.sqrt(rows.power(2).sum(axis=1))
    rows.data *= np.repeat(row_norm / norms, np.diff(rows.indptr))
    return rows


def _variances(features: Any) -> np.ndarray:
    squares = features.power(2) if sp.issparse(features) else features**2
    return np.asarray(squares.mean(axis=0) - features.mean(axis=0) ** 2).ravel()


def _planted_labels(rng: np.random.Generator, features: Any, num_classes: int) -> np.ndarray:
    scores = features @ (_variances(features)[:, None] ** ALIGNMENT * rng.normal(size=(features.shape[1], num_classes)))
    scores -= scores.mean(axis=0)
    scores *= SCORE_STD / scores.std(axis=0).clip(min=np.finfo(float).tiny)  # one row, or one value, has no spread
    if num_classes == 2:  # the difference of the two has this standard deviation
        scores[:, 1] = 0.0
    # By Gumbel's trick: the largest of score + noise is a draw from the softmax of the scores.
    return np.argmax(scores + rng.gumbel(size=scores.shape), axis=1).astype(np.int32)
