"""The peers, each at its best: data in memory as dense float32, no loader, fixed batches, one private step at a time.

All clip each example's gradient to C, sum, add N(0, (z C)^2) to every coordinate, divide by B, then SGD or Adam.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays])


@dataclass(frozen=True)
class PrivateSteps:
    """The same steps for every peer.

    Args:
      optimizer: "DP-SGD" or "DP-Adam".   settings: of it, by Optax' names.
      l2_clip_norm, noise_multiplier, batch_size: C, z, B.
      start: the parameters, an array each.   in_our_order: these arrays after some steps -> (d,).
      batches: of each the inputs and, last, what is to be predicted.
    """

    optimizer: str
    settings: dict[str, float]
    l2_clip_norm: float
    noise_multiplier: float
    batch_size: int
    start: Sequence[np.ndarray]
    batches: Sequence[tuple[np.ndarray, ...]]
    in_our_order: Callable[[Sequence[np.ndarray]], np.ndarray] = _joined

    def opacus(self, module: Any, criterion: Any, mode: str) -> FixedBatches:
        """Opacus without its DataLoader and accountant; `mode` is hooks, functorch, ew or ghost."""
        import torch  # pyright: ignore[reportMissingImports]
        from opacus.grad_sample import prepare_module  # pyright: ignore[reportMissingImports]
        from opacus.optimizers import get_optimizer_class  # pyright: ignore[reportMissingImports]
        from opacus.utils.fast_gradient_clipping_utils import (  # pyright: ignore[reportMissingImports]
            DPLossFastGradientClipping,
        )

        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # a first input has no gradient
        for parameter, array in zip(module.parameters(), self.start, strict=True):
            parameter.data.copy_(torch.tensor(array))
        ghost: dict[str, Any] = {"max_grad_norm": self.l2_clip_norm} if mode == "ghost" else {}
        model = prepare_module(module, mode, loss_reduction="mean", **ghost)
        settings = self.settings
        if self.optimizer == "DP-Adam":
            betas = settings["b1"], settings["b2"]
            inner: Any = torch.optim.Adam(model.parameters(), settings["learning_rate"], betas, settings["eps"])
        else:
            inner = torch.optim.SGD(model.parameters(), settings["learning_rate"])
        private = get_optimizer_class("flat", False, mode)(
            inner,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.l2_clip_norm,
            expected_batch_size=self.batch_size,
        )
        loss = DPLossFastGradientClipping(model, private, criterion) if mode == "ghost" else criterion

        def step(batch: Any) -> None:
            *inputs, target = batch
            private.zero_grad(set_to_none=True)
            loss(model(*inputs), target).backward()
            private.step()

        def params() -> np.ndarray:
            return self.in_our_order([parameter.detach().cpu().numpy() for parameter in module.parameters()])

        device = next(module.parameters()).device
        batches = [[torch.from_numpy(array).to(device) for array in batch] for batch in self.batches]
        return FixedBatches(step, batches, params, torch.cuda.synchronize if device.type == "cuda" else lambda: None)

    def jax_privacy(self, loss: Callable, microbatch_size: int | None = None) -> FixedBatches:
        """JAX Privacy: `clipped_grad`, its Gaussian privatizer and Optax in one compiled step."""
        from jax_privacy import clipped_grad
        from jax_privacy.noise_addition import gaussian_privatizer

        clipped_sum = clipped_grad(
            loss,
            l2_clip_norm=self.l2_clip_norm,
            batch_argnums=tuple(range(1, 1 + len(self.batches[0]))),
            keep_batch_dim=False,
            microbatch_size=microbatch_size,
        )
        noise: Any = gaussian_privatizer(stddev=self.noise_multiplier * self.l2_clip_norm, prng_key=0)
        return self.compiled(clipped_sum, noise.init, noise.update)

    def compiled(self, clipped_sum: Callable, init_noise: Callable, add_noise: Callable) -> FixedBatches:
        """One step compiled, by Optax: clipped_sum(params, *batch), init_noise(params), add_noise(sum, keys)."""
        import jax
        import jax.numpy as jnp
        import optax

        update = {"DP-SGD": optax.sgd, "DP-Adam": optax.adam}[self.optimizer](**self.settings)
        start = [jnp.array(array) for array in self.start]
        state: Any = start, init_noise(start), update.init(start)

        @partial(jax.jit, donate_argnums=0)
        def step(state: Any, batch: Any) -> Any:
            params, keys, memory = state
            noisy, keys = add_noise(clipped_sum(params, *batch), keys)
            direction, memory = update.update(jax.tree.map(lambda total: total / self.batch_size, noisy), memory)
            return optax.apply_updates(params, direction), keys, memory

        def advance(batch: Any) -> None:
            nonlocal state
            state = step(state, batch)

        return FixedBatches(
            advance,
            jax.tree.map(jnp.asarray, self.batches),
            lambda: self.in_our_order([np.asarray(array) for array in state[0]]),
            wait=lambda: jax.block_until_ready(state),
        )


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
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    module = torch.nn.Linear(task.data.num_features, task.num_outputs)
    criterion: Any = torch.nn.CrossEntropyLoss()
    if task.num_outputs == 1:
        module, criterion = torch.nn.Sequential(module, torch.nn.Flatten(0)), torch.nn.BCEWithLogitsLoss()
    return _steps(task, optimizer, noise_multiplier).opacus(module, criterion, mode)


def jax_privacy(task: LinearTask, optimizer: str, microbatch_size: int | None, noise_multiplier: float) -> FixedBatches:
    return _steps(task, optimizer, noise_multiplier).jax_privacy(_loss(task), microbatch_size)


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
        return [total + std * jax.random.normal(k, total.shape) for total, k in zip(gradient, keys)], key

    return _steps(task, optimizer, noise_multiplier).compiled(clipped_sum, lambda params: jax.random.key(0), add_noise)


def _steps(task: LinearTask, optimizer: str, noise_multiplier: float) -> PrivateSteps:
    # A vector for two classes, features last for more: with (p, 1) XLA takes ten times as long over JAX Privacy's step.
    outputs = () if task.num_outputs == 1 else (task.num_outputs,)
    return PrivateSteps(
        optimizer,
        SETTINGS[optimizer],
        task.l2_clip_norm,
        noise_multiplier,
        task.batch_size,
        [np.zeros((*outputs, task.data.num_features), np.float32), np.zeros(outputs, np.float32)],
        [(x, y.astype(np.int64 if outputs else np.float32)) for x, y in task.batches()],
        lambda arrays: np.append(arrays[0].T, arrays[1]),
    )


def _loss(task: LinearTask) -> Callable:
    import jax
    import optax

    def loss(params, features, label):
        weight, bias = params
        logits = weight @ features + bias
        if task.num_outputs == 1:
            return optax.sigmoid_binary_cross_entropy(logits, label)
        return -jax.nn.log_softmax(logits)[label]

    return loss
