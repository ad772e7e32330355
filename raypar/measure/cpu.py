"""Load and clocks of a rank's cores over the timed regions.

Counters are read before a timed region starts and after it has ended, so nothing runs beside the steps. Clocks come
from Linux's files: psutil's ``cpu_freq`` gives a nominal clock where none can be read, as on most virtual machines.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from raypar.signals import child_pids

TOPOLOGY = Path("/sys/devices/system/cpu")
# Parts of command lines: of the process that ranks are forked from, and of Ray's processes.
FORK_SERVER = "raypar.run.forkserver"
RAY_FILES = ("/ray/core/", "/ray/_private/", "/ray/dashboard/", "/ray/autoscaler/")


def study_processes() -> list[psutil.Process]:
    """Return this rank's fork server and the process that started it; empty outside of a study."""
    server = psutil.Process().parent()
    if server is None or FORK_SERVER not in " ".join(server.cmdline()):
        return []
    driver = server.parent()
    return [server, driver] if driver else [server]


def raypar_processes() -> list[psutil.Process]:
    """Return the processes that run the study of this rank: raypar's driver and those of its private Ray.

    Empty on a cluster that the study joined, because its Ray may do other work.
    """
    with contextlib.suppress(psutil.Error):
        for driver in study_processes()[1:]:
            if not _is_of_ray(driver):
                return [driver, *filter(_is_of_ray, driver.children(recursive=True))]
    return []


def _is_of_ray(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False
    return command.startswith("ray::") or any(files in command for files in RAY_FILES)


class CpuTimes(NamedTuple):
    """Seconds on a clock, and CPU times by then; or the differences between two of them."""

    at_s: float = 0.0
    ran_s: float = 0.0  # this process's threads on a core
    waited_s: float = 0.0  # its threads, runnable without one
    busy_s: float = 0.0  # the rank's cores
    machine_busy_s: float = 0.0  # all cores
    own_s: float = 0.0  # the rank's processes
    raypar_s: float = 0.0  # raypar's and Ray's, as far as `raypar_processes` finds them


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
        """Return fields of `raypar.study.conditions.CpuConditions`, where the system has the counters."""
        shares: dict[str, float] = {}
        sums = self.sums
        if not sums.at_s:  # no region, as in a trial that is stopped while it resumes
            return shares
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
        has_children = child_pids() != set()  # loader processes
        for child in rank.children(recursive=True) if has_children else ():
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
        """Return the fields of `raypar.study.conditions.CpuConditions` that the system shows."""
        throttles: dict[str, float] = {} if self._throttles is None else {"throttles": self._throttles}
        return throttles | clock_fields("cpu", self._mhz)

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


def clock_fields(device: str, mhz: Sequence[float]) -> dict[str, float]:
    """Return ``_mhz_first``, ``_mean`` and ``_last`` of the clocks at the ends of regions; empty without clocks."""
    if not mhz:
        return {}
    return {f"{device}_mhz_first": mhz[0], f"{device}_mhz_mean": sum(mhz) / len(mhz), f"{device}_mhz_last": mhz[-1]}
