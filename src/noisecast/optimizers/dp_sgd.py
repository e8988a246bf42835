"""DP-SGD."""

from dataclasses import dataclass
from typing import ClassVar

from noisecast.optimizers.optimizer import Array, check_learning_rate
from noisecast.theory.dp_sgd import DP_SGD
from noisecast.theory.optimizer_theory import OptimizerTheory


@dataclass(frozen=True, kw_only=True)
class DPSGD:
    """x_{k+1} = x_k - eta g_k (paper, Def. optimizers).

    >>> DPSGD(learning_rate=0.1).direction(2.0, None, 0)
    (2.0, None)
    """

    learning_rate: float
    name: ClassVar[str] = "DP-SGD"

    def __post_init__(self) -> None:
        check_learning_rate(self.learning_rate)

    @property
    def theory(self) -> OptimizerTheory:
        return DP_SGD

    def init(self, params: Array) -> None:
        return None

    def direction(self, gradient: Array, state: None, step: Array) -> tuple[Array, None]:
        return gradient, None
