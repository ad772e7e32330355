"""Fully sharded: each rank keeps a part of every layer's weights, gradients and optimizer state.

A layer's weights are gathered just before they are used, and its gradients are reduced to the rank that keeps them
(Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054; Zhao et al. 2023, https://arxiv.org/abs/2304.11277).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from raypar.parallel.strategy import Batch, ForwardBackward, NoParallelism, Task, clip, same_share_everywhere


class FullyShard(NoParallelism):
    """torch's ``fully_shard``, around every unit of the model and around what is left of it."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.share = same_share_everywhere(task)
        self._complete = copy.deepcopy(task.model)
        mesh = init_device_mesh(task.context.device.type, (task.context.world_size,))
        reshard = task.config["fsdp_reshard"]
        for unit in units_of(task.model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        sharded = fully_shard(task.model, mesh=mesh, reshard_after_forward=reshard)
        assert isinstance(sharded, FSDPModule)
        self._sharded = sharded

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        return do.run_in_parts(self.module, batch, self._num_parts, self._no_sync)

    def clip(self, max_norm: float) -> Tensor:
        return clip(list(self._model.parameters()), max_norm)

    def full_model(self) -> nn.Module:
        gather(self._model, self._complete)
        agree_on_buffers(self._complete)
        return self._complete

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        self._sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._sharded.set_requires_gradient_sync(True)


def units_of(model: nn.Module) -> list[nn.Module]:
    """The parts whose weights are gathered together: the members of the outermost containers that have any.

    The blocks of a transformer, say, or of a ResNet. What is in none of them goes with the whole model.
    """
    found: list[nn.Module] = []

    def look(module: nn.Module, in_container: bool) -> None:
        is_container = isinstance(module, (nn.Sequential, nn.ModuleList))
        if in_container and not is_container:
            if any(True for _ in module.parameters()):
                found.append(module)
            return
        for child in module.children():
            look(child, is_container)

    look(model, False)
    return found


def gather(split: nn.Module, complete: nn.Module) -> None:
    """Fill a plain copy of a model with the weights that are split among the ranks, and with this rank's buffers."""
    whole = dict(complete.named_parameters())
    with torch.no_grad():
        for name, own in split.named_parameters():
            whole[name].copy_(own.full_tensor() if isinstance(own, DTensor) else own)
        own_buffers = dict(split.named_buffers())
        for name, buffer in complete.named_buffers():
            buffer.copy_(own_buffers[name])


def agree_on_buffers(complete: nn.Module) -> None:
    """The first rank's count: each rank has seen samples of its own, say for a batch norm's running means."""
    for buffer in complete.buffers():
        dist.broadcast(buffer, src=0)
