"""Writer of an execution: every result is first journalled on disk, then uploaded as soon as possible."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from raypar.errors import StoreError
from raypar.provenance import SOURCE_TAGS
from raypar.study.trial import COUNTERS, REVISION, TrialResult
from raypar.track import journal
from raypar.track.client import Rejected, Unreachable
from raypar.track.names import key_names
from raypar.track.run_writer import RunWriter
from raypar.track.runs import PointRun, points_of_report, view_content
from raypar.track.uploader import Uploader, replay
from raypar.track.view import ViewContent

if TYPE_CHECKING:
    from filelock import BaseFileLock

RETRY_AFTER_S = 30.0
NICENESS = 10  # of uploads in the background, which share their cores with the start of the next trial
# How long the last record waits for another upload from the same folder. Earlier ones are uploaded with the next.
LAST_LOCK_TIMEOUT_S = 20.0

Status: TypeAlias = Literal["finished", "failed", "killed"]


@dataclass(frozen=True)
class Execution:
    """One execution of a study.

    Attributes:
        uid: unique over all executions.
        started_at: Unix time.
        params: settings common to all trials, which MLflow shows.
        tags: any tags; `Store.question` reads ``raypar.question`` (JSON).
        description, about: the study's question, and further Markdown about it.
        answer: the question and the answer so far, in Markdown.
        score, mode: report key that trials are judged by, and "max" or "min".
        compares: trials have a speedup over a baseline.
        has_points: trials are nested under the runs of their points.
    """

    uid: str
    study: str
    started_at: float
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    description: str = ""
    about: str = ""
    answer: str = ""
    score: str = ""
    mode: str = "max"
    compares: bool = False
    has_points: bool = True
    study_file: Path | None = None
    study_source: str = ""


def _give_way() -> None:
    """Let other threads of this machine run before this one."""
    if sys.platform == "linux":  # elsewhere, only processes have a priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Recorder:
    """Writer of an execution's results: first into a local journal, then into the store.

    An unreachable store loses no result and raises nothing. It is tried again with a later record, at most every
    `retry_after_s`, and at the end; `raypar.track.uploader.sync` uploads the rest. Methods raise StoreError if neither
    the journal nor the store can be written.

    All use of the store is in one thread, which takes the records from the journal.

    Args:
        in_background: methods return once a record is journalled, and `upload` uploads in the background; otherwise
            they wait for the upload.

    Attributes:
        outage: why the last attempt to reach the store failed; empty if it succeeded.
    """

    def __init__(
        self,
        execution: Execution,
        *,
        tracking_uri: str,
        project_dir: Path,
        in_background: bool = False,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        retry_after_s: float = RETRY_AFTER_S,
        writer: RunWriter | None = None,
    ) -> None:
        self.outage = ""
        self._execution, self._tracking_uri, self._project_dir = execution, tracking_uri, project_dir
        self._clock, self._now = clock, now
        self._retry_after_s, self._retry_at_s = retry_after_s, float("-inf")
        self._tags = dict(execution.tags)
        if execution.study_file is not None:
            self._tags |= {f"{SOURCE_TAGS}name": str(execution.study_file), f"{SOURCE_TAGS}type": "LOCAL"}
        self._shown: ViewContent | None = None
        self._totals = dict.fromkeys(COUNTERS, 0)
        self._path = journal.journal_path(project_dir, execution.study, execution.uid)
        self._uploader = Uploader(writer or RunWriter(tracking_uri, project_dir))
        self._in_background = in_background
        self._thread = ThreadPoolExecutor(1, "upload", _give_way if in_background else None)
        self._last_upload: Future[None] = Future()
        self._last_upload.set_result(None)
        self._lock = threading.Lock()  # for the lock of uploads, and what follows from it
        self._new_from: int | None = None  # journal's offset from which on no other upload can have a record
        self._num_kept = 0  # records from there on that wait for an upload
        self._journal: journal.Journal | None = None
        self._owner_lock: BaseFileLock | None = None
        self._upload_lock: BaseFileLock | None = None

    def start(self, *, upload: bool = True) -> None:
        """Journal the execution, and create its run if the store can be reached.

        Args:
            upload: False defers the store's first use, which takes seconds, to the first result.

        Raises:
            StoreError: if the journal can't be written.
        """
        started = self._execution
        try:
            self._upload_lock = journal.upload_lock(self._project_dir)
            self._owner_lock = journal.owner_lock(self._path)
            self._owner_lock.acquire(timeout=0)
            self._journal = journal.Journal(self._path)
            if is_first := self._journal.size == 0:
                journal.write_ack(self._path, self._tracking_uri, 0)
        except (OSError, NotImplementedError) as e:  # a lock's Timeout is an OSError
            self._release()
            raise self._unwritable(e) from e
        self._write(
            "execution",
            upload=upload,
            at=started.started_at,
            is_new=is_first,
            name=time.strftime("execution %Y-%m-%d %H:%M:%S", time.localtime(started.started_at)),
            params=dict(started.params),
            tags=self._tags,
            description=started.description,
            about=started.about,
            answer=started.answer or started.description,
            study_source=started.study_source,
        )

    def connect(self) -> None:
        """Connect to the store in the background, which takes seconds the first time."""
        self._thread.submit(self._uploader.connect)

    def upload(self) -> None:
        """Upload the records so far in the background, if they are not uploaded at once."""
        self._submit(is_due=self._clock() >= self._retry_at_s)

    def flush(self) -> None:
        """Upload the records so far."""
        self.upload()
        self._last_upload.result()

    def record(self, result: TrialResult, artifact_dir: Path | None = None) -> None:
        """Record a trial's result; the folders in `artifact_dir` are its artifacts and have to stay there."""
        counter = result.state.counter
        totals = {**self._totals, counter: self._totals[counter] + 1}
        optional: dict[str, Any] = {"artifact_dir": str(artifact_dir)} if artifact_dir else {}
        if result.load:
            optional["system"] = result.load
        of = self._execution
        # The two revisions of a comparison are other commits than the working tree's.
        if REVISION not in result.spec.point and (source := self._source):
            optional["source"] = source
        if of.has_points:
            optional["point"] = result.spec.point_identity
        shown = view_content(result, of.score, of.mode, compares=of.compares, has_points=of.has_points)
        if self._shown is None or len(shown.series) > len(self._shown.series):
            self._shown = shown
            optional["shown"] = asdict(shown)
        self._write("trial", uid=uuid.uuid4().hex, result=result.to_json(), totals=totals, **optional)
        self._totals = totals

    @property
    def _source(self) -> dict[str, str]:
        return {key: text for key, text in self._tags.items() if key.startswith(SOURCE_TAGS)}

    def record_metrics(self, metrics: Sequence[tuple[str, float, int]]) -> None:
        """Record metrics of the execution, such as speedup curves, as (key, value, step)."""
        shown: dict[str, Any] = {}
        if metrics and self._shown is not None:
            self._shown = replace(self._shown, curves=tuple(key_names(key for key, _, _ in metrics).values()))
            shown = {"shown": asdict(self._shown)}
        if metrics:
            self._write("metrics", points=metrics, **shown)

    def record_summary(self, answer: str, points: Sequence[PointRun] = ()) -> None:
        """Record the answer so far, in Markdown, and the points."""
        self._write("summary", answer=answer, about=self._execution.about, points=[p._asdict() for p in points])

    def record_trial_metrics(self, by_identity: Mapping[str, Mapping[str, float]]) -> None:
        """Add metrics to trials, including those of earlier executions."""
        if by_identity:
            self._write("trial_metrics", by_identity=by_identity)

    def record_trial_inputs(self, trials: Sequence[TrialResult], contexts: Sequence[str]) -> None:
        """Add splits of the trials' data, such as "test", that they were later evaluated on."""
        if trials:
            self._write("trial_inputs", by_identity={t.spec.identity: t.data for t in trials}, contexts=contexts)

    def record_model(self, result: TrialResult, folder: Path, name: str, report: int) -> None:
        """Add a folder of `raypar.track.client.save_model` as a model of the trial's run; the folder has to stay.

        A model of this name and step that the run already has is replaced.

        Args:
            report: index of the report whose weights it has; the metrics of that report are the model's.
        """
        step, points = points_of_report(result, report)
        identity = result.spec.identity
        uid = uuid.uuid5(uuid.NAMESPACE_OID, f"{name} {step} {identity} {result.started_at}").hex
        self._write("model", uid=uid, identity=identity, folder=str(folder), name=name, step=step, points=points)

    def add_artifact(self, path_in_run: str, text: str) -> None:
        """Add a text to the files of the execution's run."""
        self._write("artifact", path=path_in_run, text=text)

    def close(self, status: Status) -> int:
        """End the execution; return the number of its records missing in the store. Further calls do nothing."""
        if self._journal is None:
            return 0
        try:
            self.flush()
            self._in_background, self._retry_at_s = False, float("-inf")
            self._write("close", lock_timeout_s=LAST_LOCK_TIMEOUT_S, status=status.upper())
            return journal.num_pending(self._path, self._tracking_uri)
        finally:
            self._release()

    def _write(
        self,
        kind: str,
        *,
        at: float | None = None,
        is_new: bool = True,
        upload: bool = True,
        lock_timeout_s: float = 0,
        **fields: Any,
    ) -> None:
        assert self._journal and self._upload_lock, "call start() before, and not after close()"
        record = {
            "kind": kind,
            "study": self._execution.study,
            "execution": self._execution.uid,
            "at": self._now() if at is None else at,
            "totals": dict(self._totals),
            **fields,
        }
        try:
            has_lock = self._append(json.dumps(record, separators=(",", ":")), lock_timeout_s, is_new=is_new)
        except OSError as error:  # the record goes straight to the store
            try:
                self._thread.submit(self._uploader.apply, record).result()
            except (Unreachable, Rejected):
                raise self._unwritable(error) from error
        else:
            if has_lock and not (self._in_background and upload):
                self._submit(is_due=upload and self._clock() >= self._retry_at_s, is_last=kind == "close")
                self._last_upload.result()

    def _append(self, text: str, lock_timeout_s: float, *, is_new: bool) -> bool:
        """Append a line to the journal. Returns False if another process is uploading. Raises OSError."""
        assert self._journal and self._upload_lock
        with self._lock:
            # Locked before writing: no other upload can have this record, so the store need not be searched for it.
            if not self._upload_lock.is_locked:
                with suppress(OSError):  # held by another upload (Timeout), or the folder is gone
                    self._upload_lock.acquire(timeout=lock_timeout_s)
            has_lock = self._upload_lock.is_locked
            try:
                start = self._journal.append(text)
            except OSError:
                if has_lock and not self._num_kept:
                    self._upload_lock.release()
                raise
            if has_lock:
                self._num_kept += 1
                if is_new and self._new_from is None:
                    self._new_from = start
        return has_lock

    def _submit(self, *, is_due: bool, is_last: bool = False) -> None:
        self._last_upload = self._thread.submit(self._upload_kept, is_due=is_due, is_last=is_last)

    def _upload_kept(self, *, is_due: bool, is_last: bool) -> None:
        """Upload what the store lacks if it is due, and unlock if no record was added meanwhile."""
        assert self._upload_lock
        with self._lock:
            num_records, new_from = self._num_kept, self._new_from
        try:
            if is_due and num_records:
                self._upload(new_from, is_last=is_last)
        finally:
            with self._lock:
                self._num_kept -= num_records
                if num_records and not self._num_kept:
                    self._new_from = None
                    self._upload_lock.release()

    def _upload(self, new_from: int | None, *, is_last: bool) -> None:
        try:
            self.outage = replay(self._path, self._uploader, self._tracking_uri, new_from=new_from).outage
            if is_last and not self.outage:
                journal.remove(self._path)
        except OSError as e:  # the journal's folder is full or gone; records in it stay
            self.outage = str(e)
        if self.outage:
            self._retry_at_s = self._clock() + self._retry_after_s

    def _unwritable(self, error: Exception) -> StoreError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return StoreError(
            f"The results can't be written to {self._path.parent}: {reason}",
            hint="free some space there or run in a writable folder; earlier results are kept, and running the study "
            "again continues from there",
        )

    def _release(self) -> None:
        self._thread.shutdown()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._owner_lock is not None:
            self._owner_lock.release()
            self._owner_lock = None
