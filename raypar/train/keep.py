"""The trained model, kept: the weights of the best report, as the workload judges it, written when training ends."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypar.study.trial import gain
from raypar.study.workload import Config, Workload

WEIGHTS_FILE = "weights.pt"


class Keeper:
    """Remembers the best weights so far; does nothing without a folder to leave them in."""

    def __init__(self, workload: Workload, config: Config, folder: Path | None) -> None:
        self._workload, self._config, self._folder = workload, config, folder
        self._best: float | None = None
        self._weights: dict[str, Tensor] = {}

    def look_at(self, model: nn.Module, report: Mapping[str, float]) -> None:
        """Copy the weights if this report is the best one yet; without the workload's metric in it, the last is."""
        if self._folder is None:
            return
        score = report.get(self._workload.metric)
        mode = self._workload.mode
        if score is None or self._best is None or gain(mode, score) > gain(mode, self._best):
            self._best = score
            self._weights = {key: value.detach().to("cpu", copy=True) for key, value in model.state_dict().items()}

    def state(self) -> dict[str, Any]:
        """The best so far, for a checkpoint."""
        return {"best": self._best, "weights": self._weights}

    def load(self, state: Mapping[str, Any]) -> None:
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


def pack(folder: Path) -> bytes:
    """A folder's files as one piece; empty where there is no folder."""
    if not folder.is_dir():
        return b""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(folder, ".")
    return packed.getvalue()
