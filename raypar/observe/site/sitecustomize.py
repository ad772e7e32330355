"""Start of the observer in a script's process, before the script; then the environment's own sitecustomize runs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

HERE = Path(__file__).resolve().parent


def _import(spec: ModuleSpec | None) -> None:
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def _start(folder: str) -> None:
    # Under another name, so that the script's environment need not have raypar's dependencies.
    package = HERE.parent
    _import(
        importlib.util.spec_from_file_location(
            "raypar_observer", package / "__init__.py", submodule_search_locations=[str(package)]
        )
    )
    given = json.loads(os.environ.get("RAYPAR_OBSERVE_SETTINGS", "{}"))
    importlib.import_module("raypar_observer.start").start(folder, given)


try:
    if events_folder := os.environ.get("RAYPAR_OBSERVE"):
        _start(events_folder)
except Exception as error:
    print(f"raypar: this process is not observed: {type(error).__name__}: {error}", file=sys.stderr)
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != HERE]
_import(PathFinder.find_spec("sitecustomize"))  # the one that this one hides
