"""Networks on the device that is there: our dense engine, Opacus and JAX Privacy, in steps a second of wall time.

  python -m benchmarks.networks                     # on a GPU where JAX and torch see one
  JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES= python -m benchmarks.networks

All train the same network from the same start on batches of the same size: clip each example's gradient to C, sum, add
noise to every coordinate, divide by B, then SGD or Adam. Three steps without noise are compared first. Images are
random numbers: what a step costs does not depend on them. Contestants take turns, data in memory, without a loader.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory of the same device

import jax
import jax.numpy as jnp
import numpy as np
from cyclopts import App
from rich.console import Console
from rich.table import Table

import noisecast as nc
from benchmarks.linear_model import ROOT, SETTINGS, rows_of_batches
from benchmarks.peers import FixedBatches, PrivateSteps
from noisecast.cli.output import TABLE_STYLE
from noisecast.engines.dense import DenseRun

NUM_EXAMPLES, NUM_CLASSES, NUM_PEER_BATCHES = 60_000, 10, 4
CHECKED_STEPS, TOLERANCE = 3, 1e-3
ALMOST_NO_NOISE = 1e-6
OPTIMIZERS = ("DP-SGD", "DP-Adam")
VERSIONS_OF = ("jax", "torch", "opacus", "jax-privacy")
console = Console(width=130, highlight=False)
app = App(help=__doc__, help_format="plaintext")

# Weight and bias of each layer, in torch's order and layout, so that all count the parameters alike.
Params = Sequence[jax.Array]


@dataclass(frozen=True)
class Network:
    """Args: shapes: of each layer's weight.   input_shape: of one example.   apply: params, example -> logits (10,).
    torch_module: the same network, made by torch."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    input_shape: tuple[int, ...]
    apply: Callable[[Params, jax.Array], jax.Array]
    torch_module: Callable[[], Any]
    l2_clip_norm: float = 1.0

    def start(self) -> list[np.ndarray]:
        rng = np.random.default_rng(1)
        scaled = [(rng.normal(size=s) / np.sqrt(np.prod(s[1:]))).astype(np.float32) for s in self.shapes]
        return [array for weight in scaled for array in (weight, np.zeros(len(weight), np.float32))]

    def examples(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        images = rng.standard_normal((NUM_EXAMPLES, *self.input_shape), np.float32)
        return images, rng.integers(NUM_CLASSES, size=NUM_EXAMPLES).astype(np.int32)

    def loss(self, params: Params, example: tuple[jax.Array, jax.Array]) -> jax.Array:
        image, label = example
        return -jax.nn.log_softmax(self.apply(params, image))[label]


def _perceptron(params: Params, image: jax.Array) -> jax.Array:
    first, first_bias, second, second_bias = params
    return second @ jax.nn.relu(first @ image + first_bias) + second_bias


def _convolutions(params: Params, image: jax.Array) -> jax.Array:
    found = image[None]
    for weight, bias, padding in zip(params[:4:2], params[1:4:2], (3, 0)):
        found = jax.lax.conv_general_dilated(found, weight, (2, 2), [(padding, padding)] * 2)
        found = jax.nn.relu(found + bias[:, None, None])
        found = jax.lax.reduce_window(found, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 1, 1), "VALID")
    return _perceptron(params[4:], found.ravel())


def _torch_perceptron() -> Any:
    from torch import nn  # pyright: ignore[reportMissingImports]

    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, NUM_CLASSES))


def _torch_convolutions() -> Any:
    from torch import nn  # pyright: ignore[reportMissingImports]

    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES),
    )  # fmt: skip


NETWORKS = (
    Network("perceptron 784-256-10", ((256, 784), (NUM_CLASSES, 256)), (784,), _perceptron, _torch_perceptron),
    Network(
        "two convolutions, 28 x 28",
        ((16, 1, 8, 8), (32, 16, 4, 4), (32, 512), (NUM_CLASSES, 32)),
        (1, 28, 28),
        _convolutions,
        _torch_convolutions,
    ),
)


class Ours:
    """A group of runs in the dense engine, at different learning rates."""

    def __init__(self, network: Network, optimizer: str, batch_size: int, runs: int, noise_multiplier: float):
        scenarios = _scenarios(network, optimizer, batch_size, runs, noise_multiplier)
        self._run = DenseRun(scenarios, repeats=[0], root=ROOT)

    def advance(self, num_steps: int) -> None:
        self._run.advance(self._run.step + num_steps)
        self._run.block_until_ready()

    def params(self) -> np.ndarray:
        return self._run.params[0, 0]


def _scenarios(
    network: Network, optimizer: str, batch_size: int, runs: int, noise_multiplier: float
) -> list[nc.Scenario]:
    problem = nc.jax_model(network.loss, network.start(), network.examples(), microbatch_size=batch_size)
    mechanism = nc.SampledGaussian(
        noise_multiplier=noise_multiplier,
        l2_clip_norm=network.l2_clip_norm,
        sampler=nc.FixedSize(batch_size, NUM_EXAMPLES),
        adjacency=nc.Adjacency.REPLACE_ONE,
    )
    settings, kind = SETTINGS[optimizer], {"DP-SGD": nc.DPSGD, "DP-Adam": nc.DPAdam}[optimizer]
    optimizers = [kind(**settings | {"learning_rate": settings["learning_rate"] * 0.9**i}) for i in range(runs)]
    return [nc.Scenario(problem=problem, mechanism=mechanism, optimizer=o, num_steps=10**7) for o in optimizers]


@cache
def batches(network: Network, batch_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first batches of our own runs, whatever the optimizer: images and labels (B,) int64, as torch indexes."""
    images, labels = network.examples()
    batches = rows_of_batches(_scenarios(network, "DP-SGD", batch_size, 1, 1.0)[0], NUM_PEER_BATCHES)
    return [(images[rows], labels[rows].astype(np.int64)) for rows in batches]


def opacus(network: Network, optimizer: str, batch_size: int, mode: str, noise_multiplier: float) -> FixedBatches:
    import torch  # pyright: ignore[reportMissingImports]

    torch.backends.cudnn.allow_tf32 = noise_multiplier != ALMOST_NO_NOISE  # as `race` has it for JAX
    module = network.torch_module().to("cuda" if torch.cuda.is_available() else "cpu")
    return _steps(network, optimizer, batch_size, noise_multiplier).opacus(module, torch.nn.CrossEntropyLoss(), mode)


def jax_privacy(network: Network, optimizer: str, batch_size: int, noise_multiplier: float) -> FixedBatches:
    steps = _steps(network, optimizer, batch_size, noise_multiplier)
    return steps.jax_privacy(lambda params, *example: network.loss(params, example))


def _steps(network: Network, optimizer: str, batch_size: int, noise_multiplier: float) -> PrivateSteps:
    return PrivateSteps(
        optimizer,
        SETTINGS[optimizer],
        network.l2_clip_norm,
        noise_multiplier,
        batch_size,
        network.start(),
        batches(network, batch_size),
    )


def contestants(network: Network, optimizer: str, batch_size: int, runs: Sequence[int]) -> dict[str, tuple[int, Any]]:
    """Name: how many runs a step advances, and noise_multiplier -> the one in training. The first is the measure."""
    found: dict[str, tuple[int, Any]] = {}
    for number in runs:
        name = "noisecast, 1 run" if number == 1 else f"noisecast, {number} runs side by side"
        found[name] = number, partial(Ours, network, optimizer, batch_size, number)
    for mode in ("hooks", "functorch", "ghost"):
        found[f"Opacus {mode}"] = 1, partial(opacus, network, optimizer, batch_size, mode)
    found["JAX Privacy"] = 1, partial(jax_privacy, network, optimizer, batch_size)
    return found


@app.default
def main(
    *,
    batch_size: int = 512,
    runs: tuple[int, ...] = (1, 16),
    rounds: int = 3,
    seconds: float = 1.0,
    quick: bool = False,
) -> None:
    """Args: seconds: of a contestant's turn.   quick: DP-SGD of the perceptron alone."""
    card = jax.devices()[0].device_kind
    console.print(f"{card}, batches of {batch_size};", ", ".join(map(_with_version, VERSIONS_OF)))
    for network in NETWORKS[:1] if quick else NETWORKS:
        for optimizer in OPTIMIZERS[:1] if quick else OPTIMIZERS:
            rates = race(contestants(network, optimizer, batch_size, runs), rounds=rounds, seconds=seconds)
            best = max(np.median(each) for name, each in rates.items() if name.startswith("noisecast"))
            shown = Table(title=f"{network.name}, {optimizer}, on {card}", **TABLE_STYLE)
            for header in ("who", "run-steps/s", "least and most", "× of the peer"):
                shown.add_column(header)
            for name, each in rates.items():
                rate = float(np.median(each))
                ratio = "" if name.startswith("noisecast") else f"{best / rate:.1f}"
                shown.add_row(name, f"{rate:,.0f}", f"{min(each):,.0f} to {max(each):,.0f}", ratio)
            console.print(shown)


def _with_version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


def race(entered: dict[str, tuple[int, Any]], *, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Run-steps a second of wall time, one number a round. Raises: RuntimeError where two take different steps."""
    trainees, expected = {}, None
    for name, (_, start) in entered.items():
        try:
            with jax.default_matmul_precision("highest"):  # products of 11 bits hide what is compared
                found = _after_checked_steps(start)
        except ImportError as error:
            console.print(f"{name}: {error.name} is not installed")
            continue
        expected = found if expected is None else expected
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        console.print(f"{name}: {CHECKED_STEPS} steps without noise differ from ours by {error:.1e}")
        if not error <= TOLERANCE:
            raise RuntimeError(f"Expected {name} to take the steps that we take, got a difference of {error:.2g}.")
        trainees[name] = start(1.0)
    rates: dict[str, list[float]] = {name: [] for name in trainees}
    steps = {name: _steps_of_a_turn(trainee, seconds) for name, trainee in trainees.items()}
    for _ in range(rounds):
        for name, trainee in trainees.items():
            rates[name].append(entered[name][0] * steps[name] / _timed(trainee, steps[name]))
    return rates


def _after_checked_steps(start: Any) -> np.ndarray:
    """How far the parameters have moved after a few steps with next to no noise; (d,)."""
    trainee = start(ALMOST_NO_NOISE)
    before = trainee.params().astype(np.float64)
    trainee.advance(CHECKED_STEPS)
    return trainee.params() - before


def _steps_of_a_turn(trainee: Any, seconds: float) -> int:
    trainee.advance(CHECKED_STEPS)  # compile
    steps = 2
    while (spent := _timed(trainee, steps)) < 0.2 * seconds:
        steps *= 2
    return max(2, round(steps * seconds / spent))


def _timed(trainee: Any, steps: int) -> float:
    start = time.perf_counter()
    trainee.advance(steps)
    return time.perf_counter() - start


if __name__ == "__main__":
    app()
