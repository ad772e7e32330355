"""An optimizer's name becomes the optimizer, with the config's numbers; LARS and LAMB step as their papers say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.optim import Optimizer

from raypar.study.options import OPTIMIZERS
from raypar.train.optim import LAMB, LARS, build_optimizer

Array: TypeAlias = npt.NDArray[np.float64]


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


WEIGHTS = np.array([[3.0, -2.0], [0.5, 1.0]])
GRADIENTS = [
    np.array([[0.3, 0.1], [-0.2, 0.4]]),
    np.array([[-0.5, 0.2], [0.1, 0.0]]),
    np.array([[0.1, 0.1], [2.0, 1.0]]),
]


def stepped(optimizer_of: Callable[..., Optimizer], start: Array, gradients: Sequence[Array], **chosen: float) -> Array:
    """Return float64 weights after an optimizer's steps with these gradients."""
    weights = torch.nn.Parameter(torch.tensor(start))
    optimizer = optimizer_of([weights], **chosen)
    for gradient in gradients:
        weights.grad = torch.tensor(gradient)
        optimizer.step()
    return np.asarray(weights.detach().numpy())


def lars_by_hand(w: Array, gradients: Sequence[Array], lr: float, beta: float, eta: float = 0.001) -> Array:
    v = np.zeros_like(w)
    for g in gradients:
        ratio = eta * np.linalg.norm(w) / (np.linalg.norm(g) + beta * np.linalg.norm(w))
        v = 0.9 * v + lr * ratio * (g + beta * w)
        w = w - v
    return w


def lamb_by_hand(w: Array, gradients: Sequence[Array], lr: float, decay: float, *, adapted: bool = True) -> Array:
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        update = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + decay * w
        ratio = np.linalg.norm(w) / np.linalg.norm(update) if adapted else 1.0
        w = w - lr * ratio * update
    return w


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_lars_takes_the_papers_steps(weight_decay: float) -> None:
    theirs = stepped(LARS, WEIGHTS, GRADIENTS, lr=2.0, weight_decay=weight_decay)
    assert theirs == pytest.approx(lars_by_hand(WEIGHTS, GRADIENTS, 2.0, weight_decay), rel=1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_lamb_takes_the_papers_steps(weight_decay: float) -> None:
    theirs = stepped(LAMB, WEIGHTS, GRADIENTS, lr=0.1, weight_decay=weight_decay)
    assert theirs == pytest.approx(lamb_by_hand(WEIGHTS, GRADIENTS, 0.1, weight_decay), rel=1e-12)


def test_the_first_steps_are_the_numbers_of_a_pocket_calculator() -> None:
    w, g = np.array([[3.0, 4.0]]), np.array([[0.6, 0.8]])  # norms 5 and 1
    lars = stepped(LARS, w, [g], lr=10.0, weight_decay=0.2)  # 0.001 * 5 / (1 + 0.2 * 5) = 0.0025
    assert lars == pytest.approx(np.array([[3 - 0.025 * 1.2, 4 - 0.025 * 1.6]]), rel=1e-12)
    lamb = stepped(LAMB, w, [g], lr=0.1)  # Adam's first step is the gradient's sign, of norm sqrt(2)
    assert lamb == pytest.approx(w - 0.1 * 5 / math.sqrt(2), rel=1e-5)


def test_biases_and_norms_are_neither_adapted_nor_decayed() -> None:
    w, gradients = WEIGHTS.reshape(-1), [g.reshape(-1) for g in GRADIENTS]
    lars = stepped(LARS, w, gradients, lr=0.1, weight_decay=0.5)
    assert lars == pytest.approx(stepped(torch.optim.SGD, w, gradients, lr=0.1, momentum=0.9), rel=1e-12)
    lamb = stepped(LAMB, w, gradients, lr=0.1, weight_decay=0.5)
    assert lamb == pytest.approx(lamb_by_hand(w, gradients, 0.1, 0.0, adapted=False), rel=1e-12)


# Away from 0, where a norm is no number to divide by and LAMB's eps is no longer small.
matrices = arrays(np.float64, (3, 2), elements=st.floats(0.1, 10) | st.floats(-10, -0.1))


@given(matrices, matrices, st.sampled_from([0.5, 10.0, 1e3]))
def test_lars_and_lamb_heed_a_gradients_direction_and_not_its_size(w: Array, g: Array, factor: float) -> None:
    for optimizer in (LARS, LAMB):
        moved, moved_by_more = stepped(optimizer, w, [g], lr=0.1), stepped(optimizer, w, [factor * g], lr=0.1)
        assert moved == pytest.approx(moved_by_more, rel=1e-3, abs=1e-3)


@given(matrices, st.floats(0, 0.1))
def test_a_step_of_lars_is_lr_times_the_trust_coefficient_of_the_weights_at_most(w: Array, decay: float) -> None:
    step = np.linalg.norm(stepped(LARS, w, [np.ones((3, 2))], lr=0.5, weight_decay=decay) - w)
    assert step <= 0.5 * 0.001 * np.linalg.norm(w) * (1 + 1e-9)


@pytest.mark.parametrize("optimizer", [LARS, LAMB])
def test_weights_that_start_at_0_move_and_a_gradient_of_0_breaks_nothing(optimizer: Callable[..., Optimizer]) -> None:
    zeros, ones = np.zeros((2, 2)), np.ones((2, 2))
    assert (stepped(optimizer, zeros, [ones], lr=0.1) < 0).all()
    assert (stepped(optimizer, ones, [zeros], lr=0.1) == ones).all()
    assert (stepped(optimizer, zeros, [zeros], lr=0.1, weight_decay=0.1) == zeros).all()


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_training_goes_on_from_a_saved_state_as_if_it_had_not_stopped(name: str) -> None:
    def made() -> tuple[torch.nn.Parameter, Optimizer]:
        weights = torch.nn.Parameter(torch.tensor(WEIGHTS))
        return weights, build_optimizer([weights], named(name, 0.1, 0.01))

    def step(weights: torch.nn.Parameter, optimizer: Optimizer, gradient: Array) -> None:
        weights.grad = torch.tensor(gradient)
        optimizer.step()

    weights, optimizer = made()
    step(weights, optimizer, GRADIENTS[0])
    other, resumed = made()
    other.data.copy_(weights.data)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    for each in ((weights, optimizer), (other, resumed)):
        step(*each, GRADIENTS[1])
    assert torch.equal(weights, other)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_parameter_without_a_gradient_stays(name: str) -> None:
    weights, idle = torch.nn.Parameter(torch.tensor(WEIGHTS)), torch.nn.Parameter(torch.tensor(WEIGHTS))
    optimizer = build_optimizer([weights, idle], named(name, 0.1))
    weights.square().sum().backward()
    optimizer.step()
    assert (idle.detach().numpy() == WEIGHTS).all() and not (weights.detach().numpy() == WEIGHTS).all()
