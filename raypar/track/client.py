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
MODEL_NAME = "best_model"
_UNAUTHORIZED = "failed with error code 401"  # of MLflow's message; its error_code does not tell


class Unreachable(Exception):
    """The store doesn't answer now; it may later."""


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
        kind = Rejected if getattr(e, "error_code", None) == "INVALID_PARAMETER_VALUE" else Unreachable
        raise kind(_first_line(e)) from e


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
    """Return an `MlflowClient`, whose first use makes a database's tables (2 s). Raises Unreachable without a store."""
    with store_errors():
        mlflow = import_mlflow()
        if urlsplit(tracking_uri).scheme not in SERVERS:
            from mlflow.store.db import utils

            # One attempt to open a database: MLflow makes ten, over 100 s, and has no setting for it.
            if hasattr(utils, "MAX_RETRY_COUNT"):
                utils.MAX_RETRY_COUNT = 1
        if path := sqlite_path(tracking_uri):
            path.parent.mkdir(parents=True, exist_ok=True)
        return mlflow.MlflowClient(tracking_uri=tracking_uri)


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


def artifact_root(tracking_uri: str, project_dir: Path) -> Path | None:
    """Return the folder in which a store keeps its files; None where a server decides."""
    if urlsplit(tracking_uri).scheme in SERVERS:
        return None
    database = sqlite_path(tracking_uri)
    return (database.absolute().parent if database else project_dir.absolute()) / "mlartifacts"


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
