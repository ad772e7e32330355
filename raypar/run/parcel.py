"""What travels to a cluster with a study file: what lies beside it, without what is nobody's business there."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from raypar import units
from raypar.errors import RayparError

# What one message of Ray can hold, and so a working_dir.
MAX_BYTES = 500 * 1024**2
_NUM_NAMED = 3
_OWN = ("mlflow.db", "mlflow.db-wal", "mlflow.db-shm", "mlflow.db-journal", "mlruns", "mlartifacts")
_MADE = frozenset({"__pycache__", "node_modules", "venv", *_OWN})
_PRIVATE = (".pem", ".key", ".pyc")
TOO_LARGE_HINT = (
    "list what a study doesn't need in a .gitignore beside it, or give the study a folder of its own; data that is on "
    "the cluster already is named with --data-dir"
)


def pack(study_file: Path, modules: Collection[Path], to: Path) -> tuple[Path, ...]:
    """Copy what travels with a study into a folder.

    That is the study file, the local modules that it imported, and what else lies in its folder, but for hidden files,
    virtual environments, stores, keys, and what git ignores.

    Args:
        study_file: absolute.
        modules: files of the study's folder; they travel even where git ignores them.
        to: an empty folder.

    Returns:
        The copied files, relative to the folder.

    Raises:
        RayparError: it is more than Ray takes, or a folder that is no study's.
    """
    folder = study_file.parent
    if folder in (Path.home(), Path(folder.anchor)):
        raise RayparError(
            f"{study_file}: lies in {folder}, and what lies beside a study travels with it",
            hint="give the study a folder of its own",
        )
    always = {study_file, *modules}
    ignored = not_ignored(folder)
    found: list[Path] = []
    sizes: dict[str, int] = {}
    for path in _files(folder):
        if path in always or ignored is None or path in ignored:
            try:
                size = path.stat().st_size
            except OSError:  # a link to nowhere, or gone
                continue
            found.append(path)
            top = path.relative_to(folder).parts[0]
            sizes[top] = sizes.get(top, 0) + size
    if (total := sum(sizes.values())) > MAX_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_NUM_NAMED]
        named = ", ".join(f"{name} ({units.size(sizes[name])})" for name in largest)
        raise RayparError(
            f"{study_file}: what lies beside it is {units.size(total)}, and Ray takes {units.size(MAX_BYTES)}: {named}",
            hint=TOO_LARGE_HINT,
        )
    for path in found:
        copy = to / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(path, copy)
        except OSError as error:
            hint = "make it readable, or list it in a .gitignore beside the study"
            raise RayparError(f"{path}: can't be read: {error.strerror}", hint=hint) from None
    return tuple(path.relative_to(folder) for path in found)


def _files(folder: Path) -> Iterator[Path]:
    """The files below, without those that never travel; links to folders are not followed."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if _may_travel(Path(root, name)))
        for name in sorted(files):
            path = Path(root, name)
            if _may_travel(path) and path.is_file():
                yield path


def _may_travel(path: Path) -> bool:
    name = path.name
    return not (
        name.startswith(".") or name in _MADE or path.suffix in _PRIVATE or (path / "pyvenv.cfg").exists()  # a venv
    )


def not_ignored(folder: Path) -> frozenset[Path] | None:
    """The files below that git doesn't ignore, whether they are in a repository or not; None without a git."""
    listed = _listed(["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    if listed is None:
        with tempfile.TemporaryDirectory() as empty:
            if _listed(["git", "init", "--bare", "--quiet", empty]) is None:
                return None
            own = ["git", f"--git-dir={empty}", f"--work-tree={folder}", "-C", str(folder)]
            listed = _listed([*own, "ls-files", "-z", "--others", "--exclude-standard"])
    return None if listed is None else frozenset(folder / name for name in listed)


def _listed(command: list[str]) -> list[str] | None:
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
