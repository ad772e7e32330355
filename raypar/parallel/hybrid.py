"""Hybrid parallelism on a mesh of ranks: data parallelism over replicas, each of them a pipeline of split layers.

Ranks that split a layer are neighbours, since they talk most; then come the stages of a pipeline, then the replicas
(the order of Narayanan et al. 2021, https://arxiv.org/abs/2104.04473).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from raypar.parallel import pipeline, tensor
from raypar.parallel.pipeline import Stages
from raypar.parallel.strategy import (
    Batch,
    ForwardBackward,
    SplitModel,
    Task,
    broadcast_buffers,
    flattened,
    take_gradients,
)
from raypar.parallel.tensor import plan_of, split_layers
from raypar.study.workload import Config, Workload

DEFAULT_BUCKET_MB = 25.0  # as DDP has it


class Hybrid(SplitModel):
    """``num_workers = data x pipeline_size x tensor_size``; the data dimension is what is left."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        config = task.config
        num_stages, num_splits = config["pipeline_size"], config["tensor_size"]
        self._num_replicas = config["num_workers"] // (num_stages * num_splits)
        sizes = self._num_replicas, num_stages, num_splits
        mesh = init_device_mesh(task.context.device.type, sizes, mesh_dim_names=("data", "pipeline", "tensor"))
        self._data = mesh.get_group("data")
        self.share = mesh.get_local_rank("data"), self._num_replicas
        plan = plan_of(task.workload, task.model) if num_splits > 1 else {}
        self._stages: Stages | None = None
        if num_stages > 1:
            self._layer_group = mesh.get_group("pipeline")
            self._stages = Stages(task, self._layer_group)
            names = self._stages.local_names
            plan = {k: v for k, v in plan.items() if any(k == name or k.startswith(f"{name}.") for name in names)}
        split_layers(task.model, plan, mesh["tensor"])
        self.counts_samples = mesh.get_local_rank("tensor") == 0
        if self._stages is not None:
            self.depends_on_shape = True
            self.counts_samples = self.counts_samples and self._stages.is_last
            self.module = nn.ModuleList(self._stages.modules.values())
        bucket_mb = config["bucket_mb"]
        self._bucket_bytes = int((DEFAULT_BUCKET_MB if bucket_mb is None else bucket_mb) * 2**20)

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        if self._stages is not None:
            return self._stages.forward_backward(batch, do)
        return super().forward_backward(batch, do)

    def global_weight(self, weight: Tensor) -> Tensor:
        return self._summed_weight(weight)

    def sync_gradients(self) -> None:
        if self._num_replicas > 1:
            _average(list(self.module.parameters()), self._data, self._bucket_bytes)

    def full_model(self) -> nn.Module:
        complete = super().full_model()
        return broadcast_buffers(self._stages.fill(complete) if self._stages is not None else complete, self._device)


def _average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int) -> None:
    """Replace every gradient by its mean over the group; several travel as one, up to `bucket_bytes`."""
    buckets: list[list[nn.Parameter]] = [[]]
    size = 0
    for p in reversed([p for p in parameters if p.requires_grad]):
        num_bytes = (p.to_local() if isinstance(p, DTensor) else p).nbytes
        last = buckets[-1]
        if last and (size + num_bytes > bucket_bytes or p.dtype != last[0].dtype):
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += num_bytes
    for bucket in filter(None, buckets):
        flat = flattened(bucket)
        dist.all_reduce(flat, group=group)
        take_gradients(bucket, flat / dist.get_world_size(group))


def check_compatible(workload: Workload, config: Config) -> tuple[str, str] | None:
    """Return why a workload's model can't be split so, and the fix; None if it can."""
    problem = pipeline.check_compatible(workload, config) if config["pipeline_size"] > 1 else None
    return problem or (tensor.check_compatible(workload, config) if config["tensor_size"] > 1 else None)


STRATEGY = Hybrid
