"""Energy, from folders like /sys/class/powercap and from a stand-in for NVML."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import nvml
import pytest
from nvml import Card

from raypar.measure import energy
from raypar.measure.energy import CannotRead, EnergyMonitor, gpu_counters, package_counters


def write_zone(folder, zone, name, joules, range_j=262_143):
    """Write a zone of the powercap folder, and return its counter's file."""
    (folder / zone).mkdir(parents=True, exist_ok=True)
    for file, value in {"name": name, "energy_uj": joules * 10**6, "max_energy_range_uj": range_j * 10**6}.items():
        (folder / zone / file).write_text(f"{value}\n")
    return folder / zone / "energy_uj"


def measured(open_counters, *changes):
    """Return a monitor after a timed region with each change in it."""
    monitor = EnergyMonitor(open_counters)
    for change in changes:
        monitor.start()
        change()
        monitor.stop()
    return monitor


def test_packages_add_up_over_regions_without_their_parts_and_the_board(tmp_path):
    def count(joules):
        write_zone(tmp_path, "intel-rapl:0", "package-0", 10 + joules)
        write_zone(tmp_path, "intel-rapl:1", "package-1", 90 + joules // 2)
        for zone, name in (("intel-rapl:0:0", "core"), ("intel-rapl:2", "psys"), ("intel-rapl-mmio:0", "package-0")):
            write_zone(tmp_path, zone, name, joules * 7)

    count(0)
    monitor = measured(partial(package_counters, tmp_path), lambda: count(100))
    count(200)  # between the regions
    monitor.start()
    count(300)
    monitor.stop()
    assert (monitor.joules, monitor.why_not) == (pytest.approx(1.5 * 200), "")


def test_a_counter_may_wrap_around_once_in_a_region_but_not_twice(tmp_path):
    counter_file = write_zone(tmp_path, "intel-rapl:0", "package-0", 59_990, range_j=60_000)
    (counter_file.parent / "constraint_0_power_limit_uw").write_text("100000000\n")  # 100 W, without the margin
    monitor = measured(partial(package_counters, tmp_path), lambda: counter_file.write_text("15000000\n"))
    assert monitor.joules == pytest.approx(25)
    (counter,) = package_counters(tmp_path)
    assert counter.used(1, 11, elapsed_s=399) == 10
    with pytest.raises(CannotRead, match=r"within 400 s, and a timed region lasted 401 s: evaluate more often"):
        counter.used(1, 11, elapsed_s=401)


def test_missing_lost_and_unreadable_counters_are_reported(tmp_path, monkeypatch):
    open_counters = partial(package_counters, tmp_path)
    assert EnergyMonitor(open_counters).why_not == f"no CPU package has an energy counter in {tmp_path}"
    counter = write_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    lost = measured(open_counters, lambda: None, lambda: counter.write_text("lost\n"), lambda: None)
    assert lost.joules is None and "not a number: 'lost'" in lost.why_not  # so the sum is unknown

    def forbidden(path, read_text=Path.read_text):
        if path == counter:
            raise PermissionError
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", forbidden)  # no mode keeps root from reading
    monitor = EnergyMonitor(open_counters)
    message = f"{counter}: may not be read; root can allow it: chmod a+r {counter}"
    assert (monitor.joules, monitor.why_not) == (None, message)


@pytest.fixture
def clock(monkeypatch):
    """Seconds of a clock that stands still."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(energy, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


def timed(monitor, clock, card, *, seconds, joules):
    monitor.start()
    clock.now_s, card.millijoules = clock.now_s + seconds, card.millijoules + joules * 1000
    monitor.stop()


@pytest.mark.parametrize("uuid", ["1234", "GPU-1234"])  # torch leaves the prefix out
def test_the_energy_of_a_gpu_is_the_increase_of_its_counter(monkeypatch, clock, uuid):
    library = nvml.install(monkeypatch, card := Card(1, millijoules=7000))
    monitor = EnergyMonitor(partial(gpu_counters, uuid))
    for joules in (2, 4):
        timed(monitor, clock, card, seconds=3.0, joules=joules)
        card.millijoules += 9000  # between the regions
    assert (monitor.joules, monitor.why_not) == (pytest.approx(6.0), "")
    card.millijoules = None
    monitor.start()
    assert monitor.joules is None and monitor.why_not.endswith(f"energy of GPU {uuid}: Not Supported")
    library.error = "Driver Not Loaded"
    assert EnergyMonitor(partial(gpu_counters, uuid)).why_not == "a GPU's energy can't be read: Driver Not Loaded"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install 'raypar[train]'" in EnergyMonitor(partial(gpu_counters, uuid)).why_not


def test_regions_that_are_too_short_for_the_counters_updates_have_no_energy(monkeypatch, clock):
    nvml.install(monkeypatch, card := Card(1))
    monitor = EnergyMonitor(partial(gpu_counters, "1234"))
    assert monitor.why_not == ""  # nothing is timed yet
    for seconds in (0.5, 0.2):
        timed(monitor, clock, card, seconds=seconds, joules=200)
        assert monitor.joules is None
    assert "timed regions of 0.35 s: evaluate less often" in monitor.why_not
    timed(monitor, clock, card, seconds=2.3, joules=600)  # on average, a second
    assert (monitor.joules, monitor.why_not) == (pytest.approx(1000.0), "")


def test_a_short_region_has_the_energy_of_packages(tmp_path, clock):
    write_zone(tmp_path, "intel-rapl:0", "package-0", 10)
    monitor = EnergyMonitor(partial(package_counters, tmp_path))
    monitor.start()
    clock.now_s += 0.01
    write_zone(tmp_path, "intel-rapl:0", "package-0", 12)
    monitor.stop()
    assert (monitor.joules, monitor.why_not) == (pytest.approx(2.0), "")


def test_a_mig_slice_has_no_energy(monkeypatch):
    nvml.install(monkeypatch, Card(1, [Card(1, uuid="MIG-a5")]))
    monitor = EnergyMonitor(partial(gpu_counters, "a5"))  # as torch has it
    assert (monitor.joules, "a slice of one (MIG)" in monitor.why_not) == (None, True)
    assert EnergyMonitor(partial(gpu_counters, "77")).why_not == "NVML has no GPU 77: Not Supported"


def test_the_counter_of_a_real_gpu_increases():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.version.hip:
        pytest.skip("no NVIDIA GPU")
    (counter,) = gpu_counters(str(torch.cuda.get_device_properties(0).uuid))
    try:
        before = counter.read()
    except CannotRead as error:
        pytest.skip(str(error))
    a = torch.ones(8192, 8192, device="cuda")
    for _ in range(200):
        a = a @ a / 8192
    torch.cuda.synchronize()
    assert before < counter.read() < before + 1e5
