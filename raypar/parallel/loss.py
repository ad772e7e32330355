"""Losses: how the losses of parts of a batch combine into the batch's own.

The ranks of a trial, the parts of an accumulated batch and the batches of an evaluation each see some of the samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Kind(Enum):
    """Meaning of a loss of a batch in terms of its samples."""

    MEAN = "a mean over the samples"
    SUM = "a sum over the samples"
    RATIO = "a pair (sum, weight), whose quotient is the loss"
    WHOLE = "a function of the batch as a whole"


Value: TypeAlias = Tensor | tuple[Tensor, Any]  # what a loss function returns


@dataclass(frozen=True)
class Loss:
    """Loss function of a training, and how its values on parts of a batch combine.

    With the global batch's ``num_global`` samples, each part's objective is such that the average over the shares of
    the batch (`raypar.parallel.strategy.Batch`) has the gradient of the global loss; for a `RATIO` up to the factor
    ``num_global / weight``, which is known only after the forward pass of all ranks.

    Attributes:
        function: of outputs and targets.
        is_own: the model has computed it, and returns it among its outputs.
    """

    function: Callable[..., Any]
    kind: Kind = Kind.MEAN
    is_own: bool = False

    def __call__(self, outputs: Any, targets: Any) -> Value:
        value: Value = self.function(outputs, targets)
        return value

    def counting(self, size_of: Callable[[Any], int]) -> Loss:
        """Return a mean over samples as the pair of their sum and their number, which `size_of` finds in targets."""

        def pair(outputs: Any, targets: Any) -> Value:
            size = size_of(targets)
            return self.function(outputs, targets) * size, size

        return Loss(pair, Kind.RATIO, self.is_own)

    def objective(self, value: Value, weight: float, num_samples: int, num_global: int) -> Tensor:
        """Return what the backward pass of a part of a batch starts from.

        Args:
            value: the part's loss.
            weight: the part's `Batch.weight`.
            num_samples: samples of the part; 0: they don't count.
            num_global: samples of the global batch.
        """
        if self.kind is Kind.RATIO:
            return value[0] * (weight / max(num_samples, 1))
        assert isinstance(value, Tensor)
        if self.kind is Kind.SUM:
            return value * (weight * num_global / max(num_samples, 1))
        return value if weight == 1.0 else value * weight

    def noted(self, value: Value, share: float = 1.0) -> Tensor:
        """Return the record of a part's loss; the records of a batch's parts add up to that of the batch.

        Args:
            share: the part's share of the rank's samples; 0: they don't count.

        Returns:
            The loss, shape ``()``, of a mean times the share; of a `RATIO` ``[sum, weight]``.
        """
        if self.kind is Kind.RATIO:
            total = value[0].detach()
            pair = torch.stack([total, torch.as_tensor(value[1], dtype=total.dtype, device=total.device).detach()])
            return pair if share else torch.zeros_like(pair)
        assert isinstance(value, Tensor)
        value = value.detach()
        if self.kind is Kind.SUM:
            return value if share else torch.zeros_like(value)
        return value if share == 1.0 else value * share

    def nothing(self, device: torch.device) -> Tensor:
        """Return the record of a rank that computes no loss."""
        return torch.zeros(2 if self.kind is Kind.RATIO else (), device=device)

    def sums(self, noted: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return numerators and weights that add up over ranks, steps and evaluation batches.

        Args:
            noted: records of some batches, shape ``(batches,)``, of a `RATIO` ``(batches, 2)``.
            num_samples: samples of each batch, shape ``(batches,)``; 0: they don't count.

        Returns:
            Two tensors of float64, shape ``(batches,)``.
        """
        noted, num_samples = noted.double(), num_samples.double()
        if self.kind is Kind.RATIO:
            counts = num_samples > 0
            return noted[:, 0] * counts, noted[:, 1] * counts
        if self.kind is Kind.SUM:
            return noted * (num_samples > 0), torch.zeros_like(num_samples)
        # Not a plain product: the loss of samples that don't count may be infinite.
        return torch.where(num_samples > 0, noted * num_samples, 0.0), num_samples


def part_of(tree: Any, index: Tensor | slice | int) -> Any:
    """Return some samples, or one, of a tensor or a tree of tensors."""
    return tree[index] if isinstance(tree, Tensor) else tree_map_only(Tensor, lambda each: each[index], tree)
