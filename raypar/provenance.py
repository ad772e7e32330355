"""Provenance of a result: code, versions, machine and command.

A trial's identity holds its settings, not the code that it ran: that is compared file by file, by a digest of each.
Comments, formatting, docstrings and what a study declares beside its workload don't count. Modules are followed by
their import statements; those imported by a computed name are not seen, and installed packages are compared by version.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from raypar import units
from raypar.gpus import all_gpus
from raypar.masking import masked
from raypar.search_path import hidden_by

PACKAGES = ("raypar", "ray", "torch", "torchvision", "mlflow", "numpy")


def provenance(study_file: Path, command: Sequence[str]) -> dict[str, str]:
    """Return tags for the store: ``git.commit``, ``version.*``, ``host``, ``cpu`` …, and how busy this machine is."""
    return {
        **git_state(study_file.parent),
        **{f"version.{name}": version for name, version in versions().items()},
        "host": platform.node(),
        "os": platform.platform(),
        "cpu": cpu_model(),
        "cores": str(os.cpu_count()),
        "gpu": gpu_model() or "none",
        "load": f"{os.getloadavg()[0]:.2f}",
        "command": masked(shlex.join(command)),
    }


def versions() -> dict[str, str]:
    """Return the installed versions of Python and `PACKAGES`, without importing them."""
    from importlib import metadata  # takes a while to import

    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def cpu_model() -> str:
    by_mac = _output(["sysctl", "-n", "machdep.cpu.brand_string"]) if sys.platform == "darwin" else ""
    return _value(Path("/proc/cpuinfo"), "model name") or by_mac or platform.processor() or platform.machine()


def gpu_model() -> str:
    """Return the model of the first GPU; empty where there is none."""
    return next((gpu.name for gpu in all_gpus()), "")


def _value(path: Path, key: str) -> str:
    """Return what follows a key and a colon in a file of the kernel's; empty where there is none."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    return ""


def git_state(folder: Path) -> dict[str, str]:
    """Return the commit that the folder is at, and if anything differs from it; empty outside of git."""
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not commit:
        return {}
    dirty = _output(["git", "-C", str(folder), "status", "--porcelain"])
    return {"git.commit": commit, "git.dirty": "yes" if dirty else "no"}


def repository_of(folder: Path) -> tuple[tuple[str, ...], str]:
    """Return what tells a folder's git repository from others, and the folder's path in it; nothing outside of git.

    That is its first commits, which a shallow clone lacks, and the address of its remote ``origin``, without a user.
    """
    where, _, path = _output(
        ["git", "-C", str(folder), "rev-parse", "--is-shallow-repository", "--show-prefix"]
    ).partition("\n")
    if not where:
        return (), ""
    commits = _output(["git", "-C", str(folder), "rev-list", "--max-parents=0", "HEAD"]) if where == "false" else ""
    remote = _output(["git", "-C", str(folder), "config", "--get", "remote.origin.url"])
    address = re.sub(r"^([\w+.-]+://)?([^/@]*@)?", "", remote).rstrip("/").removesuffix(".git").replace(":", "/")
    return tuple(filter(None, [*commits.split(), address])), path.rstrip("/")


def ignored_by_git(folder: Path) -> list[str]:
    """Return what git ignores below a folder, by the rules of its whole repository; folders end in a slash."""
    ignored = ("ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z")
    return [name for name in _output(["git", "-C", str(folder), *ignored]).split("\0") if name not in ("", "./")]


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


_MAX_FILES_SHOWN = 4

# Keyword arguments that don't change what a trial runs: those that do are in its identity.
_SETTINGS = {
    *("space", "baseline", "num_repeats", "config", "seed", "max_retries", "num_trials", "searcher", "scheduler"),
    *("max_concurrent_trials", "price_per_node_hour", "until", "margin", "max_repeats", "budget"),
}
_IGNORED_ARGUMENTS: Mapping[str, set[str]] = {
    "Study": _SETTINGS | {"name", "metric", "mode", "description"},
    "replace": _SETTINGS,
    "Workload": {"description"},
}
# What `ast.dump` writes differs between versions of Python: digests of two versions can't be compared.
_SCHEME = f"py{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class SourceFiles:
    """Digests of the study file and of the modules of its folder that it leads to.

    Attributes:
        digests: file, relative to the study's folder, to digest; see `changed_files`.
        packages: modules from elsewhere that the files import, in functions too, without raypar and Python's own.
        hiding: modules that the files import and the folder has, though Python's library or a dependency of raypar has
            them too; the study file itself is none.
    """

    digests: Mapping[str, str]
    packages: tuple[str, ...]
    hiding: tuple[str, ...] = ()


def source_files(path: Path, source: str, scripts: Sequence[str] = ()) -> SourceFiles:
    """Follow the import statements of the study file at `path`, whose text is `source`, through its folder.

    Args:
        scripts: files that the study runs, relative to its folder; those that are not there are left out.
    """
    folder = path.resolve().parent
    digests: dict[str, str] = {}
    packages: set[str] = set()
    hiding: set[str] = set()
    pending = [path.name, *(script for script in scripts if (folder / script).is_file())]
    while pending:
        if (file := pending.pop()) in digests:
            continue
        text = source.encode() if file == path.name else (folder / file).read_bytes()
        try:
            tree = _parse(text)
            digests[file] = _digest(ast.dump(_Essential().visit(tree)).encode())
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # not Python, or nested too deeply
            digests[file] = _digest(text)
            continue
        for module, names in _imports(tree, PurePosixPath(file).parent.parts):
            top = module.partition(".")[0]
            # A script's own Python imports whatever it finds first, as by hand.
            is_hidden = bool(top) and not scripts and hidden_by([folder], top) is not None
            if is_hidden and top != path.stem:
                hiding.add(top)
            if top in ("raypar", *sys.stdlib_module_names):
                continue
            local = {each for name in ("", *names) if not is_hidden for each in _files_of(folder, module, name)}
            pending += local
            if module and not local:
                packages.add(module)
    return SourceFiles(dict(sorted(digests.items())), tuple(sorted(packages)), tuple(sorted(hiding)))


def are_comparable(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether both exist and were made in the same way: earlier stores have digests of functions."""
    schemes = {digest.rpartition(":")[0] for digest in (*one.values(), *other.values())}
    return bool(one and other) and len(schemes) == 1 and "" not in schemes


def changed_files(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """Return the files that differ or that only one of the two has, sorted; empty if the two aren't comparable."""
    if not are_comparable(one, other):
        return ()
    return tuple(sorted(file for file in one.keys() | other.keys() if one.get(file) != other.get(file)))


def files_text(files: Iterable[str]) -> str:
    """Return the first few of the files, and how many more there are: ``data.py, model.py and 2 more``."""
    return units.listed(sorted(set(files)), _MAX_FILES_SHOWN)


class _Essential(ast.NodeTransformer):
    """Removes docstrings and the arguments of `_IGNORED_ARGUMENTS`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        ignored = _IGNORED_ARGUMENTS.get(name, set())
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in ignored]
        return node

    def _visit_block(self, node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
        return self.generic_visit(node)

    visit_Module = visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_block


def _parse(text: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # running the file shows them
        return ast.parse(text)


def _imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield each module that a file's import statements name, absolute, with the names that are imported from it.

    Args:
        package: the package that the file is in, for relative imports.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join([*base, *filter(None, [node.module])]), [alias.name for alias in node.names]


def _files_of(folder: Path, module: str, name: str) -> Iterator[str]:
    """Yield the files in the folder that importing `name` from the module runs: its packages', and its own."""
    stem = PurePosixPath()
    for part in filter(None, (*module.split("."), name)):
        stem /= part
        for file in (stem / "__init__.py", stem.with_name(f"{part}.py")):
            if (folder / file).is_file():
                yield str(file)
                break


def _digest(data: bytes) -> str:
    return f"{_SCHEME}:{hashlib.sha256(data).hexdigest()[:12]}"
