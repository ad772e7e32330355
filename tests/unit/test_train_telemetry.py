"""Load, clocks and counters of a rank's machine, and what several ranks' counters give together.

Clocks and throttling come from folders laid out like /sys/devices/system/cpu: few machines that run tests have them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from results import make_spec

from raypar.run.ranks import RankEnd, trial_result
from raypar.study.trial import TrialResult
from raypar.train import telemetry as module
from raypar.train.affinity import CAN_PIN, allowed_cores
from raypar.train.job import RankOutcome
from raypar.train.telemetry import ClockMonitor, CpuMonitor, RankCounters, energy, other_load_cores, other_loads

needs_pinning = pytest.mark.skipif(not CAN_PIN, reason="this system can't bind processes to cores")
needs_schedstat = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel keeps no schedstat")

# Burns half a second of CPU time on the last core under a CpuMonitor.
WATCHED = """
    import json, time
    from raypar.train.affinity import allowed_cores, pin
    from raypar.train.telemetry import CpuMonitor
    core = allowed_cores()[-1]
    pin([core])
    monitor = CpuMonitor((core,))
    monitor.start()
    until = time.process_time() + 0.5
    while time.process_time() < until:
        pass
    monitor.stop()
    times = {"busy_s": monitor.machine_busy_s, "own_s": monitor.own_s, "elapsed_s": monitor.elapsed_s}
    print(json.dumps({**monitor.summary(), **times}))
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
            expected = json.loads(subprocess.run(code, capture_output=True, text=True, check=True).stdout)
        finally:
            neighbour.kill()
    assert 0.2 < expected["cpu_wait_share"] <= 1
    assert 0.2 < expected["foreign_cpu_share"] <= 1
    assert expected["own_s"] >= 0.5 - 0.02  # user and system time are each rounded down to ticks of 10 ms
    load = other_load_cores(expected["elapsed_s"], expected["busy_s"], expected["own_s"])
    assert load is not None and load > 0.2


class Times(NamedTuple):
    """psutil's times of a core."""

    user: float
    system: float = 0.0
    nice: float = 0.0
    steal: float = 0.0


class Used(NamedTuple):
    """psutil's times of a process."""

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
        monkeypatch.setattr(module, "psutil", psutil)
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    with monkeypatch.context() as patch:
        yield Clock(patch)


def test_what_a_rank_and_its_loader_processes_burn_is_not_foreign(clock: Clock) -> None:
    monitor = CpuMonitor((0, 1))
    for _ in range(2):  # what happens between the regions doesn't count
        monitor.start()
        clock.now_s += 4
        clock.own, clock.children = Used(clock.own.user + 1), [Used(0.75, 0.25)]
        monitor.stop()
        clock.children = []
        clock.now_s += 50
    assert monitor.summary()["foreign_cpu_share"] == pytest.approx((4 - 1 - 1) / 4 / 2)


def test_loader_processes_that_end_within_the_region_stay_the_ranks_own(clock: Clock) -> None:
    clock.children = [Used(1.5)]
    monitor = CpuMonitor((0, 1))
    monitor.start()
    clock.now_s += 4
    clock.own, clock.children = Used(1.0, children_user=4.5), []  # it used 3 more, and then it was waited for
    monitor.stop()
    assert monitor.own_s == pytest.approx(4.0)
    assert monitor.summary()["foreign_cpu_share"] == 0


def test_the_whole_machine_is_looked_at_and_what_a_hypervisor_took_of_it(clock: Clock) -> None:
    monitor = CpuMonitor(())
    monitor.start()
    clock.now_s += 4
    clock.own = Used(1.0)
    monitor.stop()
    assert (monitor.elapsed_s, monitor.machine_busy_s, monitor.own_s) == pytest.approx((4.0, 8.0, 1.0))
    assert other_load_cores(monitor.elapsed_s, monitor.machine_busy_s, monitor.own_s) == pytest.approx(7 / 4)


@pytest.mark.parametrize(
    ("elapsed_s", "busy_s", "own_s", "expected"),
    [
        (2.0, 3.0, 2.0, 0.5),
        (2.0, 1.98, 2.0, 0.0),  # ticks round
        (2.0, 0.0, 2.0, None),  # a sandbox that counts nothing
        (0.05, 0.1, 0.0, None),  # five ticks
    ],
)
def test_others_load_is_told_where_the_counters_can_tell_it(
    elapsed_s: float, busy_s: float, own_s: float, expected: float | None
) -> None:
    assert other_load_cores(elapsed_s, busy_s, own_s) == expected


def test_a_watch_that_saw_nothing_tells_nothing() -> None:
    monitor = CpuMonitor((0,))
    monitor.stop()
    assert monitor.summary() == {}


def test_a_rank_without_cores_of_its_own_has_no_foreigners_on_them() -> None:
    monitor = CpuMonitor(())
    monitor.start()
    sum(range(100_000))
    monitor.stop()
    assert "foreign_cpu_share" not in monitor.summary()


def a_core(folder: Path, number: int, mhz: float | None = None, throttles: tuple[int, int] | None = None) -> None:
    """A core's clock, and how often it and its package slowed down."""
    core = folder / f"cpu{number}"
    for name in ("cpufreq", "thermal_throttle"):
        (core / name).mkdir(parents=True, exist_ok=True)
    if mhz is not None:
        (core / "cpufreq/scaling_cur_freq").write_text(f"{mhz * 1000:.0f}\n")
    if throttles is not None:
        (core / "thermal_throttle/core_throttle_count").write_text(f"{throttles[0]}\n")
        (core / "thermal_throttle/package_throttle_count").write_text(f"{throttles[1]}\n")


def test_clocks_are_the_mean_of_the_ranks_cores_at_the_regions_ends(tmp_path: Path) -> None:
    monitor = ClockMonitor((0, 2), tmp_path)
    for mhz in (3000, 2700, 2400):
        a_core(tmp_path, 0, 800)  # idle between the regions
        monitor.start()
        for number, own in ((0, mhz), (1, 9999), (2, mhz + 200)):
            a_core(tmp_path, number, own)
        monitor.stop()
    expected = monitor.summary()
    assert expected == pytest.approx({"cpu_mhz_first": 3100, "cpu_mhz_mean": 2800, "cpu_mhz_last": 2500})


def test_throttles_of_cores_add_up_and_those_of_a_package_count_once(tmp_path: Path) -> None:
    monitor = ClockMonitor((0, 1), tmp_path)
    before = [(5, 7), (1, 7)]
    for _ in range(2):
        for number, counts in enumerate(before):
            a_core(tmp_path, number, throttles=counts)
        monitor.start()
        for number, (core, package) in enumerate(before):
            a_core(tmp_path, number, throttles=(core + 2, package + 3))
        monitor.stop()
    assert monitor.summary() == {"throttles": 2 * (2 + 2 + 3)}


def test_what_a_machine_does_not_show_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "cpu0/cpufreq").mkdir(parents=True)
    (tmp_path / "cpu0/cpufreq/scaling_cur_freq").write_text("<unknown>\n")
    monitor = ClockMonitor((0,), tmp_path)
    monitor.start()
    monitor.stop()
    assert monitor.summary() == {}


RANK = RankCounters("a", 8, elapsed_s=2.0, busy_s=6.0, own_s=2.0)


def merged(*counters: RankCounters | None) -> TrialResult:
    ends = {rank: RankEnd(RankOutcome(train_time_s=2.0, counters=c)) for rank, c in enumerate(counters)}
    spec = make_spec({"num_workers": len(counters)})
    return trial_result(spec, ends, environment={"node": ["n"]})


def test_a_trials_times_are_those_of_its_slowest_rank() -> None:
    ranks = [
        RankOutcome(train_time_s=t, wall_s=1 + t, eval_time_s=e, num_samples=60) for t, e in ((2.0, 0.5), (4.0, 0.1))
    ]
    result = trial_result(make_spec({"num_workers": 2}), {rank: RankEnd(outcome) for rank, outcome in enumerate(ranks)})
    assert (result.train_time_s, result.wall_s, result.eval_time_s) == (4.0, 5.0, 0.5)
    assert result.throughput_samples_per_s == 30.0  # of both ranks' samples


def test_the_work_of_all_ranks_on_a_machine_is_the_trials_own() -> None:
    ranks = [RANK, replace(RANK, machine="b", busy_s=3.0), replace(RANK, own_s=3.0)]
    assert other_loads(ranks) == pytest.approx([0.5, 0.5, 0.5])


def test_each_machine_has_a_load_of_its_own_and_the_worst_is_the_trials() -> None:
    result = merged(RANK, replace(RANK, machine="b", busy_s=5.0), replace(RANK, own_s=3.0, num_cores=8))
    assert result.environment["other_load_cores"] == pytest.approx([0.5, 1.5, 0.5])
    assert result.environment["num_node_cores"] == [8, 8, 8]
    assert result.other_load_cores == pytest.approx(1.5)


def test_a_load_that_no_machine_can_tell_is_not_told() -> None:
    result = merged(replace(RANK, elapsed_s=0.01))
    assert result.other_load_cores is None
    assert "other_load_cores" not in result.environment


GPU = replace(RANK, gpu="G", gpu_j=50.0)
SHARED = replace(GPU, gpu_j=51.0)  # two ranks on one
OTHER = replace(GPU, machine="b", gpu_j=70.0)
WITH_PACKAGES = [replace(rank, package_j=10.0) for rank in (GPU, SHARED, OTHER)]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (
            [replace(RANK, package_j=j, machine=m) for j, m in ((100.0, "a"), (101.0, "a"), (7.0, "b"))],
            (107.0, "CPU packages"),
        ),
        ([replace(RANK, package_j=100.0), replace(RANK, machine="b")], None),
        ([GPU, SHARED, replace(GPU, gpu="H", gpu_j=60.0), OTHER], (180.0, "GPUs")),
        (WITH_PACKAGES, (140.0, "CPU packages and GPUs")),
        ([*WITH_PACKAGES[:2], OTHER], (120.0, "GPUs")),  # packages that not all machines show
        ([WITH_PACKAGES[0], replace(WITH_PACKAGES[0], gpu="H", gpu_j=None)], None),
    ],
)
def test_packages_and_gpus_count_once_each_and_all_that_are_used_are_needed(
    ranks: list[RankCounters], expected: tuple[float, str] | None
) -> None:
    assert energy(ranks) == expected


def test_an_energy_that_can_not_be_read_is_absent_with_the_reason() -> None:
    result = merged(replace(RANK, package_j=100.0), replace(RANK, machine="b", no_energy=("may not be read",)))
    assert result.energy_j is None
    assert result.environment["no_energy"] == "may not be read" and "energy_of" not in result.environment


def test_a_rank_that_counted_nothing_leaves_the_trial_without_any_of_it() -> None:
    result = merged(replace(RANK, package_j=100.0), None)
    assert (result.energy_j, result.other_load_cores) == (None, None)
    assert result.environment == {"node": ["n"]}


def test_energy_survives_the_way_to_the_store_and_back() -> None:
    result = merged(replace(RANK, package_j=100.0))
    assert (result.energy_j, result.environment["energy_of"]) == (100.0, "CPU packages")
    assert TrialResult.from_json(result.to_json()).energy_j == 100.0


def test_results_of_before_energy_was_measured_are_read() -> None:
    text = merged(RANK).to_json().replace('"energy_j":null,', "")
    assert "energy_j" not in text
    assert TrialResult.from_json(text).energy_j is None
