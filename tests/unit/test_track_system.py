"""Samples of the machine's load between a trial's start and its end."""

import threading

from raypar.track import system_metrics as module
from raypar.track.system_metrics import SystemMonitor

DISK = ("disk_usage_percentage", "disk_usage_megabytes", "disk_available_megabytes")
MEMORY = ("system_memory_usage_megabytes", "system_memory_usage_percentage")
NETWORK = ("network_receive_megabytes", "network_transmit_megabytes")
KEYS = {f"system/{key}" for key in ("cpu_utilization_percentage", *MEMORY, *DISK, *NETWORK)}


def test_a_trial_gets_every_figure_at_steps_that_count_from_0_on(monkeypatch):
    monkeypatch.setattr(module, "MIN_GAP_S", 0.0)
    with SystemMonitor(interval_s=0.001) as monitor:
        sampled = threading.Event()
        real = monitor._values
        monkeypatch.setattr(monitor, "_values", lambda: (sampled.set(), real())[1])
        monitor.begin("a")
        assert sampled.wait(30)
        points = monitor.end("a")
    assert not monitor._thread.is_alive()
    assert {point.key for point in points} == KEYS
    steps = [point.step for point in points if point.key == "system/cpu_utilization_percentage"]
    assert steps == list(range(len(steps))) and len(steps) >= 2
    assert [p.time_ms for p in points] == sorted(p.time_ms for p in points)
    assert all(0 <= point.value <= 100 for point in points if point.key.endswith("_percentage"))


def test_the_shortest_trial_has_one_sample_and_one_that_never_began_none():
    with SystemMonitor(interval_s=1000) as monitor:
        for identity in ("a", "b"):  # too soon after one another for a sample each
            monitor.begin(identity)
            assert {point.step for point in monitor.end(identity)} == {0}
        assert monitor.end("never") == ()


def test_trials_at_once_each_have_what_was_sampled_in_their_own_time(monkeypatch):
    monkeypatch.setattr(module, "MIN_GAP_S", 0.0)
    clock = iter(range(1000))
    monkeypatch.setattr(module.time, "time", lambda: float(next(clock)))
    monitor = SystemMonitor()  # its thread is not started: samples are taken by hand
    for identity in ("a", "b"):
        monitor.begin(identity)
        monitor._sample()
    ended = {identity: {point.step for point in monitor.end(identity)} for identity in ("a", "b")}
    assert ended == {"a": {0, 1, 2}, "b": {0, 1, 2}}
    monitor.begin("c")
    assert {point.step for point in monitor.end("c")} == {0}
    assert len(monitor._samples) <= 2
