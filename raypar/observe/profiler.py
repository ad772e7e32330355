"""Profile of some of a script's steps by torch's profiler: a trace for each rank, and the time of each operation."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .events import EventRecorder, clock

NAME = "profile"  # among the settings: the folder of the traces, and the number of steps
NUM_SETTLING_STEPS = 10
MAX_OPERATIONS = 300


def hooks(asked: tuple[str, int] | None) -> dict[str, Callable[[Any, EventRecorder], None]]:
    """Return the hook that profiles; none unless it is asked for.

    Args:
        asked: folder of the traces, and number of steps.
    """
    if asked is None:
        return {}
    folder, num_steps = asked
    return {"torch": lambda torch, recorder: _hook_profile(torch, recorder, Path(folder), num_steps)}


def _hook_profile(torch: Any, recorder: EventRecorder, folder: Path, num_steps: int) -> None:
    running: list[Any] = []
    begun_s = 0.0
    last = NUM_SETTLING_STEPS + num_steps

    def begin() -> None:
        nonlocal begun_s
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
        running.append(profiler)
        begun_s = recorder.last_step_s

    def finish() -> None:
        if not running:
            return
        profiler = running.pop()
        profiler.stop()
        recorder.facts["profiled"] = [begun_s, clock()]
        if recorder.num_steps > NUM_SETTLING_STEPS:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"rank{_rank(torch)}.trace.json.gz"))
            recorder.facts["operations"] = _operations(profiler)

    def at_step() -> None:
        if recorder.num_steps == NUM_SETTLING_STEPS:
            recorder.call([begin])
        elif recorder.num_steps == last:
            recorder.call([finish])

    recorder.at_step.append(at_step)
    recorder.at_close.append(finish)  # a script with fewer steps


def _rank(torch: Any) -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def _operations(profiler: Any) -> list[tuple[str, float]]:
    """Return the seconds of each operation: a GPU's kernels if it ran any, else the CPU's operations."""
    averages = profiler.key_averages()
    # An operation of the CPU has the time of the kernels that it starts as well, which would count twice.
    kernels = [e for e in averages if e.device_type.name != "CPU" and not getattr(e, "is_user_annotation", False)]
    times: dict[str, float] = {}
    for each in kernels or averages:
        microseconds = each.self_device_time_total if kernels else each.self_cpu_time_total
        times[each.key] = times.get(each.key, 0.0) + microseconds
    largest = sorted(times.items(), key=lambda entry: -entry[1])[:MAX_OPERATIONS]
    return [(name, microseconds / 1e6) for name, microseconds in largest if microseconds > 0]
