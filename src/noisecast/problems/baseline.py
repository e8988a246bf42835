"""What a linear model is worth before it has learnt anything: what its losses and accuracies must be read against."""

import numpy as np

from noisecast.problems.datasets import Dataset
from noisecast.problems.linear import linear_model

__all__ = ["baseline"]


def baseline(train: Dataset, test: Dataset | None = None) -> dict[str, float]:
    """Non-private: loss of all parameters zero, where training starts; accuracy of always saying the commonest class.

    The commonest class is that of the training rows, also for `test_accuracy`. Sets of labels have losses alone.

    >>> data = Dataset("toy", np.eye(3), np.array([0, 1, 1]), ("no", "yes"))
    >>> {name: round(value, 4) for name, value in baseline(data, data.rows([0, 1])).items()}
    {'loss': 0.6931, 'accuracy': 0.6667, 'test_loss': 0.6931, 'test_accuracy': 0.5}
    """
    problem = linear_model(train, test)
    start = problem.likelihood.initial_loss(problem.num_outputs)
    found = {}
    for prefix, rows in (("", train), ("test_", test)):
        if rows is None:
            continue
        found[f"{prefix}loss"] = start
        if not train.has_label_sets:
            commonest = np.bincount(train.labels).argmax()
            found[f"{prefix}accuracy"] = float((rows.labels == commonest).mean())
    return found
