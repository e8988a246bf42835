"""Small public data sets that come with scikit-learn, scaled by public constants and split by a fixed public rule."""

import numpy as np

from noisecast.problems.datasets.dataset import DataError, Dataset
from noisecast.problems.datasets.splits import public_split

# Lower and upper bound of each column, in scikit-learn's order: round numbers in the column's unit, written down once.
# The data sets are public, yet nothing is computed from their rows, so that they serve as an example of how it is done.
_BOUNDS: dict[str, tuple[tuple[float, float], ...]] = {
    "digits": ((0, 16),) * 64,
    "iris": ((4, 8), (2, 5), (0, 8), (0, 3)),  # sepal length and width, petal length and width [cm]
    "wine": (
        (10, 16),  # alcohol [% vol]
        (0, 6),  # malic acid [g/l]
        (1, 4),  # ash [g/l]
        (10, 30),  # alcalinity of ash [meq/l]
        (60, 180),  # magnesium [mg/l]
        (0, 4),  # total phenols [g/l]
        (0, 6),  # flavanoids [g/l]
        (0, 1),  # nonflavanoid phenols [g/l]
        (0, 4),  # proanthocyanins [g/l]
        (0, 15),  # colour intensity
        (0, 2),  # hue
        (1, 4),  # OD280/OD315 of diluted wines
        (0, 2000),  # proline [mg/l]
    ),
    # radius, texture, perimeter, area, smoothness, compactness, concavity, concave points, symmetry, fractal dimension
    # of cell nuclei: their mean, standard error and worst value.
    "breast_cancer": (
        *((5, 30), (5, 40), (40, 200), (100, 2500), (0.05, 0.2)),
        *((0, 0.4), (0, 0.5), (0, 0.25), (0.1, 0.35), (0.04, 0.1)),
        *((0, 3), (0, 5), (0, 25), (0, 600), (0, 0.04)),
        *((0, 0.15), (0, 0.4), (0, 0.06), (0, 0.1), (0, 0.03)),
        *((5, 40), (10, 50), (50, 260), (100, 4500), (0.05, 0.25)),
        *((0, 1.2), (0, 1.3), (0, 0.3), (0.1, 0.7), (0.05, 0.25)),
    ),
}  # fmt: skip

BUNDLED = tuple(_BOUNDS)


def bundled(name: str) -> tuple[Dataset, Dataset]:
    """One of scikit-learn's bundled data sets as (train, test): public, offline, small.

    Pixels of `digits` are divided by 16 into [0, 1]. The columns of the others are clamped to round public bounds and
    scaled to [-1, 1]. The split is `public_split`: 80 % train, 20 % test.

    Raises: DataError for an unknown name, or without scikit-learn.

    >>> train, test = bundled("iris")
    >>> train.features.shape, test.features.shape, train.label_names
    ((120, 4), (30, 4), ('setosa', 'versicolor', 'virginica'))
    """
    if name not in _BOUNDS:
        raise DataError(f"Expected a bundled data set among {', '.join(BUNDLED)}, got '{name}'.")
    try:
        from sklearn import datasets
    except ImportError:
        raise DataError(f"The data set '{name}' needs scikit-learn; run pip install 'noisecast[train]'.") from None

    raw = getattr(datasets, f"load_{name}")()
    lower, upper = np.array(_BOUNDS[name]).T
    unit = (np.clip(raw.data, lower, upper) - lower) / (upper - lower)
    features = unit if name == "digits" else 2 * unit - 1
    whole = Dataset(name, features, raw.target.astype(np.int32), tuple(str(label) for label in raw.target_names))
    train, test = public_split(whole.num_examples)
    return whole.rows(train), whole.rows(test)
