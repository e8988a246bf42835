"""The mathematics: how differentially private optimizers move, one function an equation. No data, no JAX, no Numba.

- `optimizer_theory`: the form in which an optimizer carries its theory, `GradientMoments` and `OptimizerTheory`.
- `gaussian`: expectations under Gaussian and Student-t noise; E[g/||g||], E erf.
- `clipping`: what clipping and noise leave of a gradient: shrink factor h, noise std s, the mixture a sign sees.
- `dp_sgd`, `dp_sign_sgd`, `dp_adam`: drift, noise, rates, floors and bounds of each optimizer.
- `linear_sde`: moments on quadratics, exact or closed.
- `local_quadratic`: the loss of every optimizer on the quadratic that osculates f, in closed form.
- `optimal`: which optimizer at which noise, and with which learning rate.
- `closures` and the moments that rest on it: whole runs without dice, behind the forecast.

The optimizers share their names for an equation, so use them as `dp_sgd.decay_rate`. A name ending in `_as_printed`
is the paper's own text where that drops constants or errs; the plain name is the corrected form. The paper is
"Adaptive Methods Are Preferable in High Privacy Settings: An SDE Perspective".
"""

from noisecast.theory import dp_adam, dp_sgd, dp_sign_sgd
from noisecast.theory.clipping import (
    ClippingExpectations,
    clipping_expectations,
    gradient_noise_std,
    phase_1_noise_std,
    phase_2_noise_std,
    privacy_noise_std,
    sign_scale_mixture,
    zero_gradient_clipping_expectations,
)
from noisecast.theory.dp_adam import SMALL_SIGNAL_RESPONSE, dp_adam_theory
from noisecast.theory.dp_sgd import DP_SGD
from noisecast.theory.dp_sign_sgd import DP_SIGN_SGD
from noisecast.theory.gaussian import (
    concentrated_normalised_gradient_factor,
    expected_erf,
    expected_sign,
    expected_squared_erf,
    expected_x_erf,
    normalised_gradient_factor,
    normalised_gradient_factor_as_printed,
    student_scale_factor,
)
from noisecast.theory.linear_sde import (
    loss_bound,
    sgd_moments,
    sgd_moments_sde,
    sgd_stationary_variance,
    sign_closure_step,
    sign_covariance,
    sign_lattice_law,
    sign_moments_closure,
    sign_moments_erf_sde,
    sign_moments_linear_sde,
    sign_moments_linear_sde_as_printed,
    sign_second_moment_linear,
    sign_stationary_second_moment,
)
from noisecast.theory.local_quadratic import (
    local_quadratic_curvature_loss,
    local_quadratic_gradient_norm_squared,
    local_quadratic_loss,
    spectral_loss,
)
from noisecast.theory.low_dimension import low_dimension_clipping_expectations
from noisecast.theory.optimal import (
    Thresholds,
    adaptive_learning_rate,
    adaptive_learning_rate_as_printed,
    final_loss_effective_learning_rate,
    nominal_epsilon,
    nominal_noise_multiplier,
    optimal_gradient_norm_bound,
    sgd_learning_rate,
    sgd_learning_rate_as_printed,
    threshold_epsilon_as_printed,
    threshold_noise_multiplier_all_clipped,
    threshold_noise_multipliers,
)
from noisecast.theory.optimizer_theory import GradientMoments, OptimizerTheory

__all__ = [
    "DP_SGD",
    "DP_SIGN_SGD",
    "SMALL_SIGNAL_RESPONSE",
    "ClippingExpectations",
    "GradientMoments",
    "OptimizerTheory",
    "Thresholds",
    "adaptive_learning_rate",
    "adaptive_learning_rate_as_printed",
    "clipping_expectations",
    "concentrated_normalised_gradient_factor",
    "dp_adam",
    "dp_adam_theory",
    "dp_sgd",
    "dp_sign_sgd",
    "expected_erf",
    "expected_sign",
    "expected_squared_erf",
    "expected_x_erf",
    "final_loss_effective_learning_rate",
    "gradient_noise_std",
    "local_quadratic_curvature_loss",
    "local_quadratic_gradient_norm_squared",
    "local_quadratic_loss",
    "loss_bound",
    "low_dimension_clipping_expectations",
    "nominal_epsilon",
    "nominal_noise_multiplier",
    "normalised_gradient_factor",
    "normalised_gradient_factor_as_printed",
    "optimal_gradient_norm_bound",
    "phase_1_noise_std",
    "phase_2_noise_std",
    "privacy_noise_std",
    "sgd_learning_rate",
    "sgd_learning_rate_as_printed",
    "sgd_moments",
    "sgd_moments_sde",
    "sgd_stationary_variance",
    "sign_closure_step",
    "sign_covariance",
    "sign_lattice_law",
    "sign_moments_closure",
    "sign_moments_erf_sde",
    "sign_moments_linear_sde",
    "sign_moments_linear_sde_as_printed",
    "sign_scale_mixture",
    "sign_second_moment_linear",
    "sign_stationary_second_moment",
    "spectral_loss",
    "student_scale_factor",
    "threshold_epsilon_as_printed",
    "threshold_noise_multiplier_all_clipped",
    "threshold_noise_multipliers",
    "zero_gradient_clipping_expectations",
]
