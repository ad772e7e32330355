"""Spans of a rank's steps on one time line, from a profiler's events.

The profiler doesn't record waiting. A rank has waited if it did nothing up to the end of one of its communications.
Other time between two operations (Python, the profiler) belongs to the surrounding part of the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

MARK = "raypar:"  # before the names of raypar's own marks in a trace
STEP, DATA, PIPELINE, WAIT = "step", "data", "pipeline", "wait"
# The communicating thread wakes the waiting one before the profiler records the end: by milliseconds on busy cores.
LATE_S = 10e-3

Span: TypeAlias = tuple[str, float, float]  # name, start and end in seconds
Interval: TypeAlias = tuple[float, float]

_OPERATIONS = ("aten::", "CompiledFxGraph", "## Call CompiledFxGraph")
_COMMUNICATION_CALLS = ("c10d::", "_c10d_functional::")
_BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class RecordedSteps:
    """Profiled steps of one rank.

    Attributes:
        spans: on rank 0's clock; between machines, clocks agree to about a network latency.
        step_times_s: times of as many steps without the profiler.
        profiled_step_times_s: times of the profiled steps.
        shares_clock: all ranks are on one machine.
        peak_flops: FLOP/s of matrix products on this rank while the others measure too; 0: not measured.
        flop_per_sample: FLOP of a sample, forward and backward; None: unknown, or not rank 0.
    """

    spans: list[Span]
    step_times_s: list[float]
    profiled_step_times_s: list[float]
    shares_clock: bool
    peak_flops: float = 0.0
    flop_per_sample: int | None = None


@dataclass(frozen=True)
class TraceEvent:
    """One event of torch.profiler.

    Attributes:
        thread: the host's, as the profiler numbers them.
        is_async: begins in one thread and ends in another.
        on_device: a kernel or a copy on an accelerator.
        correlation: shared by a call of the accelerator's driver and the kernel that it launched.
    """

    name: str
    start_s: float
    end_s: float
    thread: int = 0
    is_async: bool = False
    on_device: bool = False
    correlation: int = 0


def spans_of(events: Sequence[TraceEvent], *, on_gpu: bool) -> list[Span]:
    """Return the spans of a rank, by start.

    ``step`` spans enclose the others. Marks (``data``, ``forward``, ``backward``, ``combine``, ``optimizer``,
    ``spread``) don't overlap; a pipeline's mark is split into ``forward`` and ``backward``. The others may overlap:
    ``wait``, in which the rank waits for a communication, and communications by the profiler's names, such as
    ``gloo:all_reduce`` and ``ncclDevKernel_AllReduce_…``.

    Args:
        on_gpu: use the accelerator's events, because the host runs ahead. A kernel belongs to the mark in which it was
            launched. Steps must end with a synchronisation.
    """
    host = [e for e in events if not e.on_device]
    marks = sorted((e for e in host if e.name.startswith(MARK) and not e.is_async), key=lambda e: e.start_s)
    if not marks:
        return []
    threads = {e.thread for e in host} if on_gpu else {marks[0].thread}
    steps = [(e.start_s, e.end_s) for e in marks if e.name == MARK + STEP]
    calls_of_rank = [e for e in host if e.thread in threads and not e.is_async and not e.name.startswith(MARK)]
    parts = list(_parts(marks, calls_of_rank))
    calls: list[Interval] = []
    if on_gpu:
        parts, busy = _on_device(events, parts)
        communications = [(e.name.partition("(")[0], e.start_s, e.end_s) for e in events if _is_nccl_kernel(e)]
    else:
        # Operations in a call that communicates belong to the call.
        calls = merged((e.start_s, e.end_s) for e in calls_of_rank if e.name.startswith(_COMMUNICATION_CALLS))
        operations = merged((e.start_s, e.end_s) for e in calls_of_rank if e.name.startswith(_OPERATIONS))
        busy = without(operations, calls)
        communications = [(e.name, e.start_s, e.end_s) for e in host if e.is_async and ":" in e.name]
    # A barrier before the first step is not part of it.
    communications = [c for c in communications if any(start <= c[1] < end for start, end in steps)]
    waits, communications = _waits(without(merged(steps), busy), communications)
    waits = merged([*calls, *waits])
    spans = [*((STEP, *step) for step in steps), *parts, *((WAIT, *wait) for wait in waits), *communications]
    return sorted(spans, key=lambda span: span[1])


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union, as intervals that don't touch, by start."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((start, end))
    return union


def without(intervals: Sequence[Interval], cuts: Sequence[Interval]) -> list[Interval]:
    """Return the intervals less the cuts; both by start, neither overlapping itself."""
    rest: list[Interval] = []
    ends = [end for _, end in cuts]
    for start, end in intervals:
        for i in range(bisect_right(ends, start), len(cuts)):
            cut_start, cut_end = cuts[i]
            if cut_start >= end:
                break
            if cut_start > start:
                rest.append((start, cut_start))
            start = max(start, cut_end)
        if start < end:
            rest.append((start, end))
    return rest


def _waits(gaps: Sequence[Interval], communications: Sequence[Span]) -> tuple[list[Interval], list[Span]]:
    """Return the wait for each communication, and the communications, each ending with its wait."""
    starts = [start for start, _ in gaps]
    waits: list[Interval] = []
    ended: list[Span] = []
    for name, begun, over in communications:
        best = (over, over)
        for i in range(bisect_right(starts, over) - 1, -1, -1):
            start, end = gaps[i]
            if end < over - LATE_S:
                break
            wait = max(start, begun), min(end, over)
            # A pause has another reason if it is shorter than the time between it and the end.
            if wait[1] - wait[0] > max(best[1] - best[0], over - wait[1]):
                best = wait
        if best[0] < best[1]:
            waits.append(best)
        ended.append((name, begun, best[1]))
    return waits, ended


def _parts(marks: Sequence[TraceEvent], calls: Sequence[TraceEvent]) -> Iterator[Span]:
    """Yield the marks in steps, with a pipeline split into forward and backward passes at their starts."""
    backward = merged((e.start_s, e.end_s) for e in calls if e.name.startswith(_BACKWARD))
    forward = without(merged((e.start_s, e.end_s) for e in calls if e.name.startswith(_OPERATIONS)), backward)
    labelled = sorted([*(("forward", *f) for f in forward), *(("backward", *b) for b in backward)], key=lambda s: s[1])
    for mark in marks:
        name = mark.name.removeprefix(MARK)
        if name == STEP:
            continue
        if name != PIPELINE:
            yield name, mark.start_s, mark.end_s
            continue
        inside = [span for span in labelled if mark.start_s <= span[1] < mark.end_s]
        begun = [(PIPELINE, mark.start_s), *((label, start) for label, start, _ in inside), ("", mark.end_s)]
        for (label, start), (_, end) in pairwise(begun):
            if label != PIPELINE and start < end:
                yield label, start, end


def _on_device(events: Sequence[TraceEvent], marks: Sequence[Span]) -> tuple[list[Span], list[Interval]]:
    """Return the parts of the steps on the accelerator, and the intervals in which it computes."""
    launched = {e.correlation: e.start_s for e in events if not e.on_device and e.name.startswith("cu")}
    starts = [start for _, start, _ in marks]
    kernels = sorted((e for e in events if e.on_device and not _is_nccl_kernel(e)), key=lambda e: e.start_s)
    parts: list[Span] = []
    free_s = float("-inf")
    for kernel in kernels:
        launch_s = launched.get(kernel.correlation, kernel.start_s)
        label, _, end_s = marks[i] if (i := bisect_right(starts, launch_s) - 1) >= 0 else ("", 0.0, launch_s)
        start = max(kernel.start_s, free_s)
        if launch_s < end_s and start < kernel.end_s:
            parts.append((label, start, kernel.end_s))
        free_s = max(free_s, kernel.end_s)
    busy = merged((e.start_s, e.end_s) for e in kernels)
    # While the host fetches data, an idle accelerator waits for it.
    fetching = merged((start, end) for name, start, end in marks if name == DATA)
    return [*parts, *((DATA, *idle) for idle in without(fetching, busy))], busy


def _is_nccl_kernel(event: TraceEvent) -> bool:
    return event.on_device and event.name.startswith("nccl")
