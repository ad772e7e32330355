"""Stored results of all executions of a study: from MLflow's database or server, and from this project's journals.

An embedded database of a schema in `client.SCHEMAS` is read by SQL, without importing MLflow; every other is asked
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

# A writer holds the database for milliseconds; MLflow, which is asked then, waits longer.
LOCK_TIMEOUT_S = 2.0
_WORKSPACE = "default"
_WORKSPACES_VARIABLE = "MLFLOW_ENABLE_WORKSPACES"
_PAGE_SIZE = 250  # a server that is asked for thousands at once takes longer than a request may

_NO_EXPERIMENTS: dict[str, str] = {}
_NO_RUNS: Iterable[StoredRun] = ()

log = logging.getLogger(__name__)
T = TypeVar("T")


def default_tracking_uri(project_dir: Path) -> str:
    """Return ``MLFLOW_TRACKING_URI`` if it is set, else the embedded database ``mlflow.db`` of the folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{project_dir.absolute()}/mlflow.db"


class Unfamiliar(Exception):
    """The database can't be read by SQL here: another schema, locked, damaged, with workspaces."""


class EmbeddedRuns:
    """Runs of the database of a ``sqlite:`` URI. Every method reads in one transaction and never writes.

    Raises:
        Unfamiliar: by every method, where MLflow is to be asked instead.
    """

    def __init__(self, tracking_uri: str) -> None:
        parts = urlsplit(tracking_uri)
        plain = parts.scheme == "sqlite" and not (parts.netloc or parts.query or parts.fragment)
        self._path: Path | None = sqlite_path(tracking_uri) if plain else None

    def experiments(self) -> dict[str, str]:
        """Map study names to ids of experiments that are not deleted."""
        query = """
            SELECT t.value, e.experiment_id FROM experiments AS e JOIN experiment_tags AS t USING (experiment_id)
            WHERE t.key = 'raypar.study' AND t.value != '' AND e.lifecycle_stage = 'active'
            ORDER BY e.creation_time DESC, e.experiment_id
        """
        with self._opened() as database:
            return {str(study): str(experiment_id) for study, experiment_id in database.execute(query)}

    def experiment_id(self, name: str) -> str | None:
        """Return the id of the experiment of this name; None if there is none, or it is deleted."""
        query = "SELECT experiment_id FROM experiments WHERE name = ? AND lifecycle_stage = 'active'"
        with self._opened() as database:
            row = database.execute(query, [name]).fetchone()
        return str(row[0]) if row else None

    def search(self, experiment_ids: Sequence[str], tags: Mapping[str, str]) -> list[StoredRun]:
        """Return the runs that have all of the tags, the latest first; deleted ones are not among them."""
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
        """Open the database for reading, as it stands now, however long that takes."""
        if self._path is None or os.environ.get(_WORKSPACES_VARIABLE, "").lower() not in ("", "false", "0"):
            raise Unfamiliar
        # MLflow opens the same path: SQLite's URI keeps it from making the file, and from changing it.
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
    """The same questions through MLflow's client, which connects when first asked; methods raise StoreError."""

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
        """Yield what a search of MLflow's finds, fetching the next page only when it is needed."""
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
    """A study at a glance; the counts, by `COUNTERS`, are sums over its executions.

    Attributes:
        last_used_at: Unix time.
        experiment_id: MLflow's; empty while the study is in a journal only.
    """

    name: str
    num_executions: int
    counts: Mapping[str, int]
    last_used_at: float
    experiment_id: str = ""


class ExecutionRef(NamedTuple):
    """An execution: its uid, MLflow's run (empty while it is in a journal only), and when it began, Unix time."""

    uid: str
    run_id: str
    started_at: float
    status: str = ""


def study_names(tracking_uri: str, project_dir: Path) -> tuple[str, ...]:
    """Return the names of the studies in an embedded store and in a project's journals, the latest first.

    Quick and without MLflow, for a shell that completes names: a server is not asked.
    """
    names: dict[str, None] = {}
    for path in reversed(journal.journal_paths(project_dir)):
        if journal.read_ack(path)[0] == tracking_uri and (study := journal.study_of(path)):
            names[study] = None
    with suppress(Unfamiliar):
        names |= dict.fromkeys(EmbeddedRuns(tracking_uri).experiments())
    return tuple(names)


class Store:
    """Reads one store, and the journals of one project folder that are meant for it. Connects when first asked.

    All methods raise StoreError where the store can't be read, the constructor for an address that is none; an embedded
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

        It is the latest complete one, or the latest failed one where none is complete.
        """
        # The journals before the store: what is uploaded in between is then seen twice, not missed.
        pending = self._pending_results(study_name)
        stored: list[TrialResult] = []
        for run in self._trial_runs(study_name):
            if result := self._result(study_name, run):
                stored.append(result)
            else:
                log.warning("the run %s holds no result that can be read, skipped", run.run_id)
        return latest([without_step_times(result) for result in (*stored, *pending)])

    def trial_runs(self, study_name: str) -> Iterator[tuple[StoredRun, TrialResult]]:
        """Yield the runs of trials in the store, journals aside, with their results."""
        for run in self._trial_runs(study_name):
            if result := self._result(study_name, run):
                yield run, result

    def _result(self, study_name: str, run: StoredRun) -> TrialResult | None:
        """Return the result of a trial's run, under the name that its study has now."""
        result = result_from_tags(run.tags) or self._result_from_file(run)
        return result and replace(result, spec=replace(result.spec, study=study_name))

    def step_times(self, study_name: str, identity: str) -> tuple[tuple[float, ...], ...]:
        """Return ``[rank][step]`` in seconds of the trial that `results` gives for this identity; empty if none."""
        pending = [result for result in self._pending_results(study_name) if result.spec.identity == identity]
        stored = [self._result_from_file(run) for run in self._trial_runs(study_name, identity=identity)]
        best = latest([*(result for result in reversed(stored) if result is not None), *pending])
        return best[0].step_times_s if best else ()

    def model_folder(self, study_name: str, identity: str) -> Path | None:
        """Return a folder with the model that the trial has kept; None where it has none."""
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
        """Return the runs of trials that are in the store as a whole, which end when their last part is."""
        if not all(value.isalnum() for value in tags.values()):  # an identity can't break out of its query
            return ()
        return (run for run in self.runs(study_name, kind="trial", **tags) if run.status != "RUNNING")

    def _result_from_file(self, run: StoredRun) -> TrialResult | None:
        return parse_result(self._read_file(run, RESULT_FILE))

    # ---- studies and their executions

    def studies(self) -> tuple[StudySummary, ...]:
        """Return every study, the last used first. Looks at executions only, not at trials."""
        pending = list(self._all_pending())
        experiment_ids = self._ask(lambda runs: runs.experiments(), _NO_EXPERIMENTS)
        # By execution: study, numbers of trials (an older one did not count every state), time of last use.
        executions: dict[str, tuple[str, dict[str, int], float]] = {}
        for run in self._search(list(experiment_ids.values()), kind="execution"):
            tags = run.tags
            counts = {key: int(tags.get(f"raypar.{key}", 0)) for key in COUNTERS}
            used_at = float(tags.get("raypar.last_used_at", run.start_ms / 1000))
            executions[tags.get("raypar.uid", run.run_id)] = (tags.get("raypar.study", ""), counts, used_at)
        for record in pending:  # later than what the store has of the same execution
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
        """Return the text of the study's file as of its latest execution; None if none is kept."""
        for record in self._pending_executions(study_name):
            return str(record["study_source"]) or None
        for run in self.runs(study_name, kind="execution"):
            return self._read_file(run, SOURCE_FILE)
        return None

    def artifact(self, study_name: str, name: str) -> str | None:
        """Return a text that the latest execution with such a one added to its run; None if none has."""
        texts = [r["text"] for r in self._pending("artifact", study_name) if r["path"] == name]
        if texts:
            return str(texts[-1])
        texts_of_runs = (self._read_file(run, name) for run in self.runs(study_name, kind="execution"))
        return next((text for text in texts_of_runs if text is not None), None)

    def question(self, study_name: str) -> dict[str, Any]:
        """Return the JSON that the latest execution stored under the tag ``raypar.question``; empty if none."""
        return _json_object(self.origin(study_name)[0].get("raypar.question"))

    def resume_info(self, study_name: str) -> dict[str, Any]:
        """Return file and flags of the latest execution, from its tag ``raypar.resume``; empty if none."""
        return _json_object(self.origin(study_name)[0].get("raypar.resume"))

    def origin(self, study_name: str) -> tuple[dict[str, str], str]:
        """Return the tags of the latest execution, and its description for people."""
        return next(self.origins(study_name), ({}, ""))

    def origins(self, study_name: str) -> Iterator[tuple[dict[str, str], str]]:
        """Yield `origin` of each execution, the latest first."""
        for record in self._pending_executions(study_name):
            yield dict(record["tags"]), str(record["description"])
        for run in self.runs(study_name, kind="execution"):
            tags = {key: join_tag(run.tags, key) or "" for key in run.tags}
            yield tags, tags.get("mlflow.note.content", "")

    def executions(self, study_name: str) -> tuple[ExecutionRef, ...]:
        """Return all executions, the first one first."""
        every: dict[str, ExecutionRef] = {}
        for record in self._pending_executions(study_name):
            every[record["execution"]] = ExecutionRef(record["execution"], "", float(record["at"]))
        for run in self.runs(study_name, kind="execution"):
            uid = run.tags.get("raypar.uid", run.run_id)
            every[uid] = ExecutionRef(uid, run.run_id, run.start_ms / 1000, run.status)
        return tuple(sorted(every.values(), key=lambda execution: execution.started_at))

    # ---- runs and their files

    def experiment_id(self, study_name: str) -> str | None:
        """Return MLflow's id of the study's experiment; None if there is none, or it is deleted."""
        name = experiment_name(study_name)
        return self._ask(lambda runs: runs.experiment_id(name), None)

    def runs(self, study_name: str, **tags: str) -> Iterable[StoredRun]:
        """Return the study's runs with these ``raypar.`` tags, the latest first; deleted ones are not among them."""
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
        """Return a file or folder among a run's artifacts, downloaded to `to` from another machine."""
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
        """Return a run's folder, even if the project's folder was moved as a whole since."""
        root = artifact_root(self.tracking_uri, self.project_dir)
        if folder.exists() or root is None or root.name not in folder.parts:
            return folder
        at = len(folder.parts) - folder.parts[::-1].index(root.name)
        return root.joinpath(*folder.parts[at:])

    # ---- journals

    def _all_pending(self) -> Iterator[dict[str, Any]]:
        """Yield this project's records that are meant for this store and not there yet."""
        for path in journal.journal_paths(self.project_dir):
            if journal.read_ack(path)[0] != self.tracking_uri:
                continue
            try:
                for line in journal.pending_lines(path, self.tracking_uri):
                    if line.record is None:
                        log.warning("%s", line.problem)
                    elif {"study", "execution", "at", "totals"} <= line.record.keys():
                        yield line.record
            except OSError:  # uploaded and removed by now: then it is in the store
                continue

    def _pending(self, kind: str, study_name: str) -> Iterator[dict[str, Any]]:
        return (r for r in self._all_pending() if (r["kind"], r["study"]) == (kind, study_name))

    def _pending_results(self, study_name: str) -> list[TrialResult]:
        results = [parse_result(record.get("result")) for record in self._pending("trial", study_name)]
        if None in results:
            log.warning("%d pending results of %s can't be read, skipped", results.count(None), study_name)
        return [result for result in results if result is not None]

    def _pending_executions(self, study_name: str) -> list[dict[str, Any]]:
        return sorted(self._pending("execution", study_name), key=lambda r: float(r["at"]), reverse=True)


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
