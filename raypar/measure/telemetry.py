"""Measurements of a rank's machine while a trial is timed, and their sums over the ranks of a trial."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from raypar.measure.cpu import ClockMonitor, CpuMonitor, CpuTimes, raypar_processes
from raypar.measure.energy import EnergyMonitor, gpu_counters, package_counters
from raypar.measure.gpu import GpuMonitor
from raypar.study.quantity import Timed, quantities

if TYPE_CHECKING:
    import torch

# A step is a stall if it took at least MIN_STALL_S, and MIN_STALL_RATIO times the 95th percentile of its kind. On two
# cores under eight times their load, steps of 30 ms took up to 1.4 s, nine times their 95th percentile.
MIN_STALL_S = 3.0
MIN_STALL_RATIO = 5.0
MIN_STALL_STEPS = 5  # of a kind
MIN_STALL_SHARE = 0.02  # of the timed region, all stalls together: less changes no conclusion

# Busy time is counted in ticks of 10 ms on every core: a shorter region would be all rounding.
MIN_ELAPSED_S = 0.2


@dataclass(frozen=True)
class RankCounters:
    """Counters of one rank's machine and GPU, over the timed regions.

    Attributes:
        machine: identity of the machine, the same in all containers.
        num_cores: cores of the machine.
        times: length and CPU times of the regions.
        package_j: joules of all CPU packages of the machine; None: can't be read.
        gpu: identity of the GPU; empty: the rank has no GPU that counts energy.
        gpu_j: joules of the GPU; None: can't be read.
        no_energy: reasons why some energy can't be read.
    """

    machine: str
    num_cores: int
    times: CpuTimes
    package_j: float | None = None
    gpu: str = ""
    gpu_j: float | None = None
    no_energy: tuple[str, ...] = ()


def this_machine() -> str:
    """Return an identity of this machine; its containers have different host names, but the same counters."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def other_loads(ranks: Sequence[RankCounters]) -> list[float | None]:
    """Return, for each rank, the average number of its machine's cores that were busy with foreign work.

    None if the regions were too short, or if the machine's counters don't show the trial's own work.
    """
    loads: dict[str, float | None] = {}
    for machine in {rank.machine for rank in ranks}:
        there = [rank.times for rank in ranks if rank.machine == machine]
        # The ranks' regions start and end together, except for stragglers in the last step.
        elapsed_s, busy_s = max(times.at_s for times in there), max(times.machine_busy_s for times in there)
        own_s = sum(times.own_s for times in there) + max(times.raypar_s for times in there)
        is_known = elapsed_s >= MIN_ELAPSED_S and busy_s >= own_s / 2
        loads[machine] = max(0.0, busy_s - own_s) / elapsed_s if is_known else None
    return [loads[rank.machine] for rank in ranks]


def stalls(step_times_s: Sequence[float], period: int = 1) -> list[float]:
    """Return the seconds of each step in which a trial stood still, for example because a link was cut.

    Args:
        step_times_s: times of all timed steps on the slowest rank.
        period: the last step of each period is of another kind, as when local SGD averages the weights.

    Returns:
        Empty if such steps are regular (over 5 % of their kind) or too short to matter. The first step, which may do
        one-time work, never counts.
    """
    ends_period = [(i + 1) % period == 0 for i in range(len(step_times_s))]
    long: list[float] = []
    for kind in (True, False):
        times = [t for t, is_last in zip(step_times_s, ends_period, strict=True) if is_last is kind]
        if len(times) >= MIN_STALL_STEPS:
            usual_s = sorted(times)[min(math.ceil(0.95 * len(times)), len(times) - 1) - 1]
            limit_s = max(MIN_STALL_S, MIN_STALL_RATIO * usual_s)
            long += [t for i, t in enumerate(times) if t > limit_s and (i > 0 or ends_period[0] is not kind)]
    return long if sum(long) > MIN_STALL_SHARE * sum(step_times_s) else []


def energy(ranks: Sequence[RankCounters]) -> tuple[float, str] | None:
    """Return joules over all machines, each package and GPU once, and their source: "CPU packages", "GPUs" or both.

    None if some GPU can't be read, or without GPUs, some package. With GPUs, packages count only if every machine has
    them.
    """
    # In reverse, so that the first rank on a machine or GPU counts.
    package_j = _sum_j({rank.machine: rank.package_j for rank in reversed(ranks)}.values())
    gpu_j = _sum_j({(rank.machine, rank.gpu): rank.gpu_j for rank in reversed(ranks)}.values())
    if not any(rank.gpu for rank in ranks):
        return None if package_j is None else (package_j, "CPU packages")
    if gpu_j is None:
        return None
    return (gpu_j, "GPUs") if package_j is None else (gpu_j + package_j, "CPU packages and GPUs")


def _sum_j(joules: Iterable[float | None]) -> float | None:
    """Return the sum; None if one is unknown."""
    values = list(joules)
    return None if None in values else sum(filter(None, values), 0.0)


class Telemetry:
    """Load, clocks and energy of one rank's cores and GPU, and quantities of packages, over the timed regions."""

    def __init__(self, cores: tuple[int, ...], device: torch.device) -> None:
        import torch

        self.device = device
        self._gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        self._cpu = CpuMonitor(cores, raypar_processes())
        self._clocks = ClockMonitor(cores)
        self._gpu_state = GpuMonitor(self._gpu)
        self._package = EnergyMonitor(package_counters)
        self._card = EnergyMonitor(partial(gpu_counters, self._gpu) if self._gpu else list)
        # The first one lists child processes, which takes longest, so it is outside the others' regions.
        self._own: tuple[Timed, ...] = (self._cpu, self._clocks, self._gpu_state, self._package, self._card)
        self._of_quantities = {q.key: q.monitor() for q in quantities() if q.monitor is not None}

    def start(self) -> None:
        for monitor in (*self._of_quantities.values(), *self._own):
            monitor.start()

    def stop(self) -> None:
        for monitor in (*reversed(self._own), *self._of_quantities.values()):
            monitor.stop()

    def summary(self) -> dict[str, Any]:
        """Return the known fields of `raypar.study.conditions.RankConditions`."""
        values = {key: value for key, monitor in self._of_quantities.items() if (value := monitor.value()) is not None}
        of_packages = {"quantities": values} if values else {}
        return {**self._cpu.summary(), **self._clocks.summary(), **self._gpu_state.summary(), **of_packages}

    def counters(self) -> RankCounters:
        """Return the counters to combine over the ranks of a trial."""
        return RankCounters(
            machine=this_machine(),
            num_cores=psutil.cpu_count() or 1,
            times=self._cpu.sums,
            package_j=self._package.joules,
            gpu=self._gpu,
            gpu_j=self._card.joules,
            no_energy=tuple(filter(None, (self._package.why_not, self._card.why_not))),
        )
