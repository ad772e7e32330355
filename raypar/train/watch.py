"""What is watched on a rank's machine while a trial is timed: who has the cores, their clocks, and the energy.

Counters are read when a timed region starts and when it has ended, outside of it; nothing runs beside the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch

from raypar.train.clocks import ClockWatch
from raypar.train.cpu_watch import CpuWatch
from raypar.train.energy import EnergyWatch
from raypar.train.machines import Counted, this_machine


class Watch:
    """All of it, for one rank."""

    def __init__(self, cores: tuple[int, ...], device: torch.device) -> None:
        import torch

        self._gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        self._cpu = CpuWatch(cores)
        self._clocks = ClockWatch(cores)
        self._energy = EnergyWatch(self._gpu)

    def start(self) -> None:
        self._cpu.start()  # first, and last below: it looks for child processes, which takes the longest
        self._clocks.start()
        self._energy.start()

    def stop(self) -> None:
        self._energy.stop()
        self._clocks.stop()
        self._cpu.stop()

    def summary(self) -> dict[str, Any]:
        """For the trial's environment: see `CpuWatch` and `ClockWatch`."""
        return {**self._cpu.summary(), **self._clocks.summary()}

    def counted(self) -> Counted:
        """For what takes all ranks of a machine together."""
        return Counted(
            this_machine(),
            psutil.cpu_count() or 1,
            self._cpu.elapsed_s,
            self._cpu.machine_busy_s,
            self._cpu.own_s,
            self._energy.package_j,
            self._gpu,
            self._energy.gpu_j,
            tuple(self._energy.why_not),
        )
