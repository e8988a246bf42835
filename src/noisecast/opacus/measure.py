"""What a PyTorch model's per-example gradients look like, computed by Opacus' own machinery. Without noise."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from numpy.typing import NDArray
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule  # pyright: ignore[reportMissingImports]
from opacus.utils.uniform_sampler import UniformWithReplacementSampler  # pyright: ignore[reportMissingImports]

SAME_LOSS = 0.01  # of a loss: bfloat16 rounds to four thousandths


@dataclass(frozen=True, kw_only=True)
class NonPrivateGradients:
    """Per-example gradients at given parameters, in numbers. All computed without noise: not to be published.

    num_params: d, trainable ones.   num_examples: those measured.   l2_clip_norm: C of what is clipped [loss/params].
    non_private_norms: |g_i|; (num_examples,) [loss/params].
    non_private_loss: mean loss over the examples [loss].
    non_private_gradient_norm: |mean of g_i|, unclipped [loss/params].
    non_private_example_noise_std: sqrt(mean over coordinates of Var_i clip(g_i)_j), per coordinate, of the examples
      whose gradient is finite [loss/params].
    """

    num_params: int
    num_examples: int
    l2_clip_norm: float
    non_private_norms: NDArray[np.float64] = field(repr=False)
    non_private_loss: float
    non_private_gradient_norm: float
    non_private_example_noise_std: float

    def non_private_quantiles(self, *levels: float) -> tuple[float, ...]:
        """Quantiles of the gradient norms, e.g. (0.5,): the median [loss/params]."""
        return tuple(float(q) for q in np.quantile(self.non_private_norms, levels))

    def non_private_share_clipped(self, l2_clip_norm: float | None = None) -> float:
        """The share of examples whose gradient is longer than a clip norm, C unless another is given."""
        clip = self.l2_clip_norm if l2_clip_norm is None else l2_clip_norm
        return float(np.mean(~(self.non_private_norms <= clip)))


def measure(
    module: torch.nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    data_loader: torch.utils.data.DataLoader,
    *,
    l2_clip_norm: float,
    loss_reduction: str = "mean",
) -> NonPrivateGradients:
    """Gradient norms, the share that a clip would shorten and the spread that is left, at the module's parameters.

    Reads the examples without noise: measure on a public proxy, or keep the numbers to yourself. The module is copied
    and not changed; it runs in training mode, as under `make_private`.

    Args:
      module: as it is before `make_private`, of layers that Opacus supports.
      loss_fn: loss_fn(module(inputs), targets) -> scalar over the batch.
      data_loader: gives (inputs, targets), each example once: the one that you would hand to `make_private`.
      l2_clip_norm: C > 0 [loss/params]; inf for none.
      loss_reduction: what loss_fn does over the batch, "mean" or "sum". Opacus trusts it, and where it is not so every
        norm is wrong by the batch size; here it is looked at, by a batch in which every example comes twice.
    Raises: TypeError or ValueError for a module, loader or loss of another kind.

    >>> data = torch.utils.data.TensorDataset(torch.tensor([[3.0], [0.5]]), torch.ones(2, 1))
    >>> module = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(module.weight)
    >>> seen = measure(module, torch.nn.MSELoss(), torch.utils.data.DataLoader(data, batch_size=2), l2_clip_norm=2.0)
    >>> seen.non_private_norms.tolist(), seen.non_private_share_clipped(), seen.non_private_example_noise_std
    ([6.0, 1.0], 0.5, 0.5)
    """
    _check(module, loss_fn, data_loader, l2_clip_norm, loss_reduction)
    copied = GradSampleModule(copy.deepcopy(module).train(), loss_reduction=loss_reduction)
    params: list[Any] = [param for param in copied.parameters() if param.requires_grad]
    sums = [torch.zeros(3, *param.shape, dtype=torch.float64, device=param.device) for param in params]
    norms, losses, kept = [], 0.0, 0
    for loss in _losses(copied, loss_fn, data_loader):
        norm = torch.stack([_flat(param).norm(dim=1, dtype=torch.float64) for param in params]).norm(dim=0)
        finite = norm.isfinite()
        factor = (l2_clip_norm / norm[finite].clamp(min=1e-300)).clamp(max=1.0)
        for param, (mean, total, squares) in zip(params, sums):
            gradients = param.grad_sample[finite].double()
            mean += gradients.sum(dim=0)
            clipped = gradients * factor.reshape(-1, *(1 for _ in param.shape))
            total += clipped.sum(dim=0)
            squares += clipped.square().sum(dim=0)
        norms.append(norm.cpu().numpy())
        losses += loss * (len(norm) if loss_reduction == "mean" else 1)
        kept += int(finite.sum())
    if kept == 0:
        raise ValueError("Expected at least one example with a finite gradient, got none.")
    num_params, count = sum(param.numel() for param in params), sum(len(part) for part in norms)
    variance = sum(float((squares / kept - (total / kept) ** 2).clamp(min=0).sum()) for _, total, squares in sums)
    return NonPrivateGradients(
        num_params=num_params,
        num_examples=count,
        l2_clip_norm=float(l2_clip_norm),
        non_private_norms=np.concatenate(norms),
        non_private_loss=losses / count,
        non_private_gradient_norm=math.sqrt(sum(float(mean.square().sum()) for mean, _, _ in sums)) / kept,
        non_private_example_noise_std=math.sqrt(variance / num_params),
    )


def _flat(param: Any) -> Any:
    return param.grad_sample.flatten(start_dim=1) if param.ndim else param.grad_sample[:, None]


def _losses(module: GradSampleModule, loss_fn: Callable, data_loader: Any) -> Iterator[float]:
    """Each batch's loss; its per-example gradients are in the parameters' grad_sample, (batch, ...)."""
    device = next(module.parameters()).device
    is_checked = False
    for batch in data_loader:
        if not (isinstance(batch, list | tuple) and len(batch) == 2):
            raise TypeError(f"Expected batches of (inputs, targets), got {type(batch).__name__}.")
        inputs, targets = (part.to(device) for part in batch)
        is_checked = is_checked or _reduces_as_declared(module, loss_fn, inputs, targets)
        module.zero_grad(set_to_none=True)
        loss = loss_fn(module(inputs), targets)
        if loss.ndim:
            raise ValueError(f"Expected loss_fn to return a scalar over the batch, got shape {tuple(loss.shape)}.")
        loss.backward()
        yield loss.item()


def _reduces_as_declared(module: GradSampleModule, loss_fn: Callable, inputs: Any, targets: Any) -> bool:
    """Whether this batch shows that the loss is a mean or a sum, as it was declared; a loss of 0 shows nothing.

    The per-example gradients cannot: Opacus scales them such that their mean is the batch's gradient, in any case.

    Raises: ValueError where it is not as it was declared, TypeError where that can neither be seen nor asked.
    """
    if not (isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
        if hasattr(loss_fn, "reduction"):  # then it was compared with what was declared
            return True
        raise TypeError(
            f"Expected inputs and targets as tensors, got {type(inputs).__name__} and {type(targets).__name__}; or "
            "give a loss_fn that says its reduction, as those of torch.nn do."
        )
    with torch.no_grad():
        module.eval()  # the same twice: no dropout
        once, twice = (loss_fn(module(torch.cat([inputs] * n)), torch.cat([targets] * n)) for n in (1, 2))
        module.train()
    if once.ndim or not (once.isfinite() and twice.isfinite()) or once == 0:
        return False
    grows, expected = float(twice / once), {"mean": 1.0, "sum": 2.0}[module.loss_reduction]
    if abs(grows - expected) > SAME_LOSS:
        raise ValueError(
            f"Expected a loss_fn that takes the {module.loss_reduction} over the batch and is {expected:g} times as "
            f"large when every example comes twice, got one that is {grows:.3g} times as large; give loss_reduction as "
            'it is, "mean" or "sum".'
        )
    return True


def _check(module: Any, loss_fn: Any, data_loader: Any, l2_clip_norm: float, loss_reduction: str) -> None:
    if isinstance(module, AbstractGradSampleModule):
        raise TypeError("Expected the plain module, got one that make_private has wrapped; measure before it does.")
    if not any(param.requires_grad for param in module.parameters()):
        raise ValueError("Expected a module with trainable parameters, got none.")
    if isinstance(getattr(data_loader, "batch_sampler", None), UniformWithReplacementSampler):
        raise TypeError("Expected a loader that gives each example once, got make_private's; pass the original one.")
    if not l2_clip_norm > 0:
        raise ValueError(f"Expected l2_clip_norm > 0, got {l2_clip_norm}.")
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f'Expected loss_reduction "mean" or "sum", got {loss_reduction!r}.')
    reduction = getattr(loss_fn, "reduction", loss_reduction)
    if reduction != loss_reduction:
        # Opacus cannot see the difference: every norm would be wrong by the batch size.
        raise ValueError(f"Expected a loss_fn with reduction {loss_reduction!r}, got {reduction!r}.")
