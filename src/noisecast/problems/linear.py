"""Linear models: binary logistic and softmax regression on dense or sparse rows, clipped in closed form."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from noisecast.problems import data_moments
from noisecast.problems.datasets import Dataset
from noisecast.problems.local_quadratic import LocalQuadratic, local_quadratic_by_lanczos
from noisecast.problems.problem import fingerprint_of
from noisecast.problems.rows import DenseRows, SparseRows, rows_from

Array = jax.Array


@dataclass(frozen=True)
class Likelihood:
    """How logits (n, m) and labels (n,) make a loss: the loss itself, its derivative in the logits, and the guess."""

    name: str
    loss: Callable[[Array, Array], Array]
    residual: Callable[[Array, Array], Array]
    predict: Callable[[Array], Array]
    probabilities: Callable[[Array], Array]


LOGISTIC = Likelihood(
    name="logistic",
    loss=lambda logits, labels: jax.nn.softplus(jnp.where(labels == 1, -logits[:, 0], logits[:, 0])),
    residual=lambda logits, labels: jax.nn.sigmoid(logits) - labels[:, None],
    predict=lambda logits: (logits[:, 0] > 0).astype(jnp.int32),
    probabilities=lambda logits: jnp.concatenate([jax.nn.sigmoid(-logits), jax.nn.sigmoid(logits)], axis=1),
)
SOFTMAX = Likelihood(
    name="softmax",
    loss=lambda logits, labels: -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0],
    residual=lambda logits, labels: jax.nn.softmax(logits) - jax.nn.one_hot(labels, logits.shape[1]),
    predict=lambda logits: jnp.argmax(logits, axis=1).astype(jnp.int32),
    probabilities=jax.nn.softmax,
)

LIKELIHOODS = {likelihood.name: likelihood for likelihood in (LOGISTIC, SOFTMAX)}


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "labels"], meta_fields=[])
@dataclass(frozen=True)
class Labelled:
    rows: DenseRows | SparseRows
    labels: Array


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "labels", "mask"], meta_fields=[])
@dataclass(frozen=True)
class Batch:
    rows: DenseRows | SparseRows
    labels: Array
    mask: Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["train", "test"],
    meta_fields=["likelihood", "num_outputs", "name", "fingerprint"],
)
@dataclass(frozen=True)
class LinearModel:
    """Mean over examples of loss(x_i W + b, y_i); parameters are W (p, m) and b (m,), flattened, starting at zero.

    The gradient of one example is [x_i; 1] r_i' with r_i the derivative of its loss in the logits, so its norm is
    |r_i| sqrt(|x_i|^2 + 1) and no per-example gradient is ever formed.

    >>> from noisecast.problems.datasets import bundled
    >>> train, test = bundled("digits")
    >>> problem = linear_model(train, test)
    >>> problem.num_params, float(problem.evaluate(problem.initial_params(), 1.0)["loss"])
    (650, 2.30...)
    """

    train: Labelled
    test: Labelled | None
    likelihood: Likelihood
    num_outputs: int
    name: str
    fingerprint: str

    is_quadratic = False
    why_no_closed_form = None

    @property
    def num_features(self) -> int:
        return self.train.rows.num_features

    @property
    def num_params(self) -> int:
        return (self.num_features + 1) * self.num_outputs

    @property
    def num_examples(self) -> int:
        return self.train.labels.shape[0]

    def initial_params(self) -> Array:
        """Zero, so that the first loss is ln 2 or ln m."""
        return jnp.zeros(self.num_params, jnp.float32)

    def examples(self, draw: Array, mask: Array) -> Batch:
        return Batch(self.train.rows.take(draw), self.train.labels[draw], mask)

    def logits(self, rows: DenseRows | SparseRows, params: Array) -> Array:
        return _logits(rows, params, self.num_outputs)

    def clipped_sum(self, params: Array, examples: Batch, l2_clip_norm: Array) -> Array:
        clipped, _ = self._clipped_residuals(params, examples, l2_clip_norm)
        return self._gradient_sum(examples.rows, jnp.where(examples.mask[:, None], clipped, 0.0))

    def weighted_clipped_sum(self, params: Array, weights: Array, l2_clip_norm: Array) -> Array:
        clipped, _ = self._clipped_residuals(params, self.train, l2_clip_norm)
        return self._gradient_sum(self.train.rows, weights[:, None] * clipped)

    def clipped_gradient_moments(self, params: Array, l2_clip_norm: Array) -> tuple[Array, Array]:
        clipped, _ = self._clipped_residuals(params, self.train, l2_clip_norm)
        mean = self._gradient_sum(self.train.rows, clipped) / self.num_examples
        squares = clipped**2
        second = jnp.vstack([self.train.rows.weighted_sum_of_squares(squares), squares.sum(axis=0)])
        return mean, second.ravel() / self.num_examples

    def evaluate(self, params: Array, l2_clip_norm: Array) -> dict[str, Array]:
        _, norms = self._clipped_residuals(params, self.train, l2_clip_norm)
        logits = self.logits(self.train.rows, params)
        gradient = self._gradient_sum(self.train.rows, self.likelihood.residual(logits, self.train.labels))
        metrics = {
            "loss": self.likelihood.loss(logits, self.train.labels).mean(),
            "accuracy": (self.likelihood.predict(logits) == self.train.labels).mean(),
            "gradient_norm": jnp.linalg.norm(gradient) / self.num_examples,
            "clip_fraction": (norms > l2_clip_norm).mean(),
        }
        if self.test is not None:
            logits = self.logits(self.test.rows, params)
            metrics["test_loss"] = self.likelihood.loss(logits, self.test.labels).mean()
            metrics["test_accuracy"] = (self.likelihood.predict(logits) == self.test.labels).mean()
        return metrics

    prepare_moments = staticmethod(data_moments.prepare_moments)
    gradient_moments = data_moments.gradient_moments
    gradient_noise = data_moments.gradient_noise
    shrink_factor = data_moments.shrink_factor

    def local_quadratic(self, params: Array) -> LocalQuadratic:
        """Loss, gradient and Hessian at `params`, the Hessian by stochastic Lanczos quadrature."""

        def mean_loss(at: Array) -> Array:
            return self.likelihood.loss(self.logits(self.train.rows, at), self.train.labels).mean()

        gradient = jax.grad(mean_loss)
        product = jax.jit(lambda vector: jax.jvp(gradient, (params,), (vector,))[1])
        return local_quadratic_by_lanczos(
            loss=float(mean_loss(params)),
            gradient=np.asarray(gradient(params)),
            hessian_vector=lambda vector: np.asarray(product(jnp.asarray(vector, params.dtype))),
        )

    def _clipped_residuals(self, params: Array, examples: Labelled | Batch, l2_clip_norm: Array) -> tuple[Array, Array]:
        """Residuals times their clip factor (n, m), and per-example gradient norms (n,)."""
        residuals = self.likelihood.residual(self.logits(examples.rows, params), examples.labels)
        norms = jnp.linalg.norm(residuals, axis=1) * jnp.sqrt(examples.rows.squared_norms + 1.0)
        factors = jnp.minimum(1.0, l2_clip_norm / jnp.maximum(norms, jnp.finfo(norms.dtype).tiny))
        # A gradient that is not finite has no direction to clip to: the example contributes nothing.
        return jnp.where(jnp.isfinite(norms)[:, None], residuals * factors[:, None], 0.0), norms

    def _gradient_sum(self, rows: DenseRows | SparseRows, coefficients: Array) -> Array:
        return jnp.vstack([rows.weighted_sum(coefficients), coefficients.sum(axis=0)]).ravel()


def predict(
    features: np.ndarray | scipy.sparse.csr_array, params: np.ndarray, likelihood: Likelihood, num_outputs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Labels (n,) and class probabilities (n, number of classes) of new rows under trained parameters (d,)."""
    logits = _logits(rows_from(features), jnp.asarray(params), num_outputs)
    return np.asarray(likelihood.predict(logits)), np.asarray(likelihood.probabilities(logits))


def linear_model(train: Dataset, test: Dataset | None = None) -> LinearModel:
    """Logistic regression for two classes, softmax regression for more."""
    likelihood, num_outputs = (LOGISTIC, 1) if train.num_classes == 2 else (SOFTMAX, train.num_classes)
    test_hash = test.content_hash if test is not None else "no test set"
    return LinearModel(
        train=_labelled(train),
        test=_labelled(test) if test is not None else None,
        likelihood=likelihood,
        num_outputs=num_outputs,
        name=f"{likelihood.name} on {train.name}",
        fingerprint=fingerprint_of(likelihood.name, num_outputs, train.content_hash, test_hash),
    )


def _logits(rows: DenseRows | SparseRows, params: Array, num_outputs: int) -> Array:
    weights = params.reshape(rows.num_features + 1, num_outputs)
    return rows.dot(weights[:-1]) + weights[-1]


def _labelled(data: Dataset) -> Labelled:
    return Labelled(rows_from(data.features), jnp.asarray(data.labels, jnp.int32))
