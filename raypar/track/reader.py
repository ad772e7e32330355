"""Experiments, runs and files of one store, read. Starts nothing and creates nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from raypar.track.names import experiment_name

_PAGE_SIZE = 2000


class RunReader:
    """Every method raises StoreError where the store can't be read; an embedded one that is not there yet is empty."""

    def __init__(self, tracking_uri: str, project_dir: Path) -> None:
        self._tracking_uri = tracking_uri
        self._project_dir = project_dir
        self._connection: Any = None

    def experiments(self) -> dict[str, str]:
        """Study name to experiment id."""
        found: dict[str, str] = {}
        client = self._client()
        token = None
        while client is not None:
            with self._told():
                page = client.search_experiments(
                    filter_string="tags.`raypar.study` != ''", max_results=1000, page_token=token
                )
            for experiment in page:
                found[experiment.tags["raypar.study"]] = str(experiment.experiment_id)
            token = page.token
            if not token:
                break
        return found

    def experiment_id(self, study: str) -> str | None:
        """None if there is none, or it is deleted."""
        client = self._client()
        if client is None:
            return None
        with self._told():
            found = client.get_experiment_by_name(experiment_name(study))
        return str(found.experiment_id) if found is not None and found.lifecycle_stage == "active" else None

    def runs(self, study: str, filter_string: str) -> Iterator[Any]:
        """MLflow's run objects of one study, the latest first; deleted ones are not among them."""
        experiment_id = self.experiment_id(study)
        return self.search([experiment_id] if experiment_id else [], filter_string)

    def search(self, experiment_ids: Sequence[str], filter_string: str) -> Iterator[Any]:
        """MLflow's run objects, the latest first; deleted ones are not among them."""
        client = self._client() if experiment_ids else None
        token = None
        while client is not None:
            with self._told():
                page = client.search_runs(
                    list(experiment_ids),
                    filter_string,
                    max_results=_PAGE_SIZE,
                    order_by=["attributes.start_time DESC"],
                    page_token=token,
                )
            yield from page
            token = page.token
            if not token:
                return

    def read_file(self, run: Any, name: str) -> str | None:
        """A text among a run's artifacts; None if it isn't there."""
        folder = local_folder(run.info.artifact_uri)
        try:
            if folder is not None:
                return (self._moved(folder) / name).read_text(encoding="utf-8")
            with tempfile.TemporaryDirectory() as there, store_errors():
                path = self._client().download_artifacts(run.info.run_id, name, there)
                return Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError, Unreachable, Rejected):
            return None

    def read_folder(self, run: Any, name: str, to: Path) -> Path | None:
        """A folder among a run's artifacts, brought to `to` where it is not on this machine; None if it isn't there."""
        folder = local_folder(run.info.artifact_uri)
        try:
            if folder is not None:
                here = self._moved(folder) / name
                return here if here.is_dir() else None
            to.mkdir(parents=True, exist_ok=True)
            with store_errors():
                path = Path(self._client().download_artifacts(run.info.run_id, name, str(to)))
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

    def _client(self) -> Any:
        """None where the embedded database is not there yet: reading should not make one."""
        if self._connection is None:
            database = sqlite_path(self._tracking_uri)
            if database is not None and not database.exists():
                return None
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
