"""Another batch size and number of steps at the same epsilon, for no more example gradients than before."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from noisecast.advice.search import Found, Searching, best_near, carried
from noisecast.privacy.sampling import Poisson, Sampler
from noisecast.scenario import Scenario

Calibrate = Callable[[Scenario], Scenario]  # the same scenario with the noise that its budget needs

FACTOR = 4
MOST_STRIDES = 4  # in one direction: a factor of 256
LARGER, SMALLER = FACTOR, 1 / FACTOR
MANY_STEPS = 2000  # beyond, still more steps of smaller batches follow the same path, with more noise
LEAST_LESS = 0.01  # of the noise on that path: larger batches that spare less gain nothing


def better_batches(found: Found, calibrate: Calibrate, *, least_gain: float) -> Searching[Found]:
    """The best of other batch sizes and numbers of steps, where it gains at least `least_gain`, else `found`.

    Strides by a factor of 4 to larger batches and fewer steps, or where steps are few the other way, as long as each
    gains; larger batches only where the budget then adds less noise to the way that weights go. The noise multiplier
    follows from the budget, and the learning rate is tuned anew from where `carried` puts it. The clip norm stays.
    """
    best, tried = found, list(found.tried)
    for direction in (LARGER, SMALLER) if found.scenario.num_steps < MANY_STEPS else (LARGER,):
        here = found
        for _ in range(MOST_STRIDES):
            there = moved(here.scenario, direction, found.scenario)
            if there is None:
                break
            there = calibrate(there)
            if direction == LARGER and _noise_of_path(there) > (1 - LEAST_LESS) * _noise_of_path(here.scenario):
                break
            ahead = yield from best_near(carried(here.scenario, there), clip_too=False, most_rounds=1)
            tried += ahead.tried
            if ahead.outcome.lead_over(here.outcome) <= 0:
                break
            here = ahead
        if here.outcome.lead_over(best.outcome) > 0:
            best = here
            break  # the other directions lead back
    if best.outcome.lead_over(found.outcome) < least_gain:
        best = found
    return Found(best.scenario, best.outcome, tuple(tried))


def _noise_of_path(scenario: Scenario) -> float:
    """s/sqrt(T): T steps of rate eta go a way eta T with privacy noise eta s sqrt(T), s = z C/B."""
    return scenario.mechanism.mean_noise_std / math.sqrt(scenario.num_steps)


def moved(scenario: Scenario, factor: float, origin: Scenario) -> Scenario | None:
    """`scenario` with `factor` times its batch size and fewer steps, or the other way; None where it cannot be.

    No more example gradients than `origin`. Its noise and rate are as they were, and not yet what they should be.
    """
    batch_size = scenario.mechanism.expected_batch_size * factor
    sampler = with_batch_size(scenario.mechanism.sampler, max(1, math.floor(batch_size)))
    if sampler is None or sampler == scenario.mechanism.sampler:
        return None
    most_gradients = origin.mechanism.expected_batch_size * origin.num_steps
    num_steps = math.floor(min(scenario.num_steps / factor, most_gradients / sampler.expected_batch_size) + 1e-9)
    if num_steps < 1:
        return None
    return replace(scenario, mechanism=replace(scenario.mechanism, sampler=sampler), num_steps=num_steps)


def first_moves(scenario: Scenario) -> list[Scenario]:
    """The two strides that a search begins with, to larger batches."""
    moves = []
    for _ in range(2):
        there = moved(moves[-1] if moves else scenario, LARGER, scenario)
        if there is None:
            break
        moves.append(there)
    return moves


def with_batch_size(sampler: Sampler, batch_size: float) -> Sampler | None:
    """The same kind of sampler on the same examples; None where they are fewer than that.

    >>> with_batch_size(Poisson.for_batch_size(64, 25_000), 256)
    Poisson(sampling_probability=0.01024, expected_batch_size=256)
    """
    given: Any = sampler
    batch_size = type(sampler.expected_batch_size)(batch_size)  # 64 and 64.0 are two scenarios to a content hash
    if sampler.num_examples is not None and batch_size > sampler.num_examples:
        return None
    if isinstance(sampler, Poisson):
        count = round(sampler.num_examples)
        if math.isclose(count, sampler.num_examples, rel_tol=1e-9):  # as a file says it, to the last digit
            return Poisson.for_batch_size(batch_size, count)
        return Poisson(batch_size / sampler.num_examples, batch_size)
    return replace(given, batch_size=batch_size)
