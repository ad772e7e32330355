"""Search path of modules: a study's folder comes first, but hides nothing that raypar and its dependencies import.

Ray, torch and MLflow import much of Python's library late. A ``random.py`` beside a study must not get in between, and
neither must a study that is called ``cmd.py``; any other module of the folder comes before installed ones, as when
Python runs a script there.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement

# The packages without which no trial runs, whatever is installed here.
_ROOTS = ("raypar", "ray", "mlflow", "torch", "torchvision")
_NOT_FOR_USERS = {"dev", "docs"}  # extras
_NEVER_IMPORTED = {"example"}  # nvidia-ml-py installs one


class _Finder(MetaPathFinder):
    """Finder of the modules that a folder would hide: it takes those of the other folders."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module that a folder would hide; None, so that others look for it, where none does."""
        return hidden_by(self.folders, fullname) if path is None else None


_finder = _Finder()


def put_first(folders: Iterable[str]) -> tuple[str, ...]:
    """Put folders first on ``sys.path``; return those that were not there."""
    added = tuple(folder for folder in folders if folder not in sys.path)
    sys.path[:0] = added
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.folders += [path for folder in added if (path := Path(folder).resolve()) not in _finder.folders]
    return added


def hidden_by(folders: Collection[Path], name: str) -> ModuleSpec | None:
    """Return the reserved top-level module that a module of the folders would hide; None where they hide none.

    Args:
        folders: without links.
    """
    hiding = PathFinder.find_spec(name, [*map(str, folders)])
    if hiding is None or hiding.origin is None or not is_reserved(name):  # without an origin, it is just a folder
        return None
    if any(finder.find_spec(name) is not None for finder in (BuiltinImporter, FrozenImporter)):  # come first anyway
        return None
    spec = PathFinder.find_spec(name, [entry for entry in sys.path if Path(entry).resolve() not in folders])
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    is_used = loaded is not None and loaded.origin == hiding.origin  # raypar itself may come from there
    return None if spec is None or spec.origin is None or is_used else spec


def file_of(folder: Path, name: str) -> str:
    """Return the name of the folder's file, or folder, that importing a top-level module from there runs."""
    spec = PathFinder.find_spec(name, [str(folder)])
    origin = Path((spec and spec.origin) or name)
    return origin.parent.name if origin.stem == "__init__" else origin.name


def is_reserved(name: str) -> bool:
    """Return whether a top-level module is part of Python's library, of raypar or of what raypar depends on."""
    return name in sys.stdlib_module_names or name in _ROOTS or name in _dependencies()


def owner_of(name: str) -> str:
    """Return whose a reserved top-level module is, for messages."""
    return "of Python's library" if name in sys.stdlib_module_names else "that raypar needs"


@cache
def _dependencies() -> frozenset[str]:
    """Return the top-level modules of raypar's distribution and of all that it requires, as far as it is installed.

    Takes some tenths of a second the first time.
    """
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
                pending.append((_normalised(requirement.name), frozenset(requirement.extras)))
    modules = metadata.packages_distributions()
    owned = (module for module, names in modules.items() if not required.keys().isdisjoint(map(_normalised, names)))
    return frozenset(owned) - _NEVER_IMPORTED


def _normalised(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
