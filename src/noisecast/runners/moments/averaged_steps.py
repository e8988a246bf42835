"""Steps of an optimizer whose averages of gradients are followed one by one, with the weights (`adam_averages`)."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from noisecast.runners.moments.parted_rows import PartedRows, gain_in_block
from noisecast.theory.adam_averages import AveragedSteps, Averages, Fluctuations


class Followed(NamedTuple):
    """Weights and averages. Vectors are (d,), or (d, m) of m outputs, whose block comes first: (m, W, W).

    Args:
      mean: of the weights.   covariance: along the block's columns.
      variances: of the rest, beside them: (..., p - K) or (..., p - K, m), the first with J, others for comparison.
      averages: of gradients.
    """

    mean: np.ndarray
    covariance: np.ndarray
    variances: np.ndarray
    averages: Averages


class Frozen(NamedTuple):
    """What does not change meanwhile.

    Args:
      pull: mean weights -> mean gradient.   variance: of the gradient, coordinate by coordinate.
      jacobian, noise: along the block's columns; noise at given weights.   rest_jacobian, rest_noise: as `variances`.
    """

    pull: Callable[[np.ndarray], np.ndarray]
    variance: np.ndarray
    jacobian: np.ndarray
    noise: np.ndarray
    rest_jacobian: np.ndarray
    rest_noise: np.ndarray


def no_averages(mean: np.ndarray, covariance: np.ndarray, variances: np.ndarray) -> Averages:
    """At the start of such weights."""
    nothing = np.zeros_like(mean)
    return Averages(nothing, nothing, Fluctuations.none(*covariance.shape), Fluctuations.none(*variances.shape))


def followed(
    at: Followed, frozen: Frozen, steps: AveragedSteps, rows: PartedRows, learning_rate: float, step: int,
    num_steps: int,
) -> Followed:  # fmt: skip
    """num_steps after the first `step`.

    Along the joint directions of the rest averages are taken for linear: each is made of many columns, of which none
    alone is far above its noise.
    """
    mean, covariance, variances, (first, second, block, others) = at
    split, variance, width = rows.split, frozen.variance, frozen.jacobian.shape[-1]
    for t in range(step + 1, step + num_steps + 1):
        pull = frozen.pull(mean)
        first, second = steps.means(first, second, pull, variance)
        law = _of_columns(pull, split, width), _of_columns(variance, split, width)
        block = steps.taken_in(covariance, block, frozen.jacobian, frozen.noise, *law)
        law = pull[split:], variance[split:]
        others = steps.taken_in(variances, others, frozen.rest_jacobian, frozen.rest_noise, *law, independent=True)
        both, spread = (
            np.concatenate([np.einsum("...ii->i...", one)[:split], other[0]])
            for one, other in ((block.both, others.both), (block.second, others.second))
        )
        taken = steps.direction(first, second, both, spread, t)
        within = taken._replace(
            of_first=gain_in_block(rows, taken.of_first).T, of_second=_of_columns(taken.of_second, split, width)
        )
        beside = taken._replace(of_first=taken.of_first[split:], of_second=taken.of_second[split:])
        covariance, block = steps.moved(covariance, block, within, learning_rate=learning_rate)
        variances, others = steps.moved(variances, others, beside, learning_rate=learning_rate, independent=True)
        mean = mean - learning_rate * taken.expected
    covariance = (covariance + np.swapaxes(covariance, -1, -2)) / 2
    return Followed(mean, covariance, variances, Averages(first, second, block, others))


def _of_columns(each: np.ndarray, split: int, width: int) -> np.ndarray:
    """Of the block's own columns, 0 along the joint directions; (W,) or (m, W)."""
    return np.concatenate([each[:split], np.zeros((width - split, *each.shape[1:]))]).T
