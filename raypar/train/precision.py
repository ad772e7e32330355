"""Precision and memory layout of a trial."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from raypar.parallel.strategy import MIXED
from raypar.study.workload import Config


@dataclass(frozen=True)
class Numerics:
    """A trial's precision and layout.

    Attributes:
        dtype: dtype of weights and inputs.
        mixed: torch.autocast's dtype; None: everything is in `dtype`.
        whole: types for integer inputs; for others, the first of `_candidates`.
        needs_scaling: the loss must be scaled up because gradients would vanish in `mixed` (fp16).
    """

    device: torch.device
    dtype: torch.dtype
    mixed: torch.dtype | None
    needs_scaling: bool
    channels_last: bool
    whole: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)

    def convert(self, model: nn.Module) -> nn.Module:
        """Return the model on the device, in the dtype and layout."""
        model = model.to(self.device, self.dtype)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def cast(self, inputs: Tensor) -> Tensor:
        """Convert a batch of inputs to the layout and the type that the model takes; see `fitted`."""
        if inputs.is_floating_point():
            dtype = self.dtype
        else:
            dtype = self.whole.get(inputs.dtype) or _candidates(inputs.dtype, self.dtype)[0]
        if self.channels_last and inputs.dim() == 4:
            return inputs.to(dtype, memory_format=torch.channels_last)
        return inputs.to(dtype) if inputs.dtype != dtype else inputs

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of a forward pass."""
        return torch.autocast(self.device.type, self.mixed) if self.mixed else contextlib.nullcontext()


SMALL = (torch.uint8, torch.int8, torch.int16, torch.uint16)


def _candidates(dtype: torch.dtype, floating: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the types that a model may expect for integer inputs, the likeliest first.

    Small integers are probably pixels or audio samples, larger ones token numbers of an embedding, which takes int64.
    Complex numbers are unchanged.
    """
    if dtype in SMALL:
        return floating, torch.int64
    return (dtype,) if dtype.is_complex else (dtype, torch.int64, floating)


def fitted(numerics: Numerics, inputs: Any, run: Callable[[Numerics], object]) -> Numerics:
    """Run a model to find the numerics that cast integer inputs to the types it takes.

    Args:
        inputs: some samples after the data's transform.
        run: runs the model on them, cast by the given numerics.
    """
    dtypes = {each.dtype for each in tree_leaves(inputs) if isinstance(each, Tensor) and not each.is_floating_point()}
    for choice in product(
        *([(dtype, to) for to in _candidates(dtype, numerics.dtype)] for dtype in sorted(dtypes, key=str))
    ):
        chosen = replace(numerics, whole=dict(choice))
        with contextlib.suppress(Exception):
            run(chosen)
            return chosen
    return numerics


def numerics_of(config: Config, device: torch.device) -> Numerics:
    """Return the numerics of a config's ``precision`` and ``channels_last``, and set torch's switches for TF32."""
    precision = config["precision"]
    # By default, torch lets convolutions round to TF32.
    _allow_tf32(precision == "tf32" and device.type == "cuda")
    dtype = torch.float64 if precision == "fp64" else torch.float32
    return Numerics(device, dtype, MIXED.get(precision), precision == "fp16", config["channels_last"])


def _allow_tf32(allowed: bool) -> None:
    """Set torch's older and newer switches to the same value; otherwise torch.compile and torch.export raise."""
    # These two also set the newer switches, but those of cudnn to "none" instead of "ieee".
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    gpu, cpu = cast(Any, torch.backends.cudnn), cast(Any, torch.backends.mkldnn)
    for operation in (gpu.conv, gpu.rnn):
        operation.fp32_precision = "tf32" if allowed else "ieee"
    for operation in (cpu.matmul, cpu.conv, cpu.rnn):
        operation.fp32_precision = "ieee"
