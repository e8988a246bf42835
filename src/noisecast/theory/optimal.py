"""Which optimizer, which learning rate: thresholds in the noise multiplier z, and the learning rates the theory picks.

All is written in z. `nominal_epsilon` is the paper's q sqrt(T log(1/delta))/z: an axis label, not a guarantee.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import special

Array = Any


def nominal_epsilon(
    noise_multiplier: Array, *, sampling_probability: float, num_steps: float, target_delta: float
) -> Array:
    """q sqrt(T log(1/delta))/z, the paper's epsilon (Thm abadi with constant 1). NOT a guarantee.

    Below z of about 1 it is too small, by factors from 1.5 up; for large z it is somewhat too large. inf at z = 0.

    Args:
      noise_multiplier: z; any shape, >= 0.   sampling_probability: q; in (0, 1].
      num_steps: T; >= 0.   target_delta: delta; in (0, 1).
    Returns: shape of z.

    >>> round(nominal_epsilon(1.0, sampling_probability=0.0064, num_steps=15600, target_delta=1e-5), 3)
    2.712
    """
    return _divided(sampling_probability * math.sqrt(num_steps * -math.log(target_delta)), noise_multiplier)


def nominal_noise_multiplier(
    nominal_epsilon: Array, *, sampling_probability: float, num_steps: int, target_delta: float
) -> Array:
    """q sqrt(T log(1/delta))/epsilon: the inverse of `nominal_epsilon`. NOT a calibration.

    Args:
      nominal_epsilon: any shape, >= 0.   sampling_probability, num_steps, target_delta: as `nominal_epsilon`.
    Returns: z, shape of nominal_epsilon; inf at 0.

    >>> round(nominal_noise_multiplier(2.7123, sampling_probability=0.0064, num_steps=15600, target_delta=1e-5), 3)
    1.0
    """
    return _divided(sampling_probability * math.sqrt(num_steps * -math.log(target_delta)), nominal_epsilon)


def _divided(scale: float, by: Array) -> Array:
    """scale/by, inf where by = 0; a float of a float."""
    if np.ndim(by) == 0:
        return math.inf if by == 0 else scale / by
    with np.errstate(divide="ignore"):
        return scale / np.asarray(by)


# --- Which optimizer: the noise multiplier at which an adaptive one overtakes DP-SGD --------------------------------


@dataclass(frozen=True)
class Thresholds:
    """Where the floor of an adaptive optimizer is below DP-SGD's.

    Args:
      verdict: "always": at every noise; "above": above the one threshold; "outside": below the first and above the
        second, DP-SGD winning between them.
      noise_multipliers: none, one or two thresholds z*, increasing.
    """

    verdict: Literal["always", "above", "outside"]
    noise_multipliers: tuple[float, ...]

    def adaptive_wins(self, noise_multiplier: float) -> bool:
        """Whether the adaptive optimizer has the lower floor at this noise multiplier.

        Args:
          noise_multiplier: z; >= 0.
        Returns: a truth value; at a threshold itself that of less noise.

        >>> Thresholds("above", (2.0,)).adaptive_wins(3.0)
        True
        """
        crossed = sum(noise_multiplier > z for z in self.noise_multipliers)
        return crossed != 1 if self.verdict == "outside" else crossed == len(self.noise_multipliers)

    def nominal_epsilons(
        self, *, sampling_probability: float, num_steps: int, target_delta: float
    ) -> tuple[float, ...]:
        """The thresholds as `nominal_epsilon`, decreasing: the adaptive optimizer wins below the last.

        Args:
          sampling_probability: q; in (0, 1].   num_steps: T; >= 0.   target_delta: delta; in (0, 1).
        Returns: one a threshold.

        >>> Thresholds("above", (1.0,)).nominal_epsilons(sampling_probability=0.1, num_steps=100,
        ...                                              target_delta=math.exp(-1))
        (1.0,)
        """
        return tuple(
            nominal_epsilon(
                z, sampling_probability=sampling_probability, num_steps=num_steps, target_delta=target_delta
            )
            for z in self.noise_multipliers
        )


def threshold_noise_multipliers(
    *,
    sgd_learning_rate: float,
    sgd_l2_clip_norm: float,
    adaptive_learning_rate: float,
    adaptive_l2_clip_norm: float,
    noise_penalty: float,
    example_noise_std: float,
    expected_batch_size: float,
) -> Thresholds:
    """The z at which the floors eta_g s_g^2/4 of DP-SGD and sqrt(phi) eta_a s_a/4 of the other meet, no clipping.

    With r^2 = phi (eta_a/eta_g)^2, S = sigma^2/B and u = (z/B)^2, the adaptive optimizer wins where

        C_g^4 u^2 + (2 S C_g^2 - r^2 C_a^2) u + S (S - r^2) > 0.

    Corrects Thm eps_star of the paper in three ways: phi = pi/2 for DP-SignSGD (the paper compares terms whose
    dropped constants differ, and so prints DP-Adam's phi = 1), each optimizer has its own learning rate and clip
    norm, and there may be two thresholds.

    Args:
      sgd_learning_rate, sgd_l2_clip_norm: eta_g [params^2/loss], C_g [loss/params]; > 0.
      adaptive_learning_rate, adaptive_l2_clip_norm: eta_a [params], C_a [loss/params]; > 0.
      noise_penalty: phi of the adaptive optimizer (`OptimizerTheory.noise_penalty`): pi/2 Sign, 1 Adam; > 0.
      example_noise_std: sigma; >= 0 [loss/params].   expected_batch_size: B; > 0.
    Returns: Thresholds.
    Raises: ValueError for a value outside its range.
    Valid when: no example is clipped and eta_a lambda << s (floors at low signal-to-noise ratio).

    >>> t = threshold_noise_multipliers(sgd_learning_rate=1.0, sgd_l2_clip_norm=1.0, adaptive_learning_rate=1.0,
    ...     adaptive_l2_clip_norm=1.0, noise_penalty=1.0, example_noise_std=0.0, expected_batch_size=10)
    >>> t
    Thresholds(verdict='above', noise_multipliers=(10.0,))
    """
    for name, value in (
        ("sgd_learning_rate", sgd_learning_rate),
        ("sgd_l2_clip_norm", sgd_l2_clip_norm),
        ("adaptive_learning_rate", adaptive_learning_rate),
        ("adaptive_l2_clip_norm", adaptive_l2_clip_norm),
        ("expected_batch_size", expected_batch_size),
        ("noise_penalty", noise_penalty),
    ):
        _check_positive(name, value)
    if not example_noise_std >= 0:
        raise ValueError(f"Expected example_noise_std >= 0, got {example_noise_std}.")
    r2 = noise_penalty * (adaptive_learning_rate / sgd_learning_rate) ** 2
    s, cg2, ca2 = example_noise_std**2 / expected_batch_size, sgd_l2_clip_norm**2, adaptive_l2_clip_norm**2
    roots = _positive_roots(cg2**2, 2 * s * cg2 - r2 * ca2, s * (s - r2))
    verdict: Literal["always", "above", "outside"] = ("always", "above", "outside")[len(roots)]
    return Thresholds(verdict, tuple(expected_batch_size * math.sqrt(u) for u in roots))


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"Expected {name} > 0, got {value}.")


def _positive_roots(a: float, b: float, c: float) -> tuple[float, ...]:
    """Positive roots of a u^2 + b u + c, a > 0, increasing; a double root does not change the sign and is left out."""
    discriminant = b * b - 4 * a * c
    if discriminant <= 0:
        return ()
    q = -(b + math.copysign(math.sqrt(discriminant), b)) / 2  # no cancellation
    return tuple(sorted(u for u in (q / a, c / q) if u > 0))


def threshold_noise_multiplier_all_clipped(
    *,
    sgd_learning_rate: float,
    sgd_l2_clip_norm: float,
    adaptive_learning_rate: float,
    noise_penalty: float,
    num_params: int,
    expected_batch_size: float,
) -> Thresholds:
    """z* = B sqrt(r^2/C_g^2 - 1/(d B)), r^2 = phi (eta_a/eta_g)^2: the Phase-1 twin of `threshold_noise_multipliers`.

    Own derivation: with s = C sqrt(1/(d B) + z^2/B^2) and h proportional to C, the noise per example and the adaptive
    optimizer's clip norm cancel. "always" if the root is not real.

    Args:
      sgd_learning_rate, sgd_l2_clip_norm, adaptive_learning_rate: eta_g, C_g and eta_a, as there.
      noise_penalty, expected_batch_size: phi and B, as there.
      num_params: d; > 0.
    Returns: Thresholds, "above" or "always".
    Raises: ValueError for a value that is not positive.

    >>> threshold_noise_multiplier_all_clipped(sgd_learning_rate=1.0, sgd_l2_clip_norm=1.0, adaptive_learning_rate=1.0,
    ...     noise_penalty=1.0, num_params=10**12, expected_batch_size=10).noise_multipliers[0].__round__(6)
    10.0
    """
    for name, value in (
        ("sgd_learning_rate", sgd_learning_rate),
        ("sgd_l2_clip_norm", sgd_l2_clip_norm),
        ("adaptive_learning_rate", adaptive_learning_rate),
        ("noise_penalty", noise_penalty),
        ("num_params", num_params),
        ("expected_batch_size", expected_batch_size),
    ):
        _check_positive(name, value)
    r2 = noise_penalty * (adaptive_learning_rate / sgd_learning_rate) ** 2
    u = r2 / sgd_l2_clip_norm**2 - 1 / (num_params * expected_batch_size)
    return Thresholds("above", (expected_batch_size * math.sqrt(u),)) if u > 0 else Thresholds("always", ())


def threshold_epsilon_as_printed(
    *,
    example_noise_std: float,
    expected_batch_size: float,
    l2_clip_norm: float,
    num_steps: int,
    target_delta: float,
    num_examples: int,
) -> float:
    """sqrt(C^2 T B log(1/delta)/(n^2 (B - sigma^2))), inf if sigma^2 >= B (paper, Thm eps_star and Cor. sign-vs-sgd).

    Wrong for DP-SignSGD: see `threshold_noise_multipliers`. It is DP-Adam's threshold at equal learning rates and clip
    norms, as a nominal epsilon.

    Args:
      example_noise_std: sigma; >= 0 [loss/params].   expected_batch_size: B; > 0.   l2_clip_norm: C; > 0 [loss/params].
      num_steps: T; >= 0.   target_delta: delta; in (0, 1).   num_examples: n; >= 1.
    Returns: () >= 0, inf included.

    >>> threshold_epsilon_as_printed(example_noise_std=0.0, expected_batch_size=4, l2_clip_norm=2.0, num_steps=25,
    ...                              target_delta=math.exp(-1), num_examples=10)
    1.0
    """
    b, sigma2 = expected_batch_size, example_noise_std**2
    if sigma2 >= b:
        return math.inf
    return math.sqrt(l2_clip_norm**2 * num_steps * b * -math.log(target_delta) / (num_examples**2 * (b - sigma2)))


# --- Which learning rate ------------------------------------------------------------------------------------------


def sgd_learning_rate(
    *, initial_loss: float, curvature_trace: float, num_steps: float, gradient_noise_std: Array
) -> Array:
    """sqrt(2 f0/(d L T s^2)): minimises DP-SGD's gradient-norm bound exactly. Corrects Thm sgd_opt.

    Args:
      initial_loss: f0 - f* [loss].
      curvature_trace: d L as in the paper, or Tr H [loss/params^2]: on a spread spectrum d L is too large, and its rate
        2-3 times too small where that of Tr H is within 10 % of the best.
      num_steps: T; where the rate is eta times factors, the sum of their squares.
      gradient_noise_std: s^2 = K_2 + C^2 z^2/B^2 in the paper's constants [loss/params].
    Returns: eta [params^2/loss], of order 1/s. Metric: mean over steps of E||grad f||^2.

    >>> sgd_learning_rate(initial_loss=2.0, curvature_trace=1.0, num_steps=4, gradient_noise_std=0.5)
    2.0
    """
    return math.sqrt(2 * initial_loss / (curvature_trace * num_steps)) / gradient_noise_std


def sgd_learning_rate_as_printed(
    *,
    initial_loss: float,
    curvature_trace: float,
    num_steps: int,
    example_noise_std: float,
    l2_clip_norm: float,
    nominal_epsilon: Array,
    num_examples: int,
) -> Array:
    """min(sqrt(f0/(d L T sigma^2)), sqrt(f0/(d L)) epsilon n/(C T)) (paper, Thm sgd_opt).

    Kept to be compared: it lacks B, sqrt(log(1/delta)) and sqrt 2, and is 0.1-2.6 times the best.

    Args:
      initial_loss, curvature_trace, num_steps: f0 - f*, d L and T, as `sgd_learning_rate`.
      example_noise_std: sigma; >= 0 [loss/params].   l2_clip_norm: C; > 0 [loss/params].
      nominal_epsilon: any shape, > 0.   num_examples: n; >= 1.
    Returns: shape of nominal_epsilon [params^2/loss].

    >>> float(sgd_learning_rate_as_printed(initial_loss=1.0, curvature_trace=1.0, num_steps=4, example_noise_std=1.0,
    ...     l2_clip_norm=1.0, nominal_epsilon=1.0, num_examples=100))
    0.5
    """
    scale = math.sqrt(initial_loss / curvature_trace)
    by_batch = math.inf if example_noise_std == 0 else 1 / (math.sqrt(num_steps) * example_noise_std)
    return scale * np.minimum(by_batch, nominal_epsilon * num_examples / (l2_clip_norm * num_steps))


def adaptive_learning_rate(*, initial_loss: float, curvature_trace: float, num_steps: int) -> float:
    """sqrt(2 f0/(d L T)): minimises the gradient-norm bound of DP-SignSGD and of DP-Adam, at any privacy.

    Args:
      initial_loss, curvature_trace, num_steps: f0 - f*, d L and T, as `sgd_learning_rate`.
    Returns: eta [params]. Metric: as there.

    >>> adaptive_learning_rate(initial_loss=2.0, curvature_trace=1.0, num_steps=4)
    1.0
    """
    return math.sqrt(2 * initial_loss / (curvature_trace * num_steps))


def adaptive_learning_rate_as_printed(*, initial_loss: float, curvature_trace: float, num_steps: int) -> float:
    """sqrt(f0/(d L T)): the printed theorem minimises a bound without its 1/2 (paper, Thm signsgd_opt).

    Args and Returns: as `adaptive_learning_rate`.

    >>> adaptive_learning_rate_as_printed(initial_loss=4.0, curvature_trace=1.0, num_steps=4)
    1.0
    """
    return math.sqrt(initial_loss / (curvature_trace * num_steps))


def optimal_gradient_norm_bound(
    *,
    initial_loss: float,
    curvature_trace: float,
    num_steps: int,
    gradient_noise_std: Array,
    noise_penalty: float,
    shrink_factor: float = 1.0,
) -> Array:
    """sqrt(2 phi f0 d L s^2/T)/h: the gradient-norm bound at the best learning rate (bound, scaling only).

    phi = 1 for DP-SGD and DP-Adam, pi/2 for DP-SignSGD; 1/h is the paper's K_1. So tuned DP-SignSGD is
    sqrt(pi/2) = 1.25 times worse than tuned DP-SGD, exactly (own derivation).

    Args:
      initial_loss, curvature_trace, num_steps, gradient_noise_std: f0 - f*, d L, T and s, as `sgd_learning_rate`.
      noise_penalty: phi; > 0.   shrink_factor: h; in (0, 1].
    Returns: shape of s [loss^2/params^2].

    >>> optimal_gradient_norm_bound(initial_loss=2.0, curvature_trace=1.0, num_steps=4, gradient_noise_std=3.0,
    ...                             noise_penalty=1.0)
    3.0
    """
    best = math.sqrt(2 * noise_penalty * initial_loss * curvature_trace / num_steps)
    return best * gradient_noise_std / shrink_factor


def final_loss_effective_learning_rate(
    *,
    initial_loss: Array,
    curvature: Array,
    num_steps: Array,
    num_params: int,
    gradient_noise_std: Array,
    noise_penalty: float,
    shrink_factor: Array = 1.0,
) -> Array:
    """eta_e that minimises E f(T) of the linear SDE on f = lambda ||x||^2/2 (own derivation).

    eta_e = y/(2 h lambda T) with e^y + y = R + 1, R = 8 h^2 lambda T f0/(phi d s^2), so y = log omega(R + 1), omega
    Wright's. The learning rate is eta_e for DP-SGD, eta_e s sqrt(pi/2) for DP-SignSGD, eta_e s for DP-Adam.

    Args:
      initial_loss: f0 - f* [loss].  curvature: lambda [loss/params^2].  num_steps: T.  num_params: d.
      gradient_noise_std: s >= 0 [loss/params].  noise_penalty: phi > 0.  shrink_factor: h >= 0.
    Returns: eta_e [params^2/loss]; inf at s = 0, and 2 h f0/(phi d s^2) where h^2 lambda T -> 0.
    Raises: ValueError for a negative loss, curvature, number of steps, shrink factor or noise.
    Valid when: eta_e h lambda << 1; on a spread spectrum the best differs by factors of order 1.

    >>> R = 10.0
    >>> eta = final_loss_effective_learning_rate(initial_loss=R / 8, curvature=1.0, num_steps=1, num_params=1,
    ...                                          gradient_noise_std=1.0, noise_penalty=1.0)
    >>> bool(np.isclose(np.exp(2 * eta) + 2 * eta, R + 1))
    True
    """
    for name, value in (
        ("initial_loss", initial_loss),
        ("curvature", curvature),
        ("num_steps", num_steps),
        ("gradient_noise_std", gradient_noise_std),
        ("shrink_factor", shrink_factor),
    ):
        if not np.all(np.asarray(value) >= 0):
            raise ValueError(f"Expected {name} >= 0, got {value}.")
    rate = np.asarray(shrink_factor) * np.asarray(curvature) * num_steps
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = 8 * np.asarray(shrink_factor) * initial_loss
        scale = np.where(gain == 0, 0.0, gain / (noise_penalty * num_params * np.square(gradient_noise_std)))
        signal = rate * scale
        # y = R/2 to first order, where the logarithm would lose its digits.
        return np.where(signal > 1e-7, np.log(special.wrightomega(signal + 1.0)) / (2 * rate), scale / 4)[()]
