"""The form in which an optimizer carries its theory: pure functions of moments, no data set, no scenario."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from noisecast.theory.closures import Closure

Array = Any  # a NumPy array, or a JAX one (traced or not): theory computes in the namespace of what it is given


@dataclass(frozen=True)
class GradientMoments:
    """The law of the private mean gradient at one point, as far as the SDEs need it.

    The private gradient is g = (1/B) [sum_i clip(g_i) + N(0, C^2 z^2 I)].

    Args:
      mean: E[g] = h grad f, after clipping; (d,) [loss/params].
      noise_std: s, its standard deviation per coordinate, batch and privacy noise together; () or (d,) [loss/params].
      snr_factors: r_k; (K,). Heavy-tailed example noise makes g a scale mixture of Gaussians; component k has the
        signal-to-noise ratio r_k * mean / noise_std. One component with r = 1 is the plain Gaussian.
      snr_weights: w_k, sum to 1; (K,).

    >>> GradientMoments(mean=0.5, noise_std=2.0).snr_factors                               # a plain Gaussian
    (1.0,)
    """

    mean: Array
    noise_std: Array
    snr_factors: Array = (1.0,)
    snr_weights: Array = (1.0,)


@dataclass(frozen=True)
class OptimizerTheory:
    """What the paper says about one optimizer: its SDE, and the two numbers that set its speed and its floor.

    The SDE in time t = step * learning_rate (paper, SDE theorems of its appendix; unified form over both phases):

        dX = drift(moments, state) dt + sqrt(learning_rate) * noise_gain(moments, state) * dN,

    where dN is Gaussian with the covariance of the private gradient (noise_std^2 on its diagonal).

    Args:
      name: as shown, "DP-SGD".
      drift: (moments, state) -> (d,).
      noise_gain: (moments, state) -> () or (d,), what the optimizer's step does to the gradient noise.
      effective_learning_rate: (learning_rate, noise_std) -> eta_e of the linearised optimizer [params^2/loss].
      noise_penalty: phi; loss floor on any quadratic = phi * eta_e * d * s^2 / (4 h).
      initial_state: moments -> state at step 0; None for an optimizer without memory.
      advance_state: (state, moments, step, num_steps) -> state after `num_steps` (may be fractional) more steps.
      closure: what it makes of a Gaussian gradient, for the forecast; None where unknown.
    """

    name: str
    drift: Callable[[GradientMoments, Any], Array]
    noise_gain: Callable[[GradientMoments, Any], Array]
    effective_learning_rate: Callable[[Array, Array], Array]
    noise_penalty: float
    initial_state: Callable[[GradientMoments], Any] = lambda moments: None
    advance_state: Callable[[Any, GradientMoments, Array, Array], Any] = lambda state, moments, step, num_steps: state
    closure: Closure | None = None
