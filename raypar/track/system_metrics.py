"""Load of the driver's machine during each trial, under the names of MLflow's "System metrics" page.

Sampled by a thread of the driver, once a second, never by a process that is timed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping

import psutil

from raypar.track.runs import Point

INTERVAL_S = 1.0
# Over less than this, psutil's figure of the processor is noise.
MIN_GAP_S = 0.1
_SECTION = "system/"


class SystemMonitor:
    """Context manager that samples between `begin` and `end` of a trial, or of several trials at once."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._samples: deque[tuple[float, Mapping[str, float]]] = deque()
        self._begun_at: dict[str, float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="system metrics", daemon=True)
        self._network = psutil.net_io_counters()
        psutil.cpu_percent()  # the first call's answer means nothing: it counts from here on

    def begin(self, identity: str) -> None:
        """Mark the start of a trial; another attempt of it changes nothing."""
        self._begun_at.setdefault(identity, time.time())

    def end(self, identity: str) -> tuple[Point, ...]:
        """Return the trial's samples, the last one taken now, at steps 0, 1, 2 …; empty for one that never began."""
        begun_at = self._begun_at.pop(identity, None)
        if begun_at is None:
            return ()
        self._sample()
        with self._lock:
            mine = [(at, values) for at, values in self._samples if at >= begun_at] or [self._samples[-1]]
            oldest = min(self._begun_at.values(), default=time.time())
            while len(self._samples) > 1 and self._samples[0][0] < oldest:
                self._samples.popleft()
        return tuple(
            Point(f"{_SECTION}{key}", value, round(at * 1000), step)
            for step, (at, values) in enumerate(mine)
            for key, value in values.items()
        )

    def __enter__(self) -> SystemMonitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            if self._begun_at:
                self._sample()

    def _sample(self) -> None:
        with self._lock:
            now = time.time()
            if not self._samples or now - self._samples[-1][0] >= MIN_GAP_S:
                self._samples.append((now, self._values()))

    def _values(self) -> dict[str, float]:
        memory, disk, network = psutil.virtual_memory(), psutil.disk_usage("/"), psutil.net_io_counters()
        return {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": round(memory.used / 1e6, 1),
            "system_memory_usage_percentage": round(100 * memory.used / memory.total, 1),
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": round(disk.used / 1e6, 1),
            "disk_available_megabytes": round(disk.free / 1e6, 1),
            # Since the study's start, all interfaces together, as MLflow's monitor counts.
            "network_receive_megabytes": round((network.bytes_recv - self._network.bytes_recv) / 1e6, 3),
            "network_transmit_megabytes": round((network.bytes_sent - self._network.bytes_sent) / 1e6, 3),
        }
