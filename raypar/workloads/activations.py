"""Activations by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

# Names of torch.nn classes, not the classes: a study file that loads this must not wait for torch.
ACTIVATIONS: Mapping[str, str] = {
    "relu": "ReLU",
    "leaky_relu": "LeakyReLU",
    "elu": "ELU",
    "gelu": "GELU",
    "silu": "SiLU",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
}


def activation(name: str) -> nn.Module:
    """Return the activation as a layer with torch's default settings; it keeps the shape of its input."""
    from torch import nn

    layer: nn.Module = getattr(nn, ACTIVATIONS[name])()
    return layer
