"""Hooks for steps, backward passes and losses."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import wraps
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, ref

from .events import EventKind, EventRecorder, clock

_STEP, _BACKWARD = float(EventKind.STEP), float(EventKind.BACKWARD)  # Enum looks its members up
_NAN = float("nan")
_NUM_PARAMETERS = 8  # that a digest reads
_MAX_FACTS = 100  # optimizers that are described
_MAX_SCALED = 8  # losses that wait for their backward passes
_MAX_WAIT_S = 1.0  # for the last values of a device, when the script ends
_OPTIMIZER = "torch.optim.optimizer"


class _Optimizers:
    """Optimizers of a process, numbered by their first steps."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._num_steps: list[int] = []  # of each optimizer
        self._last: Callable[[], Any] = _none  # returns the optimizer of the last step, whose number is known
        self._last_number = 0

    def step(self, recorder: EventRecorder, optimizer: Any, start: float, end: float, *, is_skipped: bool) -> None:
        """Record a step."""
        number = self._last_number if self._last() is optimizer else self._number(recorder, optimizer)
        recorder.append((_STEP, start, end, number, 0.0 if is_skipped else 1.0, 0.0))
        recorder.thread = get_ident()
        recorder.last_step_s = end
        if is_skipped:
            return
        recorder.num_steps += 1
        self._num_steps[number] = num = self._num_steps[number] + 1
        if not num & (num - 1):  # a power of two
            if num == 1 and not number & (number + 1):  # some scripts make an optimizer for every step
                recorder.call(recorder.at_optimizer)
            digest = _digest(optimizer)
            if isinstance(digest, float):
                recorder.append((EventKind.PARAMETERS, end, end, number, digest, 0.0))
            else:
                _device_values.add(EventKind.PARAMETERS, end, number, digest)
        if recorder.at_step:
            recorder.call([*recorder.at_step])
        if end >= recorder.next_write_s:
            recorder.write()

    def _number(self, recorder: EventRecorder, optimizer: Any) -> int:
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = len(self._num_steps)
            self._num_steps.append(0)
            facts = recorder.facts.setdefault("optimizers", [])
            if number < _MAX_FACTS:
                facts.append(
                    {
                        "class": type(optimizer).__name__,
                        "lr": [_rate(g) for g in optimizer.param_groups][:1],
                        "num_parameters": sum(each.numel() for g in optimizer.param_groups for each in g["params"]),
                    }
                )
        self._last, self._last_number = ref(optimizer), number
        return number


def _none() -> None:
    pass


_optimizers = _Optimizers()


def _hook_steps(module: Any, recorder: EventRecorder) -> None:
    """Time the steps of all optimizers, whose classes get torch's hooks when their first object is made.

    Hooks for all optimizers would leave out what torch does before and after them: 0.1 ms.
    """
    hook = module.Optimizer.profile_hook_step

    def with_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
        hooked = hook(step)

        @wraps(hooked)
        def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
            start = clock()
            recorder.at_moment(start)
            closure = args[0] if args else kwargs.get("closure")
            # The first argument of an own optimizer may be something else, such as a factor or a model.
            if callable(closure) and not hasattr(closure, "parameters"):
                closure = _timed_closure(closure, recorder)
                args, kwargs = ((closure, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": closure})
            result = hooked(self, *args, **kwargs)
            end = clock()
            try:
                recorder.at_moment(end)
                _optimizers.step(recorder, self, start, end, is_skipped=False)
            except Exception as error:
                recorder.problem("optimizer", error)
            return result

        return timed

    module.Optimizer.profile_hook_step = staticmethod(wraps(hook)(with_hooks))


def _timed_closure(closure: Callable[[], Any], recorder: EventRecorder) -> Callable[[], Any]:
    @wraps(closure)
    def timed() -> Any:
        start = clock()
        recorder.at_moment(start)
        loss = closure()
        end = clock()
        recorder.at_moment(end)
        recorder.append((EventKind.CLOSURE, start, end, 0.0, 0.0, 0.0))
        return loss

    return timed


def _rate(group: Mapping[str, Any]) -> float | None:
    """Return the learning rate of a group of parameters; None: unknown, or on a device."""
    rate = group.get("lr")
    if getattr(getattr(rate, "device", None), "type", "cpu") != "cpu":
        return None
    return None if rate is None else float(rate)


def _digest(optimizer: Any) -> Any:
    """Return a weighted sum of some parameters, which ranks that train one model have in common.

    It is a number; NaN if it is unknown; or a tensor on the parameters' GPU.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    some = parameters[:: len(parameters) // _NUM_PARAMETERS + 1]
    torch, devices = sys.modules["torch"], {each.device for each in some}
    is_known = len(devices) == 1 and devices.pop().type in ("cpu", "cuda") and not _is_capturing()
    total: Any = 0.0
    for i, each in enumerate(some, 1):
        is_shard = type(each).__name__ not in ("Parameter", "Tensor") or hasattr(each, "_fsdp_flattened")
        if not is_known or is_shard or each.is_complex() or each.layout is not torch.strided:
            return _NAN
        values = each.detach().reshape(-1)
        values = values[:: len(values) // 8 + 1]
        if each.is_cuda:
            total = total + i * (values.double() * torch.arange(1, len(values) + 1, device=each.device)).sum()
        else:
            total += sum(i * k * value for k, value in enumerate(values.tolist(), 1))
    return total


def _is_capturing() -> bool:
    """Return whether a CUDA graph captures what the script does, and nothing else must happen."""
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


class _DeviceValues:
    """Values on a device, which become events once they have been copied, without waiting."""

    def __init__(self) -> None:
        self._pending: list[tuple[EventKind, float, float, Any]] = []
        self._copied: tuple[list[tuple[EventKind, float, float, Any]], Any, Callable[[], bool]] | None = None

    def add(self, kind: EventKind, at_s: float, key: float, value: Any) -> None:
        """Record a tensor with one element as the value of an event."""
        if not _is_capturing():
            # A copy, since the script may reuse the memory.
            self._pending.append((kind, at_s, key, value.detach().clone().reshape(())))

    def write(self, recorder: EventRecorder) -> None:
        """Record the values that have been copied meanwhile, and begin to copy the others."""
        if _is_capturing():
            return
        if self._copied is not None and self._copied[2]():
            values, copy, _ = self._copied
            for (kind, at_s, key, _), value in zip(values, copy.tolist(), strict=True):
                recorder.append((kind, at_s, at_s, key, value, 0.0))
            self._copied = None
        if self._pending and self._copied is None:
            torch = sys.modules["torch"]
            values, self._pending = self._pending, []
            device = values[0][3].device
            is_cuda = device.type == "cuda"
            dtype = torch.float64 if is_cuda else torch.float32
            together = torch.stack([value.to(device, dtype) for *_, value in values])
            copy = torch.empty(together.shape, dtype=dtype, pin_memory=is_cuda)
            copy.copy_(together, non_blocking=True)
            is_done = _always
            if is_cuda:
                event = torch.cuda.Event()
                event.record()
                is_done = event.query
            self._copied = values, copy, is_done

    def finish(self, recorder: EventRecorder) -> None:
        """Record the last values; a device that hangs must not delay the end of the script."""
        until_s = clock() + _MAX_WAIT_S
        while (self._pending or self._copied) and clock() < until_s:
            self.write(recorder)
            time.sleep(0.001)


def _always() -> bool:
    return True


_device_values = _DeviceValues()


class _Losses:
    """Losses of backward passes, and those that a `GradScaler` has scaled."""

    def __init__(self) -> None:
        self._usual: Any = None  # a type of losses whose values can be read at once
        self._scaled: list[tuple[Any, Any]] = []  # weak reference to the scaled loss, and the loss

    def add_scaled(self, scaled: Any, loss: Any) -> None:
        """Note a loss and its scaled value, whose backward pass is to follow."""
        if scaled is not loss:
            self._scaled = [*self._scaled[1 - _MAX_SCALED :], (ref(scaled), loss.detach())]

    def value(self, loss: Any, start: float) -> float:
        """Return the loss of a backward pass; NaN if it has none, or if it is on a device and follows as an event."""
        if type(loss) is self._usual and loss.is_cpu and not self._scaled and loss.numel() == 1:  # in less time
            return float(loss.item())
        if isinstance(loss, (list, tuple)) and len(loss) == 1:
            (loss,) = loss
        if self._scaled:
            unscaled = next((each for each in self._scaled if each[0]() is loss), None)
            if unscaled is None:  # a sum of scaled losses, say
                self._scaled.clear()
                return _NAN
            self._scaled = [each for each in self._scaled if each is not unscaled]
            loss = unscaled[1]
        if getattr(loss, "numel", None) is None or loss.numel() != 1 or type(loss).__name__ == "DTensor":
            return _NAN
        if loss.is_cpu:
            self._usual = type(loss)
            return float(loss.item())
        _device_values.add(EventKind.LOSS, start, 0.0, loss)
        return _NAN


_losses = _Losses()


def _hook_backward(module: Any, recorder: EventRecorder) -> None:
    original, append = module.backward, recorder.append
    is_inside = False

    def write_values() -> None:
        _device_values.write(recorder)

    def finish_values() -> None:
        _device_values.finish(recorder)

    recorder.at_write.append(write_values)
    recorder.at_close.append(finish_values)

    @wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal is_inside
        if is_inside:  # activation checkpoints have backward passes of their own within the step's
            original(tensors, *args, **kwargs)
            return
        is_inside = True
        start = clock()
        recorder.at_moment(start)
        try:
            original(tensors, *args, **kwargs)
        finally:
            is_inside = False
        end = clock()
        try:
            recorder.at_moment(end)
            append((_BACKWARD, start, end, 0.0, _losses.value(tensors, start), 0.0))
            if not recorder.thread:
                recorder.thread = get_ident()
                recorder.call(recorder.at_optimizer)
            if end >= recorder.next_write_s:
                recorder.write()
        except Exception as error:
            recorder.problem("backward pass", error)

    module.backward = backward


def _hook_scaler(module: Any, recorder: EventRecorder) -> None:
    scaler = module.GradScaler
    scale, step = scaler.scale, scaler.step

    @wraps(scale)
    def scaled(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        try:
            if hasattr(result, "detach"):
                _losses.add_scaled(result, outputs)
        except Exception as error:
            recorder.problem("GradScaler", error)
        return result

    @wraps(step)
    def stepped(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        start, num_steps = clock(), recorder.num_steps
        recorder.at_moment(start)
        recorder.counts_reads = False  # the scaler has to look for overflows
        try:
            result = step(self, optimizer, *args, **kwargs)
        finally:
            recorder.counts_reads = True
        end = clock()
        try:
            if recorder.num_steps == num_steps and isinstance(optimizer, sys.modules[_OPTIMIZER].Optimizer):
                recorder.at_moment(end)
                _optimizers.step(recorder, optimizer, start, end, is_skipped=True)
        except Exception as error:
            recorder.problem("GradScaler", error)
        return result

    scaler.scale, scaler.step = scaled, stepped


HOOKS: Mapping[str, Callable[[Any, EventRecorder], None]] = {
    _OPTIMIZER: _hook_steps,
    "torch.autograd": _hook_backward,
    "torch.amp.grad_scaler": _hook_scaler,
}
