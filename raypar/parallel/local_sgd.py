"""Local SGD: every rank trains on its own shares, and every k steps the weights are averaged.

Stich 2019, "Local SGD converges fast and communicates little", https://arxiv.org/abs/1805.09767. Between two averages
the ranks' weights differ: the losses are not those of one worker. The state of each rank's optimizer (momentum, for
example) is not averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raypar.parallel.base import DataParallelism
from raypar.study.strategy import StrategyTraits
from raypar.study.workload import whole_number

if TYPE_CHECKING:
    from torch import Tensor, nn

    from raypar.parallel.strategy import Batch, ForwardBackward, Task


class LocalSgd(DataParallelism):
    """Averaging every ``config["sync_every"]`` steps."""

    def __init__(self, task: Task) -> None:
        from raypar.parallel.strategy import HOST, copied

        super().__init__(task)
        self._period = task.config["sync_every"]
        self._context = task.context
        self._trained = [p for p in task.model.parameters() if p.requires_grad]
        self._average = copied(task.model, HOST)
        self.reset_state()

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        # The loss of this rank's samples, not its part of the global loss. A rank without samples keeps its weights.
        alone = batch._replace(weight=float(batch.num_samples > 0), num_global=batch.num_samples)
        return super().forward_backward(alone, do)

    def gradient_factor(self, batch: Batch, weight: Tensor) -> Tensor:
        import torch

        return torch.where(weight != 0, batch.num_samples / weight, float(batch.num_samples > 0))

    def sync_weights(self) -> None:
        if not self._step % self._period:
            import torch
            import torch.distributed as dist
            from torch.nn.utils import parameters_to_vector, vector_to_parameters

            # All parameters, unlike torch's PeriodicModelAverager, which skips those without a gradient in the last
            # step: these may differ between ranks.
            with torch.no_grad():
                flat = parameters_to_vector(self._trained) / self._context.world_size
                dist.all_reduce(flat)
                vector_to_parameters(flat, self._trained)
        self._step += 1

    def reset_state(self) -> None:
        self._step = 1

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step = state["step"]

    def full_model(self) -> nn.Module:
        """Return a model of the ranks' average weights and the first rank's buffers; the ranks continue with theirs."""
        import torch
        import torch.distributed as dist

        from raypar.parallel.strategy import broadcast_buffers

        with torch.no_grad():
            for part, average in zip(self._model.parameters(), self._average.parameters(), strict=True):
                mean = (part / self._context.world_size).contiguous()
                dist.all_reduce(mean)
                average.copy_(mean)
            for buffer, copied in zip(self._model.buffers(), self._average.buffers(), strict=True):
                copied.copy_(buffer)
        return broadcast_buffers(self._average, self._context.device)


STRATEGY = StrategyTraits(
    build=LocalSgd,
    splits="the batch; weights are averaged every `sync_every` steps",
    built_on="`torch.distributed`",
    options={"sync_every": whole_number(8, "number of steps between two averages of the weights", at_least=2)},
    scales_loss=True,
    takes_sparse_gradients=True,
    sync_every="sync_every",
)
