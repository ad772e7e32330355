"""MLflow client: imported late, fails fast, silent. The only module that imports mlflow."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from raypar.errors import StoreError
from raypar.files import close_to_others, make_private_folder
from raypar.masking import masked
from raypar.track.one_time_link import log_in

if TYPE_CHECKING:
    from torch import Tensor, nn

    from raypar.track.runs import Point


# By default, MLflow retries for four minutes while a study waits. Variables that the user has set take precedence.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
SERVERS = ("http", "https", "databricks")
# Error codes of MLflow that are not the record's fault: locked database, full disk, login, too many requests.
_OUTAGES = frozenset(
    {
        *("TEMPORARILY_UNAVAILABLE", "PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"),
        *("REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"),
    }
)
# Parts of MLflow's messages; their error_code doesn't show it.
_UNAUTHORIZED = "failed with error code 401"
_FORBIDDEN = "failed with error code 403"

# Alembic's schema by version of MLflow. Experiments, runs and their tags are stored alike in all of these.
SCHEMAS: Mapping[str, str] = {"3.17": "dc11669786a5", "3.18": "f4a9b2c7d1e6"}
VERSIONS = "alembic_version"  # table
_ABANDONED_DRAFT_S = 60.0  # a new database takes seconds to create


class Unreachable(Exception):
    """The store doesn't answer now, but may later."""


class Failing(Unreachable):
    """The store answers, but this request fails, for good or for the moment."""


class Rejected(Exception):
    """The store refuses this for good."""


@cache
def import_mlflow() -> Any:
    """Return the mlflow module, configured to be fast and silent. The first import takes a second."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow
        import mlflow.entities
        import mlflow.exceptions
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    return mlflow


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn all errors of a store into `Unreachable` or `Rejected`, without warnings in the terminal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (Unreachable, Rejected):
        raise
    except Exception as e:
        raise _kind_of(e)(_first_line(e)) from e


def _kind_of(error: Exception) -> type[Exception]:
    code = getattr(error, "error_code", None)
    if code == "INVALID_PARAMETER_VALUE":
        return Rejected
    is_outage = code in _OUTAGES or isinstance(error, OSError) or isinstance(error.__context__, OSError)
    is_of_content = code is not None or isinstance(error, (ValueError, TypeError, ArithmeticError, LookupError))
    return Failing if is_of_content and not is_outage else Unreachable


@contextmanager
def reachable(tracking_uri: str) -> Iterator[None]:
    """Turn all errors of a store into a `StoreError` for users."""
    try:
        with store_errors():
            yield
    except (Unreachable, Rejected) as e:
        raise unreachable(tracking_uri, e) from e


def tag_filter(tags: Mapping[str, str]) -> str:
    """Return a search filter for runs with all of these tags; values must not contain quotes."""
    return " AND ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())


def connect(tracking_uri: str) -> Any:
    """Return an `MlflowClient`; create a missing database first (2 s). Raises Unreachable without a store."""
    with store_errors():
        mlflow = import_mlflow()
        if urlsplit(tracking_uri).scheme not in SERVERS:
            from mlflow.store.db import utils

            # Try once to open a database: MLflow tries ten times within 100 s, and has no setting for it.
            if hasattr(utils, "MAX_RETRY_COUNT"):
                utils.MAX_RETRY_COUNT = 1
        log_in(tracking_uri)
        make_database(tracking_uri)
        return mlflow.MlflowClient(tracking_uri=tracking_uri)


def make_database(tracking_uri: str) -> None:
    """Create a missing embedded database with all of MLflow's tables; do nothing for other stores.

    MLflow creates the tables one by one, and can neither use nor upgrade a database if it is killed in between. So they
    are created in memory, and the database gets its name as a complete file.

    Raises:
        Unreachable: the database's folder does not exist.
        OSError, sqlite3.Error: the database can't be written.
    """
    if (path := sqlite_path(tracking_uri)) is None:
        return
    if not path.absolute().parent.is_dir():  # MLflow would create it
        raise Unreachable(f"no such folder: {path.parent}")
    draft_prefix = f".{path.name}-draft-"
    for draft in path.parent.glob(f"{glob.escape(draft_prefix)}*"):  # of a process that was killed
        with suppress(OSError):
            if time.time() - draft.stat().st_mtime > _ABANDONED_DRAFT_S:
                draft.unlink()
    if path.exists():
        return
    import_mlflow()
    from mlflow.store.db import utils
    from sqlalchemy import create_engine

    if not hasattr(utils, "_initialize_tables"):
        return
    engine = create_engine("sqlite://")
    try:
        utils._initialize_tables(engine)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=draft_prefix) as file:
            with closing(engine.raw_connection()) as made, closing(sqlite3.connect(file.name)) as target:
                made.driver_connection.backup(target)  # type: ignore[union-attr]
            with suppress(OSError):  # another process was faster; or the disk has no links, and MLflow creates it
                os.link(file.name, path)
    finally:
        engine.dispose()


def schema_version(database: sqlite3.Connection) -> list[str]:
    """Return the version of MLflow's schema in a list, which is empty for other databases."""
    if VERSIONS not in table_names(database):
        return []
    return [str(version) for (version,) in database.execute(f"SELECT version_num FROM {VERSIONS}")]


def table_names(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def familiar_schema() -> str | None:
    """Return the schema version of the installed MLflow without importing it; None if not in `SCHEMAS`."""
    with suppress(metadata.PackageNotFoundError):
        return SCHEMAS.get(".".join(metadata.version("mlflow").split(".")[:2]))
    return None


@cache
def schema_versions() -> tuple[str, frozenset[str]]:
    """Return the schema version of the installed MLflow, and those that it can upgrade."""
    mlflow = import_mlflow()
    from alembic.script import ScriptDirectory

    folder = Path(mlflow.__file__).parent / "store" / "db_migrations"
    scripts = ScriptDirectory(str(folder))
    return str(scripts.get_current_head()), frozenset(revision.revision for revision in scripts.walk_revisions())


def has_server(tracking_uri: str) -> bool:
    """Return True if a browser can open the address."""
    return urlsplit(tracking_uri).scheme in ("http", "https")


def sqlite_path(tracking_uri: str) -> Path | None:
    """Return the database file of an embedded store; None for other stores."""
    parts = urlsplit(tracking_uri)
    if parts.scheme.partition("+")[0] != "sqlite":
        return None
    # sqlite:///relative.db and sqlite:////absolute.db
    path = unquote(parts.path)[1:]
    return Path(path) if path and path != ":memory:" else None


def store_identity(tracking_uri: str) -> str:
    """Return a name of a store that is the same in all processes of this machine, in any current folder."""
    database = sqlite_path(tracking_uri)
    return str(database.resolve()) if database else tracking_uri


def lease_path(study: str, tracking_uri: str, project_dir: Path) -> Path:
    """Return the file that tells machines sharing a store's folder who is running the study."""
    database = sqlite_path(tracking_uri)
    folder, store = (database.resolve().parent, database.name) if database else (project_dir, tracking_uri)
    name = hashlib.sha256(f"{store}\n{study}".encode()).hexdigest()[:16]
    return folder / ".raypar" / "leases" / f"study-{name}"


def artifact_root(tracking_uri: str, project_dir: Path) -> Path | None:
    """Return the folder of a store's files; None if a server decides."""
    if urlsplit(tracking_uri).scheme in SERVERS:
        return None
    database = sqlite_path(tracking_uri)
    return (database.absolute().parent if database else project_dir.absolute()) / "mlartifacts"


def close_store(tracking_uri: str, project_dir: Path) -> None:
    """Make a project's journals, logs, database and files private. Raises OSError.

    A database outside the project keeps its permissions, as several users may share it.
    """
    close_to_others(project_dir / ".raypar")
    if (root := artifact_root(tracking_uri, project_dir)) is None:
        return
    if root.parent == project_dir.absolute():
        close_to_others(root.parent / "mlflow.db")
        make_private_folder(root)
    elif not root.exists():
        make_private_folder(root)


def local_folder(artifact_uri: str) -> Path | None:
    """Return the local folder of an artifact URI; None for other URIs."""
    parts = urlsplit(artifact_uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    return Path(artifact_uri) if not parts.scheme and artifact_uri.startswith("/") else None


def unreachable(tracking_uri: str, reason: object) -> StoreError:
    """Return the error to show when a store doesn't answer, or refuses the user or what the user asks for."""
    where = masked(tracking_uri)
    if _UNAUTHORIZED in str(reason):
        from mlflow.utils.credentials import read_mlflow_creds

        is_given = all(read_mlflow_creds())
        problem = "refuses this user and password" if is_given else "asks for a user and a password"
        hint = (
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or put them into ~/.mlflow/credentials (copy "
            "that file from the cluster's head)"
        )
        return StoreError(f"The tracking store {where} {problem}", hint=hint)
    if _FORBIDDEN in str(reason):
        hint = (
            "ask the server's administrator for the permission EDIT on the study's experiment (MANAGE to rename or "
            "delete it), or name the study otherwise: Study(name=…)"
        )
        return StoreError(f"The tracking store {where} does not permit this user to change the study", hint=hint)
    first = "start the server (`mlflow server`)" if urlsplit(tracking_uri).scheme in SERVERS else "check the address"
    hint = f"{first}, or omit --tracking-uri to use the file mlflow.db here"
    return StoreError(f"The tracking store {where} can't be used: {masked(str(reason))}", hint=hint)


def _first_line(error: Exception) -> str:
    if type(error).__name__ == "MlflowException" and "Connection refused" in str(error):
        return "connection refused"
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


def save_model(
    module: nn.Module,
    inputs: Tensor,
    outputs: Tensor,
    folder: Path,
    *,
    metadata: Mapping[str, str],
    versions: Mapping[str, str],
) -> None:
    """Save a model with signature and input example as a graph, which loads with only torch and mlflow.

    Args:
        inputs: at least two samples; with one, the graph would fix the batch size.
        versions: installed versions by package.

    Raises:
        Exception: torch can't make a graph of the model.
    """
    import_mlflow()
    import mlflow.pytorch
    from mlflow.models import infer_signature

    example = inputs.numpy()
    mlflow.pytorch.save_model(
        module,
        str(folder),
        signature=infer_signature(example, outputs.numpy()),
        input_example=example,
        # To infer them, MLflow would load the model in a new process, which takes 10 s.
        pip_requirements=[f"{name}=={versions[name]}" for name in ("mlflow", "torch", "numpy")],
        metadata=dict(metadata),
        serialization_format="pt2",
    )


def upload_model(
    client: Any,
    experiment_id: str,
    run_id: str,
    folder: Path,
    *,
    uid: str,
    name: str,
    step: int,
    points: Sequence[Point] = (),
    params: Mapping[str, str] | None = None,
) -> None:
    """Log a folder that MLflow has saved a model to as a run's model after a step, once per uid.

    Args:
        points: metrics of the run at this step, which become the model's as well.
        params: None: those of the run.
    """
    mlflow = import_mlflow()
    from mlflow.models import Model

    tags = {"raypar.uid": uid}
    run = client.get_run(run_id)
    models = client.search_logged_models([experiment_id], filter_string=tag_filter(tags), max_results=1)
    if not models:
        of_model = run.data.params if params is None else dict(params)
        models = [client.create_logged_model(experiment_id, name, run_id, tags, of_model)]
    model = models[0]
    # MLflow writes these when it saves and logs in one step.
    saved = Model.load(str(folder))
    saved.model_id, saved.run_id, saved.artifact_path = model.model_id, run_id, model.artifact_location
    saved.save(str(folder / "MLmodel"))
    client.log_model_artifacts(model.model_id, str(folder))
    if model.model_id not in {output.model_id for output in (run.outputs.model_outputs if run.outputs else ())}:
        client.log_outputs(run_id, [mlflow.entities.LoggedModelOutput(model.model_id, step)])
    if points:
        metrics = [mlflow.entities.Metric(p.key, p.value, p.time_ms, p.step, model.model_id) for p in points]
        client.log_batch(run_id, metrics)
    client.finalize_logged_model(model.model_id, "READY")
