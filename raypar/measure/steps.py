"""Clock of the steps of a timed region."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from raypar.parallel.strategy import wait_for_device


class StepTimer:
    """Clock of the steps of a timed region; `total_s`: seconds from `start` to `stop`.

    On a CPU, a step ends when the host calls `lap`. On a GPU the host runs ahead, so `lap` records an event in the
    stream. Only the ends of the region wait for the device. Later regions reuse the events.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stamps: list[Any] = []
        self._events: list[Any] = []  # those of `_stamps`, and spare ones
        self._start_s = 0.0
        self.total_s = 0.0

    def start(self) -> None:
        """Wait for the device, and start the region."""
        wait_for_device(self._device)
        self._stamps = []
        self.lap()
        self._start_s = time.perf_counter() if self._on_gpu else self._stamps[0]

    def lap(self) -> None:
        """Mark the end of a step."""
        if self._on_gpu:
            if len(self._stamps) == len(self._events):
                self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            event = self._events[len(self._stamps)]
            event.record()
            self._stamps.append(event)
        else:
            self._stamps.append(time.perf_counter())

    def stop(self) -> None:
        """Wait for the device, and end the region."""
        wait_for_device(self._device)
        self.total_s = time.perf_counter() - self._start_s

    def step_times_s(self) -> list[float]:
        """Return the seconds of each step since `start`."""
        return [a.elapsed_time(b) / 1e3 if self._on_gpu else b - a for a, b in pairwise(self._stamps)]
