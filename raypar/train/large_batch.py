"""Optimizers for large batches: each layer's update is scaled by a trust ratio of its own.

Parameters of one dimension (biases, the scale and shift of a normalisation) are left out of that, and of weight decay,
as is usual for both: their norms say little, and decaying them towards 0 harms. They take the plain lr.

Nothing here waits for the device: the ratios stay tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling: You, Gitman and Ginsburg 2017, arXiv:1708.03888, algorithm 1.

    For a layer's weights w and gradient g, with weight decay beta, momentum m and trust coefficient eta::

        ratio = eta |w| / (|g| + beta |w|)
        v = m v + lr ratio (g + beta w)
        w = w - v

    with ratio = 1 where |w| or |g| is 0, and ratio = 1, beta = 0 for parameters of one dimension. The norms are
    Euclidean, over all elements of a parameter tensor.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = _loss_of(closure)
        for group in self.param_groups:
            for weights in _with_gradient(group):
                update = weights.grad
                if weights.ndim > 1:
                    decay = group["weight_decay"]
                    w, g = weights.norm(), update.norm()
                    ratio = _trust_ratio(group["trust_coefficient"] * w, g + decay * w, (w > 0) & (g > 0))
                    update = update.add(weights, alpha=decay).mul_(ratio)
                state = self.state[weights]
                if not state:
                    state["velocity"] = torch.zeros_like(weights)
                # The lr is in the velocity, not outside as in torch's SGD: that is where the paper has it.
                velocity = state["velocity"].mul_(group["momentum"]).add_(update, alpha=group["lr"])
                weights.sub_(velocity)
        return loss


class LAMB(Optimizer):
    """Layer-wise adaptive moments for batch training: You et al. 2020, arXiv:1904.00962, algorithm 2.

    For a layer's weights w and gradient g at step t = 1, 2, …, with weight decay lambda::

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        w = w - lr |w| / |r + lambda w| (r + lambda w)

    The paper's phi, which bounds |w|, is the identity. The ratio is 1 where |w| or |r + lambda w| is 0; it is 1, and
    lambda = 0, for parameters of one dimension. The norms are Euclidean, over all elements of a parameter tensor.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = _loss_of(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weights in _with_gradient(group):
                state = self.state[weights]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(weights), square=torch.zeros_like(weights))
                state["step"] += 1
                mean = state["mean"].mul_(beta1).add_(weights.grad, alpha=1 - beta1)
                square = state["square"].mul_(beta2).addcmul_(weights.grad, weights.grad, value=1 - beta2)
                root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                update = (mean / (1 - beta1 ** state["step"])).div_(root)
                if weights.ndim > 1:
                    update.add_(weights, alpha=group["weight_decay"])
                    w, u = weights.norm(), update.norm()
                    update.mul_(_trust_ratio(w, u, (w > 0) & (u > 0)))
                weights.sub_(update, alpha=group["lr"])
        return loss


def _loss_of(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _with_gradient(group: dict[str, Any]) -> list[Any]:
    return [p for p in group["params"] if p.grad is not None]


def _trust_ratio(above: Tensor, below: Tensor, usable: Tensor) -> Tensor:
    """The quotient of two scalars, and 1 where it would be 0 or undefined: such a layer has to be able to move."""
    return torch.where(usable, above / below, torch.ones_like(above))
