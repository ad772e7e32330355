"""Precision and memory layout of a trial."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from raypar.parallel.strategy import MIXED
from raypar.study.workload import Config


@dataclass(frozen=True)
class Numerics:
    """A trial's precision and layout.

    Attributes:
        dtype: of weights and inputs.
        mixed: torch.autocast's dtype; None: all in `dtype`.
        needs_scaling: gradients would vanish in `mixed` (fp16) if the loss were not scaled up.
    """

    device: torch.device
    dtype: torch.dtype
    mixed: torch.dtype | None
    needs_scaling: bool
    channels_last: bool

    def convert(self, model: nn.Module) -> nn.Module:
        """Return the model on the device, in the dtype and layout."""
        model = model.to(self.device, self.dtype)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def cast(self, inputs: Tensor) -> Tensor:
        """Return a batch of inputs in dtype and layout; int64 inputs are token numbers and stay as they are."""
        if self.channels_last and inputs.dim() == 4:
            return inputs.to(self.dtype, memory_format=torch.channels_last)
        is_numeric = inputs.is_floating_point() or inputs.dtype == torch.uint8
        return inputs.to(self.dtype) if is_numeric and inputs.dtype != self.dtype else inputs

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of a forward pass."""
        return torch.autocast(self.device.type, self.mixed) if self.mixed else contextlib.nullcontext()


def numerics_of(config: Config, device: torch.device) -> Numerics:
    """Return the numerics of a config's ``precision`` and ``channels_last``; sets torch's switches for TF32."""
    precision = config["precision"]
    # By default torch lets convolutions round to TF32: fp32 is fp32 here, and on a CPU tf32 is too.
    _allow_tf32(precision == "tf32" and device.type == "cuda")
    dtype = torch.float64 if precision == "fp64" else torch.float32
    return Numerics(device, dtype, MIXED.get(precision), precision == "fp16", config["channels_last"])


def _allow_tf32(allowed: bool) -> None:
    """Set torch's older and newer switches alike.

    Where they differ, torch raises when the older ones are read, as torch.compile and torch.export do.
    """
    # These two set the newer switches as well, but those of cudnn to "none" in place of "ieee": to what holds for all.
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    gpu, cpu = cast(Any, torch.backends.cudnn), cast(Any, torch.backends.mkldnn)
    for operation in (gpu.conv, gpu.rnn):
        operation.fp32_precision = "tf32" if allowed else "ieee"
    for operation in (cpu.matmul, cpu.conv, cpu.rnn):
        operation.fp32_precision = "ieee"
