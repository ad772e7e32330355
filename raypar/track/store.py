"""Stored results of all executions of a study, from MLflow's database or server and this project's journals."""

from __future__ import annotations

import heapq
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from raypar.study.trial import COUNTERS, TrialResult, latest
from raypar.track import check, journal
from raypar.track.names import DESCRIPTION, NOTE, experiment_name, join_tag
from raypar.track.runs import RESULT_FILE, SOURCE_FILE, parse_result, result_from_tags, without_step_times
from raypar.track.stored_runs import EmbeddedRuns, StoredRun, StoredRuns, Unfamiliar
from raypar.train.job import MODEL_FOLDER

log = logging.getLogger(__name__)

_Timed: TypeAlias = tuple[float, dict[str, Any] | StoredRun]
_time = itemgetter(0)


def default_tracking_uri(project_dir: Path) -> str:
    """Return ``MLFLOW_TRACKING_URI`` if set, else the embedded database ``mlflow.db`` of the folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{project_dir.absolute()}/mlflow.db"


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
    paths = reversed(journal.journal_paths(project_dir, tracking_uri))
    names = dict.fromkeys(study for path in paths if (study := journal.study_of(path)))
    with suppress(Unfamiliar):
        names |= dict.fromkeys(EmbeddedRuns(tracking_uri).experiments())
    return tuple(names)


class Store:
    """Reader of a store and of a project's journals for that store. Connects on first use.

    Methods raise StoreError if the store can't be read, and the constructor if the address is malformed. An embedded
    store that does not exist yet is empty.
    """

    def __init__(self, tracking_uri: str, project_dir: Path) -> None:
        check.check_form(tracking_uri)
        self.tracking_uri = tracking_uri
        self.project_dir = project_dir
        self._runs = StoredRuns(tracking_uri, project_dir)

    def check_writable(self) -> None:
        """See `raypar.track.check.check_writable`."""
        check.check_writable(self.tracking_uri, self.project_dir)

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
        result = result_from_tags(run.tags) or self._complete_result(run)
        return result and replace(result, spec=replace(result.spec, study=study_name))

    def step_times(self, study_name: str, identity: str) -> tuple[tuple[float, ...], ...]:
        """Return the step times in seconds, ``[rank][step]``, of the trial in `results` with this identity."""
        pending = [result for result in self._pending_results(study_name) if result.spec.identity == identity]
        stored = [self._complete_result(run) for run in self._trial_runs(study_name, identity=identity)]
        best = latest([*(result for result in reversed(stored) if result is not None), *pending])
        return best[0].step_times_s if best else ()

    def model_folder(self, study_name: str, identity: str, name: str = MODEL_FOLDER) -> Path | None:
        """Return a folder with the trial's model, or one for each report (`REPORTS_FOLDER`); None: it kept none."""
        for record in self._pending("trial", study_name):
            folder = journal.kept_folder(self.project_dir, record.get("artifact_dir"))
            result = parse_result(record.get("result"))
            is_of_trial = result is not None and result.spec.identity == identity
            if folder is not None and is_of_trial and (folder / name).is_dir():
                return folder / name
        to = self.project_dir / ".raypar" / "models" / identity
        folders = (self._runs.path(run, name, to) for run in self._trial_runs(study_name, identity=identity))
        return next((folder for folder in folders if folder is not None and folder.is_dir()), None)

    def _trial_runs(self, study_name: str, **tags: str) -> Iterable[StoredRun]:
        """Return the runs of trials that are completely in the store: a run ends with its last part."""
        if not all(value.isalnum() for value in tags.values()):  # no quotes that would end the query's string
            return ()
        return (run for run in self.runs(study_name, kind="trial", **tags) if run.status != "RUNNING")

    def _complete_result(self, run: StoredRun) -> TrialResult | None:
        """Return a trial's result from its file, which has the step times."""
        return parse_result(self._runs.text(run, RESULT_FILE))

    # ---- studies and their executions

    def studies(self) -> tuple[StudySummary, ...]:
        """Return every study, the last used first. Reads executions only, not trials."""
        pending = list(journal.pending_records(self.project_dir, self.tracking_uri))
        experiment_ids = self._runs.experiments()
        # By execution: study, numbers of trials (older ones did not count every state), time of last use.
        executions: dict[str, tuple[str, dict[str, int], float]] = {}
        for run in self._runs.search(list(experiment_ids.values()), kind="execution"):
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
        latest_one = next(self._latest_first("execution", study_name), None)
        if isinstance(latest_one, StoredRun):
            return self._runs.text(latest_one, SOURCE_FILE)
        return None if latest_one is None else str(latest_one["study_source"]) or None

    def artifact(self, study_name: str, name: str) -> str | None:
        """Return the text of this name in the latest execution that has one, else None."""
        for each in self._latest_first("artifact", study_name):
            if isinstance(each, StoredRun):
                if (text := self._runs.text(each, name)) is not None:
                    return text
            elif each["path"] == name:
                return str(each["text"])
        return None

    def question(self, study_name: str) -> dict[str, Any]:
        """Return the JSON in the latest execution's tag ``raypar.question``; empty if missing."""
        return self._json_tag(study_name, "raypar.question")

    def resume_info(self, study_name: str) -> dict[str, Any]:
        """Return file and flags of the latest execution, from its tag ``raypar.resume``; empty if missing."""
        return self._json_tag(study_name, "raypar.resume")

    def _json_tag(self, study_name: str, tag: str) -> dict[str, Any]:
        tags, _ = next(self.origins(study_name), ({}, ""))
        try:
            value = json.loads(tags.get(tag) or "{}")
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def origins(self, study_name: str) -> Iterator[tuple[dict[str, str], str]]:
        """Yield tags and description of each execution, the latest first."""
        for each in self._latest_first("execution", study_name):
            if isinstance(each, StoredRun):
                tags = {key: join_tag(each.tags, key) or "" for key in each.tags}
                yield tags, tags.get(DESCRIPTION) or tags.get(NOTE, "")
            else:
                yield dict(each["tags"]), str(each["description"])

    def executions(self, study_name: str) -> tuple[ExecutionRef, ...]:
        """Return all executions, the oldest first."""
        every: dict[str, ExecutionRef] = {}
        for record in self._pending("execution", study_name):
            every[record["execution"]] = ExecutionRef(record["execution"], "", float(record["at"]))
        for run in self.runs(study_name, kind="execution"):
            uid = run.tags.get("raypar.uid", run.run_id)
            every[uid] = ExecutionRef(uid, run.run_id, run.start_ms / 1000, run.status)
        return tuple(sorted(every.values(), key=lambda execution: execution.started_at))

    # ---- runs

    def experiment_id(self, study_name: str) -> str | None:
        """Return MLflow's id of the study's experiment; None if missing or deleted."""
        return self._runs.experiment_id(experiment_name(study_name))

    def runs(self, study_name: str, **tags: str) -> Iterable[StoredRun]:
        """Return the study's runs with these ``raypar.`` tags, the latest first, without deleted ones."""
        experiment_id = self.experiment_id(study_name)
        return self._runs.search([experiment_id] if experiment_id else [], **tags)

    # ---- journals

    def _pending(self, kind: str, study_name: str) -> Iterator[dict[str, Any]]:
        records = journal.pending_records(self.project_dir, self.tracking_uri)
        return (r for r in records if (r["kind"], r["study"]) == (kind, study_name))

    def _pending_results(self, study_name: str) -> list[TrialResult]:
        results = [parse_result(record.get("result")) for record in self._pending("trial", study_name)]
        if None in results:
            log.warning("%d unreadable pending results of %s skipped", results.count(None), study_name)
        return [result for result in results if result is not None]

    def _latest_first(self, kind: str, study_name: str) -> Iterator[dict[str, Any] | StoredRun]:
        """Yield the pending records of a kind and the runs of executions, the latest first.

        A journal may be older than a stored execution: an outage kept it from being uploaded.
        """
        pending: Iterable[_Timed] = ((float(r["at"]), r) for r in self._pending(kind, study_name))
        stored: Iterable[_Timed] = ((run.start_ms / 1000, run) for run in self.runs(study_name, kind="execution"))
        in_order = heapq.merge(sorted(pending, key=_time, reverse=True), stored, key=_time, reverse=True)
        return (each for _, each in in_order)
