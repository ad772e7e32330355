"""Norms of the gradients of a batch and of its parts, for the gradient noise scale (`raypar.study.gradient_noise`).

The parts are the workers' shares of a batch, or the micro-batches of a single worker that accumulates gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from raypar.parallel.base import Strategy
from raypar.parallel.strategy import Batch, ForwardBackward, Task

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Hook: TypeAlias = Callable[["GradBucket"], "torch.futures.Future[Tensor]"]


class _Part(NamedTuple):
    """Part of a step: the squares of its gradients' norms, which add up, and their common factor."""

    squares: Sequence[Tensor]
    weight: float
    num_samples: int


class _Step(NamedTuple):
    parts: Sequence[_Part]
    squares: Sequence[Tensor]  # of the batch's gradients
    scale: Tensor  # of the loss


class GradientNorms:
    """Squared norms of the gradients of each step and of its parts on this rank.

    They stay on the device until `take`: nothing else waits for it, sends anything or changes a gradient.

    Args:
        full_size: samples of a step that counts; shorter batches at the end of an epoch do not.
    """

    def __init__(self, full_size: int, device: torch.device) -> None:
        self._full_size, self._one = full_size, torch.ones((), device=device)
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self._squares: list[Tensor] = []  # of the current part
        self._parts: list[_Part] = []  # of the current step
        self._steps: list[_Step] = []

    def note(self, gradient: Tensor) -> None:
        """Note some of the gradients of the current part."""
        self._squares.append(_square(gradient))

    def end_part(self, part: Batch) -> None:
        """End a part: its gradients have been noted, and are those of `Loss.objective`."""
        squares, self._squares = self._squares, []
        if part.num_samples and squares:
            self._parts.append(_Part(squares, part.weight, part.num_samples))

    def end_step(self, gradients: Iterable[Tensor], batch: Batch, scaled: Callable[[Tensor], Tensor]) -> None:
        """End a step.

        Args:
            gradients: of the batch: the mean of its parts' over all ranks.
            scaled: scales a loss, for fp16.
        """
        parts, self._parts = self._parts, []
        if batch.num_global == self._full_size and parts:
            self._steps.append(_Step(parts, [_square(gradient) for gradient in gradients], scaled(self._one)))

    def take(self) -> Tensor:
        """Return the steps since the last call, and forget them.

        Returns:
            The arguments of `raypar.study.gradient_noise.moments_of`, averaged over this rank's parts; float64, shape
            ``(steps, 4)``, on the CPU.
        """
        steps, self._steps = self._steps, []
        groups = [squares for step in steps for squares in (*(part.squares for part in step.parts), step.squares)]
        scalars = [scalar for squares in groups for scalar in squares] + [step.scale for step in steps]
        values = iter(torch.stack(scalars).tolist() if scalars else ())  # read at once
        sums = iter([sum(islice(values, len(squares))) for squares in groups])
        rows = []
        for step, scale in zip(steps, values, strict=True):
            small = [next(sums) / part.weight**2 for part in step.parts]
            per_sample = [1 / part.num_samples for part in step.parts]
            norms = (_mean(small) / scale**2, next(sums) / scale**2)
            rows.append((*norms, _mean(per_sample), 1 / self._full_size))
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _square(gradient: Tensor) -> Tensor:
    """Return |g|² in at least single precision; as a dot product, whose sums are accurate."""
    flat = gradient.flatten()
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    return flat.dot(flat)


class NotedBuckets:
    """Communication hook of DDP that notes this rank's gradients before another hook sends them.

    Attributes:
        norms: of the gradients.
    """

    def __init__(self, hook: Hook, norms: GradientNorms) -> None:
        self.norms, self._hook = norms, hook
        self._buffers: list[Tensor] = []

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self._buffers.append(bucket.buffer())
        self.norms.note(bucket.buffer())
        return self._hook(bucket)

    def end_step(self, batch: Batch, scaled: Callable[[Tensor], Tensor]) -> None:
        """Note the mean gradients, which have replaced this rank's in the buckets."""
        self.norms.end_part(batch)
        buffers, self._buffers = self._buffers, []
        self.norms.end_step(buffers, batch, scaled)


class NotedParts(Strategy):
    """A single rank that notes the gradients of the micro-batches that it accumulates."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.gradient_norms: GradientNorms = GradientNorms(task.config["batch_size"], task.context.device)
        self._trained = [p for p in task.model.parameters() if p.requires_grad]
        for parameter in self._trained:  # a hook gets the gradient of one backward pass, before it is added
            parameter.register_hook(self.gradient_norms.note)  # type: ignore[no-untyped-call]

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        noting = _NotingPasses(**vars(do), end_part=self.gradient_norms.end_part)
        loss = super().forward_backward(batch, noting)
        gradients = [p.grad for p in self._trained if p.grad is not None]
        self.gradient_norms.end_step(gradients, batch, do.scaled)
        return loss


@dataclass(frozen=True, kw_only=True)
class _NotingPasses(ForwardBackward):
    """Passes that call a function after each part of a batch."""

    end_part: Callable[[Batch], None]

    def run(self, module: nn.Module, batch: Batch, share: float = 1.0) -> Tensor:
        loss = super().run(module, batch, share)
        self.end_part(batch)
        return loss
