"""Spans of a rank from a profiler's events; a wait is recognised by its end."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.train.spans import TraceEvent, merged, spans_of, without


def mark(name, start, end):
    return TraceEvent(f"raypar:{name}", start, end, thread=1)


def op(start, end, name="aten::mm", thread=1):
    return TraceEvent(name, start, end, thread=thread)


def gloo(start, end, name="all_reduce"):
    return TraceEvent(f"gloo:{name}", start, end, thread=2, is_async=True)


def kernel(start, end, launched_by, name="gemm"):
    return TraceEvent(name, start, end, thread=7, on_device=True, correlation=launched_by)


def launch(at, correlation):
    return TraceEvent("cudaLaunchKernel", at, at + 1e-6, thread=1, correlation=correlation)


def named(spans, name):
    return [(start, end) for label, start, end in spans if label == name]


STEP = mark("step", 0.0, 1.0)
AROUND = op(0.0, 1.0, "autograd::engine::evaluate_function: AddmmBackward0")
CALL = op(0.4, 0.7, "_c10d_functional::wait_tensor")
PAUSE = op(0.0, 0.5), op(0.8, 1.0)
WAITS = {
    "a pause that ends with a collective": ([*PAUSE, gloo(0.3, 0.8)], [(0.5, 0.8)], [(0.3, 0.8)]),
    "a pause of another reason": ([*PAUSE, gloo(0.1, 0.3)], [], [(0.1, 0.3)]),
    "a collective that begins in the pause": ([*PAUSE, gloo(0.6, 0.8)], [(0.6, 0.8)], [(0.6, 0.8)]),
    "an end that is recorded late": ([*PAUSE, gloo(0.3, 0.804)], [(0.5, 0.8)], [(0.3, 0.8)]),
    "a short pause long before the end": ([op(0.0, 0.5), gloo(0.3, 0.806), op(0.501, 1.0)], [], [(0.3, 0.806)]),
    "work of another thread": ([*PAUSE, op(0.5, 0.8, thread=2), gloo(0.3, 0.8)], [(0.5, 0.8)], [(0.3, 0.8)]),
    "an event that only encloses operations": ([*PAUSE, AROUND, gloo(0.3, 0.8)], [(0.5, 0.8)], [(0.3, 0.8)]),
    "a call that communicates, with all in it": ([op(0.0, 0.4), CALL, op(0.5, 0.6), op(0.7, 1.0)], [(0.4, 0.7)], []),
}


@pytest.mark.parametrize("case", WAITS)
def test_a_wait_is_a_pause_that_ends_with_a_collective_of_the_rank(case):
    events, waits, collectives = WAITS[case]
    spans = spans_of([STEP, *events], on_gpu=False)
    assert named(spans, "wait") == waits
    assert named(spans, "gloo:all_reduce") == collectives


def test_a_barrier_before_the_first_step_is_left_out_and_without_marks_there_are_no_spans():
    assert spans_of([op(0.0, 1.0), gloo(0.0, 1.0)], on_gpu=False) == []
    spans = spans_of([gloo(-0.1, 0.2, "barrier"), STEP, op(0.3, 1.0)], on_gpu=False)
    assert [name for name, _, _ in spans] == ["step"]


def test_a_pipeline_is_split_by_what_was_begun_last():
    backward = op(0.5, 0.6, "autograd::engine::evaluate_function: AddmmBackward0")
    events = [STEP, mark("pipeline", 0.0, 1.0), op(0.1, 0.2), op(0.3, 0.4), backward, op(0.5, 0.6), op(0.8, 0.9)]
    spans = spans_of(events, on_gpu=False)
    assert sum(b - a for a, b in named(spans, "forward")) == pytest.approx(0.4 + 0.2)  # 0.1 to 0.5, 0.8 to 1.0
    assert named(spans, "backward") == [(0.5, 0.8)]
    assert named(spans, "pipeline") == []


def test_a_kernel_belongs_to_the_part_that_launched_it():
    events = [
        *(STEP, mark("forward", 0.0, 0.1), mark("backward", 0.1, 0.2), launch(0.05, 1), launch(0.15, 2)),
        *(kernel(0.2, 0.5, 1), kernel(0.5, 0.9, 2)),
    ]
    spans = spans_of(events, on_gpu=True)
    assert named(spans, "forward") == [(0.2, 0.5)]
    assert named(spans, "backward") == [(0.5, 0.9)]


def test_nccl_kernels_are_communication_and_waited_for_where_nothing_else_runs():
    events = [
        *(STEP, mark("backward", 0.0, 0.2), launch(0.1, 1), launch(0.15, 2), kernel(0.1, 0.6, 1)),
        kernel(0.4, 0.8, 2, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"),
    ]
    spans = spans_of(events, on_gpu=True)
    assert named(spans, "ncclDevKernel_AllReduce_Sum_f32_RING_LL") == [(0.4, 0.8)]
    assert named(spans, "wait") == [(pytest.approx(0.6), 0.8)]
    assert named(spans, "backward") == [(0.1, 0.6)]


def test_an_idle_gpu_waits_for_data_only_while_the_host_fetches():
    events = [STEP, mark("data", 0.0, 0.4), mark("forward", 0.4, 0.5), launch(0.45, 1), kernel(0.6, 0.9, 1)]
    spans = spans_of(events, on_gpu=True)
    assert named(spans, "data") == [(0.0, 0.4)]
    assert named(spans, "forward") == [(0.6, 0.9)]


INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)).map(lambda t: (t[0], t[0] + t[1])), max_size=12)


def points(intervals):
    return {at for start, end in intervals for at in range(int(start), int(end))}


@given(INTERVALS)
def test_merged_intervals_cover_the_same_and_do_not_touch(intervals):
    union = merged(intervals)
    assert points(union) == points(intervals)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(union))


@given(INTERVALS, INTERVALS)
def test_cuts_are_removed_and_the_rest_is_left(intervals, cuts):
    assert points(without(merged(intervals), merged(cuts))) == points(intervals) - points(cuts)
