"""A learning rate to start from, where the user names none: from public numbers alone, so that it costs no privacy."""

import math
from dataclasses import dataclass

from noisecast.privacy.mechanism import SampledGaussian
from noisecast.theory.optimal import sgd_learning_rate
from noisecast.theory.optimizer_theory import OptimizerTheory


@dataclass(frozen=True)
class PublicScale:
    """What is known of a linear model's loss without looking at a row.

    Args:
      initial_loss: f_0, the loss of parameters that are zero.   num_params: d.
      logit_curvature: bounds on the loss's Hessian in the logits: its largest eigenvalue, its trace.
      squared_feature_norm: R^2, a bound on |x|^2 (or, where there is none, a guess).
    """

    initial_loss: float
    num_params: int
    logit_curvature: tuple[float, float]
    squared_feature_norm: float

    @property
    def max_hessian(self) -> float:
        """max h <= largest eigenvalue in the logits * (1 + R^2)."""
        return self.logit_curvature[0] * (1 + self.squared_feature_norm)

    @property
    def hessian_trace(self) -> float:
        """Tr H <= trace in the logits * (1 + R^2)."""
        return self.logit_curvature[1] * (1 + self.squared_feature_norm)


def starting_learning_rate(
    theory: OptimizerTheory, scale: PublicScale, mechanism: SampledGaussian, num_steps: float
) -> float:
    """The learning rate at which a bound on the mean squared gradient is smallest.

    On a quadratic, one SGD step with rate e and gradient noise S per coordinate lowers the expected loss by at least
    e |grad f|^2 - e^2 (|grad f|^2 max h + S^2 Tr H) / 2. Summed over T steps, for small e:

      mean of |grad f|^2 <= f_0 / (e T) + e S^2 Tr H / 2,   smallest at e = sqrt(2 f_0 / (Tr H T S^2)),

    and e <= 1 / max h keeps it stable. S^2 = (C z / B)^2 + C^2 / (d B): privacy noise, and the batch noise of gradients
    as long as the clip norm. Another optimizer gets the rate at which its linearised step is as long.

    Where the rates are e times factors c_k, sum e c_k |grad f|^2 <= f_0 + sum (e c_k)^2 S^2 Tr H / 2, and T is the sum
    of c_k^2.

    Returns: () > 0, two digits, in the units of that optimizer's learning rate.

    >>> from noisecast.privacy.sampling import Poisson
    >>> from noisecast.theory.dp_sgd import DP_SGD
    >>> mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson.for_batch_size(64, 6400))
    >>> 0 < starting_learning_rate(DP_SGD, PublicScale(0.69, 100, (0.25, 0.25), 1.0), mechanism, 1000) <= 2
    True
    """
    clip, batch_size = mechanism.l2_clip_norm, mechanism.expected_batch_size
    variance = mechanism.mean_noise_std**2 + clip**2 / (scale.num_params * batch_size)
    noise_std = math.sqrt(variance)
    effective = sgd_learning_rate(
        initial_loss=scale.initial_loss,
        curvature_trace=scale.hessian_trace,
        num_steps=num_steps,
        gradient_noise_std=noise_std,
    )
    effective = min(float(effective), 1 / scale.max_hessian)
    rate = effective / float(theory.effective_learning_rate(1.0, noise_std))
    return float(f"{rate:.2g}")  # two digits: nobody should read more into it
