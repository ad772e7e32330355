"""Recording of a rank's steps by torch's profiler, after all timed steps.

The profiler slows the steps down, so the same number of steps also runs without it, half before and half after.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from raypar.measure.spans import DATA, MARK, STEP, RecordedSteps, TraceEvent, spans_of
from raypar.parallel.strategy import Batch, DistContext, Span, no_span, wait_for_device
from raypar.scratch import scratch_folder

NUM_SETTLING_STEPS = 3  # for one-time work: an optimizer's state, the profiler's buffers
NUM_TRACED_STEPS = 5
NUM_CLOCK_READS = 5
_CLOCK = MARK + "clock"
Step: TypeAlias = Callable[[Batch], object]


class ProfiledSteps:
    """Further steps of one rank, with and without the profiler; every rank makes the same calls.

    Args:
        new_step: returns a function that makes a step and marks its parts with a span.
        batches: without end.
        module: the model, as the steps run it.
    """

    def __init__(
        self, new_step: Callable[[Span], Step], batches: Iterator[Batch], context: DistContext, module: nn.Module
    ) -> None:
        self._new_step, self._batches, self._context, self._module = new_step, batches, context, module
        self._offset_s, self._shares_clock = _clock_offset_s(context)

    def run(self, num_steps: int) -> RecordedSteps:
        """Record steps, and time as many without the profiler."""
        self._module.train()
        marked, plain = self._new_step(self._mark), self._new_step(no_span)
        self._steps(plain, NUM_SETTLING_STEPS, no_span)
        before = self._steps(plain, -(-num_steps // 2), no_span)
        with self._profiler() as profiler:
            anchors_s = [_mark_clock() for _ in range(NUM_CLOCK_READS)]
            self._steps(marked, NUM_SETTLING_STEPS, _unmarked)
            profiled = self._steps(marked, num_steps, self._mark)
        after = self._steps(plain, num_steps // 2, no_span)
        events = list(profiler.events() or ())
        spans = spans_of(_trace_events(events, anchors_s), on_gpu=self._context.device.type == "cuda")
        on_clock = [(name, start - self._offset_s, end - self._offset_s) for name, start, end in spans]
        return RecordedSteps(on_clock, [*before, *after], profiled, self._shares_clock)

    def write_traces(self, folder: Path) -> None:
        """Write a trace of a few steps of every rank to rank 0's folder, for Chrome or Perfetto."""
        context, step = self._context, self._new_step(self._mark)
        with self._profiler() as profiler:
            self._steps(step, NUM_TRACED_STEPS, self._mark)
        with scratch_folder() as temporary:
            path = temporary / "trace.json.gz"
            profiler.export_chrome_trace(str(path))
            traces: list[Any] = [path.read_bytes()]
        if context.world_size > 1:  # the ranks' disks may be elsewhere
            by_rank = [None] * context.world_size if context.rank == 0 else None
            dist.gather_object(traces[0], by_rank)
            traces = by_rank or []
        if context.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        for rank, trace in enumerate(traces):
            (folder / f"rank{rank}.trace.json.gz").write_bytes(trace)

    def _steps(self, step: Step, num_steps: int, span: Span) -> list[float]:
        """Run steps; return the seconds of each, including the loading of its batch."""
        self._context.barrier()
        times_s: list[float] = []
        for _ in range(num_steps):
            start_s = time.perf_counter()
            with span(STEP):
                with span(DATA):
                    batch = next(self._batches)
                step(batch)
                wait_for_device(self._context.device)  # no other step's work is in this one
            times_s.append(time.perf_counter() - start_s)
        return times_s

    def _profiler(self) -> torch_profile:
        on_gpu = self._context.device.type == "cuda"
        return torch_profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])

    @contextlib.contextmanager
    def _mark(self, name: str) -> Iterator[None]:
        with record_function(MARK + name):
            yield
            if self._context.device.type == "mps":  # the profiler records nothing of Apple's GPUs
                wait_for_device(self._context.device)


def _clock_offset_s(context: DistContext) -> tuple[float, bool]:
    """Return the seconds to subtract from this rank's clock to get rank 0's, and whether it is the same clock.

    Ranks on one machine share a monotonic clock. Other clocks are read at the end of barriers, which all ranks leave
    within about a network latency. Zero is rank 0's first reading.
    """
    if context.world_size == 1:
        return time.perf_counter(), True
    readings_s: list[float] = []
    for _ in range(NUM_CLOCK_READS):
        context.barrier()
        readings_s.append(time.perf_counter())
    by_rank: list[Any] = [None] * context.world_size
    dist.all_gather_object(by_rank, (socket.gethostname(), readings_s))
    _, of_first = by_rank[0]
    if len({host for host, _ in by_rank}) == 1:
        return of_first[0], True
    return of_first[0] + statistics.median(a - b for a, b in zip(readings_s, of_first, strict=True)), False


def _mark_clock() -> float:
    now_s = time.perf_counter()
    with record_function(_CLOCK):
        return now_s


def _unmarked(_: str) -> contextlib.AbstractContextManager[object]:
    return record_function("settling")


def _trace_events(events: list[FunctionEvent], anchors_s: list[float]) -> list[TraceEvent]:
    """Convert the profiler's events to `time.perf_counter`'s clock."""
    clock_us = sorted(e.time_range.start for e in events if e.name == _CLOCK and not _is_on_device(e))
    # An anchor was read before its event began: the latest is the closest.
    zero_s = max(anchor_s - at_us / 1e6 for anchor_s, at_us in zip(anchors_s, clock_us, strict=False))
    settled_us = max((e.time_range.end for e in events if e.name == "settling"), default=0.0)
    return [
        TraceEvent(
            name=e.name,
            start_s=zero_s + e.time_range.start / 1e6,
            end_s=zero_s + e.time_range.end / 1e6,
            thread=e.thread,
            is_async=e.is_async,
            on_device=_is_on_device(e),
            correlation=e.id,
        )
        for e in events
        # On the device, annotations overlap the kernels that they contain.
        if e.name != _CLOCK and e.time_range.start >= settled_us and not (_is_on_device(e) and e.is_user_annotation)
    ]


def _is_on_device(event: FunctionEvent) -> bool:
    return bool(event.device_type.value)  # 0: the CPU
