"""Pipeline parallelism: a stage of the model per rank, with micro-batches in flight between stages.

GPipe runs all forward passes, then all backward passes (Huang et al. 2019, https://arxiv.org/abs/1811.06965); 1F1B
alternates them as soon as it can, which needs less memory (Narayanan et al. 2019, https://arxiv.org/abs/1806.03377);
interleaved 1F1B gives each rank several stages, so that less time passes before all have something to do (Narayanan
et al. 2021, https://arxiv.org/abs/2104.04473).
"""

from __future__ import annotations

import functools
import itertools
import operator
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raypar.parallel.base import SplitModel, out_of_place
from raypar.study.space import Value
from raypar.study.strategy import Conflict, Exchange, StrategyTraits, WorkLayout, layout_of, pipeline_size
from raypar.study.workload import Config, Option, Workload, one_of, whole_number
from raypar.units import counted

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn

    from raypar.parallel.strategy import Batch, ForwardBackward, Task

SCHEDULES = ("gpipe", "1f1b", "interleaved")
SPLITS = ("counted", "measured")


def _split_problem(value: Value) -> str | None:
    named = isinstance(value, tuple) and value and all(isinstance(name, str) for name in value)
    return None if named or value in SPLITS else f"must be one of {', '.join(SPLITS)}, or a tuple of layer names"


OPTIONS: Mapping[str, Option] = {
    "pipeline_schedule": one_of("1f1b", SCHEDULES, "the order of forward and backward passes in a pipeline"),
    "num_microbatches": whole_number(4, "parts of a batch that pass through a pipeline one after another"),
    "stages_per_worker": whole_number(2, "stages of each worker, with pipeline_schedule=interleaved"),
    "pipeline_split": Option(
        "counted", object, "cut the model by counted work, by measured time, or before named layers", _split_problem
    ),
}


def conflicts(config: Config, swept: Collection[str]) -> Iterator[Conflict]:
    """Yield values that the schedule can't distribute, and options that have no effect in a pipeline."""
    layout, schedule, num = layout_of(config), config["pipeline_schedule"], config["num_microbatches"]
    stages, shares = layout.pipeline_size, layout.num_shares
    if schedule == "1f1b" and num < stages:
        yield "num_microbatches", f"is fewer than the {stages} stages that 1f1b keeps busy", f"use at least {stages}"
    if stages > 1 and schedule == "interleaved" and num % max(1, num // stages):
        problem = f"can't be dealt out in rounds of {stages}, which interleaved needs"
        yield "num_microbatches", problem, f"use a multiple of {stages}"
    if stages > 1 and config["batch_size"] % (shares * num):
        problem = f"can't be cut into num_microbatches={num} of equal size on {shares} replicas"
        yield "batch_size", problem, f"use a multiple of {shares} x {num}"
    if stages > 1 and config["accumulation_steps"] > 1:
        yield "accumulation_steps", "is what a pipeline does anyway", "use num_microbatches instead"
    if "stages_per_worker" in swept and schedule != "interleaved":
        yield "stages_per_worker", "has no effect without interleaved stages", 'use pipeline_schedule="interleaved"'


def layouts(num_stages: int) -> Iterator[Mapping[str, Value]]:
    """Yield schedules and numbers of micro-batches. 1F1B takes the time of GPipe, and less memory."""
    for schedule in ("1f1b", "interleaved"):
        for rounds in (1, 2, 4):
            yield {"pipeline_schedule": schedule, "num_microbatches": rounds * num_stages}


NUM_TIMED = 3
# The cost of a layer without multiply-accumulates, per element of its output: enough to break ties.
COST_PER_ELEMENT = 1


def layers_of(workload: Workload, model: nn.Module) -> list[nn.Module] | None:
    """Return the model's layers in the order of the forward pass; None if it is not a sequence of layers."""
    from torch import nn

    if workload.layers is not None:
        return list(workload.layers(model))
    return list(model) if isinstance(model, nn.Sequential) else None


def names_of(model: nn.Module, layers: Sequence[nn.Module]) -> list[str]:
    """Return each layer's name in the model; empty for one that the model doesn't hold itself (a reshape)."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names.get(id(layer), "") for layer in layers]


def partition(
    model: nn.Module, layers: Sequence[nn.Module], sample: Tensor, num_stages: int, how: str | tuple[str, ...]
) -> list[range]:
    """Return the layers of each stage, as ranges.

    Args:
        sample: inputs of the first layer.
        how: "counted" (multiply-accumulates), "measured" (seconds), or the names of the layers that begin a stage,
            except the first.
    """
    import torch
    import torch.distributed as dist

    if isinstance(how, tuple):
        names = names_of(model, layers)
        starts = [0, *sorted({names.index(name) for name in how}), len(layers)]
        return [range(a, b) for a, b in itertools.pairwise(starts)]
    costs = _costs(layers, sample, _counted if how == "counted" else _measured)
    if how == "measured":  # rank 0's times, so that all ranks cut alike
        of_first = torch.tensor(costs, dtype=torch.float64).to(sample.device)
        dist.broadcast(of_first, src=0)
        costs = of_first.tolist()
    return balanced(costs, num_stages)


def balanced(costs: Sequence[float], num_parts: int) -> list[range]:
    """Cut a row into non-empty parts with the smallest possible largest sum.

    The linear partition problem, by dynamic programming over the prefixes (Skiena, "The Algorithm Design Manual",
    section 10.7).
    """
    sums = [0.0, *itertools.accumulate(costs)]

    @functools.cache
    def best(num_parts: int, end: int) -> tuple[float, tuple[int, ...]]:
        """Return the largest sum of the first entries, cut into parts, and where these begin and end."""
        if num_parts == 1:
            return sums[end], (0, end)
        ways = ((best(num_parts - 1, start), start) for start in range(num_parts - 1, end))
        largest = ((max(before, sums[end] - sums[start]), (*cuts, end)) for (before, cuts), start in ways)
        return min(largest, key=operator.itemgetter(0))

    return [range(a, b) for a, b in itertools.pairwise(best(num_parts, len(costs))[1])]


def _costs(
    layers: Sequence[nn.Module], x: Tensor, cost_of: Callable[[nn.Module, Tensor], tuple[float, Tensor]]
) -> list[float]:
    """Return each layer's cost; in evaluation mode, or a batch norm would count the sample in."""
    import torch

    modes = [layer.training for layer in layers]
    costs = []
    with torch.no_grad():
        for layer in layers:
            cost, x = cost_of(layer.eval(), x)
            costs.append(cost)
    for layer, mode in zip(layers, modes, strict=True):
        layer.train(mode)
    return costs


def _counted(layer: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    """Return a layer's FLOP and its output."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        out: Tensor = layer(x)
    return counter.get_total_flops() + COST_PER_ELEMENT * out.numel(), out


def _measured(layer: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    """Return a layer's seconds, forward and backward, the minimum of a few passes; and its output."""
    import torch

    from raypar.parallel.strategy import wait_for_device

    times_s: list[float] = []
    for _ in range(NUM_TIMED + 1):  # the first pass is slower
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(x.is_floating_point())
            start_s = time.perf_counter()
            out: Tensor = layer(leaf)
            if out.requires_grad:
                out.sum().backward()  # type: ignore[no-untyped-call]
            wait_for_device(out.device)
        times_s.append(time.perf_counter() - start_s)
    layer.zero_grad()
    return min(times_s[1:]), out.detach()


class Stages:
    """This rank's stages of a model, and how micro-batches go through them and their neighbours'.

    Attributes:
        modules, local_names: this rank's stages, by number, and the names of its layers in the model.
        is_last: the losses are computed here.
    """

    def __init__(self, task: Task, group: dist.ProcessGroup) -> None:
        import torch.distributed as dist
        from torch import nn

        config = task.config
        self._rank, self._size, self._group = dist.get_rank(group), dist.get_world_size(group), group
        self._device = task.context.device
        self._schedule_name: str = config["pipeline_schedule"]
        self._num_microbatches: int = config["num_microbatches"]
        num_stages = num_stages_of(config, self._size)
        layers = layers_of(task.workload, task.model)
        assert layers is not None, "planning refuses models that don't split"
        self._ranges = partition(task.model, layers, task.sample, num_stages, config["pipeline_split"])
        self.modules = {
            stage: nn.Sequential(*(layers[i] for i in self._ranges[stage]))
            for stage in range(self._rank, num_stages, self._size)
        }
        for module in self.modules.values():
            out_of_place(module[0])  # what a stage receives is a leaf that torch lets nobody change
        self.is_last = num_stages - 1 in self.modules
        for stage, of_stage in enumerate(self._ranges):
            if stage not in self.modules:  # other ranks have these weights, and the device might not hold them all
                for i in of_stage:
                    layers[i].to_empty(device="meta")
        self._names = names_of(task.model, layers)
        self.local_names = [self._names[i] for stage in self.modules for i in self._ranges[stage]]
        self._schedules: dict[int, tuple[int, Any]] = {}
        self._do: ForwardBackward | None = None
        self._batch: Batch | None = None
        self._losses: list[Tensor] = []

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        import torch

        self._do, self._batch = do, batch
        self._losses.clear()
        num_microbatches, schedule = self._schedule(len(batch.targets))
        inputs = (batch.inputs,) if 0 in self.modules else ()
        with do.autocast(), do.span("pipeline"):
            schedule.step(*inputs, target=batch.targets if self.is_last else None, return_outputs=False)
        if not self.is_last:
            return do.loss.nothing(self._device)
        # Earlier losses come from shape inference.
        return torch.stack(self._losses[-num_microbatches:]).sum(0)

    def fill(self, complete: nn.Module) -> nn.Module:
        """Fill in the weights and buffers of other ranks' layers; a complete model already has this rank's."""
        from raypar.parallel.strategy import broadcast

        for stage, layers in enumerate(self._ranges):
            for name in filter(None, (self._names[i] for i in layers)):  # layers without a name have no weights
                layer = complete.get_submodule(name)
                for tensor in (*layer.parameters(), *layer.buffers()):
                    broadcast(tensor.data, self._device, self._group, stage % self._size)
        return complete

    def _schedule(self, num_samples: int) -> tuple[int, Any]:
        """Return the number of micro-batches and the schedule that runs them, one per batch size: it holds shapes."""
        if num_samples not in self._schedules:
            from torch.distributed.pipelining import (
                PipelineStage,
                Schedule1F1B,
                ScheduleGPipe,
                ScheduleInterleaved1F1B,
            )

            num = micro_batches_for(num_samples, self._num_microbatches, self._size)
            num_stages = len(self._ranges)
            stages = [
                PipelineStage(module, stage, num_stages, self._device, group=self._group)
                for stage, module in self.modules.items()
            ]
            if self._schedule_name == "interleaved":
                schedule: Any = ScheduleInterleaved1F1B(list(stages), num, loss_fn=self._loss_of)
            else:
                alternates = self._schedule_name == "1f1b" and num >= num_stages  # else there are too few
                schedule = (Schedule1F1B if alternates else ScheduleGPipe)(stages[0], num, loss_fn=self._loss_of)
            self._schedules[num_samples] = num, schedule
        return self._schedules[num_samples]

    def _loss_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert self._do is not None and self._batch is not None
        loss, batch, num_samples = self._do.loss, self._batch, len(targets)
        value = loss(outputs, targets)
        self._losses.append(loss.noted(value, num_samples / len(batch.targets)))
        # The schedule takes the mean over the micro-batches.
        return self._do.scaled(loss.objective(value, batch.weight, num_samples, batch.num_global))


class Pipeline(SplitModel):
    """torch's pipeline stages and schedules over all ranks; every rank loads the full batch."""

    depends_on_shape = True

    def __init__(self, task: Task) -> None:
        import torch.distributed as dist
        from torch import nn

        super().__init__(task)
        assert dist.group.WORLD is not None
        self._layer_group = dist.group.WORLD
        self._stages = Stages(task, self._layer_group)
        self.module = nn.ModuleList(self._stages.modules.values())
        self.counts_samples = self._stages.is_last

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        return self._stages.forward_backward(batch, do)

    def global_weight(self, weight: Tensor) -> Tensor:
        return self._summed_weight(weight)

    def full_model(self) -> nn.Module:
        return self._stages.fill(super().full_model())


def num_stages_of(config: Config, num_ranks: int) -> int:
    """Return the number of stages over all ranks of one pipeline."""
    per_rank = config["stages_per_worker"] if config["pipeline_schedule"] == "interleaved" else 1
    return num_ranks * int(per_rank)


def micro_batches_for(num_samples: int, limit: int, num_ranks: int) -> int:
    """Return the largest number of equal micro-batches up to `limit` that the schedules can run."""
    return max(
        num
        for num in range(1, min(limit, num_samples) + 1)
        if not num_samples % num and not num % max(1, num // num_ranks)
    )


def check_compatible(workload: Workload, config: Config) -> tuple[str, str] | None:
    """Return why a workload's model can't be cut into stages, and the fix; None if it can."""
    from raypar.parallel.strategy import meta_model

    model = meta_model(workload, config)
    layers = layers_of(workload, model)
    if layers is None:
        hint = "give the Workload layers=, or a model that is an nn.Sequential"
        return f"needs a model that can be split: {type(model).__name__} is not known to be a sequence of layers", hint
    num_stages, how = num_stages_of(config, pipeline_size(config)), config["pipeline_split"]
    if len(layers) < num_stages:
        return f"needs {num_stages} stages, and the model has {len(layers)} layers", "use fewer workers or stages"
    first: dict[int, int] = {}  # layer by parameter
    for i, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if first.setdefault(id(parameter), i) != i:
                return f"can't cut between layers that share weights ({name})", "untie them"
    if isinstance(how, tuple):
        names = names_of(model, layers)
        if unknown := [name for name in how if name not in names[1:]]:
            choices = ", ".join(filter(None, names[1:]))
            return f"can't begin a stage at {unknown[0]!r}: no such layer", f"layers that can: {choices}"
        if len(set(how)) != num_stages - 1:
            hint = f"name {counted(num_stages - 1, 'layer')}"
            return f"needs {counted(num_stages - 1, 'name')} for {num_stages} stages, not {len(set(how))}", hint
    return None


STRATEGY = StrategyTraits(
    build=Pipeline,
    splits="the model, between layers; micro-batches follow one another",
    built_on="torch's `distributed.pipelining`",
    exchange=Exchange.MODEL,
    options=OPTIONS,
    layouts=layouts,
    layout=lambda config: WorkLayout(pipeline_size=config["num_workers"]),
    conflicts=conflicts,
    check=check_compatible,
)
