"""Clocks and throttling, from folders laid out like /sys/devices/system/cpu: few machines that run tests have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypar.train.telemetry import ClockMonitor


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
    watch = ClockMonitor((0, 2), tmp_path)
    for mhz in (3000, 2700, 2400):
        a_core(tmp_path, 0, 800)  # idle between the regions
        watch.start()
        for number, own in ((0, mhz), (1, 9999), (2, mhz + 200)):
            a_core(tmp_path, number, own)
        watch.stop()
    told = watch.summary()
    assert told == pytest.approx({"cpu_mhz_first": 3100, "cpu_mhz_mean": 2800, "cpu_mhz_last": 2500})


def test_throttles_of_cores_add_up_and_those_of_a_package_count_once(tmp_path: Path) -> None:
    watch = ClockMonitor((0, 1), tmp_path)
    before = [(5, 7), (1, 7)]
    for _ in range(2):
        for number, counts in enumerate(before):
            a_core(tmp_path, number, throttles=counts)
        watch.start()
        for number, (core, package) in enumerate(before):
            a_core(tmp_path, number, throttles=(core + 2, package + 3))
        watch.stop()
    assert watch.summary() == {"throttles": 2 * (2 + 2 + 3)}


def test_what_a_machine_does_not_show_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "cpu0/cpufreq").mkdir(parents=True)
    (tmp_path / "cpu0/cpufreq/scaling_cur_freq").write_text("<unknown>\n")
    watch = ClockMonitor((0,), tmp_path)
    watch.start()
    watch.stop()
    assert watch.summary() == {}
