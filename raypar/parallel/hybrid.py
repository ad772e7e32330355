"""Hybrid parallelism on a mesh of ranks: data parallelism over replicas, each of them a pipeline of split layers.

Ranks that split a layer are neighbours, since they talk most; then come the stages of a pipeline, then the replicas
(the order of Narayanan et al. 2021, https://arxiv.org/abs/2104.04473).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from raypar.parallel import pipeline, tensor
from raypar.parallel.base import SplitModel
from raypar.parallel.ddp import BUCKET_MB
from raypar.parallel.pipeline import Stages
from raypar.parallel.tensor import plan_of, split_layers
from raypar.study.space import Value
from raypar.study.strategy import Conflict, Exchange, StrategyTraits, WorkLayout
from raypar.study.workload import Config, Option, Workload, whole_number

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn

    from raypar.parallel.strategy import Batch, ForwardBackward, Task

DEFAULT_BUCKET_MB = 25.0  # DDP's default
OPTIONS: Mapping[str, Option] = {
    "tensor_size": whole_number(1, "workers that each layer is split among, in a hybrid"),
    "pipeline_size": whole_number(1, "workers in each pipeline, in a hybrid"),
    **pipeline.OPTIONS,
    "bucket_mb": BUCKET_MB,
}


def layout(config: Config) -> WorkLayout:
    """Return the sizes of the mesh; the number of replicas follows from the other two and the number of workers."""
    num_stages, num_splits = int(config["pipeline_size"]), int(config["tensor_size"])
    num_replicas = max(1, int(config["num_workers"]) // (num_stages * num_splits))
    return WorkLayout(num_shares=num_replicas, pipeline_size=num_stages, tensor_size=num_splits)


def layouts(num_workers: int) -> Iterator[Mapping[str, Value]]:
    """Yield the meshes that no other strategy has: not only data, nor a single pipeline or group of split layers."""
    sizes = [size for size in range(1, num_workers + 1) if not num_workers % size]
    for num_splits, num_stages in itertools.product(sizes, sizes):
        size = num_splits * num_stages
        if size == 1 or num_workers % size or num_workers in (num_splits, num_stages):
            continue
        of_pipeline = pipeline.layouts(num_stages) if num_stages > 1 else [{}]
        yield from ({"tensor_size": num_splits, "pipeline_size": num_stages, **each} for each in of_pipeline)


def conflicts(config: Config, swept: Collection[str]) -> Iterator[Conflict]:
    """Yield the conflicts of the mesh and of a pipeline."""
    yield from pipeline.conflicts(config, swept)
    replica_size = config["tensor_size"] * config["pipeline_size"]
    if config["num_workers"] > 1 and config["num_workers"] % replica_size:
        problem = f"must be a multiple of tensor_size x pipeline_size = {replica_size}"
        yield "num_workers", problem, f"use a multiple of {replica_size} workers"


class Hybrid(SplitModel):
    """A mesh of ``num_workers = replicas x pipeline_size x tensor_size``."""

    def __init__(self, task: Task) -> None:
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh

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
        from raypar.parallel.strategy import broadcast_buffers

        complete = super().full_model()
        return broadcast_buffers(self._stages.fill(complete) if self._stages is not None else complete, self._device)


def _average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int) -> None:
    """Replace every gradient by its mean over the group, sending them in buckets of up to `bucket_bytes`."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from raypar.parallel.strategy import flattened, take_gradients

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
    """Return why a workload's model can't be split this way, and the fix; None if it can."""
    problem = pipeline.check_compatible(workload, config) if config["pipeline_size"] > 1 else None
    return problem or (tensor.check_compatible(workload, config) if config["tensor_size"] > 1 else None)


STRATEGY = StrategyTraits(
    build=Hybrid,
    splits="all three, on a mesh of `num_workers` = replicas × `pipeline_size` × `tensor_size`",
    built_on="torch's `parallelize_module` and `distributed.pipelining`",
    exchange=Exchange.MODEL,
    options=OPTIONS,
    layouts=layouts,
    layout=layout,
    conflicts=conflicts,
    check=check_compatible,
    has_layer_norms=False,
    names_collectives=False,
)
