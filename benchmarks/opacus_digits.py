"""What the advice of `noisecast.opacus` is worth: the network of examples/opacus_advice.py, trained with Opacus.

  python -m benchmarks.opacus_digits

Learning rates of DP-SGD and DP-SignSGD are tuned at the first epsilon (`benchmarks.transfer.search`: factors of 2, at
the best sqrt 2), carried to the second as `advise` says, and tuned there again. Final training loss, mean of some runs
with the same seeds at every rate. Seeds make the runs repeatable, so none is private; the digits are public.
"""

import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cyclopts import App
from opacus import PrivacyEngine
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

import noisecast as nc
from benchmarks.transfer import Loss, Losses, search
from noisecast.cli.output import TABLE_STYLE
from noisecast.opacus import DPSignSGD, advise, measure, poisson_sampler

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "opacus_advice.py"))
NUM_STEPS, TARGET_DELTA, L2_CLIP_NORM = (EXAMPLE[name] for name in ("NUM_STEPS", "TARGET_DELTA", "L2_CLIP_NORM"))
console = Console(width=130, highlight=False)
app = App(help=__doc__, help_format="plaintext")


@dataclass(frozen=True)
class Contestant:
    """An optimizer of torch, what noisecast calls it, and where its search starts."""

    step: Callable[..., torch.optim.Optimizer]
    kind: Any
    start: float


CONTESTANTS = (Contestant(torch.optim.SGD, nc.DPSGD, 1.0), Contestant(DPSignSGD, nc.DPSignSGD, 0.01))


@app.default
def main(*, seeds: int = 8, from_epsilon: float = 8.0, to_epsilon: float = 1.0, num_steps: int = NUM_STEPS) -> None:
    torch.set_num_threads(1)
    train, _ = EXAMPLE["digits"]()
    mechanisms = [_mechanism(train, epsilon, num_steps) for epsilon in (from_epsilon, to_epsilon)]
    old, new = ([_losses(train, c, m, num_steps, seeds) for c in CONTESTANTS] for m in mechanisms)
    tuned = [search(losses, c.start, halvings=1)[0] for losses, c in zip(old, CONTESTANTS)]
    advised = _advised(train, mechanisms[0], tuned, to_epsilon, num_steps)
    shown = Table(title=f"Final training loss at ε = {to_epsilon:g}, mean of {seeds} runs ± s.e.", **TABLE_STYLE)
    for header in (
        "optimizer",
        f"rate tuned at ε = {from_epsilon:g}",
        "kept",
        "advised rate",
        "as advised",
        "best rate",
        "best",
    ):
        shown.add_column(header, justify="left" if header == "optimizer" else "right")
    for contestant, kept, carried, losses in zip(CONTESTANTS, tuned, advised, new):
        _, found = search(losses, carried, halvings=1)
        found = {**found, **losses([kept, carried])}
        best = min(found, key=lambda rate: found[rate].mean)
        cells = [f"{rate:.3g}" if shows_rate else _text(found[rate]) for rate, shows_rate in (
            (kept, True), (kept, False), (carried, True), (carried, False), (best, True), (best, False)
        )]  # fmt: skip
        shown.add_row(contestant.kind.name, *cells)
    console.print(shown)


def _mechanism(train: Any, epsilon: float, num_steps: int) -> nc.SampledGaussian:
    sampler = poisson_sampler(DataLoader(train, batch_size=128))
    plan = nc.SampledGaussian(noise_multiplier=0.0, l2_clip_norm=L2_CLIP_NORM, sampler=sampler)
    return nc.calibrate_noise_multiplier(plan, target_epsilon=epsilon, target_delta=TARGET_DELTA, num_steps=num_steps)


def _advised(
    train: Any, mechanism: nc.SampledGaussian, tuned: list[float], epsilon: float, num_steps: int
) -> list[float]:
    """Learning rates for another epsilon, from gradients at a random start."""
    torch.manual_seed(0)
    seen = measure(
        EXAMPLE["network"](), torch.nn.CrossEntropyLoss(), DataLoader(train, batch_size=128), l2_clip_norm=L2_CLIP_NORM
    )
    optimizers = [contestant.kind(learning_rate=rate) for contestant, rate in zip(CONTESTANTS, tuned)]
    advice = advise(
        seen,
        mechanism,
        optimizers=optimizers,
        num_steps=num_steps,
        target_epsilons=[epsilon],
        target_delta=TARGET_DELTA,
    )
    console.print(f"Advice for ε = {epsilon:g}:", *advice.epsilons[0].sentences, sep="\n- ")
    found = {each.name: each.retuned.learning_rate for each in advice.epsilons[0].optimizers if each.retuned}
    return [found[contestant.kind.name] for contestant in CONTESTANTS]


def _losses(train: Any, contestant: Contestant, mechanism: nc.SampledGaussian, num_steps: int, seeds: int) -> Losses:
    seen: dict[float, Loss] = {}

    def losses(rates: list[float]) -> Mapping[float, Loss]:
        for rate in rates:
            if rate not in seen:
                runs = [_trained(train, contestant, rate, mechanism, num_steps, seed) for seed in range(seeds)]
                seen[rate] = Loss(float(np.mean(runs)), float(np.std(runs, ddof=1) / seeds**0.5))
                console.print(f"{contestant.kind.name} {mechanism.noise_multiplier:.3f} {rate:.4g} {_text(seen[rate])}")
        return {rate: seen[rate] for rate in rates}

    return losses


def _trained(
    train: Any, contestant: Contestant, rate: float, mechanism: nc.SampledGaussian, num_steps: int, seed: int
) -> float:
    """The final training loss of one run with Opacus."""
    torch.manual_seed(seed)
    module, loss_fn = EXAMPLE["network"](), torch.nn.CrossEntropyLoss()
    private_module, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=module,
        optimizer=contestant.step(module.parameters(), lr=rate),
        data_loader=DataLoader(train, batch_size=128),
        noise_multiplier=mechanism.noise_multiplier,
        max_grad_norm=L2_CLIP_NORM,
    )
    for _ in range(num_steps // len(loader)):
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(private_module(x), y).backward()
            optimizer.step()
    x, y = train.tensors
    with torch.no_grad():
        return float(loss_fn(module(x), y))


def _text(loss: Loss) -> str:
    return f"{loss.mean:.4f} ± {loss.error:.4f}"


if __name__ == "__main__":
    app()
