"""Step times are the distances between the laps, and the total is the region."""

import pytest
import torch

from raypar.train import loop as module
from raypar.train.loop import StepTimer


@pytest.mark.parametrize(
    ("readings_s", "step_times_s", "total_s"),
    [
        ([10.0, 10.5, 12.0, 12.25, 12.5], [0.5, 1.5, 0.25], 2.5),
        ([0.0, 4.0, 4.0], [4.0], 4.0),  # from the start to the first lap is the first step
        ([1.0, 1.5], [], 0.5),
    ],
)
def test_step_times_are_the_distances_of_the_laps_and_the_total_is_the_region(
    monkeypatch, readings_s, step_times_s, total_s
):
    timer = StepTimer(torch.device("cpu"))
    for offset_s in (0.0, 100.0):  # a timer that is started again drops the steps before
        clock = iter([reading_s + offset_s for reading_s in readings_s])
        monkeypatch.setattr(module.time, "perf_counter", lambda clock=clock: next(clock))
        timer.start()
        for _ in step_times_s:
            timer.lap()
        timer.stop()
        monkeypatch.undo()
        assert (timer.step_times_s(), timer.total_s) == (step_times_s, total_s)
