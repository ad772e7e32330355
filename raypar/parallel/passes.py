"""A forward and a backward pass, in one piece or in several whose gradients add up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

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
class Pass:
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
