"""Outputs that few directions make are skew: what pushes them all is bounded, and does so on one side only.

Weights fluctuate by dw, outputs by x_i . dw, and the optimizer drives them back along its mean gradient, of which

    (1/n) sum_l x_l (rho_l' dz_l + rho_l''/2 (dz_l^2 - Var z_l) + ...)

is left, every derivative an expectation. The first term is linear, and all that a Gaussian closure knows. The second
makes third cumulants: with A = K J the rates at which weights forget, gains K in them, after T steps

    kappa_3(z_i) = -3 int_0^T dt (1/n) sum_l rho_l'' C_il(t)^2 R_il(t),
    C_il(t) = x_i' e^(-A t) V(T - t) x_l,    R_il(t) = x_i' e^(-A t) K x_l,

Cov(z_i, z_l) of the weights t steps apart, and the answer to a push at x_l. It is small where outputs have hundreds of
directions of their own and there are many more examples, and large where examples are neighbours of each other in few,
or one label is rare, or there are about as many examples as directions: then each skews itself (l = i), as far as
`own_push` does not know of it. A, K, V and rho'' are those of their time (`Past`), and with x = (z - E z)/std z

    rho'' = E[rho (x^2 - x E x^3 - 1)]/Var z,

what of Cov(z^2, rho) is not of the straight force Cov(z, rho)/Var z: E rho'' of a Gaussian.

The output then is that of x + gamma (x^2 - 1), x of the law without, gamma = kappa_3/(6 std^3) (`output_law.SkewLaw`).
Cov(z, rho)/Var z is less than E rho': a skew output is held less, and its variance larger. Own derivation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from noisecast.theory.output_law import SMALLEST_STD

Array = Any
TIMES = 6  # back from now, at which what examples do to each other is read
LEAST_SKEW = 0.05  # of an output, on average: less is not told from none
PROBED = 100  # examples, by which it is told whether there is any
ROWS_AT_ONCE = 200  # that are asked what pushes them: there are thousands of pushes, and the cache holds so many
LARGEST = 0.15  # gamma: beyond it a density would fall below nothing close to the middle


@dataclass(frozen=True, eq=False)
class Span:
    """Steps in which weights forget at the rates A = K J.

    Args:
      start, end: the steps before and after.   gain: K, a step; (k,) > 0.   jacobian: J; (k, k).
      covariances: V at the start and at the end, in between on a straight line; (k, k) each.
    """

    start: float
    end: float
    gain: Array
    jacobian: Array
    covariances: tuple[Array, Array]

    @cached_property
    def _modes(self) -> tuple[Array, Array, Array]:
        """Rates, and what turns modes into weights, and back."""
        root = np.sqrt(self.gain)
        rates, turn = np.linalg.eigh(root[:, None] * self.jacobian * root)
        return np.maximum(rates, 0.0), root[:, None] * turn, turn.T / root

    @property
    def fastest(self) -> float:
        """The largest of the rates."""
        return float(self._modes[0][-1])

    @cached_property
    def left_of_all(self) -> Array:
        """`left` over the whole span, which every look back from later on asks for; (k, k)."""
        return self.left(self.end - self.start)

    def left(self, time: float) -> Array:
        """e^(-A t); (k, k)."""
        rates, turn, back = self._modes
        return (turn * np.exp(-rates * time)) @ back

    def covariance(self, step: float) -> Array:
        """V at a step; (k, k)."""
        share = min(1.0, max(0.0, (step - self.start) / (self.end - self.start)))
        return (1 - share) * self.covariances[0] + share * self.covariances[1]


class Past(NamedTuple):
    """What a solve has gone through so far.

    Args:
      spans: one after the other, from step 0.
      steps, bends: where rho_l'' of some examples was seen, between which it is on a straight line; (m,) each.
    """

    spans: tuple[Span, ...] = ()
    steps: tuple[float, ...] = ()
    bends: tuple[Array, ...] = ()

    def then(self, span: Span, steps: Sequence[float], bends: Sequence[Array]) -> "Past":
        """And a span, at some steps of which bends were seen."""
        return Past((*self.spans, span), (*self.steps, *steps), (*self.bends, *bends))

    def bends_at(self, steps: Array) -> Array:
        """(q,) -> (q, m)."""
        return np.stack([_between(self.steps, self.bends, step) for step in steps])

    def left(self, steps: Array) -> list[tuple[Array, Array]]:
        """P V and P K, P what is left today of a push at each step.

        Args:
          steps: falling; (q,).
        Returns: q pairs; (k, k) each.
        """
        found, spans = list[tuple[Array, Array]](), list(self.spans)
        after = np.eye(len(spans[-1].gain))
        for step in steps:
            while step < spans[-1].start and len(spans) > 1:
                after = after @ spans[-1].left_of_all
                spans.pop()
            left = after @ spans[-1].left(spans[-1].end - step)
            found.append((left @ spans[-1].covariance(step), left * spans[-1].gain))
        return found


class _Pushes(NamedTuple):
    """Of an integral over the past: what is left at some times (`Past.left`), bends then, and shares of the times.

    Args:
      left: q pairs; (k, k) each.   weights: -rho_l''/2 of the examples times the shares; (q, m).
    """

    left: list[tuple[Array, Array]]
    weights: Array

    @classmethod
    def of(cls, past: Past) -> "_Pushes":
        times, shares = _times(past.spans[-1].fastest, past.spans[-1].end)
        steps = past.spans[-1].end - times
        return cls(past.left(steps), shares[:, None] * past.bends_at(steps) / -2)

    def at(self, rows: Array) -> tuple[Array, Array]:
        """P V x_l and P K x_l of rows; (k, q m) float32 each, all rows of a time beside each other."""
        pushed = rows.T.astype(np.float64)
        covariances, answers = (np.hstack([each @ pushed for each in kind]) for kind in zip(*self.left, strict=True))
        return covariances.astype(np.float32), answers.astype(np.float32)


class CollectiveSkew(NamedTuple):
    """gamma_i as a sum over what some examples l have pushed at some times.

    Args:
      covariance, answer: so that x_i . covariance is C_il, and x_i . answer R_il; (k, q) float32, k columns.
      weights: of the pushes; (q,).
      few: kappa_3/6 of the examples that push; (m,).
      own: gamma of them that is of what they do to themselves; (m,).
    """

    covariance: Array
    answer: Array
    weights: Array
    few: Array
    own: Array

    @classmethod
    def none(cls) -> "CollectiveSkew":
        """Outputs as good as Gaussians."""
        nothing = np.zeros((0, 0), np.float32)
        return cls(nothing, nothing, np.zeros(0), np.zeros(0), np.zeros(0))

    @property
    def is_any(self) -> bool:
        """Whether outputs are skew."""
        return len(self.weights) > 0

    @classmethod
    def of(cls, rows: Array, std: Array, own: Array, past: Past, num_examples: int) -> "CollectiveSkew":
        """At the end of what has been so far.

        Args:
          rows: x_l of some examples; (m, k).   std: of their outputs; (m,).
          own: how often what an example does to itself counts; (m,) >= 0.
          past: of the weights, and of these examples' bends.   num_examples: n, for which they stand.
        Returns: CollectiveSkew; none where a part of the rows has less than `LEAST_SKEW`.
        """
        part = slice(None, None, max(1, len(rows) // PROBED))
        pushes, own = _Pushes.of(past), own / num_examples
        probe = cls._by(rows[part], std[part], own[part], pushes._replace(weights=pushes.weights[:, part]))
        if not 6 * np.abs(_gamma(probe.few, std[part])).mean() >= LEAST_SKEW:
            return cls.none()
        return cls._by(rows, std, own, pushes)

    @classmethod
    def _by(cls, rows: Array, std: Array, own: Array, pushes: _Pushes) -> "CollectiveSkew":
        m, each, weights = len(rows), np.arange(len(rows)), pushes.weights
        covariance, answer = pushes.at(rows)
        of_pair = _of_pushes(rows, covariance, answer).reshape(m, TIMES, m)
        alone = np.einsum("mt,tm->m", of_pair[each, :, each], weights) * own
        of_pair[each, :, each] = 0.0
        of_each = weights.ravel() / m
        few = of_pair.reshape(m, -1) @ of_each + alone
        return cls(covariance, answer, of_each, few, alone / np.maximum(std, SMALLEST_STD) ** 3)

    def on_the_way_from(self, other: "CollectiveSkew", share: float) -> "CollectiveSkew":
        """As this, and of a size between the other's, with share 0, and its own, with 1.

        Args:
          other: of the same examples.   share: in [0, 1].
        """
        own = float(np.abs(self.few).sum())
        size = share + (1 - share) * float(np.abs(other.few).sum()) / own if own > 0 else 1.0
        return self._replace(weights=size * self.weights, few=size * self.few, own=size * self.own)

    def gamma(self, rows: Array, std: Array) -> Array:
        """gamma_i of rows that push nothing, where there is any.

        Args:
          rows: x_i; (n, k).   std: of the outputs; (n,).
        Returns: (n,).
        """
        third, weights = np.empty(len(rows)), self.weights.astype(np.float32)
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            third[part] = _of_pushes(rows[part], self.covariance, self.answer) @ weights
        return _gamma(third, std)

    def gamma_of_few(self, std: Array) -> Array:
        """gamma_l of the examples that push.

        Args:
          std: of their outputs; (m,).
        Returns: (m,).
        """
        return _gamma(self.few, std)

    def gamma_of_all(self, rows: Array, std: Array, chosen: Array, standing: Array) -> Array:
        """gamma_i of all for which those that push stand: what each does to itself is taken to be alike.

        Args:
          rows: x_i; (n, k).   std: of the outputs; (n,).
          chosen: which of the rows push; (m,).   standing: which of these stands for each row; (n,) in [0, m).
        Returns: (n,).
        """
        if len(chosen) < len(rows):
            found = np.clip(self.gamma(rows, std) + self.own[standing], -LARGEST, LARGEST)
        else:
            found = np.empty(len(rows))
        found[chosen] = self.gamma_of_few(std[chosen])
        return found


def _times(fastest: float, num_steps: float) -> tuple[Array, Array]:
    """Back from now, close ones close together, and what an integral over them has of each; (`TIMES`,)."""
    nodes, shares = np.polynomial.legendre.leggauss(TIMES)
    first = 1 / (3 * max(fastest, 1e-9))
    half = np.log1p(num_steps / first) / 2
    times = first * np.exp(half * (1 + nodes))
    return times - first, times * shares * half


def _between(places: Sequence[float], values: Sequence[Array], place: float) -> Array:
    """On the straight line between neighbours; before the first as there, after the last as there."""
    right = int(np.searchsorted(places, place))
    if right in (0, len(places)):
        return values[max(0, right - 1)]
    share = (place - places[right - 1]) / (places[right] - places[right - 1])
    return (1 - share) * values[right - 1] + share * values[right]


def _of_pushes(rows: Array, covariance: Array, answer: Array) -> Array:
    rows = rows.astype(np.float32, copy=False)
    found = rows @ covariance
    found *= found
    found *= rows @ answer
    return found


def _gamma(third: Array, std: Array) -> Array:
    return np.clip(third / np.maximum(std, SMALLEST_STD) ** 3, -LARGEST, LARGEST)
