"""Loading of a study file into a `Study`."""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import os
import re
import stat
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from raypar.errors import (
    NotForTraining,
    RayparError,
    StudyError,
    closest,
    cut,
    is_for_training,
    suggest,
)
from raypar.provenance import source_files
from raypar.search_path import file_of, owner_of, put_first
from raypar.study.overrides import FieldFlag, flag_mistakes, with_flags
from raypar.study.study import Study
from raypar.study.workload import AnyWorkload, CommandWorkload
from raypar.units import listed

MODULE_PREFIX = "raypar_study_"
EXTRAS = {"optuna": "search", "transformers": "text", "deepspeed": "deepspeed"}  # extras that install a package
_MAX_NAMES_SHOWN = 8
_MAX_SHOWN = 100  # characters of a line


@dataclass(frozen=True)
class LoadedStudy:
    """Study with the file it came from.

    Attributes:
        path: the file, absolute.
        source: the file's text.
        module_name: the file's name in ``sys.modules``.
        imported_modules: `SourceFiles.packages`, worth importing before a trial. Some may be missing.
        local_modules: modules that the file imported from its own folder.
        code: `SourceFiles.digests`.
    """

    study: Study
    path: Path
    source: str
    module_name: str
    imported_modules: tuple[str, ...]
    local_modules: tuple[str, ...]
    code: Mapping[str, str] = field(default_factory=dict)

    @property
    def sources(self) -> dict[str, bytes]:
        """Contents of the files that its command runs, by name in the study's folder."""
        if not isinstance(self.study.workload, CommandWorkload):
            return {}
        return {name: (self.path.parent / name).read_bytes() for name in self.code if name != self.path.name}


def load_study(path: Path, settings: Sequence[str] = (), flags: Sequence[FieldFlag] = ()) -> LoadedStudy:
    """Run a study file and apply ``--set`` and other flags.

    The file's folder comes first on ``sys.path`` and stays there, as when Python runs a script.

    Args:
        settings, flags: as for `with_flags`.

    Raises:
        RayparError: with the file, the line, the problem and the fix; a StudyError with all mistakes of the study, or
            of the flags.
    """
    source = read_python(path)
    module_name = _module_name(path)
    files = source_files(path, source)
    if files.hiding:
        raise _hiding_error(path, files.hiding)
    try:
        module = _execute(path, source, module_name)
    except StudyError as error:
        faulty = error.of if isinstance(error.of, Study) else None
        raise StudyError([*error.mistakes, *flag_mistakes(faulty, settings, flags)], where=path) from None
    study = _find(path, module)
    defaults: dict[str, Any] = {}
    if not study.name:
        defaults["name"] = _default_name(path)
    if not study.description and module.__doc__:
        defaults["description"] = " ".join(module.__doc__.strip().split("\n\n")[0].split())
    try:
        study = with_flags(replace(study, **defaults), settings, flags)
    except StudyError as error:
        raise error.at(path) from None
    local = tuple(_local_modules(path.resolve().parent, module_name))
    if study.workload.files:
        files = source_files(path, source, study.workload.files)
    return LoadedStudy(study, path.resolve(), source, module_name, files.packages, local, files.digests)


def load_workload(path: Path) -> AnyWorkload:
    """Run a study file, or another file that defines a workload, and return the workload.

    If the file has studies, only their workloads count: others may be imports that those are derived from.

    Raises:
        RayparError: as for `load_study`, or the file has no workload, or several.
    """
    try:
        module = _execute(path, read_python(path, "file"), _module_name(path))
    except StudyError as error:
        raise error.at(path) from None
    values = vars(module).values()
    of_studies = {id(value.workload): value.workload for value in values if isinstance(value, Study)}
    workloads = of_studies or {id(value): value for value in values if isinstance(value, AnyWorkload)}
    if len(workloads) == 1:
        return workloads.popitem()[1]
    names = ", ".join(str(workload.name) for workload in workloads.values())
    problem = f"defines several workloads: {names}" if workloads else "defines no workload"
    raise RayparError(f"{path}: {problem}", hint="name a file with one Study, or with one Workload")


def name_of(path: Path) -> str:
    """Return the study's name from the text of a file that can't be run here; else its default name."""
    tree = ast.parse(read_python(path))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    studies = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Study"]
    given = [word for call in studies for word in call.keywords if word.arg == "name"]
    values = [word.value.value for word in given if isinstance(word.value, ast.Constant)]
    return str(values[0]) if len(values) == 1 and values[0] else _default_name(path)


def _default_name(path: Path) -> str:
    return re.sub(r"[^\w .-]", "_", path.stem).lstrip(" .-") or "study"


def read_python(path: Path, what: str = "study file") -> str:
    """Return the text of a Python file; `what` names it in messages. Raises RayparError."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    except (OSError, ValueError) as error:  # circular links, a name that is too long or has a null byte
        reason = getattr(error, "strerror", None) or error
        raise RayparError(f"{cut(str(path))}: can't be read: {reason}", hint=f"check the path to the {what}") from None
    if mode is not None and stat.S_ISDIR(mode):
        raise RayparError(f"{path}: is a folder, not a {what}", hint=_files_in(path))
    if mode is None:
        folder = path.parent
        if not folder.is_dir():
            raise RayparError(f"{path}: there is no folder {folder}", hint=f"check the path to the {what}")
        names = [p.name for p in folder.glob("*.py")]
        close = closest(path.name if path.suffix else path.name + ".py", names)
        hint = f"did you mean {folder / close[0]}?" if close else _files_in(folder)
        raise RayparError(f"{path}: there is no such file", hint=hint)
    if not stat.S_ISREG(mode):  # reading a pipe would block, reading a device would not end
        raise RayparError(f"{path}: is not a regular file", hint=f"a {what} is a text that ends in .py")
    if path.suffix != ".py":
        defines = " and defines a Study" if what == "study file" else ""
        raise RayparError(f"{path}: is not a Python file", hint=f"a {what} ends in .py{defines}")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RayparError(f"{path}: can't be read: {error.strerror}", hint="check the file's permissions") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"{path}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8"
        raise RayparError(message, hint="save the file as UTF-8") from None


def _files_in(folder: Path) -> str:
    names = sorted(p.name for p in folder.glob("[!.]*.py"))  # hidden ones are studies of scripts
    return f"{folder} holds: {listed(names, _MAX_NAMES_SHOWN)}" if names else f"{folder} holds no Python file"


def _module_name(path: Path) -> str:
    name = MODULE_PREFIX + re.sub(r"\W", "_", path.stem)
    other = sys.modules.get(name)
    if other is not None and getattr(other, "__file__", None) != str(path.resolve()):
        # A file of the same stem in another folder: both stay importable.
        name += "_" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    return name


def _execute(path: Path, source: str, module_name: str) -> types.ModuleType:
    file = str(path.resolve())
    try:
        code = compile(source, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise syntax_error(path, error) from None
    except ValueError as error:  # null bytes
        raise RayparError(f"{path}: is not Python: {error}", hint="is it really a text file?") from None
    except (MemoryError, RecursionError):
        raise RayparError(f"{path}: is nested too deeply for Python", hint="write it in more lines") from None
    module = types.ModuleType(module_name)
    module.__file__ = file
    module.__spec__ = importlib.machinery.ModuleSpec(module_name, None, origin=file)
    sys.modules[module_name] = module
    added = put_first([str(path.resolve().parent)])
    here = Path.cwd()
    try:
        exec(code, module.__dict__)  # the file is the user's own program
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a script's sys.exit() must not end raypar silently
        del sys.modules[module_name]
        for folder in added:
            sys.path.remove(folder)
        raise _load_error(path, error) from None
    finally:
        os.chdir(here)  # results go to the folder where the command was run
    return module


def _load_error(path: Path, error: BaseException) -> RayparError:
    """Return an exception of the file as one message: its last line and location, without a traceback."""
    if isinstance(error, StudyError):
        return error
    if isinstance(error, SyntaxError) and error.filename != str(path.resolve()):  # in a module that it imports
        return syntax_error(Path(error.filename or path), error)
    where = _where(path, traceback.extract_tb(error.__traceback__))
    if isinstance(error, ModuleNotFoundError) and is_for_training(error):
        return NotForTraining(f"{where}: {error.name} is not in this environment")
    if isinstance(error, RayparError):
        return type(error)(f"{where}: {error.message}", hint=error.hint)
    last = cut(traceback.format_exception_only(error)[-1].strip())
    return RayparError(f"{where}: {last}", hint=_hint_for(error))


def _hiding_error(path: Path, names: Sequence[str]) -> RayparError:
    """Return the error for a module in the study's folder that hides one of Python's library or a dependency."""
    folder = path.resolve().parent
    texts = [f"{file_of(folder, name)} beside it hides the module `{name}` {owner_of(name)}" for name in names]
    return RayparError(f"{path}: {' and '.join(texts)}", hint=f"rename {'it' if len(names) == 1 else 'them'}")


def _where(path: Path, frames: traceback.StackSummary) -> str:
    """Return the file with its innermost line among the frames, and that of a module beside it."""
    file, where = str(path.resolve()), str(path)
    if lines := [f.lineno for f in frames if f.filename == file]:
        where += f", line {lines[-1]}"
    if helpers := [f for f in frames if f.filename != file and Path(f.filename).parent == Path(file).parent]:
        where += f" (in {Path(helpers[-1].filename).name}, line {helpers[-1].lineno})"
    return where


def _hint_for(error: BaseException) -> str:
    text = traceback.format_exception_only(error)[-1]  # str() of an exception of the user's own may raise
    if match := re.search(r"Study.*unexpected keyword argument '(\w+)'", text):
        names = [f.name for f in fields(Study)]
        if closest(match[1], names):
            return suggest(match[1], names)
        return f"hyperparameters go into config={{...}} or space={{...}}; a Study takes: {', '.join(names)}"
    if re.search(r"Study.*required keyword-only argument", text):
        return "set what is trained: Study(workload=..., …), with a workload of raypar.workloads"
    if match := re.search(r"cannot import name '(\w+)' from '([\w.]+)'", text):
        module = sys.modules.get(match[2])
        names = [n for n in vars(module) if not n.startswith("_")] if module else []
        if closest(match[1], names) or match[2].startswith("raypar"):
            return suggest(match[1], getattr(module, "__all__", names))
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if match := re.search(r"(\w+) must be installed!", text):  # raised by assertions in Tune's searchers
        package = match[1].lower()
    if package in EXTRAS:
        return f"pip install 'raypar[{EXTRAS[package]}]'"
    if package:
        return f"install {package} into this environment, or check the spelling"
    if isinstance(error, SystemExit):
        return "a study file is imported, not run: leave sys.exit() out"
    return "fix that line and try again"


def syntax_error(path: Path, error: SyntaxError) -> RayparError:
    line = f", line {error.lineno}" if error.lineno else ""
    message = f"{path}{line}: syntax error: {error.msg}"
    if error.text:
        text, at = error.text.rstrip("\n"), (error.offset or 1) - 1
        first = max(len(text) - len(text.lstrip()), at - _MAX_SHOWN // 2)
        message += f"\n    {text[first : first + _MAX_SHOWN]}\n    {' ' * max(0, at - first)}^"
    return RayparError(message, hint="fix that line and try again")


def _find(path: Path, module: types.ModuleType) -> Study:
    named = {name: value for name, value in vars(module).items() if isinstance(value, Study)}
    if "study" in named:
        return named["study"]
    if len({id(s) for s in named.values()}) == 1:
        return next(iter(named.values()))
    if named:
        raise RayparError(f"{path}: holds several studies: {', '.join(named)}", hint="name the one to run `study`")
    other = vars(module).get("study")
    what = f"`study` is a {type(other).__name__}, not a Study" if other is not None else "defines no Study"
    hint = "write study = Study(workload=..., space={...}), with raypar's Study"
    raise RayparError(f"{path}: {what}", hint=f"{hint}; for a script, `raypar init {path.name}` writes it")


def _local_modules(folder: Path, module_name: str) -> Iterator[str]:
    """Yield the modules that were imported from the study's folder: ``helpers.py`` or a package beside the study."""
    prefix = str(folder)  # compared first: there are thousands of modules, and paths are slow to compare
    for name, module in list(sys.modules.items()):
        file, top = getattr(module, "__file__", None), name.split(".")[0]
        if name == module_name or top == "raypar" or not isinstance(file, str) or not file.startswith(prefix):
            continue
        if Path(file) == folder / f"{top}.py" or folder / top in Path(file).parents:
            yield name
