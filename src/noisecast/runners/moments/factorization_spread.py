"""How far one run of a factorisation lies from the mean over runs: the noise of every step, carried to the end.

To first order a run's rows differ from their mean by d with d' = -A K d + noise a step: A is the Jacobian of the mean
clipped gradient, K the gains. So a loss whose mean has the gradient g at the end differs from run to run by

    Var g . d = sum over steps of l' Q l,        l = g at the end,        dl/dt = K A' l before it,

Q the noise of a step's directions. A couples all rows: what grows in all of them together, or is held by all of them
together, is followed; variances row by row miss both. Own derivation.
"""

import math
from typing import NamedTuple

import numpy as np

from noisecast.compiled import njit
from noisecast.runners.moments.factorization_rows import KERNEL, single
from noisecast.theory.factorization_moments import chebyshev_step, stages_for


@njit(**KERNEL)
def _seen_by_ratings(users, items, mean, variance, rows, along, beside):
    """Of every rating m_w . l_u + m_u . l_w, and what the rows' variances add to its square; (n,) each."""
    for i in range(len(users)):
        mu, mw, vu, vw = mean[users[i]], mean[items[i]], variance[users[i]], variance[items[i]]
        lu, lw = rows[users[i]], rows[items[i]]
        dot, spread = np.float32(0.0), np.float32(0.0)
        for j in range(len(mu)):
            dot += mw[j] * lu[j] + mu[j] * lw[j]
            spread += vw[j] * lu[j] * lu[j] + vu[j] * lw[j] * lw[j]
        along[i], beside[i] = dot, spread


@njit(**KERNEL)
def pulled_back(users, items, mean, variance, rows, push, slope, held, lever, found):
    """A' l: of a rating's force r(e) (m_w, m_u), r' = slope, dr/d(|x_u|^2/2) = lever; (R, dim)."""
    for i in range(len(users)):
        u, w = users[i], items[i]
        dot = np.float32(0.0)
        for j in range(mean.shape[1]):
            dot += mean[w, j] * rows[u, j] + mean[u, j] * rows[w, j]
        across, within, pushed, kept = dot * slope[i], dot * lever[i], push[i], held[i]
        for j in range(mean.shape[1]):
            lu, lw = rows[u, j], rows[w, j]
            found[u, j] += across * mean[w, j] + within * mean[u, j] + pushed * lw + kept * variance[w, j] * lu
            found[w, j] += across * mean[u, j] + within * mean[w, j] + pushed * lu + kept * variance[u, j] * lw


class Snapshot(NamedTuple):
    """What the ratings make of Gaussian rows at one step; in single precision.

    Args:
      mean, variance: in the basis of the time; (R, dim).   turn: of the basis, from that of the snapshot before.
      push, slope, held, lever: of the mean clipped gradient, over the number of ratings; (n,).
      square: E r^2, over the number of ratings; (n,).
    """

    mean: np.ndarray
    variance: np.ndarray
    turn: np.ndarray
    push: np.ndarray
    slope: np.ndarray
    held: np.ndarray
    lever: np.ndarray
    square: np.ndarray


class Leg(NamedTuple):
    """The steps from one snapshot to the next.

    Args:
      num_steps: how many.   stiffness: their rates times their number, at most.
      pull: eta k, by row; (R, 1).   independent: noise that has nothing to do with batches, a step, by row; (R, 1).
      of_batch, of_mean: a step's batch noise is of_batch E r^2 s^2 - of_mean (E r s)^2 for a rating's s.
    """

    num_steps: int
    stiffness: float
    pull: np.ndarray
    independent: np.ndarray
    of_batch: float
    of_mean: float


class Past:
    """Snapshots and the legs between them.

    Args:
      users, items: of the ratings; (n,).   is_kept: whether there is one.
    """

    def __init__(self, users: np.ndarray, items: np.ndarray, *, is_kept: bool):
        self.users, self.items, self.is_kept = users, items, is_kept
        self.snapshots: list[Snapshot] = []
        self.legs: list[Leg] = []

    def add(self, snapshot: Snapshot, leg: Leg | None) -> None:
        """leg: from the snapshot before; None for the first."""
        self.snapshots.append(Snapshot(*(single(part) for part in snapshot)))
        self.legs += [] if leg is None else [leg]

    def variance(self, gradient: np.ndarray) -> float:
        """Var g . d at the last snapshot; nan where rows left every bound.   gradient: g; (R, dim)."""
        if not np.isfinite(gradient).all():
            return math.nan
        rows, found = gradient.astype(np.float32), 0.0
        for earlier, leg, later in zip(self.snapshots[-2::-1], self.legs[::-1], self.snapshots[:0:-1], strict=True):
            at_end = self._noise(later, leg, rows)
            rows = self._back(later, leg, rows)
            halfway = self._noise(later, leg, rows)
            rows = self._back(earlier, leg, rows @ later.turn.T)
            found += leg.num_steps * (at_end + 4 * halfway + self._noise(earlier, leg, rows)) / 6
        return found

    def _back(self, at: Snapshot, leg: Leg, rows: np.ndarray) -> np.ndarray:
        """l half a leg earlier."""

        def change(rows: np.ndarray) -> np.ndarray:
            rows, found = rows.astype(np.float32), np.zeros(rows.shape, np.float32)
            fields = at.push, at.slope, at.held, at.lever
            pulled_back(self.users, self.items, at.mean, at.variance, rows, *fields, found)
            return -leg.pull * found

        back = chebyshev_step(change, rows, change(rows), leg.num_steps / 2, stages_for(leg.stiffness / 2))
        return back.astype(np.float32)

    def _noise(self, at: Snapshot, leg: Leg, rows: np.ndarray) -> float:
        """l' Q l."""
        along, beside = np.empty(len(self.users), np.float32), np.empty(len(self.users), np.float32)
        _seen_by_ratings(self.users, self.items, at.mean, at.variance, leg.pull * rows, along, beside)
        mean = float(at.push @ along)
        of_batch = leg.of_batch * float(at.square @ (along**2 + beside)) - leg.of_mean * mean**2
        return max(of_batch, 0.0) + float(np.sum(leg.independent * rows**2))
