"""DP-Adam: x <- x - eta m_hat/(sqrt(v_hat) + eps), averages of the private mean gradient g and of g^2.

The paper tests DP-Adam but derives nothing for it; this file is our own derivation. To first order in the learning
rate b1 changes nothing, and v_hat, the average of the past g^2, is a state with its own slow equation.
"""

import math
from typing import Any

from noisecast.theory._namespace import special_and_math
from noisecast.theory.optimizer_theory import GradientMoments, OptimizerTheory

Array = Any

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

    >>> import numpy as np
    >>> drift(GradientMoments(mean=np.array([1.0]), noise_std=1.0), np.array([4.0]), eps=0.0)
    array([-0.5])
    """
    return -moments.mean * noise_gain(moments, v, eps=eps)


def noise_gain(moments: GradientMoments, v: Array, *, eps: float) -> Array:
    """1/(sqrt v + eps); (d,) [params/loss].

    >>> import numpy as np
    >>> noise_gain(GradientMoments(mean=np.array([1.0]), noise_std=1.0), np.array([4.0]), eps=0.5)
    array([0.4])
    """
    xp, _ = special_and_math(v, moments.mean)
    scale = xp.sqrt(v) + eps
    return xp.where(scale > 0, 1 / xp.where(scale > 0, scale, 1.0), 0.0)


def second_moment(moments: GradientMoments) -> Array:
    """E[g_i^2] = s^2 + mean_i^2, which v_hat follows; (d,) [loss^2/params^2].

    >>> import numpy as np
    >>> second_moment(GradientMoments(mean=np.array([1.0, 0.0]), noise_std=2.0))
    array([5., 4.])
    """
    xp, _ = special_and_math(moments.mean, moments.noise_std)
    return xp.broadcast_to(xp.square(moments.noise_std) + xp.square(moments.mean), xp.shape(moments.mean))


def advance_second_moment(v: Array, moments: GradientMoments, step: Array, num_steps: Array, *, b2: float) -> Array:
    """v + w (E[g^2] - v), w = (1 - b2^n)/(1 - b2^(k + n)): bias-corrected v_hat after n more steps from step k.

    v_hat is the weighted average of all past g^2, so w = 1 at step 0 and (1 - b2^n) late. Steps may be fractional.

    >>> import numpy as np
    >>> m = GradientMoments(mean=np.array([1.0]), noise_std=0.0)
    >>> advance_second_moment(np.array([9.0]), m, step=0, num_steps=1, b2=0.9)
    array([1.])
    """
    xp, _ = special_and_math(v, moments.mean, moments.noise_std, step, num_steps)
    if b2 == 0:
        weight = 1.0
    elif b2 == 1:
        weight = num_steps / (step + num_steps)
    else:
        weight = xp.expm1(num_steps * math.log(b2)) / xp.expm1((step + num_steps) * math.log(b2))
    return v + weight * (second_moment(moments) - v)


def second_moment_drift(v: Array, moments: GradientMoments, *, learning_rate: float, b2: float) -> Array:
    """dv/dt = (1 - b2)/eta (s^2 + mean^2 - v): `advance_second_moment` in continuous time, late (b2^k -> 0).

    >>> import numpy as np
    >>> m = GradientMoments(mean=np.array([1.0]), noise_std=0.0)
    >>> second_moment_drift(np.array([2.0]), m, learning_rate=0.5, b2=0.5)
    array([-1.])
    """
    return (1 - b2) / learning_rate * (second_moment(moments) - v)


def decay_rate(*, pl_constant: Array, gradient_noise_std: Array, shrink_factor: Array = 1.0) -> Array:
    """2 mu h/s, per unit time, at low signal-to-noise ratio and b2 -> 1.

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

    >>> floor_bound(learning_rate=0.1, num_params=40, smoothness=1.0, pl_constant=1.0, gradient_noise_std=1.0)
    1.0
    """
    return learning_rate * num_params * smoothness * gradient_noise_std / (4 * pl_constant * shrink_factor)


def dp_adam_theory(b1: float, b2: float, eps: float) -> OptimizerTheory:
    """The theory of DP-Adam with decay rates b1, b2 in [0, 1) and adaptivity eps >= 0 [loss/params].

    The state is v, (d,) [loss^2/params^2]. b1 does not enter at first order in the learning rate; nor does eps enter
    the effective learning rate eta/s.

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
    )
