"""Step times: one stamp a step, none of them waiting for the device."""

from __future__ import annotations

import time

import torch


class StepTimer:
    """Times the steps of one epoch.

    On a CPU a step ends when the host reaches `lap`. On a GPU the host runs ahead, so that events are put into the
    stream and read after the last step; only the ends of the region wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stamps: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._start_s = 0.0
        self.total_s = 0.0

    def start(self) -> None:
        """Open the timed region, the device idle."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            self._mark()
        elif self._device.type == "mps":
            torch.mps.synchronize()
        self._start_s = time.perf_counter()
        self._stamps = [self._start_s]

    def lap(self) -> None:
        """A step is over."""
        if self._on_gpu:
            self._mark()
        else:
            self._stamps.append(time.perf_counter())

    def stop(self) -> None:
        """Close the timed region, the device idle again."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        self.total_s = time.perf_counter() - self._start_s

    def step_times_s(self) -> list[float]:
        """Seconds per step since `start`."""
        if self._on_gpu:
            pairs = zip(self._events, self._events[1:], strict=False)
            return [a.elapsed_time(b) / 1e3 for a, b in pairs]
        return [b - a for a, b in zip(self._stamps, self._stamps[1:], strict=False)]

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
