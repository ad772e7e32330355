"""Clock of a region's steps, on the host and with events of a GPU."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from raypar.measure import steps
from raypar.measure.steps import StepTimer


@pytest.mark.parametrize("step_times_s", [[0.5, 1.5, 0.25], []])
def test_step_times_are_the_times_between_laps_and_the_total_is_the_region(monkeypatch, step_times_s):
    timer = StepTimer(torch.device("cpu"))
    for start_s in (10.0, 100.0):  # a timer that is started again drops the steps before
        clock = itertools.accumulate([start_s, *step_times_s, 0.25])
        monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=clock.__next__))
        timer.start()
        for _ in step_times_s:
            timer.lap()
        timer.stop()
        assert (timer.step_times_s(), timer.total_s) == (step_times_s, sum(step_times_s) + 0.25)


@pytest.fixture
def events(monkeypatch):
    """Replace CUDA's events, and return the list of all that are made; the n-th record is at n² ms."""
    made, times_ms = [], iter(n * n for n in range(1000))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            made.append(self)

        def record(self):
            self.at_ms = next(times_ms)

        def elapsed_time(self, end):
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(steps, "wait_for_device", lambda _: None)
    return made


def test_segments_reuse_the_events_of_earlier_segments(events):
    timer, first = StepTimer(torch.device("cuda")), 0
    for num_steps in (3, 5, 2, 5):
        timer.start()
        for _ in range(num_steps):
            timer.lap()
        timer.stop()
        marks = [n * n for n in range(first, first + num_steps + 1)]
        assert timer.step_times_s() == pytest.approx([(b - a) / 1e3 for a, b in itertools.pairwise(marks)])
        first += num_steps + 1
    assert len(events) == 5 + 1
