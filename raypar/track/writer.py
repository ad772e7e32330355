"""Experiments and runs of one store: found, made, filled. Speaks MLflow's words and knows nothing of journals."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypar.track.client import artifact_root, connect, import_mlflow, local_folder, store_errors
from raypar.track.inputs import Input
from raypar.track.models import MODEL_NAME, upload_model
from raypar.track.names import (
    MAX_EXPERIMENT_NAME_LENGTH,
    MAX_EXPERIMENT_TAG_LENGTH,
    MAX_TAG_LENGTH,
    clip,
    experiment_name,
    safe_name,
)
from raypar.track.runs import Point

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
