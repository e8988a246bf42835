"""The noise for a target epsilon: the least that the accountants prove enough.

Epsilon falls as the noise grows, so this is a search: where a cheap Renyi bound meets the target, secants on the
epsilon that `accounting` proves take over. Only what was itself proven enough is ever the answer.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from noisecast.privacy.accounting import check_delta, epsilon_spent, epsilons_by_rdp
from noisecast.privacy.mechanism import SampledGaussian

LOG_MULTIPLIERS = (math.log(1e-3), math.log(1e6))  # where calibration looks
CLOSE = 2e-4  # of the target: an epsilon below it by less is near enough
SLOWEST, FASTEST = -0.2, -20.0  # epsilon falls at least like z to this power; a steeper slope is that of a jump
SECANTS = 4  # that may have it their way
STEEP = -0.8  # where it falls like this, a percent less noise is not enough for a grid that is good to 0.5 %
WHOLE_ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256, 512, 1024)


def calibrate_noise_multiplier(
    mechanism: SampledGaussian, *, target_epsilon: float, target_delta: float, num_steps: int
) -> SampledGaussian:
    """The mechanism with the least noise whose epsilon stays within target_epsilon.

    The noise multiplier z has four digits; epsilon(z) <= target_epsilon < epsilon(0.99 z).

    Args:
      mechanism: as it shall be; its noise_multiplier is ignored.
      target_epsilon: > 0, finite.   target_delta: 0 < delta < 1.   num_steps: T >= 1.
    Returns: the mechanism with that z.
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
    check_delta(target_delta)

    @cache
    def excess(z: float) -> float:
        candidate = mechanism.with_noise_multiplier(z)
        spent = epsilon_spent(candidate, num_steps=num_steps, target_delta=target_delta)
        return math.log(min(max(spent.epsilon / target_epsilon, 1e-3), 1e12))  # epsilon may be 0, or infinite

    def rough_excess(log_z: float) -> float:
        # Whole orders alone: a hundred times cheaper than fractional ones, and near enough for a start.
        candidate = mechanism.with_noise_multiplier(math.exp(log_z))
        bound = epsilons_by_rdp(candidate, np.array([num_steps]), target_delta, (WHOLE_ORDERS,))[0]
        return math.log(min(max(bound / target_epsilon, 1e-12), 1e12))

    return mechanism.with_noise_multiplier(_least_noise(excess, rough_excess, target_epsilon))


def least_noise(fits: Callable[[float], bool]) -> float | None:
    """The least noise multiplier of four digits, to 0.1 %, at which something `fits` that more noise lets fit, too.

    Args:
      fits: noise_multiplier -> whether it does; once true, true of all larger ones.
    Returns: z; None where none from 0.001 to 10^6 does.

    >>> least_noise(lambda noise_multiplier: noise_multiplier >= 2.5)
    2.5
    """
    low, high = LOG_MULTIPLIERS
    least, most = (rounded_up(math.exp(end)) for end in LOG_MULTIPLIERS)
    if fits(least):
        return least
    if not fits(most):
        return None
    while high - low > 5e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(rounded_up(math.exp(middle))) else (middle, high)
    return min(rounded_up(math.exp(high)), most)


def _least_noise(
    excess: Callable[[float], float], rough_excess: Callable[[float], float], target_epsilon: float
) -> float:
    """The least z of four digits, to a digit, with excess(z) = ln(epsilon(z) / target) <= 0.

    Secants kept inside a bracket, from where the rough excess vanishes, and with its slope. Each evaluation is an
    accountant's whole work; the caller remembers them. A grid's epsilon may jump, to 0 too: after a few secants the
    strides double until there is a bracket, and every other evaluation halves that.
    """
    log_z = _zero_of(rough_excess)
    rough_slope = (rough_excess(log_z + 0.01) - rough_excess(log_z - 0.01)) / 0.02
    slope = min(max(rough_slope, FASTEST), SLOWEST)
    z, before = rounded_up(math.exp(log_z)), None
    low, high = 0.0, math.inf  # excess(low) > 0 >= excess(high)
    count = 0
    while True:
        count += 1
        _check_reach(z, target_epsilon)
        value = excess(z)
        low, high = (z, high) if value > 0 else (low, z)
        if low > 0 and rounded_up(low * (1 + 1e-6)) >= high:
            return high
        # Two points closer than a grid's own tolerance tell nothing of the slope.
        if before is not None and abs(math.log(z / before)) > 0.01:
            slope = min(max((value - excess(before)) / math.log(z / before), FASTEST), SLOWEST)
        before = z
        if max(slope, -5.0) * _digit(z) / z - CLOSE <= value <= 0:
            less = rounded_up(0.99 * z)
            if low >= 0.99 * z or FASTEST < rough_slope < STEEP or excess(less) > 0:
                return z
            z = less
        else:
            z = _next(z, -(value + CLOSE / 2) / slope, low, high, count)


def _next(z: float, move: float, low: float, high: float, count: int) -> float:
    """Where to look next, strictly within the bracket: z exp(move), rounded, if that is getting somewhere."""
    is_open = low == 0 or high == math.inf
    if is_open:
        move *= 2.0 ** max(0, count - SECANTS)
    moved = rounded_up(z * math.exp(min(max(move, -1.0), 1.0)))
    if low < moved < high and (is_open or count <= SECANTS or count % 2):
        return moved
    if is_open:
        return rounded_up(1.002 * low if low > 0 else 0.998 * high)
    return rounded_up(math.sqrt(low * high))


def _zero_of(rough_excess: Callable[[float], float]) -> float:
    """ln z, within 2 % above where the rough excess turns negative."""
    low, high = LOG_MULTIPLIERS
    while high - low > 0.02:
        middle = (low + high) / 2
        low, high = (middle, high) if rough_excess(middle) > 0 else (low, middle)
    return high


def _check_reach(z: float, target_epsilon: float) -> None:
    log_z = math.log(z)
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


def _digit(z: float) -> float:
    """The fourth one."""
    return 10.0 ** (math.floor(math.log10(z)) - 3)


def rounded_up(z: float) -> float:
    """To four digits, never less.

    Args:
      z: > 0.
    Returns: a float that is written with four digits.

    >>> rounded_up(2.01341), rounded_up(2.02)
    (2.014, 2.02)
    """
    # Division by a power of ten may land a hair above the integer it stands for.
    return float(f"{math.ceil(z / _digit(z) - 1e-9) * _digit(z):.4g}")
