"""Saved models: the weights of the best report, and a kept model loaded for export."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypar.study.trial import bad_losses, gain
from raypar.study.workload import Config, Data, Workload
from raypar.train.precision import Numerics, numerics_of

WEIGHTS_FILE = "weights.pt"


class BestWeights:
    """Weights of the best report so far; keeps none without a folder to write them to."""

    def __init__(self, workload: Workload, config: Config, folder: Path | None) -> None:
        self._workload, self._config, self._folder = workload, config, folder
        self._best: float | None = None
        self._weights: dict[str, Tensor] = {}

    def update(self, model: nn.Module, report: Mapping[str, float]) -> None:
        """Copy the weights if this report is the best so far; the last one counts as best if it lacks the metric."""
        metric = self._workload.metric_of()
        score, mode = report.get(metric.name), metric.mode
        if self._folder is None or bad_losses(report) or (score is not None and not math.isfinite(score)):
            return
        if score is None or self._best is None or gain(mode, score) > gain(mode, self._best):
            self._best = score
            self._weights = {key: value.detach().to("cpu", copy=True) for key, value in model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the best score and weights, for a checkpoint."""
        return {"best": self._best, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._weights = state["best"], dict(state["weights"])

    def save(self, model: nn.Module) -> None:
        """Write the best weights, as the workload's `save` does or as one file of tensors."""
        if self._folder is None or not self._weights:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        model.load_state_dict(self._weights)
        if self._workload.save is not None:
            self._workload.save(model, self._config, self._folder)
        else:
            torch.save(self._weights, self._folder / WEIGHTS_FILE)


NUM_EXAMPLES = 4


class ModelWithTransform(nn.Module):
    """The workload's transform, the cast to floats, and the model."""

    def __init__(self, model: nn.Module, data: Data, numerics: Numerics) -> None:
        super().__init__()
        self.model = model
        # Samples that are read one by one are ready for the model.
        self._transform = data.transform if data.val is not None else None
        self._cast = numerics.cast

    def forward(self, inputs: Tensor) -> Any:
        return self.model(self._cast(self._transform(inputs) if self._transform else inputs))


def exported(workload: Workload, config: Config, model_dir: Path) -> tuple[ModelWithTransform, Tensor, Tensor]:
    """Load the model that a trial has kept, in full precision.

    Returns:
        The model in evaluation mode on the CPU, some samples of the validation set as the data has them, shape
        ``(num, ...)``, and its outputs for them, shape ``(num, ...)``.

    Raises:
        OSError: the weights can't be read.
        TypeError: the model returns something else than one tensor.
    """
    assert workload.model is not None and workload.data is not None
    numerics = replace(numerics_of(config, torch.device("cpu")), channels_last=False)
    data = workload.data(config)
    model = numerics.convert(workload.model(config))
    model.load_state_dict(torch.load(model_dir / WEIGHTS_FILE, weights_only=True))
    module = ModelWithTransform(model, data, numerics).eval()
    if data.val is not None:
        inputs = data.val.inputs[:NUM_EXAMPLES].cpu()
    else:
        assert data.val_dataset is not None
        size = min(NUM_EXAMPLES, len(data.val_dataset))  # type: ignore[arg-type]
        inputs = torch.stack([torch.as_tensor(data.val_dataset[i][0]) for i in range(size)])
    with torch.no_grad():
        outputs = module(inputs)
    if not isinstance(outputs, Tensor):
        raise TypeError(f"the model gives a {type(outputs).__name__}, not a tensor")
    return module, inputs, outputs
