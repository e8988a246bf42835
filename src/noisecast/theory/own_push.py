"""A training example acts back on its own output: what a closure misses that takes weights as independent of it.

Example i's output z_i fluctuates with the weights, by u_i = b_i + r_i: a part within few features and a part of all the
others. Every time i is drawn it pushes against that fluctuation along its own features, by its clipped residual rho:
at the rate kappa_i = eta sum_j k_j x_ij^2/n a step (k_j: the optimizer's gain). What it has pushed so far, y_i, fades
only as fast as other examples undo it, lambda_y:

    y' = -kappa (rho(z) - E rho) - lambda_y y + noise of its own draws,   z = E z + u + y.

So Var z = Var u + 2 E[b y] + 2 E[r y] + E y^2 is smaller than for an example never seen, and once y has compensated, i
no longer holds the weights: of its curvature only the share E[u z]/E u^2 is left. And z is skew, since a clipped
residual pushes no harder however wrong it is, and one near 0 hardly pushes at all: its third moment is
3 E[u^2 y] + 3 E[u y^2] + E y^3. Own derivation: the cavity (leave-one-out) argument, closed in three moments by

    E[a f(z)] = E[a z] f1 + E[a z^2] f2/2,
    E[a c f(z)] - E[a c] E f = E[a c z] f1 + E[a z] E[c z] f2 + (E[a z^2] E[c z] + E[a z] E[c z^2]) f3/2

(means left out; a, c out of u, y; f1, f2, f3: expected derivatives of f), a Gaussian's with its first correction. It
matters where examples have many rare features.
"""

from typing import Any, NamedTuple

import numpy as np

Array = Any


class Pull(NamedTuple):
    """How an example's own draws move its output a step; (n,) each.

    Args:
      rates: kappa times the expected first, second and third derivative of rho.
      noise: variance of the draws, in proportion to E rho^2.   noise_slope: its derivative by the output.
    """

    rates: tuple[Array, Array, Array]
    noise: Array
    noise_slope: Array


class OwnPush(NamedTuple):
    """Moments of what examples have pushed; (n,) each.

    Args:
      with_block, with_rest: E[b y], E[r y] <= 0.   square: E y^2 >= 0.
      once, twice, thrice: E[u^2 y], E[u y^2], E y^3.
    """

    with_block: Array
    with_rest: Array
    square: Array
    once: Array
    twice: Array
    thrice: Array

    @classmethod
    def none(cls, num_examples: int) -> "OwnPush":
        """At the start, before any draw; (n,) zeros each."""
        return cls(*(np.zeros(num_examples) for _ in cls._fields))

    @property
    def third_moment(self) -> Array:
        """E (z - E z)^3.

        Returns: (n,).
        """
        return 3 * (self.once + self.twice) + self.thrice

    def output_variance(self, alone: Array) -> Array:
        """Var z = Var u + 2 E[b y] + 2 E[r y] + E y^2.

        Args:
          alone: Var u = Var b + Var r, of an example never seen; (n,) >= 0.
        Returns: (n,) >= 0.
        """
        return np.maximum(alone + 2 * (self.with_block + self.with_rest) + self.square, 0.0)

    def remaining_share(self, alone: Array) -> Array:
        """E[u z]/E u^2: the share of its curvature with which an example still holds the weights.

        Args:
          alone: as `output_variance`.
        Returns: (n,) in [0, 1].
        """
        return np.clip(1 + (self.with_block + self.with_rest) / np.maximum(alone, 1e-30), 0.0, 1.0)

    def advance(
        self, num_steps: int, *, block: Array, rest: Array, pull: Pull, block_rate: Array, rest_rate: Array,
        fading_rate: Array,
    ) -> "OwnPush":  # fmt: skip
        """After num_steps more with everything else frozen: linear equations, one after the other.

        With kappa_1, kappa_2 the first two rates of `pull`,

          E[b y]' = -kappa_1 Var b - (kappa_1 + lambda_y + lambda_b) E[b y] - kappa_2 E[b z^2]/2,  the same with r,
          E[y^2]' = noise - 2 kappa_1 (E[b y] + E[r y]) - 2 (kappa_1 + lambda_y) E y^2 - kappa_2 E[y z^2],

        and the third moments as in `_skewed`. Exact while the third moments keep.

        Args:
          num_steps: >= 0.   block, rest: Var b and Var r half-way.   block_rate, rest_rate: at which b and r forget.
          pull: of each example's own draws.   fading_rate: lambda_y.   All (n,) >= 0, rates per step.
        Returns: OwnPush; (n,) each.

        >>> still = {"block_rate": 0.0, "rest_rate": 0.0, "fading_rate": 0.0}
        >>> pull = Pull(rates=(0.1, 0.0, 0.0), noise=0.0, noise_slope=0.0)
        >>> pushed = OwnPush.none(1).advance(10**6, block=0.0, rest=np.ones(1), pull=pull, **still)
        >>> pushed.output_variance(np.ones(1))             # a fluctuation that stands still is pushed away
        array([0.])
        """
        slope, curve, _ = pull.rates
        back, alone = slope + fading_rate, np.maximum(block + rest, 1e-30)
        uzz, yzz = 2 * self.once + self.twice, self.once + 2 * self.twice + self.thrice  # E[u z^2], E[y z^2]
        square = self.square * np.exp(-2 * back * num_steps)
        square = square + (pull.noise - curve * yzz) * _grown(2 * back, num_steps)
        after = []
        for crossing, variance, rate in ((self.with_block, block, block_rate), (self.with_rest, rest, rest_rate)):
            decay = back + rate
            settled = -(slope + curve * uzz / (2 * alone)) * variance / np.maximum(decay, 1e-30)
            after.append(settled + (crossing - settled) * np.exp(-decay * num_steps))
            passing = np.exp(-np.minimum(decay, 2 * back) * num_steps) * _grown(abs(2 * back - decay), num_steps)
            square = square - 2 * slope * (settled * _grown(2 * back, num_steps) + (crossing - settled) * passing)
        moved = self._replace(with_block=after[0], with_rest=after[1], square=np.maximum(square, 0.0))
        forgetting = (block * block_rate + rest * rest_rate) / alone
        return self._skewed(moved, num_steps, alone=alone, pull=pull, back=back, forgetting=forgetting)

    def _skewed(
        self, moved: "OwnPush", num_steps: int, *, alone: Array, pull: Pull, back: Array, forgetting: Array
    ) -> "OwnPush":
        """`moved`, with third moments after num_steps more from here, the second ones half-way to it.

        With lambda the rate at which u forgets, and sigma' the noise's slope,

          E[u^2 y]' = -(kappa_1 + lambda_y + 2 lambda) E[u^2 y] - [u u],
          E[u y^2]' = -(2 kappa_1 + 2 lambda_y + lambda) E[u y^2] - 2 kappa_1 E[u^2 y] - 2 [u y] + sigma' E[u z],
          E[y^3]' = -3 (kappa_1 + lambda_y) E y^3 - 3 kappa_1 E[u y^2] - 3 [y y] + 3 sigma' E[y z],

        [a c] = kappa_2 E[a z] E[c z] + kappa_3 (E[a z^2] E[c z] + E[a z] E[c z^2])/2.
        """
        slope, curve, bend = pull.rates
        uzz, yzz = 2 * self.once + self.twice, self.once + 2 * self.twice + self.thrice
        crossing = sum(each.with_block + each.with_rest for each in (self, moved)) / 2
        uz, yz = alone + crossing, crossing + (self.square + moved.square) / 2

        def bent(az: Array, cz: Array, azz: Array, czz: Array) -> Array:
            return curve * az * cz + bend * (azz * cz + az * czz) / 2

        once, mean_once = _relaxed(self.once, -bent(uz, uz, uzz, uzz), back + 2 * forgetting, num_steps)
        source = pull.noise_slope * uz - 2 * (slope * mean_once + bent(uz, yz, uzz, yzz))
        twice, mean_twice = _relaxed(self.twice, source, 2 * back + forgetting, num_steps)
        source = 3 * (pull.noise_slope * yz - slope * mean_twice - bent(yz, yz, yzz, yzz))
        thrice, _ = _relaxed(self.thrice, source, 3 * back, num_steps)
        return moved._replace(once=once, twice=twice, thrice=thrice)


def _relaxed(start: Array, source: Array, decay: Array, num_steps: int) -> tuple[Array, Array]:
    """s after num_steps of s' = source - decay s, and its mean over them."""
    end = start * np.exp(-decay * num_steps) + source * _grown(decay, num_steps)
    fast = decay * num_steps > 1e-6
    settling = (start - end + source * num_steps) / np.where(fast, decay * num_steps, 1.0)
    return end, np.where(fast, settling, start + source * num_steps / 2)


def _grown(rate: Array, num_steps: int) -> Array:
    """The integral of e^(-rate t) over num_steps."""
    decay = np.maximum(rate * num_steps, 1e-12)
    return num_steps * -np.expm1(-decay) / decay
