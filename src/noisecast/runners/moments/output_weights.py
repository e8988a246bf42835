"""Gaussian weights of a linear model with several outputs, and what is seen of them: losses, accuracies, spreads."""

import math
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from noisecast.runners.moments.forecast import Metrics
from noisecast.runners.moments.output_examples import OutputExamples, OutputRows
from noisecast.theory.adam_averages import Averages
from noisecast.theory.loss_spread import std_of_mean
from noisecast.theory.softmax_moments import (
    OutputExpectations,
    expected_labels_in_top,
    output_expectations,
    probability_of_likeliest,
)

NUMBERS_IN_SAMPLES = 8_000_000  # that many, divided by the weights, are the pairs of samples of them, 4 to 64
ROWS_OF_SAMPLES = 4_000  # examples on which those samples' losses are looked at
LOGITS_OF_GRADIENTS = 10_000_000  # that many, divided by examples times outputs, are the pairs that ask for gradients
FEWEST_PAIRS = 16  # that say a standard deviation, to 12 %


class Weights(NamedTuple):
    """Gaussian weights in the order [block, rest], and what the optimizer remembers.

    Args:
      mean: (d, m).   covariance: along the block's columns; (m, K + 1 + r, K + 1 + r).
      variance: of the rest, beside them; (p - K, m).
      own: variance of the training examples' logits by the rest, over that of independent weights; (n, m).
      common: variance that all outputs share, which no loss sees; of the block's columns, and of the rest.
      averages: of gradients, where they are followed step by step.
    """

    mean: np.ndarray
    covariance: np.ndarray
    variance: np.ndarray
    own: np.ndarray
    common: np.ndarray
    memory: Any
    averages: Averages | None = None

    @property
    def is_finite(self) -> bool:
        return math.isfinite(float(np.sum(self.mean**2) + self.covariance.sum() + self.variance.sum()))


def _few(rows: OutputRows) -> OutputRows:
    return rows.take(np.arange(0, rows.num_examples, -(-rows.num_examples // ROWS_OF_SAMPLES)))


class OutputMetrics:
    """Metrics of a model at Gaussian weights, from the examples that a forecast reads."""

    def __init__(self, examples: OutputExamples, l2_clip_norm: float, *, loss_alone: bool):
        self.examples, self.rows, self.outputs = examples, examples.train, examples.law
        self.l2_clip_norm, self.loss_alone = l2_clip_norm, loss_alone
        self.split, self.num_outputs = self.rows.split, self.rows.targets.shape[1]
        self.few = _few(examples.train)
        self.few_tests = None if examples.test is None else _few(examples.test)

    def _logits(self, rows: OutputRows, at: Weights, own: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of the logits; (n, m) each."""
        return rows.dot(at.mean), rows.block_variance(at.covariance) + own * rows.rest_variance(at.variance)

    def expectations(self, rows: OutputRows, at: Weights, own: Any = 1.0) -> OutputExpectations:
        mean, variance = self._logits(rows, at, own)
        return output_expectations(
            self.outputs, mean, variance, rows.targets, self.l2_clip_norm / rows.lengths, rows.nodes
        )

    def of(self, at: Weights, expectations: OutputExpectations) -> Metrics:
        beside, width = 1 - self.rows.joint_shares.sum(axis=1), self.rows.block.shape[1]
        spread = np.einsum("aii->", at.covariance) + beside @ at.variance.sum(axis=1)
        norm = np.sum(at.mean**2) + spread
        if self.outputs.is_coupled:
            norm += at.common[:width].sum() + beside @ at.common[width:] - spread / self.num_outputs
        metrics = {
            **self._quality(self.rows, at, at.own),
            "loss": expectations.loss.mean(),
            "clip_fraction": expectations.clip_fraction.mean(),
            "params_norm": math.sqrt(norm),
        }
        if not self.loss_alone:
            metrics |= self._more_metrics(at)
        return {name: float(value) for name, value in metrics.items()}

    def _more_metrics(self, at: Weights) -> Metrics:
        """What a search for the least loss does without."""
        metrics = self._sampled(at)
        if self.examples.test is not None:
            test = self.examples.test
            found = {
                **self._quality(test, at, 1.0),
                "loss": self.expectations(test, at).loss.mean(),
            }
            metrics |= {f"test_{name}": value for name, value in found.items()}
        return metrics

    def _quality(self, rows: OutputRows, at: Weights, own: Any) -> Metrics:
        mean, variance = self._logits(rows, at, own)
        if self.outputs.is_coupled:
            return {"accuracy": probability_of_likeliest(mean, variance, rows.labels, rows.nodes).mean()}
        positive = special.ndtr(mean / np.sqrt(np.maximum(variance, 1e-30)))
        positive[(mean == 0) & (variance == 0)] = 0.0  # a logit of 0 is no guess
        labels, guesses = rows.targets.sum(), positive.sum()
        in_top = expected_labels_in_top(mean, variance, rows.targets, rows.nodes, top=5).sum()
        return {
            "recall_at_5": in_top / max(labels, 1.0),
            "micro_f1": 2 * (positive * rows.targets).sum() / max(labels + guesses, 1e-30),
        }

    def _sampled(self, at: Weights) -> Metrics:
        """E |gradient|, and the standard deviation of the losses over runs, from points of the weights' own law.

        Where logits spread over more than one unit a loss is no parabola in the weights, and formulas that take it for
        one are off by half. Pairs m +- V^(1/2) xi, the same xi for everybody; with too few there is no deviation. The
        variance of what is linear in the weights is known: that of the pairs is put right by it.
        """
        rng = np.random.default_rng(20_240_818)  # points of a quadrature: nothing private is drawn
        parts = {"": (self.few, self.examples.num_all)}
        if self.few_tests is not None:
            parts["test_"] = (self.few_tests, self.examples.num_tests)
        if not at.is_finite:
            return dict.fromkeys(["gradient_norm", *(f"{name}loss_std" for name in parts)], math.nan)
        losses, moved = {name: [] for name in parts}, {name: [] for name in parts}
        linear = {name: self._linear_loss(rows, at) for name, (rows, _) in parts.items()}
        norms, scale = [], self.outputs.scale(self.num_outputs)
        num_pairs = int(np.clip(NUMBERS_IN_SAMPLES // at.mean.size, 4, 64))
        num_gradients = max(4, LOGITS_OF_GRADIENTS // self.rows.targets.size)
        for pair in range(num_pairs):
            offset = self._root_times(at, rng.standard_normal((len(at.common), self.num_outputs)))
            for weights in (at.mean + offset, at.mean - offset):
                for name, (rows, _) in parts.items():
                    logits = rows.dot(weights)
                    _, normaliser = self.outputs.probabilities(logits)
                    losses[name].append(scale * (normaliser - (logits * rows.targets).sum(axis=1)))
                    moved[name].append(np.einsum("ij,ij->", linear[name][0], logits) / rows.num_examples)
                if pair < num_gradients:  # of all examples: the gradient of a few is mostly chance
                    probabilities, _ = self.outputs.probabilities(self.rows.dot(weights))
                    norms.append(scale * float(np.linalg.norm(self.rows.mean_of(probabilities - self.rows.targets))))
        deviations = {
            f"{name}loss_std": std_of_mean(
                np.array(losses[name]), num_examples, more=linear[name][1] - float(np.var(moved[name]))
            )
            for name, (_, num_examples) in parts.items()
        }
        return {"gradient_norm": float(np.mean(norms)), **(deviations if num_pairs >= FEWEST_PAIRS else {})}

    def _linear_loss(self, rows: OutputRows, at: Weights) -> tuple[np.ndarray, float]:
        """E dl_i/dz_i, (n, m), and the variance over runs of (1/n) sum_i E l_i' . dz_i, the mean loss's linear part."""
        unclipped = np.full(rows.num_examples, np.inf)
        slopes = output_expectations(
            self.outputs, *self._logits(rows, at, 1.0), rows.targets, unclipped, rows.nodes
        ).residual
        gradient = rows.mean_of(slopes)
        of_block = rows.in_block(gradient)
        of_rest = rows.beside(gradient[self.split :])
        variance = np.einsum("ia,aij,ja->", of_block, at.covariance, of_block) + np.sum(of_rest**2 * at.variance)
        return slopes, float(variance)

    def _root_times(self, at: Weights, vector: np.ndarray) -> np.ndarray:
        """V^(1/2) v, of the block's columns and of the rest beside them."""
        width = self.rows.block.shape[1]
        eigenvalues, basis = np.linalg.eigh(at.covariance)
        inside = np.einsum("aji,ja->ia", basis, vector[:width])
        offset = self.rows.from_block(np.einsum("aij,ja->ia", basis, np.sqrt(np.maximum(eigenvalues, 0.0)).T * inside))
        offset[self.split :] += self.rows.beside(np.sqrt(np.maximum(at.variance, 0.0)) * vector[width:])
        return offset

    def of_noise(self, at: Weights, expectations: OutputExpectations) -> float:
        """Share of the loss that would be gone without fluctuations.

        They are independent here between outputs; two outputs of a softmax are forecast as they are, as only their
        difference counts (`OutputLaw.gauge`).
        """
        if not at.is_finite:
            return 0.0
        logits = self.rows.dot(at.mean)
        _, normaliser = self.outputs.probabilities(logits)
        without = float(normaliser.mean() - np.einsum("ij,ij->i", logits, self.rows.targets).mean())
        loss = float(expectations.loss.mean())
        return 1 - self.outputs.scale(self.num_outputs) * without / loss if loss > 0 else 0.0

    def of_columns_together(self, at: Weights) -> float:
        """Share of the logits' variance that is forecast as of independent weights, and is not."""
        _, variance = self._logits(self.few, at, 1.0)
        rest = self.few.rest_variance(at.variance)
        return self.rows.together * float(rest.mean()) / max(float(variance.mean()), 1e-30)

    def subsample_effect(self, at: Weights, expectations: OutputExpectations) -> tuple[float, float]:
        """What fewer examples take from the loss, and the share of it that stays unknown: see `logistic`."""
        if self.examples.held_out is None:
            return 0.0, 0.0
        seen, unseen = expectations.loss, self.expectations(self.examples.held_out, at).loss
        left_out = 1 - self.rows.num_examples / self.examples.num_all
        optimism = left_out * float(unseen.mean() - seen.mean()) / 2
        chance = float(seen.std()) * math.sqrt(left_out / (2 * len(seen)))
        return optimism, (abs(optimism) / 4 + chance) / float(seen.mean() + optimism)
