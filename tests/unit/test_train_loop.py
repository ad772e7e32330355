"""Warm-up leaves no trace, however long it is. The clock is a stand-in, and "cpu" stands for a GPU."""

import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from training import ALONE, NOISY, Reports, seed_data, trained

from raypar.measure.steps import StepTimer
from raypar.parallel.strategy import DistContext
from raypar.study.options import resolve
from raypar.train import loop
from raypar.train import training as training_module
from raypar.train.generators import generator_states
from raypar.train.step import Stepper
from raypar.train.training import Training


def seeded_training(context=ALONE, **config):
    seed_data()
    return Training(NOISY, resolve(NOISY, config), 3, context)


def text(states):
    return str({key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in states.items()})


def losses(num_warmup_steps):
    seed_data()
    _, reports = trained(NOISY, seed=3, num_warmup_steps=num_warmup_steps)
    return [(report["train_loss"], report["val_loss"]) for report in reports]


def test_a_training_is_the_same_after_any_number_of_warm_up_steps():
    states = []
    for num_warmup_steps in (0, 1, 3):
        training = seeded_training(num_warmup_steps=num_warmup_steps)
        training.warm_up()
        states.append(text(generator_states(ALONE.device)))
    assert states == [states[0]] * 3
    assert losses(0) == losses(1) == losses(3)


@dataclass(frozen=True)
class Ranks(DistContext):
    """One rank, with the largest values of another, call by call."""

    other: tuple[float, ...] = ()

    def max(self, values):
        self.asked.append(values[0])
        return [max(values[0], self.other[len(self.asked) - 1] if len(self.asked) <= len(self.other) else -1.0)]


def warmed_up(monkeypatch, *, step_s, other=(), **config):
    """Return the numbers of steps between reads of the clock.

    Args:
        step_s: seconds of a step.
    """
    clock, steps, rounds = SimpleNamespace(now_s=50.0), [], []
    context = Ranks(0, 1, ALONE.device, other)
    object.__setattr__(context, "asked", [])
    monkeypatch.setattr(training_module, "MIN_WARMUP_S", {"cpu": 1.0})
    training = seeded_training(context, **config)
    take_step = Stepper.step

    def step(self, batch):
        clock.now_s += step_s
        steps.append(batch)
        return take_step(self, batch)

    def wait(_):
        rounds.append(len(steps))
        steps.clear()

    monkeypatch.setattr(training_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(Stepper, "step", step)
    monkeypatch.setattr(training_module, "wait_for_device", wait)
    training.warm_up()
    return rounds + [len(steps)] * bool(steps)


@pytest.mark.parametrize(
    ("step_s", "rounds"), [(0.125, [2, 2, 2, 2, 2]), (5.0, [2, 2]), (0.3, [2, 2, 2])], ids=["short", "long", "third"]
)
def test_a_gpu_is_warmed_up_for_a_second_after_the_warm_up_steps_in_rounds_of_them(monkeypatch, step_s, rounds):
    assert warmed_up(monkeypatch, step_s=step_s, num_warmup_steps=2) == rounds


def test_all_ranks_warm_up_until_the_slowest_is_warm(monkeypatch):
    assert warmed_up(monkeypatch, step_s=5.0, other=(0.9, 0.5, -0.1), num_warmup_steps=2) == [2, 2, 2]


def test_the_warm_up_is_not_extended_without_warm_up_steps_or_on_a_cpu(monkeypatch):
    assert warmed_up(monkeypatch, step_s=0.1, num_warmup_steps=0) == []
    assert set(training_module.MIN_WARMUP_S) == {"cpu"}  # the stand-in's
    monkeypatch.undo()
    assert "cpu" not in training_module.MIN_WARMUP_S and training_module.MIN_WARMUP_S["cuda"] >= 1


def test_a_training_has_one_timer_for_all_its_segments(monkeypatch):
    made = []
    monkeypatch.setattr(loop, "StepTimer", lambda device, make=StepTimer: made.append(make(device)) or made[-1])
    losses(0)
    assert len(made) == 1


def test_the_time_between_steps_and_evaluations_is_that_of_reports_and_saving_has_its_own(monkeypatch):
    now_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(loop, "time", clock)

    class Slow(Reports):
        def report(self, metrics):
            now_s[0] += 5.0
            return super().report(metrics)

    class SlowWeights(loop.BestWeights):
        def save(self, model):
            now_s[0] += 3.0
            super().save(model)

    monkeypatch.setattr(loop, "BestWeights", SlowWeights)
    seed_data()
    outcome = loop.train(NOISY, resolve(NOISY, {"epochs": 2}), 3, ALONE, Slow(), start_s=0.0)
    conditions = outcome.conditions
    assert conditions.report_s == pytest.approx(10.0 - outcome.train_time_s - outcome.eval_time_s)
    assert (conditions.saving_s, conditions.profile_s) == (3.0, None)
