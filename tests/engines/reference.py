"""Private training of small models, written out plainly: the definition that every engine must have the law of.

One step of one run, k = 0, 1, ...:

  g_i = gradient of example i's loss                       for every drawn example
  G   = sum of g_i min(1, C / |g_i|)                       clipped one by one
  g   = (G + N(0, (z C)^2) on every coordinate) / B        B: the expected batch size
  x   = x - learning_rate * direction(g)                   DP-SGD, DP-SignSGD or DP-Adam

Float64 and NumPy's own generators; no shortcut: the gradient of every drawn example is formed, every coordinate gets
noise at every step. The first axis counts independent runs, each with batches and noise of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# One step's batches, of every run: numbers of examples (runs, width), and which of those are there.
Draw = tuple[np.ndarray, np.ndarray]
Sampler = Callable[[np.random.Generator, int], Iterator[Draw]]


@dataclass(frozen=True)
class Model:
    """Logistic (one output) or softmax regression; inputs (n, p + 1) end in a 1 for the bias, labels (n,).

    Labels (n, k), padded with -1, are sets: each output is a logistic regression of its own, and the loss is their sum.
    """

    inputs: np.ndarray
    labels: np.ndarray
    num_outputs: int

    def logits(self, params: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        """(runs, width, outputs); params (runs, d) are a row of weights for each input."""
        weights = params.reshape(len(params), -1, self.num_outputs)
        return inputs @ weights

    def gradients(self, params: np.ndarray, examples: np.ndarray) -> np.ndarray:
        """The gradient of each example's loss: (runs, width, d) for examples (runs, width)."""
        inputs, labels = self.inputs[examples], self.labels[examples]
        z = self.logits(params, inputs)
        if self.labels.ndim == 2:
            residuals = 1 / (1 + np.exp(-z)) - self.answers()[examples]
        elif self.num_outputs == 1:
            residuals = 1 / (1 + np.exp(-z)) - labels[:, :, None]
        else:
            residuals = softmax(z) - np.eye(self.num_outputs)[labels]
        outer = np.einsum("rbf,rbm->rbfm", inputs, residuals)
        return outer.reshape(*examples.shape, -1)

    def answers(self) -> np.ndarray:
        """1 where an example has the label; (n, outputs)."""
        return (self.labels[:, :, None] == np.arange(self.num_outputs)).any(axis=1).astype(float)

    def loss(self, params: np.ndarray) -> np.ndarray:
        """Mean loss over all examples: (runs,)."""
        z = self.logits(params, self.inputs)
        if self.labels.ndim == 2:
            return np.logaddexp(0, np.where(self.answers() == 1, -z, z)).sum(axis=2).mean(axis=1)
        if self.num_outputs == 1:
            return np.logaddexp(0, np.where(self.labels[:, None] == 1, -z, z)).mean(axis=(1, 2))
        return -np.log(softmax(z)[:, np.arange(len(self.labels)), self.labels]).mean(axis=1)

    @property
    def start(self) -> np.ndarray:
        """Parameters before the first step; (d,)."""
        return np.zeros(self.inputs.shape[1] * self.num_outputs)

    @property
    def touched(self) -> np.ndarray:
        """Which rows of the parameters each example's gradient is in; (n, rows)."""
        return self.inputs != 0


@dataclass(frozen=True)
class Factorization:
    """Ratings as <x_user, x_item> + center, loss e^2 / 2; a row of `num_outputs` numbers a user, then an item.

    users, items: rows of the parameters; labels: rating - center; (n,) each. start: (d,).
    """

    users: np.ndarray
    items: np.ndarray
    labels: np.ndarray
    num_outputs: int
    start: np.ndarray

    def gradients(self, params: np.ndarray, examples: np.ndarray) -> np.ndarray:
        """The gradient of each example's loss: (runs, width, d) for examples (runs, width)."""
        runs, width = examples.shape
        users, items = self.users[examples], self.items[examples]
        table = params.reshape(runs, -1, self.num_outputs)
        run, place = np.arange(runs)[:, None], np.arange(width)[None]
        x_user, x_item = table[run, users], table[run, items]  # (runs, width, num_outputs)
        errors = (x_user * x_item).sum(axis=2) - self.labels[examples]
        gradients = np.zeros((runs, width, *table.shape[1:]))
        gradients[run, place, users] = errors[:, :, None] * x_item
        gradients[run, place, items] = errors[:, :, None] * x_user
        return gradients.reshape(runs, width, -1)

    def loss(self, params: np.ndarray) -> np.ndarray:
        """Mean loss over all examples: (runs,)."""
        table = params.reshape(len(params), -1, self.num_outputs)
        predicted = np.einsum("rne,rne->rn", table[:, self.users], table[:, self.items])
        return np.square(predicted - self.labels).mean(axis=1) / 2

    @property
    def touched(self) -> np.ndarray:
        rows = np.arange(len(self.start) // self.num_outputs)
        return (self.users[:, None] == rows) | (self.items[:, None] == rows)


def softmax(z: np.ndarray) -> np.ndarray:
    shifted = np.exp(z - z.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def clip(gradients: np.ndarray, l2_clip_norm: float) -> np.ndarray:
    """g min(1, C / |g|), over the last axis."""
    norms = np.linalg.norm(gradients, axis=-1, keepdims=True)
    return gradients * np.minimum(1, l2_clip_norm / np.maximum(norms, np.finfo(float).tiny))


# --- Samplers: NumPy's own ways to draw, not the library's ------------------------------------------------------------


def poisson(num_examples: int, batch_size: float) -> Sampler:
    """Every example by a coin of its own."""

    def draws(rng: np.random.Generator, runs: int) -> Iterator[Draw]:
        while True:
            there = rng.random((runs, num_examples)) < batch_size / num_examples
            first = np.argsort(~there, axis=1, kind="stable")[:, : there.sum(axis=1).max()]
            yield first, np.take_along_axis(there, first, axis=1)

    return draws


def fixed_size(num_examples: int, batch_size: int) -> Sampler:
    """The first `batch_size` of a fresh order."""

    def draws(rng: np.random.Generator, runs: int) -> Iterator[Draw]:
        while True:
            batch = _orders(rng, runs, num_examples)[:, :batch_size]
            yield batch, np.ones(batch.shape, bool)

    return draws


def shuffled(num_examples: int, batch_size: int) -> Sampler:
    """An order an epoch, cut into batches; what is left over is not used."""

    def draws(rng: np.random.Generator, runs: int) -> Iterator[Draw]:
        while True:
            orders = _orders(rng, runs, num_examples)
            for end in range(batch_size, num_examples + 1, batch_size):
                yield orders[:, end - batch_size : end], np.ones((runs, batch_size), bool)

    return draws


def _orders(rng: np.random.Generator, runs: int, num_examples: int) -> np.ndarray:
    return rng.permuted(np.tile(np.arange(num_examples), (runs, 1)), axis=1)


# --- Optimizers -------------------------------------------------------------------------------------------------------


def dp_sgd(g: np.ndarray, memory: Any, step: int) -> tuple[np.ndarray, Any]:
    return g, memory


def dp_sign_sgd(g: np.ndarray, memory: Any, step: int) -> tuple[np.ndarray, Any]:
    return np.sign(g), memory


def dp_adam(g: np.ndarray, memory: Any, step: int, b1=0.9, b2=0.999, eps=1e-8) -> tuple[np.ndarray, Any]:
    m, v = memory or (np.zeros_like(g), np.zeros_like(g))
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    m_hat, v_hat = m / (1 - b1 ** (step + 1)), v / (1 - b2 ** (step + 1))
    return m_hat / (np.sqrt(v_hat) + eps), (m, v)


# --- Training ---------------------------------------------------------------------------------------------------------


def train(
    model: Model | Factorization,
    direction: Callable[..., tuple[np.ndarray, Any]],
    sampler: Sampler,
    *,
    learning_rate: float,
    l2_clip_norm: float,
    noise_std: float,
    batch_size: float | None,
    num_steps: int,
    runs: int,
    rng: np.random.Generator,
    quiet_steps: tuple[int, ...] = (),
    factors: Sequence[float] | None = None,
) -> np.ndarray:
    """Parameters after `num_steps`, from `model.start`: (runs, d). noise_std is z C; `factors` are on learning_rate.

    Two arguments make wrong trainers, for negative controls: `batch_size=None` divides by the drawn size, and
    `quiet_steps` have no noise.
    """
    params = np.tile(model.start, (runs, 1))
    memory = None
    for step, (examples, there) in zip(range(num_steps), sampler(rng, runs)):
        clipped = clip(model.gradients(params, examples), l2_clip_norm)
        clipped_sum = np.where(there[:, :, None], clipped, 0).sum(axis=1)
        noise = noise_std * rng.standard_normal(params.shape) * (step not in quiet_steps)
        drawn_size = np.maximum(there.sum(axis=1, keepdims=True), 1)
        g = (clipped_sum + noise) / (drawn_size if batch_size is None else batch_size)
        update, memory = direction(g, memory, step)
        params = params - learning_rate * (1.0 if factors is None else factors[step]) * update
    return params
