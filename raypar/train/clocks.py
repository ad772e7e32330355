"""How fast the cores' clocks ran while a trial was timed, and how often heat slowed them down.

Linux' own files: psutil's ``cpu_freq`` reads every core of the machine, and where there is no clock to be read it gives
a nominal one, which can't drift. Most virtual machines and containers show neither file; nothing is told there.
"""

from __future__ import annotations

from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


class ClockWatch:
    """Looks at the clocks of the rank's cores at the end of every timed region, while they still run at their load."""

    def __init__(self, cores: tuple[int, ...], folder: Path = CPUS) -> None:
        self._folders = [folder / f"cpu{core}" for core in cores]
        self._mhz: list[float] = []
        self._throttles: int | None = None
        self._before: int | None = None

    def start(self) -> None:
        self._before = self._throttle_count()

    def stop(self) -> None:
        known = [khz for folder in self._folders if (khz := _read(folder / "cpufreq/scaling_cur_freq")) is not None]
        if known:
            self._mhz.append(sum(known) / len(known) / 1e3)
        after = self._throttle_count()
        if self._before is not None and after is not None:
            self._throttles = (self._throttles or 0) + max(0, after - self._before)

    def summary(self) -> dict[str, float]:
        """``cpu_mhz_first``, ``_mean`` and ``_last`` over the timed regions' ends, mean of the cores; ``throttles``.

        Without what the system doesn't tell. ``throttles`` counts how often a core or its package became so hot that it
        slowed down.
        """
        found: dict[str, float] = {}
        if self._mhz:
            mean = sum(self._mhz) / len(self._mhz)
            found |= {"cpu_mhz_first": self._mhz[0], "cpu_mhz_mean": mean, "cpu_mhz_last": self._mhz[-1]}
        if self._throttles is not None:
            found["throttles"] = self._throttles
        return found

    def _throttle_count(self) -> int | None:
        """Of all the rank's cores, and of their hottest package, whose count each of its cores repeats."""
        cores, packages = (
            [count for folder in self._folders if (count := _read(folder / f"thermal_throttle/{name}")) is not None]
            for name in ("core_throttle_count", "package_throttle_count")
        )
        return sum(cores) + max(packages, default=0) if cores or packages else None


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
