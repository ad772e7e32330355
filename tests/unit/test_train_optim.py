"""An optimizer's name becomes torch's optimizer, with the config's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypar.study.options import OPTIMIZERS
from raypar.train.optim import build_optimizer


def named(name: str, lr: float, weight_decay: float = 0.0) -> dict[str, Any]:
    return {"optimizer": name, "lr": lr, "lr_scaling": "none", "weight_decay": weight_decay}


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([3.0, -2.0]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_that_a_study_may_name_takes_lr_and_weight_decay_and_makes_the_loss_smaller(name: str) -> None:
    weights = parameter()
    optimizer = build_optimizer([weights], named(name, 0.05, 0.01))
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.05, 0.01)
    before = float(weights.detach().square().sum())
    for _ in range(3):
        optimizer.zero_grad()
        weights.square().sum().backward()
        optimizer.step()
    assert float(weights.detach().square().sum()) < before


@pytest.mark.parametrize(
    ("name", "momentum", "nesterov"), [("sgd", 0, False), ("momentum", 0.9, False), ("nesterov", 0.9, True)]
)
def test_momentum_and_nesterov_are_sgd_with_momentum_of_the_usual_size(
    name: str, momentum: float, nesterov: bool
) -> None:
    optimizer = build_optimizer([parameter()], named(name, 0.1))
    assert type(optimizer) is torch.optim.SGD
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["nesterov"]) == (momentum, nesterov)


def test_one_step_of_sgd_is_the_textbooks() -> None:
    weights = parameter()
    optimizer = build_optimizer([weights], named("sgd", 0.5))
    (weights * torch.tensor([1.0, 4.0])).sum().backward()
    optimizer.step()
    assert weights.tolist() == [2.5, -4.0]
