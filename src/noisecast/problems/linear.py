"""Linear models: logistic, softmax and multi-label regression on dense or sparse rows, clipped in closed form."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from noisecast.problems import data_moments
from noisecast.problems.clipping import clip_factor
from noisecast.problems.datasets import Dataset
from noisecast.problems.local_quadratic import LocalQuadratic, local_quadratic_of
from noisecast.problems.problem import fingerprint_of
from noisecast.problems.rows import DenseRows, PaddedRows, SparseRows, rows_from

Array = jax.Array
Rows = DenseRows | SparseRows | PaddedRows


@dataclass(frozen=True)
class Likelihood:
    """How m logits and a label make a loss: all that tells one linear model from another.

    Args:
      name: as shown.
      num_outputs: m, of a number of classes.
      takes_sets: labels are sets, (n, k) class numbers padded with -1; else one class number an example, (n,).
      loss: of logits (n, m) and labels; (n,).
      residual: its derivative in the logits; (n, m).
      predict: classes (n,), or for sets whether each class is in, (n, classes).
      probabilities: (n, classes).
      scores: what the metrics count, of logits and labels; (n, num_scores).
      metrics: by name, of the scores' means over examples; (num_scores, ...) -> (...) each.
      initial_loss: the loss of logits that are zero, of m.
      curvature: of m, bounds on the loss's Hessian in the logits: its largest eigenvalue, its trace.
    """

    name: str
    num_outputs: Callable[[int], int]
    takes_sets: bool
    loss: Callable[[Array, Array], Array]
    residual: Callable[[Array, Array], Array]
    predict: Callable[[Array], Array]
    probabilities: Callable[[Array], Array]
    scores: Callable[[Array, Array], Array]
    num_scores: int
    metrics: Callable[[Any], dict[str, Any]]
    initial_loss: Callable[[int], float]
    curvature: Callable[[int], tuple[float, float]]

    def __reduce__(self) -> tuple:
        return _likelihood_named, (self.name,)  # its functions are known on the other side


def _accuracy(means: Any) -> dict[str, Any]:
    return {"accuracy": means[0]}


def _is_above_half(logits: Array) -> Array:
    return (logits[:, 0] > 0).astype(jnp.int32)


def _likeliest(logits: Array) -> Array:
    return jnp.argmax(logits, axis=1).astype(jnp.int32)


LOGISTIC = Likelihood(
    name="logistic",
    num_outputs=lambda num_classes: 1,
    takes_sets=False,
    loss=lambda logits, labels: jax.nn.softplus(jnp.where(labels == 1, -logits[:, 0], logits[:, 0])),
    residual=lambda logits, labels: jax.nn.sigmoid(logits) - labels[:, None],
    predict=_is_above_half,
    probabilities=lambda logits: jnp.concatenate([jax.nn.sigmoid(-logits), jax.nn.sigmoid(logits)], axis=1),
    scores=lambda logits, labels: (_is_above_half(logits) == labels)[:, None],
    num_scores=1,
    metrics=_accuracy,
    initial_loss=lambda m: math.log(2),
    curvature=lambda m: (0.25, 0.25),  # p (1 - p)
)
SOFTMAX = Likelihood(
    name="softmax",
    num_outputs=lambda num_classes: num_classes,
    takes_sets=False,
    loss=lambda logits, labels: -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0],
    residual=lambda logits, labels: jax.nn.softmax(logits) - jax.nn.one_hot(labels, logits.shape[1]),
    predict=_likeliest,
    probabilities=jax.nn.softmax,
    scores=lambda logits, labels: (_likeliest(logits) == labels)[:, None],
    num_scores=1,
    metrics=_accuracy,
    initial_loss=math.log,
    curvature=lambda m: (1 - 1 / m, 1 - 1 / m),  # of diag(p) - pp': the trace is 1 - |p|^2, and bounds the other
)


def _labels_loss(logits: Array, labels: Array) -> Array:
    """sum_j softplus(z_j) - sum_{j in labels} z_j = -sum_j log(probability of output j's answer)."""
    there = jnp.where(labels >= 0, jnp.take_along_axis(logits, labels, axis=1), 0.0)
    return jax.nn.softplus(logits).sum(axis=1) - there.sum(axis=1)


def _labels_residual(logits: Array, labels: Array) -> Array:
    outside = jnp.where(labels >= 0, labels, logits.shape[1])  # padding is dropped; -1 would mean the last output
    rows = jnp.arange(labels.shape[0])[:, None]
    return jax.nn.sigmoid(logits).at[rows, outside].add(-1.0, mode="drop")


def _labels_scores(logits: Array, labels: Array) -> Array:
    """Numbers of: labels among the 5 likeliest; labels; labels that are guessed; guesses (probability above 1/2)."""
    there = labels >= 0
    top = jax.lax.top_k(logits, min(5, logits.shape[1]))[1]
    in_top = (top[:, :, None] == labels[:, None, :]).any(axis=1)
    guessed = there & (jnp.take_along_axis(logits, labels, axis=1) > 0)
    return jnp.stack([part.sum(axis=1) for part in (in_top, there, guessed, logits > 0)], axis=1)


def _labels_metrics(means: Any) -> dict[str, Any]:
    """Micro-averages: each (example, label) pair counts once, so examples without labels ask for nothing.

    recall_at_5 = share of the labels that are among their example's 5 likeliest outputs
    micro_f1    = 2 |labels and guesses| / (|labels| + |guesses|), a guess being a probability above 1/2

    The first is what federated learning reports of tags (Keras' Recall(top_k=5)); it is 1 where there are five outputs
    or fewer. The second says what `predict` is worth; strong noise or rare labels make it 0, since nothing is guessed.
    """
    in_top, labels, guessed, guesses = means
    return {"recall_at_5": _share(in_top, labels), "micro_f1": _share(2 * guessed, labels + guesses)}


def _share(part: Any, whole: Any) -> Any:
    return part / (whole + (whole == 0))


# One output for each label, present or absent, independently of the others. The loss is their sum, not their mean: the
# log-likelihood, in which an output means the same however many others there are. The mean divides the gradient by m,
# which is the same training in other units: DP-SGD on the mean with clip norm C / m and learning rate m eta is DP-SGD
# on the sum with C and eta, with the same noise multiplier, and so the same epsilon; DP-SignSGD and DP-Adam (eps / m)
# keep their learning rate.
MULTI_LABEL = Likelihood(
    name="multi-label",
    num_outputs=lambda num_classes: num_classes,
    takes_sets=True,
    loss=_labels_loss,
    residual=_labels_residual,
    predict=lambda logits: logits > 0,
    probabilities=jax.nn.sigmoid,
    scores=_labels_scores,
    num_scores=4,
    metrics=_labels_metrics,
    initial_loss=lambda m: m * math.log(2),
    curvature=lambda m: (0.25, 0.25 * m),  # diag(p (1 - p))
)
MULTI_LABEL_MEAN = replace(
    MULTI_LABEL,
    name="multi-label mean",
    loss=lambda logits, labels: _labels_loss(logits, labels) / logits.shape[1],
    residual=lambda logits, labels: _labels_residual(logits, labels) / logits.shape[1],
    initial_loss=lambda m: math.log(2),
    curvature=lambda m: (0.25 / m, 0.25),
)

LIKELIHOODS = {likelihood.name: likelihood for likelihood in (LOGISTIC, SOFTMAX, MULTI_LABEL, MULTI_LABEL_MEAN)}


def _likelihood_named(name: str) -> Likelihood:
    return LIKELIHOODS[name]


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "labels"], meta_fields=[])
@dataclass(frozen=True)
class Labelled:
    rows: DenseRows | SparseRows = field(repr=False)  # in compiled code the latter are padded
    labels: Array = field(repr=False)


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "labels", "mask"], meta_fields=[])
@dataclass(frozen=True)
class Batch:
    rows: DenseRows | PaddedRows = field(repr=False)
    labels: Array = field(repr=False)
    mask: Array = field(repr=False)


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

    train: Labelled = field(repr=False)
    test: Labelled | None = field(repr=False)
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
        """Zero, so that the first loss is known: ln 2, ln m or m ln 2."""
        return jnp.zeros(self.num_params, jnp.float32)

    def examples(self, draw: Array, mask: Array) -> Batch:
        return Batch(self.train.rows.take(draw), self.train.labels[draw], mask)

    def logits(self, rows: Rows, params: Array) -> Array:
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
            **self._quality(logits, self.train.labels),
            "gradient_norm": jnp.linalg.norm(gradient) / self.num_examples,
            "clip_fraction": (~(norms <= l2_clip_norm)).mean(),  # one that is no number is clipped to nothing
        }
        if self.test is not None:
            found = self._quality(self.logits(self.test.rows, params), self.test.labels)
            metrics |= {f"test_{name}": value for name, value in found.items()}
        return metrics

    def _quality(self, logits: Array, labels: Array) -> dict[str, Array]:
        """Mean loss, and the likelihood's metrics."""
        scores = self.likelihood.scores(logits, labels)
        return {"loss": self.likelihood.loss(logits, labels).mean(), **self.likelihood.metrics(scores.mean(axis=0))}

    prepare_moments = staticmethod(data_moments.prepare_moments)
    gradient_moments = data_moments.gradient_moments
    gradient_noise = data_moments.gradient_noise
    shrink_factor = data_moments.shrink_factor

    def local_quadratic(self, params: Array) -> LocalQuadratic:
        """Loss, gradient and Hessian at `params`, the Hessian by stochastic Lanczos quadrature."""

        def mean_loss(at: Array) -> Array:
            return self.likelihood.loss(self.logits(self.train.rows, at), self.train.labels).mean()

        return local_quadratic_of(mean_loss, params)

    def _clipped_residuals(self, params: Array, examples: Labelled | Batch, l2_clip_norm: Array) -> tuple[Array, Array]:
        """Residuals times their clip factor (n, m), and per-example gradient norms (n,)."""
        residuals = self.likelihood.residual(self.logits(examples.rows, params), examples.labels)
        norms = jnp.linalg.norm(residuals, axis=1) * jnp.sqrt(examples.rows.squared_norms + 1.0)
        factors = clip_factor(norms, l2_clip_norm)
        # A gradient that is not finite has no direction to clip to: the example contributes nothing.
        return jnp.where(jnp.isfinite(norms)[:, None], residuals * factors[:, None], 0.0), norms

    def _gradient_sum(self, rows: Rows, coefficients: Array) -> Array:
        return jnp.vstack([rows.weighted_sum(coefficients), coefficients.sum(axis=0)]).ravel()


def predict(
    features: np.ndarray | scipy.sparse.csr_array, params: np.ndarray, likelihood: Likelihood, num_outputs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and class probabilities (n, number of classes) of new rows under trained parameters (d,).

    Predictions are classes (n,); of a multi-label model they say whether each label is in, (n, number of labels).
    """
    logits = _logits(rows_from(features), jnp.asarray(params), num_outputs)
    return np.asarray(likelihood.predict(logits)), np.asarray(likelihood.probabilities(logits))


def quality(data: Dataset, params: np.ndarray, likelihood: Likelihood, num_outputs: int) -> dict[str, float]:
    """The likelihood's metrics of trained parameters (d,) on labelled rows. Non-private."""
    rows = _labelled(data)
    scores = likelihood.scores(_logits(rows.rows, jnp.asarray(params), num_outputs), rows.labels)
    return {name: float(value) for name, value in likelihood.metrics(scores.mean(axis=0)).items()}


def linear_model(train: Dataset, test: Dataset | None = None, *, likelihood: Likelihood | None = None) -> LinearModel:
    """Logistic regression for two classes, softmax regression for more, one logistic output a label for sets of labels.

    Args:
      train, test: data with the same features and label names.
      likelihood: MULTI_LABEL_MEAN for sets of labels, or SOFTMAX for two classes, instead of what the data asks for.

    Raises: TypeError for data that is no `Dataset`; ValueError where the likelihood cannot take the labels.

    >>> from noisecast.problems.datasets import Dataset
    >>> data = Dataset("toy", np.eye(3), np.array([[0, 1], [1, -1], [-1, -1]]), ("php", "sql"))
    >>> problem = linear_model(data)
    >>> problem.name, problem.num_outputs, float(problem.evaluate(problem.initial_params(), 1.0)["loss"])
    ('multi-label on toy', 2, 1.386...)
    """
    for data in (train, test):
        if data is not None and not isinstance(data, Dataset):
            raise TypeError(
                f"Expected a noisecast.problems.datasets.Dataset, got {type(data).__name__}. Arrays become one by "
                "noisecast.problems.datasets.Dataset(name, features, labels, label_names); what load_file returns is "
                "linear_model(*loaded)."
            )
    likelihood = likelihood or _usual_likelihood(train)
    _check_labels(likelihood, train, test)
    num_outputs = likelihood.num_outputs(train.num_classes)
    test_hash = test.content_hash if test is not None else "no test set"
    examples = _labelled(train)
    return LinearModel(
        train=examples,
        # In the form of the training rows: one long row must not keep a test set from the engine of the other.
        test=_labelled(test, sparse=isinstance(examples.rows, SparseRows)) if test is not None else None,
        likelihood=likelihood,
        num_outputs=num_outputs,
        name=f"{likelihood.name} on {train.name}",
        fingerprint=fingerprint_of(likelihood.name, num_outputs, train.content_hash, test_hash),
    )


def _usual_likelihood(data: Dataset) -> Likelihood:
    if data.has_label_sets:
        return MULTI_LABEL
    return LOGISTIC if data.num_classes == 2 else SOFTMAX


def _check_labels(likelihood: Likelihood, train: Dataset, test: Dataset | None) -> None:
    for data in (train, test):
        if data is not None and not data.num_examples:
            raise ValueError(f"Expected one row or more, got none in {data.name}; leave an empty test set out.")
        if data is not None and data.has_label_sets != likelihood.takes_sets:
            wanted, got = ("a set of labels", "one label")[:: 1 if likelihood.takes_sets else -1]
            raise ValueError(
                f"Expected {wanted} a row for {likelihood.name}, got {got} a row in {data.name}; read both with or "
                "without a label separator."
            )
    if likelihood == LOGISTIC and train.num_classes != 2:
        raise ValueError(f"Expected two classes for logistic, got {train.num_classes} in {train.name}; use softmax.")


def _logits(rows: Rows, params: Array, num_outputs: int) -> Array:
    weights = params.reshape(rows.num_features + 1, num_outputs)
    return rows.dot(weights[:-1]) + weights[-1]


def _labelled(data: Dataset, *, sparse: bool | None = None) -> Labelled:
    return Labelled(rows_from(data.features, sparse=sparse), jnp.asarray(data.labels, jnp.int32))
