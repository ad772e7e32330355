"""Experiments, runs and files of one store, read. Starts nothing and creates nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raypar.track.check import check_readable
from raypar.track.client import (
    Rejected,
    Unreachable,
    artifact_root,
    connect,
    local_folder,
    sqlite_path,
    store_errors,
    unreachable,
)
from raypar.track.embedded import EmbeddedRuns, Unfamiliar
from raypar.track.names import experiment_name
from raypar.track.runs import StoredRun

_PAGE_SIZE = 250  # a server that is asked for thousands at once takes longer than a request may


class RunReader:
    """Every method raises StoreError where the store can't be read; an embedded one that is not there yet is empty."""

    def __init__(self, tracking_uri: str, project_dir: Path) -> None:
        self._tracking_uri = tracking_uri
        self._project_dir = project_dir
        self._embedded = EmbeddedRuns(tracking_uri)
        self._connection: Any = None

    def experiments(self) -> dict[str, str]:
        """Study name to experiment id; deleted ones are not among them."""
        if self._is_missing():
            return {}
        try:
            return self._embedded.experiments()
        except Unfamiliar:
            return dict(self._experiments_by_mlflow())

    def experiment_id(self, study: str) -> str | None:
        """None if there is none, or it is deleted."""
        if self._is_missing():
            return None
        name = experiment_name(study)
        try:
            return self._embedded.experiment_id(name)
        except Unfamiliar:
            with self._told():
                found = self._client().get_experiment_by_name(name)
            return str(found.experiment_id) if found is not None and found.lifecycle_stage == "active" else None

    def runs(self, study: str, **tags: str) -> Iterable[StoredRun]:
        """The study's runs with these ``raypar.`` tags, the latest first; deleted ones are not among them."""
        experiment_id = self.experiment_id(study)
        return self.search([experiment_id] if experiment_id else [], **tags)

    def search(self, experiment_ids: Sequence[str], **tags: str) -> Iterable[StoredRun]:
        """The experiments' runs with these ``raypar.`` tags, the latest first; deleted ones are not among them."""
        if not experiment_ids or self._is_missing():
            return ()
        wanted = {f"raypar.{key}": value for key, value in tags.items()}
        try:
            return self._embedded.search(experiment_ids, wanted)
        except Unfamiliar:
            return self._search_by_mlflow(experiment_ids, wanted)

    def _experiments_by_mlflow(self) -> Iterator[tuple[str, str]]:
        client, token = self._client(), None
        while True:
            with self._told():
                page = client.search_experiments(
                    filter_string="tags.`raypar.study` != ''", max_results=1000, page_token=token
                )
            for experiment in page:
                yield experiment.tags["raypar.study"], str(experiment.experiment_id)
            token = page.token
            if not token:
                return

    def _search_by_mlflow(self, experiment_ids: Sequence[str], tags: Mapping[str, str]) -> Iterator[StoredRun]:
        client, token = self._client(), None
        while True:
            with self._told():
                page = client.search_runs(
                    list(experiment_ids),
                    " AND ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items()),
                    max_results=_PAGE_SIZE,
                    order_by=["attributes.start_time DESC"],
                    page_token=token,
                )
            for run in page:
                yield StoredRun(run.info.run_id, run.info.artifact_uri, run.info.start_time or 0, run.data.tags)
            token = page.token
            if not token:
                return

    def read_file(self, run: StoredRun, name: str) -> str | None:
        """A text among a run's artifacts; None if it isn't there."""
        folder = local_folder(run.artifact_uri)
        try:
            if folder is not None:
                return (self._moved(folder) / name).read_text(encoding="utf-8")
            with tempfile.TemporaryDirectory() as there, store_errors():
                path = self._client().download_artifacts(run.run_id, name, there)
                return Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError, Unreachable, Rejected):
            return None

    def read_folder(self, run: StoredRun, name: str, to: Path) -> Path | None:
        """A folder among a run's artifacts, brought to `to` where it is not on this machine; None if it isn't there."""
        folder = local_folder(run.artifact_uri)
        try:
            if folder is not None:
                here = self._moved(folder) / name
                return here if here.is_dir() else None
            to.mkdir(parents=True, exist_ok=True)
            with store_errors():
                path = Path(self._client().download_artifacts(run.run_id, name, str(to)))
            return path if path.is_dir() else None
        except (OSError, ValueError, Unreachable, Rejected):
            return None

    def _moved(self, folder: Path) -> Path:
        """Where a run's files are if the project's folder was moved as a whole since."""
        root = artifact_root(self._tracking_uri, self._project_dir)
        if folder.exists() or root is None or root.name not in folder.parts:
            return folder
        at = len(folder.parts) - folder.parts[::-1].index(root.name)
        return root.joinpath(*folder.parts[at:])

    def _is_missing(self) -> bool:
        """Whether the embedded database is not there yet, or empty: reading should not make one."""
        database = sqlite_path(self._tracking_uri)
        return database is not None and (not database.exists() or (database.is_file() and not database.stat().st_size))

    def _client(self) -> Any:
        if self._connection is None:
            check_readable(self._tracking_uri)
            with self._told():
                self._connection = connect(self._tracking_uri)
        return self._connection

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            with store_errors():
                yield
        except (Unreachable, Rejected) as e:
            raise unreachable(self._tracking_uri, e) from e
