"""Settings of a script that are changed from outside, and parts of its work that are left out to see what they cost.

Each is one entry of `SETTINGS`: a module, and a function that changes the module once the script has imported it.
`raypar.study.script_settings` describes them to users.
"""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from .events import EventRecorder

WHAT_IF = "what_if"
TORCH, LOADER, DDP = "torch", "torch.utils.data.dataloader", "torch.nn.parallel.distributed"
Setting = tuple[str, Callable[[Any, Any], None]]  # its function gets the module and the value
# Its function gets the module, and what to call once it leaves something out.
Counterfactual = tuple[str, Callable[[Any, Callable[[], None]], None]]
Hook = Callable[[Any, EventRecorder], None]
_APPLIED = "applied-"  # begins the names of marks, see `EventRecorder.mark`


def hooks(given: Mapping[str, Any]) -> dict[str, Hook]:
    """Return the hooks that apply settings, by module."""
    by_module: dict[str, list[Hook]] = {}
    # The last one sees the arguments first: a loader's processes decide what else it takes.
    for name, value in sorted(given.items(), key=lambda entry: entry[0] == "loader_workers"):
        module, hook = _left_out(value) if name == WHAT_IF else _changed(name, value)
        by_module.setdefault(module, []).append(hook)

    def all_of(hooks: Iterable[Hook]) -> Hook:
        def hook(module: Any, recorder: EventRecorder) -> None:
            for each in hooks:
                each(module, recorder)

        return hook

    return {module: all_of(hooks) for module, hooks in by_module.items()}


def _changed(name: str, value: Any) -> tuple[str, Hook]:
    module, apply = SETTINGS[name]

    def hook(target: Any, recorder: EventRecorder) -> None:
        apply(target, value)
        recorder.mark(_APPLIED + name)

    return module, hook


def _left_out(work: str) -> tuple[str, Hook]:
    module, leave_out = WITHOUT[work]

    def hook(target: Any, recorder: EventRecorder) -> None:
        leave_out(target, cache(lambda: recorder.mark(_APPLIED + WHAT_IF)))

    return module, hook


def not_applied(given: Iterable[str], folder: Path) -> list[str]:
    """Return the names of the settings that no process applied. A counterfactual is applied once it leaves out work.

    Args:
        given: names of settings.
        folder: that the processes wrote their events to.
    """
    return [name for name in given if not (folder / f"{_APPLIED}{name}").exists()]


def _change_arguments(cls: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Let a function change the arguments with which objects of a class are made."""
    create = cls.__init__
    signature = inspect.signature(create)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    @wraps(create)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
            change(bound.arguments)
        except TypeError:  # the class itself will say what is wrong
            create(self, *args, **kwargs)
            return
        arguments = dict(bound.arguments)
        arguments.pop("self", None)
        arguments.update(arguments.pop(rest, {}) if rest else {})
        create(self, **arguments)

    cls.__init__ = __init__


def _of_loader(name: str) -> Setting:
    def apply(module: Any, value: Any) -> None:
        def change(arguments: dict[str, Any]) -> None:
            arguments[name] = value
            if not arguments.get("num_workers"):  # torch refuses these without processes
                for of_processes in ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"):
                    arguments.pop(of_processes, None)

        _change_arguments(module.DataLoader, change)

    return LOADER, apply


def _persist(module: Any, value: Any) -> None:
    """Let the processes of loaders persist, or not.

    A new iterator draws a seed for its processes, and one that persists does not. It does so here as well where the
    script has none that persist: the later epochs keep their order, so losses can be compared.
    """
    torch, iterate = sys.modules["torch"], module.DataLoader.__iter__

    def note(arguments: dict[str, Any]) -> None:
        arguments["self"]._raypar_draws = value and not arguments.get("persistent_workers")

    @wraps(iterate)
    def __iter__(self: Any) -> Any:
        if getattr(self, "_raypar_draws", False) and self._iterator is not None:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return iterate(self)

    _, apply = _of_loader("persistent_workers")
    apply(module, value)
    _change_arguments(module.DataLoader, note)
    module.DataLoader.__iter__ = __iter__


def _of_ddp(name: str) -> Setting:
    def apply(module: Any, value: Any) -> None:
        _change_arguments(module.DistributedDataParallel, lambda arguments: arguments.update({name: value}))

    return DDP, apply


def _fuse(module: Any, value: Any) -> None:
    """Create every optimizer that has fused kernels with them, or without."""

    def change(arguments: dict[str, Any]) -> None:
        arguments["fused"] = value
        if value:  # torch refuses both
            arguments.pop("foreach", None)

    for cls in vars(module.optim).values():
        if isinstance(cls, type) and "fused" in inspect.signature(cls).parameters:
            _change_arguments(cls, change)


def _at_outermost_modules(torch: Any, change: Callable[[Any], None]) -> None:
    """Change each of the outermost modules whose parameters an optimizer gets."""
    create = torch.optim.Optimizer.__init__

    @wraps(create)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        mine = {id(each) for group in self.param_groups for each in group["params"]}
        for each in _outermost(torch.nn.Module):
            if any(id(parameter) in mine for parameter in each.parameters()):
                change(each)

    torch.optim.Optimizer.__init__ = __init__


def _outermost(kind: type) -> Iterator[Any]:
    """Yield the modules that no other module contains; the children of a Lightning module, which training doesn't call.

    Args:
        kind: ``torch.nn.Module``.
    """
    modules = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    contained = {id(child) for each in modules for child in each.__dict__.get("_modules", {}).values()}
    for each in modules:
        # A loss is a module too, without parameters.
        if id(each) not in contained and any(True for _ in each.parameters()):
            yield from each.children() if hasattr(each, "training_step") else [each]


def _compile(module: Any, value: Any) -> None:
    def compile_once(each: Any) -> None:
        is_compiled = type(each).__name__ == "OptimizedModule" or getattr(each, "_compiled_call_impl", None) is not None
        if not is_compiled:
            each.compile()

    if value:
        _at_outermost_modules(module, compile_once)


def _channels_last(module: Any, value: Any) -> None:
    if not value:
        return
    layout = module.channels_last
    converted: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def convert(each: Any) -> None:
        each.to(memory_format=layout)
        if each not in converted:
            converted[each] = True
            each.register_forward_pre_hook(_with_channels_last)

    _at_outermost_modules(module, convert)
    # DDP's buckets take the layout that parameters have when it is created.
    ddp = module.nn.parallel.DistributedDataParallel
    _change_arguments(ddp, lambda arguments: arguments["module"].to(memory_format=layout))


def _with_channels_last(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    # A function of this module rather than a closure, so that a script can pickle its model.
    layout = sys.modules["torch"].channels_last
    return tuple(
        tensor.contiguous(memory_format=layout) if getattr(tensor, "ndim", 0) == 4 else tensor for tensor in inputs
    )


def _keep(prop: Any, value: Any) -> None:
    """Set one of ``torch.backends``' properties, and ignore what the script sets it to.

    Args:
        prop: a ``torch.backends.ContextProp``.
    """
    prop.setter(value)
    prop.setter = lambda _: None


def _cudnn_benchmark(module: Any, value: Any) -> None:
    _keep(vars(type(module.backends.cudnn))["benchmark"], value)


def _tf32(module: Any, value: Any) -> None:
    module.set_float32_matmul_precision("high" if value else "highest")
    for setter in ("_set_float32_matmul_precision", "_set_cublas_allow_tf32"):
        setattr(module._C, setter, lambda _: None)
    _keep(vars(type(module.backends.cudnn))["allow_tf32"], value)


def _expandable_segments(module: Any, value: Any) -> None:
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    # A call replaces what an earlier one set.
    settings = ",".join([*filter(None, [given]), f"expandable_segments:{value}"])
    current = getattr(module._C, "_accelerator_setAllocatorSettings", None)
    (current or module.cuda.memory._set_allocator_settings)(settings)


def _threads(module: Any, value: Any) -> None:
    change = module.set_num_threads
    change(value)

    @wraps(change)
    def set_num_threads(num: int) -> None:
        # The script may set another number, but a loader's processes keep to one thread each.
        if sys._getframe(1).f_globals.get("__name__") == "torch.utils.data._utils.worker":
            change(num)

    module.set_num_threads = set_num_threads


NO_LOADING, NO_COMMUNICATION = "no loading", "no communication"
NO_EVALUATION, NO_CHECKPOINTS = "no evaluation", "no checkpoints"


def _without_loading(module: Any, applied: Callable[[], None]) -> None:
    """Serve each loader's first batch again and again, as often as it has batches.

    Without a length, the first iteration loads all its batches, and later ones serve the first batch as often. Worker
    processes start for the first batch only.
    """
    loader: Any = module.DataLoader
    iterator: Any = module._BaseDataLoaderIter
    iterate, following = loader.__iter__, iterator.__next__
    first: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # batch of each loader
    lengths: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    class Again(iterator):  # type: ignore[misc]
        def __init__(self, loader: Any, length: int) -> None:
            # Without its base's, which draws random numbers and begins to sample.
            self._loader, self._num_left, self._length = loader, length, length

        def __len__(self) -> int:
            return self._length

    @wraps(iterate)
    def __iter__(self: Any) -> Any:
        try:
            lengths[self] = len(self)
        except (TypeError, NotImplementedError):
            if self not in lengths:
                result = iterate(self)
                result._raypar_served = [self, 0]
                return result
        applied()
        return Again(self, lengths[self])

    @wraps(following)
    def __next__(self: Any) -> Any:
        if isinstance(self, Again):
            if not self._num_left:
                raise StopIteration
            if self._loader not in first:
                first[self._loader] = following(iterate(self._loader))
            self._num_left -= 1
            return _shallow_copy(first[self._loader])
        served = getattr(self, "_raypar_served", None)
        if served is None:
            return following(self)
        try:
            batch = following(self)
        except StopIteration:
            lengths[served[0]] = served[1]
            raise
        first.setdefault(served[0], batch)
        served[1] += 1
        return batch

    loader.__iter__, iterator.__next__ = __iter__, __next__


def _shallow_copy(batch: Any) -> Any:
    """Return a batch with copies of its containers, from which a script may remove entries."""
    if type(batch) in (list, tuple):
        return type(batch)(map(_shallow_copy, batch))
    return copy.copy(batch) if isinstance(batch, Mapping) or hasattr(batch, "keys") else batch


def _without_communication(module: Any, applied: Callable[[], None]) -> None:
    """Let every rank keep its own gradients."""
    ddp = module.DistributedDataParallel
    create, forward = ddp.__init__, ddp.forward

    @wraps(create)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        applied()

    @wraps(forward)
    def unsynchronised(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.require_backward_grad_sync = False
        return forward(self, *args, **kwargs)

    ddp.__init__, ddp.forward = __init__, unsynchronised


def _without_evaluation(torch: Any, applied: Callable[[], None]) -> None:
    """Evaluate a single batch each time."""
    _limit_evaluation(torch, 1, applied)


def _without_checkpoints(torch: Any, applied: Callable[[], None]) -> None:
    """Save each kind of checkpoint once. Later files of a kind, which the script may load, are links to the first."""
    save = torch.save
    saved: dict[tuple[Path, str], Path] = {}  # first file of each folder and name without numbers

    @wraps(save)
    def save_once(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        path = Path(f).absolute() if isinstance(f, (str, os.PathLike)) else None
        kind = (path.parent, re.sub(r"\d+", "", path.name)) if path else None
        if path is None or kind not in saved:
            if path is not None and kind is not None:
                saved[kind] = path
            return save(obj, f, *args, **kwargs)
        applied()
        try:
            if not path.exists():
                path.hardlink_to(saved[kind])
        except OSError:
            return save(obj, f, *args, **kwargs)
        return None

    torch.save = save_once


def _limit_evaluation(torch: Any, num_batches: int, applied: Callable[[], None] = lambda: None) -> None:
    """End every iteration of an evaluation after this number of batches.

    A batch that is asked for without gradients is evaluated. So is a batch of an iterator that has served two batches
    since a module was set to evaluation, without a backward pass: the Hugging Face Trainer disables gradients only
    around each prediction, and some loaders fetch a batch ahead.
    """
    dataloader: Any = importlib.import_module(LOADER)
    loader, iterator, kind = dataloader.DataLoader, dataloader._BaseDataLoaderIter, torch.nn.Module
    iterate, following, train, backward = loader.__iter__, iterator.__next__, kind.train, torch.autograd.backward
    is_set_to_evaluate = [False]

    @wraps(train)
    def train_(self: Any, mode: bool = True) -> Any:
        is_set_to_evaluate[0] = not mode
        return train(self, mode)

    @wraps(backward)
    def backward_(*args: Any, **kwargs: Any) -> Any:
        is_set_to_evaluate[0] = False
        return backward(*args, **kwargs)

    @wraps(iterate)
    def __iter__(self: Any) -> Any:
        result = iterate(self)
        result._raypar_num_evaluated = 0  # with persistent workers, it has been used before
        return result

    @wraps(following)
    def __next__(self: Any) -> Any:
        num_served = getattr(self, "_raypar_num_evaluated", 0)
        evaluates = not torch.is_grad_enabled() or (is_set_to_evaluate[0] and num_served >= 2)
        if evaluates:
            applied()
            if num_served >= num_batches:
                raise StopIteration
        self._raypar_num_evaluated = num_served + 1 if evaluates or is_set_to_evaluate[0] else 0
        return following(self)

    loader.__iter__, iterator.__next__ = __iter__, __next__
    kind.train, torch.autograd.backward = train_, backward_


WITHOUT: Mapping[str, Counterfactual] = {
    NO_LOADING: (LOADER, _without_loading),
    NO_COMMUNICATION: (DDP, _without_communication),
    NO_EVALUATION: (TORCH, _without_evaluation),
    NO_CHECKPOINTS: (TORCH, _without_checkpoints),
}
SETTINGS: Mapping[str, Setting] = {
    "loader_workers": _of_loader("num_workers"),
    "pin_memory": _of_loader("pin_memory"),
    "prefetch_factor": _of_loader("prefetch_factor"),
    "persistent_workers": (LOADER, _persist),
    "evaluation_batches": (TORCH, _limit_evaluation),
    "fused_optimizer": (TORCH, _fuse),
    "compile": (TORCH, _compile),
    "channels_last": (TORCH, _channels_last),
    "cudnn_benchmark": (TORCH, _cudnn_benchmark),
    "tf32": (TORCH, _tf32),
    "expandable_segments": (TORCH, _expandable_segments),
    "threads": (TORCH, _threads),
    "bucket_cap_mb": _of_ddp("bucket_cap_mb"),
    "gradient_as_bucket_view": _of_ddp("gradient_as_bucket_view"),
    "static_graph": _of_ddp("static_graph"),
}
