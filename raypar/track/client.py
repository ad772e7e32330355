"""MLflow client: imported late, quick to give up, silent. The only module that imports mlflow."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from raypar.errors import StoreError
from raypar.masking import masked

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
_LOGGERS = ("mlflow", "alembic")
_REFUSED = "failed with error code 401"  # MLflow's words; the answer has no code of MLflow's own


class Unreachable(Exception):
    """The store can't take or give anything now; it may later."""


class Rejected(Exception):
    """The store will never take this."""


def import_mlflow() -> Any:
    """The mlflow module, set to be quick and silent. Takes a second the first time."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow
        import mlflow.entities
        import mlflow.exceptions
    _silence()
    return mlflow


@cache
def _silence() -> None:
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


@contextmanager
def store_errors() -> Iterator[None]:
    """Everything that a store can raise, as `Unreachable` or `Rejected`, without a word on the terminal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (Unreachable, Rejected):
        raise
    except Exception as e:
        kind = Rejected if getattr(e, "error_code", None) == "INVALID_PARAMETER_VALUE" else Unreachable
        raise kind(_first_line(e)) from e


def connect(tracking_uri: str) -> Any:
    """An `MlflowClient`. The first use of an embedded database creates its tables (2 s).

    Raises:
        Unreachable: if there is no such store, or none that this MLflow can use.
    """
    with store_errors():
        mlflow = import_mlflow()
        if urlsplit(tracking_uri).scheme not in SERVERS:
            _give_up_early()
        if path := sqlite_path(tracking_uri):
            path.parent.mkdir(parents=True, exist_ok=True)
        return mlflow.MlflowClient(tracking_uri=tracking_uri)


def _give_up_early() -> None:
    """One attempt to open a database: MLflow makes ten, over 100 s, and has no setting for it."""
    from mlflow.store.db import utils

    if hasattr(utils, "MAX_RETRY_COUNT"):
        utils.MAX_RETRY_COUNT = 1


def has_server(tracking_uri: str) -> bool:
    """Whether whoever opens the address in a browser sees MLflow."""
    return urlsplit(tracking_uri).scheme in ("http", "https")


def sqlite_path(tracking_uri: str) -> Path | None:
    """The database file of an embedded store; None for every other store."""
    parts = urlsplit(tracking_uri)
    if parts.scheme.partition("+")[0] != "sqlite":
        return None
    # sqlite:///relative.db and sqlite:////absolute.db
    path = unquote(parts.path)[1:]
    return Path(path) if path and path != ":memory:" else None


def artifact_root(tracking_uri: str, project_dir: Path) -> Path | None:
    """Where a store without a server keeps its files; None where the server says."""
    if urlsplit(tracking_uri).scheme in SERVERS:
        return None
    database = sqlite_path(tracking_uri)
    return (database.absolute().parent if database else project_dir.absolute()) / "mlartifacts"


def local_folder(artifact_uri: str) -> Path | None:
    """The folder behind an artifact URI, where it is one."""
    parts = urlsplit(artifact_uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    return Path(artifact_uri) if not parts.scheme and artifact_uri.startswith("/") else None


def unreachable(tracking_uri: str, reason: object) -> StoreError:
    """What a user is told when the store doesn't answer."""
    where = masked(tracking_uri)
    if _REFUSED in str(reason):
        given = (
            "takes neither the user nor the password given" if _has_credentials() else "asks for a user and a password"
        )
        hint = (
            "give them in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or in ~/.mlflow/credentials (on a "
            "cluster's head that file has them)"
        )
        return StoreError(f"The tracking store {where} {given}", hint=hint)
    if urlsplit(tracking_uri).scheme in SERVERS:
        hint = "start the server (`mlflow server`), or leave --tracking-uri out to use the file mlflow.db here"
    else:
        hint = "check the address, or leave --tracking-uri out to use the file mlflow.db here"
    return StoreError(f"The tracking store {where} can't be used: {masked(str(reason))}", hint=hint)


def _has_credentials() -> bool:
    from mlflow.utils.credentials import read_mlflow_creds

    return all(read_mlflow_creds())


def _first_line(error: Exception) -> str:
    if type(error).__name__ == "MlflowException" and "Connection refused" in str(error):
        return "connection refused"
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


MODEL_NAME = "best_model"


def save_model(
    module: nn.Module, inputs: Tensor, outputs: Tensor, folder: Path, *, metadata: Mapping[str, Any], versions: Any
) -> None:
    """Write a model with signature and input example, as a graph: whoever loads it needs torch and mlflow alone.

    Args:
        inputs: samples, two at least, or the number of samples is fixed.
        versions: installed ones by package.

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
    """Log a folder of `save_model` as a run's model; the id. A second time with the same uid it is the same model."""
    mlflow = import_mlflow()
    from mlflow.models import Model

    found = client.search_logged_models([experiment_id], filter_string=f"tags.`raypar.uid` = '{uid}'", max_results=1)
    if found:
        model = found[0]
    else:
        params = client.get_run(run_id).data.params
        model = client.create_logged_model(
            experiment_id, name=name, source_run_id=run_id, tags={"raypar.uid": uid}, params=params
        )
    # What MLflow itself writes where it does both at once.
    described = Model.load(str(folder))
    described.model_id, described.run_id, described.artifact_path = model.model_id, run_id, model.artifact_location
    described.save(str(folder / "MLmodel"))
    client.log_model_artifacts(model.model_id, str(folder))
    client.log_outputs(run_id, [mlflow.entities.LoggedModelOutput(model.model_id, 0)])
    client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_id)
