"""Cores: which there are, how a rank takes its own, and who else was on them while the clock ran."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

CAN_PIN = hasattr(os, "sched_setaffinity")  # Linux
TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Core:
    """One core as the system counts them (a hardware thread), and what it is part of.

    Attributes:
        number: what it is pinned by.
        package: its socket.
        physical: its physical core: the same for hardware threads of one, whatever their socket calls it.
    """

    number: int
    package: int
    physical: int


def allowed_cores() -> tuple[int, ...]:
    """The cores that this process may use at most: its cpuset, whatever it is pinned to at the moment."""
    if not CAN_PIN:
        return tuple(range(os.cpu_count() or 1))
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the kernel cuts this to the cpuset
    widest = os.sched_getaffinity(0)
    os.sched_setaffinity(0, mine)
    return tuple(sorted(widest))


def host_cores() -> tuple[Core, ...]:
    """The cores that processes on this machine may use, and how they lie to each other."""
    return topology(allowed_cores())


def topology(numbers: Iterable[int], folder: Path = TOPOLOGY) -> tuple[Core, ...]:
    """How these cores lie to each other; one of which that can't be read is a physical core of its own."""
    return tuple(_core(number, folder / f"cpu{number}" / "topology") for number in numbers)


def _core(number: int, folder: Path) -> Core:
    try:
        package = int((folder / "physical_package_id").read_text())
        # The first of its threads tells physical cores apart; `core_id` counts anew on every die of some sockets.
        first = re.match(r"\d+", (folder / "thread_siblings_list").read_text().strip())
        return Core(number, package, int(first[0]) if first else number)
    except (OSError, ValueError):  # macOS; some containers and virtual machines
        return Core(number, 0, number)


def pin(cores: Iterable[int]) -> tuple[int, ...]:
    """Bind the calling thread, and every thread and process that it starts later, to these cores.

    Has to be called before torch starts its threads. Returns the cores that the kernel says it is bound to; where
    the system can't pin, an empty tuple.
    """
    if not CAN_PIN:
        return ()
    os.sched_setaffinity(0, cores)
    return tuple(sorted(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class _Snapshot:
    at_s: float
    ran_s: float
    waited_s: float
    busy_s: float
    own_s: float


class CpuWatch:
    """Sums up, over the timed regions, how far the rank had its cores to itself.

    ``cpu_wait_share`` is the share of the threads' runnable time that they spent waiting for a core (Linux
    schedstat): it shows core sharing exactly. ``foreign_cpu_share`` is how busy others kept the rank's cores, from
    the cores' busy time less the rank's own (10 ms resolution).
    """

    def __init__(self, cores: tuple[int, ...]) -> None:
        self._cores = cores
        self._before: _Snapshot | None = None
        self._elapsed_s = self._ran_s = self._waited_s = self._foreign_s = 0.0

    def start(self) -> None:
        self._before = self._snapshot()

    def stop(self) -> None:
        before, after = self._before, self._snapshot()
        if before is None:
            return
        self._elapsed_s += after.at_s - before.at_s
        self._ran_s += max(0.0, after.ran_s - before.ran_s)
        self._waited_s += max(0.0, after.waited_s - before.waited_s)
        # Signed: the ticks' rounding cancels out over the epochs.
        self._foreign_s += (after.busy_s - before.busy_s) - (after.own_s - before.own_s)

    def summary(self) -> dict[str, float]:
        """``cpu_wait_share`` and ``foreign_cpu_share``, from 0 to 1; without what the system doesn't tell."""
        found = {}
        if self._ran_s + self._waited_s > 0:
            found["cpu_wait_share"] = self._waited_s / (self._ran_s + self._waited_s)
        if self._cores and self._elapsed_s > 0:
            share = self._foreign_s / self._elapsed_s / len(self._cores)
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
        busy_s = 0.0
        if self._cores:
            per_core = psutil.cpu_times(percpu=True)
            # guest time is contained in user time, so it is not added.
            busy_s = sum(t.user + t.nice + t.system for t in (per_core[c] for c in self._cores if c < len(per_core)))
        own = psutil.Process()
        own_s = sum(own.cpu_times()[:2])
        for child in own.children(recursive=True):  # loader processes
            try:
                own_s += sum(child.cpu_times()[:2])
            except psutil.Error:
                continue
        return _Snapshot(time.perf_counter(), ran_ns / 1e9, waited_ns / 1e9, busy_s, own_s)
