"""Stored results of all executions of a study, from MLflow and from the journal.

Reads five tables of the schemas that it knows, as MLflow's own searches do, and never writes. Everything else is
`Unfamiliar`, and then to be asked for through MLflow.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raypar.study.trial import TrialResult, latest
from raypar.track import journal as spool
from raypar.track.check import check_readable, check_writable
from raypar.track.client import (
    Rejected,
    Unreachable,
    artifact_root,
    connect,
    local_folder,
    sqlite_path,
    store_errors,
    unreachable,
)
from raypar.track.names import experiment_name, join_tag
from raypar.track.runs import RESULT_FILE, SOURCE_FILE, StoredRun, result_from_tags, without_step_times
from raypar.train.job import MODEL_FOLDER

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


_PAGE_SIZE = 250  # a server that is asked for thousands at once takes longer than a request may


class RunReader:
    """Every method raises StoreError where the store can't be read; an embedded one that is not there yet is empty."""

    def __init__(self, tracking_uri: str, project_dir: Path) -> None:
        self._tracking_uri = tracking_uri
        self._project_dir = project_dir
        self._embedded = EmbeddedRuns(tracking_uri)
        self._connection: Any = None

    def experiments(self) -> dict[str, str]:
        """Study name to experiment id; deleted ones are not among them."""
        if self._is_missing():
            return {}
        try:
            return self._embedded.experiments()
        except Unfamiliar:
            return dict(self._experiments_by_mlflow())

    def experiment_id(self, study: str) -> str | None:
        """None if there is none, or it is deleted."""
        if self._is_missing():
            return None
        name = experiment_name(study)
        try:
            return self._embedded.experiment_id(name)
        except Unfamiliar:
            with self._told():
                found = self._client().get_experiment_by_name(name)
            return str(found.experiment_id) if found is not None and found.lifecycle_stage == "active" else None

    def runs(self, study: str, **tags: str) -> Iterable[StoredRun]:
        """The study's runs with these ``raypar.`` tags, the latest first; deleted ones are not among them."""
        experiment_id = self.experiment_id(study)
        return self.search([experiment_id] if experiment_id else [], **tags)

    def search(self, experiment_ids: Sequence[str], **tags: str) -> Iterable[StoredRun]:
        """The experiments' runs with these ``raypar.`` tags, the latest first; deleted ones are not among them."""
        if not experiment_ids or self._is_missing():
            return ()
        wanted = {f"raypar.{key}": value for key, value in tags.items()}
        try:
            return self._embedded.search(experiment_ids, wanted)
        except Unfamiliar:
            return self._search_by_mlflow(experiment_ids, wanted)

    def _experiments_by_mlflow(self) -> Iterator[tuple[str, str]]:
        client, token = self._client(), None
        while True:
            with self._told():
                page = client.search_experiments(
                    filter_string="tags.`raypar.study` != ''", max_results=1000, page_token=token
                )
            for experiment in page:
                yield experiment.tags["raypar.study"], str(experiment.experiment_id)
            token = page.token
            if not token:
                return

    def _search_by_mlflow(self, experiment_ids: Sequence[str], tags: Mapping[str, str]) -> Iterator[StoredRun]:
        client, token = self._client(), None
        while True:
            with self._told():
                page = client.search_runs(
                    list(experiment_ids),
                    " AND ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items()),
                    max_results=_PAGE_SIZE,
                    order_by=["attributes.start_time DESC"],
                    page_token=token,
                )
            for run in page:
                yield StoredRun(run.info.run_id, run.info.artifact_uri, run.info.start_time or 0, run.data.tags)
            token = page.token
            if not token:
                return

    def read_file(self, run: StoredRun, name: str) -> str | None:
        """A text among a run's artifacts; None if it isn't there."""
        folder = local_folder(run.artifact_uri)
        try:
            if folder is not None:
                return (self._moved(folder) / name).read_text(encoding="utf-8")
            with tempfile.TemporaryDirectory() as there, store_errors():
                path = self._client().download_artifacts(run.run_id, name, there)
                return Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError, Unreachable, Rejected):
            return None

    def read_folder(self, run: StoredRun, name: str, to: Path) -> Path | None:
        """A folder among a run's artifacts, brought to `to` where it is not on this machine; None if it isn't there."""
        folder = local_folder(run.artifact_uri)
        try:
            if folder is not None:
                here = self._moved(folder) / name
                return here if here.is_dir() else None
            to.mkdir(parents=True, exist_ok=True)
            with store_errors():
                path = Path(self._client().download_artifacts(run.run_id, name, str(to)))
            return path if path.is_dir() else None
        except (OSError, ValueError, Unreachable, Rejected):
            return None

    def _moved(self, folder: Path) -> Path:
        """Where a run's files are if the project's folder was moved as a whole since."""
        root = artifact_root(self._tracking_uri, self._project_dir)
        if folder.exists() or root is None or root.name not in folder.parts:
            return folder
        at = len(folder.parts) - folder.parts[::-1].index(root.name)
        return root.joinpath(*folder.parts[at:])

    def _is_missing(self) -> bool:
        """Whether the embedded database is not there yet, or empty: reading should not make one."""
        database = sqlite_path(self._tracking_uri)
        return database is not None and (not database.exists() or (database.is_file() and not database.stat().st_size))

    def _client(self) -> Any:
        if self._connection is None:
            check_readable(self._tracking_uri)
            with self._told():
                self._connection = connect(self._tracking_uri)
        return self._connection

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            with store_errors():
                yield
        except (Unreachable, Rejected) as e:
            raise unreachable(self._tracking_uri, e) from e


log = logging.getLogger(__name__)


def default_tracking_uri(project_dir: Path) -> str:
    """``MLFLOW_TRACKING_URI`` if it is set, else the embedded database ``mlflow.db`` of the folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{project_dir.absolute()}/mlflow.db"


@dataclass(frozen=True)
class StudySummary:
    """A study at a glance; the counts are sums over its executions.

    Attributes:
        last_used_at: Unix time.
        experiment_id: MLflow's; empty while the study is in a spool only.
    """

    name: str
    num_executions: int
    num_finished: int
    num_failed: int
    last_used_at: float
    experiment_id: str = ""


class Store:
    """Reads one store, and the spools of one project folder that are meant for it. Connects when first asked.

    All methods raise StoreError where the store can't be read.
    """

    def __init__(self, tracking_uri: str, project_dir: Path) -> None:
        self._tracking_uri = tracking_uri
        self._project_dir = project_dir
        self._reader = RunReader(tracking_uri, project_dir)

    def results(self, study_name: str) -> tuple[TrialResult, ...]:
        """One result per identity over all executions, oldest first, without step times.

        It is the latest complete one, or the latest failed one where none is complete.
        """
        # The spool before the store: what is uploaded in between is then seen twice, not missed.
        pending = self._pending_results(study_name)
        found: list[TrialResult] = []
        for run in self._reader.runs(study_name, kind="trial"):
            result = result_from_tags(run.tags) or self._result_from_file(run)
            if result is None:
                log.warning("the run %s holds no result that can be read, skipped", run.run_id)
            else:
                found.append(result)
        return latest([without_step_times(result) for result in (*found, *pending)])

    def step_times(self, study_name: str, identity: str) -> tuple[tuple[float, ...], ...]:
        """``[rank][step]`` of the trial that `results` gives for this identity; empty if there is none."""
        found = [result for result in self._pending_results(study_name) if result.spec.identity == identity]
        if identity.isalnum():
            for run in self._reader.runs(study_name, identity=identity):
                if (result := self._result_from_file(run)) is not None:
                    found.insert(0, result)
        best = latest(found)
        return best[0].step_times_s if best else ()

    def model_folder(self, study_name: str, identity: str) -> Path | None:
        """A folder with the model that the trial has kept; None where it has none."""
        for record in self._pending():
            folder = spool.kept_folder(self._project_dir, record.get("artifact_dir"))
            if record["kind"] == "trial" and record["study"] == study_name and folder is not None:
                result = TrialResult.from_json(json.dumps(record["result"]))
                kept = folder / MODEL_FOLDER
                if result.spec.identity == identity and kept.is_dir():
                    return kept
        if identity.isalnum():
            to = self._project_dir / ".raypar" / "models" / identity
            for run in self._reader.runs(study_name, identity=identity):
                if (folder := self._reader.read_folder(run, MODEL_FOLDER, to)) is not None:
                    return folder
        return None

    def studies(self) -> tuple[StudySummary, ...]:
        """Every study, the last used first. Looks at executions only, not at trials."""
        pending = list(self._pending())
        experiment_ids = self._reader.experiments()
        executions: dict[str, _Execution] = {}
        for run in self._reader.search(list(experiment_ids.values()), kind="execution"):
            tags = run.tags
            executions[tags.get("raypar.uid", run.run_id)] = _Execution(
                tags.get("raypar.study", ""),
                int(tags.get("raypar.num_finished", 0)),
                int(tags.get("raypar.num_failed", 0)),
                float(tags.get("raypar.last_used_at", run.start_ms / 1000)),
            )
        for record in pending:  # later than what the store has of the same execution
            totals = record["totals"]
            executions[record["execution"]] = _Execution(
                record["study"], totals["num_finished"], totals["num_failed"], record["at"]
            )
        by_study: dict[str, list[_Execution]] = {}
        for execution in executions.values():
            by_study.setdefault(execution.study, []).append(execution)
        summaries = [
            StudySummary(
                name=name,
                num_executions=len(own),
                num_finished=sum(e.num_finished for e in own),
                num_failed=sum(e.num_failed for e in own),
                last_used_at=max(e.last_used_at for e in own),
                experiment_id=experiment_ids.get(name, ""),
            )
            for name, own in by_study.items()
        ]
        return tuple(sorted(summaries, key=lambda s: (-s.last_used_at, s.name)))

    def study_source(self, study_name: str) -> str | None:
        """The text of the study's file as of its latest execution; None if none is kept."""
        if record := self._pending_execution(study_name):
            return str(record["study_source"]) or None
        for run in self._reader.runs(study_name, kind="execution"):
            return self._reader.read_file(run, SOURCE_FILE)
        return None

    def artifact(self, study_name: str, name: str) -> str | None:
        """A text that the latest execution with such a one added to its run; None if none has."""
        texts = [
            r["text"]
            for r in self._pending()
            if r["kind"] == "artifact" and r["study"] == study_name and r["path"] == name
        ]
        if texts:
            return str(texts[-1])
        for run in self._reader.runs(study_name, kind="execution"):
            if (text := self._reader.read_file(run, name)) is not None:
                return text
        return None

    def question(self, study_name: str) -> dict[str, Any]:
        """What the latest execution stored as JSON under the tag ``raypar.question``; empty if nothing."""
        return self._execution_json(study_name, "raypar.question")

    def origin(self, study_name: str) -> tuple[dict[str, str], str]:
        """Where the latest execution's numbers come from: its tags, and what the study asks, for people."""
        if record := self._pending_execution(study_name):
            return dict(record["tags"]), str(record["description"])
        for run in self._reader.runs(study_name, kind="execution"):
            tags = {key: join_tag(run.tags, key) or "" for key in run.tags}
            return tags, tags.get("mlflow.note.content", "")
        return {}, ""

    def resume_info(self, study_name: str) -> dict[str, Any]:
        """What the latest execution stored under the tag ``raypar.resume``: its file and flags; empty if nothing."""
        return self._execution_json(study_name, "raypar.resume")

    def experiment_id(self, study_name: str) -> str | None:
        """MLflow's id of the study's experiment, for links; None if there is none."""
        return self._reader.experiment_id(study_name)

    def check_writable(self) -> None:
        """See `raypar.track.check.check_writable`."""
        check_writable(self._tracking_uri, self._project_dir)

    def _execution_json(self, study_name: str, tag: str) -> dict[str, Any]:
        if record := self._pending_execution(study_name):
            return _json_object(record["tags"].get(tag))
        for run in self._reader.runs(study_name, kind="execution"):
            return _json_object(join_tag(run.tags, tag))
        return {}

    def _result_from_file(self, run: StoredRun) -> TrialResult | None:
        try:
            return TrialResult.from_json(self._reader.read_file(run, RESULT_FILE) or "")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def _pending(self) -> Iterator[dict[str, Any]]:
        """The records of this project that are meant for this store and not there yet."""
        for path in spool.spools(self._project_dir):
            if spool.target(path) != self._tracking_uri:
                continue
            try:
                for line in spool.read_lines(path, spool.read_ack(path, self._tracking_uri)):
                    if line.record is None:
                        log.warning("%s", line.problem)
                    elif {"study", "execution", "at", "totals"} <= line.record.keys():
                        yield line.record
            except OSError:  # uploaded and removed by now: then it is in the store
                continue

    def _pending_results(self, study_name: str) -> list[TrialResult]:
        found = []
        for record in self._pending():
            if record["kind"] == "trial" and record["study"] == study_name:
                try:
                    found.append(TrialResult.from_json(json.dumps(record["result"])))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    log.warning("a pending result of %s can't be read, skipped", study_name)
        return found

    def _pending_execution(self, study_name: str) -> dict[str, Any] | None:
        own = [r for r in self._pending() if r["kind"] == "execution" and r["study"] == study_name]
        return max(own, key=lambda r: float(r["at"]), default=None)


@dataclass(frozen=True)
class _Execution:
    study: str
    num_finished: int
    num_failed: int
    last_used_at: float


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
