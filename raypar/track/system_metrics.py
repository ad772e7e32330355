"""Load of a trial's machines: processor, memory, disk, network and GPUs, sampled by MLflow's monitors.

The process that supervises a machine's first rank samples in a thread, never a timed process. Metrics have MLflow's
names for several nodes, so that its page "System metrics" shows them.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from raypar.track.client import import_mlflow
from raypar.track.runs import Point

INTERVAL_S = 1.0
NUM_DENSE = 600  # samples at this interval, which then grows: a day has a few thousand samples


@contextlib.contextmanager
def system_sampled() -> Iterator[list[Point]]:
    """Sample this machine during the block, at steps 0, 1, 2 …. The list is complete, and not empty, at its end."""
    monitors, is_over, points = _monitors(), threading.Event(), list[Point]()

    def watch() -> None:
        _values(monitors)  # psutil's first value for the processor is meaningless
        for step in itertools.count():
            if is_over.wait(INTERVAL_S * max(1.0, step / NUM_DENSE)) and step:
                return
            at_ms, node = round(time.time() * 1000), socket.gethostname()
            points.extend(Point(f"system/{node}/{key}", value, at_ms, step) for key, value in _values(monitors).items())

    thread = threading.Thread(target=watch, name="system metrics", daemon=True)
    thread.start()
    try:
        yield points
    finally:
        is_over.set()
        thread.join()


def _monitors() -> list[Any]:
    import_mlflow()
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

    monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    for gpus in (GPUMonitor, ROCMMonitor):
        with contextlib.suppress(Exception):  # no such GPU, or no package for it
            monitors.append(gpus())
    return monitors


def _values(monitors: list[Any]) -> dict[str, float]:
    values: dict[str, float] = {}
    for monitor in monitors:
        monitor.collect_metrics()
        values |= monitor.aggregate_metrics()
        monitor.clear_metrics()
    return values
