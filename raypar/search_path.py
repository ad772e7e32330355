"""Module search path: a study's folder comes first, but hides no module that raypar or its dependencies import.

Ray, torch and MLflow import much of the standard library late, and must not get a ``random.py`` beside a study, or a
study called ``cmd.py``. Other modules of the folder take precedence over installed ones, as for a script.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Packages that every trial needs.
_ROOTS = ("raypar", "ray", "mlflow", "torch", "torchvision")
_NOT_FOR_USERS = {"dev", "docs"}  # extras
_NEVER_IMPORTED = {"example"}  # nvidia-ml-py installs one


class _Finder(MetaPathFinder):
    """Finder of modules that a folder would hide: it finds them in the other folders.

    Attributes:
        original: ``sys.path`` before the first folder; None: there is none.
    """

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.original: list[str] | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module that a folder would hide; None leaves the search to other finders."""
        return hidden_by(self.folders, fullname) if path is None else None


_finder = _Finder()


def put_first(folders: Iterable[str]) -> tuple[str, ...]:
    """Put folders first on ``sys.path``; return the added ones."""
    if _finder.original is None:
        _finder.original = [*sys.path]
    added = tuple(folder for folder in folders if folder not in sys.path)
    sys.path[:0] = added
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.folders += [path for folder in added if (path := Path(folder).resolve()) not in _finder.folders]
    return added


def restore() -> None:
    """Give this process the search path that it had before `put_first`."""
    if _finder.original is not None:
        sys.path[:] = _finder.original
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    importlib.invalidate_caches()


def hidden_by(folders: Collection[Path], name: str) -> ModuleSpec | None:
    """Return the reserved top-level module that a module of the folders would hide; None if they hide none.

    Args:
        folders: resolved paths.
    """
    hiding = PathFinder.find_spec(name, [*map(str, folders)])
    if hiding is None or hiding.origin is None or not is_reserved(name):  # no origin: just a folder
        return None
    if any(finder.find_spec(name) is not None for finder in (BuiltinImporter, FrozenImporter)):  # found first anyway
        return None
    spec = PathFinder.find_spec(name, [entry for entry in sys.path if Path(entry).resolve() not in folders])
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    is_used = loaded is not None and loaded.origin == hiding.origin  # raypar itself may be in the folder
    return None if spec is None or spec.origin is None or is_used else spec


def file_of(folder: Path, name: str) -> str:
    """Return the name of the file or subfolder that a top-level module of the folder is imported from."""
    spec = PathFinder.find_spec(name, [str(folder)])
    origin = Path((spec and spec.origin) or name)
    return origin.parent.name if origin.stem == "__init__" else origin.name


def is_reserved(name: str) -> bool:
    """Return True for a top-level module of the standard library, of raypar or of its dependencies."""
    return name in sys.stdlib_module_names or name in _ROOTS or name in _dependencies()


def owner_of(name: str) -> str:
    """Describe a reserved top-level module for messages."""
    return "of Python's library" if name in sys.stdlib_module_names else "that raypar needs"


@cache
def _dependencies() -> frozenset[str]:
    """Return the top-level modules of raypar and of its installed dependencies. The first call takes 0.2 to 0.5 s."""
    pending, required = [(name, frozenset[str]()) for name in _ROOTS], dict[str, frozenset[str]]()
    while pending:
        name, extras = pending.pop()
        if name in required and extras <= required[name]:
            continue
        try:
            requirements = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue
        if name == "raypar":
            extras = frozenset(metadata.metadata(name).get_all("Provides-Extra") or ()) - _NOT_FOR_USERS
        required[name] = extras | required.get(name, frozenset())
        for requirement in map(Requirement, requirements):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                pending.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    modules = metadata.packages_distributions()
    owned = (
        module for module, names in modules.items() if not required.keys().isdisjoint(map(canonicalize_name, names))
    )
    return frozenset(owned) - _NEVER_IMPORTED
