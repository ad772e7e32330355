"""Redirection of what a script logs to MLflow: to a private store of its trial, which becomes part of the trial's run.

A server or a shared database would put requests and locks into the timed steps, and keep what an attempt logs that is
later stopped or repeated. `raypar.train.logged_run` prepares the folders and reads the store.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from .events import EventRecorder

if sys.platform != "win32":
    import fcntl

NAME = "mlflow"  # among the settings: the fields of `Redirection`
DATABASE, NOTES = "mlflow.db", "notes.jsonl"  # in a private store's folder
EXPERIMENT_ID = "0"  # MLflow's default experiment
ADDRESS, EXPERIMENT, RUN = "address", "experiment", "run"  # kinds of notes
# MLflow reads these. Others of the user, such as the time limit of requests, may stay.
_REPLACED = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID")
_REMOVED = ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_REGISTRY_URI")


@dataclass(frozen=True)
class Redirection:
    """A process's private store.

    Attributes:
        folder: of the database.
        files: folder of the run's artifacts.
        other_files: folder of the artifacts of all other runs, and of models.
        run_id: of the run that stands for the trial's.
        templates: folder of empty databases, one for each version of MLflow. To make one takes seconds.
        is_first: the process, or the first one that it starts, is the first rank. What others log is thrown away.
    """

    folder: str
    files: str
    other_files: str
    run_id: str
    templates: str
    is_first: bool

    @property
    def database(self) -> Path:
        return Path(self.folder, DATABASE)

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.database}"

    def of_this_process(self) -> Redirection:
        """Return the store of this process: another one that is thrown away unless it is the first rank."""
        rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
        if self.is_first and rank == "0":
            return self
        other = str(Path(self.folder, f"rank{rank}-{os.getpid()}"))
        return Redirection(other, f"{other}/files", f"{other}/other", self.run_id, self.templates, False)


def hooks(given: Mapping[str, Any] | None) -> dict[str, Callable[[Any, EventRecorder], None]]:
    """Set MLflow's variables of this process, and return the hook on MLflow; none without a private store.

    Args:
        given: the fields of a `Redirection`.
    """
    if given is None:
        return {}
    to = Redirection(**given).of_this_process()
    before = {name: os.environ.get(name) for name in (*_REPLACED, *_REMOVED)}
    os.environ.update(zip(_REPLACED, (to.uri, to.run_id, EXPERIMENT_ID), strict=True))
    for name in _REMOVED:
        os.environ.pop(name, None)

    def hook(mlflow: Any, _: EventRecorder) -> None:
        try:
            _redirect(mlflow, to)
        except BaseException:  # the script logs to where it would have without raypar
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            raise

    return {NAME: hook}


def _redirect(mlflow: Any, to: Redirection) -> None:
    """Prepare the private store, and let all functions of MLflow use it."""
    MlflowClient, fluent = mlflow.tracking.MlflowClient, mlflow.tracking.fluent
    utils, registry = mlflow.tracking._tracking_service.utils, mlflow.tracking._model_registry.utils
    get_store, connect = utils._tracking_store_registry.get_store, MlflowClient.__init__
    set_address, set_experiment, start_run = mlflow.set_tracking_uri, mlflow.set_experiment, mlflow.start_run
    create_experiment = MlflowClient.create_experiment
    if not to.database.exists():
        _make_database(to, mlflow.__version__, lambda uri: get_store(uri, to.other_files))

    def note(kind: str, value: object) -> None:
        if to.is_first and value and value != to.uri:
            with suppress(OSError), Path(to.folder, NOTES).open("a", encoding="utf-8") as notes:
                notes.write(json.dumps([kind, str(value)]) + "\n")

    def get_private_store(*_: Any, **__: Any) -> Any:
        return get_store(to.uri, to.other_files)

    def ignore_address(uri: Any = None, *_: Any, **__: Any) -> None:
        note(ADDRESS, uri)

    @wraps(connect)
    def __init__(self: Any, tracking_uri: Any = None, *_: Any, **__: Any) -> None:
        note(ADDRESS, tracking_uri)
        connect(self, to.uri)

    @wraps(create_experiment)
    def create_private_experiment(self: Any, name: str, _: Any = None, tags: Any = None, **__: Any) -> Any:
        note(EXPERIMENT, name)
        return create_experiment(self, name, tags=tags)

    @wraps(set_experiment)
    def set_private_experiment(experiment_name: Any = None, experiment_id: Any = None, **_: Any) -> Any:
        # Runs stay in the trial's experiment, which takes the name so that the script finds it.
        note(EXPERIMENT, experiment_name or (experiment_id if experiment_id != EXPERIMENT_ID else None))
        client = MlflowClient()
        if experiment_name and client.get_experiment_by_name(experiment_name) is None:
            client.rename_experiment(EXPERIMENT_ID, experiment_name)
        return set_experiment(experiment_id=EXPERIMENT_ID)

    @wraps(start_run)
    def start_private_run(run_id: Any = None, *args: Any, **kwargs: Any) -> Any:
        if run_id is not None and not _has_run(to.database, run_id):
            note(RUN, run_id)
            run_id = to.run_id
        return start_run(run_id, *args, **kwargs)

    set_address(to.uri)  # from now on, MLflow doesn't read the variable, which the script may set
    os.environ["MLFLOW_RUN_ID"] = to.run_id
    utils._tracking_store_registry.get_store = get_private_store
    MlflowClient.__init__ = __init__
    MlflowClient.create_experiment = create_private_experiment
    for module in (mlflow, mlflow.tracking, utils):
        module.set_tracking_uri = ignore_address
    for module in (mlflow, mlflow.tracking, registry):
        module.set_registry_uri = ignore_address
    for module in (mlflow, fluent):
        module.set_experiment, module.start_run = set_private_experiment, start_private_run


def _has_run(database: Path, run_id: str) -> bool:
    with closing(sqlite3.connect(database)) as opened:
        return opened.execute("SELECT 1 FROM runs WHERE run_uuid = ?", (run_id,)).fetchone() is not None


def _make_database(to: Redirection, version: str, make: Callable[[str], Any]) -> None:
    """Make the private store's database with the run that stands for the trial's.

    Args:
        make: makes MLflow's store with this address, and thereby its tables.
    """
    to.database.parent.mkdir(parents=True, exist_ok=True)
    draft = to.database.with_name(f"{DATABASE}-{os.getpid()}")
    try:
        _copy_template(Path(to.templates), version, make, draft)
    except OSError:  # a folder that can't be written, or a full disk
        _fill(draft, make)
    now_ms = round(time.time() * 1000)
    row = {
        "run_uuid": to.run_id,
        "name": "trial",
        "experiment_id": int(EXPERIMENT_ID),
        "user_id": "",
        "artifact_uri": Path(to.files).as_uri(),
        "status": "RUNNING",
        "lifecycle_stage": "active",
        "source_type": "UNKNOWN",
        "source_name": "",
        "entry_point_name": "",
        "source_version": "",
        "start_time": now_ms,
    }
    with closing(sqlite3.connect(draft)) as database, database:
        location = Path(to.other_files, EXPERIMENT_ID).as_uri()
        database.execute("UPDATE experiments SET artifact_location = ?", (location,))
        database.execute(f"INSERT INTO runs ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", [*row.values()])
    with suppress(FileExistsError):  # another process of this rank was faster
        os.link(draft, to.database)
    draft.unlink()


def _copy_template(folder: Path, version: str, make: Callable[[str], Any], to: Path) -> None:
    """Copy the empty database of a version of MLflow, which is made if it is missing. Raises OSError."""
    template = folder / f"mlflow-{version}.db"
    if not template.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not template.exists():  # another rank was faster
                draft = template.with_name(f"{template.name}-{os.getpid()}")
                _fill(draft, make)
                draft.replace(template)
    shutil.copyfile(template, to)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        if sys.platform != "win32":
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fill(path: Path, make: Callable[[str], Any]) -> None:
    """Make a database with MLflow's tables, without its hundred lines of progress."""
    loggers = [logging.getLogger(name) for name in ("alembic", "mlflow")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        make(f"sqlite:///{path}").engine.dispose()
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
