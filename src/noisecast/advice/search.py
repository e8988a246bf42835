"""The best learning rate and clip norm near a cell that is known, by few forecasts; many searches at once.

A search is a generator that yields the scenarios it wants to know about and is sent their outcomes: `side_by_side` runs
several of them in step, so that every round is one call with work for all cores.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from noisecast.forecasting.outcome import Outcome
from noisecast.optimizers import with_learning_rate
from noisecast.scenario import Scenario

T = TypeVar("T")
Searching = Generator[list[Scenario], list[Outcome], T]
Ask = Callable[[list[Scenario]], list[Outcome]]

RATE_STEP, CLIP_STEP = math.log(1.8), math.log(2.0)  # sides of the stencil that a parabola is put through
FURTHEST = 1.5  # of its sides, that the parabola's vertex is trusted
MOST_ROUNDS, VERTICES = 24, 3  # a round has a stencil, and at most that many vertices
WORTH_A_ROUND = 2e-3  # of the value: a smaller gain ends a search
LEAST_APART = 0.05  # of two noise multipliers, in their logarithms, for a line through both
FLAT = 1e-3  # of the value: what a parabola bends by less than this within the stencil is not followed


@dataclass(frozen=True)
class Found:
    """The best cell of a search.

    Args:
      scenario, outcome: that cell.   tried: all cells that were asked about.
    """

    scenario: Scenario
    outcome: Outcome
    tried: tuple[tuple[Scenario, Outcome], ...]


class _Place(NamedTuple):
    log_rate: float
    log_clip: float


def side_by_side(searches: Sequence[Searching[T]], ask: Ask) -> list[T]:
    """The results of several searches, whose questions are asked together.

    >>> def guess(start):
    ...     answers = yield [start, start + 1]
    ...     return max(answers)
    >>> side_by_side([guess(1), guess(5)], lambda asked: [10 * each for each in asked])
    [20, 60]
    """
    results: dict[int, T] = {}
    asked: dict[int, list[Scenario]] = {}
    answers: dict[int, list[Outcome] | None] = dict.fromkeys(range(len(searches)))
    while answers:
        for place, answer in answers.items():
            try:
                asked[place] = searches[place].send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                results[place] = end.value
                asked.pop(place, None)
        outcomes = iter(ask([scenario for wanted in asked.values() for scenario in wanted]) if asked else ())
        answers = {place: [next(outcomes) for _ in wanted] for place, wanted in asked.items()}
    return [results[place] for place in range(len(searches))]


def best_near(start: Scenario, *, clip_too: bool = True, most_rounds: int = MOST_ROUNDS) -> Searching[Found]:
    """The best learning rate, and clip norm, from `start` downhill; noise, batches and steps stay.

    Each round asks about a stencil of six cells in the logarithms of rate and clip (of three without the clip), and
    about the vertex of the parabola through them, at most 1.5 sides away. A vertex that lies within the stencil and is
    the best cell, but not what the parabola said of it, belongs to the next parabola, and its vertex is asked about, at
    most three in all. The search ends when a round gains less than 0.2 %, or when a vertex within the stencil was to
    0.2 % what the parabola said of it, and no cell is better. What diverges or is extrapolated is never preferred to
    what is not (`Outcome.order`).
    """
    known: dict[_Place, Outcome] = {}

    def ask(places: Sequence[_Place]) -> Generator[list[Scenario], list[Outcome], None]:
        new = [place for place in dict.fromkeys(places) if place not in known]
        if new:
            known.update(zip(new, (yield [_scenario_at(start, place) for place in new]), strict=True))

    centre = _Place(math.log(start.optimizer.learning_rate), math.log(start.mechanism.l2_clip_norm))
    shrunk = 1.0
    for _ in range(most_rounds):
        stencil = _stencil(centre, shrunk, clip_too)
        yield from ask(stencil)
        best, is_settled = centre, False
        for _ in range(VERTICES):
            vertex, promised = _vertex(best, known, stencil, shrunk)
            yield from ask([vertex])
            best = min(known, key=lambda place: known[place].order)
            is_beside = _is_beside(vertex, centre)
            is_settled = is_beside and _are_nearly([known[vertex], known[best]], promised)
            if is_settled or best != vertex or not is_beside:
                break
        if known[best].lead_over(known[centre]) < WORTH_A_ROUND:
            if all(known[place].order[0] == known[centre].order[0] for place in stencil) or shrunk < 1:
                break
            shrunk = 0.4  # a cliff beside the centre: look closer, once
        elif is_settled:
            break
        centre = best
    best = min(known, key=lambda place: known[place].order)
    tried = tuple((_scenario_at(start, place), outcome) for place, outcome in known.items())
    return Found(_scenario_at(start, best), known[best], tried)


def carried(here: Scenario, there: Scenario) -> Scenario:
    """`there` with a learning rate to start from: the rule of `advice.transfer`, e s sqrt(T) as it is `here`.

    e = eta k(s) is the effective learning rate, s = z C / B the noise of the mechanism; at least C / sqrt(d B), the
    most that examples make of their own: a rate that was tuned with less noise than that is not carried far down.
    """
    s, s_there = (max(each.mechanism.mean_noise_std, _most_batch_noise(each)) for each in (here, there))
    gain_at: Any = here.optimizer.theory.effective_learning_rate
    share = float(gain_at(1.0, s) / gain_at(1.0, s_there)) * s / s_there * math.sqrt(here.num_steps / there.num_steps)
    return replace(there, optimizer=with_learning_rate(here.optimizer, rounded(here.optimizer.learning_rate * share)))


def carried_on(known: Sequence[Scenario], there: Scenario) -> Scenario:
    """`carried` from the first of some optima; of two, the line through them, ln rate against ln noise, goes on.

    It has seen what the rule does not know. Its slope is kept between -2 and 0.
    """
    here, other = known[0], known[-1]
    noise, other_noise, noise_there = (each.mechanism.noise_multiplier for each in (here, other, there))
    if not min(noise, other_noise, noise_there) or abs(math.log(noise / other_noise)) < LEAST_APART:
        return carried(here, there)
    rate, other_rate = here.optimizer.learning_rate, other.optimizer.learning_rate
    slope = min(max(math.log(rate / other_rate) / math.log(noise / other_noise), -2.0), 0.0)
    return replace(there, optimizer=with_learning_rate(here.optimizer, rounded(rate * (noise_there / noise) ** slope)))


def _most_batch_noise(scenario: Scenario) -> float:
    """Clipped gradients of length C at most, B of them: C^2/(d B) a coordinate, the square of this."""
    mechanism = scenario.mechanism
    return mechanism.l2_clip_norm / math.sqrt(mechanism.expected_batch_size * scenario.problem.num_params)


def rounded(number: float) -> float:
    """To four digits: typed again, it is the same cell.

    >>> rounded(0.123456)
    0.1235
    """
    return float(f"{number:.4g}")


def _stencil(centre: _Place, shrunk: float, clip_too: bool) -> list[_Place]:
    """The centre, both neighbours in the rate, both in the clip, and one across."""
    rate, clip = shrunk * RATE_STEP, shrunk * CLIP_STEP
    steps = [(0, 0), (1, 0), (-1, 0)] + ([(0, 1), (0, -1), (1, -1)] if clip_too else [])
    return [_Place(centre.log_rate + u * rate, centre.log_clip + v * clip) for u, v in steps]


def _vertex(
    centre: _Place, known: dict[_Place, Outcome], stencil: Sequence[_Place], shrunk: float
) -> tuple[_Place, float]:
    """Of the parabola through the centre and near what is known, and its value there; the centre and NaN for none.

    It has six coefficients (three without the clip), which the stencil decides if nothing else inside it is known.
    """
    rank, at = known[centre].order
    if any(known[place].order[0] != rank or not math.isfinite(known[place].order[1]) for place in stencil):
        return centre, math.nan
    inside = (place for place, outcome in known.items() if outcome.order[0] == rank and _is_beside(place, stencil[0]))
    others = [place for place in dict.fromkeys([*stencil, *inside]) if place != centre]
    sides = shrunk * np.array([RATE_STEP, CLIP_STEP])
    u, v = ((np.array(others) - centre) / sides).T
    risen = np.array([known[place].order[1] for place in others]) - at
    near = 1 / (0.1 + u**2 + v**2)
    # Without the clip v and all that it makes is 0, and so are its coefficients, the shortest that there are.
    terms = np.stack([u, v, u**2 / 2, v**2 / 2, u * v], axis=1)
    slope, slope_clip, bend, bend_clip, mixed = np.linalg.lstsq(terms * near[:, None], risen * near)[0]
    gradient, hessian = np.array([slope, slope_clip]), np.array([[bend, mixed], [mixed, bend_clip]])
    bends, axes = np.linalg.eigh(hessian)
    tilts = axes.T @ gradient
    steps = np.where(bends > FLAT * abs(at), -tilts / np.where(bends == 0, 1.0, bends), -FURTHEST * np.sign(tilts))
    # Along an axis that neither bends nor tilts there is nothing to be gained.
    steps = np.where(np.abs(tilts) > FLAT * abs(at), np.clip(steps, -FURTHEST, FURTHEST), 0.0)
    moved = np.clip(axes @ steps, -FURTHEST, FURTHEST)
    place = _Place(*(centre + sides * moved))
    return place, at + float(gradient @ moved + moved @ hessian @ moved / 2)


def _are_nearly(outcomes: Sequence[Outcome], promised: float) -> bool:
    """Whether all are of one kind, and what was promised; nothing is, if that is NaN."""
    ranks, values = zip(*(outcome.order for outcome in outcomes), strict=True)
    return len(set(ranks)) == 1 and all(abs(value - promised) <= WORTH_A_ROUND * abs(promised) for value in values)


def _is_beside(place: _Place, centre: _Place) -> bool:
    """Whether it lies inside the stencil, where the parabola knows it."""
    return abs(place.log_rate - centre.log_rate) < RATE_STEP and abs(place.log_clip - centre.log_clip) < CLIP_STEP


def _scenario_at(start: Scenario, place: _Place) -> Scenario:
    return replace(
        start,
        mechanism=replace(start.mechanism, l2_clip_norm=rounded(math.exp(place.log_clip))),
        optimizer=with_learning_rate(start.optimizer, rounded(math.exp(place.log_rate))),
    )
