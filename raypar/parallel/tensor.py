"""Tensor parallelism: a layer's weights are split among the ranks, which all work on the same samples.

A pair of fully connected layers is split by the first one's outputs ("column") and the second one's inputs ("row"), so
that a pair takes one all-reduce forward and one backward (Shoeybi et al. 2019, Megatron-LM,
https://arxiv.org/abs/1909.08053). Every rank computes the layers that are not split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raypar.parallel.base import SplitModel, out_of_place
from raypar.study.strategy import Exchange, StrategyTraits, WorkLayout, tensor_size
from raypar.study.workload import Config, Workload

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from raypar.parallel.strategy import Task

# Layers that treat each feature separately, so that a rank can apply them to its own features.
ELEMENTWISE = (
    *("ReLU", "GELU", "SiLU", "Sigmoid", "Tanh", "LeakyReLU", "ELU", "ReLU6", "Hardtanh"),
    *("Hardswish", "Softplus", "Dropout", "Identity"),
)


class TensorParallel(SplitModel):
    """torch's ``parallelize_module`` over all ranks; every rank takes the full batch."""

    def __init__(self, task: Task) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__(task)
        self.counts_samples = task.context.rank == 0
        mesh = init_device_mesh(task.context.device.type, (task.context.world_size,))
        split_layers(task.model, plan_of(task.workload, task.model), mesh)


def plan_of(workload: Workload, model: nn.Module) -> dict[str, str]:
    """Return how each split layer is split, by its name: "column" or "row".

    By the workload's plan; without one, pairs of linear layers with only elementwise layers between them.
    """
    from torch import nn

    if workload.tensor_plan is not None:
        return dict(workload.tensor_plan(model))
    elementwise = tuple(getattr(nn, name) for name in ELEMENTWISE)
    plan: dict[str, str] = {}
    for prefix, module in model.named_modules():
        first: str | None = None
        for child, layer in module.named_children() if isinstance(module, nn.Sequential) else ():
            name = f"{prefix}.{child}".lstrip(".")
            if not isinstance(layer, nn.Linear):
                first = first if isinstance(layer, elementwise) else None
            elif first is None:
                first = name
            else:
                plan |= {first: "column", name: "row"}
                first = None
    return plan


def split_layers(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Split the layers that a plan names, in place, among the ranks of a mesh of one dimension."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    out_of_place(model)  # a split layer's output is a view that torch lets nobody change
    parallelize_module(model, mesh, {name: styles[how]() for name, how in plan.items()})


def check_compatible(workload: Workload, config: Config) -> tuple[str, str] | None:
    """Return why the layers of a workload's model can't be split, and the fix; None if they can."""
    from torch import nn

    from raypar.parallel.strategy import meta_model

    model, num_ranks = meta_model(workload, config), tensor_size(config)
    plan = plan_of(workload, model)
    if not plan:
        hint = "give the Workload tensor_plan=, or a model with nn.Linear layers in an nn.Sequential"
        return "needs layers that can be split: this model has no known pair of nn.Linear layers", hint
    layers = dict(model.named_modules())
    for name, how in plan.items():
        layer = layers.get(name)
        if not isinstance(layer, nn.Linear) or how not in ("column", "row"):
            hint = 'let tensor_plan= return the names of nn.Linear layers, each with "column" or "row"'
            return f"can't split layer {name!r} by {how!r}", hint
        width = layer.out_features if how == "column" else layer.in_features
        if width % num_ranks:
            hint = f"choose a width that is a multiple of {num_ranks}, or fewer workers"
            return f"can't split the {width} features of layer {name} evenly among {num_ranks} workers", hint
    return None


STRATEGY = StrategyTraits(
    build=TensorParallel,
    splits="within layers: a pair of linear layers by outputs and by inputs",
    built_on="torch's `parallelize_module`",
    exchange=Exchange.MODEL,
    layouts=lambda _: iter([{}]),
    layout=lambda config: WorkLayout(tensor_size=config["num_workers"]),
    check=check_compatible,
    has_layer_norms=False,
)
