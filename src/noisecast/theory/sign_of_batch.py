"""The sign of a gradient that few examples make: the law of a batch by its characteristic function.

Coordinate j of a private gradient is g = sum_i b_i c_i + sigma Z, with b_i = 1 where example i is drawn, which happens
with probability q. Its characteristic function is

    phi(t) = prod_i (1 - q + q E e^(i t c_i)) e^(-sigma^2 t^2/2),

where q is small a compound Poisson law's, exp(q sum_i (E e^(i t c_i) - 1)). A sign sees more of it than two moments:
by Gil-Pelaez' inversion, and by that of the density at 0,

    E sign(g) = (2/pi) int_0^oo Im phi(t)/t dt,        2 p_g(0) = (2/pi) int_0^oo Re phi(t) dt.

How E sign(g) moves with what example i adds: d/dtheta E sign(g) = q sum_i k_i c_i', with k_i twice the density of g at
0 *given that i is drawn*, whose phi has E e^(i t c_i) for i's factor (of Poisson laws this is Mecke's formula). An
example that outweighs all others in its batches has saturated the sign: k_i is near 0, however steep the sign is
without it. Own derivation.

Of batches of exactly B of n examples phi is the mean of prod w_i, w_i = E e^(i t c_i), over all sets of B, e_B/C(n, B).
Newton's identities make the elementary symmetric polynomial e_B of sums of powers of w_i, and that without example i is
e_B - w_i e_(B-1) without it. Own derivation.

Where batches are of many, all k_i are equal and the two moments say the same (`closures.sign_response`).
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from scipy.special import binom

Array = Any
REACH = 5.0  # standard deviations of the Gaussian part, beyond which phi is nothing; and of the sum, beside its largest
LARGEST_ORDER = 512  # nodes; what needs more is smoothed by as much noise as it lacks
AT_ONCE, MOST_AT_ONCE = 2_000_000, 16_000_000  # numbers; of a single long coordinate
SMALL_PROBABILITY = 0.005  # below it batches have a compound Poisson law, to q/2, in less time
# Batches of exactly so many have their own law; larger ones that of as many on average, each drawn with probability q.
MOST_EXACT = 8
NOTHING = 1e-6  # no factor of phi is nearer to 0, so that it can be taken out again


class Entries(NamedTuple):
    """Examples by coordinate: those that move coordinate j are at starts[j]:starts[j + 1], one at least.

    Args:
      starts: (d + 1,).   examples: whose; (m,).   values: x_ij; (m,).

    >>> Entries(np.array([0, 1, 3]), np.array([4, 4, 7]), np.ones(3)).coordinates
    array([0, 1, 1])
    """

    starts: Array
    examples: Array
    values: Array

    @property
    def coordinates(self) -> Array:
        """Whose entry each is; (m,)."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def between(self, first: int, last: int) -> "Entries":
        """Of coordinates first to last - 1.

        Args:
          first, last: 0 <= first < last <= d.
        Returns: Entries of last - first coordinates.
        """
        at = slice(self.starts[first], self.starts[last])
        return Entries(self.starts[first : last + 1] - self.starts[first], self.examples[at], self.values[at])


class SignOfBatch(NamedTuple):
    """E sign(g_j) of a batch of few, and how it moves with what examples add.

    Args:
      expected: E sign(g_j); (d,).
      gain: 2 p_j(0), how it moves with what is added to every batch; (d,).
      gain_if_drawn: k_ij, how it moves with what that example adds; (m,).
    """

    expected: Array
    gain: Array
    gain_if_drawn: Array


def batch_variance(
    entries: Entries, mean: Array, square: Array, *, rate: float, probability: float, exactly: int | None = None
) -> Array:
    """Var sum_i b_i c_i of the law that `sign_of_batch` takes, rate sum_i (E c_i^2 - q (E c_i)^2); (d,).

    Of exactly B of n examples B (n - B)/(n - 1) (<c^2> - <c>^2), means over all n.

    Args:
      entries: x_ij by coordinate.   mean, square: E r_i, E r_i^2; (n,).   rate, probability, exactly: as there.
    Returns: (d,) >= 0 [loss^2/params^2].

    >>> one = Entries(np.array([0, 1]), np.array([0]), np.array([2.0]))
    >>> batch_variance(one, np.ones(1), np.ones(1), rate=0.5, probability=0.5)             # x^2 q (1 - q)
    array([1.])
    """
    if is_exact(exactly):
        n = exactly / probability
        second = rate * np.add.reduceat(entries.values**2 * square[entries.examples], entries.starts[:-1])
        first = rate * np.add.reduceat(entries.values * mean[entries.examples], entries.starts[:-1])
        return np.maximum(second - first**2 / exactly, 0.0) * (n - exactly) / max(n - 1, 1)
    single = square - (probability if probability >= SMALL_PROBABILITY else 0.0) * mean**2
    return rate * np.add.reduceat(entries.values**2 * single[entries.examples], entries.starts[:-1])


def is_exact(exactly: int | None) -> TypeGuard[int]:
    return exactly is not None and exactly <= MOST_EXACT


def sign_of_batch(
    entries: Entries, mean: Array, std: Array, *, rate: float, noise_variance: Array, probability: float = 0.0,
    exactly: int | None = None,
) -> SignOfBatch:  # fmt: skip
    """Of coordinates to which example i adds x_ij r_i where it is drawn, r_i = mean_i +- std_i with even odds.

    The integrals are sums over a grid, as fine as the range of the batch's sum asks for (own derivation).

    Args:
      entries: x_ij by coordinate.   mean, std: of r_i; (n,).
      rate: how often each is drawn in a batch; > 0. More than q where an example stands for several.
      noise_variance: sigma^2, of all that is Gaussian; (d,), > 0. Batches that are drawn otherwise: less what their
        variance lacks of this one's, `batch_variance`.
      probability: q, at which each of those for which an example stands is drawn; in [0, 1]. 0: any number of times.
      exactly: B, where all batches are of B different ones of B/q; looked at up to `MOST_EXACT`.
    Returns: SignOfBatch.

    >>> one = Entries(np.array([0, 1]), np.array([0]), np.array([1.0]))    # in half of all batches, +1 and noise of 0.1
    >>> law = {"rate": 0.5, "probability": 0.5, "noise_variance": np.array([0.01])}
    >>> [np.round(part, 2).tolist() for part in sign_of_batch(one, np.ones(1), np.zeros(1), **law)]
    [[0.5], [3.99], [0.0]]
    """
    counts = np.diff(entries.starts)
    parts = []
    for first, last, order, step in _chunks(entries, mean, std, rate, noise_variance):
        some, nodes = entries.between(first, last), step[:, None] * np.arange(1, order + 1)
        waves = _waves(some, mean, std, np.repeat(step, counts[first:last]), order)
        wide = np.maximum(noise_variance[first:last], (REACH / nodes[:, -1]) ** 2)[:, None]
        blurred = np.exp(-wide * nodes**2 / 2)
        if is_exact(exactly):
            phi, others = _of_exactly(exactly, waves, some, rate, probability)
            phi, others = phi * blurred, others * blurred[some.coordinates]
        else:
            phi, factors = _together(waves, some.starts[:-1], rate, probability)
            phi = phi * blurred
            others = phi[some.coordinates]
            if factors is not None:
                waves /= factors  # i's own factor is taken out
        pull = rate * np.add.reduceat(some.values * mean[some.examples], some.starts[:-1])  # Im phi(t)/t at 0
        if_drawn = np.einsum("mk,mk->m", waves.real, others.real)
        if_drawn -= np.einsum("mk,mk->m", waves.imag, others.imag)
        scale = 2 / np.pi * step
        parts.append(
            SignOfBatch(
                scale * (pull / 2 + (phi.imag / nodes).sum(axis=1)),
                np.maximum(scale * (0.5 + phi.real.sum(axis=1)), 0.0),
                np.maximum(np.repeat(scale, counts[first:last]) * (0.5 + if_drawn), 0.0),
            )
        )
    return SignOfBatch(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _together(waves: Array, starts: Array, rate: float, probability: float) -> tuple[Array, Array | None]:
    """E e^(i t sum_i b_i c_i), and each example's factor of it; of a Poisson law a factor without i is the factor."""
    if probability < SMALL_PROBABILITY:
        return np.exp(rate * np.add.reduceat(waves - 1, starts, axis=0)), None
    factors = 1 + np.float32(probability) * (waves - 1)
    factors[abs(factors) < NOTHING] = NOTHING
    if math.isclose(rate, probability):
        return np.multiply.reduceat(factors, starts, axis=0), factors
    return np.exp(rate / probability * np.add.reduceat(np.log(factors), starts, axis=0)), factors


def _of_exactly(drawn: int, waves: Array, entries: Entries, rate: float, probability: float) -> tuple[Array, Array]:
    """phi of exactly `drawn` = B of n = B/q examples, and of the B - 1 others where i is one of them.

    Both as means over sets, e_k/C(n, k); examples without an entry have w = 1.
    """
    n, copies = drawn / probability, rate / probability
    counts = np.diff(entries.starts)
    sums, power = [], np.ones_like(waves)
    for _ in range(drawn):
        power = power * waves
        sums.append(copies * np.add.reduceat(power, entries.starts[:-1], axis=0, dtype=np.complex128))
        sums[-1] += (n - copies * counts)[:, None]
    phi = [np.ones_like(sums[0])]
    for k in range(1, drawn + 1):
        shares = [(-1) ** (i - 1) * binom(n, k - i) / (k * binom(n, k)) for i in range(1, k + 1)]
        phi.append(sum(shares[i - 1] * phi[k - i] * sums[i - 1] for i in range(1, k + 1)))
    others = np.ones_like(waves)
    for k in range(1, drawn):
        others = (n * phi[k][entries.coordinates] - k * waves * others) / (n - k)
    return phi[drawn], others


def _chunks(
    entries: Entries, mean: Array, std: Array, rate: float, noise_variance: Array
) -> Iterator[tuple[int, int, int, Array]]:
    """Coordinates, a few at a time: first, last, order of the grid, its step in each.

    A sum over a grid of step pi/R takes the sign for a square wave of half period R: R holds nearly all of the sum.
    """
    starts = entries.starts[:-1]
    largest = abs(entries.values) * (abs(mean) + std)[entries.examples]
    spread = np.sqrt(noise_variance + rate * np.add.reduceat(largest**2, starts))
    middle = abs(rate * np.add.reduceat(entries.values * mean[entries.examples], starts))
    step = np.pi / (np.maximum.reduceat(largest, starts) + middle + REACH * spread)
    most = np.clip(MOST_AT_ONCE // np.diff(entries.starts), 8, LARGEST_ORDER)
    order = np.clip(np.ceil(REACH / (np.sqrt(noise_variance) * step)), 8, most).astype(int)
    first = 0
    while first < len(starts):
        last, wanted = first + 1, order[first]
        while last < len(starts):
            more = max(wanted, order[last])
            if (entries.starts[last + 1] - entries.starts[first]) * more > AT_ONCE:
                break
            last, wanted = last + 1, more
        yield first, last, int(wanted), step[first:last]
        first = last


def _waves(entries: Entries, mean: Array, std: Array, step: Array, order: int) -> Array:
    """E e^(i t c) at t = step, 2 step, ... order step; (m, order) complex64. Powers by doubling: few exponentials."""
    unit = 1j * step * entries.values
    found = np.zeros((len(unit), order), np.complex64)
    for side in (-1, 1):
        powers = np.empty((len(unit), order), np.complex64)
        powers[:, 0] = np.exp(unit * (mean + side * std)[entries.examples])
        known = 1
        while known < order:
            more = min(known, order - known)
            np.multiply(powers[:, :more], powers[:, known - 1 : known], out=powers[:, known : known + more])
            known += more
        found += powers
    return found / 2
