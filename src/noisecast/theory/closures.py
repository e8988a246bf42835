"""What a DP optimizer makes of a Gaussian gradient: the closures by which whole runs are forecast without dice.

Weights x ~ N(m, V) meet a private gradient g whose mean over batch and noise is F(x). Everything here is our own
derivation from two facts about a Gaussian x. Stein's lemma gives Cov(x, F(x)) = V J with J = E[F'(x)], also where F has
kinks (clipping); and what an optimizer makes of a Gaussian g_j ~ N(F_j, s_j^2), a direction u_j, responds by a gain
k_j, Cov(x, u_j) = k_j Cov(x, g_j). So one step is

    m' = m - eta E u,        V' = V - eta V J K - eta K J V + eta^2 Cov u,        K = diag(k).

`frozen_steps` makes many such steps at once. Nothing here is told of a data set.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from noisecast.theory.adam_averages import AveragedSteps
from noisecast.theory.linear_sde import sign_covariance

Array = Any


class GradientLaw(NamedTuple):
    """The private gradient under Gaussian weights: g_j = F_j(x) + noise. Any shape that broadcasts does for (d,).

    Args:
      mean: E F; (d,) [loss/params].
      signal_variance: Var F_j(x), from the spread of the weights; (d,).
      noise_variance: s_j^2 of batch and privacy noise; () or (d,).
      snr_factors, snr_weights: the noise as a scale mixture (`GradientMoments`); (K,).
      presence: p_j, the share of batches with an example that moves coordinate j; () or (d,) in (0, 1].
      privacy_variance: what of s_j^2 is there in the other batches too; ().
      sign: E sign(g_j) and its gain; (2, d). Where it is known from more than these moments (`sign_of_batch`).

    >>> GradientLaw(np.zeros(2), 1.0, 3.0).variance
    4.0
    """

    mean: Array
    signal_variance: Array
    noise_variance: Array
    snr_factors: Array = (1.0,)
    snr_weights: Array = (1.0,)
    presence: Array = 1.0
    privacy_variance: float = 0.0
    sign: Array | None = None

    @property
    def variance(self) -> Array:
        """Var g_j = Var F_j(x) + s_j^2; () or (d,) [loss^2/params^2]."""
        return self.signal_variance + self.noise_variance

    def when_present(self) -> "GradientLaw":
        """The law of g_j in batches that hold an example which moves it: mean and batch's second moment over p.

        A rare coordinate's batch noise is no Gaussian: mostly it is not there at all, and what is bounded, as a sign
        is, feels it less than its variance says. Both laws have the same first two moments. Own derivation.

        Returns: the law with presence 1; itself where it is that already.

        >>> GradientLaw(np.ones(1), 0.0, 5.0, presence=0.5, privacy_variance=1.0).when_present()[:3]
        (array([2.]), 0.0, array([7.]))
        """
        if np.ndim(self.presence) == 0 and self.presence == 1:
            return self
        mean, batch = self.mean / self.presence, self.noise_variance - self.privacy_variance
        noise = np.maximum((batch + self.mean**2) / self.presence - mean**2, 0.0) + self.privacy_variance
        signal = self.signal_variance / self.presence**2
        return self._replace(mean=mean, signal_variance=signal, noise_variance=noise, presence=1.0)


class Response(NamedTuple):
    """An optimizer's direction u under a Gaussian gradient; (d,) each.

    Args:
      expected: E u.   gain: k, Cov(x, u_j) = k_j Cov(x, g_j).   variance: Var u.

    >>> SGD_CLOSURE.response(GradientLaw(np.ones(1), 0.0, np.ones(1)), None)
    Response(expected=array([1.]), gain=array([1.]), variance=array([1.]))
    """

    expected: Array
    gain: Array
    variance: Array


@dataclass(frozen=True)
class Closure:
    """An optimizer under Gaussian gradients.

    Args:
      response: (law, memory) -> E u, its gain and Var u.
      covariance: (mean, covariance of g, memory) -> Cov u; (d,), (d, d) -> (d, d).
      memory: (memory, law, step, num_steps) -> what the optimizer remembers after num_steps more; None at the start.
      gain_share: (law, memory, step, num_steps) -> E u in those steps over that of `response`; () or (d,).
      noise_share: (step, num_steps) -> noise of those steps over that of num_steps independent directions; ().
      lag: steps by which directions lag behind gradients in the long run; () >= 0.
      lag_of: (step, num_steps) -> the lag in the middle of those steps; ().
      is_linear: whether directions are linear in gradients, so that no ratio of step to noise is too large.
      feels_shape: whether directions are signs, which feel more of a batch's law than mean and variance.
      averages: its own first steps, where averages of gradients have not settled (`adam_averages`); None: it has none.
      quadratic: its own recursion on quadratics; None: the one step above, coordinate by coordinate.
      caveat: a sentence where the optimizer's own settings are out of the closure's depth; else empty.
    """

    response: Callable[[GradientLaw, Any], Response]
    covariance: Callable[[Array, Array, Any], Array]
    memory: Callable[[Any, GradientLaw, int, int], Any] = lambda memory, law, step, num_steps: None
    gain_share: Callable[[GradientLaw, Any, int, int], Array] = lambda law, memory, step, num_steps: 1.0
    noise_share: Callable[[int, int], float] = lambda step, num_steps: 1.0
    lag: float = 0.0
    lag_of: Callable[[int, int], float] = lambda step, num_steps: 0.0
    is_linear: bool = False
    feels_shape: bool = False
    averages: AveragedSteps | None = None
    quadratic: "QuadraticRecursion | None" = None
    caveat: str = ""


class QuadraticRecursion(NamedTuple):
    """Moments on f = 1/2 sum_j j_j x_j^2, for an optimizer whose memory is more than `Closure.memory` says.

    Args:
      start: params (d,) -> state, with at least `mean` and `variance`; (d,) each.
      step: (state, k, curvature, law, learning_rate) -> state after step k = 0, 1, ...
    """

    start: Callable[[Array], Any]
    step: Callable[[Any, int, Array, GradientLaw, float], Any]


def sign_response(law: GradientLaw) -> tuple[Array, Array]:
    """E sign(g_j) = p_j sum_k w_k erf(F_j/(sqrt2 s_k)), s_k^2 = Var F_j + s^2/r_k^2, and its derivative, the gain.

    F_j and s_k are those of batches in which an example moves the coordinate (`GradientLaw.when_present`). By Stein's
    lemma the derivative is the k_j of Cov(x, sign g_j) = k_j Cov(x, g_j). Sign of the mean where s_k = 0.

    Args:
      law: of the gradient; (d,).
    Returns: E sign(g_j) in [-1, 1], and the gain k_j >= 0 [params/loss]; (d,) each.

    >>> mean, gain = sign_response(GradientLaw(np.array([0.0, 9.0]), 0.0, 1.0))
    >>> mean.round(6), gain.round(6)
    (array([0., 1.]), array([0.797885, 0.      ]))
    """
    if law.sign is not None:
        return law.sign[0], law.sign[1]
    presence, law = law.presence, law.when_present()
    mean = np.asarray(law.mean, np.float64)
    expected, gain = np.zeros_like(mean), np.zeros_like(mean)
    for factor, weight in zip(law.snr_factors, law.snr_weights, strict=True):
        if weight == 0:
            continue
        inverse = 1 / np.sqrt(np.maximum(law.signal_variance + law.noise_variance / factor**2, 1e-300))
        snr = mean * inverse
        expected = expected + weight * special.erf(snr / math.sqrt(2))
        gain = gain + weight * math.sqrt(2 / math.pi) * inverse * np.exp(-(snr**2) / 2)
    return presence * expected, gain


def chord(law: GradientLaw, expected: Array, gain: Array) -> Array:
    """E u/F, at least the gain: it knows how far a saturated direction is from where its force would turn; (d,).

    Of a skew batch (`sign_of_batch`) E u may point against F, or be there where F is none. Then the quotient is no
    stiffness, and the two moments' bounds it.

    Args:
      law: of the gradient.   expected, gain: the `response` to it; (d,) each.
    Returns: (d,), in the unit of u over that of F.

    >>> law = GradientLaw(np.array([3.0, 3.0]), 0.0, 1.0, sign=np.array([[1.0, -0.5], [0.1, 0.1]]))
    >>> chord(law, *sign_response(law)).round(2)
    array([0.33, 0.1 ])
    """
    pushed = np.abs(law.mean) > 1e-12 * np.abs(law.mean).max()
    force = np.where(pushed, law.mean, 1.0)
    found = expected / force
    if law.sign is not None:
        found = np.minimum(found, sign_response(law._replace(sign=None))[0] / force)
    return np.maximum(np.where(pushed, found, gain), gain)


def _sign(law: GradientLaw, memory: None) -> Response:
    expected, gain = sign_response(law)
    return Response(expected, gain, 1 - expected**2)


SGD_CLOSURE = Closure(
    response=lambda law, memory: Response(law.mean, np.ones_like(law.mean), law.variance),
    covariance=lambda mean, covariance, memory: covariance,
    is_linear=True,
)
SIGN_CLOSURE = Closure(
    response=_sign,
    covariance=lambda mean, covariance, memory: sign_covariance(mean, covariance),
    feels_shape=True,
)


def expected_norm(mean_square: float, variance_of_square: float) -> float:
    """E|X| from E|X|^2 and Var|X|^2, with |X|^2 taken for a Gamma of shape k = (E|X|^2)^2/Var|X|^2.

    sqrt(E|X|^2/k) Gamma(k + 1/2)/Gamma(k): exact for a Gaussian of any number of equal variances and for a fixed X.

    Args:
      mean_square: E|X|^2; >= 0.   variance_of_square: Var|X|^2; >= 0.
    Returns: E|X|; () >= 0, inf where the arguments overflow.

    >>> round(expected_norm(1.0, 2.0), 6), expected_norm(4.0, 0.0)      # E|Z| = sqrt(2/pi)
    (0.797885, 2.0)
    """
    mean_square, variance_of_square = np.float64(mean_square), np.float64(variance_of_square)  # overflow to inf
    if not (mean_square > 0 and variance_of_square > 1e-10 * mean_square**2):
        return float(np.sqrt(mean_square))
    shape = mean_square**2 / variance_of_square
    return math.sqrt(mean_square / shape) * float(special.poch(shape, 0.5))
