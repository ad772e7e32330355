"""Spans of a rank from a profiler's events; a wait is recognised by its end."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.measure.profile import _trace_events
from raypar.measure.spans import TraceEvent, merged, spans_of, without


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


STEP = mark("step", 0.0, 1.0)
BACKWARD = "autograd::engine::evaluate_function: AddmmBackward0"
CALL = op(0.0, 0.4), op(0.4, 0.7, "_c10d_functional::wait_tensor"), op(0.5, 0.6), op(0.7, 1.0)
SHORT = op(0.0, 0.5), gloo(0.3, 0.806), op(0.501, 1.0)
PAUSE = op(0.0, 0.5), op(0.8, 1.0)
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
PIPELINE = mark("pipeline", 0.0, 1.0), op(0.1, 0.2), op(0.3, 0.4), op(0.5, 0.6, BACKWARD), op(0.5, 0.6), op(0.8, 0.9)
SPLIT = {"forward": [(0.1, 0.5), (0.8, 1.0)], "backward": [(0.5, 0.8)], "pipeline": []}
PARTS = mark("forward", 0.0, 0.1), mark("backward", 0.1, 0.2), launch(0.05, 1), launch(0.15, 2)
LAUNCHED = *PARTS, kernel(0.2, 0.5, 1), kernel(0.5, 0.9, 2)
OVERLAP = mark("backward", 0.0, 0.2), launch(0.1, 1), launch(0.15, 2), kernel(0.1, 0.6, 1)
OVERLAP += (kernel(0.4, 0.8, 2, f"{NCCL}(ncclDevKernelArgs)"),)
FETCH = mark("data", 0.0, 0.4), mark("forward", 0.4, 0.5), launch(0.45, 1), kernel(0.6, 0.9, 1)


def waits(*waits, ends):
    return {"wait": list(waits), "gloo:all_reduce": ends}


# The events of one step, and the spans in it.
ON_CPU = {
    "a pause that ends with a collective": ([*PAUSE, gloo(0.3, 0.8)], waits((0.5, 0.8), ends=[(0.3, 0.8)])),
    "a pause of another reason": ([*PAUSE, gloo(0.1, 0.3)], waits(ends=[(0.1, 0.3)])),
    "a collective that begins in the pause": ([*PAUSE, gloo(0.6, 0.8)], waits((0.6, 0.8), ends=[(0.6, 0.8)])),
    "an end that is recorded late": ([*PAUSE, gloo(0.3, 0.804)], waits((0.5, 0.8), ends=[(0.3, 0.8)])),
    "a short pause long before the end": (SHORT, waits(ends=[(0.3, 0.806)])),
    "work of another thread": ([*PAUSE, op(0.5, 0.8, thread=2), gloo(0.3, 0.8)], waits((0.5, 0.8), ends=[(0.3, 0.8)])),
    "an event that only encloses": ([*PAUSE, op(0, 1, BACKWARD), gloo(0.3, 0.8)], waits((0.5, 0.8), ends=[(0.3, 0.8)])),
    "a call that communicates, with all in it": (CALL, waits((0.4, 0.7), ends=[])),
    "a barrier before the first step": ([gloo(-0.1, 0.2, "barrier"), op(0.0, 1.0)], {"gloo:barrier": [], "wait": []}),
    "a pipeline is split by what was begun last": (PIPELINE, SPLIT),
}
ON_GPU = {
    "a kernel is its launcher's": (LAUNCHED, {"forward": [(0.2, 0.5)], "backward": [(0.5, 0.9)]}),
    "NCCL is waited for": (OVERLAP, {NCCL: [(0.4, 0.8)], "wait": [(0.6, 0.8)], "backward": [(0.1, 0.6)]}),
    "an idle GPU waits for data while the host fetches": (FETCH, {"data": [(0.0, 0.4)], "forward": [(0.6, 0.9)]}),
}


@pytest.mark.parametrize("case", [*ON_CPU, *ON_GPU])
def test_a_steps_spans(case):
    events, expected = (ON_CPU | ON_GPU)[case]
    spans = spans_of([STEP, *events], on_gpu=case in ON_GPU)
    intervals = {
        name: merged((round(a, 6), round(b, 6)) for label, a, b in spans if label == name) for name in expected
    }
    assert intervals == expected
    assert spans_of(PAUSE, on_gpu=False) == []  # without marks


INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)).map(lambda t: (t[0], t[0] + t[1])), max_size=12)


def points(intervals):
    return {at for start, end in intervals for at in range(int(start), int(end))}


@given(INTERVALS, INTERVALS)
def test_merged_intervals_cover_the_same_and_do_not_touch_and_cuts_are_removed(intervals, cuts):
    union = merged(intervals)
    assert points(union) == points(intervals) and all(a[1] < b[0] for a, b in itertools.pairwise(union))
    assert points(without(union, merged(cuts))) == points(intervals) - points(cuts)


def test_annotations_on_the_device_are_left_out():
    """They cover the kernels of what they annotate, such as `Optimizer.step#SGD.step`."""

    def event(name, start_us, *, device=1, is_annotation=False):
        return SimpleNamespace(
            name=name,
            time_range=SimpleNamespace(start=start_us, end=start_us + 1.0),
            thread=1,
            is_async=False,
            device_type=SimpleNamespace(value=device),
            is_user_annotation=is_annotation,
            id=0,
        )

    mark = event("raypar:optimizer", 2.0, device=0, is_annotation=True)
    on_device = event("Optimizer.step#SGD.step", 3.0, is_annotation=True), event("multi_tensor_apply_kernel", 3.0)
    kept = _trace_events([event("raypar:clock", 1.0, device=0), mark, *on_device], [0.0])
    assert [each.name for each in kept] == ["raypar:optimizer", "multi_tensor_apply_kernel"]
