"""Gather and broadcast: gradients are gathered at rank 0, which alone runs the optimizer and broadcasts the weights.

This is how data parallelism is written with MPI by hand: scatter the data, compute, gather the results, broadcast the
weights. Scattering takes no message here: every rank has the data set and takes its share by index. Rank 0 receives
(N - 1) gradients one after the other over its one link, where an all-reduce uses all links at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypar.parallel.base import DataParallelism
from raypar.study.strategy import Exchange, StrategyTraits

if TYPE_CHECKING:
    from raypar.parallel.strategy import Task

MASTER = 0


class GatherBroadcast(DataParallelism):
    """Gather, optimizer step at the master, broadcast."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.runs_optimizer = task.context.rank == MASTER
        self._world_size = task.context.world_size
        self._trained = [p for p in task.model.parameters() if p.requires_grad]
        self._device = task.context.device

    def sync_gradients(self) -> None:
        import torch
        import torch.distributed as dist

        from raypar.parallel.strategy import flattened, take_gradients

        flat = flattened(self._trained)
        if not self.runs_optimizer:
            dist.gather(flat, dst=MASTER)
            return
        parts = [torch.empty_like(flat) for _ in range(self._world_size)]
        dist.gather(flat, parts, dst=MASTER)
        take_gradients(self._trained, torch.stack(parts).mean(0))

    def sync_weights(self) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.utils import parameters_to_vector, vector_to_parameters

        from raypar.parallel.strategy import broadcast_buffers

        with torch.no_grad():
            flat = parameters_to_vector(self._trained)
            dist.broadcast(flat, src=MASTER)
            vector_to_parameters(flat, self._trained)
        # Each rank's step changes its buffers, such as batch norm's running means; the master's are used.
        broadcast_buffers(self._model, self._device)


STRATEGY = StrategyTraits(
    build=GatherBroadcast,
    splits="the batch; a master gathers gradients and broadcasts weights",
    built_on="`torch.distributed`",
    exchange=Exchange.HOST,
)
