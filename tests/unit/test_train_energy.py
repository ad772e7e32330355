"""Joules, from folders laid out like /sys/class/powercap and from a stand-in for NVML: few machines show theirs."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from raypar.train.energy import CannotRead, EnergyMonitor, gpu_counters, package_counters


def a_zone(folder, zone, name, joules, range_j=262_143):
    (zone_dir := folder / zone).mkdir(parents=True, exist_ok=True)
    (zone_dir / "name").write_text(f"{name}\n")
    (zone_dir / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    (zone_dir / "max_energy_range_uj").write_text(f"{range_j * 1e6:.0f}\n")
    return zone_dir


def measured(folder, *changes):
    """Return a monitor of the folder's packages after a timed region with each change in it."""
    monitor = EnergyMonitor(partial(package_counters, folder))
    for change in changes:
        monitor.start()
        change()
        monitor.stop()
    return monitor


def test_packages_are_added_up_over_the_regions_and_their_parts_and_the_board_are_not(tmp_path):
    def counters(joules):
        a_zone(tmp_path, "intel-rapl:0", "package-0", 10 + joules)
        a_zone(tmp_path, "intel-rapl:1", "package-1", 90 + joules / 2)
        for zone, name in (("intel-rapl:0:0", "core"), ("intel-rapl:2", "psys"), ("intel-rapl-mmio:0", "package-0")):
            a_zone(tmp_path, zone, name, joules * 7)

    counters(0)
    monitor = measured(tmp_path, lambda: counters(100))
    counters(200)  # between the regions
    monitor.start()
    counters(300)
    monitor.stop()
    assert (monitor.joules, monitor.why_not) == (pytest.approx(1.5 * 200), "")


def test_a_counter_that_wraps_around_goes_on_from_its_range(tmp_path):
    zone = a_zone(tmp_path, "intel-rapl:0", "package-0", 990, range_j=1_000)
    assert measured(tmp_path, lambda: (zone / "energy_uj").write_text("15000000\n")).joules == pytest.approx(25)


def test_a_region_in_which_a_counter_may_wrap_twice_has_no_energy(tmp_path):
    zone = a_zone(tmp_path, "intel-rapl:0", "package-0", 0, range_j=60_000)
    (zone / "constraint_0_power_limit_uw").write_text("100000000\n")  # 100 W, and some room
    (counter,) = package_counters(tmp_path)
    assert counter.used(1, 11, elapsed_s=399) == 10
    with pytest.raises(CannotRead, match=r"within 400 s, and 401 s were timed at a time: evaluate more often"):
        counter.used(1, 11, elapsed_s=401)


def test_a_machine_without_counters_is_reported(tmp_path):
    monitor = measured(tmp_path, lambda: None)
    assert (monitor.joules, monitor.why_not) == (None, f"no CPU package has an energy counter in {tmp_path}")


def test_a_counter_that_may_not_be_read_is_reported_with_the_fix(tmp_path, monkeypatch):
    counter = a_zone(tmp_path, "intel-rapl:0", "package-0", 0) / "energy_uj"
    plain = Path.read_text

    def forbidden(path):
        if path == counter:
            raise PermissionError
        return plain(path)

    monkeypatch.setattr(Path, "read_text", forbidden)  # no mode keeps root from reading
    monitor = EnergyMonitor(partial(package_counters, tmp_path))
    message = f"{counter}: may not be read; root can allow it: chmod a+r {counter}"
    assert (monitor.joules, monitor.why_not) == (None, message)


def test_a_counter_that_is_lost_takes_what_was_summed_up_with_it(tmp_path):
    zone = a_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    monitor = measured(tmp_path, lambda: None, lambda: (zone / "energy_uj").write_text("lost\n"), lambda: None)
    assert monitor.joules is None and "holds no number: 'lost'" in monitor.why_not


class Nvml(ModuleType):
    """Stands in for the module pynvml, with a driver and one GPU, as far as energy goes."""

    class NVMLError(Exception):
        pass

    error, millijoules = "", 0

    def nvmlInit(self):
        if self.error:
            raise self.NVMLError(self.error)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        assert handle == "GPU-1234"
        return self.millijoules


@pytest.fixture
def nvml(monkeypatch):
    module = Nvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.mark.parametrize("uuid", ["1234", "GPU-1234"])  # torch leaves the prefix out
def test_a_gpus_energy_is_what_its_counter_went_up_by(nvml, uuid):
    monitor = EnergyMonitor(partial(gpu_counters, uuid))
    for millijoules in (9_000, 12_500):
        nvml.millijoules = millijoules - 2_000
        monitor.start()
        nvml.millijoules = millijoules
        monitor.stop()
    assert monitor.joules == pytest.approx(4.0)
    nvml.error = "Not Supported"
    monitor.start()
    assert monitor.joules is None
    assert monitor.why_not == "NVML can't read the energy of GPU-1234: Not Supported"


def test_a_machine_without_nvidia_ml_py_is_reported_with_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor = EnergyMonitor(partial(gpu_counters, "1234"))
    assert monitor.joules is None and "pip install 'raypar[train]'" in monitor.why_not


def test_nvidia_ml_py_has_what_is_used():
    pynvml = pytest.importorskip("pynvml")
    assert all(hasattr(pynvml, name) for name in vars(Nvml) if name.startswith(("nvml", "NVML")))


def test_this_machines_gpu_counts_upwards():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.version.hip:
        pytest.skip("no GPU of NVIDIA's")
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
