"""Target of a verb that runs trials: a study file, a training script, or a command line in quotes."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypar.cli.common import what
from raypar.errors import Mistake, RayparError, StudyError, closest, cut
from raypar.study.command import PLACES, Command
from raypar.study.space import DOMAINS, Grid, Value

if TYPE_CHECKING:
    from raypar.init.draft import Draft, SweptSpace

Target = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="Study file, training script, or command line in quotes with {names}."),
]
Grids = Annotated[
    list[str] | None,
    what("--grid", metavar="KEY=A,B", help="Sweep a hyperparameter of a script or command."),
]
Baseline = Annotated[
    list[str] | None,
    what("--baseline", metavar="KEY=A", help="Point that the others are compared with."),
]
Save = Annotated[
    Path | None,
    what("--save", metavar="FILE", help="Write the study of a script or command to this file."),
]
Values = Mapping[str, tuple[Value, ...]]

SHELL_WORDS = frozenset(("|", "||", "&&", "&", ";", "<", ">", ">>", "2>", "2>&1"))
WORKERS = re.compile(r"\{(num_workers|workers_per_node|num_nodes)\b")


@dataclass(frozen=True)
class _Asked:
    """Options of a command line for a target; see `study_file`."""

    space: Values
    baseline: Mapping[str, Value]
    save: Path | None
    as_it_is: bool
    num_cores: int

    def swept(self, name: str) -> SweptSpace:
        """Return the question, for a study with this name unless its file is saved."""
        from raypar.init.draft import SweptSpace

        space = self.space
        if self.num_cores:
            most = max((num for num in space.get("num_workers", ()) if isinstance(num, int)), default=1)
            space = {"cpus_per_worker": (max(1, self.num_cores // max(1, most)),), **space}
        return SweptSpace(space if space or self.as_it_is else None, self.baseline, "" if self.save else name)


def study_file(
    target: str,
    grids: Sequence[str] | None,
    baseline: Sequence[str] | None,
    save: Path | None,
    *,
    as_it_is: bool = False,
    num_cores: int = 0,
) -> Path:
    """Return the study file of a target. For a script or a command line, write one first.

    Args:
        grids, baseline: ``key=A,B`` and ``key=A``.
        save: the file to write; None: a hidden file, in the current folder if the script is there or below.
        as_it_is: the question is about the script as it is, so only a number of workers is swept unless `grids` say
            otherwise; False: without `grids`, sweep what is likely of interest.
        num_cores: cores that the workers of a script share, unless `grids` say otherwise; 0: one for each worker.

    Raises:
        RayparError: the target can't be read, or the options don't fit it.
    """
    path = Path(target)
    if not target.strip():
        raise RayparError("the target is empty", hint="name a study file, a script, or a command line in quotes")
    names_file = is_file(target) or (path.suffix == ".py" and " " not in target.strip())
    if not names_file and len(_words(target)) < 2:
        return path  # whose message says what a study file is
    tree = _parse(path) if names_file else None
    given = {"--grid": grids, "--baseline": baseline, "--save": save}
    if names_file and (tree is None or not _is_script(tree, path.parent, is_asked=any(given.values()))):
        if tree and (wrong := [flag for flag, value in given.items() if value]):
            hint = "use --set KEY=A,B to change what it sweeps, or edit it"
            raise RayparError(f"{path}: is a study file; {' and '.join(wrong)} is for scripts and commands", hint=hint)
        return path  # if it can't be read, the message for a study file says why
    from raypar.reporting.text import write_text

    space, base = _parsed("--grid", grids, several=True), _parsed("--baseline", baseline, several=False)
    asked = _Asked(space, {key: values[0] for key, values in base.items()}, save, as_it_is, num_cores)
    output, draft = _of_script(path, asked) if names_file else _of_command(target, asked)
    write_text(output, draft.text)
    return output


def _of_script(path: Path, asked: _Asked) -> tuple[Path, Draft]:
    """Return the file for the study of a script, and the study."""
    from raypar.init.draft import draft_of, name_in_study, takes_workers
    from raypar.init.script import ScriptKind, read_script
    from raypar.study.options import OPTIONS
    from raypar.study.workload import PLACEMENT_OPTIONS

    script = read_script(path)
    is_loop = script.kind is ScriptKind.TRAIN_LOOP
    if asked.as_it_is and takes_workers(script):
        asked = replace(asked, space={"num_workers": (1, 2), **asked.space})
    names = [option.name if is_loop else name_in_study(option) for option in script.options]
    names += OPTIONS if is_loop else PLACEMENT_OPTIONS
    fix = f'write its command line: "python {path} {{}}"'
    _check_names(path, asked, names, "raypar finds no such option in it", fix)
    # One process may use several GPUs.
    if script.kind is ScriptKind.PLAIN and not re.search("DataParallel|device_count", path.read_text("utf-8-sig")):
        _check_workers(path, "", asked, f"torchrun --standalone --nproc-per-node={{num_workers}} {path}")
    output = _output(path, asked.save, stays_beside=is_loop)
    draft = draft_of(script, output, asked.swept(_name(path)))
    if draft.open_options:
        hint = f"give values: {' '.join(f'--grid {key}=…' for key in draft.open_options)}"
        raise RayparError(f"{path}: {', '.join(draft.open_options)} has no default in the script", hint=hint)
    return output, draft


def _of_command(target: str, asked: _Asked) -> tuple[Path, Draft]:
    """Return the file for the study of a command line, and the study."""
    from raypar.init.draft import draft_of_command
    from raypar.init.script import read_script
    from raypar.study.workload import PLACEMENT_OPTIONS

    command = Command(target)
    if mistake := next(command.mistakes(), None):
        raise RayparError(f"{cut(str(mistake.value))}: {mistake.problem}", hint=mistake.hint)
    _check_words(target, command)
    if not (asked.space or asked.as_it_is):
        hint = "add --grid num_workers=1,2, and {num_workers} to the command"
        raise RayparError(f"{cut(target)}: no hyperparameter to sweep", hint=hint)
    names = (*command.names, *PLACEMENT_OPTIONS)
    _check_names(target, asked, names, "the command does not use it", "add {} to the command")
    if unset := [name for name in command.names if name not in {*asked.space, *PLACEMENT_OPTIONS}]:
        hint = f"add {' '.join(f'--grid {name}=A,B' for name in unset)}; a single value fixes it"
        raise RayparError(f"{cut(target)}: {{{unset[0]}}} has no value", hint=hint)
    _check_workers(target, target, asked, "torchrun --standalone --nproc-per-node={num_workers} …")
    path = next((Path(file) for file in command.files if is_file(file)), None)
    named = path or Path(command.title).with_suffix("")
    output = _output(named, asked.save, stays_beside=False)
    folder = os.path.relpath(Path.cwd(), output.resolve().parent)
    script = None
    with contextlib.suppress(RayparError):  # only its metrics are needed
        script = read_script(path) if path else None
    return output, draft_of_command(target, script, asked.swept(_name(named)), folder)


def is_file(word: str) -> bool:
    """Return whether a word is the path of a file. A command line may be too long for one."""
    try:
        return Path(word).is_file()
    except (OSError, ValueError):
        return False


def _words(target: str) -> list[str]:
    try:
        return shlex.split(target)
    except ValueError as error:
        raise RayparError(f"{cut(target)}: can't be split into words: {error}", hint="close the quote") from None


def _check_words(target: str, command: Command) -> None:
    """Raise RayparError if a command line can't be started, as far as its words show."""
    words = command.words
    if of_shell := [word for word in words if word in SHELL_WORDS]:
        hint = "write bash -c '…' around the command"
        raise RayparError(f"{cut(target)}: `{of_shell[0]}` needs a shell, and the command runs without one", hint=hint)
    if re.match(r"[A-Za-z_]\w*=", words[0]):
        raise RayparError(f"{cut(target)}: begins with a variable", hint=f"write env {words[0]} …")
    if words[0].endswith(".py") and not ("/" in words[0] and os.access(words[0], os.X_OK)):
        raise RayparError(f"{cut(target)}: begins with a script, not with a program", hint=f"write python {words[0]} …")
    script = next(iter(command.scripts), "")
    if script and "{" not in script and not is_file(script):
        hint = "write paths with /" if "\\" in target else "paths in a command start from the current folder"
        raise RayparError(f"{cut(target)}: there is no file {script}", hint=hint)


def _check_names(target: str | Path, asked: _Asked, names: Collection[str], problem: str, fix: str) -> None:
    """Raise RayparError if a swept name is neither one of these nor a setting of scripts.

    Args:
        fix: hint unless another name is close, with braces for the flag and its value.
    """
    from raypar.study.script_settings import SCRIPT_SETTINGS

    for key in asked.space:
        if key in {*names, *SCRIPT_SETTINGS}:
            continue
        where = f"{cut(str(target))}: --grid {key}"
        if key in PLACES:
            raise RayparError(f"{where}: raypar sets it for each trial", hint="leave it out")
        close = closest(key, [*names, *SCRIPT_SETTINGS])
        flag = f"--{key.replace('_', '-')} {{{key}}}"
        hint = f"did you mean {' or '.join(close)}?" if close else fix.format(flag)
        raise RayparError(f"{where}: {problem}", hint=hint)


def _check_workers(target: str | Path, command: str, asked: _Asked, example: str) -> None:
    """Raise RayparError if the number of workers is swept, but not part of the command line."""
    if len(asked.space.get("num_workers", ())) > 1 and not WORKERS.search(command):
        problem = f"{cut(str(target))}: --grid num_workers: the number of processes would stay the same"
        raise RayparError(problem, hint=f'if it can run as several processes, write "{example}"')


def _name(path: Path) -> str:
    """Return the name of the study of a script: its path from here, with underscores."""
    here = Path.cwd()
    path = path.resolve().with_suffix("")
    words = path.relative_to(here).parts if path.is_relative_to(here) else (path.name,)
    return re.sub(r"[^\w .-]", "_", "_".join(words)).lstrip(" .-") or "study"


def _output(path: Path, save: Path | None, *, stays_beside: bool) -> Path:
    """Return the file to write. Raises RayparError if it can't be the given one."""
    from raypar.reporting.text import check_file

    if save is not None:
        if save.suffix != ".py":
            raise RayparError(f"--save {save}: must end in .py, like every study file", hint="write --save my_study.py")
        if save.exists():
            raise RayparError(f"--save {save}: already exists", hint="choose another name, or delete it first")
        if stays_beside and save.resolve().parent != path.resolve().parent:
            hint = f"--save {path.parent / save.name}"
            raise RayparError(f"--save {save}: must be in the folder of {path}, which it imports", hint=hint)
        check_file(save)
        return save
    is_below = path.resolve().is_relative_to(Path.cwd())
    folder = path.parent if stays_beside or not is_below else Path()
    return folder / f".{_name(path)}_study.py"


def _parse(path: Path) -> ast.Module | None:
    """Return the code of a Python file; None if there is no such file, or it can't be read."""
    try:
        return ast.parse(path.read_text(encoding="utf-8-sig")) if path.suffix == ".py" and path.is_file() else None
    except (OSError, ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _is_script(tree: ast.Module, folder: Path, *, is_asked: bool) -> bool:
    """Return whether a Python file defines no study and imports none, but may train or have options.

    Args:
        is_asked: the command line has options for scripts.
    """
    nodes = list(ast.walk(tree))
    modules = _modules(tree)
    if "optuna" in modules and "raypar" not in modules:
        return True  # whose studies are others
    imported = {
        alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    makes_study = "Study" in imported or any(isinstance(node, ast.Attribute) and node.attr == "Study" for node in nodes)
    if makes_study or "study" in imported | {*_assigned(tree.body)}:
        return False
    return is_asked or "argparse" in modules or _uses_library(modules, folder, set())


def _modules(tree: ast.Module) -> set[str]:
    """Return the first names of the modules that a file imports."""
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names if name}


def _uses_library(modules: Iterable[str], folder: Path, seen: set[str]) -> bool:
    """Return whether one of some modules is an installed library other than raypar, or imports one.

    Args:
        folder: of modules that are not installed.
        seen: those that have been looked at.
    """
    for name in sorted({*modules} - {*sys.stdlib_module_names, "raypar", *seen}):
        seen.add(name)
        if (folder / name / "__init__.py").is_file():
            return True
        tree = _parse(folder / f"{name}.py")
        if tree is None:
            has_library = not (folder / f"{name}.py").exists() and importlib.util.find_spec(name) is not None
        else:
            has_library = _uses_library(_modules(tree), folder, seen)
        if has_library:
            return True
    return False


def _assigned(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module's statements assign, outside of functions and classes."""
    for statement in body:
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            nodes = ast.walk(statement)
            yield from (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def _parsed(flag: str, settings: Sequence[str] | None, *, several: bool) -> dict[str, tuple[Value, ...]]:
    """Return the values of ``key=A,B`` settings. Raises StudyError with all mistakes."""
    from raypar.study.overrides import parse_value, split_setting

    mistakes: list[Mistake] = []
    values: dict[str, tuple[Value, ...]] = {}
    for setting in settings or ():
        try:
            key, text = split_setting(setting)
            value = parse_value(text)
        except ValueError as error:
            mistakes.append(Mistake(flag, setting, str(error), hint=f"write {flag} key=value"))
            continue
        where = f"{flag} {key}"
        if isinstance(value, DOMAINS) and not (several and isinstance(value, Grid)):
            problem = "must be a list of values" if several else "must be one value"
            mistakes.append(Mistake(where, text, problem, hint=f"write {where}={'A,B' if several else 'A'}"))
            continue
        if key in values:
            hint = f"write {where}=A,B" if several else "give it once"
            mistakes.append(Mistake(where, text, "is given twice", hint=hint))
        values[key] = value.values if isinstance(value, Grid) else (value,)
    if mistakes:
        raise StudyError(mistakes)
    return values
