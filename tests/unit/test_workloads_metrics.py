"""Metrics agree with scikit-learn's, whatever the batches."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor

from raypar.workloads.metrics import accuracy, macro_f1


def scores(num_samples: int, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scores that are right more often than by chance, of classes that are not equally frequent."""
    random = torch.Generator().manual_seed(seed)
    targets = (torch.rand(num_samples, generator=random) ** 2 * num_classes).long()
    outputs = torch.randn(num_samples, num_classes, generator=random)
    outputs[torch.arange(num_samples), targets] += 1
    return outputs, targets


def in_batches(outputs: Tensor, targets: Tensor, num_classes: int, size: int) -> float:
    statistic = macro_f1(num_classes)
    parts = [statistic.collect(o, t) for o, t in zip(outputs.split(size), targets.split(size), strict=True)]
    return statistic.finish(torch.stack(parts).sum(0).double())


def test_accuracy_is_a_score_per_sample() -> None:
    outputs, targets = scores(500, 7, seed=0)
    found = accuracy(outputs, targets)
    assert found.shape == (500,) and float(found.mean()) == pytest.approx(accuracy_score(targets, outputs.argmax(1)))


@pytest.mark.parametrize("size", [1, 33, 500])
def test_macro_f1_is_scikit_learns_whatever_the_batches(size: int) -> None:
    outputs, targets = scores(500, 20, seed=1)
    assert in_batches(outputs, targets, 20, size) == pytest.approx(
        f1_score(targets, outputs.argmax(1), average="macro")
    )


def test_a_class_that_is_never_predicted_counts_as_0() -> None:
    outputs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    targets = torch.tensor([0, 0, 0, 1])
    assert in_batches(outputs, targets, 2, 4) == pytest.approx((6 / 7 + 0) / 2)


def test_a_class_that_does_not_occur_is_left_out() -> None:
    outputs, targets = scores(100, 3, seed=2)
    wide = torch.cat([outputs, torch.full((100, 2), -100.0)], dim=1)
    assert in_batches(wide, targets, 5, 10) == pytest.approx(f1_score(targets, outputs.argmax(1), average="macro"))


def test_all_right_is_1_and_all_wrong_is_0() -> None:
    targets = torch.arange(4)
    assert in_batches(torch.eye(4), targets, 4, 2) == 1.0
    assert in_batches(torch.eye(4).roll(1, 1), targets, 4, 2) == 0.0
