"""A rank sees who else was on its cores and on its machine while the clock ran."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from raypar.train import telemetry as cpu_watch
from raypar.train.affinity import CAN_PIN, allowed_cores
from raypar.train.telemetry import CpuMonitor, other_load_cores

needs_pinning = pytest.mark.skipif(not CAN_PIN, reason="this system can't bind processes to cores")
needs_schedstat = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel keeps no schedstat")

# Burns half a second of CPU time on the last core under a CpuMonitor.
WATCHED = """
    import json, time
    from raypar.train.affinity import allowed_cores, pin
    from raypar.train.telemetry import CpuMonitor
    core = allowed_cores()[-1]
    pin([core])
    watch = CpuMonitor((core,))
    watch.start()
    until = time.process_time() + 0.5
    while time.process_time() < until:
        pass
    watch.stop()
    told = {"busy_s": watch.machine_busy_s, "own_s": watch.own_s, "elapsed_s": watch.elapsed_s}
    print(json.dumps({**watch.summary(), **told}))
"""
BURN = "import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"


@needs_pinning
@needs_schedstat
def test_a_neighbour_on_the_same_core_is_noticed() -> None:
    burn = BURN.format(core=allowed_cores()[-1])
    with subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE) as neighbour:
        try:
            assert neighbour.stdout is not None
            neighbour.stdout.readline()  # from now on it burns
            code = [sys.executable, "-c", textwrap.dedent(WATCHED)]
            told = json.loads(subprocess.run(code, capture_output=True, text=True, check=True).stdout)
        finally:
            neighbour.kill()
    assert 0.2 < told["cpu_wait_share"] <= 1
    assert 0.2 < told["foreign_cpu_share"] <= 1
    assert told["own_s"] >= 0.5 - 0.02  # user and system time are each rounded down to ticks of 10 ms
    load = other_load_cores(told["elapsed_s"], told["busy_s"], told["own_s"])
    assert load is not None and load > 0.2


class Times(NamedTuple):
    """What psutil tells of a core."""

    user: float
    system: float = 0.0
    nice: float = 0.0
    steal: float = 0.0


class Used(NamedTuple):
    """What psutil tells of a process."""

    user: float
    system: float = 0.0
    children_user: float = 0.0
    children_system: float = 0.0


class Clock:
    """Seconds since some time, and what a machine of three cores has used by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.children: list[Used] = []
        self.own = Used(0.0)
        psutil = SimpleNamespace(
            Error=OSError,
            # Of the rank's two cores the first is busy all the time, the second not at all. The third is another's.
            cpu_times=lambda percpu: [Times(self.now_s / 2, self.now_s / 2), Times(7.0), Times(0.0, steal=self.now_s)],
            Process=lambda: SimpleNamespace(
                cpu_times=lambda: self.own,
                children=lambda recursive: [SimpleNamespace(cpu_times=lambda u=u: u) for u in self.children],
            ),
        )
        monkeypatch.setattr(cpu_watch, "psutil", psutil)
        monkeypatch.setattr(cpu_watch.time, "perf_counter", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    with monkeypatch.context() as patch:
        yield Clock(patch)


def test_what_a_rank_and_its_loader_processes_burn_is_not_foreign(clock: Clock) -> None:
    watch = CpuMonitor((0, 1))
    for _ in range(2):  # what happens between the regions doesn't count
        watch.start()
        clock.now_s += 4
        clock.own, clock.children = Used(clock.own.user + 1), [Used(0.75, 0.25)]
        watch.stop()
        clock.children = []
        clock.now_s += 50
    assert watch.summary()["foreign_cpu_share"] == pytest.approx((4 - 1 - 1) / 4 / 2)


def test_loader_processes_that_end_within_the_region_stay_the_ranks_own(clock: Clock) -> None:
    clock.children = [Used(1.5)]
    watch = CpuMonitor((0, 1))
    watch.start()
    clock.now_s += 4
    clock.own, clock.children = Used(1.0, children_user=4.5), []  # it used 3 more, and then it was waited for
    watch.stop()
    assert watch.own_s == pytest.approx(4.0)
    assert watch.summary()["foreign_cpu_share"] == 0


def test_the_whole_machine_is_looked_at_and_what_a_hypervisor_took_of_it(clock: Clock) -> None:
    watch = CpuMonitor(())
    watch.start()
    clock.now_s += 4
    clock.own = Used(1.0)
    watch.stop()
    assert (watch.elapsed_s, watch.machine_busy_s, watch.own_s) == pytest.approx((4.0, 8.0, 1.0))
    assert other_load_cores(watch.elapsed_s, watch.machine_busy_s, watch.own_s) == pytest.approx(7 / 4)


@pytest.mark.parametrize(
    ("elapsed_s", "busy_s", "own_s", "told"),
    [
        (2.0, 3.0, 2.0, 0.5),
        (2.0, 1.98, 2.0, 0.0),  # ticks round
        (2.0, 0.0, 2.0, None),  # a sandbox that counts nothing
        (0.05, 0.1, 0.0, None),  # five ticks
    ],
)
def test_others_load_is_told_where_the_counters_can_tell_it(
    elapsed_s: float, busy_s: float, own_s: float, told: float | None
) -> None:
    assert other_load_cores(elapsed_s, busy_s, own_s) == told


def test_a_watch_that_saw_nothing_tells_nothing() -> None:
    watch = CpuMonitor((0,))
    watch.stop()
    assert watch.summary() == {}


def test_a_rank_without_cores_of_its_own_has_no_foreigners_on_them() -> None:
    watch = CpuMonitor(())
    watch.start()
    sum(range(100_000))
    watch.stop()
    assert "foreign_cpu_share" not in watch.summary()
