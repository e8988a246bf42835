"""Matrix factorisation: a rating as an inner product of a user's row and an item's row, clipped in closed form."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import ndtr, ndtri

from noisecast.privacy.noise import Purpose, RandomRoot, key_for
from noisecast.problems import data_moments
from noisecast.problems.datasets import Ratings
from noisecast.problems.local_quadratic import LocalQuadratic, local_quadratic_of
from noisecast.problems.problem import fingerprint_of

Array = jax.Array
InitKind = Literal["normal", "truncated-normal"]


@partial(jax.tree_util.register_dataclass, data_fields=["users", "items", "labels"], meta_fields=[])
@dataclass(frozen=True)
class RatedPairs:
    """Ratings as rows of the parameters: rows of users come first, then those of items.

    Args:
      users, items: the row of each rating's user and of its item; (n,) int32.
      labels: rating - center; (n,) float32.
    """

    users: Array = field(repr=False)
    items: Array = field(repr=False)
    labels: Array = field(repr=False)


@partial(jax.tree_util.register_dataclass, data_fields=["pairs", "mask"], meta_fields=[])
@dataclass(frozen=True)
class Batch:
    pairs: RatedPairs
    mask: Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["train", "test", "start"],
    meta_fields=["num_users", "num_items", "dim", "error_weight", "name", "fingerprint"],
)
@dataclass(frozen=True)
class MatrixFactorization:
    """Mean over ratings of w e^2 with e = <x_u, x_i> - (rating - center); w is 1/2 or 1. One rating is one example.

    Parameters are one row of `dim` numbers for each user, then for each item, flattened. The gradient of one example is
    2 w e x_i in the row of its user and 2 w e x_u in the row of its item, so its norm is
    2 w |e| sqrt(|x_u|^2 + |x_i|^2) and no per-example gradient is ever formed. `matrix_factorization` makes one.
    """

    train: RatedPairs = field(repr=False)
    test: RatedPairs | None = field(repr=False)
    start: Array = field(repr=False)
    num_users: int
    num_items: int
    dim: int
    error_weight: float
    name: str
    fingerprint: str

    is_quadratic = False
    why_no_closed_form = (
        "closed_form cannot answer a matrix factorisation: its loss has a saddle at 0, beside which small rows start, "
        'and no quadratic follows it from there. Use runner "sde" or "training".'
    )

    @property
    def num_rows(self) -> int:
        return self.num_users + self.num_items

    @property
    def num_params(self) -> int:
        return self.num_rows * self.dim

    @property
    def num_examples(self) -> int:
        return self.train.labels.shape[0]

    def initial_params(self) -> Array:
        """As drawn from the public seed; (d,) float32."""
        return self.start

    def examples(self, draw: Array, mask: Array) -> Batch:
        return Batch(jax.tree.map(lambda array: array[draw], self.train), mask)

    def clipped_sum(self, params: Array, examples: Batch, l2_clip_norm: Array) -> Array:
        rows, clipped, _ = self._clipped_residuals(params, examples.pairs, l2_clip_norm)
        return self._gradient_sum(examples.pairs, rows, jnp.where(examples.mask, clipped, 0.0))

    def weighted_clipped_sum(self, params: Array, weights: Array, l2_clip_norm: Array) -> Array:
        rows, clipped, _ = self._clipped_residuals(params, self.train, l2_clip_norm)
        return self._gradient_sum(self.train, rows, weights * clipped)

    def clipped_gradient_moments(self, params: Array, l2_clip_norm: Array) -> tuple[Array, Array]:
        (users, items), clipped, _ = self._clipped_residuals(params, self.train, l2_clip_norm)
        mean = self._gradient_sum(self.train, (users, items), clipped) / self.num_examples
        second = self._gradient_sum(self.train, (users**2, items**2), clipped**2) / self.num_examples
        return mean, second

    def evaluate(self, params: Array, l2_clip_norm: Array) -> dict[str, Array]:
        rows, residuals, norms = self._clipped_residuals(params, self.train, jnp.inf)
        squared_error = self._mean_squared_error(params, self.train)
        metrics = {
            "loss": self.error_weight * squared_error,
            "rmse": jnp.sqrt(squared_error),
            "gradient_norm": jnp.linalg.norm(self._gradient_sum(self.train, rows, residuals)) / self.num_examples,
            "clip_fraction": (~(norms <= l2_clip_norm)).mean(),  # one that is no number is clipped to nothing
        }
        if self.test is not None:
            squared_error = self._mean_squared_error(params, self.test)
            metrics |= {"test_loss": self.error_weight * squared_error, "test_rmse": jnp.sqrt(squared_error)}
        return metrics

    prepare_moments = staticmethod(data_moments.prepare_moments)
    gradient_moments = data_moments.gradient_moments
    gradient_noise = data_moments.gradient_noise
    shrink_factor = data_moments.shrink_factor

    def local_quadratic(self, params: Array) -> LocalQuadratic:
        """Loss, gradient and Hessian at `params`, by stochastic Lanczos quadrature; curvatures may be negative."""

        def mean_loss(at: Array) -> Array:
            return self.error_weight * self._mean_squared_error(at, self.train)

        return local_quadratic_of(mean_loss, params)

    def _mean_squared_error(self, params: Array, pairs: RatedPairs) -> Array:
        users, items = self._rows_of(params, pairs)
        return jnp.mean((jnp.sum(users * items, axis=1) - pairs.labels) ** 2)

    def _rows_of(self, params: Array, pairs: RatedPairs) -> tuple[Array, Array]:
        table = params.reshape(self.num_rows, self.dim)
        return table[pairs.users], table[pairs.items]

    def _clipped_residuals(
        self, params: Array, pairs: RatedPairs, l2_clip_norm: Array | float
    ) -> tuple[tuple[Array, Array], Array, Array]:
        """Rows of users and of items (n, dim), 2 w e times its clip factor (n,), per-example gradient norms (n,)."""
        users, items = self._rows_of(params, pairs)
        residuals = 2 * self.error_weight * (jnp.sum(users * items, axis=1) - pairs.labels)
        lengths = jnp.sqrt(squared_norm_bound(jnp.sum(users**2 + items**2, axis=1), self.dim))
        # A bound on the residual, not a factor: of huge residuals that factor would be too small for float32.
        most = l2_clip_norm / lengths
        clipped = jnp.clip(residuals, -most, most)
        # A gradient that is not finite has no direction to clip to: the example contributes nothing.
        finite = jnp.isfinite(residuals) & jnp.isfinite(lengths)
        users, items = (jnp.where(finite[:, None], rows, 0.0) for rows in (users, items))
        return (users, items), jnp.where(finite, clipped, 0.0), jnp.abs(residuals) * lengths

    def _gradient_sum(self, pairs: RatedPairs, rows: tuple[Array, Array], coefficients: Array) -> Array:
        users, items = rows
        zero = jnp.zeros((self.num_rows, self.dim), coefficients.dtype)
        by_user = zero.at[pairs.users].add(coefficients[:, None] * items)
        return by_user.at[pairs.items].add(coefficients[:, None] * users).ravel()


def squared_norm_bound(squares, dim: int):
    """|x_u|^2 + |x_i|^2, at least, from its float32 sum in whatever order; later roundings included.

    A sum of 2 dim squares is at most 2 dim 2^-24 of itself too small, the norm half of that; what is computed from it
    rounds six times more. Each square may also vanish below 2^-126. Were the norm too small, a clipped gradient would
    exceed the clip norm.
    """
    slack, vanished = squared_norm_slack(dim)
    return (squares + vanished) * slack


def squared_norm_slack(dim: int) -> tuple[np.float32, np.float32]:
    """The factor and the summand of `squared_norm_bound`."""
    return np.float32(1 + (2 * dim + 12) * 2.0**-24), np.float32(2 * dim * 2.0**-126)


def matrix_factorization(
    train: Ratings,
    test: Ratings | None = None,
    *,
    public_init_seed: int,
    dim: int = 16,
    rating_scale: tuple[float, float] = (1.0, 5.0),
    center: float | None = None,
    init: InitKind = "normal",
    init_std: float = 0.1,
    half: bool = True,
    name: str = "ratings",
) -> MatrixFactorization:
    """Ratings as <x_user, x_item> + center; the record that is protected is one rating.

    Everything but the ratings is a public constant: the numbers of users and items (`train.num_users`,
    `train.num_items`), for a shape must not depend on private data, and all that follows.

    Args:
      train, test: ratings with the same numbers of users and items.
      public_init_seed: decides the initial rows; who knows it knows where training starts, and nothing else.
      dim: numbers a row; >= 1.
      rating_scale: lowest and highest rating there is; within +-10^6.
      center: subtracted from every rating; default the middle of the scale. Never the mean of the private ratings.
      init: "normal", or "truncated-normal" (cut at two scales of the normal it comes from).
      init_std: standard deviation of the initial numbers, after truncation; > 0 [params].
      half: whether the loss is e^2 / 2 or e^2. The metric rmse does not depend on it.
      name: of the data, as shown.
    Raises: ValueError when a number is out of range, a rating outside its scale, or train and test differ in size.

    >>> ratings = Ratings(np.array([0, 1, 1]), np.array([0, 0, 2]), np.array([5.0, 3.0, 1.0]), num_users=2, num_items=3)
    >>> problem = matrix_factorization(ratings, dim=4, public_init_seed=0)
    >>> problem.num_params, round(float(problem.evaluate(problem.initial_params(), 1.0)["rmse"]), 1)
    (20, 1.6)
    """
    low, high = rating_scale
    if not -1e6 <= low < high <= 1e6:
        raise ValueError(f"Expected a rating_scale (low, high) with -10^6 <= low < high <= 10^6, got {rating_scale}.")
    center = (low + high) / 2 if center is None else center
    if not low <= center <= high:
        raise ValueError(f"Expected center within the rating_scale {low:g} .. {high:g}, got {center}.")
    if not (isinstance(dim, int) and dim >= 1):
        raise ValueError(f"Expected dim to be a whole number >= 1, got {dim}.")
    if not 0 < init_std <= 1e30:
        raise ValueError(f"Expected 0 < init_std <= 10^30, got {init_std}.")
    if train.num_examples == 0:
        raise ValueError("Expected one rating or more to train on, got none.")
    if test is not None and test.num_examples == 0:
        raise ValueError("Expected one rating or more to test on, got none; leave an empty test set out.")
    if test is not None and (test.num_users, test.num_items) != (train.num_users, train.num_items):
        raise ValueError(
            f"Expected the test ratings to be of {train.num_users} users and {train.num_items} items, as in training, "
            f"got {test.num_users} and {test.num_items}."
        )
    start = _initial_params((train.num_users + train.num_items) * dim, init, init_std, public_init_seed)
    test_hash = test.content_hash if test is not None else "no test set"
    return MatrixFactorization(
        train=_pairs(train, low, high, center),
        test=_pairs(test, low, high, center) if test is not None else None,
        start=jnp.asarray(start),
        num_users=train.num_users,
        num_items=train.num_items,
        dim=dim,
        error_weight=0.5 if half else 1.0,
        name=f"factorisation of {name}, dim {dim}",
        fingerprint=fingerprint_of(
            "matrix factorisation", train.content_hash, test_hash, dim, float(center), half, start
        ),
    )


def paper_like_matrix_factorization(
    train: Ratings, test: Ratings | None = None, *, public_init_seed: int, name: str = "ratings"
) -> MatrixFactorization:
    """The setting of the paper's code: 100 numbers a row, N(0, 1) cut at +-2, raw ratings, and half the squared error.

    Predictions then start 7.7 apart, 98 of 100 examples are clipped at C = 2, and the tuned hyper-parameters leave a
    model that is worse than a constant: this is for comparison with the paper ('Adaptive Methods Are Preferable in High
    Privacy Settings: An SDE Perspective'), `matrix_factorization` for learning. Ids are used as they are: the shift by
    one, which left its last user and item without a gradient, is not repeated.

    >>> ratings = Ratings(np.array([0, 1]), np.array([0, 2]), np.array([5.0, 3.0]), num_users=2, num_items=3)
    >>> start = np.asarray(paper_like_matrix_factorization(ratings, public_init_seed=0).initial_params())
    >>> start.shape, bool(np.abs(start).max() < 2), round(float(start.std()), 1)
    ((500,), True, 0.9)
    """
    return matrix_factorization(
        train, test, public_init_seed=public_init_seed, dim=100, init="truncated-normal", init_std=_TRUNCATED_STD,
        center=0.0, rating_scale=(0.0, 5.0), half=True, name=name,
    )  # fmt: skip


# Of N(0, 1) given |x| < 2: 1 - 4 phi(2) / (2 Phi(2) - 1), its root.
_TRUNCATED_STD = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / (2 * float(ndtr(2.0)) - 1))


def _initial_params(count: int, kind: InitKind, std: float, seed: int) -> np.ndarray:
    """(count,) float32, by the inverse of the distribution function, from bits that stay the same for ever."""
    if kind not in ("normal", "truncated-normal"):
        raise ValueError(f"Expected init normal or truncated-normal, got {kind!r}.")
    root = RandomRoot.from_insecure_seed(seed)
    key = key_for(Purpose.INITIAL_PARAMS, "matrix factorisation", root=root, repeat=0)
    words = np.random.Philox(key=int.from_bytes(key[:16], "big")).random_raw(count)
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # never 0 or 1
    if kind == "normal":
        return (std * ndtri(uniform)).astype(np.float32)
    lowest, highest = ndtr(-2.0), ndtr(2.0)
    return (std / _TRUNCATED_STD * ndtri(lowest + uniform * (highest - lowest))).astype(np.float32)


def _pairs(ratings: Ratings, low: float, high: float, center: float) -> RatedPairs:
    outside = ratings.rating[~((ratings.rating >= low) & (ratings.rating <= high))]
    if outside.size:
        raise ValueError(
            f"Expected ratings in the public scale {low:g} .. {high:g}, got {outside[0]:g}; "
            "mend that rating or give a wider rating_scale."
        )
    return RatedPairs(
        users=jnp.asarray(ratings.user),
        items=jnp.asarray(ratings.item + np.int32(ratings.num_users)),
        labels=jnp.asarray(ratings.rating - np.float32(center)),
    )
