"""How a learning rate changes along a run."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

NUM_PHASES = 100  # of a smooth shape


@dataclass(frozen=True)
class Schedule:
    """A staircase: step k is taken with learning_rate * the factor of the phase that k lies in.

    Within a phase the rate is constant, so noise that an engine postpones stays one draw a coordinate: a Gaussian of
    the summed variance, a binomial number of coins. It is given at the phase's last step, before the rate changes. What
    the mechanism releases at each step does not depend on the rate, and so neither does epsilon.

    Args:
      starts: the first step of each phase: 0, then rising.
      factors: by which the learning rate is multiplied in each; > 0, finite.
    Raises: ValueError: a staircase that is none.

    >>> schedule = Schedule((0, 1000), (1.0, 0.1))
    >>> schedule.at(999), schedule.at(1000)
    (1.0, 0.1)
    """

    starts: tuple[int, ...]
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("starts", "factors"):  # lists, too: a scenario hashes them
            object.__setattr__(self, name, tuple(getattr(self, name)))
        whole = all(isinstance(each, int) for each in self.starts)
        rising = whole and all(one < other for one, other in pairwise(self.starts))
        if not (self.starts and self.starts[0] == 0 and rising):
            raise ValueError(f"Expected a schedule's starts to be steps that rise from 0, got {self.starts}.")
        if len(self.factors) != len(self.starts):
            raise ValueError(
                f"Expected as many factors as starts in a schedule, got {len(self.factors)} and {len(self.starts)}."
            )
        if not all(isinstance(each, int | float) and 0 < each < math.inf for each in self.factors):
            raise ValueError(f"Expected a schedule's factors > 0 and finite, got {self.factors}.")

    @classmethod
    def shaped(cls, shape: str, num_steps: int, *, warmup_steps: int = 0) -> "Schedule":
        """A smooth shape in `NUM_PHASES` phases, each with the factor at its middle.

        Up to `warmup_steps` W the factor rises from 0 to 1; then, at the share s = (k - W)/(num_steps - W) of the rest,
        it is 1 ("constant"), 1 - s ("linear") or (1 + cos(pi s))/2 ("cosine").

        Raises: ValueError: no such shape, or not 0 <= warmup_steps < num_steps.

        >>> schedule = Schedule.shaped("linear", 1000, warmup_steps=100)
        >>> [round(schedule.at(step), 3) for step in (0, 99, 100, 550, 999)]
        [0.05, 0.95, 0.994, 0.494, 0.006]
        >>> Schedule.shaped("constant", 1000) == CONSTANT
        True
        """
        if shape not in SHAPES:
            raise ValueError(f"Expected a schedule of the shape {', '.join(SHAPES)}, got {shape}.")
        if not 0 <= warmup_steps < num_steps:
            raise ValueError(f"Expected 0 <= warmup_steps < num_steps = {num_steps}, got {warmup_steps}.")
        phases = min(NUM_PHASES, num_steps)
        edges = sorted({0, warmup_steps, *(num_steps * number // phases for number in range(1, phases + 1))})
        starts, factors = [], []
        for begin, end in pairwise(edges):
            middle = (begin + end) / 2
            share = (middle - warmup_steps) / (num_steps - warmup_steps)
            factor = middle / warmup_steps if share < 0 else SHAPES[shape](share)
            if not factors or factor != factors[-1]:
                starts.append(begin)
                factors.append(factor)
        return cls(tuple(starts), tuple(factors))

    def __str__(self) -> str:
        low, high = min(self.factors), max(self.factors)
        return f"times {low:.2g} to {high:.2g} in {len(self.factors)} phases"

    def at(self, step: int) -> float:
        """The factor of step `step` = 0, 1, ..."""
        return self.factors[bisect_right(self.starts, step) - 1]

    def stretches(self, step: int, to_step: int) -> Iterator[tuple[int, int, bool]]:
        """The steps from `step` on, cut where phases end: (first, one after the last, whether a phase ends there)."""
        for start in self.starts:
            if step < start <= to_step:
                yield step, start, True
                step = start
        if step < to_step:
            yield step, to_step, False


CONSTANT = Schedule((0,), (1.0,))
# By the share of the steps after the warm-up.
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
}
