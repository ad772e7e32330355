"""Optimizers by name, LARS and LAMB with their papers' steps; learning rates by batch size and step."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar.study.options import LR_SCALINGS, LR_SCHEDULES, OPTIMIZERS, resolve
from raypar.train.optim import LAMB, LARS, build_optimizer, build_schedule, lr_factor, scaled_lr
from raypar.workloads import digits


def named(name, lr, weight_decay=0.0):
    return {"optimizer": name, "lr": lr, "lr_scaling": "none", "weight_decay": weight_decay}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_lr_and_weight_decay_and_reduces_the_loss(name):
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
    weights, idle = (torch.nn.Parameter(torch.tensor(start)) for _ in range(2))
    optimizer = optimizer_of([weights, idle], **chosen)
    for gradient in gradients:
        weights.grad = torch.tensor(gradient)
        optimizer.step()
    assert (idle.detach().numpy() == start).all()  # it has no gradient
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


def test_biases_and_norms_are_neither_adapted_nor_decayed():
    w, gradients = WEIGHTS.reshape(-1), [g.reshape(-1) for g in GRADIENTS]
    lars = stepped(LARS, w, gradients, lr=0.1, weight_decay=0.5)
    assert lars == pytest.approx(stepped(torch.optim.SGD, w, gradients, lr=0.1, momentum=0.9), rel=1e-12)
    lamb = stepped(LAMB, w, gradients, lr=0.1, weight_decay=0.5)
    assert lamb == pytest.approx(lamb_by_hand(w, gradients, 0.1, 0.0, adapted=False), rel=1e-12)


@pytest.mark.parametrize("optimizer", [LARS, LAMB])
def test_weights_that_start_at_0_move_and_a_gradient_of_0_is_harmless(optimizer):
    zeros, ones = np.zeros((2, 2)), np.ones((2, 2))
    assert (stepped(optimizer, zeros, [ones], lr=0.1) < 0).all()
    assert (stepped(optimizer, ones, [zeros], lr=0.1) == ones).all()
    assert (stepped(optimizer, zeros, [zeros], lr=0.1, weight_decay=0.1) == zeros).all()


def scaled(how, lr, batch, base):
    return scaled_lr({"lr": lr, "lr_scaling": how, "batch_size": batch, "lr_base_batch_size": base})


@given(st.floats(1e-6, 10), st.integers(1, 100_000), st.integers(1, 100_000), st.integers(1, 64))
def test_k_times_the_batch_has_k_or_sqrt_k_times_the_lr(lr, batch, base, k):
    assert scaled("none", lr, batch, base) == lr
    assert all(scaled(how, lr, batch, batch) == lr for how in LR_SCALINGS)
    assert scaled("linear", lr, k * batch, base) == pytest.approx(k * scaled("linear", lr, batch, base))
    assert scaled("sqrt", lr, k * batch, base) == pytest.approx(math.sqrt(k) * scaled("sqrt", lr, batch, base))


def test_a_workloads_own_batch_size_is_the_base_unless_a_study_says_otherwise():
    chosen = {"lr": 0.1, "lr_scaling": "linear", "num_workers": 4, "per_worker_batch_size": 64}
    assert scaled_lr(resolve(digits, chosen)) == pytest.approx(0.4)
    assert scaled_lr(resolve(digits, {**chosen, "lr_base_batch_size": 128})) == pytest.approx(0.2)


def factors(schedule, num_warmup, total):
    """Return the factors of the steps 0 … total; the last is after the training."""
    of = {"schedule": schedule, "num_warmup_steps": num_warmup, "num_steps_total": total}
    return [lr_factor(step, **of) for step in range(total + 1)]


@given(st.sampled_from(LR_SCHEDULES), st.integers(0, 40), st.integers(1, 80))
def test_the_lr_rises_evenly_through_the_warm_up_and_then_falls_to_0_just_after_the_last_step(name, num_warmup, total):
    every = factors(name, num_warmup, total)
    assert all(0 < factor <= 1 for factor in every[:-1])
    assert every[:num_warmup] == [(i + 1) / num_warmup for i in range(min(num_warmup, len(every)))]
    later = every[num_warmup:]
    assert later == sorted(later, reverse=True)
    if len(later) > 1:
        assert later[0] == 1
        late = lr_factor(total + 7, schedule=name, num_warmup_steps=num_warmup, num_steps_total=total)
        assert later[-1] == late == pytest.approx(1 if name == "constant" else 0, abs=1e-12)


def test_factors_of_linear_and_cosine_schedules():
    assert factors("linear", 2, 6) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    half = math.sqrt(0.5)
    assert factors("cosine", 0, 4) == pytest.approx([1, (1 + half) / 2, 0.5, (1 - half) / 2, 0])


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"lr_schedule": "linear"}, [0.5, 0.375, 0.25, 0.125]),
        ({"lr_warmup_steps": 2, "lr_scaling": "linear", "batch_size": 128}, [0.5, 1.0, 1.0]),
        ({}, None),  # an lr that never changes needs no schedule
    ],
)
@pytest.mark.parametrize("runs_optimizer", [True, False])
def test_every_step_has_the_schedules_lr_without_a_warning_where_another_rank_updates(chosen, expected, runs_optimizer):
    config = resolve(digits, {"optimizer": "sgd", "lr": 0.5, **chosen})
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(2))], config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = build_schedule(optimizer, config, len(expected or ()))
        assert (schedule is None) == (expected is None)
        for lr in expected or ():
            assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(lr)
            if runs_optimizer:
                optimizer.step()
            schedule.step()
