"""An optimizer's name becomes the optimizer, with the config's numbers; LARS and LAMB step as their papers say."""

import math
from copy import deepcopy

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from raypar.study.options import OPTIMIZERS
from raypar.train.optim import LAMB, LARS, build_optimizer

Array = npt.NDArray[np.float64]


def named(name, lr, weight_decay=0.0):
    return {"optimizer": name, "lr": lr, "lr_scaling": "none", "weight_decay": weight_decay}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_that_a_study_may_name_takes_lr_and_weight_decay_and_makes_the_loss_smaller(name):
    weights = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = build_optimizer([weights], named(name, 0.05, 0.01))
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.05, 0.01)
    if expected := {"sgd": (0, False), "momentum": (0.9, False), "nesterov": (0.9, True)}.get(name):
        assert type(optimizer) is torch.optim.SGD and (group["momentum"], group["nesterov"]) == expected
    before = float(weights.detach().square().sum())
    for _ in range(3):
        optimizer.zero_grad()
        weights.square().sum().backward()
        optimizer.step()
    assert float(weights.detach().square().sum()) < before


WEIGHTS = np.array([[3.0, -2.0], [0.5, 1.0]])
GRADIENTS = [np.array(g) for g in ([[0.3, 0.1], [-0.2, 0.4]], [[-0.5, 0.2], [0.1, 0.0]], [[0.1, 0.1], [2.0, 1.0]])]


def stepped(optimizer_of, start, gradients, **chosen):
    """Return float64 weights after an optimizer's steps with these gradients."""
    weights = torch.nn.Parameter(torch.tensor(start))
    optimizer = optimizer_of([weights], **chosen)
    for gradient in gradients:
        weights.grad = torch.tensor(gradient)
        optimizer.step()
    return np.asarray(weights.detach().numpy())


def lars_by_hand(w, gradients, lr, beta, eta=0.001):
    v = np.zeros_like(w)
    for g in gradients:
        ratio = eta * np.linalg.norm(w) / (np.linalg.norm(g) + beta * np.linalg.norm(w))
        v = 0.9 * v + lr * ratio * (g + beta * w)
        w = w - v
    return w


def lamb_by_hand(w, gradients, lr, decay, *, adapted=True):
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        update = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + decay * w
        ratio = np.linalg.norm(w) / np.linalg.norm(update) if adapted else 1.0
        w = w - lr * ratio * update
    return w


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_lars_and_lamb_take_the_papers_steps(weight_decay):
    lars = stepped(LARS, WEIGHTS, GRADIENTS, lr=2.0, weight_decay=weight_decay)
    assert lars == pytest.approx(lars_by_hand(WEIGHTS, GRADIENTS, 2.0, weight_decay), rel=1e-12)
    lamb = stepped(LAMB, WEIGHTS, GRADIENTS, lr=0.1, weight_decay=weight_decay)
    assert lamb == pytest.approx(lamb_by_hand(WEIGHTS, GRADIENTS, 0.1, weight_decay), rel=1e-12)


def test_the_first_steps_are_the_numbers_of_a_pocket_calculator():
    w, g = np.array([[3.0, 4.0]]), np.array([[0.6, 0.8]])  # norms 5 and 1
    lars = stepped(LARS, w, [g], lr=10.0, weight_decay=0.2)  # 0.001 * 5 / (1 + 0.2 * 5) = 0.0025
    assert lars == pytest.approx(np.array([[3 - 0.025 * 1.2, 4 - 0.025 * 1.6]]), rel=1e-12)
    lamb = stepped(LAMB, w, [g], lr=0.1)  # Adam's first step is the gradient's sign, of norm sqrt(2)
    assert lamb == pytest.approx(w - 0.1 * 5 / math.sqrt(2), rel=1e-5)


def test_biases_and_norms_are_neither_adapted_nor_decayed():
    w, gradients = WEIGHTS.reshape(-1), [g.reshape(-1) for g in GRADIENTS]
    lars = stepped(LARS, w, gradients, lr=0.1, weight_decay=0.5)
    assert lars == pytest.approx(stepped(torch.optim.SGD, w, gradients, lr=0.1, momentum=0.9), rel=1e-12)
    lamb = stepped(LAMB, w, gradients, lr=0.1, weight_decay=0.5)
    assert lamb == pytest.approx(lamb_by_hand(w, gradients, 0.1, 0.0, adapted=False), rel=1e-12)


# Away from 0, where a norm is no number to divide by and LAMB's eps is no longer small.
matrices = arrays(np.float64, (3, 2), elements=st.floats(0.1, 10) | st.floats(-10, -0.1))


@given(matrices, matrices, st.sampled_from([0.5, 10.0, 1e3]))
def test_lars_and_lamb_heed_a_gradients_direction_and_not_its_size(w, g, factor):
    for optimizer in (LARS, LAMB):
        moved, moved_by_more = stepped(optimizer, w, [g], lr=0.1), stepped(optimizer, w, [factor * g], lr=0.1)
        assert moved == pytest.approx(moved_by_more, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("optimizer", [LARS, LAMB])
def test_weights_that_start_at_0_move_and_a_gradient_of_0_breaks_nothing(optimizer):
    zeros, ones = np.zeros((2, 2)), np.ones((2, 2))
    assert (stepped(optimizer, zeros, [ones], lr=0.1) < 0).all()
    assert (stepped(optimizer, ones, [zeros], lr=0.1) == ones).all()
    assert (stepped(optimizer, zeros, [zeros], lr=0.1, weight_decay=0.1) == zeros).all()


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_training_goes_on_from_a_saved_state_and_a_parameter_without_a_gradient_stays(name):
    def build():
        weights, idle = (torch.nn.Parameter(torch.tensor(WEIGHTS)) for _ in range(2))
        return weights, idle, build_optimizer([weights, idle], named(name, 0.1, 0.01))

    weights, idle, optimizer = build()
    weights.grad = torch.tensor(GRADIENTS[0])
    optimizer.step()
    other, _, resumed = build()
    other.data.copy_(weights.data)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    for parameter, each in ((weights, optimizer), (other, resumed)):
        parameter.grad = torch.tensor(GRADIENTS[1])
        each.step()
    assert torch.equal(weights, other)
    assert (idle.detach().numpy() == WEIGHTS).all() and not (weights.detach().numpy() == WEIGHTS).any()
