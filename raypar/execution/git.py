"""Revisions of a git repository, and checkouts of their files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from raypar.errors import RayparError, closest, cut
from raypar.scratch import PREFIX

WORKING_TREE = "."
HASH_CHARS = 7
# Files that raypar writes into a project's folder; they are not part of its code.
RESULT_FILES = (".raypar/", "mlflow.db*", "mlartifacts/", "mlruns/", "__pycache__/")
CODE = (".", *(f":(exclude,glob)**/{name}{'**' if name.endswith('/') else ''}" for name in RESULT_FILES))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:HASH_CHARS]


class Environment(NamedTuple):
    """Virtual environment: its interpreter, and a digest of its packages."""

    python: str
    digest: str

    def __str__(self) -> str:
        path = Path(self.python)
        return f"{path.parent.parent.name if path.parent.name == 'bin' else path.name}@{self.digest}"


@dataclass(frozen=True)
class Version:
    """Version of the code.

    Attributes:
        name: name of its revision as the user wrote it.
        commit, tree: hashes of the commit that its files are from, and of the commit's tree.
        changes: digest of the changes that the working tree has since that commit; empty: none.
        patch: patch to apply to its files.
        environment: None: that of the driver.
    """

    name: str
    commit: str
    tree: str
    changes: str = ""
    patch: Path | None = None
    environment: Environment | None = None

    @property
    def is_working_tree(self) -> bool:
        return self.name == WORKING_TREE and self.patch is None

    @property
    def _additions(self) -> tuple[str, str]:
        """Digests of the patch and the environment."""
        patch = "" if self.patch is None else digest(self.patch.read_bytes())
        return patch, self.environment.digest if self.environment else ""

    @property
    def content(self) -> tuple[str, ...]:
        """Everything that distinguishes it from another version."""
        return self.tree, self.changes, *self._additions

    @property
    def short(self) -> str:
        """Digest for the name of a study."""
        return "_".join(filter(None, [self.changes or self.commit[:HASH_CHARS], *self._additions]))

    @property
    def label(self) -> str:
        """``HEAD@1a2b3c4``: the name as the user wrote it, with the commit or digest that it refers to now."""
        label = f"{self.name}@{f'changes-{self.changes}' if self.changes else self.commit[:HASH_CHARS]}"
        if self.patch is not None:
            label += f"+{self.patch.name}@{self._additions[0]}"
        return label + (f" in {self.environment}" if self.environment else "")


@dataclass(frozen=True)
class Repository:
    """The user's git repository, by its top folder."""

    folder: Path

    @classmethod
    def of(cls, file: Path) -> Repository:
        """Return the repository of a file. Raises RayparError if it is not in one."""
        folder = file.resolve().parent
        top = _run_git(folder, "rev-parse", "--show-toplevel") if folder.is_dir() else None
        if top is None or top.returncode:
            problem = f"{file}: is not in a git repository"
            hint = "`raypar ab` compares revisions of the study file's repository; "
            raise RayparError(problem, hint=f"{hint}`raypar store compare` compares stored studies")
        return cls(Path(top.stdout.strip()).resolve())

    def look_up(self, name: str) -> Version:
        """Look up a revision. Raises RayparError if it does not exist."""
        if name == WORKING_TREE:
            head = self.look_up("HEAD")
            return Version(name, head.commit, head.tree, self._changes(head.commit))
        ends = f"{name}^{{commit}}", f"{name}^{{tree}}"
        hashes = [_run_git(self.folder, "rev-parse", "--verify", "--end-of-options", end) for end in ends]
        if any(done.returncode for done in hashes):
            names = _git(self.folder, "for-each-ref", "--format=%(refname:short)").split()
            close = closest(name, names)
            hint = f"did you mean {' or '.join(close)}?" if close else "`git log --oneline --all` lists commits"
            if (Path.cwd() / name).exists() and not close:
                hint = "write `.` for the working tree; " + hint
            raise RayparError(f"{name}: git knows no such revision in {self.folder}", hint=hint)
        commit, tree = (done.stdout.split()[-1] for done in hashes)
        return Version(name, commit, tree)

    def _changes(self, head: str) -> str:
        """Return a digest of the working tree's uncommitted changes and new files; empty if there are none.

        Args:
            head: commit that the changes are based on. The same changes to another commit have another digest.
        """
        changed = _git(self.folder, "diff", "--no-ext-diff", "--no-color", "--binary", "HEAD", "--", *CODE)
        new = _git(self.folder, "ls-files", "-z", "--others", "--exclude-standard", "--", *CODE)
        parts = [head, changed, new]
        for path in filter(Path.is_file, (self.folder / name for name in new.split("\0"))):
            with path.open("rb") as file:
                parts.append(hashlib.file_digest(file, "sha256").hexdigest())
        return digest("\0".join(parts).encode()) if changed or new else ""

    @contextlib.contextmanager
    def checkout(self, version: Version, folder: Path, links: Sequence[Path]) -> Iterator[Path]:
        """Yield the top folder of a version's files: a new worktree, except for the working tree.

        Args:
            links: paths in the working tree to link into a worktree.
        """
        if version.is_working_tree:
            yield self.folder
            return
        if version.changes:
            raise RayparError(
                f"--patch {version.patch}: the working tree has uncommitted changes",
                hint="commit them, or name a revision: `raypar ab HEAD --patch FILE -- study …`",
            )
        try:
            _git(self.folder, "worktree", "add", "--quiet", "--detach", str(folder), version.commit)
            if version.patch is not None:
                patched = _run_git(folder, "apply", "--whitespace=nowarn", str(version.patch.resolve()))
                if patched.returncode:
                    reason = cut(patched.stderr.strip(), 300)
                    problem = f"--patch {version.patch}: does not apply to {version.name}: {reason}"
                    raise RayparError(problem, hint="create it again from that revision: git diff >change.patch")
            for link in links:
                _link(self.folder / link, folder / link, version.name)
            yield folder
        finally:
            self._remove_worktree(folder)

    def forget_abandoned(self) -> None:
        """Remove git's entries for worktrees of killed processes, whose scratch folders are already gone."""
        listing = _run_git(self.folder, "worktree", "list", "--porcelain").stdout
        for folder in map(Path, re.findall(r"^worktree (.+)$", listing, re.MULTILINE)):
            if folder.parent.name.startswith(PREFIX) and not folder.exists():
                self._remove_worktree(folder)

    def _remove_worktree(self, folder: Path) -> None:
        _run_git(self.folder, "worktree", "remove", "--force", "--force", str(folder))
        shutil.rmtree(folder, ignore_errors=True)

    def differs(self, folder: Path, a: Version, b: Version) -> bool:
        """Return whether a folder is in the repository and differs between two versions."""
        if not folder.is_relative_to(self.folder):
            return False
        path = str(folder.relative_to(self.folder))
        if b.patch is not None and path in b.patch.read_text(errors="replace"):
            return True
        # With one commit, git compares it with the working tree. Without any, both versions are the working tree.
        commits = [version.commit for version in (a, b) if not version.changes]
        return bool(commits) and _run_git(self.folder, "diff", "--quiet", *commits, "--", path).returncode != 0

    def link_target(self, link: Path) -> Path:
        """Return the path in the repository of a file or folder to link. Raises RayparError if it can't be linked."""
        folder = Path(os.path.normpath(link.absolute()))
        if not folder.exists():
            raise RayparError(f"--link {link}: there is no such folder", hint="name a folder of the working tree")
        parent = folder.parent.resolve()
        if not parent.is_relative_to(self.folder) or parent / folder.name == self.folder:
            hint = "name a folder below it; data from elsewhere comes with --data-dir"
            raise RayparError(f"--link {link}: is not in the repository {self.folder}", hint=hint)
        return (parent / folder.name).relative_to(self.folder)


def _link(source: Path, place: Path, name: str) -> None:
    if place.exists():
        problem = f"--link {source.name}: {name} has a file or folder of that name"
        raise RayparError(problem, hint="link only what git does not have; leave this one out")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(source)


def _run_git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    try:
        return subprocess.run(
            ["git", "-c", f"core.hooksPath={os.devnull}", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env={**inherited, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise RayparError("git is not installed here", hint="install it: `raypar ab` compares git revisions") from None


def _git(folder: Path, *words: str) -> str:
    """Return what a git command prints. Raises RayparError if it fails."""
    done = _run_git(folder, *words)
    if done.returncode:
        problem = f"git {' '.join(words[:2])}: {cut(done.stderr.strip(), 300)}"
        raise RayparError(problem, hint="run the command yourself to see more")
    return done.stdout
