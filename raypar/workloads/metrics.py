"""How good a classification is: scores per sample, and statistics of all samples together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from raypar.study.workload import Statistic

if TYPE_CHECKING:
    from torch import Tensor


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per sample, 1.0 where the highest score is the target's.

    Args:
        outputs: shape ``(batch, classes)``.
        targets: class numbers, shape ``(batch,)``.

    Returns:
        Shape ``(batch,)``.
    """
    return (outputs.argmax(1) == targets).float()


def macro_f1(num_classes: int) -> Statistic:
    """The unweighted mean of the classes' F1: a class counts as much as any other, however rare it is.

    F1 is 2 TP / (2 TP + FP + FN). A class that is neither among the targets nor predicted has none and is left out,
    as scikit-learn does it.
    """
    return Statistic(collect=partial(_confusion, num_classes=num_classes), finish=_mean_f1)


def _confusion(outputs: Tensor, targets: Tensor, *, num_classes: int) -> Tensor:
    """How often a target (row) was predicted as what (column), shape ``(classes, classes)``: it adds up over batches,
    as an F1 does not."""
    cells = targets * num_classes + outputs.argmax(1)
    return cells.bincount(minlength=num_classes**2).view(num_classes, num_classes)


def _mean_f1(confusion: Tensor) -> float:
    right = confusion.diagonal().double()
    both = (confusion.sum(0) + confusion.sum(1)).double()  # 2 TP + FP + FN
    occurs = both > 0
    return float((2 * right[occurs] / both[occurs]).mean())
