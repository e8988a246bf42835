"""DP-SignSGD."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from noisecast.optimizers.optimizer import Array, check_learning_rate
from noisecast.theory.dp_sign_sgd import DP_SIGN_SGD
from noisecast.theory.optimizer_theory import OptimizerTheory


@dataclass(frozen=True, kw_only=True)
class DPSignSGD:
    """x_{k+1} = x_k - eta sign(g_k), coordinate by coordinate (paper, Def. optimizers).

    >>> direction, _ = DPSignSGD(learning_rate=0.1).direction(jnp.array([2.0, -3.0]), None, 0)
    >>> direction.tolist()
    [1.0, -1.0]
    """

    learning_rate: float
    name: ClassVar[str] = "DP-SignSGD"

    def __post_init__(self) -> None:
        check_learning_rate(self.learning_rate)

    @property
    def theory(self) -> OptimizerTheory:
        return DP_SIGN_SGD

    def init(self, params: Array) -> None:
        return None

    def direction(self, gradient: Array, state: None, step: Array) -> tuple[Array, None]:
        return jnp.sign(gradient), None
