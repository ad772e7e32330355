"""State of a rank's GPU at the end of every timed region: clock, temperature and other users."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import psutil

from raypar.gpus import NoDriver, device_handle, open_nvml
from raypar.measure.cpu import clock_fields, study_processes

# NVML's reasons for a reduced clock. The power limit (SwPowerCap) is normal under load. HwSlowdown, of which the last
# two are kinds, is set for a moment with every change of a clock.
SLOWDOWNS = ("SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
GPU_SERVICES = ("nvidia-cuda-mps",)  # don't compute themselves


class GpuMonitor:
    """Clock, temperature and other users of the rank's GPU at the end of every timed region, while it is still warm.

    Figures that NVML doesn't give are absent. For a MIG slice, clock and temperature are those of the whole card.

    Args:
        uuid: torch's identifier; empty: the rank doesn't train on a GPU, and NVML is not used.
    """

    def __init__(self, uuid: str) -> None:
        self._library: Any = None
        self._mhz: list[float] = []
        self._celsius: list[float] = []
        self._slowdowns: list[bool] = []
        self._others: list[int] = []
        self._is_other: dict[int, bool] = {}  # by process
        if uuid:
            with contextlib.suppress(NoDriver):
                library = open_nvml()
                with contextlib.suppress(library.NVMLError):
                    self._device = self._card = device_handle(library, uuid)
                    if library.nvmlDeviceIsMigDeviceHandle(self._device):
                        self._card = library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._device)
                    self._library = library

    def start(self) -> None:
        if self._library:
            self._note(self._others, self._num_others)

    def stop(self) -> None:
        if library := self._library:
            clock, sensor = library.NVML_CLOCK_SM, library.NVML_TEMPERATURE_GPU
            self._note(self._mhz, lambda: library.nvmlDeviceGetClockInfo(self._card, clock))
            self._note(self._slowdowns, self._is_slowed_down)
            self._note(self._celsius, lambda: library.nvmlDeviceGetTemperature(self._card, sensor))
            self._note(self._others, self._num_others)

    def summary(self) -> dict[str, float]:
        """Return the known fields of `raypar.study.conditions.GpuConditions`."""
        figures = clock_fields("gpu", self._mhz)
        if self._mhz:
            clock = self._library.NVML_CLOCK_SM
            with contextlib.suppress(self._library.NVMLError):
                figures["gpu_max_mhz"] = self._library.nvmlDeviceGetMaxClockInfo(self._card, clock)
        if self._slowdowns:
            figures["gpu_slowdowns"] = sum(self._slowdowns)
        if self._celsius:
            figures["gpu_celsius"] = max(self._celsius)
        if self._others:
            figures["gpu_other_processes"] = max(self._others)
        return figures

    def _note(self, values: list[Any], read: Callable[[], Any]) -> None:
        with contextlib.suppress(self._library.NVMLError):  # this GPU, or its driver, doesn't show it
            if (value := read()) is not None:
                values.append(value)

    def _is_slowed_down(self) -> bool:
        library = self._library
        try:
            reasons = library.nvmlDeviceGetCurrentClocksEventReasons(self._card)
        except (AttributeError, library.NVMLError):  # its name before driver 535
            reasons = library.nvmlDeviceGetCurrentClocksThrottleReasons(self._card)
        # Both names have the same bits.
        return any(reasons & getattr(library, f"nvmlClocksThrottleReason{name}") for name in SLOWDOWNS)

    def _num_others(self) -> int | None:
        """Return the number of foreign processes on the GPU; None if NVML's process ids are not this system's.

        In a container the ids may be the host's, or hidden. Then this process, which is on the GPU, is not among them.
        """
        pids = {each.pid for each in self._library.nvmlDeviceGetComputeRunningProcesses(self._device)}
        if os.getpid() not in pids:
            return None
        for pid in pids - self._is_other.keys():
            self._is_other[pid] = _is_anothers(pid)
        return sum(self._is_other[pid] for pid in pids)


def _is_anothers(pid: int) -> bool:
    """Return whether a process is neither this one nor of the same study; False if unknown."""
    try:
        study, process = {each.pid for each in study_processes()}, psutil.Process(pid)
        is_apart = bool(study) and study.isdisjoint(each.pid for each in process.parents())
        return is_apart and not process.name().startswith(GPU_SERVICES)
    except psutil.Error:  # it has ended
        return False
