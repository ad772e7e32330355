"""Norms of the gradients of a batch and of its parts, for the gradient noise scale (`raypar.study.gradient_noise`).

The parts are the workers' shares of a batch, or the micro-batches of a single worker that accumulates gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from raypar.parallel.base import Strategy
from raypar.parallel.strategy import Batch, ForwardBackward, Task

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Hook: TypeAlias = Callable[["GradBucket"], "torch.futures.Future[Tensor]"]


class GradientNorms:
    """Squared norms of the gradients of each step and of its parts on this rank.

    They stay on the device: nothing here waits for it, sends anything or changes a gradient.

    Args:
        full_size: samples of a step that counts; shorter batches at the end of an epoch do not.
    """

    def __init__(self, full_size: int) -> None:
        self._full_size = full_size
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self._squares: list[Tensor] = []  # of the current part
        self._parts: list[tuple[Tensor, float]] = []  # of the current step: |g|² and 1 / samples
        self._steps: list[tuple[Tensor, float]] = []  # |g|² of its parts and of it, and 1 / samples of its parts

    def note(self, gradient: Tensor) -> None:
        """Note some of the gradients of the current part."""
        self._squares.append(_square(gradient))

    def end_part(self, part: Batch) -> None:
        """End a part: its gradients have been noted, and are those of `Loss.objective`."""
        squares, self._squares = self._squares, []
        if part.num_samples and squares:
            self._parts.append((torch.stack(squares).sum() / part.weight**2, 1 / part.num_samples))

    def end_step(self, gradients: Iterable[Tensor], batch: Batch, scaled: Callable[[Tensor], Tensor]) -> None:
        """End a step.

        Args:
            gradients: of the batch: the mean of its parts' over all ranks.
            scaled: factor of the loss, for fp16.
        """
        parts, self._parts = self._parts, []
        squares = [_square(gradient) for gradient in gradients]
        if batch.num_global != self._full_size or not parts or not squares:
            return
        both = torch.stack([torch.stack([square for square, _ in parts]).mean(), torch.stack(squares).sum()])
        factor = scaled(torch.ones((), device=both.device))
        self._steps.append((both / factor**2, sum(share for _, share in parts) / len(parts)))

    def take(self) -> Tensor:
        """Return the steps since the last call, and forget them.

        Returns:
            The arguments of `raypar.study.gradient_noise.moments_of`, averaged over this rank's parts; float64, shape
            ``(steps, 4)``, on the CPU.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return torch.empty(0, 4, dtype=torch.float64)
        norms = torch.stack([both for both, _ in steps]).cpu().double()
        shares = torch.tensor([[share, 1 / self._full_size] for _, share in steps], dtype=torch.float64)
        return torch.cat([norms, shares], dim=1)


def _square(gradient: Tensor) -> Tensor:
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=dtype)
    return norm.square()


class NotedBuckets:
    """Communication hook of DDP that notes this rank's gradients before another hook sends them.

    Attributes:
        norms: of the gradients.
    """

    def __init__(self, hook: Hook, full_size: int) -> None:
        self.norms, self._hook = GradientNorms(full_size), hook
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
        self.gradient_norms: GradientNorms = GradientNorms(task.config["batch_size"])
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
