"""How the ranks of a trial share the work of a step and come to the same weights after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raypar.parallel.passes import Batch, Pass
from raypar.parallel.place import Place
from raypar.study.workload import Config, Workload


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
    place: Place


class Steps(Protocol):
    """What a step needs of an optimizer."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


class Strategy(Protocol):
    """One step is: `forward_backward` on this rank's share, `combine`, the optimizer where `steps_here`, `spread`.

    Attributes:
        module: what this rank computes with; may be exchanged for its compiled form.
        share: which share of every global batch this rank works on, and how many there are.
        counts_here: whether this rank's samples and losses count: one rank of those with the same share.
        steps_here: whether this rank runs the optimizer.
        knows_shapes: a batch of another size costs something once, and is to be shown in the warm-up.
    """

    module: nn.Module
    share: tuple[int, int]
    counts_here: bool
    steps_here: bool
    knows_shapes: bool

    def forward_backward(self, batch: Batch, do: Pass) -> Tensor:
        """Gradients of the weighted loss are where `combine` expects them; returns this rank's mean loss."""
        ...

    def combine(self) -> None:
        """The mean gradients are where the optimizer runs."""
        ...

    def spread(self) -> None:
        """After the optimizer: every rank has its weights."""
        ...

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What this rank's optimizer updates, as torch's optimizers take it."""
        ...

    def adopt(self, optimizer: Optimizer) -> Steps:
        """Take the optimizer of these groups into service; what is returned is used in its place."""
        ...

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to a norm, over all ranks that hold a part of them.

        Returns:
            Their norm before, of shape ``()``; to be read after the optimizer's step.
        """
        ...

    def forget(self) -> None:
        """Drop what former steps left behind, other than weights: the training starts anew."""
        ...

    def state(self) -> dict[str, Any]:
        """What `forget` drops, for a checkpoint."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        ...

    def whole(self) -> nn.Module:
        """The complete model with the weights as they are, on every rank; not to be trained. All ranks call it."""
        ...


class Alone:
    """One rank: nothing to agree on. What strategies have in common is theirs from here."""

    share = (0, 1)
    counts_here = True
    steps_here = True
    knows_shapes = False

    def __init__(self, task: Task) -> None:
        self.module = task.model
        self._model = task.model
        self._num_parts: int = task.config["accumulation_steps"]

    def forward_backward(self, batch: Batch, do: Pass) -> Tensor:
        return do.run_in_parts(self.module, batch, self._num_parts)

    def combine(self) -> None:
        pass

    def spread(self) -> None:
        pass

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self._model.parameters())}]

    def adopt(self, optimizer: Optimizer) -> Steps:
        return optimizer

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def forget(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        pass

    def whole(self) -> nn.Module:
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
    if task.place.world_size == 1:
        return Alone(task)
    module, name = _STRATEGIES[task.config["strategy"]].split(".")
    built: Strategy = getattr(import_module(f"raypar.parallel.{module}"), name)(task)
    return built


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
    return task.place.rank, task.place.world_size


def by_layout(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters in groups that torch can work on at once: those that are split among ranks, and those that aren't."""
    from torch.distributed.tensor import DTensor

    groups = [[p for p in parameters if isinstance(p, DTensor) is split] for split in (False, True)]
    return [{"params": group} for group in groups if group]
