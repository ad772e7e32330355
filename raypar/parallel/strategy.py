"""Strategy protocol: how the ranks of a trial share a step's work and reach the same weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from raypar.study.options import pipeline_size, tensor_size
from raypar.study.workload import Config, Workload


@dataclass(frozen=True)
class DistContext:
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


Span: TypeAlias = Callable[[str], contextlib.AbstractContextManager[object]]
_nothing = contextlib.nullcontext()


def no_span(_: str) -> contextlib.AbstractContextManager[object]:
    """Marks nothing: what a timed run has in place of a profile's marks."""
    return _nothing


class Batch(NamedTuple):
    """What one step of one rank works on.

    Attributes:
        weight: what the mean loss of this part is multiplied with, so that the average over the shares of the global
            batch is its mean: ``num_local * num_shares / num_global``.
        num_samples: the samples that weigh.
    """

    inputs: Any
    targets: Any
    weight: float
    num_samples: int


@dataclass(frozen=True)
class ForwardBackward:
    """How a loss comes from a batch, and gradients from a loss.

    Attributes:
        loss_of: ``loss_of(outputs, targets)``, the mean over the samples.
        autocast: to compute the forward pass in.
        scaled: what is done to a loss before the backward pass (fp16's scaling).
        span: marks a part of the step by its name, for a profile.
    """

    loss_of: Callable[..., Tensor]
    autocast: Callable[[], contextlib.AbstractContextManager[object]]
    scaled: Callable[[Tensor], Tensor]
    span: Span = no_span

    def run(self, module: nn.Module, batch: Batch) -> Tensor:
        """Add the gradients of a batch's weighted mean loss to the module's; returns the mean loss."""
        with self.span("forward"), self.autocast():
            loss = self.loss_of(module(batch.inputs), batch.targets)
        with self.span("backward"):
            self.scaled(loss if batch.weight == 1.0 else loss * batch.weight).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def run_in_parts(
        self,
        module: nn.Module,
        batch: Batch,
        num_parts: int,
        holding: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> Tensor:
        """`run`, with the batch in parts whose gradients add up to the whole's.

        Args:
            holding: all passes but the last are run in it: the place to hold back communication.
        """
        if num_parts == 1:
            return self.run(module, batch)
        loss: Tensor | None = None
        for i, (part, share) in enumerate(parts_of(batch, num_parts)):
            with holding() if i < num_parts - 1 else contextlib.nullcontext():
                own = self.run(module, part) * share
            loss = own if loss is None else loss + own
        assert loss is not None
        return loss


def parts_of(batch: Batch, num_parts: int) -> Iterator[tuple[Batch, float]]:
    """Nearly equal parts of a batch, in order, and what share of the batch each is.

    There are always `num_parts`, since every rank has to join as many collectives as the others: where there are too
    few samples, a part is the batch's first one with weight 0.
    """
    size = len(batch.targets)
    for x, y in zip(
        torch.tensor_split(batch.inputs, num_parts), torch.tensor_split(batch.targets, num_parts), strict=True
    ):
        share = len(y) / size
        if not share:
            x, y = batch.inputs[:1], batch.targets[:1]
        yield Batch(x, y, batch.weight * share, round(batch.num_samples * share)), share


def clip(parameters: Sequence[nn.Parameter], max_norm: float, others: dist.ProcessGroup | None = None) -> Tensor:
    """``clip_grad_norm_`` where some gradients are split among ranks, and other ranks have other layers.

    Args:
        others: the ranks that have the model's other layers, this one included; None: there are none.

    Returns:
        The norm of all gradients before, of shape ``()``.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    # Of a split gradient the norm is that of the whole, the same on every rank.
    squares = [
        norm.full_tensor() if isinstance(norm, DTensor) else norm
        for norm in (get_total_norm(part) ** 2 for part in _by_layout(gradients) if part)
    ]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    if others is not None:
        dist.all_reduce(total, group=others)
    norm = total.sqrt()
    for part in _by_layout(parameters):
        clip_grads_with_norm_(part, max_norm, norm)
    return norm


def _by_layout(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """torch's functions take either split tensors or plain ones."""
    return [[t for t in tensors if isinstance(t, DTensor) is split] for split in (False, True)]


@dataclass(frozen=True)
class Task:
    """What a strategy is built for.

    Attributes:
        model: with the same weights on every rank; the strategy may cut it up or wrap it.
        sample: two samples as the model takes them, for strategies that have to know the shapes.
    """

    workload: Workload
    config: Config
    model: nn.Module
    sample: Tensor
    context: DistContext


class StepOptimizer(Protocol):
    """The part of an optimizer that a training step uses."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


class Strategy(Protocol):
    """The parallel part of a step.

    A step is `forward_backward` on this rank's share, `sync_gradients`, the optimizer where `runs_optimizer` is set,
    `sync_weights`.

    Attributes:
        module: what this rank computes with; may be exchanged for its compiled form.
        share: which share of every global batch this rank works on, and how many there are.
        counts_samples: whether this rank's samples and losses count: one rank of those with the same share.
        runs_optimizer: whether this rank runs the optimizer.
        depends_on_shape: a batch of another size costs something once, and is to be shown in the warm-up.
    """

    module: nn.Module
    share: tuple[int, int]
    counts_samples: bool
    runs_optimizer: bool
    depends_on_shape: bool

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        """Gradients of the weighted loss are where `sync_gradients` expects them; returns this rank's mean loss."""
        ...

    def sync_gradients(self) -> None:
        """The mean gradients are where the optimizer runs."""
        ...

    def sync_weights(self) -> None:
        """After the optimizer: every rank has its weights."""
        ...

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What this rank's optimizer updates, as torch's optimizers take it."""
        ...

    def wrap_optimizer(self, optimizer: Optimizer) -> StepOptimizer:
        """Take the optimizer of these groups into service; what is returned is used in its place."""
        ...

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to a norm, over all ranks that hold a part of them.

        Returns:
            Their norm before, of shape ``()``; to be read after the optimizer's step.
        """
        ...

    def reset_state(self) -> None:
        """Drop what former steps left behind, other than weights: the training starts anew."""
        ...

    def state(self) -> dict[str, Any]:
        """What `reset_state` drops, for a checkpoint."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        ...

    def full_model(self) -> nn.Module:
        """The complete model with the weights as they are, on every rank; not to be trained. All ranks call it."""
        ...


class NoParallelism:
    """One rank: nothing to agree on. What strategies have in common is theirs from here."""

    share = (0, 1)
    counts_samples = True
    runs_optimizer = True
    depends_on_shape = False

    def __init__(self, task: Task) -> None:
        self.module = task.model
        self._model = task.model
        self._num_parts: int = task.config["accumulation_steps"]

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        return do.run_in_parts(self.module, batch, self._num_parts)

    def sync_gradients(self) -> None:
        pass

    def sync_weights(self) -> None:
        pass

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self._model.parameters())}]

    def wrap_optimizer(self, optimizer: Optimizer) -> StepOptimizer:
        return optimizer

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def reset_state(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        pass

    def full_model(self) -> nn.Module:
        return self._model


# The names are study.options.STRATEGIES. Each is imported only where it is used: some take torch half a second.
_STRATEGIES = {
    "ddp": "ddp.AllReduce",
    "fsdp": "fsdp.FullyShard",
    "tensor": "tensor.TensorParallel",
    "pipeline": "pipeline.Pipeline",
    "hybrid": "hybrid.Hybrid",
    "local_sgd": "local_sgd.LocalSgd",
    "gather_broadcast": "gather_broadcast.GatherBroadcast",
    "deepspeed": "deepspeed.DeepSpeed",
}


def build_strategy(task: Task) -> Strategy:
    """The strategy that the config names."""
    if task.context.world_size == 1:
        return NoParallelism(task)
    module, name = _STRATEGIES[task.config["strategy"]].split(".")
    built: Strategy = getattr(import_module(f"raypar.parallel.{module}"), name)(task)
    return built


def check_compatible(workload: Workload, config: Config) -> tuple[str, str] | None:
    """Return why a workload can't be trained by the strategy of a config, and the fix; None if it can.

    Called before anything is started. The model is built, on torch's meta device where that is possible, only for
    strategies that split it.
    """
    if config["num_workers"] == 1:
        return None
    if config["strategy"] == "deepspeed" and find_spec("deepspeed") is None:
        hint = "pip install 'raypar[deepspeed]' on every machine that runs workers"
        return "needs the package deepspeed, which is not installed", hint
    stages, splits = pipeline_size(config), tensor_size(config)
    if stages == splits == 1:
        return None
    from raypar.parallel import pipeline, tensor

    model = _model_without_numbers(workload, config)
    if stages > 1 and (problem := pipeline.check_compatible(workload, model, config, stages)) is not None:
        return problem
    return tensor.check_compatible(workload, model, splits) if splits > 1 else None


def _model_without_numbers(workload: Workload, config: Config) -> nn.Module:
    """Build the model on the meta device, where a large one takes no memory."""
    assert workload.model is not None
    try:
        with torch.device("meta"):
            return workload.model(config)
    except (RuntimeError, NotImplementedError, TypeError):  # it looks at numbers when it is built
        return workload.model(config)


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """Copies of what a rank holds of the weights, and of whatever else is in the module's state."""
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def restore(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Put a snapshot back."""
    with torch.no_grad():
        for key, value in module.state_dict().items():
            value.copy_(state[key])


def same_share_everywhere(task: Task) -> tuple[int, int]:
    """Data parallelism: as many shares as ranks."""
    return task.context.rank, task.context.world_size


def by_layout(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters in groups that torch can work on at once: those that are split among ranks, and those that aren't."""
    from torch.distributed.tensor import DTensor

    groups = [[p for p in parameters if isinstance(p, DTensor) is split] for split in (False, True)]
    return [{"params": group} for group in groups if group]
