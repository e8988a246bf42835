"""A plain JAX training loop made private with Optax pieces: three optimizers, one mechanism, one epsilon.

The data (scikit-learn's digits) are public; on private data the accuracies are non-private.

    python examples/optax_loop.py
"""

import os

import jax
import jax.numpy as jnp
import optax

import noisecast as nc
from noisecast.optax import dp_adam, dp_sgd, dp_sign_sgd, private_batches, releases

NUM_STEPS, TARGET_DELTA, HIDDEN = 300, 1e-4, 32


def initial_params(key: jax.Array) -> dict:
    first, second = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(first, (64, HIDDEN)) / 8, "b": jnp.zeros(HIDDEN)},
        "output": {"w": jax.random.normal(second, (HIDDEN, 10)) / HIDDEN**0.5, "b": jnp.zeros(10)},
    }


def logits(params: dict, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["output"]["w"] + params["output"]["b"]


def loss(params: dict, example: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Of one example: clipping is example by example, so nothing here may look at another."""
    x, y = example
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y)


def train(optimizer: optax.GradientTransformationExtraArgs, mechanism: nc.SampledGaussian, data) -> tuple[dict, int]:
    """The parameters, and how often a private gradient was released."""
    features, labels = jnp.asarray(data.features), jnp.asarray(data.labels)

    @jax.jit
    def step(params, state, rows, mask):
        examples = features[rows], labels[rows]
        gradients = jax.vmap(jax.grad(loss), (None, 0))(params, examples)  # leaves (batch, ...)
        updates, state = optimizer.update(gradients, state, params, example_mask=mask)
        return optax.apply_updates(params, updates), state

    params = initial_params(jax.random.key(0))  # public: a start may be known
    state = optimizer.init(params)
    batches = private_batches(mechanism, os.urandom(32), num_steps=NUM_STEPS, num_examples=data.num_examples)
    for rows, mask in batches:
        params, state = step(params, state, rows, mask)
    return params, releases(state)


def main() -> dict[str, tuple[float, float]]:
    data, test = nc.bundled("digits")
    sampler = nc.Poisson.for_batch_size(128, data.num_examples)
    mechanism = nc.calibrate_noise_multiplier(
        nc.SampledGaussian(noise_multiplier=0.0, l2_clip_norm=1.0, sampler=sampler),
        target_epsilon=1.0, target_delta=TARGET_DELTA, num_steps=NUM_STEPS,
    )  # fmt: skip
    print(mechanism.where_is_the_noise())
    optimizers = {
        "DP-SGD": dp_sgd(0.2, mechanism, os.urandom(32)),
        "DP-SignSGD": dp_sign_sgd(optax.linear_schedule(0.01, 0.0, NUM_STEPS), mechanism, os.urandom(32)),
        "DP-Adam": dp_adam(0.01, mechanism, os.urandom(32)),
    }
    found = {}
    for name, optimizer in optimizers.items():
        params, num_steps = train(optimizer, mechanism, data)
        spent = nc.epsilon_spent(mechanism, num_steps=num_steps, target_delta=TARGET_DELTA)
        accuracy = float((logits(params, test.features).argmax(axis=1) == test.labels).mean())
        found[name] = spent.epsilon, accuracy
        print(f"{name}: epsilon {spent.epsilon:.4f} at {TARGET_DELTA}, test accuracy {accuracy:.1%} (non-private)")
    return found


if __name__ == "__main__":
    main()
