"""Measurements of a rank's machine while a trial is timed: load by others, core clocks, energy.

Linux' own files: psutil's ``cpu_freq`` reads every core of the machine, and where there is no clock to be read it gives
a nominal one, which can't drift. Most virtual machines and containers show neither file; nothing is told there.

Counters are read when a timed region starts and when it has ended, outside of it; nothing runs beside the steps.
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


# Busy time is counted in ticks of 10 ms on every core: what is shorter can't be told from rounding.
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
    """Sums up, over the timed regions, who had the cores. It looks at their starts and ends, and never in between.

    ``cpu_wait_share`` is the share of the threads' runnable time that they spent waiting for a core (Linux
    schedstat): it shows core sharing exactly. ``foreign_cpu_share`` is how busy others kept the rank's cores, from
    the cores' busy time less the rank's own (10 ms resolution). What the whole machine did is told in `machine_busy_s`
    and `own_s`: others' load on it is the busy time less that of all ranks there, which one rank alone can't know.
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
        """``cpu_wait_share`` and ``foreign_cpu_share``, from 0 to 1; without what the system doesn't tell."""
        found = {}
        if self._ran_s + self._waited_s > 0:
            found["cpu_wait_share"] = self._waited_s / (self._ran_s + self._waited_s)
        if self._cores and self.elapsed_s > 0:
            share = self._foreign_s / self.elapsed_s / len(self._cores)
            found["foreign_cpu_share"] = min(1.0, max(0.0, share))
        return found

    def _snapshot(self) -> _Snapshot:
        ran_ns = waited_ns = 0
        for stat in Path("/proc/self/task").glob("*/schedstat"):
            try:
                ran, waited, _ = stat.read_text().split()
            except (OSError, ValueError):  # a thread that just ended; kernels without schedstats
                continue
            ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
        own = psutil.Process()
        own_s = sum(own.cpu_times()[:4])
        for child in own.children(recursive=True):  # loader processes
            try:
                # With the times of those that it has seen end: they were in the sum while they lived.
                own_s += sum(child.cpu_times()[:4])
            except psutil.Error:
                continue
        per_core = psutil.cpu_times(percpu=True)
        busy_s = _busy_s([per_core[core] for core in self._cores if core < len(per_core)])
        return _Snapshot(time.perf_counter(), ran_ns / 1e9, waited_ns / 1e9, busy_s, _busy_s(per_core), own_s)


def other_load_cores(elapsed_s: float, busy_s: float, own_s: float) -> float | None:
    """How many cores of a machine others kept busy on average.

    Args:
        elapsed_s: how long was looked.
        busy_s: CPU time of the whole machine in it.
        own_s: of that, what the trial's own processes used.

    None where that was too short to say, or where the machine's counters don't even hold the trial's own work.
    """
    if elapsed_s < MIN_ELAPSED_S or busy_s < own_s / 2:
        return None
    return max(0.0, busy_s - own_s) / elapsed_s


def _busy_s(cores: Sequence[Any]) -> float:
    """Time in which these cores ran a process, or a virtual machine's neighbours had them."""
    # guest time is contained in user time, so it is not added; steal is Linux'.
    return float(sum(t.user + t.nice + t.system + getattr(t, "steal", 0.0) for t in cores))


CPUS = Path("/sys/devices/system/cpu")


class ClockMonitor:
    """Looks at the clocks of the rank's cores at the end of every timed region, while they still run at their load."""

    def __init__(self, cores: tuple[int, ...], folder: Path = CPUS) -> None:
        self._folders = [folder / f"cpu{core}" for core in cores]
        self._mhz: list[float] = []
        self._throttles: int | None = None
        self._before: int | None = None

    def start(self) -> None:
        self._before = self._throttle_count()

    def stop(self) -> None:
        known = [khz for folder in self._folders if (khz := _read(folder / "cpufreq/scaling_cur_freq")) is not None]
        if known:
            self._mhz.append(sum(known) / len(known) / 1e3)
        after = self._throttle_count()
        if self._before is not None and after is not None:
            self._throttles = (self._throttles or 0) + max(0, after - self._before)

    def summary(self) -> dict[str, float]:
        """``cpu_mhz_first``, ``_mean`` and ``_last`` over the timed regions' ends, mean of the cores; ``throttles``.

        Without what the system doesn't tell. ``throttles`` counts how often a core or its package became so hot that it
        slowed down.
        """
        found: dict[str, float] = {}
        if self._mhz:
            mean = sum(self._mhz) / len(self._mhz)
            found |= {"cpu_mhz_first": self._mhz[0], "cpu_mhz_mean": mean, "cpu_mhz_last": self._mhz[-1]}
        if self._throttles is not None:
            found["throttles"] = self._throttles
        return found

    def _throttle_count(self) -> int | None:
        """Of all the rank's cores, and of their hottest package, whose count each of its cores repeats."""
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
    """What one rank's counters went up by over the timed regions, and whose they are.

    Attributes:
        machine: the same for all ranks on one machine, whatever containers they are in.
        num_cores: of the machine.
        elapsed_s: how long the regions were together.
        busy_s: CPU time of the whole machine.
        own_s: of that, what this rank's processes used.
        package_j: of all of the machine's CPU packages; None: can't be read.
        gpu: the GPU's identity; empty: the rank trains on none that counts energy.
        gpu_j: None: can't be read.
        no_energy: what can't be read, and why.
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
    """What tells this machine from others: two containers on one have a name each, but see the same counters."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def other_loads(ranks: Sequence[RankCounters]) -> list[float | None]:
    """For each rank, how many cores of its machine were busy with other work than the trial's; None: can't be told."""
    loads = {}
    for machine, there in _by_machine(ranks).items():
        # The ranks' regions start and end together, but for the last step's stragglers.
        elapsed_s = max(rank.elapsed_s for rank in there)
        busy_s = max(rank.busy_s for rank in there)
        loads[machine] = other_load_cores(elapsed_s, busy_s, sum(rank.own_s for rank in there))
    return [loads[rank.machine] for rank in ranks]


def energy(ranks: Sequence[RankCounters]) -> tuple[float, str] | None:
    """Joules over all machines, each package and GPU once, and of what: "CPU packages", "GPUs" or both.

    None where something that the trial used can't be read: its GPUs, if it trains on some, else its machines' packages;
    packages that only some of the machines tell are left out.
    """
    packages = [there[0].package_j for there in _by_machine(ranks).values()]
    known = [joules for joules in packages if joules is not None]
    has_packages = bool(known) and len(known) == len(packages)
    if not any(rank.gpu for rank in ranks):
        return (sum(known), "CPU packages") if has_packages else None
    gpus: dict[tuple[str, str], float | None] = {}
    for rank in ranks:
        gpus.setdefault((rank.machine, rank.gpu), rank.gpu_j)
    gpu_j = [joules for joules in gpus.values() if joules is not None]
    if len(gpu_j) < len(gpus):
        return None
    return (sum(gpu_j) + sum(known), "CPU packages and GPUs") if has_packages else (sum(gpu_j), "GPUs")


def _by_machine(ranks: Sequence[RankCounters]) -> Mapping[str, list[RankCounters]]:
    found: dict[str, list[RankCounters]] = {}
    for rank in ranks:
        found.setdefault(rank.machine, []).append(rank)
    return found


class Telemetry:
    """All of it, for one rank."""

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
        """For the trial's environment: see `CpuMonitor` and `ClockMonitor`."""
        return {**self._cpu.summary(), **self._clocks.summary()}

    def counters(self) -> RankCounters:
        """For what takes all ranks of a machine together."""
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
