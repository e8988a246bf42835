"""What an Opacus run really does, as the mechanism that noisecast's accountant prices."""

import inspect
import math
from typing import Any

import opacus  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
from opacus.accountants import IAccountant  # pyright: ignore[reportMissingImports]
from opacus.data_loader import DPDataLoader  # pyright: ignore[reportMissingImports]
from opacus.optimizers import DPOptimizer  # pyright: ignore[reportMissingImports]
from opacus.utils.uniform_sampler import UniformWithReplacementSampler  # pyright: ignore[reportMissingImports]

from noisecast.privacy.accounting import PrivacySpent, epsilon_spent
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import Poisson

_BITS_OF_RAND = {torch.float32: 24, torch.float64: 53}


def mechanism_of(optimizer: Any, data_loader: Any) -> SampledGaussian:
    """The mechanism of each step, read off the optimizer and the loader that `make_private` returned.

    q is the probability with which the loader's own sampler draws a record, 1 / len(original loader) rounded up to what
    its float32 comparison makes of it, and not the one that Opacus' accountant is told, 1 / len(private loader), which
    may differ. B is what Opacus divides by: int(n / len(loader)), or 1 with loss_reduction="sum". It depends on the
    number n of records, so n must be public. Neighbours differ by adding or removing one record.

    Args:
      optimizer: the DPOptimizer of flat clipping. Ghost and per-layer clipping keep their clip norm in a second place,
        which may differ from the one that the noise is scaled by.
      data_loader: the DPDataLoader of the same call, not one wrapped by BatchMemoryManager.
    Raises:
      TypeError: for something else than these.
      ValueError: for batches that are not Poisson-sampled (`poisson_sampling=False`), distributed runs, other clipping
        than flat, and a pair that does not belong together.

    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.randn(100, 1))
    >>> module, loader = torch.nn.Linear(3, 1), torch.utils.data.DataLoader(data, batch_size=10)
    >>> _, optimizer, private_loader = opacus.PrivacyEngine().make_private(
    ...     module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), data_loader=loader,
    ...     noise_multiplier=2.0, max_grad_norm=0.5)
    >>> mechanism = mechanism_of(optimizer, private_loader)
    >>> mechanism.noise_std, mechanism.expected_batch_size, round(mechanism.sampling_probability, 6)
    (1.0, 10, 0.1)
    """
    if not isinstance(optimizer, DPOptimizer):
        raise TypeError(f"Expected the optimizer that make_private returned, got {type(optimizer).__name__}.")
    if type(optimizer) is not DPOptimizer:  # exactly this: a subclass may do anything, as adaptive clipping does
        raise ValueError(
            f"Expected an optimizer with one clip norm and one noise on one device, got {type(optimizer).__name__}, of "
            "which noisecast has no proof; make_private with clipping='flat', grad_sample_mode='hooks' on one process "
            "has one."
        )
    probability = _sampling_probability(data_loader)
    batch_size = _normaliser(optimizer, data_loader)
    return SampledGaussian(
        noise_multiplier=float(optimizer.noise_multiplier),
        l2_clip_norm=float(optimizer.max_grad_norm),
        sampler=Poisson(probability, batch_size),
    )


def poisson_sampler(data_loader: Any) -> Poisson:
    """The batches that `make_private` would draw from a plain loader: for planning, e.g. the noise for an epsilon.

    q = 1 / len(loader), whatever its batch_size, and B = int(n / int(1/q)), as Opacus computes them; loss_reduction
    "mean".

    Args:
      data_loader: as you would hand it to `make_private`.

    >>> data = torch.utils.data.TensorDataset(torch.zeros(1000, 3))
    >>> sampler = poisson_sampler(torch.utils.data.DataLoader(data, batch_size=96))
    >>> round(sampler.sampling_probability, 4), sampler.expected_batch_size           # 11 batches, not 1000/96 = 10.4
    (0.0909, 90)
    """
    if not isinstance(data_loader, torch.utils.data.DataLoader) or isinstance(data_loader, DPDataLoader):
        raise TypeError(f"Expected a plain DataLoader, got {type(data_loader).__name__}; see mechanism_of.")
    sample_rate = 1 / len(data_loader)
    return Poisson(_drawn_probability(sample_rate), _expected_batch_size(data_loader, int(1 / sample_rate)))


def privacy_spent(
    privacy_engine: opacus.PrivacyEngine, optimizer: Any, data_loader: Any, *, target_delta: float
) -> PrivacySpent:
    """The epsilon of the steps that the engine has counted, by noisecast's accountant: compare `get_epsilon`.

    Args:
      privacy_engine, optimizer, data_loader: of one `make_private`.   target_delta: 0 < delta < 1.
    Raises: ValueError where `mechanism_of` does, when noise or sampling changed during the run, when no step was
      counted, and when it is not this engine that counts the optimizer's steps.
    """
    mechanism = mechanism_of(optimizer, data_loader)
    if _accountant_of(optimizer) is not privacy_engine.accountant:
        raise ValueError(
            "Expected an optimizer whose steps this engine counts, got one with the step hook of another engine, of "
            "somebody else, or none: what was counted is not its steps. Pass what one make_private returned, and leave "
            "its step hook as it is."
        )
    history = list(privacy_engine.accountant.history)
    if len(history) > 1:
        raise ValueError(
            f"Expected one noise multiplier and one sampling rate in the whole run, got {len(history)} different "
            "stretches; account each with mechanism_of and compose them."
        )
    if not history:
        raise ValueError(
            "Expected an engine that has counted steps, got none: if steps were taken, its step hook was replaced and "
            "nothing is known of them."
        )
    noise_multiplier, sample_rate, num_steps = history[0]
    if noise_multiplier != optimizer.noise_multiplier or sample_rate != 1 / len(data_loader):
        raise ValueError(
            f"Expected the engine to have counted noise multiplier {optimizer.noise_multiplier} and sampling rate "
            f"1/{len(data_loader)}, got {noise_multiplier} and {sample_rate:.6g}; pass what one make_private returned."
        )
    return epsilon_spent(mechanism, num_steps=num_steps, target_delta=target_delta)


def _accountant_of(optimizer: Any) -> Any:
    """The accountant that the optimizer tells of its steps, None where its hook is not one that Opacus made."""
    hook = optimizer.step_hook
    is_opacus_own = inspect.isfunction(hook) and hook.__code__ in IAccountant.get_optimizer_hook_fn.__code__.co_consts
    return inspect.getclosurevars(hook).nonlocals["self"] if is_opacus_own else None


def _sampling_probability(data_loader: Any) -> float:
    if not isinstance(data_loader, torch.utils.data.DataLoader):
        raise TypeError(f"Expected the loader that make_private returned, got {type(data_loader).__name__}.")
    sampler = data_loader.batch_sampler
    if type(sampler) is not UniformWithReplacementSampler:
        raise ValueError(
            f"Expected a loader that draws Poisson batches on one process, got one with {type(sampler).__name__}, to "
            "which the Poisson number does not apply; use make_private(..., poisson_sampling=True)."
        )
    return _drawn_probability(sampler.sample_rate)


def _drawn_probability(sample_rate: float) -> float:
    """P(torch.rand() < sample_rate): rand is k / 2^24 in float32, and so a little more than the rate itself.

    >>> _drawn_probability(0.25), _drawn_probability(0.1) > 0.1, round(_drawn_probability(0.1), 6)
    (0.25, True, 0.1)
    """
    dtype = torch.get_default_dtype()
    if dtype not in _BITS_OF_RAND:
        raise ValueError(f"Expected torch's default dtype to be float32 or float64, got {dtype}.")
    steps = 2.0 ** _BITS_OF_RAND[dtype]
    compared = torch.tensor(sample_rate, dtype=dtype).item()
    return min(math.ceil(compared * steps) / steps, 1.0)


def _normaliser(optimizer: Any, data_loader: Any) -> float:
    if optimizer.loss_reduction == "sum":
        return 1
    if optimizer.expected_batch_size != _expected_batch_size(data_loader, len(data_loader)):
        raise ValueError(
            f"Expected an optimizer and a loader of one make_private, got one that divides by "
            f"{optimizer.expected_batch_size} and one of {len(data_loader.dataset)} records in {len(data_loader)} "
            "batches."
        )
    return optimizer.expected_batch_size


def _expected_batch_size(data_loader: Any, num_batches: int) -> int:
    return int(len(data_loader.dataset) * (1 / num_batches))
