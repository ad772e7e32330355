"""Saved models: the weights of the best report, and the export of a kept model."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from raypar.parallel.loss import part_of
from raypar.study.trial import bad_losses, gain
from raypar.study.workload import Config, Data, Workload
from raypar.train.data import Feed, paired
from raypar.train.job import REPORTS_FOLDER
from raypar.train.precision import Numerics, numerics_of

WEIGHTS_FILE = "weights.pt"


class BestWeights:
    """Weights of the best report so far; keeps none without a folder."""

    def __init__(self, workload: Workload, config: Config, folder: Path | None) -> None:
        self._workload, self._config, self._folder = workload, config, folder
        self._num_reports = 0
        self._best: float | None = None
        self._weights: dict[str, Any] = {}  # tensors and extra states

    def update(self, model: nn.Module, report: Mapping[str, float]) -> None:
        """Copy the weights if this report is the best so far; a report without the metric counts as best."""
        metric, index = self._workload.metric_of(), self._num_reports
        self._num_reports += 1
        score, mode = report.get(metric.name), metric.mode
        if self._folder is None or bad_losses(report) or (score is not None and not math.isfinite(score)):
            return
        is_best = score is None or self._best is None or gain(mode, score) > gain(mode, self._best)
        if not (is_best or self._config.get("keep_checkpoints")):
            return
        weights = {
            key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in model.state_dict().items()
        }
        if is_best:
            self._best, self._weights = score, weights
        if self._config.get("keep_checkpoints"):
            self._write(model, weights, self._folder.with_name(REPORTS_FOLDER) / str(index))

    def state_dict(self) -> dict[str, Any]:
        """Return the best score and weights, for a checkpoint."""
        return {"best": self._best, "weights": self._weights, "num_reports": self._num_reports}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._weights = state["best"], dict(state["weights"])
        self._num_reports = state["num_reports"]

    def save(self, model: nn.Module) -> None:
        """Write the best weights with the workload's `save`, or as one file of tensors."""
        if self._folder is None or not self._weights:
            return
        model.load_state_dict(self._weights)
        self._write(model, self._weights, self._folder)

    def _write(self, model: nn.Module, weights: Mapping[str, Any], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self._workload.save is not None:
            self._workload.save(model, self._config, folder)
        else:
            torch.save(weights, folder / WEIGHTS_FILE)


NUM_EXAMPLES = 4


class ModelWithTransform(nn.Module):
    """The workload's transform, the cast to floats, and the model."""

    def __init__(self, model: nn.Module, data: Data, numerics: Numerics, sample: Tensor) -> None:
        super().__init__()
        self.model = model
        # Samples of a data set need no transform.
        self._transform = data.transform if data.val is not None else None
        self._feed = Feed(numerics, model, self._transform(sample) if self._transform else sample)

    def forward(self, inputs: Tensor) -> Any:
        return self.model(self._feed(self._transform(inputs) if self._transform else inputs))


def kept_model(workload: Workload, config: Config, numerics: Numerics, model_dir: Path) -> nn.Module:
    """Load the model that a trial has kept. Raises OSError if the weights can't be read."""
    assert workload.model is not None
    model = numerics.convert(workload.model(config))
    model.load_state_dict(torch.load(model_dir / WEIGHTS_FILE, weights_only=True))
    return model


def exported(workload: Workload, config: Config, model_dir: Path) -> tuple[ModelWithTransform, Tensor, Tensor]:
    """Load the model that a trial has kept, in full precision.

    Returns:
        The model in evaluation mode on the CPU, some samples of the validation set before the transform, shape
        ``(num, ...)``, and the model's outputs for them, shape ``(num, ...)``.

    Raises:
        OSError: the weights can't be read.
        TypeError: the model does not take and return a single tensor.
    """
    assert workload.data is not None
    numerics = replace(numerics_of(config, torch.device("cpu")), channels_last=False)
    data = workload.data(config)
    model = kept_model(workload, config, numerics, model_dir)
    if data.val is not None:
        inputs = part_of(data.val.inputs, slice(NUM_EXAMPLES))
    else:
        dataset: Any = data.val_dataset
        samples = [dataset[i] for i in range(min(NUM_EXAMPLES, len(dataset)))]
        inputs, _ = paired((data.collate or default_collate)(samples))
    if not isinstance(inputs, Tensor):
        raise TypeError(f"the model takes a {type(inputs).__name__}, not a tensor")
    inputs = inputs.cpu()
    module = ModelWithTransform(model, data, numerics, inputs).eval()
    with torch.no_grad():
        outputs = module(inputs)
    if not isinstance(outputs, Tensor):
        raise TypeError(f"the model gives a {type(outputs).__name__}, not a tensor")
    return module, inputs, outputs
