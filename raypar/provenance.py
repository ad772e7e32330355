"""Provenance of a result: code, versions, machine and command.

A trial's identity covers its settings, not its code. Code is compared by a digest of each file. Comments, formatting,
docstrings and a study's settings outside its workload don't count. Import statements are followed to other files;
modules imported by a computed name are missed, and installed packages are compared by version.
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

SOURCE_TAGS = "mlflow.source."  # MLflow's tags for the origin of a run
_BRANCHES = "refs/heads/"
PACKAGES = ("raypar", "ray", "torch", "torchvision", "mlflow", "numpy")


def provenance(study_file: Path, command: Sequence[str]) -> dict[str, str]:
    """Return tags for the store: ``git.commit``, ``version.*``, ``host``, ``cpu`` …, and this machine's load."""
    return {
        **git_state(study_file.parent),
        **{f"version.{name}": version for name, version in versions().items()},
        "host": platform.node(),
        "os": platform.platform(),
        "cpu": cpu_model(),
        "cores": str(os.cpu_count()),
        "gpu": next((gpu.name for gpu in all_gpus()), "none"),
        "load": f"{os.getloadavg()[0]:.2f}",
        "command": masked(shlex.join(command)),
    }


def hardware() -> dict[str, str]:
    """Return the kind of this machine: its CPU, cores and GPUs."""
    return {
        "cpu": cpu_model(),
        "cores": str(os.cpu_count()),
        "gpu": ", ".join(sorted(gpu.name for gpu in all_gpus())),
    }


def versions() -> dict[str, str]:
    """Return the installed versions of Python and `PACKAGES`, without importing them."""
    from importlib import metadata  # slow to import

    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def cpu_model() -> str:
    model = _output(["sysctl", "-n", "machdep.cpu.brand_string"]) if sys.platform == "darwin" else ""
    with contextlib.suppress(OSError):
        names = re.findall(r"^model name\s*: *(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        model = names[0] if names else ""
    return model or platform.processor() or platform.machine()


def git_state(folder: Path) -> dict[str, str]:
    """Return the folder's commit and whether anything differs from it; empty outside of git.

    MLflow's own tags for these, with the branch and the address of the remote, are included.
    """
    resolved = _output(["git", "-C", str(folder), "rev-parse", "HEAD", "--symbolic-full-name", "HEAD"])
    commit, _, head = resolved.partition("\n")
    if not commit:
        return {}
    is_dirty = bool(_output(["git", "-C", str(folder), "status", "--porcelain"]))
    branch = head.removeprefix(_BRANCHES) if head.startswith(_BRANCHES) else ""  # without one, HEAD is detached
    of_mlflow = {
        "commit": commit,
        "branch": branch,
        "dirty": str(is_dirty).lower(),
        "repoURL": _without_user(_remote_url(folder)),
    }
    tags = {f"{SOURCE_TAGS}git.{key}": value for key, value in of_mlflow.items() if value}
    return {"git.commit": commit, "git.dirty": "yes" if is_dirty else "no", **tags}


def _remote_url(folder: Path) -> str:
    """Return the address of ``origin``, else of the first remote; empty if there is none."""
    listed = _output(["git", "-C", str(folder), "config", "--get-regexp", r"^remote\..*\.url$"])
    urls = [line.partition(" ") for line in listed.splitlines()]
    return min(urls, key=lambda url: url[0] != "remote.origin.url", default=("", "", ""))[2]


def _without_user(url: str) -> str:
    """Return an address without the user, password and token before its host; ``git@host:path`` has no secret."""
    return re.sub(r"^([\w+.-]+://)[^/?#]*@", r"\1", masked(url))


def repository_of(folder: Path) -> tuple[tuple[str, ...], str]:
    """Return identifiers of a folder's git repository, and the folder's path in it; empty outside of git.

    The identifiers are its root commits, unless the clone is shallow, and the address of ``origin`` without a user.
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
    """Return paths below a folder that git ignores by the rules of the whole repository; folders end in a slash."""
    ignored = ("ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z")
    return [name for name in _output(["git", "-C", str(folder), *ignored]).split("\0") if name not in ("", "./")]


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


_MAX_FILES_SHOWN = 4

# Keyword arguments that don't change what a trial runs, or are part of its identity.
_SETTINGS = {
    *("space", "baseline", "num_repeats", "config", "seed", "max_retries", "num_trials", "searcher", "scheduler"),
    *("max_concurrent_trials", "price_per_node_hour", "until", "margin", "max_repeats", "budget", "target"),
}
_IGNORED_ARGUMENTS: Mapping[str, set[str]] = {
    "Study": _SETTINGS | {"name", "metric", "mode", "description"},
    "replace": _SETTINGS,
    "Workload": {"description"},
}
# `ast.dump` differs between versions of Python, so digests of two versions can't be compared.
_SCHEME = f"py{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class SourceFiles:
    """Digests of the study file and of the modules of its folder that it imports.

    Attributes:
        digests: digest by file, relative to the study's folder; see `changed_files`.
        packages: modules imported from elsewhere, in functions too, without raypar and the standard library.
        hiding: imported modules of the folder, except the study file, that have the name of a module of the standard
            library or of a dependency of raypar.
    """

    digests: Mapping[str, str]
    packages: tuple[str, ...]
    hiding: tuple[str, ...] = ()


def source_files(path: Path, source: str, scripts: Sequence[str] = ()) -> SourceFiles:
    """Follow the import statements of a study file through its folder.

    Args:
        source: text of the study file.
        scripts: files that the study runs, relative to its folder; missing ones are skipped.
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
            # A script runs in plain Python, which imports whatever it finds first.
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
    """Return True if both exist and have the same scheme: older stores have digests of functions."""
    schemes = {digest.rpartition(":")[0] for digest in (*one.values(), *other.values())}
    return bool(one and other) and len(schemes) == 1 and "" not in schemes


def changed_files(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """Return the files that differ or are in one only, sorted; empty if the two are not comparable."""
    if not are_comparable(one, other):
        return ()
    return tuple(sorted(file for file in one.keys() | other.keys() if one.get(file) != other.get(file)))


def files_text(files: Iterable[str]) -> str:
    """Return the first few files and the number of others: ``data.py, model.py and 2 more``."""
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
    """Yield the absolute name of each module that a file imports, with the names imported from it.

    Args:
        package: package of the file, for relative imports.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join([*base, *filter(None, [node.module])]), [alias.name for alias in node.names]


def _files_of(folder: Path, module: str, name: str) -> Iterator[str]:
    """Yield the files of the folder that run when `name` is imported from the module, packages included."""
    stem = PurePosixPath()
    for part in filter(None, (*module.split("."), name)):
        stem /= part
        for file in (stem / "__init__.py", stem.with_name(f"{part}.py")):
            if (folder / file).is_file():
                yield str(file)
                break


def _digest(data: bytes) -> str:
    return f"{_SCHEME}:{hashlib.sha256(data).hexdigest()[:12]}"
