"""From a profiler's events to spans: what a rank waits for, found by its end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.train.spans import Interval, Span, TraceEvent, merged, spans_of, without


def mark(name: str, start: float, end: float) -> TraceEvent:
    return TraceEvent(f"raypar:{name}", start, end, thread=1)


def op(start: float, end: float, name: str = "aten::mm", thread: int = 1) -> TraceEvent:
    return TraceEvent(name, start, end, thread=thread)


def gloo(start: float, end: float, name: str = "all_reduce") -> TraceEvent:
    return TraceEvent(f"gloo:{name}", start, end, thread=2, is_async=True)


def kernel(start: float, end: float, launched_by: int, name: str = "gemm") -> TraceEvent:
    return TraceEvent(name, start, end, thread=7, on_device=True, correlation=launched_by)


def launch(at: float, correlation: int) -> TraceEvent:
    return TraceEvent("cudaLaunchKernel", at, at + 1e-6, thread=1, correlation=correlation)


def named(spans: list[Span], name: str) -> list[Interval]:
    return [(start, end) for own, start, end in spans if own == name]


STEP = mark("step", 0.0, 1.0)


def test_a_pause_that_ends_with_a_collective_is_a_wait_for_it() -> None:
    spans = spans_of([STEP, op(0.0, 0.5), gloo(0.3, 0.8), op(0.8, 1.0)], on_gpu=False)
    assert named(spans, "wait") == [(0.5, 0.8)]
    assert named(spans, "gloo:all_reduce") == [(0.3, 0.8)]


def test_a_pause_of_the_ranks_own_is_no_wait() -> None:
    spans = spans_of([STEP, op(0.0, 0.5), gloo(0.1, 0.3), op(0.8, 1.0)], on_gpu=False)
    assert named(spans, "wait") == []


def test_a_wait_begins_with_its_collective() -> None:
    spans = spans_of([STEP, op(0.0, 0.2), gloo(0.4, 0.8), op(0.8, 1.0)], on_gpu=False)
    assert named(spans, "wait") == [(0.4, 0.8)]


def test_a_collective_whose_end_is_told_late_ended_when_the_rank_went_on() -> None:
    spans = spans_of([STEP, op(0.0, 0.5), gloo(0.3, 0.804), op(0.8, 1.0)], on_gpu=False)
    assert named(spans, "wait") == [(0.5, 0.8)]
    assert named(spans, "gloo:all_reduce") == [(0.3, 0.8)]


def test_a_short_pause_some_time_before_a_collective_ends_is_no_wait_for_it() -> None:
    spans = spans_of([STEP, op(0.0, 0.5), gloo(0.3, 0.806), op(0.501, 1.0)], on_gpu=False)
    assert named(spans, "wait") == []
    assert named(spans, "gloo:all_reduce") == [(0.3, 0.806)]


def test_what_other_threads_do_is_not_the_ranks_work() -> None:
    spans = spans_of([STEP, op(0.0, 0.5), op(0.5, 0.8, thread=2), gloo(0.3, 0.8), op(0.8, 1.0)], on_gpu=False)
    assert named(spans, "wait") == [(0.5, 0.8)]


def test_what_only_encloses_operations_is_no_work() -> None:
    around = op(0.0, 1.0, "autograd::engine::evaluate_function: AddmmBackward0")
    spans = spans_of([STEP, around, op(0.0, 0.5), gloo(0.3, 0.8), op(0.8, 1.0)], on_gpu=False)
    assert named(spans, "wait") == [(0.5, 0.8)]


def test_a_call_that_communicates_is_waited_for_with_all_that_is_in_it() -> None:
    call = op(0.4, 0.7, "_c10d_functional::wait_tensor")
    spans = spans_of([STEP, op(0.0, 0.4), call, op(0.5, 0.6), op(0.7, 1.0)], on_gpu=False)
    assert named(spans, "wait") == [(0.4, 0.7)]


def test_a_barrier_before_the_first_step_is_left_out() -> None:
    spans = spans_of([gloo(-0.1, 0.2, "barrier"), STEP, op(0.3, 1.0)], on_gpu=False)
    assert [name for name, _, _ in spans] == ["step"]


def test_a_pipeline_is_split_by_what_was_begun_last() -> None:
    backward = op(0.5, 0.6, "autograd::engine::evaluate_function: AddmmBackward0")
    events = [STEP, mark("pipeline", 0.0, 1.0), op(0.1, 0.2), op(0.3, 0.4), backward, op(0.5, 0.6), op(0.8, 0.9)]
    spans = spans_of(events, on_gpu=False)
    assert sum(b - a for a, b in named(spans, "forward")) == pytest.approx(0.4 + 0.2)  # 0.1 to 0.5, 0.8 to 1.0
    assert named(spans, "backward") == [(0.5, 0.8)]
    assert named(spans, "pipeline") == []


def test_without_marks_there_are_no_spans() -> None:
    assert spans_of([op(0.0, 1.0), gloo(0.0, 1.0)], on_gpu=False) == []


def test_a_kernel_belongs_to_the_part_that_launched_it() -> None:
    events = [
        *(STEP, mark("forward", 0.0, 0.1), mark("backward", 0.1, 0.2), launch(0.05, 1), launch(0.15, 2)),
        *(kernel(0.2, 0.5, 1), kernel(0.5, 0.9, 2)),
    ]
    spans = spans_of(events, on_gpu=True)
    assert named(spans, "forward") == [(0.2, 0.5)]
    assert named(spans, "backward") == [(0.5, 0.9)]


def test_nccl_kernels_are_communication_and_waited_for_where_nothing_else_runs() -> None:
    events = [
        *(STEP, mark("backward", 0.0, 0.2), launch(0.1, 1), launch(0.15, 2), kernel(0.1, 0.6, 1)),
        kernel(0.4, 0.8, 2, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"),
    ]
    spans = spans_of(events, on_gpu=True)
    assert named(spans, "ncclDevKernel_AllReduce_Sum_f32_RING_LL") == [(0.4, 0.8)]
    assert named(spans, "wait") == [(pytest.approx(0.6), 0.8)]
    assert named(spans, "backward") == [(0.1, 0.6)]


def test_an_idle_gpu_waits_for_data_only_while_the_host_fetches() -> None:
    events = [STEP, mark("data", 0.0, 0.4), mark("forward", 0.4, 0.5), launch(0.45, 1), kernel(0.6, 0.9, 1)]
    spans = spans_of(events, on_gpu=True)
    assert named(spans, "data") == [(0.0, 0.4)]
    assert named(spans, "forward") == [(0.6, 0.9)]


INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)).map(lambda t: (t[0], t[0] + t[1])), max_size=12)


def points(intervals: list[Interval]) -> set[int]:
    return {at for start, end in intervals for at in range(int(start), int(end))}


@given(INTERVALS)
def test_merged_intervals_cover_the_same_and_do_not_touch(intervals: list[Interval]) -> None:
    found = merged(intervals)
    assert points(found) == points(intervals)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


@given(INTERVALS, INTERVALS)
def test_what_is_cut_out_is_gone_and_the_rest_is_left(whole: list[Interval], cuts: list[Interval]) -> None:
    assert points(without(merged(whole), merged(cuts))) == points(whole) - points(cuts)
