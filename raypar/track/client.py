"""MLflow client: imported late, quick to give up, silent. The only module that imports mlflow."""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import tempfile
import warnings
from collections.abc import Iterator, Mapping
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


# MLflow's own default retries for four minutes while a study waits. What a user has set stays.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
SERVERS = ("http", "https", "databricks")
MODEL_NAME = "best_model"
# MLflow's codes of what is no fault of a record: a locked database or a full disk, a login, too many requests.
_OUTAGES = frozenset(
    {
        *("TEMPORARILY_UNAVAILABLE", "PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"),
        *("REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"),
    }
)
_UNAUTHORIZED = "failed with error code 401"  # of MLflow's message; its error_code does not tell

# Alembic's versions by those of MLflow: experiments, runs and their tags are alike in all of these.
SCHEMAS: Mapping[str, str] = {"3.17": "dc11669786a5", "3.18": "f4a9b2c7d1e6"}
VERSIONS = "alembic_version"  # table


class Unreachable(Exception):
    """The store doesn't answer now; it may later."""


class Failing(Unreachable):
    """The store answers, and this fails: because of what it holds, or for the moment."""


class Rejected(Exception):
    """The store refuses this, and always will."""


@cache
def import_mlflow() -> Any:
    """Return the mlflow module, set to be quick and silent. Takes a second the first time."""
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
    """Turn whatever a store can raise into `Unreachable` or `Rejected`, and keep the terminal clean."""
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
    """Turn whatever a store can raise into a `StoreError` for users."""
    try:
        with store_errors():
            yield
    except (Unreachable, Rejected) as e:
        raise unreachable(tracking_uri, e) from e


def tag_filter(tags: Mapping[str, str]) -> str:
    """Return the filter string of a search for runs that have all of the tags; values must not hold quotes."""
    return " AND ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())


def connect(tracking_uri: str) -> Any:
    """Return an `MlflowClient`, after a new database was made (2 s). Raises Unreachable without a store."""
    with store_errors():
        mlflow = import_mlflow()
        if urlsplit(tracking_uri).scheme not in SERVERS:
            from mlflow.store.db import utils

            # One attempt to open a database: MLflow makes ten, over 100 s, and has no setting for it.
            if hasattr(utils, "MAX_RETRY_COUNT"):
                utils.MAX_RETRY_COUNT = 1
        log_in(tracking_uri)
        make_database(tracking_uri)
        return mlflow.MlflowClient(tracking_uri=tracking_uri)


def make_database(tracking_uri: str) -> None:
    """Make an embedded database that is not there yet, with all of MLflow's tables; do nothing for any other store.

    MLflow itself makes them one by one: killed meanwhile, it leaves a database that it can neither use nor upgrade. So
    they are made in memory, and what gets the database's name is a complete file.

    Raises:
        Unreachable: the database's folder does not exist; OSError, sqlite3.Error: it can't be written.
    """
    if (path := sqlite_path(tracking_uri)) is None:
        return
    if not path.absolute().parent.is_dir():  # which MLflow would make
        raise Unreachable(f"there is no folder {path.parent}")
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
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-") as file:
            with closing(engine.raw_connection()) as made, closing(sqlite3.connect(file.name)) as target:
                made.driver_connection.backup(target)  # type: ignore[union-attr]
            with suppress(OSError):  # another process was quicker; or there are no links here, and MLflow makes it
                os.link(file.name, path)
    finally:
        engine.dispose()


def schema_version(database: sqlite3.Connection) -> list[str]:
    """Return the one version of MLflow's schema, as a list; empty for a database that has none."""
    if VERSIONS not in table_names(database):
        return []
    return [str(version) for (version,) in database.execute(f"SELECT version_num FROM {VERSIONS}")]


def table_names(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def familiar_schema() -> str | None:
    """Return the schema version of the installed MLflow, without importing it; None where `SCHEMAS` lacks it."""
    with suppress(metadata.PackageNotFoundError):
        return SCHEMAS.get(".".join(metadata.version("mlflow").split(".")[:2]))
    return None


@cache
def schema_versions() -> tuple[str, frozenset[str]]:
    """Return the schema version of the installed MLflow, and all that it can upgrade."""
    mlflow = import_mlflow()
    from alembic.script import ScriptDirectory

    folder = Path(mlflow.__file__).parent / "store" / "db_migrations"
    scripts = ScriptDirectory(str(folder))
    return str(scripts.get_current_head()), frozenset(revision.revision for revision in scripts.walk_revisions())


def has_server(tracking_uri: str) -> bool:
    """Return True where the address, opened in a browser, shows MLflow."""
    return urlsplit(tracking_uri).scheme in ("http", "https")


def sqlite_path(tracking_uri: str) -> Path | None:
    """Return the database file of an embedded store; None for every other store."""
    parts = urlsplit(tracking_uri)
    if parts.scheme.partition("+")[0] != "sqlite":
        return None
    # sqlite:///relative.db and sqlite:////absolute.db
    path = unquote(parts.path)[1:]
    return Path(path) if path and path != ":memory:" else None


def store_identity(tracking_uri: str) -> str:
    """Return what the processes of this machine that use a store have in common, whatever folder they are in."""
    database = sqlite_path(tracking_uri)
    return str(database.resolve()) if database else tracking_uri


def lease_path(study: str, tracking_uri: str, project_dir: Path) -> Path:
    """Return the file by which the machines that share a store's folder know who runs a study of it."""
    database = sqlite_path(tracking_uri)
    folder, store = (database.resolve().parent, database.name) if database else (project_dir, tracking_uri)
    name = hashlib.sha256(f"{store}\n{study}".encode()).hexdigest()[:16]
    return folder / ".raypar" / "leases" / f"study-{name}"


def artifact_root(tracking_uri: str, project_dir: Path) -> Path | None:
    """Return the folder in which a store keeps its files; None where a server decides."""
    if urlsplit(tracking_uri).scheme in SERVERS:
        return None
    database = sqlite_path(tracking_uri)
    return (database.absolute().parent if database else project_dir.absolute()) / "mlartifacts"


def close_store(tracking_uri: str, project_dir: Path) -> None:
    """Close a project's journals, logs, database and files to other users. Raises OSError.

    A database outside the project, named by its user, stays as open as it was made: several users may share it.
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
    """Return the folder behind an artifact URI; None where it is no folder."""
    parts = urlsplit(artifact_uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    return Path(artifact_uri) if not parts.scheme and artifact_uri.startswith("/") else None


def unreachable(tracking_uri: str, reason: object) -> StoreError:
    """Return the error for users of a store that doesn't answer, or refuses them."""
    where = masked(tracking_uri)
    if _UNAUTHORIZED in str(reason):
        from mlflow.utils.credentials import read_mlflow_creds

        is_given = all(read_mlflow_creds())
        problem = "takes neither the user nor the password given" if is_given else "asks for a user and a password"
        hint = (
            "give them in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or in ~/.mlflow/credentials (on a "
            "cluster's head that file has them)"
        )
        return StoreError(f"The tracking store {where} {problem}", hint=hint)
    first = "start the server (`mlflow server`)" if urlsplit(tracking_uri).scheme in SERVERS else "check the address"
    hint = f"{first}, or leave --tracking-uri out to use the file mlflow.db here"
    return StoreError(f"The tracking store {where} can't be used: {masked(str(reason))}", hint=hint)


def _first_line(error: Exception) -> str:
    if type(error).__name__ == "MlflowException" and "Connection refused" in str(error):
        return "connection refused"
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


def save_model(
    module: nn.Module, inputs: Tensor, outputs: Tensor, folder: Path, *, metadata: Mapping[str, Any], versions: Any
) -> None:
    """Write a model with signature and input example, as a graph that loads with torch and mlflow alone.

    Args:
        inputs: at least two samples; with one, the graph would fix their number.
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
        # Named, because guessing them means to load the model in a process of its own, which takes 10 s.
        pip_requirements=[f"{name}=={versions[name]}" for name in ("mlflow", "torch", "numpy")],
        metadata=dict(metadata),
        serialization_format="pt2",
    )


def upload_model(client: Any, experiment_id: str, run_id: str, folder: Path, *, uid: str, name: str) -> str:
    """Log a folder of `save_model` as a run's model; return its id. With the same uid it is the same model."""
    mlflow = import_mlflow()
    from mlflow.models import Model

    tags = {"raypar.uid": uid}
    models = client.search_logged_models([experiment_id], filter_string=tag_filter(tags), max_results=1)
    if not models:
        params = client.get_run(run_id).data.params
        models = [client.create_logged_model(experiment_id, name=name, source_run_id=run_id, tags=tags, params=params)]
    model = models[0]
    # MLflow itself writes these where it saves and logs in one go.
    saved = Model.load(str(folder))
    saved.model_id, saved.run_id, saved.artifact_path = model.model_id, run_id, model.artifact_location
    saved.save(str(folder / "MLmodel"))
    client.log_model_artifacts(model.model_id, str(folder))
    client.log_outputs(run_id, [mlflow.entities.LoggedModelOutput(model.model_id, 0)])
    client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_id)
