"""Allocations of torch on the CPU within a block, from its profilers."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch._C import _autograd, _profiler

NOT_STARTED = (AttributeError, TypeError, ValueError, OSError, RuntimeError)  # runs already, or has another interface
COUNTS_ALWAYS = "FLAGS_caffe2_report_cpu_memory_usage"  # torch counts in threads that it doesn't profile, too


@contextlib.contextmanager
def allocations(*, of_all_threads: bool) -> Iterator[list[int] | None]:
    """Yield a list that holds, after the block, the bytes that torch allocated or freed (negative), in order.

    Args:
        of_all_threads: count what threads outside Python free, such as those of gloo after a collective. It costs
            more, and leaves a sleeping thread in the process.

    Yields:
        The list, empty until the end; None if allocations can't be recorded.
    """
    start = _kineto if of_all_threads else _legacy_profiler
    try:
        end = start()
    except NOT_STARTED:
        yield None
        return
    changes: list[int] = []
    collects = gc.isenabled()
    gc.disable()  # it would free memory that was allocated before, and not counted
    try:
        yield changes
    finally:
        if collects:
            gc.enable()
        changes.extend(end())


def _legacy_profiler() -> Callable[[], Sequence[int]]:
    _autograd._enable_profiler_legacy(_settings(_profiler.ProfilerState.CPU))

    def end() -> Sequence[int]:
        threads: Any = _autograd._disable_profiler_legacy()  # the events of each thread, in order
        first = next(event for events in threads for event in events)
        events = [event for events in threads for event in events if event.kind() == "memory_alloc"]
        events.sort(key=first.cpu_elapsed_us)
        return [event.cpu_memory_usage() for event in events]

    return end


def _kineto() -> Callable[[], Sequence[int]]:
    counts_always = ctypes.c_bool.in_dll(ctypes.CDLL(torch._C.__file__), COUNTS_ALWAYS)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # it would print each start, and that it has no GPU
    settings = _settings(_profiler.ProfilerState.KINETO), {_profiler.ProfilerActivity.CPU}
    _autograd._prepare_profiler(*settings)
    _autograd._enable_profiler(*settings)
    counts_always.value = True

    def end() -> Sequence[int]:
        events, seen = list(_autograd._disable_profiler().experimental_event_tree()), []
        counts_always.value = False
        while events:
            event = events.pop()
            events.extend(event.children)
            if event.tag == _profiler._EventType.Allocation:
                fields: Any = event.extra_fields
                seen.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
        seen.sort()
        totals = [total for _, total, _ in seen]
        return [num_bytes for *_, num_bytes in seen[:1]] + [later - earlier for earlier, later in pairwise(totals)]

    return end


def _settings(state: _profiler.ProfilerState) -> _profiler.ProfilerConfig:
    return _profiler.ProfilerConfig(state, False, True, False, False, False, _profiler._ExperimentalConfig())
