"""Measurements of a rank's machine while a trial is timed: load by others, clocks of cores and GPU, energy.

Counters are read before a timed region starts and after it has ended; nothing runs beside the steps. Clocks come from
Linux's files: psutil's ``cpu_freq`` gives a nominal clock where none can be read, as on most virtual machines.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from raypar.gpus import NoDriver, device_handle, open_nvml
from raypar.study.quantity import Timed, quantities
from raypar.train.affinity import TOPOLOGY
from raypar.train.energy import EnergyMonitor, gpu_counters, package_counters

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

FORK_SERVER = "raypar.run.forkserver"  # in the command line of the process that ranks are forked from
RAY_FILES = ("/ray/core/", "/ray/_private/", "/ray/dashboard/", "/ray/autoscaler/")  # in those of Ray's processes


class CpuTimes(NamedTuple):
    """Seconds on a clock, and CPU times by then."""

    at_s: float = 0.0
    ran_s: float = 0.0  # this process's threads on a core
    waited_s: float = 0.0  # its threads, runnable without one
    busy_s: float = 0.0  # the rank's cores
    machine_busy_s: float = 0.0  # all cores
    own_s: float = 0.0  # the rank's processes
    raypar_s: float = 0.0  # raypar's and Ray's, as far as `raypar_processes` finds them


def raypar_processes() -> list[psutil.Process]:
    """Return the processes that run the study of this rank: raypar's own and those of its private Ray.

    Empty on a cluster that the study joined, because its Ray may do other work.
    """
    try:
        server = psutil.Process().parent()
        if server is None or FORK_SERVER not in " ".join(server.cmdline()):
            return []
        driver = server.parent()
        if driver is None or _is_of_ray(driver):
            return []
        return [driver, *filter(_is_of_ray, driver.children(recursive=True))]
    except psutil.Error:
        return []


def _is_of_ray(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False
    return command.startswith("ray::") or any(files in command for files in RAY_FILES)


class CpuMonitor:
    """Use of the cores by the rank and by others, over the timed regions.

    ``cpu_wait_share`` is the share of the threads' runnable time that they spent waiting for a core (Linux schedstat),
    which shows core sharing exactly. ``foreign_cpu_share`` is the load of the rank's cores by other processes: the
    cores' busy time (10 ms resolution) minus the rank's, and minus these cores' proportional part of raypar's.
    ``raypar_load_cores`` is the number of cores that raypar and Ray kept busy.

    Attributes:
        sums: times over the regions.
    """

    def __init__(self, cores: tuple[int, ...], of_raypar: Sequence[psutil.Process] = ()) -> None:
        self._cores, self._of_raypar = cores, of_raypar
        self.sums = self._before = CpuTimes()

    def start(self) -> None:
        self._before = self._read()

    def stop(self) -> None:
        # Signed, so that the ticks' rounding cancels out over the regions. The times of an ended thread are lost.
        used = CpuTimes(*(after - before for after, before in zip(self._read(), self._before, strict=True)))
        used = used._replace(ran_s=max(0.0, used.ran_s), waited_s=max(0.0, used.waited_s))
        self.sums = CpuTimes(*(a + b for a, b in zip(self.sums, used, strict=True)))

    def summary(self) -> dict[str, float]:
        """Return the figures, shares from 0 to 1, where the system has the counters."""
        shares, sums = {}, self.sums
        if sums.ran_s + sums.waited_s > 0:
            shares["cpu_wait_share"] = sums.waited_s / (sums.ran_s + sums.waited_s)
        if self._cores:
            share = (sums.busy_s - sums.own_s) / sums.at_s / len(self._cores)
            share -= sums.raypar_s / sums.at_s / (psutil.cpu_count() or 1)
            shares["foreign_cpu_share"] = min(1.0, max(0.0, share))
        if self._of_raypar:
            shares["raypar_load_cores"] = max(0.0, sums.raypar_s / sums.at_s)
        return shares

    def _read(self) -> CpuTimes:
        ran_ns = waited_ns = 0
        for stat in Path("/proc/self/task").glob("*/schedstat"):
            try:
                ran, waited, _ = stat.read_text().split()
            except (OSError, ValueError):  # a thread that just ended; kernels without schedstats
                continue
            ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
        rank = psutil.Process()
        own_s = sum(rank.cpu_times()[:4])
        for child in rank.children(recursive=True):  # loader processes
            with contextlib.suppress(psutil.Error):
                # Includes the times of its ended children, which were in the sum before.
                own_s += sum(child.cpu_times()[:4])
        raypar_s = 0.0
        for process in self._of_raypar:
            with contextlib.suppress(psutil.Error):
                raypar_s += sum(process.cpu_times()[:2])  # without ended children, which were counted separately
        per_core = psutil.cpu_times(percpu=True)
        busy_s = _busy_s([per_core[core] for core in self._cores if core < len(per_core)])
        times = (time.perf_counter(), ran_ns / 1e9, waited_ns / 1e9, busy_s, _busy_s(per_core), own_s, raypar_s)
        return CpuTimes(*times)


def _busy_s(cores: Sequence[Any]) -> float:
    """Return the time in which these cores ran a process, or another virtual machine used them."""
    # User time includes guest time; only Linux has steal.
    return float(sum(t.user + t.nice + t.system + getattr(t, "steal", 0.0) for t in cores))


class ClockMonitor:
    """Clocks of the rank's cores at the end of every timed region, while they still run under load."""

    def __init__(self, cores: tuple[int, ...], folder: Path = TOPOLOGY) -> None:
        self._folders = [folder / f"cpu{core}" for core in cores]
        self._mhz: list[float] = []
        self._throttles: int | None = None
        self._before: int | None = None

    def start(self) -> None:
        self._before = self._throttle_count()

    def stop(self) -> None:
        if clocks := self._read("cpufreq/scaling_cur_freq"):
            self._mhz.append(sum(clocks) / len(clocks) / 1e3)
        after = self._throttle_count()
        if self._before is not None and after is not None:
            self._throttles = (self._throttles or 0) + max(0, after - self._before)

    def summary(self) -> dict[str, float]:
        """Return ``cpu_mhz_first``, ``_mean`` and ``_last`` over the ends of regions, mean of the cores; ``throttles``.

        Figures that the system doesn't show are absent. ``throttles`` counts how often a core or its package slowed
        down because it was too hot.
        """
        figures: dict[str, float] = {} if self._throttles is None else {"throttles": self._throttles}
        if mhz := self._mhz:
            figures |= {"cpu_mhz_first": mhz[0], "cpu_mhz_mean": sum(mhz) / len(mhz), "cpu_mhz_last": mhz[-1]}
        return figures

    def _throttle_count(self) -> int | None:
        """Return the sum over the rank's cores and their hottest package; every core shows its package's count."""
        cores = self._read("thermal_throttle/core_throttle_count")
        packages = self._read("thermal_throttle/package_throttle_count")
        return sum(cores) + max(packages, default=0) if cores or packages else None

    def _read(self, name: str) -> list[int]:
        """Return the number in a file of each core that has one."""
        numbers = []
        for folder in self._folders:
            with contextlib.suppress(OSError, ValueError):
                numbers.append(int((folder / name).read_text()))
        return numbers


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
            self._note(self._mhz, lambda: library.nvmlDeviceGetClockInfo(self._card, library.NVML_CLOCK_SM))
            self._note(self._slowdowns, self._is_slowed_down)
            self._note(
                self._celsius, lambda: library.nvmlDeviceGetTemperature(self._card, library.NVML_TEMPERATURE_GPU)
            )
            self._note(self._others, self._num_others)

    def summary(self) -> dict[str, float]:
        """Return the figures over the regions.

        ``gpu_mhz_first``, ``_mean`` and ``_last``: clock of the multiprocessors; ``gpu_max_mhz``: the GPU's highest
        clock; ``gpu_slowdowns``: number of regions after which heat or a power brake slowed it down; ``gpu_celsius``:
        the highest temperature; ``gpu_other_processes``: the largest number of foreign processes on it at a time.
        """
        figures: dict[str, float] = {}
        if mhz := self._mhz:
            figures |= {"gpu_mhz_first": mhz[0], "gpu_mhz_mean": sum(mhz) / len(mhz), "gpu_mhz_last": mhz[-1]}
            with contextlib.suppress(self._library.NVMLError):
                figures["gpu_max_mhz"] = self._library.nvmlDeviceGetMaxClockInfo(
                    self._card, self._library.NVML_CLOCK_SM
                )
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
        server, process = psutil.Process().parent(), psutil.Process(pid)
        if server is None or FORK_SERVER not in " ".join(server.cmdline()):
            return False
        driver = server.parent()  # fresh ranks have a server each
        study = {server.pid, driver.pid if driver else server.pid}
        return study.isdisjoint(each.pid for each in process.parents()) and not process.name().startswith(GPU_SERVICES)
    except psutil.Error:  # it has ended
        return False


@dataclass(frozen=True)
class RankCounters:
    """Counters of one rank's machine and GPU, over the timed regions.

    Attributes:
        machine: identity of the machine, the same in all containers.
        num_cores: cores of the machine.
        elapsed_s: total length of the regions.
        busy_s: CPU time of the machine.
        own_s: the part of this rank's processes.
        raypar_s: the part of raypar and Ray, which run the study.
        package_j: joules of all CPU packages of the machine; None: can't be read.
        gpu: identity of the GPU; empty: the rank has no GPU that counts energy.
        gpu_j: joules of the GPU; None: can't be read.
        no_energy: reasons why some energy can't be read.
    """

    machine: str
    num_cores: int
    elapsed_s: float
    busy_s: float
    own_s: float
    raypar_s: float = 0.0
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

    None if the regions were too short, or if the machine's counters don't even show the trial's own work.
    """
    loads: dict[str, float | None] = {}
    for machine in {rank.machine for rank in ranks}:
        there = [rank for rank in ranks if rank.machine == machine]
        # The ranks' regions start and end together, except for stragglers in the last step.
        elapsed_s, busy_s = max(rank.elapsed_s for rank in there), max(rank.busy_s for rank in there)
        own_s = sum(rank.own_s for rank in there) + max(rank.raypar_s for rank in there)
        is_known = elapsed_s >= MIN_ELAPSED_S and busy_s >= own_s / 2
        loads[machine] = max(0.0, busy_s - own_s) / elapsed_s if is_known else None
    return [loads[rank.machine] for rank in ranks]


def stalls(step_times_s: Sequence[float], period: int = 1) -> list[float]:
    """Return the seconds of each step in which a trial stood still, as when a link is cut or a process is stopped.

    Args:
        step_times_s: times of all timed steps on the slowest rank.
        period: the last step of each period is of another kind, as when local SGD averages the weights.

    Returns:
        Empty if such steps are regular (over 5 % of their kind) or too short to matter. Never includes the first step,
        which does one-time work if there are no warm-up steps.
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

    None if not all GPUs, or for a trial without GPUs not all packages, can be read. Packages are left out if only some
    of the machines show them.
    """
    # In reverse, so that the first rank on a machine or GPU counts.
    package_j = _sum_j({rank.machine: rank.package_j for rank in reversed(ranks)}.values())
    if not any(rank.gpu for rank in ranks):
        return None if package_j is None else (package_j, "CPU packages")
    gpu_j = _sum_j({(rank.machine, rank.gpu): rank.gpu_j for rank in reversed(ranks)}.values())
    if gpu_j is None or package_j is None:
        return None if gpu_j is None else (gpu_j, "GPUs")
    return gpu_j + package_j, "CPU packages and GPUs"


def _sum_j(joules: Iterable[float | None]) -> float | None:
    """Return the sum; None if one is unknown."""
    values = list(joules)
    return None if None in values else sum(filter(None, values), 0.0)


class Telemetry:
    """Load, clocks and energy of one rank's cores and GPU, and what packages measure, over the timed regions."""

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
        """Return the figures of `CpuMonitor`, `ClockMonitor`, `GpuMonitor` and packages, fields of `RankConditions`."""
        values = {key: value for key, monitor in self._of_quantities.items() if (value := monitor.value()) is not None}
        of_packages = {"quantities": values} if values else {}
        return {**self._cpu.summary(), **self._clocks.summary(), **self._gpu_state.summary(), **of_packages}

    def counters(self) -> RankCounters:
        """Return the counters, which are combined over the ranks of a machine."""
        sums, no_energy = self._cpu.sums, (self._package.why_not, self._card.why_not)
        return RankCounters(
            *(this_machine(), psutil.cpu_count() or 1, sums.at_s, sums.machine_busy_s, sums.own_s, sums.raypar_s),
            *(self._package.joules, self._gpu, self._card.joules, tuple(filter(None, no_energy))),
        )
