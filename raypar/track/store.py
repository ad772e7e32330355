"""Stored results of all executions of a study, from MLflow's database or server and this project's journals.

An embedded database with a schema in `client.SCHEMAS` is read by SQL, without importing MLflow. Other stores are read
through MLflow's client.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from raypar.errors import StoreError
from raypar.scratch import scratch_folder
from raypar.study.trial import COUNTERS, TrialResult, latest
from raypar.track import journal
from raypar.track.check import check_form, check_readable, check_writable
from raypar.track.client import SCHEMAS, artifact_root, connect, local_folder, reachable, sqlite_path, tag_filter
from raypar.track.names import experiment_name, join_tag
from raypar.track.runs import RESULT_FILE, SOURCE_FILE, StoredRun, parse_result, result_from_tags, without_step_times
from raypar.train.job import MODEL_FOLDER

# A writer locks the database for milliseconds. After this time MLflow is asked, which waits longer.
LOCK_TIMEOUT_S = 2.0
_WORKSPACE = "default"
_WORKSPACES_VARIABLE = "MLFLOW_ENABLE_WORKSPACES"
_PAGE_SIZE = 250  # thousands at once would exceed the time limit of a request

_NO_EXPERIMENTS: dict[str, str] = {}
_NO_RUNS: Iterable[StoredRun] = ()

log = logging.getLogger(__name__)
T = TypeVar("T")


def default_tracking_uri(project_dir: Path) -> str:
    """Return ``MLFLOW_TRACKING_URI`` if set, else the embedded database ``mlflow.db`` of the folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{project_dir.absolute()}/mlflow.db"


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


@dataclass(frozen=True)
class StudySummary:
    """Summary of a study; the counts, by `COUNTERS`, are sums over its executions.

    Attributes:
        last_used_at: Unix time.
        experiment_id: MLflow's; empty while the study is only in a journal.
    """

    name: str
    num_executions: int
    counts: Mapping[str, int]
    last_used_at: float
    experiment_id: str = ""


class ExecutionRef(NamedTuple):
    """Execution: its uid, MLflow's run (empty while it is only in a journal), and its start in Unix time."""

    uid: str
    run_id: str
    started_at: float
    status: str = ""


def study_names(tracking_uri: str, project_dir: Path) -> tuple[str, ...]:
    """Return the names of the studies in an embedded store and in a project's journals, the latest first.

    For shell completion: fast, without importing MLflow or asking a server.
    """
    names: dict[str, None] = {}
    for path in reversed(journal.journal_paths(project_dir, tracking_uri)):
        if study := journal.study_of(path):
            names[study] = None
    with suppress(Unfamiliar):
        names |= dict.fromkeys(EmbeddedRuns(tracking_uri).experiments())
    return tuple(names)


class Store:
    """Reader of a store and of a project's journals for that store. Connects on first use.

    Methods raise StoreError if the store can't be read, and the constructor if the address is malformed. An embedded
    store that does not exist yet is empty.
    """

    def __init__(self, tracking_uri: str, project_dir: Path) -> None:
        check_form(tracking_uri)
        self.tracking_uri = tracking_uri
        self.project_dir = project_dir
        self._embedded = EmbeddedRuns(tracking_uri)
        self._mlflow = MlflowRuns(tracking_uri)

    def check_writable(self) -> None:
        """See `raypar.track.check.check_writable`."""
        check_writable(self.tracking_uri, self.project_dir)

    # ---- trials

    def results(self, study_name: str) -> tuple[TrialResult, ...]:
        """Return one result per identity over all executions, oldest first, without step times.

        This is the latest complete result, or else the latest failed one.
        """
        # Journals first: records uploaded in between are then seen twice, not missed.
        pending = self._pending_results(study_name)
        stored: list[TrialResult] = []
        for run in self._trial_runs(study_name):
            if result := self._result(study_name, run):
                stored.append(result)
            else:
                log.warning("run %s has no readable result, skipped", run.run_id)
        return latest([without_step_times(result) for result in (*stored, *pending)])

    def trial_runs(self, study_name: str) -> Iterator[tuple[StoredRun, TrialResult]]:
        """Yield the runs of trials in the store, without journals, with their results."""
        for run in self._trial_runs(study_name):
            if result := self._result(study_name, run):
                yield run, result

    def _result(self, study_name: str, run: StoredRun) -> TrialResult | None:
        """Return the result of a trial's run under the current name of its study."""
        result = result_from_tags(run.tags) or self._result_from_file(run)
        return result and replace(result, spec=replace(result.spec, study=study_name))

    def step_times(self, study_name: str, identity: str) -> tuple[tuple[float, ...], ...]:
        """Return the step times in seconds, ``[rank][step]``, of the trial in `results` with this identity."""
        pending = [result for result in self._pending_results(study_name) if result.spec.identity == identity]
        stored = [self._result_from_file(run) for run in self._trial_runs(study_name, identity=identity)]
        best = latest([*(result for result in reversed(stored) if result is not None), *pending])
        return best[0].step_times_s if best else ()

    def model_folder(self, study_name: str, identity: str) -> Path | None:
        """Return a folder with the trial's model; None if it kept none."""
        for record in self._pending("trial", study_name):
            folder = journal.kept_folder(self.project_dir, record.get("artifact_dir"))
            result = parse_result(record.get("result"))
            is_of_trial = result is not None and result.spec.identity == identity
            if folder is not None and is_of_trial and (folder / MODEL_FOLDER).is_dir():
                return folder / MODEL_FOLDER
        to = self.project_dir / ".raypar" / "models" / identity
        for run in self._trial_runs(study_name, identity=identity):
            if (folder := self._artifact(run, MODEL_FOLDER, to)) is not None and folder.is_dir():
                return folder
        return None

    def _trial_runs(self, study_name: str, **tags: str) -> Iterable[StoredRun]:
        """Return the runs of trials that are completely in the store: a run ends with its last part."""
        if not all(value.isalnum() for value in tags.values()):  # no quotes that would end the query's string
            return ()
        return (run for run in self.runs(study_name, kind="trial", **tags) if run.status != "RUNNING")

    def _result_from_file(self, run: StoredRun) -> TrialResult | None:
        return parse_result(self._read_file(run, RESULT_FILE))

    # ---- studies and their executions

    def studies(self) -> tuple[StudySummary, ...]:
        """Return every study, the last used first. Reads executions only, not trials."""
        pending = list(self._all_pending())
        experiment_ids = self._ask(lambda runs: runs.experiments(), _NO_EXPERIMENTS)
        # By execution: study, numbers of trials (older ones did not count every state), time of last use.
        executions: dict[str, tuple[str, dict[str, int], float]] = {}
        for run in self._search(list(experiment_ids.values()), kind="execution"):
            tags = run.tags
            counts = {key: int(tags.get(f"raypar.{key}", 0)) for key in COUNTERS}
            used_at = float(tags.get("raypar.last_used_at", run.start_ms / 1000))
            executions[tags.get("raypar.uid", run.run_id)] = (tags.get("raypar.study", ""), counts, used_at)
        for record in pending:  # newer than the store's counts of the same execution
            counts = {key: record["totals"].get(key, 0) for key in COUNTERS}
            executions[record["execution"]] = (record["study"], counts, record["at"])
        by_study: dict[str, StudySummary] = {}
        for study, counts, at in executions.values():
            s = by_study.get(study) or StudySummary(study, 0, {}, at, experiment_ids.get(study, ""))
            sums = {key: s.counts.get(key, 0) + counts[key] for key in COUNTERS}
            num_executions, last_used_at = s.num_executions + 1, max(s.last_used_at, at)
            by_study[study] = replace(s, num_executions=num_executions, last_used_at=last_used_at, counts=sums)
        return tuple(sorted(by_study.values(), key=lambda s: (-s.last_used_at, s.name)))

    def study_source(self, study_name: str) -> str | None:
        """Return the study file of the latest execution; None if not stored."""
        for record in self._pending_executions(study_name):
            return str(record["study_source"]) or None
        for run in self.runs(study_name, kind="execution"):
            return self._read_file(run, SOURCE_FILE)
        return None

    def artifact(self, study_name: str, name: str) -> str | None:
        """Return the text of this name in the latest execution that has one, else None."""
        texts = [r["text"] for r in self._pending("artifact", study_name) if r["path"] == name]
        if texts:
            return str(texts[-1])
        texts_of_runs = (self._read_file(run, name) for run in self.runs(study_name, kind="execution"))
        return next((text for text in texts_of_runs if text is not None), None)

    def question(self, study_name: str) -> dict[str, Any]:
        """Return the JSON in the latest execution's tag ``raypar.question``; empty if missing."""
        return _json_object(self.origin(study_name)[0].get("raypar.question"))

    def resume_info(self, study_name: str) -> dict[str, Any]:
        """Return file and flags of the latest execution, from its tag ``raypar.resume``; empty if missing."""
        return _json_object(self.origin(study_name)[0].get("raypar.resume"))

    def origin(self, study_name: str) -> tuple[dict[str, str], str]:
        """Return the tags and the description of the latest execution."""
        return next(self.origins(study_name), ({}, ""))

    def origins(self, study_name: str) -> Iterator[tuple[dict[str, str], str]]:
        """Yield `origin` of each execution, the latest first."""
        for record in self._pending_executions(study_name):
            yield dict(record["tags"]), str(record["description"])
        for run in self.runs(study_name, kind="execution"):
            tags = {key: join_tag(run.tags, key) or "" for key in run.tags}
            yield tags, tags.get("mlflow.note.content", "")

    def executions(self, study_name: str) -> tuple[ExecutionRef, ...]:
        """Return all executions, the oldest first."""
        every: dict[str, ExecutionRef] = {}
        for record in self._pending_executions(study_name):
            every[record["execution"]] = ExecutionRef(record["execution"], "", float(record["at"]))
        for run in self.runs(study_name, kind="execution"):
            uid = run.tags.get("raypar.uid", run.run_id)
            every[uid] = ExecutionRef(uid, run.run_id, run.start_ms / 1000, run.status)
        return tuple(sorted(every.values(), key=lambda execution: execution.started_at))

    # ---- runs and their files

    def experiment_id(self, study_name: str) -> str | None:
        """Return MLflow's id of the study's experiment; None if missing or deleted."""
        name = experiment_name(study_name)
        return self._ask(lambda runs: runs.experiment_id(name), None)

    def runs(self, study_name: str, **tags: str) -> Iterable[StoredRun]:
        """Return the study's runs with these ``raypar.`` tags, the latest first, without deleted ones."""
        experiment_id = self.experiment_id(study_name)
        return self._search([experiment_id] if experiment_id else [], **tags)

    def _search(self, experiment_ids: Sequence[str], **tags: str) -> Iterable[StoredRun]:
        if not experiment_ids:
            return ()
        full_tags = {f"raypar.{key}": value for key, value in tags.items()}
        return self._ask(lambda runs: runs.search(experiment_ids, full_tags), _NO_RUNS)

    def _ask(self, question: Callable[[EmbeddedRuns | MlflowRuns], T], empty: T) -> T:
        try:
            return question(self._embedded)
        except Unfamiliar:
            return question(self._mlflow) if check_readable(self.tracking_uri) else empty

    def _read_file(self, run: StoredRun, name: str) -> str | None:
        is_local = local_folder(run.artifact_uri) is not None
        with nullcontext(Path()) if is_local else scratch_folder() as folder:
            path = self._artifact(run, name, folder)
            try:
                return path.read_text(encoding="utf-8") if path else None
            except (OSError, ValueError):
                return None

    def _artifact(self, run: StoredRun, name: str, to: Path) -> Path | None:
        """Return a file or folder of a run's artifacts, downloaded to `to` if it is not on this machine."""
        folder = local_folder(run.artifact_uri)
        if folder is not None:
            return self._moved(folder) / name
        try:
            to.mkdir(parents=True, exist_ok=True)
            with reachable(self.tracking_uri):
                return Path(self._mlflow.client.download_artifacts(run.run_id, name, str(to)))
        except (OSError, ValueError, StoreError):
            return None

    def _moved(self, folder: Path) -> Path:
        """Return a run's folder, even if the project's folder has been moved."""
        root = artifact_root(self.tracking_uri, self.project_dir)
        if folder.exists() or root is None or root.name not in folder.parts:
            return folder
        at = len(folder.parts) - folder.parts[::-1].index(root.name)
        return root.joinpath(*folder.parts[at:])

    # ---- journals

    def _all_pending(self) -> Iterator[dict[str, Any]]:
        """Yield this project's records for this store that are not in it yet."""
        for path in journal.journal_paths(self.project_dir, self.tracking_uri):
            try:
                for line in journal.pending_lines(path, self.tracking_uri):
                    if line.record is None:
                        log.warning("%s", line.problem)
                    elif {"study", "execution", "at", "totals"} <= line.record.keys():
                        yield line.record
            except OSError:  # uploaded and removed by now
                continue

    def _pending(self, kind: str, study_name: str) -> Iterator[dict[str, Any]]:
        return (r for r in self._all_pending() if (r["kind"], r["study"]) == (kind, study_name))

    def _pending_results(self, study_name: str) -> list[TrialResult]:
        results = [parse_result(record.get("result")) for record in self._pending("trial", study_name)]
        if None in results:
            log.warning("%d unreadable pending results of %s skipped", results.count(None), study_name)
        return [result for result in results if result is not None]

    def _pending_executions(self, study_name: str) -> list[dict[str, Any]]:
        return sorted(self._pending("execution", study_name), key=lambda r: float(r["at"]), reverse=True)


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
