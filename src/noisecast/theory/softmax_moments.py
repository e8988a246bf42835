"""Examples of a linear model with several outputs under Gaussian logits: expectations of loss and clipped gradient."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
from scipy import special

Array = Any

NUM_NODES = 16
NUM_POINT_SETS = 64
CHUNK_ELEMENTS = 1 << 16  # logits of all nodes at once: what the cache holds


@dataclass(frozen=True)
class OutputLaw:
    """How logits z (..., m) and targets y (..., m), 0 or 1, make a loss whose gradient in z is `scale` (p(z) - y).

    Args:
      probabilities: z -> p(z) and the normaliser A(z), where the loss is scale (A(z) - y . z); (..., m) and (...).
      is_coupled: whether dp/dz = diag(p) - pp' (softmax) or diag(p (1 - p)).
      scale: of m.
    """

    probabilities: Callable[[Array], tuple[Array, Array]]
    is_coupled: bool
    scale: Callable[[int], float] = lambda m: 1.0

    def gauge(self, num_outputs: int) -> float:
        """m/(m - 1) where only differences of logits count, else 1.

        Softmax damps differences of logits alone, so independent fluctuations of variance v shrink at the rate of the
        centred ones: at equal probabilities p (1 - p) m/(m - 1) = p. Exact there, and for two classes. Own derivation.

        Args:
          num_outputs: m; >= 1.
        Returns: () >= 1.
        """
        return num_outputs / (num_outputs - 1) if self.is_coupled and num_outputs > 1 else 1.0


def _softmax(z: Array) -> tuple[Array, Array]:
    top = z.max(axis=-1, keepdims=True)
    p = np.exp(z - top)
    total = p.sum(axis=-1, keepdims=True)
    return p / total, (top + np.log(total))[..., 0]


def _sigmoids(z: Array) -> tuple[Array, Array]:
    rest = np.exp(-np.abs(z))
    softplus = np.log1p(rest).sum(axis=-1) + np.maximum(z, 0).sum(axis=-1)
    return np.where(z >= 0, 1, rest) / (1 + rest), softplus


SOFTMAX_OUTPUTS = OutputLaw(_softmax, is_coupled=True)
INDEPENDENT_OUTPUTS = OutputLaw(_sigmoids, is_coupled=False)
MEAN_OF_OUTPUTS = OutputLaw(_sigmoids, is_coupled=False, scale=lambda m: 1 / m)


class OutputExpectations(NamedTuple):
    """What clipped gradients [x; 1] r(z)' are made of, for independent z_c ~ N(mean_c, variance_c).

    Args:
      residual: E r, the clipped residual s(z) scale (p - y); (n, m).   squared_residual: E r^2; (n, m).
      slope: E dr_c/dz_c; (n, m), >= 0.
      loss: E of it; (n,).   clip_fraction: P(clipped); (n,).
      diagonal, coupling, along, damped: E dr/dz in mean field, P (diag(diagonal) - coupling coupling') P with
        P = I - damped along along'; (n, m), (n, m) or None, (n, m), (n,).
    """

    residual: Array
    squared_residual: Array
    slope: Array
    loss: Array
    clip_fraction: Array
    diagonal: Array
    coupling: Array | None
    along: Array
    damped: Array

    def curve(self, logits: Array) -> Array:
        """(E dr/dz) v for every example.

        Clipping to a length takes away what changes the length: d(r/|r|) = (I - uu') dr/|r|, u = r/|r|. In mean field
        the share phi of clipped weight is projected out on both sides by P = I - (1 - sqrt(1 - phi)) uu', which keeps
        the operator symmetric and not negative.

        Args:
          logits: v; (n, m).
        Returns: (n, m).
        """
        v = self._projected(logits)
        image = self.diagonal * v
        if self.coupling is not None:
            image -= self.coupling * np.einsum("ij,ij->i", self.coupling, v)[:, None]
        return self._projected(image)

    def _projected(self, v: Array) -> Array:
        return v - self.along * (self.damped * np.einsum("ij,ij->i", self.along, v))[:, None]


class Nodes:
    """Points at which logits are looked at: Latin hypercubes of a standard normal, other ones for every few examples.

    Each coordinate alone is integrated nearly exactly, and what 16 points of m coordinates leave to chance averages out
    over the examples.

    Args:
      num_examples, num_outputs: n and m; >= 1.   num_nodes: points an example; >= 1.

    >>> [(examples, points.shape) for examples, points in Nodes(2, 3)]
    [(slice(0, 1, None), (16, 3)), (slice(1, 2, None), (16, 3))]
    """

    def __init__(self, num_examples: int, num_outputs: int, num_nodes: int = NUM_NODES):
        most = min(CHUNK_ELEMENTS // (num_nodes * num_outputs), math.ceil(num_examples / NUM_POINT_SETS))
        size = max(1, most)
        self.chunks = [slice(first, min(first + size, num_examples)) for first in range(0, num_examples, size)]
        rng = np.random.default_rng(20_240_817)  # a quadrature rule, the same for everybody: nothing private is drawn
        strata = np.tile(np.arange(num_nodes)[:, None], (1, num_outputs))
        self.points = [
            special.ndtri((rng.permuted(strata, axis=0) + rng.random(strata.shape)) / num_nodes).astype(np.float32)
            for _ in self.chunks[:NUM_POINT_SETS]
        ]

    def __iter__(self) -> Iterator[tuple[slice, np.ndarray]]:
        return zip(self.chunks, cycle(self.points), strict=False)


def output_expectations(
    law: OutputLaw, mean: Array, variance: Array, targets: Array, bound: Array, nodes: Nodes
) -> OutputExpectations:
    """Expectations over independent logits z_c ~ N(mean_c, variance_c) of each example, jointly clipped over outputs.

    Args:
      law: of loss and residuals.   mean, variance: of the logits; (n, m).   targets: y; (n, m), 0 or 1.
      bound: C/sqrt(|x|^2 + 1), at which |r| is clipped; (n,), > 0, infinite without clipping.
      nodes: of n examples.
    Returns: OutputExpectations, float32 of (n, m) and float64 of (n,).

    >>> mean, targets = np.zeros((1, 2)), np.eye(2)[:1]
    >>> e = output_expectations(SOFTMAX_OUTPUTS, mean, 0 * mean, targets, np.ones(1), Nodes(1, 2))
    >>> e.residual.round(3).tolist(), e.slope.round(3).tolist(), e.curve(np.array([[1.0, -1.0]])).round(3).tolist()
    ([[-0.5, 0.5]], [[0.25, 0.25]], [[0.5, -0.5]])
    >>> e.loss.round(3)
    array([0.693])
    """
    n, m = mean.shape
    parts = {name: np.empty((n, m), np.float32) for name in ("residual", "squared_residual", "slope", "diagonal")}
    sums = {name: np.empty(n) for name in ("loss", "clip_fraction", "kept", "clipped")}
    std = np.sqrt(np.maximum(variance, 0.0)).astype(np.float32)
    mean, targets, bound = mean.astype(np.float32), targets.astype(np.float32), bound.astype(np.float32)
    for chunk, points in nodes:
        z = mean[chunk, None, :] + std[chunk, None, :] * points
        found = _at_nodes(law, z, targets[chunk, None, :], bound[chunk, None])
        for name, values in found.items():
            (parts if name in parts else sums)[name][chunk] = values
    sums["loss"] -= law.scale(m) * np.einsum("ij,ij->i", mean, targets)
    length = np.sqrt(np.einsum("ij,ij->i", parts["residual"], parts["residual"]))
    kept, clipped = sums.pop("kept"), sums.pop("clipped")
    coupling = None
    if law.is_coupled:  # scale E[s p p'] in mean field, whose rows sum to the diagonal
        coupling = parts["diagonal"] / np.sqrt(law.scale(m) * np.maximum(kept, 1e-30)).astype(np.float32)[:, None]
    share = np.minimum(clipped / np.maximum(kept, 1e-30), 1.0)
    return OutputExpectations(
        **parts,
        **sums,
        coupling=coupling,
        along=parts["residual"] / np.maximum(length, np.float32(1e-30))[:, None],
        damped=(1 - np.sqrt(1 - share)).astype(np.float32),
    )


def _at_nodes(law: OutputLaw, z: Array, y: Array, bound: Array) -> dict[str, Array]:
    """Means over nodes of everything that one kind of example has; z (n, nodes, m), y (n, 1, m), bound (n, 1)."""
    num_nodes, m = z.shape[1:]
    scale = np.float32(law.scale(m))
    p, normaliser = law.probabilities(z)
    r = p - y
    length = np.sqrt(np.einsum("nkm,nkm->nk", r, r))
    factor = np.minimum(1, bound / np.maximum(scale * length, np.float32(1e-30)))
    clipped = factor < 1

    def mean_of(weights: Array, values: Array) -> Array:
        return np.matmul(weights[:, None, :], values)[:, 0, :] / num_nodes

    # dp/dz r, which clipping takes away along r; and dp_c/dz_c.
    self_curve = p * (1 - p)
    turned = p * (r - np.einsum("nkm,nkm->nk", p, r)[..., None]) if law.is_coupled else self_curve * r
    along = np.where(clipped, factor / np.maximum(length, np.float32(1e-15)) ** 2, 0)
    slope = mean_of(factor, self_curve)
    diagonal = mean_of(factor, p) if law.is_coupled else slope
    return {
        "residual": scale * mean_of(factor, r),
        "squared_residual": scale**2 * mean_of(factor**2, np.square(r)),
        "slope": scale * np.maximum(slope - mean_of(along, turned * r), 0),
        "diagonal": scale * diagonal,
        "loss": scale * normaliser.mean(axis=1),
        "clip_fraction": clipped.mean(axis=1),
        "kept": factor.mean(axis=1),
        "clipped": np.where(clipped, factor, 0).mean(axis=1),
    }


def probability_of_likeliest(mean: Array, variance: Array, labels: Array, nodes: Nodes) -> Array:
    """P(z_label is the largest logit), averaged over the other logits' nodes.

    P(z_y > top of the others) = E ndtr((mean_y - top)/std_y): the label's own logit is integrated exactly.

    Args:
      mean, variance: of the logits; (n, m).   labels: the number of each example's label; (n,).   nodes: of n examples.
    Returns: (n,) in [0, 1].

    >>> probability_of_likeliest(np.array([[1.0, 0.0]]), np.array([[1.0, 0.0]]), np.array([0]), Nodes(1, 2)).round(4)
    array([0.8413])
    >>> probability_of_likeliest(np.zeros((1, 5)), np.ones((1, 5)), np.array([0]), Nodes(1, 5, 4096)).round(2)
    array([0.2])
    """
    found = np.empty(len(mean))
    std = np.sqrt(np.maximum(variance, 1e-30))
    for chunk, points in nodes:
        rows = np.arange(chunk.stop - chunk.start)
        z = mean[chunk, None, :] + std[chunk, None, :] * points
        z[rows, :, labels[chunk]] = -math.inf
        own, spread = mean[chunk][rows, labels[chunk]], std[chunk][rows, labels[chunk]]
        found[chunk] = special.ndtr((own[:, None] - z.max(axis=2)) / spread[:, None]).mean(axis=1)
    certain = (variance == 0).all(axis=1)  # of equal logits the first is said, as at the start
    return np.where(certain, mean.argmax(axis=1) == labels, found)


def expected_labels_in_top(mean: Array, variance: Array, targets: Array, nodes: Nodes, *, top: int) -> Array:
    """Expected number of an example's labels among its `top` largest logits.

    Args:
      mean, variance: of the logits; (n, m).   targets: 0 or 1; (n, m).   nodes: of n examples.   top: >= 1.
    Returns: (n,) in [0, top].

    >>> expected_labels_in_top(np.array([[2.0, 1.0, 0.0]]), np.zeros((1, 3)), np.array([[1, 0, 1]]), Nodes(1, 3), top=2)
    array([1.])
    """
    num_outputs = mean.shape[1]
    if num_outputs <= top:
        return targets.sum(axis=1).astype(np.float64)
    found = np.empty(len(mean))
    std = np.sqrt(np.maximum(variance, 1e-12))  # some spread: equal logits are a lottery among the outputs
    for chunk, points in nodes:
        z = mean[chunk, None, :] + std[chunk, None, :] * points
        smallest = np.partition(z, num_outputs - top, axis=2)[:, :, num_outputs - top, None]
        found[chunk] = ((z >= smallest) & (targets[chunk, None, :] > 0)).sum(axis=2).mean(axis=1)
    return found
