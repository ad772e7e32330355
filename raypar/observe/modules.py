"""Hooks for calls of models, evaluation and checkpoints, and facts of the whole process."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from .events import HAS_TORCH, EventKind, EventRecorder, clock
from .quota import cpu_quota, whole_cores

_FORWARD = float(EventKind.FORWARD)  # Enum looks its members up


def _hook_modules(module: Any, recorder: EventRecorder) -> None:
    """Note changes to evaluation, and time the calls of outermost modules.

    Global hooks would slow down every module, and torch.compile would compile them. A module's own hooks would be
    saved with it. So this replaces `__call__` in the classes of modules that no other module contains, once training
    has begun.
    """
    append, evaluate = recorder.append, module.Module.eval
    timed: set[type] = set()
    is_inside = False

    def time_calls(kind: Any) -> None:
        from torch import compiler, is_grad_enabled

        original = kind.__call__

        @wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside or compiler.is_compiling():
                return original(self, *args, **kwargs)
            is_inside = True
            start = clock()
            recorder.at_moment(start)
            try:
                return original(self, *args, **kwargs)
            finally:
                is_inside = False
                append((_FORWARD, start, clock(), 0.0, float(is_grad_enabled()), 0.0))

        kind.__call__ = __call__
        timed.add(kind)

    def time_outermost() -> None:
        modules = [each for each in gc.get_objects() if issubclass(type(each), module.Module)]
        recorder.facts["num_batch_norms"] = _num_batch_norms(modules)
        contained = {id(child) for each in modules for child in each.__dict__.get("_modules", {}).values()}
        outermost = {type(each) for each in modules if id(each) not in contained}
        if _is_compiled() and not any(kind.__name__ == "OptimizedModule" for kind in outermost):
            return  # a compiled function may contain their calls, and would be compiled again
        for kind in outermost - timed:
            try:
                time_calls(kind)
            except Exception as error:
                recorder.problem(kind.__name__, error)

    @wraps(evaluate)
    def eval_(self: Any) -> Any:
        now = clock()
        append((EventKind.EVAL, now, now, 0.0, 0.0, 0.0))
        return evaluate(self)

    module.Module.eval = eval_
    recorder.at_optimizer.append(time_outermost)


def _num_batch_norms(modules: Iterable[Any]) -> int:
    """Return the number of layers that normalise by this rank's samples alone, and not by saved statistics."""
    from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

    layers = [each for each in modules if issubclass(type(each), _BatchNorm)]
    return sum(each.training and not issubclass(type(each), SyncBatchNorm) for each in layers)


def _is_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"].get("ok"))


def _hook_save(name: str) -> Callable[[Any, EventRecorder], None]:
    """Return a hook that times a module's function as the write of a checkpoint."""

    def hook(module: Any, recorder: EventRecorder) -> None:
        original, append = getattr(module, name), recorder.append

        @wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = original(*args, **kwargs)
            append((EventKind.SAVE, start, clock(), 0.0, 0.0, 0.0))
            return result

        setattr(module, name, save)

    return hook


def _note_process(module: Any, recorder: EventRecorder) -> None:
    recorder.mark(HAS_TORCH)
    recorder.write_in_forks()
    rank = os.environ.get("RANK", "")
    if rank.isdecimal():  # until there is a process group
        recorder.facts["rank"] = int(rank)

    def note() -> None:
        facts = recorder.facts
        facts["num_threads"] = module.get_num_threads()
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        facts["num_cores"] = whole_cores(cpu_quota(), num_cores)
        facts["max_rss_bytes"] = _max_rss_bytes(recorder.mapped_bytes)
        if module.cuda.is_initialized():
            facts["device"] = module.cuda.get_device_name()
            # The script may reset these peaks.
            for name, value in (
                ("peak_allocated_bytes", module.cuda.max_memory_allocated()),
                ("peak_reserved_bytes", module.cuda.max_memory_reserved()),
            ):
                facts[name] = max(value, facts.get(name, 0))

    recorder.at_facts.append(note)


def _max_rss_bytes(mapped_bytes: int) -> int:
    """Return the peak resident memory of this process.

    Args:
        mapped_bytes: resident parts of files in the process that this one is a fork of. Most of them are not in the
            fork, and would be in a new process.
    """
    with suppress(OSError), Path("/proc/self/status").open(encoding="ascii", errors="ignore") as status:
        # Unlike getrusage's, this peak is not inherited from the process that started this one.
        sizes = {
            name: int(text.split()[0]) * 1024
            for name, _, text in (line.partition(":") for line in status)
            if "kB" in text
        }
        return sizes.get("VmHWM", 0) + max(0, mapped_bytes - sizes.get("RssFile", 0) - sizes.get("RssShmem", 0))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes where there is no /proc


def _skip_in_dynamo(module: Any, _: EventRecorder) -> None:
    """Let torch.compile leave the hooks alone, apart from those in this module, which compiled models contain."""
    names = ("communication", "device", "events", "loaders", "optimizers", "profiler")
    module.FORCE_SKIP_FILES.update(str(Path(__file__).with_name(f"{name}.py")) for name in names)


HOOKS: Mapping[str, Callable[[Any, EventRecorder], None]] = {
    "torch.nn.modules.module": _hook_modules,
    "torch.serialization": _hook_save("save"),
    "torch.distributed.checkpoint.state_dict_saver": _hook_save("save"),
    "safetensors.torch": _hook_save("save_file"),
    "torch": _note_process,
    "torch._dynamo.trace_rules": _skip_in_dynamo,
}
