"""The wide perceptron has the size asked for, and its made-up points can be learnt without being learnt by heart."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raypar.study.options import resolve
from raypar.study.workload import Data
from raypar.train.optim import build_optimizer
from raypar.workloads import wide_mlp

NARROW: dict[str, Any] = {"width": 128, "depth": 2, "num_features": 64, "num_points": 2048}


def config(**chosen: Any) -> dict[str, Any]:
    return resolve(wide_mlp, {**NARROW, **chosen})


def loaded(**chosen: Any) -> Data:
    assert wide_mlp.data is not None
    return wide_mlp.data(config(**chosen))


def network(chosen: dict[str, Any]) -> nn.Module:
    assert wide_mlp.model is not None
    return wide_mlp.model(chosen)


@given(
    width=st.integers(1, 40), depth=st.integers(1, 6), num_features=st.integers(2, 30), num_classes=st.integers(2, 12)
)
def test_the_layers_are_as_wide_and_as_many_as_asked_for(
    width: int, depth: int, num_features: int, num_classes: int
) -> None:
    model = network(config(width=width, depth=depth, num_features=num_features, num_classes=num_classes))
    assert isinstance(model, nn.Sequential)
    assert [type(layer) for layer in model] == [*[nn.Linear, nn.ReLU] * depth, nn.Linear]
    hidden = [(width, width)] * (depth - 1)
    shapes = [tuple(layer.weight.shape) for layer in model if isinstance(layer, nn.Linear)]
    assert shapes == [(width, num_features), *hidden, (num_classes, width)]
    assert model(torch.zeros(3, num_features)).shape == (3, num_classes)


def test_the_default_is_four_hidden_layers_of_1024_units() -> None:
    assert sum(p.numel() for p in network(resolve(wide_mlp, {})).parameters()) == (
        257 * 1024 + 3 * 1025 * 1024 + 1025 * 10
    )


def test_a_deep_network_keeps_the_scale_of_its_input() -> None:
    torch.manual_seed(0)
    scores = network(config(depth=16, width=512))(loaded().train.inputs)  # type: ignore[union-attr]
    assert 0.3 < float(scores.detach().std()) < 10


def test_the_points_are_the_same_every_time_and_around_the_same_centres_in_both_parts() -> None:
    data, again = loaded(), loaded()
    assert data.train is not None and data.val is not None and again.train is not None and again.val is not None
    assert data.train.inputs.shape == (2048, 64) and data.train.inputs.dtype == torch.float32
    assert data.val.inputs.shape == (512, 64) and data.val.targets.dtype == torch.int64
    assert torch.equal(data.train.inputs, again.train.inputs) and torch.equal(data.val.inputs, again.val.inputs)
    means = [
        torch.stack([part.inputs[part.targets == c].mean(0) for c in range(10)]) for part in (data.train, data.val)
    ]
    # A mean of 51 points is about a unit from its centre, two centres are nearly six apart.
    assert torch.cdist(*means).argmin(1).tolist() == list(range(10))


def test_no_point_is_both_trained_on_and_judged_by() -> None:
    data = loaded(num_features=2)
    assert data.train is not None and data.val is not None
    rows = [tuple(row.tolist()) for part in (data.train, data.val) for row in part.inputs]
    assert len(set(rows)) == len(rows) == 2560


@pytest.mark.parametrize(("num_points", "num_val"), [(1, 1), (7, 2), (40, 10)])
def test_the_sizes_are_known_beforehand(num_points: int, num_val: int) -> None:
    data = loaded(num_points=num_points)
    assert data.train is not None and data.val is not None
    assert len(data.train) == wide_mlp.train_size(config(num_points=num_points)) == num_points
    assert len(data.val) == num_val


def test_any_beginning_of_the_points_holds_every_class_in_its_share() -> None:
    counts = Counter(loaded(num_classes=7).train.targets[:30].tolist())  # type: ignore[union-attr]
    assert set(counts) == set(range(7)) and set(counts.values()) <= {4, 5}


def accuracy_after_an_epoch(chosen: dict[str, Any]) -> float:
    assert wide_mlp.data is not None
    data = wide_mlp.data(chosen)
    assert data.train is not None and data.val is not None
    torch.manual_seed(0)
    model = network(chosen)
    optimizer = build_optimizer(model.parameters(), chosen)
    for some in torch.randperm(len(data.train)).split(chosen["batch_size"]):
        loss = nn.functional.cross_entropy(model(data.train.inputs[some]), data.train.targets[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.inference_mode():
        return float((model(data.val.inputs).argmax(1) == data.val.targets).float().mean())


def test_points_never_seen_are_told_apart_after_one_short_epoch() -> None:
    assert accuracy_after_an_epoch(config(num_features=256, width=512, num_points=8192)) > 0.8


def test_a_deep_network_learns_too() -> None:
    assert accuracy_after_an_epoch(config(num_features=256, width=256, depth=12, num_points=8192)) > 0.4
