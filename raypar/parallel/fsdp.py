"""Fully sharded data parallelism: each rank keeps a part of every layer's weights, gradients and optimizer state.

A layer's weights are gathered just before they are used, and its gradients are reduced to the rank that keeps them
(Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054; Zhao et al. 2023, https://arxiv.org/abs/2304.11277).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from raypar.parallel.strategy import Batch, DataParallelism, ForwardBackward, SplitModel, Task, broadcast_buffers


class FullyShard(SplitModel, DataParallelism):
    """torch's ``fully_shard``, around every unit of the model and around what is left of it."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        mesh = init_device_mesh(task.context.device.type, (task.context.world_size,))
        reshard = task.config["fsdp_reshard"]
        for unit in units_of(task.model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        sharded = fully_shard(task.model, mesh=mesh, reshard_after_forward=reshard)
        assert isinstance(sharded, FSDPModule)
        self._sharded = sharded

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        return do.run_in_parts(self.module, batch, self._num_parts, self._no_sync)

    def full_model(self) -> nn.Module:
        return broadcast_buffers(super().full_model())

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        self._sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._sharded.set_requires_gradient_sync(True)


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the parts whose weights are gathered together: the members of the outermost containers that have any.

    For example the blocks of a transformer or of a ResNet. Layers outside of them go with the model itself.
    """
    units: list[nn.Module] = []

    def look(module: nn.Module, in_container: bool) -> None:
        is_container = isinstance(module, (nn.Sequential, nn.ModuleList))
        if in_container and not is_container:
            if any(True for _ in module.parameters()):
                units.append(module)
            return
        for child in module.children():
            look(child, is_container)

    look(model, False)
    return units


STRATEGY = FullyShard
