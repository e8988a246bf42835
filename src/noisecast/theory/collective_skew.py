"""Outputs that few directions make are skew: what pushes them all is bounded, and does so on one side only.

Weights fluctuate by dw, outputs by x_i . dw, and the optimizer drives them back along its mean gradient, of which

    (1/n) sum_l x_l (rho_l' dz_l + rho_l''/2 (dz_l^2 - Var z_l) + ...)

is left, every derivative an expectation. The first term is linear, and all that a Gaussian closure knows. The second
makes third cumulants: with A = K J the rates at which weights forget, gains K in them, after T steps

    kappa_3(z_i) = -3 int_0^T dt (1/n) sum_l rho_l'' C_il(t)^2 R_il(t),
    C_il(t) = x_i' e^(-A t) V(T - t) x_l,    R_il(t) = x_i' e^(-A t) K x_l,

Cov(z_i, z_l) of the weights t steps apart, and the answer to a push at x_l. It is small where outputs have hundreds of
directions of their own, in all of which R_il is that of one example, and large where examples are neighbours of each
other in few, or one label is rare. To next order rho_l'' has rho_l''' kappa_3(z_l)/Var z_l added to it.

The output then is that of x + gamma (x^2 - 1), x of the law without, gamma = kappa_3/(6 std^3) (`output_law.SkewLaw`).
Cov(z, rho)/Var z is less than E rho': a skew output is held less, and its variance larger. Own derivation.
"""

from typing import Any, NamedTuple

import numpy as np

Array = Any
TIMES = 8  # back from now, at which what examples do to each other is read
LEAST_SKEW = 0.05  # of an output, on average: less is not told from none
PROBED = 100  # examples, by which it is told whether there is any
LARGEST = 0.15  # gamma: beyond it a density would fall below nothing close to the middle


class CollectiveSkew(NamedTuple):
    """gamma_i as a sum over what some examples l have pushed at some times.

    Args:
      covariance, answer: so that x_i . covariance is C_il, and x_i . answer R_il; (k, q) float32, k columns.
      weights: of the pushes; (q,).
      few: gamma of the examples that push, by the others of them; (m,).
    """

    covariance: Array
    answer: Array
    weights: Array
    few: Array

    @classmethod
    def none(cls) -> "CollectiveSkew":
        """Outputs as good as Gaussians."""
        nothing = np.zeros((0, 0), np.float32)
        return cls(nothing, nothing, np.zeros(0), np.zeros(0))

    @property
    def is_any(self) -> bool:
        """Whether outputs are skew."""
        return len(self.weights) > 0

    @classmethod
    def of(
        cls, rows: Array, std: Array, bends: Array, *, gain: Array, jacobian: Array, covariance: Array, num_steps: int
    ) -> "CollectiveSkew":
        """Of so many steps in a field as it is now.

        Args:
          rows: x_l of some examples; (m, k).   std: of their outputs; (m,).   bends: rho_l''; (m,).
          gain: K, a step; (k,) > 0.   jacobian: J; (k, k).   covariance: V; (k, k).   num_steps: T; >= 1.
        Returns: CollectiveSkew; none where a part of the rows has less than `LEAST_SKEW`.
        """
        modes = _Modes.of(gain, jacobian, covariance, num_steps)
        part = slice(None, None, max(1, len(rows) // PROBED))
        probe = cls._by(modes, rows[part], std[part], bends[part])
        if not 6 * np.abs(probe.few).mean() >= LEAST_SKEW:
            return cls.none()
        return cls._by(modes, rows, std, bends)

    @classmethod
    def _by(cls, modes: "_Modes", rows: Array, std: Array, bends: Array) -> "CollectiveSkew":
        m, shares = len(rows), modes.shares
        covariance, answer = modes.answers(rows)
        weights = np.outer(shares, -bends / (2 * m)).ravel()
        of_pair = _of_pushes(rows, covariance, answer).reshape(m, len(shares), m)
        of_pair[np.arange(m), :, np.arange(m)] = 0.0  # what it does to itself
        return cls(covariance, answer, weights, _gamma(of_pair.reshape(m, -1) @ weights, std))

    def gamma(self, rows: Array, std: Array) -> Array:
        """gamma_i, where there is any.

        Args:
          rows: x_i; (n, k).   std: of the outputs; (n,).
        Returns: (n,).
        """
        return _gamma(_of_pushes(rows, self.covariance, self.answer) @ self.weights, std)


class _Modes(NamedTuple):
    """In which A is diagonal: w = turn . modes.

    Args:
      rates: of A; (k,) >= 0.   turn, spread: V = turn . spread . turn'; (k, k).
      times, shares: back from now, close ones close together, and what an integral over them has of each; (`TIMES`,).
    """

    rates: Array
    turn: Array
    spread: Array
    times: Array
    shares: Array
    num_steps: int

    @classmethod
    def of(cls, gain: Array, jacobian: Array, covariance: Array, num_steps: int) -> "_Modes":
        root = np.sqrt(gain)
        rates, turn = np.linalg.eigh(root[:, None] * jacobian * root)
        spread = turn.T @ (covariance / np.outer(root, root)) @ turn
        nodes, shares = np.polynomial.legendre.leggauss(TIMES)
        first = 1 / (3 * max(float(rates[-1]), 1e-9))
        half = np.log1p(num_steps / first) / 2
        times = first * np.exp(half * (1 + nodes))
        return cls(
            np.maximum(rates, 0.0), root[:, None] * turn, spread, times - first, times * shares * half, num_steps
        )

    def answers(self, rows: Array) -> tuple[Array, Array]:
        """V(T - t) e^(-A' t) x_l and e^(-A t) K x_l of all times t and rows l; (k, TIMES m) float32 each."""
        pushed = self.turn.T @ rows.T.astype(np.float64)
        together = (self.rates[:, None] + self.rates) * self.num_steps
        covariances, answers = list[Array](), list[Array]()
        for time in self.times:
            decay = np.exp(-self.rates * time)[:, None]
            grown = _grown(together, 1 - time / self.num_steps)
            covariances.append(self.turn @ (decay * ((self.spread * grown) @ pushed)))
            answers.append(self.turn @ (decay * pushed))
        return np.hstack(covariances).astype(np.float32), np.hstack(answers).astype(np.float32)


def _of_pushes(rows: Array, covariance: Array, answer: Array) -> Array:
    rows = rows.astype(np.float32, copy=False)
    found = rows @ covariance
    found *= found
    found *= rows @ answer
    return found


def _gamma(third: Array, std: Array) -> Array:
    return np.clip(third / np.maximum(std, 1e-3) ** 3, -LARGEST, LARGEST)


def _grown(together: Array, share: float) -> Array:
    """V(t)/V(T) of modes under constant noise, (1 - e^(-2 lambda t))/(1 - e^(-2 lambda T)), t = share T."""
    share = max(share, 0.0)
    return np.where(together > 1e-6, np.expm1(-together * share) / np.expm1(-np.maximum(together, 1e-6)), share)
