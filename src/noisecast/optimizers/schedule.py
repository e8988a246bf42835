"""How a learning rate changes along a run."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from operator import index

NUM_PHASES = 100  # of a smooth shape
NUM_WARMUP_PHASES = 20  # at most
LARGEST_FACTOR = 1e9  # engines compute in single precision


@dataclass(frozen=True)
class Schedule:
    """A staircase: step k is taken with learning_rate * the factor of the phase that k lies in.

    Within a phase the rate is constant, so noise that an engine postpones stays one draw a coordinate: a Gaussian of
    the summed variance, a binomial number of coins. It is given at the phase's last step, before the rate changes. What
    the mechanism releases at each step does not depend on the rate, and so neither does epsilon.

    Args:
      starts: the first step of each phase: 0, then rising.
      factors: by which the learning rate is multiplied in each; between 1e-9 and 1e9.
    Raises: ValueError: a staircase that is none.

    >>> schedule = Schedule((0, 1000), (1.0, 0.1))
    >>> schedule.at(999), schedule.at(1000)
    (1.0, 0.1)
    """

    starts: tuple[int, ...]
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        # Of one kind: a scenario's id is made of what they look like.
        object.__setattr__(self, "starts", _numbers("starts", self.starts, index))
        object.__setattr__(self, "factors", _numbers("factors", self.factors, float))
        rising = all(one < other for one, other in pairwise(self.starts))
        if not (self.starts and self.starts[0] == 0 and rising):
            raise ValueError(f"Expected a schedule's starts to be steps that rise from 0, got {self.starts}.")
        if len(self.factors) != len(self.starts):
            raise ValueError(
                f"Expected as many factors as starts in a schedule, got {len(self.factors)} and {len(self.starts)}."
            )
        if not all(1 / LARGEST_FACTOR <= each <= LARGEST_FACTOR for each in self.factors):
            raise ValueError(
                f"Expected a schedule's factors between {1 / LARGEST_FACTOR:g} and {LARGEST_FACTOR:g}, got "
                f"{self.factors}."
            )

    @classmethod
    def shaped(cls, shape: str, num_steps: int, *, warmup_steps: int = 0) -> "Schedule":
        """A smooth shape in `NUM_PHASES` phases, after `NUM_WARMUP_PHASES`, each with the factor at its middle.

        Up to `warmup_steps` W the factor rises from 0 to 1; then, at the share s = (k - W)/(num_steps - W) of the rest,
        it is 1 ("constant"), 1 - s ("linear") or (1 + cos(pi s))/2 ("cosine").

        Raises: ValueError: no such shape, or not 0 <= warmup_steps < num_steps.

        >>> schedule = Schedule.shaped("linear", 1000, warmup_steps=100)
        >>> [round(schedule.at(step), 3) for step in (0, 99, 100, 550, 999)]
        [0.025, 0.975, 0.995, 0.495, 0.005]
        >>> Schedule.shaped("constant", 1000) == CONSTANT
        True
        """
        if shape not in tuple(SHAPES):
            raise ValueError(f"Expected a schedule of the shape {', '.join(SHAPES)}, got {shape}.")
        if not (isinstance(num_steps, Integral) and isinstance(warmup_steps, Integral)):
            raise ValueError(
                f"Expected whole numbers of steps, got num_steps {num_steps!r}, warmup_steps {warmup_steps!r}."
            )
        if not 0 <= warmup_steps < num_steps:
            raise ValueError(f"Expected 0 <= warmup_steps < num_steps = {num_steps}, got {warmup_steps}.")
        rest = num_steps - warmup_steps
        edges = sorted(
            {warmup_steps * number // NUM_WARMUP_PHASES for number in range(NUM_WARMUP_PHASES + 1)}
            | {warmup_steps + rest * number // NUM_PHASES for number in range(NUM_PHASES + 1)}
        )
        starts, factors = [], []
        for begin, end in pairwise(edges):
            middle = (begin + end) / 2
            share = (middle - warmup_steps) / rest
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


def _numbers(name: str, given: Iterable, kind: Callable) -> tuple:
    try:
        return tuple(kind(each) for each in given)
    except (TypeError, ValueError, OverflowError):
        what = "steps that rise from 0" if name == "starts" else "numbers"
        raise ValueError(f"Expected a schedule's {name} to be {what}, got {given!r}.") from None


CONSTANT = Schedule((0,), (1.0,))
# By the share of the steps after the warm-up.
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
}
