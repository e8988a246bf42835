"""What an optimizer is: a direction from a private gradient, and the theory of the path it makes."""

import math
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from noisecast.theory.optimizer_theory import OptimizerTheory

Array = Any
State = Any


class Optimizer(Protocol):
    """x_{k+1} = x_k - learning_rate * direction(g_k, state_k). Post-processing of g_k: it costs no privacy."""

    name: ClassVar[str]

    @property
    def learning_rate(self) -> float: ...

    @property
    def theory(self) -> OptimizerTheory: ...

    def init(self, params: Array) -> State:
        """State before the first step."""
        ...

    def direction(self, gradient: Array, state: State, step: Array) -> tuple[Array, State]:
        """The direction of step `step` = 0, 1, ... and the next state; every coordinate on its own."""
        ...


def with_learning_rate(optimizer: Optimizer, learning_rate: float) -> Optimizer:
    """The same optimizer at another learning rate. Raises: ValueError unless 0 < learning_rate < inf.

    >>> from noisecast import DPAdam
    >>> with_learning_rate(DPAdam(learning_rate=1.0, b1=0.8), 0.1)
    DPAdam(learning_rate=0.1, b1=0.8, b2=0.999, eps=1e-08)
    """
    given: Any = optimizer  # a protocol does not say that it is a dataclass
    return replace(given, learning_rate=learning_rate)


def check_learning_rate(learning_rate: float) -> None:
    # A float32 of 0.1 is another rate than 0.1, and no scenario file can hold one.
    if not isinstance(learning_rate, int | float) or isinstance(learning_rate, bool):
        raise ValueError(f"Expected learning_rate as an int or a float, got {learning_rate!r}.")
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"Expected 0 < learning_rate < inf, got {learning_rate}.")
