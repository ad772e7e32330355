"""Origin of a study's code. Name and origin identify a study in a store that several projects share.

In a git repository the origin is a folder of that repository, in any clone or worktree. Elsewhere it is a folder of a
machine, which may move together with an embedded store beside it. A folder that has moved, or is on another machine, is
recognised by its code.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import RayparError
from raypar.execution.options import Options
from raypar.masking import masked
from raypar.provenance import repository_of
from raypar.track.client import sqlite_path
from raypar.track.store import Store, default_tracking_uri

if TYPE_CHECKING:
    from raypar.study.loader import LoadedStudy

# The client's origin. `raypar study` reads it on a cluster's head, where the code is in the job's folder.
ORIGIN_VARIABLE = "RAYPAR_CODE_ORIGIN"
NO_CODE: Mapping[str, str] = {}


@dataclass(frozen=True)
class CodeOrigin:
    """Origin of a study's file. An execution stores it as JSON under the tag `TAG`.

    Attributes:
        folder: the file's folder, absolute and without links.
        in_store: the folder relative to that of an embedded store; None: not below it.
        repository: first commits and remote of the git repository; empty: no repository, or it has neither.
        in_repository: the folder relative to that of the repository.
        host: the machine with the folder; empty: unknown.
        code: digest of the study's source files; empty: unknown.
    """

    folder: str
    in_store: str | None = None
    repository: tuple[str, ...] = ()
    in_repository: str = ""
    host: str = ""
    code: str = ""

    TAG = "raypar.code_origin"

    @classmethod
    def of(cls, file: Path, tracking_uri: str, code: Mapping[str, str] = NO_CODE) -> CodeOrigin:
        """Return the origin of a study file; for a submitted study, the origin on the client.

        Args:
            code: digests of its source files; see `raypar.provenance`.
        """
        text = json.dumps(sorted(code.items()))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16] if code else ""
        if (origin := cls.from_json(os.environ.get(ORIGIN_VARIABLE, ""))) is not None:
            return replace(origin, code=digest)
        folder, database = file.resolve().parent, sqlite_path(tracking_uri)
        above = database.absolute().parent.resolve() if database is not None else None
        in_store = str(folder.relative_to(above)) if above is not None and folder.is_relative_to(above) else None
        repository, in_repository = repository_of(folder)
        return cls(str(folder), in_store, repository, in_repository, platform.node(), digest)

    @classmethod
    def from_json(cls, text: str) -> CodeOrigin | None:
        """Read an origin written by `to_json`; None for anything else."""
        try:
            raw = json.loads(text)
            return cls(**{**raw, "repository": tuple(map(str, raw["repository"]))})
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    def is_of(self, other: CodeOrigin) -> bool:
        """Return whether both are the same origin. A folder may be cloned again, or become a repository later."""
        if self.repository and other.repository:
            is_shared = not set(self.repository).isdisjoint(other.repository)
            return is_shared and self.in_repository == other.in_repository
        return self.folder == other.folder or (self.in_store is not None and self.in_store == other.in_store)

    def may_have_been(self, other: CodeOrigin) -> bool:
        """Return whether the same code came from a folder that has moved or is on another machine."""
        is_not_here = self.host != other.host or not Path(other.folder).exists()
        return is_not_here and self.code == other.code != ""

    def __str__(self) -> str:
        name = next((name for name in self.repository if "/" in name), "".join(self.repository)[:7])
        return f"{self.folder} (repository {name})" if name else self.folder


def stored_origin(study: str, store: Store) -> CodeOrigin | None:
    """Return the latest recorded origin of a study; None if there is none."""
    origins = (CodeOrigin.from_json(tags.get(CodeOrigin.TAG, "")) for tags, _ in store.origins(study))
    return next(filter(None, origins), None)


def check_origin(loaded: LoadedStudy, options: Options, store: Store) -> bool:
    """Raise RayparError if the store has a study of this name whose code comes from elsewhere.

    Returns:
        True: it came from elsewhere, but the same code or the user shows that it is the same study.
    """
    name = loaded.study.name
    if (stored := stored_origin(name, store)) is None:
        return False
    here = CodeOrigin.of(loaded.path, options.tracking_uri, loaded.code)
    if here.is_of(stored):
        return False
    if options.has_moved or here.may_have_been(stored):
        return True
    there = f"{stored} on {stored.host}" if stored.host != here.host else str(stored)
    problem = f"the store has a study `{name}` of another project: its code is in {there}, not in {here}"
    other_name = re.sub(r"[^\w .-]", "_", f"{Path(here.folder).name}_{name}").lstrip(" .-")
    ways = [f'choose another name, Study(name="{other_name}")']
    if not os.environ.get(ORIGIN_VARIABLE):
        ways.append(f"or another store: --tracking-uri sqlite:///{shlex.quote(here.folder)}/mlflow.db")
        if options.is_resumable:
            words = ["raypar", "store", "resume", name, "--file", str(loaded.path)]
            if options.tracking_uri != default_tracking_uri(options.project_dir):
                words += ["--tracking-uri", masked(options.tracking_uri)]
            ways[-1] += f"; if its folder has moved: `{shlex.join(words)}`"
    raise RayparError(masked(problem), hint=", ".join(ways))
