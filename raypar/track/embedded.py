"""An embedded MLflow database, read with SQL: importing MLflow alone takes longer than what is asked here.

Reads five tables of the schemas that it knows, as MLflow's own searches do, and never writes. Everything else is
`Unfamiliar`, and then to be asked for through MLflow.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from raypar.track.client import sqlite_path
from raypar.track.runs import StoredRun

# Alembic's versions in which experiments, runs and their tags are as they are read here.
SCHEMAS = frozenset({"dc11669786a5"})  # MLflow 3.17
# A writer holds the database for milliseconds; MLflow, which is asked then, waits longer.
LOCK_TIMEOUT_S = 2.0
_WORKSPACE = "default"
_WORKSPACES_VARIABLE = "MLFLOW_ENABLE_WORKSPACES"


class Unfamiliar(Exception):
    """The database is not one that can be read here: another schema, locked, damaged, with workspaces."""


class EmbeddedRuns:
    """The database of a ``sqlite:`` URI. Every method opens it, asks in one transaction, and closes it.

    Raises:
        Unfamiliar: by every method, where MLflow is to be asked instead.
    """

    def __init__(self, tracking_uri: str) -> None:
        parts = urlsplit(tracking_uri)
        plain = parts.scheme == "sqlite" and not (parts.netloc or parts.query or parts.fragment)
        self._path: Path | None = sqlite_path(tracking_uri) if plain else None

    def experiments(self) -> dict[str, str]:
        """Study name to experiment id; deleted ones are not among them."""
        query = """
            SELECT t.value, e.experiment_id FROM experiments AS e JOIN experiment_tags AS t USING (experiment_id)
            WHERE t.key = 'raypar.study' AND t.value != '' AND e.lifecycle_stage = 'active'
            ORDER BY e.creation_time DESC, e.experiment_id
        """
        with self._opened() as database:
            return {str(study): str(experiment_id) for study, experiment_id in database.execute(query)}

    def experiment_id(self, name: str) -> str | None:
        """None if there is none of this name, or it is deleted."""
        query = "SELECT experiment_id FROM experiments WHERE name = ? AND lifecycle_stage = 'active'"
        with self._opened() as database:
            found = database.execute(query, [name]).fetchone()
        return str(found[0]) if found else None

    def search(self, experiment_ids: Sequence[str], tags: Mapping[str, str]) -> list[StoredRun]:
        """The runs that have all of the tags, the latest first; deleted ones are not among them."""
        where = [f"experiment_id IN ({', '.join('?' * len(experiment_ids))})", "lifecycle_stage = 'active'"]
        values: list[object] = [int(experiment_id) for experiment_id in experiment_ids]
        for key, value in tags.items():
            where.append(
                "EXISTS (SELECT 1 FROM tags WHERE tags.run_uuid = runs.run_uuid AND tags.key = ? AND tags.value = ?)"
            )
            values += [key, value]
        wanted = f"FROM runs WHERE {' AND '.join(where)}"
        with self._opened() as database:
            order = "ORDER BY start_time IS NULL, start_time DESC, run_uuid"
            runs = database.execute(f"SELECT run_uuid, artifact_uri, start_time {wanted} {order}", values).fetchall()
            own: dict[str, dict[str, str]] = {run_id: {} for run_id, _, _ in runs}
            of_those = f"SELECT run_uuid, key, value FROM tags WHERE run_uuid IN (SELECT run_uuid {wanted})"
            for run_id, key, value in database.execute(of_those, values):
                own[run_id][key] = value
        return [StoredRun(run_id, uri or "", start_ms or 0, own[run_id]) for run_id, uri, start_ms in runs]

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """The database for reading, as it stands now, however long that takes."""
        if self._path is None or os.environ.get(_WORKSPACES_VARIABLE, "").lower() not in ("", "false", "0"):
            raise Unfamiliar
        # MLflow opens the same path: SQLite's URI keeps it from making the file, and from changing it.
        address = f"{self._path.absolute().as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(address, uri=True, timeout=LOCK_TIMEOUT_S, isolation_level=None)) as database:
                database.execute("BEGIN")
                versions = [version for (version,) in database.execute("SELECT version_num FROM alembic_version")]
                if len(versions) != 1 or versions[0] not in SCHEMAS:
                    raise Unfamiliar
                elsewhere = "SELECT 1 FROM experiments WHERE workspace != ? LIMIT 1"
                if database.execute(elsewhere, [_WORKSPACE]).fetchone():
                    raise Unfamiliar
                yield database
        except sqlite3.Error as error:
            raise Unfamiliar from error
