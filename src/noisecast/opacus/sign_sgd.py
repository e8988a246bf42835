"""DP-SignSGD as a PyTorch optimizer."""

from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from noisecast.optimizers.optimizer import check_learning_rate


class DPSignSGD(torch.optim.Optimizer):
    """x_{k+1} = x_k - lr sign(g_k), coordinate by coordinate, with sign(0) = 0 (as `noisecast.DPSignSGD`).

    Hand it to `PrivacyEngine.make_private`: Opacus clips, adds the noise and then calls this step, so that g_k is the
    private gradient and its sign is post-processing, which costs no privacy and is given no credit for any. On its own,
    without `make_private`, it is sign descent and private in no way. No size of the gradient enters the step: what
    Opacus divides by does not matter, and `lr` is the distance that each parameter moves.

    Args:
      params: parameters, or groups of them with an `lr` each.   lr: learning rate eta > 0 [params].
    Raises: ValueError for an lr that is not a finite number > 0.

    >>> weights = torch.nn.Parameter(torch.zeros(3))
    >>> weights.grad = torch.tensor([5.0, 0.0, -0.1])
    >>> DPSignSGD([weights], lr=0.5).step()
    >>> weights.tolist()
    [-0.5, 0.0, 0.5]
    """

    def __init__(self, params: Any, lr: float):
        check_learning_rate(lr)
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; `closure`, if given, computes the loss and the gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(torch.sign(param.grad), alpha=-group["lr"])
        return loss
