"""Runs in a store and their files, read by SQL from an embedded database or else through MLflow's client.

SQL needs no import of MLflow, which takes a second. It reads databases with a schema in `client.SCHEMAS`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from raypar.errors import StoreError
from raypar.scratch import scratch_folder
from raypar.track.check import check_readable
from raypar.track.client import SCHEMAS, artifact_root, connect, local_folder, reachable, sqlite_path, tag_filter

# A writer locks the database for milliseconds. After this time MLflow is asked, which waits longer.
LOCK_TIMEOUT_S = 2.0
_WORKSPACE = "default"
_WORKSPACES_VARIABLE = "MLFLOW_ENABLE_WORKSPACES"
_PAGE_SIZE = 250  # thousands at once would exceed the time limit of a request

_NO_EXPERIMENTS: dict[str, str] = {}
_NO_RUNS: Iterable[StoredRun] = ()

T = TypeVar("T")


class StoredRun(NamedTuple):
    """Run as read from a store; its status is RUNNING until it is complete."""

    run_id: str
    artifact_uri: str
    start_ms: int
    status: str
    tags: Mapping[str, str]


class OtherRun(NamedTuple):
    """Run that raypar may not have made; its times are Unix time, and its metrics the last values."""

    run_id: str
    name: str
    status: str
    started_at: float
    ended_at: float | None
    params: Mapping[str, str]
    metrics: Mapping[str, float]


class Unfamiliar(Exception):
    """The database can't be read by SQL: other schema, locked, damaged, or with workspaces."""


class EmbeddedRuns:
    """Runs of the database of a ``sqlite:`` URI. Every method reads in one transaction and never writes.

    Raises:
        Unfamiliar: by every method, if MLflow has to be asked instead.
    """

    def __init__(self, tracking_uri: str) -> None:
        parts = urlsplit(tracking_uri)
        plain = parts.scheme == "sqlite" and not (parts.netloc or parts.query or parts.fragment)
        self._path: Path | None = sqlite_path(tracking_uri) if plain else None

    def experiments(self) -> dict[str, str]:
        """Return the ids of experiments that are not deleted, by study name."""
        query = """
            SELECT t.value, e.experiment_id FROM experiments AS e JOIN experiment_tags AS t USING (experiment_id)
            WHERE t.key = 'raypar.study' AND t.value != '' AND e.lifecycle_stage = 'active'
            ORDER BY e.creation_time DESC, e.experiment_id
        """
        with self._opened() as database:
            return {str(study): str(experiment_id) for study, experiment_id in database.execute(query)}

    def experiment_id(self, name: str) -> str | None:
        """Return the id of the experiment of this name; None if missing or deleted."""
        query = "SELECT experiment_id FROM experiments WHERE name = ? AND lifecycle_stage = 'active'"
        with self._opened() as database:
            row = database.execute(query, [name]).fetchone()
        return str(row[0]) if row else None

    def search(self, experiment_ids: Sequence[str], tags: Mapping[str, str]) -> list[StoredRun]:
        """Return the runs with all of these tags, the latest first, without deleted ones."""
        where = [f"experiment_id IN ({', '.join('?' * len(experiment_ids))})", "lifecycle_stage = 'active'"]
        values: list[object] = [int(experiment_id) for experiment_id in experiment_ids]
        for pair in tags.items():
            where.append(
                "EXISTS (SELECT 1 FROM tags AS t WHERE t.run_uuid = runs.run_uuid AND t.key = ? AND t.value = ?)"
            )
            values += pair
        matching = f"FROM runs WHERE {' AND '.join(where)}"
        with self._opened() as database:
            order = "ORDER BY start_time IS NULL, start_time DESC, run_uuid"
            columns = "run_uuid, artifact_uri, start_time, status"
            rows = database.execute(f"SELECT {columns} {matching} {order}", values).fetchall()
            tags_of: dict[str, dict[str, str]] = {row[0]: {} for row in rows}
            of_those = f"SELECT run_uuid, key, value FROM tags WHERE run_uuid IN (SELECT run_uuid {matching})"
            for run_id, key, value in database.execute(of_those, values):
                tags_of[run_id][key] = value
        return [StoredRun(run_id, uri or "", ms or 0, status, tags_of[run_id]) for run_id, uri, ms, status in rows]

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Open the database in a read transaction."""
        if self._path is None or os.environ.get(_WORKSPACES_VARIABLE, "").lower() not in ("", "false", "0"):
            raise Unfamiliar
        # Read-only, so that SQLite neither creates nor changes the file.
        address = f"{self._path.absolute().as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(address, uri=True, timeout=LOCK_TIMEOUT_S, isolation_level=None)) as database:
                database.execute("BEGIN")
                versions = [version for (version,) in database.execute("SELECT version_num FROM alembic_version")]
                elsewhere = "SELECT 1 FROM experiments WHERE workspace != ? LIMIT 1"
                if len(versions) != 1 or versions[0] not in SCHEMAS.values():
                    raise Unfamiliar
                if database.execute(elsewhere, [_WORKSPACE]).fetchone():
                    raise Unfamiliar
                yield database
        except sqlite3.Error as error:
            raise Unfamiliar from error


class MlflowRuns:
    """Runs of any store, read through MLflow's client, which connects on first use. Methods raise StoreError."""

    def __init__(self, tracking_uri: str) -> None:
        self._tracking_uri = tracking_uri

    @cached_property
    def client(self) -> Any:
        with reachable(self._tracking_uri):
            return connect(self._tracking_uri)

    def experiments(self) -> dict[str, str]:
        pages = self._pages(self.client.search_experiments, filter_string="tags.`raypar.study` != ''", max_results=1000)
        return {e.tags["raypar.study"]: str(e.experiment_id) for e in pages}

    def experiment_id(self, name: str) -> str | None:
        with reachable(self._tracking_uri):
            experiment = self.client.get_experiment_by_name(name)
        is_active = experiment is not None and experiment.lifecycle_stage == "active"
        return str(experiment.experiment_id) if is_active else None

    def search(self, experiment_ids: Sequence[str], tags: Mapping[str, str]) -> Iterator[StoredRun]:
        pages = self._pages(
            self.client.search_runs,
            experiment_ids=list(experiment_ids),
            filter_string=tag_filter(tags),
            max_results=_PAGE_SIZE,
            order_by=["attributes.start_time DESC"],
        )
        infos = ((run.info, run.data.tags) for run in pages)
        return (StoredRun(i.run_id, i.artifact_uri, i.start_time or 0, i.status, tags) for i, tags in infos)

    def experiment_names(self) -> list[str]:
        """Return the names of all experiments, also of those without a study."""
        return [str(e.name) for e in self._pages(self.client.search_experiments, max_results=1000)]

    def runs_of_others(self, experiment_id: str) -> Iterator[OtherRun]:
        """Yield the runs of an experiment, which need not be raypar's, the oldest first, without deleted ones."""
        order = ["attributes.start_time ASC"]
        search = self.client.search_runs
        for run in self._pages(search, experiment_ids=[experiment_id], max_results=_PAGE_SIZE, order_by=order):
            info, data = run.info, run.data
            start_s, end_s = (info.start_time or 0) / 1000, info.end_time and info.end_time / 1000
            name = info.run_name or info.run_id
            yield OtherRun(info.run_id, name, info.status, start_s, end_s, dict(data.params), dict(data.metrics))

    def _pages(self, search: Callable[..., Any], **arguments: Any) -> Iterator[Any]:
        """Yield the results of an MLflow search, fetching each page only when it is needed."""
        token = None
        while True:
            with reachable(self._tracking_uri):
                page = search(**arguments, page_token=token)
            yield from page
            token = page.token
            if not token:
                return


class StoredRuns:
    """Runs and files of a store. Methods raise StoreError; a missing embedded database is empty."""

    def __init__(self, tracking_uri: str, project_dir: Path) -> None:
        self._tracking_uri, self._project_dir = tracking_uri, project_dir
        self._embedded, self._mlflow = EmbeddedRuns(tracking_uri), MlflowRuns(tracking_uri)

    def experiments(self) -> dict[str, str]:
        """Return the ids of experiments that are not deleted, by study name."""
        return self._ask(lambda runs: runs.experiments(), _NO_EXPERIMENTS)

    def experiment_id(self, name: str) -> str | None:
        """Return the id of the experiment of this name; None if missing or deleted."""
        return self._ask(lambda runs: runs.experiment_id(name), None)

    def search(self, experiment_ids: Sequence[str], **tags: str) -> Iterable[StoredRun]:
        """Return the runs with these ``raypar.`` tags, the latest first, without deleted ones."""
        if not experiment_ids:
            return ()
        full_tags = {f"raypar.{key}": value for key, value in tags.items()}
        return self._ask(lambda runs: runs.search(experiment_ids, full_tags), _NO_RUNS)

    def _ask(self, question: Callable[[EmbeddedRuns | MlflowRuns], T], empty: T) -> T:
        try:
            return question(self._embedded)
        except Unfamiliar:
            return question(self._mlflow) if check_readable(self._tracking_uri) else empty

    def text(self, run: StoredRun, name: str) -> str | None:
        """Return the text of a run's file; None if missing."""
        is_local = local_folder(run.artifact_uri) is not None
        with nullcontext(Path()) if is_local else scratch_folder() as folder:
            path = self.path(run, name, folder)
            try:
                return path.read_text(encoding="utf-8") if path else None
            except (OSError, ValueError):
                return None

    def path(self, run: StoredRun, name: str, to: Path) -> Path | None:
        """Return a file or folder of a run, downloaded to `to` if it is not on this machine; None if that fails."""
        folder = local_folder(run.artifact_uri)
        if folder is not None:
            return self._moved(folder) / name
        try:
            to.mkdir(parents=True, exist_ok=True)
            with reachable(self._tracking_uri):
                return Path(self._mlflow.client.download_artifacts(run.run_id, name, str(to)))
        except (OSError, ValueError, StoreError):
            return None

    def _moved(self, folder: Path) -> Path:
        """Return a run's folder, even if the project's folder has been moved."""
        root = artifact_root(self._tracking_uri, self._project_dir)
        if folder.exists() or root is None or root.name not in folder.parts:
            return folder
        at = len(folder.parts) - folder.parts[::-1].index(root.name)
        return root.joinpath(*folder.parts[at:])
