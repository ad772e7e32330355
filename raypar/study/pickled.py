"""A study that was declared in a notebook or a script, as a study file with a pickle beside it.

The file holds the sources of the functions and classes that a fresh process can't import, so that the store records
them, and changed code is noticed. It imports the modules that they use, which are then ready before a trial begins.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pprint
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from raypar.errors import RayparError
from raypar.files import open_private
from raypar.study.study import Study

UNKNOWN_SOURCE = "unknown"
PLAIN = (bool, int, float, str, tuple)
TEMPLATE = """{doc}# `Study.run` wrote this file and the pickle beside it; both are code.
import pickle
from pathlib import Path
{imports}
SOURCES = {sources}

study = pickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
"""


def write_study(study: Study, folder: Path) -> Path:
    """Write a study file of this study into a folder, hidden, and return its path.

    Raises:
        RayparError: the study has no name, or can't be pickled.
    """
    import cloudpickle

    if not study.name:
        hint = 'give it one: Study(name="batch_size", …); its trials are stored under it'
        raise RayparError("a study that is run from Python needs a name", hint=hint)
    try:
        pickle = cloudpickle.dumps(study)
    except Exception as error:  # of the user's objects
        problem = f"study `{study.name}` can't be sent to another process: {type(error).__name__}: {error}"
        raise RayparError(problem, hint="write it into a file, and run `raypar study FILE`") from None
    sources: dict[str, str] = {}
    modules: set[str] = set()
    for used in _used_by(study.workload):
        if isinstance(used, types.ModuleType):
            modules.add(used.__name__)
        elif used.__module__ == "__main__":
            sources |= _plain(_globals(used))
            sources[used.__qualname__] = _source(used)
        else:
            modules.add(used.__module__)
    names = [name for name in sorted(modules) if name.partition(".")[0] not in ("raypar", "__main__")]
    imports = "".join(f"import {name}\n" for name in names if name in sys.modules)
    shown = pprint.pformat(dict(sorted(sources.items())), width=118)
    doc = f"{study.description!r}\n" if study.description else ""
    text = TEMPLATE.format(doc=doc, imports=imports, sources=shown)
    stem = re.sub(r"[^\w-]", "_", study.name)
    path = folder / f".{stem}_notebook.py"
    for file, content in (path.with_suffix(".pkl"), pickle), (path, text.encode()):
        try:
            with os.fdopen(open_private(file, os.O_TRUNC), "wb") as stream:
                stream.write(content)
        except OSError as error:
            hint = "run it in a folder that you may write to"
            raise RayparError(f"{file}: can't be written: {error.strerror}", hint=hint) from None
    return path


def _used_by(workload: object) -> Iterator[Any]:
    """Yield the functions, classes and modules that a workload refers to, directly or through those of ``__main__``."""
    pending: list[Any] = [workload]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, types.ModuleType):
            yield each
        elif isinstance(each, (types.FunctionType, type)):
            if not each.__module__ or each.__module__ == "builtins":
                continue
            yield each
            if each.__module__ == "__main__":
                pending += _referred(each)
        elif is_dataclass(each):
            pending += [getattr(each, field.name) for field in fields(each)]
        elif isinstance(each, (tuple, list)):
            pending += each
        elif isinstance(each, dict):
            pending += each.values()
        elif function := getattr(each, "func", None):  # functools.partial
            pending += [function, getattr(each, "args", ()), getattr(each, "keywords", {})]


def _referred(of: types.FunctionType | type) -> Iterator[Any]:
    """Yield the objects that the code of a function or of a class's methods refers to."""
    if isinstance(of, type):
        yield from of.__bases__
        yield from (each for each in vars(of).values() if isinstance(each, types.FunctionType))
        return
    yield from (cell.cell_contents for cell in of.__closure__ or () if _is_filled(cell))
    yield from _globals(of).values()


def _globals(of: types.FunctionType | type) -> dict[str, Any]:
    """Return the global names that the code of a function uses, with their values; none for a class."""
    used: dict[str, Any] = {}
    if isinstance(of, type):
        return used
    codes = [of.__code__]
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        used |= {name: of.__globals__[name] for name in code.co_names if name in of.__globals__}
    return used


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _source(of: types.FunctionType | type) -> str:
    try:
        return inspect.getsource(of)
    except (OSError, TypeError):  # typed into a shell that keeps no sources; a notebook keeps those of functions
        plain = _plain(vars(of)) if isinstance(of, type) else {}
        return f"{UNKNOWN_SOURCE} {plain}" if plain else UNKNOWN_SOURCE


def _plain(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the numbers, and the digests of texts, which may be secrets: the file is stored."""
    kept = {key: value for key, value in values.items() if isinstance(value, PLAIN) and not key.startswith("__")}
    return {
        key: hashlib.sha256(repr(value).encode()).hexdigest()[:12] if isinstance(value, (str, tuple)) else repr(value)
        for key, value in kept.items()
    }
