"""DP-Adam."""

import math
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from noisecast.optimizers.optimizer import Array, check_learning_rate
from noisecast.theory.dp_adam import dp_adam_theory
from noisecast.theory.optimizer_theory import OptimizerTheory

MOST_KEPT = 1 - 1e-6  # of an average; nearer 1 float32 hardly tells it from 1


@dataclass(frozen=True, kw_only=True)
class DPAdam:
    """Adam on the private gradient, bias-corrected, `eps` outside the root (paper, Eq. dpadam).

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
    x = x - eta [m / (1 - b1^(k+1))] / (sqrt(v / (1 - b2^(k+1))) + eps).

    Args:
      learning_rate: eta > 0 [params].    b1, b2: in [0, 1 - 10^-6].    eps: > 0 [loss/params].

    >>> adam = DPAdam(learning_rate=0.1)
    >>> direction, _ = adam.direction(jnp.array([2.0, -3.0]), adam.init(jnp.zeros(2)), 0)
    >>> [round(float(u), 6) for u in direction]
    [1.0, -1.0]
    """

    learning_rate: float
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    name: ClassVar[str] = "DP-Adam"

    def __post_init__(self) -> None:
        check_learning_rate(self.learning_rate)
        for field in ("b1", "b2"):
            if not 0 <= getattr(self, field) <= MOST_KEPT:
                raise ValueError(f"Expected 0 <= {field} <= {MOST_KEPT}, got {getattr(self, field)}.")
        if not self.eps > 0:
            raise ValueError(f"Expected eps > 0, got {self.eps}.")

    @property
    def theory(self) -> OptimizerTheory:
        return dp_adam_theory(self.b1, self.b2, self.eps)

    def init(self, params: Array) -> tuple[Array, Array]:
        return jnp.zeros_like(params), jnp.zeros_like(params)

    def direction(self, gradient: Array, state: tuple[Array, Array], step: Array) -> tuple[Array, tuple[Array, Array]]:
        first = self.b1 * state[0] + (1 - self.b1) * gradient
        second = self.b2 * state[1] + (1 - self.b2) * gradient**2
        unbiased_first = first / _one_minus_power(self.b1, step + 1)
        unbiased_second = second / _one_minus_power(self.b2, step + 1)
        return unbiased_first / (jnp.sqrt(unbiased_second) + self.eps), (first, second)


def _one_minus_power(base: float, exponent: Array) -> Array:
    # By expm1: in float32 the difference 1 - 0.999 keeps only four digits.
    return -jnp.expm1(exponent * math.log(base)) if base > 0 else jnp.ones(())
