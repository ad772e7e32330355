"""Writer of experiments, runs and their files in MLflow."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from raypar.track.client import (
    artifact_root,
    close_store,
    connect,
    import_mlflow,
    local_folder,
    store_errors,
    tag_filter,
    upload_model,
)
from raypar.track.names import (
    MAX_EXPERIMENT_TAG_LENGTH,
    MAX_NAME_LENGTH,
    MAX_PARAM_LENGTH,
    MAX_TAG_LENGTH,
    clip,
    experiment_name,
    safe_name,
)
from raypar.track.runs import Input, Point

# Limits of one log_batch call.
_MAX_POINTS, _MAX_PAIRS = 1000, 100
_MAX_RUNS = 1000  # of one search


class RunRef(NamedTuple):
    """Run in the store: its id, and the URI of its files."""

    run_id: str
    artifact_uri: str


def _ref(run: Any) -> RunRef:
    return RunRef(run.info.run_id, run.info.artifact_uri)


class RunWriter:
    """Writer of experiments and runs. Methods raise Unreachable or Rejected if the store does not accept it."""

    def __init__(self, tracking_uri: str, project_dir: Path) -> None:
        self._tracking_uri = tracking_uri
        self.project_dir = project_dir
        self.forget()

    def forget(self) -> None:
        """Drop the connection and cached ids: the store may have been replaced."""
        self.__dict__.pop("_client", None)
        self._experiments: dict[str, str] = {}

    @cached_property
    def _client(self) -> Any:
        client = connect(self._tracking_uri)
        close_store(self._tracking_uri, self.project_dir)
        return client

    @store_errors()
    def connect(self) -> None:
        """Connect to the store now instead of on first use."""
        assert self._client

    @store_errors()
    def experiment(self, study: str) -> str:
        """Return the id of the study's experiment, which is created if missing."""
        if study not in self._experiments:
            self._experiments[study] = self._find_or_create_experiment(study)
        return self._experiments[study]

    @store_errors()
    def describe_experiment(self, study: str, key: str, value: str) -> None:
        """Set a tag of the study's experiment."""
        self._client.set_experiment_tag(self.experiment(study), key, clip(value, MAX_EXPERIMENT_TAG_LENGTH))

    @store_errors()
    def check_takes(self, study: str) -> None:
        """Rewrite an existing tag of the experiment; raise if the store accepts no writes now."""
        self._client.set_experiment_tag(self.experiment(study), "raypar.study", clip(study, MAX_TAG_LENGTH))

    @store_errors()
    def find(self, study: str, **tags: str) -> RunRef | None:
        """Return the study's latest run with these ``raypar.`` tags, including deleted ones."""
        every = import_mlflow().entities.ViewType.ALL
        order = ["attributes.start_time DESC"]
        runs = self._search(study, tags, run_view_type=every, max_results=1, order_by=order)
        return next(map(_ref, runs), None)

    @store_errors()
    def find_running(self, study: str, kind: str, **tags: str) -> list[RunRef]:
        """Return the study's unfinished runs of this kind with these ``raypar.`` tags."""
        return [_ref(run) for run in self._search(study, {"kind": kind, **tags}, " AND attributes.status = 'RUNNING'")]

    @store_errors()
    def point_runs(self, study: str) -> dict[str, RunRef]:
        """Return the runs of the study's points, by identity."""
        return {run.data.tags["raypar.point"]: _ref(run) for run in self._search(study, {"kind": "point"})}

    def _search(self, study: str, tags: Mapping[str, str], condition: str = "", **how: Any) -> Iterator[Any]:
        """Yield the study's runs with these ``raypar.`` tags."""
        query = tag_filter({f"raypar.{key}": value for key, value in tags.items()}) + condition
        ids, token = [self.experiment(study)], None
        while True:
            page = self._client.search_runs(ids, query, page_token=token, **{"max_results": _MAX_RUNS, **how})
            yield from page
            if not (token := page.token):
                return

    @store_errors()
    def create(self, study: str, name: str, start_ms: int, tags: Mapping[str, str]) -> RunRef:
        """Create a run; its start is in milliseconds of Unix time."""
        name, tags = clip(name, MAX_NAME_LENGTH), {key: clip(text, MAX_TAG_LENGTH) for key, text in tags.items()}
        info = self._client.create_run(self.experiment(study), start_ms, tags, run_name=name).info
        return RunRef(info.run_id, info.artifact_uri)

    @store_errors()
    def log(
        self,
        run: RunRef,
        *,
        params: Mapping[str, str] | None = None,
        points: Sequence[Point] = (),
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Add to a run, in as few calls as MLflow allows. Existing points are not duplicated."""
        entities = import_mlflow().entities
        metrics = [entities.Metric(p.key, p.value, p.time_ms, p.step) for p in points]
        pairs = [entities.Param(k, clip(v, MAX_PARAM_LENGTH)) for k, v in (params or {}).items()]
        labels = [entities.RunTag(k, clip(v, MAX_TAG_LENGTH)) for k, v in (tags or {}).items()]
        while metrics or pairs or labels:
            self._client.log_batch(run.run_id, metrics[:_MAX_POINTS], pairs[:_MAX_PAIRS], labels[:_MAX_PAIRS])
            metrics, pairs, labels = metrics[_MAX_POINTS:], pairs[_MAX_PAIRS:], labels[_MAX_PAIRS:]

    @store_errors()
    def current_metrics(self, run: RunRef, keys: Collection[str]) -> list[str]:
        """Return those of the metrics that a run has a number for."""
        metrics = self._client.get_run(run.run_id).data.metrics if keys else {}
        return [key for key in keys if not math.isnan(metrics.get(key, math.nan))]

    @store_errors()
    def log_inputs(self, run: RunRef, inputs: Sequence[Input]) -> None:
        """Add data sets that a run used. Existing ones are not duplicated."""
        entities = import_mlflow().entities
        datasets = [
            entities.DatasetInput(
                entities.Dataset(i.name, i.digest, "code", i.source, i.schema or None, i.profile),
                [entities.InputTag("mlflow.data.context", i.context)],
            )
            for i in inputs
        ]
        if datasets:
            self._client.log_inputs(run.run_id, datasets)

    @store_errors()
    def log_model(self, study: str, run: RunRef, folder: Path, **about: Any) -> None:
        """Add a folder as a model of the run, once per uid. `about`: the other arguments of `upload_model`."""
        upload_model(self._client, self.experiment(study), run.run_id, folder, **about)

    @store_errors()
    def write_file(self, run: RunRef, name: str, text: str) -> None:
        """Write a text to the run's artifacts; ``folder/name`` creates a folder."""
        path = Path(*(safe_name(part) for part in name.split("/") if part))
        if (folder := local_folder(run.artifact_uri)) is None:
            self._client.log_text(run.run_id, text.encode("utf-8", "replace").decode(), path.as_posix())
        else:  # as MLflow does, without its 20 ms
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8", errors="replace")

    @store_errors()
    def write_folder(self, run: RunRef, name: str, source: Path) -> None:
        """Copy a folder's files to a folder of the run's artifacts, or to their top if its name is empty.

        Links to files outside of the folder are left out.
        """
        folder = local_folder(run.artifact_uri)
        for path in sorted(source.rglob("*")):
            if not path.is_file() or not path.resolve().is_relative_to(source.resolve()):
                continue
            target = Path(safe_name(name) if name else "") / path.relative_to(source).parent
            if folder is None:
                self._client.log_artifact(run.run_id, str(path), target.as_posix() if target.parts else None)
            else:
                (folder / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder / target / path.name)

    @store_errors()
    def end(self, run: RunRef, status: str, end_ms: int) -> None:
        """Set a run's final status: FINISHED, FAILED or KILLED."""
        self._client.set_terminated(run.run_id, status, end_ms)

    @store_errors()
    def delete_experiment(self, experiment_id: str) -> None:
        """Delete an experiment. It can be restored with its files until ``mlflow gc`` removes them."""
        self._client.delete_experiment(experiment_id)

    @store_errors()
    def rename_experiment(self, experiment_id: str, study: str) -> None:
        """Give an experiment to another study, which must have none."""
        self._free_name(experiment_name(study))
        self._client.set_experiment_tag(experiment_id, "raypar.study", clip(study, MAX_TAG_LENGTH))
        self._client.rename_experiment(experiment_id, experiment_name(study))

    def _free_name(self, name: str) -> Any:
        """Return the active experiment of this name; None if there is none, in which case the name is free.

        MLflow reserves the name of a deleted experiment until it is purged, so this renames it. It stays deleted.
        """
        client, experiment = self._client, self._client.get_experiment_by_name(name)
        if experiment is None or experiment.lifecycle_stage == "active":
            return experiment
        deleted = experiment.experiment_id
        client.restore_experiment(deleted)
        client.rename_experiment(deleted, f"{name[: MAX_NAME_LENGTH - 40]} (deleted, {deleted})")
        client.delete_experiment(deleted)
        return None

    def _find_or_create_experiment(self, study: str) -> str:
        client, name = self._client, experiment_name(study)
        experiment = self._free_name(name)
        tags = {"raypar.study": clip(study, MAX_TAG_LENGTH), "mlflow.experimentKind": "custom_model_development"}
        if experiment is None:
            root = artifact_root(self._tracking_uri, self.project_dir)
            folder = (root / safe_name(study)).as_uri() if root else None
            try:
                return str(client.create_experiment(name, artifact_location=folder, tags=tags))
            except import_mlflow().exceptions.MlflowException as e:
                if e.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            experiment = client.get_experiment_by_name(name)  # another process was faster
        if "raypar.study" not in experiment.tags:  # an experiment of that name that raypar did not create
            for key, value in tags.items():
                client.set_experiment_tag(experiment.experiment_id, key, value)
        return str(experiment.experiment_id)
