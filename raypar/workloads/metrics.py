"""Classification metrics: scores per sample, and statistics over all samples."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from raypar.study.workload import Statistic, Workload

if TYPE_CHECKING:
    from torch import Tensor


def default_metrics(workload: Workload) -> Mapping[str, Any]:
    """Return the metrics that a workload is judged by: its own, or accuracy."""
    return {"accuracy": accuracy} if workload.metrics is None else workload.metrics


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1.0 for each sample whose highest score is the target's, else 0.0.

    Args:
        outputs: shape ``(batch, classes)``.
        targets: class numbers, shape ``(batch,)``.

    Returns:
        Shape ``(batch,)``.
    """
    return (outputs.argmax(1) == targets).float()


def macro_f1(num_classes: int) -> Statistic:
    """Unweighted mean of the classes' F1 = 2 TP / (2 TP + FP + FN).

    As in scikit-learn, a class that is neither a target nor predicted is excluded.
    """
    return Statistic(collect=partial(_confusion, num_classes=num_classes), finish=_mean_f1)


def _confusion(outputs: Tensor, targets: Tensor, *, num_classes: int) -> Tensor:
    """Return the confusion matrix, shape ``(classes, classes)``: unlike F1, it adds up over batches."""
    cells = targets * num_classes + outputs.argmax(1)
    return cells.bincount(minlength=num_classes**2).view(num_classes, num_classes)


def _mean_f1(confusion: Tensor) -> float:
    true_positives = confusion.diagonal().double()
    denominator = (confusion.sum(0) + confusion.sum(1)).double()  # 2 TP + FP + FN
    occurs = denominator > 0
    return float((2 * true_positives[occurs] / denominator[occurs]).mean())
