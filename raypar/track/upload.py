"""Journal records into MLflow, each as often as one likes: what is there already is found, not made again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from raypar.study.trial import TrialResult
from raypar.track.client import Rejected, Unreachable
from raypar.track.inputs import inputs_of
from raypar.track.names import (
    MAX_EXPERIMENT_TAG_LENGTH,
    MAX_PARAM_LENGTH,
    MAX_TAG_LENGTH,
    clip,
    key_names,
    short_hash,
    split_tag,
)
from raypar.track.runs import SOURCE_FILE, Point, child_run
from raypar.track.spool import kept_folder
from raypar.track.view import VIEW_TAG, Shown, experiment_path, saved_view
from raypar.track.writer import RunRef, RunWriter

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
