"""Where a step's time goes on a rank: some more steps under torch's profiler, after all that is timed.

The profiler slows down what it looks at. So the same steps are run without it as well, before and after, and what it
costs is told with what it shows.
"""

from __future__ import annotations

import contextlib
import copy
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from raypar.parallel.strategy import Batch, DistContext, Span, no_span
from raypar.train.flops import count_work, peak_flops
from raypar.train.precision import Numerics
from raypar.train.spans import DATA, MARK, STEP, TraceEvent, spans_of
from raypar.train.step import Stepper

# What is done once (an optimizer's state, the profiler's own buffers) is done before what counts.
NUM_SETTLING = 3
NUM_TRACED = 5
NUM_CLOCK_LOOKS = 5
_CLOCK = MARK + "clock"


class ProfiledPass:
    """The steps of one rank; every rank makes the same calls.

    Args:
        new_stepper: a stepper whose parts are marked with this span.
        batches: enough of them for every step.
    """

    def __init__(
        self, new_stepper: Callable[[Span], Stepper], batches: Iterator[Batch], context: DistContext, module: nn.Module
    ) -> None:
        self._new_stepper, self._batches, self._context = new_stepper, batches, context
        self._module = module
        self._offset_s, self._shares_clock = _clock_offset_s(context)

    def run(self, num_steps: int) -> dict[str, Any]:
        """What the rank did in so many steps, and how long as many take without the profiler.

        Spans are on rank 0's clock, where ranks are on several machines as well as the end of a barrier tells.
        """
        self._module.train()
        marked, plain = self._new_stepper(self._mark), self._new_stepper(no_span)
        self._steps(plain, NUM_SETTLING, no_span)
        before = self._steps(plain, -(-num_steps // 2), no_span)
        with self._profiler() as profiler:
            anchors_s = [_look_at_clock() for _ in range(NUM_CLOCK_LOOKS)]
            self._steps(marked, NUM_SETTLING, _unmarked)
            profiled = self._steps(marked, num_steps, self._mark)
        after = self._steps(plain, num_steps // 2, no_span)
        events = list(profiler.events() or ())
        spans = spans_of(_trace_events(events, anchors_s), on_gpu=self._context.device.type == "cuda")
        return {
            "spans": [[name, start - self._offset_s, end - self._offset_s] for name, start, end in spans],
            "step_times_s": [*before, *after],
            "profiled_step_times_s": profiled,
            "shares_clock": self._shares_clock,
        }

    def trace(self, path: Path) -> None:
        """Leave a trace of a few steps there, for Chrome or Perfetto; gzipped if the path says so."""
        stepper = self._new_stepper(self._mark)
        with self._profiler() as profiler:
            self._steps(stepper, NUM_TRACED, self._mark)
        profiler.export_chrome_trace(str(path))

    def _steps(self, stepper: Stepper, num_steps: int, span: Span) -> list[float]:
        """Seconds that each step takes, the fetching of its batch included."""
        self._context.barrier()
        times_s: list[float] = []
        for _ in range(num_steps):
            start_s = time.perf_counter()
            with span(STEP):
                with span(DATA):
                    batch = next(self._batches)
                stepper.step(batch)
                self._wait_for_device()
            times_s.append(time.perf_counter() - start_s)
        return times_s

    def _profiler(self) -> torch_profile:
        on_gpu = self._context.device.type == "cuda"
        return torch_profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])

    def _mark(self, name: str) -> contextlib.AbstractContextManager[object]:
        return self._synchronised(name) if self._context.device.type == "mps" else record_function(MARK + name)

    @contextlib.contextmanager
    def _synchronised(self, name: str) -> Iterator[None]:
        """The profiler does not look into Apple's GPUs: the host waits for them at the end of each part."""
        with record_function(MARK + name):
            yield
            torch.mps.synchronize()

    def _wait_for_device(self) -> None:
        """So that a step ends where it ends, and no other one's work is in it."""
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
        elif self._context.device.type == "mps":
            torch.mps.synchronize()


def profile(
    steps: ProfiledPass,
    num_steps: int,
    folder: Path | None,
    context: DistContext,
    numerics: Numerics,
    num_threads: int,
    whole: nn.Module,
    sample: Tensor,
) -> dict[str, Any]:
    """A rank's part of a profile, as JSON has it; rank 0 leaves every rank's trace in the folder.

    Args:
        num_threads: of the rank.
        whole: the complete model; it is copied.
        sample: two samples as the model takes them.

    Returns:
        What `ProfiledPass.run` returns, with ``peak_flops``, the FLOP/s of matrix products that this rank reaches while
        the others try as well, and of rank 0 ``flop_per_sample``, forward and backward (None: can't be counted).
    """
    found = steps.run(num_steps)
    if folder is not None:
        _leave_traces(steps, folder, context)
    context.barrier()
    dtype = numerics.mixed or numerics.dtype
    found["peak_flops"] = peak_flops(context.device, dtype, num_threads)
    if context.rank == 0:
        found["flop_per_sample"] = _flop_per_sample(whole, sample)
    return found


def _leave_traces(steps: ProfiledPass, folder: Path, context: DistContext) -> None:
    """Rank 0 takes the others' as well: their disks may be elsewhere."""
    import tempfile

    with tempfile.TemporaryDirectory() as own:
        path = Path(own) / "trace.json.gz"
        steps.trace(path)
        traces: list[Any] = [path.read_bytes()]
    if context.world_size > 1:
        own_trace = traces[0]
        traces = [None] * context.world_size
        dist.gather_object(own_trace, traces if context.rank == 0 else None)
    if context.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, trace in enumerate(traces):
            (folder / f"rank{rank}.trace.json.gz").write_bytes(trace)


def _flop_per_sample(whole: nn.Module, sample: Tensor) -> int | None:
    model = copy.deepcopy(whole)
    model.zero_grad()
    try:
        return count_work(model, sample).flop
    except Exception:  # whatever a network may raise; the profile is worth having without it
        return None


def _clock_offset_s(context: DistContext) -> tuple[float, bool]:
    """What to take off this rank's clock to have rank 0's, and whether they are the same one.

    Ranks on one machine have one monotonic clock. Else it is read at the end of barriers, which the ranks leave within
    about a network latency of each other.
    """
    if context.world_size == 1:
        return time.perf_counter(), True
    hosts: list[Any] = [None] * context.world_size
    dist.all_gather_object(hosts, socket.gethostname())
    looks: list[list[float]] = []
    for _ in range(NUM_CLOCK_LOOKS):
        context.barrier()
        looks.append([time.perf_counter()])
    every: list[Any] = [None] * context.world_size
    dist.all_gather_object(every, [look[0] for look in looks])
    start_s: float = every[0][0]
    if len(set(hosts)) == 1:
        return start_s, True
    own: list[float] = every[context.rank]
    return start_s + statistics.median(mine - first for mine, first in zip(own, every[0], strict=True)), False


def _look_at_clock() -> float:
    now_s = time.perf_counter()
    with record_function(_CLOCK):
        return now_s


def _unmarked(_: str) -> contextlib.AbstractContextManager[object]:
    return record_function("settling")


def _trace_events(events: list[FunctionEvent], anchors_s: list[float]) -> list[TraceEvent]:
    """The profiler's events on `time.perf_counter`'s clock."""
    looks_us = sorted(e.time_range.start for e in events if e.name == _CLOCK and not _is_on_device(e))
    # An anchor was read before its event began: the latest is the closest.
    zero_s = max(anchor_s - at_us / 1e6 for anchor_s, at_us in zip(anchors_s, looks_us, strict=False))
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
        if e.name != _CLOCK and e.time_range.start >= settled_us
    ]


def _is_on_device(event: FunctionEvent) -> bool:
    return bool(event.device_type.value)  # 0: the CPU
