"""Who was on the cores while the clock ran: the rank itself, others on its cores, others on the machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

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


class CpuWatch:
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
