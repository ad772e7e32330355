"""Start of the observer in a process: it sets hooks in modules when the process imports them."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from . import communication, device, loaders, modules, optimizers, profiler, settings, tracking
from .events import LOADED, EventRecorder

Hook = Callable[[Any, EventRecorder], None]
OWN: tuple[Mapping[str, Hook], ...] = (
    optimizers.HOOKS,
    loaders.HOOKS,
    communication.HOOKS,
    modules.HOOKS,
    device.HOOKS,
)


# Modules in which hooks replace names.
HOOKED = {
    *(name for each in OWN for name in each),
    *(name for name, _ in (*settings.SETTINGS.values(), *settings.WITHOUT.values())),
    tracking.NAME,
}


def start(folder: str, given: Mapping[str, Any]) -> EventRecorder:
    """Observe this process.

    Args:
        folder: to which each process writes its events.
        given: settings of the script (`raypar_observer.settings`), and what to profile.
    """
    recorder = EventRecorder(Path(folder))
    recorder.mark(LOADED)
    changes = {name: value for name, value in given.items() if name not in (profiler.NAME, tracking.NAME)}
    of_profile, of_mlflow = profiler.hooks(given.get(profiler.NAME)), tracking.hooks(given.get(tracking.NAME))
    # Settings come first, so that the observer sees their effect.
    set_hooks((settings.hooks(changes), *OWN, of_profile, of_mlflow), recorder)
    atexit.register(recorder.close)
    return recorder


def set_hooks(by_module: Iterable[Mapping[str, Hook]], recorder: EventRecorder) -> None:
    """Set hooks in modules that are imported, and in others once this process imports them."""
    hooks: dict[str, list[Hook]] = defaultdict(list)
    for each in by_module:
        for name, hook in each.items():
            hooks[name].append(hook)
    _set_on_imported({name: hooks.pop(name) for name in hooks.keys() & sys.modules.keys()}, recorder)
    sys.meta_path.insert(0, _AfterImport(hooks, recorder))


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
    targets = {name: sys.modules[name] for name in hooks}
    with contextlib.ExitStack() as stack:
        replaced = [(module, stack.enter_context(_assignments(module))) for module in targets.values()]
        for name, module in targets.items():
            _set(name, hooks[name], module, recorder)
    # By id of the replaced object: this object, and what replaces it.
    new = {id(old): (old, vars(module)[key]) for module, of_it in replaced for key, old in of_it.items()}
    places = [place for each in new for place in _noted.get(each, ())]
    # The last ones, in the order of their import. Others are not touched, see `note_names`.
    for name in takewhile(lambda name: name not in _searched, reversed(sys.modules)):
        places += _places(sys.modules[name])
    for names, key in places:
        if (old := names.get(key)) is not None and id(old) in new:
            names[key] = new[id(old)][1]


@contextlib.contextmanager
def _assignments(module: ModuleType) -> Iterator[dict[str, Any]]:
    """Yield a dict that gets the names of a module that are assigned in the block, with the callables they had before.

    Comparing all names before and after would do, but count references to each object, see `note_names`.
    """
    before: dict[str, Any] = {}
    kind = type(module)

    class Noting(kind):  # type: ignore[misc,valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            if callable(old := vars(self).get(name)):
                before.setdefault(name, old)
            super().__setattr__(name, value)

    module.__class__ = Noting
    try:
        yield before
    finally:
        module.__class__ = kind


class _Place(NamedTuple):
    """Name in a module: all names of the module, and this one."""

    names: dict[str, Any]
    key: str


_noted: dict[int, list[_Place]] = {}  # by id of a callable that a hook may replace: the names that it has
_searched: set[str] = set()  # names of the modules that were searched for these


def note_names() -> None:
    """Note the names of the callables that hooks may replace, in all modules that are imported.

    A fork server does so after its imports. A search in each of its forks would copy most of the memory that they
    share, since CPython counts the references to each object in the object.
    """
    _noted.clear()
    _searched.update(sys.modules)
    of_hooks = {id(value) for name in HOOKED & sys.modules.keys() for value in vars(sys.modules[name]).values()}
    for module in [*sys.modules.values()]:
        for names, key in _places(module):
            if id(names[key]) in of_hooks and callable(names[key]):
                _noted.setdefault(id(names[key]), []).append(_Place(names, key))


def _places(module: ModuleType) -> list[_Place]:
    names = getattr(module, "__dict__", {})
    return [_Place(names, key) for key in names]


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
