"""Where a rank stands among the others, and what it can do with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """This rank's place in its trial's process group (there is none for one rank)."""

    rank: int
    world_size: int
    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        """The float64 values summed over all ranks; on the CPU."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        """Each value's largest over all ranks."""
        found: list[float] = self._reduced(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX).tolist()
        return found

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def _reduced(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world_size > 1:
            # NCCL reduces on the GPU only, gloo where the values are.
            values = values.to(self.device if self.device.type == "cuda" else "cpu")
            dist.all_reduce(values, how)
        return values.cpu()
