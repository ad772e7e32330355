"""Times on a GPU: events in its stream, which are read later, without waiting for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from .events import EventKind, EventRecorder, clock

_MAX_WAIT_S = 1.0  # for the GPU to reach the last mark, when the script ends


class DeviceClock:
    """Clock of a GPU, once the script trains on one.

    The host runs ahead of a GPU. `mark` puts an event into the GPU's stream. The event's time is that at which the GPU
    reaches it. One wait at the beginning relates the two clocks.
    """

    def __init__(self, cuda: Any, recorder: EventRecorder) -> None:
        self._cuda, self._recorder = cuda, recorder
        self._anchor: Any = None
        self._anchor_s = 0.0
        self._marks: deque[tuple[float, Any]] = deque()
        self._free: list[Any] = []  # events that have been read
        recorder.at_optimizer.append(self._begin)
        recorder.at_write.append(self._read)
        recorder.at_close.append(self._finish)

    def _begin(self) -> None:
        if self._anchor is not None or not self._cuda.is_initialized() or self._cuda.is_current_stream_capturing():
            return
        anchor = self._cuda.Event(enable_timing=True)
        anchor.record()
        anchor.synchronize()
        self._anchor_s, self._anchor = clock(), anchor
        self._recorder.at_moment = self.mark

    def mark(self, moment_s: float) -> None:
        """Mark a moment of the host in the GPU's stream."""
        try:
            if self._cuda.is_current_stream_capturing():
                return  # a CUDA graph would replay the event
            event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((moment_s, event))
        except Exception as error:
            self._recorder.problem("GPU", error)

    def _read(self) -> None:
        """Record the times of the marks that the GPU has passed."""
        if self._anchor is None or self._cuda.is_current_stream_capturing():
            return  # a query would break the CUDA graph
        last: tuple[float, Any] | None = None
        while self._marks and self._marks[0][1].query():
            moment_s, event = self._marks.popleft()
            at_s = self._anchor_s + self._anchor.elapsed_time(event) / 1e3
            if at_s < moment_s:  # the clocks drift: the GPU can't be ahead of the host
                self._anchor_s += moment_s - at_s
                at_s = moment_s
            self._recorder.append((EventKind.DEVICE, moment_s, at_s, 0.0, 0.0, 0.0))
            if last is not None:
                self._free.append(last[1])
            last = at_s, event
        if last is not None:  # elapsed times have 24 bits, so they must not become long
            self._free.append(self._anchor)
            self._anchor_s, self._anchor = last

    def _finish(self) -> None:
        """Give the GPU some time to reach the last mark; a GPU that hangs must not delay the end of the script."""
        until_s = clock() + _MAX_WAIT_S
        while self._marks and not self._marks[-1][1].query() and clock() < until_s:
            time.sleep(0.001)


def _hook_torch(torch: Any, recorder: EventRecorder) -> None:
    """Once the script trains on a GPU, time it, and count the copies to it that block and the values read from it."""
    DeviceClock(torch.cuda, recorder)
    is_counting: list[bool] = []

    def begin() -> None:
        if torch.cuda.is_initialized() and not is_counting:
            is_counting.append(True)
            _hook_reads(torch, recorder)
            _hook_copies(torch, recorder)

    recorder.at_optimizer.append(begin)


def _hook_reads(torch: Any, recorder: EventRecorder) -> None:
    tensor, is_compiling = torch.Tensor, torch.compiler.is_compiling

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling() and self.is_cuda and recorder.counts_reads:
                recorder.num_reads += 1
            return original(self, *args, **kwargs)

        return read

    for name in ("item", "tolist", "__float__", "__bool__"):
        setattr(tensor, name, counted(getattr(tensor, name)))


def _hook_copies(torch: Any, recorder: EventRecorder) -> None:
    tensor, is_compiling = torch.Tensor, torch.compiler.is_compiling
    num_copies = [0]

    def counted(original: Callable[..., Any], *, is_cuda: bool) -> Callable[..., Any]:
        @wraps(original)
        def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_copied = self.ndim and not self.is_cuda and (is_cuda or any(map(_is_gpu, (*args, *kwargs.values()))))
            if is_compiling() or not is_copied:
                return original(self, *args, **kwargs)
            start = clock()
            recorder.at_moment(start)
            result = original(self, *args, **kwargs)
            end = clock()
            recorder.at_moment(end)
            is_asynchronous = kwargs.get("non_blocking", any(each is True for each in args))
            num_copies[0] += not (is_asynchronous and self.is_pinned())
            recorder.append((EventKind.COPY, start, end, 0.0, 0.0, 0.0))
            return result

        return copy

    def count() -> None:
        if recorder.num_reads or num_copies[0]:
            end_s = recorder.last_step_s
            recorder.append((EventKind.COUNTS, end_s, end_s, 0.0, recorder.num_reads, num_copies[0]))
            recorder.num_reads = num_copies[0] = 0

    for name in ("to", "cuda"):
        setattr(tensor, name, counted(getattr(tensor, name), is_cuda=name == "cuda"))
    recorder.at_step.append(count)


def _is_gpu(target: Any) -> bool:
    """Return whether an argument of `Tensor.to` is a GPU, its name or number, or a tensor on it."""
    if type(target) is int:
        return True
    is_name = isinstance(target, str) and target.startswith("cuda")
    return is_name or getattr(target, "type", None) == "cuda" or getattr(target, "is_cuda", False) is True


HOOKS: Mapping[str, Callable[[Any, EventRecorder], None]] = {"torch": _hook_torch}
