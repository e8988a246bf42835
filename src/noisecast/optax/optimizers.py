"""The private optimizers as Optax optimizers: clip, noise, noisecast's own direction, learning rate."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from noisecast.optax.clip import clip_and_sum
from noisecast.optax.noise import add_noise
from noisecast.optimizers import DPSGD, DPAdam, DPSignSGD, Optimizer
from noisecast.optimizers.optimizer import check_learning_rate
from noisecast.privacy.mechanism import SampledGaussian


class DirectionState(NamedTuple):
    """step: () int32.   leaves: the optimizer's state of each leaf of the parameters."""

    step: jax.Array
    leaves: tuple


def scale_by_direction(optimizer: Optimizer) -> optax.GradientTransformation:
    """The direction that one of noisecast's optimizers makes of a private gradient; its learning_rate is not applied.

    The formula is the optimizer's own `direction`, coordinate by coordinate. State and direction are at least float32,
    whatever the parameters' dtype.

    Args:
      optimizer: e.g. `noisecast.DPAdam(learning_rate=1.0, b1=0.5)`.

    >>> sign = scale_by_direction(DPSignSGD(learning_rate=1.0))
    >>> sign.update(jnp.array([2.0, -3.0, 0.0]), sign.init(jnp.zeros(3)))[0].tolist()
    [1.0, -1.0, 0.0]
    """

    def init(params):
        zeros = (jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)) for p in jax.tree.leaves(params))
        return DirectionState(jnp.zeros((), jnp.int32), tuple(optimizer.init(zero) for zero in zeros))

    def update(updates, state, params=None):
        del params
        gradients, structure = jax.tree.flatten(updates)
        moved = [optimizer.direction(g, leaf, state.step) for g, leaf in zip(gradients, state.leaves, strict=True)]
        directions = jax.tree.unflatten(structure, [direction for direction, _ in moved])
        return directions, DirectionState(state.step + 1, tuple(leaf for _, leaf in moved))

    return optax.GradientTransformation(init, update)


def dp_sgd(learning_rate: Any, mechanism: SampledGaussian, key: Any) -> optax.GradientTransformationExtraArgs:
    """x - eta g, with g the private mean gradient; `update` takes per-example gradients.

    Args:
      learning_rate: eta > 0, a number or an Optax schedule [params^2/loss].
      mechanism: clip, noise and normaliser, and what is accounted.   key: see `add_noise`.

    >>> import os
    >>> from noisecast import Poisson, SampledGaussian
    >>> mechanism = SampledGaussian(noise_multiplier=0.0, l2_clip_norm=1.0, sampler=Poisson(0.1, 2))
    >>> sgd, params = dp_sgd(0.5, mechanism, os.urandom(32)), jnp.zeros(2)
    >>> gradients, mask = jnp.array([[0.5, 0.0], [0.0, 4.0]]), jnp.array([True, True])
    >>> updates, state = sgd.update(gradients, sgd.init(params), params, example_mask=mask)
    >>> updates.round(5).tolist()
    [-0.125, -0.25]
    """
    return _private(DPSGD(learning_rate=1.0), learning_rate, mechanism, key)


def dp_sign_sgd(learning_rate: Any, mechanism: SampledGaussian, key: Any) -> optax.GradientTransformationExtraArgs:
    """x - eta sign(g), with g the private mean gradient; otherwise as `dp_sgd`, learning_rate in [params].

    >>> import os
    >>> from noisecast import Poisson, SampledGaussian
    >>> mechanism = SampledGaussian(noise_multiplier=0.0, l2_clip_norm=1.0, sampler=Poisson(0.1, 2))
    >>> sign, params = dp_sign_sgd(0.5, mechanism, os.urandom(32)), jnp.zeros(2)
    >>> gradients, mask = jnp.array([[0.5, 0.0], [0.0, -4.0]]), jnp.array([True, True])
    >>> updates, state = sign.update(gradients, sign.init(params), params, example_mask=mask)
    >>> updates.tolist()
    [-0.5, 0.5]
    """
    return _private(DPSignSGD(learning_rate=1.0), learning_rate, mechanism, key)


def dp_adam(
    learning_rate: Any,
    mechanism: SampledGaussian,
    key: Any,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Adam on the private mean gradient, bias-corrected, as `noisecast.DPAdam`; otherwise as `dp_sign_sgd`.

    b1, b2 and eps are Python numbers: with `optax.inject_hyperparams` name them in `static_args`.

    >>> import os
    >>> from noisecast import Poisson, SampledGaussian
    >>> mechanism = SampledGaussian(noise_multiplier=0.0, l2_clip_norm=1.0, sampler=Poisson(0.1, 2))
    >>> adam, params = dp_adam(0.5, mechanism, os.urandom(32)), jnp.zeros(2)
    >>> gradients, mask = jnp.array([[0.5, 0.0], [0.0, -4.0]]), jnp.array([True, True])
    >>> updates, state = adam.update(gradients, adam.init(params), params, example_mask=mask)
    >>> [round(float(u), 4) for u in updates]
    [-0.5, 0.5]
    """
    return _private(DPAdam(learning_rate=1.0, b1=b1, b2=b2, eps=eps), learning_rate, mechanism, key)


def _private(
    optimizer: Optimizer, learning_rate: Any, mechanism: SampledGaussian, key: Any
) -> optax.GradientTransformationExtraArgs:
    if isinstance(learning_rate, int | float):
        check_learning_rate(learning_rate)
    chain = optax.chain(
        clip_and_sum(mechanism),
        add_noise(mechanism, key),
        scale_by_direction(optimizer),
        optax.scale_by_learning_rate(learning_rate),
    )
    return optax.with_extra_args_support(chain)
