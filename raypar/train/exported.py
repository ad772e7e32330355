"""A kept model as a module of its own, which takes samples as the data set has them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypar.study.workload import Config, Data, Workload
from raypar.train.keep import WEIGHTS_FILE
from raypar.train.numerics import Numerics, numerics_of

NUM_EXAMPLES = 4


class Whole(nn.Module):
    """The workload's transform, the cast to floats, and the model."""

    def __init__(self, model: nn.Module, data: Data, numerics: Numerics) -> None:
        super().__init__()
        self.model = model
        # What is read one by one is ready for the model.
        self._transform = data.transform if data.val is not None else None
        self._cast = numerics.cast

    def forward(self, inputs: Tensor) -> Any:
        return self.model(self._cast(self._transform(inputs) if self._transform else inputs))


@dataclass(frozen=True)
class Exported:
    """A model in evaluation mode on the CPU, some samples of the validation set, and what it makes of them.

    Attributes:
        inputs: shape ``(num, ...)``, as the data set has them.
        outputs: shape ``(num, ...)``.
    """

    module: nn.Module
    inputs: Tensor
    outputs: Tensor


def exported(workload: Workload, config: Config, model_dir: Path) -> Exported:
    """The model that a trial has kept, in full precision.

    Raises:
        OSError: the weights are not there.
        TypeError: the model gives something else than one tensor.
    """
    assert workload.model is not None and workload.data is not None
    numerics = replace(numerics_of(config, torch.device("cpu")), channels_last=False)
    data = workload.data(config)
    model = numerics.place(workload.model(config))
    model.load_state_dict(torch.load(model_dir / WEIGHTS_FILE, weights_only=True))
    # `numerics_of` sets these switches one by one, and torch.export refuses to run before they are set in one go.
    torch.backends.cudnn.allow_tf32 = False
    whole = Whole(model, data, numerics).eval()
    inputs = _examples(data)
    with torch.no_grad():
        outputs = whole(inputs)
    if not isinstance(outputs, Tensor):
        raise TypeError(f"the model gives a {type(outputs).__name__}, not a tensor")
    return Exported(whole, inputs, outputs)


def _examples(data: Data) -> Tensor:
    if data.val is not None:
        return data.val.inputs[:NUM_EXAMPLES].cpu()
    assert data.val_dataset is not None
    size = min(NUM_EXAMPLES, len(data.val_dataset))  # type: ignore[arg-type]
    return torch.stack([torch.as_tensor(data.val_dataset[i][0]) for i in range(size)])
