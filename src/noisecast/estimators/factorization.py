"""Private matrix factorisation of ratings, as a scikit-learn regressor on pairs of ids."""

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from noisecast.advice.stand_in import stand_in_ratings
from noisecast.estimators import plan as plans
from noisecast.problems.datasets import Ratings
from noisecast.problems.matrix_factorization import matrix_factorization

UNIT = "one rating (not all ratings of one user)"


class DPMatrixFactorization(RegressorMixin, BaseEstimator):
    """Differentially private factorisation of ratings: <user's row, item's row> + the middle of the scale.

    What is protected is one rating, not a user with all of theirs.

    Args:
      num_users, num_items: public sizes; ids are 0 .. size - 1. Never the largest id of a private table.
      rating_scale: public lowest and highest rating; predictions are cut to it, a rating outside is refused.
      dim: numbers a row; >= 1.   public_init_seed: decides where training starts, and nothing else.
      optimizer, target_epsilon, target_delta, l2_clip_norm, expected_batch_size, num_epochs, num_examples,
      insecure_seed, secure_noise: as of `DPLogisticRegression`; the rows are ratings, the clip norm is of one rating's
        gradient.
      learning_rate: > 0, or "forecast": the best one on public stand-in ratings.
      public_data: ((user, item) pairs, ratings) that are public, to forecast on instead of the stand-in.
    Attributes:
      user_factors_ (num_users, dim), item_factors_ (num_items, dim), n_iter_, privacy_, learning_rate_, l2_clip_norm_,
      optimizer_, mechanism_, forecast_. Nothing of the ratings is kept.

    >>> rng = np.random.default_rng(0)
    >>> pairs = np.stack([rng.integers(20, size=500), rng.integers(10, size=500)], axis=1)
    >>> ratings = 3.0 + (-1.0) ** (pairs[:, 0] + pairs[:, 1])
    >>> model = DPMatrixFactorization(num_users=20, num_items=10, dim=2, learning_rate=0.05).fit(pairs, ratings)
    >>> model.predict(pairs[:3]).shape, model.privacy_.epsilon <= 1.0
    ((3,), True)
    """

    def __init__(
        self,
        *,
        num_users: Any = None,
        num_items: Any = None,
        rating_scale: tuple[float, float] = (1.0, 5.0),
        dim: int = 16,
        optimizer: str = "DP-SGD",
        target_epsilon: float = 1.0,
        target_delta: float = 1e-5,
        learning_rate: float | str = "forecast",
        l2_clip_norm: float | str = 1.0,
        expected_batch_size: float | None = None,
        num_epochs: float = 20.0,
        num_examples: int | None = None,
        public_init_seed: int = 0,
        public_data: tuple | None = None,
        insecure_seed: int | None = None,
        secure_noise: bool = False,
    ):
        self.num_users = num_users
        self.num_items = num_items
        self.rating_scale = rating_scale
        self.dim = dim
        self.optimizer = optimizer
        self.target_epsilon = target_epsilon
        self.target_delta = target_delta
        self.learning_rate = learning_rate
        self.l2_clip_norm = l2_clip_norm
        self.expected_batch_size = expected_batch_size
        self.num_epochs = num_epochs
        self.num_examples = num_examples
        self.public_init_seed = public_init_seed
        self.public_data = public_data
        self.insecure_seed = insecure_seed
        self.secure_noise = secure_noise

    def fit(self, X, y):
        """Train on pairs X (n, 2) of user and item, and ratings y (n,). Every call spends its own (epsilon, delta).

        Raises: ValueError, in a sentence, for ids or ratings out of range and for bad parameters.
        """
        self._check_sizes()
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        ratings = self._ratings(X, y)
        planned = plans.plan(self, num_rows=ratings.num_examples, proxy=self._proxy)
        model = plans.run(self, self._problem(ratings), planned, unit=UNIT, also_not_covered=())
        factors = model.params.astype(np.float64).reshape(self.num_users + self.num_items, self.dim)
        self.user_factors_, self.item_factors_ = np.split(factors, [self.num_users])
        plans.remember(self, planned, model)
        return self

    def predict(self, X):
        """Ratings (n,) of pairs X (n, 2), within the scale."""
        check_is_fitted(self)
        users, items = self._ids(validate_data(self, X, dtype=np.float64, reset=False))
        low, high = self.rating_scale
        products = (self.user_factors_[users] * self.item_factors_[items]).sum(axis=1)
        return np.clip((low + high) / 2 + products, low, high)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.insecure_seed is None
        return tags

    def _check_sizes(self) -> None:
        for name in ("num_users", "num_items"):
            size = getattr(self, name)
            if not plans.is_whole(size):
                raise ValueError(
                    f"Expected {name} to be a whole number >= 1, got {size!r}; give the public size of the table, "
                    "never the largest id of private ratings."
                )

    def _ids(self, X) -> tuple[np.ndarray, np.ndarray]:
        if X.shape[1] != 2:
            raise ValueError(f"Expected two columns, user and item ids, got {X.shape[1]}.")
        for column, name in enumerate(("num_users", "num_items")):
            size = getattr(self, name)
            bad = (X[:, column] % 1 != 0) | (X[:, column] < 0) | (X[:, column] >= size)
            if bad.any():
                raise ValueError(f"Expected whole ids 0 .. {size - 1} ({name} = {size}), got {X[bad, column][0]:g}.")
        return X[:, 0].astype(np.int32), X[:, 1].astype(np.int32)

    def _ratings(self, X, y) -> Ratings:
        users, items = self._ids(X)
        return Ratings(users, items, column_or_1d(y), int(self.num_users), int(self.num_items))

    def _problem(self, train: Ratings) -> Any:
        return matrix_factorization(
            train, public_init_seed=self.public_init_seed, dim=self.dim, rating_scale=self.rating_scale
        )

    def _proxy(self, num_examples: int) -> Any:
        if self.public_data is not None:
            X, y = self.public_data
            X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, reset=False)
            return self._problem(self._ratings(X, y))
        sizes = {"num_users": self.num_users, "num_items": self.num_items}
        return self._problem(stand_in_ratings(num_examples=num_examples, rating_scale=self.rating_scale, **sizes))
