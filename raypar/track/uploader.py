"""Upload of journal records to MLflow: idempotent, in order."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raypar.study.trial import TrialResult
from raypar.track import journal as spool
from raypar.track.client import (
    MODEL_NAME,
    Rejected,
    Unreachable,
    artifact_root,
    connect,
    import_mlflow,
    local_folder,
    store_errors,
    upload_model,
)
from raypar.track.journal import kept_folder
from raypar.track.names import (
    MAX_EXPERIMENT_NAME_LENGTH,
    MAX_EXPERIMENT_TAG_LENGTH,
    MAX_PARAM_LENGTH,
    MAX_TAG_LENGTH,
    clip,
    experiment_name,
    key_names,
    safe_name,
    short_hash,
    split_tag,
)
from raypar.track.runs import SOURCE_FILE, Input, Point, child_run, inputs_of
from raypar.track.view import VIEW_TAG, Shown, experiment_path, saved_view

# What one log_batch call may hold.
_MAX_POINTS, _MAX_PAIRS = 1000, 100


@dataclass(frozen=True)
class RunRef:
    """A run in the store: its id, and where its files go."""

    run_id: str
    artifact_uri: str


class RunWriter:
    """Every method raises Unreachable or Rejected where the store does not take what it is given."""

    def __init__(self, tracking_uri: str, project_dir: Path) -> None:
        self._tracking_uri = tracking_uri
        self.project_dir = project_dir
        self.forget()

    def forget(self) -> None:
        """Drops what is remembered of the store: it may have come back as another one."""
        self._client: Any = None
        self._experiments: dict[str, str] = {}

    def experiment(self, study: str) -> str:
        """The id of the study's experiment, made if there is none."""
        if study not in self._experiments:
            with store_errors():
                self._experiments[study] = self._find_or_create_experiment(study)
        return self._experiments[study]

    def describe_experiment(self, study: str, key: str, value: str) -> None:
        """Sets a tag of the study's experiment."""
        experiment_id = self.experiment(study)
        with store_errors():
            self._connected().set_experiment_tag(experiment_id, key, clip(value, MAX_EXPERIMENT_TAG_LENGTH))

    def find(self, study: str, **tags: str) -> RunRef | None:
        """The latest run of the study with these ``raypar.`` tags, deleted ones included."""
        experiment_id = self.experiment(study)
        with store_errors():
            found = self._connected().search_runs(
                [experiment_id],
                " AND ".join(f"tags.`raypar.{key}` = '{value}'" for key, value in tags.items()),
                run_view_type=import_mlflow().entities.ViewType.ALL,
                max_results=1,
                order_by=["attributes.start_time DESC"],
            )
        return RunRef(found[0].info.run_id, found[0].info.artifact_uri) if found else None

    def create(self, study: str, name: str, start_ms: int, tags: Mapping[str, str]) -> RunRef:
        """A new run."""
        experiment_id = self.experiment(study)
        with store_errors():
            run = self._connected().create_run(experiment_id, start_ms, dict(tags), run_name=clip(name, 500))
        return RunRef(run.info.run_id, run.info.artifact_uri)

    def log(
        self,
        run: RunRef,
        *,
        params: Mapping[str, str] | None = None,
        points: Sequence[Point] = (),
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Adds to a run, in as few calls as MLflow allows. Points that are there already are not doubled."""
        with store_errors():
            entities = import_mlflow().entities
            metrics = [entities.Metric(p.key, p.value, p.time_ms, p.step) for p in points]
            pairs = [entities.Param(k, v) for k, v in (params or {}).items()]
            labels = [entities.RunTag(k, v) for k, v in (tags or {}).items()]
            while metrics or pairs or labels:
                batch = metrics[:_MAX_POINTS], pairs[:_MAX_PAIRS], labels[:_MAX_PAIRS]
                self._connected().log_batch(run.run_id, *batch)
                metrics, pairs, labels = metrics[_MAX_POINTS:], pairs[_MAX_PAIRS:], labels[_MAX_PAIRS:]

    def log_inputs(self, run: RunRef, inputs: Sequence[Input]) -> None:
        """Data sets that a run used. Those that are there already are not doubled."""
        if not inputs:
            return
        with store_errors():
            entities = import_mlflow().entities
            datasets = [
                entities.DatasetInput(
                    entities.Dataset(i.name, i.digest, "code", i.source, i.schema or None, i.profile),
                    [entities.InputTag("mlflow.data.context", i.context)],
                )
                for i in inputs
            ]
            self._connected().log_inputs(run.run_id, datasets)

    def log_model(self, study: str, run: RunRef, folder: Path, uid: str) -> None:
        """A folder as a model of the run; the same one where this uid is there already."""
        experiment_id = self.experiment(study)
        with store_errors():
            upload_model(self._connected(), experiment_id, run.run_id, folder, uid=uid, name=MODEL_NAME)

    def write_file(self, run: RunRef, name: str, text: str) -> None:
        """A text among the run's artifacts; ``folder/name`` makes a folder."""
        parts = [safe_name(part) for part in name.split("/") if part]
        folder = local_folder(run.artifact_uri)
        with store_errors():
            if folder is None:
                self._connected().log_text(run.run_id, text, "/".join(parts))
            else:  # as MLflow does it, without its 20 ms
                path = folder.joinpath(*parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8", errors="replace")

    def write_folder(self, run: RunRef, name: str, source: Path) -> None:
        """A copy of a folder's files among the run's artifacts, without those that are only linked there."""
        folder = local_folder(run.artifact_uri)
        with store_errors():
            for path in sorted(source.rglob("*")):
                if not path.is_file() or not path.resolve().is_relative_to(source.resolve()):
                    continue
                place = Path(safe_name(name)) / path.relative_to(source).parent
                if folder is None:
                    self._connected().log_artifact(run.run_id, str(path), place.as_posix())
                else:
                    (folder / place).mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, folder / place / path.name)

    def end(self, run: RunRef, status: str, end_ms: int) -> None:
        """FINISHED, FAILED or KILLED."""
        with store_errors():
            self._connected().set_terminated(run.run_id, status, end_ms)

    def _connected(self) -> Any:
        if self._client is None:
            self._client = connect(self._tracking_uri)
        return self._client

    def _find_or_create_experiment(self, study: str) -> str:
        client, name = self._connected(), experiment_name(study)
        found = client.get_experiment_by_name(name)
        if found is not None and found.lifecycle_stage != "active":
            # The name of a deleted study is taken until MLflow purges it: it stays deleted, under another name.
            client.restore_experiment(found.experiment_id)
            bin_name = f"{name[: MAX_EXPERIMENT_NAME_LENGTH - 40]} (deleted, {found.experiment_id})"
            client.rename_experiment(found.experiment_id, bin_name)
            client.delete_experiment(found.experiment_id)
            found = None
        tags = {"raypar.study": clip(study, MAX_TAG_LENGTH), "mlflow.experimentKind": "custom_model_development"}
        if found is None:
            root = artifact_root(self._tracking_uri, self.project_dir)
            folder = (root / safe_name(study)).as_uri() if root else None
            try:
                return str(client.create_experiment(name, artifact_location=folder, tags=tags))
            except import_mlflow().exceptions.MlflowException as e:
                if e.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            found = client.get_experiment_by_name(name)  # another process was quicker
        if "raypar.study" not in found.tags:  # someone's own experiment of that name
            for key, value in tags.items():
                client.set_experiment_tag(found.experiment_id, key, value)
        return str(found.experiment_id)


Record = Mapping[str, Any]


class Uploader:
    """Applies journal records to one store, through its writer. Connects when first used, and again after a failure."""

    def __init__(self, store: RunWriter) -> None:
        self._store = store
        self._forget()

    def _forget(self) -> None:
        self._store.forget()
        self._parents: dict[str, RunRef] = {}
        self._trials: dict[tuple[str, str], RunRef] = {}

    def apply(self, record: Record, *, is_new: bool = False) -> None:
        """Brings a record into the store.

        Args:
            record: one line of a spool.
            is_new: it can't be in the store yet, so it need not be looked for.

        Raises:
            Unreachable: to be tried again later.
            Rejected: the store will never take it.
        """
        try:
            try:
                self._apply(record, is_new)
            except Rejected:
                # What was remembered may be gone since: an experiment deleted by hand, a database replaced.
                self._forget()
                self._apply(record, is_new=False)
        except Unreachable:
            self._forget()
            raise

    def _apply(self, record: Record, is_new: bool) -> None:
        try:
            apply = _APPLY.get(record["kind"])
            if apply is None:
                raise Rejected(f"a record of the unknown kind {record['kind']!r}: written by a newer raypar?")
            apply(self, record, is_new)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise Rejected(f"a record that can't be read: {type(e).__name__}: {e}") from e

    def _execution(self, record: Record, is_new: bool) -> None:
        study, description = str(record["study"]), str(record["description"])
        tags = {**_long_tags(record["tags"]), **_totals(record)}
        if description:
            tags["mlflow.note.content"] = clip(description, MAX_TAG_LENGTH)
        parent = self._parent(record, name=record["name"], tags=tags, is_new=is_new)
        keys = key_names(record["params"])
        params = {keys[k]: clip(str(v), MAX_PARAM_LENGTH) for k, v in record["params"].items()}
        self._store.log(parent, params=params, tags={} if is_new else tags)
        if record["study_source"]:
            self._store.write_file(parent, SOURCE_FILE, record["study_source"])
        if about := str(record.get("about", description)):
            link = experiment_path(self._store.experiment(study), charts=True)
            # First, because MLflow folds the description to its first line.
            note = f"[Charts]({link}) · {clip(about, MAX_EXPERIMENT_TAG_LENGTH - 200)}"
            self._store.describe_experiment(study, "mlflow.note.content", note)

    def _trial(self, record: Record, is_new: bool) -> None:
        text = json.dumps(record["result"], separators=(",", ":"))
        result = TrialResult.from_json(text)
        child = child_run(result, result_json=text, recorded_at=record["at"])
        study, uid, parent = record["study"], _quotable(record["uid"]), self._parent(record)
        run = None if is_new else self._store.find(study, uid=uid)
        if run is None:
            own = {
                "raypar.uid": uid,
                "raypar.execution": _quotable(record["execution"]),
                "mlflow.parentRunId": parent.run_id,
            }
            run = self._store.create(study, child.name, child.start_ms, {**child.tags, **own})
        system = [Point(*point) for point in record.get("system", ())]
        self._store.log(run, params=child.params, points=[*child.points, *system])
        self._store.log_inputs(run, child.inputs)
        for name, content in child.files.items():
            self._store.write_file(run, name, content)
        kept = kept_folder(self._store.project_dir, record.get("artifact_dir"))
        if kept is not None:  # else its disk was cleaned before the store could be reached
            for folder in sorted(path for path in kept.iterdir() if path.is_dir() and not path.is_symlink()):
                self._store.write_folder(run, folder.name, folder)
        self._store.end(run, child.status, child.end_ms)
        self._trials[record["execution"], result.spec.identity] = run
        self._store.log(parent, tags=_totals(record))
        self._view(record)

    def _metrics(self, record: Record, _is_new: bool) -> None:
        time_ms = round(record["at"] * 1000)
        keys = key_names(key for key, _, _ in record["points"])
        points = [Point(keys[key], float(value), time_ms, int(step)) for key, value, step in record["points"]]
        self._store.log(self._parent(record), points=points)
        self._view(record)

    def _trial_metrics(self, record: Record, _is_new: bool) -> None:
        time_ms = round(record["at"] * 1000)
        for identity, values in record["by_identity"].items():
            run = self._trial_run(record, _quotable(identity))
            if run is not None:
                keys = key_names(values)
                self._store.log(run, points=[Point(keys[k], float(v), time_ms, 0) for k, v in values.items()])

    def _trial_inputs(self, record: Record, _is_new: bool) -> None:
        for identity, data in record["by_identity"].items():
            run = self._trial_run(record, _quotable(identity))
            if run is not None:
                self._store.log_inputs(run, inputs_of(data, record["contexts"]))

    def _model(self, record: Record, _is_new: bool) -> None:
        run = self._trial_run(record, _quotable(record["identity"]))
        folder = kept_folder(self._store.project_dir, record["folder"])
        if run is not None and folder is not None:  # else its disk was cleaned before the store could be reached
            self._store.log_model(record["study"], run, folder, _quotable(record["uid"]))

    def _artifact(self, record: Record, _is_new: bool) -> None:
        self._store.write_file(self._parent(record), record["path"], record["text"])

    def _close(self, record: Record, _is_new: bool) -> None:
        parent = self._parent(record)
        self._store.log(parent, tags=_totals(record))
        self._store.end(parent, record["status"], round(record["at"] * 1000))

    def _view(self, record: Record) -> None:
        """The study's saved view, where the record tells of one. A nicety: whatever goes wrong with it is let go."""
        if not (shown := record.get("shown")):
            return
        text = saved_view(Shown(**shown), at_ms=round(record["at"] * 1000))
        if text is not None:
            try:
                self._store.describe_experiment(record["study"], VIEW_TAG, text)
            except (Unreachable, Rejected):
                pass

    def _parent(
        self, record: Record, *, name: str = "", tags: Mapping[str, str] | None = None, is_new: bool = False
    ) -> RunRef:
        """The run of the record's execution; made here if the record that tells of it was damaged."""
        uid, study = _quotable(record["execution"]), str(record["study"])
        if uid not in self._parents:
            run = None if is_new else self._store.find(study, uid=uid)
            if run is None:
                own = {"raypar.kind": "execution", "raypar.study": clip(study, MAX_TAG_LENGTH), "raypar.uid": uid}
                run = self._store.create(study, name or study, round(record["at"] * 1000), {**(tags or {}), **own})
            self._parents[uid] = run
        return self._parents[uid]

    def _trial_run(self, record: Record, identity: str) -> RunRef | None:
        """The run of a trial in this execution, or else in the latest one that has it."""
        study, execution = record["study"], record["execution"]
        run = self._trials.get((execution, identity))
        if run is None:
            run = self._store.find(study, identity=identity, execution=_quotable(execution))
        return run or self._store.find(study, identity=identity)


_APPLY: dict[str, Callable[[Uploader, Record, bool], None]] = {
    "execution": Uploader._execution,
    "trial": Uploader._trial,
    "metrics": Uploader._metrics,
    "trial_metrics": Uploader._trial_metrics,
    "trial_inputs": Uploader._trial_inputs,
    "model": Uploader._model,
    "artifact": Uploader._artifact,
    "close": Uploader._close,
}


def _totals(record: Record) -> dict[str, str]:
    counts = {f"raypar.{key}": str(value) for key, value in record["totals"].items()}
    return {**counts, "raypar.last_used_at": repr(float(record["at"]))}


def _long_tags(tags: Mapping[str, str]) -> dict[str, str]:
    keys = key_names(tags)
    parts: dict[str, str] = {}
    for key, text in tags.items():
        parts.update(split_tag(keys[key], str(text)) or {keys[key]: clip(str(text), MAX_TAG_LENGTH)})
    return parts


def _quotable(uid: str) -> str:
    """A uid that can stand in quotes in a search."""
    return uid if all(c.isalnum() or c in "-_@." for c in uid) else short_hash(uid)


log = logging.getLogger(__name__)


@dataclass
class Replay:
    """What one pass over a spool did.

    Attributes:
        problems: damaged and rejected records, file and line named.
        outage: why it stopped; empty if it went to the end.
    """

    num_uploaded: int = 0
    num_rejected: int = 0
    problems: list[str] = field(default_factory=list)
    outage: str = ""


def replay(
    path: Path, uploader: Uploader, tracking_uri: str, *, new_from: int | None = None, is_ended: bool = False
) -> Replay:
    """Uploads the pending records of a spool. To be called under `spool.upload_lock`.

    Args:
        path: the spool.
        uploader: to the store of `tracking_uri`.
        tracking_uri: which store's ack counts.
        new_from: the offset from which on no record can be in the store yet.
        is_ended: nobody writes the spool any more, so that a half-written last line will never be whole.

    Raises:
        OSError: if the spool can't be read, or the ack not be written.
    """
    done = Replay()
    for line in spool.read_lines(path, spool.read_ack(path, tracking_uri), is_ended=is_ended):
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
                kept = spool.keep_rejected(path, line.record, str(e))
                done.num_rejected += 1
                done.problems.append(f"a {line.record['kind']} record was refused by the store, kept in {kept}: {e}")
                log.warning("%s", done.problems[-1])
        spool.write_ack(path, tracking_uri, line.end)
    return done


def num_pending(path: Path, tracking_uri: str) -> int:
    """How many records of a spool this store has not got."""
    try:
        return sum(line.record is not None for line in spool.read_lines(path, spool.read_ack(path, tracking_uri)))
    except FileNotFoundError:
        return 0
