"""Load, clocks and counters of a rank's machine (real load: real/test_other_load.py); sums over ranks.

Clocks and throttling come from folders laid out like /sys/devices/system/cpu, and a GPU's from a stand-in for NVML: few
machines that run tests have them.
"""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import nvml
import pytest
import torch
from nvml import Card
from results import make_spec

from raypar.measure import cpu as module
from raypar.measure import gpu as gpu_module
from raypar.measure.cpu import ClockMonitor, CpuMonitor, CpuTimes
from raypar.measure.gpu import GpuMonitor
from raypar.measure.telemetry import RankCounters, Telemetry, energy, other_loads, stalls
from raypar.run.ranks import RankEnd, trial_result
from raypar.study.conditions import Conditions
from raypar.study.trial import result_from_json
from raypar.train.job import RankOutcome


@pytest.fixture
def machine(monkeypatch):
    """A machine of three cores: the rank's first is always busy, its second never; the third is another's."""
    machine = SimpleNamespace(now_s=100.0, rank=(0, 0, 0, 0), children=[])

    def cpu_times(percpu):
        busy = {"user": machine.now_s / 2, "system": machine.now_s / 2}, {"user": 7.0}, {"steal": machine.now_s}
        return [SimpleNamespace(**{"user": 0.0, "system": 0.0, "nice": 0.0, **times}) for times in busy]

    def process():
        children = [SimpleNamespace(cpu_times=lambda times=times: times) for times in machine.children]
        return SimpleNamespace(cpu_times=lambda: machine.rank, children=lambda recursive: children)

    fake = SimpleNamespace(Error=OSError, cpu_times=cpu_times, cpu_count=lambda: 3, Process=process)
    monkeypatch.setattr(module, "psutil", fake)
    monkeypatch.setattr(module, "child_pids", lambda: None)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: machine.now_s))
    return machine


def region(monitor, machine, rank, children):
    """Time a region of four seconds, at the end of which rank and children have these CPU times."""
    monitor.start()
    machine.now_s, machine.rank, machine.children = machine.now_s + 4, rank, children
    monitor.stop()


def test_load_by_a_rank_and_its_loader_processes_is_not_foreign(machine):
    monitor = CpuMonitor((0, 1))
    region(monitor, machine, (1, 0, 0, 0), [(0.75, 0.25, 0, 0)])
    machine.now_s, machine.children = machine.now_s + 50, []  # between the regions
    region(monitor, machine, (2, 0, 0, 0), [(0.75, 0.25, 0, 0)])
    assert monitor.summary()["foreign_cpu_share"] == pytest.approx((4 - 1 - 1) / 4 / 2)


def test_load_by_raypar_and_ray_is_counted_separately(machine):
    of_raypar = [SimpleNamespace(cpu_times=lambda share=share: (share * machine.now_s, 0)) for share in (0.2, 0.1)]
    monitor = CpuMonitor((0, 1), of_raypar)
    region(monitor, machine, (1, 0, 0, 0), [])
    assert monitor.sums.raypar_s == pytest.approx(1.2)
    summary = monitor.summary()
    assert summary["raypar_load_cores"] == pytest.approx(0.3)
    assert summary["foreign_cpu_share"] == pytest.approx((4 - 1 - 2 / 3 * 1.2) / 4 / 2)  # two of three cores


@pytest.mark.parametrize(
    ("server", "driver", "found"),
    [
        ("python -c from raypar.run.forkserver import serve; serve() 3", "python raypar study a.py", [0, 2, 3]),
        ("python -c from raypar.run.forkserver import serve; serve() 3", "ray::RayTrainWorker", []),  # of a cluster
        ("-bash", "sshd", []),
    ],
)
def test_raypars_processes_are_its_driver_and_its_private_ray(monkeypatch, server, driver, found):
    def process(command, parent=None):
        return SimpleNamespace(cmdline=command.split, parent=lambda: parent, name=lambda: command)

    top = process(driver)
    below = [process(server, top), *map(process, ("/x/ray/core/src/ray/gcs/gcs_server", "ray::Broker", "make"))]
    top.children = lambda recursive: below
    of_all = [top, *below]
    monkeypatch.setattr(module.psutil, "Process", lambda: process(server, below[0]))
    assert [of_all.index(each) for each in module.raypar_processes()] == found


def test_loader_processes_that_end_within_the_region_still_count(machine):
    machine.children = [(1.5, 0, 0, 0)]
    monitor = CpuMonitor((0, 1))
    region(monitor, machine, (1, 0, 4.5, 0), [])  # the child used 3 more, and then it was waited for
    assert (monitor.sums.own_s, monitor.summary()["foreign_cpu_share"]) == (pytest.approx(4.0), 0)


def test_a_rank_that_is_not_pinned_has_only_the_machines_load_including_steal(machine):
    monitor = CpuMonitor(())
    region(monitor, machine, (1, 0, 0, 0), [])
    assert (monitor.sums.at_s, monitor.sums.machine_busy_s, monitor.sums.own_s) == pytest.approx((4.0, 8.0, 1.0))
    assert "foreign_cpu_share" not in monitor.summary()


def write_core(folder, number, **numbers):
    """Write some of a core's files: its clock, and how often it and its package slowed down."""
    for name, value in numbers.items():
        path = folder / f"cpu{number}" / ("cpufreq" if name == "scaling_cur_freq" else "thermal_throttle") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


def test_clocks_are_the_mean_of_the_ranks_cores_at_the_regions_ends_and_throttles_add_up(tmp_path):
    monitor = ClockMonitor((0, 2), tmp_path)
    for mhz in (3000, 2700, 2400):
        for number, throttles in ((0, 5), (1, 9), (2, 1)):
            counts = {"core_throttle_count": throttles, "package_throttle_count": 7}
            write_core(tmp_path, number, scaling_cur_freq=800_000, **counts)  # idle between the regions
        monitor.start()
        for number, clock, throttles in ((0, mhz, 5 + 2), (1, 9999, 99), (2, mhz + 200, 1 + 2)):
            counts = {"core_throttle_count": throttles, "package_throttle_count": 7 + 3}  # all cores show the package's
            write_core(tmp_path, number, scaling_cur_freq=clock * 1000, **counts)
        monitor.stop()
    clocks = {"cpu_mhz_first": 3100, "cpu_mhz_mean": 2800, "cpu_mhz_last": 2500}
    assert monitor.summary() == pytest.approx({**clocks, "throttles": 3 * (2 + 2 + 3)})


def test_unreadable_clocks_are_absent(tmp_path):
    write_core(tmp_path, 0, scaling_cur_freq="<unknown>")
    monitor = ClockMonitor((0,), tmp_path)
    monitor.start()
    monitor.stop()
    assert monitor.summary() == {}


# ---- the rank's GPU, by a stand-in for NVML

HOT, BRAKED, AT_ITS_POWER_LIMIT, CHANGING = 0x60, 0x80, 0x4, 0x8
STUDY = "python -c from raypar.run.forkserver import serve; serve() 3"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that this process is on."""
    nvml.install(monkeypatch, card := Card(1, pids=[os.getpid()]))
    return card


def watched(monitor, card, **by_region):
    """Time regions, at the end of which the card has these values, and return the summary."""
    for values in zip(*by_region.values(), strict=True):
        vars(card).update(mhz=210)  # idle between the regions
        monitor.start()
        vars(card).update(zip(by_region, values, strict=True))
        monitor.stop()
    return monitor.summary()


@pytest.mark.parametrize("driver", ["580.65.06", "525.60.13"])
def test_clock_and_temperature_of_a_gpu_are_read_at_the_end_of_each_region(monkeypatch, driver):
    nvml.install(monkeypatch, card := Card(1, pids=[os.getpid()]), driver=driver)
    reasons = (AT_ITS_POWER_LIMIT, HOT, CHANGING, BRAKED | CHANGING)
    figures = watched(GpuMonitor("1234"), card, mhz=(1900, 1700, 1500, 1500), reasons=reasons, celsius=(60, 88, 87, 80))
    clocks = {"gpu_mhz_first": 1900, "gpu_mhz_mean": 1650, "gpu_mhz_last": 1500, "gpu_max_mhz": 1980}
    assert figures == pytest.approx({**clocks, "gpu_slowdowns": 2, "gpu_celsius": 88, "gpu_other_processes": 0})


def test_a_mig_slice_has_the_clock_and_temperature_of_its_card_but_not_its_processes(monkeypatch):
    part = Card(1, uuid="MIG-a5", pids=[os.getpid()])
    nvml.install(monkeypatch, card := Card(1, [part], pids=[1, 2, 3, os.getpid()]))
    figures = watched(GpuMonitor("a5"), card, mhz=(1400,), celsius=(60,))
    assert (figures["gpu_mhz_mean"], figures["gpu_celsius"], figures["gpu_other_processes"]) == (1400, 60, 0)


def test_unreadable_values_of_a_gpu_are_absent(monkeypatch):
    nvml.install(monkeypatch, card := Card(1, max_mhz=None, pids=None))
    figures = watched(GpuMonitor("1234"), card, mhz=(None,), reasons=(None,), celsius=(50,))
    assert figures == {"gpu_celsius": 50}
    for unknown in (GpuMonitor("77"), GpuMonitor("1234") if nvml.install(monkeypatch, error="no driver") else None):
        unknown.start()
        unknown.stop()
        assert unknown.summary() == {}


def test_a_trial_on_the_cpu_does_not_use_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpu_module, "open_nvml", lambda: pytest.fail("NVML was asked"))
    telemetry = Telemetry((0,), torch.device("cpu"))
    telemetry.start()
    telemetry.stop()
    assert not [key for key in telemetry.summary() if key.startswith("gpu")]


@pytest.fixture
def processes(monkeypatch):
    """The processes of a machine, by id: this one is a rank of a study whose driver is 2."""
    me, all_of_them = os.getpid(), {}

    class Gone(Exception):
        pass

    def process_of(pid=me):
        if pid not in all_of_them:
            raise Gone
        parent, command = all_of_them[pid]
        above = []
        while parent:
            above.append(SimpleNamespace(pid=parent))
            parent = all_of_them[parent][0]
        return SimpleNamespace(
            pid=pid,
            cmdline=command.split,
            name=lambda: command.split()[0][:15],
            parent=lambda: process_of(above[0].pid) if above else None,
            parents=lambda: above,
        )

    all_of_them.update({1: (0, "init"), 2: (1, "raypar study"), 3: (2, STUDY), me: (3, STUDY)})
    for each in (module, gpu_module):
        monkeypatch.setattr(each, "psutil", SimpleNamespace(Error=Gone, Process=process_of))
    return all_of_them


def test_foreign_processes_on_a_gpu_are_counted_but_not_those_of_the_study(gpu, processes):
    me = os.getpid()
    fresh = {4: (2, STUDY), 5: (4, STUDY), 6: (me, "a loader"), 7: (3, STUDY)}  # ranks beside this one, its loaders
    processes.update({**fresh, 8: (1, "jupyter"), 9: (1, STUDY), 10: (1, "nvidia-cuda-mps-server")})
    pids = [me, 5, 6, 7, 10]
    assert watched(GpuMonitor("1234"), gpu, pids=(pids,))["gpu_other_processes"] == 0
    # Ranks of another study are foreign too; 77 has ended, or can't be seen.
    assert watched(GpuMonitor("1234"), gpu, pids=([me], [*pids, 8, 9, 77], [me]))["gpu_other_processes"] == 2


def test_process_ids_of_another_namespace_are_not_counted(gpu, processes):
    processes[8], gpu.pids = (1, "jupyter"), [8, 123456]
    assert "gpu_other_processes" not in watched(GpuMonitor("1234"), gpu, celsius=(50,))
    processes[os.getpid()] = (1, "pytest")  # outside of a study, the owners of the others are unknown
    assert watched(GpuMonitor("1234"), gpu, pids=([os.getpid(), 8],))["gpu_other_processes"] == 0


TIMES = CpuTimes(at_s=2.0, machine_busy_s=6.0, own_s=2.0)
RANK = RankCounters("a", 8, TIMES)


def rank(machine="a", **times):
    return RankCounters(machine, 8, TIMES._replace(**times))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank(machine_busy_s=3.0)], [0.5]),
        ([rank(machine_busy_s=1.98)], [0.0]),  # ticks round
        ([rank(machine_busy_s=5.2, raypar_s=0.2), rank(machine_busy_s=5.2, raypar_s=0.1)], [0.5, 0.5]),
        ([rank(machine_busy_s=0.0)], [None]),  # a sandbox without counters
        ([rank(at_s=0.05, machine_busy_s=0.1, own_s=0.0)], [None]),  # five ticks
        ([RANK, rank("b", machine_busy_s=5.0), rank(own_s=3.0)], [0.5, 1.5, 0.5]),
    ],
)
def test_other_load_of_a_machine_excludes_all_its_ranks_and_a_trial_has_the_largest(ranks, expected):
    assert other_loads(ranks) == expected
    result = merged(*ranks)
    assert result.conditions.to_stored().get("other_load_cores") == (None if None in expected else expected)
    assert result.conditions.largest("other_load_cores") == (None if None in expected else max(expected))
    assert None in expected or result.conditions.of_ranks("num_node_cores") == [8] * len(ranks)


def merged(*counters):
    ends = {rank: RankEnd(RankOutcome(train_time_s=2.0, counters=c)) for rank, c in enumerate(counters)}
    return trial_result(make_spec({"num_workers": len(counters)}), ends, conditions=Conditions(node=("n",)))


def test_a_trials_times_are_those_of_its_slowest_rank():
    times = ((2.0, 0.5), (4.0, 0.1))
    ends = [RankEnd(RankOutcome(train_time_s=t, wall_s=1 + t, eval_time_s=e, num_samples=60)) for t, e in times]
    result = trial_result(make_spec({"num_workers": 2}), dict(enumerate(ends)))
    assert (result.train_time_s, result.wall_s, result.eval_time_s) == (4.0, 5.0, 0.5)
    assert result.throughput_samples_per_s == 30.0  # of both ranks' samples


def steps(num, *, usual_s=0.02, **at):
    """Return step times that vary by a fifth, except those at the given indices."""
    times = [usual_s * (1 + 0.1 * (i % 3)) for i in range(num)]
    for i, time_s in at.items():
        times[int(i.removeprefix("at"))] = time_s
    return times


AVERAGES = {f"at{i}": 4.0 for i in range(99, 300, 100)}  # over a slow network


@pytest.mark.parametrize(
    ("step_times_s", "stalls_s"),
    [
        (steps(200, at120=10.4), [10.4]),
        (steps(200, at120=10.4, at190=6.0), [10.4, 6.0]),
        (steps(20, usual_s=1.0, at5=11.0), [11.0]),
        (steps(5, at3=10.0), [10.0]),
        (steps(200, at120=1.4), []),  # a busy machine
        (steps(20, usual_s=1.0, at5=4.0), []),
        (steps(50_000, at120=10.4), []),  # 1 % of all
        (steps(200, at0=10.0), []),  # one-time work
        (steps(30, at7=4.0, at15=4.0, at23=4.0), []),  # regular, as with data loaders that prefetch
        (steps(4, at3=10.0), []),  # too few to know what is usual
        (steps(0), []),
    ],
)
def test_a_step_is_a_stall_if_it_is_far_longer_than_most(step_times_s, stalls_s):
    assert stalls(step_times_s) == stalls_s


def test_averages_of_local_sgd_are_not_stalls_but_a_longer_one_is():
    assert stalls(steps(600, **AVERAGES), 100) == []
    assert stalls(steps(600, **AVERAGES, at250=10.0), 100) == [10.0]
    assert stalls(steps(600, **AVERAGES)) == [4.0] * 3


@pytest.mark.parametrize(("strategy", "stalls_s"), [("ddp", (4.0,)), ("local_sgd", ())])
def test_a_trials_stalls_are_those_of_its_slowest_rank(strategy, stalls_s):
    ranks = steps(400), steps(400, at99=4.0)
    ends = {
        rank: RankEnd(RankOutcome(train_time_s=20.0, step_times_s=tuple(times))) for rank, times in enumerate(ranks)
    }
    spec = make_spec({"num_workers": 2, "strategy": strategy, "sync_every": 100})
    assert trial_result(spec, ends).conditions.stalls_s == stalls_s


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
        ([*WITH_PACKAGES[:2], OTHER], (120.0, "GPUs")),  # not all machines have readable packages
        ([WITH_PACKAGES[0], replace(WITH_PACKAGES[0], gpu="H", gpu_j=None)], None),
    ],
)
def test_packages_and_gpus_count_once_each_and_all_must_be_readable(ranks, expected):
    assert energy(ranks) == expected


def test_a_result_has_the_energy_or_the_reason_why_it_is_unknown():
    result = merged(replace(RANK, package_j=100.0))
    assert (result.energy_j, result.conditions.energy_of) == (100.0, "CPU packages")
    stored = result.to_json()
    assert result_from_json(stored).energy_j == 100.0
    before_energy = stored.replace('"energy_j":100.0,', "")  # stored by an earlier version
    assert result_from_json(before_energy).energy_j is None
    unreadable = merged(replace(RANK, package_j=100.0), replace(RANK, machine="b", no_energy=("may not be read",)))
    assert unreadable.energy_j is None
    assert unreadable.conditions.no_energy == "may not be read" and not unreadable.conditions.energy_of
    untimed = merged(replace(RANK, package_j=100.0), None)
    assert (untimed.energy_j, untimed.conditions.largest("other_load_cores"), untimed.conditions.node) == (
        None,
        None,
        ("n",),
    )
