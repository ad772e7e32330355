"""Measurements of a rank's machine while a trial is timed: load by others, core clocks, energy.

Clocks come from Linux's files: psutil's ``cpu_freq`` reads every core of the machine, and gives a nominal clock where
none can be read, which can't drift. Most virtual machines and containers show no clocks; the figures are absent then.

Counters are read before a timed region starts and after it has ended; nothing runs beside the steps.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from raypar.train.energy import EnergyMonitor

if TYPE_CHECKING:
    import torch


# Busy time is counted in ticks of 10 ms on every core: a shorter region would be all rounding.
MIN_ELAPSED_S = 0.2


@dataclass(frozen=True)
class _Snapshot:
    at_s: float
    ran_s: float
    waited_s: float
    busy_s: float
    machine_busy_s: float
    own_s: float


class CpuMonitor:
    """Use of the cores by the rank and by others, summed over the timed regions.

    ``cpu_wait_share`` is the share of the threads' runnable time that they spent waiting for a core (Linux
    schedstat): it shows core sharing exactly. ``foreign_cpu_share`` is how busy others kept the rank's cores, from
    the cores' busy time less the rank's (10 ms resolution). `machine_busy_s` and `own_s` are CPU times of the machine
    and of the rank's processes. The load of others on the machine is what all of its ranks leave of the first.
    """

    def __init__(self, cores: tuple[int, ...]) -> None:
        self._cores = cores
        self._before: _Snapshot | None = None
        self._ran_s = self._waited_s = self._foreign_s = 0.0
        self.elapsed_s = 0.0
        self.machine_busy_s = 0.0
        self.own_s = 0.0

    def start(self) -> None:
        self._before = self._snapshot()

    def stop(self) -> None:
        before, after = self._before, self._snapshot()
        if before is None:
            return
        self.elapsed_s += after.at_s - before.at_s
        self._ran_s += max(0.0, after.ran_s - before.ran_s)
        self._waited_s += max(0.0, after.waited_s - before.waited_s)
        # Signed: the ticks' rounding cancels out over the epochs.
        self._foreign_s += (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
        self.machine_busy_s += after.machine_busy_s - before.machine_busy_s
        self.own_s += after.own_s - before.own_s

    def summary(self) -> dict[str, float]:
        """Return ``cpu_wait_share`` and ``foreign_cpu_share``, from 0 to 1, where the system has the counters."""
        shares = {}
        if self._ran_s + self._waited_s > 0:
            shares["cpu_wait_share"] = self._waited_s / (self._ran_s + self._waited_s)
        if self._cores and self.elapsed_s > 0:
            share = self._foreign_s / self.elapsed_s / len(self._cores)
            shares["foreign_cpu_share"] = min(1.0, max(0.0, share))
        return shares

    def _snapshot(self) -> _Snapshot:
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
            try:
                # Includes the times of its children that have ended: they were in the sum before.
                own_s += sum(child.cpu_times()[:4])
            except psutil.Error:
                continue
        per_core = psutil.cpu_times(percpu=True)
        busy_s = _busy_s([per_core[core] for core in self._cores if core < len(per_core)])
        return _Snapshot(time.perf_counter(), ran_ns / 1e9, waited_ns / 1e9, busy_s, _busy_s(per_core), own_s)


def other_load_cores(elapsed_s: float, busy_s: float, own_s: float) -> float | None:
    """Return the number of a machine's cores that others kept busy on average.

    Args:
        elapsed_s: length of the timed regions.
        busy_s: CPU time of the machine in them.
        own_s: the part of it that the trial's processes used.

    Returns:
        None if the regions were too short, or if the machine's counters don't even show the trial's own work.
    """
    if elapsed_s < MIN_ELAPSED_S or busy_s < own_s / 2:
        return None
    return max(0.0, busy_s - own_s) / elapsed_s


def _busy_s(cores: Sequence[Any]) -> float:
    """Return the time in which these cores ran a process, or a virtual machine's neighbours had them."""
    # guest time is contained in user time, so it is not added; steal is Linux'.
    return float(sum(t.user + t.nice + t.system + getattr(t, "steal", 0.0) for t in cores))


CPUS = Path("/sys/devices/system/cpu")


class ClockMonitor:
    """Clocks of the rank's cores at the end of every timed region, while they still run under load."""

    def __init__(self, cores: tuple[int, ...], folder: Path = CPUS) -> None:
        self._folders = [folder / f"cpu{core}" for core in cores]
        self._mhz: list[float] = []
        self._throttles: int | None = None
        self._before: int | None = None

    def start(self) -> None:
        self._before = self._throttle_count()

    def stop(self) -> None:
        clocks = [khz for folder in self._folders if (khz := _read(folder / "cpufreq/scaling_cur_freq")) is not None]
        if clocks:
            self._mhz.append(sum(clocks) / len(clocks) / 1e3)
        after = self._throttle_count()
        if self._before is not None and after is not None:
            self._throttles = (self._throttles or 0) + max(0, after - self._before)

    def summary(self) -> dict[str, float]:
        """Return ``cpu_mhz_first``, ``_mean`` and ``_last`` over the ends of regions, mean of the cores; ``throttles``.

        Those that the system doesn't show are absent. ``throttles`` counts how often a core or its package slowed down
        because it was too hot.
        """
        figures: dict[str, float] = {}
        if self._mhz:
            mean = sum(self._mhz) / len(self._mhz)
            figures |= {"cpu_mhz_first": self._mhz[0], "cpu_mhz_mean": mean, "cpu_mhz_last": self._mhz[-1]}
        if self._throttles is not None:
            figures["throttles"] = self._throttles
        return figures

    def _throttle_count(self) -> int | None:
        """Return the count of the rank's cores and of their hottest package; every core shows its package's count."""
        cores, packages = (
            [count for folder in self._folders if (count := _read(folder / f"thermal_throttle/{name}")) is not None]
            for name in ("core_throttle_count", "package_throttle_count")
        )
        return sum(cores) + max(packages, default=0) if cores or packages else None


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RankCounters:
    """Counters of one rank's machine and GPU, over the timed regions.

    Attributes:
        machine: the same for all ranks on one machine, whatever containers they are in.
        num_cores: of the machine.
        elapsed_s: length of the regions together.
        busy_s: CPU time of the machine.
        own_s: the part of it that this rank's processes used.
        package_j: joules of all CPU packages of the machine; None: can't be read.
        gpu: the GPU's identity; empty: the rank trains on none that counts energy.
        gpu_j: its joules; None: can't be read.
        no_energy: why some energy can't be read.
    """

    machine: str
    num_cores: int
    elapsed_s: float
    busy_s: float
    own_s: float
    package_j: float | None = None
    gpu: str = ""
    gpu_j: float | None = None
    no_energy: tuple[str, ...] = ()


def this_machine() -> str:
    """Return an identity of this machine: containers on one have different names, but the same counters."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def other_loads(ranks: Sequence[RankCounters]) -> list[float | None]:
    """Return, for each rank, the number of its machine's cores busy with other work than the trial's; None: unknown."""
    loads = {}
    for machine, there in _by_machine(ranks).items():
        # The ranks' regions start and end together, but for the last step's stragglers.
        elapsed_s = max(rank.elapsed_s for rank in there)
        busy_s = max(rank.busy_s for rank in there)
        loads[machine] = other_load_cores(elapsed_s, busy_s, sum(rank.own_s for rank in there))
    return [loads[rank.machine] for rank in ranks]


def energy(ranks: Sequence[RankCounters]) -> tuple[float, str] | None:
    """Return joules over all machines, each package and GPU once, and their source: "CPU packages", "GPUs" or both.

    None if something that the trial used can't be read: its GPUs, if it trains on some, else its machines' packages.
    Packages that only some of the machines show are left out.
    """
    packages = [there[0].package_j for there in _by_machine(ranks).values()]
    package_j = [joules for joules in packages if joules is not None]
    has_packages = bool(package_j) and len(package_j) == len(packages)
    if not any(rank.gpu for rank in ranks):
        return (sum(package_j), "CPU packages") if has_packages else None
    gpus: dict[tuple[str, str], float | None] = {}
    for rank in ranks:
        gpus.setdefault((rank.machine, rank.gpu), rank.gpu_j)
    gpu_j = [joules for joules in gpus.values() if joules is not None]
    if len(gpu_j) < len(gpus):
        return None
    return (sum(gpu_j) + sum(package_j), "CPU packages and GPUs") if has_packages else (sum(gpu_j), "GPUs")


def _by_machine(ranks: Sequence[RankCounters]) -> Mapping[str, list[RankCounters]]:
    machines: dict[str, list[RankCounters]] = {}
    for rank in ranks:
        machines.setdefault(rank.machine, []).append(rank)
    return machines


class Telemetry:
    """Load, clocks and energy of one rank's cores and GPU, over the timed regions."""

    def __init__(self, cores: tuple[int, ...], device: torch.device) -> None:
        import torch

        self._gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        self._cpu = CpuMonitor(cores)
        self._clocks = ClockMonitor(cores)
        self._energy = EnergyMonitor(self._gpu)

    def start(self) -> None:
        self._cpu.start()  # first, and last below: it looks for child processes, which takes the longest
        self._clocks.start()
        self._energy.start()

    def stop(self) -> None:
        self._energy.stop()
        self._clocks.stop()
        self._cpu.stop()

    def summary(self) -> dict[str, Any]:
        """Return the figures for the trial's environment: see `CpuMonitor` and `ClockMonitor`."""
        return {**self._cpu.summary(), **self._clocks.summary()}

    def counters(self) -> RankCounters:
        """Return the counters, to be combined over the ranks of a machine."""
        return RankCounters(
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
