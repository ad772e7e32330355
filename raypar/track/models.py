"""A trained model as MLflow keeps models: a folder first, which needs no store, then a logged model of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.track.client import import_mlflow

if TYPE_CHECKING:
    from torch import Tensor, nn

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
