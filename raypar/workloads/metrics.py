"""Classification metrics: scores per sample, and statistics over all samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from raypar.errors import RayparError
from raypar.study.workload import Statistic, Workload

if TYPE_CHECKING:
    from torch import Tensor

Scores: TypeAlias = "Tensor | tuple[Tensor, Tensor]"  # of each sample; or their sum, and the number of what was counted

IGNORED_CLASS = -100  # torch's default


def default_metrics(workload: Workload) -> Mapping[str, Callable[[Any, Any], Any] | Statistic]:
    """Return the metrics that are computed on ``Data.val``: the workload's own, else accuracy if it applies.

    It applies if the loss is torch's cross-entropy, or if the workload is judged by it.
    """
    if workload.metrics is not None:
        return workload.metrics
    if "accuracy" not in workload.metric_names:
        return {}
    loss = workload.loss
    ignored = loss.keywords.get("ignore_index") if isinstance(loss, partial) else getattr(loss, "ignore_index", None)
    return {"accuracy": accuracy if ignored is None else partial(accuracy, ignore_index=ignored)}


def accuracy(outputs: Tensor, targets: Tensor, ignore_index: int = IGNORED_CLASS) -> Scores:
    """Return 1.0 for each sample whose highest score is the target's, else 0.0.

    Args:
        outputs: scores of classes, shape ``(batch, classes)``, or ``(batch, classes, …)`` of several positions.
        targets: class numbers, shape ``(batch,)``, or ``(batch, …)``; or probabilities of classes, shaped as `outputs`.
        ignore_index: target that is not counted.

    Returns:
        Shape ``(batch,)``; with several positions per sample or ignored targets, the numbers of correct and of counted
        positions.

    Raises:
        RayparError: these are not scores of classes with their targets.
    """
    outputs, targets = _entry(outputs, "logits"), _entry(targets, "labels")  # of models that compute their loss
    shapes = [tuple(getattr(each, "shape", ())) for each in (outputs, targets)]
    given = f"got outputs of shape {shapes[0]} and targets of shape {shapes[1]}"
    hint = 'give the Workload metrics={"name": function} for what it trains, or metric="val_loss"'
    if len(shapes[0]) < 2 or shapes[0][1] < 2:
        raise RayparError(f"accuracy needs scores of two classes or more, shape (batch, classes), {given}", hint=hint)
    one_each = (shapes[0][0], *shapes[0][2:])
    if targets.is_floating_point() and shapes[0] == shapes[1]:
        targets = targets.argmax(1)
    elif targets.is_floating_point() or shapes[1] != one_each:
        raise RayparError(f"accuracy needs class numbers of shape {one_each}, {given}, {targets.dtype}", hint=hint)
    right, counts = outputs.argmax(1) == targets, targets != ignore_index
    if targets.dim() == 1 and counts.all():
        return right.float()
    return (right & counts).sum(), counts.sum()


def _entry(values: Any, name: str) -> Any:
    """Return an entry of a mapping, or an attribute, if there is one, else the values themselves."""
    return values.get(name, values) if isinstance(values, Mapping) else getattr(values, name, values)


def sum_and_weight(scores: Any, num_samples: int) -> tuple[Any, Any]:
    """Return the sum of a metric's scores for a batch, and the number of scores.

    Raises:
        RayparError: the metric returned neither a score for each sample nor a pair of sum and number.
    """
    if isinstance(scores, tuple) and len(scores) == 2:
        if all(getattr(part, "shape", ()) == () for part in scores):
            return scores
    elif tuple(shape := getattr(scores, "shape", ())) and scores.numel() == len(scores) == num_samples:
        return scores.double().sum(), num_samples
    shown = f"shape {tuple(shape)}" if hasattr(scores, "shape") else type(scores).__name__
    hint = "return one of shape (batch,), whose mean is taken, or a pair: the sum of scores and the number counted"
    raise RayparError(f"{shown} is not a score for each of {num_samples} samples", hint=hint)


def pairs_samples(metric: Callable[[Any, Any], Any], outputs: Tensor, targets: Tensor) -> bool:
    """Return whether a metric compares outputs with the targets of other samples too.

    This happens if ``(batch, 1)`` and ``(batch,)`` are broadcast, and a mean reduces the result to a score per sample.

    Args:
        outputs: outputs of some samples; only their shape and type matter.
        targets: targets of several samples, the more the better.
    """
    import torch

    width = outputs.shape[1:]
    if width == targets.shape[1:] or width.numel() != targets.shape[1:].numel():
        return False
    drawn = torch.randn(len(targets), *width, generator=torch.Generator().manual_seed(0)).to(outputs)
    try:
        whole, _ = sum_and_weight(metric(drawn, targets), len(targets))
        parts = [metric(drawn[i : i + 1], targets[i : i + 1]) for i in range(len(targets))]
        single = sum(float(sum_and_weight(part, 1)[0]) for part in parts)
    except Exception:  # it takes no single samples
        return False
    return not math.isclose(float(whole), single, rel_tol=1e-3, abs_tol=1e-6)


def macro_f1(num_classes: int) -> Statistic:
    """Unweighted mean of the classes' F1 = 2 TP / (2 TP + FP + FN).

    As in scikit-learn, a class that is neither a target nor predicted is excluded.
    """
    return Statistic(collect=partial(_confusion, num_classes=num_classes), finish=_mean_f1)


def _confusion(outputs: Tensor, targets: Tensor, *, num_classes: int) -> Tensor:
    """Return the confusion matrix, shape ``(classes, classes)``: unlike F1, it adds up over batches."""
    if tuple(outputs.shape) != (len(targets), num_classes) or targets.dim() != 1:
        given = f"outputs of shape {tuple(outputs.shape)}, targets of shape {tuple(targets.shape)}"
        hint = f"it takes outputs of shape (batch, {num_classes}) and class numbers of shape (batch,)"
        raise RayparError(f"macro_f1({num_classes}): {given}", hint=hint)
    cells = targets * num_classes + outputs.argmax(1)
    return cells.bincount(minlength=num_classes**2).view(num_classes, num_classes)


def _mean_f1(confusion: Tensor) -> float:
    true_positives = confusion.diagonal().double()
    denominator = (confusion.sum(0) + confusion.sum(1)).double()  # 2 TP + FP + FN
    occurs = denominator > 0
    return float((2 * true_positives[occurs] / denominator[occurs]).mean())
