"""The norm of gradients of which a rank has only a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip(parameters: Sequence[nn.Parameter], max_norm: float, others: dist.ProcessGroup | None = None) -> Tensor:
    """``clip_grad_norm_`` where some gradients are split among ranks, and other ranks have other layers.

    Args:
        others: the ranks that have the model's other layers, this one included; None: there are none.

    Returns:
        The norm of all gradients before, of shape ``()``.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    # Of a split gradient the norm is that of the whole, the same on every rank.
    squares = [
        norm.full_tensor() if isinstance(norm, DTensor) else norm
        for norm in (get_total_norm(part) ** 2 for part in _by_layout(gradients) if part)
    ]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    if others is not None:
        dist.all_reduce(total, group=others)
    norm = total.sqrt()
    for part in _by_layout(parameters):
        clip_grads_with_norm_(part, max_norm, norm)
    return norm


def _by_layout(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """torch's functions take either split tensors or plain ones."""
    return [[t for t in tensors if isinstance(t, DTensor) is split] for split in (False, True)]
