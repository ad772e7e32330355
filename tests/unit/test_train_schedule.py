"""The learning rate follows the batch size and the steps as the papers have it."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar.study.options import LR_SCALINGS, LR_SCHEDULES, resolve
from raypar.train.optim import build_optimizer, build_schedule, lr_factor, scaled_lr
from raypar.workloads import digits

batches = st.integers(1, 100_000)


def scaled(how, lr, batch, base):
    return scaled_lr({"lr": lr, "lr_scaling": how, "batch_size": batch, "lr_base_batch_size": base})


@given(st.floats(1e-6, 10), batches, batches, st.integers(1, 64))
def test_k_times_the_batch_has_k_times_the_lr_or_its_square_root(lr, batch, base, k):
    assert scaled("none", lr, batch, base) == lr
    assert all(scaled(how, lr, batch, batch) == lr for how in LR_SCALINGS)
    assert scaled("linear", lr, k * batch, base) == pytest.approx(k * scaled("linear", lr, batch, base))
    assert scaled("sqrt", lr, k * batch, base) == pytest.approx(math.sqrt(k) * scaled("sqrt", lr, batch, base))


def test_a_workloads_own_batch_size_is_the_base_unless_a_study_says_otherwise():
    chosen = {"lr": 0.1, "lr_scaling": "linear", "num_workers": 4, "per_worker_batch_size": 64}
    assert scaled_lr(resolve(digits, chosen)) == pytest.approx(0.4)
    assert scaled_lr(resolve(digits, {**chosen, "lr_base_batch_size": 128})) == pytest.approx(0.2)


def factors(schedule, num_warmup, total):
    """Return the factors of the steps 0 … total, the last of which is no longer taken."""
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


def test_linear_and_cosine_are_the_textbooks():
    assert factors("linear", 2, 6) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    half = math.sqrt(0.5)
    assert factors("cosine", 0, 4) == pytest.approx([1, (1 + half) / 2, 0.5, (1 - half) / 2, 0])


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"lr_schedule": "linear"}, [0.5, 0.375, 0.25, 0.125]),
        ({"lr_warmup_steps": 4}, [0.125, 0.25, 0.375, 0.5, 0.5]),
        ({"lr_warmup_steps": 2, "lr_scaling": "linear", "batch_size": 128}, [0.5, 1.0, 1.0]),
        ({}, None),  # an lr that never changes needs no schedule
    ],
)
@pytest.mark.parametrize("runs_optimizer", [True, False])
def test_every_step_of_a_training_has_the_schedules_lr_and_a_rank_that_leaves_the_update_to_another_no_warning(
    chosen, expected, runs_optimizer
):
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
            assert schedule is not None
            schedule.step()
