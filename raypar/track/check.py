"""Whether results can be kept, asked before a study runs for hours: quickly, and without making anything."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from raypar.errors import StoreError
from raypar.masking import masked
from raypar.track.client import (
    SERVERS,
    Rejected,
    Unreachable,
    artifact_root,
    connect,
    import_mlflow,
    sqlite_path,
    store_errors,
    unreachable,
)
from raypar.track.journal import spool_dir

EMBEDDED = ("sqlite",)
DATABASES = ("postgresql", "mysql", "mssql")


def check_writable(tracking_uri: str, project_dir: Path) -> None:
    """Raises StoreError, with a way out, where results could not be journalled or not be stored."""
    scheme = urlsplit(tracking_uri).scheme.partition("+")[0]
    if scheme not in (*EMBEDDED, *SERVERS, *DATABASES):
        raise _bad_scheme(tracking_uri, scheme)
    _check_folder(spool_dir(project_dir))
    root = artifact_root(tracking_uri, project_dir)
    if root is not None:
        _check_folder(root)
    if scheme in EMBEDDED:
        database = sqlite_path(tracking_uri)
        if database is None:
            raise StoreError(
                f"{tracking_uri} is a database in memory, gone with the process",
                hint="give it a file: sqlite:////absolute/path/mlflow.db",
            )
        _check_folder(database.absolute().parent)
        if database.exists() and database.stat().st_size:
            _check_database(database, tracking_uri)
    else:
        try:
            client = connect(tracking_uri)
            with store_errors():
                client.search_experiments(max_results=1)
        except (Unreachable, Rejected) as e:
            raise unreachable(tracking_uri, e) from e


def _bad_scheme(tracking_uri: str, scheme: str) -> StoreError:
    if scheme in ("", "file"):
        return StoreError(
            f"{tracking_uri!r} is a folder, and MLflow keeps no results in folders any more",
            hint="use sqlite:////absolute/path/mlflow.db, or the http:// address of an MLflow server",
        )
    return StoreError(
        f"{masked(tracking_uri)!r} is no tracking store that MLflow knows",
        hint="use sqlite:////absolute/path/mlflow.db, or the http:// address of an MLflow server",
    )


def _check_folder(folder: Path) -> None:
    """Tries the nearest folder above that exists; asking for permission bits would not see a read-only disk."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"\n" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise StoreError(
            f"Results can't be written to {folder}: {e.strerror or e}",
            hint="run in a folder that you may write to and that has space left, or choose one with --tracking-uri",
        ) from e


def check_readable(tracking_uri: str) -> None:
    """Asks before MLflow does, which would make its tables in any database, or half of them in one of another version.

    Raises:
        StoreError: there can be no such store, or what is there is no database of the installed MLflow.
    """
    scheme = urlsplit(tracking_uri).scheme.partition("+")[0]
    if scheme not in (*EMBEDDED, *SERVERS, *DATABASES):
        raise _bad_scheme(tracking_uri, scheme)
    database = sqlite_path(tracking_uri)
    if scheme not in EMBEDDED or database is None:
        return
    with _reached(
        database, "read", "end whatever locks it, put a copy in its place, or choose another one"
    ) as connection:
        found, tables = _versions_and_tables(connection)
    _check_schema(database, tracking_uri, found, tables)


@contextmanager
def _reached(database: Path, what: Literal["read", "written"], way_out: str) -> Iterator[sqlite3.Connection]:
    """A connection that says what can't be done with the database, where something can't."""
    mode = "ro" if what == "read" else "rwc"
    try:
        uri = f"{database.absolute().as_uri()}?mode={mode}"
        with closing(sqlite3.connect(uri, uri=True, timeout=2, isolation_level=None)) as connection:
            yield connection
    except sqlite3.Error as e:
        raise StoreError(f"The database {database} can't be {what}: {e}", hint=f"{way_out} with --tracking-uri") from e


def _versions_and_tables(connection: sqlite3.Connection) -> tuple[list[str], set[str]]:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    versions = connection.execute("SELECT version_num FROM alembic_version") if _VERSIONS in tables else []
    return [str(version) for (version,) in versions], tables


def _check_database(database: Path, tracking_uri: str) -> None:
    with _reached(database, "written", "end whatever locks it, or choose another one") as connection:
        found, tables = _versions_and_tables(connection)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    _check_schema(database, tracking_uri, found, tables)


def _check_schema(database: Path, tracking_uri: str, found: list[str], tables: set[str]) -> None:
    if not found:
        if tables - {_VERSIONS}:
            raise StoreError(
                f"The database {database} is not one of MLflow's",
                hint="choose another file with --tracking-uri sqlite:////absolute/path/mlflow.db",
            )
        return
    try:
        with store_errors():
            ours, known = _schema_versions()
    except (Unreachable, Rejected) as e:
        raise unreachable(tracking_uri, e) from e
    if found == [ours]:
        return
    if found[0] in known:
        raise StoreError(
            f"The database {database} was made by an older MLflow than the one installed",
            hint=f"back it up, then: mlflow db upgrade {masked(tracking_uri)}",
        )
    raise StoreError(
        f"The database {database} was made by a newer MLflow than the one installed (its schema: {found[0]})",
        hint="update MLflow (pip install -U mlflow); if the database is still too old or new for it then: "
        f"mlflow db upgrade {masked(tracking_uri)}",
    )


_VERSIONS = "alembic_version"


def _schema_versions() -> tuple[str, set[str]]:
    """The schema version of the installed MLflow, and all that it knows how to upgrade."""
    mlflow = import_mlflow()
    from alembic.script import ScriptDirectory

    folder = Path(mlflow.__file__).parent / "store" / "db_migrations"
    scripts = ScriptDirectory(str(folder))
    return str(scripts.get_current_head()), {revision.revision for revision in scripts.walk_revisions()}
