"""Quick checks of a store before a study runs for hours. They create nothing."""

from __future__ import annotations

import os
import shlex
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from raypar.errors import StoreError, shortened
from raypar.masking import masked
from raypar.track.client import (
    SERVERS,
    artifact_root,
    connect,
    familiar_schema,
    reachable,
    schema_version,
    schema_versions,
    sqlite_path,
    table_names,
)
from raypar.track.journal import journal_dir

EMBEDDED = "sqlite"
DATABASES = ("postgresql", "mysql", "mssql")
ADDRESS_HINT = "use sqlite:////absolute/path/mlflow.db, or the http:// address of an MLflow server"


def check_writable(tracking_uri: str, project_dir: Path) -> None:
    """Check that results can be journalled and stored. Raises StoreError with the fix."""
    scheme = check_address(tracking_uri)
    for folder in filter(None, (journal_dir(project_dir), artifact_root(tracking_uri, project_dir))):
        _check_folder(folder)
    if scheme == EMBEDDED:
        database = sqlite_path(tracking_uri)
        if database is None:
            problem = f"{tracking_uri} is a database in memory, which is lost when the process ends"
            raise StoreError(problem, hint="use a file: sqlite:////absolute/path/mlflow.db")
        _check_folder(database.absolute().parent)
        if database.exists():
            _check_schema(database, tracking_uri, "written")
    else:
        with reachable(tracking_uri):
            connect(tracking_uri).search_experiments(max_results=1)


def check_readable(tracking_uri: str) -> bool:
    """Return False if there is nothing to read yet, in which case MLflow would create or half-upgrade a database.

    Raises StoreError for an invalid address, or a database of another version of MLflow.
    """
    scheme, database = check_address(tracking_uri), sqlite_path(tracking_uri)
    if scheme != EMBEDDED or database is None:
        return True
    return database.exists() and _check_schema(database, tracking_uri, "read")


def check_form(tracking_uri: str) -> None:
    """Raise StoreError for a malformed address, without looking at files or connecting."""
    wrong, hint = "", ADDRESS_HINT
    try:
        parts = urlsplit(tracking_uri)
        has_host, _ = bool(parts.hostname), parts.port
        if parts.scheme in SERVERS and not tracking_uri.isprintable():
            wrong = "invalid character"
        elif parts.scheme in ("http", "https") and not has_host:
            wrong = "the host is missing"
        elif parts.scheme == EMBEDDED and parts.netloc:
            wrong = "two slashes"
            hint = f"write three for a path: {masked(tracking_uri.replace('://', ':///', 1))}"
    except ValueError as error:  # brackets, or an invalid port
        wrong = str(error)
    if wrong:
        raise StoreError(
            f"{shortened(masked(tracking_uri))} is not the address of a tracking store: {wrong}", hint=hint
        )


def check_address(tracking_uri: str) -> str:
    """Return the scheme of a store's address. Raises StoreError for an invalid address or a missing folder."""
    check_form(tracking_uri)
    scheme = urlsplit(tracking_uri).scheme.partition("+")[0]
    if scheme in (EMBEDDED, *SERVERS, *DATABASES):
        database = sqlite_path(tracking_uri)
        if database is not None and not os.path.lexists(folder := database.absolute().parent):
            problem = f"The tracking store {tracking_uri} can't be used: no such folder: {folder}"
            raise StoreError(
                problem, hint=f"correct the address, or create the folder: mkdir -p {shlex.quote(str(folder))}"
            )
        if database is not None:
            _check_link(database)
        return scheme
    hint = ADDRESS_HINT
    if scheme in ("", "file"):
        problem = f"{tracking_uri!r} is a folder; MLflow no longer stores results in folders"
    else:
        problem = f"{masked(tracking_uri)!r} is not a tracking store that MLflow supports"
    raise StoreError(problem, hint=hint)


def _check_link(path: Path) -> None:
    """Raise StoreError for a dangling link, whose target's disk may be missing, rather than replace it."""
    if path.is_symlink() and not path.exists():
        raise StoreError(
            f"{path.absolute()} is a link to {path.readlink()}, which does not exist",
            hint="correct or remove the link, or choose another store with --tracking-uri",
        )


def _check_folder(folder: Path) -> None:
    """Write to the nearest existing parent folder: permission bits don't show a read-only or full disk."""
    for path in (folder, *folder.parents):
        _check_link(path)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\n" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise StoreError(
            f"Results can't be written to {folder}: {e.strerror or e}",
            hint="run in a writable folder with free space, or choose another store with --tracking-uri",
        ) from e


def _check_schema(database: Path, tracking_uri: str, purpose: Literal["read", "written"]) -> bool:
    """Return False for an empty database. Raises StoreError for a schema other than the installed MLflow's."""
    # Not read-only: SQLite has to roll back the transaction of a killed process.
    uri = f"{database.absolute().as_uri()}?mode=rw"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=2, isolation_level=None)) as connection:
            versions, is_empty = schema_version(connection), not table_names(connection)
            if purpose == "written":
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
    except sqlite3.Error as e:
        fix = "end the process that locks it" + ", replace it with a copy" * (purpose == "read")
        hint = f"{fix}, or choose another one with --tracking-uri"
        raise StoreError(f"The database {database} can't be {purpose}: {e}", hint=hint) from e
    if is_empty:
        return False
    if not versions:
        hint = "choose another file with --tracking-uri sqlite:////absolute/path/mlflow.db"
        raise StoreError(f"The database {database} is not a database of MLflow", hint=hint)
    if versions == [familiar_schema()]:
        return True
    with reachable(tracking_uri):
        installed, upgradable = schema_versions()
    if versions == [installed]:
        return True
    if versions[0] in upgradable:
        age, hint = "an older MLflow than the one installed", "back it up, then run"
    else:
        age = f"a newer MLflow than the one installed (its schema: {versions[0]})"
        hint = "update MLflow (pip install -U mlflow); if the versions still differ, run"
    hint = f"{hint} mlflow db upgrade {masked(tracking_uri)}"
    raise StoreError(f"The database {database} was made by {age}", hint=hint)
