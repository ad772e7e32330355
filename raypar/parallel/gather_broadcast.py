"""Gather and broadcast: gradients are gathered at rank 0, which alone runs the optimizer and broadcasts the weights.

This is how data parallelism is written with MPI by hand: scatter the data, compute, gather the results, broadcast the
weights. Scattering takes no message here: every rank has the data set and takes its share by index. Rank 0 receives
(N - 1) gradients one after the other over its one link, where an all-reduce uses all links at once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from raypar.parallel.strategy import DataParallelism, Task

MASTER = 0


class GatherBroadcast(DataParallelism):
    """Gather, optimizer step at the master, broadcast."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.runs_optimizer = task.context.rank == MASTER
        self._world_size = task.context.world_size
        self._trained = [p for p in task.model.parameters() if p.requires_grad]
        # A step changes them beside the weights, for example batch norm's running means: the master's count.
        self._buffers = list(task.model.buffers())

    def sync_gradients(self) -> None:
        for p in self._trained:
            if p.grad is None:  # took no part in this batch; every rank has to send as much as the others
                p.grad = torch.zeros_like(p)
        flat = torch.cat([p.grad.reshape(-1) for p in self._trained if p.grad is not None])
        if not self.runs_optimizer:
            dist.gather(flat, dst=MASTER)
            return
        parts = [torch.empty_like(flat) for _ in range(self._world_size)]
        dist.gather(flat, parts, dst=MASTER)
        means = torch.stack(parts).mean(0).split([p.numel() for p in self._trained])  # type: ignore[no-untyped-call]
        for parameter, mean in zip(self._trained, means, strict=True):
            parameter.grad = mean.view_as(parameter)

    def sync_weights(self) -> None:
        with torch.no_grad():
            flat = parameters_to_vector(self._trained)
            dist.broadcast(flat, src=MASTER)
            vector_to_parameters(flat, self._trained)
        for buffer in self._buffers:
            dist.broadcast(buffer, src=MASTER)


STRATEGY = GatherBroadcast
