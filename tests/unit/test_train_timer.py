"""Step times are the distances between the laps, and the total is the whole region."""

from __future__ import annotations

import pytest
import torch

from raypar.train import loop as module
from raypar.train.loop import StepTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that `time.perf_counter` tells, one after the other."""
    told: list[float] = []
    monkeypatch.setattr(module.time, "perf_counter", lambda: told.pop(0))
    return told


def test_step_times_add_up_from_start_to_the_last_lap(clock: list[float]) -> None:
    clock += [10.0, 10.5, 12.0, 12.25, 12.5]
    timer = StepTimer(torch.device("cpu"))
    timer.start()
    for _ in range(3):
        timer.lap()
    timer.stop()
    assert timer.step_times_s() == [0.5, 1.5, 0.25]
    assert timer.total_s == 2.5


def test_what_lies_between_start_and_the_first_lap_belongs_to_the_first_step(clock: list[float]) -> None:
    clock += [0.0, 4.0, 4.0]
    timer = StepTimer(torch.device("cpu"))
    timer.start()
    timer.lap()
    timer.stop()
    assert timer.step_times_s() == [4.0]


def test_a_timer_that_is_started_again_forgets_the_steps_before(clock: list[float]) -> None:
    clock += [0.0, 1.0, 1.0, 5.0, 7.0, 8.0]
    timer = StepTimer(torch.device("cpu"))
    for _ in range(2):
        timer.start()
        timer.lap()
        timer.stop()
    assert timer.step_times_s() == [2.0]
    assert timer.total_s == 3.0


def test_a_region_without_steps_has_no_step_times(clock: list[float]) -> None:
    clock += [1.0, 1.5]
    timer = StepTimer(torch.device("cpu"))
    timer.start()
    timer.stop()
    assert timer.step_times_s() == [] and timer.total_s == 0.5
