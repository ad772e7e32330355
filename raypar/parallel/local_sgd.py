"""Local SGD: every rank trains on its own shares, and every k steps the weights are averaged.

Stich 2019, "Local SGD converges fast and communicates little", https://arxiv.org/abs/1805.09767. Between two averages
the ranks' weights differ: the losses are not those of one worker. What an optimizer carries from step to step
(momentum, say) stays each rank's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from raypar.parallel.fsdp import agree_on_buffers
from raypar.parallel.strategy import Batch, ForwardBackward, NoParallelism, Task, same_share_everywhere


class LocalSgd(NoParallelism):
    """Averaging every ``config["sync_every"]`` steps, by torch's own averager."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.share = same_share_everywhere(task)
        self._period = task.config["sync_every"]
        self._average = copy.deepcopy(task.model)
        self.reset_state()

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        # A rank's own mean, not its part of the global one; without a sample of its own it stays where it is.
        return super().forward_backward(batch._replace(weight=float(batch.num_samples > 0)), do)

    def sync_weights(self) -> None:
        self._averager.average_parameters(iter(self._model.parameters()))

    def reset_state(self) -> None:
        self._averager = PeriodicModelAverager(self._period)
        self._averager.step = 1  # torch's averages after steps 0, k, 2k, …; here it is after k, 2k, …

    def state(self) -> dict[str, Any]:
        return {"step": self._averager.step}

    def load(self, state: Mapping[str, Any]) -> None:
        self._averager.step = state["step"]

    def full_model(self) -> nn.Module:
        """The average of the ranks' weights; they go on with their own. Of buffers, the first rank's."""
        self._average.load_state_dict(self._model.state_dict())
        assert dist.group.WORLD is not None
        average_parameters(iter(self._average.parameters()), dist.group.WORLD)
        agree_on_buffers(self._average)
        return self._average
