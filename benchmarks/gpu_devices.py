"""Devices for gpu_check.py, with their limits: a GPU, or a stand-in on the CPU."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import psutil
import torch
from gpu_trials import NETWORKS

from raypar.gpus import visible_gpus
from raypar.study.options import PRECISIONS


class Combination(NamedTuple):
    """A training of the check of precisions."""

    network: str
    precision: str
    compiles: bool = False

    @property
    def name(self) -> str:
        return f"{self.network}_{self.precision}" + ("_compiled" if self.compiles else "")


# fp32 first, since deviations are relative to it; compiled ones last, so that the others run before the time limit.
COMBINATIONS = tuple(
    Combination(network, precision, compiles)
    for compiles, precision, network in itertools.product((False, True), PRECISIONS, NETWORKS)
)


class Device(Protocol):
    """Device under check.

    Attributes:
        name: as a study's ``device`` has it.
        widths: of two models: one whose steps wait for the host, and one whose steps wait for the device.
        num_trials: warm trials whose memory is checked.
        num_spawned: trials in spawned processes, and in warm ones, whose times are compared.
        min_spawned_ratio: lower bound of the time of a spawned trial over that of a warm one.
        combinations: of the check of precisions, in the order of `COMBINATIONS`.
        max_deviation: allowed between two measurements of the same steps, relative.
        max_slow_start: allowed of the first steps after a warm-up against the last ones, relative.
        max_energy_deviation: allowed between the energy counter and power x time, relative.
        max_utilisation: model FLOP utilisation is below it.
        idle_s: seconds without work after which the clocks are low.
        region_s: steps between two evaluations, whose energy is measured: long against the counter's updates.
        power_average_s: seconds over which `power_w` is averaged.
        package_w: watts of a made-up CPU package that the ranks read; 0: none, so that only the GPU's energy counts.
        limits_memory: a trial that runs out of memory needs a limit below the machine's memory.
        max_total_s: precisions that are not checked by then are left out, and listed.
    """

    name: str
    widths: tuple[int, int]
    num_trials: int
    num_spawned: int
    min_spawned_ratio: float
    combinations: Sequence[Combination]
    max_deviation: float
    max_slow_start: float
    max_energy_deviation: float
    max_utilisation: float
    idle_s: float
    region_s: float
    power_average_s: float
    package_w: float
    limits_memory: bool
    max_total_s: float

    def stamp(self) -> Any:
        """Mark the point that the device's work has reached."""
        ...

    def elapsed_s(self, first: Any, last: Any) -> float:
        """Return the seconds between two stamps, once the device has reached them."""
        ...

    def memory_mb(self) -> float:
        """Return the memory in use on the device, by all processes."""
        ...

    def power_w(self) -> float:
        """Return the power that the device draws."""
        ...


class Gpu:
    name = "cuda"
    widths = (64, 4096)
    num_trials = 10
    num_spawned = 3
    min_spawned_ratio = 1.0
    combinations = COMBINATIONS
    max_deviation = 0.05
    max_slow_start = 0.05
    max_energy_deviation = 0.15
    max_utilisation = 1.0
    idle_s = 3.0
    region_s = 2.0
    power_average_s = 1.0  # NVML's, since Ampere
    package_w = 0.0
    limits_memory = False
    max_total_s = 450.0

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def memory_mb(self) -> float:
        free, total = torch.cuda.mem_get_info(0)
        return (total - free) / 2**20

    def power_w(self) -> float:
        return self._read_power_mw() / 1e3

    @cached_property
    def _read_power_mw(self) -> Callable[[], int]:
        import pynvml

        pynvml.nvmlInit()  # left open: opening it for each sample takes longer than the sample
        return partial(pynvml.nvmlDeviceGetPowerUsage, pynvml.nvmlDeviceGetHandleByUUID(visible_gpus()[0].uuid))


class StandIn:
    """The CPU: every line of the checks is run, each network, precision and compile once.

    Its limits are wide, since it shares its cores with other processes.
    """

    name = "cpu"
    widths = (64, 256)
    num_trials = 2
    num_spawned = 1
    min_spawned_ratio = 0.0
    combinations = (
        *COMBINATIONS[: len(NETWORKS)],
        Combination("transformer", "fp64"),
        Combination("cnn", "bf16"),
        Combination("mlp", "fp16"),
        Combination("mlp", "fp32", compiles=True),
    )
    max_deviation = 0.5
    max_slow_start = 9.0
    max_energy_deviation = 0.5
    max_utilisation = math.inf  # of the peak that the cores had left
    idle_s = 0.0
    region_s = 0.5
    power_average_s = 0.0
    package_w = 50.0
    limits_memory = True
    max_total_s = math.inf

    def stamp(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, first: float, last: float) -> float:
        return last - first

    def memory_mb(self) -> float:
        """Return the resident memory of all ranks: the children of this process's children (its fork server)."""
        ranks = [rank for child in psutil.Process().children() for rank in child.children(recursive=True)]
        return sum(map(_resident_mb, ranks))

    def power_w(self) -> float:
        return self.package_w


def _resident_mb(process: psutil.Process) -> float:
    try:
        return process.memory_info().rss / 2**20
    except psutil.NoSuchProcess:
        return 0.0
