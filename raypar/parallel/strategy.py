"""Parts of a training step that strategies and training loop share: ranks, batches, passes, gradients, copies."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raypar.parallel.base import Strategy
from raypar.parallel.loss import Loss, part_of
from raypar.parallel.recompute import NO_BLOCKS, NO_BLOCKS_HINT, Recomputation
from raypar.study.strategy import STRATEGIES, num_shares
from raypar.study.workload import Config, Workload, first_tensor

HOST = torch.device("cpu")
MIXED: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}  # autocast's types, by `precision`


@dataclass(frozen=True)
class DistContext:
    """This rank's place in its trial's process group; a trial of one rank has no group."""

    rank: int
    world_size: int
    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        """Return float64 values summed over all ranks, on the CPU."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        """Return each value's largest over all ranks."""
        largest: list[float] = self._reduce(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX).tolist()
        return largest

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier()

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world_size > 1:
            # NCCL reduces on the GPU only, gloo where the values are.
            values = values.to(self.device if self.device.type == "cuda" else "cpu")
            dist.all_reduce(values, operation)
        return values.cpu()


def wait_for_device(device: torch.device) -> None:
    """Wait until an accelerator has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


Span: TypeAlias = Callable[[str], contextlib.AbstractContextManager[object]]
_no_context = contextlib.nullcontext()


def no_span(_: str) -> contextlib.AbstractContextManager[object]:
    """Mark nothing: the `Span` of timed steps, in place of a profile's marks."""
    return _no_context


class Batch(NamedTuple):
    """One rank's samples of one step.

    Attributes:
        inputs: for `call`.
        weight: factor of this part's mean loss, ``num_local * num_shares / num_global``, so that the average over the
            shares is the global batch's mean.
        num_samples: number of samples that count.
        num_global: number of samples of the global batch.
    """

    inputs: Any
    targets: Any
    weight: float
    num_samples: int
    num_global: int


@dataclass(frozen=True)
class ForwardBackward:
    """Forward and backward pass of a batch.

    Attributes:
        autocast: context of the forward pass.
        scaled: scales a loss before the backward pass, for fp16.
        span: marks a part of the step by its name, for a profile.
    """

    loss: Loss
    autocast: Callable[[], contextlib.AbstractContextManager[object]]
    scaled: Callable[[Tensor], Tensor]
    span: Span = no_span

    def run(self, module: nn.Module, batch: Batch, share: float = 1.0) -> Tensor:
        """Add the gradients of a batch's loss to the module's; return `Loss.noted`.

        Args:
            share: the batch's share of the samples of this rank's step.
        """
        with self.span("forward"), self.autocast():
            value = self.loss(call(module, batch.inputs), batch.targets)
        with self.span("backward"):
            objective = self.loss.objective(value, batch.weight, batch.num_samples, batch.num_global)
            self.scaled(objective).backward()  # type: ignore[no-untyped-call]
        return self.loss.noted(value, share)

    def run_in_parts(
        self,
        module: nn.Module,
        batch: Batch,
        num_parts: int,
        no_sync: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> Tensor:
        """Run the batch in parts, whose gradients add up to the full batch's.

        Args:
            no_sync: context of all passes but the last, to delay communication.
        """
        if num_parts == 1:
            return self.run(module, batch)
        losses = []
        for i, (part, share) in enumerate(parts_of(batch, num_parts)):
            with no_sync() if i < num_parts - 1 else contextlib.nullcontext():
                losses.append(self.run(module, part, share))
        return reduce(torch.add, losses)


def call(module: Callable[..., Any], inputs: Any) -> Any:
    """Return a model's outputs: a mapping's entries are given by name, a tuple's by position."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def parts_of(batch: Batch, num_parts: int) -> Iterator[tuple[Batch, float]]:
    """Yield nearly equal parts of a batch, in order, and each part's share of the batch.

    The number of parts is fixed, because all ranks have to join the same collectives. If there are too few samples, the
    other parts are the first sample with weight 0.
    """
    size = len(first_tensor(batch.targets))
    (least, num_larger), end = divmod(size, num_parts), 0
    for i in range(num_parts):
        begin, end = end, end + least + (i < num_larger)
        share = (end - begin) / size
        samples = slice(begin, end) if share else slice(1)
        x, y = part_of(batch.inputs, samples), part_of(batch.targets, samples)
        yield Batch(x, y, batch.weight * share, round(batch.num_samples * share), batch.num_global), share


def by_layout(tensors: Sequence[Any]) -> list[list[Any]]:
    """Group tensors for torch's functions and optimizers: those that are split among ranks, and the others."""
    groups = [[t for t in tensors if isinstance(t, DTensor) is split] for split in (False, True)]
    return [group for group in groups if group]


@dataclass(frozen=True)
class Gradients:
    """Names of parameters without a gradient in backward passes of some samples, on any rank.

    Attributes:
        never: without a gradient in all passes.
        at_times: without a gradient in some passes.
        are_sparse: whose gradients are sparse tensors.
    """

    never: tuple[str, ...] = ()
    at_times: tuple[str, ...] = ()
    are_sparse: tuple[str, ...] = ()

    @property
    def are_missing(self) -> bool:
        """True if a step may leave parameters without a gradient."""
        return bool(self.never or self.at_times)


@dataclass(frozen=True)
class Task:
    """Model and setting that a strategy is built for.

    Attributes:
        model: the same weights on every rank; the strategy may cut or wrap it.
        sample: two samples for `call`, for strategies that need the shapes.
        gradients: the same on every rank.
    """

    workload: Workload
    config: Config
    model: nn.Module
    sample: Any
    context: DistContext
    gradients: Gradients = Gradients()


class StepOptimizer(Protocol):
    """The part of an optimizer that a training step uses."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


def copied(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a model on a device, without another copy on the model's own device."""
    copies: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        copies[id(tensor)] = tensor.detach().to(device, copy=True)
        if isinstance(tensor, nn.Parameter):
            copies[id(tensor)] = nn.Parameter(copies[id(tensor)], tensor.requires_grad)
    return copy.deepcopy(model, copies)


def on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a model on a device: the model if it is there, a copy if it is in host memory."""
    is_there = all(parameter.device.type == device.type for parameter in model.parameters())
    return model if is_there else copied(model, device)


def broadcast(tensor: Tensor, device: torch.device, group: dist.ProcessGroup | None = None, group_src: int = 0) -> None:
    """Broadcast a rank's values of a tensor, which may be in host memory, through the device: NCCL needs that."""
    sent = tensor.to(device)
    dist.broadcast(sent, group=group, group_src=group_src)
    if sent is not tensor:
        tensor.copy_(sent)


def broadcast_buffers(model: nn.Module, device: torch.device) -> nn.Module:
    """Broadcast the first rank's buffers: each rank's samples move a batch norm's running means."""
    for buffer in model.buffers():
        broadcast(buffer, device)
    return model


def flattened(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the gradients of parameters of one type as a vector, followed by a 1 or 0 for each: it exists or not.

    Missing gradients are zeros, since all ranks have to send the same number of values.
    """
    parts = [_local(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
    is_there = torch.tensor([p.grad is not None for p in parameters], dtype=parts[0].dtype)
    return torch.cat([*parts, is_there.to(parts[0].device, non_blocking=True)])


def take_gradients(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Set gradients from a vector of `flattened`, combined over ranks.

    A parameter without a gradient on all ranks gets none, as in a single process: momentum would move it.
    """
    *parts, shares = flat.split([*(_local(p).numel() for p in parameters), len(parameters)])  # type: ignore[no-untyped-call]
    # Read only where it is needed: this waits for the device.
    is_there = [p.grad is not None for p in parameters]
    if not all(is_there):
        is_there = (shares > 0).tolist()
    for parameter, part, there in zip(parameters, parts, is_there, strict=True):
        if not there:
            continue
        if isinstance(parameter, DTensor):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            part = part.view_as(local := _local(parameter.grad))
            local.copy_(part)
        else:
            parameter.grad = part.view_as(parameter)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share_of(config: Config, context: DistContext) -> tuple[int, int]:
    """Return a rank's share of every global batch, and the number of shares."""
    num = num_shares(config) if context.world_size > 1 else 1
    return context.rank * num // context.world_size, num


def build_strategy(task: Task) -> Strategy:
    """Build the strategy that the config names."""
    if task.context.world_size == 1:
        if not (task.config["noise_scale"] and task.config["accumulation_steps"] > 1):
            return Strategy(task)
        from raypar.parallel.gradient_norms import NotedParts

        return NotedParts(task)
    built: Strategy = STRATEGIES[task.config["strategy"]].build(task)
    return built


def check_compatible(workload: Workload, config: Config) -> tuple[str, str] | None:
    """Return why a workload can't be trained as a config's strategy splits it, and the fix; None if it can."""
    check = STRATEGIES[config["strategy"]].check
    problem = check(workload, config) if check and config["num_workers"] > 1 else None
    if problem or not config["activation_checkpointing"]:
        return problem
    return None if Recomputation(meta_model(workload, config)).num_blocks else (NO_BLOCKS, NO_BLOCKS_HINT)


def meta_model(workload: Workload, config: Config) -> nn.Module:
    """Build a workload's model, on torch's meta device if possible, where it takes no memory."""
    assert workload.model is not None
    try:
        with torch.device("meta"):
            return workload.model(config)
    except (RuntimeError, NotImplementedError, TypeError):  # building it needs values
        return workload.model(config)
