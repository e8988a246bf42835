"""Advice for a PyTorch model, from gradients that Opacus measured."""

from collections.abc import Sequence
from dataclasses import replace

from noisecast.advice.numbers import Numbers, NumbersAdvice, Tuned, advise_from_numbers
from noisecast.opacus.measure import NonPrivateGradients
from noisecast.optimizers import Optimizer
from noisecast.privacy.mechanism import SampledGaussian


def advise(
    gradients: NonPrivateGradients,
    mechanism: SampledGaussian,
    *,
    optimizers: Sequence[Optimizer],
    num_steps: int,
    target_epsilons: Sequence[float],
    target_delta: float = 1e-5,
) -> NumbersAdvice:
    """Which optimizer and learning rate at each epsilon, as `noisecast.advice.numbers.advise_from_numbers` says.

    What that has to bound, the noise per example and the share of clipped records, was measured here. It follows that
    the advice is non-private, unless the gradients are a public proxy's; its last sentence says so.

    Args:
      gradients: from `measure`, with the mechanism's clip norm.
      mechanism: with which the optimizers were tuned: `mechanism_of` a run, or one with the `poisson_sampler` of a
        loader. With noise_multiplier 0 no learning rate is given for other noise.
      optimizers: as tuned, e.g. `noisecast.DPSGD(learning_rate=0.5)`; each kind once.
      num_steps: T >= 1.   target_epsilons: > 0.   target_delta: in (0, 1).
    Raises: ValueError for gradients that were measured with another clip norm, and where advise_from_numbers does.

    >>> import noisecast as nc, numpy as np
    >>> seen = NonPrivateGradients(num_params=650, num_examples=2, l2_clip_norm=1.0,
    ...     non_private_norms=np.array([3.0, 0.5]), non_private_loss=2.3, non_private_gradient_norm=0.6,
    ...     non_private_example_noise_std=0.03)
    >>> mechanism = nc.SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=nc.Poisson(0.1, 100))
    >>> advice = advise(seen, mechanism, optimizers=[nc.DPSGD(learning_rate=0.5)], num_steps=200, target_epsilons=[1.0])
    >>> print(advice.epsilons[0].optimizers[0].retuned.sentence)
    DP-SGD: learning rate ... in place of 0.5: ...
    """
    if gradients.l2_clip_norm != mechanism.l2_clip_norm:
        raise ValueError(
            f"Expected gradients that were measured with the mechanism's l2_clip_norm {mechanism.l2_clip_norm:g}, got "
            f"{gradients.l2_clip_norm:g}; measure again with it."
        )
    tuned = tuple(
        Tuned(
            theory=optimizer.theory,
            learning_rate=optimizer.learning_rate,
            l2_clip_norm=mechanism.l2_clip_norm,
            clipped_share=gradients.non_private_share_clipped(),
        )
        for optimizer in optimizers
    )
    numbers = Numbers(
        num_params=gradients.num_params,
        sampler=mechanism.sampler,
        num_steps=num_steps,
        target_delta=target_delta,
        optimizers=tuned,
        tuned_noise_multiplier=mechanism.noise_multiplier or None,
        example_noise_std=gradients.non_private_example_noise_std,
        adjacency=mechanism.adjacency,
    )
    advice = advise_from_numbers(numbers, target_epsilons)
    said = (
        f"This is non-private: it was computed from the gradients of {gradients.num_examples} examples, measured "
        "without noise, and no epsilon here counts that."
    )
    return replace(advice, unknown=(*advice.unknown, said))
