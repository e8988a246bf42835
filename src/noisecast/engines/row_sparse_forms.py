"""What the row-sparse engine has a form of: the optimizers' compiled steps, the problems' arrays and metrics."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from noisecast.engines import _adam_kernels, _factor_kernels, _kernels, _linear_kernels, _wide_adam_kernels
from noisecast.optimizers import DPSGD, DPAdam, DPSignSGD
from noisecast.problems.clipping import NORM_SLACK
from noisecast.problems.linear import LOGISTIC, MULTI_LABEL, SOFTMAX, Labelled, LinearModel
from noisecast.problems.matrix_factorization import MatrixFactorization, RatedPairs, squared_norm_slack
from noisecast.problems.rows import SparseRows


@dataclass(frozen=True)
class CompiledOptimizer:
    """An optimizer's compiled form: its steps, the flush of what they postpone (None: nothing), its settings.

    Args:
      wide_steps: of a run that is alone in its block, where that has steps of its own: they draw in one lane.
    """

    steps: Callable[..., None]
    flush: Callable[..., None] | None
    wide_steps: Callable[..., None] | None = None
    num_moments: int = 0
    settings: Callable[[Any, Any], tuple] = field(default=lambda optimizer, mechanism: ())


def _adam_steps(weights, last, *arguments) -> None:
    _adam_kernels.adam_steps(weights, *arguments)


def _wide_adam_steps(weights, last, *arguments) -> None:
    _wide_adam_kernels.wide_adam_steps(weights, *arguments)


COMPILED = {
    DPSGD: CompiledOptimizer(_kernels.sgd_steps, _kernels.flush_sgd),
    DPSignSGD: CompiledOptimizer(_kernels.sign_steps, _kernels.flush_sign),
    DPAdam: CompiledOptimizer(
        _adam_steps,
        None,
        _wide_adam_steps,
        num_moments=2,
        settings=lambda adam, mechanism: (float(mechanism.expected_batch_size), adam.b1, adam.b2, adam.eps),
    ),
}


@dataclass(frozen=True)
class Form:
    """A problem as the kernels take it; they know it by the type of its examples. What is about noise is not in here.

    Args:
      columns: parameters that a row holds of one run.
      examples: (problem's data) -> the named tuple of arrays for which `_kernels.bring` was told what to do.
      evaluate: the kernel of the metrics, with the arguments of `_linear_kernels.evaluate`.
      num_scores, metrics: what it sums up beside losses, and what is made of the means: as in `linear.Likelihood`.
    """

    columns: int
    examples: Callable[[Any], Any]
    evaluate: Callable[..., None]
    num_scores: int
    metrics: Callable[[Any], dict[str, Any]]


_LIKELIHOODS = {
    LOGISTIC: _linear_kernels.LOGISTIC,
    SOFTMAX: _linear_kernels.SOFTMAX,
    MULTI_LABEL: _linear_kernels.MULTI_LABEL,
}


def form_of(problem: Any) -> Form | str:
    """Its form, or the sentence that says why it has none.

    Args:
      problem: any of `noisecast.problems`.
    Returns: Form or str.
    """
    if isinstance(problem, MatrixFactorization):
        return Form(
            columns=problem.dim,
            examples=lambda pairs: ratings_of(pairs, problem),
            evaluate=_factor_kernels.evaluate,
            num_scores=1,
            metrics=lambda means: {"rmse": np.sqrt(means[0])},
        )
    if not isinstance(problem, LinearModel) or not isinstance(problem.train.rows, SparseRows):
        return (
            f"{problem.name} is not a linear model on sparse rows, nor a matrix factorisation, "
            "so a step touches most of its parameters."
        )
    if problem.likelihood not in _LIKELIHOODS:
        return f"There is no row-sparse form of {problem.likelihood.name}."
    return Form(
        columns=problem.num_outputs,
        examples=lambda data: examples_of(data, _LIKELIHOODS[problem.likelihood]),
        evaluate=_linear_kernels.evaluate,
        num_scores=problem.likelihood.num_scores,
        metrics=problem.likelihood.metrics,
    )


def ratings_of(pairs: RatedPairs, problem: MatrixFactorization) -> _factor_kernels.Ratings:
    """The rated pairs as the kernels take them."""
    slack, vanished = squared_norm_slack(problem.dim)
    users, items, labels = (np.asarray(array) for array in (pairs.users, pairs.items, pairs.labels))
    return _factor_kernels.Ratings(users, items, labels, np.float32(2 * problem.error_weight), slack, vanished)


def examples_of(data: Labelled, likelihood: int) -> _linear_kernels.Examples:
    """The data set's own rows, without a copy."""
    rows: Any = data.rows
    # Unsigned: compiled code need not ask whether a row number counts from the end.
    indices = rows.indices.view(np.uint32)
    norms = np.sqrt(rows.squared_norms.astype(np.float64) + 1.0).astype(np.float32)
    upwards = norms * np.float32(NORM_SLACK)
    labels = np.asarray(data.labels, np.int32).reshape(len(norms), -1)
    return _linear_kernels.Examples(
        rows.starts[:-1], rows.starts[1:], indices, rows.values, labels, upwards, likelihood
    )
