"""Start of the observer in a process: it sets hooks in modules when the process imports them."""

from __future__ import annotations

import atexit
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from . import communication, device, loaders, modules, optimizers, profiler, settings
from .events import LOADED, EventRecorder

Hook = Callable[[Any, EventRecorder], None]
OWN: tuple[Mapping[str, Hook], ...] = (
    optimizers.HOOKS,
    loaders.HOOKS,
    communication.HOOKS,
    modules.HOOKS,
    device.HOOKS,
)


def start(folder: str, given: Mapping[str, Any]) -> EventRecorder:
    """Observe this process.

    Args:
        folder: to which each process writes its events.
        given: settings of the script (`raypar_observer.settings`), and what to profile.
    """
    recorder = EventRecorder(Path(folder))
    recorder.mark(LOADED)
    hooks: dict[str, list[Hook]] = defaultdict(list)
    changes = {name: value for name, value in given.items() if name != profiler.NAME}
    # Settings come first, so that the observer sees their effect.
    for each in (settings.hooks(changes), *OWN, profiler.hooks(given.get(profiler.NAME))):
        for name, hook in each.items():
            hooks[name].append(hook)
    _set_on_imported({name: hooks.pop(name) for name in hooks.keys() & sys.modules.keys()}, recorder)
    sys.meta_path.insert(0, _AfterImport(hooks, recorder))
    atexit.register(recorder.close)
    return recorder


def _set(name: str, hooks: Sequence[Hook], module: ModuleType, recorder: EventRecorder) -> None:
    for hook in hooks:
        try:
            hook(module, recorder)
        except Exception as error:
            recorder.problem(name, error)


def _set_on_imported(hooks: Mapping[str, Sequence[Hook]], recorder: EventRecorder) -> None:
    """Set the hooks of modules that were imported before the observer.

    Other modules have imported names from these, so a function that a hook replaces is replaced there as well.
    """
    new: dict[int, tuple[Any, Any]] = {}  # by id of the replaced object: this object, and what replaces it
    for name, of_module in hooks.items():
        names = vars(sys.modules[name])
        before = dict(names)
        _set(name, of_module, sys.modules[name], recorder)
        new |= {
            id(old): (old, names[key]) for key, old in before.items() if names.get(key) is not old and callable(old)
        }
    if not new:
        return
    for module in [*sys.modules.values()]:
        for key, value in [*getattr(module, "__dict__", {}).items()]:
            if id(value) in new:
                setattr(module, key, new[id(value)][1])


class _AfterImport(MetaPathFinder):
    """Finder that asks the other finders, and sets a module's hooks after the module has run."""

    def __init__(self, hooks: dict[str, list[Hook]], recorder: EventRecorder) -> None:
        self._hooks, self._recorder = hooks, recorder
        self._finding: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._hooks or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            # Only now: some libraries look for a module long before they import it.
            _set(fullname, self._hooks.pop(fullname, ()), module, self._recorder)

        try:
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        except Exception as error:
            self._recorder.problem(fullname, error)
        return spec
