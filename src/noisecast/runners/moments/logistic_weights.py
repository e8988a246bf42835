"""Gaussian weights of a binary logistic model, and what is seen of them: losses, accuracies, their spread over runs."""

import math
from typing import Any, NamedTuple

import numpy as np

from noisecast.runners.moments.examples import Examples, Rows
from noisecast.runners.moments.forecast import Metrics
from noisecast.runners.moments.mean_output import MeanOutput
from noisecast.runners.moments.pushes import Spreads
from noisecast.theory.adam_averages import Averages
from noisecast.theory.closures import expected_norm
from noisecast.theory.collective_skew import CollectiveSkew, Past
from noisecast.theory.common_swing import GRID, Swing, explained_by_gaussian
from noisecast.theory.logistic_moments import LogisticExpectations, logistic_expectations, loss_given, residual_given
from noisecast.theory.loss_spread import (
    hermite_coefficients,
    linear_covariance,
    mean_loss_std,
    square_covariance,
)
from noisecast.theory.output_law import GaussianLaw, OutputLaw, SkewLaw
from noisecast.theory.own_push import OwnPush

EXAMPLES_OF_SPREAD, EXAMPLES_OF_SQUARES = 200, 8_000


class Weights(NamedTuple):
    """Weights, what the optimizer remembers, what examples have pushed, and how outputs are no Gaussians together.

    Args:
      mean: of [features of the block, bias, rest]; (d,).   covariance: along the block's columns (`Rows`).
      variance: of the rest; (p - K,). Of columns in company along what they are together: it makes their outputs.
      apart: across it, where nothing holds them; (p - K,).
      averages: of gradients, where they are followed step by step.
    """

    mean: np.ndarray
    covariance: np.ndarray
    variance: np.ndarray
    apart: np.ndarray
    memory: Any
    pushed: OwnPush
    swing: Swing
    past: Past
    skew: CollectiveSkew
    averages: Averages | None = None

    def on_the_way_from(self, other: "Weights", share: float) -> "Weights":
        """As these, and as wide as such a share of the way from the other's."""
        return self._replace(
            covariance=share * self.covariance + (1 - share) * other.covariance,
            variance=share * self.variance + (1 - share) * other.variance,
            skew=self.skew.on_the_way_from(other.skew, share),
        )

    def law(self, rows: Rows, spreads: Spreads) -> OutputLaw:
        """Of outputs of rows that have pushed nothing, what they have in common with the swing left out.

        Args:
          spreads: of their outputs.
        """
        law = GaussianLaw(rows.dot(self.mean), spreads.whole)
        return SkewLaw(law, self.skew.gamma(rows.block, law.std)) if self.skew.is_any else law

    def pushed_law(self, rows: Rows, spreads: Spreads, common: MeanOutput) -> OutputLaw:
        """The same of the rows that made these weights.

        Args:
          common: of them.
        """
        law = self.pushed.law(rows.dot(self.mean), *spreads[1:3])
        if not self.skew.is_any:
            return law
        return SkewLaw(law, self.skew.gamma_of_all(rows.block, law.std, common.chosen, common.standing))


def is_finite(at: Weights) -> bool:
    return math.isfinite(float(at.mean @ at.mean + np.trace(at.covariance) + at.variance.sum()))


class Outlook(NamedTuple):
    """What is seen of some examples at Gaussian weights.

    Args:
      expectations: of every example.   alone: variance of its logit by weights that know no example; (n,).
      variance: of its logit.   held: share of `alone`'s deviations with which it moves together with others; (n,).
      correlations: of its logit with the common swing; (n,).
      slope: Cov(logit, loss)/Var logit; (n,).
      law: of the logit, the swing left out.
    """

    expectations: LogisticExpectations
    alone: np.ndarray
    variance: np.ndarray
    held: np.ndarray
    correlations: np.ndarray
    slope: np.ndarray
    law: OutputLaw


class LogisticMetrics:
    """Metrics of a model of so many examples at Gaussian weights, from those that a forecast reads."""

    def __init__(
        self, examples: Examples, common: MeanOutput, num_examples: int, l2_clip_norm: float, *, loss_alone: bool
    ):
        self.examples, self.rows, self.num_examples = examples, examples.train, num_examples
        self.common, self.l2_clip_norm, self.loss_alone = common, l2_clip_norm, loss_alone

    def of(self, at: Weights) -> tuple[Metrics, float, float, float]:
        """Metrics, what a subsample adds to the loss, as a share of it: its standard error, and optimism, and
        `_of_columns_together` and `_of_skewness`.

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
            "params_norm": _norm(self.rows, at.mean, at.covariance, self._of_single_weights(at)),
            "loss_std": self._spread(self.rows, at, seen, self.num_examples),
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
        metrics = {name: float(value) for name, value in metrics.items()}
        return metrics, error, self._of_columns_together(at, seen), self._of_skewness(at, seen)

    def _of_skewness(self, at: Weights, seen: Outlook) -> float:
        """Share of the loss that is gone, or come, by the skewness that outputs have of each other."""
        if not isinstance(seen.law, SkewLaw):
            return 0.0
        bound, shared = residual_bound(self.l2_clip_norm, self.rows), at.swing.departures(seen.correlations)
        without = float(logistic_expectations(seen.law.law, self.rows.labels, bound, shared).loss.mean())
        return abs(1 - float(seen.expectations.loss.mean()) / without) if without > 0 else 0.0

    def _of_columns_together(self, at: Weights, seen: Outlook) -> float:
        """Share of the loss that columns make by what they do together, forecast as of independent ones."""
        loss = float(seen.expectations.loss.mean())
        if not (self.rows.together and is_finite(at) and 0 < loss < math.inf):
            return 0.0
        side = np.where(self.rows.labels == 1, 1.0, -1.0)
        of_noise = 1 - float(np.logaddexp(0.0, -side * self.rows.dot(at.mean)).mean()) / loss
        of_rest = float(self.rows.rest_spread(at.variance).mean()) / max(float(seen.variance.mean()), 1e-30)
        return of_noise * of_rest * self.rows.together

    def _of_single_weights(self, at: Weights) -> np.ndarray:
        """Variances of the rest's: of m columns in company one of m directions is held."""
        return at.apart + (at.variance - at.apart) / self.rows.company

    def _more_metrics(self, at: Weights, seen: Outlook) -> Metrics:
        """What a search for the least loss does without."""
        metrics = {"gradient_norm": self._gradient_norm(at, seen)}
        if self.examples.test is not None:
            unseen = self._outlook(self.examples.test, at, None)
            metrics["test_loss"] = unseen.expectations.loss.mean()
            metrics["test_accuracy"] = unseen.expectations.probability_of_right.mean()
            metrics["test_loss_std"] = self._spread(self.examples.test, at, unseen, self.examples.test.num_examples)
        return metrics

    def _gradient_norm(self, at: Weights, seen: Outlook) -> float:
        """E|g|: of Gaussians, times what the common swing makes of it."""
        found, few = seen.expectations, self.common.chosen
        gradient = self.rows.mean_of(found.full_residual)
        jacobian = self.rows.block_second_moment(found.full_slope)
        rest = self.rows.rest_second_moment(found.full_slope) - self.rows.rest_moment_along(found.full_slope)
        spread, rest_spread = jacobian @ at.covariance @ jacobian, rest**2 * self.rows.company * at.variance
        law = self.rows.dot(at.mean)[few], seen.variance[few], self.rows.labels[few], np.full(len(few), np.inf)
        given = self.common.few.T @ residual_given(*law, seen.correlations[few], at.swing) / len(few)
        along = jacobian @ at.covariance @ self.common.direction / max(self.common.std(at.covariance), 1e-12)
        left = spread - np.outer(along, along)
        return at.swing.mean_of(
            [_norm(self.rows, gradient + self.rows.from_block(each), left, rest_spread) for each in given.T]
        )

    def _outlook(self, data: Rows, at: Weights, pushed: OwnPush | None) -> Outlook:
        swings = self.common.swings(data, at.covariance)
        spreads = Spreads.of(data, swings, at)
        if pushed is None:
            law, held, swinging = at.law(data, spreads), np.ones(data.num_examples), np.ones(data.num_examples)
        else:
            law = at.pushed_law(data, spreads, self.common)
            held, swinging = pushed.remaining_share(*spreads[1:3]), pushed.swinging_share(spreads.swing)
        alone = spreads.whole
        bound, variance = residual_bound(self.l2_clip_norm, data), law.std**2
        correlations = self.common.correlations(swings, law.std, swinging)
        found = logistic_expectations(law, data.labels, bound, at.swing.departures(correlations))
        slope = found.loss_slope if at.skew.is_any else found.full_residual
        return Outlook(found, alone, variance, held, correlations, slope, law)

    def _spread(self, data: Rows, at: Weights, seen: Outlook, num_examples: int) -> float:
        """Standard deviation of the loss over runs: what examples have of their own, and together by its slope, from
        all of them, and, in the block, its curvature, from thousands; beyond that from some.
        """
        side = np.where(data.labels == 1, 1.0, -1.0)
        slope, bend = _straight_and_bent(seen, side)
        pull = data.mean_of(slope * seen.held)
        within = data.in_block(pull)
        together = within @ at.covariance @ within + data.beside(pull[data.split :]) ** 2 @ at.variance
        linear = linear_covariance(float(together), (slope * seen.held) ** 2 * seen.alone)
        chosen, bends = spaced(data.num_examples, EXAMPLES_OF_SPREAD), np.maximum(bend, 0.0) * seen.held**2
        few, held, std = data.take(chosen), seen.held[chosen], np.sqrt(np.maximum(seen.variance[chosen], 1e-8))
        covariance = few.logit_covariance(at.covariance, at.variance)
        beside = _square_of_few(bends[chosen], covariance)
        beside -= _square_of_few(bends[chosen], few.block_covariance(at.covariance))
        known = {1: linear, 2: _square(data.block, at.covariance, bends) + beside}
        covariance *= np.outer(held, held)
        np.fill_diagonal(covariance, std**2)
        loss = hermite_coefficients(lambda x: np.logaddexp(0.0, -side[chosen, None] * seen.law.at(x, chosen)))
        own = float(seen.expectations.loss_variance.mean())
        of_gaussian = mean_loss_std(loss, covariance, std, own, num_examples, known=known)
        swing, of_gaussian_swing = _spread_by_swing(data.labels[chosen], at.swing, seen, slope, bend, chosen)
        others = max(of_gaussian**2 - of_gaussian_swing, 0.0)
        return math.sqrt(others + swing)


def spaced(num_examples: int, count: int) -> np.ndarray:
    """Places of about so many of them, or of all.

    >>> spaced(7, 3)
    array([0, 2, 4, 6])
    """
    return np.arange(0, num_examples, max(1, num_examples // count))


def _spread_by_swing(
    labels: np.ndarray, swing: Swing, seen: Outlook, slope: np.ndarray, bend: np.ndarray, chosen: np.ndarray
) -> tuple[float, float]:
    """Variance of E[loss | s], and what of it Gaussian swings have in the orders of `hermite_coefficients`.

    By some examples, and their own laws, but for what is straight and square in s, which is that of all.

    Args:
      labels: of some; (m,).   swing: the law of s.   slope, bend: `_straight_and_bent`; (n,).
      chosen: which are some; (m,).
    """
    law, correlations = seen.law, seen.correlations
    loss = loss_given(lambda x: law.at(x, chosen), labels, correlations[chosen], swing).mean(axis=0)
    straight, square = slope * correlations * law.std, bend * (correlations * law.std) ** 2 / 2
    loss += (straight.mean() - straight[chosen].mean()) * GRID
    loss += (square.mean() - square[chosen].mean()) * (GRID**2 - 1)
    return swing.variance_of(loss), straight.mean() ** 2 + explained_by_gaussian(loss, orders=(2, 3, 4))


def _straight_and_bent(seen: Outlook, side: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What of losses is linear and square in the Gaussian x behind an output: E[loss x]/std, E[loss (x^2 - 1)]/Var."""
    if not isinstance(seen.law, SkewLaw):
        return seen.slope, seen.expectations.loss_bend
    first, second = hermite_coefficients(lambda x: np.logaddexp(0.0, -side[:, None] * seen.law.at(x)), order=2)
    return first / seen.law.std, second / seen.law.std**2


def _square(block: np.ndarray, covariance: np.ndarray, bends: np.ndarray) -> float:
    """Mean over pairs of examples of a_i a_l (x_i' V x_l)^2, a the bends, in the block."""
    some = spaced(len(block), EXAMPLES_OF_SQUARES)
    rows, bends = block[some], bends[some]
    along = rows @ covariance.astype(np.float32)
    bent = ((rows * (bends / len(some)).astype(np.float32)[:, None]).T @ along).astype(np.float64)  # H V
    return square_covariance(float(np.einsum("ij,ji->", bent, bent)), bends * np.vecdot(along, rows))


def _square_of_few(bends: np.ndarray, covariance: np.ndarray) -> float:
    """The same of examples whose outputs have such a covariance; (n, n)."""
    products = bends[:, None] * covariance**2 * bends
    return square_covariance(float(products.mean()), np.sqrt(np.diag(products)))


def residual_bound(l2_clip_norm: float, data: Rows) -> np.ndarray:
    """C/sqrt(|x|^2 + 1): what clipping leaves of an example's residual; (n,)."""
    return l2_clip_norm / data.lengths


def _norm(rows: Rows, mean: np.ndarray, covariance: np.ndarray, variance: np.ndarray) -> float:
    """E|X| for X ~ N(mean, [covariance, diag(variance)]), in the rows' block and beside it."""
    variance = variance * (1 - rows.joint_shares.sum(axis=1))
    mean_square = mean @ mean + max(float(np.trace(covariance)), 0.0) + variance.sum()  # rounding may leave less
    within = rows.in_block(mean)
    along = max(float(within @ covariance @ within), 0.0) + rows.beside(mean[rows.split :]) ** 2 @ variance
    return expected_norm(mean_square, 2 * (np.sum(covariance**2) + variance @ variance) + 4 * along)
