"""Activations by name, and perceptrons of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
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


def perceptron(sizes: Sequence[int], name: str) -> nn.Sequential:
    """Build linear layers of `sizes`, from inputs to scores, with the activation between each two."""
    from torch import nn

    *hidden, last = pairwise(sizes)
    layers = [layer for pair in hidden for layer in (nn.Linear(*pair), activation(name))]
    return nn.Sequential(*layers, nn.Linear(*last))
