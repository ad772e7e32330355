"""The learning rate follows the batch size and the steps as the papers have it."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar.study.options import LR_SCALINGS, LR_SCHEDULES, resolve
from raypar.train.optim import build_optimizer, build_schedule, lr_factor, scaled_lr
from raypar.workloads import digits

lrs = st.floats(1e-6, 10)
batches = st.integers(1, 100_000)


def scaled(how: str, lr: float, batch: int, base: int) -> float:
    return scaled_lr({"lr": lr, "lr_scaling": how, "batch_size": batch, "lr_base_batch_size": base})


@given(lrs, batches, batches, st.integers(1, 64))
def test_k_times_the_batch_has_k_times_the_lr_or_its_square_root(lr: float, batch: int, base: int, k: int) -> None:
    assert scaled("none", lr, batch, base) == lr
    assert all(scaled(how, lr, batch, batch) == lr for how in LR_SCALINGS)
    assert scaled("linear", lr, k * batch, base) == pytest.approx(k * scaled("linear", lr, batch, base))
    assert scaled("sqrt", lr, k * batch, base) == pytest.approx(math.sqrt(k) * scaled("sqrt", lr, batch, base))


def test_the_paper_of_the_linear_rule_has_3_2_for_8192_images_where_256_have_0_1() -> None:
    assert scaled("linear", 0.1, 8192, 256) == pytest.approx(3.2)


def test_a_workloads_own_batch_size_is_the_base_unless_a_study_says_otherwise() -> None:
    chosen = {"lr": 0.1, "lr_scaling": "linear", "num_workers": 4, "per_worker_batch_size": 64}
    assert scaled_lr(resolve(digits, chosen)) == pytest.approx(0.4)
    assert scaled_lr(resolve(digits, {**chosen, "lr_base_batch_size": 128})) == pytest.approx(0.2)


def test_the_optimizer_starts_with_the_scaled_lr() -> None:
    weights = torch.nn.Parameter(torch.ones(2))
    config = resolve(digits, {"lr": 0.1, "lr_scaling": "sqrt", "batch_size": 256, "lr_base_batch_size": 64})
    assert build_optimizer([weights], config).param_groups[0]["lr"] == pytest.approx(0.2)


def factors(schedule: str, num_warmup: int, total: int) -> list[float]:
    """Return the factors of the steps 0 … total, the last of which is no longer taken."""
    return [
        lr_factor(step, schedule=schedule, num_warmup_steps=num_warmup, num_steps_total=total)
        for step in range(total + 1)
    ]


shapes = st.tuples(st.sampled_from(LR_SCHEDULES), st.integers(0, 40), st.integers(1, 80))


@given(shapes)
def test_the_lr_rises_evenly_through_the_warm_up_and_never_after_it(shape: tuple[str, int, int]) -> None:
    _, num_warmup, _ = shape
    every = factors(*shape)
    assert all(0 < factor <= 1 for factor in every[:-1])
    assert every[:num_warmup] == [(i + 1) / num_warmup for i in range(min(num_warmup, len(every)))]
    later = every[num_warmup:]
    assert later == sorted(later, reverse=True)
    assert later[:1] in ([], [1.0])


@given(st.sampled_from(("linear", "cosine")), st.integers(0, 40), st.integers(1, 80))
def test_a_decay_ends_at_0_just_after_the_last_step_and_stays_there(name: str, num_warmup: int, length: int) -> None:
    total = num_warmup + length
    assert factors(name, num_warmup, total)[-1] == pytest.approx(0, abs=1e-12)
    late = lr_factor(total + 7, schedule=name, num_warmup_steps=num_warmup, num_steps_total=total)
    assert late == pytest.approx(0, abs=1e-12)


def test_linear_and_cosine_are_the_textbooks() -> None:
    assert factors("linear", 2, 6) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    half = math.sqrt(0.5)
    assert factors("cosine", 0, 4) == pytest.approx([1, (1 + half) / 2, 0.5, (1 - half) / 2, 0])


def lrs_of_a_training(num_steps: int, **chosen: Any) -> list[float]:
    config = resolve(digits, {"optimizer": "sgd", "lr": 0.5, **chosen})
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(2))], config)
    schedule = build_schedule(optimizer, config, num_steps)
    assert schedule is not None
    lrs = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(num_steps):
            optimizer.step()
            lrs.append(float(optimizer.param_groups[0]["lr"]))
            schedule.step()
    return lrs


def test_every_step_of_a_training_has_the_schedules_lr() -> None:
    assert lrs_of_a_training(4, lr_schedule="linear") == pytest.approx([0.5, 0.375, 0.25, 0.125])
    assert lrs_of_a_training(5, lr_warmup_steps=4) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])


def test_a_warm_up_leads_to_the_scaled_lr() -> None:
    every = lrs_of_a_training(3, lr_warmup_steps=2, lr_scaling="linear", batch_size=128)
    assert every == pytest.approx([0.5, 1.0, 1.0])


def test_a_rank_that_leaves_the_update_to_another_is_not_warned() -> None:
    config = resolve(digits, {"lr_schedule": "linear", "lr": 0.5, "optimizer": "sgd"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = build_optimizer([torch.nn.Parameter(torch.ones(2))], config)
        schedule = build_schedule(optimizer, config, 2)
        assert schedule is not None
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25)


def test_an_lr_that_never_changes_needs_no_schedule() -> None:
    config = resolve(digits, {})
    assert build_schedule(build_optimizer([torch.nn.Parameter(torch.ones(2))], config), config, 10) is None
