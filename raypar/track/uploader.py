"""Upload of journals to MLflow, idempotent and in order; `sync` uploads what an outage or a killed study left."""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from raypar.errors import RayparError, StoreError
from raypar.markdown import harmless
from raypar.study.trial import TrialSpec, result_from_json
from raypar.track import journal
from raypar.track.check import check_address
from raypar.track.client import Failing, Rejected, Unreachable, has_server, reachable, unreachable
from raypar.track.names import DESCRIPTION, NOTE, key_names, short_hash, short_label, split_tag
from raypar.track.run_writer import RunRef, RunWriter
from raypar.track.runs import BEST_MODEL, SOURCE_FILE, Point, PointRun, child_run, inputs_of, with_logged
from raypar.track.store import Store, default_tracking_uri
from raypar.track.stored_runs import StoredRun
from raypar.track.view import ViewContent, links, saved_views
from raypar.train.job import LOGGED_FOLDER
from raypar.train.logged_run import FILES, MODELS, LoggedRun

INCOMPLETE = "incomplete trial"
LOCK_TIMEOUT_S = 60.0
ABANDONED_LOCK_TIMEOUT_S = 5.0  # for an upload that can wait

log = logging.getLogger(__name__)
Record = Mapping[str, Any]


class Uploader:
    """Upload of journal records to a store through its writer. Connects on first use, and again after a failure.

    Args:
        gives_up: reject a record that fails twice while the store accepts other writes, instead of retrying forever.
    """

    def __init__(self, writer: RunWriter, *, gives_up: bool = False) -> None:
        self._writer, self._gives_up = writer, gives_up
        self._forget()

    def _forget(self) -> None:
        self._writer.forget()
        self._parents: dict[str, RunRef] = {}
        self._points: dict[str, dict[str, RunRef]] = {}  # by study and identity
        self._trials: dict[tuple[str, str], RunRef] = {}

    def connect(self) -> None:
        """Connect to the store ahead of the first record. A failure is left to that."""
        with suppress(Unreachable, Rejected, OSError):
            self._writer.connect()

    def apply(self, record: Record, *, is_new: bool = False) -> None:
        """Upload a journal's record. The store is not searched for a record that `is_new`.

        Raises:
            Unreachable: it should be tried again later.
            Rejected: the store refuses it for good.
        """
        try:
            self._apply(record, is_new)
        except Failing:
            self._forget()
            if not self._gives_up:
                raise
            self._writer.check_takes(str(record["study"]))
            try:
                self._apply(record, is_new=False)
            except Failing as error:
                self._forget()
                raise Rejected(str(error)) from error
        except Unreachable:
            self._forget()
            raise
        except Rejected:
            # Cached ids may be stale: an experiment deleted by hand, a database replaced.
            self._forget()
            self._apply(record, is_new=False)

    def _apply(self, record: Record, is_new: bool) -> None:
        try:
            if (kind := record["kind"]) not in _HANDLERS:
                raise Rejected(f"unknown kind of record {kind!r}: written by a newer raypar?")
            _HANDLERS[kind](self, record, is_new)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise Rejected(f"unreadable record: {type(e).__name__}: {e}") from e

    def _execution(self, record: Record, is_new: bool) -> None:
        description = str(record["description"])
        tags = {**_long_tags(record["tags"]), **_totals(record)}
        if description:
            tags[NOTE] = harmless(description)
            if harmless(description) != description:
                tags |= _long_tags({DESCRIPTION: description})
        parent = self._parent(record, name=record["name"], tags=tags, is_new=is_new)
        keys = key_names(record["params"])
        params = {keys[k]: str(v) for k, v in record["params"].items()}
        self._writer.log(parent, params=params, tags={} if is_new else tags)
        if record["study_source"]:
            self._writer.write_file(parent, SOURCE_FILE, record["study_source"])
        self._describe(record)

    def _describe(self, record: Record) -> None:
        """Write the experiment's description. It starts with the answer, as MLflow's pages show the first lines."""
        answer, about = str(record.get("answer", "")), str(record.get("about", ""))
        if answer or about:
            linked = links(self._writer.experiment(record["study"]))
            note = "\n\n".join(filter(None, [harmless(answer), linked, harmless(about)]))
            self._writer.describe_experiment(record["study"], NOTE, note)

    def _trial(self, record: Record, is_new: bool) -> None:
        stored = record["result"]  # decoded in journals of earlier versions
        text = stored if isinstance(stored, str) else json.dumps(stored, separators=(",", ":"))
        result = result_from_json(text)
        child = child_run(result, result_json=text, recorded_at=record["at"])
        kept = journal.kept_folder(self._writer.project_dir, record.get("artifact_dir"))
        if (logged := _logged(kept)) is not None:
            child = with_logged(child, logged, result)
        study, uid, execution = record["study"], _quotable(record["uid"]), _quotable(record["execution"])
        parent, point = self._parent(record), record.get("point")
        run = None if is_new else self._writer.find(study, uid=uid)
        if run is None:
            name = short_label(result.spec.point)
            above = self._point(record, point, name, child.params, child.start_ms) if point else parent
            ids = {"raypar.uid": uid, "raypar.execution": execution, "mlflow.parentRunId": above.run_id}
            tags = {**child.tags, **record.get("source", {}), **ids}
            run = self._writer.create(study, child.name, child.start_ms, tags)
        system = [Point(*point) for point in record.get("system", ())]
        self._writer.log(run, params=child.params, points=[*child.points, *system])
        self._writer.log_inputs(run, child.inputs)
        if kept is not None and logged is not None:  # before raypar's files, whose names take precedence
            self._writer.write_folder(run, "", kept / LOGGED_FOLDER / FILES)
            for model in logged.models:
                folder, uid = kept / LOGGED_FOLDER / MODELS / model.folder, _quotable(model.folder)
                self._writer.log_model(
                    study, run, folder, uid=uid, name=model.name, step=model.step, params=model.params
                )
        for name, content in child.files.items():
            self._writer.write_file(run, name, content)
        if kept is not None:  # None: deleted before the store could be reached
            folders = (path for path in kept.iterdir() if path.is_dir() and not path.is_symlink())
            for folder in sorted(path for path in folders if path.name != LOGGED_FOLDER):
                self._writer.write_folder(run, folder.name, folder)
        # The last necessary call: a run counts as a result once it has ended.
        self._writer.end(run, child.status, child.end_ms)
        self._trials[record["execution"], result.spec.identity] = run
        with suppress(Unreachable, Rejected):  # later records have them too, at the latest the closing one
            self._writer.log(parent, tags=_totals(record))
        self._view(record)

    def _metrics(self, record: Record, _is_new: bool) -> None:
        # A later time keeps their order at the same step.
        points = list(enumerate(record["points"], round(record["at"] * 1000)))
        keys = key_names(key for _, (key, _, _) in points)
        metrics = [Point(keys[key], float(value), time_ms, int(step)) for time_ms, (key, value, step) in points]
        self._writer.log(self._parent(record), points=metrics)
        self._view(record)

    def _summary(self, record: Record, _is_new: bool) -> None:
        self._describe(record)
        parent, at_ms = self._parent(record), round(record["at"] * 1000)
        for order, content in enumerate(record["points"]):
            point = PointRun(**content)
            run = self._point(record, point.identity, point.name, point.params, at_ms)
            keys = key_names(point.metrics)
            metrics = [Point(keys[key], float(value), at_ms, 0) for key, value in point.metrics.items()]
            metrics += [Point(key, math.nan, at_ms, 0) for key in self._writer.current_metrics(run, point.withdrawn)]
            place = {"raypar.order": f"{order:04}", "mlflow.parentRunId": parent.run_id, "mlflow.runName": point.name}
            self._writer.log(run, params=point.params, points=metrics, tags={**point.tags, **place})

    def _trial_metrics(self, record: Record, _is_new: bool) -> None:
        time_ms = round(record["at"] * 1000)
        for identity, values in record["by_identity"].items():
            if (run := self._trial_run(record, identity)) is not None:
                keys = key_names(values)
                self._writer.log(run, points=[Point(keys[k], float(v), time_ms, 0) for k, v in values.items()])

    def _trial_inputs(self, record: Record, _is_new: bool) -> None:
        for identity, data in record["by_identity"].items():
            if (run := self._trial_run(record, identity)) is not None:
                self._writer.log_inputs(run, inputs_of(data, record["contexts"]))

    def _model(self, record: Record, _is_new: bool) -> None:
        run = self._trial_run(record, record["identity"])
        folder = journal.kept_folder(self._writer.project_dir, record["folder"])
        if run is not None and folder is not None:  # None: deleted before the store could be reached
            points = [Point(*point) for point in record.get("points", ())]
            about = {"name": record.get("name", BEST_MODEL), "step": int(record.get("step", 0)), "points": points}
            self._writer.log_model(record["study"], run, folder, uid=_quotable(record["uid"]), **about)

    def _artifact(self, record: Record, _is_new: bool) -> None:
        self._writer.write_file(self._parent(record), record["path"], record["text"])

    def _close(self, record: Record, _is_new: bool) -> None:
        parent, end_ms = self._parent(record), round(record["at"] * 1000)
        study, execution, status = record["study"], _quotable(record["execution"]), record["status"]
        if status != "FINISHED":
            # Trials whose upload broke off and that are in no journal count as not run.
            for run in self._writer.find_running(study, "trial", execution=execution):
                self._writer.log(run, tags={"raypar.kind": INCOMPLETE})
                self._writer.end(run, "KILLED", end_ms)
        for run in self._writer.find_running(study, "point", execution=execution):
            self._writer.end(run, "FINISHED", end_ms)
        # If a full disk kept the end out of the journal, the journal looks as if its process had been killed.
        if status != "KILLED" or self._writer.find_running(study, "execution", uid=execution):
            self._writer.log(parent, tags=_totals(record))
            self._writer.end(parent, status, end_ms)

    def _view(self, record: Record) -> None:
        """Update the study's saved views if the record has any. Failures are ignored."""
        if shown := record.get("shown"):
            with suppress(Unreachable, Rejected):
                for tag, text in saved_views(ViewContent.from_record(shown), at_ms=round(record["at"] * 1000)).items():
                    self._writer.describe_experiment(record["study"], tag, text)

    def _parent(
        self, record: Record, *, name: str = "", tags: Mapping[str, str] | None = None, is_new: bool = False
    ) -> RunRef:
        """Return the run of the record's execution, created if its own record was damaged."""
        uid, study = _quotable(record["execution"]), str(record["study"])
        if uid not in self._parents:
            run = None if is_new else self._writer.find(study, uid=uid)
            if run is None:
                ids = {"raypar.kind": "execution", "raypar.study": study, "raypar.uid": uid}
                run = self._writer.create(study, name or study, round(record["at"] * 1000), {**(tags or {}), **ids})
            self._parents[uid] = run
        return self._parents[uid]

    def _point(self, record: Record, identity: str, name: str, params: Mapping[str, str], start_ms: int) -> RunRef:
        """Return the run of a point, which is created if the study has none."""
        study, uid = record["study"], _quotable(identity)
        if study not in self._points:
            self._points[study] = self._writer.point_runs(study)
        points = self._points[study]
        if uid not in points:
            execution = _quotable(record["execution"])
            ids = {"raypar.kind": "point", "raypar.point": uid, "raypar.execution": execution}
            tags = {**ids, "mlflow.parentRunId": self._parent(record).run_id}
            points[uid] = self._writer.create(study, name, start_ms, tags)
            self._writer.log(points[uid], params=params)
        return points[uid]

    def _trial_run(self, record: Record, identity: str) -> RunRef | None:
        """Return the run of a trial in this execution, else in the latest one that has it."""
        study, execution, identity = record["study"], record["execution"], _quotable(identity)
        return (
            self._trials.get((execution, identity))
            or self._writer.find(study, identity=identity, execution=_quotable(execution))
            or self._writer.find(study, identity=identity)
        )


_KINDS = ("execution", "trial", "summary", "metrics", "trial_metrics", "trial_inputs", "model", "artifact", "close")
_HANDLERS: Mapping[str, Callable[[Uploader, Record, bool], None]] = {
    kind: getattr(Uploader, f"_{kind}") for kind in _KINDS
}


def _logged(kept: Path | None) -> LoggedRun | None:
    """Return what the trial's script logged to MLflow itself; None if there is nothing, or its record is damaged."""
    if kept is None:
        return None
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        return LoggedRun.read(kept / LOGGED_FOLDER)
    return None


def _totals(record: Record) -> dict[str, str]:
    counts = {f"raypar.{key}": str(value) for key, value in record["totals"].items()}
    return {**counts, "raypar.last_used_at": repr(float(record["at"]))}


def _long_tags(tags: Mapping[str, str]) -> dict[str, str]:
    texts = [(key, str(tags[original])) for original, key in key_names(tags).items()]
    parts = (split_tag(key, text) or {key: text} for key, text in texts)
    return {key: part for pieces in parts for key, part in pieces.items()}


def _quotable(uid: str) -> str:
    """Return a uid that can be quoted in a search."""
    return uid if all(c.isalnum() or c in "-_@." for c in uid) else short_hash(uid)


@dataclass
class UploadReport:
    """Outcome of an upload.

    Attributes:
        num_uploaded, num_rejected: records that the store has accepted, and refused (kept beside the journal).
        num_left: records that are still only in journals; counted by `sync`.
        problems: messages on damaged and rejected records and, with `sync`, outages.
        outage: why the upload of a journal stopped; empty if it finished.
    """

    num_uploaded: int = 0
    num_rejected: int = 0
    num_left: int = 0
    problems: list[str] = field(default_factory=list)
    outage: str = ""


def replay(
    path: Path, uploader: Uploader, tracking_uri: str, *, new_from: int | None = None, is_ended: bool = False
) -> UploadReport:
    """Upload the pending records of a journal. Call it under `journal.upload_lock`.

    Args:
        tracking_uri: the uploader's store, whose ack counts.
        new_from: offset from which on no record can be in the store yet.
        is_ended: the journal has no writer, so that a half-written last line will not grow.

    Raises:
        OSError: the journal can't be read, or the ack not be written.
    """
    done = UploadReport()
    for line in journal.pending_lines(path, tracking_uri, is_ended=is_ended):
        if line.record is None:
            done.problems.append(line.problem)
            log.warning("%s", line.problem)
        else:
            try:
                uploader.apply(line.record, is_new=new_from is not None and line.start >= new_from)
                done.num_uploaded += 1
            except Unreachable as e:
                done.outage = str(e) or "no answer"
                return done
            except Rejected as e:
                kept = journal.keep_rejected(path, line.record, str(e))
                done.num_rejected += 1
                done.problems.append(f"a {line.record['kind']} record was refused by the store and kept in {kept}: {e}")
                log.warning("%s", done.problems[-1])
        journal.write_ack(path, tracking_uri, line.end)
    return done


def sync(project_dir: Path, tracking_uri: str | None = None, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> UploadReport:
    """Upload every pending journal. This can be repeated, even while a study or another sync is running.

    Args:
        tracking_uri: the store to upload to; None: each journal's own store.
        lock_timeout_s: how long to wait for another upload.

    Raises:
        StoreError: the journals can't be read or written, another upload takes too long, or the address is invalid.
    """
    if tracking_uri is not None:
        check_address(tracking_uri)
    total, uploaders, outages = UploadReport(), dict[str, Uploader](), dict[str, str]()
    if not journal.journal_paths(project_dir):
        return total
    with _only_upload(project_dir, lock_timeout_s):
        for path in journal.journal_paths(project_dir):
            uri = tracking_uri or journal.read_ack(path)[0] or default_tracking_uri(project_dir)
            if uri not in outages:
                uploader = uploaders.setdefault(uri, Uploader(RunWriter(uri, project_dir), gives_up=True))
                done = _sync_one(path, uploader, uri)
                total.num_uploaded += done.num_uploaded
                total.num_rejected += done.num_rejected
                total.problems += done.problems
                if done.outage:
                    outages[uri] = done.outage
            total.num_left += journal.num_pending(path, uri)
    for error in (unreachable(uri, reason) for uri, reason in outages.items()):
        total.problems.append(f"{error.message}; {error.hint}")
    return total


@contextmanager
def _only_upload(project_dir: Path, timeout_s: float) -> Iterator[None]:
    """Lock a project's journals for an upload. Raises StoreError if they are in use, or can't be read or written."""
    try:
        with journal.upload_lock(project_dir).acquire(timeout=timeout_s):
            yield
    except TimeoutError as e:
        problem = f"another upload from {project_dir} is still running"
        raise StoreError(problem, hint="wait until it ends, then try again") from e
    except OSError as e:
        problem = f"the journals in {journal.journal_dir(project_dir)} can't be read or written: {e.strerror or e}"
        raise StoreError(problem, hint="make the folder writable, then try again") from e


def end_abandoned(project_dir: Path, tracking_uri: str) -> None:
    """Upload the journals of executions whose process has ended; the runs of killed processes become KILLED.

    A journal's lock is free once its process has ended, so running executions, here or on other machines, are left
    alone. What fails is left to `sync`.
    """
    paths = journal.journal_paths(project_dir, tracking_uri)
    with suppress(OSError):  # the lock is held by another upload, or the folder can't be written
        if not any(map(journal.is_abandoned, paths)):
            return
        uploader = Uploader(RunWriter(tracking_uri, project_dir))
        with journal.upload_lock(project_dir).acquire(timeout=ABANDONED_LOCK_TIMEOUT_S):
            for path in filter(journal.is_abandoned, paths):
                if _sync_one(path, uploader, tracking_uri).outage:
                    return


def _sync_one(path: Path, uploader: Uploader, tracking_uri: str) -> UploadReport:
    owner = journal.owner_lock(path)
    try:
        owner.acquire(timeout=0)
    except TimeoutError:  # its study is running
        return replay(path, uploader, tracking_uri)
    try:
        done = replay(path, uploader, tracking_uri, is_ended=True)
        records = (line.record for line in journal.read_lines(path, is_ended=True) if line.record)
        last = next(iter(deque(records, maxlen=1)), None)
        if not done.outage and last is not None and last["kind"] != "close":
            # The process was killed: without this, its run would stay RUNNING forever.
            of_execution = {key: last.get(key) for key in ("study", "execution", "at", "totals")}
            with closing(journal.Journal(path)) as writer:
                writer.append(json.dumps({**of_execution, "kind": "close", "status": "KILLED"}))
            done.outage = replay(path, uploader, tracking_uri).outage
        if not done.outage:
            journal.remove(path)
        return done
    finally:
        owner.release()


def delete_study(study: str, tracking_uri: str, project_dir: Path) -> str:
    """Delete a study from its store; return the id of its experiment, which MLflow can restore.

    This project's journals are uploaded first, so that the study does not reappear.

    Raises:
        RayparError: the study is running, or not in the store.
        StoreError: the store can't be reached.
    """
    experiment_id = _settled_experiment(study, tracking_uri, project_dir)
    with reachable(tracking_uri):
        RunWriter(tracking_uri, project_dir).delete_experiment(experiment_id)
    return experiment_id


_Trial: TypeAlias = tuple[StoredRun, TrialSpec]


def rename_study(
    study: str,
    new: str,
    tracking_uri: str,
    project_dir: Path,
    shown: Callable[[Sequence[_Trial]], Iterable[_Trial]] = iter,
) -> None:
    """Rename a study and its trials; the new name must be free.

    Identities of trials and points contain the study's name, so their tags are rewritten. The experiment is renamed
    last: until then the study keeps its old name, and another call finishes the renaming. Raises as `delete_study`.

    Args:
        shown: wraps the trials to show progress, as each takes a request.
    """
    experiment_id = _settled_experiment(study, tracking_uri, project_dir)
    store, writer = Store(tracking_uri, project_dir), RunWriter(tracking_uri, project_dir)
    points: dict[str, str] = {}

    def label(run: StoredRun, key: str, value: str) -> None:
        if run.tags.get(key) != value:
            writer.log(RunRef(run.run_id, run.artifact_uri), tags={key: value})

    with reachable(tracking_uri):
        trials = [(run, result.spec) for run, result in store.trial_runs(study)]
        for run, spec in shown(trials):
            renamed = replace(spec, study=new)
            points[spec.point_identity] = renamed.point_identity
            label(run, "raypar.identity", renamed.identity)
        for run in store.runs(study, kind="point"):
            if (identity := run.tags.get("raypar.point", "")) in points:
                label(run, "raypar.point", points[identity])
        for run in store.runs(study, kind="execution"):
            label(run, "raypar.study", new)
        writer.rename_experiment(experiment_id, new)


def _settled_experiment(study: str, tracking_uri: str, project_dir: Path) -> str:
    """Upload all that this project has of a study; return the id of its experiment."""
    paths = journal.journal_paths(project_dir, tracking_uri)
    uploader = Uploader(RunWriter(tracking_uri, project_dir))
    with _only_upload(project_dir, LOCK_TIMEOUT_S):
        for path in paths:
            if journal.study_of(path) != study:
                continue
            if outage := _sync_one(path, uploader, tracking_uri).outage:
                raise unreachable(tracking_uri, outage)
            if path.exists():
                raise RayparError(f"study `{study}` is running", hint="wait until it ends, or stop it")
    store = Store(tracking_uri, project_dir)
    if has_server(tracking_uri) and any(execution.status == "RUNNING" for execution in store.executions(study)):
        hint = "stop it there; if its process was killed, run `raypar store sync` in its folder"
        raise RayparError(f"study `{study}` is running, maybe on another machine", hint=hint)
    if (experiment_id := store.experiment_id(study)) is None:
        raise RayparError(f"no study `{study}` in the store", hint="`raypar list` shows all studies")
    return experiment_id
