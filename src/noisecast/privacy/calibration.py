"""The noise for a target epsilon: the least that the accountants prove enough.

Epsilon falls as the noise grows, so this is a search on ln z: where a cheap Renyi bound meets the target, secants on
the epsilon that `accounting` proves take over. Whatever the search did, the answer is rounded up and checked.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from noisecast.privacy.accounting import epsilon_spent, epsilons_by_rdp
from noisecast.privacy.mechanism import SampledGaussian

LOG_MULTIPLIERS = (math.log(1e-3), math.log(1e6))  # where calibration looks
WHOLE_ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256, 512, 1024)


def calibrate_noise_multiplier(
    mechanism: SampledGaussian, *, target_epsilon: float, target_delta: float, num_steps: int
) -> SampledGaussian:
    """The mechanism with the least noise whose epsilon stays within target_epsilon, checked after it is found.

    The noise multiplier is rounded up to four digits; epsilon(z) <= target_epsilon < epsilon(0.99 z).

    Args:
      mechanism: as it shall be; its noise_multiplier is ignored.
      target_epsilon: > 0, finite.   target_delta: 0 < delta < 1.   num_steps: T >= 1.
    Raises: ValueError when a number is out of range or no noise multiplier from 0.001 to 10^6 is the answer.

    >>> from noisecast.privacy.sampling import Poisson
    >>> mechanism = SampledGaussian(noise_multiplier=0.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, 25_000))
    >>> found = calibrate_noise_multiplier(mechanism, target_epsilon=1.0, target_delta=1e-5, num_steps=39_000)
    >>> 2.01 < found.noise_multiplier < 2.03
    True
    """
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"Expected a finite target_epsilon > 0, got {target_epsilon}.")
    if num_steps < 1:
        raise ValueError(f"Expected num_steps >= 1, got {num_steps}.")

    def epsilon(z: float) -> float:
        candidate = mechanism.with_noise_multiplier(z)
        return epsilon_spent(candidate, num_steps=num_steps, target_delta=target_delta).epsilon

    too_little = [0.0]  # noise: with it, and by monotonicity with less, the budget is exceeded

    @cache
    def excess(log_z: float) -> float:
        ratio = epsilon(math.exp(log_z)) / target_epsilon
        if ratio > 1:
            too_little.append(math.exp(log_z))
        return math.log(min(max(ratio, 1e-3), 1e12))  # epsilon may be 0, or infinite

    start = _log_multiplier_by_rdp(mechanism, target_epsilon, target_delta, num_steps)
    z = _round_up_to_four_digits(math.exp(_zero_of(excess, start, target_epsilon)))
    while epsilon(z) > target_epsilon:  # the private side, whatever the search did
        z = _round_up_to_four_digits(z * 1.0005)
    while 0.99 * z > max(too_little) and epsilon(0.99 * z) <= target_epsilon:
        z = 0.99 * z
    return mechanism.with_noise_multiplier(z)


def _log_multiplier_by_rdp(
    mechanism: SampledGaussian, target_epsilon: float, target_delta: float, num_steps: int
) -> float:
    """ln z, within 2 %, at which a rough bound meets the target: where the search with PLD starts."""
    low, high = LOG_MULTIPLIERS
    while high - low > 0.02:
        middle = (low + high) / 2
        candidate = mechanism.with_noise_multiplier(math.exp(middle))
        # Whole orders alone: a hundred times cheaper than fractional ones, and near enough for a start.
        bound = epsilons_by_rdp(candidate, np.array([num_steps]), target_delta, (WHOLE_ORDERS,))[0]
        low, high = (middle, high) if bound > target_epsilon else (low, middle)
    return high


def _zero_of(excess: Callable[[float], float], log_z: float, target_epsilon: float) -> float:
    """ln z, within 5e-4 above where ln(epsilon / target) turns negative: secants kept inside a bracket.

    Each evaluation is an accountant's whole work, and a grid's epsilon may jump, to 0 too: where secants do not settle,
    halving does.
    """
    low, high = -math.inf, math.inf  # excess(low) > 0 >= excess(high)
    slope, value = -1.5, excess(log_z)
    while value > 0 or value < -2e-4:
        low, high = (log_z, high) if value > 0 else (low, log_z)
        if high - low < 5e-4:
            return high
        moved = min(max(log_z - (value + 1e-4) / slope, log_z - 1.0), log_z + 1.0)
        if not low < moved < high:
            moved = (low + high) / 2
        _check_reach(moved, target_epsilon)
        new_value = excess(moved)
        # Two points closer than a grid's own tolerance tell nothing of the slope; epsilon falls at least like z^-0.2.
        if abs(moved - log_z) > 0.01:
            slope = min((new_value - value) / (moved - log_z), -0.2)
        log_z, value = moved, new_value
    return log_z


def _check_reach(log_z: float, target_epsilon: float) -> None:
    if log_z > LOG_MULTIPLIERS[1]:
        raise ValueError(
            f"Expected a target_epsilon within reach, got {target_epsilon}: it needs noise_multiplier > 10^6; "
            "take fewer steps, a larger delta or more data."
        )
    if log_z < LOG_MULTIPLIERS[0]:
        raise ValueError(
            f"Expected a target_epsilon that noise decides, got {target_epsilon}: it holds at noise_multiplier "
            "0.001; ask for a smaller target_epsilon or target_delta, or give a noise multiplier instead."
        )


def _round_up_to_four_digits(z: float) -> float:
    digit = 10.0 ** (math.floor(math.log10(z)) - 3)
    # Division by a power of ten may land a hair above the integer it stands for.
    return float(f"{math.ceil(z / digit - 1e-9) * digit:.4g}")
