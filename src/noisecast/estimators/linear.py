"""Private logistic and softmax regression, as scikit-learn has them."""

from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from noisecast.advice.stand_in import Shape, stand_in
from noisecast.estimators import plan as plans
from noisecast.estimators import warned
from noisecast.problems.datasets import Dataset
from noisecast.problems.linear import LOGISTIC, SOFTMAX, Likelihood, linear_model

# Rows of norm data_norm are trained with this norm: beside the intercept's constant 1 they then have nearly all of the
# clip norm for themselves.
ROW_NORM = 4.0
NO_WEIGHTS = "a weight would multiply what one row can change, which the clip norm and epsilon do not know of"


class _DPLinearClassifier(ClassifierMixin, BaseEstimator):
    _likelihood: ClassVar[Likelihood]

    def __init__(
        self,
        *,
        optimizer: str = "DP-Adam",
        target_epsilon: float = 1.0,
        target_delta: float = 1e-5,
        learning_rate: float | str = "forecast",
        l2_clip_norm: float | str = 1.0,
        expected_batch_size: float | None = None,
        num_epochs: float = 20.0,
        data_norm: float = 1.0,
        num_examples: int | None = None,
        classes: Any = None,
        public_data: tuple | None = None,
        insecure_seed: int | None = None,
        secure_noise: bool = False,
    ):
        self.optimizer = optimizer
        self.target_epsilon = target_epsilon
        self.target_delta = target_delta
        self.learning_rate = learning_rate
        self.l2_clip_norm = l2_clip_norm
        self.expected_batch_size = expected_batch_size
        self.num_epochs = num_epochs
        self.data_norm = data_norm
        self.num_examples = num_examples
        self.classes = classes
        self.public_data = public_data
        self.insecure_seed = insecure_seed
        self.secure_noise = secure_noise

    def fit(self, X, y, **refused):
        """Train on rows X (n, p), dense or sparse, and labels y (n,). Every call spends its own (epsilon, delta).

        Raises: ValueError, in a sentence, for bad data or parameters; also for sample_weight, whatever its value.
        """
        if refused:
            raise ValueError(f"Expected only X and y, got {', '.join(refused)}: {NO_WEIGHTS}; leave it out.")
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32])
        check_classification_targets(y)
        classes, not_covered = self._public_classes(y)
        data = self._dataset(X, y, classes)

        def proxy(num_examples: int):
            return self._proxy(num_examples, classes, X)

        planned = plans.plan(self, num_rows=data.num_examples, proxy=proxy)
        problem = linear_model(data, likelihood=self._likelihood)
        model = plans.run(self, problem, planned, unit="one row", also_not_covered=not_covered)
        weights = model.params.astype(np.float64).reshape(data.num_features + 1, problem.num_outputs)
        self.classes_ = classes
        self.coef_ = weights[:-1].T * (ROW_NORM / self.data_norm)
        self.intercept_ = weights[-1]
        plans.remember(self, planned, model)
        return self

    def decision_function(self, X):
        """Logits: (n,) of the second class where there is one output, else (n, classes)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        scores = self._clipped(X) @ self.coef_.T + self.intercept_
        if scores.shape[1] == 2:  # softmax of two classes: scikit-learn expects one column
            return scores[:, 1] - scores[:, 0]
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict_proba(self, X):
        """Class probabilities (n, classes), in the order of classes_."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([expit(-scores), expit(scores)], axis=1)
        return softmax(scores, axis=1)

    def predict_log_proba(self, X):
        """Logarithms of `predict_proba`, finite where a probability is too small for a float; (n, classes)."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([log_expit(-scores), log_expit(scores)], axis=1)
        return log_softmax(scores, axis=1)

    def predict(self, X):
        """The likeliest class of each row (n,)."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)]

    @property
    def partial_fit(self):
        raise AttributeError(
            f"{type(self).__name__} has no partial_fit: more training would spend more than target_epsilon. Fit once "
            "on all rows; or fit several models on rows that nobody shares, each with a guarantee of its own."
        )

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.non_deterministic = self.insecure_seed is None
        tags.classifier_tags.multi_class = self._likelihood is not LOGISTIC
        return tags

    def _public_classes(self, y) -> tuple[np.ndarray, tuple[str, ...]]:
        if self.classes is not None:
            classes, sentences = np.unique(np.asarray(self.classes)), ()
        else:
            classes, sentences = np.unique(y), ("The set of class labels, which was read from y.",)
        if len(classes) < 2:
            raise ValueError(
                f"Expected two or more classes, got one class only, {_plain(classes[0])}; name them in classes=."
            )
        if self._likelihood is LOGISTIC and len(classes) > 2:
            raise ValueError(
                "Only binary classification is supported. The type of the target is multiclass: expected 2 classes, "
                f"got {len(classes)}; use DPSoftmaxRegression."
            )
        if sentences:
            warned.warn(
                f"The {len(classes)} class labels were read from y and are taken as public; name them in classes= if a "
                "label could give away a row."
            )
        return classes, sentences

    def _proxy(self, num_examples: int, classes: np.ndarray, private: Any):
        """The public problem to forecast on: `public_data`, or a stand-in of the private rows' shape."""
        if self.public_data is not None:
            X, y = self.public_data
            X, y = validate_data(self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
            return linear_model(self._dataset(X, y, classes), likelihood=self._likelihood)
        shape = Shape(num_examples, private.shape[1], len(classes), row_norm=ROW_NORM, is_sparse=sp.issparse(private))
        return linear_model(stand_in(shape), likelihood=self._likelihood)

    def _dataset(self, X, y, classes: np.ndarray) -> Dataset:
        y = column_or_1d(y)
        labels = np.searchsorted(classes, y).clip(max=len(classes) - 1)
        unknown = classes[labels] != y
        if unknown.any():
            raise ValueError(
                f"Expected labels among classes ({', '.join(map(str, classes[:12]))}), got {_plain(y[unknown][0])} in "
                "y; name every class in classes=."
            )
        features = self._clipped(X) * (ROW_NORM / self.data_norm)
        return Dataset("private rows", features, labels.astype(np.int32), tuple(map(str, classes)))

    def _clipped(self, X) -> Any:
        """Rows longer than data_norm shortened to it; each by itself, so that no row tells of another."""
        data_norm, X = plans.positive(self, "data_norm"), X.astype(np.float64)
        if not sp.issparse(X):
            # By the largest entry first: squares of huge numbers would overflow.
            largest = np.abs(X).max(axis=1, initial=0.0, keepdims=True).clip(min=np.finfo(float).tiny)
            norms = largest * np.linalg.norm(X / largest, axis=1, keepdims=True)
            return X * (data_norm / np.maximum(norms, data_norm))
        X = sp.csr_array(X)
        factors = data_norm / np.maximum(np.sqrt(X.power(2).sum(axis=1)), data_norm)
        return sp.csr_array((X.data * np.repeat(factors, np.diff(X.indptr)), X.indices, X.indptr), shape=X.shape)


_PARAMETERS = """
    Args:
      optimizer: "DP-Adam", "DP-SGD" or "DP-SignSGD".
      target_epsilon, target_delta: the budget of one fit; > 0, and in (0, 1).
      learning_rate: > 0, for rows scaled from data_norm to 4; or "forecast": the best one on a public stand-in.
      l2_clip_norm: of one row's gradient, rows scaled likewise; or "forecast".
      expected_batch_size: B; > 0. None: a tenth of the number of rows, each row drawn with probability 0.1.
      num_epochs: how often a row takes part, expected; each is floor(num_examples / B) steps.
      data_norm: longer rows are shortened to this norm, before training and predicting; a public constant.
      num_examples: declared, public number of rows. None: that of X, which is then taken as public.
      classes: the public class labels. None: those in y, which are then taken as public.
      public_data: (X, y) that are public and like the private ones, to forecast on instead of the stand-in.
      insecure_seed: reproducible, therefore NOT private. None: noise from the operating system.
      secure_noise: batches and noise by a cipher, ChaCha20 (extra [secure]).
    Attributes:
      coef_, intercept_, classes_, n_features_in_, n_iter_: as scikit-learn has them; n_iter_ counts steps.
      privacy_: the guarantee (`noisecast.statement.PrivacyStatement`).
      learning_rate_, l2_clip_norm_, optimizer_, mechanism_, forecast_: what was run, and the forecast of the proxy.
        Nothing of the training rows is kept.
"""


def _plain(label: Any) -> str:
    """As it was typed: 2, not np.int64(2)."""
    return repr(label.item() if isinstance(label, np.generic) else label)


class DPLogisticRegression(_DPLinearClassifier):
    __doc__ = f"""Differentially private logistic regression of two classes, with an intercept.
{_PARAMETERS}
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(2000, 4))
    >>> y = (X[:, 0] > 0).astype(int)
    >>> model = DPLogisticRegression(target_epsilon=1.0, data_norm=2.0, learning_rate=0.05, classes=[0, 1]).fit(X, y)
    >>> model.score(X, y) > 0.8, model.privacy_.epsilon <= 1.0
    (True, True)
    """

    _likelihood = LOGISTIC


class DPSoftmaxRegression(_DPLinearClassifier):
    __doc__ = f"""Differentially private softmax regression of two classes or more, with intercepts.
{_PARAMETERS}
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(2000, 3))
    >>> y = X.argmax(axis=1)
    >>> model = DPSoftmaxRegression(target_epsilon=2.0, data_norm=2.0, learning_rate=0.05, classes=range(3)).fit(X, y)
    >>> model.score(X, y) > 0.7, model.coef_.shape
    (True, (3, 3))
    """

    _likelihood = SOFTMAX
