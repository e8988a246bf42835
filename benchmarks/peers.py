"""The peers, each at its best: data in memory as dense float32, no loader, fixed batches, one private step at a time.

All train the task's model with its bias: clip each example's gradient to C, sum, add N(0, (z C)^2) to every coordinate,
divide by B, then SGD or Adam.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.linear_model import SETTINGS, LinearTask
from benchmarks.race import Contestant


class FixedBatches:
    """A peer in training: its step on the same few batches in turn."""

    def __init__(
        self,
        step: Callable[[Any], None],
        batches: Sequence[Any],
        params: Callable[[], np.ndarray],
        wait: Callable[[], Any] = lambda: None,
    ):
        self._step, self._batches, self.params, self._wait = step, batches, params, wait
        self._taken = 0

    def advance(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step(self._batches[self._taken % len(self._batches)])
            self._taken += 1
        self._wait()


def on_linear_model(
    task: LinearTask, *, opacus_modes: Sequence[str], microbatch_size: int | None = None
) -> list[Contestant]:
    """Every peer, with the two optimizers that all of them have; `microbatch_size` is JAX Privacy's."""
    contestants = []
    for optimizer in ("DP-SGD", "DP-Adam"):
        for mode in opacus_modes:
            start: Any = partial(opacus, task, optimizer, mode)
            contestants.append(Contestant(f"Opacus {mode}", "Opacus", optimizer, 1, start))
        start = partial(jax_privacy, task, optimizer, microbatch_size)
        contestants.append(Contestant("JAX Privacy", "JAX Privacy", optimizer, 1, start))
        start = partial(vmap_grad, task, optimizer)
        contestants.append(Contestant("vmap(grad)", "vmap(grad)", optimizer, 1, start))
    return contestants


def opacus(task: LinearTask, optimizer: str, mode: str, noise_multiplier: float) -> FixedBatches:
    """Opacus without its DataLoader and accountant; `mode` is hooks, functorch, ew or ghost."""
    import torch  # pyright: ignore[reportMissingImports]
    from opacus.grad_sample import prepare_module  # pyright: ignore[reportMissingImports]
    from opacus.optimizers import get_optimizer_class  # pyright: ignore[reportMissingImports]
    from opacus.utils.fast_gradient_clipping_utils import (  # pyright: ignore[reportMissingImports]
        DPLossFastGradientClipping,
    )

    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # a first layer's input has no gradient
    torch.set_num_threads(1)
    linear = torch.nn.Linear(task.data.num_features, task.num_outputs)
    for parameter in linear.parameters():
        torch.nn.init.zeros_(parameter)
    ghost: dict[str, Any] = {"max_grad_norm": task.l2_clip_norm} if mode == "ghost" else {}
    model = prepare_module(linear, mode, loss_reduction="mean", **ghost)
    settings = SETTINGS[optimizer]
    if optimizer == "DP-Adam":
        inner: Any = torch.optim.Adam(
            model.parameters(),
            lr=settings["learning_rate"],
            betas=(settings["b1"], settings["b2"]),
            eps=settings["eps"],
        )
    else:
        inner = torch.optim.SGD(model.parameters(), lr=settings["learning_rate"])
    private = get_optimizer_class("flat", False, mode)(
        inner, noise_multiplier=noise_multiplier, max_grad_norm=task.l2_clip_norm, expected_batch_size=task.batch_size
    )
    criterion: Any = torch.nn.BCEWithLogitsLoss() if task.num_outputs == 1 else torch.nn.CrossEntropyLoss()
    loss = DPLossFastGradientClipping(model, private, criterion) if mode == "ghost" else criterion

    def step(batch) -> None:
        features, labels = batch
        private.zero_grad(set_to_none=True)
        logits = model(features)
        loss(logits[:, 0] if task.num_outputs == 1 else logits, labels).backward()
        private.step()

    label_type = torch.float32 if task.num_outputs == 1 else torch.int64
    batches = [(torch.from_numpy(x), torch.from_numpy(y).to(label_type)) for x, y in task.batches()]
    weight, bias = linear.weight, linear.bias
    return FixedBatches(step, batches, lambda: np.append(weight.detach().numpy().T, bias.detach().numpy()))


def jax_privacy(task: LinearTask, optimizer: str, microbatch_size: int | None, noise_multiplier: float) -> FixedBatches:
    """JAX Privacy: `clipped_grad`, its Gaussian privatizer and Optax in one compiled step."""
    from jax_privacy import clipped_grad
    from jax_privacy.noise_addition import gaussian_privatizer

    clipped_sum = clipped_grad(
        _loss(task), l2_clip_norm=task.l2_clip_norm, batch_argnums=(1, 2), keep_batch_dim=False,
        microbatch_size=microbatch_size,
    )  # fmt: skip
    noise: Any = gaussian_privatizer(stddev=noise_multiplier * task.l2_clip_norm, prng_key=0)
    return _jax_steps(task, optimizer, clipped_sum, noise.init, noise.update)


def vmap_grad(task: LinearTask, optimizer: str, noise_multiplier: float) -> FixedBatches:
    """What one writes by hand: vmap(grad), clip, sum, jax.random.normal, Optax, in one compiled step."""
    import jax
    import jax.numpy as jnp
    import optax

    each = jax.vmap(jax.grad(_loss(task)), in_axes=(None, 0, 0))

    def clipped_sum(params, features, labels):
        gradients = each(params, features, labels)
        factors = jnp.minimum(1.0, task.l2_clip_norm / jax.vmap(optax.global_norm)(gradients))
        return jax.tree.map(lambda gradient: jnp.tensordot(factors, gradient, 1), gradients)

    def add_noise(gradient, key):
        key, *keys = jax.random.split(key, 3)
        std = noise_multiplier * task.l2_clip_norm
        noise = {name: std * jax.random.normal(k, gradient[name].shape) for name, k in zip(gradient, keys)}
        return jax.tree.map(jnp.add, gradient, noise), key

    return _jax_steps(task, optimizer, clipped_sum, lambda params: jax.random.key(0), add_noise)


def _loss(task: LinearTask) -> Callable:
    import jax
    import optax

    def loss(params, features, label):
        logits = params["weight"] @ features + params["bias"]
        if task.num_outputs == 1:
            return optax.sigmoid_binary_cross_entropy(logits, label.astype(logits.dtype))
        return -jax.nn.log_softmax(logits)[label]

    return loss


def _jax_steps(task: LinearTask, optimizer: str, clipped_sum, init_noise, add_noise) -> FixedBatches:
    import jax
    import jax.numpy as jnp
    import optax

    update = {"DP-SGD": optax.sgd, "DP-Adam": optax.adam}[optimizer](**SETTINGS[optimizer])
    # A vector for two classes, features last for more: with (p, 1) XLA takes ten times as long over JAX Privacy's step.
    outputs = () if task.num_outputs == 1 else (task.num_outputs,)
    params = {"weight": jnp.zeros((*outputs, task.data.num_features)), "bias": jnp.zeros(outputs)}
    state = params, init_noise(params), update.init(params)

    def step(state, features, labels):
        params, noise, memory = state
        noisy, noise = add_noise(clipped_sum(params, features, labels), noise)
        mean = jax.tree.map(lambda total: total / task.batch_size, noisy)
        direction, memory = update.update(mean, memory)
        return optax.apply_updates(params, direction), noise, memory

    compiled = jax.jit(step, donate_argnums=0)

    def advance(batch) -> None:
        nonlocal state
        state = compiled(state, *batch)

    batches = [(jnp.asarray(x), jnp.asarray(y)) for x, y in task.batches()]
    return FixedBatches(
        advance,
        batches,
        lambda: np.append(np.asarray(state[0]["weight"]).T, np.asarray(state[0]["bias"])),
        wait=lambda: jax.block_until_ready(state),
    )
