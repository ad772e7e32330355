"""Fully sharded data parallelism: each rank keeps a part of every layer's weights, gradients and optimizer state.

A layer's weights are gathered just before they are used, and its gradients are reduced to the rank that keeps them
(Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054; Zhao et al. 2023, https://arxiv.org/abs/2304.11277).
In mixed precision the weights that autocast would convert are gathered in 16 bits: with half the bytes and to the same
losses. Gradients are reduced in full precision, as those of other strategies.

With `shard_size`, the weights are split within groups of neighbouring ranks, which average their gradients (hybrid
sharding, HSDP): such as within a node, so that only gradients cross the network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from raypar.parallel.base import DataParallelism, SplitModel
from raypar.study.space import Value
from raypar.study.strategy import Conflict, Exchange, StrategyTraits
from raypar.study.workload import Config, Option, whole_number

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from raypar.parallel.strategy import Batch, ForwardBackward, Task


class FullyShard(SplitModel, DataParallelism):
    """torch's ``fully_shard``, around every unit of the model and around the rest of it."""

    def __init__(self, task: Task) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        super().__init__(task)
        world_size, size = task.context.world_size, task.config["shard_size"]
        # With groups, each keeps all weights, and the groups average their gradients.
        sizes = (world_size,) if size in (None, world_size) else (world_size // size, size)
        names = ("shard",) if len(sizes) == 1 else ("replicate", "shard")
        mesh = init_device_mesh(task.context.device.type, sizes, mesh_dim_names=names)
        reshard = task.config["fsdp_reshard"]
        shard = partial(fully_shard, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy_of(task))
        for unit in units_of(task.model):
            shard(unit)
        sharded = shard(task.model)
        assert isinstance(sharded, FSDPModule)
        self._sharded = sharded

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        return do.run_in_parts(self.module, batch, self._num_parts, self._no_sync)

    def full_model(self) -> nn.Module:
        from raypar.parallel.strategy import broadcast_buffers

        return broadcast_buffers(super().full_model(), self._device)

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
    from torch import nn

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


def policy_of(task: Task) -> MixedPrecisionPolicy:
    """Return the policy that gathers in 16 bits the weights that autocast would convert, and the others as they are.

    Autocast still chooses the type of each operation. Before torch 2.15, which takes a type for each parameter, all are
    gathered as they are.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from raypar.parallel.strategy import MIXED

    mixed = MIXED.get(task.config["precision"])
    if mixed is None or not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"):
        return MixedPrecisionPolicy()
    chosen = _converted_by_autocast(task, mixed)
    by_parameter: dict[str, Any] = {
        "param_dtype_override_fn": lambda parameter: mixed if id(parameter) in chosen else parameter.dtype
    }
    return MixedPrecisionPolicy(
        param_dtype=mixed, reduce_dtype=torch.float32, cast_forward_inputs=False, **by_parameter
    )


def _converted_by_autocast(task: Task, mixed: torch.dtype) -> set[int]:
    """Return the ids of the parameters that nothing but autocast's conversion reads, in a forward pass of the sample.

    An embedding that is also the last layer's weight is read as it is, too, and a batch norm's weights always are.
    """
    import torch

    from raypar.parallel.strategy import call

    model, parameters, uses = task.model, list(task.model.parameters()), _uses_of(mixed)
    modes = {module: module.training for module in model.modules()}
    model.eval()  # or a batch norm would count the sample in
    with torch.no_grad(), torch.autocast(task.context.device.type, mixed), uses:
        call(model, task.sample)
    for module, mode in modes.items():
        module.training = mode
    chosen = [float(id(p) in uses.converted and id(p) not in uses.read) for p in parameters]
    # What a model reads may depend on the rank's sample, and all ranks have to choose the same.
    counts = task.context.sum(torch.tensor(chosen, dtype=torch.float64)).tolist()
    return {id(p) for p, count in zip(parameters, counts, strict=True) if count == task.context.world_size}


def _uses_of(dtype: torch.dtype) -> Any:
    """Return a context that notes ids of tensors: ``converted`` to the type by operations, and ``read`` otherwise."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.converted: set[int] = set()
            self.read: set[int] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            is_conversion = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == dtype
            (self.converted if is_conversion else self.read).update(map(id, tree_leaves((args, kwargs))))
            return func(*args, **kwargs)

    return Uses()


def layouts(num_workers: int) -> Iterator[Mapping[str, Value]]:
    """Yield the sizes of the groups that have all weights."""
    yield {}
    yield from ({"shard_size": size} for size in range(2, num_workers) if not num_workers % size)


def conflicts(config: Config, _: Collection[str]) -> Iterator[Conflict]:
    """Yield the conflict of a group's size."""
    size = config["shard_size"]
    if size is not None and config["num_workers"] > 1 and config["num_workers"] % size:
        yield "num_workers", f"must be a multiple of shard_size={size}", f"use a multiple of {size} workers"


STRATEGY = StrategyTraits(
    build=FullyShard,
    splits="the batch; each rank keeps a part of all weights, gradients and optimizer state",
    built_on="torch's `fully_shard`",
    exchange=Exchange.SHARDED,
    options={
        "fsdp_reshard": Option(
            True, bool, "drop gathered weights after the forward pass; False: keep them for backward"
        ),
        "shard_size": whole_number(
            None, "workers that the weights are split among; None: all. Fewer: hybrid, each group has all weights"
        ),
    },
    layouts=layouts,
    conflicts=conflicts,
    has_layer_norms=False,
    needs_same_parameters=True,
)
