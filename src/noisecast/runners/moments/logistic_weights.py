"""Gaussian weights of a binary logistic model, and what is seen of them: losses, accuracies, their spread over runs."""

import math
from typing import Any, NamedTuple

import numpy as np

from noisecast.runners.moments.examples import Examples, Rows
from noisecast.runners.moments.forecast import Metrics
from noisecast.theory.closures import expected_norm
from noisecast.theory.logistic_moments import LogisticExpectations, logistic_expectations
from noisecast.theory.loss_spread import hermite_coefficients, linear_variance, mean_loss_std
from noisecast.theory.own_push import OwnPush

EXAMPLES_OF_SPREAD = 200


class Weights(NamedTuple):
    """Gaussian weights, what the optimizer remembers, and what examples have pushed.

    Args:
      mean: of [features of the block, bias, rest]; (d,).   covariance: along the block's columns (`Rows`).
      variance: of the rest; (p - K,).
    """

    mean: np.ndarray
    covariance: np.ndarray
    variance: np.ndarray
    memory: Any
    pushed: OwnPush


def is_finite(at: Weights) -> bool:
    return math.isfinite(float(at.mean @ at.mean + np.trace(at.covariance) + at.variance.sum()))


def between(one: Weights, other: Weights, share: float) -> Weights:
    """The first, and that share of the way to the other; a covariance stays one."""
    mean, covariance, variance = ((1 - share) * a + share * b for a, b in zip(one[:3], other[:3]))
    pushed = OwnPush(*((1 - share) * a + share * b for a, b in zip(one.pushed, other.pushed)))
    return Weights(mean, covariance, variance, other.memory, pushed)


class Outlook(NamedTuple):
    """What is seen of some examples at Gaussian weights.

    Args:
      expectations: of every example.   alone: variance of its logit by weights that know no example; (n,).
      variance: of its logit.   held: share of `alone`'s deviations with which it moves together with others; (n,).
    """

    expectations: LogisticExpectations
    alone: np.ndarray
    variance: np.ndarray
    held: np.ndarray


class LogisticMetrics:
    """Metrics of a model of so many examples at Gaussian weights, from those that a forecast reads."""

    def __init__(self, examples: Examples, num_examples: int, l2_clip_norm: float, *, loss_alone: bool):
        self.examples, self.rows, self.num_examples = examples, examples.train, num_examples
        self.l2_clip_norm, self.loss_alone = l2_clip_norm, loss_alone

    def of(self, at: Weights) -> tuple[Metrics, float]:
        """Metrics, and what a subsample adds to the loss, as a share of it: its standard error, and optimism.

        Weights fitted to m examples are better on them by a/m, and worse on others by a/m: the gap is 2 a/m. With all n
        it would be 2 a/n, so the loss is a (1/m - 1/n) = (1 - m/n) gap/2 too low; that is added. What remains is taken
        to be a quarter of it.
        """
        seen = self._outlook(self.rows, at, at.pushed)
        found = seen.expectations
        metrics = {
            "loss": found.loss.mean(),
            "accuracy": found.probability_of_right.mean(),
            "clip_fraction": found.clip_fraction.mean(),
            "params_norm": _norm(self.rows, at.mean, at.covariance, at.variance),
        }
        error = 0.0
        if self.examples.held_out is not None:
            unseen = self._outlook(self.examples.held_out, at, None).expectations
            share = self.examples.left_out / 2
            optimism = share * (float(unseen.loss.mean()) - metrics["loss"])
            metrics["loss"] += optimism
            metrics["accuracy"] += share * (unseen.probability_of_right.mean() - metrics["accuracy"])
            chance = float(found.loss.std()) / math.sqrt(2 * self.rows.num_examples) * math.sqrt(self.examples.left_out)
            error = (abs(optimism) / 4 + chance) / metrics["loss"]
        if not self.loss_alone:
            metrics |= self._more_metrics(at, seen)
        return {name: float(value) for name, value in metrics.items()}, error

    def _more_metrics(self, at: Weights, seen: Outlook) -> Metrics:
        """What a search for the least loss does without."""
        found = seen.expectations
        gradient = self.rows.mean_of(found.full_residual)
        jacobian = self.rows.block_second_moment(found.full_slope)
        rest = self.rows.rest_second_moment(found.full_slope) - self.rows.rest_moment_along(found.full_slope)
        metrics = {
            "gradient_norm": _norm(self.rows, gradient, jacobian @ at.covariance @ jacobian, rest**2 * at.variance),
            "loss_std": self._spread(self.rows, at, seen, self.num_examples),
        }
        if self.examples.test is not None:
            unseen = self._outlook(self.examples.test, at, None)
            metrics["test_loss"] = unseen.expectations.loss.mean()
            metrics["test_accuracy"] = unseen.expectations.probability_of_right.mean()
            metrics["test_loss_std"] = self._spread(self.examples.test, at, unseen, self.examples.test.num_examples)
        return metrics

    def _outlook(self, data: Rows, at: Weights, pushed: OwnPush | None) -> Outlook:
        alone = data.block_spread(at.covariance) + data.rest_spread(at.variance)
        pushed = OwnPush.none(data.num_examples) if pushed is None else pushed
        variance, held = pushed.output_variance(alone), pushed.remaining_share(alone)
        bound = residual_bound(self.l2_clip_norm, data)
        found = logistic_expectations(data.dot(at.mean), variance, data.labels, bound, pushed.third_moment)
        return Outlook(found, alone, variance, held)

    def _spread(self, data: Rows, at: Weights, seen: Outlook, num_examples: int) -> float:
        """Standard deviation of the loss over runs: by its slope from all examples, beyond that from some of them."""
        residual = seen.expectations.full_residual
        pull = data.mean_of(residual * seen.held)
        within = data.in_block(pull)
        together = within @ at.covariance @ within + data.beside(pull) ** 2 @ at.variance
        linear = linear_variance(
            float(together), (residual * seen.held) ** 2 * seen.alone, residual**2 * seen.variance, num_examples
        )
        chosen = np.arange(0, data.num_examples, max(1, data.num_examples // EXAMPLES_OF_SPREAD))
        few, held, variance = data.take(chosen), seen.held[chosen], seen.variance[chosen]
        covariance = few.logit_covariance(at.covariance, at.variance) * np.outer(held, held)
        np.fill_diagonal(covariance, variance)
        std = np.sqrt(np.maximum(variance, 1e-8))
        side = np.where(few.labels == 1, 1.0, -1.0)
        loss = hermite_coefficients(lambda z: np.logaddexp(0.0, -side[:, None] * z), few.dot(at.mean), std)
        return mean_loss_std(loss, covariance, std, num_examples, linear=linear)


def residual_bound(l2_clip_norm: float, data: Rows) -> np.ndarray:
    """C/sqrt(|x|^2 + 1): what clipping leaves of an example's residual; (n,)."""
    return l2_clip_norm / data.lengths


def _norm(rows: Rows, mean: np.ndarray, covariance: np.ndarray, variance: np.ndarray) -> float:
    """E|X| for X ~ N(mean, [covariance, diag(variance)]), in the rows' block and beside it."""
    variance = variance * (1 - rows.joint_shares.sum(axis=1))
    mean_square = mean @ mean + np.trace(covariance) + variance.sum()
    within = rows.in_block(mean)
    along = within @ covariance @ within + rows.beside(mean) ** 2 @ variance
    return expected_norm(mean_square, 2 * (np.sum(covariance**2) + variance @ variance) + 4 * along)
