"""What is known: results of all executions of a study, from the store and from what has not reached it yet."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypar.study.trial import TrialResult, latest
from raypar.track import spool
from raypar.track.check import check_writable
from raypar.track.names import join_tag
from raypar.track.reader import RunReader
from raypar.track.runs import RESULT_FILE, SOURCE_FILE, StoredRun, result_from_tags, without_step_times
from raypar.train.job import MODEL_FOLDER

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
