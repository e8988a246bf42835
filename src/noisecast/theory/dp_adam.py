"""DP-Adam: x <- x - eta m_hat/(sqrt(v_hat) + eps), averages of the private mean gradient g and of g^2.

The paper tests DP-Adam but derives nothing for it; this file is our own derivation. To first order in the learning
rate b1 changes nothing, and v_hat, the average of the past g^2, is a state with its own slow equation.
"""

import math
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from noisecast.theory._namespace import special_and_math
from noisecast.theory.adam_averages import AveragedSteps
from noisecast.theory.closures import Closure, GradientLaw, QuadraticRecursion, Response
from noisecast.theory.optimizer_theory import GradientMoments, OptimizerTheory

Array = Any
LEAST_B2 = 0.9  # of the second moment's average, for the mean field
MOST_LOOKS = 1000  # of a mean over steps

# The response of u = m_hat/sqrt(v_hat) to a small signal, E u = kappa mu/s, and the long-run variance omega of u,
# simulated: (b1, b2) -> (kappa, omega/kappa). b1 = b2 = 0 is DP-SignSGD, (sqrt(2/pi), sqrt(pi/2)); as b2 -> 1 both
# tend to 1. The floor on any quadratic is (omega/kappa) eta d s/(4 h), the rate 2 kappa h lambda/s.
SMALL_SIGNAL_RESPONSE = {
    (0.0, 0.0): (0.7979, 1.2533),
    (0.0, 0.9): (0.948, 0.972),
    (0.0, 0.99): (0.994, 0.996),
    (0.9, 0.5): (1.154, 1.18),
    (0.9, 0.9): (0.987, 1.000),
    (0.9, 0.95): (0.986, 0.994),
    (0.9, 0.99): (0.995, 0.997),
    (0.9, 0.999): (0.9996, 0.999),
}


def drift(moments: GradientMoments, v: Array, *, eps: float) -> Array:
    """-E[g]/(sqrt v + eps); (d,), no unit. -sign(mean) once v = mean^2; 0 where v = eps = 0.

    Args:
      moments: of the private mean gradient; mean (d,) [loss/params].
      v: v_hat, the average of E g^2 so far; (d,) >= 0 [loss^2/params^2].   eps: adaptivity; >= 0 [loss/params].
    Returns: (d,), no unit.

    >>> import numpy as np
    >>> drift(GradientMoments(mean=np.array([1.0]), noise_std=1.0), np.array([4.0]), eps=0.0)
    array([-0.5])
    """
    return -moments.mean * noise_gain(moments, v, eps=eps)


def noise_gain(moments: GradientMoments, v: Array, *, eps: float) -> Array:
    """1/(sqrt v + eps); (d,) [params/loss].

    Args: as `drift`.
    Returns: (d,) >= 0 [params/loss]; 0 where v = eps = 0.

    >>> import numpy as np
    >>> noise_gain(GradientMoments(mean=np.array([1.0]), noise_std=1.0), np.array([4.0]), eps=0.5)
    array([0.4])
    """
    xp, _ = special_and_math(v, moments.mean)
    scale = xp.sqrt(v) + eps
    return xp.where(scale > 0, 1 / xp.where(scale > 0, scale, 1.0), 0.0)


def second_moment(moments: GradientMoments) -> Array:
    """E[g_i^2] = s^2 + mean_i^2, which v_hat follows; (d,) [loss^2/params^2].

    Args:
      moments: of the private mean gradient; mean (d,), noise_std () or (d,) [loss/params].
    Returns: (d,) >= 0 [loss^2/params^2].

    >>> import numpy as np
    >>> second_moment(GradientMoments(mean=np.array([1.0, 0.0]), noise_std=2.0))
    array([5., 4.])
    """
    xp, _ = special_and_math(moments.mean, moments.noise_std)
    return xp.broadcast_to(xp.square(moments.noise_std) + xp.square(moments.mean), xp.shape(moments.mean))


def advance_second_moment(v: Array, moments: GradientMoments, step: Array, num_steps: Array, *, b2: float) -> Array:
    """v + w (E[g^2] - v), w = (1 - b2^n)/(1 - b2^(k + n)): bias-corrected v_hat after n more steps from step k.

    v_hat is the weighted average of all past g^2, so w = 1 at step 0 and (1 - b2^n) late. Steps may be fractional; none
    change nothing.

    Args:
      v: v_hat after k steps; (d,) >= 0 [loss^2/params^2].   moments: of the gradient in all n steps.
      step, num_steps: k and n; () >= 0.   b2: in [0, 1]; 1 is the plain mean over all steps.
    Returns: (d,) >= 0 [loss^2/params^2].

    >>> import numpy as np
    >>> m = GradientMoments(mean=np.array([1.0]), noise_std=0.0)
    >>> advance_second_moment(np.array([9.0]), m, step=0, num_steps=1, b2=0.9)
    array([1.])
    """
    xp, _ = special_and_math(v, moments.mean, moments.noise_std, step, num_steps)
    if b2 == 0:
        weight = xp.where(xp.asarray(num_steps) > 0, 1.0, 0.0)
    else:
        new, seen = (k if b2 == 1 else xp.expm1(k * math.log(b2)) for k in (num_steps, step + num_steps))
        none = xp.asarray(seen) == 0
        weight = xp.where(none, 0.0, new / xp.where(none, 1.0, seen))
    return v + weight * (second_moment(moments) - v)


def second_moment_drift(v: Array, moments: GradientMoments, *, learning_rate: float, b2: float) -> Array:
    """dv/dt = (1 - b2)/eta (s^2 + mean^2 - v): `advance_second_moment` in continuous time, late (b2^k -> 0).

    Args:
      v, moments: as `advance_second_moment`.   learning_rate: eta; > 0 [params].   b2: in [0, 1].
    Returns: (d,), of v by time [loss^2/params^3].

    >>> import numpy as np
    >>> m = GradientMoments(mean=np.array([1.0]), noise_std=0.0)
    >>> second_moment_drift(np.array([2.0]), m, learning_rate=0.5, b2=0.5)
    array([-1.])
    """
    return (1 - b2) / learning_rate * (second_moment(moments) - v)


def decay_rate(*, pl_constant: Array, gradient_noise_std: Array, shrink_factor: Array = 1.0) -> Array:
    """2 mu h/s, per unit time, at low signal-to-noise ratio and b2 -> 1.

    Args:
      pl_constant: mu; > 0 [loss/params^2].   shrink_factor: h; in [0, 1].
      gradient_noise_std: s, of the private mean gradient per coordinate; > 0 [loss/params].
    Returns: of the shape to which they broadcast [1/params].

    >>> decay_rate(pl_constant=0.5, gradient_noise_std=2.0)
    0.5
    """
    return 2 * pl_constant * shrink_factor / gradient_noise_std


def floor_bound(
    *,
    learning_rate: Array,
    num_params: int,
    smoothness: float,
    pl_constant: float,
    gradient_noise_std: Array,
    shrink_factor: Array = 1.0,
) -> Array:
    """eta d L s/(4 mu h): a bound, scaling only. With L = mu it is the floor on any quadratic.

    Args:
      learning_rate: eta; > 0 [params].   num_params: d; >= 1.   smoothness, pl_constant: L >= mu > 0 [loss/params^2].
      gradient_noise_std: s; >= 0 [loss/params].   shrink_factor: h; in (0, 1].
    Returns: of the shape to which eta, s and h broadcast [loss].

    >>> floor_bound(learning_rate=0.1, num_params=40, smoothness=1.0, pl_constant=1.0, gradient_noise_std=1.0)
    1.0
    """
    return learning_rate * num_params * smoothness * gradient_noise_std / (4 * pl_constant * shrink_factor)


# --- The closure --------------------------------------------------------------------------------------------------


def adam_closure(*, b1: float, b2: float, eps: float) -> Closure:
    """u = g/(sqrt v + eps), v the average of E g^2 so far (`advance_second_moment`): a mean field for v_hat.

    b1 makes the first steps noisier (`momentum_noise`) and lets directions lag by b1/(1 - b1) steps, which to first
    order in the learning rate changes nothing else; beyond it see `frozen_steps`. That v_hat knows few gradients at
    first, among them those that it divides, `few_gradients` tells.

    Args:
      b1, b2: decay rates of both averages; in [0, 1).   eps: adaptivity; >= 0 [loss/params].
    Returns: Closure, whose memory is v; (d,) [loss^2/params^2].
    Valid when: b2 >= `LEAST_B2`.

    >>> closure = adam_closure(b1=0.9, b2=0.999, eps=0.0)
    >>> law = GradientLaw(np.array([3.0]), 0.0, 16.0)
    >>> closure.response(law, closure.memory(None, law, 0, 1)).expected
    array([0.6])
    """

    def gain(v: Array) -> Array:
        return 1 / (np.sqrt(v) + eps)

    def memory(v: Array | None, law: GradientLaw, step: int, num_steps: int) -> Array:
        moments = GradientMoments(law.mean, np.sqrt(law.variance))
        start = np.zeros_like(law.mean) if v is None else v
        return advance_second_moment(start, moments, step, num_steps, b2=b2)

    def gain_share(law: GradientLaw, v: Array, step: int, num_steps: int) -> Array:
        noise_share = np.minimum(law.variance / np.maximum(v, 1e-300), 1.0)
        return few_gradients(noise_share, step + 1, num_steps, b1=b1, b2=b2)

    def response(law: GradientLaw, v: Array) -> Response:
        k = gain(v)
        return Response(k * law.mean, k, k**2 * law.variance)

    def covariance(mean: Array, covariance: Array, v: Array) -> Array:
        k = gain(v[: len(mean)])
        return k[:, None] * covariance * k

    return Closure(
        response=response,
        covariance=covariance,
        memory=memory,
        gain_share=gain_share,
        noise_share=lambda step, num_steps: (
            (momentum_noise(step + num_steps, b1=b1, b2=b2) - momentum_noise(step, b1=b1, b2=b2)) / num_steps
        ),
        lag=b1 / (1 - b1),
        lag_of=lambda step, num_steps: lag_at(step + (num_steps + 1) / 2, b1=b1),
        averages=AveragedSteps(b1, b2, eps) if b1 > 0 else None,
        quadratic=QuadraticRecursion(AdamMoments.start, partial(quadratic_step, b1=b1, b2=b2, eps=eps)),
        caveat=""
        if b2 >= LEAST_B2
        else (
            f"DP-Adam with b2 = {b2:g} divides by a square root that fluctuates with every gradient, which the closure "
            f"takes for its mean (b2 >= {LEAST_B2:g}): the loss may be off by several per cent."
        ),
    )


def lag_at(step: float, *, b1: float) -> float:
    """sum_i w_i (t - i): by how much m_hat_t is older than g_t, at step t = 1, 2, ...

    Args:
      step: t; >= 1.   b1: in [0, 1).
    Returns: () >= 0 [steps]; b1/(1 - b1) late.

    >>> lag_at(1, b1=0.9), round(lag_at(10**6, b1=0.9), 6)
    (0.0, 9.0)
    """
    return b1 / (1 - b1) - step * b1**step / (1 - b1**step) if b1 > 0 else 0.0


def few_gradients(noise_share: Array, first_step: int, num_steps: int, *, b1: float, b2: float) -> Array:
    """kappa of E[m_hat_t/sqrt(v_hat_t)] = kappa mu/sqrt(E v_hat), g_i ~ N(mu, s^2), the mean over num_steps; (d,).

        kappa_t = 1 - rho sum_i w_i b_i + (3 rho/2 - 3 rho^2/4) sum_i b_i^2,   rho = s^2/(mu^2 + s^2),

    w_i and b_i the weights that m_hat_t and v_hat_t give g_i: a large g_i is divided by the root that it enlarges, and
    E v_hat^(-1/2) is more than (E v_hat)^(-1/2). To first order in b_i, own derivation: at t = 1 and rho = 1 it is
    0.75, exact 0.80. `SMALL_SIGNAL_RESPONSE` is its limit at rho = 1 and late t, to first order in 1 - b2.

    Args:
      noise_share: rho; (d,) in [0, 1].   first_step: t = 1, 2, ...   num_steps: averaged over, from t on; >= 1.
      b1, b2: in [0, 1).
    Returns: kappa; (d,).

    >>> few_gradients(np.array([1.0, 0.0]), 10, 1, b1=0.9, b2=0.999).round(4)
    array([0.9749, 1.    ])
    """
    looks = min(num_steps, MOST_LOOKS)  # each step, or in the middle of as many equal parts
    t = first_step - 0.5 + (np.arange(looks) + 0.5) * (num_steps / looks)
    common = (1 - b1) * (1 - b2) / ((1 - b1**t) * (1 - b2**t)) * (1 - (b1 * b2) ** t) / (1 - b1 * b2)
    squares = float(_weight_of_one(t, b2).mean())
    return 1 - noise_share * float(common.mean()) + (1.5 * noise_share - 0.75 * noise_share**2) * squares


def _weight_of_one(step: Array, b2: float) -> Array:
    """sum_i b_i^2 of v_hat_t, b_i = (1 - b2) b2^(t - i)/(1 - b2^t)."""
    return (1 - b2) / (1 + b2) * (1 + b2**step) / (1 - b2**step)


def momentum_noise(num_steps: int, *, b1: float, b2: float) -> float:
    """Var(sum_{t <= n} m_hat_t/sqrt(v_hat_t)) for white noise g_i: n where b1 = 0 and b2 -> 1, else n + c late.

    With momentum it grows faster at first. For b2 well below 1 it is not n even late: see `SMALL_SIGNAL_RESPONSE`.

    sum_{t, t'} sum_i w_ti w_t'i E sqrt(v_hat_t/v_hat_t'), t <= t': the bias correction makes the first gradients count
    several times, which the later, larger squares that join v_hat dampen. The last factor, with equal weights
    a_t/a_t' of a_t = E chi_t/sqrt t = 1 - 1/(4 t) + ..., is that with 1/t = sum_i b_i^2. Own derivation.

    Args:
      num_steps: n; >= 0.   b1, b2: in [0, 1).
    Returns: () >= 0, in units of one independent direction's variance.

    >>> momentum_noise(1, b1=0.9, b2=0.999), momentum_noise(7, b1=0.0, b2=0.999)
    (1.0, 7.0)
    >>> round(momentum_noise(10, b1=0.9, b2=0.999), 2)
    14.08
    """
    known = _momentum_noises(b1, b2)
    return float(known[min(num_steps, len(known) - 1)] + max(0, num_steps - len(known) + 1))


@cache
def _momentum_noises(b1: float, b2: float) -> np.ndarray:
    """`momentum_noise` of 0, 1, ... steps, until it grows by one a step."""
    longest = min(math.ceil(16 / (1 - b1)), 2000)
    step = np.arange(1, longest + 1)
    age = step[:, None] - step
    weights = np.where(age >= 0, (1 - b1) * b1 ** np.maximum(age, 0.0) / (1 - b1 ** step[:, None]), 0.0)
    root = 1 - _weight_of_one(step, b2) / 4
    earlier_over_later = np.minimum(root, root[:, None]) / np.maximum(root, root[:, None])
    covariances = weights @ weights.T * earlier_over_later
    return np.concatenate([[0.0], covariances.cumsum(axis=0).cumsum(axis=1).diagonal()])


class AdamMoments(NamedTuple):
    """Means and second moments of weights x and first average mu of DP-Adam, and v_hat in mean field; (d,) each.

    Args:
      mean, variance: E x [params], Var x [params^2].   momentum_mean, momentum_variance: E mu, Var mu.
      cross: Cov(x, mu).   v: the average of E g^2 so far, with its bias corrected [loss^2/params^2].

    >>> AdamMoments.start(np.array([2.0])).mean
    array([2.])
    """

    mean: Array
    variance: Array
    momentum_mean: Array
    momentum_variance: Array
    cross: Array
    v: Array

    @classmethod
    def start(cls, params: Array) -> "AdamMoments":
        """At step 0: weights known, averages empty; (d,) -> (d,) each."""
        return cls(np.array(params, np.float64), *(np.zeros(len(params)) for _ in range(5)))


def quadratic_step(
    at: AdamMoments, step: int, curvature: Array, law: GradientLaw, learning_rate: float,
    *, b1: float, b2: float, eps: float,
) -> AdamMoments:  # fmt: skip
    """One step of DP-Adam on f = 1/2 sum_j j_j x_j^2, with v_hat replaced by the average of E g^2; exact otherwise.

    mu' = b1 mu + (1 - b1)(j x + s xi),   x' = x - c mu',   c = eta/((1 - b1^(k+1)) (sqrt v' + eps)),
    so means and second moments of (x, mu) move linearly. Within 2 % of simulation for b2 >= 0.95.

    Args:
      at: before the step.   step: k = 0, 1, ...   curvature: j = h lambda; (d,) [loss/params^2].
      law: of the gradient at these moments, with s^2; (d,).   learning_rate: eta; > 0 [params].
      b1, b2: in [0, 1).   eps: adaptivity; >= 0 [loss/params].
    Returns: AdamMoments after the step.

    >>> law = GradientLaw(np.ones(1), 0.0, 0.0)
    >>> quadratic_step(AdamMoments.start(np.ones(1)), 0, np.ones(1), law, 0.5, b1=0.9, b2=0.999, eps=0.0).mean
    array([0.5])
    """
    j = curvature
    v = advance_second_moment(at.v, GradientMoments(law.mean, np.sqrt(law.variance)), step, 1, b2=b2)
    c = learning_rate / ((1 - b1 ** (step + 1)) * (np.sqrt(v) + eps))
    momentum_mean = b1 * at.momentum_mean + (1 - b1) * law.mean
    momentum_variance = b1**2 * at.momentum_variance + (1 - b1) ** 2 * law.variance + 2 * b1 * (1 - b1) * j * at.cross
    cross = b1 * at.cross + (1 - b1) * j * at.variance  # of x before the step with mu after it
    return AdamMoments(
        mean=at.mean - c * momentum_mean,
        variance=at.variance - 2 * c * cross + c**2 * momentum_variance,
        momentum_mean=momentum_mean,
        momentum_variance=momentum_variance,
        cross=cross - c * momentum_variance,
        v=v,
    )


def dp_adam_theory(b1: float, b2: float, eps: float) -> OptimizerTheory:
    """The theory of DP-Adam with decay rates b1, b2 in [0, 1) and adaptivity eps >= 0 [loss/params].

    The state is v, (d,) [loss^2/params^2]. b1 does not enter at first order in the learning rate; nor does eps enter
    the effective learning rate eta/s, which is for eps << s; the closure's gain 1/(s + eps) holds for any.

    Args:
      b1, b2: decay rates of both averages; in [0, 1).   eps: adaptivity; >= 0 [loss/params].
    Returns: OptimizerTheory.
    Raises: ValueError for b1, b2 or eps out of range.
    Valid when: b2 >= 0.9 (see SMALL_SIGNAL_RESPONSE), eps << s and eta lambda/s < 1 - b1.

    >>> dp_adam_theory(0.9, 0.999, 1e-8).effective_learning_rate(0.1, 2.0)
    0.05
    """
    for name, decay in (("b1", b1), ("b2", b2)):
        if not 0 <= decay < 1:
            raise ValueError(f"Expected 0 <= {name} < 1, got {decay}.")
    if not eps >= 0:
        raise ValueError(f"Expected eps >= 0, got {eps}.")
    return OptimizerTheory(
        name="DP-Adam",
        drift=lambda moments, v: drift(moments, v, eps=eps),
        noise_gain=lambda moments, v: noise_gain(moments, v, eps=eps),
        effective_learning_rate=lambda learning_rate, noise_std: learning_rate / noise_std,
        noise_penalty=1.0,
        initial_state=second_moment,
        advance_state=lambda v, moments, step, num_steps: advance_second_moment(v, moments, step, num_steps, b2=b2),
        closure=adam_closure(b1=b1, b2=b2, eps=eps),
    )
