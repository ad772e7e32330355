"""Checkpoints from which a retry of a trial resumes.

Each rank writes its state, including its part of split weights, to a separate file. A retry has the same placement, so
nothing has to be split again. A rank removes its last file when all ranks have written the next one, so the ranks
always have a common checkpoint. If a node is lost with its file, all ranks start from the beginning.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from raypar.files import sync_folder
from raypar.parallel.strategy import DistContext

_SPLIT = "split"  # marks this rank's part of a tensor that is split among ranks


class Checkpoints:
    """One rank's checkpoints of a trial; does nothing without a folder. All ranks make the same calls.

    Attributes:
        time_s: time for saving, including the wait for other ranks.
        why_not: reason why an existing checkpoint was not used; empty: none was rejected.
    """

    def __init__(self, folder: Path | None, context: DistContext) -> None:
        self._folder, self._context = folder, context
        self.time_s = 0.0
        self.why_not = ""

    def load(self) -> dict[str, Any] | None:
        """Return the last state that every rank has saved, on the CPU; None if there is none."""
        if self._folder is None:
            return None
        last = max(self._steps(), default=0)
        oldest, newest = (int(n) for n in self._context.max([-last, last]))
        state = self._read(-oldest) if oldest else None
        num_without = round(self._context.max([float(state is None)])[0])
        if not num_without:
            return state
        if newest:
            self.why_not = "the ranks have no common checkpoint: the training started again"
        return None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the state after `step` steps; remove the previous one when all ranks have written theirs."""
        if self._folder is None:
            return
        begun_s = time.perf_counter()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(step)
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync_folder(self._folder)
        self._context.barrier()
        for older in {*self._steps()} - {step}:
            self._path(older).unlink(missing_ok=True)
        self.time_s += time.perf_counter() - begun_s

    def remove(self) -> None:
        """Remove this rank's checkpoints, when the trial is over on every rank."""
        if self._folder is None:
            return
        self._context.barrier()
        for path in self._folder.glob(f"rank{self._context.rank}-*"):
            path.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        assert self._folder is not None
        return self._folder / f"rank{self._context.rank}-step{step}.pt"

    def _steps(self) -> list[int]:
        """Return the steps of this rank's checkpoints."""
        assert self._folder is not None
        names = [path.stem for path in self._folder.glob(f"rank{self._context.rank}-step*.pt")]
        return [int(name.rpartition("step")[2]) for name in names]

    def _read(self, step: int) -> dict[str, Any] | None:
        try:
            state: dict[str, Any] = torch.load(self._path(step), map_location="cpu", weights_only=True)
            return state
        except Exception as error:  # torch raises many kinds for a damaged file
            print(f"the checkpoint after step {step} can't be read, {type(error).__name__}: {error}", flush=True)
        return None


def local_weights(module: nn.Module) -> dict[str, Any]:
    """Return this rank's part of the weights and of all buffers, and copies of the extra states."""
    state = _state_of(module)
    return {key: copy.deepcopy(v) if _is_extra(key) else _local_part(v).detach() for key, v in state.items()}


def load_local_weights(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Restore `local_weights`, except buffers that the model has created or enlarged since, such as caches."""
    with torch.no_grad():
        for key, value in _state_of(module).items():
            if key in saved and not _is_extra(key) and saved[key].shape == (part := _local_part(value)).shape:
                restore(part, saved[key])
    if extra := {key: value for key, value in saved.items() if _is_extra(key)}:
        module.load_state_dict(extra, strict=False)


def restore(tensor: Tensor, before: Tensor) -> None:
    """Write earlier values, except to an expanded tensor, which torch can't write to."""
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    if not is_expanded:
        tensor.copy_(before)


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Return the module's state, including buffers that are not persistent: training may change these too."""
    return {**dict(module.named_buffers()), **module.state_dict()}


def _is_extra(key: str) -> bool:
    """Return whether a key is torch's for a value of `nn.Module.get_extra_state`, which need not be a tensor."""
    return key.rpartition(".")[2] == "_extra_state"


def _local_part(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state dict, with this rank's part of each split tensor."""
    state = optimizer.state_dict()
    local = {
        index: {key: {_SPLIT: value.to_local()} if isinstance(value, DTensor) else value for key, value in of.items()}
        for index, of in state["state"].items()
    }
    return {**state, "state": local}


def set_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore an `optimizer_state` into an optimizer of the same parameters in the same order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def joined(parameter: Tensor, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        assert isinstance(parameter, DTensor)
        part = value[_SPLIT].to(parameter.to_local().device)
        return DTensor.from_local(
            part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )

    states = saved["state"].items()
    state = {i: {key: joined(parameters[i], value) for key, value in of.items()} for i, of in states}
    optimizer.load_state_dict({**saved, "state": state})
