"""A training example acts back on its own output: what a closure misses that takes weights as independent of it.

Example i's output z_i fluctuates with the weights, by a part b_i within few features and a part r_i of all the others.
Every time i is drawn it pushes against that fluctuation along its own features, at the rate
kappa_i = eta gamma_i sum_j k_j x_ij^2/n a step (gamma_i: slope of its clipped residual, k_j: the optimizer's gain), and
what it has pushed so far, y_i, fades only as fast as other examples undo it, lambda_y:

    y' = -kappa (b + r + y) - lambda_y y + a sqrt(noise of its own draws).

So Var z_i = Var b + Var r + 2 E[b y] + 2 E[r y] + E y^2 is smaller than for an example never seen, and once y has
compensated, i no longer holds the weights: of its curvature only the share E[(b + r) z]/E (b + r)^2 is left.
Own derivation: the cavity (leave-one-out) argument, closed in second moments. It matters where examples have many rare
features.
"""

from typing import Any, NamedTuple

import numpy as np

Array = Any


class OwnPush(NamedTuple):
    """Moments of what examples have pushed; (n,) each.

    Args:
      with_block, with_rest: E[b y], E[r y] <= 0.   square: E y^2 >= 0.
    """

    with_block: Array
    with_rest: Array
    square: Array

    @classmethod
    def none(cls, num_examples: int) -> "OwnPush":
        return cls(*(np.zeros(num_examples) for _ in range(3)))

    def output_variance(self, alone: Array) -> Array:
        """Var z = Var b + Var r + 2 E[b y] + 2 E[r y] + E y^2, `alone` being Var b + Var r; (n,) >= 0."""
        return np.maximum(alone + 2 * (self.with_block + self.with_rest) + self.square, 0.0)

    def remaining_share(self, alone: Array) -> Array:
        """E[(b + r) z]/E (b + r)^2: the share of its curvature with which an example still holds the weights; (n,)."""
        return np.clip(1 + (self.with_block + self.with_rest) / np.maximum(alone, 1e-30), 0.0, 1.0)

    def advance(
        self, num_steps: int, *, block: Array, rest: Array, push_rate: Array, block_rate: Array, rest_rate: Array,
        fading_rate: Array, own_noise: Array,
    ) -> "OwnPush":  # fmt: skip
        """After num_steps more with everything else frozen: three linear equations, each solved exactly.

        E[b y]' = -kappa Var b - (kappa + lambda_y + lambda_b) E[b y], the same with r,
        E[y^2]' = own_noise - 2 kappa (E[b y] + E[r y]) - 2 (kappa + lambda_y) E y^2.

        Args:
          block, rest: Var b and Var r half-way.   push_rate: kappa.   block_rate, rest_rate: at which b and r forget.
          fading_rate: lambda_y.   own_noise: variance a step of i's own draws.   All (n,) >= 0, rates per step.

        >>> still = {"block_rate": 0.0, "rest_rate": 0.0, "fading_rate": 0.0, "own_noise": 0.0}
        >>> pushed = OwnPush.none(1).advance(10**6, block=0.0, rest=np.ones(1), push_rate=0.1, **still)
        >>> pushed.output_variance(np.ones(1))             # a fluctuation that stands still is pushed away
        array([0.])
        """
        back = push_rate + fading_rate
        parts = ((self.with_block, block, block_rate), (self.with_rest, rest, rest_rate))
        square = self.square * np.exp(-2 * back * num_steps) + own_noise * _grown(2 * back, num_steps)
        after = []
        for crossing, variance, rate in parts:
            decay = back + rate
            settled = -push_rate * variance / np.maximum(decay, 1e-30)
            after.append(settled + (crossing - settled) * np.exp(-decay * num_steps))
            passing = np.exp(-np.minimum(decay, 2 * back) * num_steps) * _grown(abs(2 * back - decay), num_steps)
            square = square - 2 * push_rate * (settled * _grown(2 * back, num_steps) + (crossing - settled) * passing)
        return OwnPush(after[0], after[1], np.maximum(square, 0.0))


def _grown(rate: Array, num_steps: int) -> Array:
    """The integral of e^(-rate t) over num_steps."""
    decay = np.maximum(rate * num_steps, 1e-12)
    return num_steps * -np.expm1(-decay) / decay
