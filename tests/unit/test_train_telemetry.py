"""Load, clocks and counters of a rank's machine, and their combination over the ranks.

Clocks and throttling come from folders laid out like /sys/devices/system/cpu: few machines that run tests have them.
"""

import json
import subprocess
import sys
import textwrap
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
from raypar.train.telemetry import ClockMonitor, CpuMonitor, RankCounters, energy, other_loads

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
    print(json.dumps({**monitor.summary(), **monitor.sums._asdict()}))
"""
BURN = "import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"


@needs_pinning
@needs_schedstat
def test_a_neighbour_on_the_same_core_is_noticed():
    burn = BURN.format(core=allowed_cores()[-1])
    with subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE) as neighbour:
        try:
            assert neighbour.stdout is not None
            neighbour.stdout.readline()  # from now on it burns
            code = [sys.executable, "-c", textwrap.dedent(WATCHED)]
            figures = json.loads(subprocess.run(code, capture_output=True, text=True, check=True).stdout)
        finally:
            neighbour.kill()
    assert 0.2 < figures["cpu_wait_share"] <= 1
    assert 0.2 < figures["foreign_cpu_share"] <= 1
    assert figures["own_s"] >= 0.5 - 0.02  # user and system time are each rounded down to ticks of 10 ms
    (load,) = other_loads([RankCounters("a", 1, figures["at_s"], figures["machine_busy_s"], figures["own_s"])])
    assert load is not None and load > 0.2


class CoreTimes(NamedTuple):
    """psutil's times of a core."""

    user: float
    system: float = 0.0
    nice: float = 0.0
    steal: float = 0.0


class ProcessTimes(NamedTuple):
    """psutil's times of a process."""

    user: float
    system: float = 0.0
    children_user: float = 0.0
    children_system: float = 0.0


class Clock:
    """Seconds since some time, and the use of a machine of three cores by then."""

    def __init__(self):
        self.now_s = 100.0
        self.children: list[ProcessTimes] = []
        self.own = ProcessTimes(0.0)

    def cpu_times(self, percpu):
        """Of the rank's two cores the first is busy all the time, the second not at all. The third is another's."""
        return [CoreTimes(self.now_s / 2, self.now_s / 2), CoreTimes(7.0), CoreTimes(0.0, steal=self.now_s)]

    def process(self):
        children = [SimpleNamespace(cpu_times=lambda u=u: u) for u in self.children]
        return SimpleNamespace(cpu_times=lambda: self.own, children=lambda recursive: children)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    psutil = SimpleNamespace(Error=OSError, cpu_times=clock.cpu_times, Process=clock.process)
    monkeypatch.setattr(module, "psutil", psutil)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


def test_use_by_a_rank_and_its_loader_processes_is_not_foreign(clock):
    monitor = CpuMonitor((0, 1))
    for _ in range(2):  # what happens between the regions doesn't count
        monitor.start()
        clock.now_s += 4
        clock.own, clock.children = ProcessTimes(clock.own.user + 1), [ProcessTimes(0.75, 0.25)]
        monitor.stop()
        clock.children = []
        clock.now_s += 50
    assert monitor.summary()["foreign_cpu_share"] == pytest.approx((4 - 1 - 1) / 4 / 2)


def test_loader_processes_that_end_within_the_region_stay_the_ranks_own(clock):
    clock.children = [ProcessTimes(1.5)]
    monitor = CpuMonitor((0, 1))
    monitor.start()
    clock.now_s += 4
    clock.own, clock.children = ProcessTimes(1.0, children_user=4.5), []  # it used 3 more, and then it was waited for
    monitor.stop()
    assert monitor.sums.own_s == pytest.approx(4.0)
    assert monitor.summary()["foreign_cpu_share"] == 0


def test_a_rank_without_cores_of_its_own_is_measured_on_the_machine_with_its_hypervisors_share(clock):
    monitor = CpuMonitor(())
    monitor.start()
    clock.now_s += 4
    clock.own = ProcessTimes(1.0)
    monitor.stop()
    assert (monitor.sums.at_s, monitor.sums.machine_busy_s, monitor.sums.own_s) == pytest.approx((4.0, 8.0, 1.0))
    assert "foreign_cpu_share" not in monitor.summary()


@pytest.mark.parametrize(
    ("elapsed_s", "busy_s", "own_s", "expected"),
    [
        (2.0, 3.0, 2.0, 0.5),
        (2.0, 1.98, 2.0, 0.0),  # ticks round
        (2.0, 0.0, 2.0, None),  # a sandbox that counts nothing
        (0.05, 0.1, 0.0, None),  # five ticks
    ],
)
def test_others_load_is_known_where_the_counters_show_it(elapsed_s, busy_s, own_s, expected):
    assert other_loads([RankCounters("a", 8, elapsed_s, busy_s, own_s)]) == [expected]


def write_core(folder, number, **numbers):
    """Write some of a core's files: its clock, and how often it and its package slowed down."""
    folders = {"scaling_cur_freq": "cpufreq", "core_throttle_count": "thermal_throttle"}
    for name, value in numbers.items():
        path = folder / f"cpu{number}" / folders.get(name, "thermal_throttle") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value:.0f}\n")


def test_clocks_are_the_mean_of_the_ranks_cores_at_the_regions_ends(tmp_path):
    monitor = ClockMonitor((0, 2), tmp_path)
    for mhz in (3000, 2700, 2400):
        write_core(tmp_path, 0, scaling_cur_freq=800_000)  # idle between the regions
        monitor.start()
        for number, own in ((0, mhz), (1, 9999), (2, mhz + 200)):
            write_core(tmp_path, number, scaling_cur_freq=own * 1000)
        monitor.stop()
    figures = monitor.summary()
    assert figures == pytest.approx({"cpu_mhz_first": 3100, "cpu_mhz_mean": 2800, "cpu_mhz_last": 2500})


def test_throttles_of_cores_add_up_and_those_of_a_package_count_once(tmp_path):
    monitor = ClockMonitor((0, 1), tmp_path)
    for _ in range(2):
        for number, core in enumerate((5, 1)):
            write_core(tmp_path, number, core_throttle_count=core, package_throttle_count=7)
        monitor.start()
        for number, core in enumerate((5, 1)):
            write_core(tmp_path, number, core_throttle_count=core + 2, package_throttle_count=7 + 3)
        monitor.stop()
    assert monitor.summary() == {"throttles": 2 * (2 + 2 + 3)}


def test_figures_that_a_machine_does_not_show_are_absent(tmp_path):
    (tmp_path / "cpu0/cpufreq").mkdir(parents=True)
    (tmp_path / "cpu0/cpufreq/scaling_cur_freq").write_text("<unknown>\n")
    monitor = ClockMonitor((0,), tmp_path)
    monitor.start()
    monitor.stop()
    assert monitor.summary() == {}


RANK = RankCounters("a", 8, elapsed_s=2.0, busy_s=6.0, own_s=2.0)


def merged(*counters):
    ends = {rank: RankEnd(RankOutcome(train_time_s=2.0, counters=c)) for rank, c in enumerate(counters)}
    return trial_result(make_spec({"num_workers": len(counters)}), ends, environment={"node": ["n"]})


def test_a_trials_times_are_those_of_its_slowest_rank():
    ranks = [
        RankOutcome(train_time_s=t, wall_s=1 + t, eval_time_s=e, num_samples=60) for t, e in ((2.0, 0.5), (4.0, 0.1))
    ]
    result = trial_result(make_spec({"num_workers": 2}), {rank: RankEnd(outcome) for rank, outcome in enumerate(ranks)})
    assert (result.train_time_s, result.wall_s, result.eval_time_s) == (4.0, 5.0, 0.5)
    assert result.throughput_samples_per_s == 30.0  # of both ranks' samples


def test_each_machine_has_its_load_less_the_work_of_all_ranks_on_it_and_the_worst_is_the_trials():
    ranks = RANK, replace(RANK, machine="b", busy_s=5.0), replace(RANK, own_s=3.0)
    assert other_loads(ranks) == pytest.approx([0.5, 1.5, 0.5])
    result = merged(*ranks)
    assert result.environment["other_load_cores"] == pytest.approx([0.5, 1.5, 0.5])
    assert result.environment["num_node_cores"] == [8, 8, 8]
    assert result.other_load_cores == pytest.approx(1.5)
    too_short = merged(replace(RANK, elapsed_s=0.01))
    assert too_short.other_load_cores is None and "other_load_cores" not in too_short.environment


GPU = replace(RANK, gpu="G", gpu_j=50.0)
SHARED = replace(GPU, gpu_j=51.0)  # two ranks on one
OTHER = replace(GPU, machine="b", gpu_j=70.0)
WITH_PACKAGES = [replace(rank, package_j=10.0) for rank in (GPU, SHARED, OTHER)]
NO_GPU = [replace(RANK, package_j=j, machine=m) for j, m in ((100.0, "a"), (101.0, "a"), (7.0, "b"))]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (NO_GPU, (107.0, "CPU packages")),
        ([replace(RANK, package_j=100.0), replace(RANK, machine="b")], None),
        ([GPU, SHARED, replace(GPU, gpu="H", gpu_j=60.0), OTHER], (180.0, "GPUs")),
        (WITH_PACKAGES, (140.0, "CPU packages and GPUs")),
        ([*WITH_PACKAGES[:2], OTHER], (120.0, "GPUs")),  # packages that not all machines show
        ([WITH_PACKAGES[0], replace(WITH_PACKAGES[0], gpu="H", gpu_j=None)], None),
    ],
)
def test_packages_and_gpus_count_once_each_and_all_that_are_used_are_needed(ranks, expected):
    assert energy(ranks) == expected


def test_a_trials_energy_is_in_its_result_or_the_reason_why_it_is_not():
    result = merged(replace(RANK, package_j=100.0))
    assert (result.energy_j, result.environment["energy_of"]) == (100.0, "CPU packages")
    assert TrialResult.from_json(result.to_json()).energy_j == 100.0
    unreadable = merged(replace(RANK, package_j=100.0), replace(RANK, machine="b", no_energy=("may not be read",)))
    assert unreadable.energy_j is None
    assert unreadable.environment["no_energy"] == "may not be read" and "energy_of" not in unreadable.environment
    untimed = merged(replace(RANK, package_j=100.0), None)
    assert (untimed.energy_j, untimed.other_load_cores, untimed.environment) == (None, None, {"node": ["n"]})


def test_results_of_before_energy_was_measured_are_read():
    text = merged(RANK).to_json().replace('"energy_j":null,', "")
    assert "energy_j" not in text and TrialResult.from_json(text).energy_j is None
